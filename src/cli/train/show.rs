//! Output of a run: for a person at a terminal, for a log, or as JSON for a program.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use NVFP4::base::call::Progress;
use NVFP4::base::{Result, memory as account};
use NVFP4::model::training::Placement;
use NVFP4::train::data::{Report, Windows};
use NVFP4::train::run::{Ended, Ending, EvaluationSet, Event};
use NVFP4::train::{Score, Trainer};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use serde_json::{Value, json};

use super::delivery::Delivery;
use super::ending::End;
use super::evaluation::UNNAMED;
use crate::cli::{model, output};

/// Interval between two lines of a log.
const LOG_EVERY: Duration = Duration::from_secs(10);
/// Interval between two updates of the bar, and the duration from which a step counts as long.
const TICK: Duration = Duration::from_millis(500);
const LONG: Duration = Duration::from_secs(2);
/// Name of the picture of losses in the directory of a run.
const PICTURE: &str = "loss.svg";

/// Prints events: a progress bar on a terminal, occasional lines elsewhere, or JSON.
pub(super) struct Show {
    json: bool,
    bar: Option<ProgressBar>,
    told: Instant,
    /// Start of the current step.
    began: Instant,
    /// Whether a line of JSON could not be written; this is reported once.
    failed: bool,
    /// Path of the picture of losses.
    pub(super) picture: PathBuf,
}

impl Show {
    /// Shows a run whose directory is `out`.
    pub(super) fn new(json: bool, out: &Path) -> Show {
        Show {
            json,
            bar: None,
            told: Instant::now(),
            began: Instant::now(),
            failed: false,
            picture: out.join(PICTURE),
        }
    }

    /// Prints a line for a person.
    fn say(&self, line: String) {
        match &self.bar {
            _ if self.json => {}
            Some(bar) => bar.suspend(|| complain(&line)),
            None => complain(&line),
        }
    }

    /// Prints a single event.
    pub(super) fn note(&self, message: &str) -> Result<()> {
        if self.json {
            return output::json(&json!({"event": "note", "message": message}));
        }
        self.say(message.to_owned());
        Ok(())
    }

    /// Prints a warning.
    pub(super) fn warn(&mut self, message: &str) {
        match self.json {
            true => self.json(&json!({"event": "warning", "message": message})),
            false => self.say(format!("warning: {message}")),
        }
    }

    /// Returns a function for the signal thread that prints a signal's name and its effect at once.
    pub(super) fn teller(&self) -> impl FnOnce(&str, &str) + Send + 'static {
        let (json, bar) = (self.json, self.bar.clone());
        move |signal, message| {
            let line = format!("{signal}: {message}");
            match bar {
                _ if json => {
                    let event = json!({"event": "stopping", "signal": signal, "message": message});
                    let _ = writeln!(std::io::stdout(), "{event}");
                }
                Some(bar) => bar.suspend(|| complain(&line)),
                None => complain(&line),
            }
        }
    }

    /// Prints a line of JSON. A closed pipe ends the command; a full disk does not.
    fn json(&mut self, value: &impl Serialize) {
        if let Err(e) = output::json(value)
            && !std::mem::replace(&mut self.failed, true)
        {
            complain(&format!("nvfp4: {e}; the run goes on without telling"));
        }
    }

    /// Prints the data that was read.
    pub(super) fn data(
        &self,
        report: &Report,
        windows: &Windows,
        evaluation: &[EvaluationSet],
    ) -> Result<()> {
        let targets: usize = evaluation.iter().map(|set| set.windows.targets()).sum();
        if self.json {
            let number: usize = evaluation.iter().map(|set| set.windows.len()).sum();
            return output::json(&json!({
                "event": "data", "report": report, "windows": windows.len(), "tokens": windows.tokens(), "targets": windows.targets(),
                "evaluation_windows": number, "evaluation_targets": targets,
                "evaluation_sets": evaluation.iter().map(|set| &set.name).collect::<Vec<_>>(),
            }));
        }
        let mut line = format!(
            "data: {} rows, {} tokens of which {} are learned, in {} windows",
            report.rows,
            windows.tokens(),
            windows.targets(),
            windows.len()
        );
        for (count, what) in [
            (report.bad_rows, "rows that cannot be used left out"),
            (report.truncated, "rows cut off"),
            (report.dropped, "rows too long left out"),
            (targets, "tokens to evaluate with"),
        ] {
            if count > 0 {
                line.push_str(&format!("; {count} {what}"));
            }
        }
        self.say(line);
        Ok(())
    }

    /// Prints the start of the run.
    pub(super) fn begin(
        &mut self,
        trainer: &Trainer,
        resumed: bool,
        changed: &[String],
        teacher: Option<String>,
    ) -> Result<()> {
        let (config, parameters) = (trainer.config(), trainer.parameters());
        if self.json {
            let mut said = json!({
                "event": "begin", "resumed": resumed, "changed": changed, "step": trainer.steps(), "steps": config.steps, "device": trainer.device().name(),
                "parameters": parameters.trained(), "state_bytes": parameters.bytes(), "config": config,
            });
            if let Some(teacher) = trainer.teacher() {
                let streamed = teacher.placement() == Placement::Streamed;
                said["teacher"] = json!({"bytes": teacher.bytes(), "streamed": streamed});
            }
            return output::json(&said);
        }
        let what = match &config.recipe.lora {
            None => String::new(),
            Some(lora) => format!(
                " of adapters of rank {}, with the model below them,",
                lora.rank
            ),
        };
        self.say(format!(
            "{}: {} parameters{what} in {} on {}, {} steps{}",
            match resumed {
                true => format!("resuming after step {}", trainer.steps()),
                false => "training".to_owned(),
            },
            count(parameters.trained()),
            output::size(parameters.bytes() as u64),
            trainer.device().name(),
            config.steps,
            if config.recipe.release {
                ", gradients released"
            } else {
                ""
            }
        ));
        if let Some(teacher) = teacher {
            self.say(teacher);
        }
        if !changed.is_empty() {
            self.say(format!("with other settings: {}", changed.join(", ")));
        }
        if std::io::stderr().is_terminal() {
            let style = "{pos}/{len}{prefix} [{elapsed_precise}] [{bar:30}] {msg} ({eta})";
            let style = ProgressStyle::with_template(style)
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = ProgressBar::new(config.steps).with_style(style);
            bar.set_position(trainer.steps());
            bar.reset_eta();
            bar.enable_steady_tick(TICK);
            self.bar = Some(bar);
        }
        Ok(())
    }

    pub(super) fn event(&mut self, event: &Event<'_>) {
        if self.json {
            return self.json(event);
        }
        match event {
            Event::Step {
                row,
                steps,
                memory,
                epoch,
                ..
            } => {
                let line = format!(
                    "loss {:.4}, {:.0} tok/s, {}, {:.2} % changed",
                    row.loss,
                    row.tokens_per_second,
                    output::size(*memory),
                    100.0 * row.changed
                );
                self.began = Instant::now();
                if let Some(bar) = &self.bar {
                    bar.set_prefix("");
                    bar.set_position(row.step);
                    bar.set_message(line);
                } else if row.step == 1 || row.step == *steps || self.told.elapsed() >= LOG_EVERY {
                    self.told = Instant::now();
                    self.say(format!(
                        "step {}/{steps}, epoch {epoch:.2}: {line}",
                        row.step
                    ));
                }
            }
            Event::Evaluation {
                step,
                set,
                delivered,
                stored,
                divergence_delivered,
                divergence_stored,
            } => {
                let set = match *set {
                    UNNAMED => String::new(),
                    name => format!(" of {name}"),
                };
                let both = |delivered: &f64, stored: &f64| match delivered == stored {
                    true => format!("{delivered:.4}"),
                    false => format!("{delivered:.4} as delivered, {stored:.4} as stored"),
                };
                let mut line = format!(
                    "step {step}: evaluation loss{set} {}",
                    both(delivered, stored)
                );
                if let (Some(delivered), Some(stored)) = (divergence_delivered, divergence_stored) {
                    line += "; divergence from the teacher ";
                    line += &both(delivered, stored);
                }
                self.say(line);
                self.began = Instant::now();
            }
            Event::Sample {
                step,
                prompt,
                answer,
            } => self.say(format!("step {step}: {prompt:?} -> {answer:?}")),
            Event::Checkpoint { step, path } => {
                self.say(format!("step {step}: checkpoint {}", path.display()));
            }
            Event::Scales { step, choice } => {
                let what = match choice.after < choice.before {
                    true => "chosen anew",
                    false => "kept, as chosen anew they are worse",
                };
                self.say(format!(
                    "before step {step}: block scales {what}; loss of its batch as delivered {:.4}, with new ones {:.4}",
                    choice.before, choice.after
                ));
            }
            Event::Warning { step, message } => {
                self.say(format!("warning at step {step}: {message}"))
            }
        }
    }

    /// Prints the number of reports that could not be written, if more than the one already reported as a warning.
    pub(super) fn failed_reports(&mut self, ended: &Ended, step: u64) {
        if ended.failed_reports > 1 {
            let message = format!(
                "{} reports (loss.csv, {PICTURE}, memory.json, TensorBoard's events) could not be written in all",
                ended.failed_reports
            );
            self.event(&Event::Warning {
                step,
                message: &message,
            });
        }
    }

    /// Shows the progress of a long step.
    pub(super) fn within(&mut self, progress: Progress) {
        if let Some(bar) = &self.bar
            && self.began.elapsed() >= LONG
            && progress.done < progress.total
        {
            let share = 100 * progress.done / progress.total;
            bar.set_prefix(format!(" + {share} %"));
        }
    }

    /// Prints the loss of a delivered file, and its divergence from a teacher.
    pub(super) fn measured(&mut self, place: &Path, set: &str, score: &Score) {
        self.end();
        match self.json {
            true => {
                let place = shown(place);
                let mut said =
                    json!({"event": "delivered", "path": place, "set": set, "loss": score.loss});
                if let Some(divergence) = score.divergence {
                    said["divergence"] = json!(divergence);
                }
                self.json(&said);
            }
            false => {
                let set = match set {
                    UNNAMED => String::new(),
                    name => format!(" of {name}"),
                };
                let divergence = score.divergence.map_or(String::new(), |divergence| {
                    format!(", divergence from the teacher {divergence:.4},")
                });
                self.say(format!(
                    "{}: evaluation loss{set} {:.4}{divergence} of the file",
                    place.display(),
                    score.loss
                ));
            }
        }
    }

    /// Prints that the run was stopped. Errors of printing, as on a closed terminal, are ignored.
    pub(super) fn stopped(&mut self, end: &End) {
        self.end();
        if self.json {
            let mut said = ended(end, None);
            said["resume"] = json!(end.again);
            let _ = writeln!(std::io::stdout(), "{said}");
            return;
        }
        let how = match end.step {
            0 => "stopped before the first step; to begin again:".to_owned(),
            step => format!("stopped after step {step} of {}; to go on:", end.steps),
        };
        let _ = writeln!(std::io::stdout(), "{how}\n  {}", end.again);
    }

    /// Prints that training has diverged and nothing is delivered.
    pub(super) fn diverged(&mut self, end: &End) {
        self.end();
        if self.json {
            let mut said = ended(end, None);
            said["resume"] = json!(end.again);
            return self.json(&said);
        }
        let next = match end.saved {
            Some(step) => format!(
                "the last checkpoint is of step {step}; to go on from there, with a lower --rate, or from an earlier one by --resume-from:"
            ),
            None => "there is no checkpoint; to begin again, with a lower --rate:".to_owned(),
        };
        complain(&format!(
            "nvfp4: training has diverged by step {}: {}; nothing is delivered (--export-diverged would); {next}\n  {}",
            end.step,
            end.reason.as_deref().unwrap_or_default(),
            end.again
        ));
    }

    /// Prints how a run ended and what it delivered. Failure to print does not fail the run.
    pub(super) fn finished(&mut self, end: &End, delivery: &Delivery, talks: bool) {
        self.end();
        if let Err(e) = self.deliver(end, delivery, talks) {
            complain(&format!("nvfp4: {e}"));
        }
    }

    fn deliver(&mut self, end: &End, delivery: &Delivery, talks: bool) -> Result<()> {
        if self.json {
            let place = delivery.adapter.as_ref().or(delivery.model.as_ref());
            let mut said = ended(end, place.map(PathBuf::as_path));
            if delivery.adapter.is_some() {
                said["merged"] = json!(delivery.model.as_deref().map(shown));
            }
            return output::json(&said);
        }
        match end.ending {
            Ending::EarlyStopped => self.say(format!(
                "ended early, after step {} of {}: evaluations are no longer better",
                end.step, end.steps
            )),
            Ending::Diverged => self.say(format!(
                "warning: training has diverged by step {}: {}; it is delivered all the same",
                end.step,
                end.reason.as_deref().unwrap_or_default()
            )),
            _ => {}
        }
        match end.best {
            Some(best) if best.step == 0 => self.say(
                "no evaluation was better than that before the first step: the model is delivered as it was then".to_owned(),
            ),
            Some(best) => self.say(format!(
                "step {} was the best, with an evaluation loss of {:.4}{}, and is delivered",
                best.step,
                best.loss,
                best.divergence.map_or(String::new(), |divergence| format!(
                    " and a divergence from the teacher of {divergence:.4}"
                ))
            )),
            None => {}
        }
        if let Some((start, now)) = end.worse {
            self.say(format!(
                "warning: what is delivered is worse than what training began with: its {} is {now:.4}, and was {start:.4} before the first \
                 step",
                end.measure
            ));
        }
        if let Some(place) = &delivery.adapter {
            let place = place.display();
            output::line(format_args!(
                "{place}: trained adapters; to use them in transformers: peft.PeftModel.from_pretrained(model, \"{place}\"){}",
                match delivery.model {
                    Some(_) => "",
                    None =>
                        "; to have the model with them in it: the same command with --resume --merge",
                }
            ))?;
        }
        let Some(place) = &delivery.model else {
            return Ok(());
        };
        let place = place.display();
        match talks {
            true => output::line(format_args!(
                "{place}: trained; talk to it: nvfp4 chat --model {place}"
            )),
            false => output::line(format_args!(
                "{place}: trained; go on with a text: nvfp4 run --model {place} --raw --prompt TEXT"
            )),
        }
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// Formats a number of parameters for a person.
fn count(parameters: usize) -> String {
    match parameters as f64 {
        few if few < 1e6 => format!("{:.1} k", few / 1e3),
        many => format!("{:.1} M", many / 1e6),
    }
}

/// A path as text, which JSON requires.
fn shown(path: &Path) -> String {
    model::shown(path.as_os_str())
}

/// Prints a line to standard error, which may be closed, or a file on a full disk.
fn complain(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The last event of a run with `--json`.
fn ended(end: &End, place: Option<&Path>) -> Value {
    let loss = |score: Option<Score>| score.map(|s| s.loss);
    let divergence = |score: Option<Score>| score.and_then(|s| s.divergence);
    let mut said = json!({
        "event": "end", "ending": end.ending, "reason": end.reason, "step": end.step, "skipped": end.skipped, "path": place.map(shown),
        "state_bytes": end.state_bytes, "peak_bytes": account::total().peak, "start_loss": loss(end.start), "delivered_loss": loss(end.delivered),
        "delivered_step": place.map(|_| end.delivered_step), "worse": end.worse.is_some(),
    });
    for (name, score) in [
        ("start_divergence", end.start),
        ("delivered_divergence", end.delivered),
    ] {
        if let Some(divergence) = divergence(score) {
            said[name] = json!(divergence);
        }
    }
    said
}
