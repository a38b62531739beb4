//! How data is read.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::base::Result;
use crate::base::error::bail;

/// What a file is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// A line a row, `prompt<TAB>target`; lines that begin with `#` are comments, and `\#` stands for a `#` at the beginning of a prompt.
    Tsv,
    /// A row a record, with commas between its fields, whose names are in the first record.
    Csv,
    /// A line a row: a JSON object of one of the forms in docs/training.md.
    Jsonl,
    /// An array of such objects, or an object with one as `data`.
    Json,
    /// A text.
    Text,
}

impl Format {
    /// The format that a file's name tells, before the ending of a compressed one.
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
    /// The compression that a file's name tells.
    pub(super) fn of(path: &Path) -> Compression {
        let extension = path.extension().map(|e| e.to_string_lossy().to_lowercase());
        match extension.as_deref() {
            Some("gz" | "gzip") => Compression::Gzip,
            Some("zst" | "zstd") => Compression::Zstd,
            _ => Compression::None,
        }
    }
}

/// What becomes of a row that is longer than a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Long {
    /// It is an error.
    #[default]
    Refuse,
    /// Its end is cut off.
    Truncate,
    /// It is left out.
    Drop,
}

/// Treatment of the empty reasoning, as in `<think>\n\n</think>\n\n`, that a chat template writes before an answer without reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EmptyThink {
    /// It is learned with the answer.
    #[default]
    Learn,
    /// It is context, as the prompt of a model that is told not to reason has it.
    Given,
    /// It is left out.
    None,
}

/// How data is read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Tokens of a window, at least 4.
    pub window: usize,
    /// What all files are made of; by their names if `None`.
    pub format: Option<Format>,
    /// Separator of the documents of a text. Its line ends match those of the file, LF or CRLF.
    pub separator: Option<String>,
    /// Learns prompts too, and not only answers.
    pub learn_all: bool,
    /// Treatment of empty reasoning before answers.
    pub empty_think: EmptyThink,
    /// What becomes of rows that are longer than a window. Texts are cut into several.
    pub long: Long,
    /// Leaves out rows that cannot be used, rather than refuse them all.
    pub skip_bad_rows: bool,
    /// Puts several documents in a window, or one.
    pub packed: bool,
    /// Chooses what is packed together, the order of windows, and what is set aside for evaluation.
    pub seed: u64,
}

/// Tokens of a window, where nothing else is said.
const WINDOW: usize = 2048;

/// Tokens of a window for a model with so many positions: those that are wanted, or a usual number.
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
