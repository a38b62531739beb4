//! Sessions on a GPU: steps that the device takes ahead, steps together, saved sessions, conversations, and prompts that are cancelled.

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use NVFP4::base::call::{Cancel, Progress, Watch};
use NVFP4::base::{ErrorKind, Result};
use NVFP4::cuda::Gpu;
use NVFP4::engine::Served;
use NVFP4::model::{Device, KvType, LoadOptions};
use NVFP4::session::{
    self, Dry, GenerateOptions, LogitAdjustments, Sampler, SamplingOptions, Session,
    SessionOptions, StepChoice,
};

use crate::common::{golden, ragged, recurrent, some_tokens, windows};
use crate::support::{
    as_f64, assert_close, coarseness, generated, gpu, load_on, prompted, with_context,
};

/// The tokens with the largest logits, which the host reads, one after the other.
fn by_logits(session: &mut Session, count: usize) -> Vec<u32> {
    let mut tokens = Vec::new();
    for _ in 0..count {
        let logits = session.logits().unwrap();
        let best = (0..logits.len())
            .reduce(|b, i| if logits[i] > logits[b] { i } else { b })
            .unwrap() as u32;
        tokens.push(best);
        session.decode(best).unwrap();
    }
    tokens
}

/// The tokens that a session generates in pieces, with forks, cuts and another session between them: the device has often gone on in
/// vain.
fn in_pieces(mut s: Session, mut other: Session, first: u32, count: usize) -> Vec<u32> {
    let greedy = SamplingOptions::default();
    let mut tokens = Vec::new();
    while tokens.len() < count {
        let n = 1 + tokens.len() % 17;
        let n = n.min(count - tokens.len());
        tokens.extend(generated(&mut s, n, &greedy));
        let mut fork = s.fork().unwrap();
        fork.decode(first).unwrap();
        generated(&mut other, 3, &greedy);
        if tokens.len() % 3 == 0 {
            let len = s.len() - 1;
            s.truncate(len).unwrap();
            s.decode(*tokens.last().unwrap()).unwrap();
        }
        break_off(&mut fork, 9, 4);
    }
    tokens
}

/// Generates tokens, and stops at one of them.
fn break_off(session: &mut Session, max_tokens: usize, at: usize) {
    let options = GenerateOptions {
        max_tokens,
        ignore_model_stops: true,
        ..GenerateOptions::default()
    };
    let mut count = 0;
    session
        .generate(&options, &mut |_| {
            count += 1;
            match count == at {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        })
        .unwrap();
}

#[test]
fn a_step_ahead_changes_nothing() {
    let Some(gpu) = gpu() else { return };
    let model = load_on(Device::Cuda(gpu), &golden("qwen3_tied"));
    let prompt = some_tokens(&model, 30);
    let new = || prompted(&model, &with_context(200), &prompt);
    let greedy = SamplingOptions::default();
    let want = by_logits(&mut new(), 120);
    assert_eq!(generated(&mut new(), 120, &greedy), want);
    assert_eq!(in_pieces(new(), new(), want[0], 120), want);

    // Several together get what each would get alone.
    let mut sessions = [new(), new(), new()];
    let mut next: Vec<u32> = sessions.iter_mut().map(|s| s.argmax().unwrap()).collect();
    for &token in &want[1..100] {
        let mut all: Vec<&mut Session> = sessions.iter_mut().collect();
        next = session::step_choose(&mut all, &next, &[&greedy; 3], true).unwrap();
        assert_eq!(next, [token; 3]);
    }
}

/// A pass is counted as recorded when it first runs, and not when it runs again.
#[test]
fn passes_are_recorded_once() {
    let Some(gpu) = gpu() else { return };
    let model = load_on(Device::Cuda(gpu), &golden("qwen3_tied"));
    let prompt = some_tokens(&model, 20);
    let recorded_after_a_text = || {
        let mut session = prompted(&model, &with_context(64), &prompt);
        generated(&mut session, 12, &SamplingOptions::default());
        model.recorded_passes()
    };
    let first = recorded_after_a_text();
    assert!(first > 0);
    assert_eq!(recorded_after_a_text(), first);
}

/// A deterministic model: steps of two sessions have the tokens of generations of one.
fn deterministic(gpu: Arc<Gpu>) -> Arc<Served> {
    let options = LoadOptions {
        deterministic: true,
        ..LoadOptions::new(Device::Cuda(gpu))
    };
    Served::load(&golden("qwen3_tied"), &options).unwrap()
}

#[test]
fn adjusted_logits_decide_on_a_gpu_too() {
    let Some(gpu) = gpu() else { return };
    let model = deterministic(gpu);
    let prompt = some_tokens(&model, 20);
    let new = || prompted(&model, &with_context(200), &prompt);
    let free = by_logits(&mut new(), 12);
    // Excludes the tokens that come without it, but for the last.
    let adjustments = LogitAdjustments {
        bias: free[..11].iter().map(|&t| (t, f32::NEG_INFINITY)).collect(),
        bad_words: vec![vec![free[11], free[11]]],
        ..LogitAdjustments::default()
    };
    let allowed = |logits: &[f32], last: u32| {
        let is_allowed = |i: usize| {
            !free[..11].contains(&(i as u32)) && (i as u32 != free[11] || last != free[11])
        };
        (0..logits.len())
            .filter(|&i| is_allowed(i))
            .reduce(|b, i| if logits[i] > logits[b] { i } else { b })
            .unwrap() as u32
    };
    let mut by_hand = new();
    let mut want = Vec::new();
    for _ in 0..12 {
        let last = *by_hand.tokens().last().unwrap();
        let token = allowed(by_hand.logits().unwrap(), last);
        want.push(token);
        by_hand.decode(token).unwrap();
    }
    let how = GenerateOptions {
        max_tokens: 12,
        ignore_model_stops: true,
        adjustments,
        ..GenerateOptions::default()
    };
    let made = new().generate(&how, &mut |_| ControlFlow::Continue(()));
    assert_eq!(made.unwrap().tokens, want);
    // Steps of a session with adjustments beside one without.
    let none = LogitAdjustments::default();
    let greedy = SamplingOptions::default();
    let choice = |adjustments| StepChoice {
        sampling: &greedy,
        adjustments,
        top_log_probabilities: None,
    };
    let choices = [choice(&how.adjustments), choice(&none)];
    let (mut a, mut b) = (new(), new());
    let mut next = vec![want[0], free[0]];
    for i in 1..12 {
        next = session::step_choose_with(&mut [&mut a, &mut b], &next, &choices, true).unwrap();
        assert_eq!(next, [want[i], free[i]], "step {i}");
    }
}

/// Sessions of one prompt on a deterministic model, whose tokens are drawn.
struct Drawing {
    model: Arc<Served>,
    prompt: Vec<u32>,
    sampling: SamplingOptions,
}

impl Drawing {
    fn new(gpu: Arc<Gpu>) -> Drawing {
        let model = deterministic(gpu);
        Drawing {
            prompt: some_tokens(&model, 20),
            model,
            sampling: SamplingOptions {
                temperature: 0.9,
                min_p: 0.001,
                repetition_penalty: 1.1,
                seed: Some(5),
                ..SamplingOptions::default()
            },
        }
    }

    /// A session that has run the prompt and some tokens after it.
    fn after(&self, tokens: &[u32]) -> Session {
        let all = [&self.prompt[..], tokens].concat();
        prompted(&self.model, &with_context(200), &all)
    }

    /// The tokens that a host chooses, which reads the logits of each.
    fn by_hand(&self, how: &LogitAdjustments, count: usize) -> Vec<u32> {
        let mut session = self.after(&[]);
        let sampler = Sampler::new(&self.sampling).unwrap();
        let mut sampler = sampler.after(self.prompt.len());
        let mut choose = |_| {
            let token = session.sample_adjusted(&mut sampler, how, None).unwrap();
            session.decode(token).unwrap();
            token
        };
        (0..count).map(&mut choose).collect()
    }

    /// The tokens that a generation of up to 60 chooses.
    fn generate(&self, adjustments: LogitAdjustments, stop_tokens: &[u32]) -> Vec<u32> {
        let how = GenerateOptions {
            max_tokens: 60,
            sampling: self.sampling.clone(),
            ignore_model_stops: true,
            adjustments,
            stop_tokens: stop_tokens.to_vec(),
            ..GenerateOptions::default()
        };
        let made = self
            .after(&[])
            .generate(&how, &mut |_| ControlFlow::Continue(()));
        made.unwrap().tokens
    }
}

/// Generations with samplers choose as a host does that reads the logits of each token, and so do steps of a session with samplers beside one
/// without.
#[test]
fn samplers_choose_from_the_logits_of_a_gpu() {
    let Some(gpu) = gpu() else { return };
    let drawing = Drawing::new(gpu);
    let all = LogitAdjustments {
        no_repeat_ngram_size: 3,
        dry: Dry {
            multiplier: 0.5,
            allowed_length: 1,
            ..Dry::default()
        },
        repetition_window: 16,
        top_n_sigma: 2.5,
        typical_p: 0.95,
        xtc_probability: 0.5,
        xtc_threshold: 0.01,
        ..LogitAdjustments::default()
    };
    let want = drawing.by_hand(&all, 60);
    assert_eq!(drawing.generate(all.clone(), &[]), want);
    let none = LogitAdjustments::default();
    let plain = drawing.by_hand(&none, 60);
    assert_ne!(want, plain);
    let choices = [&all, &none].map(|adjustments| StepChoice {
        sampling: &drawing.sampling,
        adjustments,
        top_log_probabilities: None,
    });
    let (mut a, mut b) = (drawing.after(&[]), drawing.after(&[]));
    let mut next = vec![want[0], plain[0]];
    for i in 1..60 {
        next = session::step_choose_with(&mut [&mut a, &mut b], &next, &choices, true).unwrap();
        assert_eq!(next, [want[i], plain[i]], "step {i}");
    }
}

/// Tokens that end the text are excluded at first; then, with no sampler left, the device chooses alone.
#[test]
fn a_gpu_chooses_alone_where_no_sampler_is_left() {
    let Some(gpu) = gpu() else { return };
    let drawing = Drawing::new(gpu);
    let plain = drawing.by_hand(&LogitAdjustments::default(), 31);
    let ends = [plain[2], plain[30]];
    let excluded = LogitAdjustments {
        bias: ends.map(|end| (end, f32::NEG_INFINITY)).to_vec(),
        ..LogitAdjustments::default()
    };
    let mut want = drawing.by_hand(&excluded, 25);
    let mut session = drawing.after(&want);
    let sampler = Sampler::new(&drawing.sampling).unwrap();
    let mut sampler = sampler.after(session.len());
    while want.len() < 60 {
        let token = session.sample(&mut sampler).unwrap();
        if ends.contains(&token) {
            break;
        }
        session.decode(token).unwrap();
        want.push(token);
    }
    let least = LogitAdjustments {
        min_tokens: 25,
        ..LogitAdjustments::default()
    };
    assert_eq!(drawing.generate(least, &ends), want);
}

#[test]
fn scores_on_a_gpu_are_those_of_its_logits() {
    let Some(gpu) = gpu() else { return };
    let model = load_on(Device::Cuda(gpu), &golden("qwen3_tied"));
    let all = some_tokens(&model, 150);
    let options = with_context(256);
    let mut session = prompted(&model, &options, &all[..20]);
    let continuations = [&all[20..120], &all[3..4], &all[60..100], &[]];
    let scores = session.score(&continuations).unwrap();
    let mut argmaxes = 0;
    assert_eq!(session.tokens(), &all[..20]);
    for (tokens, scores) in continuations.iter().zip(&scores) {
        assert_eq!(scores.len(), tokens.len());
        let mut by_hand = prompted(&model, &options, &all[..20]);
        for (&token, score) in tokens.iter().zip(scores) {
            let logits = as_f64(by_hand.logits().unwrap());
            let sum: f64 = logits.iter().map(|l| l.exp()).sum();
            let want = logits[token as usize] - sum.ln();
            // Steps and prompts sum in other orders.
            let got = f64::from(score.log_probability);
            assert!((got - want).abs() < 0.02, "{got} and not {want}");
            argmaxes += usize::from(score.is_argmax);
            by_hand.decode(token).unwrap();
        }
    }
    assert!(argmaxes < 20, "{argmaxes} of given tokens are argmaxes");
    let greedy = generated(
        &mut session.fork().unwrap(),
        40,
        &SamplingOptions::default(),
    );
    let scores = session.score(&[&greedy]).unwrap();
    let argmaxes = scores[0].iter().filter(|score| score.is_argmax).count();
    // At a near tie, a step and a prompt may differ.
    assert!(argmaxes >= 36, "{argmaxes} of 40 greedy tokens");
}

#[test]
fn sessions_are_saved_on_one_device_and_restored_on_the_other() {
    let Some(gpu) = gpu() else { return };
    let cpu = load_on(Device::cpu(Some(1)).unwrap(), &golden("qwen3_tied"));
    let model = load_on(Device::Cuda(gpu), &golden("qwen3_tied"));
    let tokens = some_tokens(&cpu, 90);
    let path = std::env::temp_dir().join(format!("nvfp4-cuda-{}.session", std::process::id()));
    for kv in [KvType::F16, KvType::F8] {
        let options = SessionOptions {
            kv,
            ..with_context(128)
        };
        for (from, to) in [(&model, &cpu), (&cpu, &model), (&model, &model)] {
            let mut session = prompted(from, &options, &tokens);
            session.save(&path).unwrap();
            let mut restored = Session::restore(to.clone(), &path).unwrap();
            session.decode(3).unwrap();
            restored.decode(3).unwrap();
            let want = as_f64(session.logits().unwrap());
            let got = restored.logits().unwrap();
            assert_close(got, &want, 5e-3, "a restored session");
        }
    }
    std::fs::remove_file(&path).unwrap();
}

/// Sessions that are stepped together choose what each would choose by itself, whatever the others do, with options that change
/// from step to step, and after steps that were not what the device had begun.
#[test]
fn steps_choose_what_sessions_choose() {
    let Some(gpu) = gpu() else { return };
    let model = load_on(Device::Cuda(gpu), &golden("qwen3_tied"));
    let greedy = SamplingOptions::default();
    let warm = SamplingOptions {
        temperature: 0.9,
        top_p: 0.9,
        seed: Some(5),
        ..greedy
    };
    let penalized = SamplingOptions {
        temperature: 1.2,
        repetition_penalty: 1.4,
        seed: Some(6),
        ..greedy
    };
    let mut sessions = [5, 70, 63].map(|n| {
        let prompt = some_tokens(&model, n);
        prompted(&model, &SessionOptions::default(), &prompt)
    });
    let mut tokens = vec![7u32, 8, 9];
    for round in 0..60 {
        let how = match round / 10 % 3 {
            0 => [&warm, &penalized, &greedy],
            1 => [&greedy; 3],
            _ => [&penalized, &warm, &warm],
        };
        if round % 7 == 3 {
            // Not what the device has chosen.
            tokens = vec![1, 2, 3];
        }
        let mut all: Vec<&mut Session> = sessions.iter_mut().collect();
        let next = session::step_choose(&mut all, &tokens, &how, true).unwrap();
        // A fork does not disturb what the device has begun, and the logits of the same batch have the same bits.
        let mut forks: Vec<Session> = sessions.iter().map(|s| s.fork().unwrap()).collect();
        for s in &mut forks {
            s.truncate(s.len() - 1).unwrap();
        }
        if round % 5 == 0 {
            let mut all: Vec<&mut Session> = forks.iter_mut().collect();
            session::step(&mut all, &tokens).unwrap();
            for ((fork, how), &next) in forks.iter_mut().zip(how).zip(&next) {
                let mut sampler = Sampler::new(how).unwrap().after(fork.len());
                assert_eq!(fork.sample(&mut sampler).unwrap(), next, "round {round}");
            }
        }
        tokens = next;
    }
}

/// A model whose weights are plain bf16, as models are published, in conversations whose prompts are long and short.
#[test]
fn conversations_are_those_of_the_processor() {
    let Some(gpu) = gpu() else { return };
    let thinker = std::env::temp_dir().join(format!("nvfp4-thinker-{}", std::process::id()));
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/common/thinker.py");
    let python = Command::new("python3").arg(script).arg(&thinker).status();
    assert!(python.unwrap().success());
    let held = |device: Device| {
        let model = load_on(device, &thinker);
        let mut session = Session::new(model.clone(), &SessionOptions::default()).unwrap();
        for question in ["Why is the sky blue, and what of the sea?", "Hm?", ""] {
            let options = GenerateOptions::of(&model);
            session
                .chat(question, None, &options, &mut |_| ControlFlow::Continue(()))
                .unwrap();
        }
        (session.messages().unwrap(), session.tokens().to_vec())
    };
    let (said, tokens) = held(Device::Cuda(gpu));
    let wanted = held(Device::cpu(None).unwrap());
    assert_eq!((&said, &tokens), (&wanted.0, &wanted.1));
    assert_eq!(said.len(), 6);
    assert!(said[5].reasoning_content.is_some() && said[3].text().starts_with("Blue"));
    let _ = std::fs::remove_dir_all(&thinker);
}

/// Runs a prompt, and cancels it from another thread after some microseconds.
fn cancelled(session: &mut Session, tokens: &[u32], microseconds: u128) -> Result<()> {
    let cancel = Cancel::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let begun = Instant::now();
            while begun.elapsed().as_micros() < microseconds {
                std::hint::spin_loop();
            }
            cancel.cancel();
        });
        cancel.watching(|| session.prefill(tokens))
    })
}

/// A prompt that is cancelled at any moment leaves its session as it was, and the device in order.
#[test]
fn a_cancelled_prompt_on_a_gpu_changes_nothing() {
    let Some(gpu) = gpu() else { return };
    let model = load_on(Device::Cuda(gpu), &golden("qwen3_tied"));
    let (head, tokens) = (some_tokens(&model, 6), some_tokens(&model, 200));
    let new = || prompted(&model, &SessionOptions::default(), &head);
    let mut session = new();
    let mut before = session.logits().unwrap().to_vec();
    let expected = {
        let mut whole = new();
        whole.prefill(&tokens).unwrap();
        whole.logits().unwrap().to_vec()
    };
    let mut ended = 0;
    for delay in 0..200 {
        match cancelled(&mut session, &tokens, delay * 5) {
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::Cancelled, "{e}");
                assert_eq!(session.len(), head.len());
                assert!(session.logits().unwrap() == before);
                ended += 1;
            }
            Ok(()) => {
                session.truncate(head.len()).unwrap();
                // Now of one token alone, which adds up in another order.
                before = session.logits().unwrap().to_vec();
            }
        }
    }
    assert!(ended > 0);
    let heard = RefCell::new(Vec::new());
    let progress = |p: Progress| {
        heard.borrow_mut().push((p.done, p.total));
        ControlFlow::Continue(())
    };
    let watch = Watch {
        progress: Some(&progress),
        ..Watch::default()
    };
    let mut again = new();
    watch.during(|| again.prefill(&tokens).unwrap());
    assert_eq!(heard.borrow().last(), Some(&(200, 200)));
    assert!(again.logits().unwrap() == expected);
}

/// The session files of these tests, removed at the end.
struct File(std::path::PathBuf);

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn layers_with_a_window_keep_no_more_than_they_need() {
    let Some(gpu) = gpu() else { return };
    for case in ["gemma3_wide", "mistral_window", "gemma4_shared"] {
        let dir = windows::lengthened(case);
        let model = load_on(Device::Cuda(gpu.clone()), &dir.0);
        let name = format!("nvfp4-windows-{}-{case}", std::process::id());
        let path = File(std::env::temp_dir().join(name));
        windows::check(&model, &path.0, &|got, want, what| {
            let bar = 5e-3 * coarseness(&model);
            assert_close(got, &as_f64(want), bar, &format!("{case}, {what}"));
        });
    }
}

#[test]
fn recurrent_layers_keep_few_states() {
    let Some(gpu) = gpu() else { return };
    for case in ["qwen35_tied", "qwen3next_dense", "nemotronh_dense"] {
        let dir = windows::lengthened(case);
        let model = load_on(Device::Cuda(gpu.clone()), &dir.0);
        let name = format!("nvfp4-states-{}-{case}", std::process::id());
        let path = File(std::env::temp_dir().join(name));
        recurrent::check(&model, &path.0, &|got, want, what| {
            assert_close(got, &as_f64(want), 1e-2, &format!("{case}, {what}"));
        });
    }
}

/// Steps of any number of sessions, over the ends of blocks, whether or not the device runs ahead: each session has what it has alone.
#[test]
fn steps_of_any_size_are_those_of_sessions_alone() {
    let Some(gpu) = gpu() else { return };
    for case in [
        "qwen3_tied",
        "qwen35_tied",
        "nemotronh_dense",
        "gemma4_wide",
        "gemma4_shared",
    ] {
        let model = load_on(Device::Cuda(gpu.clone()), &golden(case));
        check_steps_of_any_size(&model);
    }
}

fn check_steps_of_any_size(model: &Arc<Served>) {
    let options = with_context(256);
    for (count, ahead) in [
        (1, true),
        (2, false),
        (3, true),
        (5, true),
        (9, false),
        (13, true),
    ] {
        let prompt = |i: usize| some_tokens(model, 50 + 3 * i);
        let mut sessions: Vec<Session> = (0..count)
            .map(|i| prompted(model, &options, &prompt(i)))
            .collect();
        let (greedy, mut taken) = (SamplingOptions::default(), vec![Vec::new(); count]);
        let mut tokens: Vec<u32> = (0..count as u32).collect();
        for _ in 0..30 {
            taken
                .iter_mut()
                .zip(&tokens)
                .for_each(|(all, &token)| all.push(token));
            let mut together: Vec<&mut Session> = sessions.iter_mut().collect();
            let rules = vec![&greedy; count];
            tokens = session::step_choose(&mut together, &tokens, &rules, ahead).unwrap();
        }
        for (i, (mut session, taken)) in sessions.into_iter().zip(taken).enumerate() {
            let alone = [prompt(i), taken].concat();
            let mut alone = prompted(model, &options, &alone);
            let want = as_f64(alone.logits().unwrap());
            let what = format!("session {i} of {count}");
            assert_close(session.logits().unwrap(), &want, 5e-3, &what);
        }
    }
}

/// Rows that pad a step have faults of their own, which no session ever sees.
#[test]
fn faults_of_padding_are_nobodys() {
    let Some(gpu) = gpu() else { return };
    let dir = ragged::spoil(0);
    let model = load_on(Device::Cuda(gpu), &dir.0);
    let new = |i: u32| prompted(&model, &with_context(128), &[20 + i, 9, 8]);
    let mut sessions: Vec<Session> = (0..4).map(new).collect();
    let mut alone: Vec<Session> = (0..4).map(new).collect();
    let greedy = SamplingOptions::default();
    let mut three: Vec<&mut Session> = sessions[..3].iter_mut().collect();
    session::step_choose(&mut three, &[5, 6, 9], &[&greedy; 3], true).unwrap();
    let mut all: Vec<&mut Session> = sessions.iter_mut().collect();
    session::step(&mut all, &[11, 12, 13, 14]).unwrap();
    sessions[3].prefill(&[20, 21, 22, 23, 24]).unwrap();
    for (i, (session, alone)) in sessions.iter_mut().zip(&mut alone).enumerate() {
        let tokens = match i {
            3 => vec![14, 20, 21, 22, 23, 24],
            _ => vec![[5, 6, 9][i], 11 + i as u32],
        };
        alone.prefill(&tokens).unwrap();
        let want = as_f64(alone.logits().unwrap());
        assert_close(
            session.logits().unwrap(),
            &want,
            5e-3,
            &format!("session {i}"),
        );
    }
}
