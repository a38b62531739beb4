//! Sequences: the keys and values of some tokens, in blocks that forks share until either side writes.

use std::sync::{Arc, Mutex, MutexGuard};

use super::pool::BlockPool;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::base::lock::lock;
use crate::model::kv::{KvArena, KvCache, KvTables, NULL_BLOCK};
use crate::model::{KvType, Model};

/// Positions past a layer's window that are kept, so that a sequence may be cut by as many tokens without being computed again.
pub const REWIND: usize = 1024;

/// A multiple of every cache's block: what is no longer kept ends at a multiple of this, on every device.
const KEPT_MULTIPLE: usize = 64;

/// The blocks of a model, with the reference counts of those in use.
pub(super) struct Blocks {
    model: Arc<Model>,
    f16: Mutex<Vec<BlockPool>>,
    f32: Mutex<Vec<BlockPool>>,
}

impl Blocks {
    pub(super) fn new(model: &Arc<Model>) -> Arc<Blocks> {
        let groups = model.kv().groups().len();
        let pools = || Mutex::new((0..groups).map(|_| BlockPool::default()).collect());
        Arc::new(Blocks {
            model: model.clone(),
            f16: pools(),
            f32: pools(),
        })
    }

    fn pools(&self, kind: KvType) -> MutexGuard<'_, Vec<BlockPool>> {
        lock(match kind {
            KvType::F16 => &self.f16,
            KvType::F32 => &self.f32,
        })
    }

    /// Blocks in use, in all groups and formats.
    pub(super) fn used(&self) -> usize {
        let kinds = [KvType::F16, KvType::F32];
        let used = |kind| self.pools(kind).iter().map(BlockPool::used).sum::<usize>();
        kinds.into_iter().map(used).sum()
    }
}

/// The keys and values of one sequence of tokens, over all layers of a model. Memory is taken in blocks as it grows; a clone shares them
/// until either side writes.
///
/// Layers that see a window keep it and [`REWIND`] positions before it.
pub struct Sequence {
    blocks: Arc<Blocks>,
    cache: Arc<KvCache>,
    tables: KvTables,
    len: usize,
    capacity: usize,
}

impl Sequence {
    pub(super) fn new(blocks: &Arc<Blocks>, capacity: usize, kind: KvType) -> Result<Sequence> {
        let most = blocks.model.spec().max_positions;
        if capacity == 0 || capacity > most {
            bail!(
                InvalidArgument,
                "a context of {capacity} positions; the model was made for 1 to {most}"
            );
        }
        let cache = blocks.model.kv().cache(kind)?;
        Ok(Sequence {
            blocks: blocks.clone(),
            tables: KvTables::new(kind, cache.arenas().len()),
            cache: cache.clone(),
            len: 0,
            capacity,
        })
    }

    /// Positions held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no position.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of positions for which there is room in total.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Further positions for which there is room.
    pub fn room(&self) -> usize {
        self.capacity - self.len
    }

    /// Element type of keys and values.
    pub fn kind(&self) -> KvType {
        self.tables.kind()
    }

    /// Its block tables.
    pub(super) fn tables(&self) -> &KvTables {
        &self.tables
    }

    /// Whether it is a sequence of this model.
    pub(super) fn is_of(&self, model: &Arc<Model>) -> bool {
        Arc::ptr_eq(&self.blocks.model, model)
    }

    fn groups(&self) -> usize {
        self.cache.arenas().len()
    }

    fn arena(&self, group: usize) -> &KvArena {
        &self.cache.arenas()[group]
    }

    /// Bytes of its blocks, including those shared with clones.
    pub fn bytes(&self) -> usize {
        let of_group = |group| self.tables.kept(group).count() * self.arena(group).block_bytes();
        (0..self.groups()).map(of_group).sum()
    }

    /// The first position that each group keeps.
    pub fn kept_from(&self) -> Vec<usize> {
        let first = |group| {
            let blocks = self.tables.blocks(group);
            blocks.partition_point(|b| *b == NULL_BLOCK) * self.block_positions(group)
        };
        (0..self.groups()).map(first).collect()
    }

    fn block_positions(&self, group: usize) -> usize {
        self.arena(group).block_positions()
    }

    /// The first position of group `group` that the token after `len` positions sees.
    fn sees_from(&self, group: usize, len: usize) -> usize {
        let window = self.arena(group).window();
        window.map_or(0, |window| (len + 1).saturating_sub(window))
    }

    /// Drops the positions from `len` on. If a layer no longer keeps what the next token sees, all positions are dropped, and the tokens
    /// have to run again.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        if len > self.len {
            bail!(
                InvalidArgument,
                "cannot cut {} positions to {len}, which is more",
                self.len
            );
        }
        if len == self.len {
            return Ok(());
        }
        let kept = self.kept_from();
        let is_kept = |group| kept[group] <= self.sees_from(group, len);
        self.len = match (0..self.groups()).all(is_kept) {
            true => len,
            false => 0,
        };
        self.release_unused();
        Ok(())
    }

    /// Releases blocks past the positions held, which were reserved for tokens that did not run.
    fn release_unused(&mut self) {
        for group in 0..self.groups() {
            let kept = self.len.div_ceil(self.block_positions(group));
            if kept < self.tables.blocks(group).len() {
                let unused = self.tables.truncate(group, kept);
                self.release(group, &unused);
            }
        }
    }

    fn release(&self, group: usize, blocks: &[u32]) {
        let mut pools = self.blocks.pools(self.kind());
        for &block in blocks.iter().filter(|b| **b != NULL_BLOCK) {
            if pools[group].release(block) {
                self.arena(group).free(block);
            }
        }
    }

    /// Takes blocks for `count` further positions in every group, and copies shared ones that these positions are in, so that a lack of
    /// memory shows before any work is done.
    pub(super) fn reserve(&mut self, count: usize) -> Result<()> {
        if count > self.room() {
            bail!(
                ContextFull,
                "{count} tokens do not fit: {} of {} positions are in use",
                self.len,
                self.capacity
            );
        }
        for group in 0..self.groups() {
            let positions = self.block_positions(group);
            let first = self.len / positions;
            for index in first..(self.len + count).div_ceil(positions) {
                self.own(group, index)?;
            }
        }
        Ok(())
    }

    /// Makes block `index` of a group one that only this sequence uses.
    fn own(&mut self, group: usize, index: usize) -> Result<()> {
        let old = self.tables.blocks(group).get(index).copied();
        let mut pools = self.blocks.pools(self.kind());
        let pool = &mut pools[group];
        if old.is_some_and(|block| !pool.is_shared(block)) {
            return Ok(());
        }
        let arena = self.arena(group);
        let new = pool.take();
        let copied = arena.take(new).and_then(|()| match old {
            Some(old) => arena.copy(old, new).inspect_err(|_| arena.free(new)),
            None => Ok(()),
        });
        if let Err(e) = copied {
            pool.release(new);
            return Err(e);
        }
        if let Some(old) = old {
            pool.release(old);
        }
        drop(pools);
        match old {
            Some(_) => self.tables.replace(group, index, new),
            None => self.tables.push(group, new),
        }
        Ok(())
    }

    /// Records that every layer holds `count` further positions, and frees what windows have passed.
    pub(super) fn advance(&mut self, count: usize) {
        self.len += count;
        for group in 0..self.groups() {
            let passed = self.sees_from(group, self.len).saturating_sub(REWIND);
            let passed = passed / KEPT_MULTIPLE * KEPT_MULTIPLE / self.block_positions(group);
            let last = passed.checked_sub(1).map(|i| self.tables.blocks(group)[i]);
            if last.is_some_and(|block| block != NULL_BLOCK) {
                let forgotten = self.tables.forget(group, passed);
                self.release(group, &forgotten);
            }
        }
    }

    /// Removes what a failed pass wrote past the positions held.
    pub(super) fn give_up(&mut self) -> Result<()> {
        self.release_unused();
        for group in 0..self.groups() {
            let positions = self.block_positions(group);
            let last = self.tables.blocks(group).get(self.len / positions);
            let owned = |block: u32| !self.blocks.pools(self.kind())[group].is_shared(block);
            if let Some(&block) = last.filter(|block| owned(**block)) {
                let held = self.len % positions;
                self.cache.clear_from(group, block, held)?;
            }
        }
        Ok(())
    }

    /// Calls `each` with its pages of sixteen positions, layer by layer, in the order that [`Sequence::fill`] expects.
    pub fn for_each_page(&self, each: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        self.cache.read_pages(&self.tables, self.len, each)
    }

    /// Bytes that [`Sequence::for_each_page`] gives for `len` positions, kept from `kept_from` on; `None` if the number overflows.
    pub fn page_bytes(&self, len: usize, kept_from: &[usize]) -> Option<u64> {
        self.cache.page_bytes(len, kept_from)
    }

    /// Fails unless an empty sequence may be filled with `len` positions, of which each group keeps those from `kept_from` on.
    pub fn check_kept(&self, len: usize, kept_from: &[usize]) -> Result<()> {
        let is_possible = |(group, &first): (usize, &usize)| {
            first == 0 || first.is_multiple_of(KEPT_MULTIPLE) && first <= self.sees_from(group, len)
        };
        match kept_from.len() == self.groups() && kept_from.iter().enumerate().all(is_possible) {
            true => Ok(()),
            false => Err(err!(
                InvalidArgument,
                "{len} positions of which groups keep those from {kept_from:?} on; this model has {} groups, each keeps what its window sees",
                self.groups()
            )),
        }
    }

    /// Fills an empty sequence with `len` positions, of which each group keeps those from `kept_from` on; `next` gives the pages.
    pub fn fill(
        &mut self,
        len: usize,
        kept_from: &[usize],
        next: impl FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        if self.len != 0 || len > self.capacity {
            bail!(
                InvalidArgument,
                "{len} positions into a cache that holds {} of {}; it must be empty and large enough",
                self.len,
                self.capacity
            );
        }
        self.check_kept(len, kept_from)?;
        self.release_unused();
        for (group, &first) in kept_from.iter().enumerate() {
            let positions = self.block_positions(group);
            let passed = first / positions;
            (0..passed).for_each(|_| self.tables.push(group, NULL_BLOCK));
            for index in passed..len.div_ceil(positions) {
                self.own(group, index)?;
            }
        }
        self.cache.write_pages(&self.tables, len, next)?;
        self.len = len;
        Ok(())
    }
}

impl Clone for Sequence {
    fn clone(&self) -> Self {
        let mut pools = self.blocks.pools(self.kind());
        for (group, pool) in pools.iter_mut().enumerate() {
            self.tables.kept(group).for_each(|block| pool.retain(block));
        }
        Sequence {
            blocks: self.blocks.clone(),
            cache: self.cache.clone(),
            tables: self.tables.clone(),
            ..*self
        }
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        for group in 0..self.groups() {
            let blocks = self.tables.truncate(group, 0);
            self.release(group, &blocks);
        }
    }
}

impl std::fmt::Debug for Sequence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Sequence({} of {} positions, {})",
            self.len,
            self.capacity,
            self.kind().name()
        )
    }
}
