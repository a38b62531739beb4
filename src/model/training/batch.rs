//! The input of a training pass: a batch of packed documents.

use crate::base::Result;
use crate::base::error::bail;
use crate::model::Spec;
use crate::ops::Device;
use crate::ops::rope::Angles;
use crate::ops::training::attention::Documents;
use crate::ops::training::embedding::RowsByToken;
use crate::ops::training::loss::Targets;

/// Consecutive documents, prepared for a device.
#[derive(Debug)]
pub struct Batch {
    pub(super) tokens: Vec<u32>,
    pub(super) documents: Documents,
    pub(super) targets: Targets,
    pub(super) by_token: RowsByToken,
    /// Indexed like [`Spec::ropes`].
    pub(super) angles: Vec<Angles>,
}

impl Batch {
    /// A batch of consecutive documents of these lengths; positions restart at 0 in each document. `labels[i]` is the label of row i,
    /// negative for none, and `weights[i]` multiplies its loss. Fails for a document longer than the model's context.
    pub fn new(
        device: &Device,
        spec: &Spec,
        tokens: &[u32],
        documents: &[usize],
        labels: &[i32],
        weights: &[f32],
    ) -> Result<Batch> {
        let rows = tokens.len();
        if rows == 0
            || documents.iter().sum::<usize>() != rows
            || labels.len() != rows
            || weights.len() != rows
        {
            bail!(
                InvalidArgument,
                "a batch of {rows} tokens in documents of {} in all, with {} labels and {} weights; all must be the same, and positive",
                documents.iter().sum::<usize>(),
                labels.len(),
                weights.len()
            );
        }
        let known = |id: i64| id < spec.vocab_size as i64;
        let labels_and_tokens = labels
            .iter()
            .map(|&l| i64::from(l))
            .chain(tokens.iter().map(|&t| i64::from(t)));
        if let Some(id) = labels_and_tokens.into_iter().find(|&id| !known(id)) {
            bail!(
                InvalidArgument,
                "token {id} of a batch is outside the vocabulary of {}",
                spec.vocab_size
            );
        }
        let longest = documents.iter().copied().max().unwrap_or(0);
        if longest > spec.max_positions {
            bail!(
                InvalidArgument,
                "document {} of a batch has {longest} tokens, and the model's context has {} positions; cut it into shorter documents",
                documents
                    .iter()
                    .position(|&len| len == longest)
                    .unwrap_or(0),
                spec.max_positions
            );
        }
        let angles = spec
            .ropes
            .iter()
            .map(|set| Angles::of_documents(device, set.table(longest), documents))
            .collect::<Result<_>>()?;
        Ok(Batch {
            tokens: tokens.to_vec(),
            documents: Documents::new(device, documents)?,
            targets: Targets::new(device, labels, weights)?,
            by_token: RowsByToken::new(device, tokens)?,
            angles,
        })
    }

    /// A batch of documents without labels, for a frozen model.
    pub(super) fn unlabelled(
        device: &Device,
        spec: &Spec,
        tokens: &[u32],
        documents: &[usize],
    ) -> Result<Batch> {
        let (labels, weights) = (vec![-1; tokens.len()], vec![0.0; tokens.len()]);
        Batch::new(device, spec, tokens, documents, &labels, &weights)
    }

    /// Maximum bytes of a batch of `rows` tokens.
    pub(super) fn bytes(spec: &Spec, rows: usize) -> usize {
        let pairs = spec
            .ropes
            .iter()
            .map(|set| set.table(rows).frequencies.len());
        // Starts and ends of documents; labels and weights; and tokens, rows, and the first row of each token, sorted by token.
        let numbers = 2 + 2 + 3;
        size_of::<f32>() * (rows * (numbers + 2 * pairs.sum::<usize>()) + 1)
    }

    /// Number of tokens.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }
}
