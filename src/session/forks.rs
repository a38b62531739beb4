//! Forks of a session while it generates. Each token is passed on between two steps, when the session stands still: other threads fork it
//! then, or have it forked at the end of the step that runs. Knows of a session only that it can be forked.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::base::error::bail;
use crate::base::sync::{Condvar, Instant, Mutex, MutexGuard};
use crate::base::{Result, call, fork};

/// Interval at which a caller that waits for a fork checks whether its call is over.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Longest wait for the end of a step.
const PATIENCE: Duration = Duration::from_secs(10);

/// A value that can be forked.
pub trait Forked: Sized {
    /// A second one in the same state.
    fn fork(&self) -> Result<Self>;
}

/// Forks a session that generates. All functions may be called from any thread at any time, also from the callback of the generation.
pub struct Forks<S> {
    state: Mutex<State<S>>,
    /// A fork was made, or none will be.
    changed: Condvar,
}

struct State<S> {
    /// The generation that runs.
    generation: Option<Generation<S>>,
    /// Callers that wait for a fork, in the order of arrival, and the fork of each once it is made. Who comes later gets none of these: they
    /// are older than its call.
    asked: BTreeMap<u64, Option<Result<S>>>,
    last_ticket: u64,
}

struct Generation<S> {
    /// The fork generation of its process; a child has no such thread.
    process: u32,
    /// The session, while it stands still.
    lent: Option<Lent<S>>,
    /// The reason why its next token takes longer than a step.
    busy_with: Option<&'static str>,
}

/// The address of a session that its generation does not use before it has taken this back.
struct Lent<S>(*const S);

// SAFETY: it is used as a shared reference.
unsafe impl<S: Sync> Send for Lent<S> {}

/// A generation of the session runs until this is dropped.
pub(super) struct Forking<S>(Arc<Forks<S>>);

impl<S> Drop for Forking<S> {
    fn drop(&mut self) {
        self.0.state().generation = None;
        self.0.changed.notify_all();
    }
}

/// The session stands still until this is dropped.
pub(super) struct Standing<'a, S>(&'a Forks<S>);

impl<S> Drop for Standing<'_, S> {
    fn drop(&mut self) {
        if let Some(own) = &mut self.0.state().generation {
            own.lent = None;
        }
    }
}

impl<S> Default for Forks<S> {
    fn default() -> Self {
        Forks {
            state: Mutex::new(State {
                generation: None,
                asked: BTreeMap::new(),
                last_ticket: 0,
            }),
            changed: Condvar::new(),
        }
    }
}

impl<S> Forks<S> {
    fn state(&self) -> MutexGuard<'_, State<S>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Forked> Forks<S> {
    /// A second session in the state that this one has after its last token: the one that it would have if the generation were cancelled now.
    /// The generation goes on. Waits for the end of a step that runs. `None` if the session does not generate, or no longer.
    ///
    /// Fails as busy while the generation runs a prompt or waits for memory, and if a step takes more than ten seconds; as cancelled with
    /// the caller's [`call`].
    pub fn fork(&self) -> Result<Option<S>> {
        let mut state = self.state();
        if let Some(lent) = state.generation().and_then(|own| own.lent.as_ref()) {
            // SAFETY: the generation takes it back under the lock that this holds.
            return unsafe { &*lent.0 }.fork().map(Some);
        }
        state.last_ticket += 1;
        let ticket = state.last_ticket;
        state.asked.insert(ticket, None);
        let until = Instant::now() + PATIENCE;
        let made = loop {
            if let Some(made) = state.asked.get_mut(&ticket).and_then(Option::take) {
                break made.map(Some);
            }
            match state.generation().map(|own| own.busy_with) {
                None => break Ok(None),
                Some(Some(what)) => {
                    break busy(format_args!("{what}; fork it once it generates again"));
                }
                Some(None) if Instant::now() >= until => {
                    let seconds = PATIENCE.as_secs();
                    break busy(format_args!("has taken {seconds} s for a step"));
                }
                Some(None) => {}
            }
            let waited = self.changed.wait_timeout(state, LOOK_EVERY);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if let Err(e) = call::check() {
                break Err(e);
            }
        };
        // A caller that gives up may have a fork.
        let unused = state.asked.remove(&ticket);
        drop(state);
        drop(unused);
        made
    }

    /// The session generates until the result is dropped.
    pub(super) fn begin(self: &Arc<Self>) -> Forking<S> {
        self.state().generation = Some(Generation {
            process: fork::generation(),
            lent: None,
            busy_with: None,
        });
        Forking(self.clone())
    }

    /// Forks the session for those who wait, and lets others fork it until the result is dropped. A step follows.
    pub(super) fn stand<'a>(&'a self, session: &'a S) -> Standing<'a, S> {
        let mut state = self.state();
        for made in state.asked.values_mut().filter(|made| made.is_none()) {
            *made = Some(session.fork());
            self.changed.notify_all();
        }
        if let Some(own) = &mut state.generation {
            own.lent = Some(Lent(session));
            own.busy_with = None;
        }
        Standing(self)
    }

    /// Says why the next token takes longer than a step, to callers that wait too.
    pub(super) fn set_busy_with(&self, what: &'static str) {
        if let Some(own) = &mut self.state().generation {
            own.busy_with = Some(what);
        }
        self.changed.notify_all();
    }
}

impl<S> State<S> {
    /// The generation that runs in this process.
    fn generation(&self) -> Option<&Generation<S>> {
        let own = self.generation.as_ref();
        own.filter(|own| own.process == fork::generation())
    }
}

fn busy<T>(why: std::fmt::Arguments<'_>) -> Result<T> {
    bail!(Busy, "the session {why}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    struct Step(u32);

    impl Forked for Step {
        fn fork(&self) -> Result<Step> {
            Ok(Step(self.0))
        }
    }

    /// A caller that is slow to take its fork leaves it to nobody: it is older than the calls that come after it.
    #[test]
    fn a_fork_is_no_older_than_the_call() {
        let forks: Arc<Forks<Step>> = Arc::default();
        let generates = forks.begin();
        forks.state().asked.insert(0, None);
        drop(forks.stand(&Step(1)));
        let forked = thread::scope(|scope| {
            let asks = scope.spawn(|| forks.fork().unwrap().unwrap().0);
            while forks.state().asked.len() < 2 {
                assert!(!asks.is_finished(), "took the fork of another caller");
                thread::yield_now();
            }
            drop(forks.stand(&Step(2)));
            asks.join().unwrap()
        });
        assert_eq!(forked, 2);
        let left = forks.state().asked.remove(&0).flatten();
        assert_eq!(left.unwrap().unwrap().0, 1);
        drop(generates);
        assert!(forks.fork().unwrap().is_none());
    }
}
