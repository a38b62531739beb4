//! The start of a run: new, or from a checkpoint; and the settings that may have changed since.

use std::fs;
use std::path::{Path, PathBuf};

use NVFP4::base::error::{bail, err};
use NVFP4::base::{Error, Result, directory};
use NVFP4::train::run::{CHECKPOINTS, LOCK, RunLock};
use NVFP4::train::{Config, checkpoint};
use serde_json::Value;

use super::delivery::{ADAPTER, MODEL};
use super::options::Args;
use super::writing;

const TABLE: &str = "loss.csv";
/// Prefix, before a number, of the directory for files set aside when a run resumes from an earlier checkpoint.
const ASIDE: &str = "aside-";
/// Prefixes of the settings that a resumed run may change: length and speed of the run, and its use of memory. Storage and choice of
/// parameters are fixed by the checkpoint.
const FREE: [&str; 9] = [
    "steps",
    "optimizer.",
    "schedule.",
    "recipe.clip",
    "recipe.release",
    "recompute",
    "head_chunk",
    "offload",
    "patience",
];

/// The starting point of a run.
pub(super) enum Begin {
    Anew,
    /// At the last of the run's checkpoints.
    Last,
    /// At a given checkpoint, of this or another run.
    Earlier {
        place: PathBuf,
        step: u64,
        own: bool,
    },
}

impl Args {
    /// Whether the command resumes a run.
    pub(super) fn goes_on(&self) -> bool {
        self.resume || self.resume_from.is_some()
    }

    fn checkpoints(&self) -> PathBuf {
        self.out.join(CHECKPOINTS)
    }

    /// The starting point, and the lock on OUT if it contains a run.
    pub(super) fn begin(&self) -> Result<(Begin, Option<RunLock>)> {
        if RunLock::is_in(&self.out) {
            let lock = RunLock::take(&self.out)?;
            return Ok((self.beginning()?, Some(lock)));
        }
        let begin = self.beginning()?;
        directory::check_writable(&self.out).map_err(|e| e.within("--out"))?;
        Ok((begin, None))
    }

    /// Locks OUT, unless `lock` already holds it.
    pub(super) fn lock(&self, lock: Option<RunLock>) -> Result<RunLock> {
        if let Some(lock) = lock {
            return Ok(lock);
        }
        let lock = RunLock::take(&self.out)?;
        // Another run may have started in between.
        self.beginning()?;
        Ok(lock)
    }

    /// Refuses a directory with a run, unless that run is resumed, and a directory with other content.
    fn beginning(&self) -> Result<Begin> {
        let checkpoints = self.checkpoints();
        let all = checkpoint::list(&checkpoints)?;
        if let Some(from) = &self.resume_from {
            let begin = self.earlier(from.as_ref(), &all)?;
            if all.is_empty() {
                self.check_empty()?;
            }
            return Ok(begin);
        }
        match (all.last(), self.resume) {
            (Some(_), true) => Ok(Begin::Last),
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
            (None, false) => self.check_empty().map(|()| Begin::Anew),
        }
    }

    /// The checkpoint that `--resume-from` names.
    fn earlier(&self, from: &Path, all: &[(u64, PathBuf)]) -> Result<Begin> {
        let number = from.to_str().and_then(|text| text.parse::<u64>().ok());
        if let Some(number) = number {
            return match all.iter().find(|(step, _)| *step == number) {
                Some((step, place)) => Ok(Begin::Earlier {
                    place: place.clone(),
                    step: *step,
                    own: true,
                }),
                None => bail!(
                    NotFound,
                    "--resume-from {number}: there is no checkpoint of that step in {}, which has {}",
                    self.checkpoints().display(),
                    match all.is_empty() {
                        true => "none".to_owned(),
                        false => format!("those of {}", steps(all.iter().map(|(step, _)| *step))),
                    }
                ),
            };
        }
        let real = |path: &Path| fs::canonicalize(path).ok();
        let folder = real(from).and_then(|place| place.parent().map(Path::to_owned));
        Ok(Begin::Earlier {
            step: checkpoint::steps(from).map_err(|e| e.within("--resume-from"))?,
            place: from.to_owned(),
            own: folder.is_some() && folder == real(&self.checkpoints()),
        })
    }

    /// Refuses a directory with content that is not from a run.
    fn check_empty(&self) -> Result<()> {
        // A run that ended before its first checkpoint can lose only its table.
        if !self.out.exists() || self.out.join(TABLE).exists() {
            return Ok(());
        }
        if !self.out.is_dir() {
            bail!(
                InvalidArgument,
                "--out {} is not a directory; name a new one",
                self.out.display()
            );
        }
        // A run may start from rows that a teacher wrote.
        let own = [LOCK, writing::ROWS, writing::SETTINGS];
        let names = directory::names(&self.out)?;
        match names.iter().all(|name| own.contains(&name.as_str())) {
            true => Ok(()),
            false => bail!(
                InvalidArgument,
                "{} is not empty and holds no run; name a new directory for --out",
                self.out.display()
            ),
        }
    }
}

impl Begin {
    /// The checkpoint to start from, or the directory whose last checkpoint that is.
    pub(super) fn place(&self, args: &Args) -> Option<PathBuf> {
        match self {
            Begin::Anew => None,
            Begin::Last => Some(args.checkpoints()),
            Begin::Earlier { place, .. } => Some(place.clone()),
        }
    }

    /// Sets aside the files written after an earlier checkpoint when a run resumes from it, and describes them and their new place. Removes
    /// nothing. The table of losses continues in a copy.
    pub(super) fn set_aside(&self, args: &Args) -> Result<Option<String>> {
        let Begin::Earlier { place, step, own } = self else {
            return Ok(None);
        };
        let out = &args.out;
        let all = checkpoint::list(&args.checkpoints())?.into_iter();
        let later = all.filter(|(other, _)| !own || other > step);
        let mut moved: Vec<PathBuf> = later
            .filter_map(|(_, place)| Some(Path::new(CHECKPOINTS).join(place.file_name()?)))
            .collect();
        let others: &[&str] = match own {
            true => &[MODEL, ADAPTER],
            false => &[MODEL, ADAPTER, TABLE],
        };
        moved.extend(others.iter().map(PathBuf::from));
        moved.retain(|name| out.join(name).exists());
        let table = out.join(TABLE);
        let mut said = None;
        if !moved.is_empty() {
            let mut number = 1;
            let mut aside = out.join(format!("{ASIDE}{number}"));
            while aside.exists() {
                number += 1;
                aside = out.join(format!("{ASIDE}{number}"));
            }
            make(&aside.join(CHECKPOINTS))?;
            if *own && table.exists() {
                copy(&table, &aside.join(TABLE))?;
            }
            for name in &moved {
                let (from, to) = (out.join(name), aside.join(name));
                fs::rename(&from, &to).map_err(|e| {
                    let (from, to) = (from.display(), to.display());
                    Error::io(format_args!("moving {from} to {to}"), e)
                })?;
            }
            let names: Vec<String> = moved.iter().map(|n| n.display().to_string()).collect();
            said = Some(format!(
                "{} moved to {}: the run goes on from step {step}",
                names.join(", "),
                aside.display()
            ));
        }
        let place = fs::canonicalize(place).unwrap_or_else(|_| place.clone());
        let other = place.parent().and_then(Path::parent);
        if let Some(other) = other
            .map(|run| run.join(TABLE))
            .filter(|t| !own && t.exists())
        {
            copy(&other, &table)?;
        }
        Ok(said)
    }
}

fn make(directory: &Path) -> Result<()> {
    fs::create_dir_all(directory)
        .map_err(|e| Error::io(format_args!("making {}", directory.display()), e))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let copied = fs::copy(from, to).map(drop);
    copied.map_err(|e| {
        Error::io(
            format_args!("copying {} to {}", from.display(), to.display()),
            e,
        )
    })
}

/// Formats steps for a message.
fn steps(steps: impl Iterator<Item = u64>) -> String {
    let steps: Vec<String> = steps.map(|step| step.to_string()).collect();
    match &steps[..] {
        [] => String::new(),
        [one] => format!("step {one}"),
        [first @ .., last] => format!("steps {} and {last}", first.join(", ")),
    }
}

/// The differences between the settings of a checkpoint and those of the resumed run, if they are allowed. Fails on other differences.
pub(super) fn changes(saved: &Config, own: &Config) -> Result<Vec<String>> {
    check_teacher(saved, own)?;
    let value = |config: &Config| {
        serde_json::to_value(config).map_err(|e| err!(Internal, "writing settings: {e}"))
    };
    let mut differing = Vec::new();
    compare("", &value(saved)?, &value(own)?, &mut differing);
    let is_free = |name: &str| FREE.iter().any(|free| name.starts_with(free));
    let (free, fixed): (Vec<_>, Vec<_>) =
        differing.into_iter().partition(|(name, _)| is_free(name));
    let words = |all: Vec<(String, String)>| -> Vec<String> {
        all.into_iter()
            .map(|(name, values)| format!("{name} {values}"))
            .collect()
    };
    if !fixed.is_empty() {
        bail!(
            InvalidArgument,
            "the run that is to go on began with other settings: {}; give it the options that it began with, or another --out",
            words(fixed).join(", ")
        );
    }
    Ok(words(free))
}

/// Fails if the teacher differs from the checkpoint's.
fn check_teacher(saved: &Config, own: &Config) -> Result<()> {
    let of = |config: &Config| config.distillation.as_ref().map(|d| d.teacher.clone());
    match (of(saved), of(own)) {
        (Some(_), None) => bail!(
            InvalidArgument,
            "the run that is to go on learns from a teacher; name the same one by --teacher, or another --out"
        ),
        (None, Some(_)) => bail!(
            InvalidArgument,
            "the run that is to go on began without a teacher; leave --teacher out, or name another --out"
        ),
        (Some(then), Some(now)) if then != now => bail!(
            InvalidArgument,
            "the teacher is another model than the one that the run began with: its fingerprint is {} instead of {}",
            now.unwrap_or_default(),
            then.unwrap_or_default()
        ),
        _ => Ok(()),
    }
}

/// Collects differences between two values of the same structure: the name, and both values.
fn compare(name: &str, saved: &Value, own: &Value, differing: &mut Vec<(String, String)>) {
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
        (a, b) if a != b => differing.push((name.to_owned(), format!("{a}, and now {b}"))),
        _ => {}
    }
}
