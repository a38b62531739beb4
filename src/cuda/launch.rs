//! One launch of one kernel.

use std::ffi::c_void;

use cudarc::driver::{result, sys};

use super::gpu::{Gpu, check};
use super::nvrtc::Unit;
use crate::base::Result;

/// Shared memory that a block gets without asking.
const DEFAULT_SHARED: u32 = 48 << 10;

/// How a kernel is launched.
pub(super) struct Launch {
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub(super) shared: u32,
}

impl Launch {
    pub(super) fn new(grid: [u32; 3], threads: u32) -> Launch {
        Launch {
            grid,
            block: [threads, 1, 1],
            shared: 0,
        }
    }

    /// Enqueues the kernel. It may start before the one before it has ended, and waits for it where it must.
    ///
    /// # Safety
    /// `arguments` is the kernel's one parameter, laid out as it has it, and what it points to is valid device memory until
    /// the kernel has run.
    pub(super) unsafe fn run<T>(
        &self,
        gpu: &Gpu,
        unit: Unit,
        name: &str,
        arguments: &T,
    ) -> Result<()> {
        if self.grid.contains(&0) {
            return Ok(());
        }
        debug_assert_eq!(super::argument_bytes(name), Some(size_of::<T>()), "{name}");
        // SAFETY: the caller's word.
        unsafe { self.enqueue(gpu, gpu.function(unit, name)?, name, true, arguments) }
    }

    /// Enqueues a function that was loaded by this GPU; with `overlap`, it may start early where the architecture allows it.
    ///
    /// # Safety
    /// As for [`Launch::run`].
    pub(super) unsafe fn enqueue<T>(
        &self,
        gpu: &Gpu,
        function: sys::CUfunction,
        name: &str,
        overlap: bool,
        arguments: &T,
    ) -> Result<()> {
        gpu.bind()?;
        if self.shared > DEFAULT_SHARED {
            check(
                // SAFETY: the function was loaded by this GPU.
                unsafe {
                    result::function::set_function_attribute(
                        function,
                        sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                        self.shared as i32,
                    )
                },
                name,
            )?;
        }
        // SAFETY: a plain C struct that may be zero.
        let mut early: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        early.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        early.value.programmaticStreamSerializationAllowed = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: self.grid[0],
            gridDimY: self.grid[1],
            gridDimZ: self.grid[2],
            blockDimX: self.block[0],
            blockDimY: self.block[1],
            blockDimZ: self.block[2],
            sharedMemBytes: self.shared,
            hStream: gpu.stream(),
            attrs: &raw mut early,
            numAttrs: u32::from(overlap && gpu.arch().0 >= 9),
        };
        let mut parameters = [std::ptr::from_ref(arguments).cast::<c_void>().cast_mut()];
        // SAFETY: the parameters are the caller's word; the driver copies them before it returns.
        check(
            unsafe {
                sys::cuLaunchKernelEx(
                    &config,
                    function,
                    parameters.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            }
            .result(),
            name,
        )
    }
}
