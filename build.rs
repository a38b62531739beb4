//! Link arguments of `libNVFP4.so`. The list of exported symbols needs none: of a cdylib, rustc exports the `no_mangle`
//! functions only, and `.ci/run` compares what the file exports with what the header declares.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        // rustc sets no soname, and without one a program records the path it was linked against.
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libNVFP4.so");
        // Worker threads may outlive a dlclose, and so must their code.
        println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    }
}
