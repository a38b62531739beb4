//! The blocks of a model: their users, and their memory. Blocks of the prefix index that no sequence uses are cached within a limit, and give way
//! as soon as a sequence needs memory.

use std::any::Any;
use std::collections::hash_map::RandomState;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use serde::Serialize;

use super::pools::{Entry, Pools, Units};
use super::prefix::{Content, Layers, Listed, NodeId, Place, Prefix, Tree};
use crate::base::lock::lock;
use crate::base::{Result, fork};
use crate::model::kv::KvCache;
use crate::model::{KvType, LONG_PROMPT, LoadOptions, Model};

/// The blocks of a model, with the reference counts of those in use.
pub(super) struct Blocks {
    model: Arc<Model>,
    state: Mutex<State>,
    /// A brief hold has ended.
    ended: Condvar,
    /// Whether sequences share prefixes.
    shares: bool,
    /// Bytes of cached blocks at most; `None` if they may take all that is reserved and free.
    limit: Option<usize>,
    /// Sequences so far.
    sequences: AtomicU64,
    /// Has another reference for each live sequence.
    live: Arc<()>,
    /// Has another reference for each live sequence with room for a long prompt.
    long: Arc<()>,
}

struct State {
    pools: Pools,
    /// Brief holds now.
    holds: usize,
    /// The fork generation of their threads; the child of a fork has none of these.
    generation: u32,
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

/// Counts a live sequence: see [`Blocks::count`].
#[derive(Clone)]
pub(super) struct Counted {
    _live: Arc<()>,
    _long: Option<Arc<()>>,
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
                holds: 0,
                generation: fork::generation(),
                evicted: 0,
            }),
            ended: Condvar::new(),
            shares: options.is_none_or(|options| options.prefix_cache),
            limit: kv.reserved().is_none().then_some(limit),
            sequences: AtomicU64::new(0),
            live: Arc::new(()),
            long: Arc::new(()),
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

    /// Counts a sequence with room for `capacity` positions until the result is dropped.
    pub(super) fn count(&self, capacity: usize) -> Counted {
        Counted {
            _live: self.live.clone(),
            _long: (capacity > LONG_PROMPT).then(|| self.long.clone()),
        }
    }

    /// Whether a prompt of more than [`LONG_PROMPT`] tokens may come while another sequence generates: some sequence has room for it, and is
    /// not alone.
    pub(super) fn expect_long(&self) -> bool {
        let others = |counted: &Arc<()>| Arc::strong_count(counted) - 1;
        others(&self.live) > 1 && others(&self.long) > 0
    }

    /// Takes the lock on its state until the result is dropped.
    pub(super) fn locked(&'static self) -> Box<dyn Any> {
        Box::new(self.state())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = lock(&self.state);
        let generation = fork::generation();
        if state.generation != generation {
            (state.holds, state.generation) = (0, generation);
        }
        state
    }

    fn cache(&self, kind: KvType) -> Option<&Arc<KvCache>> {
        self.model.kv().cache(kind).ok()
    }

    /// Takes a block, with memory, for a sequence. If there is no memory, cached blocks give way, those that are briefly held too.
    pub(super) fn take(&self, cache: &KvCache, slot: usize) -> Result<u32> {
        let mut state = self.state();
        loop {
            let error = match state.take(cache, slot) {
                Ok(block) => return Ok(block),
                Err(error) if !error.kind().is_lack_of_memory() => return Err(error),
                Err(error) => error,
            };
            match self.evict(&mut state) {
                0 if state.holds == 0 => return Err(error),
                0 => {
                    let waited = self.ended.wait(state);
                    state = waited.unwrap_or_else(PoisonError::into_inner);
                }
                evicted => state.evicted += evicted,
            }
        }
    }

    /// Takes a block out of memory that is free: no cached block gives way.
    pub(super) fn take_free(&self, cache: &KvCache, slot: usize) -> Result<u32> {
        self.state().take(cache, slot)
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
        let mut state = self.state();
        let freed = state.pools.publish(units, path);
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

    /// Removes all nodes from the prefix index, and frees the blocks that it alone has.
    pub(super) fn forget_prefixes(&self) {
        let mut state = self.state();
        let freed = state.pools.forget_prefixes();
        freed.into_iter().for_each(|place| self.free(place));
    }

    /// The layers of the model.
    pub(super) fn layers(&self) -> Layers {
        self.state().pools.layers().clone()
    }

    /// All nodes of the prefix index; see [`Pools::list`].
    pub(super) fn list(&self) -> Vec<Listed> {
        self.state().pools.list()
    }

    /// Says that blocks will be held until the result is dropped, no longer than one is read or filled.
    pub(super) fn hold(&self) -> BriefHold<'_> {
        self.state().holds += 1;
        BriefHold(self)
    }

    /// The content of a node, whose blocks stay as they are until the result is dropped. `None` if the index has given it up.
    pub(super) fn pin(&self, node: NodeId) -> Option<Pinned<'_>> {
        let hold = self.hold();
        let content = self.state().pools.pin(node)?;
        Some(Pinned { content, hold })
    }

    /// The node of a unit of tokens; see [`Pools::held`].
    pub(super) fn held(
        &self,
        tree: Tree,
        parent: Option<NodeId>,
        tokens: &[u32],
    ) -> Option<(NodeId, Vec<bool>)> {
        self.state().pools.held(tree, parent, tokens)
    }

    /// The first of `count` times of use that are later than all before.
    pub(super) fn reserve_times(&self, count: u64) -> u64 {
        self.state().pools.reserve_times(count)
    }

    /// Enters a node of a file into the prefix index; see [`Pools::enter`].
    pub(super) fn enter(&self, entry: &Entry<'_>) -> Option<NodeId> {
        let mut state = self.state();
        let (node, freed) = state.pools.enter(entry);
        freed.into_iter().for_each(|place| self.free(place));
        self.keep_limit(&mut state);
        node
    }

    /// Removes nodes of the prefix index that hold nothing.
    pub(super) fn prune(&self, nodes: impl IntoIterator<Item = NodeId>) {
        self.state().pools.prune(nodes);
    }

    /// Free bytes that the prefix cache may take; `None` if it keeps no block that no sequence uses.
    pub(super) fn room(&self) -> Option<usize> {
        match self.limit {
            Some(0) => None,
            Some(limit) => Some(limit.saturating_sub(self.counts().cached_bytes)),
            None => self.model.kv().reserved().map(|reserved| reserved.free),
        }
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

impl State {
    /// Takes a block with memory.
    fn take(&mut self, cache: &KvCache, slot: usize) -> Result<u32> {
        let place = self.pools.take(cache.kind(), slot);
        match cache.take(slot, place.block) {
            Ok(()) => Ok(place.block),
            Err(error) => {
                self.pools.release(place);
                Err(error)
            }
        }
    }
}

/// Blocks that are held to be read or filled: whoever finds no memory meanwhile waits for the end of that.
pub(super) struct BriefHold<'a>(&'a Blocks);

impl Drop for BriefHold<'_> {
    fn drop(&mut self) {
        self.0.state().holds -= 1;
        self.0.ended.notify_all();
    }
}

/// A node of the prefix index that is being read.
pub(super) struct Pinned<'a> {
    pub(super) content: Content,
    hold: BriefHold<'a>,
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        let blocks = self.hold.0;
        let mut state = blocks.state();
        let freed = state.pools.unpin(&self.content);
        freed.into_iter().for_each(|place| blocks.free(place));
        blocks.keep_limit(&mut state);
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
