//! The only reader of environment variables. Each variable has one accessor here, with its meaning.

use std::path::PathBuf;

use super::error::{Result, bail};

fn text(name: &str) -> Option<String> {
    std::env::var(name)
        .ok()
        .map(|s| s.trim().to_owned())
        .filter(|s| !s.is_empty())
}

/// `NVFP4_CPU`: the ISA level to use instead of the best one present (`scalar`, `avx2`, `avx512`, `neon`).
pub fn cpu_level() -> Option<String> {
    text("NVFP4_CPU")
}

/// `NVFP4_THREADS`: the default number of CPU threads; unset means one per available core.
pub fn threads() -> Result<Option<usize>> {
    match text("NVFP4_THREADS") {
        None => Ok(None),
        Some(s) => match s.parse::<usize>() {
            Ok(n) if (1..=1024).contains(&n) => Ok(Some(n)),
            _ => bail!(
                InvalidArgument,
                "NVFP4_THREADS is '{s}'; it takes a whole number from 1 to 1024"
            ),
        },
    }
}

/// `TS_Q4_DISABLE_UM`, which TorchSharp.Q4.Extension reads too: whether managed (unified) memory is switched off, as `1`,
/// `true` or `yes` say.
pub fn managed_memory_is_off() -> bool {
    text("TS_Q4_DISABLE_UM").is_some_and(|s| {
        ["1", "true", "yes"]
            .iter()
            .any(|on| s.eq_ignore_ascii_case(on))
    })
}

/// `NVFP4_REQUIRE`: comma-separated names of ISA levels and devices whose absence is a test failure rather than a skip.
pub fn required_capabilities() -> Vec<String> {
    text("NVFP4_REQUIRE")
        .map(|s| {
            s.split(',')
                .map(|p| p.trim().to_ascii_lowercase())
                .filter(|p| !p.is_empty())
                .collect()
        })
        .unwrap_or_default()
}

/// `HF_TOKEN`: the access token for the Hugging Face hub.
pub fn hf_token() -> Option<String> {
    text("HF_TOKEN")
}

/// `NVFP4_NVRTC`: the library that compiles GPU kernels, where the loader does not find it.
pub fn nvrtc() -> Option<PathBuf> {
    text("NVFP4_NVRTC").map(PathBuf::from)
}

/// Where compiled GPU kernels are kept: `NVFP4_CACHE`, or `nvfp4` in the user's folder for caches. `None` where there is no
/// such folder, or `NVFP4_CACHE` is `off`.
pub fn kernel_cache() -> Option<PathBuf> {
    match text("NVFP4_CACHE").as_deref() {
        Some("off") => None,
        Some(path) => Some(PathBuf::from(path)),
        None => text("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(|| text("HOME").map(|home| PathBuf::from(home).join(".cache")))
            .map(|caches| caches.join("nvfp4")),
    }
}
