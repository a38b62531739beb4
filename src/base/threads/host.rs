//! Threads of a host in place of a pool's own workers. The host runs tasks, each of which helps with regions for as long as they follow each
//! other, and returns to the host when none has come for a moment. No region waits for a task that the host has not begun, so a host may run
//! them late, on few threads, or never: the callers then do more of the work.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::{PoolState, has_parts_soon, leaves_core_to_caller, take_parts};
use crate::base::region;

/// Schedules a task on a thread of the host, and returns at once. A task that is dropped helps with nothing.
pub type Submit = dyn Fn(Task) + Send + Sync;

/// Helps with the regions of a pool. May outlive the pool.
pub struct Task(Arc<PoolState>);

impl Task {
    /// A task for a pool, which counts it from now on.
    pub(super) fn new(shared: &Arc<PoolState>) -> Task {
        shared.tasks.fetch_add(1, Ordering::Relaxed);
        Task(shared.clone())
    }

    /// Helps until no region has come for 200 µs. A panic in a part is raised again by the caller of its region.
    pub fn run(self) {
        let shared = &*self.0;
        let regions = &shared.regions;
        let mut idle = Instant::now();
        while !shared.stop.load(Ordering::SeqCst) {
            let waits = has_parts_soon(regions) || idle.elapsed() <= region::SPIN;
            if waits && regions.is_beside_caller() && leaves_core_to_caller() {
                continue;
            }
            if let Some(claim) = regions.claim(|| {}) {
                take_parts(shared, claim, || {});
                idle = Instant::now();
            } else if idle.elapsed() > region::SPIN {
                break;
            }
        }
    }

    /// A pointer that [`Task::from_raw`] takes back, once.
    pub fn into_raw(self) -> *const () {
        let task = std::mem::ManuallyDrop::new(self);
        // SAFETY: the task is not dropped, so its reference goes with the pointer.
        Arc::into_raw(unsafe { std::ptr::read(&raw const task.0) }).cast()
    }

    /// The task of a pointer.
    ///
    /// # Safety
    /// The pointer is of [`Task::into_raw`], and has not been taken back.
    pub unsafe fn from_raw(task: *const ()) -> Task {
        // SAFETY: promised by the caller.
        Task(unsafe { Arc::from_raw(task.cast()) })
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.tasks.fetch_sub(1, Ordering::Relaxed);
    }
}
