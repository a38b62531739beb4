//! LoRA adapters of a loaded model.
//!
//! An adapter is a directory in peft's format, adapter_config.json and adapter_model.safetensors, as `nvfp4 train --adapter` and peft write
//! it: factors of low rank beside linear maps of a model's blocks. Sessions whose options name it run with it; others run the model as it
//! is, with the bits that they have without adapters. Any number of adapters may be loaded, and calls of sessions with different ones run
//! together. The model's drafter guesses without adapters, which changes no token.
//!
//! Sessions begin with cached prefixes of others that have an adapter of the same content, and of no other. A session keeps its adapter
//! from its first token to its end, and so do its forks; a saved session is restored where that adapter is loaded.
//!
//! Models on the CPU and on a CUDA device take them; a CUDA device takes none beside routed experts and per-layer inputs.

use std::ffi::c_char;

use serde_json::json;

use super::arguments::{self, Out, copy_text};
use super::call::{NVFP4_CallOptions, watched};
use super::guard::{enter, enter_to_free};
use super::handle::{self, Object};
use super::model::NVFP4_Model;
use super::status::NVFP4_Status;
use crate::engine::{LoadedAdapter, Served};

/// An adapter. See the adapter chapter.
pub struct NVFP4_Adapter {
    _private: [u8; 0],
}

impl Object for LoadedAdapter {
    type Handle = NVFP4_Adapter;
    const NAME: &'static str = "NVFP4_Adapter";
}

/// Loads an adapter for a model. It takes memory of the model's device for its factors, in the types that they are stored in, and is not
/// copied for sessions.
///
/// #NVFP4_INVALID_ARGUMENT if it is of another base: a name, a shape or a rank is not what the model and its own config say.
/// #NVFP4_UNSUPPORTED for what is not only factors beside linear maps of blocks (DoRA, biases, whole modules, embeddings, the output layer,
/// routers), for ranks above 1,024, and on a CUDA device beside routed experts and per-layer inputs. #NVFP4_OUT_OF_MEMORY where its factors
/// do not fit. The error names the tensor or the setting, and nothing is kept.
///
/// - `path`, `path_length`: the directory, in UTF-8.
/// - `call`: cancels the call; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_adapter_load(
    model: *const NVFP4_Model,
    path: *const c_char,
    path_length: usize,
    call: *const NVFP4_CallOptions,
    out: *mut *mut NVFP4_Adapter,
) -> NVFP4_Status {
    enter("NVFP4_adapter_load", || {
        // SAFETY: the pointers are as the header asks.
        let (out, path) = unsafe {
            (
                Out::new("out", out)?,
                arguments::path("path", path, path_length)?,
            )
        };
        let model = handle::get::<Served>("model", model)?;
        let load = || model.load_adapter(path);
        // SAFETY: as above.
        out.set(handle::insert(unsafe { watched(call, load) }?));
        Ok(())
    })
}

/// Describes an adapter, as JSON: name (of its directory), rank (the largest), projections (the number of adapted linear maps), bytes (in
/// memory), identity (16 hexadecimal digits, the same for the same content) and sessions (the number that use it now, forks included).
/// Later versions may add keys. From any thread at any time.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_adapter_info(
    adapter: *const NVFP4_Adapter,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_adapter_info", || {
        let adapter = handle::get::<LoadedAdapter>("adapter", adapter)?;
        let info = json!({
            "name": adapter.name(),
            "rank": adapter.rank(),
            "projections": adapter.projections(),
            "bytes": adapter.bytes(),
            "identity": format!("{:016x}", adapter.identity()),
            "sessions": adapter.uses(),
        });
        // SAFETY: the pointers are as the header asks.
        unsafe { copy_text(&info.to_string(), buffer, capacity, length) }
    })
}

/// Waits until no session uses an adapter, forks and restored sessions included. Releasing the last reference then frees its memory at once;
/// without waiting, the memory goes with the last session. New sessions may name the adapter at any time. A callback of a session that uses
/// the adapter waits in vain, until the call is cancelled.
///
/// - `call`: cancels the call; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_adapter_wait(
    adapter: *const NVFP4_Adapter,
    call: *const NVFP4_CallOptions,
) -> NVFP4_Status {
    enter("NVFP4_adapter_wait", || {
        let adapter = handle::get::<LoadedAdapter>("adapter", adapter)?;
        let wait = || adapter.wait_until_unused();
        // SAFETY: the pointer is as the header asks.
        unsafe { watched(call, wait) }
    })
}

/// Adds a reference to an adapter.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_adapter_retain(adapter: *mut NVFP4_Adapter) -> NVFP4_Status {
    enter("NVFP4_adapter_retain", || {
        handle::retain::<LoadedAdapter>("adapter", adapter)
    })
}

/// Gives up a reference to an adapter. After the last one the handle is stale; sessions that use the adapter go on, and its memory is freed
/// with the last of them.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_adapter_release(adapter: *mut NVFP4_Adapter) -> NVFP4_Status {
    enter_to_free("NVFP4_adapter_release", || {
        handle::release::<LoadedAdapter>("adapter", adapter)
    })
}
