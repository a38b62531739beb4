//! Prompts: runs of tokens of one sequence, which go through the blocks in chunks.

use std::collections::VecDeque;
use std::sync::MutexGuard;

use super::executor::Executor;
use super::lowered::{Lowered, Source};
use super::memory::Memory;
use super::pass::{Attention, Pass};
use super::plan::{self, Applied, Norm, Normed};
use crate::base::{Result, call};
use crate::cuda::{self, Event};
use crate::model::kv_cache::KvCache;

/// Rows that go through the blocks together.
pub(in crate::model) const ROWS: usize = 4096;
/// Rows whose logits are computed together.
const HEAD_ROWS: usize = 64;
/// Blocks of a prompt that are enqueued ahead of the one that runs, where a call may be cancelled: enough that the device never waits,
/// few enough that cancelling is quick.
const LOOK_AHEAD: usize = 4;

impl Executor {
    /// Runs `tokens` of one sequence, [`ROWS`] at most, after what `cache` holds, whose pages exist already. Their logits can
    /// be read afterwards.
    pub(in crate::model) fn run<'a>(
        &'a self,
        source: Source<'a>,
        tokens: &[u32],
        cache: &KvCache,
    ) -> Result<Prompt<'a>> {
        let mut memory = self.memory();
        memory.invalidate();
        memory.flush()?;
        let (first, rows) = (cache.len(), tokens.len());
        let pages = (first + rows).div_ceil(cuda::PAGE);
        memory.fit(&self.lowered.gpu, &self.lowered.sizes, rows, 0, 1, pages)?;
        let ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
        memory.tokens.write(0, &ids)?;
        memory.write_pages(&[cache.gpu()?])?;
        self.lowered.embed(source, rows, &memory)?;
        let watched = call::with(|call| call.is_watched());
        let blocks = self.lowered.blocks.len();
        let steps = plan::plan(
            &self.lowered.blocks,
            self.lowered.head,
            rows,
            false,
            &self.lowered.hardware,
        );
        let pass = Pass {
            lowered: &self.lowered,
            source,
            memory: &memory,
            rows,
            attention: Attention::Prompt(first),
            long: self.lowered.is_long(cache.capacity()),
        };
        let enqueue = || {
            let mut enqueued = VecDeque::new();
            for of_block in steps.chunk_by(|a, b| a.block == b.block) {
                let index = of_block[0].block;
                of_block.iter().try_for_each(|step| pass.enqueue(step))?;
                if watched {
                    enqueued.push_back(Event::record(&self.lowered.gpu)?);
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
            let _ = self.lowered.gpu.synchronize();
            return Err(e);
        }
        Ok(Prompt {
            executor: self,
            source,
            memory,
        })
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
        let Lowered {
            gpu,
            sizes,
            hardware,
            head,
            ..
        } = &self.executor.lowered;
        for start in (first..first + rows).step_by(HEAD_ROWS) {
            let n = HEAD_ROWS.min(first + rows - start);
            let (held, pages) = (self.memory.rows, self.memory.pages);
            self.memory.fit(gpu, sizes, held, n, 1, pages)?;
            let pass = Pass {
                lowered: &self.executor.lowered,
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
            self.memory.read_logits(n * sizes.vocab, logits)?;
        }
        self.memory.check_fits()
    }

    /// Waits for the device, so that a fault comes out here.
    pub(in crate::model) fn finish(&mut self) -> Result<()> {
        self.memory.check_fits()
    }
}
