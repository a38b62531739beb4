//! Ragged passes: single tokens of several sequences, and prefill chunks, in the same pass through the blocks.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::MutexGuard;

use super::executor::Executor;
use super::lowered::{Lowered, Source};
use super::memory::Memory;
use super::pass::{Attention, ChunkRows, FusedPass, Through};
use super::plan::drafter::Followed;
use super::plan::{self, Applied, Norm, Normed, Rows};
use super::row_adapters::RowAdapters;
use crate::base::error::err;
use crate::base::memory::{Tag, zeros};
use crate::base::{Error, Result, call};
use crate::cuda::{self, DeviceBuffer, DeviceSlice, Drawn, Event, FoundLikelihood};
use crate::model::adapter::Adapter;
use crate::model::kv::{KvTables, StateBlocks};
use crate::ops::likelihood::Likelihood;
use crate::ops::sample::{self, Choice, TokenMask};

/// Maximum number of rows of a pass.
pub(in crate::model) const ROWS: usize = 4096;
/// Maximum number of rows whose logits are computed together.
const HEAD_ROWS: usize = 64;
/// Number of blocks enqueued ahead of the running one in a call that may be cancelled: enough that the device never waits, few enough that
/// cancellation is quick.
const LOOK_AHEAD: usize = 4;

/// Consecutive tokens of one sequence. Their positions have blocks.
pub(in crate::model) struct PromptChunk<'a> {
    pub(in crate::model) tokens: &'a [u32],
    pub(in crate::model) tables: &'a KvTables,
    /// The adapter of the sequence.
    pub(in crate::model) adapter: Option<&'a Adapter>,
    /// Positions that the sequence may come to.
    pub(in crate::model) context: usize,
    /// Position of the first token.
    pub(in crate::model) first: usize,
    /// The positions after which the recurrent state is written, in parts of the chunk, and the blocks; empty if the model has no such state.
    pub(in crate::model) states: Vec<(Range<usize>, StateBlocks)>,
}

/// The first rows of a chunk that the drafter follows.
pub(in crate::model) struct FollowedRows<'a> {
    /// The index of the chunk in its pass.
    pub(in crate::model) chunk: usize,
    /// The number of rows, at least one.
    pub(in crate::model) count: usize,
    /// The hidden row of the position before the chunk, if it is known.
    pub(in crate::model) before: Option<&'a [f32]>,
}

impl Executor {
    /// Runs chunks of different sequences, at most [`ROWS`] tokens and [`BATCH`](super::BATCH) chunks, single tokens first. Their output
    /// can be read afterwards.
    pub(in crate::model) fn run<'a>(
        &'a self,
        source: Source<'a>,
        chunks: &[PromptChunk<'_>],
    ) -> Result<Ragged<'a>> {
        let mut memory = self.memory();
        memory.forget()?;
        memory.clear_stale_faults()?;
        let lengths = || chunks.iter().map(|chunk| chunk.tokens.len());
        let rows = lengths().sum();
        let ends = chunks.iter().map(|chunk| chunk.first + chunk.tokens.len());
        let pages = ends.max().unwrap_or(0).div_ceil(cuda::PAGE);
        let lowered = &self.lowered;
        let states = || chunks.iter().flat_map(|chunk| &chunk.states);
        let segments = states().count();
        memory.fit(
            &lowered.gpu,
            &lowered.sizes,
            rows,
            0,
            chunks.len().max(segments),
            pages,
        )?;
        let tokens = chunks.iter().flat_map(|chunk| chunk.tokens);
        let tokens: Vec<i32> = tokens.map(|&t| t as i32).collect();
        memory.tokens.write(0, &tokens)?;
        let tables: Vec<_> = chunks.iter().map(|chunk| chunk.tables).collect();
        memory.write_tables(&tables, 0)?;
        if let Some(recurrent) = &mut memory.recurrent {
            recurrent.write(states().map(|(positions, blocks)| (positions.len(), *blocks)))?;
        }
        let of_rows = chunks
            .iter()
            .flat_map(|c| c.tokens.iter().map(|_| c.adapter));
        let adapters = RowAdapters::of(of_rows, rows)?;
        if let Some(adapters) = &adapters {
            memory.write_adapters(&lowered.gpu, &lowered.sizes, adapters)?;
        }
        let singles = lengths().take_while(|&length| length == 1).count();
        let positions: Vec<i32> = chunks[..singles].iter().map(|c| c.first as i32).collect();
        memory.positions.write(0, &positions)?;
        let last = chunks[..singles].iter().map(|chunk| chunk.first).max();
        let decodes = match last {
            Some(last) => self.decodes(source, singles, last)?,
            None => Vec::new(),
        };
        let mut row = singles;
        let prompts: Vec<ChunkRows> = chunks
            .iter()
            .enumerate()
            .skip(singles)
            .map(|(sequence, chunk)| {
                row += chunk.tokens.len();
                ChunkRows {
                    sequence,
                    rows: row - chunk.tokens.len()..row,
                    first: chunk.first,
                }
            })
            .collect();
        let long = chunks.iter().any(|chunk| self.is_long(chunk.context));
        let pass = FusedPass {
            lowered,
            source,
            memory: &memory,
            through: Through::Model,
            rows,
            segments,
            attention: Attention {
                decodes: &decodes,
                chunks: &prompts,
            },
            adapted: adapters.map(|adapters| adapters.pass),
            long,
            hands_on: false,
            copies: false,
        };
        lowered.embed(source, rows, &memory)?;
        if let Err(e) = self.enqueue_blocks(&pass) {
            // Kernels in flight use the working memory and the caches. If waiting fails too, the device is lost.
            let _ = lowered.gpu.synchronize();
            return Err(e);
        }
        Ok(Ragged {
            executor: self,
            source,
            memory,
            tokens,
            chunks: chunks
                .iter()
                .map(|chunk| (chunk.tokens.len(), chunk.first))
                .collect(),
            long,
        })
    }

    fn enqueue_blocks(&self, pass: &FusedPass<'_>) -> Result<()> {
        let watched = call::with(|call| call.is_watched());
        let (lowered, rows) = (&self.lowered, pass.rows);
        let blocks = lowered.model.own_blocks().len();
        let steps = pass.plan(Rows::Ragged)?;
        let mut enqueued = VecDeque::new();
        for of_block in steps.chunk_by(|a, b| a.block == b.block) {
            let index = of_block[0].block;
            of_block.iter().try_for_each(|step| pass.enqueue(step))?;
            if watched {
                enqueued.push_back(Event::record(&lowered.gpu)?);
            }
            if enqueued.len() > LOOK_AHEAD {
                enqueued
                    .pop_front()
                    .map_or(Ok(()), |e| e.wait_or_cancel())?;
                call::begun((rows * (index + 1 - LOOK_AHEAD) / blocks) as u64);
            }
        }
        enqueued.iter().try_for_each(Event::wait_or_cancel)
    }
}

/// Rows that a pass has run through the blocks, in the order of their chunks.
pub(in crate::model) struct Ragged<'a> {
    executor: &'a Executor,
    source: Source<'a>,
    memory: MutexGuard<'a, Memory>,
    tokens: Vec<i32>,
    /// The number of rows of each chunk, and the position of its first.
    chunks: Vec<(usize, usize)>,
    /// Whether the long RoPE table applies.
    long: bool,
}

impl Ragged<'_> {
    /// Appends the logits of these rows.
    pub(in crate::model) fn logits(&mut self, rows: &[usize], logits: &mut Vec<f32>) -> Result<()> {
        for rows in rows.chunks(HEAD_ROWS) {
            self.head(rows)?;
            let vocabulary = self.executor.lowered.sizes.vocab;
            self.memory.read_logits(rows.len() * vocabulary, logits)?;
        }
        Ok(())
    }

    /// The hidden rows of these rows, `[rows, hidden]`.
    pub(in crate::model) fn hidden_rows(&mut self, rows: &[usize]) -> Result<Vec<f32>> {
        let (width, source) = (self.executor.lowered.sizes.hidden, self.source);
        let row_bytes = width * size_of::<f32>();
        let mut hidden = zeros(rows.len() * width)?;
        let norm = source.weights.norm.all().cuda()?;
        let outputs = hidden.chunks_mut(HEAD_ROWS * width);
        for (rows, out) in rows.chunks(HEAD_ROWS).zip(outputs) {
            let indices: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
            let gpu = &self.executor.lowered.gpu;
            let indices = DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, &indices)?;
            let normed = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, rows.len() * row_bytes)?;
            let x = DeviceSlice::from(&normed);
            let residual = DeviceSlice::from(&self.memory.residual);
            cuda::training::gather_rows(residual, (&indices).into(), row_bytes, x)?;
            cuda::rms_norm_f32(x, norm, source.spec.norm_eps, x)?;
            normed.read(0, out)?;
        }
        Ok(hidden)
    }

    /// The likelihood of each of `tokens` by the logits of its row.
    pub(in crate::model) fn likelihoods(
        &mut self,
        rows: &[usize],
        tokens: &[u32],
    ) -> Result<Vec<Result<Likelihood>>> {
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let Lowered { gpu, sizes, .. } = &*self.executor.lowered;
        let given = DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, tokens)?;
        let each = size_of::<FoundLikelihood>();
        let found = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, rows.len() * each)?;
        for (i, part) in rows.chunks(HEAD_ROWS).enumerate() {
            self.head(part)?;
            let of_part = |buffer, bytes: usize| {
                let first = i * HEAD_ROWS * bytes;
                DeviceSlice::from(buffer).part(first..first + part.len() * bytes)
            };
            let (own, to) = (of_part(&given, 4)?, of_part(&found, each)?);
            cuda::likelihoods(&self.memory.logits, part.len(), sizes.vocab, own, to)?;
        }
        let mut all = vec![FoundLikelihood::default(); rows.len()];
        found.read(0, &mut all)?;
        let each = all.into_iter().zip(tokens).map(|(found, &token)| {
            let argmax = token_of(Some(Drawn::read(found.argmax)), sizes.vocab, None)?;
            Ok(Likelihood {
                log_probability: found.log_probability,
                is_argmax: argmax == token,
            })
        });
        Ok(each.collect())
    }

    /// The next tokens after these rows, chosen by `choices`; on the device if all are the argmax.
    pub(in crate::model) fn choose(
        &mut self,
        rows: &[usize],
        choices: &[Choice<'_>],
    ) -> Result<Vec<Result<u32>>> {
        let executor = self.executor;
        let Lowered { gpu, sizes, .. } = &*executor.lowered;
        let (mut logits, mut scratch) = (Vec::new(), sample::SampleScratch::default());
        let mut chosen = Vec::with_capacity(rows.len());
        for (rows, choices) in rows.chunks(HEAD_ROWS).zip(choices.chunks(HEAD_ROWS)) {
            self.head(rows)?;
            let memory = &mut self.memory;
            if choices.iter().all(|choice| choice.options.is_greedy()) {
                memory.mask(gpu, sizes, choices)?;
                let (best, tokens) = (&memory.best, &memory.tokens);
                let n = rows.len();
                cuda::argmax(gpu, &memory.logits, n, sizes.vocab, best, tokens, None)?;
                let mut said = vec![0i32; n];
                tokens.read(0, &mut said)?;
                let each = said.into_iter().map(Drawn::read).zip(choices);
                chosen.extend(
                    each.map(|(drawn, choice)| token_of(Some(drawn), sizes.vocab, choice.allowed)),
                );
                continue;
            }
            logits.clear();
            memory.read_logits(rows.len() * sizes.vocab, &mut logits)?;
            let each = logits.chunks_exact(sizes.vocab).zip(choices);
            chosen.extend(each.map(|(row, choice)| sample::sample(row, choice, &mut scratch)));
        }
        Ok(chosen)
    }

    /// Waits for the device. Returns the rows with unusable values, each with its first error.
    pub(in crate::model) fn faults(&mut self) -> Result<Vec<(usize, Error)>> {
        self.memory.faults(self.tokens.len())
    }

    /// Runs the drafter's keys and values over the first rows of some chunks, from the position before each on, and returns the hidden row of
    /// the last of them. The output of the pass is lost.
    pub(in crate::model) fn follow(
        &mut self,
        followed: &[FollowedRows<'_>],
    ) -> Result<Vec<Vec<f32>>> {
        let (starts, rows) = (self.starts(), self.tokens.len());
        let memory = &mut *self.memory;
        // Choices of tokens are written in the place of those that ran.
        memory.tokens.write(0, &self.tokens)?;
        let mut before = vec![None; self.chunks.len()];
        followed.iter().for_each(|f| before[f.chunk] = f.before);
        let first = memory.drafter()?.of_row(0);
        let of_chunk = |(chunk, (len, _)): (usize, &(usize, usize))| {
            let start = first + starts[chunk];
            std::iter::once(chunk).chain(start..start + len - 1)
        };
        memory.write_hidden(&before, self.chunks.iter().enumerate().flat_map(of_chunk))?;
        let stored = followed.iter().filter_map(|f| {
            // No position is before the first token.
            let (start, position) = (starts[f.chunk], self.chunks[f.chunk].1);
            let skipped = usize::from(position == 0);
            (f.count > skipped).then(|| ChunkRows {
                sequence: f.chunk,
                rows: start + skipped..start + f.count,
                first: position.saturating_sub(1),
            })
        });
        let stored: Vec<ChunkRows> = stored.collect();
        let pass = FusedPass {
            lowered: &self.executor.lowered,
            source: self.source,
            memory,
            through: Through::Model,
            rows,
            segments: 0,
            attention: Attention {
                chunks: &stored,
                ..Attention::default()
            },
            adapted: None,
            long: self.long,
            hands_on: false,
            copies: false,
        };
        pass.hidden()?;
        pass.follow(Followed::Consecutive)?;
        let width = self.executor.lowered.sizes.hidden;
        let last = followed.iter().map(|f| {
            let mut hidden = vec![0.0; width];
            let at = first + starts[f.chunk] + f.count - 1;
            memory.drafter()?.from(at)?.read(0, &mut hidden)?;
            Ok(hidden)
        });
        last.collect()
    }

    /// The first row of each chunk.
    fn starts(&self) -> Vec<usize> {
        let mut row = 0;
        let each = self.chunks.iter().map(|(len, _)| {
            row += len;
            row - len
        });
        each.collect()
    }

    /// Computes the logits of at most [`HEAD_ROWS`] rows.
    fn head(&mut self, rows: &[usize]) -> Result<()> {
        let Lowered {
            gpu,
            sizes,
            hardware,
            model,
            ..
        } = &*self.executor.lowered;
        let head = model.head;
        let n = rows.len();
        let (held, pages) = (self.memory.rows, self.memory.pages);
        self.memory.fit(gpu, sizes, held, n, 1, pages)?;
        let pass = FusedPass {
            lowered: &self.executor.lowered,
            source: self.source,
            memory: &self.memory,
            through: Through::Model,
            rows: n,
            segments: 0,
            attention: Attention::default(),
            adapted: None,
            long: false,
            hands_on: false,
            copies: false,
        };
        let input = Normed {
            norm: Norm::Head,
            layout: plan::head_layout(head, n, hardware),
            applied: Applied::Before,
        };
        pass.normalize_rows(input.norm, rows, input.layout)?;
        pass.head(&input, &plan::head(head, &input, n, hardware)?)
    }
}

/// The token chosen by the device among those that `allowed` allows, or the error if there is none.
pub(super) fn token_of(
    drawn: Option<Drawn>,
    vocabulary: usize,
    allowed: Option<TokenMask<'_>>,
) -> Result<u32> {
    match drawn {
        Some(Drawn::Token(token)) => Ok(token),
        Some(Drawn::AllRuledOut) => Err(sample::all_ruled_out(vocabulary, allowed)),
        Some(Drawn::Unusable(token)) => Err(sample::unusable(token as usize)),
        None => Err(err!(Internal, "the device chose no token")),
    }
}
