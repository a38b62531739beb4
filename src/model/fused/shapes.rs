//! The shapes of a model's blocks, which the planner takes.

use std::ops::Range;

use crate::cuda::{Hardware, Layout, MatrixShape, Routing};
use crate::model::order::Half;
use crate::model::spec::NormPlacement;
use crate::tensor::{DeltaShape, WeightType};

/// The properties of a model that the plan depends on.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ModelShape {
    /// The blocks, that of the drafter last.
    pub(super) blocks: Vec<BlockShape>,
    /// The projection of embeddings to the blocks' own inputs, in models with per-layer embeddings.
    pub(super) layer_inputs: Option<MatrixShape>,
    /// The projection of the drafter's inputs, if there is a drafter.
    pub(super) drafter_fc: Option<MatrixShape>,
    pub(super) head: MatrixShape,
}

impl ModelShape {
    /// Its matrices, except those of routed experts and routers.
    pub(super) fn matrices(&self) -> impl Iterator<Item = &MatrixShape> {
        let blocks = self.blocks.iter();
        let blocks = blocks.flat_map(|b| b.matrices().chain(b.per_layer.iter().flatten()));
        let beside = self.layer_inputs.iter().chain(&self.drafter_fc);
        blocks.chain(beside).chain([&self.head])
    }

    /// The numbers of the model's own blocks.
    pub(super) fn own_blocks(&self) -> Range<usize> {
        0..self.blocks.len() - usize::from(self.drafter_fc.is_some())
    }
}

/// The properties of a block that the plan depends on.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct BlockShape {
    pub(super) norms: NormPlacement,
    pub(super) mixer: MixerShape,
    pub(super) mlp: MlpShape,
    /// The gate of the block's own input, and the projection of their product, if it has such an input.
    pub(super) per_layer: Option<[MatrixShape; 2]>,
    /// Whether the residual stream is multiplied by a number at the end.
    pub(super) scaled: bool,
}

/// The projections of a mixer.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum MixerShape {
    Attention {
        /// Queries, and the keys and values that the layer has itself.
        qkv: Vec<MatrixShape>,
        gate: Option<MatrixShape>,
        o: MatrixShape,
        /// Whether all heads of queries are normalized together, and all heads of keys.
        normed: bool,
        /// Its place in [`Sizes::attentions`](super::sizes::Sizes::attentions).
        kind: usize,
    },
    GatedDelta {
        /// Heads.
        heads: DeltaShape,
        /// Queries, keys and values as one, and the gate of the norm.
        inputs: [MatrixShape; 2],
        /// The gates of the rule.
        gates: [MatrixShape; 2],
        out: MatrixShape,
    },
    Mamba2 {
        /// The gate of the norm; x, B and C; and time steps.
        inputs: [MatrixShape; 3],
        out: MatrixShape,
    },
    /// The block is an MLP alone.
    None,
}

impl MixerShape {
    fn matrices(&self) -> Vec<&MatrixShape> {
        match self {
            MixerShape::Attention { qkv, gate, o, .. } => {
                qkv.iter().chain(gate).chain([o]).collect()
            }
            MixerShape::GatedDelta {
                inputs, gates, out, ..
            } => inputs.iter().chain(gates).chain([out]).collect(),
            MixerShape::Mamba2 { inputs, out } => inputs.iter().chain([out]).collect(),
            MixerShape::None => Vec::new(),
        }
    }

    /// The first projections of attention without a gate, whose norm earlier kernels can apply.
    pub(super) fn plain_attention(&self) -> Option<&[MatrixShape]> {
        match self {
            MixerShape::Attention {
                qkv, gate: None, ..
            } => Some(qkv),
            _ => None,
        }
    }
}

/// The projections of an MLP.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DenseShape {
    pub(super) gate: Option<MatrixShape>,
    pub(super) up: MatrixShape,
    pub(super) down: MatrixShape,
}

impl DenseShape {
    /// Gate and up, if it has a gate.
    pub(super) fn gate_up(&self) -> Option<[MatrixShape; 2]> {
        self.gate.map(|gate| [gate, self.up])
    }
}

/// Routed experts.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RoutedShape {
    /// The router, and the gate of the shared expert if it has one.
    pub(super) router: Vec<MatrixShape>,
    /// Whether experts have gates.
    pub(super) gated: bool,
    /// The rule of routing.
    pub(super) routing: Routing,
    /// The up projection of each expert, `[intermediate, hidden]`.
    pub(super) up: MatrixShape,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum MlpShape {
    Dense(DenseShape),
    /// Experts in NVFP4, and optionally a shared expert.
    Experts {
        routed: RoutedShape,
        shared: Option<DenseShape>,
    },
    /// A dense MLP, and experts in NVFP4 beside it.
    DenseAndExperts {
        dense: DenseShape,
        routed: RoutedShape,
    },
    /// The block is a mixer alone.
    None,
}

impl MlpShape {
    /// The MLP that all rows use.
    fn of_all_rows(&self) -> Option<&DenseShape> {
        match self {
            MlpShape::Dense(mlp) | MlpShape::DenseAndExperts { dense: mlp, .. } => Some(mlp),
            MlpShape::Experts { shared, .. } => shared.as_ref(),
            MlpShape::None => None,
        }
    }
}

impl BlockShape {
    /// The projections of its halves, except those of routed experts and routers.
    pub(super) fn matrices(&self) -> impl Iterator<Item = &MatrixShape> {
        self.mixer.matrices().into_iter().chain(self.of_mlp())
    }

    fn of_mlp(&self) -> impl Iterator<Item = &MatrixShape> {
        let mlp = self.mlp.of_all_rows().into_iter();
        mlp.flat_map(|mlp| mlp.gate.iter().chain([&mlp.up, &mlp.down]))
    }

    /// The halves that it has.
    pub(super) fn halves(&self) -> impl Iterator<Item = Half> + use<> {
        let (mixes, has_mlp) = (self.mixer != MixerShape::None, self.mlp != MlpShape::None);
        let halves = [(Half::Mixer, mixes), (Half::Mlp, has_mlp)].into_iter();
        halves.filter_map(|(half, has)| has.then_some(half))
    }

    /// The layout of a half's activations: the layout of the NVFP4 GEMMs if all of the block's projections are NVFP4, else row-major. Beside
    /// a recurrent mixer, whose gates never are, those of the MLP decide alone. Experts gather rows, so they are row-major.
    pub(super) fn layout(&self, half: Half, hardware: &Hardware, rows: usize) -> Layout {
        let gathers = half == Half::Mlp && matches!(self.mlp, MlpShape::Experts { .. });
        let is_nvfp4 = |w: &MatrixShape| w.storage == WeightType::Nvfp4;
        let are_nvfp4 = match (half, &self.mixer) {
            (Half::Mlp, MixerShape::GatedDelta { .. } | MixerShape::Mamba2 { .. }) => {
                self.of_mlp().all(is_nvfp4)
            }
            _ => self.matrices().all(is_nvfp4),
        };
        match !gathers && are_nvfp4 {
            true => Layout::taken(hardware, rows),
            false => Layout::RowMajor,
        }
    }
}
