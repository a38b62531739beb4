//! Block tables: which blocks hold the keys and values of a sequence.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::ops::attention::KvType;

/// Number of the block that stands for positions that are no longer kept. It belongs to nobody.
pub const NULL_BLOCK: u32 = 0;

/// The blocks of one sequence: for each group of layers, those of its positions, first to last.
#[derive(Debug)]
pub struct KvTables {
    kind: KvType,
    groups: Vec<Vec<u32>>,
    version: u64,
}

fn new_version() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Clone for KvTables {
    fn clone(&self) -> Self {
        KvTables {
            groups: self.groups.clone(),
            version: new_version(),
            ..*self
        }
    }
}

impl KvTables {
    /// Empty tables of a sequence with keys and values of this type, in this many groups.
    pub fn new(kind: KvType, groups: usize) -> KvTables {
        KvTables {
            kind,
            groups: vec![Vec::new(); groups],
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

    /// A number that no other tables have. It changes with each block that tokens still see, unless blocks are only appended.
    pub(in crate::model) fn version(&self) -> u64 {
        self.version
    }
}
