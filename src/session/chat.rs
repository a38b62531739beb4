//! Chat turns. The model's template says how a conversation is spelled; only what a turn adds to it is run: what closes the
//! last answer, the user's words, and what opens the next answer.

use std::ops::{ControlFlow, Range};

use super::text::Text;
use super::{GenerateOptions, Generation, Piece, Session, Transcript};
use crate::base::error::bail;
use crate::base::{Result, alloc, call};
use crate::model::Model;
use crate::text::{Message, Tokenizer};

/// Bytes of text that a token may stand for, in the mean of an answer.
const FOR_TOKEN: usize = 16;

/// The turns of a session, and whether it ends where another can follow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Conversation {
    pub(super) turns: Vec<Turn>,
    /// The sequence ends in an answer, which the next turn closes.
    pub(super) open: bool,
    /// Tokens before the first user's words, which eviction keeps.
    pub(super) head: usize,
}

/// One turn, as far as it was not evicted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    /// Where its tokens begin.
    pub(super) start: usize,
    /// Where the answer begins. It ends where the next turn starts.
    pub(super) answer: usize,
    pub(super) user: String,
}

impl Conversation {
    /// Follows a sequence that was cut to `len`.
    pub(super) fn truncate(&mut self, len: usize) {
        if len == 0 {
            *self = Conversation::default();
            return;
        }
        let left = self.turns.partition_point(|t| t.answer <= len);
        // With no turn left it cannot be told what the sequence ends in.
        let whole = self.turns.get(left).is_none_or(|cut| cut.start == len);
        self.open &= left > 0 && whole;
        self.turns.truncate(left);
        self.head = self.head.min(len);
    }

    /// Follows a sequence from which `range` was taken out, and with it the beginning of turns.
    pub(super) fn forget(&mut self, range: Range<usize>) {
        self.turns.retain(|t| t.start >= range.end);
        for turn in &mut self.turns {
            turn.start -= range.len();
            turn.answer -= range.len();
        }
    }
}

impl Session {
    /// Says `user` in the conversation and generates the answer. The first turn is spelled by the model's template, with the
    /// session's system prompt if it has one; later turns run only what they add. Special tokens spelled out in `user`
    /// enter as plain text and cannot forge a turn.
    ///
    /// Tokens that [`generate`](Session::generate), [`decode`](Session::decode) or [`prefill`](Session::prefill) appended
    /// after an answer count as part of it. A session that was prefilled before its first turn is refused: nothing says
    /// where the template should go on from.
    pub fn chat(
        &mut self,
        user: &str,
        options: &GenerateOptions,
        on_piece: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Generation> {
        if !self.is_empty() && !self.conversation.open {
            bail!(
                InvalidArgument,
                "the session holds {} tokens that do not end in an answer of a chat; reset it, or go on with prefill and generate",
                self.len()
            );
        }
        self.undone_on_error(|session| session.turn(user, options, on_piece))
    }

    /// The conversation so far: the system prompt, and the turns that are in the sequence.
    pub fn messages(&self) -> Result<Vec<Message>> {
        let turns = &self.conversation.turns;
        let bytes = self.len().saturating_mul(FOR_TOKEN) + self.text_bytes();
        let _words = alloc::set_aside(bytes.saturating_mul(2))?;
        let mut messages: Vec<Message> = self.system().collect();
        for (i, turn) in turns.iter().enumerate() {
            let end = turns.get(i + 1).map_or(self.len(), |next| next.start);
            let mut answer = Text::after(&[], &self.model, &[])?;
            for &token in &self.tokens[turn.answer..end] {
                answer.push(token);
            }
            messages.push(Message::new("user", &*turn.user));
            messages.push(Message::new("assistant", answer.into_string()));
        }
        Ok(messages)
    }

    fn system(&self) -> impl Iterator<Item = Message> {
        let system = self.options.system.as_deref();
        system.map(|s| Message::new("system", s)).into_iter()
    }

    fn turn(
        &mut self,
        user: &str,
        options: &GenerateOptions,
        on_piece: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let started = std::time::Instant::now();
        // Copies of the words, as messages and in the conversation.
        let _words = alloc::set_aside((self.text_bytes() + user.len()).saturating_mul(8))?;
        let first = self.is_empty();
        let model = self.model.clone();
        let text = Transcript::new(&model, &[], options)?;
        let spelling = Spelling {
            model: &model,
            system: self.system().collect(),
        };
        let tokens = if first {
            let (tokens, head) = spelling.first(user)?;
            self.conversation.head = head;
            tokens
        } else {
            spelling.following(user)?
        };
        self.model.check_tokens(&tokens)?;
        self.make_room(tokens.len())?;
        let start = self.len();
        self.push(&tokens);
        self.settle()?;
        call::check()?;
        let prefill_seconds = started.elapsed().as_secs_f64();
        self.conversation.turns.push(Turn {
            start,
            answer: self.len(),
            user: user.to_owned(),
        });
        self.conversation.open = true;
        let mut generation = self.generate_text(text, options, on_piece)?;
        generation.prompt_tokens = tokens.len();
        generation.timings.prefill_seconds = prefill_seconds;
        generation.timings.first_token_seconds += prefill_seconds;
        Ok(generation)
    }
}

/// How a model's template spells turns.
struct Spelling<'a> {
    model: &'a Model,
    system: Vec<Message>,
}

impl Spelling<'_> {
    /// The tokens of a first turn up to the answer, and how many of them stand before the user's words.
    fn first(&self, user: &str) -> Result<(Vec<u32>, usize)> {
        let tokenizer = self.model.tokenizer()?;
        let marks = self.marks(user);
        let marked = self.render(&[Message::new("user", &*marks.user)])?;
        let (before, after) = split(&marked, &marks.user, "user")?;
        let head = tokenizer.encode(before, false)?;
        let turn = match names_special(tokenizer, user)? {
            true => tokenizer.encode_around(before, user, after)?,
            false => tokenizer.encode(&self.render(&[Message::new("user", user)])?, false)?,
        };
        let common = head.iter().zip(&turn).take_while(|(a, b)| a == b).count();
        let mut tokens = self.beginning(tokenizer)?;
        let head = tokens.len() + common;
        tokens.extend(turn);
        Ok((tokens, head))
    }

    /// The tokens that stand before what the template writes. A template writes all that a text begins with; where ChatML
    /// stands in for one, the tokenizer knows that.
    fn beginning(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        let mut whole = Vec::new();
        if !self.model.info().chat_template {
            let bare = tokenizer.encode("a", false)?;
            whole = tokenizer.encode("a", true)?;
            let at = whole.windows(bare.len().max(1)).position(|w| w == bare);
            whole.truncate(at.unwrap_or(0));
        }
        Ok(whole)
    }

    /// The tokens that a following turn adds. They are what comes after an answer in a conversation of two turns, whatever
    /// the answer was: templates may spell earlier answers differently, but those stay as the model gave them.
    fn following(&self, user: &str) -> Result<Vec<u32>> {
        let tokenizer = self.model.tokenizer()?;
        let marks = self.marks(user);
        let plain = names_special(tokenizer, user)?;
        let says = if plain { &*marks.user } else { user };
        let spelled = self.render(&[
            Message::new("user", "Hello"),
            Message::new("assistant", &*marks.answer),
            Message::new("user", says),
        ])?;
        let (_, added) = split(&spelled, &marks.answer, "assistant")?;
        if !plain {
            return tokenizer.encode(added, false);
        }
        let (before, after) = split(added, &marks.user, "user")?;
        tokenizer.encode_around(before, user, after)
    }

    fn render(&self, turns: &[Message]) -> Result<String> {
        let messages = [&self.system, turns].concat();
        self.model.chat_template().render(&messages, true)
    }

    /// Contents that stand for others and occur in none of them.
    fn marks(&self, user: &str) -> Marks {
        let mut number = 0;
        loop {
            let mark = format!("content-{number}-here");
            let taken = |text: &str| text.contains(&mark);
            if !taken(user) && !self.system.iter().any(|m| taken(&m.content)) {
                return Marks {
                    user: format!("{mark}-user"),
                    answer: format!("{mark}-answer"),
                };
            }
            number += 1;
        }
    }
}

struct Marks {
    user: String,
    answer: String,
}

/// What stands before and after `mark`, which the template was given as what `role` says.
fn split<'a>(spelled: &'a str, mark: &str, role: &str) -> Result<(&'a str, &'a str)> {
    match spelled.split_once(mark) {
        Some((before, after)) if !after.contains(mark) => Ok((before, after)),
        found => bail!(
            Unsupported,
            "the model's chat template writes the words of the {role} {}, so turns cannot be told apart; it must write them once, as they are",
            if found.is_some() {
                "more than once"
            } else {
                "changed or not at all"
            }
        ),
    }
}

/// Whether encoding `text` as it stands gives special tokens.
fn names_special(tokenizer: &Tokenizer, text: &str) -> Result<bool> {
    let tokens = tokenizer.encode(text, false)?;
    Ok(tokens.iter().any(|&t| tokenizer.is_special(t)))
}
