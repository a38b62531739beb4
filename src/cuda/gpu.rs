//! A GPU: its primary context, which the process's other users of CUDA share, one stream, a memory pool, and what kernels
//! need to know about it.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::{result, sys};

use super::blas::Blas;
use super::checks::Checks;
use super::compile::{Module, have_kernels};
use super::graph;
use super::memory::Pinned;
use super::nvrtc::{Unit, target};
use crate::base::error::{Error, bail, err};
use crate::base::fork;
use crate::base::once::{SharedOnce, TryOnce};
use crate::base::threads::Pool;
use crate::base::{ErrorKind, Result};

/// The oldest driver interface that has what the launcher uses.
const OLDEST_DRIVER: i32 = 12_000;
/// The oldest one that takes advice for managed memory by location.
const OLDEST_FOR_MANAGED: i32 = 12_020;
/// The oldest architecture with bf16 matrix instructions.
const OLDEST_ARCH: (i32, i32) = (8, 0);

/// Turns a driver's answer into an error that says what was being done.
pub(super) fn check<T>(
    result: std::result::Result<T, result::DriverError>,
    doing: &str,
) -> Result<T> {
    result.map_err(|e| driver_error(e, doing))
}

fn driver_error(error: result::DriverError, doing: &str) -> Error {
    let text = |get: std::result::Result<&std::ffi::CStr, result::DriverError>| {
        get.map_or_else(
            |_| format!("{:?}", error.0),
            |s| s.to_string_lossy().into_owned(),
        )
    };
    let (name, text) = (text(error.error_name()), text(error.error_string()));
    let (kind, advice) = verdict(error.0);
    Error::new(kind, format_args!("{doing}: {name}: {text}{advice}"))
}

/// What kind of error a driver's answer is, and what is to be done about it.
fn verdict(answer: sys::CUresult) -> (ErrorKind, &'static str) {
    use sys::CUresult::*;
    match answer {
        CUDA_ERROR_OUT_OF_MEMORY => (ErrorKind::OutOfMemory, ""),
        // The driver gives these to every call from then on, whichever work it was that failed.
        CUDA_ERROR_ILLEGAL_ADDRESS
        | CUDA_ERROR_LAUNCH_FAILED
        | CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUDA_ERROR_MISALIGNED_ADDRESS
        | CUDA_ERROR_INVALID_ADDRESS_SPACE
        | CUDA_ERROR_INVALID_PC
        | CUDA_ERROR_ASSERT
        | CUDA_ERROR_LAUNCH_TIMEOUT
        | CUDA_ERROR_TENSOR_MEMORY_LEAK
        | CUDA_ERROR_ECC_UNCORRECTABLE
        | CUDA_ERROR_NVLINK_UNCORRECTABLE
        | CUDA_ERROR_CONTAINED
        | CUDA_ERROR_EXTERNAL_DEVICE
        | CUDA_ERROR_CONTEXT_IS_DESTROYED => (
            ErrorKind::DeviceUnavailable,
            "; with that, here or earlier, this process lost its context on the GPU, and what it kept there: restart the process",
        ),
        CUDA_ERROR_NO_DEVICE => (
            ErrorKind::DeviceUnavailable,
            "; see whether nvidia-smi lists a GPU, and whether CUDA_VISIBLE_DEVICES hides it",
        ),
        CUDA_ERROR_SYSTEM_DRIVER_MISMATCH | CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => (
            ErrorKind::DeviceUnavailable,
            "; libcuda.so.1 does not belong to the driver in the kernel: restart the machine after an update, and leave CUDA's compat folder out of LD_LIBRARY_PATH",
        ),
        CUDA_ERROR_STUB_LIBRARY => (
            ErrorKind::DeviceUnavailable,
            "; this is the toolkit's stub of libcuda.so.1: leave its folder out of LD_LIBRARY_PATH",
        ),
        CUDA_ERROR_SYSTEM_NOT_READY => (
            ErrorKind::DeviceUnavailable,
            "; a service of the driver, such as the fabric manager, has not started",
        ),
        CUDA_ERROR_DEVICE_UNAVAILABLE => (
            ErrorKind::DeviceUnavailable,
            "; another process holds the GPU for itself",
        ),
        CUDA_ERROR_INVALID_DEVICE | CUDA_ERROR_DEINITIALIZED => (ErrorKind::DeviceUnavailable, ""),
        _ => (ErrorKind::Internal, ""),
    }
}

/// Refuses a driver that is too old; `version` is 13000 for CUDA 13.0.
fn usable_driver(version: i32) -> Result<()> {
    if version < OLDEST_DRIVER {
        bail!(
            DeviceUnavailable,
            "the NVIDIA driver is for CUDA {}.{} and older; CUDA {}.0 is needed: update the driver",
            version / 1000,
            version % 1000 / 10,
            OLDEST_DRIVER / 1000
        );
    }
    Ok(())
}

/// Refuses a device that is too old.
fn usable_arch(ordinal: usize, name: &str, arch: (i32, i32)) -> Result<()> {
    if arch < OLDEST_ARCH {
        bail!(
            DeviceUnavailable,
            "cuda:{ordinal} ({name}) has compute capability {}.{}; {}.{} or later is needed: use another device, or cpu",
            arch.0,
            arch.1,
            OLDEST_ARCH.0,
            OLDEST_ARCH.1
        );
    }
    Ok(())
}

/// Refuses the number of a device that is not there.
fn usable_ordinal(ordinal: usize, devices: usize) -> Result<()> {
    if ordinal < devices {
        return Ok(());
    }
    match devices {
        0 => bail!(
            DeviceUnavailable,
            "there is no device cuda:{ordinal}, as the driver shows none: see whether nvidia-smi lists a GPU, and whether CUDA_VISIBLE_DEVICES hides it"
        ),
        1 => bail!(
            DeviceUnavailable,
            "there is no device cuda:{ordinal}; cuda:0 is the only one"
        ),
        _ => bail!(
            DeviceUnavailable,
            "there is no device cuda:{ordinal}; there are cuda:0 to cuda:{}",
            devices - 1
        ),
    }
}

/// Why no GPU can be used at all, or nothing.
pub fn unavailable() -> Option<String> {
    driver().err().map(|e| e.message().to_owned())
}

/// Devices there are.
pub fn count() -> Result<usize> {
    driver()?;
    let count = check(result::device::get_count(), "counting CUDA devices")?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Loads and starts the driver once; what it speaks, as 13000 for CUDA 13.0.
pub(super) fn driver() -> Result<i32> {
    static STATE: OnceLock<Result<(i32, u32)>> = OnceLock::new();
    let state = STATE
        .get_or_init(|| {
            // SAFETY: looking for a library runs its initialisers, which the driver's allow at any time.
            if !unsafe { sys::is_culib_present() } {
                bail!(
                    DeviceUnavailable,
                    "the CUDA driver (libcuda.so.1) was not found; install the NVIDIA driver, or put its folder in LD_LIBRARY_PATH"
                );
            }
            result::init().map_err(|e| {
                let inner = driver_error(e, "starting the CUDA driver");
                Error::new(ErrorKind::DeviceUnavailable, inner.message())
            })?;
            let mut version: c_int = 0;
            // SAFETY: writes the one integer it is given.
            check(unsafe { sys::cuDriverGetVersion(&mut version) }.result(), "asking the CUDA driver's version")?;
            usable_driver(version)?;
            Ok((version, fork::generation()))
        })
        .clone();
    let (version, generation) = state?;
    check_process(generation)?;
    Ok(version)
}

/// Refuses to use CUDA in the child of a process that had started it in `generation`: the driver does not work there.
fn check_process(generation: u32) -> Result<()> {
    if generation != fork::generation() {
        bail!(
            DeviceUnavailable,
            "this process was forked from one that uses CUDA, whose driver does not work in such a child: fork before the first use of a GPU, or start the child as a new program (in Python, multiprocessing's \"spawn\")"
        );
    }
    Ok(())
}

/// The devices that are open, or were, by number. Locked to look one up, and not while it is opened.
static OPEN: Mutex<Vec<(usize, Arc<SharedOnce<Gpu>>)>> = Mutex::new(Vec::new());

fn opened() -> MutexGuard<'static, Vec<(usize, Arc<SharedOnce<Gpu>>)>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The devices that are open: something uses each.
pub fn open_gpus() -> Vec<Arc<Gpu>> {
    opened().iter().filter_map(|(_, gpu)| gpu.get()).collect()
}

/// What is known of the context that was current when an entry was called on this thread.
#[derive(Clone, Copy)]
enum Outer {
    /// No entry is running, so nobody wants it back.
    Unwatched,
    /// It still is current.
    Untouched,
    /// This one was, or none.
    Was(sys::CUcontext),
}

thread_local! {
    static OUTER: Cell<Outer> = const { Cell::new(Outer::Unwatched) };
}

/// The calling thread's current context, made current again when this goes, if it was changed: a host that uses CUDA itself finds
/// its thread as it left it. A call that uses no GPU asks neither the driver nor the loader for anything.
pub struct KeepContext(Outer);

impl KeepContext {
    /// Watches the current context from now on.
    pub fn new() -> KeepContext {
        KeepContext(OUTER.replace(Outer::Untouched))
    }
}

impl Default for KeepContext {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for KeepContext {
    fn drop(&mut self) {
        if let Outer::Was(context) = OUTER.replace(self.0) {
            // SAFETY: it was this thread's current context when the call began, or none.
            let _ = unsafe { result::ctx::set_current(context) };
        }
    }
}

/// Makes `context`, which is retained, the calling thread's, and notes which one was.
fn make_current(context: sys::CUcontext) -> Result<()> {
    if matches!(OUTER.get(), Outer::Untouched) {
        let outer = check(result::ctx::get_current(), "asking for the current context")?;
        OUTER.set(Outer::Was(outer.unwrap_or(std::ptr::null_mut())));
    }
    check(
        // SAFETY: the caller retained the context.
        unsafe { result::ctx::set_current(context) },
        "entering the device's context",
    )
}

/// Events that order the device's stream with the default stream of the process, or with the stream of [`HostStream`].
///
/// The device's stream is one that the default stream does not wait for and that does not wait for it: a program that uses
/// both for other things loses nothing. Where memory changes hands, an event on one of them that the other waits for is the
/// order that is needed, and no more. Both are recorded anew each time: who waits for a later point than his own waits for
/// his own too.
struct Order {
    default: sys::CUevent,
    own: sys::CUevent,
}

/// The handle of the legacy default stream, where CUDA programs that name no stream work.
const DEFAULT_STREAM: sys::CUstream = std::ptr::without_provenance_mut(1);

thread_local! {
    /// The stream in whose order the calling thread's host program uses a device's memory, and the number of that device.
    static HOST_STREAM: Cell<Option<(usize, sys::CUstream)>> = const { Cell::new(None) };
}

/// While this lives, what this thread does with a device's memory that the host program shares is ordered with a stream of the
/// program's choice, and no longer with its legacy default stream.
#[derive(Debug)]
pub struct HostStream(Option<(usize, sys::CUstream)>);

impl HostStream {
    /// Chooses `stream` of device `ordinal`; NULL is the legacy default stream.
    ///
    /// # Safety
    /// `stream` must be a stream of the device's primary context for as long as this lives.
    pub unsafe fn new(ordinal: usize, stream: *mut c_void) -> HostStream {
        let chosen = (!stream.is_null()).then_some((ordinal, stream.cast()));
        HostStream(HOST_STREAM.replace(chosen))
    }
}

impl Drop for HostStream {
    fn drop(&mut self) {
        HOST_STREAM.set(self.0);
    }
}

/// One CUDA device, opened. Shared by everything that uses it; work of all of it goes to one stream in order.
pub struct Gpu {
    ordinal: usize,
    name: String,
    arch: (i32, i32),
    multiprocessors: usize,
    shared_limit: usize,
    managed: bool,
    driver_version: i32,
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// The process that it is of.
    generation: u32,
    stream: sys::CUstream,
    order: Order,
    pool: sys::CUmemoryPool,
    /// By the units' numbers.
    modules: [TryOnce<Module>; Unit::ALL.len()],
    /// Whether [`Gpu::need_kernels`] has found them.
    has_kernels: OnceLock<()>,
    /// See [`Gpu::clusters_at_once`].
    clusters: Mutex<HashMap<(String, u32), usize>>,
    staging: Mutex<Vec<Pinned>>,
    blas: OnceLock<Result<Blas>>,
    checks: TryOnce<Checks>,
}

// SAFETY: the driver's handles may be used from any thread whose current context is theirs, which `bind` sees to.
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver serialises calls on one stream, and the rest is behind locks.
unsafe impl Sync for Gpu {}

fn attribute(device: sys::CUdevice, which: sys::CUdevice_attribute) -> Result<i32> {
    check(
        // SAFETY: `device` is a device that the driver gave.
        unsafe { result::device::get_attribute(device, which) },
        "asking about the device",
    )
}

/// The device numbered `ordinal`, its name and its compute capability, if there is such a device and it is not too old.
fn usable(ordinal: usize) -> Result<(sys::CUdevice, String, (i32, i32))> {
    usable_ordinal(ordinal, count()?)?;
    let device = check(result::device::get(ordinal as c_int), "opening the device")?;
    use sys::CUdevice_attribute::*;
    let arch = (
        attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    let name = check(result::device::get_name(device), "asking the device's name")?;
    usable_arch(ordinal, &name, arch)?;
    Ok((device, name, arch))
}

/// Refuses managed memory where a device cannot have it. Asks the driver alone, and opens no device.
pub fn check_managed(ordinal: usize) -> Result<()> {
    use sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS;
    let (device, name, _) = usable(ordinal)?;
    if attribute(device, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS)? == 0 {
        bail!(
            Unsupported,
            "cuda:{ordinal} ({name}) cannot use managed memory while the host does"
        );
    }
    let version = driver()?;
    if version < OLDEST_FOR_MANAGED {
        bail!(
            Unsupported,
            "the driver speaks CUDA {}.{}; managed memory needs 12.2: update the NVIDIA driver",
            version / 1000,
            version % 1000 / 10
        );
    }
    Ok(())
}

impl Gpu {
    /// The device numbered `ordinal`. Opened once however often it is asked for.
    pub fn open(ordinal: usize) -> Result<Arc<Gpu>> {
        let find = |open: &[(usize, Arc<SharedOnce<Gpu>>)]| {
            let known = open.iter().find(|(o, _)| *o == ordinal);
            known.map(|(_, gpu)| gpu.clone())
        };
        let known = find(&opened());
        let gpu = match known {
            Some(gpu) => gpu,
            None => {
                // Only devices that are there get a place in the list.
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
            driver_version,
            device,
            context,
            generation: fork::generation(),
            stream,
            order,
            pool,
            modules: [const { TryOnce::new() }; Unit::ALL.len()],
            has_kernels: OnceLock::new(),
            clusters: Mutex::default(),
            staging: Mutex::default(),
            blas: OnceLock::new(),
            checks: TryOnce::new(),
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
        let event = || {
            check(
                result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING),
                "creating an event",
            )
        };
        let order = Order {
            default: event()?,
            own: event()?,
        };
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

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Its name, as the driver has it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Compute capability.
    pub fn arch(&self) -> (i32, i32) {
        self.arch
    }

    /// What the driver speaks: 13000 is CUDA 13.0.
    pub fn driver_version(&self) -> i32 {
        self.driver_version
    }

    /// Multiprocessors.
    pub fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    /// Shared memory that a block may ask for.
    pub fn shared_limit(&self) -> usize {
        self.shared_limit
    }

    /// Whether managed memory may be used by host and device at once.
    pub fn concurrent_managed_access(&self) -> bool {
        self.managed
    }

    /// Where this thread's work goes: the device's stream, or the one that is being recorded.
    pub(super) fn stream(&self) -> sys::CUstream {
        graph::recorded().unwrap_or(self.stream)
    }

    pub(super) fn pool(&self) -> sys::CUmemoryPool {
        self.pool
    }

    /// Makes the device's context this thread's.
    pub(super) fn bind(&self) -> Result<()> {
        check_process(self.generation)?;
        make_current(self.context)
    }

    /// Waits until everything enqueued has run. A fault of earlier work comes out here; what it has found wrong in its input is
    /// for [`Gpu::check_calls`].
    pub fn synchronize(&self) -> Result<()> {
        let checks = self.checks.get();
        let checks = checks.map(|checks| (checks, checks.enqueued_before()));
        self.wait()?;
        if let Some((checks, before)) = checks {
            checks.retire(before);
        }
        Ok(())
    }

    /// The wait alone.
    pub(super) fn wait(&self) -> Result<()> {
        self.bind()?;
        check(
            // SAFETY: the stream lives as long as `self`.
            unsafe { result::stream::synchronize(self.stream) },
            "waiting for the device",
        )
    }

    /// The calls whose input the device checks.
    pub(super) fn checks(&self) -> &TryOnce<Checks> {
        &self.checks
    }

    /// The stream that [`HostStream`] chose, or the legacy default stream.
    fn host_stream(&self) -> sys::CUstream {
        // A thread that is ending has none.
        match HOST_STREAM.try_with(Cell::get) {
            Ok(Some((ordinal, stream))) if ordinal == self.ordinal => stream,
            _ => DEFAULT_STREAM,
        }
    }

    /// Lets what is enqueued here from now on wait for all that the process has enqueued on its legacy default stream, or on
    /// the one of [`HostStream`]: for memory that comes from the host program.
    pub fn after_host_stream(&self) -> Result<()> {
        self.let_wait(self.stream, self.host_stream(), self.order.default)
    }

    /// Lets what the process enqueues on that stream from now on wait for all that was enqueued here: for memory that goes to
    /// the host program.
    pub fn before_host_stream(&self) -> Result<()> {
        self.let_wait(self.host_stream(), self.stream, self.order.own)
    }

    fn let_wait(
        &self,
        later: sys::CUstream,
        earlier: sys::CUstream,
        event: sys::CUevent,
    ) -> Result<()> {
        self.bind()?;
        // Mostly nothing is left to wait for, and the events would only be a pause between the streams.
        // SAFETY: the device's stream lives as long as `self`, the default stream as long as the context, another stream of the
        // host by the promise of `HostStream`.
        match unsafe { sys::cuStreamQuery(earlier) } {
            sys::CUresult::CUDA_SUCCESS => return Ok(()),
            sys::CUresult::CUDA_ERROR_NOT_READY => {}
            failed => check(failed.result(), "asking what a stream has left to do")?,
        }
        let order = |event| {
            // SAFETY: as above, and the event lives as long as `self` or until it is destroyed below, which an event that is
            // waited for survives.
            let ordered = unsafe {
                result::event::record(event, earlier).and_then(|()| {
                    result::stream::wait_event(
                        later,
                        event,
                        sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT,
                    )
                })
            };
            check(
                ordered,
                "ordering the device's stream with a stream of the program",
            )
        };
        if earlier == self.stream || earlier == DEFAULT_STREAM {
            return order(event);
        }
        // Another thread may record the shared event on another stream before this one waits for it.
        let own = check(
            result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING),
            "making an event",
        )?;
        let ordered = order(own);
        // SAFETY: made above.
        let _ = unsafe { result::event::destroy(own) };
        ordered
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
        self.staging().clear();
        self.synchronize()?;
        check(
            // SAFETY: the pool lives as long as `self`.
            unsafe { result::mem_pool::trim_to(self.pool, 0) },
            "emptying the memory pool",
        )
    }

    pub(super) fn staging(&self) -> MutexGuard<'_, Vec<Pinned>> {
        self.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that the library has allocated of the device, and bytes that it keeps for its next allocations.
    pub(super) fn held(&self) -> Result<(u64, u64)> {
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
        Ok((used, reserved.saturating_sub(used)))
    }

    /// The library for large products, or why there is none. Only a library that is missing stays so: one that could not
    /// start, for want of memory say, is tried again.
    fn loaded_blas(&self) -> Result<&Blas> {
        let state = match self.blas.get() {
            Some(state) => state,
            None => {
                let state = Blas::new(self);
                if let Err(e) = &state
                    && e.kind() != ErrorKind::DeviceUnavailable
                {
                    return Err(e.clone());
                }
                self.blas.get_or_init(|| state)
            }
        };
        state.as_ref().map_err(Clone::clone)
    }

    /// The library for large products, if there is one.
    pub(super) fn blas(&self) -> Option<&Blas> {
        self.loaded_blas().ok()
    }

    /// The library for large products, of whoever cannot do without.
    pub(super) fn need_blas(&self) -> Result<&Blas> {
        self.loaded_blas()
            .map_err(|e| err!(Unsupported, "{}", e.message()))
    }

    /// Why there is no library for large products.
    pub fn blas_unavailable(&self) -> Option<String> {
        self.loaded_blas().err().map(|e| e.message().to_owned())
    }

    /// Refuses a device for which kernels cannot be had: see [`have_kernels`]. Looks until they are found, and then no more.
    pub fn need_kernels(&self) -> Result<()> {
        if self.has_kernels.get().is_none() {
            have_kernels(self.arch)?;
            self.has_kernels.get_or_init(|| ());
        }
        Ok(())
    }

    /// A unit's kernels, compiled for this device when first asked for. Units that others compile meanwhile are not waited for.
    fn module(&self, unit: Unit) -> Result<&Module> {
        self.modules[unit as usize].get_or_try(|| {
            self.bind()?;
            Module::load(unit, self.arch)
        })
    }

    /// A kernel, compiled for this device when first asked for.
    pub(super) fn function(&self, unit: Unit, name: &str) -> Result<sys::CUfunction> {
        self.module(unit)?.function(name)
    }

    /// Compiles and loads those of `units` that are not ready, as many at a time as there are threads. Units that have no kernels for
    /// this device are left out. Other threads may use the device meanwhile. `give_up` says, on any thread, whether to begin no
    /// more of them; one that is being compiled cannot be stopped.
    pub fn prepare(&self, units: &[Unit], give_up: &(dyn Fn() -> bool + Sync)) -> Result<()> {
        let wanted: Vec<Unit> = Unit::for_target(&target(self.arch))
            .filter(|&unit| units.contains(&unit) && self.modules[unit as usize].get().is_none())
            .collect();
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

    /// What [`Launch::clusters_at_once`] has found out, by kernel and blocks of a cluster.
    ///
    /// [`Launch::clusters_at_once`]: super::launch::Launch::clusters_at_once
    pub(super) fn clusters_at_once(&self) -> MutexGuard<'_, HashMap<(String, u32), usize>> {
        self.clusters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.staging().clear();
        if self.bind().is_err() {
            return;
        }
        for module in &mut self.modules {
            drop(module.take());
        }
        drop(self.blas.take());
        let checks = self.checks.take();
        if let Some(checks) = &checks {
            checks.free(self);
        }
        // SAFETY: nothing made in the context outlives `self`, which every buffer and graph keeps alive. Failures have no
        // one to hear of them, and the driver frees the rest with the process.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            // Its page-locked word, which no kernel writes any more.
            drop(checks);
            for event in [self.order.default, self.order.own] {
                let _ = result::event::destroy(event);
            }
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

/// What a size must be for a kernel's 32-bit integer.
pub(super) fn int(what: &str, value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| {
        err!(
            Unsupported,
            "{what} is {value}; a GPU kernel takes less than 2^31"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn refused(result: Result<()>, said: &[&str]) {
        let e = result.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::DeviceUnavailable);
        for said in said {
            assert!(e.message().contains(said), "'{said}' is not in '{e}'");
        }
    }

    #[test]
    fn drivers_devices_and_numbers_are_judged() {
        usable_driver(12_000).unwrap();
        usable_driver(13_020).unwrap();
        refused(
            usable_driver(11_080),
            &["CUDA 11.8", "CUDA 12.0 is needed", "update"],
        );
        usable_arch(0, "A100", (8, 0)).unwrap();
        usable_arch(0, "GB10", (12, 1)).unwrap();
        refused(
            usable_arch(1, "Tesla T4", (7, 5)),
            &["cuda:1", "Tesla T4", "7.5", "8.0 or later"],
        );
        usable_ordinal(1, 2).unwrap();
        refused(usable_ordinal(0, 0), &["cuda:0", "CUDA_VISIBLE_DEVICES"]);
        refused(usable_ordinal(1, 1), &["cuda:1", "cuda:0 is the only one"]);
        refused(usable_ordinal(8, 8), &["cuda:8", "cuda:0 to cuda:7"]);
    }

    #[test]
    fn answers_of_the_driver_say_what_to_do() {
        use sys::CUresult::*;
        for (answer, kind, advice) in [
            (CUDA_ERROR_OUT_OF_MEMORY, ErrorKind::OutOfMemory, ""),
            (
                CUDA_ERROR_ILLEGAL_ADDRESS,
                ErrorKind::DeviceUnavailable,
                "restart the process",
            ),
            (
                CUDA_ERROR_ASSERT,
                ErrorKind::DeviceUnavailable,
                "lost its context",
            ),
            (
                CUDA_ERROR_NO_DEVICE,
                ErrorKind::DeviceUnavailable,
                "nvidia-smi",
            ),
            (
                CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
                ErrorKind::DeviceUnavailable,
                "restart the machine",
            ),
            (CUDA_ERROR_INVALID_VALUE, ErrorKind::Internal, ""),
        ] {
            let (got, said) = verdict(answer);
            assert_eq!(got, kind, "{answer:?}");
            assert!(said.contains(advice), "{answer:?}: {said}");
            assert_eq!(advice.is_empty(), said.is_empty(), "{answer:?}: {said}");
        }
    }
}
