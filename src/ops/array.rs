//! Arrays of f32 in the memory of a device: what operations take and make. An operation gets slices of whole rows, and works where
//! they lie. Work on a GPU is enqueued; whoever reads a result on the host waits for it.

use std::ops::Range;

use super::Device;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::base::memory::{Buffer, Tag};
use crate::base::size::product;
use crate::cuda::{DeviceBuffer, DeviceSlice};

/// An array of f32 that owns its memory.
#[derive(Debug)]
pub struct Array {
    memory: Memory,
    len: usize,
}

#[derive(Debug)]
enum Memory {
    Host(Buffer<f32>),
    Cuda(DeviceBuffer),
}

impl Array {
    /// An array without elements, which takes no memory of any device.
    pub fn empty() -> Array {
        let none = Buffer::zeroed(Tag::Scratch, 0).expect("an empty buffer allocates nothing");
        Array {
            memory: Memory::Host(none),
            len: 0,
        }
    }

    /// `len` elements of working memory, whose contents are unspecified.
    pub fn scratch(device: &Device, len: usize) -> Result<Array> {
        let memory = match device {
            Device::Cpu(_) => Memory::Host(Buffer::zeroed(Tag::Scratch, len)?),
            Device::Cuda(gpu) => {
                let bytes = product("working memory", &[len, size_of::<f32>()])?;
                Memory::Cuda(DeviceBuffer::uninit(gpu, Tag::DeviceScratch, bytes)?)
            }
        };
        Ok(Array { memory, len })
    }

    /// A weight of a model, from values on the host.
    pub fn weight(device: &Device, values: Buffer<f32>) -> Result<Array> {
        let len = values.len();
        let memory = match device {
            Device::Cpu(_) => Memory::Host(values),
            Device::Cuda(gpu) => {
                Memory::Cuda(DeviceBuffer::from_slice(gpu, Tag::DeviceWeights, &values)?)
            }
        };
        Ok(Array { memory, len })
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<f32>()
    }

    /// The memory on a GPU; an error for an array of the host.
    pub fn on_gpu(&self) -> Result<&DeviceBuffer> {
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
    pub fn all(&self) -> Slice<'_> {
        match &self.memory {
            Memory::Host(values) => Slice::Host(values),
            Memory::Cuda(buffer) => Slice::Cuda(buffer.into()),
        }
    }

    /// The first `len` elements; there must be so many.
    pub fn first(&self, len: usize) -> Result<Slice<'_>> {
        self.part(0..len)
    }

    /// The elements of `range`, which must exist.
    pub fn part(&self, range: Range<usize>) -> Result<Slice<'_>> {
        self.all().part(range)
    }

    /// The first `len` elements, to be written.
    pub fn first_mut(&mut self, len: usize) -> Result<SliceMut<'_>> {
        self.part_mut(0..len)
    }

    /// The elements of `range`, to be written.
    pub fn part_mut(&mut self, range: Range<usize>) -> Result<SliceMut<'_>> {
        check(&range, self.len)?;
        match &mut self.memory {
            Memory::Host(values) => Ok(SliceMut::Host(&mut values[range])),
            Memory::Cuda(buffer) => Ok(SliceMut::Cuda(device_part((&*buffer).into(), &range)?)),
        }
    }

    /// Makes the array at least `len` long on `device`; what it held is lost if it was shorter, or of another device.
    pub fn grow(&mut self, device: &Device, len: usize) -> Result<()> {
        let fits = match (&self.memory, device) {
            (Memory::Host(_), Device::Cpu(_)) => self.len >= len,
            (Memory::Cuda(buffer), Device::Cuda(gpu)) => {
                std::sync::Arc::ptr_eq(buffer.gpu(), gpu) && self.len >= len
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
}

fn check(range: &Range<usize>, len: usize) -> Result<()> {
    if range.start > range.end || range.end > len {
        bail!(Internal, "elements {range:?} of an array of {len}");
    }
    Ok(())
}

fn device_part<'a>(slice: DeviceSlice<'a>, range: &Range<usize>) -> Result<DeviceSlice<'a>> {
    slice.part(range.start * size_of::<f32>()..range.end * size_of::<f32>())
}

/// Elements of an array, or of the host's memory.
#[derive(Clone, Copy, Debug)]
pub enum Slice<'a> {
    /// In host memory.
    Host(&'a [f32]),
    /// On a GPU.
    Cuda(DeviceSlice<'a>),
}

impl<'a> Slice<'a> {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Slice::Host(values) => values.len(),
            Slice::Cuda(slice) => slice.bytes() / size_of::<f32>(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements of `range`, which must exist.
    pub fn part(self, range: Range<usize>) -> Result<Slice<'a>> {
        check(&range, self.len())?;
        Ok(match self {
            Slice::Host(values) => Slice::Host(&values[range]),
            Slice::Cuda(slice) => Slice::Cuda(device_part(slice, &range)?),
        })
    }

    /// The values, of a slice in host memory.
    pub fn host(self) -> Result<&'a [f32]> {
        match self {
            Slice::Host(values) => Ok(values),
            Slice::Cuda(slice) => bail!(
                Internal,
                "an operation on host memory was given an array on {:?}",
                slice.gpu()
            ),
        }
    }

    /// The memory, of a slice on a GPU.
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

    /// Copies the values to `out`, as many as it takes; waits for a GPU.
    pub fn read(self, out: &mut [f32]) -> Result<()> {
        if self.len() != out.len() {
            bail!(Internal, "{} elements read as {}", self.len(), out.len());
        }
        match self {
            Slice::Host(values) => out.copy_from_slice(values),
            Slice::Cuda(slice) => slice.read(0, out)?,
        }
        Ok(())
    }
}

/// Elements of an array, or of the host's memory, that an operation writes.
#[derive(Debug)]
pub enum SliceMut<'a> {
    /// In host memory.
    Host(&'a mut [f32]),
    /// On a GPU.
    Cuda(DeviceSlice<'a>),
}

impl<'a> SliceMut<'a> {
    /// The same elements, to be read.
    pub fn as_slice(&self) -> Slice<'_> {
        match self {
            SliceMut::Host(values) => Slice::Host(values),
            SliceMut::Cuda(slice) => Slice::Cuda(*slice),
        }
    }

    /// The same elements, for a shorter time.
    pub fn reborrow(&mut self) -> SliceMut<'_> {
        match self {
            SliceMut::Host(values) => SliceMut::Host(values),
            SliceMut::Cuda(slice) => SliceMut::Cuda(*slice),
        }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements of `range`, which must exist.
    pub fn part(self, range: Range<usize>) -> Result<SliceMut<'a>> {
        check(&range, self.len())?;
        Ok(match self {
            SliceMut::Host(values) => SliceMut::Host(&mut values[range]),
            SliceMut::Cuda(slice) => SliceMut::Cuda(device_part(slice, &range)?),
        })
    }

    /// The values, of a slice in host memory.
    pub fn host(self) -> Result<&'a mut [f32]> {
        match self {
            SliceMut::Host(values) => Ok(values),
            SliceMut::Cuda(slice) => bail!(
                Internal,
                "an operation on host memory was given an array on {:?}",
                slice.gpu()
            ),
        }
    }

    /// The memory, of a slice on a GPU.
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

    /// Makes the elements those of `from`, as many as there are.
    pub fn copy_from(self, from: Slice<'_>) -> Result<()> {
        if self.len() != from.len() {
            bail!(Internal, "{} elements copied to {}", from.len(), self.len());
        }
        match (self, from) {
            (SliceMut::Host(to), from) => from.read(to),
            (SliceMut::Cuda(to), Slice::Host(from)) => to.write(0, from),
            (SliceMut::Cuda(to), Slice::Cuda(from)) => to.copy_from(0, &from, 0, from.bytes()),
        }
    }
}
