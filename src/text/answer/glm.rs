//! Calls of GLM-4.5 and later: `<tool_call>NAME`, then a pair of tags for each argument. Later versions leave out the newlines between them.

use serde_json::Map;

use super::section::{
    HEADER, Scan, SectionStep, ToolCallForm, Written, argument, between, written,
};

const KEY: [&str; 2] = ["<arg_key>", "</arg_key>"];
const VALUE: [&str; 2] = ["<arg_value>", "</arg_value>"];
const MARKS: [&str; 6] = [
    "<tool_call>",
    KEY[0],
    KEY[1],
    VALUE[0],
    VALUE[1],
    "</tool_call>",
];

pub(super) struct Glm;

impl ToolCallForm for Glm {
    fn begins(&self) -> &[&'static str] {
        &MARKS[..1]
    }

    fn marks(&self) -> &[&'static str] {
        &MARKS
    }

    fn ends(&self) -> &[&'static str] {
        &MARKS[5..]
    }

    fn read(&self, text: &str, scan: &mut Scan, whole: bool) -> SectionStep {
        let (begin, end) = (MARKS[0], MARKS[5]);
        if scan.at == 0 {
            let body = text[begin.len()..].trim_start();
            let name = &body[..name_length(body)];
            let is_far = text.len() - body.len() + name.len() > HEADER;
            let is_name = !name.is_empty() && !name.contains(char::is_whitespace);
            if is_far || !(is_name || body.is_empty()) {
                return SectionStep::Malformed(begin.len());
            }
            if name.len() == body.len() {
                return SectionStep::More;
            }
        }
        between(text, scan, (begin, end), whole, |body| {
            Some(vec![function(body.trim())?])
        })
    }
}

/// Bytes of the name at the beginning of a call, up to a newline or a tag.
fn name_length(body: &str) -> usize {
    body.find(['\n', '<']).unwrap_or(body.len())
}

fn function(body: &str) -> Option<Written> {
    let (name, mut rest) = body.split_at(name_length(body));
    let mut arguments = Map::new();
    loop {
        rest = rest.trim_start();
        if rest.is_empty() {
            return written(name, arguments);
        }
        let (key, after) = rest.strip_prefix(KEY[0])?.split_once(KEY[1])?;
        let after = after.trim_start().strip_prefix(VALUE[0])?;
        let (text, after) = after.split_once(VALUE[1])?;
        arguments.insert(key.trim().to_owned(), argument(text));
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{call, content, parsed};
    use super::*;

    #[test]
    fn arguments_are_pairs_of_tags() {
        // As GLM-4.5's template writes calls, and GLM-4.7's.
        let arguments = r#"{"city": "Oslo", "days": 3, "note": " two\nlines"}"#;
        let answer = "I look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n\
            <arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>note</arg_key>\n<arg_value> two\nlines</arg_value>\n\
            </tool_call>";
        let events = [content("I look."), call(0, "weather", arguments)];
        assert_eq!(parsed(&Glm, answer), events);
        let answer = "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>\
            <tool_call>now</tool_call>";
        let arguments = r#"{"city": "Oslo"}"#;
        let events = [call(0, "weather", arguments), call(1, "now", "{}")];
        assert_eq!(parsed(&Glm, answer), events);
    }

    #[test]
    fn text_that_is_not_a_call_stays_content() {
        for answer in [
            "A <tool_call> is a mark",
            "<tool_call>f",
            "<tool_call>\n<arg_key>a</arg_key>",
            "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>",
        ] {
            assert_eq!(parsed(&Glm, answer), [content(answer)]);
        }
    }
}
