//! Where fused passes apply adapters: the places of a model's projections in the tables of its adapters on a GPU.

use std::collections::HashMap;
use std::sync::Arc;

use super::factors::Factors;
use crate::base::Result;
use crate::base::error::err;
use crate::cuda::{AdapterFactors, AdapterTable, Gpu};
use crate::model::weights::{Block, Mixer, Projection, Weights};

/// Projections of a block that are adapted together, because they share an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) enum AdaptedPart {
    /// Queries, keys and values, or the projections that begin a recurrent layer.
    MixerInputs,
    /// The inputs of a gated delta net together with its gates, which one GEMM computes.
    DeltaInputsAndGates,
    /// The gates of a gated delta net.
    DeltaGates,
    /// The gate of attention.
    HeadGate,
    /// The projection that ends the mixer.
    MixerOutput,
    /// Gate and up, or up alone in an MLP without a gate.
    MlpInputs,
    /// The projection that ends the MLP.
    MlpOutput,
}

/// Places of a block in a table.
pub(in crate::model) const PLACES: usize = 9;
/// Places of its projections: the inputs of a mixer, the gate of attention, the output of the mixer, and gate, up and down.
const MIXER: usize = 0;
const DELTA_GATES: usize = 2;
const HEAD_GATE: usize = 4;
const MIXER_OUTPUT: usize = 5;
const GATE: usize = 6;
const UP: usize = 7;
const DOWN: usize = 8;

impl AdaptedPart {
    const ALL: [AdaptedPart; 7] = [
        AdaptedPart::MixerInputs,
        AdaptedPart::DeltaInputsAndGates,
        AdaptedPart::DeltaGates,
        AdaptedPart::HeadGate,
        AdaptedPart::MixerOutput,
        AdaptedPart::MlpInputs,
        AdaptedPart::MlpOutput,
    ];

    /// Its projections in a block, in the order of their outputs; none in a block without it.
    pub(in crate::model) fn projections(self, block: &Block) -> Vec<&Projection> {
        let mlp = block.mlp.of_all_rows();
        match (self, &block.mixer) {
            (AdaptedPart::MixerInputs, Mixer::Attention(attention)) => attention.inputs().collect(),
            (AdaptedPart::MixerInputs, Mixer::GatedDelta(delta)) => vec![&delta.qkv, &delta.z],
            (AdaptedPart::MixerInputs, Mixer::Mamba2(mamba)) => {
                vec![&mamba.z, &mamba.xbc, &mamba.dt]
            }
            (AdaptedPart::DeltaInputsAndGates, Mixer::GatedDelta(delta)) => {
                vec![&delta.qkv, &delta.z, &delta.b, &delta.a]
            }
            (AdaptedPart::DeltaGates, Mixer::GatedDelta(delta)) => vec![&delta.b, &delta.a],
            (AdaptedPart::HeadGate, Mixer::Attention(attention)) => attention.gate.iter().collect(),
            (AdaptedPart::MixerOutput, mixer) => mixer.last().into_iter().collect(),
            (AdaptedPart::MlpInputs, _) => {
                mlp.map_or(Vec::new(), |mlp| mlp.gate.iter().chain([&mlp.up]).collect())
            }
            (AdaptedPart::MlpOutput, _) => mlp.map_or(Vec::new(), |mlp| vec![&mlp.down]),
            _ => Vec::new(),
        }
    }

    /// The place in a table of its first projection in block `index`; those after it follow.
    pub(in crate::model) fn first_place(self, index: usize, block: &Block) -> usize {
        let is_gated = block
            .mlp
            .of_all_rows()
            .is_some_and(|mlp| mlp.gate.is_some());
        index * PLACES
            + match self {
                AdaptedPart::MixerInputs | AdaptedPart::DeltaInputsAndGates => MIXER,
                AdaptedPart::DeltaGates => DELTA_GATES,
                AdaptedPart::HeadGate => HEAD_GATE,
                AdaptedPart::MixerOutput => MIXER_OUTPUT,
                AdaptedPart::MlpInputs if is_gated => GATE,
                AdaptedPart::MlpInputs => UP,
                AdaptedPart::MlpOutput => DOWN,
            }
    }
}

/// Parts of blocks that an adapter changes, in any block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::model) struct Adapts {
    pub(in crate::model) mixer_inputs: bool,
    pub(in crate::model) mixer_output: bool,
    pub(in crate::model) mlp_inputs: bool,
    pub(in crate::model) mlp_output: bool,
}

impl Adapts {
    /// Nothing.
    pub(in crate::model) const NOTHING: Adapts = Adapts {
        mixer_inputs: false,
        mixer_output: false,
        mlp_inputs: false,
        mlp_output: false,
    };

    /// The parts that either changes.
    pub(in crate::model) fn or(self, other: Adapts) -> Adapts {
        Adapts {
            mixer_inputs: self.mixer_inputs || other.mixer_inputs,
            mixer_output: self.mixer_output || other.mixer_output,
            mlp_inputs: self.mlp_inputs || other.mlp_inputs,
            mlp_output: self.mlp_output || other.mlp_output,
        }
    }

    /// Whether a part is among them.
    pub(in crate::model) fn change(self, part: AdaptedPart) -> bool {
        match part {
            AdaptedPart::MixerInputs
            | AdaptedPart::DeltaInputsAndGates
            | AdaptedPart::DeltaGates
            | AdaptedPart::HeadGate => self.mixer_inputs,
            AdaptedPart::MixerOutput => self.mixer_output,
            AdaptedPart::MlpInputs => self.mlp_inputs,
            AdaptedPart::MlpOutput => self.mlp_output,
        }
    }

    fn add(&mut self, part: AdaptedPart) {
        match part {
            AdaptedPart::MixerInputs
            | AdaptedPart::DeltaInputsAndGates
            | AdaptedPart::DeltaGates
            | AdaptedPart::HeadGate => self.mixer_inputs = true,
            AdaptedPart::MixerOutput => self.mixer_output = true,
            AdaptedPart::MlpInputs => self.mlp_inputs = true,
            AdaptedPart::MlpOutput => self.mlp_output = true,
        }
    }
}

/// The places of the projections that fused passes adapt, by their names.
pub(super) struct Places {
    all: HashMap<String, (usize, AdaptedPart)>,
    count: usize,
}

impl Places {
    /// Places in a model with these weights.
    pub(super) fn of(weights: &Weights) -> Places {
        let mut all = HashMap::new();
        for (index, block) in weights.blocks.iter().enumerate() {
            for part in AdaptedPart::ALL {
                let first = part.first_place(index, block);
                for (i, projection) in part.projections(block).into_iter().enumerate() {
                    all.insert(projection.name.clone(), (first + i, part));
                }
            }
        }
        Places {
            all,
            count: weights.blocks.len() * PLACES,
        }
    }

    /// Whether passes adapt a projection.
    pub(super) fn contains(&self, projection: &str) -> bool {
        self.all.contains_key(projection)
    }
}

/// An adapter as fused passes take it.
#[derive(Debug)]
pub(in crate::model) struct OnGpu {
    table: AdapterTable,
    adapts: Adapts,
    rank: usize,
}

impl OnGpu {
    /// The table of factors, all of which have places.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        places: &Places,
        factors: &HashMap<String, Factors>,
    ) -> Result<OnGpu> {
        let mut entries = vec![None; places.count];
        let (mut adapts, mut rank) = (Adapts::NOTHING, 0);
        for (name, factors) in factors {
            let place = places.all.get(name);
            let matrices = factors.a.matrix().zip(factors.b.matrix());
            let (Some(&(place, part)), Some((a, b))) = (place, matrices) else {
                return Err(err!(
                    Internal,
                    "factors of {name} that no pass on a GPU applies"
                ));
            };
            adapts.add(part);
            rank = rank.max(a.rows());
            entries[place] = Some(AdapterFactors {
                a,
                b,
                scale: factors.scale,
            });
        }
        let table = AdapterTable::new(gpu, &entries)?;
        Ok(OnGpu {
            table,
            adapts,
            rank,
        })
    }

    pub(super) fn bytes(&self) -> usize {
        self.table.bytes()
    }

    /// The address of its table.
    pub(in crate::model) fn address(&self) -> u64 {
        self.table.address()
    }

    /// The padded rank of its widest factors.
    pub(in crate::model) fn rank(&self) -> usize {
        self.rank
    }

    /// The parts that it changes.
    pub(in crate::model) fn adapts(&self) -> Adapts {
        self.adapts
    }
}
