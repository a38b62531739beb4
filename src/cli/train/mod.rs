//! `nvfp4 train`: trains a model on files, with weights and optimizer in 4 bits, and writes the result.

mod delivery;
mod ending;
mod evaluation;
mod mask;
mod options;
mod picture;
mod resume;
mod show;
mod teacher;
mod writing;

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use NVFP4::base::call::{Cancel, Progress, Watch};
use NVFP4::base::error::bail;
use NVFP4::base::file::stage;
use NVFP4::base::{Error, Result, memory as account};
use NVFP4::model::training::{Source, SourceText};
use NVFP4::train::data::{self, Data, Long, Report, Windows};
use NVFP4::train::run::{self, CHECKPOINTS, Ending, EvaluationSet, Event, Inputs, Observer};
use NVFP4::train::{Curve, MemoryReport, Samples, Trainer, checkpoint, memory};

pub(super) use options::Args;

use self::delivery::Delivery;
use self::ending::{End, Signals};
use self::evaluation::UNNAMED;
use self::show::Show;
use super::{model, output};

/// Number of tokens in an answer to a sample prompt.
const SAMPLE_TOKENS: usize = 32;
/// A file of this name in the directory of a run ends it.
const STOP: &str = "stop";

/// Runs the command and returns its exit code.
pub(super) fn run(args: &Args) -> Result<ExitCode> {
    args.check()?;
    if let Some(budget) = args.memory_budget {
        account::set_budget(Some((budget * 1e9) as u64));
    }
    if let Some(rows) = args.show_mask {
        mask::show(args, rows)?;
        return Ok(ExitCode::SUCCESS);
    }
    let (begin, mut lock) = args.begin()?;
    // The opening line names the device that auto chose.
    let device = model::device(&args.device, args.threads)?;
    let mut report = MemoryReport::new(&device);
    let settings = args.settings()?;
    let source = args.source()?;
    settings.config.check_for(&source)?;
    let delivery = Delivery::new(args, &source, &settings.config.recipe)?;
    let text = source.text()?;
    let mut show = Show::new(args.json, &args.out);
    let window = args.window(source.spec().max_positions)?;
    let teacher = args.teacher.open(args.model.as_ref(), &source)?;
    let written = match (&teacher, args.teacher.teacher_writes) {
        (Some(teacher), Some(count)) => {
            let take = || {
                lock = Some(args.lock(lock.take())?);
                Ok(())
            };
            Some(writing::write(
                args,
                (&device, window),
                teacher,
                count,
                take,
            )?)
        }
        _ => None,
    };
    let (read, windows, evaluation) = args.data(&source, &text, window, written)?;
    show.data(&read, &windows, &evaluation)?;
    run::check_windows(windows.len(), (args.batch, args.accumulate))?;

    let mut config = args.config(&settings, &device, windows.len())?;
    if let Some(teacher) = &teacher {
        let earlier = config.distillation.as_ref();
        config.distillation = Some(args.teacher.distillation(teacher, earlier)?);
        config.check()?;
    }
    let explained = |e: Error| {
        let placed = teacher.as_deref().map(|t| (t, args.teacher.placement()));
        memory::explain(e, &source, &config, &device, (args.batch, window), placed)
    };
    let teach = |trainer: &mut Trainer| match &teacher {
        None => Ok(()),
        Some(teacher) => {
            let (placement, tokens) = (args.teacher.placement(), args.batch * window);
            trainer.set_teacher(&source, teacher.clone(), placement, tokens)
        }
    };
    let changed = RefCell::new(Vec::new());
    let resumed = |place: &Path| {
        Trainer::resume_as(&device, &source, place, &|saved| {
            *changed.borrow_mut() = resume::changes(saved, &config)?;
            Ok(config.clone())
        })
    };
    let (mut trainer, at) = match begin.place(args) {
        None => {
            let trainer = Trainer::new(&device, &source, &config).map_err(explained)?;
            (trainer, None)
        }
        Some(place) => {
            let (trainer, at) = resumed(&place).map_err(explained)?;
            (trainer, Some(at))
        }
    };
    teach(&mut trainer).map_err(explained)?;
    if trainer.steps() > config.steps {
        bail!(
            InvalidArgument,
            "the run has taken {} steps, and is to end after {}; give it more steps, or go on from an earlier checkpoint by --resume-from",
            trainer.steps(),
            config.steps
        );
    }
    let lock = args.lock(lock)?;
    report.model_loaded();
    let changed = changed.take();
    let described = args.teacher.describe(args.model.as_ref(), &trainer);
    show.begin(&trainer, at.is_some(), &changed, described)?;
    let inputs = Inputs {
        windows,
        evaluation,
        files: read.files,
        seed: args.seed,
    };
    if let Some(at) = &at {
        // Checked before anything is moved.
        inputs.check((args.batch, args.accumulate), at)?;
    }
    if let Some(moved) = begin.set_aside(args)? {
        show.note(&moved)?;
    }

    let stop = Cancel::new();
    let signals = Signals::new(&stop, show.teller());
    let samples = Samples::new(&args.sample, SAMPLE_TOKENS, &text)?;
    let options = run::Options {
        directory: args.out.clone(),
        lock: &lock,
        batch: args.batch,
        accumulate: args.accumulate,
        save_every: args.save_every,
        keep: args.keep,
        evaluate_every: args.eval_every,
        keep_best: args.best.is_some(),
        patience: args.early_stop,
        samples: (!samples.is_empty()).then_some((samples, &text)),
        tensorboard: args.tensorboard,
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
    let ended = ended.map_err(explained)?;
    show.failed_reports(&ended, trainer.steps());
    let code = signals.code(ended.ending);
    // From here on a signal ends the command at once: results are written atomically.
    drop(signals);
    let mut end = End::new(&ended, &trainer);
    match ended.ending {
        Ending::Stopped => {
            show.stopped(&end);
            return Ok(code);
        }
        Ending::Diverged if !args.export_diverged => {
            show.diverged(&end);
            return Ok(code);
        }
        _ => {}
    }
    if let Some(best) = ended.best.filter(|_| args.best.is_some()) {
        end.delivers(best);
        if best.step != trainer.steps() {
            // There may be no memory for both.
            drop(trainer);
            let all = checkpoint::list(&args.out.join(CHECKPOINTS))?;
            let kept = all.into_iter().find(|(step, _)| *step == best.step);
            let Some((_, place)) = kept else {
                bail!(
                    NotFound,
                    "the best evaluation was after step {}, and there is no checkpoint of it in {}",
                    best.step,
                    args.out.display()
                );
            };
            trainer = resumed(&place)?.0;
        }
    }
    delivery.write(args, &trainer, &source)?;
    drop(trainer);
    if let Some(place) = delivery
        .rounds_again()
        .filter(|_| !inputs.evaluation.is_empty())
    {
        let teacher = teacher.map(|teacher| (teacher, args.teacher.placement()));
        match run::losses_of_file(&device, place, &inputs.evaluation, args.batch, teacher) {
            Ok(scores) => {
                for (set, score) in inputs.evaluation.iter().zip(&scores) {
                    show.measured(place, &set.name, score);
                }
                end.delivered = scores.first().copied();
            }
            Err(e) => show.warn(&format!(
                "{} is written, and its loss could not be measured: {e}",
                place.display()
            )),
        }
    }
    end.worse = ended.worse(end.delivered);
    show.finished(&end, &delivery, text.template.is_some());
    Ok(code)
}

impl Args {
    fn source(&self) -> Result<Source> {
        match (&self.model, &self.init) {
            (Some(name), None) => Source::open(&model::resolve(name)?),
            (None, Some(directory)) => Source::fresh(directory, self.seed),
            _ => bail!(Internal, "clap requires one of --model and --init"),
        }
    }

    /// Reads training files.
    fn read(
        &self,
        files: &[PathBuf],
        source: &Source,
        text: &SourceText,
        options: &data::Options,
    ) -> Result<Data> {
        let bar = output::count_bar("reading", 0);
        let progress = |p: Progress| {
            bar.set_length(p.total);
            bar.set_position(p.done);
            std::ops::ControlFlow::Continue(())
        };
        let watch = Watch {
            progress: Some(&progress),
            ..Watch::default()
        };
        let read = watch.during(|| data::read(files, text, source.spec().vocab_size, options));
        bar.finish_and_clear();
        read
    }

    fn data(
        &self,
        source: &Source,
        text: &SourceText,
        window: usize,
        written: Option<PathBuf>,
    ) -> Result<(Report, Windows, Vec<EvaluationSet>)> {
        let options = self.data_options(window);
        let read = |files: &[PathBuf]| self.read(files, source, text, &options);
        let sets = self.evaluation_sets()?;
        let mut data = match written {
            Some(file) => {
                // A teacher's text may tokenize differently when it is read again.
                let options = data::Options {
                    format: None,
                    separator: None,
                    long: Long::Truncate,
                    ..options.clone()
                };
                self.read(&[file], source, text, &options)?
            }
            None => read(&self.data)?,
        };
        let mut evaluation = Vec::new();
        for (name, files) in sets {
            let windows = read(&files)?.windows()?;
            evaluation.push(EvaluationSet { name, windows });
        }
        if let Some(share) = self.eval_share {
            let (rest, aside) = data.split(share)?;
            data = rest;
            evaluation.push(EvaluationSet {
                name: UNNAMED.to_owned(),
                windows: aside.windows()?,
            });
        }
        let windows = data.windows()?;
        Ok((data.report().clone(), windows, evaluation))
    }
}

impl Observer for Show {
    fn hear(&mut self, event: &Event<'_>) {
        self.event(event);
    }

    fn within_step(&mut self, _step: u64, progress: Progress) {
        self.within(progress);
    }

    fn draw(&mut self, curve: &Curve) -> Result<()> {
        let drawn = picture::picture(curve.rows(), curve.sets());
        stage(&self.picture, drawn.as_bytes())?.commit()
    }
}
