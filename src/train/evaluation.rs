//! Evaluation losses, of a model under training and of a delivered file.

use std::path::Path;
use std::sync::Arc;

use super::data::{Window, Windows};
use super::distillation::Distillation;
use super::memory::TeacherPlacement;
use super::offload::Offload;
use super::recipe::{Lora, Recipe};
use super::row::{Losses, Score};
use super::trainer::{Config, MicroBatch, Trainer};
use crate::base::Result;
use crate::model::training::Source;
use crate::ops::Device;

/// A named set of windows with a common loss.
pub struct EvaluationSet {
    /// Its name in reports.
    pub name: String,
    /// Its windows, at least one.
    pub windows: Windows,
}

impl EvaluationSet {
    /// The windows, merged into batches.
    fn batches(&self, batch: usize) -> Vec<Window> {
        let parts = self.windows.all().chunks(batch.max(1));
        let joined = parts.map(|part| {
            let mut batch = Window::default();
            part.iter().for_each(|w| batch.append(w));
            batch
        });
        joined.collect()
    }

    /// Losses of a trainer's model on this set, by the delivered and by the stored weights.
    pub(super) fn losses(&self, trainer: &mut Trainer, batch: usize) -> Result<Losses> {
        let batches = self.batches(batch);
        let batches: Vec<MicroBatch<'_>> = batches.iter().map(Window::batch).collect();
        let delivered = measured(trainer, &batches, true)?;
        let recipe = &trainer.config().recipe;
        // A matrix with an adapter has no residual, so both are the same.
        let stored = match recipe.weights.is_packed() && recipe.lora.is_none() {
            true => measured(trainer, &batches, false)?,
            false => delivered,
        };
        Ok(Losses {
            delivered: delivered.loss,
            stored: stored.loss,
            divergence_delivered: delivered.divergence,
            divergence_stored: stored.divergence,
        })
    }
}

/// The loss of batches, and the divergence from the trainer's teacher if there is one.
fn measured(trainer: &mut Trainer, batches: &[MicroBatch<'_>], delivered: bool) -> Result<Score> {
    if trainer.teacher().is_none() {
        return Ok(Score {
            loss: trainer.evaluate(batches, delivered)?,
            divergence: None,
        });
    }
    let found = trainer.compare(batches, delivered)?;
    Ok(Score {
        loss: found.loss,
        divergence: Some(found.divergence),
    })
}

/// Losses of the model in `place`, a file or a directory, on each set, in batches of `batch` windows. With a teacher, also the divergence.
/// Its weights keep the form that they have in the file.
pub fn losses_of_file(
    device: &Device,
    place: &Path,
    sets: &[EvaluationSet],
    batch: usize,
    teacher: Option<(Arc<Source>, TeacherPlacement)>,
) -> Result<Vec<Score>> {
    let source = Source::open(place)?;
    let mut config = unchanged();
    config.distillation = teacher.as_ref().map(|_| Distillation::default());
    let mut trainer = Trainer::new(device, &source, &config)?;
    if let Some((teacher, placement)) = teacher {
        let windows = sets.iter().flat_map(|set| set.windows.all());
        let longest = windows.map(|w| w.tokens.len()).max().unwrap_or(0);
        trainer.set_teacher(&source, teacher, placement, batch * longest)?;
    }
    let each = sets.iter().map(|set| {
        let batches = set.batches(batch);
        let batches: Vec<MicroBatch<'_>> = batches.iter().map(Window::batch).collect();
        measured(&mut trainer, &batches, true)
    });
    let losses = each.collect::<Result<Vec<_>>>();
    losses.map_err(|e| e.within(place.display()))
}

/// Settings that keep a model in the form of its file: matrices with adapters are frozen, and adapters add nothing before the first step.
fn unchanged() -> Config {
    Config {
        recipe: Recipe {
            lora: Some(Lora {
                rank: 1,
                ..Lora::default()
            }),
            last_blocks: Some(1),
            // Every name contains a dot: without NVFP4 in the file, nothing is quantized.
            keep_high: vec![".".to_owned()],
            ..Recipe::default()
        },
        offload: Offload::default(),
        ..Config::default()
    }
}
