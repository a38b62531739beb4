//! A sliding window with attention sinks: what is left is what a fresh session has that was given these tokens, for as long as one likes.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use NVFP4::base::ErrorKind;
use NVFP4::engine::Served;
use NVFP4::model::KvType;
use NVFP4::session::{
    Eviction, Finish, GenerateOptions, Happened, Piece, Queue, QueueOptions, SINKS, Session,
    SessionOptions, Submission, Work,
};

use super::common::{load, some_tokens};
use super::{drawn, file, generate, go, refused, state, with};

const CONTEXT: usize = 32;
const PROMPT: usize = 20;

fn sliding(model: &Arc<Served>, kv: KvType, drop: usize) -> Session {
    with(model, |o| {
        o.kv = kv;
        o.context = CONTEXT;
        o.eviction = Eviction::SlidingWindow { sinks: SINKS, drop };
    })
}

/// The argmax, and stop tokens are tokens as others.
fn greedy(max_tokens: usize) -> GenerateOptions {
    GenerateOptions {
        max_tokens,
        ignore_model_stops: true,
        ..GenerateOptions::default()
    }
}

/// Tokens that sessions generate which are given what the window holds whenever it has slid, and the tokens that the last one holds.
fn expected(
    model: &Arc<Served>,
    kv: KvType,
    (prompt, drop): (&[u32], usize),
    count: usize,
) -> (Vec<u32>, Session) {
    let new = |held: &[u32]| {
        let mut session = with(model, |o| {
            o.kv = kv;
            o.private = true;
        });
        session.prefill(held).unwrap();
        session
    };
    let mut session = new(prompt);
    let mut tokens = Vec::new();
    for _ in 0..count {
        let next = session.argmax().unwrap();
        if session.len() == CONTEXT {
            let drop = match drop {
                0 => (CONTEXT - SINKS).div_ceil(2),
                drop => drop,
            };
            let held = session.tokens();
            session = new(&[&held[..SINKS], &held[SINKS + drop..]].concat());
        }
        session.decode(next).unwrap();
        tokens.push(next);
    }
    (tokens, session)
}

/// Five times as many tokens as the context holds, of models that cache keys, windows of them, and recurrent states, are those of fresh
/// sessions with the same sinks and recent tokens, and the logits have the same bits.
#[test]
fn a_window_is_what_a_fresh_session_has() {
    for (case, kv, drop) in [
        ("qwen3_tied", KvType::F16, 0),
        ("qwen3_tied", KvType::F8, 5),
        ("qwen3_tied", KvType::F32, 27),
        ("gemma3_narrow", KvType::F16, 9),
        ("qwen35_tied", KvType::F16, 0),
        ("nemotronh_dense", KvType::F16, 11),
    ] {
        let model = load(case);
        let prompt = some_tokens(&model, PROMPT);
        let count = 5 * CONTEXT;
        let (tokens, mut last) = expected(&model, kv, (&prompt, drop), count);
        let mut session = sliding(&model, kv, drop);
        session.prefill(&prompt).unwrap();
        let out = generate(&mut session, &greedy(count));
        assert_eq!(out.tokens, tokens, "{case}, {drop}");
        assert_eq!((out.finish, out.tokens.len()), (Finish::Length, count));
        assert_eq!(out.evicted, session.evicted());
        assert_eq!(session.evicted() + session.len(), PROMPT + count);
        assert!(state(&mut session) == state(&mut last), "{case}, {drop}");
        assert_eq!(session.tokens()[..SINKS], prompt[..SINKS]);
    }
}

/// Without a limit on its tokens a generation goes on until its callback ends it; and one token at a time, with forks, files and steps
/// between them, gives the same.
#[test]
fn a_window_slides_without_an_end() {
    let model = load("qwen3_tied");
    let prompt = some_tokens(&model, PROMPT);
    let new = || {
        let mut session = sliding(&model, KvType::F16, 7);
        session.prefill(&prompt).unwrap();
        session
    };
    let (mut whole, mut heard) = (new(), 0);
    let (forks, mut forked) = (whole.forks().clone(), Vec::new());
    let on_piece = &mut |piece: Piece<'_>| {
        heard += usize::from(piece.token.is_some());
        if heard.is_multiple_of(50) {
            forked.push(forks.fork().unwrap().unwrap());
        }
        match heard {
            200 => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    };
    let out = whole.generate(&drawn(usize::MAX), on_piece).unwrap();
    assert_eq!((out.finish, out.tokens.len()), (Finish::Cancelled, 200));
    for (i, mut fork) in forked.into_iter().enumerate() {
        let from = 50 * (i + 1);
        assert_eq!(fork.evicted() + fork.len(), PROMPT + from);
        let rest = generate(&mut fork, &drawn(200 - from));
        assert_eq!(rest.tokens, out.tokens[from..]);
        assert!(state(&mut fork) == state(&mut whole));
    }
    let (path, mut session, mut tokens) = (file("sliding"), new(), Vec::new());
    for size in [1, 30, 2, 90, 77] {
        tokens.extend(generate(&mut session, &drawn(size)).tokens);
        session.save(&path.0).unwrap();
        session = Session::restore(model.clone(), &path.0).unwrap();
    }
    assert_eq!(tokens, out.tokens);
    assert_eq!(session.evicted(), whole.evicted());
    assert!(state(&mut session) == state(&mut whole));
    let mut stepped = new();
    for &token in &tokens {
        super::step(&mut [&mut stepped], &[token]).unwrap();
    }
    assert!(state(&mut stepped) == state(&mut whole));
    session.reset().unwrap();
    assert_eq!(session.evicted(), 0);
}

/// In a queue, too, a generation goes on until it is cancelled.
#[test]
fn a_window_slides_in_a_queue() {
    let model = load("qwen3_tied");
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let before = model.statistics().evicted_tokens;
    let prompt = some_tokens(&model, PROMPT);
    for _ in 0..3 {
        let mut session = sliding(&model, KvType::F16, 0);
        session.prefill(&prompt).unwrap();
        let work: Work = Box::new(move |on_piece| {
            let out = session.generate(&drawn(usize::MAX), on_piece)?;
            assert!(out.evicted > 4 * CONTEXT);
            Ok(out.finish)
        });
        let submission = Submission {
            work,
            priority: 0,
            deadline: None,
            is_cancelled: Box::new(|| false),
            user_data: 0,
        };
        queue.submit(submission).unwrap();
    }
    let (mut counts, mut ends) = ([0; 3], 0);
    while ends < 3 {
        for event in queue.wait(100, Some(Duration::from_secs(60))).unwrap() {
            match event.what {
                Happened::Piece { .. } => {
                    let count = &mut counts[event.generation as usize - 1];
                    *count += 1;
                    if *count == 6 * CONTEXT {
                        queue.cancel(event.generation).unwrap();
                    }
                }
                Happened::Ended(result) => {
                    assert_eq!(result.unwrap(), Finish::Cancelled);
                    ends += 1;
                }
            }
        }
    }
    assert!(model.statistics().evicted_tokens - before > 3 * 4 * CONTEXT as u64);
}

#[test]
fn windows_refuse_chats_and_sizes_that_leave_nothing() {
    let model = load("qwen3_tied");
    let mut session = sliding(&model, KvType::F16, 0);
    refused(
        &mut session,
        ErrorKind::InvalidArgument,
        "through which a sliding window cuts",
        |s| s.chat("Hi", None, &drawn(3), &mut go),
    );
    session.prefill(&some_tokens(&model, PROMPT)).unwrap();
    let beside = "29 tokens do not fit in a context of 32 beside the 4 that are kept";
    refused(&mut session, ErrorKind::ContextFull, beside, |s| {
        s.prefill(&[1; 29])
    });
    session.prefill(&[1; 28]).unwrap();
    assert_eq!((session.len(), session.evicted()), (32, 16));
    for (sinks, drop, words) in [
        (32, 0, "keeping the first 32 tokens of a context of 32"),
        (4, 28, "dropping 28 tokens at a time of a context of 32"),
    ] {
        let options = SessionOptions {
            context: CONTEXT,
            eviction: Eviction::SlidingWindow { sinks, drop },
            ..SessionOptions::default()
        };
        let e = Session::new(model.clone(), &options).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        assert!(e.message().contains(words), "{e}");
    }
}
