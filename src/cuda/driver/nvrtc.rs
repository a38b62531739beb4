//! NVRTC, the compiler of kernels, and its options. Loaded on first use, like the driver; needs no GPU. `build.rs` includes this file as a
//! module too, so it imports nothing of the library, reports errors as text, and does not read the environment.

use std::error::Error as _;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

use libloading::AsFilename;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// A source that is compiled by itself, and the headers that it may include, by their include names.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    /// Its name in messages.
    pub(crate) path: &'a str,
    pub(crate) text: &'a str,
    pub(crate) headers: &'static [(&'static str, &'static str)],
}

/// Architectures, as [`target`] names them, that every kernel is tested for and that packages embed.
pub const TARGETS: &[&str] = &[
    "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a",
];

/// The compiler's name of an architecture, `sm_90a` for example. From Hopper on it includes the features that only this architecture has.
pub fn target((major, minor): (i32, i32)) -> String {
    let special = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{special}")
}

/// Compiler options for an architecture.
pub(crate) fn options(target: &str) -> Vec<CString> {
    [
        format!("--gpu-architecture={target}").as_str(),
        "--std=c++17",
        "--device-as-default-execution-space",
        "--ptxas-options=-v",
    ]
    .map(text)
    .into()
}

fn text(s: &str) -> CString {
    CString::new(s).expect("sources and options have no zero byte")
}

type Program = *mut c_void;

/// NVRTC's code of success.
const SUCCESS: c_int = 0;
/// NVRTC's code for an unknown option. Only an architecture newer than the compiler causes it, because all other options are old.
const INVALID_OPTION: c_int = 5;

macro_rules! functions {
    ($($name:ident = $symbol:literal: fn($($argument:ty),*) -> $result:ty),+ $(,)?) => {
        /// The functions of NVRTC that are used.
        struct Functions { $($name: unsafe extern "C" fn($($argument),*) -> $result,)+ }

        impl Functions {
            /// # Safety
            /// The library is NVRTC, and is never closed.
            unsafe fn find(library: &Library) -> Result<Functions, String> {
                let lacks = |symbol: &CStr, error| {
                    format!("what was loaded as NVRTC lacks {}: {}", symbol.to_string_lossy(), reason(error))
                };
                // SAFETY: NVRTC's functions of these names have these types.
                unsafe { Ok(Functions { $($name: *library.get($symbol).map_err(|e| lacks($symbol, e))?,)+ }) }
            }
        }
    };
}

functions! {
    version = c"nvrtcVersion": fn(*mut c_int, *mut c_int) -> c_int,
    error_string = c"nvrtcGetErrorString": fn(c_int) -> *const c_char,
    create = c"nvrtcCreateProgram": fn(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> c_int,
    compile = c"nvrtcCompileProgram": fn(Program, c_int, *const *const c_char) -> c_int,
    log_size = c"nvrtcGetProgramLogSize": fn(Program, *mut usize) -> c_int,
    log = c"nvrtcGetProgramLog": fn(Program, *mut c_char) -> c_int,
    image_size = c"nvrtcGetCUBINSize": fn(Program, *mut usize) -> c_int,
    image = c"nvrtcGetCUBIN": fn(Program, *mut c_char) -> c_int,
    destroy = c"nvrtcDestroyProgram": fn(*mut Program) -> c_int,
}

/// The loader's message for an error.
fn reason(error: libloading::Error) -> String {
    error
        .source()
        .map_or_else(|| error.to_string(), ToString::to_string)
}

/// Loads a library.
fn open(path: impl AsFilename) -> Result<Library, String> {
    // SAFETY: loading a library runs its initialisers, and NVRTC's allow that at any time.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map_err(reason)
}

/// Loads NVRTC from a path that the user chose, after the library beside it that NVRTC loads by its bare name.
fn open_path(path: &Path) -> Result<Library, String> {
    let open = |path: &Path| open(path).map_err(|why| format!("loading {}: {why}", path.display()));
    let folder = path
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("libnvrtc-builtins.so") && !name.contains("alt") {
            // Stays loaded, as NVRTC looks for it later.
            std::mem::forget(open(&entry.path())?);
        }
    }
    open(path)
}

/// NVRTC, loaded.
pub(crate) struct Compiler {
    functions: Functions,
    version: (c_int, c_int),
}

impl Compiler {
    /// Loads the library at `path`, or the one that the loader finds. An error says what to do.
    pub(crate) fn load(path: Option<&Path>) -> Result<Compiler, String> {
        let library = match path {
            Some(path) => open_path(path).map_err(|why| {
                format!("the compiler for GPU kernels that NVFP4_NVRTC names: {why}; it takes the path of a libnvrtc.so.12 or later, and without it the loader looks for one")
            })?,
            None => ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"].iter().find_map(|&name| open(name).ok()).ok_or(
                "no compiler for GPU kernels: libnvrtc.so.13 (or .so.12) was not found; install the CUDA toolkit or the Python package nvidia-cuda-nvrtc, and name the library in NVFP4_NVRTC or its folder in LD_LIBRARY_PATH",
            )?,
        };
        // SAFETY: what has NVRTC's name, or what the user calls NVRTC, is taken to be NVRTC.
        let functions = unsafe { Functions::find(&library) }?;
        // The library may have threads, so it stays loaded.
        std::mem::forget(library);
        let mut compiler = Compiler {
            functions,
            version: (0, 0),
        };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes the two integers it is given.
        let answer = unsafe { (compiler.functions.version)(&mut major, &mut minor) };
        compiler.check(answer, "asking NVRTC's version")?;
        compiler.version = (major, minor);
        Ok(compiler)
    }

    pub(crate) fn version(&self) -> (i32, i32) {
        self.version
    }

    fn check(&self, result: c_int, doing: &str) -> Result<(), String> {
        if result == SUCCESS {
            return Ok(());
        }
        // SAFETY: gives a static string for any number.
        let why = unsafe { CStr::from_ptr((self.functions.error_string)(result)) };
        Err(format!("{doing}: {}", why.to_string_lossy()))
    }

    /// Compiles a source. Returns machine code, and the assembler's report on registers and spills.
    pub(crate) fn compile(
        &self,
        source: Source<'_>,
        target: &str,
    ) -> Result<(Vec<u8>, String), String> {
        let Source {
            path,
            text: source,
            headers,
        } = source;
        let f = &self.functions;
        let (source, name) = (text(source), text(path));
        let names: Vec<CString> = headers.iter().map(|(name, _)| text(name)).collect();
        let sources: Vec<CString> = headers.iter().map(|(_, source)| text(source)).collect();
        let options = options(target);
        let pointers =
            |all: &[CString]| -> Vec<*const c_char> { all.iter().map(|s| s.as_ptr()).collect() };
        let (all_sources, all_names, all_options) =
            (pointers(&sources), pointers(&names), pointers(&options));
        let mut program = std::ptr::null_mut();
        // SAFETY: all strings end in zero and live to the end of this function; each call writes what it is given room for,
        // and the program is destroyed once.
        unsafe {
            let count = headers.len() as c_int;
            self.check(
                (f.create)(
                    &mut program,
                    source.as_ptr(),
                    name.as_ptr(),
                    count,
                    all_sources.as_ptr(),
                    all_names.as_ptr(),
                ),
                path,
            )?;
            let done = (f.compile)(program, all_options.len() as c_int, all_options.as_ptr());
            let mut size = 0;
            let _ = (f.log_size)(program, &mut size);
            let mut log = vec![0u8; size.max(1)];
            let _ = (f.log)(program, log.as_mut_ptr().cast());
            let log = String::from_utf8_lossy(&log)
                .trim_end_matches('\0')
                .to_owned();
            let image = self
                .check(done, "the compiler says")
                .map_err(|e| match done {
                    INVALID_OPTION => format!(
                        "NVRTC {}.{} does not know {target}, which {path} is compiled for: {e}; put a newer one in its place, or name one in NVFP4_NVRTC",
                        self.version.0, self.version.1
                    ),
                    _ => format!("compiling {path} for {target}: {e}: {log}"),
                })
                .and_then(|()| {
                    let mut size = 0;
                    self.check((f.image_size)(program, &mut size), path)?;
                    let mut image = vec![0u8; size];
                    self.check((f.image)(program, image.as_mut_ptr().cast()), path)?;
                    Ok(image)
                });
            let _ = (f.destroy)(&mut program);
            Ok((image?, log))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compiler_that_is_not_there_is_named() {
        let refused = |path: &str| Compiler::load(Some(Path::new(path))).err().unwrap();
        let missing = refused("/nowhere/libnvrtc.so.13");
        for said in ["NVFP4_NVRTC", "/nowhere/libnvrtc.so.13", "it takes"] {
            assert!(missing.contains(said), "{missing}");
        }
        // A library, but not NVRTC.
        let other = refused("libc.so.6");
        assert!(other.contains("lacks nvrtcVersion"), "{other}");
    }
}
