//! Checks that only the device can make: values that are not finite, and bytes that are no block scale. A checked call enqueues its work
//! and returns. Its kernels note what they find, and a later call of the host reports the note.
//!
//! The note of a call is a 64-bit word in device memory. It is all ones while nothing is wrong, and otherwise the minimum of `index << 8 |
//! what` over all findings: the first finding by index, in whatever order CTAs run. The first finding also sets a word of page-locked host
//! memory, so that the host can see without the driver whether there is a note. `kernels/common/note.cuh` is the other half.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use cudarc::driver::{result, sys};

use super::driver::{Attached, Gpu, Pinned, check, recorded};
use crate::base::error::{bail, err};
use crate::base::memory::{Claim, Tag};
use crate::base::{Error, Result, entry};
use crate::format::nvfp4;

/// Upper limit of calls in flight: one more waits for the device. The driver itself lets a host be no further ahead.
const CALLS: usize = 4096;
/// A note without findings; memory is filled with its byte.
const CLEAN: u64 = u64::MAX;
const CLEAN_BYTE: u8 = 0xff;
/// Low bits of a note, which say what was found at its index.
const WHAT_BITS: u32 = 8;

/// The value that each `what` stands for; `kernels/quantize/block.cuh` has the same table.
const NONFINITE: [f32; 3] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

/// Where the kernels of a call write their note; by default they write none.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct NoteArgument {
    first: u64,
    found: u64,
}

/// Values or scales that the kernels of a call check, in the order of their index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// Values, in rows of `cols`.
    Values {
        /// Values of a row.
        cols: usize,
    },
    /// Block scales of a matrix, in rows of `blocks`.
    Scales {
        /// Scales of a row.
        blocks: usize,
    },
    /// Block scales of two matrices, one after the other.
    TwoScales {
        /// Scales of the first matrix.
        first: usize,
        /// Scales of a row of either.
        blocks: usize,
    },
}

impl Subject {
    /// The error that a note stands for.
    fn error(self, note: u64) -> Error {
        let (index, what) = ((note >> WHAT_BITS) as usize, note as u8);
        let scale = |index: usize, blocks: usize| {
            err!(
                InvalidArgument,
                "the scale of block {} in row {} has the byte {what:#04x}, which is NaN or negative",
                index % blocks,
                index / blocks
            )
        };
        match self {
            Subject::Values { cols } => {
                let value = NONFINITE.get(usize::from(what)).copied();
                nvfp4::nonfinite(value.unwrap_or(f32::NAN), index, Some(cols))
            }
            Subject::Scales { blocks } => scale(index, blocks),
            Subject::TwoScales { first, blocks } if index < first => {
                scale(index, blocks).within("the first matrix")
            }
            Subject::TwoScales { first, blocks } => {
                scale(index - first, blocks).within("the second matrix")
            }
        }
    }
}

/// A call that may be in flight.
struct Call {
    name: &'static str,
    subject: Subject,
    /// Whether all of it is enqueued. Such a call has run once the device has been waited for.
    enqueued: bool,
    /// Whether its own caller waits for its note.
    waited: bool,
}

/// Calls in order. Call `n` has place `n % CALLS` among the notes, and keeps it until it is known to have run.
#[derive(Default)]
struct Calls {
    /// Number of the oldest call that may be in flight.
    first: u64,
    on_the_way: VecDeque<Call>,
}

impl Calls {
    /// Registers a call and returns its number, if a place is free.
    fn begin(&mut self, name: &'static str, subject: Subject, waited: bool) -> Option<u64> {
        if self.on_the_way.len() == CALLS {
            return None;
        }
        let number = self.first + self.on_the_way.len() as u64;
        self.on_the_way.push_back(Call {
            name,
            subject,
            enqueued: false,
            waited,
        });
        Some(number)
    }

    /// Marks a call as fully enqueued.
    fn enqueued(&mut self, number: u64) {
        let at = number.checked_sub(self.first).map(|at| at as usize);
        if let Some(call) = at.and_then(|at| self.on_the_way.get_mut(at)) {
            call.enqueued = true;
        }
    }

    /// The number before which all calls are fully enqueued.
    fn enqueued_before(&self) -> u64 {
        let enqueued = self.on_the_way.iter().take_while(|call| call.enqueued);
        self.first + enqueued.count() as u64
    }

    /// Forgets the calls before a number, which have run.
    fn retire(&mut self, before: u64) {
        let done = before.saturating_sub(self.first) as usize;
        let done = done.min(self.on_the_way.len());
        self.on_the_way.drain(..done);
        self.first += done as u64;
    }

    /// Numbers of failed calls that no caller is waiting for.
    fn failed(&self, notes: &[u64]) -> Vec<u64> {
        let numbered = (self.first..).zip(&self.on_the_way);
        numbered
            .filter(|(number, call)| !call.waited && notes[place(*number)] != CLEAN)
            .map(|(number, _)| number)
            .collect()
    }

    /// The error that names the calls in `failed`; `None` if there are none.
    fn error(&self, ordinal: usize, failed: &[u64], notes: &[u64]) -> Option<Error> {
        let call = |number: u64| self.on_the_way.get((number - self.first) as usize);
        let name = |number: u64, call: &Call| {
            format!(
                "{} (checked call {} on cuda:{ordinal})",
                call.name,
                number + 1
            )
        };
        let (&first, others) = failed.split_first()?;
        let of_first = call(first)?;
        let mut said = format!(
            "{}: {}; what that call gave is undefined, and what was made of it",
            name(first, of_first),
            of_first.subject.error(notes[place(first)]).message()
        );
        if let Some(&second) = others.first() {
            let other = call(second)?;
            let more = match others.len() {
                1 => "another call failed too".to_owned(),
                n => format!("{n} other calls failed too, the first of them"),
            };
            said += &format!("; {more}: {}", name(second, other));
        }
        Some(err!(InvalidArgument, "{said}"))
    }
}

/// The place of a call's note.
const fn place(number: u64) -> usize {
    (number % CALLS as u64) as usize
}

/// The notes of a device, and the calls in flight.
pub(super) struct Checks {
    /// Host word that is set when any note has been written.
    found: Pinned,
    /// Device address of the notes.
    notes: u64,
    calls: Mutex<Calls>,
    /// Held while notes are read, so that their calls are not forgotten meanwhile.
    reading: Mutex<()>,
    _claim: Claim,
}

impl Checks {
    fn new(gpu: &Gpu) -> Result<Checks> {
        let bytes = CALLS * size_of::<u64>();
        let claim = Claim::new(Tag::DeviceScratch, bytes)?;
        let found = Pinned::new(gpu, Tag::Scratch, size_of::<u32>())?;
        let notes = check(
            // SAFETY: the pool and the stream are the device's, whose context `Pinned::new` has bound.
            unsafe { result::mem_pool::alloc_async(gpu.pool(), bytes, gpu.stream()) },
            "allocating memory for checks",
        )?;
        let checks = Checks {
            found,
            notes,
            calls: Mutex::default(),
            reading: Mutex::default(),
            _claim: claim,
        };
        match checks.clear(gpu, 0, CALLS) {
            Ok(()) => Ok(checks),
            Err(e) => {
                checks.free(gpu.stream());
                Err(e)
            }
        }
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn found(&self) -> Result<&AtomicU32> {
        self.found
            .word()
            .ok_or_else(|| err!(Internal, "no word for checks"))
    }

    fn address(&self, place: usize) -> u64 {
        self.notes + (place * size_of::<u64>()) as u64
    }

    /// Enqueues a reset of notes to clean.
    fn clear(&self, gpu: &Gpu, place: usize, count: usize) -> Result<()> {
        gpu.bind()?;
        check(
            // SAFETY: the notes have so many places from there on.
            unsafe {
                result::memset_d8_async(
                    self.address(place),
                    CLEAN_BYTE,
                    count * size_of::<u64>(),
                    gpu.stream(),
                )
            },
            "clearing the notes of checks",
        )
    }

    /// Reads notes after all enqueued work has run.
    fn read(&self, gpu: &Gpu, place: usize, notes: &mut [u64]) -> Result<()> {
        gpu.bind()?;
        check(
            // SAFETY: the notes have so many places from there on, and `notes` is not touched before the wait.
            unsafe { result::memcpy_dtoh_async(notes, self.address(place), gpu.stream()) },
            "reading the notes of checks",
        )?;
        gpu.wait()
    }

    /// Reports the notes if there are any, and forgets them.
    fn report(&self, gpu: &Gpu) -> Result<()> {
        let _turn = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        // Cleared before the notes are read: a later finding sets it again.
        if self.found()?.swap(0, Ordering::AcqRel) == 0 {
            return Ok(());
        }
        let mut notes = vec![CLEAN; CALLS];
        self.read(gpu, 0, &mut notes)?;
        let (failed, error) = {
            let calls = self.calls();
            let failed = calls.failed(&notes);
            let error = calls.error(gpu.ordinal(), &failed, &notes);
            (failed, error)
        };
        for &number in &failed {
            self.clear(gpu, place(number), 1)?;
        }
        error.map_or(Ok(()), Err)
    }
}

impl Attached for Checks {
    fn enqueued(&self) -> u64 {
        self.calls().enqueued_before()
    }

    /// Forgets the calls before a number, if nothing was found.
    fn has_run(&self, before: u64) {
        let _turn = match self.reading.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(e)) => e.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        if self.found().is_ok_and(|f| f.load(Ordering::Acquire) == 0) {
            self.calls().retire(before);
        }
    }

    fn free(&self, stream: sys::CUstream) {
        // SAFETY: allocated in `new`, and not used by anything that is enqueued later. A failure means that the context is broken.
        let _ = unsafe { result::free_async(self.notes, stream) };
    }
}

/// A call that is being enqueued. Dropping it marks it as fully enqueued.
pub(super) struct CheckedCall<'a> {
    gpu: &'a Gpu,
    checks: Arc<Checks>,
    number: u64,
    subject: Subject,
}

impl<'a> CheckedCall<'a> {
    /// Registers a call whose note a later call reports. `name` is for errors outside of any function of the C interface.
    pub(super) fn begin(
        gpu: &'a Arc<Gpu>,
        name: &'static str,
        subject: Subject,
    ) -> Result<CheckedCall<'a>> {
        CheckedCall::take_up(gpu, name, subject, false)
    }

    /// Registers a call that will [`wait`](CheckedCall::wait).
    pub(super) fn to_wait(gpu: &'a Arc<Gpu>, subject: Subject) -> Result<CheckedCall<'a>> {
        CheckedCall::take_up(gpu, "", subject, true)
    }

    fn take_up(
        gpu: &'a Arc<Gpu>,
        name: &'static str,
        subject: Subject,
        waited: bool,
    ) -> Result<CheckedCall<'a>> {
        if recorded().is_some() {
            bail!(
                Internal,
                "a call that is checked cannot be recorded: its place is its own"
            );
        }
        let name = entry::entered().unwrap_or(name);
        let checks = gpu.attached_or(|| Checks::new(gpu))?;
        loop {
            let number = checks.calls().begin(name, subject, waited);
            if let Some(number) = number {
                return Ok(CheckedCall {
                    gpu,
                    checks,
                    number,
                    subject,
                });
            }
            gpu.check_calls()?;
            gpu.synchronize()?;
        }
    }

    /// The note argument of the call's kernels.
    pub(super) fn note(&self) -> NoteArgument {
        NoteArgument {
            first: self.checks.address(place(self.number)),
            found: self.checks.found.address(),
        }
    }

    /// Waits until the call has run, and returns its finding as its own error.
    pub(super) fn wait(self) -> Result<()> {
        let (place, mut note) = (place(self.number), [CLEAN]);
        self.checks.read(self.gpu, place, &mut note)?;
        if note[0] == CLEAN {
            return Ok(());
        }
        self.checks.clear(self.gpu, place, 1)?;
        Err(self.subject.error(note[0]))
    }
}

impl Drop for CheckedCall<'_> {
    fn drop(&mut self) {
        self.checks.calls().enqueued(self.number);
    }
}

impl Gpu {
    /// Reports what the device has found wrong in earlier calls, and forgets those calls. Waits for calls in flight only if there is
    /// something to report; after [`Gpu::synchronize`] it knows of all of them.
    pub fn check_calls(&self) -> Result<()> {
        match self.attached::<Checks>() {
            Some(checks) if checks.found()?.load(Ordering::Acquire) != 0 => checks.report(self),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: Subject = Subject::Values { cols: 96 };

    fn note(index: u64, what: u8) -> u64 {
        index << WHAT_BITS | u64::from(what)
    }

    #[test]
    fn notes_say_what_was_found_and_where() {
        let said =
            |subject: Subject, index, what| subject.error(note(index, what)).message().to_owned();
        for (what, name) in [(0, "NaN"), (1, "inf"), (2, "-inf")] {
            let said = said(VALUES, 5 * 96 + 7, what);
            assert!(said.contains("index 487 (row 5, column 7)"), "{said}");
            assert!(said.contains(&format!(" is {name};")), "{said}");
        }
        let scales = Subject::Scales { blocks: 6 };
        let text = "the scale of block 5 in row 2 has the byte 0x80";
        assert!(said(scales, 17, 0x80).starts_with(text));
        let two = Subject::TwoScales {
            first: 18,
            blocks: 6,
        };
        assert!(said(two, 17, 0x80).starts_with(&format!("the first matrix: {text}")));
        assert!(said(two, 18 + 17, 0x80).starts_with(&format!("the second matrix: {text}")));
        assert!(said(two, 18, 0x7f).contains("block 0 in row 0 has the byte 0x7f"));
        // The largest possible index.
        let last = note((1 << 56) - 1, 0xff);
        assert_eq!(last, CLEAN);
        assert_ne!(note((1 << 56) - 1, 0xfe), CLEAN);
    }

    #[test]
    fn calls_that_are_done_make_room_and_those_on_their_way_keep_their_place() {
        let mut calls = Calls::default();
        let begin = |calls: &mut Calls| calls.begin("f", VALUES, false);
        for number in 0..CALLS as u64 {
            assert_eq!(begin(&mut calls), Some(number));
        }
        assert_eq!(begin(&mut calls), None);
        // Call 2 is still being enqueued, while later calls may have run.
        for number in (0..CALLS as u64).filter(|&n| n != 2) {
            calls.enqueued(number);
        }
        assert_eq!(calls.enqueued_before(), 2);
        calls.retire(calls.enqueued_before());
        assert_eq!((calls.first, calls.on_the_way.len()), (2, CALLS - 2));
        // Another thread has retired it already.
        calls.retire(1);
        calls.enqueued(0);
        assert_eq!((calls.first, calls.on_the_way.len()), (2, CALLS - 2));
        for number in CALLS as u64..CALLS as u64 + 2 {
            assert_eq!(begin(&mut calls), Some(number));
            assert_eq!(place(number), number as usize - CALLS);
        }
        assert_eq!(begin(&mut calls), None);
        calls.enqueued(2);
        assert_eq!(calls.enqueued_before(), CALLS as u64);
        calls.retire(u64::MAX);
        assert_eq!(begin(&mut calls), Some(CALLS as u64 + 2));
    }

    #[test]
    fn the_error_names_the_first_call_that_failed_and_how_many_did() {
        let (mut calls, mut notes) = (Calls::default(), vec![CLEAN; CALLS]);
        let error = |calls: &Calls, notes: &[u64]| {
            let error = calls.error(3, &calls.failed(notes), notes);
            error.map(|e| e.message().to_owned())
        };
        for name in [
            "NVFP4_quantize",
            "NVFP4_scaled_mm",
            "NVFP4_quantize",
            "NVFP4_matmul",
        ] {
            calls.begin(name, VALUES, false);
        }
        assert_eq!(error(&calls, &notes), None);
        notes[1] = note(100, 0);
        let said = error(&calls, &notes).unwrap();
        assert!(
            said.starts_with("NVFP4_scaled_mm (checked call 2 on cuda:3): the value at index 100 "),
            "{said}"
        );
        assert!(!said.contains("too"), "{said}");
        notes[3] = note(0, 1);
        let said = error(&calls, &notes).unwrap();
        assert!(
            said.contains("another call failed too: NVFP4_matmul (checked call 4 on cuda:3)"),
            "{said}"
        );
        notes[2] = note(0, 1);
        let said = error(&calls, &notes).unwrap();
        assert!(
            said.contains(
                "2 other calls failed too, the first of them: NVFP4_quantize (checked call 3"
            ),
            "{said}"
        );
        // Numbers continue where places wrap around, and a caller that waits for its own call reports it itself.
        notes.fill(CLEAN);
        calls.retire(4);
        for i in 0..CALLS {
            let number = calls.begin("NVFP4_quantize", VALUES, i == 0);
            assert_eq!(number, Some(4 + i as u64));
        }
        notes[place(4)] = note(0, 0);
        assert_eq!(error(&calls, &notes), None);
        notes[place(CALLS as u64 + 1)] = note(0, 0);
        let said = error(&calls, &notes).unwrap();
        assert!(
            said.starts_with("NVFP4_quantize (checked call 4098 on cuda:3)"),
            "{said}"
        );
    }
}
