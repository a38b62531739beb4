//! DeepSeek: calls in a frame of special tokens. V3 and R1 write `function`, a separator, the name and the arguments as a block
//! of JSON; V3.1 writes the name, a separator and the arguments.

use serde_json::Value;

use super::section::{
    Piece, Scan, SectionStep, ToolCallForm, Written, WrittenCall, after_call, arguments_of,
    is_begun, written,
};

const BEGINS: [&str; 2] = ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"];
const ENDS: [&str; 2] = ["<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>"];
const SEPARATOR: &str = "<｜tool▁sep｜>";

/// Calls of one generation of models. All of them are read alike.
pub(super) struct DeepSeek {
    written: WrittenCall,
}

/// V3 and R1.
pub(super) static WITH_BLOCKS: DeepSeek = DeepSeek {
    written: WrittenCall {
        before_name: &[
            Piece::Optional(BEGINS[0]),
            Piece::Text(BEGINS[1]),
            Piece::Text("function"),
            Piece::Text(SEPARATOR),
        ],
        quotes_name: false,
        before_arguments: &[Piece::Text("\n```json\n")],
        after: &[Piece::Text("\n```"), Piece::Text(ENDS[1])],
    },
};

/// V3.1.
pub(super) static PLAIN: DeepSeek = DeepSeek {
    written: WrittenCall {
        before_name: &[Piece::Optional(BEGINS[0]), Piece::Text(BEGINS[1])],
        quotes_name: false,
        before_arguments: &[Piece::Text(SEPARATOR)],
        after: &[Piece::Text(ENDS[1])],
    },
};

impl ToolCallForm for DeepSeek {
    fn begins(&self) -> &[&'static str] {
        &BEGINS
    }

    fn marks(&self) -> &[&'static str] {
        &[BEGINS[0], BEGINS[1], ENDS[0], ENDS[1], SEPARATOR]
    }

    fn ends(&self) -> &[&'static str] {
        &ENDS
    }

    fn written(&self) -> &[WrittenCall] {
        std::slice::from_ref(&self.written)
    }

    fn read(&self, text: &str, scan: &mut Scan, whole: bool) -> SectionStep {
        if scan.at == 0 && scan.has_calls {
            if let Some(step) = after_call(text, char::is_whitespace, Some(ENDS[0])) {
                return step;
            }
            if is_begun(text, BEGINS[1]) {
                return SectionStep::More;
            }
            if !text.starts_with(BEGINS[1]) {
                return SectionStep::Over(Vec::new(), 0);
            }
        }
        match scan.find(text, &ENDS) {
            Some((at, mark)) => match call(&text[..at]) {
                Some(call) if mark == ENDS[1] => SectionStep::Go(vec![call], at + mark.len()),
                Some(call) => SectionStep::Over(vec![call], at + mark.len()),
                None => SectionStep::Malformed(at + mark.len()),
            },
            None if whole => match call(text) {
                Some(call) => SectionStep::Over(vec![call], text.len()),
                None => SectionStep::More,
            },
            None => SectionStep::More,
        }
    }
}

/// The call in `text`, which begins with at least one of the marks.
fn call(text: &str) -> Option<Written> {
    let text = text.strip_prefix(BEGINS[0]).unwrap_or(text).trim_start();
    let (head, tail) = text.strip_prefix(BEGINS[1])?.split_once(SEPARATOR)?;
    let tail = tail.trim();
    let (name, arguments) = match tail.split_once("```") {
        Some((name, block)) if !tail.starts_with('{') => {
            let block = block.strip_prefix("json").unwrap_or(block);
            (name, block.strip_suffix("```").unwrap_or(block))
        }
        _ => (head, tail),
    };
    let arguments = serde_json::from_str::<Value>(arguments).ok()?;
    written(name, arguments_of(Some(arguments))?)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{call, content, parsed};
    use super::*;

    #[test]
    fn v3_and_r1() {
        let answer = "Let me see.\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n\
            {\"city\": \"杭州\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```\
            <｜tool▁call▁end｜><｜tool▁calls▁end｜>";
        let events = [
            content("Let me see."),
            call(0, "get_weather", r#"{"city": "杭州"}"#),
            call(1, "now", "{}"),
        ];
        assert_eq!(parsed(&PLAIN, answer), events);
    }

    #[test]
    fn v3_1() {
        let answer = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"a ```b``` c\"}<｜tool▁call▁end｜>\
            <｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
        let calls = [
            call(0, "get_weather", r#"{"city": "a ```b``` c"}"#),
            call(1, "now", "{}"),
        ];
        assert_eq!(parsed(&PLAIN, answer), calls);
    }

    #[test]
    fn without_its_end_and_without_sense() {
        let open = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}";
        assert_eq!(parsed(&PLAIN, open), [call(0, "now", "{}")]);
        for answer in [
            "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>now{}<｜tool▁call▁end｜> or",
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{\"a\"}<｜tool▁call▁end｜>",
        ] {
            assert_eq!(parsed(&PLAIN, answer), [content(answer)], "{answer}");
        }
    }
}
