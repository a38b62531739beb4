//! Failures of requests, and how long to retry: transient failures are retried until patience runs out, which every byte
//! that arrives renews.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use NVFP4::base::error::err;
use NVFP4::base::{Error, Result};

/// Why a request failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The server asks to retry later.
    Refused {
        /// The message.
        reason: String,
        /// The wait that it asks for.
        wait: Option<Duration>,
    },
    /// A response broke off.
    Broken {
        /// The message.
        reason: String,
    },
    /// There was no response at all.
    Silent {
        /// The message.
        reason: String,
        /// Whether that was a timeout.
        waited: bool,
    },
    /// Retrying does not help.
    Final(Error),
}

/// The result of a request that may be retried.
pub(super) type Tried<T> = std::result::Result<T, Failure>;

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Final(error)
    }
}

/// Failures in a row without progress after which a pull is given up: about a minute.
const LIMIT: u32 = 9;

/// The same for a hub that has not responded yet: most likely there is no network, which the user should learn soon.
const LIMIT_BEFORE_FIRST_ANSWER: u32 = 3;

/// The longest wait that a server may ask for: the hub counts requests in windows of five minutes.
const LONGEST_WAIT: Duration = Duration::from_secs(330);

/// The number of failures since the last progress. Shared by all connections of a pull: simultaneous failures count as one,
/// and all connections wait together.
#[derive(Default)]
pub(super) struct Patience {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    failures: u32,
    /// When the pause after the last of them ends.
    pause_ends: Option<Instant>,
    /// Whether any server has responded yet.
    answered: bool,
}

impl Patience {
    /// Records progress: the next failure counts as the first again.
    pub(super) fn renew(&self) {
        *self.lock() = State {
            answered: true,
            ..State::default()
        };
    }

    /// How long to wait before the next try, and why; or the error, if the failure is final or patience has run out.
    pub(super) fn after(&self, failure: Failure) -> Result<(Duration, String)> {
        self.after_at(failure, Instant::now())
    }

    fn after_at(&self, failure: Failure, now: Instant) -> Result<(Duration, String)> {
        let mut state = self.lock();
        let unheard = !state.answered;
        let (reason, wait, limit) = match failure {
            Failure::Final(error) => return Err(error),
            Failure::Silent { reason, waited } if unheard && waited => {
                return Err(err!(Io, "{reason}"));
            }
            Failure::Silent { reason, .. } if unheard => (reason, None, LIMIT_BEFORE_FIRST_ANSWER),
            Failure::Silent { reason, .. } | Failure::Broken { reason } => (reason, None, LIMIT),
            Failure::Refused { reason, wait } => {
                state.answered = true;
                (reason, wait, LIMIT)
            }
        };
        if let Some(wait) = wait.filter(|w| *w > LONGEST_WAIT) {
            return Err(err!(
                Io,
                "{reason}; it asks to wait {} minutes, so try again then",
                wait.as_secs().div_ceil(60)
            ));
        }
        let left = state
            .pause_ends
            .and_then(|end| end.checked_duration_since(now));
        if let Some(left) = left.filter(|left| !left.is_zero()) {
            return Ok((left.max(wait.unwrap_or_default()), reason));
        }
        state.failures += 1;
        let number = state.failures;
        if number >= limit {
            return Err(match unheard {
                true => err!(Io, "{reason}"),
                false => err!(
                    Io,
                    "{reason} ({number} times in a row; what has come is kept, and the next pull goes on from there)"
                ),
            });
        }
        let pause = wait.unwrap_or_else(|| pause(number));
        state.pause_ends = Some(now + pause);
        Ok((pause, reason))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The pause after the `number`-th failure in a row if the server asks for none: 0.1 s, doubled each time.
fn pause(number: u32) -> Duration {
    Duration::from_millis(100 << (number - 1).min(8))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(wait: Option<u64>) -> Failure {
        Failure::Refused {
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

    /// Meets `count` failures, each after the pause for the one before. Returns the pauses.
    fn pauses(patience: &Patience, count: u32, failure: impl Fn() -> Failure) -> Vec<Duration> {
        let mut now = Instant::now();
        (0..count)
            .map(|_| {
                let (pause, _) = patience.after_at(failure(), now).unwrap();
                now += pause;
                pause
            })
            .collect()
    }

    /// A time at which no pause lasts any more.
    fn later() -> Instant {
        Instant::now() + Duration::from_secs(3600)
    }

    #[test]
    fn patience_ends_and_is_renewed() {
        let patience = Patience::default();
        for round in 0..3 {
            let waits = pauses(&patience, LIMIT - 1, || refused(None));
            assert!(waits.is_sorted(), "round {round}: {waits:?}");
            assert_eq!(waits[0], Duration::from_millis(100));
            let total: Duration = waits.iter().sum();
            assert!(
                total > Duration::from_secs(20) && total < Duration::from_secs(60),
                "{total:?}"
            );
            patience.renew();
        }
        pauses(&patience, LIMIT - 1, || refused(None));
        let error = patience.after_at(refused(None), later()).unwrap_err();
        assert!(
            error.message().starts_with("the hub answers 503 (9 times"),
            "{error}"
        );
    }

    #[test]
    fn simultaneous_failures_count_as_one() {
        let patience = Patience::default();
        patience.renew();
        let mut now = Instant::now();
        for number in 1..LIMIT {
            let broken = || Failure::Broken {
                reason: "the line is cut".to_owned(),
            };
            let (pause, _) = patience.after_at(broken(), now).unwrap();
            assert_eq!(pause, super::pause(number));
            for _ in 0..20 {
                now += pause / 30;
                let (left, _) = patience.after_at(broken(), now).unwrap();
                assert!(left < pause);
            }
            now += pause;
        }
    }

    #[test]
    fn a_hub_that_never_answered_is_given_up_early() {
        let patience = Patience::default();
        pauses(&patience, LIMIT_BEFORE_FIRST_ANSWER - 1, || silent(false));
        let gives_up = |result: Result<(Duration, String)>, words: &str| {
            let error = result.unwrap_err();
            assert!(error.message().contains(words), "{error}");
        };
        gives_up(patience.after_at(silent(false), later()), "no connection");
        let patience = Patience::default();
        patience.renew();
        pauses(&patience, LIMIT - 1, || silent(false));
        gives_up(
            patience.after_at(silent(false), later()),
            "9 times in a row",
        );
        gives_up(Patience::default().after(silent(true)), "no connection");
    }

    #[test]
    fn servers_may_ask_for_a_wait_but_not_for_any() {
        let patience = Patience::default();
        let waited = patience.after(refused(Some(17))).unwrap().0;
        assert_eq!(waited, Duration::from_secs(17));
        let error = patience.after(refused(Some(3600))).unwrap_err();
        assert!(error.message().contains("60 minutes"), "{error}");
    }
}
