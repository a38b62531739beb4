//! Memory: what is in use and for what, and a limit.
//!
//! All of it is the library's own account of its large allocations, for the whole process, in host memory and on GPUs. One
//! budget covers them all together. What a GPU's driver, libraries and compiled kernels take is not in it, nor memory of
//! GPUs that is free and kept for reuse, which NVFP4_empty_cache() gives back.

use super::arguments::{Out, choice};
use super::guard::enter;
use super::status::NVFP4_Status;
use crate::base::memory::{self, Tag};

/// All tags together. Its peak is that of the sum.
pub const NVFP4_MEMORY_TOTAL: i32 = 0;
/// Weights in the form the kernels read.
pub const NVFP4_MEMORY_WEIGHTS: i32 = 1;
/// Cached keys and values of sessions.
pub const NVFP4_MEMORY_KV_CACHE: i32 = 2;
/// Activations and workspaces.
pub const NVFP4_MEMORY_SCRATCH: i32 = 3;
/// Tensors made through the tensor chapter or as results.
pub const NVFP4_MEMORY_TENSOR: i32 = 4;
/// Weights on GPUs. All NVFP4_MEMORY_DEVICE_* are of GPUs, and the others of the host.
pub const NVFP4_MEMORY_DEVICE_WEIGHTS: i32 = 5;
/// Cached keys and values of sessions on GPUs.
pub const NVFP4_MEMORY_DEVICE_KV_CACHE: i32 = 6;
/// Activations and workspaces on GPUs.
pub const NVFP4_MEMORY_DEVICE_SCRATCH: i32 = 7;
/// Tensors on GPUs.
pub const NVFP4_MEMORY_DEVICE_TENSOR: i32 = 8;

const _: () = assert!(Tag::ALL.len() == NVFP4_MEMORY_DEVICE_TENSOR as usize);

/// Writes the bytes in use under `tag`, one of NVFP4_MEMORY_*, now and at most since the start or the last
/// NVFP4_memory_reset_peak().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_memory_stats(
    tag: i32,
    current: *mut u64,
    peak: *mut u64,
) -> NVFP4_Status {
    enter("NVFP4_memory_stats", || {
        let tag = choice(
            "tag",
            tag,
            &[
                (NVFP4_MEMORY_TOTAL, "total", None),
                (NVFP4_MEMORY_WEIGHTS, "weights", Some(Tag::Weights)),
                (NVFP4_MEMORY_KV_CACHE, "kv_cache", Some(Tag::KvCache)),
                (NVFP4_MEMORY_SCRATCH, "scratch", Some(Tag::Scratch)),
                (NVFP4_MEMORY_TENSOR, "tensor", Some(Tag::Tensor)),
                (
                    NVFP4_MEMORY_DEVICE_WEIGHTS,
                    "device_weights",
                    Some(Tag::DeviceWeights),
                ),
                (
                    NVFP4_MEMORY_DEVICE_KV_CACHE,
                    "device_kv_cache",
                    Some(Tag::DeviceKvCache),
                ),
                (
                    NVFP4_MEMORY_DEVICE_SCRATCH,
                    "device_scratch",
                    Some(Tag::DeviceScratch),
                ),
                (
                    NVFP4_MEMORY_DEVICE_TENSOR,
                    "device_tensor",
                    Some(Tag::DeviceTensor),
                ),
            ],
        )?;
        // SAFETY: the pointers are as the header asks.
        let (current, peak) = unsafe { (Out::new("current", current)?, Out::new("peak", peak)?) };
        let usage = tag.map_or_else(memory::total, memory::usage);
        current.set(usage.current);
        peak.set(usage.peak);
        Ok(())
    })
}

/// Starts the peaks again from what is in use now.
#[unsafe(no_mangle)]
pub extern "C" fn NVFP4_memory_reset_peak() -> NVFP4_Status {
    enter("NVFP4_memory_reset_peak", || {
        memory::reset_peak();
        Ok(())
    })
}

/// Sets the most bytes all tags together may use, of the host and of GPUs; 0 removes the limit. An allocation that would pass
/// it fails with #NVFP4_OVER_BUDGET. What is allocated already stays.
#[unsafe(no_mangle)]
pub extern "C" fn NVFP4_memory_set_budget(bytes: u64) -> NVFP4_Status {
    enter("NVFP4_memory_set_budget", || {
        memory::set_budget((bytes > 0).then_some(bytes));
        Ok(())
    })
}

/// Writes the limit set by NVFP4_memory_set_budget(), or 0 if there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_memory_get_budget(bytes: *mut u64) -> NVFP4_Status {
    enter("NVFP4_memory_get_budget", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { Out::new("bytes", bytes) }?.set(memory::budget().unwrap_or(0));
        Ok(())
    })
}
