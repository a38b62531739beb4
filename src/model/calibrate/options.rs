//! Types of a calibration: texts, options, progress and results.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::search::Choice;
use crate::format::nvfp4::{Levels, Nvfp4};
use crate::model::training::MatrixId;

/// A text to calibrate with.
#[derive(Clone, Debug, Default)]
pub struct CalibrationText {
    /// Tokens of all documents, concatenated.
    pub tokens: Vec<u32>,
    /// The documents' lengths.
    pub documents: Vec<usize>,
}

/// Options of a calibration.
#[derive(Clone, Debug)]
pub struct CalibrateOptions {
    /// Scale levels of the container that is written.
    pub levels: Levels,
    /// Folder for finished blocks. An interrupted calibration of the same model with the same texts continues after the blocks in it;
    /// blocks of other calibrations are replaced.
    pub finished: Option<PathBuf>,
}

/// Progress of a calibration.
#[derive(Clone, Copy, Debug)]
pub struct CalibrateProgress {
    /// The current block, from 0; the number of blocks at the end.
    pub block: usize,
    /// Number of blocks in the model.
    pub blocks: usize,
    /// Blocks that an earlier calibration finished.
    pub resumed: usize,
    /// Number of weights that text has run through, plus number of quantized weights.
    pub done: u64,
    /// The value of `done` at the end.
    pub total: u64,
}

/// A matrix that was quantized.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CalibratedMatrix {
    /// Its name.
    pub name: String,
    /// The search that found its codes.
    pub choice: Choice,
    /// Relative error of its products, on text kept from the search, with the codes of a sweep: root mean square error over the root mean
    /// square of the products. Large matrices use an even sample of the rows.
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
