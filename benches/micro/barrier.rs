//! The cost of a barrier of the whole grid, with idle and with busy memory: the price of a decoder in a single kernel.

use std::sync::Arc;

use NVFP4::base::memory::Tag;
use NVFP4::cuda::{DeviceBuffer, Gpu, Program, Shape};

use super::{Figures, Mark, median, read_u64, zeros};

#[repr(C)]
struct Arguments {
    counter: u64,
    data: u64,
    words: u64,
    nanoseconds: u64,
    read: u64,
    rounds: i32,
}

/// Microseconds that 144 barriers of a token may take each while weights stream.
const AFFORDABLE: f64 = 1.3;
const BYTES: usize = 1 << 30;

pub(super) fn run(gpu: &Arc<Gpu>, figures: &mut Figures) {
    const ROUNDS: usize = 1000;
    let program = Program::new(gpu, "barrier.cu", include_str!("kernels/barrier.cu")).unwrap();
    let data = DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, BYTES).unwrap();
    let blocks = gpu.multiprocessors();
    let nanoseconds = zeros(gpu, blocks * 8);
    for (kernel, threads, what) in [
        ("counter", 32, "counter"),
        ("clusters_2", 32, "clusters of 2, then counter"),
        ("clusters_4", 32, "clusters of 4, then counter"),
        ("counter", 64, "counter, 1 warp reading"),
        ("counter", 160, "counter, 4 warps reading"),
        ("counter", 512, "counter, 15 warps reading"),
    ] {
        let (mut rates, mut times) = (Vec::new(), Vec::new());
        for _ in 0..5 {
            let (counter, read) = (zeros(gpu, 8), zeros(gpu, 8));
            let arguments = Arguments {
                counter: counter.address(),
                data: data.address(),
                words: (BYTES / 16) as u64,
                nanoseconds: nanoseconds.address(),
                read: read.address(),
                rounds: ROUNDS as i32,
            };
            let shape = Shape {
                grid: [blocks as u32, 1, 1],
                threads,
                shared: 0,
                overlap: false,
            };
            // SAFETY: the struct is the kernel's. All blocks are resident at once, one to a multiprocessor or more.
            unsafe { program.launch(kernel, shape, &arguments) }.unwrap();
            let slowest = read_u64(&nanoseconds, blocks).into_iter().max();
            let slowest = slowest.expect("there are blocks") as f64;
            times.push(slowest / ROUNDS as f64 / 1e3);
            rates.push(read_u64(&read, 1)[0] as f64 * 16.0 / slowest);
        }
        let loaded = threads == 512;
        figures.add(
            format!("barrier by {what}"),
            median(times),
            "us",
            loaded.then_some(Mark::AtMost(AFFORDABLE)),
        );
        if threads > 32 {
            figures.add(
                format!("barrier by {what}: rate"),
                median(rates),
                "GB/s",
                None,
            );
        }
    }
}
