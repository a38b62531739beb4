//! The gradient of an embedding: rows of the residual stream's gradient, summed by token.

use super::super::{Array, Device, Mixed, Slice, SliceMut};
use super::upload;
use crate::base::Result;
use crate::cuda::training as cuda;

/// The rows of a batch grouped by token.
#[derive(Debug)]
pub struct RowsByToken {
    /// The distinct tokens, ascending.
    tokens: Array<u32>,
    /// Index in `rows` of the first row of each token, and the end of the last one.
    offsets: Array<u32>,
    /// Row indices, grouped by token, ascending within each group.
    rows: Array<u32>,
}

impl RowsByToken {
    /// Groups the rows of these tokens.
    pub fn new(device: &Device, tokens: &[u32]) -> Result<RowsByToken> {
        let mut order: Vec<u32> = (0..tokens.len() as u32).collect();
        order.sort_by_key(|&row| tokens[row as usize]);
        let (mut distinct, mut offsets) = (Vec::new(), Vec::new());
        for (i, &row) in order.iter().enumerate() {
            let token = tokens[row as usize];
            if distinct.last() != Some(&token) {
                distinct.push(token);
                offsets.push(i as u32);
            }
        }
        offsets.push(order.len() as u32);
        Ok(RowsByToken {
            tokens: upload(device, &distinct)?,
            offsets: upload(device, &offsets)?,
            rows: upload(device, &order)?,
        })
    }

    /// Adds `scale` times the rows of `dx` `[T, width]` to the rows of their tokens in `gradients`, whose first row belongs to token
    /// `first`.
    pub fn add(
        &self,
        device: &Device,
        dx: Slice<'_, Mixed>,
        scale: f32,
        first: usize,
        width: usize,
        gradients: SliceMut<'_, Mixed>,
    ) -> Result<()> {
        match device {
            Device::Cpu(_) => {
                let (dx, gradients, order) =
                    (dx.host()?, gradients.host()?, self.rows.all().host()?);
                let (tokens, offsets) = (self.tokens.all().host()?, self.offsets.all().host()?);
                let last = first + gradients.len() / width;
                for (i, &token) in tokens.iter().enumerate() {
                    let token = token as usize;
                    if !(first..last).contains(&token) {
                        continue;
                    }
                    let to = &mut gradients[(token - first) * width..][..width];
                    for &row in &order[offsets[i] as usize..offsets[i + 1] as usize] {
                        let from = &dx[row as usize * width..][..width];
                        to.iter_mut().zip(from).for_each(|(to, x)| *to += scale * x);
                    }
                }
                Ok(())
            }
            Device::Cuda(_) => {
                let tokens = cuda::TokenRows {
                    order: self.rows.all().cuda()?,
                    offsets: self.offsets.all().cuda()?,
                    ids: self.tokens.all().cuda()?,
                };
                cuda::scatter_add(
                    &tokens,
                    dx.cuda()?,
                    width,
                    scale,
                    first,
                    gradients.cuda()?,
                    true,
                )
            }
        }
    }
}
