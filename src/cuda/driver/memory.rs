//! Device memory, accounted and freed in stream order, and page-locked host memory for copies.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use cudarc::driver::result;

use super::error::check;
use super::gpu::Gpu;
use super::recording;
use crate::base::error::{bail, err};
use crate::base::memory::{Claim, Tag};
use crate::base::size::product;
use crate::base::{Error, ErrorKind, Result};

/// Memory that a device uses in stream order. It is freed in that order too: work enqueued before may still use it.
pub struct DeviceBuffer {
    gpu: Arc<Gpu>,
    address: u64,
    bytes: usize,
    owner: Owner,
}

/// Where a buffer's memory comes from.
enum Owner {
    /// The device's pool.
    Pool { _claim: Claim },
    /// Page-locked host memory.
    Host { _memory: Pinned },
}

fn allocate(gpu: &Gpu, tag: Tag, bytes: usize) -> Result<u64> {
    let attempt = || {
        check(
            // SAFETY: pool and stream live as long as the GPU, which the buffer keeps alive.
            unsafe { result::mem_pool::alloc_async(gpu.pool(), bytes, gpu.stream()) },
            "allocating device memory",
        )
    };
    let mut result = attempt();
    // Freed memory that the pool keeps may be in pieces that are too small. Given back to the driver, it can become one piece of the right
    // size. Nothing may be waited for while a graph is recorded.
    let is_refused = |r: &Result<u64>| matches!(r, Err(e) if e.kind() == ErrorKind::OutOfMemory);
    if is_refused(&result) && recording::recorded().is_none() {
        gpu.empty_cache()?;
        result = attempt();
        if is_refused(&result) {
            // A failed request leaves the pool holding all that it could get, which nothing else can then use.
            gpu.empty_cache()?;
        }
    }
    result.map_err(|e| match e.kind() {
        ErrorKind::OutOfMemory => refused(gpu, tag.name(), bytes),
        _ => e.within(format_args!("{bytes} bytes for {}", tag.name())),
    })
}

/// The error for refused memory, with the amounts that were available.
fn refused(gpu: &Gpu, what: &str, bytes: usize) -> Error {
    match (gpu.held(), gpu.memory()) {
        (Ok((held, kept)), Ok((free, total))) => err!(
            OutOfMemory,
            "{gpu:?} has no {bytes} bytes for {what}: this library holds {held} and keeps {kept} ready, {free} of the device's {total} are free; free something, or shorten contexts or batches"
        ),
        _ => err!(OutOfMemory, "{gpu:?} has no {bytes} bytes for {what}"),
    }
}

impl DeviceBuffer {
    /// Allocates `bytes` of uninitialized memory.
    pub fn uninit(gpu: &Arc<Gpu>, tag: Tag, bytes: usize) -> Result<DeviceBuffer> {
        let claim = Claim::new(tag, bytes)?;
        gpu.bind()?;
        let address = match bytes {
            0 => 0,
            _ => allocate(gpu, tag, bytes)?,
        };
        Ok(DeviceBuffer {
            gpu: gpu.clone(),
            address,
            bytes,
            owner: Owner::Pool { _claim: claim },
        })
    }

    /// Allocates `bytes` of zeros in page-locked host memory, which the device accesses over the bus: slower, but it takes no device
    /// memory.
    pub fn of_host(gpu: &Arc<Gpu>, tag: Tag, bytes: usize) -> Result<DeviceBuffer> {
        let memory = Pinned::new(gpu, tag, bytes)?;
        Ok(DeviceBuffer {
            gpu: gpu.clone(),
            address: if bytes == 0 { 0 } else { memory.address() },
            bytes,
            owner: Owner::Host { _memory: memory },
        })
    }

    /// Allocates `bytes` of zeros.
    pub fn zeroed(gpu: &Arc<Gpu>, tag: Tag, bytes: usize) -> Result<DeviceBuffer> {
        let buffer = Self::uninit(gpu, tag, bytes)?;
        buffer.clear(bytes)?;
        Ok(buffer)
    }

    /// Enqueues zeros for the first `bytes` bytes.
    pub(in crate::cuda) fn clear(&self, bytes: usize) -> Result<()> {
        DeviceSlice::from(self).clear(bytes)
    }

    /// The device that it belongs to.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Its address on the device; 0 if it is empty.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Fails unless it is large enough for `what`, whose bytes are the product of `sizes`.
    pub(in crate::cuda) fn holds(&self, what: &str, sizes: &[usize]) -> Result<()> {
        DeviceSlice::from(self).holds(what, sizes)
    }
}

/// Borrowed device memory of a [`DeviceBuffer`] or of a tensor on the device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceSlice<'a> {
    gpu: &'a Arc<Gpu>,
    address: u64,
    bytes: usize,
}

impl<'a> DeviceSlice<'a> {
    /// Borrows `bytes` of memory from `address` on.
    ///
    /// # Safety
    /// That range must be memory that the device can use as long as the slice lives. For zero bytes any address will do.
    pub(in crate::cuda) unsafe fn new(
        gpu: &'a Arc<Gpu>,
        address: u64,
        bytes: usize,
    ) -> DeviceSlice<'a> {
        DeviceSlice {
            gpu,
            address: if bytes == 0 { 0 } else { address },
            bytes,
        }
    }

    /// The device that it belongs to.
    pub fn gpu(&self) -> &'a Arc<Gpu> {
        self.gpu
    }

    /// Its address on the device; 0 if it is empty.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bytes of `range`, which must exist.
    pub fn part(self, range: Range<usize>) -> Result<DeviceSlice<'a>> {
        if range.start > range.end || range.end > self.bytes {
            bail!(Internal, "bytes {range:?} of {} on a device", self.bytes);
        }
        Ok(DeviceSlice {
            address: self.address + range.start as u64,
            bytes: range.len(),
            ..self
        })
    }

    /// Fails unless it is large enough for `what`, whose bytes are the product of `sizes`.
    pub(in crate::cuda) fn holds(&self, what: &str, sizes: &[usize]) -> Result<()> {
        let wanted = product(what, sizes)?;
        if self.bytes < wanted {
            bail!(
                Internal,
                "{what} takes {wanted} bytes, and its buffer has {}",
                self.bytes
            );
        }
        Ok(())
    }

    /// Enqueues zeros for the first `bytes` bytes.
    pub fn clear(&self, bytes: usize) -> Result<()> {
        self.holds("zeros", &[bytes])?;
        if bytes == 0 {
            return Ok(());
        }
        self.gpu.bind()?;
        check(
            // SAFETY: the bytes are within the memory, which is used in the order of this stream.
            unsafe { result::memset_d8_async(self.address, 0, bytes, self.gpu.stream()) },
            "clearing device memory",
        )
    }
}

impl<'a> From<&'a DeviceBuffer> for DeviceSlice<'a> {
    fn from(buffer: &'a DeviceBuffer) -> DeviceSlice<'a> {
        DeviceSlice {
            gpu: &buffer.gpu,
            address: buffer.address,
            bytes: buffer.bytes,
        }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.address == 0 || self.gpu.bind().is_err() {
            return;
        }
        // A failure means that the context is broken, which every further call reports.
        match self.owner {
            Owner::Pool { .. } => {
                // SAFETY: allocated from the pool and not used by anything enqueued later.
                let _ = unsafe { result::free_async(self.address, self.gpu.stream()) };
            }
            // Enqueued work may still use it.
            Owner::Host { .. } => {
                let _ = self.gpu.synchronize();
            }
        }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBuffer[{}] on {:?}", self.bytes, self.gpu)
    }
}

/// Page-locked host memory, which the device reads, writes and copies directly.
pub struct Pinned {
    data: *mut u8,
    bytes: usize,
    _claim: Claim,
}

// SAFETY: memory that this alone owns.
unsafe impl Send for Pinned {}
// SAFETY: shared access only reads.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates `bytes` of zeros.
    pub fn new(gpu: &Gpu, tag: Tag, bytes: usize) -> Result<Pinned> {
        let claim = Claim::new(tag, bytes)?;
        gpu.bind()?;
        // SAFETY: a plain allocation; no flags.
        let data = check(
            unsafe { result::malloc_host(bytes.max(1), 0) },
            "allocating page-locked memory",
        )
        .map_err(|e| e.within(format_args!("{bytes} bytes for {}", tag.name())))?
        .cast::<u8>();
        // SAFETY: freshly allocated for `bytes` bytes.
        unsafe { data.write_bytes(0, bytes) };
        Ok(Pinned {
            data,
            bytes,
            _claim: claim,
        })
    }

    /// Its size. It has no shared slice, because a kernel may write it at any time.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its host address, for copies by the driver.
    pub(in crate::cuda) fn as_ptr(&self) -> *const u8 {
        self.data
    }

    /// Its device address, which equals the host address.
    pub(in crate::cuda) fn address(&self) -> u64 {
        self.data.expose_provenance() as u64
    }

    /// The i32 number `index`, which a kernel has written and whose work is known to have run.
    pub fn read_i32(&self, index: usize) -> Option<i32> {
        if (index + 1).checked_mul(4)? > self.bytes {
            return None;
        }
        // SAFETY: within the allocation, which is aligned to more; volatile, since the device wrote it.
        Some(unsafe { self.data.cast::<i32>().add(index).read_volatile() })
    }

    /// Copies f32 from number `first` on to `out`, which a kernel has written and whose work is known to have run. Fails past the end.
    pub fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        if self.bytes / 4 < first.saturating_add(out.len()) {
            bail!(
                Internal,
                "{} floats from {first} on of {} bytes of page-locked memory",
                out.len(),
                self.bytes
            );
        }
        for (i, value) in out.iter_mut().enumerate() {
            // SAFETY: within the allocation, which is aligned to more; volatile, since the device wrote it.
            *value = unsafe { self.data.cast::<f32>().add(first + i).read_volatile() };
        }
        Ok(())
    }

    /// The first word, which device and host may change at any time; `None` if it has none.
    pub(in crate::cuda) fn word(&self) -> Option<&AtomicU32> {
        // SAFETY: within the allocation, which is aligned to more, and used as an atomic while it is borrowed.
        (self.bytes >= 4).then(|| unsafe { AtomicU32::from_ptr(self.data.cast()) })
    }

    /// The bytes, for the host to write while no enqueued work writes them.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: initialised when made, owned by `self` and borrowed exclusively; of kernels, only those write here that the owner
        // has enqueued, and it waits for them before it asks for this.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `malloc_host`; whoever enqueued a copy has waited for it.
        let _ = unsafe { result::free_host(self.data.cast()) };
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned[{}]", self.bytes)
    }
}
