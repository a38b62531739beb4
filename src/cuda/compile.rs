//! Kernels from source to machine code of the device at hand: NVRTC, whose output is kept on disk. The library is looked for
//! at run time, like the driver.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char};
use std::path::PathBuf;
use std::sync::Mutex;

use cudarc::driver::{result, sys};
use cudarc::nvrtc::{result::NvrtcError, sys as nvrtc};

use super::gpu::check;
use crate::base::checksum::Checksum;
use crate::base::error::{bail, err};
use crate::base::{Result, env, file};

/// Headers, by the name that sources include them by.
const HEADERS: &[(&str, &str)] = &[
    (
        "common/types.cuh",
        include_str!("../../kernels/common/types.cuh"),
    ),
    (
        "common/ptx.cuh",
        include_str!("../../kernels/common/ptx.cuh"),
    ),
    (
        "common/reduce.cuh",
        include_str!("../../kernels/common/reduce.cuh"),
    ),
    (
        "common/heads.cuh",
        include_str!("../../kernels/common/heads.cuh"),
    ),
    (
        "common/pages.cuh",
        include_str!("../../kernels/common/pages.cuh"),
    ),
    (
        "format/nvfp4.cuh",
        include_str!("../../kernels/format/nvfp4.cuh"),
    ),
];

macro_rules! units {
    ($($name:ident = $path:literal),+ $(,)?) => {
        /// A source file that is compiled by itself.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Unit { $(#[doc = $path] $name,)+ }

        impl Unit {
            /// All of them.
            pub const ALL: &'static [Unit] = &[$(Unit::$name,)+];

            /// Path under `kernels/`.
            pub const fn path(self) -> &'static str { match self { $(Unit::$name => $path,)+ } }

            const fn source(self) -> &'static str {
                match self { $(Unit::$name => include_str!(concat!("../../kernels/", $path)),)+ }
            }
        }
    };
}

units! {
    ReadAll = "bandwidth/read.cu",
    Swiglu = "activation/swiglu.cu",
    AttentionDecode = "attention/decode.cu",
    AttentionPrefill = "attention/prefill.cu",
    Embed = "embed/embed.cu",
    LinearDense = "linear/dense.cu",
    LinearSmall = "linear/small.cu",
    RmsNorm = "norm/rms_norm.cu",
    Dequantize = "quantize/dequantize.cu",
    RopeStore = "rope/store.cu",
    Argmax = "sample/argmax.cu",
}

/// The compiler's name of an architecture: `sm_90a`. From Hopper on, with the features that only this architecture has.
pub fn target((major, minor): (i32, i32)) -> String {
    let special = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{special}")
}

/// Loads NVRTC once; its version, major and minor. An error says what to do.
pub fn compiler() -> Result<(i32, i32)> {
    static STATE: Mutex<Option<Result<(i32, i32)>>> = Mutex::new(None);
    let mut state = STATE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    state
        .get_or_insert_with(|| {
            if let Some(path) = env::nvrtc() {
                preload(&path)?;
            }
            // SAFETY: looking for a library runs its initialisers; NVRTC's allow that at any time.
            if !unsafe { nvrtc::is_culib_present() } {
                bail!(
                    DeviceUnavailable,
                    "no compiler for GPU kernels: libnvrtc.so.13 (or .so.12) was not found; install the CUDA toolkit or the Python package nvidia-cuda-nvrtc, and name the library in NVFP4_NVRTC or its folder in LD_LIBRARY_PATH"
                );
            }
            let (mut major, mut minor) = (0, 0);
            // SAFETY: writes the two integers it is given.
            compiled(unsafe { nvrtc::nvrtcVersion(&mut major, &mut minor) }.result(), "asking NVRTC's version")?;
            Ok((major, minor))
        })
        .clone()
}

/// Loads NVRTC from a path of the user's choice, together with the library beside it that it asks for by its bare name.
fn preload(path: &std::path::Path) -> Result<()> {
    let folder = path
        .parent()
        .map(std::path::Path::to_owned)
        .unwrap_or_default();
    let beside = std::fs::read_dir(&folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path());
    let builtins = beside.filter(|p| {
        p.file_name().is_some_and(|n| {
            let n = n.to_string_lossy();
            n.starts_with("libnvrtc-builtins.so") && !n.contains("alt")
        })
    });
    for library in builtins.chain([path.to_owned()]) {
        let name = CString::new(library.as_os_str().as_encoded_bytes())
            .map_err(|_| err!(InvalidArgument, "NVFP4_NVRTC: the path has a zero byte"))?;
        // SAFETY: loading a library runs its initialisers; the user named it. It stays loaded.
        if unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) }.is_null() {
            // SAFETY: dlerror gives a string or NULL.
            let why = unsafe { libc::dlerror() };
            let why = match why.is_null() {
                true => "no reason given".into(),
                // SAFETY: not NULL, and valid until this thread's next call of the loader.
                false => unsafe { CStr::from_ptr(why) }.to_string_lossy(),
            };
            bail!(DeviceUnavailable, "loading {}: {why}", library.display());
        }
    }
    Ok(())
}

fn compiled<T>(result: std::result::Result<T, NvrtcError>, doing: &str) -> Result<T> {
    result.map_err(|e| err!(Internal, "{doing}: {e}"))
}

fn text(s: &str) -> CString {
    CString::new(s).expect("sources and options have no zero byte")
}

/// Compiles a unit for an architecture, given as NVRTC names it. Needs no GPU. Returns machine code and the assembler's
/// report on registers and spills.
pub fn compile(unit: Unit, target: &str) -> Result<(Vec<u8>, String)> {
    compiler()?;
    let (source, name) = (text(unit.source()), text(unit.path()));
    let names: Vec<CString> = HEADERS.iter().map(|(name, _)| text(name)).collect();
    let sources: Vec<CString> = HEADERS.iter().map(|(_, source)| text(source)).collect();
    let pointers =
        |all: &[CString]| -> Vec<*const c_char> { all.iter().map(|s| s.as_ptr()).collect() };
    let options = options(target);
    let mut program = std::ptr::null_mut();
    // SAFETY: all strings end in zero and live until the program is destroyed below; each call writes what it is given
    // room for.
    unsafe {
        compiled(
            nvrtc::nvrtcCreateProgram(
                &mut program,
                source.as_ptr(),
                name.as_ptr(),
                HEADERS.len() as i32,
                pointers(&sources).as_ptr(),
                pointers(&names).as_ptr(),
            )
            .result(),
            unit.path(),
        )?;
        let done =
            nvrtc::nvrtcCompileProgram(program, options.len() as i32, pointers(&options).as_ptr())
                .result();
        let mut len = 0;
        let _ = nvrtc::nvrtcGetProgramLogSize(program, &mut len);
        let mut log = vec![0u8; len.max(1)];
        let _ = nvrtc::nvrtcGetProgramLog(program, log.as_mut_ptr().cast());
        let log = String::from_utf8_lossy(&log)
            .trim_end_matches('\0')
            .to_owned();
        let image = done
            .map_err(|e| {
                err!(
                    Internal,
                    "compiling {} for {target}: {e}: {log}",
                    unit.path()
                )
            })
            .and_then(|()| {
                let mut len = 0;
                compiled(
                    nvrtc::nvrtcGetCUBINSize(program, &mut len).result(),
                    unit.path(),
                )?;
                let mut image = vec![0u8; len];
                compiled(
                    nvrtc::nvrtcGetCUBIN(program, image.as_mut_ptr().cast()).result(),
                    unit.path(),
                )?;
                Ok(image)
            });
        let _ = nvrtc::nvrtcDestroyProgram(&mut program);
        Ok((image?, log))
    }
}

fn options(target: &str) -> Vec<CString> {
    [
        format!("--gpu-architecture={target}").as_str(),
        "--std=c++17",
        "--device-as-default-execution-space",
        "--ptxas-options=-v",
    ]
    .map(text)
    .into()
}

/// What machine code depends on.
fn key(unit: Unit, target: &str, version: (i32, i32)) -> u64 {
    let mut sum = Checksum::new();
    for (name, source) in HEADERS {
        sum.update(name.as_bytes());
        sum.update(source.as_bytes());
    }
    sum.update(unit.source().as_bytes());
    for option in options(target) {
        sum.update(option.as_bytes());
    }
    sum.update(format!("{version:?}").as_bytes());
    sum.finish()
}

/// Machine code of a unit: from the cache on disk, else compiled and put there.
fn image(unit: Unit, target: &str) -> Result<Vec<u8>> {
    let version = compiler()?;
    let Some(folder) = env::kernel_cache() else {
        return Ok(compile(unit, target)?.0);
    };
    let name = format!(
        "{}-{target}-{:016x}.cubin",
        unit.path().replace(['/', '.'], "-"),
        key(unit, target, version)
    );
    let path: PathBuf = folder.join(name);
    if let Ok(image) = std::fs::read(&path)
        && let Some((image, sum)) = image
            .split_last_chunk::<8>()
            .map(|(i, s)| (i, u64::from_le_bytes(*s)))
        && checksum(image) == sum
    {
        return Ok(image.to_vec());
    }
    let (image, _) = compile(unit, target)?;
    let mut kept = image.clone();
    kept.extend(checksum(&image).to_le_bytes());
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

fn checksum(bytes: &[u8]) -> u64 {
    let mut sum = Checksum::new();
    sum.update(bytes);
    sum.finish()
}

/// A unit loaded into the current context.
pub(super) struct Module {
    module: sys::CUmodule,
    unit: Unit,
    functions: Mutex<HashMap<String, usize>>,
}

// SAFETY: a driver's handle, used under a bound context.
unsafe impl Send for Module {}
// SAFETY: as above; the table of functions is behind a lock.
unsafe impl Sync for Module {}

impl Module {
    pub(super) fn load(unit: Unit, arch: (i32, i32)) -> Result<Module> {
        let image = image(unit, &target(arch))?;
        // SAFETY: a complete image of machine code; the driver copies it.
        let module = check(
            unsafe { result::module::load_data(image.as_ptr().cast()) },
            unit.path(),
        )?;
        Ok(Module {
            module,
            unit,
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
        // SAFETY: the module is loaded.
        let function = check(
            unsafe { result::module::get_function(self.module, text(name)) },
            name,
        )
        .map_err(|e| e.within(self.unit.path()))?;
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
