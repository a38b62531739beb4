//! A model over a trainer's weights, run between its steps without a copy of the matrices.

use std::sync::Arc;

use super::training::{GatedMlpLayout, MatrixId, MlpLayout, ProjectionLayout, Source, VectorId};
use super::weights::{
    Attention, Block, Embedding, Experts, GatedMlp, Mixer, Mlp, Norms, Projection, Weights,
};
use super::{Device, LoadOptions, Made, Model, fused};
use crate::base::Result;
use crate::ops::Array;
use crate::ops::linear::Linear;

/// Access to a trainer's weights.
pub trait Trained {
    /// A matrix, in the memory in which it is trained.
    fn matrix(&self, id: MatrixId) -> Result<Linear>;

    /// A copy of a norm or bias.
    fn vector(&self, id: VectorId) -> Result<Array>;
}

impl Model {
    /// The model at `source`, from which training started, with the current weights. It takes no memory for matrices. The caller keeps the
    /// trainer out while it runs. `fingerprint` tells it from others.
    pub fn of_trained(
        device: &Device,
        source: &Source,
        trained: &dyn Trained,
        fingerprint: u64,
    ) -> Result<Arc<Model>> {
        let spec = source.spec().clone();
        if let Device::Cuda(gpu) = device {
            gpu.prepare(&fused::units(&spec), &crate::base::call::is_over)?;
        }
        let made = Made {
            weights: weights(source, trained)?,
            spec,
            table: None,
            fingerprint,
        };
        Model::of(made, "training", &LoadOptions::new(device.clone()))
    }
}

fn weights(source: &Source, trained: &dyn Trained) -> Result<Weights> {
    let layout = source.layout();
    let projection = |p: &ProjectionLayout| {
        Ok(Projection {
            linear: trained.matrix(p.matrix)?,
            bias: p.bias.map(|id| trained.vector(id)).transpose()?,
        })
    };
    let gated = |mlp: &GatedMlpLayout| {
        let [gate, up] = &mlp.gate_up;
        Ok(GatedMlp {
            gate: projection(gate)?,
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
    let blocks = layout.blocks.iter().map(|b| {
        let [q, k, v] = &b.qkv;
        let mlp = match &b.mlp {
            MlpLayout::Dense(mlp) => Mlp::Dense(Box::new(gated(mlp)?)),
            MlpLayout::Experts(mixture) => Mlp::Experts(Box::new(Experts {
                router: Projection {
                    linear: trained.matrix(mixture.router)?,
                    bias: None,
                },
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
            mixer: Mixer::Attention(Box::new(Attention {
                q: projection(q)?,
                gate: None,
                k: projection(k)?,
                v: projection(v)?,
                q_norm: vector(&b.qk_norms[0])?,
                k_norm: vector(&b.qk_norms[1])?,
                sinks: None,
                o: projection(&b.o)?,
            })),
            mlp_norms: norms(&b.mlp_norms)?,
            mlp,
        })
    });
    Ok(Weights {
        blocks: blocks.collect::<Result<_>>()?,
        embedding: match layout.head == layout.embedding {
            true => Embedding::Head,
            false => Embedding::Matrix(trained.matrix(layout.embedding)?),
        },
        norm: trained.vector(layout.norm)?,
        head: Projection {
            linear: trained.matrix(layout.head)?,
            bias: None,
        },
    })
}
