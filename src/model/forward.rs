//! The decoder forward: embedding, blocks, final norm and head, for one sequence or for several that advance together. Works
//! on rows of the residual stream; whose rows they are shows only where keys and values are stored and attended to.

use std::ops::Range;
use std::sync::Mutex;

use super::gpu::{self, Executor};
use super::kv_cache::KvCache;
use super::weights::{Layer, Projection};
use super::{Logits, Model};
use crate::base::error::{bail, err};
use crate::base::memory::{Buffer, Plain, Tag};
use crate::base::turns::Turn;
use crate::base::{Result, call};
use crate::ops::attention::attention;
use crate::ops::linear::linear;
use crate::ops::rope::Angles;
use crate::ops::sample::{self, Choice};
use crate::ops::{Workspace, activation, norm, rope};

/// Rows that go through the blocks together on the CPU: enough to make full use of the weights as they pass, few enough that
/// scratch memory does not grow with the prompt.
const ROWS: usize = 512;

/// Memory that forward passes reuse. One serves one caller at a time; it grows to the largest pass it has seen.
#[derive(Debug)]
pub struct Scratch {
    workspace: Workspace,
    residual: Buffer<f32>,
    normed: Buffer<f32>,
    q: Buffer<f32>,
    k: Buffer<f32>,
    v: Buffer<f32>,
    attended: Buffer<f32>,
    gate: Buffer<f32>,
    up: Buffer<f32>,
    sample: Vec<Mutex<sample::Scratch>>,
}

impl Scratch {
    /// Empty scratch memory.
    pub fn new() -> Self {
        Scratch {
            workspace: Workspace::new(),
            residual: empty(),
            normed: empty(),
            q: empty(),
            k: empty(),
            v: empty(),
            attended: empty(),
            gate: empty(),
            up: empty(),
            sample: Vec::new(),
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        let buffers = [
            &self.residual,
            &self.normed,
            &self.q,
            &self.k,
            &self.v,
            &self.attended,
            &self.gate,
            &self.up,
        ];
        self.workspace.bytes() + buffers.iter().map(|b| b.bytes()).sum::<usize>()
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

fn empty<T: Plain>() -> Buffer<T> {
    Buffer::zeroed(Tag::Scratch, 0).expect("an empty buffer allocates nothing")
}

/// The first `len` elements of `buffer`, which is made larger if need be; what it held is lost then.
fn sized<T: Plain>(buffer: &mut Buffer<T>, len: usize) -> Result<&mut [T]> {
    if buffer.len() < len {
        *buffer = empty();
        *buffer = Buffer::zeroed(Tag::Scratch, len)?;
    }
    Ok(&mut buffer[..len])
}

fn reserve_each(caches: &mut [&mut KvCache], count: usize) -> Result<()> {
    for (i, cache) in caches.iter_mut().enumerate() {
        cache
            .reserve(count)
            .map_err(|e| e.within(format_args!("sequence {i}")))?;
    }
    Ok(())
}

/// Counts the tokens of a batch that ran, or takes back what one that did not had made.
fn finish_batch(caches: &mut [&mut KvCache], ran: bool) {
    for cache in caches.iter_mut() {
        match ran {
            true => cache.advance(1),
            false => cache.roll_back(),
        }
    }
}

/// Rows of one sequence within a pass.
struct Segment<'a> {
    cache: &'a mut KvCache,
    rows: Range<usize>,
}

impl Model {
    /// Runs `tokens` after what `cache` holds, and appends them to it. `logits` becomes the rows asked for, `vocab_size`
    /// numbers each. On an error, and when the thread's [`call`] is cancelled, `cache` is as it was before and `logits` is empty.
    ///
    /// On the CPU a token's logits have the same bits whether it comes alone, in a batch or with others of its sequence, and on
    /// any number of threads. On a GPU the same calls give the same bits; those that divide the work otherwise add up in another
    /// order, and differ by rounding.
    pub fn forward(
        &self,
        tokens: &[u32],
        cache: &mut KvCache,
        scratch: &mut Scratch,
        wanted: Logits,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        logits.clear();
        let before = cache.len();
        let result = match &self.executor {
            None => self.forward_in_parts(tokens, cache, scratch, wanted, logits),
            Some(executor) => self.forward_on_gpu(executor, tokens, cache, wanted, logits),
        };
        if result.is_err() {
            logits.clear();
            cache.truncate(before)?;
        }
        result
    }

    fn forward_in_parts(
        &self,
        tokens: &[u32],
        cache: &mut KvCache,
        scratch: &mut Scratch,
        wanted: Logits,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        self.check_tokens(tokens)?;
        cache.reserve(tokens.len())?;
        let parts = tokens.len().div_ceil(ROWS);
        for (i, part) in tokens.chunks(ROWS).enumerate() {
            let _turn = self.turn()?;
            let mut segments = [Segment {
                cache: &mut *cache,
                rows: 0..part.len(),
            }];
            self.run(part, &mut segments, scratch)?;
            match wanted {
                Logits::All => self.head(0..part.len(), scratch, logits)?,
                Logits::Last if i + 1 == parts => {
                    self.head(part.len() - 1..part.len(), scratch, logits)?;
                }
                Logits::Last | Logits::None => {}
            }
            cache.advance(part.len());
            call::add(part.len() as u64);
        }
        Ok(())
    }

    fn forward_on_gpu(
        &self,
        executor: &Executor,
        tokens: &[u32],
        cache: &mut KvCache,
        wanted: Logits,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        self.check_tokens(tokens)?;
        cache.reserve(tokens.len())?;
        let (config, weights) = (self.config(), self.weights());
        if tokens.len() == 1 && wanted != Logits::None {
            let _turn = self.turn()?;
            executor.step_logits(config, weights, tokens, &[&*cache], logits)?;
            cache.advance(1);
            call::add(1);
            return Ok(());
        }
        let chunks = tokens.len().div_ceil(gpu::ROWS);
        for (i, chunk) in tokens.chunks(gpu::ROWS).enumerate() {
            let _turn = self.turn()?;
            let mut pass = executor.run(config, weights, chunk, cache)?;
            match wanted {
                Logits::All => pass.logits(0, chunk.len(), logits)?,
                Logits::Last if i + 1 == chunks => pass.logits(chunk.len() - 1, 1, logits)?,
                Logits::Last | Logits::None => pass.finish()?,
            }
            cache.advance(chunk.len());
            call::add(chunk.len() as u64);
        }
        Ok(())
    }

    /// Waits until no other sequence is being run, unless the call is cancelled meanwhile. Prompts give way after each chunk,
    /// so nobody waits for a whole one.
    fn turn(&self) -> Result<Turn<'_>> {
        let turn = self.turns.take(call::is_over)?;
        call::check()?;
        Ok(turn)
    }

    /// Runs one token of each of several sequences, like [`Model::forward_batch`], and gives the next tokens, chosen as
    /// `choices` says. On a GPU the logits stay there, and with `look_ahead` the device goes on with those tokens before it is
    /// asked to: the right thing where they will be run next, and harmless where they will not.
    pub fn forward_choose(
        &self,
        tokens: &[u32],
        caches: &mut [&mut KvCache],
        choices: &[Choice<'_>],
        scratch: &mut Scratch,
        look_ahead: bool,
    ) -> Result<Vec<u32>> {
        self.check_batch(tokens, caches)?;
        if choices.len() != tokens.len() {
            bail!(
                InvalidArgument,
                "{} choices for {} sequences; a batch takes one for each",
                choices.len(),
                tokens.len()
            );
        }
        if tokens.is_empty() {
            return Ok(Vec::new());
        }
        let result = match &self.executor {
            None => self.choose_on_host(tokens, caches, choices, scratch),
            Some(executor) => reserve_each(caches, 1).and_then(|()| {
                if look_ahead {
                    // Room for the step after is welcome, not needed.
                    for cache in caches.iter_mut().filter(|c| c.capacity() - c.len() > 1) {
                        let _ = cache.reserve(2);
                    }
                }
                let caches: Vec<&KvCache> = caches.iter().map(|c| &**c).collect();
                let (config, weights) = (self.config(), self.weights());
                let turn = self.turn()?;
                // Who waits runs other sequences next.
                let look_ahead = look_ahead && !turn.ends();
                executor.step_choose(config, weights, tokens, &caches, choices, look_ahead)
            }),
        };
        finish_batch(caches, result.is_ok());
        result
    }

    fn choose_on_host(
        &self,
        tokens: &[u32],
        caches: &mut [&mut KvCache],
        choices: &[Choice<'_>],
        scratch: &mut Scratch,
    ) -> Result<Vec<u32>> {
        let mut logits = Vec::new();
        self.batch(tokens, caches, scratch, &mut logits)?;
        sample::sample_rows(&logits, choices, self.device.host()?, &mut scratch.sample)
    }

    fn check_batch(&self, tokens: &[u32], caches: &[&mut KvCache]) -> Result<()> {
        if tokens.len() != caches.len() {
            bail!(
                InvalidArgument,
                "{} tokens for {} sequences; a batch takes one for each",
                tokens.len(),
                caches.len()
            );
        }
        if self.executor.is_some() && tokens.len() > gpu::BATCH {
            bail!(
                Unsupported,
                "a batch of {} sequences on a GPU; at most {} are stepped together",
                tokens.len(),
                gpu::BATCH
            );
        }
        self.check_tokens(tokens)
    }

    /// Runs one token of each of several sequences in one pass over the weights: `tokens[i]` after what `caches[i]` holds.
    /// `logits` becomes one row for each. On an error every cache is as it was before.
    pub fn forward_batch(
        &self,
        tokens: &[u32],
        caches: &mut [&mut KvCache],
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        logits.clear();
        self.check_batch(tokens, caches)?;
        let result = match &self.executor {
            None => self.batch(tokens, caches, scratch, logits),
            Some(_) if tokens.is_empty() => Ok(()),
            Some(executor) => reserve_each(caches, 1).and_then(|()| {
                let caches: Vec<&KvCache> = caches.iter().map(|c| &**c).collect();
                let _turn = self.turn()?;
                executor.step_logits(self.config(), self.weights(), tokens, &caches, logits)
            }),
        };
        finish_batch(caches, result.is_ok());
        if result.is_err() {
            logits.clear();
        }
        result
    }

    fn batch(
        &self,
        tokens: &[u32],
        caches: &mut [&mut KvCache],
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        reserve_each(caches, 1)?;
        for (part, caches) in tokens.chunks(ROWS).zip(caches.chunks_mut(ROWS)) {
            let _turn = self.turn()?;
            let mut segments: Vec<Segment<'_>> = caches
                .iter_mut()
                .enumerate()
                .map(|(i, cache)| Segment {
                    cache,
                    rows: i..i + 1,
                })
                .collect();
            self.run(part, &mut segments, scratch)?;
            self.head(0..part.len(), scratch, logits)?;
        }
        Ok(())
    }

    /// The embeddings of `tokens`: what enters the first block, `hidden_size` numbers each.
    pub fn embed(&self, tokens: &[u32], out: &mut [f32]) -> Result<()> {
        self.weights().embed(tokens, out)
    }

    /// The logits of rows that left the last block elsewhere, `hidden_size` numbers each: final norm and head. With
    /// [`Model::embed`], what a model loaded for sampling only can do.
    pub fn logits_of(
        &self,
        hidden: &[f32],
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        let width = self.config().hidden_size;
        logits.clear();
        if !hidden.len().is_multiple_of(width) {
            bail!(
                InvalidArgument,
                "{} numbers are not whole rows of {width}",
                hidden.len()
            );
        }
        for rows in hidden.chunks(ROWS * width) {
            let _turn = self.turn()?;
            sized(&mut scratch.residual, rows.len())?.copy_from_slice(rows);
            self.head(0..rows.len() / width, scratch, logits)?;
        }
        Ok(())
    }

    /// Refuses tokens that cannot be run.
    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        if self.weights().layers.is_empty() {
            bail!(
                Unsupported,
                "the model was loaded for sampling only, without its layers; load it whole to run tokens"
            );
        }
        self.check_ids(tokens)
    }

    /// Refuses ids that the embedding has no rows for.
    pub(super) fn check_ids(&self, tokens: &[u32]) -> Result<()> {
        let vocab = self.config().vocab_size;
        if let Some(i) = tokens.iter().position(|&t| t as usize >= vocab) {
            bail!(
                InvalidArgument,
                "token {} at index {i} is outside the vocabulary of {vocab}",
                tokens[i]
            );
        }
        Ok(())
    }

    /// Takes rows through all blocks and stores their keys and values; the last block's output is left in the residual.
    fn run(&self, tokens: &[u32], segments: &mut [Segment<'_>], s: &mut Scratch) -> Result<()> {
        let config = self.config();
        let (m, hidden) = (tokens.len(), config.hidden_size);
        let (q, kv) = (
            config.heads * config.head_dim,
            config.kv_heads * config.head_dim,
        );
        self.weights()
            .embed(tokens, sized(&mut s.residual, m * hidden)?)?;
        sized(&mut s.normed, m * hidden)?;
        sized(&mut s.q, m * q)?;
        sized(&mut s.k, m * kv)?;
        sized(&mut s.v, m * kv)?;
        sized(&mut s.attended, m * q)?;
        sized(&mut s.gate, m * config.intermediate_size)?;
        sized(&mut s.up, m * config.intermediate_size)?;
        let mut positions = Vec::with_capacity(m);
        for segment in segments.iter() {
            let first = segment.cache.len();
            positions.extend((first..first + segment.rows.len()).map(|p| p as u32));
        }
        let angles = config.rope.angles(&positions);
        for (index, layer) in self.weights().layers.iter().enumerate() {
            call::check()?;
            call::begun((m * index / config.layers) as u64);
            self.attend(layer, index, m, segments, &angles, s)?;
            self.mlp(layer, m, s)?;
        }
        Ok(())
    }

    fn attend(
        &self,
        layer: &Layer,
        index: usize,
        m: usize,
        segments: &mut [Segment<'_>],
        angles: &Angles,
        s: &mut Scratch,
    ) -> Result<()> {
        let (config, device) = (self.config(), self.device());
        let (heads, kv_heads) = (config.heads, config.kv_heads);
        let (q_row, kv_row) = (heads * config.head_dim, kv_heads * config.head_dim);
        let (x, normed) = (
            &mut s.residual[..m * config.hidden_size],
            &mut s.normed[..m * config.hidden_size],
        );
        let (q, k, v) = (
            &mut s.q[..m * q_row],
            &mut s.k[..m * kv_row],
            &mut s.v[..m * kv_row],
        );
        norm::rms_norm(device, x, &layer.input_norm, config.rms_norm_eps, normed)?;
        self.project(
            normed,
            m,
            &mut [
                (&layer.q, &mut *q),
                (&layer.k, &mut *k),
                (&layer.v, &mut *v),
            ],
            &mut s.workspace,
        )?;
        for (x, weight) in [(&mut *q, &layer.q_norm), (&mut *k, &layer.k_norm)] {
            if let Some(weight) = weight {
                norm::rms_norm_in_place(device, x, weight, config.rms_norm_eps)?;
            }
        }
        rope::apply(device, q, heads, angles)?;
        rope::apply(device, k, kv_heads, angles)?;
        let attended = &mut s.attended[..m * q_row];
        let scale = 1.0 / (config.head_dim as f32).sqrt();
        for segment in segments {
            let (first, rows) = (segment.cache.len(), segment.rows.clone());
            let kv_rows = rows.start * kv_row..rows.end * kv_row;
            let q_rows = rows.start * q_row..rows.end * q_row;
            let cache = segment.cache.layer(index)?;
            cache.write(first, &k[kv_rows.clone()], &v[kv_rows])?;
            attention(
                device,
                &q[q_rows.clone()],
                heads,
                cache,
                first,
                scale,
                &mut attended[q_rows],
                &mut s.workspace,
            )?;
        }
        self.project(
            attended,
            m,
            &mut [(&layer.o, &mut *normed)],
            &mut s.workspace,
        )?;
        activation::add(x, normed)
    }

    fn mlp(&self, layer: &Layer, m: usize, s: &mut Scratch) -> Result<()> {
        let (config, device) = (self.config(), self.device());
        let (x, normed) = (
            &mut s.residual[..m * config.hidden_size],
            &mut s.normed[..m * config.hidden_size],
        );
        let (gate, up) = (
            &mut s.gate[..m * config.intermediate_size],
            &mut s.up[..m * config.intermediate_size],
        );
        norm::rms_norm(device, x, &layer.post_norm, config.rms_norm_eps, normed)?;
        self.project(
            normed,
            m,
            &mut [(&layer.gate, &mut *gate), (&layer.up, &mut *up)],
            &mut s.workspace,
        )?;
        activation::swiglu(device, gate, up)?;
        self.project(
            gate,
            m,
            &mut [(&layer.down, &mut *normed)],
            &mut s.workspace,
        )?;
        activation::add(x, normed)
    }

    /// Appends the logits of `rows` of the residual.
    fn head(&self, rows: Range<usize>, s: &mut Scratch, logits: &mut Vec<f32>) -> Result<()> {
        let config = self.config();
        let (m, hidden) = (rows.len(), config.hidden_size);
        let normed = sized(&mut s.normed, m * hidden)?;
        let x = &s.residual[rows.start * hidden..rows.end * hidden];
        norm::rms_norm(
            self.device(),
            x,
            &self.weights().norm,
            config.rms_norm_eps,
            normed,
        )?;
        let before = logits.len();
        let len = m * config.vocab_size;
        logits
            .try_reserve(len)
            .map_err(|e| err!(OutOfMemory, "{len} logits: {e}"))?;
        logits.resize(before + len, 0.0);
        self.project(
            normed,
            m,
            &mut [(&self.weights().head, &mut logits[before..])],
            &mut s.workspace,
        )
    }

    /// Applies projections that share an input, and their biases.
    fn project(
        &self,
        x: &[f32],
        m: usize,
        outputs: &mut [(&Projection, &mut [f32])],
        workspace: &mut Workspace,
    ) -> Result<()> {
        let mut products: Vec<_> = outputs
            .iter_mut()
            .map(|(p, y)| (&p.linear, &mut **y))
            .collect();
        linear(
            self.device(),
            x,
            m,
            &mut products,
            self.activations(),
            workspace,
        )?;
        for (projection, y) in outputs {
            if let Some(bias) = &projection.bias {
                activation::add(y, bias)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::sync::Arc;

    use crate::base::ErrorKind;
    use crate::base::call::Cancel;
    use crate::model::{Device, KvType, LoadOptions};

    fn golden() -> Arc<Model> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/model/qwen3_tied");
        Model::load(&path, &LoadOptions::new(Device::cpu(Some(1)).unwrap())).unwrap()
    }

    /// While one sequence is run, calls for others wait, and end when they are told to.
    #[test]
    fn who_waits_for_another_sequence_can_be_cancelled() {
        let model = golden();
        let cancel = Cancel::new();
        let mut scratch = Scratch::new();
        let mut cache = KvCache::new(model.device(), model.config(), 64, KvType::F16).unwrap();
        let greedy = crate::model::SamplingOptions::default();
        let choice = Choice {
            options: &greedy,
            draw: 0,
            history: &[],
        };
        std::thread::scope(|scope| {
            let other = model.turns.take(|| false).unwrap();
            let waiting = scope.spawn(|| {
                let mut logits = Vec::new();
                let all = cancel.watching(|| {
                    [
                        model.forward(
                            &[1, 2, 3],
                            &mut cache,
                            &mut scratch,
                            Logits::Last,
                            &mut logits,
                        ),
                        model.forward_batch(&[1], &mut [&mut cache], &mut scratch, &mut logits),
                        model
                            .forward_choose(&[1], &mut [&mut cache], &[choice], &mut scratch, true)
                            .map(|_| ()),
                    ]
                });
                (all, cache.len())
            });
            // Whether it waits by now or not, it does not get its turn.
            cancel.cancel();
            let (all, len) = waiting.join().unwrap();
            for result in all {
                assert_eq!(result.unwrap_err().kind(), ErrorKind::Cancelled);
            }
            assert_eq!(len, 0);
            drop(other);
        });
    }
}
