//! Golden models that tests of several floors run, and helpers for errors. Not every test uses all of it.
#![allow(dead_code)]

pub(crate) mod adapters;
pub(crate) mod drafters;
pub(crate) mod ragged;
pub(crate) mod recurrent;
pub(crate) mod windows;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use NVFP4::base::memory::{self, Tag};
use NVFP4::base::{ErrorKind, Result, env};
use NVFP4::engine::{NewTokens, Sequence, Served};
use NVFP4::model::{Choice, Device, KvType, LoadOptions, Logits, Output, Scratch, Wanted};
use safetensors::{Dtype, SafeTensors};

/// Requires an error of `kind` whose message contains all `words`.
#[track_caller]
pub(crate) fn expect_kind<T>(result: Result<T>, kind: ErrorKind, words: &str) {
    match result {
        Ok(_) => panic!("no error, where {kind:?} with '{words}' was to come"),
        Err(e) => {
            assert_eq!(e.kind(), kind, "{e}");
            assert!(e.message().contains(words), "'{words}' is not in: {e}");
        }
    }
}

/// Cases of a random test: `short` in a run of all tests, ten times as many in a long one.
pub(crate) fn cases(short: u32) -> u32 {
    short * if env::tests_are_long() { 10 } else { 1 }
}

/// The directory of a golden model.
pub(crate) fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden/model")
        .join(case)
}

/// Everything as stored, on two threads.
pub(crate) fn options() -> LoadOptions {
    LoadOptions::new(Device::cpu(Some(2)).unwrap())
}

/// The file of a GGUF golden.
pub(crate) fn gguf(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden/gguf")
        .join(format!("{case}.gguf"))
}

/// The model of a GGUF golden.
pub(crate) fn load_gguf(case: &str) -> Arc<Served> {
    Served::load(&gguf(case), &options()).unwrap()
}

/// A golden model.
pub(crate) fn load(case: &str) -> Arc<Served> {
    Served::load(&golden(case), &options()).unwrap()
}

/// Tokens that any golden model knows.
pub(crate) fn some_tokens(model: &Served, n: usize) -> Vec<u32> {
    let vocab = model.spec().vocab_size as u32;
    (0..n as u32).map(|i| (i * 37 + 11) % vocab).collect()
}

/// Bytes in use under each tag.
pub(crate) fn in_use() -> Vec<(&'static str, u64)> {
    let all = Tag::ALL.into_iter();
    all.map(|tag| (tag.name(), memory::usage(tag).current))
        .collect()
}

/// Checks that all memory is freed: after models were loaded and used, and after loading that fails for lack of memory, a little later each
/// time. `settle` frees memory kept for reuse. The budget and the accounts belong to the process, so tests that call this need a process of
/// their own, which nextest provides.
pub(crate) fn check_memory_comes_back(
    device: &Device,
    times: usize,
    used: impl Fn(Arc<Served>),
    settle: impl Fn(),
) {
    const STOPS: u64 = 20;
    let load = || {
        let options = LoadOptions {
            device: device.clone(),
            ..options()
        };
        Served::load(&golden("qwen3_tied"), &options)
    };
    // Resources of the first use stay for all later ones.
    used(load().unwrap());
    settle();
    let before = in_use();
    for _ in 0..times {
        used(load().unwrap());
    }
    settle();
    memory::reset_peak();
    drop(load().unwrap());
    let peak = memory::total().peak;
    let current: u64 = before.iter().map(|(_, bytes)| bytes).sum();
    for stop in 0..STOPS {
        memory::set_budget(Some(current + (peak - current) * stop / STOPS));
        let failed = load();
        memory::set_budget(None);
        if let Err(e) = failed {
            assert_eq!(e.kind(), ErrorKind::OverBudget, "{e}");
        } else {
            assert!(
                stop > STOPS / 2,
                "{stop} of {STOPS} parts of its memory will do"
            );
        }
    }
    settle();
    assert_eq!(in_use(), before);
}

/// A copy of a golden directory to change, removed at the end.
pub(crate) struct Copy(pub(crate) PathBuf);

impl Copy {
    /// `name` is the purpose of the copy.
    pub(crate) fn of(case: &str, name: &str) -> Copy {
        static COPIES: AtomicUsize = AtomicUsize::new(0);
        let count = COPIES.fetch_add(1, Ordering::Relaxed);
        let dir =
            std::env::temp_dir().join(format!("nvfp4-model-{}-{count}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        for file in fs::read_dir(golden(case)).unwrap() {
            let path = file.unwrap().path();
            fs::copy(&path, dir.join(path.file_name().unwrap())).unwrap();
        }
        Copy(dir)
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) {
        // A golden may be read-only; a new file is not.
        let _ = fs::remove_file(self.0.join(name));
        fs::write(self.0.join(name), bytes).unwrap();
    }
}

/// Changes bytes of a tensor in the golden that a copy holds: `change` is given its type, its shape and its bytes.
pub(crate) fn change_tensor(
    dir: &Copy,
    name: &str,
    change: impl FnOnce(Dtype, &[usize], &mut [u8]),
) {
    let mut bytes = fs::read(dir.0.join("model.safetensors")).unwrap();
    let (dtype, shape, range) = {
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensor = file.tensor(name).unwrap();
        let start = tensor.data().as_ptr() as usize - bytes.as_ptr() as usize;
        let range = start..start + tensor.data().len();
        (tensor.dtype(), tensor.shape().to_vec(), range)
    };
    change(dtype, &shape, &mut bytes[range]);
    dir.write("model.safetensors", &bytes);
}

/// Cuts a file off where it lies, as another process might.
pub(crate) fn cut(path: &Path, len: u64) {
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(len).unwrap();
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The golden models that the processor and a GPU are tested with. A GPU refuses some of them, whose heads are small.
pub(crate) const DEVICE_CASES: [&str; 44] = [
    "qwen3_tied",
    "qwen3_untied",
    "qwen3_yarn",
    "qwen2_tied",
    "qwen2_untied",
    "qwen2_yarn",
    "llama_tied",
    "llama_biased",
    "llama_linear",
    "llama_llama3",
    "llama_wide",
    "qwen3_uneven",
    "qwen2_window",
    "mistral_plain",
    "mistral_window",
    "phi3_window",
    "phi3_partial",
    "phi3_longrope",
    "gemma3_narrow",
    "gemma3_wide",
    "qwen3moe_mixed",
    "qwen2moe_shared",
    "gptoss_mxfp4",
    "gptoss_nvfp4",
    "gemma4_wide",
    "gemma4_shared",
    "gemma4_beside",
    "gemma2_wide",
    "gemma2_mixed",
    "smollm3_listed",
    "seedoss_biased",
    "ernie45_biased",
    "mixtral_plain",
    "solaropen_yarn",
    "glm4_biased",
    "glm4moe_biased",
    "glm4moe_grouped",
    "granite_biased",
    "minimaxm2_partial",
    "hunyuan_alpha",
    "olmo2_grouped",
    "olmo3_window",
    "exaone4_plain",
    "exaone4_mixed",
];

/// Models with recurrent layers, whose kernels on a GPU are fused ones alone.
pub(crate) const RECURRENT_CASES: [&str; 6] = [
    "qwen35_tied",
    "qwen35_nested",
    "qwen35moe_shared",
    "qwen3next_shared",
    "qwen3next_dense",
    "qwen35moe_float8",
];

/// Models with Mamba-2, whose kernels on a GPU are fused ones alone.
pub(crate) const MAMBA_CASES: [&str; 2] = ["nemotronh_dense", "nemotronh_experts"];

/// Models of Gemma 4 whose heads are too small for a GPU: layers with heads of two sizes, shared keys and values, per-layer embeddings,
/// experts beside an MLP.
pub(crate) const GEMMA4_CASES: [&str; 3] = ["gemma4_dense", "gemma4_perlayer", "gemma4_experts"];

/// The cases of `tests/golden/model/long_positions.py`: one for each RoPE scaling.
pub(crate) const LONG_CASES: [&str; 9] = [
    "long_default",
    "long_linear",
    "long_dynamic",
    "long_llama3",
    "long_yarn",
    "long_longrope",
    "long_partial",
    "long_local",
    "long_proportional",
];

/// The token at a position of a long case; the script has the same formula.
pub(crate) fn long_token(position: usize) -> u32 {
    let hash = (position as u32).wrapping_mul(2_654_435_761);
    (hash >> 16) % 97
}

/// Calls `each` with a position, the logits there from a cache with room for exactly the tokens up to it, and transformers' logits. All
/// tokens are run in one call, or the last one alone if `last_alone`.
pub(crate) fn at_long_positions(
    case: &str,
    model: &Served,
    kv: KvType,
    last_alone: bool,
    mut each: impl FnMut(usize, &[f32], &[f32]),
) {
    let bytes = fs::read(golden(case).join("expected.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for position in [4096, 32768, 131_072] {
        let want = file.tensor(&format!("logits_{position}")).unwrap();
        let (want, _) = want.data().as_chunks::<4>();
        let want: Vec<f32> = want.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let tokens: Vec<u32> = (0..=position).map(long_token).collect();
        let mut cache = model.sequence(tokens.len(), kv).unwrap();
        let mut got = Vec::new();
        let mut scratch = Scratch::new();
        let (first, last) = tokens.split_at(if last_alone { position } else { 0 });
        for (tokens, wanted) in [(first, Logits::None), (last, Logits::Last)] {
            if !tokens.is_empty() {
                model
                    .forward(tokens, &mut cache, &mut scratch, wanted, &mut got)
                    .unwrap();
            }
        }
        each(position, &got, &want);
    }
}

/// One token of each of several sequences in one batch: the logits of each.
pub(crate) fn step_logits(
    model: &Served,
    tokens: &[u32],
    caches: &mut [&mut Sequence],
) -> Result<Vec<Vec<f32>>> {
    let mut logits = Vec::new();
    let wanted = vec![Wanted::Last; tokens.len()];
    let outputs = step(model, tokens, caches, wanted, &mut logits)?;
    let rows = outputs.into_iter().map(|output| match output {
        Output::Logits(rows) if rows.len() == 1 => {
            let row = logits.chunks_exact(model.spec().vocab_size).nth(rows.start);
            row.unwrap().to_vec()
        }
        other => panic!("{other:?} in the place of logits"),
    });
    Ok(rows.collect())
}

/// One token of each of several sequences in one batch: the tokens that follow.
pub(crate) fn step_tokens(
    model: &Served,
    tokens: &[u32],
    caches: &mut [&mut Sequence],
    choices: &[Choice<'_>],
) -> Result<Vec<u32>> {
    let wanted = choices.iter().map(|&choice| Wanted::Token(choice));
    let outputs = step(model, tokens, caches, wanted.collect(), &mut Vec::new())?;
    let tokens = outputs.into_iter().map(|output| match output {
        Output::Token(token) => token,
        other => panic!("{other:?} in the place of a token"),
    });
    Ok(tokens.collect())
}

/// Runs such a batch; the fault of a slot is the error.
fn step(
    model: &Served,
    tokens: &[u32],
    caches: &mut [&mut Sequence],
    wanted: Vec<Wanted<'_>>,
    logits: &mut Vec<f32>,
) -> Result<Vec<Output>> {
    let each = tokens.chunks(1).zip(caches).zip(wanted);
    let work = each.map(|((tokens, sequence), wanted)| NewTokens {
        tokens,
        sequence,
        wanted,
    });
    let outputs = model.run(work.collect(), true, &mut Scratch::new(), logits)?;
    outputs.into_iter().collect()
}
