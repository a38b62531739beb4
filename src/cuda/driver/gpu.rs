//! An open GPU: its primary context, which it shares with other CUDA users in the process, one stream, a memory pool, and its properties
//! that kernels depend on.

use std::ffi::c_int;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{result, sys};

use super::attached::{Attached, Attachments};
use super::context::make_current;
use super::error::check;
use super::loading::{attribute, check_process, count, driver, usable, usable_ordinal};
use super::module::{KernelUnit, Module, Modules};
use super::nvrtc::target;
use super::order::Order;
use super::recording;
use crate::base::once::SharedOnce;
use crate::base::threads::Pool;
use crate::base::{Result, fork};

/// The devices that are or were open, by number. The lock is held to look one up, not while it is opened.
static OPEN: Mutex<Vec<(usize, Arc<SharedOnce<Gpu>>)>> = Mutex::new(Vec::new());

fn opened() -> MutexGuard<'static, Vec<(usize, Arc<SharedOnce<Gpu>>)>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The devices that are open, which means in use.
pub fn open_gpus() -> Vec<Arc<Gpu>> {
    opened().iter().filter_map(|(_, gpu)| gpu.get()).collect()
}

/// An open CUDA device, shared by all its users. All their work goes to one stream in order.
pub struct Gpu {
    ordinal: usize,
    name: String,
    arch: (i32, i32),
    multiprocessors: usize,
    shared_limit: usize,
    managed: bool,
    integrated: bool,
    is_shared: bool,
    driver_version: i32,
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// The process that opened it.
    generation: u32,
    stream: sys::CUstream,
    order: Order,
    pool: sys::CUmemoryPool,
    modules: Modules,
    attached: Attachments,
}

// SAFETY: the driver's handles may be used from any thread whose current context is theirs, which `bind` sees to.
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver serialises calls on one stream, and the rest is behind locks.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Opens the device numbered `ordinal`, or returns the one that is already open.
    pub fn open(ordinal: usize) -> Result<Arc<Gpu>> {
        let find = |open: &[(usize, Arc<SharedOnce<Gpu>>)]| {
            let known = open.iter().find(|(o, _)| *o == ordinal);
            known.map(|(_, gpu)| gpu.clone())
        };
        let known = find(&opened());
        let gpu = match known {
            Some(gpu) => gpu,
            None => {
                // Only existing devices get a place in the list.
                usable_ordinal(ordinal, count()?)?;
                let mut open = opened();
                find(&open).unwrap_or_else(|| {
                    let gpu = Arc::new(SharedOnce::new());
                    open.push((ordinal, gpu.clone()));
                    gpu
                })
            }
        };
        gpu.get_or_try(|| Gpu::new(ordinal))
    }

    fn new(ordinal: usize) -> Result<Gpu> {
        let (device, name, arch) = usable(ordinal)?;
        let attribute = |which| attribute(device, which);
        use sys::CUdevice_attribute::*;
        let multiprocessors = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        let shared_limit =
            attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize;
        let managed = attribute(CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS)? != 0;
        let integrated = attribute(CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0;
        // Older drivers do not know this one.
        let is_shared = attribute(CU_DEVICE_ATTRIBUTE_MPS_ENABLED).is_ok_and(|mps| mps != 0);
        let driver_version = driver()?;
        // SAFETY: retained once here and released once in `drop`.
        let context = check(
            unsafe { result::primary_ctx::retain(device) },
            "retaining the device's context",
        )?;
        let ready = Gpu::streams_and_pool(ordinal, context);
        let (stream, order, pool) = match ready {
            Ok(ready) => ready,
            Err(e) => {
                // SAFETY: gives back what was retained above; nothing was made in it that is still used.
                let _ = unsafe { result::primary_ctx::release(device) };
                return Err(e);
            }
        };
        Ok(Gpu {
            ordinal,
            name,
            arch,
            multiprocessors,
            shared_limit,
            managed,
            integrated,
            is_shared,
            driver_version,
            device,
            context,
            generation: fork::generation(),
            stream,
            order,
            pool,
            modules: Modules::default(),
            attached: Attachments::default(),
        })
    }

    fn streams_and_pool(
        ordinal: usize,
        context: sys::CUcontext,
    ) -> Result<(sys::CUstream, Order, sys::CUmemoryPool)> {
        make_current(context)?;
        let stream = check(
            result::stream::create(result::stream::StreamKind::NonBlocking),
            "creating a stream",
        )?;
        let order = Order::new()?;
        // SAFETY: a plain C struct of integers and pointers, all of which may be zero.
        let mut properties: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
        properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        properties.location.id = ordinal as c_int;
        // SAFETY: the properties are complete.
        let pool = check(
            unsafe { result::mem_pool::create(&properties) },
            "creating a memory pool",
        )?;
        let mut keep = u64::MAX;
        check(
            // SAFETY: the attribute is a u64, and the pool was just made.
            unsafe {
                result::mem_pool::set_attribute(
                    pool,
                    sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                    (&raw mut keep).cast(),
                )
            },
            "setting up the memory pool",
        )?;
        Ok((stream, order, pool))
    }

    pub(in crate::cuda) fn device(&self) -> sys::CUdevice {
        self.device
    }

    /// The device's number.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// The device's name, from the driver.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Compute capability.
    pub fn arch(&self) -> (i32, i32) {
        self.arch
    }

    /// The driver's CUDA version: 13000 is CUDA 13.0.
    pub fn driver_version(&self) -> i32 {
        self.driver_version
    }

    /// Number of multiprocessors.
    pub fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    /// Shared memory that a CTA may ask for.
    pub fn shared_limit(&self) -> usize {
        self.shared_limit
    }

    /// Whether host and device may use managed memory at the same time.
    pub fn concurrent_managed_access(&self) -> bool {
        self.managed
    }

    /// Whether the device shares the host's memory.
    pub fn is_integrated(&self) -> bool {
        self.integrated
    }

    /// Whether kernels of other processes may run at the same time: whether they share the device through CUDA's multi-process service.
    pub fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// The stream that this thread enqueues to: the one that it records, else its [`Lane`](super::Lane), else the device's stream.
    pub(in crate::cuda) fn stream(&self) -> sys::CUstream {
        recording::recorded().unwrap_or_else(|| self.waited_for())
    }

    /// The device's stream.
    pub(super) fn own_stream(&self) -> sys::CUstream {
        self.stream
    }

    /// As [`Gpu::wait`], in a lane also for the device's stream.
    pub(super) fn wait_for_all(&self) -> Result<()> {
        self.wait()?;
        check(
            // SAFETY: the stream lives as long as `self`.
            unsafe { result::stream::synchronize(self.stream) },
            "waiting for the device",
        )
    }

    /// The stream that this thread waits for.
    fn waited_for(&self) -> sys::CUstream {
        recording::entered(self.ordinal).map_or(self.stream, |(stream, _)| stream)
    }

    /// The number of multiprocessors of the lane that this thread enqueues to, if it does.
    pub(in crate::cuda) fn lane(&self) -> Option<usize> {
        recording::entered(self.ordinal).map(|(_, multiprocessors)| multiprocessors)
    }

    pub(in crate::cuda) fn pool(&self) -> sys::CUmemoryPool {
        self.pool
    }

    /// Makes the device's context current on this thread.
    pub(in crate::cuda) fn bind(&self) -> Result<()> {
        check_process(self.generation)?;
        make_current(self.context)
    }

    /// Waits until everything enqueued has run. Returns faults of earlier work; [`Gpu::check_calls`] reports invalid input that earlier
    /// work has found. In a lane, only waits until everything enqueued there has run.
    pub fn synchronize(&self) -> Result<()> {
        if self.lane().is_some() {
            return self.wait();
        }
        let attached = self.attached.made();
        let before: Vec<u64> = attached.iter().map(|a| a.enqueued()).collect();
        self.wait()?;
        for (attached, before) in attached.iter().zip(before) {
            attached.has_run(before);
        }
        Ok(())
    }

    /// Only waits until everything enqueued has run.
    pub(in crate::cuda) fn wait(&self) -> Result<()> {
        self.bind()?;
        check(
            // SAFETY: the stream lives as long as `self`, and a lane as long as this thread is in it.
            unsafe { result::stream::synchronize(self.waited_for()) },
            "waiting for the device",
        )
    }

    /// The attached value of this type, made on first use.
    pub(in crate::cuda) fn attached_or<T: Attached>(
        &self,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<Arc<T>> {
        self.attached.get_or_try(make)
    }

    /// The attached value of this type, if there is one.
    pub(in crate::cuda) fn attached<T: Attached>(&self) -> Option<Arc<T>> {
        self.attached.get()
    }

    /// Orders all work that is enqueued here from now on after all work on the process's legacy default stream, or on the stream of
    /// [`HostStream`]. For memory that comes from the host program.
    ///
    /// [`HostStream`]: super::HostStream
    pub fn after_host_stream(&self) -> Result<()> {
        self.bind()?;
        self.order.after_host(self.ordinal, self.stream)
    }

    /// Orders all work that the process enqueues on that stream from now on after all work enqueued here. For memory that goes to the host
    /// program.
    pub fn before_host_stream(&self) -> Result<()> {
        self.bind()?;
        self.order.before_host(self.ordinal, self.stream)
    }

    /// Free and total bytes of the device.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.bind()?;
        check(
            result::mem_get_info(),
            "asking for the device's free memory",
        )
    }

    /// Gives cached memory back to the driver.
    pub fn empty_cache(&self) -> Result<()> {
        self.trim();
        self.synchronize()?;
        check(
            // SAFETY: the pool lives as long as `self`.
            unsafe { result::mem_pool::trim_to(self.pool, 0) },
            "emptying the memory pool",
        )
    }

    fn trim(&self) {
        for attached in self.attached.made() {
            attached.trim();
        }
    }

    /// Device bytes that the library has allocated, and device bytes that it keeps for its next allocations.
    pub(in crate::cuda) fn held(&self) -> Result<(u64, u64)> {
        use sys::CUmemPool_attribute::*;
        let attribute = |which| {
            let mut bytes = 0u64;
            check(
                // SAFETY: both attributes are a u64, and the pool lives as long as `self`.
                unsafe {
                    result::mem_pool::get_attribute(self.pool, which, (&raw mut bytes).cast())
                },
                "asking about the memory pool",
            )?;
            Ok(bytes)
        };
        let used = attribute(CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
        let reserved = attribute(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
        let (mut held, mut kept) = (used, reserved.saturating_sub(used));
        for attached in self.attached.made() {
            let (used, unused) = attached.held();
            held += used as u64;
            kept += unused as u64;
        }
        Ok((held, kept))
    }

    /// A kernel, compiled for this device on first use.
    pub(in crate::cuda) fn function(
        &self,
        unit: impl KernelUnit,
        name: &str,
    ) -> Result<sys::CUfunction> {
        self.module(unit)?.function(name)
    }

    /// A unit's kernels, compiled for this device on first use. Does not wait for units that other threads compile meanwhile.
    fn module(&self, unit: impl KernelUnit) -> Result<Arc<Module>> {
        self.modules.get_or_try(unit, || {
            self.bind()?;
            Module::load(unit, self.arch)
        })
    }

    /// Compiles and loads the units that are not ready, in parallel on all threads. Skips units without kernels for this device. Other
    /// threads may use the device meanwhile. Once `give_up` returns true, on any thread, no further unit is begun; a running compilation
    /// cannot be stopped.
    pub(in crate::cuda) fn load_units<U: KernelUnit>(
        &self,
        units: &[U],
        give_up: &(dyn Fn() -> bool + Sync),
    ) -> Result<()> {
        let target = target(self.arch);
        let is_wanted = |unit: &U| unit.is_for(&target) && !self.modules.is_loaded(*unit);
        let wanted: Vec<U> = units.iter().copied().filter(is_wanted).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let failed = Mutex::new(None);
        let pool = Pool::new(Pool::default_threads()?.min(wanted.len()))?;
        pool.run(wanted.len(), |i| {
            if give_up() {
                return;
            }
            if let Err(e) = self.module(wanted[i]) {
                let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                failed.get_or_insert(e);
            }
        });
        let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
        failed.map_or(Ok(()), Err)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.trim();
        if self.bind().is_err() {
            return;
        }
        self.modules.unload();
        for attached in self.attached.made() {
            attached.free(self.stream());
        }
        // SAFETY: nothing made in the context outlives `self`, which every buffer and graph keeps alive. Failures have no
        // one to hear of them, and the driver frees the rest with the process.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            // Attached state goes first: no kernel writes to it any more.
            self.attached.detach();
            self.order.destroy();
            let _ = result::mem_pool::destroy(self.pool);
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuda:{} ({})", self.ordinal, self.name)
    }
}
