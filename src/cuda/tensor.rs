//! Tensors in device memory: over the library's own allocations, over memory that a host program lends, and copies of them.
//!
//! All reads and writes are enqueued on the device's stream. Code that takes tensors from the host program, or gives them to it, orders
//! that stream with the default one: see [`Gpu::after_host_stream`].

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::driver::{
    DeviceBuffer, DeviceSlice, Gpu, Launch, ManagedBuffer, check, prefetch as prefetch_managed,
};
use super::kernel::kernels;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::base::memory::Tag;
use crate::tensor::{DType, MAX_RANK, Owner, Place, Shape, Tensor};

kernels! {
    /// Copies elements, by their size.
    enum Gather(GatherArguments) {
        Gather {
            Bytes1 = "gather_1",
            Bytes2 = "gather_2",
            Bytes4 = "gather_4",
            Bytes8 = "gather_8",
        }
    }
}

const THREADS: u32 = 256;

/// Alignment of results: bytes of the widest store of a kernel.
const RESULT: u64 = 16;

/// Memory of a tensor that the host program may have used on its default stream.
struct OrderedBuffer(DeviceBuffer);

impl Drop for OrderedBuffer {
    fn drop(&mut self) {
        // The buffer is freed, and its memory reused, in the order of the device's stream. A failure means that the context is broken,
        // which every further call reports.
        let _ = self.0.gpu().after_host_stream();
    }
}

/// A contiguous tensor over a buffer, which must be large enough. For managed memory see [`managed_tensor`].
pub fn tensor(buffer: DeviceBuffer, sizes: &[usize], dtype: DType) -> Result<Tensor> {
    let shape = Shape::contiguous(sizes)?;
    buffer.holds("a tensor", &[shape.elements(), dtype.bytes()])?;
    let (address, place) = (buffer.address(), Place::Cuda(buffer.gpu().ordinal()));
    // SAFETY: the buffer has room for the elements and lives as long as the tensor.
    unsafe {
        Tensor::on_device(
            address,
            place,
            shape,
            dtype,
            None,
            Arc::new(OrderedBuffer(buffer)),
        )
    }
}

/// A contiguous tensor over managed memory, which must be large enough.
pub fn managed_tensor(buffer: ManagedBuffer, sizes: &[usize], dtype: DType) -> Result<Tensor> {
    let shape = Shape::contiguous(sizes)?;
    if buffer.bytes() < shape.elements() * dtype.bytes() {
        bail!(
            Internal,
            "a tensor of shape {sizes:?} does not go into {} bytes",
            buffer.bytes()
        );
    }
    let (address, place) = (buffer.address(), Place::Managed(buffer.gpu().ordinal()));
    // SAFETY: as above.
    unsafe { Tensor::on_device(address, place, shape, dtype, None, Arc::new(buffer)) }
}

/// Finds the place of an address that the host program gives for device `ordinal`, and an owner that keeps that device open. Refuses memory
/// that the device does not have; an empty tensor needs none.
pub fn find(ordinal: usize, address: u64) -> Result<(Place, Owner)> {
    use sys::CUpointer_attribute::*;
    let gpu = Gpu::open(ordinal)?;
    let (mut kind, mut device, mut managed) = (0u32, 0 as c_int, 0u64);
    if address != 0 {
        gpu.bind()?;
        let mut attributes = [
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            CU_POINTER_ATTRIBUTE_IS_MANAGED,
        ];
        let mut places: [*mut c_void; 3] = [
            (&raw mut kind).cast(),
            (&raw mut device).cast(),
            (&raw mut managed).cast(),
        ];
        // SAFETY: three attributes and three places, each as large as its attribute or larger. The address is only looked up.
        let found = unsafe {
            sys::cuPointerGetAttributes(
                attributes.len() as u32,
                attributes.as_mut_ptr(),
                places.as_mut_ptr(),
                address,
            )
        };
        check(found.result(), "looking up an address")?;
    }
    // Addresses unknown to CUDA have type 0.
    const DEVICE: u32 = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32;
    let place = match kind {
        _ if address == 0 => Place::Cuda(ordinal),
        _ if managed != 0 => Place::Managed(ordinal),
        DEVICE if device == ordinal as c_int => Place::Cuda(ordinal),
        DEVICE => bail!(
            InvalidArgument,
            "the data is in the memory of cuda:{device}, not of {gpu:?}"
        ),
        _ => bail!(
            InvalidArgument,
            "the data pointer is no address of memory of {gpu:?}; host memory makes a host tensor"
        ),
    };
    Ok((place, gpu))
}

/// The device of a device tensor.
fn gpu_of(tensor: &Tensor) -> Result<Arc<Gpu>> {
    let place = tensor.place();
    let ordinal = place.cuda().ok_or_else(|| {
        err!(
            Internal,
            "a tensor in {place} was taken for one on a device"
        )
    })?;
    Gpu::open(ordinal)
}

/// The address of a tensor's first element.
pub(super) fn address(tensor: &Tensor) -> u64 {
    tensor.data().addr() as u64
}

#[repr(C)]
struct GatherArguments {
    from: u64,
    to: u64,
    elements: u64,
    sizes: [u64; MAX_RANK],
    strides: [u64; MAX_RANK],
}

/// Enqueues a copy of the elements to `to`, row-major without gaps.
///
/// # Safety
/// `tensor` must be on `gpu`, and `to` must be the address of memory for all its bytes there.
unsafe fn gather(gpu: &Gpu, tensor: &Tensor, to: u64) -> Result<()> {
    let shape = tensor.shape();
    if tensor.bytes() == 0 {
        return Ok(());
    }
    if shape.is_contiguous() {
        gpu.bind()?;
        let stream = gpu.stream();
        // SAFETY: both have the bytes.
        let copied =
            unsafe { result::memcpy_dtod_async(to, address(tensor), tensor.bytes(), stream) };
        return check(copied, "copying on the device");
    }
    let mut arguments = GatherArguments {
        from: address(tensor),
        to,
        elements: shape.elements() as u64,
        sizes: [1; MAX_RANK],
        strides: [0; MAX_RANK],
    };
    let dimensions = shape.sizes().iter().zip(shape.strides()).rev();
    for (i, (&size, &stride)) in dimensions.enumerate() {
        (arguments.sizes[i], arguments.strides[i]) = (size as u64, stride as u64);
    }
    let kernel = match tensor.dtype().bytes() {
        1 => Gather::Bytes1,
        2 => Gather::Bytes2,
        4 => Gather::Bytes4,
        _ => Gather::Bytes8,
    };
    let blocks = shape.elements().div_ceil(THREADS as usize);
    let launch = Launch::new(
        [super::driver::int("a copy's blocks", blocks)? as u32, 1, 1],
        THREADS,
    );
    // SAFETY: the tensor has its elements, and `to` has room for them.
    unsafe { launch.of(kernel).run(gpu, &arguments) }
}

/// A copy of a tensor of this device in new memory, row-major without gaps.
pub fn contiguous(gpu: &Arc<Gpu>, tag: Tag, tensor: &Tensor) -> Result<DeviceBuffer> {
    require(gpu, tensor)?;
    let buffer = DeviceBuffer::uninit(gpu, tag, tensor.bytes())?;
    // SAFETY: the tensor is on the device, and the buffer has its bytes.
    unsafe { gather(gpu, tensor, buffer.address()) }?;
    Ok(buffer)
}

/// A tensor's elements on its device, row-major without gaps and aligned: the tensor's own memory if it qualifies, else a copy.
#[derive(Debug)]
pub enum Contiguous<'a> {
    /// The tensor's own memory.
    Borrowed(DeviceSlice<'a>),
    /// A copy.
    Copied(DeviceBuffer),
}

impl<'a> Contiguous<'a> {
    /// The elements of a tensor on `gpu`, aligned to `align` bytes.
    pub fn new(gpu: &'a Arc<Gpu>, tensor: &'a Tensor, align: usize) -> Result<Contiguous<'a>> {
        require(gpu, tensor)?;
        let at = address(tensor);
        if tensor.shape().is_contiguous()
            && (tensor.bytes() == 0 || at.is_multiple_of(align as u64))
        {
            // SAFETY: the tensor, which is borrowed, has its elements there.
            let own = unsafe { DeviceSlice::new(gpu, at, tensor.bytes()) };
            return Ok(Contiguous::Borrowed(own));
        }
        Ok(Contiguous::Copied(contiguous(
            gpu,
            Tag::DeviceScratch,
            tensor,
        )?))
    }

    /// The memory of the elements.
    pub fn slice(&self) -> DeviceSlice<'_> {
        match self {
            Contiguous::Borrowed(slice) => *slice,
            Contiguous::Copied(buffer) => buffer.into(),
        }
    }
}

impl<'a> DeviceSlice<'a> {
    /// The memory of a tensor on `gpu` that receives a result. The tensor must be contiguous, and aligned for the widest store of a kernel.
    pub fn result(gpu: &'a Arc<Gpu>, tensor: &'a mut Tensor) -> Result<DeviceSlice<'a>> {
        require(gpu, tensor)?;
        let at = address(tensor);
        if !tensor.shape().is_contiguous() || !at.is_multiple_of(RESULT) {
            bail!(
                InvalidArgument,
                "a result goes to a contiguous tensor that begins at a multiple of {RESULT} bytes, not to one of shape {:?} and strides {:?}",
                tensor.shape().sizes(),
                tensor.shape().strides()
            );
        }
        // SAFETY: the tensor, which is borrowed alone, has its elements there.
        Ok(unsafe { DeviceSlice::new(gpu, at, tensor.bytes()) })
    }
}

/// Rows in device memory at a fixed stride.
pub(super) struct StridedRows {
    pub(super) address: u64,
    /// Bytes from row to row.
    pub(super) stride: usize,
    /// Keeps the copy alive, if one was needed.
    _copy: Option<DeviceBuffer>,
}

impl StridedRows {
    /// Rows that already have a fixed stride.
    pub(super) fn at(address: u64, stride: usize) -> StridedRows {
        StridedRows {
            address,
            stride,
            _copy: None,
        }
    }
}

/// The rows of a tensor's matrix, each aligned to `align` bytes: in the tensor itself if possible, else in a copy.
pub(super) fn rows(gpu: &Arc<Gpu>, tensor: &Tensor, align: usize) -> Result<StridedRows> {
    require(gpu, tensor)?;
    let (at, element) = (address(tensor), tensor.dtype().bytes());
    if let Some(stride) = tensor.shape().row_stride()
        && at.is_multiple_of(align as u64)
        && (stride * element).is_multiple_of(align)
    {
        return Ok(StridedRows {
            address: at,
            stride: stride * element,
            _copy: None,
        });
    }
    let copy = contiguous(gpu, Tag::DeviceScratch, tensor)?;
    Ok(StridedRows {
        address: copy.address(),
        stride: tensor.shape().matrix().1 * element,
        _copy: Some(copy),
    })
}

/// The kernel for values of a type, of those for f32, f16 and bf16.
pub(super) fn by_type<K>(dtype: DType, [f32, f16, bf16]: [K; 3]) -> Result<K> {
    match dtype {
        DType::F32 => Ok(f32),
        DType::F16 => Ok(f16),
        DType::BF16 => Ok(bf16),
        _ => bail!(
            Unsupported,
            "values of type {} on a GPU; it takes float16, bfloat16 and float32",
            dtype.name()
        ),
    }
}

/// Refuses a tensor that is not on `gpu`.
pub(super) fn require(gpu: &Gpu, tensor: &Tensor) -> Result<()> {
    if tensor.place().cuda() != Some(gpu.ordinal()) {
        bail!(
            InvalidArgument,
            "a {} tensor of shape {:?} is in {}, and the work is for {gpu:?}: copy it there",
            tensor.dtype().name(),
            tensor.shape().sizes(),
            tensor.place()
        );
    }
    Ok(())
}

/// Copies a tensor in host memory to the device, row-major without gaps.
pub fn upload(gpu: &Arc<Gpu>, tensor: &Tensor) -> Result<Tensor> {
    let mut buffer = DeviceBuffer::uninit(gpu, Tag::DeviceTensor, tensor.bytes())?;
    match tensor.as_bytes() {
        Some(bytes) => buffer.write(0, bytes)?,
        None => {
            let mut bytes = crate::base::memory::Buffer::zeroed(Tag::Scratch, tensor.bytes())?;
            tensor.copy_to(&mut bytes)?;
            buffer.write(0, &bytes[..])?;
        }
    }
    self::tensor(buffer, tensor.shape().sizes(), tensor.dtype())
}

/// Copies the elements of a device tensor to `out`, row-major without gaps, after all work enqueued before. `out` must have exactly their
/// size.
pub fn download(tensor: &Tensor, out: &mut [u8]) -> Result<()> {
    if out.len() != tensor.bytes() {
        bail!(
            InvalidArgument,
            "the tensor has {} bytes and the destination {}",
            tensor.bytes(),
            out.len()
        );
    }
    let gpu = gpu_of(tensor)?;
    if !tensor.shape().is_contiguous() {
        return contiguous(&gpu, Tag::DeviceScratch, tensor)?.read(0, out);
    }
    gpu.bind()?;
    if !out.is_empty() {
        check(
            // SAFETY: the tensor has the bytes, and `out` is not touched before the wait.
            unsafe { result::memcpy_dtoh_async(out, address(tensor), gpu.stream()) },
            "copying from the device",
        )?;
    }
    gpu.synchronize()
}

impl ManagedBuffer {
    /// Enqueues a copy of a tensor that is on the same device, row-major without gaps.
    pub fn copy_from(&mut self, tensor: &Tensor) -> Result<()> {
        require(self.gpu(), tensor)?;
        if tensor.bytes() > self.bytes() {
            bail!(
                Internal,
                "a tensor of {} bytes does not go into {}",
                tensor.bytes(),
                self.bytes()
            );
        }
        // SAFETY: the tensor is on the device, and the buffer has its bytes.
        unsafe { gather(self.gpu(), tensor, self.address()) }
    }

    /// Enqueues that the memory of a tensor moves to the device `to`, or to the host if `None`. The tensor must be in managed memory.
    pub fn prefetch(tensor: &Tensor, to: Option<&Gpu>) -> Result<()> {
        let Place::Managed(ordinal) = tensor.place() else {
            bail!(
                InvalidArgument,
                "the tensor is in {}, and only managed memory can be moved",
                tensor.place()
            );
        };
        let gpu = Gpu::open(ordinal)?;
        let bytes = tensor.shape().extent() * tensor.dtype().bytes();
        // SAFETY: the tensor's memory is managed.
        unsafe { prefetch_managed(&gpu, address(tensor), bytes, to) }
    }
}
