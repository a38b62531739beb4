//! Learning from a teacher on a GPU: the loss against f64, and whole steps against the CPU.

use std::sync::Arc;

use NVFP4::base::{ErrorKind, memory};
use NVFP4::cuda::training::{
    self, DIVERGENCE_FOUND, DIVERGENCE_SUMS, DIVERGENCE_TOTALS, Divergence, LogitChunk,
};
use NVFP4::cuda::{DeviceBuffer, Gpu};
use NVFP4::model::Device;
use NVFP4::model::training::{Placement, Source};
use NVFP4::train::memory::Estimate;
use NVFP4::train::{
    Comparison, Config, Distillation, MicroBatch, Recipe, Recompute, TeacherPlacement, Trainer,
};
use half::bf16;

use crate::common::{expect_kind, golden};
use crate::support::{gpu, normal, poisoned, read_f32, upload};

/// The error of rounding to bf16, relative to the value, and of some operations in f32, relative to the size of their operands.
const ROUNDING: f64 = 1.01 / 256.0;
const ARITHMETIC: f64 = 1.0 / (1 << 20) as f64;

/// A model's logits of some rows, chunk by chunk.
struct Logits {
    rows: usize,
    values: Vec<Vec<f32>>,
    device: Vec<DeviceBuffer>,
}

impl Logits {
    fn new(gpu: &Arc<Gpu>, seed: u64, (rows, chunks): (usize, &[usize]), size: f32) -> Logits {
        let of_chunk = |(seed, columns): (u64, &usize)| -> Vec<f32> {
            let values = normal(seed, rows * columns);
            values.iter().map(|x| x * size / 3.0).collect()
        };
        let values: Vec<_> = (seed..).zip(chunks).map(of_chunk).collect();
        Logits {
            rows,
            device: values.iter().map(|v| upload(gpu, v)).collect(),
            values,
        }
    }

    fn chunk(&self, c: usize, first_column: usize, cap: Option<f32>) -> LogitChunk<'_> {
        LogitChunk {
            logits: (&self.device[c]).into(),
            first_column,
            columns: self.values[c].len() / self.rows,
            cap,
        }
    }

    /// A row of all chunks in f64, bounded.
    fn row(&self, row: usize, cap: Option<f32>) -> Vec<f64> {
        let capped = |l: f64| cap.map_or(l, |c| f64::from(c) * (l / f64::from(c)).tanh());
        let of_chunk = |values: &Vec<f32>| {
            let columns = values.len() / self.rows;
            values[row * columns..(row + 1) * columns].to_vec()
        };
        let row = self.values.iter().flat_map(of_chunk);
        row.map(|l| capped(f64::from(l))).collect()
    }
}

fn log_softmax(row: &[f64], temperature: f64) -> Vec<f64> {
    let sum: f64 = row.iter().map(|l| (l / temperature).exp()).sum();
    row.iter().map(|l| l / temperature - sum.ln()).collect()
}

#[track_caller]
fn assert_within(got: f64, want: f64, bound: f64, what: &str) {
    assert!(
        (got - want).abs() <= bound,
        "{what}: {got}, not {want}, within {bound:e}"
    );
}

/// Rows with and without labels, in chunks that are unlike each other; of a teacher that is the student, exactly nothing.
#[test]
fn the_divergence_from_a_teacher_agrees_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (rows, chunks, cap, size, temperature, share, equal) in [
        (37, vec![1028, 60, 4], None, 8.0, 1.0, 0.0, false),
        (37, vec![16384, 2000], Some(30.0), 10.0, 2.0, 0.25, false),
        (1024, vec![8192, 4096], None, 20.0, 0.5, 0.0, false),
        (37, vec![1028, 61, 1], Some(30.0), 8.0, 3.0, 0.5, false),
        (64, vec![8192, 61], None, 20.0, 1.0, 0.0, true),
        (64, vec![8192, 61], Some(30.0), 20.0, 1.7, 0.0, true),
    ] {
        let vocabulary: usize = chunks.iter().sum();
        let student = Logits::new(&gpu, 91, (rows, &chunks), size);
        let teacher = Logits::new(&gpu, if equal { 91 } else { 191 }, (rows, &chunks), size);
        let weights: Vec<f32> = normal(291, rows).iter().map(|w| 1.0 + 0.25 * w).collect();
        let labels: Vec<i32> = (0..rows)
            .map(|row| match row % 3 {
                1 => -1,
                _ => (row * 7919 % vocabulary) as i32,
            })
            .collect();
        let (of_labels, of_weights) = (upload(&gpu, &labels), upload(&gpu, &weights));
        let found = poisoned(&gpu, rows * DIVERGENCE_FOUND * 4);
        let sums = poisoned(&gpu, rows * DIVERGENCE_SUMS * 4);
        let known = Divergence {
            labels: (&of_labels).into(),
            weights: (&of_weights).into(),
            found: (&found).into(),
            sums: (&sums).into(),
            temperature,
            label_share: share,
        };
        let mut firsts = vec![0];
        for columns in &chunks {
            firsts.push(firsts[firsts.len() - 1] + columns);
        }
        let run = || {
            for c in 0..chunks.len() {
                let both = [&student, &teacher].map(|of| of.chunk(c, firsts[c], cap));
                training::divergence_chunk(&known, both.each_ref(), c == 0).unwrap();
            }
            let totals = poisoned(&gpu, DIVERGENCE_TOTALS * 8);
            training::divergence_finish(&known, (&totals).into()).unwrap();
            let mut got = [0u64; DIVERGENCE_TOTALS];
            totals.read(0, &mut got).unwrap();
            got
        };
        let got = run();
        assert_eq!(got, run());
        let got = got.map(f64::from_bits);

        let (t, share) = (f64::from(temperature), f64::from(share));
        let mut want = [0.0; DIVERGENCE_TOTALS];
        let mut gradients = Vec::new();
        for row in 0..rows {
            let (own, other) = (student.row(row, cap), teacher.row(row, cap));
            let [cold, warm] = [1.0, t].map(|t| log_softmax(&own, t));
            let taught = log_softmax(&other, t);
            let weight = f64::from(weights[row]);
            if labels[row] < 0 {
                gradients.push(vec![(0.0, 0.0); vocabulary]);
                continue;
            }
            let label = labels[row] as usize;
            let divergences = taught.iter().zip(&warm).map(|(a, b)| a.exp() * (a - b));
            let (entropy, divergence) = (-cold[label], divergences.sum::<f64>());
            want[0] += weight * ((1.0 - share) * t * t * divergence + share * entropy);
            want[1] += weight * entropy;
            want[2] += weight * divergence;
            let of_column = |i: usize| {
                let onehot = f64::from(u8::from(i == label));
                let (a, b, p) = (warm[i].exp(), taught[i].exp(), cold[i].exp());
                let slope = cap.map_or(1.0, |c| 1.0 - (own[i] / f64::from(c)).powi(2));
                let by_teacher = (1.0 - share) * t * (a - b);
                let error = (2.0 * f64::from(size) + 4.0) * (t * (a + b) + p) + onehot;
                (weight * (by_teacher + share * (p - onehot)) * slope, error)
            };
            gradients.push((0..vocabulary).map(of_column).collect());
        }
        let what = format!("{rows} rows of {chunks:?} at {t}");
        let bound = 4.0 * f64::from(size) * rows as f64 * t.powi(2).max(1.0) * ARITHMETIC;
        for (got, want) in got.iter().zip(want) {
            assert_within(*got, want, bound, &what);
        }
        if equal {
            assert_eq!((got[0], got[2]), (0.0, 0.0), "{what}");
        }
        for row in (0..rows).filter(|row| labels[*row] >= 0) {
            let found = read_f32(&sums, rows * DIVERGENCE_SUMS);
            let own = student.row(row, cap);
            let lse = own.iter().map(|l| l.exp()).sum::<f64>().ln();
            let bound = 4.0 * f64::from(size) * ARITHMETIC;
            assert_within(f64::from(found[row * DIVERGENCE_SUMS]), lse, bound, &what);
        }

        for c in 0..chunks.len() {
            let dlogits = poisoned(&gpu, rows * chunks[c] * 2);
            let both = [&student, &teacher].map(|of| of.chunk(c, firsts[c], cap));
            training::divergence_gradient(&known, both.each_ref(), (&dlogits).into()).unwrap();
            let mut bits = vec![0u16; rows * chunks[c]];
            dlogits.read(0, &mut bits).unwrap();
            for (i, &bits) in bits.iter().enumerate() {
                let got = bf16::from_bits(bits).to_f64();
                let (want, error) = gradients[i / chunks[c]][firsts[c] + i % chunks[c]];
                let bound = want.abs() * ROUNDING + error * ARITHMETIC;
                assert_within(got, want, bound, &what);
                assert!(!equal || got == 0.0, "{what}: {got}");
            }
        }
        let (a, b) = (student.chunk(0, 0, cap), teacher.chunk(0, 4, cap));
        expect_kind(
            training::divergence_chunk(&known, [&a, &b], true),
            ErrorKind::InvalidArgument,
            "they must be the same",
        );
    }
}

/// Runs of tokens that step by one.
fn text(seed: usize, rows: usize, vocabulary: usize) -> (Vec<u32>, Vec<i32>) {
    let tokens: Vec<u32> = (0..=rows)
        .map(|i| ((seed * 37 + i / 9 * 61 + i) % vocabulary) as u32)
        .collect();
    let labels = tokens[1..].iter().map(|&t| t as i32).collect();
    (tokens[..rows].to_vec(), labels)
}

/// Losses of ten steps of one golden model by another one, and how they compare then.
fn lessons(
    device: &Device,
    (of, teacher): (&str, &str),
    config: &Config,
    placement: TeacherPlacement,
) -> (Vec<f64>, Comparison) {
    let [source, teacher] = [of, teacher].map(|name| Source::open(&golden(name)).unwrap());
    let vocabulary = source.spec().vocab_size;
    let mut trainer = Trainer::new(device, &source, config).unwrap();
    let before = memory::total().current;
    trainer
        .set_teacher(&source, Arc::new(teacher), placement, 256)
        .unwrap();
    let at = trainer.teacher().unwrap();
    assert_eq!(
        at.placement() == Placement::Streamed,
        placement == TeacherPlacement::Streamed
    );
    assert!(memory::total().current >= before + at.bytes() as u64);
    let documents = [40, 1, 130, 85];
    let (tokens, labels) = text(99, 256, vocabulary);
    let losses = (0..10).map(|step| {
        let (tokens, labels) = text(step, 256, vocabulary);
        let batch = MicroBatch {
            tokens: &tokens,
            documents: &documents,
            labels: &labels,
            weights: None,
        };
        trainer.step(&[batch]).unwrap().loss
    });
    let losses = losses.collect();
    let batch = MicroBatch {
        tokens: &tokens,
        documents: &documents,
        labels: &labels,
        weights: None,
    };
    (losses, trainer.compare(&[batch], true).unwrap())
}

#[test]
fn a_gpu_learns_from_a_teacher_as_the_cpu_does() {
    let Some(gpu) = gpu() else { return };
    let devices = [Device::cpu(None).unwrap(), Device::Cuda(gpu)];
    for (pair, temperature, label_share) in [
        (("qwen3_tied", "qwen2_untied"), 1.0, 0.0),
        (("qwen3_untied", "gemma3_narrow"), 2.0, 0.25),
        (("qwen2_tied", "phi3_window"), 1.0, 0.0),
    ] {
        let config = |recompute, head_chunk| {
            let mut config = Config {
                recipe: Recipe::default(),
                steps: 10,
                recompute,
                head_chunk,
                distillation: Some(Distillation {
                    temperature,
                    label_share,
                    ..Distillation::default()
                }),
                ..Config::default()
            };
            config.optimizer.rate = 2e-3;
            config
        };
        let plain = config(Recompute::Block, 8192);
        let [cpu, found] = devices
            .each_ref()
            .map(|device| lessons(device, pair, &plain, TeacherPlacement::Resident));
        for (a, b) in cpu.0.iter().zip(&found.0) {
            assert!(
                (a / b - 1.0).abs() < 0.03,
                "{pair:?}: {cpu:?} and {found:?}"
            );
        }
        let (a, b) = (cpu.1, found.1);
        assert!((a.loss / b.loss - 1.0).abs() < 0.03, "{a:?} and {b:?}");
        assert!(
            (a.divergence / b.divergence - 1.0).abs() < 0.05,
            "{a:?} and {b:?}"
        );
        // Neither the teacher's place nor kept activations change a bit.
        let streamed = lessons(&devices[1], pair, &plain, TeacherPlacement::Streamed);
        assert_eq!(found, streamed, "{pair:?}");
        let kept = config(Recompute::None, 8192);
        let kept = lessons(&devices[1], pair, &kept, TeacherPlacement::Auto);
        assert_eq!(found, kept, "{pair:?}");
    }
}

/// A model has nothing to learn from itself, whatever the rate.
#[test]
fn a_model_on_a_gpu_learns_nothing_from_itself() {
    let Some(gpu) = gpu() else { return };
    for temperature in [1.0, 1.7] {
        let mut config = Config {
            recipe: Recipe::float32(),
            steps: 10,
            distillation: Some(Distillation {
                temperature,
                ..Distillation::default()
            }),
            ..Config::default()
        };
        config.optimizer.rate = 1.0;
        config.optimizer.decay = 0.0;
        let device = Device::Cuda(gpu.clone());
        let pair = ("qwen2_untied", "qwen2_untied");
        let (losses, compared) = lessons(&device, pair, &config, TeacherPlacement::Auto);
        assert_eq!((losses, compared.divergence), (vec![0.0; 10], 0.0));
    }
}

/// The library's own account of a step with a teacher is what was reckoned, within a few percent.
#[test]
fn estimates_of_a_gpu_count_a_teacher() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu);
    let [source, teacher] =
        ["qwen3_tied", "qwen2_untied"].map(|n| Source::open(&golden(n)).unwrap());
    let config = Config {
        distillation: Some(Distillation::default()),
        ..Config::default()
    };
    let of = |placement| {
        let teacher = Some((&teacher, placement));
        Estimate::with_teacher(&source, &config, &device, 2048, teacher)
    };
    let (resident, streamed) = (of(Placement::Resident), of(Placement::Streamed));
    let plain = Estimate::new(&source, &config, &device, 2048);
    assert!(resident.teacher > streamed.teacher && plain.teacher == 0);
    assert!(resident.activations > plain.activations);
    assert_eq!(resident.states, plain.states);
}
