//! Adapters of a served model, and the count of sequences that use each, by which who unloads one can wait.

use std::any::Any;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::base::lock::lock;
use crate::base::sync::{Condvar, Mutex};
use crate::base::{Result, call};
use crate::model::Adapter;

/// Interval at which a waiting caller checks whether its call is over.
const PATIENCE: Duration = Duration::from_millis(10);

/// An adapter that sequences of its model can name. Its memory is freed with the last of them and of its handles.
#[derive(Debug)]
pub struct LoadedAdapter {
    adapter: Adapter,
    uses: Arc<Uses>,
}

/// The number of sequences that use an adapter.
#[derive(Debug, Default)]
struct Uses {
    count: Mutex<usize>,
    none: Condvar,
}

/// The adapter of a sequence.
#[derive(Debug)]
pub(super) struct AdapterUse {
    /// `None` only while it is dropped: the adapter goes before the count does.
    adapter: Option<Arc<LoadedAdapter>>,
    uses: Arc<Uses>,
}

impl LoadedAdapter {
    /// Sequences that use it now, forks and restored ones included.
    pub fn uses(&self) -> usize {
        *lock(&self.uses.count)
    }

    /// Waits until no sequence uses it. Fails if the thread's [`call`] is cancelled or late meanwhile. New sequences may name it at any
    /// time.
    pub fn wait_until_unused(&self) -> Result<()> {
        let mut count = lock(&self.uses.count);
        while *count > 0 {
            let waited = self.uses.none.wait_timeout(count, PATIENCE);
            count = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
            if *count > 0 {
                call::check()?;
            }
        }
        Ok(())
    }
}

impl std::ops::Deref for LoadedAdapter {
    type Target = Adapter;

    fn deref(&self) -> &Adapter {
        &self.adapter
    }
}

/// Two names of one adapter in memory.
impl PartialEq for LoadedAdapter {
    fn eq(&self, other: &LoadedAdapter) -> bool {
        std::ptr::eq(self, other)
    }
}

impl AdapterUse {
    pub(super) fn new(adapter: Arc<LoadedAdapter>) -> AdapterUse {
        let uses = adapter.uses.clone();
        *lock(&uses.count) += 1;
        AdapterUse {
            adapter: Some(adapter),
            uses,
        }
    }

    pub(super) fn adapter(&self) -> Option<&Arc<LoadedAdapter>> {
        self.adapter.as_ref()
    }
}

impl Clone for AdapterUse {
    fn clone(&self) -> AdapterUse {
        *lock(&self.uses.count) += 1;
        AdapterUse {
            adapter: self.adapter.clone(),
            uses: self.uses.clone(),
        }
    }
}

impl Drop for AdapterUse {
    fn drop(&mut self) {
        self.adapter = None;
        let mut count = lock(&self.uses.count);
        *count -= 1;
        if *count == 0 {
            self.uses.none.notify_all();
        }
    }
}

/// The adapters that were loaded for a model and are in memory still.
#[derive(Debug, Default)]
pub(super) struct Adapters {
    all: Mutex<Vec<Weak<LoadedAdapter>>>,
}

impl Adapters {
    /// Takes the lock on the list until the result is dropped.
    pub(super) fn locked(&'static self) -> Box<dyn Any> {
        Box::new(lock(&self.all))
    }

    pub(super) fn add(&self, adapter: Adapter) -> Arc<LoadedAdapter> {
        let adapter = Arc::new(LoadedAdapter {
            adapter,
            uses: Arc::default(),
        });
        lock(&self.all).push(Arc::downgrade(&adapter));
        adapter
    }

    /// The adapters in memory, in the order in which they were loaded.
    pub(super) fn loaded(&self) -> Vec<Arc<LoadedAdapter>> {
        let mut all = lock(&self.all);
        all.retain(|adapter| adapter.strong_count() > 0);
        all.iter().filter_map(Weak::upgrade).collect()
    }
}
