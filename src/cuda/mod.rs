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
mod experts;
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
mod row_norms;
mod rows;
mod sample;
mod scaled_mm;
mod staging;
mod table;
mod tensor;
mod unfused;

pub use attention::{
    Division, Heads, PAGE, PageTable, Rows, attention_units, decode, prefill, store,
};
pub use bandwidth::{copy_bandwidth, read_bandwidth};
#[doc(hidden)]
pub use compile::compile_source;
pub use compile::{compile, compiler, have_kernels};
pub use copy::Event;
pub use elementwise::{NextNorm, glu, post_norm, rms_norm, soft_cap};
pub use experts::{
    ExpertScratch, ExpertTable, Routing, Shared, experts_down, experts_gate_up, route, sum_experts,
};
pub use gpu::{Gpu, HostStream, KeepContext, check_managed, count, open_gpus, unavailable};
pub use graph::Graph;
pub use linear::{
    Activation, Biased, DeferredNorm, Glu, Hardware, Input, Layout, LinearScratch, Matrix,
    MatrixShape, NormScratch, Output, Plan, ReadBytes, ReadNvfp4, ResidualRow, SMALL, TILED, Tile,
    TileKernel, has_glu, linear, linear_add, small, tiled,
};
pub use managed::ManagedBuffer;
pub use memory::{DeviceBuffer, DeviceSlice, Pinned};
pub use nvrtc::{TARGETS, Unit, target};
pub use operand::{Operand, check_scales, check_scales_of, wait_for_scales};
#[doc(hidden)]
pub use program::{Program, Shape};
pub use quantize::{dequantize, is_finite, quantize, swizzle, unswizzle};
pub use report::{Details, DeviceReport, Presence, Report, report};
pub use row_norms::row_norms;
pub use rows::{FloatRows, scaled_rows};
pub use sample::{Best, DrawRule, DrawScratch, Drawn, argmax, draw};
pub use scaled_mm::{Tile as ScaledTile, Way, dense_mm, scaled_mm, scaled_mm_by};
pub use table::{HostTable, Table, embed, table_row};
pub use tensor::{Contiguous, contiguous, download, find, managed_tensor, tensor, upload};
pub use unfused::{
    ReferenceAttention, add, attention_reference, cap_f32, fill, glu_f32, rms_norm_f32, rotate,
    scale, store_kv,
};

/// Bytes of the one argument that a kernel's launcher passes, which its parameter must have too.
pub fn argument_bytes(kernel: &str) -> Option<usize> {
    let all = [
        attention::ARGUMENTS,
        bandwidth::ARGUMENTS,
        elementwise::ARGUMENTS,
        experts::ARGUMENTS,
        operand::ARGUMENTS,
        quantize::ARGUMENTS,
        row_norms::ARGUMENTS,
        rows::ARGUMENTS,
        sample::ARGUMENTS,
        scaled_mm::ARGUMENTS,
        tensor::ARGUMENTS,
        unfused::ARGUMENTS,
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
