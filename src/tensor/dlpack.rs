//! DLPack in both forms, the unversioned one of 0.x (`DLManagedTensor`) and the versioned one of 1.x (`DLManagedTensorVersioned`): the
//! structs, and conversions from and to tensors.

use std::ffi::c_void;

use super::{DType, Owner, Place, Release, Shape, Tensor};
use crate::base::error::{Result, bail, err};

/// Memory of the host.
const CPU: i32 = 1;
/// Memory of a CUDA device.
const CUDA: i32 = 2;
/// CUDA managed memory.
const CUDA_MANAGED: i32 = 13;

/// The supported major version. Another may have any layout after its number.
const MAJOR: u32 = 1;
/// The minor version that introduced the type codes from 7 on.
const MINOR_OF_SMALL_FLOATS: u32 = 1;

/// The memory must not be written to.
const READ_ONLY: u64 = 1;
/// The producer made a copy for the consumer.
const COPIED: u64 = 1 << 1;
/// Elements of fewer than 8 bits have a byte each.
const PADDED: u64 = 1 << 2;

/// The place of memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDevice {
    /// 1 for host memory, 2 for CUDA memory, 13 for CUDA managed memory.
    pub device_type: i32,
    /// The index of the device of that type.
    pub device_id: i32,
}

/// The type of an element.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDataType {
    /// Kind: 0 int, 1 uint, 2 float, 4 bfloat, 6 bool, 10 float8_e4m3fn, 17 float4_e2m1fn.
    pub code: u8,
    /// Bits of one lane.
    pub bits: u8,
    /// Lanes of one element.
    pub lanes: u16,
}

/// A strided tensor that someone else owns.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLTensor {
    /// Start of the allocation.
    pub data: *mut c_void,
    /// The device that it is on.
    pub device: DLDevice,
    /// Number of dimensions.
    pub ndim: i32,
    /// Element type.
    pub dtype: DLDataType,
    /// `ndim` sizes.
    pub shape: *mut i64,
    /// `ndim` strides in elements, or NULL for row-major without gaps.
    pub strides: *mut i64,
    /// Bytes from `data` to the first element.
    pub byte_offset: u64,
}

/// A [`DLTensor`] with its deleter.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// The producer's data.
    pub manager_ctx: *mut c_void,
    /// Called once by the consumer when it is done; may be NULL.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// The DLPack version of a struct.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLPackVersion {
    /// A different number means a different layout of the struct.
    pub major: u32,
    /// A higher number adds types, devices and flags.
    pub minor: u32,
}

/// A [`DLTensor`] with its version, its flags and its deleter.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensorVersioned {
    /// The version; the other fields follow this layout only if its major version is 1.
    pub version: DLPackVersion,
    /// The producer's data.
    pub manager_ctx: *mut c_void,
    /// Called once by the consumer when it is done; may be NULL.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    /// Bits: 1 read-only, 2 copied, 4 elements of fewer than 8 bits are padded to a byte.
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

/// The deleter of a DLPack tensor of one form.
type Delete<M> = unsafe extern "C" fn(*mut M);

/// A form of DLPack: a [`DLTensor`] with its deleter.
pub trait Managed: Sized + 'static {
    /// Whether the form can mark memory as read-only.
    const HAS_FLAGS: bool;

    /// Wraps `tensor` in this form, with the producer's `context`. Flags are lost if the form has none.
    fn close(tensor: DLTensor, flags: u64, context: *mut c_void, delete: Delete<Self>) -> Self;

    /// The tensor and its flags.
    ///
    /// # Safety
    /// `managed` must point to a valid struct, of any version.
    unsafe fn open(managed: *const Self) -> Result<(DLTensor, u64)>;

    /// The producer's context.
    fn context(&self) -> *mut c_void;

    /// The deleter, if any.
    fn delete(&self) -> Option<Delete<Self>>;
}

impl Managed for DLManagedTensor {
    const HAS_FLAGS: bool = false;

    fn close(tensor: DLTensor, _: u64, context: *mut c_void, delete: Delete<Self>) -> Self {
        DLManagedTensor {
            dl_tensor: tensor,
            manager_ctx: context,
            deleter: Some(delete),
        }
    }

    unsafe fn open(managed: *const Self) -> Result<(DLTensor, u64)> {
        // SAFETY: valid by the caller's promise.
        Ok((unsafe { (*managed).dl_tensor }, 0))
    }

    fn context(&self) -> *mut c_void {
        self.manager_ctx
    }

    fn delete(&self) -> Option<Delete<Self>> {
        self.deleter
    }
}

impl Managed for DLManagedTensorVersioned {
    const HAS_FLAGS: bool = true;

    fn close(tensor: DLTensor, flags: u64, context: *mut c_void, delete: Delete<Self>) -> Self {
        let minor = match tensor.dtype.code {
            0..7 => 0,
            _ => MINOR_OF_SMALL_FLOATS,
        };
        DLManagedTensorVersioned {
            version: DLPackVersion {
                major: MAJOR,
                minor,
            },
            manager_ctx: context,
            deleter: Some(delete),
            flags,
            dl_tensor: tensor,
        }
    }

    unsafe fn open(managed: *const Self) -> Result<(DLTensor, u64)> {
        // SAFETY: every version begins with its version number.
        let DLPackVersion { major, minor } = unsafe { (*managed).version };
        if major != MAJOR {
            bail!(
                Unsupported,
                "the DLPack tensor is of version {major}.{minor}; versions {MAJOR}.x are supported"
            );
        }
        // SAFETY: valid by the caller's promise, and of this layout by its version.
        let (tensor, flags) = unsafe { ((*managed).dl_tensor, (*managed).flags) };
        if flags & !(READ_ONLY | COPIED | PADDED) != 0 {
            bail!(
                Unsupported,
                "the DLPack tensor of version {major}.{minor} has flags {flags:#x}, of which only {:#x} are known here",
                READ_ONLY | COPIED | PADDED
            );
        }
        Ok((tensor, flags))
    }

    fn context(&self) -> *mut c_void {
        self.manager_ctx
    }

    fn delete(&self) -> Option<Delete<Self>> {
        self.deleter
    }
}

/// The table of element types: DLPack's (code, bits, lanes) and ours.
const TYPES: [(u8, u8, u16, DType); 12] = [
    (1, 8, 1, DType::U8),
    (0, 8, 1, DType::I8),
    (0, 16, 1, DType::I16),
    (0, 32, 1, DType::I32),
    (0, 64, 1, DType::I64),
    (2, 16, 1, DType::F16),
    (2, 32, 1, DType::F32),
    (2, 64, 1, DType::F64),
    (6, 8, 1, DType::Bool),
    (4, 16, 1, DType::BF16),
    (10, 8, 1, DType::F8E4M3),
    (17, 4, 2, DType::F4E2M1x2),
];

fn sizes(what: &str, values: &[i64]) -> Result<Vec<usize>> {
    values
        .iter()
        .map(|&n| {
            usize::try_from(n).map_err(|_| {
                err!(
                    InvalidArgument,
                    "DLPack {what} {values:?}: negative values are not supported"
                )
            })
        })
        .collect()
}

impl Tensor {
    /// Takes over a DLPack tensor of either form; its deleter runs when the last view is dropped. On an error it stays the caller's. For
    /// CUDA memory, `find` maps the device's index and the address to the real place, and to an owner that keeps the device open.
    ///
    /// # Safety
    /// `managed` must point to a valid DLPack tensor whose memory stays usable and unchanged, from any thread, until its deleter is called,
    /// which any thread may do. Device memory must satisfy the requirements of [`Tensor::on_device`].
    pub unsafe fn from_dlpack<M: Managed>(
        managed: *mut M,
        find: impl FnOnce(usize, u64) -> Result<(Place, Owner)>,
    ) -> Result<Tensor> {
        if managed.is_null() {
            bail!(InvalidArgument, "the DLPack tensor is NULL");
        }
        // SAFETY: valid by the caller's promise.
        let (t, flags) = unsafe { M::open(managed) }?;
        let DLDevice {
            device_type,
            device_id,
        } = t.device;
        if ![CPU, CUDA, CUDA_MANAGED].contains(&device_type) {
            bail!(
                Unsupported,
                "the DLPack tensor is on device type {device_type}; host memory ({CPU}), CUDA memory ({CUDA}) and CUDA managed memory ({CUDA_MANAGED}) are supported"
            );
        }
        let DLDataType { code, bits, lanes } = t.dtype;
        let Some(&(.., dtype)) = TYPES
            .iter()
            .find(|&&(c, b, l, _)| (c, b, l) == (code, bits, lanes))
        else {
            bail!(
                Unsupported,
                "DLPack type code {code} with {bits} bits and {lanes} lanes has no counterpart here"
            );
        };
        if flags & PADDED != 0 && bits < 8 {
            bail!(
                Unsupported,
                "the DLPack tensor's elements of {bits} bits are padded to a byte each; packed ones are supported"
            );
        }
        let rank = usize::try_from(t.ndim)
            .ok()
            .filter(|&n| n <= super::MAX_RANK)
            .ok_or_else(|| {
                err!(
                    InvalidArgument,
                    "the DLPack tensor has {} dimensions; 0 to {} are supported",
                    t.ndim,
                    super::MAX_RANK
                )
            })?;
        if rank > 0 && t.shape.is_null() {
            bail!(InvalidArgument, "the DLPack tensor's shape is NULL");
        }
        let slice = |p: *mut i64| match rank {
            0 => &[][..],
            // SAFETY: a valid DLTensor has `ndim` sizes, and `ndim` strides unless the pointer is NULL.
            _ => unsafe { std::slice::from_raw_parts(p, rank) },
        };
        let shape = sizes("shape", slice(t.shape))?;
        let shape = if t.strides.is_null() {
            Shape::contiguous(&shape)?
        } else {
            Shape::strided(&shape, &sizes("strides", slice(t.strides))?)?
        };
        let offset = usize::try_from(t.byte_offset).map_err(|_| {
            err!(
                InvalidArgument,
                "the DLPack byte offset {} is too large",
                t.byte_offset
            )
        })?;

        let data = t.data.cast::<u8>().wrapping_add(offset);
        let found = match device_type {
            CPU => None,
            _ if shape.extent() > 0 && t.data.is_null() => {
                bail!(InvalidArgument, "the DLPack tensor's data is NULL")
            }
            _ => {
                let ordinal = usize::try_from(device_id).map_err(|_| {
                    err!(
                        InvalidArgument,
                        "the DLPack tensor is on CUDA device {device_id}; they are numbered from 0"
                    )
                })?;
                Some(find(ordinal, data.addr() as u64)?)
            }
        };

        struct Taken<M>(*mut M);
        // SAFETY: the caller promised that any thread may call the deleter.
        unsafe impl<M> Send for Taken<M> {}
        let taken = Taken(managed);
        let release: Release = Box::new(move || {
            let Taken(managed) = { taken };
            // SAFETY: the struct is valid until its deleter is called, which happens here, once.
            unsafe {
                if let Some(delete) = (*managed).delete() {
                    delete(managed);
                }
            }
        });
        // SAFETY: the memory is as the caller promised.
        let tensor = unsafe {
            match found {
                None => Tensor::lent(data, shape, dtype, Some(release)),
                Some((place, owner)) => Tensor::on_device(
                    data.addr() as u64,
                    place,
                    shape,
                    dtype,
                    Some(release),
                    owner,
                ),
            }
        }?;
        Ok(match flags & READ_ONLY {
            0 => tensor,
            _ => tensor.into_read_only(),
        })
    }

    /// A DLPack tensor over this one's memory, which it keeps alive until the consumer calls its deleter. Managed memory is exported as
    /// that of the CUDA device, which more consumers support. Fails for a read-only tensor in the unversioned form.
    pub fn into_dlpack<M: Managed>(self) -> Result<Box<M>> {
        struct Context {
            _tensor: Tensor,
            shape: Vec<i64>,
            strides: Vec<i64>,
        }
        unsafe extern "C" fn delete<M: Managed>(managed: *mut M) {
            if managed.is_null() {
                return;
            }
            // SAFETY: `managed` and its context are the boxes made below, given back here once.
            unsafe {
                let managed = Box::from_raw(managed);
                drop(Box::from_raw(managed.context().cast::<Context>()));
            }
        }
        let flags = match self.is_read_only() {
            true if !M::HAS_FLAGS => bail!(
                Unsupported,
                "the tensor is read-only, which DLPack without versions cannot say: take the versioned form, or copy the tensor"
            ),
            true => READ_ONLY,
            false => 0,
        };
        let to_i64 = |values: &[usize]| values.iter().map(|&n| n as i64).collect::<Vec<_>>();
        let dtype = self.dtype();
        let (code, bits, lanes, _) = TYPES[TYPES
            .iter()
            .position(|&(.., d)| d == dtype)
            .expect("every dtype is in the table: tested")];
        let data = self.data().cast::<c_void>();
        let (device_type, device_id) = match self.place().cuda() {
            None => (CPU, 0),
            Some(ordinal) => (CUDA, ordinal as i32),
        };
        let device = DLDevice {
            device_type,
            device_id,
        };
        let mut context = Box::new(Context {
            shape: to_i64(self.shape().sizes()),
            strides: to_i64(self.shape().strides()),
            _tensor: self,
        });
        let dl_tensor = DLTensor {
            data,
            device,
            ndim: context.shape.len() as i32,
            dtype: DLDataType { code, bits, lanes },
            shape: context.shape.as_mut_ptr(),
            strides: context.strides.as_mut_ptr(),
            byte_offset: 0,
        };
        let context = Box::into_raw(context).cast();
        Ok(Box::new(M::close(dl_tensor, flags, context, delete::<M>)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;

    fn nowhere(_: usize, _: u64) -> Result<(Place, Owner)> {
        bail!(DeviceUnavailable, "no device")
    }

    fn round_trip<M: Managed>(dtype: DType) {
        let t = Tensor::build(&[2, 3], dtype, |bytes| {
            bytes.iter_mut().enumerate().for_each(|(i, b)| *b = i as u8);
            Ok(())
        })
        .unwrap();
        let view = t
            .view(Shape::strided(&[3, 2], &[1, 3]).unwrap(), 0)
            .unwrap();
        let managed = Box::into_raw(view.into_dlpack::<M>().unwrap());
        // SAFETY: just made, and given away here.
        let back = unsafe { Tensor::from_dlpack(managed, nowhere) }.unwrap();
        assert_eq!((back.dtype(), back.is_read_only()), (dtype, false));
        assert_eq!(back.shape().strides(), [1, 3]);
        let original = t.data();
        drop(t);
        assert_eq!(back.data(), original);
        let mut bytes = vec![0; back.bytes()];
        back.copy_to(&mut bytes).unwrap();
        assert_eq!(bytes[0], 0);
        assert_eq!(usize::from(bytes[dtype.bytes()]), 3 * dtype.bytes());
    }

    #[test]
    fn every_dtype_survives_the_round_trip() {
        for &dtype in DType::ALL {
            round_trip::<DLManagedTensor>(dtype);
            round_trip::<DLManagedTensorVersioned>(dtype);
        }
    }

    fn versioned(dtype: DType) -> Box<DLManagedTensorVersioned> {
        Tensor::zeros(&[4], dtype).unwrap().into_dlpack().unwrap()
    }

    #[test]
    fn the_version_is_the_least_that_has_the_type() {
        for (dtype, minor) in [
            (DType::BF16, 0),
            (DType::Bool, 0),
            (DType::F8E4M3, 1),
            (DType::F4E2M1x2, 1),
        ] {
            let managed = versioned(dtype);
            let DLPackVersion {
                major,
                minor: found,
            } = managed.version;
            assert_eq!((major, found, managed.flags), (1, minor, 0));
            // SAFETY: just made, and given away here.
            drop(unsafe { Tensor::from_dlpack(Box::into_raw(managed), nowhere) }.unwrap());
        }
    }

    #[test]
    fn read_only_goes_with_the_memory() {
        let mut managed = versioned(DType::F32);
        managed.flags = READ_ONLY | COPIED;
        // SAFETY: just made, and given away here.
        let t = unsafe { Tensor::from_dlpack(Box::into_raw(managed), nowhere) }.unwrap();
        let mut view = t.view(Shape::contiguous(&[2]).unwrap(), 1).unwrap();
        assert!(t.is_read_only() && view.is_read_only() && view.clone().is_read_only());
        drop(t);
        assert!(view.bytes_mut().is_none());
        expect_kind(
            view.clone().into_dlpack::<DLManagedTensor>(),
            ErrorKind::Unsupported,
            "read-only",
        );
        let managed = view.into_dlpack::<DLManagedTensorVersioned>().unwrap();
        assert_eq!(managed.flags, READ_ONLY);
        // SAFETY: just made, and given away here.
        let back = unsafe { Tensor::from_dlpack(Box::into_raw(managed), nowhere) }.unwrap();
        assert!(back.is_read_only());
    }

    #[test]
    fn versions_and_flags_that_are_not_known_stay_the_callers() {
        let mut managed = versioned(DType::F4E2M1x2);
        let mut refused = |change: &dyn Fn(&mut DLManagedTensorVersioned), message| {
            let (version, flags) = (managed.version, managed.flags);
            change(&mut managed);
            // SAFETY: the struct is valid.
            let result = unsafe { Tensor::from_dlpack(&raw mut *managed, nowhere) };
            expect_kind(result, ErrorKind::Unsupported, message);
            (managed.version, managed.flags) = (version, flags);
        };
        refused(&|m| m.version.major = 2, "version 2.1");
        refused(&|m| m.version.major = 0, "version 0.1");
        refused(&|m| m.flags = PADDED, "4 bits are padded");
        refused(&|m| m.flags = READ_ONLY | 8, "flags 0x9");
        managed.version.minor = 99;
        // SAFETY: made above, and given away here.
        drop(unsafe { Tensor::from_dlpack(Box::into_raw(managed), nowhere) }.unwrap());

        // The padding flag has no effect on elements of whole bytes.
        let mut managed = versioned(DType::F16);
        managed.flags = PADDED;
        // SAFETY: just made, and given away here.
        drop(unsafe { Tensor::from_dlpack(Box::into_raw(managed), nowhere) }.unwrap());

        // After another version's number nothing may follow.
        let version = DLPackVersion { major: 2, minor: 0 };
        let managed = (&raw const version).cast_mut();
        // SAFETY: a minimal struct of version 2, of which only the version is read.
        let result =
            unsafe { Tensor::from_dlpack(managed.cast::<DLManagedTensorVersioned>(), nowhere) };
        expect_kind(result, ErrorKind::Unsupported, "version 2.0");
    }

    #[test]
    fn what_cannot_be_taken_stays_the_callers() {
        let mut managed: Box<DLManagedTensor> = Tensor::zeros(&[2], DType::F32)
            .unwrap()
            .into_dlpack()
            .unwrap();
        let mut refused = |change: &dyn Fn(&mut DLTensor)| {
            let keep = managed.dl_tensor;
            change(&mut managed.dl_tensor);
            // SAFETY: the struct is valid, or refused before the broken part is read.
            let e = unsafe { Tensor::from_dlpack(&mut *managed, nowhere) }.unwrap_err();
            managed.dl_tensor = keep;
            e.message().to_owned()
        };
        assert!(refused(&|t| t.device.device_type = 4).contains("device type 4"));
        assert!(refused(&|t| t.device.device_type = 2).contains("no device"));
        assert!(refused(&|t| t.device.device_type = 13).contains("no device"));
        let negative = refused(&|t| {
            t.device = DLDevice {
                device_type: 2,
                device_id: -1,
            }
        });
        assert!(negative.contains("device -1"));
        assert!(refused(&|t| t.dtype.bits = 7).contains("7 bits"));
        assert!(refused(&|t| t.ndim = 99).contains("99 dimensions"));
        assert!(refused(&|t| t.ndim = -1).contains("-1 dimensions"));
        assert!(refused(&|t| t.shape = std::ptr::null_mut()).contains("NULL"));
        assert!(refused(&|t| t.data = std::ptr::null_mut()).contains("NULL"));
        let deleter = managed.deleter.unwrap();
        // SAFETY: never taken over, so it is deleted here, once.
        unsafe { deleter(Box::into_raw(managed)) };
    }

    #[test]
    fn memory_of_a_device_keeps_its_place() {
        let owner: Owner = std::sync::Arc::new(());
        for (device_type, place) in [(CUDA, Place::Cuda(3)), (CUDA_MANAGED, Place::Managed(3))] {
            let shape = Shape::contiguous(&[2, 4]).unwrap();
            // SAFETY: nothing uses the memory.
            let t =
                unsafe { Tensor::on_device(256, place, shape, DType::F16, None, owner.clone()) }
                    .unwrap();
            let mut managed: Box<DLManagedTensor> = t.into_dlpack().unwrap();
            let device = managed.dl_tensor.device;
            assert_eq!((device.device_type, device.device_id), (CUDA, 3));
            managed.dl_tensor.device.device_type = device_type;
            managed.dl_tensor.byte_offset = 2;
            let find = |ordinal: usize, address: u64| {
                assert_eq!((ordinal, address), (3, 258));
                Ok((place, owner.clone()))
            };
            // SAFETY: just made, and given away here; nothing uses the memory.
            let back = unsafe { Tensor::from_dlpack(Box::into_raw(managed), find) }.unwrap();
            assert_eq!((back.place(), back.data().addr()), (place, 258));
        }
        assert_eq!(std::sync::Arc::strong_count(&owner), 1);
    }
}
