//! Sections: the stretches of an answer in which a model calls tools. What a form says of them, and what the forms share.

use serde_json::{Map, Value};

/// Bytes that may stand between a section's mark and what it introduces. More of them make no call. The bound keeps the reading
/// of a section linear: only what lies within it is ever read twice.
pub(super) const HEADER: usize = 256;

/// A family's way to write calls of tools.
pub(super) trait Form: Sync {
    /// What begins a section.
    fn begins(&self) -> &[&'static str];

    /// All marks that the family writes, of which a tokenizer may make special tokens.
    fn marks(&self) -> &[&'static str];

    /// Whether an answer may begin with a section that no mark announces, at a `{`.
    fn is_bare(&self) -> bool {
        false
    }

    /// Reads on in a section. `text` is what has come of it since the last call; `whole` says that no more will come because
    /// the model ended the answer. What the form decides may depend on what has come, but not on how it was cut.
    fn read(&self, text: &str, scan: &mut Scan, whole: bool) -> Step;
}

impl std::fmt::Debug for dyn Form {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.marks()).finish()
    }
}

/// What a section says next.
pub(super) enum Step {
    /// Undecided until more has come.
    More,
    /// Calls in so many bytes; the section goes on.
    Go(Vec<Written>, usize),
    /// Calls in so many bytes, with which the section ends.
    Over(Vec<Written>, usize),
    /// So many bytes, at least one, are no call; the section ends.
    Malformed(usize),
}

/// A call as it is written, without an id.
#[derive(Debug, PartialEq)]
pub(super) struct Written {
    pub(super) name: String,
    pub(super) arguments: Map<String, Value>,
}

/// How far a section is read, so that nothing is read again when more comes.
#[derive(Default)]
pub(super) struct Scan {
    /// Whether a call of this section was read.
    pub(super) has_calls: bool,
    /// Where the JSON value begins that is being read.
    pub(super) start: usize,
    /// The next byte to look at; 0 before the header is understood.
    pub(super) at: usize,
    /// Whether a value was read that is no call, so that all up to the end mark is none.
    pub(super) is_bad: bool,
    depth: usize,
    is_quoted: bool,
    is_escaped: bool,
}

/// What a scan of JSON meets.
pub(super) enum Found {
    /// Nothing yet.
    More,
    /// The end of the value.
    Value(usize),
    /// The end of the end mark, within a value or between values.
    Mark(usize),
}

impl Scan {
    /// At the beginning of what is left of a section.
    pub(super) fn after(has_calls: bool) -> Self {
        Scan {
            has_calls,
            ..Scan::default()
        }
    }

    /// Begins with the value at `start`.
    pub(super) fn begin(&mut self, start: usize) {
        (self.start, self.at) = (start, start);
    }

    /// Reads on to the end of a JSON value or to `mark`, which counts only outside of strings.
    pub(super) fn value(&mut self, text: &str, mark: Option<&str>) -> Found {
        let bytes = text.as_bytes();
        while let Some(&byte) = bytes.get(self.at) {
            if self.is_quoted {
                // JSON has no raw newline in a string. One that was never closed ends there, so that it hides no end mark.
                if byte == b'\n' || (byte == b'"' && !self.is_escaped) {
                    self.is_quoted = false;
                }
                self.is_escaped = byte == b'\\' && !self.is_escaped;
                self.at += 1;
                continue;
            }
            if let Some(mark) = mark.filter(|m| m.as_bytes()[0] == byte) {
                let rest = &bytes[self.at..];
                if rest.starts_with(mark.as_bytes()) {
                    self.at += mark.len();
                    return Found::Mark(self.at);
                }
                if mark.as_bytes().starts_with(rest) {
                    return Found::More;
                }
            }
            self.at += 1;
            match byte {
                b'"' => (self.is_quoted, self.is_escaped) = (true, false),
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Found::Value(self.at);
                    }
                }
                _ => {}
            }
        }
        Found::More
    }

    /// Reads on to the first of `marks`: where it stands, and which it is.
    pub(super) fn find<'m>(&mut self, text: &str, marks: &[&'m str]) -> Option<(usize, &'m str)> {
        let (at, mark) = search(text, self.at, marks);
        self.at = at;
        Some((at, mark?))
    }
}

/// The first of `marks` in `text` from `from` on. Without one, where the beginning of one stands at the end of `text`, or its end.
pub(super) fn search<'m>(text: &str, from: usize, marks: &[&'m str]) -> (usize, Option<&'m str>) {
    let bytes = text.as_bytes();
    for at in from..bytes.len() {
        let rest = &bytes[at..];
        for mark in marks.iter().filter(|m| m.as_bytes()[0] == rest[0]) {
            if rest.starts_with(mark.as_bytes()) {
                return (at, Some(mark));
            }
            if mark.as_bytes().starts_with(rest) {
                return (at, None);
            }
        }
    }
    (text.len(), None)
}

/// Whether `text` is the beginning of `mark` and not yet all of it.
pub(super) fn is_begun(text: &str, mark: &str) -> bool {
    text.len() < mark.len() && mark.starts_with(text)
}

/// Whether `text` begins with `mark`, or is the beginning of it.
pub(super) fn begins_or_begun(text: &str, mark: &str) -> bool {
    text.starts_with(mark) || is_begun(text, mark)
}

/// A section that lies between `begin` and `end`, all of it read at once.
pub(super) fn between(
    text: &str,
    scan: &mut Scan,
    (begin, end): (&str, &str),
    whole: bool,
    read: impl Fn(&str) -> Option<Vec<Written>>,
) -> Step {
    if scan.at == 0 {
        scan.at = begin.len();
    }
    let (body, until) = match scan.find(text, &[end]) {
        Some((at, mark)) => (&text[begin.len()..at], at + mark.len()),
        None if whole => (&text[begin.len()..], text.len()),
        None => return Step::More,
    };
    match read(body) {
        Some(calls) => Step::Over(calls, until),
        None => Step::Malformed(until),
    }
}

/// What follows a call in its section, where that is what may separate calls, or `close`, which ends the section. None at
/// anything else.
pub(super) fn after_call(
    text: &str,
    separates: impl Fn(char) -> bool,
    close: Option<&str>,
) -> Option<Step> {
    let separators = text.len() - text.trim_start_matches(separates).len();
    if separators > 0 {
        return Some(Step::Go(Vec::new(), separators));
    }
    if text.is_empty() {
        return Some(Step::More);
    }
    let close = close?;
    if text.starts_with(close) {
        return Some(Step::Over(Vec::new(), close.len()));
    }
    is_begun(text, close).then_some(Step::More)
}

/// The call that a JSON object describes.
pub(super) fn call_of(value: Value) -> Option<Written> {
    let Value::Object(mut object) = value else {
        return None;
    };
    // OpenAI's form, which some models know: {"type": "function", "function": {"name": ..., "arguments": ...}}.
    if let Some(Value::Object(function)) = object.get_mut("function") {
        object = std::mem::take(function);
    }
    let name = ["name", "tool_name"]
        .iter()
        .find_map(|key| object.get(*key)?.as_str())?
        .to_owned();
    let arguments = ["arguments", "parameters"]
        .iter()
        .find_map(|key| object.remove(*key));
    written(&name, arguments_of(arguments)?)
}

/// The call of `name`, if that can be one.
pub(super) fn written(name: &str, arguments: Map<String, Value>) -> Option<Written> {
    let name = name.trim();
    let is_name = !name.is_empty() && !name.contains(char::is_whitespace);
    is_name.then(|| Written {
        name: name.to_owned(),
        arguments,
    })
}

/// Arguments as an object, also one that is written into a string; none at all are an empty one.
pub(super) fn arguments_of(value: Option<Value>) -> Option<Map<String, Value>> {
    match value {
        None | Some(Value::Null) => Some(Map::new()),
        Some(Value::Object(map)) => Some(map),
        Some(Value::String(text)) if text.trim().is_empty() => Some(Map::new()),
        Some(Value::String(text)) => serde_json::from_str(&text).ok(),
        Some(_) => None,
    }
}
