//! A batch: the rows of one pass over the weights, and everything that a pass may know of them. The input of
//! [`Model::run`](super::Model::run).

use std::ops::Range;

use super::adapter::Adapter;
use super::kv::KvTables;
use crate::ops::likelihood::Likelihood;
use crate::ops::sample::Choice;

/// The output requested by a segment.
#[derive(Clone, Copy, Debug)]
pub enum Wanted<'a> {
    /// None: the tokens only enter the cache.
    Nothing,
    /// Logits of the last token.
    Last,
    /// Logits of every token.
    All,
    /// The hidden row of the last token: the output of the final norm. The head does not run.
    LastHidden,
    /// The hidden row of every token.
    AllHidden,
    /// The likelihood of a given token after each token, one for each. On a GPU the logits stay on the device.
    Likelihoods(&'a [u32]),
    /// The next token. On a GPU the logits stay on the device.
    Token(Choice<'a>),
    /// The tokens after as many of the segment's tokens as are right.
    Verified(Verification<'a>),
}

impl Wanted<'_> {
    /// Whether drafted tokens are to be verified by a mask.
    pub(super) fn verifies_by_mask(&self) -> bool {
        matches!(self, Wanted::Verified(how) if how.choice.allowed.is_some())
    }
}

/// How a segment of one token and drafted ones is verified: each row chooses the token after it, until the next drafted token is another
/// one. The choices are those of runs of one token each, with the same logits, draw numbers and histories.
#[derive(Clone, Copy, Debug)]
pub struct Verification<'a> {
    /// The choice after the first row, and its draw; each later row has the next number. The history ends with all tokens of the segment,
    /// of which each row takes those up to its own.
    pub choice: Choice<'a>,
    /// Tokens after which no drafted token is right, because they end the text.
    pub stops: &'a [u32],
}

impl<'a> Verification<'a> {
    /// The choice after row `row` of a segment of `rows`.
    pub(super) fn choice(&self, row: usize, rows: usize) -> Choice<'a> {
        let Choice {
            options,
            draw,
            history,
            allowed,
        } = self.choice;
        Choice {
            options,
            draw: draw + row as u64,
            history: &history[..history.len() - (rows - 1 - row)],
            allowed,
        }
    }
}

/// The hidden row of the position before a segment: the output of the final norm, `[hidden]`, or `None` if it is not known.
#[derive(Clone, Copy, Debug)]
pub struct HiddenBefore<'a>(pub Option<&'a [f32]>);

/// Consecutive tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// Position of the first token. The sequence's keys and values before it are in the cache.
    pub first: usize,
    /// Blocks of the sequence. Those of the tokens' positions must be no other sequence's.
    pub tables: &'a KvTables,
    /// Positions that the sequence may come to, which decides between the short and the long RoPE table.
    pub context: usize,
    /// The adapter of the sequence, which its keys and values were computed with; `None` for the model as it is.
    pub adapter: Option<&'a Adapter>,
    /// The requested output.
    pub wanted: Wanted<'a>,
    /// For a sequence that drafts: the drafter runs its rows of the positions before the segment's tokens, which need the hidden row of the
    /// position before the first. An unknown one is zeros, which makes drafts worse, and changes no other result.
    pub drafts_after: Option<HiddenBefore<'a>>,
}

/// Segments of different sequences, of any lengths, that run in the same passes. A segment's slot is its index.
#[derive(Debug)]
pub struct Batch<'a> {
    /// The segments.
    pub segments: Vec<Segment<'a>>,
    /// Whether a GPU runs the next step at once, with the tokens that it chose. Faster if they are the next batch, and harmless if not.
    /// Applies to batches that ask for the token after one token of each sequence, with blocks for one position more.
    pub look_ahead: bool,
}

/// The output of a slot.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// The tokens are in the cache; no other output was requested.
    Cached,
    /// The slot's range of logit rows, `vocab_size` numbers each.
    Logits(Range<usize>),
    /// The slot's hidden rows, `[rows, hidden_size]`.
    Hidden(Vec<f32>),
    /// The likelihood of each given token.
    Likelihoods(Vec<Likelihood>),
    /// The next token.
    Token(u32),
    /// The tokens after the first rows of the segment, as many as stay: the first row, and those of drafted tokens that are right.
    Verified(Vec<u32>),
}

/// The tokens of a segment that run in one pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) slot: usize,
    /// The range of the segment's tokens.
    pub(super) tokens: Range<usize>,
}

/// Limits of a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct PassLimits {
    /// Most rows; a multiple of `border`.
    pub(super) rows: usize,
    /// Most segments.
    pub(super) segments: usize,
    /// Positions where a segment is divided because of the limits are multiples of this.
    pub(super) border: usize,
}

/// A segment to be divided.
#[derive(Clone, Debug)]
pub(super) struct Divided {
    pub(super) slot: usize,
    /// Position of its first token.
    pub(super) first: usize,
    /// Number of its tokens.
    pub(super) len: usize,
}

impl Divided {
    pub(super) fn of(slot: usize, segment: &Segment<'_>) -> Divided {
        Divided {
            slot,
            first: segment.first,
            len: segment.tokens.len(),
        }
    }
}

/// Divides segments into passes, in order. Only the last part of a pass may continue in the next one, and a pass has one part of a segment.
pub(super) fn passes(
    segments: impl Iterator<Item = Divided>,
    limits: PassLimits,
) -> Vec<Vec<Part>> {
    let (mut passes, mut left) = (Vec::<Vec<Part>>::new(), 0);
    for Divided {
        slot,
        first: position,
        len,
    } in segments
    {
        let mut first = 0;
        while first < len {
            let is_full = |pass: &Vec<Part>| {
                pass.len() == limits.segments || pass.last().is_some_and(|part| part.slot == slot)
            };
            if left == 0 || passes.last().is_none_or(is_full) {
                passes.push(Vec::new());
                left = limits.rows;
            }
            let mut count = left.min(len - first);
            if first + count < len {
                count = count.saturating_sub((position + first + count) % limits.border);
                if count == 0 {
                    left = 0;
                    continue;
                }
            }
            if let Some(pass) = passes.last_mut() {
                pass.push(Part {
                    slot,
                    tokens: first..first + count,
                });
            }
            left -= count;
            first += count;
        }
    }
    passes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn divided(lengths: &[usize], rows: usize, most: usize) -> Vec<Vec<(usize, Range<usize>)>> {
        divided_at(lengths, 0, [rows, most, 1])
    }

    /// Segments from position `first` on.
    fn divided_at(
        lengths: &[usize],
        first: usize,
        [rows, most, border]: [usize; 3],
    ) -> Vec<Vec<(usize, Range<usize>)>> {
        let segments = lengths.iter().enumerate();
        let segments = segments.map(|(slot, &len)| Divided { slot, first, len });
        let limits = PassLimits {
            rows,
            segments: most,
            border,
        };
        let passes = passes(segments, limits).into_iter();
        let parts = |pass: Vec<Part>| pass.into_iter().map(|p| (p.slot, p.tokens)).collect();
        passes.map(parts).collect()
    }

    #[test]
    fn passes_are_full_and_in_order() {
        assert_eq!(divided(&[], 8, 4), Vec::<Vec<_>>::new());
        assert_eq!(divided(&[0], 8, 4), Vec::<Vec<_>>::new());
        assert_eq!(
            divided(&[1, 0, 3, 10, 2], 8, 4),
            [
                vec![(0, 0..1), (2, 0..3), (3, 0..4)],
                vec![(3, 4..10), (4, 0..2)]
            ]
        );
        assert_eq!(
            divided(&[1, 1, 1], 8, 2),
            [vec![(0, 0..1), (1, 0..1)], vec![(2, 0..1)]]
        );
        assert_eq!(
            divided(&[9], 4, 4),
            [vec![(0, 0..4)], vec![(0, 4..8)], vec![(0, 8..9)]]
        );
    }

    #[test]
    fn segments_are_divided_at_borders() {
        assert_eq!(
            divided_at(&[6, 7], 3, [8, 4, 4]),
            [vec![(0, 0..6), (1, 0..1)], vec![(1, 1..7)]]
        );
        // There is no border among the rows that are left.
        assert_eq!(
            divided_at(&[6, 7], 1, [8, 4, 4]),
            [vec![(0, 0..6)], vec![(1, 0..7)]]
        );
    }
}
