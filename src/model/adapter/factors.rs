//! The factors of an adapter beside one projection.

use std::sync::Arc;

use crate::ops::linear::Linear;

/// The factors beside one projection.
pub(in crate::model) struct Factors {
    /// `[rank, inputs]`, with zeros up to a rank that is a multiple of 16. Parts of a projection that is stored whole share
    /// it.
    pub(in crate::model) a: Arc<Linear>,
    /// `[outputs, rank]`, likewise.
    pub(in crate::model) b: Linear,
    pub(in crate::model) scale: f32,
}
