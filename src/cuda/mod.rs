//! Floor 3: NVIDIA GPUs through the driver, which is loaded at run time: without one, opening a device says why and nothing
//! else changes. Device memory, launches, graphs, kernels compiled for the device at hand, and one safe launcher per kernel
//! family. Knows shapes and pointers, not models.
//!
//! Every launcher enqueues on the device's one stream and returns; [`Gpu::synchronize`] or a copy to the host waits.

mod attention;
mod bandwidth;
mod blas;
mod checks;
mod compile;
mod copy;
mod elementwise;
mod gpu;
mod graph;
mod launch;
mod linear;
mod managed;
mod memory;
mod nvrtc;
mod operand;
mod program;
mod quantize;
mod report;
mod rows;
mod sample;
mod scaled_mm;
mod staging;
mod table;
mod tensor;

pub use attention::{Division, Heads, PAGE, PageTable, Rows, decode, prefill, store};
pub use bandwidth::{copy_bandwidth, read_bandwidth};
#[doc(hidden)]
pub use compile::compile_source;
pub use compile::{compile, compiler, have_kernels};
pub use copy::Event;
pub use elementwise::{rms_norm, swiglu};
pub use gpu::{Gpu, HostStream, KeepContext, check_managed, count, open_gpus, unavailable};
pub use graph::Graph;
pub use linear::{
    Biased, DeferredNorm, Input, Layout, LinearScratch, MLP_SCALE, Matrix, NormScratch, Output,
    Plan, ReadBytes, ReadNvfp4, SMALL, Storage, TILED, Tile, TileKernel, divisible, has_swiglu,
    linear, linear_add, small, tiled,
};
pub use managed::ManagedBuffer;
pub use memory::{DeviceBuffer, DeviceSlice, Pinned};
pub use nvrtc::{TARGETS, Unit, target};
pub use operand::{Operand, check_scales, check_scales_of, wait_for_scales};
#[doc(hidden)]
pub use program::{Program, Shape};
pub use quantize::{dequantize, is_finite, quantize, swizzle, unswizzle};
pub use report::{Details, DeviceReport, Presence, Report, report};
pub use rows::{FloatRows, scaled_rows};
pub use sample::{Best, DrawRule, DrawScratch, Drawn, argmax, draw};
pub use scaled_mm::{Tile as ScaledTile, Way, dense_mm, scaled_mm, scaled_mm_by};
pub use table::{HostTable, Table, embed, table_row};
pub use tensor::{Contiguous, contiguous, download, find, managed_tensor, tensor, upload};

/// Bytes of the one argument that a kernel's launcher passes, which its parameter must have too.
pub fn argument_bytes(kernel: &str) -> Option<usize> {
    let all = [
        attention::ARGUMENTS,
        bandwidth::ARGUMENTS,
        elementwise::ARGUMENTS,
        operand::ARGUMENTS,
        quantize::ARGUMENTS,
        rows::ARGUMENTS,
        sample::ARGUMENTS,
        scaled_mm::ARGUMENTS,
        tensor::ARGUMENTS,
    ];
    let named = all
        .iter()
        .chain(linear::ARGUMENTS)
        .copied()
        .flatten()
        .filter(|(start, _)| kernel.starts_with(start));
    named
        .max_by_key(|(start, _)| start.len())
        .map(|&(_, bytes)| bytes)
}
