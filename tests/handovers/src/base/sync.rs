//! Stand-in of the library's `base/sync.rs`, under shuttle's scheduler and a clock of its own. Shuttle's condition variables never time out, so
//! those of this file do: a task, the timekeeper, moves the clock to the next timeout.
//!
//! The scheduler of `schedule.rs` lets it do so when nobody else can run. Time that passes is then time for which every thread slept, and a
//! program whose wake-ups are all sent takes none: see [`slept`].

use std::cell::{Cell, RefCell};
use std::ops::{Add, Deref, DerefMut, Sub};
use std::sync::{Arc, LockResult, PoisonError};
use std::time::Duration;

use shuttle::rand::{Rng, thread_rng};
use shuttle::sync as under;
use shuttle::thread::JoinHandle;

pub use shuttle::sync::atomic;

/// The state of an execution. Its tasks all run on one thread of the system.
#[derive(Default)]
struct World {
    now: Duration,
    slept: Duration,
    timers: Vec<(Duration, Arc<Sleeper>)>,
    /// Where the timekeeper waits for timers.
    keeper: Option<Arc<Sleeper>>,
    is_over: bool,
    threads: Vec<JoinHandle<()>>,
}

std::thread_local! {
    static WORLD: RefCell<World> = RefCell::default();
}

fn world<T>(body: impl FnOnce(&mut World) -> T) -> T {
    WORLD.with_borrow_mut(body)
}

/// A point at which another thread may run.
pub fn switch() {
    shuttle::thread_local! {
        static POINT: atomic::AtomicBool = atomic::AtomicBool::new(false);
    }
    POINT.with(|point| point.load(atomic::Ordering::SeqCst));
}

/// A lock's content, poisoned or not: while a task unwinds, others that run between its destructors seem to unwind too.
fn whole<T>(locked: LockResult<T>) -> T {
    locked.unwrap_or_else(PoisonError::into_inner)
}

/// Runs `program` as the first thread of an execution, and then waits for the threads that it has started.
pub fn run(program: impl FnOnce()) {
    world(|world| *world = World::default());
    let keeper = shuttle::thread::spawn(keep_time);
    program();
    while let Some(thread) = world(|world| world.threads.pop()) {
        thread.join().unwrap();
    }
    world(|world| world.is_over = true);
    wake_keeper();
    keeper.join().unwrap();
}

pub(super) fn started(thread: JoinHandle<()>) {
    world(|world| world.threads.push(thread));
}

/// The time for which all threads slept until the next timeout.
pub fn slept() -> Duration {
    world(|world| world.slept)
}

/// Lets time pass in which this thread works and others may run.
pub fn work_for(time: Duration) {
    switch();
    world(|world| world.now += time);
    switch();
}

/// Lets this thread sleep.
pub fn sleep(time: Duration) {
    let (lock, never) = (Mutex::new(()), Condvar::new());
    drop(whole(never.wait_timeout(whole(lock.lock()), time)));
}

fn keep_time() {
    loop {
        switch();
        if world(|world| world.is_over) {
            return;
        }
        let next = world(|world| {
            world.timers.retain(|(_, sleeper)| sleeper.sleeps());
            let at = world.timers.iter().map(|timer| timer.0).min()?;
            let is_next = |&i: &usize| world.timers[i].0 == at;
            let next: Vec<usize> = (0..world.timers.len()).filter(is_next).collect();
            // Any of several timeouts at the same time may be the first.
            let first = next[thread_rng().gen_range(0..next.len())];
            Some(world.timers.swap_remove(first))
        });
        match next {
            Some((at, sleeper)) => {
                world(|world| {
                    world.slept += at.saturating_sub(world.now);
                    world.now = world.now.max(at);
                });
                sleeper.wake(Woken::ByTime);
            }
            None => {
                let own = Arc::new(Sleeper::default());
                world(|world| world.keeper = Some(own.clone()));
                own.sleep();
            }
        }
    }
}

fn wake_keeper() {
    if let Some(keeper) = world(|world| world.keeper.take()) {
        keeper.wake(Woken::ByThread);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Woken {
    ByThread,
    ByTime,
}

/// A thread that sleeps until it is woken once.
#[derive(Default)]
struct Sleeper {
    /// Read where no other thread can run.
    woken: std::sync::Mutex<Option<Woken>>,
    lock: under::Mutex<()>,
    wakes: under::Condvar,
}

impl Sleeper {
    fn woken(&self) -> Option<Woken> {
        *whole(self.woken.lock())
    }

    fn sleeps(&self) -> bool {
        self.woken().is_none()
    }

    fn sleep(&self) -> Woken {
        let mut lock = whole(self.lock.lock());
        loop {
            if let Some(woken) = self.woken() {
                return woken;
            }
            lock = whole(self.wakes.wait(lock));
        }
    }

    /// Wakes it if it sleeps. Returns whether it did.
    fn wake(&self, by: Woken) -> bool {
        let slept = whole(self.woken.lock()).replace_if_none(by);
        if slept {
            drop(whole(self.lock.lock()));
            self.wakes.notify_one();
        }
        slept
    }
}

trait ReplaceIfNone<T> {
    fn replace_if_none(&mut self, value: T) -> bool;
}

impl<T> ReplaceIfNone<T> for Option<T> {
    fn replace_if_none(&mut self, value: T) -> bool {
        let is_none = self.is_none();
        self.get_or_insert(value);
        is_none
    }
}

#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(under::Mutex<T>);

#[derive(Debug)]
pub struct MutexGuard<'a, T: ?Sized> {
    mutex: &'a Mutex<T>,
    guard: under::MutexGuard<'a, T>,
}

impl<T> Mutex<T> {
    pub const fn new(value: T) -> Mutex<T> {
        Mutex(under::Mutex::new(value))
    }
}

impl<T: ?Sized> Mutex<T> {
    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        let guard = |guard| MutexGuard { mutex: self, guard };
        match self.0.lock() {
            Ok(locked) => Ok(guard(locked)),
            Err(e) => Err(PoisonError::new(guard(e.into_inner()))),
        }
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// Whether a wait has ended by its timeout.
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    pub fn timed_out(&self) -> bool {
        self.0
    }
}

type Waited<'a, T> = LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)>;

/// Wakes nobody without a notification or a timeout. Which of several waiting threads a notification wakes is random.
#[derive(Default)]
pub struct Condvar(std::sync::Mutex<Vec<Arc<Sleeper>>>);

impl std::fmt::Debug for Condvar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Condvar")
    }
}

impl Condvar {
    pub const fn new() -> Condvar {
        Condvar(std::sync::Mutex::new(Vec::new()))
    }

    pub fn wait_timeout<'a, T>(&self, guard: MutexGuard<'a, T>, time: Duration) -> Waited<'a, T> {
        let mutex = guard.mutex;
        // Another thread may run before the lock is free, and none between that and the sleep.
        drop(guard);
        let sleeper = Arc::new(Sleeper::default());
        whole(self.0.lock()).push(sleeper.clone());
        let until = world(|world| world.now.checked_add(time));
        // A wait of thousands of years has no end.
        if let Some(until) = until.filter(|_| time < Duration::MAX / 4) {
            world(|world| world.timers.push((until, sleeper.clone())));
            wake_keeper();
        }
        let woken = sleeper.sleep();
        whole(self.0.lock()).retain(|other| !Arc::ptr_eq(other, &sleeper));
        let timed_out = || WaitTimeoutResult(woken == Woken::ByTime);
        match mutex.lock() {
            Ok(guard) => Ok((guard, timed_out())),
            Err(e) => Err(PoisonError::new((e.into_inner(), timed_out()))),
        }
    }

    pub fn wait_timeout_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        time: Duration,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> Waited<'a, T> {
        let begun = Instant::now();
        while condition(&mut guard) {
            let left = match time {
                Duration::MAX => time,
                time => time.saturating_sub(begun.elapsed()),
            };
            if left.is_zero() {
                return Ok((guard, WaitTimeoutResult(true)));
            }
            guard = self.wait_timeout(guard, left)?.0;
        }
        Ok((guard, WaitTimeoutResult(false)))
    }

    /// The threads that wait and have not been woken.
    fn sleepers(&self) -> Vec<Arc<Sleeper>> {
        let all = whole(self.0.lock());
        all.iter()
            .filter(|sleeper| sleeper.sleeps())
            .cloned()
            .collect()
    }

    pub fn notify_one(&self) {
        switch();
        let sleepers = self.sleepers();
        if !sleepers.is_empty() {
            sleepers[thread_rng().gen_range(0..sleepers.len())].wake(Woken::ByThread);
        }
    }

    pub fn notify_all(&self) {
        switch();
        let sleepers = self.sleepers();
        sleepers.iter().for_each(|sleeper| {
            sleeper.wake(Woken::ByThread);
        });
    }
}

/// A time of the execution's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instant(Duration);

impl Instant {
    pub fn now() -> Instant {
        Instant(world(|world| world.now))
    }

    pub fn elapsed(&self) -> Duration {
        Instant::now().0.saturating_sub(self.0)
    }

    pub fn saturating_duration_since(&self, earlier: Instant) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    pub fn checked_add(&self, time: Duration) -> Option<Instant> {
        self.0.checked_add(time).map(Instant)
    }
}

impl Add<Duration> for Instant {
    type Output = Instant;

    fn add(self, time: Duration) -> Instant {
        Instant(self.0 + time)
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, earlier: Instant) -> Duration {
        self.0 - earlier.0
    }
}

/// A value that each thread of an execution has.
pub struct Local<T: 'static>(pub &'static shuttle::thread::LocalKey<T>);

impl<T> Local<T> {
    pub fn with<R>(&self, body: impl FnOnce(&T) -> R) -> R {
        self.0.with(body)
    }
}

impl<T> Local<Cell<T>> {
    pub fn get(&self) -> T
    where
        T: Copy,
    {
        self.with(Cell::get)
    }

    pub fn set(&self, value: T) {
        self.with(|cell| cell.set(value));
    }

    pub fn replace(&self, value: T) -> T {
        self.with(|cell| cell.replace(value))
    }
}

macro_rules! local {
    ($(#[$attribute:meta])* static $name:ident: $type:ty = const { $value:expr };) => {
        $(#[$attribute])*
        static $name: $crate::base::sync::Local<$type> = {
            shuttle::thread_local! {
                static KEY: $type = const { $value };
            }
            $crate::base::sync::Local(&KEY)
        };
    };
}
pub(crate) use local as thread_local;
