//! Data for training: files of rows, tokenized, with the learned tokens marked
//!
//! A data handle holds the documents of files: rows as `nvfp4 train` reads them, rendered by a model's chat template, with the learned
//! tokens and the weight of each in the loss. docs/training.md describes the files. The documents come in the order of the files. A row is
//! one document, or one for each of its answers if a template drops earlier reasoning; a text longer than a window is several.
//!
//! Handles are immutable: any number of threads may use one at a time.

use std::ffi::c_char;
use std::sync::Arc;

use serde::Serialize;

use super::arguments::{
    self, Growing, Out, choice, copy_text, fill, flag, options, slice_mut, text,
};
use super::call::{NVFP4_CallOptions, watched};
use super::guard::{enter, enter_to_free};
use super::handle::{self, Object};
use super::status::NVFP4_Status;
use crate::base::error::{Result, bail, err};
use crate::model::training::Source;
use crate::text::Tokenizer;
use crate::train::data::{self, Data, Document, EmptyThink, Format, Long, Window};

/// The documents of files. See the chapter on data for training.
pub struct NVFP4_Data {
    _private: [u8; 0],
}

struct Documents {
    data: Data,
    tokenizer: Arc<Tokenizer>,
}

impl Object for Documents {
    type Handle = NVFP4_Data;
    const NAME: &'static str = "NVFP4_Data";
}

/// By the extension of a file: .tsv, .csv, .jsonl, .json or .txt, each also with .gz or .zst after it.
pub const NVFP4_DATA_BY_NAME: i32 = -1;
/// One row per line: a prompt, a tab and its answer.
pub const NVFP4_DATA_TSV: i32 = 0;
/// One row per line: a JSON object.
pub const NVFP4_DATA_JSONL: i32 = 1;
/// Plain text.
pub const NVFP4_DATA_TEXT: i32 = 2;
/// One row per record, with fields separated by commas; the first record names the columns.
pub const NVFP4_DATA_CSV: i32 = 3;
/// An array of JSON objects.
pub const NVFP4_DATA_JSON: i32 = 4;

/// Rows longer than a window are an error.
pub const NVFP4_LONG_REFUSE: i32 = 0;
/// The ends of rows longer than a window are cut off.
pub const NVFP4_LONG_TRUNCATE: i32 = 1;
/// Rows longer than a window are left out.
pub const NVFP4_LONG_DROP: i32 = 2;

/// Empty reasoning before an answer is learned with it.
pub const NVFP4_EMPTY_THINK_LEARN: i32 = 0;
/// Empty reasoning before an answer is context.
pub const NVFP4_EMPTY_THINK_GIVEN: i32 = 1;
/// Empty reasoning before an answer is left out.
pub const NVFP4_EMPTY_THINK_NONE: i32 = 2;

/// How to read data. Fill with NVFP4_data_options_init(), then change what is to differ. The text is read during the call only.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_DataOptions {
    /// sizeof(NVFP4_DataOptions) as the caller knows it.
    pub struct_size: u32,
    /// One of NVFP4_DATA_*: the format of all files. Default: by name.
    pub format: i32,
    /// One of NVFP4_LONG_*: the treatment of rows longer than a window. Texts are cut into several documents. Default: refuse.
    pub long_rows: i32,
    /// One of NVFP4_EMPTY_THINK_*: the treatment of the empty reasoning that a template such as Qwen3's writes before an
    /// answer without reasoning. Default: learn.
    pub empty_think: i32,
    /// 1 to learn all tokens instead of only answers. Default: 0.
    pub train_on_all: i32,
    /// 1 to leave out unusable rows instead of failing; NVFP4_data_report() counts them. Default: 0.
    pub skip_bad_rows: i32,
    /// Upper limit of tokens in a document, at least 4; 0 for 2048, or the model's context if that is less. Default: 0.
    pub window: usize,
    /// Separator of the documents of a text, UTF-8; its line ends match LF and CRLF. Default: NULL, for none.
    pub separator: *const c_char,
    /// Bytes of `separator`.
    pub separator_length: usize,
}

// SAFETY: numbers and a pointer without padding, the first a u32 size.
unsafe impl Growing for NVFP4_DataOptions {
    const NAME: &'static str = "NVFP4_DataOptions";
    fn defaults() -> Self {
        NVFP4_DataOptions {
            struct_size: size_of::<Self>() as u32,
            format: NVFP4_DATA_BY_NAME,
            long_rows: NVFP4_LONG_REFUSE,
            empty_think: NVFP4_EMPTY_THINK_LEARN,
            train_on_all: 0,
            skip_bad_rows: 0,
            window: 0,
            separator: std::ptr::null(),
            separator_length: 0,
        }
    }
}

impl NVFP4_DataOptions {
    /// # Safety
    /// The text must be readable.
    unsafe fn read(&self) -> Result<data::Options> {
        // SAFETY: promised by the caller.
        let separator = unsafe { text("separator", self.separator, self.separator_length) }?;
        Ok(data::Options {
            window: self.window,
            format: choice(
                "format",
                self.format,
                &[
                    (NVFP4_DATA_BY_NAME, "by name", None),
                    (NVFP4_DATA_TSV, "tsv", Some(Format::Tsv)),
                    (NVFP4_DATA_JSONL, "jsonl", Some(Format::Jsonl)),
                    (NVFP4_DATA_TEXT, "text", Some(Format::Text)),
                    (NVFP4_DATA_CSV, "csv", Some(Format::Csv)),
                    (NVFP4_DATA_JSON, "json", Some(Format::Json)),
                ],
            )?,
            separator: (!self.separator.is_null()).then(|| separator.to_owned()),
            learn_all: flag("train_on_all", self.train_on_all)?,
            empty_think: choice(
                "empty_think",
                self.empty_think,
                &[
                    (NVFP4_EMPTY_THINK_LEARN, "learn", EmptyThink::Learn),
                    (NVFP4_EMPTY_THINK_GIVEN, "given", EmptyThink::Given),
                    (NVFP4_EMPTY_THINK_NONE, "none", EmptyThink::None),
                ],
            )?,
            long: choice(
                "long_rows",
                self.long_rows,
                &[
                    (NVFP4_LONG_REFUSE, "refuse", Long::Refuse),
                    (NVFP4_LONG_TRUNCATE, "truncate", Long::Truncate),
                    (NVFP4_LONG_DROP, "drop", Long::Drop),
                ],
            )?,
            skip_bad_rows: flag("skip_bad_rows", self.skip_bad_rows)?,
            ..data::Options::default()
        })
    }
}

/// Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_DataOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_data_options_init(
    options: *mut NVFP4_DataOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_data_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_DataOptions::defaults()) }
    })
}

/// Reads files into documents for a model. Unusable rows, and rows longer than a window, are #NVFP4_INVALID_ARGUMENT unless the options
/// allow them; the message names the first by file and line.
///
/// - `model`, `model_length`: the model that will learn them, as for NVFP4_trainer_create(). Only its tokenizer, its chat template and the
///   size of its vocabulary are read, no weights.
/// - `files`, `file_lengths`, `file_count`: paths, and their lengths in bytes.
/// - `options`: NULL for the defaults.
/// - `call`: reports the rows read, and cancels the call; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_data_read(
    model: *const c_char,
    model_length: usize,
    files: *const *const c_char,
    file_lengths: *const usize,
    file_count: usize,
    options: *const NVFP4_DataOptions,
    call: *const NVFP4_CallOptions,
    out: *mut *mut NVFP4_Data,
) -> NVFP4_Status {
    enter("NVFP4_data_read", || {
        // SAFETY: the pointers are as the header asks.
        let (out, model, paths, mut options) = unsafe {
            (
                Out::new("out", out)?,
                arguments::path("model", model, model_length)?,
                arguments::paths("files", files, file_lengths, file_count)?,
                self::options(options)?.read()?,
            )
        };
        if paths.is_empty() {
            bail!(InvalidArgument, "there are no files; pass at least one");
        }
        let read = || {
            let source = Source::open(model)?;
            let wanted = (options.window > 0).then_some(options.window);
            options.window = data::window(wanted, source.spec().max_positions)?;
            let text = source.text()?;
            let data = data::read(&paths, &text, source.spec().vocab_size, &options)?;
            Ok((data, text.tokenizer))
        };
        // SAFETY: as above.
        let (data, tokenizer) = unsafe { watched(call, read) }?;
        out.set(handle::insert(Arc::new(Documents { data, tokenizer })));
        Ok(())
    })
}

/// Adds a reference to data.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_data_retain(data: *mut NVFP4_Data) -> NVFP4_Status {
    enter("NVFP4_data_retain", || {
        handle::retain::<Documents>("data", data)
    })
}

/// Gives up a reference to data. After the last one the handle is stale.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_data_release(data: *mut NVFP4_Data) -> NVFP4_Status {
    enter_to_free("NVFP4_data_release", || {
        handle::release::<Documents>("data", data)
    })
}

/// Writes the number of documents.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_data_count(
    data: *const NVFP4_Data,
    count: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_data_count", || {
        let object = handle::get::<Documents>("data", data)?;
        // SAFETY: the pointer is as the header asks.
        unsafe { Out::new("count", count) }?.set(object.data.documents().len());
        Ok(())
    })
}

/// Copies a document in the form of NVFP4_MicroBatch: its tokens, the label of each token (the next token, or -1 if that is not learned),
/// and the weight of each label in the loss, 0 without a label.
///
/// - `index`: the document, from 0.
/// - `tokens`, `labels`, `weights`, `capacity`: buffers with room for `capacity` elements each; any may be NULL. With a
///   capacity of 0 only the length is written.
/// - `length`: the number of its tokens. A capacity below that, other than 0, is #NVFP4_BUFFER_TOO_SMALL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_data_document(
    data: *const NVFP4_Data,
    index: usize,
    tokens: *mut i32,
    labels: *mut i32,
    weights: *mut f32,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_data_document", || {
        let object = handle::get::<Documents>("data", data)?;
        let document = document(&object, index)?;
        let count = document.tokens.len();
        // SAFETY: the pointer is as the header asks.
        unsafe { Out::new("length", length) }?.set(count);
        if capacity == 0 {
            return Ok(());
        }
        if capacity < count {
            bail!(
                BufferTooSmall,
                "the buffers have room for {capacity}, and {count} are needed"
            );
        }
        let mut window = Window::default();
        window.push(document);
        let ids = window.tokens.iter().map(|&token| token as i32);
        let ones = window.labels.iter().map(|&l| f32::from(u8::from(l >= 0)));
        // SAFETY: the pointers are as the header asks.
        unsafe {
            copy("tokens", tokens, count, ids)?;
            copy("labels", labels, count, window.labels.iter().copied())?;
            match window.weights.is_empty() {
                true => copy("weights", weights, count, ones),
                false => copy("weights", weights, count, window.weights.iter().copied()),
            }
        }
    })
}

/// Describes a document as JSON: file, line, and for each of its tokens its id (tokens), the text that it completes (pieces), whether it is
/// special, whether it is learned, and its weight (weights). Unlike labels, these refer to the token itself, not to the one before it.
/// Later versions may add keys. For the buffer see TEXT above.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_data_mask(
    data: *const NVFP4_Data,
    index: usize,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_data_mask", || {
        let object = handle::get::<Documents>("data", data)?;
        document(&object, index)?;
        let mask = json(&object.data.mask(index, &object.tokenizer)?)?;
        // SAFETY: the pointers are as the header asks.
        unsafe { copy_text(&mask, buffer, capacity, length) }
    })
}

/// Summarizes the read as JSON: files (path, bytes, checksum), rows, bad_rows, truncated, dropped. Later versions may add keys. For the
/// buffer see TEXT above.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_data_report(
    data: *const NVFP4_Data,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_data_report", || {
        let object = handle::get::<Documents>("data", data)?;
        let report = json(object.data.report())?;
        // SAFETY: the pointers are as the header asks.
        unsafe { copy_text(&report, buffer, capacity, length) }
    })
}

fn document(object: &Documents, index: usize) -> Result<&Document> {
    let documents = object.data.documents();
    documents.get(index).ok_or_else(|| {
        err!(
            InvalidArgument,
            "index is {index}, and there are {} documents",
            documents.len()
        )
    })
}

fn json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|e| err!(Internal, "writing JSON: {e}"))
}

/// Fills a buffer of `count` elements, unless it is NULL.
///
/// # Safety
/// `to`, unless NULL, must be writable for `count` elements.
unsafe fn copy<T>(
    name: &str,
    to: *mut T,
    count: usize,
    values: impl Iterator<Item = T>,
) -> Result<()> {
    if to.is_null() {
        return Ok(());
    }
    // SAFETY: promised by the caller.
    let to = unsafe { slice_mut(name, to, count) }?;
    to.iter_mut()
        .zip(values)
        .for_each(|(to, value)| *to = value);
    Ok(())
}
