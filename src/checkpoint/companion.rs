//! Files beside the weights: `config.json` and the tokenizer's files. Lists and reads them; knows no weights.

use std::borrow::Cow;
use std::path::Path;

use super::{Metadata, TokenizerSource};
use crate::base::Result;
use crate::base::error::err;
use crate::base::files::Files;

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

/// Files with a tokenizer in forms that are not read: of Mistral, SentencePiece, tiktoken and GPT-2.
const OTHER_TOKENIZERS: [&str; 4] = [
    "tekken.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
];

/// The template for conversations with tools, in the folder where transformers saves additional templates.
pub const TOOL_TEMPLATE: &str = "additional_chat_templates/tool_use.jinja";

/// Files of sentence-transformers beside a model's weights, which say how it embeds texts. They are copied, if present, when a model is
/// rewritten.
pub const EMBEDDING_FILES: [&str; 4] = [
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    POOLING_FILE,
];

/// The one of these that says how rows become an embedding, in a folder of its own.
pub const POOLING_FILE: &str = "1_Pooling/config.json";

/// The config, the tokenizer and the files of an embedding found in `directory` of `files`.
pub(super) fn read(files: &Files, directory: &Path) -> Result<Metadata> {
    let path = directory.join("config.json");
    let config = match files.read(&path)? {
        Some(text) => Some(
            serde_json::from_slice(&with_tagged_floats(&text))
                .map_err(|e| err!(CorruptFile, "{}: {e}", path.display()))?,
        ),
        None => None,
    };
    let is_there = files.exists(&directory.join("tokenizer.json"))?;
    let tokenizer = match files {
        _ if !is_there => other_tokenizer(files, directory)?,
        Files::Disk => TokenizerSource::Directory(directory.to_owned()),
        Files::Given(files) => TokenizerSource::Given(files.clone()),
    };
    Ok(Metadata {
        config,
        tokenizer,
        embedding: read_present(files, directory, &EMBEDDING_FILES)?,
    })
}

/// The source of a tokenizer without `tokenizer.json`.
fn other_tokenizer(files: &Files, directory: &Path) -> Result<TokenizerSource> {
    for name in OTHER_TOKENIZERS {
        if files.exists(&directory.join(name))? {
            return Ok(TokenizerSource::Unread(name));
        }
    }
    Ok(TokenizerSource::None)
}

/// Reads the files of `names` that are in `directory` of `files`.
pub(super) fn read_present(
    files: &Files,
    directory: &Path,
    names: &[&str],
) -> Result<Vec<(String, Vec<u8>)>> {
    let mut present = Vec::new();
    for &name in names {
        if let Some(content) = files.read(&directory.join(name))? {
            present.push((name.to_owned(), content));
        }
    }
    Ok(present)
}

/// Python's JSON with the numbers that JSON lacks in the form that transformers 5 gives them: `{"__float__": "Infinity"}`.
pub(super) fn with_tagged_floats(text: &[u8]) -> Cow<'_, [u8]> {
    const BARE: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];
    let mut tagged = Vec::new();
    let (mut copied, mut at, mut in_string) = (0, 0, false);
    while at < text.len() {
        match text[at] {
            b'\\' if in_string => at += 1,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            _ => {
                if let Some(bare) = BARE.iter().find(|bare| text[at..].starts_with(bare)) {
                    tagged.extend_from_slice(&text[copied..at]);
                    tagged.extend_from_slice(b"{\"__float__\": \"");
                    tagged.extend_from_slice(bare);
                    tagged.extend_from_slice(b"\"}");
                    at += bare.len();
                    copied = at;
                    continue;
                }
            }
        }
        at += 1;
    }
    match copied {
        0 => Cow::Borrowed(text),
        _ => {
            tagged.extend_from_slice(&text[copied..]);
            Cow::Owned(tagged)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_python_are_tagged_outside_of_texts() {
        let of = |text: &str| -> serde_json::Value {
            serde_json::from_slice(&with_tagged_floats(text.as_bytes())).unwrap()
        };
        let tag = |name: &str| serde_json::json!({"__float__": name});
        let read = of(
            r#"{"limit": [0.0, Infinity], "text": "a \"NaN\" Infinity \\", "low": -Infinity, "none": NaN}"#,
        );
        assert_eq!(read["limit"], serde_json::json!([0.0, tag("Infinity")]));
        assert_eq!(read["text"], r#"a "NaN" Infinity \"#);
        assert_eq!(
            [&read["low"], &read["none"]],
            [&tag("-Infinity"), &tag("NaN")]
        );
    }

    #[test]
    fn json_without_such_numbers_is_not_copied() {
        let text = br#"{"name": "Infinity", "size": 1e3}"#;
        assert!(matches!(with_tagged_floats(text), Cow::Borrowed(same) if same == text));
    }
}
