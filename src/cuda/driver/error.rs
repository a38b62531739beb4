//! Turns the driver's answers into errors that name the operation and the remedy.

use cudarc::driver::{result, sys};

use crate::base::error::Error;
use crate::base::{ErrorKind, Result};

/// Turns a driver's answer into an error that names the operation.
pub(in crate::cuda) fn check<T>(
    result: std::result::Result<T, result::DriverError>,
    doing: &str,
) -> Result<T> {
    result.map_err(|e| driver_error(e, doing))
}

pub(in crate::cuda) fn driver_error(error: result::DriverError, doing: &str) -> Error {
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

/// The kind of error that a driver's answer is, and its remedy.
fn verdict(answer: sys::CUresult) -> (ErrorKind, &'static str) {
    use sys::CUresult::*;
    match answer {
        CUDA_ERROR_OUT_OF_MEMORY => (ErrorKind::OutOfMemory, ""),
        // The driver gives these answers to every later call, whichever work failed.
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

#[cfg(test)]
mod tests {
    use super::*;

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
