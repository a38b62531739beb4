//! Models in NVFP4 by what they make of text: the text of a calibration, from files or the default one, in windows of tokens; and a checkpoint
//! that a conversion writes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::data::{self, Data, Long};
use crate::base::Result;
use crate::base::error::bail;
use crate::checkpoint::Checkpoint;
use crate::model::calibrate::{
    CalibrateOptions, CalibrateProgress, Calibrated, CalibratedMatrix, CalibrationText, calibrate,
    folder_of, forget,
};
use crate::model::convert::{ConvertOptions, ConvertReport, check_destination};
use crate::model::training::Source;
use crate::ops::Device;

/// The default text: prose, 38 languages, code, documentation, and conversations in the model's own template. README.md beside it says where
/// it is from.
const DEFAULT: &str = include_str!("default.jsonl");

/// Windows and their tokens where nothing is said, on a CPU and on a GPU.
const ON_CPU: (usize, usize) = (32, 1024);
const ON_GPU: (usize, usize) = (128, 2048);

/// The text that a model is calibrated with.
#[derive(Clone, Debug, Default)]
pub struct TextOptions {
    /// Files with rows as for training. The default text gives the windows that they do not fill, and all of them where there are no files.
    pub files: Vec<PathBuf>,
    /// Windows, at most. None for 32 on a CPU and 128 on a GPU.
    pub windows: Option<usize>,
    /// Tokens in a window. None for 1,024 on a CPU and 2,048 on a GPU, or as many as the model has positions.
    pub window: Option<usize>,
}

/// A checkpoint that was calibrated for a conversion.
pub struct Calibration {
    /// What the conversion writes.
    pub checkpoint: Calibrated,
    /// What became of each matrix.
    pub matrices: Vec<CalibratedMatrix>,
    source: Arc<Source>,
    finished: PathBuf,
}

impl Calibration {
    /// `checkpoint` with its linear weights in NVFP4, by what they multiply when text runs through the model on `device`, for a conversion to
    /// `destination`, which is refused first if it would be. Blocks that are finished are kept in a folder beside that until [`Calibration::written`], so that the same call goes on
    /// where an interrupted one was.
    pub fn new(
        checkpoint: Arc<dyn Checkpoint>,
        destination: &Path,
        conversion: &ConvertOptions,
        device: &Device,
        text: &TextOptions,
        progress: &mut dyn FnMut(CalibrateProgress),
    ) -> Result<Calibration> {
        check_destination(&*checkpoint, destination, conversion)?;
        let source = Arc::new(Source::new(checkpoint)?);
        let texts = texts(&source, device, text)?;
        let finished = folder_of(destination);
        let options = CalibrateOptions {
            levels: conversion.quantize.levels,
            finished: Some(finished.clone()),
        };
        let host = device.host_cpu()?;
        let (checkpoint, matrices) = calibrate(device, &host, &source, &texts, &options, progress)?;
        Ok(Calibration {
            checkpoint,
            matrices,
            source,
            finished,
        })
    }

    /// Counts the matrices that were calibrated, which a conversion finds in NVFP4, as ones that were quantized.
    pub fn count_in(&self, report: &mut ConvertReport) {
        let quantized = self.checkpoint.quantized();
        report.quantized += quantized;
        report.kept_nvfp4 -= quantized;
        let entries = self.source.checkpoint().entries().iter();
        report.bytes_in = entries.map(|e| e.bytes).sum();
    }

    /// Removes what was kept for an interruption, as the conversion has written its result.
    pub fn written(&self) {
        forget(&self.finished, &self.source);
    }
}

/// The windows of a text to calibrate with. What is packed together follows from a fixed seed.
pub fn texts(
    source: &Source,
    device: &Device,
    options: &TextOptions,
) -> Result<Vec<CalibrationText>> {
    let text = source.text()?;
    let positions = source.spec().max_positions;
    let (windows, window) = if device.is_cuda() { ON_GPU } else { ON_CPU };
    let windows = options.windows.unwrap_or(windows);
    if windows < 2 {
        bail!(
            InvalidArgument,
            "{windows} windows to calibrate with; there must be two at least, one of which the search does not see"
        );
    }
    if let Some(window) = options.window
        && window > positions
    {
        bail!(
            InvalidArgument,
            "a window of {window} tokens to calibrate with, and the model's context has {positions}"
        );
    }
    let reading = data::Options {
        window: options.window.unwrap_or(window.min(positions)),
        learn_all: true,
        long: Long::Truncate,
        ..data::Options::default()
    };
    let vocabulary = source.spec().vocab_size;
    let mut texts = match &options.files[..] {
        [] => Vec::new(),
        files => chosen(&data::read(files, &text, vocabulary, &reading)?, windows)?,
    };
    if texts.len() < windows {
        if !texts.is_empty() {
            let tokens: usize = texts.iter().map(|t| t.tokens.len()).sum();
            tracing::warn!(
                "the text to calibrate with has {tokens} tokens, which fill {} of {windows} windows; the default text gives the rest",
                texts.len()
            );
        }
        let default =
            data::read_embedded("the default text", DEFAULT, &text, vocabulary, &reading)?;
        texts.extend(chosen(&default, windows - texts.len())?);
    }
    Ok(texts)
}

/// So many windows at most, from all of the data.
fn chosen(data: &Data, windows: usize) -> Result<Vec<CalibrationText>> {
    let packed = data.windows()?;
    let count = packed.len().min(windows);
    let chosen = (0..count).map(|i| &packed.all()[i * packed.len() / count]);
    let text = |window: &data::Window| CalibrationText {
        tokens: window.tokens.clone(),
        documents: window.documents.clone(),
    };
    Ok(chosen.map(text).collect())
}
