//! Memory in numbered blocks of one size, in host memory or on a GPU.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use super::NULL_BLOCK;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::base::lock::lock;
use crate::base::memory::{Buffer, Claim, Tag};
use crate::base::size::readable;
use crate::cuda::{Arena, Arenas, DeviceSlice, Gpu};

/// Memory limit of a model's blocks: an amount set aside when it was loaded, or the process's budget.
pub(super) struct Reserve {
    tag: Tag,
    bytes: Option<usize>,
    left: Mutex<Option<Claim>>,
}

/// Memory set aside for the blocks of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// Bytes in all.
    pub bytes: usize,
    /// Bytes that no block takes.
    pub free: usize,
}

impl Reserve {
    pub(super) fn new(tag: Tag, bytes: Option<usize>) -> Result<Reserve> {
        let claim = bytes.map(|bytes| Claim::new(tag, bytes)).transpose()?;
        Ok(Reserve {
            tag,
            bytes,
            left: Mutex::new(claim),
        })
    }

    /// Takes the lock on what is left until the result is dropped.
    pub(super) fn locked(&'static self) -> Box<dyn Any> {
        Box::new(lock(&self.left))
    }

    /// Bytes set aside, if any were.
    pub(super) fn bytes(&self) -> Option<usize> {
        self.bytes
    }

    /// The bytes set aside, all and free, if any were.
    pub(super) fn now(&self) -> Option<Reserved> {
        let left = lock(&self.left);
        Some(Reserved {
            bytes: self.bytes?,
            free: left.as_ref()?.bytes(),
        })
    }

    fn take(&self, bytes: usize) -> Result<Claim> {
        match (&mut *lock(&self.left), self.bytes) {
            (Some(left), Some(all)) => left.split(bytes).ok_or_else(|| {
                err!(
                    OutOfMemory,
                    "the {} that are reserved for keys and values are in use, and a block takes {}; end sessions, or load the model with more",
                    readable(all as u64),
                    readable(bytes as u64)
                )
            }),
            _ => Claim::new(self.tag, bytes),
        }
    }

    fn give_back(&self, claim: Claim) {
        if let Some(left) = &mut *lock(&self.left) {
            left.join(claim);
        }
    }
}

/// Memory of the blocks, by number.
enum Store {
    Host(Mutex<Vec<Option<Buffer<u8>>>>),
    Gpu {
        gpu: Arc<Gpu>,
        arena: Arena,
        claims: Mutex<Vec<Option<Claim>>>,
    },
}

/// Blocks of one size, by number from 1 on. All functions may be called from any thread; whoever reads or writes a block owns it.
pub(super) struct BlockArena {
    store: Store,
    reserve: Arc<Reserve>,
    block_bytes: usize,
    /// How often each block was taken.
    taken: Mutex<Vec<u32>>,
}

impl BlockArena {
    pub(super) fn in_host_memory(block_bytes: usize, reserve: &Arc<Reserve>) -> BlockArena {
        Self::new(Store::Host(Mutex::default()), block_bytes, reserve)
    }

    pub(super) fn in_device_memory(
        block_bytes: usize,
        arenas: &Arc<Arenas>,
        reserve: &Arc<Reserve>,
    ) -> Result<BlockArena> {
        let gpu = arenas.gpu();
        // Addresses cost nothing: there are enough for all memory of the device.
        let bytes = match reserve.bytes() {
            Some(bytes) => bytes,
            None => gpu.memory()?.1,
        };
        let store = Store::Gpu {
            gpu: gpu.clone(),
            // Block numbers begin at 1.
            arena: Arena::new(arenas, bytes.saturating_add(2 * block_bytes))?,
            claims: Mutex::default(),
        };
        Ok(Self::new(store, block_bytes, reserve))
    }

    fn new(store: Store, block_bytes: usize, reserve: &Arc<Reserve>) -> BlockArena {
        BlockArena {
            store,
            reserve: reserve.clone(),
            block_bytes,
            taken: Mutex::default(),
        }
    }

    /// Takes the locks of its blocks until the result is dropped.
    pub(super) fn locked(&'static self) -> Box<dyn Any> {
        let blocks: Box<dyn Any> = match &self.store {
            Store::Host(blocks) => Box::new(lock(blocks)),
            Store::Gpu { claims, .. } => Box::new(lock(claims)),
        };
        Box::new((blocks, lock(&self.taken)))
    }

    /// Bytes of a block.
    pub(super) fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// The GPU that it is on.
    pub(super) fn gpu(&self) -> Option<&Arc<Gpu>> {
        match &self.store {
            Store::Host(_) => None,
            Store::Gpu { gpu, .. } => Some(gpu),
        }
    }

    /// Memory for a block that has none, filled with zeros: kernels multiply positions that are not written yet by zero, so they must not
    /// hold NaN.
    pub(super) fn take(&self, block: u32) -> Result<()> {
        let claim = self.reserve.take(self.block_bytes)?;
        let index = block as usize;
        {
            let mut taken = lock(&self.taken);
            let len = taken.len().max(index + 1);
            taken.resize(len, 0);
            taken[index] = taken[index].wrapping_add(1);
        }
        match &self.store {
            Store::Host(blocks) => {
                let buffer = Buffer::claimed(claim, self.block_bytes);
                let buffer = buffer.map_err(|(e, claim)| {
                    self.reserve.give_back(claim);
                    e
                })?;
                put(&mut lock(blocks), index, buffer)
            }
            Store::Gpu { arena, claims, .. } => {
                let range = self.range(block);
                if let Err(e) = arena.take(range.clone()) {
                    self.reserve.give_back(claim);
                    return Err(e);
                }
                put(&mut lock(claims), index, claim)?;
                let cleared = arena
                    .slice(range)
                    .and_then(|all| all.clear(self.block_bytes));
                cleared.inspect_err(|_| self.free(block))
            }
        }
    }

    /// How often a block was taken: it has other contents whenever this changes.
    pub(super) fn taken(&self, block: u32) -> u32 {
        lock(&self.taken).get(block as usize).copied().unwrap_or(0)
    }

    /// Frees the memory of a block.
    pub(super) fn free(&self, block: u32) {
        let index = block as usize;
        match &self.store {
            Store::Host(blocks) => {
                let buffer = lock(blocks).get_mut(index).and_then(Option::take);
                if let Some(buffer) = buffer {
                    self.reserve.give_back(buffer.into_claim());
                }
            }
            Store::Gpu { arena, claims, .. } => {
                let claim = lock(claims).get_mut(index).and_then(Option::take);
                if let Some(claim) = claim {
                    arena.release(self.range(block));
                    self.reserve.give_back(claim);
                }
            }
        }
    }

    /// Copies all of block `from` to block `to`.
    pub(super) fn copy(&self, from: u32, to: u32) -> Result<()> {
        match &self.store {
            Store::Host(blocks) => {
                let mut blocks = lock(blocks);
                let absent = || err!(Internal, "block {from} or {to} is free");
                let [from, to] = blocks
                    .get_disjoint_mut([from as usize, to as usize])
                    .map_err(|_| absent())?;
                let (from, to) = from.as_ref().zip(to.as_mut()).ok_or_else(absent)?;
                to.copy_from_slice(from);
                Ok(())
            }
            Store::Gpu { arena, .. } => {
                let from = arena.slice(self.range(from))?;
                let to = arena.slice(self.range(to))?;
                to.copy_from(0, &from, 0, self.block_bytes)
            }
        }
    }

    /// Bytes of a block from the start of the arena on.
    fn range(&self, block: u32) -> Range<usize> {
        let start = block as usize * self.block_bytes;
        start..start + self.block_bytes
    }

    /// Some bytes of a block in host memory, to read. The arena is not locked meanwhile: callbacks of a pass may free other blocks.
    ///
    /// # Safety
    /// A user of the block keeps it as long as the result lives, and nobody writes these bytes meanwhile.
    pub(super) unsafe fn read(&self, block: u32, bytes: Range<usize>) -> Result<&[u8]> {
        // SAFETY: memory of the block, which the caller says is neither freed nor written.
        Ok(unsafe { &*self.bytes_of(&self.host()?, block, bytes)? })
    }

    /// Some bytes of each of several blocks, like [`BlockArena::read`]; an empty slice for [`NULL_BLOCK`].
    ///
    /// # Safety
    /// As of [`BlockArena::read`], for each block.
    pub(super) unsafe fn read_each(
        &self,
        blocks: &[u32],
        bytes: Range<usize>,
    ) -> Result<Vec<&[u8]>> {
        let held = self.host()?;
        let of_block = |&block: &u32| match block {
            NULL_BLOCK => Ok(&[][..]),
            // SAFETY: as in `read`.
            block => Ok(unsafe { &*self.bytes_of(&held, block, bytes.clone())? }),
        };
        blocks.iter().map(of_block).collect()
    }

    /// Some bytes of a block in host memory, to change, like [`BlockArena::read`].
    ///
    /// # Safety
    /// The caller is the only user of the block as long as the result lives.
    #[expect(
        clippy::mut_from_ref,
        reason = "the caller is the only user of the block"
    )]
    pub(super) unsafe fn write(&self, block: u32, bytes: Range<usize>) -> Result<&mut [u8]> {
        // SAFETY: memory of the block, which the caller says nobody else uses.
        Ok(unsafe { &mut *self.bytes_of(&self.host()?, block, bytes)? })
    }

    /// All blocks in host memory, by number.
    fn host(&self) -> Result<MutexGuard<'_, Vec<Option<Buffer<u8>>>>> {
        match &self.store {
            Store::Host(blocks) => Ok(lock(blocks)),
            Store::Gpu { .. } => bail!(Internal, "blocks on a GPU for host memory"),
        }
    }

    /// The address of some bytes of a block, which stays until the block is freed.
    fn bytes_of(
        &self,
        blocks: &[Option<Buffer<u8>>],
        block: u32,
        bytes: Range<usize>,
    ) -> Result<*mut [u8]> {
        match blocks.get(block as usize).and_then(Option::as_ref) {
            Some(buffer) if bytes.end <= buffer.len() && bytes.start <= bytes.end => {
                // SAFETY: within the buffer, as was just checked.
                let first = unsafe { buffer.address().as_ptr().add(bytes.start) };
                Ok(std::ptr::slice_from_raw_parts_mut(first, bytes.len()))
            }
            Some(_) => bail!(
                Internal,
                "bytes {bytes:?} of a block of {}",
                self.block_bytes
            ),
            None => bail!(Internal, "block {block} is free"),
        }
    }

    /// Some bytes of a block on a GPU.
    pub(super) fn on_gpu(&self, block: u32, bytes: Range<usize>) -> Result<DeviceSlice<'_>> {
        match &self.store {
            Store::Gpu { arena, .. } => arena.slice(self.range(block))?.part(bytes),
            Store::Host(_) => bail!(Internal, "blocks in host memory for a GPU"),
        }
    }

    /// The address of block 0 on a GPU.
    pub(super) fn address(&self) -> Result<u64> {
        match &self.store {
            Store::Gpu { arena, .. } => Ok(arena.address()),
            Store::Host(_) => bail!(
                InvalidArgument,
                "the cache is in host memory, and its model is on a GPU"
            ),
        }
    }
}

fn put<T>(places: &mut Vec<Option<T>>, index: usize, value: T) -> Result<()> {
    if places.len() <= index {
        places.resize_with(index + 1, || None);
    }
    match places[index].replace(value) {
        None => Ok(()),
        Some(_) => bail!(Internal, "block {index} is in use"),
    }
}
