//! Runs a model: one sequence or several that advance together, on the CPU through the reference block, on a GPU through fused kernels.
//! Splits prompts into prefill chunks, lets one call at a time run, and restores caches when a call fails.

use std::ops::Range;
use std::sync::Mutex;

use super::block::{self, Pass, Segment};
use super::fused::{self, Executor, Source};
use super::kv_cache::KvCache;
use super::{Logits, Model};
use crate::base::error::{bail, err};
use crate::base::lease::Held;
use crate::base::turns::Turn;
use crate::base::{Error, Result, call};
use crate::ops::Slice;
use crate::ops::sample::{self, Choice};

/// Rows that go through the blocks together on the CPU: enough to make full use of each weight that is read, few enough that
/// scratch memory does not grow with the prompt.
const ROWS: usize = 512;

/// Memory that forward passes reuse. One serves one caller at a time; it grows to the largest pass it has seen.
#[derive(Debug)]
pub struct Scratch {
    block: block::Scratch,
    sample: Vec<Mutex<sample::Scratch>>,
}

impl Scratch {
    /// Empty scratch memory.
    pub fn new() -> Self {
        Scratch {
            block: block::Scratch::new(),
            sample: Vec::new(),
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.block.bytes()
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

fn reserve_each(caches: &mut [&mut KvCache], count: usize) -> Result<()> {
    for (i, cache) in caches.iter_mut().enumerate() {
        cache
            .reserve(count)
            .map_err(|e| e.within(format_args!("sequence {i}")))?;
    }
    Ok(())
}

/// Records the tokens of a batch that ran, or frees what one that failed had allocated.
fn finish_batch(caches: &mut [&mut KvCache], ran: bool) {
    for cache in caches.iter_mut() {
        match ran {
            true => cache.advance(1),
            false => cache.roll_back(),
        }
    }
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

    /// Like [`Model::forward`], but always through the reference block, which fused kernels are tested against. Slow on a GPU.
    pub fn forward_reference(
        &self,
        tokens: &[u32],
        cache: &mut KvCache,
        scratch: &mut Scratch,
        wanted: Logits,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        logits.clear();
        let before = cache.len();
        let result = self.forward_in_parts(tokens, cache, scratch, wanted, logits);
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
        let source = self.source();
        if tokens.len() == 1 && wanted != Logits::None {
            let _turn = self.turn()?;
            executor.step_logits(source, tokens, &[&*cache], logits)?;
            cache.advance(1);
            call::add(1);
            return Ok(());
        }
        let chunks = tokens.len().div_ceil(fused::ROWS);
        for (i, chunk) in tokens.chunks(fused::ROWS).enumerate() {
            let _turn = self.turn()?;
            let mut pass = executor.run(source, chunk, cache)?;
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

    fn source(&self) -> Source<'_> {
        Source {
            spec: self.spec(),
            weights: self.weights(),
        }
    }

    /// Waits until no other call runs this model, unless the call is cancelled meanwhile. Prompts yield after each prefill chunk. Keeps the
    /// trainer of the weights out, where there is one.
    fn turn(&self) -> Result<(Turn<'_>, Option<Held>)> {
        let held = self.hold()?;
        let turn = self.turns.take(call::is_over)?;
        call::check()?;
        Ok((turn, held))
    }

    /// Runs one token of each of several sequences, like [`Model::forward_batch`], and gives the next tokens, chosen as
    /// `choices` says. On a GPU the logits stay there, and with `look_ahead` the device runs the step after at once, with
    /// those tokens: faster if they are what the caller runs next, and harmless if they are not.
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
                    // Without room for the look-ahead step there is none.
                    for cache in caches.iter_mut().filter(|c| c.capacity() - c.len() > 1) {
                        let _ = cache.reserve(2);
                    }
                }
                let caches: Vec<&KvCache> = caches.iter().map(|c| &**c).collect();
                let (turn, _held) = self.turn()?;
                // Another call waits, and will run other sequences next.
                let look_ahead = look_ahead && !turn.ends();
                executor.step_choose(self.source(), tokens, &caches, choices, look_ahead)
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
        if self.executor.is_some() && tokens.len() > fused::BATCH {
            bail!(
                Unsupported,
                "a batch of {} sequences on a GPU; at most {} are stepped together",
                tokens.len(),
                fused::BATCH
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
                executor.step_logits(self.source(), tokens, &caches, logits)
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
        self.check_ids(tokens)?;
        self.weights().embed(tokens, out)?;
        let scale = self.spec().embedding_scale;
        out.iter_mut().for_each(|x| *x *= scale);
        Ok(())
    }

    /// The logits of rows that left the last block elsewhere, `hidden_size` numbers each: final norm and head. With
    /// [`Model::embed`], what a model loaded for sampling only can do.
    pub fn logits_of(
        &self,
        hidden: &[f32],
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        let width = self.spec().hidden_size;
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
            let residual = &mut scratch.block.residual;
            residual.grow(&self.device, rows.len())?;
            let to = residual.first_mut(rows.len())?;
            to.copy_from(Slice::Host(rows))?;
            self.head(0..rows.len() / width, scratch, logits)?;
        }
        Ok(())
    }

    /// Refuses tokens that cannot be run.
    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        if self.weights().blocks.is_empty() {
            bail!(
                Unsupported,
                "the model was loaded for sampling only, without its layers; load it whole to run tokens"
            );
        }
        self.check_ids(tokens)
    }

    /// Refuses ids that the embedding has no rows for.
    pub fn check_ids(&self, tokens: &[u32]) -> Result<()> {
        let rows = self.spec().vocab_size;
        match tokens.iter().position(|&id| id as usize >= rows) {
            None => Ok(()),
            Some(index) => Err(self.without_a_row(tokens[index], index)),
        }
    }

    /// The error for a token that the embedding has no row for.
    pub(super) fn without_a_row(&self, id: u32, index: usize) -> Error {
        let rows = self.spec().vocab_size;
        let text = self.tokenizer().ok().and_then(|t| t.text_of(id));
        err!(
            InvalidArgument,
            "token {id} at index {index} is outside the vocabulary of {rows}{}",
            match text {
                Some(text) => format!(": it is '{text}', and the embedding has no row for it"),
                None => String::new(),
            }
        )
    }

    /// Takes rows through all blocks and stores their keys and values; the last block's output is left in the residual stream.
    fn run(&self, tokens: &[u32], segments: &mut [Segment<'_>], s: &mut Scratch) -> Result<()> {
        let (spec, weights) = (self.spec(), self.weights());
        let pass = Pass::new(&self.device, spec, self.activations, segments)?;
        pass.embed(weights, tokens, &mut s.block)?;
        for (index, block) in weights.blocks.iter().enumerate() {
            call::check()?;
            call::begun((tokens.len() * index / spec.blocks.len()) as u64);
            pass.block(index, block, segments, &mut s.block)?;
        }
        Ok(())
    }

    /// Appends the logits of `rows` of the residual stream.
    fn head(&self, rows: Range<usize>, s: &mut Scratch, logits: &mut Vec<f32>) -> Result<()> {
        let (spec, weights) = (self.spec(), self.weights());
        let (device, s) = (&self.device, &mut s.block);
        block::head(device, spec, self.activations, weights, rows, s, logits)
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
        let mut cache = KvCache::new(model.device(), model.spec(), 64, KvType::F16).unwrap();
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
