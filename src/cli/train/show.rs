//! A run as a person at a terminal, a log or a program sees it.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use NVFP4::base::{Result, memory as account};
use NVFP4::train::Trainer;
use NVFP4::train::data::{Report, Windows};
use NVFP4::train::run::{Ending, Event};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use super::delivery::Delivery;
use crate::cli::{model, output};

/// The time between two lines of a log.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// Prints what happens: a progress bar on a terminal, a line now and then elsewhere, or JSON.
pub(super) struct Show {
    json: bool,
    bar: Option<ProgressBar>,
    told: Instant,
}

impl Show {
    pub(super) fn new(json: bool) -> Show {
        Show {
            json,
            bar: None,
            told: Instant::now(),
        }
    }

    /// A line for a person.
    fn say(&self, line: String) {
        match &self.bar {
            _ if self.json => {}
            Some(bar) => bar.suspend(|| eprintln!("{line}")),
            None => eprintln!("{line}"),
        }
    }

    /// What was read.
    pub(super) fn data(
        &self,
        report: &Report,
        windows: &Windows,
        evaluation: &Windows,
    ) -> Result<()> {
        if self.json {
            return output::json(&json!({
                "event": "data", "report": report, "windows": windows.len(), "tokens": windows.tokens(), "targets": windows.targets(),
                "evaluation_windows": evaluation.len(), "evaluation_targets": evaluation.targets(),
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
            (evaluation.targets(), "tokens to evaluate with"),
        ] {
            if count > 0 {
                line.push_str(&format!("; {count} {what}"));
            }
        }
        self.say(line);
        Ok(())
    }

    /// What begins.
    pub(super) fn begin(&mut self, trainer: &Trainer, resumed: bool) -> Result<()> {
        let (config, parameters) = (trainer.config(), trainer.parameters());
        if self.json {
            return output::json(&json!({
                "event": "begin", "resumed": resumed, "step": trainer.steps(), "steps": config.steps, "device": trainer.device().name(),
                "parameters": parameters.trained(), "state_bytes": parameters.bytes(), "config": config,
            }));
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
        if std::io::stderr().is_terminal() {
            let style = "{pos}/{len} [{elapsed_precise}] [{bar:30}] {msg} ({eta})";
            let style = ProgressStyle::with_template(style)
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = ProgressBar::new(config.steps).with_style(style);
            bar.set_position(trainer.steps());
            bar.reset_eta();
            self.bar = Some(bar);
        }
        Ok(())
    }

    pub(super) fn event(&mut self, event: &Event<'_>) {
        if self.json {
            // A reader that has gone ends the command; nothing else can fail here that a log could help with.
            if let Err(e) = output::json(event) {
                eprintln!("nvfp4: {e}");
            }
            return;
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
                if let Some(bar) = &self.bar {
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
                delivered,
                stored,
            } if delivered == stored => {
                self.say(format!("step {step}: evaluation loss {delivered:.4}"));
            }
            Event::Evaluation {
                step,
                delivered,
                stored,
            } => self.say(format!(
                "step {step}: evaluation loss {delivered:.4} as delivered, {stored:.4} as stored"
            )),
            Event::Sample {
                step,
                prompt,
                answer,
            } => self.say(format!("step {step}: {prompt:?} -> {answer:?}")),
            Event::Checkpoint { step, path } => {
                self.say(format!("step {step}: checkpoint {}", path.display()));
            }
            Event::Warning { step, message } => {
                self.say(format!("warning at step {step}: {message}"))
            }
        }
    }

    /// The run was stopped.
    pub(super) fn stopped(&mut self, trainer: &Trainer, out: &Path) -> Result<()> {
        self.end();
        if self.json {
            return output::json(&ended(Ending::Stopped, trainer, Some(out)));
        }
        if trainer.steps() == 0 {
            return output::line("stopped before the first step; the same command begins again");
        }
        output::line(format_args!(
            "stopped after step {} of {}; the same command with --resume goes on",
            trainer.steps(),
            trainer.config().steps
        ))
    }

    /// What was trained is there.
    pub(super) fn finished(
        &mut self,
        trainer: &Trainer,
        delivery: &Delivery,
        talks: bool,
    ) -> Result<()> {
        self.end();
        if self.json {
            let place = delivery.adapter.as_ref().or(delivery.model.as_ref());
            let mut said = ended(Ending::Finished, trainer, place.map(PathBuf::as_path));
            if delivery.adapter.is_some() {
                said["merged"] = json!(delivery.model.as_deref().map(shown));
            }
            return output::json(&said);
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

/// A number of parameters, for a person.
fn count(parameters: usize) -> String {
    match parameters as f64 {
        few if few < 1e6 => format!("{:.1} k", few / 1e3),
        many => format!("{:.1} M", many / 1e6),
    }
}

/// A path as text, which JSON is.
fn shown(path: &Path) -> String {
    model::shown(path.as_os_str())
}

/// What a run with `--json` says at its end.
fn ended(ending: Ending, trainer: &Trainer, place: Option<&Path>) -> Value {
    json!({
        "event": "end", "ending": ending, "step": trainer.steps(), "skipped": trainer.skipped(), "path": place.map(shown),
        "state_bytes": trainer.parameters().bytes(), "peak_bytes": account::total().peak,
    })
}
