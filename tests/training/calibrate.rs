//! Quantizing by what a model makes of text.

use std::sync::Arc;

use NVFP4::checkpoint::Checkpoint;
use NVFP4::format::nvfp4;
use NVFP4::model::calibrate::{CalibratedMatrix, CalibrationText, calibrate};
use NVFP4::model::convert::{Container, ConvertOptions};

use super::beginning::{converted, dense, files};
use super::*;

/// Texts of tokens that a model has.
fn texts(source: &Source, count: u64) -> Vec<CalibrationText> {
    let vocabulary = source.spec().vocab_size as u32;
    let text = |seed| {
        let documents = Documents::new(seed, &[48, 80]);
        CalibrationText {
            tokens: documents.tokens.iter().map(|t| t % vocabulary).collect(),
            documents: vec![48, 80],
        }
    };
    (0..count).map(text).collect()
}

/// The model in `place`, calibrated on so many threads, as a folder; and what became of its matrices.
fn calibrated(place: &Path, to: &Path, threads: usize) -> Vec<CalibratedMatrix> {
    let device = Device::cpu(Some(threads)).unwrap();
    let source = Arc::new(Source::open(place).unwrap());
    let (mut told, texts) = (Vec::new(), texts(&source, 9));
    let host = device.host_cpu().unwrap();
    let (checkpoint, matrices) = calibrate(&device, &host, &source, &texts, &mut |p| {
        told.push((p.done, p.total))
    })
    .unwrap();
    let blocks = source.spec().blocks.len();
    assert_eq!(
        told,
        (0..=blocks).map(|done| (done, blocks)).collect::<Vec<_>>()
    );
    let options = ConvertOptions::new(Container::ModelOpt, nvfp4::Recipe::Sweep);
    converted_from(&checkpoint, to, &options);
    matrices
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
        let error = calibrate(&device, &host, &source, &texts(&source, count), &mut |_| {});
        let error = error.map(|_| ()).unwrap_err();
        assert!(
            error.message().contains("there must be two at least"),
            "{error}"
        );
    }
}
