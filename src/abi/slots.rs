//! Flags that a signal handler may set: they are found by their handle without a lock, an allocation or thread-local storage.

use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// The flag is set. The low bits of a handle are free for such marks: see `handle`.
const SET: usize = 1;
/// The handle is stale; running calls still read the flag.
const RETIRED: usize = 2;

/// Slots of the first chunk; each chunk has twice as many as the one before.
const FIRST: usize = 64;

/// A handle with its marks, or 0.
pub(super) type Slot = AtomicUsize;

/// All slots. They are reused, and their memory is never freed.
pub(super) struct Slots {
    chunks: [AtomicPtr<Slot>; 32],
    /// Unused slots. The lock is only taken to create and drop flags.
    pub(super) free: Mutex<Vec<&'static Slot>>,
}

/// The flags of cancel handles.
pub(super) static CANCELS: Slots = Slots::new();

impl Slots {
    pub(super) const fn new() -> Self {
        Slots {
            chunks: [const { AtomicPtr::new(std::ptr::null_mut()) }; 32],
            free: Mutex::new(Vec::new()),
        }
    }

    /// Claims a slot, not set, for the flag of `handle`.
    pub(super) fn claim(&self, handle: usize) -> &'static Slot {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = free.pop().unwrap_or_else(|| {
            let chunk = self
                .chunks
                .iter()
                .position(|c| c.load(Ordering::Relaxed).is_null())
                .expect("memory ends before 2^37 slots are in use");
            let slots: &'static [Slot] = (0..FIRST << chunk)
                .map(|_| Slot::new(0))
                .collect::<Vec<_>>()
                .leak();
            self.chunks[chunk].store(slots.as_ptr().cast_mut(), Ordering::Release);
            let (first, rest) = slots.split_first().expect("a chunk has slots");
            free.extend(rest);
            first
        });
        slot.store(handle, Ordering::Release);
        slot
    }

    /// Makes a slot free for reuse.
    pub(super) fn give_back(&self, slot: &'static Slot) {
        slot.store(0, Ordering::Relaxed);
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(slot);
    }

    fn find(&self, handle: usize) -> Option<&'static Slot> {
        if handle == 0 || handle & (SET | RETIRED) != 0 {
            return None;
        }
        for (i, chunk) in self.chunks.iter().enumerate() {
            let chunk = chunk.load(Ordering::Acquire);
            if chunk.is_null() {
                break;
            }
            // SAFETY: a chunk that is not NULL has this many slots, for ever.
            let slots: &'static [Slot] = unsafe { std::slice::from_raw_parts(chunk, FIRST << i) };
            let found = slots
                .iter()
                .find(|s| s.load(Ordering::Acquire) & !SET == handle);
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// Sets or clears the flag of `handle`; false if no flag has that handle. May be called anywhere, even in a signal handler.
    pub(super) fn mark(&self, handle: usize, set: bool) -> bool {
        let Some(slot) = self.find(handle) else {
            return false;
        };
        let (from, to) = match set {
            true => (handle, handle | SET),
            false => (handle | SET, handle),
        };
        // Changes nothing if the flag already has that state, or if the slot meanwhile belongs to another handle.
        match slot.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => true,
            Err(found) => found == to,
        }
    }

    /// Makes `handle` stale: its flag is no longer found.
    pub(super) fn retire(&self, handle: usize) {
        if let Some(slot) = self.find(handle) {
            // The slot may meanwhile belong to another handle.
            let retired = |found: usize| (found & !SET == handle).then_some(found | RETIRED);
            let _ = slot.fetch_update(Ordering::AcqRel, Ordering::Acquire, retired);
        }
    }
}

/// Whether the flag in a slot is set.
pub(super) fn is_set(slot: &Slot) -> bool {
    slot.load(Ordering::Relaxed) & SET != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_found_by_its_handle_alone() {
        let slots = Slots::new();
        let claimed: Vec<_> = (1..=1000).map(|i| (i * 16, slots.claim(i * 16))).collect();
        assert!(slots.mark(160, true) && slots.mark(160, true));
        for &(handle, slot) in &claimed {
            assert_eq!(is_set(slot), handle == 160);
        }
        assert!(slots.mark(160, false));
        assert!(!is_set(claimed[9].1));
        assert!(!slots.mark(16_016, true) && !slots.mark(0, true));
        // A call with the slot still reads it; the handle no longer finds it.
        assert!(slots.mark(320, true));
        slots.retire(320);
        assert!(is_set(claimed[19].1) && !slots.mark(320, false));
        slots.give_back(claimed[19].1);
        assert!(!slots.mark(320, true));
        let again = slots.claim(16_032);
        assert!(std::ptr::eq(again, claimed[19].1) && !is_set(again));
    }
}
