//! The interface of every checkpoint, independent of its file format: entries, encodings, metadata, and the trait to read them.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::ggml::GgmlType;
use crate::base::Result;
use crate::base::error::{Error, bail, err};
use crate::base::files::{Files, GivenFiles};
use crate::tensor::DType;

/// Storage of an entry's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// Elements of one type, in sequence; float8 may have an outer scale. Files store packed 4-bit codes as bytes, so the type is never
    /// [`DType::F4E2M1x2`].
    Dense(DType),
    /// NVFP4: 4-bit codes, an e4m3 scale per 16 elements, one global scale.
    Nvfp4,
    /// A stack of matrices in MXFP4: 4-bit codes, an E8M0 scale per 32 elements.
    Mxfp4,
    /// int8 codes with a scale per row of the matrix.
    Int8,
    /// 4-bit integers of GPTQ or AWQ, with a scale and a zero point for each group of inputs. Only read.
    Int4,
    /// bitsandbytes NF4: 4-bit codes into a table, a scale per block of the flattened tensor.
    Nf4,
    /// A GGUF block type.
    Ggml(GgmlType),
}

impl Encoding {
    /// Bytes per element of a dense encoding; `None` for the block encodings.
    pub const fn element_bytes(self) -> Option<usize> {
        match self {
            Encoding::Dense(DType::F4E2M1x2) => None,
            Encoding::Dense(dtype) => Some(dtype.bytes()),
            Encoding::Nvfp4
            | Encoding::Mxfp4
            | Encoding::Int8
            | Encoding::Int4
            | Encoding::Nf4
            | Encoding::Ggml(_) => None,
        }
    }

    /// Whether [`Checkpoint::rows_nvfp4`] gives its rows: without loss, or not at all.
    pub const fn reads_as_nvfp4(self) -> bool {
        matches!(self, Encoding::Nvfp4 | Encoding::Mxfp4)
    }

    /// Bytes of a matrix `[rows, cols]` in this encoding, scales of blocks and rows included; `None` for encodings that are only read.
    pub const fn matrix_bytes(self, rows: u64, cols: u64) -> Option<u64> {
        match (self, self.element_bytes()) {
            (_, Some(width)) => Some(rows * cols * width as u64),
            (Encoding::Nvfp4, None) => Some(rows * cols / 2 + rows * cols / 16),
            (Encoding::Int8, None) => Some(rows * cols + rows * 4),
            (_, None) => None,
        }
    }

    /// Whether the values are integers or booleans. No weights have such values; they are codes whose scales are missing.
    pub const fn is_integer(self) -> bool {
        matches!(self, Encoding::Dense(dtype) if dtype.is_integer())
    }

    /// Its name in safetensors and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Encoding::Dense(dtype) => match dtype {
                DType::F32 => "F32",
                DType::F16 => "F16",
                DType::BF16 => "BF16",
                DType::F64 => "F64",
                DType::U8 => "U8",
                DType::I8 => "I8",
                DType::I16 => "I16",
                DType::I32 => "I32",
                DType::I64 => "I64",
                DType::Bool => "BOOL",
                DType::F8E4M3 => "F8_E4M3",
                DType::F4E2M1x2 => "F4",
            },
            Encoding::Nvfp4 => "NVFP4",
            Encoding::Mxfp4 => "MXFP4",
            Encoding::Int8 => "INT8",
            Encoding::Int4 => "INT4",
            Encoding::Nf4 => "NF4",
            Encoding::Ggml(t) => t.name(),
        }
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One logical tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The Hugging Face name, for example `model.layers.0.mlp.up_proj.weight`, however many stored tensors form it.
    pub name: String,
    /// The logical shape, outermost dimension first; empty for a scalar. No dimension is zero.
    pub shape: Vec<usize>,
    /// How the values are stored.
    pub encoding: Encoding,
    /// Bytes in the file, scales included.
    pub bytes: u64,
}

impl Entry {
    /// Rows when seen as a matrix: the product of all dimensions but the last; 1 for a vector or a scalar.
    pub fn rows(&self) -> usize {
        self.shape[..self.shape.len().saturating_sub(1)]
            .iter()
            .product()
    }

    /// Columns when seen as a matrix: the last dimension; 1 for a scalar.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

/// A tensor with values that cannot be read. It is not an [`Entry`], and does not prevent reading the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// The Hugging Face name.
    pub name: String,
    /// Element type in the file format's terms: `F8_E5M2`, `IQ1_S`.
    pub dtype: String,
    /// The stored shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// Bytes in the file.
    pub bytes: u64,
    /// The reason, worded to follow the name in a message.
    pub reason: String,
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.reason)
    }
}

/// A stored tensor. A logical [`Entry`] consists of one or more.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// The key in the file.
    pub key: &'a str,
    /// The file format's number of the element type: `.dat` elemType, GGUF type; 0 for formats that use names.
    pub type_code: u32,
    /// Byte offset in the file.
    pub offset: usize,
    /// Stored shape, outermost dimension first; packed dimensions if values are packed.
    pub shape: &'a [usize],
    /// Stored bytes.
    pub bytes: usize,
    /// Index of the checkpoint's file that holds it.
    pub(super) source: usize,
}

/// Metadata of a checkpoint, beside its tensors.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    /// The model's description with the keys of a Hugging Face `config.json`, into which GGUF metadata is translated. A GGUF file with
    /// llama3 rope scaling has no `rope_scaling` here but a tensor `rope_freqs.weight`: the divisor of each rotary frequency.
    pub config: Option<serde_json::Value>,
    /// Source of the tokenizer.
    pub tokenizer: TokenizerSource,
    /// Contents of the [`EMBEDDING_FILES`](super::EMBEDDING_FILES) that are present, by name. The pooling of a GGUF file is translated into
    /// such files.
    pub embedding: Vec<(String, Vec<u8>)>,
}

/// Source of a checkpoint's tokenizer.
#[derive(Clone, Debug, Default)]
pub enum TokenizerSource {
    /// None: the checkpoint has no tokenizer.
    #[default]
    None,
    /// None that is read: the name of the file with another form of it.
    Unread(&'static str),
    /// A directory with `tokenizer.json` and possibly other [`TOKENIZER_FILES`](super::TOKENIZER_FILES).
    Directory(PathBuf),
    /// Files that the host gives, `tokenizer.json` and possibly others of [`TOKENIZER_FILES`](super::TOKENIZER_FILES) among them.
    Given(GivenFiles),
    /// Inside the file.
    Vocabulary(Vocabulary),
}

impl TokenizerSource {
    /// Where the files of the tokenizer are, and their directory there; `None` if it has no files.
    pub fn files(&self) -> Option<(Files, &Path)> {
        match self {
            TokenizerSource::Directory(directory) => Some((Files::Disk, directory)),
            TokenizerSource::Given(files) => Some((Files::Given(files.clone()), Path::new(""))),
            TokenizerSource::None | TokenizerSource::Unread(_) | TokenizerSource::Vocabulary(_) => {
                None
            }
        }
    }

    /// The name of the file with a tokenizer in a form that is not read.
    pub fn unread(&self) -> Option<&'static str> {
        match self {
            TokenizerSource::Unread(name) => Some(name),
            _ => None,
        }
    }
}

/// The error for a model without a tokenizer. `unread` is as in [`TokenizerSource::unread`].
pub fn no_tokenizer(unread: Option<&str>) -> Error {
    match unread {
        None => err!(
            NotFound,
            "the model has no tokenizer; put tokenizer.json beside its weights"
        ),
        Some(name) => err!(
            NotFound,
            "the model has its tokenizer in {name} alone, which is not read; put tokenizer.json beside its weights, which a version of the model for transformers has, or which transformers' AutoTokenizer saves"
        ),
    }
}

/// A tokenizer as stored in a GGUF file: plain data; lists have one element per token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Vocabulary {
    /// `tokenizer.ggml.model`: "gpt2" for byte-level BPE, "llama" for SentencePiece, "gemma4" for SentencePiece with merges.
    pub model: String,
    /// `tokenizer.ggml.pre`: the name of the pre-tokenizer, if present.
    pub pre: Option<String>,
    /// Token texts; the index is the id.
    pub tokens: Vec<String>,
    /// Token types: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte. Empty or one per token.
    pub token_types: Vec<i32>,
    /// BPE merges, "left right", best first.
    pub merges: Vec<String>,
    /// Token scores. Empty or one per token.
    pub scores: Vec<f32>,
    /// Beginning of sequence.
    pub bos: Option<u32>,
    /// End of sequence.
    pub eos: Option<u32>,
    /// Rarely present entries.
    pub rare: Box<RareEntries>,
    /// Unknown token.
    pub unk: Option<u32>,
    /// Padding.
    pub pad: Option<u32>,
    /// Whether encoding prepends `bos`; `None` if the file does not say.
    pub add_bos: Option<bool>,
    /// Whether encoding appends `eos`; `None` if the file does not say.
    pub add_eos: Option<bool>,
    /// Whether SentencePiece prepends a space to the text; `None` if the file does not say.
    pub add_space_prefix: Option<bool>,
    /// Chat template (Jinja), if present.
    pub chat_template: Option<String>,
    /// Sampling settings recommended by the model's maker (`general.sampling`), with the keys of `generation_config.json`.
    pub sampling: Box<serde_json::Map<String, serde_json::Value>>,
}

/// Rarely present entries of a [`Vocabulary`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RareEntries {
    /// Further tokens that end a turn, a message or a sequence.
    pub ends: Vec<u32>,
    /// Stands between two texts.
    pub separator: Option<u32>,
    /// Stands for a whole text in classification.
    pub classification: Option<u32>,
    /// Stands for a token that is to be guessed.
    pub mask: Option<u32>,
    /// Template for conversations with tools, if it differs.
    pub tool_template: Option<String>,
}

impl Vocabulary {
    /// The tokens that end a text or a turn.
    pub fn ends(&self) -> impl Iterator<Item = u32> + '_ {
        self.eos.into_iter().chain(self.rare.ends.iter().copied())
    }
}

/// An opened checkpoint. All reads take `&self` and may come from any thread. Every read fails if the file was written to after it was
/// opened, because its values may be a mixture.
pub trait Checkpoint: Send + Sync {
    /// Detected layout: "dat", "safetensors", "modelopt", "compressed-tensors", "torchao", "bitsandbytes", "gptq", "awq",
    /// "mxfp4" or "gguf".
    fn format(&self) -> &'static str;

    /// Files that it reads while it is open; empty if it was opened from memory.
    fn files(&self) -> Vec<&Path>;

    /// Every logical tensor, in file order.
    fn entries(&self) -> &[Entry];

    /// The entry called `name`.
    fn find(&self, name: &str) -> Option<&Entry>;

    /// Tensors with values that cannot be read, which are not entries.
    fn unreadable(&self) -> &[Unreadable] {
        &[]
    }

    /// Decodes the values of `rows` to `out`, for any encoding. `entry` is taken as a matrix of [`Entry::rows`] by [`Entry::cols`]; `out`
    /// has exactly the size of these rows.
    fn rows_f32(&self, entry: &Entry, rows: Range<usize>, out: &mut [f32]) -> Result<()>;

    /// Copies the codes (low nibble = even column) and row-major e4m3 block scales of `rows` of an NVFP4 entry: `cols / 2` and `cols / 16`
    /// bytes per row. Converts an MXFP4 entry, and fails if that would change a value.
    fn rows_nvfp4(
        &self,
        entry: &Entry,
        rows: Range<usize>,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<()>;

    /// Copies the codes, bytes in two's complement, and the scales of `rows` of an int8 entry: `cols` codes and one scale per row.
    fn rows_int8(
        &self,
        entry: &Entry,
        _rows: Range<usize>,
        _codes: &mut [u8],
        _scales: &mut [f32],
    ) -> Result<()> {
        bail!(
            InvalidArgument,
            "'{}' is {}, not {}",
            entry.name,
            entry.encoding,
            Encoding::Int8
        )
    }

    /// Global scale of an NVFP4 entry; 1.0 if the file stores none. Fails if the entry has several different ones.
    fn global_scale(&self, entry: &Entry) -> Result<f32> {
        match self.global_scales(entry)? {
            [first, rest @ ..] if rest.iter().all(|g| g == first) => Ok(*first),
            several => bail!(
                Unsupported,
                "'{}' has {} global scales, one per expert; only one is supported here",
                entry.name,
                several.len()
            ),
        }
    }

    /// Global scales of an NVFP4 entry: one for all of it, or one per index of its first dimension. For an MXFP4 entry the powers of two
    /// with which [`Checkpoint::rows_nvfp4`] gives each matrix; fails if one has none.
    fn global_scales(&self, entry: &Entry) -> Result<&[f32]>;

    /// The stored tensor of `entry`, if it is a single one with its values in logical order.
    fn plain(&self, entry: &Entry) -> Option<Part<'_>>;

    /// The stored tensors that form `entry`.
    fn parts(&self, entry: &Entry) -> Result<Vec<Part<'_>>>;

    /// Copies stored bytes of a part of this checkpoint from byte `at` on, until `out` is full.
    fn read_part(&self, part: &Part<'_>, at: usize, out: &mut [u8]) -> Result<()>;

    /// Metadata of the checkpoint, beside its tensors.
    fn metadata(&self) -> &Metadata;
}
