//! Losses of evaluation sets: of a model under training, and of a file that was delivered.

use std::path::Path;

use super::data::{Window, Windows};
use super::offload::Offload;
use super::recipe::{Lora, Recipe};
use super::row::Losses;
use super::trainer::{Config, MicroBatch, Trainer};
use crate::base::Result;
use crate::model::training::Source;
use crate::ops::Device;

/// Windows whose loss is measured together, under a name.
pub struct EvaluationSet {
    /// Its name in reports.
    pub name: String,
    /// Its windows, at least one.
    pub windows: Windows,
}

impl EvaluationSet {
    /// Its windows, so many at a time.
    fn batches(&self, batch: usize) -> Vec<Window> {
        let parts = self.windows.all().chunks(batch.max(1));
        let joined = parts.map(|part| {
            let mut batch = Window::default();
            part.iter().for_each(|w| batch.append(w));
            batch
        });
        joined.collect()
    }

    /// Its losses by a trainer's model, of what is delivered and of all that is stored.
    pub(super) fn losses(&self, trainer: &mut Trainer, batch: usize) -> Result<Losses> {
        let batches = self.batches(batch);
        let batches: Vec<MicroBatch<'_>> = batches.iter().map(Window::batch).collect();
        let delivered = trainer.evaluate(&batches, true)?;
        let recipe = &trainer.config().recipe;
        // Nothing that adapters stand beside has a residual.
        let stored = match recipe.weights.is_packed() && recipe.lora.is_none() {
            true => trainer.evaluate(&batches, false)?,
            false => delivered,
        };
        Ok(Losses { delivered, stored })
    }
}

/// The losses of the model in `place`, a file or a directory, with each set, by batches of so many windows. Its weights are held in the form
/// that the file has.
pub fn losses_of_file(
    device: &Device,
    place: &Path,
    sets: &[EvaluationSet],
    batch: usize,
) -> Result<Vec<f64>> {
    let source = Source::open(place)?;
    let mut trainer = Trainer::new(device, &source, &unchanged())?;
    let each = sets.iter().map(|set| {
        let batches = set.batches(batch);
        let batches: Vec<MicroBatch<'_>> = batches.iter().map(Window::batch).collect();
        trainer.evaluate(&batches, true)
    });
    let losses = each.collect::<Result<Vec<_>>>();
    losses.map_err(|e| e.within(place.display()))
}

/// Settings under which a model is held as its file has it. What adapters stand beside is, and adapters add nothing before the first step.
fn unchanged() -> Config {
    Config {
        recipe: Recipe {
            lora: Some(Lora {
                rank: 1,
                ..Lora::default()
            }),
            last_blocks: Some(1),
            // Every name has a dot: where there is no NVFP4, nothing is quantized.
            keep_high: vec![".".to_owned()],
            ..Recipe::default()
        },
        offload: Offload::default(),
        ..Config::default()
    }
}
