//! Names what no fused kernel supports.

use crate::base::Result;
use crate::base::error::bail;
use crate::model::spec::{Activation, BlockSpec, DenseMlpSpec, KeyValues, MlpSpec, QkNorm, Spec};

/// A property of the model that has no fused kernel, if any.
pub(in crate::model) fn unsupported(spec: &Spec) -> Option<String> {
    let of = |(index, block): (usize, &BlockSpec)| {
        let is_drafter = index == spec.blocks.len();
        let of_all_rows = block.mlp.of_all_rows();
        let is_clamped = of_all_rows
            .is_some_and(|mlp| matches!(mlp.activation, Activation::ClampedSwiglu { .. }));
        let squares = |mlp: &DenseMlpSpec| mlp.activation == Activation::ReluSquared;
        // Kernels after both halves of a block apply norms, factors and inputs of its own.
        let is_whole = block.attention().is_some() && block.mlp != MlpSpec::None;
        let ends_with_norms = block.norms.post && is_whole;
        let normalizes = |what| block.attention().is_some_and(|a| a.qk_norm == what);
        let shares_keys = block
            .attention()
            .is_some_and(|a| a.key_values != KeyValues::Projected);
        let what = match &block.mlp {
            mlp if mlp.specs().any(|mlp| mlp.gated && squares(mlp)) => "a squared ReLU of a gate",
            mlp if mlp.specs().any(|mlp| !mlp.gated && !squares(mlp)) => {
                "an MLP without a gate whose activation is no squared ReLU"
            }
            MlpSpec::DenseAndExperts(..) if !ends_with_norms => {
                "experts beside an MLP, and no norms after attention and MLP"
            }
            _ if block.per_layer.is_some() && !ends_with_norms => {
                "an input of its own, and no norms after attention and MLP"
            }
            _ if block
                .per_layer
                .is_some_and(|own| own.activation.on_gpu().is_err()) =>
            {
                "an input of its own whose gate is neither SiLU nor GELU"
            }
            _ if block.scaled && !ends_with_norms => {
                "a factor of its residual stream, and no norms after attention and MLP"
            }
            _ if is_clamped => "a clamped SwiGLU outside of experts",
            MlpSpec::Experts(_) if block.norms.post => "a norm after its experts",
            _ if normalizes(QkNorm::Projections) && shares_keys => {
                "a norm over all heads of queries, and no projections of keys and of values"
            }
            _ if !block.norms.pre && !ends_with_norms => {
                "no norms before attention and MLP, and none after them"
            }
            mlp if !block.norms.pre && mlp.mixture().is_some() => {
                "experts, and no norm before them"
            }
            _ if !block.norms.pre && is_drafter => "no norms before attention and MLP",
            _ => return None,
        };
        let which = match is_drafter {
            true => "the drafter's block".into(),
            false => format!("block {index}"),
        };
        Some(format!("{which} of this {} model has {what}", spec.family))
    };
    spec.all_blocks().enumerate().find_map(of)
}

/// Fails for a model that no fused kernel supports; the error names the unsupported property.
pub(in crate::model) fn check_supported(spec: &Spec) -> Result<()> {
    match unsupported(spec) {
        None => Ok(()),
        Some(what) => bail!(Unsupported, "{what}, for which there is no kernel on a GPU"),
    }
}
