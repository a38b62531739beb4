//! A stand-in of a model: a pass takes time, and counts what it runs.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use crate::base::error::err;
use crate::base::lease::Lease;
use crate::base::{Result, sync};

/// Time of a pass.
const PASS: Duration = Duration::from_millis(4);

/// A planned failure of the pass that runs a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Its own tokens fail.
    Slot,
    /// The pass fails.
    Pass,
    /// The pass panics.
    Panic,
}

/// The rows of a sequence in a pass.
#[derive(Debug)]
pub struct Segment {
    pub sequence: u64,
    pub count: usize,
    pub fault: Fault,
    /// The epoch of the weights that have run the tokens before.
    pub epoch: u64,
}

#[derive(Debug)]
pub struct Batch<'a> {
    pub segments: Vec<Segment>,
    pub lifetime: PhantomData<&'a ()>,
}

/// The number of rows that a sequence had in its last pass.
#[derive(Debug, PartialEq, Eq)]
pub struct Output(pub usize);

#[derive(Default)]
pub struct Scratch;

pub struct Device {
    is_cuda: bool,
}

impl Device {
    pub fn is_cuda(&self) -> bool {
        self.is_cuda
    }
}

pub struct Spec {
    pub vocab_size: usize,
}

/// As the library's.
pub const LONG_PROMPT: usize = 2048;

pub struct Model {
    device: Device,
    spec: Spec,
    pass_rows: usize,
    lease: Option<Arc<Lease>>,
    rows_beside: Option<usize>,
    is_running: AtomicBool,
    runs_beside: AtomicBool,
    /// Rows of all passes.
    pub rows: AtomicUsize,
}

impl Model {
    pub fn new(is_cuda: bool, pass_rows: usize, lease: Option<Arc<Lease>>) -> Model {
        Model::with_rows_beside(is_cuda, pass_rows, lease, None)
    }

    /// On a GPU that runs parts of prompts of so many rows beside steps.
    pub fn with_rows_beside(
        is_cuda: bool,
        pass_rows: usize,
        lease: Option<Arc<Lease>>,
        rows_beside: Option<usize>,
    ) -> Model {
        Model {
            device: Device { is_cuda },
            spec: Spec { vocab_size: 1 },
            pass_rows,
            lease,
            rows_beside,
            is_running: AtomicBool::new(false),
            runs_beside: AtomicBool::new(false),
            rows: AtomicUsize::new(0),
        }
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    pub fn pass_rows(&self) -> usize {
        self.pass_rows
    }

    pub fn rows_beside(&self) -> Option<usize> {
        self.rows_beside
    }

    /// The epoch of the weights.
    pub fn epoch(&self) -> u64 {
        self.lease.as_ref().map_or(0, |lease| lease.epoch())
    }

    pub fn run(
        &self,
        batch: Batch<'_>,
        _: &mut Scratch,
        _: &mut Vec<f32>,
    ) -> Result<Vec<Result<Output>>> {
        self.run_alone(&self.is_running, batch)
    }

    pub fn run_beside(
        &self,
        batch: Batch<'_>,
        _: &mut Scratch,
        _: &mut Vec<f32>,
    ) -> Result<Vec<Result<Output>>> {
        let most = self.rows_beside.expect("a lane");
        let is_part = |segment: &Segment| (2..=most).contains(&segment.count);
        assert!(batch.segments.iter().all(is_part), "not parts of prompts");
        self.run_alone(&self.runs_beside, batch)
    }

    /// There is room for parts that end before position 2,600.
    pub fn reserve_beside(&self, _rows: usize, end: usize) -> Result<()> {
        match end < 2600 {
            true => Ok(()),
            false => Err(err!(OutOfMemory, "no room to position {end}")),
        }
    }

    /// Runs a pass in a place that has one at a time.
    fn run_alone(&self, place: &AtomicBool, batch: Batch<'_>) -> Result<Vec<Result<Output>>> {
        assert!(!place.swap(true, SeqCst), "two passes at a time");
        let epoch = self.epoch();
        sync::work_for(PASS);
        assert_eq!(self.epoch(), epoch, "the weights changed during a pass");
        place.store(false, SeqCst);
        for (i, segment) in batch.segments.iter().enumerate() {
            assert_eq!(segment.epoch, epoch, "keys of other weights");
            let others = &batch.segments[..i];
            assert!(
                others
                    .iter()
                    .all(|other| other.sequence != segment.sequence)
            );
        }
        let has = |fault| batch.segments.iter().any(|segment| segment.fault == fault);
        if has(Fault::Panic) {
            // Without the message of a panic.
            std::panic::resume_unwind(Box::new("planned"));
        }
        if has(Fault::Pass) {
            return Err(err!(OutOfMemory, "planned"));
        }
        let outputs = batch.segments.iter().map(|segment| match segment.fault {
            Fault::Slot => Err(err!(InvalidArgument, "planned")),
            _ => {
                self.rows.fetch_add(segment.count, SeqCst);
                Ok(Output(segment.count))
            }
        });
        Ok(outputs.collect())
    }
}
