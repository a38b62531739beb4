//! A stream whose kernels run on some of the multiprocessors only, by a green context, so that kernels of the device's stream run beside them.

use std::fmt;
use std::mem::zeroed;
use std::sync::{Arc, Mutex};

use cudarc::driver::{result, sys};

use super::attached::Attached;
use super::error::check;
use super::event::Event;
use super::gpu::Gpu;
use super::recording::Entered;
use crate::base::Result;
use crate::base::lock::lock;

/// The first driver that makes streams of green contexts.
const DRIVER: i32 = 12050;

/// A stream on some of a device's multiprocessors. One thread uses it at a time.
pub struct Lane {
    gpu: Arc<Gpu>,
    green: Green,
}

/// A stream of a green context.
#[derive(Clone, Copy)]
struct Green {
    context: sys::CUgreenCtx,
    stream: sys::CUstream,
    /// The number of multiprocessors asked for.
    wanted: usize,
    /// The number of multiprocessors of the context.
    multiprocessors: usize,
}

// SAFETY: the driver's handles may be used from any thread whose current context is the device's, which `Gpu::bind` sees to.
unsafe impl Send for Green {}
// SAFETY: as above.
unsafe impl Sync for Green {}

impl Green {
    /// A new one with at least `wanted` multiprocessors. The device's context is current.
    fn new(gpu: &Gpu, wanted: usize) -> Result<Green> {
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
        let mut green = Green {
            context,
            stream: std::ptr::null_mut(),
            wanted,
            // SAFETY: the driver filled the part as one of multiprocessors.
            multiprocessors: unsafe { part.__bindgen_anon_1.sm.smCount } as usize,
        };
        // SAFETY: the context was just made. Streams of green contexts must be non-blocking.
        let made = unsafe {
            let non_blocking = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            sys::cuGreenCtxStreamCreate(&mut green.stream, context, non_blocking, 0).result()
        };
        if let Err(e) = check(made, "creating a stream") {
            green.destroy();
            return Err(e);
        }
        Ok(green)
    }

    /// Gives it back to the driver, which keeps some of its memory. The device's context is current, and nothing uses the stream any more.
    fn destroy(self) {
        // SAFETY: the stream is null or was made with the context. Failures have no one to hear of them.
        unsafe {
            if !self.stream.is_null() {
                let _ = result::stream::synchronize(self.stream);
                let _ = result::stream::destroy(self.stream);
            }
            let _ = sys::cuGreenCtxDestroy(self.context);
        }
    }
}

/// The green contexts of a device that no lane has. They serve again, because each that is destroyed loses 4 MB of the device's memory
/// (driver 580).
#[derive(Default)]
struct Spare(Mutex<Vec<Green>>);

impl Spare {
    fn take(&self, wanted: usize) -> Option<Green> {
        let mut spare = lock(&self.0);
        let index = spare.iter().position(|green| green.wanted == wanted)?;
        Some(spare.swap_remove(index))
    }
}

impl Attached for Spare {
    fn free(&self, _stream: sys::CUstream) {
        lock(&self.0).drain(..).for_each(Green::destroy);
    }
}

impl Lane {
    /// A lane of at least `wanted` multiprocessors; `None` where the driver does not divide them, which a warning says unless it is too old.
    pub fn new(gpu: &Arc<Gpu>, wanted: usize) -> Result<Option<Lane>> {
        if gpu.driver_version() < DRIVER || wanted >= gpu.multiprocessors() {
            return Ok(None);
        }
        gpu.bind()?;
        let spare = gpu.attached_or(|| Ok(Spare::default()))?;
        match spare
            .take(wanted)
            .map_or_else(|| Green::new(gpu, wanted), Ok)
        {
            Ok(green) => Ok(Some(Lane {
                gpu: gpu.clone(),
                green,
            })),
            Err(e) => {
                tracing::warn!("prompts do not run beside steps: {e}");
                Ok(None)
            }
        }
    }

    /// Orders all that is enqueued in the lane from now on after all that the device's stream has: steps that run in vain may still write where a
    /// sequence goes on, and blocks be cleared or copied.
    fn follow_device_stream(&self) -> Result<()> {
        let event = Event::record_on(&self.gpu, self.gpu.own_stream())?;
        // SAFETY: both handles are alive; the driver keeps what it needs of the event.
        let waits = unsafe {
            let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            result::stream::wait_event(self.green.stream, event.handle(), flags)
        };
        check(waits, "ordering a stream after another")
    }

    /// Calls `work`, in which this thread enqueues to the lane in place of the device's stream, after all that this stream has. Waits until all
    /// of it has run.
    pub fn run<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.gpu.bind()?;
        self.follow_device_stream()?;
        let Green {
            stream,
            multiprocessors,
            ..
        } = self.green;
        let _entered = Entered::new(self.gpu.ordinal(), stream, multiprocessors);
        let waits = WaitsOnUnwind(&self.gpu);
        let done = work();
        std::mem::forget(waits);
        self.gpu.wait().and(done)
    }
}

/// Waits for the lane that this thread is in, so that what unwinds frees nothing that kernels use.
struct WaitsOnUnwind<'a>(&'a Gpu);

impl Drop for WaitsOnUnwind<'_> {
    fn drop(&mut self) {
        let _ = self.0.wait();
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if let Some(spare) = self.gpu.attached::<Spare>() {
            lock(&spare.0).push(self.green);
        }
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} multiprocessors of {:?}",
            self.green.multiprocessors, self.gpu
        )
    }
}
