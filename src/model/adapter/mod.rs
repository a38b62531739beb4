//! LoRA adapters at run time: factors A `[rank, inputs]` and B `[outputs, rank]` beside projections of a loaded model, whose outputs gain
//! `scale * B (A x)`. Immutable and shared by the sequences that name it; the block applies it, and on a GPU
//! fused passes.

mod config;
mod factors;
mod loaded;
mod places;
mod read;

pub use loaded::Adapter;
pub(super) use loaded::ModelKey;
pub(super) use places::{AdaptedPart, Adapts};
pub(super) use read::read;
