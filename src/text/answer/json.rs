//! Calls as JSON after a mark: an object with `name` and `arguments`, or a list of them. This is the form of the Hermes
//! models, Qwen 2.5 and 3, SmolLM3 and Granite 4 (`<tool_call>`, closed), Granite 3 (`<|tool_call|>`, a list, not closed),
//! Phi-4-mini (`<|tool_call|>`, closed), Command R7B (`<|START_ACTION|>`, a list with `tool_name` and `parameters`) and
//! Nemotron (`<TOOLCALL>`, a list).

use super::section::{
    Found, HEADER, Piece, Scan, SectionStep, ToolCallForm, WrittenCall, after_call, call_of,
};

/// JSON between marks.
pub(super) struct Json {
    marks: &'static [&'static str],
    written: &'static [WrittenCall],
}

pub(super) static HERMES: Json = Json {
    marks: &["<tool_call>", "</tool_call>"],
    written: &[WrittenCall {
        before_name: &[Piece::Text("<tool_call>"), Piece::Text("\n{\"name\": ")],
        quotes_name: true,
        before_arguments: ARGUMENTS,
        after: &[Piece::Text("}\n"), Piece::Text("</tool_call>")],
    }],
};
pub(super) static GRANITE: Json = Json {
    marks: &["<|tool_call|>"],
    written: &[WrittenCall {
        before_name: &[Piece::Text("<|tool_call|>"), LIST],
        quotes_name: true,
        before_arguments: ARGUMENTS,
        after: &[END_OF_LIST],
    }],
};
pub(super) static PHI: Json = Json {
    marks: &["<|tool_call|>", "<|/tool_call|>"],
    written: &[WrittenCall {
        before_name: &[Piece::Text("<|tool_call|>"), LIST],
        quotes_name: true,
        before_arguments: ARGUMENTS,
        after: &[END_OF_LIST, Piece::Text("<|/tool_call|>")],
    }],
};
pub(super) static COMMAND: Json = Json {
    marks: &["<|START_ACTION|>", "<|END_ACTION|>"],
    written: &[WrittenCall {
        before_name: &[
            Piece::Text("<|START_ACTION|>"),
            Piece::Text("[\n    {\"tool_call_id\": \""),
            Piece::Pattern("[0-9]{1,3}"),
            Piece::Text("\", \"tool_name\": "),
        ],
        quotes_name: true,
        before_arguments: &[Piece::Text(", \"parameters\": ")],
        after: &[Piece::Text("}\n]"), Piece::Text("<|END_ACTION|>")],
    }],
};
pub(super) static NEMOTRON: Json = Json {
    marks: &["<TOOLCALL>", "</TOOLCALL>"],
    written: &[WrittenCall {
        before_name: &[Piece::Text("<TOOLCALL>"), LIST],
        quotes_name: true,
        before_arguments: ARGUMENTS,
        after: &[END_OF_LIST, Piece::Text("</TOOLCALL>")],
    }],
};

const LIST: Piece = Piece::Text("[{\"name\": ");
const ARGUMENTS: &[Piece] = &[Piece::Text(", \"arguments\": ")];
const END_OF_LIST: Piece = Piece::Text("}]");

impl Json {
    /// JSON after a mark, in a form that writes calls in another way too.
    pub(super) const fn after(mark: &'static [&'static str; 1]) -> Self {
        Json {
            marks: mark,
            written: &[],
        }
    }
}

impl ToolCallForm for Json {
    fn begins(&self) -> &[&'static str] {
        &self.marks[..1]
    }

    fn marks(&self) -> &[&'static str] {
        self.marks
    }

    fn ends(&self) -> &[&'static str] {
        &self.marks[1..]
    }

    fn written(&self) -> &[WrittenCall] {
        self.written
    }

    fn read(&self, text: &str, scan: &mut Scan, _: bool) -> SectionStep {
        let (begin, end) = (self.marks[0], self.marks.get(1).copied());
        if scan.at == 0 && scan.has_calls {
            // Closers of the list; some models write one too many of them.
            let separates = |c: char| c.is_whitespace() || ",;]}".contains(c);
            if let Some(step) = after_call(text, separates, end) {
                return step;
            }
            if !text.starts_with('{') {
                return SectionStep::Over(Vec::new(), 0);
            }
            scan.begin(0);
        } else if scan.at == 0 {
            let body = text[begin.len()..].trim_start();
            let body = body.strip_prefix('[').unwrap_or(body).trim_start();
            let at = text.len() - body.len();
            if at > HEADER || !(body.is_empty() || body.starts_with('{')) {
                return SectionStep::Malformed(begin.len());
            }
            if body.is_empty() {
                return SectionStep::More;
            }
            scan.begin(at);
        }
        loop {
            match scan.value(text, end) {
                Found::More => return SectionStep::More,
                Found::Mark(until) => return SectionStep::Malformed(until),
                Found::Value(until) if !scan.is_bad => {
                    let value = serde_json::from_str(&text[scan.start..until]);
                    if let Some(call) = value.ok().and_then(call_of) {
                        return SectionStep::Go(vec![call], until);
                    }
                    if end.is_none() {
                        return SectionStep::Malformed(until);
                    }
                    scan.is_bad = true;
                }
                Found::Value(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{call, content, parsed};
    use super::*;

    #[test]
    fn hermes() {
        // Two calls, one after the other.
        let answer = "<tool_call>\n\
            {\"name\": \"get_current_temperature\", \"arguments\": {\"location\": \"San Francisco, CA, USA\"}}\n\
            </tool_call>\n<tool_call>\n\
            {\"name\": \"get_temperature_date\", \"arguments\": {\"location\": \"San Francisco, CA, USA\", \
            \"date\": \"2024-10-01\"}}\n</tool_call>";
        let calls = [
            call(
                0,
                "get_current_temperature",
                r#"{"location": "San Francisco, CA, USA"}"#,
            ),
            call(
                1,
                "get_temperature_date",
                r#"{"location": "San Francisco, CA, USA", "date": "2024-10-01"}"#,
            ),
        ];
        assert_eq!(parsed(&HERMES, answer), calls);
        assert_eq!(
            parsed(&HERMES, &format!("I look it up.\n\n{answer}\n")),
            [&[content("I look it up.")], &calls[..]].concat()
        );
    }

    #[test]
    fn an_end_mark_in_a_string_is_text() {
        let answer = r#"<tool_call>{"name": "write", "arguments": {"text": "a </tool_call> \"b"}}</tool_call>"#;
        let arguments = r#"{"text": "a </tool_call> \"b"}"#;
        assert_eq!(parsed(&HERMES, answer), [call(0, "write", arguments)]);
    }

    #[test]
    fn arguments_in_a_string_or_none() {
        let answer = r#"<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call><tool_call>{"name": "g"}</tool_call>
            <tool_call>{"type": "function", "function": {"name": "h", "parameters": {"b": [2]}}}</tool_call>"#;
        let calls = [
            call(0, "f", r#"{"a": 1}"#),
            call(1, "g", "{}"),
            call(2, "h", r#"{"b": [2]}"#),
        ];
        assert_eq!(parsed(&HERMES, answer), calls);
    }

    #[test]
    fn text_that_is_not_a_call_stays_content() {
        for answer in [
            "<tool_call>{\"name\": }</tool_call>",
            "<tool_call>\n{\"title\": \"no name\"}\n</tool_call> and on",
            "<tool_call>{\"name\": \"f\", \"arguments\": 3}</tool_call>",
            "<tool_call>{\"name\": \"f, \"arguments\": {}}\n</tool_call>",
            "Say <tool_call> and nothing else",
            "<tool_call></tool_call>",
            "<tool_call>[]</tool_call>",
            "<tool_call>",
        ] {
            assert_eq!(parsed(&HERMES, answer), [content(answer)], "{answer}");
        }
        let deep = format!(
            "<tool_call>{{\"name\": \"f\", \"arguments\": {}}}</tool_call>",
            "[".repeat(5000)
        );
        assert_eq!(parsed(&HERMES, &deep), [content(&deep)]);
    }

    #[test]
    fn a_brace_too_many() {
        let answer = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}}\n</tool_call>";
        assert_eq!(parsed(&HERMES, answer), [call(0, "f", "{}")]);
    }

    #[test]
    fn granite() {
        // The system prompt of Granite 3.3 asks for the mark followed by a list.
        let answer = r#"<|tool_call|>[{"name": "get_stock_price", "arguments": {"ticker": "IBM", "date": "2024-10-07"}}, {"name": "f"}]"#;
        let calls = [
            call(
                0,
                "get_stock_price",
                r#"{"ticker": "IBM", "date": "2024-10-07"}"#,
            ),
            call(1, "f", "{}"),
        ];
        assert_eq!(parsed(&GRANITE, answer), calls);
    }

    #[test]
    fn phi() {
        // The template of Phi-4-mini gives this as its example.
        let answer = r#"<|tool_call|>{"name": "foo", "arguments": {"a": 1}}<|/tool_call|>"#;
        assert_eq!(parsed(&PHI, answer), [call(0, "foo", r#"{"a": 1}"#)]);
    }

    #[test]
    fn command() {
        // As the template of Command R7B writes a turn.
        let answer = "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \
            \"tool_name\": \"day\", \"parameters\": {\"day\": \"2023-09-29\"}}\n\
            ]<|END_ACTION|>";
        assert_eq!(
            parsed(&COMMAND, answer),
            [call(0, "day", r#"{"day": "2023-09-29"}"#)]
        );
    }

    #[test]
    fn nemotron() {
        let answer = r#"<TOOLCALL>[{"name": "f", "arguments": {"x": 3.5}}]</TOOLCALL>"#;
        assert_eq!(parsed(&NEMOTRON, answer), [call(0, "f", r#"{"x": 3.5}"#)]);
    }
}
