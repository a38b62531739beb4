//! Checkpoint readers and writers through their public interface.

mod bad;
#[path = "../common/mod.rs"]
mod common;
mod experts;
mod families;
mod files;
mod folders;
mod gguf_blocks;
mod golden;
mod int4;
mod int8;
mod methods;
mod models;
mod mxfp4;
mod scales;
mod split;
mod write;
