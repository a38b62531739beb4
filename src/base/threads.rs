//! A persistent pool of threads for data-parallel loops.
//!
//! A decode step has some two hundred parallel regions of 20 to 100 microseconds each, so workers spin briefly for the next region before
//! they sleep; a general work-stealing pool would pay a wake-up for each. Work is split by index only, so results do not depend on the
//! number of threads or on timing. `region.rs` has the protocol: a region ends with its last part, whichever threads ran the parts.
//!
//! The system may take cores away at any time, for another process or because there are more threads than cores. Three rules keep that
//! cheap. No more workers are woken than there are cores. A worker on the caller's core yields, because it would only take parts from the
//! caller. If it is still there after some milliseconds, it starts a successor and ends: the system places a new thread on the least loaded
//! core, but wakes a sleeping one where its waker runs.
//!
//! A pool may have threads of a host in place of workers. The host runs tasks, each of which works for as long as regions follow each other,
//! and returns to the host when none has come for a moment. No region waits for a task that the host has not begun, so a host may run them
//! late, on few threads, or never: the callers then do more of the work.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::alloc;
use super::env;
use super::error::{Result, bail, err};
use super::fork;
use super::lock::lock;
use super::region::{self, Claim, MOST_PARTS, Region, Regions};

/// A yield that returns sooner than this found no other thread on this core.
const ALONE: Duration = Duration::from_micros(50);
/// Time that a worker stays on the caller's core before it starts a successor. It doubles with each successor that began there too.
const PATIENCE: Duration = Duration::from_millis(4);
const MOST_PATIENCE: Duration = Duration::from_millis(512);

thread_local! {
    /// Whether this thread is inside a parallel region.
    static WORKING: Cell<bool> = const { Cell::new(false) };
}

struct PoolState {
    regions: Regions,
    /// Number of cores that the threads may use.
    cores: AtomicUsize,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// The current worker of each number, from 1 on.
    workers: Mutex<Vec<Thread>>,
    /// Tasks that the host runs or has not run yet.
    tasks: AtomicUsize,
    /// Delays workers in tests.
    #[cfg(test)]
    hold: tests::Hold,
}

/// A fixed set of threads. The thread that calls [`Pool::run`] works too, so a pool of one starts none.
pub struct Pool {
    threads: usize,
    /// Schedules tasks on threads of the host, for a pool without workers.
    submit: Option<Arc<Submit>>,
    /// Never null. Replaced in the child of a fork, where the threads do not exist.
    crew: AtomicPtr<Crew>,
}

/// The threads of a pool, in one process.
struct Crew {
    generation: u32,
    /// The parent process's crew. It is kept untouched, because threads that do not exist here may hold its locks.
    parents: Option<&'static Crew>,
    shared: Arc<PoolState>,
    workers: usize,
    /// Held during a region: sessions that share a pool take turns.
    turn: Mutex<()>,
}

/// Calls `body` with all signals blocked on this thread and the threads it starts: signals are for the host's own threads.
pub(super) fn without_signals<T>(body: impl FnOnce() -> T) -> T {
    // SAFETY: fills and uses signal sets of this frame; the thread's own set comes back, also after a panic.
    unsafe {
        let mut all = std::mem::zeroed();
        let mut before = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let result = catch_unwind(AssertUnwindSafe(body));
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

/// Stack size of a thread in bytes, as in the standard library.
const STACK: usize = 2 << 20;

/// A thread of the library. Threads of the standard library register a destructor when they start, and the C library ends the process if it
/// has no memory for that.
struct Thread(libc::pthread_t);

struct Start<'a> {
    name: CString,
    body: Box<dyn FnOnce() + Send + 'a>,
}

extern "C" fn begin(start: *mut c_void) -> *mut c_void {
    // SAFETY: `Thread::start` created it and gave it away.
    let start = unsafe { Box::from_raw(start.cast::<Start<'_>>()) };
    #[cfg(target_os = "linux")]
    // SAFETY: this thread's own name, which ends with a zero byte.
    unsafe {
        libc::pthread_setname_np(libc::pthread_self(), start.name.as_ptr());
    }
    alloc::probe();
    // A panic must not leave the thread; whoever starts a thread handles its own panics.
    let _ = catch_unwind(AssertUnwindSafe(start.body));
    std::ptr::null_mut()
}

impl Thread {
    /// Starts a thread that receives no signals, and that must be joined or detached.
    ///
    /// # Safety
    /// Everything that `body` borrows must live until the thread has ended.
    unsafe fn start<'a>(name: &str, body: impl FnOnce() + Send + 'a) -> std::io::Result<Thread> {
        // SAFETY: as promised to this function.
        unsafe { Self::start_with(STACK, name, body) }
    }

    /// [`Thread::start`] with `stack` bytes of stack.
    ///
    /// # Safety
    /// As for [`Thread::start`].
    unsafe fn start_with<'a>(
        stack: usize,
        name: &str,
        body: impl FnOnce() + Send + 'a,
    ) -> std::io::Result<Thread> {
        // The system limits thread names to 15 bytes.
        let name = CString::new(&name[..name.len().min(15)]).unwrap_or_default();
        let body = Box::new(body);
        let start = Box::into_raw(Box::new(Start { name, body }));
        let mut id = MaybeUninit::uninit();
        // SAFETY: the attributes are created, used and destroyed here; the thread gets what it then owns.
        let error = unsafe {
            let mut attributes = MaybeUninit::uninit();
            let mut error = libc::pthread_attr_init(attributes.as_mut_ptr());
            if error == 0 {
                libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), stack);
                error = without_signals(|| {
                    libc::pthread_create(id.as_mut_ptr(), attributes.as_ptr(), begin, start.cast())
                });
                libc::pthread_attr_destroy(attributes.as_mut_ptr());
            }
            error
        };
        if error != 0 {
            // SAFETY: no thread has it.
            drop(unsafe { Box::from_raw(start) });
            return Err(std::io::Error::from_raw_os_error(error));
        }
        // SAFETY: the call succeeded, so it has filled the id.
        Ok(Thread(unsafe { id.assume_init() }))
    }

    /// Processor time of the thread. It has not been joined, so its clock exists; `None` if it has ended or the system refuses the clock.
    #[cfg(target_os = "linux")]
    fn processor_time(&self) -> Option<Duration> {
        let mut clock = MaybeUninit::uninit();
        // SAFETY: a thread that was neither joined nor detached.
        if unsafe { libc::pthread_getcpuclockid(self.0, clock.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: the call above has succeeded.
        time_of(unsafe { clock.assume_init() })
    }

    /// Other systems have no thread clock; wall time is used instead.
    #[cfg(not(target_os = "linux"))]
    fn processor_time(&self) -> Option<Duration> {
        None
    }

    /// Detaches the thread.
    fn detach(self) {
        // SAFETY: the thread was neither joined nor detached.
        unsafe { libc::pthread_detach(self.0) };
    }

    fn join(self) {
        // SAFETY: a thread that was started and not yet waited for.
        unsafe { libc::pthread_join(self.0, std::ptr::null_mut()) };
    }
}

/// Threads that end before the data they borrow.
pub struct Scope<'env> {
    threads: RefCell<Vec<Thread>>,
    panic: Arc<Mutex<Option<Box<dyn Any + Send>>>>,
    _borrowed: PhantomData<&'env mut &'env ()>,
}

impl<'env> Scope<'env> {
    /// Starts a thread. Its panic is raised again when the scope ends.
    pub fn start(&self, name: &str, body: impl FnOnce() + Send + 'env) -> std::io::Result<()> {
        let panic = self.panic.clone();
        let body = move || {
            if let Err(e) = catch_unwind(AssertUnwindSafe(body)) {
                lock(&panic).get_or_insert(e);
            }
        };
        // SAFETY: `'env` is alive while `scope` runs, which waits for the thread.
        let thread = unsafe { Thread::start(name, body) }?;
        self.threads.borrow_mut().push(thread);
        Ok(())
    }

    fn join(&self) {
        // Taken first: threads cannot start others, so the list is not shared with them.
        self.threads.take().into_iter().for_each(Thread::join);
    }
}

/// Calls `body`, which may start threads, and waits until they have ended.
pub fn scope<'env, T>(body: impl FnOnce(&Scope<'env>) -> T) -> T {
    let scope = Scope {
        threads: RefCell::default(),
        panic: Arc::default(),
        _borrowed: PhantomData,
    };
    let result = catch_unwind(AssertUnwindSafe(|| body(&scope)));
    scope.join();
    let panic = lock(&scope.panic).take();
    match (result, panic) {
        (Ok(result), None) => result,
        (Err(panic), _) | (_, Some(panic)) => resume_unwind(panic),
    }
}

/// Starts a thread that nobody waits for. `body` handles its own panics: one that leaves it ends the thread in silence.
pub fn detached(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    // SAFETY: it borrows nothing.
    let thread = unsafe { Thread::start(name, body) }
        .map_err(|e| err!(OutOfMemory, "starting a thread: {e}"))?;
    thread.detach();
    Ok(())
}

/// Calls `body` on a new thread: for recursion whose depth a file determines, and which may need more stack than a host's thread has.
pub fn with_stack<T: Send>(body: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let made = Mutex::new(None);
    let started = scope(|scope| {
        scope.start("nvfp4-deep", || {
            let result = body();
            *lock(&made) = Some(result);
        })
    });
    started.map_err(|e| err!(OutOfMemory, "starting a thread: {e}"))?;
    made.into_inner()
        .unwrap_or_else(PoisonError::into_inner)
        .unwrap_or_else(|| Err(err!(Internal, "a thread has come to nothing")))
}

/// Calls untrusted code `body` on a new thread with `stack` bytes of stack. Returns `None` if it takes more than `bytes` of memory at a
/// time, or more than `longest` of processor time; a busy or stopped machine or a clock change does not count. Its thread then stands still
/// forever and keeps its memory, because a thread cannot be ended from outside.
pub fn bounded<T: Send + 'static>(
    stack: usize,
    bytes: usize,
    longest: Duration,
    body: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<Option<T>> {
    let shared = Arc::new((alloc::Limit::new(bytes), Mutex::new(None)));
    let own = shared.clone();
    let work = move || {
        let (limit, made) = &*own;
        let result = catch_unwind(AssertUnwindSafe(|| limit.during(body)));
        *lock(made) = Some(result);
        limit.done();
    };
    // SAFETY: it borrows nothing.
    let thread = unsafe { Thread::start_with(stack, "nvfp4-bounded", work) }
        .map_err(|e| err!(OutOfMemory, "starting a thread: {e}"))?;
    let (limit, made) = &*shared;
    if !limit.wait(longest, || thread.processor_time()) {
        thread.detach();
        return Ok(None);
    }
    thread.join();
    match lock(made).take() {
        Some(Ok(result)) => result.map(Some),
        Some(Err(panic)) => resume_unwind(panic),
        None => bail!(Internal, "a thread has come to nothing"),
    }
}

/// Processor time that this thread has taken; of the process, where threads have no clock. Zero if the system refuses both.
pub fn processor_time() -> Duration {
    #[cfg(target_os = "linux")]
    const CLOCK: libc::clockid_t = libc::CLOCK_THREAD_CPUTIME_ID;
    #[cfg(not(target_os = "linux"))]
    const CLOCK: libc::clockid_t = libc::CLOCK_PROCESS_CPUTIME_ID;
    time_of(CLOCK).unwrap_or_default()
}

/// The time of a clock; `None` if the system refuses it.
fn time_of(clock: libc::clockid_t) -> Option<Duration> {
    let mut time = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: the call has room for its result, which is read only after success.
    let time = unsafe {
        if libc::clock_gettime(clock, time.as_mut_ptr()) != 0 {
            return None;
        }
        time.assume_init()
    };
    let seconds = u64::try_from(time.tv_sec).ok()?;
    Some(Duration::from_secs(seconds) + Duration::from_nanos(time.tv_nsec.unsigned_abs()))
}

/// The threads of a crew for a pool of `threads`, the caller's included.
fn own_threads(threads: usize, submit: &Option<Arc<Submit>>) -> usize {
    submit.as_ref().map_or(threads, |_| 1)
}

impl Crew {
    fn new(threads: usize, parents: Option<&'static Crew>) -> Result<Crew> {
        let shared = Arc::new(PoolState {
            regions: Regions::new(),
            cores: AtomicUsize::new(cores()),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
            workers: Mutex::new(Vec::with_capacity(threads - 1)),
            tasks: AtomicUsize::new(0),
            #[cfg(test)]
            hold: tests::Hold::default(),
        });
        let mut crew = Crew {
            generation: fork::generation(),
            parents,
            shared,
            workers: 0,
            turn: Mutex::new(()),
        };
        for number in 1..threads {
            let mut workers = lock(&crew.shared.workers);
            let worker = Worker::new(&crew.shared, number, PATIENCE);
            let worker = worker
                .start()
                .map_err(|e| err!(OutOfMemory, "starting thread {number} of {threads}: {e}"))?;
            workers.push(worker);
            crew.workers = workers.len();
        }
        Ok(crew)
    }

    fn is_of_this_process(&self) -> bool {
        self.generation == fork::generation()
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.regions.wake(self.workers, self.workers);
        // The lock is free while they end: a worker that is about to start its successor sees that it must not.
        let workers = std::mem::take(&mut *lock(&self.shared.workers));
        workers.into_iter().for_each(Thread::join);
    }
}

impl Pool {
    /// A pool of `threads` threads, including the caller's.
    pub fn new(threads: usize) -> Result<Self> {
        Self::with(threads, None)
    }

    /// A pool of the caller's thread and up to `threads - 1` of the host at a time, which run the tasks that `submit` schedules. Starts
    /// none itself. After a fork the caller works alone, because the child has none of the host's threads. `submit` is called by callers of
    /// [`Pool::run`], one at a time.
    pub fn of_host(threads: usize, submit: Arc<Submit>) -> Result<Self> {
        Self::with(threads, Some(submit))
    }

    fn with(threads: usize, submit: Option<Arc<Submit>>) -> Result<Self> {
        if !(1..=1024).contains(&threads) {
            bail!(
                InvalidArgument,
                "a pool takes 1 to 1024 threads, not {threads}"
            );
        }
        let crew = Crew::new(own_threads(threads, &submit), None)?;
        let crew = Box::into_raw(Box::new(crew));
        Ok(Pool {
            threads,
            submit,
            crew: AtomicPtr::new(crew),
        })
    }

    /// The threads of this process. After a fork they are started again; if the system refuses that, the caller works alone.
    fn crew(&self) -> &Crew {
        let current = self.crew.load(Ordering::Acquire);
        // SAFETY: this process's crew lives as long as the pool, and its parent's is never freed.
        let known: &'static Crew = unsafe { &*current };
        if known.is_of_this_process() {
            return known;
        }
        let parents = Some(known);
        let own = own_threads(self.threads, &self.submit);
        let fresh = Crew::new(own, parents).or_else(|_| Crew::new(1, parents));
        let fresh = Box::into_raw(Box::new(fresh.expect("a crew of one starts no thread")));
        match self
            .crew
            .compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire)
        {
            // SAFETY: as above.
            Ok(_) => unsafe { &*fresh },
            Err(other) => {
                // SAFETY: nobody else has seen `fresh`; as above.
                unsafe {
                    drop(Box::from_raw(fresh));
                    &*other
                }
            }
        }
    }

    /// Default number of threads: `NVFP4_THREADS`, or one per available core.
    pub fn default_threads() -> Result<usize> {
        Ok(match env::threads()? {
            Some(n) => n,
            None => std::thread::available_parallelism().map_or(1, usize::from),
        })
    }

    /// Number of threads that take part in a region.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `task(part)` once for each part in `0..parts`, in any order and on any thread of the pool, and returns when all are done. A
    /// panic in a part is raised again here. Called from within a part of any pool, it runs all parts on this thread.
    pub fn run(&self, parts: usize, task: impl Fn(usize) + Sync) {
        if parts <= 1 || self.threads == 1 || WORKING.get() {
            (0..parts).for_each(task);
            return;
        }
        let crew = self.crew();
        let _turn = lock(&crew.turn);
        if let (Some(submit), None) = (&self.submit, crew.parents) {
            // Called while no region is open, which a panic of it would leave to the tasks.
            crew.call_host(&**submit, parts.min(self.threads) - 1);
        }
        for first in (0..parts).step_by(MOST_PARTS) {
            crew.run(MOST_PARTS.min(parts - first), &|part| task(first + part));
        }
    }
}

impl Crew {
    /// Has the host run tasks until `wanted` run or wait.
    fn call_host(&self, submit: &Submit, wanted: usize) {
        let shared = &self.shared;
        let cores = shared.cores.load(Ordering::Relaxed).max(2);
        let here = shared.tasks.load(Ordering::Relaxed);
        // A host that runs a task before it returns has one fewer again.
        for _ in here..wanted.min(cores - 1) {
            submit(Task::new(shared));
        }
    }

    fn run(&self, parts: usize, task: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        let region = Region::new(parts, task);
        // SAFETY: it is waited for below, whatever its parts do, and `turn` allows one region at a time.
        unsafe { shared.regions.open(&region) };
        let others = shared.cores.load(Ordering::Relaxed).max(2) - 1;
        shared.regions.wake(others.min(parts - 1), self.workers);
        if let Some(claim) = shared.regions.claim(|| {}) {
            take_parts(shared, claim, || {});
        }
        shared.regions.wait(&region);
        let panic = lock(&shared.panic).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let crew = *self.crew.get_mut();
        // SAFETY: owned by the pool, and no longer used.
        unsafe {
            // Threads of a parent process cannot be joined.
            if (*crew).is_of_this_process() {
                drop(Box::from_raw(crew));
            }
        }
    }
}

/// Runs the claimed part, and further ones while there are any: no other region opens before this thread has reported.
fn take_parts(shared: &PoolState, first: Claim, before: impl Fn()) {
    let of = first.of();
    let mut done = 0;
    WORKING.set(true);
    let result = catch_unwind(AssertUnwindSafe(|| {
        let mut claim = Some(first);
        while let Some(part) = claim {
            part.run();
            done += 1;
            claim = shared.regions.claim(&before);
        }
    }));
    WORKING.set(false);
    if let Err(panic) = result {
        // The part that panicked, and all unclaimed parts.
        done += 1 + shared.regions.claim_rest();
        lock(&shared.panic).get_or_insert(panic);
    }
    shared.regions.report(done, of);
}

/// Number of cores that this thread may use.
fn cores() -> usize {
    #[cfg(target_os = "linux")]
    // SAFETY: the set is of this frame, and plain numbers.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of_val(&set), &mut set) == 0 {
            return libc::CPU_COUNT(&set).max(1) as usize;
        }
    }
    std::thread::available_parallelism().map_or(usize::MAX, usize::from)
}

/// Schedules a task on a thread of the host, and returns at once. A task that is dropped helps with nothing.
pub type Submit = dyn Fn(Task) + Send + Sync;

/// Helps with the regions of a pool. May outlive the pool.
pub struct Task(Arc<PoolState>);

impl Task {
    /// A task for a pool, which counts it from now on.
    fn new(shared: &Arc<PoolState>) -> Task {
        shared.tasks.fetch_add(1, Ordering::Relaxed);
        Task(shared.clone())
    }

    /// Helps until no region has come for 200 µs. A panic in a part is raised again by the caller of its region.
    pub fn run(self) {
        let shared = &*self.0;
        let regions = &shared.regions;
        let mut idle = Instant::now();
        while !shared.stop.load(Ordering::SeqCst) {
            let waits = has_parts_soon(regions) || idle.elapsed() <= region::SPIN;
            if waits && regions.is_beside_caller() && leaves_core_to_caller() {
                continue;
            }
            if let Some(claim) = regions.claim(|| {}) {
                take_parts(shared, claim, || {});
                idle = Instant::now();
            } else if idle.elapsed() > region::SPIN {
                break;
            }
        }
    }

    /// A pointer that [`Task::from_raw`] takes back, once.
    pub fn into_raw(self) -> *const () {
        let task = std::mem::ManuallyDrop::new(self);
        // SAFETY: the task is not dropped, so its reference goes with the pointer.
        Arc::into_raw(unsafe { std::ptr::read(&raw const task.0) }).cast()
    }

    /// The task of a pointer.
    ///
    /// # Safety
    /// The pointer is of [`Task::into_raw`], and has not been taken back.
    pub unsafe fn from_raw(task: *const ()) -> Task {
        // SAFETY: promised by the caller.
        Task(unsafe { Arc::from_raw(task.cast()) })
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.tasks.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether there are parts to claim, now or within a few spins.
fn has_parts_soon(regions: &Regions) -> bool {
    (0..region::LOOKS).any(|_| {
        std::hint::spin_loop();
        regions.has_parts()
    })
}

/// Yields this core to the caller, and returns whether the caller took it.
fn leaves_core_to_caller() -> bool {
    let offered = Instant::now();
    std::thread::yield_now();
    offered.elapsed() > ALONE
}

/// A worker thread of a pool.
struct Worker {
    shared: Arc<PoolState>,
    number: usize,
    /// Time on the caller's core before it starts a successor.
    patience: Duration,
    born: Instant,
    /// Whether it has worked on another core than the caller's.
    was_apart: bool,
}

impl Worker {
    fn new(shared: &Arc<PoolState>, number: usize, patience: Duration) -> Self {
        Worker {
            shared: shared.clone(),
            number,
            patience,
            born: Instant::now(),
            was_apart: false,
        }
    }

    fn start(self) -> std::io::Result<Thread> {
        let name = format!("nvfp4-{}", self.number);
        // SAFETY: it borrows nothing.
        unsafe { Thread::start(&name, move || self.work()) }
    }

    fn work(mut self) {
        let shared = self.shared.clone();
        let regions = &shared.regions;
        let before = || {
            #[cfg(test)]
            shared.hold.here();
        };
        let mut idle = Instant::now();
        while !shared.stop.load(Ordering::SeqCst) {
            let has_parts = has_parts_soon(regions);
            let waits = has_parts || idle.elapsed() <= region::SPIN;
            if waits && regions.is_beside_caller() {
                if leaves_core_to_caller() {
                    if self.is_replaced() {
                        return;
                    }
                    continue;
                }
            } else if has_parts {
                self.was_apart = true;
            }
            if let Some(claim) = regions.claim(before) {
                take_parts(&shared, claim, before);
                idle = Instant::now();
            } else if idle.elapsed() > region::SPIN {
                regions.sleep(|| shared.stop.load(Ordering::SeqCst));
                shared.cores.store(cores(), Ordering::Relaxed);
                idle = Instant::now();
            }
        }
    }

    /// Starts a successor, which the system may place better, if it is time. Returns whether there is one now: this thread then ends.
    fn is_replaced(&self) -> bool {
        if self.born.elapsed() < self.patience || self.shared.cores.load(Ordering::Relaxed) == 1 {
            return false;
        }
        let patience = match self.was_apart {
            true => PATIENCE,
            false => MOST_PATIENCE.min(self.patience * 2),
        };
        let mut workers = lock(&self.shared.workers);
        // If the pool is being shut down, its threads have been taken.
        let Some(place) = workers.get_mut(self.number - 1) else {
            return false;
        };
        let Ok(successor) = Worker::new(&self.shared, self.number, patience).start() else {
            return false;
        };
        std::mem::replace(place, successor).detach();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::sync::atomic::AtomicU32;
    use std::sync::mpsc;

    /// Stops workers in the middle of a claim: they have seen a region, but not claimed a part of it.
    #[derive(Default)]
    pub(super) struct Hold {
        is_shut: AtomicBool,
        held: AtomicUsize,
    }

    impl Hold {
        pub(super) fn here(&self) {
            if self.is_shut.load(Ordering::Relaxed) {
                self.held.fetch_add(1, Ordering::Relaxed);
                while self.is_shut.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
                self.held.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    fn shared(pool: &Pool) -> Arc<PoolState> {
        pool.crew().shared.clone()
    }

    /// Calls `body` on another thread, and fails if it takes longer than a minute.
    fn in_time(body: impl FnOnce() + Send + 'static) {
        let (ended, end) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            body();
            let _ = ended.send(());
        });
        if end.recv_timeout(Duration::from_secs(60)) == Err(mpsc::RecvTimeoutError::Timeout) {
            panic!("it does not end");
        }
        thread.join().unwrap();
    }

    /// Runs a region of `parts` parts, and checks that each runs once.
    fn run_once_each(pool: &Pool, parts: usize) {
        let counts: Vec<AtomicU32> = (0..parts).map(|_| AtomicU32::new(0)).collect();
        pool.run(parts, |part| {
            counts[part].fetch_add(1, Ordering::Relaxed);
            (0..20).for_each(|_| std::hint::spin_loop());
        });
        assert!(
            counts
                .iter()
                .all(|count| count.load(Ordering::Relaxed) == 1)
        );
    }

    /// Runs such a region at another stack address.
    #[inline(never)]
    fn run_further_down(pool: &Pool, parts: usize) {
        let room = std::hint::black_box([u8::MAX; 4096]);
        run_once_each(pool, parts);
        std::hint::black_box(&room);
    }

    #[test]
    fn a_region_ends_without_a_late_worker() {
        in_time(|| {
            let pool = Pool::new(2).unwrap();
            let shared = shared(&pool);
            shared.hold.is_shut.store(true, Ordering::Relaxed);
            while shared.hold.held.load(Ordering::Relaxed) == 0 {
                run_once_each(&pool, 4);
            }
            for parts in 2..200 {
                run_once_each(&pool, parts);
            }
            shared.hold.is_shut.store(false, Ordering::Relaxed);
            for parts in 2..200 {
                run_once_each(&pool, parts);
            }
        });
    }

    #[test]
    fn late_workers_run_nothing_of_regions_that_are_over() {
        in_time(|| {
            let pool = Pool::new(4).unwrap();
            let shared = shared(&pool);
            let is_over = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
                    while !is_over.load(Ordering::Relaxed) {
                        random ^= random << 13;
                        random ^= random >> 7;
                        random ^= random << 17;
                        let hold = &shared.hold.is_shut;
                        hold.store(random & 3 != 0, Ordering::Relaxed);
                        std::thread::sleep(Duration::from_micros(random >> 8 & 127));
                    }
                    shared.hold.is_shut.store(false, Ordering::Relaxed);
                });
                for n in 0..20_000 {
                    // Few different numbers, so that a number of parts that a late worker saw soon comes again.
                    let parts = 2 + n % 2;
                    if n % 100 == 98 {
                        let run = || pool.run(parts, |part| assert!(part != n % parts, "a part"));
                        catch_unwind(AssertUnwindSafe(run)).unwrap_err();
                    } else if n % 4 < 2 {
                        run_once_each(&pool, parts);
                    } else {
                        run_further_down(&pool, parts);
                    }
                }
                is_over.store(true, Ordering::Relaxed);
            });
        });
    }

    #[test]
    fn workers_that_sleep_are_woken() {
        in_time(|| {
            let pool = Pool::new(3).unwrap();
            for _ in 0..100 {
                std::thread::sleep(Duration::from_millis(1));
                let begun = AtomicUsize::new(0);
                // No part ends before another thread has arrived.
                pool.run(2, |_| {
                    begun.fetch_add(1, Ordering::Relaxed);
                    while begun.load(Ordering::Relaxed) < 2 {
                        std::thread::yield_now();
                    }
                });
            }
        });
    }

    #[test]
    fn a_worker_may_be_replaced() {
        in_time(|| {
            let pool = Pool::new(2).unwrap();
            let shared = shared(&pool);
            let first = lock(&shared.workers)[0].0;
            shared.cores.store(2, Ordering::Relaxed);
            let replaces = |number| Worker::new(&shared, number, Duration::ZERO).is_replaced();
            assert!(replaces(1));
            assert_ne!(first, lock(&shared.workers)[0].0);
            (2..100).for_each(|parts| run_once_each(&pool, parts));
            drop(pool);
            assert!(!replaces(1), "a pool that is taken down");
            // The threads have ended, and dropped what they held.
            while Arc::strong_count(&shared) > 1 {
                std::thread::yield_now();
            }
        });
    }

    /// A host that runs each task on a thread of its own, and says how many it has run.
    fn host() -> (Arc<AtomicUsize>, Arc<Submit>) {
        let ran = Arc::new(AtomicUsize::new(0));
        let count = ran.clone();
        let submit = move |task: Task| {
            count.fetch_add(1, Ordering::Relaxed);
            std::thread::spawn(|| task.run());
        };
        (ran, Arc::new(submit))
    }

    #[test]
    fn a_host_runs_parts_on_its_threads() {
        in_time(|| {
            let (ran, submit) = host();
            let pool = Pool::of_host(3, submit).unwrap();
            let shared = shared(&pool);
            shared.cores.store(3, Ordering::Relaxed);
            let threads = Mutex::new(std::collections::HashSet::new());
            while lock(&threads).len() < 3 {
                pool.run(3, |_| {
                    lock(&threads).insert(std::thread::current().id());
                    std::thread::sleep(Duration::from_millis(1));
                });
                assert!(shared.tasks.load(Ordering::Relaxed) <= 2);
            }
            (2..200).for_each(|parts| run_once_each(&pool, parts));
            assert!(ran.load(Ordering::Relaxed) >= 2);
            let panics = || pool.run(8, |part| assert!(part != 5, "part five"));
            catch_unwind(AssertUnwindSafe(panics)).unwrap_err();
            run_once_each(&pool, 10);
            drop(pool);
            while shared.tasks.load(Ordering::Relaxed) > 0 {
                std::thread::yield_now();
            }
        });
    }

    /// Regions end whatever a host does with its tasks: it drops them, runs them before it returns, or runs them after the pool is gone.
    #[test]
    fn a_region_waits_for_no_task_of_a_host() {
        in_time(|| {
            let pool = Pool::of_host(4, Arc::new(drop)).unwrap();
            (2..50).for_each(|parts| run_once_each(&pool, parts));
            assert_eq!(shared(&pool).tasks.load(Ordering::Relaxed), 0);

            let pool = Pool::of_host(4, Arc::new(Task::run)).unwrap();
            (2..10).for_each(|parts| run_once_each(&pool, parts));

            let late = Arc::new(Mutex::new(Vec::new()));
            let kept = late.clone();
            let keep = move |task: Task| lock(&kept).push(task.into_raw() as usize);
            let pool = Pool::of_host(2, Arc::new(keep)).unwrap();
            (2..50).for_each(|parts| run_once_each(&pool, parts));
            drop(pool);
            let late = std::mem::take(&mut *lock(&late));
            assert_eq!(late.len(), 1);
            for task in late {
                // SAFETY: each comes from `into_raw`, once.
                unsafe { Task::from_raw(task as *const ()) }.run();
            }
        });
    }

    #[test]
    fn a_host_that_panics_leaves_no_region_open() {
        let pool = Pool::of_host(2, Arc::new(|_| panic!("no thread"))).unwrap();
        let run = || pool.run(4, |_| ());
        catch_unwind(AssertUnwindSafe(run)).unwrap_err();
        assert_eq!(shared(&pool).tasks.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_region_may_have_more_parts_than_are_counted_at_once() {
        let pool = Pool::new(2).unwrap();
        let (parts, sum) = (MOST_PARTS + 3, AtomicUsize::new(0));
        pool.run(parts, |part| {
            if part % 100_000 == 0 || part >= MOST_PARTS {
                sum.fetch_add(part, Ordering::Relaxed);
            }
        });
        let expected: usize = (0..parts).step_by(100_000).sum::<usize>() + 3 * MOST_PARTS + 3;
        assert_eq!(sum.into_inner(), expected);
    }

    #[test]
    fn every_part_runs_once() {
        for threads in [1, 2, 3] {
            let pool = Pool::new(threads).unwrap();
            for parts in [0, 1, 2, 7, 100] {
                let counts: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
                pool.run(parts, |p| {
                    counts[p].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_part_may_use_pools() {
        let (pool, other) = (Pool::new(2).unwrap(), Pool::new(3).unwrap());
        let sum = AtomicUsize::new(0);
        pool.run(8, |_| {
            for inner in [&pool, &other] {
                inner.run(10, |p| {
                    sum.fetch_add(p, Ordering::Relaxed);
                });
            }
        });
        assert_eq!(sum.into_inner(), 8 * 2 * 45);
    }

    #[test]
    fn a_scope_waits_for_its_threads_and_raises_their_panics() {
        let (sum, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let count = |n| {
            std::thread::sleep(std::time::Duration::from_millis(n as u64));
            assert!(n != 5, "thread {n}");
            sum.fetch_add(n, Ordering::Relaxed);
        };
        let caught = catch_unwind(AssertUnwindSafe(|| {
            scope(|scope| {
                for n in [1, 5, 9] {
                    scope
                        .start("nvfp4-test-of-threads", move || count(n))
                        .unwrap();
                }
                ended.fetch_add(1, Ordering::Relaxed);
            });
        }));
        assert_eq!(
            *caught.unwrap_err().downcast::<String>().unwrap(),
            "thread 5"
        );
        assert_eq!((sum.into_inner(), ended.into_inner()), (10, 1));
    }

    /// A busy or stopped machine, or a clock change, must not count against the work.
    #[test]
    fn a_limit_of_time_counts_the_time_of_a_processor() {
        let longest = Duration::from_millis(200);
        let waits = || {
            std::thread::sleep(Duration::from_millis(600));
            Ok(7)
        };
        assert_eq!(bounded(STACK, 1 << 20, longest, waits).unwrap(), Some(7));
        let begun = std::time::Instant::now();
        let works = move || {
            let mut texts = Vec::new();
            while begun.elapsed() < Duration::from_secs(60) {
                texts = vec![format!("{texts:?}").len()];
            }
            Ok(8)
        };
        assert_eq!(bounded(STACK, 1 << 20, longest, works).unwrap(), None);
        let taken = begun.elapsed();
        assert!(
            longest <= taken && taken < Duration::from_secs(50),
            "{taken:?}"
        );
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(2).unwrap();
        let caught = catch_unwind(AssertUnwindSafe(|| {
            pool.run(8, |p| assert!(p != 5, "part five"))
        }));
        assert_eq!(
            *caught.unwrap_err().downcast::<&str>().unwrap(),
            "part five"
        );
        let sum = AtomicUsize::new(0);
        pool.run(10, |p| {
            sum.fetch_add(p, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45);
    }
}
