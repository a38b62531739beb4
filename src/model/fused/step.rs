//! Decode steps: one new token for each of up to [`BATCH`] sequences. A step is a recorded graph, which ends with the choice of the next
//! token and leaves the device ready for the next step.

use std::sync::atomic::Ordering;

use super::executor::Executor;
use super::graphs::{GraphKey, GraphKind, Selection, bucket};
use super::lowered::{Lowered, Source, attention_units};
use super::memory::Memory;
use super::pass::{Attention, FusedPass, Through};
use super::plan::Rows;
use super::plan::drafter::Followed;
use super::ragged::token_of;
use super::row_adapters::RowAdapters;
use super::state::{AheadStep, Begin, DeviceState, RowState, StepInput};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::{self, DecodePlan, DecodeShape, DrawRule, Drawn, Event, Graph, Pinned};
use crate::model::batch::{Segment, Wanted};
use crate::model::kv::{KvTables, StateBlocks, StateTable};
use crate::model::spec::AttentionSpec;
use crate::ops::sample::{Choice, SamplingOptions};

/// Maximum number of sequences in a step.
pub(in crate::model) const BATCH: usize = 256;

/// The argmax, which the device computes in any case.
pub(in crate::model) const GREEDY: Choice<'static> = Choice {
    options: &SamplingOptions::GREEDY,
    draw: 0,
    history: &[],
    allowed: None,
};

/// The token that a step chose for a sequence, if it asks for one; and the hidden row of its token, if the drafter follows the sequence.
pub(in crate::model) type StepOutput = (Option<u32>, Option<Vec<f32>>);

/// The sequences of a step.
struct Sequences<'a> {
    tokens: Vec<u32>,
    positions: Vec<usize>,
    tables: Vec<&'a KvTables>,
    choices: Vec<Choice<'a>>,
    /// The hidden rows of the positions before, if the drafter follows the sequences.
    before: Vec<Option<&'a [f32]>>,
    /// The adapters of rows, if any has one.
    adapters: Option<RowAdapters>,
    /// Rows that the step runs: those of the sequences, then padding.
    rows: usize,
}

impl Sequences<'_> {
    /// Whether tokens are chosen by masks.
    fn have_masks(&self) -> bool {
        self.choices.iter().any(|choice| choice.allowed.is_some())
    }
}

impl Executor {
    /// Runs one token of each of several sequences, at most [`BATCH`], which must use the same RoPE table. The drafter follows all of them or
    /// none, and no first token. Returns the next token of each sequence that asks for one, and appends the logits of the others to `logits`,
    /// one row each. With `look_ahead`, enqueues the following step at once, for the likely case that these sequences continue with those
    /// tokens, if they have blocks for it and all of them ask for one: logits are read after the step, whose place the next one takes. After
    /// choices by masks, the following step ends with its logits: its masks depend on the tokens, and the host makes them while it runs.
    pub(in crate::model) fn step(
        &self,
        source: Source<'_>,
        steps: &[&Segment<'_>],
        look_ahead: bool,
        logits: &mut Vec<f32>,
    ) -> Result<Vec<Result<StepOutput>>> {
        let rows = rows_of(source, steps.len());
        let sequences = Sequences {
            tokens: steps.iter().map(|step| step.tokens[0]).collect(),
            positions: steps.iter().map(|step| step.first).collect(),
            tables: steps.iter().map(|step| step.tables).collect(),
            choices: steps
                .iter()
                .map(|step| choice_of(step).unwrap_or(GREEDY))
                .collect(),
            before: before_of(steps),
            adapters: RowAdapters::of(steps.iter().map(|step| step.adapter), rows)?,
            rows,
        };
        let each = sequences.tables.iter().zip(&sequences.positions);
        let input = StepInput {
            rows: each
                .map(|(tables, &position)| RowState::new(tables, position))
                .collect(),
            states: each_state(&sequences, |state, position| {
                state.of_pass(position, position + 1)
            }),
            rules: each_rule(&sequences.choices),
            adapters: sequences
                .adapters
                .as_ref()
                .map_or(Vec::new(), |a| a.tables.clone()),
            long: steps.first().is_some_and(|step| self.is_long(step.context)),
            follows: !sequences.before.is_empty(),
        };
        let look_ahead = look_ahead && steps.iter().all(|step| choice_of(step).is_some());
        let chooses = !sequences.have_masks();
        let mut memory = self.memory();
        let done = self.begin(source, &input, &sequences, &mut memory)?;
        let next = input.next(each_state(&sequences, |state, _| state.of_pass_ahead()));
        let groups = memory.tables.len();
        let mut each = next.rows.iter().zip(&sequences.tables);
        let has_states = memory.recurrent.is_none() || next.states.iter().all(Option::is_some);
        let has_blocks = has_states && each.all(|(row, tables)| row.has_blocks(tables, groups));
        let fits = next.last() / cuda::PAGE < memory.pages;
        let mut enqueued = Ok(());
        memory.state = match look_ahead && fits && has_blocks {
            true => {
                let ahead = self
                    .launch(source, &next, &sequences, chooses, &mut memory)
                    .and_then(|()| Event::record(&self.lowered.gpu));
                match ahead {
                    Ok(event) => {
                        let (tables, kv) = (&sequences.tables, source.kv);
                        DeviceState::Ahead(AheadStep::new(next, event, chooses, tables, kv))
                    }
                    Err(e) => {
                        enqueued = Err(e);
                        DeviceState::Unknown
                    }
                }
            }
            false => DeviceState::Ready(next),
        };
        done.wait()?;
        enqueued?;
        let hidden = self.hidden_rows(&sequences, &memory);
        let outputs = self.outputs(steps, sequences.rows, &mut memory, logits)?;
        let each = outputs.into_iter().zip(hidden?);
        Ok(each
            .map(|(token, hidden)| token.map(|token| (token, hidden)))
            .collect())
    }

    /// The hidden rows of the tokens of a step that has run, for sequences that the drafter follows.
    fn hidden_rows(
        &self,
        sequences: &Sequences<'_>,
        memory: &Memory,
    ) -> Result<Vec<Option<Vec<f32>>>> {
        if sequences.before.is_empty() {
            return Ok(vec![None; sequences.tokens.len()]);
        }
        let (scratch, rows) = (memory.drafter()?, sequences.rows);
        let positions = sequences.positions.iter().enumerate();
        positions
            .map(|(row, &position)| scratch.read(row, rows, position).map(Some))
            .collect()
    }

    /// The outputs of a step that ran with `rows` rows.
    fn outputs(
        &self,
        steps: &[&Segment<'_>],
        rows: usize,
        memory: &mut Memory,
        logits: &mut Vec<f32>,
    ) -> Result<Vec<Result<Option<u32>>>> {
        let (batch, vocabulary) = (steps.len(), self.lowered.sizes.vocab);
        let chooses = |row: usize| choice_of(steps[row]).is_some();
        let drawn: Vec<_> = (0..batch)
            .map(|row| memory.drawn(row, rows, steps[row].first + 1))
            .collect();
        let mut outputs: Vec<Result<Option<u32>>> = drawn
            .iter()
            .enumerate()
            .map(|(row, drawn)| match choice_of(steps[row]) {
                Some(choice) => token_of(*drawn, vocabulary, choice.allowed).map(Some),
                None => Ok(None),
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
            for (row, fault) in memory.step_faults(batch)? {
                outputs[row] = Err(fault);
            }
        }
        Ok(outputs)
    }

    /// Whether a sequence that may come to `context` positions uses the long RoPE table.
    pub(in crate::model) fn is_long(&self, context: usize) -> bool {
        self.lowered.is_long(context)
    }

    /// How each attention spec attends, for single tokens of `batch` sequences, the longest of which is at `position`.
    pub(super) fn decodes(
        &self,
        source: Source<'_>,
        batch: usize,
        position: usize,
    ) -> Result<Vec<DecodePlan>> {
        let Lowered {
            hardware, sizes, ..
        } = &*self.lowered;
        let kv = source.kv.kind();
        let plan = |attention: &AttentionSpec| {
            let [unit, ..] = attention_units(source.spec, attention, kv);
            let shape = DecodeShape {
                heads: attention.heads,
                kv_heads: attention.kv_heads,
                dim: attention.head_dim,
                unit,
                kv,
            };
            let visible = (position + 1).min(attention.window.unwrap_or(usize::MAX));
            DecodePlan::choose(hardware, shape, batch, visible)
        };
        sizes.attentions.iter().map(plan).collect()
    }

    /// Enqueues a step, unless it is enqueued already. The event follows it.
    fn begin(
        &self,
        source: Source<'_>,
        input: &StepInput,
        sequences: &Sequences<'_>,
        memory: &mut Memory,
    ) -> Result<Event> {
        let Sequences {
            tokens,
            positions,
            tables,
            choices,
            before,
            adapters,
            rows,
        } = sequences;
        let (rows, pages) = (*rows, input.last() / cuda::PAGE + 1);
        let Lowered { gpu, sizes, .. } = &*self.lowered;
        memory.fit(gpu, sizes, rows, rows, rows, pages)?;
        let continues = memory.drew(tokens, positions, rows);
        let has_masks = sequences.have_masks();
        let begin = memory.begin(input, continues, has_masks)?;
        match begin {
            Begin::Enqueued(event) => return Ok(event),
            Begin::Launch | Begin::WriteRules | Begin::Choose { .. } => {}
            Begin::WriteAll => {
                memory.write_step(tokens, positions, tables, rows)?;
                if let Some(adapters) = adapters {
                    memory.write_adapters(gpu, sizes, adapters)?;
                }
                if input.follows {
                    memory.write_hidden(before, 0..rows)?;
                }
            }
        }
        let writes_rules = matches!(
            begin,
            Begin::WriteRules | Begin::WriteAll | Begin::Choose { rules: true }
        );
        if writes_rules && !input.rules.is_empty() {
            let (mut rules, mut choices) = (input.rules.clone(), choices.clone());
            rules.resize(rows, GREEDY.rule());
            choices.resize(rows, GREEDY);
            memory.write_rules(gpu, sizes, &rules, &choices)?;
        }
        let is_enqueued = matches!(begin, Begin::Choose { .. });
        if !is_enqueued {
            self.launch(source, input, sequences, !has_masks, memory)?;
        }
        if is_enqueued || has_masks {
            memory.mask(gpu, sizes, choices)?;
            self.choose(rows, selection(&input.rules), memory, &memory.history)?;
        }
        Event::record(gpu)
    }

    /// Enqueues a step whose input is in memory but for blocks that were appended. Unless it `chooses` tokens, it ends with its logits.
    fn launch(
        &self,
        source: Source<'_>,
        input: &StepInput,
        sequences: &Sequences<'_>,
        chooses: bool,
        memory: &mut Memory,
    ) -> Result<()> {
        memory.append_blocks(&sequences.tables)?;
        let rows = sequences.rows;
        memory.write_states(&input.states, rows)?;
        let key = GraphKey {
            rows,
            kv: source.kv.kind(),
            decodes: self.decodes(source, rows, input.last())?,
            selection: chooses.then(|| selection(&input.rules)),
            long: input.long,
            adapted: sequences.adapters.as_ref().map(|adapters| adapters.pass),
            kind: GraphKind::Step {
                follows: input.follows,
            },
        };
        self.launch_recorded(source, key, memory)
    }

    /// Enqueues a pass whose input is in memory, and records it if that has not been done.
    pub(super) fn launch_recorded(
        &self,
        source: Source<'_>,
        key: GraphKey,
        memory: &mut Memory,
    ) -> Result<()> {
        if memory.graphs.launch(&key)? {
            return Ok(());
        }
        let enqueue = |memory: &Memory| match key.kind {
            GraphKind::Step { follows } => self.enqueue_step(source, &key, follows, memory),
            GraphKind::Verification { follows } => {
                self.enqueue_verification(source, &key, follows, memory)
            }
            GraphKind::Guess => self.enqueue_guess(source, &key, memory),
        };
        // The first pass of its kind runs directly, which also loads its kernels; graph capture cannot load any.
        enqueue(memory)?;
        let graph = Graph::record(&self.lowered.gpu, || enqueue(memory))?;
        memory.graphs.keep(key, graph);
        self.recorded.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn enqueue_step(
        &self,
        source: Source<'_>,
        key: &GraphKey,
        follows: bool,
        memory: &Memory,
    ) -> Result<()> {
        let pass = FusedPass {
            hands_on: true,
            ..self.pass_of(source, key, memory)
        };
        if follows {
            // The drafter needs the hidden rows of the positions before, which are there.
            pass.follow(Followed::Single)?;
        }
        self.lowered.embed(source, key.rows, memory)?;
        self.enqueue_blocks_of(&pass, Rows::Step)?;
        if follows {
            pass.hidden()?;
        }
        self.select(key, memory, &memory.history)
    }

    /// The recorded pass of a key through the model.
    pub(super) fn pass_of<'a>(
        &'a self,
        source: Source<'a>,
        key: &'a GraphKey,
        memory: &'a Memory,
    ) -> FusedPass<'a> {
        FusedPass {
            lowered: &self.lowered,
            source,
            memory,
            through: Through::Model,
            rows: key.rows,
            segments: key.rows,
            attention: Attention {
                decodes: &key.decodes,
                chunks: &[],
            },
            adapted: key.adapted,
            long: key.long,
            hands_on: false,
            copies: true,
        }
    }

    /// Enqueues the model's blocks and the logits of all rows.
    pub(super) fn enqueue_blocks_of(&self, pass: &FusedPass<'_>, rows: Rows) -> Result<()> {
        let steps = pass.plan(rows)?;
        steps.iter().try_for_each(|step| pass.enqueue(step))
    }

    /// Enqueues the end of a recorded pass: the choice of a token for each row, if its key has one.
    pub(super) fn select(&self, key: &GraphKey, memory: &Memory, chosen: &Pinned) -> Result<()> {
        match key.selection {
            Some(selection) => self.choose(key.rows, selection, memory, chosen),
            None => Ok(()),
        }
    }

    /// Enqueues the choice of a token for each row, from logits in memory. Tokens go to `chosen` by position, and to the next pass.
    fn choose(
        &self,
        batch: usize,
        selection: Selection,
        memory: &Memory,
        chosen: &Pinned,
    ) -> Result<()> {
        match (selection, &memory.draw) {
            (Selection::Argmax, _) => cuda::argmax(
                &self.lowered.gpu,
                &memory.logits,
                batch,
                self.lowered.sizes.vocab,
                &memory.best,
                &memory.tokens,
                Some((&memory.positions, chosen)),
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
                chosen,
            ),
            (Selection::Drawn { .. }, None) => bail!(Internal, "there are no rules to draw by"),
        }
    }
}

/// Settings of the next token's choice; `None` if the logits are requested.
fn choice_of<'a>(segment: &Segment<'a>) -> Option<Choice<'a>> {
    match segment.wanted {
        Wanted::Token(choice) => Some(choice),
        Wanted::Nothing
        | Wanted::Last
        | Wanted::All
        | Wanted::LastHidden
        | Wanted::AllHidden
        | Wanted::Likelihoods(_)
        | Wanted::Verified(_) => None,
    }
}

/// The hidden rows before the tokens of a step; empty if the drafter does not follow its sequences.
pub(super) fn before_of<'a>(segments: &[&Segment<'a>]) -> Vec<Option<&'a [f32]>> {
    let each = segments.iter().filter_map(|segment| segment.drafts_after);
    each.map(|before| before.0).collect()
}

/// The blocks of each sequence's recurrent state, by `blocks`, which takes the position of the step too.
fn each_state(
    sequences: &Sequences<'_>,
    blocks: impl Fn(&StateTable, usize) -> Option<StateBlocks>,
) -> Vec<Option<StateBlocks>> {
    let each = sequences.tables.iter().zip(&sequences.positions);
    each.map(|(tables, &position)| blocks(tables.state(), position))
        .collect()
}

/// Rows of a step of some sequences: those of a recorded step, if padding has a block to write to.
pub(super) fn rows_of(source: Source<'_>, sequences: usize) -> usize {
    let rows = bucket(sequences);
    let pads = rows > sequences && source.kv.has_null_block();
    if pads { rows } else { sequences }
}

/// The rules by which tokens are drawn; empty if all are the argmax without penalties.
pub(super) fn each_rule(choices: &[Choice<'_>]) -> Vec<DrawRule> {
    match choices.iter().all(|choice| choice.options.is_greedy()) {
        true => Vec::new(),
        false => choices.iter().map(Choice::rule).collect(),
    }
}

/// How tokens are chosen by these rules.
pub(super) fn selection(rules: &[DrawRule]) -> Selection {
    match rules.is_empty() {
        true => Selection::Argmax,
        false => Selection::Drawn {
            penalties: rules.iter().any(|rule| rule.penalty != 1.0),
        },
    }
}
