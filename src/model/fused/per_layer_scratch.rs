//! Working memory of per-layer embeddings.

use std::sync::Arc;

use super::sizes::PerLayerSizes;
use crate::base::Result;
use crate::base::memory::Tag;
use crate::cuda::{DeviceBuffer, Gpu};

/// Working memory of the blocks' own inputs.
pub(super) struct PerLayerScratch {
    /// f32 `[rows, blocks, width]`: the inputs of all blocks, from the first kernels of a pass on.
    pub(super) inputs: DeviceBuffer,
    /// f32 `[rows]`: the factors of the norm before the projection of embeddings, and later before a gate.
    pub(super) factors: DeviceBuffer,
    /// f32 `[rows]`: the numbers by which the gated input of a block is divided.
    pub(super) divisors: DeviceBuffer,
}

impl PerLayerScratch {
    /// Bytes of inputs, factors and divisors of `rows` rows.
    const fn sizes(sizes: PerLayerSizes, rows: usize) -> [usize; 3] {
        [rows * sizes.all * 4, rows * 4, rows * 4]
    }

    /// Bytes for `rows` rows.
    pub(super) fn bytes_of(sizes: PerLayerSizes, rows: usize) -> usize {
        Self::sizes(sizes, rows).iter().sum()
    }

    /// Memory for `rows` rows.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        sizes: PerLayerSizes,
        rows: usize,
    ) -> Result<PerLayerScratch> {
        let scratch = |bytes| DeviceBuffer::uninit(gpu, Tag::DeviceScratch, bytes);
        let [inputs, factors, divisors] = Self::sizes(sizes, rows);
        Ok(PerLayerScratch {
            inputs: scratch(inputs)?,
            factors: scratch(factors)?,
            divisors: scratch(divisors)?,
        })
    }
}
