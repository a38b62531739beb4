//! Adjusted logits and log-probabilities of generations, steps and single choices, against the same arithmetic on logits that sessions give.

use std::ops::ControlFlow;
use std::sync::Arc;

use NVFP4::base::ErrorKind;
use NVFP4::base::call::{Cancel, Watch};
use NVFP4::engine::Served;
use NVFP4::session::{
    GenerateOptions, LogitAdjustments, MOST_TOP, Piece, Sampler, SamplingOptions, Session,
    StepChoice, TokenProbabilities, step_choose_with,
};
use NVFP4::text::GrammarSource;

use super::{drawn, filled, generate, refused, session, state};
use crate::common::{load, some_tokens};

const NEVER: f32 = f32::NEG_INFINITY;

/// Adjustments of all kinds.
fn adjustments(model: &Served, seed: u32) -> LogitAdjustments {
    let vocabulary = model.spec().vocab_size as u32;
    let token = |i: u32| (i * 7919 + seed * 104_729) % vocabulary;
    LogitAdjustments {
        bias: (0..60)
            .map(|i| match i % 5 {
                0 => (token(i), NEVER),
                _ => (token(i), (i % 7) as f32 - 3.0),
            })
            .collect(),
        presence_penalty: 0.75,
        frequency_penalty: 0.5,
        bad_words: (0..vocabulary)
            .map(|i| vec![i, (i * 31 + seed) % vocabulary])
            .chain([vec![token(3)], vec![token(1), token(2), token(4)]])
            .collect(),
        repetition_window: 2 * seed as usize,
        ..LogitAdjustments::default()
    }
}

/// The tokens that a repetition penalty counts.
fn counted<'a>(how: &LogitAdjustments, tokens: &'a [u32]) -> &'a [u32] {
    match how.repetition_window {
        0 => tokens,
        window => &tokens[tokens.len().saturating_sub(window)..],
    }
}

/// The logits that `how` makes of `logits` after `tokens`, of which those from `first` on are generated.
fn adjusted(how: &LogitAdjustments, logits: &[f32], tokens: &[u32], first: usize) -> Vec<f32> {
    let mut out = logits.to_vec();
    for &(token, bias) in &how.bias {
        out[token as usize] += bias;
    }
    for (token, logit) in out.iter_mut().enumerate() {
        let count = tokens[first..].iter().filter(|&&t| t as usize == token);
        let count = count.count();
        if count > 0 {
            *logit -= how.presence_penalty + how.frequency_penalty * count as f32;
        }
    }
    for word in &how.bad_words {
        let (last, prefix) = word.split_last().unwrap();
        if tokens.ends_with(prefix) {
            out[*last as usize] = NEVER;
        }
    }
    out
}

/// The settings in which adjustments are tried.
fn settings() -> [SamplingOptions; 3] {
    let drawn = drawn(0).sampling;
    let penalized = SamplingOptions {
        repetition_penalty: 1.3,
        top_k: 20,
        ..drawn.clone()
    };
    [SamplingOptions::GREEDY, drawn, penalized]
}

/// Generates by hand: adjusts the logits that the session gives, and chooses from them.
fn by_hand(session: &mut Session, how: &GenerateOptions) -> Vec<u32> {
    let first = session.len();
    let mut sampler = Sampler::new(&how.sampling)
        .unwrap()
        .after(session.appended());
    while session.len() < first + how.max_tokens {
        let tokens = session.tokens().to_vec();
        let logits = adjusted(&how.adjustments, session.logits().unwrap(), &tokens, first);
        let counted = counted(&how.adjustments, &tokens);
        let token = sampler.sample_within(&logits, counted, None).unwrap();
        session.decode(token).unwrap();
    }
    session.tokens()[first..].to_vec()
}

#[test]
fn generations_choose_from_adjusted_logits() {
    // Number of cases that each kind of adjustment changes.
    let mut mattered = [0; 4];
    for case in ["qwen3_tied", "llama_llama3"] {
        let model = load(case);
        for (seed, sampling) in (0..).zip(settings()) {
            let plain = GenerateOptions {
                sampling,
                ..drawn(20)
            };
            let mut how = GenerateOptions {
                adjustments: adjustments(&model, seed),
                ..plain.clone()
            };
            // Bad words that would come.
            let words = generate(&mut filled(&model, 9), &how).tokens;
            how.adjustments
                .bad_words
                .extend(words.windows(3).step_by(4).map(<[u32]>::to_vec));
            let want = by_hand(&mut filled(&model, 9), &how);
            let mut session = filled(&model, 9);
            assert_eq!(generate(&mut session, &how).tokens, want, "{case}");
            for (i, mattered) in mattered.iter_mut().enumerate() {
                let mut without = how.clone();
                match i {
                    0 => without.adjustments.bias.clear(),
                    1 => without.adjustments.presence_penalty = 0.0,
                    2 => without.adjustments.frequency_penalty = 0.0,
                    _ => without.adjustments.bad_words.clear(),
                }
                let other = generate(&mut filled(&model, 9), &without).tokens;
                *mattered += usize::from(other != want);
            }
            // Nothing of it stays in the session.
            let mut again = filled(&model, 9);
            again.prefill(&want).unwrap();
            assert!(state(&mut session) == state(&mut again));
            // Without the cache, and with log-probabilities, which are the model's own, it is the same.
            let replay = GenerateOptions {
                replay: true,
                top_log_probabilities: Some(0),
                ..how.clone()
            };
            assert_eq!(generate(&mut filled(&model, 9), &replay).tokens, want);
        }
    }
    assert!(mattered.iter().all(|&cases| cases > 2), "{mattered:?}");
}

#[test]
fn penalties_count_one_generation() {
    let model = load("qwen3_tied");
    // Once generated, a token never comes again in the same generation, and may in the next.
    let mut how = drawn(25);
    how.adjustments.presence_penalty = f32::MAX;
    let mut session = filled(&model, 5);
    let mut seen = Vec::new();
    for _ in 0..4 {
        let tokens = generate(&mut session, &how).tokens;
        let mut distinct = tokens.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), tokens.len());
        seen.extend(tokens);
    }
    seen.sort_unstable();
    seen.dedup();
    assert!(seen.len() < 100, "{} tokens", seen.len());
}

#[test]
fn steps_and_samples_choose_from_adjusted_logits() {
    let model = load("qwen3_tied");
    let uncounted = LogitAdjustments {
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        ..adjustments(&model, 4)
    };
    let none = LogitAdjustments::default();
    let settings = settings();
    // Sessions with adjustments and without, in one step.
    let choices: Vec<_> = (0..6)
        .map(|i| StepChoice {
            sampling: &settings[i % 3],
            adjustments: if i < 4 { &uncounted } else { &none },
            top_log_probabilities: None,
        })
        .collect();
    let mut sessions: Vec<_> = (0..6).map(|i| filled(&model, 4 + i)).collect();
    let mut alone: Vec<_> = (0..6).map(|i| filled(&model, 4 + i)).collect();
    let mut next: Vec<u32> = (10..16).collect();
    for _ in 0..20 {
        let mut want = Vec::new();
        for ((session, choice), &token) in alone.iter_mut().zip(&choices).zip(&next) {
            session.decode(token).unwrap();
            let tokens = session.tokens().to_vec();
            let logits = adjusted(
                choice.adjustments,
                session.logits().unwrap(),
                &tokens,
                tokens.len(),
            );
            // Steps without a seed share one of the session.
            let mut sampler = Sampler::new(choice.sampling)
                .unwrap()
                .after(session.appended());
            let counted = counted(choice.adjustments, &tokens);
            let token = sampler.clone().sample(&logits, counted).unwrap();
            let sampled = session.sample_adjusted(&mut sampler, choice.adjustments, None);
            assert_eq!(sampled.unwrap(), token);
            want.push(token);
        }
        let mut together: Vec<&mut Session> = sessions.iter_mut().collect();
        next = step_choose_with(&mut together, &next, &choices, true).unwrap();
        assert_eq!(next, want);
    }
    // A step that fails changes no session, whichever of its choices failed.
    let everything = LogitAdjustments {
        bias: (0..320).map(|token| (token, NEVER)).collect(),
        ..LogitAdjustments::default()
    };
    assert_eq!(model.spec().vocab_size, 320);
    let before: Vec<_> = sessions.iter_mut().map(state).collect();
    let mut failing = choices.clone();
    failing[2].adjustments = &everything;
    let mut together: Vec<&mut Session> = sessions.iter_mut().collect();
    let e = step_choose_with(&mut together, &next, &failing, true).unwrap_err();
    assert!(e.message().starts_with("session 2: none of 320"), "{e}");
    for (session, before) in sessions.iter_mut().zip(before) {
        assert!(state(session) == before);
    }
}

#[test]
fn one_token_alone_may_stay() {
    let model = load("qwen3_tied");
    let mut how = drawn(6);
    let others = (0..320).filter(|&token| token != 77);
    how.adjustments.bias = others.map(|token| (token, NEVER)).collect();
    assert_eq!(generate(&mut filled(&model, 5), &how).tokens, [77; 6]);
    how.adjustments.bad_words = vec![vec![77, 77, 77]];
    let mut session = session(&model);
    session.prefill(&some_tokens(&model, 5)).unwrap();
    refused(
        &mut session,
        ErrorKind::InvalidArgument,
        "none of 320",
        |s| s.generate(&how, &mut super::go),
    );
}

#[test]
fn grammars_apply_after_adjustments() {
    let model = load("qwen3_tied");
    let grammar = model.grammar(GrammarSource::Regex("[a-d]{12}")).unwrap();
    let letters = |letters: &str| -> Vec<u32> {
        let token = |c: char| model.tokenizer().unwrap().encode(&c.to_string(), false);
        letters.chars().map(|c| token(c).unwrap()[0]).collect()
    };
    let mut how = GenerateOptions {
        grammar: Some(Arc::new(grammar)),
        ..drawn(40)
    };
    how.ignore_model_stops = false;
    let prompted = || {
        let mut session = session(&model);
        session.prefill(&letters("ab")).unwrap();
        session
    };
    // A large bias cannot break the form, and excluded tokens do not fill it.
    how.adjustments.bias = letters("xyz").iter().map(|&t| (t, 1e9)).collect();
    let not = letters("ab").into_iter().map(|t| (t, NEVER));
    how.adjustments.bias.extend(not);
    let vocabulary = model.spec().vocab_size as u32;
    let long = |token: &u32| {
        let bytes = model.tokenizer().unwrap().bytes_of(*token);
        bytes.is_ok_and(|bytes| bytes.len() > 1)
    };
    let long = (0..vocabulary).filter(long).map(|t| (t, NEVER));
    how.adjustments.bias.extend(long);
    let text = generate(&mut prompted(), &how).text;
    assert!(
        text.len() == 12 && text.bytes().all(|b| b == b'c' || b == b'd'),
        "{text}"
    );
    how.adjustments
        .bias
        .extend(letters("cd").iter().map(|&t| (t, NEVER)));
    refused(
        &mut prompted(),
        ErrorKind::InvalidArgument,
        "may come next",
        |s| s.generate(&how, &mut super::go),
    );
}

#[test]
fn wrong_adjustments_are_refused_before_a_generation() {
    let model = load("qwen3_tied");
    let mut session = filled(&model, 5);
    type Change = fn(&mut LogitAdjustments);
    let wrong: [(Change, &str); 7] = [
        (
            |a| a.bias = vec![(320, 0.0)],
            "logit bias 0 is of token 320; the vocabulary has 320",
        ),
        (
            |a| a.bias = vec![(3, f32::NAN)],
            "the logit bias of token 3 is NaN",
        ),
        (|a| a.bad_words = vec![vec![]], "bad word 0 is empty"),
        (
            |a| a.bad_words = vec![vec![1, 400]],
            "bad word 0 has token 400",
        ),
        (
            |a| a.frequency_penalty = f32::NAN,
            "frequency_penalty is NaN",
        ),
        (|a| a.dry.base = 0.5, "dry_base is 0.5"),
        (|a| a.typical_p = 1.5, "typical_p is 1.5"),
    ];
    for (change, expected) in wrong {
        let mut how = drawn(5);
        change(&mut how.adjustments);
        refused(&mut session, ErrorKind::InvalidArgument, expected, |s| {
            s.generate(&how, &mut super::go)
        });
        let sampler = &mut Sampler::new(&how.sampling).unwrap();
        refused(&mut session, ErrorKind::InvalidArgument, expected, |s| {
            s.sample_adjusted(sampler, &how.adjustments, None)
        });
        let choice = StepChoice {
            sampling: &how.sampling,
            adjustments: &how.adjustments,
            top_log_probabilities: None,
        };
        refused(&mut session, ErrorKind::InvalidArgument, expected, |s| {
            step_choose_with(&mut [s], &[1], &[choice], true)
        });
    }
    let counting = LogitAdjustments {
        presence_penalty: 1.0,
        ..LogitAdjustments::default()
    };
    let choice = StepChoice {
        sampling: &SamplingOptions::GREEDY,
        adjustments: &counting,
        top_log_probabilities: None,
    };
    refused(
        &mut session,
        ErrorKind::InvalidArgument,
        "session 0: a step is part of no",
        |s| step_choose_with(&mut [s], &[1], &[choice], true),
    );
}

/// Log-probabilities in f64, in descending order, of equal ones the lower id first.
fn ranked(logits: &[f32]) -> Vec<(u32, f64)> {
    let most = logits.iter().copied().fold(NEVER, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from(l - most).exp()).sum();
    let mut all: Vec<_> = (0..)
        .zip(logits)
        .map(|(token, &l)| (token, f64::from(l - most) - sum.ln()))
        .collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all
}

fn assert_ranked(token: u32, given: &TokenProbabilities, logits: &[f32], top: usize) {
    let all = ranked(logits);
    let own = all.iter().find(|(t, _)| *t == token).unwrap().1;
    assert!((f64::from(given.chosen) - own).abs() < 1e-5);
    assert_eq!(given.top.len(), top);
    assert_eq!(given.top_log_probabilities.len(), top);
    for (i, &(token, expected)) in all[..top].iter().enumerate() {
        assert_eq!(given.top[i], token);
        assert!((f64::from(given.top_log_probabilities[i]) - expected).abs() < 1e-5);
    }
}

#[test]
fn the_most_probable_tokens_are_the_models_own() {
    let model = load("llama_llama3");
    for top in [0, 1, 7, MOST_TOP] {
        let mut how = drawn(12);
        how.top_log_probabilities = Some(top);
        // Neither adjustments nor settings show in them.
        how.adjustments.bias = (0..100).map(|token| (token, 2.0)).collect();
        how.sampling.repetition_penalty = 1.2;
        let mut given = Vec::new();
        let mut session = filled(&model, 8);
        let on_piece = &mut |piece: Piece<'_>| {
            given.extend(
                piece
                    .token
                    .map(|token| (token, piece.probabilities.unwrap().clone())),
            );
            ControlFlow::Continue(())
        };
        session.generate(&how, on_piece).unwrap();
        assert_eq!(given.len(), 12);
        let mut by_hand = filled(&model, 8);
        for (token, probabilities) in &given {
            assert_ranked(*token, probabilities, by_hand.logits().unwrap(), top);
            // A single choice says the same.
            let mut sampler = Sampler::new(&how.sampling)
                .unwrap()
                .after(by_hand.appended());
            let chosen = by_hand.sample_adjusted(&mut sampler, &how.adjustments, Some(top));
            assert_eq!(chosen.unwrap(), *token);
            assert_eq!(by_hand.choice(), Some((*token, probabilities)));
            by_hand.decode(*token).unwrap();
        }
        // Steps keep them for the sessions that ask.
        let choices = [Some(top), None].map(|top_log_probabilities| StepChoice {
            sampling: &how.sampling,
            adjustments: &how.adjustments,
            top_log_probabilities,
        });
        let (mut one, mut other) = (filled(&model, 8), filled(&model, 8));
        let next = step_choose_with(&mut [&mut one, &mut other], &[5, 5], &choices, true).unwrap();
        assert_eq!(next[0], next[1]);
        let (token, probabilities) = one.choice().unwrap();
        assert_eq!((token, other.choice()), (next[0], None));
        let probabilities = probabilities.clone();
        assert_ranked(token, &probabilities, one.logits().unwrap(), top);
    }
    let mut how = drawn(1);
    how.top_log_probabilities = Some(MOST_TOP + 1);
    refused(
        &mut filled(&model, 8),
        ErrorKind::InvalidArgument,
        "the 21 most probable",
        |s| s.generate(&how, &mut super::go),
    );
}

#[test]
fn scores_are_those_of_the_logits() {
    let model = load("llama_llama3");
    let all = some_tokens(&model, 200);
    for held in [0, 1, 40] {
        let context = &all[..held];
        // Empty, short, and longer than a pass.
        let lengths = [0, 1, 2, 100, 7, 0, 65, 33, 1];
        let continuations: Vec<Vec<u32>> = (0..)
            .zip(lengths)
            .map(|(i, len)| (0..len).map(|j| (i * 37 + j * j * 11) % 150).collect())
            .collect();
        let views: Vec<&[u32]> = continuations.iter().map(Vec::as_slice).collect();
        let mut session = session(&model);
        session.prefill(context).unwrap();
        let before = state(&mut session);
        let scores = session.score(&views).unwrap();
        assert!(state(&mut session) == before);
        assert_eq!(scores.len(), views.len());
        let mut argmaxes = 0;
        for (tokens, scores) in views.iter().zip(&scores) {
            assert_eq!(scores.len(), tokens.len());
            let mut by_hand = super::with(&model, |o| o.private = true);
            by_hand.prefill(context).unwrap();
            for (&token, score) in tokens.iter().zip(scores) {
                if by_hand.is_empty() {
                    assert!(score.log_probability.is_nan() && !score.is_argmax);
                } else {
                    let ranked = ranked(by_hand.logits().unwrap());
                    let own = ranked.iter().find(|(t, _)| *t == token).unwrap().1;
                    assert!((f64::from(score.log_probability) - own).abs() < 1e-5);
                    assert_eq!(score.is_argmax, ranked[0].0 == token);
                }
                argmaxes += usize::from(score.is_argmax);
                by_hand.decode(token).unwrap();
            }
            // Alone, a continuation has the same bits.
            let alone = format!("{:?}", session.score(&[tokens]).unwrap()[0]);
            assert_eq!(alone, format!("{scores:?}"));
        }
        // A greedy generation chooses the argmax.
        if held > 0 {
            let how = GenerateOptions {
                sampling: SamplingOptions::GREEDY,
                ..drawn(20)
            };
            let greedy = generate(&mut session.fork().unwrap(), &how).tokens;
            let scores = session.score(&[&greedy]).unwrap();
            assert!(scores[0].iter().all(|score| score.is_argmax), "{argmaxes}");
        }
    }
}

#[test]
fn scores_that_cannot_be_change_nothing() {
    let model = load("qwen3_tied");
    let mut session = super::with(&model, |o| o.context = 12);
    session.prefill(&some_tokens(&model, 8)).unwrap();
    refused(
        &mut session,
        ErrorKind::ContextFull,
        "continuation 1: 5 tokens do not fit: 8 of 12",
        |s| s.score(&[&[1; 4], &[1; 5]]),
    );
    refused(
        &mut session,
        ErrorKind::InvalidArgument,
        "continuation 0",
        |s| s.score(&[&[3, 320]]),
    );
    let cancel = Cancel::new();
    cancel.cancel();
    let watch = Watch {
        flags: &[&|| cancel.is_set()],
        ..Watch::default()
    };
    refused(&mut session, ErrorKind::Cancelled, "", |s| {
        watch.during(|| s.score(&[&[3, 4, 5]]))
    });
    assert_eq!(session.score(&[]).unwrap(), Vec::<Vec<_>>::new());
    assert_eq!(session.score(&[&[]]).unwrap(), [vec![]]);
}
