//! Memory that is known before a model is loaded on a GPU, against the accounts once it is loaded and has run. Counts memory, which needs a
//! process of its own; nextest provides one.

use std::path::Path;
use std::sync::Arc;

use NVFP4::base::ErrorKind;
use NVFP4::base::memory::{self, Tag};
use NVFP4::engine::capacity::{PlanOptions, plan};
use NVFP4::engine::{NewTokens, Sequence, Served};
use NVFP4::model::{
    Choice, Device, KvType, LoadOptions, SamplingOptions, Scratch, TokenMask, Tuning, Wanted,
};

use crate::common::{
    DEVICE_CASES, GEMMA4_CASES, MAMBA_CASES, RECURRENT_CASES, expect_kind, golden, options,
    some_tokens,
};
use crate::support::gpu;

/// The golden models of all families.
fn cases() -> impl Iterator<Item = &'static str> {
    let cases = DEVICE_CASES.into_iter().chain(RECURRENT_CASES);
    cases.chain(MAMBA_CASES).chain(GEMMA4_CASES)
}

fn used(tag: Tag) -> u64 {
    memory::usage(tag).current
}

/// Whether `used` bytes are at most one in a hundred fewer than `planned`, and none more.
#[track_caller]
fn check_within(used: u64, planned: u64, what: &str) {
    println!("{what}: {used} of {planned}");
    assert!(used <= planned, "{what}: {used} of {planned}");
    assert!(used * 100 >= planned * 99, "{what}: {used} of {planned}");
}

/// Runs tokens of several sequences in one pass, and chooses one after each by `options`, by a mask of all.
fn run(model: &Served, sequences: &mut [Sequence], tokens: &[u32], options: &SamplingOptions) {
    let all = vec![u32::MAX; model.spec().vocab_size.div_ceil(32)];
    let work = sequences.iter_mut().map(|sequence| NewTokens {
        tokens,
        sequence,
        wanted: Wanted::Token(Choice {
            options,
            draw: 7,
            history: tokens,
            allowed: Some(TokenMask(&all)),
        }),
    });
    let outputs = model.run(work.collect(), false, &mut Scratch::new(), &mut Vec::new());
    outputs.unwrap().into_iter().for_each(|o| drop(o.unwrap()));
}

/// The model on the GPU, if the GPU has kernels for it; plans fail as loading does.
fn load(path: &Path, load: &LoadOptions) -> Option<Arc<Served>> {
    match Served::load(path, load) {
        Ok(model) => Some(model),
        Err(e) => {
            assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
            None
        }
    }
}

/// Weights and tables take the planned bytes. Working memory does so after prompts of three sequences and a step with draws, penalties and masks.
#[test]
fn weights_and_working_memory_are_what_is_planned() {
    const COUNT: usize = 3;
    let Some(gpu) = gpu() else { return };
    let mut loaded = 0;
    for case in cases() {
        let on_gpu = LoadOptions {
            device: Device::Cuda(gpu.clone()),
            ..options()
        };
        let context = 100;
        let wanted = PlanOptions {
            sequences: COUNT,
            context: Some(context),
            ..PlanOptions::default()
        };
        gpu.empty_cache().unwrap();
        let before = [Tag::DeviceWeights, Tag::Weights, Tag::DeviceScratch].map(used);
        let planned = plan(&golden(case), &on_gpu, &wanted);
        let Some(model) = load(&golden(case), &on_gpu) else {
            continue;
        };
        loaded += 1;
        let planned = planned.unwrap();
        let [weights, tables, scratch] = before;
        assert_eq!(
            used(Tag::DeviceWeights) - weights,
            planned.weights.device,
            "{case}"
        );
        assert_eq!(used(Tag::Weights) - tables, planned.weights.host, "{case}");

        let each = (0..COUNT).map(|_| model.sequence(context, KvType::F16).unwrap());
        let mut all: Vec<Sequence> = each.collect();
        let tokens = some_tokens(&model, context);
        let drawn = SamplingOptions {
            temperature: 1.0,
            repetition_penalty: 1.1,
            ..SamplingOptions::default()
        };
        run(
            &model,
            &mut all,
            &tokens[..context - 2],
            &SamplingOptions::default(),
        );
        run(&model, &mut all, &tokens[..1], &drawn);
        let rows = COUNT * (context - 2);
        let most = planned.workspace.device * rows as u64 / (COUNT * context) as u64;
        let held = used(Tag::DeviceScratch) - scratch;
        println!("{case}: {held} of {}", planned.workspace.device);
        assert!(
            held <= planned.workspace.device,
            "{case}: {held} of {planned:?}"
        );
        assert!(held * 100 >= most * 99, "{case}: {held} of {planned:?}");
    }
    assert!(loaded >= 20, "{loaded} models");
}

/// Where all prompts run beside steps, working memory for that is planned, and taken when a model is loaded.
#[test]
fn prompts_beside_steps_take_what_is_planned() {
    let Some(gpu) = gpu() else { return };
    for case in ["qwen3_tied", "qwen35_tied"] {
        let [without, with] = [Tuning::Throughput, Tuning::Latency].map(|tuning| {
            let how = LoadOptions {
                device: Device::Cuda(gpu.clone()),
                tuning,
                ..options()
            };
            let wanted = PlanOptions {
                context: Some(100),
                ..PlanOptions::default()
            };
            let planned = plan(&golden(case), &how, &wanted).unwrap();
            let before = used(Tag::DeviceScratch);
            let model = load(&golden(case), &how).unwrap();
            let is_beside = model.model().rows_beside().is_some();
            let taken = used(Tag::DeviceScratch) - before;
            (planned.workspace.device, taken, is_beside)
        });
        let (planned, taken) = (with.0 - without.0, with.1 - without.1);
        check_within(taken, planned, case);
        assert_eq!(planned > 0, with.2, "{case}");
    }
}

/// The planned conversations come to their ends in the planned bytes, and one more does not.
#[test]
fn conversations_fill_what_is_planned() {
    const COUNT: usize = 3;
    let Some(gpu) = gpu() else { return };
    for case in [
        "qwen3_tied",
        "gemma3_wide",
        "llama_wide",
        "qwen35_tied",
        "nemotronh_dense",
    ] {
        let on_gpu = |kv_bytes: Option<usize>| LoadOptions {
            device: Device::Cuda(gpu.clone()),
            kv_bytes,
            ..options()
        };
        let context = 192;
        let wanted = PlanOptions {
            sequences: COUNT,
            context: Some(context),
            ..PlanOptions::default()
        };
        let planned = plan(&golden(case), &on_gpu(None), &wanted).unwrap();
        let reserved = on_gpu(Some(planned.kv_bytes as usize));
        let Some(model) = load(&golden(case), &reserved) else {
            continue;
        };
        check_within(used(Tag::DeviceKvCache), planned.kv_bytes, case);
        let each = (0..COUNT).map(|_| model.sequence(context, KvType::F16).unwrap());
        let mut all: Vec<Sequence> = each.collect();
        let tokens = some_tokens(&model, context);
        let greedy = SamplingOptions::default();
        // Five turns, so that recurrent layers keep as many states as they may.
        for turn in 0..6 {
            let count = (context - turn * 32).min(30);
            run(&model, &mut all, &tokens[..count], &greedy);
            for _ in 0..2 {
                run(&model, &mut all, &tokens[..1], &greedy);
            }
        }
        assert!(all.iter().all(|sequence| sequence.room() == 0), "{case}");
        if planned.blocks.state_bytes > 0 {
            // Blocks of the states of steps ahead are left.
            continue;
        }
        let mut more = model.sequence(context, KvType::F16).unwrap();
        let failed = model.forward(
            &tokens,
            &mut more,
            &mut Scratch::new(),
            NVFP4::model::Logits::Last,
            &mut Vec::new(),
        );
        expect_kind(failed, ErrorKind::OutOfMemory, "reserved");
    }
}
