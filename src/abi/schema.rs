//! Schemas: finding and checking the 4-bit weights in a set of named tensors.
//!
//! Only names, types and shapes are read, so hosts need not pass the tensors themselves. Recognized are NVFP4 of TorchSharp hosts (`.qdata`
//! and `.scale`, with or without `.weight` before), ModelOpt, compressed-tensors and torchao, and NF4 of TorchSharp hosts (`.weight`,
//! `.absmax` and `.quant_map`) and bitsandbytes (`.weight`, `.weight.absmax` and so on). One part suffices to find a weight; missing parts
//! are then reported as problems.

use std::ffi::c_char;

use serde_json::{Value, json};

use super::arguments::{Element, Growing, copy_text, elements, results, sizes, text};
use super::guard::enter;
use super::linear::{NVFP4_FORMAT_MIXED, NVFP4_FORMAT_NF4, NVFP4_FORMAT_NONE, NVFP4_FORMAT_NVFP4};
use super::status::NVFP4_Status;
use crate::base::Result;
use crate::base::error::err;
use crate::checkpoint::schema::{self, Format, Named, Schema, Weight};
use crate::tensor::{DType, Shape};

/// The description of a host's tensor; its elements are not needed. Later versions may add fields at the end: functions
/// that take an array of these also take the size of an element.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_NamedTensor {
    /// Its name, in UTF-8.
    pub name: *const c_char,
    /// Bytes of `name`.
    pub name_length: usize,
    /// The element type, one of NVFP4_DTYPE_*. Tensors of other types may be in the set too, but not as parts of a 4-bit
    /// weight.
    pub dtype: i32,
    /// Number of dimensions, at most 8.
    pub rank: i32,
    /// `rank` sizes, outermost first.
    pub sizes: *const i64,
}

// SAFETY: pointers and integers without padding.
unsafe impl Element for NVFP4_NamedTensor {
    const NAME: &'static str = "NVFP4_NamedTensor";
    fn defaults() -> Self {
        NVFP4_NamedTensor {
            name: std::ptr::null(),
            name_length: 0,
            dtype: 0,
            rank: 0,
            sizes: std::ptr::null(),
        }
    }
}

/// A summary of the 4-bit weights in a set of tensors. NVFP4_schema_report() has the details.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_SchemaResult {
    /// sizeof(NVFP4_SchemaResult) as the caller knows it.
    pub struct_size: u32,
    /// One of NVFP4_FORMAT_*.
    pub format: i32,
    /// Number of tensors examined: those under the prefix.
    pub tensors: usize,
    /// Number of 4-bit weights among them.
    pub weights: usize,
    /// Number of problems that NVFP4_schema_validate() would report.
    pub problems: usize,
    /// If there is exactly one weight, its output features N, or 0 if the shapes do not determine them.
    pub out_features: i64,
    /// If there is exactly one weight, its input features K, or 0 if the shapes do not determine them.
    pub in_features: i64,
    /// If there is exactly one weight, the number of values that share a scale, or 0 if the shapes do not determine it.
    pub block: i64,
}

// SAFETY: integers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_SchemaResult {
    const NAME: &'static str = "NVFP4_SchemaResult";
    fn defaults() -> Self {
        NVFP4_SchemaResult {
            struct_size: size_of::<Self>() as u32,
            format: NVFP4_FORMAT_NONE,
            tensors: 0,
            weights: 0,
            problems: 0,
            out_features: 0,
            in_features: 0,
            block: 0,
        }
    }
}

/// # Safety
/// The pointers must be as the header asks.
unsafe fn detect(
    tensors: *const NVFP4_NamedTensor,
    count: usize,
    tensor_size: usize,
    prefix: *const c_char,
    prefix_length: usize,
) -> Result<Schema> {
    // SAFETY: promised by the caller.
    let (tensors, prefix) = unsafe {
        (
            elements("tensors", tensors, count, tensor_size)?,
            text("prefix", prefix, prefix_length)?,
        )
    };
    let named: Vec<_> = tensors
        .iter()
        .enumerate()
        .map(|(i, tensor)| {
            // SAFETY: as above.
            let (name, sizes) = unsafe {
                let name = text("name", tensor.name, tensor.name_length);
                (name, sizes("sizes", tensor.sizes, tensor.rank))
            };
            let within = |e: crate::base::Error| e.within(format_args!("tensor {i}"));
            Ok(Named {
                name: name.map_err(within)?,
                dtype: DType::from_code(tensor.dtype).ok(),
                shape: sizes
                    .and_then(|sizes| Shape::contiguous(&sizes))
                    .map_err(within)?,
            })
        })
        .collect::<Result<_>>()?;
    schema::detect(&named, prefix)
}

fn summary(schema: &Schema) -> NVFP4_SchemaResult {
    let only = |value: fn(&Weight) -> Option<usize>| match &*schema.weights {
        [weight] => value(weight).map_or(0, |n| n as i64),
        _ => 0,
    };
    NVFP4_SchemaResult {
        format: match schema.format() {
            Format::None => NVFP4_FORMAT_NONE,
            Format::Nvfp4 => NVFP4_FORMAT_NVFP4,
            Format::Nf4 => NVFP4_FORMAT_NF4,
            Format::Mixed => NVFP4_FORMAT_MIXED,
        },
        tensors: schema.tensors,
        weights: schema.weights.len(),
        problems: schema.problems(),
        out_features: only(|w| w.out_features),
        in_features: only(|w| w.in_features),
        block: only(|w| w.block),
        ..NVFP4_SchemaResult::defaults()
    }
}

fn report(schema: &Schema) -> Value {
    let weights: Vec<_> = schema
        .weights
        .iter()
        .map(|w| {
            let keys: serde_json::Map<_, _> = (w.tensors.iter())
                .map(|(role, key)| ((*role).to_owned(), key.clone().into()))
                .collect();
            json!({
                "name": w.name,
                "format": w.format.name().to_ascii_lowercase(),
                "convention": w.convention,
                "keys": keys,
                "missing": w.missing,
                "extra": w.extra,
                "out_features": w.out_features,
                "in_features": w.in_features,
                "block": w.block,
                "faults": w.faults,
            })
        })
        .collect();
    json!({
        "format": schema.format().name(),
        "tensors": schema.tensors,
        "problems": schema.problems(),
        "weights": weights,
    })
}

/// Finds the 4-bit weights of a set of tensors.
///
/// - `tensors`, `count`: the set; names must be unique.
/// - `tensor_size`: sizeof(NVFP4_NamedTensor), as the caller knows it.
/// - `prefix`, `prefix_length`: examines only the tensor of this name and those whose names begin with it and a dot, such
///   as those of one layer; NULL and 0 for all.
/// - `result`: the caller sets its struct_size. A set without 4-bit weights has the format #NVFP4_FORMAT_NONE.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_schema_detect(
    tensors: *const NVFP4_NamedTensor,
    count: usize,
    tensor_size: usize,
    prefix: *const c_char,
    prefix_length: usize,
    result: *mut NVFP4_SchemaResult,
) -> NVFP4_Status {
    enter("NVFP4_schema_detect", || {
        // SAFETY: the pointers are as the header asks.
        let (result, schema) = unsafe {
            (
                results(result)?,
                detect(tensors, count, tensor_size, prefix, prefix_length)?,
            )
        };
        let result = result.ok_or_else(|| {
            err!(
                InvalidArgument,
                "result is NULL; pass where the result goes"
            )
        })?;
        result(summary(&schema));
        Ok(())
    })
}

/// Describes the 4-bit weights of a set of tensors, as JSON: "format" ("none", "nvfp4", "nf4" or "mixed"), "tensors" (their
/// number), "problems", and "weights", each with its "name", "format", "convention", "keys" by role, "missing" keys,
/// "extra" keys of its module, "out_features", "in_features", "block" (null if the shapes do not determine it) and
/// "faults". The parameters are those of NVFP4_schema_detect(). Later versions may add keys.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_schema_report(
    tensors: *const NVFP4_NamedTensor,
    count: usize,
    tensor_size: usize,
    prefix: *const c_char,
    prefix_length: usize,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_schema_report", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let schema = detect(tensors, count, tensor_size, prefix, prefix_length)?;
            copy_text(&report(&schema).to_string(), buffer, capacity, length)
        }
    })
}

/// Checks the 4-bit weights of a set of tensors: no part may be missing, and types and shapes must fit together. The
/// message lists all problems, missing tensors first. #NVFP4_NOT_FOUND if there is no 4-bit weight, #NVFP4_INVALID_ARGUMENT
/// if one has a problem. The parameters are those of NVFP4_schema_detect().
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_schema_validate(
    tensors: *const NVFP4_NamedTensor,
    count: usize,
    tensor_size: usize,
    prefix: *const c_char,
    prefix_length: usize,
) -> NVFP4_Status {
    enter("NVFP4_schema_validate", || {
        // SAFETY: the pointers are as the header asks.
        unsafe { detect(tensors, count, tensor_size, prefix, prefix_length) }?.check()
    })
}
