//! The text of a sequence as its tokens arrive, and the check whether a token ends it. Generations use it, and callers that step many
//! sessions and choose the tokens themselves.

use std::sync::Arc;

use super::text::GenerationText;
use super::{Finish, GenerateOptions};
use crate::base::Result;
use crate::engine::Served;

/// Follows one sequence and decodes its text.
pub struct Transcript {
    model: Arc<Served>,
    text: GenerationText,
    stop_tokens: Vec<u32>,
    ignore_model_stops: bool,
    /// Remaining tokens.
    left: usize,
}

impl Transcript {
    /// A transcript that continues `tokens`, which may end within a character, and ends where a generation with `options` would.
    pub fn new(model: &Arc<Served>, tokens: &[u32], options: &GenerateOptions) -> Result<Self> {
        Ok(Transcript {
            text: GenerationText::after(tokens, model, &options.stop_strings)?
                .sparing(options.adjustments.min_tokens),
            model: model.clone(),
            stop_tokens: options.stop_tokens.clone(),
            ignore_model_stops: options.ignore_model_stops,
            left: options.max_tokens,
        })
    }

    /// Writes the names of these special tokens as text.
    pub(super) fn showing(mut self, named: &[&'static str]) -> Self {
        self.text = self.text.showing(named);
        self
    }

    /// Whether `token` ends the sequence without being part of it.
    pub fn is_stop(&self, token: u32) -> bool {
        let own = !self.ignore_model_stops && self.model.stop_tokens().contains(&token);
        own || self.stop_tokens.contains(&token)
    }

    /// Refuses a token outside the model's vocabulary.
    pub fn check(&self, token: u32) -> Result<()> {
        self.model.check_tokens(&[token])
    }

    /// Adds the next token. Returns the text that it completes, and whether it ends the sequence. A stop token is not part of the sequence,
    /// and adds nothing.
    pub fn push(&mut self, token: u32) -> (&str, Option<Finish>) {
        if self.is_stop(token) {
            return ("", Some(Finish::Stop));
        }
        self.left = self.left.saturating_sub(1);
        let finish = match self.text.push(token) {
            true => Some(Finish::StopString),
            false => (self.left == 0).then_some(Finish::Length),
        };
        (self.text.next(), finish)
    }

    /// Ends the text and returns the held-back possible beginning of a stop string. An incomplete character is not part of it.
    pub fn finish(&mut self) -> &str {
        self.text.finish();
        self.text.next()
    }

    /// All of the text.
    pub fn into_text(self) -> String {
        self.text.into_string()
    }
}
