//! Memory that is known before a model is loaded, against the accounts once it is loaded and has run. Counts memory, which needs a process of
//! its own; nextest provides one.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use NVFP4::base::memory::{self, Tag};
use NVFP4::base::{ErrorKind, Result};
use NVFP4::engine::capacity::{Plan, PlanOptions, plan};
use NVFP4::engine::{NewTokens, Sequence, Served};
use NVFP4::format::nvfp4::QuantizeOptions;
use NVFP4::model::{Activations, KvType, LoadOptions, Scratch, Wanted, families, tensors};
use common::{Copy, change_tensor, expect_kind, gguf, golden, options, some_tokens};
use serde_json::json;

/// The golden models of all families and formats.
fn all_goldens() -> Vec<PathBuf> {
    let entries = |folder: &str| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let entries = fs::read_dir(root.join(folder)).unwrap();
        entries.map(|entry| entry.unwrap().path())
    };
    let directories = entries("model").filter(|path| path.join("config.json").exists());
    let files = entries("gguf").filter(|path| path.extension().is_some_and(|e| e == "gguf"));
    let mut all: Vec<PathBuf> = directories.chain(files).collect();
    all.sort();
    assert!(all.len() > 60, "{}", all.len());
    all
}

/// As stored, and with dense weights quantized.
fn ways() -> [LoadOptions; 2] {
    let quantize = Some(QuantizeOptions::default());
    [
        options(),
        LoadOptions {
            quantize,
            ..options()
        },
    ]
}

fn used(tag: Tag) -> u64 {
    memory::usage(tag).current
}

/// Runs tokens of several sequences in one pass.
fn run(model: &Served, sequences: &mut [Sequence], tokens: &[u32], scratch: &mut Scratch) {
    let work = sequences.iter_mut().map(|sequence| NewTokens {
        tokens,
        sequence,
        wanted: Wanted::Last,
    });
    let outputs = model.run(work.collect(), false, scratch, &mut Vec::new());
    outputs.unwrap().into_iter().for_each(|o| drop(o.unwrap()));
}

fn sequences(model: &Served, count: usize, context: usize, kv: KvType) -> Vec<Sequence> {
    let each = (0..count).map(|_| model.sequence(context, kv).unwrap());
    each.collect()
}

/// Bytes of weights are those of the accounts, and what loading takes is within the bound.
#[test]
fn weights_take_what_is_planned() {
    for path in all_goldens() {
        for load in ways() {
            let name = path.display();
            let before = (used(Tag::Weights), memory::total().current);
            let plan = plan(&path, &load, &PlanOptions::default()).unwrap();
            assert_eq!(memory::total().current, before.1, "{name}");
            memory::reset_peak();
            let model = Served::load(&path, &load).unwrap();
            let peak = memory::total().peak - before.1;
            assert_eq!(used(Tag::Weights) - before.0, plan.weights.host, "{name}");
            assert_eq!(plan.weights.host, model.info().weight_bytes, "{name}");
            assert_eq!(plan.weights.device, 0, "{name}");
            assert!(peak <= plan.load_peak.host, "{name}: {peak}, {plan:?}");
        }
    }
}

/// A thread checks the values of a table that stays in its file while another makes the last weight.
#[test]
fn checking_a_table_is_planned() {
    let plan = plan(
        &gguf("gemma4_perlayer"),
        &options(),
        &PlanOptions::default(),
    )
    .unwrap();
    let working = (plan.load_peak.host - plan.weights.host) / 2;
    let file = families::open(&gguf("gemma4_perlayer")).unwrap();
    let table = file.find("model.embed_tokens_per_layer.weight").unwrap();
    let bytes = 4 * table.shape.iter().product::<usize>() as u64;
    assert!(working >= bytes, "{working} planned, {bytes} of the table");
}

/// Without layers, only the tables count.
#[test]
fn models_for_sampling_only_take_what_is_planned() {
    for case in [
        "qwen3_tied",
        "qwen3_untied",
        "gemma4_perlayer",
        "qwen35_drafter",
    ] {
        let load = LoadOptions {
            sampling_only: true,
            ..options()
        };
        let planned = plan(&golden(case), &load, &PlanOptions::default()).unwrap();
        let before = used(Tag::Weights);
        let model = Served::load(&golden(case), &load).unwrap();
        assert_eq!(used(Tag::Weights) - before, planned.weights.host, "{case}");
        drop(model);
    }
}

/// Prompts of several sequences in one pass, and steps after them.
#[test]
fn working_memory_is_what_is_planned() {
    const COUNT: usize = 3;
    for path in all_goldens() {
        for activations in [Activations::Exact, Activations::Int8] {
            let name = path.display();
            let load = LoadOptions {
                activations,
                ..options()
            };
            let wanted = |context| PlanOptions {
                sequences: COUNT,
                context: Some(context),
                ..PlanOptions::default()
            };
            let context = 100;
            let planned = plan(&path, &load, &wanted(context)).unwrap();
            let model = Served::load(&path, &load).unwrap();
            let mut all = sequences(&model, COUNT, context, KvType::F16);
            for sequence in all.iter_mut().filter(|_| model.has_drafter()) {
                sequence.set_drafts(true).unwrap();
            }
            let before = used(Tag::Scratch);
            memory::reset_peak();
            let mut scratch = Scratch::new();
            let tokens = some_tokens(&model, context);
            for token in &tokens[..2] {
                run(&model, &mut all, &[*token], &mut scratch);
            }
            let steps = memory::usage(Tag::Scratch).peak - before;
            assert!(steps <= planned.step_workspace.host, "{name}: {steps}");
            let of_prompt = context - 4;
            run(&model, &mut all, &tokens[..of_prompt], &mut scratch);
            for token in &tokens[..2] {
                run(&model, &mut all, &[*token], &mut scratch);
            }
            let peak = memory::usage(Tag::Scratch).peak - before;
            let most = planned.workspace.host;
            println!("{name}, {activations:?}: {peak} of {most}, {steps} for steps");
            assert!(peak <= most, "{name}: {peak} of {most}");
            assert!(peak * 10 >= most * 9, "{name}: {peak} of {most}");
        }
    }
}

/// Brings an empty sequence to its capacity in turns of a prompt and steps, so that it keeps as many earlier states as it may.
fn fill(model: &Served, sequence: &mut Sequence, turn: usize) -> Result<()> {
    let mut scratch = Scratch::new();
    let mut run = |sequence: &mut Sequence, count: usize| {
        let tokens = some_tokens(model, count);
        let work = vec![NewTokens {
            tokens: &tokens,
            sequence,
            wanted: Wanted::Last,
        }];
        let outputs = model.run(work, false, &mut scratch, &mut Vec::new())?;
        outputs.into_iter().try_for_each(|output| output.map(drop))
    };
    while sequence.room() > 2 {
        run(sequence, turn.min(sequence.room() - 2))?;
        run(sequence, 1)?;
        run(sequence, 1)?;
    }
    Ok(())
}

fn load_with(path: &Path, kv_bytes: u64) -> Arc<Served> {
    let load = LoadOptions {
        kv_bytes: Some(kv_bytes as usize),
        ..options()
    };
    Served::load(path, &load).unwrap()
}

/// The planned conversations come to their ends in the planned bytes, and one more does not.
#[test]
fn conversations_fill_what_is_planned() {
    const COUNT: usize = 2;
    for path in all_goldens() {
        for kv in [KvType::F16, KvType::F32] {
            let context = 64;
            let planned = plan(
                &path,
                &options(),
                &PlanOptions {
                    sequences: COUNT,
                    context: Some(context),
                    kv,
                    ..PlanOptions::default()
                },
            );
            check_conversations(&path, &planned.unwrap(), kv, 10);
        }
    }
}

/// Windows free what they have passed, in prompts that are longer than a pass too.
#[test]
fn conversations_with_windows_fill_what_is_planned() {
    for (case, turn) in [
        ("long_default", 1000),
        ("long_local", 100),
        ("long_recurrent", 300),
    ] {
        let wanted = PlanOptions {
            sequences: 3,
            context: Some(2500),
            ..PlanOptions::default()
        };
        let planned = plan(&golden(case), &options(), &wanted).unwrap();
        let all = planned.blocks.block_bytes() * (2500_u64).div_ceil(16);
        let has_windows = planned.blocks.groups.iter().any(|g| g.window.is_some());
        assert_eq!(
            planned.sequence_bytes - planned.sequence_state_bytes < all,
            has_windows,
            "{case}"
        );
        check_conversations(&golden(case), &planned, KvType::F16, turn);
    }
}

fn check_conversations(path: &Path, planned: &Plan, kv: KvType, turn: usize) {
    let (name, context) = (path.display(), planned.context);
    let model = load_with(path, planned.kv_bytes);
    let mut all = sequences(&model, planned.sequences, context, kv);
    for sequence in &mut all {
        fill(&model, sequence, turn).unwrap();
        let bytes = sequence.bytes() as u64;
        let most = planned.sequence_bytes;
        assert!(bytes <= most, "{name}, {kv:?}: {bytes} of {most}");
        if planned
            .blocks
            .groups
            .iter()
            .all(|group| group.window.is_none())
        {
            assert_eq!(bytes, most, "{name}, {kv:?}");
        }
    }
    let mut more = sequences(&model, 1, context, kv);
    let failed = fill(&model, &mut more[0], turn);
    expect_kind(
        failed,
        ErrorKind::OutOfMemory,
        "reserved for keys and values",
    );
}

/// The number of conversations that fit is that of which the parts of the plan fit.
#[test]
fn conversations_fit_by_the_parts_of_the_plan() {
    for case in [
        "qwen3_tied",
        "gemma3_wide",
        "qwen35_drafter",
        "qwen3moe_mixed",
    ] {
        let of = |sequences: usize, budget: Option<u64>, kv_bytes: Option<usize>| {
            let load = LoadOptions {
                kv_bytes,
                ..options()
            };
            let wanted = PlanOptions {
                sequences,
                context: Some(100),
                budget,
                ..PlanOptions::default()
            };
            plan(&golden(case), &load, &wanted).unwrap()
        };
        let (one, five) = (of(1, None, None), of(5, None, None));
        let own = five.weights.host + five.workspace.host + five.kv_bytes;
        // Each session that runs prompts keeps working memory.
        let needs = own + 4 * one.workspace.host;
        for (bytes, fit) in [(needs, 5), (needs - 1, 4), (five.weights.host, 0)] {
            assert_eq!(
                of(1, Some(bytes), None).sequences_that_fit,
                Some(fit),
                "{case}"
            );
        }
        let reserved = Some(five.kv_bytes as usize);
        assert_eq!(
            of(1, Some(1 << 40), reserved).sequences_that_fit,
            Some(5),
            "{case}"
        );
        memory::set_budget(Some(memory::total().current + needs));
        let fit = of(1, Some(1 << 40), None).sequences_that_fit;
        memory::set_budget(None);
        assert_eq!(fit, Some(5), "{case}");
        assert!(one.free_bytes.unwrap() > 0);
    }
}

/// A file of 8 GB without contents: its header is all that is read.
#[test]
fn large_models_are_planned_from_their_headers() {
    let config = json!({
        "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960,
        "tie_word_embeddings": true
    });
    let spec = families::read(&config).unwrap();
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape, _) in tensors::stored(&spec) {
        let bytes = 2 * shape.iter().product::<usize>();
        let offsets = [end, end + bytes];
        header.insert(
            name,
            json!({"dtype": "BF16", "shape": shape, "data_offsets": offsets}),
        );
        end += bytes;
    }
    let header = serde_json::to_vec(&header).unwrap();
    let dir = Copy::of("qwen3_tied", "sparse");
    dir.write("config.json", config.to_string().as_bytes());
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(&header);
    dir.write("model.safetensors", &file);
    let path = dir.0.join("model.safetensors");
    let sparse = fs::OpenOptions::new().write(true).open(path).unwrap();
    sparse.set_len((file.len() + end) as u64).unwrap();
    assert!(end > 8_000_000_000, "{end}");

    let quantized = &ways()[1];
    let wanted = PlanOptions {
        sequences: 64,
        context: Some(4096),
        ..PlanOptions::default()
    };
    let (read, start) = (bytes_read(), Instant::now());
    let planned = plan(&dir.0, quantized, &wanted).unwrap();
    let (read, time) = (bytes_read() - read, start.elapsed());
    println!("{time:?}, {read} bytes read: {planned:?}");
    assert!(read < 1 << 20, "{read} bytes read");
    assert!(time < Duration::from_secs(1), "{time:?}");
    assert_eq!(planned.kv_bytes_per_token, 147_456);
    assert_eq!(planned.kv_bytes, 64 * 4096 * 147_456);
    // 4.5 bits a weight, with f32 norms and padding of few rows.
    let weights: usize = tensors::stored(&spec)
        .iter()
        .map(|(_, shape, _)| shape.iter().product::<usize>())
        .sum();
    let ratio = planned.weights.host as f64 / (weights as f64 * 4.5 / 8.0);
    assert!((1.0..1.001).contains(&ratio), "{ratio}");
}

/// Bytes that this process has read from files.
fn bytes_read() -> u64 {
    let io = fs::read_to_string("/proc/self/io").unwrap();
    let read = io.lines().find_map(|line| line.strip_prefix("rchar: "));
    read.unwrap().parse().unwrap()
}

/// Values are not read, so that their faults are found by loading alone.
#[test]
fn values_are_not_read() {
    let dir = Copy::of("qwen3_untied", "infinite");
    change_tensor(&dir, "model.norm.weight", |_, _, bytes| bytes.fill(0xff));
    let wanted = PlanOptions {
        budget: Some(1 << 30),
        ..PlanOptions::default()
    };
    let of = |path: &Path| plan(path, &options(), &wanted);
    assert_eq!(of(&dir.0).unwrap(), of(&golden("qwen3_untied")).unwrap());
    assert!(Served::load(&dir.0, &options()).is_err());
}

/// A plan fails with the error of loading where headers are wrong.
#[test]
fn plans_fail_as_loading_does() {
    let of = |path: &Path, wanted: &PlanOptions| plan(path, &options(), wanted);
    let default = PlanOptions::default();
    let without = Copy::of("qwen3_untied", "without");
    let config = fs::read_to_string(without.0.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["num_hidden_layers"] = json!(40);
    without.write("config.json", config.to_string().as_bytes());
    for path in [without.0.as_path(), Path::new("/nowhere")] {
        let (planned, loaded) = (of(path, &default), Served::load(path, &options()));
        assert_eq!(
            planned.unwrap_err().to_string(),
            loaded.unwrap_err().to_string()
        );
    }
    let path = golden("qwen3_tied");
    for (context, words) in [(0, "a context of 0 positions"), (9999, "made for 1 to 256")] {
        let wanted = PlanOptions {
            context: Some(context),
            ..default
        };
        expect_kind(of(&path, &wanted), ErrorKind::InvalidArgument, words);
    }
    let none = PlanOptions {
        sequences: 0,
        ..default
    };
    expect_kind(of(&path, &none), ErrorKind::InvalidArgument, "at least one");
}
