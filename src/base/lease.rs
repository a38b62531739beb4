//! A lease on shared state that its owner changes from time to time, such as weights under training. Users and changes wait for each other,
//! in the order in which they come.

use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::error::{Result, bail};
use super::fork;
use super::sync::{Condvar, Mutex, MutexGuard};
use super::turns::this_thread;

/// Interval at which a waiting caller checks whether to give up.
const PATIENCE: Duration = Duration::from_millis(10);

#[derive(Debug, Default)]
struct State {
    /// Threads that use the state, once for each use.
    users: Vec<usize>,
    /// The thread that changes it.
    changing: Option<usize>,
    /// Waiting callers, in the order of arrival.
    waiting: VecDeque<Waiting>,
    last_ticket: u64,
    /// Number of changes so far.
    epoch: u64,
    /// The fork generation of these threads; the child of a fork has others.
    generation: u32,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    ticket: u64,
    thread: usize,
    /// Whether it waits to change the state, rather than to use it.
    changes: bool,
}

impl State {
    /// Whether it is the turn of a ticket. A use waits for changes that came before it, and a change for all that came before it.
    fn is_due(&self, ticket: u64, changes: bool) -> bool {
        let mut before = self.waiting.iter().take_while(|w| w.ticket < ticket);
        match changes {
            true => self.changing.is_none() && self.users.is_empty() && before.next().is_none(),
            false => self.changing.is_none() && before.all(|w| !w.changes),
        }
    }

    /// Whether a thread changes the state, or waits for that and is in a callback meanwhile.
    fn is_changed_by(&self, thread: usize) -> bool {
        let mut waiting = self.waiting.iter();
        self.changing == Some(thread) || waiting.any(|w| w.thread == thread && w.changes)
    }

    /// Whether a thread uses the state, or waits for that and is in a callback meanwhile.
    fn is_used_by(&self, thread: usize) -> bool {
        let mut waiting = self.waiting.iter();
        self.users.contains(&thread) || waiting.any(|w| w.thread == thread && !w.changes)
    }
}

/// Excludes users of shared state while its owner changes it, and vice versa. Who comes while the other side is at work waits, and goes
/// before those that come later: neither side can starve the other.
#[derive(Debug, Default)]
pub struct Lease {
    state: Mutex<State>,
    /// Someone has ended, or given up waiting.
    ended: Condvar,
}

impl Lease {
    /// A lease without users.
    pub fn new() -> Arc<Lease> {
        Arc::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let generation = fork::generation();
        if state.generation != generation {
            // Threads of the parent do not exist in the child.
            *state = State {
                epoch: state.epoch,
                generation,
                ..State::default()
            };
        }
        state
    }

    /// Takes the lock on its state until the result is dropped: see [`fork::Held`].
    pub fn locked(&'static self) -> Box<dyn Any> {
        Box::new(self.state())
    }

    /// Number of changes so far.
    pub fn epoch(&self) -> u64 {
        self.state().epoch
    }

    /// Fails with [`Busy`](super::ErrorKind::Busy) on a thread that changes the state or waits for that, as in a callback of the change.
    pub fn check_thread(&self) -> Result<()> {
        if self.state().is_changed_by(this_thread()) {
            bail!(
                Busy,
                "the model's weights are being trained further up this thread's stack, by the step that called back; run the model when \
                 that step has returned"
            );
        }
        Ok(())
    }

    /// Waits for changes that run or that came before, and uses the state until the result is dropped. A thread that uses it already does
    /// not wait.
    ///
    /// Fails with [`Cancelled`] if `give_up`, which is called every few milliseconds, returns true before, and with [`Busy`] on the thread
    /// that changes the state, or waits for that.
    ///
    /// [`Busy`]: super::ErrorKind::Busy
    /// [`Cancelled`]: super::ErrorKind::Cancelled
    pub fn hold(self: &Arc<Lease>, give_up: impl Fn() -> bool) -> Result<Held> {
        self.check_thread()?;
        let thread = this_thread();
        let is_nested = self.state().users.contains(&thread);
        let ticket = Ticket::new(self, false);
        let mut state = match is_nested {
            true => self.state(),
            false => ticket.wait(give_up)?,
        };
        state.users.push(thread);
        Ok(Held {
            lease: self.clone(),
            thread,
            epoch: state.epoch,
        })
    }

    /// Waits for users and changes that run or that came before, and excludes all others until the result is dropped. Gives up as
    /// [`Lease::hold`] does. Fails with [`Busy`](super::ErrorKind::Busy) on a thread that uses the state or changes it.
    pub fn change(self: &Arc<Lease>, give_up: impl Fn() -> bool) -> Result<Change> {
        self.check_thread()?;
        let thread = this_thread();
        if self.state().is_used_by(thread) {
            bail!(
                Busy,
                "the model is run further up this thread's stack, by the call that called back; take the step when that call has returned"
            );
        }
        let ticket = Ticket::new(self, true);
        let mut state = ticket.wait(give_up)?;
        state.changing = Some(thread);
        Ok(Change {
            lease: self.clone(),
            has_changed: Cell::new(false),
        })
    }
}

/// A place among those that wait, given up when this is dropped.
struct Ticket<'a> {
    lease: &'a Lease,
    waiting: Waiting,
}

impl<'a> Ticket<'a> {
    fn new(lease: &'a Lease, changes: bool) -> Ticket<'a> {
        let mut state = lease.state();
        state.last_ticket += 1;
        let waiting = Waiting {
            ticket: state.last_ticket,
            thread: this_thread(),
            changes,
        };
        state.waiting.push_back(waiting);
        Ticket { lease, waiting }
    }

    /// Waits until it is this ticket's turn.
    fn wait(&self, give_up: impl Fn() -> bool) -> Result<MutexGuard<'a, State>> {
        loop {
            let state = self.lease.state();
            if state.is_due(self.waiting.ticket, self.waiting.changes) {
                return Ok(state);
            }
            let waited = self.lease.ended.wait_timeout(state, PATIENCE);
            drop(waited.unwrap_or_else(PoisonError::into_inner).0);
            if give_up() {
                bail!(Cancelled, "cancelled");
            }
        }
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let mut state = self.lease.state();
        state.waiting.retain(|w| w.ticket != self.waiting.ticket);
        drop(state);
        self.lease.ended.notify_all();
    }
}

/// A current use.
#[derive(Debug)]
pub struct Held {
    lease: Arc<Lease>,
    thread: usize,
    epoch: u64,
}

impl Held {
    /// Number of changes before this use. There are no others before it ends.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut state = self.lease.state();
        let own = state.users.iter().position(|user| *user == self.thread);
        own.map(|index| state.users.swap_remove(index));
        drop(state);
        self.lease.ended.notify_all();
    }
}

/// Exclusive access of the owner.
#[derive(Debug)]
pub struct Change {
    lease: Arc<Lease>,
    has_changed: Cell<bool>,
}

impl Change {
    /// Records that the state has changed.
    pub fn changed(&self) {
        if !self.has_changed.replace(true) {
            self.lease.state().epoch += 1;
        }
    }

    /// Whether the state has changed.
    pub fn has_changed(&self) -> bool {
        self.has_changed.get()
    }

    /// Number of changes so far, with this one.
    pub fn epoch(&self) -> u64 {
        self.lease.epoch()
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        self.lease.state().changing = None;
        self.lease.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::thread;

    fn never() -> bool {
        false
    }

    /// Waits until `count` callers wait.
    fn until(lease: &Lease, count: usize) {
        while lease.state().waiting.len() != count {
            thread::yield_now();
        }
    }

    #[test]
    fn users_and_owner_wait_for_each_other() {
        let lease = Lease::new();
        let changes = AtomicU32::new(0);
        thread::scope(|scope| {
            let held = [lease.hold(never).unwrap(), lease.hold(never).unwrap()];
            assert_eq!([held[0].epoch(), held[1].epoch()], [0, 0]);
            scope.spawn(|| {
                let change = lease.change(never).unwrap();
                changes.fetch_add(1, Ordering::SeqCst);
                change.changed();
                change.changed();
                assert_eq!((change.epoch(), change.has_changed()), (1, true));
            });
            until(&lease, 1);
            // A thread that uses it already need not wait.
            drop(lease.hold(never).unwrap());
            assert_eq!(changes.load(Ordering::SeqCst), 0);
            drop(held);
        });
        assert_eq!(changes.load(Ordering::SeqCst), 1);
        assert_eq!(lease.hold(never).unwrap().epoch(), 1);
        let unchanged = lease.change(never).unwrap();
        assert!(!unchanged.has_changed());
        drop(unchanged);
        assert_eq!(lease.epoch(), 1);
    }

    #[test]
    fn who_comes_first_goes_first() {
        let (lease, order) = (Lease::new(), Mutex::new(Vec::new()));
        thread::scope(|scope| {
            let first = lease.hold(never).unwrap();
            // A change that waits goes before uses that come later, and those before the next change.
            for (i, changes) in [true, false, false, true, false].into_iter().enumerate() {
                let (lease, order) = (&lease, &order);
                scope.spawn(move || match changes {
                    true => {
                        let change = lease.change(never).unwrap();
                        order.lock().unwrap().push(i);
                        drop(change);
                    }
                    false => {
                        let held = lease.hold(never).unwrap();
                        order.lock().unwrap().push(i);
                        drop(held);
                    }
                });
                until(lease, i + 1);
            }
            drop(first);
        });
        let mut order = order.into_inner().unwrap();
        order[1..3].sort_unstable();
        assert_eq!(order, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn who_gives_up_holds_nobody_up() {
        let (lease, stop) = (Lease::new(), AtomicBool::new(false));
        let stopped = || stop.load(Ordering::Relaxed);
        thread::scope(|scope| {
            let held = lease.hold(never).unwrap();
            let gives_up = scope.spawn(|| lease.change(stopped).unwrap_err().kind());
            until(&lease, 1);
            let waits = scope.spawn(|| lease.hold(never).is_ok());
            until(&lease, 2);
            stop.store(true, Ordering::Relaxed);
            assert_eq!(gives_up.join().unwrap(), ErrorKind::Cancelled);
            assert!(waits.join().unwrap());
            drop(held);
            let change = lease.change(never).unwrap();
            let gives_up = scope.spawn(|| lease.hold(stopped).unwrap_err().kind());
            assert_eq!(gives_up.join().unwrap(), ErrorKind::Cancelled);
            drop(change);
        });
        assert!(lease.state().waiting.is_empty() && lease.state().users.is_empty());
    }

    #[test]
    fn a_thread_does_not_wait_for_itself() {
        let lease = Lease::new();
        let held = lease.hold(never).unwrap();
        let busy = lease.change(never).unwrap_err();
        assert_eq!(busy.kind(), ErrorKind::Busy);
        assert!(busy.message().contains("the model is run"), "{busy}");
        drop(held);
        let change = lease.change(never).unwrap();
        for busy in [
            lease.hold(never).unwrap_err(),
            lease.change(never).unwrap_err(),
            lease.check_thread().unwrap_err(),
        ] {
            assert_eq!(busy.kind(), ErrorKind::Busy);
            assert!(busy.message().contains("being trained"), "{busy}");
        }
        drop(change);
        assert!(lease.hold(never).is_ok() && lease.check_thread().is_ok());
        // Nor does a thread that waits, and is called back meanwhile.
        let kinds = Mutex::new(Vec::new());
        let (taken, release) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                let _change = lease.change(never).unwrap();
                taken.store(true, Ordering::SeqCst);
                while !release.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
            });
            while !taken.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            let steps = || {
                kinds
                    .lock()
                    .unwrap()
                    .push(lease.change(never).unwrap_err().kind());
                true
            };
            let runs = || {
                kinds
                    .lock()
                    .unwrap()
                    .push(lease.hold(never).unwrap_err().kind());
                true
            };
            assert!(lease.hold(steps).is_err() && lease.change(runs).is_err());
            release.store(true, Ordering::SeqCst);
        });
        assert_eq!(kinds.into_inner().unwrap(), [ErrorKind::Busy; 2]);
    }
}
