//! Sequences: keys, values and recurrent states of some tokens, in blocks that forks share until either side writes.

mod sharing;

use std::sync::Arc;

use super::adapters::{AdapterUse, LoadedAdapter};
use super::blocks::{Blocks, Counted};
use super::prefix::{NodeId, Place, Tree};
use super::snapshots::{SNAPSHOT_POSITIONS, SNAPSHOTS, Snapshot, stops, surplus};
use super::windows::{KEPT_MULTIPLE, kept_from, sees_from};
use crate::base::error::{bail, err};
use crate::base::sync::Instant;
use crate::base::{ErrorKind, Result, memory};
use crate::model::kv::{KvArena, KvCache, KvTables, NULL_BLOCK, PagesOf, StateArena, StateTable};
use crate::model::{KvType, Model};

/// The positions that a sequence keeps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// The first position that each group of layers with keys and values keeps.
    pub from: Vec<usize>,
    /// Numbers of positions after which the recurrent state is kept, ascending; the last is that of all positions. Empty without
    /// recurrent layers, and without positions.
    pub states: Vec<usize>,
}

/// A part of a run of tokens, as which a pass takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PartOf {
    /// Tokens of the run.
    pub(super) all: usize,
    /// Tokens of the run in earlier passes.
    pub(super) done: usize,
}

impl PartOf {
    /// A run of `all` tokens in one pass.
    pub(super) fn whole(all: usize) -> PartOf {
        PartOf { all, done: 0 }
    }

    /// Tokens that have not run.
    pub(super) fn left(self) -> usize {
        self.all - self.done
    }
}

/// The keys and values of one sequence of tokens, and the state of recurrent layers. Memory is taken in blocks as it grows; a clone shares
/// them until either side writes.
///
/// Layers that see a window keep it and [`REWIND`](super::windows::REWIND) positions before it. Recurrent layers keep the state of the end and of at most
/// [`SNAPSHOTS`] earlier positions: both ends of prompts, the last end of a block in long ones, and multiples of [`SNAPSHOT_POSITIONS`].
///
/// With [`Sequence::set_sharing`] it also shares full blocks with other sequences that begin with the same tokens.
pub struct Sequence {
    /// Tells it from all other sequences of the model.
    id: u64,
    blocks: Arc<Blocks>,
    cache: Arc<KvCache>,
    tables: KvTables,
    /// The recurrent states kept, oldest first, without that of the end.
    snapshots: Vec<Snapshot>,
    /// Whether the state of the end is kept when the sequence goes on.
    keeps_end: bool,
    /// States since the last verification began that are not kept: the sequence can go back to them until it goes on.
    recent: Vec<Snapshot>,
    /// Blocks of states that were given up, for the next ones.
    spares: Vec<u32>,
    /// The number of blocks that are held for coming states: those of one run.
    most_spares: usize,
    /// Whether the tokens that run are verified, so that the state after each has a block.
    verifies: bool,
    /// Whether the drafter follows the sequence.
    drafts: bool,
    /// Whether the drafter has followed some of its positions.
    has_drafter_rows: bool,
    /// The hidden row of the last position, if the sequence drafts and that is known.
    hidden: Option<Vec<f32>>,
    /// The adapter that its tokens run with.
    adapter: Option<AdapterUse>,
    /// The tokens of the positions held.
    tokens: Vec<u32>,
    capacity: usize,
    /// The tree of the prefix index that the sequence belongs to.
    tree: Tree,
    /// The nodes of its first full blocks in the prefix index. They may have been removed from it.
    path: Vec<NodeId>,
    /// Positions, from the first on, that the drafter has followed.
    followed: usize,
    /// Positions, from the first on, that were filled rather than run by this model.
    filled: usize,
    /// Whether it uses and feeds the prefix index.
    shares: bool,
    /// The fingerprint of the weights that computed the positions held.
    weights: u64,
    work: SequenceWork,
    /// Its place among the live sequences.
    counted: Counted,
}

/// The passes for a sequence since [`Sequence::reset_work`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceWork {
    /// The beginning of the first pass with tokens of it.
    pub first_pass: Option<Instant>,
    /// Tokens that ran and stayed, each as often as it ran.
    pub ran: usize,
    /// How often it made way for others: [`Served::make_way`](super::Served::make_way).
    pub preemptions: usize,
}

impl Sequence {
    pub(super) fn new(blocks: &Arc<Blocks>, capacity: usize, kind: KvType) -> Result<Sequence> {
        let spec = blocks.model().spec();
        spec.check_context(capacity)?;
        let cache = blocks.model().kv().cache(kind)?;
        Ok(Sequence {
            id: blocks.new_id(),
            blocks: blocks.clone(),
            tables: KvTables::new(kind, cache.arenas().len()),
            cache: cache.clone(),
            snapshots: Vec::new(),
            keeps_end: false,
            recent: Vec::new(),
            spares: Vec::new(),
            most_spares: 1,
            verifies: false,
            drafts: false,
            has_drafter_rows: false,
            hidden: None,
            adapter: None,
            tokens: Vec::new(),
            capacity,
            tree: Tree {
                kind,
                long_ropes: spec.long_ropes(capacity),
                adapter: None,
            },
            path: Vec::new(),
            followed: 0,
            filled: 0,
            shares: false,
            weights: blocks.model().fingerprint(),
            work: SequenceWork::default(),
            counted: blocks.count(capacity),
        })
    }

    /// The passes for it since [`Sequence::reset_work`].
    pub fn work(&self) -> SequenceWork {
        self.work
    }

    /// Counts its passes from now on.
    pub fn reset_work(&mut self) {
        self.work = SequenceWork::default();
    }

    /// Counts the passes for another sequence as passes for it.
    pub fn add_work(&mut self, other: SequenceWork) {
        self.work.first_pass = self.work.first_pass.or(other.first_pass);
        self.work.ran += other.ran;
    }

    /// Counts that it makes way for others.
    pub(super) fn count_preemption(&mut self) {
        self.work.preemptions += 1;
    }

    /// Whether other weights than the model's computed the positions held: a trainer has changed them. The next pass runs the tokens again.
    pub fn is_outdated(&self) -> bool {
        !self.is_empty() && self.weights() != self.blocks.model().fingerprint()
    }

    /// The fingerprint of the weights that computed the positions held.
    pub fn weights(&self) -> u64 {
        self.weights
    }

    /// Before a pass: drops all positions if they are outdated, and returns their tokens, which have to run again.
    pub(super) fn renew(&mut self) -> Result<Vec<u32>> {
        let (fingerprint, mut again) = (self.blocks.model().fingerprint(), Vec::new());
        if self.weights != fingerprint {
            memory::make_room(&mut again, self.len())?;
            again.extend_from_slice(&self.tokens);
            self.truncate(0)?;
            self.weights = fingerprint;
        }
        Ok(again)
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Positions held.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether it holds no position.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The tokens of the positions held.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Number of positions for which there is room in total.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Further positions for which there is room.
    pub fn room(&self) -> usize {
        self.capacity - self.len()
    }

    /// Element type of keys and values.
    pub fn kind(&self) -> KvType {
        self.tables.kind()
    }

    /// Whether the model's drafter follows it, so that tokens can be drafted.
    pub fn drafts(&self) -> bool {
        self.drafts
    }

    /// Lets the model's drafter follow the positions that run from now on, or no longer. Positions that it has not followed make drafts
    /// worse. Fails for a model without a drafter.
    pub fn set_drafts(&mut self, drafts: bool) -> Result<()> {
        if drafts {
            self.blocks.model().check_drafter()?;
        }
        if self.drafts != drafts {
            self.drafts = drafts;
            self.hidden = None;
        }
        Ok(())
    }

    /// Lets its tokens run with an adapter of its model. Fails unless it is empty: its keys and values would be those of another adapter.
    pub fn set_adapter(&mut self, adapter: Arc<LoadedAdapter>) -> Result<()> {
        self.blocks.model().check_adapter(&adapter)?;
        if !self.is_empty() {
            bail!(
                InvalidArgument,
                "adapter '{}' for a sequence that holds {} tokens; name it before the first",
                adapter.name(),
                self.len()
            );
        }
        self.tree.adapter = Some(adapter.identity());
        self.adapter = Some(AdapterUse::new(adapter));
        Ok(())
    }

    /// The adapter that its tokens run with.
    pub fn adapter(&self) -> Option<&Arc<LoadedAdapter>> {
        self.adapter.as_ref()?.adapter()
    }

    /// The hidden row of the last position, if it is known.
    pub(super) fn hidden(&self) -> Option<&[f32]> {
        self.hidden.as_deref()
    }

    /// Records the hidden row of the last position of a run that the drafter followed.
    pub(super) fn set_hidden(&mut self, hidden: Option<Vec<f32>>) {
        self.hidden = hidden;
        self.has_drafter_rows |= self.hidden.is_some();
    }

    /// Its block tables.
    pub(super) fn tables(&self) -> &KvTables {
        &self.tables
    }

    /// Whether it is a sequence of this model.
    pub(super) fn is_of(&self, model: &Arc<Model>) -> bool {
        Arc::ptr_eq(self.blocks.model(), model)
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
        let state = self.cache.state().map_or(0, StateArena::block_bytes);
        let ahead = usize::from(self.tables.state().ahead().is_some());
        let states = self.states().count() + self.recent.len() + self.spares.len() + ahead;
        (0..self.groups()).map(of_group).sum::<usize>() + states * state
    }

    /// Bytes of the blocks that it needs beside its own to come to so many positions.
    pub(super) fn bytes_for(&self, positions: usize) -> usize {
        let of_group = |group| {
            let of_block = self.block_positions(group);
            let passed = kept_from(self.arena(group).window(), positions) / of_block;
            let needed = positions.div_ceil(of_block) - passed;
            let own = self.tables.kept(group).count();
            needed.saturating_sub(own) * self.arena(group).block_bytes()
        };
        // The state of the end, and the next one.
        let states = 2 * self.cache.state().map_or(0, StateArena::block_bytes);
        (0..self.groups()).map(of_group).sum::<usize>() + states
    }

    /// The recurrent states kept, oldest first, with that of the end.
    fn states(&self) -> impl Iterator<Item = Snapshot> {
        let end = Snapshot {
            positions: self.len(),
            block: self.tables.state().current(),
        };
        let end = Some(end).filter(|end| end.block != NULL_BLOCK);
        self.snapshots.iter().copied().chain(end)
    }

    /// The positions that it keeps.
    pub fn kept(&self) -> Kept {
        Kept {
            from: self.kept_from(),
            states: self.states().map(|state| state.positions).collect(),
        }
    }

    /// The first position that each group keeps.
    fn kept_from(&self) -> Vec<usize> {
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
        sees_from(self.arena(group).window(), len)
    }

    /// A block of a group.
    fn place(&self, group: usize, block: u32) -> Place {
        Place {
            kind: self.kind(),
            slot: group,
            block,
        }
    }

    /// A block of a recurrent state.
    fn state_place(&self, block: u32) -> Place {
        self.place(self.groups(), block)
    }

    /// Drops the positions from `len` on, and more if that is needed: recurrent layers go back to the last state that is kept, and if a
    /// layer no longer keeps what the next token sees, all positions are dropped. The tokens then have to run again.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        if len > self.len() {
            bail!(
                InvalidArgument,
                "cannot cut {} positions to {len}, which is more",
                self.len()
            );
        }
        if len == self.len() {
            return Ok(());
        }
        let len = match self.cache.state() {
            None => len,
            Some(_) => {
                let kept = self.snapshots.iter().chain(&self.recent);
                let earlier = kept.map(|s| s.positions).filter(|p| *p <= len);
                earlier.max().unwrap_or(0)
            }
        };
        let kept = self.kept_from();
        let is_kept = |group| kept[group] <= self.sees_from(group, len);
        let len = match (0..self.groups()).all(is_kept) {
            true => len,
            false => 0,
        };
        self.tokens.truncate(len);
        self.path.truncate(len / self.unit());
        // The drafter's last position depends on the token after it.
        self.followed = self.followed.min(len.saturating_sub(1));
        self.filled = self.filled.min(len);
        self.hidden = None;
        self.release_unused();
        self.go_back();
        Ok(())
    }

    /// Makes the recurrent state that of the positions held, which is among those kept, and drops later ones.
    fn go_back(&mut self) {
        if self.cache.state().is_none() {
            return;
        }
        let end = self.tables.state().current();
        self.release_state(end);
        self.release_spares();
        let mut recent = std::mem::take(&mut self.recent);
        let at = recent.iter().position(|s| s.positions == self.len());
        let at = at.map(|index| recent.remove(index).block);
        recent.iter().for_each(|s| self.release_state(s.block));
        let count = self
            .snapshots
            .partition_point(|s| s.positions <= self.len());
        let later = self.snapshots.split_off(count);
        later.iter().for_each(|s| self.release_state(s.block));
        self.keeps_end = at.is_none() || self.len().is_multiple_of(SNAPSHOT_POSITIONS);
        let current = at.or_else(|| self.snapshots.pop().map(|s| s.block));
        let current = current.unwrap_or(NULL_BLOCK);
        *self.tables.state_mut() = StateTable::new(self.len(), current);
    }

    /// Keeps a block that only this sequence uses for the next state, unless it has enough.
    fn recycle_state(&mut self, block: u32) {
        let is_own = block != NULL_BLOCK && !self.blocks.is_shared(self.state_place(block));
        match is_own && self.spares.len() < self.most_spares {
            true => self.spares.push(block),
            false => self.release_state(block),
        }
    }

    /// Frees blocks that are held for coming states, if they are too many.
    fn release_surplus_spares(&mut self) {
        let most = self.most_spares.min(self.spares.len());
        let surplus = self.spares.split_off(most);
        surplus.iter().for_each(|block| self.release_state(*block));
    }

    /// Frees the blocks that are only held for coming states.
    fn release_spares(&mut self) {
        self.release_staged();
        let ahead = self.tables.state_mut().take_ahead();
        let spares = std::mem::take(&mut self.spares);
        let blocks = ahead.into_iter().chain(spares);
        blocks.for_each(|block| self.release_state(block));
    }

    fn release_state(&self, block: u32) {
        if block != NULL_BLOCK {
            self.blocks.release([self.state_place(block)]);
        }
    }

    /// Drops the blocks of states that the next run was to write.
    fn release_staged(&mut self) {
        if !self.tables.state().staged().is_empty() {
            let staged = self.tables.state_mut().unstage();
            let blocks = staged.into_iter().map(|(_, block)| block);
            blocks.for_each(|block| self.recycle_state(block));
        }
    }

    /// Takes a block for a state. If there is no memory, earlier states give way to it if `pressing`.
    fn take_state(&mut self, pressing: bool) -> Result<u32> {
        if let Some(block) = self.spares.pop() {
            return Ok(block);
        }
        loop {
            let error = match self.blocks.take(&self.cache, self.groups()) {
                Ok(block) => return Ok(block),
                Err(error) => error,
            };
            let gives_way = pressing && !self.snapshots.is_empty();
            if error.kind() != ErrorKind::OutOfMemory || !gives_way {
                return Err(error);
            }
            let oldest = self.snapshots.remove(0);
            self.release_state(oldest.block);
        }
    }

    /// Takes blocks for the states of the next `count` positions of a run: of those that are kept, or of each if they are `verified`.
    fn reserve_states(&mut self, count: usize, of: PartOf, verified: bool) -> Result<()> {
        if self.cache.state().is_none() {
            return Ok(());
        }
        self.verifies = verified;
        self.most_spares = if verified { count } else { 1 };
        self.release_staged();
        for recent in std::mem::take(&mut self.recent) {
            self.recycle_state(recent.block);
        }
        if verified && let Some(ahead) = self.tables.state_mut().take_ahead() {
            self.recycle_state(ahead);
        }
        self.release_surplus_spares();
        if verified {
            for positions in self.len() + 1..=self.len() + count {
                // Without room for the first, the sequence could not go on at all.
                let block = self.take_state(positions == self.len() + 1)?;
                self.tables.state_mut().stage(positions, block);
            }
            return Ok(());
        }
        let kept: Vec<usize> = self.states().map(|s| s.positions).collect();
        let end = self.len() + count;
        // A GPU may have written the state after one token to it.
        let mut ahead = self.tables.state_mut().take_ahead();
        let stops = stops(&kept, self.len(), self.len() + of.left());
        let of_part = stops.into_iter().filter(|stop| *stop < end);
        for positions in of_part.chain([end]) {
            let block = match ahead.take() {
                Some(block) => block,
                None => self.take_state(true)?,
            };
            self.tables.state_mut().stage(positions, block);
        }
        let border = self.border(self.len(), of);
        let is_staged = |border: &usize| {
            let mut staged = self.tables.state().staged().iter();
            staged.any(|(positions, _)| positions == border)
        };
        let border = border.filter(|border| self.len() < *border && *border < end);
        // The run itself can do without this one.
        if let Some(border) = border.filter(|border| !is_staged(border))
            && let Ok(block) = self.take_state(false)
        {
            self.tables.state_mut().stage(border, block);
        }
        Ok(())
    }

    /// Takes blocks for one position more than the `count` that are reserved, so that a GPU can run it ahead.
    pub(super) fn reserve_ahead(&mut self, count: usize) -> Result<()> {
        self.reserve_blocks(count + 1)?;
        if self.cache.state().is_some() {
            let block = self.take_state(true)?;
            self.tables.state_mut().stage_ahead(block);
        }
        Ok(())
    }

    /// Makes the state of the end that of the last position that stays of a verification, as if each had run alone, and gives up those of
    /// later ones. The states between are not kept, but the sequence can go back to them until it goes on.
    fn advance_verified_states(&mut self) {
        for (positions, block) in self.tables.state_mut().unstage() {
            if positions > self.len() {
                self.recycle_state(block);
                continue;
            }
            let old = Snapshot {
                positions: positions - 1,
                block: self.tables.state().current(),
            };
            *self.tables.state_mut() = StateTable::new(positions, block);
            match old.block != NULL_BLOCK && self.keeps_end {
                true => self.snapshots.push(old),
                false if old.block == NULL_BLOCK => {}
                false => self.recent.push(old),
            }
            self.keeps_end = positions.is_multiple_of(SNAPSHOT_POSITIONS);
            self.drop_surplus(positions);
        }
    }

    /// Frees the blocks of states that only a next verification needs, and the states that the sequence could go back to, except that before
    /// its last position.
    pub fn end_drafts(&mut self) {
        let recent = std::mem::take(&mut self.recent).into_iter();
        let (last, others): (Vec<_>, Vec<_>) = recent.partition(|s| s.positions + 1 == self.len());
        self.recent = last;
        others.iter().for_each(|s| self.release_state(s.block));
        self.most_spares = 1;
        self.release_surplus_spares();
    }

    /// Drops states of which more are kept than a sequence of `len` positions may keep.
    fn drop_surplus(&mut self, len: usize) {
        let kept = |s: &Sequence| s.snapshots.iter().map(|s| s.positions).collect::<Vec<_>>();
        while let Some(index) = surplus(&kept(self), len) {
            let dropped = self.snapshots.remove(index);
            self.release_state(dropped.block);
        }
    }

    /// Makes the state of the end that of the last position that ran, and decides which earlier ones are kept. `before` is the number of
    /// positions before the run.
    fn advance_states(&mut self, before: usize, of: PartOf) {
        if self.verifies {
            self.advance_verified_states();
            return;
        }
        let old = Snapshot {
            positions: before,
            block: self.tables.state().current(),
        };
        let ahead = self.tables.state_mut().take_ahead();
        let mut staged = self.tables.state_mut().unstage();
        let Some((_, current)) = staged.pop() else {
            return;
        };
        *self.tables.state_mut() = StateTable::new(self.len(), current);
        if let Some(ahead) = ahead {
            self.tables.state_mut().stage_ahead(ahead);
        }
        // More than one token is a prompt: both its ends are places to come back to.
        let is_prompt = of.all > 1;
        match old.block != NULL_BLOCK && (self.keeps_end || is_prompt && of.done == 0) {
            true => self.snapshots.push(old),
            false => self.recycle_state(old.block),
        }
        let staged = staged.into_iter();
        self.snapshots
            .extend(staged.map(|(positions, block)| Snapshot { positions, block }));
        let is_last = of.left() == self.len() - before;
        self.keeps_end = is_prompt && is_last
            || self.len().is_multiple_of(SNAPSHOT_POSITIONS)
            || self.border(before, of) == Some(self.len());
        self.drop_surplus(self.len());
    }

    /// Releases blocks past the positions held, which were reserved for tokens that did not run.
    fn release_unused(&mut self) {
        for group in 0..self.groups() {
            let kept = self.len().div_ceil(self.block_positions(group));
            if kept < self.tables.blocks(group).len() {
                let unused = self.tables.truncate(group, kept);
                self.release(group, &unused);
            }
        }
    }

    fn release(&self, group: usize, blocks: &[u32]) {
        let kept = blocks.iter().filter(|block| **block != NULL_BLOCK);
        // The index gives up the last ones first.
        let places = kept.rev().map(|block| self.place(group, *block));
        self.blocks.release(places);
    }

    /// Takes blocks for `count` further positions in every group, and copies shared ones that these positions are in, so that a lack of
    /// memory shows before any work is done. For positions that are `verified`, the states after each get a block.
    pub(super) fn reserve(&mut self, count: usize, of: PartOf, verified: bool) -> Result<()> {
        if count > self.room() {
            bail!(
                ContextFull,
                "{count} tokens do not fit: {} of {} positions are in use",
                self.len(),
                self.capacity
            );
        }
        memory::make_room(&mut self.tokens, count)?;
        self.reserve_blocks(count)?;
        self.reserve_states(count, of, verified)?;
        self.work.first_pass.get_or_insert_with(Instant::now);
        Ok(())
    }

    /// Takes blocks of keys and values for `count` further positions.
    pub(super) fn reserve_blocks(&mut self, count: usize) -> Result<()> {
        // The drafter writes the position before the first token.
        let len = self.len().saturating_sub(usize::from(self.drafts));
        for group in 0..self.groups() {
            let positions = self.block_positions(group);
            let first = len / positions;
            for index in first..(self.len() + count).div_ceil(positions) {
                self.own(group, index)?;
            }
        }
        Ok(())
    }

    /// Makes block `index` of a group one that only this sequence uses.
    fn own(&mut self, group: usize, index: usize) -> Result<()> {
        let old = self.tables.blocks(group).get(index).copied();
        if old.is_some_and(|block| !self.blocks.is_shared(self.place(group, block))) {
            return Ok(());
        }
        let new = self.blocks.take(&self.cache, group)?;
        let Some(old) = old else {
            self.tables.push(group, new);
            return Ok(());
        };
        if let Err(error) = self.arena(group).copy(old, new) {
            self.release(group, &[new]);
            return Err(error);
        }
        self.tables.replace(group, index, new);
        self.release(group, &[old]);
        Ok(())
    }

    /// Like [`Sequence::advance`] for the first positions that were verified. The blocks of the others are free again.
    pub(super) fn advance_verified(&mut self, tokens: &[u32]) {
        self.advance(tokens, PartOf::whole(tokens.len()));
        self.release_unused();
    }

    /// Records that every layer holds the positions of further tokens of a run, and frees what windows have passed.
    pub(super) fn advance(&mut self, tokens: &[u32], of: PartOf) {
        let before = self.len();
        self.work.ran += tokens.len();
        self.tokens.extend_from_slice(tokens);
        // The drafter has run the positions up to the last, which needs the token after it.
        if self.drafts && self.followed + 1 >= before {
            self.followed = self.len().saturating_sub(1);
        }
        if self.cache.state().is_some() {
            self.advance_states(before, of);
        }
        for group in 0..self.groups() {
            let window = self.arena(group).window();
            let passed = kept_from(window, self.len()) / self.block_positions(group);
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
        match self.len() {
            0 => self.release_spares(),
            _ => self.release_staged(),
        }
        // The memory may be lacking for less.
        self.most_spares = 1;
        self.release_surplus_spares();
        for group in 0..self.groups() {
            let positions = self.block_positions(group);
            let last = self.tables.blocks(group).get(self.len() / positions);
            let owned = |block: u32| !self.blocks.is_shared(self.place(group, block));
            if let Some(&block) = last.filter(|block| owned(**block)) {
                let held = self.len() % positions;
                self.cache.clear_from(group, block, held)?;
            }
        }
        Ok(())
    }

    /// Calls `each` with its pages of sixteen positions, layer by layer, and then with its recurrent states, in the order that
    /// [`Sequence::fill`] expects.
    pub fn for_each_page(&self, mut each: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let cache = &self.cache;
        cache.read_pages(PagesOf::Blocks, &self.tables, self.len(), &mut each)?;
        match self.cache.state() {
            None => Ok(()),
            Some(arena) => self
                .states()
                .try_for_each(|s| arena.read(s.block, &mut each)),
        }
    }

    /// Bytes that [`Sequence::for_each_page`] gives for `len` positions of which this is kept; `None` if the number overflows.
    pub fn page_bytes(&self, len: usize, kept: &Kept) -> Option<u64> {
        let state = self.cache.state().map_or(0, StateArena::block_bytes) as u64;
        let states = state.checked_mul(kept.states.len() as u64)?;
        let pages = self.cache.page_bytes(PagesOf::Blocks, len, &kept.from)?;
        pages.checked_add(states)
    }

    /// Bytes of the drafter's keys and values, as [`Sequence::for_each_drafter_page`] gives them; 0 if it has followed no position.
    pub fn drafter_bytes(&self) -> u64 {
        let from = self.kept_from();
        let bytes = self.cache.page_bytes(PagesOf::Drafter, self.len(), &from);
        bytes.filter(|_| self.has_drafter_rows).unwrap_or(0)
    }

    /// Calls `each` with the drafter's pages of sixteen positions.
    pub fn for_each_drafter_page(&self, each: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        match self.has_drafter_rows {
            true => (self.cache).read_pages(PagesOf::Drafter, &self.tables, self.len(), each),
            false => Ok(()),
        }
    }

    /// Fills the drafter's keys and values of the positions held from `bytes` bytes of pages, which `next` gives. A model without a drafter
    /// needs none of them.
    pub fn fill_drafter(
        &mut self,
        bytes: u64,
        mut next: impl FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        if !self.blocks.model().has_drafter() {
            let mut left = bytes;
            let mut part = [0; 4096];
            while left > 0 {
                let count = left.min(part.len() as u64);
                next(&mut part[..count as usize])?;
                left -= count;
            }
            return Ok(());
        }
        let from = self.kept_from();
        let expected = self.cache.page_bytes(PagesOf::Drafter, self.len(), &from);
        if expected != Some(bytes) {
            bail!(
                InvalidArgument,
                "{bytes} bytes of the drafter's keys and values; {} positions take {}",
                self.len(),
                expected.unwrap_or(0)
            );
        }
        self.has_drafter_rows = true;
        (self.cache).write_pages(PagesOf::Drafter, &self.tables, self.len(), next)
    }

    /// Fails unless this can be kept of `len` positions of an empty sequence.
    pub fn check_kept(&self, len: usize, kept: &Kept) -> Result<()> {
        let Kept { from, states } = kept;
        let is_possible = |(group, &first): (usize, &usize)| {
            first == 0 || first.is_multiple_of(KEPT_MULTIPLE) && first <= self.sees_from(group, len)
        };
        if from.len() != self.groups() || !from.iter().enumerate().all(is_possible) {
            bail!(
                InvalidArgument,
                "{len} positions of which groups keep those from {from:?} on; this model has {} groups, each keeps what its window sees",
                self.groups()
            );
        }
        let has_state = self.cache.state().is_some() && len > 0;
        let ascends = states.windows(2).all(|pair| pair[0] < pair[1]);
        let is_sound = match states[..] {
            [] => !has_state,
            [first, ..] => {
                let last = states.last() == Some(&len);
                has_state && first > 0 && ascends && last && states.len() <= SNAPSHOTS + 1
            }
        };
        match is_sound {
            true => Ok(()),
            false => Err(err!(
                InvalidArgument,
                "{len} positions with the recurrent states of {states:?}; a model with recurrent layers keeps that of all positions, and up to {SNAPSHOTS} before it"
            )),
        }
    }

    /// Fills an empty sequence with the positions of `tokens`, of which this is kept; `next` gives pages and states. Other sequences do not
    /// share them: nothing shows that they are what this model computes.
    pub fn fill(
        &mut self,
        tokens: &[u32],
        kept: &Kept,
        mut next: impl FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let len = tokens.len();
        if !self.is_empty() || len > self.capacity {
            bail!(
                InvalidArgument,
                "{len} positions into a cache that holds {} of {}; it must be empty and large enough",
                self.len(),
                self.capacity
            );
        }
        self.check_kept(len, kept)?;
        memory::make_room(&mut self.tokens, len)?;
        self.release_unused();
        for (group, &first) in kept.from.iter().enumerate() {
            let positions = self.block_positions(group);
            let passed = first / positions;
            (0..passed).for_each(|_| self.tables.push(group, NULL_BLOCK));
            for index in passed..len.div_ceil(positions) {
                self.own(group, index)?;
            }
        }
        let cache = &self.cache;
        cache.write_pages(PagesOf::Blocks, &self.tables, len, &mut next)?;
        for &positions in &kept.states {
            let block = self.take_state(true)?;
            self.snapshots.push(Snapshot { positions, block });
            if let Some(arena) = self.cache.state() {
                arena.write(block, &mut next)?;
            }
        }
        self.tokens.extend_from_slice(tokens);
        self.filled = len;
        // The last of them is the state of the end.
        self.go_back();
        Ok(())
    }
}

impl Clone for Sequence {
    fn clone(&self) -> Self {
        let of_group = |group| {
            let kept = self.tables.kept(group);
            kept.map(move |block| self.place(group, block))
        };
        let states = self.states().map(|s| self.state_place(s.block));
        self.blocks
            .retain((0..self.groups()).flat_map(of_group).chain(states));
        let mut tables = self.tables.clone();
        *tables.state_mut() = StateTable::new(self.len(), self.tables.state().current());
        Sequence {
            id: self.blocks.new_id(),
            blocks: self.blocks.clone(),
            cache: self.cache.clone(),
            tables,
            snapshots: self.snapshots.clone(),
            recent: Vec::new(),
            spares: Vec::new(),
            most_spares: 1,
            hidden: self.hidden.clone(),
            adapter: self.adapter.clone(),
            tokens: self.tokens.clone(),
            path: self.path.clone(),
            counted: self.counted.clone(),
            ..*self
        }
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        self.release_all_groups();
        self.release_spares();
        let states = self.states().chain(self.recent.iter().copied());
        states.for_each(|s| self.release_state(s.block));
    }
}

impl std::fmt::Debug for Sequence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Sequence({} of {} positions, {})",
            self.len(),
            self.capacity,
            self.kind().name()
        )
    }
}
