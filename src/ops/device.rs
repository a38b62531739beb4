//! The device that operations run on: the CPU or a CUDA device.

use std::fmt;
use std::sync::Arc;

use crate::base::error::{Result, bail};
use crate::base::threads::{Pool, Submit};
use crate::cpu::Cpu;
use crate::cuda::Gpu;

/// A device, cheap to clone. Weights and caches work only with the device they were created for.
#[derive(Clone)]
#[non_exhaustive]
pub enum Device {
    /// The processor, through the kernels of one instruction-set level and a pool of threads.
    Cpu(Arc<Cpu>),
    /// A CUDA device.
    Cuda(Arc<Gpu>),
}

/// A kind of device, on which weights have one layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// The processor.
    Cpu,
    /// A CUDA device.
    Cuda,
}

impl Device {
    /// Its kind.
    pub fn kind(&self) -> DeviceKind {
        match self {
            Device::Cpu(_) => DeviceKind::Cpu,
            Device::Cuda(_) => DeviceKind::Cuda,
        }
    }

    /// The CPU with `threads` threads; `None` takes `NVFP4_THREADS`, or else one thread for each available core.
    pub fn cpu(threads: Option<usize>) -> Result<Device> {
        Ok(Device::Cpu(Cpu::new(threads)?))
    }

    /// The CPU with up to `threads` threads, the caller's and those of a host on which `submit` schedules tasks.
    pub fn cpu_of_host(threads: usize, submit: Arc<Submit>) -> Result<Device> {
        let pool = Pool::of_host(threads, submit)?;
        Ok(Device::Cpu(Cpu::of_pool(pool)?))
    }

    /// The CUDA device numbered `ordinal`. Fails, with the reason, if the device or kernels for it are unavailable.
    pub fn cuda(ordinal: usize) -> Result<Device> {
        let gpu = Gpu::open(ordinal)?;
        gpu.need_kernels()?;
        Ok(Device::Cuda(gpu))
    }

    /// Host threads that prepare data for the device: the device's own on the CPU, new ones for a GPU.
    pub fn host_cpu(&self) -> Result<Arc<Cpu>> {
        match self {
            Device::Cpu(cpu) => Ok(cpu.clone()),
            Device::Cuda(_) => Cpu::new(None),
        }
    }

    /// The processor, for operations on host memory.
    pub(crate) fn host(&self) -> Result<&Arc<Cpu>> {
        match self {
            Device::Cpu(cpu) => Ok(cpu),
            Device::Cuda(gpu) => bail!(
                Unsupported,
                "an operation on host memory was asked of {gpu:?}; use the cpu device for it"
            ),
        }
    }

    /// Whether this is a CUDA device.
    pub fn is_cuda(&self) -> bool {
        matches!(self, Device::Cuda(_))
    }

    /// Refuses to offload data to host memory on a device where that saves nothing.
    pub fn check_offload(&self) -> Result<()> {
        match self {
            Device::Cpu(_) => bail!(
                Unsupported,
                "nothing can be offloaded from a cpu: its memory is the host's; leave offload out"
            ),
            Device::Cuda(gpu) if gpu.is_integrated() => bail!(
                Unsupported,
                "nothing can be offloaded from {gpu:?}: it shares the host's memory, so that what is offloaded takes as much of it as before; leave offload out"
            ),
            Device::Cuda(_) => Ok(()),
        }
    }

    /// Host threads that the device computes with, or that may prepare work for it.
    pub fn threads(&self) -> usize {
        match self {
            Device::Cpu(cpu) => cpu.pool().threads(),
            Device::Cuda(_) => Pool::default_threads().unwrap_or(1),
        }
    }

    /// A name for reports: `cpu (avx2, 2 threads)`.
    pub fn name(&self) -> String {
        match self {
            Device::Cpu(cpu) => format!(
                "cpu ({}, {} threads)",
                cpu.level().name(),
                cpu.pool().threads()
            ),
            Device::Cuda(gpu) => format!("{gpu:?}"),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}
