//! Chooses the fused kernels that take rows through a model on a GPU, and how their GEMMs run: a pure function of the blocks, the rows, the
//! device and the weights' types. Prints as a table, which a golden test compares.

use std::fmt;

use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::{GemmPlan, Glu, Hardware, InputForm, Layout, MatrixShape, Output};
use crate::model::order::Half;
use crate::model::spec::{
    Activation, BlockSpec, ExpertsSpec, KeyValues, MixerSpec, MlpSpec, NormPlacement, Scoring, Spec,
};
use crate::tensor::WeightType;

/// A norm of the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Norm {
    /// Before the mixer of a block.
    Mixer(usize),
    /// Before the MLP of a block.
    Mlp(usize),
    /// Before the head.
    Head,
}

/// Input of a GEMM after its norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Normed {
    pub(super) norm: Norm,
    pub(super) layout: Layout,
    pub(super) applied: Applied,
}

impl Normed {
    /// The form in which the GEMM takes it.
    fn form(&self) -> InputForm {
        match self.applied {
            Applied::Before => InputForm::Plain(self.layout),
            Applied::Epilogue => InputForm::FusedNorm(self.layout),
            Applied::Prologue => InputForm::Residual,
        }
    }
}

/// The kernel that applies a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Applied {
    /// A separate kernel before the GEMM.
    Before,
    /// The epilogues of the GEMMs around the norm.
    Epilogue,
    /// The prologue of the GEMM that takes the row. It also normalizes the output of the previous half and adds it.
    Prologue,
}

/// Destination of the output of the GEMM that ends a half of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// Added to the residual stream.
    Add,
    /// Added to the residual stream, with the next norm fused into the epilogue.
    AddAndNorm(Norm),
    /// Stored for a separate norm.
    Store,
    /// Stored for a norm that the next GEMM applies.
    StoreRow,
}

/// A launch of one fused kernel, or of a few that belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    /// Normalizes the residual stream.
    Normalize { norm: Norm, layout: Layout },
    /// Queries, keys and values, f32.
    Qkv { input: Normed, gemm: GemmPlan },
    /// Normalizes and rotates heads, stores keys and values, and computes attention, for one token of each of several sequences.
    Decode { layout: Layout },
    /// Normalizes and rotates heads, and stores keys and values, for rows of one sequence.
    StoreKv,
    /// Attention of the queries rotated by [`Kernel::StoreKv`].
    Prefill,
    /// The gate of attention, f32.
    HeadGate { input: Normed, gemm: GemmPlan },
    /// Multiplies the output of attention by the sigmoid of its gate.
    GateHeads { layout: Layout },
    /// Queries, keys, values and the gate of the norm of a gated delta net, f32.
    DeltaInputs { input: Normed, gemm: GemmPlan },
    /// The projections to both gates of each value head, f32: decay, and the share of a correction that is written.
    DeltaGates { input: Normed, gemm: GemmPlan },
    /// The causal convolution, the norms of queries and keys, and the gates.
    DeltaConv,
    /// The gated delta rule, which changes the state of each sequence.
    DeltaRule,
    /// The gated norm of each value head.
    DeltaNorm { layout: Layout },
    /// Gate and up projections; in a mixture those of the shared expert. `fused` applies the activation too; otherwise the output is f16.
    GateUp {
        input: Normed,
        fused: bool,
        gemm: GemmPlan,
    },
    /// The activation of gate and up as a separate kernel.
    Activate,
    /// Routes each row to its experts, and sorts rows by expert.
    Route,
    /// Gate and up projections of the experts of each row, with the activation.
    ExpertsGateUp,
    /// Down projections of the experts of each row.
    ExpertsDown,
    /// Adds the experts' outputs to the residual stream, and applies the next norm if it is known.
    SumExperts { next: Option<(Norm, Layout)> },
    /// The projection that ends a half, with its input in `layout`.
    Project {
        half: Half,
        layout: Layout,
        then: Then,
        gemm: GemmPlan,
    },
    /// Normalizes the output of a half, adds it to the residual stream, and applies the next norm if it is known.
    PostNorm {
        half: Half,
        next: Option<(Norm, Layout)>,
    },
    /// Logits.
    Head { input: Normed, gemm: GemmPlan },
}

/// A kernel and its block; for the head, the number of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlannedKernel {
    pub(super) block: usize,
    pub(super) kernel: Kernel,
}

/// The properties of a block that the plan depends on.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct BlockShape {
    pub(super) norms: NormPlacement,
    pub(super) mixer: MixerShape,
    pub(super) mlp: MlpShape,
}

/// The projections of a mixer.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum MixerShape {
    Attention {
        qkv: [MatrixShape; 3],
        gate: Option<MatrixShape>,
        o: MatrixShape,
    },
    GatedDelta {
        /// Queries, keys and values as one, and the gate of the norm.
        inputs: [MatrixShape; 2],
        /// The gates of the rule.
        gates: [MatrixShape; 2],
        out: MatrixShape,
    },
}

impl MixerShape {
    fn matrices(&self) -> Vec<&MatrixShape> {
        match self {
            MixerShape::Attention { qkv, gate, o } => qkv.iter().chain(gate).chain([o]).collect(),
            MixerShape::GatedDelta { inputs, gates, out } => {
                inputs.iter().chain(gates).chain([out]).collect()
            }
        }
    }

    /// Queries, keys and values of attention without a gate, whose norm earlier kernels can apply.
    fn plain_attention(&self) -> Option<&[MatrixShape; 3]> {
        match self {
            MixerShape::Attention {
                qkv, gate: None, ..
            } => Some(qkv),
            _ => None,
        }
    }
}

/// The projections of a gated MLP.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct GatedShape {
    pub(super) gate_up: [MatrixShape; 2],
    pub(super) down: MatrixShape,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum MlpShape {
    Dense(GatedShape),
    /// Experts in NVFP4, and optionally a shared expert.
    Experts {
        shared: Option<GatedShape>,
    },
}

impl MlpShape {
    /// The MLP that all rows use.
    fn of_all_rows(&self) -> Option<&GatedShape> {
        match self {
            MlpShape::Dense(mlp) => Some(mlp),
            MlpShape::Experts { shared } => shared.as_ref(),
        }
    }
}

impl BlockShape {
    /// Its projections, except those of routed experts.
    pub(super) fn matrices(&self) -> impl Iterator<Item = &MatrixShape> {
        self.mixer.matrices().into_iter().chain(self.of_mlp())
    }

    fn of_mlp(&self) -> impl Iterator<Item = &MatrixShape> {
        let mlp = self.mlp.of_all_rows().into_iter();
        mlp.flat_map(|mlp| mlp.gate_up.iter().chain([&mlp.down]))
    }

    /// The layout of a half's activations: the layout of the NVFP4 GEMMs if all of the block's projections are NVFP4, else row-major. Beside
    /// a gated delta net, whose gates never are, those of the MLP decide alone. Experts gather rows, so they are row-major.
    fn layout(&self, half: Half, hardware: &Hardware, rows: usize) -> Layout {
        let gathers = half == Half::Mlp && matches!(self.mlp, MlpShape::Experts { .. });
        let is_nvfp4 = |w: &MatrixShape| w.storage == WeightType::Nvfp4;
        let are_nvfp4 = match (half, &self.mixer) {
            (Half::Mlp, MixerShape::GatedDelta { .. }) => self.of_mlp().all(is_nvfp4),
            _ => self.matrices().all(is_nvfp4),
        };
        match !gathers && are_nvfp4 {
            true => Layout::taken(hardware, rows),
            false => Layout::RowMajor,
        }
    }
}

/// A property of the model that has no fused kernel, if any.
pub(in crate::model) fn unsupported(spec: &Spec) -> Option<String> {
    let of = |(index, block): (usize, &BlockSpec)| {
        let has_bias = |experts: &ExpertsSpec| experts.expert.bias || experts.router_bias;
        let has_gates = block.mlp.specs().all(|mlp| mlp.gated);
        let what = match (&block.mixer, &block.mlp) {
            (MixerSpec::Mamba2(_), _) => "Mamba-2",
            (MixerSpec::None, _) => "an MLP alone",
            (_, MlpSpec::None) => "a mixer alone",
            (MixerSpec::Attention(attention), _) if attention.rope.is_none() => {
                "attention without rotation"
            }
            _ if !has_gates => "an MLP without a gate",
            (_, MlpSpec::Experts(experts)) if experts.scoring != Scoring::Softmax => {
                "experts scored by sigmoids"
            }
            (MixerSpec::Attention(attention), _) if attention.sinks => "attention sinks",
            (MixerSpec::Attention(attention), _)
                if attention.key_values != KeyValues::Projected =>
            {
                "attention without projections of keys and values"
            }
            (MixerSpec::Attention(attention), _) if attention.value_norm => "a norm of its values",
            (_, MlpSpec::DenseAndExperts(..)) => "experts beside an MLP",
            _ if block.per_layer.is_some() => "an input of its own",
            _ if block.scaled => "a factor of its residual stream",
            _ if block.mlp.is_clamped() => "a clamped SwiGLU",
            (_, MlpSpec::Experts(experts)) if has_bias(experts) => "biases of its experts",
            (_, MlpSpec::Experts(_)) if block.norms.post => "a norm after its experts",
            _ if !block.norms.pre => "no norm before attention and MLP",
            _ => return None,
        };
        Some(format!(
            "block {index} of this {} model has {what}",
            spec.family
        ))
    };
    spec.blocks.iter().enumerate().find_map(of)
}

/// Fails for a model that no fused kernel supports; the error names the unsupported property.
pub(in crate::model) fn check_supported(spec: &Spec) -> Result<()> {
    match unsupported(spec) {
        None => Ok(()),
        Some(what) => bail!(Unsupported, "{what}, for which there is no kernel on a GPU"),
    }
}

/// The kernels that take `rows` rows through all blocks: either a decode step, one token of each of `rows` sequences, with the logits at
/// the end; or consecutive rows of one sequence.
pub(super) fn plan(
    blocks: &[BlockShape],
    head: MatrixShape,
    rows: usize,
    is_step: bool,
    hardware: &Hardware,
) -> Result<Vec<PlannedKernel>> {
    let mut planner = Planner {
        blocks,
        head,
        rows,
        is_step,
        hardware,
        steps: Vec::new(),
        known: None,
        in_prologue: false,
    };
    planner.in_prologue = planner.makes_rows_in_prologues();
    for index in 0..blocks.len() {
        planner.mixer(index)?;
        planner.mlp(index)?;
    }
    if is_step {
        let input = planner.normed(Norm::Head, blocks.len());
        let gemm = self::head(head, &input, rows, hardware)?;
        planner.push(blocks.len(), Kernel::Head { input, gemm });
    }
    Ok(planner.steps)
}

/// How the logits of some rows are computed.
pub(super) fn head(
    head: MatrixShape,
    input: &Normed,
    rows: usize,
    hardware: &Hardware,
) -> Result<GemmPlan> {
    GemmPlan::choose(hardware, rows, &[head], Output::F32, input.form())
}

/// The layout of the head's input for the logits of some rows of a prompt.
pub(super) fn head_layout(head: MatrixShape, rows: usize, hardware: &Hardware) -> Layout {
    match head.storage {
        WeightType::Nvfp4 => Layout::taken(hardware, rows),
        _ => Layout::RowMajor,
    }
}

struct Planner<'a> {
    blocks: &'a [BlockShape],
    head: MatrixShape,
    rows: usize,
    is_step: bool,
    hardware: &'a Hardware,
    steps: Vec<PlannedKernel>,
    /// The norm that earlier kernels have already prepared, and where it is applied.
    known: Option<(Norm, Applied)>,
    /// Whether every norm after a half of a block is applied by the next GEMM.
    in_prologue: bool,
}

impl Planner<'_> {
    fn push(&mut self, block: usize, kernel: Kernel) {
        self.steps.push(PlannedKernel { block, kernel });
    }

    fn layout_of(&self, norm: Norm) -> Layout {
        match norm {
            Norm::Mixer(i) => self.blocks[i].layout(Half::Mixer, self.hardware, self.rows),
            Norm::Mlp(i) => self.blocks[i].layout(Half::Mlp, self.hardware, self.rows),
            Norm::Head => head_layout(self.head, self.rows, self.hardware),
        }
    }

    /// The normalized input of GEMMs. A separate kernel applies the norm unless earlier kernels have.
    fn normed(&mut self, norm: Norm, block: usize) -> Normed {
        let layout = self.layout_of(norm);
        let known = self.known.take().filter(|(known, _)| *known == norm);
        if known.is_none() {
            self.push(block, Kernel::Normalize { norm, layout });
        }
        Normed {
            norm,
            layout,
            applied: known.map_or(Applied::Before, |(_, applied)| applied),
        }
    }

    fn gemm(&self, matrices: &[MatrixShape], output: Output, form: InputForm) -> Result<GemmPlan> {
        GemmPlan::choose(self.hardware, self.rows, matrices, output, form)
    }

    /// The GEMM of these rows, if a kernel serves it.
    fn served(
        &self,
        matrices: &[MatrixShape],
        output: Output,
        form: InputForm,
    ) -> Option<GemmPlan> {
        GemmPlan::find(self.hardware, self.rows, matrices, output, form)
    }

    fn mixer(&mut self, block: usize) -> Result<()> {
        let layout = self.layout_of(Norm::Mixer(block));
        let input = self.normed(Norm::Mixer(block), block);
        match self.blocks[block].mixer.clone() {
            MixerShape::Attention { qkv, gate, o } => {
                self.attention(block, layout, input, (qkv, gate), o)
            }
            MixerShape::GatedDelta { inputs, gates, out } => {
                let gemm = self.gemm(&inputs, Output::F32, input.form())?;
                self.push(block, Kernel::DeltaInputs { input, gemm });
                let gemm = self.gemm(&gates, Output::F32, input.form())?;
                self.push(block, Kernel::DeltaGates { input, gemm });
                self.push(block, Kernel::DeltaConv);
                self.push(block, Kernel::DeltaRule);
                self.push(block, Kernel::DeltaNorm { layout });
                self.end(block, Half::Mixer, out, layout, Norm::Mlp(block))
            }
        }
    }

    fn attention(
        &mut self,
        block: usize,
        layout: Layout,
        input: Normed,
        (qkv, gate): ([MatrixShape; 3], Option<MatrixShape>),
        o: MatrixShape,
    ) -> Result<()> {
        let gemm = self.gemm(&qkv, Output::F32, input.form())?;
        self.push(block, Kernel::Qkv { input, gemm });
        if let Some(gate) = gate {
            let gemm = self.gemm(&[gate], Output::F32, input.form())?;
            self.push(block, Kernel::HeadGate { input, gemm });
        }
        let attended = match self.is_step {
            true => {
                self.push(block, Kernel::Decode { layout });
                layout
            }
            false => {
                self.push(block, Kernel::StoreKv);
                self.push(block, Kernel::Prefill);
                Layout::RowMajor
            }
        };
        if gate.is_some() {
            self.push(block, Kernel::GateHeads { layout: attended });
        }
        self.end(block, Half::Mixer, o, attended, Norm::Mlp(block))
    }

    fn mlp(&mut self, block: usize) -> Result<()> {
        let input = self.normed(Norm::Mlp(block), block);
        let next = match block + 1 < self.blocks.len() {
            true => Norm::Mixer(block + 1),
            false => Norm::Head,
        };
        match &self.blocks[block].mlp {
            MlpShape::Dense(mlp) => {
                let layout = self.gate_up(block, mlp, input)?;
                self.end(block, Half::Mlp, mlp.down, layout, next)
            }
            MlpShape::Experts { shared } => {
                self.push(block, Kernel::Route);
                if let Some(mlp) = shared {
                    let layout = self.gate_up(block, mlp, input)?;
                    self.project(block, Half::Mlp, mlp.down, layout, Then::Store)?;
                }
                self.push(block, Kernel::ExpertsGateUp);
                self.push(block, Kernel::ExpertsDown);
                let next = self.normalized_next(next);
                self.push(block, Kernel::SumExperts { next });
                Ok(())
            }
        }
    }

    /// Gate, up and the activation; returns the layout of their output.
    fn gate_up(&mut self, block: usize, mlp: &GatedShape, input: Normed) -> Result<Layout> {
        let (layout, form) = (input.layout, input.form());
        let glu = self.served(&mlp.gate_up, layout.glu(Glu::default()), form);
        let (fused, gemm) = match glu {
            Some(gemm) => (true, gemm),
            None => (false, self.gemm(&mlp.gate_up, Output::F16, form)?),
        };
        self.push(block, Kernel::GateUp { input, fused, gemm });
        match fused {
            true => Ok(layout),
            false => {
                self.push(block, Kernel::Activate);
                Ok(Layout::RowMajor)
            }
        }
    }

    /// The next norm, if the preceding kernel can apply it.
    fn normalized_next(&mut self, next: Norm) -> Option<(Norm, Layout)> {
        // The head takes only some rows of a prompt.
        let is_known = self.is_step || next != Norm::Head;
        let next = is_known.then(|| (next, self.layout_of(next)));
        self.known = next.map(|(norm, _)| (norm, Applied::Before));
        next
    }

    /// The projection by a matrix that ends a half.
    fn project(
        &mut self,
        block: usize,
        half: Half,
        matrix: MatrixShape,
        layout: Layout,
        then: Then,
    ) -> Result<()> {
        let output = match then {
            Then::Add | Then::AddAndNorm(_) => Output::Add,
            Then::Store | Then::StoreRow => Output::F32,
        };
        let kernel = Kernel::Project {
            half,
            layout,
            then,
            gemm: self.gemm(&[matrix], output, InputForm::Plain(layout))?,
        };
        self.push(block, kernel);
        Ok(())
    }

    /// Ends a half with its projection. Records how far it prepares the next norm.
    fn end(
        &mut self,
        block: usize,
        half: Half,
        matrix: MatrixShape,
        layout: Layout,
        next: Norm,
    ) -> Result<()> {
        let then = if self.in_prologue {
            self.known = Some((next, Applied::Prologue));
            Then::StoreRow
        } else if self.blocks[block].norms.post {
            Then::Store
        } else if self.is_step && self.fuses_norm(matrix, layout, next) {
            self.known = Some((next, Applied::Epilogue));
            Then::AddAndNorm(next)
        } else {
            Then::Add
        };
        self.project(block, half, matrix, layout, then)?;
        if then == Then::Store {
            let next = self.normalized_next(next);
            self.push(block, Kernel::PostNorm { half, next });
        }
        Ok(())
    }

    /// Whether a single row goes through blocks with a norm after each half, and GEMMs can compute these norms in their prologues.
    fn makes_rows_in_prologues(&self) -> bool {
        let serves = |takes: &[MatrixShape], output| {
            self.served(takes, output, InputForm::Residual).is_some()
        };
        let glu = Output::Glu(Glu::default());
        self.is_step
            && serves(&[self.head], Output::F32)
            && self
                .blocks
                .iter()
                .all(|block| match (&block.mlp, block.mixer.plain_attention()) {
                    (MlpShape::Dense(mlp), Some(qkv)) if block.norms.post => {
                        let rows =
                            |half| block.layout(half, self.hardware, self.rows) == Layout::RowMajor;
                        rows(Half::Mixer)
                            && rows(Half::Mlp)
                            && serves(qkv, Output::F32)
                            && serves(&mlp.gate_up, glu)
                    }
                    _ => false,
                })
    }

    /// Whether the GEMMs around a norm apply it: the one with `makes`, whose input has this layout, and those that take the norm.
    fn fuses_norm(&self, makes: MatrixShape, layout: Layout, next: Norm) -> bool {
        let serves = |takes: &[MatrixShape], output| {
            let form = InputForm::FusedNorm(layout);
            GemmPlan::before_norm(self.hardware, self.rows, makes, layout).is_some()
                && self.served(takes, output, form).is_some()
        };
        let same_layout = layout == self.layout_of(next);
        same_layout
            && match next {
                Norm::Mlp(i) => match &self.blocks[i].mlp {
                    MlpShape::Dense(mlp) => serves(&mlp.gate_up, layout.glu(Glu::default())),
                    MlpShape::Experts { .. } => false,
                },
                Norm::Mixer(i) => match self.blocks[i].mixer.plain_attention() {
                    Some(qkv) => serves(qkv, Output::F32),
                    None => false,
                },
                Norm::Head => serves(&[self.head], Output::F32),
            }
    }
}

impl fmt::Display for Norm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Norm::Mixer(_) => "attention",
            Norm::Mlp(_) => "mlp",
            Norm::Head => "head",
        })
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

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let half = |half: &Half| match half {
            Half::Mixer => "o",
            Half::Mlp => "down",
        };
        match self {
            Kernel::Normalize { norm, layout } => {
                write!(f, "{norm} norm -> f16 {}", layout_name(*layout))
            }
            Kernel::Qkv { input, gemm } => write!(f, "q, k, v ({input}) -> f32: {gemm}"),
            Kernel::Decode { layout } => {
                write!(
                    f,
                    "rope, store, split-KV attention -> {}",
                    layout_name(*layout)
                )
            }
            Kernel::HeadGate { input, gemm } => write!(f, "gate of heads ({input}) -> f32: {gemm}"),
            Kernel::GateHeads { layout } => {
                write!(f, "times sigmoid of the gate -> {}", layout_name(*layout))
            }
            Kernel::DeltaInputs { input, gemm } => write!(f, "qkv, z ({input}) -> f32: {gemm}"),
            Kernel::DeltaGates { input, gemm } => write!(f, "b, a ({input}) -> f32: {gemm}"),
            Kernel::DeltaConv => f.write_str("convolution, norms of q and k, gates"),
            Kernel::DeltaRule => f.write_str("gated delta rule"),
            Kernel::DeltaNorm { layout } => {
                write!(f, "gated norm of heads -> {}", layout_name(*layout))
            }
            Kernel::StoreKv => f.write_str("rope, store"),
            Kernel::Prefill => f.write_str("flash attention -> rows"),
            Kernel::GateUp { input, fused, gemm } => {
                let glu = if *fused { ", GLU" } else { "" };
                write!(f, "gate, up{glu} ({input}) -> f16: {gemm}")
            }
            Kernel::Activate => f.write_str("GLU -> f16 rows"),
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
            Kernel::Route => f.write_str("router, top-k, rows by expert"),
            Kernel::ExpertsGateUp => f.write_str("experts' gate, up, GLU (gathered rows) -> f16"),
            Kernel::ExpertsDown => f.write_str("experts' down -> f32"),
            Kernel::SumExperts { next } => {
                f.write_str("weighted sum of experts, add")?;
                write_next(f, next)
            }
            Kernel::PostNorm { half: which, next } => {
                write!(f, "norm of {}, add", half(which))?;
                write_next(f, next)
            }
            Kernel::Head { input, gemm } => write!(f, "head ({input}) -> f32: {gemm}"),
        }
    }
}

/// The kernels' description of a gated activation.
pub(super) fn glu(activation: Activation, divisor: u32) -> Result<Glu> {
    Ok(Glu {
        activation: activation.on_gpu()?,
        divisor,
    })
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;
    use crate::cuda::WideClusters;
    use crate::model::order::{BlockOp, operations};
    use crate::model::spec::{
        AttentionSpec, DeltaProjections, DenseMlpSpec, ExpertNames, GatedDeltaSpec, MixerSpec,
        SharedExpertSpec,
    };
    use crate::tensor::DeltaShape;

    const H200: Hardware = Hardware {
        arch: (9, 0),
        multiprocessors: 132,
        shared_limit: 227 << 10,
        cublas: true,
        clusters: WideClusters::unconstrained(132),
    };
    const GB10: Hardware = Hardware {
        arch: (12, 1),
        multiprocessors: 48,
        shared_limit: 99 << 10,
        cublas: true,
        clusters: WideClusters::unconstrained(0),
    };

    struct Sizes {
        hidden: usize,
        q: usize,
        kv: usize,
        intermediate: usize,
        vocab: usize,
        post: bool,
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
        post: false,
        experts: None,
        recurrent: false,
    };
    const GEMMA3_4B: Sizes = Sizes {
        hidden: 2560,
        q: 2048,
        kv: 1024,
        intermediate: 10_240,
        vocab: 262_208,
        post: true,
        experts: None,
        recurrent: false,
    };
    const QWEN3_30B_A3B: Sizes = Sizes {
        hidden: 2048,
        q: 4096,
        kv: 512,
        intermediate: 0,
        vocab: 151_936,
        post: false,
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
        post: false,
        experts: None,
        recurrent: true,
    };
    const QWEN2_57B_A14B: Sizes = Sizes {
        hidden: 3584,
        q: 3584,
        kv: 512,
        intermediate: 20_480,
        vocab: 151_936,
        post: false,
        experts: Some(true),
        recurrent: false,
    };

    /// Three blocks and the head, with weights of this type.
    fn model(s: &Sizes, storage: WeightType) -> (Vec<BlockShape>, MatrixShape) {
        let shape = |rows, cols| MatrixShape {
            storage,
            rows,
            cols,
        };
        let mlp = GatedShape {
            gate_up: [shape(s.intermediate, s.hidden); 2],
            down: shape(s.hidden, s.intermediate),
        };
        let block = BlockShape {
            norms: NormPlacement {
                pre: true,
                post: s.post,
            },
            mixer: MixerShape::Attention {
                qkv: [s.q, s.kv, s.kv].map(|rows| shape(rows, s.hidden)),
                gate: None,
                o: shape(s.hidden, s.q),
            },
            mlp: match s.experts {
                None => MlpShape::Dense(mlp),
                Some(shared) => MlpShape::Experts {
                    shared: shared.then_some(mlp),
                },
            },
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
                    inputs: [2 * values, values].map(|rows| of(rows, s.hidden, int8)),
                    gates: [of(32, s.hidden, WeightType::BF16); 2],
                    out: of(s.hidden, values, int8),
                };
            }
            if let MixerShape::Attention { gate, .. } = &mut blocks[2].mixer {
                *gate = Some(shape(s.q, s.hidden));
            }
        }
        (blocks, shape(s.vocab, s.hidden))
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
            Norm::Head => Vec::new(),
        };
        let next = |next: &Option<(Norm, Layout)>| next.map_or(Vec::new(), |(norm, _)| enter(norm));
        // The prologue of a GEMM leaves the previous half, and enters its own.
        let prologue = |input: &Normed| match (input.applied, input.norm) {
            (Applied::Before | Applied::Epilogue, _) => Vec::new(),
            (Applied::Prologue, norm) => {
                let (before, half) = match norm {
                    Norm::Mlp(i) => (i, Half::Mixer),
                    Norm::Mixer(i) => (i - 1, Half::Mlp),
                    Norm::Head => (blocks.len() - 1, Half::Mlp),
                };
                [vec![(before, BlockOp::Leave(half))], enter(norm)].concat()
            }
        };
        let own = |ops: &[BlockOp]| ops.iter().map(|&op| (block, op)).collect::<Vec<_>>();
        match &step.kernel {
            Kernel::Normalize { norm, .. } => enter(*norm),
            Kernel::Qkv { input, .. } => [prologue(input), own(&[BlockOp::Qkv])].concat(),
            Kernel::Decode { .. } => own(&[BlockOp::Heads, BlockOp::Attend]),
            // Parts of operations that the next kernel completes.
            Kernel::HeadGate { .. } | Kernel::DeltaInputs { .. } => Vec::new(),
            Kernel::GateHeads { .. } => own(&[BlockOp::GateHeads]),
            Kernel::DeltaGates { .. } => own(&[BlockOp::DeltaInputs]),
            Kernel::DeltaConv => own(&[BlockOp::Convolve]),
            Kernel::DeltaRule => own(&[BlockOp::DeltaRule]),
            Kernel::DeltaNorm { .. } => own(&[BlockOp::DeltaNorm]),
            Kernel::StoreKv => own(&[BlockOp::Heads]),
            Kernel::Prefill => own(&[BlockOp::Attend]),
            Kernel::GateUp { .. } | Kernel::Activate if is_mixture(Half::Mlp) => Vec::new(),
            Kernel::GateUp { input, fused, .. } => {
                let ops = [BlockOp::GateUp, BlockOp::Activate];
                [prologue(input), own(&ops[..1 + usize::from(*fused)])].concat()
            }
            Kernel::Activate => own(&[BlockOp::Activate]),
            Kernel::Route => own(&[BlockOp::Route]),
            Kernel::ExpertsGateUp | Kernel::ExpertsDown => Vec::new(),
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
            Kernel::PostNorm { half, next: norm } => {
                [own(&[BlockOp::Leave(*half)]), next(norm)].concat()
            }
            Kernel::Head { input, .. } => prologue(input),
        }
    }

    /// The operations of all blocks, in the order of `order`.
    fn expected(sizes: &Sizes, blocks: usize) -> Vec<(usize, BlockOp)> {
        let mlp = DenseMlpSpec {
            intermediate_size: sizes.intermediate,
            gated: true,
            activation: Activation::Silu,
            bias: false,
        };
        let spec = BlockSpec {
            norms: NormPlacement {
                pre: true,
                post: sizes.post,
            },
            mixer: MixerSpec::Attention(AttentionSpec {
                heads: 1,
                kv_heads: 1,
                head_dim: sizes.q,
                key_values: KeyValues::Projected,
                qk_norm: true,
                value_norm: false,
                qkv_bias: false,
                o_bias: false,
                gated: sizes.recurrent,
                sinks: false,
                rope: Some(0),
                window: None,
                scale: 1.0,
                score_cap: None,
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
                shape: DeltaShape {
                    key_heads: 16,
                    value_heads: 32,
                    key_dim: 128,
                    value_dim: 128,
                    taps: 4,
                },
                projections: DeltaProjections::ByRole,
            }),
            ..spec.clone()
        };
        let of_block = |block| {
            let is_recurrent = sizes.recurrent && block < 2;
            let spec = if is_recurrent { &recurrent } else { &spec };
            operations(spec).map(move |op| (block, op))
        };
        (0..blocks).flat_map(of_block).collect()
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

    /// Every kind of plan, as recorded in `plan.txt` beside this file, which shows every change of kernels or of their choice. Each plan
    /// runs the operations of blocks in the order of `order`.
    #[test]
    fn plans_are_as_written_down() {
        let mut table = String::new();
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
        ] {
            let (blocks, head) = model(sizes, storage);
            for (rows, is_step) in [
                (1, true),
                (8, true),
                (16, true),
                (64, true),
                (200, true),
                (1, false),
                (40, false),
                (4096, false),
            ] {
                let kind = if is_step { "a step" } else { "a prompt" };
                writeln!(table, "{name}, {kind} of {rows}").unwrap();
                let steps = plan(&blocks, head, rows, is_step, hardware).unwrap();
                table.push_str(&printed(&steps));
                let completed = steps.iter().flat_map(|step| completed(step, &blocks));
                let completed: Vec<_> = completed.collect();
                assert_eq!(
                    completed,
                    expected(sizes, blocks.len()),
                    "{name}, {kind} of {rows}"
                );
            }
        }
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/model/fused/plan.txt");
        let expected = std::fs::read_to_string(path).unwrap_or_default();
        if table != expected {
            let got = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("target/plan.txt");
            std::fs::write(&got, &table).unwrap();
            panic!("plans have changed: compare {} with {path}", got.display());
        }
    }
}
