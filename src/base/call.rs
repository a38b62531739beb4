//! The long call that a thread is in: what may cancel it, and who is told of its progress. Code deep inside asks here; where
//! nobody watches, that costs a look at one thread-local variable.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::error::{Result, bail};

/// The longest time without a progress report. Long loops look here more often.
const TELL_EVERY: Duration = Duration::from_millis(20);

/// How far a call is: bytes of a file, or tokens of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// What is done.
    pub done: u64,
    /// What there is to do in all, as far as that is known.
    pub total: u64,
}

/// A flag that cancels calls. Setting it, from any thread, ends the calls that were given it: those that run, and those that
/// have yet to begin.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// One that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends the calls, now and later.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it is set.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Runs `body`, in which long calls of this thread end once this is set.
    pub fn watching<T>(&self, body: impl FnOnce() -> T) -> T {
        let flag = || self.is_set();
        let watch = Watch {
            flags: &[&flag],
            progress: None,
        };
        watch.during(body)
    }
}

/// Says whether a call is to end. Asked often, from any thread.
pub type Flag<'a> = &'a (dyn Fn() -> bool + Sync + 'a);

/// Who watches a call.
#[derive(Clone, Copy, Default)]
pub struct Watch<'a> {
    /// Any of them ends it, with [`ErrorKind::Cancelled`](super::ErrorKind::Cancelled) unless it can give what it has.
    pub flags: &'a [Flag<'a>],
    /// Is told now and then, on the call's thread, how far it is; [`ControlFlow::Break`] ends it as a flag does.
    pub progress: Option<&'a dyn Fn(Progress) -> ControlFlow<()>>,
}

struct Active<'a> {
    watch: Watch<'a>,
    over: AtomicBool,
    done: Cell<u64>,
    /// What is done of the next piece of it.
    begun: Cell<u64>,
    total: Cell<u64>,
    told: Cell<Instant>,
}

thread_local! {
    static CURRENT: Cell<*const Active<'static>> = const { Cell::new(std::ptr::null()) };
}

/// Makes another call the thread's until this is dropped.
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
    /// Runs `body`, a long call of this thread that is watched by these and by nobody else.
    pub fn during<T>(&self, body: impl FnOnce() -> T) -> T {
        if self.flags.is_empty() && self.progress.is_none() {
            return outside(body);
        }
        let active = Active {
            watch: *self,
            over: AtomicBool::new(false),
            done: Cell::new(0),
            begun: Cell::new(0),
            total: Cell::new(0),
            told: Cell::new(Instant::now()),
        };
        let _within = Within::enter((&raw const active).cast());
        body()
    }
}

/// Runs `body`, a callback of the program that made the call: what that calls in its turn is not watched.
pub fn outside<T>(body: impl FnOnce() -> T) -> T {
    let _within = Within::enter(std::ptr::null());
    body()
}

/// The call of the thread that asked for it, which threads that work for it may look at too.
#[derive(Clone, Copy)]
pub struct Call<'a>(Option<&'a Active<'a>>);

// SAFETY: other threads only reach the flags, which are for any thread, and the atomic; `is_own` keeps them from the rest.
unsafe impl Sync for Call<'_> {}
// SAFETY: as above.
unsafe impl Send for Call<'_> {}

impl Call<'_> {
    /// Whether somebody watches it.
    pub fn is_watched(&self) -> bool {
        self.0.is_some()
    }

    fn is_own(active: &Active<'_>) -> bool {
        std::ptr::eq(CURRENT.get(), (&raw const *active).cast())
    }

    /// Whether it is to end. On its own thread, tells how far it is if that is due.
    pub fn is_over(&self) -> bool {
        let Some(active) = self.0 else {
            return false;
        };
        if active.over.load(Ordering::Relaxed) {
            return true;
        }
        let over = active.watch.flags.iter().any(|flag| flag())
            || Self::is_own(active) && active.is_due() && active.tell();
        if over {
            active.over.store(true, Ordering::Relaxed);
        }
        over
    }

    /// An error if it is to end.
    pub fn check(&self) -> Result<()> {
        if self.is_over() {
            bail!(Cancelled, "cancelled");
        }
        Ok(())
    }
}

impl Active<'_> {
    /// Whether it is time to tell how far the call is, and known of how much.
    fn is_due(&self) -> bool {
        self.total.get() > 0 && self.told.get().elapsed() >= TELL_EVERY
    }

    /// Whether the progress callback wants it to end.
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
    // SAFETY: what `CURRENT` points to is on this thread's stack, further up than this.
    body(Call(unsafe { CURRENT.get().as_ref() }))
}

/// Whether this thread's call is to end.
pub fn is_over() -> bool {
    with(|call| call.is_over())
}

/// An error if this thread's call is to end.
pub fn check() -> Result<()> {
    with(|call| call.check())
}

/// Says how far this thread's call is; the end of it is told at once.
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

/// Says that this thread's call has so much more to do, beside what it has done, if not more.
pub fn expect(more: u64) {
    with(|call| {
        if let Some(active) = call.0 {
            active
                .total
                .set(active.total.get().max(active.done.get() + more));
        }
    });
}

/// Says how much of the next piece is done.
pub fn begun(part: u64) {
    with(|call| {
        if let Some(active) = call.0 {
            active.begun.set(part);
        }
    });
}

/// Says that so much more is done.
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
            progress: None,
        };
        watch.during(|| {
            assert!(check().is_ok());
            set.store(true, Ordering::Relaxed);
            with(|call| {
                std::thread::scope(|scope| {
                    assert!(scope.spawn(|| call.is_over()).join().unwrap());
                    // Another thread's own call is none.
                    assert!(!scope.spawn(is_over).join().unwrap());
                });
            });
            set.store(false, Ordering::Relaxed);
            assert_eq!(check().unwrap_err().kind(), ErrorKind::Cancelled);
            assert!(!outside(is_over));
            assert!(is_over());
        });
        assert!(!is_over());
        let cancel = Cancel::new();
        cancel.cancel();
        assert!(cancel.watching(is_over));
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
            flags: &[],
            progress: Some(&progress),
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
            expect(2);
            add(2);
            assert!(is_over());
            assert_eq!(heard.borrow()[2..], [(9, 9)]);
        });
    }
}
