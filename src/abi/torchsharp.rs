//! Drop-in functions for TorchSharp hosts, with the signatures those hosts bind.
//!
//! They take tensor handles as `void *`: either #NVFP4_Tensor, or pointers to libtorch tensors (2.10 or later), which TorchSharp has in
//! Tensor.Handle. All handles of a call must be of one kind. Results are always new handles of that kind, which the caller releases or
//! disposes of. libtorch is looked up in the process when such a handle is passed; it is not needed otherwise.
//!
//! The functions return no status: after a call, NVFP4_last_status() is #NVFP4_OK or says why a result is NULL. When
//! NVFP4_quantize, NVFP4_scaled_mm or NVFP4_to_managed fails on tensors of TorchSharp, its own error check after the call
//! throws the message.
//!
//! On a GPU they are asynchronous, like libtorch: errors that the device finds fail a later call, see ASYNCHRONOUS ERRORS
//! above.
//!
//! libtorch's tensors may have any strides and offset, and may require a gradient; results never do. They are read in
//! place, and results are allocated by libtorch. On a GPU the work is ordered with libtorch's current stream.

use std::ffi::c_void;
use std::sync::Arc;

use super::guard::{enter_drop_in, enter_drop_in_to_free, last_status, last_text};
use super::handle;
use super::libtorch;
use super::shared;
use super::status::NVFP4_OK;
use super::tensor::cuda_number;
use crate::base::error::{Result, bail};
use crate::format::nvfp4::{Levels, QuantizeOptions};
use crate::ops::tensors::{self, Nvfp4Tensor, ScaleLayout};
use crate::ops::transfer;
use crate::tensor::{DType, Place, Shape, Tensor};

/// Runs the body of a function after which TorchSharp checks for an error. If the handles are libtorch's, passes errors to TorchSharp.
fn enter_checked<T>(
    function: &'static str,
    handles: &[*mut c_void],
    otherwise: T,
    body: impl FnOnce() -> Result<T>,
) -> T {
    let result = enter_drop_in(function, otherwise, body);
    if last_status() != NVFP4_OK && !handles.iter().any(|&h| handle::is_own(h)) {
        libtorch::throw(&format!("{function}: {}", last_text()));
    }
    result
}

/// Whether the tensors of a call are this library's; otherwise they are libtorch's.
pub(super) fn are_own(handles: &[(&str, *mut c_void)]) -> Result<bool> {
    let Some(((name, first), others)) = handles.split_first() else {
        return Ok(true);
    };
    let own = handle::is_own(*first);
    for (other, handle) in others {
        if handle::is_own(*handle) != own && !first.is_null() && !handle.is_null() {
            let (own, other) = if own { (name, other) } else { (other, name) };
            bail!(
                InvalidHandle,
                "{own} is an NVFP4_Tensor and {other} is not; the tensors of a call are all this library's, or all libtorch's"
            );
        }
    }
    Ok(own)
}

/// The tensor behind a handle of either kind.
pub(super) fn tensor(name: &str, handle: *mut c_void) -> Result<Tensor> {
    if handle.is_null() || handle::is_own(handle) {
        return Ok(Tensor::clone(&*handle::get::<Tensor>(name, handle.cast())?));
    }
    libtorch::view(name, handle)
}

pub(super) fn give(tensor: Tensor) -> *mut c_void {
    handle::insert(Arc::new(tensor)).cast()
}

/// Quantizes `input` `[.., K]` (float16, bfloat16 or float32; K a multiple of 16) with block scales alone.
///
/// - `qdata`: uint8 `[.., K / 2]`, the even index in the low nibble; NULL on failure.
/// - `scale`: float8_e4m3fn `[.., K / 16]`, row-major: amax / 6, clamped to [2^-16, 448]; NULL on failure.
///
/// The results are where the input is. On a GPU they have the same bits as on the CPU, and the call does not wait. For
/// libtorch's tensors they are matrices: the leading dimensions are flattened into one.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_quantize(
    input: *mut c_void,
    qdata: *mut *mut c_void,
    scale: *mut *mut c_void,
) {
    enter_checked("NVFP4_quantize", &[input], (), || {
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
        let made = if handle::is_own(input) {
            let q = tensors::quantize(&device, &x, &options, ScaleLayout::Linear)?;
            [give(q.codes), give(q.scales)]
        } else {
            let _order = libtorch::on_current_stream(x.place());
            let sizes = tensors::quantized_sizes(&x, ScaleLayout::Linear)?;
            let make = |sizes: &[usize], dtype| {
                let (rows, cols) = Shape::contiguous(sizes)?.matrix();
                libtorch::make(&[rows, cols], sizes, dtype, x.place())
            };
            let (q, mut codes) = make(&sizes[0], DType::U8)?;
            let (s, mut scales) = make(&sizes[1], DType::F8E4M3)?;
            tensors::quantize_into(
                &device,
                &x,
                &options,
                ScaleLayout::Linear,
                &mut codes,
                &mut scales,
            )?;
            [q.give(), s.give()]
        };
        // SAFETY: as above.
        unsafe {
            qdata.write_unaligned(made[0]);
            scale.write_unaligned(made[1]);
        }
        Ok(())
    });
}

/// Multiplies two NVFP4 matrices: `[M, N]` of `out_dtype` (5 float16, 15 bfloat16 or 6 float32), or NULL on failure.
///
/// - `mat1`: uint8 `[M, K / 2]`.
/// - `mat2`: uint8 `[K / 2, N]`, the transposed view of `[N, K / 2]`.
/// - `scale_a`, `scale_b`: float8_e4m3fn, or uint8 holding its bytes, in swizzled order (#NVFP4_SCALES_SWIZZLED) for M rows
///   and for N rows.
///
/// The product is computed where the four tensors are, and the result is there too; the call does not wait for a GPU: see
/// NVFP4_matmul().
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_scaled_mm(
    mat1: *mut c_void,
    mat2: *mut c_void,
    scale_a: *mut c_void,
    scale_b: *mut c_void,
    out_dtype: i8,
) -> *mut c_void {
    let handles = [mat1, mat2, scale_a, scale_b];
    enter_checked("NVFP4_scaled_mm", &handles, std::ptr::null_mut(), || {
        let names = ["mat1", "mat2", "scale_a", "scale_b"];
        let own = are_own(&std::array::from_fn::<_, 4, _>(|i| (names[i], handles[i])))?;
        let swizzled = |codes, scales| Nvfp4Tensor {
            codes,
            scales,
            global: 1.0,
            layout: ScaleLayout::Swizzled,
        };
        let (mat1, mat2) = (tensor("mat1", mat1)?, tensor("mat2", mat2)?);
        // The dimension along K must have stride 1, as in torch: a forgotten transpose of a square weight is then an error,
        // not a wrong result.
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
        if !matches!(dtype, DType::F16 | DType::BF16 | DType::F32) {
            bail!(
                InvalidArgument,
                "out_dtype is {out_dtype} ({}); it must be 5 (float16), 15 (bfloat16) or 6 (float32)",
                dtype.name()
            );
        }
        let (sizes, strides) = (mat2.shape().sizes(), mat2.shape().strides());
        let rows = Shape::strided(&[sizes[1], sizes[0]], &[strides[1], strides[0]])?;
        let place = mat1.place();
        let a = swizzled(mat1, tensor("scale_a", scale_a)?);
        let b = swizzled(mat2.view(rows, 0)?, tensor("scale_b", scale_b)?);
        tensors::one_place(&[
            ("mat1", &a.codes),
            ("mat2", &b.codes),
            ("scale_a", &a.scales),
            ("scale_b", &b.scales),
        ])?;
        let device = tensors::device_of(&a.codes, shared::device)?;
        shared::with_workspace(|ws| {
            if own {
                return tensors::scaled_mm(&device, &a, &b, dtype, ws).map(give);
            }
            let _order = libtorch::on_current_stream(place);
            let sizes = tensors::product_sizes(&a, &b)?;
            let (made, mut out) = libtorch::make(&sizes, &sizes, dtype, place)?;
            tensors::scaled_mm_into(&device, &a, &b, &mut out, ws)?;
            Ok(made.give())
        })
    })
}

/// Frees what the library keeps for reuse: workspaces, the threads of calls that name no device, and free memory of the
/// GPUs in use, for which it waits. Objects that are in use keep what they need. Not needed before the process ends.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn NVFP4_empty_cache() {
    enter_drop_in_to_free("NVFP4_empty_cache", shared::empty);
}

/// Whether tensors can be in managed (unified) memory of CUDA device 0: 1 or 0. NVFP4_diagnose() says why not. Also 0 if
/// the process has a libtorch that cannot use such memory.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn NVFP4_can_use_managed() -> i32 {
    enter_drop_in("NVFP4_can_use_managed", 0, || {
        Ok(i32::from(
            transfer::check_managed(0).is_ok() && libtorch::can_wrap(),
        ))
    })
}

/// Whether a tensor is in managed memory: 1 or 0; also 0 if the handle is not a tensor.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_is_managed_tensor(tensor: *mut c_void) -> i32 {
    enter_drop_in("NVFP4_is_managed_tensor", 0, || {
        let found = self::tensor("tensor", tensor);
        Ok(i32::from(
            found.is_ok_and(|t| matches!(t.place(), Place::Managed(_))),
        ))
    })
}

/// Gives a tensor with the values of `input` in managed memory: a copy, or another handle of `input` if that is in managed
/// memory already. NULL on failure. The tensor belongs to the CUDA device `prefetch_device`; with -1 to the device of the
/// input, or to device 0 if that is in host memory.
///
/// - `prefetch_device`: the CUDA device to prefetch it to, or -1 for none.
/// - `read_mostly`: non-zero if it will be read far more often than written.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_to_managed(
    input: *mut c_void,
    prefetch_device: i32,
    read_mostly: i32,
) -> *mut c_void {
    enter_checked("NVFP4_to_managed", &[input], std::ptr::null_mut(), || {
        let tensor = tensor("input", input)?;
        let place = tensor.place();
        let prefetch = match prefetch_device {
            -1 => None,
            index => Some(cuda_number(index)?),
        };
        let ordinal = prefetch.or(place.cuda()).unwrap_or(0);
        let own = handle::is_own(input);
        let _order = (!own).then(|| libtorch::on_current_stream(place));
        let made = transfer::to_managed(&tensor, ordinal, prefetch, read_mostly != 0)?;
        match (own, place) {
            (true, _) => Ok(give(made)),
            // Only the handle keeps the memory of the result alive.
            (false, Place::Managed(_)) => libtorch::alias("input", input),
            (false, _) => libtorch::wrap(made),
        }
    })
}

/// Prefetches a tensor in managed memory to the CUDA device `device_index`, or to the host with -1.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_managed_prefetch(tensor: *mut c_void, device_index: i32) {
    enter_drop_in("NVFP4_managed_prefetch", (), || {
        let own = handle::is_own(tensor);
        let tensor = self::tensor("tensor", tensor)?;
        let _order = (!own).then(|| libtorch::on_current_stream(tensor.place()));
        let to = match device_index {
            -1 => None,
            index => Some(cuda_number(index)?),
        };
        transfer::prefetch(&tensor, to)
    });
}
