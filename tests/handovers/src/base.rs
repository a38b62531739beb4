//! Floor 0 of the library, as far as hand-overs use it. Time, threads and locks are those of [`sync`]; memory is never refused, and no
//! process forks.

#[path = "../../../src/base/call.rs"]
pub mod call;
#[path = "../../../src/base/error.rs"]
pub mod error;
#[path = "../../../src/base/lease.rs"]
pub mod lease;
#[path = "../../../src/base/panics.rs"]
pub mod panics;
pub mod programs;
pub mod ready_fd;
pub mod sync;
pub mod threads;
#[path = "../../../src/base/turns.rs"]
pub mod turns;

pub use error::{Error, ErrorKind, Result};

pub mod fork {
    pub fn generation() -> u32 {
        0
    }
}

pub mod memory {
    use super::Result;

    pub fn copied(text: &str) -> Result<String> {
        Ok(text.to_owned())
    }

    pub fn with_room<T>(count: usize) -> Result<Vec<T>> {
        Ok(Vec::with_capacity(count))
    }
}
