//! Checkpoint readers and writers through their public interface.

mod bad;
mod files;
mod folders;
mod golden;
mod models;
mod scales;
mod split;
mod write;
