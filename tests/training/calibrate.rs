//! Calibrated quantization.

use std::sync::Arc;

use NVFP4::checkpoint::Checkpoint;
use NVFP4::format::nvfp4;
use NVFP4::model::calibrate::{
    CalibrateOptions, CalibratedMatrix, CalibrationText, calibrate, folder_of, forget,
};
use NVFP4::model::convert::{Container, ConvertOptions};
use NVFP4::model::training::Observer;

use super::beginning::{converted, dense, files};
use super::*;

/// Texts of tokens that a model has, of several lengths.
fn texts(source: &Source, count: u64) -> Vec<CalibrationText> {
    let vocabulary = source.spec().vocab_size as u32;
    let text = |seed: u64| {
        let lengths = [24, 44 - seed as usize % 5];
        let documents = Documents::new(seed, &lengths);
        CalibrationText {
            tokens: documents.tokens.iter().map(|t| t % vocabulary).collect(),
            documents: lengths.to_vec(),
        }
    };
    (0..count).map(text).collect()
}

const NOTHING_KEPT: CalibrateOptions = CalibrateOptions {
    levels: nvfp4::Levels::Two,
    finished: None,
};

/// Calibrates the model in `place` on this many threads, to a folder, and returns the results of its matrices.
pub(super) fn calibrated(place: &Path, to: &Path, threads: usize) -> Vec<CalibratedMatrix> {
    calibrated_with(place, to, threads, &NOTHING_KEPT).0
}

/// As [`calibrated`], with options. Also returns the number of blocks that were resumed.
fn calibrated_with(
    place: &Path,
    to: &Path,
    threads: usize,
    options: &CalibrateOptions,
) -> (Vec<CalibratedMatrix>, usize) {
    let device = Device::cpu(Some(threads)).unwrap();
    let source = Arc::new(Source::open(place).unwrap());
    let (mut told, texts) = (Vec::new(), texts(&source, 17));
    let host = device.host_cpu().unwrap();
    let (checkpoint, matrices) = calibrate(&device, &host, &source, &texts, options, &mut |p| {
        told.push(p);
    })
    .unwrap();
    let last = told.last().unwrap();
    assert_eq!((last.block, last.done), (last.blocks, last.total));
    assert!(told.is_sorted_by_key(|p| (p.done, p.block)));
    let conversion = ConvertOptions::new(Container::ModelOpt, nvfp4::Recipe::Sweep);
    converted_from(&checkpoint, to, &conversion);
    (matrices, told[0].resumed)
}

fn converted_from(source: &dyn Checkpoint, to: &Path, options: &ConvertOptions) {
    let pool = NVFP4::base::threads::Pool::new(2).unwrap();
    let watch =
        &mut |_: NVFP4::model::convert::ConvertProgress<'_>| std::ops::ControlFlow::Continue(());
    NVFP4::model::convert::convert(source, to, options, &pool, watch).unwrap();
}

/// Every linear weight of the blocks is quantized, fused ones too, none is worse than by a sweep, and threads do not matter. The folder has the
/// tensors of one that is quantized by a sweep.
#[test]
fn calibration_is_never_worse_than_a_sweep() {
    for name in ["qwen3_untied", "phi3_partial", "gemma3_wide"] {
        let folder = Folder::new();
        let place = folder.0.join("model");
        dense(&golden("model").join(name), &place);
        let matrices = calibrated(&place, &folder.0.join("two"), 2);
        calibrated(&place, &folder.0.join("three"), 3);
        assert!(files(&folder.0.join("two")) == files(&folder.0.join("three")));
        let source = Source::open(&place).unwrap();
        let of_blocks = source
            .layout()
            .matrices
            .iter()
            .filter(|m| m.block.is_some());
        let mut expected: Vec<&str> = of_blocks.map(|m| &*m.name).collect();
        let mut found: Vec<&str> = matrices.iter().map(|m| &*m.name).collect();
        expected.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, expected);
        for m in &matrices {
            assert!(m.error <= m.error_of_sweep && m.error > 0.0, "{m:?}");
        }
        let mean = |of: fn(&CalibratedMatrix) -> f64| matrices.iter().map(of).sum::<f64>();
        assert!(
            mean(|m| m.error) < 0.95 * mean(|m| m.error_of_sweep),
            "{matrices:?}"
        );

        let swept = folder.0.join("swept");
        converted(
            &place,
            &swept,
            &ConvertOptions::new(Container::ModelOpt, nvfp4::Recipe::Sweep),
        );
        let shapes = |place: &Path| -> Vec<(String, Vec<usize>, String)> {
            let source = NVFP4::model::open(place).unwrap();
            let entries = source.entries().iter();
            entries
                .map(|e| (e.name.clone(), e.shape.clone(), e.encoding.to_string()))
                .collect()
        };
        assert_eq!(shapes(&folder.0.join("two")), shapes(&swept));
    }
}

/// Matrices that a model holds in NVFP4 keep their codes.
#[test]
fn calibration_leaves_nvfp4_alone() {
    let folder = Folder::new();
    let (swept, again) = (folder.0.join("swept"), folder.0.join("again"));
    let options = ConvertOptions::new(Container::ModelOpt, nvfp4::Recipe::Sweep);
    converted(&golden("model/qwen3_tied"), &swept, &options);
    assert!(calibrated(&swept, &again, 2).is_empty());
    assert!(files(&swept) == files(&again));
}

#[test]
fn calibration_needs_text_to_choose_by() {
    let device = Device::cpu(Some(1)).unwrap();
    let source = Arc::new(Source::open(&golden("model/qwen3_tied")).unwrap());
    let host = device.host_cpu().unwrap();
    for count in [0, 1] {
        let texts = texts(&source, count);
        let error = calibrate(&device, &host, &source, &texts, &NOTHING_KEPT, &mut |_| {});
        let error = error.map(|_| ()).unwrap_err();
        assert!(
            error.message().contains("there must be two at least"),
            "{error}"
        );
    }
}

/// A calibration resumes after finished blocks of an earlier one, even if one is damaged or gone, and gives the same bytes. Blocks of other
/// text are not used.
#[test]
fn an_interrupted_calibration_goes_on() {
    let folder = Folder::new();
    let (place, whole, kept) = (
        golden("model/qwen3_untied"),
        folder.0.join("whole"),
        folder.0.join("kept"),
    );
    let finished = folder_of(&kept);
    assert_eq!(finished, folder.0.join("kept.calibration"));
    let options = CalibrateOptions {
        finished: Some(finished.clone()),
        ..NOTHING_KEPT
    };
    let matrices = calibrated(&place, &whole, 2);
    let source = Source::open(&place).unwrap();
    let blocks = source.spec().blocks.len();
    let again = |expected: usize| {
        std::fs::remove_dir_all(&kept).ok();
        let (found, resumed) = calibrated_with(&place, &kept, 2, &options);
        assert_eq!(resumed, expected);
        assert_eq!(format!("{found:?}"), format!("{matrices:?}"));
        assert!(files(&kept) == files(&whole));
    };
    again(0);
    again(blocks);
    std::fs::remove_file(finished.join("block-00000")).unwrap();
    again(blocks - 1);
    let last = finished.join(format!("block-{:05}", blocks - 1));
    let mut bytes = std::fs::read(&last).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&last, bytes).unwrap();
    again(blocks - 1);
    let other = CalibrateOptions {
        levels: nvfp4::Levels::Single,
        ..options.clone()
    };
    std::fs::remove_dir_all(&kept).ok();
    assert_eq!(calibrated_with(&place, &kept, 2, &other).1, 0);
    std::fs::write(finished.join("mine"), "").unwrap();
    forget(&finished, &source);
    let left: Vec<_> = std::fs::read_dir(&finished).unwrap().collect();
    assert_eq!(left.len(), 1);
}

/// `qwen3_untied` in `place`, with this bfloat16 as the first sixteen weights of the norm before the second block's MLP.
fn with_norm(place: &Path, value: u16) {
    dense(&golden("model/qwen3_untied"), place);
    let path = place.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let norm = tensors
        .tensor("model.layers.1.post_attention_layernorm.weight")
        .unwrap();
    assert_eq!(norm.dtype(), safetensors::Dtype::BF16);
    let at = norm.data().as_ptr() as usize - bytes.as_ptr() as usize;
    for weight in bytes[at..at + 32].chunks_exact_mut(2) {
        weight.copy_from_slice(&value.to_le_bytes());
    }
    std::fs::write(&path, bytes).unwrap();
}

/// Inputs that are not finite are an error that names the matrix.
#[test]
fn inputs_that_are_not_finite_are_named() {
    let folder = Folder::new();
    let place = folder.0.join("model");
    with_norm(&place, 0x7f80);
    let source = Arc::new(Source::open(&place).unwrap());
    let device = Device::cpu(Some(2)).unwrap();
    let host = device.host_cpu().unwrap();
    let texts = texts(&source, 2);
    let error = calibrate(&device, &host, &source, &texts, &NOTHING_KEPT, &mut |_| {});
    let error = error.map(|_| ()).unwrap_err().to_string();
    assert!(
        error.contains("model.layers.1.mlp.gate_proj.weight: its inputs are not finite"),
        "{error}"
    );
}

/// Inputs that are always zero, with singular moments, do no harm.
#[test]
fn inputs_that_are_always_zero_do_no_harm() {
    let folder = Folder::new();
    let place = folder.0.join("model");
    with_norm(&place, 0);
    for m in calibrated(&place, &folder.0.join("out"), 2) {
        assert!(m.error <= m.error_of_sweep && m.error > 0.0, "{m:?}");
    }
}

/// An observer says how much a block's output changes with other weights, of batches of several lengths.
#[test]
fn observers_try_other_weights() {
    let source = Arc::new(Source::open(&golden("model").join("qwen3_untied")).unwrap());
    let device = Device::cpu(Some(2)).unwrap();
    let texts = texts(&source, 4).into_iter();
    let texts: Vec<_> = texts.map(|t| (t.tokens, t.documents)).collect();
    let mut observer = Observer::new(&device, source.clone(), &texts, [3, 0]).unwrap();
    assert!(observer.error().is_err());
    for block in 0..2 {
        observer.advance(&mut |_, _, _| Ok(())).unwrap();
        assert_eq!(observer.error().unwrap(), 0.0);
        let down = source.layout().blocks[block]
            .mlp
            .dense()
            .unwrap()
            .down
            .matrix;
        let m = &source.layout().matrices[down];
        let mut values = vec![0f32; m.rows * m.cols];
        source.matrix(down, 0..m.rows, &mut values).unwrap();
        let mut errors = Vec::new();
        for factor in [1.1, 2.0] {
            let other: Vec<f32> = values.iter().map(|v| v * factor).collect();
            observer.put(down, &other).unwrap();
            errors.push(observer.error().unwrap());
        }
        // The output is linear in this matrix: ten times the change has a hundred times the square.
        assert!(errors[0] > 0.0);
        assert!(
            (errors[1] / errors[0] / 100.0 - 1.0).abs() < 0.02,
            "{errors:?}"
        );
        observer.put(down, &values).unwrap();
    }
}
