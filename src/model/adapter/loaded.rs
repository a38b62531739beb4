//! A loaded adapter.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::Arc;

use crate::ops::linear::Linear;

/// Identifies a loaded model. Each has one of its own, which its adapters share.
#[derive(Debug, Default)]
pub(in crate::model) struct ModelKey;

/// An adapter of one model, in host memory.
pub struct Adapter {
    pub(super) name: String,
    pub(super) model: Arc<ModelKey>,
    pub(super) identity: NonZeroU64,
    pub(super) rank: usize,
    pub(super) bytes: usize,
    /// By the names of projections.
    pub(super) factors: HashMap<String, Factors>,
}

/// The factors beside one projection.
pub(in crate::model) struct Factors {
    /// `[rank, inputs]`, with zeros up to a rank that is a multiple of 16. Parts of a projection that is stored whole share
    /// it.
    pub(in crate::model) a: Arc<Linear>,
    /// `[outputs, rank]`, likewise.
    pub(in crate::model) b: Linear,
    pub(in crate::model) scale: f32,
}

impl Adapter {
    /// The name of its directory.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A number that identifies its values and scales, the same whenever and wherever it is loaded.
    pub fn identity(&self) -> NonZeroU64 {
        self.identity
    }

    /// The largest rank of its factors.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Bytes of its factors in memory.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of adapted projections.
    pub fn projections(&self) -> usize {
        self.factors.len()
    }

    /// The factors beside a projection, if it has them.
    pub(in crate::model) fn factors(&self, projection: &str) -> Option<&Factors> {
        self.factors.get(projection)
    }

    /// Whether it was loaded for the model with this key.
    pub(in crate::model) fn is_of(&self, model: &Arc<ModelKey>) -> bool {
        Arc::ptr_eq(&self.model, model)
    }
}

impl std::fmt::Debug for Adapter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Adapter({}, rank {})", self.name, self.rank)
    }
}
