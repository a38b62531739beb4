//! Working memory of recurrent layers in fused passes, and the segments of a pass.

use std::sync::Arc;

use crate::base::Result;
use crate::base::error::err;
use crate::base::memory::Tag;
use crate::cuda::{DeviceBuffer, Gpu, RecurrentSegments};
use crate::model::kv::{NULL_BLOCK, StateBlocks};
use crate::model::spec::{BlockSpec, Spec};
use crate::tensor::{MambaShape, RecurrentShape};

/// Maximum sizes over the recurrent layers of a model, in elements of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RecurrentSizes {
    /// Output of the first GEMM: input of the convolution, gate of the norm, and time steps in Mamba-2.
    pub(super) inputs: usize,
    /// Inputs of the gates of gated delta nets; 0 without any.
    gates: usize,
    /// Channels of the convolution.
    channels: usize,
    /// Values read from the state, which are normalized.
    pub(super) values: usize,
    /// Heads.
    heads: usize,
}

impl RecurrentSizes {
    /// The sizes of a model, if it has recurrent layers.
    pub(super) fn of(spec: &Spec) -> Option<RecurrentSizes> {
        let shapes = spec.blocks.iter().filter_map(BlockSpec::recurrent);
        let sizes = shapes.map(|shape| match shape {
            RecurrentShape::GatedDelta(shape) => RecurrentSizes {
                inputs: shape.channels() + shape.value_width(),
                gates: 2 * shape.value_heads,
                channels: shape.channels(),
                values: shape.value_width(),
                heads: shape.value_heads,
            },
            RecurrentShape::Mamba2(shape) => RecurrentSizes {
                inputs: mamba_inputs(&shape),
                gates: 0,
                channels: shape.channels(),
                values: shape.width(),
                heads: shape.heads,
            },
        });
        sizes.reduce(|a, b| RecurrentSizes {
            inputs: a.inputs.max(b.inputs),
            gates: a.gates.max(b.gates),
            channels: a.channels.max(b.channels),
            values: a.values.max(b.values),
            heads: a.heads.max(b.heads),
        })
    }
}

/// Elements from a row of gate, x, B, C and time steps to the next: kernels read them in fours.
pub(super) fn mamba_inputs(shape: &MambaShape) -> usize {
    (shape.width() + shape.channels() + shape.heads).next_multiple_of(4)
}

/// Working memory of recurrent layers.
pub(super) struct RecurrentScratch {
    /// i32 `[batch + 1]`: the first row of each segment.
    row_starts: DeviceBuffer,
    /// u32 `[batch]`: the blocks of the recurrent state that segments read and write.
    read: DeviceBuffer,
    write: DeviceBuffer,
    /// f32 `[rows, gates]`: inputs of the gates of gated delta nets.
    pub(super) gates: DeviceBuffer,
    /// f32 `[rows, channels]`: the output of the convolution.
    pub(super) convolved: DeviceBuffer,
    /// f32 `[rows, heads]`: factors of states.
    pub(super) decay: DeviceBuffer,
    /// f32 `[rows, heads]`: learning rates of the delta rule, or time steps of Mamba-2.
    pub(super) rates: DeviceBuffer,
    /// f32 `[rows, values]`: values read from the states.
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
            gates: scratch(rows * sizes.gates)?,
            convolved: scratch(rows * sizes.channels)?,
            decay: scratch(rows * sizes.heads)?,
            rates: scratch(rows * sizes.heads)?,
            answers: scratch(rows * sizes.values)?,
        })
    }

    /// The first `count` segments.
    pub(super) fn segments(&self, count: usize) -> RecurrentSegments<'_> {
        RecurrentSegments {
            row_starts: (&self.row_starts).into(),
            read: (&self.read).into(),
            write: (&self.write).into(),
            count,
        }
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
