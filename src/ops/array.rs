//! Arrays in the memory of a device: the operands and results of operations. An operation gets slices of whole rows, and works on them in
//! place. Work on a GPU is enqueued; a caller that reads a result on the host waits for it.
//!
//! Inference through the reference block is in f32 on either device. Training has activations and gradients in [`Mixed`] precision.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::Device;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::base::memory::{Buffer, Plain, Tag, as_bytes};
use crate::base::size::product;
use crate::cuda::{DeviceBuffer, DeviceSlice};

/// An element type of arrays.
pub trait Element: fmt::Debug + 'static {
    /// Its type in host memory.
    type Host: Plain + PartialEq + fmt::Debug;
    /// Bytes of an element on a GPU.
    const GPU_BYTES: usize;

    /// Copies elements from a GPU; waits for it.
    fn read(from: DeviceSlice<'_>, to: &mut [Self::Host]) -> Result<()>;
    /// Copies elements to a GPU.
    fn write(to: DeviceSlice<'_>, from: &[Self::Host]) -> Result<()>;
}

macro_rules! same_on_both {
    ($($element:ty),+) => {$(
        impl Element for $element {
            type Host = $element;
            const GPU_BYTES: usize = size_of::<$element>();

            fn read(from: DeviceSlice<'_>, to: &mut [$element]) -> Result<()> {
                from.read(0, to)
            }

            fn write(to: DeviceSlice<'_>, from: &[$element]) -> Result<()> {
                to.write(0, from)
            }
        }
    )+};
}
same_on_both!(f32, i32, u32, u8);

/// Floats in training, for activations and gradients: f32 on the CPU, bf16 on a GPU.
#[derive(Debug)]
pub enum Mixed {}

impl Element for Mixed {
    type Host = f32;
    const GPU_BYTES: usize = size_of::<bf16>();

    fn read(from: DeviceSlice<'_>, to: &mut [f32]) -> Result<()> {
        let mut bits = vec![0u16; to.len()];
        from.read(0, &mut bits)?;
        for (to, bits) in to.iter_mut().zip(bits) {
            *to = bf16::from_bits(bits).to_f32();
        }
        Ok(())
    }

    fn write(to: DeviceSlice<'_>, from: &[f32]) -> Result<()> {
        let bits: Vec<u16> = from.iter().map(|&v| bf16::from_f32(v).to_bits()).collect();
        to.write(0, &bits)
    }
}

/// An array that owns its memory.
#[derive(Debug)]
pub struct Array<E: Element = f32> {
    memory: Memory<E>,
    len: usize,
}

#[derive(Debug)]
enum Memory<E: Element> {
    Host(Buffer<E::Host>),
    Cuda(Arc<DeviceBuffer>),
}

impl Array {
    /// A weight of a model, from values on the host.
    pub fn weight(device: &Device, values: Buffer<f32>) -> Result<Array> {
        let len = values.len();
        let memory = match device {
            Device::Cpu(_) => Memory::Host(values),
            Device::Cuda(gpu) => {
                let buffer = DeviceBuffer::from_slice(gpu, Tag::DeviceWeights, &values)?;
                Memory::Cuda(Arc::new(buffer))
            }
        };
        Ok(Array { memory, len })
    }
}

impl<E: Element> Array<E> {
    /// Bytes of an element in the memory of a device.
    pub fn element_bytes(device: &Device) -> usize {
        match device {
            Device::Cpu(_) => size_of::<E::Host>(),
            Device::Cuda(_) => E::GPU_BYTES,
        }
    }

    /// An array without elements, which takes no memory of any device.
    pub fn empty() -> Array<E> {
        let none = Buffer::zeroed(Tag::Scratch, 0).expect("an empty buffer allocates nothing");
        Array {
            memory: Memory::Host(none),
            len: 0,
        }
    }

    /// `len` elements in the memory of a GPU.
    pub(super) fn of_gpu(buffer: DeviceBuffer, len: usize) -> Array<E> {
        Array {
            memory: Memory::Cuda(Arc::new(buffer)),
            len,
        }
    }

    /// `len` elements of working memory with unspecified contents.
    pub fn scratch(device: &Device, len: usize) -> Result<Array<E>> {
        let memory = match device {
            Device::Cpu(_) => Memory::Host(Buffer::zeroed(Tag::Scratch, len)?),
            Device::Cuda(gpu) => {
                let bytes = product("working memory", &[len, E::GPU_BYTES])?;
                let buffer = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, bytes)?;
                Memory::Cuda(Arc::new(buffer))
            }
        };
        Ok(Array { memory, len })
    }

    /// `len` zeros of permanent memory: part of a model, counted as weights.
    pub fn zeroed(device: &Device, len: usize) -> Result<Array<E>> {
        let memory = match device {
            Device::Cpu(_) => Memory::Host(Buffer::zeroed(Tag::Weights, len)?),
            Device::Cuda(gpu) => {
                let bytes = product("weights", &[len, E::GPU_BYTES])?;
                let buffer = DeviceBuffer::zeroed(gpu, Tag::DeviceWeights, bytes)?;
                Memory::Cuda(Arc::new(buffer))
            }
        };
        Ok(Array { memory, len })
    }

    /// `len` zeros in host memory that a GPU works with; see [`Device::check_offload`]. Counted under `tag`.
    pub(super) fn offloaded(device: &Device, tag: Tag, len: usize) -> Result<Array<E>> {
        let Device::Cuda(gpu) = device else {
            bail!(Internal, "memory of the host for {}", device.name());
        };
        let bytes = product("memory of the host", &[len, E::GPU_BYTES])?;
        Ok(Self::of_gpu(DeviceBuffer::of_host(gpu, tag, bytes)?, len))
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes in host memory; none on a GPU.
    pub fn host_bytes(&self) -> &[u8] {
        match &self.memory {
            Memory::Host(values) => as_bytes(values),
            Memory::Cuda(_) => &[],
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.len
            * match &self.memory {
                Memory::Host(_) => size_of::<E::Host>(),
                Memory::Cuda(_) => E::GPU_BYTES,
            }
    }

    /// The memory on a GPU; fails for an array in host memory.
    pub fn on_gpu(&self) -> Result<&DeviceBuffer> {
        self.shared_on_gpu().map(|buffer| &**buffer)
    }

    /// The memory on a GPU, for shared ownership; fails for an array in host memory.
    pub(super) fn shared_on_gpu(&self) -> Result<&Arc<DeviceBuffer>> {
        match &self.memory {
            Memory::Cuda(buffer) => Ok(buffer),
            Memory::Host(_) => Err(err!(
                Internal,
                "an array of {} elements is in host memory, and was asked for on a GPU",
                self.len
            )),
        }
    }

    /// All elements.
    pub fn all(&self) -> Slice<'_, E> {
        match &self.memory {
            Memory::Host(values) => Slice::Host(values),
            Memory::Cuda(buffer) => Slice::Cuda((&**buffer).into()),
        }
    }

    /// All elements, writable.
    pub fn all_mut(&mut self) -> SliceMut<'_, E> {
        match &mut self.memory {
            Memory::Host(values) => SliceMut::Host(values),
            Memory::Cuda(buffer) => SliceMut::Cuda((&**buffer).into()),
        }
    }

    /// The first `len` elements, which must exist.
    pub fn first(&self, len: usize) -> Result<Slice<'_, E>> {
        self.part(0..len)
    }

    /// The elements of `range`, which must exist.
    pub fn part(&self, range: Range<usize>) -> Result<Slice<'_, E>> {
        self.all().part(range)
    }

    /// The first `len` elements, writable.
    pub fn first_mut(&mut self, len: usize) -> Result<SliceMut<'_, E>> {
        self.part_mut(0..len)
    }

    /// The elements of `range`, writable.
    pub fn part_mut(&mut self, range: Range<usize>) -> Result<SliceMut<'_, E>> {
        check(&range, self.len)?;
        match &mut self.memory {
            Memory::Host(values) => Ok(SliceMut::Host(&mut values[range])),
            Memory::Cuda(buffer) => Ok(SliceMut::Cuda(device_part::<E>(
                (&**buffer).into(),
                &range,
            )?)),
        }
    }

    /// Grows the array to at least `len` elements on `device`. If it was shorter, or on another device, its contents are lost.
    pub fn grow(&mut self, device: &Device, len: usize) -> Result<()> {
        let fits = match (&self.memory, device) {
            (Memory::Host(_), Device::Cpu(_)) => self.len >= len,
            (Memory::Cuda(buffer), Device::Cuda(gpu)) => {
                Arc::ptr_eq(buffer.gpu(), gpu) && self.len >= len
            }
            _ => false,
        };
        if !fits {
            // Frees the old memory before it allocates the new.
            *self = Array::empty();
            *self = Array::scratch(device, len)?;
        }
        Ok(())
    }

    /// Grows the array to at least `len` elements in host memory; see [`Device::check_offload`]. If it was shorter, its contents are lost.
    pub(crate) fn grow_offloaded(&mut self, device: &Device, len: usize) -> Result<()> {
        if self.len < len {
            *self = Array::empty();
            *self = Array::offloaded(device, Tag::Scratch, len)?;
        }
        Ok(())
    }
}

fn check(range: &Range<usize>, len: usize) -> Result<()> {
    if range.start > range.end || range.end > len {
        bail!(Internal, "elements {range:?} of an array of {len}");
    }
    Ok(())
}

fn device_part<'a, E: Element>(
    slice: DeviceSlice<'a>,
    range: &Range<usize>,
) -> Result<DeviceSlice<'a>> {
    slice.part(range.start * E::GPU_BYTES..range.end * E::GPU_BYTES)
}

/// Elements of an array, or of the host's memory.
#[derive(Debug)]
pub enum Slice<'a, E: Element = f32> {
    /// In host memory.
    Host(&'a [E::Host]),
    /// On a GPU.
    Cuda(DeviceSlice<'a>),
}

impl<E: Element> Clone for Slice<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E: Element> Copy for Slice<'_, E> {}

impl<'a, E: Element> Slice<'a, E> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Slice::Host(values) => values.len(),
            Slice::Cuda(slice) => slice.bytes() / E::GPU_BYTES,
        }
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements of `range`, which must exist.
    pub fn part(self, range: Range<usize>) -> Result<Slice<'a, E>> {
        check(&range, self.len())?;
        Ok(match self {
            Slice::Host(values) => Slice::Host(&values[range]),
            Slice::Cuda(slice) => Slice::Cuda(device_part::<E>(slice, &range)?),
        })
    }

    /// The values of a slice in host memory.
    pub fn host(self) -> Result<&'a [E::Host]> {
        match self {
            Slice::Host(values) => Ok(values),
            Slice::Cuda(slice) => bail!(
                Internal,
                "an operation on host memory was given an array on {:?}",
                slice.gpu()
            ),
        }
    }

    /// The memory of a slice on a GPU.
    pub fn cuda(self) -> Result<DeviceSlice<'a>> {
        match self {
            Slice::Cuda(slice) => Ok(slice),
            Slice::Host(values) => bail!(
                Internal,
                "an operation on a GPU was given {} elements of host memory",
                values.len()
            ),
        }
    }

    /// Copies the values to `out`, which must have the same length; waits for a GPU.
    pub fn read(self, out: &mut [E::Host]) -> Result<()> {
        if self.len() != out.len() {
            bail!(Internal, "{} elements read as {}", self.len(), out.len());
        }
        match self {
            Slice::Host(values) => out.copy_from_slice(values),
            Slice::Cuda(slice) => E::read(slice, out)?,
        }
        Ok(())
    }
}

/// Elements of an array, or of the host's memory, that an operation writes.
#[derive(Debug)]
pub enum SliceMut<'a, E: Element = f32> {
    /// In host memory.
    Host(&'a mut [E::Host]),
    /// On a GPU.
    Cuda(DeviceSlice<'a>),
}

impl<'a, E: Element> SliceMut<'a, E> {
    /// A read-only view of the elements.
    pub fn as_slice(&self) -> Slice<'_, E> {
        match self {
            SliceMut::Host(values) => Slice::Host(values),
            SliceMut::Cuda(slice) => Slice::Cuda(*slice),
        }
    }

    /// A view with a shorter lifetime.
    pub fn reborrow(&mut self) -> SliceMut<'_, E> {
        match self {
            SliceMut::Host(values) => SliceMut::Host(values),
            SliceMut::Cuda(slice) => SliceMut::Cuda(*slice),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements of `range`, which must exist.
    pub fn part(self, range: Range<usize>) -> Result<SliceMut<'a, E>> {
        check(&range, self.len())?;
        Ok(match self {
            SliceMut::Host(values) => SliceMut::Host(&mut values[range]),
            SliceMut::Cuda(slice) => SliceMut::Cuda(device_part::<E>(slice, &range)?),
        })
    }

    /// The values of a slice in host memory.
    pub fn host(self) -> Result<&'a mut [E::Host]> {
        match self {
            SliceMut::Host(values) => Ok(values),
            SliceMut::Cuda(slice) => bail!(
                Internal,
                "an operation on host memory was given an array on {:?}",
                slice.gpu()
            ),
        }
    }

    /// The memory of a slice on a GPU.
    pub fn cuda(self) -> Result<DeviceSlice<'a>> {
        match self {
            SliceMut::Cuda(slice) => Ok(slice),
            SliceMut::Host(values) => bail!(
                Internal,
                "an operation on a GPU was given {} elements of host memory",
                values.len()
            ),
        }
    }

    /// Copies all elements of `from`, which must have the same length.
    pub fn copy_from(self, from: Slice<'_, E>) -> Result<()> {
        if self.len() != from.len() {
            bail!(Internal, "{} elements copied to {}", from.len(), self.len());
        }
        match (self, from) {
            (SliceMut::Host(to), from) => from.read(to),
            (SliceMut::Cuda(to), Slice::Host(from)) => E::write(to, from),
            (SliceMut::Cuda(to), Slice::Cuda(from)) => to.copy_from(0, &from, 0, from.bytes()),
        }
    }
}
