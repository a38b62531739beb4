//! Recognizes rows by the names of their fields, in JSON objects or table records.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;

use super::conversation::{self, Turns};
use super::row::Row;
use crate::base::Result;
use crate::base::alloc::Budget;
use crate::base::error::{bail, err};
use crate::text::{kind, tools_from_json};

/// Forms of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RowForm {
    Messages,
    ShareGpt,
    Completion,
    Alpaca,
    Question,
    Text,
}

/// The forms by their required fields, each with its possible names.
const FORMS: [(RowForm, &[&[&str]]); 6] = [
    (RowForm::Messages, &[&["messages"]]),
    (RowForm::ShareGpt, &[&["conversations", "conversation"]]),
    (RowForm::Completion, &[&["prompt"], &["completion"]]),
    (
        RowForm::Alpaca,
        &[&["instruction"], &["output", "response"]],
    ),
    (RowForm::Question, &[&["question"], &["answer"]]),
    (RowForm::Text, &[&["text"]]),
];

/// [`FORMS`] in words, for errors.
const KNOWN: &str = "messages, conversations, prompt and completion, instruction and output, question and answer, or text";

/// The named fields of a row, without null fields.
#[derive(Debug)]
pub(super) struct Fields(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Fields;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Fields, A::Error> {
                let mut fields: Vec<(String, Value)> = Vec::new();
                while let Some((name, value)) = map.next_entry::<String, Value>()? {
                    if fields.iter().any(|(known, _)| *known == name) {
                        return Err(serde::de::Error::custom(format_args!(
                            "key '{name}' is there twice"
                        )));
                    }
                    fields.push((name, value));
                }
                Ok(Fields(fields))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

/// serde_json's message without its position: a line of this text is not a line of the file.
pub(super) fn without_place(error: &serde_json::Error) -> String {
    let said = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    said.strip_suffix(&place).unwrap_or(&said).to_owned()
}

impl Fields {
    /// Parses the fields of a training row in JSON.
    pub(super) fn of_line(line: &str) -> Result<Fields> {
        Self::parse(
            line,
            KNOWN,
            "; a file that is one array of rows is named .json",
        )
    }

    /// Parses the fields of a JSON object. Errors list the `known` fields, and give the advice `of_array` if the line is an array.
    pub(super) fn parse(line: &str, known: &str, of_array: &str) -> Result<Fields> {
        let _values = Budget::values(line.len()).set_aside()?;
        let begin = line.trim_start();
        let other = match begin.bytes().next() {
            Some(b'[') => "an array",
            Some(b'"') => "a text",
            Some(b'-' | b'0'..=b'9') => "a number",
            Some(b't' | b'f') => "a boolean",
            Some(b'n') => "null",
            _ => "",
        };
        // A valid JSON value of another type.
        if !other.is_empty() && serde_json::from_str::<serde::de::IgnoredAny>(line).is_ok() {
            let advice = match other {
                "an array" => of_array,
                _ => "",
            };
            bail!(
                InvalidArgument,
                "it is {other}, not an object; a row is an object with {known}{advice}"
            );
        }
        serde_json::from_str(line).map_err(|e| match e.is_data() {
            true => err!(InvalidArgument, "{}", without_place(&e)),
            false => err!(
                InvalidArgument,
                "it is not JSON: {}, byte {}",
                without_place(&e),
                e.column()
            ),
        })
    }

    /// The fields of a table record; `names` are those of its columns.
    pub(super) fn of_cells(names: &[String], cells: Vec<String>) -> Result<Fields> {
        if cells.len() != names.len() {
            bail!(
                InvalidArgument,
                "it has {} fields, and there are {} columns: {}",
                cells.len(),
                names.len(),
                names.join(", ")
            );
        }
        let fields = names
            .iter()
            .cloned()
            .zip(cells.into_iter().map(Value::String));
        Ok(Fields(fields.collect()))
    }

    /// Refuses columns that form no row.
    pub(super) fn check_names(names: &[String]) -> Result<()> {
        let fields = names.iter().map(|name| (name.clone(), Value::Bool(true)));
        Fields(fields.collect()).form().map(drop)
    }

    fn has(&self, name: &str) -> bool {
        let mut fields = self.0.iter();
        fields.any(|(own, value)| own == name && !value.is_null())
    }

    /// The first of `names` that is present. Fails if several are.
    fn first(&self, names: &[&'static str]) -> Result<Option<&'static str>> {
        let there: Vec<&str> = names
            .iter()
            .copied()
            .filter(|name| self.has(name))
            .collect();
        match there[..] {
            [_, other, ..] => bail!(
                InvalidArgument,
                "it has {} and {other}, which are two names of one field; leave one of them out",
                there[0]
            ),
            _ => Ok(names.iter().copied().find(|name| self.has(name))),
        }
    }

    /// The only form whose required fields are all present.
    fn form(&self) -> Result<RowForm> {
        let has_all = |needed: &[&[&str]]| {
            let mut needed = needed.iter();
            needed.all(|names| names.iter().any(|name| self.has(name)))
        };
        let found: Vec<_> = FORMS.iter().filter(|(_, needed)| has_all(needed)).collect();
        match found[..] {
            [(form, _)] => Ok(*form),
            [] => bail!(
                InvalidArgument,
                "it has {}; a row has {KNOWN}{}",
                self.keys(),
                match self.has("chosen") && self.has("rejected") {
                    true => "; preferences (chosen and rejected) are not trained on",
                    false => "",
                }
            ),
            [(_, one), (_, other), ..] => bail!(
                InvalidArgument,
                "it has {}, which is a row of {} and one of {}; leave one of them out",
                self.keys(),
                self.named(one),
                self.named(other)
            ),
        }
    }

    /// The names by which a form is recognized.
    fn named(&self, needed: &[&[&str]]) -> String {
        let names = needed.iter().flat_map(|names| names.iter().copied());
        let names: Vec<&str> = names.filter(|name| self.has(name)).collect();
        names.join(" and ")
    }

    /// All field names, for errors.
    pub(super) fn keys(&self) -> String {
        let names: Vec<&str> = self
            .0
            .iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(name, _)| &**name)
            .collect();
        match names[..] {
            [] => "no key".to_owned(),
            [one] => format!("the key {one}"),
            _ => format!("the keys {}", names.join(", ")),
        }
    }

    fn take(&mut self, name: &str) -> Option<Value> {
        let at = self.0.iter().position(|(own, _)| own == name)?;
        Some(self.0.swap_remove(at).1).filter(|value| !value.is_null())
    }

    /// Takes the first of these fields that is present, with its name.
    pub(super) fn take_first(&mut self, names: &[&'static str]) -> Option<(&'static str, Value)> {
        names
            .iter()
            .find_map(|&name| Some((name, self.take(name)?)))
    }

    /// The text of a field; empty if it is absent.
    fn text(&mut self, name: &str) -> Result<String> {
        match self.take(name) {
            None => Ok(String::new()),
            Some(Value::String(text)) => Ok(text),
            Some(other) => bail!(InvalidArgument, "{name} is {}, not a text", kind(&other)),
        }
    }

    /// The elements of an array field, or of a text field that holds an array as JSON.
    fn array(&mut self, name: &str) -> Result<Vec<Value>> {
        let value = match self.take(name) {
            None => return Ok(Vec::new()),
            Some(Value::String(text)) if text.trim().is_empty() => return Ok(Vec::new()),
            Some(Value::String(text)) => serde_json::from_str(&text).map_err(|e| {
                err!(
                    InvalidArgument,
                    "{name} is a text that is no JSON: {}",
                    without_place(&e)
                )
            })?,
            Some(value) => value,
        };
        match value {
            Value::Array(items) => Ok(items),
            other => bail!(InvalidArgument, "{name} is {}, not an array", kind(&other)),
        }
    }

    /// Converts the fields to a row.
    pub(super) fn row(mut self) -> Result<Row> {
        let turns = match self.form()? {
            RowForm::Text => {
                let text = self.text("text")?;
                if text.trim().is_empty() {
                    bail!(InvalidArgument, "the text is empty");
                }
                return Ok(Row::Text(text));
            }
            RowForm::Question => {
                return pair(self.text("question")?, self.text("answer")?, "answer");
            }
            RowForm::Alpaca => match self.alpaca()? {
                Ok(pair) => return Ok(pair),
                Err(turns) => turns,
            },
            RowForm::Completion => match self.completion()? {
                Ok(pair) => return Ok(pair),
                Err(turns) => turns,
            },
            RowForm::Messages => Turns::of_messages(self.array("messages")?)?,
            RowForm::ShareGpt => {
                let name = self
                    .first(&["conversations", "conversation"])?
                    .unwrap_or_default();
                let turns = Turns::of_sharegpt(self.array(name)?)?;
                turns.under(self.text("system")?)?
            }
        };
        let tools = self.array("tools")?;
        let tools = match tools.is_empty() {
            true => Vec::new(),
            false => tools_from_json(&Value::Array(tools).to_string())?,
        };
        let Turns { messages, weights } = turns.checked()?;
        Ok(Row::Chat {
            messages,
            weights,
            tools,
        })
    }

    /// A row from an instruction and its output, with earlier turns if present.
    fn alpaca(&mut self) -> Result<std::result::Result<Row, Turns>> {
        let instruction = self.text("instruction")?;
        let input = match self.first(&["input", "context"])? {
            Some(name) => self.text(name)?,
            None => String::new(),
        };
        let name = self.first(&["output", "response"])?.unwrap_or_default();
        let output = self.text(name)?;
        let asked = conversation::instruction(&instruction, &input);
        if asked.trim().is_empty() {
            bail!(InvalidArgument, "the instruction is empty");
        }
        let (system, history) = (self.text("system")?, self.array("history")?);
        if system.is_empty() && history.is_empty() {
            return pair(asked, output, name).map(Ok);
        }
        if output.is_empty() {
            bail!(InvalidArgument, "the {name} is empty");
        }
        let turns = Turns::of_history(history)?.and(asked, output);
        Ok(Err(turns.under(system)?))
    }

    /// A row from a prompt and its completion: two texts, or two lists of messages.
    fn completion(&mut self) -> Result<std::result::Result<Row, Turns>> {
        match (self.take("prompt"), self.take("completion")) {
            (Some(Value::String(prompt)), Some(Value::String(completion))) => {
                pair(prompt, completion, "completion").map(Ok)
            }
            (Some(Value::Array(prompt)), Some(Value::Array(completion))) => {
                Ok(Err(Turns::of_prompt(prompt, completion)?))
            }
            (prompt, completion) => bail!(
                InvalidArgument,
                "prompt is {} and completion {}; both are texts, or both are arrays of messages",
                kind(&prompt.unwrap_or_default()),
                kind(&completion.unwrap_or_default())
            ),
        }
    }
}

fn pair(prompt: String, target: String, name: &str) -> Result<Row> {
    if target.is_empty() {
        bail!(InvalidArgument, "the {name} is empty");
    }
    Ok(Row::Pair { prompt, target })
}
