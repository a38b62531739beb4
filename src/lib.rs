//! NVFP4 for any host language: quantize, multiply, and run Qwen3-class models with weights held in 4 bits.
//!
//! One core, three doors: the drop-in and native C ABI (`abi`), and the `nvfp4` command, both thin shells over the
//! modules below. Imports point only downward, never sideways; `tests/layers.rs` enforces the floors.
//!
//! | floor | modules |
//! |---|---|
//! | 8 | `abi` (and the `nvfp4` binary) |
//! | 7 | [`session`] |
//! | 5 | [`model`] |
//! | 4 | [`ops`] |
//! | 3 | [`cpu`], [`cuda`], [`checkpoint`], [`text`] |
//! | 2 | [`tensor`] |
//! | 1 | [`mod@format`] |
//! | 0 | [`base`] |

// The file must be called libNVFP4.so, so the crate takes its name from the file rather than from Rust's convention.
#![allow(non_snake_case)]

pub mod base;
pub mod format;
pub mod tensor;

pub mod checkpoint;
pub mod cpu;
pub mod cuda;
pub mod text;

pub mod ops;

pub mod model;

pub mod session;
pub mod train;

pub mod abi;

#[global_allocator]
static ALLOCATOR: base::alloc::Allocator = base::alloc::Allocator;
