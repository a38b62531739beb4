//! Compares a model with a reference of the same shape on a text: by token, by position, by block. Both run block by block from their
//! checkpoints, so that only one block of each is in memory at a time. Knows no text: it is given tokens.

mod alike;
mod comparison;
mod pair;
mod predictions;
mod streams;
mod summary;

use std::sync::Arc;

pub use self::comparison::{Comparison, Measures};
use self::pair::Pair;
pub use self::predictions::{LIKELY, TokenComparison};
pub use self::summary::{PositionRange, Summary, by_position, worst};
use super::training::Source;
use crate::base::Result;
use crate::base::error::bail;
use crate::ops::Device;

/// Progress of a comparison, in passes of a batch through a block or a chunk of the head.
#[derive(Clone, Copy, Debug)]
pub struct CompareProgress {
    /// Passes done.
    pub done: u64,
    /// Total number of passes.
    pub total: u64,
}

/// Fails unless the models have the same shape and vocabulary size; the error names what differs.
pub fn check_alike(examined: &Source, reference: &Source) -> Result<()> {
    alike::check(examined.spec(), reference.spec())
}

/// Compares `examined` with `reference` on windows of tokens. Both models start at the beginning of each window. Cancelled with the
/// thread's [`call`](crate::base::call).
pub fn compare(
    device: &Device,
    examined: &Arc<Source>,
    reference: &Arc<Source>,
    windows: &[&[u32]],
    measures: Measures,
    progress: &mut dyn FnMut(CompareProgress),
) -> Result<Comparison> {
    check_alike(examined, reference)?;
    check_windows(examined, reference, windows)?;
    let mut pair = Pair::new(device, examined, reference, measures)?;
    let batches = pair.batches(windows);
    let total = batches.len() as u64 * pair.passes();
    let mut done = 0;
    progress(CompareProgress { done, total });
    let mut tell = || {
        done += 1;
        progress(CompareProgress { done, total });
    };
    let mut first = 0;
    for batch in batches {
        pair.run(first, &windows[first..first + batch], &mut tell)?;
        first += batch;
    }
    Ok(pair.finish())
}

/// The mean KL(reference || mixture) in nats a token for each block of `examined`, where the mixture is `reference` with only this block
/// replaced: [`Comparison::block_divergences`] on its own.
pub fn block_divergences(
    device: &Device,
    examined: &Arc<Source>,
    reference: &Arc<Source>,
    windows: &[&[u32]],
    progress: &mut dyn FnMut(CompareProgress),
) -> Result<Vec<f64>> {
    let measures = Measures {
        tokens: false,
        streams: false,
        blocks: true,
    };
    let found = compare(device, examined, reference, windows, measures, progress)?;
    Ok(found.block_divergences)
}

fn check_windows(examined: &Source, reference: &Source, windows: &[&[u32]]) -> Result<()> {
    let positions = [examined, reference].map(|source| source.spec().max_positions);
    let context = positions[0].min(positions[1]);
    if windows.is_empty() {
        bail!(
            InvalidArgument,
            "no window to compare on; there must be at least one"
        );
    }
    for window in windows {
        if window.len() < 2 || window.len() > context {
            bail!(
                InvalidArgument,
                "a window of {} tokens; it must have 2 to {context}, the context that both models were made for",
                window.len()
            );
        }
    }
    Ok(())
}
