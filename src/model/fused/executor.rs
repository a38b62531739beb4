//! Runs a model by fused kernels, in working memory that belongs to the model. One caller at a time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::embedding::HostTables;
use super::lowered::{Lowered, Source};
use super::memory::Memory;
use crate::base::Result;
use crate::cuda::Gpu;

/// Runs prompts and decode steps of one model.
pub(in crate::model) struct Executor {
    pub(super) lowered: Lowered,
    /// Shared with the executor of the model's next weights.
    memory: Arc<Mutex<Memory>>,
    /// Passes recorded so far.
    pub(super) recorded: AtomicU64,
}

impl Executor {
    /// An executor of a model; `tables` is the result of [`super::tables`]. If `deterministic`, the bits of a row depend on its sequence
    /// alone, not on other rows of its passes. Fails for a model that no fused kernel supports; the error names the unsupported property.
    pub(in crate::model) fn new(
        gpu: &Arc<Gpu>,
        source: Source<'_>,
        tables: HostTables,
        deterministic: bool,
    ) -> Result<Executor> {
        let lowered = Lowered::new(gpu, source, tables, deterministic)?;
        let memory = Memory::new(gpu, &lowered.sizes, 0, 0, 1, 1)?;
        // Frees the memory through which weights were loaded.
        gpu.empty_cache()?;
        Ok(Executor {
            lowered,
            memory: Arc::new(Mutex::new(memory)),
            recorded: AtomicU64::new(0),
        })
    }

    /// An executor of the same model with other weights, in the same working memory. A step that ran ahead is dropped, and so are recorded
    /// passes: recordings have addresses of vectors, and scales of matrices, of the weights before.
    pub(in crate::model) fn renewed(&self, source: Source<'_>) -> Result<Executor> {
        let mut memory = self.memory();
        memory.forget()?;
        memory.graphs.clear();
        drop(memory);
        Ok(Executor {
            // Weights under training have no tables in host memory.
            lowered: {
                let deterministic = self.lowered.hardware.deterministic;
                let tables = HostTables::default();
                Lowered::new(&self.lowered.gpu, source, tables, deterministic)?
            },
            memory: self.memory.clone(),
            recorded: AtomicU64::new(self.recorded_passes()),
        })
    }

    /// Bytes held here rather than with the weights: tables in host memory.
    pub(in crate::model) fn bytes(&self) -> usize {
        self.lowered.bytes()
    }

    /// The number of passes that have been recorded. A pass that is recorded takes several times as long as later ones of its kind.
    pub(in crate::model) fn recorded_passes(&self) -> u64 {
        self.recorded.load(Ordering::Relaxed)
    }

    pub(super) fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // A look-ahead step still writes to page-locked memory. If waiting fails, the device is lost and writes no more.
        let _ = self.memory().wait();
    }
}
