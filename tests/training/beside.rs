//! Sessions on weights that a trainer steps meanwhile: they go on as new ones with the same tokens would, whatever comes between what.

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use NVFP4::base::call::{Cancel, Progress};
use NVFP4::format::random::bits;
use NVFP4::session::{Finish, GenerateOptions, Piece, SamplingOptions, Session, SessionOptions};
use NVFP4::train::Phase;

use super::*;

/// Full attention, windows, projections that files store in one matrix, biases, experts, and recurrent layers.
const CASES: [&str; 6] = [
    "qwen3_tied",
    "gemma3_wide",
    "phi3_partial",
    "llama_biased",
    "qwen3moe_mixed",
    "qwen3next_shared",
];

/// A trainer that has taken a step, and its model.
struct Beside {
    source: Source,
    trainer: Trainer,
    model: Arc<Served>,
    batch: Documents,
}

impl Beside {
    fn new(name: &str) -> Beside {
        Beside::of(&golden("model").join(name), name)
    }

    fn of(path: &Path, name: &str) -> Beside {
        let device = Device::cpu(Some(2)).unwrap();
        let source = Source::open(path).unwrap();
        let recipe = match name {
            "llama_biased" => Recipe::float32(),
            _ => Recipe::default(),
        };
        let mut trainer = Trainer::new(&device, &source, &config(recipe, 100)).unwrap();
        let batch = Documents::within(5, &[12], source.spec().vocab_size as u32);
        trainer.step(&[batch.batch()]).unwrap();
        let model = trainer.model(&source).unwrap();
        Beside {
            source,
            trainer,
            model,
            batch,
        }
    }

    fn step(&mut self) {
        let before = self.model.fingerprint();
        self.trainer.step(&[self.batch.batch()]).unwrap();
        assert_ne!(before, self.model.fingerprint());
    }

    /// Tokens of a text.
    fn text(&self, seed: u64, len: usize) -> Vec<u32> {
        grammar(seed, len, self.source.spec().vocab_size as u32)
    }
}

fn session(model: &Arc<Served>) -> Session {
    Session::new(model.clone(), &SessionOptions::default()).unwrap()
}

fn with(model: &Arc<Served>, tokens: &[u32]) -> Session {
    let mut session = session(model);
    session.prefill(tokens).unwrap();
    session
}

/// A new session that is given the tokens, and begins with no block of others.
fn fresh(model: &Arc<Served>, tokens: &[u32]) -> Session {
    let options = SessionOptions {
        private: true,
        ..SessionOptions::default()
    };
    let mut session = Session::new(model.clone(), &options).unwrap();
    session.prefill(tokens).unwrap();
    session
}

fn logits(session: &mut Session) -> Vec<u32> {
    let logits = session.logits().unwrap();
    logits.iter().map(|x| x.to_bits()).collect()
}

/// The logits of a session, which are those of a new one with its tokens.
fn as_fresh(session: &mut Session, case: &str) -> Vec<u32> {
    let found = logits(session);
    let mut fresh = fresh(session.model(), session.tokens());
    assert!(found == logits(&mut fresh), "{case}");
    found
}

fn greedy(tokens: usize) -> GenerateOptions {
    GenerateOptions {
        max_tokens: tokens,
        ignore_model_stops: true,
        ..GenerateOptions::default()
    }
}

fn go(_: Piece<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn sessions_go_on_with_the_weights_after_a_step() {
    for case in CASES {
        let mut beside = Beside::new(case);
        let prompt = beside.text(1, 40);
        let mut a = with(&beside.model, &prompt);
        let before = logits(&mut a);
        let mut forked = a.fork().unwrap();
        let mut unasked = a.fork().unwrap();
        a.generate(&greedy(5), &mut go).unwrap();

        beside.step();
        // Logits that were known are of no use.
        assert_ne!(as_fresh(&mut forked, case), before, "{case}");
        assert_eq!(as_fresh(&mut a, case).len(), before.len());
        assert_eq!((a.len(), a.tokens()[..40] == prompt), (45, true));

        // The first call after a step may be any.
        beside.step();
        let (mut cut, mut generates) = (a.fork().unwrap(), a.fork().unwrap());
        cut.truncate(33).unwrap();
        as_fresh(&mut cut, case);
        a.decode(7).unwrap();
        as_fresh(&mut a, case);
        let options = [&SamplingOptions::GREEDY; 2];
        let sessions = &mut [&mut forked, &mut unasked];
        let chosen = NVFP4::session::step_choose(sessions, &[8, 9], &options, false).unwrap();
        for (session, &token) in [&mut forked, &mut unasked].into_iter().zip(&chosen) {
            let mut fresh = fresh(&beside.model, session.tokens());
            assert_eq!(fresh.argmax().unwrap(), token, "{case}");
        }
        beside.step();
        let mut same = fresh(&beside.model, generates.tokens());
        let [one, other] =
            [&mut generates, &mut same].map(|s| s.generate(&greedy(6), &mut go).unwrap().tokens);
        assert_eq!(one, other, "{case}");

        // Nothing is left behind.
        assert!(beside.model.statistics().recomputed_tokens > 100, "{case}");
        drop((a, forked, unasked, cut, generates, same));
        assert_eq!(beside.model.blocks_used(), 0, "{case}");
    }
}

/// All rows of logits of tokens after those that older weights ran, in a request with another sequence.
#[test]
fn requests_for_all_logits_run_older_tokens_first() {
    use NVFP4::engine::NewTokens;
    use NVFP4::model::{Output, Wanted};

    let mut beside = Beside::new("qwen3_tied");
    let text = beside.text(2, 40);
    let model = beside.model.clone();
    let sequence = |tokens: &[u32]| {
        let mut sequence = model.sequence(64, KvType::F32).unwrap();
        let (mut scratch, mut out) = (Scratch::new(), Vec::new());
        let run = model.forward(tokens, &mut sequence, &mut scratch, Logits::None, &mut out);
        run.unwrap();
        sequence
    };
    let mut old = [sequence(&text[..30]), sequence(&text[..20])];
    beside.step();
    assert!(old.iter().all(|old| old.is_outdated()));
    let [a, b] = &mut old;
    let work = [
        (a, &text[30..], Wanted::All),
        (b, &text[20..21], Wanted::Last),
    ];
    let work = work.map(|(sequence, tokens, wanted)| NewTokens {
        tokens,
        sequence,
        wanted,
    });
    let (mut scratch, mut out) = (Scratch::new(), Vec::new());
    let outputs = model
        .run(work.into(), false, &mut scratch, &mut out)
        .unwrap();
    assert_eq!([old[0].len(), old[1].len()], [40, 21]);
    let whole = logits_of(&model, &text).unwrap();
    let width = beside.source.spec().vocab_size;
    for (output, rows) in outputs.into_iter().zip([30..40, 20..21]) {
        let Output::Logits(found) = output.unwrap() else {
            panic!("no logits");
        };
        let found = &out[found.start * width..found.end * width];
        assert!(found == &whole[rows.start * width..rows.end * width]);
    }
}

#[test]
fn no_prefix_of_older_weights_is_found() {
    for case in ["qwen3_tied", "gemma3_wide", "qwen35_tied"] {
        let mut beside = Beside::new(case);
        let text = beside.text(3, 100);
        let found = |beside: &Beside| beside.model.statistics().prompt_tokens_found;
        let mut old = with(&beside.model, &text[..96]);
        with(&beside.model, &text);
        assert_eq!(found(&beside), 96, "{case}");
        beside.step();
        let mut new = with(&beside.model, &text[..96]);
        assert_eq!(found(&beside), 96, "{case}");
        as_fresh(&mut new, case);
        // The older session finds what the newer one has run.
        old.prefill(&text[96..]).unwrap();
        assert_eq!(found(&beside), 2 * 96, "{case}");
        as_fresh(&mut old, case);
        drop((old, new));
        assert_eq!(beside.model.blocks_used(), 0, "{case}");
    }
}

/// Each token of a generation whose callback takes steps is that of the weights at its time.
#[test]
fn a_callback_between_passes_takes_a_step() {
    let beside = Beside::new("qwen3_tied");
    let (prompt, model) = (beside.text(4, 20), beside.model.clone());
    let beside = RefCell::new(beside);
    let mut generating = with(&model, &prompt);
    let mut tokens = prompt.clone();
    let mut expected = fresh(&model, &tokens).argmax().unwrap();
    let mut on_piece = |piece: Piece<'_>| {
        if let Some(token) = piece.token {
            assert_eq!(token, expected);
            tokens.push(token);
            beside.borrow_mut().step();
            expected = fresh(&model, &tokens).argmax().unwrap();
        }
        ControlFlow::Continue(())
    };
    let made = generating.generate(&greedy(12), &mut on_piece).unwrap();
    assert_eq!((made.tokens.len(), generating.tokens()), (12, &tokens[..]));
    as_fresh(&mut generating, "after 12 steps");
}

/// Within a pass there is no step, and within a step no pass: the thread would wait for itself.
#[test]
fn a_callback_within_a_pass_or_a_step_is_refused() {
    let beside = RefCell::new(Beside::new("qwen3_tied"));
    let (prompt, model) = (beside.borrow().text(5, 20), beside.borrow().model.clone());
    let refused = RefCell::new(Vec::new());
    let progress = |_: Progress| {
        let beside = &mut *beside.borrow_mut();
        let step = beside.trainer.step(&[beside.batch.batch()]);
        refused.borrow_mut().push(step.map(drop).unwrap_err());
        ControlFlow::Continue(())
    };
    let watch = Watch {
        progress: Some(&progress),
        ..Watch::default()
    };
    let mut session = watch.during(|| with(&model, &prompt));
    let steps = || beside.borrow().trainer.steps();
    assert_eq!((refused.borrow().is_empty(), steps()), (false, 1));
    let mut runs = |_: Phase| {
        let busy = session.decode(3).unwrap_err();
        assert!(busy.message().contains("being trained"), "{busy}");
        refused.borrow_mut().push(busy);
    };
    let owned = &mut *beside.borrow_mut();
    owned
        .trainer
        .step_watched(&[owned.batch.batch()], &mut |phase| match phase {
            // Then it is over.
            Phase::OptimizerStepDone => {}
            phase => runs(phase),
        })
        .unwrap();
    let kinds = refused.borrow();
    assert!(kinds.len() > 3 && kinds.iter().all(|e| e.kind() == ErrorKind::Busy));
    as_fresh(&mut session, "after refusals");
}

/// A callback that blocks, a call that is cancelled and one whose deadline passes while a step runs, and a step that is cancelled while a pass
/// runs.
#[test]
fn who_waits_can_be_cancelled() {
    let Beside {
        mut trainer,
        model,
        batch,
        ..
    } = Beside::new("qwen3_tied");
    let text = grammar(6, 20, 320);
    let (stops, stopped) = mpsc::channel::<()>();
    let (goes, going) = mpsc::channel::<()>();
    let (begins, begun) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let (model, text, batch) = (&model, &text, &batch);
        // Its callback blocks, which no step waits for.
        let blocked = scope.spawn(move || {
            let mut session = with(model, text);
            let mut is_first = true;
            let made = session.generate(&greedy(3), &mut |_| {
                if std::mem::take(&mut is_first) {
                    begins.send(()).unwrap();
                    going.recv().unwrap();
                }
                ControlFlow::Continue(())
            });
            as_fresh(&mut session, "blocked");
            made.unwrap().finish
        });
        begun.recv().unwrap();
        let (step_begins, step_begun) = mpsc::channel::<()>();
        let stepping = scope.spawn(move || {
            let mut watch = |phase: Phase| {
                if phase == Phase::BatchReady {
                    step_begins.send(()).unwrap();
                    stopped.recv().unwrap();
                }
            };
            trainer.step_watched(&[batch.batch()], &mut watch).unwrap();
            trainer
        });
        step_begun.recv().unwrap();
        // One of them leads, and both wait for the step.
        let cancel = Cancel::new();
        let waits = [0, 1].map(|_| {
            let cancel = cancel.clone();
            scope.spawn(move || {
                let mut session = session(model);
                let run = || session.generate_after(text, &greedy(2), &mut go).unwrap();
                let finish = cancel.watching(run).finish;
                (finish, session.len())
            })
        });
        let late = scope.spawn(move || {
            let watch = Watch {
                deadline: Some(Instant::now() + Duration::from_millis(30)),
                ..Watch::default()
            };
            let mut session = session(model);
            let made = watch.during(|| session.generate_after(text, &greedy(2), &mut go));
            made.unwrap().finish
        });
        let waiting = scope.spawn(move || with(model, text).len());
        assert_eq!(late.join().unwrap(), Finish::Deadline);
        while model.statistics().waiting < 3 {
            thread::yield_now();
        }
        cancel.cancel();
        for waits in waits {
            assert_eq!(waits.join().unwrap(), (Finish::Cancelled, 0));
        }
        stops.send(()).unwrap();
        let mut trainer = stepping.join().unwrap();
        assert_eq!(waiting.join().unwrap(), 20);
        goes.send(()).unwrap();
        assert_eq!(blocked.join().unwrap(), Finish::Length);

        let held = model.hold().unwrap();
        let cancel = Cancel::new();
        let steps = scope.spawn({
            let cancel = cancel.clone();
            move || {
                let step = cancel.watching(|| trainer.step(&[batch.batch()]));
                (step.unwrap_err().kind(), trainer.steps())
            }
        });
        cancel.cancel();
        assert_eq!(steps.join().unwrap(), (ErrorKind::Cancelled, 2));
        drop(held);
    });
    assert_eq!(model.blocks_used(), 0);
}

/// One thread steps while others generate, decode, fork and cut: at its end each session is as a new one, and neither side starves.
#[test]
fn threads_that_run_while_steps_come_end_as_new_sessions_do() {
    for (case, steps) in [("qwen3_tied", 50), ("qwen35_tied", 15)] {
        let mut beside = Beside::new(case);
        let (model, over) = (beside.model.clone(), AtomicBool::new(false));
        let texts: Vec<Vec<u32>> = (0..3).map(|i| beside.text(i, 60)).collect();
        let runs = [0; 3].map(AtomicU64::new);
        thread::scope(|scope| {
            let threads = texts
                .iter()
                .zip(&runs)
                .enumerate()
                .map(|(thread, (text, runs))| {
                    let (model, over) = (&model, &over);
                    scope.spawn(move || {
                        let mut sessions = vec![with(model, &text[..20])];
                        for round in 0.. {
                            if over.load(Ordering::Relaxed) {
                                break;
                            }
                            let drawn = bits(thread as u64, round) as usize;
                            let index = drawn % sessions.len();
                            let session = &mut sessions[index];
                            match (drawn >> 8) % 6 {
                                0 | 1 if session.len() < 100 => {
                                    let made = session.generate(&greedy(4), &mut go).unwrap();
                                    assert_eq!(made.tokens.len(), 4);
                                }
                                2 => session.truncate(session.len() / 2 + 5).unwrap(),
                                3 => {
                                    let fork = session.fork().unwrap();
                                    sessions.truncate(2);
                                    sessions.push(fork);
                                }
                                4 if session.len() < 100 => session.prefill(&text[20..35]).unwrap(),
                                _ => {
                                    let weights = model.fingerprint();
                                    let found = logits(session);
                                    let expected = logits(&mut fresh(model, session.tokens()));
                                    if weights == model.fingerprint() {
                                        assert!(found == expected, "{case}");
                                    }
                                }
                            }
                            runs.fetch_add(1, Ordering::Relaxed);
                        }
                        sessions
                    })
                });
            let threads: Vec<_> = threads.collect();
            for step in 0..steps {
                beside.step();
                if step % 5 == 0 {
                    thread::sleep(Duration::from_millis(bits(9, step) % 30));
                }
            }
            let during = runs.each_ref().map(|runs| runs.load(Ordering::Relaxed));
            over.store(true, Ordering::Relaxed);
            // The threads have gone on between steps: a generation takes five passes or so.
            assert!(
                during.iter().all(|runs| *runs >= steps / 10),
                "{case}: {during:?}"
            );
            for thread in threads {
                for mut session in thread.join().unwrap() {
                    as_fresh(&mut session, case);
                }
            }
        });
        assert!(model.statistics().recomputed_tokens > 0);
        assert_eq!(model.blocks_used(), 0, "{case}");
    }
}

/// A prompt of several passes comes to its end though a step follows each of the first.
#[test]
fn steps_that_follow_each_other_do_not_starve_a_long_prompt() {
    let folder = Folder::new();
    for file in std::fs::read_dir(golden("model/qwen3_tied")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), folder.0.join(file.file_name())).unwrap();
    }
    let config = folder.0.join("config.json");
    let longer = std::fs::read_to_string(&config).unwrap();
    let longer = longer.replace("embeddings\": 256", "embeddings\": 4096");
    std::fs::write(&config, longer).unwrap();
    let mut beside = Beside::of(&folder.0, "qwen3_tied");
    let (model, text) = (beside.model.clone(), beside.text(9, 1200));
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let runs = scope.spawn(|| {
            let mut session = with(&model, &text);
            session.decode(5).unwrap();
            over.store(true, Ordering::Relaxed);
            session
        });
        let mut steps = 0;
        while !over.load(Ordering::Relaxed) {
            beside.step();
            steps += 1;
            assert!(steps < 1000, "the prompt has not come to its end");
        }
        as_fresh(&mut runs.join().unwrap(), "after steps");
    });
}

#[test]
fn files_are_of_the_weights_that_computed_them() {
    let folder = Folder::new();
    let place = |name: &str| folder.0.join(name);
    for case in ["qwen3_tied", "qwen35_tied"] {
        let mut beside = Beside::new(case);
        let mut session = with(&beside.model, &beside.text(7, 40));
        logits(&mut session);
        session.save(&place("before")).unwrap();
        let mut restored = Session::restore(beside.model.clone(), &place("before")).unwrap();
        assert_eq!(as_fresh(&mut restored, case), logits(&mut session));
        beside.step();
        let refused = Session::restore(beside.model.clone(), &place("before")).unwrap_err();
        assert!(refused.message().contains("another model"), "{refused}");
        // A session with what older weights computed is saved without that.
        session.save(&place("after")).unwrap();
        let sizes = ["before", "after"].map(|name| std::fs::metadata(place(name)).unwrap().len());
        assert!(sizes[1] < sizes[0] / 2, "{sizes:?}");
        let mut restored = Session::restore(beside.model.clone(), &place("after")).unwrap();
        assert_eq!(restored.tokens(), session.tokens());
        assert_eq!(as_fresh(&mut restored, case), as_fresh(&mut session, case));
    }
}

#[test]
fn the_model_outlives_its_trainer() {
    let mut beside = Beside::new("phi3_partial");
    let mut session = with(&beside.model, &beside.text(8, 20));
    beside.step();
    let Beside { trainer, model, .. } = beside;
    drop(trainer);
    as_fresh(&mut session, "without its trainer");
    session.generate(&greedy(4), &mut go).unwrap();
    drop(session);
    assert_eq!(model.blocks_used(), 0);
}
