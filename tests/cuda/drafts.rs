//! Drafts on a GPU: the drafter against the processor, verification against single steps, and generations with drafts against those without.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use NVFP4::engine::{NewTokens, NextDrafts, Sequence, Served};
use NVFP4::model::{Choice, Device, KvType, Logits, Output, Scratch, Verification, Wanted};
use NVFP4::session::{GenerateOptions, Generation, SamplingOptions, Session};

use crate::common::drafters::{Guess, made};
use crate::common::{golden, some_tokens};
use crate::support::{as_f64, assert_close, gpu, load_on, prompted, relative_l2, with_context};

const CASES: [&str; 3] = ["qwen35_drafter", "qwen35moe_drafter", "qwen3next_drafter"];

/// The most that two logits between which a choice parts may differ: rounding decides between them.
const TIE: f32 = 2e-2;

fn run(model: &Served, sequence: &mut Sequence, tokens: &[u32]) {
    let work = NewTokens {
        tokens,
        sequence,
        wanted: Wanted::Nothing,
    };
    let done = model.run(vec![work], false, &mut Scratch::new(), &mut Vec::new());
    done.unwrap().pop().unwrap().unwrap();
}

/// A sequence that drafts, with these tokens in runs of `step`.
fn drafting(model: &Served, tokens: &[u32], step: usize) -> Sequence {
    let mut sequence = model.sequence(256, model_kv(model)).unwrap();
    sequence.set_drafts(true).unwrap();
    tokens
        .chunks(step)
        .for_each(|part| run(model, &mut sequence, part));
    sequence
}

fn model_kv(model: &Served) -> KvType {
    match model.device().is_cuda() {
        true => KvType::F16,
        false => KvType::F32,
    }
}

/// The logits after all tokens, in runs as a sequence without drafts has them.
fn next_logits(model: &Served, tokens: &[u32]) -> Vec<f32> {
    let mut sequence = model.sequence(256, model_kv(model)).unwrap();
    let mut logits = Vec::new();
    let scratch = &mut Scratch::new();
    model
        .forward(tokens, &mut sequence, scratch, Logits::Last, &mut logits)
        .unwrap();
    logits
}

/// Fails unless `token` is the argmax after these tokens, or as good as that.
#[track_caller]
fn assert_best(model: &Served, tokens: &[u32], token: u32, what: &str) {
    let logits = next_logits(model, tokens);
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let gap = best - logits[token as usize];
    assert!(
        gap <= TIE,
        "{what}: token {token} is {gap} below the argmax"
    );
}

/// The argmax after these tokens and `count` more.
fn greedy_text(model: &Served, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut text = prompt.to_vec();
    for _ in 0..count {
        let logits = next_logits(model, &text);
        let best = (0..logits.len()).reduce(|b, i| if logits[i] > logits[b] { i } else { b });
        text.push(best.unwrap() as u32);
    }
    text
}

/// The drafter's logits, at positions that steps and runs of several tokens came to.
#[test]
fn drafters_agree_with_the_processor() {
    let Some(gpu) = gpu() else { return };
    for case in CASES {
        let cpu = load_on(Device::cpu(Some(2)).unwrap(), &golden(case));
        let model = load_on(Device::Cuda(gpu.clone()), &golden(case));
        assert!(model.has_drafter());
        let tokens = some_tokens(&cpu, 140);
        for (step, len) in [(1, 9), (5, 33), (64, 130), (200, 100)] {
            let each = [&cpu, &model].map(|model| {
                let mut sequence = drafting(model, &tokens[..len], step);
                let scratch = &mut Scratch::new();
                let mut all = Vec::new();
                for &next in &tokens[len..len + 5] {
                    let logits = model.drafter_logits(&mut sequence, next, scratch);
                    all.push(logits.unwrap());
                    run(model, &mut sequence, &[next]);
                }
                all
            });
            let [want, got] = each;
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let far = relative_l2(got, &as_f64(want));
                let what = format!("{case}, {len} tokens by {step}, row {i}: {far:.1e}");
                println!("{what}");
                // A row whose experts are as good as others may go to those.
                let bar = if case == "qwen35_drafter" { 2e-2 } else { 0.5 };
                assert!(far <= bar, "{what}");
            }
        }
    }
}

fn choice<'a>(options: &'a SamplingOptions, draw: u64, history: &'a [u32]) -> Choice<'a> {
    Choice {
        options,
        draw,
        history,
        allowed: None,
    }
}

/// Drafted tokens are those that the drafter's logits choose one at a time, for each of several sequences.
#[test]
fn drafts_of_several_sequences_are_those_of_each() {
    let Some(gpu) = gpu() else { return };
    let greedy = SamplingOptions::default();
    let warm = SamplingOptions {
        temperature: 0.8,
        top_k: 20,
        repetition_penalty: 1.2,
        seed: Some(3),
        ..greedy
    };
    for case in CASES {
        let model = load_on(Device::Cuda(gpu.clone()), &golden(case));
        let tokens = some_tokens(&model, 80);
        let lengths = [7, 62, 33];
        for options in [[&greedy; 3], [&warm, &greedy, &warm]] {
            let mut sequences = lengths.map(|len| drafting(&model, &tokens[..len], 200));
            let mut work: Vec<NextDrafts<'_>> = sequences
                .iter_mut()
                .zip(lengths)
                .zip(options)
                .map(|((sequence, len), options)| NextDrafts {
                    sequence,
                    choice: choice(options, 4, &tokens[..len + 1]),
                })
                .collect();
            // More than the host reads at a time.
            let together = model.draft(&mut work, 21, &mut Scratch::new()).unwrap();
            for ((len, options), together) in lengths.into_iter().zip(options).zip(&together) {
                let mut sequence = drafting(&model, &tokens[..len], 200);
                let mut alone = [NextDrafts {
                    sequence: &mut sequence,
                    choice: choice(options, 4, &tokens[..len + 1]),
                }];
                let alone = model.draft(&mut alone, 21, &mut Scratch::new()).unwrap();
                assert_eq!(together.len(), 21, "{case}");
                let same = alone[0].iter().zip(together).take_while(|(a, b)| a == b);
                // Rounding decides between near ones, after which texts are different ones.
                assert!(same.count() >= 3, "{case}: {alone:?}, {together:?}");
            }
        }
        // The first one is the choice from the logits.
        let mut sequence = drafting(&model, &tokens[..40], 7);
        let scratch = &mut Scratch::new();
        let logits = model.drafter_logits(&mut sequence, tokens[40], scratch);
        let logits = logits.unwrap();
        let best = (0..logits.len()).reduce(|b, i| if logits[i] > logits[b] { i } else { b });
        let mut work = [NextDrafts {
            sequence: &mut sequence,
            choice: choice(&greedy, 0, &tokens[..41]),
        }];
        let drafted = model.draft(&mut work, 1, scratch).unwrap();
        assert_eq!(drafted, [[best.unwrap() as u32]], "{case}");
    }
}

/// The texts of a test of verification: a prompt and the greedy text after it, and drafts for several sequences, right up to the number of
/// tokens that stay.
struct Drafted {
    prompt: Vec<u32>,
    text: Vec<u32>,
    drafts: [Vec<u32>; 5],
}

/// Tokens of each sequence that stay.
const STAY: [usize; 5] = [4, 2, 1, 2, 11];

impl Drafted {
    fn new(model: &Served) -> Drafted {
        let prompt = some_tokens(model, 61);
        let text = greedy_text(model, &prompt, 12);
        let chosen = &text[61..];
        let wrong = |token: u32| (token + 1) % model.spec().vocab_size as u32;
        let drafts = [
            chosen[1..4].to_vec(),
            vec![chosen[1], wrong(chosen[2]), chosen[3], chosen[4]],
            vec![wrong(chosen[1])],
            // The third of the chosen tokens ends the text.
            chosen[1..4].to_vec(),
            // Longer than passes are recorded for.
            chosen[1..11].to_vec(),
        ];
        Drafted {
            prompt,
            text,
            drafts,
        }
    }

    /// Verifies the drafts of the first `count` sequences in one pass, `beside` a prompt or not.
    fn check(&self, model: &Served, count: usize, beside: bool, follows: bool, case: &str) {
        let (greedy, chosen) = (SamplingOptions::default(), &self.text[61..]);
        let mut sequences: Vec<Sequence> = (0..count)
            .map(|_| {
                let mut sequence = drafting(model, &self.prompt, 40);
                sequence.set_drafts(follows).unwrap();
                sequence
            })
            .collect();
        let drafts = self.drafts[..count].iter();
        let tokens: Vec<Vec<u32>> = drafts.map(|d| [&chosen[..1], d].concat()).collect();
        let histories = tokens.iter().map(|t| [&self.prompt[..], t].concat());
        let histories: Vec<Vec<u32>> = histories.collect();
        let each = tokens.iter().zip(&histories).zip(&mut sequences);
        let mut work: Vec<NewTokens<'_>> = each
            .enumerate()
            .map(|(i, ((tokens, history), sequence))| NewTokens {
                tokens,
                sequence,
                wanted: Wanted::Verified(Verification {
                    choice: choice(&greedy, 0, history),
                    stops: if i == 3 { &chosen[2..3] } else { &[] },
                }),
            })
            .collect();
        let mut other = model.sequence(256, KvType::F16).unwrap();
        if beside {
            work.push(NewTokens {
                tokens: &self.prompt[..30],
                sequence: &mut other,
                wanted: Wanted::Last,
            });
        }
        let scratch = &mut Scratch::new();
        let outputs = model.run(work, false, scratch, &mut Vec::new()).unwrap();
        let outputs = outputs.into_iter().map(Result::unwrap).zip(STAY);
        for (i, (output, len)) in outputs.take(count).enumerate() {
            let what = format!("{case}, segment {i} of {count}, {beside}, {follows}");
            check_verified(model, &self.text, &output, len, &mut sequences[i], &what);
        }
    }
}

/// Segments of several sequences that are verified in one pass, recorded or beside a prompt: right drafts stay up to the first wrong one or to
/// a token that ends the text, and each sequence goes on as if its tokens had run one at a time.
#[test]
fn verified_tokens_are_those_of_single_steps() {
    let Some(gpu) = gpu() else { return };
    for case in CASES {
        let model = load_on(Device::Cuda(gpu.clone()), &golden(case));
        let drafted = Drafted::new(&model);
        for (count, beside) in [(4, false), (4, true), (5, false), (1, false)] {
            for follows in [true, false] {
                drafted.check(&model, count, beside, follows, case);
            }
        }
    }
}

/// Checks the output of a verification of `len` right tokens after the prompt of a text, and that its sequence goes on as the text does.
fn check_verified(
    model: &Served,
    text: &[u32],
    output: &Output,
    len: usize,
    sequence: &mut Sequence,
    what: &str,
) {
    let Output::Verified(got) = output else {
        panic!("{what}: {output:?}");
    };
    for (i, &token) in got.iter().enumerate() {
        assert_best(model, &text[..62 + i], token, what);
    }
    if got[..] != text[62..62 + len] {
        // A near tie, as was just checked, or a right draft after one.
        println!("{what}: parts from the text");
        return;
    }
    assert_eq!(sequence.len(), 61 + len, "{what}");
    let (mut logits, scratch) = (Vec::new(), &mut Scratch::new());
    let next = &text[61 + len..62 + len];
    model
        .forward(next, sequence, scratch, Logits::Last, &mut logits)
        .unwrap();
    let want = as_f64(&next_logits(model, &text[..62 + len]));
    let far = relative_l2(&logits, &want);
    let bar = if model.info().architecture.contains("moe") || what.contains("next") {
        0.5
    } else {
        2e-2
    };
    assert!(far <= bar, "{what}: the next logits are {far:.1e} apart");
}

fn options(
    max_tokens: usize,
    drafts: Option<usize>,
    sampling: &SamplingOptions,
) -> GenerateOptions {
    GenerateOptions {
        max_tokens,
        drafts,
        sampling: sampling.clone(),
        ignore_model_stops: true,
        ..GenerateOptions::default()
    }
}

fn generate(session: &mut Session, options: &GenerateOptions) -> Generation {
    session
        .generate(options, &mut |_| ControlFlow::Continue(()))
        .unwrap()
}

fn load_made(case: &str, guess: Guess, device: Device) -> Arc<Served> {
    let dir = made(case, guess);
    let path: &Path = &dir.0;
    load_on(device, path)
}

/// Texts are those without drafts, whatever the drafter guesses, and whether or not steps run ahead between verifications. In these models
/// the next token depends on the last one alone, by logits that are far apart.
#[test]
fn drafts_change_no_token() {
    let Some(gpu) = gpu() else { return };
    let greedy = SamplingOptions {
        seed: Some(1),
        ..SamplingOptions::default()
    };
    let warm = SamplingOptions {
        temperature: 0.7,
        top_k: 5,
        repetition_penalty: 1.1,
        seed: Some(5),
        ..SamplingOptions::default()
    };
    for case in CASES {
        for guess in [Guess::Right, Guess::Near, Guess::Wrong] {
            let model = load_made(case, guess, Device::Cuda(gpu.clone()));
            let prompt = some_tokens(&model, 21);
            for sampling in [&greedy, &warm] {
                let new = || prompted(&model, &with_context(256), &prompt);
                let want = generate(&mut new(), &options(90, Some(0), sampling));
                for drafts in [Some(1), Some(3), Some(7), Some(12), None] {
                    let mut session = new();
                    let got = generate(&mut session, &options(90, drafts, sampling));
                    let what = format!("{case}, {guess:?}, {drafts:?}: {:?}", got.drafts);
                    println!("{what}");
                    assert_eq!(got.tokens, want.tokens, "{what}");
                    assert!(got.drafts.drafted > 0, "{what}");
                    match (guess, drafts) {
                        (Guess::Right, Some(_)) => {
                            // A draw may fall between two tokens whose probabilities the drafter rounds otherwise.
                            let share = if sampling.is_greedy() { 1.0 } else { 0.9 };
                            let least = share * got.drafts.drafted as f64;
                            assert!(got.drafts.accepted as f64 >= least, "{what}");
                        }
                        (Guess::Wrong, Some(_)) => assert_eq!(got.drafts.accepted, 0, "{what}"),
                        _ => {}
                    }
                    // It goes on, by logits of the same text.
                    let text = session.tokens().to_vec();
                    let mut whole = prompted(&model, &with_context(256), &text);
                    let want = as_f64(whole.logits().unwrap());
                    assert_close(session.logits().unwrap(), &want, 2e-2, &what);
                }
            }
        }
    }
}

/// Random drafters and models: greedy texts with drafts are the argmax of the text before, or part from it at a near tie; forks and cuts among
/// drafts change nothing.
#[test]
fn greedy_texts_with_drafts_are_those_of_the_model() {
    let Some(gpu) = gpu() else { return };
    let model = load_on(Device::Cuda(gpu), &golden("qwen35_drafter"));
    let greedy = SamplingOptions::default();
    let prompt = some_tokens(&model, 30);
    for drafts in [Some(2), Some(5), None] {
        let mut session = prompted(&model, &with_context(256), &prompt);
        for round in 0..4 {
            generate(&mut session, &options(17, drafts, &greedy));
            let mut fork = session.fork().unwrap();
            generate(&mut fork, &options(3, drafts, &greedy));
            let len = session.len() - round;
            session.truncate(len).unwrap();
        }
        let text = session.tokens().to_vec();
        for at in prompt.len()..text.len() {
            assert_best(
                &model,
                &text[..at],
                text[at],
                &format!("{drafts:?}, token {at}"),
            );
        }
    }
}

/// A session that drafts is saved on one device and drafts on the other.
#[test]
fn sessions_that_draft_move_between_devices() {
    let Some(gpu) = gpu() else { return };
    let cpu = load_on(Device::cpu(Some(2)).unwrap(), &golden("qwen35_drafter"));
    let model = load_on(Device::Cuda(gpu), &golden("qwen35_drafter"));
    let tokens = some_tokens(&cpu, 90);
    let path = std::env::temp_dir().join(format!("nvfp4-drafts-{}.session", std::process::id()));
    let greedy = SamplingOptions::default();
    for (from, to) in [(&model, &cpu), (&cpu, &model), (&model, &model)] {
        let mut session = prompted(from, &with_context(200), &tokens);
        session.save(&path).unwrap();
        let mut restored = Session::restore(to.clone(), &path).unwrap();
        let got = generate(&mut restored, &options(20, Some(3), &greedy));
        assert!(got.drafts.drafted > 0);
        let want = generate(&mut session, &options(1, Some(3), &greedy));
        assert_eq!(got.tokens[0], want.tokens[0]);
    }
    std::fs::remove_file(&path).unwrap();
}

/// Passes of the model in the folder that NVFP4_DRAFTS_MODEL names, `--ignored --nocapture`: tokens of one sequence that are verified in one
/// pass, all of them wrong but the first, beside a step of one token.
#[test]
#[ignore = "measures"]
fn verification_speed() {
    let (Some(gpu), Ok(path)) = (gpu(), std::env::var("NVFP4_DRAFTS_MODEL")) else {
        return;
    };
    let model = load_on(Device::Cuda(gpu), Path::new(&path));
    let tokens = some_tokens(&model, 128);
    let greedy = SamplingOptions::default();
    let scratch = &mut Scratch::new();
    let mut medians = Vec::new();
    for rows in [1, 2, 4, 8] {
        let mut sequence = drafting(&model, &tokens, 128);
        let mut times: Vec<f64> = (0..40)
            .map(|_| {
                let history = vec![1; sequence.len() + rows];
                let work = NewTokens {
                    tokens: &history[..rows],
                    sequence: &mut sequence,
                    wanted: Wanted::Verified(Verification {
                        choice: choice(&greedy, 0, &history),
                        stops: &[],
                    }),
                };
                let start = Instant::now();
                let done = model.run(vec![work], false, scratch, &mut Vec::new());
                done.unwrap().pop().unwrap().unwrap();
                start.elapsed().as_secs_f64()
            })
            .collect();
        times.sort_by(f64::total_cmp);
        medians.push(times[times.len() / 2]);
        let ms = medians[medians.len() - 1] * 1e3;
        let ratio = medians[medians.len() - 1] / medians[0];
        println!("{rows} rows: {ms:.3} ms, {ratio:.3} times one row");
    }
}
