//! Products with weights in NVFP4.
//!
//! What is computed is what was asked for: activations are quantized only by option.

use std::sync::Arc;

use super::arguments::{Out, choice};
use super::guard::enter;
use super::handle::{self, Object};
use super::quantize::parts;
use super::shared;
use super::status::NVFP4_Status;
use super::tensor::NVFP4_Tensor;
use crate::base::Result;
use crate::ops::Device;
use crate::ops::linear::{Activations, Linear};
use crate::ops::tensors;
use crate::tensor::{DType, Tensor};

/// A weight `[N, K]` prepared for products. Immutable; several threads may use it at once.
pub struct NVFP4_Weight {
    _private: [u8; 0],
}

/// A prepared weight and the device it was prepared for.
struct Weight {
    linear: Linear,
    device: Device,
}

impl Object for Weight {
    type Handle = NVFP4_Weight;
    const NAME: &'static str = "NVFP4_Weight";
}

/// Activations as they are, in float (W4A16 with an NVFP4 weight).
pub const NVFP4_ACTIVATIONS_EXACT: i32 = 0;
/// Activations rounded to 8 bits, one scale for each 32 along K (W4A8). Faster, and not exact. Dense weights ignore it.
pub const NVFP4_ACTIVATIONS_INT8: i32 = 1;

pub(super) fn activations(value: i32) -> Result<Activations> {
    choice(
        "activations",
        value,
        &[
            (NVFP4_ACTIVATIONS_EXACT, "exact", Activations::Exact),
            (NVFP4_ACTIVATIONS_INT8, "int8", Activations::Int8),
        ],
    )
}

/// Prepares the NVFP4 weight `[N, K]` for products: a copy in the order that the kernels read. The tensors may be released
/// afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_weight_create(
    codes: *const NVFP4_Tensor,
    scales: *const NVFP4_Tensor,
    global_scale: f32,
    scale_layout: i32,
    out: *mut *mut NVFP4_Weight,
) -> NVFP4_Status {
    enter("NVFP4_weight_create", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        let q = parts(
            ["codes", "scales"],
            codes,
            scales,
            global_scale,
            scale_layout,
        )?;
        let device = shared::device()?;
        let linear = tensors::weight(&device, &q)?;
        out.set(handle::insert(Arc::new(Weight { linear, device })));
        Ok(())
    })
}

/// Prepares the dense weight `[N, K]` of a floating type for products. K must be a multiple of 16.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_weight_create_dense(
    weight: *const NVFP4_Tensor,
    out: *mut *mut NVFP4_Weight,
) -> NVFP4_Status {
    enter("NVFP4_weight_create_dense", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        let tensor = handle::get::<Tensor>("weight", weight)?;
        let device = shared::device()?;
        let linear = tensors::dense_weight(&device, &tensor)?;
        out.set(handle::insert(Arc::new(Weight { linear, device })));
        Ok(())
    })
}

/// Adds a reference to a weight.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_weight_retain(weight: *mut NVFP4_Weight) -> NVFP4_Status {
    enter("NVFP4_weight_retain", || {
        handle::retain::<Weight>("weight", weight)
    })
}

/// Gives up a reference to a weight. After the last one the handle is stale.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_weight_release(weight: *mut NVFP4_Weight) -> NVFP4_Status {
    enter("NVFP4_weight_release", || {
        handle::release::<Weight>("weight", weight)
    })
}

/// Writes a weight's N (output features), K (input features) and bytes in memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_weight_size(
    weight: *const NVFP4_Weight,
    n: *mut i64,
    k: *mut i64,
    bytes: *mut u64,
) -> NVFP4_Status {
    enter("NVFP4_weight_size", || {
        // SAFETY: the pointers are as the header asks.
        let (n, k, bytes) = unsafe {
            (
                Out::new("n", n)?,
                Out::new("k", k)?,
                Out::new("bytes", bytes)?,
            )
        };
        let weight = handle::get::<Weight>("weight", weight)?;
        n.set(weight.linear.rows() as i64);
        k.set(weight.linear.cols() as i64);
        bytes.set(weight.linear.bytes() as u64);
        Ok(())
    })
}

/// Multiplies: `input` `[.., K]` times `weight` `[N, K]` transposed, summed in float.
///
/// - `input`: of a floating type, any strides.
/// - `activations`: one of NVFP4_ACTIVATIONS_*.
/// - `dtype`: floating type of the result `[.., N]`.
///
/// A row of the result has the same bits whatever other rows are in the call, and on any number of threads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_linear(
    weight: *const NVFP4_Weight,
    input: *const NVFP4_Tensor,
    activations: i32,
    dtype: i32,
    out: *mut *mut NVFP4_Tensor,
) -> NVFP4_Status {
    enter("NVFP4_linear", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        let weight = handle::get::<Weight>("weight", weight)?;
        let input = handle::get::<Tensor>("input", input)?;
        let activations = self::activations(activations)?;
        let dtype = DType::from_code(dtype)?;
        let tensor = shared::with_workspace(|workspace| {
            tensors::linear(
                &weight.device,
                &input,
                &weight.linear,
                activations,
                dtype,
                workspace,
            )
        })?;
        out.set(handle::insert(Arc::new(tensor)));
        Ok(())
    })
}

/// Multiplies two NVFP4 matrices (W4A4): a `[M, K]` times b `[N, K]` transposed, as `[M, N]` of the floating type `dtype`.
/// The exact product of the decoded values but for the order of summation, in float. NVFP4_scaled_mm() is the same without
/// multipliers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_matmul(
    a_codes: *const NVFP4_Tensor,
    a_scales: *const NVFP4_Tensor,
    a_global_scale: f32,
    b_codes: *const NVFP4_Tensor,
    b_scales: *const NVFP4_Tensor,
    b_global_scale: f32,
    scale_layout: i32,
    dtype: i32,
    out: *mut *mut NVFP4_Tensor,
) -> NVFP4_Status {
    enter("NVFP4_matmul", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        let a = parts(
            ["a_codes", "a_scales"],
            a_codes,
            a_scales,
            a_global_scale,
            scale_layout,
        )?;
        let b = parts(
            ["b_codes", "b_scales"],
            b_codes,
            b_scales,
            b_global_scale,
            scale_layout,
        )?;
        let dtype = DType::from_code(dtype)?;
        let device = shared::device()?;
        let tensor = shared::with_workspace(|ws| tensors::scaled_mm(&device, &a, &b, dtype, ws))?;
        out.set(handle::insert(Arc::new(tensor)));
        Ok(())
    })
}
