//! Pools: threads of the host that work for models
//!
//! A model on the CPU divides its work among threads of the library. A host that has a pool of threads already, pinned to cores or shared with
//! other work, gives the model a pool made of that: the library then schedules tasks on it, and starts no threads for the model's passes.
//! Loading starts threads of its own, which end with it, and each generation of a queue has one.
//!
//! The thread that calls the model works too, and no call waits for a task that has not begun. A host may therefore run tasks late, on fewer
//! threads than were asked for, or not at all: calls only take longer. Results do not depend on it.

use std::ffi::c_void;
use std::sync::{Arc, OnceLock};

use super::arguments::{Out, User};
use super::guard::{self, calling, enter, enter_to_free, unwinding};
use super::handle::{self, Object};
use super::library::thread_count;
use super::shared;
use super::status::NVFP4_Status;
use crate::base::error::bail;
use crate::base::threads::Task;
use crate::model::Device;

/// Threads of the host. See the pool chapter.
pub struct NVFP4_Pool {
    _private: [u8; 0],
}

/// The CPU on threads of a host.
pub(super) struct Pool {
    pub(super) device: Device,
}

impl Object for Pool {
    type Handle = NVFP4_Pool;
    const NAME: &'static str = "NVFP4_Pool";
}

/// Runs a task once: see #NVFP4_PoolSubmit. Returns when the task has nothing more to do.
pub type NVFP4_PoolTask = Option<unsafe extern "C" fn(task: *mut c_void)>;

/// Schedules `run(task)` on a thread of the host, and returns at once. Returns 0 if `run(task)` will be called, once, in this process; anything
/// else if it will not.
///
/// The task helps calls of models for as long as they have work, at least some hundred microseconds, and returns. It may begin when the pool
/// and its models are gone, and then returns at once. Its thread needs 512 KiB of stack. The function is called by threads that call a model of
/// the pool, by one at a time. It must not call the library.
pub type NVFP4_PoolSubmit =
    Option<unsafe extern "C" fn(user: *mut c_void, run: NVFP4_PoolTask, task: *mut c_void) -> i32>;

/// Called once, when neither the pool nor a model uses `user` any more, by the thread that released the last of them.
pub type NVFP4_PoolRelease = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// The callbacks of a host.
struct Host {
    submit: unsafe extern "C-unwind" fn(*mut c_void, NVFP4_PoolTask, *mut c_void) -> i32,
    user: User,
    /// Set once nothing can fail any more.
    release: OnceLock<unsafe extern "C" fn(*mut c_void)>,
}

impl Host {
    fn submit(&self, task: Task) {
        let task = task.into_raw().cast_mut().cast();
        // SAFETY: the host's function, called until `release` is.
        let refused = calling(|| unsafe { (self.submit)(self.user.0, Some(run), task) }) != 0;
        if refused {
            // SAFETY: the host does not run it.
            drop(unsafe { Task::from_raw(task.cast()) });
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        guard::release(self.release.get().copied(), self.user.0);
    }
}

/// The library's [`NVFP4_PoolTask`].
unsafe extern "C" fn run(task: *mut c_void) {
    // SAFETY: the host passes what it was given, once.
    unsafe { Task::from_raw(task.cast()) }.run();
}

/// Makes a pool of the host's threads, for `pool` of #NVFP4_LoadOptions; any number of models may share it. In the child of a fork its models
/// run on the calling threads alone, because the child does not have the host's.
///
/// - `threads`: most threads that work at a time for a call, the calling one included; 0 for as many as NVFP4_set_threads() says.
/// - `submit`: schedules a task. `release`: called when `user` is no longer used, but not if this function fails; NULL for none.
///
/// Errors: #NVFP4_INVALID_ARGUMENT for a NULL `submit`, and for `threads` out of range.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_pool_create(
    threads: i32,
    submit: NVFP4_PoolSubmit,
    user: *mut c_void,
    release: NVFP4_PoolRelease,
    out: *mut *mut NVFP4_Pool,
) -> NVFP4_Status {
    enter("NVFP4_pool_create", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        let threads = thread_count(threads)?;
        let Some(submit) = submit else {
            bail!(InvalidArgument, "submit is NULL; pass a function");
        };
        let threads = shared::thread_count_of(threads)?;
        let host = Arc::new(Host {
            submit: unwinding!(fn(*mut c_void, NVFP4_PoolTask, *mut c_void) -> i32, submit),
            user: User(user),
            release: OnceLock::new(),
        });
        let own = host.clone();
        let device = Device::cpu_of_host(threads, Arc::new(move |task| own.submit(task)))?;
        if let Some(release) = release {
            host.release.get_or_init(|| release);
        }
        out.set(handle::insert(Arc::new(Pool { device })));
        Ok(())
    })
}

/// Adds a reference to a pool.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_pool_retain(pool: *mut NVFP4_Pool) -> NVFP4_Status {
    enter("NVFP4_pool_retain", || handle::retain::<Pool>("pool", pool))
}

/// Gives up a reference to a pool. After the last one the handle is stale; models that have the pool keep it.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_pool_release(pool: *mut NVFP4_Pool) -> NVFP4_Status {
    enter_to_free("NVFP4_pool_release", || {
        handle::release::<Pool>("pool", pool)
    })
}
