//! Progress of a calibrated conversion.

use crate::model::calibrate::CalibrateProgress;

/// Stage of the work, with its progress.
#[derive(Clone, Copy, Debug)]
pub enum Stage {
    /// The calibration.
    Calibrate(CalibrateProgress),
    /// Measuring the effect of each block's quantization on predictions, in passes: done, total.
    Measure(u64, u64),
    /// Writing, in bytes: done, total.
    Write(u64, u64),
    /// Distilling, in steps: done, total.
    Distill(u64, u64),
}
