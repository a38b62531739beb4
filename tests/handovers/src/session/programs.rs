//! Programs of forks between steps, and of the completion queue.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use super::forks::{Forked, Forks};
use super::queue::{Happened, Queue, QueueCounts, QueueOptions, Submission, Work};
use super::{Finish, Part, Piece};
use crate::base::call::{self, Cancel};
use crate::base::sync::{Instant, atomic, sleep, slept, switch};
use crate::base::turns::Waiter;
use crate::base::{ErrorKind, Result};
use crate::schedule::{Timeouts, timeouts};
use crate::threads;

const MS: Duration = Duration::from_millis(1);

/// A session, which counts those that live.
struct Session {
    step: u32,
    live: Arc<AtomicI64>,
}

impl Session {
    fn new(step: u32, live: &Arc<AtomicI64>) -> Session {
        live.fetch_add(1, SeqCst);
        Session {
            step,
            live: live.clone(),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.live.fetch_sub(1, SeqCst);
    }
}

impl Forked for Session {
    fn fork(&self) -> Result<Session> {
        Ok(Session::new(self.step, &self.live))
    }
}

/// A generation of three steps, whose session changes between them.
fn generation(forks: &Arc<Forks<Session>>, live: &Arc<AtomicI64>) -> impl FnOnce() + use<> {
    let (forks, mut session) = (forks.clone(), Session::new(0, live));
    move || {
        let generates = forks.begin();
        for _ in 0..3 {
            let stands = forks.stand(&session);
            // A callback, in which the session stands still.
            switch();
            drop(stands);
            switch();
            session.step += 1;
        }
        drop(generates);
    }
}

/// Each caller gets a fork of a session that stands still, or hears that the generation has ended.
pub fn forks_are_made_between_steps() {
    let (forks, live) = (Arc::new(Forks::default()), Arc::default());
    let taken = Arc::new(atomic::AtomicUsize::new(0));
    let forker = || {
        let (forks, taken): (Arc<Forks<Session>>, _) = (forks.clone(), taken.clone());
        move || {
            let mut last = 0;
            for _ in 0..2 {
                if let Some(fork) = forks.fork().unwrap() {
                    assert!(fork.step >= last && fork.step < 3);
                    last = fork.step;
                    taken.fetch_add(1, SeqCst);
                }
            }
        }
    };
    threads![generation(&forks, &live), forker(), forker(), forker()];
    crate::all_were_woken();
    assert!(forks.fork().unwrap().is_none());
    assert_eq!(live.load(SeqCst), 0, "forks that nobody has");
}

/// A caller that gives up leaves no fork behind, and takes none of another's.
pub fn forks_are_given_up() {
    let (forks, live) = (Arc::new(Forks::default()), Arc::default());
    let cancel = Cancel::new();
    let forker = |cancel: Option<Cancel>| {
        let forks: Arc<Forks<Session>> = forks.clone();
        move || {
            let Some(cancel) = cancel else {
                drop(forks.fork().unwrap());
                return;
            };
            match cancel.watching(|| forks.fork()) {
                Ok(fork) => drop(fork),
                Err(e) => {
                    assert_eq!(e.kind(), ErrorKind::Cancelled);
                    assert!(cancel.is_set());
                }
            }
        }
    };
    let cancels = {
        let cancel = cancel.clone();
        move || cancel.cancel()
    };
    threads![
        generation(&forks, &live),
        forker(Some(cancel)),
        forker(None),
        cancels
    ];
    crate::all_were_woken();
    assert_eq!(live.load(SeqCst), 0, "forks that nobody has");
}

/// A caller that waits for a fork has it when the step ends, while the next one runs.
pub fn forks_are_taken_during_the_next_step() {
    let (forks, live) = (Arc::new(Forks::default()), Arc::new(AtomicI64::new(0)));
    let forker = || {
        let forks: Arc<Forks<Session>> = forks.clone();
        move || {
            let start = Instant::now();
            drop(forks.fork().unwrap());
            let waited = start.elapsed();
            assert!(timeouts() == Timeouts::Early || waited <= MS, "{waited:?}");
        }
    };
    let generation = {
        let (forks, session) = (forks.clone(), Session::new(0, &live));
        move || {
            let generates = forks.begin();
            for _ in 0..5 {
                drop(forks.stand(&session));
                sleep(MS);
            }
            drop(generates);
        }
    };
    threads![generation, forker(), forker()];
    assert_eq!(live.load(SeqCst), 0, "forks that nobody has");
}

/// A caller that waits for a fork learns at once that the next token takes long.
pub fn forks_are_refused_by_long_steps() {
    let (forks, live) = (Arc::new(Forks::default()), Arc::new(AtomicI64::new(0)));
    let forker = || {
        let forks: Arc<Forks<Session>> = forks.clone();
        move || {
            let start = Instant::now();
            if let Err(e) = forks.fork() {
                assert_eq!(e.kind(), ErrorKind::Busy);
            }
            let waited = start.elapsed();
            assert!(
                timeouts() == Timeouts::Early || waited.is_zero(),
                "{waited:?}"
            );
        }
    };
    let generation = {
        let (forks, session) = (forks.clone(), Session::new(0, &live));
        move || {
            let generates = forks.begin();
            drop(forks.stand(&session));
            forks.set_busy_with("runs a prompt");
            sleep(50 * MS);
            drop(forks.stand(&session));
            drop(generates);
        }
    };
    threads![generation, forker(), forker()];
    assert_eq!(live.load(SeqCst), 0, "forks that nobody has");
}

fn queue(running: usize, events: usize) -> Arc<Queue> {
    let options = QueueOptions {
        running,
        submissions: 16,
        events,
    };
    Arc::new(Queue::new(options).unwrap())
}

fn submission(work: Work) -> Submission {
    Submission {
        work,
        priority: 0,
        deadline: None,
        is_cancelled: Box::new(|| false),
        user_data: 0,
    }
}

/// Work that says `count` numbers, unless its call is over.
fn says(count: u32) -> Work {
    Box::new(move |on_piece| {
        for token in 0..count {
            if call::is_over() {
                return Ok(Finish::of_ended_call());
            }
            let piece = Piece {
                token: Some(token),
                part: Part::Content,
                text: "",
                probabilities: None,
            };
            if on_piece(piece) == ControlFlow::Break(()) {
                return Ok(Finish::Cancelled);
            }
        }
        Ok(Finish::Length)
    })
}

/// The events of each generation: the tokens so far, and its end.
#[derive(Default)]
struct Heard(BTreeMap<u64, (u32, Option<Result<Finish>>)>);

impl Heard {
    /// Takes events until `ends` generations have ended.
    fn until(&mut self, queue: &Queue, ends: usize) {
        while self.ends() < ends {
            self.wait(queue, None);
        }
    }

    fn ends(&self) -> usize {
        self.0.values().filter(|(_, end)| end.is_some()).count()
    }

    fn wait(&mut self, queue: &Queue, timeout: Option<Duration>) {
        for event in queue.wait(2, timeout).unwrap() {
            let (tokens, end) = self.0.entry(event.generation).or_default();
            assert!(end.is_none(), "an event after the end");
            match event.what {
                Happened::Piece { token, .. } => {
                    assert_eq!(token, Some(*tokens), "a token out of order");
                    *tokens += 1;
                }
                Happened::Ended(result) => *end = Some(result),
            }
        }
    }

    /// Asserts that these generations have said all their tokens.
    fn complete(&self, counts: &[u32]) {
        assert_eq!(self.0.len(), counts.len());
        for ((tokens, end), count) in self.0.values().zip(counts) {
            assert_eq!(tokens, count);
            assert_eq!(end.as_ref().unwrap().as_ref().unwrap(), &Finish::Length);
        }
    }
}

fn is_empty(queue: &Queue) {
    assert_eq!(queue.counts().unwrap(), QueueCounts::default());
    // The descriptor of this crate's stand-in says whether it is readable.
    assert_eq!(queue.fd().unwrap(), 0);
}

/// All events come, in order, to a host that takes them while generations wait for room.
pub fn queues_tell_everything() {
    let queue = queue(2, 2);
    queue.fd().unwrap();
    let submits = {
        let queue = queue.clone();
        move || {
            for count in [2, 3] {
                queue.submit(submission(says(count))).unwrap();
            }
        }
    };
    let host = {
        let queue = queue.clone();
        move || {
            queue.submit(submission(says(0))).unwrap();
            let mut heard = Heard::default();
            heard.until(&queue, 3);
            let tokens: u32 = heard.0.values().map(|(tokens, _)| tokens).sum();
            assert_eq!(tokens, 5);
        }
    };
    threads![submits, host];
    crate::all_were_woken();
    is_empty(&queue);
    queue.close();
}

/// Threads that end for lack of work take what comes meanwhile.
pub fn queues_let_threads_end() {
    let queue = queue(2, 8);
    let mut heard = Heard::default();
    for round in 1..=3 {
        queue.submit(submission(says(1))).unwrap();
        heard.until(&queue, round);
        // As long as idle threads wait.
        sleep(Duration::from_secs(5));
    }
    heard.complete(&[1, 1, 1]);
    is_empty(&queue);
    queue.close();
}

/// Generations that are cancelled end once, running or waiting, whoever cancels them how often.
pub fn queues_cancel() {
    let queue = queue(1, 2);
    let flag = Arc::new(atomic::AtomicBool::new(false));
    let mut flagged = submission(says(2));
    let own = flag.clone();
    flagged.is_cancelled = Box::new(move || own.load(SeqCst));
    queue.submit(submission(says(3))).unwrap();
    queue.submit(flagged).unwrap();
    queue.submit(submission(says(2))).unwrap();
    let cancels = |generation: u64| {
        let (queue, submitted) = (queue.clone(), queue.submitted(1));
        move || {
            queue.cancel(generation).unwrap();
            submitted.cancel();
        }
    };
    let raises = move || flag.store(true, SeqCst);
    let host = {
        let queue = queue.clone();
        move || {
            let mut heard = Heard::default();
            heard.until(&queue, 3);
            for (_, end) in heard.0.values() {
                let end = end.as_ref().unwrap().as_ref().unwrap();
                assert!(matches!(end, Finish::Length | Finish::Cancelled));
            }
        }
    };
    threads![cancels(1), cancels(3), raises, host];
    is_empty(&queue);
    assert!(queue.cancel(4).is_err());
    queue.close();
}

/// A generation that waits for room for its events ends at once when it is cancelled, although nobody takes any.
pub fn queues_cancel_those_that_are_full() {
    let queue = queue(1, 1);
    let ended = Arc::new(Waiter::default());
    let work: Work = {
        let ended = ended.clone();
        Box::new(move |on_piece| {
            let finish = says(4)(on_piece);
            ended.wake();
            finish
        })
    };
    queue.submit(submission(work)).unwrap();
    switch();
    queue.cancel(1).unwrap();
    ended.sleep(Duration::MAX);
    crate::all_were_woken();
    let mut heard = Heard::default();
    heard.until(&queue, 1);
    is_empty(&queue);
    queue.close();
}

/// The queue runs its most generations at a time, however many threads wait for work.
pub fn queues_run_as_many_as_they_may() {
    let queue = queue(2, 8);
    let mut heard = Heard::default();
    queue.submit(submission(says(0))).unwrap();
    heard.until(&queue, 1);
    let waiters = [Arc::new(Waiter::default()), Arc::new(Waiter::default())];
    for (own, other) in [(0, 1), (1, 0)] {
        let (own, other) = (waiters[own].clone(), waiters[other].clone());
        let work: Work = Box::new(move |_| {
            other.wake();
            own.sleep(Duration::MAX);
            Ok(Finish::Length)
        });
        queue.submit(submission(work)).unwrap();
    }
    heard.until(&queue, 3);
    crate::all_were_woken();
    is_empty(&queue);
    queue.close();
}

/// Deadlines end generations that run and those that wait, and a host that waits hears of it.
pub fn queues_keep_deadlines() {
    let queue = queue(1, 4);
    let endless: Work = Box::new(|_| {
        while !call::is_over() {
            sleep(MS);
        }
        Ok(Finish::of_ended_call())
    });
    for work in [endless, says(1)] {
        let mut late = submission(work);
        late.deadline = Some(Instant::now() + 30 * MS);
        queue.submit(late).unwrap();
    }
    let mut heard = Heard::default();
    heard.until(&queue, 2);
    for (generation, (_, end)) in &heard.0 {
        let end = end.as_ref().unwrap().as_ref().unwrap();
        // The second begins in time where timeouts are so early that the first ends early.
        let in_time = *generation == 2 && *end == Finish::Length;
        assert!(in_time || *end == Finish::Deadline, "{end:?}");
    }
    assert!(
        timeouts() == Timeouts::Early || slept() <= 50 * MS,
        "{:?}",
        slept()
    );
    is_empty(&queue);
    queue.close();
}

/// Two hosts share the events, and each wake-up ends one wait.
pub fn queues_serve_two_hosts() {
    let queue = queue(2, 3);
    let ends = Arc::new(atomic::AtomicUsize::new(0));
    let host = || {
        let (queue, ends) = (queue.clone(), ends.clone());
        move || loop {
            let events = queue.wait(1, None).unwrap();
            let Some(event) = events.first() else {
                // Woken: all have ended.
                assert_eq!(ends.load(SeqCst), 3);
                return;
            };
            if matches!(event.what, Happened::Ended(_)) && ends.fetch_add(1, SeqCst) == 2 {
                queue.wake().unwrap();
                queue.wake().unwrap();
            }
        }
    };
    let submits = {
        let queue = queue.clone();
        move || {
            for count in [1, 0, 2] {
                queue.submit(submission(says(count))).unwrap();
            }
        }
    };
    threads![host(), host(), submits];
    crate::all_were_woken();
    is_empty(&queue);
    queue.close();
}

/// A closed queue ends all that run, wait and submit; what they hold is dropped.
pub fn queues_close() {
    let queue = queue(1, 1);
    let held = Arc::new(());
    let work = || -> Work {
        let held = held.clone();
        Box::new(move |on_piece| {
            let _held = held;
            says(6)(on_piece)
        })
    };
    let submits = {
        let (queue, works) = (queue.clone(), [work(), work()]);
        move || {
            for work in works {
                if let Err(e) = queue.submit(submission(work)) {
                    assert_eq!(e.kind(), ErrorKind::Cancelled);
                }
            }
        }
    };
    let host = {
        let queue = queue.clone();
        move || loop {
            if let Err(e) = queue.wait(1, None) {
                assert_eq!(e.kind(), ErrorKind::Cancelled);
                return;
            }
        }
    };
    let closes = {
        let queue = queue.clone();
        move || {
            switch();
            queue.close();
        }
    };
    threads![submits, host, closes];
    drop(queue);
    HELD.with_borrow_mut(|all| *all = Some(held));
}

thread_local! {
    /// Held by the last program's work, and dropped when its threads have ended.
    static HELD: std::cell::RefCell<Option<Arc<()>>> = const { std::cell::RefCell::new(None) };
}

/// Asserts that nothing is held any more, once all threads have ended, and that they were told to end.
pub fn nothing_is_held() {
    if let Some(held) = HELD.take() {
        crate::all_were_woken();
        assert_eq!(Arc::strong_count(&held), 1, "work outlives its queue");
    }
}

/// A generation that panics ends alone, with an error.
pub fn queues_outlive_panics() {
    let queue = queue(2, 4);
    let panics: Work = Box::new(|_| std::panic::resume_unwind(Box::new("planned")));
    for work in [panics, says(2), says(1)] {
        queue.submit(submission(work)).unwrap();
    }
    let mut heard = Heard::default();
    heard.until(&queue, 3);
    let failed = heard.0.remove(&1).unwrap().1.unwrap().unwrap_err();
    assert_eq!(
        (failed.kind(), failed.message()),
        (ErrorKind::Internal, "planned")
    );
    heard.complete(&[2, 1]);
    crate::all_were_woken();
    is_empty(&queue);
    queue.close();
}
