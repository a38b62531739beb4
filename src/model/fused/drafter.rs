//! The drafter in fused passes: launches of the kernels before and after its block, and guesses of tokens, one after the other on the device.

use super::drafter_scratch::DrafterScratch;
use super::executor::Executor;
use super::graphs::{GraphKey, GraphKind, Selection};
use super::lowered::{Lowered, Source};
use super::memory::Memory;
use super::operands::of_linear;
use super::pass::{Attention, FusedPass, Through};
use super::plan::Norm;
use super::plan::drafter::{self as plan, Followed, INPUTS};
use super::step::{GREEDY, each_rule, rows_of, selection};
use crate::base::error::bail;
use crate::base::{Result, call};
use crate::cuda::{self, Drawn, Event, GemmPlan, Output};
use crate::model::kv::KvTables;
use crate::ops::sample::Choice;

/// The row that the drafter guesses from: a token, and the hidden row of the position before it.
#[derive(Clone, Copy, Debug)]
pub(in crate::model) struct Guess<'a> {
    pub(in crate::model) token: u32,
    /// f32 `[hidden]`.
    pub(in crate::model) hidden: &'a [f32],
    /// The position of the hidden row.
    pub(in crate::model) position: usize,
    pub(in crate::model) tables: &'a KvTables,
    /// Positions that the sequence may come to.
    pub(in crate::model) context: usize,
    /// The choice of the first guess. Each later one has the next number, and a history with the guesses before it.
    pub(in crate::model) choice: Choice<'a>,
}

impl FusedPass<'_> {
    fn scratch(&self) -> Result<&DrafterScratch> {
        self.memory.drafter()
    }

    /// Normalizes the residual stream to hidden rows: those of the model after those that its rows began with, those of the drafter in the
    /// place of these.
    pub(super) fn hidden(&self) -> Result<()> {
        let scratch = self.scratch()?;
        let first = match self.hands_on {
            true => 0,
            false => scratch.of_row(0),
        };
        let copies = scratch.copies(&self.memory.positions);
        cuda::drafter_hidden(
            &self.lowered.gpu,
            &self.memory.residual,
            (self.norm_weight(Norm::Head)?, self.source.spec.norm_eps),
            self.rows,
            self.lowered.sizes.hidden,
            scratch.from(first)?,
            self.copies.then_some(copies),
        )
    }

    pub(super) fn drafter_inputs(&self) -> Result<()> {
        let (memory, drafter, scratch) = (self.memory, self.source.drafter()?, self.scratch()?);
        let embeddings = &memory.projected;
        self.lowered
            .embed_to(self.source, self.rows, memory, embeddings)?;
        let norms = [
            drafter.embedding_norm.on_gpu()?,
            drafter.hidden_norm.on_gpu()?,
        ];
        cuda::drafter_inputs(
            &self.lowered.gpu,
            embeddings,
            (&scratch.hidden, scratch.sources()?),
            (norms, self.source.spec.norm_eps),
            self.rows,
            self.lowered.sizes.hidden,
            &memory.inner,
        )
    }

    pub(super) fn project_drafter_inputs(&self, gemm: &GemmPlan) -> Result<()> {
        let (memory, fc) = (self.memory, of_linear(&self.source.drafter()?.fc)?);
        let (input, hidden) = (INPUTS.input(&memory.inner, 1.0), self.lowered.sizes.hidden);
        let out = &memory.residual;
        self.linear(gemm, input, &[(fc, None)], Output::F32, out, hidden)
    }

    /// Enqueues the drafter's keys and values of the rows of a pass, whose residual stream is lost. Tokens, hidden rows and their numbers
    /// are in memory.
    pub(super) fn follow(&self, followed: Followed) -> Result<()> {
        let Lowered {
            model, hardware, ..
        } = self.lowered;
        let steps = plan::follow(model, self.rows, followed, hardware)?;
        let pass = FusedPass {
            through: Through::Drafter,
            adapted: None,
            ..*self
        };
        steps.iter().try_for_each(|step| pass.enqueue(step))
    }
}

impl Executor {
    /// Up to `count` tokens that may follow the token of each row, in turn guessed from the drafter's logits by `choice`. Rows must be of
    /// different sequences, which use the same RoPE table and have blocks for the positions of all guesses. Guesses end where no token can
    /// be chosen.
    pub(in crate::model) fn draft(
        &self,
        source: Source<'_>,
        rows: &[Guess<'_>],
        count: usize,
    ) -> Result<Vec<Vec<u32>>> {
        let mut memory = self.memory();
        let mut pass = self.begin_guesses(source, rows, count, &mut memory)?;
        let mut guessed = vec![Vec::new(); rows.len()];
        let mut ended = vec![false; rows.len()];
        let most = memory.drafter()?.guesses(pass.rows);
        while pass.done < count && !ended.iter().all(|ended| *ended) {
            call::check()?;
            let from = pass.done;
            for _ in from..count.min(from + most) {
                self.guess(source, &mut pass, &mut memory)?;
            }
            Event::record(&self.lowered.gpu)?.wait()?;
            for i in from..pass.done {
                for (row, guess) in rows.iter().enumerate() {
                    let token = memory.guessed(row, pass.rows, guess.position + i + 1)?;
                    match token {
                        Some(Drawn::Token(token)) if !ended[row] => guessed[row].push(token),
                        _ => ended[row] = true,
                    }
                }
            }
        }
        Ok(guessed)
    }

    /// Appends the drafter's logits of the token after that of `row`, and returns the drafter's hidden row of that token.
    pub(in crate::model) fn drafter_logits(
        &self,
        source: Source<'_>,
        row: Guess<'_>,
        logits: &mut Vec<f32>,
    ) -> Result<Vec<f32>> {
        let mut memory = self.memory();
        let mut pass = self.begin_guesses(source, &[row], 1, &mut memory)?;
        self.guess(source, &mut pass, &mut memory)?;
        memory.read_logits(self.lowered.sizes.vocab, logits)?;
        memory.drafter()?.read(0, pass.rows, row.position)
    }

    /// Writes the input of the first guesses of some sequences.
    fn begin_guesses(
        &self,
        source: Source<'_>,
        rows: &[Guess<'_>],
        count: usize,
        memory: &mut Memory,
    ) -> Result<Guesses> {
        let (sizes, gpu) = (&self.lowered.sizes, &self.lowered.gpu);
        let all = rows_of(source, rows.len());
        let Some(last) = rows.iter().map(|row| row.position).max() else {
            bail!(Internal, "guesses for no sequence");
        };
        memory.forget()?;
        let pages = (last + count.max(1) - 1) / cuda::PAGE + 1;
        memory.fit(gpu, sizes, all, all, all, pages)?;
        let tokens: Vec<u32> = rows.iter().map(|row| row.token).collect();
        let positions: Vec<usize> = rows.iter().map(|row| row.position).collect();
        let tables: Vec<&KvTables> = rows.iter().map(|row| row.tables).collect();
        memory.write_step(&tokens, &positions, &tables, all)?;
        let before: Vec<Option<&[f32]>> = rows.iter().map(|row| Some(row.hidden)).collect();
        memory.write_hidden(&before, 0..all)?;
        let mut choices: Vec<Choice<'_>> = rows.iter().map(|row| row.choice).collect();
        choices.resize(all, GREEDY);
        let rules = each_rule(&choices);
        memory.write_rules(gpu, sizes, &rules, &choices)?;
        Ok(Guesses {
            rows: all,
            last,
            done: 0,
            selection: selection(&rules),
            long: rows.iter().any(|row| self.is_long(row.context)),
        })
    }

    /// Enqueues the next guess of each sequence.
    fn guess(&self, source: Source<'_>, pass: &mut Guesses, memory: &mut Memory) -> Result<()> {
        let key = GraphKey {
            rows: pass.rows,
            kv: source.kv.kind(),
            decodes: self.decodes(source, pass.rows, pass.last + pass.done)?,
            selection: Some(pass.selection),
            long: pass.long,
            adapted: None,
            kind: GraphKind::Guess,
        };
        pass.done += 1;
        self.launch_recorded(source, key, memory)
    }

    /// Enqueues the kernels of a guess.
    pub(super) fn enqueue_guess(
        &self,
        source: Source<'_>,
        key: &GraphKey,
        memory: &Memory,
    ) -> Result<()> {
        let lowered = &self.lowered;
        let pass = FusedPass {
            lowered,
            source,
            memory,
            through: Through::Drafter,
            rows: key.rows,
            segments: 0,
            attention: Attention {
                decodes: &key.decodes,
                chunks: &[],
            },
            adapted: None,
            long: key.long,
            hands_on: true,
            copies: true,
        };
        let steps = plan::draft(&lowered.model, key.rows, &key.decodes, &lowered.hardware)?;
        steps.iter().try_for_each(|step| pass.enqueue(step))?;
        self.select(key, memory, &memory.drafter()?.guesses)
    }
}

/// Guesses under way.
struct Guesses {
    /// Rows of a pass, padding included.
    rows: usize,
    /// The last position of the first guesses.
    last: usize,
    /// Guesses of each sequence that are enqueued.
    done: usize,
    selection: Selection,
    long: bool,
}
