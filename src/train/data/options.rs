//! How data is read.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::base::Result;
use crate::base::error::bail;

/// What a file is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// A line a row, `prompt<TAB>target`; lines that begin with `#` are comments.
    Tsv,
    /// A line a row: a JSON object with `messages`, with `prompt` and `completion`, or with `text`.
    Jsonl,
    /// A text.
    Text,
}

impl Format {
    /// What the name of a file says.
    pub(super) fn of(path: &Path) -> Result<Format> {
        let extension = path.extension().map(|e| e.to_string_lossy().to_lowercase());
        match extension.as_deref() {
            Some("tsv") => Ok(Format::Tsv),
            Some("jsonl" | "ndjson") => Ok(Format::Jsonl),
            Some("txt" | "text" | "md") => Ok(Format::Text),
            _ => bail!(
                InvalidArgument,
                "{}: its name does not say what it holds; name it .tsv, .jsonl or .txt, or give the format (--data-format)",
                path.display()
            ),
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

/// How data is read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Tokens of a window, at least 4.
    pub window: usize,
    /// What all files are made of; by their names if `None`.
    pub format: Option<Format>,
    /// What stands between the documents of a text.
    pub separator: Option<String>,
    /// Learns prompts too, and not only answers.
    pub learn_all: bool,
    /// What becomes of rows that are longer than a window. Texts are cut into several.
    pub long: Long,
    /// Leaves out rows that cannot be used, rather than refuse them all.
    pub skip_bad_rows: bool,
    /// Puts several documents in a window, or one.
    pub packed: bool,
    /// Chooses what is packed together, the order of windows, and what is set aside for evaluation.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            window: 2048,
            format: None,
            separator: None,
            learn_all: false,
            long: Long::default(),
            skip_bad_rows: false,
            packed: true,
            seed: 0,
        }
    }
}
