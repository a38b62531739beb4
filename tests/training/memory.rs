//! Estimated memory against actual use. Counts memory, which needs a process of its own; nextest provides one.

use std::path::Path;
use std::sync::Arc;

use NVFP4::base::{env, memory};
use NVFP4::train::memory::Estimate;
use NVFP4::train::{Distillation, Lora, RecomputedParts, TeacherPlacement};

use super::*;

/// Relative tolerance of an estimate, which leaves out small allocations such as gradients of head norms and a page of statistics.
const TOLERANCE: f64 = 0.005;

/// The peak of some steps, and the estimate of it, both without the parameters' states; the states are exact.
fn peak_and_estimate(source: &Source, config: &Config, tokens: usize) -> (u64, u64) {
    peak_with_teacher(source, config, tokens, None)
}

/// [`peak_and_estimate`] with a teacher.
fn peak_with_teacher(
    source: &Source,
    config: &Config,
    tokens: usize,
    teacher: Option<(Source, TeacherPlacement)>,
) -> (u64, u64) {
    let device = Device::cpu(Some(2)).unwrap();
    let mut config = config.clone();
    // A choice of scales takes memory in one step alone, and only if the new ones are better.
    config.recipe.scale_search = false;
    let config = &config;
    let vocabulary = source.spec().vocab_size as u32;
    let mut batch = Documents::new(1, &[tokens / 2, tokens - tokens / 2]);
    batch.tokens.iter_mut().for_each(|t| *t %= vocabulary);
    let labels = batch.labels.iter_mut();
    labels.for_each(|t| *t %= vocabulary as i32);

    let before = memory::total().current;
    let mut trainer = Trainer::new(&device, source, config).unwrap();
    if let Some((teacher, placement)) = teacher {
        let teacher = Arc::new(teacher);
        trainer
            .set_teacher(source, teacher, placement, tokens)
            .unwrap();
    }
    memory::reset_peak();
    // Memory that a step leaves allocated is present in the next.
    for _ in 0..2 {
        trainer.step(&[batch.batch()]).unwrap();
    }
    let teacher = trainer.teacher();
    let placed = teacher.map(|teacher| (teacher.source(), teacher.placement()));
    let estimate = Estimate::with_teacher(source, config, &device, tokens, placed);
    assert_eq!(estimate.states, trainer.parameters().bytes() as u64);
    assert_eq!(estimate.teacher, teacher.map_or(0, |t| t.bytes() as u64));
    let peak = memory::total().peak - before;
    (peak - estimate.states, estimate.total() - estimate.states)
}

#[test]
fn estimates_are_the_peaks_of_steps() {
    let adapters = |targets: &[&str]| Recipe {
        lora: Some(Lora {
            rank: 8,
            alpha: 16.0,
            targets: targets.iter().map(|t| (*t).to_owned()).collect(),
        }),
        ..Recipe::default()
    };
    let rounded = Recipe {
        activations: ProductForm::Nvfp4,
        gradients: ProductForm::Nvfp4,
        ..Recipe::default()
    };
    let released = Recipe {
        release: true,
        clip: Clip::Never,
        ..Recipe::float32()
    };
    let last = Recipe {
        last_blocks: Some(1),
        ..Recipe::default()
    };
    let recipes = |projections: &[&str]| {
        [
            ("nvfp4", Recipe::default()),
            ("float32, released", released.clone()),
            ("rounded", rounded.clone()),
            ("the last block", last.clone()),
            ("adapters", adapters(projections)),
            (
                "some adapters, rounded",
                Recipe {
                    lora: adapters(&["q_proj", "up_proj"]).lora,
                    last_blocks: Some(1),
                    ..rounded.clone()
                },
            ),
        ]
    };
    let parts = RecomputedParts {
        norms: true,
        heads: true,
        gate_up: true,
        ..RecomputedParts::default()
    };
    // Every fifth of the combinations has each pair of values of two properties.
    let stride = if env::tests_are_long() { 1 } else { 5 };
    let (mut number, mut wrong) = (0, Vec::new());
    let all = &["proj"][..];
    // An adapter of one of this model's four-row gates would have too few columns.
    let but_gates = &[
        "q_proj",
        "in_proj_qkv",
        "in_proj_z",
        "out_proj",
        "down_proj",
    ];
    for (name, projections) in [
        ("qwen3_tied", all),
        ("qwen3_untied", all),
        ("llama_biased", all),
        ("gemma3_wide", all),
        ("qwen35_tied", but_gates),
    ] {
        let source = Source::open(&golden("model").join(name)).unwrap();
        for (recipe_name, recipe) in &recipes(projections) {
            for recompute in [Recompute::Block, Recompute::None, Recompute::Parts(parts)] {
                // A head in few pieces or in many leads to other peaks.
                for head_chunk in [16, 8192] {
                    number += 1;
                    if number % stride != 0 {
                        continue;
                    }
                    let config = Config {
                        recompute,
                        head_chunk,
                        ..config(recipe.clone(), 10)
                    };
                    let (peak, estimate) = peak_and_estimate(&source, &config, 220);
                    let off = estimate as f64 / peak as f64 - 1.0;
                    let line = format!(
                        "{name}, {recipe_name}, {recompute} again, chunks of {head_chunk}: {estimate} for {peak}, {:+.2} %",
                        100.0 * off
                    );
                    println!("{line}");
                    if off.abs() > TOLERANCE {
                        wrong.push(line);
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The estimate of a mixture has room for all rows to go to one expert.
#[test]
fn estimates_of_mixtures_are_bounds() {
    for name in ["qwen3moe_mixed", "qwen2moe_shared", "qwen3next_shared"] {
        let source = Source::open(&golden("model").join(name)).unwrap();
        for recompute in [Recompute::Block, Recompute::None] {
            let config = Config {
                recompute,
                ..config(Recipe::default(), 10)
            };
            let (peak, estimate) = peak_and_estimate(&source, &config, 220);
            let off = estimate as f64 / peak as f64 - 1.0;
            assert!(
                (-TOLERANCE..0.25).contains(&off),
                "{name}, {recompute} again: {estimate} for {peak}"
            );
        }
    }
}

/// Blocks before the trained ones share memory for their activations; the trained ones become what they would become otherwise.
#[test]
fn blocks_that_are_not_trained_leave_nothing() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/verse-10m");
    let source = Source::open(&data).unwrap();
    let device = Device::cpu(Some(2)).unwrap();
    let blocks = source.spec().blocks.len();
    let batch = Documents::new(1, &[30, 34]);
    let mut losses = Vec::new();
    for recompute in [Recompute::Block, Recompute::None] {
        let mut all = None;
        let mut peaks = Vec::new();
        for last in [None, Some(3), Some(1)] {
            let recipe = Recipe {
                last_blocks: last,
                clip: Clip::Never,
                ..Recipe::default()
            };
            let config = Config {
                recompute,
                ..config(recipe, 10)
            };
            let (peak, estimate) = peak_and_estimate(&source, &config, 300);
            let off = estimate as f64 / peak as f64 - 1.0;
            assert!(
                off.abs() <= TOLERANCE,
                "{last:?}, {recompute} again: {estimate} for {peak}"
            );
            peaks.push(peak);

            let mut trainer = Trainer::new(&device, &source, &config).unwrap();
            let evaluated = trainer.evaluate(&[batch.batch()], false).unwrap();
            losses.push(trainer.step(&[batch.batch()]).unwrap().loss);
            assert_eq!(losses.last(), Some(&evaluated));
            assert_eq!(losses.last(), losses.first());
            let trained = weights(&trainer);
            let all = all.get_or_insert_with(|| trained.clone());
            let names = trainer.parameters().layout().matrices.iter();
            for (id, matrix) in names.enumerate() {
                let is_trained = (blocks - last.unwrap_or(blocks)..blocks)
                    .any(|block| matrix.name.contains(&format!("layers.{block}.")));
                if is_trained {
                    assert!(trained[id] == all[id], "{last:?}: {}", matrix.name);
                }
            }
        }
        assert!(peaks.is_sorted_by(|a, b| a > b), "{peaks:?}");
    }
}

/// The step that chooses new block scales keeps the old state until it is over.
#[test]
fn estimates_count_what_choosing_scales_takes() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/verse-10m");
    let source = Source::open(&data).unwrap();
    let device = Device::cpu(Some(2)).unwrap();
    let recipe = Recipe {
        delivered_share: Some(1.0),
        ..Recipe::default()
    };
    let config = config(recipe, 10);
    let batch = Documents::new(1, &[30, 34]);
    let before = memory::total().current;
    let mut trainer = Trainer::new(&device, &source, &config).unwrap();
    memory::reset_peak();
    let steps = [0; 2].map(|_| trainer.step(&[batch.batch()]).unwrap());
    let choice = steps[1].scales.unwrap();
    assert!(choice.after < choice.before, "{choice:?}");
    let estimate = Estimate::with_teacher(&source, &config, &device, 64, None).total();
    let peak = memory::total().peak - before;
    let off = estimate as f64 / peak as f64 - 1.0;
    assert!((0.0..0.02).contains(&off), "{estimate} for {peak}");
}

/// A teacher's weights and its own pass, resident and streamed, narrower and wider than the student.
#[test]
fn estimates_count_a_teacher() {
    let mut wrong = Vec::new();
    for (name, of_teacher) in [
        ("qwen3_tied", "qwen2_untied"),
        ("qwen3_untied", "phi3_partial"),
        ("gemma3_wide", "gemma3_wide"),
    ] {
        for placement in [TeacherPlacement::Resident, TeacherPlacement::Streamed] {
            for (recompute, head_chunk) in [(Recompute::Block, 16), (Recompute::None, 8192)] {
                let source = Source::open(&golden("model").join(name)).unwrap();
                let teacher = Source::open(&golden("model").join(of_teacher)).unwrap();
                let config = Config {
                    recompute,
                    head_chunk,
                    distillation: Some(Distillation::default()),
                    ..config(Recipe::default(), 10)
                };
                let (peak, estimate) =
                    peak_with_teacher(&source, &config, 220, Some((teacher, placement)));
                let off = estimate as f64 / peak as f64 - 1.0;
                let line = format!(
                    "{name} by {of_teacher}, {placement:?}, {recompute} again: {estimate} for {peak}, {:+.2} %",
                    100.0 * off
                );
                println!("{line}");
                if off.abs() > TOLERANCE {
                    wrong.push(line);
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
