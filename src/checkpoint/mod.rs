//! Checkpoint files: readers and writers behind one trait, validated before anything is allocated and read at positions. What is
//! stored as several tensors (codes, block scales, global scale) appears as one logical entry under its Hugging Face name.
//! Knows nothing of models or devices; no other folder knows a file format.

mod companion;
mod dat;
mod folder;
mod gguf;
mod keys;
mod layout;
mod names;
mod safetensors;
pub mod schema;
mod source;
mod tensors;
mod write;

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::base::error::{Error, bail, err};
use crate::base::{Result, threads};
use crate::tensor::DType;
use source::Source;

pub use companion::{DESCRIPTION_FILES, TOKENIZER_FILES};
pub use folder::{Weights, gguf_parts, weights};
pub use gguf::{GgmlType, GgufFamily, GgufKind, GgufMetadata};
pub use names::is_of_text_model;
pub use write::{
    DatWriter, ModelOptWriter, Planned, Writer, check_not_read, missing_companions,
    write_companions,
};

/// How the values of an entry are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// Elements of one type, one after the other; float8 with an outer scale where the file has one. Packed 4-bit codes are bytes
    /// to a file, so the type is never [`DType::F4E2M1x2`].
    Dense(DType),
    /// NVFP4: 4-bit codes, an e4m3 scale per 16 elements, one global scale.
    Nvfp4,
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
            Encoding::Nvfp4 | Encoding::Nf4 | Encoding::Ggml(_) => None,
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
    source: usize,
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
    /// A directory with `tokenizer.json`, and perhaps others of [`TOKENIZER_FILES`].
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
    /// End of turn, where it differs from the end of sequence.
    pub eot: Option<u32>,
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

/// Opens a checkpoint: a `.dat`, `.safetensors` or `.gguf` file, a safetensors index, or a directory that holds one of them or
/// a set of files; [`weights`] says which of its files are opened. Any part of a split GGUF model opens the whole model.
/// `config.json` and the tokenizer are picked up from the directory; a GGUF file carries its own, and is in the words of
/// Hugging Face if its architecture is that of one of `families`.
pub fn open(path: &Path, families: &[GgufFamily]) -> Result<Box<dyn Checkpoint>> {
    threads::with_stack(|| open_here(path, families))
}

fn open_here(path: &Path, families: &[GgufFamily]) -> Result<Box<dyn Checkpoint>> {
    let info = std::fs::metadata(path)
        .map_err(|e| Error::io(format_args!("opening {}", path.display()), e))?;
    if !info.is_dir() {
        return open_file(path, families);
    }
    let files = folder::find_in_directory(path)?;
    match &files[..] {
        [first, _, ..] if first.extension().is_some_and(|e| e == "safetensors") => Ok(Box::new(
            safetensors::open_shards(&files, companion::read(path)?)?,
        )),
        [first, ..] => open_file(first, families),
        [] => Err(err!(Internal, "a model without files was found")),
    }
}

fn open_file(file: &Path, families: &[GgufFamily]) -> Result<Box<dyn Checkpoint>> {
    if file.extension().is_some_and(|e| e == "json") {
        let directory = directory_of(file);
        let metadata = companion::read(directory)?;
        return Ok(Box::new(safetensors::open_index(
            file, directory, metadata,
        )?));
    }
    open_source(Source::open(file)?, Some(file), families)
}

fn directory_of(file: &Path) -> &Path {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Opens the content of one whole `.dat`, `.safetensors` or `.gguf` file that is already in memory. `name` stands for the file
/// in messages, and its extension tells `.dat` apart, which has no magic number. `families` are as in [`open`].
pub fn open_bytes(
    name: &str,
    bytes: Vec<u8>,
    families: &[GgufFamily],
) -> Result<Box<dyn Checkpoint>> {
    open_source(Source::owned(name, bytes)?, None, families)
}

fn open_source(
    source: Source,
    file: Option<&Path>,
    families: &[GgufFamily],
) -> Result<Box<dyn Checkpoint>> {
    let extension = Path::new(source.name())
        .extension()
        .map(|e| e.to_ascii_lowercase());
    let extension = extension.as_deref().and_then(|e| e.to_str()).unwrap_or("");
    let mut start = [0; 9];
    let start = &mut start[..source.len().min(9)];
    source.read(0, start)?;
    if gguf::recognises(start) || extension == "gguf" {
        return Ok(Box::new(gguf::open(source, file, families)?));
    }
    let is_safetensors = match extension {
        "safetensors" => true,
        "dat" => false,
        _ if safetensors::recognises(start) => true,
        _ => bail!(
            Unsupported,
            "{} is no checkpoint known here: it has neither the GGUF magic nor a safetensors header, and its name does not end in .dat",
            source.name()
        ),
    };
    let metadata = match file {
        Some(file) => companion::read(directory_of(file))?,
        None => Metadata::default(),
    };
    Ok(Box::new(if is_safetensors {
        safetensors::open(source, metadata)?
    } else {
        dat::open(source, metadata)?
    }))
}
