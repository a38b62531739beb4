//! Any bytes as a .gguf file.
#![no_main]

mod walk;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| walk::walk("x.gguf", bytes));
