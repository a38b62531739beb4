//! Number formats: NVFP4 and NF4, both ways.
//!
//! An NVFP4 tensor has three parts: 4-bit codes (E2M1), two to a byte with the even index in the low nibble; block scales
//! (E4M3), one for each 16 values along the last dimension K; and one float, the global scale. A value is code x block
//! scale x global scale. NVFP4 is converted where its tensors are, on the CPU or on a GPU; NF4 on the CPU only, in host
//! memory.

use std::sync::Arc;

use super::arguments::{Growing, Out, choice, count, fill, options, sizes};
use super::call::{NVFP4_CallOptions, watched};
use super::guard::enter;
use super::handle;
use super::shared;
use super::status::NVFP4_Status;
use super::tensor::NVFP4_Tensor;
use crate::base::error::{Result, bail};
use crate::format::Rounding;
use crate::format::nvfp4::{Levels, NonFinite, QuantizeOptions, Recipe};
use crate::ops::ste;
use crate::ops::tensors::{self, Nf4Tensor, Nvfp4Tensor, ScaleLayout};
use crate::tensor::{DType, Tensor};

/// Two levels of scales: a global scale for the whole tensor, and the block scales.
pub const NVFP4_LEVELS_TWO: i32 = 0;
/// Block scales alone; the global scale is 1.
pub const NVFP4_LEVELS_SINGLE: i32 = 1;
/// The single-level rule of NVFP4_quantize().
pub const NVFP4_LEVELS_LEGACY: i32 = 2;

/// The largest magnitude of a block becomes 6.
pub const NVFP4_RECIPE_AMAX: i32 = 0;
/// The largest magnitude of a block becomes 6 or 4, whichever has the smaller squared error.
pub const NVFP4_RECIPE_FOUR_OVER_SIX: i32 = 1;
/// Each block takes the scale, of all E4M3 scales, with the smallest squared error.
pub const NVFP4_RECIPE_SWEEP: i32 = 2;

/// To the nearest code; a tie goes to the even one, as in the hardware.
pub const NVFP4_ROUNDING_NEAREST_EVEN: i32 = 0;
/// To the nearest code; a tie goes away from zero.
pub const NVFP4_ROUNDING_HALF_AWAY: i32 = 1;
/// Randomly up or down, so that the expected result is the value. The seed makes it repeatable.
pub const NVFP4_ROUNDING_STOCHASTIC: i32 = 2;

/// NaN and infinity are errors that name the first index.
pub const NVFP4_NONFINITE_ERROR: i32 = 0;
/// NaN counts as 0, and infinity as the largest value that fits.
pub const NVFP4_NONFINITE_SATURATE: i32 = 1;

/// Scales row-major, `[.., K / 16]`.
pub const NVFP4_SCALES_LINEAR: i32 = 0;
/// Scales in the 128 x 4 tiles that tensor cores read, padded with zeros, as a tensor of one dimension.
pub const NVFP4_SCALES_SWIZZLED: i32 = 1;

/// How to quantize. Fill with NVFP4_quantize_options_init(), then change what is to differ.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_QuantizeOptions {
    /// sizeof(NVFP4_QuantizeOptions) as the caller knows it.
    pub struct_size: u32,
    /// One of NVFP4_LEVELS_*. Default: two.
    pub levels: i32,
    /// One of NVFP4_RECIPE_*. Default: amax.
    pub recipe: i32,
    /// One of NVFP4_ROUNDING_*. Default: to nearest even.
    pub rounding: i32,
    /// One of NVFP4_NONFINITE_*. Default: error.
    pub nonfinite: i32,
    /// One of NVFP4_SCALES_*. Default: linear.
    pub scale_layout: i32,
    /// Seed of stochastic rounding. Default: 0.
    pub seed: u64,
    /// Cancels NVFP4_tensor_quantize() and reports its progress, in values. Must be NULL where a model is loaded or
    /// converted, which has one in its own options. Default: NULL.
    pub call: *const NVFP4_CallOptions,
}

// SAFETY: integers and a pointer without padding, the first a u32 size.
unsafe impl Growing for NVFP4_QuantizeOptions {
    const NAME: &'static str = "NVFP4_QuantizeOptions";
    fn defaults() -> Self {
        NVFP4_QuantizeOptions {
            struct_size: size_of::<Self>() as u32,
            levels: NVFP4_LEVELS_TWO,
            recipe: NVFP4_RECIPE_AMAX,
            rounding: NVFP4_ROUNDING_NEAREST_EVEN,
            nonfinite: NVFP4_NONFINITE_ERROR,
            scale_layout: NVFP4_SCALES_LINEAR,
            seed: 0,
            call: std::ptr::null(),
        }
    }
}

/// The recipe for one of NVFP4_RECIPE_*.
pub(super) fn recipe_of(name: &str, value: i32) -> Result<Recipe> {
    choice(
        name,
        value,
        &[
            (NVFP4_RECIPE_AMAX, "amax", Recipe::Amax),
            (
                NVFP4_RECIPE_FOUR_OVER_SIX,
                "four-over-six",
                Recipe::FourOverSix,
            ),
            (NVFP4_RECIPE_SWEEP, "sweep", Recipe::Sweep),
        ],
    )
}

impl NVFP4_QuantizeOptions {
    /// The options for loading or converting a model, where `call` is in the other options.
    pub(super) fn read_for_model(&self) -> Result<QuantizeOptions> {
        if !self.call.is_null() {
            bail!(
                InvalidArgument,
                "NVFP4_QuantizeOptions.call is for tensors; leave it NULL and set the one of the other options"
            );
        }
        Ok(self.read()?.0)
    }

    pub(super) fn read(&self) -> Result<(QuantizeOptions, ScaleLayout)> {
        let options = QuantizeOptions {
            levels: choice(
                "levels",
                self.levels,
                &[
                    (NVFP4_LEVELS_TWO, "two", Levels::Two),
                    (NVFP4_LEVELS_SINGLE, "single", Levels::Single),
                    (NVFP4_LEVELS_LEGACY, "legacy", Levels::Legacy),
                ],
            )?,
            recipe: recipe_of("recipe", self.recipe)?,
            rounding: choice(
                "rounding",
                self.rounding,
                &[
                    (
                        NVFP4_ROUNDING_NEAREST_EVEN,
                        "nearest even",
                        Rounding::NearestEven,
                    ),
                    (NVFP4_ROUNDING_HALF_AWAY, "half away", Rounding::HalfAway),
                    (
                        NVFP4_ROUNDING_STOCHASTIC,
                        "stochastic",
                        Rounding::Stochastic,
                    ),
                ],
            )?,
            nonfinite: choice(
                "nonfinite",
                self.nonfinite,
                &[
                    (NVFP4_NONFINITE_ERROR, "error", NonFinite::Error),
                    (NVFP4_NONFINITE_SATURATE, "saturate", NonFinite::Saturate),
                ],
            )?,
            seed: self.seed,
        };
        options.check()?;
        Ok((options, layout(self.scale_layout)?))
    }
}

pub(super) fn layout(value: i32) -> Result<ScaleLayout> {
    choice(
        "scale_layout",
        value,
        &[
            (NVFP4_SCALES_LINEAR, "linear", ScaleLayout::Linear),
            (NVFP4_SCALES_SWIZZLED, "swizzled", ScaleLayout::Swizzled),
        ],
    )
}

/// Assembles an NVFP4 tensor from its parts.
pub(super) fn parts(
    names: [&str; 2],
    codes: *const NVFP4_Tensor,
    scales: *const NVFP4_Tensor,
    global_scale: f32,
    layout: ScaleLayout,
) -> Result<Nvfp4Tensor> {
    Ok(Nvfp4Tensor {
        codes: Tensor::clone(&*handle::get::<Tensor>(names[0], codes)?),
        scales: Tensor::clone(&*handle::get::<Tensor>(names[1], scales)?),
        global: global_scale,
        layout,
    })
}

/// Assembles an NF4 tensor from its parts.
pub(super) fn nf4_parts(
    codes: *const NVFP4_Tensor,
    absmax: *const NVFP4_Tensor,
    quant_map: *const NVFP4_Tensor,
    block: i64,
) -> Result<Nf4Tensor> {
    Ok(Nf4Tensor {
        codes: Tensor::clone(&*handle::get::<Tensor>("codes", codes)?),
        absmax: Tensor::clone(&*handle::get::<Tensor>("absmax", absmax)?),
        map: match quant_map.is_null() {
            true => None,
            false => Some(Tensor::clone(&*handle::get::<Tensor>(
                "quant_map",
                quant_map,
            )?)),
        },
        block: count("block", block)?,
    })
}

/// Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_QuantizeOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_quantize_options_init(
    options: *mut NVFP4_QuantizeOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_quantize_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_QuantizeOptions::defaults()) }
    })
}

/// Quantizes a tensor along its last dimension K to NVFP4.
///
/// - `input`: `[.., K]` of a floating type, any strides; K a multiple of 16. On a GPU not float64.
/// - `options`: NULL for the defaults.
/// - `codes`: uint8 `[.., K / 2]`.
/// - `scales`: float8_e4m3fn `[.., K / 16]`, or one dimension if swizzled.
/// - `global_scale`: the global scale; 1 with a single level.
///
/// A tensor on a GPU is quantized there, to the same bits as on the CPU: in one pass for a single level, in two for two
/// levels, and after a copy if its rows are unevenly spaced or not aligned to 16 bytes. With two levels the call waits for
/// the global scale, and fails itself if a value is not finite. With a single level it does not wait, and a later call
/// fails: see ASYNCHRONOUS ERRORS above.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_quantize(
    input: *const NVFP4_Tensor,
    options: *const NVFP4_QuantizeOptions,
    codes: *mut *mut NVFP4_Tensor,
    scales: *mut *mut NVFP4_Tensor,
    global_scale: *mut f32,
) -> NVFP4_Status {
    enter("NVFP4_tensor_quantize", || {
        // SAFETY: the pointers are as the header asks.
        let (codes, scales, global_scale, options) = unsafe {
            (
                Out::new("codes", codes)?,
                Out::new("scales", scales)?,
                Out::new("global_scale", global_scale)?,
                self::options(options)?,
            )
        };
        let call = options.call;
        let (options, layout) = options.read()?;
        let input = handle::get::<Tensor>("input", input)?;
        let device = tensors::device_of(&input, shared::device)?;
        let quantized = || tensors::quantize(&device, &input, &options, layout);
        // SAFETY: the pointer is as the header asks.
        let q = unsafe { watched(call, quantized) }?;
        codes.set(handle::insert(Arc::new(q.codes)));
        scales.set(handle::insert(Arc::new(q.scales)));
        global_scale.set(q.global);
        Ok(())
    })
}

/// Dequantizes NVFP4 to `[.., K]` of the floating type `dtype`: code x block scale x global_scale, exactly, then rounded to float and to
/// `dtype`. On a CUDA device the call waits until the scales have been checked, but not for the values.
///
/// - `codes`: uint8 or float4_e2m1fn_x2 `[.., K / 2]`.
/// - `scales`: float8_e4m3fn, or uint8 holding its bytes, in the layout `scale_layout`, one of NVFP4_SCALES_*. A scale that
///   is NaN or negative is an error.
/// - `global_scale`: finite and not negative.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_dequantize(
    codes: *const NVFP4_Tensor,
    scales: *const NVFP4_Tensor,
    global_scale: f32,
    scale_layout: i32,
    dtype: i32,
    out: *mut *mut NVFP4_Tensor,
) -> NVFP4_Status {
    enter("NVFP4_tensor_dequantize", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        let q = parts(
            ["codes", "scales"],
            codes,
            scales,
            global_scale,
            layout(scale_layout)?,
        )?;
        let dtype = DType::from_code(dtype)?;
        let device = tensors::device_of(&q.codes, shared::device)?;
        let tensor = tensors::dequantize(&device, &q, dtype)?;
        out.set(handle::insert(Arc::new(tensor)));
        Ok(())
    })
}

/// Quantizes a tensor, flattened, to NF4 in the layout of bitsandbytes: blocks of `block` values (64 is usual), two codes
/// to a byte, the first in the high nibble. The tensor is in host memory and has n values.
///
/// - `codes`: uint8 `[ceil(n / 2)]`.
/// - `absmax`: float32 `[ceil(n / block)]`, the largest magnitude of each block.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_quantize_nf4(
    input: *const NVFP4_Tensor,
    block: i64,
    codes: *mut *mut NVFP4_Tensor,
    absmax: *mut *mut NVFP4_Tensor,
) -> NVFP4_Status {
    enter("NVFP4_tensor_quantize_nf4", || {
        // SAFETY: the pointers are as the header asks.
        let (codes, absmax) = unsafe { (Out::new("codes", codes)?, Out::new("absmax", absmax)?) };
        let input = handle::get::<Tensor>("input", input)?;
        let (c, a) = tensors::quantize_nf4(&input, count("block", block)?)?;
        codes.set(handle::insert(Arc::new(c)));
        absmax.set(handle::insert(Arc::new(a)));
        Ok(())
    })
}

/// Dequantizes NF4, in host memory, to a tensor of the given shape and floating type. `codes` and `absmax` are as
/// NVFP4_tensor_quantize_nf4() writes them. `quant_map` holds the 16 values of the codes; NULL for the standard ones.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_dequantize_nf4(
    codes: *const NVFP4_Tensor,
    absmax: *const NVFP4_Tensor,
    quant_map: *const NVFP4_Tensor,
    block: i64,
    shape: *const i64,
    rank: i32,
    dtype: i32,
    out: *mut *mut NVFP4_Tensor,
) -> NVFP4_Status {
    enter("NVFP4_tensor_dequantize_nf4", || {
        // SAFETY: the pointers are as the header asks.
        let (out, shape) = unsafe { (Out::new("out", out)?, sizes("shape", shape, rank)?) };
        let q = nf4_parts(codes, absmax, quant_map, block)?;
        let tensor = tensors::dequantize_nf4(&q, &shape, DType::from_code(dtype)?)?;
        out.set(handle::insert(Arc::new(tensor)));
        Ok(())
    })
}

/// Reorders row-major block scales `[rows, K / 16]` to #NVFP4_SCALES_SWIZZLED.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_scales_swizzle(
    scales: *const NVFP4_Tensor,
    out: *mut *mut NVFP4_Tensor,
) -> NVFP4_Status {
    enter("NVFP4_scales_swizzle", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        let tensor = tensors::swizzle_scales(&*handle::get::<Tensor>("scales", scales)?)?;
        out.set(handle::insert(Arc::new(tensor)));
        Ok(())
    })
}

/// Reorders swizzled block scales to row-major `[rows, k_blocks]`, where k_blocks is K / 16.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_scales_unswizzle(
    scales: *const NVFP4_Tensor,
    rows: i64,
    k_blocks: i64,
    out: *mut *mut NVFP4_Tensor,
) -> NVFP4_Status {
    enter("NVFP4_scales_unswizzle", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        let tensor = tensors::unswizzle_scales(
            &*handle::get::<Tensor>("scales", scales)?,
            count("rows", rows)?,
            count("k_blocks", k_blocks)?,
        )?;
        out.set(handle::insert(Arc::new(tensor)));
        Ok(())
    })
}

/// Quantizes a weight `[.., K]` for training in 4 bits, with block scales alone: NVFP4_quantize() with a status. `qdata`
/// and `scale` are described there.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_quantize_packed(
    weight: *const NVFP4_Tensor,
    qdata: *mut *mut NVFP4_Tensor,
    scale: *mut *mut NVFP4_Tensor,
) -> NVFP4_Status {
    enter("NVFP4_quantize_packed", || {
        // SAFETY: the pointers are as the header asks.
        let (qdata, scale) = unsafe { (Out::new("qdata", qdata)?, Out::new("scale", scale)?) };
        let weight = handle::get::<Tensor>("weight", weight)?;
        let device = tensors::device_of(&weight, shared::device)?;
        let packed = ste::quantize_packed(&device, &weight)?;
        qdata.set(handle::insert(Arc::new(packed.codes)));
        scale.set(handle::insert(Arc::new(packed.scales)));
        Ok(())
    })
}

/// Dequantizes the result of NVFP4_quantize_packed() to `[.., K]` of the floating type `dtype`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_dequantize_packed(
    qdata: *const NVFP4_Tensor,
    scale: *const NVFP4_Tensor,
    dtype: i32,
    out: *mut *mut NVFP4_Tensor,
) -> NVFP4_Status {
    enter("NVFP4_dequantize_packed", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        let qdata = Tensor::clone(&*handle::get::<Tensor>("qdata", qdata)?);
        let scale = Tensor::clone(&*handle::get::<Tensor>("scale", scale)?);
        let dtype = DType::from_code(dtype)?;
        let device = tensors::device_of(&qdata, shared::device)?;
        let tensor = ste::dequantize_packed(&device, qdata, scale, dtype)?;
        out.set(handle::insert(Arc::new(tensor)));
        Ok(())
    })
}

/// Rounds a weight `[.., K]` to 4 bits and back, for the forward pass of training in 4 bits: the values that
/// NVFP4_quantize_packed() stores, in the weight's own type. The gradient of these values is used unchanged as the gradient
/// of the weight (straight-through estimator).
/// - `keep`: 0 to compute the values in every call. 1 to cache them, for a weight that does not change: the first call computes
///   them and waits, and later calls return a handle of the same tensor, which must not be written. They are kept as long as the
///   weight's memory lives, or until NVFP4_ste_clear().
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_ste_weight(
    weight: *const NVFP4_Tensor,
    keep: i32,
    out: *mut *mut NVFP4_Tensor,
) -> NVFP4_Status {
    enter("NVFP4_ste_weight", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        let weight = handle::get::<Tensor>("weight", weight)?;
        let device = tensors::device_of(&weight, shared::device)?;
        let values = match keep {
            0 => ste::weight(&device, &weight)?,
            _ => shared::EVAL_WEIGHTS.weight(&device, &weight)?,
        };
        out.set(handle::insert(Arc::new(values)));
        Ok(())
    })
}

/// Drops the values that NVFP4_ste_weight() has cached: call it when weights have changed. NVFP4_empty_cache() drops those
/// of weights that no longer exist.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn NVFP4_ste_clear() -> NVFP4_Status {
    enter("NVFP4_ste_clear", || {
        shared::EVAL_WEIGHTS.clear();
        Ok(())
    })
}
