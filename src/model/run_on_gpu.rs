//! The passes of a batch on a GPU: decode steps, verifications of drafted tokens, and ragged passes.

use super::batch::{Batch, Divided, Part, PassLimits, Segment, Wanted, passes};
use super::fused::{self, Executor, Source};
use super::kv::NULL_BLOCK;
use super::run::{ChosenRow, Scratch, Slots, choices, chosen_rows, rows, rows_wanted, slot_of};
use super::{KvType, Model};
use crate::base::{Error, Result, call};
use crate::cuda;

impl Model {
    /// Runs a batch by fused kernels. A pass has one table of rotary frequencies and one type of keys and values, and the drafter follows all
    /// sequences of a step or none.
    pub(super) fn run_on_gpu(
        &self,
        executor: &Executor,
        batch: &Batch<'_>,
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
        slots: &mut Slots,
    ) -> Result<()> {
        let (segments, weights) = (&batch.segments, self.weights());
        let kind = |segment: &Segment<'_>| {
            (
                (executor.is_long(segment.context), segment.tables.kind()),
                segment.drafts_after.is_some(),
            )
        };
        let alike = segments.iter().all(|s| kind(s) == kind(&segments[0]));
        let of_pass = [false, true].into_iter();
        for of_pass in of_pass.flat_map(|long| KvType::ALL.map(|kv| (long, kv))) {
            let of_table: Vec<usize> = (0..segments.len())
                .filter(|&i| kind(&segments[i]).0 == of_pass)
                .collect();
            if of_table.is_empty() {
                continue;
            }
            let source = self.source(&weights, of_pass.1)?;
            let is_ragged = |i: &usize| {
                let segment = &segments[*i];
                !is_step(segment) && !executor.is_recorded(source, segment)
            };
            // Prompts take single tokens with them.
            if of_table.iter().any(is_ragged) {
                self.run_ragged(
                    executor, source, segments, &of_table, scratch, logits, slots,
                )?;
                continue;
            }
            for follows in [false, true] {
                let group = of_table.iter().copied();
                let group = group.filter(|&i| kind(&segments[i]).1 == follows);
                let (steps, verified): (Vec<_>, Vec<_>) =
                    group.partition(|&i| is_step(&segments[i]));
                let look_ahead = batch.look_ahead && alike && steps.len() == segments.len();
                self.run_steps(
                    executor, source, segments, &steps, look_ahead, scratch, logits, slots,
                )?;
                self.run_verifications(executor, source, segments, &verified, scratch, slots)?;
            }
        }
        Ok(())
    }

    /// Runs one token of each segment of a group.
    fn run_steps(
        &self,
        executor: &Executor,
        source: Source<'_>,
        segments: &[Segment<'_>],
        group: &[usize],
        look_ahead: bool,
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
        slots: &mut Slots,
    ) -> Result<()> {
        for steps in group.chunks(fused::BATCH) {
            let turn = self.turn()?;
            // If another call waits, it will run other sequences next.
            let look_ahead = look_ahead && steps.len() == group.len() && !turn.ends();
            let of_step: Vec<&Segment<'_>> = steps.iter().map(|&slot| &segments[slot]).collect();
            let done = executor.step(source, &of_step, look_ahead, logits)?;
            for ((&slot, step), output) in steps.iter().zip(&of_step).zip(done) {
                if !matches!(step.wanted, Wanted::Token(_)) {
                    slots.add_row(slot);
                }
                match output {
                    Ok((token, hidden)) => {
                        token.into_iter().for_each(|t| slots.choose(slot, Ok(t)));
                        scratch.hidden[slot] = hidden.unwrap_or_default();
                    }
                    Err(fault) => slots.fail(slot, fault),
                }
            }
            call::add(steps.len() as u64);
        }
        Ok(())
    }

    /// Verifies the segments of a group, each in few rows.
    fn run_verifications(
        &self,
        executor: &Executor,
        source: Source<'_>,
        segments: &[Segment<'_>],
        group: &[usize],
        scratch: &mut Scratch,
        slots: &mut Slots,
    ) -> Result<()> {
        let longest = group.iter().map(|&slot| segments[slot].tokens.len());
        let Some(longest) = longest.max() else {
            return Ok(());
        };
        for part in group.chunks(fused::most_verified(longest)) {
            let _turn = self.turn()?;
            let of_pass: Vec<&Segment<'_>> = part.iter().map(|&slot| &segments[slot]).collect();
            let verified = executor.verify(source, &of_pass)?;
            for (&slot, mut rows) in part.iter().zip(verified) {
                let segment = &segments[slot];
                for (index, token) in rows.tokens.into_iter().enumerate() {
                    slots.verify(slot, segment, index, token);
                }
                let whole = Part {
                    slot,
                    tokens: 0..segment.tokens.len(),
                };
                let kept = slots.kept(&whole);
                if rows.has_faults && kept > 0 {
                    self.clear_rejected(segment, &whole, kept)?;
                }
                if kept > 0 && !rows.hidden.is_empty() {
                    scratch.hidden[slot] = rows.hidden.swap_remove(kept - 1);
                }
                call::add(segment.tokens.len() as u64);
            }
        }
        Ok(())
    }

    /// Runs segments of a group, of any lengths. Each pass has single tokens first, then prefill chunks.
    fn run_ragged(
        &self,
        executor: &Executor,
        source: Source<'_>,
        segments: &[Segment<'_>],
        group: &[usize],
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
        slots: &mut Slots,
    ) -> Result<()> {
        let mut order = group.to_vec();
        order.sort_by_key(|&i| segments[i].tokens.len() > 1);
        let of_order = order.iter().map(|&slot| Divided::of(slot, &segments[slot]));
        let limits = PassLimits {
            rows: fused::ROWS,
            segments: fused::BATCH,
            // A convolution that goes on where a pass ended needs a few rows before the next state that is kept; blocks of keys and values
            // begin here too.
            border: cuda::PAGE,
        };
        for mut parts in passes(of_order, limits) {
            // The end of a prompt may be a single token.
            parts.sort_by_key(|part| part.tokens.len() > 1);
            let _turn = self.turn_of(executor)?;
            let wanted = rows_wanted(segments, &parts);
            let of_pass: Vec<fused::PromptChunk<'_>> =
                parts.iter().map(|part| chunk(segments, part)).collect();
            let mut pass = executor.run(source, &of_pass)?;
            pass.logits(&rows(&wanted.logits), logits)?;
            let with_logits = wanted.logits.iter();
            with_logits.for_each(|&(_, slot)| slots.add_row(slot));
            let hidden = pass.hidden_rows(&rows(&wanted.hidden))?;
            slots.add_hidden(&wanted.hidden, &hidden, self.spec().hidden_size)?;
            let given = wanted.likelihoods.iter().map(|at| (at.row, at.token));
            let (given_rows, given): (Vec<_>, Vec<_>) = given.unzip();
            let likelihoods = pass.likelihoods(&given_rows, &given)?;
            let choices = choices(segments, &wanted.tokens);
            let chosen = pass.choose(&chosen_rows(&wanted.tokens), &choices)?;
            let faults = pass.faults()?;
            let faulty = assign(segments, &parts, &wanted.tokens, chosen, faults, slots);
            for (at, found) in wanted.likelihoods.iter().zip(likelihoods) {
                slots.add_likelihoods(at.slot, found.map(|found| vec![found]));
            }
            let followed: Vec<fused::FollowedRows<'_>> = parts
                .iter()
                .enumerate()
                .filter_map(|(chunk, part)| {
                    let before = segments[part.slot].drafts_after?.0;
                    Some(fused::FollowedRows {
                        chunk,
                        count: slots.kept(part),
                        before: match part.tokens.start {
                            0 => before,
                            _ => Some(&*scratch.hidden[part.slot]).filter(|row| !row.is_empty()),
                        },
                    })
                })
                .filter(|rows| rows.count > 0)
                .collect();
            if !followed.is_empty() {
                let of_rows: Vec<usize> = followed.iter().map(|f| parts[f.chunk].slot).collect();
                let last = pass.follow(&followed)?;
                for (slot, hidden) in of_rows.into_iter().zip(last) {
                    scratch.hidden[slot] = hidden;
                }
            }
            drop(pass);
            for part in parts.iter().filter(|part| faulty.contains(&part.slot)) {
                let kept = slots.kept(part);
                self.clear_rejected(&segments[part.slot], part, kept)?;
            }
            call::add(of_pass.iter().map(|chunk| chunk.tokens.len() as u64).sum());
        }
        Ok(())
    }

    /// Zeroes the keys and values of rows of a part after the first `kept`, which are not finite: kernels multiply positions past the end of
    /// a sequence by zero.
    fn clear_rejected(&self, segment: &Segment<'_>, part: &Part, kept: usize) -> Result<()> {
        let cache = self.kv().cache(segment.tables.kind())?;
        let positions = segment.first + part.tokens.start + kept..segment.first + part.tokens.end;
        for (group, arena) in cache.arenas().iter().enumerate() {
            for (index, &block) in segment.tables.blocks(group).iter().enumerate() {
                let begin = index * arena.block_positions();
                let of_block = positions.start.max(begin) - begin
                    ..positions
                        .end
                        .min(begin + arena.block_positions())
                        .max(begin)
                        - begin;
                if block != NULL_BLOCK && !of_block.is_empty() {
                    cache.clear(group, block, of_block)?;
                }
            }
        }
        Ok(())
    }
}

/// Whether a decode step can run the segment. The drafter cannot follow a first token there, because no position is before it.
fn is_step(segment: &Segment<'_>) -> bool {
    let is_first = segment.first == 0 && segment.drafts_after.is_some();
    let is_other = matches!(
        segment.wanted,
        Wanted::Nothing
            | Wanted::LastHidden
            | Wanted::AllHidden
            | Wanted::Likelihoods(_)
            | Wanted::Verified(_)
    );
    segment.tokens.len() == 1 && !is_first && !is_other
}

/// The chunk of a ragged pass that is a part of a segment.
fn chunk<'a>(segments: &[Segment<'a>], part: &Part) -> fused::PromptChunk<'a> {
    let segment = &segments[part.slot];
    let (first, end) = (
        segment.first + part.tokens.start,
        segment.first + part.tokens.end,
    );
    fused::PromptChunk {
        tokens: &segment.tokens[part.tokens.clone()],
        tables: segment.tables,
        adapter: segment.adapter,
        context: segment.context,
        first,
        states: segment.tables.state().parts_of_pass(first, end),
    }
}

/// Gives slots their chosen tokens and their faults. Of a verified segment only the first row can fail. Returns the slots of verified
/// segments with rows whose values are not finite.
fn assign(
    segments: &[Segment<'_>],
    parts: &[Part],
    wanted: &[ChosenRow],
    mut chosen: Vec<Result<u32>>,
    faults: Vec<(usize, Error)>,
    slots: &mut Slots,
) -> Vec<usize> {
    let mut faulty = Vec::new();
    for (row, fault) in faults {
        let slot = slot_of(parts, row);
        let at = wanted.iter().position(|at| at.row == row);
        match (segments[slot].wanted, at) {
            // All rows of a verified segment are chosen from.
            (Wanted::Verified(_), Some(at)) => {
                chosen[at] = Err(fault);
                faulty.push(slot);
            }
            _ => slots.fail(slot, fault),
        }
    }
    for (at, token) in wanted.iter().zip(chosen) {
        let segment = &segments[at.slot];
        match segment.wanted {
            Wanted::Verified(_) => slots.verify(at.slot, segment, at.index, token),
            _ => slots.choose(at.slot, token),
        }
    }
    faulty
}
