//! Detokenizers: text from tokens one by one, for hosts that step many sessions
//!
//! A detokenizer follows one sequence. It takes each token, returns the text that the token completes, in whole characters, and says when
//! the sequence ends, as NVFP4_session_generate() would: by a stop token, a stop string, or its length. Text that may be the beginning of a
//! stop string is held back until that is decided.

use std::ffi::c_char;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use super::arguments::{Out, options, slice, slice_mut};
use super::guard::{enter, enter_to_free};
use super::handle::{self, Object};
use super::model::{NVFP4_Model, tokens_in};
use super::session::{
    NVFP4_FINISH_CANCELLED, NVFP4_FINISH_NONE, NVFP4_GenerateOptions, finish_number,
};
use super::status::NVFP4_Status;
use crate::base::Error;
use crate::base::error::{Result, bail};
use crate::base::memory::with_room;
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

impl State {
    /// Refuses a token that the sequence cannot take.
    fn check(&self, token: u32) -> Result<()> {
        if self.finish != NVFP4_FINISH_NONE {
            bail!(
                InvalidArgument,
                "the sequence has ended, and takes no token; make another detokenizer for what follows"
            );
        }
        self.transcript.check(token)
    }

    /// Adds a token that was checked.
    fn push(&mut self, token: u32) {
        let (piece, ended) = self.transcript.push(token);
        self.text.clear();
        self.text.push_str(piece);
        self.finish = ended.map_or(NVFP4_FINISH_NONE, finish_number);
    }

    /// The text with a NUL after it, which becomes a part of it.
    fn text_for_c(&mut self) -> *const c_char {
        self.text.push('\0');
        self.text.as_ptr().cast()
    }
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
                state.check(token)?;
                state.push(token);
                Ok(())
            })
        }
    })
}

/// Adds the next token to each of several detokenizers, in one call: the same results as a call of NVFP4_detokenizer_push() for each. The
/// detokenizers may be of different models, and each is there once. If a call fails, none of them has changed, and no result is written.
///
/// - `detokenizers`, `tokens`: `count` elements each.
/// - `texts`: receives `count` texts, each valid until the next call with its detokenizer.
/// - `lengths`, `finishes`: receive `count` elements each; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_detokenizers_push(
    detokenizers: *const *mut NVFP4_Detokenizer,
    tokens: *const i32,
    count: usize,
    texts: *mut *const c_char,
    lengths: *mut usize,
    finishes: *mut i32,
) -> NVFP4_Status {
    enter("NVFP4_detokenizers_push", || {
        // SAFETY: the pointers are as the header asks.
        let (handles, tokens, texts, lengths, finishes) = unsafe {
            (
                slice("detokenizers", detokenizers, count)?,
                tokens_in(slice("tokens", tokens, count)?)?,
                slice_mut("texts", texts, count)?,
                optional("lengths", lengths, count)?,
                optional("finishes", finishes, count)?,
            )
        };
        let named = |i: usize| move |e: Error| e.within(format_args!("detokenizers[{i}]"));
        let objects = handles.iter().enumerate();
        let objects = objects
            .map(|(i, &one)| handle::get::<Detokenizer>("detokenizer", one).map_err(named(i)))
            .collect::<Result<Vec<_>>>()?;
        check_distinct(handles)?;
        let mut states = with_room(count)?;
        for (i, object) in objects.iter().enumerate() {
            let state = object.state().and_then(|state| {
                state.check(tokens[i])?;
                Ok(state)
            });
            states.push(state.map_err(named(i))?);
        }
        for (state, &token) in states.iter_mut().zip(&tokens) {
            state.push(token);
        }
        for (state, text) in states.iter_mut().zip(texts) {
            *text = state.text_for_c();
        }
        for (state, length) in states.iter().zip(lengths) {
            *length = state.text.len() - 1;
        }
        for (state, finish) in states.iter().zip(finishes) {
            *finish = state.finish;
        }
        Ok(())
    })
}

/// An array from C for results, or an empty one for NULL.
///
/// # Safety
/// As for [`slice_mut`].
unsafe fn optional<'a, T>(name: &str, data: *mut T, len: usize) -> Result<&'a mut [T]> {
    match data.is_null() {
        true => Ok(&mut []),
        // SAFETY: promised by the caller.
        false => unsafe { slice_mut(name, data, len) },
    }
}

/// Refuses a detokenizer that is there twice.
fn check_distinct(handles: &[*mut NVFP4_Detokenizer]) -> Result<()> {
    let mut order: Vec<usize> = with_room(handles.len())?;
    order.extend(0..handles.len());
    order.sort_by_key(|&i| handles[i].addr());
    match order
        .windows(2)
        .find(|two| handles[two[0]] == handles[two[1]])
    {
        Some(two) => bail!(
            InvalidArgument,
            "detokenizers[{}] and detokenizers[{}] are the same; each takes one token a call",
            two[0],
            two[1]
        ),
        None => Ok(()),
    }
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
    out.set(state.text_for_c());
    let bytes = state.text.len() - 1;
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
