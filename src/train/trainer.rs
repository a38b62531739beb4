//! The trainer: steps the parameters of a model by micro-batches.

use std::sync::{Arc, Mutex, Weak};

use serde::{Deserialize, Serialize};

use super::distillation::{Comparison, Distillation};
use super::group::Group;
use super::offload::Offload;
use super::parameters::{Parameters, StepPlan, StepReport};
use super::recipe::{Clip, Recipe};
use super::scales::{self, Chosen, ScaleChoice};
use super::schedule::Schedule;
use crate::base::error::{bail, err};
use crate::base::lease::{Change, Lease};
use crate::base::lock::lock;
use crate::base::{Error, Result, call};
use crate::engine::Served;
use crate::format::random::bits;
use crate::model::Spec;
use crate::model::training::{
    Batch, HiddenTargets, Options, Pass, Recompute, Source, Teacher, check_device,
};
use crate::ops::training::divergence::Mixture;
use crate::ops::training::optimizer::Hyperparameters;
use crate::ops::{Array, Device, Mixed, Slice};

/// Settings of a trainer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Forms of parameters, and treatment of gradients.
    pub recipe: Recipe,
    /// The optimizer's settings, with the highest rate.
    pub optimizer: Hyperparameters,
    /// The learning rate schedule.
    pub schedule: Schedule,
    /// Parameter groups with their own optimizer settings. If several groups name a parameter, the first counts.
    pub groups: Vec<Group>,
    /// Total number of steps, which the schedule spans.
    pub steps: u64,
    /// Activations of the blocks that the backward pass recomputes, and the forward pass does not keep.
    pub recompute: Recompute,
    /// Tokens whose logits are computed at a time.
    pub head_chunk: usize,
    /// Training state to offload to host memory. A run that began with offloading continues without it on a device that has nothing to
    /// offload to, with the same bits.
    pub offload: Offload,
    /// Upper limit of skipped steps in a row, in which a loss or gradient was not finite.
    pub patience: u64,
    /// Distillation from a teacher, which [`Trainer::set_teacher`] sets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distillation: Option<Distillation>,
}

impl Default for Config {
    fn default() -> Self {
        let options = Options::default();
        Config {
            recipe: Recipe::default(),
            optimizer: Hyperparameters::default(),
            schedule: Schedule::default(),
            groups: Vec::new(),
            steps: 1000,
            recompute: options.recompute,
            head_chunk: options.head_chunk,
            offload: Offload::default(),
            patience: 10,
            distillation: None,
        }
    }
}

impl Config {
    /// Memory options of passes.
    pub(super) fn pass_options(&self) -> Options {
        Options {
            recompute: self.recompute,
            head_chunk: self.head_chunk,
            offload: self.offload.activations,
        }
    }

    /// Number of steps after which block scales are chosen again: when passes begin to use the delivered weights, but not before weights
    /// have moved, nor after the last step.
    pub(super) fn chooses_scales_after(&self, source: &Source) -> Option<u64> {
        let recipe = &self.recipe;
        let is_chosen = recipe.scale_search && recipe.lora.is_none() && !source.is_fresh();
        let whole = self.steps as f64 * (1.0 - recipe.delivered_share(source));
        let after = (whole.ceil() as u64).clamp(1, self.steps.max(2) - 1);
        (is_chosen && recipe.weights.is_packed() && self.steps > 1).then_some(after)
    }

    /// Refuses invalid settings.
    pub fn check(&self) -> Result<()> {
        if self.steps == 0 {
            bail!(InvalidArgument, "training of 0 steps");
        }
        self.optimizer.check()?;
        self.schedule.check()?;
        self.distillation
            .as_ref()
            .map_or(Ok(()), Distillation::check)?;
        self.groups
            .iter()
            .try_for_each(|group| group.check(self.optimizer.rate))?;
        self.recipe.check()
    }
}

/// A micro-batch: documents in a row, with their labels.
#[derive(Clone, Copy, Debug)]
pub struct MicroBatch<'a> {
    /// Tokens of all documents.
    pub tokens: &'a [u32],
    /// Length of each document.
    pub documents: &'a [usize],
    /// The token that each row should predict; negative for none.
    pub labels: &'a [i32],
    /// Weight of each row's loss, finite and at least 0; `None` for all 1. A label of weight 0 does not count.
    pub weights: Option<&'a [f32]>,
}

impl MicroBatch<'_> {
    /// Weight of a row's loss; 0 without a label.
    fn weight(&self, row: usize) -> f64 {
        match (self.labels[row] >= 0, self.weights) {
            (false, _) => 0.0,
            (true, None) => 1.0,
            (true, Some(weights)) => weights.get(row).copied().unwrap_or_default().into(),
        }
    }

    /// Number of rows with a label.
    pub fn targets(&self) -> usize {
        let rows = 0..self.labels.len();
        rows.filter(|&row| self.weight(row) != 0.0).count()
    }

    /// Sum of the weights of all rows; their number if all weights are 1.
    pub fn total_weight(&self) -> f64 {
        (0..self.labels.len()).map(|row| self.weight(row)).sum()
    }

    /// Refuses invalid weights.
    fn check_weights(&self) -> Result<()> {
        let Some(weights) = self.weights else {
            return Ok(());
        };
        if weights.len() != self.labels.len() {
            bail!(
                InvalidArgument,
                "{} labels and {} weights of a batch; there must be as many, or no weights",
                self.labels.len(),
                weights.len()
            );
        }
        let is_none = |weight: &f32| !(weight.is_finite() && *weight >= 0.0);
        if let Some(row) = weights.iter().position(is_none) {
            bail!(
                InvalidArgument,
                "weight {row} of a batch is {}; it must be finite and at least 0",
                weights[row]
            );
        }
        Ok(())
    }
}

/// Documents in a row, with target values for their last hidden states.
#[derive(Clone, Copy, Debug)]
pub struct HiddenBatch<'a> {
    /// Tokens of all documents.
    pub tokens: &'a [u32],
    /// Length of each document.
    pub documents: &'a [usize],
    /// `[tokens, hidden size]`, row-major: target output of the last norm.
    pub targets: &'a [f32],
}

/// A batch on the device, with its target.
struct Prepared {
    batch: Batch,
    towards: Towards,
}

/// The target of a batch.
enum Towards {
    /// Its labels.
    Labels,
    /// A teacher's predictions for the same tokens.
    Teacher(Box<Batch>),
    /// Hidden states.
    Hidden(Array<Mixed>),
}

/// Outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Parameters were updated.
    Updated,
    /// A loss or a gradient was not finite, and nothing was changed.
    Skipped,
}

/// Report of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Step {
    /// Its number, from 1.
    pub number: u64,
    /// Its outcome.
    pub outcome: Outcome,
    /// Mean cross-entropy of its targets by their weights, in nats; with a teacher, the mean loss against it; for hidden states, the mean
    /// absolute difference.
    pub loss: f64,
    /// Number of targets: labels that count, or rows of hidden states.
    pub targets: usize,
    /// The learning rate.
    pub rate: f64,
    /// Norm of all gradients before clipping.
    pub gradient_norm: f64,
    /// Share of trained weights whose stored code changed.
    pub changed: f64,
    /// Share of trained weights whose delivered code changed.
    pub changed_delivered: f64,
    /// The choice of block scales before the step, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scales: Option<ScaleChoice>,
}

/// Phases of a step, for observers of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The step has its tokens.
    BatchReady,
    /// Gradient sums are zero.
    ZeroGradDone,
    /// All gradients have arrived. Released ones have changed parameters by then.
    BackwardDone,
    /// Parameters are updated.
    OptimizerStepDone,
}

/// The random stream of gradient rounding, separate from the optimizer's.
const GRADIENTS: u64 = 0x6772_6164;

/// Trains the parameters of a model.
#[derive(Debug)]
pub struct Trainer {
    device: Device,
    spec: Spec,
    config: Config,
    parameters: Parameters,
    /// Share of the steps, at the end, whose passes use the delivered weights.
    delivered_share: f64,
    /// Number of steps after which block scales are chosen again, if they are.
    chooses_scales_after: Option<u64>,
    pass: Pass,
    teacher: Option<Teacher>,
    progress: Progress,
    /// Excludes steps while callers run the model on these weights, and vice versa.
    lease: Arc<Lease>,
    /// The model on these weights, if it lives.
    given: Mutex<Weak<Served>>,
}

/// Progress of a trainer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Progress {
    /// Steps taken, skipped ones included.
    pub(super) steps: u64,
    /// Steps that updated parameters.
    pub(super) updates: u64,
    /// Skipped steps in a row, up to now.
    pub(super) failures: u64,
    /// All skipped steps.
    pub(super) skipped: u64,
    /// Norm of the last step's gradients.
    pub(super) gradient_norm: f64,
}

impl Trainer {
    /// Begins training of a checkpoint's model.
    pub fn new(device: &Device, source: &Source, config: &Config) -> Result<Trainer> {
        config.check()?;
        config.check_for(source)?;
        check_device(device, source.spec())?;
        config.offload.check(device)?;
        let parameters = Parameters::new(device, source, &config.recipe, config.offload)?;
        Self::with(device, source, config, parameters)
    }

    /// A trainer with parameters that are yet to be restored.
    pub(super) fn empty(device: &Device, source: &Source, config: &Config) -> Result<Trainer> {
        config.check()?;
        check_device(device, source.spec())?;
        config.offload.check(device)?;
        let parameters = Parameters::zeroed(device, source, &config.recipe, config.offload)?;
        Self::with(device, source, config, parameters)
    }

    fn with(
        device: &Device,
        source: &Source,
        config: &Config,
        mut parameters: Parameters,
    ) -> Result<Trainer> {
        parameters.set_groups(&config.groups)?;
        let options = config.pass_options();
        let mut pass = Pass::new(device, source.spec(), parameters.layout(), options)?;
        pass.set_precision(config.recipe.precision(parameters.layout()));
        Ok(Trainer {
            device: device.clone(),
            spec: source.spec().clone(),
            config: config.clone(),
            delivered_share: config.recipe.delivered_share(source),
            chooses_scales_after: config.chooses_scales_after(source),
            parameters,
            pass,
            teacher: None,
            progress: Progress::default(),
            lease: Lease::new(),
            given: Mutex::default(),
        })
    }

    /// The device that it trains on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(super) fn parameters_mut(&mut self) -> &mut Parameters {
        &mut self.parameters
    }

    pub(super) fn progress(&self) -> &Progress {
        &self.progress
    }

    pub(super) fn progress_mut(&mut self) -> &mut Progress {
        &mut self.progress
    }

    /// The spec of the model.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The parameters.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// The teacher, once it is set.
    pub fn teacher(&self) -> Option<&Teacher> {
        self.teacher.as_ref()
    }

    pub(super) fn put_teacher(&mut self, teacher: Teacher, fingerprint: String) {
        self.teacher = Some(teacher);
        if let Some(settings) = &mut self.config.distillation {
            settings.teacher = Some(fingerprint);
        }
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.progress.steps
    }

    /// Skipped steps.
    pub fn skipped(&self) -> u64 {
        self.progress.skipped
    }

    /// Whether too many steps in a row were skipped, so that the last one was an error.
    pub(super) fn gave_up(&self) -> bool {
        self.progress.failures >= self.config.patience.max(1)
    }

    /// Whether passes currently use the delivered weights.
    pub fn trains_delivered(&self) -> bool {
        let first = self.config.steps as f64 * (1.0 - self.delivered_share);
        self.progress.steps as f64 >= first
    }

    /// The model under training, to be run by the delivered weights in the trainer's own memory: no matrix has a second copy. `source` is
    /// the model that training began with. While the model lives, this is the same one each time, and it follows each step.
    ///
    /// Steps and passes of the model may run on different threads: a step waits for the pass that runs, passes wait for the step, and who has
    /// waited longer goes first; a prompt of several passes is thrown back by one step, and the next one waits for its end. A callback within
    /// a pass that takes a step gets [`Busy`], and so does a callback within a step that runs the model.
    ///
    /// After a step that has changed weights, sequences run their tokens again when they next run, so that they go on as new ones with the same
    /// tokens would. Without its trainer the model keeps the last weights.
    ///
    /// [`Busy`]: crate::base::ErrorKind::Busy
    pub fn model(&self, source: &Source) -> Result<Arc<Served>> {
        let mut given = lock(&self.given);
        if let Some(model) = given.upgrade() {
            if !model.is_renewed() {
                let change = self.lease.change(call::is_over)?;
                model.renew(self.parameters.layout(), &self.parameters, &change)?;
            }
            return Ok(model);
        }
        let model = Served::of_trained(&self.device, source, &self.parameters, &self.lease)?;
        *given = Arc::downgrade(&model);
        Ok(model)
    }

    /// Lets the model on these weights follow a change of them. A model that cannot is refused until it is asked for again.
    fn renew_model(&self, change: &Change) {
        let given = lock(&self.given).upgrade();
        let Some(model) = given.filter(|_| change.has_changed()) else {
            return;
        };
        let renew = || model.renew(self.parameters.layout(), &self.parameters, change);
        // The step is over: its call can no longer be cancelled.
        if let Err(e) = call::outside(renew) {
            tracing::warn!(
                "the model on the weights that are trained could not follow a step: {e}"
            );
        }
    }

    /// Takes one step by the gradients of all micro-batches together, each target counted by its weight. If a loss or a gradient is not
    /// finite, no parameter changes, and the step counts as skipped; too many skipped steps in a row are an error. The thread's [`call`]
    /// can cancel it while it waits for passes of [`Trainer::model`], between micro-batches, and between blocks of their forward passes; it
    /// has then changed nothing.
    pub fn step(&mut self, batches: &[MicroBatch<'_>]) -> Result<Step> {
        self.step_watched(batches, &mut |_| {})
    }

    /// As [`Trainer::step`], and calls `watch` at the end of each phase.
    pub fn step_watched(
        &mut self,
        batches: &[MicroBatch<'_>],
        watch: &mut dyn FnMut(Phase),
    ) -> Result<Step> {
        batches.iter().try_for_each(MicroBatch::check_weights)?;
        let targets: usize = batches.iter().map(MicroBatch::targets).sum();
        let total: f64 = batches.iter().map(MicroBatch::total_weight).sum();
        if targets == 0 {
            bail!(
                InvalidArgument,
                "none of {} rows has a label that counts: there is nothing to learn from them",
                batches.iter().map(|b| b.tokens.len()).sum::<usize>()
            );
        }
        // Invalid batches are found before any is used.
        let batches = batches.iter().map(|batch| {
            Ok(Prepared {
                batch: self.batch(batch, total)?,
                towards: match &self.config.distillation {
                    None => Towards::Labels,
                    Some(_) => Towards::Teacher(Box::new(self.for_teacher(batch)?)),
                },
            })
        });
        let batches = batches.collect::<Result<Vec<_>>>()?;
        self.step_on(&batches, targets, watch)
    }

    /// Takes one step towards given hidden states instead of tokens. The loss is the mean absolute difference from the output of the last
    /// norm, over all micro-batches. For debugging: everything but the head takes part, which gets no gradient; an untied head stays as it
    /// is. Otherwise as [`Trainer::step`].
    pub fn step_hidden(&mut self, batches: &[HiddenBatch<'_>]) -> Result<Step> {
        let rows: usize = batches.iter().map(|b| b.tokens.len()).sum();
        let mut prepared = Vec::new();
        for given in batches {
            let (rows, hidden) = (given.tokens.len(), self.spec.hidden_size);
            if given.targets.len() != rows * hidden {
                bail!(
                    InvalidArgument,
                    "{} targets of the hidden states of {rows} tokens; there must be {hidden} of each",
                    given.targets.len()
                );
            }
            let batch = self.batch(
                &MicroBatch {
                    tokens: given.tokens,
                    documents: given.documents,
                    labels: &vec![-1; rows],
                    weights: None,
                },
                1.0,
            )?;
            let mut targets = Array::scratch(&self.device, rows * hidden)?;
            targets.all_mut().copy_from(Slice::Host(given.targets))?;
            prepared.push(Prepared {
                batch,
                towards: Towards::Hidden(targets),
            });
        }
        if prepared.is_empty() {
            bail!(InvalidArgument, "a step without a batch");
        }
        self.step_on(&prepared, rows, &mut |_| {})
    }

    fn step_on(
        &mut self,
        batches: &[Prepared],
        targets: usize,
        watch: &mut dyn FnMut(Phase),
    ) -> Result<Step> {
        if self.config.recipe.release && batches.len() > 1 {
            bail!(
                InvalidArgument,
                "{} micro-batches in a step whose gradients are released as they come; keep gradients to accumulate, or give one batch",
                batches.len()
            );
        }
        let rate = self.config.optimizer.rate
            * self
                .config
                .schedule
                .share(self.progress.steps, self.config.steps);
        let previous = self.progress.gradient_norm;
        let plan = StepPlan {
            settings: Hyperparameters {
                rate,
                ..self.config.optimizer
            },
            number: self.progress.updates + 1,
            factor: match self.config.recipe.clip {
                Clip::Previous(most) if previous > most => (most / previous) as f32,
                _ => 1.0,
            },
        };
        let change = self.lease.change(call::is_over)?;
        let taken = self.change_by_step(&change, batches, targets, plan, watch);
        self.renew_model(&change);
        drop(change);
        let (loss, report, scales) = taken?;
        watch(Phase::OptimizerStepDone);
        if report.skipped && report.partial {
            bail!(
                Internal,
                "a gradient of step {} was not finite after released gradients had changed parameters; go on from the last checkpoint, \
                 with a lower learning rate or with kept gradients",
                self.progress.steps + 1
            );
        }
        self.progress.steps += 1;
        if report.skipped {
            self.progress.skipped += 1;
            self.progress.failures += 1;
            if self.progress.failures >= self.config.patience {
                bail!(
                    InvalidArgument,
                    "the loss or a gradient of {} steps in a row was not finite, the last a loss of {loss}; nothing was changed by them: lower \
                     the learning rate of {rate}, or look at the data",
                    self.progress.failures
                );
            }
        } else {
            self.progress.updates += 1;
            self.progress.failures = 0;
            // The norm before the gradients were clipped.
            self.progress.gradient_norm = report.gradient_norm / f64::from(plan.factor);
        }
        let share = |changed: u64| changed as f64 / self.parameters.trained().max(1) as f64;
        Ok(Step {
            number: self.progress.steps,
            outcome: if report.skipped {
                Outcome::Skipped
            } else {
                Outcome::Updated
            },
            loss,
            targets,
            rate,
            gradient_norm: report.gradient_norm / f64::from(plan.factor),
            changed: share(report.changes.0),
            changed_delivered: share(report.changes.1),
            scales: scales.choice,
        })
    }

    /// Computes gradients and updates parameters by them, and records in `change` whether any may have changed.
    fn change_by_step(
        &mut self,
        change: &Change,
        batches: &[Prepared],
        targets: usize,
        plan: StepPlan,
        watch: &mut dyn FnMut(Phase),
    ) -> Result<(f64, StepReport, Chosen)> {
        let mut scales = self.look_at_inputs(batches)?;
        self.parameters.multiply_with_all(!self.trains_delivered());
        watch(Phase::BatchReady);
        self.parameters.begin_step(plan)?;
        watch(Phase::ZeroGradDone);
        let gradients = self.gradients(batches, targets);
        watch(Phase::BackwardDone);
        match gradients {
            Ok(loss) if loss.is_finite() => {
                change.changed();
                let report = self.parameters.finish_step()?;
                Ok((loss, report, scales))
            }
            Ok(loss) => {
                self.parameters.abandon_step();
                if scales.is_kept() {
                    change.changed();
                }
                let skipped = StepReport {
                    skipped: true,
                    ..StepReport::default()
                };
                Ok((loss, skipped, scales))
            }
            Err(e) => {
                if self.parameters.abandon_step() {
                    change.changed();
                    return Err(e.within(
                        "after released gradients had changed parameters, so that training must go on from the last checkpoint",
                    ));
                }
                scales.undo(&mut self.parameters)?;
                Err(e)
            }
        }
    }

    /// Prepares a step on `batches`: chooses block scales again if it is time to, or records the inputs of matrices with adapters if that
    /// has not been done.
    fn look_at_inputs(&mut self, batches: &[Prepared]) -> Result<Chosen> {
        let has_labels = |of: &Prepared| !matches!(of.towards, Towards::Hidden(_));
        let chooses = self.chooses_scales_after == Some(self.progress.steps);
        let observes = self.config.recipe.observes_adapted() && self.parameters.inputs().is_empty();
        if !(chooses || observes) || !batches.iter().all(has_labels) {
            return Ok(Chosen::default());
        }
        let (pass, teacher) = (&mut self.pass, &mut self.teacher);
        let mixture = self.config.distillation.as_ref();
        let mixture = mixture.map(Distillation::mixture).unwrap_or_default();
        let mut loss = |parameters: &mut Parameters| {
            let mut loss = 0.0;
            for Prepared { batch, towards } in batches {
                loss += match towards {
                    Towards::Teacher(same) => {
                        let lesson = taught(teacher)?.lesson(same, mixture);
                        pass.lesson_totals(parameters, batch, lesson)?.loss
                    }
                    Towards::Labels | Towards::Hidden(_) => pass.loss(parameters, batch)?,
                };
            }
            Ok(loss)
        };
        if chooses {
            return scales::choose(&mut self.parameters, &mut loss);
        }
        let (_, inputs) = scales::observe(&mut self.parameters, &mut loss)?;
        self.parameters.set_inputs(inputs);
        Ok(Chosen::default())
    }

    /// Computes the mean loss of all targets, and passes its gradients to the parameters.
    fn gradients(&mut self, batches: &[Prepared], targets: usize) -> Result<f64> {
        let first = self.config.recipe.first_block(self.spec.blocks.len());
        let tokens = |batches: &[Prepared]| batches.iter().map(|b| b.batch.rows() as u64).sum();
        let weight = (1.0 / (targets * self.spec.hidden_size) as f64) as f32;
        call::expect(tokens(batches));
        let mut loss = 0.0;
        for (i, batch) in batches.iter().enumerate() {
            let (parameters, pass) = (&mut self.parameters, &mut self.pass);
            let step = bits(self.config.recipe.seed ^ GRADIENTS, self.progress.steps);
            pass.set_key(bits(step, i as u64));
            loss += match &batch.towards {
                Towards::Labels => pass.gradients(parameters, &batch.batch, first)?,
                Towards::Teacher(same) => {
                    let mixture = self.config.distillation.as_ref();
                    let mixture = mixture.map(Distillation::mixture).unwrap_or_default();
                    let lesson = taught(&mut self.teacher)?.lesson(same, mixture);
                    let totals = pass.lesson_gradients(parameters, &batch.batch, lesson, first)?;
                    totals.loss
                }
                Towards::Hidden(values) => {
                    let values = values.all();
                    let targets = HiddenTargets { values, weight };
                    pass.hidden_gradients(parameters, &batch.batch, targets, first)?
                }
            };
            call::tell(call::Progress {
                done: tokens(&batches[..=i]),
                total: tokens(batches),
            });
        }
        // Kept gradients have not updated anything.
        if !self.config.recipe.release {
            call::check()?;
        }
        Ok(loss)
    }

    /// The tokens of a batch, for the teacher.
    fn for_teacher(&self, batch: &MicroBatch<'_>) -> Result<Batch> {
        match &self.teacher {
            Some(teacher) => teacher.batch(batch.tokens, batch.documents),
            None => Err(no_teacher()),
        }
    }

    /// A batch with weights divided by `total`.
    fn batch(&self, batch: &MicroBatch<'_>, total: f64) -> Result<Batch> {
        let rows = 0..batch.labels.len();
        let weights: Vec<f32> = rows
            .clone()
            .map(|row| (batch.weight(row) / total) as f32)
            .collect();
        let counts = |row: usize| batch.weight(row) != 0.0;
        let labels: Vec<i32> = rows
            .map(|row| if counts(row) { batch.labels[row] } else { -1 })
            .collect();
        Batch::new(
            &self.device,
            &self.spec,
            batch.tokens,
            batch.documents,
            &labels,
            &weights,
        )
    }

    /// The most likely token after `tokens`, by the delivered or by the stored weights. Takes a pass over all of them.
    pub fn next_token(&mut self, tokens: &[u32], delivered: bool) -> Result<u32> {
        let batch = MicroBatch {
            tokens,
            documents: &[tokens.len()],
            labels: &vec![-1; tokens.len()],
            weights: None,
        };
        let batch = self.batch(&batch, 1.0)?;
        self.parameters.multiply_with_all(!delivered);
        self.pass.next_token(&mut self.parameters, &batch)
    }

    /// Mean cross-entropy of the targets of batches by their weights, in nats, for the delivered or the stored weights. Cancelled with the
    /// thread's [`call`].
    pub fn evaluate(&mut self, batches: &[MicroBatch<'_>], delivered: bool) -> Result<f64> {
        batches.iter().try_for_each(MicroBatch::check_weights)?;
        let total: f64 = batches.iter().map(MicroBatch::total_weight).sum();
        if total == 0.0 {
            bail!(InvalidArgument, "an evaluation without a label that counts");
        }
        self.parameters.multiply_with_all(!delivered);
        let mut loss = 0.0;
        for batch in batches {
            let batch = self.batch(batch, 1.0)?;
            loss += self.pass.loss(&mut self.parameters, &batch)?;
        }
        Ok(loss / total)
    }

    /// Mean cross-entropy of the targets of batches, and mean divergence from the teacher's predictions at them, KL(teacher || model) at
    /// temperature 1. Both are in nats and by the targets' weights, for the delivered or the stored weights.
    pub fn compare(&mut self, batches: &[MicroBatch<'_>], delivered: bool) -> Result<Comparison> {
        batches.iter().try_for_each(MicroBatch::check_weights)?;
        let total: f64 = batches.iter().map(MicroBatch::total_weight).sum();
        if total == 0.0 {
            bail!(InvalidArgument, "an evaluation without a label that counts");
        }
        self.parameters.multiply_with_all(!delivered);
        let mut sum = Comparison::default();
        for batch in batches {
            let (own, same) = (self.batch(batch, 1.0)?, self.for_teacher(batch)?);
            let lesson = taught(&mut self.teacher)?.lesson(&same, Mixture::default());
            let totals = self
                .pass
                .lesson_totals(&mut self.parameters, &own, lesson)?;
            sum.loss += totals.cross_entropy;
            sum.divergence += totals.divergence;
        }
        Ok(Comparison {
            loss: sum.loss / total,
            divergence: sum.divergence / total,
        })
    }
}

fn no_teacher() -> Error {
    err!(
        InvalidArgument,
        "the trainer's settings have a distillation, and no teacher was given"
    )
}

fn taught(teacher: &mut Option<Teacher>) -> Result<&mut Teacher> {
    teacher.as_mut().ok_or_else(no_teacher)
}
