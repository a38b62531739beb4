//! Page-locked staging buffers for copies to the device. They are kept for the next caller, because the driver takes longer to allocate one
//! than to copy it.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;

use super::attached::Attached;
use super::error::check;
use super::event::Event;
use super::gpu::Gpu;
use super::memory::Pinned;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::base::memory::Tag;

/// Bytes of a staging buffer: long enough for full speed.
pub(in crate::cuda) const STAGING: usize = 1 << 20;
/// Upper limit of kept buffers: two for each thread of a large machine. [`Gpu::empty_cache`] frees them.
const KEPT: usize = 64;

/// The staging buffers that a device keeps.
#[derive(Default)]
struct Kept(Mutex<Vec<Pinned>>);

impl Kept {
    fn all(&self) -> MutexGuard<'_, Vec<Pinned>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of(gpu: &Gpu) -> Result<Arc<Kept>> {
        gpu.attached_or(|| Ok(Kept::default()))
    }
}

impl Attached for Kept {
    fn trim(&self) {
        self.all().clear();
    }
}

/// Takes page-locked memory of at least `bytes`, to be returned by [`keep`] once no enqueued work uses it.
pub(in crate::cuda) fn take(gpu: &Gpu, bytes: usize) -> Result<Pinned> {
    let kept = match bytes <= STAGING {
        true => Kept::of(gpu)?.all().pop(),
        false => None,
    };
    match kept {
        Some(pinned) => Ok(pinned),
        None => Pinned::new(gpu, Tag::Scratch, bytes.max(STAGING)),
    }
}

/// Keeps memory from [`take`] for the next caller, unless enough is kept already.
pub(in crate::cuda) fn keep(gpu: &Gpu, pinned: Pinned) {
    let Some(kept) = gpu.attached::<Kept>() else {
        return;
    };
    let mut kept = kept.all();
    if pinned.bytes() == STAGING && kept.len() < KEPT {
        kept.push(pinned);
    }
}

/// Double buffering: one buffer is filled while the other is copied. Waits for its copies when dropped.
pub(in crate::cuda) struct Staging {
    gpu: Arc<Gpu>,
    bytes: usize,
    /// Each buffer with the event after the copies that read it.
    buffers: [Option<(Pinned, Option<Event>)>; 2],
    turn: usize,
}

impl Staging {
    /// For pieces of up to `bytes`, but at most [`Staging::bytes`].
    pub(in crate::cuda) fn new(gpu: &Arc<Gpu>, bytes: usize) -> Staging {
        Self::of(gpu, bytes.clamp(1, STAGING))
    }

    /// For pieces of exactly `bytes`, however large.
    pub(in crate::cuda) fn of(gpu: &Arc<Gpu>, bytes: usize) -> Staging {
        Staging {
            gpu: gpu.clone(),
            bytes,
            buffers: [None, None],
            turn: 1,
        }
    }

    /// Bytes of a piece.
    pub(in crate::cuda) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The next buffer to fill.
    pub(in crate::cuda) fn next(&mut self) -> Result<&mut [u8]> {
        self.turn = 1 - self.turn;
        let (pinned, busy) = match &mut self.buffers[self.turn] {
            Some(slot) => slot,
            none => none.insert((take(&self.gpu, self.bytes)?, None)),
        };
        if let Some(event) = busy.take() {
            event.wait()?;
        }
        Ok(&mut pinned.bytes_mut()[..self.bytes])
    }

    /// Enqueues copies from ranges of the buffer that was filled last to device addresses.
    ///
    /// # Safety
    /// Those addresses must hold as many bytes of device memory, used in stream order.
    pub(in crate::cuda) unsafe fn send(&mut self, copies: &[(Range<usize>, u64)]) -> Result<()> {
        let Some((pinned, busy)) = &mut self.buffers[self.turn] else {
            return Err(err!(Internal, "no staging buffer was filled"));
        };
        self.gpu.bind()?;
        let sent = copies.iter().try_for_each(|(range, to)| {
            if range.start > range.end || range.end > pinned.bytes() {
                bail!(
                    Internal,
                    "bytes {range:?} of a staging buffer of {}",
                    pinned.bytes()
                );
            }
            check(
                // SAFETY: the range was checked, and the rest is the caller's promise; the staging memory stays unchanged until
                // the event recorded below has passed, which is waited for before it is filled or given back.
                unsafe {
                    sys::cuMemcpyHtoDAsync_v2(
                        *to,
                        pinned.as_ptr().add(range.start).cast(),
                        range.len(),
                        self.gpu.stream(),
                    )
                }
                .result(),
                "copying to the device",
            )
        });
        *busy = Some(Event::record(&self.gpu)?);
        sent
    }

    /// Waits for all copies, and returns their faults.
    pub(in crate::cuda) fn finish(mut self) -> Result<()> {
        self.settle()
    }

    fn settle(&mut self) -> Result<()> {
        let mut result = Ok(());
        for slot in &mut self.buffers {
            let Some((pinned, busy)) = slot.take() else {
                continue;
            };
            match busy.map_or(Ok(()), |event| event.wait()) {
                Ok(()) => keep(&self.gpu, pinned),
                Err(e) => {
                    // The device may still read it.
                    std::mem::forget(pinned);
                    result = Err(e);
                }
            }
        }
        result
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // An error of one copy is lost here: a drop cannot report it.
        let _ = self.settle();
    }
}
