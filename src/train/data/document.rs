//! Rows as tokens, of which some are learned: those that a model's own chat template makes of an assistant's turns.

use serde_json::{Map, Value, json};

use super::rows::Row;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::model::training::Text;
use crate::text::{ChatTemplate, Message, Prompt};

/// Tokens that are read one after another, and which of them are learned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Of each token, whether it is to be predicted by those before it. What is said of the first has no effect.
    pub learned: Vec<bool>,
    /// The number of its file, and the line that it begins in, from 1.
    pub origin: (usize, usize),
}

impl Document {
    /// Tokens that are predicted.
    pub fn targets(&self) -> usize {
        self.learned.iter().skip(1).filter(|l| **l).count()
    }

    fn push(&mut self, tokens: &[u32], learned: bool) {
        self.tokens.extend_from_slice(tokens);
        self.learned.resize(self.tokens.len(), learned);
    }

    /// In parts of at most `window` tokens, which are about as long as each other.
    pub(super) fn cut(self, window: usize) -> Vec<Document> {
        let (len, parts) = (self.tokens.len(), self.tokens.len().div_ceil(window));
        let cuts = (0..parts).map(|i| len * i / parts..len * (i + 1) / parts);
        cuts.map(|range| Document {
            tokens: self.tokens[range.clone()].to_vec(),
            learned: self.learned[range].to_vec(),
            origin: self.origin,
        })
        .collect()
    }
}

/// Makes documents of rows.
pub(super) struct Encoder<'a> {
    pub(super) text: &'a Text,
    /// Whether every token is learned.
    pub(super) learn_all: bool,
}

impl Encoder<'_> {
    /// The documents of a row, and whether they may be cut into parts.
    pub(super) fn documents(
        &self,
        row: &Row,
        origin: (usize, usize),
    ) -> Result<(Vec<Document>, bool)> {
        let mut documents = match row {
            Row::Text(text) => {
                let mut document = empty(origin);
                document.push(&self.text.tokenizer.encode(text, true)?, true);
                self.end(&mut document);
                return Ok((vec![document], true));
            }
            Row::Pair { prompt, target } => match &self.text.template {
                Some(template) => {
                    let messages = [
                        Message::new("user", prompt),
                        Message::new("assistant", target),
                    ];
                    self.conversation(template, &messages, &[], origin)?
                }
                None => {
                    let mut document = empty(origin);
                    document.push(&self.text.tokenizer.encode(prompt, true)?, false);
                    document.push(&self.text.tokenizer.encode_plain(target)?, true);
                    self.end(&mut document);
                    vec![document]
                }
            },
            Row::Chat { messages, tools } => match &self.text.template {
                Some(template) => self.conversation(template, messages, tools, origin)?,
                // As inference does for models without a template.
                None => self.conversation(&ChatTemplate::chatml(), messages, tools, origin)?,
            },
        };
        if self.learn_all {
            documents.iter_mut().for_each(|d| d.learned.fill(true));
        }
        Ok((documents, false))
    }

    /// Ends a text, unless it ends so already.
    fn end(&self, document: &mut Document) {
        if let Some(eos) = self.text.eos
            && document.tokens.last() != Some(&eos)
        {
            document.push(&[eos], true);
        }
    }

    /// A conversation with all of its assistant's turns learned. Where the template writes a turn in another way once others follow it, as
    /// those do that leave out earlier reasoning, each turn gets a document of its own, that ends with it: what the model is to see when it
    /// answers.
    fn conversation(
        &self,
        template: &ChatTemplate,
        messages: &[Message],
        tools: &[Value],
        origin: (usize, usize),
    ) -> Result<Vec<Document>> {
        let mut variables = Map::new();
        if !tools.is_empty() {
            variables.insert("tools".to_owned(), tools.into());
        }
        let turns: Vec<usize> = (0..messages.len())
            .filter(|&i| messages[i].role == "assistant")
            .collect();
        let Some(&last) = turns.last() else {
            bail!(InvalidArgument, "it has no message of the assistant");
        };
        let mut rendering = Rendering {
            template,
            text: self.text,
            variables,
        };
        if self.learn_all {
            let mut document = empty(origin);
            let whole = rendering.prompt(messages, false)?;
            document.push(&whole.tokens(&self.text.tokenizer, false)?, true);
            return Ok(vec![document]);
        }
        // What is said after the last answer is not learned from.
        let whole = &messages[..=last];
        let mut found = rendering.learned(whole, &turns, origin)?;
        if found.is_none() && turns.len() > 1 {
            let each = turns.iter();
            let each = each.map(|&turn| rendering.learned(&messages[..=turn], &[turn], origin));
            found = each
                .collect::<Result<Option<Vec<_>>>>()?
                .map(|all| all.concat());
        }
        if found.is_none() && template.reads("enable_thinking") {
            // The prompt of a template that begins every answer with reasoning unless it is told not to.
            rendering
                .variables
                .insert("enable_thinking".to_owned(), json!(false));
            let each = turns.iter();
            let each = each.map(|&turn| rendering.learned(&messages[..=turn], &[turn], origin));
            found = each
                .collect::<Result<Option<Vec<_>>>>()?
                .map(|all| all.concat());
        }
        found.ok_or_else(|| {
            err!(
                InvalidArgument,
                "the chat template writes an answer of this conversation in another way than its prompt for the answer begins, so that what is \
                 to be learned cannot be told from what is not; give the row as \"text\", or learn all tokens"
            )
        })
    }
}

fn empty(origin: (usize, usize)) -> Document {
    Document {
        tokens: Vec::new(),
        learned: Vec::new(),
        origin,
    }
}

/// How conversations are rendered.
struct Rendering<'a> {
    template: &'a ChatTemplate,
    text: &'a Text,
    variables: Map<String, Value>,
}

impl Rendering<'_> {
    fn prompt(&self, messages: &[Message], answers: bool) -> Result<Prompt> {
        Prompt::new(
            self.template,
            &self.text.tokenizer,
            messages,
            answers,
            &self.variables,
        )
    }

    /// A document of the conversation in which the messages `turns` are learned, from where the model takes over to the token that ends its
    /// turn. None if a turn does not begin and end in the whole as it does at the end of a shorter conversation.
    fn learned(
        &self,
        messages: &[Message],
        turns: &[usize],
        origin: (usize, usize),
    ) -> Result<Option<Vec<Document>>> {
        let whole = self.prompt(messages, false)?;
        let mut document = empty(origin);
        let mut at = 0;
        for &turn in turns {
            let before = self.prompt(&messages[..turn], true)?;
            let after = match turn + 1 == messages.len() {
                true => whole.part(0..whole.len()),
                false => self.prompt(&messages[..=turn], false)?,
            };
            let (start, end) = (before.len(), after.len());
            if !(whole.begins_with(&after) && after.begins_with(&before) && at <= start) {
                return Ok(None);
            }
            // Apart, as the model continues the tokens of a prompt.
            let asked = whole.part(at..start).tokens(&self.text.tokenizer, at > 0)?;
            document.push(&asked, false);
            let answer = whole.part(start..end).tokens(&self.text.tokenizer, true)?;
            let learned = self.to_the_end(&answer)?;
            document.push(&answer[..learned], true);
            document.push(&answer[learned..], false);
            at = end;
        }
        Ok(Some(vec![document]))
    }

    /// The number of tokens of an answer up to the one that ends it. A template may write more after that: white space, or the beginning of
    /// another answer.
    fn to_the_end(&self, answer: &[u32]) -> Result<usize> {
        let is_end = |t: &u32| self.text.stop_tokens.contains(t);
        if let Some(end) = answer.iter().position(is_end) {
            return Ok(end + 1);
        }
        let Some(last) = answer
            .iter()
            .rposition(|&t| self.text.tokenizer.is_special(t))
        else {
            return Ok(answer.len());
        };
        let rest = self.text.tokenizer.decode(&answer[last + 1..], false)?;
        Ok(match rest.trim().is_empty() {
            true => last + 1,
            false => answer.len(),
        })
    }
}
