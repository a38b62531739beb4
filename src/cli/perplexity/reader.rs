//! Reads tokens with a model, and returns the logits after each.

use std::sync::Arc;

use NVFP4::base::Result;
use NVFP4::base::error::bail;
use NVFP4::engine::{NewTokens, Sequence, Served};
use NVFP4::model::{KvType, Logits, Output, Scratch, Wanted};
use NVFP4::ops::likelihood::Likelihood;

/// Upper limit of logit bytes that a GPU computes at a time, unless [`FEWEST`] rows have more.
const LOGIT_BYTES: usize = 64 << 20;
/// The fewest rows of logits that are computed together. The CPU takes no more, because its kernels for few rows are the fastest.
const FEWEST: usize = 32;

/// Number of tokens whose logits are computed at a time, for this vocabulary size.
fn run_of(vocabulary: usize, is_cuda: bool) -> usize {
    match is_cuda {
        true => (LOGIT_BYTES / (vocabulary.max(1) * size_of::<f32>())).max(FEWEST),
        false => FEWEST,
    }
}

/// A model with the cache of one sequence.
pub(super) struct Reader {
    model: Arc<Served>,
    cache: Sequence,
    scratch: Scratch,
    logits: Vec<f32>,
}

impl Reader {
    /// A reader of sequences of at most `capacity` tokens.
    pub(super) fn new(model: &Arc<Served>, capacity: usize, kv: KvType) -> Result<Self> {
        Ok(Reader {
            cache: model.sequence(capacity, kv)?,
            scratch: Scratch::default(),
            logits: Vec::new(),
            model: model.clone(),
        })
    }

    /// Number of tokens to score at a time.
    pub(super) fn scored_run(&self) -> usize {
        self.model.pass_rows()
    }

    /// Number of tokens to read at a time.
    pub(super) fn run(&self) -> usize {
        run_of(self.model.spec().vocab_size, self.model.device().is_cuda())
    }

    /// Keeps the first `len` tokens of the sequence, and forgets the rest. Returns how many are kept: none, if layers no longer have what
    /// the next token sees.
    pub(super) fn truncate(&mut self, len: usize) -> Result<usize> {
        self.cache.truncate(len)?;
        Ok(self.cache.len())
    }

    /// Reads tokens after those of earlier calls, without logits.
    pub(super) fn skip(&mut self, tokens: &[u32]) -> Result<()> {
        match tokens.is_empty() {
            true => Ok(()),
            false => self.forward(tokens, Logits::None),
        }
    }

    /// Reads tokens after those of earlier calls, and returns the logits after each.
    pub(super) fn read(&mut self, tokens: &[u32]) -> Result<&[f32]> {
        self.forward(tokens, Logits::All)?;
        Ok(&self.logits)
    }

    /// Reads tokens after those of earlier calls, and returns the likelihood of each of `next`, one after each. On a GPU the logits stay on the
    /// device.
    pub(super) fn score(&mut self, tokens: &[u32], next: &[u32]) -> Result<Vec<Likelihood>> {
        let work = NewTokens {
            tokens,
            sequence: &mut self.cache,
            wanted: Wanted::Likelihoods(next),
        };
        self.logits.clear();
        let (scratch, logits) = (&mut self.scratch, &mut self.logits);
        let mut outputs = self.model.run(vec![work], false, scratch, logits)?;
        match outputs.pop().transpose()? {
            Some(Output::Likelihoods(found)) => Ok(found),
            other => bail!(Internal, "{other:?} in the place of likelihoods"),
        }
    }

    fn forward(&mut self, tokens: &[u32], logits: Logits) -> Result<()> {
        self.model.forward(
            tokens,
            &mut self.cache,
            &mut self.scratch,
            logits,
            &mut self.logits,
        )
    }
}

/// Log-sum-exp of the logits, and the index of the largest.
pub(super) fn log_sum(logits: &[f32]) -> (f64, usize) {
    let mut top = 0;
    for (i, &logit) in logits.iter().enumerate() {
        if logit > logits[top] {
            top = i;
        }
    }
    let largest = f64::from(logits[top]);
    let sum: f64 = logits.iter().map(|&l| (f64::from(l) - largest).exp()).sum();
    (largest + sum.ln(), top)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logits_of_a_run_are_bounded() {
        assert_eq!(run_of(1 << 16, true), 256);
        assert_eq!(run_of(151_936, true), 110);
        assert_eq!(run_of(1 << 24, true), 32);
        assert!(run_of(0, true) > 32);
        assert_eq!(run_of(1 << 16, false), 32);
    }
}
