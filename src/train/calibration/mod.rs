//! Calibrated conversion to NVFP4: calibrates by text, gives blocks int8 rows within a budget of bits, distills if asked, and writes the
//! model.

mod budget;
mod distill;
mod stage;
mod text;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

use crate::base::Result;
use crate::base::error::bail;
use crate::base::threads::Pool;
use crate::checkpoint::Checkpoint;
use crate::model::calibrate::{CalibrateOptions, CalibratedMatrix, calibrate, folder_of, forget};
use crate::model::convert::{Container, ConvertOptions, ConvertReport, check_destination, convert};
use crate::model::training::Source;
use crate::ops::Device;

pub use distill::Distilled;
pub use stage::Stage;
pub use text::{TextOptions, texts};

/// Part of the names of the shared expert. A calibration leaves it as it is, because its errors would affect every token.
const EXPERT_OF_ALL: &str = ".mlp.shared_expert.";

/// How to calibrate for a conversion.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The text.
    pub text: TextOptions,
    /// Average bits per weight of the blocks, scales included: from 4.5, all NVFP4, to 8. The blocks whose quantization harms predictions
    /// most per byte get int8 rows. `None` for all NVFP4.
    pub budget: Option<f64>,
    /// Distillation steps, see [`Distilled`]. `None` for no distillation.
    pub distill: Option<u64>,
}

/// Result of [`quantize`].
#[derive(Clone, Debug, Serialize)]
pub struct Quantized {
    /// The conversion. Calibrated matrices count as quantized; `relative_error` covers only the others.
    #[serde(flatten)]
    pub report: ConvertReport,
    /// Choice and errors of each calibrated matrix, in the order of the model.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub calibrated: Vec<CalibratedMatrix>,
    /// Blocks that have int8 rows.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub wide_blocks: Vec<usize>,
    /// The distillation, if one was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distilled: Option<Distilled>,
}

impl Quantized {
    /// Mean relative product error over the calibrated matrices, and the mean that a plain sweep would have.
    pub fn mean_errors(&self) -> [f64; 2] {
        let count = self.calibrated.len().max(1) as f64;
        let mean =
            |of: fn(&CalibratedMatrix) -> f64| self.calibrated.iter().map(of).sum::<f64>() / count;
        [mean(|m| m.error), mean(|m| m.error_of_sweep)]
    }
}

/// Converts `checkpoint` to `destination` with calibrated linear weights, by running text through the model on `device`; `pool` writes.
/// Finished blocks are kept in a folder beside the destination until it is written, so that a repeated call continues an interrupted one.
/// Options that could not be written in the end are refused before any work. Cancelled with the thread's [`call`](crate::base::call).
pub fn quantize(
    checkpoint: Arc<dyn Checkpoint>,
    destination: &Path,
    conversion: &ConvertOptions,
    (device, pool): (&Device, &Pool),
    options: &Options,
    progress: &mut dyn FnMut(Stage),
) -> Result<Quantized> {
    options.check(conversion)?;
    check_destination(&*checkpoint, destination, conversion)?;
    let source = Arc::new(Source::new(checkpoint)?);
    options.check_for(&source)?;
    let texts = texts(&source, device, &options.text)?;
    let finished = folder_of(destination);
    let kept = CalibrateOptions {
        levels: conversion.quantize.levels,
        finished: Some(finished.clone()),
    };
    let host = device.host_cpu()?;
    let (mut calibrated, matrices) = calibrate(device, &host, &source, &texts, &kept, &mut |p| {
        progress(Stage::Calibrate(p));
    })?;
    let mut conversion = conversion.clone();
    conversion.keep.push(EXPERT_OF_ALL.to_owned());
    let mut wide_blocks = Vec::new();
    if let Some(bits) = options.budget {
        let wide = budget::choose(bits, device, (&source, &mut calibrated), &texts, progress)?;
        conversion.int8_rows = wide.entries;
        wide_blocks = wide.blocks;
    }
    let calibrated = Arc::new(calibrated);
    let mut report = convert(&*calibrated, destination, &conversion, pool, &mut |p| {
        progress(Stage::Write(p.done, p.total));
        ControlFlow::Continue(())
    })?;
    let distilled = match options.distill {
        Some(steps) => {
            let models = (&source, calibrated.clone());
            let text = &options.text;
            let found = distill::distill(
                models,
                destination,
                &mut report,
                device,
                text,
                steps,
                progress,
            );
            Some(found.map_err(|e| {
                let place = destination.display();
                e.within(format_args!(
                    "distilling (the calibrated model is in {place})"
                ))
            })?)
        }
        None => None,
    };
    forget(&finished, &source);
    report.quantized += calibrated.quantized();
    report.kept_nvfp4 -= calibrated.quantized();
    let entries = source.checkpoint().entries().iter();
    report.bytes_in = entries.map(|e| e.bytes).sum();
    Ok(Quantized {
        report,
        calibrated: matrices,
        wide_blocks,
        distilled,
    })
}

impl Options {
    /// Refuses a budget for a mixture of experts.
    fn check_for(&self, source: &Source) -> Result<()> {
        let mut blocks = source.spec().blocks.iter();
        if self.budget.is_some() && blocks.any(|block| block.mlp.mixture().is_some()) {
            bail!(
                Unsupported,
                "a budget gives whole blocks int8 rows, and experts run in NVFP4 alone; leave it out for this {} model",
                source.spec().family
            );
        }
        Ok(())
    }

    /// Refuses options that could not be written, or would have no effect.
    fn check(&self, conversion: &ConvertOptions) -> Result<()> {
        let is_dat = conversion.container == Container::Dat;
        if let Some(bits) = self.budget {
            budget::check(bits)?;
            if is_dat {
                bail!(
                    Unsupported,
                    ".dat holds no int8 rows, which a budget is for; write a directory"
                );
            }
        }
        let Some(steps) = self.distill else {
            return Ok(());
        };
        if steps == 0 {
            bail!(
                InvalidArgument,
                "0 steps of distillation learn nothing; leave them out"
            );
        }
        if is_dat {
            bail!(
                Unsupported,
                "a distillation writes a directory; name one, and quantize it to .dat afterwards"
            );
        }
        if conversion.keep_head || self.budget.is_some() {
            let other = match conversion.keep_head {
                true => "a head that is kept as it is",
                false => "a budget",
            };
            bail!(
                Unsupported,
                "a distillation trains the whole model, with its blocks in NVFP4, and excludes {other}"
            );
        }
        Ok(())
    }
}
