//! The plans of several models as a table, and their operations against `order`.

mod gemma4;

use std::fmt::Write as _;

use gemma4::{GEMMA4_26B_A4B, GEMMA4_31B, GEMMA4_E2B};

use super::*;
use crate::cuda::{AdapterDivision, DecodeShape, Routing, WideClusters};
use crate::model::order::{BlockOp, operations};
use crate::model::spec::{
    AttentionSpec, BlockSpec, DeltaProjections, DenseMlpSpec, ExpertNames, ExpertsSpec,
    GatedDeltaSpec, KeyValues, Mamba2Spec, MixerSpec, MlpSpec, NormPlacement, QkNorm, Scoring,
    SharedExpertSpec, SigmoidScoring,
};
use crate::tensor::{DeltaShape, KvType, MambaShape};

const H200: Hardware = Hardware {
    arch: (9, 0),
    multiprocessors: 132,
    shared_limit: 227 << 10,
    cublas: true,
    deterministic: false,
    clusters: WideClusters::unconstrained(132),
};
const GB10: Hardware = Hardware {
    arch: (12, 1),
    multiprocessors: 48,
    shared_limit: 99 << 10,
    cublas: true,
    deterministic: false,
    clusters: WideClusters::unconstrained(0),
};

/// The gated delta nets of Qwen3.5-4B.
const DELTA: DeltaShape = DeltaShape {
    key_heads: 16,
    value_heads: 32,
    key_dim: 128,
    value_dim: 128,
    taps: 4,
};

struct Sizes {
    hidden: usize,
    q: usize,
    kv: usize,
    intermediate: usize,
    vocab: usize,
    /// Whether norms are before each half, and whether they are after it.
    norms: [bool; 2],
    /// Whether all heads of queries are normalized together, and all heads of keys.
    normed: bool,
    /// `None` without a mixture, else whether it has a shared expert.
    experts: Option<bool>,
    /// Whether the first two blocks have gated delta nets, and the last a gate of its heads.
    recurrent: bool,
}

const QWEN3_4B: Sizes = Sizes {
    hidden: 2560,
    q: 4096,
    kv: 1024,
    intermediate: 9728,
    vocab: 151_936,
    norms: [true, false],
    normed: false,
    experts: None,
    recurrent: false,
};
const GEMMA3_4B: Sizes = Sizes {
    hidden: 2560,
    q: 2048,
    kv: 1024,
    intermediate: 10_240,
    vocab: 262_208,
    norms: [true, true],
    normed: false,
    experts: None,
    recurrent: false,
};
const QWEN3_30B_A3B: Sizes = Sizes {
    hidden: 2048,
    q: 4096,
    kv: 512,
    intermediate: 0,
    vocab: 151_936,
    norms: [true, false],
    normed: false,
    experts: Some(false),
    recurrent: false,
};
/// Two blocks with gated delta nets, and one with gated attention.
const QWEN3_5_4B: Sizes = Sizes {
    hidden: 2560,
    q: 4096,
    kv: 1024,
    intermediate: 9216,
    vocab: 248_320,
    norms: [true, false],
    normed: false,
    experts: None,
    recurrent: true,
};
const QWEN2_57B_A14B: Sizes = Sizes {
    hidden: 3584,
    q: 3584,
    kv: 512,
    intermediate: 20_480,
    vocab: 151_936,
    norms: [true, false],
    normed: false,
    experts: Some(true),
    recurrent: false,
};

const MINIMAX_M2: Sizes = Sizes {
    hidden: 3072,
    q: 6144,
    kv: 1024,
    intermediate: 0,
    vocab: 200_064,
    norms: [true, false],
    normed: true,
    experts: Some(false),
    recurrent: false,
};
const OLMO2_7B: Sizes = Sizes {
    hidden: 4096,
    q: 4096,
    kv: 4096,
    intermediate: 11_008,
    vocab: 100_352,
    norms: [false, true],
    normed: true,
    experts: None,
    recurrent: false,
};

/// Eight of so many experts.
const fn routing(experts: usize) -> Routing {
    Routing {
        experts,
        per_token: 8,
        normalized: true,
        sigmoid: None,
    }
}

/// Positions that single tokens see in these plans.
const POSITIONS: usize = 1024;

/// How single tokens attend, in f16 and by heads of 128 elements. Kinds of attention beyond the first are those of Gemma 4: with a window
/// heads are of 256 elements, else of 512.
fn decodes(model: &ModelShape, rows: usize, hardware: &Hardware) -> Vec<DecodePlan> {
    let mut each: Vec<Option<DecodePlan>> = vec![None; 2];
    let attentions = model.blocks.iter().filter_map(|block| match &block.mixer {
        MixerShape::Attention { qkv, kind, .. } => Some((qkv, *kind)),
        _ => None,
    });
    let is_gemma4 = attentions.clone().any(|(_, kind)| kind == 1);
    for (qkv, kind) in attentions {
        let dim = if is_gemma4 { [256, 512][kind] } else { 128 };
        let [unit, ..] = cuda::attention_units(dim, dim, is_gemma4, KvType::F16);
        let kv = qkv.get(1).unwrap_or(&qkv[0]);
        let shape = DecodeShape {
            heads: qkv[0].rows / dim,
            kv_heads: kv.rows / dim,
            dim,
            unit,
            kv: KvType::F16,
        };
        let plan = DecodePlan::choose(hardware, shape, rows, POSITIONS).unwrap();
        each[kind].get_or_insert(plan);
    }
    each.into_iter().flatten().collect()
}

/// The plan of a model's own blocks. Prompts have no single tokens beside them.
fn planned(
    model: &ModelShape,
    rows: usize,
    kind: Rows,
    adapts: Adapts,
    hardware: &Hardware,
) -> Vec<PlannedKernel> {
    let decodes = match kind {
        Rows::Ragged => Vec::new(),
        Rows::Step | Rows::Verification => decodes(model, rows, hardware),
    };
    let own = model.own_blocks();
    plan(model, own, rows, kind, adapts, &decodes, hardware).unwrap()
}

/// Three blocks and the head, with weights of this type.
fn model(s: &Sizes, storage: WeightType) -> ModelShape {
    let shape = |rows, cols| MatrixShape {
        storage,
        rows,
        cols,
    };
    let mlp = DenseShape {
        gate: Some(shape(s.intermediate, s.hidden)),
        up: shape(s.intermediate, s.hidden),
        down: shape(s.hidden, s.intermediate),
    };
    let block = BlockShape {
        norms: NormPlacement {
            pre: s.norms[0],
            post: s.norms[1],
        },
        mixer: MixerShape::Attention {
            qkv: [s.q, s.kv, s.kv].map(|rows| shape(rows, s.hidden)).into(),
            gate: None,
            o: shape(s.hidden, s.q),
            normed: s.normed,
            kind: 0,
        },
        mlp: match s.experts {
            None => MlpShape::Dense(mlp),
            Some(shared) => MlpShape::Experts {
                routed: RoutedShape {
                    // The gate of the shared expert is beside the router.
                    router: [128]
                        .iter()
                        .chain([1].iter().filter(|_| shared))
                        .map(|&rows| MatrixShape {
                            storage: WeightType::F32,
                            rows,
                            cols: s.hidden,
                        })
                        .collect(),
                    gated: true,
                    routing: routing(128),
                    up: shape(768, s.hidden),
                },
                shared: shared.then_some(mlp),
            },
        },
        per_layer: None,
        scaled: false,
    };
    let mut blocks = vec![block; 3];
    if s.recurrent {
        let (values, int8) = (s.q, WeightType::Int8);
        let of = |rows, cols, storage| MatrixShape {
            storage,
            rows,
            cols,
        };
        for block in &mut blocks[..2] {
            block.mixer = MixerShape::GatedDelta {
                heads: DELTA,
                inputs: [2 * values, values].map(|rows| of(rows, s.hidden, int8)),
                gates: [of(32, s.hidden, WeightType::BF16); 2],
                out: of(s.hidden, values, int8),
            };
        }
        if let MixerShape::Attention { gate, .. } = &mut blocks[2].mixer {
            *gate = Some(shape(s.q, s.hidden));
        }
    }
    ModelShape {
        blocks,
        layer_inputs: None,
        drafter_fc: None,
        head: shape(s.vocab, s.hidden),
    }
}

/// The operations that a step of a plan completes, each with its block. A fused norm counts where its statistics are computed, and the
/// experts of a mixture where they are summed.
fn completed(step: &PlannedKernel, blocks: &[BlockShape]) -> Vec<(usize, BlockOp)> {
    let block = step.block;
    let is_mixture =
        |half: Half| half == Half::Mlp && matches!(blocks[block].mlp, MlpShape::Experts { .. });
    let enter = |norm: Norm| match norm {
        Norm::Mixer(i) => vec![(i, BlockOp::Enter(Half::Mixer))],
        Norm::Mlp(i) => vec![(i, BlockOp::Enter(Half::Mlp))],
        Norm::Experts(i) => vec![(i, BlockOp::EnterExperts)],
        // Parts of operations that a later kernel completes.
        Norm::Router(_) | Norm::PerLayer(_) | Norm::Head => Vec::new(),
    };
    let next = |next: &Option<(Norm, Layout)>| next.map_or(Vec::new(), |(norm, _)| enter(norm));
    // The prologue of a GEMM leaves the previous half, and enters its own.
    let prologue = |input: &Normed| match (input.applied, input.norm) {
        (Applied::Before | Applied::Epilogue, _) => Vec::new(),
        (Applied::OnLoad, norm) => enter(norm),
        (Applied::Prologue, norm) => {
            let (before, half) = match norm {
                Norm::Mlp(i) => (i, Half::Mixer),
                Norm::Mixer(i) => (i - 1, Half::Mlp),
                Norm::Head => (blocks.len() - 1, Half::Mlp),
                other => panic!("{other:?} in a prologue"),
            };
            [vec![(before, BlockOp::Leave(half))], enter(norm)].concat()
        }
    };
    let own = |ops: &[BlockOp]| ops.iter().map(|&op| (block, op)).collect::<Vec<_>>();
    let factor = |scales: bool| own(&[BlockOp::ScaleStream][..usize::from(scales)]);
    match &step.kernel {
        // Not an operation of a block.
        Kernel::LayerInputs { .. } => Vec::new(),
        Kernel::Normalize { norm, .. } | Kernel::Convert { norm, .. } => enter(*norm),
        Kernel::Qkv { input, .. } => [prologue(input), own(&[BlockOp::Qkv])].concat(),
        // A part of an operation that a later kernel completes.
        Kernel::NormProjections => Vec::new(),
        Kernel::Decode { .. } | Kernel::DecodeStored { .. } => {
            own(&[BlockOp::Heads, BlockOp::Attend])
        }
        // Keys and values of heads that the next kernel completes.
        Kernel::StoreRows { .. } => Vec::new(),
        // Parts of operations that the next kernel completes.
        Kernel::HeadGate { .. } | Kernel::DeltaInputs { gates: false, .. } => Vec::new(),
        Kernel::DeltaInputs { gates: true, .. } => own(&[BlockOp::DeltaInputs]),
        Kernel::MambaInputs { .. } => own(&[BlockOp::MambaInputs]),
        Kernel::MambaConv => own(&[BlockOp::MambaConvolve]),
        Kernel::MambaScan => own(&[BlockOp::MambaScan]),
        Kernel::MambaNorm { .. } => own(&[BlockOp::MambaNorm]),
        Kernel::GateHeads { .. } => own(&[BlockOp::GateHeads]),
        Kernel::DeltaGates { .. } => own(&[BlockOp::DeltaInputs]),
        Kernel::DeltaConv { .. } => own(&[BlockOp::Convolve]),
        Kernel::DeltaRule { .. } => own(&[BlockOp::DeltaRule]),
        Kernel::DeltaNorm { .. } => own(&[BlockOp::DeltaNorm]),
        Kernel::DeltaStep { .. } => {
            own(&[BlockOp::Convolve, BlockOp::DeltaRule, BlockOp::DeltaNorm])
        }
        Kernel::StoreKv => own(&[BlockOp::Heads]),
        Kernel::Prefill { .. } | Kernel::AttendRows { .. } => own(&[BlockOp::Attend]),
        Kernel::GateUp { .. }
        | Kernel::AdaptedGateUp { .. }
        | Kernel::Activate
        | Kernel::ActivateAdapted { .. }
        | Kernel::Up { .. }
        | Kernel::Square
            if is_mixture(Half::Mlp) =>
        {
            Vec::new()
        }
        Kernel::AdaptedGateUp { input, .. } => [prologue(input), own(&[BlockOp::GateUp])].concat(),
        Kernel::ActivateAdapted { .. } => own(&[BlockOp::Activate]),
        // Beside the projections.
        Kernel::Shrink { .. } | Kernel::Expand { .. } => Vec::new(),
        Kernel::ExpandNorm { norm, .. } => enter(*norm),
        Kernel::GateUp { input, fused, .. } => {
            let ops = [BlockOp::GateUp, BlockOp::Activate];
            [prologue(input), own(&ops[..1 + usize::from(*fused)])].concat()
        }
        Kernel::Activate | Kernel::Square => own(&[BlockOp::Activate]),
        Kernel::Up { .. } => own(&[BlockOp::GateUp]),
        Kernel::Router { .. } => Vec::new(),
        Kernel::Route { .. } => own(&[BlockOp::Route]),
        Kernel::ExpertsGateUp { .. } | Kernel::ExpertsDown { .. } => Vec::new(),
        Kernel::SumExperts { next: norm } => {
            let ops = [BlockOp::Experts, BlockOp::Leave(Half::Mlp)];
            [own(&ops), next(norm)].concat()
        }
        Kernel::Project { half, .. } if is_mixture(*half) => Vec::new(),
        Kernel::Project { half, then, .. } => {
            let ops = [BlockOp::Project(*half), BlockOp::Leave(*half)];
            match then {
                Then::Add => own(&ops),
                Then::AddAndNorm(norm) => [own(&ops), enter(*norm)].concat(),
                Then::Store | Then::StoreRow => own(&ops[..1]),
            }
        }
        Kernel::SumBeside { scales, next: norm } => {
            let ops = [
                BlockOp::Experts,
                BlockOp::LeaveExperts,
                BlockOp::Leave(Half::Mlp),
            ];
            [own(&ops), factor(*scales), next(norm)].concat()
        }
        Kernel::PerLayerGate { .. } => Vec::new(),
        Kernel::PerLayerActivate => own(&[BlockOp::PerLayerGate]),
        Kernel::PerLayerProject { .. } => own(&[BlockOp::PerLayerProject]),
        Kernel::PostNorm {
            part,
            scales,
            next: follows,
        } => {
            let follows = follows.map_or(Vec::new(), |input| match input {
                NextInput::Normalized(norm, _) | NextInput::Stream(norm, _) => enter(norm),
            });
            let leave = match part {
                Part::Half(half) => BlockOp::Leave(*half),
                Part::PerLayer => BlockOp::PerLayerLeave,
            };
            [own(&[leave]), factor(*scales), follows].concat()
        }
        Kernel::Head { input, .. } => prologue(input),
        // Beside the blocks.
        Kernel::Hidden | Kernel::DrafterInputs | Kernel::ProjectDrafterInputs { .. } => Vec::new(),
    }
}

/// Attention by one head.
fn attention(head_dim: usize) -> AttentionSpec {
    AttentionSpec {
        heads: 1,
        kv_heads: 1,
        head_dim,
        key_values: KeyValues::Projected,
        value_norm: false,
        qk_norm: QkNorm::Heads,
        qkv_bias: false,
        o_bias: false,
        gated: false,
        sinks: false,
        interleaved: false,
        rope: Some(0),
        window: None,
        scale: 1.0,
        score_cap: None,
    }
}

/// The specs of the three blocks.
fn specs(sizes: &Sizes) -> Vec<BlockSpec> {
    let mlp = DenseMlpSpec {
        intermediate_size: sizes.intermediate,
        gated: true,
        activation: Activation::Silu,
        bias: false,
    };
    let spec = BlockSpec {
        norms: NormPlacement {
            pre: sizes.norms[0],
            post: sizes.norms[1],
        },
        mixer: MixerSpec::Attention(AttentionSpec {
            gated: sizes.recurrent,
            ..attention(sizes.q)
        }),
        mlp: match sizes.experts {
            None => MlpSpec::Dense(mlp),
            Some(shared) => MlpSpec::Experts(ExpertsSpec {
                count: 8,
                per_token: 2,
                normalized: true,
                scoring: Scoring::Softmax,
                router_bias: false,
                router_scaled: false,
                names: ExpertNames::Qwen,
                expert: mlp,
                shared: shared.then_some(SharedExpertSpec { mlp, gated: true }),
            }),
        },
        per_layer: None,
        scaled: false,
    };
    let recurrent = BlockSpec {
        mixer: MixerSpec::GatedDelta(GatedDeltaSpec {
            shape: DELTA,
            projections: DeltaProjections::ByRole,
        }),
        ..spec.clone()
    };
    let first = if sizes.recurrent { &recurrent } else { &spec };
    vec![first.clone(), first.clone(), spec]
}

/// A model of Nemotron-H: Mamba-2, a mixture, attention, a mixture, attention, an MLP and attention, with the sizes of Nemotron 3 Nano.
fn nemotron() -> (ModelShape, Vec<BlockSpec>) {
    let of = |storage, rows, cols| MatrixShape {
        storage,
        rows,
        cols,
    };
    let (hidden, width, channels) = (2688, 4096, 6144);
    let (nvfp4, int8) = (WeightType::Nvfp4, WeightType::Int8);
    let mlp = |wide| DenseShape {
        gate: None,
        up: of(nvfp4, wide, hidden),
        down: of(nvfp4, hidden, wide),
    };
    let mamba = MixerShape::Mamba2 {
        inputs: [width, channels, 64].map(|rows| of(int8, rows, hidden)),
        out: of(int8, hidden, width),
    };
    let attention = MixerShape::Attention {
        qkv: [4096, 256, 256].map(|rows| of(nvfp4, rows, hidden)).into(),
        gate: None,
        o: of(nvfp4, hidden, 4096),
        normed: false,
        kind: 0,
    };
    let experts = MlpShape::Experts {
        routed: RoutedShape {
            router: vec![of(WeightType::F32, 128, hidden)],
            gated: false,
            routing: routing(128),
            up: of(nvfp4, 1856, hidden),
        },
        shared: Some(mlp(3712)),
    };
    let halves = [
        (mamba, MlpShape::None),
        (MixerShape::None, experts.clone()),
        (attention.clone(), MlpShape::None),
        (MixerShape::None, experts),
        (attention.clone(), MlpShape::None),
        (MixerShape::None, MlpShape::Dense(mlp(3712))),
        (attention, MlpShape::None),
    ];
    let norms = NormPlacement {
        pre: true,
        post: false,
    };
    let shape = |(mixer, mlp)| BlockShape {
        norms,
        mixer,
        mlp,
        per_layer: None,
        scaled: false,
    };
    let blocks: Vec<BlockShape> = halves.into_iter().map(shape).collect();
    let spec = |block: &BlockShape| nemotron_spec(norms, block);
    let specs = blocks.iter().map(spec).collect();
    let model = ModelShape {
        blocks,
        layer_inputs: None,
        drafter_fc: None,
        head: of(nvfp4, 131_072, hidden),
    };
    (model, specs)
}

/// The spec of a block of [`nemotron`].
fn nemotron_spec(norms: NormPlacement, block: &BlockShape) -> BlockSpec {
    let mlp = DenseMlpSpec {
        intermediate_size: 3712,
        gated: false,
        activation: Activation::ReluSquared,
        bias: false,
    };
    BlockSpec {
        norms,
        mixer: match block.mixer {
            MixerShape::Mamba2 { .. } => MixerSpec::Mamba2(Mamba2Spec {
                shape: MambaShape {
                    heads: 64,
                    head_dim: 64,
                    groups: 8,
                    state_size: 128,
                    taps: 4,
                },
                bias: false,
                convolution_bias: true,
                step_limits: [0.0, f32::INFINITY],
            }),
            MixerShape::None => MixerSpec::None,
            _ => MixerSpec::Attention(AttentionSpec {
                rope: None,
                ..attention(4096)
            }),
        },
        mlp: match block.mlp {
            MlpShape::Dense(_) => MlpSpec::Dense(mlp),
            MlpShape::None => MlpSpec::None,
            MlpShape::DenseAndExperts { .. } => panic!("{block:?}"),
            MlpShape::Experts { .. } => MlpSpec::Experts(ExpertsSpec {
                count: 128,
                per_token: 6,
                normalized: true,
                scoring: Scoring::Sigmoid(SigmoidScoring {
                    groups: 1,
                    top_groups: 1,
                    scale: 2.5,
                }),
                router_bias: false,
                router_scaled: false,
                names: ExpertNames::Qwen,
                expert: DenseMlpSpec {
                    intermediate_size: 1856,
                    ..mlp
                },
                shared: Some(SharedExpertSpec { mlp, gated: false }),
            }),
        },
        per_layer: None,
        scaled: false,
    }
}

/// The operations of all blocks, in the order of `order`.
fn expected(specs: &[BlockSpec]) -> Vec<(usize, BlockOp)> {
    let blocks = specs.iter().enumerate();
    let of_block = |(block, spec)| operations(spec).map(move |op| (block, op));
    blocks.flat_map(of_block).collect()
}

/// The plan as lines; a block like the previous one is named only once.
fn printed(steps: &[PlannedKernel]) -> String {
    let (mut text, mut last) = (String::new(), String::new());
    for of_block in steps.chunk_by(|a, b| a.block == b.block) {
        let lines: String = of_block
            .iter()
            .map(|step| format!("    {}\n", step.kernel))
            .collect();
        let index = of_block[0].block;
        match lines == last {
            true => writeln!(text, "  block {index}: as the one before").unwrap(),
            false => write!(text, "  block {index}:\n{lines}").unwrap(),
        }
        last = lines;
    }
    text
}

/// Plans of drafters, whose block is that of the last layer. A guess runs the operations of the block.
fn of_drafters() -> String {
    let mut table = String::new();
    for (name, sizes) in [
        ("Qwen3.5-4B", &QWEN3_5_4B),
        ("Qwen2-57B-A14B", &QWEN2_57B_A14B),
    ] {
        let (mut model, mut specs) = (model(sizes, WeightType::Nvfp4), specs(sizes));
        let (block, spec) = (model.blocks[2].clone(), specs.remove(2));
        model.blocks.push(block);
        model.drafter_fc = Some(MatrixShape {
            storage: WeightType::BF16,
            rows: sizes.hidden,
            cols: 2 * sizes.hidden,
        });
        for rows in [1, 4, 64] {
            writeln!(table, "{name}, NVFP4, H200, guesses of {rows}").unwrap();
            let decodes = decodes(&model, rows, &H200);
            let steps = drafter::draft(&model, rows, &decodes, &H200).unwrap();
            table.push_str(&printed(&steps));
            let done = steps.iter().flat_map(|step| completed(step, &model.blocks));
            let done: Vec<_> = done.map(|(block, op)| (block - 3, op)).collect();
            assert_eq!(
                done,
                expected(std::slice::from_ref(&spec)),
                "{name}, {rows}"
            );
        }
        for (rows, followed) in [
            (1, drafter::Followed::Single),
            (8, drafter::Followed::Single),
            (4096, drafter::Followed::Consecutive),
        ] {
            writeln!(table, "{name}, NVFP4, H200, {rows} rows followed").unwrap();
            let steps = drafter::follow(&model, rows, followed, &H200).unwrap();
            table.push_str(&printed(&steps));
            check_projection_norms(&steps, &model.blocks);
        }
    }
    table
}

/// Everything that adapters may change.
const ALL_PARTS: Adapts = Adapts {
    mixer_inputs: true,
    mixer_output: true,
    mlp_inputs: true,
    mlp_output: true,
};

/// Plans of passes with adapters, which run the same operations.
fn of_adapters() -> String {
    let mut table = String::new();
    for (name, (model, specs), hardware) in models() {
        for (rows, kind) in [(1, Rows::Step), (64, Rows::Step), (40, Rows::Ragged)] {
            for (what, adapts) in [
                ("everything", ALL_PARTS),
                (
                    "the mixer's inputs",
                    Adapts {
                        mixer_inputs: true,
                        ..Adapts::NOTHING
                    },
                ),
            ] {
                let steps = planned(&model, rows, kind, adapts, hardware);
                let completed = steps.iter().flat_map(|step| completed(step, &model.blocks));
                let completed: Vec<_> = completed.collect();
                assert_eq!(completed, expected(&specs), "{name}, {rows} rows, {what}");
                check_adapted(&steps);
                check_projection_norms(&steps, &model.blocks);
                if name == "Qwen3-4B, NVFP4, H200" && rows != 40 {
                    let adapts = format!("adapters of {what}");
                    writeln!(table, "{name}, a step of {rows}, {adapts}").unwrap();
                    table.push_str(&printed(&steps));
                }
            }
        }
    }
    for (rows, tiles) in [(1, 1), (4, 2), (8, 1), (16, 4), (64, 4)] {
        let division = AdapterDivision { tiles, rank: 16 };
        for (name, (model, specs), hardware) in models() {
            let own = model.own_blocks();
            let which = (ALL_PARTS, division);
            let decodes = decodes(&model, rows, hardware);
            let steps =
                adapted::of_rows(&model, own, rows, Rows::Step, which, &decodes, hardware).unwrap();
            let Some(steps) = steps else { continue };
            let completed = steps.iter().flat_map(|step| completed(step, &model.blocks));
            let completed: Vec<_> = completed.collect();
            assert_eq!(completed, expected(&specs), "{name}, adapted rows");
            writeln!(table, "{name}, a step of {rows} whose GEMMs apply adapters").unwrap();
            table.push_str(&printed(&steps));
        }
    }
    table
}

/// Norms over all heads follow the projections and what adapters add to them, before attention.
fn check_projection_norms(steps: &[PlannedKernel], blocks: &[BlockShape]) {
    let attends = |step: &PlannedKernel| {
        matches!(
            step.kernel,
            Kernel::Decode { .. } | Kernel::StoreRows { .. } | Kernel::StoreKv
        )
    };
    let is_norm = |step: &PlannedKernel| step.kernel == Kernel::NormProjections;
    let mut expected = 0;
    for (i, step) in steps.iter().enumerate() {
        if !matches!(step.kernel, Kernel::Qkv { .. }) {
            continue;
        }
        let MixerShape::Attention { normed, .. } = blocks[step.block].mixer else {
            panic!("{step:?} in a block without attention");
        };
        let rest = &steps[i + 1..];
        let before = &rest[..rest.iter().position(attends).unwrap()];
        let norm = before.iter().position(is_norm);
        assert_eq!(norm.is_some(), normed, "{before:?}");
        let part = AdaptedPart::MixerInputs;
        let added = Kernel::Expand { part, added: false };
        let added = before.iter().position(|step| step.kernel == added);
        assert!(!normed || added < norm, "{before:?}");
        expected += usize::from(normed);
    }
    let norms = steps.iter().filter(|step| is_norm(step)).count();
    assert_eq!(norms, expected, "{steps:?}");
}

/// A factors follow the GEMM of their part, beside which they run, and B factors follow them.
fn check_adapted(steps: &[PlannedKernel]) {
    for (i, step) in steps.iter().enumerate() {
        if let Kernel::Shrink { .. } = step.kernel {
            assert!(gemm(&steps[i - 1].kernel).is_some(), "{steps:?}");
            let next = steps[i + 1].kernel;
            assert!(
                matches!(
                    next,
                    Kernel::Expand { .. }
                        | Kernel::ExpandNorm { .. }
                        | Kernel::ActivateAdapted { .. }
                ),
                "{next:?}"
            );
        }
    }
}

/// A model whose plans are tested: its name, its shapes and specs, and a device.
type Described = (
    &'static str,
    (ModelShape, Vec<BlockSpec>),
    &'static Hardware,
);

fn models() -> Vec<Described> {
    let mut models = Vec::new();
    for (name, sizes, storage, hardware) in [
        ("Qwen3-4B, NVFP4, H200", &QWEN3_4B, WeightType::Nvfp4, &H200),
        (
            "Gemma3-4B, NVFP4, H200",
            &GEMMA3_4B,
            WeightType::Nvfp4,
            &H200,
        ),
        ("Qwen3-4B, bf16, H200", &QWEN3_4B, WeightType::BF16, &H200),
        ("Qwen3-4B, NVFP4, GB10", &QWEN3_4B, WeightType::Nvfp4, &GB10),
        (
            "Qwen3-30B-A3B, NVFP4, H200",
            &QWEN3_30B_A3B,
            WeightType::Nvfp4,
            &H200,
        ),
        (
            "Qwen3.5-4B, NVFP4, H200",
            &QWEN3_5_4B,
            WeightType::Nvfp4,
            &H200,
        ),
        (
            "Qwen2-57B-A14B, NVFP4, H200",
            &QWEN2_57B_A14B,
            WeightType::Nvfp4,
            &H200,
        ),
        (
            "MiniMax-M2, NVFP4, H200",
            &MINIMAX_M2,
            WeightType::Nvfp4,
            &H200,
        ),
        (
            "OLMo 2 7B, NVFP4, H200",
            &OLMO2_7B,
            WeightType::Nvfp4,
            &H200,
        ),
    ] {
        models.push((name, (model(sizes, storage), specs(sizes)), hardware));
    }
    models.push(("Nemotron 3 Nano, NVFP4 and int8, H200", nemotron(), &H200));
    models.push(("Gemma 4 31B, NVFP4, H200", GEMMA4_31B.model(), &H200));
    models.push((
        "Gemma 4 26B-A4B, NVFP4, H200",
        GEMMA4_26B_A4B.model(),
        &H200,
    ));
    models.push(("Gemma 4 E2B, NVFP4, H200", GEMMA4_E2B.model(), &H200));
    models.push(("Gemma 4 E2B, NVFP4, GB10", GEMMA4_E2B.model(), &GB10));
    models
}

/// Every kind of plan, as recorded in `plan.txt` beside this file, which shows every change of kernels or of their choice. Each plan
/// runs the operations of blocks in the order of `order`.
#[test]
fn plans_are_as_written_down() {
    let mut table = String::new();
    for (name, (model, specs), hardware) in models() {
        for (rows, kind) in [
            (1, Rows::Step),
            (8, Rows::Step),
            (16, Rows::Step),
            (64, Rows::Step),
            (200, Rows::Step),
            (4, Rows::Verification),
            (1, Rows::Ragged),
            (40, Rows::Ragged),
            (4096, Rows::Ragged),
        ] {
            // Rows of Gemma 4 cannot be stored before they attend.
            if kind == Rows::Verification && name.starts_with("Gemma 4") {
                continue;
            }
            let steps = planned(&model, rows, kind, Adapts::NOTHING, hardware);
            let kind = match kind {
                Rows::Step => "a step",
                Rows::Verification => "a verification",
                Rows::Ragged => "a prompt",
            };
            writeln!(table, "{name}, {kind} of {rows}").unwrap();
            table.push_str(&printed(&steps));
            let completed = steps.iter().flat_map(|step| completed(step, &model.blocks));
            let completed: Vec<_> = completed.collect();
            assert_eq!(completed, expected(&specs), "{name}, {kind} of {rows}");
            check_projection_norms(&steps, &model.blocks);
        }
    }
    table.push_str(&of_drafters());
    table.push_str(&of_adapters());
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/model/fused/plan.txt");
    let expected = std::fs::read_to_string(path).unwrap_or_default();
    if table != expected {
        let got = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("target/plan.txt");
        std::fs::write(&got, &table).unwrap();
        panic!("plans have changed: compare {} with {path}", got.display());
    }
}

/// The kernel that sums experts stores no rows for a block without a norm before its mixer.
#[test]
fn rows_after_experts_are_converted_apart() {
    let bare = Sizes {
        norms: [false, true],
        intermediate: 6144,
        experts: None,
        ..QWEN3_30B_A3B
    };
    let mut mixed = model(&QWEN3_30B_A3B, WeightType::Nvfp4);
    mixed.blocks[1] = model(&bare, WeightType::Nvfp4).blocks.remove(1);
    let steps = planned(&mixed, 4, Rows::Step, Adapts::NOTHING, &H200);
    let kernels: Vec<Kernel> = steps.iter().map(|step| step.kernel).collect();
    let has = |wanted: fn(&[Kernel]) -> bool| kernels.windows(2).any(wanted);
    assert!(has(|pair| matches!(
        pair,
        [
            Kernel::SumExperts { next: None },
            Kernel::Convert {
                norm: Norm::Mixer(1),
                ..
            }
        ]
    )));
    assert!(has(|pair| matches!(
        pair,
        [
            Kernel::PostNorm {
                next: Some(NextInput::Stream(Norm::Mlp(1), _)),
                ..
            },
            Kernel::GateUp { .. }
        ]
    )));
    assert!(has(|pair| matches!(
        pair,
        [
            Kernel::PostNorm {
                next: Some(NextInput::Normalized(Norm::Mixer(2), _)),
                ..
            },
            Kernel::Qkv { .. }
        ]
    )));
}

/// The GEMM of a kernel, if it is one.
fn gemm(kernel: &Kernel) -> Option<&GemmPlan> {
    match kernel {
        Kernel::LayerInputs { gemm }
        | Kernel::Qkv { gemm, .. }
        | Kernel::HeadGate { gemm, .. }
        | Kernel::DeltaInputs { gemm, .. }
        | Kernel::DeltaGates { gemm, .. }
        | Kernel::MambaInputs { gemm, .. }
        | Kernel::GateUp { gemm, .. }
        | Kernel::AdaptedGateUp { gemm, .. }
        | Kernel::Up { gemm, .. }
        | Kernel::Router { gemm }
        | Kernel::Project { gemm, .. }
        | Kernel::PerLayerGate { gemm, .. }
        | Kernel::PerLayerProject { gemm }
        | Kernel::Head { gemm, .. }
        | Kernel::ProjectDrafterInputs { gemm } => Some(gemm),
        _ => None,
    }
}

/// A kernel, with its GEMM as what decides the order of sums, after the norm that it applies with the bits of a separate kernel.
fn sums(step: &PlannedKernel) -> Vec<String> {
    let kernel = format!("{:?}", step.kernel);
    // Kernels of attention differ by how they find their rows, and layouts change no sum.
    let name = match &step.kernel {
        Kernel::Decode { .. } | Kernel::DecodeStored { .. } | Kernel::AttendRows { .. } => {
            "attention"
        }
        // Gate and up with their activation in a separate kernel.
        Kernel::GateUp { .. } | Kernel::AdaptedGateUp { .. } => "GateUp",
        Kernel::ActivateAdapted { .. } => "Activate",
        _ => kernel.split([' ', '{']).next().unwrap(),
    };
    // In f32, as in registers.
    let fused = matches!(
        step.kernel,
        Kernel::GateUp { fused: true, .. } | Kernel::AdaptedGateUp { .. }
    );
    let sums = gemm(&step.kernel).map(GemmPlan::sums);
    let normalizes = match &step.kernel {
        Kernel::Qkv { input, .. } | Kernel::GateUp { input, .. } => {
            input.applied == Applied::OnLoad
        }
        _ => false,
    };
    let norm = normalizes.then(|| format!("{} Normalize false None", step.block));
    let own = format!("{} {name} {fused} {sums:?}", step.block);
    norm.into_iter().chain([own]).collect()
}

/// The kernels around a product that runs beside its predecessor: that makes nothing that the product reads, and adapters' kernels, some of
/// which write before they wait, are not near.
#[test]
fn products_run_beside_kernels_that_they_do_not_need() {
    let mut found = 0;
    for (name, (model, _), hardware) in models() {
        for (kind, adapts) in [Rows::Step, Rows::Verification, Rows::Ragged]
            .into_iter()
            .flat_map(|kind| [Adapts::NOTHING, ALL_PARTS].map(|adapts| (kind, adapts)))
        {
            for rows in [1, 4, 8, 16] {
                let steps = planned(&model, rows, kind, adapts, hardware);
                for pair in steps.windows(2) {
                    let Some(true) = gemm(&pair[1].kernel).map(GemmPlan::runs_beside) else {
                        continue;
                    };
                    found += 1;
                    let is_right = matches!(
                        (&pair[0].kernel, &pair[1].kernel),
                        (Kernel::Qkv { .. }, Kernel::HeadGate { .. })
                            | (
                                Kernel::Router { .. },
                                Kernel::GateUp { .. } | Kernel::Up { .. }
                            )
                            | (
                                Kernel::Route { .. },
                                Kernel::Project {
                                    half: Half::Mlp,
                                    ..
                                }
                            )
                    );
                    assert!(
                        is_right,
                        "{name}, {rows} rows, {adapts:?}: {} before {}",
                        pair[0].kernel, pair[1].kernel
                    );
                }
            }
        }
    }
    assert!(found > 0);
}

/// Deterministic steps of few rows stream weights, and the first few normalize on load.
#[test]
fn deterministic_steps_of_few_rows_are_by_the_skinny_gemm() {
    let (model, hardware) = (model(&QWEN3_4B, WeightType::Nvfp4), H200.deterministic());
    for (rows, gemms, norms) in [
        (1, "skinny_ranges_", 0),
        (4, "skinny_ranges_", 0),
        (8, "skinny_ranges_", 7),
        (16, "skinny_ranges_", 7),
        (64, "linear_wide_", 7),
    ] {
        let steps = planned(&model, rows, Rows::Step, Adapts::NOTHING, &hardware);
        let is_norm = |step: &&PlannedKernel| matches!(step.kernel, Kernel::Normalize { .. });
        assert_eq!(steps.iter().filter(is_norm).count(), norms, "{rows} rows");
        for gemm in steps.iter().filter_map(|step| gemm(&step.kernel)) {
            let by = gemm.to_string();
            assert!(by.starts_with(gemms), "{rows} rows: {by}");
        }
    }
}

/// A deterministic plan takes the sums of a row in the same order, however many rows there are and in whichever kind of pass.
#[test]
fn deterministic_plans_add_in_one_order() {
    for (name, (model, _), hardware) in models() {
        let hardware = hardware.deterministic();
        let mut first: Option<Vec<String>> = None;
        for kind in [Rows::Step, Rows::Verification, Rows::Ragged] {
            let rows = [1, 2, 4, 5, 8, 9, 16, 17, 40, 64, 128, 129, 256, 1000, 4096];
            let adapts = [Adapts::NOTHING, ALL_PARTS];
            for (rows, adapts) in rows.into_iter().flat_map(|m| adapts.map(|a| (m, a))) {
                let steps = planned(&model, rows, kind, adapts, &hardware);
                let stores = |step: &&PlannedKernel| {
                    matches!(step.kernel, Kernel::StoreRows { .. } | Kernel::StoreKv)
                };
                // Logits of prompts are computed apart.
                let is_head = |step: &PlannedKernel| {
                    let before_head = matches!(
                        step.kernel,
                        Kernel::Normalize {
                            norm: Norm::Head,
                            ..
                        }
                    );
                    before_head || matches!(step.kernel, Kernel::Head { .. })
                };
                // Adapters change sums of their own rows alone.
                let is_adapted = |step: &PlannedKernel| {
                    matches!(
                        step.kernel,
                        Kernel::Shrink { .. }
                            | Kernel::Expand { .. }
                            | Kernel::ActivateAdapted { is_f16: false, .. }
                    )
                };
                // Gate and up of adapted rows alone, after those of all.
                let is_again = |i: usize| {
                    let fused = |step: &PlannedKernel| {
                        matches!(step.kernel, Kernel::GateUp { fused: true, .. })
                    };
                    let is_apart = matches!(steps[i].kernel, Kernel::AdaptedGateUp { .. });
                    is_apart && fused(&steps[i - 1])
                };
                let kept = (0..steps.len()).filter(|&i| !is_again(i));
                let steps = kept
                    .map(|i| &steps[i])
                    .filter(|step| !stores(step) && !is_head(step) && !is_adapted(step));
                let got: Vec<String> = steps.flat_map(sums).collect();
                let want = first.get_or_insert_with(|| got.clone());
                assert_eq!(&got, want, "{name}, {rows} rows, {kind:?}, {adapts:?}");
            }
        }
        let heads = [1, 8, 17, 64].map(|rows| {
            let layout = head_layout(model.head, rows, &hardware);
            let input = Normed {
                norm: Norm::Head,
                layout,
                applied: Applied::Before,
            };
            head(model.head, &input, rows, &hardware).unwrap().sums()
        });
        assert!(
            heads.iter().all(|head| *head == heads[0]),
            "{name}: {heads:?}"
        );
    }
}
