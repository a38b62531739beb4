//! The one error type. Its kind determines the status number in C; its message says what was wrong, with the offending values and names,
//! and what would be right. Messages are one line and never carry host addresses.

use std::fmt;

/// Result of every fallible function in this crate.
pub type Result<T> = std::result::Result<T, Error>;

macro_rules! kinds {
    ($($(#[doc = $doc:literal])+ $name:ident = $status:literal, $c_name:literal;)+) => {
        /// Coarse category of an error. This table is the only place where a kind, its status number and its C name meet; numbers are never
        /// reused.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ErrorKind { $($(#[doc = $doc])+ $name,)+ }

        impl ErrorKind {
            /// Every kind, in the order of the table.
            pub const ALL: &'static [ErrorKind] = &[$(ErrorKind::$name,)+];

            /// The `NVFP4_Status` value that C sees; never 0.
            pub const fn status(self) -> i32 { match self { $(ErrorKind::$name => $status,)+ } }

            /// Whether memory was lacking: refused by the system, or over the budget.
            pub const fn is_lack_of_memory(self) -> bool {
                matches!(self, ErrorKind::OutOfMemory | ErrorKind::OverBudget)
            }

            /// The name of the status constant in `nvfp4.h`, without the `NVFP4_` prefix.
            pub const fn c_name(self) -> &'static str { match self { $(ErrorKind::$name => $c_name,)+ } }
        }
    };
}

kinds! {
    /// An argument is outside what the function accepts: NULL, wrong shape, wrong dtype, out of range.
    InvalidArgument = 1, "INVALID_ARGUMENT";
    /// The request is well formed, but this build, device, format or architecture cannot do it.
    Unsupported = 2, "UNSUPPORTED";
    /// The system refused memory.
    OutOfMemory = 3, "OUT_OF_MEMORY";
    /// The allocation would pass the budget set by the host.
    OverBudget = 4, "OVER_BUDGET";
    /// Reading or writing a file failed.
    Io = 5, "IO";
    /// A file's content contradicts itself or its format.
    CorruptFile = 6, "CORRUPT_FILE";
    /// A named thing (file, tensor, key) is not there.
    NotFound = 7, "NOT_FOUND";
    /// The tokens would not fit in the context.
    ContextFull = 8, "CONTEXT_FULL";
    /// The handle is in use by another call.
    Busy = 9, "BUSY";
    /// A callback or a cancel call stopped the work.
    Cancelled = 10, "CANCELLED";
    /// The caller's buffer is too small; the required length was returned.
    BufferTooSmall = 11, "BUFFER_TOO_SMALL";
    /// A handle is stale, foreign or of another type.
    InvalidHandle = 12, "INVALID_HANDLE";
    /// A struct_size or version does not fit this library.
    AbiMismatch = 13, "ABI_MISMATCH";
    /// No such device, or its driver is missing.
    DeviceUnavailable = 14, "DEVICE_UNAVAILABLE";
    /// A defect in this library; the message is the panic's.
    Internal = 15, "INTERNAL";
}

/// The reason for refusing a path that is no regular file: what it is, for example "a FIFO or pipe".
#[derive(Debug, thiserror::Error)]
#[error("it is {0}, not a regular file")]
pub(super) struct NotAFile(pub(super) &'static str);

/// An error: its kind and one line of text.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    kind: ErrorKind,
    message: String,
}

impl Error {
    /// Creates an error. Line breaks in the message become spaces.
    pub fn new(kind: ErrorKind, message: impl fmt::Display) -> Self {
        let mut message = message.to_string();
        if message.contains(['\n', '\r']) {
            message = message
                .split(['\n', '\r'])
                .map(str::trim)
                .filter(|s| !s.is_empty())
                .collect::<Vec<_>>()
                .join(" ");
        }
        Error { kind, message }
    }

    /// The category of the error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The one-line message.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The error with `context` and a colon before its message, for example the file or the tensor.
    pub fn within(self, context: impl fmt::Display) -> Self {
        Error::new(self.kind, format_args!("{context}: {}", self.message))
    }

    /// An input/output failure while doing `action` ("reading model.gguf").
    pub fn io(action: impl fmt::Display, error: std::io::Error) -> Self {
        let is_no_file = error.get_ref().is_some_and(|e| e.is::<NotAFile>());
        let kind = match error.kind() {
            _ if is_no_file => ErrorKind::InvalidArgument,
            std::io::ErrorKind::NotFound => ErrorKind::NotFound,
            std::io::ErrorKind::OutOfMemory => ErrorKind::OutOfMemory,
            _ => ErrorKind::Io,
        };
        Error::new(kind, format_args!("{action}: {error}"))
    }
}

/// Builds an [`Error`]: `err!(InvalidArgument, "K = {k} is not a multiple of 16")`.
#[macro_export]
#[doc(hidden)]
macro_rules! err {
    ($kind:ident, $($message:tt)+) => {
        $crate::base::Error::new($crate::base::ErrorKind::$kind, format_args!($($message)+))
    };
}

/// Returns an [`Error`] from the enclosing function, with the arguments of `err!`.
#[macro_export]
#[doc(hidden)]
macro_rules! bail {
    ($kind:ident, $($message:tt)+) => {
        return Err($crate::err!($kind, $($message)+))
    };
}

pub use crate::{bail, err};

/// Test helper: requires an error of `kind` whose message contains all `words`.
#[cfg(test)]
#[track_caller]
pub(crate) fn expect_kind<T>(result: Result<T>, kind: ErrorKind, words: &str) {
    match result {
        Ok(_) => panic!("no error, where {kind:?} with '{words}' was to come"),
        Err(e) => {
            assert_eq!(e.kind, kind, "{e}");
            assert!(e.message.contains(words), "'{words}' is not in: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_distinct_and_positive() {
        let mut seen: Vec<i32> = ErrorKind::ALL.iter().map(|k| k.status()).collect();
        assert!(seen.iter().all(|&s| s > 0));
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), ErrorKind::ALL.len());
    }

    #[test]
    fn messages_are_one_line() {
        let e = Error::new(ErrorKind::Io, "first\n  second\r\n").within("file.gguf");
        assert_eq!(e.message(), "file.gguf: first second");
    }
}
