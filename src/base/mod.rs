//! Floor 0: the base of every other floor, such as errors, memory, files and threads. Imports nothing of this crate.

pub mod alloc;
pub mod call;
pub mod checksum;
pub mod directory;
pub mod entry;
pub mod env;
pub mod error;
pub mod file;
pub mod files;
pub mod fork;
mod host;
pub mod host_memory;
pub mod lease;
pub mod leftover;
pub mod lock;
pub mod locked;
pub mod mapping;
pub mod memory;
pub mod once;
pub mod panics;
pub mod process;
pub mod ready_fd;
mod region;
pub mod sealed;
pub mod size;
pub mod sync;
pub mod threads;
pub mod turns;

pub use error::{Error, ErrorKind, Result};
pub use host::host_name;
