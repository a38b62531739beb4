//! Any bytes as a .dat file.
#![no_main]

mod walk;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| walk::walk("x.dat", bytes));
