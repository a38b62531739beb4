//! Floor 8: the C ABI, one file per chapter of `nvfp4.h`. A function here checks what C gave it, converts, and calls; there
//! is no arithmetic. This is the only place with `extern "C"`. The order of the `mod` lines is that of the header.
//!
//! What makes each chapter short stands in six files: `guard` (panics and errors become a status), `handle` (the registry
//! of live handles), `arguments` (pointers, text and options from C), `shared` (the device of calls that name none),
//! `slots` (flags that signal handlers set) and `libtorch` (tensors of that library). A seventh, `layout`, fixes the structs.

// Names are those of the header.
#![allow(non_camel_case_types)]
// The header states what every pointer must be; repeating it as a Safety section of each function would not add to it.
#![allow(clippy::missing_safety_doc)]

mod arguments;
mod guard;
mod handle;
mod layout;
mod libtorch;
mod shared;
mod slots;

pub mod status;

pub mod library;

pub mod call;

pub mod memory;

pub mod tensor;

pub mod quantize;

pub mod linear;

pub mod schema;

pub mod model;

pub mod session;

pub mod chat;

pub mod detokenizer;

pub mod torchsharp;
