//! Converts panics of dependencies to errors, and keeps panics off a host's standard error.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use super::error::{Result, err};

thread_local! {
    /// Whether this thread expects a panic, which is then not printed.
    static EXPECTED: Cell<bool> = const { Cell::new(false) };
}

/// Whether panics are logged instead of printed to standard error.
static LOGGED: AtomicBool = AtomicBool::new(false);

fn install() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            // A thread that is ending may have lost its storage; then no panic is expected.
            if EXPECTED.try_with(Cell::get).unwrap_or(false) {
            } else if LOGGED.load(Ordering::Relaxed) {
                let place = info.location().map(ToString::to_string);
                let place = place.unwrap_or_default();
                tracing::error!(place, "a defect in the library: {}", text(info.payload()));
            } else {
                before(info);
            }
        }));
    });
}

/// Logs panics from now on: the process, and so its standard error, belongs to a host.
pub fn log_all() {
    install();
    LOGGED.store(true, Ordering::Relaxed);
}

/// Runs `body`; a panic becomes an error with its message. State that `body` changes must not be used after a panic.
pub fn caught<T>(body: impl FnOnce() -> T) -> std::result::Result<T, String> {
    install();
    let outer = EXPECTED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(body));
    EXPECTED.set(outer);
    result.map_err(|panic| text(&*panic).to_owned())
}

/// Runs `body`; a panic is a defect, which is logged, and becomes an error. State that `body` changes must not be used after a panic.
pub fn attempt<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    let done = catch_unwind(AssertUnwindSafe(body));
    done.unwrap_or_else(|panic| Err(err!(Internal, "{}", text(&*panic))))
}

/// The message of a panic.
pub fn text(panic: &(dyn Any + Send)) -> &str {
    if let Some(text) = panic.downcast_ref::<&str>() {
        text
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text
    } else {
        "a panic without a message"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;

    #[test]
    fn attempts_give_results_and_errors() {
        assert_eq!(attempt(|| Ok(3)).unwrap(), 3);
        let failed = attempt::<()>(|| Err(err!(Io, "plain"))).unwrap_err();
        assert_eq!((failed.kind(), failed.message()), (ErrorKind::Io, "plain"));
        let panicked = caught(|| attempt::<()>(|| panic!("number {}", 7)));
        let panicked = panicked.unwrap().unwrap_err();
        assert_eq!(panicked.kind(), ErrorKind::Internal);
        assert_eq!(panicked.message(), "number 7");
    }

    #[test]
    fn panics_become_their_messages() {
        assert_eq!(caught(|| 3), Ok(3));
        assert_eq!(caught(|| panic!("plain")), Err::<(), _>("plain".to_owned()));
        let inner = caught(|| caught(|| panic!("number {}", 7)));
        assert_eq!(inner, Ok(Err::<(), _>("number 7".to_owned())));
        assert!(!EXPECTED.get());
    }
}
