//! Sums of squares of gradients, for their norms and for clipping.

use super::super::{Array, Device, Element, Mixed, Slice};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::training::{self as cuda, STATISTICS_ENTRY, STATISTICS_PARTIAL};

/// Statistics of a gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Statistics {
    /// Sum of its squares; infinite if an element is not finite.
    pub squares: f64,
}

impl Statistics {
    /// Whether every element is finite.
    pub fn is_finite(&self) -> bool {
        self.squares.is_finite()
    }
}

fn of_host(values: &[f32]) -> Statistics {
    // Squares of finite f32 are finite in f64, and so is the sum of any number of them that fits in memory.
    Statistics {
        squares: values.iter().map(|&v| f64::from(v) * f64::from(v)).sum(),
    }
}

/// Statistics of one gradient. Waits for a GPU.
pub fn of_gradient(device: &Device, gradient: Slice<'_, Mixed>) -> Result<Statistics> {
    let mut all = GradientStatistics::new(device)?;
    all.add(device, gradient, f32::INFINITY)?;
    Ok(all.read(device)?[0])
}

/// Entries in a block of [`GradientStatistics`].
const BLOCK: usize = 1024;

/// Statistics of the gradients of a step, in order. On a GPU they stay on the device until they are read, so that nothing waits.
#[derive(Debug)]
pub struct GradientStatistics {
    /// On a GPU, entries of [`cuda::gradient_statistics`]; on the CPU, one factor each, which is also the last number of a GPU entry.
    blocks: Vec<Array>,
    /// Numbers in an entry.
    entry: usize,
    found: Vec<Statistics>,
    partial: Array,
    used: usize,
}

impl GradientStatistics {
    /// An empty list.
    pub fn new(device: &Device) -> Result<GradientStatistics> {
        let (partial, entry) = match device.is_cuda() {
            true => (STATISTICS_PARTIAL, STATISTICS_ENTRY),
            false => (0, 1),
        };
        Ok(GradientStatistics {
            blocks: Vec::new(),
            entry,
            found: Vec::new(),
            partial: Array::scratch(device, partial)?,
            used: 0,
        })
    }

    /// Removes all entries, for the next step.
    pub fn clear(&mut self) {
        self.used = 0;
        self.found.clear();
    }

    /// Adds a gradient in mixed precision with the norm bound `bound`. Returns its number for [`GradientStatistics::factor`].
    pub fn add(
        &mut self,
        device: &Device,
        gradient: Slice<'_, Mixed>,
        bound: f32,
    ) -> Result<usize> {
        self.add_any(device, gradient, bound, false)
    }

    /// Adds a gradient in f32.
    pub fn add_floats(
        &mut self,
        device: &Device,
        gradient: Slice<'_>,
        bound: f32,
    ) -> Result<usize> {
        self.add_any(device, gradient, bound, true)
    }

    fn add_any<E: Element<Host = f32>>(
        &mut self,
        device: &Device,
        gradient: Slice<'_, E>,
        bound: f32,
        is_f32: bool,
    ) -> Result<usize> {
        let number = self.used;
        if number == self.blocks.len() * BLOCK {
            self.blocks
                .push(Array::scratch(device, BLOCK * self.entry)?);
        }
        if device.is_cuda() {
            let entry = |number: usize| {
                let at = number % BLOCK * self.entry;
                self.blocks[number / BLOCK]
                    .part(at..at + self.entry)?
                    .cuda()
            };
            let previous = number.checked_sub(1).map(entry).transpose()?;
            let partial = self.partial.all().cuda()?;
            cuda::gradient_statistics(
                gradient.cuda()?,
                is_f32,
                partial,
                previous,
                bound,
                entry(number)?,
            )?;
        } else {
            let found = of_host(gradient.host()?);
            let before = match number.checked_sub(1) {
                Some(previous) => self.factor(previous)?.host()?[0],
                None => 1.0,
            };
            let factor = match found.is_finite() && before.is_finite() {
                true => (f64::from(bound) / found.squares.sqrt()).min(1.0) as f32,
                false => f32::INFINITY,
            };
            let at = number % BLOCK;
            self.blocks[number / BLOCK]
                .part_mut(at..at + 1)?
                .copy_from(Slice::Host(&[factor]))?;
            self.found.push(found);
        }
        self.used += 1;
        Ok(number)
    }

    /// The factor, on the device, that limits a gradient's norm to the bound it was added with: one f32, at most 1. It is infinite if this
    /// gradient or an earlier one is not finite.
    pub fn factor(&self, number: usize) -> Result<Slice<'_>> {
        if number >= self.used {
            bail!(Internal, "gradient {number} of {} in a step", self.used);
        }
        let at = (number % BLOCK + 1) * self.entry - 1;
        self.blocks[number / BLOCK].part(at..at + 1)
    }

    /// All statistics, in the order of addition. Waits for a GPU.
    pub fn read(&self, device: &Device) -> Result<Vec<Statistics>> {
        if !device.is_cuda() {
            return Ok(self.found.clone());
        }
        let mut all = Vec::with_capacity(self.used);
        for (i, block) in self.blocks.iter().enumerate() {
            let count = self.used.saturating_sub(i * BLOCK).min(BLOCK);
            let mut entries = vec![0.0; count * STATISTICS_ENTRY];
            block.part(0..entries.len())?.read(&mut entries)?;
            all.extend(entries.as_chunks::<STATISTICS_ENTRY>().0.iter().map(
                |&[squares, _, not_finite, _]| Statistics {
                    squares: match not_finite == 0.0 {
                        true => f64::from(squares),
                        false => f64::INFINITY,
                    },
                },
            ));
        }
        Ok(all)
    }
}
