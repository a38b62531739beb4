//! Training on the CPU: gradients against torch's autograd, steps of the optimizer against f64, and the guarantees of a trainer.

#[path = "training/adapters.rs"]
mod adapters;
#[path = "training/beginning.rs"]
mod beginning;
#[path = "training/beside.rs"]
mod beside;
#[path = "training/calibrate.rs"]
mod calibrate;
#[path = "training/exact.rs"]
mod exact;
#[path = "training/experts.rs"]
mod experts;
#[path = "training/hidden.rs"]
mod hidden;
#[path = "training/memory.rs"]
mod memory;
#[path = "training/precision.rs"]
mod precision;
#[path = "training/recurrent.rs"]
mod recurrent;
#[path = "training/scales.rs"]
mod scales;
#[path = "training/teacher.rs"]
mod teacher;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use NVFP4::base::call::Watch;
use NVFP4::base::{ErrorKind, Result};
use NVFP4::engine::Served;
use NVFP4::format::adamw::{FirstForm, SecondForm, WeightForm};
use NVFP4::format::residual::Bits;
use NVFP4::model::convert::Tables;
use NVFP4::model::training::{
    Batch, Layout, MatrixId, Options, Pass, RowGradients, Source, Store, VectorId,
};
use NVFP4::model::{KvType, LoadOptions, Logits, Scratch};
use NVFP4::ops::{Array, Device, Mixed, Slice, SliceMut};
use NVFP4::train::{
    Clip, Config, Decay, MicroBatch, Outcome, ProductForm, Recipe, Recompute, Schedule, Trainer,
};
use safetensors::SafeTensors;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name)
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let tensor = file
        .tensor(name)
        .unwrap_or_else(|_| panic!("{name} is missing"));
    let bytes = tensor.data().as_chunks::<4>().0;
    bytes.iter().map(|&b| f32::from_le_bytes(b)).collect()
}

fn integers(file: &SafeTensors<'_>, name: &str) -> Vec<i32> {
    let bytes = file
        .tensor(name)
        .unwrap()
        .data()
        .as_chunks::<4>()
        .0
        .to_vec();
    bytes.iter().map(|&b| i32::from_le_bytes(b)).collect()
}

/// A folder of its own, which goes with it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("nvfp4-training-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The parameters of a checkpoint as they are, and the gradients that come.
struct Dense {
    layout: Layout,
    matrices: Vec<Vec<f32>>,
    vectors: Vec<(Array, Array)>,
    gradients: Vec<Vec<f32>>,
}

impl Dense {
    fn new(device: &Device, source: &Source) -> Dense {
        let layout = source.layout().clone();
        let array = |values: &[f32]| {
            let mut array = Array::scratch(device, values.len()).unwrap();
            array.all_mut().copy_from(Slice::Host(values)).unwrap();
            array
        };
        let matrices: Vec<_> = (0..layout.matrices.len())
            .map(|id| {
                let m = &layout.matrices[id];
                let mut values = vec![0.0; m.rows * m.cols];
                source.matrix(id, 0..m.rows, &mut values).unwrap();
                values
            })
            .collect();
        let vectors = (0..layout.vectors.len())
            .map(|id| {
                let values = source.vector(id).unwrap();
                (array(&values), array(&vec![0.0; values.len()]))
            })
            .collect();
        Dense {
            gradients: matrices.iter().map(|m| vec![0.0; m.len()]).collect(),
            layout,
            matrices,
            vectors,
        }
    }

    /// Rows `[.., cols]` of gradients by the names that files have, which put some matrices below each other.
    fn gradient(&self, name: &str) -> (usize, Vec<f32>) {
        let parts: Vec<String> = match name {
            n if n.contains("qkv_proj") => ["q_proj", "k_proj", "v_proj"]
                .map(|p| n.replace("qkv_proj", p))
                .to_vec(),
            n if n.contains("gate_up_proj") => ["gate_proj", "up_proj"]
                .map(|p| n.replace("gate_up_proj", p))
                .to_vec(),
            n => vec![n.to_owned()],
        };
        let (mut cols, mut all) = (1, Vec::new());
        for part in parts {
            if let Some(id) = self.layout.matrices.iter().position(|m| m.name == part) {
                cols = self.layout.matrices[id].cols;
                all.extend_from_slice(&self.gradients[id]);
            } else {
                let id = self.layout.vectors.iter().position(|v| v.name == part);
                let id = id.unwrap_or_else(|| panic!("no parameter {part}"));
                all.extend_from_slice(self.vectors[id].1.all().host().unwrap());
            }
        }
        (cols, all)
    }
}

impl Store for Dense {
    fn shape(&self, matrix: MatrixId) -> (usize, usize) {
        let m = &self.layout.matrices[matrix];
        (m.rows, m.cols)
    }

    fn read(
        &mut self,
        matrix: MatrixId,
        rows: Range<usize>,
        out: SliceMut<'_, Mixed>,
    ) -> Result<()> {
        let cols = self.layout.matrices[matrix].cols;
        out.copy_from(Slice::Host(
            &self.matrices[matrix][rows.start * cols..rows.end * cols],
        ))
    }

    fn embed(
        &mut self,
        matrix: MatrixId,
        tokens: &[u32],
        mut out: SliceMut<'_, Mixed>,
    ) -> Result<()> {
        let cols = self.layout.matrices[matrix].cols;
        for (i, &token) in tokens.iter().enumerate() {
            let row = &self.matrices[matrix][token as usize * cols..][..cols];
            out.reborrow()
                .part(i * cols..(i + 1) * cols)?
                .copy_from(Slice::Host(row))?;
        }
        Ok(())
    }

    fn vector(&self, vector: VectorId) -> Result<Slice<'_>> {
        Ok(self.vectors[vector].0.all())
    }

    fn vector_with_gradient(&mut self, vector: VectorId) -> Result<(Slice<'_>, SliceMut<'_>)> {
        let (values, gradient) = &mut self.vectors[vector];
        Ok((values.all(), gradient.all_mut()))
    }

    fn trains(&self, _: MatrixId) -> bool {
        true
    }

    fn gradients(&mut self, gradients: &[RowGradients<'_>]) -> Result<()> {
        for of in gradients {
            let first = of.first_row * self.layout.matrices[of.matrix].cols;
            let to = self.gradients[of.matrix][first..].iter_mut();
            to.zip(of.values.host()?).for_each(|(to, g)| *to += g);
        }
        Ok(())
    }
}

/// The relative error of values in the Euclidean norm; where zeros are expected, the norm of the values.
fn relative_error(values: &[f64], expected: &[f32]) -> f64 {
    assert_eq!(values.len(), expected.len());
    let (mut error, mut norm) = (0.0, 0.0);
    for (v, &e) in values.iter().zip(expected) {
        error += (v - f64::from(e)).powi(2);
        norm += f64::from(e).powi(2);
    }
    (error / if norm == 0.0 { 1.0 } else { norm }).sqrt()
}

const CASES: [&str; 23] = [
    "qwen3_tied",
    "qwen3_untied",
    "qwen3_yarn",
    "qwen2_untied",
    "qwen2_tied",
    "qwen2_window",
    "llama_tied",
    "llama_biased",
    "llama_llama3",
    "gemma3_wide",
    "gemma2_mixed",
    "seedoss_biased",
    "exaone4_plain",
    "mistral_window",
    "phi3_window",
    "phi3_partial",
    "qwen3moe_normalized",
    "qwen3moe_mixed",
    "qwen2moe_shared",
    "qwen35_tied",
    "qwen35moe_shared",
    "qwen3next_shared",
    "qwen3next_dense",
];

/// The batch of a golden.
fn golden_batch(device: &Device, source: &Source, file: &SafeTensors<'_>) -> Batch {
    let tokens = integers(file, "tokens").into_iter().map(|t| t as u32);
    let documents = integers(file, "documents").into_iter().map(|n| n as usize);
    Batch::new(
        device,
        source.spec(),
        &tokens.collect::<Vec<_>>(),
        &documents.collect::<Vec<_>>(),
        &integers(file, "labels"),
        &floats(file, "weights"),
    )
    .unwrap()
}

/// Compares all gradients of a golden; gives their number.
fn check_gradients(store: &Dense, expected: &SafeTensors<'_>, case: &str) -> usize {
    const INPUTS: [&str; 9] = [
        "tokens",
        "documents",
        "labels",
        "weights",
        "loss",
        "targets",
        "teacher",
        "temperature",
        "share",
    ];
    let mut seen = 0;
    for name in expected.names() {
        let parameter = name.trim_end_matches(".right").trim_end_matches(".left");
        if INPUTS.contains(&name) {
            continue;
        }
        let (cols, gradient) = store.gradient(parameter);
        let rows = gradient.len() / cols;
        let right = |j: usize| (0.7 * j as f64 + 0.3).cos();
        let left = |i: usize| (1.1 * i as f64 + 0.5).cos();
        let at = |i: usize, j: usize| f64::from(gradient[i * cols + j]);
        let values: Vec<f64> = if name.ends_with(".right") {
            (0..rows)
                .map(|i| (0..cols).map(|j| at(i, j) * right(j)).sum())
                .collect()
        } else if name.ends_with(".left") {
            (0..cols)
                .map(|j| (0..rows).map(|i| at(i, j) * left(i)).sum())
                .collect()
        } else {
            gradient.iter().map(|&g| f64::from(g)).collect()
        };
        let error = relative_error(&values, &floats(expected, name));
        // f32 sums over 37 rows; keys' biases have gradients that all but cancel.
        let bound = if name.ends_with("k_proj.bias") {
            2e-3
        } else {
            2e-5
        };
        assert!(
            error < bound,
            "{case}: the gradient of {name} is {error:.1e} off"
        );
        seen += 1;
    }
    seen
}

/// Every parameter's gradient of every family, with documents packed, against torch's autograd in f64 with documents one by one.
#[test]
fn gradients_are_those_of_autograd() {
    let device = Device::cpu(Some(2)).unwrap();
    for case in CASES {
        let source = Source::open(&golden("model").join(case)).unwrap();
        let bytes = std::fs::read(golden("training").join(format!("{case}.safetensors"))).unwrap();
        let expected = SafeTensors::deserialize(&bytes).unwrap();
        let batch = golden_batch(&device, &source, &expected);
        // Recomputed activations have the same bits, with logits in the same chunks.
        let mut first: Option<Vec<Vec<f32>>> = None;
        let some = ["norms", "norms,heads,gate_up", "qkv,attention,output,down"];
        let some = some.map(|parts| parts.parse::<Recompute>().unwrap());
        let all = [Recompute::Block, Recompute::None, some[0], some[1], some[2]];
        for (recompute, head_chunk) in all.into_iter().map(|r| (r, 64)).chain([(all[0], 8192)]) {
            let options = Options {
                recompute,
                head_chunk,
                ..Options::default()
            };
            let mut store = Dense::new(&device, &source);
            let mut pass = Pass::new(&device, source.spec(), source.layout(), options).unwrap();
            let loss = pass.gradients(&mut store, &batch, 0).unwrap();
            let wanted = f64::from(floats(&expected, "loss")[0]);
            assert!(
                (loss / wanted - 1.0).abs() < 1e-5,
                "{case}: a loss of {loss}, and {wanted} is right"
            );
            let seen = check_gradients(&store, &expected, case);
            assert!(seen > source.layout().matrices.len(), "{case}: {seen}");
            match &first {
                None => first = Some(store.gradients),
                Some(first) if head_chunk == 64 => assert!(
                    *first == store.gradients,
                    "{case}: {recompute} gives other bits"
                ),
                Some(_) => {}
            }
        }
    }
}

/// Text of a small grammar, which a model can learn: runs of tokens that step by a stride of their own.
fn grammar(seed: u64, tokens: usize, vocabulary: u32) -> Vec<u32> {
    let mut text = Vec::with_capacity(tokens);
    let mut draws = 0;
    let mut draw = |below: u32| {
        draws += 1;
        (NVFP4::format::random::bits(seed, draws) % u64::from(below)) as u32
    };
    while text.len() < tokens {
        let (mut token, stride, length) = (draw(vocabulary), 1 + draw(4), 6 + draw(10));
        for _ in 0..length {
            text.push(token);
            token = (token + stride) % vocabulary;
        }
    }
    text.truncate(tokens);
    text
}

/// A batch of documents of these lengths; each token predicts the next one.
struct Documents {
    tokens: Vec<u32>,
    lengths: Vec<usize>,
    labels: Vec<i32>,
}

impl Documents {
    fn new(seed: u64, lengths: &[usize]) -> Documents {
        Documents::within(seed, lengths, 320)
    }

    /// Documents of a vocabulary of so many tokens.
    fn within(seed: u64, lengths: &[usize], vocabulary: u32) -> Documents {
        let mut documents = Documents {
            tokens: Vec::new(),
            lengths: lengths.to_vec(),
            labels: Vec::new(),
        };
        for (i, &length) in lengths.iter().enumerate() {
            let text = grammar(seed * 1000 + i as u64, length + 1, vocabulary);
            documents.tokens.extend(&text[..length]);
            documents.labels.extend(text[1..].iter().map(|&t| t as i32));
        }
        documents
    }

    fn batch(&self) -> MicroBatch<'_> {
        MicroBatch {
            tokens: &self.tokens,
            documents: &self.lengths,
            labels: &self.labels,
            weights: None,
        }
    }
}

fn config(recipe: Recipe, steps: u64) -> Config {
    let mut config = Config {
        recipe,
        steps,
        schedule: Schedule {
            warmup: 5,
            decay: Decay::Cosine,
            floor: 0.1,
        },
        ..Config::default()
    };
    config.optimizer.rate = 5e-3;
    config
}

fn trainer(config: &Config) -> Trainer {
    let source = Source::open(&golden("model/qwen3_tied")).unwrap();
    Trainer::new(&Device::cpu(Some(2)).unwrap(), &source, config).unwrap()
}

/// Every weight of a model as it is stored.
fn weights(trainer: &Trainer) -> Vec<Vec<f32>> {
    let device = Device::cpu(Some(1)).unwrap();
    let matrices = trainer.parameters().matrices().iter().map(|m| {
        let (rows, cols) = m.shape();
        let mut values = vec![0.0; rows * cols];
        m.decode(&device, 0..rows, true, SliceMut::Host(&mut values))
            .unwrap();
        values
    });
    let vectors = trainer.parameters().vectors().iter();
    matrices
        .chain(vectors.map(|v| v.values().host().unwrap().to_vec()))
        .collect()
}

/// 200 steps in 4 bits learn as much as steps in float32, and so do the delivered weights.
#[test]
fn four_bits_learn_what_float32_learns() {
    let evaluation = Documents::new(999, &[96; 8]);
    let mut losses = Vec::new();
    for recipe in [Recipe::float32(), Recipe::default()] {
        let mut trainer = trainer(&config(recipe, 200));
        for step in 0..200 {
            let batch = Documents::new(step, &[64; 8]);
            let report = trainer.step(&[batch.batch()]).unwrap();
            assert_eq!(report.outcome, Outcome::Updated);
        }
        losses.push(trainer.evaluate(&[evaluation.batch()], true).unwrap());
    }
    let [float32, four] = losses[..] else {
        unreachable!()
    };
    println!("delivered after 200 steps: {float32:.4} in float32, {four:.4} in 4 bits");
    // They came to 2.872 and 3.023, from 6.4.
    assert!(float32 < 2.95, "float32 comes to {float32}");
    assert!(four < 3.10, "4 bits come to {four}");
}

/// Ten steps, then another trainer that resumes from a checkpoint: the same bits as twenty steps.
#[test]
fn what_resumes_goes_on_to_the_same_bits() {
    let source = Source::open(&golden("model/qwen3_tied")).unwrap();
    let recipes = [
        Recipe::default(),
        Recipe {
            release: true,
            clip: Clip::Previous(0.5),
            ..Recipe::default()
        },
        Recipe {
            weights: WeightForm::Residual(Bits::Eight),
            first_moments: FirstForm::Nvfp4,
            second_moments: SecondForm::Int8,
            ..Recipe::default()
        },
        Recipe {
            activations: ProductForm::Nvfp4,
            gradients: ProductForm::Nvfp4,
            ..Recipe::default()
        },
        Recipe {
            weights: WeightForm::TwoTerm,
            first_moments: FirstForm::Int8,
            second_moments: SecondForm::Nvfp4,
            ..Recipe::default()
        },
        Recipe {
            weights: WeightForm::Bf16,
            ..Recipe::float32()
        },
    ];
    for recipe in recipes {
        let config = config(recipe, 20);
        let batches: Vec<Documents> = (0..20)
            .map(|step| Documents::new(step, &[40, 9, 31]))
            .collect();
        let mut whole = trainer(&config);
        let losses: Vec<_> = batches
            .iter()
            .map(|b| whole.step(&[b.batch()]).unwrap())
            .collect();

        let directory = Folder::new();
        let mut first = trainer(&config);
        for batch in &batches[..10] {
            first.step(&[batch.batch()]).unwrap();
        }
        let place = serde_json::json!({"row": 10});
        first.save(&directory.0, &place, 1).unwrap();
        drop(first);
        // Fewer threads give the same bits.
        let device = Device::cpu(Some(1)).unwrap();
        let (mut second, at) = Trainer::resume(&device, &source, &directory.0).unwrap();
        assert_eq!((second.steps(), at), (10, place));
        for (batch, expected) in batches[10..].iter().zip(&losses[10..]) {
            assert_eq!(second.step(&[batch.batch()]).unwrap(), *expected);
        }
        for (a, b) in weights(&whole).iter().zip(weights(&second)) {
            assert_eq!(
                a.iter().map(|v| v.to_bits()).collect::<Vec<_>>(),
                b.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
            );
        }
        // And so do the states that are no weights.
        let states = |trainer: &mut Trainer| {
            let directory = Folder::new();
            let place = trainer
                .save(&directory.0, &serde_json::Value::Null, 1)
                .unwrap();
            std::fs::read(place.join("state.bin")).unwrap()
        };
        assert_eq!(states(&mut whole), states(&mut second));
    }
}

/// A checkpoint of another model, a damaged one, and more of them than are kept.
#[test]
fn checkpoints_are_checked() {
    let device = Device::cpu(Some(1)).unwrap();
    let directory = Folder::new();
    let mut trainer = trainer(&config(Recipe::default(), 20));
    let batch = Documents::new(1, &[12]);
    for _ in 0..4 {
        trainer.step(&[batch.batch()]).unwrap();
        trainer
            .save(&directory.0, &serde_json::Value::Null, 2)
            .unwrap();
    }
    let kept: Vec<u64> = NVFP4::train::checkpoint::list(&directory.0)
        .unwrap()
        .iter()
        .map(|(step, _)| *step)
        .collect();
    assert_eq!(kept, [3, 4]);

    let other = Source::open(&golden("model/qwen3_untied")).unwrap();
    let error = Trainer::resume(&device, &other, &directory.0)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("lm_head.weight is not in the checkpoint"),
        "{error}"
    );
    assert!(
        error.contains("model.embed_tokens.weight is [320, 64] and in the model [150, 48]"),
        "{error}"
    );

    let own = Source::open(&golden("model/qwen3_tied")).unwrap();
    let state = directory.0.join("step-00000004/state.bin");
    let mut bytes = std::fs::read(&state).unwrap();
    bytes[1000] ^= 1;
    std::fs::write(&state, &bytes).unwrap();
    let error = Trainer::resume(&device, &own, &directory.0)
        .unwrap_err()
        .to_string();
    assert!(error.contains("damaged"), "{error}");
    // The one before is whole.
    let (before, _) = Trainer::resume(&device, &own, &directory.0.join("step-00000003")).unwrap();
    assert_eq!(before.steps(), 3);
    let error = Trainer::resume(&device, &own, &directory.0.join("none"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("no checkpoint"), "{error}");
}

/// One batch of eight documents, or eight micro-batches of one: the same gradients, but for the order of sums.
#[test]
fn accumulation_counts_tokens() {
    let lengths = [40, 3, 17, 64, 8, 1, 25, 30];
    let config = config(Recipe::float32(), 3);
    let (mut once, mut eight) = (trainer(&config), trainer(&config));
    for step in 0..3 {
        let all = Documents::new(step, &lengths);
        let mut parts = Vec::new();
        let mut first = 0;
        for &length in &lengths {
            let range = first..first + length;
            parts.push(Documents {
                tokens: all.tokens[range.clone()].to_vec(),
                lengths: vec![length],
                labels: all.labels[range.clone()].to_vec(),
            });
            first = range.end;
        }
        let a = once.step(&[all.batch()]).unwrap();
        let micro: Vec<_> = parts.iter().map(Documents::batch).collect();
        let b = eight.step(&micro).unwrap();
        assert!(
            (a.loss / b.loss - 1.0).abs() < 1e-6,
            "{} and {}",
            a.loss,
            b.loss
        );
        assert!((a.gradient_norm / b.gradient_norm - 1.0).abs() < 1e-5);
    }
    for (a, b) in weights(&once).iter().zip(weights(&eight)) {
        let a: Vec<f64> = a.iter().map(|&v| f64::from(v)).collect();
        // AdamW divides by the gradients' size, so nearly vanishing gradients move weights by their rounding.
        assert!(relative_error(&a, &b) < 1e-3, "{}", relative_error(&a, &b));
    }
}

/// A skipped step changes nothing, is counted, and ends training when it happens too often.
#[test]
fn what_is_not_finite_changes_nothing() {
    for recipe in [
        Recipe::default(),
        Recipe {
            release: true,
            clip: Clip::Never,
            ..Recipe::default()
        },
    ] {
        let mut config = config(recipe, 20);
        config.patience = 3;
        // Gradients overflow after such a step, and after an infinite one the loss.
        config.optimizer.rate = if config.recipe.release { 1e39 } else { 1e35 };
        config.optimizer.decay = 0.0;
        let source = Source::open(&golden("model/qwen3_tied")).unwrap();
        let mut trainer = Trainer::new(&Device::cpu(Some(1)).unwrap(), &source, &config).unwrap();
        let batch = Documents::new(1, &[30]);
        trainer.step(&[batch.batch()]).unwrap();
        let before = weights(&trainer);
        for i in 1..3 {
            let step = trainer.step(&[batch.batch()]).unwrap();
            assert_eq!(step.outcome, Outcome::Skipped);
            assert_eq!(step.loss.is_finite(), !config.recipe.release);
            assert_eq!(trainer.skipped(), i);
        }
        let error = trainer.step(&[batch.batch()]).unwrap_err().to_string();
        assert!(error.contains("3 steps in a row"), "{error}");
        assert_eq!(format!("{before:?}"), format!("{:?}", weights(&trainer)));
    }
}

/// An exported model gives the final logits of training.
#[test]
fn exports_are_what_was_trained() {
    let device = Device::cpu(Some(2)).unwrap();
    for (model, tables) in [
        ("qwen3_tied", Tables::Auto),
        ("qwen3_untied", Tables::Nvfp4),
        ("gemma3_wide", Tables::Bf16),
        ("phi3_partial", Tables::Int8),
        ("llama_biased", Tables::Int8),
        ("qwen3moe_mixed", Tables::Auto),
        ("qwen2moe_shared", Tables::Bf16),
    ] {
        let source = Source::open(&golden("model").join(model)).unwrap();
        let recipe = Recipe {
            tables,
            ..Recipe::default()
        };
        let mut trainer = Trainer::new(&device, &source, &config(recipe, 10)).unwrap();
        let vocabulary = source.spec().vocab_size as u32;
        let mut batch = Documents::new(5, &[40]);
        batch.tokens.iter_mut().for_each(|t| *t %= vocabulary);
        batch
            .labels
            .iter_mut()
            .for_each(|t| *t %= vocabulary as i32);
        for _ in 0..3 {
            trainer.step(&[batch.batch()]).unwrap();
        }
        let loss = trainer.evaluate(&[batch.batch()], true).unwrap();
        let directory = Folder::new();
        let place = directory.0.join("model");
        trainer
            .export_directory(&source, &place, Tables::Auto, false)
            .unwrap();
        let of_inference = |path: &Path| {
            let model = Served::load(path, &LoadOptions::new(device.clone())).unwrap();
            let mut cache = model.sequence(64, KvType::F32).unwrap();
            let (mut scratch, mut logits) = (Scratch::new(), Vec::new());
            model
                .forward(
                    &batch.tokens,
                    &mut cache,
                    &mut scratch,
                    Logits::All,
                    &mut logits,
                )
                .unwrap();
            let rows = logits.chunks_exact(vocabulary as usize).zip(&batch.labels);
            let loss_of = |(row, &label): (&[f32], &i32)| {
                let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f64 = row.iter().map(|&l| f64::from(l - largest).exp()).sum();
                sum.ln() - f64::from(row[label as usize] - largest)
            };
            rows.map(loss_of).sum::<f64>() / batch.labels.len() as f64
        };
        let reloaded = of_inference(&place);
        assert!(
            (reloaded / loss - 1.0).abs() < 1e-5,
            "{model}: {loss} trained, {reloaded} reloaded"
        );
        // A reloaded model can be trained on without a loss.
        let again = Source::open(&place).unwrap();
        let mut second = Trainer::new(&device, &again, &config(Recipe::default(), 10)).unwrap();
        let same = second.evaluate(&[batch.batch()], false).unwrap();
        // Tables in int8 are held in bfloat16.
        let most = if tables == Tables::Int8 { 1e-3 } else { 1e-5 };
        assert!(
            (same / loss - 1.0).abs() < most,
            "{model}: {loss} trained, {same} begun with"
        );
    }
}

/// The logits of all tokens.
fn logits_of(model: &Served, tokens: &[u32]) -> Result<Vec<f32>> {
    let mut cache = model.sequence(64, KvType::F32)?;
    let (mut scratch, mut logits) = (Scratch::new(), Vec::new());
    model.forward(tokens, &mut cache, &mut scratch, Logits::All, &mut logits)?;
    Ok(logits)
}

/// The model on live weights has the bits of the model that is exported and loaded, takes no memory for matrices, and follows the next step.
#[test]
fn the_model_runs_on_the_weights_that_are_trained() {
    let device = Device::cpu(Some(2)).unwrap();
    let dense = Recipe {
        keep_high: vec!["mlp".to_owned(), "lm_head".to_owned()],
        weights: WeightForm::TwoTerm,
        ..Recipe::default()
    };
    for (name, recipe) in [
        ("qwen3_tied", Recipe::default()),
        ("qwen3_untied", dense),
        ("gemma3_wide", Recipe::default()),
        ("phi3_partial", Recipe::default()),
        ("llama_biased", Recipe::float32()),
        ("qwen3moe_mixed", Recipe::default()),
        ("qwen2moe_shared", Recipe::default()),
        ("qwen35_tied", Recipe::default()),
        ("qwen3next_shared", Recipe::default()),
    ] {
        let source = Source::open(&golden("model").join(name)).unwrap();
        let mut trainer = Trainer::new(&device, &source, &config(recipe, 10)).unwrap();
        let vocabulary = source.spec().vocab_size as u32;
        let mut batch = Documents::new(5, &[40]);
        batch.tokens.iter_mut().for_each(|t| *t %= vocabulary);
        let labels = batch.labels.iter_mut();
        labels.for_each(|t| *t %= vocabulary as i32);
        trainer.step(&[batch.batch()]).unwrap();
        let model = trainer.model(&source).unwrap();
        assert!(std::ptr::eq(&*model, &*trainer.model(&source).unwrap()));
        let mut before = Vec::new();
        for steps in 1..3 {
            let folder = Folder::new();
            let place = folder.0.join("model");
            trainer
                .export_directory(&source, &place, Tables::Auto, false)
                .unwrap();
            let loaded = Served::load(&place, &LoadOptions::new(device.clone())).unwrap();
            // All tokens at once, and one, as it is decoded.
            for tokens in [&batch.tokens[..], &batch.tokens[..1]] {
                let live = logits_of(&model, tokens).unwrap();
                let loaded = logits_of(&loaded, tokens).unwrap();
                let live_f64: Vec<f64> = live.iter().map(|&v| f64::from(v)).collect();
                // Norms that files hold less one have been rounded there: one unit in the last place, over 13 norms.
                let bound = match source.spec().norm_plus_one {
                    true => 1e-6,
                    false => 0.0,
                };
                let error = relative_error(&live_f64, &loaded);
                assert!(error <= bound, "{name}: {error:e} off the exported model");
            }
            let live = logits_of(&model, &batch.tokens).unwrap();
            assert_ne!(live, before, "{name}");
            before = live;

            // The thread that runs the model takes no step.
            let held = model.hold().unwrap();
            let busy = trainer.step(&[batch.batch()]).unwrap_err();
            assert_eq!(busy.kind(), ErrorKind::Busy, "{busy}");
            drop(held);
            assert_eq!(trainer.steps(), steps);
            trainer.step(&[batch.batch()]).unwrap();
            assert!(std::ptr::eq(&*model, &*trainer.model(&source).unwrap()));
        }
    }
}

/// A step that is cancelled leaves everything as it was, and so does one with a wrong batch; those of sessions as well.
#[test]
fn a_step_that_does_not_happen_changes_nothing() {
    let folders = [Folder::new(), Folder::new()];
    for release in [false, true] {
        let recipe = Recipe {
            release,
            clip: Clip::Never,
            ..Recipe::default()
        };
        let source = Source::open(&golden("model").join("qwen3_tied")).unwrap();
        let mut trainer = trainer(&config(recipe, 10));
        let batch = Documents::new(5, &[40]);
        trainer.step(&[batch.batch()]).unwrap();
        let model = trainer.model(&source).unwrap();
        let save = |trainer: &Trainer, folder: &Folder| {
            let place = trainer.save(&folder.0, &serde_json::Value::Null, 1);
            std::fs::read(place.unwrap().join("state.bin")).unwrap()
        };
        let before = save(&trainer, &folders[0]);
        let mut wrong = Documents::new(6, &[40]);
        wrong.labels[7] = 1 << 20;
        let error = trainer.step(&[wrong.batch()]).unwrap_err();
        assert!(error.message().contains("1048576"), "{error}");
        // Each time it is asked, one time later.
        let mut ended = 0;
        for asked in 0.. {
            let count = AtomicU32::new(0);
            let flag = || count.fetch_add(1, Ordering::Relaxed) >= asked;
            let watch = Watch {
                flags: &[&flag],
                ..Watch::default()
            };
            match watch.during(|| trainer.step(&[batch.batch()])) {
                Ok(step) => {
                    assert_eq!(step.number, 2);
                    break;
                }
                Err(e) => assert_eq!(e.kind(), ErrorKind::Cancelled, "{e}"),
            }
            assert!(before == save(&trainer, &folders[1]));
            assert!(model.hold().is_ok());
            ended += 1;
        }
        assert!(ended > 1 && model.hold().is_ok());
    }
}
