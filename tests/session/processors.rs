//! Processors of logits in generations, steps and single choices, against the same arithmetic on logits that sessions give, and what happens
//! when they write what nothing can be chosen from.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use NVFP4::base::ErrorKind;
use NVFP4::model::TokenMask;
use NVFP4::session::{
    ChatOptions, Eviction, Finish, GenerateOptions, Happened, LogitAdjustments, LogitsProcessor,
    Queue, QueueOptions, Sampler, SamplingOptions, Session, StepChoice, Submission,
    step_choose_with,
};
use NVFP4::text::GrammarSource;

use super::{drawn, filled, generate, go, refused, session, state, with};
use crate::common::{load, some_tokens};

const NEVER: f32 = f32::NEG_INFINITY;
const GO: ControlFlow<()> = ControlFlow::Continue(());

fn processing(
    how: &GenerateOptions,
    process: impl Fn(&mut [f32], &[u32]) -> ControlFlow<()> + Send + Sync + 'static,
) -> GenerateOptions {
    let mut how = how.clone();
    how.adjustments.processor = Some(LogitsProcessor::new(process));
    how
}

/// A change that depends on all that a processor gets.
fn mix(logits: &mut [f32], tokens: &[u32]) {
    for (i, logit) in logits.iter_mut().enumerate() {
        *logit = match (i + tokens.len()) % 5 {
            0 => NEVER,
            n => *logit * 0.5 + n as f32 * 0.3,
        };
    }
    if let Some(&last) = tokens.last() {
        logits[last as usize] = NEVER;
    }
}

/// The setting in which the repetition penalty decides too.
fn penalized(max_tokens: usize) -> GenerateOptions {
    let mut how = drawn(max_tokens);
    how.sampling.repetition_penalty = 1.7;
    how.sampling.top_k = 30;
    how
}

#[test]
fn generations_choose_from_processed_logits() {
    let model = load("qwen3_tied");
    for plain in [
        drawn(20),
        penalized(20),
        GenerateOptions {
            max_tokens: 20,
            ..GenerateOptions::default()
        },
    ] {
        let mut plain = plain;
        plain.ignore_model_stops = true;
        plain.adjustments.bias = vec![(5, 2.0), (6, NEVER)];
        let seen = Arc::new(Mutex::new(Vec::new()));
        let own = seen.clone();
        let how = processing(&plain, move |logits, tokens| {
            own.lock().unwrap().push((logits.to_vec(), tokens.to_vec()));
            mix(logits, tokens);
            GO
        });
        let mut by_hand = filled(&model, 9);
        let unpenalized = SamplingOptions {
            repetition_penalty: 1.0,
            ..how.sampling.clone()
        };
        let mut sampler = Sampler::new(&unpenalized).unwrap().after(9);
        let mut want = Vec::new();
        for _ in 0..20 {
            let mut logits = by_hand.logits().unwrap().to_vec();
            logits[5] += 2.0;
            logits[6] = NEVER;
            for (token, logit) in logits.iter_mut().enumerate() {
                if by_hand.tokens().contains(&(token as u32)) {
                    let penalty = how.sampling.repetition_penalty;
                    *logit = if *logit > 0.0 {
                        *logit / penalty
                    } else {
                        *logit * penalty
                    };
                }
            }
            let before = want.clone();
            let at = want.len();
            want.push((
                logits.clone(),
                before
                    .iter()
                    .map(|(_, _, token)| *token)
                    .collect::<Vec<u32>>(),
                0,
            ));
            mix(&mut logits, &want[at].1);
            want[at].2 = sampler.sample(&logits, &[]).unwrap();
            by_hand.decode(want[at].2).unwrap();
        }
        let mut generated = filled(&model, 9);
        let made = generate(&mut generated, &how);
        assert_eq!(made.tokens, by_hand.tokens()[9..]);
        assert!(made.finish == Finish::Length && made.refusal.is_none());
        let seen = seen.lock().unwrap();
        assert_eq!(seen.len(), 20);
        for ((logits, tokens), (want, before, _)) in seen.iter().zip(&want) {
            assert_eq!(tokens, before);
            assert!(logits == want, "what a processor sees");
        }
        // It matters.
        assert_ne!(made.tokens, generate(&mut filled(&model, 9), &plain).tokens);
    }
}

#[test]
fn log_probabilities_are_those_of_the_model() {
    let model = load("qwen3_tied");
    let plain = GenerateOptions {
        top_log_probabilities: Some(2),
        ..drawn(1)
    };
    let how = processing(&plain, |logits, _| {
        logits.fill(NEVER);
        logits[77] = 0.0;
        GO
    });
    let mut of = Vec::new();
    let made = filled(&model, 6)
        .generate(&how, &mut |piece| {
            of.extend(piece.probabilities.cloned());
            GO
        })
        .unwrap();
    assert_eq!(made.tokens, [77]);
    let score = filled(&model, 6).score(&[&[77]]).unwrap()[0][0];
    assert!((of[0].chosen - score.log_probability).abs() < 1e-5);
    assert_ne!(of[0].top[0], 77);
}

#[test]
fn steps_and_samples_choose_from_processed_logits() {
    let model = load("qwen3_tied");
    let own = LogitAdjustments {
        processor: Some(LogitsProcessor::new(|logits, tokens| {
            assert!(tokens.is_empty());
            mix(logits, tokens);
            GO
        })),
        ..LogitAdjustments::default()
    };
    let none = LogitAdjustments::default();
    let sampling = penalized(1).sampling;
    let choices: Vec<_> = (0..4)
        .map(|i| StepChoice {
            sampling: &sampling,
            adjustments: if i % 2 == 0 { &own } else { &none },
            top_log_probabilities: None,
        })
        .collect();
    let mut sessions: Vec<_> = (0..4).map(|i| filled(&model, 4 + i)).collect();
    let mut alone: Vec<_> = (0..4).map(|i| filled(&model, 4 + i)).collect();
    let mut next: Vec<u32> = (10..14).collect();
    for _ in 0..8 {
        let each = alone.iter_mut().zip(&choices).zip(&next);
        let want: Vec<u32> = each
            .map(|((session, choice), &token)| {
                session.decode(token).unwrap();
                let mut sampler = Sampler::new(&sampling).unwrap().after(session.appended());
                session
                    .sample_adjusted(&mut sampler, choice.adjustments, None)
                    .unwrap()
            })
            .collect();
        let mut together: Vec<&mut Session> = sessions.iter_mut().collect();
        next = step_choose_with(&mut together, &next, &choices, true).unwrap();
        assert_eq!(next, want);
    }
    // One that ends or is refused fails the step, and no session has changed.
    let failing = |process: fn(&mut [f32]) -> ControlFlow<()>| LogitAdjustments {
        processor: Some(LogitsProcessor::new(move |logits, _| process(logits))),
        ..LogitAdjustments::default()
    };
    let wrong = [
        (
            failing(|_| ControlFlow::Break(())),
            ErrorKind::Cancelled,
            "session 2: the logits processor has ended",
        ),
        (
            failing(|logits| {
                logits[4] = f32::NAN;
                GO
            }),
            ErrorKind::InvalidArgument,
            "session 2: the logits processor has written NaN",
        ),
    ];
    for (adjustments, kind, part) in &wrong {
        let before: Vec<_> = sessions.iter_mut().map(state).collect();
        let mut choices = choices.clone();
        choices[2].adjustments = adjustments;
        let mut together: Vec<&mut Session> = sessions.iter_mut().collect();
        let e = step_choose_with(&mut together, &next, &choices, true).unwrap_err();
        assert!(e.kind() == *kind && e.message().starts_with(part), "{e}");
        for (session, before) in sessions.iter_mut().zip(before) {
            assert!(state(session) == before);
        }
        let sampler = &mut Sampler::new(&sampling).unwrap();
        refused(&mut sessions[2], *kind, &part[11..], |s| {
            s.sample_adjusted(sampler, adjustments, None)
        });
    }
}

#[test]
fn what_nothing_can_be_chosen_from_is_refused_and_earlier_tokens_stay() {
    let model = load("qwen3_tied");
    type Write = fn(&mut [f32]);
    let wrong: [(Write, &str); 4] = [
        (
            |l| l[41] = f32::NAN,
            "has written NaN as the logit of token 41 at position 12",
        ),
        (|l| l[0] = -f32::NAN, "of token 0 at position 12"),
        (
            |l| l[319] = f32::INFINITY,
            "has written inf as the logit of token 319 at position 12",
        ),
        (
            |l| l.fill(NEVER),
            "has left no token at position 12 that may be chosen",
        ),
    ];
    for (write, part) in wrong {
        let how = processing(&drawn(9), move |logits, tokens| {
            if tokens.len() == 3 {
                write(logits);
            }
            GO
        });
        let mut session = filled(&model, 9);
        let made = generate(&mut session, &how);
        let refusal = made.refusal.unwrap();
        assert_eq!(refusal.kind(), ErrorKind::InvalidArgument);
        assert!(refusal.message().contains(part), "{refusal}");
        assert!(made.finish == Finish::Cancelled && made.tokens.len() == 3);
        // The session goes on as one that was told to stop there.
        let mut other = filled(&model, 9);
        assert_eq!(generate(&mut other, &drawn(3)).tokens, made.tokens);
        assert!(state(&mut session) == state(&mut other));
        // With a prompt, a first token that is refused leaves nothing of it.
        let at_once = processing(&drawn(9), move |logits, _| {
            write(logits);
            GO
        });
        refused(
            &mut session,
            ErrorKind::InvalidArgument,
            "the logits processor",
            |s| s.generate_after(&[1, 2], &at_once, &mut go),
        );
        let later = session.generate_after(&[1, 2], &how, &mut go).unwrap();
        assert!(later.refusal.is_some() && session.len() == 17);
    }
    // Minus infinity is no fault.
    let how = processing(&drawn(3), |logits, _| {
        logits[1..].fill(NEVER);
        GO
    });
    assert_eq!(generate(&mut filled(&model, 9), &how).tokens, [0; 3]);
}

#[test]
fn a_processor_ends_its_generation() {
    let model = load("qwen3_tied");
    let how = processing(&drawn(9), |_, tokens| match tokens.len() {
        4 => ControlFlow::Break(()),
        _ => GO,
    });
    let mut session = filled(&model, 9);
    let made = generate(&mut session, &how);
    assert!(made.finish == Finish::Cancelled && made.refusal.is_none());
    assert_eq!((made.tokens.len(), session.len()), (4, 13));
    // At once, after a prompt: the session is as it was.
    let at_once = processing(&drawn(9), |_, _| ControlFlow::Break(()));
    let made = session.generate_after(&[1, 2], &at_once, &mut go).unwrap();
    assert!(made.finish == Finish::Cancelled && made.tokens.is_empty());
    assert_eq!(session.len(), 13);
}

#[test]
fn excluded_tokens_stay_excluded() {
    let model = load("qwen3_tied");
    let grammar = Arc::new(model.grammar(GrammarSource::Regex("[a-d]{12}")).unwrap());
    let plain = GenerateOptions {
        grammar: Some(grammar.clone()),
        max_tokens: 40,
        ..GenerateOptions::default()
    };
    let prompted = || {
        let mut session = session(&model);
        let prompt = model.tokenizer().unwrap().encode("aaaaa", false);
        session.prefill(&prompt.unwrap()).unwrap();
        session
    };
    let counted = Arc::new(AtomicUsize::new(0));
    let seen = counted.clone();
    // Sees what it may choose from, and cannot choose anything else.
    let how = processing(&plain, move |logits, _| {
        let mut state = grammar.begin().unwrap();
        let allowed = TokenMask(state.mask().unwrap());
        if seen.fetch_add(1, Relaxed) == 0 {
            for (token, &logit) in (0..).zip(&*logits) {
                assert_eq!(logit != NEVER, allowed.allows(token), "{token}");
            }
        }
        for logit in logits.iter_mut() {
            *logit = if *logit == NEVER { 1e9 } else { *logit };
        }
        GO
    });
    let mut session = prompted();
    let text = generate(&mut session, &how).text;
    assert!(
        text.len() == 12 && text.bytes().all(|b| (b'a'..=b'd').contains(&b)),
        "{text}"
    );
    assert_eq!(text, generate(&mut prompted(), &plain).text);
    assert!(counted.load(Relaxed) > 1);
    // Excluding what the grammar allows leaves nothing.
    let none = processing(&plain, |logits, _| {
        for logit in logits.iter_mut() {
            *logit = if *logit == NEVER { 1.0 } else { NEVER };
        }
        GO
    });
    let made = generate(&mut prompted(), &none);
    assert!(
        made.refusal
            .unwrap()
            .message()
            .contains("has left no token at position 5")
    );
}

#[test]
fn sessions_are_forked_from_a_processor() {
    let model = load("qwen3_tied");
    let mut session = filled(&model, 9);
    let forks = session.forks().clone();
    let made = Arc::new(Mutex::new(Vec::new()));
    let own = made.clone();
    let how = processing(&drawn(6), move |_, tokens| {
        own.lock()
            .unwrap()
            .push((tokens.len(), forks.fork().unwrap().unwrap()));
        GO
    });
    let whole = generate(&mut session, &how).tokens;
    let mut made = made.lock().unwrap();
    assert_eq!(made.len(), 6);
    for (count, fork) in made.iter_mut() {
        assert_eq!(fork.tokens()[9..], whole[..*count]);
        let rest = generate(fork, &drawn(6 - *count)).tokens;
        assert_eq!(rest, whole[*count..]);
    }
}

#[test]
fn a_window_slides_and_a_queue_runs_with_a_processor() {
    let model = load("qwen3_tied");
    let sliding = || {
        with(&model, |o| {
            o.context = 32;
            o.eviction = Eviction::SlidingWindow { sinks: 2, drop: 8 };
        })
    };
    let how = processing(&drawn(60), |logits, tokens| {
        mix(logits, tokens);
        GO
    });
    let prompt = some_tokens(&model, 10);
    let whole = sliding().generate_after(&prompt, &how, &mut go).unwrap();
    assert!(whole.tokens.len() == 60 && whole.evicted > 0);
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let given = Arc::new(Mutex::new(Vec::new()));
    let (mut session, own) = (sliding(), given.clone());
    queue
        .submit(Submission {
            work: Box::new(move |on_piece| {
                let made = session.generate_after(&prompt, &how, on_piece)?;
                *own.lock().unwrap() = made.tokens;
                Ok(made.finish)
            }),
            priority: 0,
            deadline: None,
            is_cancelled: Box::new(|| false),
            user_data: 0,
        })
        .unwrap();
    while !queue
        .wait(100, Some(Duration::from_secs(60)))
        .unwrap()
        .iter()
        .any(|event| matches!(event.what, Happened::Ended(_)))
    {}
    assert_eq!(*given.lock().unwrap(), whole.tokens);
}

#[test]
fn answers_are_processed() {
    let model = load("qwen3_tied");
    let how = processing(&drawn(5), |logits, tokens| {
        logits.fill(NEVER);
        logits[60 + tokens.len()] = 0.0;
        GO
    });
    let mut session = session(&model);
    let made = session
        .chat("Hi", Some(&ChatOptions::default()), &how, &mut go)
        .unwrap();
    assert_eq!(made.tokens, [60, 61, 62, 63, 64]);
    let before = session.tokens().to_vec();
    let refusing = processing(&drawn(5), |logits, _| {
        logits[3] = f32::NAN;
        GO
    });
    refused(
        &mut session,
        ErrorKind::InvalidArgument,
        "has written NaN",
        |s| s.chat("More", None, &refusing, &mut go),
    );
    assert_eq!(session.tokens(), before);
}
