//! Tokenizers, templates and the detokenizer against golden data made by the Python packages `tokenizers` and
//! `transformers` (`tests/golden/text/make.py`).

#[path = "text/answers.rs"]
mod answers;
mod common;
#[path = "text/prompt.rs"]
mod prompt;
#[path = "text/special.rs"]
mod special;
#[path = "text/turn_ends.rs"]
mod turn_ends;

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use NVFP4::base::ErrorKind;
use NVFP4::base::files::Files;
use NVFP4::text::{
    ChatTemplate, Content, Detokenizer, Message, Prompt, Tokenizer, VocabularySpec,
    messages_from_json, messages_to_json, read_files, tools_from_json, variables_from_json,
};
use common::expect_kind;
use serde_json::Value;
use sha2::{Digest, Sha256};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden/text")
        .join(name)
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden(name)).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_u64().unwrap() as u32)
        .collect()
}

fn samples(encodings: &Value) -> Vec<String> {
    encodings["samples"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| s.as_str().unwrap().to_owned())
        .collect()
}

fn check_encodings(tokenizer: &Tokenizer, encodings: &Value, key: &str) {
    for (i, sample) in samples(encodings).iter().enumerate() {
        assert_eq!(
            tokenizer.encode(sample, false).unwrap(),
            ids(&encodings[key][i]),
            "{key}: {sample:?}"
        );
    }
}

/// The vocabulary of tokenizer.json as a GGUF file would hold it.
fn vocabulary(pre: &str) -> VocabularySpec {
    let file = json("tokenizer.json");
    let mut tokens: Vec<(u64, String)> = file["model"]["vocab"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(t, id)| (id.as_u64().unwrap(), t.clone()))
        .collect();
    let mut types = vec![1; tokens.len()];
    for added in file["added_tokens"].as_array().unwrap() {
        tokens.push((
            added["id"].as_u64().unwrap(),
            added["content"].as_str().unwrap().to_owned(),
        ));
        types.push(if added["special"].as_bool().unwrap() {
            3
        } else {
            4
        });
    }
    tokens.sort();
    assert!(
        tokens
            .iter()
            .enumerate()
            .all(|(i, (id, _))| i as u64 == *id)
    );
    let merges = file["model"]["merges"].as_array().unwrap();
    VocabularySpec {
        model: "gpt2".into(),
        pre: pre.into(),
        tokens: tokens.into_iter().map(|(_, t)| t).collect(),
        token_types: types,
        merges: merges
            .iter()
            .map(|m| format!("{} {}", m[0].as_str().unwrap(), m[1].as_str().unwrap()))
            .collect(),
        ..VocabularySpec::default()
    }
}

fn sentencepiece() -> VocabularySpec {
    let file = json("spm.json");
    let list = |key: &str| file[key].as_array().unwrap().clone();
    VocabularySpec {
        model: "llama".into(),
        tokens: list("tokens")
            .iter()
            .map(|t| t.as_str().unwrap().to_owned())
            .collect(),
        token_types: list("types")
            .iter()
            .map(|t| t.as_i64().unwrap() as i32)
            .collect(),
        scores: list("scores")
            .iter()
            .map(|t| t.as_f64().unwrap() as f32)
            .collect(),
        unknown: Some(0),
        bos: Some(1),
        eos: Some(2),
        ..VocabularySpec::default()
    }
}

#[test]
fn tokenizer_json_agrees_with_python() {
    let encodings = json("encodings.json");
    let tokenizer = Tokenizer::from_file(&golden("tokenizer.json")).unwrap();
    assert_eq!(tokenizer.vocab_size(), 620);
    check_encodings(&tokenizer, &encodings, "tokenizer.json");
    for (i, sample) in samples(&encodings).iter().enumerate() {
        let tokens = ids(&encodings["tokenizer.json"][i]);
        assert_eq!(
            tokenizer.decode(&tokens, true).unwrap(),
            encodings["decoded"][i].as_str().unwrap(),
            "{sample:?}"
        );
    }
}

#[test]
fn vocabularies_agree_with_python_under_every_rule() {
    let encodings = json("encodings.json");
    for pre in ["default", "gpt-2", "smollm", "llama-bpe", "qwen2"] {
        let tokenizer = Tokenizer::from_vocabulary(&vocabulary(pre)).unwrap();
        assert_eq!(tokenizer.vocab_size(), 620);
        check_encodings(&tokenizer, &encodings, pre);
    }
    // The rules must differ on the samples, or the comparison above says nothing about which was used.
    for (a, b) in [
        ("default", "gpt-2"),
        ("gpt-2", "smollm"),
        ("smollm", "llama-bpe"),
        ("llama-bpe", "qwen2"),
    ] {
        assert!(encodings[a] != encodings[b], "{a} and {b}");
    }
}

#[test]
fn sentencepiece_vocabulary_agrees_with_python() {
    let encodings = json("encodings.json");
    let tokenizer = Tokenizer::from_vocabulary(&sentencepiece()).unwrap();
    check_encodings(&tokenizer, &encodings, "spm");
    let same = Tokenizer::from_json(json("spm.json")["json"].as_str().unwrap().as_bytes()).unwrap();
    check_encodings(&same, &encodings, "spm");
    for i in 0..samples(&encodings).len() {
        let tokens = ids(&encodings["spm"][i]);
        let expected = encodings["spm_decoded"][i].as_str().unwrap();
        assert_eq!(tokenizer.decode(&tokens, true).unwrap(), expected);
        assert_eq!(same.decode(&tokens, true).unwrap(), expected);
    }
    let with_bos = tokenizer.encode("hello", true).unwrap();
    assert_eq!(with_bos[0], 1);
    assert_eq!(with_bos[1..], tokenizer.encode("hello", false).unwrap());
}

/// The vocabulary of `sentencepiece` with merges in place of scores, as GGUF files of Gemma 4 have it.
fn gemma4() -> VocabularySpec {
    let file = json("spm.json");
    let saved: Value = serde_json::from_str(file["json"].as_str().unwrap()).unwrap();
    let merges = saved["model"]["merges"].as_array().unwrap();
    let merge = |m: &Value| format!("{} {}", m[0].as_str().unwrap(), m[1].as_str().unwrap());
    VocabularySpec {
        model: "gemma4".into(),
        merges: merges.iter().map(merge).collect(),
        scores: Vec::new(),
        ..sentencepiece()
    }
}

#[test]
fn a_vocabulary_of_gemma4_joins_by_its_merges() {
    let mut spec = gemma4();
    // No space is prepended unless the file says so.
    let bare = Tokenizer::from_vocabulary(&spec).unwrap();
    let tokens = bare.encode("hello", true).unwrap();
    assert_eq!(
        (tokens[0], &*bare.decode(&tokens, true).unwrap()),
        (1, "hello")
    );
    spec.add_space_prefix = Some(true);
    let encodings = json("encodings.json");
    check_encodings(
        &Tokenizer::from_vocabulary(&spec).unwrap(),
        &encodings,
        "spm",
    );
    // In another order, merges make other tokens.
    spec.merges.reverse();
    let reversed = Tokenizer::from_vocabulary(&spec).unwrap();
    let mut samples = samples(&encodings).into_iter().enumerate();
    assert!(samples.any(|(i, sample)| {
        reversed.encode(&sample, false).unwrap() != ids(&encodings["spm"][i])
    }));
    spec.merges.clear();
    let e = Tokenizer::from_vocabulary(&spec).unwrap_err();
    assert!(
        e.message().contains("a gemma4 vocabulary needs merges"),
        "{e}"
    );
}

#[test]
fn a_vocabulary_survives_as_tokenizer_json() {
    let encodings = json("encodings.json");
    let mut llama = vocabulary("llama-bpe");
    llama.bos = llama
        .tokens
        .iter()
        .position(|t| t == "<|im_start|>")
        .map(|i| i as u32);
    llama.eos = llama
        .tokens
        .iter()
        .position(|t| t == "<|im_end|>")
        .map(|i| i as u32);
    llama.add_eos = Some(true);
    for spec in [llama, vocabulary("qwen2"), sentencepiece(), gemma4()] {
        let first = Tokenizer::from_vocabulary(&spec).unwrap();
        let again = Tokenizer::from_json(first.to_json().unwrap().as_bytes()).unwrap();
        assert_eq!(first.vocab_size(), again.vocab_size());
        for sample in samples(&encodings) {
            for special in [false, true] {
                let tokens = first.encode(&sample, special).unwrap();
                assert_eq!(
                    again.encode(&sample, special).unwrap(),
                    tokens,
                    "{sample:?}"
                );
                let text = first.decode(&tokens, true).unwrap();
                assert_eq!(again.decode(&tokens, true).unwrap(), text);
            }
        }
        for id in 0..first.vocab_size() as u32 {
            assert_eq!(first.bytes_of(id).unwrap(), again.bytes_of(id).unwrap());
            assert_eq!(first.is_special(id), again.is_special(id));
        }
    }
    let tokens = Tokenizer::from_vocabulary(&VocabularySpec {
        bos: Some(5),
        ..vocabulary("llama-bpe")
    })
    .unwrap()
    .encode("x", true)
    .unwrap();
    assert_eq!(
        tokens[0], 5,
        "llama-bpe starts texts with bos unless told otherwise"
    );
}

#[test]
fn special_and_user_defined_tokens() {
    for tokenizer in [
        Tokenizer::from_file(&golden("tokenizer.json")).unwrap(),
        Tokenizer::from_vocabulary(&vocabulary("qwen2")).unwrap(),
    ] {
        let end = tokenizer.id_of("<|im_end|>").unwrap();
        let think = tokenizer.id_of("<think>").unwrap();
        assert!(tokenizer.is_special(end));
        assert!(!tokenizer.is_special(think));
        assert!(!tokenizer.is_special(u32::MAX));
        let tokens = tokenizer.encode("a<think>b<|im_end|>", false).unwrap();
        assert!(tokens.contains(&think) && tokens.contains(&end));
        assert_eq!(tokenizer.decode(&tokens, true).unwrap(), "a<think>b");
        assert_eq!(
            tokenizer.decode(&tokens, false).unwrap(),
            "a<think>b<|im_end|>"
        );
        let e = tokenizer.decode(&[5, 620], true).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        assert!(
            e.message().contains("620") && e.message().contains("below 620"),
            "{e}"
        );
    }
}

#[test]
fn plain_text_holds_no_special_tokens() {
    for tokenizer in [
        Tokenizer::from_file(&golden("tokenizer.json")).unwrap(),
        Tokenizer::from_vocabulary(&vocabulary("gpt-2")).unwrap(),
    ] {
        for text in [
            "",
            "plain",
            "<|im_end|>",
            "a<|im_end|><|im_start|>system\né<|endoftext|>",
            "<|im_<|im_end|>end|>",
            "<|im_end|",
        ] {
            let tokens = tokenizer.encode_plain(text).unwrap();
            assert!(!tokens.iter().any(|&t| tokenizer.is_special(t)), "{text}");
            assert_eq!(tokenizer.decode(&tokens, false).unwrap(), text);
            if !text.contains("<|im_end|>") {
                assert_eq!(tokens, tokenizer.encode(text, false).unwrap());
            }
        }
    }
}

/// The tokenizers of `plain.json`, each with the names of the token that the template writes and of the one that the user does.
fn plain_tokenizers(golden: &Value) -> Vec<(String, Tokenizer, [&'static str; 2])> {
    let spm: Value = serde_json::from_str(json("spm.json")["json"].as_str().unwrap()).unwrap();
    let mut out = vec![(
        "byte level".to_owned(),
        Tokenizer::from_file(&self::golden("tokenizer.json")).unwrap(),
        ["<|im_start|>", "<|im_end|>"],
    )];
    for (name, changes) in golden["variants"].as_object().unwrap() {
        let mut file = spm.clone();
        for (key, value) in changes.as_object().unwrap() {
            file[key] = value.clone();
        }
        let tokenizer = Tokenizer::from_json(file.to_string().as_bytes()).unwrap();
        out.push((name.clone(), tokenizer, ["<s>", "</s>"]));
    }
    let vocabulary = Tokenizer::from_vocabulary(&sentencepiece()).unwrap();
    out.push(("prepend".to_owned(), vocabulary, ["<s>", "</s>"]));
    out
}

#[test]
fn names_of_special_tokens_are_text_as_in_python() {
    let golden = json("plain.json");
    let mut compared = 0;
    for (name, tokenizer, [known, named]) in plain_tokenizers(&golden) {
        for case in golden["cases"].as_array().unwrap() {
            let [before, user, after] = [0, 1, 2].map(|i| {
                let part = case["parts"][i].as_str().unwrap();
                part.replace("KNOWN", known).replace("NAMED", named)
            });
            let want = ids(&case["ids"][&name]);
            let tokens = tokenizer.encode_around(&before, &user, &after).unwrap();
            assert_eq!(tokens, want, "{name}: {before:?} {user:?} {after:?}");
            if before.is_empty() && after.is_empty() {
                assert_eq!(
                    tokenizer.encode_plain(&user).unwrap(),
                    want,
                    "{name}: {user:?}"
                );
            }
            compared += 1;
        }
    }
    assert_eq!(compared, 6 * 10);
}

#[test]
fn texts_without_names_of_special_tokens_are_encoded_as_ever() {
    for (name, tokenizer, [known, _]) in plain_tokenizers(&json("plain.json")) {
        for sample in samples(&json("encodings.json")) {
            if sample.contains(known) || tokenizer.names_special(&sample) {
                continue;
            }
            let plain = tokenizer.encode_plain(&sample).unwrap();
            assert_eq!(
                plain,
                tokenizer.encode(&sample, false).unwrap(),
                "{name}: {sample:?}"
            );
            let (before, after) = (format!("a {known} b "), format!(" c{known}d"));
            let parts = tokenizer.encode_around(&before, &sample, &after).unwrap();
            let whole = tokenizer.encode(&[&*before, &sample, &after].concat(), false);
            assert_eq!(parts, whole.unwrap(), "{name}: {sample:?}");
        }
    }
}

/// The bytes of the tokens of any text are the text, with a space before each part between special tokens where a sentencepiece tokenizer
/// writes one.
#[test]
fn the_bytes_of_the_tokens_of_a_text_are_the_text() {
    let mut tokenizers = plain_tokenizers(&json("plain.json"));
    tokenizers.retain(|(name, ..)| name != "byte level");
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/model");
    let files = [
        golden("tokenizer.json"),
        models.join("qwen3_tied/tokenizer.json"),
    ]
    .map(|path| {
        let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        // Composed characters are other text.
        file["normalizer"] = Value::Null;
        let tokenizer = Tokenizer::from_json(file.to_string().as_bytes()).unwrap();
        (path.display().to_string(), tokenizer)
    });
    let byte_level = ["gpt-2", "smollm", "llama-bpe", "tekken", "gpt-4o"].map(|pre| {
        let tokenizer = Tokenizer::from_vocabulary(&vocabulary(pre)).unwrap();
        (pre.to_owned(), tokenizer)
    });
    for (name, tokenizer) in files.into_iter().chain(byte_level) {
        tokenizers.push((name, tokenizer, ["<|im_start|>", "<|im_end|>"]));
    }
    let has_spaces = |name: &str| ["prepend", "first", "always"].contains(&name);
    let (spaces, divided, special) = (Cell::new(0), Cell::new(0), Cell::new(0));
    let part = proptest::prop_oneof![
        ".{0,5}",
        "[ a-z\u{300}-\u{304}あ-ん\u{1f600}-\u{1f640}\n\0]{0,8}",
        proptest::strategy::Just("KNOWN".to_owned()),
        proptest::strategy::Just("<0x41>".to_owned()),
    ];
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let checked = runner.run(&proptest::collection::vec(part, 0..6), |parts| {
        for (name, tokenizer, [mark, _]) in &tokenizers {
            let parts = parts.iter().map(|part| match &**part {
                "KNOWN" => (*mark).to_owned(),
                // Sentencepiece writes spaces by this character, which therefore comes back as one.
                part => part.replace('\u{2581}', " "),
            });
            let text: String = parts.collect();
            let tokens = tokenizer.encode(&text, false).unwrap();
            let mut found = vec![Vec::new()];
            for &token in &tokens {
                let bytes = tokenizer.bytes_of(token).unwrap();
                if tokenizer.is_special(token) {
                    assert_eq!(bytes, mark.as_bytes(), "{name}: {text:?}");
                    special.set(special.get() + 1);
                    found.push(Vec::new());
                } else {
                    divided.set(divided.get() + u32::from(str::from_utf8(bytes).is_err()));
                    found.last_mut().unwrap().extend_from_slice(bytes);
                }
            }
            let wanted: Vec<&str> = text.split(mark).collect();
            assert_eq!(found.len(), wanted.len(), "{name}: {text:?}");
            for (found, wanted) in found.iter().zip(wanted) {
                let is_same = found == wanted.as_bytes();
                let is_after_space =
                    has_spaces(name) && found.strip_prefix(b" ") == Some(wanted.as_bytes());
                assert!(
                    is_same || is_after_space,
                    "{name}: {found:?} for {wanted:?} of {text:?}"
                );
                spaces.set(spaces.get() + u32::from(!is_same));
            }
        }
        Ok(())
    });
    checked.unwrap();
    let seen = [spaces, divided, special].map(|count| count.get());
    assert!(seen.iter().all(|&count| count > 100), "{seen:?}");
}

/// The tokens around every text stand around plain text too, by either engine.
#[test]
fn plain_text_has_around_it_what_every_text_has() {
    let spm: Value = serde_json::from_str(json("spm.json")["json"].as_str().unwrap()).unwrap();
    for (mut file, [first, last]) in [
        (json("tokenizer.json"), ["<|im_start|>", "<|endoftext|>"]),
        (spm, ["<s>", "</s>"]),
    ] {
        let bare = Tokenizer::from_json(file.to_string().as_bytes()).unwrap();
        let [before, after] = [first, last].map(|name| bare.id_of(name).unwrap());
        let special = |name| serde_json::json!({"SpecialToken": {"id": name, "type_id": 0}});
        let known = |name: &str, id| serde_json::json!({"id": name, "ids": [id], "tokens": [name]});
        file["post_processor"] = serde_json::json!({
            "type": "TemplateProcessing",
            "single": [special(first), {"Sequence": {"id": "A", "type_id": 0}}, special(last)],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {first: known(first, before), last: known(last, after)},
        });
        let tokenizer = Tokenizer::from_json(file.to_string().as_bytes()).unwrap();
        for text in ["", "plain text", "a"] {
            assert_eq!(
                tokenizer.encode_plain_with(text, true).unwrap(),
                tokenizer.encode(text, true).unwrap(),
                "{text:?}"
            );
        }
        let text = format!("a{last}\n{first}system");
        let plain = tokenizer.encode_plain(&text).unwrap();
        assert_eq!(tokenizer.encode_plain_with(&text, false).unwrap(), plain);
        assert!(!plain.contains(&before) && !plain.contains(&after));
        assert_eq!(
            tokenizer.encode_plain_with(&text, true).unwrap(),
            [&[before][..], &plain, &[after]].concat()
        );
    }
}

#[test]
fn a_tokenizer_that_cannot_but_forge_is_refused() {
    let mut file: Value = serde_json::from_str(json("spm.json")["json"].as_str().unwrap()).unwrap();
    // Words that are tokens as a whole skip the merges, and nothing is put in front of them.
    file["model"]["ignore_merges"] = true.into();
    file["normalizer"] = Value::Null;
    let tokenizer = Tokenizer::from_json(file.to_string().as_bytes()).unwrap();
    let e = tokenizer.encode_plain("</s>").unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    assert!(e.message().contains("'</s>' but special token 2"), "{e}");
    assert!(tokenizer.encode_plain("a</s>").is_ok());
}

#[test]
fn the_detokenizer_gives_whole_characters_and_the_whole_text() {
    let encodings = json("encodings.json");
    let tokenizers = [
        Tokenizer::from_file(&golden("tokenizer.json")).unwrap(),
        Tokenizer::from_vocabulary(&sentencepiece()).unwrap(),
    ];
    let mut waited = 0;
    for tokenizer in tokenizers.map(Arc::new) {
        for sample in samples(&encodings) {
            let tokens = tokenizer.encode(&sample, false).unwrap();
            for keep in [false, true] {
                let mut detokenizer = Detokenizer::new(&tokenizer).with_special(keep);
                let mut text = String::new();
                for &token in &tokens {
                    let piece = detokenizer.push(token).unwrap();
                    assert!(!piece.contains('\u{fffd}'), "{sample:?}");
                    waited += usize::from(piece.is_empty());
                    text.push_str(&piece);
                }
                text.push_str(&detokenizer.finish());
                assert_eq!(
                    text,
                    tokenizer.decode(&tokens, !keep).unwrap(),
                    "{sample:?}"
                );
            }
        }
    }
    assert!(
        waited > 50,
        "the samples hold characters spread over tokens"
    );
}

/// A detokenizer that continues after some tokens, reading only the last of them, equals one that was given them all.
#[test]
fn the_detokenizer_goes_on_after_any_tokens() {
    let spm = Arc::new(Tokenizer::from_vocabulary(&sentencepiece()).unwrap());
    let byte = |b: u8| spm.id_of(&format!("<0x{b:02X}>")).unwrap();
    // Bytes of characters of all lengths, spaces, text, special tokens, and an id without text.
    let mut choices: Vec<u32> = [
        0xc3, 0xa9, 0xe6, 0x9d, 0xb1, 0xf0, 0x9f, 0x98, 0x80, 0xff, b' ', b'x',
    ]
    .map(byte)
    .to_vec();
    choices.extend([1, 2, 1_000_000]);
    choices.extend(spm.encode("the", false).unwrap());
    let mut state = 7u64;
    let mut begun = 0;
    for _ in 0..4000 {
        let mut next = |n: usize| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) as usize % n
        };
        let length = next(12);
        let before: Vec<u32> = (0..length).map(|_| choices[next(choices.len())]).collect();
        let keep = next(2) == 0;
        let new = || Detokenizer::new(&spm).with_special(keep);
        let mut whole = new();
        for &token in &before {
            let _ = whole.push(token);
        }
        let mut after = new().after(&before);
        for continued in [0x9f, 0x98, 0x80, b' ', b'y'].map(byte) {
            let text = after.push(continued).unwrap();
            assert_eq!(text, whole.push(continued).unwrap(), "{before:?}");
            begun +=
                usize::from(!text.is_empty() && !text.contains('\u{fffd}') && !text.is_ascii());
        }
        assert_eq!(after.finish(), whole.finish());
    }
    assert!(begun > 20, "{begun}");
}

#[test]
fn broken_bytes_become_replacement_characters_only_when_proven() {
    let tokenizer = Arc::new(Tokenizer::from_vocabulary(&sentencepiece()).unwrap());
    let byte = |b: u8| tokenizer.id_of(&format!("<0x{b:02X}>")).unwrap();
    let mut d = Detokenizer::new(&tokenizer);
    // The first two bytes of a three-byte character may still become one.
    assert_eq!(d.push(byte(0xe6)).unwrap(), "");
    assert_eq!(d.push(byte(0x9d)).unwrap(), "");
    assert_eq!(d.push(byte(b'x')).unwrap(), "\u{fffd}x");
    // A continuation byte with nothing before it cannot.
    assert_eq!(d.push(byte(0x80)).unwrap(), "\u{fffd}");
    for b in [0xf0, 0x9f, 0x98] {
        assert_eq!(d.push(byte(b)).unwrap(), "");
    }
    assert_eq!(d.push(byte(0x80)).unwrap(), "😀");
    assert_eq!(d.push(byte(0xf0)).unwrap(), "");
    assert_eq!(d.finish(), "\u{fffd}");
    assert_eq!(d.finish(), "");
    expect_kind(
        d.push(1_000_000),
        ErrorKind::InvalidArgument,
        "token id 1000000",
    );
}

#[test]
fn templates_agree_with_transformers() {
    let golden = json("templates.json");
    let mut compared = 0;
    for case in golden["rendered"].as_array().unwrap() {
        let name = case["template"].as_str().unwrap();
        let template = ChatTemplate::from_jinja(
            golden["templates"][name].as_str().unwrap(),
            Some("<|im_start|>"),
            Some("<|im_end|>"),
        )
        .unwrap();
        let messages = messages_from_json(&case["messages"].to_string()).unwrap();
        let text = template
            .render_with(
                &messages,
                case["prompt"].as_bool().unwrap(),
                case["extra"].as_object().unwrap(),
            )
            .unwrap();
        assert_eq!(text, case["text"].as_str().unwrap(), "{name}: {messages:?}");
        compared += 1;
    }
    assert!(compared >= 40);
}

/// `text` as tests/golden/text/chat.py describes it.
fn described(text: &str) -> String {
    let digest = Sha256::digest(text.as_bytes());
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}:{hex}", text.len())
}

/// The folder that tests/templates/fetch.sh fills, if it has.
fn published() -> Option<PathBuf> {
    let folder = std::env::var_os("NVFP4_TEMPLATES").map(PathBuf::from)?;
    assert!(folder.join("sources.done").exists(), "{folder:?}");
    Some(folder)
}

/// The template `source`, with the fixed date that the golden prompts have.
fn with_fixed_date(golden: &Value, source: &str, bos: &Value, eos: &Value) -> ChatTemplate {
    let date = match source.contains("strftime_now") {
        true => golden["date"].as_str().unwrap(),
        false => "",
    };
    ChatTemplate::from_jinja(&format!("{date}{source}"), bos.as_str(), eos.as_str()).unwrap()
}

/// The template `name` of `folder`, which is the one that the golden prompts were made with.
fn published_template(folder: &Path, golden: &Value, name: &str) -> String {
    let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
    let sum = &golden["templates"][name]["sha256"];
    assert!(
        described(&source).ends_with(sum.as_str().unwrap()),
        "{name}"
    );
    source
}

/// The differences between `template`'s prompts for the cases of chat.json and the golden ones. `described` converts a case's prompt to the
/// form in the golden file.
fn wrong_prompts(
    golden: &Value,
    template: &ChatTemplate,
    expected: &Value,
    described: impl Fn(&Value, &str) -> String,
) -> Vec<String> {
    let cases = golden["cases"].as_array().unwrap();
    let expected = expected.as_array().unwrap();
    assert_eq!(cases.len(), expected.len());
    let wrong = cases.iter().zip(expected).filter_map(|(case, expected)| {
        let expected = expected.as_str().unwrap();
        let conversation = &golden["conversations"][case["conversation"].as_str().unwrap()];
        let messages = messages_from_json(&conversation.to_string()).unwrap();
        let prompt = case["prompt"].as_bool().unwrap();
        let variables = case["variables"].as_object().unwrap();
        let result = template.render_with(&messages, prompt, variables);
        let agrees = match (&result, expected.strip_prefix("raises ")) {
            // Python's Jinja may fail on templates that work here.
            _ if expected == "fails" => true,
            (Err(e), Some(words)) => {
                let words: Vec<_> = words.split_whitespace().collect();
                e.kind() == ErrorKind::InvalidArgument && e.message().contains(&words.join(" "))
            }
            (Err(e), None) => expected == "unsupported" && e.kind() == ErrorKind::Unsupported,
            (Ok(text), _) => described(case, text) == expected,
        };
        let variables = variables.keys();
        (!agrees).then(|| {
            let case = format!("{} {prompt} {variables:?}", case["conversation"]);
            format!("{case}: {result:?}, not {expected}")
        })
    });
    wrong.collect()
}

/// The differences between the variables that `template` reads and the golden ones.
fn wrong_variables(template: &ChatTemplate, expected: &Value) -> Vec<String> {
    let names =
        |key: &str| -> Vec<String> { serde_json::from_value(expected[key].clone()).unwrap() };
    // Python's Jinja does not distinguish a variable that another branch sets from one that is never set.
    let (surely, perhaps) = (names("reads"), names("may read"));
    let asked = ["tools", "documents", "enable_thinking", "xyz"].map(str::to_owned);
    let wrong = surely.iter().chain(&asked).filter(|name| {
        let read = surely.contains(name) || perhaps.contains(name);
        template.reads(name) != read
    });
    wrong.map(|name| format!("reads {name}")).collect()
}

#[test]
fn own_templates_agree_with_transformers() {
    let golden = json("chat.json");
    for (name, expected) in golden["own"].as_object().unwrap() {
        let source = expected["source"].as_str().unwrap();
        let template = with_fixed_date(&golden, source, &golden["bos"], &golden["eos"]);
        let mut wrong = wrong_prompts(&golden, &template, &expected["results"], |_, text| {
            described(text)
        });
        wrong.extend(wrong_variables(&template, expected));
        assert!(wrong.is_empty(), "{name}:\n{}", wrong.join("\n"));
    }
}

/// Templates whose prompts with tools differ from transformers', because Python is odd: a dict's key `items` is shadowed by the method of
/// that name, and text marked `safe` escapes what is added to it as HTML.
const ODD: [&str; 2] = [
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "meetkai-functionary-medium-v3.1",
];

#[test]
fn published_templates_agree_with_transformers() {
    let Some(folder) = published() else {
        println!("SKIPPED: NVFP4_TEMPLATES names no folder of templates");
        return;
    };
    let golden = json("chat.json");
    let mut wrong = Vec::new();
    for (name, expected) in golden["templates"].as_object().unwrap() {
        let source = published_template(&folder, &golden, name);
        let template = with_fixed_date(&golden, &source, &golden["bos"], &golden["eos"]);
        let mut found = wrong_prompts(&golden, &template, &expected["results"], |_, text| {
            described(text)
        });
        if ODD.contains(&name.as_str()) {
            found.retain(|what| !what.contains("[\"tools\""));
        }
        found.extend(wrong_variables(&template, expected));
        wrong.extend(found.iter().map(|what| format!("{name}: {what}")));
    }
    assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn published_tokenizers_agree_with_transformers() {
    let Some(folder) = published() else {
        println!("SKIPPED: NVFP4_TEMPLATES names no folder of templates");
        return;
    };
    let golden = json("chat.json");
    let mut wrong = Vec::new();
    for (model, expected) in golden["tokenized"].as_object().unwrap() {
        let tokenizer = Tokenizer::from_file(&folder.join(model).join("tokenizer.json")).unwrap();
        for (name, results) in expected["results"].as_object().unwrap() {
            let source = published_template(&folder, &golden, name);
            let template = with_fixed_date(&golden, &source, &expected["bos"], &expected["eos"]);
            // Parts that `plain` names in the golden file are the text of messages that spell out special tokens.
            let tokens = |case: &Value, text: &str| {
                let conversation = &golden["conversations"][case["conversation"].as_str().unwrap()];
                let messages = messages_from_json(&conversation.to_string()).unwrap();
                let variables = case["variables"].as_object().unwrap();
                let prompt = case["prompt"].as_bool().unwrap();
                let prompt = Prompt::new(&template, &tokenizer, &messages, prompt, variables);
                let prompt = prompt.unwrap();
                assert_eq!(prompt.text(), text);
                let ids = prompt.tokens(&tokenizer, false).unwrap();
                described(&ids.iter().map(u32::to_string).collect::<Vec<_>>().join(","))
            };
            let found = wrong_prompts(&golden, &template, results, tokens);
            wrong.extend(found.iter().map(|what| format!("{model}, {name}: {what}")));
        }
    }
    assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn messages_are_read_and_written() {
    let text = r#"[
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": null},
        {"role": "user", "content": "x", "name": "Ann"},
        {"role": "assistant", "reasoning": "why", "refusal": null, "annotations": [], "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"b\": 1.0, \"a\": [\"é\"]}"}},
            {"name": "g", "arguments": {}}, {"function": {"name": "h", "arguments": ""}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
        {"role": "assistant", "content": null, "reasoning_content": "hm", "reasoning": "hm"}]"#;
    let messages = messages_from_json(text).unwrap();
    assert_eq!(
        messages[0].content,
        Content::Parts(vec!["a".into(), "b".into()])
    );
    assert_eq!(messages[0].text(), "a\nb");
    assert_eq!(messages[1].name.as_deref(), Some("Ann"));
    let assistant = &messages[2];
    assert_eq!(assistant.content, Content::None);
    assert_eq!(assistant.reasoning_content.as_deref(), Some("why"));
    let names: Vec<_> = assistant.tool_calls.iter().map(|c| &c.name[..]).collect();
    assert_eq!(names, ["f", "g", "h"]);
    assert_eq!(assistant.tool_calls[0].arguments["a"][0], "é");

    let written = messages_to_json(&messages);
    assert_eq!(messages_from_json(&written.to_string()).unwrap(), messages);
    assert_eq!(
        written[2].to_string(),
        r#"{"role":"assistant","content":null,"reasoning_content":"why","tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"b\":1.0,\"a\":[\"é\"]}"}},{"type":"function","function":{"name":"g","arguments":"{}"}},{"type":"function","function":{"name":"h","arguments":"{}"}}]}"#
    );
    assert_eq!(
        messages_to_json(&[Message::new("user", "Hi")]).to_string(),
        r#"[{"role":"user","content":"Hi"}]"#
    );
}

#[test]
fn wrong_messages_are_named() {
    let call = r#"{"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": ARGUMENTS}}]}"#;
    let called = call.replace("ARGUMENTS", "{}");
    let answer = |rest: &str| format!(r#"{called}, {{"role": "tool", "content": "r"{rest}}}"#);
    for (messages, words) in [
        ("{", "messages are not JSON: EOF while parsing"),
        ("[\n {]", "at line 2 column 3"),
        ("{}", "messages are not an array"),
        ("1", "message 0: is a number, not an object"),
        ("{}", "message 0: has no role; it is one of system"),
        (r#"{"role": 1}"#, "message 0: role is a number"),
        (
            r#"{"role": "user", "content": "x"}, {"role": "bot"}"#,
            "message 1: role 'bot' is not known; it is one of system, developer, user, assistant, tool",
        ),
        (
            r#"{"role": "function"}"#,
            "A function's result is a 'tool' message",
        ),
        (r#"{"role": "user"}"#, "message 0: has no content"),
        (
            r#"{"role": "assistant", "content": null}"#,
            "has no content; only an assistant's",
        ),
        (
            r#"{"role": "user", "content": 1}"#,
            "content is a number, not a text or an array of parts",
        ),
        (
            r#"{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}"#,
            "message 0: content part 1: is of type 'image_url', and this library runs text models",
        ),
        (
            r#"{"role": "user", "content": [{"text": "x"}]}"#,
            "content part 0: has no type",
        ),
        (
            r#"{"role": "user", "content": [{"type": "text"}]}"#,
            "content part 0: has no text",
        ),
        (
            r#"{"role": "user", "content": "x", "colour": 1}"#,
            "key 'colour' is not known",
        ),
        (
            r#"{"role": "user", "content": "x", "reasoning": "y"}"#,
            "which only an assistant's may have",
        ),
        (
            r#"{"role": "assistant", "content": "x", "reasoning": "y", "reasoning_content": "z"}"#,
            "are different texts",
        ),
        (
            r#"{"role": "user", "content": "x", "tool_call_id": "y"}"#,
            "which only a tool's may have",
        ),
        (
            r#"{"role": "assistant", "tool_calls": {}}"#,
            "tool_calls is an object, not an array",
        ),
        (
            r#"{"role": "assistant", "tool_calls": [{"type": "x"}]}"#,
            "tool call 0: is of type 'x'",
        ),
        (
            r#"{"role": "assistant", "tool_calls": [{}]}"#,
            "tool call 0: has no name",
        ),
        (
            r#"{"role": "assistant", "tool_calls": [{"name": "f"}]}"#,
            "the arguments for 'f' are missing",
        ),
        (
            &call.replace("ARGUMENTS", "3"),
            "the arguments for 'f' are a number",
        ),
        (
            &call.replace("ARGUMENTS", r#""{\"a\"""#),
            "message 0: tool call 0: the arguments for 'f' are no JSON object: EOF while parsing an object at line 1",
        ),
        (
            &call.replace("ARGUMENTS", r#""[]""#),
            "the arguments for 'f' are no JSON object",
        ),
        (
            r#"{"role": "tool", "content": "r", "tool_call_id": "c1"}"#,
            "message 0: a tool's result for the call 'c1' follows no assistant message",
        ),
        (
            &answer(r#", "tool_call_id": "c2""#),
            "message 1: tool_call_id 'c2' is not that of an earlier call; there are 'c1'",
        ),
    ] {
        let whole = match words.starts_with("messages") || words.starts_with("at line") {
            true => messages.to_owned(),
            false => format!("[{messages}]"),
        };
        expect_kind(
            messages_from_json(&whole),
            ErrorKind::InvalidArgument,
            words,
        );
    }
    assert!(messages_from_json(&format!("[{}]", answer(""))).is_ok());
}

#[test]
fn tools_and_variables() {
    let tools = tools_from_json(
        r#"[{"name": "f", "parameters": {}}, {"type": "function", "function": {"name": "g"}, "strict": true}]"#,
    );
    let wanted = serde_json::json!([
        {"type": "function", "function": {"name": "f", "parameters": {}}},
        {"type": "function", "function": {"name": "g"}, "strict": true}
    ]);
    assert_eq!(Value::from(tools.unwrap()), wanted);
    for (tools, words) in [
        ("{}", "tools are not an array"),
        ("[1]", "tool 0: is a number"),
        ("[{}]", "tool 0: has no name"),
        (r#"[{"function": 1}]"#, "tool 0: function: is a number"),
        (r#"[{"name": ""}]"#, "tool 0: its name is"),
        (
            r#"[{"type": "web_search"}]"#,
            "tool 0: is of type 'web_search'",
        ),
    ] {
        expect_kind(tools_from_json(tools), ErrorKind::InvalidArgument, words);
    }

    let variables = variables_from_json(r#"{"enable_thinking": false, "colour": "red"}"#).unwrap();
    let template =
        "{% set enable_thinking = enable_thinking or 1 %}{% set colour = 2 %}{{ colour }}";
    let template = ChatTemplate::from_jinja(template, None, None).unwrap();
    assert_eq!(template.unread(&variables), ["colour"]);
    for (variables, words) in [
        ("[]", "template variables are an array"),
        (
            r#"{"tools": []}"#,
            "tools cannot be a template variable: tools are passed as tools",
        ),
        (
            r#"{"eos_token": ""}"#,
            "comes from the model's tokenizer_config.json",
        ),
    ] {
        expect_kind(
            variables_from_json(variables),
            ErrorKind::InvalidArgument,
            words,
        );
    }
}

#[test]
fn unknown_and_damaged_vocabularies_are_named() {
    let error = |spec: &VocabularySpec| Tokenizer::from_vocabulary(spec).unwrap_err();
    let e = error(&vocabulary("no-such-rule"));
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    assert!(e.message().contains("'no-such-rule'") && e.message().contains("llama-bpe"));

    let mut spec = vocabulary("gpt-2");
    spec.model = "bert".into();
    let e = error(&spec);
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    assert!(e.message().contains("'bert'"));

    let mut spec = vocabulary("gpt-2");
    spec.merges[3] = "nope zilch".into();
    let e = error(&spec);
    assert_eq!(e.kind(), ErrorKind::CorruptFile);
    assert!(e.message().contains("merge 3"), "{e}");
    spec.merges[3] = "nospace".into();
    assert_eq!(error(&spec).kind(), ErrorKind::CorruptFile);
    spec.merges.clear();
    assert!(error(&spec).message().contains("needs merges"));

    let mut spec = vocabulary("gpt-2");
    spec.token_types.pop();
    assert!(error(&spec).message().contains("619 token types"));
    spec.tokens.clear();
    assert!(error(&spec).message().contains("no tokens"));

    let mut spec = vocabulary("gpt-2");
    spec.add_bos = Some(true);
    assert!(error(&spec).message().contains("names none"));
    spec.bos = Some(620);
    assert!(error(&spec).message().contains("620"));

    let mut spec = sentencepiece();
    spec.scores[7] = f32::NAN;
    assert!(error(&spec).message().contains("token 7"));
    spec.scores.clear();
    assert!(error(&spec).message().contains("needs scores"));
    let mut spec = sentencepiece();
    spec.unknown = Some(1 << 30);
    assert!(error(&spec).message().contains("unknown token"));
    let mut spec = sentencepiece();
    spec.tokens[10] = "<0xZZ>".into();
    assert!(error(&spec).message().contains("has 255"));
}

#[test]
fn broken_tokenizer_files_are_errors() {
    for bytes in [
        &b""[..],
        b"{",
        b"[]",
        b"{\"model\":{}}",
        b"\xff\xfe",
        b"null",
    ] {
        assert_eq!(
            Tokenizer::from_json(bytes).unwrap_err().kind(),
            ErrorKind::CorruptFile
        );
    }
    let missing = Tokenizer::from_file(&golden("none.json")).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
    assert!(missing.message().contains("none.json"));
    let mut file = json("tokenizer.json");
    file["decoder"] = serde_json::json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    let e = Tokenizer::from_json(file.to_string().as_bytes()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    assert!(e.message().contains("WordPiece"), "{e}");
}

/// Loads and uses a possible tokenizer: any error is fine, but no panic.
fn survives(what: &str, file: &[u8]) {
    let used = std::panic::catch_unwind(|| {
        let tokenizer = Tokenizer::from_json(file)?;
        let tokens = tokenizer.encode("Hello, <|im_start|>wörld 12\n", true)?;
        tokenizer.encode_plain("a<|im_end|> b")?;
        tokenizer.decode(&tokens, true)
    });
    match used {
        Ok(Ok(_)) => {}
        Ok(Err(e)) => assert!(!e.message().is_empty(), "{what}"),
        Err(_) => panic!("{what}: a panic gets out"),
    }
}

/// Every place in a JSON value, with the value there replaced or taken out.
fn damaged(value: &Value, each: &mut dyn FnMut(&str, &Value)) {
    fn places(value: &Value, at: &str, out: &mut Vec<String>) {
        out.push(at.to_owned());
        // A few of many tokens and merges stand for the rest.
        match value {
            Value::Object(map) => map.iter().take(12).for_each(|(key, value)| {
                let key = key.replace('~', "~0").replace('/', "~1");
                places(value, &format!("{at}/{key}"), out);
            }),
            Value::Array(items) => items.iter().take(4).enumerate().for_each(|(i, value)| {
                places(value, &format!("{at}/{i}"), out);
            }),
            _ => {}
        }
    }
    let mut all = Vec::new();
    places(value, "", &mut all);
    let others = serde_json::json!([
        null, true, -1, 0, 4_294_967_295u32, 1e300, "", "x", "[", [], ["a", "b"], {}, {"type": "Sequence"}
    ]);
    for place in &all {
        for other in others.as_array().unwrap() {
            let mut changed = value.clone();
            *changed.pointer_mut(place).unwrap() = other.clone();
            each(&format!("{place} is {other}"), &changed);
        }
        let (parent, key) = place.rsplit_once('/').unwrap_or_default();
        let mut changed = value.clone();
        if let Some(Value::Object(map)) = changed.pointer_mut(parent) {
            map.remove(&key.replace("~1", "/").replace("~0", "~"));
            each(&format!("no {place}"), &changed);
        }
    }
}

#[test]
fn damaged_tokenizer_files_are_survived() {
    let file = json("tokenizer.json");
    let text = file.to_string();
    // The crate panics at a decoder that breaks off.
    let decoder = text.find("\"decoder\"").unwrap();
    let e = Tokenizer::from_json(&text.as_bytes()[..decoder + 20]).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::CorruptFile);
    assert!(e.message().contains("reading it ends with"), "{e}");
    for length in (0..text.len()).step_by(97).chain(decoder..decoder + 200) {
        survives(
            &format!("{length} bytes"),
            &text.as_bytes()[..length.min(text.len())],
        );
    }
    damaged(&file, &mut |what, changed| {
        survives(what, changed.to_string().as_bytes())
    });
}

#[test]
fn broken_templates_are_errors() {
    for source in [
        "{%}",
        "{% if messages %}{%}",
        "{%",
        "{% generation",
        "{%}%}",
        "{{}}",
    ] {
        expect_kind(
            ChatTemplate::from_jinja(source, None, None),
            ErrorKind::CorruptFile,
            "the chat template does not parse",
        );
    }
}

#[test]
fn what_templates_print_is_bounded() {
    let nested = "{% set ns = namespace(x=[]) %}{% for i in range(1000) %}{% set ns.x = [ns.x] %}{% endfor %}";
    for (end, words) in [
        ("{{ ns.x }}", "more than 256 deep"),
        ("{{ ns.x | string }}", "more than 256 deep"),
        ("{{ ns.x | tojson }}", "more than 256 deep"),
        ("{{ [1] | tojson(indent=70000) }}", "64 is the most"),
    ] {
        let template = ChatTemplate::from_jinja(&format!("{nested}{end}"), None, None).unwrap();
        let result = template.render(&[], true);
        expect_kind(result, ErrorKind::InvalidArgument, words);
    }
}

#[test]
fn templates_that_do_not_end_are_stopped() {
    let render = |source: &str| {
        let template = ChatTemplate::from_jinja(source, None, None).unwrap();
        template.render(&[Message::new("user", "x")], true)
    };
    let around = |body: &str| {
        let start = "{% for i in range(100000) %}{% for j in range(100000) %}";
        format!("{start}{body}{{% endfor %}}{{% endfor %}}")
    };
    for body in ["", "{% set x = i * j %}"] {
        expect_kind(
            render(&around(body)),
            ErrorKind::CorruptFile,
            "has not ended after 2002000 steps",
        );
    }
    let macros = "{% macro f(n) %}{% for i in range(9) %}{{ f(n + 1) if n < 12 }}{% endfor %}{% endmacro %}{{ f(0) }}";
    expect_kind(render(macros), ErrorKind::CorruptFile, "has not ended");
    expect_kind(
        render(&around("{{ 'a line' * 1000 }}")),
        ErrorKind::CorruptFile,
        "prints more than 67108864 bytes",
    );
    let deep = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
    expect_kind(render(deep), ErrorKind::InvalidArgument, "recursion");

    // A conversation of many long turns is far from all that.
    let template = ChatTemplate::chatml();
    let turns: Vec<Message> = (0..20_000)
        .map(|_| Message::new("user", "words ".repeat(100)))
        .collect();
    assert!(template.render(&turns, true).unwrap().len() > 12_000_000);
}

#[test]
fn templates_that_take_memory_without_end_are_stopped() {
    let doubled = |begin: &str, body: &str| {
        format!(
            "{{% set n = namespace(x={begin}) %}}{{% for i in range(45) %}}{{% set n.x = {body} %}}{{% endfor %}}{{{{ n.x | length }}}}"
        )
    };
    for source in [
        doubled("'a'", "n.x ~ n.x"),
        doubled("'a'", "n.x + n.x"),
        doubled("[1]", "n.x + n.x"),
        doubled("[1]", "(n.x + n.x) | list"),
        doubled("'a'", "n.x | replace('a', 'aaaa')"),
        doubled("'a'", "[n.x, n.x] | join(n.x)"),
    ] {
        let template = ChatTemplate::from_jinja(&source, None, None).unwrap();
        // It is not tried again: its thread stands still with its memory.
        for _ in 0..2 {
            expect_kind(
                template.render(&[Message::new("user", "x")], true),
                ErrorKind::CorruptFile,
                "more than 256 MB of memory",
            );
        }
    }
    let in_loops = |body: &str, end: &str| {
        format!(
            "{{% set ns = namespace(x=[]) %}}{{% for i in range(1000) %}}{{% for j in range(1000) %}}{body}{{% endfor %}}{{% endfor %}}{end}"
        )
    };
    let nested = "{% set ns.x = [ns.x] %}";
    for source in [
        in_loops(nested, ""),
        in_loops(nested, "{{ ns.x == [ns.x] }}"),
        in_loops("{% set ns.x = {'a': ns.x} %}", "{{ ns.x | pprint }}"),
        in_loops("{{ 'a' * 90000 }}", "").replace("{% for i", "{% filter upper %}{% for i")
            + "{% endfilter %}",
        "{% set x = [1] * 10000000000 %}{{ x | list | length }}".to_owned(),
        "{{ 'a\nb' | indent(9223372036854775807) }}".to_owned(),
        "{{ 'a\nb' | indent(1000000000) }}".to_owned(),
        "{% set x = range(100000) | slice(1000000000) | list %}".to_owned(),
        "{% set x = range(2) | batch(1000000000, 'fill') | list %}".to_owned(),
        "{% set x = range(100000) | join('b' * 1000000) %}".to_owned(),
        "{% set x = ('a' * 1000000).replace('a', 'b' * 1000000) %}".to_owned(),
        "{% set x = ('a' * 50000000) | list %}".to_owned(),
        "{{ 'a' * 10000000000 }}".to_owned(),
        "{{ '%1000000000d' | format(1) }}".to_owned(),
        "{{ '{:1000000000}'.format(1) }}".to_owned(),
        "{{ 'a'.center(1000000000) }}".to_owned(),
    ] {
        let template = ChatTemplate::from_jinja(&source, None, None).unwrap();
        let e = template
            .render(&[Message::new("user", "x")], true)
            .unwrap_err();
        assert!(!e.message().is_empty(), "{source}");
    }
}

#[test]
fn directories() {
    let directory = std::env::temp_dir().join(format!("nvfp4-text-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let write = |name: &str, text: &str| std::fs::write(directory.join(name), text).unwrap();
    let render = || {
        let files = read_files(&Files::Disk, &directory).unwrap();
        files
            .template
            .unwrap()
            .render(&[Message::new("user", "x")], false)
            .unwrap()
    };

    let nothing = read_files(&Files::Disk, &directory).unwrap();
    assert!(nothing.tokenizer.is_none() && nothing.template.is_none());

    std::fs::copy(golden("tokenizer.json"), directory.join("tokenizer.json")).unwrap();
    write(
        "tokenizer_config.json",
        r#"{"bos_token": null, "eos_token": {"content": "<|im_end|>"}, "chat_template":
            [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "list {{ eos_token }}"}]}"#,
    );
    let files = read_files(&Files::Disk, &directory).unwrap();
    assert!(files.tokenizer.is_some());
    assert_eq!(
        (files.bos, files.eos.as_deref()),
        (None, Some("<|im_end|>"))
    );
    assert_eq!(render(), "list <|im_end|>");

    write(
        "chat_template.json",
        r#"{"chat_template": "json {{ messages[0].content }}"}"#,
    );
    assert_eq!(render(), "json x");
    write("chat_template.jinja", "jinja {{ messages[0].role }}\n");
    assert_eq!(render(), "jinja user");

    write("chat_template.jinja", "{% if %}");
    let broken = read_files(&Files::Disk, &directory)
        .unwrap()
        .template
        .unwrap();
    let words = "the chat template does not parse";
    assert!(broken.fault().unwrap().message().contains(words));
    expect_kind(
        broken.render(&[Message::new("user", "x")], false),
        ErrorKind::CorruptFile,
        words,
    );
    write("chat_template.jinja", "fine");
    write("tokenizer_config.json", "{");
    let e = read_files(&Files::Disk, &directory).unwrap_err();
    assert!(e.message().contains("tokenizer_config.json"), "{e}");
    std::fs::remove_dir_all(&directory).unwrap();
}
