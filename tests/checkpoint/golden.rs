//! Reading against files and values that other implementations made; see `tests/golden/checkpoint/make.py`.

use std::path::{Path, PathBuf};

use super::common::expect_kind;
use NVFP4::base::ErrorKind;
use NVFP4::checkpoint::{Checkpoint, Encoding, TokenizerSource};
use NVFP4::model;
use safetensors::SafeTensors;

use super::files::{Gguf, dat, dat_entry};

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/checkpoint")
}

fn values(checkpoint: &dyn Checkpoint, name: &str) -> Vec<f32> {
    let entry = checkpoint
        .find(name)
        .unwrap_or_else(|| panic!("there is no '{name}'"));
    let mut out = vec![f32::NAN; entry.rows() * entry.cols()];
    checkpoint
        .rows_f32(entry, 0..entry.rows(), &mut out)
        .unwrap();
    out
}

/// Reads every tensor that has expected values, whole and by row ranges, and compares bit for bit (`tolerance` 0) or
/// relatively. Returns the number of NVFP4 entries whose codes and scales were compared as well.
fn compare(file: &str, format: &str, tolerance: f32) -> usize {
    let checkpoint = model::open(&directory().join(file)).unwrap();
    assert_eq!(checkpoint.format(), format);
    let expected = std::fs::read(directory().join(format!("{file}.expected.safetensors"))).unwrap();
    let expected = SafeTensors::deserialize(&expected).unwrap();
    let mut packed = 0;
    assert!(!expected.is_empty());
    for (name, want) in expected.tensors() {
        let want_values: Vec<f32> = want
            .data()
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect();
        if let Some((name, what)) = name.split_once('/') {
            let entry = checkpoint.find(name).unwrap();
            let mut codes = vec![0; entry.rows() * entry.cols() / 2];
            let mut scales = vec![0; entry.rows() * entry.cols() / 16];
            let middle = entry.rows() / 3;
            let (c, s) = (middle * entry.cols() / 2, middle * entry.cols() / 16);
            checkpoint
                .rows_nvfp4(entry, 0..middle, &mut codes[..c], &mut scales[..s])
                .unwrap();
            checkpoint
                .rows_nvfp4(
                    entry,
                    middle..entry.rows(),
                    &mut codes[c..],
                    &mut scales[s..],
                )
                .unwrap();
            let got = if what == "codes" { codes } else { scales };
            let got: Vec<f32> = got.into_iter().map(f32::from).collect();
            assert_eq!(got, want_values, "{file}: {name} {what}");
            packed += 1;
            continue;
        }
        let entry = checkpoint
            .find(&name)
            .unwrap_or_else(|| panic!("{file}: '{name}' is not among its entries"));
        assert_eq!(entry.shape, want.shape(), "{file}: {name}");
        let got = values(&*checkpoint, &name);
        for (i, (got, want)) in got.iter().zip(&want_values).enumerate() {
            let same = got.to_bits() == want.to_bits()
                || (*got == 0.0 && *want == 0.0)
                || (got.is_nan() && want.is_nan())
                || (got - want).abs() <= tolerance * want.abs();
            assert!(same, "{file}: {name}[{i}] is {got}, not {want}");
        }
        for row in 0..entry.rows() {
            let mut one = vec![0.0; entry.cols()];
            checkpoint.rows_f32(entry, row..row + 1, &mut one).unwrap();
            let whole = &got[row * entry.cols()..][..entry.cols()];
            assert!(
                one.iter()
                    .zip(whole)
                    .all(|(a, b)| a.to_bits() == b.to_bits()),
                "{file}: row {row} of {name} differs when read alone"
            );
        }
    }
    packed / 2
}

#[test]
fn every_gguf_type_decodes_as_the_gguf_package_does() {
    compare("blocks.gguf", "gguf", 0.0);
    let checkpoint = model::open(&directory().join("blocks.gguf")).unwrap();
    assert_eq!(checkpoint.entries().len(), 18);
    for entry in checkpoint.entries() {
        assert_eq!(entry.encoding.name(), entry.name);
    }
}

/// Blocks that the matrix does not fill, their size as a list and as a text, one scale per row, one in all, one per group of a row,
/// and powers of two, in four types of scales; see `compressed_float8.py`.
#[test]
fn float8_reads_as_compressed_tensors_decompresses_it() {
    for case in ["block", "block_text", "channel", "tensor", "group", "mx"] {
        let file = format!("float8_{case}/model.safetensors");
        assert_eq!(compare(&file, "safetensors", 0.0), 0);
        let opened = model::open(&directory().join(&file)).unwrap();
        assert_eq!(opened.entries().len(), 1, "{case}");
    }
}

#[test]
fn a_llama_gguf_reads_in_hugging_face_terms() {
    assert_eq!(compare("llama.gguf", "gguf", 0.0), 5);
    let checkpoint = model::open(&directory().join("llama.gguf")).unwrap();
    assert_eq!(checkpoint.entries().len(), 13);
    let scale = |name: &str| {
        let entry = checkpoint.find(name).unwrap();
        assert_eq!(entry.encoding, Encoding::Nvfp4);
        checkpoint.global_scale(entry).unwrap()
    };
    assert_eq!(scale("model.layers.0.self_attn.q_proj.weight"), 0.0123);
    assert_eq!(scale("model.layers.0.self_attn.o_proj.weight"), 1.0);
    let config = checkpoint.metadata().config.as_ref().unwrap();
    let want = serde_json::json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        "rms_norm_eps": 1e-6,
        "vocab_size": 10,
        "hidden_act": "silu",
        "tie_word_embeddings": true,
        "attention_bias": false,
        "bos_token_id": 0,
        "eos_token_id": 1,
    });
    assert_eq!(config, &want);
    let TokenizerSource::Vocabulary(vocabulary) = &checkpoint.metadata().tokenizer else {
        panic!("the vocabulary is missing");
    };
    assert_eq!(vocabulary.model, "gpt2");
    assert_eq!(vocabulary.pre.as_deref(), Some("qwen2"));
    assert_eq!(vocabulary.tokens.len(), 10);
    assert_eq!(vocabulary.tokens[7], "é");
    assert_eq!(vocabulary.token_types[8], 2);
    assert_eq!(vocabulary.merges, ["a b"]);
    assert_eq!((vocabulary.bos, vocabulary.eos), (Some(0), Some(1)));
    assert_eq!((vocabulary.unk, vocabulary.pad), (Some(8), Some(9)));
    assert_eq!((vocabulary.add_bos, vocabulary.add_eos), (Some(true), None));
    assert_eq!(vocabulary.chat_template.as_deref(), Some("{{ messages }}"));
}

#[test]
fn plain_safetensors_of_every_dtype() {
    compare("plain.safetensors", "safetensors", 0.0);
}

#[test]
fn modelopt() {
    assert_eq!(compare("modelopt.safetensors", "modelopt", 0.0), 1);
    let checkpoint = model::open(&directory().join("modelopt.safetensors")).unwrap();
    let entry = checkpoint.find("a.weight").unwrap();
    assert_eq!(checkpoint.global_scale(entry).unwrap(), 0.00321);
    assert_eq!(entry.bytes, 6 * 24 + 6 * 3 + 4);
    assert!(checkpoint.find("a.input_scale").is_some());
    assert!(checkpoint.find("a.weight_scale").is_none());
}

/// The divisor becomes a multiplier, which costs one rounding of the reciprocal and one of each product.
#[test]
fn compressed_tensors() {
    let ulps = 2.0 * f32::EPSILON;
    assert_eq!(
        compare("compressed.safetensors", "compressed-tensors", ulps),
        1
    );
}

#[test]
fn torchao_linear_and_swizzled() {
    assert_eq!(compare("torchao.safetensors", "torchao", 0.0), 2);
}

#[test]
fn bitsandbytes_nf4_plain_and_nested() {
    compare("nf4.safetensors", "bitsandbytes", 0.0);
}

/// A weight of bitsandbytes' file as stored by TorchSharp hosts: the same values, with the codes as a matrix.
#[test]
fn torchsharp_nf4() {
    let file = directory().join("nf4.safetensors");
    let parts = std::fs::read(&file).unwrap();
    let parts = SafeTensors::deserialize(&parts).unwrap();
    let part = |name: &str| parts.tensor(name).unwrap().data().to_vec();
    let (codes, absmax) = (part("a.weight"), part("a.weight.absmax"));
    let blocks = absmax.len() as u64 / 4;
    let (rows, packed) = (37, codes.len() / 37);
    let made = dat(&[
        dat_entry("a.quant_map", 6, &[16], &part("a.weight.quant_map")),
        dat_entry("a.weight", 0, &[rows, packed as u64], &codes),
        dat_entry("a.absmax", 6, &[blocks], &absmax),
    ]);
    let made = model::open_bytes("x.dat", made).unwrap();
    let entry = made.find("a.weight").unwrap();
    assert_eq!(entry.encoding, Encoding::Nf4);
    assert_eq!(entry.shape, [rows as usize, 2 * packed]);
    assert_eq!(entry.bytes as usize, codes.len() + absmax.len() + 64);
    let source = model::open(&file).unwrap();
    let bits = |checkpoint: &dyn Checkpoint| -> Vec<u32> {
        let values = values(checkpoint, "a.weight");
        values.into_iter().map(f32::to_bits).collect()
    };
    assert_eq!(bits(&*made), bits(&*source));
}

#[test]
fn dat_as_the_host_writes_it() {
    assert_eq!(compare("host.dat", "dat", 0.0), 2);
    let checkpoint = model::open(&directory().join("host.dat")).unwrap();
    let entry = checkpoint.find("other.weight").unwrap();
    let parts = checkpoint.parts(entry).unwrap();
    let seen: Vec<_> = parts.iter().map(|p| (p.key, p.type_code)).collect();
    assert_eq!(seen, [("other.qdata", 100), ("other.scale", 5)]);
}

#[test]
fn rows_and_buffers_are_checked() {
    let checkpoint = model::open(&directory().join("modelopt.safetensors")).unwrap();
    let entry = checkpoint.find("a.weight").unwrap();
    let mut out = vec![0.0; 48];
    for rows in [6..7, 0..7, usize::MAX..usize::MAX] {
        let error = checkpoint.rows_f32(entry, rows, &mut out).unwrap_err();
        assert!(error.message().contains("not within its 6 rows"), "{error}");
    }
    let error = checkpoint.rows_f32(entry, 0..2, &mut out).unwrap_err();
    assert!(
        error.message().contains("takes 96 elements, not 48"),
        "{error}"
    );
    let norm = checkpoint.find("norm.weight").unwrap();
    let error = checkpoint
        .rows_nvfp4(norm, 0..1, &mut [0; 24], &mut [0; 3])
        .unwrap_err();
    assert!(error.message().contains("BF16, not NVFP4"), "{error}");
    expect_kind(
        checkpoint.global_scale(norm),
        ErrorKind::InvalidArgument,
        "'norm.weight' is BF16, which has no global scale",
    );
    let mut foreign = entry.clone();
    foreign.name = "elsewhere".into();
    expect_kind(
        checkpoint.rows_f32(&foreign, 0..1, &mut out),
        ErrorKind::NotFound,
        "'elsewhere' is not an entry",
    );
}

/// A GGUF file with the f32 values 0 to 31 as a `[4, 8]` query projection of one head, and a query norm.
fn small_gguf(architecture: &str) -> Gguf {
    let heads = format!("{architecture}.attention.head_count");
    Gguf::new(architecture)
        .with_pair(Gguf::pair(&heads, 4, &1u32.to_le_bytes()))
        .tensor("blk.7.attn_q.weight", &[8, 4], 0, 0)
        .tensor("blk.7.attn_q_norm.weight", &[8], 0, 128)
        .with_data((0..40).flat_map(|i| (i as f32).to_le_bytes()).collect())
}

#[test]
fn only_llama_stores_rotated_rows_interleaved() {
    let in_order = [0.0, 8.0, 16.0, 24.0];
    let interleaved = [0.0, 16.0, 8.0, 24.0];
    for (architecture, starts) in [
        ("llama", interleaved),
        ("qwen2", in_order),
        ("qwen3", in_order),
    ] {
        let mut gguf = small_gguf(architecture);
        gguf.version = 2;
        let opened = model::open_bytes("x.gguf", gguf.build()).unwrap();
        let query = values(&*opened, "model.layers.7.self_attn.q_proj.weight");
        let got: Vec<f32> = query.chunks(8).map(|row| row[0]).collect();
        assert_eq!(got, starts, "{architecture}");
        let norm = values(&*opened, "model.layers.7.self_attn.q_norm.weight");
        assert_eq!(norm[0], 32.0);
    }
}

#[test]
fn rope_scaling_and_unknown_architectures() {
    let config = |gguf: Gguf| {
        let opened = model::open_bytes("x.gguf", gguf.build()).unwrap();
        opened.metadata().config.clone().unwrap()
    };
    let float = |key: &str, value: f32| Gguf::pair(key, 6, &value.to_le_bytes());
    assert!(config(small_gguf("qwen2")).get("rope_scaling").is_none());
    let linear = small_gguf("qwen2")
        .with_pair(Gguf::text_pair("qwen2.rope.scaling.type", "linear"))
        .with_pair(float("qwen2.rope.scaling.factor", 2.5));
    let want = serde_json::json!({"rope_type": "linear", "factor": 2.5});
    assert_eq!(config(linear)["rope_scaling"], want);
    let old = small_gguf("llama").with_pair(float("llama.rope.scale_linear", 4.0));
    let want = serde_json::json!({"rope_type": "linear", "factor": 4.0});
    assert_eq!(config(old)["rope_scaling"], want);
    let none = small_gguf("llama")
        .with_pair(Gguf::text_pair("llama.rope.scaling.type", "none"))
        .with_pair(float("llama.rope.scaling.factor", 1.0));
    assert!(config(none).get("rope_scaling").is_none());

    let opened = model::open_bytes("x.gguf", small_gguf("mamba").build()).unwrap();
    assert_eq!(
        opened.metadata().config.as_ref().unwrap()["model_type"],
        "mamba"
    );
    assert!(opened.find("blk.7.attn_q.weight").is_some());
}
