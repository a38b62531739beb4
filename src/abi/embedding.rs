//! Embeddings: numbers that stand for texts, near each other for texts of like meaning.
//!
//! A model with the files of sentence-transformers says how its texts are embedded: `modules.json`, `1_Pooling/config.json`,
//! `config_sentence_transformers.json`. So does a GGUF file with a pooling type. Those of NVFP4_model_info() are in its `embedding`:
//! `pooling`, `normalize`, `include_prompt`, `prompts`, `default_prompt`, `max_tokens`, and `fault`, the reason why they cannot be followed.
//! Any other model embeds by the pooling that the caller names.

use std::ffi::c_char;

use super::arguments::{Growing, Out, choice, fill, flag, options, slice, slice_mut, text};
use super::call::{NVFP4_CallOptions, watched};
use super::guard::enter;
use super::handle;
use super::model::{NVFP4_KV_FLOAT16, NVFP4_Model, kv_type, token_lists};
use super::status::NVFP4_Status;
use crate::base::Result;
use crate::base::error::bail;
use crate::engine::Served;
use crate::model::Pooling;
use crate::session::{EmbedOptions, EmbedPrompt, Embedding};

/// The pooling that the model's files name; without one, #NVFP4_INVALID_ARGUMENT.
pub const NVFP4_POOLING_MODEL: i32 = 0;
/// The hidden row of the last token.
pub const NVFP4_POOLING_LAST: i32 = 1;
/// The mean of the hidden rows of all tokens.
pub const NVFP4_POOLING_MEAN: i32 = 2;
/// The hidden row of the first token.
pub const NVFP4_POOLING_CLS: i32 = 3;
/// None: the hidden row of every token, which the final norm gives and the output head reads.
pub const NVFP4_POOLING_NONE: i32 = 4;

/// Normalized if the model's files say so; never without pooling.
pub const NVFP4_NORMALIZE_MODEL: i32 = 0;
/// As pooling gives them.
pub const NVFP4_NORMALIZE_NO: i32 = 1;
/// Divided by their Euclidean length, so that a dot product of two is the cosine of their angle.
pub const NVFP4_NORMALIZE_YES: i32 = 2;

/// How to embed texts. Fill with NVFP4_embed_options_init(), then change what is to differ.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_EmbedOptions {
    /// sizeof(NVFP4_EmbedOptions) as the caller knows it.
    pub struct_size: u32,
    /// One of NVFP4_POOLING_*. Default: that of the model.
    pub pooling: i32,
    /// One of NVFP4_NORMALIZE_*. Default: what the model says.
    pub normalize: i32,
    /// 1 to cut texts with more tokens than the model takes; the tokens that end every text stay. 0 refuses them with
    /// #NVFP4_CONTEXT_FULL. Default: 0.
    pub truncate: i32,
    /// One of NVFP4_KV_*: the type of keys and values, which live while a text runs. Default: half precision.
    pub kv_type: i32,
    /// 1 keeps texts out of the prefix cache, which pooling by the last token uses: no text begins with the blocks of another one or of a
    /// session. Default: 0.
    pub is_private: i32,
    /// Number of first elements that are kept, before they are normalized; 0 for all. For models whose embeddings may be cut, of
    /// Matryoshka training. Default: 0.
    pub dimensions: usize,
    /// A text that goes before each text, such as an instruction, in UTF-8; NULL for the prompt of `prompt_name`. Default: NULL.
    pub prompt: *const c_char,
    /// Bytes of `prompt`, which may be none.
    pub prompt_length: usize,
    /// The name of one of the model's prompts, such as "query", in UTF-8; NULL for the model's default prompt, which most models have not.
    /// Default: NULL.
    pub prompt_name: *const c_char,
    /// Bytes of `prompt_name`.
    pub prompt_name_length: usize,
    /// Cancels the call and reports the tokens run; NULL for neither. Default: NULL.
    pub call: *const NVFP4_CallOptions,
}

// SAFETY: integers and pointers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_EmbedOptions {
    const NAME: &'static str = "NVFP4_EmbedOptions";
    fn defaults() -> Self {
        NVFP4_EmbedOptions {
            struct_size: size_of::<Self>() as u32,
            pooling: NVFP4_POOLING_MODEL,
            normalize: NVFP4_NORMALIZE_MODEL,
            truncate: 0,
            kv_type: NVFP4_KV_FLOAT16,
            is_private: 0,
            dimensions: 0,
            prompt: std::ptr::null(),
            prompt_length: 0,
            prompt_name: std::ptr::null(),
            prompt_name_length: 0,
            call: std::ptr::null(),
        }
    }
}

impl NVFP4_EmbedOptions {
    /// # Safety
    /// The texts must be as the header asks, during `'a`.
    unsafe fn read<'a>(&self) -> Result<EmbedOptions<'a>> {
        let poolings = [
            (NVFP4_POOLING_MODEL, "model", None),
            (NVFP4_POOLING_LAST, "last", Some(Pooling::Last)),
            (NVFP4_POOLING_MEAN, "mean", Some(Pooling::Mean)),
            (NVFP4_POOLING_CLS, "cls", Some(Pooling::Cls)),
            (NVFP4_POOLING_NONE, "none", Some(Pooling::None)),
        ];
        let normalizations = [
            (NVFP4_NORMALIZE_MODEL, "model", None),
            (NVFP4_NORMALIZE_NO, "no", Some(false)),
            (NVFP4_NORMALIZE_YES, "yes", Some(true)),
        ];
        // SAFETY: promised by the caller.
        let (prompt, name) = unsafe {
            (
                text("prompt", self.prompt, self.prompt_length)?,
                text("prompt_name", self.prompt_name, self.prompt_name_length)?,
            )
        };
        Ok(EmbedOptions {
            pooling: choice("pooling", self.pooling, &poolings)?,
            normalize: choice("normalize", self.normalize, &normalizations)?,
            dimensions: self.dimensions,
            prompt: match (self.prompt.is_null(), self.prompt_name.is_null()) {
                (true, true) => EmbedPrompt::AsModel,
                (false, true) => EmbedPrompt::Text(prompt),
                (true, false) => EmbedPrompt::Named(name),
                (false, false) => bail!(
                    InvalidArgument,
                    "the prompt is given and named '{name}'; give one of both"
                ),
            },
            truncate: flag("truncate", self.truncate)?,
            kv: kv_type(self.kv_type)?,
            private: flag("is_private", self.is_private)?,
        })
    }
}

/// Where the results of a call go.
struct Results<'a> {
    /// `None` if only their number is asked for.
    embeddings: Option<&'a mut [f32]>,
    length: Out<usize>,
    rows: &'a mut [usize],
}

impl<'a> Results<'a> {
    /// # Safety
    /// The pointers must be as the header asks, during `'a`.
    unsafe fn new(
        embeddings: *mut f32,
        capacity: usize,
        length: *mut usize,
        (rows, count): (*mut usize, usize),
    ) -> Result<Results<'a>> {
        // SAFETY: promised by the caller.
        unsafe {
            Ok(Results {
                length: Out::new("length", length)?,
                embeddings: match embeddings.is_null() && capacity == 0 {
                    true => None,
                    false => Some(slice_mut("embeddings", embeddings, capacity)?),
                },
                rows: match rows.is_null() {
                    true => &mut [],
                    false => slice_mut("rows", rows, count)?,
                },
            })
        }
    }

    fn fill(self, embedding: &Embedding<'_>) -> Result<()> {
        let length = embedding.rows() * embedding.dimensions();
        self.length.set(length);
        for (text, rows) in self.rows.iter_mut().enumerate() {
            *rows = embedding.rows_of(text);
        }
        let Some(out) = self.embeddings else {
            return Ok(());
        };
        let capacity = out.len();
        match out.get_mut(..length) {
            Some(out) => embedding.run(out),
            None => bail!(
                BufferTooSmall,
                "the buffer has room for {capacity}, and {length} are needed"
            ),
        }
    }
}

/// Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_EmbedOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_embed_options_init(
    options: *mut NVFP4_EmbedOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_embed_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_EmbedOptions::defaults()) }
    })
}

/// Embeds texts: one row of numbers for each, `[count, dimensions]` in the order of the texts. The prompt goes before each text, and the
/// tokens that the model expects around every text are added, as sentence-transformers does; names of special tokens in a text become those
/// tokens. An empty text has these tokens alone; one that has none is #NVFP4_INVALID_ARGUMENT, as
/// every other text that cannot be embedded, with its number. No texts are no error.
///
/// Everything is checked before the first token runs. Texts run together, beside the tokens of other threads, and long ones in several passes;
/// where memory for keys and values is short, fewer of them at a time. On the CPU an embedding has the same bits whatever is embedded with it.
/// From any thread at any time, several calls at once.
///
/// - `texts`, `lengths`: `count` texts in UTF-8 with their lengths in bytes.
/// - `options`: NULL for the defaults.
/// - `embeddings`, `capacity`, `length`: see ARRAYS OUT above. The numbers of elements are those of the model's rows, `hidden_size` of
///   NVFP4_model_info(), or `dimensions` of the options. A call that fails may have written some.
/// - `rows`: receives the number of rows of each text, which is 1 with pooling and its number of tokens without; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_embed_texts(
    model: *const NVFP4_Model,
    texts: *const *const c_char,
    lengths: *const usize,
    count: usize,
    options: *const NVFP4_EmbedOptions,
    embeddings: *mut f32,
    capacity: usize,
    length: *mut usize,
    rows: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_model_embed_texts", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let results = Results::new(embeddings, capacity, length, (rows, count))?;
            let options = self::options(options)?;
            let each = slice("texts", texts, count)?.iter();
            let each = each.zip(slice("lengths", lengths, count)?).enumerate();
            let texts = each.map(|(i, (&one, &length))| text(&format!("texts[{i}]"), one, length));
            let texts = texts.collect::<Result<Vec<_>>>()?;
            let model = handle::get::<Served>("model", model)?;
            let own = options.read()?;
            watched(options.call, || {
                results.fill(&Embedding::of_texts(&model, &texts, &own)?)
            })
        }
    })
}

/// Embeds lists of tokens as they are: without a prompt, and without tokens that the model expects around a text. Otherwise as
/// NVFP4_model_embed_texts(); a list without tokens is #NVFP4_INVALID_ARGUMENT.
///
/// - `tokens`, `lengths`: `count` arrays of tokens with their lengths.
/// - `options`: NULL for the defaults.
/// - `embeddings`, `capacity`, `length`, `rows`: as for NVFP4_model_embed_texts().
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_embed(
    model: *const NVFP4_Model,
    tokens: *const *const i32,
    lengths: *const usize,
    count: usize,
    options: *const NVFP4_EmbedOptions,
    embeddings: *mut f32,
    capacity: usize,
    length: *mut usize,
    rows: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_model_embed", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let results = Results::new(embeddings, capacity, length, (rows, count))?;
            let options = self::options(options)?;
            let tokens = token_lists(("tokens", tokens), ("lengths", lengths), count)?;
            let views: Vec<&[u32]> = tokens.iter().map(Vec::as_slice).collect();
            let model = handle::get::<Served>("model", model)?;
            let own = options.read()?;
            watched(options.call, || {
                results.fill(&Embedding::of_tokens(&model, &views, &own)?)
            })
        }
    })
}
