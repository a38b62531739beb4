//! A host's own change of logits before a choice, and the check of what it has written.

use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;

use crate::base::Result;
use crate::base::error::bail;
use crate::cpu::sample::largest;

type Process = dyn Fn(&mut [f32], &[u32]) -> ControlFlow<()> + Send + Sync;

/// A host's own change of logits. Takes the logits, one for each token of the vocabulary, and the tokens that the generation has so far:
/// none where a step or a single choice is part of no generation. [`ControlFlow::Break`] ends the generation as cancelled. It runs on the
/// thread that generates.
#[derive(Clone)]
pub struct LogitsProcessor(Arc<Process>);

impl LogitsProcessor {
    /// A processor that calls `process`.
    pub fn new(
        process: impl Fn(&mut [f32], &[u32]) -> ControlFlow<()> + Send + Sync + 'static,
    ) -> Self {
        LogitsProcessor(Arc::new(process))
    }

    /// Changes `logits`, which are `own` after earlier changes, before the choice of a token after `position` tokens. Fails as cancelled if
    /// the processor ends the generation, and as an invalid argument for a NaN or plus infinity that `own` does not have.
    pub(super) fn process(
        &self,
        logits: &mut [f32],
        own: &[f32],
        generated: &[u32],
        position: usize,
    ) -> Result<()> {
        if (self.0)(logits, generated).is_break() {
            bail!(
                Cancelled,
                "the logits processor has ended the choice of a token"
            );
        }
        match largest(logits) {
            ControlFlow::Break(token) if own.get(token).is_some_and(|&own| is_usable(own)) => {
                bail!(
                    InvalidArgument,
                    "the logits processor has written {} as the logit of token {token} at position {position}; write a finite number, or minus infinity to exclude the token",
                    logits[token]
                )
            }
            // A NaN of the model stays visible: the choice fails by it.
            _ => Ok(()),
        }
    }
}

/// Fails if a processor has left none of the logits at `position` finite: those of excluded tokens are minus infinity.
pub(super) fn check_left(logits: &[f32], position: usize) -> Result<()> {
    if largest(logits) == ControlFlow::Continue(f32::NEG_INFINITY) {
        bail!(
            InvalidArgument,
            "the logits processor has left no token at position {position} that may be chosen; leave one such token a finite logit"
        );
    }
    Ok(())
}

/// Whether a choice can be made from such a logit.
fn is_usable(logit: f32) -> bool {
    !logit.is_nan() && logit != f32::INFINITY
}

impl fmt::Debug for LogitsProcessor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LogitsProcessor")
    }
}

impl PartialEq for LogitsProcessor {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
