//! How a model is trained, as data: in what form parameters are stored, what passes multiply with, and how gradients are treated.

use serde::{Deserialize, Serialize};

use crate::base::Result;
use crate::base::error::bail;
use crate::checkpoint::Encoding;
use crate::format::nvfp4;
use crate::model::convert::{Container, ConvertOptions, Tables};
use crate::model::training::{Layout, MatrixId, ProductForm, ProductPrecision, Source};
use crate::ops::training::operand::ScaleRule;
use crate::ops::training::optimizer::{FirstForm, Forms, KeepScale, SecondForm, WeightForm};

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

/// Blocks at either end of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HighBlocks {
    /// Of the first ones, how many.
    pub first: usize,
    /// Of the last ones, how many.
    pub last: usize,
}

/// Low-rank adapters over a model that stays as it is (LoRA, Hu et al., arXiv 2106.09685; over 4 bits QLoRA, Dettmers et al.,
/// arXiv 2305.14314). The matrix `W` of a projection is frozen, and its results gain `alpha / rank * (x A^T) B^T`. A begins uniform in
/// `+-1 / sqrt(inputs)`, as in peft, and B zero. Both are float32 with moments in float32; no gradient of `W` is ever computed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Lora {
    /// Rows of A, and columns of B.
    pub rank: usize,
    /// What results are multiplied by, times the rank.
    pub alpha: f64,
    /// Projections of blocks whose names (`model.layers.0.self_attn.q_proj`) contain one of these have adapters.
    pub targets: Vec<String>,
}

impl Default for Lora {
    fn default() -> Self {
        Lora {
            rank: 16,
            alpha: 32.0,
            targets: PROJECTIONS.map(str::to_owned).to_vec(),
        }
    }
}

/// The share of steps with what is delivered, from random weights and of a model that has learned something.
const FRESH_SHARE: f64 = 0.15;
const DELIVERED_SHARE: f64 = 0.3;

/// The projections of a block.
const PROJECTIONS: [&str; 7] = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
];

impl Lora {
    fn check(&self) -> Result<()> {
        if self.rank == 0 || !(self.alpha > 0.0 && self.alpha.is_finite()) {
            bail!(
                InvalidArgument,
                "adapters of rank {} with alpha {}; both must be positive",
                self.rank,
                self.alpha
            );
        }
        Ok(())
    }
}

/// How a model is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Recipe {
    /// How the linear weights of blocks are stored between steps. Those that the checkpoint holds in NVFP4 begin with its codes and scales;
    /// those that it holds in another form are quantized by `weight_scales` and begin with what is kept beside codes as near to their values
    /// as it comes. What a checkpoint with NVFP4 matrices keeps higher beside them is stored as `tables` are.
    pub weights: WeightForm,
    /// The form in which the embedding and the head are delivered. In bfloat16, and where int8 is delivered, they are stored in bfloat16,
    /// rounded stochastically; in NVFP4 as `weights` says.
    pub tables: Tables,
    /// How first moments are stored.
    pub first_moments: FirstForm,
    /// How second moments are stored.
    pub second_moments: SecondForm,
    /// Makes block scales of weights anew in each step; a baseline.
    pub fresh_scales: bool,
    /// Matrices whose names contain one of these are kept in float32, with their moments, and their products in bfloat16.
    pub keep_high: Vec<String>,
    /// In what the rows that projections of blocks multiply are: in NVFP4 they are rounded to nearest, in blocks along their width, and the
    /// gradient of the weight is that of the rounded rows. Gradients pass through the rounding as if it were not there.
    pub activations: ProductForm,
    /// How block scales of those rows are chosen.
    pub activation_scales: ScaleRule,
    /// In what gradients of projections' results are multiplied: in NVFP4 they are rounded stochastically, for the gradient of the rows in
    /// blocks along their width, and for that of the weight in blocks of 16 tokens, which are rotated by a Hadamard matrix together with the
    /// rows that they are multiplied with. Rows that are NVFP4 in the forward pass are then rounded anew, after the rotation, as they are
    /// on hardware that multiplies in 4 bits. Random bits follow from seed, step, micro-batch, matrix and element.
    pub gradients: ProductForm,
    /// Blocks whose products stay in bfloat16.
    pub high_blocks: HighBlocks,
    /// The share of steps at the end in which passes multiply with what is delivered, the NVFP4 codes alone, so that what is delivered is
    /// what was trained. If `None`, 30 % of the steps of a model that has learned something, and 15 % from random weights, which learn
    /// less on codes alone.
    pub delivered_share: Option<f64>,
    /// Trains adapters beside frozen matrices instead of all parameters. Frozen matrices have the form in which they are delivered: the codes
    /// and scales of the checkpoint, or those of its quantization, 0.5625 bytes a parameter; those that `keep_high` names stay as they are.
    /// `weights` and the forms of moments do not matter then.
    pub lora: Option<Lora>,
    /// How block scales are chosen where linear weights are quantized: as training begins, of a checkpoint that does not hold them in NVFP4,
    /// and where adapters are merged. Random weights have the scales of their largest magnitudes.
    pub weight_scales: nvfp4::Recipe,
    /// Chooses block scales by what rounding does to products rather than to weights: by the second moments of a step's inputs, 16 x 16 for
    /// each block. So does a model that has learned something, of the matrices that have moved, when passes begin to multiply with what
    /// is delivered (see `delivered_share`; after the first step if that is always, before the last if it is never), and keeps what lowers
    /// the loss of that step's batch. So do adapters when they are merged, by the inputs of their first step, in the place of `weight_scales`.
    pub scale_search: bool,
    /// Trains the last so many blocks, the last norm and an untied head, or the last blocks' adapters; all of them if `None`. What is
    /// not trained has no moments.
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
            tables: Tables::default(),
            first_moments: FirstForm::default(),
            second_moments: SecondForm::default(),
            fresh_scales: false,
            keep_high: Vec::new(),
            activations: ProductForm::default(),
            activation_scales: ScaleRule::default(),
            gradients: ProductForm::default(),
            high_blocks: HighBlocks::default(),
            lora: None,
            weight_scales: nvfp4::Recipe::Sweep,
            delivered_share: None,
            scale_search: true,
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
        if let Some(share) = self.delivered_share
            && !(0.0..=1.0).contains(&share)
        {
            bail!(
                InvalidArgument,
                "delivered_share is {share}; it is a share of the steps, 0 to 1"
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
        if let Some(lora) = &self.lora {
            lora.check()?;
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

    /// The parameters of a model, adapters included.
    pub(super) fn layout(&self, source: &Source) -> Result<Layout> {
        let layout = source.layout();
        let Some(lora) = &self.lora else {
            return Ok(layout.clone());
        };
        let first = self.first_block(layout.blocks.len());
        let scale = (lora.alpha / lora.rank as f64) as f32;
        let wants = |name: &str| contains_one(name, &lora.targets);
        let adapted = layout.with_adapters(first, (lora.rank, scale), &wants);
        if adapted.matrices.len() == layout.matrices.len() {
            bail!(
                InvalidArgument,
                "no projection of the trained blocks has a name with one of {:?}; there are {}",
                lora.targets,
                PROJECTIONS.join(", ")
            );
        }
        Ok(adapted)
    }

    /// The precision of products of a model with this layout. The products of adapters, and of the head, are in bfloat16 always.
    pub(super) fn precision(&self, layout: &Layout) -> ProductPrecision {
        let high = |block: usize| {
            block < self.high_blocks.first || block + self.high_blocks.last >= layout.blocks.len()
        };
        let matrices = layout.matrices.iter();
        ProductPrecision {
            activations: self.activations,
            activation_scales: self.activation_scales,
            gradients: self.gradients,
            high: matrices
                .map(|m| m.block.is_none_or(high) || self.keeps_high(&m.name))
                .collect(),
        }
    }

    /// The share of steps at the end with what is delivered, of a model that begins at `source`.
    pub(super) fn delivered_share(&self, source: &Source) -> f64 {
        let usual = match source.is_fresh() {
            true => FRESH_SHARE,
            false => DELIVERED_SHARE,
        };
        self.delivered_share.unwrap_or(usual)
    }

    /// Whether the inputs of matrices with adapters are noted, for merging.
    pub(super) fn observes_adapted(&self) -> bool {
        self.scale_search && self.lora.is_some()
    }

    /// Whether a matrix of this name is kept high.
    pub(super) fn keeps_high(&self, name: &str) -> bool {
        contains_one(name, &self.keep_high)
    }

    /// How a checkpoint is delivered where it is not trained: as `nvfp4 quantize` would convert it, but for what is not stored in NVFP4
    /// either, and for what a checkpoint with NVFP4 matrices keeps higher.
    pub(super) fn conversion(&self, source: &Source) -> ConvertOptions {
        let mut keep = self.keep_high.clone();
        if self.lora.is_none() && !self.weights.is_packed() {
            keep.push(String::new());
        } else if source.is_nvfp4() {
            let layout = source.layout();
            let is_table = |name: &str| {
                let table = [layout.embedding, layout.head].map(|id| &layout.matrices[id].name);
                table.iter().any(|own| *own == name)
            };
            let entries = source.checkpoint().entries().iter();
            let high = entries.filter(|e| {
                e.encoding != Encoding::Nvfp4 && (self.tables == Tables::Auto || !is_table(&e.name))
            });
            keep.extend(high.map(|e| e.name.clone()));
        }
        ConvertOptions {
            tables: self.tables,
            keep,
            ..ConvertOptions::new(Container::ModelOpt, self.weight_scales)
        }
    }

    /// The form of a matrix of this name, where NVFP4 is delivered.
    pub(super) fn forms_of(&self, name: &str) -> Forms {
        let high = self.keeps_high(name);
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
            keep_scale: match self.fresh_scales {
                true => KeepScale::Never,
                false => KeepScale::Near,
            },
        }
    }

    /// The first block that is trained, of so many.
    pub(super) fn first_block(&self, blocks: usize) -> usize {
        self.last_blocks
            .map_or(0, |last| blocks.saturating_sub(last))
    }

    /// Whether a matrix of [`Recipe::layout`] is trained: adapters alone where there are any, which stand behind the model's own.
    pub(super) fn trains(&self, source: &Source, layout: &Layout, id: MatrixId) -> bool {
        if self.lora.is_some() {
            return id >= source.layout().matrices.len();
        }
        let first = self.first_block(layout.blocks.len());
        match layout.matrices[id].block {
            Some(block) => block >= first,
            // What stands outside the blocks is trained with them all, and a head of its own always.
            None => first == 0 || (id == layout.head && layout.head != layout.embedding),
        }
    }
}

/// Whether a name contains one of these parts.
pub(super) fn contains_one(name: &str, parts: &[String]) -> bool {
    parts.iter().any(|part| name.contains(part.as_str()))
}
