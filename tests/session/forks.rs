//! Forks of a session while another thread generates with it.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use NVFP4::base::ErrorKind;
use NVFP4::base::call::{Cancel, Watch};
use NVFP4::engine::Served;
use NVFP4::session::{
    Finish, Forks, GenerateOptions, Generation, Happened, Piece, Queue, QueueOptions, Session,
    Submission,
};

use super::{drawn, filled, go, seen, session};
use crate::common::{load, options, some_tokens, windows};

/// Tokens after each of which a generation waits for one more fork, so that there are some however fast it is.
const WAITS: usize = 6;

/// Forks a generation again and again until it has ended. Returns a fork of each length.
fn forked(
    forks: &Forks<Session>,
    begun: &mpsc::Receiver<()>,
    made: &mpsc::Sender<()>,
) -> Vec<Session> {
    begun.recv().unwrap();
    let mut all: Vec<Session> = Vec::new();
    while let Some(fork) = forks.fork().unwrap() {
        if all.last().is_none_or(|last| last.len() < fork.len()) {
            all.push(fork);
        }
        made.send(()).unwrap();
        thread::sleep(Duration::from_micros(100));
    }
    all
}

/// Runs a generation while another thread forks it. Returns the generation, and a fork of each length.
fn generated_and_forked(
    session: &mut Session,
    generate: impl FnOnce(
        &mut Session,
        &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> NVFP4::base::Result<Generation>,
) -> (Generation, Vec<Session>) {
    let forks = session.forks().clone();
    let (begin, begun) = mpsc::channel();
    let (make, made) = mpsc::channel();
    thread::scope(|scope| {
        let forking = scope.spawn(move || forked(&forks, &begun, &make));
        let mut pieces = 0;
        let on_piece = &mut |_: Piece<'_>| {
            if pieces == 0 {
                begin.send(()).unwrap();
            }
            if pieces < WAITS {
                made.recv().unwrap();
            }
            pieces += 1;
            ControlFlow::Continue(())
        };
        let generated = generate(session, on_piece).unwrap();
        (generated, forking.join().unwrap())
    })
}

/// Each fork has a beginning of the tokens, and goes on as the generation did, bit for bit.
#[test]
fn forks_go_on_as_the_generation_does() {
    for case in ["qwen3_tied", "gemma3_wide", "qwen35_tied", "qwen35_drafter"] {
        let model = load(case);
        for options in [GenerateOptions::default(), drawn(usize::MAX)] {
            let mut whole = filled(&model, 5);
            let forks = whole.forks().clone();
            let count = 60;
            let whole_options = GenerateOptions {
                max_tokens: count,
                ignore_model_stops: true,
                ..options.clone()
            };
            let (generated, mut all) = generated_and_forked(&mut whole, |whole, on_piece| {
                whole.generate(&whole_options, on_piece)
            });
            assert_eq!(generated.tokens.len(), count);
            println!("{case}: {} forks of {count} tokens", all.len());
            assert!(!all.is_empty(), "{case}");
            let every = all.len().div_ceil(4);
            for fork in all.iter_mut().step_by(every) {
                let held = fork.len();
                assert!(whole.tokens().starts_with(fork.tokens()), "{case}");
                let rest = GenerateOptions {
                    max_tokens: whole.len() - held,
                    ignore_model_stops: true,
                    ..options.clone()
                };
                if rest.max_tokens > 0 {
                    fork.generate(&rest, &mut go).unwrap();
                }
                assert_eq!(seen(fork), seen(&whole), "{case} at {held}");
            }
            assert!(forks.fork().unwrap().is_none(), "it no longer generates");
        }
        assert_eq!(model.blocks_used(), 0, "{case}");
    }
}

/// The conversation of a fork ends with the answer so far, and takes its next turn from there.
#[test]
fn forks_of_an_answer_have_what_was_said() {
    let model = load("qwen3_tied");
    let mut chat = session(&model);
    let (_, mut all) = generated_and_forked(&mut chat, |chat, on_piece| {
        chat.chat("Hello", None, &drawn(60), on_piece)
    });
    let mut fork = all.swap_remove(all.len() / 2);
    let len = fork.len();
    let mut cut = chat.fork().unwrap();
    cut.truncate(len).unwrap();
    assert_eq!(fork.messages().unwrap(), cut.messages().unwrap());
    assert_eq!(fork.messages().unwrap().len(), 2);
    for session in [&mut fork, &mut cut] {
        session.chat("And you?", None, &drawn(10), &mut go).unwrap();
    }
    assert_eq!(fork.tokens(), cut.tokens());
}

/// A callback forks its own generation: a candidate for each token. Before and after it there is no generation to fork.
#[test]
fn a_callback_forks_its_generation() {
    let model = load("qwen3_tied");
    let mut whole = filled(&model, 5);
    let forks = whole.forks().clone();
    assert!(forks.fork().unwrap().is_none());
    let mut all = Vec::new();
    let on_piece = &mut |_: Piece<'_>| {
        all.push(forks.fork().unwrap().unwrap());
        ControlFlow::Continue(())
    };
    let mut options = drawn(12);
    options.ignore_model_stops = true;
    whole.generate(&options, on_piece).unwrap();
    let lengths: Vec<usize> = all.iter().map(Session::len).collect();
    assert_eq!(lengths[..12], (6..18).collect::<Vec<_>>()[..]);
    for fork in &all {
        assert!(whole.tokens().starts_with(fork.tokens()));
    }
    assert!(forks.fork().unwrap().is_none());
}

/// A prompt takes longer than a step: whoever asks is told so at once.
#[test]
fn forks_are_refused_while_a_prompt_runs() {
    let dir = windows::lengthened("qwen3_tied");
    let model = Served::load(&dir.0, &options()).unwrap();
    let prompt = some_tokens(&model, 1500);
    let mut whole = session(&model);
    let forks = whole.forks().clone();
    let over = AtomicBool::new(false);
    let refused = thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut refused = None;
            while refused.is_none() && !over.load(Ordering::Relaxed) {
                refused = forks.fork().err();
            }
            refused
        });
        whole.generate_after(&prompt, &drawn(3), &mut go).unwrap();
        over.store(true, Ordering::Relaxed);
        asking.join().unwrap()
    });
    let refused = refused.unwrap();
    assert_eq!(refused.kind(), ErrorKind::Busy);
    assert!(refused.message().contains("runs a prompt"), "{refused}");
}

fn submit(queue: &Queue, session: Session, options: GenerateOptions) -> Arc<Forks<Session>> {
    let forks = session.forks().clone();
    let mut session = session;
    let submission = Submission {
        work: Box::new(move |on_piece| Ok(session.generate(&options, on_piece)?.finish)),
        priority: 0,
        deadline: None,
        is_cancelled: Box::new(|| false),
        user_data: 0,
    };
    queue.submit(submission).unwrap();
    forks
}

/// Events that nobody takes do not keep the thread that takes them from its forks, and none is lost.
#[test]
fn a_paused_generation_of_a_queue_is_forked() {
    let model = load("qwen3_tied");
    let queue = Queue::new(QueueOptions {
        running: 1,
        submissions: 1,
        events: 3,
    })
    .unwrap();
    let mut options = drawn(100);
    options.ignore_model_stops = true;
    let forks = submit(&queue, filled(&model, 5), options);
    while queue.counts().unwrap().events < 3 {
        thread::yield_now();
    }
    // It stands still at the token that finds no room.
    while forks.fork().unwrap().unwrap().len() < 5 + 4 {}
    for _ in 0..3 {
        assert_eq!(forks.fork().unwrap().unwrap().len(), 5 + 4);
    }
    let (mut tokens, mut end) = (0, None);
    while end.is_none() {
        for event in queue.wait(10, Some(Duration::from_secs(60))).unwrap() {
            match event.what {
                Happened::Piece { token, .. } => tokens += usize::from(token.is_some()),
                Happened::Ended(result) => end = Some(result.unwrap()),
            }
        }
    }
    assert_eq!((tokens, end), (100, Some(Finish::Length)));
}

/// Many threads ask, some of them give up, and the generation is cancelled meanwhile: no block is lost, and nobody waits for ever.
#[test]
fn many_ask_and_some_give_up() {
    let model = load("qwen3_tied");
    for round in 0..20u64 {
        let mut whole = filled(&model, 5);
        let forks = whole.forks().clone();
        let (cancel, over) = (Cancel::new(), AtomicBool::new(false));
        thread::scope(|scope| {
            for asker in 0..6 {
                let (forks, over) = (&forks, &over);
                scope.spawn(move || {
                    let given_up = Cancel::new();
                    let flag = || given_up.is_set();
                    let watch = Watch {
                        flags: &[&flag],
                        deadline: None,
                        progress: None,
                    };
                    while !over.load(Ordering::Relaxed) {
                        if asker == 0 {
                            given_up.cancel();
                        }
                        match watch.during(|| forks.fork()) {
                            Ok(fork) => drop(fork),
                            Err(e) => assert_eq!((e.kind(), asker), (ErrorKind::Cancelled, 0)),
                        }
                        thread::yield_now();
                    }
                });
            }
            let mut count = 0;
            let on_piece = &mut |_: Piece<'_>| {
                count += 1;
                if count == 10 + round {
                    cancel.cancel();
                }
                ControlFlow::Continue(())
            };
            let flag = || cancel.is_set();
            let watch = Watch {
                flags: &[&flag],
                deadline: None,
                progress: None,
            };
            let mut options = drawn(200);
            options.ignore_model_stops = true;
            let made = watch.during(|| whole.generate(&options, on_piece)).unwrap();
            over.store(true, Ordering::Relaxed);
            assert_eq!(made.finish, Finish::Cancelled);
        });
        drop(whole);
        assert_eq!(model.blocks_used(), 0, "round {round}");
    }
}
