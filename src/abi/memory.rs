//! Memory: what is in use and for what, and a limit.
//!
//! All of it is the library's own account of its large allocations, for the whole process.

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

/// Sets the most bytes all tags together may use; 0 removes the limit. An allocation that would pass it fails with
/// #NVFP4_OVER_BUDGET. What is allocated already stays.
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
