//! Machine code of kernels for the device at hand: embedded by `build.rs`, kept on disk from an earlier run, or compiled now.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::CString;
use std::hash::Hasher;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock};

use cudarc::driver::{result, sys};
use twox_hash::XxHash3_64;

use super::gpu::check;
use super::nvrtc::{Compiler, Unit, fingerprint, target};
use crate::base::error::err;
use crate::base::{Result, env, file};

/// Machine code that a package brings along.
struct Embedded {
    unit: Unit,
    target: &'static str,
    fingerprint: u64,
    /// Whether that is the fingerprint of the sources here, once somebody has looked.
    is_current: OnceLock<bool>,
    image: &'static [u8],
}

// `static EMBEDDED: [Embedded; N]`, written by `build.rs`; empty unless the build was asked for it.
include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

fn embedded(unit: Unit, target: &str) -> Option<&'static [u8]> {
    let found = EMBEDDED
        .iter()
        .find(|e| e.unit == unit && e.target == target)?;
    let is_current = || found.fingerprint == fingerprint(unit, target);
    found
        .is_current
        .get_or_init(is_current)
        .then_some(found.image)
}

/// Whether every kernel for an architecture is embedded, so that it needs no compiler.
pub(super) fn is_embedded(arch: (i32, i32)) -> bool {
    let target = target(arch);
    Unit::for_target(&target).all(|unit| embedded(unit, &target).is_some())
}

/// Whether kernels for this architecture can be had at all: embedded, or by a compiler.
pub fn have_kernels(arch: (i32, i32)) -> Result<()> {
    match is_embedded(arch) {
        true => Ok(()),
        false => compiler().map(|_| ()),
    }
}

/// Loads NVRTC once.
fn loaded() -> Result<&'static Compiler> {
    static STATE: OnceLock<std::result::Result<Compiler, String>> = OnceLock::new();
    let state = STATE.get_or_init(|| Compiler::load(env::nvrtc().as_deref()));
    state.as_ref().map_err(|e| err!(DeviceUnavailable, "{e}"))
}

/// Loads NVRTC; its version, major and minor. An error says what to do.
pub fn compiler() -> Result<(i32, i32)> {
    Ok(loaded()?.version())
}

/// Compiles a unit for an architecture, given as [`target`] names it. Needs no GPU. Returns machine code and the assembler's
/// report on registers and spills.
pub fn compile(unit: Unit, target: &str) -> Result<(Vec<u8>, String)> {
    loaded()?
        .compile(unit, target)
        .map_err(|e| err!(Internal, "{e}"))
}

/// The same for a source that is not the library's, under the name `path`. It may include the library's headers.
#[doc(hidden)]
pub fn compile_source(path: &str, source: &str, target: &str) -> Result<(Vec<u8>, String)> {
    loaded()?
        .compile_source(path, source, target)
        .map_err(|e| err!(Internal, "{e}"))
}

/// Machine code of a unit: what is embedded, else from the cache on disk, else compiled and put there.
fn image(unit: Unit, target: &str) -> Result<Cow<'static, [u8]>> {
    if let Some(image) = embedded(unit, target) {
        return Ok(Cow::Borrowed(image));
    }
    let version = compiler()?;
    let Some(folder) = env::kernel_cache() else {
        return Ok(Cow::Owned(compile(unit, target)?.0));
    };
    let mut key = XxHash3_64::new();
    key.write(&fingerprint(unit, target).to_le_bytes());
    key.write(format!("{version:?}").as_bytes());
    let name = format!(
        "{}-{target}-{:016x}.cubin",
        unit.path().replace(['/', '.'], "-"),
        key.finish()
    );
    let path: PathBuf = folder.join(name);
    if let Ok(image) = std::fs::read(&path)
        && let Some((image, sum)) = image
            .split_last_chunk::<8>()
            .map(|(i, s)| (i, u64::from_le_bytes(*s)))
        && XxHash3_64::oneshot(image) == sum
    {
        return Ok(Cow::Owned(image.to_vec()));
    }
    let (image, _) = compile(unit, target)?;
    let mut kept = image.clone();
    kept.extend(XxHash3_64::oneshot(&image).to_le_bytes());
    // A cache that cannot be written costs time, not results.
    if let Err(e) = std::fs::create_dir_all(&folder)
        .map_err(|e| err!(Io, "{e}"))
        .and_then(|()| file::stage(&path, &kept)?.commit())
    {
        tracing::warn!(
            "kernels are compiled anew each time: {}: {e}",
            path.display()
        );
    }
    Ok(Cow::Owned(image))
}

/// Machine code loaded into the current context.
pub(super) struct Module {
    module: sys::CUmodule,
    path: Cow<'static, str>,
    functions: Mutex<HashMap<String, usize>>,
}

// SAFETY: a driver's handle, used under a bound context.
unsafe impl Send for Module {}
// SAFETY: as above; the table of functions is behind a lock.
unsafe impl Sync for Module {}

impl Module {
    pub(super) fn load(unit: Unit, arch: (i32, i32)) -> Result<Module> {
        Module::from_image(&image(unit, &target(arch))?, Cow::Borrowed(unit.path()))
    }

    /// Loads what [`compile`] or [`compile_source`] gave for the device's architecture.
    pub(super) fn from_image(image: &[u8], path: Cow<'static, str>) -> Result<Module> {
        // SAFETY: a complete image of machine code; the driver copies it.
        let module = check(
            unsafe { result::module::load_data(image.as_ptr().cast()) },
            &path,
        )?;
        Ok(Module {
            module,
            path,
            functions: Mutex::default(),
        })
    }

    pub(super) fn function(&self, name: &str) -> Result<sys::CUfunction> {
        let mut functions = self
            .functions
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(&function) = functions.get(name) {
            return Ok(function as sys::CUfunction);
        }
        let symbol = CString::new(name).expect("a kernel's name has no zero byte");
        // SAFETY: the module is loaded.
        let function = check(
            unsafe { result::module::get_function(self.module, symbol) },
            name,
        )
        .map_err(|e| e.within(&self.path))?;
        // A multiprocessor must be empty before it divides its memory between cache and blocks in another way: kernels that are
        // to overlap ask for the same.
        check(
            // SAFETY: the function was just found.
            unsafe {
                result::function::set_function_attribute(
                    function,
                    sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                    sys::CUshared_carveout::CU_SHAREDMEM_CARVEOUT_MAX_SHARED as i32,
                )
            },
            name,
        )?;
        functions.insert(name.to_owned(), function as usize);
        Ok(function)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once, unloaded once, by an owner that has bound the context.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

#[cfg(all(test, embedded_kernels))]
mod tests {
    use super::super::nvrtc::TARGETS;
    use super::*;

    #[test]
    fn embedded_kernels_need_no_compiler() {
        for &target in TARGETS {
            for unit in Unit::for_target(target) {
                let image = image(unit, target).unwrap();
                assert!(
                    matches!(image, Cow::Borrowed(_)),
                    "{} for {target} is not embedded",
                    unit.path()
                );
                assert!(
                    image.starts_with(b"\x7fELF"),
                    "{} for {target} is no machine code",
                    unit.path()
                );
            }
        }
        assert!(is_embedded((9, 0)) && !is_embedded((7, 5)));
    }

    /// Drop-in calls ask each time. The sources of an architecture's kernels are some 1.5 MB with the headers: once is enough.
    #[test]
    fn sources_are_hashed_once() {
        assert!(is_embedded((9, 0)));
        let start = std::time::Instant::now();
        for _ in 0..1000 {
            have_kernels((9, 0)).unwrap();
        }
        // Hashed each time, they would be more than a gigabyte.
        let taken = start.elapsed();
        assert!(taken < std::time::Duration::from_millis(500), "{taken:?}");
    }
}
