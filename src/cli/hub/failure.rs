//! What can go wrong with a request, and how long to go on trying: failures that pass are met with patience, which every byte
//! that arrives renews.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use NVFP4::base::error::err;
use NVFP4::base::{Error, Result};

/// Why a request did not give what was asked for.
#[derive(Debug)]
pub(super) enum Failure {
    /// The same request may work a moment later: an answer broke off, or asks to come again.
    Passing {
        /// What happened, for people.
        reason: String,
        /// How long the server asks to wait.
        wait: Option<Duration>,
    },
    /// No answer came at all.
    Silent {
        /// What happened, for people.
        reason: String,
        /// Whether that took all the time that an answer may take.
        waited: bool,
    },
    /// Trying again does not help.
    Final(Error),
}

/// What a request gives that may be tried again.
pub(super) type Tried<T> = std::result::Result<T, Failure>;

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Final(error)
    }
}

/// Failures in a row, with nothing gained between them, after which a pull is given up: about a minute.
const LIMIT: u32 = 9;

/// The same for a hub that has not said anything yet: most likely there is no network, and somebody waits to hear that.
const LIMIT_BEFORE_FIRST_ANSWER: u32 = 3;

/// The longest wait that a server may ask for: the hub counts requests in windows of five minutes.
const LONGEST_WAIT: Duration = Duration::from_secs(330);

/// How often requests have failed since something was gained. Shared by all connections of a pull.
#[derive(Default)]
pub(super) struct Patience {
    failures: AtomicU32,
    answered: AtomicBool,
}

impl Patience {
    /// Something was gained: the next failure is the first again.
    pub(super) fn renew(&self) {
        // Called for every piece of a body; a store that changes nothing would still take the cache line from others.
        if self.failures.load(Relaxed) != 0 {
            self.failures.store(0, Relaxed);
        }
        if !self.answered.load(Relaxed) {
            self.answered.store(true, Relaxed);
        }
    }

    /// How long to wait before the next try, and why; or the error, if the failure is final or patience is at its end.
    pub(super) fn after(&self, failure: Failure) -> Result<(Duration, String)> {
        let unheard = !self.answered.load(Relaxed);
        let (reason, wait, limit) = match failure {
            Failure::Final(error) => return Err(error),
            Failure::Silent { reason, waited } if unheard && waited => {
                return Err(err!(Io, "{reason}"));
            }
            Failure::Silent { reason, .. } if unheard => (reason, None, LIMIT_BEFORE_FIRST_ANSWER),
            Failure::Silent { reason, .. } => (reason, None, LIMIT),
            Failure::Passing { reason, wait } => {
                self.answered.store(true, Relaxed);
                (reason, wait, LIMIT)
            }
        };
        let number = self.failures.fetch_add(1, Relaxed) + 1;
        if number >= limit {
            return Err(match unheard {
                true => err!(Io, "{reason}"),
                false => err!(
                    Io,
                    "{reason} ({number} times in a row; what has come is kept, and the next pull goes on from there)"
                ),
            });
        }
        if let Some(wait) = wait.filter(|w| *w > LONGEST_WAIT) {
            return Err(err!(
                Io,
                "{reason}; it asks to wait {} minutes, so try again then",
                wait.as_secs().div_ceil(60)
            ));
        }
        Ok((wait.unwrap_or_else(|| pause(number)), reason))
    }
}

/// The pause after the `number`-th failure in a row where the server asks for none: 0.1 s, doubled each time.
fn pause(number: u32) -> Duration {
    Duration::from_millis(100 << (number - 1).min(8))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passing(wait: Option<u64>) -> Failure {
        Failure::Passing {
            reason: "the hub answers 503".to_owned(),
            wait: wait.map(Duration::from_secs),
        }
    }

    fn silent(waited: bool) -> Failure {
        Failure::Silent {
            reason: "no connection".to_owned(),
            waited,
        }
    }

    #[test]
    fn patience_ends_and_is_renewed() {
        let patience = Patience::default();
        for round in 0..3 {
            let waits: Vec<Duration> = (1..LIMIT)
                .map(|_| patience.after(passing(None)).unwrap().0)
                .collect();
            assert!(waits.is_sorted(), "round {round}: {waits:?}");
            assert_eq!(waits[0], Duration::from_millis(100));
            let total: Duration = waits.iter().sum();
            assert!(
                total > Duration::from_secs(20) && total < Duration::from_secs(60),
                "{total:?}"
            );
            patience.renew();
        }
        for _ in 1..LIMIT {
            patience.after(passing(None)).unwrap();
        }
        let error = patience.after(passing(None)).unwrap_err();
        assert!(
            error.message().starts_with("the hub answers 503 (9 times"),
            "{error}"
        );
    }

    #[test]
    fn a_hub_that_never_answered_is_given_up_early() {
        let patience = Patience::default();
        for _ in 1..LIMIT_BEFORE_FIRST_ANSWER {
            patience.after(silent(false)).unwrap();
        }
        assert!(patience.after(silent(false)).is_err());
        let patience = Patience::default();
        patience.renew();
        for _ in 1..LIMIT {
            patience.after(silent(false)).unwrap();
        }
        assert!(patience.after(silent(false)).is_err());
        assert!(Patience::default().after(silent(true)).is_err());
    }

    #[test]
    fn servers_may_ask_for_a_wait_but_not_for_any() {
        let patience = Patience::default();
        let waited = patience.after(passing(Some(17))).unwrap().0;
        assert_eq!(waited, Duration::from_secs(17));
        let error = patience.after(passing(Some(3600))).unwrap_err();
        assert!(error.message().contains("60 minutes"), "{error}");
    }
}
