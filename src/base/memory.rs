//! Accounted host memory: every large allocation of the library is a [`Buffer`] with a [`Tag`], counted as current and peak use and checked
//! against one hard budget. Exceeding the budget is an error that the host can catch.
//!
//! Counters are process-wide atomics: a budget protects the process, not one model. All functions may be called from any
//! thread.

use std::alloc::{GlobalAlloc, Layout, System, alloc_zeroed};
use std::ffi::c_void;
use std::iter::Sum;
use std::ops::{Add, Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;

use super::alloc;
use super::error::{Error, Result, bail, err};

/// Purpose of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Tag {
    /// Model weights in the form the kernels read.
    Weights,
    /// Cached keys and values of sessions.
    KvCache,
    /// Activations and workspaces.
    Scratch,
    /// Tensors created through the tensor API.
    Tensor,
    /// Model weights on a GPU.
    DeviceWeights,
    /// Cached keys and values on a GPU.
    DeviceKvCache,
    /// Activations and workspaces on a GPU.
    DeviceScratch,
    /// Tensors on a GPU.
    DeviceTensor,
}

impl Tag {
    /// Every tag, in counter order.
    pub const ALL: [Tag; 8] = [
        Tag::Weights,
        Tag::KvCache,
        Tag::Scratch,
        Tag::Tensor,
        Tag::DeviceWeights,
        Tag::DeviceKvCache,
        Tag::DeviceScratch,
        Tag::DeviceTensor,
    ];

    /// Lower-case name used in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Tag::Weights => "weights",
            Tag::KvCache => "kv_cache",
            Tag::Scratch => "scratch",
            Tag::Tensor => "tensor",
            Tag::DeviceWeights => "device_weights",
            Tag::DeviceKvCache => "device_kv_cache",
            Tag::DeviceScratch => "device_scratch",
            Tag::DeviceTensor => "device_tensor",
        }
    }
}

struct Counter {
    current: AtomicU64,
    peak: AtomicU64,
}

impl Counter {
    const fn new() -> Self {
        Counter {
            current: AtomicU64::new(0),
            peak: AtomicU64::new(0),
        }
    }

    fn add(&self, bytes: u64) {
        let now = self.current.fetch_add(bytes, Relaxed) + bytes;
        self.peak.fetch_max(now, Relaxed);
    }
}

static BY_TAG: [Counter; Tag::ALL.len()] = [const { Counter::new() }; Tag::ALL.len()];
static TOTAL: Counter = Counter::new();
static MAPPED: Counter = Counter::new();
static BUDGET: AtomicU64 = AtomicU64::new(u64::MAX);

/// Bytes in use now, and their peak since the start or the last [`reset_peak`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes in use now.
    pub current: u64,
    /// The largest `current` seen.
    pub peak: u64,
}

/// Use under one tag.
pub fn usage(tag: Tag) -> Usage {
    let c = &BY_TAG[tag as usize];
    Usage {
        current: c.current.load(Relaxed),
        peak: c.peak.load(Relaxed),
    }
}

/// Use under all tags together. The peak is that of the sum, not the sum of the tags' peaks.
pub fn total() -> Usage {
    Usage {
        current: TOTAL.current.load(Relaxed),
        peak: TOTAL.peak.load(Relaxed),
    }
}

/// Bytes of files mapped into memory; see [`Mapping`](super::mapping::Mapping). They are under no tag and outside the budget: processes share
/// them, and the system may drop and read them again.
pub fn mapped() -> Usage {
    Usage {
        current: MAPPED.current.load(Relaxed),
        peak: MAPPED.peak.load(Relaxed),
    }
}

pub(super) fn count_mapped(bytes: u64) {
    MAPPED.add(bytes);
}

pub(super) fn uncount_mapped(bytes: u64) {
    MAPPED.current.fetch_sub(bytes, Relaxed);
}

/// Bytes of host memory in use now, under all tags without a GPU.
pub fn on_host() -> u64 {
    let tags = [Tag::Weights, Tag::KvCache, Tag::Scratch, Tag::Tensor];
    tags.iter().map(|&tag| usage(tag).current).sum()
}

/// Numbers of bytes in host memory and in the memory of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Bytes {
    /// In host memory.
    pub host: u64,
    /// In the memory of the GPU.
    pub device: u64,
}

impl Bytes {
    /// Bytes in host memory.
    pub fn of_host(host: u64) -> Bytes {
        Bytes { host, device: 0 }
    }

    /// Bytes in the memory of the GPU.
    pub fn of_device(device: u64) -> Bytes {
        Bytes { host: 0, device }
    }

    /// In both together.
    pub fn total(self) -> u64 {
        self.host.saturating_add(self.device)
    }

    /// Both numbers multiplied by `count`.
    pub fn times(self, count: u64) -> Bytes {
        Bytes {
            host: self.host.saturating_mul(count),
            device: self.device.saturating_mul(count),
        }
    }

    /// The larger number of each.
    pub fn max(self, other: Bytes) -> Bytes {
        Bytes {
            host: self.host.max(other.host),
            device: self.device.max(other.device),
        }
    }
}

impl Add for Bytes {
    type Output = Bytes;

    fn add(self, other: Bytes) -> Bytes {
        Bytes {
            host: self.host.saturating_add(other.host),
            device: self.device.saturating_add(other.device),
        }
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(all: I) -> Bytes {
        all.fold(Bytes::default(), Bytes::add)
    }
}

/// Resets the peaks to current use.
pub fn reset_peak() {
    for c in BY_TAG.iter().chain([&TOTAL, &MAPPED]) {
        c.peak.store(c.current.load(Relaxed), Relaxed);
    }
}

/// Sets the hard budget in bytes for all tags together; `None` removes it. Existing allocations stay.
pub fn set_budget(bytes: Option<u64>) {
    BUDGET.store(bytes.unwrap_or(u64::MAX), Relaxed);
}

/// The hard budget in bytes, if one is set.
pub fn budget() -> Option<u64> {
    match BUDGET.load(Relaxed) {
        u64::MAX => None,
        b => Some(b),
    }
}

fn reserve(tag: Tag, bytes: u64) -> Result<()> {
    let budget = BUDGET.load(Relaxed);
    let claimed = TOTAL.current.fetch_update(Relaxed, Relaxed, |now| {
        now.checked_add(bytes).filter(|&sum| sum <= budget)
    });
    match claimed {
        Ok(before) => {
            TOTAL.peak.fetch_max(before + bytes, Relaxed);
            BY_TAG[tag as usize].add(bytes);
            Ok(())
        }
        Err(now) => bail!(
            OverBudget,
            "{bytes} bytes for {} would pass the memory budget: {now} of {budget} bytes are in use; free something or raise the budget",
            tag.name()
        ),
    }
}

fn release(tag: Tag, bytes: u64) {
    TOTAL.current.fetch_sub(bytes, Relaxed);
    BY_TAG[tag as usize].current.fetch_sub(bytes, Relaxed);
}

/// Memory allocated elsewhere, counted like a [`Buffer`] while this value exists.
#[derive(Debug)]
pub struct Claim {
    tag: Tag,
    bytes: u64,
}

impl Claim {
    /// Counts `bytes` under `tag`, or fails if they would exceed the budget; zero bytes never do. Call it before the allocation.
    pub fn new(tag: Tag, bytes: usize) -> Result<Claim> {
        let bytes = bytes as u64;
        if bytes > 0 {
            reserve(tag, bytes)?;
        }
        Ok(Claim { tag, bytes })
    }

    /// Bytes counted.
    pub fn bytes(&self) -> usize {
        self.bytes as usize
    }

    /// A claim of `bytes` out of this one; `None` if it has fewer.
    pub fn split(&mut self, bytes: usize) -> Option<Claim> {
        self.bytes = self.bytes.checked_sub(bytes as u64)?;
        Some(Claim {
            tag: self.tag,
            bytes: bytes as u64,
        })
    }

    /// Adds another claim of the same tag.
    pub fn join(&mut self, other: Claim) {
        debug_assert_eq!(self.tag, other.tag);
        self.bytes += other.bytes;
        std::mem::forget(other);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        release(self.tag, self.bytes);
    }
}

/// Element types a [`Buffer`] may hold.
///
/// # Safety
/// All-zero bytes must be a valid value, and the type must not need dropping.
pub unsafe trait Plain: Copy + Send + Sync + 'static {}
// SAFETY: integers and IEEE floats are valid for every bit pattern and need no drop.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for i8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}

/// The bytes of plain values.
pub(crate) fn as_bytes<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: plain values have no padding and any byte may be read.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Size and alignment from which memory is requested in huge pages: weights are read in full for every token, and with small pages a good
/// part of that time would go into address translation.
const HUGE: usize = 2 << 20;

/// `bytes` zeroed bytes from the system, aligned to [`HUGE`] and not resident until touched.
fn map(bytes: usize) -> Option<NonNull<u8>> {
    let padded = mapped_len(bytes).checked_add(HUGE)?;
    // SAFETY: an anonymous private mapping at an address of the system's choice.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            padded,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return None;
    }
    let before = start.align_offset(HUGE);
    let after = padded - before - mapped_len(bytes);
    // SAFETY: both trimmed parts are page-aligned ranges of the new mapping, and hold nothing. The advice is a hint: without huge pages,
    // small ones serve.
    unsafe {
        let data = start.cast::<u8>().add(before);
        if before > 0 {
            libc::munmap(start, before);
        }
        if after > 0 {
            libc::munmap(data.add(mapped_len(bytes)).cast::<c_void>(), after);
        }
        #[cfg(target_os = "linux")]
        libc::madvise(
            data.cast::<c_void>(),
            mapped_len(bytes),
            libc::MADV_HUGEPAGE,
        );
        NonNull::new(data)
    }
}

/// Length of a mapping for `bytes`: a multiple of every common page size.
const fn mapped_len(bytes: usize) -> usize {
    bytes.next_multiple_of(64 << 10)
}

fn refused<T>(len: usize) -> Error {
    err!(
        OutOfMemory,
        "the system refused {len} elements of {} bytes",
        size_of::<T>()
    )
}

/// An empty vector with room for `len` elements, not accounted: for small data, or data limited by the host.
pub fn with_room<T>(len: usize) -> Result<Vec<T>> {
    let mut out = Vec::new();
    out.try_reserve_exact(len).map_err(|_| refused::<T>(len))?;
    Ok(out)
}

/// Makes room for `more` elements in a vector, see [`with_room`].
pub fn make_room<T>(items: &mut Vec<T>, more: usize) -> Result<()> {
    items.try_reserve(more).map_err(|_| refused::<T>(more))
}

/// A copy of `text`, see [`with_room`].
pub fn copied(text: &str) -> Result<String> {
    let mut out = String::new();
    out.try_reserve_exact(text.len())
        .map_err(|_| refused::<u8>(text.len()))?;
    out.push_str(text);
    Ok(out)
}

/// A vector of `len` zeros, see [`with_room`].
pub fn zeros<T: Plain>(len: usize) -> Result<Vec<T>> {
    let layout = Layout::array::<T>(len).map_err(|_| refused::<T>(len))?;
    if layout.size() == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: the layout has a non-zero size.
    let data = unsafe { alloc_zeroed(layout) }.cast::<T>();
    match data.is_null() {
        true => Err(refused::<T>(len)),
        // SAFETY: from the allocator with the layout of `len` elements, for which zeros are valid.
        false => Ok(unsafe { Vec::from_raw_parts(data, len, len) }),
    }
}

/// A zero-initialised, 64-byte aligned, accounted array of fixed length.
pub struct Buffer<T: Plain> {
    data: NonNull<T>,
    len: usize,
    claim: Claim,
}

// SAFETY: a Buffer owns its memory exclusively, and T is Send + Sync by the bound on Plain.
unsafe impl<T: Plain> Send for Buffer<T> {}
// SAFETY: as above; shared access only reads.
unsafe impl<T: Plain> Sync for Buffer<T> {}

impl<T: Plain> Buffer<T> {
    /// Alignment of the first element, in bytes: a cache line and the widest vector register.
    pub const ALIGN: usize = 64;

    fn layout(len: usize) -> Result<Layout> {
        len.checked_mul(size_of::<T>())
            .and_then(|bytes| Layout::from_size_align(bytes, Self::ALIGN).ok())
            .ok_or_else(|| {
                err!(
                    OutOfMemory,
                    "an array of {len} elements of {} bytes is too large",
                    size_of::<T>()
                )
            })
    }

    /// Allocates `len` zeros, counted under `tag`.
    pub fn zeroed(tag: Tag, len: usize) -> Result<Self> {
        let layout = Self::layout(len)?;
        if layout.size() > 0 {
            alloc::check()?;
        }
        let claim = Claim::new(tag, layout.size())?;
        Self::claimed(claim, len).map_err(|(e, _)| e)
    }

    /// Allocates `len` zeros that `claim` counts. If that fails, the claim is returned with the error.
    pub fn claimed(claim: Claim, len: usize) -> std::result::Result<Self, (Error, Claim)> {
        let tag = claim.tag;
        let layout = match Self::layout(len) {
            Ok(layout) if layout.size() == claim.bytes() => layout,
            Ok(layout) => {
                let (claimed, bytes) = (claim.bytes(), layout.size());
                let e = err!(Internal, "a claim of {claimed} bytes for {bytes}");
                return Err((e, claim));
            }
            Err(e) => return Err((e, claim)),
        };
        let data = match layout.size() {
            0 => Some(NonNull::<T>::dangling().cast()),
            HUGE.. => map(layout.size()),
            // The reserve is for allocations that cannot fail.
            // SAFETY: the layout has a non-zero size.
            _ => NonNull::new(unsafe { System.alloc_zeroed(layout) }),
        };
        let Some(data) = data else {
            let e = err!(
                OutOfMemory,
                "the system refused {} bytes for {}",
                layout.size(),
                tag.name()
            );
            return Err((e, claim));
        };
        Ok(Buffer {
            data: data.cast(),
            len,
            claim,
        })
    }

    /// Frees the memory, and keeps it counted.
    pub fn into_claim(mut self) -> Claim {
        let tag = self.claim.tag;
        std::mem::replace(&mut self.claim, Claim { tag, bytes: 0 })
    }

    /// Copies `values`, counted under `tag`.
    pub fn from_slice(tag: Tag, values: &[T]) -> Result<Self> {
        let mut buffer = Self::zeroed(tag, values.len())?;
        buffer.copy_from_slice(values);
        Ok(buffer)
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The address of the first element. Who uses it keeps reads and writes of the same elements apart.
    pub fn address(&self) -> NonNull<T> {
        self.data
    }
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        let bytes = self.bytes();
        if bytes > 0 {
            let layout =
                Self::layout(self.len).expect("the layout was valid when the buffer was made");
            // SAFETY: `data` came from `map` or from the system with this same layout, and is not used again.
            unsafe {
                if bytes >= HUGE {
                    libc::munmap(self.data.as_ptr().cast(), mapped_len(bytes));
                } else {
                    System.dealloc(self.data.as_ptr().cast(), layout);
                }
            }
        }
    }
}

impl<T: Plain> Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `data` is valid for `len` initialised elements (or dangling with len * size == 0), borrowed from self.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

impl<T: Plain> std::fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Buffer<{}>[{}] ({})",
            std::any::type_name::<T>(),
            self.len,
            self.claim.tag.name()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;

    #[test]
    fn buffers_are_zeroed_aligned_and_accounted() {
        for len in [0, 1, 1000, HUGE - 1, HUGE, HUGE + 1, 3 * HUGE + 12345] {
            let mut buffer = Buffer::<u8>::zeroed(Tag::Tensor, len).unwrap();
            assert_eq!(buffer.len(), len);
            assert!(buffer.iter().all(|&b| b == 0));
            if len > 0 {
                assert!(buffer.as_ptr().addr().is_multiple_of(Buffer::<u8>::ALIGN));
                assert!(
                    usage(Tag::Tensor).current >= len as u64
                        && usage(Tag::Tensor).peak >= len as u64
                );
                buffer[len - 1] = 7;
            }
        }
        // An empty buffer needs no budget.
        let mut claim = Claim::new(Tag::Tensor, 100).unwrap();
        let part = claim.split(30).unwrap();
        assert!(claim.split(71).is_none() && part.bytes() == 30);
        set_budget(Some(1));
        let empty = Buffer::<u8>::zeroed(Tag::Tensor, 0);
        set_budget(None);
        assert!(empty.unwrap().is_empty());
        claim.join(part);
        assert_eq!(claim.bytes(), 100);
        expect_kind(
            Buffer::<f32>::zeroed(Tag::Tensor, usize::MAX / 2),
            ErrorKind::OutOfMemory,
            "9223372036854775807 elements of 4 bytes",
        );
    }
}
