//! What every checkpoint gives, whatever its file format: entries and how their values are encoded, metadata, and the trait to read them.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::ggml::GgmlType;
use crate::base::Result;
use crate::base::error::bail;
use crate::tensor::DType;

/// How the values of an entry are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// Elements of one type, one after the other; float8 with an outer scale where the file has one. Packed 4-bit codes are bytes
    /// to a file, so the type is never [`DType::F4E2M1x2`].
    Dense(DType),
    /// NVFP4: 4-bit codes, an e4m3 scale per 16 elements, one global scale.
    Nvfp4,
    /// int8 codes with a scale per row of the matrix.
    Int8,
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
            Encoding::Nvfp4 | Encoding::Int8 | Encoding::Nf4 | Encoding::Ggml(_) => None,
        }
    }

    /// Bytes of values of a matrix `[rows, cols]` that a writer takes for it, scales of blocks and rows included; `None` for encodings that
    /// are only read.
    pub const fn matrix_bytes(self, rows: u64, cols: u64) -> Option<u64> {
        match (self, self.element_bytes()) {
            (_, Some(width)) => Some(rows * cols * width as u64),
            (Encoding::Nvfp4, None) => Some(rows * cols / 2 + rows * cols / 16),
            (Encoding::Int8, None) => Some(rows * cols + rows * 4),
            (_, None) => None,
        }
    }

    /// Whether the values are whole numbers or truth values, which no model has as weights: codes whose scales are missing.
    pub const fn is_integer(self) -> bool {
        matches!(self, Encoding::Dense(dtype) if dtype.is_integer())
    }

    /// The name that safetensors has for it, which reports print too.
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
            Encoding::Int8 => "INT8",
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
    /// The Hugging Face name, `model.layers.0.mlp.up_proj.weight`, however many stored tensors make it up.
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

/// A tensor of the file whose values cannot be read. It is no [`Entry`], and keeps nobody from reading the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// The Hugging Face name.
    pub name: String,
    /// The type of its elements, as the file format calls it: `F8_E5M2`, `IQ1_S`.
    pub dtype: String,
    /// The stored shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// Bytes in the file.
    pub bytes: u64,
    /// Why, to follow the name in a message.
    pub reason: String,
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.reason)
    }
}

/// One tensor as it lies in the file; a logical [`Entry`] is made of one or more.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// The key in the file.
    pub key: &'a str,
    /// The file format's own number for the element type: `.dat` elemType, GGUF type; 0 where the format uses names.
    pub type_code: u32,
    /// Where its bytes start in the file.
    pub offset: usize,
    /// The stored shape, outermost dimension first: packed dimensions where values are packed.
    pub shape: &'a [usize],
    /// How many bytes are stored.
    pub bytes: usize,
    /// Which of the checkpoint's files it is in.
    pub(super) source: usize,
}

/// What a checkpoint says beside its tensors.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    /// The model's description with the keys of a Hugging Face `config.json`; GGUF metadata is translated to them. A GGUF
    /// file with llama3 rope scaling has no `rope_scaling` here but a tensor `rope_freqs.weight`: the number that divides
    /// each rotary frequency.
    pub config: Option<serde_json::Value>,
    /// Where the tokenizer is.
    pub tokenizer: TokenizerSource,
}

/// Where a checkpoint's tokenizer is.
#[derive(Clone, Debug, Default)]
pub enum TokenizerSource {
    /// Nowhere: the checkpoint has none.
    #[default]
    None,
    /// A directory with `tokenizer.json`, and perhaps others of [`TOKENIZER_FILES`](super::TOKENIZER_FILES).
    Directory(PathBuf),
    /// Inside the file.
    Vocabulary(Vocabulary),
}

/// A tokenizer as a GGUF file holds it: plain data, one element per token where it is a list.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Vocabulary {
    /// `tokenizer.ggml.model`: "gpt2" for byte-level BPE, "llama" for SentencePiece.
    pub model: String,
    /// `tokenizer.ggml.pre`: the name of the pre-tokenizer, where given.
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
    /// Entries that few files have.
    pub rare: Box<RareEntries>,
    /// Unknown token.
    pub unk: Option<u32>,
    /// Padding.
    pub pad: Option<u32>,
    /// Whether encoding puts `bos` in front; `None` where the file does not say.
    pub add_bos: Option<bool>,
    /// Whether encoding puts `eos` at the end; `None` where the file does not say.
    pub add_eos: Option<bool>,
    /// Whether SentencePiece puts a space in front of the text; `None` where the file does not say.
    pub add_space_prefix: Option<bool>,
    /// The chat template (Jinja), where the file has one.
    pub chat_template: Option<String>,
    /// How the model's maker asks for tokens to be chosen (`general.sampling`), with the keys of `generation_config.json`.
    pub sampling: Box<serde_json::Map<String, serde_json::Value>>,
}

/// Entries of a [`Vocabulary`] that few files have.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RareEntries {
    /// Ends of turns and of messages, and further ends of sequences.
    pub ends: Vec<u32>,
    /// The template for conversations with tools, where it is another.
    pub tool_template: Option<String>,
}

impl Vocabulary {
    /// The tokens that end a text or a turn.
    pub fn ends(&self) -> impl Iterator<Item = u32> + '_ {
        self.eos.into_iter().chain(self.rare.ends.iter().copied())
    }
}

/// An opened checkpoint. All reads are from `&self` and may come from any thread. A file that was written to after it was opened
/// is an error of every read, as the values may be of two contents.
pub trait Checkpoint: Send + Sync {
    /// The layout found: "dat", "safetensors", "modelopt", "compressed-tensors", "torchao", "bitsandbytes" or "gguf".
    fn format(&self) -> &'static str;

    /// The files that it reads as long as it is open; none where it was opened from memory.
    fn files(&self) -> Vec<&Path>;

    /// Every logical tensor, in file order.
    fn entries(&self) -> &[Entry];

    /// The entry called `name`.
    fn find(&self, name: &str) -> Option<&Entry>;

    /// Tensors of the file that are no entries, as their values cannot be read.
    fn unreadable(&self) -> &[Unreadable] {
        &[]
    }

    /// Writes the values of `rows` to `out`, whatever the encoding. `entry` is seen as a matrix of [`Entry::rows`] by
    /// [`Entry::cols`]; `out` holds exactly the rows asked for.
    fn rows_f32(&self, entry: &Entry, rows: Range<usize>, out: &mut [f32]) -> Result<()>;

    /// Copies the codes (low nibble = even column) and linear e4m3 block scales of `rows` of an NVFP4 entry: `cols / 2` and
    /// `cols / 16` bytes a row.
    fn rows_nvfp4(
        &self,
        entry: &Entry,
        rows: Range<usize>,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<()>;

    /// Copies the codes, bytes in two's complement, and the scales of `rows` of an int8 entry: `cols` codes and one scale a row.
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

    /// The global scale of an NVFP4 entry; 1.0 where the file stores none. An entry with several, which differ, is an error.
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

    /// The global scales of an NVFP4 entry: one for all of it, or one per index of its first dimension.
    fn global_scales(&self, entry: &Entry) -> Result<&[f32]>;

    /// The tensor of the file that `entry` is, where it is a single one whose values lie there in logical order.
    fn plain(&self, entry: &Entry) -> Option<Part<'_>>;

    /// The tensors of the file that make up `entry`.
    fn parts(&self, entry: &Entry) -> Result<Vec<Part<'_>>>;

    /// Copies stored bytes of a part of this checkpoint, from byte `at` of it on, as many as `out` takes.
    fn read_part(&self, part: &Part<'_>, at: usize, out: &mut [u8]) -> Result<()>;

    /// What the checkpoint says beside its tensors.
    fn metadata(&self) -> &Metadata;
}
