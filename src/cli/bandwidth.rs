//! Measures the memory read bandwidth of the threads that run a model, an upper bound of decode speed.

use NVFP4::base::Result;
use NVFP4::base::memory::{Buffer, Tag};
use NVFP4::cpu::Cpu;

/// Larger than the caches of common machines.
const BYTES: usize = 1 << 30;

/// Measured bandwidth in bytes per second.
pub(super) fn read(cpu: &Cpu) -> Result<f64> {
    let mut buffer = Buffer::<f32>::zeroed(Tag::Scratch, BYTES / size_of::<f32>())?;
    // Pages that were never written may all map to a single page of zeros, which stays in the cache.
    buffer.fill(1.0);
    Ok(cpu.read_bandwidth(&buffer))
}
