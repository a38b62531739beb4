//! A short distillation of a calibrated model. All parameters are trained towards the predictions of the original model, and the matrices
//! stay in NVFP4.

use std::path::Path;
use std::sync::Arc;

use super::stage::Stage;
use super::text::{TextOptions, windows};
use crate::base::Result;
use crate::base::call;
use crate::base::error::bail;
use crate::model::calibrate::Calibrated;
use crate::model::convert::{ConvertReport, Tables};
use crate::model::pack_new;
use crate::model::training::Source;
use crate::ops::Device;
use crate::ops::training::optimizer::Hyperparameters;
use crate::train::data::{Order, Place, Window};
use crate::train::{
    Clip, Config, Distillation, MicroBatch, Recipe, Schedule, TeacherPlacement, Trainer,
};

/// The highest learning rate, the share of warm-up steps, and the tokens of a step.
const RATE: f64 = 2e-5;
const WARMUP: f64 = 0.03;
const STEP_TOKENS: usize = 8192;
/// One window in this many is held out to measure the result, up to a number of tokens.
const KEPT: usize = 8;
const KEPT_TOKENS: usize = 16384;

/// Result of a distillation. Divergences are means of KL(original || quantized) in nats per token, on held-out text.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Distilled {
    /// Steps taken.
    pub steps: u64,
    /// Divergence of the calibrated model.
    pub divergence_before: f64,
    /// Divergence after the last step. The model was replaced only if this is smaller.
    pub divergence: f64,
}

/// Distills `original` into the calibrated model for `steps` steps, on all windows of a text. Replaces the directory `destination`, which a
/// conversion of `calibrated` has written with `report`, unless that would make it worse. If the report has packed weights, it gets those of
/// the new model.
pub(super) fn distill(
    (original, calibrated): (&Arc<Source>, Arc<Calibrated>),
    destination: &Path,
    report: &mut ConvertReport,
    device: &Device,
    text: &TextOptions,
    steps: u64,
    progress: &mut dyn FnMut(Stage),
) -> Result<Distilled> {
    let student = Source::new(calibrated)?;
    let (mut learned, mut kept) = (Vec::new(), Vec::new());
    for (number, window) in windows(&student, device, text)?.into_iter().enumerate() {
        let is_kept = number % KEPT == KEPT - 1;
        let to = if is_kept { &mut kept } else { &mut learned };
        to.push(window);
    }
    let Some(longest) = learned.iter().map(|w| w.tokens.len()).max() else {
        bail!(InvalidArgument, "there is no text to distill with");
    };
    if kept.is_empty() {
        kept.push(learned[0].clone());
    }
    kept.truncate((KEPT_TOKENS / longest).max(1));
    let mut trainer = Trainer::new(device, &student, &config(report, device, steps))?;
    let placement = TeacherPlacement::Auto;
    trainer.set_teacher(&student, original.clone(), placement, STEP_TOKENS)?;

    let kept: Vec<MicroBatch<'_>> = kept.iter().map(Window::batch).collect();
    let divergence_before = trainer.compare(&kept, true)?.divergence;
    let of_step = (STEP_TOKENS / longest).clamp(1, learned.len());
    let mut order = Order::new(0, (learned.len(), of_step), Place::default());
    for step in 0..steps {
        call::check()?;
        progress(Stage::Distill(step, steps));
        let mut batch = Window::default();
        for _ in 0..of_step {
            batch.append(&learned[order.next_item()]);
        }
        trainer.step(&[batch.batch()])?;
    }
    progress(Stage::Distill(steps, steps));
    let divergence = trainer.compare(&kept, true)?.divergence;
    if divergence < divergence_before {
        let new = trainer.new_directory(&student, destination, Tables::Auto, true)?;
        let packed = match &report.packed {
            Some(_) => {
                let host = device.host_cpu()?;
                Some(pack_new(
                    &new,
                    destination,
                    &Device::Cpu(host),
                    &mut |_, _| call::check(),
                )?)
            }
            None => None,
        };
        let (file, packed) = packed.unzip();
        new.commit(file)?;
        report.packed = packed;
    }
    Ok(Distilled {
        steps,
        divergence_before,
        divergence,
    })
}

/// Settings that train all parameters in the forms of the conversion, with passes by the delivered weights.
fn config(report: &ConvertReport, device: &Device, steps: u64) -> Config {
    let (clip, release) = match device.is_cuda() {
        true => (Clip::Previous(1.0), true),
        false => (Clip::Global(1.0), false),
    };
    let tables = match report.embedding {
        "INT8" => Tables::Int8,
        "NVFP4" => Tables::Nvfp4,
        _ => Tables::Bf16,
    };
    Config {
        recipe: Recipe {
            tables,
            delivered_share: Some(1.0),
            scale_search: false,
            clip,
            release,
            ..Recipe::default()
        },
        optimizer: Hyperparameters {
            rate: RATE,
            ..Hyperparameters::default()
        },
        schedule: Schedule {
            warmup: (steps as f64 * WARMUP).round() as u64,
            ..Schedule::default()
        },
        steps,
        distillation: Some(Distillation::default()),
        ..Config::default()
    }
}
