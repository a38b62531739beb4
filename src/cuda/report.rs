//! Reports the GPU setup of this machine: driver, devices, compiler and cuBLASLt, with the reason for anything missing. Never fails, and
//! leaves no device open that was not open before.

use serde::Serialize;

use super::driver::{Gpu, compiler, count, driver};
use super::registry::is_embedded;
use crate::base::{Result, env};

/// Whether a component is available, and why not.
#[derive(Clone, Debug, Serialize)]
pub struct Presence {
    /// Whether it is available.
    pub available: bool,
    /// Its version, if it is available and has one.
    pub version: Option<String>,
    /// Why it is missing.
    pub reason: Option<String>,
}

/// A device.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceReport {
    /// The N of `cuda:N`.
    pub index: usize,
    /// Whether it can be used.
    pub available: bool,
    /// Why it cannot be used.
    pub reason: Option<String>,
    /// Details of a device that could be opened.
    #[serde(flatten)]
    pub details: Option<Details>,
}

impl DeviceReport {
    fn has_kernels(&self) -> bool {
        self.details.as_ref().is_some_and(|d| d.embedded_kernels)
    }
}

/// Properties of a device.
#[derive(Clone, Debug, Serialize)]
pub struct Details {
    /// The driver's name for it.
    pub name: String,
    /// Compute capability: "9.0".
    pub compute_capability: String,
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of its memory.
    pub total_bytes: usize,
    /// Bytes of its memory that are free.
    pub free_bytes: usize,
    /// Whether host and device may use managed memory at the same time.
    pub concurrent_managed_access: bool,
    /// Whether the library embeds its kernels for this device, so that no compiler is needed.
    pub embedded_kernels: bool,
    /// cuBLASLt, for products of many rows.
    pub cublaslt: Presence,
}

/// The report on this machine.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Whether some device can run models and products.
    pub available: bool,
    /// Why no device can.
    pub reason: Option<String>,
    /// The newest CUDA version that the driver supports: "13.0".
    pub driver_version: Option<String>,
    /// The devices that the driver lists.
    pub devices: Vec<DeviceReport>,
    /// NVRTC, the compiler of kernels.
    pub nvrtc: Presence,
    /// The folder of the kernel cache, if kernels are cached.
    pub kernel_cache: Option<String>,
}

fn device(index: usize) -> DeviceReport {
    let details = || -> Result<Details> {
        let gpu = Gpu::open(index)?;
        let (free_bytes, total_bytes) = gpu.memory()?;
        let (major, minor) = gpu.arch();
        let missing = gpu.blas_unavailable();
        Ok(Details {
            name: gpu.name().to_owned(),
            compute_capability: format!("{major}.{minor}"),
            multiprocessors: gpu.multiprocessors(),
            total_bytes,
            free_bytes,
            concurrent_managed_access: gpu.concurrent_managed_access(),
            embedded_kernels: is_embedded(gpu.arch()),
            cublaslt: Presence {
                available: missing.is_none(),
                version: None,
                reason: missing,
            },
        })
    };
    let details = details();
    DeviceReport {
        index,
        available: details.is_ok(),
        reason: details.as_ref().err().map(|e| e.message().to_owned()),
        details: details.ok(),
    }
}

/// Examines this machine. Opens each device for a moment.
pub fn report() -> Report {
    let driver = driver();
    let compiler = compiler();
    let nvrtc = Presence {
        available: compiler.is_ok(),
        version: compiler
            .as_ref()
            .ok()
            .map(|(major, minor)| format!("{major}.{minor}")),
        reason: compiler.err().map(|e| e.message().to_owned()),
    };
    let count = driver.as_ref().map_err(Clone::clone).and_then(|_| count());
    let devices: Vec<_> = (0..*count.as_ref().unwrap_or(&0)).map(device).collect();
    let unusable = || match devices.first() {
        None => Some("the driver shows no device".to_owned()),
        Some(first) if devices.iter().all(|d| !d.available) => first.reason.clone(),
        Some(_) if devices.iter().any(DeviceReport::has_kernels) => None,
        Some(_) => nvrtc.reason.clone(),
    };
    let reason = match count {
        Err(e) => Some(e.message().to_owned()),
        Ok(_) => unusable(),
    };
    Report {
        available: reason.is_none(),
        reason,
        driver_version: driver
            .ok()
            .map(|v| format!("{}.{}", v / 1000, v % 1000 / 10)),
        devices,
        nvrtc,
        kernel_cache: env::kernel_cache().map(|p| p.display().to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_has_a_reason() {
        let report = report();
        assert_eq!(report.available, report.reason.is_none());
        assert_eq!(report.nvrtc.available, report.nvrtc.reason.is_none());
        assert_eq!(report.nvrtc.available, report.nvrtc.version.is_some());
        for device in &report.devices {
            assert_eq!(device.available, device.reason.is_none());
            assert_eq!(device.available, device.details.is_some());
        }
        let usable = report
            .devices
            .iter()
            .any(|d| d.available && (report.nvrtc.available || d.has_kernels()));
        assert_eq!(report.available, usable);
        assert!(report.driver_version.is_some() || report.devices.is_empty());
    }
}
