//! Floor 6: what is served, its sequences, and the runner that takes the tokens of many of them through the weights together. Sessions and
//! training both stand on it.

mod adapters;
mod blocks;
pub mod capacity;
mod chat_text;
mod grammars;
mod leased;
mod pass;
mod pool;
mod pools;
mod prefix;
mod run;
mod runner;
mod same_tokens;
mod saved;
mod schedule;
mod sequence;
mod served;
mod snapshots;
mod times;
mod windows;

pub use adapters::LoadedAdapter;
pub use blocks::BlockCounts;
pub use chat_text::ChatText;
pub use pass::NewTokens;
pub use run::NextDrafts;
pub use runner::{Generating, PassCounts};
pub use saved::{PrefixCounts, RestoredPrefixes};
pub use sequence::{Kept, Sequence, SequenceWork};
pub use served::{Served, ServedInfo, Statistics};
pub use snapshots::{SNAPSHOT_POSITIONS, SNAPSHOTS};
pub use windows::REWIND;
