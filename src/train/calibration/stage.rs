//! Progress of a calibration for a conversion.

use crate::model::calibrate::CalibrateProgress;

/// Stage of the work, with its progress.
#[derive(Clone, Copy, Debug)]
pub enum Stage {
    /// The calibration.
    Calibrate(CalibrateProgress),
    /// Measuring what each block's quantization does to predictions, in passes: done, and in all.
    Measure(u64, u64),
    /// Writing, in bytes: done, and in all.
    Write(u64, u64),
    /// Distilling, in steps: done, and in all.
    Distill(u64, u64),
}
