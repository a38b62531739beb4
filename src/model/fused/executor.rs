//! Runs a model by fused kernels, in working memory that belongs to the model. One caller at a time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::embedding::HostTables;
use super::lowered::{Lowered, Source};
use super::memory::Memory;
use super::sizes::Sizes;
use crate::base::Result;
use crate::base::once::TryOnce;
use crate::cuda::{self, Gpu, Lane};
use crate::model::Tuning;

/// Multiprocessors of a lane are a multiple of this, by which Hopper divides them.
const LANE_UNIT: usize = 8;

/// Room for the recurrent states that a part of a prompt writes: those that its sequence keeps, that of its end, and one that others share.
pub(in crate::model) fn states_of_part(sizes: &Sizes) -> usize {
    if sizes.recurrent.is_some() { 8 } else { 1 }
}

/// The share of a device on which prompts run beside steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) struct LaneShare {
    pub(in crate::model) multiprocessors: usize,
    /// Most rows of a pass.
    pub(in crate::model) rows: usize,
    /// Whether working memory for so many is taken when a model is loaded, rather than by the first prompt.
    pub(in crate::model) is_prepared: bool,
}

impl LaneShare {
    /// The share of a Hopper GPU; `None` for others, whose shares have not been measured: there prompts and steps take turns, or run together.
    /// With 72 of 132 multiprocessors a prompt takes 2.5 times as long as alone, and a step beside it 2.1 times; with 104 of them 1.3 and 3.7
    /// times.
    pub(in crate::model) fn of(gpu: &Gpu, tuning: Tuning) -> Option<LaneShare> {
        let all = gpu.multiprocessors() / LANE_UNIT;
        let (units, rows) = match tuning {
            Tuning::Latency => (all * 9 / 16, 1024),
            Tuning::Throughput => (all * 13 / 16, 4096),
        };
        let multiprocessors = units * LANE_UNIT;
        (gpu.arch() == (9, 0)).then_some(LaneShare {
            multiprocessors,
            rows,
            is_prepared: tuning == Tuning::Latency,
        })
    }
}

/// A lane for a model's prompts, and the executor there, which the first of them makes.
pub(in crate::model) struct BesideSteps {
    lane: Lane,
    /// Most rows of a pass.
    pub(in crate::model) rows: usize,
    executor: TryOnce<Executor>,
}

impl BesideSteps {
    /// `None` where there are no lanes.
    pub(in crate::model) fn new(gpu: &Arc<Gpu>, share: LaneShare) -> Result<Option<BesideSteps>> {
        let lane = Lane::new(gpu, share.multiprocessors)?;
        Ok(lane.map(|lane| BesideSteps {
            lane,
            rows: share.rows,
            executor: TryOnce::new(),
        }))
    }

    /// Whether working memory has room for a pass with a part of one prompt: so many rows, up to a position.
    pub(in crate::model) fn holds(&self, rows: usize, end: usize) -> bool {
        let executor = self.executor.get();
        executor.is_some_and(|executor| {
            let states = states_of_part(&executor.lowered.sizes);
            let pages = end.div_ceil(cuda::PAGE);
            executor.memory().holds(rows, 1, states, pages)
        })
    }

    /// Calls `work` in the lane, with an executor of the same model as `other`.
    pub(in crate::model) fn run<T>(
        &self,
        other: &Executor,
        work: impl FnOnce(&Executor) -> Result<T>,
    ) -> Result<T> {
        self.lane
            .run(|| work(self.executor.get_or_try(|| other.beside())?))
    }
}

/// Runs prompts and decode steps of one model.
pub(in crate::model) struct Executor {
    pub(super) lowered: Arc<Lowered>,
    /// Shared with the executor of the model's next weights.
    memory: Arc<Mutex<Memory>>,
    /// Passes recorded so far.
    pub(super) recorded: AtomicU64,
    /// Whether it runs prompts in a lane, beside the passes of another one.
    is_beside: bool,
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
            lowered: Arc::new(lowered),
            memory: Arc::new(Mutex::new(memory)),
            recorded: AtomicU64::new(0),
            is_beside: false,
        })
    }

    /// An executor of the same model that runs prompts in a lane, in working memory of its own.
    fn beside(&self) -> Result<Executor> {
        let Lowered { gpu, sizes, .. } = &*self.lowered;
        Ok(Executor {
            lowered: self.lowered.clone(),
            memory: Arc::new(Mutex::new(Memory::new(gpu, sizes, 0, 0, 1, 1)?)),
            recorded: AtomicU64::new(0),
            is_beside: true,
        })
    }

    /// Whether it runs prompts in a lane.
    pub(in crate::model) fn is_beside(&self) -> bool {
        self.is_beside
    }

    /// Grows working memory to that of a pass with a part of one prompt: so many rows, up to a position.
    pub(in crate::model) fn reserve(&self, rows: usize, end: usize) -> Result<()> {
        let Lowered { gpu, sizes, .. } = &*self.lowered;
        let pages = end.div_ceil(cuda::PAGE);
        let states = states_of_part(sizes);
        self.memory().fit(gpu, sizes, rows, 1, states, pages)
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
                Arc::new(Lowered::new(
                    &self.lowered.gpu,
                    source,
                    tables,
                    deterministic,
                )?)
            },
            memory: self.memory.clone(),
            recorded: AtomicU64::new(self.recorded_passes()),
            is_beside: false,
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
