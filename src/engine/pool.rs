//! Reference counts of the blocks of one arena. Pure bookkeeping: knows no memory and no sequence.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::prefix::NodeId;
use crate::model::kv::NULL_BLOCK;

/// Counts the users of blocks. Blocks are numbered from 1 on; the null block belongs to nobody.
#[derive(Debug, Default)]
pub(super) struct BlockPool {
    /// From block 1 on.
    blocks: Vec<Users>,
    free: BinaryHeap<Reverse<u32>>,
    /// Blocks that only the prefix index uses.
    cached: usize,
}

/// The users of one block.
#[derive(Clone, Copy, Debug, Default)]
struct Users {
    /// The prefix index counts as one.
    count: u32,
    /// The node of the prefix index that has the block.
    node: Option<NodeId>,
}

impl Users {
    fn is_cached(&self) -> bool {
        self.count == 1 && self.node.is_some()
    }
}

/// The state of a block after a sequence has left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// Other sequences use it.
    InUse,
    /// Only this node of the prefix index uses it.
    Cached(NodeId),
    /// Nobody uses it.
    Free,
}

impl BlockPool {
    /// Takes a block with one user: the free one with the lowest number, so that the memory in use stays together.
    pub(super) fn take(&mut self) -> u32 {
        let block = match self.free.pop() {
            Some(Reverse(block)) => block,
            None => {
                self.blocks.push(Users::default());
                self.blocks.len() as u32
            }
        };
        self.users(block).count = 1;
        block
    }

    /// Adds a sequence to the users of a block that has some. Returns the node of the prefix index if that was the only user.
    pub(super) fn retain(&mut self, block: u32) -> Option<NodeId> {
        let users = self.users(block);
        debug_assert!(users.count > 0, "block {block} is free");
        let node = users.node.filter(|_| users.is_cached());
        users.count += 1;
        self.cached -= usize::from(node.is_some());
        node
    }

    /// Removes a sequence from the users of a block.
    pub(super) fn release(&mut self, block: u32) -> Left {
        let users = self.users(block);
        debug_assert!(!users.is_cached(), "no sequence uses block {block}");
        self.leave(block)
    }

    /// Adds a node of the prefix index to the users of a block that a sequence uses and no node has.
    pub(super) fn publish(&mut self, block: u32, node: NodeId) {
        let users = self.users(block);
        debug_assert!(users.count > 0, "block {block} is free");
        debug_assert!(users.node.is_none(), "block {block} has a node");
        users.count += 1;
        users.node = Some(node);
    }

    /// Removes the prefix index from the users of a block. Returns whether it was the only one, so that the block is free.
    pub(super) fn withdraw(&mut self, block: u32) -> bool {
        let users = self.users(block);
        debug_assert!(users.node.is_some(), "block {block} is not published");
        let was_cached = users.is_cached();
        users.node = None;
        self.cached -= usize::from(was_cached);
        self.leave(block) == Left::Free
    }

    fn leave(&mut self, block: u32) -> Left {
        let users = self.users(block);
        debug_assert!(users.count > 0, "block {block} is free");
        users.count -= 1;
        match (users.count, users.node) {
            (0, _) => {
                self.free.push(Reverse(block));
                Left::Free
            }
            (1, Some(node)) => {
                self.cached += 1;
                Left::Cached(node)
            }
            _ => Left::InUse,
        }
    }

    /// Whether several users share a block, so that none may write it.
    pub(super) fn is_shared(&self, block: u32) -> bool {
        self.blocks[block as usize - 1].count > 1
    }

    /// Whether the prefix index uses a block.
    pub(super) fn is_published(&self, block: u32) -> bool {
        self.blocks[block as usize - 1].node.is_some()
    }

    /// Blocks that sequences use.
    pub(super) fn used(&self) -> usize {
        self.blocks.len() - self.free.len() - self.cached
    }

    /// Blocks that only the prefix index uses.
    pub(super) fn cached(&self) -> usize {
        self.cached
    }

    fn users(&mut self, block: u32) -> &mut Users {
        debug_assert_ne!(block, NULL_BLOCK);
        &mut self.blocks[block as usize - 1]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::format::random::bits;

    #[test]
    fn blocks_are_free_after_their_last_user_and_the_lowest_is_taken_first() {
        let mut pool = BlockPool::default();
        assert_eq!([pool.take(), pool.take(), pool.take()], [1, 2, 3]);
        pool.retain(2);
        assert!(pool.is_shared(2) && !pool.is_shared(1));
        assert_eq!(pool.release(2), Left::InUse);
        assert_eq!([pool.release(3), pool.release(2)], [Left::Free, Left::Free]);
        assert_eq!(pool.used(), 1);
        assert_eq!([pool.take(), pool.take(), pool.take()], [2, 3, 4]);
        assert_eq!(pool.used(), 4);
    }

    #[test]
    fn published_blocks_are_cached_after_their_last_sequence() {
        let (mut pool, node) = (BlockPool::default(), NodeId::of(7));
        let block = pool.take();
        pool.publish(block, node);
        assert!(pool.is_published(block) && pool.is_shared(block));
        assert_eq!(pool.release(block), Left::Cached(node));
        assert_eq!((pool.used(), pool.cached()), (0, 1));
        assert_eq!(pool.retain(block), Some(node));
        assert_eq!(pool.retain(block), None);
        assert_eq!((pool.used(), pool.cached()), (1, 0));
        assert_eq!(pool.release(block), Left::InUse);
        assert!(!pool.withdraw(block));
        assert_eq!(pool.release(block), Left::Free);
        assert_eq!((pool.used(), pool.cached()), (0, 0));
    }

    /// Random programs against a list of the users of each block.
    #[test]
    fn counts_are_those_of_a_list_of_users() {
        let (mut pool, mut held) = (BlockPool::default(), Vec::<u32>::new());
        let mut published = BTreeMap::<u32, NodeId>::new();
        for step in 0..10_000 {
            let drawn = bits(7, step);
            let index = (drawn >> 8) as usize % held.len().max(1);
            match drawn % 5 {
                1 if !held.is_empty() => {
                    assert_eq!(pool.retain(held[index]), None);
                    held.push(held[index]);
                }
                2 if !held.is_empty() => {
                    let block = held.swap_remove(index);
                    let left = match (held.contains(&block), published.get(&block)) {
                        (true, _) => Left::InUse,
                        (false, Some(&node)) => Left::Cached(node),
                        (false, None) => Left::Free,
                    };
                    assert_eq!(pool.release(block), left);
                }
                3 if !held.is_empty() && !published.contains_key(&held[index]) => {
                    let node = NodeId::of(step);
                    published.insert(held[index], node);
                    pool.publish(held[index], node);
                }
                4 if !published.is_empty() => {
                    let count = published.len();
                    let nth = published.iter().nth(drawn as usize % count);
                    let (block, node) = nth.map(|(block, node)| (*block, *node)).unwrap();
                    let is_cached = !held.contains(&block);
                    if is_cached && drawn & 256 == 0 {
                        assert_eq!(pool.retain(block), Some(node));
                        held.push(block);
                    } else {
                        published.remove(&block);
                        assert_eq!(pool.withdraw(block), is_cached);
                    }
                }
                _ => held.push(pool.take()),
            }
            let mut used = held.clone();
            used.sort_unstable();
            used.dedup();
            for &block in &used {
                let users = held.iter().filter(|held| **held == block).count();
                let all = users + usize::from(published.contains_key(&block));
                assert_eq!(pool.is_shared(block), all > 1);
            }
            let cached = published.keys().filter(|block| !held.contains(block));
            assert_eq!((pool.used(), pool.cached()), (used.len(), cached.count()));
        }
    }
}
