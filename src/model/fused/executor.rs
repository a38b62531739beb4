//! Runs a model by fused kernels, in working memory that belongs to the model. One caller at a time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::embedding::HostTables;
use super::lowered::{Lowered, Source};
use super::memory::Memory;
use crate::base::Result;
use crate::base::once::TryOnce;
use crate::cuda::{Gpu, Lane};
use crate::model::Tuning;

/// Multiprocessors of a lane are a multiple of this, by which Hopper divides them.
const LANE_UNIT: usize = 8;

/// The share of a device on which prompts run beside steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) struct LaneShare {
    pub(in crate::model) multiprocessors: usize,
    /// Most rows of a pass.
    pub(in crate::model) rows: usize,
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
        })
    }
}

/// A lane for a model's prompts, and the executor there, which the first of them makes.
pub(in crate::model) struct BesideSteps {
    lane: Arc<Lane>,
    /// Most rows of a pass.
    pub(in crate::model) rows: usize,
    executor: TryOnce<Executor>,
}

impl BesideSteps {
    /// `None` where there are no lanes.
    pub(in crate::model) fn new(gpu: &Arc<Gpu>, share: LaneShare) -> Result<Option<BesideSteps>> {
        let lane = Lane::new(gpu, share.multiprocessors)?;
        Ok(lane.map(|lane| BesideSteps {
            lane: Arc::new(lane),
            rows: share.rows,
            executor: TryOnce::new(),
        }))
    }

    /// The executor, of the same model as `other`.
    pub(in crate::model) fn executor(&self, other: &Executor) -> Result<&Executor> {
        self.executor.get_or_try(|| other.beside(&self.lane))
    }
}

/// Runs prompts and decode steps of one model.
pub(in crate::model) struct Executor {
    pub(super) lowered: Arc<Lowered>,
    /// Shared with the executor of the model's next weights.
    memory: Arc<Mutex<Memory>>,
    /// Passes recorded so far.
    pub(super) recorded: AtomicU64,
    /// The lane of an executor that runs prompts beside the passes of another one.
    lane: Option<Arc<Lane>>,
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
            lane: None,
        })
    }

    /// An executor of the same model that runs prompts in a lane, in working memory of its own.
    fn beside(&self, lane: &Arc<Lane>) -> Result<Executor> {
        let Lowered { gpu, sizes, .. } = &*self.lowered;
        Ok(Executor {
            lowered: self.lowered.clone(),
            memory: Arc::new(Mutex::new(Memory::new(gpu, sizes, 0, 0, 1, 1)?)),
            recorded: AtomicU64::new(0),
            lane: Some(lane.clone()),
        })
    }

    /// Its lane, if it runs prompts beside another executor.
    pub(in crate::model) fn lane(&self) -> Option<&Lane> {
        self.lane.as_deref()
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
            lane: None,
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
