//! Tensors over memory that this library allocated, or that a host lent with a release function. Device memory is known here by its address
//! and its owner, and never read.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use super::{DType, Shape};
use crate::base::error::{Result, bail};
use crate::base::memory::{self, Buffer, Tag};

/// Called once, when the last view of lent memory is dropped.
pub type Release = Box<dyn FnOnce() + Send>;

/// Keeps device memory alive.
pub type Owner = Arc<dyn Any + Send + Sync>;

/// Place of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Memory of the host.
    Host,
    /// Memory of the CUDA device with this index.
    Cuda(usize),
    /// CUDA managed memory, which moves between the host and devices. The device with this index works with it.
    Managed(usize),
}

impl Place {
    /// The CUDA device that works with the memory, if any.
    pub fn cuda(self) -> Option<usize> {
        match self {
            Place::Host => None,
            Place::Cuda(ordinal) | Place::Managed(ordinal) => Some(ordinal),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Host => write!(f, "the memory of the host"),
            Place::Cuda(ordinal) => write!(f, "the memory of cuda:{ordinal}"),
            Place::Managed(ordinal) => write!(f, "managed memory of cuda:{ordinal}"),
        }
    }
}

enum Storage {
    Owned(Buffer<u8>),
    Lent {
        data: *mut u8,
        writable: bool,
        release: Option<Release>,
    },
    Device {
        address: u64,
        place: Place,
        release: Option<Release>,
        _owner: Owner,
    },
}

// SAFETY: lent memory is readable from any thread until it is released; that is the contract of `Tensor::lent`.
unsafe impl Send for Storage {}
// SAFETY: as above; this library writes to a storage only before it shares it.
unsafe impl Sync for Storage {}

impl Drop for Storage {
    fn drop(&mut self) {
        if let Storage::Lent { release, .. } | Storage::Device { release, .. } = self
            && let Some(release) = release.take()
        {
            release();
        }
    }
}

impl Storage {
    fn base(&self) -> *mut u8 {
        match self {
            Storage::Owned(buffer) => buffer.as_ptr().cast_mut(),
            Storage::Lent { data, .. } => *data,
            Storage::Device { address, .. } => std::ptr::without_provenance_mut(*address as usize),
        }
    }
}

/// Fails unless an address is aligned for elements of `dtype`.
fn check_address(address: usize, shape: &Shape, dtype: DType) -> Result<()> {
    if shape.extent() > 0 && address == 0 {
        bail!(
            InvalidArgument,
            "the data pointer of a {} tensor of shape {:?} is NULL",
            dtype.name(),
            shape.sizes()
        );
    }
    if !address.is_multiple_of(dtype.bytes()) {
        bail!(
            InvalidArgument,
            "the data pointer of a {} tensor is not aligned to its element of {} bytes",
            dtype.name(),
            dtype.bytes()
        );
    }
    Ok(())
}

/// A typed, shaped view of memory. Clones share the memory.
#[derive(Clone)]
pub struct Tensor {
    storage: Arc<Storage>,
    /// Bytes from the start of the storage to the first element.
    offset: usize,
    /// Bytes of the storage that views may access.
    bytes: usize,
    shape: Shape,
    dtype: DType,
    /// Whether its owner has declared the memory read-only.
    read_only: bool,
}

/// A weak reference: identifies a tensor without keeping it alive.
pub struct WeakTensor {
    // While this exists, no other storage gets the address.
    storage: Weak<Storage>,
    offset: usize,
    shape: Shape,
    dtype: DType,
}

impl WeakTensor {
    /// Whether `tensor` is the referenced one or a clone of it: the same type and shape over the same memory.
    pub fn is(&self, tensor: &Tensor) -> bool {
        std::ptr::eq(self.storage.as_ptr(), Arc::as_ptr(&tensor.storage))
            && (self.offset, self.dtype) == (tensor.offset, tensor.dtype)
            && self.shape == tensor.shape
    }

    /// Whether the tensor's memory is still alive.
    pub fn is_alive(&self) -> bool {
        self.storage.strong_count() > 0
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({}, {:?})", self.dtype.name(), self.shape.sizes())
    }
}

impl Tensor {
    /// A contiguous tensor of zeros.
    pub fn zeros(sizes: &[usize], dtype: DType) -> Result<Tensor> {
        Tensor::build(sizes, dtype, |_| Ok(()))
    }

    /// A contiguous tensor whose bytes, initially zero, are written by `fill`.
    pub fn build(
        sizes: &[usize],
        dtype: DType,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<Tensor> {
        let shape = Shape::contiguous(sizes)?;
        let bytes = shape.elements() * dtype.bytes();
        let mut buffer = Buffer::zeroed(Tag::Tensor, bytes)?;
        fill(&mut buffer)?;
        Ok(Tensor {
            storage: Arc::new(Storage::Owned(buffer)),
            offset: 0,
            bytes,
            shape,
            dtype,
            read_only: false,
        })
    }

    /// A contiguous tensor of `values` rounded to a floating `dtype`.
    pub fn from_f32(values: &[f32], sizes: &[usize], dtype: DType) -> Result<Tensor> {
        Tensor::build(sizes, dtype, |bytes| dtype.from_f32(values, bytes))
    }

    /// A view of memory that a host lends for a result: see [`Tensor::bytes_mut`]. It has no release function.
    ///
    /// # Safety
    /// From `data` on, the extent of `shape` must be readable and writable, and exclusively the library's, as long as the tensor or a view
    /// of it lives.
    pub unsafe fn lent_for_result(data: *mut u8, shape: Shape, dtype: DType) -> Result<Tensor> {
        Tensor::over(data, true, shape, dtype, None)
    }

    /// A view of memory that a host lends. `release` runs when the last view is dropped, on whichever thread drops it. On an error
    /// `release` is dropped uncalled, and the memory stays the host's.
    ///
    /// # Safety
    /// From `data` on, the extent of `shape` must be readable from any thread and unchanged until `release` is called.
    pub unsafe fn lent(
        data: *mut u8,
        shape: Shape,
        dtype: DType,
        release: Option<Release>,
    ) -> Result<Tensor> {
        Tensor::over(data, false, shape, dtype, release)
    }

    fn over(
        data: *mut u8,
        writable: bool,
        shape: Shape,
        dtype: DType,
        release: Option<Release>,
    ) -> Result<Tensor> {
        check_address(data.addr(), &shape, dtype)?;
        let bytes = shape.extent() * dtype.bytes();
        Ok(Tensor {
            storage: Arc::new(Storage::Lent {
                data,
                writable,
                release,
            }),
            offset: 0,
            bytes,
            shape,
            dtype,
            read_only: false,
        })
    }

    /// A view of device memory at `address`. `owner` is kept until the last view is dropped, and `release` runs then; on an error it is
    /// dropped uncalled.
    ///
    /// # Safety
    /// From `address` on, the extent of `shape` must be memory that the device of `place` can use until `release` is called or, without
    /// one, as long as `owner` lives. Others may change it only in work that is ordered with the device's.
    pub unsafe fn on_device(
        address: u64,
        place: Place,
        shape: Shape,
        dtype: DType,
        release: Option<Release>,
        owner: Owner,
    ) -> Result<Tensor> {
        check_address(address as usize, &shape, dtype)?;
        let bytes = shape.extent() * dtype.bytes();
        Ok(Tensor {
            storage: Arc::new(Storage::Device {
                address,
                place,
                release,
                _owner: owner,
            }),
            offset: 0,
            bytes,
            shape,
            dtype,
            read_only: false,
        })
    }

    /// Marks the tensor and its later views as read-only.
    pub fn into_read_only(mut self) -> Tensor {
        self.read_only = true;
        self
    }

    /// Whether the owner of the memory has declared it read-only.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Where the memory is.
    pub fn place(&self) -> Place {
        match &*self.storage {
            Storage::Owned(_) | Storage::Lent { .. } => Place::Host,
            Storage::Device { place, .. } => *place,
        }
    }

    /// Fails unless the tensor is in host memory.
    pub fn require_host(&self) -> Result<()> {
        match self.place() {
            Place::Host => Ok(()),
            place => bail!(
                Unsupported,
                "a {} tensor of shape {:?} is in {place}, and this works on host memory: copy the tensor to the host first",
                self.dtype.name(),
                self.shape.sizes()
            ),
        }
    }

    /// A view of the same memory with another shape, starting `offset` elements after this one's first.
    pub fn view(&self, shape: Shape, offset: usize) -> Result<Tensor> {
        let end = shape
            .extent()
            .checked_add(offset)
            .and_then(|n| n.checked_mul(self.dtype.bytes()))
            .and_then(|n| n.checked_add(self.offset));
        match end {
            Some(end) if end <= self.bytes => Ok(Tensor {
                storage: self.storage.clone(),
                offset: self.offset + offset * self.dtype.bytes(),
                bytes: self.bytes,
                shape,
                dtype: self.dtype,
                read_only: self.read_only,
            }),
            _ => bail!(
                InvalidArgument,
                "a view of shape {:?}, strides {:?} and offset {offset} reaches past the {} elements of its tensor's memory",
                shape.sizes(),
                shape.strides(),
                (self.bytes - self.offset) / self.dtype.bytes()
            ),
        }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Sizes and strides.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Bytes of the elements without gaps.
    pub fn bytes(&self) -> usize {
        self.shape.elements() * self.dtype.bytes()
    }

    /// The address of the first element, a device address if the memory is on a device; not usable if there are no elements.
    pub fn data(&self) -> *mut u8 {
        // `view` ensures that `offset` stays within the storage; device memory is never accessed through the pointer.
        self.storage.base().wrapping_add(self.offset)
    }

    /// The memory as bytes, if it is on the host and the elements are row-major without gaps.
    pub fn as_bytes(&self) -> Option<&[u8]> {
        if !self.shape.is_contiguous() || self.place() != Place::Host {
            return None;
        }
        let data = match self.bytes() {
            0 => NonNull::dangling().as_ptr(),
            _ => self.data(),
        };
        // SAFETY: contiguous elements fill exactly `bytes` bytes of a storage that `self` keeps alive and that does not change; an empty
        // slice gets a dangling pointer.
        Some(unsafe { std::slice::from_raw_parts(data, self.bytes()) })
    }

    /// A weak reference to this tensor.
    pub fn downgrade(&self) -> WeakTensor {
        WeakTensor {
            storage: Arc::downgrade(&self.storage),
            offset: self.offset,
            shape: self.shape.clone(),
            dtype: self.dtype,
        }
    }

    /// The memory as bytes to write a result to. `None` unless the memory is from [`zeros`](Tensor::zeros) or
    /// [`lent_for_result`](Tensor::lent_for_result), is writable, and no other tensor shares it.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        if self.read_only || !self.shape.is_contiguous() {
            return None;
        }
        let bytes = self.bytes();
        let base = match Arc::get_mut(&mut self.storage)? {
            _ if bytes == 0 => return Some(&mut []),
            Storage::Owned(buffer) => buffer.as_mut_ptr(),
            Storage::Lent {
                data,
                writable: true,
                ..
            } => *data,
            Storage::Lent { .. } | Storage::Device { .. } => return None,
        };
        // SAFETY: `view` and the constructors check that `bytes` from `offset` on are within the storage; it is writable, and
        // this is the only tensor that has it.
        Some(unsafe { std::slice::from_raw_parts_mut(base.add(self.offset), bytes) })
    }

    /// Copies rows of [`Shape::matrix`] in row-major order into `out`. Only for host memory, like all functions here that read elements.
    pub fn copy_rows(&self, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
        self.require_host()?;
        let (all, cols) = self.shape.matrix();
        let element = self.dtype.bytes();
        let row_bytes = cols * element;
        if rows.start > rows.end || rows.end > all || out.len() != rows.len() * row_bytes {
            bail!(
                InvalidArgument,
                "rows {rows:?} of {all} rows of {row_bytes} bytes do not go into {} bytes",
                out.len()
            );
        }
        if let Some(bytes) = self.as_bytes() {
            out.copy_from_slice(&bytes[rows.start * row_bytes..rows.end * row_bytes]);
            return Ok(());
        }
        if out.is_empty() {
            return Ok(());
        }
        let stride = self.shape.strides().last().copied().unwrap_or(1);
        for (row, out) in rows.zip(out.chunks_exact_mut(row_bytes)) {
            let start = self.shape.row_offset(row);
            for (i, out) in out.chunks_exact_mut(element).enumerate() {
                // SAFETY: the element is within the shape's extent, which the storage holds; `out` has `element` bytes and
                // is memory of the caller's own.
                unsafe {
                    let from = self.data().add((start + i * stride) * element);
                    std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), element);
                }
            }
        }
        Ok(())
    }

    /// Copies all elements in row-major order into `out`, which must have exactly their size.
    pub fn copy_to(&self, out: &mut [u8]) -> Result<()> {
        if out.len() != self.bytes() {
            bail!(
                InvalidArgument,
                "the tensor has {} bytes and the destination {}",
                self.bytes(),
                out.len()
            );
        }
        self.copy_rows(0..self.shape.matrix().0, out)
    }

    /// Rows of [`Shape::matrix`] as f32.
    pub fn rows_f32(&self, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let row_bytes = self.shape.matrix().1 * self.dtype.bytes();
        if let Some(bytes) = self.as_bytes()
            && let Some(bytes) = bytes.get(rows.start * row_bytes..rows.end * row_bytes)
        {
            return self.dtype.to_f32(bytes, out);
        }
        self.require_host()?;
        let mut bytes = memory::zeros(rows.len() * row_bytes)?;
        self.copy_rows(rows, &mut bytes)?;
        self.dtype.to_f32(&bytes, out)
    }

    /// All elements as f32, row-major.
    pub fn to_f32(&self) -> Result<Buffer<f32>> {
        self.require_host()?;
        let mut out = Buffer::zeroed(Tag::Scratch, self.shape.elements())?;
        self.rows_f32(0..self.shape.matrix().0, &mut out)?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_transposed_view_reads_in_its_own_order() {
        let t = Tensor::from_f32(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3], DType::F32).unwrap();
        let v = t
            .view(Shape::strided(&[3, 2], &[1, 3]).unwrap(), 0)
            .unwrap();
        assert_eq!(&v.to_f32().unwrap()[..], [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        assert!(v.as_bytes().is_none());
        let last = t.view(Shape::contiguous(&[2]).unwrap(), 4).unwrap();
        assert_eq!(&last.to_f32().unwrap()[..], [5.0, 6.0]);
        expect_kind(
            t.view(Shape::contiguous(&[2]).unwrap(), 5),
            ErrorKind::InvalidArgument,
            "offset 5 reaches past the 6 elements",
        );
        expect_kind(
            t.view(Shape::contiguous(&[1]).unwrap(), usize::MAX),
            ErrorKind::InvalidArgument,
            "offset 18446744073709551615 reaches past",
        );
    }

    #[test]
    fn a_row_range_of_a_strided_tensor() {
        let values: Vec<f32> = (0..24).map(|i| i as f32).collect();
        let t = Tensor::from_f32(&values, &[4, 6], DType::BF16).unwrap();
        let v = t
            .view(Shape::strided(&[4, 3], &[6, 2]).unwrap(), 1)
            .unwrap();
        let mut out = [0.0; 6];
        v.rows_f32(1..3, &mut out).unwrap();
        assert_eq!(out, [7.0, 9.0, 11.0, 13.0, 15.0, 17.0]);
        expect_kind(
            v.rows_f32(3..5, &mut out),
            ErrorKind::InvalidArgument,
            "rows 3..5 of 4 rows",
        );
    }

    #[test]
    fn a_result_is_written_where_nobody_else_looks() {
        let mut t = Tensor::zeros(&[2, 3], DType::U8).unwrap();
        t.bytes_mut().unwrap()[4] = 7;
        let mut shared = t.clone();
        assert!(t.bytes_mut().is_none() && shared.bytes_mut().is_none());
        drop(shared);
        let mut row = t.view(Shape::contiguous(&[3]).unwrap(), 3).unwrap();
        assert!(row.bytes_mut().is_none());
        drop(t);
        assert_eq!(row.bytes_mut().unwrap(), [0, 7, 0]);
        let mut gaps = row.view(Shape::strided(&[2], &[2]).unwrap(), 0).unwrap();
        drop(row);
        assert!(gaps.bytes_mut().is_none());

        let mut memory = [0u8; 4];
        let shape = || Shape::contiguous(&[4]).unwrap();
        // SAFETY: `memory` outlives both tensors, and each is the only one while it lives.
        let (mut lent, mut read) = unsafe {
            let data = memory.as_mut_ptr();
            (
                Tensor::lent_for_result(data, shape(), DType::U8).unwrap(),
                Tensor::lent(data, shape(), DType::U8, None).unwrap(),
            )
        };
        assert!(read.bytes_mut().is_none());
        drop(read);
        lent.bytes_mut().unwrap().fill(5);
        drop(lent);
        assert_eq!(memory, [5; 4]);
    }

    #[test]
    fn lent_memory_is_released_once_after_the_last_view() {
        static RELEASED: AtomicU32 = AtomicU32::new(0);
        let mut data = [1.0f32, 2.0];
        let release: Release = Box::new(|| {
            RELEASED.fetch_add(1, Ordering::Relaxed);
        });
        let shape = Shape::contiguous(&[2]).unwrap();
        // SAFETY: `data` outlives the tensor and does not change.
        let t = unsafe {
            Tensor::lent(
                data.as_mut_ptr().cast(),
                shape.clone(),
                DType::F32,
                Some(release),
            )
        }
        .unwrap();
        let v = t.view(Shape::contiguous(&[1]).unwrap(), 1).unwrap();
        drop(t);
        assert_eq!(RELEASED.load(Ordering::Relaxed), 0);
        assert_eq!(v.to_f32().unwrap()[0], 2.0);
        drop(v);
        assert_eq!(RELEASED.load(Ordering::Relaxed), 1);
        // SAFETY: refused before anything is read.
        let odd = unsafe {
            Tensor::lent(
                data.as_mut_ptr().cast::<u8>().wrapping_add(1),
                shape,
                DType::F32,
                None,
            )
        };
        assert!(odd.unwrap_err().message().contains("aligned"));
    }

    /// An address that would fault if it were accessed.
    #[test]
    fn memory_of_a_device_is_never_read_here() {
        let owner = Arc::new(());
        let released = Arc::new(AtomicU32::new(0));
        for place in [Place::Cuda(1), Place::Managed(1)] {
            let count = released.clone();
            let release: Release = Box::new(move || {
                count.fetch_add(1, Ordering::Relaxed);
            });
            let shape = Shape::contiguous(&[4, 8]).unwrap();
            // SAFETY: nothing uses the memory.
            let t = unsafe {
                Tensor::on_device(
                    64,
                    place,
                    shape,
                    DType::F32,
                    Some(release),
                    owner.clone() as Owner,
                )
            }
            .unwrap();
            assert_eq!((t.place(), t.place().cuda()), (place, Some(1)));
            let v = t.view(Shape::contiguous(&[8]).unwrap(), 8).unwrap();
            assert_eq!(v.data().addr(), 64 + 32);
            assert_eq!(v.place(), place);
            drop(t);
            assert!(v.as_bytes().is_none());
            for e in [
                v.copy_to(&mut [0; 32]).unwrap_err(),
                v.copy_rows(0..1, &mut [0; 32]).unwrap_err(),
                v.rows_f32(0..1, &mut [0.0; 8]).unwrap_err(),
                v.to_f32().unwrap_err(),
            ] {
                assert_eq!(e.kind(), crate::base::ErrorKind::Unsupported);
                assert!(e.message().contains(&place.to_string()), "{e}");
            }
        }
        assert_eq!(released.load(Ordering::Relaxed), 2);
        assert_eq!(Arc::strong_count(&owner), 1);
        let on = |address, shape: &[usize]| {
            let shape = Shape::contiguous(shape).unwrap();
            // SAFETY: nothing uses the memory.
            unsafe {
                Tensor::on_device(
                    address,
                    Place::Cuda(0),
                    shape,
                    DType::F32,
                    None,
                    owner.clone(),
                )
            }
        };
        expect_kind(on(0, &[1]), ErrorKind::InvalidArgument, "is NULL");
        expect_kind(on(62, &[1]), ErrorKind::InvalidArgument, "is not aligned");
        assert!(on(0, &[0]).is_ok());
    }

    #[test]
    fn an_empty_tensor_has_no_memory() {
        let t = Tensor::zeros(&[0, 16], DType::F32).unwrap();
        assert_eq!(t.bytes(), 0);
        assert_eq!(t.as_bytes(), Some(&[][..]));
        assert!(t.to_f32().unwrap().is_empty());
        t.copy_to(&mut []).unwrap();
        let v = t
            .view(Shape::strided(&[0, 3], &[5, 2]).unwrap(), 0)
            .unwrap();
        v.copy_to(&mut []).unwrap();
    }
}
