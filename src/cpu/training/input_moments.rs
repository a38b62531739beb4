//! Second moments of the inputs of products.

use super::optimizer::Rows;
use super::rows::{by_parts, by_parts_of_two};
use crate::base::Result;
use crate::base::error::bail;
use crate::cpu::Cpu;
use crate::format::input_moments::{BlockMoments, MOMENTS, add_products, quantize_rows};
use crate::format::nvfp4::BLOCK;

impl Cpu {
    /// Quantizes those rows of `weights` `[rows, cols]`, which are finite, that `wants` names: see [`quantize_rows`]. `moments` has those of
    /// the inputs of each block of a row.
    pub fn quantize_for_inputs(
        &self,
        weights: &[f32],
        global: f32,
        moments: &[BlockMoments],
        wants: &(dyn Fn(usize) -> bool + Sync),
        out: Rows<'_>,
    ) -> Result<()> {
        let blocks = moments.len();
        let cols = blocks * BLOCK;
        let fits =
            out.codes.len() == weights.len() / 2 && out.scales.len() == weights.len() / BLOCK;
        if blocks == 0 || !weights.len().is_multiple_of(cols) || !fits {
            bail!(
                Internal,
                "{} weights by {blocks} blocks of second moments to {} bytes of codes and {} scales",
                weights.len(),
                out.codes.len(),
                out.scales.len()
            );
        }
        let rows = (out.codes, out.scales);
        by_parts_of_two(
            self.pool(),
            rows,
            (cols / 2, blocks),
            |row, codes, scales| {
                if wants(row) {
                    let weights = &weights[row * cols..][..cols];
                    quantize_rows(weights, global, moments, codes, scales);
                }
            },
        );
        Ok(())
    }

    /// Adds the products of the inputs `x` `[rows, cols]` to `sums`, [`MOMENTS`] for each 16 columns.
    pub fn add_input_moments(&self, x: &[f32], cols: usize, sums: &mut [f32]) -> Result<()> {
        if sums.len() != cols * BLOCK || !cols.is_multiple_of(BLOCK) {
            bail!(
                Internal,
                "{} sums of products of inputs in rows of {cols}",
                sums.len()
            );
        }
        by_parts(self.pool(), sums, MOMENTS, |block, sums| {
            let (sums, _) = sums.as_chunks_mut::<MOMENTS>();
            add_products(x, cols, block, &mut sums[0]);
        });
        Ok(())
    }
}
