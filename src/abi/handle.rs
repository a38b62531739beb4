//! The registry of live handles. A handle is a pointer-sized number that is never reused and never a valid address. A stale or foreign
//! handle is therefore detected and never dereferenced, and a libtorch tensor is never mistaken for one of ours.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::hash::{BuildHasher, RandomState};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError, RwLock};

use crate::base::error::{Result, bail, err};
use crate::base::fork;

/// An object that C holds by handle.
pub(super) trait Object: Send + Sync + 'static {
    /// Its opaque type in the header.
    type Handle;
    /// Its name in the header.
    const NAME: &'static str;
}

pub(super) struct Live {
    /// Number of references that C holds.
    references: usize,
    object: Arc<dyn Any + Send + Sync>,
    name: &'static str,
}

/// High bits of every handle. They form no valid address on x86-64 (not canonical) or AArch64 (outside the user range, tag byte or not).
const MARK: usize = HIGH << SHIFT;
const HIGH: usize = 0x4e46;
const SHIFT: u32 = 48;
/// Handles are multiples of this, like pointers.
const STEP: usize = 16;

/// The number of the next handle. Each copy of the library in a process starts at a random number, so it does not take
/// another copy's handles for its own.
static NEXT: LazyLock<AtomicUsize> = LazyLock::new(|| AtomicUsize::new(*FIRST));
static FIRST: LazyLock<usize> =
    LazyLock::new(|| first(RandomState::new().hash_one(&raw const LIVE) as usize));
pub(super) static LIVE: RwLock<BTreeMap<usize, Live>> = RwLock::new(BTreeMap::new());

/// A random handle in the lower half of the range; the upper half is enough for any process.
const fn first(random: usize) -> usize {
    MARK | (random & ((1 << (SHIFT - 1)) - 1) & !(STEP - 1))
}

/// Registers `object` with one reference.
pub(super) fn insert<T: Object>(object: Arc<T>) -> *mut T::Handle {
    insert_as(|_| object)
}

/// Registers the object that `make` creates for its handle, with one reference.
pub(super) fn insert_as<T: Object>(make: impl FnOnce(usize) -> Arc<T>) -> *mut T::Handle {
    let handle = NEXT.fetch_add(STEP, Ordering::Relaxed);
    let live = Live {
        references: 1,
        object: make(handle),
        name: T::NAME,
    };
    LIVE.write()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(handle, live);
    std::ptr::without_provenance_mut(handle)
}

fn unknown<T: Object>(argument: &str, handle: *const T::Handle) -> crate::base::Error {
    let what = match handle.addr() {
        0 => "NULL",
        a if is_own(handle.cast()) && (*FIRST..NEXT.load(Ordering::Relaxed)).contains(&a) => {
            "stale: it was released"
        }
        _ if is_own(handle.cast()) => "a handle of another copy of this library",
        _ => "not a handle of this library",
    };
    err!(
        InvalidHandle,
        "{argument} is {what}; pass a live {}",
        T::NAME
    )
}

fn of_kind<T: Object>(argument: &str, live: &Live) -> Result<()> {
    if live.name != T::NAME {
        bail!(
            InvalidHandle,
            "{argument} is a handle of type {}; pass a {}",
            live.name,
            T::NAME
        );
    }
    Ok(())
}

/// Whether `handle` is or was a handle of this library, of any kind.
pub(super) fn is_own(handle: *const c_void) -> bool {
    handle.addr() >> SHIFT == HIGH
}

/// The object of `handle`, kept alive by the result. `argument` is the parameter's name in the header.
pub(super) fn get<T: Object>(argument: &str, handle: *const T::Handle) -> Result<Arc<T>> {
    let live = LIVE.read().unwrap_or_else(PoisonError::into_inner);
    let Some(live) = live.get(&handle.addr()) else {
        return Err(unknown::<T>(argument, handle));
    };
    of_kind::<T>(argument, live)?;
    live.object
        .clone()
        .downcast()
        .map_err(|_| err!(Internal, "two kinds of handle are called {}", T::NAME))
}

/// Adds a reference.
pub(super) fn retain<T: Object>(argument: &str, handle: *const T::Handle) -> Result<()> {
    let mut live = LIVE.write().unwrap_or_else(PoisonError::into_inner);
    let Some(live) = live.get_mut(&handle.addr()) else {
        return Err(unknown::<T>(argument, handle));
    };
    of_kind::<T>(argument, live)?;
    live.references += 1;
    Ok(())
}

/// Gives up a reference; the last one makes the handle stale. The object is dropped once nothing else uses it. NULL is accepted.
pub(super) fn release<T: Object>(argument: &str, handle: *const T::Handle) -> Result<()> {
    give_up::<T>(argument, handle).map(|_| ())
}

/// As [`release`]; returns the object if that was the last reference.
pub(super) fn give_up<T: Object>(
    argument: &str,
    handle: *const T::Handle,
) -> Result<Option<Arc<T>>> {
    if handle.is_null() {
        return Ok(None);
    }
    let mut all = LIVE.write().unwrap_or_else(PoisonError::into_inner);
    let Some(live) = all.get_mut(&handle.addr()) else {
        return Err(unknown::<T>(argument, handle));
    };
    of_kind::<T>(argument, live)?;
    live.references -= 1;
    if live.references > 0 {
        return Ok(None);
    }
    let ended = all.remove(&handle.addr());
    // Dropping may run a host's deleter, which may call in here.
    drop(all);
    ended.map(downcast).transpose()
}

fn downcast<T: Object>(live: Live) -> Result<Arc<T>> {
    let object = live.object.downcast();
    object.map_err(|_| err!(Internal, "two kinds of handle are called {}", T::NAME))
}

/// State in an [`Exclusive`], with snapshots for readers.
pub(super) trait Snapshots {
    /// The part of the state that other calls may read while a call uses it.
    type Snapshot;
    /// A snapshot of the current state.
    fn snapshot(&self) -> Self::Snapshot;
    /// Called when a call that may change it begins.
    fn begin_use(&mut self);
}

/// An object that one call at a time may use while others read it. During a call that is long or calls the host back, readers get a
/// snapshot from its beginning; they wait for any other call.
pub(super) struct Exclusive<T: Snapshots> {
    value: Mutex<T>,
    gate: Mutex<Gate<T::Snapshot>>,
    changed: Condvar,
}

struct Gate<S> {
    user: User<S>,
    /// Fork generation of the process of `user`.
    generation: u32,
    /// Number of readers that wait for a short call.
    waiting: usize,
}

enum User<S> {
    None,
    /// A call that ends soon and makes no callbacks.
    Short,
    Long(S),
}

impl<T: Snapshots> Exclusive<T> {
    pub(super) fn new(value: T) -> Self {
        Exclusive {
            value: Mutex::new(value),
            gate: Mutex::new(Gate {
                user: User::None,
                generation: fork::generation(),
                waiting: 0,
            }),
            changed: Condvar::new(),
        }
    }

    /// Takes the object for this call, which is short and makes no callbacks. `Busy` if another call uses it.
    pub(super) fn take(&self, argument: &str) -> Result<ExclusiveGuard<'_, T>> {
        self.take_as(argument, |_| User::Short)
    }

    /// Takes the object for this call, which may be long and make callbacks. `Busy` if another call uses it, including one further up this
    /// thread's stack.
    pub(super) fn take_long(&self, argument: &str) -> Result<ExclusiveGuard<'_, T>> {
        self.take_as(argument, |value| User::Long(value.snapshot()))
    }

    /// Takes the object for longer than this call. `Busy` if another call uses it.
    pub(super) fn reserve(self: &Arc<Self>, argument: &str) -> Result<Reservation<T>> {
        let taken = self.take_long(argument)?;
        let ExclusiveGuard { value, _gate } = taken;
        drop(value);
        std::mem::forget(_gate);
        Ok(Reservation(self.clone()))
    }

    fn take_as(
        &self,
        argument: &str,
        user: impl FnOnce(&T) -> User<T::Snapshot>,
    ) -> Result<ExclusiveGuard<'_, T>> {
        let mut gate = self.gate();
        // Waiting readers go first, or a loop of short calls would keep them out forever.
        while matches!(gate.user, User::None) && gate.waiting > 0 {
            gate = self.wait(gate);
        }
        self.check_here(&gate, argument)?;
        if !matches!(gate.user, User::None) {
            bail!(
                Busy,
                "{argument} is in use by another call; wait for that call to return"
            );
        }
        let mut value = self.value(argument)?;
        gate.user = user(&value);
        gate.generation = fork::generation();
        value.begin_use();
        Ok(ExclusiveGuard {
            value,
            _gate: OpenGate(self),
        })
    }

    /// Reads the object, or its snapshot during a long call. No call can begin meanwhile.
    pub(super) fn look<R>(
        &self,
        argument: &str,
        live: impl FnOnce(&T) -> Result<R>,
        snapshot: impl FnOnce(&T::Snapshot) -> Result<R>,
    ) -> Result<R> {
        let mut gate = self.gate();
        self.check_here(&gate, argument)?;
        while matches!(gate.user, User::Short) {
            gate.waiting += 1;
            gate = self.wait(gate);
            gate.waiting -= 1;
            self.changed.notify_all();
        }
        match &gate.user {
            User::Long(known) => snapshot(known),
            _ => live(&*self.value(argument)?),
        }
    }

    /// Refuses an object that a thread of the parent process was using during a fork: its state stays inconsistent.
    fn check_here(&self, gate: &Gate<T::Snapshot>, argument: &str) -> Result<()> {
        if !matches!(gate.user, User::None) && gate.generation != fork::generation() {
            bail!(
                Busy,
                "{argument} was in use when this process was forked, by a thread that is not here; make another one"
            );
        }
        Ok(())
    }

    fn gate(&self) -> MutexGuard<'_, Gate<T::Snapshot>> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(
        &self,
        gate: MutexGuard<'a, Gate<T::Snapshot>>,
    ) -> MutexGuard<'a, Gate<T::Snapshot>> {
        self.changed
            .wait(gate)
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn value(&self, argument: &str) -> Result<MutexGuard<'_, T>> {
        self.value.lock().map_err(|_| {
            err!(
                Internal,
                "{argument} was left unusable by an earlier internal error; release it"
            )
        })
    }
}

/// Exclusive use of an object from one call to another, on any thread. Readers get the snapshot of its beginning.
pub(super) struct Reservation<T: Snapshots>(Arc<Exclusive<T>>);

impl<T: Snapshots> Reservation<T> {
    /// The object. `argument` is the name of the parameter that it was given as.
    pub(super) fn value(&self, argument: &str) -> Result<MutexGuard<'_, T>> {
        self.0.value(argument)
    }
}

impl<T: Snapshots> Drop for Reservation<T> {
    fn drop(&mut self) {
        drop(OpenGate(&self.0));
    }
}

/// An object in exclusive use by a call.
pub(super) struct ExclusiveGuard<'a, T: Snapshots> {
    // Dropped first: a caller that finds the gate open must not have to wait for the object.
    value: MutexGuard<'a, T>,
    _gate: OpenGate<'a, T>,
}

/// Opens the gate when a call ends.
struct OpenGate<'a, T: Snapshots>(&'a Exclusive<T>);

impl<T: Snapshots> Drop for OpenGate<'_, T> {
    fn drop(&mut self) {
        self.0.gate().user = User::None;
        self.0.changed.notify_all();
    }
}

impl<T: Snapshots> Deref for ExclusiveGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Snapshots> DerefMut for ExclusiveGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;

    struct A(u32);
    struct B;
    struct HandleA;
    struct HandleB;
    impl Object for A {
        type Handle = HandleA;
        const NAME: &'static str = "A";
    }
    impl Object for B {
        type Handle = HandleB;
        const NAME: &'static str = "B";
    }

    #[test]
    fn a_handle_lives_until_its_last_release() {
        let a = insert(Arc::new(A(7)));
        retain::<A>("a", a).unwrap();
        release::<A>("a", a).unwrap();
        let object = get::<A>("a", a).unwrap();
        release::<A>("a", a).unwrap();
        assert_eq!(object.0, 7);
        for e in [
            get::<A>("a", a).err().unwrap(),
            release::<A>("a", a).unwrap_err(),
            retain::<A>("a", a).unwrap_err(),
        ] {
            assert_eq!(e.kind(), ErrorKind::InvalidHandle);
            assert!(e.message().contains("stale"), "{e}");
        }
        assert_ne!(insert(Arc::new(A(8))), a);
    }

    #[test]
    fn null_foreign_and_wrong_kinds_are_told_apart() {
        let text = |h: *mut HandleA| get::<A>("x", h).err().unwrap().message().to_owned();
        assert_eq!(text(std::ptr::null_mut()), "x is NULL; pass a live A");
        let mut foreign = 0u64;
        assert!(!is_own((&raw const foreign).cast()) && !is_own(std::ptr::null()));
        assert!(text((&raw mut foreign).cast()).contains("not a handle"));
        let b = insert(Arc::new(B));
        assert!(is_own(b.cast()));
        assert!(text(b.cast()).contains("a handle of type B; pass a A"));
        assert!(release::<A>("x", b.cast()).is_err());
        release::<B>("x", b).unwrap();
    }

    struct Watch {
        number: i32,
        taken: usize,
    }
    impl Snapshots for Watch {
        type Snapshot = i32;
        fn snapshot(&self) -> i32 {
            self.number
        }
        fn begin_use(&mut self) {
            self.taken += 1;
        }
    }

    fn watched(number: i32) -> Arc<Exclusive<Watch>> {
        Arc::new(Exclusive::new(Watch { number, taken: 0 }))
    }

    fn look(x: &Exclusive<Watch>) -> Result<(i32, &'static str)> {
        x.look("x", |w| Ok((w.number, "live")), |&s| Ok((s, "snapshot")))
    }

    #[test]
    fn an_exclusive_object_is_busy_while_taken_and_unusable_after_a_panic() {
        let x = watched(1);
        let taken = x.take("x").unwrap();
        assert_eq!(x.take("x").err().unwrap().kind(), ErrorKind::Busy);
        drop(taken);
        let taken = x.take_long("x").unwrap();
        assert_eq!(x.take("x").err().unwrap().kind(), ErrorKind::Busy);
        assert_eq!(taken.taken, 2);
        drop(taken);
        let other = x.clone();
        let panicked = std::thread::spawn(move || {
            let _taken = other.take("x").unwrap();
            panic!("while in use");
        })
        .join();
        assert!(panicked.is_err());
        for error in [
            x.take("x").err().unwrap(),
            x.take_long("x").err().unwrap(),
            look(&x).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Internal);
        }
    }

    #[test]
    fn a_reader_sees_the_state_from_before_a_long_call() {
        let x = watched(1);
        assert_eq!(look(&x).unwrap(), (1, "live"));
        let mut taken = x.take_long("x").unwrap();
        taken.number = 2;
        assert_eq!(look(&x).unwrap(), (1, "snapshot"));
        drop(taken);
        assert_eq!(look(&x).unwrap(), (2, "live"));
    }

    #[test]
    fn a_reservation_lasts_until_it_is_dropped_wherever_that_is() {
        let x = watched(1);
        let reserved = x.reserve("x").unwrap();
        assert_eq!(x.reserve("x").err().unwrap().kind(), ErrorKind::Busy);
        let other = std::thread::spawn(move || {
            reserved.value("x").unwrap().number = 2;
            reserved
        });
        let reserved = other.join().unwrap();
        assert_eq!(x.take("x").err().unwrap().kind(), ErrorKind::Busy);
        assert_eq!(look(&x).unwrap(), (1, "snapshot"));
        drop(reserved);
        assert_eq!(x.take("x").unwrap().number, 2);
    }

    #[test]
    fn a_reader_waits_for_a_short_call_and_comes_before_the_next() {
        let x = watched(1);
        let taken = x.take("x").unwrap();
        let other = x.clone();
        let looking = std::thread::spawn(move || look(&other).unwrap());
        while x.gate().waiting == 0 {
            std::thread::yield_now();
        }
        drop(taken);
        // The next call is not refused, and the waiting reader still comes first.
        x.take("x").unwrap().number = 2;
        assert_eq!(looking.join().unwrap(), (1, "live"));
    }
}
