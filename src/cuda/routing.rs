//! The rule by which a mixture's rows choose their experts, and how many tiles of pairs of a row and an expert that makes.

use crate::base::Result;
use crate::base::error::bail;
use crate::tensor::SigmoidScoring;

/// Upper limit of experts in a mixture.
const MOST_EXPERTS: usize = 512;
/// Upper limit of experts per row.
const MOST_PER_TOKEN: usize = 32;
/// Upper limit of groups of experts, one for each lane of a warp.
const MOST_GROUPS: usize = 32;
/// Smallest and largest tile that have kernels, in pairs of a row and an expert.
const TILE_PAIRS: [usize; 2] = [8, 64];

/// The tiles into which the pairs of a row and an expert are cut, each of one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExpertTiles {
    /// Pairs of a tile.
    pub(super) pairs: usize,
    /// Upper limit of tiles.
    pub(super) most: usize,
}

/// Routing rule: the experts with the best scores. Scores are the softmax over the logits of all experts, or sigmoids.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Number of experts.
    pub experts: usize,
    /// Experts per row.
    pub per_token: usize,
    /// Whether the scores of the chosen experts are divided by their sum.
    pub normalized: bool,
    /// `None` for the softmax.
    pub sigmoid: Option<SigmoidScoring>,
}

impl Routing {
    /// Refuses rules that no kernel implements.
    pub fn check(&self) -> Result<()> {
        if self.experts > MOST_EXPERTS || self.per_token > MOST_PER_TOKEN.min(self.experts) {
            bail!(
                Unsupported,
                "{} of {} experts for a token; a GPU takes up to {MOST_PER_TOKEN} of up to {MOST_EXPERTS}",
                self.per_token,
                self.experts
            );
        }
        if let Some(scoring) = self.sigmoid {
            let SigmoidScoring {
                groups, top_groups, ..
            } = scoring;
            let fits = scoring.check(self.experts, self.per_token).is_ok();
            if groups > MOST_GROUPS || !fits {
                bail!(
                    Unsupported,
                    "{} of {} experts in {top_groups} of {groups} groups; a GPU takes up to {MOST_GROUPS} groups, alike, of two or more and with enough experts",
                    self.per_token,
                    self.experts
                );
            }
        }
        Ok(())
    }

    /// The tiles of `rows` rows, whose pairs are about as many as one expert gets.
    pub(super) fn tiles(&self, rows: usize) -> ExpertTiles {
        let all = rows * self.per_token;
        let [least, most] = TILE_PAIRS;
        let of_expert = all.div_ceil(self.experts);
        let pairs = of_expert.next_power_of_two().clamp(least, most);
        ExpertTiles {
            pairs,
            most: all / pairs + all.min(self.experts),
        }
    }

    /// Upper limit of tiles for up to `rows` rows. Fewer rows may have more tiles, because their tiles are smaller.
    pub(super) fn most_tiles_up_to(&self, rows: usize) -> usize {
        let pairs = rows * self.per_token;
        pairs / TILE_PAIRS[0] + pairs.min(self.experts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Holds for any distribution of pairs: all rows to the same experts, an even spread, and one expert with the remainder.
    #[test]
    fn tiles_suffice_however_rows_are_routed() {
        for (experts, per_token) in [(128, 8), (60, 4), (8, 2), (512, 10), (3, 3)] {
            let routing = Routing {
                experts,
                per_token,
                normalized: true,
                sigmoid: None,
            };
            for rows in [1, 2, 7, 33, 256, 1000, 4096] {
                let (pairs, tiles) = (rows * per_token, routing.tiles(rows));
                assert!((8..=64).contains(&tiles.pairs));
                let same = vec![rows; per_token];
                let even: Vec<usize> = (0..experts).map(|e| (pairs + e) / experts).collect();
                let mut skewed = vec![1; pairs.min(experts)];
                skewed[0] += pairs - skewed.len();
                for counts in [same, even, skewed] {
                    assert_eq!(counts.iter().sum::<usize>(), pairs);
                    let needed: usize = counts.iter().map(|n| n.div_ceil(tiles.pairs)).sum();
                    assert!(needed <= tiles.most, "{routing:?} {rows}");
                }
            }
        }
    }

    #[test]
    fn what_no_kernel_routes_is_refused() {
        let of = |experts, per_token, sigmoid| Routing {
            experts,
            per_token,
            normalized: false,
            sigmoid,
        };
        assert!(of(512, 32, None).check().is_ok());
        for (experts, per_token) in [(513, 8), (512, 33), (4, 5)] {
            let error = of(experts, per_token, None).check().unwrap_err();
            let named = format!("{per_token} of {experts} experts");
            assert!(error.message().contains(&named), "{error}");
        }
        let within = |groups, top_groups| SigmoidScoring {
            groups,
            top_groups,
            scale: 1.0,
        };
        assert!(of(128, 6, Some(within(1, 1))).check().is_ok());
        assert!(of(64, 2, Some(within(32, 1))).check().is_ok());
        for (experts, per_token, groups, top_groups) in [
            (66, 2, 33, 1),
            (64, 2, 5, 1),
            (32, 1, 32, 1),
            (64, 9, 8, 1),
            (64, 2, 4, 5),
        ] {
            let rule = of(experts, per_token, Some(within(groups, top_groups)));
            let error = rule.check().unwrap_err();
            let named =
                format!("{per_token} of {experts} experts in {top_groups} of {groups} groups");
            assert!(error.message().contains(&named), "{error}");
        }
    }
}
