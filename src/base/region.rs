//! Parallel regions, one at a time: the protocol by which threads claim parts, report them and wait for them.
//! [`threads::Pool`](super::threads::Pool) has the threads.
//!
//! # Protocol
//! A region is open from [`Regions::open`] until all its parts are finished. The caller opens it, claims parts like any worker, and waits
//! for parts, never for workers: a worker that sleeps or has lost its core costs nothing unless it holds a part.
//!
//! `claims` holds the region's number and the count of unclaimed parts in one word. A thread claims a part by decrementing that count with
//! a compare-and-swap. Three facts follow.
//! - *A late worker cannot claim.* Its compare-and-swap names the region that it saw. Once that region's count is zero no claim on it
//!   succeeds, and the next region has another number. Numbers repeat after 2^40 regions, which take months: a worker would have to stall
//!   between two instructions for exactly that long.
//! - *A claim keeps the region open.* The region ends when `finished` reaches its number of parts, and a claimed part is counted there only
//!   after it ran. A thread with a claim may therefore read the region on the caller's stack until it reports.
//! - *The pointer belongs to the claim.* It is read before the compare-and-swap. The caller writes a new one only when all parts of the old
//!   region are reported, which includes the one of this claim.
//!
//! # Memory orderings
//! - `claims`: opening stores it with release after the pointer; threads load it with acquire, also when a compare-and-swap fails. Claims
//!   are read-modify-writes and so continue the release sequence: every later claimant sees the pointer too. A successful claim needs no
//!   ordering of its own.
//! - `finished`: reports release what the parts wrote; the caller's load acquires it from all reports, because they form one release
//!   sequence. Resetting it to zero needs no ordering: the store to `claims` publishes it.
//! - `claims` and `idle`: a worker announces that it sleeps, then looks for parts; the caller publishes parts, then looks for sleepers.
//!   Sequential consistency of these four operations makes one of them see the other. A lost wake-up would cost only speed: the caller
//!   claims every part that nobody else does.

use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bits of `claims` that count parts.
const PART_BITS: u32 = 24;
const PARTS: u64 = (1 << PART_BITS) - 1;
/// Upper limit of parts in a region.
pub(super) const MOST_PARTS: usize = PARTS as usize;

/// Set in `finished` while the caller sleeps.
const CALLER_SLEEPS: u32 = 1 << 31;

/// One wake-up in `idle`, above the count of sleepers.
const WAKE_UP: u32 = 1 << 16;
const SLEEPERS: u32 = WAKE_UP - 1;

/// Time that a thread spins before it gives up its core. A decode step has serial stretches of this order.
pub(super) const SPIN: Duration = Duration::from_micros(200);
/// Spins between two readings of the clock.
pub(super) const LOOKS: u32 = 16;

/// The caller's first nap. An idle core takes over threads that wait for another core, so short naps bring back a worker that lost its core
/// inside a part. Linux leaves such a worker in place during the first half millisecond of a nap, and only a new nap asks again.
const FIRST_NAP: Duration = Duration::from_micros(50);
const LONGEST_NAP: Duration = Duration::from_millis(5);

/// Keeps frequently written data on cache lines of its own.
#[repr(align(128))]
struct Line<T>(T);

/// A task and its number of parts.
pub(super) struct Region<'a> {
    task: &'a (dyn Fn(usize) + Sync),
    parts: u32,
}

impl<'a> Region<'a> {
    /// `parts` is at most [`MOST_PARTS`].
    pub(super) fn new(parts: usize, task: &'a (dyn Fn(usize) + Sync)) -> Self {
        assert!(parts <= MOST_PARTS, "{parts} parts in one region");
        let parts = parts as u32;
        Region { task, parts }
    }
}

/// A part claimed by this thread. Not reporting it keeps its region open forever.
pub(super) struct Claim {
    region: *const Region<'static>,
    unclaimed: u32,
}

impl Claim {
    /// Runs the part.
    pub(super) fn run(&self) {
        // SAFETY: the region is open until this part is reported.
        let region = unsafe { &*self.region };
        (region.task)((region.parts - self.unclaimed) as usize);
    }

    /// Number of parts of its region.
    pub(super) fn of(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.region).parts }
    }
}

pub(super) struct Regions {
    /// The number of regions so far, and the unclaimed parts of the last one.
    claims: Line<AtomicU64>,
    /// Reported parts of the open region, and [`CALLER_SLEEPS`].
    finished: Line<AtomicU32>,
    /// Sleeping workers, and wake-ups that no worker has taken yet. Their sum is the number of workers in [`Regions::sleep`].
    idle: Line<AtomicU32>,
    region: AtomicPtr<Region<'static>>,
    /// The caller's core when it opened the region.
    core: AtomicI32,
}

impl Regions {
    pub(super) fn new() -> Self {
        Regions {
            claims: Line(AtomicU64::new(0)),
            finished: Line(AtomicU32::new(0)),
            idle: Line(AtomicU32::new(0)),
            region: AtomicPtr::default(),
            core: AtomicI32::new(-1),
        }
    }

    /// Opens a region.
    ///
    /// # Safety
    /// The last region must be over. The new one must not move until [`Regions::wait`] has returned, which must be called in any case.
    pub(super) unsafe fn open(&self, region: &Region<'_>) {
        self.finished.0.store(0, Ordering::Relaxed);
        self.region
            .store((&raw const *region).cast_mut().cast(), Ordering::Relaxed);
        self.core.store(core(), Ordering::Relaxed);
        let last = self.claims.0.load(Ordering::Relaxed);
        debug_assert_eq!(last & PARTS, 0, "a region that is not over");
        let next = (last | PARTS).wrapping_add(1) | u64::from(region.parts);
        self.claims.0.store(next, Ordering::SeqCst);
    }

    /// Whether there are parts to claim.
    pub(super) fn has_parts(&self) -> bool {
        self.claims.0.load(Ordering::SeqCst) & PARTS != 0
    }

    /// Whether this thread is on the core on which the caller opened the region.
    pub(super) fn is_beside_caller(&self) -> bool {
        let core = core();
        core >= 0 && core == self.core.load(Ordering::Relaxed)
    }

    /// Claims a part. `before` runs in the middle of the claim, where tests delay workers.
    #[inline]
    pub(super) fn claim(&self, before: impl Fn()) -> Option<Claim> {
        let mut claims = self.claims.0.load(Ordering::Acquire);
        while claims & PARTS != 0 {
            let region = self.region.load(Ordering::Relaxed);
            before();
            match self.claims.0.compare_exchange_weak(
                claims,
                claims - 1,
                Ordering::Relaxed,
                Ordering::Acquire,
            ) {
                Ok(_) => {
                    let unclaimed = (claims & PARTS) as u32;
                    return Some(Claim { region, unclaimed });
                }
                Err(now) => claims = now,
            }
        }
        None
    }

    /// Claims all remaining parts, which will not run, and returns their number. Only for a thread with a claim.
    pub(super) fn claim_rest(&self) -> u32 {
        let rest = self.claims.0.fetch_and(!PARTS, Ordering::Relaxed) & PARTS;
        rest as u32
    }

    /// Reports `parts` of a region of `of` parts. What this thread wrote becomes visible to the caller; the region may be gone afterwards.
    pub(super) fn report(&self, parts: u32, of: u32) {
        let before = self.finished.0.fetch_add(parts, Ordering::Release);
        if before & CALLER_SLEEPS != 0 && (before & !CALLER_SLEEPS) + parts == of {
            wake(&self.finished.0, 1);
        }
    }

    /// Waits until all parts of `region` are reported.
    pub(super) fn wait(&self, region: &Region<'_>) {
        let is_over = |finished: u32| finished & !CALLER_SLEEPS == region.parts;
        let started = Instant::now();
        let mut nap = FIRST_NAP;
        loop {
            for _ in 0..LOOKS {
                if is_over(self.finished.0.load(Ordering::Acquire)) {
                    return;
                }
                std::hint::spin_loop();
            }
            if started.elapsed() > SPIN {
                let seen = self.finished.0.fetch_or(CALLER_SLEEPS, Ordering::Acquire);
                if !is_over(seen) {
                    wait(&self.finished.0, seen | CALLER_SLEEPS, Some(nap));
                    nap = LONGEST_NAP.min(nap + nap / 4);
                }
            }
        }
    }

    /// Sleeps until [`Regions::wake`] has a wake-up for this worker. Returns at once if there are parts to claim, or `is_over` says that
    /// the pool is being shut down.
    ///
    /// A worker that returns at once leaves pending wake-ups to the workers that were there when they were posted. If it took one, `idle` could
    /// have again the value that another worker is about to sleep on, whose wake-up would be lost: at a shutdown for good. A worker that has
    /// slept takes one before anything else, because no other sleeper was woken for it.
    pub(super) fn sleep(&self, is_over: impl Fn() -> bool) {
        let idle = &self.idle.0;
        let mut now = idle.fetch_add(1, Ordering::SeqCst) + 1;
        let mut slept = false;
        loop {
            let leaves = self.has_parts() || is_over();
            let is_counted = now & SLEEPERS > 0;
            let after = if leaves && is_counted && (!slept || now < WAKE_UP) {
                now - 1
            } else if now >= WAKE_UP {
                now - WAKE_UP
            } else {
                wait(idle, now, None);
                slept = true;
                now = idle.load(Ordering::SeqCst);
                continue;
            };
            match idle.compare_exchange(now, after, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return,
                Err(other) => now = other,
            }
        }
    }

    /// Wakes sleepers until `wanted` of `workers` are awake.
    pub(super) fn wake(&self, wanted: usize, workers: usize) {
        let idle = &self.idle.0;
        let mut now = idle.load(Ordering::SeqCst);
        loop {
            let sleepers = (now & SLEEPERS) as usize;
            let awake = workers - sleepers.min(workers);
            let woken = wanted.saturating_sub(awake).min(sleepers) as u32;
            if woken == 0 {
                return;
            }
            let after = now - woken + woken * WAKE_UP;
            match idle.compare_exchange(now, after, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return wake(idle, woken),
                Err(other) => now = other,
            }
        }
    }
}

/// The core that this thread runs on, or -1 if the system does not tell.
fn core() -> i32 {
    #[cfg(target_os = "linux")]
    // SAFETY: only gives a number.
    return unsafe { libc::sched_getcpu() };
    #[cfg(not(target_os = "linux"))]
    -1
}

/// Sleeps while `word` equals `value`, until woken, at most for `longest`. May return early.
#[cfg(target_os = "linux")]
fn wait(word: &AtomicU32, value: u32, longest: Option<Duration>) {
    let longest = longest.map(|longest| libc::timespec {
        tv_sec: longest.as_secs() as _,
        tv_nsec: longest.subsec_nanos() as _,
    });
    let longest = longest
        .as_ref()
        .map_or(std::ptr::null(), std::ptr::from_ref);
    let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word and the time outlive the call, which reads them.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, longest) };
}

/// Wakes up to `threads` sleepers on `word`.
#[cfg(target_os = "linux")]
fn wake(word: &AtomicU32, threads: u32) {
    let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the kernel only uses the address as a key.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, threads) };
}

#[cfg(not(target_os = "linux"))]
fn wait(_: &AtomicU32, _: u32, longest: Option<Duration>) {
    std::thread::sleep(longest.unwrap_or(LONGEST_NAP).min(Duration::from_millis(1)));
}

#[cfg(not(target_os = "linux"))]
fn wake(_: &AtomicU32, _: u32) {}

#[cfg(test)]
mod tests {
    use super::*;

    use std::cell::Cell;

    /// Run counts of two parts.
    #[derive(Default)]
    struct Counts([AtomicU32; 2]);

    impl Counts {
        fn count(&self, part: usize) {
            self.0[part].fetch_add(1, Ordering::Relaxed);
        }

        fn are(&self, expected: [u32; 2]) -> bool {
            self.0.each_ref().map(|n| n.load(Ordering::Relaxed)) == expected
        }
    }

    fn run_all(regions: &Regions) {
        while let Some(claim) = regions.claim(|| {}) {
            claim.run();
            regions.report(1, claim.of());
        }
    }

    /// A worker counts as a sleeper and is about to sleep on the word 1 when the pool shuts down and posts its wake-up. Another one that
    /// leaves at that time must not make the word 1 again.
    #[test]
    fn a_worker_that_leaves_takes_no_wake_up_of_another() {
        let regions = Regions::new();
        regions.idle.0.store(1, Ordering::SeqCst);
        regions.wake(2, 2);
        assert_eq!(regions.idle.0.load(Ordering::SeqCst), WAKE_UP);
        regions.sleep(|| true);
        assert_eq!(regions.idle.0.load(Ordering::SeqCst), WAKE_UP);
    }

    /// A worker that sees one region, and claims when the next one is open with as many parts left.
    #[test]
    fn a_late_claim_is_one_of_the_region_that_is_open() {
        let regions = Regions::new();
        let (first, second) = (Counts::default(), Counts::default());
        let (count_first, count_second) = (|part| first.count(part), |part| second.count(part));
        let (one, two) = (Region::new(2, &count_first), Region::new(2, &count_second));
        // SAFETY: both are waited for below, and live longer than the other.
        unsafe { regions.open(&one) };
        let is_late = Cell::new(true);
        let claim = regions.claim(|| {
            if is_late.replace(false) {
                run_all(&regions);
                regions.wait(&one);
                // SAFETY: as above.
                unsafe { regions.open(&two) };
            }
        });
        let claim = claim.unwrap();
        claim.run();
        regions.report(1, claim.of());
        assert!(first.are([1, 1]) && second.are([1, 0]));
        run_all(&regions);
        regions.wait(&two);
        assert!(first.are([1, 1]) && second.are([1, 1]));
    }

    #[test]
    fn a_late_claim_of_a_region_that_is_over_is_none() {
        let regions = Regions::new();
        let counts = Counts::default();
        let count = |part| counts.count(part);
        let region = Region::new(2, &count);
        // SAFETY: it is waited for in the claim below.
        unsafe { regions.open(&region) };
        let claim = regions.claim(|| {
            run_all(&regions);
            regions.wait(&region);
        });
        assert!(claim.is_none() && counts.are([1, 1]));
    }

    #[test]
    fn the_rest_of_a_region_can_be_left_out() {
        let regions = Regions::new();
        let counts = Counts::default();
        let count = |part| counts.count(part);
        let region = Region::new(2, &count);
        // SAFETY: it is waited for below.
        unsafe { regions.open(&region) };
        let claim = regions.claim(|| {}).unwrap();
        assert_eq!(regions.claim_rest(), 1);
        assert!(regions.claim(|| {}).is_none() && !regions.has_parts());
        regions.report(2, claim.of());
        regions.wait(&region);
        assert!(counts.are([0, 0]));
    }
}
