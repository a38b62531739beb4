//! Tensors in the memory of any device: allocation, borrowing from the host program, and copies between devices; and managed memory under
//! the process's policy.
//!
//! Memory shared with a host program is used in the order of the program's legacy default stream, or of another that it names
//! ([`HostStream`]): the library's work comes after everything enqueued there before the call, and before everything enqueued after it.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use crate::base::error::{Result, bail};
use crate::base::memory::{Buffer, Tag};
use crate::base::{ErrorKind, env};
use crate::cuda::{self, DeviceBuffer, Gpu, ManagedBuffer};
use crate::tensor::{DType, Managed, Place, Release, Shape, Tensor};

pub use crate::cuda::HostStream;

/// Runs `work` on `gpu` with memory that the host program shares, in the order of the program's stream. Returns the error instead if the
/// device has found one in an earlier call.
pub(super) fn in_stream_order<T>(gpu: &Gpu, work: impl FnOnce() -> Result<T>) -> Result<T> {
    gpu.check_calls()?;
    gpu.after_host_stream()?;
    let result = work();
    // Even after an error, because some of the work may have been enqueued.
    gpu.before_host_stream()?;
    result
}

/// Like [`in_stream_order`], for work that waits for the device. Errors of earlier calls are known by then, and are returned too.
pub(super) fn in_stream_order_and_wait<T>(
    gpu: &Gpu,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let result = in_stream_order(gpu, work)?;
    gpu.check_calls()?;
    Ok(result)
}

/// Waits for all work that calls have enqueued on CUDA device `ordinal`. Returns an error that the device has found in it.
pub fn synchronize(ordinal: usize) -> Result<()> {
    let gpu = Gpu::open(ordinal)?;
    gpu.synchronize()?;
    gpu.check_calls()
}

/// A contiguous tensor of zeros, in host memory or on a CUDA device.
pub fn zeros(sizes: &[usize], dtype: DType, device: Option<usize>) -> Result<Tensor> {
    let Some(ordinal) = device else {
        return Tensor::zeros(sizes, dtype);
    };
    let gpu = Gpu::open(ordinal)?;
    in_stream_order(&gpu, || {
        let bytes = Shape::contiguous(sizes)?.elements() * dtype.bytes();
        let buffer = DeviceBuffer::zeroed(&gpu, Tag::DeviceTensor, bytes)?;
        cuda::tensor(buffer, sizes, dtype)
    })
}

/// A view of memory at `address` that the host program lends: memory of CUDA device `ordinal`, or managed memory; see
/// [`Tensor::on_device`]. Fails for other memory.
///
/// # Safety
/// As for [`Tensor::on_device`], in the order of the legacy default stream.
pub unsafe fn lent(
    ordinal: usize,
    address: u64,
    shape: Shape,
    dtype: DType,
    release: Option<Release>,
) -> Result<Tensor> {
    let (place, owner) = cuda::find(ordinal, address)?;
    // SAFETY: the caller's promise.
    unsafe { Tensor::on_device(address, place, shape, dtype, release, owner) }
}

/// Takes over a DLPack tensor in host memory, CUDA memory or managed memory; see [`Tensor::from_dlpack`].
///
/// # Safety
/// As for [`Tensor::from_dlpack`], in the order of the legacy default stream.
pub unsafe fn from_dlpack<M: Managed>(managed: *mut M) -> Result<Tensor> {
    // SAFETY: the caller's promise.
    unsafe { Tensor::from_dlpack(managed, cuda::find) }
}

/// Copies the elements of a tensor on any device, row-major without gaps, into `out`, which must have exactly that size.
pub fn copy_to_host(tensor: &Tensor, out: &mut [u8]) -> Result<()> {
    match tensor.place().cuda() {
        None => tensor.copy_to(out),
        Some(ordinal) => {
            let gpu = Gpu::open(ordinal)?;
            gpu.after_host_stream()?;
            // The download waits for its own work, so the program's next work has nothing left to wait for.
            cuda::download(tensor, out)?;
            gpu.check_calls()
        }
    }
}

/// Copies the elements of a tensor on any device into `out` as f32.
pub fn copy_as_f32(tensor: &Tensor, out: &mut [f32]) -> Result<()> {
    if tensor.place() == Place::Host {
        return tensor.rows_f32(0..tensor.shape().matrix().0, out);
    }
    let mut bytes = Buffer::<u8>::zeroed(Tag::Scratch, tensor.bytes())?;
    copy_to_host(tensor, &mut bytes)?;
    tensor.dtype().to_f32(&bytes, out)
}

/// A contiguous copy in host memory, or on a CUDA device.
pub fn copy(tensor: &Tensor, device: Option<usize>) -> Result<Tensor> {
    let sizes = tensor.shape().sizes();
    let to_host = || Tensor::build(sizes, tensor.dtype(), |bytes| copy_to_host(tensor, bytes));
    let Some(ordinal) = device else {
        return to_host();
    };
    let gpu = Gpu::open(ordinal)?;
    in_stream_order_and_wait(&gpu, || match tensor.place().cuda() {
        None => cuda::upload(&gpu, tensor),
        Some(there) if there == ordinal => {
            let buffer = cuda::contiguous(&gpu, Tag::DeviceTensor, tensor)?;
            cuda::tensor(buffer, sizes, tensor.dtype())
        }
        // From one device to another through the host.
        Some(_) => cuda::upload(&gpu, &to_host()?),
    })
}

/// Policy for managed (unified) memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ManagedPolicy {
    /// No tensor uses managed memory.
    Disabled,
    /// Tensors passed to [`by_policy`] use managed memory if the device supports it.
    #[default]
    Preferred,
    /// Tensors passed to [`by_policy`] use managed memory; fails if the device does not support it.
    Required,
}

impl ManagedPolicy {
    /// The name in host programs.
    pub const fn name(self) -> &'static str {
        match self {
            ManagedPolicy::Disabled => "Disabled",
            ManagedPolicy::Preferred => "PreferUnified",
            ManagedPolicy::Required => "RequireUnified",
        }
    }
}

static POLICY: AtomicU8 = AtomicU8::new(ManagedPolicy::Preferred as u8);

/// Sets the policy of the process.
pub fn set_managed_policy(policy: ManagedPolicy) {
    POLICY.store(policy as u8, Relaxed);
}

/// The policy in force: the one that was set, unless the environment switches managed memory off.
pub fn managed_policy() -> ManagedPolicy {
    if env::managed_memory_is_off() {
        return ManagedPolicy::Disabled;
    }
    [ManagedPolicy::Disabled, ManagedPolicy::Required]
        .into_iter()
        .find(|&p| p as u8 == POLICY.load(Relaxed))
        .unwrap_or_default()
}

/// Fails if the policy or CUDA device `ordinal` does not allow managed memory. Opens no device.
pub fn check_managed(ordinal: usize) -> Result<()> {
    if managed_policy() == ManagedPolicy::Disabled {
        let by = match env::managed_memory_is_off() {
            true => "the environment variable TS_Q4_DISABLE_UM",
            false => "the policy",
        };
        bail!(Unsupported, "managed memory is switched off by {by}");
    }
    cuda::check_managed(ordinal)
        .map_err(|e| e.within(format_args!("managed memory of CUDA device {ordinal}")))
}

/// A contiguous copy of a tensor in managed memory for CUDA device `ordinal`, or the tensor itself if it is in managed memory already.
/// Prefetches it to the device `prefetch`, if given, as its preferred location. `read_mostly` says that it is read far more often than
/// written.
pub fn to_managed(
    tensor: &Tensor,
    ordinal: usize,
    prefetch: Option<usize>,
    read_mostly: bool,
) -> Result<Tensor> {
    let open = |ordinal| check_managed(ordinal).and_then(|()| Gpu::open(ordinal));
    let gpu = open(ordinal)?;
    let target = prefetch.map(open).transpose()?;
    if let Place::Managed(_) = tensor.place() {
        if prefetch.is_some() {
            self::prefetch(tensor, prefetch)?;
        }
        return Ok(tensor.clone());
    }
    let mut buffer = ManagedBuffer::zeroed(&gpu, Tag::DeviceTensor, tensor.bytes())?;
    buffer.advise(target.as_deref(), read_mostly)?;
    match tensor.place().cuda() {
        None => tensor.copy_to(&mut buffer.bytes_mut()[..tensor.bytes()])?,
        Some(there) if there == ordinal => {
            gpu.after_host_stream()?;
            buffer.copy_from(tensor)?;
        }
        Some(_) => copy_to_host(tensor, buffer.bytes_mut())?,
    }
    let managed = cuda::managed_tensor(buffer, tensor.shape().sizes(), tensor.dtype())?;
    if let Some(target) = &target {
        ManagedBuffer::prefetch(&managed, Some(target))?;
    }
    // The host may also use the memory without any stream.
    gpu.synchronize()?;
    gpu.check_calls()?;
    Ok(managed)
}

/// Prefetches a tensor in managed memory to a CUDA device, or to the host.
pub fn prefetch(tensor: &Tensor, to: Option<usize>) -> Result<()> {
    let Place::Managed(ordinal) = tensor.place() else {
        bail!(
            InvalidArgument,
            "the tensor is in {}; only one in managed memory can be moved",
            tensor.place()
        );
    };
    let gpu = Gpu::open(ordinal)?;
    let target = match to {
        Some(ordinal) => Some(Gpu::open(ordinal)?),
        None => None,
    };
    in_stream_order(&gpu, || ManagedBuffer::prefetch(tensor, target.as_deref()))
}

/// Applies the policy to a tensor that CUDA device `ordinal` will use. Returns a copy in managed memory, prefetched to the device, or the
/// tensor itself. The library applies it only to tensors passed in by the host program.
pub fn by_policy(tensor: &Tensor, ordinal: usize, read_mostly: bool) -> Result<Tensor> {
    match managed_policy() {
        ManagedPolicy::Disabled => Ok(tensor.clone()),
        ManagedPolicy::Required => to_managed(tensor, ordinal, Some(ordinal), read_mostly),
        ManagedPolicy::Preferred => match to_managed(tensor, ordinal, Some(ordinal), read_mostly) {
            // If managed memory is unavailable or full, the tensor stays in its memory; any other error is returned.
            Err(e) => match e.kind() {
                ErrorKind::Unsupported
                | ErrorKind::DeviceUnavailable
                | ErrorKind::OutOfMemory
                | ErrorKind::OverBudget => {
                    tracing::debug!("a tensor stays in {}: {e}", tensor.place());
                    Ok(tensor.clone())
                }
                _ => Err(e),
            },
            made => made,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::error::expect_kind;

    /// A single test, because the policy is process-wide.
    #[test]
    fn the_policy_decides_what_becomes_of_a_tensor() {
        let t = Tensor::from_f32(&[1.0, 2.0], &[2], DType::F32).unwrap();
        assert!(ManagedPolicy::default() == ManagedPolicy::Preferred);
        let able = check_managed(0).is_ok();
        for policy in [
            ManagedPolicy::Preferred,
            ManagedPolicy::Disabled,
            ManagedPolicy::Required,
        ] {
            set_managed_policy(policy);
            let in_force = managed_policy();
            if !env::managed_memory_is_off() {
                assert_eq!(in_force, policy);
            }
            let made = by_policy(&t, 0, true);
            match in_force {
                ManagedPolicy::Disabled => {
                    assert_eq!(made.unwrap().data(), t.data());
                    let e = check_managed(0).unwrap_err();
                    assert!(e.message().contains("switched off"), "{e}");
                    let e = to_managed(&t, 0, None, false).unwrap_err();
                    assert_eq!(e.kind(), ErrorKind::Unsupported);
                }
                ManagedPolicy::Preferred if !able => assert_eq!(made.unwrap().data(), t.data()),
                ManagedPolicy::Required if !able => expect_kind(
                    made,
                    check_managed(0).unwrap_err().kind(),
                    "managed memory of CUDA device 0",
                ),
                ManagedPolicy::Preferred | ManagedPolicy::Required => {
                    assert_eq!(made.unwrap().place(), Place::Managed(0));
                }
            }
        }
        set_managed_policy(ManagedPolicy::default());
        let e = prefetch(&t, Some(0)).unwrap_err();
        assert!(e.message().contains("memory of the host"), "{e}");
    }

    #[test]
    fn host_memory_is_copied_to_the_host() {
        let t = Tensor::from_f32(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3], DType::F16).unwrap();
        let v = t
            .view(Shape::strided(&[3, 2], &[1, 3]).unwrap(), 0)
            .unwrap();
        let c = copy(&v, None).unwrap();
        assert!(c.shape().is_contiguous() && c.data() != v.data());
        let mut out = [0.0; 6];
        copy_as_f32(&c, &mut out).unwrap();
        assert_eq!(out, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    }
}
