//! The device and the workspaces of calls that name none. Created at first use and freed by `NVFP4_empty_cache`: nothing
//! here has to be started or shut down.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::tensor::{NVFP4_DEVICE_AUTO, NVFP4_DEVICE_CPU, NVFP4_DEVICE_CUDA};
use crate::base::ErrorKind;
use crate::base::error::{Result, bail};
use crate::cuda;
use crate::ops::ste::EvalWeights;
use crate::ops::{Device, Workspace};

/// The most workspaces kept for reuse.
const IDLE: usize = 4;

pub(super) struct Shared {
    /// The number of threads set; `None` leaves it to the environment and the machine.
    threads: Option<usize>,
    device: Option<Device>,
    idle: Vec<Workspace>,
}

pub(super) static SHARED: Mutex<Shared> = Mutex::new(Shared {
    threads: None,
    device: None,
    idle: Vec::new(),
});

/// The values that NVFP4_ste_weight() keeps.
pub(super) static EVAL_WEIGHTS: EvalWeights = EvalWeights::new();

fn shared() -> MutexGuard<'static, Shared> {
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

/// The shared CPU device, or a new one where `threads` is given.
pub(super) fn cpu(threads: Option<usize>) -> Result<Device> {
    match threads {
        None => device(),
        threads => Device::cpu(threads),
    }
}

/// Refuses an index other than 0 or -1, for a device type with a single device.
pub(super) fn check_only(who: &str, device_index: i32) -> Result<()> {
    match device_index {
        -1 | 0 => Ok(()),
        _ => bail!(
            InvalidArgument,
            "device_index is {device_index}; {who} has 0 (or -1)"
        ),
    }
}

/// The device that `device_type` and `device_index` name. A CPU device is a new one where `threads` is given.
pub(super) fn device_of(
    device_type: i32,
    device_index: i32,
    threads: Option<usize>,
) -> Result<Device> {
    match device_type {
        NVFP4_DEVICE_CPU => {
            check_only("the CPU", device_index)?;
            cpu(threads)
        }
        NVFP4_DEVICE_CUDA => match usize::try_from(device_index) {
            Ok(ordinal) => Device::cuda(ordinal)
                .map_err(|e| e.within(format_args!("CUDA device {device_index}"))),
            Err(_) => bail!(
                InvalidArgument,
                "device_index is {device_index}; CUDA devices are numbered from 0"
            ),
        },
        NVFP4_DEVICE_AUTO => {
            check_only("the library's choice", device_index)?;
            match Device::cuda(0) {
                Err(e) if e.kind() == ErrorKind::DeviceUnavailable => {
                    tracing::debug!("the CPU is chosen: {e}");
                    cpu(threads)
                }
                chosen => chosen,
            }
        }
        _ => bail!(
            InvalidArgument,
            "device_type is {device_type}; it takes 0 (CPU), 1 (CUDA) or -1 (the library's choice)"
        ),
    }
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

/// Frees everything that is kept for reuse, on GPUs too. Objects in use keep what they need.
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
