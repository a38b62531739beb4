//! The library itself: versions, logging, threads and the capabilities of this machine.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::fmt::{self, Write};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use serde_json::json;
use tracing::field::{Field, Visit};
use tracing::span;
use tracing::{Event, Level, Metadata, Subscriber};

use super::arguments::{Out, User, choice, copy_text, count};
use super::guard::{calling, enter, unwinding};
use super::listeners::{LISTENERS, Listener};
use super::shared;
use super::status::NVFP4_Status;
use crate::base::error::{Result, bail, err};
use crate::base::{env, host_memory, memory};
use crate::cpu::Level as Isa;
use crate::cuda;
use crate::ops::backend::present;
use crate::ops::{Device, transfer};

/// Version of the library this header belongs to.
pub const NVFP4_VERSION_MAJOR: i32 = 0;
/// See #NVFP4_VERSION_MAJOR.
pub const NVFP4_VERSION_MINOR: i32 = 1;
/// See #NVFP4_VERSION_MAJOR.
pub const NVFP4_VERSION_PATCH: i32 = 0;
/// The three as one number that grows with each version: major * 10000 + minor * 100 + patch.
pub const NVFP4_VERSION_NUMBER: i32 = 100;
/// Version of the binary interface (ABI) that this header describes. A program built with one number runs with any library
/// that reports the same number.
pub const NVFP4_ABI_VERSION: i32 = 1;

/// The level if there are no callbacks.
const OFF: i32 = 0;
/// Log errors inside the library.
pub const NVFP4_LOG_ERROR: i32 = 1;
/// Log warnings, and more severe messages.
pub const NVFP4_LOG_WARN: i32 = 2;
/// Log milestones, and more severe messages.
pub const NVFP4_LOG_INFO: i32 = 3;
/// Log details, every error returned among them, and more severe messages.
pub const NVFP4_LOG_DEBUG: i32 = 4;
/// Log everything.
pub const NVFP4_LOG_TRACE: i32 = 5;

/// Receives a log message: one line of UTF-8, `length` bytes without a NUL. Unlike other callbacks it stays registered, and
/// is called on any thread that logs, on several at once too. Calls of the library from within it are not logged; it may
/// add and remove log callbacks, even itself, but should do no more. Its return value is ignored; return 0.
pub type NVFP4_LogCallback = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        level: i32,
        message: *const c_char,
        length: usize,
    ) -> i32,
>;

/// Called when the user data of a log callback is no longer used.
pub type NVFP4_LogRelease = Option<unsafe extern "C" fn(user: *mut c_void)>;

const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");

/// Version of the loaded library, as "major.minor.patch". The text is static.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn NVFP4_version() -> *const c_char {
    VERSION.as_ptr().cast()
}

/// The #NVFP4_ABI_VERSION of the loaded library. A host that loads the library by name compares it with the one it was
/// built with.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn NVFP4_abi_version() -> i32 {
    NVFP4_ABI_VERSION
}

/// The #NVFP4_VERSION_NUMBER of the loaded library.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn NVFP4_version_number() -> i32 {
    NVFP4_VERSION_NUMBER
}

/// Checks that the loaded library is compatible with a program, which calls NVFP4_check_version(#NVFP4_ABI_VERSION,
/// #NVFP4_VERSION_NUMBER): the library must have the same binary interface and be no older than the header that the program
/// was built with. Otherwise the result is #NVFP4_ABI_MISMATCH, and the message names both versions and says what to
/// install.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn NVFP4_check_version(
    abi_version: i32,
    version_number: i32,
) -> NVFP4_Status {
    enter("NVFP4_check_version", || {
        count("version_number", version_number.into())?;
        check_version(abi_version, version_number)
    })
}

fn check_version(abi: i32, number: i32) -> Result<()> {
    if abi == NVFP4_ABI_VERSION && number <= NVFP4_VERSION_NUMBER {
        return Ok(());
    }
    let theirs = dotted(number);
    let remedy = match number > NVFP4_VERSION_NUMBER {
        true => format!("install libNVFP4 {theirs} or later"),
        false => {
            format!("install libNVFP4 {theirs}, or build the program with the library's nvfp4.h")
        }
    };
    bail!(
        AbiMismatch,
        "this program was built with nvfp4.h {theirs} (ABI {abi}), and the library that was loaded is {} (ABI {NVFP4_ABI_VERSION}); {remedy}",
        env!("CARGO_PKG_VERSION")
    )
}

/// Formats a version number as "major.minor.patch".
fn dotted(number: i32) -> String {
    format!("{}.{}.{}", number / 10000, number / 100 % 100, number % 100)
}

/// The number of the next callback. Numbers are not reused.
static NEXT: AtomicU64 = AtomicU64::new(1);
/// The least severe level of all callbacks.
static LEVEL: AtomicI32 = AtomicI32::new(OFF);
/// Result of installing [`ToHost`] as the process's subscriber, once tried. A process can have only one.
static INSTALLED: OnceLock<Result<()>> = OnceLock::new();

thread_local! {
    /// Whether this thread is inside the log callback.
    static LOGGING: Cell<bool> = const { Cell::new(false) };
}

fn number(level: &Level) -> i32 {
    match *level {
        Level::ERROR => NVFP4_LOG_ERROR,
        Level::WARN => NVFP4_LOG_WARN,
        Level::INFO => NVFP4_LOG_INFO,
        Level::DEBUG => NVFP4_LOG_DEBUG,
        Level::TRACE => NVFP4_LOG_TRACE,
    }
}

/// Passes the events of this crate to the host's callbacks.
struct ToHost;

impl Subscriber for ToHost {
    fn register_callsite(
        &self,
        metadata: &'static Metadata<'static>,
    ) -> tracing::subscriber::Interest {
        match metadata.is_event() && metadata.target().starts_with("NVFP4") {
            // The level may change at any time, so every event asks.
            true => tracing::subscriber::Interest::sometimes(),
            false => tracing::subscriber::Interest::never(),
        }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        number(metadata.level()) <= LEVEL.load(Ordering::Relaxed)
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        if LOGGING.replace(true) {
            return;
        }
        let mut line = Line::default();
        event.record(&mut line);
        let text = line.message + &line.fields;
        let level = number(event.metadata().level());
        // One at a time, and without the lock: a callback may add and remove callbacks. Callbacks added meanwhile receive the next event.
        let (mut last, end) = (0, NEXT.load(Ordering::Relaxed));
        while let Some(to) = next_listener(last + 1..end, level) {
            last = to.number;
            let listens = to.listens.read().unwrap_or_else(PoisonError::into_inner);
            if *listens && !to.gone.load(Ordering::Acquire) {
                let callback = to.callback;
                let callback =
                    unwinding!(fn(*mut c_void, i32, *const c_char, usize) -> i32, callback);
                // SAFETY: the host keeps the callback and its user data valid until it has removed them, which waits for the lock.
                calling(|| unsafe { callback(to.user.0, level, text.as_ptr().cast(), text.len()) });
            }
        }
        LOGGING.set(false);
    }
}

/// An event as one line: the message, then ` name=value` for each field.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a String cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

/// The first callback with one of these numbers whose level includes `level`. The list is sorted by number.
fn next_listener(numbers: Range<u64>, level: i32) -> Option<Arc<Listener>> {
    let all = LISTENERS.read().unwrap_or_else(PoisonError::into_inner);
    let mut next = all.iter();
    let next = next.find(|to| numbers.contains(&to.number) && level <= to.level);
    next.cloned()
}

/// Changes the list of callbacks, and updates the least severe level.
fn change_listeners<T>(change: impl FnOnce(&mut Vec<Arc<Listener>>) -> T) -> T {
    let mut all = LISTENERS.write().unwrap_or_else(PoisonError::into_inner);
    let result = change(&mut all);
    let level = all.iter().map(|to| to.level).max();
    LEVEL.store(level.unwrap_or(OFF), Ordering::Relaxed);
    result
}

/// Adds a log callback for the whole process: from now on it gets messages of `level`, one of NVFP4_LOG_*, and more severe
/// ones. Callbacks added before stay. Writes a number to `token` that NVFP4_log_remove() takes; numbers are not reused.
/// #NVFP4_UNSUPPORTED if the process is a Rust program with a `tracing` subscriber of its own, which gets the messages
/// already.
///
/// - `release`: called once with `user` when the callback has been removed and will not be called again, on any thread; not
///   called if this function fails. May be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_log_add(
    callback: NVFP4_LogCallback,
    user: *mut c_void,
    level: i32,
    release: NVFP4_LogRelease,
    token: *mut u64,
) -> NVFP4_Status {
    enter("NVFP4_log_add", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("token", token) }?;
        let level = choice(
            "level",
            level,
            &[
                (NVFP4_LOG_ERROR, "error", NVFP4_LOG_ERROR),
                (NVFP4_LOG_WARN, "warn", NVFP4_LOG_WARN),
                (NVFP4_LOG_INFO, "info", NVFP4_LOG_INFO),
                (NVFP4_LOG_DEBUG, "debug", NVFP4_LOG_DEBUG),
                (NVFP4_LOG_TRACE, "trace", NVFP4_LOG_TRACE),
            ],
        )?;
        let Some(callback) = callback else {
            bail!(InvalidArgument, "callback is NULL; pass a function");
        };
        let install = || {
            tracing::subscriber::set_global_default(ToHost).map_err(|_| {
                err!(
                    Unsupported,
                    "the process has a tracing subscriber of its own; read this library's events there"
                )
            })
        };
        INSTALLED.get_or_init(install).clone()?;
        let number = change_listeners(|all| {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            all.push(Arc::new(Listener {
                number,
                level,
                callback,
                user: User(user),
                release,
                listens: RwLock::new(true),
                gone: AtomicBool::new(false),
            }));
            number
        });
        out.set(number);
        Ok(())
    })
}

/// Removes a callback of NVFP4_log_add(). When the function returns, the callback is not running and will not be called
/// again, and its user data has been released. Called from within a log callback it does not wait: other threads may still
/// be running the callback, and `release` is called when they are done. #NVFP4_NOT_FOUND if no callback has this token.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn NVFP4_log_remove(token: u64) -> NVFP4_Status {
    enter("NVFP4_log_remove", || {
        let removed = change_listeners(|all| {
            let at = all.iter().position(|to| to.number == token);
            at.map(|at| all.remove(at))
        });
        let Some(removed) = removed else {
            bail!(
                NotFound,
                "no log callback has the token {token}; it was removed, or never added"
            );
        };
        removed.gone.store(true, Ordering::Release);
        if !LOGGING.get() {
            *removed
                .listens
                .write()
                .unwrap_or_else(PoisonError::into_inner) = false;
            // A thread that has just found the callback has yet to notice that it is removed.
            while Arc::strong_count(&removed) > 1 {
                std::thread::yield_now();
            }
        }
        Ok(())
    })
}

/// Sets how many CPU threads are used by later calls, and by objects created later, unless their own options say otherwise.
/// From 0 to 1024; 0 takes the environment variable NVFP4_THREADS, or one thread per core. Results do not depend on it.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn NVFP4_set_threads(threads: i32) -> NVFP4_Status {
    enter("NVFP4_set_threads", || {
        let threads = thread_count(threads)?;
        shared::set_threads(threads);
        Ok(())
    })
}

/// A number of threads from C; 0 is the default.
pub(super) fn thread_count(threads: i32) -> Result<Option<usize>> {
    match count("threads", threads.into())? {
        0 => Ok(None),
        n if n <= 1024 => Ok(Some(n)),
        n => bail!(InvalidArgument, "threads is {n}; it takes 0 to 1024"),
    }
}

/// Describes what this library can do on this machine, as JSON: version, CPU instruction set levels with the one in use,
/// the backends of linear layers, the CUDA backend (driver, devices, kernel compiler) with the reason why something is
/// unavailable, memory, and the environment variables that are set. Opens each GPU for a moment. Later versions may add
/// keys.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_diagnose(
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_diagnose", || {
        let text = diagnosis().to_string();
        // SAFETY: the pointers are as the header asks.
        unsafe { copy_text(&text, buffer, capacity, length) }
    })
}

fn diagnosis() -> serde_json::Value {
    let chosen = Isa::choose();
    let device: Result<Device> = shared::device();
    let levels: Vec<_> = Isa::ALL
        .iter()
        .map(|l| json!({ "name": l.name(), "present": l.is_present(), "in_use": chosen.as_ref().is_ok_and(|c| c == l) }))
        .collect();
    let tags: serde_json::Map<_, _> = memory::Tag::ALL
        .iter()
        .map(|&t| {
            let usage = memory::usage(t);
            (
                t.name().to_owned(),
                json!({ "current": usage.current, "peak": usage.peak }),
            )
        })
        .collect();
    let names = |device: Option<&Device>| -> serde_json::Value {
        let backends = device.map_or(&[][..], present);
        backends.iter().map(|b| b.name()).collect()
    };
    // Kept open, so that the report does not open it again.
    let gpu = Device::cuda(0).ok();
    let mut cuda = json!(cuda::report());
    cuda["linear"] = names(gpu.as_ref());
    let managed = transfer::check_managed(0);
    let total = memory::total();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "abi_version": NVFP4_ABI_VERSION,
        "target": { "arch": std::env::consts::ARCH, "os": std::env::consts::OS },
        "backends": {
            "cpu": {
                "available": device.is_ok(),
                "device": device.as_ref().ok().map(Device::name),
                "reason": device.as_ref().err().map(|e| e.message()),
                "levels": levels,
                "linear": names(device.as_ref().ok()),
                "cores": std::thread::available_parallelism().map_or(1, usize::from),
            },
            "cuda": cuda,
        },
        "managed_memory": {
            "available": managed.is_ok(),
            "reason": managed.err().map(|e| e.message().to_owned()),
            "policy": transfer::managed_policy().name(),
        },
        "memory": {
            "total": { "current": total.current, "peak": total.peak },
            "by_tag": tags,
            "budget": memory::budget(),
            "host": host_memory::read(),
        },
        "environment": {
            "NVFP4_CPU": env::cpu_level(),
            "NVFP4_THREADS": env::threads().ok().flatten(),
            "NVFP4_NVRTC": env::nvrtc().map(|p| p.display().to_string()),
            "TS_Q4_DISABLE_UM": env::managed_memory_is_off(),
        },
    })
}

/// A number of the version in Cargo.toml.
const fn part(text: &str) -> i32 {
    match i32::from_str_radix(text, 10) {
        Ok(number) => number,
        Err(_) => panic!("a version is three numbers"),
    }
}

/// The header's numbers must match the version in text form.
const _: () = {
    assert!(part(env!("CARGO_PKG_VERSION_MAJOR")) == NVFP4_VERSION_MAJOR);
    assert!(part(env!("CARGO_PKG_VERSION_MINOR")) == NVFP4_VERSION_MINOR);
    assert!(part(env!("CARGO_PKG_VERSION_PATCH")) == NVFP4_VERSION_PATCH);
    assert!(env!("CARGO_PKG_VERSION_PRE").is_empty());
    assert!(CStr::from_bytes_with_nul(VERSION.as_bytes()).is_ok());
    let number = NVFP4_VERSION_MAJOR * 10000 + NVFP4_VERSION_MINOR * 100 + NVFP4_VERSION_PATCH;
    assert!(
        number == NVFP4_VERSION_NUMBER && NVFP4_VERSION_MINOR < 100 && NVFP4_VERSION_PATCH < 100
    );
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_checked_both_ways() {
        assert_eq!(dotted(NVFP4_VERSION_NUMBER), env!("CARGO_PKG_VERSION"));
        assert_eq!(dotted(123456), "12.34.56");
        for older in [0, 99, NVFP4_VERSION_NUMBER] {
            assert!(check_version(NVFP4_ABI_VERSION, older).is_ok());
        }
        let (abi, number) = (NVFP4_ABI_VERSION, NVFP4_VERSION_NUMBER);
        let here = format!(
            "the library that was loaded is {} (ABI {abi})",
            env!("CARGO_PKG_VERSION")
        );
        let newer = check_version(abi, number + 200).unwrap_err();
        let theirs = dotted(number + 200);
        assert_eq!(
            newer.message(),
            format!(
                "this program was built with nvfp4.h {theirs} (ABI {abi}), and {here}; install libNVFP4 {theirs} or later"
            )
        );
        let other = check_version(abi - 1, 90).unwrap_err();
        assert_eq!(
            other.message(),
            format!(
                "this program was built with nvfp4.h 0.0.90 (ABI {}), and {here}; install libNVFP4 0.0.90, or build the program \
                 with the library's nvfp4.h",
                abi - 1
            )
        );
    }
}
