//! Floor 6: what is served, and its sequences. Sessions and training both stand on it; the runner of many sequences comes here.

mod pool;
mod run;
mod sequence;
mod served;
mod snapshots;

pub use run::{NewTokens, NextDrafts};
pub use sequence::{Kept, REWIND, Sequence};
pub use served::{Served, ServedInfo};
pub use snapshots::{SNAPSHOT_POSITIONS, SNAPSHOTS};
