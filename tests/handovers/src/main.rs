//! The library's hand-overs between threads under random schedules: [NAME [SEED]].
//!
//! The files of the library stand here as they are, on a `base/sync.rs` whose threads shuttle schedules and whose clock is the program's own.
//! Everything else that they call is a stand-in that does no more than they need. Each program runs under random schedules and under those of PCT,
//! with timeouts that come late and early. It fails if threads wait for each other, and if what it asserts is wrong.

// Programs use a part of what the library's files offer.
#![allow(dead_code, unused_imports)]

mod base;
mod engine;
mod model;
mod schedule;
mod session;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

use schedule::{Timed, Timeouts, set_timeouts, timeouts};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};

/// Runs closures, each on a thread of its own, and waits for them.
#[macro_export]
macro_rules! threads {
    ($($body:expr),+ $(,)?) => {
        let threads = vec![$(shuttle::thread::spawn($body)),+];
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    };
}

/// Asserts that no thread has slept until a timeout when it could have been woken.
pub fn all_were_woken() {
    let slept = base::sync::slept();
    assert!(
        timeouts() == Timeouts::Early || slept.is_zero(),
        "all slept for {slept:?}"
    );
}

type Program = (&'static str, fn());

macro_rules! programs {
    ($($room:ident: $($name:ident),+;)+) => {
        &[$($((stringify!($name), $room::programs::$name)),+),+]
    };
}

const PROGRAMS: &[Program] = programs! {
    base: lease_excludes, lease_is_fair, lease_is_given_up, turns_exclude, turns_pass_on, turns_are_given_up, wake_ups_are_kept;
    engine: callers_share_passes, generators_share_steps, generators_take_turns_with_prompts, generators_run_beside_small_parts,
        prompts_run_beside_steps, the_place_beside_steps_is_prepared, prompts_beside_steps_end_alone,
        callers_are_cancelled, callers_end_while_leaders_wait, leaders_panic, passes_fail, trainers_step_between_passes, generations_make_way;
    session: forks_are_made_between_steps, forks_are_given_up, forks_are_taken_during_the_next_step, forks_are_refused_by_long_steps,
        queues_tell_everything, queues_let_threads_end, queues_cancel, queues_cancel_those_that_are_full,
        queues_run_as_many_as_they_may, queues_keep_deadlines, queues_serve_two_hosts, queues_close, queues_outlive_panics;
};

/// Random schedules of a program, half of them with early timeouts; and those of PCT.
const RANDOM: usize = 10_000;
const PCT: usize = 1_000;
/// Changes of priority in a schedule of PCT, and one.
const DEPTH: usize = 3;
/// Steps of a program that never ends.
const MOST_STEPS: usize = 100_000;
/// For the bytes of a panic's message, beside a program's frames.
const STACK: usize = 128 << 10;

fn config() -> Config {
    let mut config = Config::new();
    config.stack_size = STACK;
    config.failure_persistence = FailurePersistence::None;
    config.max_steps = MaxSteps::FailAfter(MOST_STEPS);
    config.silence_warnings = true;
    config
}

/// Runs a program under all of its schedules.
fn try_out(program: fn(), seed: u64, times: usize) {
    let run = move || {
        base::sync::run(program);
        session::programs::nothing_is_held();
    };
    for timeouts in [Timeouts::Late, Timeouts::Early] {
        set_timeouts(timeouts);
        let random = RandomScheduler::new_from_seed(seed, RANDOM * times / 2);
        Runner::new(Timed::new(random, timeouts), config()).run(run);
        let pct = PctScheduler::new_from_seed(seed, DEPTH, PCT * times / 2);
        Runner::new(Timed::new(pct, timeouts), config()).run(run);
    }
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let wanted = arguments.next();
    let seed = arguments
        .next()
        .map_or(1, |seed| seed.parse().expect("a seed is a number"));
    let times = if std::env::var_os("NVFP4_LONG").is_some() {
        10
    } else {
        1
    };
    let (mut passed, mut failed) = (0, 0);
    for (name, program) in PROGRAMS {
        if wanted.as_ref().is_some_and(|wanted| wanted != name) {
            continue;
        }
        let begun = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| try_out(*program, seed, times)));
        let seconds = begun.elapsed().as_secs_f64();
        match result {
            Ok(()) => {
                passed += 1;
                println!("ok      {name} ({seconds:.1} s)");
            }
            Err(_) => {
                failed += 1;
                println!(
                    "FAILED  {name}, timeouts {:?}; those after it did not run",
                    timeouts()
                );
                // A failed execution leaves state behind that may fail others.
                break;
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    match (passed, failed) {
        (1.., 0) => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}
