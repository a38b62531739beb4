//! The streams that a thread uses in place of the device's stream: one that it records into a graph, and that of a lane.

use std::cell::Cell;

use cudarc::driver::{result, sys};

use super::error::check;
use crate::base::Result;

thread_local! {
    /// The stream that this thread records.
    static RECORDED: Cell<sys::CUstream> = const { Cell::new(std::ptr::null_mut()) };
}

thread_local! {
    /// The lane that this thread enqueues to: its device, stream and number of multiprocessors.
    static ENTERED: Cell<Option<(usize, sys::CUstream, usize)>> = const { Cell::new(None) };
}

/// The lane of a device that this thread enqueues to, if any: its stream, and its number of multiprocessors.
pub(super) fn entered(ordinal: usize) -> Option<(sys::CUstream, usize)> {
    let (of, stream, multiprocessors) = ENTERED.get()?;
    (of == ordinal).then_some((stream, multiprocessors))
}

/// Lets this thread enqueue to a lane, until it is dropped. Has the lane before.
pub(super) struct Entered(Option<(usize, sys::CUstream, usize)>);

impl Entered {
    pub(super) fn new(ordinal: usize, stream: sys::CUstream, multiprocessors: usize) -> Entered {
        Entered(ENTERED.replace(Some((ordinal, stream, multiprocessors))))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        ENTERED.set(self.0);
    }
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
