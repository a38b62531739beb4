//! What runs a model by fused kernels, and the working memory it runs in. One caller at a time: the memory belongs to the model.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::lowered::{Lowered, Source};
use super::memory::Memory;
use crate::base::Result;
use crate::cuda::{Gpu, HostTable};

/// Runs prompts and decode steps of one model.
pub(in crate::model) struct Executor {
    pub(super) lowered: Lowered,
    memory: Mutex<Memory>,
}

impl Executor {
    /// What runs this model; `table` is what [`super::table`] has made of its embedding. A model that no fused kernel runs is an error
    /// that names what it has.
    pub(in crate::model) fn new(
        gpu: &Arc<Gpu>,
        source: Source<'_>,
        table: Option<HostTable>,
    ) -> Result<Executor> {
        let lowered = Lowered::new(gpu, source, table)?;
        let memory = Memory::new(gpu, &lowered.sizes, 0, 0, 1, 1)?;
        // What weights passed through is not needed again.
        gpu.empty_cache()?;
        Ok(Executor {
            lowered,
            memory: Mutex::new(memory),
        })
    }

    /// Bytes that are here rather than with the weights: of an embedding in host memory.
    pub(in crate::model) fn bytes(&self) -> usize {
        self.lowered.bytes()
    }

    pub(super) fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // A look-ahead step still writes to page-locked memory. If waiting fails, the device is lost and writes no more.
        let _ = self.memory().flush();
    }
}
