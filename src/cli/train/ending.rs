//! How the command ends: signals, the command to resume, and the exit code.

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

/// Offset of exit codes that represent a signal, as in shells.
const SIGNALLED: u8 = 128;

/// Handles signals until dropped: the first one ends a run after its step, the second one ends the command at once.
pub(super) struct Signals {
    first: Arc<AtomicI32>,
    _taken: OnSignal,
}

impl Signals {
    /// Sets `stop` at the first signal, and reports it with `say` at once, on the signal thread.
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

    /// The exit code for this ending.
    pub(super) fn code(&self, ending: Ending) -> ExitCode {
        let signal = self.first.load(Ordering::Relaxed);
        match (ending, u8::try_from(signal)) {
            (Ending::Diverged, _) => ExitCode::FAILURE,
            // A stop by the file named stop involves no signal.
            (Ending::Stopped, Ok(signal @ 1..)) => ExitCode::from(SIGNALLED + signal),
            _ => ExitCode::SUCCESS,
        }
    }
}

/// Result of a run, for its last lines.
pub(super) struct End {
    pub(super) ending: Ending,
    pub(super) reason: Option<String>,
    /// Steps taken, and the total number of steps.
    pub(super) step: u64,
    pub(super) steps: u64,
    pub(super) skipped: u64,
    pub(super) state_bytes: usize,
    /// Loss and divergence on the deciding set before the first step, with the delivered weights.
    pub(super) start: Option<Score>,
    /// Loss and divergence of the delivered model, and its step.
    pub(super) delivered: Option<Score>,
    pub(super) delivered_step: u64,
    /// The best evaluation, if its model is delivered.
    pub(super) best: Option<Best>,
    /// The losses before the first step and of the delivered model if the latter is worse, and the name of the loss.
    pub(super) worse: Option<(f64, f64)>,
    pub(super) measure: &'static str,
    /// The step of the last checkpoint.
    pub(super) saved: Option<u64>,
    /// The command that resumes from there, or starts again.
    pub(super) again: String,
}

impl End {
    /// The end of a run that has delivered nothing yet.
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

    /// Records that the model of the best evaluation is delivered.
    pub(super) fn delivers(&mut self, best: Best) {
        self.delivered = Some(best.score());
        self.delivered_step = best.step;
        self.best = Some(best);
    }
}

/// The command line of this process, quoted for a shell, changed so that it resumes the run: with `--resume`, and without an earlier
/// checkpoint.
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

/// Quotes a word for a shell. Bytes that are not UTF-8 become U+FFFD.
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
