//! A whole run: steps over windows with evaluations, samples, checkpoints and reports between them, which whoever started it hears of and
//! can stop after any step.

use std::collections::BTreeMap;
use std::hash::Hasher;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use twox_hash::XxHash3_64;

use super::curve::{Curve, Row};
use super::data::{DataFile, Order, Place, Window, Windows, as_text};
use super::memory::MemoryReport;
use super::sample::Samples;
use super::trainer::{MicroBatch, Outcome, Trainer};
use crate::base::Result;
use crate::base::call::Cancel;
use crate::base::error::{Error, bail, err};
use crate::base::memory as account;
use crate::model::training::Text;

/// Updates over which the share of weights that change is measured, and the share under which a warning says so.
const MEASURED: u64 = 10;
const LITTLE: f64 = 1e-3;
/// The share that is advised.
const ENOUGH: f64 = 1e-2;
/// Where checkpoints are, in the directory of a run.
pub const CHECKPOINTS: &str = "checkpoints";

/// What a run trains on.
pub struct Inputs {
    /// The windows.
    pub windows: Windows,
    /// What it is evaluated with; may be empty.
    pub evaluation: Windows,
    /// The files that they were read from, for messages.
    pub files: Vec<DataFile>,
    /// Chooses the order of windows.
    pub seed: u64,
}

/// How a run goes.
pub struct Options<'a> {
    /// Where checkpoints and reports are written.
    pub directory: PathBuf,
    /// Windows that go through the model together.
    pub batch: usize,
    /// How many of such batches make a step.
    pub accumulate: usize,
    /// Writes a checkpoint every so many steps, and at the end; at the end alone if 0.
    pub save_every: u64,
    /// Checkpoints that are kept.
    pub keep: usize,
    /// Evaluates every so many steps, and at the end; at the end alone if 0.
    pub evaluate_every: u64,
    /// Continues prompts every so many steps, and at the end; at the end alone if 0.
    pub sample_every: u64,
    /// The prompts, and how the model reads them.
    pub samples: Option<(Samples, &'a Text)>,
    /// Ends the run after the step in which it is set.
    pub stop: Cancel,
    /// Ends the run after the step in which there is such a file, and removes it.
    pub stop_file: Option<PathBuf>,
}

impl Options<'_> {
    /// Refuses steps of more windows than there are, which would see some of them twice.
    fn check_windows(&self, windows: usize) -> Result<()> {
        let (batch, accumulate) = (self.batch, self.accumulate);
        if batch.saturating_mul(accumulate) <= windows {
            return Ok(());
        }
        bail!(
            InvalidArgument,
            "a step of {accumulate} x {batch} windows (--accumulate, --batch), and the data makes {windows}: a step sees no window twice, so take \
             at most {windows} in a step, or shorter windows (--window)"
        )
    }
}

/// What happens in a run.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event<'a> {
    /// A step was taken.
    Step {
        /// Its row in the table of losses.
        #[serde(flatten)]
        row: Row,
        /// What it came to.
        outcome: Outcome,
        /// Steps in all.
        steps: u64,
        /// Epochs up to now.
        epoch: f64,
        /// Bytes in use by the library's account.
        memory: u64,
    },
    /// The model was evaluated.
    Evaluation {
        /// After this step.
        step: u64,
        /// The loss of what is delivered.
        delivered: f64,
        /// The loss of all that is stored.
        stored: f64,
    },
    /// A prompt was continued.
    Sample {
        /// After this step.
        step: u64,
        /// The prompt.
        prompt: &'a str,
        /// What the model adds.
        answer: &'a str,
    },
    /// A checkpoint was written.
    Checkpoint {
        /// After this step.
        step: u64,
        /// Where.
        #[serde(serialize_with = "as_text")]
        path: &'a Path,
    },
    /// Something should be looked at.
    Warning {
        /// After this step.
        step: u64,
        /// What, and what to do.
        message: &'a str,
    },
}

/// Who hears of a run.
pub trait Observer {
    /// Is told what happens, on the run's thread.
    fn hear(&mut self, event: &Event<'_>);
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// All steps were taken.
    Finished,
    /// It was stopped, and can be resumed.
    Stopped,
}

/// The data of a run, as checkpoints know it again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Known {
    windows: usize,
    tokens: usize,
    /// XXH3 of all tokens, lengths, labels and weights.
    checksum: String,
    evaluation: String,
    batch: usize,
    accumulate: usize,
    seed: u64,
    /// XXH3 of the files, by their names without folders.
    files: BTreeMap<String, String>,
}

/// Where a run is in its data; what checkpoints hold of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Position {
    place: Place,
    /// Tokens and seconds up to there.
    tokens: u64,
    seconds: f64,
    data: Known,
}

impl Known {
    fn new(inputs: &Inputs, options: &Options<'_>) -> Known {
        let name = |file: &DataFile| {
            let name = file.path.file_name().unwrap_or_default();
            name.to_string_lossy().into_owned()
        };
        let files = inputs.files.iter();
        Known {
            windows: inputs.windows.len(),
            tokens: inputs.windows.tokens(),
            checksum: checksum(&inputs.windows),
            evaluation: checksum(&inputs.evaluation),
            batch: options.batch,
            accumulate: options.accumulate,
            seed: inputs.seed,
            files: files.map(|f| (name(f), f.checksum.clone())).collect(),
        }
    }

    /// Refuses to go on from another's place.
    fn check(&self, saved: &Known) -> Result<()> {
        let mut differing = Vec::new();
        for (name, sum) in &saved.files {
            match self.files.get(name) {
                None => differing.push(format!("{name} is not among the data")),
                Some(own) if own != sum => differing.push(format!("{name} has another content")),
                Some(_) => {}
            }
        }
        let added = self.files.keys().filter(|n| !saved.files.contains_key(*n));
        differing.extend(added.map(|name| format!("{name} was not among the data")));
        for (what, own, saved) in [
            ("windows", self.windows as u64, saved.windows as u64),
            ("tokens", self.tokens as u64, saved.tokens as u64),
            ("windows in a batch", self.batch as u64, saved.batch as u64),
            (
                "batches in a step",
                self.accumulate as u64,
                saved.accumulate as u64,
            ),
            ("as the seed", self.seed, saved.seed),
        ] {
            if own != saved {
                differing.push(format!("{own} {what} instead of {saved}"));
            }
        }
        if differing.is_empty() && self.checksum != saved.checksum {
            differing.push("the tokens, the labels or their weights are others".to_owned());
        }
        if differing.is_empty() && self.evaluation != saved.evaluation {
            differing.push("the evaluation's tokens or labels are others".to_owned());
        }
        if !differing.is_empty() {
            bail!(
                InvalidArgument,
                "the checkpoint was trained on other data: {}; resume with the data and options that it began with, or begin anew",
                differing.join(", ")
            );
        }
        Ok(())
    }
}

fn checksum(windows: &Windows) -> String {
    let mut sum = XxHash3_64::new();
    for window in windows.all() {
        window
            .documents
            .iter()
            .for_each(|&n| sum.write_u64(n as u64));
        window.tokens.iter().for_each(|&t| sum.write_u32(t));
        window.labels.iter().for_each(|&l| sum.write_i32(l));
        // Empty where all are 1, so that the sum is that of windows without weights.
        let weights = window.weights.iter();
        weights.for_each(|&w| sum.write_u32(w.to_bits()));
    }
    format!("{:016x}", sum.finish())
}

/// A run under way.
struct Run<'a, 'b> {
    trainer: &'a mut Trainer,
    inputs: &'a Inputs,
    options: &'a Options<'b>,
    observer: &'a mut dyn Observer,
    known: Known,
    order: Order,
    curve: Curve,
    tokens: u64,
    seconds: f64,
    /// The last step of which there is a checkpoint.
    saved: Option<u64>,
    /// Updates that were measured, and the sums of rates and of shares that changed.
    measured: (u64, f64, f64),
}

/// Trains until all steps of the trainer's config are taken, or it is stopped, and writes a checkpoint then. `at` is what
/// [`Trainer::resume`] gave with the trainer, if it was resumed: it goes on there, to the same bits as if it had never stopped. Data that
/// is not what the checkpoint was trained on is refused. A checkpoint between that cannot be written, as on a full disk, is a warning, and
/// the one before it stays; one at the end is an error.
pub fn run(
    trainer: &mut Trainer,
    inputs: &Inputs,
    options: &Options<'_>,
    at: Option<&Value>,
    memory: &mut MemoryReport,
    observer: &mut dyn Observer,
) -> Result<Ending> {
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
    options.check_windows(inputs.windows.len())?;
    if let Some((samples, _)) = &options.samples {
        samples.check(trainer.spec().max_positions)?;
    }
    let known = Known::new(inputs, options);
    let (mut place, mut tokens, mut seconds) = (Place::default(), 0, 0.0);
    if let Some(at) = at {
        let position: Position = serde_json::from_value(at.clone()).map_err(|e| {
            err!(
                CorruptFile,
                "the place in the data that the checkpoint holds: {e}"
            )
        })?;
        known.check(&position.data)?;
        (place, tokens, seconds) = (position.place, position.tokens, position.seconds);
    }
    std::fs::create_dir_all(&options.directory)
        .map_err(|e| Error::io(format_args!("making {}", options.directory.display()), e))?;
    let steps = trainer.steps();
    let run = Run {
        curve: Curve::open(&options.directory, steps)?,
        order: Order::new(inputs.seed, inputs.windows.len(), place),
        saved: at.map(|_| steps),
        trainer,
        inputs,
        options,
        observer,
        known,
        tokens,
        seconds,
        measured: (0, 0.0, 0.0),
    };
    run.go(memory)
}

impl Run<'_, '_> {
    fn go(mut self, memory: &mut MemoryReport) -> Result<Ending> {
        let last = self.trainer.config().steps;
        let released = self.trainer.config().recipe.release;
        let mut ending = Ending::Finished;
        let mut first = true;
        while self.trainer.steps() < last {
            if self.is_stopped()? {
                ending = Ending::Stopped;
                break;
            }
            self.step(if first { Some(&mut *memory) } else { None })?;
            if first {
                let parameters = self.trainer.parameters();
                memory.write(
                    &self.options.directory,
                    parameters.bytes(),
                    parameters.trained(),
                    released,
                )?;
            }
            first = false;
            let step = self.trainer.steps();
            let due = |every: u64| step == last || (every > 0 && step.is_multiple_of(every));
            if due(self.options.sample_every) {
                self.sample()?;
            }
            if due(self.options.save_every)
                && step < last
                && let Err(e) = self.save()
            {
                self.warn(&format!(
                    "no checkpoint could be written, and training goes on: {e}; the one before is whole, and another is tried after {} \
                     steps",
                    self.options.save_every
                ));
            }
        }
        if self.saved != Some(self.trainer.steps()) && self.trainer.steps() > 0 {
            self.save()?;
        }
        self.curve.draw()?;
        Ok(ending)
    }

    /// Whether it is to end. A file that says so has done its work.
    fn is_stopped(&self) -> Result<bool> {
        if let Some(file) = &self.options.stop_file
            && file.exists()
        {
            std::fs::remove_file(file)
                .map_err(|e| Error::io(format_args!("removing {}", file.display()), e))?;
            return Ok(true);
        }
        Ok(self.options.stop.is_set())
    }

    /// A step, with its evaluation and its row in the table.
    fn step(&mut self, mut memory: Option<&mut MemoryReport>) -> Result<()> {
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
        let step = self.trainer.step_watched(&micro, &mut |phase| {
            if let Some(memory) = &mut memory {
                memory.phase(phase);
            }
        })?;
        let taken = start.elapsed().as_secs_f64();
        self.tokens += tokens as u64;
        self.seconds += taken;
        let config = self.trainer.config();
        let last = config.steps;
        let is_due = step.number == last
            || (options.evaluate_every > 0 && step.number.is_multiple_of(options.evaluate_every));
        let evaluated = match is_due && !self.inputs.evaluation.is_empty() {
            true => Some(self.evaluate()?),
            false => None,
        };
        let row = Row {
            step: step.number,
            tokens: self.tokens,
            loss: step.loss,
            eval_loss_delivered: evaluated.map(|e| e.0),
            eval_loss_stored: evaluated.map(|e| e.1),
            rate: step.rate,
            gradient_norm: step.gradient_norm,
            changed: step.changed,
            changed_delivered: step.changed_delivered,
            tokens_per_second: tokens as f64 / taken.max(1e-9),
            seconds: self.seconds,
        };
        self.curve.push(row)?;
        let place = self.order.place();
        self.observer.hear(&Event::Step {
            row,
            outcome: step.outcome,
            steps: last,
            epoch: place.epoch as f64 + place.index as f64 / self.inputs.windows.len() as f64,
            memory: account::total().current,
        });
        if let Some((delivered, stored)) = evaluated {
            self.observer.hear(&Event::Evaluation {
                step: step.number,
                delivered,
                stored,
            });
            self.curve.draw()?;
        }
        if step.outcome == Outcome::Skipped {
            self.warn(&format!(
                "the loss or a gradient was not finite, and the step changed nothing; {} of {} steps came to nothing",
                self.trainer.skipped(),
                step.number
            ));
        } else {
            self.measure(step.rate, step.changed);
        }
        Ok(())
    }

    /// The losses of what is delivered, and of all that is stored.
    fn evaluate(&mut self) -> Result<(f64, f64)> {
        let windows = self.inputs.evaluation.all();
        let batches: Vec<Window> = windows
            .chunks(self.options.batch)
            .map(|part| {
                let mut batch = Window::default();
                part.iter().for_each(|w| batch.append(w));
                batch
            })
            .collect();
        let batches: Vec<MicroBatch<'_>> = batches.iter().map(Window::batch).collect();
        let delivered = self.trainer.evaluate(&batches, true)?;
        let differs = self.trainer.config().recipe.weights.is_packed();
        let stored = match differs {
            true => self.trainer.evaluate(&batches, false)?,
            false => delivered,
        };
        Ok((delivered, stored))
    }

    fn sample(&mut self) -> Result<()> {
        let Some((samples, text)) = &self.options.samples else {
            return Ok(());
        };
        let step = self.trainer.steps();
        for (prompt, answer) in samples.answers(self.trainer, text)? {
            self.observer.hear(&Event::Sample {
                step,
                prompt,
                answer: &answer,
            });
        }
        Ok(())
    }

    fn save(&mut self) -> Result<()> {
        let position = Position {
            place: self.order.place(),
            tokens: self.tokens,
            seconds: self.seconds,
            data: self.known.clone(),
        };
        let position = serde_json::to_value(position)
            .map_err(|e| err!(Internal, "writing a place in the data: {e}"))?;
        let directory = self.options.directory.join(CHECKPOINTS);
        let path = self
            .trainer
            .save(&directory, &position, self.options.keep)?;
        let step = self.trainer.steps();
        self.saved = Some(step);
        self.observer.hear(&Event::Checkpoint { step, path: &path });
        Ok(())
    }

    fn warn(&mut self, message: &str) {
        let step = self.trainer.steps();
        self.observer.hear(&Event::Warning { step, message });
    }

    /// Warns once if the first updates changed hardly any weight: then rounding by chance is most of what happens to them.
    fn measure(&mut self, rate: f64, changed: f64) {
        let (count, rates, shares) = &mut self.measured;
        *count += 1;
        *rates += rate;
        *shares += changed;
        if *count != MEASURED {
            return;
        }
        let highest = self.trainer.config().optimizer.rate;
        // What it comes to at the highest rate, which these steps may have been on the way to.
        let share = *shares / *rates * highest;
        if share >= LITTLE {
            return;
        }
        let advice = match share > 0.0 {
            true => format!(
                "a rate of about {:.1e} would change {} % of them",
                highest * ENOUGH / share,
                100.0 * ENOUGH
            ),
            false => "the rate must be much higher".to_owned(),
        };
        let measured = format!(
            "the learning rate of {highest:e} is below what the weights' storage can hold: of all trained weights, {:.4} % changed in a step, \
             measured over {MEASURED}; {advice}, and a recipe with an 8-bit residual or in float32 stores smaller steps",
            100.0 * share
        );
        self.warn(&measured);
    }
}
