//! Memory: usage by purpose, a budget, and managed memory.
//!
//! The library counts its own large allocations in bytes, for the whole process, in host memory and on GPUs. One budget
//! covers them all. Not counted are the memory of a GPU's driver, libraries and compiled kernels, and GPU memory that is
//! free but kept for reuse, which NVFP4_empty_cache() frees.
//!
//! Managed (unified) memory has the same address on the host and on CUDA devices, and its pages move between them. The
//! library puts a tensor there only when the host asks for it, by NVFP4_to_managed() or NVFP4_tensor_by_managed_policy().
//! The environment variable TS_Q4_DISABLE_UM (1, true or yes) disables it altogether.

use std::sync::Arc;

use super::arguments::{Out, choice, flag};
use super::guard::enter;
use super::handle;
use super::status::NVFP4_Status;
use super::tensor::{NVFP4_Tensor, cuda_number};
use crate::base::memory::{self, Tag, usage};
use crate::ops::transfer::{self, ManagedPolicy};
use crate::tensor::Tensor;

/// All tags together, but for #NVFP4_MEMORY_MAPPED. The peak is that of the sum.
pub const NVFP4_MEMORY_TOTAL: i32 = 0;
/// Weights in the form that kernels read.
pub const NVFP4_MEMORY_WEIGHTS: i32 = 1;
/// Cached keys and values of sessions.
pub const NVFP4_MEMORY_KV_CACHE: i32 = 2;
/// Activations and workspaces.
pub const NVFP4_MEMORY_SCRATCH: i32 = 3;
/// Tensors made through the tensor chapter or as results.
pub const NVFP4_MEMORY_TENSOR: i32 = 4;
/// Weights on GPUs. All NVFP4_MEMORY_DEVICE_* count GPU memory, and the others host memory.
pub const NVFP4_MEMORY_DEVICE_WEIGHTS: i32 = 5;
/// Cached keys and values of sessions on GPUs.
pub const NVFP4_MEMORY_DEVICE_KV_CACHE: i32 = 6;
/// Activations and workspaces on GPUs.
pub const NVFP4_MEMORY_DEVICE_SCRATCH: i32 = 7;
/// Tensors on GPUs.
pub const NVFP4_MEMORY_DEVICE_TENSOR: i32 = 8;
/// Files of packed weights that are mapped into memory: host memory that processes share, and that the system may drop and read
/// again. Not in the total, and not limited by NVFP4_memory_set_budget().
pub const NVFP4_MEMORY_MAPPED: i32 = 9;

const _: () = assert!(Tag::ALL.len() == NVFP4_MEMORY_DEVICE_TENSOR as usize);

/// Writes the bytes in use under `tag`, one of NVFP4_MEMORY_*: now, and the peak since the start or the last
/// NVFP4_memory_reset_peak().
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_memory_stats(
    tag: i32,
    current: *mut u64,
    peak: *mut u64,
) -> NVFP4_Status {
    enter("NVFP4_memory_stats", || {
        let usage = choice(
            "tag",
            tag,
            &[
                (NVFP4_MEMORY_TOTAL, "total", memory::total()),
                (NVFP4_MEMORY_WEIGHTS, "weights", usage(Tag::Weights)),
                (NVFP4_MEMORY_KV_CACHE, "kv_cache", usage(Tag::KvCache)),
                (NVFP4_MEMORY_SCRATCH, "scratch", usage(Tag::Scratch)),
                (NVFP4_MEMORY_TENSOR, "tensor", usage(Tag::Tensor)),
                (
                    NVFP4_MEMORY_DEVICE_WEIGHTS,
                    "device_weights",
                    usage(Tag::DeviceWeights),
                ),
                (
                    NVFP4_MEMORY_DEVICE_KV_CACHE,
                    "device_kv_cache",
                    usage(Tag::DeviceKvCache),
                ),
                (
                    NVFP4_MEMORY_DEVICE_SCRATCH,
                    "device_scratch",
                    usage(Tag::DeviceScratch),
                ),
                (
                    NVFP4_MEMORY_DEVICE_TENSOR,
                    "device_tensor",
                    usage(Tag::DeviceTensor),
                ),
                (NVFP4_MEMORY_MAPPED, "mapped", memory::mapped()),
            ],
        )?;
        // SAFETY: the pointers are as the header asks.
        let (current, peak) = unsafe { (Out::new("current", current)?, Out::new("peak", peak)?) };
        current.set(usage.current);
        peak.set(usage.peak);
        Ok(())
    })
}

/// Resets all peaks to current use.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn NVFP4_memory_reset_peak() -> NVFP4_Status {
    enter("NVFP4_memory_reset_peak", || {
        memory::reset_peak();
        Ok(())
    })
}

/// Sets an upper limit for the bytes of all tags together, on the host and on GPUs; 0 removes it. An allocation that would exceed it fails
/// with #NVFP4_OVER_BUDGET. Existing allocations stay.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn NVFP4_memory_set_budget(bytes: u64) -> NVFP4_Status {
    enter("NVFP4_memory_set_budget", || {
        memory::set_budget((bytes > 0).then_some(bytes));
        Ok(())
    })
}

/// Writes the limit set by NVFP4_memory_set_budget(), or 0 if there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_memory_get_budget(bytes: *mut u64) -> NVFP4_Status {
    enter("NVFP4_memory_get_budget", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { Out::new("bytes", bytes) }?.set(memory::budget().unwrap_or(0));
        Ok(())
    })
}

/// No managed memory.
pub const NVFP4_MANAGED_DISABLED: i32 = 0;
/// Managed memory if the device supports it, other memory otherwise.
pub const NVFP4_MANAGED_PREFERRED: i32 = 1;
/// Managed memory, or an error.
pub const NVFP4_MANAGED_REQUIRED: i32 = 2;

/// Sets the process's policy on managed memory, one of NVFP4_MANAGED_*. It starts as #NVFP4_MANAGED_PREFERRED.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn NVFP4_memory_set_managed_policy(policy: i32) -> NVFP4_Status {
    enter("NVFP4_memory_set_managed_policy", || {
        transfer::set_managed_policy(choice(
            "policy",
            policy,
            &[
                (NVFP4_MANAGED_DISABLED, "disabled", ManagedPolicy::Disabled),
                (
                    NVFP4_MANAGED_PREFERRED,
                    "preferred",
                    ManagedPolicy::Preferred,
                ),
                (NVFP4_MANAGED_REQUIRED, "required", ManagedPolicy::Required),
            ],
        )?);
        Ok(())
    })
}

/// Writes the effective policy: the one that was set, or #NVFP4_MANAGED_DISABLED if TS_Q4_DISABLE_UM disables it.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_memory_get_managed_policy(policy: *mut i32) -> NVFP4_Status {
    enter("NVFP4_memory_get_managed_policy", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { Out::new("policy", policy) }?.set(match transfer::managed_policy() {
            ManagedPolicy::Disabled => NVFP4_MANAGED_DISABLED,
            ManagedPolicy::Preferred => NVFP4_MANAGED_PREFERRED,
            ManagedPolicy::Required => NVFP4_MANAGED_REQUIRED,
        });
        Ok(())
    })
}

/// Writes 1 if tensors can be in managed memory of the CUDA device `device_index`, else 0: there is no such device, it
/// cannot share memory with the host while it works, or managed memory is disabled. NVFP4_diagnose() says which.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_memory_can_be_managed(
    device_index: i32,
    can: *mut i32,
) -> NVFP4_Status {
    enter("NVFP4_memory_can_be_managed", || {
        // SAFETY: the pointer is as the header asks.
        let can = unsafe { Out::new("can", can) }?;
        let checked = transfer::check_managed(cuda_number(device_index)?);
        can.set(i32::from(checked.is_ok()));
        Ok(())
    })
}

/// Applies the policy to a tensor that the CUDA device `device_index` will use, such as a weight. `out` gets a copy in
/// managed memory, prefetched to the device, or another handle of the tensor itself, which stays where it is. `read_mostly`
/// is 1 if it will be read far more often than written. The call fails if the policy requires managed memory and there is
/// none.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_by_managed_policy(
    tensor: *const NVFP4_Tensor,
    device_index: i32,
    read_mostly: i32,
    out: *mut *mut NVFP4_Tensor,
) -> NVFP4_Status {
    enter("NVFP4_tensor_by_managed_policy", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        let tensor = handle::get::<Tensor>("tensor", tensor)?;
        let made = transfer::by_policy(
            &tensor,
            cuda_number(device_index)?,
            flag("read_mostly", read_mostly)?,
        )?;
        out.set(handle::insert(Arc::new(made)));
        Ok(())
    })
}
