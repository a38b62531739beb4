//! Machine code of kernels for the device at hand: embedded in the library, kept on disk from an earlier run, or compiled now.

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

/// What the driver has to know of a source of kernels that is compiled by itself.
pub(in crate::cuda) trait KernelUnit: Copy + Send + Sync {
    /// Tells units apart, and names them in messages. It is asked for at every launch.
    fn path(self) -> &'static str;

    /// What is compiled.
    fn source(self) -> Source<'static>;

    /// Tells sources and options apart; machine code depends on them and the compiler's version.
    fn fingerprint(self, target: &str) -> u64;

    /// Whether it has kernels for an architecture, as [`target`] names it.
    fn is_for(self, target: &str) -> bool;

    /// Machine code that the library brings along, or that it is damaged.
    fn embedded(self, target: &str) -> Option<Result<Vec<u8>>>;

    /// Bytes of the one argument that a kernel takes.
    fn argument_bytes(self, kernel: &str) -> Option<usize>;

    /// Whether a multiprocessor's memory is worth more to its kernels as cache than an early start beside kernels of other units.
    fn prefers_cache(self) -> bool;
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

/// Machine code of a source, and the assembler's report on registers and spills.
pub(in crate::cuda) fn compile(source: Source<'_>, target: &str) -> Result<(Vec<u8>, String)> {
    loaded()?
        .compile(source, target)
        .map_err(|e| err!(Internal, "{e}"))
}

/// Machine code of a unit: what is embedded, else from the cache on disk, else compiled and put there.
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

    /// Loads what [`compile`] gave for the device's architecture.
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
        // A multiprocessor must be empty before it divides its memory between cache and blocks in another way: kernels that are
        // to overlap ask for the same.
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

/// The modules of a device by the paths of their units.
#[derive(Default)]
pub(in crate::cuda) struct Modules(Mutex<HashMap<&'static str, Arc<TryOnce<Arc<Module>>>>>);

impl Modules {
    fn all(&self) -> MutexGuard<'_, HashMap<&'static str, Arc<TryOnce<Arc<Module>>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a unit's is loaded.
    pub(in crate::cuda) fn is_loaded(&self, unit: impl KernelUnit) -> bool {
        let all = self.all();
        all.get(unit.path())
            .is_some_and(|module| module.get().is_some())
    }

    /// A unit's, which `load` loads unless it is there or somebody else is loading it. Others are not waited for.
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
