//! The keys and values of a group's layers, in blocks of some positions.

use std::any::Any;
use std::sync::Arc;

use super::blocks::{BlockArena, Reserve};
use super::group::KvGroup;
use super::{HOST_PAGE, KvLayout, KvPages, KvType};
use crate::base::Result;
use crate::base::error::bail;
use crate::base::size::product;
use crate::cuda::{self, Arenas, DeviceSlice, Gpu, KvShape};

/// The blocks of one group. All functions may be called from any thread; whoever reads or writes a block owns it.
pub struct KvArena {
    blocks: BlockArena,
    layers: usize,
    layout: KvLayout,
    window: Option<usize>,
    /// Positions of a block.
    positions: usize,
}

impl KvArena {
    pub(super) fn in_host_memory(
        group: &KvGroup,
        kind: KvType,
        reserve: &Arc<Reserve>,
    ) -> Result<KvArena> {
        let bytes = block_bytes(group, kind, HOST_PAGE)?;
        let blocks = BlockArena::in_host_memory(bytes, reserve);
        Self::new(group, kind, HOST_PAGE, blocks)
    }

    pub(super) fn in_device_memory(
        group: &KvGroup,
        kind: KvType,
        arenas: &Arc<Arenas>,
        reserve: &Arc<Reserve>,
    ) -> Result<KvArena> {
        let bytes = block_bytes(group, kind, cuda::PAGE)?;
        let blocks = BlockArena::in_device_memory(bytes, arenas, reserve)?;
        Self::new(group, kind, cuda::PAGE, blocks)
    }

    fn new(group: &KvGroup, kind: KvType, positions: usize, blocks: BlockArena) -> Result<KvArena> {
        Ok(KvArena {
            blocks,
            layers: group.layers.len(),
            layout: KvLayout::new(group.kv_heads, group.head_dim, kind)?,
            window: group.window,
            positions,
        })
    }

    /// Positions of a block.
    pub fn block_positions(&self) -> usize {
        self.positions
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.blocks.block_bytes()
    }

    /// Positions that a token sees, its own included; all if `None`.
    pub fn window(&self) -> Option<usize> {
        self.window
    }

    /// Takes the locks of its blocks until the result is dropped.
    pub(super) fn locked(&'static self) -> Box<dyn Any> {
        self.blocks.locked()
    }

    /// Layers of the group.
    pub(super) fn layers(&self) -> usize {
        self.layers
    }

    /// Shape of a page of a session file, and of host memory.
    pub(super) fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Shape of a page on a GPU.
    pub(super) fn shape(&self) -> KvShape {
        KvShape {
            heads: self.layout.heads(),
            dim: self.layout.dim(),
            kind: self.layout.kind(),
        }
    }

    /// The GPU that it is on.
    pub(super) fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.blocks.gpu()
    }

    /// Memory for a block that has none, filled with zeros.
    pub fn take(&self, block: u32) -> Result<()> {
        self.blocks.take(block)
    }

    /// How often a block was taken: it has other contents whenever this changes.
    pub(in crate::model) fn taken(&self, block: u32) -> u32 {
        self.blocks.taken(block)
    }

    /// Frees the memory of a block.
    pub fn free(&self, block: u32) {
        self.blocks.free(block);
    }

    /// Copies all of block `from` to block `to`.
    pub fn copy(&self, from: u32, to: u32) -> Result<()> {
        self.blocks.copy(from, to)
    }

    /// Bytes of a layer's page.
    pub(super) fn page_bytes(&self) -> usize {
        self.block_bytes() / self.layers.max(1)
    }

    /// The bytes of a layer's page within a block.
    fn page(&self, layer: usize) -> std::ops::Range<usize> {
        let page = self.page_bytes();
        layer * page..(layer + 1) * page
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
        for (i, (keys, values)) in self.layout.rows(keys, values)?.enumerate() {
            let position = first + i;
            let Some(&block) = blocks.get(position / self.positions) else {
                bail!(Internal, "position {position} of a sequence has no block");
            };
            // SAFETY: a block of the tables of the rows' sequence, which alone uses it.
            let page = unsafe { self.page_to_write(layer, block) }?;
            self.layout
                .write(page, position % self.positions, keys, values)?;
        }
        Ok(())
    }

    /// The pages of a layer in host memory, empty where positions are no longer kept.
    ///
    /// # Safety
    /// As of [`KvArena::page_to_read`], for each block.
    pub(super) unsafe fn pages(&self, layer: usize, blocks: &[u32]) -> Result<KvPages<'_>> {
        // SAFETY: the caller's.
        let pages = unsafe { self.blocks.read_each(blocks, self.page(layer)) }?;
        KvPages::new(self.layout, pages)
    }

    /// The page of a layer in host memory.
    ///
    /// # Safety
    /// The caller has [`KvTables`](super::KvTables) with the block as long as the result lives.
    pub(super) unsafe fn page_to_read(&self, layer: usize, block: u32) -> Result<&[u8]> {
        // SAFETY: the caller's: a user of the block keeps it. Blocks that several use are not written.
        unsafe { self.blocks.read(block, self.page(layer)) }
    }

    /// The page of a layer in host memory, to change.
    ///
    /// # Safety
    /// As of [`KvArena::page_to_read`], and the tables are those of the block's only user, who has no other reference to the page.
    #[expect(clippy::mut_from_ref, reason = "the block has one user")]
    pub(super) unsafe fn page_to_write(&self, layer: usize, block: u32) -> Result<&mut [u8]> {
        // SAFETY: the caller's.
        unsafe { self.blocks.write(block, self.page(layer)) }
    }

    /// The page of a layer on a GPU.
    pub(super) fn page_on_gpu(&self, layer: usize, block: u32) -> Result<DeviceSlice<'_>> {
        self.blocks.on_gpu(block, self.page(layer))
    }

    /// The address of block 0 on a GPU.
    pub(super) fn address(&self) -> Result<u64> {
        self.blocks.address()
    }
}

/// Bytes of a block of `positions` positions.
pub(super) fn block_bytes(group: &KvGroup, kind: KvType, positions: usize) -> Result<usize> {
    let layout = KvLayout::new(group.kv_heads, group.head_dim, kind)?;
    let page = layout.page_bytes() / HOST_PAGE * positions;
    product("a block of the KV cache", &[group.layers.len(), page])
}

impl std::fmt::Debug for KvArena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "KvArena({} layers, {} bytes a block of {})",
            self.layers,
            self.block_bytes(),
            self.positions
        )
    }
}
