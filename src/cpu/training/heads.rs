//! Norm and rotation of each query and key head, forward and backward.

use super::norm::{ROWS, add_rows, backward};
use super::rows::{by_parts, by_parts_of_two};
use crate::base::error::{Result, bail};
use crate::cpu::Cpu;

/// Shape of rows `[T, (heads + 2 kv_heads) * dim]` of queries, keys and values, with their norms and rotation.
#[derive(Clone, Copy, Debug)]
pub struct Heads<'a> {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub dim: usize,
    /// The weights of the norms of queries and keys, `[dim]`.
    pub norms: [Option<&'a [f32]>; 2],
    /// Added to the mean square.
    pub eps: f32,
    /// Cosines of the rotation, `[T, rotary_dim / 2]`. Within the first rotary_dim elements of a head, element i pairs with element i +
    /// rotary_dim / 2; the others pass unchanged.
    pub cos: &'a [f32],
    /// Sines of the rotation.
    pub sin: &'a [f32],
}

impl Heads<'_> {
    /// Elements of a row.
    pub fn width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.dim
    }

    fn check(&self, x: usize, y: usize) -> Result<usize> {
        let rows = x / self.width().max(1);
        let half = self.cos.len() / rows.max(1);
        let whole = self.width() > 0 && x == y && x == rows * self.width();
        if !whole
            || self.cos.len() != rows * half
            || self.sin.len() != self.cos.len()
            || 2 * half > self.dim
        {
            bail!(
                Internal,
                "{x} and {y} elements of {} and {} heads of {}, with {} cosines",
                self.heads,
                self.kv_heads,
                self.dim,
                self.cos.len()
            );
        }
        Ok(half)
    }

    /// The norm's weight of a head, if any, and whether the head rotates.
    fn of(&self, head: usize) -> (Option<usize>, bool) {
        match head {
            h if h < self.heads => (Some(0), true),
            h if h < self.heads + self.kv_heads => (Some(1), true),
            _ => (None, false),
        }
    }
}

/// Rotates pairs by the angles; `back` rotates them back.
fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32], back: bool) {
    let half = cos.len();
    let (low, high) = head[..2 * half].split_at_mut(half);
    for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        let s = if back { -s } else { *s };
        (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
    }
}

impl Cpu {
    /// Normalizes and rotates the heads of `x` into `out`; values are copied.
    pub fn heads(&self, heads: &Heads<'_>, x: &[f32], out: &mut [f32]) -> Result<()> {
        let (half, width, dim) = (heads.check(x.len(), out.len())?, heads.width(), heads.dim);
        out.copy_from_slice(x);
        by_parts(self.pool(), out, width, |row, out| {
            let (cos, sin) = (
                &heads.cos[row * half..][..half],
                &heads.sin[row * half..][..half],
            );
            for (i, head) in out.chunks_exact_mut(dim).enumerate() {
                let (norm, rotates) = heads.of(i);
                if let Some(weight) = norm.and_then(|i| heads.norms[i]) {
                    let squares: f32 = head.iter().map(|x| x * x).sum();
                    let r = 1.0 / (squares / dim as f32 + heads.eps).sqrt();
                    head.iter_mut().zip(weight).for_each(|(x, w)| *x *= r * w);
                }
                if rotates {
                    rotate(head, cos, sin, false);
                }
            }
        });
        Ok(())
    }

    /// The backward pass of [`Cpu::heads`]: `dx`, the gradient of its results, becomes the gradient of `x`. Also adds to the gradients of
    /// the norms' weights.
    pub fn heads_backward(
        &self,
        heads: &Heads<'_>,
        x: &[f32],
        dx: &mut [f32],
        dnorms: [Option<&mut [f32]>; 2],
    ) -> Result<()> {
        let (half, width, dim) = (heads.check(x.len(), dx.len())?, heads.width(), heads.dim);
        let rows = x.len() / width;
        let mut partial = vec![0.0; rows.div_ceil(ROWS) * 2 * dim];
        let parts = (ROWS * width, 2 * dim);
        by_parts_of_two(
            self.pool(),
            (dx, &mut partial),
            parts,
            |part, dx, dnorms| {
                for (i, dx) in dx.chunks_exact_mut(width).enumerate() {
                    let row = part * ROWS + i;
                    let x = &x[row * width..][..width];
                    let (cos, sin) = (
                        &heads.cos[row * half..][..half],
                        &heads.sin[row * half..][..half],
                    );
                    for (i, (dx, x)) in dx
                        .chunks_exact_mut(dim)
                        .zip(x.chunks_exact(dim))
                        .enumerate()
                    {
                        let (norm, rotates) = heads.of(i);
                        if rotates {
                            rotate(dx, cos, sin, true);
                        }
                        let weight = norm.and_then(|i| Some((i, heads.norms[i]?)));
                        if let Some((i, weight)) = weight {
                            backward(x, weight, heads.eps, dx, &mut dnorms[i * dim..][..dim]);
                        }
                    }
                }
            },
        );
        let mut sums = vec![0.0; 2 * dim];
        add_rows(&partial, &mut sums);
        for (to, sum) in dnorms.into_iter().zip(sums.chunks_exact(dim)) {
            if let Some(to) = to {
                to.iter_mut().zip(sum).for_each(|(to, x)| *to += x);
            }
        }
        Ok(())
    }
}
