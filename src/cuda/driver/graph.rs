//! CUDA graphs: recorded sequences of launches, replayed with one call.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::error::check;
use super::gpu::Gpu;
use super::recording::Recording;
use crate::base::Result;
use crate::base::error::err;

/// A recorded sequence of launches. Its owner must keep alive what the launches point to as long as it is launched.
pub struct Graph {
    gpu: Arc<Gpu>,
    exec: sys::CUgraphExec,
    kernels: usize,
}

// SAFETY: handles of the driver, used under a bound context.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `enqueue` enqueues, without running it. Other threads may use the device meanwhile, because this thread enqueues to a
    /// stream of its own.
    pub fn record(gpu: &Arc<Gpu>, enqueue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        gpu.bind()?;
        let recording = Recording::start()?;
        // All kernels that `enqueue` uses must be loaded by now: this mode forbids loading on this thread while recording.
        check(
            // SAFETY: the stream was just made.
            unsafe {
                result::stream::begin_capture(
                    recording.stream(),
                    sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                )
            },
            "starting to record a graph",
        )?;
        let enqueued = enqueue();
        // SAFETY: recording was started above.
        let graph = check(
            unsafe { result::stream::end_capture(recording.stream()) },
            "recording a graph",
        );
        enqueued?;
        let graph = graph?;
        if graph.is_null() {
            return Err(err!(Internal, "recording a graph: the driver gave none"));
        }
        let mut kernels = 0;
        // SAFETY: without an array, only the number of nodes is written.
        let counted = unsafe { sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut kernels) };
        // SAFETY: the graph was just recorded, and is destroyed once.
        let exec = unsafe {
            let exec = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            check(exec, "preparing a graph")?
        };
        let graph = Graph {
            gpu: gpu.clone(),
            exec,
            kernels,
        };
        check(counted.result(), "counting a graph's kernels")?;
        Ok(graph)
    }

    /// Number of recorded launches and copies.
    pub fn kernels(&self) -> usize {
        self.kernels
    }

    /// Enqueues the sequence.
    pub fn launch(&self) -> Result<()> {
        self.gpu.bind()?;
        check(
            // SAFETY: the graph is alive.
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
