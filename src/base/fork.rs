//! Support for forking processes. A child has its parent's memory but only one of its threads: the parent's worker threads are gone, and
//! their locks stay locked. The rest of the library detects forks here.

use std::any::Any;
use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError, RwLock, Weak};

use super::alloc;

/// Locks that are held while the process forks, so that no other thread holds them at that moment.
pub trait Held: Send + Sync {
    /// Takes the locks until the result is dropped.
    fn hold(&'static self) -> Box<dyn Any>;
}

impl<T: Send + 'static> Held for Mutex<T> {
    fn hold(&'static self) -> Box<dyn Any> {
        Box::new(self.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<T: Send + Sync + 'static> Held for RwLock<T> {
    fn hold(&'static self) -> Box<dyn Any> {
        Box::new(self.write().unwrap_or_else(PoisonError::into_inner))
    }
}

static GENERATION: AtomicU32 = AtomicU32::new(0);
static LOCKS: Mutex<Vec<&'static dyn Held>> = Mutex::new(Vec::new());
static OWNERS: Mutex<Vec<Weak<dyn Held>>> = Mutex::new(Vec::new());

thread_local! {
    /// Locks that the forking thread holds during a fork, and after them their owners, which need free locks to end.
    /// Empty at all other times, so that a thread's end need not drop it: see `abi::guard` on thread destructors.
    static HELD: RefCell<ManuallyDrop<Vec<Box<dyn Any>>>> =
        const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

extern "C" fn before() {
    HELD.with_borrow_mut(|held| {
        let owners = OWNERS.lock().unwrap_or_else(PoisonError::into_inner);
        let alive: Vec<Arc<dyn Held>> = owners.iter().filter_map(Weak::upgrade).collect();
        for owner in &alive {
            // SAFETY: `HELD` drops the owner after its locks.
            let owner = unsafe { &*Arc::as_ptr(owner) };
            held.push(owner.hold());
        }
        let locks = LOCKS.lock().unwrap_or_else(PoisonError::into_inner);
        held.extend(locks.iter().map(|lock| lock.hold()));
        held.push(Box::new((locks, owners)));
        held.push(Box::new(alive));
    });
    // This one comes last, because taking the others may allocate.
    alloc::hold();
}

extern "C" fn after() {
    alloc::let_go();
    // Left without heap memory, so that nothing has to be freed at the thread's end.
    let held = HELD.with_borrow_mut(|held| std::mem::take(&mut **held));
    // Without the borrow: a model may end here, which calls its host.
    drop(held);
}

extern "C" fn after_in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    after();
}

fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: the functions stay, because the library is never unloaded. It fails only for lack of memory; forks then go undetected.
        unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after_in_child)) };
    });
}

/// A number that differs between a process and its children. A stored value shows later whether a fork has happened.
pub fn generation() -> u32 {
    watch();
    GENERATION.load(Ordering::Relaxed)
}

/// No other thread holds a lock of `owner` during a fork, as long as it lives. Its locks are taken before those of [`keep_whole`]. No code
/// holds locks of two owners.
pub fn keep_owner_whole(owner: Weak<dyn Held>) {
    watch();
    let mut all = OWNERS.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|owner| owner.strong_count() > 0);
    all.push(owner);
}

/// From now on, no other thread holds any of `locks` during a fork. They are taken in this order.
pub fn keep_whole(locks: &[&'static dyn Held]) {
    watch();
    let mut all = LOCKS.lock().unwrap_or_else(PoisonError::into_inner);
    all.extend(locks);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Forks. The child exits with the result of `child`, and has 20 seconds for it.
    fn forked(child: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child runs `child` and exits without running any of the parent's code.
        unsafe {
            match libc::fork() {
                0 => {
                    libc::alarm(20);
                    libc::_exit(i32::from(!child()));
                }
                pid => {
                    let mut status = 0;
                    libc::waitpid(pid, &mut status, 0) == pid && status == 0
                }
            }
        }
    }

    #[test]
    fn a_child_is_of_another_generation_and_its_locks_are_free() {
        static LOCK: Mutex<u32> = Mutex::new(0);
        keep_whole(&[&LOCK]);
        let before = generation();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    *LOCK.lock().unwrap() += 1;
                }
            });
            for _ in 0..50 {
                assert!(forked(|| {
                    *LOCK.lock().unwrap() += 1;
                    generation() == before + 1
                }));
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(generation(), before);
    }

    #[test]
    fn a_pool_works_in_a_child() {
        let pool = crate::base::threads::Pool::new(3).unwrap();
        let sum = || {
            let sum = AtomicU32::new(0);
            pool.run(100, |part| {
                sum.fetch_add(part as u32, Ordering::Relaxed);
            });
            sum.into_inner()
        };
        assert_eq!(sum(), 4950);
        assert!(forked(|| sum() == 4950 && sum() == 4950));
        assert_eq!(sum(), 4950);
    }
}
