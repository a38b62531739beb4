//! Verifications: a token and drafted ones of each of several sequences, in one recorded pass that chooses a token after each. Rows are those
//! of a decode step in which the rows of one sequence share its blocks, each one position further.

use super::executor::Executor;
use super::graphs::{GraphKey, GraphKind, bucket, verified_bucket};
use super::lowered::Source;
use super::memory::Memory;
use super::plan::Rows;
use super::plan::drafter::Followed;
use super::ragged::token_of;
use super::row_adapters::RowAdapters;
use super::step::{BATCH, GREEDY, before_of, each_rule, selection};
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::cuda::{self, Drawn, Event};
use crate::model::adapter::Adapter;
use crate::model::batch::{Segment, Wanted};
use crate::model::kv::{KvTables, StateBlocks};
use crate::ops::sample::Choice;

/// The output of a verified segment, row by row.
pub(in crate::model) struct VerifiedRows {
    /// The token after each row, or the fault of the row.
    pub(in crate::model) tokens: Vec<Result<u32>>,
    /// The hidden row of each row, if the drafter follows the sequence.
    pub(in crate::model) hidden: Vec<Vec<f32>>,
    /// Whether a row had values that are not finite, which the cache then holds.
    pub(in crate::model) has_faults: bool,
}

/// The rows of a verification, those of a sequence one after the other.
struct VerifiedPass<'a> {
    /// Rows of each sequence, padding included.
    each: usize,
    tokens: Vec<u32>,
    positions: Vec<usize>,
    tables: Vec<&'a KvTables>,
    states: Vec<Option<StateBlocks>>,
    choices: Vec<Choice<'a>>,
    adapters: Vec<Option<&'a Adapter>>,
}

/// The blocks of the recurrent state before and after each row of a segment.
fn states_of(segment: &Segment<'_>) -> Vec<StateBlocks> {
    let end = segment.first + segment.tokens.len();
    let parts = segment.tables.state().parts_of_pass(segment.first, end);
    parts.into_iter().map(|(_, blocks)| blocks).collect()
}

/// The most segments of at most `len` tokens that a recorded pass takes.
pub(in crate::model) fn most_verified(len: usize) -> usize {
    BATCH / verified_bucket(len).unwrap_or(BATCH)
}

impl<'a> VerifiedPass<'a> {
    /// The rows of some segments. Rows that only pad them have `padding` for blocks.
    fn new(
        source: Source<'_>,
        segments: &[&Segment<'a>],
        padding: &'a KvTables,
    ) -> Result<VerifiedPass<'a>> {
        let longest = segments.iter().map(|segment| segment.tokens.len()).max();
        let each = longest.and_then(verified_bucket);
        let each =
            each.ok_or_else(|| err!(Internal, "{longest:?} rows of a sequence to verify"))?;
        let sequences = bucket(segments.len()).min(BATCH / each);
        let rows = each * sequences.max(segments.len());
        let mut pass = VerifiedPass {
            each,
            tokens: vec![0; rows],
            positions: vec![0; rows],
            tables: vec![padding; rows],
            states: vec![Some(StateBlocks::NULL); rows],
            choices: vec![GREEDY; rows],
            adapters: vec![None; rows],
        };
        for (sequence, segment) in segments.iter().enumerate() {
            let Wanted::Verified(how) = segment.wanted else {
                bail!(
                    Internal,
                    "a segment to verify that asks for no verification"
                );
            };
            let (len, states) = (segment.tokens.len(), states_of(segment));
            for (i, &token) in segment.tokens.iter().enumerate() {
                let row = sequence * each + i;
                pass.tokens[row] = token;
                pass.positions[row] = segment.first + i;
                pass.tables[row] = segment.tables;
                pass.adapters[row] = segment.adapter;
                pass.choices[row] = how.choice(i, len);
                if source.kv.state().is_some() {
                    pass.states[row] = states.get(i).copied();
                }
            }
        }
        Ok(pass)
    }

    fn rows(&self) -> usize {
        self.tokens.len()
    }
}

impl Executor {
    /// Whether verifications of the model are recorded.
    pub(in crate::model) fn records_verifications(&self) -> bool {
        self.lowered.sizes.records_verifications
    }

    /// Whether a segment can be verified by a recorded pass, rather than by a ragged one.
    pub(in crate::model) fn is_recorded(&self, source: Source<'_>, segment: &Segment<'_>) -> bool {
        let len = segment.tokens.len();
        // The drafter follows the position before the first row, if there is one.
        matches!(segment.wanted, Wanted::Verified(_))
            && verified_bucket(len).is_some()
            && segment.first > 0
            && self.records_verifications()
            && source.kv.has_null_block()
            && (source.kv.state().is_none() || states_of(segment).len() == len)
    }

    /// Verifies segments of different sequences, all of which [`Executor::is_recorded`] accepts. They must use the same RoPE table, and the
    /// drafter follows all of them or none.
    pub(in crate::model) fn verify(
        &self,
        source: Source<'_>,
        segments: &[&Segment<'_>],
    ) -> Result<Vec<VerifiedRows>> {
        let padding = KvTables::new(source.kv.kind(), self.lowered.sizes.groups);
        let rows = VerifiedPass::new(source, segments, &padding)?;
        let before = before_of(segments);
        let mut memory = self.memory();
        memory.forget()?;
        let key = self.write_verification(source, &rows, &before, &mut memory)?;
        let key = GraphKey {
            long: segments.iter().any(|s| self.is_long(s.context)),
            ..key
        };
        self.launch_recorded(source, key, &mut memory)?;
        Event::record(&self.lowered.gpu)?.wait()?;
        let follows = !before.is_empty();
        self.verified(&rows, segments, follows, &mut memory)
    }

    /// Writes the input of a verification. Returns the key of its recording, for the short RoPE table.
    fn write_verification(
        &self,
        source: Source<'_>,
        pass: &VerifiedPass<'_>,
        before: &[Option<&[f32]>],
        memory: &mut Memory,
    ) -> Result<GraphKey> {
        let (gpu, sizes) = (&self.lowered.gpu, &self.lowered.sizes);
        let (rows, each) = (pass.rows(), pass.each);
        let last = pass.positions.iter().copied().max().unwrap_or(0);
        let pages = last / cuda::PAGE + 1;
        memory.fit(gpu, sizes, rows, rows, rows, pages)?;
        memory.write_step(&pass.tokens, &pass.positions, &pass.tables, rows)?;
        // Padding is among the rows.
        memory.expect_stale_faults();
        memory.write_states(&pass.states, rows)?;
        let adapters = RowAdapters::of(pass.adapters.iter().copied(), rows)?;
        if let Some(adapters) = &adapters {
            memory.write_adapters(gpu, sizes, adapters)?;
        }
        let rules = each_rule(&pass.choices);
        memory.write_rules(gpu, sizes, &rules, &pass.choices)?;
        if !before.is_empty() {
            let first = memory.drafter()?.of_row(0);
            let sources = (0..rows).map(|row| match row % each {
                // Sequences that only pad have no hidden rows before; those of a sequence do for them.
                0 => (row / each).min(before.len() - 1),
                _ => first + row - 1,
            });
            memory.write_hidden(before, sources)?;
        }
        Ok(GraphKey {
            rows,
            kv: source.kv.kind(),
            decodes: self.decodes(source, rows, last)?,
            selection: Some(selection(&rules)),
            long: false,
            adapted: adapters.map(|adapters| adapters.pass),
            kind: GraphKind::Verification {
                follows: !before.is_empty(),
            },
        })
    }

    /// Enqueues the kernels of a verification.
    pub(super) fn enqueue_verification(
        &self,
        source: Source<'_>,
        key: &GraphKey,
        follows: bool,
        memory: &Memory,
    ) -> Result<()> {
        self.lowered.embed(source, key.rows, memory)?;
        let pass = self.pass_of(source, key, memory);
        self.enqueue_blocks_of(&pass, Rows::Verification)?;
        if follows {
            // Rows of tokens that turn out to be wrong leave keys and values that the next pass replaces before it reads them.
            pass.hidden()?;
            pass.follow(Followed::Single)?;
        }
        self.select(key, memory, &memory.history)
    }

    /// The output of a verification that has run.
    fn verified(
        &self,
        pass: &VerifiedPass<'_>,
        segments: &[&Segment<'_>],
        follows: bool,
        memory: &mut Memory,
    ) -> Result<Vec<VerifiedRows>> {
        let (rows, vocabulary) = (pass.rows(), self.lowered.sizes.vocab);
        let drawn = |memory: &Memory, row: usize| memory.drawn(row, rows, pass.positions[row] + 1);
        let mut all = Vec::with_capacity(segments.len());
        let mut is_usable = true;
        for (sequence, segment) in segments.iter().enumerate() {
            let own = sequence * pass.each..sequence * pass.each + segment.tokens.len();
            let tokens = own.clone().map(|row| drawn(memory, row));
            let tokens: Vec<Option<Drawn>> = tokens.collect();
            is_usable &= tokens.iter().all(|t| matches!(t, Some(Drawn::Token(_))));
            let hidden = own.filter(|_| follows).map(|row| {
                let scratch = memory.drafter()?;
                scratch.read(row, rows, pass.positions[row])
            });
            all.push(VerifiedRows {
                hidden: hidden.collect::<Result<_>>()?,
                tokens: tokens
                    .into_iter()
                    .map(|t| token_of(t, vocabulary, None))
                    .collect(),
                has_faults: false,
            });
        }
        // Values beyond f16 lead to logits from which no token can be chosen.
        if !is_usable {
            for (row, fault) in memory.faults(rows)? {
                let (sequence, index) = (row / pass.each, row % pass.each);
                let of_sequence = all.get_mut(sequence);
                let Some(of_sequence) = of_sequence.filter(|s| index < s.tokens.len()) else {
                    continue;
                };
                of_sequence.has_faults = true;
                of_sequence.tokens[index] = Err(fault);
            }
        }
        Ok(all)
    }
}
