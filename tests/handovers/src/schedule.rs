//! Schedules: those of shuttle, with rules for the timekeeper of `base/sync.rs`.

use std::cell::Cell;

use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};

/// The task of the timekeeper, which is the first that an execution starts.
const KEEPER: usize = 1;
/// With early timeouts, the timekeeper may run in one of so many steps.
const SELDOM: u64 = 8;

/// When waits time out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timeouts {
    /// When no thread can run: threads are fast.
    Late,
    /// At any time: threads may be arbitrarily slow.
    Early,
}

/// Another scheduler's schedules, but for the timekeeper.
pub struct Timed<S> {
    inner: S,
    timeouts: Timeouts,
    drawn: u64,
}

impl<S: Scheduler> Timed<S> {
    pub fn new(inner: S, timeouts: Timeouts) -> Timed<S> {
        Timed {
            inner,
            timeouts,
            drawn: 0,
        }
    }

    /// Whether the timekeeper may run although others can.
    fn is_early(&mut self) -> bool {
        // Knuth's MMIX generator.
        let (a, c) = (6_364_136_223_846_793_005, 1_442_695_040_888_963_407);
        self.drawn = self.drawn.wrapping_mul(a).wrapping_add(c);
        self.timeouts == Timeouts::Early && (self.drawn >> 40).is_multiple_of(SELDOM)
    }
}

impl<S: Scheduler> Scheduler for Timed<S> {
    fn new_execution(&mut self) -> Option<Schedule> {
        let schedule = self.inner.new_execution()?;
        self.drawn = self.inner.next_u64();
        Some(schedule)
    }

    fn next_task(
        &mut self,
        all: &[&Task],
        current: Option<TaskId>,
        yields: bool,
    ) -> Option<TaskId> {
        let is_other = |task: &&&Task| usize::from(task.id()) != KEEPER;
        let others: Vec<&Task> = all.iter().filter(is_other).copied().collect();
        let tasks = match others.is_empty() || self.is_early() {
            true => all,
            false => &others,
        };
        self.inner.next_task(tasks, current, yields)
    }

    fn next_u64(&mut self) -> u64 {
        self.inner.next_u64()
    }
}

thread_local! {
    static TIMEOUTS: Cell<Timeouts> = const { Cell::new(Timeouts::Late) };
}

/// When waits of the current program time out.
pub fn timeouts() -> Timeouts {
    TIMEOUTS.get()
}

/// Sets what [`timeouts`] gives.
pub fn set_timeouts(timeouts: Timeouts) {
    TIMEOUTS.set(timeouts);
}
