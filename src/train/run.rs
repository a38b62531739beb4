//! A complete training run: steps over windows with evaluations, samples, checkpoints and reports in between. An observer hears of them,
//! and can stop the run after any step.

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use serde_json::Value;

use super::checkpoint;
use super::data::{Order, Window};
use super::judge::{Judge, Uniform};
use super::memory::MemoryReport;
use super::position::{Known, Position};
use super::rate::FirstUpdates;
use super::reports::Reports;
use super::row::{Losses, Row};
use super::sample::Samples;
use super::trainer::{MicroBatch, Outcome, Trainer};
use crate::base::call::{Cancel, Progress, Watch};
use crate::base::error::{bail, err};
use crate::base::memory as account;
use crate::base::{ErrorKind, Result};
use crate::model::training::SourceText;

pub use super::evaluation::{EvaluationSet, losses_of_file};
pub use super::event::{Ended, Ending, Event, Observer};
pub use super::judge::Best;
pub use super::lock::{LOCK, RunLock};
pub use super::position::Inputs;

/// Subdirectory of a run that holds its checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";

/// Options of a run.
pub struct Options<'a> {
    /// Directory of checkpoints and reports.
    pub directory: PathBuf,
    /// The lock on that directory.
    pub lock: &'a RunLock,
    /// Windows that go through the model together.
    pub batch: usize,
    /// Batches per step.
    pub accumulate: usize,
    /// Interval of checkpoints in steps; 0 for only one at the end.
    pub save_every: u64,
    /// Number of checkpoints to keep.
    pub keep: usize,
    /// Interval of evaluations and samples in steps. They also come before the first and after the last step; only then if 0.
    pub evaluate_every: u64,
    /// Also keeps the checkpoint of the best evaluation.
    pub keep_best: bool,
    /// Ends the run after this many evaluations in a row without a new best.
    pub patience: Option<u64>,
    /// The prompts to sample, and the tokenizer for them.
    pub samples: Option<(Samples, &'a SourceText)>,
    /// Also writes TensorBoard event files.
    pub tensorboard: bool,
    /// Ends the run after the current step, once set.
    pub stop: Cancel,
    /// Ends the run after the current step once this file exists, and removes it.
    pub stop_file: Option<PathBuf>,
}

/// Refuses a step of `accumulate` batches of `batch` windows that exceeds the number of windows: it would see some of them twice.
pub fn check_windows(windows: usize, (batch, accumulate): (usize, usize)) -> Result<()> {
    if batch.saturating_mul(accumulate) <= windows {
        return Ok(());
    }
    bail!(
        InvalidArgument,
        "a step of {accumulate} x {batch} windows (--accumulate, --batch), and the data makes {windows}: a step sees no window twice, so take \
         at most {windows} in a step, or shorter windows (--window)"
    )
}

/// A run under way.
struct Run<'a, 'b> {
    trainer: &'a mut Trainer,
    inputs: &'a Inputs,
    options: &'a Options<'b>,
    observer: RefCell<&'a mut dyn Observer>,
    known: Known,
    order: Order,
    reports: Reports,
    tokens: u64,
    seconds: f64,
    judge: Judge,
    uniform: Uniform,
    /// The step of the last checkpoint.
    saved: Option<u64>,
    /// Whether a postponed checkpoint is due.
    owed: bool,
    /// The previous best evaluation and its age, while the checkpoint of a better one is not written yet.
    before_best: Option<(Option<Best>, u64)>,
    first_updates: FirstUpdates,
}

/// Trains until all steps of the trainer's config are taken or the run is stopped, and then writes a checkpoint. `at` is the position that
/// [`Trainer::resume`] returned with the trainer, if it was resumed. The run continues there, with the same bits as a run without a stop.
/// It refuses data other than what the checkpoint was trained on. A report or a checkpoint that cannot be written, for example on a full
/// disk, is a warning, and the previous checkpoint stays; a stopped run that cannot write its checkpoint is an error. A run that diverges
/// is abandoned: its last checkpoint is from before.
pub fn run(
    trainer: &mut Trainer,
    inputs: &Inputs,
    options: &Options<'_>,
    at: Option<&Value>,
    memory: &mut MemoryReport,
    observer: &mut dyn Observer,
) -> Result<Ended> {
    if options.batch == 0 || options.accumulate == 0 {
        bail!(
            InvalidArgument,
            "steps of {} batches of {} windows; both must be at least 1",
            options.accumulate,
            options.batch
        );
    }
    if inputs.windows.is_empty() {
        bail!(InvalidArgument, "there is no window to train on");
    }
    check_windows(inputs.windows.len(), (options.batch, options.accumulate))?;
    if let Some((samples, _)) = &options.samples {
        samples.check(trainer.spec().max_positions)?;
    }
    let decides = options.keep_best || options.patience.is_some();
    if decides && inputs.evaluation.is_empty() {
        bail!(
            InvalidArgument,
            "the best evaluation is to decide, and there is none; give data to evaluate with"
        );
    }
    let known = Known::new(inputs, (options.batch, options.accumulate));
    let position = at.map(Position::read).transpose()?;
    if let Some(position) = &position {
        known.check(&position.data)?;
    }
    checkpoint::sweep(&options.directory.join(CHECKPOINTS))?;
    let resumed = at.map(|_| trainer.steps());
    let settings = trainer.config().distillation.clone();
    let names = inputs.evaluation.iter().map(|set| set.name.clone());
    let reports = Reports::open(
        &options.directory,
        resumed,
        (names.collect(), settings.is_some()),
        options.tensorboard,
    )?;
    let (place, tokens, seconds, mut judge) = match position {
        Some(p) => (p.place, p.tokens, p.seconds, p.judge),
        None => Default::default(),
    };
    // Checkpoints of earlier versions lack it.
    judge.start = judge.start.or(reports.start());
    judge.label_share = settings.as_ref().map_or(0.0, |s| s.label_share);
    let labels = (trainer.spec().vocab_size as f64).ln();
    let run = Run {
        order: Order::new(
            inputs.seed,
            (inputs.windows.len(), options.batch * options.accumulate),
            place,
        ),
        uniform: Uniform {
            step: settings.map_or(labels, |settings| settings.uniform(labels)),
            labels,
        },
        saved: resumed,
        trainer,
        inputs,
        options,
        observer: RefCell::new(observer),
        known,
        reports,
        tokens,
        seconds,
        judge,
        owed: false,
        before_best: None,
        first_updates: FirstUpdates::default(),
    };
    run.go(memory)
}

impl Run<'_, '_> {
    fn go(mut self, memory: &mut MemoryReport) -> Result<Ended> {
        self.find_best()?;
        let last = self.trainer.config().steps;
        let mut first = true;
        let mut ending = Ending::Finished;
        let mut reason = None;
        // Before the first step, or if a stopped run had no time for it.
        if self.is_evaluation_due() {
            self.evaluate_between()?;
        }
        loop {
            let step = self.trainer.steps();
            reason = reason.or(self.judge.diverged(self.uniform, step == last));
            if reason.is_some() {
                ending = Ending::Diverged;
                break;
            }
            if step > 0 {
                self.save_between(step, step == last);
            }
            if step >= last && !self.is_evaluation_due() {
                break;
            }
            if self
                .options
                .patience
                .is_some_and(|most| self.judge.stale >= most)
            {
                ending = Ending::EarlyStopped;
                break;
            }
            // Also checked before the evaluation after the last step.
            if self.is_stopped() || step >= last {
                ending = Ending::Stopped;
                break;
            }
            let watched = if first { Some(&mut *memory) } else { None };
            reason = self.step(watched)?;
            if first {
                self.write_memory(memory);
            }
            first = false;
        }
        if ending != Ending::Diverged {
            self.save_last(ending)?;
        }
        let drawn = self.reports.draw(&mut **self.observer.borrow_mut());
        if let Some(message) = drawn {
            self.warn(&message);
        }
        Ok(Ended {
            ending,
            reason,
            saved: self.saved,
            best: self.judge.best,
            failed_reports: self.reports.failed(),
            judge: self.judge,
        })
    }

    /// Whether an evaluation or a sample is due after the last step.
    fn is_evaluation_due(&self) -> bool {
        let step = self.trainer.steps();
        let every = self.options.evaluate_every;
        let is_due = step == 0
            || step == self.trainer.config().steps
            || (every > 0 && step.is_multiple_of(every));
        is_due && self.judge.evaluated != Some(step)
    }

    /// Forgets the best evaluation if its checkpoint should have been kept and is missing.
    fn find_best(&mut self) -> Result<()> {
        let Some(best) = self.judge.best.filter(|_| self.options.keep_best) else {
            return Ok(());
        };
        let kept = checkpoint::list(&self.options.directory.join(CHECKPOINTS))?;
        if !kept.iter().any(|(step, _)| *step == best.step) {
            self.warn(&format!(
                "the best evaluation up to now, a loss of {:.4} after step {}, has no checkpoint any more; the best of those that come is \
                 kept",
                best.loss, best.step
            ));
            self.judge.best = None;
            self.judge.stale = 0;
        }
        Ok(())
    }

    /// Writes a checkpoint if one is due after a step. A failure is a warning.
    fn save_between(&mut self, step: u64, is_last: bool) {
        let every = self.options.save_every;
        self.owed |= every > 0 && step.is_multiple_of(every);
        self.owed &= self.saved != Some(step);
        let waits = self.judge.is_suspicious(self.uniform);
        if !self.owed || is_last || waits {
            return;
        }
        self.owed = false;
        if let Err(e) = self.save() {
            self.warn(&format!(
                "no checkpoint could be written, and training goes on: {e}; the one before is whole, and another is tried after {every} \
                 steps"
            ));
        }
    }

    /// Writes the final checkpoint of a run. A finished run can deliver without it.
    fn save_last(&mut self, ending: Ending) -> Result<()> {
        let step = self.trainer.steps();
        if self.saved == Some(step) || step == 0 {
            return Ok(());
        }
        let Err(e) = self.save() else {
            return Ok(());
        };
        let before = match self.saved {
            Some(step) => format!("the last one is of step {step}"),
            None => "there is none".to_owned(),
        };
        if ending == Ending::Stopped {
            return Err(e.within(format_args!(
                "no checkpoint of step {step} could be written, where the run was stopped; {before}"
            )));
        }
        self.warn(&format!(
            "no checkpoint of step {step}, the last, could be written: {e}; {before}"
        ));
        Ok(())
    }

    /// Whether the run should end. The stop file is removed once seen.
    fn is_stopped(&self) -> bool {
        if let Some(file) = &self.options.stop_file
            && file.exists()
        {
            if let Err(e) = std::fs::remove_file(file) {
                self.warn(&format!(
                    "removing {}: {e}; remove it before the run goes on",
                    file.display()
                ));
            }
            return true;
        }
        self.options.stop.is_set()
    }

    /// Runs a step, with its evaluation and its table row. Returns the reason if training has diverged because too many steps were skipped.
    fn step(&mut self, mut memory: Option<&mut MemoryReport>) -> Result<Option<String>> {
        let options = self.options;
        let batches: Vec<Window> = (0..options.accumulate)
            .map(|_| {
                let mut batch = Window::default();
                for _ in 0..options.batch {
                    batch.append(&self.inputs.windows.all()[self.order.next_item()]);
                }
                batch
            })
            .collect();
        let micro: Vec<MicroBatch<'_>> = batches.iter().map(Window::batch).collect();
        let tokens: usize = batches.iter().map(|b| b.tokens.len()).sum();
        let start = Instant::now();
        let number = self.trainer.steps() + 1;
        let (observer, trainer) = (&self.observer, &mut *self.trainer);
        let progress = |progress: Progress| {
            observer.borrow_mut().within_step(number, progress);
            ControlFlow::Continue(())
        };
        let watch = Watch {
            progress: Some(&progress),
            ..Watch::default()
        };
        let taken = watch.during(|| {
            trainer.step_watched(&micro, &mut |phase| {
                if let Some(memory) = &mut memory {
                    memory.phase(phase);
                }
            })
        });
        let step = match taken {
            Err(e) if self.trainer.gave_up() => return Ok(Some(e.to_string())),
            taken => taken?,
        };
        let taken = start.elapsed().as_secs_f64();
        if let Some(choice) = step.scales {
            let step = step.number;
            self.hear(&Event::Scales { step, choice });
        }
        self.tokens += tokens as u64;
        self.seconds += taken;
        if step.outcome == Outcome::Updated {
            self.judge.updated(step.loss);
        }
        let losses = match self.is_evaluation_due() {
            true => self.evaluate()?,
            false => Vec::new(),
        };
        let mut row = Row {
            step: step.number,
            tokens: self.tokens,
            loss: step.loss,
            eval_loss_delivered: None,
            eval_loss_stored: None,
            rate: step.rate,
            gradient_norm: step.gradient_norm,
            changed: step.changed,
            changed_delivered: step.changed_delivered,
            tokens_per_second: tokens as f64 / taken.max(1e-9),
            seconds: self.seconds,
            eval_divergence_delivered: None,
            eval_divergence_stored: None,
            more: Vec::new(),
        };
        row.evaluated(&losses);
        let place = self.order.place();
        self.hear(&Event::Step {
            row: &row,
            outcome: step.outcome,
            steps: self.trainer.config().steps,
            epoch: place.epoch as f64 + place.index as f64 / self.inputs.windows.len() as f64,
            memory: account::total().current,
        });
        let failed = self
            .reports
            .add(row, &losses, &mut **self.observer.borrow_mut());
        self.tell(&losses, failed);
        if self.judge.evaluated == Some(step.number) {
            self.sample()?;
        }
        if step.outcome == Outcome::Skipped {
            self.warn(&format!(
                "the loss or a gradient was not finite, and the step changed nothing; {} of {} steps came to nothing",
                self.trainer.skipped(),
                step.number
            ));
        } else {
            let highest = self.trainer.config().optimizer.rate;
            let warning = self.first_updates.add(step.rate, step.changed, highest);
            warning.iter().for_each(|message| self.warn(message));
        }
        Ok(None)
    }

    /// An evaluation between steps: before the first, or if a stopped run had no time for it.
    fn evaluate_between(&mut self) -> Result<()> {
        let step = self.trainer.steps();
        let losses = self.evaluate()?;
        if self.judge.evaluated != Some(step) {
            return Ok(());
        }
        let failed = {
            let observer = &mut **self.observer.borrow_mut();
            match (step, &losses[..]) {
                (_, []) => None,
                (0, losses) => self.reports.add(Row::start(losses), losses, observer),
                (_, losses) => self.reports.amend(step, losses, observer),
            }
        };
        self.tell(&losses, failed);
        self.sample()
    }

    /// Losses of all sets, in order; empty if a stop came first. Keeps the best.
    fn evaluate(&mut self) -> Result<Vec<Losses>> {
        let step = self.trainer.steps();
        let mut all = Vec::new();
        for set in &self.inputs.evaluation {
            let (trainer, batch) = (&mut *self.trainer, self.options.batch);
            let stop = &self.options.stop;
            match stop.watching(|| set.losses(trainer, batch)) {
                Ok(losses) => all.push(losses),
                Err(e) if e.kind() == ErrorKind::Cancelled => return Ok(Vec::new()),
                Err(e) => return Err(e),
            }
        }
        let Some(&deciding) = all.first() else {
            self.judge.evaluated = Some(step);
            return Ok(all);
        };
        let before = (self.judge.best, self.judge.stale);
        if self.judge.evaluated(step, deciding) {
            self.before_best = Some(before);
        }
        Ok(all)
    }

    /// Writes the checkpoint of a new best evaluation.
    fn keep_best(&mut self) {
        let Some(before) = self.before_best.take().filter(|_| self.options.keep_best) else {
            return;
        };
        if let Err(e) = self.save() {
            self.warn(&format!(
                "the best evaluation up to now is this one, and no checkpoint of it could be written: {e}; the best before it stays"
            ));
            (self.judge.best, self.judge.stale) = before;
        }
    }

    /// Reports an evaluation, and a report that failed.
    fn tell(&mut self, losses: &[Losses], failed: Option<String>) {
        let step = self.trainer.steps();
        for (set, losses) in self.inputs.evaluation.iter().zip(losses) {
            self.hear(&Event::Evaluation {
                step,
                set: &set.name,
                delivered: losses.delivered,
                stored: losses.stored,
                divergence_delivered: losses.divergence_delivered,
                divergence_stored: losses.divergence_stored,
            });
        }
        if let Some(message) = failed {
            self.warn(&message);
        }
        self.keep_best();
    }

    fn sample(&mut self) -> Result<()> {
        let Some((samples, text)) = &self.options.samples else {
            return Ok(());
        };
        let step = self.trainer.steps();
        let trainer = &mut *self.trainer;
        let answers = match self
            .options
            .stop
            .watching(|| samples.answers(trainer, text))
        {
            Err(e) if e.kind() == ErrorKind::Cancelled => return Ok(()),
            answers => answers?,
        };
        for (prompt, answer) in answers {
            self.hear(&Event::Sample {
                step,
                prompt,
                answer: &answer,
            });
        }
        Ok(())
    }

    fn write_memory(&mut self, memory: &MemoryReport) {
        let parameters = self.trainer.parameters();
        let state = (
            parameters.bytes(),
            parameters.trained(),
            self.trainer.config().recipe.release,
        );
        if let Some(message) = self.reports.memory(memory, state) {
            self.warn(&message);
        }
    }

    fn save(&mut self) -> Result<()> {
        let step = self.trainer.steps();
        let position = Position {
            place: self.order.place(),
            tokens: self.tokens,
            seconds: self.seconds,
            data: self.known.clone(),
            judge: self.judge.clone(),
        };
        let position = serde_json::to_value(position)
            .map_err(|e| err!(Internal, "writing a place in the data: {e}"))?;
        let directory = self.options.directory.join(CHECKPOINTS);
        let best = self.judge.best.filter(|_| self.options.keep_best);
        // A state that may have diverged must not replace a good checkpoint.
        let keep = match self.judge.is_suspicious(self.uniform) {
            true => usize::MAX,
            false => self.options.keep,
        };
        let spared = best.map(|best| best.step);
        let path = self
            .trainer
            .save_beside(&directory, &position, keep, spared)?;
        self.saved = Some(step);
        self.hear(&Event::Checkpoint { step, path: &path });
        Ok(())
    }

    fn hear(&self, event: &Event<'_>) {
        self.observer.borrow_mut().hear(event);
    }

    fn warn(&self, message: &str) {
        let step = self.trainer.steps();
        self.hear(&Event::Warning { step, message });
    }
}
