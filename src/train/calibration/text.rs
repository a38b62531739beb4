//! Calibration text: rows of files or the default text, in windows of tokens.

use std::path::PathBuf;

use crate::base::error::bail;
use crate::base::{Result, call};
use crate::model::calibrate::CalibrationText;
use crate::model::training::Source;
use crate::ops::Device;
use crate::train::data::{self, Long, Window};

/// The default text: prose, 38 languages, code, documentation, and conversations in the model's own template. The README.md beside it names
/// its sources.
const DEFAULT: &str = include_str!("default.jsonl");

/// Default windows and tokens per window, on a CPU and on a GPU.
const ON_CPU: (usize, usize) = (32, 1024);
const ON_GPU: (usize, usize) = (128, 2048);

/// Options for calibration text.
#[derive(Clone, Debug, Default)]
pub struct TextOptions {
    /// Files with rows as for training. The default text supplies the remaining windows, or all of them if there are no files.
    pub files: Vec<PathBuf>,
    /// Upper limit of windows. `None` for 32 on a CPU and 128 on a GPU.
    pub windows: Option<usize>,
    /// Tokens per window. `None` for 1,024 on a CPU and 2,048 on a GPU, or the model's number of positions if that is less.
    pub window: Option<usize>,
}

/// The calibration windows of a text, in an order that follows from a fixed seed.
pub fn texts(
    source: &Source,
    device: &Device,
    options: &TextOptions,
) -> Result<Vec<CalibrationText>> {
    let count = options.count(device);
    if count < 2 {
        bail!(
            InvalidArgument,
            "{count} windows to calibrate with; there must be two at least, one of which the search does not see"
        );
    }
    let mut all = chosen(options.of_files(source, device)?, count);
    if all.len() < count {
        if !all.is_empty() {
            let tokens: usize = all.iter().map(|w| w.tokens.len()).sum();
            tracing::warn!(
                "the text to calibrate with has {tokens} tokens, which fill {} of {count} windows; the default text gives the rest",
                all.len()
            );
        }
        all.extend(chosen(
            default_windows(source, device, options)?,
            count - all.len(),
        ));
    }
    let text = |window: Window| CalibrationText {
        tokens: window.tokens,
        documents: window.documents,
    };
    Ok(all.into_iter().map(text).collect())
}

/// All windows of a text. The default text supplies the remaining ones if the files fill too few.
pub(super) fn windows(
    source: &Source,
    device: &Device,
    options: &TextOptions,
) -> Result<Vec<Window>> {
    let mut all = options.of_files(source, device)?;
    if all.len() < options.count(device) {
        all.extend(default_windows(source, device, options)?);
    }
    Ok(all)
}

fn default_windows(source: &Source, device: &Device, options: &TextOptions) -> Result<Vec<Window>> {
    let (text, vocabulary) = (source.text()?, source.spec().vocab_size);
    let how = options.reading(source, device)?;
    let read = || data::read_embedded("the default text", DEFAULT, &text, vocabulary, &how);
    let data = call::in_silence(read)?;
    Ok(data.windows()?.all().to_vec())
}

/// At most `most` windows, evenly spaced.
fn chosen(windows: Vec<Window>, most: usize) -> Vec<Window> {
    let (all, count) = (windows.len(), windows.len().min(most));
    let mut chosen = (0..count).map(|i| i * all / count).peekable();
    let numbered = windows.into_iter().enumerate();
    let is_chosen = |&(i, _): &(usize, Window)| chosen.next_if_eq(&i).is_some();
    numbered
        .filter(is_chosen)
        .map(|(_, window)| window)
        .collect()
}

impl TextOptions {
    /// Upper limit of windows.
    fn count(&self, device: &Device) -> usize {
        self.windows.unwrap_or(usual(device).0)
    }

    fn reading(&self, source: &Source, device: &Device) -> Result<data::Options> {
        let positions = source.spec().max_positions;
        if let Some(window) = self.window
            && window > positions
        {
            bail!(
                InvalidArgument,
                "a window of {window} tokens to calibrate with, and the model's context has {positions}"
            );
        }
        Ok(data::Options {
            window: self.window.unwrap_or(usual(device).1.min(positions)),
            learn_all: true,
            long: Long::Truncate,
            ..data::Options::default()
        })
    }

    fn of_files(&self, source: &Source, device: &Device) -> Result<Vec<Window>> {
        let how = self.reading(source, device)?;
        if self.files.is_empty() {
            return Ok(Vec::new());
        }
        let (text, vocabulary) = (source.text()?, source.spec().vocab_size);
        // The progress is that of the calibration.
        let data = call::in_silence(|| data::read(&self.files, &text, vocabulary, &how))?;
        Ok(data.windows()?.all().to_vec())
    }
}

/// Default windows and tokens per window.
fn usual(device: &Device) -> (usize, usize) {
    match device.is_cuda() {
        true => ON_GPU,
        false => ON_CPU,
    }
}
