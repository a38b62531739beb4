//! The last error of a thread
//!
//! Each thread keeps the message and status of its last failed call. An error can also be taken out as an object, for use on another
//! thread.

use std::ffi::{CString, c_char};
use std::sync::Arc;

use super::arguments::{Out, copy_text};
use super::guard::{self, enter, enter_quietly, enter_to_free, last_text};
use super::handle::{self, Object};
use super::status::{NVFP4_INVALID_HANDLE, NVFP4_OK, NVFP4_Status};

/// The message of the last call that failed on this thread: one line that says what was wrong and what would be right.
/// Empty if none has failed yet, never NULL. Valid until the next call on this thread that fails or belongs to the drop-in
/// chapter; do not free it.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn NVFP4_last_error() -> *const c_char {
    guard::last_pointer()
}

/// The status that belongs to NVFP4_last_error(). After a function of the drop-in chapter, which returns no status, it
/// tells success from failure.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn NVFP4_last_status() -> NVFP4_Status {
    guard::last_status()
}

/// Copies the message of NVFP4_last_error() into `buffer`, for hosts that may change threads between two calls. For the
/// buffer see TEXT above. This function never changes the last error: if it fails itself, only its status says so.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_last_error_copy(
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    let text = last_text();
    enter_quietly(|| {
        // SAFETY: the pointers are as the header asks.
        unsafe { copy_text(&text, buffer, capacity, length) }
    })
}

/// An error as an object, which may go to another thread. See NVFP4_take_error(). Immutable.
pub struct NVFP4_Error {
    _private: [u8; 0],
}

struct SavedError {
    status: NVFP4_Status,
    message: CString,
}

impl Object for SavedError {
    type Handle = NVFP4_Error;
    const NAME: &'static str = "NVFP4_Error";
}

/// Moves this thread's last error into an object with one reference, for another thread or for later; NVFP4_last_status()
/// is #NVFP4_OK afterwards. `out` gets NULL if no call has failed.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_take_error(out: *mut *mut NVFP4_Error) -> NVFP4_Status {
    enter_quietly(|| {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        out.set(match guard::take_last() {
            None => std::ptr::null_mut(),
            Some((status, message)) => handle::insert(Arc::new(SavedError { status, message })),
        });
        Ok(())
    })
}

/// The status of the call that failed; #NVFP4_OK for NULL, #NVFP4_INVALID_HANDLE if `error` is not a live NVFP4_Error.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn NVFP4_error_status(error: *const NVFP4_Error) -> NVFP4_Status {
    match error.is_null() {
        true => NVFP4_OK,
        false => {
            handle::get::<SavedError>("error", error).map_or(NVFP4_INVALID_HANDLE, |e| e.status)
        }
    }
}

/// The message of the call that failed, as NVFP4_last_error() had it. Valid until the last reference is released. Empty for
/// NULL and if `error` is not a live NVFP4_Error; never NULL.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn NVFP4_error_message(error: *const NVFP4_Error) -> *const c_char {
    // The registry keeps the text in place as long as the handle is live.
    handle::get::<SavedError>("error", error).map_or(c"".as_ptr(), |e| e.message.as_ptr())
}

/// Adds a reference to an error.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_error_retain(error: *mut NVFP4_Error) -> NVFP4_Status {
    enter("NVFP4_error_retain", || {
        handle::retain::<SavedError>("error", error)
    })
}

/// Gives up a reference to an error. After the last one the handle is stale.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_error_release(error: *mut NVFP4_Error) -> NVFP4_Status {
    enter_to_free("NVFP4_error_release", || {
        handle::release::<SavedError>("error", error)
    })
}
