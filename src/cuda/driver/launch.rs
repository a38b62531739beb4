//! Launches one kernel: its grid, its cluster size and its shared memory.

use std::ffi::c_void;

use cudarc::driver::{result, sys};

use super::error::check;
use super::gpu::Gpu;
use super::module::KernelUnit;
use crate::base::Result;
use crate::base::error::err;

/// Shared memory that a CTA gets without asking.
const DEFAULT_SHARED: u32 = 48 << 10;

/// The shape of a kernel launch.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct Launch {
    pub(in crate::cuda) grid: [u32; 3],
    pub(in crate::cuda) block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub(in crate::cuda) shared: u32,
    /// CTAs along the last dimension of the grid that form a cluster. More than one only on Hopper and later.
    pub(in crate::cuda) cluster: u32,
}

impl Launch {
    pub(in crate::cuda) fn new(grid: [u32; 3], threads: u32) -> Launch {
        Launch {
            grid,
            block: [threads, 1, 1],
            shared: 0,
            cluster: 1,
        }
    }

    /// Enqueues the kernel. With programmatic dependent launch it may start before its predecessor has ended; the kernel itself waits where
    /// it must.
    ///
    /// # Safety
    /// `arguments` must be the kernel's one parameter, in the kernel's layout, and must point to device memory that stays valid until the
    /// kernel has run.
    pub(in crate::cuda) unsafe fn run<T>(
        &self,
        gpu: &Gpu,
        unit: impl KernelUnit,
        name: &str,
        arguments: &T,
    ) -> Result<()> {
        if self.grid.contains(&0) {
            return Ok(());
        }
        debug_assert_eq!(unit.argument_bytes(name), Some(size_of::<T>()), "{name}");
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(gpu, gpu.function(unit, name)?, name, true, arguments) }
    }

    /// Enqueues a function that this GPU has loaded. With `overlap`, programmatic dependent launch is used where the architecture has it.
    ///
    /// # Safety
    /// As for [`Launch::run`].
    pub(in crate::cuda) unsafe fn enqueue<T>(
        &self,
        gpu: &Gpu,
        function: sys::CUfunction,
        name: &str,
        overlap: bool,
        arguments: &T,
    ) -> Result<()> {
        gpu.bind()?;
        self.reserve(function, name)?;
        let mut attributes = Attributes::new(self.cluster, overlap && gpu.arch().0 >= 9);
        let config = self.config(gpu, &mut attributes);
        let mut parameters = [std::ptr::from_ref(arguments).cast::<c_void>().cast_mut()];
        // SAFETY: the caller vouches for the parameters; the driver copies them before it returns.
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

    /// Clusters of this launch that the device runs at the same time. Cached, so a kernel must always be asked with the same block size.
    pub(in crate::cuda) fn clusters_at_once(
        &self,
        gpu: &Gpu,
        unit: impl KernelUnit,
        name: &str,
    ) -> Result<usize> {
        let key = (name.to_string(), self.cluster);
        let known = gpu.clusters_at_once().get(&key).copied();
        if let Some(clusters) = known {
            return Ok(clusters);
        }
        gpu.bind()?;
        // The kernel may have to be compiled, for which no other thread waits.
        let function = gpu.function(unit, name)?;
        self.reserve(function, name)?;
        let mut attributes = Attributes::new(self.cluster, false);
        let config = self.config(gpu, &mut attributes);
        let mut clusters = 0;
        // SAFETY: the function was loaded by this GPU, and the attributes outlive the call.
        let answer = unsafe { sys::cuOccupancyMaxActiveClusters(&mut clusters, function, &config) };
        check(answer.result(), name)?;
        gpu.clusters_at_once().insert(key, clusters as usize);
        Ok(clusters as usize)
    }

    /// Raises a function's limit of shared memory to that of this launch.
    fn reserve(&self, function: sys::CUfunction, name: &str) -> Result<()> {
        if self.shared <= DEFAULT_SHARED {
            return Ok(());
        }
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
        )
    }

    fn config(&self, gpu: &Gpu, attributes: &mut Attributes) -> sys::CUlaunchConfig {
        sys::CUlaunchConfig {
            gridDimX: self.grid[0],
            gridDimY: self.grid[1],
            gridDimZ: self.grid[2],
            blockDimX: self.block[0],
            blockDimY: self.block[1],
            blockDimZ: self.block[2],
            sharedMemBytes: self.shared,
            hStream: gpu.stream(),
            attrs: attributes.all.as_mut_ptr(),
            numAttrs: attributes.count,
        }
    }
}

/// Launch attributes beyond the sizes.
struct Attributes {
    all: [sys::CUlaunchAttribute; 2],
    count: u32,
}

impl Attributes {
    fn new(cluster: u32, early: bool) -> Attributes {
        let mut attributes = Attributes {
            // SAFETY: plain C structs that may be zero.
            all: unsafe { std::mem::zeroed() },
            count: 0,
        };
        if early {
            let attribute = attributes.next();
            attribute.id =
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attribute.value.programmaticStreamSerializationAllowed = 1;
        }
        if cluster > 1 {
            let attribute = attributes.next();
            attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attribute.value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
                x: 1,
                y: 1,
                z: cluster,
            };
        }
        attributes
    }

    fn next(&mut self) -> &mut sys::CUlaunchAttribute {
        self.count += 1;
        &mut self.all[self.count as usize - 1]
    }
}

/// Converts a size to a kernel's 32-bit integer; refuses larger ones.
pub(in crate::cuda) fn int(what: &str, value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| {
        err!(
            Unsupported,
            "{what} is {value}; a GPU kernel takes less than 2^31"
        )
    })
}
