//! The parameters of a model by index, and their roles in a pass.

use std::collections::HashMap;

use crate::base::Result;
use crate::base::error::bail;
use crate::model::spec::{MlpSpec, Spec};
use crate::model::tensors::{
    self, EMBEDDING, HEAD, NORM, SHARED_GATE, TensorRole, block_name, router,
};

/// Index of a matrix in [`Layout::matrices`].
pub type MatrixId = usize;
/// Index of a vector in [`Layout::vectors`].
pub type VectorId = usize;

/// Suffixes of the names of an adapter's factors, before `.weight`.
const FACTOR_A: &str = "lora_A";
const FACTOR_B: &str = "lora_B";

/// A matrix of a model.
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
}

impl MatrixLayout {
    /// Whether it is the first factor of an adapter.
    pub fn is_first_factor(&self) -> bool {
        self.name.ends_with(&format!(".{FACTOR_A}.weight"))
    }
}

/// A norm or a bias.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VectorLayout {
    /// Its name.
    pub name: String,
    /// Elements.
    pub len: usize,
    /// The block it belongs to.
    pub block: Option<usize>,
    /// Whether it is a bias.
    pub is_bias: bool,
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

/// The parameters of a block.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockLayout {
    /// Queries, keys, values.
    pub qkv: [ProjectionLayout; 3],
    /// The norms of queries and keys.
    pub qk_norms: [Option<VectorId>; 2],
    /// The output of attention.
    pub o: ProjectionLayout,
    /// The MLP.
    pub mlp: MlpLayout,
    /// The norms before and after attention.
    pub mixer_norms: [Option<VectorId>; 2],
    /// The norms before and after the MLP.
    pub mlp_norms: [Option<VectorId>; 2],
}

impl BlockLayout {
    /// Its projections.
    pub fn projections(&self) -> impl Iterator<Item = &ProjectionLayout> + Clone {
        let of_mlp = self.mlp.gated().flat_map(GatedMlpLayout::projections);
        self.qkv.iter().chain([&self.o]).chain(of_mlp)
    }

    fn projections_mut(&mut self) -> impl Iterator<Item = &mut ProjectionLayout> {
        let of_mlp = self.mlp.gated_mut().flat_map(|mlp| {
            let [gate, up] = &mut mlp.gate_up;
            [gate, up, &mut mlp.down]
        });
        self.qkv.iter_mut().chain([&mut self.o]).chain(of_mlp)
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
            std::iter::once(&block.qkv[..]).chain(of_mlps)
        });
        let mut group = groups.filter(|group| group.iter().any(|p| p.matrix == matrix));
        group.next().map_or(matrix, |group| group[0].matrix)
    }

    /// The parameters of a model of `spec`. `has` says which optional ones exist.
    pub fn new(spec: &Spec, has: &dyn Fn(&str) -> bool) -> Result<Layout> {
        let (mut matrices, mut vectors) = (Vec::<MatrixLayout>::new(), Vec::<VectorLayout>::new());
        for tensor in tensors::all(spec) {
            if !tensor.required && !has(&tensor.name) {
                continue;
            }
            let block = tensor
                .name
                .strip_prefix("model.layers.")
                .and_then(|rest| rest.split('.').next()?.parse().ok());
            match (tensor.role, tensor.shape.as_slice()) {
                (TensorRole::Vector, &[len]) => vectors.push(VectorLayout {
                    is_bias: tensor.name.ends_with(".bias"),
                    name: tensor.name,
                    len,
                    block,
                }),
                (_, &[rows, cols]) => matrices.push(MatrixLayout {
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
        let blocks = (0..spec.blocks.len())
            .map(|index| {
                let projection = |name: &str| -> Result<ProjectionLayout> {
                    Ok(ProjectionLayout {
                        matrix: matrix(&block_name(index, &format!("{name}.weight")))?,
                        bias: vector(&block_name(index, &format!("{name}.bias"))),
                        adapter: None,
                    })
                };
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
                Ok(BlockLayout {
                    qkv: [
                        projection("self_attn.q_proj")?,
                        projection("self_attn.k_proj")?,
                        projection("self_attn.v_proj")?,
                    ],
                    qk_norms: ["self_attn.q_norm", "self_attn.k_norm"].map(norm),
                    o: projection("self_attn.o_proj")?,
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
