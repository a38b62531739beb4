//! The training recipe as data: stored forms of parameters, the precision of passes, and the treatment of gradients.

use serde::{Deserialize, Serialize};

use crate::base::Result;
use crate::base::error::bail;
use crate::checkpoint::Encoding;
use crate::format::nvfp4;
use crate::model::convert::{Container, ConvertOptions, Tables};
use crate::model::training::{Layout, MatrixId, ProductForm, ProductPrecision, Source};
use crate::ops::training::operand::ScaleRule;
use crate::ops::training::optimizer::{FirstForm, Forms, KeepScale, SecondForm, WeightForm};

/// Gradient clipping.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Clip {
    /// No clipping.
    Never,
    /// Bounds the norm of all gradients together, which must all be kept until the last one is known.
    Global(f64),
    /// Bounds the norm of all gradients by that of the previous step, which gradients that are used at once allow.
    Previous(f64),
    /// Bounds the norm of each matrix, or of those of its rows that are updated together.
    PerTensor(f64),
}

impl Clip {
    /// The bound, if any.
    pub fn bound(self) -> Option<f64> {
        match self {
            Clip::Never => None,
            Clip::Global(most) | Clip::Previous(most) | Clip::PerTensor(most) => Some(most),
        }
    }
}

/// Blocks at both ends of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HighBlocks {
    /// Number of blocks at the beginning.
    pub first: usize,
    /// Number of blocks at the end.
    pub last: usize,
}

/// Low-rank adapters over a frozen model (LoRA, Hu et al., arXiv 2106.09685; over 4 bits QLoRA, Dettmers et al., arXiv 2305.14314). The
/// matrix `W` of a projection is frozen, and its result gains `alpha / rank * (x A^T) B^T`. A begins uniform in `+-1 / sqrt(inputs)`, as in
/// peft, and B zero. Both are float32 with moments in float32; no gradient of `W` is ever computed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Lora {
    /// Rows of A, and columns of B.
    pub rank: usize,
    /// The adapter's result is multiplied by `alpha / rank`.
    pub alpha: f64,
    /// A projection gets an adapter if its name (`model.layers.0.self_attn.q_proj`) contains one of these.
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

/// Default share of steps with delivered weights, from random weights and for a pretrained model.
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
    /// Stored form of the linear weights of blocks between steps. Weights that the checkpoint holds in NVFP4 begin with its codes and
    /// scales; others are quantized by `weight_scales`, with the residual beside the codes as near to their values as possible. Weights
    /// that a checkpoint with NVFP4 matrices keeps in higher precision are stored as `tables` says.
    pub weights: WeightForm,
    /// Delivered form of the embedding and the head. For bfloat16 and int8 they are stored in bfloat16 with stochastic rounding; for NVFP4
    /// they are stored as `weights` says.
    pub tables: Tables,
    /// Stored form of first moments.
    pub first_moments: FirstForm,
    /// Stored form of second moments.
    pub second_moments: SecondForm,
    /// Recomputes block scales of weights in each step; a baseline.
    pub fresh_scales: bool,
    /// Matrices whose names contain one of these are stored in float32, with float32 moments and bfloat16 products.
    pub keep_high: Vec<String>,
    /// Precision of the input rows of projections in blocks. In NVFP4 they are rounded to nearest, in blocks along their width, and the
    /// weight's gradient is that of the rounded rows. Gradients pass straight through the rounding.
    pub activations: ProductForm,
    /// Rule for the block scales of those rows.
    pub activation_scales: ScaleRule,
    /// Precision of the gradients of projections' results. In NVFP4 they are rounded stochastically: for the rows' gradient in blocks along
    /// their width, and for the weight's gradient in blocks of 16 tokens. Those blocks are first rotated by a Hadamard matrix, together
    /// with the rows that they are multiplied with. Rows that are NVFP4 in the forward pass are rounded again after the rotation, as on
    /// hardware that multiplies in 4 bits. Random bits follow from seed, step, micro-batch, matrix and element.
    pub gradients: ProductForm,
    /// Blocks whose products stay in bfloat16.
    pub high_blocks: HighBlocks,
    /// Share of the steps, at the end, whose passes use the delivered weights, that is, the NVFP4 codes alone. The delivered model is then
    /// the one that was trained. `None` for 30 % of the steps for a pretrained model and 15 % from random weights, which learn less on
    /// codes alone.
    pub delivered_share: Option<f64>,
    /// Trains adapters beside frozen matrices instead of all parameters. Frozen matrices have their delivered form: the codes and scales of
    /// the checkpoint, or those of its quantization, 0.5625 bytes per parameter. Matrices that `keep_high` names stay as they are.
    /// `weights` and the forms of moments then have no effect.
    pub lora: Option<Lora>,
    /// Rule for block scales when linear weights are quantized: at the beginning, from a checkpoint that does not hold them in NVFP4, and
    /// when adapters are merged. Random weights get scales by their largest magnitudes.
    pub weight_scales: nvfp4::Recipe,
    /// Chooses block scales by the error of products rather than of weights: by the second moments of a step's inputs, 16 x 16 for each
    /// block. A pretrained model does so for the matrices that have moved when passes begin to use the delivered weights (see
    /// `delivered_share`; after the first step if they always do, before the last if they never do), and keeps the new scales if they lower
    /// the loss of that step's batch. Adapters do so when they are merged, by the inputs of their first step, in place of `weight_scales`.
    pub scale_search: bool,
    /// Trains only this many last blocks, the last norm and an untied head, or the adapters of these blocks. `None` for all blocks.
    /// Untrained parameters have no moments.
    pub last_blocks: Option<usize>,
    /// Gradient clipping.
    pub clip: Clip,
    /// Applies each gradient as soon as it is complete, and keeps none: a step has one batch, and gradients take no memory. Otherwise
    /// gradients are summed in float32.
    pub release: bool,
    /// Seed of the random bits of rounding.
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
    /// Everything in float32: the baseline for 4 bits.
    pub fn float32() -> Recipe {
        Recipe {
            weights: WeightForm::F32,
            first_moments: FirstForm::F32,
            second_moments: SecondForm::F32,
            ..Recipe::default()
        }
    }

    /// Refuses contradictory settings.
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

    /// The parameter layout of a model, adapters included.
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

    /// The precision of products for this layout. Products of adapters, of the head and of the projections of recurrent layers, whose errors
    /// add up in a state, are always in bfloat16.
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
                .map(|m| m.block.is_none_or(high) || m.is_recurrent || self.keeps_high(&m.name))
                .collect(),
        }
    }

    /// Share of the steps, at the end, with delivered weights, for a model that begins at `source`.
    pub(super) fn delivered_share(&self, source: &Source) -> f64 {
        let usual = match source.is_fresh() {
            true => FRESH_SHARE,
            false => DELIVERED_SHARE,
        };
        self.delivered_share.unwrap_or(usual)
    }

    /// Whether the inputs of matrices with adapters are recorded for merging.
    pub(super) fn observes_adapted(&self) -> bool {
        self.scale_search && self.lora.is_some()
    }

    /// Whether a matrix of this name is kept in float32.
    pub(super) fn keeps_high(&self, name: &str) -> bool {
        contains_one(name, &self.keep_high)
    }

    /// Conversion options for a checkpoint that is delivered untrained: as `nvfp4 quantize` converts it, except for what is not stored in
    /// NVFP4 and for what a checkpoint with NVFP4 matrices keeps in higher precision.
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

    /// Forms of a matrix with this name, if it is delivered in NVFP4.
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

    /// Index of the first trained block, out of `blocks`.
    pub(super) fn first_block(&self, blocks: usize) -> usize {
        self.last_blocks
            .map_or(0, |last| blocks.saturating_sub(last))
    }

    /// Whether a matrix of [`Recipe::layout`] is trained. If there are adapters, only they are; they come after the model's own matrices.
    pub(super) fn trains(&self, source: &Source, layout: &Layout, id: MatrixId) -> bool {
        if self.lora.is_some() {
            return id >= source.layout().matrices.len();
        }
        let first = self.first_block(layout.blocks.len());
        match layout.matrices[id].block {
            Some(block) => block >= first,
            // Matrices outside the blocks are trained if all blocks are; an untied head always is.
            None => first == 0 || (id == layout.head && layout.head != layout.embedding),
        }
    }
}

/// Whether a name contains one of these parts.
pub(super) fn contains_one(name: &str, parts: &[String]) -> bool {
    parts.iter().any(|part| name.contains(part.as_str()))
}
