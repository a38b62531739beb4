//! A stream whose kernels run on some of the multiprocessors only, by a green context, so that kernels of the device's stream run beside them.

use std::fmt;
use std::mem::zeroed;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::error::check;
use super::event::Event;
use super::gpu::Gpu;
use super::recording::{Entered, entered};
use crate::base::Result;

/// The first driver that makes streams of green contexts.
const DRIVER: i32 = 12050;

/// A stream on some of a device's multiprocessors. One thread uses it at a time.
pub struct Lane {
    gpu: Arc<Gpu>,
    context: sys::CUgreenCtx,
    stream: sys::CUstream,
    multiprocessors: usize,
}

// SAFETY: the driver's handles may be used from any thread whose current context is theirs, which `Gpu::bind` sees to.
unsafe impl Send for Lane {}
// SAFETY: as above.
unsafe impl Sync for Lane {}

impl Lane {
    /// A lane of at least `wanted` multiprocessors; `None` where the driver does not divide them, which a warning says unless it is too old.
    pub fn new(gpu: &Arc<Gpu>, wanted: usize) -> Result<Option<Lane>> {
        if gpu.driver_version() < DRIVER || wanted >= gpu.multiprocessors() {
            return Ok(None);
        }
        gpu.bind()?;
        match Lane::divided(gpu, wanted) {
            Ok(lane) => Ok(Some(lane)),
            Err(e) => {
                tracing::warn!("prompts do not run beside steps: {e}");
                Ok(None)
            }
        }
    }

    /// As [`Lane::new`], in the device's context.
    fn divided(gpu: &Arc<Gpu>, wanted: usize) -> Result<Lane> {
        // SAFETY: plain C structs of integers, which the driver fills.
        let (mut all, mut part, mut rest): (
            sys::CUdevResource,
            sys::CUdevResource,
            sys::CUdevResource,
        ) = unsafe { (zeroed(), zeroed(), zeroed()) };
        let (mut groups, kind) = (1, sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM);
        let (mut context, mut described) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: all pointers are to values that live across the calls; the description is of the part.
        let made = unsafe {
            sys::cuDeviceGetDevResource(gpu.device(), &mut all, kind)
                .result()
                .and_then(|()| {
                    let (count, wanted) = (&mut groups, wanted as u32);
                    sys::cuDevSmResourceSplitByCount(&mut part, count, &all, &mut rest, 0, wanted)
                        .result()
                })
                .and_then(|()| {
                    sys::cuDevResourceGenerateDesc(&mut described, &mut part, 1).result()
                })
                .and_then(|()| {
                    let stream = sys::CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
                    sys::cuGreenCtxCreate(&mut context, described, gpu.device(), stream).result()
                })
        };
        check(made, "dividing the multiprocessors")?;
        let mut lane = Lane {
            gpu: gpu.clone(),
            context,
            stream: std::ptr::null_mut(),
            // SAFETY: the driver filled the part as one of multiprocessors.
            multiprocessors: unsafe { part.__bindgen_anon_1.sm.smCount } as usize,
        };
        // SAFETY: the context was just made. Streams of green contexts must be non-blocking.
        let made = unsafe {
            let non_blocking = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            sys::cuGreenCtxStreamCreate(&mut lane.stream, context, non_blocking, 0).result()
        };
        check(made, "creating a stream")?;
        Ok(lane)
    }

    /// Whether this thread enqueues to a lane of the device.
    pub fn is_entered(gpu: &Gpu) -> bool {
        entered(gpu.ordinal()).is_some()
    }

    /// In a lane, orders all work that this thread enqueues from now on after all that the device's stream has.
    pub fn follow_device_stream(gpu: &Arc<Gpu>) -> Result<()> {
        let Some((stream, _)) = entered(gpu.ordinal()) else {
            return Ok(());
        };
        let event = Event::record_on(gpu, gpu.own_stream())?;
        // SAFETY: both handles are alive; the driver keeps what it needs of the event.
        let waits = unsafe {
            let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            result::stream::wait_event(stream, event.handle(), flags)
        };
        check(waits, "ordering a stream after another")
    }

    /// Calls `work`, in which this thread enqueues to the lane in place of the device's stream, and waits until all of it has run.
    pub fn run<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let (ordinal, count) = (self.gpu.ordinal(), self.multiprocessors);
        let _entered = Entered::new(ordinal, self.stream, count);
        let done = work();
        self.gpu.wait().and(done)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if self.gpu.bind().is_err() {
            return;
        }
        // SAFETY: made in `divided`, the stream unless that failed, and used no more. Failures have no one to hear of them.
        unsafe {
            if !self.stream.is_null() {
                let _ = result::stream::synchronize(self.stream);
                let _ = result::stream::destroy(self.stream);
            }
            let _ = sys::cuGreenCtxDestroy(self.context);
        }
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} multiprocessors of {:?}",
            self.multiprocessors, self.gpu
        )
    }
}
