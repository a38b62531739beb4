//! Programs of the runner: callers that wait, lead and hand on the lead.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use super::leased::Leased;
use super::pass::{NewTokens, Sequence};
use super::runner::Runner;
use super::times::PromptShare;
use crate::base::call::{Cancel, Watch};
use crate::base::lease::Lease;
use crate::base::sync::{self, Instant};
use crate::base::{ErrorKind, Result};
use crate::model::{Fault, Model, Output, Scratch};
use crate::schedule::{Timeouts, timeouts};
use crate::threads;

/// A model, and whoever runs it.
struct Served {
    model: Model,
    lease: Option<Arc<Lease>>,
    leased: Option<Leased>,
    runner: Runner,
}

impl Served {
    fn new(is_cuda: bool, pass_rows: usize) -> Arc<Served> {
        Arc::new(Served {
            model: Model::new(is_cuda, pass_rows, None),
            lease: None,
            leased: None,
            runner: Runner::default(),
        })
    }

    /// On a GPU whose prompts have a small share in passes.
    fn with_small_share(pass_rows: usize) -> Arc<Served> {
        let share = PromptShare {
            is_small: true,
            ..PromptShare::default()
        };
        Arc::new(Served {
            model: Model::new(true, pass_rows, None),
            lease: None,
            leased: None,
            runner: Runner::new(share),
        })
    }

    /// On a GPU that runs prompts beside steps, in parts of so many tokens: all, or if steps may be held up long ones.
    fn with_a_place_beside(is_small: bool, pass_rows: usize, part: usize) -> Arc<Served> {
        let share = PromptShare {
            is_small,
            beside: true,
            ..PromptShare::default()
        };
        Arc::new(Served {
            model: Model::with_rows_beside(true, pass_rows, None, Some(part)),
            lease: None,
            leased: None,
            runner: Runner::new(share),
        })
    }

    fn trained(pass_rows: usize) -> Arc<Served> {
        let lease = Lease::new();
        Arc::new(Served {
            model: Model::new(false, pass_rows, Some(lease.clone())),
            leased: Some(Leased::new(&lease)),
            lease: Some(lease),
            runner: Runner::default(),
        })
    }

    fn run(&self, sequence: &mut Sequence, count: usize, fault: Fault) -> Result<Output> {
        let epoch = || self.model.epoch();
        let work = vec![NewTokens {
            sequence,
            count,
            fault,
            epoch: &epoch,
        }];
        let model = (&self.model, self.leased.as_ref());
        let outputs = self
            .runner
            .run(model, work, true, &mut Scratch, &mut Vec::new());
        outputs?.pop().expect("an output")
    }

    /// Runs tokens that nothing disturbs.
    fn runs(&self, sequence: &mut Sequence, count: usize) {
        let before = sequence.len;
        self.run(sequence, count, Fault::None).unwrap();
        assert_eq!(sequence.len, before + count);
    }

    /// Asserts that nothing waits, and that a request still runs.
    fn is_idle(&self) {
        let work = self.runner.work();
        assert_eq!((work.waiting, work.generating), (0, 0));
        self.runs(&mut sequence(99), 1);
    }
}

fn sequence(id: u64) -> Sequence {
    Sequence {
        id,
        len: 0,
        epoch: 0,
    }
}

/// Callers run in each other's passes, and each leads until its own tokens have run.
pub fn callers_share_passes() {
    let served = Served::new(false, 16);
    threads![
        run_both(&served, 1, [40, 1]),
        run_both(&served, 2, [1, 20]),
        run_both(&served, 3, [1, 1])
    ];
    crate::all_were_woken();
    assert_eq!(served.model.rows.load(SeqCst), 64);
    served.is_idle();
}

/// A thread that runs so many tokens of a sequence, and then so many more.
fn run_both(served: &Arc<Served>, id: u64, counts: [usize; 2]) -> impl FnOnce() + use<> {
    let served = served.clone();
    move || {
        let mut own = sequence(id);
        counts
            .iter()
            .for_each(|count| served.runs(&mut own, *count));
    }
}

fn generate(served: &Arc<Served>, id: u64, steps: usize) -> impl FnOnce() + use<> {
    let served = served.clone();
    move || {
        let mut own = sequence(id);
        let generates = served.runner.generates(id);
        (0..steps).for_each(|_| served.runs(&mut own, 1));
        drop(generates);
    }
}

fn generators_wait_for_each_other(served: Arc<Served>) {
    let prompt = {
        let served = served.clone();
        move || served.runs(&mut sequence(3), 100)
    };
    threads![generate(&served, 1, 3), generate(&served, 2, 2), prompt];
    crate::all_were_woken();
    assert_eq!(served.model.rows.load(SeqCst), 105);
    served.is_idle();
}

/// A leader waits for sequences that generate until they come or end.
pub fn generators_share_steps() {
    generators_wait_for_each_other(Served::new(false, 64));
}

/// Where prompts and steps take turns, too.
pub fn generators_take_turns_with_prompts() {
    generators_wait_for_each_other(Served::new(true, 64));
}

/// Where a device runs ahead and prompts run beside steps, too.
pub fn generators_run_beside_small_parts() {
    generators_wait_for_each_other(Served::with_small_share(64));
}

/// Prompts run beside the steps of those that generate, one at a time, and to their ends when these have ended.
pub fn prompts_run_beside_steps() {
    for (served, long) in [
        (Served::with_a_place_beside(true, 64, 32), [70, 100]),
        (Served::with_a_place_beside(false, 1024, 1500), [3000, 2200]),
    ] {
        generators_wait_for_each_other(served.clone());
        let rows = served.model.rows.swap(0, SeqCst);
        threads![
            generate(&served, 1, 4),
            run_both(&served, 2, [long[0], 20]),
            run_both(&served, 3, [long[1], 1])
        ];
        crate::all_were_woken();
        let ran = served.model.rows.load(SeqCst);
        assert_eq!((rows, ran), (106, long[0] + long[1] + 25));
        served.is_idle();
    }
}

/// A prompt runs beside steps in advance, unless another one runs there.
pub fn the_place_beside_steps_is_prepared() {
    let served = Served::with_a_place_beside(false, 1024, 1500);
    let prepares = {
        let served = served.clone();
        move || {
            let (mut own, epoch) = (sequence(9), || 0);
            let generating = served.runner.generates(9);
            let work = NewTokens {
                sequence: &mut own,
                count: 1500,
                fault: Fault::None,
                epoch: &epoch,
            };
            served.runner.run_first_beside(&served.model, work).unwrap();
            drop(generating);
            assert!([0, 1500].contains(&own.len));
        }
    };
    threads![
        generate(&served, 1, 4),
        run_both(&served, 2, [3000, 20]),
        prepares
    ];
    crate::all_were_woken();
    let ran = served.model.rows.load(SeqCst);
    assert!([3024, 4524].contains(&ran), "{ran}");
    served.is_idle();
}

/// A prompt beside steps that is cancelled, fails or panics ends no other.
pub fn prompts_beside_steps_end_alone() {
    for fault in [Fault::Slot, Fault::Pass, Fault::Panic] {
        let served = Served::with_a_place_beside(true, 64, 32);
        let cancel = Cancel::new();
        let fails = {
            let served = served.clone();
            move || {
                let mut own = sequence(2);
                let run = || served.run(&mut own, 40, fault);
                let failed = catch_unwind(AssertUnwindSafe(run));
                assert!(!matches!(failed, Ok(Ok(_))), "a planned fault");
            }
        };
        let cancelled = {
            let (served, cancel) = (served.clone(), cancel.clone());
            move || {
                let mut own = sequence(3);
                let run = || cancel.watching(|| served.run(&mut own, 100, Fault::None));
                // The planned fault of a pass concerns all in it.
                if let Ok(Ok(_)) = catch_unwind(AssertUnwindSafe(run)) {
                    assert_eq!(own.len, 100);
                }
            }
        };
        let generates = {
            let served = served.clone();
            move || {
                let generates = served.runner.generates(1);
                for _ in 0..3 {
                    let mut own = sequence(1);
                    let run = || served.run(&mut own, 1, Fault::None);
                    let _ = catch_unwind(AssertUnwindSafe(run));
                }
                drop(generates);
            }
        };
        let cancels = move || cancel.cancel();
        threads![generates, fails, cancelled, cancels];
        served.is_idle();
    }
}

/// A cancelled caller ends, whether it waits or leads, and the others go on.
pub fn callers_are_cancelled() {
    let served = Served::new(false, 16);
    let cancel = Cancel::new();
    let cancelled = |id: u64| {
        let (served, cancel) = (served.clone(), cancel.clone());
        move || {
            let mut own = sequence(id);
            match cancel.watching(|| served.run(&mut own, 40, Fault::None)) {
                Ok(_) => assert_eq!(own.len, 40),
                Err(e) => {
                    assert_eq!((e.kind(), own.len), (ErrorKind::Cancelled, 0));
                    assert!(cancel.is_set());
                }
            }
        }
    };
    let other = {
        let served = served.clone();
        move || {
            let mut own = sequence(3);
            served.runs(&mut own, 20);
            served.runs(&mut own, 1);
        }
    };
    let cancels = {
        let cancel = cancel.clone();
        move || cancel.cancel()
    };
    threads![cancelled(1), cancelled(2), other, cancels];
    served.is_idle();
}

/// A late caller ends while its leader waits for a step of the trainer, at the leader's next look.
pub fn callers_end_while_leaders_wait() {
    let served = Served::trained(16);
    let change = served.lease.as_ref().unwrap().change(|| false).unwrap();
    let start = Instant::now();
    let late = {
        let served = served.clone();
        move || {
            let watch = Watch {
                deadline: Some(start + Duration::from_millis(5)),
                ..Watch::default()
            };
            let ended = watch.during(|| served.run(&mut sequence(1), 1, Fault::None));
            assert_eq!(ended.unwrap_err().kind(), ErrorKind::Cancelled);
            // Caller and leader look every ten milliseconds.
            let waited = start.elapsed();
            assert!(
                timeouts() == Timeouts::Early || waited <= Duration::from_millis(20),
                "{waited:?}"
            );
        }
    };
    let late = shuttle::thread::spawn(late);
    let other = {
        let served = served.clone();
        move || served.runs(&mut sequence(2), 1)
    };
    let other = shuttle::thread::spawn(other);
    late.join().unwrap();
    drop(change);
    other.join().unwrap();
    served.is_idle();
}

/// A pass that panics takes its leader with it, and those that ran in it fail; the others go on.
pub fn leaders_panic() {
    let served = Served::new(false, 16);
    let panics = {
        let served = served.clone();
        move || {
            let mut own = sequence(1);
            let run = || served.run(&mut own, 1, Fault::Panic);
            match catch_unwind(AssertUnwindSafe(run)) {
                // Another caller led.
                Ok(failed) => assert_eq!(failed.unwrap_err().kind(), ErrorKind::Internal),
                Err(panic) => assert_eq!(panic.downcast_ref(), Some(&"planned")),
            }
        }
    };
    let other = |id: u64| {
        let served = served.clone();
        move || {
            let mut fails = 0;
            for _ in 0..2 {
                let mut own = sequence(id);
                let run = || served.run(&mut own, 20, Fault::None);
                match catch_unwind(AssertUnwindSafe(run)) {
                    Ok(Ok(_)) => assert_eq!(own.len, 20),
                    Ok(Err(e)) => {
                        assert_eq!((e.kind(), own.len), (ErrorKind::Internal, 0));
                        fails += 1;
                    }
                    Err(panic) => {
                        assert_eq!(panic.downcast_ref(), Some(&"planned"));
                        fails += 1;
                    }
                }
            }
            assert!(fails <= 1, "one pass panics");
        }
    };
    threads![panics, other(2), other(3)];
    crate::all_were_woken();
    served.is_idle();
}

/// Faults of a slot and of a pass end the requests that they concern.
pub fn passes_fail() {
    let served = Served::new(false, 16);
    let fails = |id: u64, fault: Fault, kind: ErrorKind| {
        let served = served.clone();
        move || {
            let mut own = sequence(id);
            let e = served.run(&mut own, 1, fault).unwrap_err();
            assert!(
                e.kind() == kind || e.kind() == ErrorKind::OutOfMemory,
                "{e}"
            );
            assert_eq!(own.len, 0);
        }
    };
    let other = {
        let served = served.clone();
        move || {
            let mut own = sequence(3);
            let ends = [20, 1].map(|count| served.run(&mut own, count, Fault::None));
            let failed: Vec<_> = ends.into_iter().filter_map(Result::err).collect();
            assert!(failed.len() <= 1, "one pass fails");
            assert!(failed.iter().all(|e| e.kind() == ErrorKind::OutOfMemory));
        }
    };
    threads![
        fails(1, Fault::Slot, ErrorKind::InvalidArgument),
        fails(2, Fault::Pass, ErrorKind::OutOfMemory),
        other,
    ];
    crate::all_were_woken();
    served.is_idle();
}

/// Steps of a trainer come between passes, after which tokens run again, and every prompt comes to its end.
pub fn trainers_step_between_passes() {
    let served = Served::trained(16);
    let trainer = {
        let served = served.clone();
        move || {
            for _ in 0..3 {
                let change = served.lease.as_ref().unwrap().change(|| false).unwrap();
                sync::switch();
                change.changed();
                served.leased.as_ref().unwrap().renewed(&change);
            }
        }
    };
    let caller = |id: u64, counts: [usize; 2]| {
        let served = served.clone();
        move || {
            let mut own = sequence(id);
            counts
                .iter()
                .for_each(|count| served.runs(&mut own, *count));
        }
    };
    threads![trainer, caller(1, [40, 1]), caller(2, [1, 1])];
    crate::all_were_woken();
    served.is_idle();
}

/// Generations that find no memory make way for each other until all have ended, and wait for memory that is freed right after an end.
pub fn generations_make_way() {
    let served = Served::new(false, 16);
    // Two of the three that want two blocks each.
    let free = Arc::new(AtomicUsize::new(3));
    let generation = |id: u64| {
        let (served, free) = (served.clone(), free.clone());
        move || {
            let generates = served.runner.generates(id);
            let mut own = sequence(id);
            let take = || {
                free.fetch_update(SeqCst, SeqCst, |free| free.checked_sub(1))
                    .is_ok()
            };
            let (mut blocks, mut wanted) = (0, 1);
            while wanted <= 2 {
                if take() {
                    blocks += 1;
                    if blocks == wanted {
                        served.runs(&mut own, 1);
                        wanted += 1;
                    }
                    continue;
                }
                free.fetch_add(std::mem::take(&mut blocks), SeqCst);
                let fits = || free.load(SeqCst) >= wanted;
                let there_is = served.runner.may_get_room(id)
                    && served.runner.wait_for_room(id, fits).unwrap();
                // A thread may be slower than is waited for.
                assert!(
                    there_is || timeouts() == Timeouts::Early,
                    "no memory, and nobody generates"
                );
            }
            drop(generates);
            free.fetch_add(blocks, SeqCst);
        }
    };
    threads![generation(1), generation(2), generation(3)];
    assert_eq!(free.load(SeqCst), 3);
    crate::all_were_woken();
    served.is_idle();
}
