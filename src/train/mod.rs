//! Floor 7: training. A [`Trainer`] steps the parameters of a model, which it stores as a [`Recipe`] says: weights and both moments of the
//! optimizer in 4 bits by default. Knows nothing of conversations.

mod adapter;
pub mod checkpoint;
mod export;
mod group;
mod parameters;
mod recipe;
mod schedule;
mod trainer;

pub use crate::model::training::{ProductForm, Recompute, RecomputedParts};
pub use crate::ops::training::operand::ScaleRule;
pub use export::TableEncoding;
pub use group::Group;
pub use parameters::{Parameters, StepReport};
pub use recipe::{Clip, HighBlocks, Lora, Recipe};
pub use schedule::{Decay, Schedule};
pub use trainer::{Config, HiddenBatch, MicroBatch, Outcome, Step, Trainer};
