//! A tensor of an exported model.

use std::ops::Range;

use crate::checkpoint::{Encoding, Entry, Planned};
use crate::model::training::{MatrixId, VectorId};

/// Content of an exported tensor.
pub(super) enum Content {
    /// An unchanged entry of the untrained model, copied as it is.
    Copy(Entry),
    /// Matrices, with their row ranges in the tensor.
    Matrices(Vec<(MatrixId, Range<usize>)>),
    /// Vectors, with their element ranges in the tensor.
    Vectors(Vec<(VectorId, Range<usize>)>),
}

/// An exported tensor.
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
