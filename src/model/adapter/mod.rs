//! LoRA adapters at run time: factors A `[rank, inputs]` and B `[outputs, rank]` beside projections of a loaded model, whose outputs gain
//! `scale * B (A x)`. Immutable and shared by the sequences that name it; the block applies it.

mod config;
mod read;

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::{Arc, Weak};

use super::Model;
use crate::base::Result;
use crate::base::error::bail;
use crate::ops::linear::Linear;

/// The largest rank that is loaded.
const MOST_RANK: usize = 1024;

/// An adapter of one model, in host memory.
pub struct Adapter {
    name: String,
    model: Weak<Model>,
    identity: NonZeroU64,
    rank: usize,
    bytes: usize,
    /// By the names of projections.
    factors: HashMap<String, Factors>,
}

/// The factors beside one projection.
pub(super) struct Factors {
    /// `[rank, inputs]`, with zeros up to a rank that is a multiple of [`RANK_MULTIPLE`]. Parts of a projection that is stored whole share
    /// it.
    pub(super) a: Arc<Linear>,
    /// `[outputs, rank]`, likewise.
    pub(super) b: Linear,
    pub(super) scale: f32,
}

/// Products have inputs in multiples of this.
const RANK_MULTIPLE: usize = 16;

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
    pub(super) fn factors(&self, projection: &str) -> Option<&Factors> {
        self.factors.get(projection)
    }

    /// Fails unless it was loaded for this model.
    pub fn check_model(&self, model: &Model) -> Result<()> {
        match std::ptr::eq(self.model.as_ptr(), model) {
            true => Ok(()),
            false => bail!(
                InvalidArgument,
                "adapter '{}' was loaded for another model; load it for this one",
                self.name
            ),
        }
    }
}

impl std::fmt::Debug for Adapter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Adapter({}, rank {})", self.name, self.rank)
    }
}

impl Model {
    /// Loads an adapter from a directory in peft's format. Everything is checked against the model before memory is taken for factors. A
    /// model on a GPU takes none.
    pub fn load_adapter(self: &Arc<Self>, path: &Path) -> Result<Adapter> {
        if self.device().is_cuda() {
            bail!(
                Unsupported,
                "{}: adapters run on the CPU, and the model is on {}; merge it into the weights (nvfp4 train: --merge), or load the \
                 model on the CPU",
                path.display(),
                self.device().name()
            );
        }
        if self.info().sampling_only {
            bail!(
                Unsupported,
                "{}: the model was loaded for sampling only, without the layers that an adapter stands beside; load it whole",
                path.display()
            );
        }
        read::read(self, path)
    }
}
