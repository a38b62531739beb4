//! Measures how fast the device reads and copies its own memory, for reports and benchmarks.

use std::sync::Arc;
use std::time::Instant;

use super::driver::{DeviceBuffer, Gpu, Launch};
use super::kernel::kernels;
use crate::base::Result;
use crate::base::memory::Tag;
use crate::format::random;

/// Far more than the caches hold.
const BYTES: usize = 2 << 30;
const RUNS: usize = 15;
/// Passes per run: enough that the final wait of the host does not count.
const PASSES: usize = 4;

kernels! {
    /// Reads a buffer once.
    enum ReadAll(Arguments) {
        ReadAll { Words = "read_all" }
    }
}

#[repr(C)]
struct Arguments {
    data: u64,
    count: u64,
    sink: u64,
}

/// A buffer of random bits.
fn data(gpu: &Arc<Gpu>) -> Result<DeviceBuffer> {
    let mut data = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, BYTES)?;
    let block: Vec<u64> = (0..(64 << 20) / 8).map(|i| random::bits(0, i)).collect();
    for at in (0..BYTES).step_by(64 << 20) {
        data.write(at, &block)?;
    }
    Ok(data)
}

/// The median rate of several runs, after one warm-up run.
fn median(gpu: &Gpu, bytes: usize, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut rates = Vec::with_capacity(RUNS);
    for i in 0..=RUNS {
        gpu.synchronize()?;
        let start = Instant::now();
        for _ in 0..PASSES {
            run()?;
        }
        gpu.synchronize()?;
        if i > 0 {
            rates.push((PASSES * bytes) as f64 / start.elapsed().as_secs_f64());
        }
    }
    rates.sort_by(f64::total_cmp);
    Ok(rates[RUNS / 2])
}

/// Bandwidth of the driver's copy within the device, in bytes read and written per second: the median of several runs over two gigabytes of
/// random bits.
pub fn copy_bandwidth(gpu: &Arc<Gpu>) -> Result<f64> {
    let from = data(gpu)?;
    let mut to = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, BYTES)?;
    median(gpu, 2 * BYTES, || to.copy_from(0, &from, 0, BYTES))
}

/// Read bandwidth in bytes per second: the median of several runs over two gigabytes of random bits.
pub fn read_bandwidth(gpu: &Arc<Gpu>) -> Result<f64> {
    let data = data(gpu)?;
    let sink = DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, 4)?;
    let arguments = Arguments {
        data: data.address(),
        count: (BYTES / 16) as u64,
        sink: sink.address(),
    };
    let launch = Launch::new([8 * gpu.multiprocessors() as u32, 1, 1], 512);
    median(gpu, BYTES, || {
        // SAFETY: the buffers live through the wait that follows.
        unsafe { launch.of(ReadAll::Words).run(gpu, &arguments) }
    })
}
