//! A Rust program with a subscriber of its own for the library's events: adding a log callback of the C interface is then refused. In a
//! separate file, because a process has one subscriber.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;

use NVFP4::abi::last_error::NVFP4_last_error;
use NVFP4::abi::library::{NVFP4_LOG_DEBUG, NVFP4_log_add, NVFP4_log_remove};
use NVFP4::abi::status::{NVFP4_NOT_FOUND, NVFP4_UNSUPPORTED};

/// A subscriber that wants nothing.
struct Quiet;

impl tracing::Subscriber for Quiet {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        false
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {}

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

unsafe extern "C" fn take(_: *mut c_void, _: i32, _: *const c_char, _: usize) -> i32 {
    0
}

#[test]
fn a_callback_that_will_never_be_called_is_refused_each_time() {
    tracing::subscriber::set_global_default(Quiet).unwrap();
    for attempt in 1..=3 {
        let mut token = 0;
        // SAFETY: the callback uses nothing that it is given.
        let status = unsafe {
            NVFP4_log_add(
                Some(take),
                ptr::null_mut(),
                NVFP4_LOG_DEBUG,
                None,
                &mut token,
            )
        };
        assert_eq!(status, NVFP4_UNSUPPORTED, "attempt {attempt}");
        // SAFETY: the text is valid until the next failure on this thread.
        let said = unsafe { CStr::from_ptr(NVFP4_last_error()) };
        assert!(said.to_string_lossy().contains("subscriber of its own"));
    }
    assert_eq!(NVFP4_log_remove(0), NVFP4_NOT_FOUND);
}
