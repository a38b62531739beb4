//! Decode steps: one new token for each of up to [`BATCH`] sequences. A step is a recorded graph, which ends with the choice of the next
//! token and leaves the device ready for the next step.

use super::executor::Executor;
use super::lowered::{Source, attention_units};
use super::memory::{GraphKey, Memory, Ready, Selection};
use super::pass::{Attention, Pass};
use super::plan;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::cuda::{self, DrawRule, Drawn, Event, Graph, SplitKv};
use crate::model::gpu_cache::GpuCache;
use crate::model::kv_cache::KvCache;
use crate::model::spec::AttentionSpec;
use crate::ops::sample::{self, Choice};

/// Sequences that are stepped together at most.
pub(in crate::model) const BATCH: usize = 256;

/// The sequences of a step.
struct Sequences<'a> {
    caches: Vec<&'a GpuCache>,
    positions: Vec<usize>,
    /// Whether they have room for long contexts.
    long: bool,
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

impl Executor {
    /// One token of each of several sequences; the logits, one row for each, are appended to `logits`.
    pub(in crate::model) fn step_logits(
        &self,
        source: Source<'_>,
        tokens: &[u32],
        caches: &[&KvCache],
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        if let Some(kinds) = self.kinds(caches) {
            let (start, vocab) = (logits.len(), self.lowered.sizes.vocab);
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
        memory.flush()?;
        self.step(source, tokens, &sequences, &[], &mut memory)?;
        memory.read_logits(tokens.len() * self.lowered.sizes.vocab, logits)?;
        memory.check_fits()
    }

    /// One token of each of several sequences; the next tokens, as `choices` says. With `look_ahead`, the step after is enqueued
    /// at once, for the likely case that these sequences continue with those tokens; their pages must reach that far.
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
                // The other kind's step comes next, so a look-ahead step would be wasted.
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
        let foreseen = memory.look_ahead.is_some()
            && memory.ready == sequences.ready_at(&after)
            && memory.rules == following(&rules_of(choices))
            && memory.chose(tokens, &sequences.positions);
        let done = match memory.look_ahead.take() {
            Some(event) if foreseen => event,
            before => {
                if let Some(event) = before {
                    event.wait()?;
                }
                self.step(source, tokens, &sequences, choices, &mut memory)?;
                Event::record(&self.lowered.gpu)?
            }
        };
        let room = sequences
            .caches
            .iter()
            .zip(&after)
            .all(|(cache, &position)| position < cache.allocated());
        let mut enqueued = Ok(());
        if look_ahead && room && after.iter().all(|p| p / cuda::PAGE < memory.pages) {
            let (ready, rules) = (memory.ready.clone(), memory.rules.clone());
            enqueued = self
                .launch(source, ready, rules, sequences.long, &mut memory)
                .and_then(|()| {
                    memory.look_ahead = Some(Event::record(&self.lowered.gpu)?);
                    Ok(())
                });
        }
        done.wait()?;
        enqueued?;
        // Values that overflow f16 end in logits that no token can be selected by.
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
            memory.flush()?;
            memory.check_fits()?;
        }
        let chosen = after.iter().enumerate().map(|(row, &position)| {
            match memory.drawn(row, tokens.len(), position) {
                Some(Drawn::Token(token)) => Ok(token),
                Some(Drawn::AllRuledOut) => Err(sample::all_ruled_out(self.lowered.sizes.vocab)),
                Some(Drawn::Unusable(token)) => Err(sample::unusable(token as usize)),
                None => Err(err!(Internal, "the device chose no token")),
            }
        });
        chosen.collect()
    }

    /// The sequences of a step, which are rotated alike.
    fn sequences<'a>(&self, caches: &[&'a KvCache]) -> Result<Sequences<'a>> {
        Ok(Sequences {
            caches: caches.iter().map(|c| c.gpu()).collect::<Result<_>>()?,
            positions: caches.iter().map(|c| c.len()).collect(),
            long: caches
                .first()
                .is_some_and(|c| self.lowered.is_long(c.capacity())),
        })
    }

    /// The indices of the sequences that are rotated as short ones and of those rotated as long ones, if there are both: a step
    /// takes one table of frequencies for all of its sequences, so each kind takes a step of its own.
    fn kinds(&self, caches: &[&KvCache]) -> Option<[Vec<usize>; 2]> {
        if !self.lowered.tells_long() {
            return None;
        }
        let is_long = |i: &usize| self.lowered.is_long(caches[*i].capacity());
        let (long, short): (Vec<usize>, Vec<usize>) = (0..caches.len()).partition(is_long);
        (!long.is_empty() && !short.is_empty()).then_some([short, long])
    }

    /// Runs one token of each of several sequences, whose pages exist already. The next tokens, as `choices` says, and the
    /// logits stay on the device.
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
        memory.fit(
            &self.lowered.gpu,
            &self.lowered.sizes,
            batch,
            batch,
            batch,
            pages,
        )?;
        let wanted = sequences.ready_at(positions);
        let rules = rules_of(choices);
        // The device is ready if these sequences continue with the tokens that it selected.
        let goes_on = memory.ready == wanted && memory.chose(tokens, positions);
        let draws_on = goes_on && memory.rules == rules;
        memory.invalidate();
        if !goes_on {
            let ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
            let places: Vec<i32> = positions.iter().map(|&p| p as i32).collect();
            memory.tokens.write(0, &ids)?;
            memory.positions.write(0, &places)?;
            memory.write_pages(&sequences.caches)?;
        }
        if !draws_on && !rules.is_empty() {
            let history: Vec<&[u32]> = choices.iter().map(|choice| choice.history).collect();
            let scratch = memory.drawing(&self.lowered.gpu, &self.lowered.sizes)?;
            scratch.set(&self.lowered.gpu, &rules, &history)?;
        }
        self.launch(source, wanted, rules, sequences.long, memory)
    }

    /// Enqueues a step of the sequences that the device is ready for, and records its state afterwards, which is unknown if
    /// that fails.
    fn launch(
        &self,
        source: Source<'_>,
        mut ready: Vec<Ready>,
        rules: Vec<DrawRule>,
        long: bool,
        memory: &mut Memory,
    ) -> Result<()> {
        memory.invalidate();
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
            SplitKv::of(
                &self.lowered.gpu,
                heads,
                kv_heads,
                head_dim,
                unit,
                batch,
                visible,
            )
        };
        let key = GraphKey {
            batch,
            splits: self.lowered.sizes.attentions.iter().map(division).collect(),
            selection: match rules.is_empty() {
                true => Selection::Argmax,
                false => Selection::Drawn {
                    penalties: rules.iter().any(|rule| rule.penalty != 1.0),
                },
            },
            long,
        };
        if let Some(graph) = memory.graphs.get(&key) {
            graph.launch()?;
        } else {
            // The first step of its kind runs as it is enqueued, which also loads its kernels; a recording cannot load any.
            self.enqueue_step(source, &key, memory)?;
            let graph = Graph::record(&self.lowered.gpu, || {
                self.enqueue_step(source, &key, memory)
            })?;
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
        self.lowered.embed(source, batch, memory)?;
        let pass = Pass {
            lowered: &self.lowered,
            source,
            memory,
            rows: batch,
            attention: Attention::Step(&key.splits),
            long: key.long,
        };
        let steps = plan::plan(
            &self.lowered.blocks,
            self.lowered.head,
            batch,
            true,
            &self.lowered.hardware,
        );
        steps.iter().try_for_each(|step| pass.enqueue(step))?;
        match (key.selection, &memory.draw) {
            (Selection::Argmax, _) => cuda::argmax(
                &self.lowered.gpu,
                &memory.logits,
                batch,
                self.lowered.sizes.vocab,
                &memory.best,
                &memory.tokens,
                Some((&memory.positions, &memory.history)),
            ),
            (Selection::Drawn { penalties }, Some(scratch)) => cuda::draw(
                &self.lowered.gpu,
                &memory.logits,
                batch,
                self.lowered.sizes.vocab,
                penalties,
                scratch,
                &memory.tokens,
                &memory.positions,
                &memory.history,
            ),
            (Selection::Drawn { .. }, None) => bail!(Internal, "there are no rules to draw by"),
        }
    }
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
