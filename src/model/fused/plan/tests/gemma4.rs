//! Models of Gemma 4 for plans.

use super::super::{
    Activation, BlockShape, DenseShape, MatrixShape, MixerShape, MlpShape, ModelShape, RoutedShape,
    WeightType,
};
use super::routing;
use crate::model::spec::{
    AttentionSpec, BlockSpec, DenseMlpSpec, ExpertNames, ExpertsSpec, KeyValues, MixerSpec,
    MlpSpec, NormPlacement, PerLayerSpec, QkNorm, Scoring,
};

/// Sizes of a model of Gemma 4.
pub(super) struct Gemma4 {
    hidden: usize,
    heads: usize,
    /// Key/value heads of layers with a window, of 256 elements, and of the others, of 512 elements.
    kv_heads: [usize; 2],
    intermediate: usize,
    /// Whether the layers without a window have keys for values.
    keys_as_values: bool,
    experts: bool,
    /// Elements of a block's own input, and the number of blocks that the model has.
    per_layer: Option<[usize; 2]>,
}

pub(super) const GEMMA4_31B: Gemma4 = Gemma4 {
    hidden: 5376,
    heads: 32,
    kv_heads: [16, 4],
    intermediate: 21_504,
    keys_as_values: true,
    experts: false,
    per_layer: None,
};
pub(super) const GEMMA4_26B_A4B: Gemma4 = Gemma4 {
    hidden: 2816,
    heads: 16,
    kv_heads: [8, 2],
    intermediate: 2112,
    keys_as_values: true,
    experts: true,
    per_layer: None,
};
pub(super) const GEMMA4_E2B: Gemma4 = Gemma4 {
    hidden: 1536,
    heads: 8,
    kv_heads: [1, 1],
    intermediate: 6144,
    keys_as_values: false,
    experts: false,
    per_layer: Some([256, 35]),
};

impl Gemma4 {
    /// A block with a window, one without, and in models with per-layer embeddings one with the keys and values of the first.
    pub(super) fn model(&self) -> (ModelShape, Vec<BlockSpec>) {
        let mut specs = vec![self.spec(0, KeyValues::Projected)];
        specs.push(match self.keys_as_values {
            true => self.spec(1, KeyValues::KeysAsValues),
            false => self.spec(1, KeyValues::Projected),
        });
        if self.per_layer.is_some() {
            specs.push(self.spec(0, KeyValues::OfBlock(0)));
        }
        let model = ModelShape {
            blocks: specs.iter().map(|spec| self.shape(spec)).collect(),
            drafter_fc: None,
            layer_inputs: self.per_layer.map(|[width, blocks]| MatrixShape {
                storage: WeightType::BF16,
                rows: width * blocks,
                cols: self.hidden,
            }),
            head: self.nvfp4(262_144, self.hidden),
        };
        (model, specs)
    }

    fn nvfp4(&self, rows: usize, cols: usize) -> MatrixShape {
        MatrixShape {
            storage: WeightType::Nvfp4,
            rows,
            cols,
        }
    }

    fn spec(&self, kind: usize, key_values: KeyValues) -> BlockSpec {
        let mlp = DenseMlpSpec {
            intermediate_size: self.intermediate,
            gated: true,
            activation: Activation::GeluTanh,
            bias: false,
        };
        BlockSpec {
            norms: NormPlacement {
                pre: true,
                post: true,
            },
            mixer: MixerSpec::Attention(AttentionSpec {
                heads: self.heads,
                kv_heads: self.kv_heads[kind],
                head_dim: [256, 512][kind],
                key_values,
                interleaved: false,
                qk_norm: QkNorm::Heads,
                value_norm: true,
                qkv_bias: false,
                o_bias: false,
                gated: false,
                sinks: false,
                rope: Some(kind),
                window: (kind == 0).then_some(1024),
                scale: 1.0,
                score_cap: None,
            }),
            mlp: match self.experts {
                false => MlpSpec::Dense(mlp),
                true => MlpSpec::DenseAndExperts(
                    mlp,
                    ExpertsSpec {
                        count: 128,
                        per_token: 8,
                        normalized: true,
                        scoring: Scoring::Softmax,
                        router_bias: false,
                        router_scaled: true,
                        names: ExpertNames::Gemma4,
                        expert: DenseMlpSpec {
                            intermediate_size: 704,
                            ..mlp
                        },
                        shared: None,
                    },
                ),
            },
            per_layer: self.per_layer.map(|[width, _]| PerLayerSpec {
                width,
                activation: Activation::GeluTanh,
            }),
            scaled: true,
        }
    }

    fn shape(&self, spec: &BlockSpec) -> BlockShape {
        let attention = spec.attention().unwrap();
        let (q, kv) = (attention.q_width(), attention.kv_width());
        let of_keys = (attention.projected_width() - q) / kv;
        let widths = [q, kv, kv];
        let inputs = widths[..1 + of_keys].iter();
        let dense = DenseShape {
            gate: Some(self.nvfp4(self.intermediate, self.hidden)),
            up: self.nvfp4(self.intermediate, self.hidden),
            down: self.nvfp4(self.hidden, self.intermediate),
        };
        let bf16 = |rows, cols| MatrixShape {
            storage: WeightType::BF16,
            rows,
            cols,
        };
        BlockShape {
            norms: spec.norms,
            mixer: MixerShape::Attention {
                qkv: inputs.map(|&rows| self.nvfp4(rows, self.hidden)).collect(),
                gate: None,
                o: self.nvfp4(self.hidden, q),
                normed: false,
                kind: usize::from(attention.head_dim == 512),
            },
            mlp: match self.experts {
                false => MlpShape::Dense(dense),
                true => MlpShape::DenseAndExperts {
                    dense,
                    routed: RoutedShape {
                        router: vec![bf16(128, self.hidden)],
                        gated: true,
                        routing: routing(128),
                        up: self.nvfp4(704, self.hidden),
                    },
                },
            },
            per_layer: spec
                .per_layer
                .map(|own| [bf16(own.width, self.hidden), bf16(self.hidden, own.width)]),
            scaled: spec.scaled,
        }
    }
}
