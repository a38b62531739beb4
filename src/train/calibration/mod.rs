//! Text for a calibration: rows of files, or the default ones, in windows of tokens.

use std::path::PathBuf;

use super::data::{self, Long};
use crate::base::Result;
use crate::base::error::bail;
use crate::model::calibrate::CalibrationText;
use crate::model::training::Source;

/// The default text: prose, 38 languages, code, documentation, and conversations in the model's own template. README.md beside it says where
/// it is from.
const DEFAULT: &str = include_str!("default.jsonl");

/// Tokens of a window, where nothing else is said and the model has as many positions.
const WINDOW: usize = 1024;

/// So many windows at most, of `window` tokens or a usual number, from all of `files`, which hold rows as for training; from the default text
/// if there are none. What is packed together follows from a fixed seed.
pub fn texts(
    source: &Source,
    files: &[PathBuf],
    windows: usize,
    window: Option<usize>,
) -> Result<Vec<CalibrationText>> {
    let text = source.text()?;
    let vocabulary = source.spec().vocab_size;
    let positions = source.spec().max_positions;
    if let Some(window) = window
        && window > positions
    {
        bail!(
            InvalidArgument,
            "a window of {window} tokens to calibrate with, and the model's context has {positions}"
        );
    }
    let options = data::Options {
        window: window.unwrap_or(WINDOW.min(positions)),
        learn_all: true,
        long: Long::Truncate,
        ..data::Options::default()
    };
    let data = match files {
        [] => data::read_embedded("the default text", DEFAULT, &text, vocabulary, &options)?,
        files => data::read(files, &text, vocabulary, &options)?,
    };
    let packed = data.windows()?;
    let count = packed.len().min(windows);
    let chosen = (0..count).map(|i| &packed.all()[i * packed.len() / count]);
    let text = |window: &data::Window| CalibrationText {
        tokens: window.tokens.clone(),
        documents: window.documents.clone(),
    };
    Ok(chosen.map(text).collect())
}
