//! A fair queue for a resource with one user at a time: first come, first served, and a waiting caller can give up.

use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::error::{Error, Result, bail, err};
use super::fork;
use super::sync::{Condvar, Instant, Mutex, MutexGuard, thread_local};

/// Time that a thread may keep coming back before it queues behind waiting ones. Changing threads costs more than continuing.
const SLICE: Duration = Duration::from_millis(20);
/// Time that the queue waits for such a thread to come back.
const GRACE: Duration = Duration::from_millis(1);
/// Interval at which a waiting caller checks whether to give up.
const PATIENCE: Duration = Duration::from_millis(10);

thread_local! {
    /// Its address identifies the thread.
    static HERE: u8 = const { 0 };
}

/// Identifies the calling thread among all living threads. `std::thread::current()` would register a destructor for the thread's end, for
/// which the C library takes the loader's lock.
pub fn this_thread() -> usize {
    HERE.with(|here| (&raw const *here).addr())
}

/// The error of a callback that uses the model of the call that called back.
pub fn reentered() -> Error {
    err!(
        Busy,
        "the model is in use further up this thread's stack, by the call that called back; use it when that call has returned"
    )
}

/// A waiting caller, which sleeps until it is woken.
#[derive(Debug, Default)]
pub struct Waiter {
    woken: Mutex<bool>,
    wake: Condvar,
}

impl Waiter {
    /// Ends the current or the next sleep.
    pub fn wake(&self) {
        *self.woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.wake.notify_one();
    }

    /// Sleeps for at most `time`.
    pub fn sleep(&self, time: Duration) {
        let woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut woken, _) = self
            .wake
            .wait_timeout_while(woken, time, |woken| !*woken)
            .unwrap_or_else(PoisonError::into_inner);
        *woken = false;
    }
}

/// A queue in front of a resource. Unlike a mutex it is fair: a caller that keeps coming back keeps its turn for a slice of time, and then
/// queues behind waiting ones.
#[derive(Debug, Default)]
pub struct Turns {
    queue: Mutex<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    /// Tickets and their holders, in order of arrival.
    tickets: VecDeque<(u64, Arc<Waiter>)>,
    last: u64,
    taken: bool,
    /// Thread of the current slice, and the start of the slice.
    slice: Option<(usize, Instant)>,
    /// Time until which that thread may come back.
    kept_until: Option<Instant>,
    /// The fork generation of these threads; the child of a fork has others.
    generation: u32,
}

impl Queue {
    fn take(&mut self, slice: (usize, Instant)) {
        self.taken = true;
        self.slice = Some(slice);
        self.kept_until = None;
    }

    /// Whether someone waits and the slice is over.
    fn is_due(&self) -> bool {
        let over = self.slice.is_none_or(|(_, since)| since.elapsed() >= SLICE);
        over && !self.tickets.is_empty()
    }
}

impl Turns {
    /// An empty queue.
    pub fn new() -> Turns {
        Turns::default()
    }

    /// Waits for this caller's turn, which lasts until the result is dropped. Fails with [`Cancelled`] if `give_up`, which is called every
    /// few milliseconds, returns true before. Fails with [`Busy`] if the caller already has a turn, as from a callback.
    ///
    /// [`Busy`]: super::ErrorKind::Busy
    /// [`Cancelled`]: super::ErrorKind::Cancelled
    pub fn take(&self, give_up: impl Fn() -> bool) -> Result<Turn<'_>> {
        let turn = || Turn {
            turns: self,
            ends: Cell::new(None),
        };
        let me = this_thread();
        let waiter;
        let own = {
            let (mut queue, now) = (self.queue(), Instant::now());
            let kept = queue.kept_until.is_some_and(|until| now < until);
            match queue.slice {
                Some((thread, _)) if queue.taken && thread == me => {
                    return Err(reentered());
                }
                Some(slice) if kept && slice.0 == me => {
                    queue.take(slice);
                    return Ok(turn());
                }
                _ if !queue.taken && queue.tickets.is_empty() => {
                    queue.take((me, now));
                    return Ok(turn());
                }
                _ => {}
            }
            queue.last += 1;
            let own = queue.last;
            waiter = Arc::new(Waiter::default());
            queue.tickets.push_back((own, waiter.clone()));
            own
        };
        loop {
            let mut queue = self.queue();
            let is_next = queue
                .tickets
                .front()
                .is_some_and(|&(first, _)| first == own);
            let now = Instant::now();
            if is_next && !queue.taken && queue.kept_until.is_none_or(|until| until <= now) {
                queue.tickets.pop_front();
                queue.take((me, now));
                return Ok(turn());
            }
            drop(queue);
            if give_up() {
                let mut queue = self.queue();
                queue.tickets.retain(|&(ticket, _)| ticket != own);
                let next = queue.tickets.front().map(|(_, next)| next.clone());
                drop(queue);
                if let Some(next) = next {
                    next.wake();
                }
                bail!(Cancelled, "cancelled");
            }
            waiter.sleep(if is_next { GRACE } else { PATIENCE });
        }
    }

    /// Takes the lock on the queue until the result is dropped: see [`fork::Held`].
    pub fn locked(&'static self) -> Box<dyn Any> {
        Box::new(self.queue())
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let generation = fork::generation();
        if queue.generation != generation {
            // Threads that queued before the fork do not exist in the child.
            *queue = Queue {
                generation,
                ..Queue::default()
            };
        }
        queue
    }
}

/// A caller's turn.
#[derive(Debug)]
#[must_use = "the turn ends when this is dropped"]
pub struct Turn<'a> {
    turns: &'a Turns,
    /// Whether another caller is next, once that is decided.
    ends: Cell<Option<bool>>,
}

impl Turn<'_> {
    /// Whether another caller is next, so that this caller should begin nothing more.
    pub fn ends(&self) -> bool {
        let ends = self
            .ends
            .get()
            .unwrap_or_else(|| self.turns.queue().is_due());
        self.ends.set(Some(ends));
        ends
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut queue = self.turns.queue();
        queue.taken = false;
        if queue.tickets.is_empty() {
            return;
        }
        if self.ends.get().unwrap_or_else(|| queue.is_due()) {
            let next = queue.tickets.front().map(|(_, next)| next.clone());
            drop(queue);
            if let Some(next) = next {
                next.wake();
            }
        } else {
            queue.kept_until = Some(Instant::now() + GRACE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    /// Waits until `count` callers wait.
    fn until(turns: &Turns, count: usize) {
        while turns.queue().tickets.len() != count {
            thread::yield_now();
        }
    }

    #[test]
    fn turns_come_in_the_order_of_arrival() {
        let (turns, order) = (Turns::new(), Mutex::new(Vec::new()));
        thread::scope(|scope| {
            let first = turns.take(|| false).unwrap();
            for i in 0..5 {
                let (turns, order) = (&turns, &order);
                scope.spawn(move || {
                    let _turn = turns.take(|| false).unwrap();
                    order.lock().unwrap().push(i);
                });
                until(turns, i + 1);
            }
            drop(first);
        });
        assert_eq!(order.into_inner().unwrap(), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn a_thread_goes_on_for_its_slice_and_no_longer() {
        let (turns, begun) = (Turns::new(), Instant::now());
        let came = Mutex::new(None);
        thread::scope(|scope| {
            let first = turns.take(|| false).unwrap();
            scope.spawn(|| {
                let _turn = turns.take(|| false).unwrap();
                *came.lock().unwrap() = Some(Instant::now());
            });
            until(&turns, 1);
            assert!(!first.ends() || begun.elapsed() >= SLICE);
            drop(first);
            // A caller that comes back at once goes before a waiting one, until its slice is over.
            let mut times = 0;
            while came.lock().unwrap().is_none() {
                drop(turns.take(|| false).unwrap());
                times += 1;
            }
            assert!(times > 1, "{times}");
        });
        let waited = came.into_inner().unwrap().unwrap() - begun;
        assert!(waited < SLICE + Duration::from_secs(5), "{waited:?}");
    }

    #[test]
    fn who_has_a_turn_gets_no_other() {
        let turns = Turns::new();
        let turn = turns.take(|| false).unwrap();
        assert_eq!(turns.take(|| false).unwrap_err().kind(), ErrorKind::Busy);
        drop(turn);
        drop(turns.take(|| false).unwrap());
    }

    #[test]
    fn who_gives_up_holds_nobody_up() {
        let (turns, stop) = (Turns::new(), AtomicBool::new(false));
        thread::scope(|scope| {
            let first = turns.take(|| false).unwrap();
            let gives_up = scope.spawn(|| turns.take(|| stop.load(Ordering::Relaxed)).is_err());
            until(&turns, 1);
            let waits = scope.spawn(|| turns.take(|| false).is_ok());
            until(&turns, 2);
            stop.store(true, Ordering::Relaxed);
            assert!(gives_up.join().unwrap());
            until(&turns, 1);
            drop(first);
            assert!(waits.join().unwrap());
        });
        let queue = turns.queue();
        assert!(queue.tickets.is_empty() && !queue.taken);
    }
}
