//! Table of losses, `loss.csv`: a row for each step.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use super::row::{Columns, Losses, Row};
use crate::base::Result;
use crate::base::error::{Error, bail};
use crate::base::file::{self, Temporary};

const TABLE: &str = "loss.csv";
const HEADER: &str = "step,tokens,loss,eval_loss_delivered,eval_loss_stored,rate,gradient_norm,changed,changed_delivered,tokens_per_second,seconds";

/// The table of a run, in its directory.
pub struct Curve {
    directory: PathBuf,
    /// The names of the evaluation sets.
    sets: Vec<String>,
    /// Whether evaluations have divergences from a teacher.
    divergence: bool,
    /// Open while every row is in the file. Otherwise the next row writes the whole table.
    table: Option<File>,
    rows: Vec<Row>,
}

impl Curve {
    /// Goes on with the table in `directory` after the step `resumed`, if there is one: later rows are not part of it. Otherwise it begins
    /// one. `sets` are the names of the evaluation sets: the first has the columns that every table has. With a teacher, `divergence`, each
    /// set has two more at the end; a table with or without those is taken. Writes nothing yet.
    pub fn open(
        directory: &Path,
        resumed: Option<u64>,
        sets: &[String],
        divergence: bool,
    ) -> Result<Curve> {
        let place = directory.join(TABLE);
        let mut curve = Curve {
            directory: directory.to_owned(),
            sets: sets.to_vec(),
            divergence,
            table: None,
            rows: Vec::new(),
        };
        if let Some(last) = resumed
            && place.exists()
        {
            let text = file::read_to_string(&place)
                .map_err(|e| Error::io(format_args!("reading {}", place.display()), e))?;
            let mut lines = text.lines();
            let found = lines.next().unwrap_or_default();
            let kinds = [true, false].map(|divergence| curve.columns(divergence));
            let kind = kinds
                .into_iter()
                .find(|&columns| curve.header(columns) == found);
            let Some(columns) = kind else {
                bail!(
                    CorruptFile,
                    "{} is no table of this run's losses: it begins with {found:?}, and {:?} is right; move it away",
                    place.display(),
                    curve.header(curve.columns(divergence))
                );
            };
            // A step whose line was cut off is one that is taken again, or it is missing from the table.
            let rows = lines.filter_map(|line| Row::parse(line, columns));
            curve.rows = rows.filter(|row| row.step <= last).collect();
        }
        Ok(curve)
    }

    fn columns(&self, divergence: bool) -> Columns {
        Columns {
            more: self.sets.len().saturating_sub(1),
            divergence,
        }
    }

    fn header(&self, columns: Columns) -> String {
        let mut header = HEADER.to_owned();
        let others = || self.sets.iter().skip(1).map(|name| format!(":{name}"));
        let mut add = |what: &str, set: &str| {
            let _ = write!(
                header,
                ",eval_{what}_delivered{set},eval_{what}_stored{set}"
            );
        };
        others().for_each(|set| add("loss", &set));
        if columns.divergence {
            add("divergence", "");
            others().for_each(|set| add("divergence", &set));
        }
        header
    }

    /// The rows up to now.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Names of the evaluation sets. The first is the one of [`Row::eval_loss_delivered`], the others are those of [`Row::more`].
    pub fn sets(&self) -> &[String] {
        &self.sets
    }

    /// Adds a row, which is in the file when this returns. After a failure the next row brings those before it along.
    pub fn push(&mut self, row: Row) -> Result<()> {
        let line = row.line(self.columns(self.divergence)) + "\n";
        self.rows.push(row);
        let Some(table) = &mut self.table else {
            return self.write();
        };
        let written = file::within_limit(|| table.write_all(line.as_bytes()));
        written.map_err(|e| {
            self.table = None;
            let place = self.directory.join(TABLE);
            Error::io(format_args!("writing {}", place.display()), e)
        })
    }

    /// Gives the row of a step the losses of an evaluation that came later than it.
    pub(super) fn amend(&mut self, step: u64, losses: &[Losses]) -> Result<()> {
        if let Some(row) = self.rows.iter_mut().rfind(|row| row.step == step) {
            row.evaluated(losses);
        }
        self.write()
    }

    /// Writes the whole table.
    fn write(&mut self) -> Result<()> {
        self.table = None;
        let place = self.directory.join(TABLE);
        let columns = self.columns(self.divergence);
        let mut content = self.header(columns) + "\n";
        for row in &self.rows {
            content.push_str(&row.line(columns));
            content.push('\n');
        }
        write_whole(&place, &content)?;
        let table = OpenOptions::new().append(true).open(&place);
        self.table =
            Some(table.map_err(|e| Error::io(format_args!("opening {}", place.display()), e))?);
        Ok(())
    }
}

/// Puts a file in its place as a whole.
pub(super) fn write_whole(place: &Path, content: &str) -> Result<()> {
    let file = Temporary::create(place, 0)?.filled(content.as_bytes())?;
    file.commit()
}

#[cfg(test)]
mod tests {
    use super::super::row::example as row;
    use super::*;

    fn losses(delivered: f64) -> Losses {
        Losses {
            delivered,
            stored: delivered - 0.5,
            ..Losses::default()
        }
    }

    #[test]
    fn a_table_goes_on_after_any_step() {
        let directory = std::env::temp_dir().join(format!("nvfp4-curve-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let mut curve = Curve::open(&directory, None, &[], false).unwrap();
        (1..=5).for_each(|step| curve.push(row(step)).unwrap());
        drop(curve);
        // A line that was cut off.
        let place = directory.join(TABLE);
        let mut text = std::fs::read_to_string(&place).unwrap();
        text.push_str("6,600,0.5,,");
        std::fs::write(&place, text).unwrap();
        let mut curve = Curve::open(&directory, Some(3), &[], false).unwrap();
        assert_eq!(curve.rows(), [row(1), row(2), row(3)]);
        curve.push(row(4)).unwrap();
        let text = std::fs::read_to_string(&place).unwrap();
        assert_eq!(text.lines().count(), 5);
        assert!(text.starts_with(HEADER) && text.ends_with('\n'));
        std::fs::write(&place, "a,b\n").unwrap();
        assert!(Curve::open(&directory, Some(3), &[], false).is_err());
        let new = Curve::open(&directory, None, &[], false).unwrap();
        assert!(new.rows().is_empty());
        std::fs::remove_dir_all(&directory).unwrap();
    }

    /// The row before the first step has evaluations alone, and each set beside the first has columns of its own.
    #[test]
    fn evaluations_before_the_first_step_and_of_several_sets() {
        let directory = std::env::temp_dir().join(format!("nvfp4-sets-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let sets = ["eval".to_owned(), "a<b".to_owned()];
        let mut curve = Curve::open(&directory, None, &sets, false).unwrap();
        curve.push(Row::start(&[losses(4.0), losses(5.0)])).unwrap();
        curve.push(row(1)).unwrap();
        curve.push(row(2)).unwrap();
        curve.amend(2, &[losses(2.0), losses(3.0)]).unwrap();
        let text = std::fs::read_to_string(directory.join(TABLE)).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            format!("{HEADER},eval_loss_delivered:a<b,eval_loss_stored:a<b")
        );
        assert_eq!(lines[1], "0,0,,4,3.5,,,,,,0.000,5,4.5");
        assert!(lines[2].ends_with(",0.500,,"), "{}", lines[2]);
        let again = Curve::open(&directory, Some(2), &sets, false).unwrap();
        assert_eq!(again.rows()[1..], curve.rows()[1..]);
        assert_eq!(again.rows()[0].line(again.columns(false)), lines[1]);
        // A table with other sets is not gone on with.
        assert!(Curve::open(&directory, Some(2), &sets[..1], false).is_err());
        std::fs::remove_dir_all(&directory).unwrap();
    }

    /// Divergences stand behind all losses. A table without them is gone on with.
    #[test]
    fn divergences_of_several_sets() {
        let directory = std::env::temp_dir().join(format!("nvfp4-taught-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let sets = ["eval".to_owned(), "law".to_owned()];
        let mut before = Curve::open(&directory, None, &sets, false).unwrap();
        before
            .push(Row::start(&[losses(4.0), losses(5.0)]))
            .unwrap();
        let mut curve = Curve::open(&directory, Some(0), &sets, true).unwrap();
        assert_eq!(curve.rows()[0].first_losses(), Some(losses(4.0)));
        let taught = |delivered: f64| Losses {
            divergence_delivered: Some(delivered / 8.0),
            divergence_stored: Some(delivered / 16.0),
            ..losses(delivered)
        };
        curve.push(row(1)).unwrap();
        curve.amend(1, &[taught(2.0), taught(4.0)]).unwrap();
        let text = std::fs::read_to_string(directory.join(TABLE)).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            format!(
                "{HEADER},eval_loss_delivered:law,eval_loss_stored:law,eval_divergence_delivered,eval_divergence_stored,\
                 eval_divergence_delivered:law,eval_divergence_stored:law"
            )
        );
        assert_eq!(lines[1], "0,0,,4,3.5,,,,,,0.000,5,4.5,,,,");
        assert!(
            lines[2].ends_with(",4,3.5,0.25,0.125,0.5,0.25"),
            "{}",
            lines[2]
        );
        for divergence in [true, false] {
            let again = Curve::open(&directory, Some(1), &sets, divergence).unwrap();
            assert_eq!(again.rows()[1], curve.rows()[1]);
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
