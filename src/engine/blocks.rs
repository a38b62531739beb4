//! The blocks of a model: their users, and their memory. Blocks of the prefix index that no sequence uses are cached within a limit, and give way
//! as soon as a sequence needs memory.

use std::collections::hash_map::RandomState;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use serde::Serialize;

use super::pools::{Pools, Units};
use super::prefix::{Layers, NodeId, Place, Prefix, Tree};
use crate::base::Result;
use crate::base::lock::lock;
use crate::model::kv::KvCache;
use crate::model::{KvType, LoadOptions, Model};

/// The blocks of a model, with the reference counts of those in use.
pub(super) struct Blocks {
    model: Arc<Model>,
    state: Mutex<State>,
    /// Whether sequences share prefixes.
    shares: bool,
    /// Bytes of cached blocks at most; `None` if they may take all that is reserved and free.
    limit: Option<usize>,
    /// Sequences so far.
    sequences: AtomicU64,
}

struct State {
    pools: Pools,
    /// Cached blocks that were freed because memory was needed.
    evicted: u64,
}

/// Numbers of blocks in all groups and formats, those of recurrent states included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BlockCounts {
    /// Blocks that sequences hold, each counted once.
    pub blocks_used: usize,
    /// Their bytes.
    pub used_bytes: usize,
    /// Blocks that the prefix cache alone holds.
    pub blocks_cached: usize,
    /// Their bytes.
    pub cached_bytes: usize,
    /// Blocks since the model was loaded that the prefix cache alone held, and gave up because memory was needed or its limit was reached.
    pub blocks_evicted: u64,
}

impl Blocks {
    /// The blocks of a model. Without `options` sequences share prefixes only while they live.
    pub(super) fn new(model: &Arc<Model>, options: Option<&LoadOptions>) -> Arc<Blocks> {
        let kv = model.kv();
        let layers = Layers {
            unit: kv.block_positions(),
            windows: kv.groups().iter().map(|group| group.window).collect(),
            has_states: kv.has_states(),
        };
        let limit = options.map_or(0, |options| options.prefix_bytes);
        Arc::new(Blocks {
            model: model.clone(),
            state: Mutex::new(State {
                pools: Pools::new(layers, RandomState::new()),
                evicted: 0,
            }),
            shares: options.is_none_or(|options| options.prefix_cache),
            limit: kv.reserved().is_none().then_some(limit),
            sequences: AtomicU64::new(0),
        })
    }

    pub(super) fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Whether sequences share prefixes.
    pub(super) fn shares(&self) -> bool {
        self.shares
    }

    /// Positions of a full block, in every group.
    pub(super) fn unit(&self) -> usize {
        self.model.kv().block_positions()
    }

    pub(super) fn new_id(&self) -> u64 {
        self.sequences.fetch_add(1, Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn cache(&self, kind: KvType) -> Option<&Arc<KvCache>> {
        self.model.kv().cache(kind).ok()
    }

    /// Takes a block, with memory, for a sequence. If there is no memory, cached blocks give way.
    pub(super) fn take(&self, cache: &KvCache, slot: usize) -> Result<u32> {
        let mut state = self.state();
        let place = state.pools.take(cache.kind(), slot);
        loop {
            let error = match cache.take(slot, place.block) {
                Ok(()) => return Ok(place.block),
                Err(error) => error,
            };
            let evicted = match error.kind().is_lack_of_memory() {
                true => self.evict(&mut state),
                false => 0,
            };
            if evicted == 0 {
                state.pools.release(place);
                return Err(error);
            }
            state.evicted += evicted;
        }
    }

    /// Adds a sequence to the users of blocks that have some.
    pub(super) fn retain(&self, blocks: impl IntoIterator<Item = Place>) {
        let pools = &mut self.state().pools;
        blocks.into_iter().for_each(|place| pools.retain(place));
    }

    /// Removes a sequence from the users of blocks, and frees those that nobody uses. Of blocks that stay in the index, later ones are given up
    /// after earlier ones.
    pub(super) fn release(&self, blocks: impl IntoIterator<Item = Place>) {
        let mut state = self.state();
        for place in blocks {
            if state.pools.release(place) {
                self.free(place);
            }
        }
        self.keep_limit(&mut state);
    }

    /// Whether several users share a block, so that none may write it.
    pub(super) fn is_shared(&self, place: Place) -> bool {
        self.state().pools.of(place.kind)[place.slot].is_shared(place.block)
    }

    /// Enters the full units of a sequence into the prefix index; see [`Pools::publish`].
    pub(super) fn publish(&self, units: &Units<'_>, path: &mut Vec<NodeId>) {
        let freed = self.state().pools.publish(units, path);
        freed.into_iter().for_each(|place| self.free(place));
    }

    /// The longest prefix for a sequence, whose blocks it then uses, if it has more than `least` units; see [`Pools::find`] and
    /// [`Pools::adopt`].
    pub(super) fn adopt<T: AsRef<[u32]>>(
        &self,
        tree: Tree,
        path: &mut Vec<NodeId>,
        (least, most): (usize, usize),
        unit: impl Fn(usize) -> T,
        follows: bool,
    ) -> Option<Adopted> {
        let pools = &mut self.state().pools;
        let prefix = pools.find(tree, path, most, unit, follows)?;
        let Prefix { path, .. } = &prefix;
        if path.len() <= least {
            return None;
        }
        let (blocks, state) = pools.adopt(tree.kind, &prefix);
        Some(Adopted {
            followed: pools.followed(path),
            path: prefix.path,
            blocks,
            state,
        })
    }

    /// Frees cached blocks past the limit.
    fn keep_limit(&self, state: &mut State) {
        let Some(limit) = self.limit else {
            return;
        };
        while self.counts_of(state).cached_bytes > limit {
            let freed = self.evict(state);
            // Without a limit to fill, blocks end with their last sequence.
            state.evicted += if limit > 0 { freed } else { 0 };
            if freed == 0 {
                return;
            }
        }
    }

    /// Frees the cached block that no sequence has used for longest, and those that are of no use without it. Returns how many.
    fn evict(&self, state: &mut State) -> u64 {
        let freed = state.pools.evict();
        freed.iter().for_each(|place| self.free(*place));
        freed.len() as u64
    }

    /// Frees the memory of a block.
    fn free(&self, place: Place) {
        if let Some(cache) = self.cache(place.kind) {
            cache.free(place.slot, place.block);
        }
    }

    /// Numbers of blocks now.
    pub(super) fn counts(&self) -> BlockCounts {
        self.counts_of(&self.state())
    }

    fn counts_of(&self, state: &State) -> BlockCounts {
        let mut counts = BlockCounts {
            blocks_evicted: state.evicted,
            ..BlockCounts::default()
        };
        for kind in KvType::ALL {
            for (slot, pool) in state.pools.of(kind).iter().enumerate() {
                let (used, cached) = (pool.used(), pool.cached());
                if used + cached == 0 {
                    continue;
                }
                let bytes = self.cache(kind).map_or(0, |cache| cache.block_bytes(slot));
                counts.blocks_used += used;
                counts.used_bytes += used * bytes;
                counts.blocks_cached += cached;
                counts.cached_bytes += cached * bytes;
            }
        }
        counts
    }
}

/// The blocks of a prefix, which a sequence uses.
pub(super) struct Adopted {
    pub(super) path: Vec<NodeId>,
    /// Units that the drafter has followed, from the first on.
    pub(super) followed: usize,
    /// Blocks of each group of layers, with null blocks for units that the next token no longer sees.
    pub(super) blocks: Vec<Vec<u32>>,
    /// The recurrent state of the end; the null block if the model has none.
    pub(super) state: u32,
}
