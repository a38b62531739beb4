//! The files that stand beside weights: `config.json` and the tokenizer's. Lists and reads them; knows no weights.

use std::path::Path;

use super::{Metadata, TokenizerSource};
use crate::base::error::{Error, err};
use crate::base::{Result, file};

/// The files that describe a model's weights. They are not copied when a model is rewritten, as they describe other weights
/// then: its writer makes the ones that its format has.
///
/// Opening a checkpoint reads `config.json`. Nothing here reads `hf_quant_config.json`: the names and types of the tensors
/// tell how they are quantized. [`ModelOptWriter`](super::ModelOptWriter) writes it for TensorRT-LLM and vLLM, which do.
pub const DESCRIPTION_FILES: [&str; 2] = ["config.json", "hf_quant_config.json"];

/// The files beside a model's weights that say how it reads and writes text. They are copied when a model is rewritten, where
/// they exist.
///
/// Loading a model reads `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` (`chat_template.json` where there is
/// none), [`TOOL_TEMPLATE`] and `generation_config.json`. The others are for the programs that load the same directory, transformers among them.
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

/// The template for conversations with tools, where transformers saves several templates: a file of a folder.
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
