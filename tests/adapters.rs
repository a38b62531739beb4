//! Adapters at run time: against peft and against merged weights, in mixed batches, in the prefix cache, in session files, and what is
//! refused before anything begins. The golden of peft and the script that made it are in `tests/golden/training`.

mod common;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use NVFP4::base::ErrorKind;
use NVFP4::base::call::Cancel;
use NVFP4::engine::{LoadedAdapter, Served};
use NVFP4::model::{self, Activations, KvType};
use NVFP4::session::{GenerateOptions, Session, SessionOptions, step};
use common::adapters::{ALPHA, Place, RANK, Written, difference, floats, merged, modules, two};
use common::{expect_kind, golden, load, options, some_tokens};
use half::bf16;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

/// The bar of models against transformers: some hundred rounding errors of logits that reach 8.
const TOLERANCE: f32 = 2e-4;
/// The bar of adapters against merged weights, which are rounded to f32 once more: measured are 2.8e-6 to 6.4e-6.
const MERGED: f32 = 5e-5;

fn session(model: &Arc<Served>, adapter: Option<&Arc<LoadedAdapter>>) -> Session {
    let options = SessionOptions {
        kv: KvType::F32,
        adapter: adapter.cloned(),
        ..SessionOptions::default()
    };
    Session::new(model.clone(), &options).unwrap()
}

fn logits(model: &Arc<Served>, adapter: Option<&Arc<LoadedAdapter>>, tokens: &[u32]) -> Vec<f32> {
    let mut session = session(model, adapter);
    session.prefill(tokens).unwrap();
    session.logits().unwrap().to_vec()
}

/// An adapter that `nvfp4 train` wrote is read, and gives the logits that peft computes with it.
#[test]
fn logits_agree_with_peft() {
    let model = load("qwen3_tied");
    let place = golden("../training/qwen3_tied_peft");
    let adapter = model.load_adapter(&place).unwrap();
    assert_eq!((adapter.name(), adapter.rank()), ("qwen3_tied_peft", 4));
    assert_eq!(adapter.projections(), 6);
    let known = fs::read(place.join("expected.safetensors")).unwrap();
    let known = SafeTensors::deserialize(&known).unwrap();
    let words = |name: &str| {
        let tensor = known.tensor(name).unwrap();
        let (words, _) = tensor.data().as_chunks::<4>();
        words.to_vec()
    };
    let tokens: Vec<u32> = words("tokens")
        .into_iter()
        .map(u32::from_le_bytes)
        .collect();
    let wanted: Vec<f32> = words("logits")
        .into_iter()
        .map(f32::from_le_bytes)
        .collect();
    let vocabulary = wanted.len() / tokens.len();
    let mut of_adapter = session(&model, Some(&adapter));
    for (token, wanted) in tokens.iter().zip(wanted.chunks(vocabulary)) {
        of_adapter.decode(*token).unwrap();
        let far = difference(of_adapter.logits().unwrap(), wanted);
        assert!(far <= TOLERANCE, "{far}");
    }
    let last = &wanted[wanted.len() - vocabulary..];
    assert!(difference(&logits(&model, None, &tokens), last) > 0.01);
}

/// An adapter beside all linear maps of a model gives the logits of the model that it is merged into, in every kind of layer: biased and
/// fused projections, experts, gated attention, gated delta nets, Mamba-2, per-layer
/// inputs, interleaved RoPE, and a residual multiplier.
#[test]
fn logits_are_those_of_merged_weights() {
    for (case, least) in [
        ("llama_biased", 14),
        ("phi3_partial", 8),
        ("qwen3moe_normalized", 40),
        ("qwen35_tied", 14),
        ("qwen3next_dense", 10),
        ("nemotronh_dense", 4),
        ("gemma4_perlayer", 14),
        ("glm4_biased", 10),
        ("glm4moe_biased", 40),
        ("minimaxm2_partial", 40),
        ("granite_biased", 21),
        ("olmo2_grouped", 14),
    ] {
        let modules = modules(case);
        assert!(modules.len() >= least, "{case}: {}", modules.len());
        let (written, factors) = Written::new(&format!("merged-{case}"), 3, &modules);
        let dense = merged(case, "adapters-dense", &[]);
        let base = Served::load(&dense.0, &options()).unwrap();
        let adapter = written.load(&base).unwrap();
        assert!(adapter.projections() >= least, "{case}");
        let of_merged = merged(case, "adapters-merged", &factors);
        let of_merged = Served::load(&of_merged.0, &options()).unwrap();
        let tokens = some_tokens(&base, 21);
        let (got, want) = (
            logits(&base, Some(&adapter), &tokens),
            logits(&of_merged, None, &tokens),
        );
        let far = difference(&got, &want);
        let moved = difference(&logits(&base, None, &tokens), &want);
        println!("{case}: {far:e}, moved by {moved}");
        assert!(far <= MERGED, "{case}: {far}");
        assert!(moved > 0.1, "{case}: {moved}");
    }
}

/// Sequences with different adapters, and without one, have the bits of sequences that run alone, however their rows lie in a pass.
#[test]
fn mixed_batches_have_the_bits_of_each_alone() {
    for (case, activations) in [
        ("qwen3_tied", Activations::Exact),
        ("qwen3_tied", Activations::Int8),
        ("qwen3moe_normalized", Activations::Exact),
        ("nemotronh_dense", Activations::Exact),
    ] {
        let mut of_case = options();
        of_case.activations = activations;
        let model = Served::load(&golden(case), &of_case).unwrap();
        let [first, second] = two(case, &format!("mixed-{case}-{activations:?}"));
        let (first, second) = (first.load(&model).unwrap(), second.load(&model).unwrap());
        // Adapters alternate, so that neither's rows follow each other.
        let adapters = [
            Some(&first),
            Some(&second),
            None,
            Some(&first),
            Some(&second),
            Some(&first),
        ];
        let prompts: Vec<Vec<u32>> = (0..adapters.len())
            .map(|i| some_tokens(&model, 40)[i..9 + 4 * i].to_vec())
            .collect();
        let next: Vec<[u32; 3]> = prompts.iter().map(|p| [p[1], p[2], p[3]]).collect();
        let alone: Vec<Vec<f32>> = (0..adapters.len())
            .map(|i| {
                let mut alone = session(&model, adapters[i]);
                for token in prompts[i].iter().chain(&next[i]) {
                    alone.decode(*token).unwrap();
                }
                alone.logits().unwrap().to_vec()
            })
            .collect();
        let mut batch: Vec<Session> = adapters.iter().map(|a| session(&model, *a)).collect();
        for (session, prompt) in batch.iter_mut().zip(&prompts) {
            session.prefill(prompt).unwrap();
        }
        for i in 0..3 {
            let tokens: Vec<u32> = next.iter().map(|tokens| tokens[i]).collect();
            let mut sessions: Vec<&mut Session> = batch.iter_mut().collect();
            step(&mut sessions, &tokens).unwrap();
        }
        for (i, (session, alone)) in batch.iter_mut().zip(&alone).enumerate() {
            assert!(session.logits().unwrap() == alone, "{case}: session {i}");
        }
        assert!(alone[0] != alone[3]);
    }
}

/// A session begins with blocks of others that have the same adapter, and of no other.
#[test]
fn prefixes_are_shared_by_sessions_with_the_same_adapter() {
    let mut with_cache = options();
    with_cache.prefix_bytes = 16 << 20;
    let model = Served::load(&golden("qwen3_tied"), &with_cache).unwrap();
    let [first, second] = two("qwen3_tied", "prefixes");
    let (first, second) = (first, second.load(&model).unwrap());
    let loaded = first.load(&model).unwrap();
    let tokens = some_tokens(&model, 70);
    let found = |adapter: Option<&Arc<LoadedAdapter>>| {
        let before = model.statistics().prompt_tokens_found;
        let logits = logits(&model, adapter, &tokens);
        (model.statistics().prompt_tokens_found - before, logits)
    };
    let (none, plain) = found(None);
    let (of_first, adapted) = found(Some(&loaded));
    let (of_second, other) = found(Some(&second));
    assert_eq!((none, of_first, of_second), (0, 0, 0));
    assert!(plain != adapted && plain != other && adapted != other);
    // Loaded anew, the adapter finds the blocks of its content.
    let identity = loaded.identity();
    drop(loaded);
    let again = first.load(&model).unwrap();
    assert_eq!(again.identity(), identity);
    for (adapter, want) in [
        (None, &plain),
        (Some(&again), &adapted),
        (Some(&second), &other),
    ] {
        let (count, got) = found(adapter);
        assert_eq!(count, 64);
        assert!(got == *want);
    }
    // They outlive the process by the same key.
    let file = Place::new("prefixes.bin");
    model.save_prefixes(&file.0).unwrap();
    let anew = Served::load(&golden("qwen3_tied"), &with_cache).unwrap();
    anew.restore_prefixes(&file.0).unwrap();
    let again = first.load(&anew).unwrap();
    for (adapter, want) in [(Some(&again), &adapted), (None, &plain)] {
        let before = anew.statistics().prompt_tokens_found;
        assert!(logits(&anew, adapter, &tokens) == *want);
        assert_eq!(anew.statistics().prompt_tokens_found - before, 64);
    }
}

/// Forks and restored sessions go on with their adapter; a session file demands that it is loaded.
#[test]
fn forks_and_session_files_keep_the_adapter() {
    let model = load("qwen3_tied");
    let [first, second] = two("qwen3_tied", "saved");
    let second = second.load(&model).unwrap();
    let loaded = first.load(&model).unwrap();
    let tokens = some_tokens(&model, 30);
    let mut whole = session(&model, Some(&loaded));
    whole.prefill(&tokens[..20]).unwrap();
    let mut fork = whole.fork().unwrap();
    let file = Place::new("session.bin");
    whole.save(&file.0).unwrap();
    whole.prefill(&tokens[20..]).unwrap();
    let want = whole.logits().unwrap().to_vec();
    fork.prefill(&tokens[20..]).unwrap();
    assert!(fork.logits().unwrap() == want);
    let restored = || Session::restore(model.clone(), &file.0);
    let mut same = restored().unwrap();
    assert_eq!(same.adapter().unwrap().identity(), loaded.identity());
    same.prefill(&tokens[20..]).unwrap();
    assert!(same.logits().unwrap() == want);
    // A replay runs with it too.
    let mut replayed = same.fork().unwrap();
    let some = GenerateOptions {
        max_tokens: 6,
        ignore_model_stops: true,
        ..GenerateOptions::default()
    };
    let generated = same.generate(&some, &mut |_| std::ops::ControlFlow::Continue(()));
    let replay = GenerateOptions {
        replay: true,
        ..some
    };
    let again = replayed.generate(&replay, &mut |_| std::ops::ControlFlow::Continue(()));
    assert_eq!(generated.unwrap().tokens, again.unwrap().tokens);
    drop((whole, fork, same, replayed));
    let (name, other) = (loaded.name().to_owned(), second.name().to_owned());
    drop(loaded);
    let e = restored().unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidArgument);
    assert!(
        e.message().contains(&name) && e.message().contains(&other),
        "{e}"
    );
    // Loaded anew it serves the file.
    let _again = first.load(&model).unwrap();
    restored().unwrap();
}

/// Memory goes with the last session, and who unloads an adapter can wait for that.
#[test]
fn an_adapter_is_counted_while_sessions_use_it() {
    let model = load("qwen3_tied");
    let [first, _] = two("qwen3_tied", "uses");
    let loaded = first.load(&model).unwrap();
    let memory = Arc::downgrade(&loaded);
    assert!(loaded.bytes() > 0);
    let one = session(&model, Some(&loaded));
    let two = one.fork().unwrap();
    assert_eq!(loaded.uses(), 2);
    drop(one);
    let cancel = Cancel::new();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| cancel.watching(|| loaded.wait_until_unused()));
        std::thread::sleep(Duration::from_millis(30));
        assert!(!waiting.is_finished());
        cancel.cancel();
        expect_kind(waiting.join().unwrap(), ErrorKind::Cancelled, "");
        let waiting = scope.spawn(|| loaded.wait_until_unused());
        drop(two);
        waiting.join().unwrap().unwrap();
    });
    assert_eq!(loaded.uses(), 0);
    let last = session(&model, Some(&loaded));
    drop(loaded);
    assert!(memory.upgrade().is_some());
    drop(last);
    assert!(memory.upgrade().is_none());
}

/// Ranks and alphas of single modules, and bfloat16 factors, count as they are stored.
#[test]
fn patterns_and_types_decide_a_module() {
    let model = load("qwen3_tied");
    let modules = modules("qwen3_tied");
    let (mut written, _) = Written::new("patterns", 9, &modules[..3]);
    let tokens = some_tokens(&model, 12);
    let plain = written.load(&model).unwrap();
    let want = logits(&model, Some(&plain), &tokens);
    // Each value is one of bfloat16, so that a file of these has the same logits.
    for (dtype, _, bytes) in written.tensors.values_mut() {
        let (words, _) = bytes.as_chunks::<4>();
        let halves = words.iter().map(|w| bf16::from_f32(f32::from_le_bytes(*w)));
        *bytes = halves.flat_map(|h| h.to_le_bytes()).collect();
        *dtype = Dtype::BF16;
    }
    written.write();
    let halved = written.load(&model).unwrap();
    assert!(halved.bytes() < plain.bytes());
    assert_eq!(halved.identity(), plain.identity());
    assert!(logits(&model, Some(&halved), &tokens) == want);
    // An alpha of 20 for all modules, of which patterns make 10 again.
    written.config["lora_alpha"] = json!(20);
    written.write();
    let doubled = written.load(&model).unwrap();
    assert!(doubled.identity() != plain.identity());
    assert!(logits(&model, Some(&doubled), &tokens) != want);
    let each = modules[..3]
        .iter()
        .map(|(name, _)| (name.clone(), json!(ALPHA)));
    written.config["alpha_pattern"] = Value::Object(each.collect());
    written.write();
    let patterned = written.load(&model).unwrap();
    assert_eq!(patterned.identity(), plain.identity());
}

/// One line each, before anything begins.
#[test]
fn other_adapters_are_refused_by_name() {
    let model = load("qwen3_tied");
    let all = modules("qwen3_tied");
    let fresh = |name: &str| Written::new(&format!("refused-{name}"), 2, &all[..2]).0;
    let (invalid, unsupported, corrupt) = (
        ErrorKind::InvalidArgument,
        ErrorKind::Unsupported,
        ErrorKind::CorruptFile,
    );
    let refused = |written: &Written, kind, words: &[&str]| {
        written.write();
        let e = written.load(&model).unwrap_err();
        assert_eq!(e.kind(), kind, "{e}");
        assert!(!e.message().contains('\n'), "{e}");
        for words in words {
            assert!(e.message().contains(words), "{words}: {e}");
        }
    };
    let renamed = |name: &str, from: &str, to: &str| {
        let mut written = fresh(name);
        let tensors = std::mem::take(&mut written.tensors);
        let tensors = tensors
            .into_iter()
            .map(|(name, t)| (name.replace(from, to), t));
        written.tensors = tensors.collect();
        written
    };
    let module = |module: &str| format!("base_model.model.{module}");
    let first = module(&all[0].0);

    // Another base: blocks, names and shapes that differ.
    let other = renamed("blocks", "layers.0", "layers.7");
    refused(&other, invalid, &["layers.7", "2 blocks", "another base"]);
    let mut other = fresh("shapes");
    let a = other
        .tensors
        .get_mut(&format!("{first}.lora_A.weight"))
        .unwrap();
    a.1 = vec![RANK, a.1[1] / 2];
    a.2.truncate(a.2.len() / 2);
    let sizes = all[0].1;
    let (is, wanted) = (
        format!("[{RANK}, {}]", sizes[1] / 2),
        format!("[{RANK}, {}]", sizes[1]),
    );
    refused(&other, invalid, &[&first, "lora_A", &is, &wanted]);
    let mut other = fresh("rank");
    other.config["r"] = json!(4);
    refused(&other, invalid, &["a rank of 4", "[4, "]);
    other.config["r"] = json!(100_000);
    refused(&other, unsupported, &["rank 100000", "1024"]);

    // More than factors beside linear maps.
    let mut dora = fresh("dora");
    dora.config["use_dora"] = json!(true);
    refused(&dora, unsupported, &["use_dora", "adapter_config.json"]);
    for (name, tensor, words) in [
        ("magnitude", "lora_magnitude_vector", "DoRA"),
        ("embedding", "lora_embedding_A", "embeddings"),
        ("other", "bias", "no factor of an adapter"),
    ] {
        let mut written = fresh(name);
        let stored = (Dtype::F32, vec![1], floats(&[1.0]));
        written.tensors.insert(format!("{first}.{tensor}"), stored);
        refused(&written, unsupported, &[&first, words]);
    }
    let head = renamed("head", &all[0].0, "lm_head");
    refused(&head, unsupported, &["lm_head", "output layer"]);
    let table = renamed("table", &all[0].0, "model.embed_tokens");
    refused(&table, unsupported, &["model.embed_tokens", "embeddings"]);

    // Damage.
    let mut half = fresh("half");
    half.tensors.remove(&format!("{first}.lora_B.weight"));
    refused(&half, corrupt, &[&first, "lora_B"]);
    let mut infinite = fresh("infinite");
    let a = infinite
        .tensors
        .get_mut(&format!("{first}.lora_A.weight"))
        .unwrap();
    a.2[..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    refused(&infinite, corrupt, &["[0, 0] is inf"]);
    let mut empty = fresh("empty");
    empty.tensors.clear();
    refused(&empty, corrupt, &["no factors"]);
    fs::remove_file(empty.place.0.join("adapter_config.json")).unwrap();
    let e = empty.load(&model).unwrap_err();
    assert!(e.message().contains("adapter_config.json"), "{e}");

    // An adapter of another model, and one for a sequence with tokens.
    let good = fresh("good").load(&model).unwrap();
    let elsewhere = load("qwen3_tied");
    let options = SessionOptions {
        adapter: Some(good.clone()),
        ..SessionOptions::default()
    };
    let session = Session::new(elsewhere, &options).map(|_| ());
    expect_kind(session, invalid, "another model");
    let mut sequence = model.sequence(64, KvType::F16).unwrap();
    let mut logits = Vec::new();
    model
        .forward(
            &[1, 2, 3],
            &mut sequence,
            &mut model::Scratch::new(),
            model::Logits::None,
            &mut logits,
        )
        .unwrap();
    expect_kind(sequence.set_adapter(good), invalid, "holds 3 tokens");
}

/// Adapters of the second expert of a golden are those of this expert alone.
#[test]
fn an_expert_may_have_its_own() {
    let case = "qwen3moe_normalized";
    let all = modules(case);
    let of_expert: Vec<_> = all
        .iter()
        .filter(|(name, _)| name.contains("experts.1."))
        .cloned()
        .collect();
    let (written, factors) = Written::new("expert", 8, &of_expert);
    let dense = merged(case, "expert-dense", &[]);
    let base = Served::load(&dense.0, &options()).unwrap();
    let adapter = written.load(&base).unwrap();
    assert_eq!(adapter.projections(), of_expert.len());
    let of_merged = merged(case, "expert-merged", &factors);
    let of_merged = Served::load(&of_merged.0, &options()).unwrap();
    let tokens = some_tokens(&base, 30);
    let far = difference(
        &logits(&base, Some(&adapter), &tokens),
        &logits(&of_merged, None, &tokens),
    );
    assert!(far <= MERGED, "{far}");
}

/// A path that is no directory of an adapter names itself.
#[test]
fn a_missing_directory_is_named() {
    let model = load("qwen3_tied");
    let e = model
        .load_adapter(Path::new("/nowhere/at/all"))
        .unwrap_err();
    assert!(
        e.message().contains("/nowhere/at/all/adapter_config.json"),
        "{e}"
    );
}
