//! Tensors: typed, shaped views of memory.
//!
//! A tensor is immutable in type and shape and may be used by several threads at once. The host must keep its memory
//! readable and unchanged while a call uses it.
//!
//! A tensor may be in host memory, in the memory of a CUDA device, or in managed memory, which counts as a device's here.
//! Computations with it run on its device and give tensors there; a function that works on host memory alone refuses it
//! with #NVFP4_UNSUPPORTED. Calls use device memory in the order of the legacy default stream: after the work that the
//! process enqueued there before the call, and before the work that it enqueues there later. A host that uses other streams
//! waits for them before a call, and lets them wait for the default stream after it.

use std::ffi::c_void;
use std::sync::Arc;

use super::arguments::{Out, User, copy_items, count, sizes, slice_mut};
use super::guard::{enter, enter_to_free};
use super::handle::{self, Object};
use super::status::NVFP4_Status;
use crate::base::ErrorKind;
use crate::base::error::{Result, bail, err};
use crate::ops::{Device, transfer};
use crate::tensor::{
    DLManagedTensor, DLManagedTensorVersioned, DType, Managed, Release, Shape, Tensor,
};

/// A tensor. See the tensor chapter.
pub struct NVFP4_Tensor {
    _private: [u8; 0],
}

impl Object for Tensor {
    type Handle = NVFP4_Tensor;
    const NAME: &'static str = "NVFP4_Tensor";
}

/// Unsigned byte; also a pair of packed 4-bit codes. All NVFP4_DTYPE_* are libtorch's numbers.
pub const NVFP4_DTYPE_UINT8: i32 = 0;
/// Signed byte.
pub const NVFP4_DTYPE_INT8: i32 = 1;
/// 16-bit integer.
pub const NVFP4_DTYPE_INT16: i32 = 2;
/// 32-bit integer.
pub const NVFP4_DTYPE_INT32: i32 = 3;
/// 64-bit integer.
pub const NVFP4_DTYPE_INT64: i32 = 4;
/// IEEE half precision.
pub const NVFP4_DTYPE_FLOAT16: i32 = 5;
/// IEEE single precision.
pub const NVFP4_DTYPE_FLOAT32: i32 = 6;
/// IEEE double precision.
pub const NVFP4_DTYPE_FLOAT64: i32 = 7;
/// A byte that is 0 or 1.
pub const NVFP4_DTYPE_BOOL: i32 = 11;
/// bfloat16.
pub const NVFP4_DTYPE_BFLOAT16: i32 = 15;
/// E4M3 without infinities, the type of NVFP4 block scales.
pub const NVFP4_DTYPE_FLOAT8_E4M3FN: i32 = 24;
/// A pair of E2M1 codes in one byte; an element is the pair.
pub const NVFP4_DTYPE_FLOAT4_E2M1FN_X2: i32 = 45;

/// The host's memory. All NVFP4_DEVICE_* are libtorch's numbers.
pub const NVFP4_DEVICE_CPU: i32 = 0;
/// A CUDA device, numbered from 0.
pub const NVFP4_DEVICE_CUDA: i32 = 1;
/// The library's choice of a device for a model or a weight; its index is 0 (or -1). A model gets the GPU that has room for
/// it, or else the CPU, and NVFP4_model_info() says why; a weight gets CUDA device 0 if there is one, or else the CPU.
pub const NVFP4_DEVICE_AUTO: i32 = -1;

const _: () = assert!(
    DType::U8.code() == NVFP4_DTYPE_UINT8
        && DType::I8.code() == NVFP4_DTYPE_INT8
        && DType::I16.code() == NVFP4_DTYPE_INT16
        && DType::I32.code() == NVFP4_DTYPE_INT32
        && DType::I64.code() == NVFP4_DTYPE_INT64
        && DType::F16.code() == NVFP4_DTYPE_FLOAT16
        && DType::F32.code() == NVFP4_DTYPE_FLOAT32
        && DType::F64.code() == NVFP4_DTYPE_FLOAT64
        && DType::Bool.code() == NVFP4_DTYPE_BOOL
        && DType::BF16.code() == NVFP4_DTYPE_BFLOAT16
        && DType::F8E4M3.code() == NVFP4_DTYPE_FLOAT8_E4M3FN
        && DType::F4E2M1x2.code() == NVFP4_DTYPE_FLOAT4_E2M1FN_X2
        && DType::ALL.len() == 12
);

/// Frees memory that the host lent to a tensor: called once with the data pointer and the host's user data, on the thread
/// that ends the last use of the memory.
pub type NVFP4_Deleter = Option<unsafe extern "C" fn(data: *mut c_void, user: *mut c_void)>;

/// The index of the CUDA device, or `None` for host memory.
pub(super) fn device_number(device_type: i32, device_index: i32) -> Result<Option<usize>> {
    match device_type {
        NVFP4_DEVICE_CPU if (-1..=0).contains(&device_index) => Ok(None),
        NVFP4_DEVICE_CPU => bail!(
            InvalidArgument,
            "device_index is {device_index}; the CPU has 0 (or -1)"
        ),
        NVFP4_DEVICE_CUDA => Ok(Some(cuda_number(device_index)?)),
        NVFP4_DEVICE_AUTO => bail!(
            InvalidArgument,
            "device_type is -1, the library's choice, which NVFP4_LoadOptions and NVFP4_WeightOptions take; a tensor takes 0 (CPU) \
             or 1 (CUDA)"
        ),
        _ => bail!(
            InvalidArgument,
            "device_type is {device_type}; a tensor takes 0 (CPU) or 1 (CUDA)"
        ),
    }
}

/// The number of a CUDA device.
pub(super) fn cuda_number(device_index: i32) -> Result<usize> {
    usize::try_from(device_index).map_err(|_| {
        err!(
            InvalidArgument,
            "device_index is {device_index}; CUDA devices are numbered from 0"
        )
    })
}

/// Calls the host's deleter when the memory is no longer used.
fn release(deleter: NVFP4_Deleter, data: *mut c_void, user: *mut c_void) -> Option<Release> {
    deleter.map(|deleter| -> Release {
        let (data, user) = (User(data), User(user));
        Box::new(move || {
            let (User(data), User(user)) = ({ data }, { user });
            // SAFETY: the host gave the deleter for this memory, and it is called once.
            unsafe { deleter(data, user) };
        })
    })
}

/// Makes a tensor over the host's memory, without a copy.
///
/// - `data`: the first element, aligned to its type. The library only reads it; it is not const because NVFP4_tensor_data()
///   and DLPack hand it out for writing. NVFP4_tensor_from_host_read_only() is for memory that must not be written.
/// - `shape`, `rank`: the sizes, outermost first, and their number, at most 8; NULL and 0 for a scalar.
/// - `strides`: `rank` strides in elements, none negative, or NULL for a contiguous row-major tensor.
/// - `dtype`: one of NVFP4_DTYPE_*.
/// - `deleter`, `user`: the deleter is called as deleter(data, user) when the library no longer uses the memory. That may
///   be after the release of the tensor, because other objects may share it. NULL if the memory outlives every use. Not
///   called if this function fails.
/// - `out`: the tensor, one reference for the caller.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_from_host(
    data: *mut c_void,
    shape: *const i64,
    rank: i32,
    strides: *const i64,
    dtype: i32,
    deleter: NVFP4_Deleter,
    user: *mut c_void,
    out: *mut *mut NVFP4_Tensor,
) -> NVFP4_Status {
    enter("NVFP4_tensor_from_host", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let out = Out::new("out", out)?;
            let shape = read_shape(shape, rank, strides)?;
            let tensor = from_host(data, shape, dtype, deleter, user)?;
            out.set(handle::insert(Arc::new(tensor)));
        }
        Ok(())
    })
}

/// As NVFP4_tensor_from_host(), over memory that must not be written: the tensor and its views are read-only, which
/// NVFP4_tensor_is_read_only() and NVFP4_tensor_to_dlpack_versioned() report.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_from_host_read_only(
    data: *const c_void,
    shape: *const i64,
    rank: i32,
    strides: *const i64,
    dtype: i32,
    deleter: NVFP4_Deleter,
    user: *mut c_void,
    out: *mut *mut NVFP4_Tensor,
) -> NVFP4_Status {
    enter("NVFP4_tensor_from_host_read_only", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let out = Out::new("out", out)?;
            let shape = read_shape(shape, rank, strides)?;
            let tensor = from_host(data.cast_mut(), shape, dtype, deleter, user)?.into_read_only();
            out.set(handle::insert(Arc::new(tensor)));
        }
        Ok(())
    })
}

/// # Safety
/// As for [`Tensor::lent`], with `deleter` to release the memory.
unsafe fn from_host(
    data: *mut c_void,
    shape: Shape,
    dtype: i32,
    deleter: NVFP4_Deleter,
    user: *mut c_void,
) -> Result<Tensor> {
    let dtype = DType::from_code(dtype)?;
    let release = release(deleter, data, user);
    // SAFETY: promised by the caller.
    unsafe { Tensor::lent(data.cast(), shape, dtype, release) }
}

/// Makes a tensor over memory of the CUDA device `device_index`, or over managed memory for it, without a copy. The
/// parameters are those of NVFP4_tensor_from_host(), with `data` an address on the device. When `deleter` is called, the
/// library's work with the memory may still be running, but comes before anything that is enqueued on the legacy default
/// stream from then on.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_from_device(
    data: *mut c_void,
    shape: *const i64,
    rank: i32,
    strides: *const i64,
    dtype: i32,
    device_index: i32,
    deleter: NVFP4_Deleter,
    user: *mut c_void,
    out: *mut *mut NVFP4_Tensor,
) -> NVFP4_Status {
    enter("NVFP4_tensor_from_device", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let out = Out::new("out", out)?;
            let shape = read_shape(shape, rank, strides)?;
            let dtype = DType::from_code(dtype)?;
            let ordinal = cuda_number(device_index)?;
            let release = release(deleter, data, user);
            let tensor = transfer::lent(ordinal, data.addr() as u64, shape, dtype, release)?;
            out.set(handle::insert(Arc::new(tensor)));
        }
        Ok(())
    })
}

/// # Safety
/// As for `arguments::slice`.
unsafe fn read_shape(shape: *const i64, rank: i32, strides: *const i64) -> Result<Shape> {
    // SAFETY: promised by the caller.
    unsafe {
        let shape = sizes("shape", shape, rank)?;
        match strides.is_null() {
            true => Shape::contiguous(&shape),
            false => Shape::strided(&shape, &sizes("strides", strides, rank)?),
        }
    }
}

/// Makes a contiguous tensor of zeros in the library's own memory, aligned to at least 64 bytes: on the host
/// (#NVFP4_DEVICE_CPU and 0) or on a CUDA device (#NVFP4_DEVICE_CUDA and its number).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_empty(
    shape: *const i64,
    rank: i32,
    dtype: i32,
    device_type: i32,
    device_index: i32,
    out: *mut *mut NVFP4_Tensor,
) -> NVFP4_Status {
    enter("NVFP4_tensor_empty", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let out = Out::new("out", out)?;
            let device = device_number(device_type, device_index)?;
            let sizes = sizes("shape", shape, rank)?;
            let tensor = transfer::zeros(&sizes, DType::from_code(dtype)?, device)?;
            out.set(handle::insert(Arc::new(tensor)));
        }
        Ok(())
    })
}

/// Copies a tensor, wherever it is, to host memory or to the memory of a CUDA device, as a contiguous row-major tensor.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_copy_to_device(
    tensor: *const NVFP4_Tensor,
    device_type: i32,
    device_index: i32,
    out: *mut *mut NVFP4_Tensor,
) -> NVFP4_Status {
    enter("NVFP4_tensor_copy_to_device", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        let tensor = handle::get::<Tensor>("tensor", tensor)?;
        let copy = transfer::copy(&tensor, device_number(device_type, device_index)?)?;
        out.set(handle::insert(Arc::new(copy)));
        Ok(())
    })
}

/// Waits until all work that calls have enqueued on a device has run, and fails if the device has found an error in it: see
/// ASYNCHRONOUS ERRORS above. After #NVFP4_OK the results of all earlier calls are valid. On the host (#NVFP4_DEVICE_CPU
/// and 0) there is never anything to wait for.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn NVFP4_device_synchronize(
    device_type: i32,
    device_index: i32,
) -> NVFP4_Status {
    enter("NVFP4_device_synchronize", || {
        match device_number(device_type, device_index)? {
            None => Ok(()),
            Some(ordinal) => transfer::synchronize(ordinal),
        }
    })
}

/// Makes another view of a tensor's memory, which the view keeps alive: a transpose, a slice, another shape. `offset` is in
/// elements from the first one of `tensor`; `strides`, in elements, may be NULL for contiguous row-major. A view that would
/// exceed the tensor's memory is #NVFP4_INVALID_ARGUMENT.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_view(
    tensor: *const NVFP4_Tensor,
    shape: *const i64,
    rank: i32,
    strides: *const i64,
    offset: i64,
    out: *mut *mut NVFP4_Tensor,
) -> NVFP4_Status {
    enter("NVFP4_tensor_view", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let out = Out::new("out", out)?;
            let tensor = handle::get::<Tensor>("tensor", tensor)?;
            let view = tensor.view(read_shape(shape, rank, strides)?, count("offset", offset)?)?;
            out.set(handle::insert(Arc::new(view)));
        }
        Ok(())
    })
}

/// Adds a reference to a tensor.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_retain(tensor: *mut NVFP4_Tensor) -> NVFP4_Status {
    enter("NVFP4_tensor_retain", || {
        handle::retain::<Tensor>("tensor", tensor)
    })
}

/// Gives up a reference to a tensor. After the last one the handle is stale.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_release(tensor: *mut NVFP4_Tensor) -> NVFP4_Status {
    enter_to_free("NVFP4_tensor_release", || {
        handle::release::<Tensor>("tensor", tensor)
    })
}

/// Writes the element type, one of NVFP4_DTYPE_*.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_dtype(
    tensor: *const NVFP4_Tensor,
    dtype: *mut i32,
) -> NVFP4_Status {
    enter("NVFP4_tensor_dtype", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("dtype", dtype) }?;
        out.set(handle::get::<Tensor>("tensor", tensor)?.dtype().code());
        Ok(())
    })
}

/// Writes where the memory is: one of NVFP4_DEVICE_*, and the number of the device of that type. Managed memory belongs to
/// the CUDA device that works with it; NVFP4_is_managed_tensor() recognises it.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_device(
    tensor: *const NVFP4_Tensor,
    device_type: *mut i32,
    device_index: *mut i32,
) -> NVFP4_Status {
    enter("NVFP4_tensor_device", || {
        // SAFETY: the pointers are as the header asks.
        let (device_type, device_index) = unsafe {
            (
                Out::new("device_type", device_type)?,
                Out::new("device_index", device_index)?,
            )
        };
        let place = handle::get::<Tensor>("tensor", tensor)?.place();
        let (number, index) = match place.cuda() {
            None => (NVFP4_DEVICE_CPU, 0),
            Some(ordinal) => (NVFP4_DEVICE_CUDA, ordinal as i32),
        };
        device_type.set(number);
        device_index.set(index);
        Ok(())
    })
}

fn as_i64(values: &[usize]) -> Vec<i64> {
    // A shape's sizes and strides fit in isize.
    values.iter().map(|&n| n as i64).collect()
}

/// Copies the sizes, outermost first. Writes the number of dimensions to `rank`; see ARRAYS OUT above.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_shape(
    tensor: *const NVFP4_Tensor,
    shape: *mut i64,
    capacity: usize,
    rank: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_tensor_shape", || {
        let tensor = handle::get::<Tensor>("tensor", tensor)?;
        // SAFETY: the pointers are as the header asks.
        unsafe { copy_items(&as_i64(tensor.shape().sizes()), shape, capacity, rank) }
    })
}

/// Copies the strides in elements. Writes the number of dimensions to `rank`; see ARRAYS OUT above.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_strides(
    tensor: *const NVFP4_Tensor,
    strides: *mut i64,
    capacity: usize,
    rank: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_tensor_strides", || {
        let tensor = handle::get::<Tensor>("tensor", tensor)?;
        // SAFETY: the pointers are as the header asks.
        unsafe { copy_items(&as_i64(tensor.shape().strides()), strides, capacity, rank) }
    })
}

/// Writes the address of the first element, a device address if the memory is on a device. Valid as long as the caller has a reference to
/// the tensor. Do not write through it while a call uses the tensor, or ever if the tensor is read-only. Not to be used if the tensor has
/// no elements.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_data(
    tensor: *const NVFP4_Tensor,
    data: *mut *mut c_void,
) -> NVFP4_Status {
    enter("NVFP4_tensor_data", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("data", data) }?;
        out.set(handle::get::<Tensor>("tensor", tensor)?.data().cast());
        Ok(())
    })
}

/// Writes 1 to `read_only` if the memory must not be written, as its lender declared, else 0. The library itself never writes to a tensor
/// that it is given; results are new tensors.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_is_read_only(
    tensor: *const NVFP4_Tensor,
    read_only: *mut i32,
) -> NVFP4_Status {
    enter("NVFP4_tensor_is_read_only", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("read_only", read_only) }?;
        out.set(
            handle::get::<Tensor>("tensor", tensor)?
                .is_read_only()
                .into(),
        );
        Ok(())
    })
}

/// Writes the bytes of the elements without gaps, which NVFP4_tensor_copy_to_host() copies.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_bytes(
    tensor: *const NVFP4_Tensor,
    bytes: *mut u64,
) -> NVFP4_Status {
    enter("NVFP4_tensor_bytes", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("bytes", bytes) }?;
        out.set(handle::get::<Tensor>("tensor", tensor)?.bytes() as u64);
        Ok(())
    })
}

/// Copies the elements, from any place, to `destination` in host memory, contiguous and row-major. `bytes` must be exactly the number that
/// NVFP4_tensor_bytes() writes. From a GPU the call waits for the copy; if it then fails because of an earlier call (see ASYNCHRONOUS
/// ERRORS above), `destination` has been written.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_copy_to_host(
    tensor: *const NVFP4_Tensor,
    destination: *mut c_void,
    bytes: usize,
) -> NVFP4_Status {
    enter("NVFP4_tensor_copy_to_host", || {
        let tensor = handle::get::<Tensor>("tensor", tensor)?;
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { slice_mut("destination", destination.cast::<u8>(), bytes) }?;
        transfer::copy_to_host(&tensor, out)
    })
}

/// Converts the elements, whatever their type, to float and copies them to `destination` in host memory, contiguous and
/// row-major, as NVFP4_tensor_copy_to_host() does. `elements` must be exactly the tensor's number of elements. Packed 4-bit
/// codes cannot be converted: use NVFP4_tensor_dequantize().
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_copy_as_float(
    tensor: *const NVFP4_Tensor,
    destination: *mut f32,
    elements: usize,
) -> NVFP4_Status {
    enter("NVFP4_tensor_copy_as_float", || {
        let tensor = handle::get::<Tensor>("tensor", tensor)?;
        // SAFETY: the pointer is as the header asks.
        let destination = unsafe { slice_mut("destination", destination, elements) }?;
        if elements != tensor.shape().elements() {
            bail!(
                InvalidArgument,
                "the tensor has {} elements and the destination {elements}",
                tensor.shape().elements()
            );
        }
        transfer::copy_as_f32(&tensor, destination)
    })
}

/// Takes ownership of a DLPack tensor in host memory (kDLCPU), CUDA memory (kDLCUDA) or managed memory (kDLCUDAManaged),
/// without a copy. Its deleter is called when the library no longer uses the memory, on any thread. If this function fails,
/// the DLPack tensor stays the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_from_dlpack(
    managed: *mut DLManagedTensor,
    out: *mut *mut NVFP4_Tensor,
) -> NVFP4_Status {
    enter("NVFP4_tensor_from_dlpack", || {
        // SAFETY: the pointers are as the header asks.
        unsafe { from_dlpack(managed, out) }
    })
}

/// As NVFP4_tensor_from_dlpack(), for a versioned DLPack tensor. With the flag DLPACK_FLAG_BITMASK_READ_ONLY the tensor and its views are
/// read-only: see NVFP4_tensor_is_read_only(). #NVFP4_UNSUPPORTED for a major version other than 1 (only the version is read then), for
/// padded elements of fewer than 8 bits, and for flags that this library does not know.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_from_dlpack_versioned(
    managed: *mut DLManagedTensorVersioned,
    out: *mut *mut NVFP4_Tensor,
) -> NVFP4_Status {
    enter("NVFP4_tensor_from_dlpack_versioned", || {
        // SAFETY: the pointers are as the header asks.
        unsafe { from_dlpack(managed, out) }
    })
}

/// # Safety
/// As for `Out::new` and [`transfer::from_dlpack`].
unsafe fn from_dlpack<M: Managed>(managed: *mut M, out: *mut *mut NVFP4_Tensor) -> Result<()> {
    // SAFETY: promised by the caller.
    unsafe {
        let out = Out::new("out", out)?;
        out.set(handle::insert(Arc::new(transfer::from_dlpack(managed)?)));
    }
    Ok(())
}

/// Makes a DLPack tensor over the tensor's memory, without a copy; managed memory is exported as kDLCUDA. It keeps the
/// memory alive until its consumer calls its deleter, which may be after the release of `tensor`. A read-only tensor is
/// #NVFP4_UNSUPPORTED, because this form of DLPack has no read-only flag.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_to_dlpack(
    tensor: *const NVFP4_Tensor,
    out: *mut *mut DLManagedTensor,
) -> NVFP4_Status {
    enter("NVFP4_tensor_to_dlpack", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { to_dlpack(tensor, out) }
    })
}

/// As NVFP4_tensor_to_dlpack(), in the versioned form, with the read-only flag if the tensor is read-only. The version is 1.0, or 1.1 for
/// float8 and float4, which 1.1 introduced.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_tensor_to_dlpack_versioned(
    tensor: *const NVFP4_Tensor,
    out: *mut *mut DLManagedTensorVersioned,
) -> NVFP4_Status {
    enter("NVFP4_tensor_to_dlpack_versioned", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { to_dlpack(tensor, out) }
    })
}

/// # Safety
/// As for `Out::new`.
unsafe fn to_dlpack<M: Managed>(tensor: *const NVFP4_Tensor, out: *mut *mut M) -> Result<()> {
    // SAFETY: promised by the caller.
    let out = unsafe { Out::new("out", out) }?;
    let tensor = handle::get::<Tensor>("tensor", tensor)?;
    out.set(Box::into_raw(Tensor::clone(&tensor).into_dlpack()?));
    Ok(())
}
/// Refuses an index other than 0 or -1, for a device type with a single device.
pub(super) fn check_only(who: &str, device_index: i32) -> Result<()> {
    match device_index {
        -1 | 0 => Ok(()),
        _ => bail!(
            InvalidArgument,
            "device_index is {device_index}; {who} has 0 (or -1)"
        ),
    }
}

/// The device for `device_type` and `device_index`. `cpu` gives that of the CPU.
pub(super) fn device_of(
    device_type: i32,
    device_index: i32,
    cpu: impl FnOnce() -> Result<Device>,
) -> Result<Device> {
    match device_type {
        NVFP4_DEVICE_CPU => {
            check_only("the CPU", device_index)?;
            cpu()
        }
        NVFP4_DEVICE_CUDA => match usize::try_from(device_index) {
            Ok(ordinal) => Device::cuda(ordinal)
                .map_err(|e| e.within(format_args!("CUDA device {device_index}"))),
            Err(_) => bail!(
                InvalidArgument,
                "device_index is {device_index}; CUDA devices are numbered from 0"
            ),
        },
        NVFP4_DEVICE_AUTO => {
            check_only("the library's choice", device_index)?;
            match Device::cuda(0) {
                Err(e) if e.kind() == ErrorKind::DeviceUnavailable => {
                    tracing::debug!("the CPU is chosen: {e}");
                    cpu()
                }
                chosen => chosen,
            }
        }
        _ => bail!(
            InvalidArgument,
            "device_type is {device_type}; it takes 0 (CPU), 1 (CUDA) or -1 (the library's choice)"
        ),
    }
}
