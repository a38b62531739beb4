//! Weight matrices on the device, and GEMMs with them, which [`GemmPlan`] chooses. NVFP4 weights: the skinny GEMM serves up to
//! [`SKINNY_ROWS`] rows (on Hopper up to 8 if row-major), the tiled kernels up to [`TILED`], and cuBLASLt more, on a bounded f16 copy of one
//! weight at a time; without cuBLASLt the tiled kernels serve all. Other weights have plain kernels.

mod adapted;
mod adapted_rows;
mod add;
mod choose;
mod dense;
mod fused_norm;
mod hardware;
mod input;
mod int8;
mod limits;
mod many;
mod matrix;
mod normalized;
mod output;
mod product;
mod residual;
mod skinny;
mod skinny_adapted;
mod tf32;
mod tile;
mod tiled;
mod tiled_adapted;
mod tiles;

pub use adapted_rows::{AdaptedRows, AdapterDivision, NextProjections, SharingTurn};
pub(super) use adapted_rows::{PARTS, RANK_STEP, shared_bytes};
pub use add::linear_add_norm;
pub use choose::GemmPlan;
pub use fused_norm::{FusedNorm, NormScratch};
pub use hardware::{Hardware, WideClusters};
pub use input::{Input, InputForm};
pub(super) use limits::HALF_SM_ROWS;
pub use limits::{SKINNY_ROWS, TILED};
pub(super) use many::WORKSPACE;
pub use many::{LinearScratch, ScratchDevice};
pub use matrix::{Biased, Matrix, MatrixShape, ReadBytes, ReadNvfp4};
pub(super) use matrix::{CHUNK_BYTES, CHUNK_K, CHUNK_ROWS, MatrixArgument, pack_rows};
pub use normalized::NormalizedRows;
pub(super) use output::Gating;
pub use output::{Activation, GatedUnit, Glu, Layout, Output};
pub use product::{linear, tiled};
pub use residual::ResidualRow;
pub use skinny::SkinnyPlan;
pub use tile::Tile;
pub use tiles::TileKernel;

/// Argument sizes of this folder's kernels, by name.
pub(super) const ARGUMENTS: &[&[(&str, usize)]] = &[
    dense::ARGUMENTS,
    int8::ARGUMENTS,
    many::ARGUMENTS,
    matrix::ARGUMENTS,
    skinny::ARGUMENTS,
    tf32::ARGUMENTS,
    tiled::ARGUMENTS,
    tiled_adapted::ARGUMENTS,
    tiles::ARGUMENTS,
];
