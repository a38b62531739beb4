//! Mistral: `[TOOL_CALLS]` and then a list of objects (up to Small 3.1), or a name and its arguments (`[TOOL_CALLS]name{...}`),
//! between them `[ARGS]` (Devstral, Magistral 2509, Ministral 3) or `[CALL_ID]`, an id and `[ARGS]` (Small 3.2).

use super::json::Json;
use super::section::{
    Found, HEADER, Piece, Scan, SectionStep, ToolCallForm, Written, WrittenCall, arguments_of,
    written,
};

const BEGIN: &str = "[TOOL_CALLS]";
const CALL_ID: &str = "[CALL_ID]";
const ARGS: &str = "[ARGS]";

static JSON: Json = Json::after(&[BEGIN]);

/// Calls of one generation of models. All of them are read alike.
pub(super) struct Mistral {
    written: WrittenCall,
}

/// A name, an id and arguments.
pub(super) static WITH_ID: Mistral = Mistral {
    written: WrittenCall {
        before_name: &[Piece::Text(BEGIN)],
        quotes_name: false,
        before_arguments: &[Piece::Text(CALL_ID), Piece::Pattern(ID), Piece::Text(ARGS)],
        after: &[],
    },
};

/// A name and arguments.
pub(super) static WITH_NAME: Mistral = Mistral {
    written: WrittenCall {
        before_name: &[Piece::Text(BEGIN)],
        quotes_name: false,
        before_arguments: &[Piece::Text(ARGS)],
        after: &[],
    },
};

/// A list of objects.
pub(super) static LIST: Mistral = Mistral {
    written: WrittenCall {
        before_name: &[
            Piece::Text(BEGIN),
            Piece::Optional(" "),
            Piece::Text("[{\"name\": "),
        ],
        quotes_name: true,
        before_arguments: &[Piece::Text(", \"arguments\": ")],
        after: &[
            Piece::Text(", \"id\": \""),
            Piece::Pattern(ID),
            Piece::Text("\"}]"),
        ],
    },
};

/// The ids of calls.
const ID: &str = "[a-zA-Z0-9]{9}";

impl ToolCallForm for Mistral {
    fn begins(&self) -> &[&'static str] {
        &[BEGIN]
    }

    fn marks(&self) -> &[&'static str] {
        &[BEGIN, CALL_ID, ARGS]
    }

    fn written(&self) -> &[WrittenCall] {
        std::slice::from_ref(&self.written)
    }

    fn read(&self, text: &str, scan: &mut Scan, whole: bool) -> SectionStep {
        let body = text.get(BEGIN.len()..).unwrap_or_default().trim_start();
        // Only a list continues after its first call: another name has a mark of its own.
        if scan.has_calls || body.starts_with(['[', '{']) {
            return JSON.read(text, scan, whole);
        }
        if scan.at == 0 {
            let Some(at) = text.find('{').filter(|&at| at <= HEADER) else {
                return match text.len() > HEADER {
                    true => SectionStep::Malformed(BEGIN.len()),
                    false => SectionStep::More,
                };
            };
            scan.begin(at);
        }
        match scan.value(text, None) {
            Found::Value(until) => {
                match call(&text[BEGIN.len()..scan.start], &text[scan.start..until]) {
                    Some(call) => SectionStep::Over(vec![call], until),
                    None => SectionStep::Malformed(until),
                }
            }
            Found::Mark(_) | Found::More => SectionStep::More,
        }
    }
}

fn call(head: &str, arguments: &str) -> Option<Written> {
    let head = head.trim().strip_suffix(ARGS).unwrap_or(head);
    let name = head.split_once(CALL_ID).map_or(head, |(name, _)| name);
    written(
        name,
        arguments_of(Some(serde_json::from_str(arguments).ok()?))?,
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::{call, content, parsed};
    use super::*;

    #[test]
    fn a_list() {
        let answer = "[TOOL_CALLS] [{\"name\": \"get_current_weather\", \"arguments\": {\"location\": \"Paris, France\", \
            \"format\": \"celsius\"}, \"id\": \"VvvODy9mT\"}, {\"name\": \"now\", \"arguments\": {}}]";
        let calls = [
            call(
                0,
                "get_current_weather",
                r#"{"location": "Paris, France", "format": "celsius"}"#,
            ),
            call(1, "now", "{}"),
        ];
        assert_eq!(parsed(&LIST, answer), calls);
    }

    #[test]
    fn names() {
        let answer = "I look.[TOOL_CALLS]weather[ARGS]{\"city\": \"Oslo\"}\
            [TOOL_CALLS]now{}[TOOL_CALLS]day[CALL_ID]VvvODy9mT[ARGS]{\"n\": 2}";
        let events = [
            content("I look."),
            call(0, "weather", r#"{"city": "Oslo"}"#),
            call(1, "now", "{}"),
            call(2, "day", r#"{"n": 2}"#),
        ];
        assert_eq!(parsed(&LIST, answer), events);
    }

    #[test]
    fn text_that_is_not_a_call_stays_content() {
        let long = format!("[TOOL_CALLS]{} {{}}", "x".repeat(400));
        for answer in [
            "[TOOL_CALLS]two words{}",
            "[TOOL_CALLS]f{\"a\": }",
            "[TOOL_CALLS][{\"id\": 3}]",
            "[TOOL_CALLS]",
            "[TOOL_CALLS][]",
            "[TOOL_CALLS]f",
            &long,
        ] {
            assert_eq!(parsed(&LIST, answer), [content(answer)], "{answer}");
        }
    }
}
