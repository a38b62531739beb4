//! Checkpoint readers and writers through their public interface.

mod bad;
mod files;
mod golden;
mod models;
mod write;
