//! Rows on their way to the experts of a mixture, and results on their way back.

use std::ops::Range;

use super::super::experts::Routes;
use super::super::{Array, Device, Mixed, Slice, SliceMut};
use super::upload;
use crate::base::Result;
use crate::cuda::training as cuda;

/// The rows of a batch that each expert takes, and what its results are multiplied by, on a device.
#[derive(Debug)]
pub struct RoutedRows {
    rows: Array<u32>,
    weights: Array,
    /// Where each expert's rows begin, and where the last one's end.
    offsets: Vec<usize>,
}

impl RoutedRows {
    /// As `routes` has them.
    pub fn new(device: &Device, routes: &Routes) -> Result<RoutedRows> {
        let (mut rows, mut weights, mut offsets) = (Vec::new(), Vec::new(), vec![0]);
        for expert in routes.experts() {
            rows.extend(expert.iter().map(|&(row, _)| row as u32));
            weights.extend(expert.iter().map(|&(_, weight)| weight));
            offsets.push(rows.len());
        }
        Self::of(device, &rows, &weights, offsets)
    }

    /// All rows, for one expert, with these weights.
    pub fn all(device: &Device, weights: &[f32]) -> Result<RoutedRows> {
        let rows: Vec<u32> = (0..weights.len() as u32).collect();
        Self::of(device, &rows, weights, vec![0, weights.len()])
    }

    fn of(
        device: &Device,
        rows: &[u32],
        weights: &[f32],
        offsets: Vec<usize>,
    ) -> Result<RoutedRows> {
        Ok(RoutedRows {
            rows: upload(device, rows)?,
            weights: upload(device, weights)?,
            offsets,
        })
    }

    /// Experts, with how many rows each takes.
    pub fn counts(&self) -> impl Iterator<Item = (usize, usize)> {
        let pairs = self.offsets.windows(2).map(|pair| pair[1] - pair[0]);
        pairs.enumerate()
    }

    fn of_expert(&self, expert: usize) -> Range<usize> {
        self.offsets[expert]..self.offsets[expert + 1]
    }

    /// Makes `taken` `[n, width]` the rows of `x` `[T, width]` that an expert takes.
    pub fn take(
        &self,
        device: &Device,
        expert: usize,
        x: Slice<'_, Mixed>,
        width: usize,
        taken: SliceMut<'_, Mixed>,
    ) -> Result<()> {
        let rows = self.rows.part(self.of_expert(expert))?;
        match device {
            Device::Cpu(_) => {
                let (x, taken) = (x.host()?, taken.host()?.chunks_exact_mut(width));
                for (&row, taken) in rows.host()?.iter().zip(taken) {
                    taken.copy_from_slice(&x[row as usize * width..][..width]);
                }
                Ok(())
            }
            Device::Cuda(_) => cuda::take_rows(x.cuda()?, rows.cuda()?, width, taken.cuda()?),
        }
    }

    /// Adds an expert's results `x` `[n, width]`, times their weights, to its rows of `sum` `[T, width]`.
    pub fn add(
        &self,
        device: &Device,
        expert: usize,
        x: Slice<'_, Mixed>,
        width: usize,
        sum: SliceMut<'_>,
    ) -> Result<()> {
        let range = self.of_expert(expert);
        let (rows, weights) = (self.rows.part(range.clone())?, self.weights.part(range)?);
        match device {
            Device::Cpu(_) => {
                let (sum, x) = (sum.host()?, x.host()?.chunks_exact(width));
                let routed = rows.host()?.iter().zip(weights.host()?);
                for ((&row, &weight), x) in routed.zip(x) {
                    let sum = &mut sum[row as usize * width..][..width];
                    sum.iter_mut().zip(x).for_each(|(s, x)| *s += weight * x);
                }
                Ok(())
            }
            Device::Cuda(_) => {
                let routed = (rows.cuda()?, weights.cuda()?);
                cuda::add_rows(x.cuda()?, routed, width, sum.cuda()?)
            }
        }
    }
}
