//! Weights that a trainer changes: passes over them, and its steps, wait for each other.

use std::any::Any;
use std::sync::Arc;

use crate::base::Result;
use crate::base::error::bail;
use crate::base::lease::{Change, Held, Lease};
use crate::base::sync::atomic::{AtomicU64, Ordering};

/// The lease on the weights of a model that is trained.
pub(super) struct Leased {
    lease: Arc<Lease>,
    /// The epoch of the weights that the model has.
    renewed: AtomicU64,
}

impl Leased {
    /// A model of the weights as they are.
    pub(super) fn new(lease: &Arc<Lease>) -> Leased {
        Leased {
            renewed: AtomicU64::new(lease.epoch()),
            lease: lease.clone(),
        }
    }

    /// Takes the lock on the lease until the result is dropped.
    pub(super) fn locked(&'static self) -> Box<dyn Any> {
        self.lease.locked()
    }

    /// Fails on a thread in which a step of the trainer runs.
    pub(super) fn check_thread(&self) -> Result<()> {
        self.lease.check_thread()
    }

    /// Waits for steps as [`Lease::hold`] does. Fails if the model did not follow the last one.
    pub(super) fn hold(&self, give_up: impl Fn() -> bool) -> Result<Held> {
        let held = self.lease.hold(give_up)?;
        if held.epoch() != self.renewed.load(Ordering::Relaxed) {
            bail!(
                InvalidArgument,
                "a step has changed the weights, and the model could not follow it, as the log says; ask the trainer for its model again"
            );
        }
        Ok(held)
    }

    /// Whether the model has the weights as they are.
    pub(super) fn is_renewed(&self) -> bool {
        self.renewed.load(Ordering::Relaxed) == self.lease.epoch()
    }

    /// Records that the model has the weights as they are in a change.
    pub(super) fn renewed(&self, change: &Change) {
        self.renewed.store(change.epoch(), Ordering::Relaxed);
    }
}
