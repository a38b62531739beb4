//! Operands of the planner and the launchers from a model's weights on a GPU: shapes, matrices with their biases, mixtures of experts, and
//! the divisor that keeps the activations between gate and down within f16.

use std::sync::Arc;

use super::shapes::{BlockShape, DenseShape, MixerShape, MlpShape, RoutedShape};
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::base::memory::Tag;
use crate::cuda::{
    self, Biased, DeviceBuffer, DeviceSlice, ExpertMatrices, ExpertTable, Gpu, Matrix, Routing,
};
use crate::model::spec::{AttentionSpec, BlockSpec, ExpertsSpec, QkNorm, Scoring};
use crate::model::weights::{Block, DenseMlp, Experts, Mixer, Mlp, Projection};
use crate::ops::Array;
use crate::ops::linear::Linear;

/// Minimum divisor of the activations between gate and down: they are the largest of a model, and f16 ends at [`F16_MAX`].
pub(super) const GLU_DIVISOR: u32 = 16;
/// The largest number of f16.
const F16_MAX: f64 = 65504.0;

/// A mixture of experts in the form that its kernels take.
pub(super) struct Mixture {
    pub(super) routing: Routing,
    pub(super) table: ExpertTable,
}

pub(super) fn on_gpu(array: &Option<Array>) -> Result<&DeviceBuffer> {
    match array {
        Some(array) => array.on_gpu(),
        None => bail!(Internal, "a norm is missing that the spec has"),
    }
}

pub(super) fn matrix(projection: &Projection) -> Result<&Matrix> {
    of_linear(&projection.linear)
}

pub(super) fn of_linear(linear: &Linear) -> Result<&Matrix> {
    linear
        .matrix()
        .ok_or_else(|| err!(Internal, "a weight of a model on a GPU is in host memory"))
}

pub(super) fn biased(projection: &Projection) -> Result<Biased<'_>> {
    let bias = projection.bias.as_ref().map(Array::on_gpu).transpose()?;
    Ok((matrix(projection)?, bias))
}

/// The rest of a buffer of f32 from an element on.
pub(super) fn f32_from(buffer: &DeviceBuffer, element: usize) -> Result<DeviceSlice<'_>> {
    DeviceSlice::from(buffer).part(element * size_of::<f32>()..buffer.bytes())
}

fn dense_shape(mlp: &DenseMlp) -> Result<DenseShape> {
    let shape = |p: &Projection| Ok(matrix(p)?.shape());
    Ok(DenseShape {
        gate: mlp.gate.as_ref().map(shape).transpose()?,
        up: shape(&mlp.up)?,
        down: shape(&mlp.down)?,
    })
}

/// The shape of a block of a model with these attention specs.
pub(super) fn shape(
    (weights, spec): (&Block, &BlockSpec),
    attentions: &[AttentionSpec],
) -> Result<BlockShape> {
    let shape = |p: &Projection| Ok(matrix(p)?.shape());
    let of_all_rows = weights.mlp.of_all_rows().map(dense_shape).transpose()?;
    let mismatched = || err!(Internal, "a gated delta net in a block whose spec has none");
    let kind = |attention: &AttentionSpec| {
        let place = attentions.iter().position(|a| a == attention);
        place.ok_or_else(|| err!(Internal, "attention that is not among the model's"))
    };
    let routed = |experts: &Experts| -> Result<RoutedShape> {
        let (Some(spec), Some(first)) = (spec.mlp.mixture(), experts.experts.first()) else {
            bail!(Internal, "experts in a block whose spec has none");
        };
        let gate = experts.shared.as_ref().and_then(|(_, gate)| gate.as_ref());
        let gate = gate.map(|gate| Ok(of_linear(gate)?.shape()));
        let router = shape(&experts.router);
        Ok(RoutedShape {
            router: std::iter::once(router).chain(gate).collect::<Result<_>>()?,
            gated: spec.expert.gated,
            routing: routing(spec),
            up: shape(&first.up)?,
        })
    };
    Ok(BlockShape {
        norms: spec.norms,
        mixer: match &weights.mixer {
            Mixer::Attention(attention) => MixerShape::Attention {
                qkv: attention.inputs().map(shape).collect::<Result<_>>()?,
                gate: attention.gate.as_ref().map(shape).transpose()?,
                o: shape(&attention.o)?,
                normed: spec.required_attention()?.qk_norm == QkNorm::Projections,
                kind: kind(spec.required_attention()?)?,
            },
            Mixer::GatedDelta(delta) => MixerShape::GatedDelta {
                heads: spec.gated_delta().ok_or_else(mismatched)?.shape,
                inputs: [shape(&delta.qkv)?, shape(&delta.z)?],
                gates: [shape(&delta.b)?, shape(&delta.a)?],
                out: shape(&delta.out)?,
            },
            Mixer::Mamba2(mamba) => MixerShape::Mamba2 {
                inputs: [shape(&mamba.z)?, shape(&mamba.xbc)?, shape(&mamba.dt)?],
                out: shape(&mamba.out)?,
            },
            Mixer::None => MixerShape::None,
        },
        mlp: match (&weights.mlp, of_all_rows) {
            (Mlp::Experts(experts), shared) => MlpShape::Experts {
                routed: routed(experts)?,
                shared,
            },
            (Mlp::DenseAndExperts(both), Some(dense)) => MlpShape::DenseAndExperts {
                dense,
                routed: routed(&both.experts)?,
            },
            (Mlp::Dense(_), Some(mlp)) => MlpShape::Dense(mlp),
            (Mlp::None, None) => MlpShape::None,
            (Mlp::Dense(_) | Mlp::DenseAndExperts(_), None) | (Mlp::None, Some(_)) => {
                bail!(Internal, "projections that are not those of the MLP")
            }
        },
        per_layer: match &weights.per_layer {
            Some(own) => Some([shape(&own.gate)?, shape(&own.projection)?]),
            None => None,
        },
        scaled: spec.scaled,
    })
}

/// The rule by which a mixture routes.
fn routing(spec: &ExpertsSpec) -> Routing {
    Routing {
        experts: spec.count,
        per_token: spec.per_token,
        normalized: spec.normalized,
        sigmoid: match spec.scoring {
            Scoring::Softmax => None,
            Scoring::Sigmoid(scoring) => Some(scoring),
        },
    }
}

pub(super) fn mixture(
    gpu: &Arc<Gpu>,
    (weights, spec): (&Block, &BlockSpec),
) -> Result<Option<Mixture>> {
    let (Some(weights), Some(spec)) = (weights.mlp.mixture(), spec.mlp.mixture()) else {
        return Ok(None);
    };
    let routing = routing(spec);
    routing.check()?;
    let experts = weights.experts.iter().map(|mlp| {
        Ok(ExpertMatrices {
            gate: mlp.gate.as_ref().map(biased).transpose()?,
            up: biased(&mlp.up)?,
            down: biased(&mlp.down)?,
        })
    });
    let experts = experts.collect::<Result<Vec<_>>>()?;
    let table = ExpertTable::new(gpu, &experts)?;
    Ok(Some(Mixture { routing, table }))
}

/// The power of two that divides the gated linear unit of this block, or its squared ReLU, so that it fits f16 for any normalized input. The
/// length of a normalized row is at most the square root of its width, so gate and up are at most that times the norms of their rows, with
/// the weight of the norm folded in (Cauchy-Schwarz). Activations are no larger than their arguments, and clamped ones are small. Without a
/// norm before the MLP nothing bounds the input, and the kernel of the norm after it notes rows that left f16.
pub(super) fn glu_divisor(gpu: &Arc<Gpu>, (block, spec): (&Block, &BlockSpec)) -> Result<u32> {
    let Some(norm) = block
        .mlp_norms
        .pre
        .as_ref()
        .filter(|_| !spec.mlp.is_clamped())
    else {
        return Ok(GLU_DIVISOR);
    };
    // Experts beside an MLP have a norm of their own.
    let inputs: Vec<(&DenseMlp, &Array)> = match &block.mlp {
        Mlp::DenseAndExperts(both) => {
            let experts = both.experts.experts.iter();
            let experts = experts.map(|mlp| (mlp, &both.experts_input_norm));
            experts.chain([(&both.dense, norm)]).collect()
        }
        mlp => mlp.mlps().into_iter().map(|mlp| (mlp, norm)).collect(),
    };
    let mut largest = 0f64;
    for (mlp, norm) in inputs {
        let projections: Vec<&Projection> = mlp.gate.iter().chain([&mlp.up]).collect();
        let all = bounds(gpu, &projections, norm)?;
        // Without a gate, up is multiplied by itself.
        let up = &all[all.len() - mlp.up.linear.rows()..];
        let products = all.iter().zip(up).map(|(g, u)| g * u);
        largest = products.fold(largest, f64::max);
    }
    // Leaves a margin for the rounding of all steps before.
    let mut divisor = GLU_DIVISOR;
    while largest * 1.01 > F16_MAX * f64::from(divisor) && divisor < 1 << 30 {
        divisor *= 2;
    }
    Ok(divisor)
}

/// Bounds of the features of projections that share a normalized input, one projection after the other.
fn bounds(gpu: &Arc<Gpu>, projections: &[&Projection], norm: &Array) -> Result<Vec<f64>> {
    let rows: usize = projections.iter().map(|p| p.linear.rows()).sum();
    let out = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, rows * 4)?;
    let mut bias = vec![0f32; rows];
    let mut first = 0;
    for projection in projections {
        let matrix = matrix(projection)?;
        let own = first..first + matrix.rows();
        let slice = DeviceSlice::from(&out).part(own.start * 4..own.end * 4)?;
        cuda::row_norms(matrix, Some(norm.all().cuda()?), slice)?;
        if let Some(stored) = &projection.bias {
            stored.all().read(&mut bias[own.clone()])?;
        }
        first = own.end;
    }
    let mut norms = vec![0f32; rows];
    out.read(0, &mut norms)?;
    let width = (projections[0].linear.cols() as f64).sqrt();
    let both = norms.iter().zip(&bias);
    Ok(both
        .map(|(&n, &b)| width * f64::from(n) + f64::from(b.abs()))
        .collect())
}
