//! Kernels of a plan as lines of text.

use std::fmt;

use super::{Applied, Kernel, NextInput, Norm, Normed, Part, Then};
use crate::cuda::{DecodePlan, Layout};
use crate::model::adapter::AdaptedPart;
use crate::model::order::Half;

impl fmt::Display for Norm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Norm::Mixer(_) => "attention",
            Norm::Mlp(_) => "mlp",
            Norm::Router(_) => "router",
            Norm::Experts(_) => "experts",
            Norm::PerLayer(_) => "own input's",
            Norm::Head => "head",
        })
    }
}

fn part_name(part: AdaptedPart) -> &'static str {
    match part {
        AdaptedPart::MixerInputs => "the mixer's inputs",
        AdaptedPart::DeltaInputsAndGates => "qkv, z, b, a",
        AdaptedPart::DeltaGates => "b, a",
        AdaptedPart::HeadGate => "the gate of heads",
        AdaptedPart::MixerOutput => "o",
        AdaptedPart::MlpInputs => "the mlp's inputs",
        AdaptedPart::MlpOutput => "down",
    }
}

fn layout_name(layout: Layout) -> &'static str {
    match layout {
        Layout::RowMajor => "rows",
        Layout::FragmentMajor => "fragment-major",
    }
}

impl fmt::Display for Normed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = match self.applied {
            Applied::Before => "normalized",
            Applied::Epilogue => "RMSNorm in the epilogue",
            Applied::Prologue => "post norm, add, RMSNorm in the prologue",
            Applied::OnLoad => "RMSNorm in the prologue",
        };
        write!(f, "{how}, {}", layout_name(self.layout))
    }
}

fn write_next(f: &mut fmt::Formatter<'_>, next: &Option<(Norm, Layout)>) -> fmt::Result {
    match next {
        Some((norm, layout)) => write!(f, ", {norm} norm -> f16 {}", layout_name(*layout)),
        None => Ok(()),
    }
}

/// Attention of single tokens beside the rows of prompts.
fn write_singles(f: &mut fmt::Formatter<'_>, singles: &Option<DecodePlan>) -> fmt::Result {
    match singles {
        Some(plan) => write!(
            f,
            "rope, store, split-KV attention of single tokens: {plan}; "
        ),
        None => Ok(()),
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let half = |half: &Half| match half {
            Half::Mixer => "o",
            Half::Mlp => "down",
        };
        let factor = |scales: bool| if scales { ", times the factor" } else { "" };
        match self {
            Kernel::LayerInputs { gemm } => {
                write!(
                    f,
                    "norm, inputs of blocks (rows) -> f32: {gemm}; norm, add rows of the table"
                )
            }
            Kernel::Normalize { norm, layout } => {
                write!(f, "{norm} norm -> f16 {}", layout_name(*layout))
            }
            Kernel::Convert { layout, .. } => write!(f, "rows -> f16 {}", layout_name(*layout)),
            Kernel::Qkv { input, gemm } => write!(f, "q, k, v ({input}) -> f32: {gemm}"),
            Kernel::NormProjections => f.write_str("norms of all q, of all k"),
            Kernel::Decode { layout, plan } => {
                write!(
                    f,
                    "rope, store, split-KV attention -> {}: {plan}",
                    layout_name(*layout)
                )
            }
            Kernel::StoreRows { before: false } => f.write_str("rope of keys, store"),
            Kernel::StoreRows { before: true } => {
                f.write_str("rope of keys, store at the positions before")
            }
            Kernel::DecodeStored { layout, plan } => {
                write!(
                    f,
                    "rope, split-KV attention over what is stored -> {}: {plan}",
                    layout_name(*layout)
                )
            }
            Kernel::HeadGate { input, gemm } => write!(f, "gate of heads ({input}) -> f32: {gemm}"),
            Kernel::GateHeads { layout } => {
                write!(f, "times sigmoid of the gate -> {}", layout_name(*layout))
            }
            Kernel::DeltaInputs { input, gemm, gates } => {
                let gates = if *gates { ", b, a" } else { "" };
                write!(f, "qkv, z{gates} ({input}) -> f32: {gemm}")
            }
            Kernel::DeltaGates { input, gemm } => write!(f, "b, a ({input}) -> f32: {gemm}"),
            Kernel::DeltaConv { .. } => f.write_str("convolution, norms of q and k, gates"),
            Kernel::DeltaRule { single: false } => f.write_str("gated delta rule"),
            Kernel::DeltaRule { single: true } => f.write_str("gated delta rule of single rows"),
            Kernel::DeltaNorm { layout } => {
                write!(f, "gated norm of heads -> {}", layout_name(*layout))
            }
            Kernel::DeltaStep { layout, .. } => write!(
                f,
                "convolution, gated delta rule, gated norm of single rows -> {}",
                layout_name(*layout)
            ),
            Kernel::MambaInputs { input, gemm } => write!(f, "z, xBC, dt ({input}) -> f32: {gemm}"),
            Kernel::MambaConv => f.write_str("convolution, time steps"),
            Kernel::MambaScan => f.write_str("recurrence"),
            Kernel::MambaNorm { layout } => {
                write!(f, "gate, norm of groups -> {}", layout_name(*layout))
            }
            Kernel::StoreKv => f.write_str("rope, store"),
            Kernel::Prefill { singles } => {
                write_singles(f, singles)?;
                f.write_str("flash attention -> rows")
            }
            Kernel::AttendRows { singles } => {
                write_singles(f, singles)?;
                f.write_str("attention by single tokens -> rows")
            }
            Kernel::GateUp { input, fused, gemm } => {
                let glu = if *fused { ", GLU" } else { "" };
                write!(f, "gate, up{glu} ({input}) -> f16: {gemm}")
            }
            Kernel::AdaptedGateUp { input, gemm } => write!(f, "gate, up ({input}) -> f32: {gemm}"),
            Kernel::Activate => f.write_str("GLU -> f16 rows"),
            Kernel::ActivateAdapted { layout, .. } => {
                write!(f, "add adapters' B, GLU -> f16 {}", layout_name(*layout))
            }
            Kernel::Shrink { part, layout } => {
                write!(
                    f,
                    "adapters' A of {} ({})",
                    part_name(*part),
                    layout_name(*layout)
                )
            }
            Kernel::ExpandNorm { part, norm, layout } => write!(
                f,
                "add adapters' B of {}, {norm} norm -> f16 {}",
                part_name(*part),
                layout_name(*layout)
            ),
            Kernel::Expand { part, .. } => write!(f, "add adapters' B of {}", part_name(*part)),
            Kernel::Up { input, gemm } => write!(f, "up ({input}) -> f16: {gemm}"),
            Kernel::Square => f.write_str("squared ReLU -> f16 rows"),
            Kernel::Project {
                half: which,
                layout,
                then,
                gemm,
            } => {
                write!(f, "{} ({})", half(which), layout_name(*layout))?;
                match then {
                    Then::Add => f.write_str(", add")?,
                    Then::AddAndNorm(norm) => write!(f, ", add, squares for the {norm} norm")?,
                    Then::Store | Then::StoreRow => f.write_str(" -> f32")?,
                }
                write!(f, ": {gemm}")
            }
            Kernel::Router { gemm } => write!(f, "router (rows) -> f32: {gemm}"),
            Kernel::Route { plan } => write!(f, "top-k, rows by expert: {plan}"),
            Kernel::ExpertsGateUp { gated: true, plan } => {
                write!(f, "experts' gate, up, GLU (gathered rows) -> f16: {plan}")
            }
            Kernel::ExpertsGateUp { gated: false, plan } => {
                write!(
                    f,
                    "experts' up, squared ReLU (gathered rows) -> f16: {plan}"
                )
            }
            Kernel::ExpertsDown { plan } => write!(f, "experts' down -> f32: {plan}"),
            Kernel::SumExperts { next } => {
                f.write_str("weighted sum of experts, add")?;
                write_next(f, next)
            }
            Kernel::SumBeside { scales, next } => {
                let factor = factor(*scales);
                write!(
                    f,
                    "norms of the sum of experts, of down and of both, add{factor}"
                )?;
                write_next(f, next)
            }
            Kernel::PerLayerGate { input, gemm } => {
                write!(f, "gate of the own input ({input}) -> f32: {gemm}")
            }
            Kernel::PerLayerActivate => f.write_str("activation, times the own input -> f16 rows"),
            Kernel::PerLayerProject { gemm } => {
                write!(f, "projection of the own input (rows) -> f32: {gemm}")
            }
            Kernel::PostNorm { part, scales, next } => {
                let output = match part {
                    Part::Half(which) => half(which),
                    Part::PerLayer => "the own input",
                };
                write!(f, "norm of {output}, add{}", factor(*scales))?;
                match *next {
                    None => Ok(()),
                    Some(NextInput::Normalized(norm, layout)) => {
                        write_next(f, &Some((norm, layout)))
                    }
                    Some(NextInput::Stream(_, layout)) => {
                        write!(f, ", rows -> f16 {}", layout_name(layout))
                    }
                }
            }
            Kernel::Head { input, gemm } => write!(f, "head ({input}) -> f32: {gemm}"),
            Kernel::Hidden => f.write_str("final norm -> f32, and a copy for the host"),
            Kernel::DrafterInputs => {
                f.write_str("embeddings; their norm, norm of hidden rows -> f16 rows")
            }
            Kernel::ProjectDrafterInputs { gemm } => write!(f, "fc (rows) -> f32: {gemm}"),
        }
    }
}
