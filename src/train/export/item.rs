//! A tensor of a model that is delivered.

use std::ops::Range;

use crate::checkpoint::{Encoding, Entry, Planned};
use crate::model::training::{MatrixId, VectorId};

/// Content of a tensor that is written.
pub(super) enum Content {
    /// An entry of the model that is delivered untrained, as it is.
    Copy(Entry),
    /// Matrices, with their rows in the tensor.
    Matrices(Vec<(MatrixId, Range<usize>)>),
    /// Vectors, with their elements in the tensor.
    Vectors(Vec<(VectorId, Range<usize>)>),
}

/// A tensor that is written.
pub(super) struct Item {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) encoding: Encoding,
    pub(super) content: Content,
}

impl From<&Item> for Planned {
    fn from(item: &Item) -> Planned {
        Planned {
            name: item.name.clone(),
            shape: item.shape.clone(),
            encoding: item.encoding,
        }
    }
}
