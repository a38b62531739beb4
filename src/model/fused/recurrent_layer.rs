//! The operands of a recurrent layer's kernels in a fused pass.

use super::pass::FusedPass;
use super::recurrent_scratch::RecurrentScratch;
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::{RecurrentSegments, RecurrentStates};

/// The operands of the kernels of a recurrent layer, with the spec and the weights of its kind.
pub(super) struct RecurrentLayer<'a, S, W> {
    pub(super) spec: &'a S,
    pub(super) weights: &'a W,
    pub(super) scratch: &'a RecurrentScratch,
    pub(super) states: RecurrentStates,
    pub(super) segments: RecurrentSegments<'a>,
}

impl<'a, S, W> RecurrentLayer<'a, S, W> {
    /// The operands of block `index`; an error without `parts`, its spec and weights, where the block is of another kind.
    pub(super) fn new(
        pass: &FusedPass<'a>,
        index: usize,
        parts: Option<(&'a S, &'a W)>,
    ) -> Result<RecurrentLayer<'a, S, W>> {
        let (state, scratch) = (pass.source.kv.state(), pass.memory.recurrent.as_ref());
        let (Some((spec, weights)), Some(state), Some(scratch)) = (parts, state, scratch) else {
            bail!(
                Internal,
                "block {index} has no recurrent layer of the planned kind"
            );
        };
        Ok(RecurrentLayer {
            spec,
            weights,
            scratch,
            states: state.on_gpu(index)?,
            segments: scratch.segments(pass.segments)?,
        })
    }
}
