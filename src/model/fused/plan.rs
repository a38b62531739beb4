//! Chooses the fused kernels that take rows through a model on a GPU, and how their GEMMs run: a pure function of the blocks, the rows, the
//! device and the weights' types. Prints as a table, which a golden test compares.

pub(super) mod adapted;
mod display;
pub(super) mod drafter;

use std::ops::Range;

use super::shapes::{BlockShape, DenseShape, MixerShape, MlpShape, ModelShape, RoutedShape};
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::cuda::{
    self, DecodePlan, ExpertsPlan, GemmPlan, Glu, Hardware, InputForm, Layout, MatrixShape, Output,
    RoutePlan,
};
use crate::model::adapter::{AdaptedPart, Adapts};
use crate::model::order::Half;
use crate::model::spec::{Activation, NormPlacement};
use crate::tensor::{DeltaShape, WeightType};

/// A norm of the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Norm {
    /// Before the mixer of a block; in one without a norm before it, the residual stream as it is.
    Mixer(usize),
    /// Before the MLP of a block; in one without a norm before it, the residual stream as it is.
    Mlp(usize),
    /// Before the router of the experts beside an MLP.
    Router(usize),
    /// Before the experts beside an MLP.
    Experts(usize),
    /// Before the gate of a block's own input: without a weight, and undone after the product, whose input has to fit f16.
    PerLayer(usize),
    /// Before the head.
    Head,
}

/// A part of a block, whose output is added to the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Its mixer or MLP.
    Half(Half),
    /// Its own input.
    PerLayer,
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
            Applied::OnLoad => InputForm::Normalized,
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
    /// The prologue of the GEMM that takes the rows, with the bits of the separate kernel.
    OnLoad,
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

/// The input that a kernel makes of the residual stream for the part with the given norm, in a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextInput {
    /// Normalized rows.
    Normalized(Norm, Layout),
    /// Rows as they are, because the block does not have the norm.
    Stream(Norm, Layout),
}

/// A launch of one fused kernel, or of a few that belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    /// The blocks' own inputs, f32: normalizes and projects the embeddings, and adds the rows of a table.
    LayerInputs { gemm: GemmPlan },
    /// Normalizes the residual stream.
    Normalize { norm: Norm, layout: Layout },
    /// The residual stream as f16, in the place of a norm that the block does not have.
    Convert { norm: Norm, layout: Layout },
    /// Queries, and the keys and values that the layer has itself, f32.
    Qkv { input: Normed, gemm: GemmPlan },
    /// Normalizes the queries together, and the keys.
    NormProjections,
    /// Normalizes and rotates heads, stores keys and values, and computes attention, for one token of each of several sequences.
    Decode { layout: Layout, plan: DecodePlan },
    /// Normalizes and rotates keys, and stores keys and values, for a row of each of several sequences, or for several rows of each whose
    /// blocks are listed for each row. With `before`, at the position before each row's.
    StoreRows { before: bool },
    /// Normalizes and rotates heads, and computes attention, for rows whose keys and values [`Kernel::StoreRows`] has stored.
    DecodeStored { layout: Layout, plan: DecodePlan },
    /// Normalizes and rotates heads, and stores keys and values, for rows of one sequence.
    StoreKv,
    /// [`Kernel::Decode`] of the single tokens, if there are any, and attention of the queries rotated by [`Kernel::StoreKv`].
    Prefill { singles: Option<DecodePlan> },
    /// As [`Kernel::Prefill`], each row with the bits that it has as a single token.
    AttendRows { singles: Option<DecodePlan> },
    /// The gate of attention, f32.
    HeadGate { input: Normed, gemm: GemmPlan },
    /// Multiplies the output of attention by the sigmoid of its gate.
    GateHeads { layout: Layout },
    /// Queries, keys, values and the gate of the norm of a gated delta net, f32; and where one GEMM serves all, [`Kernel::DeltaGates`] too.
    DeltaInputs {
        input: Normed,
        gemm: GemmPlan,
        gates: bool,
    },
    /// The projections to both gates of each value head, f32: decay, and the share of a correction that is written.
    DeltaGates { input: Normed, gemm: GemmPlan },
    /// The causal convolution, the norms of queries and keys, and the gates. `apart` says whether [`Kernel::DeltaGates`] made their
    /// projections.
    DeltaConv { apart: bool },
    /// The gated delta rule, which changes the state of each sequence.
    DeltaRule {
        /// Whether each row is a sequence of its own.
        single: bool,
    },
    /// The gated norm of each value head.
    DeltaNorm { layout: Layout },
    /// [`Kernel::DeltaConv`], [`Kernel::DeltaRule`] and [`Kernel::DeltaNorm`] of a step in one.
    DeltaStep { layout: Layout, apart: bool },
    /// The gate of the norm of Mamba-2, then x, B and C, and what time steps come of, f32.
    MambaInputs { input: Normed, gemm: GemmPlan },
    /// The causal convolution, and the time steps.
    MambaConv,
    /// The recurrence of Mamba-2, which changes the state of each sequence.
    MambaScan,
    /// The gate of Mamba-2's output, and the norm of each group.
    MambaNorm { layout: Layout },
    /// Gate and up projections; in a mixture those of the shared expert. `fused` applies the activation too; otherwise the output is f16.
    GateUp {
        input: Normed,
        fused: bool,
        gemm: GemmPlan,
    },
    /// Gate and up projections, f32, before [`Kernel::ActivateAdapted`].
    AdaptedGateUp { input: Normed, gemm: GemmPlan },
    /// The activation of gate and up as a separate kernel.
    Activate,
    /// Adds the products of B factors to gate and up, which are f16 or f32, and applies the activation.
    /// With `others_are_done` only for rows that adapters change, because [`Kernel::GateUp`] has run for all.
    ActivateAdapted {
        layout: Layout,
        is_f16: bool,
        others_are_done: bool,
    },
    /// Multiplies the input of a part's projections, in `layout`, by A factors, for rows with adapters. Follows the part's GEMM.
    Shrink { part: AdaptedPart, layout: Layout },
    /// Adds the products of B factors to the outputs of a part's projections. `added` says whether they are in the residual stream.
    Expand { part: AdaptedPart, added: bool },
    /// As [`Kernel::Expand`] to the residual stream, and applies the next norm.
    ExpandNorm {
        part: AdaptedPart,
        norm: Norm,
        layout: Layout,
    },
    /// The projection before the activation of an MLP without a gate, f16; in a mixture that of the shared expert.
    Up { input: Normed, gemm: GemmPlan },
    /// The squared ReLU of an MLP without a gate.
    Square,
    /// Logits of each row's experts, and of the gate of the shared one, f32.
    Router { gemm: GemmPlan },
    /// Routes each row to its experts, and sorts rows by expert.
    Route { plan: RoutePlan },
    /// Projections of the experts of each row, by gate and up or by up alone, with the activation.
    ExpertsGateUp { gated: bool, plan: ExpertsPlan },
    /// Down projections of the experts of each row.
    ExpertsDown { plan: ExpertsPlan },
    /// Adds the experts' outputs to the residual stream, and applies the next norm if it is known.
    SumExperts { next: Option<(Norm, Layout)> },
    /// Normalizes the sum of the experts' outputs and the output of the MLP beside them, and their sum, and adds it to the residual stream;
    /// multiplies that by the block's factor if `scales`, and applies the next norm if it is known.
    SumBeside {
        scales: bool,
        next: Option<(Norm, Layout)>,
    },
    /// The projection that ends a half, with its input in `layout`.
    Project {
        half: Half,
        layout: Layout,
        then: Then,
        gemm: GemmPlan,
    },
    /// The gate of a block's own input, f32.
    PerLayerGate { input: Normed, gemm: GemmPlan },
    /// The activation of that gate, times the input, f16.
    PerLayerActivate,
    /// The projection of that product, f32.
    PerLayerProject { gemm: GemmPlan },
    /// Normalizes the output of a part, adds it to the residual stream, multiplies that by the block's factor if `scales`, and makes the
    /// input of the next part if it is known.
    PostNorm {
        part: Part,
        scales: bool,
        next: Option<NextInput>,
    },
    /// Logits.
    Head { input: Normed, gemm: GemmPlan },
    /// The residual stream after the final norm, f32: hidden rows, from which the drafter guesses.
    Hidden,
    /// Embeddings of tokens, and their norms beside those of hidden rows: the input of the drafter's projection.
    DrafterInputs,
    /// The drafter's projection of both, which begins its residual stream.
    ProjectDrafterInputs { gemm: GemmPlan },
}

/// The rows that go through blocks together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rows {
    /// Single tokens of sequences, and consecutive tokens of others. Logits of some rows are computed apart.
    Ragged,
    /// A decode step: one token of each sequence, with its logits.
    Step,
    /// Several tokens of each sequence, with the logits of all. Keys and values of all rows are stored before any is read.
    Verification,
}

/// A kernel and its block; for the head, the number of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlannedKernel {
    pub(super) block: usize,
    pub(super) kernel: Kernel,
}

/// The kernels that take `rows` rows through the blocks `own` of a model, with the logits of all rows at the end unless they are
/// [`Rows::Ragged`]. Adapters of some rows may change the parts `adapts`, whose norms and activations are separate kernels. `decodes` says how
/// single tokens attend, by [`MixerShape::Attention`]'s `kind`; it is empty if there are none.
pub(super) fn plan(
    model: &ModelShape,
    own: Range<usize>,
    rows: usize,
    kind: Rows,
    adapts: Adapts,
    decodes: &[DecodePlan],
    hardware: &Hardware,
) -> Result<Vec<PlannedKernel>> {
    let (blocks, head) = (&model.blocks[..], model.head);
    let mut planner = Planner {
        blocks,
        own: own.clone(),
        head,
        rows,
        kind,
        adapts,
        decodes,
        hardware,
        steps: Vec::new(),
        known: None,
        has_factors: false,
        in_prologue: false,
    };
    planner.in_prologue = adapts == Adapts::NOTHING && planner.makes_rows_in_prologues();
    if let Some(matrix) = model.layer_inputs.filter(|_| own.start == 0) {
        let gemm = planner.gemm(&[matrix], Output::F32, InputForm::Plain(Layout::RowMajor))?;
        planner.push(0, Kernel::LayerInputs { gemm });
    }
    for index in own.clone() {
        for half in blocks[index].halves() {
            match half {
                Half::Mixer => planner.mixer(index)?,
                Half::Mlp => planner.mlp(index)?,
            }
        }
        if let Some([gate, projection]) = blocks[index].per_layer {
            planner.per_layer(index, gate, projection)?;
        }
    }
    if planner.has_logits() {
        let input = planner.normed(Norm::Head, own.end);
        let gemm = self::head(head, &input, rows, hardware)?;
        planner.push(own.end, Kernel::Head { input, gemm });
    }
    Ok(planner.steps)
}

/// How the logits of some rows are computed. Where CTAs of the kernels before have ended early on some multiprocessors, those of a GEMM of few
/// rows gather there in twos and leave others idle. This one takes half as long again then, so it keeps its CTAs apart.
pub(super) fn head(
    head: MatrixShape,
    input: &Normed,
    rows: usize,
    hardware: &Hardware,
) -> Result<GemmPlan> {
    let gemm = GemmPlan::choose(hardware, rows, &[head], Output::F32, input.form())?;
    Ok(gemm.alone(hardware))
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
    /// The blocks that are planned.
    own: Range<usize>,
    head: MatrixShape,
    rows: usize,
    kind: Rows,
    /// Parts that adapters change.
    adapts: Adapts,
    /// How single tokens attend, by the kind of attention.
    decodes: &'a [DecodePlan],
    hardware: &'a Hardware,
    steps: Vec<PlannedKernel>,
    /// The norm that earlier kernels have already prepared, and where it is applied.
    known: Option<(Norm, Applied)>,
    /// Whether the kernel of the last norm left its factors, by which the next norm scales its rows if GEMMs apply it.
    has_factors: bool,
    /// Whether every norm after a half of a block is applied by the next GEMM.
    in_prologue: bool,
}

impl Planner<'_> {
    /// Whether the logits of all rows follow the last block.
    fn has_logits(&self) -> bool {
        self.kind != Rows::Ragged
    }

    fn push(&mut self, block: usize, kernel: Kernel) {
        self.steps.push(PlannedKernel { block, kernel });
    }

    fn layout_of(&self, norm: Norm) -> Layout {
        match norm {
            Norm::Mixer(i) => self.blocks[i].layout(Half::Mixer, self.hardware, self.rows),
            Norm::Mlp(i) => self.blocks[i].layout(Half::Mlp, self.hardware, self.rows),
            // Routers and the projections of inputs may have any type, and experts gather rows.
            Norm::Router(_) | Norm::Experts(_) | Norm::PerLayer(_) => Layout::RowMajor,
            Norm::Head => head_layout(self.head, self.rows, self.hardware),
        }
    }

    /// The normalized input of GEMMs. A separate kernel applies the norm unless earlier kernels have.
    fn normed(&mut self, norm: Norm, block: usize) -> Normed {
        let layout = self.layout_of(norm);
        let known = self.known.take().filter(|(known, _)| *known == norm);
        let known = known.or_else(|| {
            self.normalizes_on_load(norm)
                .then_some((norm, Applied::OnLoad))
        });
        let is_applied = self.is_applied(norm);
        if known.is_none() {
            self.push(
                block,
                match is_applied {
                    true => Kernel::Normalize { norm, layout },
                    false => Kernel::Convert { norm, layout },
                },
            );
        }
        let by_epilogue = known.is_none_or(|(_, applied)| applied == Applied::Epilogue);
        self.has_factors = is_applied && by_epilogue;
        Normed {
            norm,
            layout,
            applied: known.map_or(Applied::Before, |(_, applied)| applied),
        }
    }

    /// Whether the model has a norm; otherwise what would take it takes the residual stream as it is.
    fn is_applied(&self, norm: Norm) -> bool {
        match norm {
            Norm::Mixer(i) | Norm::Mlp(i) => self.blocks[i].norms.pre,
            Norm::Router(_) | Norm::Experts(_) | Norm::PerLayer(_) | Norm::Head => true,
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

    /// The norm of the residual stream after a part of a block.
    fn next_norm(&self, block: usize, part: Part) -> Norm {
        let of = |block: usize, part: Part| match part {
            Part::Half(Half::Mixer) => Norm::Mixer(block),
            Part::Half(Half::Mlp) => Norm::Mlp(block),
            Part::PerLayer => Norm::PerLayer(block),
        };
        let own = parts(&self.blocks[block]).skip_while(|&own| own != part);
        let own = own.skip(1).map(|part| of(block, part));
        let later = (block + 1..self.own.end)
            .flat_map(|block| parts(&self.blocks[block]).map(move |part| of(block, part)));
        own.chain(later).next().unwrap_or(Norm::Head)
    }

    /// Whether the block's factor applies after this part: it is the last one.
    fn scales(&self, block: usize, part: Part) -> bool {
        self.blocks[block].scaled && parts(&self.blocks[block]).last() == Some(part)
    }

    fn mixer(&mut self, block: usize) -> Result<()> {
        let layout = self.layout_of(Norm::Mixer(block));
        let input = self.normed(Norm::Mixer(block), block);
        match self.blocks[block].mixer.clone() {
            MixerShape::Attention {
                qkv,
                gate,
                o,
                normed,
                kind,
            } => self.attention(block, layout, input, (qkv, gate, normed), kind, o),
            MixerShape::GatedDelta {
                heads,
                inputs,
                gates,
                out,
            } => {
                self.delta(block, layout, input, &heads, (inputs, gates))?;
                self.end(block, Half::Mixer, out, layout)
            }
            MixerShape::Mamba2 { inputs, out } => {
                let gemm = self.gemm(&inputs, Output::F32, input.form())?;
                self.push(block, Kernel::MambaInputs { input, gemm });
                self.adapt(block, AdaptedPart::MixerInputs, layout);
                self.push(block, Kernel::MambaConv);
                self.push(block, Kernel::MambaScan);
                self.push(block, Kernel::MambaNorm { layout });
                self.end(block, Half::Mixer, out, layout)
            }
            MixerShape::None => bail!(Internal, "block {block} has no mixer to plan"),
        }
    }

    /// A gated delta net without its last projection.
    fn delta(
        &mut self,
        block: usize,
        layout: Layout,
        input: Normed,
        heads: &DeltaShape,
        (inputs, gates): ([MatrixShape; 2], [MatrixShape; 2]),
    ) -> Result<()> {
        let form = input.form();
        let all = [&inputs[..], &gates[..]].concat();
        let joint = self.served(&all, Output::F32, form);
        let gemm = match joint {
            Some(gemm) => gemm,
            None => self.gemm(&inputs, Output::F32, form)?,
        };
        let apart = joint.is_none();
        self.push(
            block,
            Kernel::DeltaInputs {
                input,
                gemm,
                gates: !apart,
            },
        );
        let part = match apart {
            true => AdaptedPart::MixerInputs,
            false => AdaptedPart::DeltaInputsAndGates,
        };
        self.adapt(block, part, layout);
        if apart {
            let gemm = self.gemm(&gates, Output::F32, form)?;
            self.push(block, Kernel::DeltaGates { input, gemm });
            self.adapt(block, AdaptedPart::DeltaGates, layout);
        }
        if self.kind == Rows::Step && cuda::has_delta_step(self.hardware, heads, self.rows) {
            self.push(block, Kernel::DeltaStep { layout, apart });
            return Ok(());
        }
        self.push(block, Kernel::DeltaConv { apart });
        let single = self.kind == Rows::Step && cuda::has_delta_single(self.hardware, heads);
        self.push(block, Kernel::DeltaRule { single });
        self.push(block, Kernel::DeltaNorm { layout });
        Ok(())
    }

    fn attention(
        &mut self,
        block: usize,
        layout: Layout,
        input: Normed,
        (qkv, gate, normed): (Vec<MatrixShape>, Option<MatrixShape>, bool),
        kind: usize,
        o: MatrixShape,
    ) -> Result<()> {
        let gemm = self.gemm(&qkv, Output::F32, input.form())?;
        self.push(block, Kernel::Qkv { input, gemm });
        self.adapt(block, AdaptedPart::MixerInputs, layout);
        if normed {
            self.push(block, Kernel::NormProjections);
        }
        if let Some(gate) = gate {
            let gemm = self.gemm(&[gate], Output::F32, input.form())?;
            let place = self.steps.len();
            self.push(block, Kernel::HeadGate { input, gemm });
            // The kernels of its adapters write what those of the inputs' adapters, which may be the kernel before, read.
            if input.applied == Applied::Before && !self.adapts.change(AdaptedPart::HeadGate) {
                self.beside_predecessor(place);
            }
            self.adapt(block, AdaptedPart::HeadGate, layout);
        }
        let singles = self.decodes.get(kind).copied();
        let plan = || singles.ok_or_else(|| err!(Internal, "no plan of attention {kind}"));
        let attended = match self.kind {
            Rows::Step => {
                let plan = plan()?;
                self.push(block, Kernel::Decode { layout, plan });
                layout
            }
            Rows::Verification => {
                let plan = plan()?;
                self.push(block, Kernel::StoreRows { before: false });
                self.push(block, Kernel::DecodeStored { layout, plan });
                layout
            }
            Rows::Ragged => {
                self.push(block, Kernel::StoreKv);
                self.push(
                    block,
                    match self.hardware.deterministic {
                        true => Kernel::AttendRows { singles },
                        false => Kernel::Prefill { singles },
                    },
                );
                Layout::RowMajor
            }
        };
        if gate.is_some() {
            self.push(block, Kernel::GateHeads { layout: attended });
        }
        self.end(block, Half::Mixer, o, attended)
    }

    fn mlp(&mut self, block: usize) -> Result<()> {
        let input = self.normed(Norm::Mlp(block), block);
        match &self.blocks[block].mlp {
            MlpShape::Dense(mlp) => {
                let layout = self.activated(block, mlp, input)?;
                self.end(block, Half::Mlp, mlp.down, layout)
            }
            MlpShape::Experts { routed, shared } => {
                self.router(block, routed)?;
                // Products of the shared expert need neither the router nor the choice.
                let first = self.steps.len();
                let activated = match shared {
                    Some(mlp) => Some((mlp, self.activated(block, mlp, input)?)),
                    None => None,
                };
                self.beside_predecessor(first);
                self.route(block, routed);
                if let Some((mlp, layout)) = activated {
                    let first = self.steps.len();
                    self.project(block, Half::Mlp, mlp.down, layout, Then::Store)?;
                    self.beside_predecessor(first);
                }
                self.experts(block, routed)?;
                let part = Part::Half(Half::Mlp);
                let next = self.normalized_next(self.next_norm(block, part));
                self.push(block, Kernel::SumExperts { next });
                Ok(())
            }
            MlpShape::DenseAndExperts { dense, routed } => {
                let layout = self.activated(block, dense, input)?;
                self.project(block, Half::Mlp, dense.down, layout, Then::Store)?;
                let layout = Layout::RowMajor;
                let norm = Norm::Router(block);
                self.push(block, Kernel::Normalize { norm, layout });
                self.router(block, routed)?;
                self.route(block, routed);
                let norm = Norm::Experts(block);
                self.push(block, Kernel::Normalize { norm, layout });
                self.experts(block, routed)?;
                let part = Part::Half(Half::Mlp);
                let next = self.normalized_next(self.next_norm(block, part));
                let scales = self.scales(block, part);
                self.push(block, Kernel::SumBeside { scales, next });
                Ok(())
            }
            MlpShape::None => bail!(Internal, "block {block} has no MLP to plan"),
        }
    }

    /// The logits of routed experts, of rows that a norm has made.
    fn router(&mut self, block: usize, routed: &RoutedShape) -> Result<()> {
        let form = InputForm::Plain(Layout::RowMajor);
        let gemm = self.gemm(&routed.router, Output::F32, form)?;
        self.push(block, Kernel::Router { gemm });
        Ok(())
    }

    /// The choice of each row's experts.
    fn route(&mut self, block: usize, routed: &RoutedShape) {
        let plan = RoutePlan::choose(&routed.routing, self.rows);
        self.push(block, Kernel::Route { plan });
    }

    /// The projections of routed experts.
    fn experts(&mut self, block: usize, routed: &RoutedShape) -> Result<()> {
        let RoutedShape {
            gated, routing, up, ..
        } = routed;
        let plan = ExpertsPlan::gate_up(routing, self.rows, *up, *gated)?;
        let gated = *gated;
        self.push(block, Kernel::ExpertsGateUp { gated, plan });
        let plan = ExpertsPlan::down(routing, self.rows, *up)?;
        self.push(block, Kernel::ExpertsDown { plan });
        Ok(())
    }

    /// Lets the kernel at a place of the plan, if it is there and is a product, run beside the one before, which does not make its input.
    fn beside_predecessor(&mut self, place: usize) {
        let kernel = self.steps.get_mut(place).map(|step| &mut step.kernel);
        if let Some(
            Kernel::HeadGate { gemm, .. }
            | Kernel::GateUp { gemm, .. }
            | Kernel::Up { gemm, .. }
            | Kernel::Project { gemm, .. },
        ) = kernel
        {
            *gemm = gemm.beside_predecessor();
        }
    }

    /// The part of a block that takes its own input.
    fn per_layer(
        &mut self,
        block: usize,
        gate: MatrixShape,
        projection: MatrixShape,
    ) -> Result<()> {
        let input = self.normed(Norm::PerLayer(block), block);
        let gemm = self.gemm(&[gate], Output::F32, input.form())?;
        self.push(block, Kernel::PerLayerGate { input, gemm });
        self.push(block, Kernel::PerLayerActivate);
        let form = InputForm::Plain(Layout::RowMajor);
        let gemm = self.gemm(&[projection], Output::F32, form)?;
        self.push(block, Kernel::PerLayerProject { gemm });
        self.post_norm(block, Part::PerLayer);
        Ok(())
    }

    /// The norm of the output of a part of a block, and its addition.
    fn post_norm(&mut self, block: usize, part: Part) {
        let next = self.known_next(self.next_norm(block, part));
        let next = next.map(|(norm, layout)| match self.is_applied(norm) {
            true => NextInput::Normalized(norm, layout),
            false => NextInput::Stream(norm, layout),
        });
        let scales = self.scales(block, part);
        self.push(block, Kernel::PostNorm { part, scales, next });
    }

    /// The projections before the activation of an MLP, and the activation; returns the layout of their output.
    fn activated(&mut self, block: usize, mlp: &DenseShape, input: Normed) -> Result<Layout> {
        let (layout, form) = (input.layout, input.form());
        let Some(gate_up) = mlp.gate_up() else {
            let gemm = self.gemm(&[mlp.up], Output::F16, form)?;
            self.push(block, Kernel::Up { input, gemm });
            self.adapt(block, AdaptedPart::MlpInputs, layout);
            self.push(block, Kernel::Square);
            return Ok(Layout::RowMajor);
        };
        let glu = self.served(&gate_up, layout.glu(Glu::default()), form);
        let glu = glu.map(|glu| match self.is_after_small_ctas(block) {
            true => glu.alone(self.hardware),
            false => glu,
        });
        if self.adapts.mlp_inputs {
            return self.activated_apart(block, &gate_up, input, glu);
        }
        let (fused, gemm) = match glu {
            Some(gemm) => (true, gemm),
            None => (false, self.gemm(&gate_up, Output::F16, form)?),
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

    /// Whether the GEMM of gate and up can keep its CTAs apart, as the head does, and still begin early: CTAs of the mixer's last projection must
    /// leave it more than half of the shared memory. Those of weights in 8 bits do not.
    fn is_after_small_ctas(&self, block: usize) -> bool {
        let BlockShape { mixer, mlp, .. } = &self.blocks[block];
        let last = match mixer {
            MixerShape::Attention { o, .. } => Some(o),
            MixerShape::GatedDelta { out, .. } | MixerShape::Mamba2 { out, .. } => Some(out),
            MixerShape::None => None,
        };
        let is_small = last.is_some_and(|last| last.storage == WeightType::Nvfp4);
        is_small && matches!(mlp, MlpShape::Dense(_))
    }

    /// As [`Planner::activated`] for adapted projections. Where a kernel would fuse the activation, gate and up are as exact as in that one.
    fn activated_apart(
        &mut self,
        block: usize,
        gate_up: &[MatrixShape],
        input: Normed,
        glu: Option<GemmPlan>,
    ) -> Result<Layout> {
        let fuses = glu.is_some();
        let (output, to) = match fuses {
            true => (Output::F32, input.layout),
            false => (Output::F16, Layout::RowMajor),
        };
        let gemm = self.gemm(gate_up, output, input.form())?;
        // A deterministic row without an adapter takes the sums of other passes.
        let other = glu.filter(|glu| self.hardware.deterministic && glu.sums() != gemm.sums());
        if let Some(gemm) = other {
            let fused = true;
            self.push(block, Kernel::GateUp { input, fused, gemm });
        }
        self.push(
            block,
            match fuses {
                true => Kernel::AdaptedGateUp { input, gemm },
                false => Kernel::GateUp {
                    input,
                    fused: false,
                    gemm,
                },
            },
        );
        let (part, layout) = (AdaptedPart::MlpInputs, input.layout);
        self.push(block, Kernel::Shrink { part, layout });
        self.push(
            block,
            Kernel::ActivateAdapted {
                layout: to,
                is_f16: !fuses,
                others_are_done: other.is_some(),
            },
        );
        Ok(to)
    }

    /// Adds what adapters change in a part, after its GEMM with the input in `layout`, to outputs outside of the residual stream.
    fn adapt(&mut self, block: usize, part: AdaptedPart, layout: Layout) {
        if self.adapts.change(part) {
            self.push(block, Kernel::Shrink { part, layout });
            self.push(block, Kernel::Expand { part, added: false });
        }
    }

    /// As [`Planner::known_next`], where the preceding kernel does not convert rows without a norm.
    fn normalized_next(&mut self, next: Norm) -> Option<(Norm, Layout)> {
        match self.is_applied(next) {
            true => self.known_next(next),
            false => None,
        }
    }

    /// The next norm, if the preceding kernel can apply it.
    fn known_next(&mut self, next: Norm) -> Option<(Norm, Layout)> {
        // The head takes only some rows of a prompt, by a kernel of their own, which has to make the rows of a deterministic step too.
        let is_known = match next {
            Norm::Head => self.has_logits() && !self.hardware.deterministic,
            _ => true,
        };
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
        let part = output_of(half);
        if self.adapts.change(part) {
            let added = then == Then::Add;
            self.push(block, Kernel::Shrink { part, layout });
            let norm = self.next_norm(block, Part::Half(half));
            match added && self.normalizes_adapted(norm, matrix.rows) {
                true => {
                    let layout = self.layout_of(norm);
                    self.push(block, Kernel::ExpandNorm { part, norm, layout });
                    self.known = Some((norm, Applied::Before));
                }
                false => self.push(block, Kernel::Expand { part, added }),
            }
        }
        Ok(())
    }

    /// Whether the kernel that adds the products of B factors to rows of `width` applies the next norm. Deterministic rows without adapters
    /// take the norm of other passes.
    fn normalizes_adapted(&self, norm: Norm, width: usize) -> bool {
        let is_known = match norm {
            Norm::Mixer(_) | Norm::Mlp(_) => true,
            Norm::Head => self.has_logits(),
            Norm::Router(_) | Norm::Experts(_) | Norm::PerLayer(_) => false,
        };
        let is_known = is_known && self.is_applied(norm);
        is_known && !self.hardware.deterministic && width <= cuda::ADAPTED_NORM
    }

    /// Ends a half with its projection. Records how far it prepares the next norm.
    fn end(&mut self, block: usize, half: Half, matrix: MatrixShape, layout: Layout) -> Result<()> {
        let next = self.next_norm(block, Part::Half(half));
        let then = if self.in_prologue {
            self.known = Some((next, Applied::Prologue));
            Then::StoreRow
        } else if self.blocks[block].norms.post {
            Then::Store
        } else if self.has_logits()
            && self.has_factors
            && !self.adapts.change(output_of(half))
            && self.fuses_norm(matrix, layout, next)
        {
            self.known = Some((next, Applied::Epilogue));
            Then::AddAndNorm(next)
        } else {
            Then::Add
        };
        self.project(block, half, matrix, layout, then)?;
        if then == Then::Store {
            self.post_norm(block, Part::Half(half));
        }
        Ok(())
    }

    /// Whether a single row goes through blocks with a norm after each half, and GEMMs can compute these norms in their prologues.
    fn makes_rows_in_prologues(&self) -> bool {
        let serves = |takes: &[MatrixShape], output| {
            self.served(takes, output, InputForm::Residual).is_some()
        };
        let glu = Output::Glu(Glu::default());
        self.has_logits()
            && serves(&[self.head], Output::F32)
            && self.blocks[self.own.clone()].iter().all(|block| {
                let gate_up = match &block.mlp {
                    MlpShape::Dense(mlp) => mlp.gate_up(),
                    _ => None,
                };
                let NormPlacement { pre, post } = block.norms;
                let is_plain = pre && post && block.per_layer.is_none() && !block.scaled;
                match (gate_up, block.mixer.plain_attention()) {
                    (Some(gate_up), Some(qkv)) if is_plain => {
                        let rows =
                            |half| block.layout(half, self.hardware, self.rows) == Layout::RowMajor;
                        rows(Half::Mixer)
                            && rows(Half::Mlp)
                            && serves(qkv, Output::F32)
                            && serves(&gate_up, glu)
                    }
                    _ => false,
                }
            })
    }

    /// Whether the GEMMs around a norm apply it: the one with `makes`, whose input has this layout, and those that take the norm.
    fn fuses_norm(&self, makes: MatrixShape, layout: Layout, next: Norm) -> bool {
        layout == self.layout_of(next)
            && GemmPlan::before_norm(self.hardware, self.rows, makes, layout).is_some()
            && self.taken_by_one_gemm(next, InputForm::FusedNorm(layout))
    }

    /// Whether the GEMM that takes a norm applies it without help from earlier kernels. Deterministic ones do.
    fn normalizes_on_load(&self, norm: Norm) -> bool {
        self.hardware.deterministic
            && self.layout_of(norm) == Layout::RowMajor
            && self.taken_by_one_gemm(norm, InputForm::Normalized)
    }

    /// Whether one GEMM takes the rows of a norm, and takes them in this form.
    fn taken_by_one_gemm(&self, norm: Norm, form: InputForm) -> bool {
        let serves = |takes: &[MatrixShape], output| self.served(takes, output, form).is_some();
        // The A factors take rows as they are after the norm.
        let is_adapted = match norm {
            Norm::Mixer(_) => self.adapts.mixer_inputs,
            Norm::Mlp(_) => self.adapts.mlp_inputs,
            _ => false,
        };
        !is_adapted
            && self.is_applied(norm)
            && match norm {
                Norm::Mlp(i) => match &self.blocks[i].mlp {
                    MlpShape::Dense(mlp) => mlp
                        .gate_up()
                        .is_some_and(|gate_up| serves(&gate_up, form.layout().glu(Glu::default()))),
                    _ => false,
                },
                Norm::Mixer(i) => match self.blocks[i].mixer.plain_attention() {
                    Some(qkv) => serves(qkv, Output::F32),
                    None => false,
                },
                Norm::Head => serves(&[self.head], Output::F32),
                Norm::Router(_) | Norm::Experts(_) | Norm::PerLayer(_) => false,
            }
    }
}

/// The part that ends a half.
pub(super) fn output_of(half: Half) -> AdaptedPart {
    match half {
        Half::Mixer => AdaptedPart::MixerOutput,
        Half::Mlp => AdaptedPart::MlpOutput,
    }
}

/// The parts of a block, in order.
fn parts(block: &BlockShape) -> impl Iterator<Item = Part> + use<> {
    let own = block.per_layer.map(|_| Part::PerLayer);
    block.halves().map(Part::Half).chain(own)
}

/// The kernels' description of a gated activation.
pub(super) fn glu(activation: Activation, divisor: u32) -> Result<Glu> {
    Ok(Glu {
        activation: activation.on_gpu()?,
        divisor,
    })
}

#[cfg(test)]
mod tests;
