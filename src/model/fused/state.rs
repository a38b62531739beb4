//! State of the device between decode steps, from which follows the input that the next step has to write.

use crate::base::Result;
use crate::cuda::{DrawRule, Event};
use crate::model::kv::KvTables;

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
}

/// The input of a decode step, beside the tokens.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StepInput {
    pub(super) rows: Vec<RowState>,
    /// Settings of the draws; empty if every next token is the argmax.
    pub(super) rules: Vec<DrawRule>,
    /// Whether the long RoPE table applies.
    pub(super) long: bool,
}

impl StepInput {
    /// The step after this one, in which each sequence goes on with the token that was drawn for it.
    pub(super) fn next(mut self) -> StepInput {
        self.rows.iter_mut().for_each(|row| row.position += 1);
        self.rules.iter_mut().for_each(|rule| rule.draw += 1);
        self
    }

    /// The last position.
    pub(super) fn last(&self) -> usize {
        self.rows.iter().map(|row| row.position).max().unwrap_or(0)
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
    /// This step is enqueued, and the event follows it.
    Ahead(StepInput, Event),
}

/// Input to write before a step can be launched.
pub(super) enum Begin {
    /// Nothing: it is enqueued already, and the event follows it.
    Enqueued(Event),
    /// Nothing.
    Launch,
    /// The settings of draws.
    WriteRules,
    /// Everything.
    WriteAll,
}

impl DeviceState {
    /// Begins a step, after which the state is unknown until it is set again. `continues` says whether the step's tokens are those that the
    /// device drew.
    pub(super) fn begin(&mut self, step: &StepInput, continues: bool) -> Result<Begin> {
        match std::mem::take(self) {
            DeviceState::Ahead(ahead, event) if continues && ahead == *step => {
                Ok(Begin::Enqueued(event))
            }
            DeviceState::Ahead(_, event) => {
                event.wait()?;
                Ok(Begin::WriteAll)
            }
            DeviceState::Ready(ready) if continues && ready.rows == step.rows => {
                Ok(match ready.rules == step.rules {
                    true => Begin::Launch,
                    false => Begin::WriteRules,
                })
            }
            DeviceState::Ready(_) | DeviceState::Unknown => Ok(Begin::WriteAll),
        }
    }

    /// Whether a step is enqueued that the next one may begin with.
    pub(super) fn is_ahead(&self) -> bool {
        matches!(self, DeviceState::Ahead(..))
    }

    /// Waits for a step that is enqueued, after which nothing is known.
    pub(super) fn forget(&mut self) -> Result<()> {
        match std::mem::take(self) {
            DeviceState::Ahead(_, event) => event.wait(),
            DeviceState::Ready(_) | DeviceState::Unknown => Ok(()),
        }
    }
}
