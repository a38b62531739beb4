//! The parameters of a model by index, and their roles in a pass.

use std::collections::HashMap;

use super::columns::{MixerColumns, mixer_inputs};
use crate::base::Result;
use crate::base::error::bail;
use crate::model::spec::{MixerSpec, MlpSpec, Spec};
use crate::model::tensors::{
    self, DELTA_A_LOG, DELTA_CONVOLUTION, DELTA_DT_BIAS, DELTA_NORM, DELTA_OUT, EMBEDDING, HEAD,
    NORM, SHARED_GATE, TensorRole, block_name, router,
};

/// Index of a matrix in [`Layout::matrices`].
pub type MatrixId = usize;
/// Index of a vector in [`Layout::vectors`].
pub type VectorId = usize;

/// Suffixes of the names of an adapter's factors, before `.weight`.
const FACTOR_A: &str = "lora_A";
const FACTOR_B: &str = "lora_B";

/// A matrix of a model, as files have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixLayout {
    /// Its name in transformers.
    pub name: String,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// The block it belongs to.
    pub block: Option<usize>,
    /// Whether it is a projection of a recurrent layer.
    pub is_recurrent: bool,
}

impl MatrixLayout {
    /// Whether it is the first factor of an adapter.
    pub fn is_first_factor(&self) -> bool {
        self.name.ends_with(&format!(".{FACTOR_A}.weight"))
    }
}

/// A norm, a bias, or another vector: the convolution and the constants of heads of a gated delta net.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VectorLayout {
    /// Its name.
    pub name: String,
    /// Its shape in files.
    pub shape: Vec<usize>,
    /// Elements.
    pub len: usize,
    /// The block it belongs to.
    pub block: Option<usize>,
}

/// A low-rank adapter of a projection `[n, k]`: adds `scale * (x A^T) B^T` to its output (Hu et al., arXiv 2106.09685).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterLayout {
    /// A, `[rank, k]`.
    pub a: MatrixId,
    /// The transpose of B, `[rank, n]`.
    pub b: MatrixId,
    /// Number of rows of both factors.
    pub rank: usize,
    /// Factor of its output.
    pub scale: f32,
}

/// A projection's matrix, bias and adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProjectionLayout {
    /// The matrix.
    pub matrix: MatrixId,
    /// The bias.
    pub bias: Option<VectorId>,
    /// The adapter that is trained instead of the matrix.
    pub adapter: Option<AdapterLayout>,
}

/// The parameters of a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedMlpLayout {
    /// Gate and up.
    pub gate_up: [ProjectionLayout; 2],
    /// Down.
    pub down: ProjectionLayout,
}

impl GatedMlpLayout {
    fn projections(&self) -> [&ProjectionLayout; 3] {
        let [gate, up] = &self.gate_up;
        [gate, up, &self.down]
    }
}

/// The parameters of a mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsLayout {
    /// The router, which computes a logit for each expert.
    pub router: MatrixId,
    /// The experts, in order.
    pub experts: Vec<GatedMlpLayout>,
    /// The shared expert, and the one-row matrix of its gate: the sigmoid of that projection multiplies its output.
    pub shared: Option<(GatedMlpLayout, Option<MatrixId>)>,
}

/// The parameters of the MLP of a block.
#[derive(Clone, Debug, PartialEq)]
pub enum MlpLayout {
    /// One gated MLP.
    Dense(GatedMlpLayout),
    /// A mixture of experts.
    Experts(ExpertsLayout),
}

impl MlpLayout {
    /// The MLP, unless it is a mixture.
    pub fn dense(&self) -> Option<&GatedMlpLayout> {
        match self {
            MlpLayout::Dense(mlp) => Some(mlp),
            MlpLayout::Experts(_) => None,
        }
    }

    /// All gated MLPs: for a mixture the experts, and then the shared expert.
    pub fn gated(&self) -> impl Iterator<Item = &GatedMlpLayout> + Clone {
        let (experts, last) = match self {
            MlpLayout::Dense(mlp) => (&[][..], Some(mlp)),
            MlpLayout::Experts(mixture) => (
                &mixture.experts[..],
                mixture.shared.as_ref().map(|(mlp, _)| mlp),
            ),
        };
        experts.iter().chain(last)
    }

    fn gated_mut(&mut self) -> impl Iterator<Item = &mut GatedMlpLayout> {
        let (experts, last) = match self {
            MlpLayout::Dense(mlp) => (&mut [][..], Some(mlp)),
            MlpLayout::Experts(mixture) => (
                &mut mixture.experts[..],
                mixture.shared.as_mut().map(|(mlp, _)| mlp),
            ),
        };
        experts.iter_mut().chain(last)
    }
}

/// The vectors of a mixer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MixerVectors {
    /// The norms of queries and keys of attention.
    Attention([Option<VectorId>; 2]),
    /// The vectors of a gated delta net.
    GatedDelta(DeltaVectors),
}

/// The vectors of a gated delta net.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaVectors {
    /// The convolution of queries, keys and values, `[channels, 1, taps]`.
    pub convolution: VectorId,
    /// The logarithm of each value head's rate of decay.
    pub a_log: VectorId,
    /// Added to the projection that the decay of each value head comes of.
    pub dt_bias: VectorId,
    /// The norm of each value head's output.
    pub norm: VectorId,
}

/// The parameters of a block.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockLayout {
    /// The projections of the mixer's input: queries, keys and values of attention, where those of gated queries have the gate too; of a
    /// gated delta net those of queries, keys and values, of z, b and a, as files divide them.
    pub inputs: Vec<ProjectionLayout>,
    /// The columns of their output by role; `None` for queries, keys and values in this order.
    pub columns: Option<MixerColumns>,
    /// The vectors of the mixer.
    pub vectors: MixerVectors,
    /// The last projection of the mixer.
    pub output: ProjectionLayout,
    /// The MLP.
    pub mlp: MlpLayout,
    /// The norms before and after the mixer.
    pub mixer_norms: [Option<VectorId>; 2],
    /// The norms before and after the MLP.
    pub mlp_norms: [Option<VectorId>; 2],
}

impl BlockLayout {
    /// Its projections.
    pub fn projections(&self) -> impl Iterator<Item = &ProjectionLayout> + Clone {
        let of_mlp = self.mlp.gated().flat_map(GatedMlpLayout::projections);
        self.inputs.iter().chain([&self.output]).chain(of_mlp)
    }

    fn projections_mut(&mut self) -> impl Iterator<Item = &mut ProjectionLayout> {
        let of_mlp = self.mlp.gated_mut().flat_map(|mlp| {
            let [gate, up] = &mut mlp.gate_up;
            [gate, up, &mut mlp.down]
        });
        let inputs = self.inputs.iter_mut();
        inputs.chain([&mut self.output]).chain(of_mlp)
    }
}

/// All parameters of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// The matrices, the embedding first.
    pub matrices: Vec<MatrixLayout>,
    /// The norms and biases.
    pub vectors: Vec<VectorLayout>,
    /// The blocks.
    pub blocks: Vec<BlockLayout>,
    /// The embedding.
    pub embedding: MatrixId,
    /// The output layer, which is the embedding if they are tied.
    pub head: MatrixId,
    /// The last norm.
    pub norm: VectorId,
}

impl Layout {
    /// The first of the projections that share their input with a matrix; the matrix itself if no other does.
    pub fn first_with_inputs_of(&self, matrix: MatrixId) -> MatrixId {
        let groups = self.blocks.iter().flat_map(|block| {
            let of_mlps = block.mlp.gated().map(|mlp| &mlp.gate_up[..]);
            std::iter::once(&block.inputs[..]).chain(of_mlps)
        });
        let mut group = groups.filter(|group| group.iter().any(|p| p.matrix == matrix));
        group.next().map_or(matrix, |group| group[0].matrix)
    }

    /// The parameters of a model of `spec` as files name them ([`tensors::whole`]). `has` says which optional ones exist.
    pub fn new(spec: &Spec, has: &dyn Fn(&str) -> bool) -> Result<Layout> {
        let (mut matrices, mut vectors) = (Vec::<MatrixLayout>::new(), Vec::<VectorLayout>::new());
        for tensor in tensors::whole(spec) {
            if !tensor.required && !has(&tensor.name) {
                continue;
            }
            let block = tensor
                .name
                .strip_prefix("model.layers.")
                .and_then(|rest| rest.split('.').next()?.parse().ok());
            match (tensor.role, tensor.shape.as_slice()) {
                (TensorRole::Vector, _) => vectors.push(VectorLayout {
                    name: tensor.name,
                    len: tensor.shape.iter().product(),
                    shape: tensor.shape,
                    block,
                }),
                (role, &[rows, cols]) => matrices.push(MatrixLayout {
                    is_recurrent: role == TensorRole::Recurrent,
                    name: tensor.name,
                    rows,
                    cols,
                    block,
                }),
                (_, shape) => bail!(Internal, "{} has shape {shape:?}", tensor.name),
            }
        }
        let numbers: HashMap<&str, MatrixId> = numbered(matrices.iter().map(|m| &m.name));
        let matrix = |name: &str| -> Result<MatrixId> {
            match numbers.get(name) {
                Some(&id) => Ok(id),
                None => bail!(Internal, "a model without {name}"),
            }
        };
        let numbers: HashMap<&str, VectorId> = numbered(vectors.iter().map(|v| &v.name));
        let vector = |name: &str| numbers.get(name).copied();
        let of_matrix = |name: &str| -> Result<ProjectionLayout> {
            Ok(ProjectionLayout {
                matrix: matrix(&format!("{name}.weight"))?,
                bias: vector(&format!("{name}.bias")),
                adapter: None,
            })
        };
        let blocks = (0..spec.blocks.len())
            .map(|index| {
                let projection = |name: &str| of_matrix(&block_name(index, name));
                let gated = |name: &str| -> Result<GatedMlpLayout> {
                    Ok(GatedMlpLayout {
                        gate_up: [
                            projection(&format!("{name}.gate_proj"))?,
                            projection(&format!("{name}.up_proj"))?,
                        ],
                        down: projection(&format!("{name}.down_proj"))?,
                    })
                };
                let mlp = match &spec.blocks[index].mlp {
                    MlpSpec::None => bail!(Internal, "block {index} has no MLP to train"),
                    MlpSpec::DenseAndExperts(..) => {
                        bail!(Internal, "block {index} has experts beside its MLP")
                    }
                    MlpSpec::Dense(_) => MlpLayout::Dense(gated("mlp")?),
                    MlpSpec::Experts(mixture) => {
                        let expert = |i| gated(&format!("mlp.experts.{i}"));
                        let gate = |_| matrix(&block_name(index, SHARED_GATE));
                        MlpLayout::Experts(ExpertsLayout {
                            router: matrix(&block_name(
                                index,
                                &format!("{}.weight", router(mixture.names)),
                            ))?,
                            experts: (0..mixture.count).map(expert).collect::<Result<_>>()?,
                            shared: match &mixture.shared {
                                Some(shared) => Some((
                                    gated("mlp.shared_expert")?,
                                    shared.gated.then_some(()).map(gate).transpose()?,
                                )),
                                None => None,
                            },
                        })
                    }
                };
                let norm = |name: &str| vector(&block_name(index, &format!("{name}.weight")));
                let names = &spec.norm_names;
                let required = |name: &str| match vector(&block_name(index, name)) {
                    Some(id) => Ok(id),
                    None => bail!(Internal, "a block without {name}"),
                };
                let (inputs, columns) = mixer_inputs(spec, index)?;
                let (vectors, output) = match &spec.blocks[index].mixer {
                    MixerSpec::Attention(_) => (
                        MixerVectors::Attention(["self_attn.q_norm", "self_attn.k_norm"].map(norm)),
                        "self_attn.o_proj",
                    ),
                    MixerSpec::GatedDelta(_) => (
                        MixerVectors::GatedDelta(DeltaVectors {
                            convolution: required(DELTA_CONVOLUTION)?,
                            a_log: required(DELTA_A_LOG)?,
                            dt_bias: required(DELTA_DT_BIAS)?,
                            norm: required(DELTA_NORM)?,
                        }),
                        DELTA_OUT,
                    ),
                    MixerSpec::Mamba2(_) | MixerSpec::None => {
                        bail!(Internal, "block {index} has no mixer to train")
                    }
                };
                let inputs = inputs.iter().map(|name| of_matrix(name));
                Ok(BlockLayout {
                    inputs: inputs.collect::<Result<_>>()?,
                    columns,
                    vectors,
                    output: projection(output)?,
                    mlp,
                    mixer_norms: [norm(names.mixer), norm(names.mixer_post)],
                    mlp_norms: [norm(names.mlp), norm(names.mlp_post)],
                })
            })
            .collect::<Result<_>>()?;
        let embedding = matrix(EMBEDDING)?;
        let Some(norm) = vector(NORM) else {
            bail!(Internal, "a model without {NORM}");
        };
        Ok(Layout {
            blocks,
            embedding,
            head: if spec.tied { embedding } else { matrix(HEAD)? },
            norm,
            matrices,
            vectors,
        })
    }

    /// This layout with adapters of rank `rank` in the blocks from `first_block` on, beside the projections that `wants` selects by their
    /// names without `.weight`. The matrices keep their indices; factors, named `.lora_A.weight` and `.lora_B.weight`, follow them.
    pub fn with_adapters(
        &self,
        first_block: usize,
        (rank, scale): (usize, f32),
        wants: &dyn Fn(&str) -> bool,
    ) -> Layout {
        let mut layout = self.clone();
        let matrices = &mut layout.matrices;
        for (index, block) in layout.blocks.iter_mut().enumerate().skip(first_block) {
            for projection in block.projections_mut() {
                let MatrixLayout {
                    name, rows, cols, ..
                } = matrices[projection.matrix].clone();
                let name = name.trim_end_matches(".weight");
                if !wants(name) {
                    continue;
                }
                let mut add = |factor: &str, cols: usize| {
                    matrices.push(MatrixLayout {
                        name: format!("{name}.{factor}.weight"),
                        rows: rank,
                        cols,
                        block: Some(index),
                        is_recurrent: false,
                    });
                    matrices.len() - 1
                };
                projection.adapter = Some(AdapterLayout {
                    a: add(FACTOR_A, cols),
                    b: add(FACTOR_B, rows),
                    rank,
                    scale,
                });
            }
        }
        layout
    }

    /// The projections that have adapters.
    pub fn adapted(&self) -> impl Iterator<Item = (MatrixId, AdapterLayout)> {
        let all = self.blocks.iter().flat_map(BlockLayout::projections);
        all.filter_map(|p| Some((p.matrix, p.adapter?)))
    }

    /// Number of parameters.
    pub fn parameters(&self) -> usize {
        let matrices: usize = self.matrices.iter().map(|m| m.rows * m.cols).sum();
        matrices + self.vectors.iter().map(|v| v.len).sum::<usize>()
    }
}

/// Names with their indices.
fn numbered<'a>(names: impl Iterator<Item = &'a String>) -> HashMap<&'a str, usize> {
    names.map(String::as_str).zip(0..).collect()
}
