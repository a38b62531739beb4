//! Floor 8: the C ABI, one file per chapter of `nvfp4.h`. A function here checks its arguments from C, converts them and calls
//! a lower floor; there is no arithmetic. This is the only place with `extern "C"`. The `mod` lines are in the header's order.
//!
//! Eight files are shared by the chapters: `guard` (panics and errors become a status), `handle` (the registry of live handles),
//! `arguments` (pointers, text and options from C), `shared` (the device of calls that name none), `slots` (flags that signal handlers
//! set), `listeners` (log callbacks), `libtorch` (tensors of that library) and `layout` (asserts the layout of the structs).

// Names match the header.
#![allow(non_camel_case_types)]
// The header states the requirements of every pointer; a Safety section for each function would only repeat them.
#![allow(clippy::missing_safety_doc)]

mod arguments;
mod guard;
mod handle;
mod layout;
mod libtorch;
mod listeners;
mod shared;
mod slots;

pub mod status;

pub mod last_error;

pub mod library;

pub mod call;

pub mod memory;

pub mod tensor;

pub mod quantize;

pub mod linear;

pub mod schema;

pub mod pool;

pub mod model;

pub mod model_files;

pub mod convert;

pub mod grammar;

pub mod adapter;

pub mod session;

pub mod chat;

pub mod queue;

pub mod detokenizer;

pub mod embedding;

pub mod trainer;

pub mod data;

pub mod optimizer;

pub mod torchsharp;
