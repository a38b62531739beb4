//! The files of a repository that are fetched, in all forms in which models are published, and that the models run.

use std::collections::BTreeSet;
use std::fs;

use serde_json::json;

use crate::standin::{Hub, MODEL, golden, names, path, slices, stderr};

const INDEX: &[u8] =
    br#"{"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}"#;

/// Runs `name` and compares its answer with that of the golden model itself.
fn runs(hub: &Hub, name: &str) {
    let run = |model: &str| {
        let args = [
            "run",
            "--model",
            model,
            "--prompt",
            "Hi",
            "--json",
            "--max-tokens",
            "9",
        ];
        let output = hub.nvfp4(&args).output().unwrap();
        assert!(output.status.success(), "{model}: {}", stderr(&output));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        json["tokens"].clone()
    };
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/model/qwen3_tied");
    let tokens = run(name);
    assert!(!tokens.as_array().unwrap().is_empty());
    assert_eq!(tokens, run(golden));
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|n| (*n).to_owned()).collect()
}

#[test]
fn what_a_model_needs_is_fetched_and_nothing_else() {
    let shard = vec![7u8; 100_000];
    let hub = Hub::of(
        "needs",
        &[
            ("config.json", b"{}"),
            ("tokenizer.json", b"{\"t\": 1}"),
            ("chat_template.jinja", b"x"),
            ("chat_template.json", b"{\"c\": 1}"),
            ("vocab.json", b"{\"v\": 1}"),
            ("merges.txt", b""),
            ("special_tokens_map.json", b"{\"s\": 1}"),
            ("added_tokens.json", b"{\"a\": 1}"),
            ("README.md", b"no"),
            ("pytorch_model.bin", b"no"),
            ("model.safetensors.index.json", INDEX),
            ("model-1-of-2.safetensors", &shard),
            ("model-2-of-2.safetensors", b"second"),
            ("model-3-of-3.safetensors", b"no"),
            ("original/consolidated.safetensors", b"no"),
        ],
    );
    let pull = hub.pull(MODEL);
    let directory = path(&pull);
    assert!(fs::read(directory.join("model-1-of-2.safetensors")).unwrap() == shard);
    // An empty file has nothing to ask for.
    assert_eq!(fs::read(directory.join("merges.txt")).unwrap(), b"");
    let wanted = [
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "model-1-of-2.safetensors",
        "model-2-of-2.safetensors",
        "model.safetensors.index.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "vocab.json",
    ];
    assert_eq!(hub.fetched(), set(&wanted));
    assert_eq!(names(&directory).len(), wanted.len() + 1);
}

/// A model in one file beside an index and shards of an earlier save: the file is the model, as in transformers.
#[test]
fn of_both_layouts_the_single_file_comes() {
    let hub = Hub::of(
        "both",
        &[
            ("config.json", b"{}"),
            ("tokenizer.json", b"{\"t\": 1}"),
            ("model.safetensors", b"whole"),
            ("model.safetensors.index.json", INDEX),
            ("model-1-of-2.safetensors", b"first"),
            ("adapter_model.safetensors", b"no"),
            ("consolidated.safetensors", b"no"),
            ("model.fp16.safetensors", b"no"),
        ],
    );
    hub.pull(MODEL);
    let wanted = ["config.json", "model.safetensors", "tokenizer.json"];
    assert_eq!(hub.fetched(), set(&wanted));
}

#[test]
fn weights_by_other_names() {
    let files = golden();
    for (number, name) in [
        "consolidated.safetensors",
        "model-00001-of-00001.safetensors",
        "model.fp16.safetensors",
        "weights.safetensors",
    ]
    .into_iter()
    .enumerate()
    {
        let hub = Hub::of(
            &format!("other-{number}"),
            &[
                ("config.json", &files[0].1),
                ("tokenizer.json", &files[1].1),
                (name, &files[2].1),
            ],
        );
        runs(&hub, MODEL);
        assert!(hub.fetched().contains(name));
    }
}

#[test]
fn a_model_in_a_folder() {
    let files = golden();
    let in_folder: Vec<(String, &[u8])> = files
        .iter()
        .map(|(name, content)| (format!("sub folder/{name}"), &content[..]))
        .collect();
    let mut all: Vec<(&str, &[u8])> = in_folder.iter().map(|(n, c)| (n.as_str(), *c)).collect();
    all.push(("README.md", b"no"));
    let hub = Hub::of("folder", &all);
    runs(&hub, MODEL);
    runs(&hub, "org/model:sub folder");
    assert!(path(&hub.pull(MODEL)).ends_with("sub folder"));
    // With two of them one must be named.
    hub.put("other/model.safetensors", b"x");
    hub.put("other/config.json", b"{}");
    let e = hub.fails("org/model@main");
    assert!(e.contains("several folders: other, sub folder"), "{e}");
    assert!(path(&hub.pull("org/model:other")).ends_with("other"));
}

#[test]
fn names_with_anything_in_them() {
    let files = golden();
    let hub = Hub::of("anything", &slices(&files));
    for name in [
        "a b.gguf",
        "a#b.gguf",
        "a?b=c&d.gguf",
        "größe.gguf",
        "a%20b.gguf",
        "a+b.gguf",
        "(x) [y].gguf",
    ] {
        hub.put(name, name.as_bytes());
        let file = path(&hub.pull(&format!("{MODEL}:{name}")));
        assert_eq!(fs::read(&file).unwrap(), name.as_bytes());
        assert!(file.ends_with(name));
    }
}

#[test]
fn quantizations_by_their_names() {
    let hub = Hub::of(
        "quantizations",
        &[
            ("m.Q4_0.gguf", b"GGUF0"),
            ("m.IQ4_0.gguf", b"GGUF1"),
            ("m-Q4_0_8.gguf", b"GGUF2"),
            ("BF16/m-BF16-00001-of-00002.gguf", b"GGUF3"),
            ("BF16/m-BF16-00002-of-00002.gguf", b"GGUF4"),
            ("mmproj-m-BF16.gguf", b"GGUF5"),
        ],
    );
    let file = |name: &str| fs::read(path(&hub.pull(name))).unwrap();
    assert_eq!(file("org/model:Q4_0"), b"GGUF0");
    assert_eq!(file("org/model:iq4_0"), b"GGUF1");
    hub.forget();
    assert_eq!(file("org/model:BF16"), b"GGUF3");
    assert_eq!(hub.fetched().len(), 2);
    let e = hub.fails("org/model:Q5_K_M");
    assert!(
        e.contains("holds no Q5_K_M") && e.contains("m.Q4_0.gguf"),
        "{e}"
    );
    let e = hub.fails(MODEL);
    assert!(
        e.contains("holds 3 models: ") && e.contains("m.Q4_0.gguf"),
        "{e}"
    );
}

#[test]
fn what_makes_no_model_is_said_before_anything_comes() {
    for (number, (files, words)) in [
        (
            vec!["model.safetensors", "tokenizer.json"],
            "no config.json",
        ),
        (
            vec!["config.json", "pytorch_model.bin"],
            "neither safetensors nor GGUF",
        ),
        (
            vec!["config.json", "model-00001-of-00002.safetensors"],
            "model-00002-of-00002.safetensors",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let files: Vec<(&str, &[u8])> = files.into_iter().map(|n| (n, &b"x"[..])).collect();
        let hub = Hub::of(&format!("no-model-{number}"), &files);
        let e = hub.fails(MODEL);
        assert!(e.contains(words), "{e}");
        assert!(hub.fetched().is_empty());
    }
}

#[test]
fn an_evil_index_is_refused() {
    for (number, evil) in ["../../../evil", "/etc/passwd", "sub/x.safetensors"]
        .into_iter()
        .enumerate()
    {
        let index = json!({"weight_map": {"a": evil}}).to_string();
        let hub = Hub::of(
            &format!("evil-{number}"),
            &[
                ("config.json", b"{}"),
                ("model.safetensors.index.json", index.as_bytes()),
            ],
        );
        let e = hub.fails(MODEL);
        assert!(e.contains(evil), "{e}");
    }
}

#[test]
fn a_converted_model_keeps_what_came_with_it() {
    let mut files = golden();
    let template = br#"{"chat_template": "{{ messages[0].content }}"}"#;
    files.push(("chat_template.json", template.to_vec()));
    for name in [
        "vocab.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "generation_config.json",
    ] {
        files.push((name, b"{}".to_vec()));
    }
    files.push(("merges.txt", b"#version: 0.2\n".to_vec()));
    let hub = Hub::of("converted", &slices(&files));
    let out = hub.scratch.path("out").display().to_string();
    let output = hub.nvfp4(&["quantize", MODEL, &out]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let expected: BTreeSet<String> = files
        .iter()
        .map(|(name, _)| (*name).to_owned())
        .chain(["hf_quant_config.json".to_owned()])
        .collect();
    assert_eq!(
        names(hub.scratch.path("out").as_path())
            .into_iter()
            .collect::<BTreeSet<_>>(),
        expected
    );
}
