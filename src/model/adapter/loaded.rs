//! A loaded adapter.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::Arc;

use super::factors::Factors;
use super::places::OnGpu;
use crate::base::Result;
use crate::base::error::err;

/// Identifies a loaded model. Each has one of its own, which its adapters share.
#[derive(Debug, Default)]
pub(in crate::model) struct ModelKey;

/// An adapter of one model, in the memory of its device.
pub struct Adapter {
    pub(super) name: String,
    pub(super) model: Arc<ModelKey>,
    pub(super) identity: NonZeroU64,
    pub(super) rank: usize,
    pub(super) bytes: usize,
    /// By the names of projections.
    pub(super) factors: HashMap<String, Factors>,
    /// As fused passes take it; `None` on the CPU.
    pub(super) on_gpu: Option<OnGpu>,
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

    /// The adapter as fused passes take it.
    pub(in crate::model) fn on_gpu(&self) -> Result<&OnGpu> {
        let on_gpu = self.on_gpu.as_ref();
        on_gpu.ok_or_else(|| err!(Internal, "adapter '{}' is in host memory", self.name))
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
