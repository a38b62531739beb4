//! Deterministic models: the logits of a sequence have the same bits whatever runs beside it and however it came to its tokens.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use NVFP4::base::call::Cancel;
use NVFP4::cuda::{Biased, Gpu, Layout, LinearScratch, Matrix, ScratchDevice};
use NVFP4::engine::{NewTokens, Sequence, Served};
use NVFP4::format::int8;
use NVFP4::model::{Device, KvType, LoadOptions, Logits, Output, Scratch, Tuning, Wanted};
use NVFP4::session::{GenerateOptions, LogitAdjustments, SamplingOptions, Session};
use NVFP4::text::GrammarSource;

use crate::common::{
    DEVICE_CASES, GEMMA4_CASES, LONG_CASES, MAMBA_CASES, RECURRENT_CASES, golden, options,
    some_tokens, step_logits,
};
use crate::support::{
    DENSE, Dense, HalfRows, Product, Weight, generated, gpu, normal, prompted, same_bits,
    with_context,
};

/// Numbers of rows around each at which another kernel or tile takes over.
const ROWS: [usize; 13] = [1, 2, 4, 5, 8, 9, 16, 17, 33, 64, 128, 129, 300];

fn deterministic(gpu: &Arc<Gpu>, prefix_cache: bool) -> LoadOptions {
    LoadOptions {
        device: Device::Cuda(gpu.clone()),
        prefix_cache,
        deterministic: true,
        ..options()
    }
}

/// The model of a case, unless its heads are too small for a GPU.
fn load(gpu: &Arc<Gpu>, case: &str, prefix_cache: bool) -> Option<Arc<Served>> {
    load_from(gpu, &golden(case), prefix_cache)
}

fn load_from(gpu: &Arc<Gpu>, path: &Path, prefix_cache: bool) -> Option<Arc<Served>> {
    match Served::load(path, &deterministic(gpu, prefix_cache)) {
        Ok(model) => Some(model),
        Err(e) => {
            assert!(e.message().contains("head_dim must be one of"), "{e}");
            None
        }
    }
}

/// Each row of a product of many rows, or of two that are `gated`, is that of the row among the first few, and alone.
fn check_products(
    gpu: &Arc<Gpu>,
    matrices: &[Biased<'_>],
    k: usize,
    gated: Option<Layout>,
    what: &str,
) {
    let (most, device) = (300, ScratchDevice::of(gpu).deterministic());
    let scratch = LinearScratch::new_on(gpu, device, most, k, 0).unwrap();
    let x = normal(5, most * k);
    let rows = |first: usize, m: usize| {
        let some = HalfRows::new(gpu, &x[first * k..][..m * k]);
        let product = Product::of(gpu, &scratch, some.input(), m, matrices);
        match gated {
            Some(layout) => product.gated(layout),
            None => product.f32s(),
        }
    };
    let all = rows(0, most);
    let width = all.len() / most;
    for m in ROWS {
        assert!(
            same_bits(&rows(0, m), &all[..m * width]),
            "{what}: {m} rows"
        );
    }
    for row in [1, 7, 131, 299] {
        let alone = rows(row, 1);
        assert!(
            same_bits(&alone, &all[row * width..][..width]),
            "{what}: row {row} alone"
        );
    }
}

#[test]
fn rows_of_products_do_not_depend_on_others() {
    let Some(gpu) = gpu() else { return };
    for (k, features) in [(2560, &[400, 128, 136][..]), (9728, &[257]), (48, &[72])] {
        let weights = features.iter().enumerate();
        let weights: Vec<Weight> = weights
            .map(|(i, &n)| Weight::new(&gpu, n, k, i as u64))
            .collect();
        let biased: Vec<Biased<'_>> = weights.iter().map(Weight::biased).collect();
        let what = format!("NVFP4 {features:?}, K = {k}");
        check_products(&gpu, &biased, k, None, &what);
    }
    // With 6,600 features a CTA takes all ranges of K; with 700, CTAs share them.
    for (k, features) in [(2560, 6600), (1040, 700)] {
        let weights = [1, 2].map(|seed| Weight::new(&gpu, features, k, seed));
        let biased: Vec<Biased<'_>> = weights.iter().map(Weight::biased).collect();
        for layout in [Layout::RowMajor, Layout::FragmentMajor] {
            let what = format!("gated, {features} features, K = {k}, {layout:?}");
            check_products(&gpu, &biased, k, Some(layout), &what);
        }
    }
    for storage in DENSE {
        for (n, k) in [(300, 2560), (5000, 272)] {
            let w = Dense::new(&gpu, [n, k], storage, &normal(3, n * k));
            check_products(
                &gpu,
                &[(&w.device, None)],
                k,
                None,
                &format!("{storage:?} [{n}, {k}]"),
            );
        }
    }
    let (n, k) = (300, 1552);
    let (mut codes, mut scales) = (vec![0; n * k], vec![0.0; n]);
    int8::quantize_rows(&normal(9, n * k), k, 0, &mut codes, &mut scales).unwrap();
    let w = Matrix::int8(&gpu, n, k, &mut |range, to, of_rows| {
        to.copy_from_slice(&codes[range.start * k..range.end * k]);
        of_rows.copy_from_slice(&scales[range]);
        Ok(())
    });
    check_products(&gpu, &[(&w.unwrap(), None)], k, None, "int8");
}

/// Runs tokens in calls of these lengths, the last again and again. Returns the logits of each position.
fn divided(model: &Served, kv: KvType, tokens: &[u32], lengths: &[usize]) -> Vec<f32> {
    let mut sequence = model.sequence(tokens.len(), kv).unwrap();
    let (mut scratch, mut all, mut some) = (Scratch::new(), Vec::new(), Vec::new());
    let mut lengths = lengths.iter().copied();
    let (mut rest, mut length) = (tokens, 1);
    while !rest.is_empty() {
        length = lengths.next().unwrap_or(length).min(rest.len());
        let (now, later) = rest.split_at(length);
        model
            .forward(now, &mut sequence, &mut scratch, Logits::All, &mut some)
            .unwrap();
        all.extend_from_slice(&some);
        rest = later;
    }
    all
}

/// The logits of each position of the first of several sequences, all of which run in the same passes, some tokens at a time.
fn beside(model: &Served, kv: KvType, tokens: &[u32], others: usize, length: usize) -> Vec<f32> {
    let vocabulary = model.spec().vocab_size;
    let mut sequences: Vec<Sequence> = (0..=others)
        .map(|_| model.sequence(3 * tokens.len(), kv).unwrap())
        .collect();
    let (mut scratch, mut all) = (Scratch::new(), Vec::new());
    for (pass, now) in tokens.chunks(length).enumerate() {
        let of_others = some_tokens(model, others * 3 + 1);
        let work = sequences
            .iter_mut()
            .enumerate()
            .map(|(i, sequence)| match i {
                0 => NewTokens {
                    tokens: now,
                    sequence,
                    wanted: Wanted::All,
                },
                _ => NewTokens {
                    // Some run prompts, others a token each.
                    tokens: &of_others[i..][..1 + (i + pass) % 3],
                    sequence,
                    wanted: Wanted::Last,
                },
            });
        let mut logits = Vec::new();
        let outputs = model
            .run(work.collect(), false, &mut scratch, &mut logits)
            .unwrap();
        let Ok(Output::Logits(rows)) = &outputs[0] else {
            panic!("{:?}", outputs[0])
        };
        all.extend_from_slice(&logits[rows.start * vocabulary..rows.end * vocabulary]);
    }
    all
}

fn first_difference(got: &[f32], want: &[f32], width: usize) -> Option<usize> {
    assert_eq!(got.len(), want.len());
    let mut rows = got.chunks_exact(width).zip(want.chunks_exact(width));
    rows.position(|(got, want)| !same_bits(got, want))
}

/// Runs the same tokens in passes of many kinds. Returns those that give a position other bits than a call for each token.
fn passes_that_differ(model: &Served, kv: KvType, length: usize) -> Vec<String> {
    let (width, tokens) = (model.spec().vocab_size, some_tokens(model, length));
    let each = divided(model, kv, &tokens, &[]);
    let mut wrong = Vec::new();
    let mut check = |got: Vec<f32>, what: &str| {
        if let Some(row) = first_difference(&got, &each, width) {
            wrong.push(format!("{what}: position {row}"));
        }
    };
    check(divided(model, kv, &tokens, &[length]), "at once");
    let parts = [7, 64, 1, 1, 100, 3, 17, 16];
    check(divided(model, kv, &tokens, &parts), "in parts");
    let steps = divided(model, kv, &tokens, &[length / 2, 1]);
    check(steps, "a prompt, then steps");
    for (others, at_once) in [(1, 1), (6, 1), (20, 1), (70, 1), (3, 50)] {
        let what = format!("{at_once} at a time beside {others}");
        check(beside(model, kv, &tokens, others, at_once), &what);
    }
    wrong
}

#[test]
fn logits_do_not_depend_on_the_pass() {
    let Some(gpu) = gpu() else { return };
    let cases = DEVICE_CASES
        .iter()
        .chain(&RECURRENT_CASES)
        .chain(&MAMBA_CASES);
    // The last have room for more positions than those of a split.
    let more = GEMMA4_CASES.iter().chain(&["gemma4_wide", "gemma4_shared"]);
    let (mut tested, mut wrong) = (0, Vec::new());
    for case in cases.chain(more).chain(&LONG_CASES) {
        let Some(model) = load(&gpu, case, false) else {
            continue;
        };
        tested += 1;
        let length = if LONG_CASES.contains(case) { 600 } else { 80 };
        for kv in [KvType::F16, KvType::F8] {
            if model.sequence(1, kv).is_ok() {
                let differ = passes_that_differ(&model, kv, length);
                let named = |what: String| format!("{case}, {kv:?}, {what}");
                wrong.extend(differ.into_iter().map(named));
            }
        }
    }
    assert!(wrong.is_empty(), "{} passes: {wrong:#?}", wrong.len());
    assert!(
        tested >= 20,
        "{tested} models with heads that the GPU takes"
    );
}

/// Models named in NVFP4_TEST_MODELS, separated by colons: real ones, or of a real size.
#[test]
fn logits_of_named_models_do_not_depend_on_the_pass() {
    let Some(gpu) = gpu() else { return };
    let Ok(paths) = std::env::var("NVFP4_TEST_MODELS") else {
        println!("SKIPPED NVFP4_TEST_MODELS names no model");
        return;
    };
    for path in paths.split(':') {
        let model = load_from(&gpu, path.as_ref(), false).unwrap();
        for kv in [KvType::F16, KvType::F8] {
            let differ = passes_that_differ(&model, kv, 600);
            assert!(differ.is_empty(), "{path}, {kv:?}: {differ:#?}");
        }
    }
}

/// Steps of sequences of different lengths, whose graphs are padded.
#[test]
fn steps_do_not_depend_on_their_size() {
    let Some(gpu) = gpu() else { return };
    for case in [
        "qwen3_tied",
        "qwen35_tied",
        "nemotronh_dense",
        "gemma4_wide",
    ] {
        let Some(model) = load(&gpu, case, false) else {
            continue;
        };
        let prompt = |i: usize| some_tokens(&model, 20 + 9 * i);
        let mut scratch = Scratch::new();
        let mut run = |i: usize| {
            let mut sequence = model.sequence(256, KvType::F16).unwrap();
            let mut logits = Vec::new();
            model
                .forward(
                    &prompt(i),
                    &mut sequence,
                    &mut scratch,
                    Logits::None,
                    &mut logits,
                )
                .unwrap();
            sequence
        };
        for count in [2, 5, 11, 23] {
            let mut alone: Vec<Sequence> = (0..count).map(&mut run).collect();
            let mut together: Vec<Sequence> = (0..count).map(&mut run).collect();
            for step in 0..3 {
                let tokens: Vec<u32> = (0..count as u32).map(|i| (7 * i + step) % 90).collect();
                let mut all: Vec<&mut Sequence> = together.iter_mut().collect();
                let got = step_logits(&model, &tokens, &mut all).unwrap();
                for (i, sequence) in alone.iter_mut().enumerate() {
                    let want = step_logits(&model, &tokens[i..=i], &mut [sequence]).unwrap();
                    assert!(
                        same_bits(&got[i], &want[0]),
                        "{case}, {i} of {count}, step {step}"
                    );
                }
            }
        }
    }
}

/// Sessions from the prefix cache, forks and shortened ones, which generate on threads beside each other.
#[test]
fn sessions_do_not_depend_on_their_past() {
    let Some(gpu) = gpu() else { return };
    for case in ["qwen3_tied", "qwen35_tied", "nemotronh_dense"] {
        let (Some(cold), Some(model)) = (load(&gpu, case, false), load(&gpu, case, true)) else {
            panic!("{case}: its heads are as wide as a GPU takes");
        };
        let options = with_context(256);
        let prompt = some_tokens(&model, 150);
        let drawn = SamplingOptions {
            temperature: 0.8,
            seed: Some(5),
            ..SamplingOptions::default()
        };
        let of = |session: &mut Session| {
            let first = session.logits().unwrap().to_vec();
            (first, generated(session, 60, &drawn))
        };
        let want = of(&mut prompted(&cold, &options, &prompt));
        let warm = prompted(&model, &options, &prompt);
        let forks = [warm.fork().unwrap(), warm.fork().unwrap()];
        let mut shortened = warm.fork().unwrap();
        generated(&mut shortened, 9, &SamplingOptions::default());
        shortened.truncate(70).unwrap();
        shortened.prefill(&prompt[70..]).unwrap();
        let mut all = vec![warm, prompted(&model, &options, &prompt), shortened];
        all.extend(forks);
        let together: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = all.iter_mut().map(|s| scope.spawn(move || of(s))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        for (i, got) in together.iter().enumerate() {
            assert!(same_bits(&got.0, &want.0), "{case}: logits of session {i}");
            assert_eq!(got.1, want.1, "{case}: tokens of session {i}");
        }
    }
}

/// Prompts of which each thread takes one after the other.
const PROMPTS: usize = 12;

/// The logits after a prompt, the tokens that follow, and the logits after the beginning of the prompt once more.
type OfPrompt = (Vec<f32>, Vec<u32>, Vec<f32>);

/// A model on which prompts and steps run.
#[derive(Clone, Copy)]
struct Beside<'a>(&'a Arc<Served>);

impl Beside<'_> {
    fn drawn() -> SamplingOptions {
        SamplingOptions {
            temperature: 0.8,
            seed: Some(5),
            ..SamplingOptions::default()
        }
    }

    fn prompt(self, number: usize) -> Vec<u32> {
        some_tokens(self.0, 90 + 12 * number)
    }

    /// Many steps after a short prompt.
    fn steps(self) -> Vec<u32> {
        let mut session = prompted(self.0, &with_context(256), &some_tokens(self.0, 20));
        generated(&mut session, 220, &Beside::drawn())
    }

    fn of_prompt(self, number: usize) -> OfPrompt {
        let prompt = self.prompt(number);
        let mut session = prompted(self.0, &with_context(256), &prompt);
        let first = session.logits().unwrap().to_vec();
        let tokens = generated(&mut session, 8, &Beside::drawn());
        // A step that ran ahead in vain may still run.
        session.prefill(&prompt[..20]).unwrap();
        let after = session.logits().unwrap().to_vec();
        (first, tokens, after)
    }

    /// Begins a prompt that is cancelled.
    fn cancel(self, number: usize) {
        let (cancel, prompt) = (Cancel::new(), self.prompt(number));
        let mut session = Session::new(self.0.clone(), &with_context(256)).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| cancel.cancel());
            let _ = cancel.watching(|| session.prefill(&prompt));
        });
    }

    fn check_prompt(self, number: usize, want: &OfPrompt, case: &str) {
        let got = self.of_prompt(number);
        let what = format!("{case}: prompt {number}");
        assert!(same_bits(&got.0, &want.0), "logits of {what}");
        assert_eq!(got.1, want.1, "tokens of {what}");
        assert!(
            same_bits(&got.2, &want.2),
            "logits after the tokens of {what}"
        );
    }
}

/// Prompts that run beside steps, on multiprocessors of their own, and the steps beside them, have the bits that they have alone. Some of the
/// prompts are cancelled, and blocks go from sequence to sequence.
#[test]
fn prompts_beside_steps_have_their_own_bits() {
    let Some(gpu) = gpu() else { return };
    for case in ["qwen3_tied", "qwen35_tied", "nemotronh_dense"] {
        let alone = load(&gpu, case, false).unwrap();
        let how = LoadOptions {
            tuning: Tuning::Latency,
            ..deterministic(&gpu, true)
        };
        let model = Served::load(&golden(case), &how).unwrap();
        if gpu.arch() == (9, 0) && gpu.driver_version() >= 12050 {
            assert!(model.rows_beside().is_some(), "{case}");
        }
        let (alone, model) = (Beside(&alone), Beside(&model));
        let want_steps = alone.steps();
        let want: Vec<_> = (0..PROMPTS).map(|number| alone.of_prompt(number)).collect();
        thread::scope(|scope| {
            for _ in 0..4 {
                let step = || assert_eq!(model.steps(), want_steps, "{case}");
                scope.spawn(move || (0..6).for_each(|_| step()));
            }
            for thread in 0..2 {
                let want = &want;
                scope.spawn(move || {
                    for round in 0..3 * PROMPTS {
                        let number = (round * 5 + thread * 3) % PROMPTS;
                        match round % 4 {
                            3 => model.cancel(number),
                            _ => model.check_prompt(number, &want[number], case),
                        }
                    }
                });
            }
        });
    }
}

/// Drafts change how many rows a pass has, and no token.
#[test]
fn drafts_change_no_token() {
    let Some(gpu) = gpu() else { return };
    let model = load(&gpu, "qwen35_drafter", false).unwrap();
    let prompt = some_tokens(&model, 120);
    let answer = |drafts: usize| {
        let mut session = prompted(&model, &with_context(256), &prompt);
        let options = GenerateOptions {
            max_tokens: 80,
            drafts: Some(drafts),
            ignore_model_stops: true,
            ..GenerateOptions::default()
        };
        let answer = session.generate(&options, &mut |_| ControlFlow::Continue(()));
        answer.unwrap().tokens
    };
    assert_eq!(answer(3), answer(0));
}

/// Prompt lookup verifies tokens of models that have no drafter, and changes none.
#[test]
fn looked_up_tokens_change_no_token() {
    let Some(gpu) = gpu() else { return };
    let mut counts = [0, 0];
    let cases = DEVICE_CASES
        .iter()
        .chain(&RECURRENT_CASES)
        .chain(&MAMBA_CASES);
    for case in cases.chain(&GEMMA4_CASES) {
        let Some(model) = load(&gpu, case, false) else {
            continue;
        };
        let prompt = some_tokens(&model, 17).repeat(2);
        let answer = |prompt_lookup: usize| {
            let mut session = prompted(&model, &with_context(128), &prompt);
            let options = GenerateOptions {
                max_tokens: 60,
                prompt_lookup,
                ignore_model_stops: true,
                ..GenerateOptions::default()
            };
            let answer = session.generate(&options, &mut |_| ControlFlow::Continue(()));
            answer.unwrap()
        };
        let want = answer(0);
        for most in [3, 16] {
            let got = answer(most);
            assert_eq!(got.tokens, want.tokens, "{case}, {most} at a time");
            counts[0] += got.drafts.drafted;
            counts[1] += got.drafts.accepted;
        }
    }
    println!("{} of {} tokens accepted", counts[1], counts[0]);
    assert!(counts[1] > 100, "{counts:?}");
}

/// Draft models change no token: the same model, whose guesses are all right, and another one on the processor.
#[test]
fn draft_models_change_no_token() {
    let Some(gpu) = gpu() else { return };
    let others = ["qwen3_yarn", "qwen2_untied"].map(|case| {
        let other = Served::load(&golden(case), &options()).unwrap();
        (other.spec().vocab_size, other)
    });
    let cases = DEVICE_CASES
        .iter()
        .chain(&RECURRENT_CASES)
        .chain(&MAMBA_CASES);
    for case in cases.chain(&GEMMA4_CASES) {
        let (Some(model), Some(same)) = (load(&gpu, case, false), load(&gpu, case, false)) else {
            continue;
        };
        let prompt = some_tokens(&model, 33);
        let answer = |draft: Option<&Arc<Served>>, drafts: Option<usize>| {
            let mut session = prompted(&model, &with_context(128), &prompt);
            let options = GenerateOptions {
                max_tokens: 60,
                draft_model: draft.cloned(),
                drafts,
                ignore_model_stops: true,
                ..GenerateOptions::default()
            };
            let answer = session.generate(&options, &mut |_| ControlFlow::Continue(()));
            answer.unwrap()
        };
        let want = answer(None, Some(0));
        let of_size = others
            .iter()
            .find(|(size, _)| *size == model.spec().vocab_size);
        let other = of_size.map(|(_, other)| other);
        for draft in [Some(&same), other].into_iter().flatten() {
            for drafts in [Some(1), Some(3), Some(9), None] {
                let got = answer(Some(draft), drafts);
                assert_eq!(got.tokens, want.tokens, "{case}, {drafts:?}");
                assert!(got.drafts.drafted > 0, "{case}, {drafts:?}");
                if Arc::ptr_eq(draft, &same) {
                    assert_eq!(got.drafts.accepted, got.drafts.drafted, "{case}");
                }
            }
        }
    }
}

/// Sixty-four threads, each held to a schema of its own, generate what each generates alone by logits in host memory, with forced tokens in
/// steps of all and in passes of their own.
#[test]
fn grammars_of_many_threads_choose_what_the_host_chooses() {
    const COUNT: usize = 64;
    let Some(gpu) = gpu() else { return };
    let model = load(&gpu, "qwen3_tied", false).unwrap();
    let prompt = some_tokens(&model, 20);
    let options = with_context(256);
    let of = |number: usize, by_host: bool| {
        let schema = format!(
            r#"{{"type": "object", "properties": {{"k{number}": {{"type": "string", "maxLength": {}}}, "n": {{"type": "integer"}}}},
            "required": ["k{number}", "n"], "additionalProperties": false}}"#,
            3 + number % 9
        );
        let grammar = model.grammar(GrammarSource::JsonSchema(&schema)).unwrap();
        let how = GenerateOptions {
            max_tokens: 48,
            sampling: SamplingOptions {
                temperature: [0.0, 1.0][number % 2],
                seed: Some(number as u64),
                ..SamplingOptions::default()
            },
            grammar: Some(Arc::new(grammar)),
            adjustments: LogitAdjustments {
                // Changes nothing, and needs the logits.
                bias: if by_host { vec![(0, 0.0)] } else { Vec::new() },
                ..LogitAdjustments::default()
            },
            ..GenerateOptions::default()
        };
        let mut session = prompted(&model, &options, &prompt);
        let made = session.generate(&how, &mut |_| ControlFlow::Continue(()));
        made.unwrap().tokens
    };
    let together: Vec<Vec<u32>> = thread::scope(|scope| {
        let of = &of;
        let threads = (0..COUNT).map(|number| scope.spawn(move || of(number, false)));
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    for (number, got) in together.iter().enumerate() {
        let want = of(number, true);
        assert!(want.len() > 5, "{want:?}");
        assert_eq!(*got, want, "schema {number}");
        if number % 8 == 0 {
            assert_eq!(of(number, false), want, "schema {number} alone");
        }
    }
}
