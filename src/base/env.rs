//! The only reader of environment variables. Each variable has one accessor here, with its meaning.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::error::{Result, bail};

fn text(name: &str) -> Option<String> {
    std::env::var(name)
        .ok()
        .map(|s| s.trim().to_owned())
        .filter(|s| !s.is_empty())
}

/// A number from 1 to `most`.
fn number_up_to(name: &str, most: usize) -> Result<Option<usize>> {
    let Some(s) = text(name) else {
        return Ok(None);
    };
    match s.parse::<usize>() {
        Ok(n) if (1..=most).contains(&n) => Ok(Some(n)),
        _ => bail!(
            InvalidArgument,
            "{name} is '{s}'; it takes a whole number from 1 to {most}"
        ),
    }
}

/// Whether a boolean variable of the Hugging Face tools is set.
fn is_on(name: &str) -> bool {
    text(name).is_some_and(|s| {
        ["1", "on", "yes", "true"]
            .iter()
            .any(|on| s.eq_ignore_ascii_case(on))
    })
}

/// The bytes of a variable without surrounding blanks; a path need not be UTF-8.
fn bytes(name: &str) -> Option<Vec<u8>> {
    let value = std::env::var_os(name)?.into_vec();
    let value = value.trim_ascii();
    (!value.is_empty()).then(|| value.to_vec())
}

/// A path, unexpanded.
fn plain_path(name: &str) -> Option<PathBuf> {
    bytes(name).map(|path| PathBuf::from(OsString::from_vec(path)))
}

/// A path, with `~` at the start expanded to the user's folder, and `$NAME` or `${NAME}` to another variable: configuration files and
/// containers set variables without a shell that would expand them.
fn path(name: &str) -> Option<PathBuf> {
    bytes(name).map(|path| expanded(&path, bytes))
}

/// A file name typed in a program rather than at a shell, with `~` and variables expanded.
pub fn shell_path(name: &str) -> PathBuf {
    expanded(name.as_bytes(), bytes)
}

/// Expands `~` and variables as Python's `expanduser` and `expandvars` do, so that all programs find the same folder. Unset variables stay
/// unexpanded.
fn expanded(path: &[u8], variable: impl Fn(&str) -> Option<Vec<u8>>) -> PathBuf {
    let mut out = Vec::new();
    let mut rest = path;
    if let Some(after) = path.strip_prefix(b"~")
        && (after.is_empty() || after.starts_with(b"/"))
        && let Some(home) = variable("HOME")
    {
        let end = home.iter().rposition(|&byte| byte != b'/');
        out.extend(&home[..end.map_or(0, |end| end + 1)]);
        rest = after;
    }
    let find = |text: &[u8], byte: u8| text.iter().position(|&b| b == byte);
    while let Some(at) = find(rest, b'$') {
        out.extend(&rest[..at]);
        let after = &rest[at + 1..];
        let (name, length) = match after.strip_prefix(b"{").and_then(|a| find(a, b'}')) {
            Some(end) => (&after[1..=end], end + 2),
            None => {
                let ends = |byte: &u8| !byte.is_ascii_alphanumeric() && *byte != b'_';
                let end = after.iter().position(ends).unwrap_or(after.len());
                (&after[..end], end)
            }
        };
        let name = std::str::from_utf8(name).unwrap_or_default();
        match variable(name).filter(|_| !name.is_empty()) {
            Some(value) => out.extend(value),
            None => out.extend(&rest[at..at + 1 + length]),
        }
        rest = &after[length..];
    }
    out.extend(rest);
    PathBuf::from(OsString::from_vec(out))
}

/// The user's cache folder: `XDG_CACHE_HOME`, or `.cache` in the home folder.
fn caches() -> Option<PathBuf> {
    path("XDG_CACHE_HOME").or_else(|| Some(plain_path("HOME")?.join(".cache")))
}

/// The user's state folder: `XDG_STATE_HOME`, or `.local/state` in the home folder.
pub fn state() -> Option<PathBuf> {
    path("XDG_STATE_HOME").or_else(|| Some(plain_path("HOME")?.join(".local/state")))
}

/// `NO_COLOR`: whether output should have no colours and other emphasis.
pub fn no_color() -> bool {
    text("NO_COLOR").is_some()
}

/// `NVFP4_CPU`: the ISA level to use instead of the best one present (`scalar`, `avx2`, `avx512`, `neon`).
pub fn cpu_level() -> Option<String> {
    text("NVFP4_CPU")
}

/// `NVFP4_THREADS`: the default number of CPU threads; unset means one per available core.
pub fn threads() -> Result<Option<usize>> {
    number_up_to("NVFP4_THREADS", 1024)
}

/// `NVFP4_GRAMMAR_MS`: the most milliseconds of a processor's time for compiling a grammar; unset means 100.
pub fn grammar_time() -> Result<Duration> {
    let milliseconds = number_up_to("NVFP4_GRAMMAR_MS", 60_000)?.unwrap_or(100);
    Ok(Duration::from_millis(milliseconds as u64))
}

/// `TS_Q4_DISABLE_UM`, shared with TorchSharp.Q4.Extension: whether managed (unified) memory is disabled, by `1`, `true` or `yes`.
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

/// `NVFP4_LONG`: whether tests run their long loops in full, as under `tests/run.sh --long`.
pub fn tests_are_long() -> bool {
    text("NVFP4_LONG").is_some_and(|s| s != "0")
}

/// `HF_TOKEN`, or its former name `HUGGING_FACE_HUB_TOKEN`: the access token for the Hugging Face hub, with the name of the variable that
/// has it.
pub fn hf_token() -> Option<(String, &'static str)> {
    ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]
        .into_iter()
        .find_map(|name| Some((text(name)?, name)))
}

/// The file with the access token, if no variable has it: `HF_TOKEN_PATH`, or `token` in [`hf_home`]. `None` if
/// `HF_HUB_DISABLE_IMPLICIT_TOKEN` is set.
pub fn hf_token_path() -> Option<PathBuf> {
    if is_on("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
        return None;
    }
    path("HF_TOKEN_PATH").or_else(|| Some(hf_home()?.join("token")))
}

/// `HF_ENDPOINT`: the address of the hub or of a mirror.
pub fn hf_endpoint() -> Option<String> {
    text("HF_ENDPOINT")
}

/// The hub's folder: `HF_HOME`, or `huggingface` in the user's cache folder.
pub fn hf_home() -> Option<PathBuf> {
    path("HF_HOME").or_else(|| Some(caches()?.join("huggingface")))
}

/// The folder of models from the hub, shared by all programs that use it: `HF_HUB_CACHE` (formerly `HUGGINGFACE_HUB_CACHE`), or `hub` in
/// [`hf_home`].
pub fn hf_hub_cache() -> Option<PathBuf> {
    path("HF_HUB_CACHE")
        .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| Some(hf_home()?.join("hub")))
}

/// The variable that forbids requests to the hub, if one is set: `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE`.
pub fn hf_offline() -> Option<&'static str> {
    ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"]
        .into_iter()
        .find(|name| is_on(name))
}

/// The proxy for requests of `scheme` (`http` or `https`): `http_proxy`, `https_proxy`, or `all_proxy` for both, in lower or upper case as
/// in other programs. [`proxy_exceptions`] lists the exceptions.
pub fn proxy(scheme: &str) -> Option<String> {
    let own = format!("{scheme}_proxy");
    [own.as_str(), "all_proxy"]
        .into_iter()
        .find_map(|name| text(name).or_else(|| text(&name.to_ascii_uppercase())))
}

/// `no_proxy`: the hosts that are reached without a proxy, separated by commas.
pub fn proxy_exceptions() -> Option<String> {
    text("no_proxy").or_else(|| text("NO_PROXY"))
}

/// `NVFP4_NVRTC`: the library that compiles GPU kernels, if the loader does not find it.
pub fn nvrtc() -> Option<PathBuf> {
    plain_path("NVFP4_NVRTC")
}

/// The cache folder of compiled GPU kernels: `NVFP4_CACHE`, or `nvfp4` in the user's cache folder. `None` if there is no such folder, or
/// `NVFP4_CACHE` is `off`.
pub fn kernel_cache() -> Option<PathBuf> {
    match plain_path("NVFP4_CACHE") {
        Some(path) if path == Path::new("off") => None,
        Some(path) => Some(path),
        None => Some(caches()?.join("nvfp4")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_expanded_as_python_does() {
        let variable = |name: &str| match name {
            "HOME" => Some(b"/home/user/".to_vec()),
            "DISK" => Some(b"/mnt/b\xffg".to_vec()),
            _ => None,
        };
        let cases: [(&[u8], &[u8]); 9] = [
            (b"~", b"/home/user"),
            (b"~/hub", b"/home/user/hub"),
            (b"~other/hub", b"~other/hub"),
            (b"$DISK/hub", b"/mnt/b\xffg/hub"),
            (b"${DISK}x/$DISK", b"/mnt/b\xffgx//mnt/b\xffg"),
            (b"/a/$NOT_SET/${NOR_THIS}/$", b"/a/$NOT_SET/${NOR_THIS}/$"),
            (b"/a/${open", b"/a/${open"),
            (b"/plain", b"/plain"),
            (b"/\xfe/${\xff}", b"/\xfe/${\xff}"),
        ];
        for (path, expected) in cases {
            let expected = PathBuf::from(OsString::from_vec(expected.to_vec()));
            assert_eq!(expanded(path, variable), expected);
        }
    }
}
