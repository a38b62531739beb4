//! Options for reading training data.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::base::Result;
use crate::base::error::bail;

/// Format of a data file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// One row per line, `prompt<TAB>target`. Lines that begin with `#` are comments; `\#` stands for a `#` at the beginning of a prompt.
    Tsv,
    /// One row per record, with fields separated by commas and named by the first record.
    Csv,
    /// One row per line: a JSON object in one of the forms of docs/training.md.
    Jsonl,
    /// A JSON array of such objects, or an object with such an array as `data`.
    Json,
    /// Plain text.
    Text,
}

impl Format {
    /// The format by a file's extension, before that of a compressed file.
    pub(super) fn of(path: &Path) -> Result<Format> {
        let stem = match Compression::of(path) {
            Compression::None => path.file_name(),
            _ => path.file_stem(),
        };
        let extension = stem.map(Path::new).and_then(Path::extension);
        let extension = extension.map(|e| e.to_string_lossy().to_lowercase());
        match extension.as_deref() {
            Some("tsv") => Ok(Format::Tsv),
            Some("csv") => Ok(Format::Csv),
            Some("jsonl" | "ndjson") => Ok(Format::Jsonl),
            Some("json") => Ok(Format::Json),
            Some("txt" | "text" | "md") => Ok(Format::Text),
            _ => bail!(
                InvalidArgument,
                "{}: its name does not say what it holds; name it .tsv, .csv, .jsonl, .json or .txt, with .gz or .zst after that if it is \
                 compressed, or give the format (--data-format)",
                path.display()
            ),
        }
    }
}

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    /// The compression by a file's extension.
    pub(super) fn of(path: &Path) -> Compression {
        let extension = path.extension().map(|e| e.to_string_lossy().to_lowercase());
        match extension.as_deref() {
            Some("gz" | "gzip") => Compression::Gzip,
            Some("zst" | "zstd") => Compression::Zstd,
            _ => Compression::None,
        }
    }
}

/// Treatment of rows that are longer than a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Long {
    /// Fail.
    #[default]
    Refuse,
    /// Cut off the end.
    Truncate,
    /// Leave the row out.
    Drop,
}

/// Treatment of the empty reasoning, as in `<think>\n\n</think>\n\n`, that a chat template writes before an answer without reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EmptyThink {
    /// Learn it with the answer.
    #[default]
    Learn,
    /// Keep it as context, as in the prompt of a model that is told not to reason.
    Given,
    /// Leave it out.
    None,
}

/// Options for reading training data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Tokens per window, at least 4.
    pub window: usize,
    /// Format of all files; `None` to go by their names.
    pub format: Option<Format>,
    /// Separator of the documents of a text. Its line ends match those of the file, LF or CRLF.
    pub separator: Option<String>,
    /// Learns prompts too, and not only answers.
    pub learn_all: bool,
    /// Treatment of empty reasoning before answers.
    pub empty_think: EmptyThink,
    /// Treatment of rows that are longer than a window. Plain texts are cut into several documents instead.
    pub long: Long,
    /// Leaves out unusable rows instead of failing.
    pub skip_bad_rows: bool,
    /// Packs several documents into a window, instead of one.
    pub packed: bool,
    /// Seed for packing, for the order of windows, and for the evaluation split.
    pub seed: u64,
}

/// Default tokens per window.
const WINDOW: usize = 2048;

/// Tokens per window for a model with this many positions: the wanted number, or the default.
pub fn window(wanted: Option<usize>, positions: usize) -> Result<usize> {
    match wanted {
        None => Ok(WINDOW.min(positions)),
        Some(window) if window <= positions => Ok(window),
        Some(window) => bail!(
            InvalidArgument,
            "a window of {window} tokens (--window), and the model's context has {positions}"
        ),
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            window: WINDOW,
            format: None,
            separator: None,
            learn_all: false,
            empty_think: EmptyThink::default(),
            long: Long::default(),
            skip_bad_rows: false,
            packed: true,
            seed: 0,
        }
    }
}
