//! A lease on shared state that its owner changes from time to time, such as weights under training. Anything derived from the state before
//! a change is outdated afterwards, and is refused.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::{Result, bail};

#[derive(Debug, Default)]
struct State {
    users: usize,
    changing: bool,
    /// Number of changes so far.
    epoch: u64,
}

/// Excludes users of shared state while its owner changes it, and vice versa. Nobody waits: a conflicting call fails as busy.
#[derive(Debug, Default)]
pub struct Lease(Mutex<State>);

impl Lease {
    /// A lease without users.
    pub fn new() -> Arc<Lease> {
        Arc::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of changes so far, for [`Lease::hold`].
    pub fn epoch(&self) -> u64 {
        self.state().epoch
    }

    /// Uses the state until the result is dropped. Fails if the owner is changing it ([`Busy`]) or has changed it since `epoch`.
    ///
    /// [`Busy`]: super::ErrorKind::Busy
    pub fn hold(self: &Arc<Lease>, epoch: u64) -> Result<Held> {
        let mut state = self.state();
        if state.changing {
            bail!(
                Busy,
                "the model's weights are being trained by another call; wait for that step to return"
            );
        }
        if state.epoch != epoch {
            bail!(
                InvalidArgument,
                "the weights have been trained since this model was made of them; ask the trainer for its model again, and make a new \
                 session of that"
            );
        }
        state.users += 1;
        Ok(Held(self.clone()))
    }

    /// Excludes users until the result is dropped; fails with [`Busy`](super::ErrorKind::Busy) if there are any.
    pub fn change(self: &Arc<Lease>) -> Result<Change> {
        let mut state = self.state();
        if state.users > 0 {
            bail!(
                Busy,
                "{} calls run the model of these weights; wait for them to return before the next step",
                state.users
            );
        }
        if state.changing {
            bail!(Busy, "the weights are being trained by another call");
        }
        state.changing = true;
        Ok(Change(self.clone()))
    }
}

/// A current use.
#[derive(Debug)]
pub struct Held(Arc<Lease>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.state().users -= 1;
    }
}

/// Exclusive access of the owner.
#[derive(Debug)]
pub struct Change(Arc<Lease>);

impl Change {
    /// Records that the state has changed.
    pub fn changed(&self) {
        self.0.state().epoch += 1;
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        self.0.state().changing = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;

    #[test]
    fn users_and_owner_refuse_each_other() {
        let lease = Lease::new();
        let (a, b) = (lease.hold(0).unwrap(), lease.hold(0).unwrap());
        let busy = lease.change().unwrap_err();
        assert_eq!(busy.kind(), ErrorKind::Busy);
        assert!(busy.message().starts_with("2 calls"), "{busy}");
        drop((a, b));
        let change = lease.change().unwrap();
        assert_eq!(lease.hold(0).unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(lease.change().unwrap_err().kind(), ErrorKind::Busy);
        drop(change);
        // Nothing was changed, so the old epoch is still valid.
        drop(lease.hold(0).unwrap());
        let change = lease.change().unwrap();
        change.changed();
        drop(change);
        let stale = lease.hold(0).unwrap_err();
        assert_eq!(stale.kind(), ErrorKind::InvalidArgument);
        assert!(lease.hold(lease.epoch()).is_ok());
    }
}
