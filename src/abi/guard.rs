//! The frame of every exported function: panics stop here and, like any error, become a status and this thread's last error message.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Once, OnceLock};

use super::status::{NVFP4_OK, NVFP4_Status};
use super::{handle, listeners, shared, slots};
use crate::base::{Error, ErrorKind, Result, alloc, entry, fork, locked, panics};
use crate::cuda::KeepContext;

struct Last {
    status: NVFP4_Status,
    /// With a terminating NUL, and none before it.
    text: Vec<u8>,
    /// A result kept for this thread's next call, which may request it.
    kept: Option<Box<dyn Any>>,
}

impl Last {
    const NONE: Last = Last {
        status: NVFP4_OK,
        text: Vec::new(),
        kept: None,
    };
}

// No variable here has a destructor. Registering one takes the loader's lock, so a thread that does so while another runs a constructor of
// a shared library waits for that constructor. If the constructor waits for the thread, both wait forever. Instead a key of the thread
// library, which takes no lock, frees the content of `LAST`: see `end_of_thread`.
thread_local! {
    static LAST: RefCell<ManuallyDrop<Last>> = const { RefCell::new(ManuallyDrop::new(Last::NONE)) };
    /// Whether the end of this thread frees the content of `LAST`.
    static KNOWN: Cell<bool> = const { Cell::new(false) };
    /// Whether this thread's last call failed because there was no memory to register its end. `LAST` is then not touched.
    static REFUSED: Cell<bool> = const { Cell::new(false) };
}

const REFUSAL: &CStr =
    c"the system refused the memory that a thread's first call needs; free something and call again";
/// Upper bound of bytes that the C library allocates at a thread's first call. It ends the process if it cannot.
const FOR_A_THREAD: usize = 4096;

/// Called by the thread library when a thread that used this one ends: frees its message and its kept value.
extern "C" fn end_of_thread(_: *mut c_void) {
    // A later destructor of the host may call the library again.
    KNOWN.set(false);
    let last = LAST.with_borrow_mut(|last| std::mem::replace(&mut **last, Last::NONE));
    // The kept value may belong to the host, whose release function may panic.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(last)));
}

/// Registers `end_of_thread` for this thread. False if there is no memory for that.
fn ask_for_end() -> bool {
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();
    let key = *KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: the number is this frame's, and the function stays: the library is never unloaded.
        let made = unsafe { libc::pthread_key_create(&mut key, Some(end_of_thread)) };
        (made == 0).then_some(key)
    });
    // A process may have used up its keys; the messages of its threads are then leaked.
    key.is_none_or(|key| {
        // SAFETY: a key of this library. The value only has to differ from NULL.
        unsafe { libc::pthread_setspecific(key, std::ptr::without_provenance(1)) == 0 }
    })
}

unsafe extern "C-unwind" {
    fn pthread_testcancel();
}
unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}
/// As in the C library's `pthread.h`.
const PTHREAD_CANCEL_DISABLE: c_int = if cfg!(target_os = "linux") { 1 } else { 0 };

/// While this exists, pthread_cancel() waits: cancellation would unwind frames that hold locks and memory, which ends the process.
struct Uncancelled(c_int);

impl Uncancelled {
    fn new() -> Self {
        let mut before = PTHREAD_CANCEL_DISABLE;
        // SAFETY: a valid state, and room for the previous one.
        unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &mut before) };
        Uncancelled(before)
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        let mut now = 0;
        // SAFETY: the previous state.
        unsafe { pthread_setcancelstate(self.0, &mut now) };
    }
}

/// The point where pthread_cancel() takes effect, if the host's thread can be cancelled. Cancellation unwinds the exported function, which
/// must be `extern "C-unwind"` and hold nothing. A call has this point at its very start, so that no result is lost. A call that frees has
/// none, so that nothing is leaked, and C++ destructors may make it.
fn cancellation_point() {
    // SAFETY: the caller is an exported function, as said above; this crate is built to unwind.
    unsafe { pthread_testcancel() };
}

/// A function of the host as one that may unwind, which [`calling`] asks for.
macro_rules! unwinding {
    (fn($($argument:ty),*) $(-> $result:ty)?, $function:expr) => {{
        type Plain = unsafe extern "C" fn($($argument),*) $(-> $result)?;
        type Unwinding = unsafe extern "C-unwind" fn($($argument),*) $(-> $result)?;
        let function: Plain = $function;
        // SAFETY: both have the same calling convention.
        unsafe { std::mem::transmute::<Plain, Unwinding>(function) }
    }};
}
pub(super) use unwinding;

/// Tells the host that the library no longer uses its data.
pub(super) fn release(callback: Option<unsafe extern "C" fn(*mut c_void)>, user: *mut c_void) {
    if let Some(callback) = callback {
        let callback = unwinding!(fn(*mut c_void), callback);
        // SAFETY: the host's function with the host's data, called once.
        calling(|| unsafe { callback(user) });
    }
}

/// Calls a callback of the host. If it ends its thread or throws, frames are unwound that must not be, which ends the process here with a
/// message. To detect this, `callback` must be called as `extern "C-unwind"`.
pub(super) fn calling<T>(callback: impl FnOnce() -> T) -> T {
    struct Returns;
    impl Drop for Returns {
        fn drop(&mut self) {
            let function = entry::entered().unwrap_or("a function of libNVFP4");
            let line = format!(
                "libNVFP4: a callback of {function} did not return: it ended its thread (pthread_exit) or threw; a callback must return, and cancels by what it returns\n"
            );
            // SAFETY: the text is readable; standard error need not be open.
            unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
            std::process::abort();
        }
    }
    let returns = Returns;
    let result = callback();
    std::mem::forget(returns);
    result
}

/// Runs the body of the exported function `function`.
pub(super) fn enter(function: &'static str, body: impl FnOnce() -> Result<()>) -> NVFP4_Status {
    cancellation_point();
    let _uncancelled = Uncancelled::new();
    match prepared(function, body) {
        Ok(()) => NVFP4_OK,
        Err(status) => status,
    }
}

/// Runs the body of a function that only frees memory: it runs however little memory is left.
pub(super) fn enter_to_free(
    function: &'static str,
    body: impl FnOnce() -> Result<()>,
) -> NVFP4_Status {
    let _uncancelled = Uncancelled::new();
    is_known();
    match caught(function, body) {
        Ok(()) => NVFP4_OK,
        Err(status) => status,
    }
}

/// Runs the body of a function that reads the last error, and leaves it unchanged in any case.
pub(super) fn enter_quietly(body: impl FnOnce() -> Result<()>) -> NVFP4_Status {
    let _uncancelled = Uncancelled::new();
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => NVFP4_OK,
        Ok(Err(error)) => error.kind().status(),
        Err(_) => ErrorKind::Internal.status(),
    }
}

/// Runs the body of a drop-in function, which returns no status: success clears the last error, so that the caller can tell success from
/// failure.
pub(super) fn enter_drop_in<T>(
    function: &'static str,
    otherwise: T,
    body: impl FnOnce() -> Result<T>,
) -> T {
    cancellation_point();
    let _uncancelled = Uncancelled::new();
    remember(NVFP4_OK, "");
    prepared(function, body).unwrap_or(otherwise)
}

/// As [`enter_drop_in`], for a function that only frees memory.
pub(super) fn enter_drop_in_to_free(function: &'static str, body: impl FnOnce() -> Result<()>) {
    let _uncancelled = Uncancelled::new();
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
            &locked::EDGES,
        ]);
    });
    let error = match attempted(function, body) {
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    let status = error.kind().status();
    // A subscriber is foreign code: it may panic, or call the library and fail. The caller must get its message in any case.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        tracing::debug!(status, "{function}: {}", error.message());
    }));
    remember(status, error.message());
    Err(status)
}

/// Runs the part of the exported function `function` that a thread of the library does after it has returned. A panic becomes an error.
pub(super) fn attempted<T>(function: &'static str, body: impl FnOnce() -> Result<T>) -> Result<T> {
    // Unwind safe: state that a panic leaves inconsistent is only reachable through an exclusive handle, which stays unusable.
    panics::attempt(|| {
        let _context = KeepContext::new();
        let _entered = entry::enter(function);
        body()
    })
}

/// Makes `error` this thread's last error, although the call itself succeeds.
pub(super) fn note(error: &Error) -> NVFP4_Status {
    let status = error.kind().status();
    remember(status, error.message());
    status
}

/// Whether the end of this thread is registered; registers it if not. The C library allocates memory for a thread's storage.
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
    let known = there && ask_for_end();
    REFUSED.set(!known);
    KNOWN.set(known);
    known
}

fn remember(status: NVFP4_Status, message: &str) {
    if REFUSED.get() {
        return;
    }
    LAST.with_borrow_mut(|last| {
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
    LAST.with_borrow(|last| last.status)
}

pub(super) fn last_pointer() -> *const c_char {
    if REFUSED.get() {
        return REFUSAL.as_ptr();
    }
    LAST.with_borrow(|last| match &last.text {
        text if text.is_empty() => c"".as_ptr(),
        text => text.as_ptr().cast(),
    })
}

pub(super) fn last_text() -> String {
    if REFUSED.get() {
        return REFUSAL.to_string_lossy().into_owned();
    }
    LAST.with_borrow(|last| match last.text.split_last() {
        Some((_, text)) => String::from_utf8_lossy(text).into_owned(),
        None => String::new(),
    })
}

/// Takes the last error, if any.
pub(super) fn take_last() -> Option<(NVFP4_Status, CString)> {
    if REFUSED.take() {
        return Some((ErrorKind::OutOfMemory.status(), REFUSAL.to_owned()));
    }
    let (status, text) = LAST.with_borrow_mut(|last| {
        let status = std::mem::replace(&mut last.status, NVFP4_OK);
        (status, std::mem::take(&mut last.text))
    });
    // The text has its only NUL at the end.
    let text = CString::from_vec_with_nul(text).unwrap_or_default();
    (status != NVFP4_OK).then_some((status, text))
}

/// Keeps a value for this thread's next call, and drops the one kept before.
pub(super) fn keep<T: 'static>(value: T) {
    let value: Box<dyn Any> = Box::new(value);
    let before = LAST.with_borrow_mut(|last| last.kept.replace(value));
    drop(before);
}

/// Takes the kept value, and returns it if it is a `T`.
pub(super) fn take_kept<T: 'static>() -> Option<Box<T>> {
    let kept = LAST.with_borrow_mut(|last| last.kept.take());
    kept?.downcast().ok()
}

/// Interprets a callback's return value: nonzero cancels.
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

    /// The child process of the test below.
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
