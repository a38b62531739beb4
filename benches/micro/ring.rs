//! Read bandwidth through rings of bulk copies: the bytes that must be in flight on a multiprocessor, and the size of copies, with one or
//! two blocks per multiprocessor.

use std::sync::Arc;

use NVFP4::base::memory::Tag;
use NVFP4::cuda::{self, DeviceBuffer, Gpu, Graph, Program, Shape};

use super::{Figures, Mark, time};

#[repr(C)]
struct Arguments {
    data: u64,
    share: u64,
    chunk: u32,
    stages: u32,
}

#[repr(C)]
struct Fill {
    data: u64,
    words: u64,
}

/// Some fifty times the L2 cache.
const BYTES: usize = 3 << 30;
/// The share of plain loads' bandwidth that a ring with at most [`MODEST`] bytes should reach.
const SHARE: f64 = 0.95;
const MODEST: usize = 100 << 10;

pub(super) fn run(gpu: &Arc<Gpu>, figures: &mut Figures) {
    let program = Program::new(gpu, "ring.cu", include_str!("kernels/ring.cu")).unwrap();
    let bandwidth = cuda::read_bandwidth(gpu).unwrap() / 1e9;
    figures.add("ring: plain loads read", bandwidth, "GB/s", None);
    let data = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, BYTES).unwrap();
    let fill = Fill {
        data: data.address(),
        words: (BYTES / 4) as u64,
    };
    let shape = |blocks: usize, threads: u32, shared: usize| Shape {
        grid: [blocks as u32, 1, 1],
        threads,
        shared: shared as u32,
        overlap: false,
    };
    // SAFETY: the struct is the kernel's, and the buffer has so many words.
    unsafe { program.launch("fill", shape(gpu.multiprocessors() * 8, 256, 0), &fill) }.unwrap();
    let mut best = 0f64;
    for per_multiprocessor in [1, 2] {
        for chunk in [2, 4, 8, 16, 32].map(|k: usize| k << 10) {
            for in_flight in [16, 32, 64, 96, 128, 192].map(|k: usize| k << 10) {
                let stages = in_flight / per_multiprocessor / chunk;
                if !(2..=128).contains(&stages) {
                    continue;
                }
                let blocks = gpu.multiprocessors() * per_multiprocessor;
                let share = BYTES / blocks / chunk * chunk;
                let arguments = Arguments {
                    data: data.address(),
                    share: share as u64,
                    chunk: chunk as u32,
                    stages: stages as u32,
                };
                let enqueue = || {
                    let shape = shape(blocks, 32, stages * chunk);
                    // SAFETY: the struct is the kernel's; shares lie within the buffer, stages within shared memory.
                    unsafe { program.launch("ring", shape, &arguments) }
                };
                enqueue().unwrap();
                let graph = Graph::record(gpu, enqueue).unwrap();
                let rate = (share * blocks) as f64 / time(gpu, &graph, 5) / 1e9;
                let name = format!(
                    "ring {per_multiprocessor} blocks, {} KB in {} KB copies",
                    in_flight >> 10,
                    chunk >> 10
                );
                figures.add(name, rate, "GB/s", None);
                if in_flight <= MODEST {
                    best = best.max(rate);
                }
            }
        }
    }
    figures.add(
        "ring: best of at most 100 KB in flight, of plain loads",
        best / bandwidth,
        "",
        Some(Mark::AtLeast(SHARE)),
    );
}
