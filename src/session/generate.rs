//! The generation loop: logits to a token, the token to text, until something ends it. Text that may be the beginning of a
//! stop string waits until that is decided.

use std::ops::ControlFlow;
use std::time::Instant;

use serde::Serialize;

use super::{Sampler, SamplingOptions, Session};
use crate::base::error::bail;
use crate::base::{ErrorKind, Result};
use crate::model::{KvCache, Logits};
use crate::text::Detokenizer;

/// How to generate.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: SamplingOptions,
    /// Tokens that end the text, besides the model's own. The one that did is not part of the sequence.
    pub stop_tokens: Vec<u32>,
    /// Strings that end the text, and are not part of it. Their tokens stay in the sequence.
    pub stop_strings: Vec<String>,
    /// Takes the model's own stop tokens like any other.
    pub ignore_model_stops: bool,
    /// Computes every token from the whole sequence, without cached keys and values; slow, for comparison.
    pub replay: bool,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        GenerateOptions {
            max_tokens: 512,
            sampling: SamplingOptions::default(),
            stop_tokens: Vec::new(),
            stop_strings: Vec::new(),
            ignore_model_stops: false,
            replay: false,
        }
    }
}

/// What ended a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// A stop token.
    Stop,
    /// A stop string.
    StopString,
    /// The most tokens that were allowed.
    Length,
    /// The context is full, and nothing may be or is left to be evicted.
    Context,
    /// The callback, or a [`Canceller`](super::Canceller).
    Cancelled,
}

/// How long a generation took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Timings {
    /// Running what stood before the first token and had not been run.
    pub prefill_seconds: f64,
    /// From the call to the first token.
    pub first_token_seconds: f64,
    /// From the first token to the end.
    pub decode_seconds: f64,
}

/// What was generated.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The tokens, which the session now holds. A stop token is not among them.
    pub tokens: Vec<u32>,
    /// Their text, without special tokens and up to a stop string.
    pub text: String,
    /// What ended it.
    pub finish: Finish,
    /// Tokens that stood before it: all that the session held, or for a chat turn those that the turn added.
    pub prompt_tokens: usize,
    /// How long it took.
    pub timings: Timings,
}

/// A token as it comes. The texts of all pieces make the text of the generation; only a callback that breaks misses what was
/// held back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece<'a> {
    /// The token. The last one comes a second time if text was held back until the end.
    pub token: u32,
    /// The text that it completes; empty while a character or what may be a stop string is incomplete.
    pub text: &'a str,
}

impl Session {
    /// Generates from where the session stands. If it fails, nothing was generated.
    pub fn generate(
        &mut self,
        options: &GenerateOptions,
        on_piece: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Generation> {
        self.canceller.clear();
        // The text goes on after the last tokens, which may end within a character.
        let tail = self.tokens.len().saturating_sub(4);
        let before = self.tokens[tail..].to_vec();
        self.undone_on_error(|session| session.generate_after(&before, options, on_piece))
    }

    /// The loop, with text that goes on after that of `before`.
    pub(super) fn generate_after(
        &mut self,
        before: &[u32],
        options: &GenerateOptions,
        on_piece: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let start = Instant::now();
        let mut sampler = Sampler::new(&options.sampling)?.after(self.tokens.len());
        let mut text = Text::new(self, options, before)?;
        let mut out = Generation {
            tokens: Vec::new(),
            text: String::new(),
            finish: Finish::Length,
            prompt_tokens: self.tokens.len(),
            timings: Timings::default(),
        };
        let mut replayed = Vec::new();
        let mut broke = false;
        let mut first = None;
        while out.tokens.len() < options.max_tokens {
            let look_ahead = out.tokens.len() + 1 < options.max_tokens;
            let chosen = match options.replay {
                true => self
                    .logits_from_scratch(&mut replayed)
                    .and_then(|()| sampler.sample(&replayed, &self.tokens)),
                false => self.settle_chosen(&mut sampler, look_ahead),
            };
            let token = match chosen {
                Ok(token) if !self.canceller.is_set() => token,
                Err(e) if e.kind() != ErrorKind::Cancelled => return Err(e),
                _ => {
                    out.finish = Finish::Cancelled;
                    break;
                }
            };
            if out.tokens.is_empty() {
                out.timings.prefill_seconds = start.elapsed().as_secs_f64();
            }
            if first.is_none() {
                out.timings.first_token_seconds = start.elapsed().as_secs_f64();
                first = Some(Instant::now());
            }
            let own = !options.ignore_model_stops && self.model.stop_tokens().contains(&token);
            if own || options.stop_tokens.contains(&token) {
                out.finish = Finish::Stop;
                break;
            }
            match self.make_room(1) {
                Err(e) if e.kind() == ErrorKind::ContextFull => {
                    out.finish = Finish::Context;
                    break;
                }
                room => room?,
            }
            self.push(&[token]);
            out.tokens.push(token);
            let stopped = text.push(token);
            if on_piece(Piece {
                token,
                text: text.next(),
            })
            .is_break()
            {
                broke = true;
                out.finish = Finish::Cancelled;
                break;
            }
            if stopped {
                out.finish = Finish::StopString;
                break;
            }
        }
        if out.finish != Finish::StopString && !broke {
            text.finish();
            let rest = text.next();
            if let Some(&token) = out.tokens.last()
                && !rest.is_empty()
                && on_piece(Piece { token, text: rest }).is_break()
            {
                out.finish = Finish::Cancelled;
            }
        }
        out.text = text.all;
        if let Some(first) = first {
            out.timings.decode_seconds = first.elapsed().as_secs_f64();
        }
        Ok(out)
    }

    fn logits_from_scratch(&mut self, logits: &mut Vec<f32>) -> Result<()> {
        if self.tokens.is_empty() {
            return self.settle();
        }
        let mut cache = KvCache::new(
            self.model.device(),
            self.model.config(),
            self.options.context,
            self.options.kv,
        )?;
        self.model.forward(
            &self.tokens,
            &mut cache,
            &mut self.scratch,
            Logits::Last,
            logits,
        )
    }
}

/// The text of a generation: what was shown, and what waits.
struct Text<'a> {
    /// None where the model has no tokenizer; there is no text then.
    detokenizer: Option<Detokenizer>,
    stops: &'a [String],
    all: String,
    /// Bytes of `all` that may be shown, and that were.
    free: usize,
    shown: usize,
}

impl<'a> Text<'a> {
    fn new(session: &Session, options: &'a GenerateOptions, before: &[u32]) -> Result<Self> {
        let stops = &options.stop_strings;
        if stops.iter().any(String::is_empty) {
            bail!(
                InvalidArgument,
                "a stop string is empty, which every text contains"
            );
        }
        let mut detokenizer = match session.model.tokenizer() {
            Ok(tokenizer) => Some(Detokenizer::new(tokenizer)),
            Err(e) if stops.is_empty() && e.kind() == ErrorKind::NotFound => None,
            Err(e) => return Err(e.within("stop strings")),
        };
        if let Some(detokenizer) = &mut detokenizer {
            for &token in before {
                text_of(detokenizer, token);
            }
        }
        Ok(Text {
            detokenizer,
            stops,
            all: String::new(),
            free: 0,
            shown: 0,
        })
    }

    /// Adds a token. Whether that completes a stop string, which is then cut off.
    fn push(&mut self, token: u32) -> bool {
        if let Some(detokenizer) = &mut self.detokenizer {
            let text = text_of(detokenizer, token);
            self.all.push_str(&text);
        }
        self.look()
    }

    /// Tells that no more comes: nothing waits any longer.
    fn finish(&mut self) {
        if let Some(detokenizer) = &mut self.detokenizer {
            self.all.push_str(&detokenizer.finish());
        }
        self.free = self.all.len();
    }

    /// The text that may be shown and was not.
    fn next(&mut self) -> &str {
        let from = std::mem::replace(&mut self.shown, self.free);
        &self.all[from..self.free]
    }

    fn look(&mut self) -> bool {
        let waiting = &self.all[self.free..];
        if let Some(at) = self.stops.iter().filter_map(|s| waiting.find(&**s)).min() {
            self.free += at;
            self.all.truncate(self.free);
            return true;
        }
        let may_begin_stop = |rest: &str| self.stops.iter().any(|s| s.starts_with(rest));
        self.free += waiting
            .char_indices()
            .map(|(i, _)| i)
            .find(|&i| may_begin_stop(&waiting[i..]))
            .unwrap_or(waiting.len());
        false
    }
}

/// The text that `token` completes; none for ids that a model has rows for, but its tokenizer no text.
fn text_of(detokenizer: &mut Detokenizer, token: u32) -> String {
    detokenizer.push(token).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What is shown of `pieces`, and whether a stop string ended it.
    fn show(pieces: &[String], stops: &[String]) -> (Vec<String>, bool) {
        let mut text = Text {
            detokenizer: None,
            stops,
            all: String::new(),
            free: 0,
            shown: 0,
        };
        let mut shown = Vec::new();
        for piece in pieces {
            text.all.push_str(piece);
            let stopped = text.look();
            shown.push(text.next().to_owned());
            if stopped {
                return (shown, true);
            }
        }
        text.finish();
        shown.push(text.next().to_owned());
        assert_eq!(text.all, shown.concat());
        (shown, false)
    }

    fn strings(parts: &[&str]) -> Vec<String> {
        parts.iter().map(|&p| p.to_owned()).collect()
    }

    #[test]
    fn what_may_begin_a_stop_string_waits() {
        let stops = strings(&["</end>", "STOP"]);
        let (shown, stopped) = show(&strings(&["a <", "/e", "n</", "end", "> b"]), &stops);
        assert_eq!(shown, ["a ", "", "</en", "", ""]);
        assert!(stopped);
        let (shown, stopped) = show(&strings(&["é</", "é S", "TO"]), &stops);
        assert_eq!(shown, ["é", "</é ", "", "STO"]);
        assert!(!stopped);
    }

    proptest! {
        #[test]
        fn streaming_shows_what_stands_before_the_first_stop_string(
            pieces in proptest::collection::vec("[abé]{0,3}", 0..12),
            stops in proptest::collection::vec("[abé]{1,4}", 0..3),
        ) {
            let mut whole = String::new();
            let mut cut = None;
            for piece in &pieces {
                whole.push_str(piece);
                cut = stops.iter().filter_map(|s| whole.find(&**s)).min();
                if cut.is_some() {
                    break;
                }
            }
            let (shown, stopped) = show(&pieces, &stops);
            prop_assert_eq!(stopped, cut.is_some());
            prop_assert_eq!(shown.concat(), &whole[..cut.unwrap_or(whole.len())]);
        }
    }
}
