//! The long call that a thread is in: its cancellation and its progress. Code deep inside asks here; an unwatched call costs only a look at
//! one thread-local variable.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use super::error::{Result, bail};
use super::sync::atomic::{AtomicBool, Ordering};
use super::sync::{Instant, thread_local};

/// The longest time without a progress report. Long loops check more often.
const TELL_EVERY: Duration = Duration::from_millis(20);

/// Progress of a call: bytes of a file, or tokens of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Amount done.
    pub done: u64,
    /// Total amount, as far as it is known.
    pub total: u64,
}

/// A flag that cancels calls. Setting it, from any thread, ends all calls that were given it: running ones, and later ones at their start.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// A flag that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends the calls that were given this flag, now and later.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it is set.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Runs `body`. Long calls of this thread end once the flag is set.
    pub fn watching<T>(&self, body: impl FnOnce() -> T) -> T {
        let flag = || self.is_set();
        let watch = Watch {
            flags: &[&flag],
            ..Watch::default()
        };
        watch.during(body)
    }
}

/// Returns whether a call should end. Called often, from any thread.
pub type Flag<'a> = &'a (dyn Fn() -> bool + Sync + 'a);

/// Watchers of a call.
#[derive(Clone, Copy, Default)]
pub struct Watch<'a> {
    /// Each of these ends the call when it returns true, with [`ErrorKind::Cancelled`](super::ErrorKind::Cancelled) unless the call can
    /// return a partial result.
    pub flags: &'a [Flag<'a>],
    /// Time at which the call ends as a flag ends it.
    pub deadline: Option<Instant>,
    /// Called with the progress from time to time, on the call's thread; [`ControlFlow::Break`] ends the call as a flag does.
    pub progress: Option<&'a dyn Fn(Progress) -> ControlFlow<()>>,
}

struct Active<'a> {
    watch: Watch<'a>,
    over: AtomicBool,
    /// Whether the deadline has ended it.
    late: AtomicBool,
    done: Cell<u64>,
    /// Amount done of the next piece, on top of `done`.
    begun: Cell<u64>,
    total: Cell<u64>,
    told: Cell<Instant>,
}

thread_local! {
    static CURRENT: Cell<*const Active<'static>> = const { Cell::new(std::ptr::null()) };
}

/// Sets another call as the thread's current one until this is dropped.
struct Within(*const Active<'static>);

impl Within {
    fn enter(active: *const Active<'static>) -> Self {
        Within(CURRENT.replace(active))
    }
}

impl Drop for Within {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}

impl Watch<'_> {
    /// Runs `body` as a long call of this thread, watched only by these watchers.
    pub fn during<T>(&self, body: impl FnOnce() -> T) -> T {
        if self.flags.is_empty() && self.deadline.is_none() && self.progress.is_none() {
            return outside(body);
        }
        let active = Active {
            watch: *self,
            over: AtomicBool::new(false),
            late: AtomicBool::new(false),
            done: Cell::new(0),
            begun: Cell::new(0),
            total: Cell::new(0),
            told: Cell::new(Instant::now()),
        };
        let _within = Within::enter((&raw const active).cast());
        body()
    }
}

/// Runs `body`, a callback of the program that made the call. Calls that it makes in turn are not watched.
pub fn outside<T>(body: impl FnOnce() -> T) -> T {
    let _within = Within::enter(std::ptr::null());
    body()
}

/// Runs `body`, a part of this thread's call that tells no progress: it ends with the call, and what it tells is not passed on.
pub fn in_silence<T>(body: impl FnOnce() -> T) -> T {
    with(|call| {
        let flag = || call.is_over();
        let watch = Watch {
            flags: &[&flag],
            ..Watch::default()
        };
        match call.is_watched() {
            true => watch.during(body),
            false => body(),
        }
    })
}

/// The current call of a thread. Threads that work for the call may also look at it.
#[derive(Clone, Copy)]
pub struct Call<'a>(Option<&'a Active<'a>>);

// SAFETY: other threads only reach the flags, which are for any thread, and the atomic; `is_own` keeps them from the rest.
unsafe impl Sync for Call<'_> {}
// SAFETY: as above.
unsafe impl Send for Call<'_> {}

impl Call<'_> {
    /// Whether the call is watched.
    pub fn is_watched(&self) -> bool {
        self.0.is_some()
    }

    fn is_own(active: &Active<'_>) -> bool {
        std::ptr::eq(CURRENT.get(), (&raw const *active).cast())
    }

    /// Whether the call should end. On its own thread, also reports progress if a report is due.
    pub fn is_over(&self) -> bool {
        let Some(active) = self.0 else {
            return false;
        };
        if active.over.load(Ordering::Relaxed) {
            return true;
        }
        let cancelled = active.watch.flags.iter().any(|flag| flag())
            || Self::is_own(active) && active.is_due() && active.tell();
        let deadline = active.watch.deadline;
        let late = !cancelled && deadline.is_some_and(|deadline| Instant::now() >= deadline);
        if late {
            active.late.store(true, Ordering::Relaxed);
        }
        if cancelled || late {
            active.over.store(true, Ordering::Relaxed);
        }
        cancelled || late
    }

    /// Whether the deadline has ended the call.
    pub fn is_late(&self) -> bool {
        let has_late = |active: &Active<'_>| active.late.load(Ordering::Relaxed);
        self.0.is_some_and(has_late)
    }

    /// Fails if the call should end.
    pub fn check(&self) -> Result<()> {
        if self.is_over() {
            bail!(Cancelled, "cancelled");
        }
        Ok(())
    }
}

impl Active<'_> {
    /// Whether a progress report is due, and the total is known.
    fn is_due(&self) -> bool {
        self.total.get() > 0 && self.told.get().elapsed() >= TELL_EVERY
    }

    /// Reports progress. Returns whether the callback wants the call to end.
    fn tell(&self) -> bool {
        let Some(progress) = self.watch.progress else {
            return false;
        };
        let total = self.total.get();
        let done = (self.done.get() + self.begun.get()).min(total);
        let broke = outside(|| progress(Progress { done, total })).is_break();
        self.told.set(Instant::now());
        broke
    }
}

/// Calls `body` with this thread's call.
pub fn with<T>(body: impl FnOnce(Call<'_>) -> T) -> T {
    // SAFETY: `CURRENT` points into this thread's stack, to a frame above this one.
    body(Call(unsafe { CURRENT.get().as_ref() }))
}

/// Whether this thread's call should end.
pub fn is_over() -> bool {
    with(|call| call.is_over())
}

/// Whether this thread's call should end because of its deadline, as [`is_over`] has found.
pub fn is_late() -> bool {
    with(|call| call.is_late())
}

/// Fails if this thread's call should end.
pub fn check() -> Result<()> {
    with(|call| call.check())
}

/// Sets the progress of this thread's call; reports its end at once.
pub fn tell(at: Progress) {
    with(|call| {
        if let Some(active) = call.0 {
            active.begun.set(0);
            active.done.set(at.done);
            active.total.set(at.total);
            if at.done == at.total && active.tell() {
                active.over.store(true, Ordering::Relaxed);
            }
        }
    });
}

/// Raises the total of this thread's call to at least what is done plus `more`.
pub fn expect(more: u64) {
    with(|call| {
        if let Some(active) = call.0 {
            active
                .total
                .set(active.total.get().max(active.done.get() + more));
        }
    });
}

/// Sets the amount done of the next piece.
pub fn begun(part: u64) {
    with(|call| {
        if let Some(active) = call.0 {
            active.begun.set(part);
        }
    });
}

/// Adds to the amount done.
pub fn add(done: u64) {
    with(|call| {
        if let Some(active) = call.0 {
            let total = active.total.get();
            tell(Progress {
                done: active.done.get() + done,
                total,
            });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use std::cell::RefCell;

    #[test]
    fn a_flag_ends_a_call_for_good_on_all_its_threads() {
        assert!(!is_over());
        let set = AtomicBool::new(false);
        let flag = || set.load(Ordering::Relaxed);
        let watch = Watch {
            flags: &[&|| false, &flag],
            ..Watch::default()
        };
        watch.during(|| {
            assert!(check().is_ok());
            set.store(true, Ordering::Relaxed);
            with(|call| {
                std::thread::scope(|scope| {
                    assert!(scope.spawn(|| call.is_over()).join().unwrap());
                    // Another thread is not in this call.
                    assert!(!scope.spawn(is_over).join().unwrap());
                });
            });
            set.store(false, Ordering::Relaxed);
            assert_eq!(check().unwrap_err().kind(), ErrorKind::Cancelled);
            assert!(!outside(is_over));
            assert!(is_over() && !is_late());
        });
        assert!(!is_over());
        let cancel = Cancel::new();
        cancel.cancel();
        assert!(cancel.watching(is_over));
    }

    #[test]
    fn a_deadline_ends_a_call_unless_a_flag_has() {
        let deadline = Instant::now() + Duration::from_millis(20);
        let late = Watch {
            deadline: Some(deadline),
            ..Watch::default()
        };
        late.during(|| {
            assert!(!is_over() && !is_late());
            while !is_over() {
                std::thread::yield_now();
            }
            assert!(Instant::now() >= deadline && is_late());
            assert_eq!(check().unwrap_err().kind(), ErrorKind::Cancelled);
            assert!(!outside(is_late));
        });
        let cancelled = Watch {
            flags: &[&|| true],
            ..late
        };
        cancelled.during(|| assert!(is_over() && !is_late()));
    }

    #[test]
    fn who_watches_hears_how_far_it_is_and_may_end_it() {
        let heard = RefCell::new(Vec::new());
        let progress = |p: Progress| {
            assert!(!is_over(), "a callback is outside of the call");
            heard.borrow_mut().push((p.done, p.total));
            match p.done {
                9 => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        };
        let watch = Watch {
            progress: Some(&progress),
            ..Watch::default()
        };
        watch.during(|| {
            std::thread::sleep(TELL_EVERY);
            assert!(!is_over());
            assert_eq!(*heard.borrow(), [], "nobody knows yet of how much");
        });
        watch.during(|| {
            expect(7);
            add(3);
            begun(2);
            assert!(!is_over());
            assert_eq!(*heard.borrow(), []);
            std::thread::sleep(TELL_EVERY);
            with(|call| {
                std::thread::scope(|s| assert!(!s.spawn(|| call.is_over()).join().unwrap()));
            });
            assert_eq!(*heard.borrow(), [], "told on another thread");
            assert!(!is_over());
            assert_eq!(*heard.borrow(), [(5, 7)]);
            add(4);
            assert_eq!(*heard.borrow(), [(5, 7), (7, 7)]);
            in_silence(|| {
                expect(1);
                add(1);
                assert!(!is_over());
            });
            expect(2);
            add(2);
            assert!(is_over() && in_silence(is_over));
            assert_eq!(heard.borrow()[2..], [(9, 9)]);
        });
    }
}
