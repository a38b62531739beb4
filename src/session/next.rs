//! Logits and argmax of a session's next token, as far as they are known.

use crate::base::Result;

/// The state of knowledge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Known {
    /// Nothing: the last tokens are pending, or ran where no logits were given.
    #[default]
    Nothing,
    /// The argmax, chosen by a device that kept the logits.
    Argmax(u32),
    /// The logits. The cache holds every token.
    Logits,
    /// The logits, and their argmax.
    LogitsAndArgmax(u32),
}

/// Knowledge of the next token. The memory of logits is used again.
#[derive(Debug, Default)]
pub(super) struct Next {
    known: Known,
    values: Vec<f32>,
}

impl Clone for Next {
    fn clone(&self) -> Next {
        Next {
            known: self.known,
            values: self.logits().map_or(Vec::new(), <[f32]>::to_vec),
        }
    }
}

impl Next {
    /// Known logits.
    pub(super) fn of(logits: Vec<f32>) -> Next {
        Next {
            known: match logits.is_empty() {
                true => Known::Nothing,
                false => Known::Logits,
            },
            values: logits,
        }
    }

    /// The logits, if they are known.
    pub(super) fn logits(&self) -> Option<&[f32]> {
        match self.known {
            Known::Nothing | Known::Argmax(_) => None,
            Known::Logits | Known::LogitsAndArgmax(_) => Some(&self.values),
        }
    }

    /// The argmax, if it is known.
    pub(super) fn argmax(&self) -> Option<u32> {
        match self.known {
            Known::Nothing | Known::Logits => None,
            Known::Argmax(token) | Known::LogitsAndArgmax(token) => Some(token),
        }
    }

    /// Whether neither is known.
    pub(super) fn is_unknown(&self) -> bool {
        self.known == Known::Nothing
    }

    /// Records the argmax.
    pub(super) fn set_argmax(&mut self, token: u32) {
        self.known = match self.known {
            Known::Nothing | Known::Argmax(_) => Known::Argmax(token),
            Known::Logits | Known::LogitsAndArgmax(_) => Known::LogitsAndArgmax(token),
        };
    }

    /// Nothing is known from now on: a token was appended or removed.
    pub(super) fn forget(&mut self) {
        self.known = Known::Nothing;
    }

    /// The logits that `run` gives; if it fails, nothing is known.
    pub(super) fn fill(&mut self, run: impl FnOnce(&mut Vec<f32>) -> Result<()>) -> Result<()> {
        self.forget();
        run(&mut self.values)?;
        self.known = Known::Logits;
        Ok(())
    }
}
