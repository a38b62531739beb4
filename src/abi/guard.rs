//! Every exported function runs its body in here: a panic stops here and, like any error, becomes a status and this
//! thread's last error message.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use super::status::{NVFP4_OK, NVFP4_Status};
use super::{handle, listeners, shared, slots};
use crate::base::{Error, ErrorKind, Result, alloc, entry, fork, panics};
use crate::cuda::KeepContext;

struct Last {
    status: NVFP4_Status,
    /// With a terminating NUL, and none before it.
    text: Vec<u8>,
    /// A result kept for this thread's next call, which may ask for it.
    kept: Option<Box<dyn Any>>,
}

thread_local! {
    static LAST: RefCell<Last> = const { RefCell::new(Last { status: NVFP4_OK, text: Vec::new(), kept: None }) };
    /// Whether this thread's thread-local storage is set up.
    static KNOWN: Cell<bool> = const { Cell::new(false) };
    /// Whether this thread's last call failed because there was no memory to set that up. `LAST` is not touched then.
    static REFUSED: Cell<bool> = const { Cell::new(false) };
}

const REFUSAL: &CStr =
    c"the system refused the memory that a thread's first call needs; free something and call again";
/// Bytes that the C library may allocate at a thread's first call. It ends the process if it cannot.
const FOR_A_THREAD: usize = 4096;

/// Runs the body of the exported function `function`.
pub(super) fn enter(function: &'static str, body: impl FnOnce() -> Result<()>) -> NVFP4_Status {
    match prepared(function, body) {
        Ok(()) => NVFP4_OK,
        Err(status) => status,
    }
}

/// Runs the body of a function that frees memory and allocates none: it runs however little memory is left.
pub(super) fn enter_to_free(
    function: &'static str,
    body: impl FnOnce() -> Result<()>,
) -> NVFP4_Status {
    is_known();
    match caught(function, body) {
        Ok(()) => NVFP4_OK,
        Err(status) => status,
    }
}

/// Runs the body of a function that reads the last error, and leaves that unchanged whatever happens.
pub(super) fn enter_quietly(body: impl FnOnce() -> Result<()>) -> NVFP4_Status {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => NVFP4_OK,
        Ok(Err(error)) => error.kind().status(),
        Err(_) => ErrorKind::Internal.status(),
    }
}

/// Runs the body of a drop-in function, which returns no status: success clears the last error, so that the caller can tell
/// success from failure.
pub(super) fn enter_drop_in<T>(
    function: &'static str,
    otherwise: T,
    body: impl FnOnce() -> Result<T>,
) -> T {
    remember(NVFP4_OK, "");
    prepared(function, body).unwrap_or(otherwise)
}

/// The same for one that frees memory.
pub(super) fn enter_drop_in_to_free(function: &'static str, body: impl FnOnce() -> Result<()>) {
    remember(NVFP4_OK, "");
    enter_to_free(function, body);
}

/// Runs a body that may need memory.
fn prepared<T>(
    function: &'static str,
    body: impl FnOnce() -> Result<T>,
) -> std::result::Result<T, NVFP4_Status> {
    if !is_known() {
        return Err(ErrorKind::OutOfMemory.status());
    }
    caught(function, || {
        alloc::check()?;
        body()
    })
}

fn caught<T>(
    function: &'static str,
    body: impl FnOnce() -> Result<T>,
) -> std::result::Result<T, NVFP4_Status> {
    static FIRST: Once = Once::new();
    FIRST.call_once(|| {
        panics::log_all();
        fork::keep_whole(&[
            &handle::LIVE,
            &shared::SHARED,
            &slots::CANCELS.free,
            &listeners::LISTENERS,
        ]);
    });
    // Unwind safe: state that a panic leaves inconsistent is only reachable through an exclusive handle, which stays unusable.
    let error = match catch_unwind(AssertUnwindSafe(|| {
        let _context = KeepContext::new();
        let _entered = entry::enter(function);
        body()
    })) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => error,
        Err(panic) => Error::new(ErrorKind::Internal, panics::text(&*panic)),
    };
    let status = error.kind().status();
    // A subscriber is foreign code: it may panic, or call the library and fail. The caller must get its message all the same.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        tracing::debug!(status, "{function}: {}", error.message());
    }));
    remember(status, error.message());
    Err(status)
}

/// Makes `error` this thread's last error, though the call itself succeeds.
pub(super) fn note(error: &Error) -> NVFP4_Status {
    let status = error.kind().status();
    remember(status, error.message());
    status
}

/// Whether this thread's thread-local storage is set up; sets it up if not. The C library allocates memory to register its
/// destructors.
fn is_known() -> bool {
    if KNOWN.get() {
        return true;
    }
    // SAFETY: what is allocated is freed at once.
    let there = unsafe {
        // Without `black_box` the compiler may drop the unused allocation.
        let probe = std::hint::black_box(libc::malloc(FOR_A_THREAD));
        libc::free(probe);
        !probe.is_null()
    };
    REFUSED.set(!there);
    if there {
        // The storage of a thread that is ending may be gone; its calls then have no message.
        let _ = LAST.try_with(|_| {});
        let _ = std::thread::current();
        KNOWN.set(true);
    }
    there
}

fn remember(status: NVFP4_Status, message: &str) {
    if REFUSED.get() {
        return;
    }
    // The thread's storage may be gone when a destructor of the host calls late; nobody can read the message then.
    let _ = LAST.try_with(|last| {
        let mut last = last.borrow_mut();
        last.status = status;
        last.text.clear();
        last.text
            .extend(message.bytes().map(|b| if b == 0 { b' ' } else { b }));
        last.text.push(0);
    });
}

pub(super) fn last_status() -> NVFP4_Status {
    if REFUSED.get() {
        return ErrorKind::OutOfMemory.status();
    }
    LAST.try_with(|last| last.borrow().status)
        .unwrap_or(NVFP4_OK)
}

pub(super) fn last_pointer() -> *const c_char {
    if REFUSED.get() {
        return REFUSAL.as_ptr();
    }
    LAST.try_with(|last| match &last.borrow().text {
        text if text.is_empty() => c"".as_ptr(),
        text => text.as_ptr().cast(),
    })
    .unwrap_or(c"".as_ptr())
}

pub(super) fn last_text() -> String {
    if REFUSED.get() {
        return REFUSAL.to_string_lossy().into_owned();
    }
    LAST.try_with(|last| match last.borrow().text.split_last() {
        Some((_, text)) => String::from_utf8_lossy(text).into_owned(),
        None => String::new(),
    })
    .unwrap_or_default()
}

/// Takes the last error, if there is one.
pub(super) fn take_last() -> Option<(NVFP4_Status, CString)> {
    if REFUSED.take() {
        return Some((ErrorKind::OutOfMemory.status(), REFUSAL.to_owned()));
    }
    let taken = LAST.try_with(|last| {
        let mut last = last.borrow_mut();
        let status = std::mem::replace(&mut last.status, NVFP4_OK);
        (status, std::mem::take(&mut last.text))
    });
    let (status, text) = taken.ok()?;
    // The text has its only NUL at the end.
    let text = CString::from_vec_with_nul(text).unwrap_or_default();
    (status != NVFP4_OK).then_some((status, text))
}

/// Keeps a value for this thread's next call, and drops the one kept before.
pub(super) fn keep<T: 'static>(value: T) {
    // Dropped at once if the storage of an ending thread is gone.
    let value: Box<dyn Any> = Box::new(value);
    let before = LAST.try_with(|last| last.borrow_mut().kept.replace(value));
    drop(before);
}

/// Takes the kept value, and gives it if it is a `T`.
pub(super) fn take_kept<T: 'static>() -> Option<Box<T>> {
    let kept = LAST.try_with(|last| last.borrow_mut().kept.take());
    kept.ok().flatten()?.downcast().ok()
}

/// What a callback's return value means: non-zero cancels.
pub(super) fn answer(callback: i32) -> ControlFlow<()> {
    match callback {
        0 => ControlFlow::Continue(()),
        _ => ControlFlow::Break(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::err;

    #[test]
    fn a_panic_becomes_a_status_with_its_message() {
        let number = 41;
        let status = enter("f", || panic!("part {number}"));
        assert_eq!(status, ErrorKind::Internal.status());
        assert_eq!(last_text(), "part 41");
        let status = enter("f", || std::panic::panic_any(3));
        assert_eq!(status, ErrorKind::Internal.status());
        assert_eq!(last_text(), "a panic without a message");
    }

    /// Run by the test below in a process of its own.
    #[test]
    #[ignore = "run by panics_are_not_printed"]
    fn panics_in_an_entry_and_in_a_thread() {
        let pool = crate::base::threads::Pool::new(2).unwrap();
        let in_pool = || pool.run(8, |part| assert!(part != 5, "part {part} of a pool"));
        assert_eq!(
            enter("f", || panic!("in an entry")),
            ErrorKind::Internal.status()
        );
        let status = enter("f", || {
            in_pool();
            Ok(())
        });
        assert_eq!(status, ErrorKind::Internal.status());
        assert_eq!(last_text(), "part 5 of a pool");
    }

    #[test]
    fn panics_are_not_printed() {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--nocapture", "--exact"])
            .arg("abi::guard::tests::panics_in_an_entry_and_in_a_thread")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let ran = String::from_utf8_lossy(&output.stdout).contains("1 passed");
        assert!(output.status.success() && ran, "{output:?}");
        assert!(
            !said.contains("panicked") && !said.contains("in an entry"),
            "{said}"
        );
    }

    #[test]
    fn success_keeps_the_message_and_a_drop_in_clears_it() {
        assert_eq!(enter("f", || Err(err!(Io, "a\0b"))), ErrorKind::Io.status());
        assert_eq!(enter("f", || Ok(())), NVFP4_OK);
        assert_eq!(last_text(), "a b");
        assert_eq!(enter_drop_in("f", 7, || Err(err!(Io, "c"))), 7);
        assert_eq!(last_status(), ErrorKind::Io.status());
        assert_eq!(enter_drop_in("f", 7, || Ok(8)), 8);
        assert_eq!((last_status(), last_text()), (NVFP4_OK, String::new()));
        std::thread::spawn(|| assert_eq!(last_text(), ""))
            .join()
            .unwrap();
    }
}
