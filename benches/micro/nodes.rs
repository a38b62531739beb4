//! Overhead of a kernel in a recorded graph, by the way it is launched after its predecessor.

use std::sync::Arc;

use NVFP4::cuda::{Gpu, Graph, Program, Shape};

use super::{Figures, Mark, time};

#[repr(C)]
struct Arguments {
    clocks: u64,
}

/// Microseconds of overhead at which the 180 kernels of a decode step cost a tenth of its time.
const AFFORDABLE: f64 = 0.3;

pub(super) fn run(gpu: &Arc<Gpu>, figures: &mut Figures) {
    const NODES: usize = 500;
    let program = Program::new(gpu, "nodes.cu", include_str!("kernels/nodes.cu")).unwrap();
    let measure = |kernel: &str, overlap: bool, clocks: u64, nodes: usize| {
        let arguments = Arguments { clocks };
        let shape = Shape {
            grid: [gpu.multiprocessors() as u32, 1, 1],
            threads: 256,
            shared: 0,
            overlap,
        };
        // SAFETY: the struct is the kernel's.
        let enqueue = || unsafe { program.launch(kernel, shape, &arguments) };
        enqueue().unwrap();
        let graph = Graph::record(gpu, || (0..nodes).try_for_each(|_| enqueue())).unwrap();
        time(gpu, &graph, 11) * 1e6
    };
    for (kernel, overlap, what) in [
        ("plain", false, "plain"),
        ("waiting", true, "overlapping"),
        ("early", true, "overlapping, started early"),
    ] {
        let each = |clocks| {
            let (one, all) = (
                measure(kernel, overlap, clocks, 1),
                measure(kernel, overlap, clocks, NODES + 1),
            );
            (all - one) / NODES as f64
        };
        // The work alone: the additional time of twice the work, for long kernels.
        let (short, long) = (each(40_000), each(80_000));
        let clock = (long - short) / 40_000.0;
        figures.add(format!("node {what}, empty"), each(0), "us", None);
        let clocks = (2.0 / clock) as u64;
        let mark = (kernel == "early").then_some(Mark::AtMost(AFFORDABLE));
        let beside = each(clocks) - 2.0;
        figures.add(
            format!("node {what}, beside 2 us of work"),
            beside,
            "us",
            mark,
        );
    }
}
