//! The memory of what a model holds of a sequence. Keys and values: layers that are alike form a group, and each group has an arena of
//! blocks; a block holds some positions of all layers of its group, and a page is one layer's part of it. Recurrent layers have an arena
//! together, whose blocks each hold the state after one position. Knows which memory a block number means, and no sequence.

mod arena;
mod blocks;
mod file;
mod group;
mod sizes;
mod state;
mod tables;

use std::any::Any;
use std::sync::Arc;

pub use arena::KvArena;
use blocks::Reserve;
pub use blocks::Reserved;
use group::layer_groups;
pub use group::{KvGroup, KvLayerIndex};
pub use sizes::{BlockSizes, GroupBlocks};
use sizes::{check_kind, types_on_gpu};
pub use state::StateArena;
pub(super) use state::StatePart;
use state::{StateLayer, state_layers};
pub use tables::{KvTables, NULL_BLOCK, StateBlocks, StateTable};

use super::spec::Spec;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;
use crate::base::once::TryOnce;
use crate::cuda::{self, Arenas, CachedPages, DeviceBuffer, KvShape};
use crate::ops::attention::{self, CachedLayer, KvLayout, KvPages, KvType, PAGE as HOST_PAGE};
use crate::ops::{Device, Slice, SliceMut, Workspace};
use crate::tensor::AttentionShape;

/// Positions of a page of a file.
pub const FILE_PAGE: usize = HOST_PAGE;

/// The memory of a model's keys and values, in each format that its sequences use.
pub struct KvMemory {
    device: Device,
    groups: Vec<KvGroup>,
    /// Layers, the drafter's included.
    layers: usize,
    /// The layer of the drafter, if there is one.
    drafter: Option<usize>,
    state_layers: Vec<Option<StateLayer>>,
    reserve: Arc<Reserve>,
    /// The memory of all types on a GPU.
    arenas: Option<Arc<Arenas>>,
    /// Why a GPU cannot keep keys and values in 8 bits, if so.
    without_f8: Option<String>,
    caches: [TryOnce<Arc<KvCache>>; KvType::ALL.len()],
}

impl KvMemory {
    /// Memory for a model of this spec. `bytes`, if given, is reserved now, and is all that there will be; without it, memory is allocated
    /// as sequences grow. `without_f8` says why a GPU cannot keep the model's keys and values in 8 bits, if so.
    pub(super) fn new(
        device: &Device,
        spec: &Spec,
        bytes: Option<usize>,
        without_f8: Option<String>,
    ) -> Result<KvMemory> {
        let tag = match device {
            Device::Cpu(_) => Tag::KvCache,
            Device::Cuda(_) => Tag::DeviceKvCache,
        };
        let (groups, state_layers) = (KvGroup::of(spec), state_layers(spec));
        let reserve = Arc::new(Reserve::new(tag, bytes)?);
        let arenas = match device {
            Device::Cpu(_) => None,
            Device::Cuda(gpu) => {
                let of_type = groups.len() + usize::from(!state_layers.is_empty());
                let types = types_on_gpu(without_f8.as_deref());
                Some(match bytes {
                    Some(bytes) => Arenas::fixed(gpu, bytes, of_type * types)?,
                    None => Arenas::growing(gpu)?,
                })
            }
        };
        let memory = KvMemory {
            device: device.clone(),
            groups,
            layers: spec.all_blocks().count(),
            drafter: spec.drafter.as_ref().map(|_| spec.blocks.len()),
            state_layers,
            reserve,
            arenas,
            without_f8,
            caches: KvType::ALL.map(|_| TryOnce::new()),
        };
        if device.is_cuda() {
            // Reserves memory, or only addresses; a driver that cannot do so is refused when the model is loaded.
            memory.cache(KvType::F16)?;
        }
        Ok(memory)
    }

    /// The cache of sequences with keys and values of this type. A GPU keeps f16, and f8 where its kernels serve the model's heads.
    pub fn cache(&self, kind: KvType) -> Result<&Arc<KvCache>> {
        let slot = &self.caches[kind as usize];
        slot.get_or_try(|| KvCache::new(self, kind).map(Arc::new))
    }

    /// Takes the locks of its blocks until the result is dropped.
    pub fn locked(&'static self) -> Vec<Box<dyn Any>> {
        let making: Vec<_> = self.caches.iter().map(TryOnce::locked).collect();
        let caches = self.caches.iter().filter_map(TryOnce::get);
        let blocks = caches.flat_map(|cache| {
            let states = cache.state.iter().map(StateArena::locked);
            cache.arenas.iter().map(KvArena::locked).chain(states)
        });
        making
            .into_iter()
            .chain(blocks)
            .chain([self.reserve.locked()])
            .collect()
    }

    /// Layers that are alike, in the order of their first layers.
    pub fn groups(&self) -> &[KvGroup] {
        &self.groups
    }

    /// Positions of a block, in every group and format.
    pub fn block_positions(&self) -> usize {
        match self.device {
            Device::Cpu(_) => HOST_PAGE,
            Device::Cuda(_) => cuda::PAGE,
        }
    }

    /// Whether the model has recurrent layers.
    pub fn has_states(&self) -> bool {
        !self.state_layers.is_empty()
    }

    /// Bytes that were reserved when the model was loaded, if any were, and those of them that no block takes.
    pub fn reserved(&self) -> Option<Reserved> {
        self.reserve.now()
    }
}

/// Layers whose pages a session file has together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PagesOf {
    /// The layers of the blocks.
    Blocks,
    /// The layer of the drafter.
    Drafter,
}

/// The cached keys and values of a model, in one format.
pub struct KvCache {
    kind: KvType,
    arenas: Vec<KvArena>,
    layers: Vec<Option<KvLayerIndex>>,
    drafter: Option<usize>,
    state: Option<StateArena>,
    null_block: TryOnce<()>,
}

impl KvCache {
    fn new(memory: &KvMemory, kind: KvType) -> Result<KvCache> {
        let (groups, reserve) = (&memory.groups, &memory.reserve);
        let (device, without_f8) = (&memory.device, memory.without_f8.as_deref());
        check_kind(device.kind(), kind, &device.name(), without_f8)?;
        let of_group = |group| match &memory.arenas {
            None => KvArena::in_host_memory(group, kind, reserve),
            Some(arenas) => KvArena::in_device_memory(group, kind, arenas, reserve),
        };
        let arenas = groups.iter().map(of_group).collect::<Result<_>>()?;
        Ok(KvCache {
            kind,
            arenas,
            layers: layer_groups(groups, memory.layers),
            drafter: memory.drafter,
            state: StateArena::new(&memory.state_layers, memory.arenas.as_ref(), reserve)?,
            null_block: TryOnce::new(),
        })
    }

    /// Element type of keys and values.
    pub fn kind(&self) -> KvType {
        self.kind
    }

    /// The arenas, one for each group.
    pub fn arenas(&self) -> &[KvArena] {
        &self.arenas
    }

    /// The arena of recurrent layers, if the model has any.
    pub fn state(&self) -> Option<&StateArena> {
        self.state.as_ref()
    }

    /// Memory for a block that has none, filled with zeros. Slots are the groups in order, and one after them for the recurrent state.
    pub fn take(&self, slot: usize, block: u32) -> Result<()> {
        match (self.arenas.get(slot), &self.state) {
            (Some(arena), _) => arena.take(block),
            (None, Some(state)) => state.take(block),
            (None, None) => bail!(Internal, "a state of a model without recurrent layers"),
        }
    }

    /// Frees the memory of a block.
    pub fn free(&self, slot: usize, block: u32) {
        match (self.arenas.get(slot), &self.state) {
            (Some(arena), _) => arena.free(block),
            (None, Some(state)) => state.free(block),
            (None, None) => {}
        }
    }

    /// Bytes of a block in a slot.
    pub fn block_bytes(&self, slot: usize) -> usize {
        let state = || self.state.as_ref().map_or(0, StateArena::block_bytes);
        let arena = self.arenas.get(slot);
        arena.map_or_else(state, KvArena::block_bytes)
    }

    /// Whether there is memory for the null blocks, which padding rows of a step write to.
    pub(super) fn has_null_block(&self) -> bool {
        let take = || {
            let mut arenas = self.arenas.iter().enumerate();
            arenas.try_for_each(|(i, arena)| {
                let taken = arena.take(NULL_BLOCK);
                taken.inspect_err(|_| self.arenas[..i].iter().for_each(|a| a.free(NULL_BLOCK)))
            })?;
            let state = self.state.as_ref().map_or(Ok(()), |s| s.take(NULL_BLOCK));
            state.inspect_err(|_| self.arenas.iter().for_each(|a| a.free(NULL_BLOCK)))
        };
        self.null_block.get_or_try(take).is_ok()
    }

    /// The arena of a layer, its group, and the layer's index in the group.
    fn of_layer(&self, layer: usize) -> Result<(&KvArena, usize, usize)> {
        match self.layers.get(layer) {
            Some(&Some(KvLayerIndex { group, index })) => Ok((&self.arenas[group], group, index)),
            _ => bail!(Internal, "layer {layer} has no keys and values"),
        }
    }

    /// Layers with keys and values, like [`KvCache::of_layer`]: those of the blocks, or that of the drafter.
    fn cached_layers(&self, of: PagesOf) -> impl Iterator<Item = (&KvArena, usize, usize)> {
        let layers = self.layers.iter().enumerate().filter(move |(layer, _)| {
            let is_drafter = Some(*layer) == self.drafter;
            is_drafter == (of == PagesOf::Drafter)
        });
        let places = layers.filter_map(|(_, place)| place.as_ref());
        places.map(|place| (&self.arenas[place.group], place.group, place.index))
    }

    /// The group of a layer.
    pub(super) fn group_of(&self, layer: usize) -> Result<usize> {
        Ok(self.of_layer(layer)?.1)
    }

    /// Writes keys and values, each `[m, kv_heads, head_dim]`, of a layer at positions `first..first + m` of the sequence with these tables.
    pub(super) fn store(
        &self,
        layer: usize,
        tables: &KvTables,
        first: usize,
        keys: Slice<'_>,
        values: Slice<'_>,
    ) -> Result<()> {
        let (arena, group, index) = self.of_layer(layer)?;
        let blocks = tables.blocks(group);
        let Some(gpu) = arena.gpu() else {
            return arena.store_on_host(index, blocks, first, keys.host()?, values.host()?);
        };
        let table = DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, blocks)?;
        let pages = self.on_gpu(layer, &table, blocks.len(), 0, None)?;
        let KvShape { heads, dim, .. } = pages.shape;
        let rows = keys.len() / (heads * dim);
        cuda::store_kv(&pages, keys.cuda()?, values.cuda()?, rows, first)
    }

    /// Attention of queries `[m, heads, head_dim]` from position `first` on over a layer of the sequence with these tables, with the
    /// layer's sinks `[heads]`, if it has any.
    pub(super) fn attend(
        &self,
        device: &Device,
        layer: usize,
        tables: &KvTables,
        q: Slice<'_>,
        shape: &AttentionShape,
        sinks: Option<Slice<'_>>,
        first: usize,
        out: SliceMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let (arena, group, index) = self.of_layer(layer)?;
        let blocks = tables.blocks(group);
        let Some(gpu) = arena.gpu() else {
            // SAFETY: these are the tables of the queries' sequence.
            let cache = CachedLayer::Host(unsafe { arena.pages(index, blocks) }?);
            return attention::attention(device, q, shape, sinks, &cache, first, out, workspace);
        };
        let table = DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, blocks)?;
        let cache = CachedLayer::Cuda(self.on_gpu(layer, &table, blocks.len(), 0, None)?);
        attention::attention(device, q, shape, sinks, &cache, first, out, workspace)
    }

    /// A layer on a GPU as kernels take it: `table` has `stride` block numbers for each sequence, of which `sequence` is the first.
    pub(super) fn on_gpu<'a>(
        &self,
        layer: usize,
        table: &'a DeviceBuffer,
        stride: usize,
        sequence: usize,
        unfit: Option<&'a DeviceBuffer>,
    ) -> Result<CachedPages<'a>> {
        let (arena, _, index) = self.of_layer(layer)?;
        Ok(CachedPages {
            arena: arena.address()?,
            block_bytes: arena.block_bytes(),
            offset: index * arena.page_bytes(),
            shape: arena.shape(),
            table,
            stride,
            sequence,
            layer,
            unfit,
        })
    }
}

impl std::fmt::Debug for KvCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KvCache({}, {:?})", self.kind.name(), self.arenas)
    }
}
