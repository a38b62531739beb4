//! Text, options, progress and results of a calibration.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::search::Choice;
use crate::format::nvfp4::{Levels, Nvfp4};
use crate::model::training::MatrixId;

/// A text to calibrate with.
#[derive(Clone, Debug, Default)]
pub struct CalibrationText {
    /// Tokens of all documents, one after another.
    pub tokens: Vec<u32>,
    /// The documents' lengths.
    pub documents: Vec<usize>,
}

/// How to calibrate.
#[derive(Clone, Debug)]
pub struct CalibrateOptions {
    /// Scales of the container that is written.
    pub levels: Levels,
    /// A folder for blocks that are finished. An interrupted calibration of the same model with the same texts goes on after those that it
    /// finds there; blocks of others are replaced.
    pub finished: Option<PathBuf>,
}

/// How far a calibration is.
#[derive(Clone, Copy, Debug)]
pub struct CalibrateProgress {
    /// The block of the model at hand, from 0; the number of blocks at the end.
    pub block: usize,
    /// Blocks of the model.
    pub blocks: usize,
    /// Blocks that an earlier calibration had finished.
    pub resumed: usize,
    /// Weights that text has run through, and weights that are quantized.
    pub done: u64,
    /// The value of `done` at the end.
    pub total: u64,
}

/// A matrix that was quantized.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CalibratedMatrix {
    /// Its name.
    pub name: String,
    /// How its codes were found.
    pub choice: Choice,
    /// Relative error of its products for text that the search has not seen, with the codes of a sweep: the root of the mean square error over
    /// that of the products. Of an even sample of the rows where there are many.
    pub error_of_sweep: f64,
    /// That error with the chosen codes.
    pub error: f64,
}

/// A matrix and its report.
pub(super) struct Done {
    pub(super) id: MatrixId,
    pub(super) matrix: Nvfp4,
    pub(super) report: CalibratedMatrix,
}
