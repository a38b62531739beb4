//! Elementwise and column operations on arrays of training: sums, scaling, conversion.

use std::ops::Range;

use super::super::{Device, Mixed, Slice, SliceMut, activation};
use super::scratch;
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::training as cuda;

/// `x += y`.
pub fn add(device: &Device, x: SliceMut<'_, Mixed>, y: Slice<'_, Mixed>) -> Result<()> {
    match device {
        Device::Cpu(_) => {
            activation::add(device, SliceMut::Host(x.host()?), Slice::Host(y.host()?))
        }
        Device::Cuda(_) => cuda::add(x.cuda()?, y.cuda()?),
    }
}

/// `sum += x`.
pub fn accumulate(device: &Device, sum: SliceMut<'_>, x: Slice<'_, Mixed>) -> Result<()> {
    match device {
        Device::Cpu(_) => activation::add(device, sum, Slice::Host(x.host()?)),
        Device::Cuda(_) => {
            let mut wide = scratch(device, x.len())?;
            cuda::bf16_to_f32(x.cuda()?, wide.all_mut().cuda()?)?;
            activation::add(device, sum, wide.all())
        }
    }
}

/// `x *= factor`.
pub fn scale(device: &Device, x: SliceMut<'_, Mixed>, factor: f32) -> Result<()> {
    match device {
        Device::Cpu(_) => activation::scale(device, SliceMut::Host(x.host()?), factor),
        Device::Cuda(_) => cuda::scale(x.cuda()?, factor),
    }
}

/// `x = 0`.
pub fn clear(device: &Device, x: SliceMut<'_, Mixed>) -> Result<()> {
    match device {
        Device::Cpu(_) => activation::fill(device, SliceMut::Host(x.host()?), 0.0),
        Device::Cuda(_) => cuda::fill(x.cuda()?, 0.0),
    }
}

/// Converts f32 to `out`, rounding to its type.
pub fn convert(device: &Device, x: Slice<'_>, out: SliceMut<'_, Mixed>) -> Result<()> {
    match device {
        Device::Cpu(_) => SliceMut::<f32>::Host(out.host()?).copy_from(x),
        Device::Cuda(_) => cuda::f32_to_bf16(x.cuda()?, out.cuda()?),
    }
}

/// Copies the columns of `x` `[rows, width]` from `first` on to `out` `[rows, n]`.
pub fn copy_columns(
    device: &Device,
    x: Slice<'_, Mixed>,
    width: usize,
    first: usize,
    out: SliceMut<'_, Mixed>,
) -> Result<()> {
    let columns = columns_of(x.len(), width, first, out.len())?;
    match device {
        Device::Cpu(_) => {
            let rows = x.host()?.chunks_exact(width);
            for (x, out) in rows.zip(out.host()?.chunks_exact_mut(columns.len())) {
                out.copy_from_slice(&x[columns.clone()]);
            }
            Ok(())
        }
        Device::Cuda(_) => cuda::copy_columns(x.cuda()?, width, columns, out.cuda()?),
    }
}

/// Copies runs of columns of `x`, rows of `width` elements, side by side to `out`, whose rows are as wide as all runs together.
pub fn gather_columns(
    device: &Device,
    x: Slice<'_, Mixed>,
    width: usize,
    runs: &[Range<usize>],
    out: SliceMut<'_, Mixed>,
) -> Result<()> {
    let taken = check_runs((x.len(), width), runs, out.len())?;
    let (x, out) = on_host(device, x, out)?;
    for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(taken)) {
        let mut at = 0;
        for run in runs {
            out[at..at + run.len()].copy_from_slice(&x[run.clone()]);
            at += run.len();
        }
    }
    Ok(())
}

/// The reverse of [`gather_columns`]: copies rows of `x` to the runs of columns of `out`, rows of `width` elements.
pub fn scatter_columns(
    device: &Device,
    x: Slice<'_, Mixed>,
    runs: &[Range<usize>],
    out: SliceMut<'_, Mixed>,
    width: usize,
) -> Result<()> {
    let taken = check_runs((out.len(), width), runs, x.len())?;
    let (x, out) = on_host(device, x, out)?;
    for (x, out) in x.chunks_exact(taken).zip(out.chunks_exact_mut(width)) {
        let mut at = 0;
        for run in runs {
            out[run.clone()].copy_from_slice(&x[at..at + run.len()]);
            at += run.len();
        }
    }
    Ok(())
}

/// Checks runs of columns of `len` elements in rows of `width`, with `part` elements in all. Returns the columns of all runs.
fn check_runs((len, width): (usize, usize), runs: &[Range<usize>], part: usize) -> Result<usize> {
    let taken = runs.iter().map(Range::len).sum::<usize>();
    let fits = runs.iter().all(|run| run.end <= width);
    if width == 0 || taken == 0 || !fits || len % width != 0 || len / width * taken != part {
        bail!(
            Internal,
            "{part} elements in {} runs of {taken} columns, of {len} in rows of {width}",
            runs.len()
        );
    }
    Ok(taken)
}

fn on_host<'a, 'b>(
    device: &Device,
    x: Slice<'a, Mixed>,
    out: SliceMut<'b, Mixed>,
) -> Result<(&'a [f32], &'b mut [f32])> {
    match device {
        Device::Cpu(_) => Ok((x.host()?, out.host()?)),
        Device::Cuda(_) => bail!(
            Unsupported,
            "runs of columns are not copied on {}",
            device.name()
        ),
    }
}

/// Adds `x` `[rows, n]` to the columns from `first` on of `sum` `[rows, width]`.
pub fn add_columns(
    device: &Device,
    sum: SliceMut<'_, Mixed>,
    width: usize,
    first: usize,
    x: Slice<'_, Mixed>,
) -> Result<()> {
    let columns = columns_of(sum.len(), width, first, x.len())?;
    match device {
        Device::Cpu(_) => {
            let rows = sum.host()?.chunks_exact_mut(width);
            for (sum, x) in rows.zip(x.host()?.chunks_exact(columns.len())) {
                sum[columns.clone()]
                    .iter_mut()
                    .zip(x)
                    .for_each(|(s, v)| *s += v);
            }
            Ok(())
        }
        Device::Cuda(_) => cuda::add_columns(sum.cuda()?, width, columns, x.cuda()?),
    }
}

/// The column range that `part` elements, from column `first` on, occupy in `len` elements of rows of `width`.
fn columns_of(len: usize, width: usize, first: usize, part: usize) -> Result<Range<usize>> {
    let rows = len / width.max(1);
    let n = part / rows.max(1);
    if rows == 0 || n == 0 || rows * width != len || rows * n != part || first + n > width {
        bail!(
            Internal,
            "{part} elements from column {first} on, of {len} in rows of {width}"
        );
    }
    Ok(first..first + n)
}
