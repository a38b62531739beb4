//! A model's weights as the forward pass reads them: what the loader makes, and what training will make copies of. Immutable
//! and shared; knows nothing of files beyond the embedding that may stay in one.

use std::sync::Arc;

use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Buffer;
use crate::checkpoint::{Checkpoint, Entry};
use crate::ops::linear::Linear;

/// A linear map and its bias, where it has one.
#[derive(Debug)]
pub struct Projection {
    /// The weight, `[out features, in features]`.
    pub linear: Linear,
    /// One number per output feature.
    pub bias: Option<Buffer<f32>>,
}

/// One decoder block.
#[derive(Debug)]
pub struct Layer {
    /// RMSNorm before attention.
    pub input_norm: Buffer<f32>,
    /// Queries, `[heads * head_dim, hidden]`.
    pub q: Projection,
    /// Keys, `[kv_heads * head_dim, hidden]`.
    pub k: Projection,
    /// Values, as keys.
    pub v: Projection,
    /// RMSNorm of each query head, `[head_dim]`, where the architecture has it.
    pub q_norm: Option<Buffer<f32>>,
    /// RMSNorm of each key head.
    pub k_norm: Option<Buffer<f32>>,
    /// Attention output, `[hidden, heads * head_dim]`.
    pub o: Projection,
    /// RMSNorm before the MLP.
    pub post_norm: Buffer<f32>,
    /// `[intermediate, hidden]`.
    pub gate: Projection,
    /// `[intermediate, hidden]`.
    pub up: Projection,
    /// `[hidden, intermediate]`.
    pub down: Projection,
}

/// Where the rows of the embedding come from.
pub enum Embedding {
    /// The file, which stays open: the row of each token is read when it is looked up, out of what memory the system keeps files
    /// in. A file that is cut off or written to meanwhile gives an error.
    File {
        /// What was opened.
        checkpoint: Arc<dyn Checkpoint>,
        /// The table in it.
        entry: Entry,
    },
    /// The head, which holds the same values.
    Head,
}

/// All of a model's weights.
pub struct Weights {
    /// The table that turns tokens into rows of the residual stream.
    pub embedding: Embedding,
    /// The blocks, first to last; empty when loaded for sampling only.
    pub layers: Vec<Layer>,
    /// The final RMSNorm.
    pub norm: Buffer<f32>,
    /// The output layer, `[vocab, hidden]`.
    pub head: Projection,
}

impl Layer {
    /// The projections by their names within a layer of a checkpoint.
    pub fn projections(&self) -> [(&'static str, &Projection); 7] {
        [
            ("self_attn.q_proj", &self.q),
            ("self_attn.k_proj", &self.k),
            ("self_attn.v_proj", &self.v),
            ("self_attn.o_proj", &self.o),
            ("mlp.gate_proj", &self.gate),
            ("mlp.up_proj", &self.up),
            ("mlp.down_proj", &self.down),
        ]
    }

    /// The vectors: norms and biases.
    fn vectors(&self) -> impl Iterator<Item = &Buffer<f32>> {
        [
            Some(&self.input_norm),
            Some(&self.post_norm),
            self.q_norm.as_ref(),
            self.k_norm.as_ref(),
        ]
        .into_iter()
        .chain(self.projections().map(|(_, p)| p.bias.as_ref()))
        .flatten()
    }
}

impl Weights {
    /// Every linear map, blocks first, then the head.
    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.layers
            .iter()
            .flat_map(|l| l.projections().map(|(_, p)| &p.linear))
            .chain([&self.head.linear])
    }

    /// Bytes held in memory in the form that the kernels read. An embedding that stays in its file does not count.
    pub fn bytes(&self) -> usize {
        let vectors = self.layers.iter().flat_map(Layer::vectors);
        self.linears().map(Linear::bytes).sum::<usize>()
            + vectors
                .chain([&self.norm])
                .map(Buffer::bytes)
                .sum::<usize>()
    }

    /// Writes the embeddings of `tokens`, one row of `hidden` numbers each, to `out`.
    pub fn embed(&self, tokens: &[u32], out: &mut [f32]) -> Result<()> {
        let (vocab, hidden) = (self.head.linear.rows(), self.head.linear.cols());
        if let Some(token) = tokens.iter().find(|&&t| t as usize >= vocab) {
            bail!(
                InvalidArgument,
                "token {token} is outside the vocabulary of {vocab}"
            );
        }
        if out.len() != tokens.len() * hidden {
            bail!(
                InvalidArgument,
                "{} floats for the embeddings of {} tokens; they take {hidden} each",
                out.len(),
                tokens.len()
            );
        }
        for (&token, row) in tokens.iter().zip(out.chunks_exact_mut(hidden)) {
            let token = token as usize;
            match &self.embedding {
                Embedding::Head => self.head.linear.row(token, row)?,
                Embedding::File { checkpoint, entry } => {
                    checkpoint.rows_f32(entry, token..token + 1, row)?;
                }
            }
        }
        Ok(())
    }
}
