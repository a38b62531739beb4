//! Working memory of recurrent layers in fused passes, and the segments of a pass.

use std::sync::Arc;

use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;
use crate::cuda::{DeviceBuffer, Gpu, RecurrentSegments, StagedBuffer};
use crate::model::kv::{NULL_BLOCK, StateBlocks};
use crate::model::spec::{BlockSpec, Spec};
use crate::tensor::{DeltaShape, MambaShape, RecurrentShape};

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
                inputs: delta_inputs(&shape),
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

/// Elements from a row of queries, keys and values, the gate of the norm, and the inputs of the gates of the rule, to the next: kernels read
/// them in fours.
pub(super) fn delta_inputs(shape: &DeltaShape) -> usize {
    let width = shape.channels() + shape.value_width() + 2 * shape.value_heads;
    width.next_multiple_of(4)
}

/// Elements from a row of gate, x, B, C and time steps to the next: kernels read them in fours.
pub(super) fn mamba_inputs(shape: &MambaShape) -> usize {
    (shape.width() + shape.channels() + shape.heads).next_multiple_of(4)
}

/// Working memory of recurrent layers.
pub(super) struct RecurrentScratch {
    /// u32 `[3, batch + 1]`: the first row of each segment, the blocks of the recurrent state that they read, and those that they write.
    segments: StagedBuffer,
    /// The number of segments that there is room for.
    batch: usize,
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
    /// Bytes of segments, gates, outputs of convolutions, decays, rates and answers.
    const fn sizes(sizes: RecurrentSizes, rows: usize, batch: usize) -> [usize; 6] {
        let of_rows = rows * size_of::<f32>();
        [
            3 * (batch + 1) * size_of::<u32>(),
            of_rows * sizes.gates,
            of_rows * sizes.channels,
            of_rows * sizes.heads,
            of_rows * sizes.heads,
            of_rows * sizes.values,
        ]
    }

    /// Bytes for `rows` rows in up to `batch` segments.
    pub(super) fn bytes_of(sizes: RecurrentSizes, rows: usize, batch: usize) -> usize {
        Self::sizes(sizes, rows, batch).iter().sum()
    }

    pub(super) fn new(
        gpu: &Arc<Gpu>,
        sizes: RecurrentSizes,
        rows: usize,
        batch: usize,
    ) -> Result<RecurrentScratch> {
        let scratch = |bytes| DeviceBuffer::uninit(gpu, Tag::DeviceScratch, bytes);
        let [segments, gates, convolved, decay, rates, answers] = Self::sizes(sizes, rows, batch);
        Ok(RecurrentScratch {
            segments: StagedBuffer::uninit(gpu, Tag::DeviceScratch, segments)?,
            batch,
            gates: scratch(gates)?,
            convolved: scratch(convolved)?,
            decay: scratch(decay)?,
            rates: scratch(rates)?,
            answers: scratch(answers)?,
        })
    }

    /// The first `count` segments.
    pub(super) fn segments(&self, count: usize) -> Result<RecurrentSegments<'_>> {
        let part = |index: usize| {
            self.segments
                .from(index * (self.batch + 1) * size_of::<u32>())
        };
        Ok(RecurrentSegments {
            row_starts: part(0)?,
            read: part(1)?,
            write: part(2)?,
            count,
        })
    }

    /// Enqueues a write of the segments of a pass, each with its rows and the blocks of its state. There must be room for them.
    pub(super) fn write(
        &mut self,
        segments: impl Iterator<Item = (usize, StateBlocks)>,
    ) -> Result<()> {
        let mut places = vec![NULL_BLOCK; 3 * (self.batch + 1)];
        let (starts, blocks) = places.split_at_mut(self.batch + 1);
        let (read, write) = blocks.split_at_mut(self.batch + 1);
        for (index, (rows, blocks)) in segments.enumerate() {
            if index == self.batch {
                bail!(
                    Internal,
                    "more than {} segments of recurrent layers",
                    self.batch
                );
            }
            starts[index + 1] = starts[index] + rows as u32;
            (read[index], write[index]) = (blocks.read, blocks.write);
        }
        self.segments.write(&places)
    }
}
