//! Threads that use one model, each with sessions of its own: their tokens run in the same passes, and each gets what it gets alone.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::thread;
use std::time::Duration;

use NVFP4::base::call::{Cancel, Progress, Watch};
use NVFP4::base::{Error, ErrorKind};
use NVFP4::engine::Served;
use NVFP4::model::{LoadOptions, Tuning};
use NVFP4::session::{Finish, GenerateOptions, Piece, SamplingOptions, Session};

use super::{drawn, filled, go, session, with};
use crate::common::{golden, load, options, some_tokens, windows};

/// The tokens of a session that twice prefills half of `tokens` and generates by `options`.
fn work(session: &mut Session, tokens: &[u32], options: &GenerateOptions) -> Vec<u32> {
    for part in [&tokens[..tokens.len() / 2], &tokens[tokens.len() / 2..]] {
        session.prefill(part).unwrap();
        session.generate(options, &mut go).unwrap();
    }
    session.tokens().to_vec()
}

fn options_of(thread: usize) -> GenerateOptions {
    let mut options = drawn(24 + thread);
    match thread % 4 {
        0 => options.sampling = SamplingOptions::default(),
        1 => options.top_log_probabilities = Some(3),
        2 => options.sampling.repetition_penalty = 1.3,
        _ => {}
    }
    options
}

/// Prompts of several passes beside steps, argmax and draws, all kinds of layers: on the CPU the same tokens.
#[test]
fn threads_get_what_each_gets_alone() {
    for case in [
        "qwen3_tied",
        "gemma3_wide",
        "qwen3moe_saved",
        "qwen35_tied",
        "qwen35_drafter",
        "nemotronh_dense",
    ] {
        let dir = windows::lengthened(case);
        let model = Served::load(&dir.0, &options()).unwrap();
        let room = 1600;
        let tokens = some_tokens(&model, room);
        let part = |thread: usize| &tokens[thread..room * (thread + 3) / 12];
        let alone: Vec<Vec<u32>> = (0..6)
            .map(|thread| work(&mut session(&model), part(thread), &options_of(thread)))
            .collect();
        let before = model.pass_counts();
        let barrier = Barrier::new(6);
        let together: Vec<Vec<u32>> = thread::scope(|scope| {
            let threads: Vec<_> = (0..6)
                .map(|thread| {
                    let (model, barrier, part) = (&model, &barrier, &part);
                    scope.spawn(move || {
                        let mut session = session(model);
                        barrier.wait();
                        work(&mut session, part(thread), &options_of(thread))
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(together, alone, "{case}");
        let after = model.pass_counts();
        let (passes, requests) = (
            after.passes - before.passes,
            after.requests - before.requests,
        );
        println!("{case}: {requests} requests in {passes} passes");
        assert!(requests > passes, "{case}: no pass served two threads");
        assert_eq!(model.blocks_used(), 0, "{case}");
    }
}

/// One that falls asleep between two tokens, as a slow reader does, holds nobody up for long.
#[test]
fn a_callback_that_blocks_leaves_the_others_their_tokens() {
    let model = load("qwen3_tied");
    let barrier = Barrier::new(4);
    let (done, others) = mpsc::channel();
    thread::scope(|scope| {
        let (blocking, barrier) = (&model, &barrier);
        scope.spawn(move || {
            let mut session = filled(blocking, 5);
            barrier.wait();
            let mut count = 0;
            let on_piece = &mut |_: Piece<'_>| {
                count += 1;
                if count == 10 {
                    for _ in 0..3 {
                        others.recv_timeout(Duration::from_secs(60)).unwrap();
                    }
                }
                ControlFlow::Continue(())
            };
            let got = session.generate(&drawn(40), on_piece).unwrap();
            assert_eq!(got.tokens.len(), 40);
        });
        for _ in 0..3 {
            let (done, model) = (done.clone(), &model);
            scope.spawn(move || {
                let mut session = filled(model, 5);
                barrier.wait();
                session.generate(&drawn(100), &mut go).unwrap();
                done.send(()).unwrap();
            });
        }
    });
}

/// Runs a prompt of `length` tokens, at most the context, while another session generates. Returns its length, the tokens of the other
/// meanwhile, and the passes. The prompt is what it is alone.
fn joins(options: &LoadOptions, length: usize) -> (usize, usize, u64) {
    let dir = windows::lengthened("qwen35_tied");
    let model = Served::load(&dir.0, options).unwrap();
    let room = model.spec().max_positions;
    let prompt = some_tokens(&model, room.min(length));
    let mut alone = with(&model, |options| options.private = true);
    alone.prefill(&prompt).unwrap();
    let tokens = AtomicUsize::new(0);
    let (begin, begun) = mpsc::channel();
    let stop = Cancel::new();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut session = filled(&model, 5);
            let endless = GenerateOptions {
                ignore_model_stops: true,
                ..drawn(room - 10)
            };
            while !stop.is_set() {
                session.truncate(5).unwrap();
                let on_piece = &mut |_: Piece<'_>| {
                    if tokens.fetch_add(1, Ordering::Relaxed) == 20 {
                        begin.send(()).unwrap();
                    }
                    match stop.is_set() {
                        true => ControlFlow::Break(()),
                        false => ControlFlow::Continue(()),
                    }
                };
                session.generate(&endless, on_piece).unwrap();
            }
        });
        begun.recv().unwrap();
        let now = || (tokens.load(Ordering::Relaxed), model.statistics().passes);
        let before = now();
        let mut session = session(&model);
        session.prefill(&prompt).unwrap();
        let after = now();
        stop.cancel();
        assert_eq!(session.logits().unwrap(), alone.logits().unwrap());
        (prompt.len(), after.0 - before.0, after.1 - before.1)
    })
}

/// While a long prompt runs, those that generate get tokens.
#[test]
fn a_prompt_that_joins_lets_others_generate() {
    let (length, during, _) = joins(&options(), usize::MAX);
    println!("{during} tokens while a prompt of {length} ran");
    assert!(
        during >= 3,
        "{during} tokens while a prompt of {length} ran"
    );
}

/// While others generate, a prompt runs in parts of no more tokens than the options allow, whatever passes are tuned for.
#[test]
fn prompts_that_join_run_in_parts() {
    for tuning in [Tuning::Throughput, Tuning::Latency] {
        let options = LoadOptions {
            tuning,
            prompt_tokens: Some(32),
            ..options()
        };
        let (length, _, passes) = joins(&options, 512);
        let parts = length as u64 / 32;
        assert!(
            passes >= parts,
            "{passes} passes of a prompt in {parts} parts"
        );
    }
}

/// A full context and a cancelled call end the requests that they concern.
#[test]
fn failures_are_those_of_one_thread() {
    let model = load("qwen3_tied");
    let want = filled(&model, 5).generate(&drawn(120), &mut go).unwrap();
    let barrier = Barrier::new(6);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut session = filled(&model, 5);
                barrier.wait();
                let got = session.generate(&drawn(120), &mut go).unwrap();
                assert_eq!(got.tokens, want.tokens);
            });
        }
        scope.spawn(|| {
            let mut small = with(&model, |options| options.context = 8);
            barrier.wait();
            for _ in 0..40 {
                small.prefill(&some_tokens(&model, 8)).unwrap();
                let error = small.decode(3).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::ContextFull);
                assert_eq!(small.len(), 8);
                small.reset().unwrap();
            }
        });
        scope.spawn(|| {
            let mut session = filled(&model, 7);
            let before = session.logits().unwrap().to_vec();
            barrier.wait();
            for i in 0..40 {
                let looks = AtomicUsize::new(0);
                let flag = || looks.fetch_add(1, Ordering::Relaxed) >= i % 5;
                let watch = Watch {
                    flags: &[&flag],
                    ..Watch::default()
                };
                let tokens = some_tokens(&model, 200);
                match watch.during(|| session.prefill(&tokens)) {
                    Ok(()) => session.truncate(7).unwrap(),
                    Err(e) => assert_eq!(e.kind(), ErrorKind::Cancelled),
                }
                assert_eq!(session.len(), 7);
            }
            assert_eq!(session.logits().unwrap(), before);
        });
    });
    assert_eq!(model.blocks_used(), 0);
}

/// Progress counts the tokens that ran in passes of other callers too.
#[test]
fn progress_is_that_of_the_own_prompt() {
    let model = load("qwen3_tied");
    let tokens = some_tokens(&model, model.spec().max_positions);
    let barrier = Barrier::new(4);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let last = std::cell::Cell::new(Progress::default());
                let progress = |at: Progress| {
                    assert!(at.done >= last.get().done && at.done <= at.total);
                    last.set(at);
                    ControlFlow::Continue(())
                };
                let watch = Watch {
                    progress: Some(&progress),
                    ..Watch::default()
                };
                let mut session = session(&model);
                barrier.wait();
                watch.during(|| session.prefill(&tokens)).unwrap();
                let all = tokens.len() as u64;
                assert_eq!((last.get().done, last.get().total), (all, all));
            });
        }
    });
}

/// Random cancels among threads that prefill, generate and fork: no block is lost.
#[test]
fn no_block_is_lost_by_cancelled_calls() {
    let model: Arc<Served> = load("gemma3_wide");
    thread::scope(|scope| {
        for thread in 0..4u64 {
            let model = &model;
            scope.spawn(move || {
                let tokens = some_tokens(model, 150);
                for round in 0..60 {
                    let drawn_bits = NVFP4::format::random::bits(thread, round);
                    let cancel = Cancel::new();
                    let most = drawn_bits % 12;
                    let mut session = session(model);
                    let mut count = 0;
                    let on_piece = &mut |_: Piece<'_>| {
                        count += 1;
                        if count >= most {
                            cancel.cancel();
                        }
                        ControlFlow::Continue(())
                    };
                    if most == 0 {
                        cancel.cancel();
                    }
                    let prefilled = cancel
                        .watching(|| session.prefill(&tokens[..50 + drawn_bits as usize % 100]));
                    if prefilled.is_ok() {
                        let mut fork = session.fork().unwrap();
                        cancel
                            .watching(|| fork.generate(&drawn(30), on_piece))
                            .unwrap();
                        session.generate(&drawn(3), &mut go).unwrap();
                    }
                }
            });
        }
    });
    assert_eq!(model.blocks_used(), 0);
}

/// Generates in six threads at a time, with the tokens that each has `alone`. Returns the number of preemptions.
fn check_together(
    model: &Arc<Served>,
    alone: &[Vec<u32>],
    generate: impl Fn(&Arc<Served>, usize) -> Result<(Vec<u32>, usize, usize), Error> + Sync,
    case: &str,
) -> usize {
    let barrier = Barrier::new(alone.len());
    let together: Vec<(Vec<u32>, usize)> = thread::scope(|scope| {
        let threads = (0..alone.len()).map(|thread| {
            let (barrier, generate) = (&barrier, &generate);
            scope.spawn(move || {
                barrier.wait();
                let (tokens, _, preemptions) = generate(model, thread).unwrap();
                (tokens, preemptions)
            })
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let (together, preemptions): (Vec<_>, Vec<_>) = together.into_iter().unzip();
    assert_eq!(together, alone, "{case}");
    preemptions.iter().sum()
}

/// With memory for two of six conversations, those that find none give theirs up, wait, and go on: all come to their ends, with the tokens
/// that each has alone.
#[test]
fn generations_that_find_no_memory_make_way() {
    for (case, prefix_cache) in [
        ("qwen3_tied", false),
        ("qwen3_tied", true),
        ("gemma3_wide", false),
        ("qwen35_tied", false),
    ] {
        let unlimited = load(case);
        let prompts = some_tokens(&unlimited, 130);
        let generate = |model: &Arc<Served>, thread: usize| {
            let mut session = session(model);
            let prompt = &prompts[thread..thread + 50 + 10 * thread];
            let made = session.generate_after(prompt, &drawn(60), &mut go)?;
            Ok::<_, Error>((made.tokens, session.kv_bytes(), made.preemptions))
        };
        let alone = |thread| generate(&unlimited, thread).unwrap();
        let alone: Vec<(Vec<u32>, usize, usize)> = (0..6).map(alone).collect();
        let most = alone.iter().map(|(_, bytes, _)| *bytes).max().unwrap();
        assert!(alone.iter().all(|(_, _, preemptions)| *preemptions == 0));
        let limited = |bytes| LoadOptions {
            kv_bytes: Some(bytes),
            prefix_cache,
            ..options()
        };
        let model = Served::load(&golden(case), &limited(5 * most / 2)).unwrap();
        let alone: Vec<Vec<u32>> = alone.into_iter().map(|(tokens, ..)| tokens).collect();
        let mut of_all = 0;
        // Threads may also come one after the other, and then find memory.
        for _ in 0..50 {
            of_all += check_together(&model, &alone, generate, case);
            if of_all > 0 {
                break;
            }
        }
        assert!(of_all > 0, "{case}: {:?}", model.statistics());
        assert_eq!(of_all as u64, model.statistics().preemptions, "{case}");
        assert_eq!(model.blocks_used(), 0, "{case}");
        // Where nobody else will free memory, it is refused as ever.
        drop(model);
        let model = Served::load(&golden(case), &limited(most / 3)).unwrap();
        let refused = generate(&model, 5).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::OutOfMemory, "{case}");
        assert_eq!(model.statistics().preemptions, 0);
    }
}

/// A generation that finds no memory waits for the session of one that has just ended. It is refused if that session stays.
#[test]
fn a_generation_waits_for_a_session_that_is_about_to_be_released() {
    let unlimited = load("qwen3_tied");
    let limited = LoadOptions {
        kv_bytes: Some(filled(&unlimited, 100).kv_bytes()),
        prefix_cache: false,
        ..options()
    };
    let tokens = some_tokens(&unlimited, 60);
    for is_released in [true, false] {
        let model = Served::load(&golden("qwen3_tied"), &limited).unwrap();
        let (ends, ended) = mpsc::channel();
        let (refuses, refused) = mpsc::channel();
        thread::scope(|scope| {
            let (model, tokens) = (&model, &tokens);
            scope.spawn(move || {
                let mut session = session(model);
                session.generate_after(tokens, &drawn(2), &mut go).unwrap();
                ends.send(()).unwrap();
                if is_released {
                    // Until the other waits, or has been refused.
                    let wait = Duration::from_millis(1);
                    while model.statistics().preemptions == 0 && refused.recv_timeout(wait).is_err()
                    {
                    }
                    thread::sleep(Duration::from_millis(20));
                } else {
                    refused.recv().unwrap();
                }
            });
            ended.recv().unwrap();
            let made = session(model).generate_after(tokens, &drawn(2), &mut go);
            // The session may be released by now.
            refuses.send(()).ok();
            let refusal = made.map_err(|e| e.kind()).err();
            assert_eq!(refusal, (!is_released).then_some(ErrorKind::OutOfMemory));
        });
    }
}

/// A generation that waits for memory ends when it is cancelled, and its session is as before.
#[test]
fn a_generation_that_waits_for_memory_can_be_cancelled() {
    let unlimited = load("qwen3_tied");
    let one = filled(&unlimited, 100).kv_bytes();
    let limited = LoadOptions {
        kv_bytes: Some(one),
        prefix_cache: false,
        ..options()
    };
    let model = Served::load(&golden("qwen3_tied"), &limited).unwrap();
    let tokens = some_tokens(&model, 60);
    let (begins, begun) = mpsc::channel();
    let (ends, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let (model, tokens) = (&model, &tokens);
        let holds = scope.spawn(move || {
            let mut session = session(model);
            let made = session.generate_after(tokens, &drawn(2), &mut |_| {
                begins.send(()).unwrap();
                ended.recv().unwrap();
                ControlFlow::Break(())
            });
            made.unwrap().tokens.len()
        });
        begun.recv().unwrap();
        let cancel = Cancel::new();
        let waits = scope.spawn({
            let cancel = cancel.clone();
            move || {
                let mut session = session(model);
                let made = cancel.watching(|| session.generate_after(tokens, &drawn(2), &mut go));
                (made.unwrap().finish, session.len())
            }
        });
        while model.statistics().preemptions == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        cancel.cancel();
        assert_eq!(waits.join().unwrap(), (Finish::Cancelled, 0));
        ends.send(()).unwrap();
        assert_eq!(holds.join().unwrap(), 1);
    });
    assert_eq!(model.blocks_used(), 0);
}

/// The progress callback of a pass may end other sessions of the model, and ask what it holds.
#[test]
fn a_callback_of_a_pass_ends_other_sessions() {
    let dir = windows::lengthened("qwen35_tied");
    let model = Served::load(&dir.0, &options()).unwrap();
    let tokens = some_tokens(&model, 900);
    let others: Vec<_> = (0..3).map(|_| filled(&model, 60)).collect();
    let others = std::cell::RefCell::new(others);
    let progress = |at: Progress| {
        if at.done < at.total
            && let Some(mut other) = others.borrow_mut().pop()
        {
            other.truncate(10).unwrap();
            drop(other.fork().unwrap());
            assert!(model.statistics().blocks.blocks_used > 0);
        }
        ControlFlow::Continue(())
    };
    let watch = Watch {
        progress: Some(&progress),
        ..Watch::default()
    };
    while !others.borrow().is_empty() {
        let mut session = with(&model, |options| options.private = true);
        watch.during(|| session.prefill(&tokens)).unwrap();
    }
    assert_eq!(model.blocks_used(), 0);
}

/// A caller that panics as it is to lead leaves the lead to the next one.
#[test]
fn a_caller_that_panics_passes_the_lead_on() {
    let dir = windows::lengthened("qwen3_tied");
    let model = Served::load(&dir.0, &options()).unwrap();
    let tokens = some_tokens(&model, 900);
    let [ends, has_ended] = [false, false].map(AtomicBool::new);
    let prefill = || with(&model, |options| options.private = true).prefill(&tokens);
    let waiting = |count| {
        while model.statistics().waiting < count {
            thread::sleep(Duration::from_millis(1));
        }
    };
    let (done, is_done) = mpsc::channel();
    thread::scope(|scope| {
        let (begins, begun) = mpsc::channel();
        let (prefill, waiting, ends, has_ended) = (&prefill, &waiting, &ends, &has_ended);
        scope.spawn(move || {
            let progress = |_: Progress| {
                begins.send(()).unwrap();
                // The others come while the pass of this prompt runs, and are in none when it ends.
                waiting(2);
                ends.store(true, Ordering::SeqCst);
                ControlFlow::Continue(())
            };
            let watch = Watch {
                progress: Some(&progress),
                ..Watch::default()
            };
            watch.during(prefill).unwrap();
            has_ended.store(true, Ordering::SeqCst);
        });
        begun.recv().unwrap();
        let panics = scope.spawn(move || {
            let flag = || {
                if ends.load(Ordering::SeqCst) {
                    while !has_ended.load(Ordering::SeqCst) {
                        thread::yield_now();
                    }
                    panic!("in a flag");
                }
                false
            };
            let watch = Watch {
                flags: &[&flag],
                ..Watch::default()
            };
            watch.during(prefill)
        });
        waiting(1);
        scope.spawn(move || done.send(prefill().is_ok()).unwrap());
        if is_done.recv_timeout(Duration::from_secs(60)) != Ok(true) {
            // The thread that waits would keep the test from ending.
            eprintln!("nobody leads");
            std::process::abort();
        }
        assert!(panics.join().is_err());
    });
    assert_eq!(model.blocks_used(), 0);
}

/// The child of a fork uses models that threads of its parent were using: it finds no lock that one of them held.
#[test]
fn a_forked_process_runs_the_model_that_threads_were_running() {
    let model = load("qwen35_tied");
    let run = |count| {
        let mut session = filled(&model, count);
        session.generate(&drawn(20), &mut go).unwrap().tokens
    };
    let (want, stop) = (run(9), AtomicBool::new(false));
    thread::scope(|scope| {
        for thread in 0..3 {
            let (run, stop) = (&run, &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    run(20 + thread);
                }
            });
        }
        let hung = (0..60).position(|_| {
            // SAFETY: the child runs the model and exits without running any of the parent's code.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                // SAFETY: as above. A child that waits for ever ends.
                unsafe {
                    libc::alarm(20);
                    libc::_exit(i32::from(run(9) != want));
                }
            }
            let mut status = -1;
            // SAFETY: the child of above, and a variable of this frame.
            unsafe { libc::waitpid(pid, &raw mut status, 0) };
            status != 0
        });
        stop.store(true, Ordering::Relaxed);
        assert_eq!(hung, None, "the first fork whose child failed");
    });
}
