//! Multiple-choice questions in files of JSON Lines, with the names of fields that lm-evaluation-harness and the published sets use.

use std::path::Path;

use serde_json::Value;

use super::content;
use super::fields::Fields;
use super::rows::{lines, without_mark};
use crate::base::Result;
use crate::base::error::bail;
use crate::text::kind;

/// Field names of a row. If a row has several names of one field, the first counts.
const QUESTION: &[&str] = &["query", "question", "ctx"];
const CHOICES: &[&str] = &["choices", "endings"];
/// Field names whose value may be the text of a choice.
const ANSWER: &[&str] = &["answer", "answerKey"];
/// Field names whose value is the number of a choice, as a number or as text.
const INDEX: &[&str] = &["gold", "label"];

/// The expected fields in words, for errors.
const KNOWN: &str = "question, choices and answer (or query or ctx, endings, and gold or label)";

/// A multiple-choice question with one right choice.
#[derive(Clone, Debug, PartialEq)]
pub struct MultipleChoice {
    /// Line number in the file.
    pub line: usize,
    /// The question.
    pub question: String,
    /// The choices, at least two.
    pub choices: Vec<String>,
    /// Index of the right choice.
    pub answer: usize,
}

impl MultipleChoice {
    /// The question with one of its choices. A space separates them, unless the question ends or the choice begins with one.
    pub fn with(&self, choice: usize) -> String {
        let (question, choice) = (&self.question, &self.choices[choice]);
        let is_apart =
            question.ends_with(char::is_whitespace) || choice.starts_with(char::is_whitespace);
        let between = if is_apart { "" } else { " " };
        [question, between, choice].concat()
    }
}

/// The questions of a file, at least one. Fails at the first row that cannot be used.
pub fn multiple_choice(path: &Path) -> Result<Vec<MultipleChoice>> {
    let (_, content) = content::read(path)?;
    let rows = lines(without_mark(&content.bytes), |line| {
        Some(Fields::parse(line, KNOWN, "").and_then(question))
    });
    let questions = rows.into_iter().map(|(line, row)| match row {
        Ok(question) => Ok(MultipleChoice { line, ..question }),
        Err(e) => Err(e.within(format_args!("{} line {line}", path.display()))),
    });
    let questions = questions.collect::<Result<Vec<_>>>()?;
    if questions.is_empty() {
        bail!(
            InvalidArgument,
            "{} has no question; each line is a JSON object with {KNOWN}",
            path.display()
        );
    }
    Ok(questions)
}

/// Parses a row into a question; the caller sets its line.
fn question(mut fields: Fields) -> Result<MultipleChoice> {
    let question = match fields.take_first(QUESTION) {
        Some((_, Value::String(text))) => text,
        Some((name, other)) => bail!(InvalidArgument, "{name} is {}, not a text", kind(&other)),
        None => bail!(
            InvalidArgument,
            "it has {} and no question; a row has {KNOWN}",
            fields.keys()
        ),
    };
    if question.trim().is_empty() {
        bail!(InvalidArgument, "the question is empty");
    }
    let (choices, labels) = match fields.take_first(CHOICES) {
        Some((name, value)) => texts_and_labels(name, value)?,
        None => bail!(
            InvalidArgument,
            "it has {} and no choices; a row has {KNOWN}",
            fields.keys()
        ),
    };
    if choices.len() < 2 {
        bail!(
            InvalidArgument,
            "it has {} choices; there must be two at least",
            choices.len()
        );
    }
    if let Some(i) = choices.iter().position(|choice| choice.trim().is_empty()) {
        bail!(InvalidArgument, "choice {i} is empty");
    }
    let answer = match (fields.take_first(ANSWER), fields.take_first(INDEX)) {
        (Some((name, value)), _) => answer(name, &value, &choices, &labels)?,
        (None, Some((name, value))) => answer(name, &value, &[], &labels)
            .and_then(|index| within(name, index, choices.len()))?,
        (None, None) => bail!(
            InvalidArgument,
            "it has {} and no answer; a row has {KNOWN}",
            fields.keys()
        ),
    };
    Ok(MultipleChoice {
        line: 0,
        answer: within("answer", answer, choices.len())?,
        question,
        choices,
    })
}

/// The texts of choices, and their labels if present: an array of texts, or `{"text": [..], "label": [..]}`.
fn texts_and_labels(name: &str, value: Value) -> Result<(Vec<String>, Vec<String>)> {
    let Value::Object(mut both) = value else {
        return Ok((texts(name, value)?, Vec::new()));
    };
    let choices = texts("choices.text", both.remove("text").unwrap_or_default())?;
    let labels = texts("choices.label", both.remove("label").unwrap_or_default())?;
    if labels.len() != choices.len() {
        bail!(
            InvalidArgument,
            "{name} has {} texts and {} labels; each text has one",
            choices.len(),
            labels.len()
        );
    }
    Ok((choices, labels))
}

fn texts(name: &str, value: Value) -> Result<Vec<String>> {
    let Value::Array(items) = value else {
        bail!(
            InvalidArgument,
            "{name} is {}, not an array of texts",
            kind(&value)
        );
    };
    let items = items.into_iter().enumerate().map(|(i, item)| match item {
        Value::String(text) => Ok(text),
        other => bail!(
            InvalidArgument,
            "element {i} of {name} is {}, not a text",
            kind(&other)
        ),
    });
    items.collect()
}

/// Index of the right choice: by the text of one of `choices`, by one of `labels`, by a letter from A on, or as a number.
fn answer(name: &str, value: &Value, choices: &[String], labels: &[String]) -> Result<usize> {
    if let Some(index) = value.as_u64() {
        return Ok(usize::try_from(index).unwrap_or(usize::MAX));
    }
    let Value::String(text) = value else {
        bail!(
            InvalidArgument,
            "{name} is {value}; it must be the number of a choice from 0 on, a letter from A on, or the text of a choice"
        );
    };
    let position = |of: &[String]| of.iter().position(|other| other == text);
    if let Some(index) = position(choices).or_else(|| position(labels)) {
        return Ok(index);
    }
    if let Ok(index) = text.parse() {
        return Ok(index);
    }
    match text.as_bytes() {
        [letter @ b'A'..=b'Z'] => Ok(usize::from(letter - b'A')),
        _ => bail!(
            InvalidArgument,
            "{name} is {text:?}, which is none of the choices; it must be the number of a choice from 0 on, a letter from A on, or the text \
             of a choice"
        ),
    }
}

fn within(name: &str, index: usize, choices: usize) -> Result<usize> {
    if index >= choices {
        bail!(
            InvalidArgument,
            "{name} is choice {index}, and there are {choices}, counted from 0"
        );
    }
    Ok(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(row: &str) -> Result<MultipleChoice> {
        Fields::parse(row, KNOWN, "").and_then(question)
    }

    #[test]
    fn answers_have_several_forms() {
        for (row, answer) in [
            (
                r#"{"question": "q", "choices": ["x", "y"], "answer": 1}"#,
                1,
            ),
            (
                r#"{"question": "q", "choices": ["x", "y"], "answer": "B"}"#,
                1,
            ),
            (
                r#"{"question": "q", "choices": ["x", "y"], "answer": "y"}"#,
                1,
            ),
            // The text of a choice takes precedence over a letter and a number.
            (
                r#"{"question": "q", "choices": ["B", "A"], "answer": "B"}"#,
                0,
            ),
            (
                r#"{"question": "q", "choices": ["1", "0"], "answer": "1"}"#,
                0,
            ),
            (r#"{"ctx": "q", "endings": ["1", "0"], "label": "1"}"#, 1),
            (r#"{"query": "q", "choices": ["x", "y"], "gold": 1}"#, 1),
            (
                r#"{"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"}"#,
                1,
            ),
        ] {
            let found = of(row).unwrap();
            assert_eq!((&*found.question, found.answer), ("q", answer), "{row}");
        }
        // A row that lm-evaluation-harness has prepared has both names.
        let row = r#"{"query": "a: b", "ctx": "b", "choices": ["x", "y"], "endings": ["z", "z"], "gold": 1, "label": "0"}"#;
        let found = of(row).unwrap();
        assert_eq!((&*found.question, found.answer), ("a: b", 1));
        assert_eq!(found.choices, ["x", "y"]);
    }

    #[test]
    fn a_space_stands_between_question_and_choice() {
        let with = |question: &str, choice: &str| {
            let row = MultipleChoice {
                line: 1,
                question: question.to_owned(),
                choices: vec![choice.to_owned()],
                answer: 0,
            };
            row.with(0)
        };
        assert_eq!(with("q", "a"), "q a");
        assert_eq!(with("q\n", "a"), "q\na");
        assert_eq!(with("q", " a"), "q a");
    }

    #[test]
    fn rows_that_cannot_be_used() {
        for (row, needle) in [
            (
                "[1]",
                "it is an array, not an object; a row is an object with question, choices",
            ),
            (r#"{"choices": ["x", "y"], "answer": 0}"#, "no question"),
            (
                r#"{"question": " ", "choices": ["x", "y"], "answer": 0}"#,
                "the question is empty",
            ),
            (
                r#"{"question": 3, "choices": ["x", "y"], "answer": 0}"#,
                "question is a number",
            ),
            (r#"{"question": "q", "answer": 0}"#, "no choices"),
            (
                r#"{"question": "q", "choices": "xy", "answer": 0}"#,
                "choices is a text, not an array",
            ),
            (
                r#"{"question": "q", "choices": ["x", 2], "answer": 0}"#,
                "element 1 of choices is a number",
            ),
            (
                r#"{"question": "q", "choices": ["x"], "answer": 0}"#,
                "1 choices; there must be two",
            ),
            (
                r#"{"question": "q", "choices": ["x", ""], "answer": 0}"#,
                "choice 1 is empty",
            ),
            (r#"{"question": "q", "choices": ["x", "y"]}"#, "no answer"),
            (
                r#"{"question": "q", "choices": ["x", "y"], "answer": 2}"#,
                "answer is choice 2, and there are 2",
            ),
            (
                r#"{"question": "q", "choices": ["x", "y"], "answer": "C"}"#,
                "answer is choice 2",
            ),
            (
                r#"{"question": "q", "choices": ["x", "y"], "answer": -1}"#,
                "answer is -1; it must be",
            ),
            (
                r#"{"question": "q", "choices": ["x", "y"], "answer": "z"}"#,
                "none of the choices",
            ),
            (
                r#"{"question": "q", "endings": ["x", "y"], "label": "5"}"#,
                "label is choice 5",
            ),
            (
                r#"{"question": "q", "choices": {"text": ["x", "y"], "label": ["1"]}, "answer": 0}"#,
                "2 texts and 1 labels",
            ),
        ] {
            let e = of(row).unwrap_err();
            assert!(e.message().contains(needle), "{row}: {e}");
        }
    }
}
