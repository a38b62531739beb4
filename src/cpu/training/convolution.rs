//! The causal convolution of queries, keys and values of a gated delta net, and the norms of queries and keys after it, over rows packed
//! from several documents, forward and backward.

use super::activation::silu;
use super::attention::DocumentRows;
use super::norm::backward;
use super::rows::by_parts;
use crate::base::error::{Result, bail};
use crate::cpu::Cpu;
use crate::tensor::DeltaShape;

/// Channels per part of the backward pass.
const CHANNELS: usize = 16;

impl Cpu {
    /// Convolves the rows of `x`, `[T, channels]`, into `out` and normalizes queries and keys: [`Cpu::convolve`] without inputs before the
    /// first row of each document, then [`Cpu::delta_norms`]. `weight` is `[channels, taps]`.
    pub fn packed_convolve(
        &self,
        shape: &DeltaShape,
        documents: DocumentRows<'_>,
        weight: &[f32],
        x: &[f32],
        out: &mut [f32],
    ) -> Result<()> {
        let channels = shape.channels();
        check(shape, documents, weight, [x.len(), out.len()])?;
        out.copy_from_slice(x);
        let mut history = vec![0.0; (shape.taps - 1) * channels];
        let mut first = 0;
        while let Some(&end) = documents.ends.get(first) {
            let rows = first * channels..end as usize * channels;
            history.fill(0.0);
            self.convolve(&mut out[rows], channels, weight, None, &mut history)?;
            first = end as usize;
        }
        self.delta_norms(shape, out)
    }

    /// The backward pass of [`Cpu::packed_convolve`]. Computes in `dx` the gradient of `x` from `dy`, the gradient of the results, which
    /// becomes the gradient of the sums that SiLU takes. Adds to `dweight`.
    pub fn packed_convolve_backward(
        &self,
        shape: &DeltaShape,
        documents: DocumentRows<'_>,
        (weight, x): (&[f32], &[f32]),
        (dy, dx): (&mut [f32], &mut [f32]),
        dweight: &mut [f32],
    ) -> Result<()> {
        check(shape, documents, weight, [x.len(), dy.len()])?;
        check(shape, documents, dweight, [x.len(), dx.len()])?;
        let (channels, taps) = (shape.channels(), shape.taps);
        let (factors, eps) = shape.norms();
        by_parts(self.pool(), dy, channels, |row, dy| {
            let first = (documents.starts[row] as usize).max((row + 1).saturating_sub(taps));
            let seen = &x[first * channels..(row + 1) * channels];
            let (values, slopes) = activated(seen, weight, channels);
            let (key_width, dim) = (shape.key_width(), shape.key_dim);
            let mut unused = vec![0.0; dim];
            let heads = dy[..2 * key_width].chunks_exact_mut(dim);
            for (i, (dy, y)) in heads.zip(values.chunks_exact(dim)).enumerate() {
                let factors = &factors[usize::from(i >= shape.key_heads)];
                backward(y, factors, eps, dy, &mut unused);
            }
            dy.iter_mut()
                .zip(&slopes)
                .for_each(|(dy, slope)| *dy *= slope);
        });
        let dsum = &*dy;
        by_parts(self.pool(), dx, channels, |row, dx| {
            let end = (documents.ends[row] as usize).min(row + taps);
            dx.fill(0.0);
            for (back, dsum) in dsum[row * channels..end * channels]
                .chunks_exact(channels)
                .enumerate()
            {
                let weights = weight.iter().skip(taps - 1 - back).step_by(taps);
                let terms = dx.iter_mut().zip(dsum).zip(weights);
                terms.for_each(|((dx, d), w)| *dx += d * w);
            }
        });
        by_parts(self.pool(), dweight, CHANNELS * taps, |part, dweight| {
            for (row, &start) in documents.starts.iter().enumerate() {
                let seen = taps.min(row + 1 - start as usize);
                for (i, dweight) in dweight.chunks_exact_mut(taps).enumerate() {
                    let channel = part * CHANNELS + i;
                    let d = dsum[row * channels + channel];
                    for back in 0..seen {
                        dweight[taps - 1 - back] += d * x[(row - back) * channels + channel];
                    }
                }
            }
        });
        Ok(())
    }
}

/// SiLU of the convolution at the last of the rows `seen`, and its derivative, of each channel.
fn activated(seen: &[f32], weight: &[f32], channels: usize) -> (Vec<f32>, Vec<f32>) {
    let (taps, rows) = (weight.len() / channels, seen.len() / channels);
    let mut sums = vec![0.0; channels];
    for (at, x) in seen.chunks_exact(channels).enumerate() {
        let weights = weight.iter().skip(taps - rows + at).step_by(taps);
        let terms = sums.iter_mut().zip(x).zip(weights);
        terms.for_each(|((sum, x), w)| *sum += x * w);
    }
    sums.into_iter().map(silu).unzip()
}

fn check(
    shape: &DeltaShape,
    documents: DocumentRows<'_>,
    weight: &[f32],
    lengths: [usize; 2],
) -> Result<()> {
    let channels = shape.channels();
    let is_sound =
        weight.len() == channels * shape.taps && lengths == [documents.starts.len() * channels; 2];
    if !is_sound {
        bail!(
            Internal,
            "a convolution of {lengths:?} elements in {} rows of {channels} with {} weights for {} taps",
            documents.starts.len(),
            weight.len(),
            shape.taps
        );
    }
    Ok(())
}
