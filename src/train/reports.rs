//! Report files of a run, and the picture that its observer draws. A file that cannot be written, as on a full disk, is no reason to end
//! a run: it is a warning the first time, and counted from then on.

use std::path::{Path, PathBuf};

use super::curve::Curve;
use super::event::Observer;
use super::memory::MemoryReport;
use super::row::{Losses, Row};
use super::tensorboard::EventFile;
use crate::base::Result;
use crate::base::memory as account;

/// The files of a run.
pub(super) struct Reports {
    directory: PathBuf,
    sets: Vec<String>,
    curve: Curve,
    events: Option<EventFile>,
    /// Whether there should be events, and after which step a run was resumed.
    wants_events: bool,
    resumed: Option<u64>,
    /// Reports that could not be written.
    failed: u64,
}

impl Reports {
    /// Goes on with those in `directory` after the step `resumed`, or begins them. `sets` are the names of the evaluation sets, which have a
    /// `divergence` with a teacher.
    pub(super) fn open(
        directory: &Path,
        resumed: Option<u64>,
        (sets, divergence): (Vec<String>, bool),
        wants_events: bool,
    ) -> Result<Reports> {
        Ok(Reports {
            directory: directory.to_owned(),
            curve: Curve::open(directory, resumed, &sets, divergence)?,
            sets,
            events: None,
            wants_events,
            resumed,
            failed: 0,
        })
    }

    /// The losses of the deciding set before the first step, if the table has them.
    pub(super) fn start(&self) -> Option<Losses> {
        let row = self.curve.rows().first().filter(|row| row.step == 0)?;
        row.first_losses()
    }

    /// The warning of a report that failed, if it is the first.
    fn noted(&mut self, written: Result<()>) -> Option<String> {
        let error = written.err()?;
        self.failed += 1;
        (self.failed == 1).then(|| {
            format!("a report could not be written, and training goes on: {error}; others that fail are counted")
        })
    }

    /// Number of reports that could not be written.
    pub(super) fn failed(&self) -> u64 {
        self.failed
    }

    /// Adds the row of a step, with the losses of all sets if they were evaluated. The observer draws the table then.
    pub(super) fn add(
        &mut self,
        row: Row,
        losses: &[Losses],
        observer: &mut dyn Observer,
    ) -> Option<String> {
        let events = self.events_of(&row, losses);
        let step = row.step;
        let pushed = self.curve.push(row);
        let drawn = match losses {
            [] => Ok(()),
            _ => observer.draw(&self.curve),
        };
        let first = self.noted(pushed);
        let second = self.noted(drawn);
        let told = self.tell(step, &events);
        let third = self.noted(told);
        first.or(second).or(third)
    }

    /// Adds the losses of an evaluation after a step whose row is there, as where a run was stopped before it.
    pub(super) fn amend(
        &mut self,
        step: u64,
        losses: &[Losses],
        observer: &mut dyn Observer,
    ) -> Option<String> {
        let written = self
            .curve
            .amend(step, losses)
            .and_then(|()| observer.draw(&self.curve));
        let first = self.noted(written);
        let told = self.tell(step, &self.events_of_sets(losses));
        first.or(self.noted(told))
    }

    /// Has the table drawn for the last time.
    pub(super) fn draw(&mut self, observer: &mut dyn Observer) -> Option<String> {
        let drawn = observer.draw(&self.curve);
        self.noted(drawn)
    }

    /// Writes what memory the first step took.
    pub(super) fn memory(
        &mut self,
        report: &MemoryReport,
        (state_bytes, parameters, released): (usize, usize, bool),
    ) -> Option<String> {
        let written = report.write(&self.directory, state_bytes, parameters, released);
        self.noted(written)
    }

    fn tell(&mut self, step: u64, values: &[(String, f64)]) -> Result<()> {
        if !self.wants_events || values.is_empty() {
            return Ok(());
        }
        if self.events.is_none() {
            self.events = Some(EventFile::create(&self.directory, self.resumed)?);
        }
        match &mut self.events {
            Some(events) => events.add(step, values),
            None => Ok(()),
        }
    }

    fn events_of_sets(&self, losses: &[Losses]) -> Vec<(String, f64)> {
        let each = self.sets.iter().zip(losses);
        each.flat_map(|(set, l)| {
            let values = [
                ("delivered", Some(l.delivered)),
                ("stored", Some(l.stored)),
                ("divergence_delivered", l.divergence_delivered),
                ("divergence_stored", l.divergence_stored),
            ];
            let known = values.into_iter().filter_map(|(name, v)| Some((name, v?)));
            known.map(move |(name, value)| (format!("eval/{set}/{name}"), value))
        })
        .collect()
    }

    fn events_of(&self, row: &Row, losses: &[Losses]) -> Vec<(String, f64)> {
        let mut values = self.events_of_sets(losses);
        if row.step > 0 {
            let own = [
                ("train/loss", row.loss),
                ("rate", row.rate),
                ("gradient_norm", row.gradient_norm),
                ("changed", row.changed),
                ("changed_delivered", row.changed_delivered),
                ("tokens_per_second", row.tokens_per_second),
                ("memory", account::total().current as f64),
            ];
            values.extend(own.map(|(name, value)| (name.to_owned(), value)));
        }
        values
    }
}
