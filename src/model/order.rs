//! The operations of a decoder block, in the order of the forward pass: the only definition of that order. The reference block (`block`)
//! and training's forward, recompute and backward (`training::block`) interpret the list; the kernels of `fused::plan` are tested against
//! it.

use super::spec::{BlockSpec, ExpertsSpec, MixerSpec, MlpSpec};

/// The two halves of a block. Each adds its output to the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Half {
    Mixer,
    Mlp,
}

/// An operation of a decoder block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockOp {
    /// Computes the input of a half from the residual stream, normalized in blocks with a norm before it.
    Enter(Half),
    /// Projections of queries, and of keys and values in blocks that do not take those of another.
    Qkv,
    /// Norms of the heads of queries, keys and values, in blocks that have them, and RoPE of queries and keys.
    Heads,
    /// Attention over the keys and values of each row's sequence.
    Attend,
    /// Multiplies the output of attention by the sigmoid of its gate, in blocks that have one.
    GateHeads,
    /// Projections of a gated delta net: queries, keys, values and gates.
    DeltaInputs,
    /// The causal convolution of queries, keys and values, and the norms of queries and keys.
    Convolve,
    /// The gated delta rule, which changes the state of each row's sequence.
    DeltaRule,
    /// The gated norm of each head of a gated delta net.
    DeltaNorm,
    /// Projections of Mamba-2: x, B and C, the gate of the norm, and the time steps.
    MambaInputs,
    /// The causal convolution of x, B and C.
    MambaConvolve,
    /// The recurrence of Mamba-2, which changes the state of each row's sequence.
    MambaScan,
    /// The gate of Mamba-2's output, and then its norm.
    MambaNorm,
    /// Projections of gate and up, or of up alone in an MLP without a gate.
    GateUp,
    /// The activation, gated or not.
    Activate,
    /// The last projection of a half.
    Project(Half),
    /// The choice of experts for each row.
    Route,
    /// The experts in the order of [`expert_turns`]. Each runs [`BlockOp::GateUp`], [`BlockOp::Activate`] and [`BlockOp::Project`] on its
    /// rows.
    Experts,
    /// Normalizes the output of the dense MLP beside experts, and computes the experts' input from the residual stream.
    EnterExperts,
    /// Normalizes the sum of the experts and adds it to the output of the dense MLP.
    LeaveExperts,
    /// Adds the output of a half to the residual stream, normalized in blocks with a norm after it.
    Leave(Half),
    /// The gate of the block's own input, from the residual stream, and their product.
    PerLayerGate,
    /// The projection of that product.
    PerLayerProject,
    /// Normalizes the projection and adds it to the residual stream.
    PerLayerLeave,
    /// Multiplies the residual stream by the block's factor.
    ScaleStream,
}

/// The operations of a block.
pub(super) fn operations(block: &BlockSpec) -> impl DoubleEndedIterator<Item = BlockOp> + use<> {
    use BlockOp::{
        Activate, Attend, Convolve, DeltaInputs, DeltaNorm, DeltaRule, Enter, EnterExperts,
        Experts, GateHeads, GateUp, Heads, Leave, LeaveExperts, MambaConvolve, MambaInputs,
        MambaNorm, MambaScan, PerLayerGate, PerLayerLeave, PerLayerProject, Project, Qkv, Route,
        ScaleStream,
    };
    let mixer: &'static [BlockOp] = match &block.mixer {
        MixerSpec::Attention(attention) if attention.gated => &[Qkv, Heads, Attend, GateHeads],
        MixerSpec::Attention(_) => &[Qkv, Heads, Attend],
        MixerSpec::GatedDelta(_) => &[DeltaInputs, Convolve, DeltaRule, DeltaNorm],
        MixerSpec::Mamba2(_) => &[MambaInputs, MambaConvolve, MambaScan, MambaNorm],
        MixerSpec::None => &[],
    };
    let mlp: &'static [BlockOp] = match block.mlp {
        MlpSpec::Dense(_) => &[GateUp, Activate, Project(Half::Mlp)],
        MlpSpec::Experts(_) => &[Route, Experts],
        MlpSpec::DenseAndExperts(..) => &[
            GateUp,
            Activate,
            Project(Half::Mlp),
            Route,
            EnterExperts,
            Experts,
            LeaveExperts,
        ],
        MlpSpec::None => &[],
    };
    // A half that is left out has no operations at all.
    let half = |ops: &'static [BlockOp], [first, last]: [&'static [BlockOp]; 2]| match ops {
        [] => [ops; 3],
        _ => [first, ops, last],
    };
    let mixer = half(
        mixer,
        [
            &[Enter(Half::Mixer)],
            &[Project(Half::Mixer), Leave(Half::Mixer)],
        ],
    );
    let mlp = half(mlp, [&[Enter(Half::Mlp)], &[Leave(Half::Mlp)]]);
    let per_layer: &'static [BlockOp] = match block.per_layer {
        Some(_) => &[PerLayerGate, PerLayerProject, PerLayerLeave],
        None => &[],
    };
    let scale: &'static [BlockOp] = match block.scaled {
        true => &[ScaleStream],
        false => &[],
    };
    let parts = [mixer, mlp, [per_layer, scale, &[]]];
    parts.into_iter().flatten().flatten().copied()
}

/// A gated MLP of a mixture, with its output added to the sum of the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpertTurn {
    /// An expert, with the rows that were routed to it.
    Routed(usize),
    /// The shared expert, which every row uses.
    Shared,
}

/// The experts of a mixture in the order of summation, which for a row does not depend on other rows.
pub(super) fn expert_turns(spec: &ExpertsSpec) -> impl Iterator<Item = ExpertTurn> + use<> {
    let shared = spec.shared.map(|_| ExpertTurn::Shared);
    (0..spec.count).map(ExpertTurn::Routed).chain(shared)
}
