//! Models: weights on disk, and weights, tokenizer and chat template in memory.
//!
//! A model is immutable. Any number of sessions, on any threads, may run it at once: their tokens go through the weights together, so that
//! threads that generate get the speed of NVFP4_session_step_sample().

use std::ffi::c_char;

use serde_json::json;

use super::arguments::{
    self, Element, Growing, Out, choice, copy_elements, copy_items, copy_text, elements, fill,
    flag, options, results, slice, text, with_lengths,
};
use super::call::{NVFP4_CallOptions, watched};
use super::guard::{self, enter, enter_to_free};
use super::handle::{self, Object};
use super::library::thread_count;
use super::linear::{NVFP4_ACTIVATIONS_EXACT, activations};
use super::pool::{NVFP4_Pool, Pool};
use super::quantize::NVFP4_QuantizeOptions;
use super::shared;
use super::status::NVFP4_Status;
use super::tensor::{
    NVFP4_DEVICE_AUTO, NVFP4_DEVICE_CPU, NVFP4_DEVICE_CUDA, check_only, device_of,
};
use crate::base::alloc::Budget;
use crate::base::error::{Result, bail, err};
use crate::base::memory::{Bytes, with_room};
use crate::checkpoint::Checkpoint;
use crate::engine::Served;
use crate::engine::capacity::{self, Plan, PlanOptions};
use crate::format::nvfp4::QuantizeOptions;
use crate::model::placement::{self, Requirements};
use crate::model::{Activations, Device, KvType, LoadOptions, PackedUse, Tuning, open};
use crate::text::{Message, SpecialToken, TokenRole};

/// A loaded model. See the model chapter.
pub struct NVFP4_Model {
    _private: [u8; 0],
}

impl Object for Served {
    type Handle = NVFP4_Model;
    const NAME: &'static str = "NVFP4_Model";
}

/// Cached keys and values in IEEE half precision.
pub const NVFP4_KV_FLOAT16: i32 = 0;
/// Cached keys and values in IEEE single precision: unrounded, in twice the memory. On the CPU alone.
pub const NVFP4_KV_FLOAT32: i32 = 1;
/// Cached keys and values as e4m3 codes of one byte, with a scale in single precision for each token and head: about half of the memory of
/// half precision. The largest magnitude of a key or value becomes 448, and an element is off by at most a sixteenth of itself, or by a
/// 1024th of the scale where that is more. On a GPU for models without sliding windows, soft caps and sinks whose heads have 32, 64 or 128
/// elements that all rotate; creating a session of another model there returns #NVFP4_UNSUPPORTED.
pub const NVFP4_KV_FLOAT8: i32 = 2;

/// The element type of keys and values with this number.
pub(super) fn kv_type(value: i32) -> Result<KvType> {
    let types = [
        (NVFP4_KV_FLOAT16, "float16", KvType::F16),
        (NVFP4_KV_FLOAT32, "float32", KvType::F32),
        (NVFP4_KV_FLOAT8, "float8", KvType::F8),
    ];
    choice("kv_type", value, &types)
}

/// The file of packed weights beside the model's own, which `nvfp4 quantize --packed` writes, if it is there. Processes that load the model on the
/// CPU share the memory of what it holds. A file that is damaged or of other weights is #NVFP4_CORRUPT_FILE. Not used on a GPU, nor for files
/// that are given in memory.
pub const NVFP4_PACKED_AUTO: i32 = 0;
/// No such file, whether it is there or not: each process packs weights into memory of its own.
pub const NVFP4_PACKED_OFF: i32 = 1;
/// That file, or an error.
pub const NVFP4_PACKED_REQUIRED: i32 = 2;

fn packed(value: i32) -> Result<PackedUse> {
    let uses = [
        (NVFP4_PACKED_AUTO, "auto", PackedUse::Auto),
        (NVFP4_PACKED_OFF, "off", PackedUse::Off),
        (NVFP4_PACKED_REQUIRED, "required", PackedUse::Required),
    ];
    choice("packed", value, &uses)
}

/// Prompts end soon: while other sessions generate, a prompt holds them up for 20 ms at a time, or for the time of three steps if that is longer.
/// On a Hopper GPU prompts of more than 2,048 tokens run beside steps, on four fifths of the multiprocessors, in working memory of their own.
pub const NVFP4_TUNING_THROUGHPUT: i32 = 0;
/// Prompts hold up other sessions as little as possible: on the CPU a pass with a part of one takes less than two steps. On a Hopper GPU prompts run
/// beside steps, on half of the multiprocessors, and take two to three times as long as alone; on others a pass has 128 rows, steps and part
/// together, and a long prompt takes up to five times as long.
pub const NVFP4_TUNING_LATENCY: i32 = 1;

fn tuning(value: i32) -> Result<Tuning> {
    let tunings = [
        (NVFP4_TUNING_THROUGHPUT, "throughput", Tuning::Throughput),
        (NVFP4_TUNING_LATENCY, "latency", Tuning::Latency),
    ];
    choice("tuning", value, &tunings)
}

/// How to load a model. Fill with NVFP4_load_options_init(), then change what is to differ.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_LoadOptions {
    /// sizeof(NVFP4_LoadOptions) as the caller knows it.
    pub struct_size: u32,
    /// One of NVFP4_DEVICE_*. #NVFP4_DEVICE_AUTO is a GPU that has room for the model and supports it, or else the CPU. If
    /// loading on that GPU fails for lack of memory or kernels, it starts again on the CPU. Default: CPU.
    pub device_type: i32,
    /// The number of the device of that type; 0 (or -1) for #NVFP4_DEVICE_AUTO. Default: 0.
    pub device_index: i32,
    /// CPU threads of this model, or 0 for those of NVFP4_set_threads(), which models share. Ignored on a GPU. Default: 0.
    pub threads: i32,
    /// One of NVFP4_ACTIVATIONS_*; on a GPU only #NVFP4_ACTIVATIONS_EXACT. Default: exact.
    pub activations: i32,
    /// 1 to load only tokenizer, embedding, final norm and output head, without the layers. Default: 0.
    pub sampling_only: i32,
    /// Cancels the call and reports the bytes read; NULL for neither. Default: NULL.
    pub call: *const NVFP4_CallOptions,
    /// Bytes for the keys and values of all sessions together, reserved when the model is loaded; a session that needs more
    /// gets #NVFP4_OUT_OF_MEMORY. 0 reserves nothing: memory is allocated as sessions grow, and is left to others until
    /// then. Default: 0.
    pub kv_bytes: u64,
    /// 1 if sessions that begin with the same tokens share the keys, values and recurrent states of these, whichever of them
    /// ran them first; 0 if only forks share. On the CPU this changes no result; on a GPU it changes logits by rounding, as
    /// any other division of a prompt does, unless `deterministic` is 1. Default: 1.
    pub prefix_cache: i32,
    /// 1 if the logits of a session are to have the same bits whatever runs beside it, however its prompt is divided, and
    /// whether its tokens were run, found in the prefix cache, or run again after memory was short. Always so on the CPU, where
    /// this is not read. On a GPU every row of a pass takes the same sums in the same order, by kernels that are slower for
    /// prompts above all: docs/performance.md has figures. Other GPUs, drivers and versions of this library give other bits.
    /// Default: 0.
    pub deterministic: i32,
    /// Bytes of keys, values and states that are kept after the last session that used them, for later sessions that begin
    /// with the same tokens: those used least recently give way first, and all of them as soon as a session needs memory.
    /// With 0 sessions share only while they live, which takes no memory. Not read with `kv_bytes`: then all that is reserved
    /// and that no session uses keeps such blocks. Default: 0.
    pub prefix_bytes: u64,
    /// Threads of the host that work for the model on the CPU, in place of the library's: a handle of NVFP4_pool_create(), or NULL for none.
    /// Not together with `threads`. Ignored on a GPU. Default: NULL.
    pub pool: *const NVFP4_Pool,
    /// 1 to lock the weights in host memory (mlock), so that the system never pages them out and no token waits for them.
    /// #NVFP4_OUT_OF_MEMORY, with the bytes wanted and the limit, if the system refuses: RLIMIT_MEMLOCK (ulimit -l) must allow
    /// for them; nothing stays locked then. Tables of embeddings that stay in their file are not locked. Without effect on a
    /// GPU, whose memory is never paged out. Default: 0.
    pub mlock: i32,
    /// One of NVFP4_PACKED_*: whether weights on the CPU are mapped from the file of packed weights beside the model's own, which processes
    /// share. Default: #NVFP4_PACKED_AUTO.
    pub packed: i32,
    /// One of NVFP4_TUNING_*: the goal of passes with prompts while other sessions generate. Default: #NVFP4_TUNING_THROUGHPUT.
    pub tuning: i32,
    /// Most tokens of prompts in such a pass, at least up to the next multiple of 16 of the session's positions; or 0 for as many as `tuning`
    /// allows by the times of passes, which are measured while the model runs. Default: 0.
    pub prompt_tokens: u32,
}

// SAFETY: integers and pointers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_LoadOptions {
    const NAME: &'static str = "NVFP4_LoadOptions";
    const EARLIER: &'static [usize] = &[40, 56];
    fn defaults() -> Self {
        NVFP4_LoadOptions {
            struct_size: size_of::<Self>() as u32,
            device_type: NVFP4_DEVICE_CPU,
            device_index: 0,
            threads: 0,
            activations: NVFP4_ACTIVATIONS_EXACT,
            sampling_only: 0,
            call: std::ptr::null(),
            kv_bytes: 0,
            prefix_cache: 1,
            deterministic: 0,
            prefix_bytes: 0,
            pool: std::ptr::null(),
            mlock: 0,
            packed: NVFP4_PACKED_AUTO,
            tuning: NVFP4_TUNING_THROUGHPUT,
            prompt_tokens: 0,
        }
    }
}

/// The work of a model since it was loaded, and what it holds now. Set `struct_size` before NVFP4_model_statistics().
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_ModelStatistics {
    /// sizeof(NVFP4_ModelStatistics) as the caller knows it.
    pub struct_size: u32,
    /// Reserved; 0.
    pub reserved: i32,
    /// Passes over the weights.
    pub passes: u64,
    /// Requests in them, counted once for each pass: requests / passes callers shared a pass on average.
    pub requests: u64,
    /// Tokens of prompts, run or found: those of requests for more than one token of a session, other than verifications of
    /// drafted tokens.
    pub prompt_tokens: u64,
    /// Prompt tokens that did not run, because the prefix cache had their keys and values.
    pub prompt_tokens_found: u64,
    /// Tokens that ran one at a time, and drafted tokens that were right.
    pub step_tokens: u64,
    /// Sessions that generate now.
    pub generating: u64,
    /// Calls that wait now for a pass to begin.
    pub waiting: u64,
    /// Blocks of keys, values and recurrent states that sessions hold now, each counted once however many share it.
    pub blocks_used: u64,
    /// Their bytes.
    pub used_bytes: u64,
    /// Blocks that the prefix cache alone holds now.
    pub blocks_cached: u64,
    /// Their bytes.
    pub cached_bytes: u64,
    /// Blocks that the prefix cache alone held, and gave up because memory was needed or its limit was reached.
    pub blocks_evicted: u64,
    /// Bytes reserved by `kv_bytes` of NVFP4_LoadOptions.
    pub reserved_bytes: u64,
    /// Reserved bytes that neither sessions nor the prefix cache take. On a GPU the blocks that padding rows of passes write to, taken once
    /// for each KV type in use, are in none of `used_bytes`, `cached_bytes` and `free_bytes`.
    pub free_bytes: u64,
    /// Generations that found no block in what is reserved, gave theirs up to the others, waited and ran their tokens again.
    pub preemptions: u64,
    /// Tokens of sessions that ran again, or were found, because a step of the trainer had changed the weights: see NVFP4_trainer_model().
    /// They count as prompt tokens too.
    pub recomputed_tokens: u64,
    /// Tokens that eviction has dropped, because the contexts of sessions were full; also in calls that have failed since and were undone.
    pub evicted_tokens: u64,
}

// SAFETY: integers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_ModelStatistics {
    const NAME: &'static str = "NVFP4_ModelStatistics";
    const EARLIER: &'static [usize] = &[128, 136];
    fn defaults() -> Self {
        NVFP4_ModelStatistics {
            struct_size: size_of::<Self>() as u32,
            reserved: 0,
            passes: 0,
            requests: 0,
            prompt_tokens: 0,
            prompt_tokens_found: 0,
            step_tokens: 0,
            generating: 0,
            waiting: 0,
            blocks_used: 0,
            used_bytes: 0,
            blocks_cached: 0,
            cached_bytes: 0,
            blocks_evicted: 0,
            reserved_bytes: 0,
            free_bytes: 0,
            preemptions: 0,
            recomputed_tokens: 0,
            evicted_tokens: 0,
        }
    }
}

/// A message of a conversation. Later versions may add fields at the end: functions that take an array of these also take
/// the size of an element.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_Message {
    /// The role: "system", "user" or "assistant", in UTF-8.
    pub role: *const c_char,
    /// Bytes of `role`.
    pub role_length: usize,
    /// The text, in UTF-8.
    pub content: *const c_char,
    /// Bytes of `content`.
    pub content_length: usize,
}

// SAFETY: pointers and sizes without padding.
unsafe impl Element for NVFP4_Message {
    const NAME: &'static str = "NVFP4_Message";
    fn defaults() -> Self {
        NVFP4_Message {
            role: std::ptr::null(),
            role_length: 0,
            content: std::ptr::null(),
            content_length: 0,
        }
    }
}

/// It begins a text, as the model's files say: BOS.
pub const NVFP4_TOKEN_ROLE_BEGINS_TEXT: i32 = 0x1;
/// It ends a text: EOS.
pub const NVFP4_TOKEN_ROLE_ENDS_TEXT: i32 = 0x2;
/// NVFP4_model_tokenize() with `add_special` adds it before or after a text.
pub const NVFP4_TOKEN_ROLE_ADDED: i32 = 0x4;
/// It ends a generation, unless `ignore_model_stops` is set: a stop token of the model.
pub const NVFP4_TOKEN_ROLE_ENDS_GENERATION: i32 = 0x8;
/// It fills rows of a batch in training: padding.
pub const NVFP4_TOKEN_ROLE_PADDING: i32 = 0x10;
/// It stands for text that the vocabulary cannot spell.
pub const NVFP4_TOKEN_ROLE_UNKNOWN: i32 = 0x20;
/// It stands between two texts: SEP.
pub const NVFP4_TOKEN_ROLE_SEPARATOR: i32 = 0x40;
/// It stands for a whole text in classification: CLS.
pub const NVFP4_TOKEN_ROLE_CLASSIFICATION: i32 = 0x80;
/// It stands for a token that is to be guessed: MASK.
pub const NVFP4_TOKEN_ROLE_MASK: i32 = 0x100;
/// It begins the reasoning of an answer.
pub const NVFP4_TOKEN_ROLE_BEGINS_REASONING: i32 = 0x200;
/// It ends the reasoning of an answer.
pub const NVFP4_TOKEN_ROLE_ENDS_REASONING: i32 = 0x400;
/// It begins a tool call, or several.
pub const NVFP4_TOKEN_ROLE_BEGINS_TOOL_CALL: i32 = 0x800;
/// It ends a tool call, or several.
pub const NVFP4_TOKEN_ROLE_ENDS_TOOL_CALL: i32 = 0x1000;
/// It begins a turn of a conversation: the first special token that the chat template writes for a message.
pub const NVFP4_TOKEN_ROLE_BEGINS_TURN: i32 = 0x2000;
/// It ends an answer: the chat template writes it after one, or it is known by its name.
pub const NVFP4_TOKEN_ROLE_ENDS_TURN: i32 = 0x4000;

/// A special token, or another one with a role. Later versions may add fields at the end: functions that take an array of these also take
/// the size of an element.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_SpecialToken {
    /// The id.
    pub token: i32,
    /// The sum of its NVFP4_TOKEN_ROLE_*; 0 if none is known.
    pub roles: i32,
    /// Its name, the bytes that NVFP4_model_token_bytes() gives, without a NUL after them. Valid as long as the model has a reference.
    pub name: *const c_char,
    /// Bytes of `name`.
    pub name_length: usize,
}

// SAFETY: integers, a pointer and a size without padding.
unsafe impl Element for NVFP4_SpecialToken {
    const NAME: &'static str = "NVFP4_SpecialToken";
    fn defaults() -> Self {
        NVFP4_SpecialToken {
            token: 0,
            roles: 0,
            name: std::ptr::null(),
            name_length: 0,
        }
    }
}

fn role_number(role: TokenRole) -> i32 {
    match role {
        TokenRole::BeginsText => NVFP4_TOKEN_ROLE_BEGINS_TEXT,
        TokenRole::EndsText => NVFP4_TOKEN_ROLE_ENDS_TEXT,
        TokenRole::Added => NVFP4_TOKEN_ROLE_ADDED,
        TokenRole::EndsGeneration => NVFP4_TOKEN_ROLE_ENDS_GENERATION,
        TokenRole::Padding => NVFP4_TOKEN_ROLE_PADDING,
        TokenRole::Unknown => NVFP4_TOKEN_ROLE_UNKNOWN,
        TokenRole::Separator => NVFP4_TOKEN_ROLE_SEPARATOR,
        TokenRole::Classification => NVFP4_TOKEN_ROLE_CLASSIFICATION,
        TokenRole::Mask => NVFP4_TOKEN_ROLE_MASK,
        TokenRole::BeginsReasoning => NVFP4_TOKEN_ROLE_BEGINS_REASONING,
        TokenRole::EndsReasoning => NVFP4_TOKEN_ROLE_ENDS_REASONING,
        TokenRole::BeginsToolCall => NVFP4_TOKEN_ROLE_BEGINS_TOOL_CALL,
        TokenRole::EndsToolCall => NVFP4_TOKEN_ROLE_ENDS_TOOL_CALL,
        TokenRole::BeginsTurn => NVFP4_TOKEN_ROLE_BEGINS_TURN,
        TokenRole::EndsTurn => NVFP4_TOKEN_ROLE_ENDS_TURN,
    }
}

/// Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_LoadOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_load_options_init(
    options: *mut NVFP4_LoadOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_load_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_LoadOptions::defaults()) }
    })
}

/// Loads a model: a directory, or a `.safetensors`, `.dat` or `.gguf` file.
///
/// - `path`, `path_length`: see TEXT above.
/// - `options`: NULL for the defaults.
/// - `quantize`: how to quantize dense weights to NVFP4 while loading; NULL keeps weights as they are stored.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_load(
    path: *const c_char,
    path_length: usize,
    options: *const NVFP4_LoadOptions,
    quantize: *const NVFP4_QuantizeOptions,
    out: *mut *mut NVFP4_Model,
) -> NVFP4_Status {
    enter("NVFP4_model_load", || {
        // SAFETY: the pointers are as the header asks.
        let (out, path, options, quantize) = unsafe {
            (
                Out::new("out", out)?,
                arguments::path("path", path, path_length)?,
                self::options(options)?,
                quantizing(quantize)?,
            )
        };
        let wanted = Wanted::read(&options, quantize)?;
        let load = || wanted.on_device(|| open(path), KvType::F16, |to| Served::load(path, to));
        // SAFETY: as above.
        let model = unsafe { watched(options.call, load) }?;
        tracing::debug!(?path, "loaded {model:?}");
        out.set(handle::insert(model));
        Ok(())
    })
}

/// How to quantize while loading; NULL does not.
///
/// # Safety
/// As for [`options`].
pub(super) unsafe fn quantizing(
    quantize: *const NVFP4_QuantizeOptions,
) -> Result<Option<QuantizeOptions>> {
    if quantize.is_null() {
        return Ok(None);
    }
    // SAFETY: promised by the caller.
    let quantize = unsafe { options(quantize) }?;
    quantize.read_for_model().map(Some)
}

/// The CPU that a model is loaded on, unless it is on a GPU.
enum Cpus {
    /// With so many threads of the library, or the shared one.
    Own(Option<usize>),
    /// On threads of the host.
    Host(Device),
}

impl Cpus {
    fn read(options: &NVFP4_LoadOptions) -> Result<Cpus> {
        let threads = thread_count(options.threads)?;
        if options.pool.is_null() {
            return Ok(Cpus::Own(threads));
        }
        let pool = handle::get::<Pool>("pool", options.pool)?;
        match threads {
            None => Ok(Cpus::Host(pool.device.clone())),
            Some(threads) => bail!(
                InvalidArgument,
                "threads is {threads}, and pool has a number of its own; leave threads 0"
            ),
        }
    }

    fn device(&self) -> Result<Device> {
        match self {
            Cpus::Own(threads) => shared::cpu(*threads),
            Cpus::Host(device) => Ok(device.clone()),
        }
    }
}

/// Checked options of loading a model.
pub(super) struct Wanted {
    device_type: i32,
    device_index: i32,
    cpu: Cpus,
    activations: Activations,
    sampling_only: bool,
    kv_bytes: Option<usize>,
    prefix_cache: bool,
    prefix_bytes: usize,
    deterministic: bool,
    mlock: bool,
    packed: PackedUse,
    tuning: Tuning,
    prompt_tokens: Option<usize>,
    quantize: Option<QuantizeOptions>,
}

impl Wanted {
    pub(super) fn read(
        options: &NVFP4_LoadOptions,
        quantize: Option<QuantizeOptions>,
    ) -> Result<Wanted> {
        let kv_bytes = bytes("kv_bytes", options.kv_bytes)?;
        Ok(Wanted {
            device_type: options.device_type,
            device_index: options.device_index,
            cpu: Cpus::read(options)?,
            activations: activations(options.activations)?,
            sampling_only: flag("sampling_only", options.sampling_only)?,
            kv_bytes: (kv_bytes > 0).then_some(kv_bytes),
            prefix_cache: flag("prefix_cache", options.prefix_cache)?,
            prefix_bytes: bytes("prefix_bytes", options.prefix_bytes)?,
            deterministic: flag("deterministic", options.deterministic)?,
            mlock: flag("mlock", options.mlock)?,
            packed: packed(options.packed)?,
            tuning: tuning(options.tuning)?,
            prompt_tokens: (options.prompt_tokens > 0).then_some(options.prompt_tokens as usize),
            quantize,
        })
    }

    /// Calls `use_on` with the device that is named or chosen for the model that `open` opens, whose sessions have keys and values of type
    /// `kv`.
    pub(super) fn on_device<T>(
        &self,
        open: impl FnOnce() -> Result<Box<dyn Checkpoint>>,
        kv: KvType,
        use_on: impl Fn(&LoadOptions) -> Result<T>,
    ) -> Result<T> {
        let on = |device: Device, device_choice: Option<String>| {
            use_on(&LoadOptions {
                device,
                device_choice,
                quantize: self.quantize.clone(),
                activations: self.activations,
                kv_bytes: self.kv_bytes,
                prefix_cache: self.prefix_cache,
                prefix_bytes: self.prefix_bytes,
                deterministic: self.deterministic,
                sampling_only: self.sampling_only,
                mlock: self.mlock,
                packed: self.packed,
                tuning: self.tuning,
                prompt_tokens: self.prompt_tokens,
            })
        };
        if self.device_type != NVFP4_DEVICE_AUTO {
            let device = device_of(self.device_type, self.device_index, || self.cpu.device())?;
            return on(device, None);
        }
        check_only("the library's choice", self.device_index)?;
        let requirements = Requirements {
            quantize: self.quantize.is_some(),
            sampling_only: self.sampling_only,
            activations: self.activations,
            kv,
            kv_bytes: self.kv_bytes,
        };
        placement::load(
            || Ok(vec![open()?]),
            &requirements,
            || self.cpu.device(),
            |placement| tracing::info!("{placement}"),
            |device, placement| on(device.clone(), Some(placement.to_string())),
        )
    }
}

/// A number of bytes from C.
fn bytes(name: &str, bytes: u64) -> Result<usize> {
    usize::try_from(bytes)
        .map_err(|_| err!(InvalidArgument, "{name} is {bytes}, more than addresses"))
}

/// Options of NVFP4_model_plan(). Fill with NVFP4_plan_options_init(), then change what is to differ.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_PlanOptions {
    /// sizeof(NVFP4_PlanOptions) as the caller knows it.
    pub struct_size: u32,
    /// One of NVFP4_KV_*: the type of the sessions' keys and values. Default: half precision.
    pub kv_type: i32,
    /// Sessions that take steps together, at least 1. Default: 1.
    pub sequences: usize,
    /// Tokens that each session comes to, at most those that the model was made for; 0 for these. Default: 0.
    pub context: usize,
    /// Bytes of the device's memory in which model and sessions are to fit; 0 for what is free on the device. Default: 0.
    pub budget_bytes: u64,
}

// SAFETY: integers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_PlanOptions {
    const NAME: &'static str = "NVFP4_PlanOptions";
    fn defaults() -> Self {
        NVFP4_PlanOptions {
            struct_size: size_of::<Self>() as u32,
            kv_type: NVFP4_KV_FLOAT16,
            sequences: 1,
            context: 0,
            budget_bytes: 0,
        }
    }
}

impl NVFP4_PlanOptions {
    fn read(&self) -> Result<PlanOptions> {
        Ok(PlanOptions {
            sequences: self.sequences,
            context: (self.context > 0).then_some(self.context),
            kv: kv_type(self.kv_type)?,
            budget: (self.budget_bytes > 0).then_some(self.budget_bytes),
        })
    }
}

/// The memory of a model and its sessions, in bytes. Numbers named `host` count host memory that a model on a GPU takes beside that of the
/// GPU, and are 0 on the CPU; the others count the memory of the device, which is host memory for the CPU. The driver, its libraries,
/// compiled kernels, tokenizers, texts and logits are not counted, as in NVFP4_memory_stats().
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_Plan {
    /// sizeof(NVFP4_Plan) as the caller knows it. Set it before the call.
    pub struct_size: u32,
    /// The device of the plan: #NVFP4_DEVICE_CPU or #NVFP4_DEVICE_CUDA.
    pub device_type: i32,
    /// Its number.
    pub device_index: i32,
    /// 0.
    pub reserved: i32,
    /// Tokens of a session, as asked for.
    pub context: u64,
    /// Weights as they are held: what NVFP4_memory_stats() says of #NVFP4_MEMORY_WEIGHTS on the CPU and of
    /// #NVFP4_MEMORY_DEVICE_WEIGHTS on a GPU once the model is loaded.
    pub weight_bytes: u64,
    /// Tables in page-locked memory, of which a token reads one row.
    pub weight_host_bytes: u64,
    /// Weights and working memory while the model is loaded, at most.
    pub peak_load_bytes: u64,
    /// As above, in host memory.
    pub peak_load_host_bytes: u64,
    /// Working memory of steps alone, without prompts.
    pub step_workspace_bytes: u64,
    /// Working memory of steps and of the longest passes of prompts. On the CPU each session that runs a prompt itself keeps its own.
    pub workspace_bytes: u64,
    /// Page-locked working memory, without the buffers through which the library copies.
    pub workspace_host_bytes: u64,
    /// Most bytes of recorded steps, on the GPU and on the host together; 0 on the CPU. Only the driver knows the exact number.
    pub graph_bytes_bound: u64,
    /// Keys and values of a token.
    pub kv_bytes_per_token: u64,
    /// A block of keys and values, of all groups of layers together.
    pub kv_block_bytes: u64,
    /// Tokens of a block.
    pub kv_block_positions: u64,
    /// A recurrent state; 0 without recurrent layers.
    pub state_bytes: u64,
    /// Blocks of a session of `context` tokens, its recurrent states included. Layers with a window free what it has passed.
    pub kv_bytes_per_sequence: u64,
    /// The recurrent states among these blocks: that of the end, and those of earlier positions that a session keeps.
    pub state_bytes_per_sequence: u64,
    /// Blocks of all sessions: as `kv_bytes` of NVFP4_LoadOptions, room for each to come to `context` tokens.
    pub kv_bytes: u64,
    /// Bytes that are free on the device, or `budget_bytes`; UINT64_MAX if the system does not say.
    pub free_bytes: u64,
    /// Sessions of `context` tokens that fit there beside the model, and in `kv_bytes` of NVFP4_LoadOptions and the budget of
    /// NVFP4_memory_set_budget() where these are set; UINT64_MAX if nothing limits them.
    pub sequences_that_fit: u64,
    /// Weights that are mapped from a file of packed weights, which processes share: what NVFP4_memory_stats() says of
    /// #NVFP4_MEMORY_MAPPED once the model is loaded, but for the file's names and sums. Not in `weight_bytes`, and not in
    /// `peak_load_bytes`.
    pub mapped_bytes: u64,
}

// SAFETY: integers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_Plan {
    const NAME: &'static str = "NVFP4_Plan";
    const EARLIER: &'static [usize] = &[160];
    fn defaults() -> Self {
        NVFP4_Plan {
            struct_size: size_of::<Self>() as u32,
            device_type: NVFP4_DEVICE_CPU,
            device_index: 0,
            reserved: 0,
            context: 0,
            weight_bytes: 0,
            weight_host_bytes: 0,
            peak_load_bytes: 0,
            peak_load_host_bytes: 0,
            step_workspace_bytes: 0,
            workspace_bytes: 0,
            workspace_host_bytes: 0,
            graph_bytes_bound: 0,
            kv_bytes_per_token: 0,
            kv_block_bytes: 0,
            kv_block_positions: 0,
            state_bytes: 0,
            kv_bytes_per_sequence: 0,
            state_bytes_per_sequence: 0,
            kv_bytes: 0,
            free_bytes: 0,
            sequences_that_fit: 0,
            mapped_bytes: 0,
        }
    }
}

impl NVFP4_Plan {
    fn of(plan: &Plan, device: &Device) -> NVFP4_Plan {
        let (device_type, device_index) = match device {
            Device::Cuda(gpu) => (NVFP4_DEVICE_CUDA, gpu.ordinal() as i32),
            _ => (NVFP4_DEVICE_CPU, 0),
        };
        // Memory of the device, and of the host beside it.
        let places = |bytes: Bytes| match device.is_cuda() {
            true => (bytes.device, bytes.host),
            false => (bytes.host, 0),
        };
        let (weight_bytes, weight_host_bytes) = places(plan.weights);
        let (peak_load_bytes, peak_load_host_bytes) = places(plan.load_peak);
        let (workspace_bytes, workspace_host_bytes) = places(plan.workspace);
        let (step_workspace_bytes, _) = places(plan.step_workspace);
        NVFP4_Plan {
            device_type,
            device_index,
            context: plan.context as u64,
            weight_bytes,
            weight_host_bytes,
            peak_load_bytes,
            peak_load_host_bytes,
            step_workspace_bytes,
            workspace_bytes,
            workspace_host_bytes,
            graph_bytes_bound: plan.graph_bytes_bound,
            kv_bytes_per_token: plan.kv_bytes_per_token,
            kv_block_bytes: plan.blocks.block_bytes(),
            kv_block_positions: plan.blocks.block_positions() as u64,
            state_bytes: plan.blocks.state_bytes,
            kv_bytes_per_sequence: plan.sequence_bytes,
            state_bytes_per_sequence: plan.sequence_state_bytes,
            kv_bytes: plan.kv_bytes,
            free_bytes: plan.free_bytes.unwrap_or(u64::MAX),
            sequences_that_fit: plan.sequences_that_fit.unwrap_or(u64::MAX),
            mapped_bytes: plan.mapped_bytes,
            ..NVFP4_Plan::defaults()
        }
    }
}

/// Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_PlanOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_plan_options_init(
    options: *mut NVFP4_PlanOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_plan_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_PlanOptions::defaults()) }
    })
}

/// Says what a model and its sessions take of memory, without loading it: reads the headers of its files, and takes milliseconds
/// however large it is. Weights and blocks are exact; working memory is that of the largest passes, to which it grows as they come.
/// Any number of threads may call it at once. Errors are those of NVFP4_model_load() for what no device can run, for options that do
/// not go together, and for a device that is not there; tensors and tokenizer are not read, so their faults are not found.
///
/// - `path`, `path_length`: see TEXT above.
/// - `load`, `quantize`: as NVFP4_model_load() will have them; NULL for the defaults, and for weights as they are stored. With
///   #NVFP4_DEVICE_AUTO the plan is that of the device that it would choose now. `call` is ignored.
/// - `options`: NULL for the defaults.
/// - `out`: the plan; its `struct_size` says how much of it the caller knows.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_plan(
    path: *const c_char,
    path_length: usize,
    load: *const NVFP4_LoadOptions,
    quantize: *const NVFP4_QuantizeOptions,
    options: *const NVFP4_PlanOptions,
    out: *mut NVFP4_Plan,
) -> NVFP4_Status {
    enter("NVFP4_model_plan", || {
        // SAFETY: the pointers are as the header asks.
        let (out, path, load, quantize, options) = unsafe {
            (
                results(out)?,
                arguments::path("path", path, path_length)?,
                self::options(load)?,
                quantizing(quantize)?,
                self::options(options)?.read()?,
            )
        };
        let Some(out) = out else {
            bail!(InvalidArgument, "out is NULL; pass where the plan goes");
        };
        let wanted = Wanted::read(&load, quantize)?;
        let plan = wanted.on_device(
            || open(path),
            options.kv,
            |load| {
                let plan = capacity::plan(path, load, &options)?;
                Ok(NVFP4_Plan::of(&plan, &load.device))
            },
        )?;
        out(plan);
        Ok(())
    })
}

/// Adds a reference to a model.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_retain(model: *mut NVFP4_Model) -> NVFP4_Status {
    enter("NVFP4_model_retain", || {
        handle::retain::<Served>("model", model)
    })
}

/// Gives up a reference to a model. After the last one the handle is stale; sessions keep the weights.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_release(model: *mut NVFP4_Model) -> NVFP4_Status {
    enter_to_free("NVFP4_model_release", || {
        handle::release::<Served>("model", model)
    })
}

/// Describes a model, as JSON: architecture, device, device_choice (one line that says why this device, for
/// #NVFP4_DEVICE_AUTO; else null), parameters (their number), weight_bytes, formats, sizes, kv_bytes_per_token,
/// stop_tokens. Later versions may add keys.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_info(
    model: *const NVFP4_Model,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_model_info", || {
        let model = handle::get::<Served>("model", model)?;
        let mut info = serde_json::to_value(model.describe())
            .map_err(|e| err!(Internal, "the model's description: {e}"))?;
        info["stop_tokens"] = json!(model.stop_tokens());
        // SAFETY: the pointers are as the header asks.
        unsafe { copy_text(&info.to_string(), buffer, capacity, length) }
    })
}

/// Writes what a model has run since it was loaded, and what it holds now. From any thread at any time, in callbacks too, and without waiting
/// for a pass.
///
/// - `out`: `struct_size` must be set; the caller owns it.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_statistics(
    model: *const NVFP4_Model,
    out: *mut NVFP4_ModelStatistics,
) -> NVFP4_Status {
    enter("NVFP4_model_statistics", || {
        // SAFETY: the pointer is as the header asks.
        let Some(fill) = (unsafe { results(out) })? else {
            bail!(InvalidArgument, "out is NULL; pass where the statistics go");
        };
        let now = handle::get::<Served>("model", model)?.statistics();
        fill(NVFP4_ModelStatistics {
            passes: now.passes,
            requests: now.requests,
            prompt_tokens: now.prompt_tokens,
            prompt_tokens_found: now.prompt_tokens_found,
            step_tokens: now.step_tokens,
            generating: now.generating as u64,
            waiting: now.waiting as u64,
            blocks_used: now.blocks.blocks_used as u64,
            used_bytes: now.blocks.used_bytes as u64,
            blocks_cached: now.blocks.blocks_cached as u64,
            cached_bytes: now.blocks.cached_bytes as u64,
            blocks_evicted: now.blocks.blocks_evicted,
            reserved_bytes: now.reserved_bytes as u64,
            free_bytes: now.free_bytes as u64,
            preemptions: now.preemptions,
            recomputed_tokens: now.recomputed_tokens,
            evicted_tokens: now.evicted_tokens,
            ..NVFP4_ModelStatistics::defaults()
        });
        Ok(())
    })
}

/// Writes the prefix cache to a file: the keys, values and recurrent states of the blocks of tokens that sessions share, with these tokens,
/// whether sessions use them or the cache alone holds them. NVFP4_model_restore_prefixes() gives them to a later process. An existing file
/// is replaced only when the new one is complete; a call that fails leaves no file, and no cached block is lost. From any thread at any
/// time: sessions run meanwhile, and what gives way to them before it is read is not in the file.
///
/// #NVFP4_INVALID_ARGUMENT for a model that was loaded with `prefix_cache` 0; #NVFP4_IO if the file cannot be written.
///
/// - `path`, `path_length`: see TEXT above.
/// - `call`: cancels the call and reports the bytes written; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_save_prefixes(
    model: *const NVFP4_Model,
    path: *const c_char,
    path_length: usize,
    call: *const NVFP4_CallOptions,
) -> NVFP4_Status {
    enter("NVFP4_model_save_prefixes", || {
        // SAFETY: the pointer is as the header asks.
        let path = unsafe { arguments::path("path", path, path_length) }?;
        let model = handle::get::<Served>("model", model)?;
        // SAFETY: as above.
        let counts = unsafe { watched(call, || model.save_prefixes(path)) }?;
        tracing::debug!(?path, ?counts, "saved prefixes");
        Ok(())
    })
}

/// Fills free memory of the prefix cache with a file of NVFP4_model_save_prefixes(), so that sessions that begin with its tokens run only the
/// rest, as in the process that saved it. The file may come from another device. If there is not room for all of it, what was used last is
/// restored; nothing gives way to it, and what is there already stays. `blocks_cached` of NVFP4_model_statistics() says what the cache
/// holds. From any thread at any time: sessions run meanwhile, and begin with what has been restored.
///
/// The checksum of a file finds damage, not forgery: sessions begin with what it holds as if the model had run it, so restore files that you
/// trust as you trust the weights.
///
/// #NVFP4_INVALID_ARGUMENT if other weights or other activations made the file, or if the model keeps no prefixes: it was loaded with
/// `prefix_cache` 0, or with neither `prefix_bytes` nor `kv_bytes`. #NVFP4_CORRUPT_FILE if the file is damaged or cut off,
/// #NVFP4_UNSUPPORTED if it is of another version, or of a type of keys that the device does not keep. The cache is then as it was. A call
/// that is cancelled leaves what it has restored.
///
/// - `path`, `path_length`: see TEXT above.
/// - `call`: cancels the call and reports the bytes read: the file is read twice, first to check it; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_restore_prefixes(
    model: *const NVFP4_Model,
    path: *const c_char,
    path_length: usize,
    call: *const NVFP4_CallOptions,
) -> NVFP4_Status {
    enter("NVFP4_model_restore_prefixes", || {
        // SAFETY: the pointer is as the header asks.
        let path = unsafe { arguments::path("path", path, path_length) }?;
        let model = handle::get::<Served>("model", model)?;
        // SAFETY: as above.
        let restored = unsafe { watched(call, || model.restore_prefixes(path)) }?;
        tracing::debug!(?path, ?restored, "restored prefixes");
        Ok(())
    })
}

/// Writes the size of the vocabulary, which is the number of logits for a token.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_vocab_size(
    model: *const NVFP4_Model,
    size: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_model_vocab_size", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("size", size) }?;
        out.set(handle::get::<Served>("model", model)?.info().vocab_size);
        Ok(())
    })
}

/// Checks token ids from C.
pub(super) fn tokens_in(tokens: &[i32]) -> Result<Vec<u32>> {
    let mut ids = with_room(tokens.len())?;
    for (i, &t) in tokens.iter().enumerate() {
        ids.push(
            u32::try_from(t)
                .map_err(|_| err!(InvalidArgument, "token {i} is {t}; ids are not negative"))?,
        );
    }
    Ok(ids)
}

/// Checks lists of token ids from C: `count` arrays with their lengths, whose names are for messages.
///
/// # Safety
/// As for [`slice`], of both arrays and of each list.
pub(super) unsafe fn token_lists(
    (name, lists): (&str, *const *const i32),
    lengths: (&str, *const usize),
    count: usize,
) -> Result<Vec<Vec<u32>>> {
    // SAFETY: promised by the caller.
    let each = unsafe { with_lengths((name, lists), lengths, count) }?;
    each.enumerate()
        .map(|(i, (list, length))| {
            // SAFETY: as above.
            let list = unsafe { slice("its tokens", list, length) }.and_then(tokens_in);
            list.map_err(|e| e.within(format_args!("{name}[{i}]")))
        })
        .collect()
}

/// Checks the sign of a token id of `model` from C.
fn token_in(token: i32, model: &Served) -> Result<u32> {
    match u32::try_from(token) {
        Ok(token) => Ok(token),
        Err(_) => bail!(
            InvalidArgument,
            "the token is {token}; the ids of the model are 0 to {}",
            model.token_ids()? - 1
        ),
    }
}

/// Converts token ids for C.
pub(super) fn tokens_out(tokens: &[u32]) -> Result<Vec<i32>> {
    let mut ids = with_room(tokens.len())?;
    for &token in tokens {
        ids.push(token_out(token)?);
    }
    Ok(ids)
}

/// Converts a token id for C.
pub(super) fn token_out(token: u32) -> Result<i32> {
    i32::try_from(token).map_err(|_| err!(Internal, "token id {token} is past int32_t"))
}

/// The result for an input, kept after a call that only asked for its length.
struct Counted<E, O> {
    model: usize,
    flag: bool,
    input: Vec<E>,
    output: O,
}

/// Passes the result of `make` for an input to `take`, or the result kept from this thread's last call if the input is the same. `take`
/// returns whether the result fitted; if not, the result is kept for the next call, unless there is no memory for that.
pub(super) fn counted<E: Copy + PartialEq + 'static, O: 'static>(
    model: *const NVFP4_Model,
    flag: bool,
    input: &[E],
    make: impl FnOnce() -> Result<O>,
    take: impl FnOnce(&O) -> (bool, Result<()>),
) -> Result<()> {
    let model = model.addr();
    let last = guard::take_kept::<Counted<E, O>>();
    let last = last.filter(|c| (c.model, c.flag) == (model, flag) && c.input == input);
    let output = match last {
        Some(counted) => counted.output,
        None => make()?,
    };
    let (had_room, result) = take(&output);
    if !had_room && let Ok(mut copy) = with_room(input.len()) {
        copy.extend_from_slice(input);
        guard::keep(Counted {
            model,
            flag,
            input: copy,
            output,
        });
    }
    result
}

/// Converts text to token ids. Names of special tokens in the text, such as `<|im_end|>`, become those tokens; for text of users use
/// NVFP4_model_tokenize_plain(), or pass it as messages to a session. `add_special` 1 adds the special tokens that the model expects around
/// a text, often a first one; a rendered chat has them already. Writes the number of tokens to `count`; see ARRAYS OUT above. Asking for
/// the number first does not double the work: the tokens are kept for this thread's next call with the same text.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_tokenize(
    model: *const NVFP4_Model,
    text: *const c_char,
    text_length: usize,
    add_special: i32,
    tokens: *mut i32,
    capacity: usize,
    count: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_model_tokenize", || {
        let object = handle::get::<Served>("model", model)?;
        // SAFETY: the pointers are as the header asks.
        let text = unsafe { self::text("text", text, text_length) }?;
        let add_special = flag("add_special", add_special)?;
        let encode = || tokens_out(&object.tokenizer()?.encode(text, add_special)?);
        counted(model, add_special, text.as_bytes(), encode, |ids| {
            // SAFETY: as above.
            let result = unsafe { copy_items(ids, tokens, capacity, count) };
            (ids.len() <= capacity, result)
        })
    })
}

/// Tokens of plain text. A type of its own keeps them apart from tokens of the same text with its special tokens.
struct PlainTokens(Vec<i32>);

/// Converts plain text, such as a user's, to token ids: the name of a special token in it becomes ordinary tokens. Otherwise as
/// NVFP4_model_tokenize(); a text without such names gives the same tokens. #NVFP4_UNSUPPORTED if the tokenizer has no other way to write
/// such a name.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_tokenize_plain(
    model: *const NVFP4_Model,
    text: *const c_char,
    text_length: usize,
    add_special: i32,
    tokens: *mut i32,
    capacity: usize,
    count: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_model_tokenize_plain", || {
        let object = handle::get::<Served>("model", model)?;
        // SAFETY: the pointers are as the header asks.
        let text = unsafe { self::text("text", text, text_length) }?;
        let add_special = flag("add_special", add_special)?;
        let encode = || {
            let ids = object.tokenizer()?.encode_plain_with(text, add_special)?;
            tokens_out(&ids).map(PlainTokens)
        };
        counted(model, add_special, text.as_bytes(), encode, |ids| {
            // SAFETY: as above.
            let result = unsafe { copy_items(&ids.0, tokens, capacity, count) };
            (ids.0.len() <= capacity, result)
        })
    })
}

/// Converts token ids to text. `skip_special` 1 leaves out special tokens such as `<|im_end|>`. Ids in the model's vocabulary that its
/// tokenizer lacks, as padding of many models, give no text; ids that neither has are #NVFP4_INVALID_ARGUMENT. Bytes that are not valid
/// UTF-8 become U+FFFD: for a stream of tokens use a detokenizer or the text of a generation, which wait for whole characters. Asking for
/// the length first does not double the work, as for NVFP4_model_tokenize().
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_detokenize(
    model: *const NVFP4_Model,
    tokens: *const i32,
    count: usize,
    skip_special: i32,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_model_detokenize", || {
        let object = handle::get::<Served>("model", model)?;
        // SAFETY: the pointers are as the header asks.
        let tokens = unsafe { slice("tokens", tokens, count) }?;
        let skip_special = flag("skip_special", skip_special)?;
        let decode = || object.decode(&tokens_in(tokens)?, skip_special);
        counted(model, skip_special, tokens, decode, |text| {
            // SAFETY: as above.
            let result = unsafe { copy_text(text, buffer, capacity, length) };
            (text.len() <= capacity, result)
        })
    })
}

/// Writes the bytes that a token adds to a text. They may be a part of a character. The bytes of all tokens of a text, one after the other, are
/// that text, as the tokenizer's normalizer has changed it: a sentencepiece tokenizer writes a space before the first word, which
/// NVFP4_model_detokenize() leaves out again, and others compose characters (NFC). Text that the vocabulary cannot spell is lost: its token is
/// the special one for unknown text. A special token has the bytes of its name. Ids in the model's vocabulary that its tokenizer lacks have
/// none; for ids that neither has, #NVFP4_INVALID_ARGUMENT names the range.
///
/// - `buffer`, `capacity`, `length`: see ARRAYS OUT above.
/// - `is_special`: 1 if the token is special, so that its bytes are a name and no text, else 0. May be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_token_bytes(
    model: *const NVFP4_Model,
    token: i32,
    buffer: *mut u8,
    capacity: usize,
    length: *mut usize,
    is_special: *mut i32,
) -> NVFP4_Status {
    enter("NVFP4_model_token_bytes", || {
        let object = handle::get::<Served>("model", model)?;
        let token = token_in(token, &object)?;
        let bytes = object.token_bytes(token)?;
        if !is_special.is_null() {
            // SAFETY: the pointer is as the header asks.
            let out = unsafe { Out::new("is_special", is_special) }?;
            out.set(object.tokenizer()?.is_special(token).into());
        }
        // SAFETY: the pointers are as the header asks.
        unsafe { copy_items(bytes, buffer, capacity, length) }
    })
}

/// Writes the special tokens of a model, and other tokens that have a role, in order of their ids: those that its tokenizer marks as special;
/// those that `tokenizer_config.json`, `special_tokens_map.json`, the config or GGUF metadata name; stop tokens; and the marks of reasoning,
/// tool calls and turns that the library recognises by the chat template, as far as each is one token.
///
/// - `tokens`: room for `capacity` elements of `token_size` bytes: sizeof(NVFP4_SpecialToken).
/// - `count`: see ARRAYS OUT above.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_special_tokens(
    model: *const NVFP4_Model,
    tokens: *mut NVFP4_SpecialToken,
    token_size: usize,
    capacity: usize,
    count: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_model_special_tokens", || {
        let object = handle::get::<Served>("model", model)?;
        let found = object.special_tokens()?;
        let element = |special: &SpecialToken| {
            let name = object.token_bytes(special.token).unwrap_or_default();
            Ok(NVFP4_SpecialToken {
                token: token_out(special.token)?,
                roles: special.roles.iter().copied().map(role_number).sum(),
                name: name.as_ptr().cast(),
                name_length: name.len(),
            })
        };
        let elements = found.iter().map(element).collect::<Result<Vec<_>>>()?;
        // SAFETY: the pointers are as the header asks.
        unsafe { copy_elements("tokens", &elements, tokens, token_size, capacity, count) }
    })
}

/// Renders a conversation with the model's chat template (ChatML if it has none): `count` messages, each of `message_size`
/// bytes, which is sizeof(NVFP4_Message). `add_generation_prompt` 1 appends the beginning of the assistant's answer. Asking
/// for the length first does not double the work, as for NVFP4_model_tokenize(). In this text, names of special tokens within
/// messages look like the template's own: do not tokenize it if the messages are untrusted, but let a session run them.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_render_chat(
    model: *const NVFP4_Model,
    messages: *const NVFP4_Message,
    count: usize,
    message_size: usize,
    add_generation_prompt: i32,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_model_render_chat", || {
        let object = handle::get::<Served>("model", model)?;
        // SAFETY: the pointers are as the header asks.
        let messages = unsafe { elements("messages", messages, count, message_size) }?;
        let bytes = messages.iter().map(|m| {
            size_of::<Message>()
                .saturating_add(m.role_length)
                .saturating_add(m.content_length)
        });
        let bytes = bytes.fold(0, usize::saturating_add);
        let _copies = Budget::copies(bytes).set_aside()?;
        let messages = messages
            .iter()
            .map(|m| {
                // SAFETY: as above.
                let (role, content) = unsafe {
                    (
                        text("role", m.role, m.role_length)?,
                        text("content", m.content, m.content_length)?,
                    )
                };
                Ok((role, content))
            })
            .collect::<Result<Vec<_>>>()?;
        let prompt = flag("add_generation_prompt", add_generation_prompt)?;
        // One buffer, which is cheaper to compare and to free than a thousand messages.
        let mut input: Vec<u8> = with_room(bytes)?;
        for part in messages.iter().flat_map(|&(role, content)| [role, content]) {
            input.extend_from_slice(&part.len().to_ne_bytes());
            input.extend_from_slice(part.as_bytes());
        }
        let render = || {
            let messages: Vec<_> = messages.iter().map(|&(r, c)| Message::new(r, c)).collect();
            object.chat_template().render(&messages, prompt)
        };
        counted(model, prompt, &input[..], render, |text| {
            // SAFETY: as above.
            let result = unsafe { copy_text(text, buffer, capacity, length) };
            (text.len() <= capacity, result)
        })
    })
}
