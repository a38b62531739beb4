//! Sources of grammars, with the feature `grammar` and without it.

use serde_json::{Map, Value, json};

use crate::base::Result;
use crate::base::error::bail;

/// The source of a grammar. A text fits it as a whole, from its first character to its last.
#[derive(Clone, Copy, Debug)]
pub enum GrammarSource<'a> {
    /// A JSON schema, of draft 2020-12 or an earlier one that it names. Between its tokens, JSON has the white space of `json.dumps` in
    /// Python: one space after a comma or a colon, and no other. The schema's key `x-guidance` may ask for another form.
    JsonSchema(&'a str),
    /// A regular expression in the syntax of the crate `regex`, without look-around.
    Regex(&'a str),
    /// A grammar in the dialect of Lark that `llguidance` reads.
    Lark(&'a str),
    /// A grammar as llama.cpp reads it, whose rule `root` is the text.
    Gbnf(&'a str),
    /// Texts of which one is generated.
    Choices(&'a [String]),
}

impl GrammarSource<'_> {
    /// Its kind, in messages.
    pub fn name(&self) -> &'static str {
        match self {
            GrammarSource::JsonSchema(_) => "JSON schema",
            GrammarSource::Regex(_) => "regular expression",
            GrammarSource::Lark(_) => "Lark grammar",
            GrammarSource::Gbnf(_) => "GBNF grammar",
            GrammarSource::Choices(_) => "list of choices",
        }
    }
}

/// `schema` with the white space of [`GrammarSource::JsonSchema`] where it asks for no other.
pub(super) fn with_white_space(mut schema: Map<String, Value>) -> Result<Map<String, Value>> {
    let mut options = Map::new();
    for (key, value) in [
        ("item_separator", json!(", ")),
        ("key_separator", json!(": ")),
        ("whitespace_flexible", json!(false)),
    ] {
        options.insert(key.to_owned(), value);
    }
    match schema.remove("x-guidance") {
        None => {}
        Some(Value::Object(asked)) => options.extend(asked),
        Some(other) => bail!(InvalidArgument, "/x-guidance: {other} is not an object"),
    }
    schema.insert("x-guidance".to_owned(), Value::Object(options));
    Ok(schema)
}
