//! The text files of a Hugging Face model directory: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` and
//! `chat_template.json`.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::{ChatTemplate, Tokenizer};
use crate::base::error::{bail, err};
use crate::base::{Error, Result};

/// The tokenizer, chat template and special tokens of a model directory.
#[derive(Clone, Debug, Default)]
pub struct TextFiles {
    /// From `tokenizer.json`, if there is one.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// The model's own template, if it has one.
    pub template: Option<ChatTemplate>,
    /// `bos_token` of `tokenizer_config.json`.
    pub bos: Option<String>,
    /// `eos_token` of `tokenizer_config.json`.
    pub eos: Option<String>,
}

/// Reads the text files of `directory`. Missing files give None; broken files are errors.
pub fn read_directory(directory: &Path) -> Result<TextFiles> {
    let tokenizer = directory.join("tokenizer.json");
    let tokenizer = match tokenizer.exists() {
        true => Some(Arc::new(Tokenizer::from_file(&tokenizer)?)),
        false => None,
    };
    let config = json(&directory.join("tokenizer_config.json"))?.unwrap_or_default();
    let token = |name: &str| {
        let value = &config[name];
        value
            .as_str()
            .or_else(|| value["content"].as_str())
            .map(str::to_owned)
    };
    let (bos, eos) = (token("bos_token"), token("eos_token"));
    // The same order of preference as in transformers: a separate file first.
    let source = match text(&directory.join("chat_template.jinja"))? {
        Some(source) => Some(source),
        None => match json(&directory.join("chat_template.json"))? {
            Some(file) => source(&file["chat_template"])?,
            None => source(&config["chat_template"])?,
        },
    };
    let template = source
        .map(|s| ChatTemplate::from_jinja(&s, bos.as_deref(), eos.as_deref()))
        .transpose()
        .map_err(|e| e.within(directory.display()))?;
    Ok(TextFiles {
        tokenizer,
        template,
        bos,
        eos,
    })
}

/// A `chat_template` entry: the template, or a list of named ones of which `default` is for chat.
fn source(value: &Value) -> Result<Option<String>> {
    match value {
        Value::Null => Ok(None),
        Value::String(source) => Ok(Some(source.clone())),
        Value::Array(named) => match named.iter().find(|n| n["name"] == "default") {
            Some(Value::Object(entry)) if entry.get("template").is_some_and(Value::is_string) => {
                Ok(entry["template"].as_str().map(str::to_owned))
            }
            _ => bail!(
                CorruptFile,
                "chat_template is a list of {} templates, none of them a text named 'default'",
                named.len()
            ),
        },
        other => bail!(
            CorruptFile,
            "chat_template is neither a text nor a list of named texts but {other}"
        ),
    }
}

fn text(path: &Path) -> Result<Option<String>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(
            super::utf8(&path.display().to_string(), &bytes)?.to_owned(),
        )),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(format_args!("reading {}", path.display()), e)),
    }
}

fn json(path: &Path) -> Result<Option<Value>> {
    text(path)?
        .map(|t| serde_json::from_str(&t).map_err(|e| err!(CorruptFile, "{}: {e}", path.display())))
        .transpose()
}
