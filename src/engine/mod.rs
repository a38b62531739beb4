//! Floor 6: what is served, its sequences, and the runner that takes the tokens of many of them through the weights together. Sessions and
//! training both stand on it.

pub mod capacity;
mod pass;
mod pool;
mod run;
mod runner;
mod schedule;
mod sequence;
mod served;
mod snapshots;
mod times;
mod window;

pub use pass::NewTokens;
pub use run::NextDrafts;
pub use runner::{Generating, PassCounts};
pub use sequence::{Kept, Sequence};
pub use served::{Served, ServedInfo};
pub use snapshots::{SNAPSHOT_POSITIONS, SNAPSHOTS};
pub use window::REWIND;
