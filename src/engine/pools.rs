//! The users of all blocks of a model: its sequences, and its prefix index. Pure bookkeeping: knows no memory.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use super::pool::{BlockPool, Left};
use super::prefix::{Content, IN_USE, Layers, Listed, NodeId, Place, Prefix, PrefixIndex, Tree};
use crate::model::KvType;
use crate::model::kv::NULL_BLOCK;

/// The pools of each format, by slot, and the prefix index on them.
#[derive(Debug)]
pub(super) struct Pools<S = RandomState> {
    /// Indexed by the type of keys and values.
    kinds: [Vec<BlockPool>; KvType::ALL.len()],
    index: PrefixIndex<S>,
}

/// The full units of a sequence.
pub(super) struct Units<'a> {
    pub(super) tree: Tree,
    /// The tokens of all of them.
    pub(super) tokens: &'a [u32],
    /// How many of them the drafter has followed, from the first on.
    pub(super) followed: usize,
    /// The blocks of each group of layers; the null block where one is no longer kept.
    pub(super) blocks: Vec<&'a [u32]>,
    /// Recurrent states: the number of units that each is after, and its block.
    pub(super) states: Vec<(usize, u32)>,
}

/// A node of a file, with blocks that hold what the file says.
pub(super) struct Entry<'a> {
    pub(super) tree: Tree,
    /// `None` if it is of the first tokens.
    pub(super) parent: Option<NodeId>,
    pub(super) tokens: &'a [u32],
    /// Whether the blocks have rows of the drafter.
    pub(super) is_followed: bool,
    /// By slot; the null block where there is none. Each has one user, who gives it up.
    pub(super) blocks: &'a [u32],
    /// By slot: the time that counts as that of the last use.
    pub(super) times: &'a [u64],
}

impl<S: BuildHasher + Clone> Pools<S> {
    pub(super) fn new(layers: Layers, hasher: S) -> Pools<S> {
        let pools = |_| (0..layers.slots()).map(|_| BlockPool::default()).collect();
        Pools {
            kinds: KvType::ALL.map(pools),
            index: PrefixIndex::new(layers, hasher),
        }
    }

    /// The pools of one format, by slot.
    pub(super) fn of(&self, kind: KvType) -> &[BlockPool] {
        &self.kinds[kind as usize]
    }

    fn of_mut(&mut self, kind: KvType) -> &mut [BlockPool] {
        &mut self.kinds[kind as usize]
    }

    /// Takes a block for a sequence.
    pub(super) fn take(&mut self, kind: KvType, slot: usize) -> Place {
        let block = self.of_mut(kind)[slot].take();
        Place { kind, slot, block }
    }

    /// Adds a sequence to the users of a block.
    pub(super) fn retain(&mut self, place: Place) {
        if let Some(node) = self.of_mut(place.kind)[place.slot].retain(place.block) {
            self.index.use_again(node, place.slot);
        }
    }

    /// Removes a sequence from the users of a block. Returns whether the block is free.
    pub(super) fn release(&mut self, place: Place) -> bool {
        match self.of_mut(place.kind)[place.slot].release(place.block) {
            Left::Free => true,
            Left::InUse => false,
            Left::Cached(node) => {
                self.index.leave(node, place.slot);
                false
            }
        }
    }

    /// Removes the index from the users of a block. Returns whether the block is free.
    fn withdraw(&mut self, place: Place) -> bool {
        self.of_mut(place.kind)[place.slot].withdraw(place.block)
    }

    /// Enters the units of a sequence into the index. `path` has the nodes of its first units as it was left by the last call, and gets the
    /// others. A unit that another sequence has entered stays as it is; it gets the blocks that it lacks. Returns blocks that are free
    /// because the sequence's took their place.
    pub(super) fn publish(&mut self, units: &Units<'_>, path: &mut Vec<NodeId>) -> Vec<Place> {
        let Units { tree, tokens, .. } = *units;
        let unit = self.index.layers().unit;
        self.forget_removed(path);
        let mut freed = Vec::new();
        let known = path.len();
        for (i, tokens) in tokens.chunks_exact(unit).enumerate().skip(known) {
            let parent = path.last().copied();
            let node = self.index.add(tree, parent, tokens);
            path.push(node);
            let is_followed = self.index.is_followed(node);
            if is_followed && i >= units.followed {
                continue;
            }
            // Blocks with rows of the drafter take the place of others: they serve all sequences.
            let mut blocks = units.blocks.iter().enumerate();
            let has_all = blocks.all(|(slot, blocks)| {
                blocks[i] != NULL_BLOCK || self.index.block(node, slot) == NULL_BLOCK
            });
            let follows = i < units.followed
                && !is_followed
                && has_all
                && parent.is_none_or(|parent| self.index.is_followed(parent));
            for (slot, blocks) in units.blocks.iter().enumerate() {
                self.offer(tree.kind, (node, slot), blocks[i], follows, &mut freed);
            }
            if follows {
                self.index.set_followed(node);
            }
        }
        let state = self.index.layers().state();
        for &(after, block) in &units.states {
            if let Some(&node) = after.checked_sub(1).and_then(|i| path.get(i)) {
                self.offer(tree.kind, (node, state), block, false, &mut freed);
            }
        }
        freed
    }

    /// Puts a sequence's block into a slot of a node that has none, or in any case if it `replaces` the block there.
    fn offer(
        &mut self,
        kind: KvType,
        (node, slot): (NodeId, usize),
        block: u32,
        replaces: bool,
        freed: &mut Vec<Place>,
    ) {
        let old = self.index.block(node, slot);
        let is_new = block != NULL_BLOCK && !self.of(kind)[slot].is_published(block);
        let gives_way = old == NULL_BLOCK || replaces;
        if gives_way && is_new {
            self.index.put(node, slot, block);
            self.of_mut(kind)[slot].publish(block, node);
            let old = Place {
                kind,
                slot,
                block: old,
            };
            if old.block != NULL_BLOCK && self.withdraw(old) {
                freed.push(old);
            }
        }
    }

    /// The layers of the model.
    pub(super) fn layers(&self) -> &Layers {
        self.index.layers()
    }

    /// All nodes of the index; see [`PrefixIndex::list`].
    pub(super) fn list(&self) -> Vec<Listed> {
        self.index.list()
    }

    /// Adds a reader to the users of a node's blocks, if the node is still in the index.
    pub(super) fn pin(&mut self, node: NodeId) -> Option<Content> {
        let content = self.index.content(node)?;
        places(&content).for_each(|place| self.retain(place));
        Some(content)
    }

    /// Removes a reader from the users of a node's blocks. Reading is no use: blocks that no sequence uses are as old as before. Returns those
    /// that are free.
    pub(super) fn unpin(&mut self, content: &Content) -> Vec<Place> {
        let mut freed = Vec::new();
        for place in places(content) {
            let left = self.of_mut(place.kind)[place.slot].release(place.block);
            match (left, content.last_uses[place.slot]) {
                (Left::Free, _) => freed.push(place),
                (Left::InUse, _) => {}
                (Left::Cached(node), IN_USE) => self.index.leave(node, place.slot),
                (Left::Cached(node), time) => self.index.leave_at(node, place.slot, time),
            }
        }
        freed
    }

    /// The node of a unit of tokens after those of `parent`, or after none, and whether it has a block, by slot.
    pub(super) fn held(
        &self,
        tree: Tree,
        parent: Option<NodeId>,
        tokens: &[u32],
    ) -> Option<(NodeId, Vec<bool>)> {
        let node = self.index.child(tree, parent, tokens)?;
        let slots = 0..self.index.layers().slots();
        let has_block = slots.map(|slot| self.index.block(node, slot) != NULL_BLOCK);
        Some((node, has_block.collect()))
    }

    /// The first of `count` times of use that are later than all before.
    pub(super) fn reserve_times(&mut self, count: u64) -> u64 {
        self.index.reserve_times(count)
    }

    /// Enters a node of a file into the index, unless the index has given up its parent. Slots that have a block keep it, and a node that the
    /// drafter has followed takes no block that it has not. Returns the node, and the blocks that are free because they were not needed.
    pub(super) fn enter(&mut self, entry: &Entry<'_>) -> (Option<NodeId>, Vec<Place>) {
        let Entry { tree, parent, .. } = *entry;
        let has_parent = parent.is_none_or(|parent| self.index.contains(parent));
        let node = has_parent.then(|| self.index.add(tree, parent, entry.tokens));
        let mut freed = Vec::new();
        if let Some(node) = node {
            let state = self.index.layers().state();
            let serves = entry.is_followed || !self.index.is_followed(node);
            for (slot, &block) in entry.blocks.iter().enumerate() {
                if serves || slot == state {
                    self.offer(tree.kind, (node, slot), block, false, &mut freed);
                }
            }
            let mut groups = entry.blocks.iter().enumerate();
            let has_all = groups.all(|(slot, &block)| {
                slot == state || [NULL_BLOCK, block].contains(&self.index.block(node, slot))
            });
            let follows = parent.is_none_or(|parent| self.index.is_followed(parent));
            if entry.is_followed && has_all && follows {
                self.index.set_followed(node);
            }
        }
        for (slot, &block) in entry.blocks.iter().enumerate() {
            if block == NULL_BLOCK {
                continue;
            }
            match self.of_mut(tree.kind)[slot].release(block) {
                Left::Free => freed.push(Place {
                    kind: tree.kind,
                    slot,
                    block,
                }),
                Left::InUse => {}
                Left::Cached(node) => self.index.leave_at(node, slot, entry.times[slot]),
            }
        }
        (node, freed)
    }

    /// Removes nodes without blocks and without nodes after them.
    pub(super) fn prune(&mut self, nodes: impl IntoIterator<Item = NodeId>) {
        nodes.into_iter().for_each(|node| self.index.prune(node));
    }

    /// Empties a path whose nodes are no longer in the index.
    fn forget_removed(&self, path: &mut Vec<NodeId>) {
        // A node that is there has all nodes before it.
        if path.last().is_some_and(|node| !self.index.contains(*node)) {
            path.clear();
        }
    }

    /// The longest prefix of the tokens that `unit` gives, by the number of the unit, that a sequence can begin with; see
    /// [`PrefixIndex::longest`]. `path` has the nodes of its first units.
    pub(super) fn find<T: AsRef<[u32]>>(
        &self,
        tree: Tree,
        path: &mut Vec<NodeId>,
        units: usize,
        unit: impl Fn(usize) -> T,
        follows: bool,
    ) -> Option<Prefix> {
        self.forget_removed(path);
        let mut whole = path.clone();
        let further = (path.len()..units).map(unit);
        self.index.walk(tree, &mut whole, further);
        self.index.longest(&whole, follows)
    }

    /// Adds a sequence to the users of a prefix's blocks. Returns those of each group, with null blocks for units that it no longer sees,
    /// and the block of the state.
    pub(super) fn adopt(&mut self, kind: KvType, prefix: &Prefix) -> (Vec<Vec<u32>>, u32) {
        let blocks = prefix.first.iter().enumerate().map(|(slot, &first)| {
            let kept = prefix.path.iter().enumerate();
            let block = kept.map(|(i, node)| match i < first {
                true => NULL_BLOCK,
                false => self.index.block(*node, slot),
            });
            block.collect()
        });
        let blocks: Vec<Vec<u32>> = blocks.collect();
        let slot = self.index.layers().state();
        let last = prefix.path.last();
        let state = last.map_or(NULL_BLOCK, |node| self.index.block(*node, slot));
        let groups = blocks.iter().enumerate();
        let of_groups = groups.flat_map(|(slot, blocks)| blocks.iter().map(move |b| (slot, *b)));
        for (slot, block) in of_groups.chain([(slot, state)]) {
            if block != NULL_BLOCK {
                self.retain(Place { kind, slot, block });
            }
        }
        (blocks, state)
    }

    /// The units of a path that the drafter has followed, from the first on.
    pub(super) fn followed(&self, path: &[NodeId]) -> usize {
        let first = path.iter().position(|node| !self.index.is_followed(*node));
        first.unwrap_or(path.len())
    }

    /// Removes from the index the block that no sequence has used for longest, and blocks that are of no use without it. Returns those that
    /// are free; none if sequences use all blocks of the index.
    pub(super) fn evict(&mut self) -> Vec<Place> {
        let given_up = self.index.give_up_oldest();
        self.withdraw_all(given_up)
    }

    /// Removes all nodes from the index. Returns the blocks that are free.
    pub(super) fn forget_prefixes(&mut self) -> Vec<Place> {
        let given_up = self.index.give_up_all();
        self.withdraw_all(given_up)
    }

    /// Notes that blocks have left the index. Returns those that are free.
    fn withdraw_all(&mut self, mut places: Vec<Place>) -> Vec<Place> {
        places.retain(|place| self.withdraw(*place));
        places
    }
}

/// The blocks of a node.
fn places(content: &Content) -> impl Iterator<Item = Place> + use<'_> {
    let kind = content.tree.kind;
    let blocks = content.blocks.iter().copied().enumerate();
    let blocks = blocks.filter(|(_, block)| *block != NULL_BLOCK);
    blocks.map(move |(slot, block)| Place { kind, slot, block })
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet, HashMap};
    use std::hash::{BuildHasherDefault, Hasher};

    use super::*;
    use crate::engine::prefix::Content as Pinned;
    use crate::engine::windows::needed_from;
    use crate::format::random::bits;

    const UNIT: usize = 16;
    const WINDOWS: [Option<usize>; 2] = [None, Some(20)];
    const STATE: usize = WINDOWS.len();

    /// A hasher with two values.
    #[derive(Clone, Default)]
    struct Colliding(u64);

    impl Hasher for Colliding {
        fn write(&mut self, bytes: &[u8]) {
            self.0 += bytes.iter().map(|b| u64::from(*b)).sum::<u64>();
        }

        fn finish(&self) -> u64 {
            self.0 & 1
        }
    }

    type TestPools = Pools<BuildHasherDefault<Colliding>>;

    fn layers() -> Layers {
        Layers {
            unit: UNIT,
            windows: WINDOWS.to_vec(),
            has_states: true,
        }
    }

    fn unit_of(symbol: u8) -> Vec<u32> {
        (0..UNIT as u32).map(|i| i + u32::from(symbol)).collect()
    }

    /// The tree of a block, the symbols up to its own unit, and whether the drafter has followed.
    type Content = (Tree, Vec<u8>, bool);

    #[derive(Clone)]
    struct Held {
        tree: Tree,
        drafts: bool,
        symbols: Vec<u8>,
        groups: [Vec<u32>; 2],
        states: Vec<(usize, u32)>,
        followed: usize,
        path: Vec<NodeId>,
    }

    impl Held {
        fn places(&self) -> Vec<Place> {
            let kind = self.tree.kind;
            let place = |slot, block| Place { kind, slot, block };
            let groups = self.groups.iter().enumerate();
            let groups = groups.flat_map(|(slot, blocks)| blocks.iter().map(move |b| (slot, *b)));
            let states = self.states.iter().map(|(_, block)| (STATE, *block));
            let all = groups.chain(states).filter(|(_, b)| *b != NULL_BLOCK);
            all.map(|(slot, block)| place(slot, block)).collect()
        }
    }

    /// The blocks that were entered for a prefix, by slot, and whether the drafter has followed it.
    #[derive(Clone, Default)]
    struct Entered {
        blocks: [u32; 3],
        is_followed: bool,
    }

    #[derive(Default)]
    struct Program {
        held: Vec<Held>,
        /// Nodes that are being read.
        pinned: Vec<Pinned>,
        contents: HashMap<Place, Content>,
        /// The naive index.
        entered: BTreeMap<(bool, usize, Vec<u8>), Entered>,
    }

    fn key(tree: Tree, symbols: &[u8]) -> (bool, usize, Vec<u8>) {
        (tree.kind == KvType::F32, tree.long_ropes, symbols.to_vec())
    }

    impl Program {
        /// The units of the longest prefix that a sequence can begin with, by trying all.
        fn longest(&self, tree: Tree, symbols: &[u8], follows: bool) -> usize {
            let entered = |units: usize| self.entered.get(&key(tree, &symbols[..units]));
            let usable = |units: &usize| {
                let has = |unit: usize, slot: usize| {
                    let found = entered(unit + 1);
                    found.is_some_and(|e| {
                        e.blocks[slot] != NULL_BLOCK && (e.is_followed || !follows)
                    })
                };
                let groups = WINDOWS.iter().enumerate();
                let sees_all = groups.clone().all(|(slot, window)| {
                    let first = needed_from(*window, units * UNIT) / UNIT;
                    (first..*units).all(|unit| has(unit, slot))
                });
                sees_all && entered(*units).is_some_and(|e| e.blocks[STATE] != NULL_BLOCK)
            };
            (1..=symbols.len()).rev().find(usable).unwrap_or(0)
        }

        /// Forgets what the index gave up.
        fn purge(&mut self, pools: &TestPools) {
            let mut gone = Vec::new();
            for ((is_f32, ropes, symbols), entered) in &mut self.entered {
                let kind = if *is_f32 { KvType::F32 } else { KvType::F16 };
                for (slot, block) in entered.blocks.iter_mut().enumerate() {
                    if *block != NULL_BLOCK && !pools.of(kind)[slot].is_published(*block) {
                        *block = NULL_BLOCK;
                        if slot == 0 {
                            gone.push((*is_f32, *ropes, symbols.clone()));
                        }
                    }
                }
            }
            for (is_f32, ropes, symbols) in gone {
                self.entered
                    .retain(|(f, r, s), _| (*f, *r) != (is_f32, ropes) || !s.starts_with(&symbols));
            }
        }

        fn enter(&mut self, of: &Held) {
            for i in 0..of.symbols.len() {
                let parent = self.entered.get(&key(of.tree, &of.symbols[..i]));
                let after_followed = i == 0 || parent.is_some_and(|e| e.is_followed);
                let entered = self
                    .entered
                    .entry(key(of.tree, &of.symbols[..=i]))
                    .or_default();
                let own = [of.groups[0][i], of.groups[1][i]];
                let lacks =
                    |slot: usize| own[slot] == NULL_BLOCK && entered.blocks[slot] != NULL_BLOCK;
                let follows = i < of.followed
                    && !entered.is_followed
                    && after_followed
                    && !(lacks(0) || lacks(1));
                for slot in 0..2 {
                    let serves = i < of.followed || !entered.is_followed;
                    let empty = entered.blocks[slot] == NULL_BLOCK;
                    if own[slot] != NULL_BLOCK && serves && (empty || follows) {
                        entered.blocks[slot] = own[slot];
                    }
                }
                entered.is_followed |= follows;
                let state = of.states.iter().find(|(after, _)| *after == i + 1);
                if let (Some((_, state)), NULL_BLOCK) = (state, entered.blocks[STATE]) {
                    entered.blocks[STATE] = *state;
                }
            }
        }

        fn take(&mut self, pools: &mut TestPools, of: &Held, slot: usize, units: usize) -> u32 {
            let place = pools.take(of.tree.kind, slot);
            let content = (
                of.tree,
                of.symbols[..units].to_vec(),
                of.drafts || slot == STATE,
            );
            self.contents.insert(place, content);
            place.block
        }

        /// Appends symbols to a sequence: those that a prefix holds, and blocks of its own for the rest.
        fn extend(&mut self, pools: &mut TestPools, of: &mut Held, more: &[u8], drawn: u64) {
            let before = of.symbols.len();
            of.symbols.extend(more);
            let symbols = of.symbols.clone();
            let unit = |i: usize| unit_of(symbols[i]);
            let found = pools.find(of.tree, &mut of.path, symbols.len(), unit, of.drafts);
            self.purge(pools);
            let units = found.as_ref().map_or(0, |found| found.path.len());
            assert_eq!(units, self.longest(of.tree, &symbols, of.drafts));
            let mut first = before;
            if let Some(found) = found.filter(|_| units > before) {
                let (groups, state) = pools.adopt(of.tree.kind, &found);
                of.places()
                    .into_iter()
                    .for_each(|place| assert!(!pools.release(place) || place.block > 0));
                of.followed = pools.followed(&found.path);
                let [full, windowed] = groups.try_into().unwrap();
                of.groups = [full, windowed];
                of.states = vec![(units, state)];
                of.path = found.path;
                for (slot, blocks) in of.groups.iter().enumerate() {
                    let from = needed_from(WINDOWS[slot], units * UNIT) / UNIT;
                    assert!(
                        blocks.len() == units && blocks[from..].iter().all(|b| *b != NULL_BLOCK)
                    );
                }
                first = units;
            }
            for i in first..symbols.len() {
                for slot in 0..2 {
                    let block = self.take(pools, of, slot, i + 1);
                    of.groups[slot].push(block);
                }
                if of.drafts && of.followed == i {
                    of.followed = i + 1;
                }
            }
            if drawn & 1 == 0 && of.states.last().is_none_or(|s| s.0 < symbols.len()) {
                let block = self.take(pools, of, STATE, symbols.len());
                of.states.push((symbols.len(), block));
            }
            let units = Units {
                tree: of.tree,
                tokens: &symbols.iter().flat_map(|s| unit_of(*s)).collect::<Vec<_>>(),
                followed: of.followed,
                blocks: of.groups.iter().map(|blocks| &blocks[..]).collect(),
                states: of.states.clone(),
            };
            let freed = pools.publish(&units, &mut of.path);
            assert!(of.path.len() == symbols.len());
            self.enter(of);
            let used = of.places();
            assert!(freed.iter().all(|place| !used.contains(place)));
        }

        /// Enters a node of a file after a prefix of the index, or after none, and with the blocks that are drawn beside that of all positions.
        fn restore(&mut self, pools: &mut TestPools, drawn: u64) {
            self.purge(pools);
            let there = self
                .entered
                .iter()
                .filter(|(_, e)| e.blocks[0] != NULL_BLOCK);
            let there: Vec<_> = there.map(|(key, _)| key.clone()).collect();
            let random = Tree {
                kind: KvType::ALL[(drawn >> 40) as usize & 1],
                long_ropes: (drawn >> 41) as usize & 1,
                adapter: None,
            };
            let (tree, mut symbols) = match there.get((drawn >> 8) as usize % (there.len() + 3)) {
                None => (random, Vec::new()),
                Some((is_f32, long_ropes, symbols)) => {
                    let kind = if *is_f32 { KvType::F32 } else { KvType::F16 };
                    let long_ropes = *long_ropes;
                    let tree = Tree {
                        kind,
                        long_ropes,
                        adapter: None,
                    };
                    (tree, symbols.clone())
                }
            };
            let mut path = Vec::new();
            pools
                .index
                .walk(tree, &mut path, symbols.iter().map(|s| unit_of(*s)));
            assert_eq!(path.len(), symbols.len());
            let after = self.entered.get(&key(tree, &symbols));
            let after_followed = symbols.is_empty() || after.is_some_and(|e| e.is_followed);
            symbols.push((drawn >> 42) as u8 & 1);
            let is_followed = drawn >> 43 & 1 == 0;
            let blocks =
                [0, 1, STATE].map(|slot| match slot == 0 || drawn >> (44 + slot) & 1 == 0 {
                    false => NULL_BLOCK,
                    true => {
                        let place = pools.take(tree.kind, slot);
                        let content = (tree, symbols.clone(), is_followed || slot == STATE);
                        self.contents.insert(place, content);
                        place.block
                    }
                });
            let first = pools.reserve_times(3);
            let entry = Entry {
                tree,
                parent: path.last().copied(),
                tokens: &unit_of(symbols[symbols.len() - 1]),
                is_followed,
                blocks: &blocks,
                times: &[first, first + 1, first + 2],
            };
            let (node, freed) = pools.enter(&entry);
            let entered = self.entered.entry(key(tree, &symbols)).or_default();
            for (slot, &block) in blocks.iter().enumerate() {
                let place = Place {
                    kind: tree.kind,
                    slot,
                    block,
                };
                let serves = is_followed || !entered.is_followed || slot == STATE;
                let is_needed = entered.blocks[slot] == NULL_BLOCK && serves;
                assert_eq!(freed.contains(&place), block != NULL_BLOCK && !is_needed);
                if is_needed {
                    entered.blocks[slot] = block;
                }
            }
            let is_own = |slot: usize| [NULL_BLOCK, blocks[slot]].contains(&entered.blocks[slot]);
            entered.is_followed |= is_followed && after_followed && is_own(0) && is_own(1);
            let (held, has_block) = pools.held(tree, entry.parent, entry.tokens).unwrap();
            assert_eq!(
                (Some(held), has_block),
                (node, entered.blocks.map(|b| b != 0).to_vec())
            );
        }

        /// Begins to read a node, or ends that.
        fn read(&mut self, pools: &mut TestPools, drawn: u64) {
            let nodes = pools.list();
            let index = (drawn >> 8) as usize;
            if drawn >> 43 & 1 == 0 && !self.pinned.is_empty() {
                let pinned = self.pinned.swap_remove(index % self.pinned.len());
                let freed = pools.unpin(&pinned);
                let is_published = |p: &Place| pools.of(p.kind)[p.slot].is_published(p.block);
                assert!(!freed.iter().any(is_published));
            } else if let Some(node) = nodes.get(index % nodes.len().max(1)) {
                let pinned = pools.pin(node.id).unwrap();
                assert_eq!((pinned.tree, &pinned.blocks), (node.tree, &node.blocks));
                assert_eq!(pinned.last_uses.iter().max(), Some(&node.last_use));
                self.pinned.push(pinned);
            }
        }

        /// Every block that a sequence uses holds the tokens of that sequence, whoever filled it.
        fn check(&self, pools: &TestPools) {
            let mut used = BTreeSet::new();
            for held in &self.held {
                let own = |place: &Place| &self.contents[place];
                for place in held.places() {
                    let (tree, symbols, is_drafted) = own(&place);
                    let units = match place.slot {
                        STATE => held.states.iter().find(|s| s.1 == place.block).unwrap().0,
                        slot => {
                            held.groups[slot]
                                .iter()
                                .position(|b| *b == place.block)
                                .unwrap()
                                + 1
                        }
                    };
                    assert_eq!((*tree, &symbols[..]), (held.tree, &held.symbols[..units]));
                    assert!(*is_drafted || units > held.followed);
                    used.insert((place.kind == KvType::F32, place.slot, place.block));
                }
            }
            let pinned = self.pinned.iter().flat_map(places);
            used.extend(pinned.map(|p| (p.kind == KvType::F32, p.slot, p.block)));
            let pools = KvType::ALL.iter().flat_map(|kind| pools.of(*kind));
            assert_eq!(pools.map(BlockPool::used).sum::<usize>(), used.len());
        }
    }

    /// Random programs of sequences that begin alike, and that grow, fork, shrink and end, while nodes are read for a file and entered from
    /// one, against a map from symbols to blocks.
    #[test]
    fn prefixes_are_those_of_a_map_from_tokens_to_blocks() {
        let mut found = 0;
        for seed in 0..40 {
            let mut pools = TestPools::new(layers(), BuildHasherDefault::default());
            let mut program = Program::default();
            for step in 0..250 {
                let drawn = bits(seed, step) | bits(seed + 1000, step) << 32;
                let index = (drawn >> 8) as usize % program.held.len().max(1);
                let more: Vec<u8> = (0..((1 + drawn) >> 20) & 3)
                    .map(|i| (drawn >> (24 + i)) as u8 & 1)
                    .collect();
                match drawn % 9 {
                    0 | 1 if program.held.len() < 8 => {
                        let mut new = Held {
                            tree: Tree {
                                kind: KvType::ALL[(drawn >> 40) as usize & 1],
                                long_ropes: (drawn >> 41) as usize & 1,
                                adapter: None,
                            },
                            drafts: drawn >> 42 & 1 == 0,
                            symbols: Vec::new(),
                            groups: Default::default(),
                            states: Vec::new(),
                            followed: 0,
                            path: Vec::new(),
                        };
                        program.extend(&mut pools, &mut new, &more, drawn >> 43);
                        found += usize::from(new.symbols.len() > 1 && new.states.len() == 1);
                        program.held.push(new);
                    }
                    2 | 3 if !program.held.is_empty() => {
                        let mut held = program.held.swap_remove(index);
                        program.extend(&mut pools, &mut held, &more, drawn >> 43);
                        // A window may give up the blocks that it has passed.
                        let passed = needed_from(WINDOWS[1], held.symbols.len() * UNIT) / UNIT;
                        for block in &mut held.groups[1][..passed] {
                            let block = std::mem::replace(block, NULL_BLOCK);
                            let (kind, slot) = (held.tree.kind, 1);
                            if block != NULL_BLOCK {
                                pools.release(Place { kind, slot, block });
                            }
                        }
                        program.held.push(held);
                    }
                    4 if !program.held.is_empty() && program.held.len() < 8 => {
                        let fork = program.held[index].clone();
                        fork.places()
                            .into_iter()
                            .for_each(|place| pools.retain(place));
                        program.held.push(fork);
                    }
                    5 if !program.held.is_empty() => {
                        let held = program.held.swap_remove(index);
                        for place in held.places().into_iter().rev() {
                            pools.release(place);
                        }
                    }
                    6 => program.read(&mut pools, drawn),
                    7 => program.restore(&mut pools, drawn),
                    _ => {
                        let pinned = program.pinned.iter().flat_map(places);
                        let held = program.held.iter().flat_map(Held::places);
                        let used: Vec<Place> = held.chain(pinned).collect();
                        let cached = KvType::ALL.iter().flat_map(|kind| pools.of(*kind));
                        let cached = cached.map(BlockPool::cached).sum::<usize>();
                        let freed = pools.evict();
                        assert_eq!(freed.is_empty(), cached == 0);
                        assert!(freed.iter().all(|place| !used.contains(place)));
                    }
                }
                program.check(&pools);
            }
            for held in std::mem::take(&mut program.held) {
                held.places().into_iter().for_each(|place| {
                    pools.release(place);
                });
            }
            for pinned in std::mem::take(&mut program.pinned) {
                pools.unpin(&pinned);
            }
            while !pools.evict().is_empty() {}
            let all = KvType::ALL.iter().flat_map(|kind| pools.of(*kind));
            assert!(
                all.into_iter()
                    .all(|pool| (pool.used(), pool.cached()) == (0, 0))
            );
            assert_eq!(pools.index.len(), 0);
        }
        assert!(found > 100, "{found} sequences began with a prefix");
    }

    /// The ends of prefixes go first, and what was used last goes last.
    #[test]
    fn the_least_recently_used_goes_first() {
        let mut pools = TestPools::new(layers(), BuildHasherDefault::default());
        let mut program = Program::default();
        let tree = Tree {
            kind: KvType::F16,
            long_ropes: 0,
            adapter: None,
        };
        let new = |program: &mut Program, pools: &mut TestPools, symbols: &[u8]| {
            let mut held = Held {
                tree,
                drafts: false,
                symbols: Vec::new(),
                groups: Default::default(),
                states: Vec::new(),
                followed: 0,
                path: Vec::new(),
            };
            for symbol in symbols {
                program.extend(pools, &mut held, &[*symbol], 0);
            }
            held
        };
        let end = |pools: &mut TestPools, held: Held| {
            let places = held.places();
            let order = |place: &Place| {
                let unit = held
                    .groups
                    .iter()
                    .find_map(|g| g.iter().position(|b| *b == place.block));
                std::cmp::Reverse(if place.slot == STATE { Some(0) } else { unit })
            };
            let mut places = places;
            places.sort_by_key(order);
            places.into_iter().for_each(|place| {
                pools.release(place);
            });
        };
        let (first, second) = (
            new(&mut program, &mut pools, &[1, 2, 3]),
            new(&mut program, &mut pools, &[7, 8]),
        );
        end(&mut pools, first);
        end(&mut pools, second);
        let units = |pools: &TestPools, symbols: &[u8]| {
            let unit = |i: usize| unit_of(symbols[i]);
            let found = pools.find(tree, &mut Vec::new(), symbols.len(), unit, false);
            found.map_or(0, |found| found.path.len())
        };
        assert_eq!((units(&pools, &[1, 2, 3]), units(&pools, &[7, 8])), (3, 2));
        pools.evict();
        assert_eq!((units(&pools, &[1, 2, 3]), units(&pools, &[7, 8])), (2, 2));
        // To be read is no use.
        for node in pools.list() {
            let pinned = pools.pin(node.id).unwrap();
            assert!(pools.unpin(&pinned).is_empty());
        }
        // A use makes the first one the last to go.
        let again = new(&mut program, &mut pools, &[1, 2]);
        end(&mut pools, again);
        while units(&pools, &[7, 8]) > 0 {
            assert_eq!(units(&pools, &[1, 2]), 2);
            assert!(!pools.evict().is_empty());
        }
        while units(&pools, &[1]) > 0 {
            assert!(!pools.evict().is_empty());
        }
    }
}
