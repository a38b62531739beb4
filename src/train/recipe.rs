//! How a model is trained, as data: in what form parameters are stored, what passes multiply with, and how gradients are treated.

use serde::{Deserialize, Serialize};

use crate::base::Result;
use crate::base::error::bail;
use crate::ops::training::optimizer::{FirstForm, Forms, SecondForm, WeightForm};

/// How gradients are bounded before a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Clip {
    /// Not at all.
    Never,
    /// The norm of all gradients together, which must wait for each other.
    Global(f64),
    /// The norm of all gradients together, by that of the step before: what gradients that are used at once allow.
    Previous(f64),
    /// The norm of each matrix, or of the rows of it that are updated together.
    PerTensor(f64),
}

impl Clip {
    /// The bound, if there is one.
    pub fn bound(self) -> Option<f64> {
        match self {
            Clip::Never => None,
            Clip::Global(most) | Clip::Previous(most) | Clip::PerTensor(most) => Some(most),
        }
    }
}

/// How a model is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Recipe {
    /// How weights are stored between steps.
    pub weights: WeightForm,
    /// How first moments are stored.
    pub first_moments: FirstForm,
    /// How second moments are stored.
    pub second_moments: SecondForm,
    /// Makes block scales of weights anew in each step; a baseline.
    pub fresh_scales: bool,
    /// Matrices whose names contain one of these are kept in float32, with their moments.
    pub keep_high: Vec<String>,
    /// The share of steps at the end in which passes multiply with what is delivered, the NVFP4 codes alone, so that what is delivered is
    /// what was trained.
    pub delivered_share: f64,
    /// Trains the last so many blocks, the last norm and an untied head; all parameters if `None`.
    pub last_blocks: Option<usize>,
    /// How gradients are bounded.
    pub clip: Clip,
    /// Uses gradients as soon as they are whole, and keeps none: a step of one batch, and no memory for gradients. Otherwise they are
    /// summed in float32.
    pub release: bool,
    /// Chooses the random bits of rounding.
    pub seed: u64,
}

impl Default for Recipe {
    fn default() -> Self {
        Recipe {
            weights: WeightForm::default(),
            first_moments: FirstForm::default(),
            second_moments: SecondForm::default(),
            fresh_scales: false,
            keep_high: Vec::new(),
            delivered_share: 0.15,
            last_blocks: None,
            clip: Clip::Global(1.0),
            release: false,
            seed: 0,
        }
    }
}

impl Recipe {
    /// Everything in float32: what 4 bits are compared with.
    pub fn float32() -> Recipe {
        Recipe {
            weights: WeightForm::F32,
            first_moments: FirstForm::F32,
            second_moments: SecondForm::F32,
            ..Recipe::default()
        }
    }

    /// Refuses what contradicts itself.
    pub fn check(&self) -> Result<()> {
        if !(0.0..=1.0).contains(&self.delivered_share) {
            bail!(
                InvalidArgument,
                "delivered_share is {}; it is a share of the steps, 0 to 1",
                self.delivered_share
            );
        }
        if let Some(most) = self.clip.bound()
            && !(most > 0.0 && most.is_finite())
        {
            bail!(
                InvalidArgument,
                "gradients cannot be clipped to {most}; the bound must be positive"
            );
        }
        match (self.release, self.clip) {
            (true, Clip::Global(most)) => bail!(
                InvalidArgument,
                "gradients that are released as they come have no global norm to clip to {most}; clip by the norm of the previous step, or \
                 per tensor, or keep gradients"
            ),
            (false, Clip::Previous(_) | Clip::PerTensor(_)) => bail!(
                InvalidArgument,
                "clipping by the previous step's norm or per tensor is for released gradients; these are kept, and can be clipped by their \
                 global norm"
            ),
            _ => Ok(()),
        }
    }

    /// The form of a matrix of this name.
    pub(super) fn forms_of(&self, name: &str) -> Forms {
        let high = self
            .keep_high
            .iter()
            .any(|part| name.contains(part.as_str()));
        Forms {
            weight: if high { WeightForm::F32 } else { self.weights },
            first: if high {
                FirstForm::F32
            } else {
                self.first_moments
            },
            second: if high {
                SecondForm::F32
            } else {
                self.second_moments
            },
            fresh_scales: self.fresh_scales,
        }
    }

    /// The first block that is trained, of so many.
    pub(super) fn first_block(&self, blocks: usize) -> usize {
        self.last_blocks
            .map_or(0, |last| blocks.saturating_sub(last))
    }
}
