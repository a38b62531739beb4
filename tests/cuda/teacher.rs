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
use crate::training::{ARITHMETIC, ROUNDING};
use crate::training_model::text;

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

/// The logits of a student and of a teacher for some rows, and all that the loss takes and leaves.
struct Lesson {
    gpu: Arc<Gpu>,
    student: Logits,
    teacher: Logits,
    chunks: Vec<usize>,
    /// The first column of each chunk, and the end of the last.
    firsts: Vec<usize>,
    cap: Option<f32>,
    /// The size of the logits.
    size: f64,
    temperature: f32,
    label_share: f32,
    labels: Vec<i32>,
    weights: Vec<f32>,
    device_labels: DeviceBuffer,
    device_weights: DeviceBuffer,
    found: DeviceBuffer,
    sums: DeviceBuffer,
}

/// The totals of a loss in f64, and for each row and column its gradient and the size of its terms.
struct Expected {
    totals: [f64; DIVERGENCE_TOTALS],
    gradients: Vec<Vec<(f64, f64)>>,
}

impl Lesson {
    /// Every third row has no label. The teacher is the student if they are `equal`.
    fn new(
        gpu: &Arc<Gpu>,
        rows: usize,
        chunks: Vec<usize>,
        (cap, size): (Option<f32>, f32),
        (temperature, label_share): (f32, f32),
        equal: bool,
    ) -> Lesson {
        let vocabulary: usize = chunks.iter().sum();
        let weights: Vec<f32> = normal(291, rows).iter().map(|w| 1.0 + 0.25 * w).collect();
        let label = |row: usize| match row % 3 {
            1 => -1,
            _ => (row * 7919 % vocabulary) as i32,
        };
        let labels: Vec<i32> = (0..rows).map(label).collect();
        let mut firsts = vec![0];
        for columns in &chunks {
            firsts.push(firsts[firsts.len() - 1] + columns);
        }
        let seed = if equal { 91 } else { 191 };
        Lesson {
            gpu: gpu.clone(),
            student: Logits::new(gpu, 91, (rows, &chunks), size),
            teacher: Logits::new(gpu, seed, (rows, &chunks), size),
            chunks,
            firsts,
            cap,
            size: size.into(),
            temperature,
            label_share,
            device_labels: upload(gpu, &labels),
            device_weights: upload(gpu, &weights),
            labels,
            weights,
            found: poisoned(gpu, rows * DIVERGENCE_FOUND * 4),
            sums: poisoned(gpu, rows * DIVERGENCE_SUMS * 4),
        }
    }

    fn known(&self) -> Divergence<'_> {
        Divergence {
            labels: (&self.device_labels).into(),
            weights: (&self.device_weights).into(),
            found: (&self.found).into(),
            sums: (&self.sums).into(),
            temperature: self.temperature,
            label_share: self.label_share,
        }
    }

    /// A chunk of the student's logits, and the same of the teacher's.
    fn both(&self, c: usize) -> [LogitChunk<'_>; 2] {
        [&self.student, &self.teacher].map(|of| of.chunk(c, self.firsts[c], self.cap))
    }

    /// The bits of the totals.
    fn totals(&self) -> [u64; DIVERGENCE_TOTALS] {
        let known = self.known();
        for c in 0..self.chunks.len() {
            training::divergence_chunk(&known, self.both(c).each_ref(), c == 0).unwrap();
        }
        let totals = poisoned(&self.gpu, DIVERGENCE_TOTALS * 8);
        training::divergence_finish(&known, (&totals).into()).unwrap();
        let mut got = [0u64; DIVERGENCE_TOTALS];
        totals.read(0, &mut got).unwrap();
        got
    }

    /// The gradient of a chunk of the student's logits.
    fn gradient(&self, c: usize) -> Vec<f64> {
        let count = self.labels.len() * self.chunks[c];
        let dlogits = poisoned(&self.gpu, count * 2);
        let (known, both) = (self.known(), self.both(c));
        training::divergence_gradient(&known, both.each_ref(), (&dlogits).into()).unwrap();
        let mut bits = vec![0u16; count];
        dlogits.read(0, &mut bits).unwrap();
        let values = bits.into_iter().map(bf16::from_bits);
        values.map(bf16::to_f64).collect()
    }

    fn expected(&self) -> Expected {
        let mut expected = Expected {
            totals: [0.0; DIVERGENCE_TOTALS],
            gradients: Vec::new(),
        };
        for row in 0..self.labels.len() {
            let gradient = self.expect_row(row, &mut expected.totals);
            expected.gradients.push(gradient);
        }
        expected
    }

    /// Adds a row to the totals, and returns its gradient with the sizes of the terms.
    fn expect_row(&self, row: usize, totals: &mut [f64; DIVERGENCE_TOTALS]) -> Vec<(f64, f64)> {
        let (t, share) = (f64::from(self.temperature), f64::from(self.label_share));
        let own = self.student.row(row, self.cap);
        let other = self.teacher.row(row, self.cap);
        let Ok(label) = usize::try_from(self.labels[row]) else {
            return vec![(0.0, 0.0); own.len()];
        };
        let [cold, warm] = [1.0, t].map(|t| log_softmax(&own, t));
        let taught = log_softmax(&other, t);
        let weight = f64::from(self.weights[row]);
        let divergences = taught.iter().zip(&warm).map(|(a, b)| a.exp() * (a - b));
        let (entropy, divergence) = (-cold[label], divergences.sum::<f64>());
        totals[0] += weight * ((1.0 - share) * t * t * divergence + share * entropy);
        totals[1] += weight * entropy;
        totals[2] += weight * divergence;
        let of_column = |i: usize| {
            let onehot = f64::from(u8::from(i == label));
            let (a, b, p) = (warm[i].exp(), taught[i].exp(), cold[i].exp());
            let capped = |c: f32| 1.0 - (own[i] / f64::from(c)).powi(2);
            let slope = self.cap.map_or(1.0, capped);
            let by_teacher = (1.0 - share) * t * (a - b);
            let error = (2.0 * self.size + 4.0) * (t * (a + b) + p) + onehot;
            (weight * (by_teacher + share * (p - onehot)) * slope, error)
        };
        (0..own.len()).map(of_column).collect()
    }

    /// The logarithms of the sums of exponentials that the loss leaves, for each row with a label.
    fn check_sums(&self, what: &str) {
        let rows = self.labels.len();
        let found = read_f32(&self.sums, rows * DIVERGENCE_SUMS);
        for row in (0..rows).filter(|row| self.labels[*row] >= 0) {
            let own = self.student.row(row, self.cap);
            let lse = own.iter().map(|l| l.exp()).sum::<f64>().ln();
            let bound = 4.0 * self.size * ARITHMETIC;
            assert_within(f64::from(found[row * DIVERGENCE_SUMS]), lse, bound, what);
        }
    }
}

/// Rows with and without labels, in chunks that are unlike each other; a teacher that is the student teaches exactly nothing.
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
        let t = f64::from(temperature);
        let what = format!("{rows} rows of {chunks:?} at {t}");
        let (form, by) = ((cap, size), (temperature, share));
        let lesson = Lesson::new(&gpu, rows, chunks, form, by, equal);
        let got = lesson.totals();
        assert_eq!(got, lesson.totals());
        let got = got.map(f64::from_bits);

        let want = lesson.expected();
        let bound = 4.0 * lesson.size * rows as f64 * t.powi(2).max(1.0) * ARITHMETIC;
        for (got, want) in got.iter().zip(want.totals) {
            assert_within(*got, want, bound, &what);
        }
        if equal {
            assert_eq!((got[0], got[2]), (0.0, 0.0), "{what}");
        }
        lesson.check_sums(&what);

        for (c, &columns) in lesson.chunks.iter().enumerate() {
            for (i, got) in lesson.gradient(c).into_iter().enumerate() {
                let (want, error) = want.gradients[i / columns][lesson.firsts[c] + i % columns];
                let bound = want.abs() * ROUNDING + error * ARITHMETIC;
                assert_within(got, want, bound, &what);
                assert!(!equal || got == 0.0, "{what}: {got}");
            }
        }
        let (a, b) = (
            lesson.student.chunk(0, 0, cap),
            lesson.teacher.chunk(0, 4, cap),
        );
        expect_kind(
            training::divergence_chunk(&lesson.known(), [&a, &b], true),
            ErrorKind::InvalidArgument,
            "they must be the same",
        );
    }
}

/// Losses of ten steps of one golden model by another one, and the comparison of the two afterwards.
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

/// Estimates of a step count a teacher, by its place.
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
