//! Arenas of device memory: a range of addresses, reserved once, into which physical memory is mapped in chunks as it is needed. Memory in
//! use keeps its address, so kernels find it by its offset.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::sys;

use super::attached::Attached;
use super::error::check;
use super::gpu::Gpu;
use super::loading::attribute;
use super::memory::DeviceSlice;
use crate::base::error::{bail, err};
use crate::base::lock::lock;
use crate::base::{ErrorKind, Result};

/// Bytes of a chunk, a multiple of every device's granularity.
const CHUNK: usize = 16 << 20;

/// Physical memory of one chunk.
struct Chunk(sys::CUmemGenericAllocationHandle);

impl Chunk {
    fn new(gpu: &Gpu) -> Result<Chunk> {
        gpu.bind()?;
        let mut handle = 0;
        let properties = properties(gpu);
        // SAFETY: the properties are complete, and the size is a multiple of the granularity.
        let made = unsafe { sys::cuMemCreate(&mut handle, CHUNK, &properties, 0) };
        check(made.result(), "allocating a chunk of an arena")?;
        Ok(Chunk(handle))
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: created once, and released once; the driver frees the memory when it is mapped nowhere.
        let _ = unsafe { sys::cuMemRelease(self.0) };
    }
}

fn properties(gpu: &Gpu) -> sys::CUmemAllocationProp {
    // SAFETY: a plain C struct of integers and pointers, all of which may be zero.
    let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location(gpu);
    properties
}

fn location(gpu: &Gpu) -> sys::CUmemLocation {
    // SAFETY: as above.
    let mut location: sys::CUmemLocation = unsafe { std::mem::zeroed() };
    location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = gpu.ordinal() as i32;
    location
}

/// Arenas that share their physical memory.
pub struct Arenas {
    gpu: Arc<Gpu>,
    /// Chunks that are mapped nowhere.
    idle: Mutex<Vec<Chunk>>,
    /// Whether all chunks were allocated at once, and no other may be.
    is_fixed: bool,
    all: Mutex<Vec<Weak<Inner>>>,
}

impl Arenas {
    /// The device of the memory.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Arenas that allocate chunks as they need them.
    pub fn growing(gpu: &Arc<Gpu>) -> Result<Arc<Arenas>> {
        Self::with(gpu, Vec::new(), false)
    }

    /// Bytes of the device that `count` arenas with `bytes` of memory in all take: no two share a chunk.
    pub fn physical_bytes(bytes: u64, count: usize) -> u64 {
        let chunks = bytes.div_ceil(CHUNK as u64) + count as u64;
        chunks.saturating_mul(CHUNK as u64)
    }

    /// Arenas with `bytes` of memory in all, allocated now.
    pub fn fixed(gpu: &Arc<Gpu>, bytes: usize, count: usize) -> Result<Arc<Arenas>> {
        let chunks = Self::physical_bytes(bytes as u64, count) as usize / CHUNK;
        let idle = (0..chunks).map(|_| Chunk::new(gpu));
        let idle = idle.collect::<Result<_>>().map_err(|e| {
            let (free, total) = gpu.memory().unwrap_or_default();
            e.within(format_args!(
                "reserving {bytes} bytes, where {free} of {total} are free"
            ))
        })?;
        Self::with(gpu, idle, true)
    }

    fn with(gpu: &Arc<Gpu>, idle: Vec<Chunk>, is_fixed: bool) -> Result<Arc<Arenas>> {
        let which =
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
        if attribute(gpu.device(), which)? == 0 {
            bail!(
                Unsupported,
                "the driver cannot map memory into reserved addresses on {gpu:?}; run the model on the CPU"
            );
        }
        let arenas = Arc::new(Arenas {
            gpu: gpu.clone(),
            idle: Mutex::new(idle),
            is_fixed,
            all: Mutex::default(),
        });
        let trimmed = gpu.attached_or(|| Ok(Trimmed::default()))?;
        let mut known = lock(&trimmed.0);
        known.retain(|a| a.strong_count() > 0);
        known.push(Arc::downgrade(&arenas));
        Ok(arenas)
    }

    /// A chunk that is mapped nowhere: an idle one, a new one, or one that an arena holds without using it.
    fn chunk(&self) -> Result<Chunk> {
        if let Some(chunk) = lock(&self.idle).pop() {
            return Ok(chunk);
        }
        if self.is_fixed {
            self.unmap_unused()?;
            return lock(&self.idle).pop().ok_or_else(|| {
                err!(
                    OutOfMemory,
                    "the memory that was reserved when the model was loaded is in use"
                )
            });
        }
        let refused = |e: &crate::base::Error| e.kind() == ErrorKind::OutOfMemory;
        Chunk::new(&self.gpu).or_else(|e| match refused(&e) {
            true => {
                // Other allocations may keep memory that they do not use.
                self.gpu.empty_cache()?;
                Chunk::new(&self.gpu)
            }
            false => Err(e),
        })
    }

    /// Unmaps all chunks that no block uses.
    fn unmap_unused(&self) -> Result<()> {
        // Work in flight may still use what was freed, also that of the device's stream while this thread is in a lane.
        self.gpu.wait_for_all()?;
        let all: Vec<_> = lock(&self.all).iter().filter_map(Weak::upgrade).collect();
        let unmapped = all.iter().flat_map(|arena| arena.unmap_unused());
        let unmapped: Vec<Chunk> = unmapped.collect();
        lock(&self.idle).extend(unmapped);
        Ok(())
    }
}

/// The arenas of a device, which give memory back when its caches are emptied.
#[derive(Default)]
struct Trimmed(Mutex<Vec<Weak<Arenas>>>);

impl Attached for Trimmed {
    fn held(&self) -> (usize, usize) {
        let (mut used, mut kept) = (0, 0);
        let known: Vec<_> = lock(&self.0).iter().filter_map(Weak::upgrade).collect();
        for arenas in known {
            kept += lock(&arenas.idle).len();
            let all: Vec<_> = lock(&arenas.all).iter().filter_map(Weak::upgrade).collect();
            for arena in all {
                let places = lock(&arena.places);
                let mapped = || places.iter().filter(|place| place.mapped.is_some());
                let in_use = mapped().filter(|place| place.users > 0).count();
                used += in_use;
                kept += mapped().count() - in_use;
            }
        }
        (used * CHUNK, kept * CHUNK)
    }

    fn trim(&self) {
        let known: Vec<_> = lock(&self.0).iter().filter_map(Weak::upgrade).collect();
        for arenas in known.iter().filter(|a| !a.is_fixed) {
            // A failure means that the context is broken, which every further call reports.
            if arenas.unmap_unused().is_ok() {
                lock(&arenas.idle).clear();
            }
        }
    }
}

/// The chunk at one place of an arena.
#[derive(Default)]
struct Place {
    mapped: Option<Chunk>,
    /// Blocks that use it.
    users: usize,
}

struct Inner {
    gpu: Arc<Gpu>,
    address: u64,
    bytes: usize,
    places: Mutex<Vec<Place>>,
}

impl Inner {
    fn unmap_unused(&self) -> Vec<Chunk> {
        let mut places = lock(&self.places);
        let unused = places.iter_mut().enumerate().filter(|(_, p)| p.users == 0);
        let unmapped = unused.filter_map(|(index, place)| {
            let chunk = place.mapped.take()?;
            self.unmap(index);
            Some(chunk)
        });
        unmapped.collect()
    }

    fn map(&self, index: usize, chunk: &Chunk) -> Result<()> {
        let address = self.address + (index * CHUNK) as u64;
        // SAFETY: the place is within the reserved addresses, and nothing is mapped there.
        let mapped = unsafe { sys::cuMemMap(address, CHUNK, 0, chunk.0, 0) };
        check(mapped.result(), "mapping a chunk of an arena")?;
        let access = sys::CUmemAccessDesc {
            location: location(&self.gpu),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: just mapped.
        let allowed = unsafe { sys::cuMemSetAccess(address, CHUNK, &access, 1) };
        check(allowed.result(), "making a chunk of an arena accessible")
            .inspect_err(|_| self.unmap(index))
    }

    fn unmap(&self, index: usize) {
        let address = self.address + (index * CHUNK) as u64;
        if self.gpu.bind().is_ok() {
            // SAFETY: mapped by `map`; whoever unmaps it has waited for the work that used it.
            let _ = unsafe { sys::cuMemUnmap(address, CHUNK) };
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.gpu.bind().is_err() || self.gpu.wait().is_err() {
            return;
        }
        let places = self
            .places
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        let mapped: Vec<usize> = (0..places.len())
            .filter(|i| places[*i].mapped.is_some())
            .collect();
        mapped.into_iter().for_each(|index| self.unmap(index));
        // SAFETY: reserved by `Arena::new`, and nothing is mapped there any more.
        let _ = unsafe { sys::cuMemAddressFree(self.address, self.bytes) };
    }
}

/// A range of addresses in which memory comes and goes.
pub struct Arena {
    inner: Arc<Inner>,
    arenas: Arc<Arenas>,
}

impl Arena {
    /// Reserves at least `bytes` of addresses, which takes no memory.
    pub fn new(arenas: &Arc<Arenas>, bytes: usize) -> Result<Arena> {
        let (gpu, bytes) = (&arenas.gpu, bytes.next_multiple_of(CHUNK));
        gpu.bind()?;
        let mut address = 0;
        // SAFETY: writes an address to the variable.
        let reserved = unsafe { sys::cuMemAddressReserve(&mut address, bytes, CHUNK, 0, 0) };
        check(reserved.result(), "reserving addresses for an arena")?;
        let inner = Arc::new(Inner {
            gpu: gpu.clone(),
            address,
            bytes,
            places: Mutex::default(),
        });
        lock(&arenas.all).push(Arc::downgrade(&inner));
        Ok(Arena {
            inner,
            arenas: arenas.clone(),
        })
    }

    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.inner.address
    }

    /// Memory for `range`, with any contents. Counted, so that [`Arena::release`] must follow.
    pub fn take(&self, range: Range<usize>) -> Result<()> {
        if range.end > self.inner.bytes {
            bail!(
                OutOfMemory,
                "bytes {range:?} of an arena of {}",
                self.inner.bytes
            );
        }
        self.inner.gpu.bind()?;
        let chunks = range.start / CHUNK..range.end.div_ceil(CHUNK);
        for index in chunks.clone() {
            let taken = self.take_chunk(index);
            if let Err(e) = taken {
                self.release_chunks(chunks.start..index);
                return Err(e);
            }
        }
        Ok(())
    }

    fn take_chunk(&self, index: usize) -> Result<()> {
        let mut chunk = None;
        loop {
            let mut places = lock(&self.inner.places);
            if places.len() <= index {
                places.resize_with(index + 1, Place::default);
            }
            let place = &mut places[index];
            if place.mapped.is_none() {
                match chunk.take() {
                    Some(chunk) => {
                        self.inner.map(index, &chunk)?;
                        place.mapped = Some(chunk);
                    }
                    None => {
                        // Another arena may have to give one up, and that may be this one.
                        drop(places);
                        chunk = Some(self.arenas.chunk()?);
                        continue;
                    }
                }
            }
            place.users += 1;
            lock(&self.arenas.idle).extend(chunk);
            return Ok(());
        }
    }

    /// Gives `range` back. Its memory stays mapped until another arena needs it, or the device's caches are emptied.
    pub fn release(&self, range: Range<usize>) {
        self.release_chunks(range.start / CHUNK..range.end.div_ceil(CHUNK));
    }

    fn release_chunks(&self, chunks: Range<usize>) {
        let mut places = lock(&self.inner.places);
        for index in chunks {
            debug_assert!(places[index].users > 0);
            places[index].users -= 1;
        }
    }

    /// Bytes that are mapped, used or not.
    pub fn mapped(&self) -> usize {
        let places = lock(&self.inner.places);
        places.iter().filter(|p| p.mapped.is_some()).count() * CHUNK
    }

    /// The bytes of `range`, which must be taken.
    pub fn slice(&self, range: Range<usize>) -> Result<DeviceSlice<'_>> {
        {
            let places = lock(&self.inner.places);
            let is_taken = |index: usize| places.get(index).is_some_and(|p| p.users > 0);
            if !(range.start / CHUNK..range.end.div_ceil(CHUNK)).all(is_taken) {
                bail!(Internal, "bytes {range:?} of an arena are not in use");
            }
        }
        let address = self.inner.address + range.start as u64;
        // SAFETY: mapped, and it stays so until the caller gives it back.
        Ok(unsafe { DeviceSlice::new(&self.inner.gpu, address, range.len()) })
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena[{} of {}]", self.mapped(), self.inner.bytes)
    }
}
