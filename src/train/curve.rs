//! How losses went: a row of `loss.csv` a step, and a picture of them.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::base::Result;
use crate::base::error::{Error, bail};
use crate::base::file::{self, Temporary};

const TABLE: &str = "loss.csv";
const PICTURE: &str = "loss.svg";
const HEADER: &str = "step,tokens,loss,eval_loss_delivered,eval_loss_stored,rate,gradient_norm,changed,changed_delivered,tokens_per_second,seconds";
const COLUMNS: usize = 11;

/// A step in the table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The step, from 1.
    pub step: u64,
    /// Tokens of all steps up to it.
    pub tokens: u64,
    /// The mean cross-entropy of the step's targets, in nats.
    pub loss: f64,
    /// That of the evaluation's targets after the step, by what is delivered.
    pub eval_loss_delivered: Option<f64>,
    /// The same by all that is stored.
    pub eval_loss_stored: Option<f64>,
    /// The learning rate.
    pub rate: f64,
    /// The norm of the gradients before clipping.
    pub gradient_norm: f64,
    /// The share of trained weights that changed as they are stored.
    pub changed: f64,
    /// The share that changed as they are delivered.
    pub changed_delivered: f64,
    /// Tokens of the step over its seconds.
    pub tokens_per_second: f64,
    /// Seconds of all steps up to it, without those of evaluations, samples and checkpoints.
    pub seconds: f64,
}

impl Row {
    fn line(&self) -> String {
        let optional = |value: Option<f64>| value.map_or(String::new(), |v| v.to_string());
        format!(
            "{},{},{},{},{},{},{},{},{},{:.1},{:.3}",
            self.step,
            self.tokens,
            self.loss,
            optional(self.eval_loss_delivered),
            optional(self.eval_loss_stored),
            self.rate,
            self.gradient_norm,
            self.changed,
            self.changed_delivered,
            self.tokens_per_second,
            self.seconds
        )
    }

    fn parse(line: &str) -> Option<Row> {
        let fields: Vec<&str> = line.split(',').collect();
        let number = |i: usize| fields[i].parse::<f64>().ok();
        let optional = |i: usize| match fields[i] {
            "" => Some(None),
            _ => number(i).map(Some),
        };
        if fields.len() != COLUMNS {
            return None;
        }
        Some(Row {
            step: fields[0].parse().ok()?,
            tokens: fields[1].parse().ok()?,
            loss: number(2)?,
            eval_loss_delivered: optional(3)?,
            eval_loss_stored: optional(4)?,
            rate: number(5)?,
            gradient_norm: number(6)?,
            changed: number(7)?,
            changed_delivered: number(8)?,
            tokens_per_second: number(9)?,
            seconds: number(10)?,
        })
    }
}

/// The table and the picture of a run, in its directory.
pub struct Curve {
    directory: PathBuf,
    table: File,
    rows: Vec<Row>,
}

impl Curve {
    /// Goes on with the table in `directory` after the step `steps`: later rows are removed. Without a table, or after step 0, it begins one.
    pub fn open(directory: &Path, steps: u64) -> Result<Curve> {
        let place = directory.join(TABLE);
        let mut rows = Vec::new();
        if steps > 0 && place.exists() {
            let text = file::read_to_string(&place)
                .map_err(|e| Error::io(format_args!("reading {}", place.display()), e))?;
            let mut lines = text.lines();
            if lines.next() != Some(HEADER) {
                bail!(
                    CorruptFile,
                    "{} is no table of losses of this version; move it away",
                    place.display()
                );
            }
            // A step whose line was cut off is one that is taken again, or it is missing from the table.
            rows = lines
                .filter_map(Row::parse)
                .filter(|row| row.step <= steps)
                .collect();
        }
        let mut content = format!("{HEADER}\n");
        for row in &rows {
            content.push_str(&row.line());
            content.push('\n');
        }
        write_whole(&place, &content)?;
        let table = OpenOptions::new()
            .append(true)
            .open(&place)
            .map_err(|e| Error::io(format_args!("opening {}", place.display()), e))?;
        Ok(Curve {
            directory: directory.to_owned(),
            table,
            rows,
        })
    }

    /// The rows up to now.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Adds a row, which is in the file when this returns.
    pub fn push(&mut self, row: Row) -> Result<()> {
        self.rows.push(row);
        let line = row.line() + "\n";
        file::within_limit(|| self.table.write_all(line.as_bytes())).map_err(|e| {
            let place = self.directory.join(TABLE);
            Error::io(format_args!("writing {}", place.display()), e)
        })
    }

    /// Draws the picture anew.
    pub fn draw(&self) -> Result<()> {
        write_whole(&self.directory.join(PICTURE), &picture(&self.rows))
    }
}

/// Puts a file in its place as a whole.
pub(super) fn write_whole(place: &Path, content: &str) -> Result<()> {
    let file = Temporary::create(place, 0)?.filled(content.as_bytes())?;
    file.commit()
}

/// Points of a line that a picture shows at most.
const POINTS: usize = 600;
const WIDTH: f64 = 880.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 48.0;

const STYLE: &str = "text{font:12px system-ui,sans-serif;fill:#333}.axis{stroke:#333}.grid{stroke:#ddd}.line{fill:none;stroke-width:1.5}\
.train{stroke:#2a78c2}.delivered{stroke:#c2452a}.stored{stroke:#7a9a2a}.back{fill:#fff}\
@media(prefers-color-scheme:dark){text{fill:#ddd}.axis{stroke:#ddd}.grid{stroke:#444}.train{stroke:#6fb3f0}.delivered{stroke:#f08a6f}\
.stored{stroke:#b8d66f}.back{fill:#1b1b1b}}";

/// Of long runs, the means of neighbouring points.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let each = points.len().div_ceil(POINTS).max(1);
    points
        .chunks(each)
        .map(|part| {
            let n = part.len() as f64;
            let sum = part.iter().fold((0.0, 0.0), |s, p| (s.0 + p.0, s.1 + p.1));
            (sum.0 / n, sum.1 / n)
        })
        .collect()
}

/// Round numbers from `low` to `high`, some five of them.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|f| f * power);
    let step = step.into_iter().find(|&s| s >= rough).unwrap_or(power);
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    (first..=last).map(|i| i as f64 * step).collect()
}

fn picture(rows: &[Row]) -> String {
    let line = |value: &dyn Fn(&Row) -> Option<f64>| -> Vec<(f64, f64)> {
        let points = rows.iter().filter_map(|r| Some((r.step as f64, value(r)?)));
        points.filter(|(_, y)| y.is_finite()).collect()
    };
    let lines = [
        ("training", "train", thinned(&line(&|r| Some(r.loss)))),
        (
            "evaluation, as delivered",
            "delivered",
            line(&|r| r.eval_loss_delivered),
        ),
        (
            "evaluation, as stored",
            "stored",
            line(&|r| r.eval_loss_stored),
        ),
    ];
    let all = || lines.iter().flat_map(|(_, _, points)| points);
    let last = rows.last().map_or(1.0, |r| r.step as f64).max(2.0);
    let first = rows.first().map_or(1.0, |r| r.step as f64).min(last - 1.0);
    let mut low = all().map(|p| p.1).fold(f64::INFINITY, f64::min);
    let mut high = all().map(|p| p.1).fold(f64::NEG_INFINITY, f64::max);
    if !low.is_finite() {
        (low, high) = (0.0, 1.0);
    }
    let room = ((high - low) * 0.05).max(1e-3);
    (low, high) = (low - room, high + room);
    let x = |step: f64| LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT);
    let y = |loss: f64| HEIGHT - BOTTOM - (loss - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"Loss by step\">\n\
         <style>{STYLE}</style>\n<rect class=\"back\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>\n"
    );
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    // Writing to a string cannot fail.
    for tick in ticks(low, high) {
        let y = y(tick);
        let digits = if high - low < 0.5 { 3 } else { 2 };
        let _ = writeln!(
            out,
            "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{tick:.digits$}</text>",
            LEFT - 8.0,
            y + 4.0
        );
    }
    for tick in ticks(first, last) {
        if tick.fract() == 0.0 {
            let x = x(tick);
            let _ = writeln!(
                out,
                "<line class=\"axis\" x1=\"{x:.1}\" y1=\"{bottom}\" x2=\"{x:.1}\" y2=\"{:.1}\"/>\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{tick}</text>",
                bottom + 5.0,
                bottom + 20.0
            );
        }
    }
    let _ = writeln!(
        out,
        "<path class=\"axis\" fill=\"none\" d=\"M{LEFT} {TOP}V{bottom}H{right}\"/>\n\
         <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">step</text>\n\
         <text x=\"{LEFT}\" y=\"{:.1}\" text-anchor=\"end\">nats</text>",
        (LEFT + right) / 2.0,
        HEIGHT - 8.0,
        TOP - 12.0
    );
    let mut at = LEFT + 24.0;
    for (name, class, points) in &lines {
        if points.is_empty() {
            continue;
        }
        let path: Vec<String> = points
            .iter()
            .map(|&(step, loss)| format!("{:.1},{:.1}", x(step), y(loss)))
            .collect();
        let _ = writeln!(
            out,
            "<polyline class=\"line {class}\" points=\"{}\"/>\n<line class=\"line {class}\" x1=\"{at}\" y1=\"20\" x2=\"{}\" y2=\"20\"/>\
             <text x=\"{}\" y=\"24\">{name} {:.4}</text>",
            path.join(" "),
            at + 20.0,
            at + 26.0,
            points.last().map_or(f64::NAN, |p| p.1)
        );
        if *class != "train" {
            for &(step, loss) in points {
                let _ = writeln!(
                    out,
                    "<circle class=\"line {class}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"2\"/>",
                    x(step),
                    y(loss)
                );
            }
        }
        at += 250.0;
    }
    out.push_str("</svg>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(step: u64) -> Row {
        Row {
            step,
            tokens: 100 * step,
            loss: 3.0 / step as f64,
            eval_loss_delivered: step.is_multiple_of(2).then_some(2.5),
            eval_loss_stored: None,
            rate: 1e-5,
            gradient_norm: 0.125,
            changed: 0.03,
            changed_delivered: 0.001,
            tokens_per_second: 1234.5,
            seconds: 0.5 * step as f64,
        }
    }

    #[test]
    fn a_table_goes_on_after_any_step() {
        let directory = std::env::temp_dir().join(format!("nvfp4-curve-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let mut curve = Curve::open(&directory, 0).unwrap();
        (1..=5).for_each(|step| curve.push(row(step)).unwrap());
        drop(curve);
        // A line that was cut off.
        let place = directory.join(TABLE);
        let mut text = std::fs::read_to_string(&place).unwrap();
        text.push_str("6,600,0.5,,");
        std::fs::write(&place, text).unwrap();
        let mut curve = Curve::open(&directory, 3).unwrap();
        assert_eq!(curve.rows(), [row(1), row(2), row(3)]);
        curve.push(row(4)).unwrap();
        curve.draw().unwrap();
        let text = std::fs::read_to_string(&place).unwrap();
        assert_eq!(text.lines().count(), 5);
        assert!(text.starts_with(HEADER) && text.ends_with('\n'));
        let svg = std::fs::read_to_string(directory.join(PICTURE)).unwrap();
        assert_eq!(svg.matches("<polyline").count(), 2);
        std::fs::write(&place, "a,b\n").unwrap();
        assert!(Curve::open(&directory, 3).is_err());
        assert!(Curve::open(&directory, 0).unwrap().rows().is_empty());
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn pictures_of_little_and_of_much() {
        assert!(!picture(&[]).contains("NaN"));
        assert!(!picture(&[row(1)]).contains("NaN"));
        let many: Vec<Row> = (1..=10_000).map(row).collect();
        let drawn = picture(&many[..5000]);
        let train = drawn
            .lines()
            .find(|l| l.contains("line train\" points"))
            .unwrap();
        assert!(train.matches(',').count() <= POINTS && !drawn.contains("NaN"));
        assert_eq!(ticks(0.0, 10.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
    }
}
