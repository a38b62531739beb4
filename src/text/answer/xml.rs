//! Calls as tags, one for the function and one for each parameter: Qwen3-Coder, Qwen 3.5 and Nemotron 3 within `<tool_call>`,
//! which Qwen3-Coder at times leaves out, Seed-OSS within `<seed:tool_call>`, and MiniMax-M2 within `<minimax:tool_call>`.

use serde_json::{Map, Value};

use super::section::{
    HEADER, Scan, SectionStep, ToolCallForm, Written, after_call, argument, begins_or_begun,
    between, written,
};

/// A pair of tags, the first of which has a name: what is before and after that, and the last tag.
type Tags = [&'static str; 3];

const FUNCTION: Tags = ["<function=", ">", "</function>"];
const PARAMETER: Tags = ["<parameter=", ">", "</parameter>"];
const INVOKE: Tags = ["<invoke name=\"", "\">", "</invoke>"];
const ATTRIBUTE: Tags = ["<parameter name=\"", "\">", "</parameter>"];

/// Functions between two marks, or without marks.
pub(super) struct Xml {
    begins: [&'static str; 2],
    marks: [&'static str; 2],
    function: Tags,
    parameter: Tags,
}

pub(super) static QWEN_CODER: Xml = Xml {
    begins: ["<tool_call>", FUNCTION[0]],
    marks: ["<tool_call>", "</tool_call>"],
    function: FUNCTION,
    parameter: PARAMETER,
};
pub(super) static SEED: Xml = Xml {
    begins: ["<seed:tool_call>", FUNCTION[0]],
    marks: ["<seed:tool_call>", "</seed:tool_call>"],
    ..QWEN_CODER
};
pub(super) static MINIMAX: Xml = Xml {
    begins: ["<minimax:tool_call>", INVOKE[0]],
    marks: ["<minimax:tool_call>", "</minimax:tool_call>"],
    function: INVOKE,
    parameter: ATTRIBUTE,
};

impl ToolCallForm for Xml {
    fn begins(&self) -> &[&'static str] {
        &self.begins
    }

    fn marks(&self) -> &[&'static str] {
        &self.marks
    }

    fn ends(&self) -> &[&'static str] {
        &self.marks[1..]
    }

    fn read(&self, text: &str, scan: &mut Scan, whole: bool) -> SectionStep {
        let [begin, end] = self.marks;
        let [opening, _, closing] = self.function;
        if scan.has_calls {
            // A closing mark without an opening one.
            return after_call(text, char::is_whitespace, Some(end))
                .unwrap_or(SectionStep::Over(Vec::new(), 0));
        }
        if text.starts_with(opening) {
            return match between(text, scan, (opening, closing), whole, |body| {
                Some(vec![self.function(body)?])
            }) {
                SectionStep::Over(calls, until) => SectionStep::Go(calls, until),
                step => step,
            };
        }
        if scan.at == 0 {
            let body = text[begin.len()..].trim_start();
            let is_far = text.len() - body.len() > HEADER;
            if is_far || !begins_or_begun(body, opening) {
                return SectionStep::Malformed(begin.len());
            }
            if body.len() < opening.len() {
                return SectionStep::More;
            }
        }
        between(text, scan, (begin, end), whole, |body| self.functions(body))
    }
}

impl Xml {
    /// The functions in the body of a frame.
    fn functions(&self, body: &str) -> Option<Vec<Written>> {
        let [opening, _, closing] = self.function;
        let mut rest = body.trim();
        let mut calls = Vec::new();
        while !rest.is_empty() {
            let inner = rest.strip_prefix(opening)?;
            // Some models close the frame and forget the function.
            let (inner, after) = inner.split_once(closing).unwrap_or((inner, ""));
            calls.push(self.function(inner)?);
            rest = after.trim_start();
        }
        (!calls.is_empty()).then_some(calls)
    }

    /// The function in `text`, from its name on.
    fn function(&self, text: &str) -> Option<Written> {
        let (name, mut rest) = text.split_once(self.function[1])?;
        let [opening, after_name, closing] = self.parameter;
        let mut arguments = Map::new();
        loop {
            rest = rest.trim_start();
            if rest.is_empty() {
                return written(name, arguments);
            }
            let (key, after) = rest.strip_prefix(opening)?.split_once(after_name)?;
            let (text, after) = after.split_once(closing)?;
            arguments.insert(key.trim().to_owned(), value(text));
            rest = after;
        }
    }
}

/// The value of a parameter, which may stand on lines of its own.
fn value(text: &str) -> Value {
    let text = text.strip_prefix('\n').unwrap_or(text);
    let text = text.strip_suffix('\n').unwrap_or(text);
    match text.trim() {
        "True" => return Value::Bool(true),
        "False" => return Value::Bool(false),
        _ => {}
    }
    argument(text)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{call, content, parsed};
    use super::*;

    #[test]
    fn qwen_coder() {
        // The example of Qwen3-Coder's template.
        let answer = "I call it.\n\n<tool_call>\n<function=example_function_name>\n\
            <parameter=example_parameter_1>\nvalue_1\n</parameter>\n\
            <parameter=example_parameter_2>\nThis is the value for the second parameter\n\
            that can span\nmultiple lines\n</parameter>\n\
            </function>\n</tool_call>";
        let arguments = r#"{"example_parameter_1": "value_1",
            "example_parameter_2": "This is the value for the second parameter\nthat can span\nmultiple lines"}"#;
        let events = [
            content("I call it."),
            call(0, "example_function_name", arguments),
        ];
        assert_eq!(parsed(&QWEN_CODER, answer), events);
    }

    #[test]
    fn without_its_frame() {
        let answer = "<function=f>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>\n<function=g>\n</function>";
        assert_eq!(
            parsed(&QWEN_CODER, answer),
            [call(0, "f", r#"{"n": 3}"#), call(1, "g", "{}")]
        );
    }

    #[test]
    fn seed() {
        // The example of Seed-OSS' template, shortened.
        let answer = "<seed:tool_call>\n<function=weather>\n\
            <parameter=city>Oslo</parameter>\n<parameter=on>True</parameter>\n</function>\n\
            </seed:tool_call>";
        assert_eq!(
            parsed(&SEED, answer),
            [call(0, "weather", r#"{"city": "Oslo", "on": true}"#)]
        );
    }

    #[test]
    fn minimax() {
        // As MiniMax-M2's template writes calls.
        let answer = "I look.\n<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Oslo</parameter>\n\
            <parameter name=\"days\">3</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>";
        let events = [
            content("I look."),
            call(0, "weather", r#"{"city": "Oslo", "days": 3}"#),
            call(1, "now", "{}"),
        ];
        assert_eq!(parsed(&MINIMAX, answer), events);
    }

    #[test]
    fn values() {
        for (text, expected) in [
            ("\n12\n", Value::from(12)),
            ("[1, 2]", serde_json::json!([1, 2])),
            ("{\n\"a\": 1\n}", Value::from("{\n\"a\": 1\n}")),
            ("\"quoted\"", Value::from("\"quoted\"")),
            ("\n  indented\n\n", Value::from("  indented\n")),
            ("", Value::from("")),
        ] {
            assert_eq!(value(text), expected, "{text}");
        }
    }

    #[test]
    fn text_that_is_not_a_call_stays_content() {
        for answer in [
            "A <tool_call> is a mark",
            "<tool_call>\n<function=f>\n<parameter=a>\n</function>\n</tool_call>",
            "<tool_call>\n<function=two words>\n</function>\n</tool_call>",
            "<function=f",
        ] {
            assert_eq!(parsed(&QWEN_CODER, answer), [content(answer)]);
        }
    }
}
