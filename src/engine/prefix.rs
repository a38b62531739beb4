//! The prefix index: which blocks hold the keys, values and recurrent states of which first tokens. A tree, of which each node stands for one
//! unit of tokens after those of its parent. Pure bookkeeping: knows no memory and no sequence.

use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher;
use std::num::NonZeroU64;
use std::sync::Arc;

use super::windows::{KEPT_MULTIPLE, kept_from, needed_from};
use crate::model::KvType;
use crate::model::kv::NULL_BLOCK;

/// Names a node. No two nodes of an index ever have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct NodeId(u64);

/// Everything beside the tokens that decides keys and values. Prefixes of different trees never mix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tree {
    /// Format of the keys and values.
    pub(super) kind: KvType,
    /// The number of the model's rotations whose long table applies.
    pub(super) long_ropes: usize,
    /// The identity of the adapter, if the sequence has one.
    pub(super) adapter: Option<NonZeroU64>,
}

/// The layers of a model, as far as a prefix depends on them. A node has a slot for a block of each group, and one after those for the block
/// of the recurrent state after its last position.
#[derive(Clone, Debug)]
pub(super) struct Layers {
    /// Positions of a node: those of a block.
    pub(super) unit: usize,
    /// Positions that each group of layers sees.
    pub(super) windows: Vec<Option<usize>>,
    /// Whether there are recurrent layers.
    pub(super) has_states: bool,
}

impl Layers {
    /// The slot of the recurrent state.
    pub(super) fn state(&self) -> usize {
        self.windows.len()
    }

    /// Slots of a node.
    pub(super) fn slots(&self) -> usize {
        self.windows.len() + 1
    }

    /// Whether a node without a block in this slot is of no use: the layers of the slot see all positions.
    fn is_essential(&self, slot: usize) -> bool {
        self.windows.get(slot) == Some(&None)
    }
}

/// A block of one slot, in the cache of one format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub(super) kind: KvType,
    pub(super) slot: usize,
    pub(super) block: u32,
}

/// A prefix that a sequence can begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Prefix {
    /// Its nodes, first to last.
    pub(super) path: Vec<NodeId>,
    /// The first unit of which each group of layers has a block.
    pub(super) first: Vec<usize>,
}

/// The time of the last use of a block that a sequence uses now.
pub(super) const IN_USE: u64 = u64::MAX;

/// A node, in a list of all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    pub(super) id: NodeId,
    /// `None` if it is of the first tokens.
    pub(super) parent: Option<NodeId>,
    pub(super) tree: Tree,
    /// When one of its blocks was last used.
    pub(super) last_use: u64,
    /// Whether the drafter has followed its positions and all before them.
    pub(super) is_followed: bool,
    /// By slot; the null block where there is none.
    pub(super) blocks: Box<[u32]>,
}

/// The tokens and blocks of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) tree: Tree,
    pub(super) tokens: Arc<[u32]>,
    /// Whether the drafter has followed its positions and all before them.
    pub(super) is_followed: bool,
    /// By slot; the null block where there is none.
    pub(super) blocks: Box<[u32]>,
    /// By slot: when the block was last used; 0 where there is none.
    pub(super) last_uses: Box<[u64]>,
}

/// One unit of tokens.
#[derive(Debug)]
struct Node<S> {
    tree: Tree,
    parent: Option<NodeId>,
    tokens: Arc<[u32]>,
    children: HashMap<Arc<[u32]>, NodeId, S>,
    /// Whether the drafter has followed its positions and all before them.
    is_followed: bool,
    /// By slot; the null block where there is none.
    blocks: Box<[u32]>,
    /// By slot: when its block was last used by a sequence, if none uses it now.
    unused_since: Box<[Option<u64>]>,
}

/// The nodes, and the order in which their blocks are given up.
#[derive(Debug)]
pub(super) struct PrefixIndex<S = RandomState> {
    layers: Layers,
    nodes: HashMap<NodeId, Node<S>>,
    roots: HashMap<Tree, NodeId>,
    /// Blocks that no sequence uses, by the time of their last use.
    unused: BTreeMap<u64, (NodeId, usize)>,
    /// Uses so far.
    time: u64,
    /// Nodes so far.
    count: u64,
    hasher: S,
}

impl<S> Node<S> {
    /// When the block in a slot was last used; 0 if there is none.
    fn last_use(&self, slot: usize) -> u64 {
        match self.blocks[slot] {
            NULL_BLOCK => 0,
            _ => self.unused_since[slot].unwrap_or(IN_USE),
        }
    }
}

impl NodeId {
    #[cfg(test)]
    pub(super) fn of(number: u64) -> NodeId {
        NodeId(number)
    }
}

impl<S: BuildHasher + Clone> PrefixIndex<S> {
    pub(super) fn new(layers: Layers, hasher: S) -> PrefixIndex<S> {
        debug_assert!(KEPT_MULTIPLE.is_multiple_of(layers.unit));
        PrefixIndex {
            layers,
            nodes: HashMap::new(),
            roots: HashMap::new(),
            unused: BTreeMap::new(),
            time: 0,
            count: 0,
            hasher,
        }
    }

    pub(super) fn layers(&self) -> &Layers {
        &self.layers
    }

    /// Whether a node is still in the index, and with it all nodes before it.
    pub(super) fn contains(&self, node: NodeId) -> bool {
        self.nodes.contains_key(&node)
    }

    /// Whether the drafter has followed a node's positions and all before them.
    pub(super) fn is_followed(&self, node: NodeId) -> bool {
        self.nodes.get(&node).is_some_and(|node| node.is_followed)
    }

    /// The block in a slot of a node; the null block if there is none.
    pub(super) fn block(&self, node: NodeId, slot: usize) -> u32 {
        let node = self.nodes.get(&node);
        node.map_or(NULL_BLOCK, |node| node.blocks[slot])
    }

    /// All nodes but roots, in no order.
    pub(super) fn list(&self) -> Vec<Listed> {
        let is_root = |id: &NodeId| self.nodes[id].parent.is_none();
        let nodes = self.nodes.iter().filter_map(|(&id, node)| {
            let parent = node.parent?;
            let last_uses = (0..self.layers.slots()).map(|slot| node.last_use(slot));
            Some(Listed {
                id,
                parent: Some(parent).filter(|parent| !is_root(parent)),
                tree: node.tree,
                last_use: last_uses.max().unwrap_or(0),
                is_followed: node.is_followed,
                blocks: node.blocks.clone(),
            })
        });
        nodes.collect()
    }

    /// The tokens and blocks of a node, if it is still in the index.
    pub(super) fn content(&self, id: NodeId) -> Option<Content> {
        let node = self.nodes.get(&id)?;
        let last_uses = (0..self.layers.slots()).map(|slot| node.last_use(slot));
        Some(Content {
            tree: node.tree,
            tokens: node.tokens.clone(),
            is_followed: node.is_followed,
            blocks: node.blocks.clone(),
            last_uses: last_uses.collect(),
        })
    }

    /// The node of a unit of tokens after those of `parent`, or after none, if there is one.
    pub(super) fn child(
        &self,
        tree: Tree,
        parent: Option<NodeId>,
        tokens: &[u32],
    ) -> Option<NodeId> {
        let parent = parent.or_else(|| self.roots.get(&tree).copied())?;
        self.nodes.get(&parent)?.children.get(tokens).copied()
    }

    /// Appends to `path`, which begins at the root of `tree`, the nodes of the tokens that `units` gives: one unit of tokens each.
    pub(super) fn walk<T: AsRef<[u32]>>(
        &self,
        tree: Tree,
        path: &mut Vec<NodeId>,
        units: impl IntoIterator<Item = T>,
    ) {
        let Some(mut at) = path.last().or_else(|| self.roots.get(&tree)).copied() else {
            return;
        };
        for tokens in units {
            let Some(&child) = self.nodes[&at].children.get(tokens.as_ref()) else {
                return;
            };
            path.push(child);
            at = child;
        }
    }

    /// The longest part of a path that a sequence can begin with: every group of layers has the blocks that the next token sees, and
    /// recurrent layers the state of the end. For a sequence that the drafter follows, the drafter has followed all of it.
    pub(super) fn longest(&self, path: &[NodeId], follows: bool) -> Option<Prefix> {
        let Layers {
            unit,
            windows,
            has_states,
        } = &self.layers;
        // The first unit of the blocks of a group without a gap before the end.
        let mut gapless = vec![0; windows.len()];
        let mut longest = None;
        for (i, node) in path.iter().map(|node| &self.nodes[node]).enumerate() {
            if follows && !node.is_followed {
                break;
            }
            for (first, &block) in gapless.iter_mut().zip(&node.blocks) {
                if block == NULL_BLOCK {
                    *first = i + 1;
                }
            }
            let len = (i + 1) * unit;
            let mut groups = windows.iter().zip(&gapless);
            let sees_all = groups.all(|(window, first)| first * unit <= needed_from(*window, len));
            let has_state = !has_states || node.blocks[self.layers.state()] != NULL_BLOCK;
            if sees_all && has_state {
                longest = Some((i + 1, gapless.clone()));
            }
        }
        let (units, gapless) = longest?;
        let first = windows.iter().zip(gapless).map(|(window, first)| {
            let from = (first * unit).next_multiple_of(KEPT_MULTIPLE);
            from.max(kept_from(*window, units * unit)) / unit
        });
        Some(Prefix {
            first: first.collect(),
            path: path[..units].to_vec(),
        })
    }

    /// The node of a unit of tokens after those of `parent`, or after none, without blocks if it is new.
    pub(super) fn add(&mut self, tree: Tree, parent: Option<NodeId>, tokens: &[u32]) -> NodeId {
        let parent = match parent {
            Some(parent) => parent,
            None => match self.roots.get(&tree) {
                Some(&root) => root,
                None => {
                    let root = self.new_node(tree, None, Arc::default());
                    self.roots.insert(tree, root);
                    root
                }
            },
        };
        if let Some(&child) = self.nodes[&parent].children.get(tokens) {
            return child;
        }
        let tokens: Arc<[u32]> = tokens.into();
        let child = self.new_node(tree, Some(parent), tokens.clone());
        if let Some(parent) = self.nodes.get_mut(&parent) {
            parent.children.insert(tokens, child);
        }
        child
    }

    fn new_node(&mut self, tree: Tree, parent: Option<NodeId>, tokens: Arc<[u32]>) -> NodeId {
        self.count += 1;
        let (id, slots) = (NodeId(self.count), self.layers.slots());
        let node = Node {
            tree,
            parent,
            tokens,
            children: HashMap::with_hasher(self.hasher.clone()),
            is_followed: false,
            blocks: vec![NULL_BLOCK; slots].into(),
            unused_since: vec![None; slots].into(),
        };
        self.nodes.insert(id, node);
        id
    }

    /// Says that the drafter has followed a node's positions and all before them.
    pub(super) fn set_followed(&mut self, node: NodeId) {
        if let Some(node) = self.nodes.get_mut(&node) {
            node.is_followed = true;
        }
    }

    /// Puts a block that a sequence uses into a slot of a node. Returns the block that was there; the null block if there was none.
    pub(super) fn put(&mut self, node: NodeId, slot: usize, block: u32) -> u32 {
        self.use_again(node, slot);
        let node = self.nodes.get_mut(&node);
        node.map_or(NULL_BLOCK, |node| {
            std::mem::replace(&mut node.blocks[slot], block)
        })
    }

    /// Says that no sequence uses the block in a slot any more: of such blocks it is the last to be given up.
    pub(super) fn leave(&mut self, node: NodeId, slot: usize) {
        let time = self.reserve_times(1);
        self.leave_at(node, slot, time);
    }

    /// The first of `count` times that are later than all before.
    pub(super) fn reserve_times(&mut self, count: u64) -> u64 {
        let first = self.time + 1;
        self.time += count;
        first
    }

    /// Says that no sequence uses the block in a slot any more, and that its last use was at a `time` that no other block has.
    pub(super) fn leave_at(&mut self, node: NodeId, slot: usize, time: u64) {
        if let Some(of_node) = self.nodes.get_mut(&node) {
            of_node.unused_since[slot] = Some(time);
            self.unused.insert(time, (node, slot));
        }
    }

    /// Says that a sequence uses the block in a slot.
    pub(super) fn use_again(&mut self, node: NodeId, slot: usize) {
        let node = self.nodes.get_mut(&node);
        if let Some(time) = node.and_then(|node| node.unused_since[slot].take()) {
            self.unused.remove(&time);
        }
    }

    /// Gives up the block that no sequence has used for longest, and blocks that are of no use without it. Empty if sequences use all.
    pub(super) fn give_up_oldest(&mut self) -> Vec<Place> {
        let mut given_up = Vec::new();
        let Some((_, &(id, slot))) = self.unused.first_key_value() else {
            return given_up;
        };
        if self.layers.is_essential(slot) {
            self.remove(id, &mut given_up);
        } else {
            self.empty(id, slot, &mut given_up);
            self.prune(id);
        }
        given_up
    }

    /// Gives up all nodes and their blocks.
    pub(super) fn give_up_all(&mut self) -> Vec<Place> {
        let mut given_up = Vec::new();
        for root in std::mem::take(&mut self.roots).into_values() {
            self.remove(root, &mut given_up);
        }
        given_up
    }

    /// Removes the block in a slot of a node.
    fn empty(&mut self, id: NodeId, slot: usize, given_up: &mut Vec<Place>) {
        self.use_again(id, slot);
        let Some(node) = self.nodes.get_mut(&id) else {
            return;
        };
        let block = std::mem::replace(&mut node.blocks[slot], NULL_BLOCK);
        if block != NULL_BLOCK {
            let kind = node.tree.kind;
            given_up.push(Place { kind, slot, block });
        }
    }

    /// Removes a node and all after it.
    fn remove(&mut self, id: NodeId, given_up: &mut Vec<Place>) {
        let parent = self.detach(id);
        let mut left = vec![id];
        while let Some(id) = left.pop() {
            (0..self.layers.slots()).for_each(|slot| self.empty(id, slot, given_up));
            let node = self.nodes.remove(&id);
            left.extend(node.iter().flat_map(|node| node.children.values()));
        }
        if let Some(parent) = parent {
            self.prune(parent);
        }
    }

    /// Removes a node, and the nodes before it, as far as they have neither blocks nor children.
    pub(super) fn prune(&mut self, id: NodeId) {
        let mut next = Some(id);
        while let Some(id) = next {
            let is_bare = |node: &Node<S>| {
                let has_blocks = node.blocks.iter().any(|block| *block != NULL_BLOCK);
                !has_blocks && node.children.is_empty()
            };
            if !self.nodes.get(&id).is_some_and(is_bare) {
                return;
            }
            next = self.detach(id);
            if let Some(node) = self.nodes.remove(&id).filter(|node| node.parent.is_none()) {
                self.roots.remove(&node.tree);
            }
        }
    }

    /// Removes a node from its parent, which is returned.
    fn detach(&mut self, id: NodeId) -> Option<NodeId> {
        let node = self.nodes.get(&id)?;
        let (parent, tokens) = (node.parent?, node.tokens.clone());
        let siblings = &mut self.nodes.get_mut(&parent)?.children;
        siblings.remove(&tokens);
        Some(parent)
    }

    /// Nodes, without roots.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.nodes.len() - self.roots.len()
    }
}
