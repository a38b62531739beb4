//! Programs of the lease on weights, of fair turns, and of waiting callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use super::ErrorKind;
use super::lease::Lease;
use super::sync::{atomic, sleep, slept, work_for};
use super::turns::{Turns, Waiter};
use crate::schedule::{Timeouts, timeouts};
use crate::threads;

const MS: Duration = Duration::from_millis(1);

fn never() -> bool {
    false
}

/// Counts who is inside, and refuses users beside a change.
#[derive(Default)]
struct Inside {
    users: AtomicUsize,
    changes: AtomicUsize,
}

impl Inside {
    fn uses(&self) {
        self.users.fetch_add(1, SeqCst);
        for _ in 0..2 {
            super::sync::switch();
            assert_eq!(self.changes.load(SeqCst), 0, "a use beside a change");
        }
        self.users.fetch_sub(1, SeqCst);
    }

    fn changes(&self) {
        assert_eq!(
            self.changes.fetch_add(1, SeqCst),
            0,
            "two changes at a time"
        );
        for _ in 0..2 {
            super::sync::switch();
            assert_eq!(self.users.load(SeqCst), 0, "a change beside a use");
        }
        self.changes.fetch_sub(1, SeqCst);
    }
}

/// Uses and changes exclude each other, and each end wakes those that it lets in.
pub fn lease_excludes() {
    let (lease, inside) = (Lease::new(), Arc::new(Inside::default()));
    let user = |lease: Arc<Lease>, inside: Arc<Inside>| {
        move || {
            for _ in 0..2 {
                let held = lease.hold(never).unwrap();
                inside.uses();
                drop(lease.hold(never).unwrap());
                drop(held);
            }
        }
    };
    let changer = |lease: Arc<Lease>, inside: Arc<Inside>| {
        move || {
            for _ in 0..2 {
                let change = lease.change(never).unwrap();
                inside.changes();
                change.changed();
                drop(change);
            }
        }
    };
    threads![
        user(lease.clone(), inside.clone()),
        user(lease.clone(), inside.clone()),
        changer(lease.clone(), inside.clone()),
        changer(lease.clone(), inside.clone()),
    ];
    assert_eq!(lease.epoch(), 4);
    crate::all_were_woken();
}

/// Uses that come after a change has begun to wait come after the change.
pub fn lease_is_fair() {
    let lease = Lease::new();
    let (waits, done) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicBool::new(false)),
    );
    let user = || {
        let (lease, waits, done) = (lease.clone(), waits.clone(), done.clone());
        move || {
            for _ in 0..4 {
                let comes_later = waits.load(SeqCst);
                let held = lease.hold(never).unwrap();
                assert!(
                    !comes_later || done.load(SeqCst),
                    "a use went before the change that waited"
                );
                super::sync::switch();
                drop(held);
            }
        }
    };
    let changer = || {
        let (lease, waits, done) = (lease.clone(), waits.clone(), done.clone());
        move || {
            let waits = || {
                waits.store(true, SeqCst);
                false
            };
            let change = lease.change(waits).unwrap();
            done.store(true, SeqCst);
            drop(change);
        }
    };
    threads![user(), user(), changer()];
    crate::all_were_woken();
}

/// A change that gives up lets in those behind it.
pub fn lease_is_given_up() {
    let (lease, stop) = (Lease::new(), Arc::new(atomic::AtomicBool::new(false)));
    let held = lease.hold(never).unwrap();
    let gives_up = {
        let (lease, stop) = (lease.clone(), stop.clone());
        move || {
            let change = lease.change(|| stop.load(SeqCst));
            assert_eq!(change.unwrap_err().kind(), ErrorKind::Cancelled);
        }
    };
    let user = || {
        let lease = lease.clone();
        move || drop(lease.hold(never).unwrap())
    };
    let stops = move || stop.store(true, SeqCst);
    threads![gives_up, user(), user(), stops];
    // It looks every ten milliseconds, and wakes the others at once.
    assert!(
        timeouts() == Timeouts::Early || slept() <= 10 * MS,
        "{:?}",
        slept()
    );
    drop(held);
    drop(lease.change(never).unwrap());
}

/// One turn at a time; and waits for turns end soon, although nobody wakes those who wait for a slice to end.
pub fn turns_exclude() {
    let (turns, inside) = (Arc::new(Turns::new()), Arc::new(Inside::default()));
    let taker = || {
        let (turns, inside) = (turns.clone(), inside.clone());
        move || {
            for _ in 0..2 {
                let turn = turns.take(never).unwrap();
                inside.changes();
                assert_eq!(turns.take(never).unwrap_err().kind(), ErrorKind::Busy);
                drop(turn);
            }
        }
    };
    threads![taker(), taker(), taker()];
    // The one behind the next looks every ten milliseconds whether it has become the next.
    assert!(
        timeouts() == Timeouts::Early || slept() <= 6 * 11 * MS,
        "{:?}",
        slept()
    );
}

/// A turn that has lasted its slice passes to the one that waits, in the order of arrival, and at once.
pub fn turns_pass_on() {
    let turns = Arc::new(Turns::new());
    let first_waits = Arc::new(AtomicBool::new(false));
    let (order, entered) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let turn = turns.take(never).unwrap();
    let first = {
        let (turns, waits, order, entered) = (
            turns.clone(),
            first_waits.clone(),
            order.clone(),
            entered.clone(),
        );
        move || {
            let waits = || {
                waits.store(true, SeqCst);
                false
            };
            let turn = turns.take(waits).unwrap();
            assert_eq!(order.fetch_add(1, SeqCst), 0, "another came before");
            entered.fetch_add(1, SeqCst);
            work_for(25 * MS);
            drop(turn);
        }
    };
    let first = shuttle::thread::spawn(first);
    while !first_waits.load(SeqCst) {
        sleep(MS);
    }
    let second = {
        let (turns, order, entered) = (turns.clone(), order.clone(), entered.clone());
        move || {
            let turn = turns.take(never).unwrap();
            order.fetch_add(1, SeqCst);
            entered.fetch_add(1, SeqCst);
            drop(turn);
        }
    };
    let second = shuttle::thread::spawn(second);
    work_for(25 * MS);
    assert!(turn.ends());
    let before = slept();
    drop(turn);
    first.join().unwrap();
    second.join().unwrap();
    assert_eq!(entered.load(SeqCst), 2);
    assert!(
        timeouts() == Timeouts::Early || slept() == before,
        "{:?}",
        slept() - before
    );
}

/// A caller that gives up its turn holds nobody up, even if it has just become the next.
pub fn turns_are_given_up() {
    let (turns, stop) = (
        Arc::new(Turns::new()),
        Arc::new(atomic::AtomicBool::new(false)),
    );
    let turn = turns.take(never).unwrap();
    let gives_up = {
        let (turns, stop) = (turns.clone(), stop.clone());
        move || match turns.take(|| stop.load(SeqCst)) {
            Ok(_turn) => false,
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::Cancelled);
                true
            }
        }
    };
    let gives_up = shuttle::thread::spawn(gives_up);
    let takes = {
        let turns = turns.clone();
        move || drop(turns.take(never).unwrap())
    };
    let takes = shuttle::thread::spawn(takes);
    let stops = shuttle::thread::spawn(move || stop.store(true, SeqCst));
    work_for(25 * MS);
    let before = slept();
    drop(turn);
    let gave_up = gives_up.join().unwrap();
    takes.join().unwrap();
    stops.join().unwrap();
    // A turn that was taken lasts for its slice, and nobody is woken before.
    assert!(!gave_up || timeouts() == Timeouts::Early || slept() == before);
    drop(turns.take(never).unwrap());
}

/// A wake-up ends the sleep that it comes before, and the one that it comes during.
pub fn wake_ups_are_kept() {
    let waiter = Arc::new(Waiter::default());
    let go = Arc::new(atomic::AtomicUsize::new(0));
    let sleeper = {
        let (waiter, go) = (waiter.clone(), go.clone());
        move || {
            while go.load(SeqCst) < 2 {
                waiter.sleep(Duration::MAX);
            }
        }
    };
    let waker = || {
        let (waiter, go) = (waiter.clone(), go.clone());
        move || {
            go.fetch_add(1, SeqCst);
            waiter.wake();
        }
    };
    threads![sleeper, waker(), waker()];
    crate::all_were_woken();
}
