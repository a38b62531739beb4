//! Checkpoint files: readers and writers behind one trait, validated before anything is allocated and read at positions. A weight stored as
//! several tensors (codes, block scales, global scale) appears as one logical entry under its Hugging Face name. Knows nothing of models or
//! devices; no other folder knows a file format.

mod companion;
mod dat;
mod entry;
mod folder;
mod ggml;
mod gguf;
mod int4;
mod keys;
mod layout;
mod method;
mod names;
mod order;
mod packed;
mod safetensors;
pub mod schema;
mod source;
mod tensors;
mod write;

use std::path::Path;
use std::sync::Arc;

use crate::base::error::{Error, bail, err};
use crate::base::files::{Files, GivenFiles};
use crate::base::{Result, threads};
use source::Source;

pub use companion::{
    DESCRIPTION_FILES, EMBEDDING_FILES, POOLING_FILE, TOKENIZER_FILES, TOOL_TEMPLATE,
};
pub use entry::{
    Checkpoint, Encoding, Entry, Metadata, Part, RareEntries, TokenizerSource, Unreadable,
    Vocabulary, no_tokenizer,
};
pub use folder::{Weights, gguf_parts, instead_of_weights, weights};
pub use ggml::GgmlType;
pub use gguf::{GgufFamily, GgufForm, GgufKind, GgufMetadata, GgufValueHeads};
pub use method::check_method;
pub use names::{is_of_text_model, logical};
pub use packed::{
    PACKED_FILE, PackedContents, PackedFile, PackedMatrix, PackedShape, PackedWriter, SourceFile,
    packed_place,
};
pub use write::{
    DatWriter, ModelOptWriter, NewModel, Planned, Writer, check_not_read, missing_companions,
    write_companions,
};

/// Opens a checkpoint: a `.dat`, `.safetensors` or `.gguf` file, a safetensors index, or a directory with one of them or a set of files;
/// [`weights`] says which of its files are opened. Any part of a split GGUF model opens the whole model. `config.json` and the tokenizer
/// are taken from the directory; a GGUF file carries its own, which are translated to Hugging Face terms if its architecture is one of
/// `families`.
pub fn open(path: &Path, families: &[GgufFamily]) -> Result<Box<dyn Checkpoint>> {
    threads::with_stack(|| open_here(path, families))
}

fn open_here(path: &Path, families: &[GgufFamily]) -> Result<Box<dyn Checkpoint>> {
    let info = std::fs::metadata(path)
        .map_err(|e| Error::io(format_args!("opening {}", path.display()), e))?;
    match info.is_dir() {
        true => open_directory(&Files::Disk, path, families),
        false => open_file(&Files::Disk, path, families),
    }
}

/// Opens the model whose files the host gives, by the rules for the files of a directory: see [`open`]. They are read as long as the
/// checkpoint lives.
pub fn open_given(files: &GivenFiles, families: &[GgufFamily]) -> Result<Box<dyn Checkpoint>> {
    let files = Files::Given(files.clone());
    threads::with_stack(|| open_directory(&files, Path::new(""), families))
}

fn open_directory(
    files: &Files,
    directory: &Path,
    families: &[GgufFamily],
) -> Result<Box<dyn Checkpoint>> {
    let paths = folder::find_in_directory(files, directory)?;
    match &paths[..] {
        [first, _, ..] if first.extension().is_some_and(|e| e == "safetensors") => {
            let metadata = companion::read(files, directory)?;
            let shards = safetensors::open_shards(files, &paths, metadata)?;
            Ok(Box::new(shards))
        }
        [first, ..] => {
            safetensors::warn_of_ignored_index(files, first);
            open_file(files, first, families)
        }
        [] => Err(err!(Internal, "a model without files was found")),
    }
}

fn open_file(files: &Files, file: &Path, families: &[GgufFamily]) -> Result<Box<dyn Checkpoint>> {
    if file.extension().is_some_and(|e| e == "json") {
        let metadata = companion::read(files, files.directory_of(file))?;
        return Ok(Box::new(safetensors::open_index(files, file, metadata)?));
    }
    open_source(Source::open(files, file)?, Some((files, file)), families)
}

/// Reads the metadata of a model in a directory. Its weights need not be present.
pub fn describe(directory: &Path) -> Result<Metadata> {
    companion::read(&Files::Disk, directory)
}

/// Opens the content of a complete `.dat`, `.safetensors` or `.gguf` file in memory. `name` stands for the file in messages; its extension
/// identifies `.dat`, which has no magic number. `families` are as in [`open`].
pub fn open_bytes(
    name: &str,
    bytes: Vec<u8>,
    families: &[GgufFamily],
) -> Result<Box<dyn Checkpoint>> {
    open_source(Source::given(name, Arc::new(bytes))?, None, families)
}

fn open_source(
    source: Source,
    place: Option<(&Files, &Path)>,
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
        return Ok(Box::new(gguf::open(source, place, families)?));
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
    let metadata = match place {
        Some((files, file)) => companion::read(files, files.directory_of(file))?,
        None => Metadata::default(),
    };
    Ok(Box::new(if is_safetensors {
        safetensors::open(source, metadata)?
    } else {
        dat::open(source, metadata)?
    }))
}
