//! Reference counts of the blocks of one arena. Pure bookkeeping: knows no memory and no sequence.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::model::kv::NULL_BLOCK;

/// Counts the users of blocks. Blocks are numbered from 1 on; the null block belongs to nobody.
#[derive(Debug, Default)]
pub(super) struct BlockPool {
    /// Users of each block, from block 1 on.
    users: Vec<u32>,
    free: BinaryHeap<Reverse<u32>>,
}

impl BlockPool {
    /// Takes a block with one user: the free one with the lowest number, so that the memory in use stays together.
    pub(super) fn take(&mut self) -> u32 {
        let block = match self.free.pop() {
            Some(Reverse(block)) => block,
            None => {
                self.users.push(0);
                self.users.len() as u32
            }
        };
        *self.count(block) = 1;
        block
    }

    /// Adds a user of a block that has some.
    pub(super) fn retain(&mut self, block: u32) {
        let users = self.count(block);
        debug_assert!(*users > 0, "block {block} is free");
        *users += 1;
    }

    /// Removes a user. Returns whether it was the last, so that the block is free.
    pub(super) fn release(&mut self, block: u32) -> bool {
        let users = self.count(block);
        debug_assert!(*users > 0, "block {block} is free");
        *users -= 1;
        let is_free = *users == 0;
        if is_free {
            self.free.push(Reverse(block));
        }
        is_free
    }

    /// Whether several users share a block, so that none may write it.
    pub(super) fn is_shared(&self, block: u32) -> bool {
        self.users[block as usize - 1] > 1
    }

    /// Blocks in use.
    pub(super) fn used(&self) -> usize {
        self.users.len() - self.free.len()
    }

    fn count(&mut self, block: u32) -> &mut u32 {
        debug_assert_ne!(block, NULL_BLOCK);
        &mut self.users[block as usize - 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::random::bits;

    #[test]
    fn blocks_are_free_after_their_last_user_and_the_lowest_is_taken_first() {
        let mut pool = BlockPool::default();
        assert_eq!([pool.take(), pool.take(), pool.take()], [1, 2, 3]);
        pool.retain(2);
        assert!(pool.is_shared(2) && !pool.is_shared(1));
        assert!(!pool.release(2));
        assert!(pool.release(3) && pool.release(2));
        assert_eq!(pool.used(), 1);
        assert_eq!([pool.take(), pool.take(), pool.take()], [2, 3, 4]);
        assert_eq!(pool.used(), 4);
    }

    /// Random programs against a list of the users of each block.
    #[test]
    fn counts_are_those_of_a_list_of_users() {
        let (mut pool, mut held) = (BlockPool::default(), Vec::<u32>::new());
        for step in 0..10_000 {
            let drawn = bits(7, step);
            let index = (drawn >> 8) as usize % held.len().max(1);
            match drawn % 3 {
                1 if !held.is_empty() => {
                    pool.retain(held[index]);
                    held.push(held[index]);
                }
                2 if !held.is_empty() => {
                    let block = held.swap_remove(index);
                    assert_eq!(pool.release(block), !held.contains(&block));
                }
                _ => held.push(pool.take()),
            }
            let mut used = held.clone();
            used.sort_unstable();
            let shared = used.windows(2).filter(|pair| pair[0] == pair[1]);
            assert!(
                shared
                    .map(|pair| pair[0])
                    .all(|block| pool.is_shared(block))
            );
            used.dedup();
            assert_eq!(pool.used(), used.len());
        }
    }
}
