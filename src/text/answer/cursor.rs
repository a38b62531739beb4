//! A cursor for parsing text by hand, for call forms whose arguments are not JSON.

use serde_json::Value;

/// Upper limit for the nesting of parsed values. Deeper nesting is a model's nonsense.
pub(super) const DEPTH: usize = 64;

/// The rest of a text.
#[derive(Clone, Copy)]
pub(super) struct Cursor<'a> {
    pub(super) rest: &'a str,
}

impl<'a> Cursor<'a> {
    /// A cursor at the beginning of `text`.
    pub(super) fn new(text: &'a str) -> Self {
        Cursor { rest: text }
    }

    /// Skips white space and then `mark`, if that is next.
    pub(super) fn eat(&mut self, mark: &str) -> bool {
        self.rest = self.rest.trim_start();
        match self.rest.strip_prefix(mark) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    /// The text before `mark`; moves past the mark.
    pub(super) fn until(&mut self, mark: &str) -> Option<&'a str> {
        let (before, rest) = self.rest.split_once(mark)?;
        self.rest = rest;
        Some(before)
    }

    /// The longest prefix of `wanted` characters; moves past it.
    pub(super) fn run(&mut self, wanted: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|c| !wanted(c)).unwrap_or(self.rest.len());
        let (run, rest) = self.rest.split_at(end);
        self.rest = rest;
        run
    }

    /// A name, which may contain dots.
    pub(super) fn name(&mut self) -> Option<&'a str> {
        self.rest = self.rest.trim_start();
        let name = self.run(|c| c.is_alphanumeric() || "_-.".contains(c));
        (!name.is_empty()).then_some(name)
    }

    /// A number or a constant of JSON or Python.
    pub(super) fn word(&mut self) -> Option<Value> {
        self.rest = self.rest.trim_start();
        match self.run(|c| c.is_alphanumeric() || "+-.".contains(c)) {
            "True" => Some(Value::Bool(true)),
            "False" => Some(Value::Bool(false)),
            "None" => Some(Value::Null),
            word => serde_json::from_str(word).ok(),
        }
    }

    /// Whether only white space is left.
    pub(super) fn is_at_end(&self) -> bool {
        self.rest.trim_start().is_empty()
    }
}
