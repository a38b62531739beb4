//! A complete forward pass in f64, with the rows of GEMMs rounded by the format itself: the model computes what a recipe says of
//! activations.

use NVFP4::format::operand::{OperandRounding, global_of, round_block};
use NVFP4::model::training::{MixerVectors, ProjectionLayout};
use NVFP4::train::{HighBlocks, ScaleRule};

use super::*;

/// Rows of f64, as wide as they are.
type Rows = Vec<Vec<f64>>;

/// A Qwen3 in f64.
struct Exact<'a> {
    source: &'a Source,
    dense: Dense,
    /// How the rows of a product of a block are rounded; the product is named by its first projection.
    rounding: &'a dyn Fn(usize, &str) -> Option<ScaleRule>,
}

impl Exact<'_> {
    /// `x W^T`, with `x` rounded where the first projection of the product says so.
    fn product(&self, x: &Rows, matrix: MatrixId, rounding: Option<ScaleRule>) -> Rows {
        let (weight, k) = (&self.dense.matrices[matrix], x[0].len());
        let row = |x: &Vec<f64>| {
            let x = match rounding {
                Some(rule) => rounded(x, rule),
                None => x.clone(),
            };
            let outputs = weight.chunks_exact(k);
            let dot = |w: &[f32]| x.iter().zip(w).map(|(x, &w)| x * f64::from(w)).sum();
            outputs.map(dot).collect()
        };
        x.iter().map(row).collect()
    }

    /// RMSNorm of pieces of rows as long as the weight.
    fn norm(&self, x: &Rows, weight: VectorId) -> Rows {
        let weight = self.dense.vectors[weight].0.all().host().unwrap();
        let eps = f64::from(self.source.spec().norm_eps);
        let piece = |x: &[f64]| {
            let squares: f64 = x.iter().map(|v| v * v).sum();
            let scale = 1.0 / (squares / x.len() as f64 + eps).sqrt();
            let scaled = x.iter().zip(weight);
            scaled
                .map(|(v, &w)| v * scale * f64::from(w))
                .collect::<Vec<_>>()
        };
        let row = |x: &Vec<f64>| x.chunks_exact(weight.len()).flat_map(piece).collect();
        x.iter().map(row).collect()
    }

    /// Turns the two halves of each head by its position.
    fn rotate(&self, x: &mut Rows, block: usize) {
        let spec = self.source.spec();
        let attention = spec.blocks[block].attention().unwrap();
        let frequencies = &spec.ropes[attention.rope.unwrap()]
            .table(x.len())
            .frequencies;
        let half = frequencies.len();
        assert_eq!(2 * half, attention.head_dim);
        for (position, row) in x.iter_mut().enumerate() {
            for head in row.chunks_exact_mut(2 * half) {
                for (i, &frequency) in frequencies.iter().enumerate() {
                    let (sin, cos) = (position as f64 * f64::from(frequency)).sin_cos();
                    let (a, b) = (head[i], head[half + i]);
                    (head[i], head[half + i]) = (a * cos - b * sin, b * cos + a * sin);
                }
            }
        }
    }

    /// Causal attention of rotated queries and keys.
    fn attend(&self, q: &Rows, k: &Rows, v: &Rows, block: usize) -> Rows {
        let attention = self.source.spec().blocks[block].attention().unwrap();
        let (dim, group) = (attention.head_dim, attention.heads / attention.kv_heads);
        let scale = f64::from(attention.scale);
        let head = |row: usize, head: usize| {
            let own = head / group * dim..(head / group + 1) * dim;
            let q = &q[row][head * dim..][..dim];
            let score = |k: &Vec<f64>| {
                let products = k[own.clone()].iter().zip(q).map(|(k, q)| k * q);
                (scale * products.sum::<f64>()).exp()
            };
            let scores: Vec<f64> = k[..=row].iter().map(score).collect();
            let sum: f64 = scores.iter().sum();
            let weighted = move |i: usize| {
                let terms = scores.iter().zip(v).map(|(s, v)| s * v[own.start + i]);
                terms.sum::<f64>() / sum
            };
            (0..dim).map(weighted).collect::<Vec<_>>()
        };
        let row = |row| (0..attention.heads).flat_map(|h| head(row, h)).collect();
        (0..q.len()).map(row).collect()
    }

    fn block(&self, x: &mut Rows, index: usize) {
        let layout = &self.source.layout().blocks[index];
        let rounding = |name| (self.rounding)(index, name);
        let MixerVectors::Attention(norms) = layout.vectors else {
            panic!("block {index} has no attention");
        };
        let normed = self.norm(x, layout.mixer_norms[0].unwrap());
        let product = |p: &ProjectionLayout| self.product(&normed, p.matrix, rounding("q_proj"));
        let [q, k, v] = [0, 1, 2].map(|i| product(&layout.inputs[i]));
        let [mut q, mut k] = [(q, 0), (k, 1)].map(|(x, i)| self.norm(&x, norms[i].unwrap()));
        self.rotate(&mut q, index);
        self.rotate(&mut k, index);
        let attended = self.attend(&q, &k, &v, index);
        add(
            x,
            self.product(&attended, layout.output.matrix, rounding("o_proj")),
        );

        let normed = self.norm(x, layout.mlp_norms[0].unwrap());
        let mlp = layout.mlp.dense().unwrap();
        let [gate, up] = mlp
            .gate_up
            .map(|p| self.product(&normed, p.matrix, rounding("gate_proj")));
        let glu = |(gate, up): (&Vec<f64>, &Vec<f64>)| {
            let both = gate.iter().zip(up);
            both.map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
        };
        let inner = gate.iter().zip(&up).map(glu).collect();
        add(
            x,
            self.product(&inner, mlp.down.matrix, rounding("down_proj")),
        );
    }

    /// The mean cross-entropy of the labels that count.
    fn loss(&self, batch: &MicroBatch<'_>) -> f64 {
        let layout = self.source.layout();
        let (mut first, mut total) = (0, 0.0);
        for &length in batch.documents {
            let embedding = &self.dense.matrices[layout.embedding];
            let hidden = self.source.spec().hidden_size;
            let own = first..first + length;
            let row = |&token: &u32| {
                let row = embedding[token as usize * hidden..][..hidden].iter();
                row.map(|&v| f64::from(v)).collect()
            };
            let mut x: Rows = batch.tokens[own.clone()].iter().map(row).collect();
            for index in 0..layout.blocks.len() {
                self.block(&mut x, index);
            }
            let logits = self.product(&self.norm(&x, layout.norm), layout.head, None);
            for (logits, &label) in logits.iter().zip(&batch.labels[own]) {
                if label >= 0 {
                    let sum: f64 = logits.iter().map(|v| v.exp()).sum();
                    total += sum.ln() - logits[label as usize];
                }
            }
            first += length;
        }
        total / batch.targets() as f64
    }
}

fn add(x: &mut Rows, y: Rows) {
    let both = x.iter_mut().flatten().zip(y.into_iter().flatten());
    both.for_each(|(x, y)| *x += y);
}

/// A row as a product takes it in NVFP4.
fn rounded(x: &[f64], rule: ScaleRule) -> Vec<f64> {
    let x: Vec<f32> = x.iter().map(|&v| v as f32).collect();
    let global = global_of(x.iter().fold(0f32, |most, v| most.max(v.abs())));
    let blocks = x.as_chunks::<16>().0.iter();
    let rounded =
        blocks.flat_map(|block| round_block(block, global, OperandRounding::Nearest(rule), 0, 1));
    rounded.map(f64::from).collect()
}

/// A model whose recipe rounds activations has the loss of a model in f64 whose rows are rounded before exactly those GEMMs that the recipe
/// names.
#[test]
fn activations_are_rounded_as_a_recipe_says() {
    let device = Device::cpu(Some(2)).unwrap();
    let source = Source::open(&golden("model/qwen3_untied")).unwrap();
    let file = std::fs::read(golden("training/qwen3_untied.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let of = |name| integers(&file, name).into_iter();
    let tokens: Vec<u32> = of("tokens").map(|t| t as u32).collect();
    let documents: Vec<usize> = of("documents").map(|n| n as usize).collect();
    let batch = MicroBatch {
        tokens: &tokens,
        documents: &documents,
        labels: &of("labels").collect::<Vec<_>>(),
        weights: None,
    };
    let base = Recipe {
        activations: ProductForm::Nvfp4,
        ..Recipe::float32()
    };
    let four_over_six = Recipe {
        activation_scales: ScaleRule::FourOverSix,
        ..base.clone()
    };
    let one_high = Recipe {
        high_blocks: HighBlocks { first: 1, last: 0 },
        ..base.clone()
    };
    // If one of several projections with the same input rows is kept high, the others keep high input rows too.
    let some_high = Recipe {
        keep_high: vec!["k_proj".to_owned(), "down_proj".to_owned()],
        ..base.clone()
    };
    type Rounds = dyn Fn(usize, &str) -> bool;
    let cases: [(&str, Recipe, &Rounds); 5] = [
        ("as they are", Recipe::float32(), &|_, _| false),
        ("all", base, &|_, _| true),
        ("by four over six", four_over_six, &|_, _| true),
        ("but the first block", one_high, &|block, _| block > 0),
        ("but some", some_high, &|_, name| {
            name != "q_proj" && name != "down_proj"
        }),
    ];
    let mut losses: Vec<f64> = Vec::new();
    for (case, recipe, rounds) in cases {
        let rule = recipe.activation_scales;
        let exact = Exact {
            source: &source,
            dense: Dense::new(&device, &source),
            rounding: &|block, name| rounds(block, name).then_some(rule),
        };
        let exact = exact.loss(&batch);
        let mut trainer = Trainer::new(&device, &source, &config(recipe, 10)).unwrap();
        let evaluated = trainer.evaluate(&[batch], true).unwrap();
        let step = trainer.step(&[batch]).unwrap().loss;
        println!("{case}: {evaluated} and {step}, {exact} in f64");
        // The error of float32 against f64 for a model of two blocks without any rounding.
        for found in [evaluated, step] {
            assert!(
                (found / exact - 1.0).abs() < 2e-6,
                "{case}: {found}, not {exact}"
            );
        }
        for other in &losses {
            assert!((exact / other - 1.0).abs() > 2e-5, "{case}: as another");
        }
        losses.push(exact);
    }
}
