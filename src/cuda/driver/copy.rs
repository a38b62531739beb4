//! Copies between host and device, in the order of the device's stream.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::result;

use super::error::check;
use super::gpu::Gpu;
use super::memory::{DeviceBuffer, DeviceSlice};
use super::staging::Staging;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::{Plain, Tag, as_bytes};

/// The bytes of plain values, to be written.
fn as_bytes_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: plain values have no padding, and any bytes are a valid value.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

fn within<'a>(memory: impl Into<DeviceSlice<'a>>, range: &Range<usize>) -> Result<()> {
    let bytes = memory.into().bytes();
    if range.start > range.end || range.end > bytes {
        bail!(Internal, "bytes {range:?} of a device buffer of {bytes}");
    }
    Ok(())
}

impl DeviceBuffer {
    /// A copy of `values`.
    pub fn from_slice<T: Plain>(gpu: &Arc<Gpu>, tag: Tag, values: &[T]) -> Result<DeviceBuffer> {
        let mut buffer = DeviceBuffer::uninit(gpu, tag, size_of_val(values))?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// Copies `values` to this memory from byte `at` on. The caller may change `values` as soon as this returns.
    pub fn write<T: Plain>(&mut self, at: usize, values: &[T]) -> Result<()> {
        DeviceSlice::from(&*self).write(at, values)
    }

    /// Writes `len` bytes from byte `at` on; `fill` writes ranges of them, in order, to page-locked memory.
    pub fn write_with(
        &mut self,
        at: usize,
        len: usize,
        fill: impl FnMut(Range<usize>, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        DeviceSlice::from(&*self).write_with(at, len, fill)
    }

    /// Copies from byte `at` on to `out`, after all work enqueued before.
    pub fn read<T: Plain>(&self, at: usize, out: &mut [T]) -> Result<()> {
        DeviceSlice::from(self).read(at, out)
    }

    /// Copies `len` bytes from byte `from` of `source` to byte `at` of this memory.
    pub fn copy_from(
        &mut self,
        at: usize,
        source: &DeviceBuffer,
        from: usize,
        len: usize,
    ) -> Result<()> {
        DeviceSlice::from(&*self).copy_from(at, &source.into(), from, len)
    }
}

impl DeviceSlice<'_> {
    /// Copies `values` to this memory from byte `at` on. The caller may change `values` as soon as this returns.
    pub fn write<T: Plain>(&self, at: usize, values: &[T]) -> Result<()> {
        let bytes = as_bytes(values);
        self.write_with(at, bytes.len(), |range, out| {
            out.copy_from_slice(&bytes[range]);
            Ok(())
        })
    }

    fn write_with(
        &self,
        at: usize,
        len: usize,
        mut fill: impl FnMut(Range<usize>, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        within(*self, &(at..at.saturating_add(len)))?;
        let mut staging = Staging::new(self.gpu(), len);
        let step = staging.bytes();
        for start in (0..len).step_by(step) {
            let n = step.min(len - start);
            fill(start..start + n, &mut staging.next()?[..n])?;
            // SAFETY: the range lies within this memory.
            unsafe { staging.send(&[(0..n, self.address() + (at + start) as u64)])? };
        }
        staging.finish()
    }

    /// Copies `len` bytes from byte `from` of `source` to byte `at` of this memory.
    pub fn copy_from(
        &self,
        at: usize,
        source: &DeviceSlice<'_>,
        from: usize,
        len: usize,
    ) -> Result<()> {
        within(*self, &(at..at.saturating_add(len)))?;
        within(*source, &(from..from.saturating_add(len)))?;
        self.gpu().bind()?;
        if len == 0 {
            return Ok(());
        }
        check(
            // SAFETY: both ranges were checked.
            unsafe {
                result::memcpy_dtod_async(
                    self.address() + at as u64,
                    source.address() + from as u64,
                    len,
                    self.gpu().stream(),
                )
            },
            "copying on the device",
        )
    }

    /// Copies from byte `at` on to `out`, after all work enqueued before.
    pub fn read<T: Plain>(&self, at: usize, out: &mut [T]) -> Result<()> {
        let out = as_bytes_mut(out);
        within(*self, &(at..at.saturating_add(out.len())))?;
        self.gpu().bind()?;
        if self.gpu().lane().is_some() {
            // A copy to memory that is not page-locked waits within the driver, and keeps other threads out of it meanwhile.
            self.gpu().wait()?;
        }
        if !out.is_empty() {
            check(
                // SAFETY: the range lies within the slice, and `out` is not touched before the wait.
                unsafe {
                    result::memcpy_dtoh_async(out, self.address() + at as u64, self.gpu().stream())
                },
                "copying from the device",
            )?;
        }
        self.gpu().synchronize()
    }
}
