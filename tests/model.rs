//! Models against transformers, and the guarantees of the forward pass: the same bits however tokens are split over calls and sequences,
//! and errors that name what is wrong. Goldens and the script that made them are in `tests/golden/model`.

mod common;
#[path = "model/gguf_blocks.rs"]
mod gguf_blocks;
#[path = "model/given.rs"]
mod given;

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fs;
use std::ops::{ControlFlow, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use NVFP4::base::call::{Cancel, Progress, Watch};
use NVFP4::base::threads::Pool;
use NVFP4::base::{ErrorKind, Result};
use NVFP4::checkpoint::{Checkpoint, Encoding, Entry, Metadata, Part};
use NVFP4::engine::{NewTokens, Sequence, Served};
use NVFP4::format::nvfp4::{self, QuantizeOptions, Recipe};
use NVFP4::model::convert::{Container, ConvertOptions, ConvertProgress, Tables, convert};
use NVFP4::model::{
    self, Activations, Device, KvType, LoadOptions, Logits, Scratch, Wanted, footprint, tensors,
};
use NVFP4::ops::DeviceKind;
use common::{
    Copy, DEVICE_CASES, GEMMA4_CASES, LONG_CASES, MAMBA_CASES, RECURRENT_CASES, at_long_positions,
    change_tensor, check_memory_comes_back, cut, expect_kind, gguf, golden, load, load_gguf,
    options, ragged, some_tokens, step_logits,
};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

/// The bar of the parity tests, in f32 with a cache in f32: some hundred rounding errors of logits that reach 8.
const TOLERANCE: f32 = 2e-4;

/// More golden models, which the tests of whole models on a GPU leave out.
const PROCESSOR_CASES: [&str; 19] = [
    "qwen3moe_normalized",
    "qwen3moe_window",
    "qwen3moe_saved",
    "qwen2moe_window",
    "smolvlm_nested",
    "mistral3_nested",
    "gptoss_dense",
    "glm4_whole",
    "ministral3_tied",
    "ministral3_nested",
    "ministral_mixed",
    "mixtral_window",
    "hunyuan_biased",
    "granite_tied",
    "olmo2_tied",
    "smollm3_listed",
    "seedoss_others",
    "ernie45_plain",
    "minimaxm2_whole",
];

fn all_cases() -> impl Iterator<Item = &'static str> {
    let cases = DEVICE_CASES.into_iter().chain(PROCESSOR_CASES);
    let cases = cases.chain(RECURRENT_CASES).chain(MAMBA_CASES);
    cases.chain(GEMMA4_CASES)
}

fn cache(model: &Served) -> Sequence {
    cache_of(model, 128)
}

fn cache_of(model: &Served, capacity: usize) -> Sequence {
    model.sequence(capacity, KvType::F32).unwrap()
}

/// The logits asked for after running `tokens` on an empty cache.
fn run(model: &Served, tokens: &[u32], wanted: Logits) -> Vec<f32> {
    run_in(cache(model), model, tokens, wanted)
}

fn run_in(mut cache: Sequence, model: &Served, tokens: &[u32], wanted: Logits) -> Vec<f32> {
    let mut logits = Vec::new();
    model
        .forward(tokens, &mut cache, &mut Scratch::new(), wanted, &mut logits)
        .unwrap();
    logits
}

/// Tokens and the logits of the last positions, for each stored length.
fn expected(case: &str) -> Vec<(Vec<u32>, Vec<f32>)> {
    let bytes = fs::read(golden(case).join("expected.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let lengths = [7, 33, 100].into_iter();
    lengths
        .filter(|n| file.tensor(&format!("tokens_{n}")).is_ok())
        .map(|n| {
            let tokens = file.tensor(&format!("tokens_{n}")).unwrap();
            let logits = file.tensor(&format!("logits_{n}")).unwrap();
            let (tokens, _) = tokens.data().as_chunks::<8>();
            let (logits, _) = logits.data().as_chunks::<4>();
            (
                tokens
                    .iter()
                    .map(|b| i64::from_le_bytes(*b) as u32)
                    .collect(),
                logits.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            )
        })
        .collect()
}

#[test]
fn logits_agree_with_transformers() {
    let mut largest = 0f32;
    for case in all_cases() {
        let dense = dense_copy(case);
        let dense = Served::load(&dense.0, &options()).unwrap();
        assert!(!dense.info().formats.contains_key("nvfp4"));
        let packed = load(case);
        let coded = packed.info().formats.get("nvfp4").map_or(0, |f| f.tensors);
        assert!(coded >= 8 || case == "gptoss_dense", "{case}: {coded}");
        for (weights, model) in [("stored", packed), ("dense", dense)] {
            for (tokens, want) in expected(case) {
                // The capacity of a cache decides whether longrope uses the table for long sequences.
                let cache = cache_of(&model, tokens.len());
                let got = run_in(cache, &model, &tokens, Logits::All);
                let got = &got[got.len() - want.len()..];
                let worst = got
                    .iter()
                    .zip(&want)
                    .map(|(a, b)| (a - b).abs())
                    .fold(0.0, f32::max);
                println!("{case}, {weights}, {} tokens: {worst:e}", tokens.len());
                assert!(
                    worst <= TOLERANCE,
                    "{case}, {weights}, {} tokens: {worst}",
                    tokens.len()
                );
                largest = largest.max(worst);
            }
        }
    }
    println!("largest difference: {largest:e}");
}

/// Far positions under every RoPE scaling. The bound is the one for all models: both sides take angles in the same steps of f32.
#[test]
fn long_positions_agree_with_transformers() {
    for case in LONG_CASES {
        let model = load(case);
        at_long_positions(case, &model, KvType::F32, false, |position, got, want| {
            let pairs = got.iter().zip(want);
            let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            println!("{case}, position {position}: {worst:e}");
            assert_eq!(got.len(), want.len(), "{case}, position {position}");
            assert!(worst <= TOLERANCE, "{case}, position {position}: {worst}");
        });
    }
}

/// The states of recurrent layers after 131,072 tokens: in one call, and with the last token alone.
#[test]
fn recurrent_layers_agree_with_transformers_at_long_positions() {
    let case = "long_recurrent";
    let model = load(case);
    for last_alone in [false, true] {
        at_long_positions(
            case,
            &model,
            KvType::F32,
            last_alone,
            |position, got, want| {
                let pairs = got.iter().zip(want);
                let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                println!("position {position}, last alone: {last_alone}: {worst:e}");
                assert_eq!(got.len(), want.len(), "position {position}");
                assert!(worst <= TOLERANCE, "position {position}: {worst}");
            },
        );
    }
}

/// Properties of published models that random ones lack: a residual stream of 2e5, 3e6 between gate and down, keys of 500 and scores of a
/// thousand. Reference logits are computed in f64. An f16 cache stores keys of 500 to a quarter, which is half a unit of such scores: its
/// logits, most of which lie within 5, are off by some tenths.
#[test]
fn massive_activations_agree_with_transformers() {
    let model = load("qwen2_massive");
    for (kind, bound) in [(KvType::F32, 2e-3), (KvType::F16, 0.5)] {
        for (tokens, want) in expected("qwen2_massive") {
            let cache = model.sequence(tokens.len(), kind).unwrap();
            let got = run_in(cache, &model, &tokens, Logits::All);
            let got = &got[got.len() - want.len()..];
            let pairs = got.iter().zip(&want);
            let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            println!("{kind:?}, {} tokens: {worst:e}", tokens.len());
            assert!(worst <= bound, "{kind:?}, {} tokens: {worst}", tokens.len());
        }
    }
}

/// Keys and values in 8 bits: an element is within 1/16 of its value. These models have small heads and random weights, and in mixtures some rows
/// go to other experts.
#[test]
fn caches_in_8_bits_stay_near_those_in_16() {
    for case in all_cases() {
        let model = load(case);
        let has_experts = model.spec().blocks.iter().any(|b| b.mlp.experts() > 0);
        let bound = if has_experts { 0.3 } else { 0.2 };
        for (tokens, _) in expected(case) {
            let [exact, rounded] = [KvType::F16, KvType::F8].map(|kind| {
                let cache = model.sequence(tokens.len(), kind).unwrap();
                run_in(cache, &model, &tokens, Logits::All)
            });
            let square = |x: f32| f64::from(x) * f64::from(x);
            let pairs = exact.iter().zip(&rounded);
            let far: f64 = pairs.map(|(a, b)| square(a - b)).sum();
            let all: f64 = exact.iter().map(|&x| square(x)).sum();
            let (distance, count) = ((far / all).sqrt(), tokens.len());
            println!("{case}, {count} tokens: {distance:.4}");
            assert!(distance > 0.0, "{case}: nothing is rounded");
            assert!(distance <= bound, "{case}, {count} tokens: {distance}");
        }
    }
}

/// The models as GGUF files, with the names, keys and orders of rows of such files.
#[test]
fn gguf_files_of_every_family_agree_with_transformers() {
    for case in [
        "gemma3_wide",
        "qwen3moe_normalized",
        "phi3_longrope",
        "mistral_window",
        "qwen35_drafter",
        "qwen35moe_drafter",
        "qwen3next_shared",
        "nemotronh_dense",
        "nemotronh_experts",
        "gemma4_experts",
        "gemma4_perlayer",
    ] {
        let model = load_gguf(case);
        assert_eq!(model.info().architecture, load(case).info().architecture);
        for (tokens, want) in expected(case) {
            let got = run_in(cache_of(&model, tokens.len()), &model, &tokens, Logits::All);
            let got = &got[got.len() - want.len()..];
            for (a, b) in got.iter().zip(&want) {
                assert!((a - b).abs() <= TOLERANCE, "{case}: {a} and {b}");
            }
        }
    }
}

/// GGUF has no key for the limit of gpt-oss, which is that of the published models.
#[test]
fn a_gguf_file_of_gpt_oss_is_the_published_form() {
    let dir = Copy::of("gptoss_mxfp4", "limit");
    let config = fs::read_to_string(dir.0.join("config.json")).unwrap();
    let published = config.replace("\"swiglu_limit\": 1.5", "\"swiglu_limit\": 7.0");
    assert_ne!(config, published);
    dir.write("config.json", published.as_bytes());
    let (want, got) = (
        Served::load(&dir.0, &options()).unwrap(),
        load_gguf("gptoss_mxfp4"),
    );
    // The file's MXFP4, as NVFP4, has its values.
    let file = model::open(&gguf("gptoss_mxfp4")).unwrap();
    let stack = file.find("model.layers.1.mlp.experts.up_proj.weight");
    let stack = stack.unwrap();
    let [count, height, cols] = stack.shape[..] else {
        panic!("{stack:?}")
    };
    assert_eq!(stack.encoding, Encoding::Mxfp4);
    let rows = 1..count * height;
    let mut values = vec![0.0; rows.len() * cols];
    file.rows_f32(stack, rows.clone(), &mut values).unwrap();
    let (mut codes, mut scales) = (vec![0; values.len() / 2], vec![0; values.len() / 16]);
    file.rows_nvfp4(stack, rows.clone(), &mut codes, &mut scales)
        .unwrap();
    let globals = file.global_scales(stack).unwrap();
    let (of_codes, of_scales) = (codes.chunks(cols / 2), scales.chunks(cols / 16));
    for ((row, codes), (scales, want)) in rows.zip(of_codes).zip(of_scales.zip(values.chunks(cols)))
    {
        let mut held = vec![0.0; cols];
        nvfp4::dequantize(codes, scales, globals[row / height], &mut held).unwrap();
        assert_eq!(held, want, "row {row}");
    }
    let (tokens, _) = expected("gptoss_mxfp4").remove(0);
    let [want, got] = [&want, &*got]
        .map(|model| run_in(cache_of(model, tokens.len()), model, &tokens, Logits::All));
    for (a, b) in got.iter().zip(&want) {
        assert!((a - b).abs() <= TOLERANCE, "{a} and {b}");
    }
}

/// The text model within one for images, in both orders of transformers' names: its config is nested, and other parts are left out.
#[test]
fn the_text_model_within_another_is_run() {
    let case = "gemma3_wide";
    let (tokens, want) = expected(case).remove(0);
    let bytes = fs::read(golden(case).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (of_model, vision) in [
        ("language_model.model.", "vision_tower.patch.weight"),
        ("model.language_model.", "model.vision_tower.patch.weight"),
    ] {
        let dir = Copy::of(case, "within");
        let mut tensors: Vec<(String, TensorView<'_>)> = file
            .tensors()
            .into_iter()
            .map(|(name, view)| (name.replacen("model.", of_model, 1), view))
            .collect();
        let patch = TensorView::new(Dtype::F32, vec![2, 2], &[0; 16]).unwrap();
        tensors.push((vision.to_owned(), patch));
        let written = safetensors::serialize(tensors, None).unwrap();
        dir.write("model.safetensors", &written);
        let text: Value =
            serde_json::from_slice(&fs::read(dir.0.join("config.json")).unwrap()).unwrap();
        let outer = json!({
            "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text,
            "vision_config": {"hidden_size": 2}
        });
        dir.write("config.json", outer.to_string().as_bytes());
        let model = Served::load(&dir.0, &options()).unwrap();
        let got = run(&model, &tokens, Logits::All);
        for (a, b) in got[got.len() - want.len()..].iter().zip(&want) {
            assert!((a - b).abs() <= TOLERANCE, "{of_model}: {a} and {b}");
        }
    }
}

/// Every case has odd lengths; together they have every family with a tied and an own head, and with grouped queries.
#[test]
fn the_cases_cover_families_and_heads() {
    let mut seen = BTreeSet::new();
    for case in all_cases() {
        let lengths: Vec<usize> = expected(case).iter().map(|(t, _)| t.len()).collect();
        assert_eq!(lengths[..2], [7, 33], "{case}");
        let model = load(case);
        let info = model.info();
        let grouped = info.heads > info.kv_heads;
        seen.insert((info.architecture, info.tied, grouped));
    }
    for family in ["qwen3", "qwen2", "llama"] {
        for tied in [true, false] {
            assert!(seen.contains(&(family, tied, true)), "{family} {tied}");
        }
    }
    assert!(seen.contains(&("llama", false, false)));
}

#[test]
fn tokens_give_the_same_bits_however_they_are_split() {
    for case in all_cases() {
        let model = load(case);
        let tokens = some_tokens(&model, 41);
        let vocab = model.spec().vocab_size;
        let whole = run(&model, &tokens, Logits::All);
        assert_eq!(whole.len(), tokens.len() * vocab);
        assert!(whole.iter().all(|x| x.is_finite()));
        assert!(run(&model, &tokens, Logits::None).is_empty());
        assert_eq!(
            run(&model, &tokens, Logits::Last),
            whole[whole.len() - vocab..]
        );
        for sizes in [vec![1; 41], vec![5, 1, 19, 16], vec![17, 24]] {
            let (mut cache, mut scratch) = (cache(&model), Scratch::new());
            let (mut all, mut logits) = (Vec::new(), Vec::new());
            let mut rest = &tokens[..];
            for n in sizes {
                let (now, later) = rest.split_at(n);
                rest = later;
                model
                    .forward(now, &mut cache, &mut scratch, Logits::All, &mut logits)
                    .unwrap();
                all.extend_from_slice(&logits);
            }
            assert_eq!(cache.len(), 41);
            assert!(all == whole, "{case}");
        }
    }
}

#[test]
fn more_tokens_than_go_through_together() {
    let mut config: Value =
        serde_json::from_slice(&fs::read(golden("llama_tied").join("config.json")).unwrap())
            .unwrap();
    config["max_position_embeddings"] = json!(2048);
    let dir = Copy::of("llama_tied", "long");
    dir.write("config.json", config.to_string().as_bytes());
    let model = Served::load(&dir.0, &options()).unwrap();
    let tokens = some_tokens(&model, 1030);
    let mut cache = model.sequence(1030, KvType::F16).unwrap();
    let (mut scratch, mut whole, mut last) = (Scratch::new(), Vec::new(), Vec::new());
    model
        .forward(&tokens, &mut cache, &mut scratch, Logits::All, &mut whole)
        .unwrap();
    cache.truncate(1000).unwrap();
    model
        .forward(
            &tokens[1000..],
            &mut cache,
            &mut scratch,
            Logits::Last,
            &mut last,
        )
        .unwrap();
    assert!(whole.ends_with(&last) && whole.len() == 1030 * 150);
}

#[test]
fn threads_and_int8_activations() {
    let tokens: Vec<u32> = (0..20).collect();
    let one = LoadOptions::new(Device::cpu(Some(1)).unwrap());
    let alone = Served::load(&golden("qwen3_untied"), &one).unwrap();
    let exact = run(&load("qwen3_untied"), &tokens, Logits::All);
    assert!(run(&alone, &tokens, Logits::All) == exact);
    let int8 = LoadOptions {
        activations: Activations::Int8,
        ..options()
    };
    let int8 = Served::load(&golden("qwen3_untied"), &int8).unwrap();
    assert_eq!(int8.info().activations, "int8");
    let rounded = run(&int8, &tokens, Logits::All);
    let (mut error, mut size) = (0.0, 0.0);
    for (a, b) in rounded.iter().zip(&exact) {
        error += (a - b) * (a - b);
        size += b * b;
    }
    let relative = (error / size).sqrt();
    // Eight bits leave about 0.4 % in each product; two blocks add up.
    assert!((1e-4..0.05).contains(&relative), "{relative}");
}

#[test]
fn a_batch_gives_each_sequence_its_own_bits() {
    for case in [
        "qwen3_tied",
        "qwen2_untied",
        "gptoss_dense",
        "gptoss_mxfp4",
        "gemma4_dense",
        "gemma4_perlayer",
        "gemma4_experts",
    ] {
        let model = load(case);
        let vocab = model.spec().vocab_size;
        let prompts: Vec<Vec<u32>> = [3, 17, 1, 30]
            .map(|n| some_tokens(&model, n))
            .into_iter()
            .collect();
        let next = [5, 6, 7, 8];
        let mut scratch = Scratch::new();
        let (mut alone, mut caches, mut logits) = (Vec::new(), Vec::new(), Vec::new());
        for (prompt, &token) in prompts.iter().zip(&next) {
            let mut cache = cache(&model);
            model
                .forward(prompt, &mut cache, &mut scratch, Logits::None, &mut logits)
                .unwrap();
            caches.push(cache.clone());
            model
                .forward(
                    &[token],
                    &mut cache,
                    &mut scratch,
                    Logits::Last,
                    &mut logits,
                )
                .unwrap();
            alone.extend_from_slice(&logits);
        }
        let mut refs: Vec<&mut Sequence> = caches.iter_mut().collect();
        let logits = step_logits(&model, &next, &mut refs).unwrap().concat();
        assert!(logits == alone && logits.len() == 4 * vocab);
        assert_eq!(caches.each_len(), [4, 18, 2, 31]);
    }
}

/// Decode steps and chunks of prompts in one batch, of more rows than a pass takes.
#[test]
fn ragged_batches_give_the_bits_of_segments_apart() {
    for case in [
        "qwen3_tied",
        "gemma3_wide",
        "mistral_window",
        "phi3_longrope",
        "long_default",
        "qwen3moe_mixed",
        "qwen2moe_shared",
        "gptoss_mxfp4",
        "gemma4_perlayer",
        "gemma4_experts",
    ] {
        let model = load(case);
        // Sequences of all types in one batch.
        for kv in [&[KvType::F32][..], &[KvType::F8, KvType::F16, KvType::F32]] {
            ragged::check(&model, kv, None, &|got, expected, what| {
                assert!(got == expected, "{case}, {kv:?}, {what}");
            });
        }
    }
}

/// A row that no token can be chosen from is the fault of its slot alone.
#[test]
fn a_fault_of_a_slot_leaves_the_others_alone() {
    let dir = ragged::spoil(ragged::ODD);
    let model = Served::load(&dir.0, &options()).unwrap();
    let words = "the logit of token 0 is not a number";
    ragged::check_faults(&model, words, &|got, expected, what| {
        assert!(got == expected, "{what}");
    });
}

/// A router whose logits leave the range of f32 for some rows: those are the faults of their slots, and the others have what they have alone.
#[test]
fn rows_without_experts_fail_alone() {
    let dir = Copy::of("qwen3moe_mixed", "router");
    change_tensor(&dir, "model.layers.0.mlp.gate.weight", |dtype, _, bytes| {
        assert_eq!(dtype, Dtype::BF16);
        bytes[..2].copy_from_slice(&half::bf16::from_f32(3e38).to_le_bytes());
    });
    let model = Served::load(&dir.0, &options()).unwrap();
    let tokens: Vec<u32> = (0..40).collect();
    let run = |tokens: &[u32]| {
        let mut caches: Vec<Sequence> = tokens.iter().map(|_| cache(&model)).collect();
        let each = tokens.chunks(1).zip(&mut caches);
        let work = each.map(|(tokens, sequence)| NewTokens {
            tokens,
            sequence,
            wanted: Wanted::Last,
        });
        let (mut scratch, mut logits) = (Scratch::new(), Vec::new());
        let outputs = model
            .run(work.collect(), false, &mut scratch, &mut logits)
            .unwrap();
        let rows = logits.chunks_exact(model.spec().vocab_size);
        let lengths = caches.iter().map(Sequence::len);
        let each = outputs.into_iter().zip(rows).zip(lengths);
        each.map(|((output, row), len)| match output {
            Ok(_) => (row.to_vec(), len),
            Err(fault) => {
                let words = "gives expert 0 a logit of";
                assert!(fault.message().contains(words), "{fault}");
                (Vec::new(), len)
            }
        })
        .collect::<Vec<_>>()
    };
    let together = run(&tokens);
    let alone: Vec<_> = tokens.chunks(1).flat_map(run).collect();
    assert!(together == alone);
    let failed = together.iter().filter(|(row, _)| row.is_empty()).count();
    assert!((1..40).contains(&failed), "{failed}");
    let empty = |(row, len): &(Vec<f32>, usize)| row.is_empty() == (*len == 0);
    assert!(together.iter().all(empty));
}

trait Lens {
    fn each_len(&self) -> Vec<usize>;
}

impl Lens for Vec<Sequence> {
    fn each_len(&self) -> Vec<usize> {
        self.iter().map(Sequence::len).collect()
    }
}

#[test]
fn clones_share_pages_and_do_not_disturb_each_other() {
    let model = load("qwen3_tied");
    let (mut scratch, mut logits) = (Scratch::new(), Vec::new());
    let mut first = cache(&model);
    let prompt = some_tokens(&model, 21);
    let mut forward = |cache: &mut Sequence, tokens: &[u32]| {
        model
            .forward(tokens, cache, &mut scratch, Logits::Last, &mut logits)
            .unwrap();
        logits.clone()
    };
    forward(&mut first, &prompt);
    let mut second = first.clone();
    let a = forward(&mut first, &[1, 2, 3]);
    let b = forward(&mut second, &[4, 5]);
    let with = |more: &[u32]| run(&model, &[&prompt, more].concat(), Logits::Last);
    assert!(a == with(&[1, 2, 3]) && b == with(&[4, 5]));
    first.truncate(21).unwrap();
    assert!(forward(&mut first, &[4, 5]) == b);
    assert_eq!(first.bytes(), second.bytes());
    first.truncate(0).unwrap();
    assert_eq!(first.bytes(), 0);
    assert_eq!(
        first.truncate(1).unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
}

#[test]
fn quantizing_while_loading_is_what_the_file_holds() {
    // The golden's own dequantized values, stored dense, quantize back to something close; kept dense they agree well, and a tied table is
    // looked up unquantized.
    let dense = dense_copy("qwen3_tied");
    let tokens = some_tokens(&load("qwen3_tied"), 12);
    let reference = run(&load("qwen3_tied"), &tokens, Logits::All);
    let as_stored = Served::load(&dense.0, &options()).unwrap();
    let worst = |got: &[f32]| {
        got.iter()
            .zip(&reference)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max)
    };
    let exact = worst(&run(&as_stored, &tokens, Logits::All));
    assert!(exact <= TOLERANCE, "{exact}");
    assert_eq!(as_stored.info().formats["f32"].tensors, 14);
    assert!(!as_stored.info().embedding_in_file);

    let quantized = LoadOptions {
        quantize: Some(QuantizeOptions::default()),
        ..options()
    };
    let quantized = Served::load(&dense.0, &quantized).unwrap();
    let info = quantized.info();
    assert_eq!(info.formats["nvfp4"].tensors, 15);
    assert!(info.embedding_in_file && info.formats.len() == 1);
    assert!(info.weight_bytes < as_stored.info().weight_bytes / 4);
    let mut row = vec![0.0; 64];
    let mut original = vec![0.0; 64];
    quantized.embed(&[9], &mut row).unwrap();
    as_stored.embed(&[9], &mut original).unwrap();
    assert_eq!(row, original);
    assert!(
        run(&quantized, &tokens, Logits::All)
            .iter()
            .all(|x| x.is_finite())
    );
}

#[test]
fn sampling_only() {
    let whole = load("qwen3_untied");
    let only = LoadOptions {
        sampling_only: true,
        ..options()
    };
    let only = Served::load(&golden("qwen3_untied"), &only).unwrap();
    assert!(only.info().weight_bytes < whole.info().weight_bytes / 2);
    let mut hidden = vec![0.0; 2 * 48];
    only.embed(&[3, 149], &mut hidden).unwrap();
    let (mut a, mut b) = (Vec::new(), Vec::new());
    let mut scratch = Scratch::new();
    only.logits_of(&hidden, &mut scratch, &mut a).unwrap();
    whole.logits_of(&hidden, &mut scratch, &mut b).unwrap();
    assert!(a == b && a.len() == 300);
    let e = only
        .forward(&[1], &mut cache(&only), &mut scratch, Logits::Last, &mut a)
        .unwrap_err();
    assert!(e.message().contains("sampling only"), "{e}");
    expect_kind(
        only.embed(&[150], &mut hidden[..48]),
        ErrorKind::InvalidArgument,
        "token 150 at index 0 is outside the vocabulary of 150",
    );
}

/// Passes divide the residual stream by the residual multiplier. Rows from elsewhere are not divided yet, and their norm shows that where
/// they are about as small as its epsilon.
#[test]
fn rows_from_elsewhere_have_the_logits_that_no_multiplier_changes() {
    let plain = Copy::of("granite_biased", "plain");
    let config = fs::read(plain.0.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["residual_multiplier"] = json!(1.0);
    plain.write("config.json", config.to_string().as_bytes());
    let only = LoadOptions {
        sampling_only: true,
        ..options()
    };
    let [own, plain] =
        [&golden("granite_biased"), &plain.0].map(|path| Served::load(path, &only).unwrap());
    let hidden: Vec<f32> = (0..64).map(|i| 1e-3 * (i as f32).sin()).collect();
    let (mut a, mut b) = (Vec::new(), Vec::new());
    let mut scratch = Scratch::new();
    own.logits_of(&hidden, &mut scratch, &mut a).unwrap();
    plain.logits_of(&hidden, &mut scratch, &mut b).unwrap();
    let largest = b.iter().fold(0f32, |most, x| most.max(x.abs()));
    for (a, b) in a.iter().zip(&b) {
        assert!((a - b).abs() <= 1e-5 * largest, "{a} and {b}");
    }
}

#[test]
fn refused_calls_leave_the_cache_as_it_was() {
    let model = load("qwen3_tied");
    let mut scratch = Scratch::new();
    let mut cache = model.sequence(20, KvType::F32).unwrap();
    let mut logits = Vec::new();
    model
        .forward(
            &[1, 2, 3],
            &mut cache,
            &mut scratch,
            Logits::Last,
            &mut logits,
        )
        .unwrap();
    let bytes = cache.bytes();
    let mut refused = |tokens: &[u32], kind: ErrorKind| {
        let e = model
            .forward(tokens, &mut cache, &mut scratch, Logits::Last, &mut logits)
            .unwrap_err();
        assert_eq!(e.kind(), kind, "{e}");
        assert_eq!((cache.len(), cache.bytes(), logits.len()), (3, bytes, 0));
    };
    refused(&[4; 18], ErrorKind::ContextFull);
    refused(&[4, 320], ErrorKind::InvalidArgument);
    let cancel = Cancel::new();
    cancel.cancel();
    cancel.watching(|| refused(&[4; 17], ErrorKind::Cancelled));
    model
        .forward(&[4], &mut cache, &mut scratch, Logits::Last, &mut logits)
        .unwrap();
    assert!(logits == run(&model, &[1, 2, 3, 4], Logits::Last));
    expect_kind(
        model.sequence(257, KvType::F32),
        ErrorKind::InvalidArgument,
        "a context of 257 positions",
    );
    expect_kind(
        model.sequence(0, KvType::F32),
        ErrorKind::InvalidArgument,
        "a context of 0 positions",
    );

    let mut full = model.sequence(4, KvType::F32).unwrap();
    model
        .forward(&[1; 4], &mut full, &mut scratch, Logits::None, &mut logits)
        .unwrap();
    let e = step_logits(&model, &[1, 1], &mut [&mut cache, &mut full]).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::ContextFull);
    assert!(e.message().starts_with("sequence 1"), "{e}");
    assert_eq!((cache.len(), full.len()), (4, 4));
}

#[test]
fn progress_and_cancel() {
    let (last, calls) = (Cell::new((0, 0)), Cell::new(0));
    let progress = |p: Progress| {
        assert!(p.done <= p.total);
        last.set((p.done, p.total));
        calls.set(calls.get() + 1);
        ControlFlow::Continue(())
    };
    let load = |progress| {
        let watch = Watch {
            progress: Some(progress),
            ..Watch::default()
        };
        watch.during(|| Served::load(&golden("qwen3_tied"), &options()))
    };
    load(&progress).unwrap();
    let (done, total) = last.get();
    assert!(calls.get() > 0 && done == total && total > 80_000);
    let e = load(&|_| ControlFlow::Break(())).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Cancelled);
    let cancel = Cancel::new();
    cancel.cancel();
    let load = || Served::load(&golden("qwen3_tied"), &options());
    let e = cancel.watching(load).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Cancelled);
}

#[test]
fn memory_comes_back() {
    let device = Device::cpu(Some(2)).unwrap();
    let used = |model: Arc<Served>| drop(run(&model, &[1, 2, 3], Logits::Last));
    check_memory_comes_back(&device, 3, used, || ());
}

/// A stored tensor: type, shape, bytes.
type Stored = (Dtype, Vec<usize>, Vec<u8>);

impl Copy {
    /// Rewrites the weights with `change` applied to each tensor; `None` leaves it out.
    fn weights(&self, change: impl Fn(&str, Dtype, Vec<usize>, Vec<u8>) -> Option<Stored>) {
        let bytes = fs::read(self.0.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors: Vec<(String, Stored)> = file
            .tensors()
            .into_iter()
            .filter_map(|(name, t)| {
                let changed = change(&name, t.dtype(), t.shape().to_vec(), t.data().to_vec())?;
                Some((name, changed))
            })
            .collect();
        self.write("model.safetensors", &serialized(&tensors));
    }

    fn config(&self, key: &str, value: Value) {
        let mut config: Value =
            serde_json::from_slice(&fs::read(self.0.join("config.json")).unwrap()).unwrap();
        config[key] = value;
        self.write("config.json", config.to_string().as_bytes());
    }

    fn refused(&self, kind: ErrorKind, parts: &[&str]) {
        let e = Served::load(&self.0, &options()).unwrap_err();
        assert_eq!(e.kind(), kind, "{e}");
        for part in parts {
            assert!(e.message().contains(part), "'{part}' is not in: {e}");
        }
    }
}

/// A golden with its NVFP4 matrices stored as f32.
fn dense_copy(case: &str) -> Copy {
    let dir = Copy::of(case, "dense");
    let checkpoint = model::open(&golden(case)).unwrap();
    let tensors: Vec<(String, Stored)> = checkpoint
        .entries()
        .iter()
        .map(|e| {
            if let Some(part) = checkpoint.plain(e) {
                let mut bytes = vec![0; part.bytes];
                checkpoint.read_part(&part, 0, &mut bytes).unwrap();
                let dtype = match e.encoding.name() {
                    "BF16" => Dtype::BF16,
                    _ => Dtype::F32,
                };
                return (e.name.clone(), (dtype, e.shape.clone(), bytes));
            }
            let mut values = vec![0.0f32; e.rows() * e.cols()];
            checkpoint.rows_f32(e, 0..e.rows(), &mut values).unwrap();
            let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            (e.name.clone(), (Dtype::F32, e.shape.clone(), bytes))
        })
        .collect();
    dir.write("model.safetensors", &serialized(&tensors));
    dir
}

/// MXFP4 becomes NVFP4 without loss, on loading and in a file; 16-bit stacks of gpt-oss are quantized as an expert's own matrices are.
#[test]
fn stacks_of_gpt_oss_become_experts() {
    let pool = Pool::new(2).unwrap();
    for case in ["gptoss_mxfp4", "gptoss_dense"] {
        let out = Copy::of(case, "converted");
        let mut options = ConvertOptions::new(Container::ModelOpt, Recipe::default());
        options.replace = true;
        options.keep = vec!["self_attn".to_owned(), "lm_head".to_owned()];
        let go = &mut |_: ConvertProgress<'_>| ControlFlow::Continue(());
        let source = model::open(&golden(case)).unwrap();
        let report = convert(&*source, &out.0, &options, &pool, go).unwrap();
        let made = model::open(&out.0).unwrap();
        let (kept, quantized) = (report.kept_nvfp4, report.quantized);
        let stacks = source.entries().iter().filter(|e| e.shape.len() == 3);
        for stack in stacks {
            let [count, rows, cols] = stack.shape[..] else {
                panic!("{stack:?}")
            };
            let (block, projection) = stack.name.split_once(".experts.").unwrap();
            let parts: &[&str] = match projection.starts_with("gate_up") {
                true => &["gate_proj", "up_proj"],
                false => &["down_proj"],
            };
            let mut values = vec![0.0; count * rows * cols];
            source
                .rows_f32(stack, 0..count * rows, &mut values)
                .unwrap();
            for (i, want) in values.chunks(cols).enumerate() {
                let (expert, row) = (i / rows, i % rows);
                let part = parts[row % parts.len()];
                let name = format!("{block}.experts.{expert}.{part}.weight");
                let entry = made.find(&name).unwrap();
                assert_eq!(entry.shape, [rows / parts.len(), cols], "{name}");
                let row = row / parts.len();
                let mut held = vec![0.0; cols];
                made.rows_f32(entry, row..row + 1, &mut held).unwrap();
                let most = want.iter().fold(0f32, |most, x| most.max(x.abs()));
                let far = held.iter().zip(want).map(|(a, b)| (a - b).abs());
                let far = far.fold(0.0, f32::max);
                // One of six steps to the largest magnitude of a block, halved, and what rounding its scale adds.
                let bar = if case == "gptoss_mxfp4" {
                    0.0
                } else {
                    most / 5.0
                };
                assert!(far <= bar, "{name}, row {row}: {far} of {most}");
            }
        }
        if case == "gptoss_mxfp4" {
            assert_eq!((kept, quantized), (2 * 4 * 3, 0));
            let (stored, converted) = (load(case), Served::load(&out.0, &common::options()));
            let tokens = some_tokens(&stored, 30);
            let want = run(&stored, &tokens, Logits::All);
            assert!(run(&converted.unwrap(), &tokens, Logits::All) == want);
        } else {
            assert_eq!((kept, quantized), (0, 3 * 4 * 3));
            Served::load(&out.0, &common::options()).unwrap();
        }
    }
}

/// A model of gpt-oss without its sinks, or with a stack of another shape, is refused by the tensor's name.
#[test]
fn tensors_of_gpt_oss_are_required() {
    /// The new shape of a tensor of this name and shape; `None` leaves it out.
    type Change<'a> = &'a dyn Fn(&str, &[usize]) -> Option<Vec<usize>>;
    let changed = |change: Change<'_>| {
        let dir = Copy::of("gptoss_dense", "changed");
        let bytes = fs::read(golden("gptoss_dense").join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let all = file.tensors();
        let tensors = all.iter().filter_map(|(name, view)| {
            let shape = change(name, view.shape())?;
            let view = TensorView::new(view.dtype(), shape, view.data()).unwrap();
            Some((name.as_str(), view))
        });
        let written = safetensors::serialize(tensors, None).unwrap();
        dir.write("model.safetensors", &written);
        Served::load(&dir.0, &options()).map(|_| ())
    };
    let sinks = "model.layers.1.self_attn.sinks";
    expect_kind(
        changed(&|name, shape| (name != sinks).then(|| shape.to_vec())),
        ErrorKind::NotFound,
        "1 tensors of this gpt_oss model are missing: model.layers.1.self_attn.sinks",
    );
    expect_kind(
        changed(&|_, shape| match *shape {
            [count, a, b] => Some(vec![count, b, a]),
            _ => Some(shape.to_vec()),
        }),
        ErrorKind::CorruptFile,
        "model.layers.0.mlp.experts.gate_up_proj.weight has shape [4, 48, 64], expected [4, 64, 48]",
    );
}

/// Projections of recurrent layers become int8, what a file holds in 4 bits stays so, and gates and convolutions keep their 16 bits.
#[test]
fn recurrent_projections_are_quantized_to_8_bits() {
    let encoding = |dir: &Path, name: &str| {
        let made = model::open(dir).unwrap();
        made.find(name).unwrap().encoding.name()
    };
    let pool = Pool::new(2).unwrap();
    for (case, mixer, input) in [
        ("qwen35_tied", "linear_attn", "in_proj_qkv"),
        ("qwen3next_shared", "linear_attn", "in_proj_qkvz"),
        ("nemotronh_dense", "mixer", "in_proj"),
        ("nemotronh_experts", "mixer", "in_proj"),
    ] {
        let (dense, out) = (dense_copy(case), Copy::of(case, "mixed"));
        let mut options = ConvertOptions::new(Container::ModelOpt, Recipe::default());
        options.replace = true;
        let go = &mut |_: ConvertProgress<'_>| ControlFlow::Continue(());
        let source = model::open(&dense.0).unwrap();
        convert(&*source, &out.0, &options, &pool, go).unwrap();
        let made = model::open(&out.0).unwrap();
        for name in [input, "out_proj"] {
            let name = format!("model.layers.0.{mixer}.{name}.weight");
            assert_eq!(encoding(&out.0, &name), "INT8", "{case}: {name}");
            assert_eq!(encoding(&golden(case), &name), "NVFP4", "{case}: {name}");
            let rows = |checkpoint: &dyn Checkpoint| {
                let entry = checkpoint.find(&name).unwrap();
                let mut values = vec![0.0; entry.rows() * entry.cols()];
                checkpoint
                    .rows_f32(entry, 0..entry.rows(), &mut values)
                    .unwrap();
                let rows = values.chunks(entry.cols());
                rows.map(<[f32]>::to_vec).collect::<Vec<_>>()
            };
            for (a, b) in rows(&*source).iter().zip(&rows(&*made)) {
                let largest = a.iter().fold(0f32, |most, x| most.max(x.abs()));
                let far = a.iter().zip(b).map(|(a, b)| (a - b).abs());
                // Half of one of the 127 steps to the largest.
                assert!(far.fold(0.0, f32::max) <= largest / 253.0, "{case}: {name}");
            }
        }
        let convolution = format!("model.layers.0.{mixer}.conv1d.weight");
        assert_eq!(encoding(&out.0, &convolution), "BF16", "{case}");
        let mixed = Served::load(&out.0, &common::options()).unwrap();
        assert!(mixed.info().formats["int8"].tensors >= 3);
        let logits = run(&mixed, &some_tokens(&mixed, 30), Logits::All);
        assert!(logits.iter().all(|x| x.is_finite()));
    }
}

/// Experts by the names of Mixtral, whose gate and up projections share a global scale.
#[test]
fn experts_with_numbered_projections_are_quantized() {
    let case = "minimaxm2_partial";
    let (dense, out) = (dense_copy(case), Copy::of(case, "numbered"));
    let mut options = ConvertOptions::new(Container::ModelOpt, Recipe::default());
    options.replace = true;
    let go = &mut |_: ConvertProgress<'_>| ControlFlow::Continue(());
    let (source, pool) = (model::open(&dense.0).unwrap(), Pool::new(2).unwrap());
    convert(&*source, &out.0, &options, &pool, go).unwrap();
    let made = model::open(&out.0).unwrap();
    let entry = |name: &str| {
        let name = format!("model.layers.1.block_sparse_moe.{name}");
        made.find(&name).unwrap_or_else(|| panic!("{name}"))
    };
    let [gate, down, up] = ["w1", "w2", "w3"].map(|w| entry(&format!("experts.3.{w}.weight")));
    for weight in [gate, down, up] {
        assert_eq!(weight.encoding, Encoding::Nvfp4, "{}", weight.name);
    }
    let global = |weight| made.global_scale(weight).unwrap();
    assert_eq!(global(gate), global(up));
    assert_ne!(entry("gate.weight").encoding, Encoding::Nvfp4);
    assert!(logits_of(&out).iter().all(|x| x.is_finite()));
}

/// The logits of a model in a directory, after some tokens.
fn logits_of(dir: &Copy) -> Vec<f32> {
    let model = Served::load(&dir.0, &options()).unwrap();
    run(&model, &some_tokens(&model, 30), Logits::All)
}

/// The tensors of a file that do not belong to experts.
fn without_experts(file: &SafeTensors<'_>) -> Vec<(String, Stored)> {
    let others = file.iter().filter(|(name, _)| !name.contains(".experts."));
    let stored = others.map(|(name, view)| {
        let (shape, data) = (view.shape().to_vec(), view.data().to_vec());
        (name.to_owned(), (view.dtype(), shape, data))
    });
    stored.collect()
}

/// A file with these tensors.
fn serialized(tensors: &[(String, Stored)]) -> Vec<u8> {
    let views = tensors
        .iter()
        .map(|(n, (d, s, b))| (n.clone(), TensorView::new(*d, s.clone(), b).unwrap()));
    safetensors::serialize(views, None).unwrap()
}

/// transformers holds the experts of a block as one tensor for each projection, here without gates. They give the same bits, and conversion
/// takes them apart.
#[test]
fn stacks_of_experts_without_gates_are_run_and_come_apart() {
    let case = "nemotronh_experts";
    let (dense, stacked, out) = (
        dense_copy(case),
        Copy::of(case, "stacked"),
        Copy::of(case, "apart"),
    );
    let bytes = fs::read(dense.0.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors = without_experts(&file);
    for (layer, projection) in [1, 4]
        .iter()
        .flat_map(|l| [(l, "up_proj"), (l, "down_proj")])
    {
        let name = format!("model.layers.{layer}.mixer.experts");
        let of = |expert| {
            file.tensor(&format!("{name}.{expert}.{projection}.weight"))
                .unwrap()
        };
        let shape = [&[8], of(0).shape()].concat();
        let data = (0..8).flat_map(|expert| of(expert).data().to_vec());
        let name = format!("{name}.{projection}");
        tensors.push((name, (Dtype::F32, shape, data.collect())));
    }
    stacked.write("model.safetensors", &serialized(&tensors));
    assert!(logits_of(&stacked) == logits_of(&dense));

    let mut options = ConvertOptions::new(Container::ModelOpt, Recipe::default());
    options.replace = true;
    let go = &mut |_: ConvertProgress<'_>| ControlFlow::Continue(());
    let source = model::open(&stacked.0).unwrap();
    convert(&*source, &out.0, &options, &Pool::new(2).unwrap(), go).unwrap();
    let made = model::open(&out.0).unwrap();
    for expert in 0..8 {
        let name = format!("model.layers.4.mixer.experts.{expert}.down_proj.weight");
        let entry = made.find(&name).unwrap();
        assert_eq!(
            (entry.encoding.name(), &entry.shape[..]),
            ("NVFP4", &[48, 32][..])
        );
    }
    assert!(logits_of(&out).iter().all(|x| x.is_finite()));
}

/// Quantizing the goldens of Gemma 4, from f32, gives models that run: tables as they are asked for, the small projections of per-layer
/// embeddings and the router as they were, and no keys of layers that share those of others.
#[test]
fn gemma_4_is_quantized_and_runs() {
    let pool = Pool::new(2).unwrap();
    for (case, tables, table, bar) in [
        ("gemma4_dense", Tables::Auto, "BF16", 0.25),
        ("gemma4_perlayer", Tables::Auto, "BF16", 0.25),
        ("gemma4_perlayer", Tables::Int8, "INT8", 0.25),
        // The head is in 4 bits too.
        ("gemma4_perlayer", Tables::Nvfp4, "NVFP4", 0.7),
        ("gemma4_experts", Tables::Auto, "BF16", 0.25),
    ] {
        let (dense, out) = (dense_copy(case), Copy::of(case, "quantized"));
        let mut settings = ConvertOptions::new(Container::ModelOpt, Recipe::default());
        (settings.replace, settings.tables) = (true, tables);
        let go = &mut |_: ConvertProgress<'_>| ControlFlow::Continue(());
        let source = model::open(&dense.0).unwrap();
        convert(&*source, &out.0, &settings, &pool, go).unwrap();
        let made = model::open(&out.0).unwrap();
        for entry in made.entries() {
            let name = entry.name.as_str();
            let parts = [
                "per_layer_input_gate",
                "per_layer_projection.",
                "router.proj",
            ];
            let is_small = parts.iter().any(|part| name.contains(part));
            let is_expert = name.contains(".experts.");
            let expected = match name {
                _ if name.contains("embed_tokens") => table,
                _ if is_small || name.contains("per_layer_model_projection") => "BF16",
                _ if is_expert || name.contains("proj.weight") => "NVFP4",
                _ => continue,
            };
            let is_of_text = !name.contains("tower") && !name.contains("embed_audio");
            if is_of_text && !name.contains("embed_vision") {
                assert_eq!(entry.encoding.name(), expected, "{case}: {name}");
            }
        }
        let unread = "model.layers.5.self_attn.k_proj.weight";
        assert!(made.find(unread).is_none(), "{case}");
        assert_eq!(
            source.find(unread).is_some(),
            case == "gemma4_perlayer",
            "the test shows nothing"
        );
        let (dense, quantized) = (
            Served::load(&dense.0, &options()).unwrap(),
            Served::load(&out.0, &options()).unwrap(),
        );
        let tokens = some_tokens(&dense, 30);
        let want = run(&dense, &tokens, Logits::All);
        let got = run(&quantized, &tokens, Logits::All);
        let square = |x: f32| f64::from(x * x);
        let error: f64 = got.iter().zip(&want).map(|(a, b)| square(a - b)).sum();
        let size: f64 = want.iter().copied().map(square).sum();
        let relative = (error / size).sqrt();
        println!("{case}, {table}: {relative}");
        // A model of other weights is off by 1.4.
        assert!(relative < bar, "{case}, {table}: {relative}");
    }
}

/// transformers holds the experts of a block as one tensor for gates and ups and one for downs, beside the MLP. They give the same bits.
#[test]
fn stacks_of_gemma_4_are_run() {
    let case = "gemma4_experts";
    let (dense, stacked) = (dense_copy(case), Copy::of(case, "stacked"));
    let bytes = fs::read(dense.0.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors = without_experts(&file);
    for layer in 0..3 {
        let prefix = format!("model.layers.{layer}.experts");
        let stacks: [(&str, &[&str], [usize; 2]); 2] = [
            ("gate_up_proj", &["gate_proj", "up_proj"], [64, 48]),
            ("down_proj", &["down_proj"], [48, 32]),
        ];
        for (stack, projections, [rows, cols]) in stacks {
            let parts = (0..6).flat_map(|e| projections.iter().map(move |p| (e, p)));
            let data = parts.flat_map(|(expert, projection)| {
                let name = format!("{prefix}.{expert}.{projection}.weight");
                file.tensor(&name).unwrap().data().to_vec()
            });
            let name = format!("{prefix}.{stack}");
            tensors.push((name, (Dtype::F32, vec![6, rows, cols], data.collect())));
        }
    }
    stacked.write("model.safetensors", &serialized(&tensors));
    assert!(logits_of(&stacked) == logits_of(&dense));

    let out = Copy::of(case, "apart");
    let mut settings = ConvertOptions::new(Container::ModelOpt, Recipe::default());
    settings.replace = true;
    let go = &mut |_: ConvertProgress<'_>| ControlFlow::Continue(());
    let source = model::open(&stacked.0).unwrap();
    convert(&*source, &out.0, &settings, &Pool::new(2).unwrap(), go).unwrap();
    let made = model::open(&out.0).unwrap();
    let gate = made
        .find("model.layers.2.experts.5.gate_proj.weight")
        .unwrap();
    assert_eq!(
        (gate.encoding.name(), &gate.shape[..]),
        ("NVFP4", &[32, 48][..])
    );
    assert!(logits_of(&out).iter().all(|x| x.is_finite()));
}

/// Tensors of Gemma 4 that are missing, of another shape or not finite are refused by name; keys that no layer reads may hold anything.
#[test]
fn tensors_of_gemma_4_are_required() {
    let case = "gemma4_perlayer";
    let text = "model.language_model.";
    let dir = Copy::of(case, "missing");
    dir.weights(|name, d, s, b| {
        let gone = [
            "layers.1.layer_scalar",
            "layers.3.per_layer_input_gate.weight",
        ];
        (!gone.iter().any(|n| name.ends_with(n))).then_some((d, s, b))
    });
    dir.refused(
        ErrorKind::NotFound,
        &[
            "2 tensors of this gemma4 model are missing",
            "model.layers.1.layer_scalar, model.layers.3.per_layer_input_gate.weight",
        ],
    );
    let dir = Copy::of(case, "table");
    let path = dir.0.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["text_config"]["vocab_size_per_layer_input"] = json!(150);
    dir.write("config.json", config.to_string().as_bytes());
    dir.refused(
        ErrorKind::CorruptFile,
        &["model.embed_tokens_per_layer.weight has shape [160, 192], expected [150, 192]"],
    );
    let spoiled = |tensor: &str| {
        let dir = Copy::of(case, "spoiled");
        let tensor = format!("{text}{tensor}");
        change_tensor(&dir, &tensor, |dtype, _, bytes| {
            assert_eq!(dtype, Dtype::BF16);
            bytes[..2].copy_from_slice(&[0xc0, 0x7f]);
        });
        dir
    };
    spoiled("embed_tokens_per_layer.weight").refused(
        ErrorKind::CorruptFile,
        &["model.embed_tokens_per_layer.weight", "[0, 0] is NaN"],
    );
    let unread = spoiled("layers.5.self_attn.k_proj.weight");
    let model = Served::load(&unread.0, &options()).unwrap();
    let tokens = some_tokens(&model, 20);
    assert!(run(&model, &tokens, Logits::All) == run(&load(case), &tokens, Logits::All));
}

/// Without its layers, a model needs neither the table of per-layer embeddings nor what takes it.
#[test]
fn gemma_4_for_sampling_only_has_no_inputs_of_layers() {
    let case = "gemma4_perlayer";
    let only = LoadOptions {
        sampling_only: true,
        ..options()
    };
    let (only, whole) = (Served::load(&golden(case), &only).unwrap(), load(case));
    assert!(only.weights().per_layer.is_none() && whole.weights().per_layer.is_some());
    // The table of embeddings and the last norm, in f32 and bf16.
    assert_eq!(only.info().parameters, 150 * 48 + 48);
    let stored = tensors::stored(whole.spec());
    let all = stored
        .iter()
        .map(|(_, shape, _)| shape.iter().product::<usize>());
    assert_eq!(whole.info().parameters, all.sum::<usize>() as u64);
    // The table stays in its file.
    let source = model::open(&golden(case)).unwrap();
    let (planned, mapped) = footprint::weight_bytes(&*source, DeviceKind::Cpu, false).unwrap();
    assert_eq!((planned.host, mapped), (whole.info().weight_bytes, 0));
}

/// Matrices that are small or decide much keep their type when a model is quantized while it is loaded.
#[test]
fn projections_of_per_layer_embeddings_are_not_quantized_on_loading() {
    let quantize = LoadOptions {
        quantize: Some(QuantizeOptions::default()),
        ..options()
    };
    let model = Served::load(&dense_copy("gemma4_perlayer").0, &quantize).unwrap();
    let formats = &model.info().formats;
    // The projection of embeddings, and a gate and a projection of each of six blocks.
    assert_eq!(formats["bf16"].tensors, 13);
    // Four projections of attention in three blocks and two in the others, three of each MLP, and the head.
    assert_eq!(formats["nvfp4"].tensors, 3 * 4 + 3 * 2 + 6 * 3 + 1);
}

#[test]
fn missing_tensors_are_named_together() {
    let dir = Copy::of("qwen3_untied", "missing");
    dir.weights(|name, d, s, b| {
        let gone = name.starts_with("lm_head")
            || name == "model.layers.1.self_attn.q_norm.weight"
            || name.starts_with("model.layers.0.mlp.up_proj");
        (!gone).then_some((d, s, b))
    });
    dir.refused(
        ErrorKind::NotFound,
        &[
            "3 tensors of this qwen3 model are missing",
            "lm_head.weight, model.layers.0.mlp.up_proj.weight, model.layers.1.self_attn.q_norm.weight",
        ],
    );
    // With layers that do not exist, the list is long but bounded.
    let dir = Copy::of("qwen3_untied", "many");
    dir.config("num_hidden_layers", json!(4000));
    dir.refused(ErrorKind::NotFound, &["43978 tensors", "and 43914 more"]);
    dir.config("num_hidden_layers", json!(1 << 27));
    dir.refused(ErrorKind::CorruptFile, &["num_hidden_layers is 134217728"]);
}

#[test]
fn wrong_shapes_and_leftovers_are_named() {
    let dir = Copy::of("llama_tied", "shapes");
    dir.config("intermediate_size", json!(96));
    dir.config("num_key_value_heads", json!(1));
    dir.refused(
        ErrorKind::CorruptFile,
        &[
            "model.layers.0.mlp.down_proj.weight has shape [48, 80], expected [48, 96]",
            "model.layers.1.self_attn.v_proj.weight has shape [32, 48], expected [16, 48]",
        ],
    );
    let dir = Copy::of("llama_tied", "fewer");
    dir.config("num_hidden_layers", json!(1));
    dir.refused(
        ErrorKind::Unsupported,
        &[
            "9 tensors have no place",
            "model.layers.1.mlp.down_proj.weight",
        ],
    );
    let dir = Copy::of("glm4moe_grouped", "drafting");
    dir.config("num_nextn_predict_layers", json!(0));
    dir.refused(
        ErrorKind::Unsupported,
        &[
            "7 tensors have no place in a glm4_moe model of 2 layers",
            "model.layers.2.eh_proj.weight",
        ],
    );
    let dir = Copy::of("qwen3_untied", "norms");
    dir.config("model_type", json!("llama"));
    dir.refused(
        ErrorKind::Unsupported,
        &["model.layers.0.self_attn.k_norm.weight"],
    );
    let dir = Copy::of("qwen2_untied", "biases");
    dir.weights(|name, d, s, b| (!name.ends_with("k_proj.bias")).then_some((d, s, b)));
    dir.refused(
        ErrorKind::NotFound,
        &["2 tensors", "model.layers.0.self_attn.k_proj.bias"],
    );
}

#[test]
fn weights_that_are_not_finite_are_named() {
    for (tensor, at, what) in [
        (
            "model.embed_tokens.weight",
            2 * (48 * 5 + 7),
            "[5, 7] is NaN",
        ),
        ("model.norm.weight", 4 * 3, "[0, 3]"),
        (
            "model.layers.1.mlp.down_proj.weight_scale",
            4,
            "block scale",
        ),
        ("lm_head.weight_scale_2", 0, "scale"),
    ] {
        let dir = Copy::of("qwen3_untied", "nan");
        dir.weights(|name, d, s, mut b| {
            if name == tensor {
                let nan: &[u8] = match d {
                    Dtype::BF16 => &[0xc0, 0x7f],
                    Dtype::F32 => &[0, 0, 0xc0, 0x7f],
                    _ => &[0x7f],
                };
                b[at..at + nan.len()].copy_from_slice(nan);
            }
            Some((d, s, b))
        });
        let logical = tensor.split("_scale").next().unwrap();
        dir.refused(ErrorKind::CorruptFile, &[logical, what]);
    }
    let dir = dense_copy("qwen3_untied");
    dir.weights(|name, d, s, mut b| {
        if name == "model.layers.0.self_attn.k_proj.weight" {
            b[4 * 50..4 * 51].copy_from_slice(&f32::INFINITY.to_le_bytes());
        }
        Some((d, s, b))
    });
    let e = Served::load(&dir.0, &options()).unwrap_err();
    assert!(
        e.message()
            .contains("model.layers.0.self_attn.k_proj.weight")
            && e.message().contains("[1, 2]"),
        "{e}"
    );
    let quantized = LoadOptions {
        quantize: Some(QuantizeOptions::default()),
        ..options()
    };
    let e = Served::load(&dir.0, &quantized).unwrap_err();
    assert!(
        e.message()
            .contains("model.layers.0.self_attn.k_proj.weight"),
        "{e}"
    );
}

#[test]
fn configs_and_tokenizers_that_do_not_fit() {
    let dir = Copy::of("qwen3_tied", "config");
    dir.config("model_type", json!("gpt_neox"));
    dir.refused(
        ErrorKind::Unsupported,
        &["'gpt_neox'", "known are llama, qwen2, qwen3"],
    );
    fs::remove_file(dir.0.join("config.json")).unwrap();
    dir.refused(ErrorKind::NotFound, &["config.json"]);

    let dir = Copy::of("qwen3_tied", "tokenizer");
    let text = fs::read_to_string(dir.0.join("tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
    let first = tokenizer["model"]["vocab"].as_object().unwrap().len();
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    for id in first..=320 {
        let mut one = added[0].clone();
        one["id"] = json!(id);
        one["content"] = json!(format!("<|{id}|>"));
        added.push(one);
    }
    dir.write("tokenizer.json", tokenizer.to_string().as_bytes());
    // As Gemma 3's text models have a name for pictures: it refuses nothing until it is used.
    let model = Served::load(&dir.0, &options()).unwrap();
    let tokens = model
        .tokenizer()
        .unwrap()
        .encode("Hi<|320|>", false)
        .unwrap();
    assert_eq!(tokens.last(), Some(&320));
    assert_eq!(model.decode(&tokens, false).unwrap(), "Hi<|320|>");
    let (mut cache, mut logits) = (cache(&model), Vec::new());
    let mut forward = |tokens: &[u32]| {
        model.forward(
            tokens,
            &mut cache,
            &mut Scratch::new(),
            Logits::Last,
            &mut logits,
        )
    };
    forward(&tokens[..tokens.len() - 1]).unwrap();
    let at = format!("token 320 at index {}", tokens.len() - 1);
    for words in [at.as_str(), "vocabulary of 320", "'<|320|>'", "no row"] {
        expect_kind(forward(&tokens), ErrorKind::InvalidArgument, words);
    }
    expect_kind(
        model.decode(&[321], false),
        ErrorKind::InvalidArgument,
        "token 321 at index 0 is outside the vocabulary of 320",
    );
}

/// The tensors of a golden under other names, in a copy of it.
fn renamed(case: &str, name: impl Fn(&str) -> Option<String>) -> Copy {
    let dir = Copy::of(case, "renamed");
    let bytes = fs::read(golden(case).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter();
    let tensors = tensors.filter_map(|(old, view)| Some((name(&old)?, view)));
    let written = safetensors::serialize(tensors, None).unwrap();
    dir.write("model.safetensors", &written);
    dir
}

fn agrees(dir: &Copy, case: &str) {
    let model = Served::load(&dir.0, &options()).unwrap();
    for (tokens, want) in expected(case) {
        let got = run(&model, &tokens, Logits::All);
        for (a, b) in got[got.len() - want.len()..].iter().zip(&want) {
            assert!((a - b).abs() <= TOLERANCE, "{case}: {a} and {b}");
        }
    }
}

/// `AutoModel` saves no head, and names without `model.`. A tied table may stand under either of its names.
#[test]
fn models_saved_without_their_head_or_by_its_name() {
    agrees(
        &renamed("qwen3_tied", |name| {
            Some(name.strip_prefix("model.").unwrap_or(name).to_owned())
        }),
        "qwen3_tied",
    );
    agrees(
        &renamed("llama_tied", |name| {
            Some(name.replace("model.embed_tokens", "lm_head"))
        }),
        "llama_tied",
    );
}

/// In published files, the flags of a multimodal model and of its text model disagree: the content of the file decides.
#[test]
fn a_head_in_the_file_is_the_head_whatever_flags_say() {
    let flags = |dir: &Copy, outer: bool, inner: bool| {
        let path = dir.0.join("config.json");
        let mut text: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        text["tie_word_embeddings"] = json!(inner);
        let whole =
            json!({"model_type": "mistral3", "tie_word_embeddings": outer, "text_config": text});
        dir.write("config.json", whole.to_string().as_bytes());
    };
    for (case, tied, combinations) in [
        ("llama_tied", true, vec![(true, false), (false, true)]),
        (
            "mistral_plain",
            false,
            vec![(true, false), (false, true), (true, true)],
        ),
    ] {
        for (outer, inner) in combinations {
            let dir = Copy::of(case, "flags");
            flags(&dir, outer, inner);
            agrees(&dir, case);
            let model = Served::load(&dir.0, &options()).unwrap();
            assert_eq!(model.info().tied, tied, "{case}");
            assert_eq!(model.info().parameters, load(case).info().parameters);
            let source = NVFP4::model::training::Source::open(&dir.0).unwrap();
            let layout = source.layout();
            assert_eq!(layout.head == layout.embedding, tied, "{case}");
        }
    }
    let dir = Copy::of("mistral_plain", "flags");
    dir.weights(|name, d, s, b| (!name.starts_with("lm_head")).then_some((d, s, b)));
    flags(&dir, false, false);
    dir.refused(ErrorKind::NotFound, &["lm_head.weight"]);
}

/// A table that is stored under both names is trained as one, as transformers ties it.
#[test]
fn a_tied_table_that_is_stored_twice_is_trained_as_one() {
    let case = "llama_tied";
    let bytes = fs::read(golden(case).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let table = file.tensor("model.embed_tokens.weight").unwrap();
    let changed: Vec<u8> = table.data().iter().rev().copied().collect();
    let changed = TensorView::new(table.dtype(), table.shape().to_vec(), &changed).unwrap();
    for (head, tied) in [(&table, true), (&changed, false)] {
        let dir = Copy::of(case, "twice");
        let mut tensors = file.tensors();
        let head = TensorView::new(head.dtype(), head.shape().to_vec(), head.data()).unwrap();
        tensors.push(("lm_head.weight".to_owned(), head));
        let written = safetensors::serialize(tensors, None).unwrap();
        dir.write("model.safetensors", &written);
        let source = NVFP4::model::training::Source::open(&dir.0).unwrap();
        assert_eq!(source.spec().tied, tied);
        let layout = source.layout();
        assert_eq!(layout.head == layout.embedding, tied);
    }
}

#[test]
fn what_was_loaded() {
    let model = load("qwen3_tied");
    let info = model.info();
    assert_eq!((info.architecture, info.file_format), ("qwen3", "modelopt"));
    let text = model.describe();
    assert!(text.tokenizer && !text.chat_template && info.tied);
    assert_eq!(info.formats["bf16"].tensors, 1);
    assert_eq!(info.formats["nvfp4"].tensors, 14);
    assert_eq!(model.info().kv_bytes_per_token, 2 * 2 * 2 * 32 * 2);
    let stops = model.stop_tokens();
    assert_eq!(stops, [0, 2]);
    assert!(serde_json::to_string(info).unwrap().contains("\"nvfp4\""));
    assert_eq!(model.fingerprint(), load("qwen3_tied").fingerprint());
    assert_ne!(model.fingerprint(), load("qwen3_yarn").fingerprint());
    let e = load("llama_tied").tokenizer().unwrap_err();
    assert!(e.message().contains("tokenizer.json"), "{e}");
}

/// Each of these ended the process by a signal when files were mapped.
#[test]
fn a_file_that_shrinks_before_its_weights_are_read_is_an_error() {
    for case in ["qwen3_tied", "qwen3_untied"] {
        let whole = fs::metadata(golden(case).join("model.safetensors"))
            .unwrap()
            .len();
        for len in [0, 4096, whole / 2, whole - 1] {
            let dir = Copy::of(case, "shrinks");
            let path = dir.0.join("model.safetensors");
            let checkpoint = Arc::from(model::open(&dir.0).unwrap());
            cut(&path, len);
            let e = Served::from_checkpoint(checkpoint, &options()).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::CorruptFile, "{e}");
            for part in [path.to_str().unwrap(), "at offset", "after it was opened"] {
                assert!(e.message().contains(part), "'{part}' is not in: {e}");
            }
        }
    }
}

/// A checkpoint whose file is truncated after this many runs of rows have been read.
struct Shrinking {
    checkpoint: Box<dyn Checkpoint>,
    path: PathBuf,
    left: AtomicUsize,
}

impl Shrinking {
    fn count(&self) {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            cut(&self.path, 4096);
        }
    }
}

impl Checkpoint for Shrinking {
    fn format(&self) -> &'static str {
        self.checkpoint.format()
    }

    fn files(&self) -> Vec<&Path> {
        self.checkpoint.files()
    }

    fn entries(&self) -> &[Entry] {
        self.checkpoint.entries()
    }

    fn find(&self, name: &str) -> Option<&Entry> {
        self.checkpoint.find(name)
    }

    fn rows_f32(&self, entry: &Entry, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        self.count();
        self.checkpoint.rows_f32(entry, rows, out)
    }

    fn rows_nvfp4(
        &self,
        entry: &Entry,
        rows: Range<usize>,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<()> {
        self.count();
        self.checkpoint.rows_nvfp4(entry, rows, codes, scales)
    }

    fn global_scales(&self, entry: &Entry) -> Result<&[f32]> {
        self.checkpoint.global_scales(entry)
    }

    fn plain(&self, entry: &Entry) -> Option<Part<'_>> {
        self.checkpoint.plain(entry)
    }

    fn parts(&self, entry: &Entry) -> Result<Vec<Part<'_>>> {
        self.checkpoint.parts(entry)
    }

    fn read_part(&self, part: &Part<'_>, at: usize, out: &mut [u8]) -> Result<()> {
        self.checkpoint.read_part(part, at, out)
    }

    fn metadata(&self) -> &Metadata {
        self.checkpoint.metadata()
    }
}

#[test]
fn a_file_that_shrinks_while_its_weights_are_read_is_an_error() {
    for quantize in [None, Some(QuantizeOptions::default())] {
        // A model of two layers takes some thirty runs.
        for left in [1, 2, 7, 20] {
            let dir = Copy::of("qwen3_untied", "shrinking");
            let path = dir.0.join("model.safetensors");
            let checkpoint = Arc::new(Shrinking {
                checkpoint: model::open(&dir.0).unwrap(),
                path: path.clone(),
                left: AtomicUsize::new(left),
            });
            let options = LoadOptions {
                quantize: quantize.clone(),
                ..options()
            };
            let e = Served::from_checkpoint(checkpoint, &options).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::CorruptFile, "{e}");
            for part in [path.to_str().unwrap(), "at offset", "after it was opened"] {
                assert!(e.message().contains(part), "'{part}' is not in: {e}");
            }
        }
    }
}
