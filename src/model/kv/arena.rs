//! The memory of a group's blocks, in host memory or on a GPU.

use std::sync::{Arc, Mutex};

use super::group::KvGroup;
use super::{HOST_PAGE, KvLayout, KvPages, KvType};
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::base::lock::lock;
use crate::base::memory::{Buffer, Claim, Tag};
use crate::base::size::{product, readable};
use crate::cuda::{self, Arena, Arenas, DeviceSlice, Gpu};

/// Memory limit of a model's blocks: an amount set aside when it was loaded, or the process's budget.
pub(super) struct Reserve {
    tag: Tag,
    bytes: Option<usize>,
    left: Mutex<Option<Claim>>,
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

    /// Bytes set aside, if any were.
    pub(super) fn bytes(&self) -> Option<usize> {
        self.bytes
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

/// The blocks of one group. All functions may be called from any thread; whoever reads or writes a block owns it.
pub struct KvArena {
    store: Store,
    reserve: Arc<Reserve>,
    layers: usize,
    layout: KvLayout,
    window: Option<usize>,
    /// Positions of a block.
    positions: usize,
    block_bytes: usize,
    /// How often each block was taken.
    taken: Mutex<Vec<u32>>,
}

impl KvArena {
    pub(super) fn in_host_memory(
        group: &KvGroup,
        kind: KvType,
        reserve: &Arc<Reserve>,
    ) -> Result<KvArena> {
        let store = Store::Host(Mutex::default());
        Self::new(group, kind, HOST_PAGE, store, reserve)
    }

    pub(super) fn in_device_memory(
        group: &KvGroup,
        arenas: &Arc<Arenas>,
        reserve: &Arc<Reserve>,
    ) -> Result<KvArena> {
        let gpu = arenas.gpu();
        // Addresses cost nothing: there are enough for all memory of the device.
        let bytes = match reserve.bytes() {
            Some(bytes) => bytes,
            None => gpu.memory()?.1,
        };
        let block_bytes = block_bytes(group, KvType::F16, cuda::PAGE)?;
        let store = Store::Gpu {
            gpu: gpu.clone(),
            // Block numbers begin at 1.
            arena: Arena::new(arenas, bytes.saturating_add(2 * block_bytes))?,
            claims: Mutex::default(),
        };
        Self::new(group, KvType::F16, cuda::PAGE, store, reserve)
    }

    fn new(
        group: &KvGroup,
        kind: KvType,
        positions: usize,
        store: Store,
        reserve: &Arc<Reserve>,
    ) -> Result<KvArena> {
        Ok(KvArena {
            store,
            reserve: reserve.clone(),
            layers: group.layers.len(),
            layout: KvLayout::new(group.kv_heads, group.head_dim, kind)?,
            window: group.window,
            positions,
            block_bytes: block_bytes(group, kind, positions)?,
            taken: Mutex::default(),
        })
    }

    /// Positions of a block.
    pub fn block_positions(&self) -> usize {
        self.positions
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Positions that a token sees, its own included; all if `None`.
    pub fn window(&self) -> Option<usize> {
        self.window
    }

    /// Layers of the group.
    pub(super) fn layers(&self) -> usize {
        self.layers
    }

    /// Shape of a page of a session file, and of host memory.
    pub(super) fn layout(&self) -> KvLayout {
        self.layout
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
    pub fn take(&self, block: u32) -> Result<()> {
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
    pub(in crate::model) fn taken(&self, block: u32) -> u32 {
        lock(&self.taken).get(block as usize).copied().unwrap_or(0)
    }

    /// Frees the memory of a block.
    pub fn free(&self, block: u32) {
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
    pub fn copy(&self, from: u32, to: u32) -> Result<()> {
        match &self.store {
            Store::Host(blocks) => {
                let mut blocks = lock(blocks);
                let absent = || err!(Internal, "block {from} or {to} of the KV cache is free");
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
    fn range(&self, block: u32) -> std::ops::Range<usize> {
        let start = block as usize * self.block_bytes;
        start..start + self.block_bytes
    }

    /// Bytes of a layer's page.
    pub(super) fn page_bytes(&self) -> usize {
        self.block_bytes / self.layers.max(1)
    }

    /// Writes rows of a layer from position `first` on.
    pub(super) fn store_on_host(
        &self,
        layer: usize,
        blocks: &[u32],
        first: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<()> {
        let Store::Host(memory) = &self.store else {
            bail!(Internal, "rows in host memory for a cache on a GPU");
        };
        let mut memory = lock(memory);
        let page = self.page_bytes();
        for (i, (keys, values)) in self.layout.rows(keys, values)?.enumerate() {
            let position = first + i;
            let block = blocks.get(position / self.positions);
            let buffer = block.and_then(|&block| memory.get_mut(block as usize)?.as_mut());
            let Some(buffer) = buffer else {
                bail!(Internal, "position {position} of a sequence has no block");
            };
            let page = &mut buffer[layer * page..(layer + 1) * page];
            let slot = position % self.positions;
            self.layout.write(page, slot, keys, values)?;
        }
        Ok(())
    }

    /// Calls `work` with the pages of a layer in host memory.
    pub(super) fn with_pages<T>(
        &self,
        layer: usize,
        blocks: &[u32],
        work: impl FnOnce(KvPages<'_>) -> Result<T>,
    ) -> Result<T> {
        let Store::Host(memory) = &self.store else {
            bail!(Internal, "a cache on a GPU for rows in host memory");
        };
        let memory = lock(memory);
        let page = self.page_bytes();
        let pages = blocks.iter().map(|&block| {
            let buffer = memory.get(block as usize).and_then(Option::as_ref);
            buffer.map_or(&[][..], |buffer| &buffer[layer * page..(layer + 1) * page])
        });
        work(KvPages::new(self.layout, pages.collect())?)
    }

    /// Changes the page of a layer in host memory.
    pub(super) fn with_page_mut(
        &self,
        layer: usize,
        block: u32,
        work: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let Store::Host(memory) = &self.store else {
            bail!(Internal, "a page of a cache on a GPU for host memory");
        };
        let mut memory = lock(memory);
        let page = self.page_bytes();
        match memory.get_mut(block as usize).and_then(Option::as_mut) {
            Some(buffer) => work(&mut buffer[layer * page..(layer + 1) * page]),
            None => bail!(Internal, "block {block} of the KV cache is free"),
        }
    }

    /// The page of a layer on a GPU.
    pub(super) fn page_on_gpu(&self, layer: usize, block: u32) -> Result<DeviceSlice<'_>> {
        let Store::Gpu { arena, .. } = &self.store else {
            bail!(Internal, "a page of host memory for a GPU");
        };
        let page = self.page_bytes();
        arena
            .slice(self.range(block))?
            .part(layer * page..(layer + 1) * page)
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

/// Bytes of a block of `positions` positions.
fn block_bytes(group: &KvGroup, kind: KvType, positions: usize) -> Result<usize> {
    let layout = KvLayout::new(group.kv_heads, group.head_dim, kind)?;
    let page = layout.page_bytes() / HOST_PAGE * positions;
    product("a block of the KV cache", &[group.layers.len(), page])
}

fn put<T>(places: &mut Vec<Option<T>>, index: usize, value: T) -> Result<()> {
    if places.len() <= index {
        places.resize_with(index + 1, || None);
    }
    match places[index].replace(value) {
        None => Ok(()),
        Some(_) => bail!(Internal, "block {index} of the KV cache is in use"),
    }
}

impl std::fmt::Debug for KvArena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "KvArena({} layers, {} bytes a block of {})",
            self.layers, self.block_bytes, self.positions
        )
    }
}
