//! Llama 3: an answer that is an object with `name` and `parameters`, or several, which `<|python_tag|>` may announce. Llama 3.1
//! also has built-in tools, `<|python_tag|>name.call(key="value")`, and the form `<function=name>{...}</function>`.

use super::python;
use super::section::{
    Found, HEADER, Piece, Scan, SectionStep, ToolCallForm, Written, WrittenCall, after_call,
    arguments_of, begins_or_begun, between, call_of, is_begun, written,
};

const TAG: &str = "<|python_tag|>";
const FUNCTION: [&str; 2] = ["<function=", "</function>"];

/// Keys that a call may begin with. Any other object is an answer, which is not held back.
const KEYS: [&str; 5] = [
    "\"name\"",
    "\"type\"",
    "\"function\"",
    "\"parameters\"",
    "\"arguments\"",
];

pub(super) struct Llama;

impl ToolCallForm for Llama {
    fn begins(&self) -> &[&'static str] {
        &[TAG, FUNCTION[0]]
    }

    fn marks(&self) -> &[&'static str] {
        &[TAG]
    }

    fn is_bare(&self) -> bool {
        true
    }

    fn written(&self) -> &[WrittenCall] {
        &[
            WrittenCall {
                before_name: &[
                    Piece::Optional(TAG),
                    // 3.1 also writes a type first.
                    Piece::Pattern(r#"\{ ?("type": ?"function", ?)?"name": ?"#),
                ],
                quotes_name: true,
                before_arguments: &[Piece::Pattern(r#", ?"parameters": ?"#)],
                after: &[Piece::Pattern(" ?\\}")],
            },
            WrittenCall {
                before_name: &[Piece::Text(FUNCTION[0])],
                quotes_name: false,
                before_arguments: &[Piece::Text(">")],
                after: &[Piece::Text(FUNCTION[1])],
            },
        ]
    }

    /// An answer that begins as an object is taken for a call.
    fn is_held_from(&self, text: &str) -> bool {
        [TAG, FUNCTION[0], "{"]
            .iter()
            .any(|begin| text.starts_with(begin))
    }

    fn read(&self, text: &str, scan: &mut Scan, whole: bool) -> SectionStep {
        if scan.at == 0 && scan.has_calls {
            let separates = |c: char| c.is_whitespace() || c == ';';
            if let Some(step) = after_call(text, separates, None) {
                return step;
            }
            if is_begun(text, TAG) {
                return SectionStep::More;
            }
            if !text.starts_with('{') && !text.starts_with(TAG) {
                return SectionStep::Over(Vec::new(), 0);
            }
        }
        if text.starts_with(FUNCTION[0]) {
            return between(text, scan, (FUNCTION[0], FUNCTION[1]), whole, function);
        }
        if scan.at == 0 {
            let body = text.strip_prefix(TAG).unwrap_or(text).trim_start();
            let at = text.len() - body.len();
            if at > HEADER {
                return SectionStep::Malformed(TAG.len());
            }
            if body.is_empty() {
                return SectionStep::More;
            }
            if !body.starts_with('{') {
                return python(text, body, whole);
            }
            let key = body[1..].trim_start();
            if body.len() - key.len() > HEADER || !KEYS.iter().any(|k| begins_or_begun(key, k)) {
                return SectionStep::Malformed(at + 1);
            }
            if KEYS.iter().any(|k| is_begun(key, k)) {
                return SectionStep::More;
            }
            scan.begin(at);
        }
        match scan.value(text, None) {
            Found::Value(until) => match object(&text[scan.start..until]) {
                Some(call) => SectionStep::Go(vec![call], until),
                None => SectionStep::Malformed(until),
            },
            Found::Mark(_) | Found::More => SectionStep::More,
        }
    }
}

/// The call in an object. An object without arguments is no call, because it may just as well be an answer in JSON.
fn object(text: &str) -> Option<Written> {
    let value: serde_json::Value = serde_json::from_str(text).ok()?;
    let inner = value.get("function").unwrap_or(&value);
    let has_arguments = inner.get("parameters").or(inner.get("arguments")).is_some();
    has_arguments.then(|| call_of(value))?
}

/// Code after the tag. No mark ends it, so it is held back until the end of the answer.
fn python(text: &str, body: &str, whole: bool) -> SectionStep {
    if !whole {
        return SectionStep::More;
    }
    let Some(mut calls) = python::calls(body) else {
        return SectionStep::Malformed(text.len());
    };
    for call in &mut calls {
        if let Some(name) = call.name.strip_suffix(".call") {
            call.name = name.to_owned();
        }
    }
    SectionStep::Over(calls, text.len())
}

fn function(body: &str) -> Option<Vec<Written>> {
    let (name, arguments) = body.split_once('>')?;
    let arguments = serde_json::from_str(arguments.trim()).ok()?;
    Some(vec![written(name, arguments_of(Some(arguments))?)?])
}

#[cfg(test)]
mod tests {
    use super::super::tests::{call, content, parsed};
    use super::*;

    #[test]
    fn objects() {
        let one = r#"{"name": "get_weather", "parameters": {"city": "Oslo"}}"#;
        let oslo = call(0, "get_weather", r#"{"city": "Oslo"}"#);
        let now = call(1, "now", "{}");
        for (answer, calls) in [
            (one.to_owned(), vec![oslo.clone()]),
            (format!("\n\n <|python_tag|>{one}\n"), vec![oslo.clone()]),
            (
                format!("{one}; {{\"name\": \"now\", \"parameters\": {{}}}}"),
                vec![oslo.clone(), now.clone()],
            ),
            (
                format!("{one}\n<|python_tag|>{{\"name\": \"now\", \"arguments\": \"\"}}"),
                vec![oslo, now],
            ),
        ] {
            assert_eq!(parsed(&Llama, &answer), calls, "{answer}");
        }
    }

    #[test]
    fn functions() {
        // The example of Meta's prompt guide for 3.1.
        let answer =
            "<function=example_function_name>{\"example_name\": \"example_value\"}</function>";
        assert_eq!(
            parsed(&Llama, answer),
            [call(
                0,
                "example_function_name",
                r#"{"example_name": "example_value"}"#
            )]
        );
    }

    #[test]
    fn built_in_tools() {
        let answer = "<|python_tag|>brave_search.call(query=\"current weather in Menlo Park\")";
        let query = r#"{"query": "current weather in Menlo Park"}"#;
        assert_eq!(parsed(&Llama, answer), [call(0, "brave_search", query)]);
    }

    #[test]
    fn an_answer_in_json_stays() {
        for answer in [
            r#"{"name": "Bob", "age": 3}"#,
            r#"{"city": {"name": "Oslo"}}"#,
            "{}",
            "{ not JSON",
            "{\"name\": \"f\", \"parameters\": {",
            r#"Like {"name": "f", "parameters": {}}"#,
            "<|python_tag|>import math\nprint(math.pi)",
            "<function=f>{</function>",
        ] {
            assert_eq!(parsed(&Llama, answer), [content(answer)], "{answer}");
        }
    }
}
