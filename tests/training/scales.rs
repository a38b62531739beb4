//! The choice of new block scales by the inputs of GEMMs.

use NVFP4::format::nvfp4;
use NVFP4::model::convert::Tables;
use NVFP4::train::{Lora, ScaleChoice};

use super::*;

/// A model in bfloat16, and its folder.
fn source() -> (Source, Folder) {
    let folder = Folder::new();
    beginning::dense(&golden("model/qwen3_untied"), &folder.0.join("model"));
    (Source::open(&folder.0.join("model")).unwrap(), folder)
}

/// A batch of tokens that the source has.
fn documents(source: &Source, seed: u64) -> Documents {
    let vocabulary = source.spec().vocab_size as u32;
    let mut batch = Documents::new(seed, &[96, 64]);
    batch.tokens.iter_mut().for_each(|t| *t %= vocabulary);
    let labels = batch.labels.iter_mut();
    labels.for_each(|t| *t %= vocabulary as i32);
    batch
}

/// Settings whose steps move weights so little that losses stay the same, and which leave much room for better scales.
fn still(recipe: Recipe, steps: u64) -> Config {
    let mut config = config(recipe, steps);
    config.optimizer.rate = 3e-5;
    config.recipe.weight_scales = nvfp4::Recipe::Amax;
    config
}

/// The codes alone from the first step on.
fn always() -> Recipe {
    Recipe {
        delivered_share: Some(1.0),
        ..Recipe::default()
    }
}

/// The scale choice of each step, and the trainer after them.
fn choices(config: &Config, steps: u64) -> (Vec<Option<ScaleChoice>>, Trainer) {
    let (source, _folder) = source();
    let mut trainer = Trainer::new(&Device::cpu(Some(2)).unwrap(), &source, config).unwrap();
    let step = |number| {
        let batch = documents(&source, number);
        trainer.step(&[batch.batch()]).unwrap().scales
    };
    let all = (0..steps).map(step).collect();
    (all, trainer)
}

/// They are chosen once: when passes begin to multiply with codes alone, but not before weights have moved.
#[test]
fn scales_are_chosen_when_codes_are_trained() {
    for (share, after) in [
        (None, 5),
        (Some(1.0), 1),
        (Some(0.5), 3),
        (Some(0.1), 5),
        (Some(0.0), 5),
    ] {
        let recipe = Recipe {
            delivered_share: share,
            ..Recipe::default()
        };
        let (all, _) = choices(&still(recipe, 6), 6);
        let chosen: Vec<usize> = (0..6).filter(|i| all[*i].is_some()).collect();
        assert_eq!(chosen, [after], "{share:?}");
    }
    let never = [
        Recipe {
            scale_search: false,
            ..Recipe::default()
        },
        Recipe::float32(),
    ];
    for recipe in never {
        let (all, _) = choices(&still(recipe, 3), 3);
        assert_eq!(all, [None; 3]);
    }
}

/// Unchanged weights keep their scales, also after resuming from a checkpoint.
#[test]
fn what_has_not_moved_keeps_its_scales() {
    let mut config = still(always(), 10);
    config.optimizer.rate = 0.0;
    let (all, trainer) = choices(&config, 1);
    assert_eq!(all, [None]);
    let (source, folder) = source();
    let place = folder.0.join("checkpoint");
    trainer.save(&place, &serde_json::Value::Null, 1).unwrap();
    let device = Device::cpu(Some(1)).unwrap();
    let (resumed, _) = Trainer::resume(&device, &source, &place).unwrap();
    let before = weights(&trainer);
    for mut trainer in [trainer, resumed] {
        let step = trainer.step(&[documents(&source, 1).batch()]).unwrap();
        assert_eq!(step.scales, None);
        assert_eq!(weights(&trainer), before);
    }
}

/// The step keeps whichever scales, old or new, give the lower delivered loss on its batch.
#[test]
fn the_better_scales_are_kept() {
    let config = still(always(), 10);
    let (_, mut trainer) = choices(&config, 1);
    let batch = documents(&source().0, 1);
    let before = trainer.evaluate(&[batch.batch()], true).unwrap();
    let choice = trainer.step(&[batch.batch()]).unwrap().scales.unwrap();
    assert!(choice.blocks > 0);
    assert!((choice.before - before).abs() < 1e-6, "{choice:?} {before}");
    assert!(choice.after != choice.before);
    let after = trainer.evaluate(&[batch.batch()], true).unwrap();
    let kept = choice.before.min(choice.after);
    let apart = (choice.after - choice.before).abs();
    assert!((after - kept).abs() < 0.1 * apart, "{choice:?} {after}");
}

/// A checkpoint from before the choice makes the same one.
#[test]
fn a_choice_is_made_again_after_resuming() {
    let config = still(always(), 10);
    let (mut all, whole) = choices(&config, 3);
    let (_, before) = choices(&config, 1);
    let (source, folder) = source();
    let place = folder.0.join("checkpoint");
    before.save(&place, &serde_json::Value::Null, 1).unwrap();
    let device = Device::cpu(Some(1)).unwrap();
    let (mut resumed, _) = Trainer::resume(&device, &source, &place).unwrap();
    let step = |number| {
        let batch = documents(&source, number);
        resumed.step(&[batch.batch()]).unwrap().scales
    };
    let again: Vec<_> = (1..3).map(step).collect();
    assert_eq!(again, all.split_off(1));
    assert_eq!(weights(&resumed), weights(&whole));
}

/// Adapters are merged by the inputs of their first step, which a checkpoint keeps.
#[test]
fn adapters_are_merged_for_their_inputs() {
    let recipe = |scale_search| Recipe {
        scale_search,
        lora: Some(Lora {
            rank: 4,
            ..Lora::default()
        }),
        ..Recipe::default()
    };
    let (source, folder) = source();
    let merged = |trainer: &Trainer, name: &str| {
        let place = folder.0.join(name);
        trainer
            .export_directory(&source, &place, Tables::Auto, false)
            .unwrap();
        std::fs::read(place.join("model.safetensors")).unwrap()
    };
    let config = config(recipe(true), 10);
    let (all, trainer) = choices(&config, 4);
    assert_eq!(all, [None; 4]);
    let file = merged(&trainer, "whole");
    trainer
        .save(&folder.0.join("checkpoint"), &serde_json::Value::Null, 1)
        .unwrap();
    let device = Device::cpu(Some(1)).unwrap();
    let (resumed, _) = Trainer::resume(&device, &source, &folder.0.join("checkpoint")).unwrap();
    assert!(merged(&resumed, "resumed") == file);
    // Adapters that are merged by sweep scales give another file.
    let (_, swept) = choices(&super::config(recipe(false), 10), 4);
    assert_eq!(weights(&swept), weights(&trainer));
    assert!(merged(&swept, "swept") != file);
}
