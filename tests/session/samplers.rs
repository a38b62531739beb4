//! Samplers among the adjustments of logits: generations, steps and single choices with them.

use std::sync::Arc;

use NVFP4::base::ErrorKind;
use NVFP4::session::{
    Dry, Finish, GenerateOptions, LogitAdjustments, Sampler, SamplingOptions, Session, StepChoice,
    step_choose_with,
};
use NVFP4::text::GrammarSource;

use super::{drawn, filled, generate, go, refused, session};
use crate::common::{load, some_tokens};

fn greedy(max_tokens: usize) -> GenerateOptions {
    GenerateOptions {
        sampling: SamplingOptions::GREEDY,
        ..drawn(max_tokens)
    }
}

/// Whether a sequence of `size` tokens occurs twice.
fn repeats(tokens: &[u32], size: usize) -> bool {
    let mut all: Vec<&[u32]> = tokens.windows(size).collect();
    all.sort_unstable();
    all.windows(2).any(|pair| pair[0] == pair[1])
}

#[test]
fn a_text_does_not_end_before_its_least_tokens() {
    let model = load("qwen3_tied");
    let free = generate(&mut filled(&model, 9), &drawn(30)).tokens;
    // Tokens that come early end the text: the caller's and the model's own.
    let mut how = drawn(30);
    how.stop_tokens = vec![free[2], free[4]];
    how.ignore_model_stops = false;
    let without = generate(&mut filled(&model, 9), &how);
    assert!(without.tokens.len() < 3 && without.finish == Finish::Stop);
    let ends = [model.stop_tokens(), &[free[2], free[4]]].concat();
    for least in [1, 6, 20, 30] {
        how.adjustments.min_tokens = least;
        let made = generate(&mut filled(&model, 9), &how);
        assert!(
            made.tokens.len() >= least,
            "{} of {least}",
            made.tokens.len()
        );
        assert!(!made.tokens.iter().any(|token| ends.contains(token)));
        // The first tokens are those of a session that excludes the ends by hand.
        let mut session = filled(&model, 9);
        let sampler = Sampler::new(&how.sampling).unwrap();
        let mut sampler = sampler.after(session.appended());
        for &token in &made.tokens[..least] {
            let excluded = LogitAdjustments {
                bias: ends.iter().map(|&end| (end, f32::NEG_INFINITY)).collect(),
                ..LogitAdjustments::default()
            };
            let chosen = session.sample_adjusted(&mut sampler, &excluded, None);
            assert_eq!(chosen.unwrap(), token);
            session.decode(token).unwrap();
        }
    }
    // Past them it ends at once, if the model wants that.
    let own = model.stop_tokens()[0];
    how.adjustments.min_tokens = 5;
    how.adjustments.bias = vec![(own, 1e9)];
    let made = generate(&mut filled(&model, 9), &how);
    assert_eq!((made.tokens.len(), made.finish), (5, Finish::Stop));
    // Stops of the model that are ignored may come at any time.
    how.ignore_model_stops = true;
    assert_eq!(generate(&mut filled(&model, 9), &how).tokens, [own; 30]);
    how.max_tokens = 4;
    let expected = "min_tokens is 5 and max_tokens 4";
    refused(
        &mut filled(&model, 9),
        ErrorKind::InvalidArgument,
        expected,
        |s| s.generate(&how, &mut go),
    );
}

#[test]
fn answers_of_chats_have_their_least_tokens() {
    let model = load("qwen3_tied");
    let own = model.stop_tokens()[0];
    let mut how = drawn(40);
    how.ignore_model_stops = false;
    how.adjustments.bias = vec![(own, 1e9)];
    let answer = |how: &GenerateOptions| {
        let mut session = session(&model);
        session.chat("hi", None, how, &mut go).unwrap()
    };
    assert_eq!(answer(&how).tokens.len(), 0);
    how.adjustments.min_tokens = 7;
    let made = answer(&how);
    assert_eq!((made.tokens.len(), made.finish), (7, Finish::Stop));
}

#[test]
fn stop_strings_count_after_the_least_tokens() {
    let model = load("qwen3_tied");
    let letters = |text: &str| model.tokenizer().unwrap().encode(text, false).unwrap();
    // One letter, again and again.
    let mut how = greedy(12);
    how.adjustments.bias = vec![(letters("x")[0], 1e9)];
    how.stop_strings = vec!["xxx".to_owned()];
    let made = generate(&mut filled(&model, 4), &how);
    assert_eq!((&*made.text, made.tokens.len()), ("", 3));
    how.adjustments.min_tokens = 5;
    let made = generate(&mut filled(&model, 4), &how);
    assert_eq!((&*made.text, made.tokens.len()), ("xxxxx", 8));
    assert_eq!(made.finish, Finish::StopString);
}

#[test]
fn a_grammar_ends_a_text_before_its_least_tokens() {
    let model = load("qwen3_tied");
    let with = |regex: &str| {
        let grammar = model.grammar(GrammarSource::Regex(regex)).unwrap();
        let mut how = drawn(40);
        how.ignore_model_stops = false;
        how.adjustments.bias = vec![(model.stop_tokens()[0], 1e9)];
        how.grammar = Some(Arc::new(grammar));
        how
    };
    // Where it allows more, that comes.
    let mut how = with("[a-d]{1,30}");
    let short = generate(&mut filled(&model, 4), &how);
    assert_eq!(short.tokens.len(), 1);
    how.adjustments.min_tokens = 6;
    let made = generate(&mut filled(&model, 4), &how);
    assert_eq!((made.tokens.len(), made.finish), (6, Finish::Stop));
    // Where it allows nothing else, the text ends.
    let mut how = with("[ab]c");
    how.adjustments.min_tokens = 6;
    let made = generate(&mut filled(&model, 4), &how);
    assert!(made.tokens.len() <= 2 && made.text.len() == 2, "{made:?}");
    assert_eq!(made.finish, Finish::Stop);
    // Where other adjustments exclude all but the end, nothing can be chosen.
    let mut how = with("a{1,30}");
    how.adjustments.min_tokens = 6;
    how.adjustments.no_repeat_ngram_size = 1;
    let expected = "may come next has a finite logit";
    let mut session = filled(&model, 4);
    refused(&mut session, ErrorKind::InvalidArgument, expected, |s| {
        s.generate(&how, &mut go)
    });
}

#[test]
fn ngrams_and_repetitions_do_not_come_again() {
    for case in ["qwen3_tied", "llama_llama3"] {
        let model = load(case);
        let mut how = greedy(60);
        let prompt = [some_tokens(&model, 6), some_tokens(&model, 4)].concat();
        let with = |how: &GenerateOptions| {
            let mut session = session(&model);
            session.prefill(&prompt).unwrap();
            let made = generate(&mut session, how).tokens;
            assert_eq!(made.len(), 60);
            (made, session.tokens()[8..].to_vec())
        };
        // A repetition of the prompt's own is no matter.
        assert!(repeats(&with(&how).1, 3), "{case} repeats nothing");
        how.adjustments.no_repeat_ngram_size = 3;
        let (made, tokens) = with(&how);
        assert!(!repeats(&tokens, 3));
        // So does a DRY penalty that is larger than all logits, of repetitions of two tokens or more.
        how.adjustments.no_repeat_ngram_size = 0;
        how.adjustments.dry = Dry {
            multiplier: 1e6,
            base: 1.0,
            sequence_breakers: Some(Vec::new()),
            ..Dry::default()
        };
        assert_eq!(with(&how).0, made);
        // A smaller one lets short repetitions be.
        how.adjustments.dry.multiplier = 0.1;
        let (softer, tokens) = with(&how);
        assert!(softer != made && repeats(&tokens, 3) && !repeats(&tokens, 30));
    }
}

#[test]
fn breakers_are_found_in_the_text_of_tokens() {
    let model = load("qwen3_tied");
    let token = |text: &str| -> u32 {
        let tokens = model.tokenizer().unwrap().encode(text, false).unwrap();
        <[u32; 1]>::try_from(tokens).unwrap()[0]
    };
    let [x, y, colon, other] = ["x", "y", ":", "z"].map(token);
    let mut session = session(&model);
    session.prefill(&[x, colon, y, other, x, colon, y]).unwrap();
    let mut choose = |breakers: Option<&[&str]>| {
        let how = LogitAdjustments {
            bias: vec![(other, 1e6), (x, 1e5)],
            dry: Dry {
                multiplier: 1e9,
                sequence_breakers: breakers
                    .map(|given| given.iter().map(|&b| b.to_owned()).collect()),
                ..Dry::default()
            },
            ..LogitAdjustments::default()
        };
        let mut sampler = Sampler::new(&SamplingOptions::GREEDY).unwrap();
        session.sample_adjusted(&mut sampler, &how, None).unwrap()
    };
    // Three tokens have been repeated, of which a breaker leaves one.
    assert_eq!(choose(Some(&[])), x);
    assert_eq!(choose(None), other);
    assert_eq!(choose(Some(&["x:"])), other);
    assert_eq!(choose(Some(&["xy"])), x);
    // A token with one is not penalized.
    assert_eq!(choose(Some(&["z"])), other);
}

/// All filters and penalties.
fn everything() -> LogitAdjustments {
    LogitAdjustments {
        no_repeat_ngram_size: 3,
        dry: Dry {
            multiplier: 0.1,
            allowed_length: 1,
            window: 20,
            ..Dry::default()
        },
        top_n_sigma: 2.5,
        typical_p: 0.95,
        xtc_probability: 0.5,
        xtc_threshold: 0.01,
        ..LogitAdjustments::default()
    }
}

#[test]
fn generations_steps_and_samples_choose_alike() {
    let model = load("qwen3_tied");
    let mut how = drawn(25);
    how.sampling.repetition_penalty = 1.1;
    how.sampling.min_p = 0.01;
    how.adjustments = everything();
    let made = generate(&mut filled(&model, 9), &how).tokens;
    // Again, in parts, and without the cache.
    assert_eq!(generate(&mut filled(&model, 9), &how).tokens, made);
    let mut parts = filled(&model, 9);
    let part = GenerateOptions {
        max_tokens: 5,
        ..how.clone()
    };
    for _ in 0..5 {
        generate(&mut parts, &part);
    }
    assert_eq!(parts.tokens()[9..], made);
    let replay = GenerateOptions {
        replay: true,
        ..how.clone()
    };
    assert_eq!(generate(&mut filled(&model, 9), &replay).tokens, made);
    // By single choices, and by steps beside a session without them.
    let by_hand = |session: &mut Session| {
        let mut sampler = Sampler::new(&how.sampling).unwrap();
        sampler = sampler.after(session.appended());
        session.sample_adjusted(&mut sampler, &how.adjustments, None)
    };
    let none = LogitAdjustments::default();
    let choices = [&how.adjustments, &none].map(|adjustments| StepChoice {
        sampling: &how.sampling,
        adjustments,
        top_log_probabilities: None,
    });
    let (mut one, mut other) = (filled(&model, 9), filled(&model, 3));
    let mut next = vec![by_hand(&mut one).unwrap(), 7];
    for (i, &token) in made.iter().enumerate() {
        assert_eq!(next[0], token, "token {i}");
        next = step_choose_with(&mut [&mut one, &mut other], &next, &choices, true).unwrap();
        assert_eq!(by_hand(&mut one).unwrap(), next[0]);
    }
    // Each of them matters here.
    type Off = fn(&mut LogitAdjustments);
    let off: [(&str, Off); 5] = [
        ("n-grams", |a| a.no_repeat_ngram_size = 0),
        ("DRY", |a| a.dry.multiplier = 0.0),
        ("top-n-sigma", |a| a.top_n_sigma = 0.0),
        ("typical", |a| a.typical_p = 1.0),
        ("XTC", |a| a.xtc_probability = 0.0),
    ];
    let mut matter = [false; 5];
    for case in 0..6 {
        let mut how = how.clone();
        how.sampling.seed = Some(case);
        if case >= 3 {
            // Texts that would repeat themselves.
            how.sampling.temperature = 0.02;
            how.adjustments.xtc_probability = 0.05;
            how.max_tokens = 60;
        }
        let all = generate(&mut filled(&model, 9), &how).tokens;
        for (matters, (_, off)) in matter.iter_mut().zip(off) {
            let mut without = how.clone();
            off(&mut without.adjustments);
            *matters |= generate(&mut filled(&model, 9), &without).tokens != all;
        }
    }
    let idle = off.iter().zip(matter).filter(|(_, matters)| !matters);
    let idle: Vec<&str> = idle.map(|((name, _), _)| *name).collect();
    assert!(idle.is_empty(), "{idle:?}");
}

#[test]
fn the_argmax_is_that_of_what_filters_leave() {
    let model = load("qwen3_tied");
    let choose = |change: &dyn Fn(&mut LogitAdjustments)| {
        let mut how = LogitAdjustments::default();
        change(&mut how);
        let mut sampler = Sampler::new(&SamplingOptions::GREEDY).unwrap();
        let mut session = filled(&model, 9);
        let token = session.sample_adjusted(&mut sampler, &how, None).unwrap();
        let logits = session.logits().unwrap().to_vec();
        let above = logits.iter().filter(|&&x| x > logits[token as usize]);
        above.count()
    };
    assert_eq!(choose(&|a| a.top_n_sigma = 0.1), 0);
    // XTC leaves the least probable of the probable ones.
    let xtc = |threshold: f32| {
        move |a: &mut LogitAdjustments| {
            (a.xtc_probability, a.xtc_threshold) = (1.0, threshold);
        }
    };
    assert_eq!(choose(&xtc(0.0)), 319);
    assert!(choose(&xtc(0.004)) > 0);
    assert_eq!(choose(&xtc(0.6)), 0);
    // The most typical token alone is seldom the most probable one.
    assert!(choose(&|a| a.typical_p = 0.0) > 0);
}

#[test]
fn models_without_a_tokenizer_take_no_breakers() {
    let model = load("qwen2_untied");
    let mut how = drawn(5);
    how.adjustments.dry.multiplier = 1.0;
    let mut session = filled(&model, 5);
    refused(
        &mut session,
        ErrorKind::NotFound,
        "dry_sequence_breakers: ",
        |s| s.generate(&how, &mut go),
    );
    how.adjustments.dry.sequence_breakers = Some(Vec::new());
    assert_eq!(generate(&mut session, &how).tokens.len(), 5);
}
