//! Working memory of gated delta nets in fused passes, and the segments of a pass.

use std::sync::Arc;

use crate::base::Result;
use crate::base::error::err;
use crate::base::memory::Tag;
use crate::cuda::{DeviceBuffer, Gpu};
use crate::model::kv::{NULL_BLOCK, StateBlocks};
use crate::model::spec::Spec;

/// Maximum sizes over the gated delta nets of a model, in elements of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RecurrentSizes {
    /// Queries, keys and values.
    pub(super) channels: usize,
    /// Values.
    pub(super) values: usize,
    /// Value heads.
    pub(super) heads: usize,
}

impl RecurrentSizes {
    /// The sizes of a model, if it has gated delta nets.
    pub(super) fn of(spec: &Spec) -> Option<RecurrentSizes> {
        let shapes = || {
            spec.blocks
                .iter()
                .filter_map(|b| Some(b.gated_delta()?.shape))
        };
        Some(RecurrentSizes {
            channels: shapes().map(|shape| shape.channels()).max()?,
            values: shapes().map(|shape| shape.value_width()).max()?,
            heads: shapes().map(|shape| shape.value_heads).max()?,
        })
    }

    /// Elements of a row of [`Kernel::DeltaInputs`](super::plan::Kernel::DeltaInputs).
    pub(super) fn inputs(&self) -> usize {
        self.channels + self.values
    }
}

/// Working memory of gated delta nets.
pub(super) struct RecurrentScratch {
    /// i32 `[batch + 1]`: the first row of each segment.
    pub(super) row_starts: DeviceBuffer,
    /// u32 `[batch]`: the blocks of the recurrent state that segments read and write.
    pub(super) read: DeviceBuffer,
    pub(super) write: DeviceBuffer,
    /// f32 `[rows, 2 heads]`: what gates come of.
    pub(super) gates: DeviceBuffer,
    /// f32: what the convolution makes of `[rows, channels]`, and the gates `[rows, heads]`.
    pub(super) qkv: DeviceBuffer,
    pub(super) decay: DeviceBuffer,
    pub(super) beta: DeviceBuffer,
    /// f32 `[rows, values]`: the answers of the rule.
    pub(super) answers: DeviceBuffer,
}

impl RecurrentScratch {
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        sizes: RecurrentSizes,
        rows: usize,
        batch: usize,
    ) -> Result<RecurrentScratch> {
        let scratch = |elements: usize| {
            DeviceBuffer::uninit(gpu, Tag::DeviceScratch, elements * size_of::<f32>())
        };
        Ok(RecurrentScratch {
            row_starts: scratch(batch + 1)?,
            read: scratch(batch)?,
            write: scratch(batch)?,
            gates: scratch(rows * 2 * sizes.heads)?,
            qkv: scratch(rows * sizes.channels)?,
            decay: scratch(rows * sizes.heads)?,
            beta: scratch(rows * sizes.heads)?,
            answers: scratch(rows * sizes.values)?,
        })
    }

    /// Writes the rows of the segments of a pass, by their numbers.
    pub(super) fn write_rows(&mut self, lengths: impl Iterator<Item = usize>) -> Result<()> {
        let mut starts = vec![0i32];
        for length in lengths {
            starts.push(starts[starts.len() - 1] + length as i32);
        }
        self.row_starts.write(0, &starts)
    }

    /// Writes the blocks of the states of `count` segments. The last ones may be without a sequence, and have null blocks.
    pub(super) fn write_states(
        &mut self,
        count: usize,
        states: impl Iterator<Item = Option<StateBlocks>>,
    ) -> Result<()> {
        let (mut read, mut write) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for state in states {
            let blocks =
                state.ok_or_else(|| err!(Internal, "a sequence has no recurrent state"))?;
            read.push(blocks.read);
            write.push(blocks.write);
        }
        read.resize(count, NULL_BLOCK);
        write.resize(count, NULL_BLOCK);
        self.read.write(0, &read)?;
        self.write.write(0, &write)
    }
}
