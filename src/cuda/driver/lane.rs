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
    /// A lane of at least `wanted` multiprocessors; `None` where the driver or the device cannot divide them.
    pub fn new(gpu: &Arc<Gpu>, wanted: usize) -> Result<Option<Lane>> {
        if gpu.driver_version() < DRIVER || wanted >= gpu.multiprocessors() {
            return Ok(None);
        }
        gpu.bind()?;
        // SAFETY: plain C structs of integers, which the driver fills.
        let (mut all, mut part, mut rest): (
            sys::CUdevResource,
            sys::CUdevResource,
            sys::CUdevResource,
        ) = unsafe { (zeroed(), zeroed(), zeroed()) };
        let (mut groups, kind) = (1, sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM);
        // SAFETY: all pointers are to structs that live across the calls.
        let divided = unsafe {
            sys::cuDeviceGetDevResource(gpu.device(), &mut all, kind)
                .result()
                .and_then(|()| {
                    sys::cuDevSmResourceSplitByCount(
                        &mut part,
                        &mut groups,
                        &all,
                        &mut rest,
                        0,
                        wanted as u32,
                    )
                    .result()
                })
        };
        if divided.is_err() || groups != 1 {
            return Ok(None);
        }
        let (mut context, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mut described = std::ptr::null_mut();
        check(
            // SAFETY: as above; the description is of the part.
            unsafe {
                sys::cuDevResourceGenerateDesc(&mut described, &mut part, 1)
                    .result()
                    .and_then(|()| {
                        let stream = sys::CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM;
                        sys::cuGreenCtxCreate(&mut context, described, gpu.device(), stream as u32)
                            .result()
                    })
            },
            "dividing the multiprocessors",
        )?;
        // SAFETY: the context was just made. Streams of green contexts must be non-blocking.
        let made = unsafe {
            let non_blocking = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            sys::cuGreenCtxStreamCreate(&mut stream, context, non_blocking, 0).result()
        };
        if let Err(e) = check(made, "creating a stream") {
            // SAFETY: nothing uses the context.
            let _ = unsafe { sys::cuGreenCtxDestroy(context) };
            return Err(e);
        }
        Ok(Some(Lane {
            gpu: gpu.clone(),
            context,
            stream,
            // SAFETY: the driver filled the part as one of multiprocessors.
            multiprocessors: unsafe { part.__bindgen_anon_1.sm.smCount } as usize,
        }))
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
        // SAFETY: made in `new`, and used no more. Failures have no one to hear of them.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            let _ = result::stream::destroy(self.stream);
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
