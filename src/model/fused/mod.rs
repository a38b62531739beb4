//! Inference on a GPU by fused kernels. `plan` chooses the kernels for a model `lowered` to shapes and operands; `pass` enqueues them for a
//! decode `step`, a `verification`, a guess of the `drafter` or a `ragged` pass, in the working `memory`. An optimization of the reference block, against which it is tested.

mod adapted;
mod delta;
mod drafter;
mod drafter_scratch;
mod embedding;
mod executor;
mod graphs;
mod lowered;
mod mamba;
mod memory;
mod memory_sizes;
mod operands;
mod pass;
mod per_layer;
mod per_layer_scratch;
mod plan;
mod ragged;
mod recurrent_layer;
mod recurrent_scratch;
mod row_adapters;
mod shapes;
mod sizes;
mod state;
mod step;
mod supported;
mod verification;

pub(super) use drafter::Guess;
pub(super) use embedding::{HostTables, table_bytes, tables};
pub(super) use executor::{BesideSteps, Executor, LaneShare, states_of_part};
pub(super) use graphs::{MOST_BYTES as GRAPH_BYTES, MOST_VERIFIED, bucket};
pub(super) use lowered::{Lowered, Source, units, unsupported_f8};
pub(super) use memory_sizes::{Room, working_bytes};
pub(super) use ragged::{FollowedRows, PromptChunk, ROWS};
pub(super) use sizes::Sizes;
pub(super) use step::{BATCH, GREEDY};
pub(super) use supported::{check_supported, unsupported};
pub(super) use verification::most_verified;
