//! Weights that a multiprocessor decodes and multiplies per clock from shared memory, with wgmma on exact e4m3 codes: this must be well
//! above what memory delivers.

use std::sync::Arc;

use NVFP4::base::memory::Tag;
use NVFP4::cuda::{DeviceBuffer, Gpu, Program, Shape};
use NVFP4::format::random;

use super::{Figures, Mark, median, read_u64, zeros};

/// Twice the weights that memory delivers to a multiprocessor per clock.
const TWICE_MEMORY: f64 = 70.0;
/// Tiles per warpgroup in a round of the kernel.
const TILES: usize = 8;
const TILE: usize = 64 * 32;

#[repr(C)]
struct Arguments {
    b: u64,
    keep: u64,
    clocks: u64,
    rounds: i32,
}

pub(super) fn run(gpu: &Arc<Gpu>, figures: &mut Figures) {
    const ROUNDS: usize = 500;
    let program = Program::new(
        gpu,
        "decode_loop.cu",
        include_str!("kernels/decode_loop.cu"),
    )
    .unwrap();
    let noise: Vec<u8> = (0..TILES as u64 * 256)
        .map(|i| (random::bits(8, i) % 0x70) as u8)
        .collect();
    let b = DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, &noise).unwrap();
    let blocks = gpu.multiprocessors();
    let (clocks, keep) = (zeros(gpu, blocks * 8), zeros(gpu, 512 * 4));
    let arguments = Arguments {
        b: b.address(),
        keep: keep.address(),
        clocks: clocks.address(),
        rounds: ROUNDS as i32,
    };
    for warpgroups in 1..=4 {
        let shape = Shape {
            grid: [blocks as u32, 1, 1],
            threads: 128 * warpgroups,
            shared: warpgroups * TILES as u32 * 128 * 12 + TILES as u32 * 256,
            overlap: false,
        };
        let rates = (0..5).map(|_| {
            // SAFETY: the struct is the kernel's, and its buffers have the sizes that it takes.
            unsafe { program.launch("decode_loop", shape, &arguments) }.unwrap();
            let slowest = read_u64(&clocks, blocks).into_iter().max();
            let weights = ROUNDS * TILES * TILE * warpgroups as usize;
            weights as f64 / slowest.expect("there are blocks") as f64
        });
        let name = format!("decode loop on wgmma, {warpgroups} warpgroups");
        let mark = (warpgroups == 4).then_some(Mark::AtLeast(TWICE_MEMORY));
        figures.add(name, median(rates.collect()), "weights/clk", mark);
    }
}
