//! Enqueues what the plan says. One new token for each of up to [`BATCH`] sequences is a recorded graph, which ends with the choice of
//! the next token and leaves the device ready for the next step; longer runs go through in chunks.
//!
//! One caller at a time: the working memory belongs to the model.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::memory::{Choosing, GraphKey, Memory, Ready};
use super::plan::{
    self, Applied, BlockShape, GatedShape, Half, Kernel, MlpShape, Norm, Normed, Step, Then,
};
use super::sizes::Sizes;
use crate::base::error::{bail, err};
use crate::base::memory::Tag;
use crate::base::{Result, call};
use crate::cuda::{
    self, Biased, DeviceBuffer, DeviceSlice, DrawRule, Drawn, Event, ExpertScratch, ExpertTable,
    FusedNorm, Gpu, Graph, Hardware, Heads, HostTable, Input, Layout, Matrix, MatrixShape,
    NextNorm, Output, PageTable, ResidualRow, Routing, Shared, SplitKv, Table, Unit,
};
use crate::model::gpu_cache::GpuCache;
use crate::model::kv_cache::KvCache;
use crate::model::spec::{AttentionSpec, BlockSpec, GatedMlpSpec, Spec};
use crate::model::weights::{Block, GatedMlp, Mlp, Projection, Weights};
use crate::ops::Array;
use crate::ops::linear::Linear;
use crate::ops::sample::{self, Choice};
use crate::tensor::WeightType;

/// Sequences that are stepped together at most.
pub(in crate::model) const BATCH: usize = 256;
/// Rows that go through the blocks together.
pub(in crate::model) const ROWS: usize = 4096;
/// Rows whose logits are computed together.
const HEAD_ROWS: usize = 64;
/// Blocks of a prompt that are enqueued ahead of the one that runs, where a call may be cancelled: enough that the device never waits,
/// few enough that cancelling is quick.
const LOOK_AHEAD: usize = 4;
/// What activations between gate and down are divided by at least: they are the largest of a model, and f16 ends at [`F16_MAX`].
const GLU_DIVISOR: u32 = 16;
/// The largest number of f16.
const F16_MAX: f64 = 65504.0;

/// What the steps and prompts of a model may need of kernels.
pub(in crate::model) fn units(spec: &Spec) -> Vec<Unit> {
    let mut units = vec![
        Unit::LinearSkinny,
        Unit::LinearTiled,
        Unit::LinearWide,
        Unit::LinearDense,
        Unit::LinearRows,
        Unit::LinearRowNorms,
        Unit::LinearPack,
        Unit::Embed,
        Unit::RmsNorm,
        Unit::PostNorm,
        Unit::RopeStore,
        Unit::Glu,
        Unit::CheckScales,
        Unit::Argmax,
        Unit::Draw,
    ];
    if spec.blocks.iter().any(|b| b.mlp.mixture().is_some()) {
        units.extend([Unit::ExpertsRoute, Unit::LinearExperts, Unit::ExpertsSum]);
    }
    for block in &spec.blocks {
        for unit in attention_units(spec, &block.attention) {
            if !units.contains(&unit) {
                units.push(unit);
            }
        }
    }
    units
}

fn attention_units(spec: &Spec, attention: &AttentionSpec) -> [Unit; 3] {
    let rotary_dim = spec.ropes[attention.rope].table.rotary_dim();
    let is_limited = attention.window.is_some() || attention.score_cap.is_some();
    cuda::attention_units(attention.head_dim, rotary_dim, is_limited)
}

/// A model, as every call needs it.
#[derive(Clone, Copy)]
pub(in crate::model) struct Source<'a> {
    pub(in crate::model) spec: &'a Spec,
    pub(in crate::model) weights: &'a Weights,
}

/// The rotary frequencies of a set, f32 on the device.
struct Frequencies {
    short: DeviceBuffer,
    /// Of contexts longer than so many positions.
    long: Option<(usize, DeviceBuffer)>,
}

/// A mixture of experts, as its kernels need it.
struct Mixture {
    routing: Routing,
    table: ExpertTable,
}

/// What the forward pass needs beside weights.
pub(in crate::model) struct Executor {
    gpu: Arc<Gpu>,
    hardware: Hardware,
    sizes: Sizes,
    blocks: Vec<BlockShape>,
    head: MatrixShape,
    /// The mixture of each block that has one.
    mixtures: Vec<Option<Mixture>>,
    /// What activations between gate and down are divided by, in each block.
    glu_divisors: Vec<u32>,
    frequencies: Vec<Frequencies>,
    /// The embedding, unless the head serves for it.
    table: Option<HostTable>,
    memory: Mutex<Memory>,
}

/// The rules by which tokens are chosen; none if all are the argmax, without penalties.
fn rules_of(choices: &[Choice<'_>]) -> Vec<DrawRule> {
    match choices.iter().all(|choice| choice.options.is_greedy()) {
        true => Vec::new(),
        false => choices.iter().map(Choice::rule).collect(),
    }
}

/// The rules of the draws that follow those of `rules`.
fn following(rules: &[DrawRule]) -> Vec<DrawRule> {
    let next = |rule: &DrawRule| DrawRule {
        draw: rule.draw + 1,
        ..*rule
    };
    rules.iter().map(next).collect()
}

/// The values at these indices.
fn pick<T: Copy>(values: &[T], indices: &[usize]) -> Vec<T> {
    indices.iter().map(|&i| values[i]).collect()
}

/// The sequences of a step.
struct Sequences<'a> {
    caches: Vec<&'a GpuCache>,
    positions: Vec<usize>,
    /// Whether they have room for long contexts.
    long: bool,
}

impl Executor {
    /// What runs this model; `table` is what [`super::table`] has made of its embedding. A model that no fused kernel runs is an error
    /// that names what it has.
    pub(in crate::model) fn new(
        gpu: &Arc<Gpu>,
        source: Source<'_>,
        table: Option<HostTable>,
    ) -> Result<Executor> {
        let Source { spec, weights } = source;
        if let Some(what) = plan::unsupported(spec) {
            bail!(Unsupported, "{what}, for which there is no kernel on a GPU");
        }
        let pairs = weights.blocks.iter().zip(&spec.blocks);
        let mixtures = pairs.clone().map(|pair| mixture(gpu, pair));
        let mixtures = mixtures.collect::<Result<_>>()?;
        let blocks: Vec<BlockShape> = pairs.map(shape).collect::<Result<_>>()?;
        let head = matrix(&weights.head)?.shape();
        let is_dense = |w: &MatrixShape| w.storage != WeightType::Nvfp4;
        let dense = is_dense(&head) || blocks.iter().flat_map(BlockShape::matrices).any(is_dense);
        let sizes = Sizes::of(spec, dense)?;
        let upload = |values: &[f32]| DeviceBuffer::from_slice(gpu, Tag::DeviceWeights, values);
        let frequencies = spec.ropes.iter().map(|set| {
            let long = match &set.long {
                Some(long) => Some((long.original_positions, upload(&long.table.frequencies)?)),
                None => None,
            };
            Ok(Frequencies {
                short: upload(&set.table.frequencies)?,
                long,
            })
        });
        let divisors = weights.blocks.iter().map(|b| glu_divisor(gpu, b));
        let executor = Executor {
            gpu: gpu.clone(),
            glu_divisors: divisors.collect::<Result<_>>()?,
            hardware: Hardware::of(gpu),
            frequencies: frequencies.collect::<Result<_>>()?,
            blocks,
            head,
            mixtures,
            table,
            memory: Mutex::new(Memory::new(gpu, &sizes, 0, 0, 1, 1)?),
            sizes,
        };
        for index in 0..spec.blocks.len() {
            executor.heads(source, index, false).check()?;
        }
        // What weights passed through is not needed again.
        gpu.empty_cache()?;
        Ok(executor)
    }

    /// Bytes that are here rather than with the weights: of an embedding in host memory.
    pub(in crate::model) fn bytes(&self) -> usize {
        self.table.as_ref().map_or(0, HostTable::bytes)
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a sequence with room for so many positions is rotated as a long one.
    fn is_long(&self, capacity: usize) -> bool {
        let mut sets = self.frequencies.iter().filter_map(|f| f.long.as_ref());
        sets.any(|(original, _)| capacity > *original)
    }

    fn heads<'a>(&'a self, source: Source<'a>, block: usize, long: bool) -> Heads<'a> {
        let spec = &source.spec.blocks[block].attention;
        let weights = &source.weights.blocks[block].attention;
        let norm = |norm: &'a Option<Array>| norm.as_ref().and_then(|n| n.on_gpu().ok());
        let (set, frequencies) = (&source.spec.ropes[spec.rope], &self.frequencies[spec.rope]);
        let (table, frequencies) = match (&set.long, &frequencies.long) {
            (Some(set), Some((_, frequencies))) if long => (&set.table, frequencies),
            _ => (&set.table, &frequencies.short),
        };
        Heads {
            heads: spec.heads,
            kv_heads: spec.kv_heads,
            dim: spec.head_dim,
            q_norm: norm(&weights.q_norm),
            k_norm: norm(&weights.k_norm),
            frequencies,
            rotary_dim: table.rotary_dim(),
            attention_factor: table.attention_factor,
            eps: source.spec.norm_eps,
            scale: spec.scale,
            window: spec.window,
            score_cap: spec.score_cap,
        }
    }

    /// Runs `tokens` of one sequence, [`ROWS`] at most, after what `cache` holds, whose pages exist already. Their logits are
    /// there for the asking.
    pub(in crate::model) fn run<'a>(
        &'a self,
        source: Source<'a>,
        tokens: &[u32],
        cache: &KvCache,
    ) -> Result<Prompt<'a>> {
        let mut memory = self.memory();
        memory.forget();
        memory.settle()?;
        let (first, rows) = (cache.len(), tokens.len());
        let pages = (first + rows).div_ceil(cuda::PAGE);
        memory.fit(&self.gpu, &self.sizes, rows, 0, 1, pages)?;
        let ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
        memory.tokens.write(0, &ids)?;
        memory.write_pages(&[cache.gpu()?])?;
        self.embed(source, rows, &memory)?;
        let watched = call::with(|call| call.is_watched());
        let blocks = self.blocks.len();
        let steps = plan::plan(&self.blocks, self.head, rows, false, &self.hardware);
        let pass = Pass {
            executor: self,
            source,
            memory: &memory,
            rows,
            attention: Attention::Prompt(first),
            long: self.is_long(cache.capacity()),
        };
        let enqueue = || {
            let mut enqueued = VecDeque::new();
            for of_block in steps.chunk_by(|a, b| a.block == b.block) {
                let index = of_block[0].block;
                of_block.iter().try_for_each(|step| pass.enqueue(step))?;
                if watched {
                    enqueued.push_back(Event::record(&self.gpu)?);
                }
                if enqueued.len() > LOOK_AHEAD {
                    enqueued
                        .pop_front()
                        .map_or(Ok(()), |e| e.wait_or_cancel())?;
                    call::begun((rows * (index + 1 - LOOK_AHEAD) / blocks) as u64);
                }
            }
            enqueued.iter().try_for_each(Event::wait_or_cancel)
        };
        if let Err(e) = enqueue() {
            // What is enqueued still uses the working memory and the cache. If waiting fails too, the device is lost.
            let _ = self.gpu.synchronize();
            return Err(e);
        }
        Ok(Prompt {
            executor: self,
            source,
            memory,
        })
    }

    fn embed(&self, source: Source<'_>, rows: usize, memory: &Memory) -> Result<()> {
        let table = match &self.table {
            Some(table) => Table::Host(table),
            None => Table::Device(matrix(&source.weights.head)?),
        };
        let scale = source.spec.embedding_scale;
        let (tokens, residual) = (&memory.tokens, &memory.residual);
        cuda::embed(&self.gpu, table, tokens, rows, scale, residual)
    }

    /// Runs one token of each of several sequences, whose pages exist already, and leaves the next tokens, as `choices` says,
    /// and the logits on the device.
    fn step(
        &self,
        source: Source<'_>,
        tokens: &[u32],
        sequences: &Sequences<'_>,
        choices: &[Choice<'_>],
        memory: &mut Memory,
    ) -> Result<()> {
        let batch = tokens.len();
        let positions = &sequences.positions;
        let last = positions.iter().copied().max().unwrap_or(0);
        let pages = last / cuda::PAGE + 1;
        memory.fit(&self.gpu, &self.sizes, batch, batch, batch, pages)?;
        let wanted = sequences.ready_at(positions);
        let rules = rules_of(choices);
        // The device has gone on by itself if these sequences go on with the tokens that it chose.
        let goes_on = memory.ready == wanted && memory.chose(tokens, positions);
        let draws_on = goes_on && memory.rules == rules;
        memory.forget();
        if !goes_on {
            let ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
            let places: Vec<i32> = positions.iter().map(|&p| p as i32).collect();
            memory.tokens.write(0, &ids)?;
            memory.positions.write(0, &places)?;
            memory.write_pages(&sequences.caches)?;
        }
        if !draws_on && !rules.is_empty() {
            let history: Vec<&[u32]> = choices.iter().map(|choice| choice.history).collect();
            let scratch = memory.drawing(&self.gpu, &self.sizes)?;
            scratch.set(&self.gpu, &rules, &history)?;
        }
        self.launch(source, wanted, rules, sequences.long, memory)
    }

    /// Enqueues a step of the sequences that the device is ready for, and notes what it is ready for afterwards. If that fails,
    /// nobody knows.
    fn launch(
        &self,
        source: Source<'_>,
        mut ready: Vec<Ready>,
        rules: Vec<DrawRule>,
        long: bool,
        memory: &mut Memory,
    ) -> Result<()> {
        memory.forget();
        let batch = ready.len();
        let last = ready.iter().map(|r| r.position).max().unwrap_or(0);
        let division = |attention: &AttentionSpec| {
            let AttentionSpec {
                heads,
                kv_heads,
                head_dim,
                window,
                ..
            } = *attention;
            let visible = (last + 1).min(window.unwrap_or(usize::MAX));
            let [unit, ..] = attention_units(source.spec, attention);
            SplitKv::of(&self.gpu, heads, kv_heads, head_dim, unit, batch, visible)
        };
        let key = GraphKey {
            batch,
            divisions: self.sizes.attentions.iter().map(division).collect(),
            choosing: match rules.is_empty() {
                true => Choosing::Argmax,
                false => Choosing::Drawn {
                    penalties: rules.iter().any(|rule| rule.penalty != 1.0),
                },
            },
            long,
        };
        if let Some(graph) = memory.graphs.get(&key) {
            graph.launch()?;
        } else {
            // The first step of its kind runs as it is enqueued, which also loads the kernels: no graph may be recorded before.
            self.enqueue_step(source, &key, memory)?;
            let graph = Graph::record(&self.gpu, || self.enqueue_step(source, &key, memory))?;
            memory.graphs.insert(key, graph);
        }
        for ready in &mut ready {
            ready.position += 1;
        }
        memory.ready = ready;
        memory.rules = following(&rules);
        Ok(())
    }

    fn enqueue_step(&self, source: Source<'_>, key: &GraphKey, memory: &Memory) -> Result<()> {
        let batch = key.batch;
        self.embed(source, batch, memory)?;
        let pass = Pass {
            executor: self,
            source,
            memory,
            rows: batch,
            attention: Attention::Step(&key.divisions),
            long: key.long,
        };
        let steps = plan::plan(&self.blocks, self.head, batch, true, &self.hardware);
        steps.iter().try_for_each(|step| pass.enqueue(step))?;
        match (key.choosing, &memory.draw) {
            (Choosing::Argmax, _) => cuda::argmax(
                &self.gpu,
                &memory.logits,
                batch,
                self.sizes.vocab,
                &memory.best,
                &memory.tokens,
                Some((&memory.positions, &memory.history)),
            ),
            (Choosing::Drawn { penalties }, Some(scratch)) => cuda::draw(
                &self.gpu,
                &memory.logits,
                batch,
                self.sizes.vocab,
                penalties,
                scratch,
                &memory.tokens,
                &memory.positions,
                &memory.history,
            ),
            (Choosing::Drawn { .. }, None) => bail!(Internal, "there are no rules to draw by"),
        }
    }

    /// The sequences of a step, which are rotated alike.
    fn sequences<'a>(&self, caches: &[&'a KvCache]) -> Result<Sequences<'a>> {
        Ok(Sequences {
            caches: caches.iter().map(|c| c.gpu()).collect::<Result<_>>()?,
            positions: caches.iter().map(|c| c.len()).collect(),
            long: caches.first().is_some_and(|c| self.is_long(c.capacity())),
        })
    }

    /// The indices of the sequences that are rotated as short ones and of those rotated as long ones, if there are both: a step
    /// takes one table of frequencies for all of its sequences, so each kind takes a step of its own.
    fn kinds(&self, caches: &[&KvCache]) -> Option<[Vec<usize>; 2]> {
        if self.frequencies.iter().all(|f| f.long.is_none()) {
            return None;
        }
        let is_long = |i: &usize| self.is_long(caches[*i].capacity());
        let (long, short): (Vec<usize>, Vec<usize>) = (0..caches.len()).partition(is_long);
        (!long.is_empty() && !short.is_empty()).then_some([short, long])
    }

    /// One token of each of several sequences; the logits, one row for each, are appended to `logits`.
    pub(in crate::model) fn step_logits(
        &self,
        source: Source<'_>,
        tokens: &[u32],
        caches: &[&KvCache],
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        if let Some(kinds) = self.kinds(caches) {
            let (start, vocab) = (logits.len(), self.sizes.vocab);
            logits.resize(start + tokens.len() * vocab, 0.0);
            for kind in &kinds {
                let mut rows = Vec::new();
                self.step_logits(source, &pick(tokens, kind), &pick(caches, kind), &mut rows)?;
                for (row, i) in rows.chunks(vocab).zip(kind) {
                    logits[start + i * vocab..][..vocab].copy_from_slice(row);
                }
            }
            return Ok(());
        }
        let sequences = self.sequences(caches)?;
        let mut memory = self.memory();
        memory.settle()?;
        self.step(source, tokens, &sequences, &[], &mut memory)?;
        read_logits(&memory.logits, tokens.len() * self.sizes.vocab, logits)?;
        memory.check_fits()
    }

    /// One token of each of several sequences; the next tokens, as `choices` says. With `look_ahead`, the step after is enqueued
    /// at once, in the hope that these sequences go on with those tokens; their pages must reach that far.
    pub(in crate::model) fn step_choose(
        &self,
        source: Source<'_>,
        tokens: &[u32],
        caches: &[&KvCache],
        choices: &[Choice<'_>],
        look_ahead: bool,
    ) -> Result<Vec<u32>> {
        if let Some(kinds) = self.kinds(caches) {
            let mut chosen = vec![0; tokens.len()];
            for kind in &kinds {
                let (tokens, caches) = (pick(tokens, kind), pick(caches, kind));
                // The other kind's step comes next, so there is nothing to enqueue ahead.
                let next =
                    self.step_choose(source, &tokens, &caches, &pick(choices, kind), false)?;
                kind.iter()
                    .zip(next)
                    .for_each(|(&i, token)| chosen[i] = token);
            }
            return Ok(chosen);
        }
        let sequences = self.sequences(caches)?;
        let mut memory = self.memory();
        let after: Vec<usize> = sequences.positions.iter().map(|p| p + 1).collect();
        let foreseen = memory.ahead.is_some()
            && memory.ready == sequences.ready_at(&after)
            && memory.rules == following(&rules_of(choices))
            && memory.chose(tokens, &sequences.positions);
        let done = match memory.ahead.take() {
            Some(event) if foreseen => event,
            before => {
                if let Some(event) = before {
                    event.wait()?;
                }
                self.step(source, tokens, &sequences, choices, &mut memory)?;
                Event::record(&self.gpu)?
            }
        };
        let room = sequences
            .caches
            .iter()
            .zip(&after)
            .all(|(cache, &position)| position < cache.allocated());
        let mut ahead = Ok(());
        if look_ahead && room && after.iter().all(|p| p / cuda::PAGE < memory.pages) {
            let (ready, rules) = (memory.ready.clone(), memory.rules.clone());
            ahead = self
                .launch(source, ready, rules, sequences.long, &mut memory)
                .and_then(|()| {
                    memory.ahead = Some(Event::record(&self.gpu)?);
                    Ok(())
                });
        }
        done.wait()?;
        ahead?;
        // What f16 does not hold makes logits that nothing can be chosen by.
        let unusable = |row: usize, position| {
            !matches!(
                memory.drawn(row, tokens.len(), position),
                Some(Drawn::Token(_))
            )
        };
        if after
            .iter()
            .enumerate()
            .any(|(row, &position)| unusable(row, position))
        {
            memory.settle()?;
            memory.check_fits()?;
        }
        let chosen = after.iter().enumerate().map(|(row, &position)| {
            match memory.drawn(row, tokens.len(), position) {
                Some(Drawn::Token(token)) => Ok(token),
                Some(Drawn::AllRuledOut) => Err(sample::all_ruled_out(self.sizes.vocab)),
                Some(Drawn::Unusable(token)) => Err(sample::unusable(token as usize)),
                None => Err(err!(Internal, "the device chose no token")),
            }
        });
        chosen.collect()
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // A step enqueued ahead still writes to page-locked memory. If waiting fails, the device is lost and writes no more.
        let _ = self.memory().settle();
    }
}

impl Sequences<'_> {
    fn ready_at(&self, positions: &[usize]) -> Vec<Ready> {
        let each = self.caches.iter().zip(positions);
        each.map(|(cache, &position)| Ready {
            version: cache.version(),
            position,
        })
        .collect()
    }
}

/// Rows that have gone through the blocks.
pub(in crate::model) struct Prompt<'a> {
    executor: &'a Executor,
    source: Source<'a>,
    memory: MutexGuard<'a, Memory>,
}

impl Prompt<'_> {
    /// Appends the logits of `rows` rows from `first` on.
    pub(in crate::model) fn logits(
        &mut self,
        first: usize,
        rows: usize,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        let Executor {
            gpu,
            sizes,
            hardware,
            head,
            ..
        } = self.executor;
        for start in (first..first + rows).step_by(HEAD_ROWS) {
            let n = HEAD_ROWS.min(first + rows - start);
            let (held, pages) = (self.memory.rows, self.memory.pages);
            self.memory.fit(gpu, sizes, held, n, 1, pages)?;
            let pass = Pass {
                executor: self.executor,
                source: self.source,
                memory: &self.memory,
                rows: n,
                attention: Attention::Prompt(0),
                long: false,
            };
            let input = Normed {
                norm: Norm::Head,
                layout: plan::head_layout(*head, n, hardware),
                applied: Applied::Before,
            };
            pass.normalize(input.norm, start, input.layout)?;
            pass.head(&input)?;
            read_logits(&self.memory.logits, n * sizes.vocab, logits)?;
        }
        self.memory.check_fits()
    }

    /// Waits for the device, so that a fault comes out here.
    pub(in crate::model) fn finish(&mut self) -> Result<()> {
        self.memory.check_fits()
    }
}

#[derive(Clone, Copy)]
enum Attention<'a> {
    /// One token of each sequence; by number of [`Sizes::attentions`].
    Step(&'a [SplitKv]),
    /// Rows of one sequence from this position on.
    Prompt(usize),
}

/// Rows on their way through the blocks.
struct Pass<'a> {
    executor: &'a Executor,
    source: Source<'a>,
    memory: &'a Memory,
    rows: usize,
    attention: Attention<'a>,
    /// Whether the sequences have room for long contexts.
    long: bool,
}

impl<'a> Pass<'a> {
    fn block(&self, index: usize) -> (&'a Block, &'a Weights) {
        (&self.source.weights.blocks[index], self.source.weights)
    }

    /// Launches what a step of the plan says.
    fn enqueue(&self, step: &Step) -> Result<()> {
        let (executor, memory) = (self.executor, self.memory);
        let index = step.block;
        match &step.kernel {
            Kernel::Normalize { norm, layout } => self.normalize(*norm, 0, *layout),
            Kernel::Qkv { input } => {
                let attention = &self.block(index).0.attention;
                let matrices = [
                    biased(&attention.q)?,
                    biased(&attention.k)?,
                    biased(&attention.v)?,
                ];
                let (out, width) = (&memory.projected, executor.sizes.qkv());
                self.linear(self.input(input)?, &matrices, Output::F32, out, width)
            }
            Kernel::Decode { .. } | Kernel::StoreKv | Kernel::Prefill => {
                self.attend(index, &step.kernel)
            }
            Kernel::GateUp { input, fused } => {
                let (spec, mlp) = self.mlp(index)?;
                let matrices = [biased(&mlp.gate)?, biased(&mlp.up)?];
                let input = self.input(input)?;
                let wide = spec.intermediate_size;
                match fused {
                    true => {
                        let glu = plan::glu(spec.activation, executor.glu_divisors[index]);
                        let output = input.layout().glu(glu);
                        self.linear(input, &matrices, output, &memory.inner, wide)
                    }
                    false => {
                        let out = &memory.projected;
                        self.linear(input, &matrices, Output::F16, out, 2 * wide)
                    }
                }
            }
            Kernel::Activate => {
                let (spec, _) = self.mlp(index)?;
                cuda::glu(
                    &executor.gpu,
                    plan::glu(spec.activation, executor.glu_divisors[index]),
                    &memory.projected,
                    self.rows,
                    spec.intermediate_size,
                    &memory.inner,
                )
            }
            Kernel::Route => {
                let (mixture, scratch) = self.mixture(index)?;
                let Mlp::Experts(experts) = &self.block(index).0.mlp else {
                    bail!(Internal, "block {index} has no router");
                };
                let gate = experts.shared.as_ref().and_then(|(_, gate)| gate.as_ref());
                cuda::route(
                    &executor.gpu,
                    &mixture.routing,
                    of_linear(&experts.router)?,
                    gate.map(of_linear).transpose()?,
                    &memory.input,
                    self.rows,
                    scratch,
                    &memory.linear,
                    (&memory.unroutable, index),
                )
            }
            Kernel::ExpertsGateUp => {
                let (Mixture { routing, table }, scratch) = self.mixture(index)?;
                let Some(spec) = self.source.spec.blocks[index].mlp.mixture() else {
                    bail!(Internal, "block {index} has no experts");
                };
                let glu = plan::glu(spec.expert.activation, executor.glu_divisors[index]);
                let (gpu, x) = (&executor.gpu, &memory.input);
                cuda::experts_gate_up(gpu, routing, table, x, self.rows, glu, scratch)
            }
            Kernel::ExpertsDown => {
                let (Mixture { routing, table }, scratch) = self.mixture(index)?;
                let divisor = executor.glu_divisors[index] as f32;
                cuda::experts_down(&executor.gpu, routing, table, self.rows, divisor, scratch)
            }
            Kernel::SumExperts { next } => self.sum_experts(index, *next),
            Kernel::Project { half, layout, then } => self.project(index, *half, *layout, *then),
            Kernel::PostNorm { half, next } => self.post_norm(index, *half, *next),
            Kernel::Head { input } => self.head(input),
        }
    }

    /// The MLP of a block that all rows go through.
    fn mlp(&self, index: usize) -> Result<(&'a GatedMlpSpec, &'a GatedMlp)> {
        let spec = self.source.spec.blocks[index].mlp.of_all_rows();
        let weights = self.block(index).0.mlp.of_all_rows();
        spec.zip(weights).ok_or_else(|| {
            err!(
                Internal,
                "block {index} has experts alone, and its plan an MLP of all rows"
            )
        })
    }

    /// The experts of a block, and what they work in.
    fn mixture(&self, index: usize) -> Result<(&'a Mixture, &'a ExpertScratch)> {
        let mixture = self.executor.mixtures[index].as_ref();
        mixture.zip(self.memory.experts.as_ref()).ok_or_else(|| {
            err!(
                Internal,
                "block {index} has a dense MLP, and its plan experts"
            )
        })
    }

    fn sum_experts(&self, index: usize, next: Option<(Norm, Layout)>) -> Result<()> {
        let (mixture, scratch) = self.mixture(index)?;
        let spec = self.source.spec.blocks[index].mlp.mixture();
        let shared = spec.and_then(|spec| spec.shared).map(|shared| Shared {
            made: &self.memory.projected,
            gated: shared.gated,
        });
        cuda::sum_experts(
            &self.executor.gpu,
            &mixture.routing,
            shared,
            self.source.spec.norm_eps,
            self.rows,
            self.executor.sizes.hidden,
            &self.memory.residual,
            self.next_norm(next)?,
            scratch,
        )
    }

    fn linear(
        &self,
        input: Input<'_>,
        matrices: &[Biased<'_>],
        output: Output,
        out: &DeviceBuffer,
        stride: usize,
    ) -> Result<()> {
        let (gpu, scratch) = (&self.executor.gpu, &self.memory.linear);
        cuda::linear(
            gpu, input, self.rows, matrices, output, out, stride, scratch,
        )
    }

    fn attend(&self, index: usize, kernel: &Kernel) -> Result<()> {
        let (executor, memory) = (self.executor, self.memory);
        let (gpu, rows) = (&executor.gpu, self.rows);
        let heads = executor.heads(self.source, index, self.long);
        let pages = PageTable {
            table: &memory.table,
            stride: memory.pages,
            layer: index,
            unfit: Some(&memory.unfit),
        };
        match (kernel, self.attention) {
            (Kernel::Decode { layout }, Attention::Step(divisions)) => cuda::decode(
                gpu,
                &heads,
                &pages,
                &memory.projected,
                &memory.positions,
                rows,
                divisions[executor
                    .sizes
                    .attention_index(&self.source.spec.blocks[index].attention)],
                &memory.splits,
                &memory.input,
                *layout,
            ),
            (Kernel::StoreKv, Attention::Prompt(first)) => {
                let (qkv, q) = (&memory.projected, &memory.inner);
                cuda::store(gpu, &heads, &pages, qkv, 0, rows, first, q)
            }
            (Kernel::Prefill, Attention::Prompt(first)) => {
                let (q, out) = (&memory.inner, &memory.input);
                cuda::prefill(gpu, &heads, &pages, q, 0, rows, first, out)
            }
            _ => bail!(Internal, "a step and a prompt were mixed up"),
        }
    }

    fn project(&self, index: usize, half: Half, layout: Layout, then: Then) -> Result<()> {
        let (block, memory) = (self.block(index).0, self.memory);
        let (input, weight) = match half {
            Half::Attention => (layout.input(&memory.input, 1.0), &block.attention.o),
            Half::Mlp => {
                let divisor = self.executor.glu_divisors[index] as f32;
                (
                    layout.input(&memory.inner, divisor),
                    &self.mlp(index)?.1.down,
                )
            }
        };
        let (matrix, hidden) = (biased(weight)?, self.executor.sizes.hidden);
        match then {
            Then::Add => self.linear(input, &[matrix], Output::Add, &memory.residual, hidden),
            Then::AddAndNorm(norm) => {
                let norm = self.deferred(norm)?;
                cuda::linear_add_norm(&self.executor.gpu, input, self.rows, matrix, &norm)
            }
            Then::Store => self.linear(input, &[matrix], Output::F32, &memory.projected, hidden),
            Then::StoreRow => self.linear(input, &[matrix], Output::F32, &memory.half, hidden),
        }
    }

    fn post_norm(&self, index: usize, half: Half, next: Option<(Norm, Layout)>) -> Result<()> {
        let block = self.block(index).0;
        let norm = match half {
            Half::Attention => &block.attention_norms.post,
            Half::Mlp => &block.mlp_norms.post,
        };
        cuda::post_norm(
            &self.executor.gpu,
            &self.memory.projected,
            on_gpu(norm)?,
            self.source.spec.norm_eps,
            self.rows,
            self.executor.sizes.hidden,
            &self.memory.residual,
            self.next_norm(next)?,
        )
    }

    fn next_norm(&self, next: Option<(Norm, Layout)>) -> Result<Option<NextNorm<'a>>> {
        let Some((norm, layout)) = next else {
            return Ok(None);
        };
        Ok(Some(NextNorm {
            weight: self.norm_weight(norm)?,
            layout,
            rows: &self.memory.input,
        }))
    }

    fn norm_weight(&self, norm: Norm) -> Result<&'a DeviceBuffer> {
        match norm {
            Norm::Attention(i) => on_gpu(&self.block(i).0.attention_norms.pre),
            Norm::Mlp(i) => on_gpu(&self.block(i).0.mlp_norms.pre),
            Norm::Head => self.source.weights.norm.on_gpu(),
        }
    }

    fn deferred(&self, norm: Norm) -> Result<FusedNorm<'a>> {
        Ok(FusedNorm {
            scratch: &self.memory.norms,
            // Norms take turns, of which every block has two.
            turn: usize::from(matches!(norm, Norm::Mlp(_))),
            x: &self.memory.residual,
            weight: self.norm_weight(norm)?,
            eps: self.source.spec.norm_eps,
        })
    }

    /// What products take of normalized rows.
    fn input(&self, normed: &Normed) -> Result<Input<'a>> {
        Ok(match normed.applied {
            Applied::Before => normed.layout.input(&self.memory.input, 1.0),
            Applied::Epilogue => Input::FusedNorm(self.deferred(normed.norm)?, normed.layout),
            Applied::Prologue => Input::Residual(self.residual_row(normed.norm)?),
        })
    }

    /// The row that the prologue of a product makes: the output of the half before, normalized, added and normalized again. Between blocks
    /// the residual stream is at its usual place.
    fn residual_row(&self, norm: Norm) -> Result<ResidualRow<'a>> {
        let Memory {
            residual,
            between,
            half,
            ..
        } = self.memory;
        let last = self.source.spec.blocks.len() - 1;
        let (post, x, sum) = match norm {
            Norm::Mlp(i) => (&self.block(i).0.attention_norms.post, residual, between),
            Norm::Attention(0) => bail!(Internal, "nothing is before the first norm"),
            Norm::Attention(i) => (&self.block(i - 1).0.mlp_norms.post, between, residual),
            Norm::Head => (&self.block(last).0.mlp_norms.post, between, residual),
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

    /// Normalizes rows of the residual stream from `first` on.
    fn normalize(&self, norm: Norm, first: usize, layout: Layout) -> Result<()> {
        let (rows, hidden) = (self.rows, self.executor.sizes.hidden);
        let deferred = self.deferred(norm)?;
        let factors = (rows <= cuda::SKINNY_ROWS).then(|| deferred.scratch.factors(deferred.turn));
        cuda::rms_norm(
            &self.executor.gpu,
            deferred.x,
            first * hidden * size_of::<f32>(),
            deferred.weight,
            deferred.eps,
            rows,
            hidden,
            &self.memory.input,
            layout,
            factors,
        )
    }

    fn head(&self, input: &Normed) -> Result<()> {
        let head = biased(&self.source.weights.head)?;
        let (logits, vocab) = (&self.memory.logits, self.executor.sizes.vocab);
        self.linear(self.input(input)?, &[head], Output::F32, logits, vocab)?;
        match self.source.spec.logit_cap {
            Some(cap) => cuda::soft_cap(&self.executor.gpu, logits, self.rows * vocab, cap),
            None => Ok(()),
        }
    }
}

/// The power of two by which the gated linear unit of this block is divided so that it fits f16 for any input. The length of a normalized
/// row is at most the square root of its width, so gate and up are at most that times the norms of their rows, with the weight of the norm
/// folded in (Cauchy-Schwarz). Activations are no larger than their arguments.
fn glu_divisor(gpu: &Arc<Gpu>, block: &Block) -> Result<u32> {
    let Some(norm) = &block.mlp_norms.pre else {
        return Ok(GLU_DIVISOR);
    };
    let mut largest = 0f64;
    for mlp in block.mlp.mlps() {
        let both = bounds(gpu, [&mlp.gate, &mlp.up], norm)?;
        let (gate, up) = both.split_at(both.len() / 2);
        let products = gate.iter().zip(up).map(|(g, u)| g * u);
        largest = products.fold(largest, f64::max);
    }
    // Room for the rounding of everything before.
    let mut divisor = GLU_DIVISOR;
    while largest * 1.01 > F16_MAX * f64::from(divisor) && divisor < 1 << 30 {
        divisor *= 2;
    }
    Ok(divisor)
}

/// What the features of projections that share a normalized input can reach, one projection after the other.
fn bounds(gpu: &Arc<Gpu>, projections: [&Projection; 2], norm: &Array) -> Result<Vec<f64>> {
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

fn read_logits(from: &DeviceBuffer, count: usize, logits: &mut Vec<f32>) -> Result<()> {
    let before = logits.len();
    logits
        .try_reserve(count)
        .map_err(|e| err!(OutOfMemory, "{count} logits: {e}"))?;
    logits.resize(before + count, 0.0);
    from.read(0, &mut logits[before..])
}

fn on_gpu(array: &Option<Array>) -> Result<&DeviceBuffer> {
    match array {
        Some(array) => array.on_gpu(),
        None => bail!(Internal, "a norm is missing that the spec has"),
    }
}

fn matrix(projection: &Projection) -> Result<&Matrix> {
    of_linear(&projection.linear)
}

fn of_linear(linear: &Linear) -> Result<&Matrix> {
    linear
        .matrix()
        .ok_or_else(|| err!(Internal, "a weight of a model on a GPU is in host memory"))
}

fn biased(projection: &Projection) -> Result<Biased<'_>> {
    let bias = projection.bias.as_ref().map(Array::on_gpu).transpose()?;
    Ok((matrix(projection)?, bias))
}

fn gated_shape(mlp: &GatedMlp) -> Result<GatedShape> {
    Ok(GatedShape {
        gate_up: [matrix(&mlp.gate)?.shape(), matrix(&mlp.up)?.shape()],
        down: matrix(&mlp.down)?.shape(),
    })
}

fn shape((weights, spec): (&Block, &BlockSpec)) -> Result<BlockShape> {
    let shape = |p: &Projection| Ok(matrix(p)?.shape());
    let attention = &weights.attention;
    let of_all_rows = weights.mlp.of_all_rows().map(gated_shape).transpose()?;
    Ok(BlockShape {
        norms: spec.norms,
        qkv: [
            shape(&attention.q)?,
            shape(&attention.k)?,
            shape(&attention.v)?,
        ],
        o: shape(&attention.o)?,
        mlp: match (&weights.mlp, of_all_rows) {
            (Mlp::Experts(_), shared) => MlpShape::Experts { shared },
            (Mlp::Dense(_), Some(mlp)) => MlpShape::Dense(mlp),
            (Mlp::Dense(_), None) => bail!(Internal, "a dense MLP without projections"),
        },
    })
}

fn mixture(gpu: &Arc<Gpu>, (weights, spec): (&Block, &BlockSpec)) -> Result<Option<Mixture>> {
    let (Mlp::Experts(weights), Some(spec)) = (&weights.mlp, spec.mlp.mixture()) else {
        return Ok(None);
    };
    let routing = Routing {
        experts: spec.count,
        per_token: spec.per_token,
        normalized: spec.normalized,
    };
    routing.check()?;
    let experts = weights.experts.iter().map(|mlp| {
        let GatedMlp { gate, up, down } = mlp;
        Ok([biased(gate)?, biased(up)?, biased(down)?])
    });
    let experts = experts.collect::<Result<Vec<_>>>()?;
    let table = ExpertTable::new(gpu, &experts)?;
    Ok(Some(Mixture { routing, table }))
}
