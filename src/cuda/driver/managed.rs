//! Managed memory: one address for the host and the devices, between which the driver moves its pages.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use cudarc::driver::{result, sys};

use super::error::check;
use super::gpu::Gpu;
use super::loading::check_managed;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::{Claim, Tag};

/// Bytes of all managed memory that the library has allocated.
static ALLOCATED: AtomicU64 = AtomicU64::new(0);

/// Managed memory. The host may use it directly once the devices have finished with it.
pub struct ManagedBuffer {
    gpu: Arc<Gpu>,
    address: u64,
    bytes: usize,
    _claim: Claim,
}

/// A share of [`ALLOCATED`], given back when dropped unless it is kept.
struct Share(u64);

impl Drop for Share {
    fn drop(&mut self) {
        ALLOCATED.fetch_sub(self.0, Relaxed);
    }
}

impl ManagedBuffer {
    /// Allocates `bytes` of zeros. Limits all managed memory together to what the device has free: the driver would allow more, but a
    /// device that pages memory in and out can stop making progress.
    pub fn zeroed(gpu: &Arc<Gpu>, tag: Tag, bytes: usize) -> Result<ManagedBuffer> {
        check_managed(gpu.ordinal())?;
        let claim = Claim::new(tag, bytes)?;
        let (free, _) = gpu.memory()?;
        let before = ALLOCATED.fetch_add(bytes as u64, Relaxed);
        let share = Share(bytes as u64);
        if before.saturating_add(bytes as u64) > free as u64 {
            bail!(
                OutOfMemory,
                "{bytes} bytes of managed memory beside the {before} that are in use are more than the {free} that {gpu:?} has free"
            );
        }
        let address = match bytes {
            0 => 0,
            _ => {
                let global = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL;
                // SAFETY: the context is current; the memory is freed once, in `drop`.
                let allocated = unsafe { result::malloc_managed(bytes, global) };
                check(allocated, "allocating managed memory")
                    .map_err(|e| e.within(format_args!("{bytes} bytes for {}", tag.name())))?
            }
        };
        let mut buffer = ManagedBuffer {
            gpu: gpu.clone(),
            address,
            bytes,
            _claim: claim,
        };
        // From here on `drop` gives it back.
        std::mem::forget(share);
        buffer.bytes_mut().fill(0);
        Ok(buffer)
    }

    /// The device that it was allocated for.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Its address, for host and devices; 0 if it is empty.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bytes, for the host to write before any device uses them.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: allocated for as many bytes, at an address of the host too, which every device lets the host use at any
        // time; borrowed exclusively. The driver's addresses have no provenance here but the one exposed.
        unsafe {
            let data = std::ptr::with_exposed_provenance_mut(self.address as usize);
            std::slice::from_raw_parts_mut(data, self.bytes)
        }
    }

    /// Advises the driver of the preferred device, and whether the memory is read far more often than written.
    pub fn advise(&self, preferred: Option<&Gpu>, read_mostly: bool) -> Result<()> {
        use sys::CUmem_advise::*;
        self.gpu.bind()?;
        if self.bytes == 0 {
            return Ok(());
        }
        let advise = |advice, location| {
            // SAFETY: all of it is managed memory.
            let advised = unsafe { result::mem_advise(self.address, self.bytes, advice, location) };
            check(advised, "advising about managed memory")
        };
        if let Some(gpu) = preferred {
            advise(CU_MEM_ADVISE_SET_PREFERRED_LOCATION, location(Some(gpu)))?;
        }
        if read_mostly {
            advise(CU_MEM_ADVISE_SET_READ_MOSTLY, location(Some(&self.gpu)))?;
        }
        Ok(())
    }
}

fn location(gpu: Option<&Gpu>) -> sys::CUmemLocation {
    use sys::CUmemLocationType::*;
    match gpu {
        Some(gpu) => sys::CUmemLocation {
            type_: CU_MEM_LOCATION_TYPE_DEVICE,
            id: gpu.ordinal() as i32,
        },
        None => sys::CUmemLocation {
            type_: CU_MEM_LOCATION_TYPE_HOST,
            id: 0,
        },
    }
}

/// Enqueues on `gpu` that managed memory moves to the device `to`, or to the host if `None`.
///
/// # Safety
/// The range must be managed memory.
pub(in crate::cuda) unsafe fn prefetch(
    gpu: &Gpu,
    address: u64,
    bytes: usize,
    to: Option<&Gpu>,
) -> Result<()> {
    gpu.bind()?;
    if bytes == 0 {
        return Ok(());
    }
    check(
        // SAFETY: the caller's promise.
        unsafe { result::mem_prefetch_async(address, bytes, location(to), gpu.stream()) },
        "moving managed memory",
    )
}

impl Drop for ManagedBuffer {
    fn drop(&mut self) {
        ALLOCATED.fetch_sub(self.bytes as u64, Relaxed);
        if self.address != 0 {
            // Managed memory is not freed in stream order: all work that may still use it comes first.
            let _ = self.gpu.after_host_stream();
            let _ = self.gpu.synchronize();
            // SAFETY: allocated in `zeroed` and not used any more. A failure means that the context is broken, which every
            // further call reports.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

impl fmt::Debug for ManagedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ManagedBuffer[{}] on {:?}", self.bytes, self.gpu)
    }
}
