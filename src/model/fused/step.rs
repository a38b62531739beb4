//! Decode steps: one new token for each of up to [`BATCH`] sequences. A step is a recorded graph, which ends with the choice of the next
//! token and leaves the device ready for the next step.

use super::executor::Executor;
use super::lowered::{Source, attention_units};
use super::memory::{GraphKey, Memory, Ready, Selection};
use super::pass::{Attention, Pass};
use super::plan;
use super::ragged::token_of;
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::{self, DrawRule, Drawn, Event, Graph, SplitKv};
use crate::model::gpu_cache::GpuCache;
use crate::model::kv_cache::KvCache;
use crate::model::spec::AttentionSpec;
use crate::ops::sample::{Choice, SamplingOptions};

/// Maximum number of sequences in a step.
pub(in crate::model) const BATCH: usize = 256;

/// A sequence of a step.
pub(in crate::model) struct DecodeRow<'a> {
    pub(in crate::model) token: u32,
    /// Keys and values before the token. The token's page is already allocated.
    pub(in crate::model) cache: &'a KvCache,
    /// Settings of the next token's choice; `None` requests the logits.
    pub(in crate::model) choice: Option<Choice<'a>>,
}

/// The argmax, which the device computes in any case.
const GREEDY: Choice<'static> = Choice {
    options: &SamplingOptions::GREEDY,
    draw: 0,
    history: &[],
};

/// The sequences of a step.
struct Sequences<'a> {
    caches: Vec<&'a GpuCache>,
    positions: Vec<usize>,
    /// Whether the long RoPE table applies.
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
    /// Runs one token of each of several sequences, at most [`BATCH`], which must use the same RoPE table. Returns the next token of each
    /// sequence that asks for one, and appends the logits of the others to `logits`, one row each. With `look_ahead`, enqueues the
    /// following step at once, for the likely case that these sequences continue with those tokens; their pages must reach that far.
    pub(in crate::model) fn step(
        &self,
        source: Source<'_>,
        steps: &[DecodeRow<'_>],
        look_ahead: bool,
        logits: &mut Vec<f32>,
    ) -> Result<Vec<Result<Option<u32>>>> {
        let tokens: Vec<u32> = steps.iter().map(|step| step.token).collect();
        let choices: Vec<Choice<'_>> = steps
            .iter()
            .map(|step| step.choice.unwrap_or(GREEDY))
            .collect();
        let sequences = self.sequences(steps)?;
        let mut memory = self.memory();
        let after: Vec<usize> = sequences.positions.iter().map(|p| p + 1).collect();
        let foreseen = memory.look_ahead.is_some()
            && memory.ready == sequences.ready_at(&after)
            && memory.rules == following(&rules_of(&choices))
            && memory.chose(&tokens, &sequences.positions);
        let done = match memory.look_ahead.take() {
            Some(event) if foreseen => event,
            before => {
                if let Some(event) = before {
                    event.wait()?;
                }
                self.step_anew(source, &tokens, &sequences, &choices, &mut memory)?;
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
        self.outputs(steps, &after, &mut memory, logits)
    }

    /// The outputs of a step that has advanced the sequences to the positions `after`.
    fn outputs(
        &self,
        steps: &[DecodeRow<'_>],
        after: &[usize],
        memory: &mut Memory,
        logits: &mut Vec<f32>,
    ) -> Result<Vec<Result<Option<u32>>>> {
        let (batch, vocabulary) = (steps.len(), self.lowered.sizes.vocab);
        let chooses = |row: usize| steps[row].choice.is_some();
        let drawn: Vec<_> = (0..batch)
            .map(|row| memory.drawn(row, batch, after[row]))
            .collect();
        let mut outputs: Vec<Result<Option<u32>>> = drawn
            .iter()
            .enumerate()
            .map(|(row, drawn)| match chooses(row) {
                true => token_of(*drawn, vocabulary).map(Some),
                false => Ok(None),
            })
            .collect();
        if (0..batch).any(|row| !chooses(row)) {
            let mut all = Vec::new();
            // A step that only requests logits writes them to their destination directly.
            let into = match (0..batch).any(chooses) {
                true => &mut all,
                false => &mut *logits,
            };
            memory.read_logits(batch * vocabulary, into)?;
            for (row, values) in all.chunks_exact(vocabulary).enumerate() {
                if !chooses(row) {
                    logits.extend_from_slice(values);
                }
            }
        }
        // Values beyond f16 lead to logits from which no token can be chosen.
        let unusable = |row: usize| !matches!(drawn[row], Some(Drawn::Token(_)));
        if (0..batch).any(|row| !chooses(row) || unusable(row)) {
            memory.flush()?;
            for (row, fault) in memory.faults(batch)? {
                outputs[row] = Err(fault);
            }
        }
        Ok(outputs)
    }

    /// Whether a sequence uses the long RoPE table.
    pub(in crate::model) fn is_long(&self, cache: &KvCache) -> bool {
        self.lowered.is_long(cache.capacity())
    }

    fn sequences<'a>(&self, steps: &[DecodeRow<'a>]) -> Result<Sequences<'a>> {
        Ok(Sequences {
            caches: steps.iter().map(|s| s.cache.gpu()).collect::<Result<_>>()?,
            positions: steps.iter().map(|s| s.cache.len()).collect(),
            long: steps.first().is_some_and(|s| self.is_long(s.cache)),
        })
    }

    /// The split-KV of each attention spec, for single tokens of `batch` sequences, the longest of which is at `position`.
    pub(super) fn splits(&self, source: Source<'_>, batch: usize, position: usize) -> Vec<SplitKv> {
        let split = |attention: &AttentionSpec| {
            let AttentionSpec {
                heads,
                kv_heads,
                head_dim,
                window,
                ..
            } = *attention;
            let visible = (position + 1).min(window.unwrap_or(usize::MAX));
            let [unit, ..] = attention_units(source.spec, attention);
            let gpu = &self.lowered.gpu;
            SplitKv::of(gpu, heads, kv_heads, head_dim, unit, batch.max(1), visible)
        };
        self.lowered.sizes.attentions.iter().map(split).collect()
    }

    /// Runs a step without a matching look-ahead. The next tokens, chosen by `choices`, and the logits stay on the device.
    fn step_anew(
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

    /// Enqueues a step of the sequences that the device is ready for, and records its state afterwards. If that fails, the state is
    /// unknown.
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
        let key = GraphKey {
            batch,
            splits: self.splits(source, batch, last),
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
            // The first step of its kind runs directly, which also loads its kernels; graph capture cannot load any.
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
            attention: Attention {
                singles: batch,
                splits: &key.splits,
                chunks: &[],
            },
            long: key.long,
        };
        let steps = plan::plan(
            &self.lowered.blocks,
            self.lowered.head,
            batch,
            true,
            &self.lowered.hardware,
        )?;
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

/// The rules by which tokens are drawn; empty if all are the argmax without penalties.
fn rules_of(choices: &[Choice<'_>]) -> Vec<DrawRule> {
    match choices.iter().all(|choice| choice.options.is_greedy()) {
        true => Vec::new(),
        false => choices.iter().map(Choice::rule).collect(),
    }
}

/// The rules of the draws after those of `rules`.
fn following(rules: &[DrawRule]) -> Vec<DrawRule> {
    let next = |rule: &DrawRule| DrawRule {
        draw: rule.draw + 1,
        ..*rule
    };
    rules.iter().map(next).collect()
}
