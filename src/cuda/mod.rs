//! Floor 3: NVIDIA GPUs through the driver, which is loaded at run time: without one, opening a device says why and nothing else changes.
//! `driver` has device memory, launches, graphs and compiled kernels; on it stands one safe launcher per kernel family. Knows shapes and
//! pointers, not models.
//!
//! Every launcher enqueues on the device's one stream and returns; [`Gpu::synchronize`] or a copy to the host waits.

mod adapter;
mod attention;
mod bandwidth;
mod blas;
pub mod calibrated;
mod checks;
mod convert;
mod delta;
mod drafter;
mod driver;
mod elementwise;
mod expert_sums;
mod experts;
mod heads;
mod kernel;
mod linear;
mod mamba;
mod operand;
mod per_layer;
mod program;
mod quantize;
mod recurrent;
mod registry;
mod report;
mod router;
mod routing;
mod row_norms;
mod rows;
mod sample;
mod scaled_mm;
mod table;
mod tensor;
pub mod training;
mod unfused;
mod units;

pub use adapter::{
    ADAPTED_NORM, AdaptedGateUp, AdaptedGroup, AdaptedOutputs, AdapterFactors, AdapterScratch,
    AdapterTable, AdapterTiles, adapted_glu, expand, expand_norm, shrink,
};
pub use attention::{
    DecodePlan, DecodedRows, PromptRows, SplitKv, SplitKvWorkspace, decode, fixed_attention_units,
    prefill, store, store_rows,
};
pub use bandwidth::{copy_bandwidth, read_bandwidth};
pub use delta::{
    DeltaConstants, DeltaInputs, DeltaProjected, delta_conv, delta_norm, delta_rule, delta_step,
    has_delta_single, has_delta_step,
};
pub use drafter::{HiddenCopies, drafter_hidden, drafter_inputs};
pub use driver::{
    Arena, Arenas, DeviceBuffer, DeviceSlice, Event, Gpu, Graph, HostStream, KeepContext, Lane,
    ManagedBuffer, Pinned, StagedBuffer, TARGETS, check_managed, compiler, count, open_gpus,
    target, unavailable,
};
pub use elementwise::{
    NextNorm, NextRows, NormedAddend, StreamRows, gate_heads, glu, norm_projections, post_norm,
    relu_squared, rms_norm, soft_cap, stream_rows,
};
pub use expert_sums::{BesideExperts, SharedExpert, sum_experts, sum_experts_beside};
pub use experts::{
    ExpertMatrices, ExpertScratch, ExpertTable, ExpertUnit, ExpertsPlan, experts_down,
    experts_gate_up,
};
pub use heads::{
    CachedPages, DecodeShape, F8_HEADS, Heads, KvShape, PAGE, RowHeads, attention_units,
    has_kernels, is_limited,
};
pub use linear::{
    Activation, AdaptedRows, AdapterDivision, Biased, FusedNorm, GatedUnit, GemmPlan, Glu,
    Hardware, Input, InputForm, Layout, LinearScratch, Matrix, MatrixShape, NextProjections,
    NormScratch, NormalizedRows, Output, ReadBytes, ReadNvfp4, ResidualRow, SKINNY_ROWS,
    ScratchDevice, SharingTurn, SkinnyPlan, TILED, Tile, TileKernel, WideClusters, linear,
    linear_add_norm, tiled,
};
pub use mamba::{MambaConstants, MambaInputs, mamba_conv, mamba_norm, mamba_scan};
pub use operand::{Operand, check_scales, check_scales_of, wait_for_scales};
pub use per_layer::{BlockInputs, ProjectedInputs, per_layer_gate, per_layer_inputs};
#[doc(hidden)]
pub use program::{Program, Shape};
pub use quantize::{dequantize, is_finite, quantize, swizzle, unswizzle};
pub use recurrent::{
    OverflowNotes, RecurrentOutput, RecurrentSegments, RecurrentStates, StridedRows,
};
#[doc(hidden)]
pub use registry::compile_source;
pub use registry::{argument_bytes, compile, have_kernels};
pub use report::{Details, DeviceReport, Presence, Report, report};
pub use router::{RoutePlan, RouterVectors, route, router_logits};
pub use routing::Routing;
pub use row_norms::row_norms;
pub use rows::{FloatRows, scaled_rows};
pub use sample::{
    Best, DrawRule, DrawScratch, Drawn, FoundLikelihood, MaskRows, argmax, draw, likelihoods,
    mask_logits,
};
pub use scaled_mm::{Tile as ScaledTile, Way, dense_mm, scaled_mm, scaled_mm_by};
pub use table::{HostTable, Table, embed, table_row};
pub use tensor::{Contiguous, contiguous, download, find, managed_tensor, tensor, upload};
pub use unfused::{
    add, attention_reference, cap_f32, fill, glu_f32, relu_squared_f32, rms_norm_f32, rotate,
    scale, store_kv,
};
pub use units::Unit;
