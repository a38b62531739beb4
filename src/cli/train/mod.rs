//! `nvfp4 train`: teaches a model what stands in files, with weights and optimizer in 4 bits, and writes what it has become.

mod delivery;
mod mask;
mod options;
mod show;

use std::path::PathBuf;

use NVFP4::base::call::{Cancel, Progress, Watch};
use NVFP4::base::error::{bail, err};
use NVFP4::base::{Error, Result, leftover, memory as account};
use NVFP4::model::training::{Source, Text};
use NVFP4::ops::Device;
use NVFP4::train::data::{self, Data, Report, Windows};
use NVFP4::train::run::{self, CHECKPOINTS, Ending, Event, Inputs, Observer};
use NVFP4::train::{Config, MemoryReport, Samples, Trainer, checkpoint, memory};
use serde_json::Value;

pub(super) use options::Args;

use self::delivery::{Delivery, is_empty};
use self::show::Show;
use super::{model, output};

/// Tokens that answer a prompt.
const SAMPLE_TOKENS: usize = 32;
/// A file of this name in the directory of a run ends it.
const STOP: &str = "stop";

pub(super) fn run(args: &Args) -> Result<()> {
    args.check()?;
    if let Some(budget) = args.memory_budget {
        account::set_budget(Some((budget * 1e9) as u64));
    }
    if let Some(rows) = args.show_mask {
        return mask::show(args, rows);
    }
    let earlier = args.earlier()?;
    let device = match &*args.device {
        // What it came to is in the line that says what begins.
        "auto" => Device::cuda(0).or_else(|_| model::device("cpu", args.threads))?,
        name => model::device(name, args.threads)?,
    };
    let mut report = MemoryReport::new(&device);
    let settings = args.settings()?;
    let source = args.source()?;
    let delivery = Delivery::new(args, &source, &settings.config.recipe)?;
    let text = source.text()?;
    let mut show = Show::new(args.json);
    let window = args.window(source.spec().max_positions)?;
    let (read, windows, evaluation) = args.data(&source, &text, window)?;
    show.data(&read, &windows, &evaluation)?;

    let config = args.config(&settings, &device, windows.len())?;
    let explained = |e: Error| memory::explain(e, &source, &config, &device, (args.batch, window));
    let (mut trainer, at) = match &earlier {
        None => (
            Trainer::new(&device, &source, &config).map_err(explained)?,
            None,
        ),
        Some(directory) => {
            let resumed = Trainer::resume(&device, &source, directory).map_err(explained)?;
            check_config(resumed.0.config(), &config)?;
            (resumed.0, Some(resumed.1))
        }
    };
    report.model_loaded();
    show.begin(&trainer, at.is_some())?;

    let stop = Cancel::new();
    leftover::cancel_on_interrupt(&stop);
    let samples = Samples::new(&args.sample, SAMPLE_TOKENS, &text)?;
    let inputs = Inputs {
        windows,
        evaluation,
        files: read.files,
        seed: args.seed,
    };
    let options = run::Options {
        directory: args.out.clone(),
        batch: args.batch,
        accumulate: args.accumulate,
        save_every: args.save_every,
        keep: args.keep,
        evaluate_every: args.eval_every,
        sample_every: if args.eval_every > 0 {
            args.eval_every
        } else {
            args.save_every
        },
        samples: (!samples.is_empty()).then_some((samples, &text)),
        stop,
        stop_file: Some(args.out.join(STOP)),
    };
    let ended = run::run(
        &mut trainer,
        &inputs,
        &options,
        at.as_ref(),
        &mut report,
        &mut show,
    );
    let ending = ended.map_err(explained)?;
    if ending == Ending::Stopped {
        return show.stopped(&trainer, &args.out);
    }
    delivery.write(args, &trainer, &source)?;
    show.finished(&trainer, &delivery, text.template.is_some())
}

/// Refuses other settings than those of the checkpoint that a run goes on from.
fn check_config(saved: &Config, own: &Config) -> Result<()> {
    if saved == own {
        return Ok(());
    }
    let value = |config: &Config| {
        serde_json::to_value(config).map_err(|e| err!(Internal, "writing settings: {e}"))
    };
    let mut differing = Vec::new();
    compare("", &value(saved)?, &value(own)?, &mut differing);
    bail!(
        InvalidArgument,
        "the run that is to go on began with other settings: {}; give it the options that it began with, or another --out",
        differing.join(", ")
    )
}

/// Lists what differs between two values of the same form.
fn compare(name: &str, saved: &Value, own: &Value, differing: &mut Vec<String>) {
    match (saved, own) {
        (Value::Object(a), Value::Object(b)) if a.keys().eq(b.keys()) => {
            for (key, a) in a {
                let name = match name {
                    "" => key.clone(),
                    name => format!("{name}.{key}"),
                };
                compare(&name, a, &b[key], differing);
            }
        }
        (a, b) if a != b => differing.push(format!("{name} {a}, and now {b}")),
        _ => {}
    }
}

impl Args {
    /// The directory of the checkpoints to go on from, if that is asked for; refuses a directory with a run in it otherwise.
    fn earlier(&self) -> Result<Option<PathBuf>> {
        let checkpoints = self.out.join(CHECKPOINTS);
        let last = checkpoint::list(&checkpoints)?.pop();
        match (&last, self.resume) {
            (Some(_), true) => Ok(Some(checkpoints)),
            (None, true) => bail!(
                NotFound,
                "there is no checkpoint in {} to resume; begin without --resume",
                checkpoints.display()
            ),
            (Some((step, _)), false) => bail!(
                InvalidArgument,
                "{} holds a run that came to step {step}; go on with it by --resume, or name another --out",
                self.out.display()
            ),
            (None, false) if self.out.join("loss.csv").exists() => {
                // A run that ended before its first checkpoint has nothing to lose but its table.
                Ok(None)
            }
            (None, false) if self.out.exists() && !is_empty(&self.out)? => bail!(
                InvalidArgument,
                "{} is not empty and holds no run; name a new directory for --out",
                self.out.display()
            ),
            (None, false) => Ok(None),
        }
    }

    fn source(&self) -> Result<Source> {
        match (&self.model, &self.init) {
            (Some(name), None) => Source::open(&model::resolve(name)?),
            (None, Some(directory)) => Source::fresh(directory, self.seed),
            _ => bail!(Internal, "clap requires one of --model and --init"),
        }
    }

    /// Reads files whose rows the model is to learn.
    fn read(&self, files: &[PathBuf], source: &Source, text: &Text, window: usize) -> Result<Data> {
        let options = self.data_options(window);
        let bar = output::count_bar("reading", 0);
        let progress = |p: Progress| {
            bar.set_length(p.total);
            bar.set_position(p.done);
            std::ops::ControlFlow::Continue(())
        };
        let watch = Watch {
            flags: &[],
            progress: Some(&progress),
        };
        let read = watch.during(|| data::read(files, text, source.spec().vocab_size, &options));
        bar.finish_and_clear();
        read
    }

    fn data(
        &self,
        source: &Source,
        text: &Text,
        window: usize,
    ) -> Result<(Report, Windows, Windows)> {
        let read = |files: &[PathBuf]| self.read(files, source, text, window);
        let data = read(&self.data)?;
        let (data, evaluation) = match (&self.eval[..], self.eval_share) {
            ([], None) => (data, None),
            ([], Some(share)) => {
                let (data, evaluation) = data.split(share)?;
                (data, Some(evaluation))
            }
            (files, _) => {
                let evaluation = read(files)?;
                (data, Some(evaluation))
            }
        };
        let windows = data.windows()?;
        let evaluation = match evaluation {
            Some(evaluation) => evaluation.windows()?,
            None => Windows::default(),
        };
        Ok((data.report().clone(), windows, evaluation))
    }
}

impl Observer for Show {
    fn hear(&mut self, event: &Event<'_>) {
        self.event(event);
    }
}
