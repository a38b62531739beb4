//! The `nvfp4` command.
fn main() {}
