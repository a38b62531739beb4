//! Adapters over a frozen model: gradients against torch's autograd, memory, resuming, and exports.

use NVFP4::format::nvfp4::{self, QuantizeOptions};
use NVFP4::model::training::{Layout, RowGradients};
use NVFP4::train::{Group, Lora, Recompute};

use super::*;

const SEVEN: [&str; 7] = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
];

/// Projections of attention and of gated delta nets, by the names of either family.
const RECURRENT: &[&str] = &[
    "q_proj",
    "v_proj",
    "o_proj",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "in_proj_qkvz",
    "in_proj_ba",
    "out_proj",
];

/// A model as it is with adapters that are trained: a gradient of a matrix is refused.
struct Adapted {
    inner: Dense,
    layout: Layout,
    base: usize,
    /// Values and gradients `[rank, ..]` of each factor, which follow the base.
    factors: Vec<(Vec<f32>, Vec<f32>)>,
}

impl Store for Adapted {
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
        match matrix.checked_sub(self.base) {
            None => self.inner.read(matrix, rows, out),
            Some(i) => out.copy_from(Slice::Host(&self.factors[i].0)),
        }
    }

    fn embed(&mut self, matrix: MatrixId, tokens: &[u32], out: SliceMut<'_, Mixed>) -> Result<()> {
        self.inner.embed(matrix, tokens, out)
    }

    fn vector(&self, vector: VectorId) -> Result<Slice<'_>> {
        self.inner.vector(vector)
    }

    fn vector_with_gradient(&mut self, vector: VectorId) -> Result<(Slice<'_>, SliceMut<'_>)> {
        self.inner.vector_with_gradient(vector)
    }

    fn trains(&self, matrix: MatrixId) -> bool {
        matrix >= self.base
    }

    fn gradients(&mut self, gradients: &[RowGradients<'_>]) -> Result<()> {
        for of in gradients {
            let i = of
                .matrix
                .checked_sub(self.base)
                .expect("a frozen matrix gets no gradient");
            assert_eq!(of.first_row, 0);
            let to = self.factors[i].1.iter_mut();
            to.zip(of.values.host()?).for_each(|(to, g)| *to += g);
        }
        Ok(())
    }
}

/// `[outputs, rank]` as `[rank, outputs]`.
fn transposed(values: &[f32], rank: usize) -> Vec<f32> {
    let outputs = values.len() / rank;
    let at = |i: usize| values[i % outputs * rank + i / outputs];
    (0..values.len()).map(at).collect()
}

#[test]
fn gradients_of_adapters_are_those_of_autograd() {
    let device = Device::cpu(Some(2)).unwrap();
    let some = &["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"][..];
    for (case, targets) in [
        ("qwen3_tied", some),
        ("qwen2_untied", some),
        ("gemma3_wide", some),
        ("llama_tied", &SEVEN[..]),
        ("qwen35_tied", RECURRENT),
        ("qwen3next_shared", RECURRENT),
    ] {
        let source = Source::open(&golden("model").join(case)).unwrap();
        let file = golden("training").join(format!("{case}_lora.safetensors"));
        let bytes = std::fs::read(file).unwrap();
        let expected = SafeTensors::deserialize(&bytes).unwrap();
        let batch = golden_batch(&device, &source, &expected);
        let wants = |name: &str| targets.iter().any(|part| name.ends_with(part));
        let layout = source.layout().with_adapters(0, (4, 0.5), &wants);
        let base = source.layout().matrices.len();
        let names = expected.names();
        let factors = names.iter().filter(|n| n.ends_with(".weight"));
        assert_eq!(layout.matrices.len() - base, factors.count());
        let of = |m: &str, suffix: &str| {
            let values = floats(&expected, &format!("{m}{suffix}"));
            match m.contains("lora_B") {
                true => transposed(&values, 4),
                false => values,
            }
        };
        for recompute in [Recompute::Block, Recompute::None] {
            let options = Options {
                recompute,
                ..Options::default()
            };
            let factors = layout.matrices[base..].iter();
            let mut store = Adapted {
                inner: Dense::new(&device, &source),
                base,
                factors: factors
                    .map(|m| (of(&m.name, ""), vec![0.0; m.rows * m.cols]))
                    .collect(),
                layout: layout.clone(),
            };
            let mut pass = Pass::new(&device, source.spec(), &layout, options).unwrap();
            let loss = pass.gradients(&mut store, &batch, 0).unwrap();
            let wanted = f64::from(floats(&expected, "loss")[0]);
            assert!((loss / wanted - 1.0).abs() < 1e-5, "{case}: {loss}");
            assert_eq!(
                pass.gradient_bytes(),
                0,
                "{case}: room for gradients of what is frozen"
            );
            for (m, (_, gradient)) in layout.matrices[base..].iter().zip(&store.factors) {
                let gradient: Vec<f64> = gradient.iter().map(|&g| f64::from(g)).collect();
                let error = relative_error(&gradient, &of(&m.name, ".gradient"));
                assert!(
                    error < 2e-5,
                    "{case}: the gradient of {} is {error:.1e} off",
                    m.name
                );
            }
        }
    }
}

pub(super) fn recipe(targets: &[&str]) -> Recipe {
    Recipe {
        lora: Some(Lora {
            rank: 8,
            alpha: 16.0,
            targets: targets.iter().map(|t| (*t).to_owned()).collect(),
        }),
        ..Recipe::default()
    }
}

/// Frozen matrices take the memory of their file form, and adapters learn beside them without changing them.
#[test]
fn adapters_learn_beside_what_is_frozen() {
    let source = Source::open(&golden("model/qwen3_tied")).unwrap();
    let mut trainer = trainer(&config(recipe(&SEVEN), 60));
    let base = source.layout().matrices.len();
    let parameters = trainer.parameters();
    let mut dense = 0;
    for (id, m) in parameters.matrices()[..base].iter().enumerate() {
        let (rows, cols) = m.shape();
        assert!(m.is_frozen());
        // As the checkpoint has it: an embedding in bfloat16 or float32, the rest in 4.5 bits.
        let (codes, scales) = match m.delivered(trainer.device()).unwrap() {
            Some(delivered) => delivered,
            None => {
                dense += 1;
                continue;
            }
        };
        assert_eq!(m.bytes(), rows * cols * 9 / 16);
        let mut stored = (vec![0; rows * cols / 2], vec![0; rows * cols / 16]);
        let global = source.nvfp4(id, &mut stored.0, &mut stored.1).unwrap();
        assert_eq!((codes, scales), stored);
        assert_eq!(m.global(), global);
    }
    assert!(dense <= 1);
    let adapters: usize = parameters.matrices()[base..]
        .iter()
        .map(|m| m.shape().0 * m.shape().1)
        .sum();
    assert_eq!(parameters.trained(), adapters);

    let evaluation = Documents::new(999, &[96; 4]);
    let frozen = weights(&trainer);
    let before = trainer.evaluate(&[evaluation.batch()], true).unwrap();
    for step in 0..60 {
        let batch = Documents::new(step, &[64; 4]);
        trainer.step(&[batch.batch()]).unwrap();
    }
    let after = trainer.evaluate(&[evaluation.batch()], true).unwrap();
    println!("{before:.4} before 60 steps of adapters, {after:.4} after");
    assert!(
        after < before - 1.0,
        "{before} before 60 steps, {after} after"
    );
    let vectors = source.layout().vectors.len();
    let now = weights(&trainer);
    assert_eq!(frozen[..base], now[..base]);
    assert_eq!(frozen[frozen.len() - vectors..], now[now.len() - vectors..]);
    assert!(now[base..now.len() - vectors] != frozen[base..frozen.len() - vectors]);
}

/// A checkpoint holds adapters alone, and knows the model that they belong to.
#[test]
fn adapters_resume_to_the_same_bits() {
    let source = Source::open(&golden("model/qwen3_untied")).unwrap();
    let device = Device::cpu(Some(2)).unwrap();
    let config = config(recipe(&["q_proj", "down_proj"]), 8);
    let batches: Vec<Documents> = (0..8).map(|step| short(&source, step)).collect();
    let mut whole = Trainer::new(&device, &source, &config).unwrap();
    let directory = Folder::new();
    for (i, batch) in batches.iter().enumerate() {
        if i == 4 {
            whole
                .save(&directory.0, &serde_json::Value::Null, 1)
                .unwrap();
        }
        whole.step(&[batch.batch()]).unwrap();
    }
    let (mut second, _) = Trainer::resume(&device, &source, &directory.0).unwrap();
    for batch in &batches[4..] {
        second.step(&[batch.batch()]).unwrap();
    }
    assert_eq!(
        format!("{:?}", weights(&whole)),
        format!("{:?}", weights(&second))
    );
    let state = directory.0.join("step-00000004/state.bin");
    let adapters = whole.parameters().trained();
    // Values and both moments, and a number for each group of 8 rows of either moment.
    let groups = 4 * source.spec().blocks.len();
    // And 16 sums of products for each input.
    let layout = whole.parameters().layout().matrices.iter();
    let targets = ["q_proj.weight", "down_proj.weight"];
    let adapted = layout.filter(|m| targets.iter().any(|name| m.name.ends_with(name)));
    let inputs: usize = adapted.map(|m| 4 * 16 * m.cols).sum();
    assert_eq!(
        std::fs::metadata(state).unwrap().len() as usize,
        12 * adapters + 8 * groups + inputs
    );

    // A model of the same shapes with other values.
    let place = directory.0.join("other");
    let mut other = Trainer::new(&device, &source, &super::config(Recipe::default(), 10)).unwrap();
    other.step(&[batches[0].batch()]).unwrap();
    other
        .export_directory(&source, &place, Tables::Auto, false)
        .unwrap();
    let changed = Source::open(&place).unwrap();
    let error = Trainer::resume(&device, &changed, &directory.0)
        .unwrap_err()
        .to_string();
    assert!(error.contains("is not the one that stood still"), "{error}");
}

/// Documents of tokens that a model has.
fn short(source: &Source, seed: u64) -> Documents {
    let vocabulary = source.spec().vocab_size as u32;
    let mut batch = Documents::new(seed, &[40, 9]);
    batch.tokens.iter_mut().for_each(|t| *t %= vocabulary);
    let labels = batch.labels.iter_mut();
    labels.for_each(|t| *t %= vocabulary as i32);
    batch
}

/// The export for peft, and the model with the adapters merged.
#[test]
fn adapters_are_exported_beside_and_within_the_model() {
    let device = Device::cpu(Some(2)).unwrap();
    let source = Source::open(&golden("model/qwen3_untied")).unwrap();
    for rule in [nvfp4::Recipe::Amax, nvfp4::Recipe::FourOverSix] {
        let recipe = Recipe {
            weight_scales: rule,
            scale_search: false,
            last_blocks: Some(1),
            ..recipe(&["v_proj", "down_proj"])
        };
        let mut trainer = Trainer::new(&device, &source, &config(recipe, 10)).unwrap();
        let batch = short(&source, 3);
        for _ in 0..5 {
            trainer.step(&[batch.batch()]).unwrap();
        }
        let directory = Folder::new();
        let place = directory.0.join("adapter");
        for replace in [false, true] {
            trainer
                .export_adapter(&source, &place, "Qwen/Qwen3-0.6B", replace)
                .unwrap();
        }
        let error = trainer.export_adapter(&source, &place, "", false);
        assert!(error.is_err());
        let json = std::fs::read(place.join("adapter_config.json")).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        assert_eq!(
            (json["r"].as_u64(), json["lora_alpha"].as_f64()),
            (Some(8), Some(16.0))
        );
        let bytes = std::fs::read(place.join("adapter_model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let layout = trainer.parameters().layout();
        let last = source.spec().blocks.len() - 1;
        let listed: Vec<_> = json["target_modules"].as_array().unwrap().iter().collect();
        assert_eq!(
            listed,
            [
                &format!("model.layers.{last}.self_attn.v_proj"),
                &format!("model.layers.{last}.mlp.down_proj")
            ]
        );
        assert_eq!(file.len(), 4);

        let merged = directory.0.join("merged");
        trainer
            .export_directory(&source, &merged, Tables::Auto, false)
            .unwrap();
        let again = Source::open(&merged).unwrap();
        let all = weights(&trainer);
        for (id, m) in source.layout().matrices.iter().enumerate() {
            let mut wanted = all[id].clone();
            let module = m.name.trim_end_matches(".weight");
            if layout.adapted().any(|(adapted, _)| adapted == id) {
                let name = |factor| format!("base_model.model.{module}.{factor}.weight");
                let a = floats(&file, &name("lora_A"));
                let b = floats(&file, &name("lora_B"));
                assert_eq!(file.tensor(&name("lora_B")).unwrap().shape(), [m.rows, 8]);
                assert!(b.iter().any(|v| *v != 0.0));
                for (i, w) in wanted.iter_mut().enumerate() {
                    let (row, col) = (i / m.cols, i % m.cols);
                    for r in 0..8 {
                        *w = (2.0 * b[row * 8 + r]).mul_add(a[r * m.cols + col], *w);
                    }
                }
                let options = QuantizeOptions {
                    recipe: rule,
                    ..QuantizeOptions::default()
                };
                // Under the global scale of the matrix, where a row has changed.
                let held = &trainer.parameters().matrices()[id];
                let (mut codes, mut scales) = held.delivered(&device).unwrap().unwrap();
                let (global, cols) = (held.global(), m.cols);
                for (row, w) in wanted.chunks_exact(cols).enumerate() {
                    let (of_codes, of_scales) = (
                        &mut codes[row * cols / 2..][..cols / 2],
                        &mut scales[row * cols / 16..][..cols / 16],
                    );
                    nvfp4::quantize_rows(w, cols, row, global, &options, of_codes, of_scales)
                        .unwrap();
                }
                nvfp4::dequantize(&codes, &scales, global, &mut wanted).unwrap();
                assert!(wanted != all[id], "{module} is as it was");
            }
            let mut found = vec![0.0; wanted.len()];
            again.matrix(id, 0..m.rows, &mut found).unwrap();
            assert!(found == wanted, "{module} differs");
        }
    }
}

/// The files of `nvfp4 train`, read by peft: every parameter as it is in the file, and with the base model the likelihoods of a training
/// pass. A new export has the same files, names, shapes and settings.
#[test]
fn peft_reads_what_is_exported() {
    let device = Device::cpu(Some(2)).unwrap();
    let source = Source::open(&golden("model/qwen3_tied")).unwrap();
    let place = golden("training/qwen3_tied_peft");
    let read = |place: &Path, name: &str| std::fs::read(place.join(name)).unwrap();
    let settings = |place: &Path| -> serde_json::Value {
        serde_json::from_slice(&read(place, "adapter_config.json")).unwrap()
    };
    let (written, known) = (
        read(&place, "adapter_model.safetensors"),
        read(&place, "expected.safetensors"),
    );
    let written = SafeTensors::deserialize(&written).unwrap();
    let known = SafeTensors::deserialize(&known).unwrap();
    assert_eq!(known.len(), written.len() + 2);
    for name in written.names() {
        let (own, of_peft) = (written.tensor(name).unwrap(), known.tensor(name).unwrap());
        assert_eq!(own.dtype(), of_peft.dtype(), "{name}");
        assert_eq!(own.shape(), of_peft.shape(), "{name}");
        assert!(own.data() == of_peft.data(), "{name} has other values");
    }

    let targets = ["q_proj", "v_proj", "down_proj"];
    let wants = |name: &str| targets.iter().any(|part| name.ends_with(part));
    let layout = source.layout().with_adapters(0, (4, 3.0), &wants);
    let base = source.layout().matrices.len();
    let factors = layout.matrices[base..].iter().map(|m| {
        let values = floats(&written, &format!("base_model.model.{}", m.name));
        let values = match m.is_first_factor() {
            true => values,
            false => transposed(&values, 4),
        };
        (values, Vec::new())
    });
    let mut store = Adapted {
        inner: Dense::new(&device, &source),
        base,
        factors: factors.collect(),
        layout: layout.clone(),
    };
    let options = Options::default();
    let mut pass = Pass::new(&device, source.spec(), &layout, options).unwrap();
    let tokens: Vec<u32> = integers(&known, "tokens")
        .iter()
        .map(|&t| t as u32)
        .collect();
    let (rows, vocabulary) = (tokens.len(), source.spec().vocab_size);
    let logits = floats(&known, "logits");
    for row in 0..rows {
        let label = 53 * row % vocabulary;
        let mut weights = vec![0.0; rows];
        weights[row] = 1.0;
        let labels = vec![label as i32; rows];
        let batch = Batch::new(&device, source.spec(), &tokens, &[rows], &labels, &weights);
        let found = pass.loss(&mut store, &batch.unwrap()).unwrap();
        let logits = &logits[row * vocabulary..][..vocabulary];
        let sum: f64 = logits.iter().map(|&v| f64::from(v).exp()).sum();
        let wanted = sum.ln() - f64::from(logits[label]);
        assert!(
            (found - wanted).abs() < 1e-5 * wanted,
            "row {row}: {found}, and {wanted} by peft"
        );
    }

    let mut recipe = recipe(&targets);
    recipe.lora = Some(Lora {
        rank: 4,
        alpha: 12.0,
        ..recipe.lora.unwrap()
    });
    let trainer = Trainer::new(&device, &source, &config(recipe, 10)).unwrap();
    let folder = Folder::new();
    let now = folder.0.join("adapter");
    trainer
        .export_adapter(&source, &now, "qwen3_tied", false)
        .unwrap();
    assert_eq!(settings(&now), settings(&place));
    assert_eq!(std::fs::read_dir(&now).unwrap().count(), 2);
    let now = read(&now, "adapter_model.safetensors");
    let now = SafeTensors::deserialize(&now).unwrap();
    assert_eq!(now.len(), written.len());
    for name in written.names() {
        let (own, of_golden) = (now.tensor(name).unwrap(), written.tensor(name).unwrap());
        assert_eq!(
            (own.dtype(), own.shape()),
            (of_golden.dtype(), of_golden.shape()),
            "{name}"
        );
    }
}

#[test]
fn adapters_that_fit_nothing_are_refused() {
    let source = Source::open(&golden("model/qwen3_untied")).unwrap();
    let device = Device::cpu(Some(1)).unwrap();
    let error = |recipe: Recipe| {
        let trainer = Trainer::new(&device, &source, &config(recipe, 10));
        trainer.unwrap_err().to_string()
    };
    let unknown = error(recipe(&["query"]));
    assert!(
        unknown.contains("[\"query\"]") && unknown.contains("gate_proj"),
        "{unknown}"
    );
    // Nothing of it is trained.
    let mut grouped = config(recipe(&SEVEN), 10);
    grouped.groups = vec![Group {
        names: vec!["embed_tokens".to_owned(), "norm".to_owned()],
        ..Group::default()
    }];
    let group = Trainer::new(&device, &source, &grouped).unwrap_err();
    assert!(
        group
            .message()
            .contains("no parameter that is trained is in the group"),
        "{group}"
    );
    let mut none = recipe(&SEVEN);
    none.lora.as_mut().unwrap().rank = 0;
    let rank = error(none);
    assert!(rank.contains("rank 0"), "{rank}");

    let fused = Source::open(&golden("model/phi3_partial")).unwrap();
    let trainer = Trainer::new(&device, &fused, &config(recipe(&SEVEN), 10)).unwrap();
    let place = Folder::new();
    let error = trainer.export_adapter(&fused, &place.0.join("a"), "", false);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("a part of a larger matrix"), "{error}");
}
