//! The generation loop: logits to a token, the token to text, until something ends it.

use std::ops::ControlFlow;
use std::time::Instant;

use serde::Serialize;

use super::{Sampler, SamplingOptions, Session, Transcript};
use crate::base::{ErrorKind, Result, call, memory};
use crate::model::{KvCache, Logits};

/// How to generate.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: SamplingOptions,
    /// Tokens that end the text, besides the model's own. The one that did is not part of the sequence.
    pub stop_tokens: Vec<u32>,
    /// Strings that end the text, and are not part of it. Their tokens stay in the sequence. A special token that is
    /// generated, though it gives no text, counts for a stop string with its name in it.
    pub stop_strings: Vec<String>,
    /// Takes the model's own stop tokens like any other.
    pub ignore_model_stops: bool,
    /// Computes every token from the whole sequence, without cached keys and values; slow, for comparison.
    pub replay: bool,
    /// Tells each token's probability, for which the logits of each come to the host.
    pub log_probabilities: bool,
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
            log_probabilities: false,
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
    /// The callback, or the end of the thread's [`call`].
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
    /// Their text, without special tokens and up to a stop string. A character that is unfinished at the end is not part of
    /// it: its bytes come with the text of the next generation if that completes it.
    pub text: String,
    /// What ended it.
    pub finish: Finish,
    /// Tokens that stood before it: all that the session held, or for a chat turn those that the turn added.
    pub prompt_tokens: usize,
    /// How long it took.
    pub timings: Timings,
}

/// A token as it comes, or text that was held back until the end. The texts of all pieces make the text of the generation; only a
/// callback that breaks misses what may have been the beginning of a stop string.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Piece<'a> {
    /// The token; none for the text that was held back, which may come last.
    pub token: Option<u32>,
    /// The text that it completes; empty while a character or what may be a stop string is incomplete.
    pub text: &'a str,
    /// The natural logarithm of the token's probability as the model gives it, before temperature, penalties and the like, where
    /// that was asked for.
    pub log_probability: Option<f32>,
}

impl Session {
    /// Generates from where the session stands. If it fails, nothing was generated.
    pub fn generate(
        &mut self,
        options: &GenerateOptions,
        on_piece: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let text = Transcript::new(&self.model, &self.tokens, options)?;
        self.undone_on_error(|session| session.generate_text(text, options, on_piece))
    }

    /// The loop, whose tokens go on with `text`.
    pub(super) fn generate_text(
        &mut self,
        mut text: Transcript,
        options: &GenerateOptions,
        on_piece: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let start = Instant::now();
        let mut sampler = Sampler::new(&options.sampling)?.after(self.appended());
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
                true => self.logits_from_scratch(&mut replayed).and_then(|()| {
                    let token = sampler.sample(&replayed, &self.tokens)?;
                    Ok((token, Some(&*replayed)))
                }),
                false if options.log_probabilities => self.settle().and_then(|()| {
                    let token = sampler.sample(&self.logits, &self.tokens)?;
                    Ok((token, Some(&*self.logits)))
                }),
                false => {
                    let token = self.settle_chosen(&mut sampler, look_ahead);
                    token.map(|token| (token, None))
                }
            };
            let chosen = chosen.map(|(token, logits)| {
                let logits = logits.filter(|_| options.log_probabilities);
                (token, logits.map(|all| log_probability(all, token)))
            });
            let (token, log_probability) = match chosen {
                Ok(token) if !call::is_over() => token,
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
            if text.is_stop(token) {
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
            memory::make_room(&mut out.tokens, 1)?;
            self.push(&[token]);
            out.tokens.push(token);
            let (piece, finish) = text.push(token);
            if on_piece(Piece {
                token: Some(token),
                text: piece,
                log_probability,
            })
            .is_break()
            {
                broke = true;
                out.finish = Finish::Cancelled;
                break;
            }
            if let Some(finish) = finish {
                out.finish = finish;
                break;
            }
        }
        if out.finish != Finish::StopString && !broke {
            let rest = Piece {
                token: None,
                text: text.finish(),
                log_probability: None,
            };
            if !rest.text.is_empty() && on_piece(rest).is_break() {
                out.finish = Finish::Cancelled;
            }
        }
        out.text = text.into_text();
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

/// The natural logarithm of the share that `token` has of the softmax of `logits`.
fn log_probability(logits: &[f32], token: u32) -> f32 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from(l - most).exp()).sum();
    (f64::from(logits[token as usize] - most) - sum.ln()) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_probabilities_are_those_of_the_softmax() {
        let logits = [0.0, 1.0, f32::NEG_INFINITY, 3.0];
        let sum = 1.0 + 1f64.exp() + 3f64.exp();
        for (token, expected) in [(0, -sum.ln()), (3, 3.0 - sum.ln())] {
            assert!((f64::from(log_probability(&logits, token)) - expected).abs() < 1e-6);
        }
        assert_eq!(log_probability(&logits, 2), f32::NEG_INFINITY);
        // Large ones do not overflow.
        assert_eq!(log_probability(&[1e38, -1e38], 0), 0.0);
    }
}
