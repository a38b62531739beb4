//! Inference on a GPU by fused kernels: `plan` says which, `executor` enqueues them, and `memory` is what they work in. An optimisation of
//! the reference block, against which it is tested.

mod embedding;
mod executor;
mod memory;
mod plan;
mod sizes;

pub(super) use embedding::table;
pub(super) use executor::{BATCH, Executor, ROWS, Source, units};
