//! Drafters that are made by hand, whose guesses are known, and the sessions and generations by which tests compare drafts.

use std::fs;
use std::ops::ControlFlow;
use std::sync::Arc;

use NVFP4::engine::Served;
use NVFP4::format::random::bits;
use NVFP4::session::{
    Eviction, GenerateOptions, Generation, Piece, SamplingOptions, Session, SessionOptions, step,
};
use safetensors::SafeTensors;

use super::{Copy, change_tensor, options, some_tokens};

/// The guesses of a drafter that is made by hand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Guess {
    /// As stored, with random weights.
    Random,
    /// The tokens that the model chooses.
    Right,
    /// The tokens that the model chooses, some of them wrong by an error.
    Near,
    /// The least probable token.
    Wrong,
}

/// A copy of a case with such a drafter. But for random ones, the next token depends on the last token alone: mixers and MLPs add nothing.
pub(crate) fn made(case: &str, guess: Guess) -> Copy {
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

/// A greedy generation of so many tokens.
pub(crate) fn greedy(max_tokens: usize) -> GenerateOptions {
    GenerateOptions {
        max_tokens,
        sampling: SamplingOptions {
            seed: Some(1),
            ..SamplingOptions::default()
        },
        ignore_model_stops: true,
        ..GenerateOptions::default()
    }
}

/// A generation of so many tokens, drawn with a penalty.
pub(crate) fn drawn(max_tokens: usize) -> GenerateOptions {
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

/// An empty session that shares no prefix with another.
pub(crate) fn session(model: &Arc<Served>, context: usize) -> Session {
    let options = SessionOptions {
        context,
        private: true,
        ..SessionOptions::default()
    };
    Session::new(model.clone(), &options).unwrap()
}

/// The logits of its next token, bit by bit.
pub(crate) fn logits(session: &mut Session) -> Vec<u32> {
    let logits = session.logits().unwrap();
    logits.iter().map(|x| x.to_bits()).collect()
}

/// The model in a copy.
pub(crate) fn served(dir: &Copy) -> Arc<Served> {
    Served::load(&dir.0, &options()).unwrap()
}

/// Generates until the callback has got so many pieces.
#[track_caller]
pub(crate) fn generate(
    session: &mut Session,
    options: &GenerateOptions,
    stop_after: usize,
) -> Generation {
    let mut pieces = 0;
    let mut on_piece = |_: Piece<'_>| {
        pieces += 1;
        match pieces < stop_after {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        }
    };
    session.generate(options, &mut on_piece).unwrap()
}

/// Generates in `drafting` by `options`, and in `without` without drafts, and compares what comes of it. Returns the generation with drafts.
#[track_caller]
pub(crate) fn same(
    without: &mut Session,
    drafting: &mut Session,
    options: &GenerateOptions,
    stop_after: usize,
) -> Generation {
    let plain = GenerateOptions {
        draft_model: None,
        drafts: Some(0),
        prompt_lookup: 0,
        ..options.clone()
    };
    let want = generate(without, &plain, stop_after);
    let got = generate(drafting, options, stop_after);
    assert_eq!((&got.tokens, got.finish), (&want.tokens, want.finish));
    assert_eq!((&got.text, got.seed), (&want.text, want.seed));
    assert_eq!(without.tokens(), drafting.tokens());
    assert_eq!(want.drafts.drafted, 0);
    assert!(got.drafts.accepted <= got.drafts.drafted);
    got
}

/// Stop tokens, callbacks that break, limits, a full context and eviction end a text or change it among drafted tokens, at its tokens `ends`.
/// `with` adds the drafts to options.
pub(crate) fn texts_end_alike(
    model: &Arc<Served>,
    ends: &[usize],
    with: impl Fn(GenerateOptions) -> GenerateOptions,
) {
    let prompt = some_tokens(model, 19);
    let pair = |context, eviction| {
        let options = SessionOptions {
            context,
            eviction,
            private: true,
            ..SessionOptions::default()
        };
        [(); 2].map(|()| {
            let mut session = Session::new(model.clone(), &options).unwrap();
            session.prefill(&prompt).unwrap();
            session
        })
    };
    let [mut all, _] = pair(128, Eviction::Error);
    let text = generate(&mut all, &drawn(30), usize::MAX).tokens;
    for &n in ends {
        let stop = |options| GenerateOptions {
            stop_tokens: vec![text[n]],
            ..options
        };
        for (options, stop_after) in [
            (stop(drawn(30)), usize::MAX),
            (stop(drawn(n)), usize::MAX),
            (drawn(n), usize::MAX),
            (drawn(n), n),
            (drawn(30), n),
        ] {
            let options = with(options);
            let [mut without, mut drafting] = pair(128, Eviction::Error);
            for _ in 0..2 {
                same(&mut without, &mut drafting, &options, stop_after);
                assert_eq!(logits(&mut without), logits(&mut drafting), "{n}");
            }
        }
        let sliding = Eviction::SlidingWindow { sinks: 3, drop: 5 };
        for eviction in [Eviction::Error, Eviction::DropOldest { keep: 3 }, sliding] {
            let [mut without, mut drafting] = pair(19 + n, eviction);
            let options = with(drawn(40));
            same(&mut without, &mut drafting, &options, usize::MAX);
            assert_eq!(logits(&mut without), logits(&mut drafting), "{n}");
        }
    }
}

/// A random program of a session with drafts, against fresh sessions that are given its tokens at once: forks, cuts, files, steps and
/// generations. `with` adds drafts to options, by numbers that it draws below others. Returns drafted and accepted tokens.
pub(crate) fn program_equals_fresh_sessions(
    model: &Arc<Served>,
    program: u64,
    with: impl Fn(GenerateOptions, &mut dyn FnMut(usize) -> usize) -> GenerateOptions,
) -> [usize; 2] {
    let (mut counts, mut draws) = ([0, 0], 0);
    let mut draw = |below: usize| {
        draws += 1;
        bits(program, draws) as usize % below
    };
    let mut drafting = session(model, 256);
    drafting.prefill(&some_tokens(model, 1 + draw(40))).unwrap();
    for _ in 0..12 {
        match draw(7) {
            0 => drafting = drafting.fork().unwrap(),
            1 => {
                let len = drafting.len();
                drafting.truncate(len - draw(len)).unwrap();
            }
            2 => {
                let mut file = Vec::new();
                let saved = drafting.save_to(|size| {
                    file.resize(size as usize, 0);
                    Ok(Some(&mut file[..]))
                });
                saved.unwrap();
                drafting = Session::restore_from(model.clone(), &file).unwrap();
            }
            3 => step(&mut [&mut drafting], &[7]).unwrap(),
            _ => {
                let count = 1 + draw(12);
                let options = [greedy(count), drawn(count)][draw(2)].clone();
                let options = with(options, &mut draw);
                let mut without = session(model, 256);
                without.prefill(drafting.tokens()).unwrap();
                let stop_after = 1 + draw(14);
                let got = same(&mut without, &mut drafting, &options, stop_after);
                counts[0] += got.drafts.drafted;
                counts[1] += got.drafts.accepted;
            }
        }
        if draw(3) == 0 {
            let mut fresh = session(model, 256);
            fresh.prefill(drafting.tokens()).unwrap();
            assert_eq!(logits(&mut drafting), logits(&mut fresh), "{program}");
        }
    }
    counts
}
