//! Calls as tags, one for the function and one for each parameter: Qwen3-Coder, Qwen 3.5 and Nemotron 3 within `<tool_call>`,
//! which Qwen3-Coder at times leaves out, and Seed-OSS within `<seed:tool_call>`.

use serde_json::{Map, Value};

use super::section::{
    HEADER, Scan, SectionStep, ToolCallForm, Written, after_call, begins_or_begun, between, written,
};

const FUNCTION: [&str; 2] = ["<function=", "</function>"];
const PARAMETER: [&str; 2] = ["<parameter=", "</parameter>"];

/// Functions between two marks, or without marks.
pub(super) struct Xml {
    begins: [&'static str; 2],
    marks: [&'static str; 2],
}

pub(super) static QWEN_CODER: Xml = Xml {
    begins: ["<tool_call>", FUNCTION[0]],
    marks: ["<tool_call>", "</tool_call>"],
};
pub(super) static SEED: Xml = Xml {
    begins: ["<seed:tool_call>", FUNCTION[0]],
    marks: ["<seed:tool_call>", "</seed:tool_call>"],
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
        if scan.has_calls {
            // A closing mark without an opening one.
            return after_call(text, char::is_whitespace, Some(end))
                .unwrap_or(SectionStep::Over(Vec::new(), 0));
        }
        if text.starts_with(FUNCTION[0]) {
            return match between(text, scan, (FUNCTION[0], FUNCTION[1]), whole, |body| {
                Some(vec![function(body)?])
            }) {
                SectionStep::Over(calls, until) => SectionStep::Go(calls, until),
                step => step,
            };
        }
        if scan.at == 0 {
            let body = text[begin.len()..].trim_start();
            let is_far = text.len() - body.len() > HEADER;
            if is_far || !begins_or_begun(body, FUNCTION[0]) {
                return SectionStep::Malformed(begin.len());
            }
            if body.len() < FUNCTION[0].len() {
                return SectionStep::More;
            }
        }
        between(text, scan, (begin, end), whole, functions)
    }
}

/// The functions in the body of a frame.
fn functions(body: &str) -> Option<Vec<Written>> {
    let mut rest = body.trim();
    let mut calls = Vec::new();
    while !rest.is_empty() {
        let inner = rest.strip_prefix(FUNCTION[0])?;
        // Some models close the frame and forget the function.
        let (inner, after) = inner.split_once(FUNCTION[1]).unwrap_or((inner, ""));
        calls.push(function(inner)?);
        rest = after.trim_start();
    }
    (!calls.is_empty()).then_some(calls)
}

/// The function in `text`, from its name on.
fn function(text: &str) -> Option<Written> {
    let (name, mut rest) = text.split_once('>')?;
    let mut arguments = Map::new();
    loop {
        rest = rest.trim_start();
        if rest.is_empty() {
            return written(name, arguments);
        }
        let (key, after) = rest.strip_prefix(PARAMETER[0])?.split_once('>')?;
        let (text, after) = after.split_once(PARAMETER[1])?;
        arguments.insert(key.trim().to_owned(), value(text));
        rest = after;
    }
}

/// The value of a parameter. Strings are written without quotes and everything else as JSON, so the text alone does not distinguish "1"
/// from 1. Valid JSON is parsed as such, except for strings; objects and lists only on a single line, as templates write them: over several
/// lines they are far more often the content of a file.
fn value(text: &str) -> Value {
    let text = text.strip_prefix('\n').unwrap_or(text);
    let text = text.strip_suffix('\n').unwrap_or(text);
    match text.trim() {
        "True" => return Value::Bool(true),
        "False" => return Value::Bool(false),
        _ => {}
    }
    match serde_json::from_str(text) {
        Ok(Value::String(_)) | Err(_) => Value::from(text),
        Ok(_) if text.contains('\n') => Value::from(text),
        Ok(value) => value,
    }
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
