//! Whole models against the processor: golden ones, ones whose activations are massive, and ones that the environment names.

use std::path::Path;
use std::sync::Arc;

use NVFP4::base::ErrorKind;
use NVFP4::cuda::Gpu;
use NVFP4::engine::{NewTokens, Sequence, Served};
use NVFP4::format::nvfp4::QuantizeOptions;
use NVFP4::model::{Device, KvType, LoadOptions, Logits, Scratch, Wanted};
use NVFP4::ops::sample::Choice;
use NVFP4::session::{SamplingOptions, SessionOptions};
use half::bf16;
use safetensors::Dtype;

use crate::common::{
    Copy, DEVICE_CASES, LONG_CASES, MAMBA_CASES, RECURRENT_CASES, at_long_positions, change_tensor,
    golden, options, ragged, some_tokens, step_logits, step_tokens,
};
use crate::support::{
    as_f64, assert_close, coarseness, generated, gpu, load_on, logits, prompted, relative_l2,
};

/// Compares row by row, for models with experts: where two experts are about as probable, rounding decides which of them a row goes to,
/// and changes that row and, a little, the rows that see it. Nine of ten rows must be close, and the others no farther than `most`.
fn assert_rows_close(got: &[f32], want: &[f64], width: usize, [bar, most]: [f64; 2], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let rows = got.chunks_exact(width).zip(want.chunks_exact(width));
    let errors: Vec<f64> = rows.map(|(got, want)| relative_l2(got, want)).collect();
    let far = errors.iter().filter(|&&e| e > bar || e.is_nan()).count();
    let worst = errors.iter().fold(0f64, |worst, &e| worst.max(e));
    println!(
        "{what}: {far} of {} rows beyond {bar:e}, at most {worst:.2e}",
        errors.len()
    );
    assert!(
        far * 10 <= errors.len() && errors.iter().all(|&e| e <= most),
        "{what}: relative L2 of rows {errors:?}, at most {bar:e} of nine in ten"
    );
}

/// A golden model on the processor and on a GPU.
struct Pair {
    case: &'static str,
    cpu: Arc<Served>,
    model: Arc<Served>,
}

impl Pair {
    /// Loads a model; there is no pair if its heads are too small for a GPU, which refuses it.
    fn load(gpu: &Arc<Gpu>, case: &'static str, quantize: Option<QuantizeOptions>) -> Option<Pair> {
        let load = |device| {
            let options = LoadOptions {
                device,
                quantize: quantize.clone(),
                prefix_cache: false,
                ..options()
            };
            Served::load(&golden(case), &options)
        };
        let cpu = load(options().device).unwrap();
        let model = load(Device::Cuda(gpu.clone()));
        let attention = cpu.spec().blocks.iter().find_map(|b| b.attention());
        if attention.unwrap().head_dim < 32 {
            let error = model.unwrap_err();
            let refused = "head_dim must be one of [32, 64, 80, 96, 128, 192, 256, 512]";
            assert!(error.message().contains(refused), "{error}");
            return None;
        }
        let model = model.unwrap();
        Some(Pair { case, cpu, model })
    }

    fn assert_close(&self, got: &[f32], want: &[f64], bar: f64, what: &str) {
        let what = format!("{}, {what}", self.case);
        let bar = bar * coarseness(&self.model);
        let spec = self.cpu.spec();
        match spec.blocks.iter().any(|b| b.mlp.experts() > 0) {
            true => {
                // With four mixtures, a row may become another one altogether.
                let is_recurrent = spec.blocks.iter().any(|b| b.recurrent().is_some());
                let most = if is_recurrent { 1.0 } else { 0.3 };
                assert_rows_close(got, want, spec.vocab_size, [2.0 * bar, most], &what);
            }
            false => assert_close(got, want, bar, &what),
        }
    }

    /// Logits of the reference block on the GPU, some rows after others.
    fn reference(&self, tokens: &[u32]) -> Vec<f32> {
        let (model, mut reference) = (&self.model, Vec::new());
        let room = 4 * tokens.len();
        let mut cache = model.sequence(room, KvType::F16).unwrap();
        for part in tokens.chunks(37) {
            let (mut scratch, mut some) = (Scratch::new(), Vec::new());
            let work = vec![NewTokens {
                tokens: part,
                sequence: &mut cache,
                wanted: Wanted::All,
            }];
            let outputs = model.run_reference(work, &mut scratch, &mut some).unwrap();
            assert!(outputs.iter().all(Result::is_ok));
            reference.extend(some);
        }
        reference
    }

    /// Compares the reference block on the GPU with the processor, and fused kernels with both. Inputs of its products are rounded to f16,
    /// seven times a block, and so are keys and values.
    fn check(&self) {
        let tokens = some_tokens(&self.cpu, 60);
        let (want, _) = logits(&self.cpu, &tokens);
        let want = as_f64(&want);
        let reference = self.reference(&tokens);
        self.assert_close(&reference, &want, 3e-3, "operation by operation");
        let all = self.check_fused(&tokens, &want, 5e-3);
        self.assert_close(&all, &as_f64(&reference), 5e-3, "fused");
    }

    /// Compares fused kernels with the processor; gives the logits of one call.
    fn check_fused(&self, tokens: &[u32], want: &[f64], bar: f64) -> Vec<f32> {
        let (all, each) = logits(&self.model, tokens);
        self.assert_close(&all, want, bar, "one call");
        self.assert_close(&each, want, bar, "token by token");
        all
    }
}

#[test]
fn recurrent_models_agree_with_the_processor() {
    let Some(gpu) = gpu() else { return };
    for case in RECURRENT_CASES.into_iter().chain(MAMBA_CASES) {
        for quantize in [Some(QuantizeOptions::default()), None] {
            let pair = Pair::load(&gpu, case, quantize).unwrap();
            let tokens = some_tokens(&pair.cpu, 60);
            let (want, _) = logits(&pair.cpu, &tokens);
            // Twice as many blocks as the other models have, and norms of what heads answer, however small that is.
            pair.check_fused(&tokens, &as_f64(&want), 1e-2);
        }
    }
}

#[test]
fn models_agree_with_the_processor() {
    let Some(gpu) = gpu() else { return };
    let mut tested = 0;
    for case in DEVICE_CASES {
        for quantize in [Some(QuantizeOptions::default()), None] {
            let Some(pair) = Pair::load(&gpu, case, quantize) else {
                continue;
            };
            pair.check();
            tested += 1;
        }
    }
    assert_eq!(tested, 2 * 32, "models with heads that the GPU takes");
}

/// Far positions under every RoPE scaling, by the kernels of prompts and by those of a decode step.
#[test]
fn long_positions_agree_with_transformers() {
    let Some(gpu) = gpu() else { return };
    for case in LONG_CASES {
        let model = load_on(Device::Cuda(gpu.clone()), &golden(case));
        for last_alone in [false, true] {
            let check = |position: usize, got: &[f32], want: &[f32]| {
                let want = as_f64(want);
                let what = format!("{case}, position {position}, last alone: {last_alone}");
                println!("{what}: relative L2 {:.2e}", relative_l2(got, &want));
                assert_close(got, &want, 5e-3, &what);
            };
            at_long_positions(case, &model, KvType::F16, last_alone, check);
        }
    }
}

/// Sequences with room for long contexts and for short ones in one batch, which longrope rotates by different tables: each has the
/// logits, and the next tokens, that it has alone.
#[test]
fn long_and_short_sequences_share_a_batch() {
    let Some(gpu) = gpu() else { return };
    let model = load_on(Device::Cuda(gpu), &golden("long_longrope"));
    let tokens = some_tokens(&model, 12);
    let mut scratch = Scratch::new();
    // The scaling tells them apart at 16,384.
    let mut caches: Vec<Sequence> = [400, 20_000, 16_384, 16_385, 17_000]
        .iter()
        .map(|&room| model.sequence(room, KvType::F16).unwrap())
        .collect();
    let mut alone = Vec::new();
    for (i, cache) in caches.iter_mut().enumerate() {
        let (prompt, mut row) = (&tokens[..3 + i], Vec::new());
        for (tokens, wanted) in [(prompt, Logits::None), (&tokens[11..], Logits::Last)] {
            model
                .forward(tokens, cache, &mut scratch, wanted, &mut row)
                .unwrap();
        }
        cache.truncate(prompt.len()).unwrap();
        alone.push(row);
    }
    assert_ne!(alone[0], alone[1]);

    let next = vec![tokens[11]; caches.len()];
    let mut all: Vec<&mut Sequence> = caches.iter_mut().collect();
    let rows = step_logits(&model, &next, &mut all).unwrap();
    for (i, (got, want)) in rows.iter().zip(&alone).enumerate() {
        assert_close(got, &as_f64(want), 2e-3, &format!("sequence {i}"));
    }
    for cache in &mut all {
        cache.truncate(cache.len() - 1).unwrap();
    }
    let greedy = SamplingOptions::default();
    let choices = vec![greedily(&greedy); all.len()];
    let chosen = step_tokens(&model, &next, &mut all, &choices).unwrap();
    for (i, (&token, row)) in chosen.iter().zip(rows).enumerate() {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        assert_eq!(row[token as usize], max, "sequence {i}");
    }
}

fn greedily(options: &SamplingOptions) -> Choice<'_> {
    Choice {
        options,
        draw: 0,
        history: &[],
        allowed: None,
    }
}

/// A sequence that a model refuses to run.
struct Refused<'a> {
    model: &'a Served,
    cache: Sequence,
    scratch: Scratch,
    out: Vec<f32>,
}

impl<'a> Refused<'a> {
    fn new(model: &'a Served, room: usize) -> Refused<'a> {
        Refused {
            model,
            cache: model.sequence(room, KvType::F16).unwrap(),
            scratch: Scratch::new(),
            out: Vec::new(),
        }
    }

    /// Demands an error with these words, which leaves the cache and the logits empty.
    #[track_caller]
    fn run(&mut self, tokens: &[u32], words: &str) {
        let Refused {
            model,
            cache,
            scratch,
            out,
        } = self;
        let error = model
            .forward(tokens, cache, scratch, Logits::Last, out)
            .unwrap_err();
        assert!(error.message().contains(words), "{error}");
        assert_eq!((cache.len(), out.len()), (0, 0));
    }
}

/// A residual stream of 2e5, 3e6 between gate and down, keys of 500 and scores of a thousand (`qwen2_massive`) give the processor's logits
/// from a cache in f16, too. Keys that f16 does not hold are an error that names their layer, and the model is as good as new afterwards.
#[test]
fn massive_activations_fit_or_are_refused() {
    let Some(gpu) = gpu() else { return };
    let cpu = load_on(Device::cpu(None).unwrap(), &golden("qwen2_massive"));
    let model = load_on(Device::Cuda(gpu.clone()), &golden("qwen2_massive"));
    // The first token is the one that has them.
    let mut tokens = some_tokens(&cpu, 40);
    tokens[0] = 1;
    let (want, _) = logits(&cpu, &tokens);
    let (all, each) = logits(&model, &tokens);
    assert_both_close(&all, &each, &as_f64(&want), 1e-2, "massive activations");

    let dir = Copy::of("qwen2_massive", "unfit");
    let bias = "model.layers.1.self_attn.k_proj.bias";
    change_tensor(&dir, bias, |_, _, bytes| {
        bytes[..2].copy_from_slice(&bf16::from_f32(150_000.0).to_le_bytes());
    });
    let model = load_on(Device::Cuda(gpu), &dir.0);
    let words = "layer 1: a query, key or value";
    let mut refused = Refused::new(&model, 64);
    for part in [&tokens[..1], &tokens[..20]] {
        for _ in 0..2 {
            refused.run(part, words);
        }
    }
    let greedy = SamplingOptions::default();
    let choices = [greedily(&greedy)];
    let error = step_tokens(&model, &tokens[..1], &mut [&mut refused.cache], &choices).unwrap_err();
    assert!(error.message().contains(words), "{error}");
}

/// Decode steps and chunks of prompts in one pass: each slot has what its segment gives alone, up to rounding.
#[test]
fn ragged_batches_give_what_segments_give_apart() {
    let Some(gpu) = gpu() else { return };
    let mut tested = 0;
    // Rounding sends some rows of a mixture to other experts.
    let mixtures = ["moe", "gptoss", "beside", "mixtral", "solaropen", "minimax"];
    for case in DEVICE_CASES
        .into_iter()
        .filter(|case| !mixtures.iter().any(|name| case.contains(name)))
    {
        let Some(Pair { model, .. }) = Pair::load(&gpu, case, None) else {
            continue;
        };
        tested += 1;
        let same = |got: &[f32], expected: &[f32], what: &str| match expected.is_empty() {
            true => {}
            false => {
                let bar = 3e-3 * coarseness(&model);
                assert_close(got, &as_f64(expected), bar, &format!("{case}, {what}"));
            }
        };
        ragged::check(&model, &[KvType::F16], Some(1e-2), &same);
    }
    assert!(tested >= 6, "{tested} models with heads that the GPU takes");
}

/// Batches of sequences in 8 bits, alone and with others in f16. Both the reference block and fused kernels round keys and values to codes, but
/// not the same ones where they differ a little. Models whose heads have no kernels are refused in one line.
#[test]
fn models_with_keys_and_values_in_8_bits() {
    let Some(gpu) = gpu() else { return };
    let (mut tested, mut refused) = (0, 0);
    for case in DEVICE_CASES {
        let Some(Pair { model, cpu, .. }) = Pair::load(&gpu, case, None) else {
            continue;
        };
        if let Err(e) = model.sequence(64, KvType::F8) {
            refused += 1;
            assert_eq!(e.kind(), ErrorKind::Unsupported, "{case}: {e}");
            for part in ["keys and values as f8 on", "keep them as f16"] {
                assert!(e.message().contains(part), "{case}: {e}");
            }
            continue;
        }
        tested += 1;
        let run = |model: &Served, kv| {
            let tokens = some_tokens(&cpu, 60);
            let mut cache = model.sequence(64, kv).unwrap();
            let (mut scratch, mut out, mut all) = (Scratch::new(), Vec::new(), Vec::new());
            for part in [&tokens[..37], &tokens[37..59], &tokens[59..]] {
                let (cache, scratch) = (&mut cache, &mut scratch);
                model
                    .forward(part, cache, scratch, Logits::All, &mut out)
                    .unwrap();
                all.extend_from_slice(&out);
            }
            all
        };
        let (want, got) = (run(&cpu, KvType::F8), run(&model, KvType::F8));
        // Rounding sends some rows of a mixture to other experts.
        if cpu.spec().blocks.iter().any(|b| b.mlp.experts() > 0) {
            continue;
        }
        // Where inputs differ a little, some values round to the code beside, and change logits by a share of what rounding costs at all.
        let cost = relative_l2(&want, &as_f64(&run(&cpu, KvType::F32)));
        let near = 2e-2 * coarseness(&model);
        assert_close(&got, &as_f64(&want), near.max(0.5 * cost), case);
        let same = |got: &[f32], expected: &[f32], what: &str| match expected.is_empty() {
            true => {}
            false => assert_close(got, &as_f64(expected), near, &format!("{case}, {what}")),
        };
        for kv in [&[KvType::F8][..], &[KvType::F8, KvType::F16]] {
            ragged::check(&model, kv, Some(2e-2), &same);
        }
    }
    assert!(tested >= 2 && refused >= 1, "{tested} and {refused} models");
}

/// A row with values that f16 does not hold is the fault of its slot alone, in a decode step and beside a chunk of a prompt.
#[test]
fn a_fault_of_a_slot_leaves_the_others_alone() {
    let Some(gpu) = gpu() else { return };
    let dir = ragged::spoil(ragged::ODD);
    let model = load_on(Device::Cuda(gpu), &dir.0);
    ragged::check_faults(
        &model,
        "layer 0: a query, key or value",
        &|got, expected, what| {
            assert_close(got, &as_f64(expected), 3e-3, what);
        },
    );
}

/// Multiplies the gate and up projections of a layer in NVFP4 by a power of two.
fn enlarge_gate_and_up(dir: &Copy, layer: usize, power: i32) {
    for projection in ["gate_proj", "up_proj"] {
        let name = format!("model.layers.{layer}.mlp.{projection}.weight_scale_2");
        change_tensor(dir, &name, |dtype, _, bytes| {
            assert_eq!(dtype, Dtype::F32);
            let global = f32::from_le_bytes((&*bytes).try_into().unwrap());
            bytes.copy_from_slice(&(2f32.powi(power) * global).to_le_bytes());
        });
    }
}

/// Gate and up projections beyond f16: fused kernels keep them in f32, and a prompt of more rows, for which they are stored as f16, is
/// an error that names the layer, after which all is well.
#[test]
fn gate_and_up_that_overflow_are_refused() {
    let Some(gpu) = gpu() else { return };
    let dir = Copy::of("qwen2_massive", "overflow");
    enlarge_gate_and_up(&dir, 1, 18);
    let cpu = load_on(Device::cpu(None).unwrap(), &dir.0);
    let model = load_on(Device::Cuda(gpu), &dir.0);
    let tokens = some_tokens(&cpu, 200);
    let mut refused = Refused::new(&model, 256);
    for _ in 0..2 {
        let words = "layer 1: a gate or up projection reaches beyond 65,504";
        refused.run(&tokens, words);

        let few = &tokens[..20];
        let (want, _) = logits(&cpu, few);
        let want = as_f64(&want);
        let (all, each) = logits(&model, few);
        assert_close(&all, &want, 1e-2, "20 rows");
        assert_close(&each, &want, 1e-2, "row by row");
    }
}

/// The error of blocks without a norm before their halves.
fn beyond_f16(layer: usize) -> String {
    format!(
        "layer {layer}: the residual stream, a gate or up projection, or 1/16 of their product,"
    )
}

/// A residual stream beyond f16, which blocks without a norm before their halves take, is an error that names the layer, after which all is
/// well.
#[test]
fn residual_streams_that_overflow_are_refused() {
    let Some(gpu) = gpu() else { return };
    let dir = Copy::of("exaone4_mixed", "stream");
    let name = "model.embed_tokens.weight";
    change_tensor(&dir, name, |dtype, shape, bytes| {
        assert_eq!((dtype, shape), (Dtype::BF16, &[150, 48][..]));
        for (token, value) in [(1, -100_000.0), (2, 500.0)] {
            let at = 2 * (token * 48 + 5);
            bytes[at..at + 2].copy_from_slice(&bf16::from_f32(value).to_le_bytes());
        }
    });
    let cpu = load_on(Device::cpu(None).unwrap(), &dir.0);
    let model = load_on(Device::Cuda(gpu), &dir.0);
    let mut tokens: Vec<u32> = (0..40).map(|i| 3 + 7 * i % 140).collect();
    tokens[9] = 2;
    let (want, _) = logits(&cpu, &tokens);
    let mut refused = Refused::new(&model, 64);
    for _ in 0..2 {
        let (all, each) = logits(&model, &tokens);
        assert_both_close(&all, &each, &as_f64(&want), 1e-2, "a large row");
        for odd in [0, 17] {
            let mut odd_tokens = tokens.clone();
            odd_tokens[odd] = 1;
            refused.run(&odd_tokens, &beyond_f16(0));
            refused.run(&[1], &beyond_f16(0));
        }
    }
}

/// Products of gate and up beyond f16 in the last layer, whose input no norm bounds, are an error that names it, in prompts of few and of
/// many rows and in single tokens. Gate and up themselves reach 5,400, and the products of each row at least 3e6.
#[test]
fn products_of_gate_and_up_that_overflow_are_refused() {
    let Some(gpu) = gpu() else { return };
    let dir = Copy::of("exaone4_mixed", "product");
    enlarge_gate_and_up(&dir, 3, 8);
    let model = load_on(Device::Cuda(gpu), &dir.0);
    let tokens: Vec<u32> = (0..200).map(|i| 3 + 7 * (i % 40) % 140).collect();
    let mut refused = Refused::new(&model, 256);
    for _ in 0..2 {
        for part in [&tokens[..], &tokens[..40], &tokens[..1]] {
            refused.run(part, &beyond_f16(3));
        }
    }
}

/// Compares logits of one call, and of one call for each token, after it has printed how far both are.
#[track_caller]
fn assert_both_close(all: &[f32], each: &[f32], want: &[f64], bar: f64, what: &str) {
    let both = [("one call", all), ("token by token", each)];
    for (how, got) in both {
        println!("{what}, {how}: relative L2 {:.2e}", relative_l2(got, want));
    }
    for (how, got) in both {
        assert_close(got, want, bar, &format!("{what}, {how}"));
    }
}

/// Models named in NVFP4_TEST_MODELS, separated by colons: real ones, or of a real size.
#[test]
fn named_models_agree_with_the_processor() {
    let Some(gpu) = gpu() else { return };
    let Ok(paths) = std::env::var("NVFP4_TEST_MODELS") else {
        println!("SKIPPED NVFP4_TEST_MODELS names no model");
        return;
    };
    for path in paths.split(':') {
        let load = |device| Served::load(path.as_ref(), &LoadOptions::new(device)).unwrap();
        let cpu = load(Device::cpu(None).unwrap());
        let tokens = some_tokens(&cpu, 70);
        let (want, _) = logits(&cpu, &tokens);
        drop(cpu);
        let (all, each) = logits(&load(Device::Cuda(gpu.clone())), &tokens);
        assert_both_close(&all, &each, &as_f64(&want), 5e-3, path);
    }
}

/// A model's greedy answers to the prompts of the SmolLM2 test, each with the tokens of its prompt.
fn answers(model: &Arc<Served>, prompts: &[String]) -> Vec<(Vec<u32>, Vec<u32>)> {
    let greedy = SamplingOptions::default();
    let answer = |prompt: &String| {
        let prompt = model.tokenizer().unwrap().encode(prompt, true).unwrap();
        let mut session = prompted(model, &SessionOptions::default(), &prompt);
        let answer = generated(&mut session, 64, &greedy);
        (prompt, answer)
    };
    prompts.iter().map(answer).collect()
}

/// The distance of the two largest logits where two answers part, or nothing if they do not.
fn parting(model: &Arc<Served>, prompt: &[u32], one: &[u32], other: &[u32]) -> Option<f32> {
    let at = one.iter().zip(other).position(|(a, b)| a != b)?;
    let before = [prompt, &one[..at]].concat();
    let mut session = prompted(model, &SessionOptions::default(), &before);
    let logits = session.logits().unwrap();
    Some((logits[one[at] as usize] - logits[other[at] as usize]).abs())
}

#[test]
fn greedy_tokens_of_a_named_model_agree_or_part_at_a_tie() {
    let Some(gpu) = gpu() else { return };
    let Ok(path) = std::env::var("NVFP4_TEST_CHAT_MODEL") else {
        println!("SKIPPED NVFP4_TEST_CHAT_MODEL names no model");
        return;
    };
    let prompts = include_str!("../smollm2/prompts.json");
    let prompts: Vec<String> = serde_json::from_str(prompts).unwrap();
    // As stored and, if that is dense, as NVFP4.
    for quantize in [Some(QuantizeOptions::default()), None] {
        let load = |device| {
            let options = LoadOptions {
                device,
                quantize: quantize.clone(),
                prefix_cache: false,
                ..options()
            };
            Served::load(Path::new(&path), &options).unwrap()
        };
        let cpu = load(Device::cpu(None).unwrap());
        let model = load(Device::Cuda(gpu.clone()));
        let (want, got) = (answers(&cpu, &prompts), answers(&model, &prompts));
        assert!(
            got == answers(&model, &prompts),
            "two runs on the GPU differ"
        );
        let mut parted = 0;
        for ((prompt, want), (_, got)) in want.iter().zip(&got) {
            if let Some(gap) = parting(&cpu, prompt, want, got) {
                println!("an answer parts where the two logits are {gap:.1e} apart");
                assert!(gap <= 1e-2, "answers part at no tie: {gap}");
                parted += 1;
            }
        }
        let all = want.len();
        println!("{} of {all} answers of 64 tokens agree", all - parted);
    }
}
