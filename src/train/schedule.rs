//! Learning rate schedules.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use crate::base::Result;
use crate::base::error::bail;

/// Decay of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// No decay.
    Constant,
    /// Half a cosine (Loshchilov and Hutter, arXiv 1608.03983).
    #[default]
    Cosine,
    /// Linear.
    Linear,
    /// Constant, then linear over this last share of the steps (warm-up, stable, decay; Hu et al., arXiv 2404.06395).
    Stable(f64),
}

/// A schedule: the rate of each step, as a share of the highest.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Schedule {
    /// Steps of linear warm-up.
    pub warmup: u64,
    /// Decay after the warm-up.
    pub decay: Decay,
    /// The final share.
    pub floor: f64,
}

impl Default for Schedule {
    fn default() -> Self {
        Schedule {
            warmup: 0,
            decay: Decay::default(),
            floor: 0.1,
        }
    }
}

impl Schedule {
    /// Refuses shares outside their range.
    pub fn check(&self) -> Result<()> {
        if !(0.0..=1.0).contains(&self.floor) {
            bail!(
                InvalidArgument,
                "a floor of {}; it is a share of the highest rate, 0 to 1",
                self.floor
            );
        }
        match self.decay {
            Decay::Stable(last) if !(last > 0.0 && last <= 1.0) => bail!(
                InvalidArgument,
                "a rate that falls over {last} of the steps; it is a share of them, more than 0 and at most 1"
            ),
            _ => Ok(()),
        }
    }

    /// The share of the highest rate at step `step`, counted from 0, of `steps`.
    pub fn share(&self, step: u64, steps: u64) -> f64 {
        if step < self.warmup {
            return (step + 1) as f64 / self.warmup as f64;
        }
        let rest = steps.saturating_sub(self.warmup).max(1) as f64;
        let done = ((step - self.warmup) as f64 / rest).min(1.0);
        let fallen = match self.decay {
            Decay::Constant => 0.0,
            Decay::Cosine => 0.5 - 0.5 * (PI * done).cos(),
            Decay::Linear => done,
            Decay::Stable(last) => {
                ((done - (1.0 - last)) / last.max(f64::MIN_POSITIVE)).clamp(0.0, 1.0)
            }
        };
        1.0 - (1.0 - self.floor) * fallen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_rise_and_fall() {
        let schedule = |decay| Schedule {
            warmup: 10,
            decay,
            floor: 0.1,
        };
        for decay in [
            Decay::Constant,
            Decay::Cosine,
            Decay::Linear,
            Decay::Stable(0.2),
        ] {
            let s = schedule(decay);
            let shares: Vec<f64> = (0..=110).map(|step| s.share(step, 110)).collect();
            assert!(
                shares[..10].is_sorted() && shares[9] == 1.0 && shares[10] == 1.0,
                "{decay:?}"
            );
            assert!(shares[10..].iter().rev().is_sorted(), "{decay:?}");
            let last = if decay == Decay::Constant { 1.0 } else { 0.1 };
            assert!(
                (shares[110] - last).abs() < 1e-12,
                "{decay:?}: {}",
                shares[110]
            );
        }
        assert!((schedule(Decay::Cosine).share(60, 110) - 0.55).abs() < 1e-12);
        assert_eq!(schedule(Decay::Stable(0.2)).share(89, 110), 1.0);
        // Decays to zero also beyond the last step, in a single step, and in fewer steps than the warm-up.
        for decay in [Decay::Cosine, Decay::Linear, Decay::Stable(0.5)] {
            let to_nothing = Schedule {
                floor: 0.0,
                ..schedule(decay)
            };
            assert_eq!(to_nothing.share(110, 110), 0.0);
            for steps in [1, 5, 10, 11, 110] {
                let shares = (0..200).map(|step| to_nothing.share(step, steps));
                assert!(shares.into_iter().all(|s| (0.0..=1.0).contains(&s)));
            }
        }
        for (decay, floor) in [
            (Decay::Stable(0.0), 0.1),
            (Decay::Stable(f64::NAN), 0.1),
            (Decay::Cosine, f64::NAN),
            (Decay::Cosine, 1.5),
        ] {
            let wrong = Schedule {
                floor,
                ..schedule(decay)
            };
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
    }
}
