//! Files of prefixes: the nodes of the prefix index with their blocks, so that a later process begins with the prompts of this one. The
//! checksum of a file finds damage and not forgery: whoever restores a file trusts it as much as the weights.

mod counts;
mod fill;
mod plan;
mod record;
mod restore;
mod save;

pub use counts::{PrefixCounts, RestoredPrefixes};
pub(super) use restore::restore;
pub(super) use save::save;
