//! Lanes per clock of a multiprocessor for each instruction that can decode 4-bit weights. The best decoder has the fewest instructions on
//! the busiest pipe.

use std::sync::Arc;

use NVFP4::cuda::{Gpu, Program, Shape};

use super::{Figures, median, read_u64, zeros};

#[repr(C)]
struct Arguments {
    clocks: u64,
    keep: u64,
    seed: u32,
    rounds: i32,
}

/// Instructions per thread and round.
const STEPS: usize = 64;
const THREADS: usize = 512;
const ROUNDS: usize = 300;

pub(super) fn run(gpu: &Arc<Gpu>, figures: &mut Figures) {
    let program = Program::new(gpu, "pipes.cu", include_str!("kernels/pipes.cu")).unwrap();
    let blocks = gpu.multiprocessors();
    let (clocks, keep) = (zeros(gpu, blocks * 8), zeros(gpu, 4));
    let arguments = Arguments {
        clocks: clocks.address(),
        keep: keep.address(),
        seed: 0x2545_f491,
        rounds: ROUNDS as i32,
    };
    let shape = Shape {
        grid: [blocks as u32, 1, 1],
        threads: THREADS as u32,
        shared: 0,
        overlap: false,
    };
    for kernel in [
        "lop3",
        "shf",
        "prmt",
        "imad",
        "iadd3",
        "hfma2",
        "ffma",
        "to_halves",
        "from_e4m3",
    ] {
        let lanes = (0..5).map(|_| {
            // SAFETY: the struct is the kernel's, and its buffers have the sizes that it takes.
            unsafe { program.launch(kernel, shape, &arguments) }.unwrap();
            let slowest = read_u64(&clocks, blocks).into_iter().max();
            (THREADS * STEPS * ROUNDS) as f64 / slowest.expect("there are blocks") as f64
        });
        let name = format!("pipes {kernel}");
        figures.add(name, median(lanes.collect()), "lanes/clk/SM", None);
    }
}
