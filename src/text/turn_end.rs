//! Finds the tokens that end an assistant's turn, by the text that a chat template writes after an answer and by their names, and those that
//! begin turns. `model` adds the tokens of config and metadata.

use super::end_names::{ENDS_BY_PART, PART_END, SPECIAL_ENDS, TURN_ENDS};
use super::tokenizer::with_tokenizers;
use super::{AnswerForm, ChatTemplate, Tokenizer};
use crate::base::Result;
use crate::base::alloc::Budget;

/// The tokens of `tokenizer` that end a turn: those that `template` writes right after an answer, and those with known names, except for
/// tokens that the template writes within an answer. A template that cannot be rendered contributes nothing.
pub fn turn_ends(tokenizer: &Tokenizer, template: Option<&ChatTemplate>) -> Result<Vec<u32>> {
    with_tokenizers("looking for the ends of turns", Budget::SMALL, || {
        let closings = match template {
            Some(template) => template.closings()?,
            None => Default::default(),
        };
        let mut inside: Vec<u32> = controls(tokenizer, &closings.within)
            .map(|c| c.id)
            .collect();
        if let Some(template) = template {
            let is_token = |name: &str| tokenizer.id_of(name).is_some();
            let form = AnswerForm::of(&template.sources(), template.reads("tools"), is_token);
            inside.extend(
                form.shown_tokens()
                    .iter()
                    .filter_map(|t| tokenizer.id_of(t)),
            );
        }
        let ends_question: Vec<u32> = controls(tokenizer, &closings.before)
            .map(|c| c.id)
            .collect();
        let mut ends = named_ends(tokenizer);
        ends.retain(|id| !inside.contains(id));
        let closings: Vec<Closing> = closings
            .after
            .iter()
            .map(|text| Closing::read(tokenizer, text, &inside))
            .collect();
        let mut found = Vec::new();
        for closing in &closings {
            let is_common = |id: &u32| closings.iter().all(|c| c.begins_with.contains(id));
            let mut begins_with = closing.begins_with.clone();
            if begins_with.iter().any(is_common) {
                begins_with.retain(is_common);
            }
            // In order of preference: a token with a known name, one that also ends questions, or the first.
            let among = |others: &[u32]| begins_with.iter().copied().find(|id| others.contains(id));
            let end = among(&ends)
                .or_else(|| among(&ends_question))
                .or(begins_with.first().copied())
                .or(closing.later);
            found.extend(end);
        }
        for end in found {
            if !ends.contains(&end) {
                ends.push(end);
            }
        }
        Ok(ends)
    })
}

/// The tokens by which `template` begins turns: the first control token that it writes between a question and its answer, and between an
/// answer and the next question, without `others`. None if it cannot be rendered.
pub(super) fn turn_begins(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    others: &[u32],
) -> Result<Vec<u32>> {
    with_tokenizers("looking for the beginnings of turns", Budget::SMALL, || {
        let closings = template.closings()?;
        let first = |text: &String| {
            let mut ids = controls(tokenizer, text).map(|control| control.id);
            ids.find(|id| !others.contains(id))
        };
        let texts = [&closings.before].into_iter().chain(&closings.after);
        Ok(texts.filter_map(first).collect())
    })
}

/// A text that a template writes after an answer.
struct Closing {
    /// Leading control tokens, without those that occur within answers.
    begins_with: Vec<u32>,
    /// The first control token after other text, if that begins with control tokens.
    later: Option<u32>,
}

impl Closing {
    fn read(tokenizer: &Tokenizer, text: &str, inside: &[u32]) -> Closing {
        let mut closing = Closing {
            begins_with: Vec::new(),
            later: None,
        };
        let (mut at, mut adjacent) = (0, true);
        for control in controls(tokenizer, text) {
            adjacent = adjacent && text[at..control.start].trim().is_empty();
            if at == 0 && !adjacent {
                break;
            }
            at = control.end;
            match adjacent {
                _ if inside.contains(&control.id) => {}
                true => closing.begins_with.push(control.id),
                false => closing.later = closing.later.or(Some(control.id)),
            }
        }
        closing
    }
}

/// Tokens with names that are known to end turns.
fn named_ends(tokenizer: &Tokenizer) -> Vec<u32> {
    let has = |name: &str| tokenizer.id_of(name).is_some();
    let by_part = ENDS_BY_PART
        .iter()
        .any(|ends| ends.iter().all(|end| has(end)));
    let any = TURN_ENDS
        .iter()
        .filter(|&&name| name != PART_END || !by_part);
    let any = any.filter_map(|name| tokenizer.id_of(name));
    let special = SPECIAL_ENDS.iter().filter_map(|name| tokenizer.id_of(name));
    any.chain(special.filter(|&id| tokenizer.is_special(id)))
        .collect()
}

/// A control token in a text.
struct Control {
    id: u32,
    start: usize,
    end: usize,
}

/// The control tokens in `text`, in order. A token that the vocabulary types as normal text counts if the text contains its name.
fn controls<'a>(tokenizer: &'a Tokenizer, text: &'a str) -> impl Iterator<Item = Control> + 'a {
    tokenizer.split(text).into_iter().flat_map(move |piece| {
        let inside = &text[piece.range.clone()];
        match piece.token {
            Some(id) => {
                let control = Control {
                    id,
                    start: piece.range.start,
                    end: piece.range.end,
                };
                let is_control = tokenizer.is_control(id) && !inside.trim().is_empty();
                is_control.then_some(control).into_iter().collect()
            }
            None => named_controls(tokenizer, inside, piece.range.start),
        }
    })
}

/// The names of control tokens in a text that begins at `start` of another.
fn named_controls(tokenizer: &Tokenizer, text: &str, start: usize) -> Vec<Control> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(begin) = text[at..].find('<').map(|found| at + found) {
        let Some(end) = text[begin..].find('>').map(|found| begin + found + 1) else {
            break;
        };
        match tokenizer.id_of(&text[begin..end]) {
            Some(id) if tokenizer.is_control(id) => {
                found.push(Control {
                    id,
                    start: start + begin,
                    end: start + end,
                });
                at = end;
            }
            _ => at = begin + 1,
        }
    }
    found
}
