//! Floor 6 of the library, as far as hand-overs use it.

#[path = "../../../src/engine/leased.rs"]
mod leased;
mod pass;
pub mod programs;
#[path = "../../../src/engine/runner.rs"]
mod runner;
#[path = "../../../src/engine/schedule.rs"]
mod schedule;
#[path = "../../../src/engine/times.rs"]
mod times;

pub use pass::NewTokens;
