//! Gemma's own notation, `call:name{key:value}` between special tokens, with a token around strings. FunctionGemma's is from
//! Google's page on its formatting; Gemma 4 kept it under other tokens, as its template and prompt guide say.

use serde_json::{Map, Value};

use super::cursor::{Cursor, DEPTH};
use super::section::{Scan, SectionStep, ToolCallForm, Written, between, written};

/// The marks before and after a call, and the quote of strings.
pub(super) struct Gemma {
    marks: [&'static str; 3],
}

pub(super) static FUNCTION_GEMMA: Gemma = Gemma {
    marks: ["<start_function_call>", "<end_function_call>", "<escape>"],
};
pub(super) static GEMMA4: Gemma = Gemma {
    marks: ["<|tool_call>", "<tool_call|>", "<|\"|>"],
};

impl ToolCallForm for Gemma {
    fn begins(&self) -> &[&'static str] {
        &self.marks[..1]
    }

    fn marks(&self) -> &[&'static str] {
        &self.marks
    }

    fn ends(&self) -> &[&'static str] {
        &self.marks[1..2]
    }

    fn read(&self, text: &str, scan: &mut Scan, whole: bool) -> SectionStep {
        let [begin, end, quote] = self.marks;
        between(text, scan, (begin, end), whole, |body| {
            Some(vec![call(body, quote)?])
        })
    }
}

fn call(body: &str, quote: &str) -> Option<Written> {
    let mut cursor = Cursor::new(body);
    let name = cursor.eat("call:").then(|| cursor.name())??;
    let arguments = cursor
        .eat("{")
        .then(|| object(&mut cursor, quote, DEPTH))??;
    cursor.is_at_end().then(|| written(name, arguments))?
}

/// Parses an object after its `{`.
fn object(cursor: &mut Cursor<'_>, quote: &str, depth: usize) -> Option<Map<String, Value>> {
    let mut map = Map::new();
    while !cursor.eat("}") {
        let key = match cursor.eat(quote) {
            true => cursor.until(quote)?,
            false => cursor.name()?,
        };
        if !cursor.eat(":") {
            return None;
        }
        map.insert(key.to_owned(), value(cursor, quote, depth)?);
        if !cursor.eat(",") && !cursor.rest.starts_with('}') {
            return None;
        }
    }
    Some(map)
}

fn value(cursor: &mut Cursor<'_>, quote: &str, depth: usize) -> Option<Value> {
    let depth = depth.checked_sub(1)?;
    if cursor.eat(quote) {
        return Some(Value::from(cursor.until(quote)?));
    }
    if cursor.eat("{") {
        return object(cursor, quote, depth).map(Value::Object);
    }
    if !cursor.eat("[") {
        return cursor.word();
    }
    let mut list = Vec::new();
    while !cursor.eat("]") {
        list.push(value(cursor, quote, depth)?);
        if !cursor.eat(",") && !cursor.rest.starts_with(']') {
            return None;
        }
    }
    Some(Value::Array(list))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{call, content, parsed};
    use super::*;

    #[test]
    fn function_gemma() {
        // Google's example.
        let answer = "<start_function_call>call:get_current_weather{location:<escape>Tokyo, Japan<escape>}<end_function_call>";
        let location = r#"{"location": "Tokyo, Japan"}"#;
        assert_eq!(
            parsed(&FUNCTION_GEMMA, answer),
            [call(0, "get_current_weather", location)]
        );
        let answer = "<start_function_call>call:f{n:10,on:true,list:[<escape>a}<escape>,-2.5e3],o:{k:null}}<end_function_call>\
            <start_function_call>call:g{}<end_function_call>";
        let arguments = r#"{"n": 10, "on": true, "list": ["a}", -2.5e3], "o": {"k": null}}"#;
        assert_eq!(
            parsed(&FUNCTION_GEMMA, answer),
            [call(0, "f", arguments), call(1, "g", "{}")]
        );
    }

    #[test]
    fn gemma4() {
        let answer = "<|tool_call>call:weather{city:<|\"|>Oslo<|\"|>}<tool_call|>";
        assert_eq!(
            parsed(&GEMMA4, answer),
            [call(0, "weather", r#"{"city": "Oslo"}"#)]
        );
    }

    #[test]
    fn text_that_is_not_a_call_stays_content() {
        let deep = format!(
            "<start_function_call>call:f{{a:{}<end_function_call>",
            "[".repeat(9000)
        );
        for answer in [
            "<start_function_call>get{}<end_function_call>",
            "<start_function_call>call:f{a:<escape>b}<end_function_call>",
            "<start_function_call>call:f{a b}<end_function_call>",
            &deep,
        ] {
            assert_eq!(parsed(&FUNCTION_GEMMA, answer), [content(answer)]);
        }
    }
}
