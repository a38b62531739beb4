//! Forks of a session while it generates. Each token is passed on between two steps, when the session stands still: other threads fork it
//! then, or have it forked at the end of the step that runs. Knows of a session only that it can be forked.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::base::error::bail;
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
    /// Callers that wait for a fork.
    asked: usize,
    /// Forks for them.
    made: VecDeque<Result<S>>,
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
                asked: 0,
                made: VecDeque::new(),
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
        state.asked += 1;
        let until = Instant::now() + PATIENCE;
        let made = loop {
            if let Some(made) = state.made.pop_front() {
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
        state.asked -= 1;
        // A fork for a caller that gave up is nobody's.
        let surplus = state.made.len().saturating_sub(state.asked);
        let surplus: Vec<_> = state.made.drain(..surplus).collect();
        drop(state);
        drop(surplus);
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
        while state.made.len() < state.asked {
            state.made.push_back(session.fork());
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
