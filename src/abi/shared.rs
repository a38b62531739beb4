//! The device and the scratch memory of calls that name none. Made at first use, and given up by `NVFP4_empty_cache`:
//! nothing here must be started or shut down.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::tensor::{NVFP4_DEVICE_AUTO, check_device};
use crate::base::Result;
use crate::ops::{Device, Workspace};

/// Workspaces kept for reuse, at most.
const IDLE: usize = 4;

struct Shared {
    /// Threads asked for; `None` leaves it to the environment and the machine.
    threads: Option<usize>,
    device: Option<Device>,
    idle: Vec<Workspace>,
}

static SHARED: Mutex<Shared> = Mutex::new(Shared {
    threads: None,
    device: None,
    idle: Vec::new(),
});

fn shared() -> MutexGuard<'static, Shared> {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The device that calls share.
pub(super) fn device() -> Result<Device> {
    let mut shared = shared();
    if let Some(device) = &shared.device {
        return Ok(device.clone());
    }
    let device = Device::cpu(shared.threads)?;
    shared.device = Some(device.clone());
    Ok(device)
}

/// The device that `device_type` and `device_index` name for work.
pub(super) fn device_of(device_type: i32, device_index: i32) -> Result<Device> {
    if device_type != NVFP4_DEVICE_AUTO {
        check_device(device_type, device_index)?;
    }
    device()
}

/// Sets the number of threads of devices made from now on.
pub(super) fn set_threads(threads: Option<usize>) {
    let mut shared = shared();
    if shared.threads != threads {
        shared.threads = threads;
        let old = shared.device.take();
        drop(shared);
        drop(old);
    }
}

/// Calls `f` with a workspace that is this call's alone.
pub(super) fn with_workspace<T>(f: impl FnOnce(&mut Workspace) -> Result<T>) -> Result<T> {
    let mut workspace = shared().idle.pop().unwrap_or_default();
    let result = f(&mut workspace);
    let mut shared = shared();
    if shared.idle.len() < IDLE {
        shared.idle.push(workspace);
    }
    result
}

/// Gives up everything that is kept for reuse. Objects in use keep what they need.
pub(super) fn empty() {
    let mut shared = shared();
    let (device, idle) = (shared.device.take(), std::mem::take(&mut shared.idle));
    // Ending the threads takes a moment.
    drop(shared);
    drop((device, idle));
}
