//! Products with weights in 4 bits.
//!
//! There is no silent fallback: activations are quantized only if an option says so, and a weight is decoded to a dense one only if the
//! compute path allows it. NVFP4_weight_report() reports the chosen backend, and the reason if it is a fallback. There are three backends:
//! "nvfp4-kernel" and "nf4-kernel" read the 4-bit codes; "dequant-matmul" decodes the weight once, when it is prepared, and stores it
//! dense. In this version the CPU and CUDA devices have "nvfp4-kernel" and "dequant-matmul".
//!
//! A product is computed where its tensors are, and its result is there too: on the CPU for tensors in host memory, and on
//! a CUDA device for tensors in that device's memory or in managed memory, in stream order as the tensor chapter states.
//! The one exception is an input in host memory for a weight on a CUDA device: it is copied there, and the result is copied
//! back. Otherwise the tensors of a call and its weight must be in the same place; if not, the call fails with
//! #NVFP4_INVALID_ARGUMENT and a message that names both places. On a CUDA device tensors may be float16, bfloat16 or
//! float32, but not float64.
//!
//! A weight for a CUDA device is prepared from tensors in host memory, or in that device's memory without a copy through
//! the host. The call that prepares it waits for the device, and fails if a block scale is NaN or negative or a value of a
//! dense weight is not finite. Products with the weight need no such checks.

use std::ffi::c_char;
use std::ptr;
use std::sync::Arc;

use serde_json::{Value, json};

use super::arguments::{
    Growing, Out, choice, copy_text, count, fill, flag, options, reserved, text,
};
use super::guard::{enter, enter_to_free};
use super::handle::{self, Object};
use super::quantize::{NVFP4_SCALES_LINEAR, layout, nf4_parts, parts};
use super::shared;
use super::status::NVFP4_Status;
use super::tensor::{
    NVFP4_DEVICE_CPU, NVFP4_DTYPE_BFLOAT16, NVFP4_DTYPE_FLOAT16, NVFP4_DTYPE_FLOAT32, NVFP4_Tensor,
    device_of,
};
use crate::base::Result;
use crate::ops::Device;
use crate::ops::backend::{self, Backend, Choice, ComputePath, Request, WeightFormat};
use crate::ops::linear::{Activations, Linear};
use crate::ops::tensors::{self, Nvfp4Tensor, ScaleLayout};
use crate::tensor::{DType, Tensor};

/// A weight `[N, K]` prepared for products. Immutable; several threads may use it at once.
pub struct NVFP4_Weight {
    _private: [u8; 0],
}

/// A prepared weight with its device, and its report for NVFP4_weight_report().
struct Weight {
    linear: Linear,
    device: Device,
    report: Value,
}

impl Weight {
    fn report(&self) -> Value {
        let mut report = self.report.clone();
        report["n"] = self.linear.rows().into();
        report["k"] = self.linear.cols().into();
        report["stored"] = self.linear.kind().name().into();
        report["bytes"] = self.linear.bytes().into();
        report
    }
}

impl Object for Weight {
    type Handle = NVFP4_Weight;
    const NAME: &'static str = "NVFP4_Weight";
}

/// Activations that are not quantized (W4A16 with an NVFP4 weight): on the CPU in float; on a GPU in float16, each row
/// scaled by a power of two that keeps it in range, or in bfloat16 if the weight is bfloat16.
pub const NVFP4_ACTIVATIONS_EXACT: i32 = 0;
/// Activations quantized to 8 bits, with a scale for each 32 values along K (W4A8). Faster, but not exact. Ignored with
/// dense weights. On the CPU only: with an NVFP4 weight on a GPU it is #NVFP4_UNSUPPORTED.
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

/// A kernel for the weight's format if the device has one, or else the decoded weight: today the same as
/// #NVFP4_COMPUTE_PATH_KERNEL_OR_FALLBACK, but a later version may choose what is faster.
pub const NVFP4_COMPUTE_PATH_AUTO: i32 = 0;
/// A kernel for the weight's format, or #NVFP4_UNSUPPORTED.
pub const NVFP4_COMPUTE_PATH_KERNEL_ONLY: i32 = 1;
/// A kernel for the weight's format if the device has one, or else the decoded weight.
pub const NVFP4_COMPUTE_PATH_KERNEL_OR_FALLBACK: i32 = 2;
/// The decoded weight.
pub const NVFP4_COMPUTE_PATH_DEQUANT_MATMUL_ONLY: i32 = 3;

/// No 4-bit weight.
pub const NVFP4_FORMAT_NONE: i32 = 0;
/// NVFP4: E2M1 codes with an E4M3 scale for each 16 values along K.
pub const NVFP4_FORMAT_NVFP4: i32 = 1;
/// NF4, as bitsandbytes stores it.
pub const NVFP4_FORMAT_NF4: i32 = 2;
/// Weights of several formats.
pub const NVFP4_FORMAT_MIXED: i32 = 3;

/// How to prepare a weight. Fill with NVFP4_weight_options_init(), then change what is to differ.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_WeightOptions {
    /// sizeof(NVFP4_WeightOptions) as the caller knows it.
    pub struct_size: u32,
    /// One of NVFP4_COMPUTE_PATH_*. Default: auto.
    pub compute_path: i32,
    /// One of NVFP4_DEVICE_*. Default: CPU.
    pub device_type: i32,
    /// The index of the device of that type. Default: 0.
    pub device_index: i32,
    /// One of NVFP4_SCALES_*, for NVFP4 weights. Default: linear.
    pub scale_layout: i32,
    /// The type that a decoded weight is stored in: #NVFP4_DTYPE_FLOAT32, which decoding gives, or #NVFP4_DTYPE_FLOAT16 or
    /// #NVFP4_DTYPE_BFLOAT16, to which it is rounded to nearest even. Default: float32.
    pub dense_dtype: i32,
    /// 1 to count only GPU kernels as kernels, as TorchSharp.Q4.Extension does: on the CPU the kernel-only path is then an
    /// error, and the other paths decode. Default: 0.
    pub exclude_cpu_kernels: i32,
    /// Must be 0.
    pub reserved: i32,
    /// The name of the backend to insist on, in UTF-8, or NULL for any. Default: NULL.
    pub backend: *const c_char,
    /// Bytes of `backend`.
    pub backend_length: usize,
}

// SAFETY: integers and a pointer without padding, the first a u32 size.
unsafe impl Growing for NVFP4_WeightOptions {
    const NAME: &'static str = "NVFP4_WeightOptions";
    fn defaults() -> Self {
        NVFP4_WeightOptions {
            struct_size: size_of::<Self>() as u32,
            compute_path: NVFP4_COMPUTE_PATH_AUTO,
            device_type: NVFP4_DEVICE_CPU,
            device_index: 0,
            scale_layout: NVFP4_SCALES_LINEAR,
            dense_dtype: NVFP4_DTYPE_FLOAT32,
            exclude_cpu_kernels: 0,
            reserved: 0,
            backend: ptr::null(),
            backend_length: 0,
        }
    }
}

/// Parsed options of the caller.
struct Plan {
    request: Request,
    device: Device,
    dense: DType,
    layout: ScaleLayout,
}

impl Plan {
    /// # Safety
    /// `given`, unless NULL, must be as the header asks.
    unsafe fn read(format: WeightFormat, given: *const NVFP4_WeightOptions) -> Result<Plan> {
        // SAFETY: promised by the caller.
        let given = unsafe { options(given) }?;
        let named = match given.backend.is_null() && given.backend_length == 0 {
            true => None,
            // SAFETY: as above.
            false => Some(unsafe { text("backend", given.backend, given.backend_length) }?),
        };
        reserved(&given, given.reserved)?;
        Ok(Plan {
            request: Request {
                format,
                path: compute_path(given.compute_path)?,
                backend: named.map(Backend::from_name).transpose()?,
                exclude_cpu_kernels: flag("exclude_cpu_kernels", given.exclude_cpu_kernels)?,
            },
            dense: choice(
                "dense_dtype",
                given.dense_dtype,
                &[
                    (NVFP4_DTYPE_FLOAT32, "float32", DType::F32),
                    (NVFP4_DTYPE_FLOAT16, "float16", DType::F16),
                    (NVFP4_DTYPE_BFLOAT16, "bfloat16", DType::BF16),
                ],
            )?,
            layout: layout(given.scale_layout)?,
            device: device_of(given.device_type, given.device_index, shared::device)?,
        })
    }

    /// Moves the plan to the CUDA device whose memory holds `codes`, if they are on one.
    fn at(self, codes: &Tensor) -> Result<Plan> {
        Ok(Plan {
            device: tensors::device_of(codes, || Ok(self.device))?,
            ..self
        })
    }

    fn choose(&self) -> Result<Choice> {
        backend::choose(&self.request, &self.device)
    }

    fn report(&self, choice: &Choice) -> Value {
        json!({
            "format": self.request.format.name(),
            "backend": choice.backend.name(),
            "path": self.request.path.name(),
            "device": self.device.name(),
            "fallback_reason": choice.fallback_reason,
        })
    }

    /// Prepares the weight with the chosen backend, and reports the choice.
    fn prepare(self, make: impl FnOnce(&Plan, Backend) -> Result<Linear>) -> Result<Weight> {
        let choice = self.choose()?;
        if let Some(reason) = &choice.fallback_reason {
            tracing::warn!("a weight falls back to {}: {reason}", choice.backend.name());
        }
        Ok(Weight {
            linear: make(&self, choice.backend)?,
            report: self.report(&choice),
            device: self.device,
        })
    }

    fn nvfp4(self, q: &Nvfp4Tensor) -> Result<Weight> {
        self.prepare(|plan, backend| tensors::weight_for(&plan.device, q, backend, plan.dense))
    }
}

fn compute_path(value: i32) -> Result<ComputePath> {
    choice(
        "compute_path",
        value,
        &[
            (NVFP4_COMPUTE_PATH_AUTO, "auto", ComputePath::Auto),
            (
                NVFP4_COMPUTE_PATH_KERNEL_ONLY,
                "kernel only",
                ComputePath::KernelOnly,
            ),
            (
                NVFP4_COMPUTE_PATH_KERNEL_OR_FALLBACK,
                "kernel or fallback",
                ComputePath::KernelOrFallback,
            ),
            (
                NVFP4_COMPUTE_PATH_DEQUANT_MATMUL_ONLY,
                "dequant-matmul only",
                ComputePath::DequantMatmulOnly,
            ),
        ],
    )
}

/// Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_WeightOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_weight_options_init(
    options: *mut NVFP4_WeightOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_weight_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_WeightOptions::defaults()) }
    })
}

/// Says as JSON which backend a weight of `format` (#NVFP4_FORMAT_NVFP4 or #NVFP4_FORMAT_NF4) would get with these options,
/// or fails as preparing it would. `options`: NULL for the defaults.
///
/// - "format": "nvfp4" or "nf4".
/// - "backend": "nvfp4-kernel", "nf4-kernel" or "dequant-matmul".
/// - "path": "Auto", "KernelOnly", "KernelOrFallback" or "DequantMatmulOnly".
/// - "device": its name, as in NVFP4_diagnose().
/// - "fallback_reason": why it is not the kernel of the format, if that was wanted but could not be chosen; else null.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_backend_select(
    format: i32,
    options: *const NVFP4_WeightOptions,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_backend_select", || {
        let format = choice(
            "format",
            format,
            &[
                (NVFP4_FORMAT_NVFP4, "NVFP4", WeightFormat::Nvfp4),
                (NVFP4_FORMAT_NF4, "NF4", WeightFormat::Nf4),
            ],
        )?;
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let plan = Plan::read(format, options)?;
            let report = plan.report(&plan.choose()?).to_string();
            copy_text(&report, buffer, capacity, length)
        }
    })
}

/// Prepares the NVFP4 weight `[N, K]` for products: copies it in the order that the kernels read. The tensors may be
/// released afterwards. The weight is on the CPU, or on the CUDA device whose memory the tensors are in. The parameters are
/// those of NVFP4_tensor_dequantize(). NVFP4_weight_create_nvfp4() is the same with options.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_weight_create(
    codes: *const NVFP4_Tensor,
    scales: *const NVFP4_Tensor,
    global_scale: f32,
    scale_layout: i32,
    out: *mut *mut NVFP4_Weight,
) -> NVFP4_Status {
    enter("NVFP4_weight_create", || {
        // SAFETY: the pointer is as the header asks; NULL options are the defaults.
        let (out, plan) = unsafe {
            (
                Out::new("out", out)?,
                Plan::read(WeightFormat::Nvfp4, ptr::null())?,
            )
        };
        let q = parts(
            ["codes", "scales"],
            codes,
            scales,
            global_scale,
            layout(scale_layout)?,
        )?;
        let plan = plan.at(&q.codes)?;
        out.set(handle::insert(Arc::new(plan.nvfp4(&q)?)));
        Ok(())
    })
}

/// Prepares the NVFP4 weight `[N, K]` for products, as `options` say. NULL stands for the defaults, with the CUDA device
/// whose memory the tensors are in, if they are on one. The tensors may be released afterwards. A decoded weight takes 16
/// or 32 bits for each value: see NVFP4_weight_size().
///
/// - `codes`, `scales`, `global_scale`: as NVFP4_tensor_dequantize() takes them.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_weight_create_nvfp4(
    codes: *const NVFP4_Tensor,
    scales: *const NVFP4_Tensor,
    global_scale: f32,
    options: *const NVFP4_WeightOptions,
    out: *mut *mut NVFP4_Weight,
) -> NVFP4_Status {
    enter("NVFP4_weight_create_nvfp4", || {
        // SAFETY: the pointers are as the header asks.
        let (out, plan) = unsafe {
            (
                Out::new("out", out)?,
                Plan::read(WeightFormat::Nvfp4, options)?,
            )
        };
        let q = parts(
            ["codes", "scales"],
            codes,
            scales,
            global_scale,
            plan.layout,
        )?;
        let plan = match options.is_null() {
            true => plan.at(&q.codes)?,
            false => plan,
        };
        out.set(handle::insert(Arc::new(plan.nvfp4(&q)?)));
        Ok(())
    })
}

/// Prepares the NF4 weight `[n, k]`, whose tensors are in host memory, for products, as `options` say; NULL for the
/// defaults. `k` must be a multiple of 16. The tensors may be released afterwards. In this version no device has a kernel
/// for NF4: the weight is decoded to 16 or 32 bits for each value, or refused if the compute path is kernel-only.
///
/// - `codes`: uint8, `n * k / 2` elements in any shape, the first code of a byte in the high nibble.
/// - `absmax`: of a floating type, one scale for each `block` values of the flattened weight.
/// - `quant_map`: the 16 values of the codes; NULL takes the standard ones.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_weight_create_nf4(
    codes: *const NVFP4_Tensor,
    absmax: *const NVFP4_Tensor,
    quant_map: *const NVFP4_Tensor,
    block: i64,
    n: i64,
    k: i64,
    options: *const NVFP4_WeightOptions,
    out: *mut *mut NVFP4_Weight,
) -> NVFP4_Status {
    enter("NVFP4_weight_create_nf4", || {
        // SAFETY: the pointers are as the header asks.
        let (out, plan) = unsafe {
            (
                Out::new("out", out)?,
                Plan::read(WeightFormat::Nf4, options)?,
            )
        };
        let q = nf4_parts(codes, absmax, quant_map, block)?;
        let size = (count("n", n)?, count("k", k)?);
        let weight = plan.prepare(|plan, backend| {
            tensors::nf4_weight_for(&plan.device, &q, size, backend, plan.dense)
        })?;
        out.set(handle::insert(Arc::new(weight)));
        Ok(())
    })
}

/// Prepares the dense weight `[N, K]` of a floating type for products, on the CPU or on the CUDA device whose memory it is in. K
/// must be a multiple of 16.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_weight_create_dense(
    weight: *const NVFP4_Tensor,
    out: *mut *mut NVFP4_Weight,
) -> NVFP4_Status {
    enter("NVFP4_weight_create_dense", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        let tensor = handle::get::<Tensor>("weight", weight)?;
        let device = tensors::device_of(&tensor, shared::device)?;
        let linear = tensors::dense_weight(&device, &tensor)?;
        let report = json!({
            "format": "dense",
            "backend": "dense-matmul",
            "path": null,
            "device": device.name(),
            "fallback_reason": null,
        });
        out.set(handle::insert(Arc::new(Weight {
            linear,
            device,
            report,
        })));
        Ok(())
    })
}

/// Describes a prepared weight and its backend, as JSON: the keys of NVFP4_backend_select(), and "n", "k", "stored"
/// ("nvfp4", "f32", "f16" or "bf16") and "bytes" in memory. A weight of NVFP4_weight_create_dense() has format "dense",
/// backend "dense-matmul" and no path. Later versions may add keys.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_weight_report(
    weight: *const NVFP4_Weight,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_weight_report", || {
        let report = handle::get::<Weight>("weight", weight)?
            .report()
            .to_string();
        // SAFETY: the pointers are as the header asks.
        unsafe { copy_text(&report, buffer, capacity, length) }
    })
}

/// Adds a reference to a weight.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_weight_retain(weight: *mut NVFP4_Weight) -> NVFP4_Status {
    enter("NVFP4_weight_retain", || {
        handle::retain::<Weight>("weight", weight)
    })
}

/// Gives up a reference to a weight. After the last one the handle is stale.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_weight_release(weight: *mut NVFP4_Weight) -> NVFP4_Status {
    enter_to_free("NVFP4_weight_release", || {
        handle::release::<Weight>("weight", weight)
    })
}

/// Writes a weight's N (output features), K (input features) and bytes in memory.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_weight_size(
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

/// Multiplies `input` `[.., K]` by `weight` `[N, K]` transposed, accumulating in float.
///
/// - `input`: of a floating type, any strides; in host memory, or in the memory of the weight's CUDA device.
/// - `activations`: one of NVFP4_ACTIVATIONS_*.
/// - `dtype`: the floating type of the result `[.., N]`, which is in the memory that the input is in.
///
/// The call does not wait for the CUDA device if the input is on it. On the CPU, a row of the result has the same bits
/// whatever other rows are in the call, and on any number of threads. On a GPU the same call on the same machine gives the
/// same bits.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_linear(
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
/// The result is the product of the exact decoded values, accumulated in float; only the order of summation is unspecified.
/// NVFP4_scaled_mm() is the same without global scales. The tensors are as for NVFP4_tensor_dequantize().
///
/// All four tensors must be in the same place, and the result is there too. On a CUDA device the call does not wait: scales
/// that are NaN or negative fail a later call, see ASYNCHRONOUS ERRORS above. Codes and scales that are not contiguous, or
/// not aligned to 16 and 4 bytes, are copied first.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_matmul(
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
            layout(scale_layout)?,
        )?;
        let b = parts(
            ["b_codes", "b_scales"],
            b_codes,
            b_scales,
            b_global_scale,
            layout(scale_layout)?,
        )?;
        let dtype = DType::from_code(dtype)?;
        let device = tensors::device_of(&a.codes, shared::device)?;
        let tensor = shared::with_workspace(|ws| tensors::scaled_mm(&device, &a, &b, dtype, ws))?;
        out.set(handle::insert(Arc::new(tensor)));
        Ok(())
    })
}
