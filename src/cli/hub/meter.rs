//! Progress of a pull: one bar for all of its bytes, which continues through retries, and a line for each longer wait.

use std::time::Duration;

use indicatif::ProgressBar;

use super::super::output;

/// Counts the bytes of one pull. Shared by all connections.
pub(super) struct Meter {
    bar: ProgressBar,
}

/// Waits shorter than this are not worth a line.
const LONG: Duration = Duration::from_secs(2);

impl Meter {
    pub(super) fn new(label: &str) -> Meter {
        Meter {
            bar: output::byte_bar(label.to_owned(), 0),
        }
    }

    /// A meter for `total` bytes, of which `found` are in the cache already.
    pub(super) fn start(&self, total: u64, found: u64) {
        self.bar.set_length(total);
        self.bar.set_position(found);
        // The rate and the remaining time count only bytes that are fetched now.
        self.bar.reset_eta();
        self.bar.enable_steady_tick(Duration::from_millis(200));
    }

    pub(super) fn add(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    /// Takes back bytes that turned out to be useless.
    pub(super) fn take_back(&self, bytes: u64) {
        self.bar.dec(bytes);
    }

    /// Prints a line about a wait, if it is long.
    pub(super) fn waits(&self, time: Duration, reason: &str) {
        if time >= LONG {
            self.note(format_args!(
                "{reason}; trying again in {} s",
                time.as_secs()
            ));
        }
    }

    /// A line on standard error, above the bar.
    pub(super) fn note(&self, text: impl std::fmt::Display) {
        self.bar.suspend(|| eprintln!("nvfp4: {text}"));
    }

    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
