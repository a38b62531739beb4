//! Mixtures of experts in the pass of training on a GPU, against the CPU.

use std::sync::Arc;

use NVFP4::model::Device;
use NVFP4::model::calibrate::{CalibrateOptions, CalibrationText, calibrate};
use NVFP4::model::training::{Observer, Runner, Source};
use NVFP4::ops::{Array, Mixed, Slice};

use crate::common::golden;
use crate::support::{gpu, relative_l2};

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
