//! Lazily created values, for slow and fallible initialization. A ready value is returned without waiting, and creating one does not block
//! another.

use std::any::Any;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::error::Result;
use super::lock::lock;

/// A value that stays once it is created.
pub struct TryOnce<T> {
    made: OnceLock<T>,
    making: Mutex<()>,
}

impl<T> TryOnce<T> {
    /// No value yet.
    pub const fn new() -> TryOnce<T> {
        TryOnce {
            made: OnceLock::new(),
            making: Mutex::new(()),
        }
    }

    /// The value, if it is ready.
    pub fn get(&self) -> Option<&T> {
        self.made.get()
    }

    /// The value, created by `make` unless it exists or another caller is creating it. Only the caller whose `make` failed gets its error:
    /// the next waiting caller then tries its own.
    pub fn get_or_try(&self, make: impl FnOnce() -> Result<T>) -> Result<&T> {
        if let Some(value) = self.made.get() {
            return Ok(value);
        }
        let _turn = lock(&self.making);
        if let Some(value) = self.made.get() {
            return Ok(value);
        }
        let value = make()?;
        Ok(self.made.get_or_init(|| value))
    }

    /// Waits for who creates the value, and lets nobody begin until the result is dropped: see [`fork::Held`](super::fork::Held).
    pub fn locked(&'static self) -> Box<dyn Any>
    where
        T: Sync,
    {
        Box::new(lock(&self.making))
    }

    /// Takes the value out.
    pub fn take(&mut self) -> Option<T> {
        self.made.take()
    }
}

impl<T> Default for TryOnce<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// A value shared by its users, and dropped with the last of them.
pub struct SharedOnce<T> {
    /// Locked only briefly, never while the value is created.
    made: Mutex<Weak<T>>,
    making: Mutex<()>,
}

impl<T> SharedOnce<T> {
    /// No value yet.
    pub const fn new() -> SharedOnce<T> {
        SharedOnce {
            made: Mutex::new(Weak::new()),
            making: Mutex::new(()),
        }
    }

    /// The value, if it is in use.
    pub fn get(&self) -> Option<Arc<T>> {
        lock(&self.made).upgrade()
    }

    /// The value: see [`TryOnce::get_or_try`].
    pub fn get_or_try(&self, make: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        if let Some(value) = self.get() {
            return Ok(value);
        }
        let _turn = lock(&self.making);
        if let Some(value) = self.get() {
            return Ok(value);
        }
        let value = Arc::new(make()?);
        *lock(&self.made) = Arc::downgrade(&value);
        Ok(value)
    }
}

impl<T> Default for SharedOnce<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use super::*;
    use crate::base::error::{Error, err};

    /// More time than any of these threads needs.
    const PATIENCE: Duration = Duration::from_secs(20);

    /// Tells the other thread that this one is creating its value, and waits until the other one does too.
    fn meet(to: &Sender<()>, from: &Receiver<()>) -> Result<()> {
        let gone = |_| err!(Internal, "the other value is not made at the same time");
        to.send(())
            .map_err(|_| err!(Internal, "the other thread has ended"))?;
        from.recv_timeout(PATIENCE).map_err(gone)
    }

    #[test]
    fn two_values_are_made_at_the_same_time_and_a_ready_one_waits_for_neither() {
        let values = [const { TryOnce::new() }; 2];
        let shared = [const { SharedOnce::new() }; 2];
        let (ready, kept) = (TryOnce::new(), SharedOnce::new());
        ready.get_or_try(|| Ok(7)).unwrap();
        let alive = kept.get_or_try(|| Ok(8)).unwrap();
        let (to_first, from_second) = channel();
        let (to_second, from_first) = channel();
        std::thread::scope(|scope| {
            for (i, (to, from)) in [(to_second, from_second), (to_first, from_first)]
                .into_iter()
                .enumerate()
            {
                let (values, shared, ready, kept) = (&values, &shared, &ready, &kept);
                scope.spawn(move || {
                    let made = values[i].get_or_try(|| {
                        meet(&to, &from)?;
                        assert_eq!(ready.get_or_try(|| unreachable!()).unwrap(), &7);
                        // The other value is still being created.
                        assert!(values[1 - i].get().is_none());
                        meet(&to, &from)?;
                        Ok(i)
                    });
                    assert_eq!(made.unwrap(), &i);
                    let made = shared[i].get_or_try(|| {
                        meet(&to, &from)?;
                        assert_eq!(*kept.get_or_try(|| unreachable!()).unwrap(), 8);
                        assert!(shared[1 - i].get().is_none());
                        meet(&to, &from)?;
                        Ok(i)
                    });
                    assert_eq!(*made.unwrap(), i);
                });
            }
        });
        assert_eq!(*alive, 8);
        assert!(shared.iter().all(|value| value.get().is_none()));
    }

    #[test]
    fn a_value_is_made_once_and_a_failure_is_not_kept() {
        let (value, made) = (TryOnce::new(), AtomicUsize::new(0));
        let failing = || Err::<usize, Error>(err!(Io, "not yet"));
        assert_eq!(value.get_or_try(failing).unwrap_err().message(), "not yet");
        assert!(value.get().is_none());
        let shared = SharedOnce::new();
        assert!(shared.get_or_try(failing).is_err());
        let all: Vec<Arc<usize>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        let make = || Ok(made.fetch_add(1, Relaxed));
                        value.get_or_try(make).unwrap();
                        shared.get_or_try(make).unwrap()
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(made.load(Relaxed), 2);
        assert!(all.iter().all(|a| Arc::ptr_eq(a, &all[0])));
        // Dropped with its last user, then created again.
        drop(all);
        assert!(shared.get().is_none());
        assert_eq!(*shared.get_or_try(|| Ok(9)).unwrap(), 9);
    }
}
