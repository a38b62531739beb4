//! Directories as models are published: which of their files are opened, and in which format.

use std::path::Path;

use NVFP4::base::ErrorKind;
use NVFP4::checkpoint::TokenizerSource;
use NVFP4::engine::Served;
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

/// One line for what strangers publish in place of weights.
#[test]
fn what_a_folder_holds_in_place_of_weights_is_named() {
    for (file, words) in [
        ("adapter_config.json", "it is an adapter, for --adapter"),
        ("pytorch_model.bin", "pytorch_model.bin is a pickle"),
        (
            "pytorch_model-00001-of-00002.bin",
            "pytorch_model-00001-of-00002.bin is a pickle",
        ),
        ("consolidated.00.pth", "consolidated.00.pth is a pickle"),
        ("model_q4.onnx", "model_q4.onnx is for another program"),
        ("README.md", "with the weights of one"),
    ] {
        let scratch = folder(&[], &[(file, "x")]);
        let e = model::open(&scratch.0).map(|_| ()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::NotFound);
        assert!(e.message().contains(words), "{e}");
        assert!(!e.message().contains('\n'), "{e}");
    }
}

/// A clone without Git LFS has pointers in place of large files.
#[test]
fn pointers_of_git_lfs_are_named() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1503300328\n";
    for name in [
        "model.safetensors",
        "model.gguf",
        "model.dat",
        "config.json",
    ] {
        let scratch = match name {
            "config.json" => folder(&["model.safetensors"], &[(name, pointer)]),
            _ => folder(&[], &[(name, pointer)]),
        };
        let e = model::open(&scratch.0).map(|_| ()).unwrap_err();
        let words = format!("{name} is not the file itself but a pointer of Git LFS");
        assert_eq!(e.kind(), ErrorKind::CorruptFile);
        assert!(e.message().contains(&words), "{e}");
    }
}

#[test]
fn tokenizers_in_other_forms_are_named() {
    for name in [
        "tekken.json",
        "tokenizer.model",
        "tiktoken.model",
        "vocab.json",
    ] {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/model/qwen3_untied");
        let scratch = folder(&[], &[(name, "x")]);
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(from.join(file), scratch.0.join(file)).unwrap();
        }
        let options = model::LoadOptions::new(model::Device::cpu(Some(1)).unwrap());
        let served = Served::load(&scratch.0, &options).unwrap();
        let e = served.tokenizer().map(|_| ()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::NotFound);
        assert!(
            e.message()
                .contains(&format!("in {name} alone, which is not read")),
            "{e}"
        );
    }
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
    // Weights whose parts are in different files are complete.
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

/// The value of the tensor `a`.
fn value(path: &Path) -> f32 {
    let opened = model::open(path).unwrap_or_else(|e| panic!("{e}"));
    let mut value = [f32::NAN];
    let entry = opened.find("a").unwrap();
    opened.rows_f32(entry, 0..1, &mut value).unwrap();
    value[0]
}

/// A file that says that `a` is `value`.
fn saying(value: f32) -> Vec<u8> {
    tensors(&[("a", "F32", "[1]", value.to_le_bytes().to_vec())])
}

/// A model that was saved as one file over an earlier one in shards: transformers reads the file.
#[test]
fn one_file_comes_before_an_index() {
    let index = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
    for variant in ["", ".fp16"] {
        let name = |stem: &str| format!("model{variant}{stem}.safetensors");
        let [one, first, second] = ["", "-00001-of-00002", "-00002-of-00002"].map(name);
        let index_name = match variant {
            "" => "model.safetensors.index.json",
            _ => "model.safetensors.index.fp16.json",
        };
        let index = index.replace("model-", &format!("model{variant}-"));
        let scratch = folder(&[&second], &[(index_name, &index)]);
        std::fs::write(scratch.0.join(&first), saying(1.0)).unwrap();
        assert_eq!(value(&scratch.0), 1.0);
        std::fs::write(scratch.0.join(&one), saying(2.0)).unwrap();
        assert_eq!(value(&scratch.0), 2.0, "{one}");
        // An index opened by its own name is used.
        assert_eq!(value(&scratch.0.join(index_name)), 1.0);
        for shard in [first, second] {
            std::fs::remove_file(scratch.0.join(shard)).unwrap();
        }
        assert_eq!(value(&scratch.0), 2.0, "{one}");
        std::fs::write(scratch.0.join(index_name), "{").unwrap();
        assert_eq!(value(&scratch.0), 2.0, "{one}");
    }
}

/// The index decides between two tensors of one name.
#[test]
fn an_index_says_which_of_two_tensors_is_meant() {
    for (shard, want) in [("x.safetensors", 1.0), ("y.safetensors", 2.0)] {
        let index = format!(
            r#"{{"weight_map": {{"a": "{shard}", "x": "x.safetensors", "y": "y.safetensors"}}}}"#
        );
        let scratch = folder(&[], &[("model.safetensors.index.json", &index)]);
        for (name, value) in [("x", 1.0f32), ("y", 2.0)] {
            let file = tensors(&[
                ("a", "F32", "[1]", value.to_le_bytes().to_vec()),
                (name, "U8", "[1]", vec![7]),
            ]);
            std::fs::write(scratch.0.join(format!("{name}.safetensors")), file).unwrap();
        }
        assert_eq!(value(&scratch.0), want);
        assert_eq!(tensors_of(&scratch.0), ["a", "x", "y"]);
    }
}
