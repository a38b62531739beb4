//! Floor 7: training. A [`Trainer`] steps the parameters of a model, which it stores as a [`Recipe`] says: weights and both moments of the
//! optimizer in 4 bits by default. Knows nothing of conversations.

pub mod checkpoint;
mod export;
mod parameters;
mod recipe;
mod schedule;
mod trainer;

pub use export::TableEncoding;
pub use parameters::{Parameters, StepReport};
pub use recipe::{Clip, Recipe};
pub use schedule::{Decay, Schedule};
pub use trainer::{Config, MicroBatch, Outcome, Step, Trainer};
