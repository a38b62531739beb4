//! Launches one kernel: its grid, its cluster size and its shared memory.

use std::ffi::c_void;
use std::fmt;

use cudarc::driver::{result, sys};

use super::error::check;
use super::gpu::Gpu;
use super::module::Kernel;
use crate::base::Result;
use crate::base::error::err;

/// Shared memory that a CTA gets without asking.
const DEFAULT_SHARED: u32 = 48 << 10;

/// The shape of a kernel launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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

    /// This launch of a kernel.
    pub(in crate::cuda) fn of<K>(self, kernel: K) -> Planned<K> {
        let launch = self;
        Planned { kernel, launch }
    }

    /// Enqueues a function that this GPU has loaded. With `overlap`, programmatic dependent launch is used where the architecture has it.
    ///
    /// # Safety
    /// As for [`Planned::run`], and `arguments` must be the function's one parameter.
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

/// A kernel, and the shape in which it is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::cuda) struct Planned<K> {
    pub(in crate::cuda) kernel: K,
    pub(in crate::cuda) launch: Launch,
}

impl<K: Kernel> Planned<K> {
    /// Enqueues the kernel. With programmatic dependent launch it may start before its predecessor has ended; the kernel itself waits where
    /// it must.
    ///
    /// # Safety
    /// `arguments` must point to device memory that stays valid until the kernel has run.
    pub(in crate::cuda) unsafe fn run(&self, gpu: &Gpu, arguments: &K::Arguments) -> Result<()> {
        let Planned { kernel, launch } = *self;
        if launch.grid.contains(&0) {
            return Ok(());
        }
        let (name, function) = (kernel.name(), gpu.function(kernel.unit(), kernel.name())?);
        // SAFETY: the type is that of the kernel's parameter; the rest is the caller's promise.
        unsafe { launch.enqueue(gpu, function, name, true, arguments) }
    }

    /// Clusters of this launch that the device runs at the same time.
    pub(in crate::cuda) fn clusters_at_once(&self, gpu: &Gpu) -> Result<usize> {
        let Planned { kernel, launch } = self;
        gpu.bind()?;
        let (name, function) = (kernel.name(), gpu.function(kernel.unit(), kernel.name())?);
        launch.reserve(function, name)?;
        let mut attributes = Attributes::new(launch.cluster, false);
        let config = launch.config(gpu, &mut attributes);
        let mut clusters = 0;
        // SAFETY: the function was loaded by this GPU, and the attributes outlive the call.
        let answer = unsafe { sys::cuOccupancyMaxActiveClusters(&mut clusters, function, &config) };
        check(answer.result(), name)?;
        Ok(clusters as usize)
    }
}

impl<K: Kernel> fmt::Display for Planned<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Launch {
            grid: [x, y, z],
            cluster,
            shared,
            ..
        } = self.launch;
        write!(f, "{} {x}x{y}x{z}", self.kernel.name())?;
        if cluster > 1 {
            write!(f, ", clusters of {cluster}")?;
        }
        match shared {
            0 => Ok(()),
            bytes => write!(f, ", {} KB", bytes.div_ceil(1024)),
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
