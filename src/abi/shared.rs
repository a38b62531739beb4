//! The shared device and workspaces of calls that name none. Created on first use and freed by `NVFP4_empty_cache`; nothing here has to be
//! started or shut down.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::base::error::Result;
use crate::base::threads::Pool;
use crate::cuda;
use crate::ops::ste::EvalWeights;
use crate::ops::{Device, Workspace};

/// Upper limit of workspaces kept for reuse.
const IDLE: usize = 4;

pub(super) struct SharedState {
    /// The configured number of threads; `None` leaves it to the environment and the machine.
    threads: Option<usize>,
    device: Option<Device>,
    idle: Vec<Workspace>,
}

pub(super) static SHARED: Mutex<SharedState> = Mutex::new(SharedState {
    threads: None,
    device: None,
    idle: Vec::new(),
});

/// The values that NVFP4_ste_weight() keeps.
pub(super) static EVAL_WEIGHTS: EvalWeights = EvalWeights::new();

fn shared() -> MutexGuard<'static, SharedState> {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The CPU that calls share.
pub(super) fn device() -> Result<Device> {
    let mut shared = shared();
    if let Some(device) = &shared.device {
        return Ok(device.clone());
    }
    let device = Device::cpu(shared.threads)?;
    shared.device = Some(device.clone());
    Ok(device)
}

/// The shared CPU device, or a new one if `threads` is given.
pub(super) fn cpu(threads: Option<usize>) -> Result<Device> {
    match threads {
        None => device(),
        threads => Device::cpu(threads),
    }
}

/// `threads`, or the number of threads of the shared device.
pub(super) fn thread_count_of(threads: Option<usize>) -> Result<usize> {
    let threads = threads.or(shared().threads);
    threads.map_or_else(Pool::default_threads, Ok)
}

/// Sets the number of threads of devices created from now on.
pub(super) fn set_threads(threads: Option<usize>) {
    let mut shared = shared();
    if shared.threads != threads {
        shared.threads = threads;
        let old = shared.device.take();
        drop(shared);
        drop(old);
    }
}

/// Calls `f` with a workspace for its exclusive use.
pub(super) fn with_workspace<T>(f: impl FnOnce(&mut Workspace) -> Result<T>) -> Result<T> {
    let mut workspace = shared().idle.pop().unwrap_or_default();
    let result = f(&mut workspace);
    let mut shared = shared();
    if shared.idle.len() < IDLE {
        shared.idle.push(workspace);
    }
    result
}

/// Frees everything that is kept for reuse, also on GPUs. Objects in use keep what they need.
pub(super) fn empty() -> Result<()> {
    let mut shared = shared();
    let (device, idle) = (shared.device.take(), std::mem::take(&mut shared.idle));
    // Ending the threads takes a moment.
    drop(shared);
    drop((device, idle));
    EVAL_WEIGHTS.prune();
    cuda::open_gpus()
        .iter()
        .try_for_each(|gpu| gpu.empty_cache())
}
