//! Renders test messages to find the texts that a template writes around an assistant's answer. The tokens in these texts show where a turn
//! ends.

use minijinja::value::Value;
use serde_json::{Map, json};

use super::engine::Compiled;
use super::form::{as_parts, test_tool};
use crate::base::ErrorKind;

/// Upper limit of steps for rendering test messages.
const STEPS: u64 = 200_000;

const QUESTION: &str = "words-of-a-question";
const ANSWER: &str = "words-of-an-answer";
const NEXT: &str = "words-of-the-next-question";
const REASONING: &str = "words-of-reasoning";

/// The texts around an answer, without the contents of messages.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::text) struct Closings {
    /// Between a question and its answer.
    pub(in crate::text) before: String,
    /// Between the reasoning of an answer and its content. Empty if the template leaves reasoning out.
    pub(in crate::text) within: String,
    /// After an answer: up to the next question, and up to the end of a conversation that ends with the answer.
    pub(in crate::text) after: Vec<String>,
}

/// The texts that `template` writes around an answer, in the first form of messages that it renders; empty if it renders none.
pub(super) fn closings(template: &Compiled) -> Closings {
    for tools in [false, true] {
        for parts in [false, true] {
            match closings_in(template, parts, tools) {
                Some(found) if !found.after.is_empty() => return found,
                Some(_) => {}
                None => return Closings::default(),
            }
        }
    }
    Closings::default()
}

/// Renders contents as parts or as texts, with tools or without. `None` if rendering does not end.
fn closings_in(template: &Compiled, parts: bool, tools: bool) -> Option<Closings> {
    let mut variables = Map::new();
    if tools {
        variables.insert("tools".to_owned(), json!([test_tool()]));
        // Firefunction's template takes these variables.
        variables.insert("functions".to_owned(), json!("[]"));
        variables.insert("datetime".to_owned(), json!("today"));
    }
    let message = |role: &str, text: &str, reasoning: &str| {
        let content = match parts {
            true => as_parts(&[text.to_owned()]),
            false => Value::from(text),
        };
        let mut out = vec![("role", Value::from(role)), ("content", content)];
        if !reasoning.is_empty() {
            for name in ["reasoning_content", "thinking", "reasoning"] {
                out.push((name, reasoning.into()));
            }
        }
        Value::from_iter(out)
    };
    // Empty if the template refuses the messages.
    let print =
        |messages: Vec<Value>| match template.print_within(STEPS, messages, false, &variables) {
            Ok(text) => Some(text),
            Err(e) if e.kind() == ErrorKind::CorruptFile => None,
            Err(_) => Some(String::new()),
        };
    let asked = || message("user", QUESTION, "");
    let answered = || message("assistant", ANSWER, "");
    let followed = print(vec![asked(), answered(), message("user", NEXT, "")])?;
    let last = print(vec![asked(), answered()])?;
    let reasoned = print(vec![asked(), message("assistant", ANSWER, REASONING)])?;
    let between = |text: &str, from: &str| {
        let (before, _) = text.split_once(ANSWER)?;
        Some(before.rsplit_once(from)?.1.to_owned())
    };
    let mut after = Vec::new();
    if let Some((closing, _)) = followed
        .split_once(ANSWER)
        .and_then(|(_, rest)| rest.split_once(NEXT))
    {
        after.push(closing.to_owned());
    }
    if let Some((_, closing)) = last.split_once(ANSWER) {
        after.push(closing.to_owned());
    }
    Some(Closings {
        before: between(&followed, QUESTION)
            .or_else(|| between(&last, QUESTION))
            .unwrap_or_default(),
        within: between(&reasoned, REASONING).unwrap_or_default(),
        after,
    })
}
