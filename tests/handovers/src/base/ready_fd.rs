//! A descriptor's readability, as a flag.

use std::sync::atomic::{AtomicBool, Ordering};

use super::Result;

#[derive(Debug)]
pub struct ReadyFd(AtomicBool);

impl ReadyFd {
    pub fn new() -> Result<ReadyFd> {
        Ok(ReadyFd(AtomicBool::new(false)))
    }

    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub fn clear(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// 1 if it is readable, and else 0: programs have no other use for the descriptor.
    pub fn fd(&self) -> i32 {
        i32::from(self.0.load(Ordering::Relaxed))
    }
}
