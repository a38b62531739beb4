//! Recorded passes: decode steps, verifications and guesses of a drafter. They are kept while they fit in a stated number of bytes; beyond it those go that were used least recently.

use std::collections::HashMap;

use super::row_adapters::AdaptedPass;
use crate::base::Result;
use crate::cuda::{DecodePlan, Graph};
use crate::tensor::KvType;

/// Numbers of rows that steps are recorded for. A step of fewer sequences has rows that nobody reads.
const BUCKETS: [usize; 16] = [
    1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256,
];

/// The most bytes of recorded steps of a model.
pub(in crate::model) const MOST_BYTES: usize = 128 << 20;
/// Bytes of a recorded kernel, in host and device memory together: `benches/NOTES.md` has the measurement.
const KERNEL_BYTES: usize = 10 << 10;

/// Rows of a sequence that verifications are recorded for. One of fewer rows has rows that nobody reads.
const VERIFIED: [usize; 3] = [2, 4, 8];

/// The most rows of a sequence that verifications are recorded for.
pub(in crate::model) const MOST_VERIFIED: usize = VERIFIED[VERIFIED.len() - 1];

/// The number of rows of a sequence with which a verification of `rows` of them is recorded; `None` for more than are recorded.
pub(super) fn verified_bucket(rows: usize) -> Option<usize> {
    VERIFIED.into_iter().find(|&bucket| bucket >= rows)
}

/// The number of rows with which a step of `sequences` sequences is recorded.
pub(in crate::model) fn bucket(sequences: usize) -> usize {
    let larger = BUCKETS.into_iter().find(|&rows| rows >= sequences);
    larger.unwrap_or(sequences)
}

/// How a step selects the next tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Selection {
    /// The argmax.
    Argmax,
    /// Draws by rules; `penalties` says whether any of them has a repetition penalty.
    Drawn { penalties: bool },
}

/// The work of a recorded pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum GraphKind {
    /// A decode step, which the drafter follows with `follows`.
    Step { follows: bool },
    /// A verification of several rows of each sequence, which the drafter follows with `follows`.
    Verification { follows: bool },
    /// A guess of the drafter.
    Guess,
}

/// The properties of a pass that its recording depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct GraphKey {
    pub(super) rows: usize,
    /// Element type of the cache, whose address is recorded too.
    pub(super) kv: KvType,
    /// Indexed like [`Sizes::attentions`](super::sizes::Sizes::attentions).
    pub(super) decodes: Vec<DecodePlan>,
    /// `None` for a pass that ends with logits, from which tokens are chosen afterwards.
    pub(super) selection: Option<Selection>,
    /// Whether the long RoPE table applies.
    pub(super) long: bool,
    /// The parts that its adapters change, if any row has one.
    pub(super) adapted: Option<AdaptedPass>,
    pub(super) kind: GraphKind,
}

/// A recording, the bytes that it takes, and the number of the launch that used it last.
struct Recorded {
    graph: Graph,
    bytes: usize,
    used: u64,
}

/// The recorded steps of a model.
#[derive(Default)]
pub(super) struct Graphs {
    all: HashMap<GraphKey, Recorded>,
    bytes: usize,
    launches: u64,
}

impl Graphs {
    /// Launches a recorded step. Returns whether there was one.
    pub(super) fn launch(&mut self, key: &GraphKey) -> Result<bool> {
        self.launches += 1;
        let Some(recorded) = self.all.get_mut(key) else {
            return Ok(false);
        };
        recorded.used = self.launches;
        recorded.graph.launch().map(|()| true)
    }

    /// Keeps a recording, and drops others if all together take too much.
    pub(super) fn keep(&mut self, key: GraphKey, graph: Graph) {
        let bytes = graph.kernels() * KERNEL_BYTES;
        while self.bytes + bytes > MOST_BYTES {
            let oldest = self.all.iter().min_by_key(|(_, recorded)| recorded.used);
            let Some(oldest) = oldest.map(|(key, _)| key.clone()) else {
                break;
            };
            if let Some(dropped) = self.all.remove(&oldest) {
                self.bytes -= dropped.bytes;
            }
        }
        self.bytes += bytes;
        let used = self.launches;
        self.all.insert(key, Recorded { graph, bytes, used });
    }

    /// Drops all: memory that they use moves.
    pub(super) fn clear(&mut self) {
        self.all.clear();
        self.bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_every_step() {
        for sequences in 1..=crate::model::fused::BATCH {
            let rows = bucket(sequences);
            assert!(
                rows >= sequences && rows < 2 * sequences,
                "{sequences}: {rows}"
            );
        }
        assert_eq!([1, 3, 9, 33, 200].map(bucket), [1, 4, 12, 48, 224]);
        let verified = [1, 2, 3, 5, 8, 9].map(verified_bucket);
        assert_eq!(
            verified,
            [Some(2), Some(2), Some(4), Some(8), Some(8), None]
        );
    }
}
