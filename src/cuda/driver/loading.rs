//! Loads and starts the driver once per process, and finds its devices. Refuses drivers and devices that are missing or too old.

use std::ffi::c_int;
use std::sync::OnceLock;

use cudarc::driver::{result, sys};

use super::error::{check, driver_error};
use crate::base::error::{Error, bail};
use crate::base::{ErrorKind, Result, fork};

/// The oldest driver version with everything that launches use.
const OLDEST_DRIVER: i32 = 12_000;
/// The oldest driver version that takes advice for managed memory by location.
const OLDEST_FOR_MANAGED: i32 = 12_020;
/// The oldest architecture with bf16 matrix instructions.
const OLDEST_ARCH: (i32, i32) = (8, 0);

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

/// Refuses the number of a device that does not exist.
pub(in crate::cuda) fn usable_ordinal(ordinal: usize, devices: usize) -> Result<()> {
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

/// Why no GPU can be used at all; `None` if GPUs can be used.
pub fn unavailable() -> Option<String> {
    driver().err().map(|e| e.message().to_owned())
}

/// Number of devices.
pub fn count() -> Result<usize> {
    driver()?;
    let count = check(result::device::get_count(), "counting CUDA devices")?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Loads and starts the driver once, and returns its CUDA version: 13000 for CUDA 13.0.
pub(in crate::cuda) fn driver() -> Result<i32> {
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

/// Refuses to use CUDA in a child of the process that started it (in `generation`): the driver does not work there.
pub(in crate::cuda) fn check_process(generation: u32) -> Result<()> {
    if generation != fork::generation() {
        bail!(
            DeviceUnavailable,
            "this process was forked from one that uses CUDA, whose driver does not work in such a child: fork before the first use of a GPU, or start the child as a new program (in Python, multiprocessing's \"spawn\")"
        );
    }
    Ok(())
}

pub(in crate::cuda) fn attribute(
    device: sys::CUdevice,
    which: sys::CUdevice_attribute,
) -> Result<i32> {
    check(
        // SAFETY: `device` is a device that the driver gave.
        unsafe { result::device::get_attribute(device, which) },
        "asking about the device",
    )
}

/// The device numbered `ordinal`, its name and its compute capability. Refuses a device that is missing or too old.
pub(in crate::cuda) fn usable(ordinal: usize) -> Result<(sys::CUdevice, String, (i32, i32))> {
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

/// Refuses managed memory on a device that does not support it. Asks only the driver, and opens no device.
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
}
