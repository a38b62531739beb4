//! Any bytes as a .safetensors file.
#![no_main]

mod walk;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| walk::walk("x.safetensors", bytes));
