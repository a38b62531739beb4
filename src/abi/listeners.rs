//! The log callbacks of the process.

use std::ffi::{c_char, c_void};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, RwLock};

use super::arguments::User;

/// A log callback.
pub(super) struct Listener {
    pub(super) number: u64,
    pub(super) level: i32,
    pub(super) callback: unsafe extern "C" fn(*mut c_void, i32, *const c_char, usize) -> i32,
    pub(super) user: User,
    pub(super) release: Option<unsafe extern "C" fn(*mut c_void)>,
    /// Held for reading during a call of the callback, so that removing it waits for the call to end. False once removed.
    pub(super) listens: RwLock<bool>,
    /// Set when a log callback removes it, because it cannot wait for calls to end.
    pub(super) gone: AtomicBool,
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: the host's function, called once, when the library no longer has the user data.
            unsafe { release(self.user.0) };
        }
    }
}

/// Sorted by number.
pub(super) static LISTENERS: RwLock<Vec<Arc<Listener>>> = RwLock::new(Vec::new());
