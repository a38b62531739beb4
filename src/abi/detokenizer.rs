//! Detokenizers: text from tokens one by one, for hosts that step many sessions
//!
//! A detokenizer follows one sequence. It takes each token, returns the text that the token completes, in whole characters, and says when
//! the sequence ends, as NVFP4_session_generate() would: by a stop token, a stop string, or its length. Text that may be the beginning of a
//! stop string is held back until that is decided.

use std::ffi::c_char;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use super::arguments::{Out, options, slice};
use super::guard::{enter, enter_to_free};
use super::handle::{self, Object};
use super::model::{NVFP4_Model, tokens_in};
use super::session::{
    NVFP4_FINISH_CANCELLED, NVFP4_FINISH_NONE, NVFP4_GenerateOptions, finish_number,
};
use super::status::NVFP4_Status;
use crate::base::error::{Result, bail};
use crate::engine::Served;
use crate::session::Transcript;

/// Converts the tokens of one sequence to text. See the detokenizer chapter.
pub struct NVFP4_Detokenizer {
    _private: [u8; 0],
}

struct State {
    transcript: Transcript,
    /// The text returned by the last call.
    text: String,
    finish: i32,
}

struct Detokenizer(Mutex<State>);

impl Object for Detokenizer {
    type Handle = NVFP4_Detokenizer;
    const NAME: &'static str = "NVFP4_Detokenizer";
}

impl Detokenizer {
    fn state(&self) -> Result<MutexGuard<'_, State>> {
        match self.0.try_lock() {
            Ok(state) => Ok(state),
            Err(TryLockError::WouldBlock) => bail!(
                Busy,
                "detokenizer is in use by another call; wait for that call to return"
            ),
            Err(TryLockError::Poisoned(_)) => bail!(
                Internal,
                "detokenizer was left unusable by an earlier internal error; release it"
            ),
        }
    }
}

/// Creates a detokenizer of a model, which must have a tokenizer.
///
/// - `tokens`, `count`: the tokens before the first one that is pushed. Their text is not given, but may end within a
///   character, which the next token completes. NULL and 0 at the start of a text, such as an answer.
/// - `options`: when the sequence ends: stop tokens and strings, whether the model's own stop tokens count, and the most
///   tokens. NULL for the defaults. Copied.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_detokenizer_create(
    model: *const NVFP4_Model,
    tokens: *const i32,
    count: usize,
    options: *const NVFP4_GenerateOptions,
    out: *mut *mut NVFP4_Detokenizer,
) -> NVFP4_Status {
    enter("NVFP4_detokenizer_create", || {
        let model = handle::get::<Served>("model", model)?;
        // SAFETY: the pointers are as the header asks.
        let (out, tokens, options) = unsafe {
            let options = self::options(options)?;
            options.check_no_grammar("a detokenizer")?;
            (
                Out::new("out", out)?,
                tokens_in(slice("tokens", tokens, count)?)?,
                options.read()?,
            )
        };
        model.tokenizer()?;
        let state = State {
            transcript: Transcript::new(&model, &tokens, &options)?,
            text: String::new(),
            finish: NVFP4_FINISH_NONE,
        };
        out.set(handle::insert(Arc::new(Detokenizer(Mutex::new(state)))));
        Ok(())
    })
}

/// Adds the next token. Writes the text that it completes, UTF-8 with a NUL after it, to `text`, and its length in bytes to
/// `length`; the text is valid until the next call with this detokenizer. Writes to `finish`, one of NVFP4_FINISH_*,
/// whether and how the sequence ends with this token. A stop token is not part of the sequence and gives no text; any other
/// last token is part of it. A sequence that has ended takes no more tokens.
///
/// - `length`, `finish`: may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_detokenizer_push(
    detokenizer: *mut NVFP4_Detokenizer,
    token: i32,
    text: *mut *const c_char,
    length: *mut usize,
    finish: *mut i32,
) -> NVFP4_Status {
    enter("NVFP4_detokenizer_push", || {
        let token = tokens_in(&[token])?[0];
        // SAFETY: the pointers are as the header asks.
        unsafe {
            give(detokenizer, text, length, finish, |state| {
                if state.finish != NVFP4_FINISH_NONE {
                    bail!(
                        InvalidArgument,
                        "the sequence has ended, and takes no token; make another detokenizer for what follows"
                    );
                }
                let State {
                    transcript,
                    text,
                    finish,
                } = state;
                transcript.check(token)?;
                let (piece, ended) = transcript.push(token);
                text.clear();
                text.push_str(piece);
                *finish = ended.map_or(NVFP4_FINISH_NONE, finish_number);
                Ok(())
            })
        }
    })
}

/// Ends the sequence if no token has. Gives the text that was held back because it might have begun a stop string; after a
/// stop string there is none. An incomplete character gives no text: see NVFP4_detokenizer_create() for continuing it.
///
/// - `text`, `length`: as for NVFP4_detokenizer_push().
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_detokenizer_finish(
    detokenizer: *mut NVFP4_Detokenizer,
    text: *mut *const c_char,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_detokenizer_finish", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            give(detokenizer, text, length, std::ptr::null_mut(), |state| {
                let State {
                    transcript,
                    text,
                    finish,
                } = state;
                text.clear();
                text.push_str(transcript.finish());
                if *finish == NVFP4_FINISH_NONE {
                    *finish = NVFP4_FINISH_CANCELLED;
                }
                Ok(())
            })
        }
    })
}

/// Changes the state, and writes its text to `text` and `length`.
///
/// # Safety
/// As the header requires of the pointers.
unsafe fn give(
    detokenizer: *mut NVFP4_Detokenizer,
    text: *mut *const c_char,
    length: *mut usize,
    finish: *mut i32,
    change: impl FnOnce(&mut State) -> Result<()>,
) -> Result<()> {
    // SAFETY: promised by the caller.
    let out = unsafe { Out::new("text", text) }?;
    let object = handle::get::<Detokenizer>("detokenizer", detokenizer)?;
    let mut state = object.state()?;
    change(&mut state)?;
    let bytes = state.text.len();
    state.text.push('\0');
    out.set(state.text.as_ptr().cast());
    // SAFETY: promised by the caller.
    unsafe {
        if let Some(length) = length.as_mut() {
            *length = bytes;
        }
        if let Some(place) = finish.as_mut() {
            *place = state.finish;
        }
    }
    Ok(())
}

/// Adds a reference to a detokenizer.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_detokenizer_retain(
    detokenizer: *mut NVFP4_Detokenizer,
) -> NVFP4_Status {
    enter("NVFP4_detokenizer_retain", || {
        handle::retain::<Detokenizer>("detokenizer", detokenizer)
    })
}

/// Gives up a reference to a detokenizer. After the last one the handle is stale.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_detokenizer_release(
    detokenizer: *mut NVFP4_Detokenizer,
) -> NVFP4_Status {
    enter_to_free("NVFP4_detokenizer_release", || {
        handle::release::<Detokenizer>("detokenizer", detokenizer)
    })
}
