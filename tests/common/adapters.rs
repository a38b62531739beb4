//! Adapters in peft's format that tests write, and models that they are merged into.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use NVFP4::base::Result;
use NVFP4::engine::{LoadedAdapter, Served};
use NVFP4::format::random::{bits, uniform};
use NVFP4::model;
use half::bf16;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

use super::{Copy, golden};

/// A directory that is removed when the value is dropped.
pub(crate) struct Place(pub(crate) PathBuf);

impl Place {
    pub(crate) fn new(name: &str) -> Place {
        let name = format!("nvfp4-adapters-{}-{name}", std::process::id());
        Place(std::env::temp_dir().join(name))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
        let _ = fs::remove_file(&self.0);
    }
}

/// A tensor of a file: type, shape and bytes.
pub(crate) type Stored = (Dtype, Vec<usize>, Vec<u8>);

pub(crate) fn serialized(tensors: &BTreeMap<String, Stored>) -> Vec<u8> {
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        let view = TensorView::new(*dtype, shape.clone(), bytes).unwrap();
        (name.as_str(), view)
    });
    safetensors::serialize(views, None).unwrap()
}

pub(crate) fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Seeded values of this magnitude that bfloat16 holds.
pub(crate) fn random(seed: u64, len: usize, magnitude: f32) -> Vec<f32> {
    let key = bits(seed, 0);
    let of = |i: usize| magnitude * (2.0 * uniform(key, i as u64) - 1.0);
    (0..len).map(|i| bf16::from_f32(of(i)).to_f32()).collect()
}

/// A directory in peft's format.
pub(crate) struct Written {
    pub(crate) place: Place,
    pub(crate) config: Value,
    pub(crate) tensors: BTreeMap<String, Stored>,
}

/// The factors of a module: A `[rank, inputs]` and B `[outputs, rank]`.
pub(crate) struct Factors {
    pub(crate) module: String,
    pub(crate) rank: usize,
    pub(crate) a: Vec<f32>,
    pub(crate) b: Vec<f32>,
}

pub(crate) const RANK: usize = 5;
pub(crate) const ALPHA: f32 = 10.0;

impl Written {
    /// Factors of rank [`RANK`] beside modules of these shapes.
    pub(crate) fn new(
        name: &str,
        seed: u64,
        modules: &[(String, [usize; 2])],
    ) -> (Written, Vec<Factors>) {
        let mut tensors = BTreeMap::new();
        let mut all = Vec::new();
        for (i, (module, [outputs, inputs])) in modules.iter().enumerate() {
            let seed = 100 * seed + 2 * i as u64;
            let magnitude = 1.0 / (*inputs as f32).sqrt();
            let a = random(seed, RANK * inputs, magnitude);
            let b = random(seed + 1, outputs * RANK, 0.1);
            let base = format!("base_model.model.{module}");
            let stored =
                |shape: [usize; 2], values: &[f32]| (Dtype::F32, shape.to_vec(), floats(values));
            tensors.insert(format!("{base}.lora_A.weight"), stored([RANK, *inputs], &a));
            tensors.insert(
                format!("{base}.lora_B.weight"),
                stored([*outputs, RANK], &b),
            );
            all.push(Factors {
                module: module.clone(),
                rank: RANK,
                a,
                b,
            });
        }
        let written = Written {
            place: Place::new(name),
            config: json!({
                "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": "all-linear",
                "modules_to_save": null, "use_dora": false, "init_lora_weights": true, "rank_pattern": {}, "alpha_pattern": {},
            }),
            tensors,
        };
        written.write();
        (written, all)
    }

    pub(crate) fn write(&self) {
        fs::create_dir_all(&self.place.0).unwrap();
        let config = serde_json::to_vec(&self.config).unwrap();
        fs::write(self.place.0.join("adapter_config.json"), config).unwrap();
        let factors = serialized(&self.tensors);
        fs::write(self.place.0.join("adapter_model.safetensors"), factors).unwrap();
    }

    pub(crate) fn load(&self, model: &Served) -> Result<Arc<LoadedAdapter>> {
        model.load_adapter(&self.place.0)
    }
}

/// The linear maps of blocks in a golden, as its file stores them, without routers.
pub(crate) fn modules(case: &str) -> Vec<(String, [usize; 2])> {
    let checkpoint = model::open(&golden(case)).unwrap();
    let is_map = |name: &str| {
        let parts = [
            "norm",
            "conv1d",
            "mlp.gate.",
            "moe.gate.",
            "shared_expert_gate.",
            "router.",
        ];
        name.contains("layers.")
            && name.ends_with(".weight")
            && !parts.iter().any(|p| name.contains(p))
    };
    let entries = checkpoint.entries().iter();
    let maps = entries.filter(|e| is_map(&e.name) && e.shape.len() == 2 && model_part(&e.name));
    maps.map(|e| {
        let module = e.name.strip_suffix(".weight").unwrap();
        (module.to_owned(), [e.shape[0], e.shape[1]])
    })
    .collect()
}

pub(crate) fn model_part(name: &str) -> bool {
    NVFP4::checkpoint::is_of_text_model(name)
}

/// A copy of a golden with dense f32 weights, to which `factors` are merged in f64.
pub(crate) fn merged(case: &str, name: &str, factors: &[Factors]) -> Copy {
    let dir = Copy::of(case, name);
    let checkpoint = model::open(&golden(case)).unwrap();
    let mut tensors = BTreeMap::new();
    for entry in checkpoint.entries() {
        let (rows, cols) = (entry.rows(), entry.cols());
        let mut values = vec![0.0f32; rows * cols];
        checkpoint.rows_f32(entry, 0..rows, &mut values).unwrap();
        let of = factors
            .iter()
            .find(|f| format!("{}.weight", f.module) == entry.name);
        if let Some(Factors { rank, a, b, .. }) = of {
            let scale = f64::from(ALPHA) / *rank as f64;
            for (i, value) in values.iter_mut().enumerate() {
                let (row, col) = (i / cols, i % cols);
                let product =
                    (0..*rank).map(|k| f64::from(b[row * rank + k]) * f64::from(a[k * cols + col]));
                *value = (f64::from(*value) + scale * product.sum::<f64>()) as f32;
            }
        }
        tensors.insert(
            entry.name.clone(),
            (Dtype::F32, entry.shape.clone(), floats(&values)),
        );
    }
    dir.write("model.safetensors", &serialized(&tensors));
    dir
}

/// Two adapters of a model, the second beside only some of the modules.
pub(crate) fn two(case: &str, name: &str) -> [Written; 2] {
    let modules = modules(case);
    let first = Written::new(&format!("{name}-first"), 5, &modules).0;
    let some: Vec<_> = modules.into_iter().step_by(2).collect();
    [first, Written::new(&format!("{name}-second"), 6, &some).0]
}

pub(crate) fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let pairs = a.iter().zip(b);
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
