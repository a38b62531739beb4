//! Status numbers and the last error.
//!
//! Every function that can fail returns an #NVFP4_Status. On any value but #NVFP4_OK outputs are untouched, unless the
//! function says otherwise, and the calling thread's last error message is set.

use std::ffi::{CStr, CString, c_char};
use std::sync::Arc;

use super::arguments::{Out, copy_text};
use super::guard::{self, enter, enter_quietly, enter_to_free, last_text};
use super::handle::{self, Object};
use crate::base::error::ErrorKind;

/// The result of a call: #NVFP4_OK, or one of the errors from #NVFP4_INVALID_ARGUMENT on. A number never gets another
/// meaning.
pub type NVFP4_Status = i32;

/// Success.
pub const NVFP4_OK: i32 = 0;
/// An argument is outside what the function accepts: NULL, wrong shape, wrong dtype, out of range.
pub const NVFP4_INVALID_ARGUMENT: i32 = 1;
/// The request is well formed, but this build, device, format or architecture cannot do it.
pub const NVFP4_UNSUPPORTED: i32 = 2;
/// The system refused memory.
pub const NVFP4_OUT_OF_MEMORY: i32 = 3;
/// The allocation would exceed the budget of NVFP4_memory_set_budget().
pub const NVFP4_OVER_BUDGET: i32 = 4;
/// Reading or writing a file failed.
pub const NVFP4_IO: i32 = 5;
/// A file's content contradicts itself or its format.
pub const NVFP4_CORRUPT_FILE: i32 = 6;
/// A named thing (file, tensor, key) is not there.
pub const NVFP4_NOT_FOUND: i32 = 7;
/// The tokens would not fit in the context.
pub const NVFP4_CONTEXT_FULL: i32 = 8;
/// The handle is in use by another call.
pub const NVFP4_BUSY: i32 = 9;
/// A callback, a cancel handle or a cancel flag ended the call.
pub const NVFP4_CANCELLED: i32 = 10;
/// The caller's buffer is too small; the required length was written.
pub const NVFP4_BUFFER_TOO_SMALL: i32 = 11;
/// A handle is NULL, stale, foreign or of another type.
pub const NVFP4_INVALID_HANDLE: i32 = 12;
/// A struct_size or version does not fit this library.
pub const NVFP4_ABI_MISMATCH: i32 = 13;
/// No such device, or its driver is missing.
pub const NVFP4_DEVICE_UNAVAILABLE: i32 = 14;
/// A bug in this library; the message is that of its panic. A handle that was in exclusive use can only be released.
pub const NVFP4_INTERNAL: i32 = 15;

const UNKNOWN: &CStr = c"unknown";

/// The name of a status without its prefix ("INVALID_ARGUMENT"), or "unknown". The text is static.
#[unsafe(no_mangle)]
pub extern "C" fn NVFP4_status_name(status: NVFP4_Status) -> *const c_char {
    // The same names as in the error table, with a terminating NUL.
    const NAMES: [(i32, &CStr); 16] = [
        (NVFP4_OK, c"OK"),
        (NVFP4_INVALID_ARGUMENT, c"INVALID_ARGUMENT"),
        (NVFP4_UNSUPPORTED, c"UNSUPPORTED"),
        (NVFP4_OUT_OF_MEMORY, c"OUT_OF_MEMORY"),
        (NVFP4_OVER_BUDGET, c"OVER_BUDGET"),
        (NVFP4_IO, c"IO"),
        (NVFP4_CORRUPT_FILE, c"CORRUPT_FILE"),
        (NVFP4_NOT_FOUND, c"NOT_FOUND"),
        (NVFP4_CONTEXT_FULL, c"CONTEXT_FULL"),
        (NVFP4_BUSY, c"BUSY"),
        (NVFP4_CANCELLED, c"CANCELLED"),
        (NVFP4_BUFFER_TOO_SMALL, c"BUFFER_TOO_SMALL"),
        (NVFP4_INVALID_HANDLE, c"INVALID_HANDLE"),
        (NVFP4_ABI_MISMATCH, c"ABI_MISMATCH"),
        (NVFP4_DEVICE_UNAVAILABLE, c"DEVICE_UNAVAILABLE"),
        (NVFP4_INTERNAL, c"INTERNAL"),
    ];
    NAMES
        .iter()
        .find(|(number, _)| *number == status)
        .map_or(UNKNOWN, |(_, name)| name)
        .as_ptr()
}

/// The message of the last call that failed on this thread: one line that says what was wrong and what would be right.
/// Empty if none has failed yet, never NULL. Valid until the next call on this thread that fails or belongs to the drop-in
/// chapter; do not free it.
#[unsafe(no_mangle)]
pub extern "C" fn NVFP4_last_error() -> *const c_char {
    guard::last_pointer()
}

/// The status that belongs to NVFP4_last_error(). After a function of the drop-in chapter, which returns no status, it
/// tells success from failure.
#[unsafe(no_mangle)]
pub extern "C" fn NVFP4_last_status() -> NVFP4_Status {
    guard::last_status()
}

/// Copies the message of NVFP4_last_error() into `buffer`, for hosts that may change threads between two calls. For the
/// buffer see TEXT above. This function never changes the last error: if it fails itself, only its status says so.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_last_error_copy(
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

struct Taken {
    status: NVFP4_Status,
    message: CString,
}

impl Object for Taken {
    type Handle = NVFP4_Error;
    const NAME: &'static str = "NVFP4_Error";
}

/// Moves this thread's last error into an object with one reference, for another thread or for later; NVFP4_last_status()
/// is #NVFP4_OK afterwards. `out` gets NULL if no call has failed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_take_error(out: *mut *mut NVFP4_Error) -> NVFP4_Status {
    enter_quietly(|| {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        out.set(match guard::take_last() {
            None => std::ptr::null_mut(),
            Some((status, message)) => handle::insert(Arc::new(Taken { status, message })),
        });
        Ok(())
    })
}

/// The status of the call that failed; #NVFP4_OK for NULL, #NVFP4_INVALID_HANDLE if `error` is not a live NVFP4_Error.
#[unsafe(no_mangle)]
pub extern "C" fn NVFP4_error_status(error: *const NVFP4_Error) -> NVFP4_Status {
    match error.is_null() {
        true => NVFP4_OK,
        false => handle::get::<Taken>("error", error).map_or(NVFP4_INVALID_HANDLE, |e| e.status),
    }
}

/// The message of the call that failed, as NVFP4_last_error() had it. Valid until the last reference is released. Empty for
/// NULL and if `error` is not a live NVFP4_Error; never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn NVFP4_error_message(error: *const NVFP4_Error) -> *const c_char {
    // The registry keeps the text in place as long as the handle is live.
    handle::get::<Taken>("error", error).map_or(c"".as_ptr(), |e| e.message.as_ptr())
}

/// Adds a reference to an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_error_retain(error: *mut NVFP4_Error) -> NVFP4_Status {
    enter("NVFP4_error_retain", || {
        handle::retain::<Taken>("error", error)
    })
}

/// Gives up a reference to an error. After the last one the handle is stale.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_error_release(error: *mut NVFP4_Error) -> NVFP4_Status {
    enter_to_free("NVFP4_error_release", || {
        handle::release::<Taken>("error", error)
    })
}

/// Every status of the error table has its constant here.
const _: () = {
    let mut i = 0;
    while i < ErrorKind::ALL.len() {
        assert!(ErrorKind::ALL[i].status() == i as i32 + 1);
        i += 1;
    }
    assert!(ErrorKind::ALL.len() as i32 == NVFP4_INTERNAL);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_error_table() {
        for kind in ErrorKind::ALL {
            // SAFETY: the function returns static text with a terminator.
            let name = unsafe { CStr::from_ptr(NVFP4_status_name(kind.status())) };
            assert_eq!(name.to_str(), Ok(kind.c_name()));
        }
        // SAFETY: as above.
        let unknown = unsafe { CStr::from_ptr(NVFP4_status_name(-1)) };
        assert_eq!(unknown, UNKNOWN);
    }
}
