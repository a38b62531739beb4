//! Sessions: conversations and other sequences of tokens, run by a model.
//!
//! A session holds its tokens with their cached keys and values, so that a call runs only what is new. It keeps its model
//! alive. One call at a time may use it: another one meanwhile, from a callback too, gets #NVFP4_BUSY. Length, memory and
//! messages can be asked for at any time: during a call they are as they were before it. A call that fails leaves the session
//! as it was.

use std::cell::OnceCell;
use std::ffi::{c_char, c_void};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use super::arguments::{
    Growing, Out, choice, copy_items, copy_text, count, fill, flag, options, reserved, results,
    slice, text,
};
use super::call::{Ends, NVFP4_CallOptions, watched};
use super::guard::{User, answer, enter, enter_to_free, note};
use super::handle::{self, Exclusive, Object, Watched};
use super::model::{NVFP4_Model, token_out, tokens_in, tokens_out};
use super::status::{NVFP4_OK, NVFP4_Status};
use crate::base::error::{Result, bail};
use crate::base::memory::copied;
use crate::base::{Error, alloc, call};
use crate::model::{KvType, Model};
use crate::session::{
    self, Eviction, Finish, GenerateOptions, Generation, Part, Piece, Sampler, SamplingOptions,
    SessionOptions,
};
use crate::text::{ToolCall, messages_to_json};
use serde_json::Value;

/// A session. See the session chapter.
pub struct NVFP4_Session {
    _private: [u8; 0],
}

/// Bytes that a byte of a message may take as JSON, which grows by doubling.
const FOR_JSON: usize = 16;

/// A session, and what may be reached while a call uses it.
struct Session {
    state: Exclusive<State>,
    context: usize,
}

pub(super) struct State {
    pub(super) session: session::Session,
    /// The text of the last generation, what was thought before it, and the calls of tools in it, as JSON.
    pub(super) text: String,
    pub(super) reasoning: String,
    pub(super) tool_calls: String,
    /// The conversation as JSON, once somebody has asked for it and until a call may have changed it.
    messages: OnceCell<String>,
}

/// What a session was when the call that uses it began.
pub(super) struct Snapshot {
    length: usize,
    kv_bytes: u64,
    pub(super) messages: Result<String>,
}

impl State {
    pub(super) fn messages(&self) -> Result<String> {
        if let Some(json) = self.messages.get() {
            return copied(json);
        }
        let messages = self.session.messages()?;
        let bytes = messages.iter().map(|m| m.size() * FOR_JSON + 256);
        let _json = alloc::set_aside(bytes.sum())?;
        let json = messages_to_json(&messages).to_string();
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
/// Forget old tokens: the older half of those after the first `keep`, or more if that is not enough. What stays is run anew. A chat
/// forgets whole turns, never what stands before the first user's words or the last question.
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
    /// Tokens to hold at most; memory is taken as they come. 0, the default, is what the model was made for.
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
        reserved(self, self.reserved)?;
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

/// A seed that is drawn anew for each generation, whose result tells it. Steps of sessions draw it when the session is made, and
/// anew when it is cut.
pub const NVFP4_SEED_NEW: u64 = 0xffff_ffff_ffff_ffff;

/// How to generate. Fill with NVFP4_generate_options_init(), or as the model's maker asks with NVFP4_model_generate_options(), then
/// change what is to differ. Arrays and texts are read during the call only.
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
    /// 1 gives each token's log-probability to the callback, for which the logits of each come to the host. Default: 0.
    pub log_probabilities: i32,
    /// Leave it 0.
    pub reserved: i32,
    /// Tokens to generate at most. Default: SIZE_MAX, as many as the context has room for. With 0 a prompt is run and nothing generated.
    pub max_tokens: usize,
    /// Fixes the draws: the same seed at the same place gives the same token. A place is the number of tokens appended before
    /// it, those that eviction has forgotten included. Default: #NVFP4_SEED_NEW.
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
    /// What may end the call, and who hears how many tokens are run; NULL for nobody. Default: NULL.
    pub call: *const NVFP4_CallOptions,
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
            log_probabilities: 0,
            reserved: 0,
            max_tokens: defaults.max_tokens,
            seed: NVFP4_SEED_NEW,
            stop_tokens: std::ptr::null(),
            stop_token_count: 0,
            stop_strings: std::ptr::null(),
            stop_string_lengths: std::ptr::null(),
            stop_string_count: 0,
            call: std::ptr::null(),
        }
    }
}

impl NVFP4_GenerateOptions {
    /// # Safety
    /// The arrays and texts must be readable.
    pub(super) unsafe fn read(&self) -> Result<GenerateOptions> {
        reserved(self, self.reserved)?;
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
            log_probabilities: flag("log_probabilities", self.log_probabilities)?,
        })
    }

    fn sampling(&self) -> Result<SamplingOptions> {
        Ok(SamplingOptions {
            temperature: self.temperature,
            top_k: count("top_k", self.top_k.into())?,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: (self.seed != NVFP4_SEED_NEW).then_some(self.seed),
        })
    }
}

/// Nothing has ended the text yet.
pub const NVFP4_FINISH_NONE: i32 = -1;
/// A stop token ended the text.
pub const NVFP4_FINISH_STOP: i32 = 0;
/// A stop string ended the text.
pub const NVFP4_FINISH_STOP_STRING: i32 = 1;
/// As many tokens were generated as were allowed.
pub const NVFP4_FINISH_LENGTH: i32 = 2;
/// The context is full.
pub const NVFP4_FINISH_CONTEXT: i32 = 3;
/// A callback, a cancel handle or a flag ended it. What was generated until then is kept.
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
    /// The seed of the draws, which repeats them.
    pub seed: u64,
    /// Calls of tools in the answer; NVFP4_session_tool_calls() has them.
    pub tool_calls: usize,
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
            seed: 0,
            tool_calls: 0,
        }
    }
}

pub(super) fn finish_number(finish: Finish) -> i32 {
    match finish {
        Finish::Stop => NVFP4_FINISH_STOP,
        Finish::StopString => NVFP4_FINISH_STOP_STRING,
        Finish::Length => NVFP4_FINISH_LENGTH,
        Finish::Context => NVFP4_FINISH_CONTEXT,
        Finish::Cancelled => NVFP4_FINISH_CANCELLED,
    }
}

impl NVFP4_GenerationResult {
    fn of(generation: &Generation) -> Self {
        NVFP4_GenerationResult {
            finish: finish_number(generation.finish),
            prompt_tokens: generation.prompt_tokens,
            generated_tokens: generation.tokens.len(),
            prefill_seconds: generation.timings.prefill_seconds,
            first_token_seconds: generation.timings.first_token_seconds,
            decode_seconds: generation.timings.decode_seconds,
            seed: generation.seed,
            tool_calls: generation.tool_calls.len(),
            ..Self::defaults()
        }
    }
}

/// A token, with the text that it completes.
pub const NVFP4_EVENT_TOKEN: i32 = 0;
/// No token, but text: more that the token before completes, or what was held back in case it was the beginning of something else.
pub const NVFP4_EVENT_TEXT: i32 = 1;

/// The text itself: the answer in a chat, and all that is generated outside of one.
pub const NVFP4_PART_CONTENT: i32 = 0;
/// What the model thinks before it answers.
pub const NVFP4_PART_REASONING: i32 = 1;
/// A call of a tool, whole: a JSON object with `id`, `type` and `function`, which has `name` and `arguments`, a text of JSON.
pub const NVFP4_PART_TOOL_CALL: i32 = 2;

/// What a generation has to say. Later versions may add to its end: a field is there if `struct_size` reaches that far.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_TokenEvent {
    /// sizeof(NVFP4_TokenEvent) as the library knows it.
    pub struct_size: u32,
    /// One of NVFP4_EVENT_*.
    pub kind: i32,
    /// The token, or -1 where the event is none.
    pub token: i32,
    /// Which session of a batch it is for; 0 for the only one.
    pub index: i32,
    /// Whole UTF-8 characters without a NUL behind; none while a character, or what may be a stop string or a mark of the model's, is
    /// incomplete. The contents of all events together are the generation's text, unless the callback ends it. Valid during
    /// the callback.
    pub text: *const c_char,
    /// Bytes of `text`.
    pub text_length: usize,
    /// The natural logarithm of the token's probability as the model gives it, before temperature, penalties and the like; NaN
    /// unless `log_probabilities` of the options is 1.
    pub log_probability: f32,
    /// What the text is, or is going to be: one of NVFP4_PART_*.
    pub part: i32,
}

/// Is given each token as it comes, in the order of the text. Returns 0 to go on, anything else to end the generation, which keeps
/// that token.
pub type NVFP4_TokenCallback =
    Option<unsafe extern "C" fn(user: *mut c_void, event: *const NVFP4_TokenEvent) -> i32>;

fn event_of(piece: Piece<'_>) -> Result<NVFP4_TokenEvent> {
    Ok(NVFP4_TokenEvent {
        struct_size: size_of::<NVFP4_TokenEvent>() as u32,
        kind: match piece.token {
            Some(_) => NVFP4_EVENT_TOKEN,
            None => NVFP4_EVENT_TEXT,
        },
        token: piece.token.map_or(Ok(-1), token_out)?,
        index: 0,
        text: piece.text.as_ptr().cast(),
        text_length: piece.text.len(),
        log_probability: piece.log_probability.unwrap_or(f32::NAN),
        part: match piece.part {
            Part::Content => NVFP4_PART_CONTENT,
            Part::Reasoning => NVFP4_PART_REASONING,
            Part::ToolCall => NVFP4_PART_TOOL_CALL,
        },
    })
}

fn insert(session: session::Session) -> *mut NVFP4_Session {
    handle::insert(Arc::new(Session {
        context: session.context(),
        state: Exclusive::new(State {
            session,
            text: String::new(),
            reasoning: String::new(),
            tool_calls: "[]".to_owned(),
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

/// Runs `body`, which may be long and call back, as `call` says, with a session that is this call's alone.
///
/// # Safety
/// As for [`watched`].
unsafe fn with_long<T>(
    handle: *const NVFP4_Session,
    call: *const NVFP4_CallOptions,
    body: impl FnOnce(&mut State) -> Result<T>,
) -> Result<T> {
    let object = handle::get::<Session>("session", handle)?;
    let mut state = object.state.take_long("session")?;
    // SAFETY: promised by the caller.
    unsafe { watched(call, || body(&mut state)) }
}

/// Runs `body`, which is short unless eviction left much to run: it can be ended, or call back, only where `call` says so.
///
/// # Safety
/// As for [`watched`].
unsafe fn with_call<T>(
    handle: *const NVFP4_Session,
    call: *const NVFP4_CallOptions,
    body: impl FnOnce(&mut State) -> Result<T>,
) -> Result<T> {
    match call.is_null() {
        true => with(handle, body),
        // SAFETY: promised by the caller.
        false => unsafe { with_long(handle, call, body) },
    }
}

/// Looks at a session, which another call may be using.
pub(super) fn look<T>(
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
///
/// - `call`: what may end it, and who hears how far it is; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_prefill(
    session: *mut NVFP4_Session,
    tokens: *const i32,
    count: usize,
    call: *const NVFP4_CallOptions,
) -> NVFP4_Status {
    enter("NVFP4_session_prefill", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let tokens = tokens_in(slice("tokens", tokens, count)?)?;
            with_long(session, call, |state| state.session.prefill(&tokens))
        }
    })
}

/// Appends tokens and runs them one after the other, more slowly: for comparison. See SAME BITS above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_prefill_token_by_token(
    session: *mut NVFP4_Session,
    tokens: *const i32,
    count: usize,
    call: *const NVFP4_CallOptions,
) -> NVFP4_Status {
    enter("NVFP4_session_prefill_token_by_token", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let tokens = tokens_in(slice("tokens", tokens, count)?)?;
            with_long(session, call, |state| {
                state.session.prefill_token_by_token(&tokens)
            })
        }
    })
}

/// Appends one token and runs it, with what has not been run before it: the last token of a generation, or what eviction left.
///
/// - `call`: as for NVFP4_session_prefill().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_decode(
    session: *mut NVFP4_Session,
    token: i32,
    call: *const NVFP4_CallOptions,
) -> NVFP4_Status {
    enter("NVFP4_session_decode", || {
        let token = tokens_in(&[token])?[0];
        // SAFETY: the pointer is as the header asks.
        unsafe { with_call(session, call, |state| state.session.decode(token)) }
    })
}

/// Copies the logits of the token to come, one for each token id. Writes their number to `count`; see ARRAYS OUT above. Runs what has
/// not been run, as NVFP4_session_decode() does.
///
/// - `call`: as for NVFP4_session_prefill().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_logits(
    session: *mut NVFP4_Session,
    logits: *mut f32,
    capacity: usize,
    count: *mut usize,
    call: *const NVFP4_CallOptions,
) -> NVFP4_Status {
    enter("NVFP4_session_logits", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            with_call(session, call, |state| {
                copy_items(state.session.logits()?, logits, capacity, count)
            })
        }
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
        let sample = |state: &mut State| {
            let mut sampler = sampler.after(state.session.appended());
            token_out(state.session.sample(&mut sampler)?)
        };
        // SAFETY: as above.
        out.set(unsafe { with_call(session, options.call, sample) }?);
        Ok(())
    })
}

/// Fills `options` as NVFP4_generate_options_init() does, and with the temperature, top_k, top_p, min_p and repetition penalty that the
/// model's maker asks for, in `generation_config.json` or in a GGUF file's metadata. Where nothing is said they are the defaults,
/// which take the likeliest token. The tokens that end an answer need no option: the model knows them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_model_generate_options(
    model: *const NVFP4_Model,
    options: *mut NVFP4_GenerateOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_model_generate_options", || {
        let sampling = handle::get::<Model>("model", model)?.sampling().clone();
        let filled = NVFP4_GenerateOptions {
            temperature: sampling.temperature,
            top_k: i32::try_from(sampling.top_k).unwrap_or(0),
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            repetition_penalty: sampling.repetition_penalty,
            ..NVFP4_GenerateOptions::defaults()
        };
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, filled) }
    })
}

/// What both kinds of generation have in common; `run` is the one that is meant.
///
/// # Safety
/// As the header says of the pointers.
pub(super) unsafe fn generate(
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
    let (options, result) = unsafe { (self::options(options)?, results(result)?) };
    let call = options.call;
    // SAFETY: as above.
    let options = unsafe { options.read() }?;
    let user = User(user);
    let mut failed = Ok(());
    let mut on_piece = |piece: Piece<'_>| match (callback, event_of(piece)) {
        (None, _) => ControlFlow::Continue(()),
        (Some(callback), Ok(event)) => {
            // SAFETY: the host's callback, called on its thread while its call runs.
            call::outside(|| answer(unsafe { callback(user.0, &event) }))
        }
        (_, Err(e)) => {
            failed = Err(e);
            ControlFlow::Break(())
        }
    };
    let generate = |state: &mut State| {
        let generation = run(&mut state.session, &options, &mut on_piece)?;
        state.text.clone_from(&generation.text);
        state.reasoning.clone_from(&generation.reasoning);
        let calls = generation.tool_calls.iter().map(ToolCall::to_json);
        state.tool_calls = Value::from_iter(calls).to_string();
        Ok(generation)
    };
    // SAFETY: as above.
    let generation = unsafe { with_long(session, call, generate) }?;
    failed?;
    if let Some(result) = result {
        result(NVFP4_GenerationResult::of(&generation));
    }
    Ok(())
}

/// Generates from where the session stands, which takes a prefilled prompt. Cancelling it is no failure, but gives what there is:
/// see #NVFP4_FINISH_CANCELLED.
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

/// Copies a text that the last generation left in a session.
///
/// # Safety
/// As for [`copy_text`].
pub(super) unsafe fn copy_last(
    session: *mut NVFP4_Session,
    text: fn(&State) -> &str,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> Result<()> {
    // SAFETY: promised by the caller.
    with(session, |state| unsafe {
        copy_text(text(state), buffer, capacity, length)
    })
}

/// Copies the text of the last generation, of a chat the answer's content, which is empty before the first. A character that it left
/// unfinished is not part of it, whatever ended it: if the next generation completes the character, its text begins with it. For the
/// buffer see TEXT above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_text(
    session: *mut NVFP4_Session,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_session_text", || {
        // SAFETY: the pointers are as the header asks.
        unsafe { copy_last(session, |state| &state.text, buffer, capacity, length) }
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

/// Forgets the tokens from `length` on. A conversation then ends in the answer that the cut is in, or else with the last one before
/// it. Draws are then those that followed `length` before; cut to 0, the session is as after NVFP4_session_reset().
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
///
/// - `call`: what may end it, and who hears how many bytes are written; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_save(
    session: *mut NVFP4_Session,
    path: *const c_char,
    path_length: usize,
    call: *const NVFP4_CallOptions,
) -> NVFP4_Status {
    enter("NVFP4_session_save", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let path = Path::new(text("path", path, path_length)?);
            with_long(session, call, |state| state.session.save(path))
        }
    })
}

/// Makes a session as it was when it was written to a file. `model` must be the model that ran it.
///
/// - `call`: what may end it, and who hears how many bytes are read; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_restore(
    model: *const NVFP4_Model,
    path: *const c_char,
    path_length: usize,
    call: *const NVFP4_CallOptions,
    out: *mut *mut NVFP4_Session,
) -> NVFP4_Status {
    enter("NVFP4_session_restore", || {
        // SAFETY: the pointers are as the header asks.
        let (out, path) = unsafe { (Out::new("out", out)?, text("path", path, path_length)?) };
        let model = handle::get::<Model>("model", model)?;
        let restore = || session::Session::restore(model, Path::new(path));
        // SAFETY: as above.
        out.set(insert(unsafe { watched(call, restore) }?));
        Ok(())
    })
}

/// Appends `tokens[i]` to `sessions[i]`, `count` of both, and runs them in one pass over the weights, which takes little
/// longer than one of them. The sessions are different ones of the same model handle. If it fails, all are as they were.
///
/// NVFP4_session_step_sample() is the faster call where only the next tokens are wanted: here the logits of every session come to
/// the host.
///
/// - `call`: what may end the pass; may be NULL. Its progress callback is not called.
/// - `statuses`: may be NULL: then a session that cannot take its token fails the call. Otherwise `count` of them, all written
///   if the other arguments are right: a session whose handle is stale or in use, whose context is full, or that is there twice,
///   or whose token is none of the model's, gets its status and stays as it is, and the others are run. The call is
///   #NVFP4_OK then, with the first one's message in NVFP4_last_error(); the status of those that were run is the call's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_step(
    sessions: *const *mut NVFP4_Session,
    tokens: *const i32,
    count: usize,
    call: *const NVFP4_CallOptions,
    statuses: *mut NVFP4_Status,
) -> NVFP4_Status {
    enter("NVFP4_session_step", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let step = Step::new(sessions, tokens, count, statuses)?;
            let run = |sessions: &mut [&mut session::Session], tokens: &[u32], _: &[usize]| {
                Ends::read(call)?.ending(|| session::step(sessions, tokens))
            };
            step.run(|_| Ok(()), run).map(|_| ())
        }
    })
}

/// NVFP4_session_step(), and writes the token to come of each session to `next`, chosen where the model runs: on a GPU no logits
/// come to the host. `next[i]` is what NVFP4_session_sample() would choose then, and is not appended: to generate, pass it as
/// the token of the next step, until a stop token or length of yours ends that sequence; a detokenizer says when. Sequences may join
/// and leave between any two steps. The order of `sessions` is best kept: with the same sessions, and `next` as their tokens, a GPU
/// has begun the next step before it is asked for.
///
/// - `options`: how to choose, `options[i]` for `sessions[i]`; of each, what concerns stops and lengths has no part in it. NULL,
///   for one or for all, takes the likeliest token. One may stand for several sessions: draws depend on its seed and on how many
///   tokens were appended to a session. What ends `options[i].call` before the pass begins leaves out that session, with
///   #NVFP4_CANCELLED; its progress callback is not called.
/// - `call`, `statuses`: as for NVFP4_session_step().
/// - `next`: `count` tokens; those of sessions that were not run are unchanged. It may be `tokens`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_step_sample(
    sessions: *const *mut NVFP4_Session,
    tokens: *const i32,
    count: usize,
    options: *const *const NVFP4_GenerateOptions,
    call: *const NVFP4_CallOptions,
    next: *mut i32,
    statuses: *mut NVFP4_Status,
) -> NVFP4_Status {
    enter("NVFP4_session_step_sample", || {
        // SAFETY: the pointers are as the header asks.
        let step = unsafe { Step::new(sessions, tokens, count, statuses) }?;
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
                let read = || unsafe {
                    let options = self::options(options)?;
                    let sampling = options.sampling()?;
                    sampling.check()?;
                    Ok((sampling, Ends::read(options.call)?))
                };
                read().map_err(|e: Error| e.within(format_args!("options[{i}]")))
            })
            .collect::<Result<Vec<(SamplingOptions, Ends)>>>()?;
        let goes_on = |i: usize| {
            if sampling[i].1.is_set() {
                bail!(Cancelled, "options[{i}]: cancelled");
            }
            Ok(())
        };
        let run = |sessions: &mut [&mut session::Session], tokens: &[u32], places: &[usize]| {
            let sampling: Vec<_> = places.iter().map(|&i| &sampling[i].0).collect();
            // SAFETY: as above.
            unsafe { Ends::read(call) }?
                .ending(|| session::step_choose(sessions, tokens, &sampling, true))
        };
        // SAFETY: as above.
        let Some((chosen, places)) = unsafe { step.run(goes_on, run) }? else {
            return Ok(());
        };
        for (token, i) in chosen.into_iter().zip(places) {
            let token = token_out(token)?;
            // SAFETY: there is room for `count` tokens.
            unsafe { next.add(i).write(token) };
        }
        Ok(())
    })
}

/// A step of several sessions, as C asks for it.
struct Step<'a> {
    handles: &'a [*mut NVFP4_Session],
    tokens: &'a [i32],
    /// Of each session; NULL where the first that cannot be run is to fail the call.
    statuses: *mut NVFP4_Status,
}

impl<'a> Step<'a> {
    /// # Safety
    /// As the header says of the pointers.
    unsafe fn new(
        sessions: *const *mut NVFP4_Session,
        tokens: *const i32,
        count: usize,
        statuses: *mut NVFP4_Status,
    ) -> Result<Self> {
        // SAFETY: promised by the caller.
        unsafe {
            Ok(Step {
                handles: slice("sessions", sessions, count)?,
                tokens: slice("tokens", tokens, count)?,
                statuses,
            })
        }
    }

    /// Runs `pass` with the sessions that can be run, their tokens and their places in the call; nothing if there are none. Those
    /// that `goes_on` refuses, given their places, cannot.
    ///
    /// # Safety
    /// As for [`Step::new`].
    unsafe fn run<T>(
        &self,
        goes_on: impl Fn(usize) -> Result<()>,
        pass: impl FnOnce(&mut [&mut session::Session], &[u32], &[usize]) -> Result<T>,
    ) -> Result<Option<(T, Vec<usize>)>> {
        let count = self.handles.len();
        let tell = |i: usize, status: NVFP4_Status| {
            if !self.statuses.is_null() {
                // SAFETY: there is room for `count` of them.
                unsafe { self.statuses.add(i).write(status) };
            }
        };
        let objects: Vec<_> = (0..count).map(|i| self.object(i)).collect();
        let (mut states, mut tokens, mut places) = (Vec::new(), Vec::new(), Vec::new());
        let mut first = None;
        let mut model = None;
        for (i, object) in objects.iter().enumerate() {
            let taken = object.as_ref().map_err(Error::clone).and_then(|object| {
                goes_on(i)?;
                let token = tokens_in(&[self.tokens[i]]).map_err(|e| e.within(name(i)))?[0];
                let state = object.state.take(&name(i))?;
                let own = state.session.model();
                if !Arc::ptr_eq(own, model.get_or_insert_with(|| own.clone())) {
                    bail!(
                        InvalidArgument,
                        "{} runs another model than the first; sessions of a step share one",
                        name(i)
                    );
                }
                let checked = state.session.check_step(token);
                checked.map_err(|e| e.within(name(i)))?;
                Ok((state, token))
            });
            match taken {
                Ok((state, token)) => {
                    states.push(state);
                    tokens.push(token);
                    places.push(i);
                }
                Err(e) if self.statuses.is_null() => return Err(e),
                Err(e) => {
                    tell(i, e.kind().status());
                    first.get_or_insert(e);
                }
            }
        }
        let mut sessions: Vec<_> = states.iter_mut().map(|s| &mut s.session).collect();
        let ran = match places.is_empty() {
            true => Ok(None),
            false => pass(&mut sessions, &tokens, &places).map(Some),
        };
        let status = ran
            .as_ref()
            .map_or_else(|e| e.kind().status(), |_| NVFP4_OK);
        places.iter().for_each(|&i| tell(i, status));
        if let (Ok(_), Some(e)) = (&ran, &first) {
            note(e);
        }
        Ok(ran?.map(|result| (result, places)))
    }

    fn object(&self, i: usize) -> Result<Arc<Session>> {
        let object = handle::get::<Session>(&name(i), self.handles[i])?;
        if self.handles[..i].contains(&self.handles[i]) {
            bail!(
                InvalidArgument,
                "{} is there before; a session takes one token in a step",
                name(i)
            );
        }
        Ok(object)
    }
}

fn name(session: usize) -> String {
    format!("sessions[{session}]")
}
