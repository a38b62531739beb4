//! Floor 7: training. A [`Trainer`] steps the parameters of a model in the stored form of a [`Recipe`]: weights and both moments of the
//! optimizer in 4 bits by default. Knows nothing of conversations.

mod adapter;
mod beginning;
pub mod calibration;
pub mod checkpoint;
mod curve;
pub mod data;
mod distillation;
mod evaluation;
mod event;
mod export;
mod fit;
mod group;
mod inputs;
mod judge;
mod lock;
pub mod memory;
mod offload;
mod parameters;
mod position;
mod rate;
mod recipe;
mod reports;
mod row;
pub mod run;
mod sample;
mod scales;
mod schedule;
mod teacher;
mod tensorboard;
mod trainer;

pub use crate::model::training::{ProductForm, Recompute, RecomputedParts};
pub use crate::ops::training::operand::ScaleRule;
pub use curve::Curve;
pub use distillation::{Comparison, Distillation};
pub use group::Group;
pub use memory::{MemoryReport, TeacherPlacement};
pub use offload::Offload;
pub use parameters::{Parameters, StepReport};
pub use recipe::{Clip, HighBlocks, Lora, Recipe};
pub use row::{Losses, Row, Score};
pub use sample::Samples;
pub use scales::ScaleChoice;
pub use schedule::{Decay, Schedule};
pub use teacher::{check_vocabulary, fingerprint};
pub use trainer::{Config, HiddenBatch, MicroBatch, Outcome, Phase, Step, Trainer};
