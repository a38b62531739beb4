//! Directories as models are published in: which of their files are opened, and as what.

use std::path::Path;

use NVFP4::checkpoint::TokenizerSource;
use NVFP4::model;

use super::files::{Scratch, tensors};

/// A safetensors file of one tensor that is called like it.
fn one(name: &str) -> Vec<u8> {
    tensors(&[(name, "U8", "[1]", vec![7])])
}

/// A directory of such files, and of the `texts` given by name and content.
fn folder(files: &[&str], texts: &[(&str, &str)]) -> Scratch {
    let scratch = Scratch::new();
    for name in files {
        std::fs::write(scratch.0.join(name), one(name)).unwrap();
    }
    for (name, content) in texts {
        std::fs::write(scratch.0.join(name), content).unwrap();
    }
    scratch
}

/// The names of the tensors, sorted.
fn tensors_of(path: &Path) -> Vec<String> {
    let opened = model::open(path).unwrap_or_else(|e| panic!("{e}"));
    let mut names: Vec<String> = opened.entries().iter().map(|e| e.name.clone()).collect();
    names.sort();
    names
}

#[test]
fn a_set_without_an_index_is_one_model() {
    let set = [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
    ];
    let described = [("config.json", r#"{"a": 1}"#), ("tokenizer.json", "{}")];
    let scratch = folder(&set, &described);
    assert_eq!(tensors_of(&scratch.0), set);
    let opened = model::open(&scratch.0).unwrap();
    assert_eq!(opened.format(), "safetensors");
    assert_eq!(opened.metadata().config.as_ref().unwrap()["a"], 1);
    let TokenizerSource::Directory(tokenizer) = &opened.metadata().tokenizer else {
        panic!("the tokenizer is not found");
    };
    assert_eq!(*tokenizer, scratch.0);
    // By its own name one of them stays one.
    assert_eq!(tensors_of(&scratch.0.join(set[1])), [set[1]]);
    // Weights whose parts lie in different files are whole.
    let zeros = |n: usize| vec![0x30u8; n];
    let codes = tensors(&[("a.weight", "U8", "[2,8]", zeros(16))]);
    let scales = tensors(&[
        (
            "a.weight_scale_2",
            "F32",
            "[]",
            0.5f32.to_le_bytes().to_vec(),
        ),
        ("a.weight_scale", "F8_E4M3", "[2,1]", zeros(2)),
    ]);
    let scratch = Scratch::new();
    std::fs::write(scratch.0.join("q-1-of-2.safetensors"), codes).unwrap();
    std::fs::write(scratch.0.join("q-2-of-2.safetensors"), scales).unwrap();
    let opened = model::open(&scratch.0).unwrap();
    assert_eq!(opened.format(), "modelopt");
    let weight = opened.find("a.weight").unwrap();
    assert_eq!(opened.global_scale(weight).unwrap(), 0.5);
}

#[test]
fn the_plain_files_come_before_variants_and_other_layouts() {
    let (plain, half, own) = (
        "model.safetensors",
        "model.fp16.safetensors",
        "consolidated.safetensors",
    );
    let beside = [own, "adapter_model.safetensors", "mmproj-model-f16.gguf"];
    let with = |files: &[&str]| folder(&[files, &beside[..]].concat(), &[("imatrix.dat", "x")]);
    assert_eq!(tensors_of(&with(&[plain, half]).0), [plain]);
    assert_eq!(tensors_of(&with(&[half]).0), [half]);
    assert_eq!(tensors_of(&with(&[]).0), [own]);
    let shards = ["model.fp16-00001-of-00002.safetensors", "odd.safetensors"];
    let index = format!(
        r#"{{"weight_map": {{"{0}": "{0}", "{1}": "{1}"}}}}"#,
        shards[0], shards[1]
    );
    let scratch = folder(
        &[&shards[..], &beside[..]].concat(),
        &[("model.safetensors.index.fp16.json", &index)],
    );
    assert_eq!(tensors_of(&scratch.0), shards);
    let own = [
        "consolidated-00001-of-00002.safetensors",
        "consolidated-00002-of-00002.safetensors",
    ];
    assert_eq!(tensors_of(&folder(&own, &[]).0), own);
}
