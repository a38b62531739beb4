//! Failures of requests, and the retry policy. Transient failures are retried until patience runs out: after a number of failures in a row,
//! or after the silence that the user allows. Every byte that arrives renews patience.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use NVFP4::base::error::err;
use NVFP4::base::{Error, Result};

/// The cause of a failed request.
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
    /// A response came to a halt.
    Stalled {
        /// The message.
        reason: String,
    },
    /// There was no response.
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

/// The limit for a hub that has not responded yet: most likely there is no network, which the user should learn soon.
const LIMIT_BEFORE_FIRST_ANSWER: u32 = 3;

/// The longest wait that a server may ask for: the hub counts requests in windows of five minutes.
const LONGEST_WAIT: Duration = Duration::from_secs(330);

/// The shortest time that a request may take.
const SHORTEST: Duration = Duration::from_millis(50);

/// Tolerance for the end of a silence, which all waiting connections reach at about the same time.
const SLACK: Duration = Duration::from_millis(20);

/// Longest last attempt, on new connections, after a silence: a connection may be dead while the server is not.
const LONGEST_LAST_TRY: Duration = Duration::from_secs(5);

/// The allowed silence, and the number of failures since the last progress. Shared by all connections of a pull: simultaneous failures
/// count as one, and all connections wait together.
pub(super) struct Patience {
    timeout: Duration,
    state: Mutex<State>,
}

struct State {
    failures: u32,
    /// End of the pause after the last failure.
    pause_ends: Option<Instant>,
    /// Whether any server has responded yet.
    answered: bool,
    /// Time of the last arrival of data.
    heard: Instant,
    /// Time of the first request since then.
    asked: Option<Instant>,
    /// End of the last attempt, while it runs.
    last_try_ends: Option<Instant>,
}

impl State {
    /// Time at which the silence has lasted too long.
    fn silence_ends(&self, timeout: Duration) -> Instant {
        let since = self.asked.unwrap_or(self.heard);
        self.last_try_ends.unwrap_or(since + timeout)
    }

    fn hear(&mut self, time: Instant) {
        self.heard = self.heard.max(time);
        self.asked = None;
        self.last_try_ends = None;
    }
}

impl Patience {
    /// Gives up after a silence of `timeout`.
    pub(super) fn new(timeout: Duration) -> Patience {
        Patience {
            timeout,
            state: Mutex::new(State {
                failures: 0,
                pause_ends: None,
                answered: false,
                heard: Instant::now(),
                asked: None,
                last_try_ends: None,
            }),
        }
    }

    /// The longest allowed silence.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Timeout of a request that is sent now, for its response and then for each piece of it: until the silence has lasted too long, if no
    /// other connection receives anything.
    pub(super) fn wait(&self, now: Instant) -> Duration {
        let mut state = self.lock();
        state.asked.get_or_insert(now);
        let end = state.silence_ends(self.timeout);
        end.saturating_duration_since(now).max(SHORTEST)
    }

    /// Records that data arrived, which need not be progress.
    pub(super) fn hear(&self) {
        self.lock().hear(Instant::now());
    }

    /// Records progress at `time`: the next failure counts as the first again.
    pub(super) fn renew(&self, time: Instant) {
        let mut state = self.lock();
        state.failures = 0;
        state.pause_ends = None;
        state.answered = true;
        state.hear(time);
    }

    /// The wait before the next attempt, and the reason; or the error, if the failure is final or patience has run out.
    pub(super) fn after(&self, failure: Failure) -> Result<(Duration, String)> {
        self.after_at(failure, Instant::now())
    }

    fn after_at(&self, failure: Failure, now: Instant) -> Result<(Duration, String)> {
        let mut state = self.lock();
        let unheard = !state.answered;
        let stalled = matches!(
            failure,
            Failure::Stalled { .. } | Failure::Silent { waited: true, .. }
        );
        let (reason, wait, limit) = match failure {
            Failure::Final(error) => return Err(error),
            Failure::Silent { reason, waited } if unheard && waited => {
                return Err(err!(Io, "{reason}"));
            }
            Failure::Silent { reason, .. } if unheard => (reason, None, LIMIT_BEFORE_FIRST_ANSWER),
            Failure::Silent { reason, .. }
            | Failure::Stalled { reason }
            | Failure::Broken { reason } => (reason, None, LIMIT),
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
        if let Some(wait) = wait {
            // A server that asks for time is not silent.
            state.hear(now + wait);
        }
        let kept = "what has come is kept, and the next pull goes on from there";
        let silence_ends = state.silence_ends(self.timeout);
        if stalled && now + SLACK >= silence_ends {
            if state.last_try_ends.is_some() {
                return Err(err!(Io, "{reason}; {kept}"));
            }
            state.last_try_ends = Some(now + (self.timeout / 2).min(LONGEST_LAST_TRY));
            return Ok((Duration::ZERO, reason));
        }
        let left = state
            .pause_ends
            .and_then(|end| end.checked_duration_since(now));
        if let Some(left) = left.filter(|left| !left.is_zero()) {
            return Ok((left.max(wait.unwrap_or_default()), reason));
        }
        state.failures += 1;
        let number = state.failures;
        if number >= limit || wait.is_none() && now >= silence_ends {
            return Err(match unheard {
                true => err!(Io, "{reason}"),
                false => err!(Io, "{reason} ({number} times in a row; {kept})"),
            });
        }
        // The last attempt before the silence has lasted too long is at its end.
        let pause = wait.unwrap_or_else(|| pause(number).min(silence_ends - now));
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

    fn patient() -> Patience {
        Patience::new(Duration::from_secs(30))
    }

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
        let patience = patient();
        for round in 0..3 {
            let waits = pauses(&patience, LIMIT - 1, || refused(None));
            assert!(waits.is_sorted(), "round {round}: {waits:?}");
            assert_eq!(waits[0], Duration::from_millis(100));
            let total: Duration = waits.iter().sum();
            assert!(
                total > Duration::from_secs(20) && total < Duration::from_secs(60),
                "{total:?}"
            );
            patience.renew(Instant::now());
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
        let patience = Patience::new(Duration::from_secs(600));
        patience.renew(Instant::now());
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
        let patience = patient();
        pauses(&patience, LIMIT_BEFORE_FIRST_ANSWER - 1, || silent(false));
        let gives_up = |result: Result<(Duration, String)>, words: &str| {
            let error = result.unwrap_err();
            assert!(error.message().contains(words), "{error}");
        };
        gives_up(patience.after_at(silent(false), later()), "no connection");
        let patience = patient();
        patience.renew(Instant::now());
        pauses(&patience, LIMIT - 1, || silent(false));
        gives_up(
            patience.after_at(silent(false), later()),
            "9 times in a row",
        );
        gives_up(patient().after(silent(true)), "no connection");
    }

    #[test]
    fn servers_may_ask_for_a_wait_but_not_for_any() {
        let patience = patient();
        let waited = patience.after(refused(Some(17))).unwrap().0;
        assert_eq!(waited, Duration::from_secs(17));
        let error = patience.after(refused(Some(3600))).unwrap_err();
        assert!(error.message().contains("60 minutes"), "{error}");
    }

    #[test]
    fn a_silence_ends_when_the_user_says_so() {
        let second = Duration::from_secs(1);
        let stalled = || Failure::Stalled {
            reason: "it sent nothing".to_owned(),
        };
        let patience = Patience::new(second);
        patience.renew(Instant::now());
        let start = Instant::now();
        // All connections wait for as long as is left, also those that ask later.
        assert_eq!(patience.wait(start), second);
        let later = start + second / 4;
        assert_eq!(patience.wait(later), second * 3 / 4);
        // A failure before the end of the silence is one as any.
        let pause = patience.after_at(stalled(), later).unwrap().0;
        assert_eq!(pause, super::pause(1));
        // At its end comes one more try on a new connection, for all of those that fail.
        let end = start + second;
        assert_eq!(patience.after_at(stalled(), end).unwrap().0, Duration::ZERO);
        assert!(patience.after_at(stalled(), end + SLACK).is_ok());
        assert_eq!(patience.wait(end), second / 2);
        let error = patience.after_at(stalled(), end + second / 2).unwrap_err();
        assert!(
            error.message().starts_with("it sent nothing; what"),
            "{error}"
        );
        // A byte begins a new silence.
        patience.hear();
        let now = Instant::now();
        assert_eq!(patience.wait(now), second);
        assert_eq!(
            patience.after_at(stalled(), now + second).unwrap().0,
            Duration::ZERO
        );
        patience.renew(Instant::now());
        // A server that refuses is silent, too, unless it asks for time.
        let start = Instant::now();
        patience.wait(start);
        let mut now = start;
        let error = loop {
            match patience.after_at(refused(None), now) {
                Ok((pause, _)) => now += pause,
                Err(error) => break error,
            }
        };
        assert!(error.message().contains("times in a row"), "{error}");
        assert_eq!(now, start + second);
        patience.renew(Instant::now());
        let now = Instant::now();
        patience.wait(now);
        let asked = patience.after_at(refused(Some(7)), now).unwrap().0;
        assert_eq!(asked, 7 * second);
        assert_eq!(patience.wait(now + asked), second);
    }
}
