//! Block tables: which blocks hold the keys and values of a sequence, and its recurrent state.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::ops::attention::KvType;

/// Number of the block that stands for positions that are no longer kept. It belongs to nobody.
pub const NULL_BLOCK: u32 = 0;

/// The blocks of one sequence: for each group of layers, those of its positions, first to last.
///
/// The owner of tables uses their blocks, and the engine counts it as a user: a sequence, a node that is read, or a node that is filled. No
/// block is freed meanwhile, and a block with several users is not written, which makes accesses to host memory sound.
#[derive(Debug)]
pub struct KvTables {
    kind: KvType,
    groups: Vec<Vec<u32>>,
    state: StateTable,
    version: u64,
}

/// The blocks that a pass reads and writes the state of a sequence in. They may be the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateBlocks {
    /// The state before the pass; the null block for that of no token.
    pub read: u32,
    /// The state after it.
    pub write: u32,
}

impl StateBlocks {
    /// The null block twice, for rows that belong to no sequence.
    pub const NULL: StateBlocks = StateBlocks {
        read: NULL_BLOCK,
        write: NULL_BLOCK,
    };
}

/// The blocks of a sequence's recurrent state: of the positions held, and of those that the next run comes to.
#[derive(Clone, Debug, Default)]
pub struct StateTable {
    /// Positions held.
    held: usize,
    /// The state after them; the null block if there are none.
    current: u32,
    /// For the next run: positions, in order, and the blocks that get the state after them.
    staged: Vec<(usize, u32)>,
    /// The block that gets the state after one position more, if a GPU runs it ahead.
    ahead: Option<u32>,
}

impl StateTable {
    /// The state of `held` positions in block `current`, with nothing staged.
    pub fn new(held: usize, current: u32) -> StateTable {
        StateTable {
            held,
            current,
            staged: Vec::new(),
            ahead: None,
        }
    }

    /// Positions held.
    pub fn held(&self) -> usize {
        self.held
    }

    /// The block of the state of all positions held; the null block if there are none.
    pub fn current(&self) -> u32 {
        self.current
    }

    /// The blocks staged for the next run, each with the number of positions that its state is of, in their order.
    pub fn staged(&self) -> &[(usize, u32)] {
        &self.staged
    }

    /// Gives the state of `positions` positions a block.
    pub fn stage(&mut self, positions: usize, block: u32) {
        let index = self.staged.partition_point(|(p, _)| *p < positions);
        self.staged.insert(index, (positions, block));
    }

    /// Gives the state after one position more than the next run's a block.
    pub fn stage_ahead(&mut self, block: u32) {
        self.ahead = Some(block);
    }

    /// The block of a position that may have run ahead.
    pub fn ahead(&self) -> Option<u32> {
        self.ahead
    }

    /// Removes the block of a position that may have run ahead.
    pub fn take_ahead(&mut self) -> Option<u32> {
        self.ahead.take()
    }

    /// The blocks of the pass over the position after the next run. `None` if none is staged.
    pub fn of_pass_ahead(&self) -> Option<StateBlocks> {
        let (_, read) = *self.staged.last()?;
        let write = self.ahead?;
        Some(StateBlocks { read, write })
    }

    /// Removes the staged blocks, and returns them.
    pub fn unstage(&mut self) -> Vec<(usize, u32)> {
        std::mem::take(&mut self.staged)
    }

    /// The parts of a pass over positions `first..end` after which the state is written, each with its blocks. Each part but the first reads
    /// the block that the one before it writes. Empty without recurrent state.
    pub fn parts_of_pass(&self, first: usize, end: usize) -> Vec<(Range<usize>, StateBlocks)> {
        let staged = self.staged.iter().map(|(position, _)| *position);
        let inner = staged.filter(|position| first < *position && *position < end);
        let mut start = first;
        let part = |end| {
            let positions = std::mem::replace(&mut start, end)..end;
            let blocks = self.of_pass(positions.start, end)?;
            Some((positions, blocks))
        };
        inner.chain([end]).filter_map(part).collect()
    }

    /// The blocks of a pass over positions `first..end`, which must not go past a staged position. `None` without recurrent state.
    pub fn of_pass(&self, first: usize, end: usize) -> Option<StateBlocks> {
        let index = self.staged.iter().position(|(p, _)| *p >= end)?;
        let write = self.staged[index].1;
        let begins = index
            .checked_sub(1)
            .map_or((self.held, self.current), |i| self.staged[i]);
        let read = match begins {
            (position, block) if position == first => block,
            _ => write,
        };
        Some(StateBlocks { read, write })
    }
}

fn new_version() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Clone for KvTables {
    fn clone(&self) -> Self {
        KvTables {
            kind: self.kind,
            groups: self.groups.clone(),
            state: self.state.clone(),
            version: new_version(),
        }
    }
}

impl KvTables {
    /// Empty tables of a sequence with keys and values of this type, in this many groups.
    pub fn new(kind: KvType, groups: usize) -> KvTables {
        KvTables {
            kind,
            groups: vec![Vec::new(); groups],
            state: StateTable::default(),
            version: new_version(),
        }
    }

    /// Element type of keys and values.
    pub fn kind(&self) -> KvType {
        self.kind
    }

    /// The blocks of a group.
    pub fn blocks(&self, group: usize) -> &[u32] {
        &self.groups[group]
    }

    /// The blocks of the recurrent state.
    pub fn state(&self) -> &StateTable {
        &self.state
    }

    /// Changes the blocks of the recurrent state.
    pub fn state_mut(&mut self) -> &mut StateTable {
        &mut self.state
    }

    /// The blocks of a group that are still kept.
    pub fn kept(&self, group: usize) -> impl Iterator<Item = u32> {
        let blocks = self.groups[group].iter().copied();
        blocks.filter(|&block| block != NULL_BLOCK)
    }

    /// Appends a block to a group.
    pub fn push(&mut self, group: usize, block: u32) {
        self.groups[group].push(block);
    }

    /// Puts another block in the place of one.
    pub fn replace(&mut self, group: usize, index: usize, block: u32) {
        self.version = new_version();
        self.groups[group][index] = block;
    }

    /// Removes the blocks of a group from `len` on, and returns them.
    pub fn truncate(&mut self, group: usize, len: usize) -> Vec<u32> {
        self.version = new_version();
        let kept = len.min(self.groups[group].len());
        self.groups[group].split_off(kept)
    }

    /// Puts the null block in the place of the first `count` blocks of a group, whose positions no token sees any more. Returns them.
    pub fn forget(&mut self, group: usize, count: usize) -> Vec<u32> {
        let passed = &mut self.groups[group][..count];
        let forgotten = passed.to_vec();
        passed.fill(NULL_BLOCK);
        forgotten
    }

    /// A number that no other tables have. It changes with each block of keys and values that tokens still see, unless blocks are only
    /// appended.
    pub(in crate::model) fn version(&self) -> u64 {
        self.version
    }
}
