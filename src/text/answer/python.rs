//! Calls as Python writes them: `name(key=value, ...)`, one or a list. LFM2 writes them between special tokens. Gemma 3 has no
//! form of its own: its templates read no tools, and Google's guide to function calling has the prompt define one. Templates made
//! for it commonly ask for a block of `tool_code`.

use serde_json::{Map, Value};

use super::cursor::{Cursor, DEPTH};
use super::section::{Scan, SectionStep, ToolCallForm, Written, between, written};

/// Python between a mark and another.
pub(super) struct Python {
    marks: [&'static str; 2],
}

pub(super) static LFM2: Python = Python {
    marks: ["<|tool_call_start|>", "<|tool_call_end|>"],
};
pub(super) static TOOL_CODE: Python = Python {
    marks: ["```tool_code", "```"],
};

impl ToolCallForm for Python {
    fn begins(&self) -> &[&'static str] {
        &self.marks[..1]
    }

    fn marks(&self) -> &[&'static str] {
        &self.marks
    }

    fn ends(&self) -> &[&'static str] {
        &self.marks[1..]
    }

    fn read(&self, text: &str, scan: &mut Scan, whole: bool) -> SectionStep {
        between(text, scan, (self.marks[0], self.marks[1]), whole, calls)
    }
}

/// The calls in `text`, if it consists of calls.
pub(super) fn calls(text: &str) -> Option<Vec<Written>> {
    let mut cursor = Cursor::new(text);
    let is_list = cursor.eat("[");
    let mut calls = Vec::new();
    loop {
        if cursor.is_at_end() || (is_list && cursor.eat("]")) {
            break;
        }
        calls.push(call(&mut cursor)?);
        while cursor.eat(",") || cursor.eat(";") {}
    }
    (cursor.is_at_end() && !calls.is_empty()).then_some(calls)
}

fn call(cursor: &mut Cursor<'_>) -> Option<Written> {
    let mut name = cursor.name()?;
    let is_printed = name == "print";
    if is_printed {
        name = cursor.eat("(").then(|| cursor.name())??;
    }
    let mut arguments = Map::new();
    if !cursor.eat("(") {
        return None;
    }
    while !cursor.eat(")") {
        let key = cursor.name()?;
        if !cursor.eat("=") {
            return None;
        }
        arguments.insert(key.to_owned(), value(cursor, DEPTH)?);
        if !cursor.eat(",") && !cursor.rest.starts_with(')') {
            return None;
        }
    }
    if is_printed && !cursor.eat(")") {
        return None;
    }
    written(name, arguments)
}

fn value(cursor: &mut Cursor<'_>, depth: usize) -> Option<Value> {
    let depth = depth.checked_sub(1)?;
    for quote in ["\"\"\"", "'''", "\"", "'"] {
        if cursor.eat(quote) {
            return string(cursor, quote).map(Value::String);
        }
    }
    for (open, close) in [("[", "]"), ("(", ")")] {
        if cursor.eat(open) {
            let mut list = Vec::new();
            while !cursor.eat(close) {
                list.push(value(cursor, depth)?);
                if !cursor.eat(",") && !cursor.rest.starts_with(close) {
                    return None;
                }
            }
            return Some(Value::Array(list));
        }
    }
    if !cursor.eat("{") {
        return cursor.word();
    }
    let mut map = Map::new();
    while !cursor.eat("}") {
        let Value::String(key) = value(cursor, depth)? else {
            return None;
        };
        if !cursor.eat(":") {
            return None;
        }
        map.insert(key, value(cursor, depth)?);
        if !cursor.eat(",") && !cursor.rest.starts_with('}') {
            return None;
        }
    }
    Some(Value::Object(map))
}

/// A string up to `quote`.
fn string(cursor: &mut Cursor<'_>, quote: &str) -> Option<String> {
    let mut out = String::new();
    loop {
        if let Some(rest) = cursor.rest.strip_prefix(quote) {
            cursor.rest = rest;
            return Some(out);
        }
        let mut chars = cursor.rest.chars();
        let char = chars.next()?;
        let escaped = (char == '\\').then(|| chars.next()).flatten();
        cursor.rest = chars.as_str();
        match escaped {
            None => out.push(char),
            Some('n') => out.push('\n'),
            Some('t') => out.push('\t'),
            Some('r') => out.push('\r'),
            Some(kind @ ('x' | 'u')) => {
                let digits = cursor.rest.get(..if kind == 'x' { 2 } else { 4 })?;
                cursor.rest = &cursor.rest[digits.len()..];
                out.push(char::from_u32(u32::from_str_radix(digits, 16).ok()?)?);
            }
            Some(same @ ('\\' | '\'' | '"')) => out.push(same),
            // Python joins a line that ends with a backslash to the next.
            Some('\n') => {}
            Some(other) => out.extend(['\\', other]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{call, content, parsed};
    use super::*;

    #[test]
    fn lfm2() {
        // Liquid's example, and a second call.
        let answer = "<|tool_call_start|>[get_candidate_status(candidate_id=\"12345\"), \
            f(a=-1.5, b=[True, None], c={'d': 'it\\'s'},)]\
            <|tool_call_end|>Checking the current status of candidate ID 12345.";
        let events = [
            call(0, "get_candidate_status", r#"{"candidate_id": "12345"}"#),
            call(
                1,
                "f",
                r#"{"a": -1.5, "b": [true, null], "c": {"d": "it's"}}"#,
            ),
            content("Checking the current status of candidate ID 12345."),
        ];
        assert_eq!(parsed(&LFM2, answer), events);
    }

    #[test]
    fn tool_code() {
        let answer =
            "Sure.\n```tool_code\nprint(convert(amount=200.0, currency=\"EUR\\u20ac\"))\n```\n";
        let events = [
            content("Sure."),
            call(0, "convert", r#"{"amount": 200.0, "currency": "EUR€"}"#),
        ];
        assert_eq!(parsed(&TOOL_CODE, answer), events);
    }

    #[test]
    fn other_code_is_no_call() {
        for answer in [
            "```tool_code\nimport os\n```",
            "```tool_code\nf(1)\n```",
            "```tool_code\nf(a='open)\n```",
            "```tool_code\n```",
            &format!("```tool_code\nf(a={})\n```", "[".repeat(9000)),
        ] {
            assert_eq!(parsed(&TOOL_CODE, answer), [content(answer)]);
        }
    }
}
