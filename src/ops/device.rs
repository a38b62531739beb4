//! Where operations run.

use std::fmt;
use std::sync::Arc;

use crate::base::error::Result;
use crate::cpu::Cpu;

/// A device, cheap to clone. Weights and caches made for one device are used with that device.
#[derive(Clone)]
#[non_exhaustive]
pub enum Device {
    /// The processor, through the kernels of one instruction-set level and a pool of threads.
    Cpu(Arc<Cpu>),
}

impl Device {
    /// The CPU with `threads` threads; `None` takes `NVFP4_THREADS`, or one for each available core.
    pub fn cpu(threads: Option<usize>) -> Result<Device> {
        Ok(Device::Cpu(Cpu::new(threads)?))
    }

    /// Threads of the host that the device computes with, or that may prepare work for it.
    pub fn threads(&self) -> usize {
        match self {
            Device::Cpu(cpu) => cpu.pool().threads(),
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
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}
