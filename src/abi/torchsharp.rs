//! Drop-in functions for TorchSharp hosts, with the signatures those hosts bind.
//!
//! They take tensor handles as `void *` and have no status: after a call, NVFP4_last_status() is #NVFP4_OK or says why a
//! result is NULL. In this version a handle is an #NVFP4_Tensor; handles of libtorch are refused.

use std::ffi::c_void;
use std::sync::Arc;

use super::guard::enter_drop_in;
use super::handle;
use super::shared;
use super::tensor::cuda_number;
use crate::base::ErrorKind;
use crate::base::error::{Result, bail};
use crate::format::nvfp4::{Levels, QuantizeOptions};
use crate::ops::tensors::{self, Nvfp4Tensor, ScaleLayout};
use crate::ops::transfer;
use crate::tensor::{DType, Place, Shape, Tensor};

/// The tensor behind a handle that may also be libtorch's.
fn tensor(name: &str, handle: *const c_void) -> Result<Arc<Tensor>> {
    handle::get::<Tensor>(name, handle.cast()).map_err(|e| {
        match e.kind() == ErrorKind::InvalidHandle && !handle.is_null() {
            true => e.within("TorchSharp tensors are not supported by this version"),
            false => e,
        }
    })
}

fn give(tensor: Tensor) -> *mut c_void {
    handle::insert(Arc::new(tensor)).cast()
}

/// Quantizes `input` `[.., K]` (float16, bfloat16 or float32; K a multiple of 16) with block scales alone.
///
/// - `qdata`: uint8 `[.., K / 2]`, the even index in the low nibble; NULL on failure.
/// - `scale`: float8_e4m3fn `[.., K / 16]`, row-major: amax / 6, clamped to [2^-16, 448]; NULL on failure.
///
/// The results are where the input is: on a GPU one pass over it makes them, to the same bits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_quantize(
    input: *mut c_void,
    qdata: *mut *mut c_void,
    scale: *mut *mut c_void,
) {
    enter_drop_in("NVFP4_quantize", (), || {
        for place in [qdata, scale] {
            if !place.is_null() {
                // SAFETY: the header asks for places of a pointer's size.
                unsafe { place.write_unaligned(std::ptr::null_mut()) };
            }
        }
        if qdata.is_null() || scale.is_null() {
            bail!(
                InvalidArgument,
                "qdata or scale is NULL; pass where the results go"
            );
        }
        let x = tensor("input", input)?;
        if !matches!(x.dtype(), DType::F16 | DType::BF16 | DType::F32) {
            bail!(
                InvalidArgument,
                "input is {}; it must be float16, bfloat16 or float32",
                x.dtype().name()
            );
        }
        let options = QuantizeOptions {
            levels: Levels::Legacy,
            ..QuantizeOptions::default()
        };
        let device = tensors::device_of(&x, shared::device)?;
        let q = tensors::quantize(&device, &x, &options, ScaleLayout::Linear)?;
        // SAFETY: as above.
        unsafe {
            qdata.write_unaligned(give(q.codes));
            scale.write_unaligned(give(q.scales));
        }
        Ok(())
    });
}

/// Multiplies two NVFP4 matrices: `[M, N]` of `out_dtype` (5 float16, 15 bfloat16 or 6 float32), or NULL on failure.
///
/// - `mat1`: uint8 `[M, K / 2]`.
/// - `mat2`: uint8 `[K / 2, N]`, the transposed view of `[N, K / 2]`.
/// - `scale_a`, `scale_b`: float8_e4m3fn, or uint8 holding its bytes, in swizzled order (#NVFP4_SCALES_SWIZZLED) for M and for
///   N rows.
///
/// The product is computed where the four tensors are, and is there: see NVFP4_matmul().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_scaled_mm(
    mat1: *mut c_void,
    mat2: *mut c_void,
    scale_a: *mut c_void,
    scale_b: *mut c_void,
    out_dtype: i8,
) -> *mut c_void {
    enter_drop_in("NVFP4_scaled_mm", std::ptr::null_mut(), || {
        let swizzled = |codes: Tensor, scales: Arc<Tensor>| Nvfp4Tensor {
            codes,
            scales: Tensor::clone(&scales),
            global: 1.0,
            layout: ScaleLayout::Swizzled,
        };
        let (mat1, mat2) = (tensor("mat1", mat1)?, tensor("mat2", mat2)?);
        // The dimension along K, whose elements must be neighbours: as torch has it, a forgotten transpose of a square weight
        // is an error and not a wrong result.
        for (name, mat, along_k) in [("mat1", &mat1, 1), ("mat2", &mat2, 0)] {
            let (sizes, strides) = (mat.shape().sizes(), mat.shape().strides());
            if sizes.len() != 2 {
                bail!(
                    InvalidArgument,
                    "{name} has shape {sizes:?}; it must be a matrix"
                );
            }
            if sizes[along_k] > 1 && strides[along_k] != 1 {
                bail!(
                    InvalidArgument,
                    "{name} has shape {sizes:?} and strides {strides:?}; mat1 must be [M, K / 2] row-major, and mat2 the transposed view of [N, K / 2]"
                );
            }
        }
        let dtype = DType::from_code(out_dtype.into())?;
        let (sizes, strides) = (mat2.shape().sizes(), mat2.shape().strides());
        let rows = Shape::strided(&[sizes[1], sizes[0]], &[strides[1], strides[0]])?;
        let a = swizzled(Tensor::clone(&mat1), tensor("scale_a", scale_a)?);
        let b = swizzled(mat2.view(rows, 0)?, tensor("scale_b", scale_b)?);
        let device = tensors::device_of(&a.codes, shared::device)?;
        shared::with_workspace(|ws| tensors::scaled_mm(&device, &a, &b, dtype, ws)).map(give)
    })
}

/// Frees what the library keeps for reuse: workspaces, the threads of calls that name no device, and memory of the GPUs that
/// are in use, for which it waits. Objects that are in use keep what they need. Nothing has to be freed this way before the
/// process ends.
#[unsafe(no_mangle)]
pub extern "C" fn NVFP4_empty_cache() {
    enter_drop_in("NVFP4_empty_cache", (), shared::empty);
}

/// Whether tensors can be in managed (unified) memory of CUDA device 0: 1 or 0. NVFP4_diagnose() says why not.
#[unsafe(no_mangle)]
pub extern "C" fn NVFP4_can_use_managed() -> i32 {
    enter_drop_in("NVFP4_can_use_managed", 0, || {
        Ok(i32::from(transfer::check_managed(0).is_ok()))
    })
}

/// Whether a tensor is in managed memory: 1 or 0, 0 also for what is no tensor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_is_managed_tensor(tensor: *mut c_void) -> i32 {
    enter_drop_in("NVFP4_is_managed_tensor", 0, || {
        let found = handle::get::<Tensor>("tensor", tensor.cast());
        Ok(i32::from(
            found.is_ok_and(|t| matches!(t.place(), Place::Managed(_))),
        ))
    })
}

/// A tensor with the values of `input` in managed memory, or NULL where that cannot be: a copy, or, if `input` is in managed
/// memory, another handle of it. It is a tensor of the CUDA device `prefetch_device`, or else of the input's, or of device 0.
///
/// - `prefetch_device`: the CUDA device to bring it to, or -1.
/// - `read_mostly`: non-zero if it will be read far more than written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_to_managed(
    input: *mut c_void,
    prefetch_device: i32,
    read_mostly: i32,
) -> *mut c_void {
    enter_drop_in("NVFP4_to_managed", std::ptr::null_mut(), || {
        let tensor = tensor("input", input)?;
        let prefetch = match prefetch_device {
            -1 => None,
            index => Some(cuda_number(index)?),
        };
        let ordinal = prefetch.or(tensor.place().cuda()).unwrap_or(0);
        transfer::to_managed(&tensor, ordinal, prefetch, read_mostly != 0).map(give)
    })
}

/// Brings a tensor in managed memory to the CUDA device `device_index`, or with -1 to the host, ahead of its use there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_managed_prefetch(tensor: *mut c_void, device_index: i32) {
    enter_drop_in("NVFP4_managed_prefetch", (), || {
        let tensor = self::tensor("tensor", tensor)?;
        let to = match device_index {
            -1 => None,
            index => Some(cuda_number(index)?),
        };
        transfer::prefetch(&tensor, to)
    });
}
