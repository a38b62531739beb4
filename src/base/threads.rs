//! A persistent pool of threads for data-parallel loops.
//!
//! A decoded token is some two hundred parallel regions of 20 to 100 microseconds each, so workers spin briefly for the next
//! region before they sleep; a general work-stealing pool pays a wake-up for each. Work is split by index only, so results do
//! not depend on the number of threads or on timing.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::alloc;
use super::env;
use super::error::{Result, bail, err};
use super::fork;

/// How many times a thread looks again before it gives up its core: some tens of microseconds.
const SPINS: u32 = 4_000;

thread_local! {
    /// Whether this thread is inside a parallel region.
    static WORKING: Cell<bool> = const { Cell::new(false) };
}

type Task = *const (dyn Fn(usize) + Sync);

struct Region {
    task: Task,
    parts: usize,
}

// SAFETY: the pointer is dereferenced only between publication and the end of `Pool::run`, which outlives both.
unsafe impl Send for Region {}

struct Shared {
    region: Mutex<Option<Region>>,
    wake: Condvar,
    /// Counts regions; a worker takes part once in each new value.
    epoch: AtomicU32,
    next_part: AtomicUsize,
    /// Workers that have not yet finished with the current region.
    active: AtomicUsize,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A fixed set of threads. The thread that calls [`Pool::run`] works too, so a pool of one starts none.
pub struct Pool {
    threads: usize,
    /// Never null. Replaced in the child of a fork, which has none of its threads.
    crew: AtomicPtr<Crew>,
}

/// The threads of a pool in one process.
struct Crew {
    generation: u32,
    /// The parent's, whose locks may be held by threads that do not exist here: it is kept untouched.
    #[expect(dead_code, reason = "kept in reach")]
    parents: Option<&'static Crew>,
    shared: Arc<Shared>,
    workers: Vec<Thread>,
    /// Held for the length of a region: two sessions sharing a pool take turns.
    turn: Mutex<()>,
}

/// Calls `body` with all signals blocked on this thread, and so on the threads it starts: signals are for the host's own
/// threads.
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

/// Bytes of stack of a thread, as the standard library gives it.
const STACK: usize = 2 << 20;

/// A thread of the library's own. The standard library's would note the end of its storage as it starts, and the C library ends the
/// process where it has no memory for the note.
struct Thread(libc::pthread_t);

struct Start<'a> {
    name: CString,
    body: Box<dyn FnOnce() + Send + 'a>,
}

extern "C" fn begin(start: *mut c_void) -> *mut c_void {
    // SAFETY: `Thread::start` made it and gave it away.
    let start = unsafe { Box::from_raw(start.cast::<Start<'_>>()) };
    #[cfg(target_os = "linux")]
    // SAFETY: this thread's own name, ended by a zero byte.
    unsafe {
        libc::pthread_setname_np(libc::pthread_self(), start.name.as_ptr());
    }
    alloc::probe();
    // A panic must not leave the thread; those who start it look after their own.
    let _ = catch_unwind(AssertUnwindSafe(start.body));
    std::ptr::null_mut()
}

impl Thread {
    /// Starts a thread that no signal reaches, and that stays until it is waited for.
    ///
    /// # Safety
    /// What `body` borrows must live until the thread has ended.
    unsafe fn start<'a>(name: &str, body: impl FnOnce() + Send + 'a) -> std::io::Result<Thread> {
        // SAFETY: as promised to this function.
        unsafe { Self::start_with(STACK, name, body) }
    }

    /// The same with `stack` bytes of stack.
    ///
    /// # Safety
    /// As for [`Thread::start`].
    unsafe fn start_with<'a>(
        stack: usize,
        name: &str,
        body: impl FnOnce() + Send + 'a,
    ) -> std::io::Result<Thread> {
        // The system takes 15 bytes of a name.
        let name = CString::new(&name[..name.len().min(15)]).unwrap_or_default();
        let body = Box::new(body);
        let start = Box::into_raw(Box::new(Start { name, body }));
        let mut id = MaybeUninit::uninit();
        // SAFETY: the attributes are made, used and taken down here; the thread gets what it then owns.
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
        // SAFETY: the call has succeeded, so it has filled it.
        Ok(Thread(unsafe { id.assume_init() }))
    }

    /// The processor's time that the thread has taken. It has not been joined, so its clock is there; nothing where it has ended
    /// or the system refuses the clock.
    #[cfg(target_os = "linux")]
    fn processor_time(&self) -> Option<Duration> {
        let mut clock = MaybeUninit::uninit();
        // SAFETY: a thread that was neither joined nor detached.
        if unsafe { libc::pthread_getcpuclockid(self.0, clock.as_mut_ptr()) } != 0 {
            return None;
        }
        let mut time = MaybeUninit::<libc::timespec>::uninit();
        // SAFETY: the calls have room for what they write, and have succeeded where it is read.
        let time = unsafe {
            if libc::clock_gettime(clock.assume_init(), time.as_mut_ptr()) != 0 {
                return None;
            }
            time.assume_init()
        };
        let seconds = u64::try_from(time.tv_sec).ok()?;
        Some(Duration::from_secs(seconds) + Duration::from_nanos(time.tv_nsec.unsigned_abs()))
    }

    /// No clock of a thread: other systems take the time of the machine.
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

/// Threads that end before what they borrow does.
pub struct Scope<'env> {
    threads: RefCell<Vec<Thread>>,
    panic: Arc<Mutex<Option<Box<dyn Any + Send>>>>,
    _borrowed: PhantomData<&'env mut &'env ()>,
}

impl<'env> Scope<'env> {
    /// Starts a thread. A panic in it is raised again when the scope ends.
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
        // Threads cannot start others: this is not theirs to share.
        self.threads.take().into_iter().for_each(Thread::join);
    }
}

/// Calls `body`, which may start threads, and waits until those have ended.
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

/// Calls `body` on a thread of its own: for recursion as deep as a file demands, which may take more stack than a host's thread
/// has.
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

/// Calls `body`, an untrusted program, on a thread of its own with `stack` bytes of stack. Gives nothing if it takes more than
/// `bytes` of memory at a time, or more than `longest` of a processor's time, which neither a busy or stopped machine nor a clock that
/// is set takes from it. Its thread then stands still for ever and keeps what it has: a thread
/// cannot be ended from outside.
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

impl Crew {
    fn new(threads: usize, parents: Option<&'static Crew>) -> Result<Crew> {
        let shared = Arc::new(Shared {
            region: Mutex::new(None),
            wake: Condvar::new(),
            epoch: AtomicU32::new(0),
            next_part: AtomicUsize::new(0),
            active: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let mut crew = Crew {
            generation: fork::generation(),
            parents,
            shared,
            workers: Vec::with_capacity(threads - 1),
            turn: Mutex::new(()),
        };
        for i in 1..threads {
            let shared = crew.shared.clone();
            // SAFETY: it borrows nothing.
            let worker = unsafe { Thread::start(&format!("nvfp4-{i}"), move || work(&shared)) }
                .map_err(|e| err!(OutOfMemory, "starting thread {i} of {threads}: {e}"))?;
            crew.workers.push(worker);
        }
        Ok(crew)
    }

    fn is_of_this_process(&self) -> bool {
        self.generation == fork::generation()
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        {
            let _region = lock(&self.shared.region);
            self.shared.epoch.fetch_add(1, Ordering::Release);
            self.shared.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            worker.join();
        }
    }
}

impl Pool {
    /// A pool that uses `threads` threads, the caller's among them.
    pub fn new(threads: usize) -> Result<Self> {
        if !(1..=1024).contains(&threads) {
            bail!(
                InvalidArgument,
                "a pool takes 1 to 1024 threads, not {threads}"
            );
        }
        let crew = Box::into_raw(Box::new(Crew::new(threads, None)?));
        Ok(Pool {
            threads,
            crew: AtomicPtr::new(crew),
        })
    }

    /// The threads that are there. After a fork they are started anew; where the system refuses that, the caller works alone.
    fn crew(&self) -> &Crew {
        let current = self.crew.load(Ordering::Acquire);
        // SAFETY: this process's crew lives as long as the pool, and its parent's is never freed.
        let known: &'static Crew = unsafe { &*current };
        if known.is_of_this_process() {
            return known;
        }
        let parents = Some(known);
        let fresh = Crew::new(self.threads, parents).or_else(|_| Crew::new(1, parents));
        let fresh = Box::into_raw(Box::new(fresh.expect("a crew of one starts no thread")));
        match self
            .crew
            .compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire)
        {
            // SAFETY: as above.
            Ok(_) => unsafe { &*fresh },
            Err(other) => {
                // SAFETY: nobody has seen `fresh`; as above.
                unsafe {
                    drop(Box::from_raw(fresh));
                    &*other
                }
            }
        }
    }

    /// The number of threads to use when the caller names none: `NVFP4_THREADS`, or one per available core.
    pub fn default_threads() -> Result<usize> {
        Ok(match env::threads()? {
            Some(n) => n,
            None => std::thread::available_parallelism().map_or(1, usize::from),
        })
    }

    /// Threads that take part in a region.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `task(part)` once for each part in `0..parts`, in any order and on any thread of the pool, and returns when all
    /// are done. A panic in a part is raised again here. Called from within a part of any pool, it runs all parts on this
    /// thread.
    pub fn run(&self, parts: usize, task: impl Fn(usize) + Sync) {
        if parts <= 1 || self.threads == 1 || WORKING.get() {
            (0..parts).for_each(task);
            return;
        }
        let crew = self.crew();
        let _turn = lock(&crew.turn);
        let shared = &*crew.shared;
        let task: &(dyn Fn(usize) + Sync) = &task;
        // SAFETY: only the lifetime is erased; no worker touches the task after `active` reaches zero, awaited below.
        let task: Task = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Task>(task) };
        {
            let mut region = lock(&shared.region);
            shared.next_part.store(0, Ordering::Relaxed);
            shared.active.store(crew.workers.len(), Ordering::Relaxed);
            *region = Some(Region { task, parts });
            shared.epoch.fetch_add(1, Ordering::Release);
            shared.wake.notify_all();
        }
        take_parts(shared, task, parts);
        let mut spins = 0;
        while shared.active.load(Ordering::Acquire) != 0 {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                // A worker lost its core to somebody else: let it have this one.
                std::thread::yield_now();
            }
        }
        let panic = lock(&shared.panic).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let crew = *self.crew.get_mut();
        // SAFETY: the pool's own, used by nobody any more.
        unsafe {
            // The threads of a parent process cannot be joined.
            if (*crew).is_of_this_process() {
                drop(Box::from_raw(crew));
            }
        }
    }
}

fn take_parts(shared: &Shared, task: Task, parts: usize) {
    WORKING.set(true);
    let result = catch_unwind(AssertUnwindSafe(|| {
        loop {
            let part = shared.next_part.fetch_add(1, Ordering::Relaxed);
            if part >= parts {
                break;
            }
            // SAFETY: `run` keeps the task alive until every worker has reported that it is done.
            unsafe { (*task)(part) }
        }
    }));
    WORKING.set(false);
    if let Err(panic) = result {
        shared.next_part.store(parts, Ordering::Relaxed);
        lock(&shared.panic).get_or_insert(panic);
    }
}

fn work(shared: &Shared) {
    let mut seen = 0;
    loop {
        let mut spins = 0;
        while shared.epoch.load(Ordering::Acquire) == seen {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
                continue;
            }
            let mut region = lock(&shared.region);
            while shared.epoch.load(Ordering::Acquire) == seen {
                region = shared
                    .wake
                    .wait(region)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
        seen = shared.epoch.load(Ordering::Acquire);
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        let (task, parts) = {
            let region = lock(&shared.region);
            let region = region
                .as_ref()
                .expect("a region is published before its epoch");
            (region.task, region.parts)
        };
        take_parts(shared, task, parts);
        shared.active.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    /// A machine that is busy or stopped, and a clock that is set, are not the work's fault.
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
