//! Weight matrices on the device, and products with them. For NVFP4 weights one fused kernel serves up to [`SMALL`] rows, or up to
//! eight on Hopper if they are not ordered; one of tiles up to [`TILED`], and a library more than that, over a bounded f16 copy of
//! one weight at a time; without the library the one of tiles serves all. Plain kernels do the rest.

mod add;
mod choose;
mod deferred;
mod dense;
mod hardware;
mod input;
mod limits;
mod many;
mod matrix;
mod output;
mod product;
mod residual;
mod small;
mod tile;
mod tiled;

pub use add::linear_add;
pub use choose::has_glu;
pub use deferred::{DeferredNorm, NormScratch};
pub use hardware::Hardware;
pub use input::Input;
pub(super) use limits::FEW;
pub use limits::{SMALL, TILED};
pub(super) use many::WORKSPACE;
pub use many::{LinearScratch, tiled};
pub use matrix::{Biased, Matrix, MatrixShape, ReadBytes, ReadNvfp4};
pub(super) use matrix::{CHUNK_BYTES, CHUNK_K, CHUNK_ROWS, MatrixArgument};
pub use output::{Activation, Glu, Layout, Output};
pub use product::linear;
pub use residual::ResidualRow;
pub use small::{Plan, small};
pub use tile::Tile;
pub use tiled::TileKernel;

/// What the kernels of these files are passed, by the start of their names.
pub(super) const ARGUMENTS: &[&[(&str, usize)]] = &[
    dense::ARGUMENTS,
    many::ARGUMENTS,
    matrix::ARGUMENTS,
    small::ARGUMENTS,
    tiled::ARGUMENTS,
];
