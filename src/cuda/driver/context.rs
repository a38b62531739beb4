//! Which context is current on a thread. The host program may have one of its own, which a call leaves as it found it.

use std::cell::Cell;

use cudarc::driver::{result, sys};

use super::error::check;
use crate::base::Result;

/// What is known of the context that was current when an entry was called on this thread.
#[derive(Clone, Copy)]
enum Outer {
    /// No entry is running, so nobody wants it back.
    Unwatched,
    /// It still is current.
    Untouched,
    /// This one was, or none.
    Was(sys::CUcontext),
}

thread_local! {
    static OUTER: Cell<Outer> = const { Cell::new(Outer::Unwatched) };
}

/// The calling thread's current context, made current again when this goes, if it was changed: a host that uses CUDA itself finds
/// its thread as it left it. A call that uses no GPU asks neither the driver nor the loader for anything.
pub struct KeepContext(Outer);

impl KeepContext {
    /// Watches the current context from now on.
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

/// Makes `context`, which is retained, the calling thread's, and notes which one was.
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
