//! Machine code of kernels for a device: embedded in the library, cached on disk by an earlier run, or compiled now.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::CString;
use std::hash::Hasher;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::{result, sys};
use twox_hash::XxHash3_64;

use super::error::check;
use super::nvrtc::{Compiler, Source, target};
use crate::base::error::err;
use crate::base::once::TryOnce;
use crate::base::{Result, env, file};

/// A unit of kernels: a source that is compiled by itself, as the driver sees it.
pub(in crate::cuda) trait KernelUnit: Copy + Send + Sync {
    /// Identifies the unit, also in messages. Every launch asks for it.
    fn path(self) -> &'static str;

    /// The source to compile.
    fn source(self) -> Source<'static>;

    /// Hash of the source and its options. Machine code depends on it and on the compiler's version.
    fn fingerprint(self, target: &str) -> u64;

    /// Whether the unit has kernels for an architecture, as [`target`] names it.
    fn is_for(self, target: &str) -> bool;

    /// Machine code embedded in the library, if any; an error if it is damaged.
    fn embedded(self, target: &str) -> Option<Result<Vec<u8>>>;

    /// Whether its kernels gain more from the multiprocessor's memory as L1 cache than from starting early beside kernels of other units.
    fn prefers_cache(self) -> bool;
}

/// A kernel of a unit, and the type of its one parameter.
pub(in crate::cuda) trait Kernel: Copy {
    /// The parameter, in the kernel's layout.
    type Arguments;
    /// The units of such kernels.
    type Unit: KernelUnit;

    /// The source that has the kernel.
    fn unit(self) -> Self::Unit;

    /// Its name in the machine code.
    fn name(self) -> &'static str;
}

/// Loads NVRTC once.
fn loaded() -> Result<&'static Compiler> {
    static STATE: OnceLock<std::result::Result<Compiler, String>> = OnceLock::new();
    let state = STATE.get_or_init(|| Compiler::load(env::nvrtc().as_deref()));
    state.as_ref().map_err(|e| err!(DeviceUnavailable, "{e}"))
}

/// Loads NVRTC and returns its version, major and minor. An error says what to do.
pub fn compiler() -> Result<(i32, i32)> {
    Ok(loaded()?.version())
}

/// Compiles a source. Returns machine code, and the assembler's report on registers and spills.
pub(in crate::cuda) fn compile(source: Source<'_>, target: &str) -> Result<(Vec<u8>, String)> {
    loaded()?
        .compile(source, target)
        .map_err(|e| err!(Internal, "{e}"))
}

/// Machine code of a unit: embedded, else from the cache on disk, else compiled and added to the cache.
pub(in crate::cuda) fn image(unit: impl KernelUnit, target: &str) -> Result<Vec<u8>> {
    if let Some(image) = unit.embedded(target) {
        return image;
    }
    let version = compiler()?;
    let Some(folder) = env::kernel_cache() else {
        return Ok(compile(unit.source(), target)?.0);
    };
    let mut key = XxHash3_64::new();
    key.write(&unit.fingerprint(target).to_le_bytes());
    key.write(format!("{version:?}").as_bytes());
    let name = format!(
        "{}-{target}-{:016x}.cubin",
        unit.path().replace(['/', '.'], "-"),
        key.finish()
    );
    let path: PathBuf = folder.join(name);
    if let Ok(image) = file::read(&path)
        && let Some((image, sum)) = image
            .split_last_chunk::<8>()
            .map(|(i, s)| (i, u64::from_le_bytes(*s)))
        && XxHash3_64::oneshot(image) == sum
    {
        return Ok(image.to_vec());
    }
    let (image, _) = compile(unit.source(), target)?;
    let mut kept = image.clone();
    kept.extend(XxHash3_64::oneshot(&image).to_le_bytes());
    // A failure to write the cache costs time, not results.
    if let Err(e) = std::fs::create_dir_all(&folder)
        .map_err(|e| err!(Io, "{e}"))
        .and_then(|()| file::stage(&path, &kept)?.commit())
    {
        tracing::warn!(
            "kernels are compiled anew each time: {}: {e}",
            path.display()
        );
    }
    Ok(image)
}

/// Machine code loaded into the current context.
pub(in crate::cuda) struct Module {
    module: sys::CUmodule,
    path: Cow<'static, str>,
    prefers_cache: bool,
    functions: Mutex<HashMap<String, usize>>,
}

// SAFETY: a driver's handle, used under a bound context.
unsafe impl Send for Module {}
// SAFETY: as above; the table of functions is behind a lock.
unsafe impl Sync for Module {}

impl Module {
    pub(in crate::cuda) fn load(unit: impl KernelUnit, arch: (i32, i32)) -> Result<Module> {
        let mut module =
            Module::from_image(&image(unit, &target(arch))?, Cow::Borrowed(unit.path()))?;
        module.prefers_cache = unit.prefers_cache();
        Ok(module)
    }

    /// Loads the output of [`compile`] for the device's architecture.
    pub(in crate::cuda) fn from_image(image: &[u8], path: Cow<'static, str>) -> Result<Module> {
        // SAFETY: a complete image of machine code; the driver copies it.
        let module = check(
            unsafe { result::module::load_data(image.as_ptr().cast()) },
            &path,
        )?;
        Ok(Module {
            module,
            path,
            prefers_cache: false,
            functions: Mutex::default(),
        })
    }

    pub(in crate::cuda) fn function(&self, name: &str) -> Result<sys::CUfunction> {
        let mut functions = self
            .functions
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
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
        // A multiprocessor must be empty before it changes the split between L1 cache and shared memory, so kernels that are to overlap ask
        // for the same split.
        let carveout = match self.prefers_cache {
            true => sys::CUshared_carveout::CU_SHAREDMEM_CARVEOUT_DEFAULT,
            false => sys::CUshared_carveout::CU_SHAREDMEM_CARVEOUT_MAX_SHARED,
        };
        check(
            // SAFETY: the function was just found.
            unsafe {
                result::function::set_function_attribute(
                    function,
                    sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                    carveout as i32,
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

/// The modules of a device, by the paths of their units.
#[derive(Default)]
pub(in crate::cuda) struct Modules(Mutex<HashMap<&'static str, Arc<TryOnce<Arc<Module>>>>>);

impl Modules {
    fn all(&self) -> MutexGuard<'_, HashMap<&'static str, Arc<TryOnce<Arc<Module>>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a unit's module is loaded.
    pub(in crate::cuda) fn is_loaded(&self, unit: impl KernelUnit) -> bool {
        let all = self.all();
        all.get(unit.path())
            .is_some_and(|module| module.get().is_some())
    }

    /// A unit's module, loaded by `load` on first use. Does not wait for other units that are being loaded.
    pub(in crate::cuda) fn get_or_try(
        &self,
        unit: impl KernelUnit,
        load: impl FnOnce() -> Result<Module>,
    ) -> Result<Arc<Module>> {
        let slot = self.all().entry(unit.path()).or_default().clone();
        slot.get_or_try(|| load().map(Arc::new)).cloned()
    }

    /// Unloads all of them, in the current context.
    pub(in crate::cuda) fn unload(&self) {
        self.all().clear();
    }
}
