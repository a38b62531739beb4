//! The text files of a Hugging Face model directory: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` with
//! `additional_chat_templates`, and `chat_template.json`.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::{ChatTemplate, TokenRole, Tokenizer};
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::base::files::Files;

/// The tokenizer, chat template and special tokens of a model directory.
#[derive(Clone, Debug, Default)]
pub struct TextFiles {
    /// From `tokenizer.json`, if there is one.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// The model's own template, if it has one. It may be broken: see [`ChatTemplate::fault`].
    pub template: Option<ChatTemplate>,
    /// `bos_token` of `tokenizer_config.json`.
    pub bos: Option<String>,
    /// `eos_token` of `tokenizer_config.json`.
    pub eos: Option<String>,
    /// Tokens with a role, by `tokenizer_config.json`, or by `special_tokens_map.json` where that names none.
    pub roles: Vec<(TokenRole, u32)>,
}

/// Reads the text files in `directory` of `files`. Missing files give `None`. A broken file is an error, except for a template: that fails
/// when it is rendered.
pub fn read_files(files: &Files, directory: &Path) -> Result<TextFiles> {
    let path = directory.join("tokenizer.json");
    let tokenizer = match files.read(&path)? {
        Some(json) => {
            let tokenizer = Tokenizer::from_json(&json).map_err(|e| e.within(path.display()))?;
            Some(Arc::new(tokenizer))
        }
        None => None,
    };
    let config = json(files, &directory.join("tokenizer_config.json"))?.unwrap_or_default();
    let (bos, eos) = (
        token_in(&config, "bos_token"),
        token_in(&config, "eos_token"),
    );
    let roles = match &tokenizer {
        Some(tokenizer) => roles(files, directory, &config, tokenizer),
        None => Vec::new(),
    };
    let template = match sources(files, directory, &config) {
        Ok(None) => None,
        Ok(Some(sources)) => Some(ChatTemplate::named(
            &sources,
            bos.as_deref(),
            eos.as_deref(),
        )),
        Err(e) => Some(ChatTemplate::broken(e)),
    };
    Ok(TextFiles {
        tokenizer,
        template,
        bos,
        eos,
        roles,
    })
}

/// The name of a token in the file `config`.
fn token_in(config: &Value, key: &str) -> Option<String> {
    let value = &config[key];
    let name = value.as_str().or_else(|| value["content"].as_str());
    name.map(str::to_owned)
}

/// The tokens with a role. A map of special tokens that cannot be read causes a warning.
fn roles(
    files: &Files,
    directory: &Path,
    config: &Value,
    tokenizer: &Tokenizer,
) -> Vec<(TokenRole, u32)> {
    let map = json(files, &directory.join("special_tokens_map.json")).unwrap_or_else(|e| {
        tracing::warn!("{e}; roles of special tokens may be missing");
        None
    });
    let map = map.unwrap_or_default();
    let role = |(key, role): (&str, TokenRole)| {
        let name = token_in(config, key).or_else(|| token_in(&map, key))?;
        Some((role, tokenizer.id_of(&name)?))
    };
    TokenRole::KEYS.into_iter().filter_map(role).collect()
}

/// The template for conversations with tools, where transformers saves several templates.
const TOOL_TEMPLATE: &str = "additional_chat_templates/tool_use.jinja";

/// The templates of a directory, by name, in the order of preference of transformers: separate files first.
fn sources(
    files: &Files,
    directory: &Path,
    config: &Value,
) -> Result<Option<Vec<(String, String)>>> {
    let mut found = Vec::new();
    if let Some(source) = text(files, &directory.join("chat_template.jinja"))? {
        found.push(("default".to_owned(), source));
    }
    if let Some(source) = text(files, &directory.join(TOOL_TEMPLATE))? {
        found.push(("tool_use".to_owned(), source));
    }
    if !found.is_empty() {
        return Ok(Some(found));
    }
    match json(files, &directory.join("chat_template.json"))? {
        Some(file) => named(&file["chat_template"]),
        None => named(&config["chat_template"]),
    }
}

/// A `chat_template` entry: the default template, or a list of templates with names.
fn named(value: &Value) -> Result<Option<Vec<(String, String)>>> {
    let entry = |entry: &Value| {
        let text = |key: &str| entry[key].as_str().map(str::to_owned);
        Some((text("name")?, text("template")?))
    };
    match value {
        Value::Null => Ok(None),
        Value::String(source) => Ok(Some(vec![("default".to_owned(), source.clone())])),
        Value::Array(entries) => {
            let found: Vec<_> = entries.iter().filter_map(entry).collect();
            if found.is_empty() {
                bail!(
                    CorruptFile,
                    "chat_template is a list of {}, none of them a text with a name",
                    entries.len()
                );
            }
            Ok(Some(found))
        }
        other => bail!(
            CorruptFile,
            "chat_template is neither a text nor a list of named texts but {other}"
        ),
    }
}

fn text(files: &Files, path: &Path) -> Result<Option<String>> {
    files
        .read(path)?
        .map(|bytes| super::utf8(&path.display().to_string(), &bytes).map(str::to_owned))
        .transpose()
}

fn json(files: &Files, path: &Path) -> Result<Option<Value>> {
    text(files, path)?
        .map(|t| serde_json::from_str(&t).map_err(|e| err!(CorruptFile, "{}: {e}", path.display())))
        .transpose()
}
