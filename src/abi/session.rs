//! Sessions: conversations and other sequences of tokens, run by a model.
//!
//! A session holds its tokens with their cached keys and values, so that a call runs only what is new. It keeps its model
//! alive. One call at a time may use it: another one meanwhile, from a callback too, gets #NVFP4_BUSY. Length, memory and
//! messages can be asked for at any time: during a call they are as they were before it. A call that fails leaves the session
//! as it was.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::ffi::{c_char, c_void};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use super::arguments::{
    Growing, Out, choice, copy_items, copy_text, count, fill, flag, options, results, slice, text,
};
use super::guard::{User, answer, enter, enter_to_free};
use super::handle::{self, Exclusive, Object, Watched};
use super::model::{NVFP4_Model, token_out, tokens_in, tokens_out};
use super::status::NVFP4_Status;
use crate::base::alloc;
use crate::base::error::{Result, bail, err};
use crate::base::memory::copied;
use crate::model::{KvType, Model};
use crate::session::{
    self, Canceller, Eviction, Finish, GenerateOptions, Generation, Piece, Sampler,
    SamplingOptions, SessionOptions,
};

/// A session. See the session chapter.
pub struct NVFP4_Session {
    _private: [u8; 0],
}

/// Bytes that a byte of a message may take as JSON, which grows by doubling.
const FOR_JSON: usize = 16;

/// A session, and what may be reached while a call uses it.
struct Session {
    state: Exclusive<State>,
    canceller: Canceller,
    context: usize,
}

struct State {
    session: session::Session,
    /// The text of the last generation.
    text: String,
    /// The conversation as JSON, once somebody has asked for it and until a call may have changed it.
    messages: OnceCell<String>,
}

/// What a session was when the call that uses it began.
struct Snapshot {
    length: usize,
    kv_bytes: u64,
    messages: Result<String>,
}

impl State {
    fn messages(&self) -> Result<String> {
        if let Some(json) = self.messages.get() {
            return copied(json);
        }
        let messages = self.session.messages()?;
        let bytes = messages.iter().map(|m| m.content.len() * FOR_JSON + 256);
        let _json = alloc::set_aside(bytes.sum())?;
        let json = serde_json::to_string(&messages)
            .map_err(|e| err!(Internal, "the conversation: {e}"))?;
        copied(self.messages.get_or_init(|| json))
    }
}

impl Watched for State {
    type Snapshot = Snapshot;
    fn snapshot(&self) -> Snapshot {
        Snapshot {
            length: self.session.len(),
            kv_bytes: self.session.kv_bytes() as u64,
            messages: self.messages(),
        }
    }
    fn taken(&mut self) {
        self.messages.take();
    }
}

impl Object for Session {
    type Handle = NVFP4_Session;
    const NAME: &'static str = "NVFP4_Session";
}

/// Cached keys and values in IEEE half precision.
pub const NVFP4_KV_FLOAT16: i32 = 0;
/// Cached keys and values in IEEE single precision: unrounded, in twice the memory.
pub const NVFP4_KV_FLOAT32: i32 = 1;

/// Refuse tokens that do not fit: #NVFP4_CONTEXT_FULL, or #NVFP4_FINISH_CONTEXT within a generation.
pub const NVFP4_EVICTION_ERROR: i32 = 0;
/// Forget old tokens: the older half of those after the first `keep`, or more if that is not enough. What stays is run anew.
pub const NVFP4_EVICTION_DROP_OLDEST: i32 = 1;

/// How to make a session. Fill with NVFP4_session_options_init(), then change what is to differ.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_SessionOptions {
    /// sizeof(NVFP4_SessionOptions) as the caller knows it.
    pub struct_size: u32,
    /// One of NVFP4_KV_*. Default: half precision.
    pub kv_type: i32,
    /// One of NVFP4_EVICTION_*. Default: error.
    pub eviction: i32,
    /// Leave it 0.
    pub reserved: i32,
    /// Tokens to hold at most. 0, the default, is 4096, or what the model was made for if that is less.
    pub context: usize,
    /// Tokens at the beginning that eviction never forgets. Default: 0. A chat's system prompt stays in any case.
    pub keep: usize,
    /// What chat turns tell the model first about its role. Default: NULL, nothing. Copied.
    pub system: *const c_char,
    /// Bytes of `system`.
    pub system_length: usize,
}

// SAFETY: integers and a pointer without padding, the first a u32 size.
unsafe impl Growing for NVFP4_SessionOptions {
    const NAME: &'static str = "NVFP4_SessionOptions";
    fn defaults() -> Self {
        NVFP4_SessionOptions {
            struct_size: size_of::<Self>() as u32,
            kv_type: NVFP4_KV_FLOAT16,
            eviction: NVFP4_EVICTION_ERROR,
            reserved: 0,
            context: 0,
            keep: 0,
            system: std::ptr::null(),
            system_length: 0,
        }
    }
}

impl NVFP4_SessionOptions {
    /// # Safety
    /// The text must be readable.
    unsafe fn read(&self) -> Result<SessionOptions> {
        if self.reserved != 0 {
            bail!(
                InvalidArgument,
                "reserved is {}; it must be 0",
                self.reserved
            );
        }
        // SAFETY: promised by the caller.
        let system = unsafe { text("system", self.system, self.system_length) }?;
        let drop_oldest = Eviction::DropOldest { keep: self.keep };
        Ok(SessionOptions {
            context: self.context,
            kv: choice(
                "kv_type",
                self.kv_type,
                &[
                    (NVFP4_KV_FLOAT16, "float16", KvType::F16),
                    (NVFP4_KV_FLOAT32, "float32", KvType::F32),
                ],
            )?,
            system: (!self.system.is_null())
                .then(|| copied(system))
                .transpose()?,
            eviction: choice(
                "eviction",
                self.eviction,
                &[
                    (NVFP4_EVICTION_ERROR, "error", Eviction::Error),
                    (NVFP4_EVICTION_DROP_OLDEST, "drop oldest", drop_oldest),
                ],
            )?,
        })
    }
}

/// How to generate. Fill with NVFP4_generate_options_init(), then change what is to differ. Arrays and texts are read during
/// the call only.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_GenerateOptions {
    /// sizeof(NVFP4_GenerateOptions) as the caller knows it.
    pub struct_size: u32,
    /// Divides the logits before a draw. 0, the default, takes the likeliest token.
    pub temperature: f32,
    /// Draws from this many of the likeliest tokens. Default: 0, all.
    pub top_k: i32,
    /// Draws from the fewest of the likeliest tokens whose probabilities reach this sum. 0 takes the likeliest
    /// one. Default: 1, all.
    pub top_p: f32,
    /// Leaves out tokens less likely than this share of the likeliest. Default: 0, none.
    pub min_p: f32,
    /// Makes tokens that have occurred less likely. Default: 1, not at all.
    pub repetition_penalty: f32,
    /// 1 takes the model's own stop tokens like any other. Default: 0.
    pub ignore_model_stops: i32,
    /// 1 computes each token from the whole sequence without the cache, for comparison; slow. Default: 0.
    pub replay: i32,
    /// Tokens to generate at most. Default: 512.
    pub max_tokens: usize,
    /// Fixes the draws: the same seed at the same place gives the same token. A place is the number of tokens appended before
    /// it, those that eviction has forgotten included. Default: 0.
    pub seed: u64,
    /// Tokens that end the text, besides the model's own. The one that did is not appended. Default: NULL.
    pub stop_tokens: *const i32,
    /// Elements of `stop_tokens`.
    pub stop_token_count: usize,
    /// Texts that end the text and are not part of it, in UTF-8. A special token gives no text, but counts where one of these
    /// has its name in it. Default: NULL.
    pub stop_strings: *const *const c_char,
    /// Bytes of each of `stop_strings`.
    pub stop_string_lengths: *const usize,
    /// Elements of `stop_strings` and of `stop_string_lengths`.
    pub stop_string_count: usize,
}

// SAFETY: numbers and pointers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_GenerateOptions {
    const NAME: &'static str = "NVFP4_GenerateOptions";
    fn defaults() -> Self {
        let defaults = GenerateOptions::default();
        NVFP4_GenerateOptions {
            struct_size: size_of::<Self>() as u32,
            temperature: defaults.sampling.temperature,
            top_k: 0,
            top_p: defaults.sampling.top_p,
            min_p: defaults.sampling.min_p,
            repetition_penalty: defaults.sampling.repetition_penalty,
            ignore_model_stops: 0,
            replay: 0,
            max_tokens: defaults.max_tokens,
            seed: defaults.sampling.seed,
            stop_tokens: std::ptr::null(),
            stop_token_count: 0,
            stop_strings: std::ptr::null(),
            stop_string_lengths: std::ptr::null(),
            stop_string_count: 0,
        }
    }
}

impl NVFP4_GenerateOptions {
    /// # Safety
    /// The arrays and texts must be readable.
    unsafe fn read(&self) -> Result<GenerateOptions> {
        // SAFETY: promised by the caller.
        let (stop_tokens, strings, lengths) = unsafe {
            (
                slice("stop_tokens", self.stop_tokens, self.stop_token_count)?,
                slice("stop_strings", self.stop_strings, self.stop_string_count)?,
                slice(
                    "stop_string_lengths",
                    self.stop_string_lengths,
                    self.stop_string_count,
                )?,
            )
        };
        let stop_strings = strings
            .iter()
            .zip(lengths)
            // SAFETY: as above.
            .map(|(&string, &length)| copied(unsafe { text("a stop string", string, length) }?))
            .collect::<Result<_>>()?;
        Ok(GenerateOptions {
            max_tokens: self.max_tokens,
            sampling: self.sampling()?,
            stop_tokens: tokens_in(stop_tokens).map_err(|e| e.within("stop_tokens"))?,
            stop_strings,
            ignore_model_stops: flag("ignore_model_stops", self.ignore_model_stops)?,
            replay: flag("replay", self.replay)?,
        })
    }

    fn sampling(&self) -> Result<SamplingOptions> {
        Ok(SamplingOptions {
            temperature: self.temperature,
            top_k: count("top_k", self.top_k.into())?,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
        })
    }
}

/// A stop token ended the text.
pub const NVFP4_FINISH_STOP: i32 = 0;
/// A stop string ended the text.
pub const NVFP4_FINISH_STOP_STRING: i32 = 1;
/// As many tokens were generated as were allowed.
pub const NVFP4_FINISH_LENGTH: i32 = 2;
/// The context is full.
pub const NVFP4_FINISH_CONTEXT: i32 = 3;
/// The callback or NVFP4_session_cancel() ended it. What was generated until then is kept.
pub const NVFP4_FINISH_CANCELLED: i32 = 4;

/// What a generation came to. Set `struct_size` before the call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_GenerationResult {
    /// sizeof(NVFP4_GenerationResult) as the caller knows it.
    pub struct_size: u32,
    /// One of NVFP4_FINISH_*.
    pub finish: i32,
    /// Tokens before the first generated one: all that the session held, or those that a chat turn added.
    pub prompt_tokens: usize,
    /// Tokens generated. They are the session's last ones.
    pub generated_tokens: usize,
    /// Time for the prompt, as far as it had not been run.
    pub prefill_seconds: f64,
    /// Time from the call to the first token.
    pub first_token_seconds: f64,
    /// Time from the first token to the end.
    pub decode_seconds: f64,
}

// SAFETY: numbers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_GenerationResult {
    const NAME: &'static str = "NVFP4_GenerationResult";
    fn defaults() -> Self {
        NVFP4_GenerationResult {
            struct_size: size_of::<Self>() as u32,
            finish: NVFP4_FINISH_STOP,
            prompt_tokens: 0,
            generated_tokens: 0,
            prefill_seconds: 0.0,
            first_token_seconds: 0.0,
            decode_seconds: 0.0,
        }
    }
}

impl NVFP4_GenerationResult {
    fn of(generation: &Generation) -> Self {
        NVFP4_GenerationResult {
            finish: match generation.finish {
                Finish::Stop => NVFP4_FINISH_STOP,
                Finish::StopString => NVFP4_FINISH_STOP_STRING,
                Finish::Length => NVFP4_FINISH_LENGTH,
                Finish::Context => NVFP4_FINISH_CONTEXT,
                Finish::Cancelled => NVFP4_FINISH_CANCELLED,
            },
            prompt_tokens: generation.prompt_tokens,
            generated_tokens: generation.tokens.len(),
            prefill_seconds: generation.timings.prefill_seconds,
            first_token_seconds: generation.timings.first_token_seconds,
            decode_seconds: generation.timings.decode_seconds,
            ..Self::defaults()
        }
    }
}

/// Is given each token as it comes, and the text that it completes: `length` bytes of whole UTF-8 characters without a NUL
/// behind, none while a character or what may be a stop string is incomplete. All texts together are the generation's,
/// unless the callback ends it. A token may come a second time, at the end, with text that was held back. Returns 0 to go
/// on, anything else to end the generation.
pub type NVFP4_TokenCallback = Option<
    unsafe extern "C" fn(user: *mut c_void, token: i32, text: *const c_char, length: usize) -> i32,
>;

fn insert(session: session::Session) -> *mut NVFP4_Session {
    handle::insert(Arc::new(Session {
        canceller: session.canceller(),
        context: session.context(),
        state: Exclusive::new(State {
            session,
            text: String::new(),
            messages: OnceCell::new(),
        }),
    }))
}

/// Runs a short `body`, which calls nothing back, with a session that is this call's alone.
fn with<T>(handle: *const NVFP4_Session, body: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
    let object = handle::get::<Session>("session", handle)?;
    let mut state = object.state.take("session")?;
    body(&mut state)
}

/// Runs `body`, which may be long and call back, with a session that is this call's alone.
fn with_long<T>(
    handle: *const NVFP4_Session,
    body: impl FnOnce(&mut State) -> Result<T>,
) -> Result<T> {
    let object = handle::get::<Session>("session", handle)?;
    let mut state = object.state.take_long("session")?;
    body(&mut state)
}

/// Looks at a session, which another call may be using.
fn look<T>(
    handle: *const NVFP4_Session,
    live: impl FnOnce(&State) -> Result<T>,
    snapshot: impl FnOnce(&Snapshot) -> Result<T>,
) -> Result<T> {
    let object = handle::get::<Session>("session", handle)?;
    object.state.look("session", live, snapshot)
}

/// Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_SessionOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_options_init(
    options: *mut NVFP4_SessionOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_session_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_SessionOptions::defaults()) }
    })
}

/// Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_GenerateOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_generate_options_init(
    options: *mut NVFP4_GenerateOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_generate_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_GenerateOptions::defaults()) }
    })
}

/// Makes an empty session of a model. `options`: NULL for the defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_create(
    model: *const NVFP4_Model,
    options: *const NVFP4_SessionOptions,
    out: *mut *mut NVFP4_Session,
) -> NVFP4_Status {
    enter("NVFP4_session_create", || {
        // SAFETY: the pointers are as the header asks.
        let (out, options) = unsafe { (Out::new("out", out)?, self::options(options)?.read()?) };
        let model = handle::get::<Model>("model", model)?;
        out.set(insert(session::Session::new(model, &options)?));
        Ok(())
    })
}

/// Adds a reference to a session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_retain(session: *mut NVFP4_Session) -> NVFP4_Status {
    enter("NVFP4_session_retain", || {
        handle::retain::<Session>("session", session)
    })
}

/// Gives up a reference to a session. After the last one the handle is stale; a call that is using it ends undisturbed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_release(session: *mut NVFP4_Session) -> NVFP4_Status {
    enter_to_free("NVFP4_session_release", || {
        handle::release::<Session>("session", session)
    })
}

/// Appends tokens and runs them, a whole prompt in blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_prefill(
    session: *mut NVFP4_Session,
    tokens: *const i32,
    count: usize,
) -> NVFP4_Status {
    enter("NVFP4_session_prefill", || {
        // SAFETY: the pointer is as the header asks.
        let tokens = tokens_in(unsafe { slice("tokens", tokens, count) }?)?;
        with_long(session, |state| state.session.prefill(&tokens))
    })
}

/// Appends tokens and runs them one after the other, more slowly: for comparison. See SAME BITS above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_prefill_token_by_token(
    session: *mut NVFP4_Session,
    tokens: *const i32,
    count: usize,
) -> NVFP4_Status {
    enter("NVFP4_session_prefill_token_by_token", || {
        // SAFETY: the pointer is as the header asks.
        let tokens = tokens_in(unsafe { slice("tokens", tokens, count) }?)?;
        with_long(session, |state| {
            state.session.prefill_token_by_token(&tokens)
        })
    })
}

/// Appends one token and runs it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_decode(
    session: *mut NVFP4_Session,
    token: i32,
) -> NVFP4_Status {
    enter("NVFP4_session_decode", || {
        let token = tokens_in(&[token])?[0];
        with(session, |state| state.session.decode(token))
    })
}

/// Copies the logits of the token to come, one for each token id. Writes their number to `count`; see ARRAYS OUT above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_logits(
    session: *mut NVFP4_Session,
    logits: *mut f32,
    capacity: usize,
    count: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_session_logits", || {
        with(session, |state| {
            // SAFETY: the pointers are as the header asks.
            unsafe { copy_items(state.session.logits()?, logits, capacity, count) }
        })
    })
}

/// Chooses the token to come as NVFP4_session_generate() would, and does not append it. `options`: NULL for the likeliest
/// one; what concerns stops and lengths has no part in it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_sample(
    session: *mut NVFP4_Session,
    options: *const NVFP4_GenerateOptions,
    token: *mut i32,
) -> NVFP4_Status {
    enter("NVFP4_session_sample", || {
        // SAFETY: the pointers are as the header asks.
        let (out, options) = unsafe { (Out::new("token", token)?, self::options(options)?) };
        let sampler = Sampler::new(&options.sampling()?)?;
        with(session, |state| {
            let mut sampler = sampler.after(state.session.appended());
            out.set(token_out(state.session.sample(&mut sampler)?)?);
            Ok(())
        })
    })
}

/// What both kinds of generation have in common; `run` is the one that is meant.
///
/// # Safety
/// As the header says of the pointers.
unsafe fn generate(
    session: *mut NVFP4_Session,
    options: *const NVFP4_GenerateOptions,
    callback: NVFP4_TokenCallback,
    user: *mut c_void,
    result: *mut NVFP4_GenerationResult,
    run: impl FnOnce(
        &mut session::Session,
        &GenerateOptions,
        &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Generation>,
) -> Result<()> {
    // SAFETY: promised by the caller.
    let (options, result) = unsafe { (self::options(options)?.read()?, results(result)?) };
    let user = User(user);
    let mut on_piece = |piece: Piece<'_>| match callback {
        None => ControlFlow::Continue(()),
        // SAFETY: the host's callback, called on its thread while its call runs.
        Some(callback) => answer(unsafe {
            let (text, length) = (piece.text.as_ptr().cast(), piece.text.len());
            callback(user.0, piece.token.cast_signed(), text, length)
        }),
    };
    let generation = with_long(session, |state| {
        let generation = run(&mut state.session, &options, &mut on_piece)?;
        state.text.clone_from(&generation.text);
        Ok(generation)
    })?;
    if let Some(result) = result {
        result(NVFP4_GenerationResult::of(&generation));
    }
    Ok(())
}

/// Generates from where the session stands, which takes a prefilled prompt. Cancelling it is no failure: see
/// #NVFP4_FINISH_CANCELLED.
///
/// - `options`: NULL for the defaults.
/// - `callback`, `user`: may be NULL; NVFP4_session_text() has the text afterwards.
/// - `result`: what it came to; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_generate(
    session: *mut NVFP4_Session,
    options: *const NVFP4_GenerateOptions,
    callback: NVFP4_TokenCallback,
    user: *mut c_void,
    result: *mut NVFP4_GenerationResult,
) -> NVFP4_Status {
    enter("NVFP4_session_generate", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            generate(
                session,
                options,
                callback,
                user,
                result,
                |session, options, on_piece| session.generate(options, on_piece),
            )
        }
    })
}

/// Says something to the model in a conversation and generates the answer, spelled as the model's chat template says. Only
/// what the turn adds is run. The first turn takes an empty session. Names of special tokens within the text count as
/// plain text.
///
/// - `text`, `text_length`: what the user says, in UTF-8.
/// - The rest is as for NVFP4_session_generate(). Cancelled before its first token is due, it fails with #NVFP4_CANCELLED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_chat(
    session: *mut NVFP4_Session,
    text: *const c_char,
    text_length: usize,
    options: *const NVFP4_GenerateOptions,
    callback: NVFP4_TokenCallback,
    user: *mut c_void,
    result: *mut NVFP4_GenerationResult,
) -> NVFP4_Status {
    enter("NVFP4_session_chat", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let text = self::text("text", text, text_length)?;
            generate(
                session,
                options,
                callback,
                user,
                result,
                |session, options, on_piece| session.chat(text, options, on_piece),
            )
        }
    })
}

/// Copies the text of the last generation, which is empty before the first. A character that it left unfinished is not part of
/// it, whatever ended it: if the next generation completes the character, its text begins with it. For the buffer see TEXT
/// above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_text(
    session: *mut NVFP4_Session,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_session_text", || {
        // SAFETY: the pointers are as the header asks.
        with(session, |state| unsafe {
            copy_text(&state.text, buffer, capacity, length)
        })
    })
}

/// Copies the conversation of the chat turns, as a JSON array of objects with `role` and `content`; during a call, as it was
/// before. For the buffer see TEXT above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_messages(
    session: *const NVFP4_Session,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_session_messages", || {
        let json = look(session, State::messages, |s| match &s.messages {
            Ok(json) => copied(json),
            Err(e) => Err(e.clone()),
        })?;
        // SAFETY: the pointers are as the header asks.
        unsafe { copy_text(&json, buffer, capacity, length) }
    })
}

/// Writes how many tokens the session holds; during a call, how many it held before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_length(
    session: *const NVFP4_Session,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_session_length", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("length", length) }?;
        out.set(look(session, |s| Ok(s.session.len()), |s| Ok(s.length))?);
        Ok(())
    })
}

/// Writes how many tokens the session can hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_context(
    session: *const NVFP4_Session,
    context: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_session_context", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("context", context) }?;
        out.set(handle::get::<Session>("session", session)?.context);
        Ok(())
    })
}

/// Writes the bytes of the session's cached keys and values, those it shares with forks included; during a call, what they were
/// before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_memory(
    session: *const NVFP4_Session,
    bytes: *mut u64,
) -> NVFP4_Status {
    enter("NVFP4_session_memory", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("bytes", bytes) }?;
        out.set(look(
            session,
            |s| Ok(s.session.kv_bytes() as u64),
            |s| Ok(s.kv_bytes),
        )?);
        Ok(())
    })
}

/// Copies the tokens that the session holds. Writes their number to `count`; see ARRAYS OUT above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_tokens(
    session: *mut NVFP4_Session,
    tokens: *mut i32,
    capacity: usize,
    count: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_session_tokens", || {
        with(session, |state| {
            let ids = tokens_out(state.session.tokens())?;
            // SAFETY: the pointers are as the header asks.
            unsafe { copy_items(&ids, tokens, capacity, count) }
        })
    })
}

/// Forgets the tokens from `length` on. A conversation goes on if the cut is in an answer or at its end. Draws are then those
/// that followed `length` before; cut to 0, the session is as after NVFP4_session_reset().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_truncate(
    session: *mut NVFP4_Session,
    length: usize,
) -> NVFP4_Status {
    enter("NVFP4_session_truncate", || {
        with(session, |state| state.session.truncate(length))
    })
}

/// Forgets all tokens and the conversation. The options stay.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_reset(session: *mut NVFP4_Session) -> NVFP4_Status {
    enter("NVFP4_session_reset", || {
        with(session, |state| state.session.reset())
    })
}

/// Makes a second session in the same state. The two share their cache's memory as far as neither writes to it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_fork(
    session: *mut NVFP4_Session,
    out: *mut *mut NVFP4_Session,
) -> NVFP4_Status {
    enter("NVFP4_session_fork", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        with(session, |state| {
            out.set(insert(state.session.fork()?));
            Ok(())
        })
    })
}

/// Writes the session to a file, cache and conversation included. A file that was there is replaced only when the new one
/// is whole.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_save(
    session: *mut NVFP4_Session,
    path: *const c_char,
    path_length: usize,
) -> NVFP4_Status {
    enter("NVFP4_session_save", || {
        // SAFETY: the pointer is as the header asks.
        let path = Path::new(unsafe { text("path", path, path_length) }?);
        with_long(session, |state| state.session.save(path))
    })
}

/// Makes a session as it was when it was written to a file. `model` must be the model that ran it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_restore(
    model: *const NVFP4_Model,
    path: *const c_char,
    path_length: usize,
    out: *mut *mut NVFP4_Session,
) -> NVFP4_Status {
    enter("NVFP4_session_restore", || {
        // SAFETY: the pointers are as the header asks.
        let (out, path) = unsafe { (Out::new("out", out)?, text("path", path, path_length)?) };
        let model = handle::get::<Model>("model", model)?;
        out.set(insert(session::Session::restore(model, Path::new(path))?));
        Ok(())
    })
}

/// Ends the call that uses the session, if there is one, soon: a generation with what it has, anything else with
/// #NVFP4_CANCELLED. From any thread, and from a callback.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_cancel(session: *const NVFP4_Session) -> NVFP4_Status {
    enter("NVFP4_session_cancel", || {
        handle::get::<Session>("session", session)?
            .canceller
            .cancel();
        Ok(())
    })
}

/// Appends `tokens[i]` to `sessions[i]`, `count` of both, and runs them in one pass over the weights, which takes little
/// longer than one of them. The sessions are different ones of the same model handle. If it fails, all are as they were.
/// NVFP4_session_cancel() of the first one ends it.
///
/// NVFP4_session_step_sample() is the faster call where only the next tokens are wanted: here the logits of every session come to
/// the host.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_step(
    sessions: *const *mut NVFP4_Session,
    tokens: *const i32,
    count: usize,
) -> NVFP4_Status {
    enter("NVFP4_session_step", || {
        // SAFETY: the pointers are as the header asks.
        let (handles, tokens) = unsafe {
            (
                slice("sessions", sessions, count)?,
                tokens_in(slice("tokens", tokens, count)?)?,
            )
        };
        with_all(handles, |sessions| session::step(sessions, &tokens))
    })
}

/// NVFP4_session_step(), and writes the token to come of each session to `next`, chosen where the model runs: on a GPU no logits
/// come to the host. `next[i]` is what NVFP4_session_sample() would choose then, and is not appended: to generate, pass it as
/// the token of the next step, until a stop token or length of yours ends that sequence. Sequences may join and leave between
/// any two steps. The order of `sessions` is best kept: with the same sessions, and `next` as their tokens, a GPU has begun the
/// next step before it is asked for.
///
/// - `options`: how to choose, `options[i]` for `sessions[i]`; of each, what concerns stops and lengths has no part in it. NULL,
///   for one or for all, takes the likeliest token. One may stand for several sessions: draws depend on its seed and on how many
///   tokens were appended to a session.
/// - `next`: `count` tokens; unchanged if it fails. It may be `tokens`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_step_sample(
    sessions: *const *mut NVFP4_Session,
    tokens: *const i32,
    count: usize,
    options: *const *const NVFP4_GenerateOptions,
    next: *mut i32,
) -> NVFP4_Status {
    enter("NVFP4_session_step_sample", || {
        // SAFETY: the pointers are as the header asks.
        let (handles, tokens) = unsafe {
            (
                slice("sessions", sessions, count)?,
                tokens_in(slice("tokens", tokens, count)?)?,
            )
        };
        if next.is_null() && count > 0 {
            bail!(InvalidArgument, "next is NULL");
        }
        let each = match options.is_null() {
            true => vec![std::ptr::null(); count],
            // SAFETY: as above.
            false => unsafe { slice("options", options, count) }?.to_vec(),
        };
        let sampling = each
            .iter()
            .enumerate()
            .map(|(i, &options)| {
                // SAFETY: as above.
                let options = unsafe { self::options(options) };
                let sampling = options.and_then(|o| o.sampling());
                let checked = sampling.and_then(|s| s.check().map(|()| s));
                checked.map_err(|e| e.within(format_args!("options[{i}]")))
            })
            .collect::<Result<Vec<SamplingOptions>>>()?;
        let sampling: Vec<&SamplingOptions> = sampling.iter().collect();
        let chosen = with_all(handles, |sessions| {
            session::step_choose(sessions, &tokens, &sampling, true)
        })?;
        for (i, token) in chosen.into_iter().enumerate() {
            let token = token_out(token)?;
            // SAFETY: there is room for `count` tokens.
            unsafe { next.add(i).write(token) };
        }
        Ok(())
    })
}

/// Runs `body` with sessions that are this call's alone.
fn with_all<T>(
    handles: &[*mut NVFP4_Session],
    body: impl FnOnce(&mut [&mut session::Session]) -> Result<T>,
) -> Result<T> {
    let mut seen = BTreeSet::new();
    let mut objects = Vec::with_capacity(handles.len());
    for (i, handle) in handles.iter().enumerate() {
        objects.push(handle::get::<Session>(&name(i), *handle)?);
        if !seen.insert(handle.addr()) {
            bail!(
                InvalidArgument,
                "{} is there before; a session takes one token in a step",
                name(i)
            );
        }
    }
    let mut states = objects
        .iter()
        .enumerate()
        .map(|(i, object)| object.state.take(&name(i)))
        .collect::<Result<Vec<_>>>()?;
    let mut sessions: Vec<_> = states.iter_mut().map(|s| &mut s.session).collect();
    body(&mut sessions)
}

fn name(session: usize) -> String {
    format!("sessions[{session}]")
}
