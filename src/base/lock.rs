//! Locks whose data stays valid when a thread panics while it holds them.

use std::sync::PoisonError;

use super::sync::{Mutex, MutexGuard};

/// Locks a mutex, poisoned or not.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
