//! Converts rows of a checkpoint's entries to the encoding of a conversion, on several threads.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::plan::{Action, FUSED, PlannedTensor};
use crate::base::error::bail;
use crate::base::lock::lock;
use crate::base::threads::Pool;
use crate::base::{Result, call, memory};
use crate::checkpoint::Checkpoint;
use crate::format::int8;
use crate::format::nvfp4::{self, BLOCK, Levels, QuantizeOptions};
use crate::model::load::rows_f32;

/// Approximate number of values in one part of a parallel region.
pub(super) const PART: usize = 1 << 16;

/// Parts in one region: enough to keep many threads busy, few enough to keep memory small.
pub(super) const PARTS: usize = 64;

/// The names of the weights that share a global scale with `name`, itself included.
fn group(name: &str) -> Vec<String> {
    let members = |group: &&[&str]| {
        let prefix = group.iter().find_map(|s| name.strip_suffix(s))?;
        Some(group.iter().map(|s| format!("{prefix}{s}")).collect())
    };
    let found = FUSED.iter().find_map(members);
    found.unwrap_or_else(|| vec![name.to_owned()])
}

/// Converts rows in parallel.
#[derive(Clone, Copy)]
pub(super) struct RowConverter<'a> {
    pub(super) source: &'a dyn Checkpoint,
    pub(super) pool: &'a Pool,
    pub(super) options: &'a QuantizeOptions,
}

impl RowConverter<'_> {
    /// The global scale for `step`, shared with the weights fused with it. `largest` caches the largest magnitudes of tensors, by name.
    pub(super) fn global(
        &self,
        step: &PlannedTensor,
        steps: &[PlannedTensor],
        largest: &mut HashMap<String, f32>,
    ) -> Result<f32> {
        if self.options.levels != Levels::Two {
            return Ok(1.0);
        }
        let fused = group(&step.name);
        let mut most = 0f32;
        for other in steps {
            if other.action != Action::Quantize || !fused.contains(&other.name) {
                continue;
            }
            let amax = match largest.get(&other.name) {
                Some(&amax) => amax,
                None => {
                    let amax = self
                        .amax(other)
                        .map_err(|e| e.within(format_args!("'{}'", other.name)))?;
                    largest.insert(other.name.clone(), amax);
                    amax
                }
            };
            most = most.max(amax);
        }
        Ok(nvfp4::global_scale(most, self.options))
    }

    /// Rounds the rows of `region` of a step to int8, `per_part` at a time.
    pub(super) fn int8(
        &self,
        step: &PlannedTensor,
        region: Range<usize>,
        per_part: usize,
        codes: &mut [u8],
        scales: &mut [f32],
    ) -> Result<()> {
        let cols = step.entry.cols();
        let parts: Vec<_> = codes
            .chunks_mut(per_part * cols)
            .zip(scales.chunks_mut(per_part))
            .map(Mutex::new)
            .collect();
        let made = self.by_parts(parts.len(), |part| {
            let mut out = lock(&parts[part]);
            let (codes, scales) = &mut *out;
            let first = region.start + part * per_part;
            let mut values = memory::zeros(codes.len())?;
            let rows = first..first + scales.len();
            self.read(step, rows, &mut values)?;
            int8::quantize_rows(&values, cols, first, codes, scales)
        })?;
        made.into_iter().collect()
    }

    /// Calls `each` for all parts on the threads of the pool, and returns the results in the order of the parts, so that neither sums nor
    /// the reported error depend on timing. Cancelled with the thread's [`call`].
    fn by_parts<T: Send>(
        &self,
        parts: usize,
        each: impl Fn(usize) -> Result<T> + Sync,
    ) -> Result<Vec<Result<T>>> {
        let found = Mutex::new(Vec::with_capacity(parts));
        call::with(|call| {
            self.pool.run(parts, |part| {
                if !call.is_over() {
                    let result = each(part);
                    lock(&found).push((part, result));
                }
            })
        });
        call::check()?;
        let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        found.sort_by_key(|(part, _)| *part);
        Ok(found.into_iter().map(|(_, result)| result).collect())
    }

    /// Reads rows of a step.
    fn read(&self, step: &PlannedTensor, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        rows_f32(self.source, &step.entry, &step.rows, rows, out)
    }

    /// The largest magnitude of a step.
    fn amax(&self, step: &PlannedTensor) -> Result<f32> {
        self.largest(step, &|values, first| {
            nvfp4::amax(values, first, self.options.nonfinite)
        })
    }

    /// Fails on values that loading would refuse.
    pub(super) fn check_finite(&self, step: &PlannedTensor) -> Result<()> {
        self.largest(
            step,
            &|values, first| match values.iter().position(|v| !v.is_finite()) {
                None => Ok(0.0),
                Some(i) => bail!(
                    CorruptFile,
                    "the value at index {} is {}; weights must be finite",
                    first + i,
                    values[i]
                ),
            },
        )
        .map(|_| ())
    }

    /// The largest result of `of`, called with runs of rows and the index of their first value.
    fn largest(
        &self,
        step: &PlannedTensor,
        of: &(dyn Fn(&[f32], usize) -> Result<f32> + Sync),
    ) -> Result<f32> {
        let (height, cols) = (step.height(), step.entry.cols());
        let run = (PART / cols).max(1);
        let found = self.by_parts(height.div_ceil(run), |part| {
            let rows = part * run..height.min((part + 1) * run);
            let first = rows.start * cols;
            let mut values = memory::zeros(rows.len() * cols)?;
            self.read(step, rows, &mut values)?;
            of(&values, first)
        })?;
        let mut found = found.into_iter();
        found.try_fold(0f32, |largest, number| Ok(largest.max(number?)))
    }

    /// Quantizes the rows of `region` of a step, `per_part` at a time. Returns the sum of squares of the weights, and of their errors.
    pub(super) fn region(
        &self,
        step: &PlannedTensor,
        region: Range<usize>,
        per_part: usize,
        global: f32,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<(f64, f64)> {
        let cols = step.entry.cols();
        let parts: Vec<_> = codes
            .chunks_mut(per_part * cols / 2)
            .zip(scales.chunks_mut(per_part * cols / BLOCK))
            .map(Mutex::new)
            .collect();
        let sums = self.by_parts(parts.len(), |part| {
            let mut out = lock(&parts[part]);
            let (codes, scales) = &mut *out;
            let first = region.start + part * per_part;
            let rows = first..region.end.min(first + per_part);
            self.part(step, rows, global, codes, scales)
        })?;
        let (mut squares, mut errors) = (0.0, 0.0);
        for sums in sums {
            let (s, e) = sums?;
            squares += s;
            errors += e;
        }
        Ok((squares, errors))
    }

    fn part(
        &self,
        step: &PlannedTensor,
        rows: Range<usize>,
        global: f32,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<(f64, f64)> {
        let cols = step.entry.cols();
        let mut values = memory::zeros(rows.len() * cols)?;
        let first = rows.start;
        self.read(step, rows, &mut values)?;
        nvfp4::quantize_rows(&values, cols, first, global, self.options, codes, scales)?;
        let mut held = vec![0.0; values.len()];
        nvfp4::dequantize(codes, scales, global, &mut held)?;
        let (mut squares, mut errors) = (0.0, 0.0);
        for (&value, &held) in values.iter().zip(&held) {
            if value.is_finite() {
                squares += f64::from(value) * f64::from(value);
                errors += f64::from(value - held) * f64::from(value - held);
            }
        }
        Ok((squares, errors))
    }
}
