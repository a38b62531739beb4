//! The backward pass of RMSNorm.

use super::rows::by_parts;
use crate::base::error::{Result, bail};
use crate::cpu::Cpu;

/// Rows whose contributions to the weight's gradient form one partial sum.
pub(super) const ROWS: usize = 32;

/// With `r = 1 / sqrt(mean(x^2) + eps)` and `g = dy * weight`, the gradient of `x` in `y = x r weight` is `r (g - x r^2 mean(g x))`, which
/// follows from `dr/dx = -x r^3 / n`. Adds `dy x r`, this row's share of the weight's gradient, to `dweight`. `dx` holds `dy` on entry.
pub(super) fn backward(x: &[f32], weight: &[f32], eps: f32, dx: &mut [f32], dweight: &mut [f32]) {
    let n = x.len() as f32;
    let squares: f32 = x.iter().map(|x| x * x).sum();
    let r = 1.0 / (squares / n + eps).sqrt();
    let products = x.iter().zip(weight).zip(dx.iter());
    let mean: f32 = products.map(|((x, w), dy)| dy * w * x).sum::<f32>() / n;
    let slope = r * r * r * mean;
    for (((x, w), dx), dw) in x.iter().zip(weight).zip(dx).zip(dweight) {
        *dw += *dx * x * r;
        *dx = r * *dx * w - slope * x;
    }
}

/// Adds rows of `width` of `partial` to `sum`, in order.
pub(super) fn add_rows(partial: &[f32], sum: &mut [f32]) {
    for row in partial.chunks_exact(sum.len()) {
        sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
    }
}

impl Cpu {
    /// The backward pass of RMSNorm on rows `x`: `dx`, the gradient of its results, becomes the gradient of `x`, plus `residual` if given.
    /// Accumulates in `dweight`. Rows are as long as `weight`.
    pub fn rms_norm_backward(
        &self,
        x: &[f32],
        weight: &[f32],
        eps: f32,
        dx: &mut [f32],
        residual: Option<&[f32]>,
        dweight: &mut [f32],
    ) -> Result<()> {
        let n = weight.len();
        let rows = x.len() / n.max(1);
        let fits = |len: usize| len == rows * n;
        if n == 0
            || !fits(x.len())
            || !fits(dx.len())
            || dweight.len() != n
            || !residual.is_none_or(|r| fits(r.len()))
        {
            bail!(
                Internal,
                "the backward pass of a norm of {} elements in rows of {n}, with {} gradients",
                x.len(),
                dx.len()
            );
        }
        let mut partial = vec![0.0; rows.div_ceil(ROWS) * n];
        super::rows::by_parts_of_two(
            self.pool(),
            (dx, &mut partial),
            (ROWS * n, n),
            |part, dx, dw| {
                for (i, dx) in dx.chunks_exact_mut(n).enumerate() {
                    let row = part * ROWS + i;
                    backward(&x[row * n..][..n], weight, eps, dx, dw);
                    if let Some(residual) = residual {
                        let residual = &residual[row * n..][..n];
                        dx.iter_mut().zip(residual).for_each(|(dx, r)| *dx += r);
                    }
                }
            },
        );
        add_rows(&partial, dweight);
        Ok(())
    }

    /// Adds the sum of the rows of `x` to `sum`, which has the length of a row: the gradient of a bias.
    pub fn column_sums(&self, x: &[f32], sum: &mut [f32]) -> Result<()> {
        let n = sum.len();
        if n == 0 || !x.len().is_multiple_of(n) {
            bail!(Internal, "{} elements are not whole rows of {n}", x.len());
        }
        let rows = x.len() / n;
        let mut partial = vec![0.0; rows.div_ceil(ROWS) * n];
        by_parts(self.pool(), &mut partial, n, |part, sum| {
            add_rows(&x[part * ROWS * n..rows.min((part + 1) * ROWS) * n], sum);
        });
        add_rows(&partial, sum);
        Ok(())
    }
}
