//! The stream that a thread records into a graph, in place of the device's stream.

use std::cell::Cell;

use cudarc::driver::{result, sys};

use super::error::check;
use crate::base::Result;

thread_local! {
    /// The stream that this thread records.
    static RECORDED: Cell<sys::CUstream> = const { Cell::new(std::ptr::null_mut()) };
}

/// The stream that this thread records, if any.
pub(in crate::cuda) fn recorded() -> Option<sys::CUstream> {
    Some(RECORDED.get()).filter(|stream| !stream.is_null())
}

/// A stream that replaces the device's stream on this thread.
pub(in crate::cuda) struct Recording(sys::CUstream);

impl Recording {
    pub(in crate::cuda) fn stream(&self) -> sys::CUstream {
        self.0
    }

    pub(in crate::cuda) fn start() -> Result<Recording> {
        let stream = check(
            result::stream::create(result::stream::StreamKind::NonBlocking),
            "creating a stream",
        )?;
        RECORDED.set(stream);
        Ok(Recording(stream))
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        RECORDED.set(std::ptr::null_mut());
        // SAFETY: made in `start`, and not used again.
        let _ = unsafe { result::stream::destroy(self.0) };
    }
}
