//! The files that stand beside weights: `config.json` and the tokenizer's. Finds, reads and lists them; knows no weights.

use std::path::{Path, PathBuf};

use super::{Metadata, TokenizerSource};
use crate::base::Result;
use crate::base::error::{Error, bail, err};

/// Files that go with a model when it is rewritten, where they exist.
pub(super) const TOKENIZER_FILES: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
];

/// The config and tokenizer found in `directory`.
pub(super) fn read(directory: &Path) -> Result<Metadata> {
    let path = directory.join("config.json");
    let config = match std::fs::read(&path) {
        Ok(text) => Some(
            serde_json::from_slice(&text)
                .map_err(|e| err!(CorruptFile, "{}: {e}", path.display()))?,
        ),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
        Err(e) => return Err(Error::io(format_args!("reading {}", path.display()), e)),
    };
    let tokenizer = if directory.join("tokenizer.json").is_file() {
        TokenizerSource::Directory(directory.to_owned())
    } else {
        TokenizerSource::None
    };
    Ok(Metadata { config, tokenizer })
}

/// The weights file of a model directory: the safetensors index, else `model.safetensors`, else its one weights file.
pub(super) fn find_in_directory(directory: &Path) -> Result<PathBuf> {
    for name in ["model.safetensors.index.json", "model.safetensors"] {
        let path = directory.join(name);
        if path.is_file() {
            return Ok(path);
        }
    }
    let listing = |e| Error::io(format_args!("listing {}", directory.display()), e);
    for extension in ["safetensors", "dat", "gguf"] {
        let mut found = Vec::new();
        for item in std::fs::read_dir(directory).map_err(listing)? {
            let path = item.map_err(listing)?.path();
            if path.extension().is_some_and(|e| e == extension) && path.is_file() {
                found.push(path);
            }
        }
        found.sort();
        match found.len() {
            0 => {}
            1 => return Ok(found.remove(0)),
            n => bail!(
                InvalidArgument,
                "{} holds {n} .{extension} files, among them {}; name the one to open",
                directory.display(),
                found[0].file_name().unwrap_or_default().display()
            ),
        }
    }
    bail!(
        NotFound,
        "{} holds no model: no .safetensors, .dat or .gguf file",
        directory.display()
    )
}
