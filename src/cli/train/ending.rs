//! How the command ends: what a signal does, how to go on, and the exit code.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use NVFP4::base::call::Cancel;
use NVFP4::base::leftover::{self, OnSignal};
use NVFP4::train::run::{Best, Ended, Ending};
use NVFP4::train::{Score, Trainer};

use super::teacher::measure;

/// Offset of exit codes that stand for a signal, as shells have it.
const SIGNALLED: u8 = 128;

/// The first signal ends a run after its step, the second ends the command at once; from now until this is dropped.
pub(super) struct Signals {
    first: Arc<AtomicI32>,
    _taken: OnSignal,
}

impl Signals {
    /// Sets `stop` at the first signal, and says so by `say` at once, on the thread of signals.
    pub(super) fn new(stop: &Cancel, say: impl FnOnce(&str, &str) + Send + 'static) -> Signals {
        let first = Arc::new(AtomicI32::new(0));
        let (stop, number) = (stop.clone(), Arc::clone(&first));
        let taken = leftover::on_signal(move |signal| {
            number.store(signal, Ordering::Relaxed);
            stop.cancel();
            say(
                leftover::signal_name(signal),
                "the run ends after this step, with a checkpoint; a second signal ends it at once, and leaves the last checkpoint",
            );
        });
        Signals {
            first,
            _taken: taken,
        }
    }

    /// The exit code of a run that ended so.
    pub(super) fn code(&self, ending: Ending) -> ExitCode {
        let signal = self.first.load(Ordering::Relaxed);
        match (ending, u8::try_from(signal)) {
            (Ending::Diverged, _) => ExitCode::FAILURE,
            // By the file named stop there is no signal.
            (Ending::Stopped, Ok(signal @ 1..)) => ExitCode::from(SIGNALLED + signal),
            _ => ExitCode::SUCCESS,
        }
    }
}

/// Result of a run, for its last lines.
pub(super) struct End {
    pub(super) ending: Ending,
    pub(super) reason: Option<String>,
    /// Steps taken, and those that there are.
    pub(super) step: u64,
    pub(super) steps: u64,
    pub(super) skipped: u64,
    pub(super) state_bytes: usize,
    /// The loss and the divergence of the deciding set before the first step, as delivered.
    pub(super) start: Option<Score>,
    /// The loss and the divergence of what is delivered, and the step that they are of.
    pub(super) delivered: Option<Score>,
    pub(super) delivered_step: u64,
    /// The best evaluation, where that is what is delivered.
    pub(super) best: Option<Best>,
    /// The losses before the first step and of what is delivered, if it is worse, and the name of such a loss.
    pub(super) worse: Option<(f64, f64)>,
    pub(super) measure: &'static str,
    /// The step of the last checkpoint.
    pub(super) saved: Option<u64>,
    /// The command that goes on from there, or begins again.
    pub(super) again: String,
}

impl End {
    /// Result of a run that has delivered nothing yet.
    pub(super) fn new(ended: &Ended, trainer: &Trainer) -> End {
        let (start, delivered) = ended.scores();
        End {
            ending: ended.ending,
            reason: ended.reason.clone(),
            step: trainer.steps(),
            steps: trainer.config().steps,
            skipped: trainer.skipped(),
            state_bytes: trainer.parameters().bytes(),
            start,
            delivered,
            delivered_step: trainer.steps(),
            best: None,
            worse: None,
            measure: measure(trainer.config()),
            saved: ended.saved,
            again: command(ended.saved.is_some()),
        }
    }

    /// The best evaluation is what is delivered.
    pub(super) fn delivers(&mut self, best: Best) {
        self.delivered = Some(best.score());
        self.delivered_step = best.step;
        self.best = Some(best);
    }
}

/// The command line of this process as a shell takes it, so that it goes on with the run: with `--resume`, and from no earlier checkpoint.
fn command(resumes: bool) -> String {
    let given: Vec<OsString> = std::env::args_os().collect();
    let words = resuming(&given, resumes);
    let quoted: Vec<String> = words.iter().map(|word| quoted(word)).collect();
    quoted.join(" ")
}

fn resuming(given: &[OsString], resumes: bool) -> Vec<OsString> {
    const FROM: &str = "--resume-from";
    let mut words = Vec::new();
    let mut given = given.iter();
    while let Some(word) = given.next() {
        let bytes = word.as_bytes();
        if bytes == FROM.as_bytes() {
            given.next();
        } else if bytes != b"--resume" && !bytes.starts_with(b"--resume-from=") {
            words.push(word.clone());
        }
    }
    if resumes {
        words.push("--resume".into());
    }
    words
}

/// A word as a shell takes it. Bytes that are not UTF-8 are U+FFFD.
fn quoted(word: &OsStr) -> String {
    let is_plain = |b: &u8| {
        b.is_ascii_alphanumeric()
            || matches!(
                b,
                b'-' | b'_' | b'.' | b'/' | b'=' | b':' | b',' | b'@' | b'+' | b'%'
            )
    };
    let bytes = word.as_bytes();
    if !bytes.is_empty() && bytes.iter().all(is_plain) {
        return word.to_string_lossy().into_owned();
    }
    let mut text = Vec::from(b"'");
    for &byte in bytes {
        match byte {
            b'\'' => text.extend_from_slice(b"'\\''"),
            byte => text.push(byte),
        }
    }
    text.push(b'\'');
    OsString::from_vec(text).to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_that_goes_on() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let of = |text: &str, resumes| resuming(&words(text), resumes);
        assert_eq!(
            of("nvfp4 train --out a", true),
            words("nvfp4 train --out a --resume")
        );
        assert_eq!(
            of("nvfp4 train --out a", false),
            words("nvfp4 train --out a")
        );
        let goes_on = words("nvfp4 train --out a --resume");
        assert_eq!(
            of("nvfp4 train --resume --resume-from 3 --out a", true),
            goes_on
        );
        assert_eq!(
            of("nvfp4 train --resume-from=3 --out a --resume", true),
            goes_on
        );
        let shell = |text: &str| quoted(OsStr::new(text));
        assert_eq!(shell("a/b.tsv"), "a/b.tsv");
        assert_eq!(shell("it's $HOME"), "'it'\\''s $HOME'");
        assert_eq!(shell(""), "''");
    }
}
