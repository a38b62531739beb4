//! Orders the device's stream with the host program's streams, wherever memory changes hands.

use std::cell::Cell;
use std::ffi::c_void;

use cudarc::driver::{result, sys};

use super::error::check;
use crate::base::Result;

/// Events that order the device's stream with the default stream of the process, or with the stream of [`HostStream`].
///
/// The device's stream and the default stream do not wait for each other: a program that uses both for unrelated work loses nothing. Where
/// memory passes from one stream to the other, the receiving stream waits for an event on the other, and for nothing else. All threads
/// share the two events and record them again each time: waiting for a later recording includes the earlier ones.
pub(in crate::cuda) struct Order {
    default: sys::CUevent,
    own: sys::CUevent,
}

/// The handle of the legacy default stream, on which CUDA programs work that name no stream.
const DEFAULT_STREAM: sys::CUstream = std::ptr::without_provenance_mut(1);

thread_local! {
    /// The stream on which the calling thread's host program uses device memory, and the number of that device.
    static HOST_STREAM: Cell<Option<(usize, sys::CUstream)>> = const { Cell::new(None) };
}

/// While this value exists, this thread's operations on device memory that it shares with the host program are ordered with the
/// given stream of the program instead of its legacy default stream.
#[derive(Debug)]
pub struct HostStream(Option<(usize, sys::CUstream)>);

impl HostStream {
    /// Chooses `stream` of device `ordinal`; NULL is the legacy default stream.
    ///
    /// # Safety
    /// `stream` must be a stream of the device's primary context for as long as this lives.
    pub unsafe fn new(ordinal: usize, stream: *mut c_void) -> HostStream {
        let chosen = (!stream.is_null()).then_some((ordinal, stream.cast()));
        HostStream(HOST_STREAM.replace(chosen))
    }
}

impl Drop for HostStream {
    fn drop(&mut self) {
        HOST_STREAM.set(self.0);
    }
}

/// The stream that [`HostStream`] chose of the device, or the legacy default stream.
fn host_stream(ordinal: usize) -> sys::CUstream {
    // A thread that is ending has no stream of its own.
    match HOST_STREAM.try_with(Cell::get) {
        Ok(Some((chosen, stream))) if chosen == ordinal => stream,
        _ => DEFAULT_STREAM,
    }
}

impl Order {
    /// Makes the events, in the current context.
    pub(in crate::cuda) fn new() -> Result<Order> {
        Ok(Order {
            default: event()?,
            own: event()?,
        })
    }

    /// Orders later work on `stream`, the device's, after all work that is enqueued on the host program's stream.
    pub(in crate::cuda) fn after_host(&self, ordinal: usize, stream: sys::CUstream) -> Result<()> {
        let host = host_stream(ordinal);
        // Another thread may record a shared event on another stream before this one waits for it.
        let shared = (host == DEFAULT_STREAM).then_some(self.default);
        let_wait(stream, host, shared)
    }

    /// Orders later work on the host program's stream after all work that is enqueued on `stream`.
    pub(in crate::cuda) fn before_host(&self, ordinal: usize, stream: sys::CUstream) -> Result<()> {
        let_wait(host_stream(ordinal), stream, Some(self.own))
    }

    /// Destroys the events.
    ///
    /// # Safety
    /// Nothing uses them afterwards.
    pub(in crate::cuda) unsafe fn destroy(&self) {
        for event in [self.default, self.own] {
            // SAFETY: made in `new`; the rest is the caller's promise.
            let _ = unsafe { result::event::destroy(event) };
        }
    }
}

fn event() -> Result<sys::CUevent> {
    check(
        result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING),
        "creating an event",
    )
}

/// Orders later work on `later` after all work on `earlier`, by a shared event or a new one.
fn let_wait(
    later: sys::CUstream,
    earlier: sys::CUstream,
    shared: Option<sys::CUevent>,
) -> Result<()> {
    // Usually nothing is left to wait for, and the events would only delay the streams.
    // SAFETY: the device's stream lives as long as the device, the default stream as long as the context, and another host stream by the
    // promise of `HostStream`.
    match unsafe { sys::cuStreamQuery(earlier) } {
        sys::CUresult::CUDA_SUCCESS => return Ok(()),
        sys::CUresult::CUDA_ERROR_NOT_READY => {}
        failed => check(failed.result(), "asking what a stream has left to do")?,
    }
    let order = |event| {
        // SAFETY: as above. The event lives as long as the device, or until it is destroyed below; destroying it does not affect streams
        // that wait for it.
        let ordered = unsafe {
            result::event::record(event, earlier).and_then(|()| {
                result::stream::wait_event(
                    later,
                    event,
                    sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT,
                )
            })
        };
        check(
            ordered,
            "ordering the device's stream with a stream of the program",
        )
    };
    if let Some(event) = shared {
        return order(event);
    }
    let own = event()?;
    let ordered = order(own);
    // SAFETY: made above.
    let _ = unsafe { result::event::destroy(own) };
    ordered
}
