//! Second moments of what some projections multiply.

use std::sync::Arc;

use crate::base::Result;
use crate::cpu::Cpu;
use crate::ops::calibrated::FullMoments;
use crate::ops::training::matmul::gram;
use crate::ops::{Array, Device, Mixed, Slice};

/// Damping of the diagonal of the moments, as a share of its mean: `DAMPING + FEW * inputs / rows`, as few rows of text say little.
const DAMPING: f32 = 0.1;
const FEW: f32 = 0.05;

/// Sums of products of inputs `[cols, cols]` on a device: of the texts that the search sees, and of those that are kept from it. They are
/// symmetric, and right on the diagonal and above it.
pub(super) struct Gathered {
    pub(super) cols: usize,
    seen: Array,
    kept: Array,
    /// Rows of the texts that the search sees.
    rows: usize,
}

impl Gathered {
    pub(super) fn new(device: &Device, cols: usize) -> Result<Gathered> {
        Ok(Gathered {
            cols,
            seen: Array::zeroed(device, cols * cols)?,
            kept: Array::zeroed(device, cols * cols)?,
            rows: 0,
        })
    }

    /// Adds the products of inputs `[rows, cols]`.
    pub(super) fn add(
        &mut self,
        device: &Device,
        x: Slice<'_, Mixed>,
        is_kept: bool,
    ) -> Result<()> {
        if is_kept {
            return gram(device, x, self.cols, self.kept.all_mut());
        }
        self.rows += x.len() / self.cols;
        gram(device, x, self.cols, self.seen.all_mut())
    }

    /// The sums as a search takes them.
    pub(super) fn moments(self, device: &Device, host: &Arc<Cpu>) -> Result<FullMoments> {
        let share = DAMPING + FEW * self.cols as f32 / self.rows.max(1) as f32;
        FullMoments::new(device, host, [self.seen, self.kept], self.cols, share)
    }
}
