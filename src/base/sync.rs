//! What threads of this crate hand work over with: the standard library's. `tests/handovers` compiles the files that use this with its own,
//! whose threads and clock it schedules.

pub use std::sync::{Condvar, Mutex, MutexGuard, atomic};
pub use std::thread_local;
pub use std::time::Instant;
