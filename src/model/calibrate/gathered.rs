//! Second moments of the inputs of projections, gathered by a calibration.

use std::sync::Arc;

use crate::base::Result;
use crate::cpu::Cpu;
use crate::ops::calibrated::FullMoments;
use crate::ops::training::matmul::gram;
use crate::ops::{Array, Device, Mixed, Slice, activation};

/// Damping of the moments' diagonal, relative to its mean: `DAMPING + FEW * inputs / rows`. Few rows of text need more damping.
const DAMPING: f32 = 0.1;
const FEW: f32 = 0.05;

/// Sums of products of inputs `[cols, cols]` on a device: one for the texts of the search, one for the texts kept for evaluation. They are
/// symmetric; only the diagonal and the elements above it are valid.
pub(super) struct Gathered {
    pub(super) cols: usize,
    seen: Array,
    kept: Array,
    /// Rows of the texts of the search, and of the evaluation.
    rows: usize,
    kept_rows: usize,
}

impl Gathered {
    pub(super) fn new(device: &Device, cols: usize) -> Result<Gathered> {
        Ok(Gathered {
            cols,
            seen: Array::zeroed(device, cols * cols)?,
            kept: Array::zeroed(device, cols * cols)?,
            rows: 0,
            kept_rows: 0,
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
            self.kept_rows += x.len() / self.cols;
            return gram(device, x, self.cols, self.kept.all_mut());
        }
        self.rows += x.len() / self.cols;
        gram(device, x, self.cols, self.seen.all_mut())
    }

    /// Adds the sums of `other`.
    pub(super) fn add_all(&mut self, device: &Device, other: &Gathered) -> Result<()> {
        self.rows += other.rows;
        self.kept_rows += other.kept_rows;
        activation::add(device, self.seen.all_mut(), other.seen.all())?;
        activation::add(device, self.kept.all_mut(), other.kept.all())
    }

    /// If these sums have fewer rows than inputs, a search would overfit single rows. Then adds the sums of `all`, which include these,
    /// scaled to the number of missing rows. Returns whether the sums for the search had too few rows.
    pub(super) fn fill_up(&mut self, device: &Device, all: &Gathered) -> Result<bool> {
        let is_starved = self.rows < self.cols;
        let parts = [
            (&mut self.seen, &mut self.rows, (&all.seen, all.rows)),
            (
                &mut self.kept,
                &mut self.kept_rows,
                (&all.kept, all.kept_rows),
            ),
        ];
        for (sums, rows, (all, of_all)) in parts {
            let missing = self.cols.saturating_sub(*rows);
            if missing == 0 || of_all == 0 {
                continue;
            }
            let mut share = Array::scratch(device, all.len())?;
            share.all_mut().copy_from(all.all())?;
            activation::scale(device, share.all_mut(), missing as f32 / of_all as f32)?;
            activation::add(device, sums.all_mut(), share.all())?;
            *rows += missing;
        }
        Ok(is_starved)
    }

    /// The moments in the form that a search takes.
    pub(super) fn moments(self, device: &Device, host: &Arc<Cpu>) -> Result<FullMoments> {
        let share = DAMPING + FEW * self.cols as f32 / self.rows.max(1) as f32;
        FullMoments::new(device, host, [self.seen, self.kept], self.cols, share)
    }
}
