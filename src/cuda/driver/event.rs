//! Points in the device's stream that the host can wait for.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::error::check;
use super::gpu::Gpu;
use crate::base::{Result, call};

/// A point in the device's stream.
pub struct Event {
    gpu: Arc<Gpu>,
    event: sys::CUevent,
}

// SAFETY: a driver's handle, used under a bound context.
unsafe impl Send for Event {}

impl Event {
    /// Records the point after everything that this thread's stream has.
    pub fn record(gpu: &Arc<Gpu>) -> Result<Event> {
        Event::record_on(gpu, gpu.stream())
    }

    pub(super) fn record_on(gpu: &Arc<Gpu>, stream: sys::CUstream) -> Result<Event> {
        gpu.bind()?;
        let event = check(
            result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING),
            "creating an event",
        )?;
        let event = Event {
            gpu: gpu.clone(),
            event,
        };
        check(
            // SAFETY: event and stream are the device's own.
            unsafe { result::event::record(event.event, stream) },
            "recording an event",
        )?;
        Ok(event)
    }

    pub(super) fn handle(&self) -> sys::CUevent {
        self.event
    }

    /// Waits until the device has reached it.
    pub fn wait(&self) -> Result<()> {
        self.gpu.bind()?;
        check(
            // SAFETY: the event is alive.
            unsafe { result::event::synchronize(self.event) },
            "waiting for the device",
        )
    }

    /// Waits until the device has reached it, unless the thread's [`call`] is cancelled meanwhile.
    pub fn wait_or_cancel(&self) -> Result<()> {
        self.gpu.bind()?;
        loop {
            // SAFETY: the event is alive.
            match unsafe { result::event::query(self.event) } {
                Ok(()) => return Ok(()),
                Err(e) if e.0 == sys::CUresult::CUDA_ERROR_NOT_READY => {}
                failed => return check(failed, "waiting for the device"),
            }
            call::check()?;
            std::thread::yield_now();
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: made in `record` and not used again.
            let _ = unsafe { result::event::destroy(self.event) };
        }
    }
}
