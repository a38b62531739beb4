//! Windows of documents, packed so that few tokens are left empty.

use std::collections::BTreeSet;

use super::document::Document;
use crate::base::Result;
use crate::base::error::bail;
use crate::format::random;
use crate::train::trainer::MicroBatch;

/// Documents sorted and packed together. A longer look-ahead would pack no better, and would put rows of one length together.
const LOOK_AHEAD: usize = 4096;
/// Upper limit of rows that a message names.
const NAMED: usize = 6;

/// Documents in a row that do not attend to each other, with at most a window's number of tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Window {
    /// Tokens of all documents.
    pub tokens: Vec<u32>,
    /// Length of each document.
    pub documents: Vec<usize>,
    /// The token that each row should predict; -1 for none. The last row of a document predicts nothing.
    pub labels: Vec<i32>,
    /// Weight of each row's loss; empty if all labels have 1.
    pub weights: Vec<f32>,
}

impl Window {
    /// Adds a document.
    pub fn push(&mut self, document: &Document) {
        if !document.weights.is_empty() {
            self.spell_weights();
        }
        if !document.weights.is_empty() || !self.weights.is_empty() {
            let next = (1..document.tokens.len()).map(|i| document.weight(i));
            self.weights.extend(next.chain([0.0]));
        }
        self.tokens.extend_from_slice(&document.tokens);
        self.documents.push(document.tokens.len());
        let next = document.tokens.iter().zip(&document.learned).skip(1);
        self.labels
            .extend(next.map(|(&token, &learned)| if learned { token as i32 } else { -1 }));
        self.labels.push(-1);
    }

    /// Makes implicit weights of 1 explicit.
    fn spell_weights(&mut self) {
        let missing = &self.labels[self.weights.len()..];
        let ones = missing.iter().map(|&l| f32::from(u8::from(l >= 0)));
        self.weights.extend(ones);
    }

    /// Adds another window's documents.
    pub fn append(&mut self, other: &Window) {
        let has_weights = !(self.weights.is_empty() && other.weights.is_empty());
        if has_weights {
            self.spell_weights();
            self.weights.extend_from_slice(&other.weights);
        }
        self.tokens.extend_from_slice(&other.tokens);
        self.documents.extend_from_slice(&other.documents);
        self.labels.extend_from_slice(&other.labels);
        if has_weights {
            self.spell_weights();
        }
    }

    /// Number of rows with a label.
    pub fn targets(&self) -> usize {
        self.batch().targets()
    }

    /// The window as a micro-batch of the trainer.
    pub fn batch(&self) -> MicroBatch<'_> {
        MicroBatch {
            tokens: &self.tokens,
            documents: &self.documents,
            labels: &self.labels,
            weights: (!self.weights.is_empty()).then_some(&self.weights),
        }
    }
}

/// Training windows, in no particular order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Windows(Vec<Window>);

impl Windows {
    /// Takes existing windows, each of which must have a label.
    pub fn new(windows: Vec<Window>) -> Result<Windows> {
        if let Some(i) = windows.iter().position(|w| w.targets() == 0) {
            bail!(
                InvalidArgument,
                "none of the {} labels of window {i} counts, so there is nothing to learn from it",
                windows[i].labels.len()
            );
        }
        Ok(Windows(windows))
    }

    /// Packs documents into windows of at most `window` tokens: in an order by `seed`, some thousands at a time, the longest first, each
    /// where it leaves the least room. `name` names a document's origin in messages.
    pub fn pack(
        documents: &[Document],
        window: usize,
        seed: u64,
        name: &dyn Fn((usize, usize)) -> String,
    ) -> Result<Windows> {
        let mut order: Vec<usize> = (0..documents.len()).collect();
        shuffle(&mut order, random::bits(seed, u64::MAX));
        let mut packed: Vec<Vec<usize>> = Vec::new();
        for part in order.chunks_mut(LOOK_AHEAD) {
            // Stable, so that documents of one length keep the shuffled order.
            part.sort_by_key(|&i| std::cmp::Reverse(documents[i].tokens.len()));
            // Windows with room, as pairs of room and index.
            let mut open: BTreeSet<(usize, usize)> = BTreeSet::new();
            for &i in &*part {
                let len = documents[i].tokens.len();
                if len > window {
                    bail!(
                        InvalidArgument,
                        "{}: {len} tokens do not fit in a window of {window}",
                        name(documents[i].origin)
                    );
                }
                let (room, number) = match open.range((len, 0)..).next().copied() {
                    Some(found) => {
                        open.remove(&found);
                        packed[found.1].push(i);
                        found
                    }
                    None => {
                        packed.push(vec![i]);
                        (window, packed.len() - 1)
                    }
                };
                if room > len {
                    open.insert((room - len, number));
                }
            }
        }
        Self::of(documents, packed, name)
    }

    /// Makes one window of each document.
    pub fn unpacked(
        documents: &[Document],
        name: &dyn Fn((usize, usize)) -> String,
    ) -> Result<Windows> {
        let each = (0..documents.len()).map(|i| vec![i]).collect();
        Self::of(documents, each, name)
    }

    fn of(
        documents: &[Document],
        packed: Vec<Vec<usize>>,
        name: &dyn Fn((usize, usize)) -> String,
    ) -> Result<Windows> {
        let mut windows = Vec::with_capacity(packed.len());
        for numbers in packed {
            let mut window = Window::default();
            numbers.iter().for_each(|&i| window.push(&documents[i]));
            if window.targets() == 0 {
                let rows = numbers.iter().take(NAMED);
                let rows: Vec<_> = rows.map(|&i| name(documents[i].origin)).collect();
                bail!(
                    InvalidArgument,
                    "nothing in a window of {} tokens is to be learned: {}{}",
                    window.tokens.len(),
                    rows.join(", "),
                    match numbers.len().saturating_sub(NAMED) {
                        0 => String::new(),
                        more => format!(" and {more} more"),
                    }
                );
            }
            windows.push(window);
        }
        Ok(Windows(windows))
    }

    /// All windows.
    pub fn all(&self) -> &[Window] {
        &self.0
    }

    /// Number of windows.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Total number of tokens.
    pub fn tokens(&self) -> usize {
        self.0.iter().map(|w| w.tokens.len()).sum()
    }

    /// Total number of labels that count.
    pub fn targets(&self) -> usize {
        self.0.iter().map(Window::targets).sum()
    }
}

/// Shuffles items by `key` (Fisher and Yates).
pub(super) fn shuffle<T>(items: &mut [T], key: u64) {
    for i in (1..items.len()).rev() {
        let below = (u128::from(random::bits(key, i as u64)) * (i as u128 + 1)) >> 64;
        items.swap(i, below as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn documents(lengths: &[usize]) -> Vec<Document> {
        let mut token = 0;
        let document = |(i, &len): (usize, &usize)| {
            let tokens: Vec<u32> = (token..token + len as u32).collect();
            token += len as u32;
            Document {
                learned: tokens.iter().map(|t| t % 3 != 0).collect(),
                tokens,
                weights: Vec::new(),
                origin: (0, i + 1),
            }
        };
        lengths.iter().enumerate().map(document).collect()
    }

    proptest! {
        /// Every token of every document stands once in some window, beside its own document's tokens, with the right label.
        #[test]
        fn packing_keeps_every_token_and_mixes_no_documents(
            lengths in prop::collection::vec(4usize..40, 1..200),
            window in 40usize..100,
            seed in 0u64..1000,
        ) {
            let documents = documents(&lengths);
            let windows = Windows::pack(&documents, window, seed, &|_| String::new()).unwrap();
            prop_assert_eq!(windows.clone(), Windows::pack(&documents, window, seed, &|_| String::new()).unwrap());
            let mut seen = vec![false; documents.len()];
            for w in windows.all() {
                prop_assert!(w.tokens.len() <= window);
                prop_assert_eq!(w.documents.iter().sum::<usize>(), w.tokens.len());
                let mut at = 0;
                for &len in &w.documents {
                    let tokens = &w.tokens[at..at + len];
                    let i = documents.iter().position(|d| d.tokens == tokens);
                    let i = i.expect("a document is whole");
                    prop_assert!(!std::mem::replace(&mut seen[i], true), "twice");
                    for (j, &label) in w.labels[at..at + len].iter().enumerate() {
                        let expected = match tokens.get(j + 1) {
                            Some(&next) if next % 3 != 0 => next as i32,
                            _ => -1,
                        };
                        prop_assert_eq!(label, expected);
                    }
                    at += len;
                }
            }
            prop_assert!(seen.iter().all(|s| *s));
            // Two windows that are both at most half full would have been packed into one.
            let small = windows.all().iter().filter(|w| 2 * w.tokens.len() <= window);
            prop_assert!(small.count() <= 1);
        }
    }

    #[test]
    fn what_cannot_be_learned_is_named() {
        let mut all = documents(&[10, 20, 5]);
        all.iter_mut().for_each(|d| d.learned.fill(false));
        let name = |(_, line): (usize, usize)| format!("line {line}");
        let error = Windows::pack(&all, 64, 0, &name).unwrap_err().to_string();
        assert!(
            error.contains("35 tokens is to be learned")
                && error.contains("line 2, line 1, line 3"),
            "{error}"
        );
        let error = Windows::pack(&all, 16, 0, &name).unwrap_err().to_string();
        assert!(
            error.contains("line 2: 20 tokens do not fit in a window of 16"),
            "{error}"
        );
        let error = Windows::new(vec![Window::default()])
            .unwrap_err()
            .to_string();
        assert!(error.contains("window 0"), "{error}");
    }
}
