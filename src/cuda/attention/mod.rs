//! Attention over cached keys and values in blocks: one new token for each of several sequences, or many rows of one.

mod decode;
mod head_kernel;
mod prompt;
mod ring;
mod split_kv;

pub use decode::{DecodePlan, DecodedRows, decode, fixed_attention_units};
pub use prompt::{PromptRows, prefill, store, store_rows};
pub use split_kv::{SplitKv, SplitKvWorkspace};

/// The kernels of attention, and the bytes of their arguments.
pub(super) fn arguments() -> impl Iterator<Item = (&'static str, usize)> {
    decode::arguments().chain(prompt::arguments())
}
