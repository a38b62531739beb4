//! Locks, atomics, thread-locals and clock of code that hands work over between threads: the standard library's. `tests/handovers` compiles
//! that code on a version of its own, whose threads and clock it schedules.

pub use std::sync::{Condvar, Mutex, MutexGuard, atomic};
pub use std::thread_local;
pub use std::time::Instant;
