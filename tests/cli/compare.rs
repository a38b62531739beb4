//! `nvfp4 compare`, against `nvfp4 perplexity` of checkpoints that really have the exchanged blocks.

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use super::*;

/// The golden model with the scales of its linear weights and the mantissas of its table changed: another model of the same shape.
fn reference(scratch: &Scratch) -> String {
    scratch.model("reference", "model.safetensors", |old| {
        changed(&old, |name, data| {
            if name.ends_with("weight_scale_2") {
                let sign = if name.len() % 2 == 0 { 1.0 } else { -1.0 };
                let old = f32::from_le_bytes(data[..4].try_into().unwrap());
                data.copy_from_slice(&(old * (1.0 + 0.3 * sign)).to_le_bytes());
            } else if name == "model.embed_tokens.weight" {
                data.iter_mut().step_by(2).for_each(|low| *low ^= 0x70);
            }
        })
    })
}

fn changed(file: &[u8], change: impl Fn(&str, &mut [u8])) -> Vec<u8> {
    let file = SafeTensors::deserialize(file).unwrap();
    let tensors = file.tensors().into_iter().map(|(name, tensor)| {
        let mut data = tensor.data().to_vec();
        change(&name, &mut data);
        (name, tensor.dtype(), tensor.shape().to_vec(), data)
    });
    let tensors: Vec<_> = tensors.collect();
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        let view = TensorView::new(*dtype, shape.clone(), data).unwrap();
        (name.clone(), view)
    });
    safetensors::serialize(views, None).unwrap()
}

/// The reference with the tensors that `is_exchanged` names from the golden model.
fn exchanged(
    scratch: &Scratch,
    name: &str,
    reference: &str,
    is_exchanged: impl Fn(&str) -> bool,
) -> String {
    let golden = fs::read(format!("{MODEL}/model.safetensors")).unwrap();
    let golden = SafeTensors::deserialize(&golden).unwrap();
    let old = fs::read(format!("{reference}/model.safetensors")).unwrap();
    let mixed = changed(&old, |name, data| {
        if is_exchanged(name) {
            data.copy_from_slice(golden.tensor(name).unwrap().data());
        }
    });
    scratch.model(name, "model.safetensors", |_| mixed.clone())
}

fn words(scratch: &Scratch) -> String {
    let text = "Some words to read, and others \u{1b}[31m that follow; 1 2 3 4 5.\n".repeat(12);
    scratch.file("words.txt", text.as_bytes())
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value}"))
}

/// Both commands compute in float32 in different orders: logits agree to about 1e-6 of their size, and so do divergences, whose terms have
/// the size of logit differences.
fn assert_close(found: &Value, expected: &Value) {
    let (found, expected) = (number(found), number(expected));
    assert!(
        (found - expected).abs() < 1e-4 * expected + 1e-6,
        "{found} and {expected}"
    );
}

#[test]
fn compare_agrees_with_perplexity_of_mixed_checkpoints() {
    let scratch = Scratch::new("compare");
    let (reference, text) = (reference(&scratch), words(&scratch));
    let windows = ["--text", &text, "--window", "100", "--device", "cpu"];
    let found = json(&[&["compare", MODEL, &reference][..], &windows].concat());
    let perplexity = |model: &str| {
        let models = ["perplexity", "--model", model, "--reference", &reference];
        json(&[&models[..], &windows, &["--kv", "f32"]].concat())
    };
    let whole = perplexity(MODEL);
    let of_reference = &whole["reference"];
    for (found, expected) in [
        (&found["perplexity"], &whole["perplexity"]),
        (&found["reference_perplexity"], &of_reference["perplexity"]),
        (&found["kl_divergence"], &of_reference["kl_divergence"]),
        (&found["kl_max"], &of_reference["kl_max"]),
        (&found["same_top"], &of_reference["same_top"]),
    ] {
        assert_close(found, expected);
    }
    for name in ["tokens", "windows", "predicted"] {
        assert_eq!(found[name], whole[name], "{name}");
    }
    let blocks = found["blocks"].as_array().unwrap();
    assert_eq!(blocks.len(), 2);
    for (i, block) in blocks.iter().enumerate() {
        let prefix = format!("model.layers.{i}.");
        let is_exchanged = |name: &str| name.starts_with(&prefix);
        let mixed = exchanged(&scratch, &format!("block-{i}"), &reference, is_exchanged);
        let expected = &perplexity(&mixed)["reference"]["kl_divergence"];
        assert!(number(expected) > 1e-4, "{expected}");
        assert_close(&block["kl_divergence"], expected);
        assert!(number(&block["stream_error"]) > 0.0 && number(&block["block_error"]) > 0.0);
    }
    let is_table = |name: &str| name == "model.embed_tokens.weight";
    let mixed = exchanged(&scratch, "tables", &reference, is_table);
    let expected = &perplexity(&mixed)["reference"]["kl_divergence"];
    assert!(number(expected) > 1e-4, "{expected}");
    assert_close(&found["tables_kl_divergence"], expected);
}

#[test]
fn compare_lists_positions_and_worst_tokens() {
    let scratch = Scratch::new("compare-parts");
    let (reference, text) = (reference(&scratch), words(&scratch));
    let picture = scratch.path("picture.svg");
    let args = [
        "compare", MODEL, &reference, "--text", &text, "--window", "70", "--worst", "4",
    ];
    let found = json(&[&args[..], &["--svg", &picture, "--skip-blocks"]].concat());
    let positions = found["positions"].as_array().unwrap();
    let sum = |weighted: bool| -> f64 {
        let terms = positions.iter().map(|range| {
            let tokens = number(&range["tokens"]);
            tokens
                * if weighted {
                    number(&range["kl_divergence"])
                } else {
                    1.0
                }
        });
        terms.sum()
    };
    assert_eq!(sum(false), number(&found["predicted"]));
    assert!((sum(true) / sum(false) / number(&found["kl_divergence"]) - 1.0).abs() < 1e-9);
    assert_eq!(positions[1]["first"], 16);
    assert!(
        found["tables_kl_divergence"].is_null() && found["blocks"][0]["kl_divergence"].is_null()
    );
    let worst = found["worst"].as_array().unwrap();
    assert_eq!(worst.len(), 4);
    assert_eq!(worst[0]["kl_divergence"], found["kl_max"]);
    let likely = worst[0]["model"].as_array().unwrap();
    assert!(number(&likely[0]["probability"]) >= number(&likely[1]["probability"]));
    let drawn = fs::read_to_string(&picture).unwrap();
    assert!(
        drawn.contains(">16-31<") && drawn.ends_with("</svg>\n"),
        "{drawn}"
    );

    // Control characters of the text do not reach the terminal.
    let said = super::text(&[&args[..7], &["--worst", "1000"]].concat());
    assert!(
        !said.contains('\u{1b}') && said.contains("\\u{1b}"),
        "{said}"
    );
    assert!(said.contains("\nworst tokens\n"), "{said}");

    let same = json(&["compare", MODEL, MODEL, "--text", &text]);
    for name in ["kl_divergence", "kl_max", "tables_kl_divergence"] {
        assert_eq!(number(&same[name]), 0.0, "{name}");
    }
    assert_eq!(same["same_top"], 1.0);
    for block in same["blocks"].as_array().unwrap() {
        for name in ["kl_divergence", "stream_error", "block_error"] {
            assert_eq!(number(&block[name]), 0.0, "{name}");
        }
    }
}

#[test]
fn models_that_cannot_be_compared() {
    let scratch = Scratch::new("compare-refused");
    let text = words(&scratch);
    let (empty, one) = (scratch.file("empty", b""), scratch.file("one", b"a"));
    let other_words = scratch.model("vocabulary", "tokenizer.json", |old| {
        let swapped = String::from_utf8(old).unwrap();
        let swapped = swapped
            .replace("\"e\":", "\"swap\":")
            .replace("\"o\":", "\"e\":");
        swapped.replace("\"swap\":", "\"o\":").into_bytes()
    });
    let golden = |name: &str| format!("tests/golden/model/{name}");
    let other = golden("qwen2_tied");
    for (args, needle) in [
        (
            &[MODEL, &*other, "--text", &text][..],
            "the models differ in vocabulary size: 320 and 150",
        ),
        (
            &[
                &golden("gemma3_wide"),
                &golden("gemma3_narrow"),
                "--text",
                &text,
            ],
            "block 0 of the models differ in query heads: 2 and 4",
        ),
        (
            &[MODEL, &other_words, "--text", &text],
            "the models have different vocabularies: token",
        ),
        (&[MODEL, MODEL, "--text", &empty], "0 tokens; at least 2"),
        (&[MODEL, MODEL, "--text", &one], "1 tokens; at least 2"),
        (
            &[MODEL, MODEL, "--text", &text, "--window", "1"],
            "--window must be at least 2, got 1",
        ),
        (
            &[MODEL, MODEL, "--text", &text, "--window", "0"],
            "--window must be at least 2, got 0",
        ),
        (
            &[MODEL, MODEL, "--text", &text, "--window", "257"],
            "--window 257 is beyond the models' context; they were made for 256 and 256 positions",
        ),
        (
            &[MODEL, MODEL, "--text", &text, "--windows", "0"],
            "--windows must be at least 1",
        ),
        (&[MODEL, "/no/such", "--text", &text], "/no/such"),
        (
            &[MODEL, MODEL, "--text", &text, "--device", "tpu"],
            "'tpu' is not known",
        ),
    ] {
        let said = failure(&[&["compare"][..], args].concat());
        assert!(said.contains(needle), "{args:?}: {said}");
    }
    for args in [&["compare", MODEL][..], &["compare", MODEL, MODEL]] {
        assert_eq!(nvfp4(args).status.code(), Some(2), "{args:?}");
    }
}
