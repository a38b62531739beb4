//! Drafters: their logits against transformers, and generations with drafts against those without: the same tokens, logits and states.
//! Goldens and the script that made them (`drafter.py`) are in `tests/golden/model`.

mod common;

use std::fs;
use std::ops::ControlFlow;
use std::sync::Arc;

use NVFP4::base::ErrorKind;
use NVFP4::engine::{NewTokens, Sequence, Served};
use NVFP4::format::random::bits;
use NVFP4::model::{KvType, Scratch, Wanted};
use NVFP4::session::{
    Eviction, GenerateOptions, Generation, MOST_DRAFTS, Piece, SamplingOptions, Session,
    SessionOptions, step,
};
use common::{Copy, cases, change_tensor, expect_kind, golden, load, options, some_tokens};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

/// The bar of the parity tests.
const TOLERANCE: f32 = 2e-4;

const CASES: [&str; 3] = ["qwen35_drafter", "qwen35moe_drafter", "qwen3next_drafter"];

/// The numbers of drafts that generations have here; `None` adapts.
const DRAFTS: [Option<usize>; 4] = [Some(1), Some(3), Some(7), None];

fn run(model: &Served, sequence: &mut Sequence, tokens: &[u32]) {
    let work = NewTokens {
        tokens,
        sequence,
        wanted: Wanted::Nothing,
    };
    let done = model.run(vec![work], false, &mut Scratch::new(), &mut Vec::new());
    done.unwrap().pop().unwrap().unwrap();
}

/// The drafter's logits at the last positions whose next token is known, after runs of `step` tokens.
fn drafted(model: &Served, tokens: &[u32], step: usize, kept: usize) -> Vec<f32> {
    let mut sequence = model.sequence(tokens.len(), KvType::F32).unwrap();
    sequence.set_drafts(true).unwrap();
    let mut scratch = Scratch::new();
    let (before, after) = tokens.split_at(tokens.len() - kept);
    for part in before.chunks(step) {
        run(model, &mut sequence, part);
    }
    let logits = after.iter().map(|&next| {
        let logits = model.drafter_logits(&mut sequence, next, &mut scratch);
        run(model, &mut sequence, &[next]);
        logits.unwrap()
    });
    logits.collect::<Vec<_>>().concat()
}

#[test]
fn drafters_agree_with_transformers() {
    for case in CASES {
        let model = load(case);
        assert!(model.has_drafter());
        let bytes = fs::read(golden(case).join("expected.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for length in [7, 33, 100] {
            let tokens = file.tensor(&format!("tokens_{length}")).unwrap();
            let (tokens, _) = tokens.data().as_chunks::<8>();
            let tokens: Vec<u32> = tokens
                .iter()
                .map(|b| i64::from_le_bytes(*b) as u32)
                .collect();
            let want = file.tensor(&format!("drafted_{length}")).unwrap();
            let (want, _) = want.data().as_chunks::<4>();
            let kept = want.len() / model.spec().vocab_size;
            let mut same = Vec::new();
            for step in [1, 5, 100] {
                let got = drafted(&model, &tokens, step, kept);
                let differences = got.iter().zip(want);
                let worst = differences
                    .map(|(a, b)| (a - f32::from_le_bytes(*b)).abs())
                    .fold(0.0, f32::max);
                println!("{case}, {length} tokens by {step}: {worst:e}");
                assert_eq!(got.len(), want.len());
                assert!(worst <= TOLERANCE, "{case}, {length} tokens: {worst}");
                same.push(got);
            }
            assert!(same.windows(2).all(|pair| pair[0] == pair[1]), "{case}");
        }
    }
}

/// What the drafter of a model made by hand guesses.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Guess {
    /// As stored, with random weights.
    Random,
    /// What the model chooses.
    Right,
    /// What the model chooses, with an error that makes some wrong.
    Near,
    /// The least probable token.
    Wrong,
}

/// A copy of a case with such a drafter. But for random ones, the next token depends on the last token alone: mixers and MLPs add nothing.
fn made(case: &str, guess: Guess) -> Copy {
    let dir = Copy::of(case, "drafter");
    if guess == Guess::Random {
        return dir;
    }
    let bytes = fs::read(dir.0.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let hidden = file.tensor("model.norm.weight").unwrap().shape()[0];
    let last_norm = file.tensor("model.norm.weight").unwrap().data().to_vec();
    let (last_norm, _) = last_norm.as_chunks::<4>();
    let ends = ["o_proj.weight", "out_proj.weight", "down_proj.weight"];
    for name in file.names() {
        let is_of_drafter = name.starts_with("mtp.");
        let is_near = guess == Guess::Near && name.contains("self_attn");
        if ends.iter().any(|end| name.ends_with(end)) && !(is_of_drafter && is_near) {
            change_tensor(&dir, name, |_, _, bytes| bytes.fill(0));
        }
    }
    // The embedding passes through.
    change_tensor(&dir, "mtp.fc.weight", |_, _, bytes| {
        bytes.fill(0);
        let one = half::bf16::ONE.to_le_bytes();
        for row in 0..hidden {
            let at = 2 * (row * 2 * hidden + row);
            bytes[at..at + 2].copy_from_slice(&one);
        }
    });
    change_tensor(&dir, "mtp.pre_fc_norm_embedding.weight", |_, _, bytes| {
        bytes.fill(0)
    });
    change_tensor(&dir, "mtp.norm.weight", |_, _, bytes| {
        for (to, from) in bytes.chunks_exact_mut(4).zip(last_norm) {
            // Norms are offsets from one.
            let factor = 1.0 + f32::from_le_bytes(*from);
            let factor = if guess == Guess::Wrong {
                -factor
            } else {
                factor
            };
            to.copy_from_slice(&(factor - 1.0).to_le_bytes());
        }
    });
    dir
}

fn served(dir: &Copy) -> Arc<Served> {
    Served::load(&dir.0, &options()).unwrap()
}

fn greedy(max_tokens: usize) -> GenerateOptions {
    GenerateOptions {
        max_tokens,
        ignore_model_stops: true,
        ..GenerateOptions::default()
    }
}

fn drawn(max_tokens: usize) -> GenerateOptions {
    GenerateOptions {
        sampling: SamplingOptions {
            temperature: 1.2,
            top_k: 40,
            repetition_penalty: 1.1,
            seed: Some(5),
            ..SamplingOptions::default()
        },
        ..greedy(max_tokens)
    }
}

fn with(options: &GenerateOptions, drafts: Option<usize>) -> GenerateOptions {
    GenerateOptions {
        drafts,
        ..options.clone()
    }
}

fn go(_: Piece<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn session(model: &Arc<Served>, context: usize) -> Session {
    let options = SessionOptions {
        context,
        ..SessionOptions::default()
    };
    Session::new(model.clone(), &options).unwrap()
}

/// Bit by bit.
fn logits(session: &mut Session) -> Vec<u32> {
    let logits = session.logits().unwrap();
    logits.iter().map(|x| x.to_bits()).collect()
}

/// Generates in both sessions, without drafts in the first, and compares what comes of it. Returns the generation with drafts.
#[track_caller]
fn same(
    without: &mut Session,
    drafting: &mut Session,
    options: &GenerateOptions,
    drafts: Option<usize>,
    stop_after: usize,
) -> Generation {
    let mut generate = |session: &mut Session, drafts| {
        let mut pieces = 0;
        let mut on_piece = |_: Piece<'_>| {
            pieces += 1;
            match pieces < stop_after {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            }
        };
        let done = session.generate(&with(options, drafts), &mut on_piece);
        done.unwrap()
    };
    let want = generate(without, Some(0));
    let got = generate(drafting, drafts);
    assert_eq!((&got.tokens, got.finish), (&want.tokens, want.finish));
    assert_eq!((&got.text, got.seed), (&want.text, want.seed));
    assert_eq!(without.tokens(), drafting.tokens());
    assert_eq!(want.drafts.drafted, 0);
    assert!(got.drafts.accepted <= got.drafts.drafted);
    got
}

#[test]
fn drafts_change_no_token_and_no_logit() {
    for case in CASES {
        for guess in [Guess::Random, Guess::Right, Guess::Near, Guess::Wrong] {
            let model = served(&made(case, guess));
            for (drafts, options) in DRAFTS
                .into_iter()
                .zip([greedy(41), drawn(41)].iter().cycle())
            {
                let (mut without, mut drafting) = (session(&model, 128), session(&model, 128));
                for session in [&mut without, &mut drafting] {
                    session.prefill(&some_tokens(&model, 21)).unwrap();
                }
                let got = same(&mut without, &mut drafting, options, drafts, usize::MAX);
                let what = format!("{case}, {guess:?}, {drafts:?}: {:?}", got.drafts);
                println!("{what}");
                match (guess, drafts) {
                    (Guess::Right, Some(most)) => {
                        assert_eq!(got.drafts.accepted, got.drafts.drafted, "{what}");
                        // The first token is chosen before any draft.
                        assert!(
                            got.drafts.accepted >= 40 * most / (most + 1) - most,
                            "{what}"
                        );
                    }
                    (Guess::Wrong, Some(_)) => assert_eq!(got.drafts.accepted, 0, "{what}"),
                    (Guess::Near, Some(_)) => {
                        assert!(got.drafts.accepted < got.drafts.drafted, "{what}");
                    }
                    _ => {}
                }
                assert!(got.drafts.drafted > 0, "{what}");
                assert_eq!(logits(&mut without), logits(&mut drafting), "{what}");
                // Both go on alike.
                same(&mut without, &mut drafting, options, drafts, usize::MAX);
                assert_eq!(logits(&mut without), logits(&mut drafting), "{what}");
            }
            drop(model);
        }
    }
}
