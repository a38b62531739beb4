//! Conversion of rows in bounded chunks on the threads of the CPU, so that a large tensor never has a dense copy.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::base::call;
use crate::base::error::Result;
use crate::base::memory;
use crate::ops::Device;
use crate::tensor::{DType, Shape, Tensor};

/// Values converted to f32 at a time.
const CHUNK: usize = 64 * 1024;

/// Number of rows of `cols` values converted at a time.
fn chunk_rows(cols: usize) -> usize {
    (CHUNK / cols.max(1)).max(1)
}

/// Calls `each` for ranges of rows of about [`CHUNK`] values, spread over the device's threads, and returns the results in order. Of
/// several errors, returns the first in that order. Cancelling the thread's [`call`] is an error too.
pub(super) fn by_chunks<T: Send>(
    device: &Device,
    rows: usize,
    cols: usize,
    each: impl Fn(usize, Range<usize>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let step = chunk_rows(cols);
    let parts = rows.div_ceil(step);
    let results: Vec<Mutex<Option<Result<T>>>> = (0..parts).map(|_| Mutex::new(None)).collect();
    let pool = device.host()?.pool();
    call::with(|call| {
        pool.run(parts, |part| {
            let start = part * step;
            let result = call
                .check()
                .and_then(|()| each(part, start..(start + step).min(rows)));
            if let Ok(mut slot) = results[part].lock() {
                *slot = Some(result);
            }
        });
    });
    results
        .into_iter()
        .filter_map(|slot| slot.into_inner().ok().flatten())
        .collect()
}

/// Splits an output into the parts that [`by_chunks`] fills, for rows of `cols` values that occupy `row` elements of it. Each part has its
/// own lock, which only its task takes.
pub(super) fn split<T>(out: &mut [T], row: usize, cols: usize) -> Vec<Mutex<&mut [T]>> {
    out.chunks_mut((row * chunk_rows(cols)).max(1))
        .map(Mutex::new)
        .collect()
}

/// Locks part `i` of the result of [`split`].
pub(super) fn part<'a, 'b, T>(
    parts: &'a [Mutex<&'b mut [T]>],
    i: usize,
) -> MutexGuard<'a, &'b mut [T]> {
    parts[i].lock().unwrap_or_else(PoisonError::into_inner)
}

/// Builds a tensor of a floating `dtype` from rows that `fill` writes as f32.
pub(super) fn fill_rows(
    device: &Device,
    sizes: &[usize],
    dtype: DType,
    fill: impl Fn(Range<usize>, &mut [f32]) -> Result<()> + Sync,
) -> Result<Tensor> {
    let (rows, cols) = Shape::contiguous(sizes)?.matrix();
    Tensor::build(sizes, dtype, |bytes| {
        let parts = split(bytes, cols * dtype.bytes(), cols);
        by_chunks(device, rows, cols, |i, range| {
            let mut values = memory::zeros(range.len() * cols)?;
            fill(range, &mut values)?;
            dtype.from_f32(&values, &mut part(&parts, i))
        })?;
        Ok(())
    })
}
