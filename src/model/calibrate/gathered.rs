//! Second moments of what some projections multiply.

use crate::base::Result;
use crate::base::error::bail;
use crate::ops::training::matmul::gram;
use crate::ops::{Array, Device, Mixed, Slice};

/// Damping of the diagonal of the moments, as a share of its mean: `DAMPING + FEW * inputs / rows`, as few rows of text say little.
const DAMPING: f32 = 0.01;
const FEW: f32 = 0.05;

/// Sums of products of inputs `[cols, cols]` on a device: of the texts that the search sees, and of those that are kept from it. They are
/// symmetric, and right on the diagonal and above it.
pub(super) struct Gathered {
    cols: usize,
    seen: Array,
    kept: Array,
    /// Rows of the texts that the search sees.
    rows: usize,
}

/// Second moments `[cols, cols]` in host memory, with both halves.
pub(super) struct InputMoments {
    pub(super) cols: usize,
    /// Positive definite: damped.
    pub(super) seen: Vec<f32>,
    pub(super) kept: Vec<f32>,
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

    pub(super) fn read(self) -> Result<InputMoments> {
        let read = |sums: &Array| -> Result<Vec<f32>> {
            let mut values = vec![0f32; self.cols * self.cols];
            sums.all().read(&mut values)?;
            if values.iter().any(|v| !v.is_finite()) {
                bail!(
                    InvalidArgument,
                    "its inputs are not finite for the text that was given: the model computes infinities or NaN there"
                );
            }
            mirror(&mut values, self.cols);
            Ok(values)
        };
        let (mut seen, kept) = (read(&self.seen)?, read(&self.kept)?);
        damp(&mut seen, self.cols, self.rows);
        Ok(InputMoments {
            cols: self.cols,
            seen,
            kept,
        })
    }
}

/// Copies what is above the diagonal to its place below.
fn mirror(values: &mut [f32], cols: usize) {
    for row in 1..cols {
        for col in 0..row {
            values[row * cols + col] = values[col * cols + row];
        }
    }
}

/// Makes sums of products of `rows` rows positive definite. Inputs that were all zero count the same.
fn damp(sums: &mut [f32], cols: usize, rows: usize) {
    let diagonal = (0..cols).map(|i| f64::from(sums[i * (cols + 1)]));
    let mean = diagonal.sum::<f64>() / cols as f64;
    let share = DAMPING + FEW * cols as f32 / rows.max(1) as f32;
    let more = match mean > 0.0 {
        true => mean as f32 * share,
        false => 1.0,
    };
    (0..cols).for_each(|i| sums[i * (cols + 1)] += more);
}
