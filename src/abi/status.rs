//! Status numbers
//!
//! Every function that can fail returns an #NVFP4_Status. On any value but #NVFP4_OK outputs are untouched, unless the
//! function says otherwise, and the calling thread's last error message is set.

use std::ffi::{CStr, c_char};

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
pub extern "C-unwind" fn NVFP4_status_name(status: NVFP4_Status) -> *const c_char {
    // As in the error table, with a terminating NUL.
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
