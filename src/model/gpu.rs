//! The decoder forward on a GPU: the same blocks as `forward`, as kernels enqueued in order. One new token for each of up to
//! [`BATCH`] sequences is a recorded graph, which ends with the choice of the next token and leaves the device ready for the
//! next step; longer runs go through in chunks.
//!
//! One caller at a time: the working memory belongs to the model.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use half::{bf16, f16};

use super::config::Config;
use super::gpu_cache::GpuCache;
use super::kv_cache::KvCache;
use super::weights::{Embedding, Layer, Projection, Weights};
use crate::base::error::{bail, err};
use crate::base::memory::{Buffer, Tag};
use crate::base::threads::Pool;
use crate::base::{Result, call};
use crate::checkpoint::Encoding;
use crate::cuda::{
    self, Best, Biased, DeferredNorm, DeviceBuffer, Division, DrawRule, DrawScratch, Drawn, Event,
    Gpu, Graph, Heads, HostTable, Input, Layout, LinearScratch, Matrix, NormScratch, Output,
    PageTable, Pinned, Rows, Storage, Table, Unit,
};
use crate::ops::linear::Linear;
use crate::ops::sample::{self, Choice};

/// Sequences that are stepped together at most.
pub(super) const BATCH: usize = 256;
/// Rows that go through the blocks together.
pub(super) const ROWS: usize = 4096;
/// Rows of the embedding that are brought to memory at a time.
const TABLE_ROWS: usize = 1024;
/// Rows whose logits are computed together.
const HEAD_ROWS: usize = 64;
/// Layers of a prompt that are enqueued ahead of the one that runs, where a call may be cancelled: enough that the device never waits,
/// few enough that who cancels does not.
const AHEAD: usize = 4;
/// Steps that the host may lag behind.
const HISTORY: usize = 8;

/// What a model's steps and prompts may need of kernels.
pub(super) const UNITS: &[Unit] = &[
    Unit::LinearSmall,
    Unit::LinearTiled,
    Unit::LinearWide,
    Unit::LinearDense,
    Unit::LinearRows,
    Unit::LinearPack,
    Unit::AttentionDecode,
    Unit::AttentionPrefill,
    Unit::Embed,
    Unit::RmsNorm,
    Unit::RopeStore,
    Unit::Swiglu,
    Unit::CheckScales,
    Unit::Argmax,
    Unit::Draw,
];

/// A layer's vectors on the device.
struct Vectors {
    input_norm: DeviceBuffer,
    post_norm: DeviceBuffer,
    q_norm: Option<DeviceBuffer>,
    k_norm: Option<DeviceBuffer>,
    /// Of q, k, v, o, gate, up, down.
    bias: [Option<DeviceBuffer>; 7],
}

/// What the forward pass needs beside the weight matrices.
pub(super) struct Executor {
    gpu: Arc<Gpu>,
    layers: Vec<Vectors>,
    norm: DeviceBuffer,
    head_bias: Option<DeviceBuffer>,
    frequencies: DeviceBuffer,
    /// The embedding, unless the head serves for it.
    table: Option<HostTable>,
    state: Mutex<State>,
}

/// Working memory, and what of it is ready for a step.
struct State {
    /// Whether some weight is dense, for which activations of its type need room.
    dense: bool,
    rows: usize,
    head_rows: usize,
    batch: usize,
    pages: usize,
    residual: DeviceBuffer,
    /// What goes into the first product of a half of a block, normed, and what attention gives to its last: f16.
    input: DeviceBuffer,
    /// What the first product of a half of a block gives: qkv in f32; gate and up in f16.
    projected: DeviceBuffer,
    /// Rotated queries, and later what goes into the last product of the MLP: f16.
    inner: DeviceBuffer,
    logits: DeviceBuffer,
    tokens: DeviceBuffer,
    positions: DeviceBuffer,
    table: DeviceBuffer,
    best: Best,
    /// Made when a token is first drawn.
    draw: Option<DrawScratch>,
    parts: Rows,
    norms: NormScratch,
    linear: LinearScratch,
    history: Pinned,
    graphs: HashMap<(usize, Division, Choosing), Graph>,
    /// The sequences that the device is ready to step, and where they stand; none while that is not known.
    ready: Vec<Ready>,
    /// The rules by which the device will draw next; none if it takes the likeliest tokens, or that is not known.
    rules: Vec<DrawRule>,
    /// A step that was enqueued before anyone asked for it.
    ahead: Option<Event>,
}

/// How a step ends.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Choosing {
    /// With the likeliest tokens.
    Likeliest,
    /// With tokens drawn by rules, of which some may have a penalty for what has occurred.
    Drawn { penalties: bool },
}

/// The rules by which tokens are chosen; none if all are the likeliest, whatever has occurred.
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

/// A sequence that the device holds: its pages and the position of its next token.
#[derive(Clone, Copy, PartialEq)]
struct Ready {
    version: u64,
    position: usize,
}

impl Executor {
    /// Brings to the device what of `weights` is not there yet; `table` is what [`table`] has made of their embedding.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        config: &Config,
        weights: &Weights,
        table: Option<HostTable>,
    ) -> Result<Executor> {
        let upload = |values: &[f32]| DeviceBuffer::from_slice(gpu, Tag::DeviceWeights, values);
        let optional = |b: &Option<Buffer<f32>>| b.as_ref().map(|b| upload(b)).transpose();
        let mut layers = Vec::with_capacity(weights.layers.len());
        for layer in &weights.layers {
            let mut bias = [const { None }; 7];
            for (bias, (_, projection)) in bias.iter_mut().zip(layer.projections()) {
                *bias = optional(&projection.bias)?;
            }
            layers.push(Vectors {
                input_norm: upload(&layer.input_norm)?,
                post_norm: upload(&layer.post_norm)?,
                q_norm: optional(&layer.q_norm)?,
                k_norm: optional(&layer.k_norm)?,
                bias,
            });
        }
        let mut matrices = weights.linears().filter_map(Linear::matrix);
        let dense = matrices.any(|w| w.storage() != Storage::Nvfp4);
        let executor = Executor {
            gpu: gpu.clone(),
            layers,
            norm: upload(&weights.norm)?,
            head_bias: optional(&weights.head.bias)?,
            frequencies: upload(&config.rope.frequencies)?,
            table,
            state: Mutex::new(State::new(gpu, config, dense, 0, 0, 1, 1)?),
        };
        executor.heads(config, None).check()?;
        // What weights passed through is not needed again.
        gpu.empty_cache()?;
        Ok(executor)
    }

    /// Bytes of weights that are here rather than with the matrices; those of an embedding are host memory.
    pub(super) fn bytes(&self) -> usize {
        let vectors = self.layers.iter().flat_map(|l| {
            let norms = [
                Some(&l.input_norm),
                Some(&l.post_norm),
                l.q_norm.as_ref(),
                l.k_norm.as_ref(),
            ];
            norms
                .into_iter()
                .chain(l.bias.iter().map(Option::as_ref))
                .flatten()
        });
        vectors
            .chain([&self.norm])
            .map(DeviceBuffer::bytes)
            .sum::<usize>()
            + self.table.as_ref().map_or(0, HostTable::bytes)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn heads<'a>(&'a self, config: &Config, layer: Option<&'a Vectors>) -> Heads<'a> {
        Heads {
            heads: config.heads,
            kv_heads: config.kv_heads,
            dim: config.head_dim,
            q_norm: layer.and_then(|l| l.q_norm.as_ref()),
            k_norm: layer.and_then(|l| l.k_norm.as_ref()),
            frequencies: &self.frequencies,
            attention_factor: config.rope.attention_factor,
            eps: config.rms_norm_eps,
            scale: 1.0 / (config.head_dim as f32).sqrt(),
        }
    }

    /// Runs `tokens` of one sequence, [`ROWS`] at most, after what `cache` holds, whose pages exist already. Their logits are
    /// there for the asking.
    pub(super) fn run<'a>(
        &'a self,
        config: &'a Config,
        weights: &'a Weights,
        tokens: &[u32],
        cache: &KvCache,
    ) -> Result<Pass<'a>> {
        let mut state = self.state();
        state.forget();
        state.settle()?;
        let (first, rows) = (cache.len(), tokens.len());
        let pages = (first + rows).div_ceil(cuda::PAGE);
        state.fit(&self.gpu, config, rows, 0, 1, pages)?;
        let ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
        state.tokens.write(0, &ids)?;
        state.write_pages(&[cache.gpu()?])?;
        cuda::embed(
            &self.gpu,
            self.table(weights)?,
            &state.tokens,
            rows,
            &state.residual,
        )?;
        let watched = call::with(|call| call.is_watched());
        let enqueue = || {
            let mut enqueued = VecDeque::new();
            for index in 0..weights.layers.len() {
                let attention = Attention::Rows(first);
                self.block(config, weights, index, rows, &state, attention)?;
                if watched {
                    enqueued.push_back(Event::record(&self.gpu)?);
                }
                if enqueued.len() > AHEAD {
                    enqueued
                        .pop_front()
                        .map_or(Ok(()), |e| e.wait_or_cancel())?;
                    call::begun((rows * (index + 1 - AHEAD) / weights.layers.len()) as u64);
                }
            }
            enqueued.iter().try_for_each(Event::wait_or_cancel)
        };
        if let Err(e) = enqueue() {
            // What is enqueued still uses the working memory and the cache. If waiting fails too, the device is lost.
            let _ = self.gpu.synchronize();
            return Err(e);
        }
        Ok(Pass {
            executor: self,
            config,
            weights,
            state,
        })
    }

    /// Runs one token of each of several sequences, whose pages exist already, and leaves the next tokens, as `choices` says,
    /// and the logits on the device.
    fn step(
        &self,
        config: &Config,
        weights: &Weights,
        tokens: &[u32],
        caches: &[&GpuCache],
        positions: &[usize],
        choices: &[Choice<'_>],
        state: &mut State,
    ) -> Result<()> {
        let batch = tokens.len();
        let last = positions.iter().copied().max().unwrap_or(0);
        state.fit(
            &self.gpu,
            config,
            batch,
            batch,
            batch,
            last / cuda::PAGE + 1,
        )?;
        let wanted = ready_at(caches, positions);
        let rules = rules_of(choices);
        // The device has gone on by itself if these sequences go on with the tokens that it chose.
        let goes_on = state.ready == wanted && state.chose(tokens, positions);
        let draws_on = goes_on && state.rules == rules;
        state.forget();
        if !goes_on {
            let ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
            let places: Vec<i32> = positions.iter().map(|&p| p as i32).collect();
            state.tokens.write(0, &ids)?;
            state.positions.write(0, &places)?;
            state.write_pages(caches)?;
        }
        if !draws_on && !rules.is_empty() {
            let history: Vec<&[u32]> = choices.iter().map(|choice| choice.history).collect();
            let scratch = state.drawing(&self.gpu, config)?;
            scratch.set(&self.gpu, &rules, &history)?;
        }
        self.launch(config, weights, wanted, rules, state)
    }

    /// Enqueues a step of the sequences that the device is ready for, and notes what it is ready for afterwards. If that fails,
    /// nobody knows.
    fn launch(
        &self,
        config: &Config,
        weights: &Weights,
        mut ready: Vec<Ready>,
        rules: Vec<DrawRule>,
        state: &mut State,
    ) -> Result<()> {
        state.forget();
        let batch = ready.len();
        let last = ready.iter().map(|r| r.position).max().unwrap_or(0);
        let division = Division::of(&self.gpu, config.heads, config.kv_heads, batch, last + 1);
        let choosing = match rules.is_empty() {
            true => Choosing::Likeliest,
            false => Choosing::Drawn {
                penalties: rules.iter().any(|rule| rule.penalty != 1.0),
            },
        };
        let key = (batch, division, choosing);
        if let Some(graph) = state.graphs.get(&key) {
            graph.launch()?;
        } else {
            // The first step of its kind runs as it is enqueued, which also loads the kernels: no graph may be recorded before.
            self.enqueue_step(config, weights, batch, division, choosing, state)?;
            let graph = Graph::record(&self.gpu, || {
                self.enqueue_step(config, weights, batch, division, choosing, state)
            })?;
            state.graphs.insert(key, graph);
        }
        for ready in &mut ready {
            ready.position += 1;
        }
        state.ready = ready;
        state.rules = following(&rules);
        Ok(())
    }

    fn enqueue_step(
        &self,
        config: &Config,
        weights: &Weights,
        batch: usize,
        division: Division,
        choosing: Choosing,
        state: &State,
    ) -> Result<()> {
        cuda::embed(
            &self.gpu,
            self.table(weights)?,
            &state.tokens,
            batch,
            &state.residual,
        )?;
        for index in 0..weights.layers.len() {
            self.block(
                config,
                weights,
                index,
                batch,
                state,
                Attention::Step(division),
            )?;
        }
        self.head(config, weights, 0, batch, true, state)?;
        match (choosing, &state.draw) {
            (Choosing::Likeliest, _) => cuda::argmax(
                &self.gpu,
                &state.logits,
                batch,
                config.vocab_size,
                &state.best,
                &state.tokens,
                Some((&state.positions, &state.history)),
            ),
            (Choosing::Drawn { penalties }, Some(scratch)) => cuda::draw(
                &self.gpu,
                &state.logits,
                batch,
                config.vocab_size,
                penalties,
                scratch,
                &state.tokens,
                &state.positions,
                &state.history,
            ),
            (Choosing::Drawn { .. }, None) => bail!(Internal, "there are no rules to draw by"),
        }
    }

    fn table<'a>(&'a self, weights: &'a Weights) -> Result<Table<'a>> {
        match &self.table {
            Some(table) => Ok(Table::Host(table)),
            None => matrix(&weights.head).map(Table::Device),
        }
    }

    fn block(
        &self,
        config: &Config,
        weights: &Weights,
        index: usize,
        rows: usize,
        s: &State,
        attention: Attention,
    ) -> Result<()> {
        let (gpu, hidden, wide) = (&self.gpu, config.hidden_size, config.intermediate_size);
        let (layer, vectors) = (&weights.layers[index], &self.layers[index]);
        let all = biased(layer, vectors)?;
        let [q, k, v, o, gate, up, down] = all;
        let qkv = (config.heads + 2 * config.kv_heads) * config.head_dim;
        let layout = self.layout(&all, rows);
        let step = matches!(attention, Attention::Step(_));
        let norm = |turn| self.norm(config, weights, turn, rows, step, s);
        let (input_norm, post_norm, next_norm) =
            (norm(2 * index)?, norm(2 * index + 1)?, norm(2 * index + 2)?);
        let add = |input, matrix, next: &Norm<'_>| match next.deferred {
            true => cuda::linear_add(gpu, input, rows, matrix, &next.norm),
            false => cuda::linear(
                gpu,
                input,
                rows,
                &[matrix],
                Output::Add,
                &s.residual,
                hidden,
                &s.linear,
            ),
        };

        let input = input_norm.apply(gpu, 0, rows, hidden, layout, &s.input)?;
        cuda::linear(
            gpu,
            input,
            rows,
            &[q, k, v],
            Output::F32,
            &s.projected,
            qkv,
            &s.linear,
        )?;
        let heads = self.heads(config, Some(vectors));
        let pages = PageTable {
            table: &s.table,
            stride: s.pages,
            layer: index,
        };
        let attended = match attention {
            Attention::Step(division) => {
                cuda::decode(
                    gpu,
                    &heads,
                    &pages,
                    &s.projected,
                    &s.positions,
                    rows,
                    division,
                    &s.parts,
                    &s.input,
                    layout,
                )?;
                layout.input(&s.input, 1.0)
            }
            Attention::Rows(first) => {
                cuda::store(gpu, &heads, &pages, &s.projected, 0, rows, first, &s.inner)?;
                cuda::prefill(gpu, &heads, &pages, &s.inner, 0, rows, first, &s.input)?;
                Input::Plain(&s.input, 1.0)
            }
        };
        add(attended, o, &post_norm)?;
        let input = post_norm.apply(gpu, 0, rows, hidden, layout, &s.input)?;
        let activated = if cuda::has_swiglu(gpu, rows, &[gate, up], layout) {
            cuda::linear(
                gpu,
                input,
                rows,
                &[gate, up],
                layout.swiglu(),
                &s.inner,
                wide,
                &s.linear,
            )?;
            layout
        } else {
            cuda::linear(
                gpu,
                input,
                rows,
                &[gate, up],
                Output::F16,
                &s.projected,
                2 * wide,
                &s.linear,
            )?;
            cuda::swiglu(gpu, &s.projected, rows, wide, &s.inner)?;
            Layout::Rows
        };
        let activated = activated.input(&s.inner, cuda::MLP_SCALE);
        add(activated, down, &next_norm)
    }

    /// How activations of products with these matrices lie: as they take them, where one kernel serves them all.
    fn layout(&self, matrices: &[Biased<'_>], rows: usize) -> Layout {
        match matrices.iter().all(|(w, _)| w.storage() == Storage::Nvfp4) {
            true => Layout::taken(&self.gpu, rows),
            false => Layout::Rows,
        }
    }

    /// A norm of the residual. They take turns: a layer's input norm, its post norm, the next layer's, and at last the head's.
    fn norm<'a>(
        &'a self,
        config: &Config,
        weights: &Weights,
        turn: usize,
        rows: usize,
        step: bool,
        s: &'a State,
    ) -> Result<Norm<'a>> {
        let index = turn / 2;
        let weight = match self.layers.get(index) {
            Some(layer) if turn.is_multiple_of(2) => &layer.input_norm,
            Some(layer) => &layer.post_norm,
            None => &self.norm,
        };
        let norm = DeferredNorm {
            scratch: &s.norms,
            turn,
            x: &s.residual,
            weight,
            eps: config.rms_norm_eps,
        };
        // Other kernels make rows before the first layer, and more of them.
        let deferred = step && turn > 0 && {
            let maker = (turn - 1) / 2;
            let layer = |i| biased(&weights.layers[i], &self.layers[i]);
            let all = layer(maker)?;
            let [_, _, _, o, gate, up, down] = all;
            let layout = self.layout(&all, rows);
            let serves = |makes, takes: &[_], output| {
                DeferredNorm::serves(&self.gpu, rows, layout, makes, takes, output)
            };
            if !turn.is_multiple_of(2) {
                serves(o, &[gate, up], layout.swiglu())
            } else if index < self.layers.len() {
                let next = layer(index)?;
                layout == self.layout(&next, rows) && serves(down, &next[..3], Output::F32)
            } else {
                let head = self.biased_head(weights)?;
                layout == self.layout(&[head], rows) && serves(down, &[head], Output::F32)
            }
        };
        Ok(Norm { norm, deferred })
    }

    fn biased_head<'a>(&'a self, weights: &'a Weights) -> Result<Biased<'a>> {
        Ok((matrix(&weights.head)?, self.head_bias.as_ref()))
    }

    /// Logits of `rows` rows of the residual from `first` on; `step` says that they are those of a step.
    fn head(
        &self,
        config: &Config,
        weights: &Weights,
        first: usize,
        rows: usize,
        step: bool,
        s: &State,
    ) -> Result<()> {
        let head = self.biased_head(weights)?;
        let turn = 2 * self.layers.len();
        let norm = self.norm(config, weights, turn, rows, step, s)?;
        let layout = self.layout(&[head], rows);
        let (gpu, hidden) = (&self.gpu, config.hidden_size);
        let input = norm.apply(gpu, first, rows, hidden, layout, &s.input)?;
        cuda::linear(
            gpu,
            input,
            rows,
            &[head],
            Output::F32,
            &s.logits,
            config.vocab_size,
            &s.linear,
        )
    }

    /// One token of each of several sequences; the logits, one row for each, are appended to `logits`.
    pub(super) fn step_logits(
        &self,
        config: &Config,
        weights: &Weights,
        tokens: &[u32],
        caches: &[&KvCache],
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        let (gpus, positions) = on_gpu(caches)?;
        let mut state = self.state();
        state.settle()?;
        self.step(config, weights, tokens, &gpus, &positions, &[], &mut state)?;
        read_logits(&state.logits, tokens.len() * config.vocab_size, logits)
    }

    /// One token of each of several sequences; the next tokens, as `choices` says. With `look_ahead`, the step after is enqueued
    /// at once, in the hope that these sequences go on with those tokens; their pages must reach that far.
    pub(super) fn step_choose(
        &self,
        config: &Config,
        weights: &Weights,
        tokens: &[u32],
        caches: &[&KvCache],
        choices: &[Choice<'_>],
        look_ahead: bool,
    ) -> Result<Vec<u32>> {
        let (gpus, positions) = on_gpu(caches)?;
        let mut state = self.state();
        let after: Vec<usize> = positions.iter().map(|p| p + 1).collect();
        let foreseen = state.ahead.is_some()
            && state.ready == ready_at(&gpus, &after)
            && state.rules == following(&rules_of(choices))
            && state.chose(tokens, &positions);
        let done = match state.ahead.take() {
            Some(event) if foreseen => event,
            before => {
                if let Some(event) = before {
                    event.wait()?;
                }
                self.step(
                    config, weights, tokens, &gpus, &positions, choices, &mut state,
                )?;
                Event::record(&self.gpu)?
            }
        };
        let room = gpus
            .iter()
            .zip(&after)
            .all(|(cache, &position)| position < cache.allocated());
        let mut ahead = Ok(());
        if look_ahead && room && after.iter().all(|p| p / cuda::PAGE < state.pages) {
            let (ready, rules) = (state.ready.clone(), state.rules.clone());
            ahead = self
                .launch(config, weights, ready, rules, &mut state)
                .and_then(|()| {
                    state.ahead = Some(Event::record(&self.gpu)?);
                    Ok(())
                });
        }
        done.wait()?;
        ahead?;
        let chosen = after.iter().enumerate().map(|(row, &position)| {
            match state.drawn(row, tokens.len(), position) {
                Some(Drawn::Token(token)) => Ok(token),
                Some(Drawn::AllRuledOut) => Err(sample::all_ruled_out(config.vocab_size)),
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
        let _ = self.state().settle();
    }
}

/// A norm of the residual, which the products around it apply, or another kernel.
struct Norm<'a> {
    norm: DeferredNorm<'a>,
    deferred: bool,
}

impl Norm<'_> {
    /// What products take of `rows` rows from `first` on; `room` is for what another kernel makes.
    fn apply<'a>(
        &'a self,
        gpu: &Gpu,
        first: usize,
        rows: usize,
        width: usize,
        layout: Layout,
        room: &'a DeviceBuffer,
    ) -> Result<Input<'a>> {
        let norm = &self.norm;
        if self.deferred {
            return Ok(Input::Deferred(*norm, layout));
        }
        let factors = (rows <= cuda::SMALL).then(|| norm.scratch.factors(norm.turn));
        let at = first * width * 4;
        cuda::rms_norm(
            gpu,
            norm.x,
            at,
            norm.weight,
            norm.eps,
            rows,
            width,
            room,
            layout,
            factors,
        )?;
        Ok(layout.input(room, 1.0))
    }
}

/// Rows that have gone through the blocks.
pub(super) struct Pass<'a> {
    executor: &'a Executor,
    config: &'a Config,
    weights: &'a Weights,
    state: MutexGuard<'a, State>,
}

impl Pass<'_> {
    /// Appends the logits of `rows` rows from `first` on.
    pub(super) fn logits(
        &mut self,
        first: usize,
        rows: usize,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        for start in (first..first + rows).step_by(HEAD_ROWS) {
            let n = HEAD_ROWS.min(first + rows - start);
            let (held, pages) = (self.state.rows, self.state.pages);
            let gpu = &self.executor.gpu;
            self.state.fit(gpu, self.config, held, n, 1, pages)?;
            self.executor
                .head(self.config, self.weights, start, n, false, &self.state)?;
            read_logits(&self.state.logits, n * self.config.vocab_size, logits)?;
        }
        Ok(())
    }

    /// Waits for the device, so that a fault comes out here.
    pub(super) fn finish(&self) -> Result<()> {
        self.executor.gpu.synchronize()
    }
}

#[derive(Clone, Copy)]
enum Attention {
    /// One token of each sequence.
    Step(Division),
    /// Rows of one sequence from this position on.
    Rows(usize),
}

impl State {
    fn new(
        gpu: &Arc<Gpu>,
        config: &Config,
        dense: bool,
        rows: usize,
        head_rows: usize,
        batch: usize,
        pages: usize,
    ) -> Result<State> {
        let (hidden, wide, dim) = (
            config.hidden_size,
            config.intermediate_size,
            config.head_dim,
        );
        let (q, qkv) = (
            config.heads * dim,
            (config.heads + 2 * config.kv_heads) * dim,
        );
        let scratch = |elements: usize, bytes: usize| {
            DeviceBuffer::uninit(gpu, Tag::DeviceScratch, elements * bytes)
        };
        // The widest weight but the head, whose rows are taken in parts: logits of many rows are rarely wanted.
        let widest = (q + 2 * config.kv_heads * dim).max(wide) * hidden * 2;
        let k = wide.max(hidden).max(q);
        let converted = rows * k * 2;
        let widest = widest.max(if dense { converted } else { 0 });
        let activations = |k| Layout::Ordered.elements(rows, k);
        let large = rows.max(head_rows) > if dense { cuda::SMALL } else { cuda::TILED };
        Ok(State {
            dense,
            rows,
            head_rows,
            batch,
            pages,
            residual: scratch(rows * hidden, 4)?,
            input: scratch(activations(hidden.max(q)), 2)?,
            projected: scratch(rows * qkv.max(wide), 4)?,
            inner: scratch(activations(wide.max(q)), 2)?,
            logits: scratch(head_rows * config.vocab_size, 4)?,
            tokens: scratch(rows.max(batch), 4)?,
            positions: scratch(batch, 4)?,
            table: scratch(batch * pages, 8)?,
            best: Best::new(gpu, batch)?,
            draw: None,
            parts: Rows::new(gpu, config.heads, config.kv_heads, dim, batch)?,
            norms: NormScratch::new(gpu, hidden)?,
            linear: LinearScratch::new(
                gpu,
                rows.max(head_rows),
                k,
                if large { widest } else { 0 },
            )?,
            history: Pinned::new(gpu, Tag::Scratch, HISTORY * batch * 4)?,
            graphs: HashMap::new(),
            ready: Vec::new(),
            rules: Vec::new(),
            ahead: None,
        })
    }

    /// Makes the memory large enough. What it held is lost if it was not.
    fn fit(
        &mut self,
        gpu: &Arc<Gpu>,
        config: &Config,
        rows: usize,
        head_rows: usize,
        batch: usize,
        pages: usize,
    ) -> Result<()> {
        if rows <= self.rows
            && head_rows <= self.head_rows
            && batch <= self.batch
            && pages <= self.pages
        {
            return Ok(());
        }
        self.settle()?;
        self.graphs.clear();
        self.forget();
        if pages > self.pages {
            // Pages come one at a time; the table grows by leaps.
            let pages = pages.next_power_of_two().max(64);
            let mut table = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, self.batch * pages * 8)?;
            for row in 0..self.batch {
                let bytes = self.pages * 8;
                table.copy_from(row * pages * 8, &self.table, row * bytes, bytes)?;
            }
            (self.table, self.pages) = (table, pages);
        }
        if rows <= self.rows && batch <= self.batch && head_rows <= cuda::SMALL {
            // Rows wait in the residual for their logits.
            if head_rows > self.head_rows {
                let bytes = head_rows * config.vocab_size * 4;
                self.logits = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, bytes)?;
                self.head_rows = head_rows;
            }
            return Ok(());
        }
        let empty = State::new(gpu, config, self.dense, 0, 0, 1, 1)?;
        // All else is freed before there is more of it.
        let (rows, head_rows, batch, pages, old_batch, residual, table) = {
            let old = std::mem::replace(self, empty);
            let (rows, head_rows) = (rows.max(old.rows), head_rows.max(old.head_rows));
            let most = batch.max(old.batch);
            let (residual, table) = (old.residual, old.table);
            (rows, head_rows, most, old.pages, old.batch, residual, table)
        };
        let mut new = State::new(gpu, config, self.dense, rows, head_rows, batch, pages)?;
        let len = residual.bytes();
        new.residual.copy_from(0, &residual, 0, len)?;
        new.table.copy_from(0, &table, 0, old_batch * pages * 8)?;
        *self = new;
        Ok(())
    }

    /// Waits for a step that was enqueued ahead.
    fn settle(&mut self) -> Result<()> {
        match self.ahead.take() {
            Some(event) => event.wait(),
            None => Ok(()),
        }
    }

    fn write_pages(&mut self, caches: &[&GpuCache]) -> Result<()> {
        let mut all = vec![0u64; caches.len() * self.pages];
        for (row, cache) in all.chunks_exact_mut(self.pages).zip(caches) {
            for (slot, address) in row.iter_mut().zip(cache.addresses()) {
                *slot = address;
            }
        }
        self.table.write(0, &all)
    }

    /// What is on the device is no longer known.
    fn forget(&mut self) {
        self.ready.clear();
        self.rules.clear();
    }

    /// Room for what draws need, of as many rows as there is room for otherwise.
    fn drawing(&mut self, gpu: &Arc<Gpu>, config: &Config) -> Result<&mut DrawScratch> {
        if self.draw.as_ref().is_some_and(|d| d.rows() < self.batch) {
            self.settle()?;
            self.graphs.clear();
            self.draw = None;
        }
        match &mut self.draw {
            Some(scratch) => Ok(scratch),
            none => Ok(none.insert(DrawScratch::new(gpu, self.batch, config.vocab_size)?)),
        }
    }

    /// What the device said of its choice for a position of a sequence.
    fn drawn(&self, row: usize, batch: usize, position: usize) -> Option<Drawn> {
        let said = self
            .history
            .read_i32(position % self.steps(batch) * batch + row)?;
        Some(Drawn::read(said))
    }

    /// Whether these are the tokens that the device chose for these positions.
    fn chose(&self, tokens: &[u32], positions: &[usize]) -> bool {
        let mut rows = tokens.iter().zip(positions).enumerate();
        rows.all(|(row, (&token, &position))| {
            self.drawn(row, tokens.len(), position) == Some(Drawn::Token(token))
        })
    }

    /// Steps that the history holds for a batch: what the kernel makes of its size.
    fn steps(&self, batch: usize) -> usize {
        self.history.bytes() / 4 / batch
    }
}

fn ready_at(caches: &[&GpuCache], positions: &[usize]) -> Vec<Ready> {
    let each = caches.iter().zip(positions);
    each.map(|(cache, &position)| Ready {
        version: cache.version(),
        position,
    })
    .collect()
}

fn on_gpu<'a>(caches: &[&'a KvCache]) -> Result<(Vec<&'a GpuCache>, Vec<usize>)> {
    let gpus = caches.iter().map(|c| c.gpu()).collect::<Result<_>>()?;
    Ok((gpus, caches.iter().map(|c| c.len()).collect()))
}

fn read_logits(from: &DeviceBuffer, count: usize, logits: &mut Vec<f32>) -> Result<()> {
    let before = logits.len();
    logits
        .try_reserve(count)
        .map_err(|e| err!(OutOfMemory, "{count} logits: {e}"))?;
    logits.resize(before + count, 0.0);
    from.read(0, &mut logits[before..])
}

fn matrix(projection: &Projection) -> Result<&Matrix> {
    projection
        .linear
        .matrix()
        .ok_or_else(|| err!(Internal, "a weight of a model on a GPU is in host memory"))
}

fn biased<'a>(layer: &'a Layer, vectors: &'a Vectors) -> Result<[Biased<'a>; 7]> {
    let mut out = Vec::with_capacity(7);
    for ((_, projection), bias) in layer.projections().into_iter().zip(&vectors.bias) {
        out.push((matrix(projection)?, bias.as_ref()));
    }
    out.try_into()
        .map_err(|_| err!(Internal, "a layer has seven projections"))
}

/// The embedding in host memory, in the type of the file where that has 16 or 32 bits, else as f32.
pub(super) fn table(
    gpu: &Arc<Gpu>,
    width: usize,
    embedding: &Embedding,
) -> Result<Option<HostTable>> {
    let Embedding::File { checkpoint, entry } = embedding else {
        return Ok(None);
    };
    let (storage, plain) = match entry.encoding {
        Encoding::BF16 => (Storage::BF16, true),
        Encoding::F16 => (Storage::F16, true),
        Encoding::F32 => (Storage::F32, true),
        _ => (Storage::F32, false),
    };
    let rows = entry.rows();
    let stored = checkpoint.plain(entry).filter(|_| plain);
    // Brings rows from `first` on, as many as `out` takes.
    let bring = |first: usize, out: &mut [u8], row_bytes: usize| {
        if let Some(stored) = &stored {
            return checkpoint.read_part(stored, first * row_bytes, out);
        }
        let some = first..first + out.len() / row_bytes;
        let mut values = vec![0f32; some.len() * width];
        checkpoint.rows_f32(entry, some, &mut values)?;
        match storage {
            Storage::BF16 => fill(out, &values, |v| bf16::from_f32(v).to_le_bytes()),
            Storage::F16 => fill(out, &values, |v| f16::from_f32(v).to_le_bytes()),
            Storage::F32 => fill(out, &values, f32::to_le_bytes),
            Storage::Nvfp4 => bail!(Internal, "an embedding is dense"),
        }
        Ok(())
    };
    let pool = Pool::new(Pool::default_threads()?)?;
    let table = HostTable::new(gpu, rows, width, storage, |bytes| {
        let row_bytes = bytes.len() / rows;
        let pieces = Mutex::new(bytes.chunks_mut(TABLE_ROWS * row_bytes).enumerate());
        let result = Mutex::new(Ok(()));
        pool.run(pool.threads(), |_| {
            loop {
                let piece = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((i, out)) = piece else { break };
                if let Err(e) = bring(i * TABLE_ROWS, out, row_bytes) {
                    *result.lock().unwrap_or_else(PoisonError::into_inner) = Err(e);
                    break;
                }
            }
        });
        result.into_inner().unwrap_or_else(PoisonError::into_inner)
    })?;
    Ok(Some(table))
}

fn fill<const N: usize>(bytes: &mut [u8], values: &[f32], each: impl Fn(f32) -> [u8; N]) {
    for (out, &value) in bytes.chunks_exact_mut(N).zip(values) {
        out.copy_from_slice(&each(value));
    }
}
