//! Device memory that is written again and again, without waiting for the device.

use std::sync::Arc;

use super::gpu::Gpu;
use super::memory::{DeviceBuffer, DeviceSlice};
use super::staging::Staging;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::{Plain, Tag, as_bytes};

/// A device buffer with page-locked memory of its own for what is written to it.
pub struct StagedBuffer {
    buffer: DeviceBuffer,
    staging: Staging,
}

impl StagedBuffer {
    /// Memory of `bytes` with any contents.
    pub fn uninit(gpu: &Arc<Gpu>, tag: Tag, bytes: usize) -> Result<StagedBuffer> {
        Ok(StagedBuffer {
            buffer: DeviceBuffer::uninit(gpu, tag, bytes)?,
            staging: Staging::of(gpu, bytes),
        })
    }

    /// Enqueues a copy of `values` to the beginning of this memory. Only waits if the copy before the last one has not ended.
    pub fn write<T: Plain>(&mut self, values: &[T]) -> Result<()> {
        let bytes = as_bytes(values);
        self.write_with(bytes.len(), |out| out.copy_from_slice(bytes))
    }

    /// As [`write`](Self::write), of `len` bytes that `fill` writes to page-locked memory.
    pub fn write_with(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        if len > self.buffer.bytes() {
            bail!(
                Internal,
                "{len} bytes for a device buffer of {}",
                self.buffer.bytes()
            );
        }
        fill(&mut self.staging.next()?[..len]);
        // SAFETY: the buffer has that many bytes.
        unsafe { self.staging.send(&[(0..len, self.buffer.address())]) }
    }

    /// The memory from a byte on.
    pub fn from(&self, byte: usize) -> Result<DeviceSlice<'_>> {
        DeviceSlice::from(&self.buffer).part(byte..self.buffer.bytes())
    }
}
