//! Second moments of the inputs of GEMMs, for calibration.

use super::rows::by_parts;
use crate::base::Result;
use crate::base::error::bail;
use crate::cpu::Cpu;
use crate::format::input_moments::{MOMENTS, add_products};
use crate::format::nvfp4::BLOCK;

impl Cpu {
    /// Adds the outer products of the inputs `x` `[rows, cols]` to `sums`, [`MOMENTS`] for each 16 columns.
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
