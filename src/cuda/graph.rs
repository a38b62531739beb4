//! Recorded sequences of launches, replayed with one call.

use std::cell::Cell;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::gpu::{Gpu, check};
use crate::base::Result;
use crate::base::error::err;

/// A recorded sequence. What it points to must live as long as it is launched: that is its owner's duty.
pub struct Graph {
    gpu: Arc<Gpu>,
    exec: sys::CUgraphExec,
}

// SAFETY: handles of the driver, used under a bound context.
unsafe impl Send for Graph {}

thread_local! {
    /// The stream that this thread records.
    static RECORDED: Cell<sys::CUstream> = const { Cell::new(std::ptr::null_mut()) };
}

/// The stream that this thread records, if it does.
pub(super) fn recorded() -> Option<sys::CUstream> {
    Some(RECORDED.get()).filter(|stream| !stream.is_null())
}

/// A stream that stands in for the device's on this thread.
struct Recording(sys::CUstream);

impl Recording {
    fn start() -> Result<Recording> {
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

impl Graph {
    /// Records what `enqueue` enqueues, without running it. Other threads may use the device meanwhile: what this thread
    /// enqueues goes to a stream of its own.
    pub fn record(gpu: &Arc<Gpu>, enqueue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        gpu.bind()?;
        let recording = Recording::start()?;
        // Kernels used by `enqueue` must be loaded by now: loading is not allowed while recording in this mode on this thread.
        check(
            // SAFETY: the stream was just made.
            unsafe {
                result::stream::begin_capture(
                    recording.0,
                    sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                )
            },
            "starting to record a graph",
        )?;
        let enqueued = enqueue();
        // SAFETY: recording was started above.
        let graph = check(
            unsafe { result::stream::end_capture(recording.0) },
            "recording a graph",
        );
        enqueued?;
        let graph = graph?;
        if graph.is_null() {
            return Err(err!(Internal, "recording a graph: the driver gave none"));
        }
        // SAFETY: the graph was just recorded, and is destroyed once.
        let exec = unsafe {
            let exec = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            check(exec, "preparing a graph")?
        };
        Ok(Graph {
            gpu: gpu.clone(),
            exec,
        })
    }

    /// Enqueues the sequence.
    pub fn launch(&self) -> Result<()> {
        self.gpu.bind()?;
        // SAFETY: the graph is alive.
        check(
            unsafe { result::graph::launch(self.exec, self.gpu.stream()) },
            "launching a graph",
        )
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: instantiated in `record`, destroyed once.
            let _ = unsafe { result::graph::exec_destroy(self.exec) };
        }
    }
}
