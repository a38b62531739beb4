//! The allocator of the library, and the reserve behind it. Rust ends the process when a small allocation fails, and
//! dependencies (tokenizers, templates, JSON) make such allocations everywhere. So memory is set aside beforehand, where a
//! refusal can still be reported. What the system refuses later comes from there, and a call gets to its end or to the next
//! place where it can fail.
//!
//! The C library allocates too, and ends the process where some of its allocations fail: registering a thread-local destructor
//! is one. So when the system first refuses, some address space is given back to it, and from then on allocations come from the
//! reserve first, until both are whole again.
//!
//! A thread that runs an untrusted program may have a limit of its own. While any thread has one, all threads take the path
//! that checks for it; otherwise none pays for that.
//!
//! The reserve is address space that nobody touches until then. A call does not begin without it, see [`check`]; work whose
//! allocations grow with its input sets aside more while it runs: see [`Budget`], which knows how much, and [`foreign`].
//!
//! Without the feature `allocator` the program has an allocator of its own and nothing is set aside: the process ends where
//! an allocation fails, and a limit of a thread bounds its time alone.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicUsize};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::error::{Result, bail};

/// Whether the program allocates by [`Allocator`].
const INSTALLED: bool = cfg!(feature = "allocator");
/// Bytes that are always set aside.
const STANDING: usize = 8 << 20;
/// Work that takes at most this many bytes is covered by what is always set aside.
const COVERED: usize = 1 << 20;
/// A request above this many bytes leaves half of what is always set aside to smaller ones.
const SMALL: usize = 64 << 10;
/// Blocks of memory that the reserve can consist of.
const REGIONS: usize = 32;
/// Sizes of blocks within them: four for each power of two.
const CLASSES: usize = 4 * usize::BITS as usize;
/// Every place given out is a multiple of this, by `malloc` too.
const ALIGN: usize = 2 * size_of::<usize>();

thread_local! {
    /// Bytes that this thread has set aside.
    static OWN: Cell<usize> = const { Cell::new(0) };
    /// The limit of this thread's allocations, if there is one.
    static LIMIT: Cell<*const Limit> = const { Cell::new(std::ptr::null()) };
}

/// The system's allocator, and where that refuses, the reserve.
#[derive(Debug)]
pub struct Allocator;

// SAFETY: places come from the system or from the reserve, and go back to where they came from: the reserve knows its own.
unsafe impl GlobalAlloc for Allocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.align() <= PLAIN.load(Relaxed) && layout.align() <= layout.size() {
            // SAFETY: a size that is not zero; `malloc` aligns to the size or to ALIGN, whichever is less.
            let place = unsafe { libc::malloc(layout.size()) }.cast::<u8>();
            if !place.is_null() {
                return place;
            }
            // Every block is aligned to ALIGN, so the alignment need not be kept over the call above.
            // SAFETY: 1 is a power of two, and the size was possible with a larger alignment.
            return unsafe {
                self.alloc_further(Layout::from_size_align_unchecked(layout.size(), 1))
            };
        }
        // SAFETY: as promised to this function.
        unsafe { self.alloc_further(layout) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !is_starved() {
            if PLAIN.load(Relaxed) == 0 {
                charge(layout.size());
            }
            // SAFETY: as promised to this function.
            let place = unsafe { System.alloc_zeroed(layout) };
            if !place.is_null() {
                return place;
            }
        }
        // SAFETY: as promised to this function; the place has as many bytes as were asked for.
        unsafe {
            starve();
            let place = self.alloc_further(layout);
            if !place.is_null() {
                place.write_bytes(0, layout.size());
            }
            place
        }
    }

    #[inline]
    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        match POOL.may_have(place) {
            // SAFETY: as promised to this function.
            true => unsafe { self.dealloc_near(place, layout) },
            // SAFETY: as promised to this function; the place is the system's.
            false => unsafe { System.dealloc(place, layout) },
        }
    }

    #[inline]
    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !POOL.may_have(place) && layout.align() <= PLAIN.load(Relaxed) && layout.align() <= size
        {
            // SAFETY: the place is the system's, which gave it by `malloc` or as `free` and `realloc` take it too; else as in `alloc`.
            let moved = unsafe { libc::realloc(place.cast(), size) }.cast::<u8>();
            if !moved.is_null() {
                return moved;
            }
        }
        // SAFETY: as promised to this function.
        unsafe { self.realloc_near(place, layout, size) }
    }
}

impl Allocator {
    /// `alloc` of what takes more than `malloc`: a large alignment, or the reserve.
    ///
    /// # Safety
    /// As for `alloc`.
    #[cold]
    unsafe fn alloc_further(&self, layout: Layout) -> *mut u8 {
        charge(layout.size());
        if !is_starved() {
            // SAFETY: as promised to this function.
            let place = unsafe { System.alloc(layout) };
            if !place.is_null() {
                return place;
            }
            starve();
        }
        match POOL.take(layout) {
            // SAFETY: as promised to this function.
            place if place.is_null() => unsafe { System.alloc(layout) },
            place => place,
        }
    }

    /// `dealloc` of a place that may be the reserve's.
    ///
    /// # Safety
    /// As for `dealloc`.
    #[cold]
    unsafe fn dealloc_near(&self, place: *mut u8, layout: Layout) {
        refund(layout.size());
        match POOL.has(place) {
            true => POOL.give(place, layout),
            // SAFETY: as promised to this function; the place is the system's.
            false => unsafe { System.dealloc(place, layout) },
        }
    }

    /// `realloc` of a place that may be the reserve's, or where the system has refused.
    ///
    /// # Safety
    /// As for `realloc`.
    #[cold]
    unsafe fn realloc_near(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !POOL.has(place) && (size < layout.size() || !is_starved()) {
            charge(size);
            // SAFETY: as promised to this function; the place is the system's.
            let moved = unsafe { System.realloc(place, layout, size) };
            if !moved.is_null() {
                refund(layout.size());
                return moved;
            }
            refund(size);
            starve();
        }
        // SAFETY: `realloc` was promised that the size is possible with this alignment. Both places have as many bytes as are copied,
        // and do not overlap.
        unsafe {
            let wanted = Layout::from_size_align_unchecked(size, layout.align());
            if POOL.has(place) && POOL.fits(place, layout, wanted) {
                return place;
            }
            let moved = self.alloc(wanted);
            if !moved.is_null() {
                moved.copy_from_nonoverlapping(place, layout.size().min(size));
                self.dealloc(place, layout);
            }
            moved
        }
    }
}

/// The largest alignment that goes to `malloc` as it is; 0 when the system has refused, and the reserve comes first, and while a thread
/// has a limit.
static PLAIN: AtomicUsize = AtomicUsize::new(ALIGN);
/// Whether the system has refused.
static STARVED: AtomicBool = AtomicBool::new(false);
/// Threads that have limits.
static LIMITED: AtomicUsize = AtomicUsize::new(0);
/// Where the address space is that the system gets back then; 0 if it has it.
static BALLAST: AtomicUsize = AtomicUsize::new(0);

/// Address space for the C library when there is no more.
const BALLAST_LEN: usize = 1 << 20;

/// Notes that the system has refused, and gives it the ballast.
fn starve() {
    STARVED.store(true, Relaxed);
    PLAIN.store(0, Relaxed);
    POOL.spare.store(0, Relaxed);
    let start = BALLAST.swap(0, AcqRel);
    if start != 0 {
        // SAFETY: a mapping of this file's own, of this length, that nothing uses.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(start), BALLAST_LEN) };
    }
}

fn is_starved() -> bool {
    STARVED.load(Relaxed)
}

/// `len` bytes from the system, or nothing.
fn map(len: usize) -> Option<usize> {
    // SAFETY: an anonymous private mapping at an address of the system's choice.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    (start != libc::MAP_FAILED).then(|| start.expose_provenance())
}

/// Finds out early whether the system refuses, before the C library does.
pub(super) fn probe() {
    let mut some: Vec<u8> = Vec::new();
    // The allocator has noted the result.
    let _ = some.try_reserve_exact(SMALL);
    std::hint::black_box(&mut some);
}

/// A block of memory in the reserve.
struct Region {
    start: AtomicUsize,
    /// 0 where there is none.
    len: AtomicUsize,
    inner: UnsafeCell<Inner>,
}

/// State that only the holder of the pool's lock touches.
struct Inner {
    /// Bytes from the start that were given out since the region was last empty.
    top: usize,
    /// Bytes that are given out.
    live: usize,
    /// For each class the last place that came back; each has the address of the one before in it.
    free: [usize; CLASSES],
}

impl Region {
    const fn new() -> Region {
        Region {
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            inner: UnsafeCell::new(Inner {
                top: 0,
                live: 0,
                free: [0; CLASSES],
            }),
        }
    }

    fn has(&self, address: usize) -> bool {
        address.wrapping_sub(self.start.load(Relaxed)) < self.len.load(Relaxed)
    }
}

struct Pool {
    locked: AtomicBool,
    /// All regions that there ever were lie in `low..high`, so that a place of the system's is mostly told by two comparisons. While a
    /// thread has a limit, everything does.
    low: AtomicUsize,
    high: AtomicUsize,
    /// The bounds when no thread has one.
    bounds: UnsafeCell<(usize, usize)>,
    /// Bytes that are there and that nobody has set aside for work; 0 while the system refuses.
    spare: AtomicUsize,
    /// Bytes that are set aside for work.
    claimed: UnsafeCell<usize>,
    regions: [Region; REGIONS],
}

// SAFETY: what is not atomic is only touched by the holder of the lock.
unsafe impl Sync for Pool {}

static POOL: Pool = Pool::new();

/// The size of the block for a request, and the number of its class.
fn class(layout: Layout) -> (usize, usize) {
    let wanted = layout.size().max(ALIGN);
    let octave = wanted.ilog2();
    let step = (1usize << (octave - 2)).max(ALIGN);
    // A request of half of all addresses or more is refused later: no region has room for it.
    let size = wanted.div_ceil(step).saturating_mul(step);
    let octave = size.ilog2();
    (size, 4 * octave as usize + (size >> (octave - 2)) % 4)
}

/// Holds a pool's lock.
struct Locked<'a>(&'a Pool);

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.0.locked.store(false, Release);
    }
}

impl Pool {
    const fn new() -> Pool {
        Pool {
            locked: AtomicBool::new(false),
            low: AtomicUsize::new(usize::MAX),
            high: AtomicUsize::new(0),
            bounds: UnsafeCell::new((usize::MAX, 0)),
            spare: AtomicUsize::new(0),
            claimed: UnsafeCell::new(0),
            regions: [const { Region::new() }; REGIONS],
        }
    }

    fn lock(&self) -> Locked<'_> {
        // Held for some hundred instructions, or for a system call, by threads that are out of memory. A mutex of the standard
        // library could allocate.
        while self.locked.swap(true, Acquire) {
            std::thread::yield_now();
        }
        Locked(self)
    }

    /// Whether a place is where the regions are: one elsewhere is the system's.
    #[inline]
    fn may_have(&self, place: *mut u8) -> bool {
        let address = place.addr();
        address >= self.low.load(Relaxed) && address < self.high.load(Relaxed)
    }

    fn has(&self, place: *mut u8) -> bool {
        self.may_have(place) && self.regions.iter().any(|r| r.has(place.addr()))
    }

    /// A region's innards.
    #[allow(clippy::mut_from_ref)] // The lock makes them one's own.
    fn inner<'a>(&'a self, region: &'a Region, _: &'a mut Locked<'_>) -> &'a mut Inner {
        // SAFETY: the lock is held, and borrowed for as long as what is returned.
        unsafe { &mut *region.inner.get() }
    }

    #[cold]
    fn take(&self, layout: Layout) -> *mut u8 {
        let (size, class) = class(layout);
        let mut lock = self.lock();
        let own = OWN.try_with(Cell::get).unwrap_or(0) > 0;
        let spare = self
            .left(&mut lock)
            .saturating_sub(*self.claimed(&mut lock));
        if layout.size() > SMALL && !own && spare < size.saturating_add(STANDING / 2) {
            return std::ptr::null_mut();
        }
        let mut found = 0;
        for region in &self.regions {
            let (start, len) = (region.start.load(Relaxed), region.len.load(Relaxed));
            let inner = self.inner(region, &mut lock);
            let last = inner.free[class];
            if last != 0 && last.is_multiple_of(layout.align()) {
                // SAFETY: a block that came back has the one before it in its first bytes.
                inner.free[class] =
                    unsafe { std::ptr::with_exposed_provenance::<usize>(last).read() };
                found = last;
            } else {
                let at = (start + inner.top).next_multiple_of(layout.align().max(ALIGN)) - start;
                if at.saturating_add(size) > len {
                    continue;
                }
                inner.top = at + size;
                found = start + at;
            }
            inner.live += size;
            break;
        }
        self.count(&mut lock);
        std::ptr::with_exposed_provenance_mut(found)
    }

    #[cold]
    fn give(&self, place: *mut u8, layout: Layout) {
        let (size, class) = class(layout);
        let mut lock = self.lock();
        for region in self.regions.iter().filter(|r| r.has(place.addr())) {
            let inner = self.inner(region, &mut lock);
            inner.live -= size;
            if inner.live == 0 {
                inner.top = 0;
                inner.free = [0; CLASSES];
            } else {
                // SAFETY: the block is nobody's any more, and has room for an address.
                unsafe { place.cast::<usize>().write(inner.free[class]) };
                inner.free[class] = place.expose_provenance();
            }
        }
        self.count(&mut lock);
    }

    /// Whether a place serves for `wanted` too; then it is one of that layout.
    fn fits(&self, place: *mut u8, layout: Layout, wanted: Layout) -> bool {
        let (before, now) = (class(layout).0, class(wanted).0);
        if now < before {
            let mut lock = self.lock();
            for region in self.regions.iter().filter(|r| r.has(place.addr())) {
                // The rest is idle until the region is empty.
                self.inner(region, &mut lock).live -= before - now;
            }
        }
        now <= before
    }

    /// Bytes that can be given out for requests of any size.
    fn left(&self, lock: &mut Locked<'_>) -> usize {
        let mut left = 0;
        for region in &self.regions {
            left += region.len.load(Relaxed) - self.inner(region, lock).top;
        }
        left
    }

    /// Bytes that are set aside for work.
    #[allow(clippy::mut_from_ref)] // The lock makes the number one's own.
    fn claimed<'a>(&'a self, _: &'a mut Locked<'_>) -> &'a mut usize {
        // SAFETY: the lock is held, and borrowed for as long as what is returned.
        unsafe { &mut *self.claimed.get() }
    }

    fn count(&self, lock: &mut Locked<'_>) {
        let left = self.left(lock);
        let spare = match is_starved() {
            true => 0,
            false => left.saturating_sub(*self.claimed(lock)),
        };
        self.spare.store(spare, Relaxed);
    }

    /// Adds a region if fewer than `wanted` bytes more than what is claimed are left besides the standing ones. Whether they
    /// are there now.
    fn grow(&self, wanted: usize, lock: &mut Locked<'_>) -> bool {
        let needed = self.claimed(lock).saturating_add(STANDING);
        let missing = needed
            .saturating_add(wanted)
            .saturating_sub(self.left(lock));
        if missing == 0 {
            return true;
        }
        // All of it may be asked for in one request.
        let missing = missing.max(wanted);
        let Some(region) = self.regions.iter().find(|r| r.len.load(Relaxed) == 0) else {
            return false;
        };
        let Some(len) = missing.max(STANDING).checked_next_multiple_of(STANDING) else {
            return false;
        };
        let Some(start) = map(len) else {
            return false;
        };
        // SAFETY: the lock is held.
        let bounds = unsafe { &mut *self.bounds.get() };
        *bounds = (bounds.0.min(start), bounds.1.max(start + len));
        self.low.fetch_min(start, Relaxed);
        self.high.fetch_max(start + len, Relaxed);
        region.start.store(start, Relaxed);
        region.len.store(len, Relaxed);
        true
    }

    /// Gives regions back that are not in use and not needed.
    fn shrink(&self, lock: &mut Locked<'_>) {
        for region in &self.regions {
            let len = region.len.load(Relaxed);
            let needed = self.claimed(lock).saturating_add(STANDING);
            if len == 0 || self.inner(region, lock).live > 0 || self.left(lock) - len < needed {
                continue;
            }
            region.len.store(0, Relaxed);
            let start = std::ptr::with_exposed_provenance_mut(region.start.load(Relaxed));
            // SAFETY: a mapping of this pool's own, of which nothing is given out. It has this length, so this cannot fail.
            unsafe { libc::munmap(start, len) };
        }
    }
}

/// Makes sure of the reserve; an error if the system has no memory for it. Costs a comparison as long as nothing was taken from it.
#[inline]
pub fn check() -> Result<()> {
    match POOL.spare.load(Relaxed) >= STANDING / 2 || !INSTALLED {
        true => Ok(()),
        false => refill(),
    }
}

#[cold]
fn refill() -> Result<()> {
    let mut lock = POOL.lock();
    let mut there = POOL.grow(0, &mut lock);
    if there && BALLAST.load(Relaxed) == 0 {
        match map(BALLAST_LEN) {
            Some(start) => {
                STARVED.store(false, Relaxed);
                if LIMITED.load(Relaxed) == 0 {
                    PLAIN.store(ALIGN, Relaxed);
                }
                BALLAST.store(start, Release);
            }
            None => there = false,
        }
    }
    POOL.count(&mut lock);
    drop(lock);
    if !there {
        bail!(
            OutOfMemory,
            "the system refused {STANDING} bytes, which are set aside for when memory runs out"
        );
    }
    Ok(())
}

/// Memory set aside for what the thread that holds this does meanwhile.
#[derive(Debug)]
#[must_use = "what is set aside is so until this is dropped"]
pub struct Aside {
    bytes: usize,
    /// The thread's own.
    _thread: PhantomData<*const ()>,
}

/// Sets `bytes` aside for allocations that cannot fail: whatever the system refuses this thread, it has them. Nothing is asked of
/// the system where the reserve is enough.
fn set_aside(bytes: usize) -> Result<Aside> {
    check()?;
    let bytes = match bytes {
        ..=COVERED => 0,
        _ if !INSTALLED => 0,
        more => more,
    };
    if bytes > 0 {
        let mut lock = POOL.lock();
        let there = POOL.grow(bytes, &mut lock);
        if there {
            *POOL.claimed(&mut lock) += bytes;
        }
        POOL.count(&mut lock);
        drop(lock);
        if !there {
            bail!(
                OutOfMemory,
                "the system refused {bytes} bytes, which may be needed for what is to be done"
            );
        }
        OWN.set(OWN.get() + bytes);
    }
    Ok(Aside {
        bytes,
        _thread: PhantomData,
    })
}

impl Drop for Aside {
    fn drop(&mut self) {
        if self.bytes > 0 {
            let _ = OWN.try_with(|own| own.set(own.get() - self.bytes));
            let mut lock = POOL.lock();
            *POOL.claimed(&mut lock) -= self.bytes;
            POOL.shrink(&mut lock);
            POOL.count(&mut lock);
        }
    }
}

/// Bytes that work may take at a time in allocations that cannot fail, computed from the size of its input. Every factor stands
/// here: an upper bound by the types that the input becomes, or above what was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a budget does nothing before it is set aside"]
pub struct Budget(usize);

impl Budget {
    /// Work on a few short texts, which the standing reserve covers.
    pub const SMALL: Budget = Budget(0);

    /// Copies of a text or an array: two, or one in a vector that grows by doubling.
    const COPIES: usize = 2;
    /// Bytes for a byte of text that is copied with changes. One byte that is not UTF-8, or is marked, becomes three or four, in a
    /// string that grows by doubling.
    const REWRITTEN: usize = 8;
    /// Bytes for a byte of JSON that becomes values: an empty object of two bytes and a comma becomes a value of some seventy, in
    /// a vector that grows by doubling.
    const VALUES: usize = 48;
    /// Bytes for a byte of JSON that is read into types made for it, which hold its names and numbers.
    const FIELDS: usize = 8;
    /// Bytes for a byte of text that is written as JSON: escapes take six, in a buffer that grows by doubling, beside a copy of the text.
    const JSON: usize = 16;
    /// Bytes for the keys and brackets of a message in JSON.
    const MESSAGE_JSON: usize = 256;
    /// Bytes for a byte of a `tokenizer.json` or a vocabulary: 14 measured.
    const VOCABULARY: usize = 32;
    /// Bytes for an entry of a vocabulary beside its text.
    const ENTRY: usize = 1024;
    /// Bytes for a byte of text that the crate `tokenizers` encodes: 60 to 330 measured, in vectors that grow by doubling.
    const ENCODED: usize = 512;
    /// Bytes for a byte of a message that a chat template renders: templates copy texts.
    const RENDERED: usize = 16;
    /// Bytes for a message that a chat template renders, beside its text.
    const MESSAGE: usize = 1024;
    /// Bytes for a number of a file, whatever its width there.
    const NUMBER: usize = 8;
    /// Bytes for the name, shape and place of a tensor in a file.
    const TENSOR: usize = 2048;

    /// A grammar that is compiled, on a thread that may not take more.
    pub const GRAMMAR: Budget = Budget(64 << 20);
    /// One step of a text that follows a grammar.
    pub const GRAMMAR_STEP: Budget = Budget(COVERED);

    const fn of(size: usize, factor: usize) -> Budget {
        Budget(size.saturating_mul(factor))
    }

    const fn and(self, other: Budget) -> Budget {
        Budget(self.0.saturating_add(other.0))
    }

    /// Copies of `bytes` bytes of text or of an array.
    pub const fn copies(bytes: usize) -> Budget {
        Self::of(bytes, Self::COPIES)
    }

    /// `bytes` bytes of text, copied with changes.
    pub const fn rewritten(bytes: usize) -> Budget {
        Self::of(bytes, Self::REWRITTEN)
    }

    /// `bytes` bytes of JSON, read as [`serde_json::Value`].
    pub const fn values(bytes: usize) -> Budget {
        Self::of(bytes, Self::VALUES)
    }

    /// `bytes` bytes of JSON, read into types made for it.
    pub const fn fields(bytes: usize) -> Budget {
        Self::of(bytes, Self::FIELDS)
    }

    /// `messages` messages with `bytes` bytes of text, written as JSON.
    pub const fn json(bytes: usize, messages: usize) -> Budget {
        Self::of(bytes, Self::JSON).and(Self::of(messages, Self::MESSAGE_JSON))
    }

    /// A `tokenizer.json` of `bytes` bytes, or a vocabulary of `entries` entries with `bytes` bytes of text.
    pub const fn vocabulary(bytes: usize, entries: usize) -> Budget {
        Self::of(bytes, Self::VOCABULARY).and(Self::of(entries, Self::ENTRY))
    }

    /// `bytes` bytes of text, encoded to tokens.
    pub const fn encoded(bytes: usize) -> Budget {
        Self::of(bytes, Self::ENCODED)
    }

    /// `messages` messages of `bytes` bytes, rendered by a chat template.
    pub const fn rendered(bytes: usize, messages: usize) -> Budget {
        Self::of(bytes, Self::RENDERED).and(Self::of(messages, Self::MESSAGE))
    }

    /// An array of `count` numbers in a file's metadata.
    pub const fn numbers(count: usize) -> Budget {
        Self::of(count, Self::NUMBER)
    }

    /// The directory of a file with `count` tensors.
    pub const fn tensors(count: usize) -> Budget {
        Self::of(count, Self::TENSOR)
    }

    /// The budget in bytes.
    pub const fn bytes(self) -> usize {
        self.0
    }

    /// Sets it aside for what this thread does while it holds the result. Fails where the system has not so much memory.
    pub fn set_aside(self) -> Result<Aside> {
        set_aside(self.0)
    }
}

/// Runs code of a dependency (a tokenizer, a template, a parser of JSON), whose allocations cannot fail, with its budget set aside. Fails
/// before `body` begins where the system has not so much memory.
pub fn foreign<T>(budget: Budget, body: impl FnOnce() -> Result<T>) -> Result<T> {
    let _aside = budget.set_aside()?;
    body()
}

/// How much a thread may allocate and how long it may run, for untrusted programs, which nothing else bounds: an allocator
/// cannot refuse without ending the process. A thread that exceeds its limit stands still for ever and keeps what it has, and
/// the thread that waits for it is told.
#[derive(Debug)]
pub(super) struct Limit {
    /// Bytes that it may still take.
    left: AtomicIsize,
    is_over: Mutex<Over>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Over {
    No,
    /// The work was done.
    Done,
    /// It went beyond the limit.
    Beyond,
}

impl Limit {
    /// One of so many bytes.
    pub(super) fn new(bytes: usize) -> Limit {
        Limit {
            left: AtomicIsize::new(isize::try_from(bytes).unwrap_or(isize::MAX)),
            is_over: Mutex::new(Over::No),
            changed: Condvar::new(),
        }
    }

    /// Runs `body` on this thread, within the limit.
    pub(super) fn during<T>(&self, body: impl FnOnce() -> T) -> T {
        struct Leave;
        impl Drop for Leave {
            fn drop(&mut self) {
                LIMIT.set(std::ptr::null());
                look_for_limits(-1);
            }
        }
        look_for_limits(1);
        LIMIT.set(self);
        let _leave = Leave;
        body()
    }

    /// Tells that the work is done.
    pub(super) fn done(&self) {
        self.tell(Over::Done);
    }

    fn tell(&self, over: Over) {
        *self.is_over.lock().unwrap_or_else(PoisonError::into_inner) = over;
        self.changed.notify_all();
    }

    /// Waits until the work is done; false if it went beyond the limit, or has not ended after `longest` by the clock `spent`, or
    /// where that tells nothing by the machine's. Then its thread stands still from its next allocation on.
    pub(super) fn wait(&self, longest: Duration, spent: impl Fn() -> Option<Duration>) -> bool {
        let begun = Instant::now();
        let mut over = self.is_over.lock().unwrap_or_else(PoisonError::into_inner);
        while *over == Over::No {
            let spent = spent().unwrap_or_else(|| begun.elapsed());
            let Some(left) = longest.checked_sub(spent).filter(|left| !left.is_zero()) else {
                self.left.store(isize::MIN / 2, Relaxed);
                return false;
            };
            let waited = self.changed.wait_timeout(over, left);
            over = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *over == Over::Done
    }
}

/// Lets all threads look for limits while there are any.
fn look_for_limits(more: isize) {
    let _lock = POOL.lock();
    let limited = LIMITED.load(Relaxed).saturating_add_signed(more);
    LIMITED.store(limited, Relaxed);
    // SAFETY: the lock is held.
    let (low, high) = unsafe { *POOL.bounds.get() };
    let plain = if is_starved() { 0 } else { ALIGN };
    let (plain, low, high) = match limited {
        0 => (plain, low, high),
        _ => (0, 0, usize::MAX),
    };
    PLAIN.store(plain, Relaxed);
    POOL.low.store(low, Relaxed);
    POOL.high.store(high, Relaxed);
}

/// Notes that this thread takes `bytes`.
fn charge(bytes: usize) {
    let limit = LIMIT.try_with(Cell::get).unwrap_or(std::ptr::null());
    // SAFETY: `Limit::during` has borrowed it.
    let Some(limit) = (unsafe { limit.as_ref() }) else {
        return;
    };
    let bytes = isize::try_from(bytes).unwrap_or(isize::MAX / 2);
    if limit.left.fetch_sub(bytes, Relaxed) < bytes {
        LIMIT.set(std::ptr::null());
        look_for_limits(-1);
        limit.tell(Over::Beyond);
        loop {
            std::thread::park();
        }
    }
}

/// Notes that this thread gives `bytes` back.
fn refund(bytes: usize) {
    let limit = LIMIT.try_with(Cell::get).unwrap_or(std::ptr::null());
    // SAFETY: as above.
    if let Some(limit) = unsafe { limit.as_ref() } {
        limit.left.fetch_add(bytes.cast_signed(), Relaxed);
    }
}

/// Holds the reserve while the process forks, so that no other thread is within it.
pub(super) fn hold() {
    std::mem::forget(POOL.lock());
}

/// Ends what [`hold`] began.
pub(super) fn let_go() {
    POOL.locked.store(false, Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(size: usize, align: usize) -> Layout {
        Layout::from_size_align(size, align).unwrap()
    }

    fn grown(pool: &Pool, wanted: usize) -> bool {
        let mut lock = pool.lock();
        let there = pool.grow(wanted, &mut lock);
        pool.count(&mut lock);
        there
    }

    /// Gives all regions back.
    fn emptied(pool: &Pool) {
        for region in &pool.regions {
            let len = region.len.swap(0, Relaxed);
            if len > 0 {
                let start = std::ptr::with_exposed_provenance_mut(region.start.load(Relaxed));
                // SAFETY: the pool's own mapping, which nothing uses any more.
                unsafe { libc::munmap(start, len) };
            }
        }
    }

    #[test]
    fn classes_are_in_order_and_waste_a_quarter_at_most() {
        let mut before = (0, 0);
        for size in (1..5000).chain([1 << 20, (1 << 20) + 1, usize::MAX >> 1]) {
            let (rounded, class) = class(layout(size, 1));
            assert!(rounded >= size && rounded.is_multiple_of(ALIGN));
            assert!(
                rounded <= size.max(ALIGN) + (size / 4).max(ALIGN),
                "{size}: {rounded}"
            );
            assert!(class < CLASSES && (rounded, class) >= before);
            assert_eq!(rounded == before.0, class == before.1, "{size}");
            before = (rounded, class);
        }
    }

    #[test]
    fn places_are_apart_come_back_and_the_last_one_empties_the_region() {
        let pool = Pool::new();
        assert!(pool.take(layout(8, 8)).is_null());
        assert!(grown(&pool, 0));
        let mut places = Vec::new();
        for (i, size) in (1..400).map(|i| i * 7).enumerate() {
            let layout = layout(size, [1, 8, 64, 4096][i % 4]);
            let place = pool.take(layout);
            assert!(pool.has(place) && place.addr().is_multiple_of(layout.align()));
            // SAFETY: the pool gave the place for so many bytes.
            unsafe { place.write_bytes(i as u8, size) };
            places.push((place, layout, i as u8));
        }
        for &(place, layout, byte) in &places {
            // SAFETY: as above.
            let bytes = unsafe { std::slice::from_raw_parts(place, layout.size()) };
            assert!(bytes.iter().all(|&b| b == byte));
        }
        let (place, kept, _) = places.swap_remove(7);
        for (place, layout, _) in places {
            pool.give(place, layout);
        }
        // One that came back is given out again, and one that becomes smaller stays where it is.
        let again = layout(60, 16);
        let first = pool.take(again);
        pool.give(first, again);
        assert_eq!(pool.take(again), first);
        assert!(pool.fits(first, again, layout(10, 16)));
        assert!(!pool.fits(first, layout(10, 16), again));
        pool.give(first, layout(10, 16));
        pool.give(place, kept);
        let mut lock = pool.lock();
        assert_eq!(pool.left(&mut lock), STANDING);
        drop(lock);
        emptied(&pool);
    }

    #[test]
    fn what_is_large_leaves_something_to_what_is_small() {
        let pool = Pool::new();
        assert!(grown(&pool, 0));
        let large = layout(STANDING / 4, 8);
        let first = pool.take(large);
        assert!(!first.is_null());
        assert!(!pool.take(layout(SMALL, 8)).is_null());
        assert!(pool.take(large).is_null());
        emptied(&pool);
    }

    #[test]
    #[cfg(feature = "allocator")]
    fn what_is_set_aside_is_there_and_then_no_more() {
        check().unwrap();
        let bytes = 5 * STANDING;
        let aside = set_aside(bytes).unwrap();
        let within = set_aside(1000).unwrap();
        assert_eq!((OWN.get(), within.bytes), (bytes, 0));
        let large = layout(bytes - STANDING, 8);
        let place = POOL.take(large);
        assert!(!place.is_null());
        POOL.give(place, large);
        drop((aside, within));
        assert_eq!(OWN.get(), 0);
        assert!(set_aside(usize::MAX / 2).is_err());
        check().unwrap();
    }

    #[test]
    #[cfg(feature = "allocator")]
    fn memory_of_the_reserve_is_memory_like_any_other() {
        check().unwrap();
        let old = layout(100, 8);
        let place = POOL.take(old);
        // SAFETY: the place is of that layout, and then of the one that it is made to have.
        unsafe {
            place.write_bytes(7, 100);
            let moved = Allocator.realloc(place, old, 5000);
            assert!(!POOL.has(moved));
            assert!(
                std::slice::from_raw_parts(moved, 100)
                    .iter()
                    .all(|&b| b == 7)
            );
            Allocator.dealloc(moved, layout(5000, 8));
        }
    }
}
