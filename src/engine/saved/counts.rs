//! Counts of saved and restored blocks.

use serde::Serialize;

use crate::base::Result;
use crate::base::error::err;
use crate::engine::blocks::Blocks;

/// Blocks of keys, values and recurrent states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PrefixCounts {
    /// Their number.
    pub blocks: usize,
    /// Their bytes in the memory of the model.
    pub bytes: u64,
}

impl PrefixCounts {
    pub(super) fn add(&mut self, bytes: u64) {
        self.blocks += 1;
        self.bytes += bytes;
    }
}

/// The blocks of a file, and what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RestoredPrefixes {
    /// Blocks of the file.
    pub in_file: PrefixCounts,
    /// Blocks that were filled. The others were there already, or found no room.
    pub filled: PrefixCounts,
}

/// Fails unless the model has a prefix index.
pub(super) fn check_sharing(blocks: &Blocks) -> Result<()> {
    match blocks.shares() {
        true => Ok(()),
        false => Err(err!(
            InvalidArgument,
            "the model was loaded without a prefix cache, so it has no prefixes to save or restore; load it with prefix_cache"
        )),
    }
}
