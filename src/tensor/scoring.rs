//! How a mixture scores its experts, on every device.

use crate::base::Result;
use crate::base::error::bail;

/// Scores of experts that do not depend on each other (DeepSeek-AI, 2024, "DeepSeek-V3").
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SigmoidScoring {
    /// Groups of equally many consecutive experts.
    pub groups: usize,
    /// Groups whose experts a row may choose: those with the largest sum of their two best scores.
    pub top_groups: usize,
    /// Factor of all weights.
    pub scale: f32,
}

impl SigmoidScoring {
    /// Fails unless `count` experts form the groups, and `per_token` of them can be chosen.
    pub fn check(&self, count: usize, per_token: usize) -> Result<()> {
        let SigmoidScoring {
            groups, top_groups, ..
        } = *self;
        let is_sound = (1..=groups).contains(&top_groups)
            && count.is_multiple_of(groups)
            && (groups == 1 || count / groups > 1)
            && (1..=count / groups * top_groups).contains(&per_token);
        if !is_sound {
            bail!(
                InvalidArgument,
                "{per_token} of {count} experts in {top_groups} of {groups} groups; groups must be alike, of two or more, and have enough experts"
            );
        }
        Ok(())
    }
}
