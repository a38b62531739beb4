//! Causal attention over rows packed from several documents, with the log-sum-exp of each row, and its backward pass (Dao, 2023, section
//! 3.1: probabilities are recomputed, not stored).

use std::ops::Range;

use super::rows::{by_parts, by_parts_of_two};
use crate::base::error::{Result, bail};
use crate::cpu::Cpu;
use crate::tensor::AttentionShape;

/// Document bounds of each row: both arrays rise, and `starts[t] <= t < ends[t]`.
#[derive(Clone, Copy, Debug)]
pub struct DocumentRows<'a> {
    /// First row of the row's document.
    pub starts: &'a [u32],
    /// One past the last row of the row's document.
    pub ends: &'a [u32],
}

impl AttentionShape {
    /// The rows that query `i` sees.
    fn seen(&self, documents: DocumentRows<'_>, i: usize) -> Range<usize> {
        let start = documents.starts[i] as usize;
        start.max((i + 1).saturating_sub(self.window.unwrap_or(usize::MAX)))..i + 1
    }

    /// A score, and its derivative by the product of query and key.
    fn score(&self, product: f32) -> (f32, f32) {
        let score = product * self.scale;
        match self.score_cap {
            None => (score, self.scale),
            Some(cap) => {
                let t = (score / cap).tanh();
                (cap * t, self.scale * (1.0 - t * t))
            }
        }
    }

    fn check(
        &self,
        documents: DocumentRows<'_>,
        qkv: usize,
        out: usize,
        lse: usize,
    ) -> Result<usize> {
        let rows = documents.starts.len();
        if self.kv_heads == 0
            || !self.heads.is_multiple_of(self.kv_heads)
            || documents.ends.len() != rows
            || qkv != rows * self.width()
            || out != rows * self.q_width()
            || lse != rows * self.heads
        {
            bail!(
                Internal,
                "attention of {rows} rows of {} and {} heads of {}: {qkv} elements of queries, keys and values, {out} results, {lse} sums",
                self.heads,
                self.kv_heads,
                self.dim
            );
        }
        Ok(rows)
    }
}

pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    // Eight sums, which the compiler vectorizes.
    let (mut sums, whole) = ([0f32; 8], a.len() / 8 * 8);
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    let tail: f32 = a[whole..].iter().zip(&b[whole..]).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + tail
}

pub(super) fn add_scaled(to: &mut [f32], x: &[f32], factor: f32) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += factor * x);
}

impl Cpu {
    /// Forward pass, from normalized and rotated `qkv` to `out` `[T, heads * dim]`. Also stores the natural log-sum-exp of the scores in
    /// `lse` `[T, heads]`.
    pub fn packed_attention(
        &self,
        shape: &AttentionShape,
        documents: DocumentRows<'_>,
        qkv: &[f32],
        out: &mut [f32],
        lse: &mut [f32],
    ) -> Result<()> {
        shape.check(documents, qkv.len(), out.len(), lse.len())?;
        let (width, dim) = (shape.width(), shape.dim);
        let parts = (shape.q_width(), shape.heads);
        by_parts_of_two(self.pool(), (out, lse), parts, |i, out, lse| {
            let seen = shape.seen(documents, i);
            let mut scores = vec![0.0; seen.len()];
            for (head, (out, lse)) in out.chunks_exact_mut(dim).zip(lse).enumerate() {
                let kv = head / shape.group();
                let key = (shape.heads + kv) * dim;
                let value = key + shape.kv_heads * dim;
                let q = &qkv[i * width + head * dim..][..dim];
                for (score, j) in scores.iter_mut().zip(seen.clone()) {
                    *score = shape.score(dot(q, &qkv[j * width + key..][..dim])).0;
                }
                let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let mut sum = 0.0;
                out.fill(0.0);
                for (score, j) in scores.iter().zip(seen.clone()) {
                    let weight = (score - largest).exp();
                    sum += weight;
                    add_scaled(out, &qkv[j * width + value..][..dim], weight);
                }
                out.iter_mut().for_each(|x| *x /= sum);
                *lse = largest + sum.ln();
            }
        });
        Ok(())
    }

    /// The backward pass of [`Cpu::packed_attention`]: `dqkv` becomes the gradient of `qkv`, from the gradient of the results.
    pub fn packed_attention_backward(
        &self,
        shape: &AttentionShape,
        documents: DocumentRows<'_>,
        (qkv, out, lse): (&[f32], &[f32], &[f32]),
        dout: &[f32],
        dqkv: &mut [f32],
    ) -> Result<()> {
        let rows = shape.check(documents, qkv.len(), out.len(), lse.len())?;
        shape.check(documents, dqkv.len(), dout.len(), lse.len())?;
        let (width, q_width, dim) = (shape.width(), shape.q_width(), shape.dim);
        let (heads, group) = (shape.heads, shape.group());
        // One thread processes a key/value head with its queries, because the gradients are sums over rows and queries.
        let part = rows * (group + 2) * dim;
        let mut gradients = vec![0.0; shape.kv_heads * part];
        by_parts(self.pool(), &mut gradients, part, |kv, gradients| {
            let (dq, dkv) = gradients.split_at_mut(rows * group * dim);
            let (dk, dv) = dkv.split_at_mut(rows * dim);
            let key = (heads + kv) * dim;
            let value = key + shape.kv_heads * dim;
            for i in 0..rows {
                for (g, head) in (kv * group..(kv + 1) * group).enumerate() {
                    let q = &qkv[i * width + head * dim..][..dim];
                    let of_row = |x: &'_ [f32]| -> Vec<f32> {
                        x[i * q_width + head * dim..][..dim].to_vec()
                    };
                    let (d, o) = (of_row(dout), of_row(out));
                    let delta = dot(&d, &o);
                    let dq = &mut dq[(i * group + g) * dim..][..dim];
                    for j in shape.seen(documents, i) {
                        let (k, v) = (
                            &qkv[j * width + key..][..dim],
                            &qkv[j * width + value..][..dim],
                        );
                        let (score, slope) = shape.score(dot(q, k));
                        let p = (score - lse[i * heads + head]).exp();
                        let ds = p * (dot(&d, v) - delta) * slope;
                        add_scaled(&mut dv[j * dim..][..dim], &d, p);
                        add_scaled(&mut dk[j * dim..][..dim], q, ds);
                        add_scaled(dq, k, ds);
                    }
                }
            }
        });
        by_parts(self.pool(), dqkv, width, |i, row| {
            for (kv, gradients) in gradients.chunks_exact(part).enumerate() {
                let (dq, dkv) = gradients.split_at(rows * group * dim);
                let (dk, dv) = dkv.split_at(rows * dim);
                let key = (heads + kv) * dim;
                let value = key + shape.kv_heads * dim;
                let query = kv * group * dim;
                row[query..][..group * dim].copy_from_slice(&dq[i * group * dim..][..group * dim]);
                row[key..][..dim].copy_from_slice(&dk[i * dim..][..dim]);
                row[value..][..dim].copy_from_slice(&dv[i * dim..][..dim]);
            }
        });
        Ok(())
    }
}
