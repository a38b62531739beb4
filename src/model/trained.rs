//! A model over a trainer's weights, run between its steps without a copy of the matrices, and renewed after each of them.

use std::sync::{Arc, PoisonError};

use super::spec::MixerSpec;
use super::tensors::{
    self, DELTA_A, DELTA_B, DELTA_QKV, DELTA_Z, QUERY, QUERY_GATE, StoredRows, TensorSpec,
    block_name,
};
use super::training::{
    BlockLayout, GatedMlpLayout, Layout, MatrixId, MixerVectors, MlpLayout, ProjectionLayout,
    Source, VectorId,
};
use super::weights::{
    Attention, Block, DenseMlp, Embedding, Experts, GatedDelta, Mixer, Mlp, Norms, Projection,
    Weights,
};
use super::{Device, KvType, Live, LoadOptions, Made, Model, Spec, fused};
use crate::base::Result;
use crate::base::error::bail;
use crate::ops::delta::DeltaWeights;
use crate::ops::linear::Linear;
use crate::ops::{Array, Slice};

/// Access to a trainer's weights.
pub trait Trained {
    /// A matrix, in the memory in which it is trained.
    fn matrix(&self, id: MatrixId) -> Result<Linear>;

    /// A copy of some rows of a matrix, in its delivered form: a projection that files store among others.
    fn rows(&self, id: MatrixId, rows: &StoredRows) -> Result<Linear>;

    /// A copy of a norm, a bias or another vector.
    fn vector(&self, id: VectorId) -> Result<Array>;
}

impl Model {
    /// The model at `source`, from which training started, with the current weights. It takes no memory for matrices, but for projections
    /// that files store among others. The caller keeps the trainer out while it runs. `fingerprint` tells it from others.
    pub fn of_trained(
        device: &Device,
        source: &Source,
        trained: &dyn Trained,
        fingerprint: u64,
    ) -> Result<Arc<Model>> {
        let spec = source.spec().clone();
        if let Device::Cuda(gpu) = device {
            gpu.prepare(&fused::units(&spec, false), &crate::base::call::is_over)?;
        }
        let made = Made {
            weights: weights(device, &spec, source.layout(), trained)?,
            spec,
            tables: fused::HostTables::default(),
            fingerprint,
        };
        Model::of(made, "training", &LoadOptions::new(device.clone()))
    }

    /// Follows weights that have changed since the model was made of them, or was renewed: copies norms, biases and projections that files
    /// store among others again. On a GPU, a step that ran ahead and recorded passes are dropped. `fingerprint` tells the new weights from
    /// others, also if this fails: then the model must not be run before a later call has succeeded. The caller keeps passes out.
    pub fn renew(&self, layout: &Layout, trained: &dyn Trained, fingerprint: u64) -> Result<()> {
        let live = || self.live.write().unwrap_or_else(PoisonError::into_inner);
        live().fingerprint = fingerprint;
        let weights = weights(self.device(), self.spec(), layout, trained)?;
        let executor = match self.executor() {
            None => None,
            Some(executor) => Some(Arc::new(executor.renewed(fused::Source {
                spec: self.spec(),
                weights: &weights,
                kv: self.kv().cache(KvType::F16)?,
            })?)),
        };
        *live() = Live {
            weights: Arc::new(weights),
            executor,
            beside: None,
            fingerprint,
        };
        Ok(())
    }
}

fn weights(
    device: &Device,
    spec: &Spec,
    layout: &Layout,
    trained: &dyn Trained,
) -> Result<Weights> {
    let projection = |p: &ProjectionLayout| projection(layout, trained, p);
    let gated = |mlp: &GatedMlpLayout| {
        let [gate, up] = &mlp.gate_up;
        Ok(DenseMlp {
            gate: Some(projection(gate)?),
            up: projection(up)?,
            down: projection(&mlp.down)?,
        })
    };
    let vector = |id: &Option<VectorId>| id.map(|id| trained.vector(id)).transpose();
    let norms = |[pre, post]: &[Option<VectorId>; 2]| {
        Ok(Norms {
            pre: vector(pre)?,
            post: vector(post)?,
        })
    };
    let blocks = layout.blocks.iter().enumerate().map(|(index, b)| {
        let mlp = match &b.mlp {
            MlpLayout::Dense(mlp) => Mlp::Dense(Box::new(gated(mlp)?)),
            MlpLayout::Experts(mixture) => Mlp::Experts(Box::new(Experts {
                router: Projection {
                    name: name_of(layout, mixture.router),
                    linear: trained.matrix(mixture.router)?,
                    bias: None,
                },
                correction: None,
                router_scales: None,
                experts: mixture.experts.iter().map(gated).collect::<Result<_>>()?,
                shared: match &mixture.shared {
                    Some((mlp, gate)) => {
                        let gate = gate.map(|id| trained.matrix(id)).transpose()?;
                        Some((gated(mlp)?, gate))
                    }
                    None => None,
                },
            })),
        };
        Ok(Block {
            mixer_norms: norms(&b.mixer_norms)?,
            mixer: Parts::new(device, (spec, layout), trained, index).mixer()?,
            mlp_norms: norms(&b.mlp_norms)?,
            mlp,
            per_layer: None,
            scale: None,
        })
    });
    Ok(Weights {
        locked: None,
        per_layer: None,
        blocks: blocks.collect::<Result<_>>()?,
        drafter: None,
        embedding: match layout.head == layout.embedding {
            true => Embedding::Head,
            false => Embedding::Matrix(trained.matrix(layout.embedding)?),
        },
        norm: trained.vector(layout.norm)?,
        head: Projection {
            name: name_of(layout, layout.head),
            linear: trained.matrix(layout.head)?,
            bias: None,
        },
    })
}

/// The name of a projection in the model, whose weight is a matrix of the layout.
fn name_of(layout: &Layout, id: MatrixId) -> String {
    let name = &layout.matrices[id].name;
    name.trim_end_matches(".weight").to_owned()
}

fn projection(layout: &Layout, trained: &dyn Trained, p: &ProjectionLayout) -> Result<Projection> {
    Ok(Projection {
        name: name_of(layout, p.matrix),
        linear: trained.matrix(p.matrix)?,
        bias: p.bias.map(|id| trained.vector(id)).transpose()?,
    })
}

/// The projections of a block's mixer by role, of which files may store several in one matrix.
struct Parts<'a> {
    device: &'a Device,
    spec: &'a Spec,
    layout: &'a Layout,
    trained: &'a dyn Trained,
    block: &'a BlockLayout,
    index: usize,
    tensors: Vec<TensorSpec>,
}

impl<'a> Parts<'a> {
    fn new(
        device: &'a Device,
        (spec, layout): (&'a Spec, &'a Layout),
        trained: &'a dyn Trained,
        index: usize,
    ) -> Parts<'a> {
        Parts {
            device,
            spec,
            layout,
            trained,
            block: &layout.blocks[index],
            index,
            tensors: tensors::of_block(spec, index),
        }
    }

    fn mixer(&self) -> Result<Mixer> {
        let vector = |id| self.trained.vector(id);
        match (&self.block.vectors, &self.spec.blocks[self.index].mixer) {
            (MixerVectors::Attention([q_norm, k_norm]), MixerSpec::Attention(spec)) => {
                let (query, gate) = match spec.gated {
                    false => ("self_attn.q_proj", None),
                    true => (QUERY, Some(QUERY_GATE)),
                };
                Ok(Mixer::Attention(Box::new(Attention {
                    q: self.part(query)?,
                    gate: gate.map(|gate| self.part(gate)).transpose()?,
                    k: Some(self.part("self_attn.k_proj")?),
                    v: Some(self.part("self_attn.v_proj")?),
                    q_norm: q_norm.map(vector).transpose()?,
                    k_norm: k_norm.map(vector).transpose()?,
                    v_norm: None,
                    sinks: None,
                    o: projection(self.layout, self.trained, &self.block.output)?,
                })))
            }
            (MixerVectors::GatedDelta(vectors), MixerSpec::GatedDelta(_)) => {
                Ok(Mixer::GatedDelta(Box::new(GatedDelta {
                    qkv: self.part(DELTA_QKV)?,
                    z: self.part(DELTA_Z)?,
                    a: self.part(DELTA_A)?,
                    b: self.part(DELTA_B)?,
                    heads: DeltaWeights {
                        convolution: vector(vectors.convolution)?,
                        a_log: vector(vectors.a_log)?,
                        dt_bias: vector(vectors.dt_bias)?,
                    },
                    norm: vector(vectors.norm)?,
                    out: projection(self.layout, self.trained, &self.block.output)?,
                })))
            }
            _ => bail!(
                Internal,
                "the mixer of block {} is not what its spec says",
                self.index
            ),
        }
    }

    /// A projection by its role.
    fn part(&self, role: &str) -> Result<Projection> {
        let name = block_name(self.index, &format!("{role}.weight"));
        let Some(tensor) = self.tensors.iter().find(|tensor| tensor.name == name) else {
            bail!(Internal, "{name} is no tensor of the model");
        };
        let matrices = &self.layout.matrices;
        let mut inputs = self.block.inputs.iter();
        let Some(own) = inputs.find(|p| matrices[p.matrix].name == tensor.stored_name()) else {
            bail!(Internal, "{name} is in no matrix that is trained");
        };
        match tensor.within.first() {
            Some(within) if !tensor.alone => Ok(Projection {
                name: block_name(self.index, role),
                linear: self.trained.rows(own.matrix, &within.rows)?,
                bias: own
                    .bias
                    .map(|id| self.elements(id, &within.rows))
                    .transpose()?,
            }),
            _ => projection(self.layout, self.trained, own),
        }
    }

    /// Some elements of a vector.
    fn elements(&self, id: VectorId, elements: &StoredRows) -> Result<Array> {
        let all = self.trained.vector(id)?;
        let mut values = vec![0.0; all.len()];
        all.all().read(&mut values)?;
        let parts = elements.parts(0..elements.count());
        let taken: Vec<f32> = parts.flat_map(|(_, part)| values[part].to_vec()).collect();
        let mut array = Array::zeroed(self.device, taken.len())?;
        array.all_mut().copy_from(Slice::Host(&taken))?;
        Ok(array)
    }
}
