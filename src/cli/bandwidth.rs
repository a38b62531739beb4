//! How fast this machine's memory can be read by the threads that run a model: the ceiling of decoding.

use NVFP4::base::Result;
use NVFP4::base::memory::{Buffer, Tag};
use NVFP4::cpu::Cpu;

/// More than the caches of the machines this runs on.
const BYTES: usize = 1 << 30;

/// Bytes per second.
pub(super) fn read(cpu: &Cpu) -> Result<f64> {
    let mut buffer = Buffer::<f32>::zeroed(Tag::Scratch, BYTES / size_of::<f32>())?;
    // Pages that were never written may all be one page of zeros, which is in the cache.
    buffer.fill(1.0);
    Ok(cpu.read_bandwidth(&buffer))
}
