//! Link arguments of `libNVFP4.so`, and machine code of its kernels if a package asks for it. Exported symbols need no list: from a cdylib,
//! rustc exports only the `no_mangle` functions, and `.ci/run` compares the exports with the header's declarations.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use nvrtc::{Compiler, TARGETS};
use units::Unit;

// The kernel compiler that the library uses at run time. The library uses more of it than this script.
#[allow(dead_code, unreachable_pub)]
#[path = "src/cuda/driver/nvrtc.rs"]
mod nvrtc;
#[allow(dead_code, unreachable_pub)]
#[path = "src/cuda/units.rs"]
mod units;
/// Modules that this file imports.
mod driver {
    pub(crate) use super::nvrtc;
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        // rustc sets no soname; without one, programs record the path that they were linked against.
        let soname = concat!("libNVFP4.so.", env!("CARGO_PKG_VERSION_MAJOR"));
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,{soname}");
        // Worker threads may outlive a dlclose, so their code must stay.
        println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
        // Crates that have a C interface of their own would export it too.
        println!("cargo::rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
        link_soname(soname);
    }
    embed_kernels();
}

/// Creates a link from the soname to the library, beside cargo's output. Programs linked with `-L target/release -lNVFP4` look for the
/// soname when they run, and cargo knows only one name of a library. Without the link only such programs fail.
#[cfg(unix)]
fn link_soname(soname: &str) {
    let folder = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    // OUT_DIR is PROFILE/build/nvfp4-HASH/out.
    if let Some(profile) = folder.ancestors().nth(3) {
        let _ = std::os::unix::fs::symlink("libNVFP4.so", profile.join(soname));
    }
}
#[cfg(not(unix))]
fn link_soname(_: &str) {}

/// Writes `kernels.rs`, the table that `src/cuda/registry.rs` includes: compressed machine code of every unit, for the architectures in
/// `NVFP4_EMBED_KERNELS`, which requires NVRTC. By default the table is empty, and kernels are compiled on first use.
fn embed_kernels() {
    println!("cargo::rustc-check-cfg=cfg(embedded_kernels)");
    for name in ["NVFP4_EMBED_KERNELS", "NVFP4_EMBED_CACHE", "NVFP4_NVRTC"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let folder = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let targets = wanted_targets().unwrap_or_else(|e| panic!("{e}"));
    let (count, entries) = match targets[..] {
        [] => (0, String::new()),
        _ => {
            println!("cargo::rustc-cfg=embedded_kernels");
            compile_all(&targets, &folder).unwrap_or_else(|e| panic!("NVFP4_EMBED_KERNELS: {e}"))
        }
    };
    let table = format!("static EMBEDDED: [Embedded; {count}] = [\n{entries}];\n");
    std::fs::write(folder.join("kernels.rs"), table).expect("writing kernels.rs");
}

/// A path from the environment; an empty one counts as unset.
fn path_from(name: &str) -> Option<PathBuf> {
    std::env::var_os(name)
        .filter(|p| !p.is_empty())
        .map(PathBuf::from)
}

/// The architectures in `NVFP4_EMBED_KERNELS`.
fn wanted_targets() -> Result<Vec<&'static str>, String> {
    let wanted = std::env::var("NVFP4_EMBED_KERNELS").unwrap_or_default();
    match wanted.as_str() {
        "" | "0" => Ok(Vec::new()),
        "1" => Ok(TARGETS.to_vec()),
        list => {
            let known = |name: &str| TARGETS.iter().copied().find(|&target| target == name);
            list.split(',').map(|name| known(name).ok_or_else(|| format!(
                "NVFP4_EMBED_KERNELS names '{name}'; it takes architectures of {TARGETS:?} with commas between them, 1 for all of them, or 0 for kernels that are compiled when first used"
            ))).collect()
        }
    }
}

/// Compiles everything into the folder, and returns the number of entries of the table and the entries. Takes results of an earlier build
/// from the folder `NVFP4_EMBED_CACHE`, and adds missing ones to it: a compiler takes most of a minute for each architecture.
fn compile_all(targets: &[&'static str], folder: &Path) -> Result<(usize, String), String> {
    let compiler = Compiler::load(path_from("NVFP4_NVRTC").as_deref())?;
    let (major, minor) = compiler.version();
    let cache = path_from("NVFP4_EMBED_CACHE");
    if let Some(cache) = &cache {
        std::fs::create_dir_all(cache).map_err(|e| format!("creating {}: {e}", cache.display()))?;
    }
    let jobs: Vec<(Unit, &str)> = targets
        .iter()
        .flat_map(|&target| Unit::for_target(target).map(move |unit| (unit, target)))
        .collect();
    // An entry of the table: a compressed image in the folder, and its uncompressed length.
    let entry = |unit: Unit, target: &str| {
        let sum = units::fingerprint(unit, target);
        let name = unit.path().replace(['/', '.'], "-");
        let name = format!("{name}-{target}-{sum:016x}-{major}.{minor}.cubin.z");
        let cached = cache.as_ref().map(|cache| cache.join(&name));
        let found = cached.as_ref().and_then(|path| {
            let packed = std::fs::read(path).ok()?;
            let image = miniz_oxide::inflate::decompress_to_vec_zlib(&packed).ok()?;
            Some((packed, image.len()))
        });
        let (packed, length) = match found {
            Some(found) => found,
            None => {
                let (image, _) = compiler.compile(unit.source(), target)?;
                let packed = miniz_oxide::deflate::compress_to_vec_zlib(&image, 9);
                if let Some(path) = cached {
                    write_whole(&path, &packed)?;
                }
                (packed, image.len())
            }
        };
        let path = folder.join(&name);
        write_whole(&path, &packed)?;
        Ok::<_, String>(format!(
            "    Embedded {{ unit: Unit::{unit:?}, target: {target:?}, fingerprint: {sum:#018x}, is_current: OnceLock::new(), length: {length}, packed: include_bytes!({path:?}) }},\n"
        ))
    };
    let (next, done) = (AtomicUsize::new(0), Mutex::new(vec![None; jobs.len()]));
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(&(unit, target)) = jobs.get(at) else {
                return;
            };
            let made = entry(unit, target);
            done.lock().expect("no thread panicked")[at] = Some(made);
        }
    };
    let threads = std::env::var("NUM_JOBS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(1);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));

    let entries = done.into_inner().expect("no thread panicked");
    let entries: Result<String, String> = entries
        .into_iter()
        .map(|made| made.expect("every job is done"))
        .collect();
    Ok((jobs.len(), entries?))
}

/// Writes a file that gets its name once it is complete, because two builds may write it at the same time.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), String> {
    let part = path.with_extension(format!("{}.part", std::process::id()));
    std::fs::write(&part, bytes)
        .and_then(|()| std::fs::rename(&part, path))
        .map_err(|e| format!("writing {}: {e}", path.display()))
}
