//! Processes that fork. A child has the memory of its parent and one thread of it: threads that worked for the parent are gone,
//! and what they had locked stays locked. Here is how the rest of the library finds that out.

use std::any::Any;
use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, Once, PoisonError, RwLock};

use super::alloc;

/// A lock that is held while the process forks, so that no other thread holds it then.
pub trait Held: Sync {
    /// Takes it, until what is returned is dropped.
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

thread_local! {
    /// What the thread that is forking holds meanwhile.
    /// Empty but for that time, so that a thread's end need not drop it: see `abi::guard` on destructors of threads.
    static HELD: RefCell<ManuallyDrop<Vec<Box<dyn Any>>>> =
        const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

extern "C" fn before() {
    HELD.with_borrow_mut(|held| {
        let locks = LOCKS.lock().unwrap_or_else(PoisonError::into_inner);
        held.extend(locks.iter().map(|lock| lock.hold()));
        held.push(Box::new(locks));
    });
    // The last one: taking the others may allocate.
    alloc::hold();
}

extern "C" fn after() {
    alloc::let_go();
    // Without memory of its own there is nothing to give back at the thread's end.
    HELD.with_borrow_mut(|held| drop(std::mem::take(&mut **held)));
}

extern "C" fn after_in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    after();
}

fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: the functions stay: the library is never unloaded. It fails for want of memory only; forks then go unnoticed.
        unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after_in_child)) };
    });
}

/// A number that differs between a process and its children. What stores it can tell later whether it has come through a fork.
pub fn generation() -> u32 {
    watch();
    GENERATION.load(Ordering::Relaxed)
}

/// From now on, forks happen while no other thread has one of `locks`. They are taken in this order.
pub fn keep_whole(locks: &[&'static dyn Held]) {
    watch();
    let mut all = LOCKS.lock().unwrap_or_else(PoisonError::into_inner);
    all.extend(locks);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Forks; the child ends with what `child` says, and has 20 seconds to say it.
    fn forked(child: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child runs `child` and leaves without running anything of the parent's.
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
