//! Encodes rows as tokens, and marks the learned ones: for conversations, the assistant's turns in the model's own chat template.

use std::cell::Cell;

use serde_json::{Map, Value, json};

use super::options::EmptyThink;
use super::row::Row;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::model::training::SourceText;
use crate::text::{AnswerForm, ChatTemplate, Message, Prompt};

/// A sequence of tokens, and which of them are learned.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Document {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Whether each token is learned, that is, predicted from those before it. The first entry has no effect.
    pub learned: Vec<bool>,
    /// Weight of each token in the loss; empty if all learned tokens have 1.
    pub weights: Vec<f32>,
    /// Index of its file, and its first line in it, from 1.
    pub origin: (usize, usize),
}

impl Document {
    /// Number of learned tokens.
    pub fn targets(&self) -> usize {
        self.learned.iter().skip(1).filter(|l| **l).count()
    }

    /// Weight of a token in the loss; 0 if it is not learned.
    pub fn weight(&self, token: usize) -> f32 {
        match (self.learned[token], self.weights.get(token)) {
            (false, _) => 0.0,
            (true, None) => 1.0,
            (true, Some(&weight)) => weight,
        }
    }

    /// Adds tokens with this weight in the loss; 0 for tokens that are not learned.
    fn push(&mut self, tokens: &[u32], weight: f32) {
        if self.weights.is_empty() && weight != 0.0 && weight != 1.0 {
            self.weights = (0..self.tokens.len()).map(|i| self.weight(i)).collect();
        }
        let has_weights = !self.weights.is_empty() || (weight != 0.0 && weight != 1.0);
        self.tokens.extend_from_slice(tokens);
        self.learned.resize(self.tokens.len(), weight > 0.0);
        if has_weights {
            self.weights.resize(self.tokens.len(), weight);
        }
    }

    /// Keeps only the first `len` tokens.
    pub(super) fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.learned.truncate(len);
        self.weights.truncate(len);
    }

    /// Cuts it into parts of at most `window` tokens and about equal length.
    pub(super) fn cut(self, window: usize) -> Vec<Document> {
        let (len, parts) = (self.tokens.len(), self.tokens.len().div_ceil(window));
        let cuts = (0..parts).map(|i| len * i / parts..len * (i + 1) / parts);
        cuts.map(|range| Document {
            tokens: self.tokens[range.clone()].to_vec(),
            learned: self.learned[range.clone()].to_vec(),
            weights: match self.weights.is_empty() {
                true => Vec::new(),
                false => self.weights[range].to_vec(),
            },
            origin: self.origin,
        })
        .collect()
    }
}

/// Encodes rows as documents.
pub(super) struct Encoder<'a> {
    text: &'a SourceText,
    /// Whether every token is learned.
    learn_all: bool,
    empty_think: EmptyThink,
    /// The markers around reasoning in the model's own template.
    marks: Option<(&'static str, &'static str)>,
    /// Number of answers without reasoning, and of those among them that begin with an empty one.
    plain: Cell<usize>,
    empty: Cell<usize>,
}

impl<'a> Encoder<'a> {
    pub(super) fn new(
        text: &'a SourceText,
        learn_all: bool,
        empty_think: EmptyThink,
    ) -> Result<Self> {
        if learn_all && empty_think != EmptyThink::Learn {
            bail!(
                InvalidArgument,
                "all tokens are to be learned (--train-on-all), and empty reasoning is not (--empty-think); leave one of the two out"
            );
        }
        let form = text.template.as_ref().map(|template| {
            let is_token = |name: &str| text.tokenizer.id_of(name).is_some();
            AnswerForm::of(&template.sources(), template.reads("tools"), is_token)
        });
        let reasoning = form.as_ref().and_then(AnswerForm::reasoning);
        Ok(Encoder {
            text,
            learn_all,
            empty_think,
            marks: reasoning.map(|r| (r.begin, r.end)),
            plain: Cell::new(0),
            empty: Cell::new(0),
        })
    }

    /// Refuses the treatment of empty reasoning if the template has written none.
    pub(super) fn check_empty_think(&self) -> Result<()> {
        if self.empty_think == EmptyThink::Learn || self.plain.get() == 0 || self.empty.get() > 0 {
            return Ok(());
        }
        bail!(
            InvalidArgument,
            "the template writes no empty reasoning before any of {} answers without reasoning, and --empty-think says what becomes of it; leave \
             the option out",
            self.plain.get()
        )
    }

    /// Encodes a row, and says whether its documents may be cut into parts.
    pub(super) fn documents(
        &self,
        row: &Row,
        origin: (usize, usize),
    ) -> Result<(Vec<Document>, bool)> {
        let mut documents = match row {
            Row::Text(text) => {
                let mut document = empty(origin);
                document.push(&self.text.tokenizer.encode(text, true)?, 1.0);
                self.end(&mut document);
                return Ok((vec![document], true));
            }
            Row::Pair { prompt, target } => match &self.text.template {
                Some(template) => {
                    let messages = [
                        Message::new("user", prompt),
                        Message::new("assistant", target),
                    ];
                    self.conversation(template, &messages, &[0.0, 1.0], &[], origin)?
                }
                None => {
                    self.plain.set(self.plain.get() + 1);
                    let mut document = empty(origin);
                    document.push(&self.text.tokenizer.encode(prompt, true)?, 0.0);
                    document.push(&self.text.tokenizer.encode_plain(target)?, 1.0);
                    self.end(&mut document);
                    vec![document]
                }
            },
            Row::Chat {
                messages,
                weights,
                tools,
            } => match &self.text.template {
                Some(template) => self.conversation(template, messages, weights, tools, origin)?,
                // As in inference for models without a template.
                None => {
                    let chatml = ChatTemplate::chatml();
                    self.conversation(&chatml, messages, weights, tools, origin)?
                }
            },
        };
        if self.learn_all {
            documents.iter_mut().for_each(|d| d.learned.fill(true));
        }
        Ok((documents, false))
    }

    /// Bytes of the empty reasoning that begins an answer, as written after a prompt. `None` for an answer with reasoning.
    fn empty_think(
        &self,
        message: &Message,
        prompt: &Prompt,
        answer: &Prompt,
    ) -> Result<Option<usize>> {
        let Some((begin, end)) = self.marks else {
            return Ok(Some(0));
        };
        let reasoning = message.reasoning_content.as_deref().unwrap_or_default();
        if !reasoning.trim().is_empty() || message.text().contains(end) {
            return Ok(None);
        }
        let answer = answer.text();
        let opened = prompt.text().trim_end().ends_with(begin);
        let rest = match opened {
            true => Some(&*answer),
            false => answer.trim_start().strip_prefix(begin),
        };
        let Some(rest) = rest.and_then(|rest| rest.trim_start().strip_prefix(end)) else {
            return Ok(Some(0));
        };
        if opened && self.empty_think == EmptyThink::None {
            bail!(
                InvalidArgument,
                "the template's prompt for the answer begins reasoning, which cannot be left out then (--empty-think); have it given or learned"
            );
        }
        Ok(Some(answer.len() - rest.trim_start().len()))
    }

    /// Ends a text with the end token, unless it has one already.
    fn end(&self, document: &mut Document) {
        if let Some(eos) = self.text.eos
            && document.tokens.last() != Some(&eos)
        {
            document.push(&[eos], 1.0);
        }
    }

    /// Encodes a conversation and learns the turns that have a weight. Some templates write a turn differently once others follow, for
    /// example without earlier reasoning. Then each turn gets its own document that ends with it, which is what the model sees when it
    /// answers.
    fn conversation(
        &self,
        template: &ChatTemplate,
        messages: &[Message],
        weights: &[f32],
        tools: &[Value],
        origin: (usize, usize),
    ) -> Result<Vec<Document>> {
        let mut variables = Map::new();
        if !tools.is_empty() {
            variables.insert("tools".to_owned(), tools.into());
        }
        let turns: Vec<usize> = (0..messages.len()).filter(|&i| weights[i] > 0.0).collect();
        let Some(&last) = turns.last() else {
            bail!(InvalidArgument, "nothing in it is to be learned");
        };
        let mut rendering = Rendering {
            encoder: self,
            template,
            weights,
            variables,
        };
        if self.learn_all {
            let is_answer = |i: &usize| messages[*i].role == "assistant";
            if let Some(i) = (0..messages.len())
                .filter(is_answer)
                .find(|&i| weights[i] != 1.0)
            {
                bail!(
                    InvalidArgument,
                    "all tokens are to be learned alike (--train-on-all), and message {i} has the weight {}; leave one of the two out",
                    weights[i]
                );
            }
            let mut document = empty(origin);
            let whole = rendering.prompt(messages, false)?;
            document.push(&whole.tokens(&self.text.tokenizer, false)?, 1.0);
            return Ok(vec![document]);
        }
        // Messages after the last answer have no effect on what is learned.
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
            // The prompt of a template that begins every answer with reasoning unless told otherwise.
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
        origin,
        ..Document::default()
    }
}

/// Settings for rendering conversations.
struct Rendering<'a> {
    encoder: &'a Encoder<'a>,
    template: &'a ChatTemplate,
    /// Weight of each message in the loss.
    weights: &'a [f32],
    variables: Map<String, Value>,
}

impl Rendering<'_> {
    fn prompt(&self, messages: &[Message], answers: bool) -> Result<Prompt> {
        Prompt::new(
            self.template,
            &self.encoder.text.tokenizer,
            messages,
            answers,
            &self.variables,
        )
    }

    /// A document of the conversation that learns the messages `turns`, each from where the model takes over to the token that ends the
    /// turn. `None` if a turn does not begin and end in the whole conversation as it does in a conversation that ends with it.
    fn learned(
        &self,
        messages: &[Message],
        turns: &[usize],
        origin: (usize, usize),
    ) -> Result<Option<Vec<Document>>> {
        let tokenizer = &self.encoder.text.tokenizer;
        let whole = self.prompt(messages, false)?;
        let mut document = empty(origin);
        let (mut at, mut plain, mut emptied) = (0, 0, 0);
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
            let written = whole.part(start..end);
            let empty_think = self
                .encoder
                .empty_think(&messages[turn], &before, &written)?;
            plain += usize::from(empty_think.is_some());
            emptied += usize::from(empty_think.is_some_and(|bytes| bytes > 0));
            let after_think = start + empty_think.unwrap_or(0);
            let (asked_to, answer_from) = match self.encoder.empty_think {
                EmptyThink::Learn => (start, start),
                EmptyThink::Given => (after_think, after_think),
                EmptyThink::None => (start, after_think),
            };
            // Encoded separately, because the model continues the tokens of a prompt.
            let asked = whole.part(at..asked_to).tokens(tokenizer, at > 0)?;
            document.push(&asked, 0.0);
            let answer = whole.part(answer_from..end).tokens(tokenizer, true)?;
            let learned = self.to_the_end(&answer)?;
            document.push(&answer[..learned], self.weights[turn]);
            document.push(&answer[learned..], 0.0);
            at = end;
        }
        let Encoder {
            plain: all, empty, ..
        } = self.encoder;
        all.set(all.get() + plain);
        empty.set(empty.get() + emptied);
        Ok(Some(vec![document]))
    }

    /// Number of tokens of an answer up to its end token. A template may write more after it: white space, or the beginning of another
    /// answer.
    fn to_the_end(&self, answer: &[u32]) -> Result<usize> {
        let SourceText {
            tokenizer,
            stop_tokens,
            ..
        } = self.encoder.text;
        let is_end = |t: &u32| stop_tokens.contains(t);
        if let Some(end) = answer.iter().position(is_end) {
            return Ok(end + 1);
        }
        let Some(last) = answer.iter().rposition(|&t| tokenizer.is_special(t)) else {
            return Ok(answer.len());
        };
        let rest = tokenizer.decode(&answer[last + 1..], false)?;
        Ok(match rest.trim().is_empty() {
            true => last + 1,
            false => answer.len(),
        })
    }
}
