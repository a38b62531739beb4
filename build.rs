//! Link arguments of `libNVFP4.so`, and its kernels as machine code where a package asks for them. The list of exported symbols
//! needs none: of a cdylib, rustc exports the `no_mangle` functions only, and `.ci/run` compares what the file exports with
//! what the header declares.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use nvrtc::{Compiler, TARGETS};
use units::Unit;

// What the library compiles kernels with at run time. It uses more of it than this script.
#[allow(dead_code, unreachable_pub)]
#[path = "src/cuda/driver/nvrtc.rs"]
mod nvrtc;
#[allow(dead_code, unreachable_pub)]
#[path = "src/cuda/units.rs"]
mod units;
/// Where that file looks for what it imports.
mod driver {
    pub(crate) use super::nvrtc;
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        // rustc sets no soname, and without one a program records the path it was linked against.
        let soname = concat!("libNVFP4.so.", env!("CARGO_PKG_VERSION_MAJOR"));
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,{soname}");
        // Worker threads may outlive a dlclose, and so must their code.
        println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
        link_soname(soname);
    }
    embed_kernels();
}

/// Makes a link of the soname to the library, beside where cargo will leave it: what is linked with `-L target/release -lNVFP4` looks
/// for the soname when it runs, and cargo knows but one name of a library. Without the link only such programs fail.
#[cfg(unix)]
fn link_soname(soname: &str) {
    let folder = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    // It is PROFILE/build/nvfp4-HASH/out.
    if let Some(profile) = folder.ancestors().nth(3) {
        let _ = std::os::unix::fs::symlink("libNVFP4.so", profile.join(soname));
    }
}
#[cfg(not(unix))]
fn link_soname(_: &str) {}

/// Writes `kernels.rs`, the table that `src/cuda/registry.rs` includes. Its entries are machine code of every unit for every
/// architecture if `NVFP4_EMBED_KERNELS` is 1, which takes NVRTC; by default there are none, and kernels are compiled when they
/// are first used.
fn embed_kernels() {
    println!("cargo::rustc-check-cfg=cfg(embedded_kernels)");
    println!("cargo::rerun-if-env-changed=NVFP4_EMBED_KERNELS");
    println!("cargo::rerun-if-env-changed=NVFP4_NVRTC");
    let folder = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let (count, entries) = match std::env::var("NVFP4_EMBED_KERNELS").as_deref() {
        Err(_) | Ok("" | "0") => (0, String::new()),
        Ok("1") => {
            println!("cargo::rustc-cfg=embedded_kernels");
            compile_all(&folder).unwrap_or_else(|e| panic!("NVFP4_EMBED_KERNELS=1: {e}"))
        }
        Ok(other) => panic!(
            "NVFP4_EMBED_KERNELS is '{other}'; it takes 1, or 0 for kernels that are compiled when first used"
        ),
    };
    let table = format!("static EMBEDDED: [Embedded; {count}] = [\n{entries}];\n");
    std::fs::write(folder.join("kernels.rs"), table).expect("writing kernels.rs");
}

/// Compiles everything into the folder, and returns the number of entries of the table and the entries.
fn compile_all(folder: &Path) -> Result<(usize, String), String> {
    let path = std::env::var_os("NVFP4_NVRTC")
        .filter(|p| !p.is_empty())
        .map(PathBuf::from);
    let compiler = Compiler::load(path.as_deref())?;
    let jobs: Vec<(Unit, &str)> = TARGETS
        .iter()
        .flat_map(|&target| Unit::for_target(target).map(move |unit| (unit, target)))
        .collect();
    let (next, done) = (AtomicUsize::new(0), Mutex::new(vec![None; jobs.len()]));
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(&(unit, target)) = jobs.get(at) else {
                return;
            };
            let image = compiler
                .compile(unit.source(), target)
                .map(|(image, _)| image);
            done.lock().expect("no thread panicked")[at] = Some(image);
        }
    };
    let threads = std::env::var("NUM_JOBS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(1);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));

    let mut entries = String::new();
    for ((unit, target), image) in jobs
        .iter()
        .zip(done.into_inner().expect("no thread panicked"))
    {
        let path = folder.join(format!(
            "{}-{target}.cubin",
            unit.path().replace(['/', '.'], "-")
        ));
        std::fs::write(&path, image.expect("every job is done")?)
            .map_err(|e| format!("writing {}: {e}", path.display()))?;
        let sum = units::fingerprint(*unit, target);
        writeln!(
            entries,
            "    Embedded {{ unit: Unit::{unit:?}, target: {target:?}, fingerprint: {sum:#018x}, is_current: OnceLock::new(), image: include_bytes!({path:?}) }},"
        )
        .expect("a string takes any text");
    }
    Ok((jobs.len(), entries))
}
