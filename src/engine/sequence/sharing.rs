//! Prefixes that a sequence shares with others: it enters its full blocks into the index, and begins with blocks of others that hold the same
//! tokens.

use super::{PartOf, Sequence, Snapshot};
use crate::base::memory;
use crate::engine::blocks::Adopted;
use crate::engine::pools::Units;
use crate::engine::snapshots::SHARED_PROMPT;
use crate::model::kv::{NULL_BLOCK, StateTable};

impl Sequence {
    /// Whether the sequence begins with full blocks of others that hold the same tokens, as [`Served::run`](crate::engine::Served::run) says, and
    /// lets others begin with its own. A new one does not, and none does if the model was loaded without a prefix cache.
    pub fn set_sharing(&mut self, shares: bool) {
        self.shares = shares && self.blocks.shares();
    }

    /// Positions of a full block.
    pub(super) fn unit(&self) -> usize {
        self.blocks.unit()
    }

    /// Bytes of tokens and tables, which a clone copies.
    pub fn table_bytes(&self) -> usize {
        let blocks = (0..self.groups()).map(|group| self.tables.blocks(group).len());
        size_of_val(&*self.tokens)
            + size_of_val(&*self.path)
            + blocks.sum::<usize>() * size_of::<u32>()
    }

    /// The last end of a block before the end of a run of `of` that goes on from `first` positions, for a long prompt: recurrent layers keep
    /// its state, so that a sequence with the same prompt can begin there.
    pub(super) fn border(&self, first: usize, of: PartOf) -> Option<usize> {
        let unit = self.unit();
        let border = (first + of.left()).saturating_sub(1) / unit * unit;
        let is_prompt = of.all >= SHARED_PROMPT && border > 0;
        (is_prompt && self.shares && self.filled == 0).then_some(border)
    }

    /// Enters full blocks into the index, so that other sequences can begin with them. They are written no more.
    pub(in crate::engine) fn publish(&mut self) {
        // The drafter has not run the last position.
        let written = self.len().saturating_sub(usize::from(self.drafts));
        let count = written / self.unit();
        if !self.shares || self.filled > 0 || count <= self.path.len() {
            return;
        }
        let is_kept = |state: &Snapshot| self.keeps_end || state.positions < self.len();
        let at_border = |state: &Snapshot| state.positions.is_multiple_of(self.unit());
        let states = self.states().filter(is_kept).filter(at_border);
        let units = Units {
            tree: self.tree,
            tokens: &self.tokens[..count * self.unit()],
            // The last row of a block is that of a token after it, which may be another one: a sequence that begins with the block runs it
            // again if it is the last, and otherwise drafts a little worse.
            followed: (self.followed + 1) / self.unit(),
            blocks: (0..self.groups())
                .map(|group| self.tables.blocks(group))
                .collect(),
            states: states
                .map(|state| (state.positions / self.unit(), state.block))
                .collect(),
        };
        self.blocks.publish(&units, &mut self.path);
    }

    /// Begins with blocks of other sequences, if those hold at least one full block more of the tokens held and of those that are `coming`,
    /// without the last, which must run. Returns by how many positions the sequence has grown.
    pub(in crate::engine) fn adopt(&mut self, coming: &[u32]) -> usize {
        let (held, unit) = (self.len(), self.unit());
        let most = (held + coming.len()).saturating_sub(1) / unit;
        let least = held.div_ceil(unit);
        if !self.shares
            || most <= least
            || memory::make_room(&mut self.tokens, coming.len()).is_err()
        {
            return 0;
        }
        let tokens = &self.tokens;
        let of_unit = |i: usize| {
            let own = &tokens[(i * unit).min(held)..((i + 1) * unit).min(held)];
            let first = (i * unit).max(held) - held;
            [own, &coming[first..first + unit - own.len()]].concat()
        };
        let adopted = self.blocks.adopt(
            self.tree,
            &mut self.path,
            (least, most),
            of_unit,
            self.drafts,
        );
        match adopted {
            None => 0,
            Some(adopted) => {
                let len = adopted.path.len() * unit;
                self.tokens.extend_from_slice(&coming[..len - held]);
                self.begin_with(adopted);
                len - held
            }
        }
    }

    /// Takes the blocks of a prefix of the tokens in the place of its own.
    fn begin_with(&mut self, adopted: Adopted) {
        let Adopted {
            path,
            followed,
            blocks,
            state,
        } = adopted;
        let len = path.len() * self.unit();
        self.release_all_groups();
        for (group, blocks) in blocks.into_iter().enumerate() {
            blocks
                .into_iter()
                .for_each(|block| self.tables.push(group, block));
        }
        if self.cache.state().is_some() {
            self.begin_with_state(state);
        }
        self.path = path;
        self.followed = (followed * self.unit()).min(len - 1);
        self.has_drafter_rows |= followed > 0;
        self.filled = 0;
        self.hidden = None;
    }

    /// Makes a state of others that of the end. Its own earlier ones stay, unless they were filled.
    fn begin_with_state(&mut self, state: u32) {
        self.release_spares();
        let mut own: Vec<u32> = self.recent.drain(..).map(|s| s.block).collect();
        let end = Snapshot {
            positions: self.tables.state().held(),
            block: self.tables.state().current(),
        };
        match self.keeps_end && end.block != NULL_BLOCK {
            true => self.snapshots.push(end),
            false => own.push(end.block),
        }
        if self.filled > 0 {
            own.extend(self.snapshots.drain(..).map(|s| s.block));
        }
        own.into_iter().for_each(|block| self.release_state(block));
        *self.tables.state_mut() = StateTable::new(self.len(), state);
        self.keeps_end = true;
        self.drop_surplus(self.len());
    }

    /// Releases the blocks of all groups, the last positions first.
    pub(super) fn release_all_groups(&mut self) {
        let blocks = (0..self.groups()).map(|group| self.tables.truncate(group, 0));
        let blocks: Vec<Vec<u32>> = blocks.collect();
        let longest = blocks.iter().map(Vec::len).max().unwrap_or(0);
        let places = (0..longest).rev().flat_map(|i| {
            let of_unit = blocks.iter().enumerate();
            of_unit.filter_map(move |(group, blocks)| Some((group, *blocks.get(i)?)))
        });
        let places = places.filter(|(_, block)| *block != NULL_BLOCK);
        self.blocks
            .release(places.map(|(group, block)| self.place(group, block)));
    }
}
