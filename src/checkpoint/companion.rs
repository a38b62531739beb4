//! Files beside the weights: `config.json` and the tokenizer's files. Lists and reads them; knows no weights.

use std::path::Path;

use super::{Metadata, TokenizerSource};
use crate::base::error::{Error, err};
use crate::base::{Result, file};

/// Files that describe a model's weights. They are not copied when a model is rewritten, because they would describe other weights: the
/// writer of each format creates its own.
///
/// Opening a checkpoint reads `config.json`. Nothing here reads `hf_quant_config.json`: the names and types of the tensors show how they
/// are quantized. [`ModelOptWriter`](super::ModelOptWriter) writes it for TensorRT-LLM and vLLM, which do read it.
pub const DESCRIPTION_FILES: [&str; 2] = ["config.json", "hf_quant_config.json"];

/// Files beside a model's weights that say how it reads and writes text. They are copied, if present, when a model is rewritten.
///
/// Loading a model reads `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` (or else `chat_template.json`), [`TOOL_TEMPLATE`]
/// and `generation_config.json`. The others are for other programs that load the directory, such as transformers.
pub const TOKENIZER_FILES: [&str; 10] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
];

/// The template for conversations with tools, in the folder where transformers saves additional templates.
pub const TOOL_TEMPLATE: &str = "additional_chat_templates/tool_use.jinja";

/// The config and tokenizer found in `directory`.
pub(super) fn read(directory: &Path) -> Result<Metadata> {
    let path = directory.join("config.json");
    let config = match file::read(&path) {
        Ok(text) => Some(
            serde_json::from_slice(&text)
                .map_err(|e| err!(CorruptFile, "{}: {e}", path.display()))?,
        ),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
        Err(e) => return Err(Error::io(format_args!("reading {}", path.display()), e)),
    };
    let tokenizer = directory.join("tokenizer.json");
    let is_there = file::exists(&tokenizer)
        .map_err(|e| Error::io(format_args!("reading {}", tokenizer.display()), e))?;
    let tokenizer = if is_there {
        TokenizerSource::Directory(directory.to_owned())
    } else {
        TokenizerSource::None
    };
    Ok(Metadata { config, tokenizer })
}
