//! Draft models: generations whose tokens another model guesses, against those without drafts.

mod common;

use std::fs;
use std::ops::ControlFlow;
use std::sync::Arc;

use NVFP4::base::ErrorKind;
use NVFP4::base::call::Cancel;
use NVFP4::engine::Served;
use NVFP4::model::LoadOptions;
use NVFP4::session::{Finish, GenerateOptions, Piece, SamplingOptions};
use common::drafters::{
    drawn, generate, greedy, logits, program_equals_fresh_sessions, same, served, session,
    texts_end_alike,
};
use common::{Copy, cases, change_tensor, expect_kind, golden, load, options, some_tokens};

/// A model that agrees with that of a case often: some weights of its last norm are smaller.
fn near(case: &str) -> Arc<Served> {
    let dir = Copy::of(case, "near");
    change_tensor(&dir, "model.norm.weight", |_, shape, bytes| {
        assert_eq!(bytes.len(), 4 * shape[0]);
        for weight in bytes.chunks_exact_mut(16) {
            let smaller = 0.7 * f32::from_le_bytes(weight[..4].try_into().unwrap());
            weight[..4].copy_from_slice(&smaller.to_le_bytes());
        }
    });
    served(&dir)
}

/// `options` with guesses of `draft`: so many a step, or as many as are fastest.
fn by(options: &GenerateOptions, draft: &Arc<Served>, drafts: Option<usize>) -> GenerateOptions {
    GenerateOptions {
        draft_model: Some(draft.clone()),
        drafts,
        ..options.clone()
    }
}

/// Models of every kind of layers draft for one another: alike, near and unlike ones, those with windows, experts and recurrent layers.
#[test]
fn draft_models_change_no_token_and_no_logit() {
    let qwen3 = load("qwen3_tied");
    let unlike = ["qwen2_untied", "nemotronh_dense", "qwen35_drafter"].map(load);
    let mut pairs = vec![
        (qwen3.clone(), qwen3.clone()),
        (qwen3.clone(), load("qwen3_tied")),
        (qwen3.clone(), near("qwen3_tied")),
        (load("qwen35_tied"), load("qwen35_tied")),
        (load("nemotronh_dense"), near("qwen3_tied")),
    ];
    pairs.extend(unlike.map(|draft| (qwen3.clone(), draft)));
    for draft in ["gemma3_narrow", "mistral_window", "gptoss_nvfp4"] {
        pairs.push((load("gemma4_wide"), load(draft)));
        pairs.push((load(draft), load(draft)));
    }
    for (index, (model, draft)) in pairs.iter().enumerate() {
        let is_alike = draft.fingerprint() == model.fingerprint();
        for (options, drafts) in [
            (drawn(33), Some(3)),
            (greedy(33), Some(16)),
            (drawn(33), None),
        ] {
            let (mut without, mut drafting) = (session(model, 128), session(model, 128));
            for session in [&mut without, &mut drafting] {
                session.prefill(&some_tokens(model, 41)).unwrap();
            }
            let options = by(&options, draft, drafts);
            let mut counts = Vec::new();
            for _ in 0..2 {
                let got = same(&mut without, &mut drafting, &options, usize::MAX);
                assert_eq!(logits(&mut without), logits(&mut drafting), "pair {index}");
                counts.push((got.drafts.drafted, got.drafts.accepted));
            }
            println!("pair {index}, {drafts:?}: {counts:?}");
            assert!(counts[0].0 > 0, "pair {index}, {drafts:?}");
            if is_alike {
                assert!(counts.iter().all(|(drafted, accepted)| drafted == accepted));
            } else if drafts == Some(16) {
                assert!(counts.iter().all(|(drafted, accepted)| drafted > accepted));
            }
        }
    }
    for (model, draft) in &pairs {
        assert_eq!((model.blocks_used(), draft.blocks_used()), (0, 0));
    }
}

/// Random programs of a session, with several draft models and none.
#[test]
fn programs_with_draft_models_equal_fresh_sessions() {
    let model = load("qwen3_tied");
    let drafts = [
        near("qwen3_tied"),
        load("qwen3_tied"),
        load("qwen35_tied"),
        model.clone(),
    ];
    let mut counts = [0, 0];
    for program in 0..u64::from(cases(8)) {
        let with = |options, draw: &mut dyn FnMut(usize) -> usize| {
            let guesses = [None, Some(0), Some(1), Some(2), Some(5)][draw(5)];
            by(&options, &drafts[draw(4)], guesses)
        };
        let [drafted, accepted] = program_equals_fresh_sessions(&model, program, with);
        counts[0] += drafted;
        counts[1] += accepted;
    }
    println!("{} of {} tokens accepted", counts[1], counts[0]);
    assert!(counts[1] > 10 && counts[0] > counts[1] + 10, "{counts:?}");
    for draft in drafts {
        assert_eq!(draft.blocks_used(), 0);
    }
}

#[test]
fn texts_end_among_guesses_as_they_do_without() {
    let (model, alike) = (load("qwen3_tied"), load("qwen3_tied"));
    texts_end_alike(&model, &[1, 2, 5, 6, 7], |options| {
        by(&options, &alike, Some(4))
    });
}

/// Drawn texts have the probabilities of the model, which the draft model does not have: Pearson's statistic of three tokens.
#[test]
fn drawn_tokens_have_the_probabilities_of_the_model() {
    const TOP: usize = 3;
    const TEXTS: usize = 800;
    let (model, draft) = (load("qwen3_tied"), near("qwen3_tied"));
    let sampling = SamplingOptions {
        temperature: 1.5,
        top_k: TOP,
        ..SamplingOptions::default()
    };
    let mut prompt = session(&model, 64);
    prompt.prefill(&some_tokens(&model, 9)).unwrap();
    // The probability of each text of three tokens.
    let mut expected = vec![(Vec::new(), 1.0)];
    for _ in 0..3 {
        let longer = expected.into_iter().flat_map(|(text, probability)| {
            let mut session = prompt.fork().unwrap();
            session.prefill(&text).unwrap();
            let mut ranked: Vec<_> = session.logits().unwrap().iter().copied().zip(0..).collect();
            ranked.sort_by(|a: &(f32, u32), b| b.0.total_cmp(&a.0));
            let weights = ranked[..TOP].iter();
            let weights: Vec<f64> = weights.map(|(x, _)| f64::from(x / 1.5).exp()).collect();
            let sum: f64 = weights.iter().sum();
            (0..TOP)
                .map(|i| {
                    let text = [&text[..], &[ranked[i].1]].concat();
                    (text, probability * weights[i] / sum)
                })
                .collect::<Vec<_>>()
        });
        expected = longer.collect();
    }
    let mut counts = vec![0; expected.len()];
    let (mut drafted, mut accepted) = (0, 0);
    // The first token of a generation comes without drafts.
    let mut with_companion = prompt.fork().unwrap();
    generate(&mut with_companion, &by(&greedy(2), &draft, Some(2)), 2);
    with_companion.truncate(9).unwrap();
    for seed in 0..TEXTS {
        let options = GenerateOptions {
            sampling: sampling.seeded_by(seed as u64),
            ..greedy(3)
        };
        let mut session = with_companion.fork().unwrap();
        let got = generate(&mut session, &by(&options, &draft, Some(2)), usize::MAX);
        drafted += got.drafts.drafted;
        accepted += got.drafts.accepted;
        let at = expected.iter().position(|(text, _)| *text == got.tokens);
        counts[at.unwrap()] += 1;
    }
    println!("{accepted} of {drafted} accepted");
    assert!(accepted > TEXTS / 2 && drafted > accepted + TEXTS / 20);
    let terms = counts.iter().zip(&expected).map(|(&count, (_, p))| {
        let mean = p * TEXTS as f64;
        (f64::from(count) - mean).powi(2) / mean
    });
    let statistic: f64 = terms.sum();
    // The quantile 0.999 of 26 degrees of freedom. The seeds are always the same.
    println!("{statistic}");
    assert!(statistic < 54.05, "{statistic}: {counts:?}");
}

/// Sessions whose threads generate at the same time, one of them cancelled, and whose host has released the draft model.
#[test]
fn sessions_share_a_draft_model_that_the_host_has_released() {
    let (model, draft) = (load("qwen3_tied"), near("qwen3_tied"));
    let weak = Arc::downgrade(&draft);
    let of = |i: usize| by(&[greedy(40), drawn(40)][i % 2], &draft, Some(3));
    let options: Vec<_> = (0..4).map(of).collect();
    drop(draft);
    std::thread::scope(|scope| {
        for (i, options) in options.into_iter().enumerate() {
            let model = &model;
            scope.spawn(move || {
                let (mut without, mut drafting) = (session(model, 128), session(model, 128));
                for session in [&mut without, &mut drafting] {
                    session.prefill(&some_tokens(model, 20 + i)).unwrap();
                }
                if i == 3 {
                    let cancel = Cancel::new();
                    let mut ended = drafting.fork().unwrap();
                    let done = cancel.watching(|| {
                        let on_piece = &mut |_: Piece<'_>| {
                            cancel.cancel();
                            ControlFlow::Continue(())
                        };
                        ended.generate(&options, on_piece).unwrap()
                    });
                    assert_eq!(done.finish, Finish::Cancelled);
                }
                same(&mut without, &mut drafting, &options, usize::MAX);
                assert_eq!(logits(&mut without), logits(&mut drafting));
            });
        }
    });
    assert!(weak.upgrade().is_none());
    assert_eq!(model.blocks_used(), 0);
}

/// A session keeps the draft model's sequence until a generation without it.
#[test]
fn a_generation_without_a_draft_model_forgets_its_sequence() {
    let (model, draft) = (load("qwen3_tied"), near("qwen3_tied"));
    let mut session = session(&model, 128);
    session.prefill(&some_tokens(&model, 20)).unwrap();
    generate(&mut session, &by(&greedy(8), &draft, Some(2)), usize::MAX);
    let held = draft.blocks_used();
    assert!(held > 0);
    let ran = draft.statistics().prompt_tokens;
    generate(&mut session, &by(&greedy(8), &draft, Some(2)), usize::MAX);
    // It goes on where it was.
    assert!(draft.statistics().prompt_tokens < ran + 20);
    generate(&mut session, &greedy(1), usize::MAX);
    assert_eq!(draft.blocks_used(), 0);
}

/// A draft model that runs out of memory, one with a shorter context, and one with fewer tokens leave the text as it is without them.
#[test]
fn draft_models_that_cannot_go_on_leave_the_text() {
    let model = load("qwen3_tied");
    let one = {
        let mut filled = session(&model, 128);
        filled.prefill(&some_tokens(&model, 16)).unwrap();
        filled.kv_bytes()
    };
    let limited = LoadOptions {
        kv_bytes: Some(2 * one),
        prefix_cache: false,
        ..options()
    };
    let small = Served::load(&golden("qwen3_tied"), &limited).unwrap();
    let short = {
        let dir = Copy::of("qwen3_tied", "short");
        let config = fs::read_to_string(dir.0.join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
        config["max_position_embeddings"] = 36.into();
        dir.write("config.json", config.to_string().as_bytes());
        served(&dir)
    };
    let (mut without, mut drafting) = (session(&model, 128), session(&model, 128));
    for (draft, least, most) in [(&small, 3, 12), (&short, 12, 17)] {
        for session in [&mut without, &mut drafting] {
            session.truncate(0).unwrap();
            session.prefill(&some_tokens(&model, 20)).unwrap();
        }
        let options = by(&greedy(40), draft, Some(3));
        let got = same(&mut without, &mut drafting, &options, usize::MAX);
        println!("{:?}", got.drafts);
        assert_eq!(got.drafts.accepted, got.drafts.drafted);
        assert!((least..=most).contains(&got.drafts.accepted), "{got:?}");
    }
    assert_eq!(small.blocks_used(), 0);
}

#[test]
fn models_with_other_tokens_are_refused() {
    let model = load("qwen3_tied");
    let with_tokenizer = |case: &str, change: &dyn Fn(&str) -> String| {
        let dir = Copy::of(case, "tokens");
        let json = fs::read_to_string(golden("qwen3_tied").join("tokenizer.json")).unwrap();
        dir.write("tokenizer.json", change(&json).as_bytes());
        served(&dir)
    };
    let (mut session, prompt) = (session(&model, 64), some_tokens(&model, 10));
    session.prefill(&prompt).unwrap();
    let mut drafts_by = |draft: &Arc<Served>| {
        session.truncate(10).unwrap();
        let go = &mut |_: Piece<'_>| ControlFlow::Continue(());
        session.generate(&by(&greedy(5), draft, None), go)
    };
    let renamed = with_tokenizer("qwen3_tied", &|json| {
        let renamed = json.replace("<|im_start|>", "<|im_begin|>");
        assert_ne!(renamed, json);
        renamed
    });
    expect_kind(
        drafts_by(&renamed),
        ErrorKind::InvalidArgument,
        "token 1 is \"<|im_begin|>\" in the draft model, and \"<|im_start|>\" in the model that it drafts for",
    );
    // Without a tokenizer the numbers of tokens decide.
    let without = Copy::of("qwen3_yarn", "without");
    let _ = fs::remove_file(without.0.join("tokenizer.json"));
    expect_kind(
        drafts_by(&served(&without)),
        ErrorKind::InvalidArgument,
        "the draft model has 150 tokens, and the model that it drafts for 320",
    );
    // Numbers of rows may differ, and tokens that one of both lacks are not drafted.
    let fewer = with_tokenizer("qwen3_yarn", &str::to_owned);
    drafts_by(&fewer).unwrap();
    let mut of_fewer = common::drafters::session(&fewer, 64);
    of_fewer.prefill(&some_tokens(&fewer, 10)).unwrap();
    let mut plain = of_fewer.fork().unwrap();
    same(
        &mut plain,
        &mut of_fewer,
        &by(&drawn(20), &model, Some(4)),
        usize::MAX,
    );
    // Two ways to draft at once.
    let options = GenerateOptions {
        prompt_lookup: 4,
        ..by(&greedy(5), &model, None)
    };
    expect_kind(
        session.generate(&options, &mut |_| ControlFlow::Continue(())),
        ErrorKind::InvalidArgument,
        "a draft model and 4 tokens of prompt lookup in a step; choose one of them",
    );
    expect_kind(
        session.generate(&by(&greedy(5), &model, Some(17)), &mut |_| {
            ControlFlow::Continue(())
        }),
        ErrorKind::InvalidArgument,
        "17 drafted tokens in a step; expected at most 16",
    );
}
