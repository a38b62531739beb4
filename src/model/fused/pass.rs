//! A pass of rows through the blocks: launches the steps of the plan.

use std::ops::Range;

use super::lowered::{Lowered, Source};
use super::memory::Memory;
use super::operands::{Mixture, biased, of_linear, on_gpu};
use super::plan::{self, Applied, Kernel, NextInput, Norm, Normed, Part, PlannedKernel, Then};
use super::row_adapters::AdaptedPass;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::base::memory::Tag;
use crate::cuda::{
    self, BesideExperts, Biased, CachedPages, DecodePlan, DecodedRows, DeviceBuffer, DeviceSlice,
    ExpertScratch, ExpertUnit, FusedNorm, GemmPlan, Heads, Input, Layout, NextNorm, NextRows,
    NormalizedRows, NormedAddend, Output, PromptRows, ResidualRow, RoutePlan, RouterVectors,
    SharedExpert, StreamRows,
};
use crate::model::adapter::{AdaptedPart, Adapts};
use crate::model::order::Half;
use crate::model::spec::{BlockSpec, DenseMlpSpec};
use crate::model::weights::{Block, DenseAndExperts, DenseMlp, Experts, Mlp};
use crate::ops::Array;

/// Rows of a prefill chunk of one sequence.
pub(super) struct ChunkRows {
    /// Row of the page table.
    pub(super) sequence: usize,
    pub(super) rows: Range<usize>,
    /// Position of the first row.
    pub(super) first: usize,
}

/// The sequences of the rows: first single tokens, one of each sequence, then prefill chunks.
#[derive(Clone, Copy, Default)]
pub(super) struct Attention<'a> {
    /// How single tokens attend, indexed like [`Sizes::attentions`](super::sizes::Sizes::attentions); empty without any. They have the first
    /// rows of the page table and of the positions in memory.
    pub(super) decodes: &'a [DecodePlan],
    pub(super) chunks: &'a [ChunkRows],
}

/// The blocks that a pass goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Through {
    /// The blocks of the model.
    Model,
    /// The one block of the drafter.
    Drafter,
}

/// A pass of rows through the blocks.
#[derive(Clone, Copy)]
pub(super) struct FusedPass<'a> {
    pub(super) lowered: &'a Lowered,
    pub(super) source: Source<'a>,
    pub(super) memory: &'a Memory,
    pub(super) through: Through,
    pub(super) rows: usize,
    /// Segments of recurrent layers: the rows of a sequence after which its state is written.
    pub(super) segments: usize,
    pub(super) attention: Attention<'a>,
    /// The parts that adapters change, if any row has one.
    pub(super) adapted: Option<AdaptedPass>,
    /// Whether the long RoPE table applies.
    pub(super) long: bool,
    /// Whether hidden rows take the place of those that the rows began with, for the pass after this one.
    pub(super) hands_on: bool,
    /// Whether the host gets copies of hidden rows. The positions of all rows are in memory then.
    pub(super) copies: bool,
}

impl<'a> FusedPass<'a> {
    fn block(&self, index: usize) -> Result<&'a Block> {
        Ok(self.source.block(index)?.0)
    }

    fn spec(&self, index: usize) -> Result<&'a BlockSpec> {
        Ok(self.source.block(index)?.1)
    }

    /// Where rows with values that f16 cannot hold are noted.
    pub(super) fn overflow(&self) -> Result<&'a DeviceBuffer> {
        match self.through {
            Through::Model => Ok(&self.memory.overflow),
            Through::Drafter => Ok(&self.memory.drafter()?.faults),
        }
    }

    /// Launches a step of the plan.
    pub(super) fn enqueue(&self, step: &PlannedKernel) -> Result<()> {
        let (lowered, memory) = (self.lowered, self.memory);
        let index = step.block;
        match &step.kernel {
            Kernel::LayerInputs { gemm } => self.layer_inputs(gemm),
            Kernel::Normalize { norm, layout } => self.normalize(*norm, *layout),
            Kernel::Convert { norm, layout } => {
                let (rows, hidden) = (self.rows, lowered.sizes.hidden);
                let to = self.stream_rows(*norm, *layout)?;
                cuda::stream_rows(&lowered.gpu, &memory.residual, rows, hidden, to)
            }
            Kernel::Qkv { input, gemm } => {
                let attention = self.block(index)?.mixer.required_attention()?;
                let matrices = attention.inputs().map(biased);
                let matrices = matrices.collect::<Result<Vec<_>>>()?;
                let spec = self.spec(index)?.required_attention()?;
                let (input, width) = (self.input(input)?, spec.projected_width());
                let (output, out) = (Output::F32, &memory.projected);
                let part = (index, AdaptedPart::MixerInputs);
                self.linear_of(part, gemm, input, &matrices, output, (out, width), None)
            }
            Kernel::NormProjections => self.norm_projections(index),
            Kernel::Decode { .. }
            | Kernel::StoreRows { .. }
            | Kernel::DecodeStored { .. }
            | Kernel::StoreKv
            | Kernel::Prefill { .. }
            | Kernel::AttendRows { .. } => self.attend(index, &step.kernel),
            Kernel::HeadGate { input, gemm } => {
                let attention = self.block(index)?.mixer.required_attention()?;
                let (Some(gate), Some(out)) = (&attention.gate, &memory.head_gate) else {
                    bail!(Internal, "block {index} has no gate of heads");
                };
                let (matrix, width) = (biased(gate)?, gate.linear.rows());
                self.linear(gemm, self.input(input)?, &[matrix], Output::F32, out, width)
            }
            Kernel::GateHeads { layout } => {
                let Some(gate) = &memory.head_gate else {
                    bail!(Internal, "block {index} has no gate of heads");
                };
                let width = self.spec(index)?.required_attention()?.q_width();
                let (gpu, y) = (&lowered.gpu, &memory.input);
                cuda::gate_heads(gpu, y, *layout, gate, self.rows, width)
            }
            Kernel::DeltaInputs { input, gemm, gates } => {
                self.delta_inputs(index, input, gemm, *gates)
            }
            Kernel::DeltaGates { input, gemm } => self.delta_gates(index, input, gemm),
            Kernel::DeltaConv { apart } => self.delta_conv(index, *apart),
            Kernel::DeltaRule { single } => self.delta_rule(index, *single),
            Kernel::DeltaNorm { layout } => self.delta_norm(index, *layout),
            Kernel::DeltaStep { layout, apart } => self.delta_step(index, *layout, *apart),
            Kernel::MambaInputs { input, gemm } => self.mamba_inputs(index, input, gemm),
            Kernel::MambaConv => self.mamba_conv(index),
            Kernel::MambaScan => self.mamba_scan(index),
            Kernel::MambaNorm { layout } => self.mamba_norm(index, *layout),
            Kernel::GateUp { input, fused, gemm } => {
                let (spec, mlp) = self.mlp(index)?;
                let matrices = [biased(mlp.required_gate()?)?, biased(&mlp.up)?];
                let input = self.input(input)?;
                let wide = spec.intermediate_size;
                match fused {
                    true => {
                        let glu = plan::glu(spec.activation, lowered.glu_divisors[index])?;
                        let (output, out) = (input.layout().glu(glu), &memory.inner);
                        let part = (index, AdaptedPart::MlpInputs);
                        self.linear_of(part, gemm, input, &matrices, output, (out, wide), None)
                    }
                    false => {
                        let out = &memory.projected;
                        self.linear(gemm, input, &matrices, Output::F16, out, 2 * wide)
                    }
                }
            }
            Kernel::AdaptedGateUp { input, gemm } => self.adapted_gate_up(index, input, gemm),
            Kernel::ActivateAdapted {
                layout,
                is_f16,
                others_are_done,
            } => self.activate_adapted(index, *layout, *is_f16, *others_are_done),
            Kernel::Shrink { part, layout } => self.shrink(index, *part, *layout),
            Kernel::Expand { part, added } => self.expand(index, *part, *added),
            Kernel::ExpandNorm { part, norm, layout } => {
                self.expand_norm(index, *part, *norm, *layout)
            }
            Kernel::Activate => {
                let (spec, _) = self.mlp(index)?;
                cuda::glu(
                    &lowered.gpu,
                    plan::glu(spec.activation, lowered.glu_divisors[index])?,
                    &memory.projected,
                    self.rows,
                    spec.intermediate_size,
                    Some((self.overflow()?, index)),
                    &memory.inner,
                )
            }
            Kernel::Up { input, gemm } => {
                let (spec, mlp) = self.mlp(index)?;
                let (up, out) = (biased(&mlp.up)?, &memory.projected);
                let (input, wide) = (self.input(input)?, spec.intermediate_size);
                self.linear(gemm, input, &[up], Output::F16, out, wide)
            }
            Kernel::Square => cuda::relu_squared(
                &lowered.gpu,
                lowered.glu_divisors[index],
                &memory.projected,
                self.rows,
                self.mlp(index)?.0.intermediate_size,
                (self.overflow()?, index),
                &memory.inner,
            ),
            Kernel::Router { gemm } => self.router(index, gemm),
            Kernel::Route { plan } => self.route(index, plan),
            Kernel::ExpertsGateUp { gated, plan } => {
                let (Mixture { routing, table }, scratch) = self.mixture(index)?;
                let Some(spec) = self.spec(index)?.mlp.mixture() else {
                    bail!(Internal, "block {index} has no experts");
                };
                let unit = match gated {
                    true => ExpertUnit::Gated(spec.expert.activation.unit_on_gpu()?),
                    false => ExpertUnit::ReluSquared,
                };
                let unit = (unit, lowered.glu_divisors[index]);
                let (gpu, x) = (&lowered.gpu, &memory.input);
                cuda::experts_gate_up(gpu, routing, table, x, plan, unit, scratch)
            }
            Kernel::ExpertsDown { plan } => {
                let (Mixture { routing, table }, scratch) = self.mixture(index)?;
                let divisor = lowered.glu_divisors[index] as f32;
                cuda::experts_down(&lowered.gpu, routing, table, plan, divisor, scratch)
            }
            Kernel::SumExperts { next } => self.sum_experts(index, *next),
            Kernel::SumBeside { scales, next } => self.sum_beside(index, *scales, *next),
            Kernel::Project {
                half,
                layout,
                then,
                gemm,
            } => self.project(index, *half, *layout, *then, gemm),
            Kernel::PerLayerGate { input, gemm } => self.per_layer_gate(index, input, gemm),
            Kernel::PerLayerActivate => self.per_layer_activate(index),
            Kernel::PerLayerProject { gemm } => self.per_layer_project(index, gemm),
            Kernel::PostNorm { part, scales, next } => {
                let next = match *next {
                    None => None,
                    Some(NextInput::Normalized(norm, layout)) => {
                        Some(NextRows::Normalized(self.next_norm(norm, layout)?))
                    }
                    Some(NextInput::Stream(norm, layout)) => {
                        Some(NextRows::Stream(self.stream_rows(norm, layout)?))
                    }
                };
                self.post_norm(index, *part, *scales, next)
            }
            Kernel::Head { input, gemm } => self.head(input, gemm),
            Kernel::Hidden => self.hidden(),
            Kernel::DrafterInputs => self.drafter_inputs(),
            Kernel::ProjectDrafterInputs { gemm } => self.project_drafter_inputs(gemm),
        }
    }

    /// Normalizes the queries of each row together, and its keys.
    fn norm_projections(&self, index: usize) -> Result<()> {
        let attention = self.block(index)?.mixer.required_attention()?;
        let spec = self.spec(index)?.required_attention()?;
        cuda::norm_projections(
            &self.lowered.gpu,
            &self.memory.projected,
            [on_gpu(&attention.q_norm)?, on_gpu(&attention.k_norm)?],
            [spec.q_width(), spec.kv_width()],
            self.source.spec.norm_eps,
            (self.rows, spec.projected_width()),
        )
    }

    /// The MLP of a block that all rows use.
    pub(super) fn mlp(&self, index: usize) -> Result<(&'a DenseMlpSpec, &'a DenseMlp)> {
        let spec = self.spec(index)?.mlp.of_all_rows();
        let weights = self.block(index)?.mlp.of_all_rows();
        spec.zip(weights).ok_or_else(|| {
            err!(
                Internal,
                "block {index} has experts alone, and its plan an MLP of all rows"
            )
        })
    }

    /// The experts of a block, and their scratch.
    fn mixture(&self, index: usize) -> Result<(&'a Mixture, &'a ExpertScratch)> {
        let mixture = self.lowered.mixtures[index].as_ref();
        mixture.zip(self.memory.experts.as_ref()).ok_or_else(|| {
            err!(
                Internal,
                "block {index} has a dense MLP, and its plan experts"
            )
        })
    }

    /// The weights of a block's router and shared expert.
    fn experts(&self, index: usize) -> Result<&'a Experts> {
        let experts = self.block(index)?.mlp.mixture();
        experts.ok_or_else(|| err!(Internal, "block {index} has no router"))
    }

    fn router(&self, index: usize, gemm: &GemmPlan) -> Result<()> {
        let experts = self.experts(index)?;
        let gate = experts.shared.as_ref().and_then(|(_, gate)| gate.as_ref());
        let gate = gate.map(|gate| Ok((of_linear(gate)?, None)));
        let router = std::iter::once(biased(&experts.router)).chain(gate);
        let matrices: Vec<Biased<'_>> = router.collect::<Result<_>>()?;
        let (mixture, scratch) = self.mixture(index)?;
        let (out, stride) = cuda::router_logits(&mixture.routing, &matrices, scratch)?;
        let input = Input::Plain(&self.memory.input, 1.0);
        self.linear(gemm, input, &matrices, Output::F32, out, stride)
    }

    fn route(&self, index: usize, plan: &RoutePlan) -> Result<()> {
        let memory = self.memory;
        let unroutable = match self.through {
            Through::Model => &memory.unroutable,
            Through::Drafter => &memory.drafter()?.faults,
        };
        let (mixture, scratch) = self.mixture(index)?;
        let experts = self.experts(index)?;
        let on_gpu = |vector: Option<&'a Array>| vector.map(Array::on_gpu).transpose();
        let factors = experts.router_scales.as_ref().map(|[_, factors]| factors);
        let vectors = RouterVectors {
            correction: on_gpu(experts.correction.as_ref())?,
            factors: on_gpu(factors)?,
        };
        cuda::route(
            &self.lowered.gpu,
            &mixture.routing,
            vectors,
            plan,
            scratch,
            (unroutable, index),
        )
    }

    fn sum_experts(&self, index: usize, next: Option<(Norm, Layout)>) -> Result<()> {
        let (mixture, scratch) = self.mixture(index)?;
        let spec = self.spec(index)?.mlp.mixture();
        let shared = spec
            .and_then(|spec| spec.shared)
            .map(|shared| SharedExpert {
                made: &self.memory.projected,
                gated: shared.gated,
            });
        cuda::sum_experts(
            &self.lowered.gpu,
            &mixture.routing,
            shared,
            self.source.spec.norm_eps,
            self.rows,
            self.lowered.sizes.hidden,
            &self.memory.residual,
            next.map(|(norm, layout)| self.next_norm(norm, layout))
                .transpose()?,
            scratch,
        )
    }

    /// The dense MLP and the experts beside it.
    fn beside(&self, index: usize) -> Result<&'a DenseAndExperts> {
        match &self.block(index)?.mlp {
            Mlp::DenseAndExperts(both) => Ok(both),
            _ => bail!(Internal, "block {index} has no experts beside an MLP"),
        }
    }

    fn sum_beside(&self, index: usize, scales: bool, next: Option<(Norm, Layout)>) -> Result<()> {
        let (mixture, scratch) = self.mixture(index)?;
        let both = self.beside(index)?;
        let beside = BesideExperts {
            dense: &self.memory.projected,
            experts_norm: both.experts_norm.on_gpu()?,
            dense_norm: both.dense_norm.on_gpu()?,
            post_norm: on_gpu(&self.block(index)?.mlp_norms.post)?,
            scale: self.stream_factor(index, scales)?,
        };
        cuda::sum_experts_beside(
            &self.lowered.gpu,
            &mixture.routing,
            beside,
            self.source.spec.norm_eps,
            self.rows,
            self.lowered.sizes.hidden,
            &self.memory.residual,
            next.map(|(norm, layout)| self.next_norm(norm, layout))
                .transpose()?,
            scratch,
        )
    }

    /// The factor of the residual stream at the end of a block, if the kernel applies it.
    fn stream_factor(&self, index: usize, scales: bool) -> Result<Option<&'a DeviceBuffer>> {
        match (scales, &self.block(index)?.scale) {
            (false, _) => Ok(None),
            (true, Some(scale)) => scale.on_gpu().map(Some),
            (true, None) => bail!(Internal, "block {index} lacks the factor that its spec has"),
        }
    }

    pub(super) fn linear(
        &self,
        gemm: &GemmPlan,
        input: Input<'_>,
        matrices: &[Biased<'_>],
        output: Output,
        out: &DeviceBuffer,
        stride: usize,
    ) -> Result<()> {
        let (gpu, scratch) = (&self.lowered.gpu, &self.memory.linear);
        gemm.enqueue(gpu, input, matrices, output, out, stride, scratch)
    }

    /// The blocks of keys and values that a block's attention reads, of sequences from `sequence` on.
    pub(super) fn cached_pages(&self, index: usize, sequence: usize) -> Result<CachedPages<'a>> {
        let (memory, cache) = (self.memory, self.source.kv);
        let cached_in = self.spec(index)?.required_attention()?.cached_in(index);
        let table = &memory.tables[cache.group_of(cached_in)?];
        let unfit = (self.through == Through::Model).then_some(&memory.unfit);
        let pages = cache.on_gpu(cached_in, table, memory.pages, sequence, unfit)?;
        // Faults are those of this layer.
        Ok(CachedPages {
            layer: index,
            ..pages
        })
    }

    fn attend(&self, index: usize, kernel: &Kernel) -> Result<()> {
        let (gpu, memory) = (&self.lowered.gpu, self.memory);
        let heads = self.lowered.heads(self.source, index, self.long)?;
        let pages = |sequence| self.cached_pages(index, sequence);
        let chunks = self.attention.chunks;
        match kernel {
            Kernel::Decode { layout, plan } => {
                self.decode(&heads, &pages(0)?, plan, *layout, false)
            }
            Kernel::DecodeStored { layout, plan } => {
                self.decode(&heads, &pages(0)?, plan, *layout, true)
            }
            Kernel::StoreRows { before } => {
                let (qkv, positions) = (&memory.projected, &memory.positions);
                cuda::store_rows(gpu, &heads, &pages(0)?, qkv, positions, self.rows, *before)
            }
            Kernel::StoreKv => chunks.iter().try_for_each(|chunk| {
                let (at, rows) = (chunk.rows.start, chunk.rows.len());
                let (qkv, q) = (&memory.projected, &memory.inner);
                let pages = pages(chunk.sequence)?;
                cuda::store(gpu, &heads, &pages, qkv, at, rows, chunk.first, q)
            }),
            Kernel::Prefill { singles } | Kernel::AttendRows { singles } => {
                if let Some(plan) = singles {
                    self.decode(&heads, &pages(0)?, plan, Layout::RowMajor, false)?;
                }
                let fixed = matches!(kernel, Kernel::AttendRows { .. });
                chunks.iter().try_for_each(|chunk| {
                    let rows = PromptRows {
                        at: chunk.rows.start,
                        rows: chunk.rows.len(),
                        first_position: chunk.first,
                        fixed,
                    };
                    let (q, out) = (&memory.inner, &memory.input);
                    cuda::prefill(gpu, &heads, &pages(chunk.sequence)?, q, rows, out)
                })
            }
            _ => bail!(
                Internal,
                "a kernel of another operation taken for attention"
            ),
        }
    }

    /// Computes attention of single tokens, whose keys and values it also stores unless they are `stored`.
    fn decode(
        &self,
        heads: &Heads<'_>,
        pages: &CachedPages<'_>,
        plan: &DecodePlan,
        layout: Layout,
        stored: bool,
    ) -> Result<()> {
        let memory = self.memory;
        let rows = DecodedRows {
            qkv: &memory.projected,
            positions: &memory.positions,
            stored,
        };
        let (gpu, splits, out) = (&self.lowered.gpu, &memory.splits, &memory.input);
        cuda::decode(gpu, heads, pages, rows, plan, splits, out, layout)
    }

    fn project(
        &self,
        index: usize,
        half: Half,
        layout: Layout,
        then: Then,
        gemm: &GemmPlan,
    ) -> Result<()> {
        let (block, memory) = (self.block(index)?, self.memory);
        let (input, weight) = match half {
            Half::Mixer => (layout.input(&memory.input, 1.0), block.mixer.last()?),
            Half::Mlp => {
                let divisor = self.lowered.glu_divisors[index] as f32;
                (
                    layout.input(&memory.inner, divisor),
                    &self.mlp(index)?.1.down,
                )
            }
        };
        let (matrix, hidden) = (biased(weight)?, self.lowered.sizes.hidden);
        let norm = match then {
            Then::AddAndNorm(norm) => Some(self.fused_norm(norm)?),
            _ => None,
        };
        let (output, out) = match then {
            Then::Add | Then::AddAndNorm(_) => (Output::Add, &memory.residual),
            Then::Store => (Output::F32, &memory.projected),
            Then::StoreRow => (Output::F32, &memory.half),
        };
        let (part, to) = ((index, plan::output_of(half)), (out, hidden));
        self.linear_of(part, gemm, input, &[matrix], output, to, norm.as_ref())
    }

    fn post_norm(
        &self,
        index: usize,
        part: Part,
        scales: bool,
        next: Option<NextRows<'_>>,
    ) -> Result<()> {
        let block = self.block(index)?;
        let (weight, divisors) = match part {
            Part::Half(Half::Mixer) => (on_gpu(&block.mixer_norms.post)?, None),
            Part::Half(Half::Mlp) => (on_gpu(&block.mlp_norms.post)?, None),
            Part::PerLayer => {
                let (weight, divisors) = self.per_layer_norm(index)?;
                (weight, Some(divisors))
            }
        };
        let addend = NormedAddend {
            y: &self.memory.projected,
            divisors,
            weight,
            overflow: self.overflow()?,
            layer: index,
        };
        cuda::post_norm(
            &self.lowered.gpu,
            addend,
            self.stream_factor(index, scales)?,
            self.source.spec.norm_eps,
            self.rows,
            self.lowered.sizes.hidden,
            &self.memory.residual,
            next,
        )
    }

    /// The input of a half that has no norm in the place of `norm`.
    fn stream_rows(&self, norm: Norm, layout: Layout) -> Result<StreamRows<'a>> {
        let (Norm::Mixer(layer) | Norm::Mlp(layer)) = norm else {
            bail!(Internal, "no norm before the {norm} rows");
        };
        Ok(StreamRows {
            layout,
            rows: &self.memory.input,
            overflow: self.overflow()?,
            layer,
        })
    }

    fn next_norm(&self, norm: Norm, layout: Layout) -> Result<NextNorm<'a>> {
        Ok(NextNorm {
            weight: self.norm_weight(norm)?,
            layout,
            rows: &self.memory.input,
            factors: match norm {
                Norm::PerLayer(_) => Some(&self.per_layer_scratch()?.1.factors),
                _ => None,
            },
        })
    }

    pub(super) fn norm_weight(&self, norm: Norm) -> Result<&'a DeviceBuffer> {
        match norm {
            Norm::Mixer(i) => on_gpu(&self.block(i)?.mixer_norms.pre),
            Norm::Mlp(i) => on_gpu(&self.block(i)?.mlp_norms.pre),
            Norm::Router(i) => match &self.beside(i)?.experts.router_scales {
                Some([norm, _]) => norm.on_gpu(),
                None => bail!(Internal, "the router of block {i} has no norm"),
            },
            Norm::Experts(i) => self.beside(i)?.experts_input_norm.on_gpu(),
            Norm::PerLayer(_) => self.lowered.ones(),
            Norm::Head => match self.through {
                Through::Model => self.source.weights.norm.on_gpu(),
                Through::Drafter => self.source.drafter()?.norm.on_gpu(),
            },
        }
    }

    fn fused_norm(&self, norm: Norm) -> Result<FusedNorm<'a>> {
        Ok(FusedNorm {
            scratch: &self.memory.norms,
            // The norms of halves take turns with the scratch.
            turn: self.halves_before(norm),
            x: &self.memory.residual,
            weight: self.norm_weight(norm)?,
            eps: self.source.spec.norm_eps,
        })
    }

    /// The parts that adapters change.
    pub(super) fn adapts(&self) -> Adapts {
        self.adapted
            .map_or(Adapts::NOTHING, |adapted| adapted.adapts)
    }

    /// The number of the block after those of the pass.
    fn end(&self) -> usize {
        match self.through {
            Through::Model => self.lowered.model.own_blocks().end,
            Through::Drafter => self.lowered.model.blocks.len(),
        }
    }

    /// Halves of blocks before a norm.
    fn halves_before(&self, norm: Norm) -> usize {
        let blocks = &self.lowered.model.blocks;
        let (block, own) = match norm {
            Norm::Mixer(i) => (i, 0),
            Norm::Mlp(i) | Norm::Router(i) | Norm::Experts(i) => {
                (i, blocks[i].halves().count() - 1)
            }
            Norm::PerLayer(i) => (i + 1, 0),
            Norm::Head => (self.end(), 0),
        };
        let before = blocks[..block].iter().map(|block| block.halves().count());
        before.sum::<usize>() + own
    }

    /// The input of a GEMM after its norm.
    pub(super) fn input(&self, normed: &Normed) -> Result<Input<'a>> {
        Ok(match normed.applied {
            Applied::Before => normed.layout.input(&self.memory.input, 1.0),
            Applied::Epilogue => Input::FusedNorm(self.fused_norm(normed.norm)?, normed.layout),
            Applied::Prologue => Input::Residual(self.residual_row(normed.norm)?),
            Applied::OnLoad => Input::Normalized(self.normalized_rows(normed.norm)?),
        })
    }

    /// The residual stream, whose norm a GEMM applies on the way to shared memory.
    fn normalized_rows(&self, norm: Norm) -> Result<NormalizedRows<'a>> {
        Ok(NormalizedRows {
            x: &self.memory.residual,
            weight: self.norm_weight(norm)?,
            eps: self.source.spec.norm_eps,
        })
    }

    /// The row that a GEMM's prologue computes: the previous half's output is normalized, added to the residual stream, and the sum
    /// normalized again. Between blocks the residual stream is in its usual place.
    fn residual_row(&self, norm: Norm) -> Result<ResidualRow<'a>> {
        let Memory {
            residual,
            between,
            half,
            ..
        } = self.memory;
        let last = self.end() - 1;
        let (post, x, sum) = match norm {
            Norm::Mlp(i) => (&self.block(i)?.mixer_norms.post, residual, between),
            Norm::Mixer(0) => bail!(Internal, "nothing is before the first norm"),
            Norm::Mixer(i) => (&self.block(i - 1)?.mlp_norms.post, between, residual),
            Norm::Head => (&self.block(last)?.mlp_norms.post, between, residual),
            Norm::Router(i) | Norm::Experts(i) | Norm::PerLayer(i) => {
                bail!(Internal, "block {i} has a norm that no product applies")
            }
        };
        Ok(ResidualRow {
            y: half,
            post: on_gpu(post)?,
            x,
            weight: self.norm_weight(norm)?,
            sum,
            eps: self.source.spec.norm_eps,
        })
    }

    /// Normalizes the first rows of the residual stream.
    fn normalize(&self, norm: Norm, layout: Layout) -> Result<()> {
        if let Norm::PerLayer(_) = norm {
            return self.normalize_for_input(self.per_layer_scratch()?.1);
        }
        self.normalize_from(&self.memory.residual, 0, norm, layout)
    }

    /// Normalizes some rows of the residual stream. Rows that are not consecutive are gathered first.
    pub(super) fn normalize_rows(&self, norm: Norm, rows: &[usize], layout: Layout) -> Result<()> {
        let (gpu, memory) = (&self.lowered.gpu, self.memory);
        if rows.windows(2).all(|pair| pair[1] == pair[0] + 1) {
            return self.normalize_from(&memory.residual, rows[0], norm, layout);
        }
        let row_bytes = self.lowered.sizes.hidden * size_of::<f32>();
        let indices: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
        let indices = DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, &indices)?;
        let to = DeviceSlice::from(&memory.projected).part(0..rows.len() * row_bytes)?;
        cuda::training::gather_rows((&memory.residual).into(), (&indices).into(), row_bytes, to)?;
        self.normalize_from(&memory.projected, 0, norm, layout)
    }

    /// Normalizes rows of `x` from `first` on.
    fn normalize_from(
        &self,
        x: &DeviceBuffer,
        first: usize,
        norm: Norm,
        layout: Layout,
    ) -> Result<()> {
        let (rows, hidden) = (self.rows, self.lowered.sizes.hidden);
        let norm = self.fused_norm(norm)?;
        let factors = (rows <= cuda::SKINNY_ROWS).then(|| norm.scratch.factors(norm.turn));
        cuda::rms_norm(
            &self.lowered.gpu,
            x,
            first * hidden * size_of::<f32>(),
            norm.weight,
            norm.eps,
            rows,
            hidden,
            &self.memory.input,
            layout,
            factors,
        )
    }

    pub(super) fn head(&self, input: &Normed, gemm: &GemmPlan) -> Result<()> {
        let head = biased(&self.source.weights.head)?;
        let (logits, vocab) = (&self.memory.logits, self.lowered.sizes.vocab);
        self.linear(
            gemm,
            self.input(input)?,
            &[head],
            Output::F32,
            logits,
            vocab,
        )?;
        match self.source.spec.logit_scale {
            1.0 => {}
            factor => {
                let bytes = self.rows * vocab * size_of::<f32>();
                cuda::scale(DeviceSlice::from(logits).part(0..bytes)?, factor)?;
            }
        }
        match self.source.spec.logit_cap {
            Some(cap) => cuda::soft_cap(&self.lowered.gpu, logits, self.rows * vocab, cap),
            None => Ok(()),
        }
    }
}
