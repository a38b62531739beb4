//! Sessions: conversations and other sequences of tokens, with their KV cache.
//!
//! A session holds its tokens with their cached keys and values, so that a call runs only new tokens. It keeps its model
//! alive. Only one call at a time may use it: another one meanwhile, even from a callback, fails with #NVFP4_BUSY. Its
//! length, memory and messages can be read at any time; during a call they are those from before the call. A call that
//! fails leaves the session unchanged.
//!
//! LOGITS. Each choice of a token starts from the model's logits, and changes a copy of them in this order: `logit_biases` are added;
//! `presence_penalty + frequency_penalty * n` is subtracted from the logit of each token that this generation has n > 0 times, as OpenAI
//! defines it (tokens of the prompt do not count, in contrast to `repetition_penalty`); `bad_words`, `no_repeat_ngram_size` and `min_tokens`
//! exclude tokens; the grammar excludes what does not fit; `repetition_penalty` divides or multiplies those of tokens in its window; the
//! DRY penalty is subtracted; the host's own `logits_processor` changes the result as it likes, except that what the grammar excludes stays
//! excluded. Then come `top_n_sigma`, `typical_p`, XTC, `temperature`, `top_k`, `top_p` and `min_p`. The argmax is chosen from the same
//! logits. Tokens that a grammar forces are not chosen, and follow none of this. Log-probabilities are those of the model's own logits.
//!
//! On a GPU each choice copies its logits to the host if one of these is set beside a grammar, `repetition_penalty`, `temperature`, `top_k`,
//! `top_p` and `min_p`, which the device applies; a `repetition_window` counts as one. A generation with any of these drafts nothing. A choice
//! from logits in host memory copies 4 bytes for each token of the vocabulary, and with a processor reads them once more to check them.

use std::cell::OnceCell;
use std::ffi::{c_char, c_void};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::adapter::NVFP4_Adapter;
use super::arguments::{
    self, Growing, Out, User, choice, copy_items, copy_text, count, fill, flag, options, results,
    slice, slice_mut, text, texts,
};
use super::call::{Cancellation, NVFP4_CallOptions, watched, watched_throughout};
use super::grammar::NVFP4_Grammar;
use super::guard::{answer, calling, enter, enter_to_free, note, unwinding};
use super::handle::{self, Exclusive, Object, Reservation, Snapshots};
use super::model::{
    NVFP4_KV_FLOAT16, NVFP4_Model, kv_type, token_lists, token_out, tokens_in, tokens_out,
};
use super::status::{NVFP4_OK, NVFP4_Status};
use crate::base::alloc::{Budget, foreign};
use crate::base::error::{Result, bail};
use crate::base::lock::lock;
use crate::base::memory::copied;
use crate::base::{Error, ErrorKind, call};
use crate::engine::{LoadedAdapter, Served};
use crate::session::{
    self, Dry, Eviction, Finish, Forks, GenerateOptions, Generation, LogitAdjustments,
    LogitsProcessor, MOST_DRAFTS, Part, Piece, Sampler, SamplingOptions, SessionOptions,
    StepChoice, Submitted, TokenProbabilities, ToolCalls,
};
use crate::text::{Grammar, Message, ToolCall, messages_to_json};
use serde_json::Value;

/// Longest time from the last step of a generation to the end of its call.
const END_OF_CALL: Duration = Duration::from_millis(20);

/// A session. See the session chapter.
pub struct NVFP4_Session {
    _private: [u8; 0],
}

/// A session, with the state that may be read while a call uses it.
pub(super) struct Session {
    state: Arc<Exclusive<State>>,
    forks: Arc<Forks<session::Session>>,
    context: usize,
    /// The last generation of it that was submitted to a queue, which ends with its handle.
    submitted: Mutex<Option<Submitted>>,
}

pub(super) struct State {
    pub(super) session: session::Session,
    /// The text of the last generation, its reasoning, and its tool calls as JSON.
    pub(super) text: String,
    pub(super) reasoning: String,
    pub(super) tool_calls: String,
    /// The result of the last generation.
    result: NVFP4_GenerationResult,
    /// The conversation as JSON: created on first use, and cleared when a call may change it.
    messages: OnceCell<String>,
}

/// State of a session at the beginning of the call that uses it.
pub(super) struct Snapshot {
    length: usize,
    evicted: usize,
    kv_bytes: u64,
    pub(super) messages: Result<String>,
}

impl State {
    /// Runs a generation, and keeps what it leaves.
    pub(super) fn generate(
        &mut self,
        run: impl FnOnce(&mut session::Session) -> Result<Generation>,
    ) -> Result<Finish> {
        let generation = run(&mut self.session)?;
        self.text.clone_from(&generation.text);
        self.reasoning.clone_from(&generation.reasoning);
        let calls = generation.tool_calls.iter().map(ToolCall::to_json);
        self.tool_calls = Value::from_iter(calls).to_string();
        self.result = NVFP4_GenerationResult::of(&generation);
        match generation.refusal {
            None => Ok(generation.finish),
            Some(refusal) => Err(refusal),
        }
    }

    pub(super) fn messages(&self) -> Result<String> {
        if let Some(json) = self.messages.get() {
            return copied(json);
        }
        let messages = self.session.messages()?;
        let bytes = messages.iter().map(Message::size).sum();
        let json = foreign(Budget::json(bytes, messages.len()), || {
            Ok(messages_to_json(&messages).to_string())
        })?;
        copied(self.messages.get_or_init(|| json))
    }
}

impl Snapshots for State {
    type Snapshot = Snapshot;
    fn snapshot(&self) -> Snapshot {
        Snapshot {
            length: self.session.len(),
            evicted: self.session.evicted(),
            kv_bytes: self.session.kv_bytes() as u64,
            messages: self.messages(),
        }
    }
    fn begin_use(&mut self) {
        self.messages.take();
    }
}

impl Object for Session {
    type Handle = NVFP4_Session;
    const NAME: &'static str = "NVFP4_Session";
}

/// Refuse tokens that do not fit: #NVFP4_CONTEXT_FULL, or #NVFP4_FINISH_CONTEXT within a generation.
pub const NVFP4_EVICTION_ERROR: i32 = 0;
/// Drop old tokens: the older half of those after the first `keep`, or more if that is not enough. The remaining tokens are run again. A
/// chat drops whole turns, but never anything before the first user message, nor the last question.
pub const NVFP4_EVICTION_DROP_OLDEST: i32 = 1;
/// A sliding window with attention sinks: keep the first `keep` tokens and the most recent ones, and drop `drop` tokens between them at a time.
/// The remaining tokens are run again at their new positions, so that the session is one that was given these tokens alone. A generation
/// goes on past the context, without an end if `max_tokens` sets none. Refuses chats, which keep whole turns.
pub const NVFP4_EVICTION_SLIDING_WINDOW: i32 = 2;

/// How to create a session. Fill with NVFP4_session_options_init(), then change what is to differ.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_SessionOptions {
    /// sizeof(NVFP4_SessionOptions) as the caller knows it.
    pub struct_size: u32,
    /// One of NVFP4_KV_*. Default: half precision.
    pub kv_type: i32,
    /// One of NVFP4_EVICTION_*. Default: error.
    pub eviction: i32,
    /// 1 keeps the session out of the prefix cache: it runs all of its tokens, and no other session begins with its blocks. For measurements,
    /// and where the time of a first token must not tell what others have asked. Default: 0.
    pub is_private: i32,
    /// The most tokens to hold; memory is allocated as they are appended. 0, the default, is the context length of the
    /// model.
    pub context: usize,
    /// Tokens at the beginning that eviction never drops. Default: 0, which is 4 for a sliding window. A chat's system prompt stays in any
    /// case.
    pub keep: usize,
    /// The system prompt of NVFP4_session_chat(), in UTF-8. Default: NULL, none. Copied.
    pub system: *const c_char,
    /// Bytes of `system`.
    pub system_length: usize,
    /// Tokens that a sliding window drops at a time, or more if that is not enough. The fewer, the more often the remaining ones run again.
    /// Default: 0, half of those that are not kept. Must be 0 for other evictions.
    pub drop: usize,
    /// The adapter that the session's tokens run with, of the same model: see the adapter chapter. Its handle may be released while sessions
    /// use it. Default: NULL, none.
    pub adapter: *const NVFP4_Adapter,
}

// SAFETY: integers and pointers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_SessionOptions {
    const NAME: &'static str = "NVFP4_SessionOptions";
    const EARLIER: &'static [usize] = &[48, 56];
    fn defaults() -> Self {
        NVFP4_SessionOptions {
            struct_size: size_of::<Self>() as u32,
            kv_type: NVFP4_KV_FLOAT16,
            eviction: NVFP4_EVICTION_ERROR,
            is_private: 0,
            context: 0,
            keep: 0,
            system: std::ptr::null(),
            system_length: 0,
            drop: 0,
            adapter: std::ptr::null(),
        }
    }
}

impl NVFP4_SessionOptions {
    /// # Safety
    /// The text must be readable.
    unsafe fn read(&self) -> Result<SessionOptions> {
        // SAFETY: promised by the caller.
        let system = unsafe { text("system", self.system, self.system_length) }?;
        let drop_oldest = Eviction::DropOldest { keep: self.keep };
        let sliding_window = Eviction::SlidingWindow {
            sinks: match self.keep {
                0 => session::SINKS,
                keep => keep,
            },
            drop: self.drop,
        };
        if self.drop > 0 && self.eviction != NVFP4_EVICTION_SLIDING_WINDOW {
            bail!(
                InvalidArgument,
                "drop is {}, which is for a sliding window; leave it 0 for another eviction",
                self.drop
            );
        }
        Ok(SessionOptions {
            context: self.context,
            kv: kv_type(self.kv_type)?,
            system: (!self.system.is_null())
                .then(|| copied(system))
                .transpose()?,
            eviction: choice(
                "eviction",
                self.eviction,
                &[
                    (NVFP4_EVICTION_ERROR, "error", Eviction::Error),
                    (NVFP4_EVICTION_DROP_OLDEST, "drop oldest", drop_oldest),
                    (
                        NVFP4_EVICTION_SLIDING_WINDOW,
                        "sliding window",
                        sliding_window,
                    ),
                ],
            )?,
            private: flag("is_private", self.is_private)?,
            adapter: match self.adapter.is_null() {
                true => None,
                false => Some(handle::get::<LoadedAdapter>("adapter", self.adapter)?),
            },
        })
    }
}

/// A new random seed for each generation, which reports it in its result. Steps of sessions use one that is chosen when the
/// session is created, and again when it is truncated.
pub const NVFP4_SEED_NEW: u64 = 0xffff_ffff_ffff_ffff;

/// The model writes tool calls as it likes.
pub const NVFP4_TOOL_CALLS_FREE: i32 = 0;
/// Each tool call that the model begins is held to the schema of its tool. Refused for models whose calls are not JSON between marks.
pub const NVFP4_TOOL_CALLS_HELD: i32 = 1;
/// As held, and the content of the answer begins with a call.
pub const NVFP4_TOOL_CALLS_REQUIRED: i32 = 2;

/// How to generate. Fill with NVFP4_generate_options_init(), or with the model's recommended settings by
/// NVFP4_model_generate_options(), then change what is to differ. Arrays and texts are read during the call only.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_GenerateOptions {
    /// sizeof(NVFP4_GenerateOptions) as the caller knows it.
    pub struct_size: u32,
    /// Divides the logits before the softmax. 0, the default, takes the argmax.
    pub temperature: f32,
    /// Draws from this many of the most probable tokens. Default: 0, all.
    pub top_k: i32,
    /// Draws from the fewest of the most probable tokens whose probabilities reach this sum. 0 takes the argmax. Default:
    /// 1, all.
    pub top_p: f32,
    /// Leaves out tokens less probable than this fraction of the most probable one. Default: 0, none.
    pub min_p: f32,
    /// Makes tokens that have occurred less probable: divides their logits if positive, else multiplies them. Default: 1,
    /// no penalty.
    pub repetition_penalty: f32,
    /// 1 treats the model's own stop tokens like any other token. Default: 0.
    pub ignore_model_stops: i32,
    /// 1 computes each token from the whole sequence without the KV cache, for comparison; slow. Default: 0.
    pub replay: i32,
    /// 1 passes each token's log-probability to the callback, which copies the logits of each token to the host. Default:
    /// 0.
    pub log_probabilities: i32,
    /// The most tokens that the model's drafter guesses in a step, for one pass of the model to verify, up to 16; -1 drafts none. A
    /// number is refused for a model without a drafter, unless there is a `draft_model`. The generated tokens are the same, on a GPU but
    /// for rounding. Default: 0, which drafts if the model has a drafter, while that is faster.
    pub drafts: i32,
    /// The most tokens to generate. Default: SIZE_MAX, as many as fit in the context, and any number with a sliding window. With 0 a prompt
    /// is run and nothing is generated.
    pub max_tokens: usize,
    /// Makes the draws repeatable: the same logits, options, seed and position give the same token. The position counts all
    /// tokens appended before, including those that eviction has dropped. Default: #NVFP4_SEED_NEW.
    pub seed: u64,
    /// Tokens that end the text, besides the model's own stop tokens. A stop token is not appended. Default: NULL.
    pub stop_tokens: *const i32,
    /// Elements of `stop_tokens`.
    pub stop_token_count: usize,
    /// Stop strings, in UTF-8: each ends the text and is not part of it. Special tokens give no text, but a stop string may
    /// contain the name of one. Default: NULL.
    pub stop_strings: *const *const c_char,
    /// Bytes of each of `stop_strings`.
    pub stop_string_lengths: *const usize,
    /// Elements of `stop_strings` and of `stop_string_lengths`.
    pub stop_string_count: usize,
    /// Cancels the call and reports the tokens run; NULL for neither. Default: NULL.
    pub call: *const NVFP4_CallOptions,
    /// Holds the text to a grammar, in a chat the content of the answer: see the grammar chapter. It may be released while generations
    /// follow it. Default: NULL, none.
    pub grammar: *const NVFP4_Grammar,
    /// One of NVFP4_TOOL_CALLS_*, for a chat without `grammar`. Default: free.
    pub tool_calls: i32,
    /// Passes log-probabilities of this many most probable tokens with each token, up to 20, and the token's own. See `log_probabilities`.
    /// Default: 0.
    pub top_log_probabilities: i32,
    /// Subtracted from the logits of tokens that the generation has at least once. See LOGITS in the chapter on sessions. Default: 0.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token once for each time that the generation has it. Default: 0.
    pub frequency_penalty: f32,
    /// Tokens whose logits get a bias; several biases of one token add up. Default: NULL.
    pub logit_bias_tokens: *const i32,
    /// The bias of each of `logit_bias_tokens`: a finite number, which is added to the logit, or minus infinity, which excludes the token.
    pub logit_biases: *const f32,
    /// Elements of `logit_bias_tokens` and of `logit_biases`.
    pub logit_bias_count: usize,
    /// Token sequences that are not completed: where all but the last token of one are the end of the session's tokens, its last token is
    /// excluded. Default: NULL.
    pub bad_words: *const *const i32,
    /// Tokens of each of `bad_words`, at least 1.
    pub bad_word_lengths: *const usize,
    /// Elements of `bad_words` and of `bad_word_lengths`.
    pub bad_word_count: usize,
    /// The most tokens that a step drafts by prompt lookup, up to 16: where the session's last tokens have occurred in it before, those that
    /// followed there, for one pass of the model to verify. It pays where an answer quotes its prompt or itself, as edits of code and
    /// summaries do; how many are drafted follows from what has been fastest. The generated tokens are the same, on a GPU but for
    /// rounding unless the model is `deterministic`. The model's drafter drafts nothing then. Not together with a number of `drafts`.
    /// Default: 0, which looks nothing up.
    pub prompt_lookup: usize,
    /// Changes the logits before each choice; see LOGITS in the chapter on sessions. In a queue it is called on a thread of the library, and
    /// must stay valid until the generation's end. Default: NULL, none.
    pub logits_processor: NVFP4_LogitsProcessor,
    /// `user` of `logits_processor`.
    pub logits_user: *mut c_void,
    /// A smaller model with the same tokenizer, on any device, that guesses tokens for one pass of the session's model to verify. A step
    /// guesses as many as have been fastest, up to 8 and possibly none, or as many as `drafts` says, none for -1. The generated tokens are the
    /// same, on a GPU but for rounding unless the session's model is `deterministic`. The session's tokens run through the draft model too. The
    /// session keeps their keys and values there, which the draft model's statistics count, and the draft model itself, until a generation
    /// without it or with another one; the host may release it meanwhile. The drafter of the session's model guesses nothing then. Not
    /// together with `prompt_lookup`. NVFP4_INVALID_ARGUMENT if a token has another text in the draft model, or if one of the two has no
    /// tokenizer and their vocabularies differ in size. Without memory for its keys and values the generation goes on without drafts and
    /// logs a warning; another fault of the draft model is that of the generation. Default: NULL, none.
    pub draft_model: *const NVFP4_Model,
    /// Tokens at the end of the session that `repetition_penalty` counts, such as 64; the prompt's are among them as far as they reach. A
    /// generation with a window drafts nothing. Default: 0, all tokens of the session.
    pub repetition_window: usize,
    /// New tokens before which those that end the text, the model's and `stop_tokens`, are not chosen, and stop strings are not looked for. At
    /// most `max_tokens`. A grammar that allows nothing else ends the text all the same. Default: 0.
    pub min_tokens: usize,
    /// Tokens that would complete a sequence of this many tokens that the session has already, prompt included, are excluded. Default: 0, none.
    pub no_repeat_ngram_size: usize,
    /// Strength of the DRY penalty, such as 0.8: where the session's last tokens have occurred before, the token that followed there loses
    /// `dry_multiplier * dry_base^(n - dry_allowed_length)`, with the length n of the longest such repetition in tokens. Default: 0, off.
    pub dry_multiplier: f32,
    /// At least 1. Default: 1.75.
    pub dry_base: f32,
    /// Length of the shortest repetition with a penalty, at least 1. Default: 2.
    pub dry_allowed_length: usize,
    /// Tokens at the end of the session in which repetitions are found. Default: 0, all tokens of the session.
    pub dry_window: usize,
    /// Strings, in UTF-8, that no repetition contains: one begins after the last of them. A token whose own text contains one has no penalty.
    /// The text of a special token is its name. They need the model's tokenizer.
    pub dry_sequence_breakers: *const *const c_char,
    /// Bytes of each of `dry_sequence_breakers`.
    pub dry_sequence_breaker_lengths: *const usize,
    /// Elements of `dry_sequence_breakers` and of `dry_sequence_breaker_lengths`; 0 for none. Default: SIZE_MAX, which with NULL stands for
    /// the four strings newline, colon, quotation mark and asterisk.
    pub dry_sequence_breaker_count: usize,
    /// Excludes tokens whose logit is more than this many standard deviations below the largest. Default: 0, off.
    pub top_n_sigma: f32,
    /// Keeps the tokens whose surprise is nearest to the entropy, as many as reach this probability together (locally typical sampling).
    /// Default: 1, all.
    pub typical_p: f32,
    /// Probability with which a choice excludes the most probable tokens (XTC); `seed` decides on it as on draws. Default: 0, never.
    pub xtc_probability: f32,
    /// Tokens with at least this probability are then excluded, but for the least probable of them. Default: 0.1.
    pub xtc_threshold: f32,
}

// SAFETY: numbers and pointers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_GenerateOptions {
    const NAME: &'static str = "NVFP4_GenerateOptions";
    const EARLIER: &'static [usize] = &[104, 120, 200, 208, 216];
    fn defaults() -> Self {
        let defaults = GenerateOptions::default();
        let adjustments = &defaults.adjustments;
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
            drafts: 0,
            max_tokens: defaults.max_tokens,
            seed: NVFP4_SEED_NEW,
            stop_tokens: std::ptr::null(),
            stop_token_count: 0,
            stop_strings: std::ptr::null(),
            stop_string_lengths: std::ptr::null(),
            stop_string_count: 0,
            call: std::ptr::null(),
            grammar: std::ptr::null(),
            tool_calls: NVFP4_TOOL_CALLS_FREE,
            top_log_probabilities: 0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias_tokens: std::ptr::null(),
            logit_biases: std::ptr::null(),
            logit_bias_count: 0,
            bad_words: std::ptr::null(),
            bad_word_lengths: std::ptr::null(),
            bad_word_count: 0,
            prompt_lookup: 0,
            logits_processor: None,
            logits_user: std::ptr::null_mut(),
            draft_model: std::ptr::null(),
            repetition_window: 0,
            min_tokens: 0,
            no_repeat_ngram_size: 0,
            dry_multiplier: adjustments.dry.multiplier,
            dry_base: adjustments.dry.base,
            dry_allowed_length: adjustments.dry.allowed_length,
            dry_window: 0,
            dry_sequence_breakers: std::ptr::null(),
            dry_sequence_breaker_lengths: std::ptr::null(),
            dry_sequence_breaker_count: usize::MAX,
            top_n_sigma: adjustments.top_n_sigma,
            typical_p: adjustments.typical_p,
            xtc_probability: adjustments.xtc_probability,
            xtc_threshold: adjustments.xtc_threshold,
        }
    }
}

impl NVFP4_GenerateOptions {
    /// # Safety
    /// The arrays and texts must be readable.
    pub(super) unsafe fn read(&self) -> Result<GenerateOptions> {
        // SAFETY: promised by the caller.
        let (stop_tokens, stop_strings) = unsafe {
            let lengths = ("stop_string_lengths", self.stop_string_lengths);
            let strings = ("stop_strings", self.stop_strings);
            (
                slice("stop_tokens", self.stop_tokens, self.stop_token_count)?,
                texts("a stop string", strings, lengths, self.stop_string_count)?,
            )
        };
        Ok(GenerateOptions {
            max_tokens: self.max_tokens,
            sampling: self.sampling()?,
            // SAFETY: as above.
            adjustments: unsafe { self.adjustments(0) }?,
            stop_tokens: tokens_in(stop_tokens).map_err(|e| e.within("stop_tokens"))?,
            stop_strings,
            ignore_model_stops: flag("ignore_model_stops", self.ignore_model_stops)?,
            replay: flag("replay", self.replay)?,
            top_log_probabilities: self.top_log_probabilities()?,
            drafts: match self.drafts {
                0 => None,
                -1 => Some(0),
                most if most > 0 => Some(most as usize),
                other => bail!(
                    InvalidArgument,
                    "drafts is {other}; expected -1 for none, 0 for as many as are fastest, or 1 to {MOST_DRAFTS}"
                ),
            },
            prompt_lookup: self.prompt_lookup,
            draft_model: match self.draft_model.is_null() {
                true => None,
                false => Some(handle::get::<Served>("draft_model", self.draft_model)?),
            },
            grammar: match self.grammar.is_null() {
                true => None,
                false => Some(handle::get::<Grammar>("grammar", self.grammar)?),
            },
            tool_calls: choice(
                "tool_calls",
                self.tool_calls,
                &[
                    (NVFP4_TOOL_CALLS_FREE, "free", ToolCalls::Free),
                    (NVFP4_TOOL_CALLS_HELD, "held", ToolCalls::Held),
                    (NVFP4_TOOL_CALLS_REQUIRED, "required", ToolCalls::Required),
                ],
            )?,
        })
    }

    /// Refuses a grammar where `what` chooses tokens that the caller appends.
    pub(super) fn check_no_grammar(&self, what: &str) -> Result<()> {
        if !self.grammar.is_null() || self.tool_calls != NVFP4_TOOL_CALLS_FREE {
            bail!(
                InvalidArgument,
                "{what} follows no grammar, and takes options without grammar and tool_calls; generations and chats follow them"
            );
        }
        Ok(())
    }

    /// Adjustments of the session at `index` of a call.
    ///
    /// # Safety
    /// The arrays must be readable.
    unsafe fn adjustments(&self, index: usize) -> Result<LogitAdjustments> {
        // SAFETY: promised by the caller.
        let (tokens, biases, bad_words) = unsafe {
            let count = self.logit_bias_count;
            let lengths = ("bad_word_lengths", self.bad_word_lengths);
            (
                slice("logit_bias_tokens", self.logit_bias_tokens, count)?,
                slice("logit_biases", self.logit_biases, count)?,
                token_lists(("bad_words", self.bad_words), lengths, self.bad_word_count)?,
            )
        };
        let tokens = tokens_in(tokens).map_err(|e| e.within("logit_bias_tokens"))?;
        Ok(LogitAdjustments {
            bias: tokens.into_iter().zip(biases.iter().copied()).collect(),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            bad_words,
            no_repeat_ngram_size: self.no_repeat_ngram_size,
            min_tokens: self.min_tokens,
            repetition_window: self.repetition_window,
            dry: Dry {
                multiplier: self.dry_multiplier,
                base: self.dry_base,
                allowed_length: self.dry_allowed_length,
                window: self.dry_window,
                // SAFETY: promised by the caller.
                sequence_breakers: unsafe { self.dry_sequence_breakers() }?,
            },
            processor: self.processor(index),
            top_n_sigma: self.top_n_sigma,
            typical_p: self.typical_p,
            xtc_probability: self.xtc_probability,
            xtc_threshold: self.xtc_threshold,
        })
    }

    /// # Safety
    /// The array and its strings must be readable.
    unsafe fn dry_sequence_breakers(&self) -> Result<Option<Vec<String>>> {
        if self.dry_sequence_breakers.is_null() && self.dry_sequence_breaker_count == usize::MAX {
            return Ok(None);
        }
        let strings = ("dry_sequence_breakers", self.dry_sequence_breakers);
        let lengths = self.dry_sequence_breaker_lengths;
        let lengths = ("dry_sequence_breaker_lengths", lengths);
        let count = self.dry_sequence_breaker_count;
        // SAFETY: promised by the caller.
        unsafe { texts("a dry sequence breaker", strings, lengths, count) }.map(Some)
    }

    /// The host's processor of the logits of the session at `index` of a call.
    fn processor(&self, index: usize) -> Option<LogitsProcessor> {
        let callback = self.logits_processor?;
        let callback = unwinding!(fn(*mut c_void, *const NVFP4_LogitsEvent) -> i32, callback);
        let user = User(self.logits_user);
        Some(LogitsProcessor::new(move |logits, tokens| {
            let event = NVFP4_LogitsEvent {
                struct_size: size_of::<NVFP4_LogitsEvent>() as u32,
                index: i32::try_from(index).unwrap_or(i32::MAX),
                logits: logits.as_mut_ptr(),
                logit_count: logits.len(),
                // An id is below the size of a vocabulary, and so an i32.
                tokens: tokens.as_ptr().cast(),
                token_count: tokens.len(),
            };
            // SAFETY: the host's callback, called while the generation that it was given to runs.
            call::outside(|| answer(calling(|| unsafe { callback({ user }.0, &event) })))
        }))
    }

    /// How many most probable tokens are reported with a chosen one, if log-probabilities are.
    fn top_log_probabilities(&self) -> Result<Option<usize>> {
        let top = count("top_log_probabilities", self.top_log_probabilities.into())?;
        let own = flag("log_probabilities", self.log_probabilities)?;
        Ok((own || top > 0).then_some(top))
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
/// A stop token ended the text, or nothing can follow it in its grammar.
pub const NVFP4_FINISH_STOP: i32 = 0;
/// A stop string ended the text.
pub const NVFP4_FINISH_STOP_STRING: i32 = 1;
/// `max_tokens` tokens were generated.
pub const NVFP4_FINISH_LENGTH: i32 = 2;
/// The context is full.
pub const NVFP4_FINISH_CONTEXT: i32 = 3;
/// A callback, a cancel handle or a cancel flag ended it. The tokens generated until then are kept. If there are none, the
/// session is as it was before the call.
pub const NVFP4_FINISH_CANCELLED: i32 = 4;
/// The deadline of a generation in a queue has passed. Tokens are kept as for #NVFP4_FINISH_CANCELLED.
pub const NVFP4_FINISH_DEADLINE: i32 = 5;

/// The result of a generation. Set `struct_size` before the call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_GenerationResult {
    /// sizeof(NVFP4_GenerationResult) as the caller knows it.
    pub struct_size: u32,
    /// One of NVFP4_FINISH_*.
    pub finish: i32,
    /// Tokens before the first generated one: all those in the session, or in a chat those that the turn added.
    pub prompt_tokens: usize,
    /// Tokens generated, which are the last ones of the session, as far as eviction has not dropped them.
    pub generated_tokens: usize,
    /// Seconds from the beginning of the first pass over the weights to the first token: the time to run the part of the prompt that was
    /// not cached. 0 if no pass had to run for it.
    pub prefill_seconds: f64,
    /// Seconds from the call, or from the submission to a queue, to the first token.
    pub first_token_seconds: f64,
    /// Seconds from the first token to the end.
    pub decode_seconds: f64,
    /// The seed of the draws; the same seed repeats them.
    pub seed: u64,
    /// Number of tool calls in the answer; NVFP4_session_tool_calls() gives them.
    pub tool_calls: usize,
    /// Tokens that eviction has dropped for the generation and its prompt, since the context was full.
    pub evicted_tokens: usize,
    /// Seconds from the call, or from the submission to a queue, to the beginning of its first pass over the weights: the time for which it
    /// waited for its turn in the queue, for memory, and for passes of other generations.
    pub queue_seconds: f64,
    /// The longest time from one token to the next, in seconds; 0 with fewer than two tokens. It includes the time of callbacks, and in a
    /// queue that for which its events were not taken.
    pub longest_gap_seconds: f64,
    /// Tokens of `prompt_tokens` that did not run, since their keys and values were held already: by the session, or as the prefix of another
    /// prompt.
    pub cached_tokens: usize,
    /// Tokens that a drafter, a lookup or a draft model proposed: see `drafts`, `prompt_lookup` and `draft_model` of the options.
    pub drafted_tokens: usize,
    /// Proposed tokens that the model itself chose, each of which saved a step.
    pub accepted_tokens: usize,
    /// How often the generation gave its memory up to others, and ran its tokens again.
    pub preemptions: usize,
}

// SAFETY: numbers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_GenerationResult {
    const NAME: &'static str = "NVFP4_GenerationResult";
    const EARLIER: &'static [usize] = &[64, 72];
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
            evicted_tokens: 0,
            queue_seconds: 0.0,
            longest_gap_seconds: 0.0,
            cached_tokens: 0,
            drafted_tokens: 0,
            accepted_tokens: 0,
            preemptions: 0,
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
        Finish::Deadline => NVFP4_FINISH_DEADLINE,
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
            evicted_tokens: generation.evicted,
            queue_seconds: generation.timings.queue_seconds,
            longest_gap_seconds: generation.timings.longest_gap_seconds,
            cached_tokens: generation.cached_tokens,
            drafted_tokens: generation.drafts.drafted,
            accepted_tokens: generation.drafts.accepted,
            preemptions: generation.preemptions,
            ..Self::defaults()
        }
    }
}

/// A token, with the text that it completes.
pub const NVFP4_EVENT_TOKEN: i32 = 0;
/// Text without a token: more text of the token before, or text that was held back because it might have begun a stop
/// string or a marker.
pub const NVFP4_EVENT_TEXT: i32 = 1;

/// The text itself: the answer in a chat, or everything that is generated outside a chat.
pub const NVFP4_PART_CONTENT: i32 = 0;
/// The model's reasoning before its answer.
pub const NVFP4_PART_REASONING: i32 = 1;
/// A complete tool call: a JSON object with `id`, `type` and `function`, which has `name` and `arguments`, a string of
/// JSON.
pub const NVFP4_PART_TOOL_CALL: i32 = 2;

/// A token or a piece of text of a generation. Later versions may add fields at the end: a field exists if `struct_size`
/// includes it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_TokenEvent {
    /// sizeof(NVFP4_TokenEvent) as the library knows it.
    pub struct_size: u32,
    /// One of NVFP4_EVENT_*.
    pub kind: i32,
    /// The token, or -1 if the event has none.
    pub token: i32,
    /// The index of the session in a batch; 0 for a single session.
    pub index: i32,
    /// The new text: whole UTF-8 characters, without a NUL after them. Empty while a character, or a possible stop string
    /// or marker of the model, is incomplete. The #NVFP4_PART_CONTENT texts of all events together are the text of the
    /// generation, unless the callback ends it. Valid during the callback.
    pub text: *const c_char,
    /// Bytes of `text`.
    pub text_length: usize,
    /// The natural logarithm of the token's probability by the model's own logits, before temperature, penalties and
    /// filters; NaN unless `log_probabilities` of the options is 1.
    pub log_probability: f32,
    /// The kind of text that this is, or that is to come: one of NVFP4_PART_*.
    pub part: i32,
    /// The most probable tokens by the model's own logits, in descending order: `top_log_probabilities` of the options. Valid during the
    /// callback, as are their log-probabilities.
    pub top_tokens: *const i32,
    /// The natural logarithm of the probability of each of `top_tokens`.
    pub top_log_probabilities: *const f32,
    /// Elements of `top_tokens` and of `top_log_probabilities`.
    pub top_count: usize,
}

/// Receives each token when it is generated, and the text. Returns 0 to go on, anything else to end the generation, which
/// keeps that token.
pub type NVFP4_TokenCallback =
    Option<unsafe extern "C" fn(user: *mut c_void, event: *const NVFP4_TokenEvent) -> i32>;

/// The logits of a choice, for a processor. Later versions may add fields at the end: a field exists if `struct_size` includes it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_LogitsEvent {
    /// sizeof(NVFP4_LogitsEvent) as the library knows it.
    pub struct_size: u32,
    /// The index of the session in a step; 0 for a single session.
    pub index: i32,
    /// The logits, which the processor may change: one for each token of the vocabulary, minus infinity for excluded ones. Valid during the
    /// callback.
    pub logits: *mut f32,
    /// Elements of `logits`.
    pub logit_count: usize,
    /// The tokens that the generation has so far; none in a step and in NVFP4_session_sample(), whose choices are part of no generation. Valid
    /// during the callback.
    pub tokens: *const i32,
    /// Elements of `tokens`.
    pub token_count: usize,
}

/// Changes the logits of a choice before the token is chosen. Returns 0 to go on, anything else to end the generation as
/// #NVFP4_FINISH_CANCELLED with the tokens so far; a step or a single choice then fails with #NVFP4_CANCELLED.
///
/// The library checks the result. NaN, plus infinity, or no finite logit among the tokens that may be chosen fail the call, or the generation
/// in a queue, with #NVFP4_INVALID_ARGUMENT. A generation keeps the tokens before that, with their text and its result.
///
/// It is called on the thread that runs the generation: the caller's, or in a queue one of the library's. Functions that use the session return
/// #NVFP4_BUSY there, as they do in an #NVFP4_TokenCallback; those that may read it during a call, and NVFP4_session_fork() within a generation,
/// do not.
pub type NVFP4_LogitsProcessor =
    Option<unsafe extern "C" fn(user: *mut c_void, event: *const NVFP4_LogitsEvent) -> i32>;

pub(super) fn part_number(part: Part) -> i32 {
    match part {
        Part::Content => NVFP4_PART_CONTENT,
        Part::Reasoning => NVFP4_PART_REASONING,
        Part::ToolCall => NVFP4_PART_TOOL_CALL,
    }
}

/// Log-probabilities of an event, with pointers to those of its piece.
#[derive(Clone, Copy)]
pub(super) struct EventProbabilities {
    pub(super) own: f32,
    pub(super) tokens: *const i32,
    pub(super) values: *const f32,
    pub(super) count: usize,
}

impl EventProbabilities {
    pub(super) fn of(probabilities: Option<&TokenProbabilities>) -> Self {
        match probabilities {
            // An id is below the size of a vocabulary, and so an i32.
            Some(known) if !known.top.is_empty() => EventProbabilities {
                own: known.chosen,
                tokens: known.top.as_ptr().cast(),
                values: known.top_log_probabilities.as_ptr(),
                count: known.top.len(),
            },
            _ => EventProbabilities {
                own: probabilities.map_or(f32::NAN, |known| known.chosen),
                tokens: std::ptr::null(),
                values: std::ptr::null(),
                count: 0,
            },
        }
    }
}

fn event_of(piece: Piece<'_>) -> Result<NVFP4_TokenEvent> {
    let probabilities = EventProbabilities::of(piece.probabilities);
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
        log_probability: probabilities.own,
        part: part_number(piece.part),
        top_tokens: probabilities.tokens,
        top_log_probabilities: probabilities.values,
        top_count: probabilities.count,
    })
}

fn insert(session: session::Session) -> *mut NVFP4_Session {
    handle::insert(Arc::new(Session {
        context: session.context(),
        forks: session.forks().clone(),
        state: Arc::new(Exclusive::new(State {
            session,
            text: String::new(),
            reasoning: String::new(),
            tool_calls: "[]".to_owned(),
            result: NVFP4_GenerationResult {
                finish: NVFP4_FINISH_NONE,
                ..NVFP4_GenerationResult::defaults()
            },
            messages: OnceCell::new(),
        })),
        submitted: Mutex::new(None),
    }))
}

impl Session {
    /// Reserves it for a generation in a queue.
    pub(super) fn reserve(&self) -> Result<Reservation<State>> {
        self.state.reserve("session")
    }

    /// Ends `submitted` with the session's handle.
    pub(super) fn set_submitted(&self, submitted: Submitted) {
        *lock(&self.submitted) = Some(submitted);
    }
}

/// Runs `body`, which is short and makes no callbacks, with exclusive use of a session.
fn with<T>(handle: *const NVFP4_Session, body: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
    let object = handle::get::<Session>("session", handle)?;
    let mut state = object.state.take("session")?;
    body(&mut state)
}

/// Runs `body`, which may take long, with exclusive use of a session, and with the cancellation and progress of `call`.
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

/// Runs `body`, which is short unless eviction left many tokens to run. It can be cancelled and make callbacks only if `call` is not NULL.
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

/// Reads a session, also while another call uses it.
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
pub unsafe extern "C-unwind" fn NVFP4_session_options_init(
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
pub unsafe extern "C-unwind" fn NVFP4_generate_options_init(
    options: *mut NVFP4_GenerateOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_generate_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_GenerateOptions::defaults()) }
    })
}

/// Creates an empty session of a model. `options`: NULL for the defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_create(
    model: *const NVFP4_Model,
    options: *const NVFP4_SessionOptions,
    out: *mut *mut NVFP4_Session,
) -> NVFP4_Status {
    enter("NVFP4_session_create", || {
        // SAFETY: the pointers are as the header asks.
        let (out, options) = unsafe { (Out::new("out", out)?, self::options(options)?.read()?) };
        let model = handle::get::<Served>("model", model)?;
        out.set(insert(session::Session::new(model, &options)?));
        Ok(())
    })
}

/// Adds a reference to a session.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_retain(session: *mut NVFP4_Session) -> NVFP4_Status {
    enter("NVFP4_session_retain", || {
        handle::retain::<Session>("session", session)
    })
}

/// Gives up a reference to a session. After the last one the handle is stale; a call that is using the session is not
/// disturbed, and a generation that was submitted to a queue ends as #NVFP4_FINISH_CANCELLED.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_release(session: *mut NVFP4_Session) -> NVFP4_Status {
    enter_to_free("NVFP4_session_release", || {
        if let Some(object) = handle::give_up::<Session>("session", session)?
            && let Some(submitted) = &*lock(&object.submitted)
        {
            submitted.cancel();
        }
        Ok(())
    })
}

/// Appends tokens and runs them, many at a time: the prefill of a prompt.
///
/// - `call`: cancels the call and reports the tokens run; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_prefill(
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

/// Appends tokens and runs them one after the other, which is slower: for comparison. See REPRODUCIBILITY above.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_prefill_token_by_token(
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

/// Appends one token and runs it: a decode step. Tokens before it that have not been run yet are run too: the last token of
/// a generation, or those that remain after an eviction.
///
/// - `call`: as for NVFP4_session_prefill().
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_decode(
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

/// Copies the logits of the next token, one for each token id. Writes their number, the vocabulary size, to `count`; see
/// ARRAYS OUT above. Runs tokens that have not been run yet, as NVFP4_session_decode() does.
///
/// - `call`: as for NVFP4_session_prefill().
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_logits(
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

/// Chooses the next token as NVFP4_session_generate() would, without appending it. `options`: NULL for the argmax; options
/// on stops and lengths are ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_sample(
    session: *mut NVFP4_Session,
    options: *const NVFP4_GenerateOptions,
    token: *mut i32,
) -> NVFP4_Status {
    enter("NVFP4_session_sample", || {
        // SAFETY: the pointers are as the header asks.
        let (out, options) = unsafe { (Out::new("token", token)?, self::options(options)?) };
        options.check_no_grammar("NVFP4_session_sample()")?;
        let sampler = Sampler::new(&options.sampling()?)?;
        // SAFETY: as above.
        let adjustments = unsafe { options.adjustments(0) }?;
        let top = options.top_log_probabilities()?;
        let sample = |state: &mut State| {
            let mut sampler = sampler.after(state.session.appended());
            token_out(
                state
                    .session
                    .sample_adjusted(&mut sampler, &adjustments, top)?,
            )
        };
        // SAFETY: as above.
        out.set(unsafe { with_call(session, options.call, sample) }?);
        Ok(())
    })
}

/// Fills `options` as NVFP4_generate_options_init() does, and with the temperature, top_k, top_p, min_p and repetition
/// penalty that the model recommends in `generation_config.json` or in a GGUF file's metadata. What it does not recommend
/// has the default; with no recommendation at all that is the argmax. The model's own stop tokens need no option.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_generate_options(
    model: *const NVFP4_Model,
    options: *mut NVFP4_GenerateOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_model_generate_options", || {
        let sampling = handle::get::<Served>("model", model)?.sampling().clone();
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

/// The common part of generations and chat turns; `run` is one of them.
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
    let callback = callback.map(|c| unwinding!(fn(*mut c_void, *const NVFP4_TokenEvent) -> i32, c));
    let mut on_piece = |piece: Piece<'_>| match (callback, event_of(piece)) {
        (None, _) => ControlFlow::Continue(()),
        (Some(callback), Ok(event)) => {
            // SAFETY: the host's callback, called on its thread while its call runs.
            call::outside(|| answer(calling(|| unsafe { callback(user.0, &event) })))
        }
        (_, Err(e)) => {
            failed = Err(e);
            ControlFlow::Break(())
        }
    };
    let object = handle::get::<Session>("session", session)?;
    let mut state = object.state.take_long("session")?;
    let generate = || state.generate(|session| run(session, &options, &mut on_piece));
    // SAFETY: as above.
    unsafe { watched_throughout(call, generate) }?;
    failed?;
    if let Some(result) = result {
        result(state.result);
    }
    Ok(())
}

/// Generates tokens after those in the session, which must not be empty: prefill a prompt first. A cancelled generation
/// does not fail, whenever it is cancelled: it returns #NVFP4_OK with #NVFP4_FINISH_CANCELLED and keeps the tokens it has. One that fails
/// leaves the session as it was, except where its `logits_processor` has written what no token can be chosen from: then it keeps them too.
///
/// - `options`: NULL for the defaults.
/// - `callback`, `user`: receives the tokens and text; may be NULL. NVFP4_session_text() gives the text afterwards.
/// - `result`: how it ended, counts and times; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_generate(
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

/// Copies the text of the last generation, or in a chat the content of the last answer; empty before the first. An
/// incomplete character at its end is left out: if the next generation completes it, that text begins with it. For the
/// buffer see TEXT above.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_text(
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

/// Copies the result of the last generation; its `finish` is #NVFP4_FINISH_NONE before the first. Set `struct_size` before the call.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_result(
    session: *mut NVFP4_Session,
    result: *mut NVFP4_GenerationResult,
) -> NVFP4_Status {
    enter("NVFP4_session_result", || {
        // SAFETY: the pointer is as the header asks.
        let Some(out) = (unsafe { results(result) })? else {
            bail!(
                InvalidArgument,
                "result is NULL; pass where the result goes"
            );
        };
        out(with(session, |state| Ok(state.result))?);
        Ok(())
    })
}

/// Writes the number of tokens in the session; during a call, the number from before it.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_length(
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

/// Writes the number of tokens that eviction has dropped since the session was empty, because the context was full; during a call, the
/// number from before it. `evicted_tokens` of NVFP4_model_statistics() counts those of all sessions of a model, also during a call.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_evicted(
    session: *const NVFP4_Session,
    count: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_session_evicted", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("count", count) }?;
        out.set(look(
            session,
            |s| Ok(s.session.evicted()),
            |s| Ok(s.evicted),
        )?);
        Ok(())
    })
}

/// Writes the most tokens that the session can hold.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_context(
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

/// Writes the bytes of the session's KV cache, including those it shares with forks; during a call, the bytes from before
/// it.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_memory(
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

/// Copies the tokens in the session. Writes their number to `count`; see ARRAYS OUT above.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_tokens(
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

/// Drops the tokens from position `length` on. If the cut is inside an answer, the conversation then ends with the rest of
/// that answer, otherwise with the last whole answer before it. Draws continue from position `length`. With `length` 0 it
/// is NVFP4_session_reset().
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_truncate(
    session: *mut NVFP4_Session,
    length: usize,
) -> NVFP4_Status {
    enter("NVFP4_session_truncate", || {
        with(session, |state| state.session.truncate(length))
    })
}

/// Drops all tokens and the conversation. The options stay.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_reset(session: *mut NVFP4_Session) -> NVFP4_Status {
    enter("NVFP4_session_reset", || {
        with(session, |state| state.session.reset())
    })
}

/// Creates a second session in the same state. The two share the memory of their KV caches as far as neither writes to it.
///
/// A session that generates, in this thread's callback, in another thread or in a queue, is forked after its last token, and goes on: the
/// second session has the tokens so far, as if the generation had been cancelled then, and not what options of it, such as a grammar, know of
/// them. This waits for the end of a step that runs. #NVFP4_BUSY
/// if any other call uses the session, and while it runs a prompt or waits for memory or for its turn in a queue.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_fork(
    session: *mut NVFP4_Session,
    out: *mut *mut NVFP4_Session,
) -> NVFP4_Status {
    enter("NVFP4_session_fork", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        out.set(insert(fork(session)?));
        Ok(())
    })
}

/// Forks a session that nothing uses, or that generates. A generation that ends meanwhile uses it for a moment longer.
fn fork(handle: *const NVFP4_Session) -> Result<session::Session> {
    let until = Instant::now() + END_OF_CALL;
    loop {
        let object = handle::get::<Session>("session", handle)?;
        match object.state.take("session") {
            Err(e) if e.kind() == ErrorKind::Busy => {
                if let Some(fork) = object.forks.fork()? {
                    return Ok(fork);
                }
                if Instant::now() >= until {
                    return Err(e);
                }
            }
            state => return state?.session.fork(),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Writes the session to a file, including its KV cache and conversation. An existing file is replaced only when the new
/// one is complete.
///
/// - `call`: cancels the call and reports the bytes written; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_save(
    session: *mut NVFP4_Session,
    path: *const c_char,
    path_length: usize,
    call: *const NVFP4_CallOptions,
) -> NVFP4_Status {
    enter("NVFP4_session_save", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let path = arguments::path("path", path, path_length)?;
            with_long(session, call, |state| state.session.save(path))
        }
    })
}

/// Creates a session from a file of NVFP4_session_save(), in the state that was saved. `model` must be the model that ran
/// it, and the session's adapter, if it has one, must be loaded for it.
///
/// - `call`: cancels the call and reports the bytes read; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_restore(
    model: *const NVFP4_Model,
    path: *const c_char,
    path_length: usize,
    call: *const NVFP4_CallOptions,
    out: *mut *mut NVFP4_Session,
) -> NVFP4_Status {
    enter("NVFP4_session_restore", || {
        // SAFETY: the pointers are as the header asks.
        let (out, path) = unsafe {
            (
                Out::new("out", out)?,
                arguments::path("path", path, path_length)?,
            )
        };
        let model = handle::get::<Served>("model", model)?;
        let restore = || session::Session::restore(model, path);
        // SAFETY: as above.
        out.set(insert(unsafe { watched(call, restore) }?));
        Ok(())
    })
}

/// Copies the session to memory: the bytes of a file of NVFP4_session_save(). Writes their number to `length`; see ARRAYS OUT above.
/// They go into the buffer as they come: no second copy is held, and a call that fails may have written some.
///
/// - `call`: cancels the call and reports the bytes written; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_save_bytes(
    session: *mut NVFP4_Session,
    buffer: *mut u8,
    capacity: usize,
    length: *mut usize,
    call: *const NVFP4_CallOptions,
) -> NVFP4_Status {
    enter("NVFP4_session_save_bytes", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let length = Out::new("length", length)?;
            let room = match buffer.is_null() && capacity == 0 {
                true => None,
                false => Some(slice_mut("buffer", buffer, capacity)?),
            };
            with_long(session, call, |state| {
                let save = |size: u64| {
                    length.set(size as usize);
                    match room {
                        Some(room) if (room.len() as u64) < size => bail!(
                            BufferTooSmall,
                            "the buffer has room for {capacity}, and {size} are needed"
                        ),
                        room => Ok(room),
                    }
                };
                state.session.save_to(save).map(|_| ())
            })
        }
    })
}

/// Creates a session from bytes of NVFP4_session_save_bytes(), or those of a file of NVFP4_session_save(), in the state that was saved.
/// `model` must be the model that ran it, with the session's adapter, if it has one. The bytes are read during the call only.
///
/// - `call`: cancels the call and reports the bytes read; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_restore_bytes(
    model: *const NVFP4_Model,
    bytes: *const u8,
    length: usize,
    call: *const NVFP4_CallOptions,
    out: *mut *mut NVFP4_Session,
) -> NVFP4_Status {
    enter("NVFP4_session_restore_bytes", || {
        // SAFETY: the pointers are as the header asks.
        let (out, bytes) = unsafe { (Out::new("out", out)?, slice("bytes", bytes, length)?) };
        let model = handle::get::<Served>("model", model)?;
        let restore = || session::Session::restore_from(model, bytes);
        // SAFETY: as above.
        out.set(insert(unsafe { watched(call, restore) }?));
        Ok(())
    })
}

/// Gives the log-probabilities of continuations, each as if it stood alone after the tokens of the session, which keeps its tokens. With an
/// empty session they are whole texts, whose first token nothing predicts: begin them with the token that the model expects at the
/// beginning, as NVFP4_model_tokenize() does.
///
/// The continuations share the cache of the session's tokens, and up to 64 of them run together, in passes as long as those of a prompt. On a
/// GPU their logits stay on the device. On the CPU a result has the same bits alone and beside others.
///
/// - `continuations`, `lengths`: `count` arrays of tokens with their lengths. #NVFP4_CONTEXT_FULL if one does not fit after the session's
///   tokens; nothing is evicted.
/// - `call`: cancels the call and reports the tokens run; may be NULL.
/// - `log_probabilities`: receives the natural logarithm of each token's probability after the tokens before it, by the model's own logits:
///   one for each token of the first continuation, then those of the second, and so on. NaN for a token that no other stands before.
/// - `is_argmax`: receives 1 for each token that is the argmax, and 0 for others; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_score(
    session: *mut NVFP4_Session,
    continuations: *const *const i32,
    lengths: *const usize,
    count: usize,
    call: *const NVFP4_CallOptions,
    log_probabilities: *mut f32,
    is_argmax: *mut i32,
) -> NVFP4_Status {
    enter("NVFP4_session_score", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let continuations = ("continuations", continuations);
            let tokens = token_lists(continuations, ("lengths", lengths), count)?;
            let total = tokens.iter().map(Vec::len).sum();
            let out = slice_mut("log_probabilities", log_probabilities, total)?;
            let argmaxes = match is_argmax.is_null() {
                true => &mut [][..],
                false => slice_mut("is_argmax", is_argmax, total)?,
            };
            let views: Vec<&[u32]> = tokens.iter().map(Vec::as_slice).collect();
            let scores = with_long(session, call, |state| state.session.score(&views))?.concat();
            for (out, score) in out.iter_mut().zip(&scores) {
                *out = score.log_probability;
            }
            for (out, score) in argmaxes.iter_mut().zip(&scores) {
                *out = score.is_argmax.into();
            }
            Ok(())
        }
    })
}

/// Appends `tokens[i]` to `sessions[i]`, for `count` sessions, and runs them all in one pass over the weights, which takes
/// little longer than a decode step of one session. The sessions must be distinct and of the same model handle. A call that
/// fails leaves all of them unchanged.
///
/// Where only the next tokens are wanted, NVFP4_session_step_sample() is faster: this function copies the logits of every
/// session to the host.
///
/// - `call`: cancels the pass; may be NULL. Its progress callback is not called.
/// - `statuses`: may be NULL; then a session that cannot be run fails the call. Otherwise `count` elements, all written if
///   the other arguments are valid. A session whose handle is stale or in use, whose context is full, that is listed twice,
///   or whose token is not in the vocabulary gets its status and stays unchanged, and the others are run. The call then
///   returns #NVFP4_OK, with the message of the first such session in NVFP4_last_error(). The sessions that were run get
///   the status of the call.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_step(
    sessions: *const *mut NVFP4_Session,
    tokens: *const i32,
    count: usize,
    call: *const NVFP4_CallOptions,
    statuses: *mut NVFP4_Status,
) -> NVFP4_Status {
    enter("NVFP4_session_step", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let step = StepCall::new(sessions, tokens, count, statuses)?;
            let run = |sessions: &mut [&mut session::Session], tokens: &[u32], _: &[usize]| {
                Cancellation::read(call)?.watch(|| session::step(sessions, tokens))
            };
            step.run(|_| Ok(()), run).map(|_| ())
        }
    })
}

/// NVFP4_session_step() that also chooses the next token of each session, on the device of the model: on a GPU no logits
/// are copied to the host. `next[i]` is the token that NVFP4_session_sample() would choose, and is not appended: to
/// generate, pass it as the token of the next step, until a stop token or your length limit ends that sequence; a
/// detokenizer says when. Sequences may join and leave between any two steps. Keep the order of `sessions`: with the same
/// sessions, and `next` as their tokens, a GPU has already begun the next step when it is called.
///
/// - `options`: how to choose, `options[i]` for `sessions[i]`; options on stops and lengths are ignored. NULL, for one
///   session or for all, takes the argmax. Logits that biases, bad words or a processor change, and those whose
///   log-probabilities NVFP4_session_top_log_probabilities() is to give, are copied to the host. Several sessions may share one: draws depend on its seed and on the number of
///   tokens appended to each session. If `options[i]->call` is cancelled before the pass begins, that session is left out
///   with the status #NVFP4_CANCELLED; its progress callback is not called.
/// - `call`, `statuses`: as for NVFP4_session_step().
/// - `next`: `count` tokens, unchanged for sessions that were not run. May be the same array as `tokens`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_step_sample(
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
        let step = unsafe { StepCall::new(sessions, tokens, count, statuses) }?;
        if next.is_null() && count > 0 {
            bail!(InvalidArgument, "next is NULL");
        }
        let each = match options.is_null() {
            true => vec![std::ptr::null(); count],
            // SAFETY: as above.
            false => unsafe { slice("options", options, count) }?.to_vec(),
        };
        let each = each
            .iter()
            .enumerate()
            .map(|(i, &options)| {
                // SAFETY: as above.
                let read = || unsafe {
                    let options = self::options(options)?;
                    options.check_no_grammar("a step")?;
                    let sampling = options.sampling()?;
                    sampling.check()?;
                    Ok(StepArguments {
                        sampling,
                        adjustments: options.adjustments(i)?,
                        top_log_probabilities: options.top_log_probabilities()?,
                        cancellation: Cancellation::read(options.call)?,
                    })
                };
                read().map_err(|e: Error| e.within(format_args!("options[{i}]")))
            })
            .collect::<Result<Vec<StepArguments>>>()?;
        let goes_on = |i: usize| {
            if each[i].cancellation.is_set() {
                bail!(Cancelled, "options[{i}]: cancelled");
            }
            Ok(())
        };
        let run = |sessions: &mut [&mut session::Session], tokens: &[u32], places: &[usize]| {
            let choice = |(&i, session): (&usize, &&mut session::Session)| {
                let choice = each[i].choice();
                choice
                    .check(session.model().spec().vocab_size)
                    .map_err(|e| e.within(format_args!("options[{i}]")))?;
                Ok(choice)
            };
            let choices = places.iter().zip(&*sessions).map(choice);
            let choices = choices.collect::<Result<Vec<_>>>()?;
            // SAFETY: as above.
            unsafe { Cancellation::read(call) }?
                .watch(|| session::step_choose_with(sessions, tokens, &choices, true))
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

/// Copies log-probabilities of the last token that NVFP4_session_sample() or NVFP4_session_step_sample() chose for this session: first that
/// token with its own, then the most probable ones, among which it may be again. Writes their number to `count`: 1 +
/// `top_log_probabilities`, or 0 if the options of that call asked for none; see ARRAYS OUT above.
///
/// - `tokens`, `log_probabilities`: `capacity` elements each, or NULL for one that is not wanted.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_top_log_probabilities(
    session: *mut NVFP4_Session,
    tokens: *mut i32,
    log_probabilities: *mut f32,
    capacity: usize,
    count: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_session_top_log_probabilities", || {
        with(session, |state| {
            let (mut ids, mut values) = (Vec::new(), Vec::new());
            if let Some((token, known)) = state.session.choice() {
                ids = tokens_out(&[&[token], &known.top[..]].concat())?;
                values = [&[known.chosen], &known.top_log_probabilities[..]].concat();
            }
            // SAFETY: the pointers are as the header asks.
            unsafe {
                let room = |is_null: bool| if is_null { 0 } else { capacity };
                copy_items(&ids, tokens, room(tokens.is_null()), count)?;
                let room = room(log_probabilities.is_null());
                copy_items(&values, log_probabilities, room, count)
            }
        })
    })
}

/// The options of one session in a step.
struct StepArguments {
    sampling: SamplingOptions,
    adjustments: LogitAdjustments,
    top_log_probabilities: Option<usize>,
    cancellation: Cancellation,
}

impl StepArguments {
    fn choice(&self) -> StepChoice<'_> {
        StepChoice {
            sampling: &self.sampling,
            adjustments: &self.adjustments,
            top_log_probabilities: self.top_log_probabilities,
        }
    }
}

/// The arguments of a step of several sessions.
struct StepCall<'a> {
    handles: &'a [*mut NVFP4_Session],
    tokens: &'a [i32],
    /// The status of each session; NULL if the first one that cannot be run is to fail the call.
    statuses: *mut NVFP4_Status,
}

impl<'a> StepCall<'a> {
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
            Ok(StepCall {
                handles: slice("sessions", sessions, count)?,
                tokens: slice("tokens", tokens, count)?,
                statuses,
            })
        }
    }

    /// Runs `pass` with the valid sessions, their tokens and their indices in the call; does nothing if there are none. Leaves out sessions
    /// whose index `goes_on` refuses.
    ///
    /// # Safety
    /// As for [`StepCall::new`].
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
