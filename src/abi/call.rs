//! Long calls: cancellation and progress
//!
//! Calls that may take long - loading, converting, quantizing, prompts, generations, session files - take an
//! #NVFP4_CallOptions, directly or within their options. Products of tensors take none and cannot be cancelled. A call can
//! be cancelled in three ways: by a cancel handle, by a flag in the host's memory, or by what its progress callback
//! returns. All of them are checked at least every 50 ms, on all devices, also while a prompt is run and while a call waits
//! for another. A cancel handle or flag that is set before a call begins ends the call at its start. One cancel handle may
//! serve many calls.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use super::arguments::{Growing, Out, User, fill, options, reserved};
use super::guard::{answer, calling, enter, enter_to_free, unwinding};
use super::handle::{self, Object};
use super::slots::{self, CANCELS, Slot};
use super::status::{NVFP4_INVALID_HANDLE, NVFP4_OK, NVFP4_Status};
use crate::base::call::{self, Flag, Progress, Watch};
use crate::base::error::{Result, bail};

/// Cancels long calls. See the chapter on long calls.
pub struct NVFP4_Cancel {
    _private: [u8; 0],
}

struct Cancel(&'static Slot);

impl Drop for Cancel {
    fn drop(&mut self) {
        CANCELS.give_back(self.0);
    }
}

impl Object for Cancel {
    type Handle = NVFP4_Cancel;
    const NAME: &'static str = "NVFP4_Cancel";
}

/// Receives the progress of a long call from time to time, on the thread that made it: `done` of `total`, in bytes of a file, values of a
/// tensor, or tokens (those of the prompt, then generated ones). Returns 0 to continue, anything else to cancel. It should be quick,
/// because the call waits for it. It may call the library, but not use the model that is being run: that fails with #NVFP4_BUSY.
pub type NVFP4_ProgressCallback =
    Option<unsafe extern "C" fn(user: *mut c_void, done: u64, total: u64) -> i32>;

/// Cancellation and progress of a long call. Fill with NVFP4_call_options_init(), then change what is to differ. The struct and what it
/// points to must stay valid until the call returns.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_CallOptions {
    /// sizeof(NVFP4_CallOptions) as the caller knows it.
    pub struct_size: u32,
    /// Must be 0.
    pub reserved: i32,
    /// Cancels the call when triggered, also if it was triggered before. Default: NULL.
    pub cancel: *const NVFP4_Cancel,
    /// Cancels the call when nonzero: a variable of the host, which any thread and any signal handler may write. Aligned to 4 bytes.
    /// Default: NULL.
    pub cancel_flag: *const i32,
    /// Called with the progress, and once more at the end. Default: NULL.
    pub progress: NVFP4_ProgressCallback,
    /// The first argument of `progress`.
    pub user: *mut c_void,
}

// SAFETY: integers and pointers without padding, the first a u32 size. The callback is one of the host's, or NULL.
unsafe impl Growing for NVFP4_CallOptions {
    const NAME: &'static str = "NVFP4_CallOptions";
    fn defaults() -> Self {
        NVFP4_CallOptions {
            struct_size: size_of::<Self>() as u32,
            reserved: 0,
            cancel: std::ptr::null(),
            cancel_flag: std::ptr::null(),
            progress: None,
            user: std::ptr::null_mut(),
        }
    }
}

/// A variable of the host that cancels a call once it is nonzero.
#[derive(Clone, Copy)]
struct HostFlag(*const AtomicI32);
// SAFETY: an atomic may be read from any thread; the host keeps it while the call runs.
unsafe impl Sync for HostFlag {}
// SAFETY: as above.
unsafe impl Send for HostFlag {}

/// Cancellation of a call, by a cancel handle, a flag of the host, or both.
pub(super) struct Cancellation {
    cancel: Option<Arc<Cancel>>,
    flag: HostFlag,
}

impl Cancellation {
    /// # Safety
    /// The flag must be readable as long as this lives.
    unsafe fn of(call: &NVFP4_CallOptions) -> Result<Cancellation> {
        reserved(call, call.reserved)?;
        if !call.cancel_flag.is_aligned() {
            bail!(InvalidArgument, "cancel_flag is not aligned to 4 bytes");
        }
        Ok(Cancellation {
            cancel: match call.cancel.is_null() {
                true => None,
                false => Some(handle::get::<Cancel>("cancel", call.cancel)?),
            },
            flag: HostFlag(call.cancel_flag.cast()),
        })
    }

    /// # Safety
    /// `call`, unless NULL, must be readable, and its flag as long as this lives.
    pub(super) unsafe fn read(call: *const NVFP4_CallOptions) -> Result<Cancellation> {
        // SAFETY: promised by the caller.
        unsafe { Self::of(&options(call)?) }
    }

    /// Runs `body`, which the handle or flag may cancel.
    pub(super) fn watch<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        let flag = || self.is_set();
        let watch = Watch {
            flags: &[&flag],
            ..Watch::default()
        };
        watch.during(body)
    }

    /// Whether the call should end.
    pub(super) fn is_set(&self) -> bool {
        let Cancellation { cancel, flag } = self;
        let triggered = cancel.as_ref().is_some_and(|c| slots::is_set(c.0));
        // SAFETY: promised at construction.
        triggered || unsafe { flag.0.as_ref() }.is_some_and(|f| f.load(Ordering::Relaxed) != 0)
    }
}

/// Runs `body`, which may take long, with the cancellation and progress of `call`.
///
/// # Safety
/// `call`, unless NULL, must be readable, and what it points to as the header says.
pub(super) unsafe fn watched<T>(
    call: *const NVFP4_CallOptions,
    body: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let checked = || {
        call::check()?;
        body()
    };
    // SAFETY: promised by the caller.
    unsafe { watched_throughout(call, checked) }
}

/// As [`watched`], for a `body` that returns a partial result when cancelled. It starts even if it is cancelled already.
///
/// # Safety
/// As for [`watched`].
pub(super) unsafe fn watched_throughout<T>(
    call: *const NVFP4_CallOptions,
    body: impl FnOnce() -> Result<T>,
) -> Result<T> {
    if call.is_null() {
        return Watch::default().during(body);
    }
    // SAFETY: promised by the caller.
    let options = unsafe { options(call) }?;
    // SAFETY: as above.
    let cancellation = unsafe { Cancellation::of(&options) }?;
    let user = User(options.user);
    let progress = options.progress.map(|callback| {
        let callback = unwinding!(fn(*mut c_void, u64, u64) -> i32, callback);
        // SAFETY: the host's callback, called while the call it was given to runs, on the same thread.
        move |p: Progress| answer(calling(|| unsafe { callback({ user }.0, p.done, p.total) }))
    });
    let flag = || cancellation.is_set();
    let flags: [Flag<'_>; 1] = [&flag];
    let watch = Watch {
        flags: &flags,
        progress: progress.as_ref().map(|p| p as _),
        ..Watch::default()
    };
    watch.during(body)
}

/// Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_CallOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_call_options_init(
    options: *mut NVFP4_CallOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_call_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_CallOptions::defaults()) }
    })
}

/// Creates a cancel handle, not triggered yet.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_cancel_create(out: *mut *mut NVFP4_Cancel) -> NVFP4_Status {
    enter("NVFP4_cancel_create", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        out.set(handle::insert_as(|handle| {
            Arc::new(Cancel(CANCELS.claim(handle)))
        }));
        Ok(())
    })
}

/// Cancels the calls that were given the handle, including those that have yet to begin. A generation or chat turn ends with the tokens it
/// has, if any, as #NVFP4_FINISH_CANCELLED; anything else fails with #NVFP4_CANCELLED. May be called from any thread, callback or signal
/// handler: it takes no lock and no memory. #NVFP4_INVALID_HANDLE if the handle is not a live cancel handle; NVFP4_last_error() is not
/// changed.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn NVFP4_cancel_trigger(cancel: *mut NVFP4_Cancel) -> NVFP4_Status {
    mark(cancel, true)
}

/// Resets the handle for further calls, so that it is no longer triggered. May be called wherever NVFP4_cancel_trigger() may, and does not
/// change NVFP4_last_error() either. A call that has already seen it triggered still ends; one that has not continues.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn NVFP4_cancel_reset(cancel: *mut NVFP4_Cancel) -> NVFP4_Status {
    mark(cancel, false)
}

fn mark(cancel: *mut NVFP4_Cancel, set: bool) -> NVFP4_Status {
    match handle::is_own(cancel.cast()) && CANCELS.mark(cancel.addr(), set) {
        true => NVFP4_OK,
        false => NVFP4_INVALID_HANDLE,
    }
}

/// Writes 1 if the handle is triggered, else 0.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_cancel_is_triggered(
    cancel: *const NVFP4_Cancel,
    triggered: *mut i32,
) -> NVFP4_Status {
    enter("NVFP4_cancel_is_triggered", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("triggered", triggered) }?;
        let cancel = handle::get::<Cancel>("cancel", cancel)?;
        out.set(i32::from(slots::is_set(cancel.0)));
        Ok(())
    })
}

/// Adds a reference to a cancel handle.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_cancel_retain(cancel: *mut NVFP4_Cancel) -> NVFP4_Status {
    enter("NVFP4_cancel_retain", || {
        handle::retain::<Cancel>("cancel", cancel)
    })
}

/// Gives up a reference to a cancel handle. After the last one the handle is stale; running calls continue with its last state.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_cancel_release(cancel: *mut NVFP4_Cancel) -> NVFP4_Status {
    enter_to_free("NVFP4_cancel_release", || {
        if handle::give_up::<Cancel>("cancel", cancel)?.is_some() {
            CANCELS.retire(cancel.addr());
        }
        Ok(())
    })
}
