//! Mixtures of experts in the pass of training on a GPU, against the CPU.

use std::sync::Arc;

use NVFP4::model::Device;
use NVFP4::model::calibrate::{CalibrateOptions, CalibrationText, calibrate};
use NVFP4::model::training::{Observer, Runner, Source};
use NVFP4::ops::{Array, Mixed, Slice};

use NVFP4::train::{Clip, Config, MicroBatch, Recipe, Trainer};

use crate::common::golden;
use crate::support::{gpu, relative_l2};
use crate::training_model::{losses, steps::check_resumes, text};

/// Some rows of a model's residual stream.
type Rows = Vec<f32>;

/// Runs each block on its rows in `before`, or, if there are none, on the results of the block before it. Returns the rows before and after each block.
fn blocks(
    device: &Device,
    source: &Arc<Source>,
    tokens: &[u32],
    before: Option<&[Rows]>,
) -> [Vec<Rows>; 2] {
    let mut runner = Runner::new(device, source.clone()).unwrap();
    let batch = runner.batch(tokens, &[tokens.len()]).unwrap();
    let len = tokens.len() * source.spec().hidden_size;
    let rows = |x: &Array<Mixed>| {
        let mut values = vec![0.0; len];
        x.first(len).unwrap().read(&mut values).unwrap();
        values
    };
    let mut x = runner.embed(&batch).unwrap();
    let mut next = Array::empty();
    let mut found = [Vec::new(), Vec::new()];
    for block in 0..source.spec().blocks.len() {
        if let Some(before) = before {
            let before = Slice::Host(&before[block]);
            x.first_mut(len).unwrap().copy_from(before).unwrap();
        }
        found[0].push(rows(&x));
        runner.run_block(&batch, block, &x, &mut next).unwrap();
        found[1].push(rows(&next));
        std::mem::swap(&mut x, &mut next);
    }
    found
}

fn tokens(source: &Source, count: usize, seed: usize) -> Vec<u32> {
    let vocabulary = source.spec().vocab_size;
    let token = |i: usize| ((i + seed) * (i + seed) * 7919 / 13 % vocabulary) as u32;
    (0..count).map(token).collect()
}

/// Each block of the same rows. Where two experts are about as probable, rounding to bfloat16 decides which of them a row goes to, so that this
/// is of the row in the middle: with other experts or weights most rows would differ by a third and more.
#[test]
fn mixtures_in_the_pass_of_training_agree_with_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for name in ["qwen3moe_normalized", "qwen3moe_mixed", "qwen2moe_shared"] {
        let source = Arc::new(Source::open(&golden(name)).unwrap());
        let tokens = tokens(&source, 250, 0);
        let cpu = Device::cpu(None).unwrap();
        let [before, expected] = blocks(&cpu, &source, &tokens, None);
        let [_, found] = blocks(&Device::Cuda(gpu.clone()), &source, &tokens, Some(&before));
        let width = source.spec().hidden_size;
        for (block, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let expected: Vec<f64> = expected.iter().map(|&v| f64::from(v)).collect();
            let rows = found.chunks_exact(width).zip(expected.chunks_exact(width));
            let mut errors: Vec<f64> = rows.map(|(a, b)| relative_l2(a, b)).collect();
            errors.sort_by(f64::total_cmp);
            let middle = errors[errors.len() / 2];
            assert!(middle < 0.05, "{name}, block {block}: {middle}");
        }
    }
}

/// An observer on a GPU sees texts of several lengths, and a calibration of a mixture quantizes every expert no worse than a sweep.
#[test]
fn mixtures_are_calibrated_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu);
    let source = Arc::new(Source::fresh(&golden("qwen2moe_shared"), 3).unwrap());
    let text = |seed: usize| CalibrationText {
        tokens: tokens(&source, 90 - seed % 5, seed),
        documents: vec![90 - seed % 5],
    };
    let texts: Vec<CalibrationText> = (0..17).map(text).collect();
    let options = CalibrateOptions {
        levels: NVFP4::format::nvfp4::Levels::Two,
        finished: None,
    };
    let host = device.host_cpu().unwrap();
    let (_, matrices) = calibrate(&device, &host, &source, &texts, &options, &mut |_| {}).unwrap();
    // Each of the two blocks has four projections of attention, and three in each of six experts.
    assert_eq!(matrices.len(), 2 * (4 + 6 * 3));
    for m in &matrices {
        assert!(m.error <= m.error_of_sweep && m.error > 0.0, "{m:?}");
    }
    let runs: Vec<_> = texts
        .iter()
        .map(|t| (t.tokens.clone(), t.documents.clone()))
        .collect();
    let mut observer = Observer::new(&device, source.clone(), &runs, [3, 7]).unwrap();
    observer.advance(&mut |_, _, _| Ok(())).unwrap();
    assert_eq!(observer.error().unwrap(), 0.0);
}

/// Twenty steps of a mixture, routers included, on a GPU as on the CPU. A step that goes on from a checkpoint has the same bits.
#[test]
fn a_gpu_trains_mixtures_as_the_cpu_does() {
    let Some(gpu) = gpu() else { return };
    for name in ["qwen3moe_mixed", "qwen2moe_shared"] {
        let source = Source::open(&golden(name)).unwrap();
        for recipe in [Recipe::float32(), Recipe::default()] {
            let mut config = Config {
                recipe,
                steps: 20,
                ..Config::default()
            };
            config.optimizer.rate = 2e-3;
            let devices = [Device::cpu(None).unwrap(), Device::Cuda(gpu.clone())];
            let [cpu, found] = devices.each_ref().map(|device| {
                let mut trainer = Trainer::new(device, &source, &config).unwrap();
                losses(&mut trainer, 0..20)
            });
            println!("{name}: {cpu:?} {found:?}");
            for (step, (a, b)) in cpu.iter().zip(&found).enumerate() {
                let what = format!("{name}, {:?}: step {step}: {a} and {b}", config.recipe);
                assert!((a / b - 1.0).abs() < 0.03, "{what}");
            }
            check_resumes(&devices[0], &devices[1], &source, &config, &found);
        }
    }
}

/// Gradients of experts and routers on a GPU, beside those of the CPU: bfloat16 sends some rows to other experts, which the bound allows for.
#[test]
fn gradients_of_mixtures_agree_with_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let source = Source::open(&golden("qwen2moe_shared")).unwrap();
    let config = Config {
        recipe: Recipe {
            clip: Clip::Never,
            ..Recipe::float32()
        },
        steps: 1,
        ..Config::default()
    };
    let devices = [Device::cpu(None).unwrap(), Device::Cuda(gpu)];
    let [cpu, found] = devices.each_ref().map(|device| {
        let mut trainer = Trainer::new(device, &source, &config).unwrap();
        let (tokens, labels) = text(5, 240, source.spec().vocab_size);
        let batch = MicroBatch {
            tokens: &tokens,
            documents: &[240],
            labels: &labels,
            weights: None,
        };
        trainer.step(&[batch]).unwrap().gradient_norm
    });
    println!("gradient norms {cpu} {found}");
    assert!((cpu / found - 1.0).abs() < 0.1, "{cpu} {found}");
}
