//! The CUDA context that is current on a thread. A host program may have its own, which every call restores.

use std::cell::Cell;

use cudarc::driver::{result, sys};

use super::error::check;
use crate::base::Result;

/// The context that was current when a library call began on this thread.
#[derive(Clone, Copy)]
enum Outer {
    /// No library call is running, so there is nothing to restore.
    Unwatched,
    /// It is still current.
    Untouched,
    /// It was this one, or none.
    Was(sys::CUcontext),
}

thread_local! {
    static OUTER: Cell<Outer> = const { Cell::new(Outer::Unwatched) };
}

/// Restores the calling thread's current context when dropped, if it was changed: a host that uses CUDA itself finds its thread as it left
/// it. A call that uses no GPU asks neither the driver nor the loader for anything.
pub struct KeepContext(Outer);

impl KeepContext {
    /// Starts to watch the current context.
    pub fn new() -> KeepContext {
        KeepContext(OUTER.replace(Outer::Untouched))
    }
}

impl Default for KeepContext {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for KeepContext {
    fn drop(&mut self) {
        if let Outer::Was(context) = OUTER.replace(self.0) {
            // SAFETY: it was this thread's current context when the call began, or none.
            let _ = unsafe { result::ctx::set_current(context) };
        }
    }
}

/// Makes `context`, which is retained, current on the calling thread, and remembers the previous one.
pub(in crate::cuda) fn make_current(context: sys::CUcontext) -> Result<()> {
    if matches!(OUTER.get(), Outer::Untouched) {
        let outer = check(result::ctx::get_current(), "asking for the current context")?;
        OUTER.set(Outer::Was(outer.unwrap_or(std::ptr::null_mut())));
    }
    check(
        // SAFETY: the caller retained the context.
        unsafe { result::ctx::set_current(context) },
        "entering the device's context",
    )
}
