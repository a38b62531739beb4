//! Sections: the parts of an answer in which a model calls tools. Defines the interface of a form, and has the code that forms share.

use serde_json::{Map, Value};

/// The most bytes between a section's mark and the call; with more there is no call. The bound keeps parsing linear: only
/// bytes within it are ever read twice.
pub(super) const HEADER: usize = 256;

/// A family's form of tool calls.
pub(super) trait ToolCallForm: Sync {
    /// The marks that begin a section.
    fn begins(&self) -> &[&'static str];

    /// All marks of the family, which may be special tokens of a tokenizer.
    fn marks(&self) -> &[&'static str];

    /// The marks after a call, or after a section.
    fn ends(&self) -> &[&'static str] {
        &[]
    }

    /// Whether an answer may begin with a section without a mark, at a `{`.
    fn is_bare(&self) -> bool {
        false
    }

    /// How one call is written from its mark on, for a form whose arguments are JSON; none for other forms.
    fn written(&self) -> &[WrittenCall] {
        &[]
    }

    /// Whether the text of a section or of a header, as far as it is there, begins a call that can be held to a grammar.
    fn is_held_from(&self, text: &str) -> bool {
        self.begins().iter().any(|mark| text.starts_with(mark))
    }

    /// Continues parsing a section. `text` is its unparsed text so far; `whole` says that it is complete because the model
    /// has ended the answer. The result may depend on the text, but not on how it was split into pieces.
    fn read(&self, text: &str, scan: &mut Scan, whole: bool) -> SectionStep;
}

impl std::fmt::Debug for dyn ToolCallForm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.marks()).finish()
    }
}

/// The next step in a section.
pub(super) enum SectionStep {
    /// Undecided until there is more text.
    More,
    /// Calls in this many bytes; the section continues.
    Go(Vec<Written>, usize),
    /// Calls in this many bytes, after which the section ends.
    Over(Vec<Written>, usize),
    /// This many bytes, at least one, are not a call; the section ends.
    Malformed(usize),
}

/// A piece of a written call besides its name and its arguments.
#[derive(Clone, Copy, Debug)]
pub(super) enum Piece {
    /// A mark or a text.
    Text(&'static str),
    /// A mark or a text that may be missing.
    Optional(&'static str),
    /// A text that a regular expression fits.
    Pattern(&'static str),
}

/// How a model writes one call with the mark of its section, around the name and the arguments as JSON.
#[derive(Clone, Copy, Debug)]
pub(super) struct WrittenCall {
    pub(super) before_name: &'static [Piece],
    /// Whether the name stands in quotation marks.
    pub(super) quotes_name: bool,
    pub(super) before_arguments: &'static [Piece],
    pub(super) after: &'static [Piece],
}

/// A call without an id, as it is parsed.
#[derive(Debug, PartialEq)]
pub(super) struct Written {
    pub(super) name: String,
    pub(super) arguments: Map<String, Value>,
}

/// Parser state of a section, so that nothing is parsed again when more text arrives.
#[derive(Default)]
pub(super) struct Scan {
    /// Whether a call of this section was read.
    pub(super) has_calls: bool,
    /// The start of the JSON value that is being parsed.
    pub(super) start: usize,
    /// The next byte to read; 0 before the header is parsed.
    pub(super) at: usize,
    /// Whether a value was no call, so that nothing up to the end mark is one.
    pub(super) is_bad: bool,
    depth: usize,
    is_quoted: bool,
    is_escaped: bool,
}

/// The result of a scan of JSON.
pub(super) enum Found {
    /// Nothing yet.
    More,
    /// The end of the value.
    Value(usize),
    /// The end of the end mark, within a value or between values.
    Mark(usize),
}

impl Scan {
    /// The state at the beginning of the rest of a section.
    pub(super) fn after(has_calls: bool) -> Self {
        Scan {
            has_calls,
            ..Scan::default()
        }
    }

    /// Begins a value at `start`.
    pub(super) fn begin(&mut self, start: usize) {
        (self.start, self.at) = (start, start);
    }

    /// Reads on to the end of a JSON value or to `mark`, which counts only outside of strings.
    pub(super) fn value(&mut self, text: &str, mark: Option<&str>) -> Found {
        let bytes = text.as_bytes();
        while let Some(&byte) = bytes.get(self.at) {
            if self.is_quoted {
                // JSON has no raw newlines in strings. A string that was never closed ends there, so that it does not hide an end mark.
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

    /// Finds the first of `marks`: its position, and the mark.
    pub(super) fn find<'m>(&mut self, text: &str, marks: &[&'m str]) -> Option<(usize, &'m str)> {
        let (at, mark) = search(text, self.at, marks);
        self.at = at;
        Some((at, mark?))
    }
}

/// The first of `marks` in `text` from `from` on. If there is none, the position of a partial mark at the end of `text`, or else the end of
/// `text`.
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

/// Whether `text` is a proper prefix of `mark`.
pub(super) fn is_begun(text: &str, mark: &str) -> bool {
    text.len() < mark.len() && mark.starts_with(text)
}

/// Whether `text` begins with `mark`, or is a prefix of it.
pub(super) fn begins_or_begun(text: &str, mark: &str) -> bool {
    text.starts_with(mark) || is_begun(text, mark)
}

/// Parses a section between `begin` and `end` as a whole.
pub(super) fn between(
    text: &str,
    scan: &mut Scan,
    (begin, end): (&str, &str),
    whole: bool,
    read: impl Fn(&str) -> Option<Vec<Written>>,
) -> SectionStep {
    if scan.at == 0 {
        scan.at = begin.len();
    }
    let (body, until) = match scan.find(text, &[end]) {
        Some((at, mark)) => (&text[begin.len()..at], at + mark.len()),
        None if whole => (&text[begin.len()..], text.len()),
        None => return SectionStep::More,
    };
    match read(body) {
        Some(calls) => SectionStep::Over(calls, until),
        None => SectionStep::Malformed(until),
    }
}

/// Parses the text after a call in its section: a separator of calls, or `close`, which ends the section. `None` for anything else.
pub(super) fn after_call(
    text: &str,
    separates: impl Fn(char) -> bool,
    close: Option<&str>,
) -> Option<SectionStep> {
    let separators = text.len() - text.trim_start_matches(separates).len();
    if separators > 0 {
        return Some(SectionStep::Go(Vec::new(), separators));
    }
    if text.is_empty() {
        return Some(SectionStep::More);
    }
    let close = close?;
    if text.starts_with(close) {
        return Some(SectionStep::Over(Vec::new(), close.len()));
    }
    is_begun(text, close).then_some(SectionStep::More)
}

/// The call in a JSON object.
pub(super) fn call_of(value: Value) -> Option<Written> {
    let Value::Object(mut object) = value else {
        return None;
    };
    // OpenAI's form, which some models use: {"type": "function", "function": {"name": ..., "arguments": ...}}.
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

/// The value of an argument between tags. Strings are written without quotes and everything else as JSON, so the text alone does not
/// distinguish "1" from 1. Valid JSON is parsed as such, except for strings; objects and lists only on a single line, as templates write them:
/// over several lines they are far more often the content of a file.
pub(super) fn argument(text: &str) -> Value {
    match serde_json::from_str(text) {
        Ok(Value::String(_)) | Err(_) => Value::from(text),
        Ok(_) if text.contains('\n') => Value::from(text),
        Ok(value) => value,
    }
}

/// A call of `name`, if that is a valid name.
pub(super) fn written(name: &str, arguments: Map<String, Value>) -> Option<Written> {
    let name = name.trim();
    let is_name = !name.is_empty() && !name.contains(char::is_whitespace);
    is_name.then(|| Written {
        name: name.to_owned(),
        arguments,
    })
}

/// Arguments as an object, which may be written in a string; without arguments an empty object.
pub(super) fn arguments_of(value: Option<Value>) -> Option<Map<String, Value>> {
    match value {
        None | Some(Value::Null) => Some(Map::new()),
        Some(Value::Object(map)) => Some(map),
        Some(Value::String(text)) if text.trim().is_empty() => Some(Map::new()),
        Some(Value::String(text)) => serde_json::from_str(&text).ok(),
        Some(_) => None,
    }
}
