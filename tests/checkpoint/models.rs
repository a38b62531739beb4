//! Models that are wrong in one way each, in every format: the readers accept them, so the loader and the converter must refuse them.

use std::ops::ControlFlow;
use std::path::PathBuf;

use NVFP4::base::threads::Pool;
use NVFP4::base::{Error, ErrorKind, env};
use NVFP4::engine::Served;
use NVFP4::format::nvfp4::{QuantizeOptions, Recipe};
use NVFP4::model::convert::{Container, ConvertOptions, convert};
use NVFP4::model::{self, Device, LoadOptions, Pooling};
use NVFP4::session::{GenerateOptions, Session, SessionOptions};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::files::{Gguf, Scratch, dat, dat_entry, tensors};
use super::split::write_split;

#[derive(Clone)]
struct Tensor {
    name: String,
    gguf: String,
    shape: Vec<usize>,
    values: Vec<f32>,
}

impl Tensor {
    fn is_matrix_of_a_layer(&self) -> bool {
        self.shape.len() == 2 && self.name.contains("layers")
    }

    /// Scales of blocks of 64 values in NF4: 1, or a value of the block that is not finite.
    fn absmax(&self) -> Vec<f32> {
        let scale = |block: &[f32]| block.iter().copied().find(|v| !v.is_finite());
        let blocks = self.values.chunks(64);
        blocks.map(|b| scale(b).unwrap_or(1.0)).collect()
    }
}

/// A small Qwen3 model, in no format yet.
#[derive(Clone)]
struct Description {
    config: Value,
    tensors: Vec<Tensor>,
    tokenizer: bool,
    /// Further metadata of a GGUF file.
    pairs: Vec<Vec<u8>>,
}

const HIDDEN: usize = 32;
const WIDE: usize = 48;
const ROWS: usize = 40;

fn good() -> Description {
    let tensor = |name: &str, gguf: &str, shape: &[usize]| Tensor {
        name: format!("{name}.weight"),
        gguf: format!("{gguf}.weight"),
        shape: shape.to_vec(),
        values: vec![0.5; shape.iter().product()],
    };
    let layer = |name: &str, gguf: &str, shape: &[usize]| {
        tensor(
            &format!("model.layers.0.{name}"),
            &format!("blk.0.{gguf}"),
            shape,
        )
    };
    Description {
        config: json!({
            "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": ROWS,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        }),
        tensors: vec![
            tensor("model.embed_tokens", "token_embd", &[ROWS, HIDDEN]),
            layer("input_layernorm", "attn_norm", &[HIDDEN]),
            layer("self_attn.q_proj", "attn_q", &[32, HIDDEN]),
            layer("self_attn.k_proj", "attn_k", &[16, HIDDEN]),
            layer("self_attn.v_proj", "attn_v", &[16, HIDDEN]),
            layer("self_attn.o_proj", "attn_output", &[HIDDEN, 32]),
            layer("self_attn.q_norm", "attn_q_norm", &[16]),
            layer("self_attn.k_norm", "attn_k_norm", &[16]),
            layer("post_attention_layernorm", "ffn_norm", &[HIDDEN]),
            layer("mlp.gate_proj", "ffn_gate", &[WIDE, HIDDEN]),
            layer("mlp.up_proj", "ffn_up", &[WIDE, HIDDEN]),
            layer("mlp.down_proj", "ffn_down", &[HIDDEN, WIDE]),
            tensor("model.norm", "output_norm", &[HIDDEN]),
            tensor("lm_head", "output", &[ROWS, HIDDEN]),
        ],
        tokenizer: false,
        pairs: Vec::new(),
    }
}

const FORMATS: [&str; 5] = ["dat", "nf4.dat", "safetensors", "nf4", "gguf"];

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

impl Description {
    fn tensor(&mut self, name: &str) -> &mut Tensor {
        let found = self.tensors.iter_mut().find(|t| t.name.ends_with(name));
        found.unwrap_or_else(|| panic!("{name}"))
    }

    fn reshape(&mut self, name: &str, shape: &[usize]) {
        let tensor = self.tensor(name);
        tensor.shape = shape.to_vec();
        tensor.values = vec![0.5; shape.iter().product()];
    }

    /// Writes the model and gives the path to open.
    fn write(&self, format: &str, scratch: &Scratch) -> PathBuf {
        let (name, content) = match format {
            "dat" => ("model.dat", self.dat(false)),
            "nf4.dat" => ("model.nf4.dat", self.dat(true)),
            "safetensors" => ("model.safetensors", self.safetensors(false)),
            "nf4" => ("model.safetensors", self.safetensors(true)),
            _ => ("model.gguf", self.gguf()),
        };
        let path = scratch.0.join(name);
        std::fs::write(&path, content).unwrap();
        if format != "gguf" {
            std::fs::write(scratch.0.join("config.json"), self.config.to_string()).unwrap();
            if self.tokenizer {
                let from = concat!(
                    env!("CARGO_MANIFEST_DIR"),
                    "/tests/golden/text/tokenizer.json"
                );
                std::fs::copy(from, scratch.0.join("tokenizer.json")).unwrap();
            }
        }
        path
    }

    /// With `nf4`, the matrices of the layers as TorchSharp hosts store them; see [`Tensor::absmax`].
    fn dat(&self, nf4: bool) -> Vec<u8> {
        let mut entries = Vec::new();
        for t in &self.tensors {
            let mut dims: Vec<u64> = t.shape.iter().map(|&d| d as u64).collect();
            if !(nf4 && t.is_matrix_of_a_layer()) {
                entries.push(dat_entry(&t.name, 6, &dims, &bytes(&t.values)));
                continue;
            }
            dims[1] /= 2;
            let module = t.name.strip_suffix(".weight").unwrap();
            let absmax = t.absmax();
            let part = |name: &str, values: &[f32]| {
                let count = [values.len() as u64];
                dat_entry(&format!("{module}.{name}"), 6, &count, &bytes(values))
            };
            entries.extend([
                dat_entry(&t.name, 0, &dims, &vec![0; t.values.len() / 2]),
                part("absmax", &absmax),
                part("quant_map", &[0.5; 16]),
            ]);
        }
        dat(&entries)
    }

    /// With `nf4`, the matrices of the layers as bitsandbytes stores them; see [`Tensor::absmax`].
    fn safetensors(&self, nf4: bool) -> Vec<u8> {
        let mut items: Vec<(String, &str, String, Vec<u8>)> = Vec::new();
        for t in &self.tensors {
            let shape = format!("{:?}", t.shape);
            if !(nf4 && t.is_matrix_of_a_layer()) {
                items.push((t.name.clone(), "F32", shape, bytes(&t.values)));
                continue;
            }
            let absmax = t.absmax();
            let state = json!({"blocksize": 64, "shape": t.shape}).to_string();
            let codes = t.values.len().div_ceil(2);
            let part = |name: &str| format!("{}.{name}", t.name);
            let list = |n: usize| format!("[{n}]");
            items.extend([
                (part("absmax"), "F32", list(absmax.len()), bytes(&absmax)),
                (part("quant_map"), "F32", list(16), bytes(&[0.5; 16])),
                (t.name.clone(), "U8", format!("[{codes},1]"), vec![0; codes]),
                (
                    part("quant_state.bitsandbytes__nf4"),
                    "U8",
                    list(state.len()),
                    state.into_bytes(),
                ),
            ]);
        }
        let items: Vec<_> = items
            .iter()
            .map(|(n, d, s, b)| (n.as_str(), *d, s.as_str(), b.clone()))
            .collect();
        tensors(&items)
    }

    fn gguf_pairs(&self) -> Vec<Vec<u8>> {
        let architecture = self.config["model_type"].as_str().unwrap();
        let mut gguf = Gguf::new(architecture);
        for (key, name) in [
            ("embedding_length", "hidden_size"),
            ("feed_forward_length", "intermediate_size"),
            ("block_count", "num_hidden_layers"),
            ("attention.head_count", "num_attention_heads"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("attention.key_length", "head_dim"),
            ("context_length", "max_position_embeddings"),
        ] {
            let value = self.config[name].as_u64().unwrap() as u32;
            let key = format!("{architecture}.{key}");
            gguf = gguf.with_pair(Gguf::pair(&key, 4, &value.to_le_bytes()));
        }
        let eps = format!("{architecture}.attention.layer_norm_rms_epsilon");
        gguf = gguf.with_pair(Gguf::pair(&eps, 6, &1e-6f32.to_le_bytes()));
        if self.tokenizer {
            let texts = |all: &[String]| -> Vec<u8> {
                let text =
                    |t: &String| [&(t.len() as u64).to_le_bytes()[..], t.as_bytes()].concat();
                all.iter().flat_map(text).collect()
            };
            let mut words: Vec<String> = (b'!'..=b'~').map(|b| char::from(b).into()).collect();
            words.push("ab".to_owned());
            let merges = texts(&["a b".to_owned()]);
            gguf = gguf
                .with_pair(Gguf::array_pair(
                    "tokenizer.ggml.tokens",
                    8,
                    words.len() as u64,
                    &texts(&words),
                ))
                .with_pair(Gguf::array_pair("tokenizer.ggml.merges", 8, 1, &merges))
                .with_pair(Gguf::text_pair("tokenizer.ggml.model", "gpt2"))
                .with_pair(Gguf::text_pair("tokenizer.ggml.pre", "gpt-2"));
        }
        gguf.pairs.extend(self.pairs.iter().cloned());
        gguf.pairs
    }

    fn gguf(&self) -> Vec<u8> {
        let mut gguf = Gguf::new("");
        gguf.pairs = self.gguf_pairs();
        let mut data = Vec::new();
        for t in &self.tensors {
            let dims: Vec<u64> = t.shape.iter().rev().map(|&d| d as u64).collect();
            gguf = gguf.tensor(&t.gguf, &dims, 0, data.len() as u64);
            data.extend(bytes(&t.values));
            data.resize(data.len().next_multiple_of(32), 0);
        }
        gguf.with_data(data).build()
    }
}

fn load(path: &std::path::Path) -> NVFP4::base::Result<std::sync::Arc<Served>> {
    Served::load(path, &LoadOptions::new(Device::cpu(Some(2)).unwrap()))
}

/// Converts the model at `path`, which must leave nothing behind if it fails, and else a model that loads.
fn quantize(path: &std::path::Path) -> NVFP4::base::Result<()> {
    let scratch = Scratch::new();
    for (container, name) in [(Container::ModelOpt, "out"), (Container::Dat, "out.dat")] {
        let options = ConvertOptions::new(container, Recipe::Amax);
        let source = model::open(path)?;
        let pool = Pool::new(2).unwrap();
        let result = convert(
            &*source,
            &scratch.0.join(name),
            &options,
            &pool,
            &mut |_| ControlFlow::Continue(()),
        );
        if let Err(e) = result {
            assert_eq!(scratch.names(), Vec::<String>::new(), "{e}");
            return Err(e);
        }
        let made = load(&scratch.0.join(name));
        made.unwrap_or_else(|e| panic!("{name} is written and does not load: {e}"));
        for made in std::fs::read_dir(&scratch.0).unwrap() {
            let made = made.unwrap().path();
            let _ = std::fs::remove_dir_all(&made);
            let _ = std::fs::remove_file(&made);
        }
    }
    Ok(())
}

/// In every format, `model` must be refused with a message that names the file and holds every needle.
fn refused(model: &Description, kind: ErrorKind, needles: &[&str]) {
    for format in FORMATS {
        let scratch = Scratch::new();
        let path = model.write(format, &scratch);
        let error = load(&path).map(|_| ()).unwrap_err();
        named(format, &error, needles);
        let message = error.message();
        assert!(
            message.contains(path.to_str().unwrap()),
            "{format}: {error}"
        );
        assert_eq!(error.kind(), kind, "{format}: {error}");
    }
}

fn named(format: &str, error: &Error, needles: &[&str]) {
    for needle in needles {
        assert!(
            error.message().contains(needle),
            "{format}: '{error}' lacks '{needle}'"
        );
    }
    assert!(!error.message().contains('\n'), "{format}: {error}");
}

#[test]
fn the_good_model_loads_and_converts() {
    for format in FORMATS {
        let scratch = Scratch::new();
        let path = good().write(format, &scratch);
        let model = load(&path).unwrap_or_else(|e| panic!("{format}: {e}"));
        assert_eq!(model.spec().vocab_size, ROWS, "{format}");
        quantize(&path).unwrap_or_else(|e| panic!("{format}: {e}"));
    }
}

#[test]
fn a_split_model_is_the_model() {
    let scratch = Scratch::new();
    let whole = load(&good().write("gguf", &scratch)).unwrap();
    let parts = Scratch::new();
    let paths = write_split(&good().gguf(), &parts.0, |i, _| i % 3);
    for path in [&paths[1], &parts.0] {
        let split = load(path).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(split.fingerprint(), whole.fingerprint());
        quantize(path).unwrap_or_else(|e| panic!("{e}"));
    }
}

/// Held alike, the same weights are the same model whatever file they came from and however many threads read them.
#[test]
fn the_format_of_a_file_does_not_tell_models_apart() {
    for formats in [["dat", "safetensors"], ["nf4.dat", "nf4"]] {
        let fingerprints = formats.map(|format| {
            let scratch = Scratch::new();
            load(&good().write(format, &scratch)).unwrap().fingerprint()
        });
        assert_eq!(fingerprints[0], fingerprints[1], "{formats:?}");
    }
    let mut other = good();
    other.tensor("gate_proj.weight").values[5 * HIDDEN + 3] = 0.25;
    let fingerprint = |model: &Description, threads, quantize: Option<Recipe>| {
        let scratch = Scratch::new();
        let options = LoadOptions {
            quantize: quantize.map(|recipe| QuantizeOptions {
                recipe,
                ..QuantizeOptions::default()
            }),
            ..LoadOptions::new(Device::cpu(Some(threads)).unwrap())
        };
        let path = model.write("safetensors", &scratch);
        Served::load(&path, &options).unwrap().fingerprint()
    };
    let mut seen = std::collections::HashSet::new();
    for model in [&good(), &other] {
        for quantize in [None, Some(Recipe::Amax)] {
            let one = fingerprint(model, 1, quantize);
            assert!(seen.insert(one));
            assert_eq!(fingerprint(model, 5, quantize), one);
        }
    }
}

#[test]
fn missing_tensors_are_named_together() {
    let mut model = good();
    let gone = ["down_proj.weight", "q_norm.weight", "model.norm.weight"];
    model
        .tensors
        .retain(|t| !gone.iter().any(|g| t.name.ends_with(g)));
    let all = "model.norm.weight, model.layers.0.self_attn.q_norm.weight, model.layers.0.mlp.down_proj.weight";
    refused(
        &model,
        ErrorKind::NotFound,
        &["3 tensors of this qwen3 model are missing", all],
    );
}

#[test]
fn wrong_shapes_are_named_together() {
    let mut model = good();
    model.reshape("up_proj.weight", &[WIDE, 16]);
    model.reshape("k_norm.weight", &[32]);
    refused(
        &model,
        ErrorKind::CorruptFile,
        &[
            "mlp.up_proj.weight has shape [48, 16], expected [48, 32]",
            "self_attn.k_norm.weight has shape [32], expected [16]",
        ],
    );
}

#[test]
fn weights_that_are_not_finite() {
    for name in [
        "q_proj.weight",
        "input_layernorm.weight",
        "embed_tokens.weight",
    ] {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut model = good();
            model.tensor(name).values[9] = value;
            refused(&model, ErrorKind::CorruptFile, &[name, "must be finite"]);
        }
    }
    for format in FORMATS {
        for value in [f32::NAN, f32::INFINITY] {
            let mut model = good();
            model.tensor("q_proj.weight").values[9] = value;
            let scratch = Scratch::new();
            let error = quantize(&model.write(format, &scratch)).unwrap_err();
            named(format, &error, &["self_attn.q_proj.weight"]);
        }
    }
}

#[test]
fn k_that_is_no_multiple_of_16() {
    let mut model = good();
    model.config["intermediate_size"] = json!(40);
    model.reshape("gate_proj.weight", &[40, HIDDEN]);
    model.reshape("up_proj.weight", &[40, HIDDEN]);
    model.reshape("down_proj.weight", &[HIDDEN, 40]);
    refused(
        &model,
        ErrorKind::Unsupported,
        &["intermediate_size is 40; it must be a multiple of 16"],
    );
    for format in FORMATS {
        let scratch = Scratch::new();
        let error = quantize(&model.write(format, &scratch)).unwrap_err();
        named(format, &error, &["intermediate_size is 40"]);
    }
}

#[test]
fn unknown_architectures() {
    let mut model = good();
    model.config["model_type"] = json!("mamba");
    refused(
        &model,
        ErrorKind::Unsupported,
        &["'mamba'", "known are llama, qwen2, qwen3"],
    );
}

#[test]
fn tokenizers_larger_than_the_embedding() {
    let mut description = good();
    description.tokenizer = true;
    for format in FORMATS {
        let scratch = Scratch::new();
        let model = load(&description.write(format, &scratch)).unwrap();
        let tokenizer = model.tokenizer().unwrap();
        let past = tokenizer.encode("z", false).unwrap();
        let text = tokenizer.text_of(past[0]).unwrap();
        assert!(past[0] as usize >= ROWS, "{format}");
        let mut session = Session::new(model.clone(), &SessionOptions::default()).unwrap();
        let error = session.prefill(&past).unwrap_err();
        let (id, rows) = (
            format!("token {}", past[0]),
            format!("vocabulary of {ROWS}"),
        );
        named(
            format,
            &error,
            &[&id, &rows, &format!("'{text}'"), "no row for it"],
        );
        session.prefill(&[1, 2]).unwrap();
    }
}

/// A file with the tensors `more` in addition to the model's.
fn beside(model: &Description, more: &[(&str, &str, &str, Vec<u8>)]) -> Vec<u8> {
    let shapes: Vec<String> = model
        .tensors
        .iter()
        .map(|t| format!("{:?}", t.shape))
        .collect();
    let own = model.tensors.iter().zip(&shapes);
    let own = own.map(|(t, shape)| (t.name.as_str(), "F32", shape.as_str(), bytes(&t.values)));
    let items: Vec<_> = own.chain(more.iter().cloned()).collect();
    tensors(&items)
}

fn opened(content: Vec<u8>, scratch: &Scratch) -> PathBuf {
    let path = scratch.0.join("model.safetensors");
    std::fs::write(&path, content).unwrap();
    std::fs::write(scratch.0.join("config.json"), good().config.to_string()).unwrap();
    path
}

/// Unreadable tensors do not prevent running a model that does not need them, and are listed.
#[test]
fn tensors_that_cannot_be_read_are_missed_only_where_they_are_needed() {
    let unused = [
        ("model.vision_tower.a", "U16", "[2]", vec![0; 4]),
        ("model.vision_tower.b", "U32", "[2]", vec![0; 8]),
        ("model.layers.0.empty.weight", "F32", "[0,3]", vec![]),
        ("scratch.empty", "BF16", "[0]", vec![]),
        ("a.c", "U64", "[1]", vec![0; 8]),
        ("a.d", "F8_E5M2", "[3]", vec![0; 3]),
        ("a.e", "F8_E8M0", "[1]", vec![0; 1]),
        ("a.f", "F4", "[2]", vec![0; 1]),
        ("a.g", "C64", "[1]", vec![0; 8]),
        ("a.h", "F6_OF_TOMORROW", "[4]", vec![0; 3]),
        // Codes with unreadable scales.
        ("b.q.weight", "U8", "[16,8]", vec![0; 128]),
        ("b.q.weight_scale", "F8_E8M0", "[16,1]", vec![0; 16]),
    ];
    let scratch = Scratch::new();
    let path = opened(beside(&good(), &unused), &scratch);
    let checkpoint = model::open(&path).unwrap();
    let mut listed: Vec<_> = (checkpoint.unreadable().iter())
        .map(|u| (u.name.as_str(), u.dtype.as_str(), u.bytes))
        .collect();
    let mut want: Vec<_> = (unused.iter())
        .map(|(name, dtype, _, data)| (*name, *dtype, data.len() as u64))
        .collect();
    listed.sort_unstable();
    want.sort_unstable();
    assert_eq!(listed, want);
    assert_eq!(checkpoint.entries().len(), good().tensors.len());
    load(&path).unwrap();
    quantize(&path).unwrap();

    let up = "model.layers.0.mlp.up_proj.weight";
    let mut without = good();
    without.tensors.retain(|t| t.name != up);
    let codes = |scales: &'static str| {
        vec![
            (up, "U8", "[48,16]", vec![0; 768]),
            (
                "model.layers.0.mlp.up_proj.weight_scale",
                scales,
                "[48,1]",
                vec![0; 48],
            ),
        ]
    };
    for (needed, needles) in [
        (
            vec![(up, "U32", "[48,4]", vec![0; 768])],
            &[up, "is stored as U32", "BF16"][..],
        ),
        (
            vec![(up, "F8_E5M2", "[48,32]", vec![0; 1536])],
            &[up, "F8_E5M2"],
        ),
        (vec![(up, "F32", "[0,32]", vec![])], &[up, "shape [0, 32]"]),
        (codes("F8_E8M0"), &[up, "up_proj.weight_scale'", "F8_E8M0"]),
    ] {
        let scratch = Scratch::new();
        let path = opened(beside(&without, &needed), &scratch);
        let error = load(&path).map(|_| ()).unwrap_err();
        named("safetensors", &error, needles);
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        let error = model::training::Source::open(&path)
            .map(|_| ())
            .unwrap_err();
        named("training", &error, needles);
    }
}

/// In GGUF the size of an unknown type is not known either.
#[test]
fn ggml_types_that_cannot_be_read_are_missed_only_where_they_are_needed() {
    const IQ2_XXS: u32 = 16;
    let scratch = Scratch::new();
    let path = scratch.0.join("model.gguf");
    let end = |gguf: &Description| {
        let sizes = gguf
            .tensors
            .iter()
            .map(|t| (4 * t.values.len()).next_multiple_of(32));
        sizes.sum::<usize>() as u64
    };
    let plain = good();
    let file = |kind_of_up: u32| {
        let mut at = 0;
        let mut gguf = Gguf::new("qwen3");
        gguf.pairs = plain.gguf_pairs();
        let mut data = Vec::new();
        for t in &plain.tensors {
            let dims: Vec<u64> = t.shape.iter().rev().map(|&d| d as u64).collect();
            let kind = if t.gguf.contains("ffn_up") {
                kind_of_up
            } else {
                0
            };
            gguf = gguf.tensor(&t.gguf, &dims, kind, at);
            data.extend(bytes(&t.values));
            data.resize(data.len().next_multiple_of(32), 0);
            at = data.len() as u64;
        }
        assert_eq!(at, end(&plain));
        data.extend([0; 96]);
        gguf.tensor("v.a.weight", &[256], IQ2_XXS, at)
            .tensor("v.empty", &[4, 0], 0, at)
            .tensor("v.b", &[8], 999, at + 64)
            .with_data(data)
            .build()
    };
    std::fs::write(&path, file(0)).unwrap();
    let checkpoint = model::open(&path).unwrap();
    let listed: Vec<_> = (checkpoint.unreadable().iter())
        .map(|u| (u.name.as_str(), u.dtype.as_str(), u.bytes))
        .collect();
    assert_eq!(
        listed,
        [
            ("v.a.weight", "IQ2_XXS", 64),
            ("v.empty", "F32", 0),
            ("v.b", "type 999", 32)
        ]
    );
    load(&path).unwrap();
    std::fs::write(&path, file(IQ2_XXS)).unwrap();
    let error = load(&path).map(|_| ()).unwrap_err();
    named(
        "gguf",
        &error,
        &["model.layers.0.mlp.up_proj.weight", "IQ2_XXS"],
    );
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

/// Codes without scales are no weights, however well their shape fits.
#[test]
fn integers_are_no_weights() {
    let scratch = Scratch::new();
    let path = good().write("safetensors", &scratch);
    let name = "model.layers.0.mlp.up_proj.weight";
    let items: Vec<_> = good()
        .tensors
        .into_iter()
        .map(|t| {
            let shape = format!("{:?}", t.shape);
            if t.name == name {
                (t.name, "I8", shape, vec![1; WIDE * HIDDEN])
            } else {
                (t.name, "F32", shape, bytes(&t.values))
            }
        })
        .collect();
    let items: Vec<_> = items
        .iter()
        .map(|(n, d, s, b)| (n.as_str(), *d, s.as_str(), b.clone()))
        .collect();
    std::fs::write(&path, tensors(&items)).unwrap();
    let error = load(&path).map(|_| ()).unwrap_err();
    named("load", &error, &[name, "is stored as I8"]);
    let error = quantize(&path).unwrap_err();
    named("quantize", &error, &[name, "is stored as I8"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if env::tests_are_long() { 1000 } else { 100 }))]

    /// Loaded or refused, run or refused: anything but a panic.
    #[test]
    fn flipped_bits_in_a_model_are_survived(
        format in 0..FORMATS.len(),
        in_config in any::<bool>(),
        near in any::<bool>(),
        flips in proptest::collection::vec((0usize..1 << 16, 0u8..8), 1..4),
    ) {
        let scratch = Scratch::new();
        let mut model = good();
        model.tokenizer = FORMATS[format] == "gguf" && flips[0].1 == 0;
        if model.tokenizer {
            model.reshape("embed_tokens.weight", &[96, HIDDEN]);
            model.reshape("lm_head.weight", &[96, HIDDEN]);
        }
        let path = model.write(FORMATS[format], &scratch);
        let config = scratch.0.join("config.json");
        let file = if in_config && config.exists() { &config } else { &path };
        let mut bytes = std::fs::read(file).unwrap();
        // Headers are small, and where the lies are.
        let reach = if near { bytes.len().min(1500) } else { bytes.len() };
        for (at, bit) in flips {
            bytes[at % reach] ^= 1 << bit;
        }
        std::fs::write(file, bytes).unwrap();
        let _ = quantize(&path);
        if let Ok(model) = load(&path) {
            let mut session = Session::new(model, &SessionOptions::default()).unwrap();
            let options = GenerateOptions {
                max_tokens: 2,
                ..GenerateOptions::default()
            };
            if session.prefill(&[1, 2, 3]).is_ok() {
                let _ = session.generate(&options, &mut |_| ControlFlow::Continue(()));
            }
        }
    }
}

#[test]
fn gguf_files_say_where_turns_end() {
    const END: u32 = 3;
    const OTHER: u32 = 4;
    let words = ["a", "b", "ab", "<|end|>", "<|other|>", "<|mark|>"];
    let list = |kind: u32, items: &[i32]| {
        let bytes: Vec<u8> = items.iter().flat_map(|i| i.to_le_bytes()).collect();
        move |key: &str| Gguf::array_pair(key, kind, bytes.len() as u64 / 4, &bytes)
    };
    let number = |key: &str, id: u32| Gguf::pair(key, 4, &id.to_le_bytes());
    let texts = |all: &[&str]| -> Vec<u8> {
        let text = |t: &&str| [&(t.len() as u64).to_le_bytes()[..], t.as_bytes()].concat();
        all.iter().flat_map(text).collect()
    };
    let eos = "tokenizer.ggml.eos_token_id";
    let after = |end: &str| {
        let template =
            format!("{{% for m in messages %}}<|mark|>{{{{ m.content }}}}{end}\n{{% endfor %}}");
        Gguf::text_pair("tokenizer.chat_template", &template)
    };
    // User-defined, as converters type `<|end|>` of Phi-3.
    let types = [1, 1, 1, 4, 1, 3];
    for (pairs, expected) in [
        (vec![], vec![END]),
        (vec![number(eos, 0)], vec![0, END]),
        // By the template, whatever the type of its end.
        (vec![after("<|end|>")], vec![END]),
        (
            vec![after("<|other|>"), number(eos, 0)],
            vec![0, END, OTHER],
        ),
        (vec![after("{% if %}")], vec![END]),
        (vec![number("tokenizer.ggml.eom_token_id", 1)], vec![1, END]),
        (vec![number("tokenizer.ggml.eom_token_id", 1000)], vec![END]),
        // As Ollama has several; ids of no token are none.
        (
            vec![
                number(eos, 0),
                list(5, &[0, 2, 900, -1])("tokenizer.ggml.eos_token_ids"),
            ],
            vec![0, 2, END],
        ),
        (vec![list(5, &[1, 2])(eos)], vec![1, 2, END]),
    ] {
        let mut model = good();
        let tokens = Gguf::array_pair(
            "tokenizer.ggml.tokens",
            8,
            words.len() as u64,
            &texts(&words),
        );
        let merges = Gguf::array_pair("tokenizer.ggml.merges", 8, 1, &texts(&["a b"]));
        model.pairs = vec![
            tokens,
            merges,
            list(5, &types)("tokenizer.ggml.token_type"),
            Gguf::text_pair("tokenizer.ggml.model", "gpt2"),
            Gguf::text_pair("tokenizer.ggml.pre", "gpt-2"),
        ];
        model.pairs.extend(pairs);
        let scratch = Scratch::new();
        let path = model.write("gguf", &scratch);
        let loaded = load(&path).unwrap();
        assert_eq!(loaded.stop_tokens(), expected);
        // Converting keeps the ends.
        let out = Scratch::new();
        let options = ConvertOptions::new(Container::ModelOpt, Recipe::Amax);
        let source = model::open(&path).unwrap();
        let pool = Pool::new(2).unwrap();
        let to = out.0.join("out");
        convert(&*source, &to, &options, &pool, &mut |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
        assert_eq!(load(&to).unwrap().stop_tokens(), expected);
    }
}

#[test]
fn gguf_files_say_how_texts_are_embedded() {
    let pool = Pool::new(1).unwrap();
    for (kind, expected) in [
        (0u32, None),
        (1, Some(Pooling::Mean)),
        (2, Some(Pooling::Cls)),
        (3, Some(Pooling::Last)),
        // A reranker embeds nothing.
        (4, None),
    ] {
        let mut model = good();
        model.pairs = vec![Gguf::pair("qwen3.pooling_type", 4, &kind.to_le_bytes())];
        let scratch = Scratch::new();
        let path = model.write("gguf", &scratch);
        let out = Scratch::new();
        let to = out.0.join("out");
        let options = ConvertOptions::new(Container::ModelOpt, Recipe::Amax);
        let source = model::open(&path).unwrap();
        convert(&*source, &to, &options, &pool, &mut |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
        for path in [path, to] {
            let loaded = load(&path).unwrap();
            let settings = loaded.embedding();
            assert_eq!((settings.pooling, &settings.fault), (expected, &None));
            assert_eq!(settings.normalize, expected.is_some());
        }
    }
}
