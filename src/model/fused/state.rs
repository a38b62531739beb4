//! State of the device between decode steps, from which follows the input that the next step has to write.

use std::sync::Arc;

use crate::base::Result;
use crate::cuda::{self, DrawRule, Event};
use crate::model::kv::{KvCache, KvTables, StateBlocks};

/// A sequence as the device has it: its block table, and the position of its next token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowState {
    /// The version of the block table, which changes unless blocks are only appended.
    table: u64,
    position: usize,
}

impl RowState {
    pub(super) fn new(tables: &KvTables, position: usize) -> RowState {
        RowState {
            table: tables.version(),
            position,
        }
    }

    /// Whether these tables, of `groups` groups, have blocks for the position.
    pub(super) fn has_blocks(&self, tables: &KvTables, groups: usize) -> bool {
        let index = self.position / cuda::PAGE;
        (0..groups).all(|group| index < tables.blocks(group).len())
    }
}

/// The input of a decode step, beside the tokens.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StepInput {
    pub(super) rows: Vec<RowState>,
    /// The blocks of each row's recurrent state, in models that have any.
    pub(super) states: Vec<Option<StateBlocks>>,
    /// Settings of the draws; empty if every next token is the argmax.
    pub(super) rules: Vec<DrawRule>,
    /// Whether the long RoPE table applies.
    pub(super) long: bool,
    /// The table of each row's adapter, or 0; empty if no row has one.
    pub(super) adapters: Vec<u64>,
    /// Whether the drafter follows the sequences, from the hidden rows that the step before left.
    pub(super) follows: bool,
}

impl StepInput {
    /// The step after this one, in which each sequence goes on with the token that was drawn for it, and with these recurrent states.
    pub(super) fn next(mut self, states: Vec<Option<StateBlocks>>) -> StepInput {
        self.states = states;
        self.rows.iter_mut().for_each(|row| row.position += 1);
        self.rules.iter_mut().for_each(|rule| rule.draw += 1);
        self
    }

    /// Whether the logits of another step are those of this one: tokens aside, they differ in the settings of draws at most.
    pub(super) fn has_logits_of(&self, other: &StepInput) -> bool {
        self.rows == other.rows
            && self.states == other.states
            && self.long == other.long
            && self.follows == other.follows
    }

    /// The last position.
    pub(super) fn last(&self) -> usize {
        self.rows.iter().map(|row| row.position).max().unwrap_or(0)
    }
}

/// Where a row of a step stores its keys and values.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowSlot {
    row: usize,
    group: usize,
    block: u32,
    /// How often the block had been taken: see [`KvArena::taken`](crate::model::kv::KvArena::taken).
    taken: u32,
    /// Position within the block.
    position: usize,
}

/// A step that is enqueued before it is asked for.
pub(super) struct AheadStep {
    pub(super) input: StepInput,
    /// Follows the step.
    pub(super) event: Event,
    /// Whether it chooses tokens. If not, it ends with logits, because the choice waits for masks.
    pub(super) chooses: bool,
    /// Where it stores keys and values.
    cache: Arc<KvCache>,
    slots: Vec<RowSlot>,
}

impl AheadStep {
    pub(super) fn new(
        input: StepInput,
        event: Event,
        chooses: bool,
        tables: &[&KvTables],
        cache: &Arc<KvCache>,
    ) -> AheadStep {
        let mut slots = Vec::new();
        for (row, (tables, state)) in tables.iter().zip(&input.rows).enumerate() {
            for (group, arena) in cache.arenas().iter().enumerate() {
                let index = state.position / arena.block_positions();
                let block = tables.blocks(group)[index];
                slots.push(RowSlot {
                    row,
                    group,
                    block,
                    taken: arena.taken(block),
                    position: state.position % arena.block_positions(),
                });
            }
        }
        AheadStep {
            input,
            event,
            chooses,
            cache: cache.clone(),
            slots,
        }
    }

    /// Zeroes the keys and values of these rows, which lie past the ends of their sequences and are not finite. A block that was taken again
    /// since has other contents.
    pub(super) fn clear(&self, rows: &[usize]) -> Result<()> {
        let mut slots = self.slots.iter().filter(|slot| rows.contains(&slot.row));
        slots.try_for_each(|slot| {
            match self.cache.arenas()[slot.group].taken(slot.block) == slot.taken {
                true => self
                    .cache
                    .clear(slot.group, slot.block, slot.position..slot.position + 1),
                false => Ok(()),
            }
        })
    }
}

/// The device's state between calls.
#[derive(Default)]
pub(super) enum DeviceState {
    /// A step has to write everything.
    #[default]
    Unknown,
    /// Working memory has the input of this step, tokens included.
    Ready(StepInput),
    /// A step is enqueued.
    Ahead(AheadStep),
}

/// Input to write before a step can be launched.
pub(super) enum Begin {
    /// Nothing: it is enqueued already, and the event follows it.
    Enqueued(Event),
    /// The settings of draws, if `rules`: it is enqueued up to its logits, and only the choice of tokens is left.
    Choose { rules: bool },
    /// Nothing.
    Launch,
    /// The settings of draws.
    WriteRules,
    /// Everything.
    WriteAll,
}

impl DeviceState {
    /// Takes the step that is enqueued, if one is; then the state is unknown.
    pub(super) fn take_ahead(&mut self) -> Option<AheadStep> {
        match std::mem::take(self) {
            DeviceState::Ahead(ahead) => Some(ahead),
            other => {
                *self = other;
                None
            }
        }
    }

    /// Input to write before a step that is not enqueued. The state is unknown afterwards. `continues` says whether the step's tokens are
    /// those that the device drew.
    pub(super) fn begin(&mut self, step: &StepInput, continues: bool) -> Begin {
        match std::mem::take(self) {
            DeviceState::Ready(ready)
                if continues
                    && ready.rows == step.rows
                    && ready.adapters == step.adapters
                    && ready.follows == step.follows =>
            {
                match ready.rules == step.rules {
                    true => Begin::Launch,
                    false => Begin::WriteRules,
                }
            }
            _ => Begin::WriteAll,
        }
    }
}
