//! Mixtures of experts: their pass against transformers, refused settings, and their calibration.

use std::sync::Arc;

use NVFP4::checkpoint::Encoding;
use NVFP4::format::nvfp4::Recipe::Sweep;
use NVFP4::model::compare::{Measures, Summary, compare};
use NVFP4::model::convert::{Container, ConvertOptions};
use NVFP4::model::training::{MlpLayout, Runner};
use NVFP4::train::{Distillation, TeacherPlacement, calibration};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::beginning::{converted, dense};
use super::calibrate::calibrated;
use super::*;

const MIXTURES: [&str; 8] = [
    "qwen3moe_normalized",
    "qwen3moe_mixed",
    "qwen3moe_window",
    "qwen3moe_saved",
    "qwen2moe_shared",
    "qwen35moe_shared",
    "qwen3next_shared",
    "qwen3next_dense",
];

/// The logits of all rows of some tokens.
fn logits(source: &Arc<Source>, tokens: &[u32]) -> Vec<f32> {
    let device = Device::cpu(Some(2)).unwrap();
    let mut runner = Runner::new(&device, source.clone()).unwrap();
    let batch = runner.batch(tokens, &[tokens.len()]).unwrap();
    let mut x = runner.embed(&batch).unwrap();
    let mut next = Array::empty();
    for block in 0..source.spec().blocks.len() {
        runner.run_block(&batch, block, &x, &mut next).unwrap();
        std::mem::swap(&mut x, &mut next);
    }
    runner.normalize(&batch, &x, &mut next).unwrap();
    let vocabulary = source.spec().vocab_size;
    let mut out = Array::empty();
    runner
        .logits(&batch, &mut next, &(0..vocabulary), &mut out)
        .unwrap();
    let mut values = vec![0.0; tokens.len() * vocabulary];
    out.first(values.len()).unwrap().read(&mut values).unwrap();
    values
}

#[test]
fn mixtures_agree_with_transformers() {
    for case in MIXTURES {
        let place = golden("model").join(case);
        let source = Arc::new(Source::open(&place).unwrap());
        let bytes = std::fs::read(place.join("expected.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for n in [7, 33] {
            let tokens = file.tensor(&format!("tokens_{n}")).unwrap();
            let tokens = tokens.data().as_chunks::<8>().0.iter();
            let tokens: Vec<u32> = tokens.map(|&t| i64::from_le_bytes(t) as u32).collect();
            let expected = floats(&file, &format!("logits_{n}"));
            let found = logits(&source, &tokens);
            let last = &found[found.len() - expected.len()..];
            for (found, expected) in last.iter().zip(&expected) {
                assert!(
                    (found - expected).abs() <= 2e-4,
                    "{case}: {found} {expected}"
                );
            }
        }
    }
}

/// A mixture learns in 4 bits, and goes on from a checkpoint to the same bits.
#[test]
fn mixtures_learn() {
    let device = Device::cpu(Some(2)).unwrap();
    for name in ["qwen3moe_normalized", "qwen2moe_shared"] {
        let source = Source::open(&golden("model").join(name)).unwrap();
        let vocabulary = source.spec().vocab_size as u32;
        let config = config(Recipe::default(), 30);
        let mut trainer = Trainer::new(&device, &source, &config).unwrap();
        let batches: Vec<Documents> = (0..30)
            .map(|step| Documents::within(step % 3, &[40, 9, 31], vocabulary))
            .collect();
        let folder = Folder::new();
        let mut losses = Vec::new();
        for (step, batch) in batches.iter().enumerate() {
            if step == 15 {
                let place = serde_json::Value::Null;
                trainer.save(&folder.0, &place, 1).unwrap();
            }
            losses.push(trainer.step(&[batch.batch()]).unwrap().loss);
        }
        assert!(losses[29] < 0.8 * losses[0], "{name}: {losses:?}");

        let (mut again, _) = Trainer::resume(&device, &source, &folder.0).unwrap();
        for (batch, loss) in batches[15..].iter().zip(&losses[15..]) {
            assert_eq!(again.step(&[batch.batch()]).unwrap().loss, *loss, "{name}");
        }
        assert_eq!(weights(&again), weights(&trainer), "{name}");
    }
}

/// Adapters of experts and of attention learn beside a frozen mixture.
#[test]
fn adapters_of_experts_learn() {
    let device = Device::cpu(Some(2)).unwrap();
    let source = Source::open(&golden("model/qwen3moe_mixed")).unwrap();
    let config = config(adapters::recipe(&["q_proj", "experts"]), 30);
    let mut trainer = Trainer::new(&device, &source, &config).unwrap();
    let vocabulary = source.spec().vocab_size as u32;
    let batch = Documents::within(1, &[60, 20], vocabulary);
    let step = |_| trainer.step(&[batch.batch()]).unwrap().loss;
    let losses: Vec<f64> = (0..30).map(step).collect();
    assert!(losses[29] < 0.9 * losses[0], "{losses:?}");
}

/// A dense model learns from a mixture, wherever that is.
#[test]
fn mixtures_teach() {
    let device = Device::cpu(Some(2)).unwrap();
    let student = Source::open(&golden("model/qwen3_untied")).unwrap();
    let vocabulary = student.spec().vocab_size as u32;
    let batch = Documents::within(3, &[12, 20], vocabulary);
    let of = |placement| {
        let config = Config {
            distillation: Some(Distillation::default()),
            ..config(Recipe::float32(), 12)
        };
        let mut trainer = Trainer::new(&device, &student, &config).unwrap();
        let teacher = Arc::new(Source::open(&golden("model/qwen3moe_mixed")).unwrap());
        trainer
            .set_teacher(&student, teacher, placement, 64)
            .unwrap();
        let step = |_| trainer.step(&[batch.batch()]).unwrap().loss;
        (0..12).map(step).collect::<Vec<f64>>()
    };
    let losses = of(TeacherPlacement::Resident);
    assert!(losses[11] < 0.9 * losses[0], "{losses:?}");
    assert_eq!(of(TeacherPlacement::Streamed), losses);
}

/// Experts are calibrated; routers and shared experts stay.
#[test]
fn experts_are_calibrated() {
    for name in ["qwen3moe_mixed", "qwen3moe_saved", "qwen2moe_shared"] {
        let folder = Folder::new();
        let place = folder.0.join("model");
        dense(&golden("model").join(name), &place);
        let matrices = calibrated(&place, &folder.0.join("two"), 2);
        let source = Arc::new(Source::open(&place).unwrap());
        let layout = source.layout();
        let all = layout.blocks.iter().flat_map(|block| block.projections());
        let names = all.map(|p| layout.matrices[p.matrix].name.as_str());
        let mut expected: Vec<&str> = names.filter(|n| !n.contains("shared_expert")).collect();
        let mut found: Vec<&str> = matrices.iter().map(|m| &*m.name).collect();
        expected.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, expected);
        let (mut error, mut of_sweep) = (0.0, 0.0);
        for m in &matrices {
            assert!(m.error <= m.error_of_sweep && m.error > 0.0, "{m:?}");
            (error, of_sweep) = (error + m.error, of_sweep + m.error_of_sweep);
        }
        assert!(error < 0.95 * of_sweep, "{name}: {error} {of_sweep}");
        let made = Arc::new(Source::open(&folder.0.join("two")).unwrap());
        let differences = compared(&made, &source);
        assert!(differences.iter().all(|d| *d > 0.0), "{differences:?}");
        assert!(compared(&source, &source).iter().all(|d| *d == 0.0));
        for (id, m) in layout.matrices.iter().enumerate() {
            let [found, expected] = [&made, &source].map(|source| values(source, id));
            let error = relative_error(&found, &expected);
            assert!(error < 0.2, "{}: {error}", m.name);
            let is_router = m.name.ends_with(".mlp.gate.weight");
            assert!(!is_router || error == 0.0, "{}: {error}", m.name);
        }
    }
}

/// The mean KL of a model's predictions to those of another, and that with one block of it exchanged, of each.
fn compared(examined: &Arc<Source>, reference: &Arc<Source>) -> Vec<f64> {
    let device = Device::cpu(Some(2)).unwrap();
    let tokens: Vec<u32> = (0..40).map(|i| i * 37 % 150).collect();
    let measures = Measures {
        tokens: true,
        streams: true,
        blocks: true,
    };
    let windows = [&tokens[..]];
    let found = compare(
        &device,
        examined,
        reference,
        &windows,
        measures,
        &mut |_| {},
    )
    .unwrap();
    let mean = Summary::new(&found.tokens).mean;
    std::iter::once(mean)
        .chain(found.block_divergences)
        .collect()
}

/// The values of a matrix.
fn values(source: &Source, id: MatrixId) -> Vec<f32> {
    let m = &source.layout().matrices[id];
    let mut values = vec![0.0; m.rows * m.cols];
    source.matrix(id, 0..m.rows, &mut values).unwrap();
    values
}

fn relative_error(found: &[f32], expected: &[f32]) -> f32 {
    let pairs = found.iter().zip(expected);
    let difference: f32 = pairs.map(|(a, b)| (a - b).powi(2)).sum();
    let whole: f32 = expected.iter().map(|v| v * v).sum();
    (difference / whole).sqrt()
}

/// The model in bfloat16, with the experts of each block in two stacks, as transformers 5 writes them: gate beside up, and down.
fn stacked(from: &Path, to: &Path) {
    dense(from, to);
    let source = Source::open(to).unwrap();
    let path = to.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let layout = source.layout();
    let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, tensor) in file.tensors() {
        if !name.contains(".mlp.experts.") {
            tensors.push((name, tensor.shape().to_vec(), tensor.data().to_vec()));
        }
    }
    for (index, block) in layout.blocks.iter().enumerate() {
        let MlpLayout::Experts(mixture) = &block.mlp else {
            continue;
        };
        let of = |id: MatrixId| {
            let m = &layout.matrices[id];
            (
                file.tensor(&m.name).unwrap().data().to_vec(),
                m.rows,
                m.cols,
            )
        };
        let (mut both, mut down) = (Vec::new(), Vec::new());
        let [mut of_both, mut of_down] = [[0; 2]; 2];
        for expert in &mixture.experts {
            for projection in &expert.gate_up {
                let (values, rows, cols) = of(projection.matrix);
                both.extend(values);
                of_both = [2 * rows, cols];
            }
            let (values, rows, cols) = of(expert.down.matrix);
            down.extend(values);
            of_down = [rows, cols];
        }
        for (name, shape, values) in [
            ("gate_up_proj", of_both, both),
            ("down_proj", of_down, down),
        ] {
            let name = format!("model.layers.{index}.mlp.experts.{name}");
            let shape = vec![mixture.experts.len(), shape[0], shape[1]];
            tensors.push((name, shape, values));
        }
    }
    let views = tensors.iter().map(|(name, shape, values)| {
        let view = TensorView::new(Dtype::BF16, shape.clone(), values).unwrap();
        (name.as_str(), view)
    });
    let written = safetensors::serialize(views, None).unwrap();
    std::fs::write(&path, written).unwrap();
}

/// Stacks of experts get the codes of experts that are held apart.
#[test]
fn stacks_of_experts_are_calibrated_alike() {
    let folder = Folder::new();
    let [apart, together] = ["apart", "together"].map(|name| folder.0.join(name));
    let place = golden("model/qwen3moe_mixed");
    dense(&place, &apart);
    stacked(&place, &together);
    let [a, b] = [&apart, &together].map(|place| {
        let out = place.with_extension("out");
        (calibrated(place, &out, 2), Source::open(&out).unwrap())
    });
    assert_eq!(format!("{:?}", a.0), format!("{:?}", b.0));
    for (id, m) in a.1.layout().matrices.iter().enumerate() {
        assert_eq!(values(&a.1, id), values(&b.1, id), "{}", m.name);
    }
    let [a, b] = [&apart, &together].map(|place| {
        let out = place.with_extension("swept");
        converted(
            place,
            &out,
            &ConvertOptions::new(Container::ModelOpt, Sweep),
        );
        Source::open(&out).unwrap()
    });
    for (id, m) in a.layout().matrices.iter().enumerate() {
        assert_eq!(values(&a, id), values(&b, id), "{}", m.name);
    }
}

/// A conversion calibrates experts, keeps routers and shared experts, and refuses options that a mixture does not support before any work.
#[test]
fn conversions_keep_what_every_token_goes_through() {
    let folder = Folder::new();
    let shape = folder.0.join("shape");
    std::fs::create_dir(&shape).unwrap();
    let config = std::fs::read_to_string(golden("model/qwen2moe_shared/config.json")).unwrap();
    let config = config.replace("\"vocab_size\": 150", "\"vocab_size\": 320");
    std::fs::write(shape.join("config.json"), config).unwrap();
    let tokenizer = golden("model/qwen3_tied/tokenizer.json");
    std::fs::copy(tokenizer, shape.join("tokenizer.json")).unwrap();
    let checkpoint = Source::fresh(&shape, 5).unwrap().checkpoint().clone();
    let device = Device::cpu(Some(2)).unwrap();
    let pool = NVFP4::base::threads::Pool::new(2).unwrap();
    let out = folder.0.join("out");
    let run = |options: &calibration::Options| {
        let conversion = ConvertOptions::new(Container::ModelOpt, Sweep);
        let source = checkpoint.clone();
        calibration::quantize(
            source,
            &out,
            &conversion,
            (&device, &pool),
            options,
            &mut |_| {},
        )
    };
    let text = calibration::TextOptions {
        windows: Some(3),
        window: Some(64),
        ..Default::default()
    };
    let plain = calibration::Options {
        text,
        ..Default::default()
    };
    let budget = calibration::Options {
        budget: Some(5.0),
        ..plain.clone()
    };
    let error = run(&budget).map(|_| ()).unwrap_err();
    assert!(
        error.message().contains("experts run in NVFP4 alone"),
        "{error}"
    );
    let distilled = calibration::Options {
        distill: Some(5),
        ..plain.clone()
    };
    assert!(!out.exists());
    let made = run(&distilled).unwrap();
    assert!(made.distilled.is_some() && made.calibrated.len() == 2 * (4 + 6 * 3));
    std::fs::remove_dir_all(&out).unwrap();
    assert_eq!(run(&plain).unwrap().calibrated.len(), 2 * (4 + 6 * 3));
    for entry in NVFP4::model::open(&out).unwrap().entries() {
        let is_block = entry.name.contains(".layers.") && entry.name.ends_with("_proj.weight");
        let quantized = is_block && !entry.name.contains("shared_expert");
        assert_eq!(
            entry.encoding == Encoding::Nvfp4,
            quantized,
            "{}",
            entry.name
        );
    }
    Served::load(&out, &LoadOptions::new(device)).unwrap();
}
