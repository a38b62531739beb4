//! State that launchers keep on a device from call to call: at most one value of each type per device. It is made on first use and dropped
//! with the device.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;

use crate::base::Result;
use crate::base::once::TryOnce;

/// Something kept on a device.
pub(in crate::cuda) trait Attached: Send + Sync + 'static {
    /// The number before which all work that it counts is enqueued.
    fn enqueued(&self) -> u64 {
        0
    }

    /// Called when the device has been waited for since [`Attached::enqueued`] returned `before`.
    fn has_run(&self, _before: u64) {}

    /// Bytes of device memory outside the pool: in use, and kept for later.
    fn held(&self) -> (usize, usize) {
        (0, 0)
    }

    /// Releases what it keeps only for the next call.
    fn trim(&self) {}

    /// Enqueues that its device memory is freed, before the device is closed. The device's context is current.
    fn free(&self, _stream: sys::CUstream) {}
}

/// The slot of one type.
type Slot<T> = TryOnce<Arc<T>>;

/// A slot of any type.
trait AnySlot: Any + Send + Sync {
    fn made(&self) -> Option<Arc<dyn Attached>>;
}

impl<T: Attached> AnySlot for Slot<T> {
    fn made(&self) -> Option<Arc<dyn Attached>> {
        self.get().map(|made| made.clone() as Arc<dyn Attached>)
    }
}

/// Everything that is attached to a device.
#[derive(Default)]
pub(in crate::cuda) struct Attachments(Mutex<Vec<Arc<dyn AnySlot>>>);

impl Attachments {
    fn slots(&self) -> MutexGuard<'_, Vec<Arc<dyn AnySlot>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find<T: Attached>(slots: &[Arc<dyn AnySlot>]) -> Option<Arc<Slot<T>>> {
        let downcast = |slot: &Arc<dyn AnySlot>| {
            let any: Arc<dyn Any + Send + Sync> = slot.clone();
            any.downcast().ok()
        };
        slots.iter().find_map(downcast)
    }

    /// The value of this type, if there is one.
    pub(in crate::cuda) fn get<T: Attached>(&self) -> Option<Arc<T>> {
        Self::find::<T>(&self.slots())?.get().cloned()
    }

    /// The value of this type, made on first use. Does not wait for values of other types that are being made.
    pub(in crate::cuda) fn get_or_try<T: Attached>(
        &self,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<Arc<T>> {
        let slot = {
            let mut slots = self.slots();
            match Self::find(&slots) {
                Some(slot) => slot,
                None => {
                    let slot = Arc::new(Slot::<T>::new());
                    slots.push(slot.clone());
                    slot
                }
            }
        };
        slot.get_or_try(|| make().map(Arc::new)).cloned()
    }

    /// All values that exist.
    pub(in crate::cuda) fn made(&self) -> Vec<Arc<dyn Attached>> {
        self.slots().iter().filter_map(|slot| slot.made()).collect()
    }

    /// Drops everything.
    pub(in crate::cuda) fn detach(&self) {
        self.slots().clear();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::base::error::err;

    #[derive(Default)]
    struct First(AtomicU64);
    struct Second;

    impl Attached for First {
        fn enqueued(&self) -> u64 {
            7
        }
        fn has_run(&self, before: u64) {
            self.0.store(before, Ordering::Relaxed);
        }
    }
    impl Attached for Second {}

    #[test]
    fn each_type_has_one_place_that_a_failure_leaves_empty() {
        let all = Attachments::default();
        assert!(all.get::<First>().is_none());
        assert!(
            all.get_or_try::<Second>(|| Err(err!(Io, "not yet")))
                .is_err()
        );
        assert!(all.made().is_empty());
        let first = all.get_or_try(|| Ok(First::default())).unwrap();
        all.get_or_try(|| Ok(Second)).unwrap();
        let again = all.get_or_try::<First>(|| Err(err!(Io, "there is one")));
        assert!(Arc::ptr_eq(&first, &again.unwrap()));
        for attached in all.made() {
            attached.has_run(attached.enqueued());
        }
        assert_eq!(first.0.load(Ordering::Relaxed), 7);
        assert_eq!(all.made().len(), 2);
        all.detach();
        assert!(all.get::<Second>().is_none());
    }
}
