//! A completion queue: generations that each run on a thread of the library, and one list of their events. A host with a single thread
//! submits many, and takes the events when it likes.
//!
//! A thread a generation costs what [`Served::generates`](crate::engine::Served::generates) says, which is little, and gives a submission
//! everything that a blocking call has.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::ops::ControlFlow;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use super::{Finish, Part, Piece, TokenProbabilities};
use crate::base::call::{self, Cancel, Watch};
use crate::base::error::bail;
use crate::base::ready_fd::ReadyFd;
use crate::base::sync::{Condvar, Instant, Mutex, MutexGuard};
use crate::base::{ErrorKind, Result, fork, memory, panics, threads};

/// Interval at which submissions that wait are looked at: whether they are cancelled, or their deadlines have passed.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Time after which a thread without work ends.
const IDLE: Duration = Duration::from_secs(5);

/// Limits of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueOptions {
    /// Most generations that run at a time; the others wait for one of them to end.
    pub running: usize,
    /// Most submissions that have not ended. A further one is refused.
    pub submissions: usize,
    /// Most events that wait to be taken. Generations wait while there are as many.
    pub events: usize,
}

impl Default for QueueOptions {
    fn default() -> Self {
        QueueOptions {
            running: 256,
            submissions: 4096,
            events: 65_536,
        }
    }
}

/// Generates, and gives each piece to the callback. Whatever it holds is dropped before the event of its end. A submission that ends before it
/// has begun is run too, in a [`call`] that is over, so that its session says how it has ended.
pub type Work =
    Box<dyn FnOnce(&mut dyn FnMut(Piece<'_>) -> ControlFlow<()>) -> Result<Finish> + Send>;

/// A generation that is submitted.
pub struct Submission {
    /// The work itself.
    pub work: Work,
    /// A waiting submission of a higher priority starts first; of equal ones, the one that came first.
    pub priority: i32,
    /// Time at which it ends, even if it has not begun.
    pub deadline: Option<Instant>,
    /// Says from any thread that it is to end. Called often.
    pub is_cancelled: Box<dyn Fn() -> bool + Send + Sync>,
    /// The caller's own word, which its events have.
    pub user_data: usize,
}

/// An event of a generation.
#[derive(Debug)]
pub struct QueueEvent {
    /// The number that [`Queue::submit`] gave.
    pub generation: u64,
    /// The word of its submission.
    pub user_data: usize,
    /// The event itself.
    pub what: Happened,
}

/// The content of an event.
#[derive(Debug)]
pub enum Happened {
    /// A token, or text; see [`Piece`].
    Piece {
        /// The token, if this is its first piece.
        token: Option<u32>,
        /// The kind of the text.
        part: Part,
        /// The text that the token completes.
        text: String,
        /// Log-probabilities of the token and of the most probable ones, if requested.
        probabilities: Option<TokenProbabilities>,
    },
    /// The generation has ended, and no event of it follows.
    Ended(Result<Finish>),
}

/// Numbers of a queue's submissions and events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueCounts {
    /// Submissions that have not begun.
    pub waiting: usize,
    /// Generations that run.
    pub running: usize,
    /// Events that wait to be taken.
    pub events: usize,
}

/// A completion queue. All functions may be called from any thread at any time. Dropping it ends its generations within a step, without
/// waiting for them; their events are lost.
pub struct Queue(Arc<Shared>);

struct Shared {
    options: QueueOptions,
    /// The fork generation of the threads; a child has none of them.
    generation: u32,
    state: Mutex<State>,
    /// There is work, or the queue is over.
    work: Condvar,
    /// There are events, or someone wakes those who wait for them.
    events: Condvar,
    /// There is room for events.
    room: Condvar,
}

#[derive(Default)]
struct State {
    /// Submissions that have not begun; the greatest comes first.
    waiting: BinaryHeap<Waiting>,
    /// When the waiting ones were last looked at.
    looked: Option<Instant>,
    /// Cancels each submission that has not ended.
    cancels: BTreeMap<u64, Cancel>,
    running: usize,
    threads: usize,
    idle: usize,
    events: VecDeque<QueueEvent>,
    /// Number of times that [`Queue::wake`] was called and nobody has returned for it.
    wakes: usize,
    ready: Option<ReadyFd>,
    last: u64,
    is_over: bool,
}

/// A submission that has not begun.
struct Waiting {
    id: u64,
    cancel: Cancel,
    submission: Submission,
}

impl Waiting {
    fn order(&self) -> (i32, Reverse<u64>) {
        (self.submission.priority, Reverse(self.id))
    }

    /// Whether it ends before it has begun.
    fn is_over(&self) -> bool {
        let deadline = self.submission.deadline;
        self.cancel.is_set()
            || (self.submission.is_cancelled)()
            || deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }
}

impl Ord for Waiting {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.order().cmp(&other.order())
    }
}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for Waiting {}

impl State {
    /// Whether a wait would return at once.
    fn is_ready(&self) -> bool {
        !self.events.is_empty() || self.wakes > 0
    }

    fn push(&mut self, event: QueueEvent) {
        if self.is_over {
            return;
        }
        if let (true, Some(ready)) = (self.events.is_empty(), &self.ready) {
            ready.set();
        }
        self.events.push_back(event);
    }

    /// Records the end of a submission.
    fn end(&mut self, id: u64, user_data: usize, result: Result<Finish>) {
        self.cancels.remove(&id);
        self.push(QueueEvent {
            generation: id,
            user_data,
            what: Happened::Ended(result),
        });
    }

    /// Takes out the submissions that end before they have begun, unless that was looked for a moment ago. Whoever gets them runs them, as
    /// calls that are over.
    fn take_ended(&mut self) -> Vec<Waiting> {
        let is_due = |looked: Instant| looked.elapsed() >= LOOK_EVERY;
        if self.waiting.is_empty() || !self.looked.is_none_or(is_due) {
            return Vec::new();
        }
        self.looked = Some(Instant::now());
        self.take_waiting(Waiting::is_over)
    }

    /// Takes out submissions that have not begun, which run from now on.
    fn take_waiting(&mut self, is_wanted: impl Fn(&Waiting) -> bool) -> Vec<Waiting> {
        let all = std::mem::take(&mut self.waiting).into_iter();
        let (mut taken, kept): (Vec<_>, Vec<_>) = all.partition(is_wanted);
        self.waiting = kept.into();
        self.running += taken.len();
        taken.sort_by_key(|waiting| waiting.id);
        taken
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses a queue whose threads are those of a parent process.
    fn check_process(&self) -> Result<()> {
        if self.generation != fork::generation() {
            bail!(
                Busy,
                "the queue is of the process that this one was forked from; create another one"
            );
        }
        Ok(())
    }

    /// The next submission, once there is one. `None` ends the thread.
    fn next(&self) -> Option<Waiting> {
        let mut state = self.state();
        loop {
            if state.is_over {
                break;
            }
            if let Some(next) = state.waiting.pop() {
                state.running += 1;
                return Some(next);
            }
            state.idle += 1;
            let waited = self.work.wait_timeout(state, IDLE);
            let (waited, time) = waited.unwrap_or_else(PoisonError::into_inner);
            state = waited;
            state.idle -= 1;
            if time.timed_out() && state.waiting.is_empty() {
                break;
            }
        }
        state.threads -= 1;
        None
    }

    /// Runs a submission.
    fn run(&self, waiting: Waiting) {
        let Waiting {
            id,
            cancel,
            submission,
        } = waiting;
        let Submission {
            work,
            deadline,
            is_cancelled,
            user_data,
            ..
        } = submission;
        let was_cancelled = || cancel.is_set() || is_cancelled();
        let watch = Watch {
            flags: &[&was_cancelled],
            deadline,
            progress: None,
        };
        let mut lost = Ok(());
        let mut on_piece = |piece: Piece<'_>| match self.tell(id, user_data, piece) {
            Ok(()) => ControlFlow::Continue(()),
            Err(e) => {
                lost = Err(e);
                ControlFlow::Break(())
            }
        };
        let work = || match work(&mut on_piece) {
            Err(e) if e.kind() == ErrorKind::Cancelled => Ok(Finish::of_ended_call()),
            done => done,
        };
        let done = match panics::attempt(|| watch.during(work)) {
            Ok(finish) => lost.map(|()| finish),
            failed => failed,
        };
        let mut state = self.state();
        state.running -= 1;
        state.end(id, user_data, done);
        drop(state);
        self.events.notify_one();
    }

    /// See [`Queue::cancel`].
    fn cancel(&self, generation: u64) -> Result<()> {
        self.check_process()?;
        let mut state = self.state();
        if generation == 0 || generation > state.last {
            let last = state.last;
            drop(state);
            bail!(
                InvalidArgument,
                "there is no generation {generation}; the queue has given the numbers 1 to {last}"
            );
        }
        let Some(cancel) = state.cancels.get(&generation) else {
            return Ok(());
        };
        cancel.cancel();
        let ended = state.take_waiting(|waiting| waiting.id == generation);
        drop(state);
        self.room.notify_all();
        ended.into_iter().for_each(|waiting| self.run(waiting));
        Ok(())
    }

    /// Adds the event of a piece, once there is room for it, or at once if the call is over: then few follow.
    fn tell(&self, id: u64, user_data: usize, piece: Piece<'_>) -> Result<()> {
        let event = QueueEvent {
            generation: id,
            user_data,
            what: Happened::Piece {
                token: piece.token,
                part: piece.part,
                text: memory::copied(piece.text)?,
                probabilities: piece.probabilities.cloned(),
            },
        };
        let mut state = self.state();
        while state.events.len() >= self.options.events && !state.is_over && !call::is_over() {
            let waited = self.room.wait_timeout(state, LOOK_EVERY);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.push(event);
        let ended = state.take_ended();
        drop(state);
        self.events.notify_one();
        ended.into_iter().for_each(|waiting| self.run(waiting));
        Ok(())
    }
}

impl Queue {
    /// A queue without submissions, and without threads.
    pub fn new(options: QueueOptions) -> Result<Queue> {
        let QueueOptions {
            running,
            submissions,
            events,
        } = options;
        if running == 0 || submissions == 0 || events == 0 {
            bail!(
                InvalidArgument,
                "a queue of {running} running of {submissions} submissions with {events} events; it needs at least one of each"
            );
        }
        Ok(Queue(Arc::new(Shared {
            options,
            generation: fork::generation(),
            state: Mutex::default(),
            work: Condvar::new(),
            events: Condvar::new(),
            room: Condvar::new(),
        })))
    }

    /// Its limits.
    pub fn options(&self) -> QueueOptions {
        self.0.options
    }

    /// Submits a generation, and returns its number, which is never 0 and never used again. Fails as busy if the queue is full. If it
    /// fails, `submission` is dropped.
    pub fn submit(&self, submission: Submission) -> Result<u64> {
        let shared = &self.0;
        shared.check_process()?;
        let mut state = shared.state();
        if state.is_over {
            bail!(Cancelled, "the queue was released");
        }
        let (most, count) = (shared.options.submissions, state.cancels.len());
        if count >= most {
            drop(state);
            bail!(
                Busy,
                "the queue is full: {count} of {most} submissions have not ended; take events until some have"
            );
        }
        state.last += 1;
        let id = state.last;
        let cancel = Cancel::new();
        let needs_thread = state.idle <= state.waiting.len();
        if needs_thread && state.threads < shared.options.running {
            let own = shared.clone();
            let started = threads::detached("nvfp4-queue", move || {
                while let Some(next) = own.next() {
                    own.run(next);
                }
            });
            match started {
                Ok(()) => state.threads += 1,
                // The threads that there are will come to it.
                Err(e) if state.threads > 0 => tracing::warn!("a queue runs fewer at a time: {e}"),
                Err(e) => {
                    drop(state);
                    return Err(e);
                }
            }
        }
        state.cancels.insert(id, cancel.clone());
        state.waiting.push(Waiting {
            id,
            cancel,
            submission,
        });
        drop(state);
        shared.work.notify_one();
        Ok(id)
    }

    /// Ends a generation with the tokens that it has; does nothing if it has ended. Fails for a number that was never given.
    pub fn cancel(&self, generation: u64) -> Result<()> {
        self.0.cancel(generation)
    }

    /// A handle that ends a generation, and that does not keep the queue alive.
    pub fn submitted(&self, generation: u64) -> Submitted {
        Submitted {
            queue: Arc::downgrade(&self.0),
            generation,
        }
    }

    /// Takes up to `most` events, oldest first. Without any it waits for one, for up to `timeout`, or for ever if that is `None`; and
    /// returns none after the timeout or [`Queue::wake`].
    pub fn wait(&self, most: usize, timeout: Option<Duration>) -> Result<Vec<QueueEvent>> {
        let shared = &self.0;
        shared.check_process()?;
        if most == 0 {
            bail!(InvalidArgument, "waits for 0 events; ask for one at least");
        }
        let mut taken = memory::with_room(most.min(shared.options.events))?;
        // Too far away to be reached is as good as never.
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = shared.state();
        loop {
            if state.is_over {
                bail!(Cancelled, "the queue was released");
            }
            let ended = state.take_ended();
            if !ended.is_empty() {
                drop(state);
                ended.into_iter().for_each(|waiting| shared.run(waiting));
                state = shared.state();
                continue;
            }
            if state.is_ready() {
                break;
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                break;
            }
            // Deadlines of those that wait pass without an event.
            let sleep = match state.waiting.is_empty() {
                true => left.unwrap_or(Duration::MAX),
                false => left.unwrap_or(LOOK_EVERY).min(LOOK_EVERY),
            };
            let waited = shared.events.wait_timeout(state, sleep);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let was_ready = state.is_ready();
        let count = most.min(state.events.len());
        taken.extend(state.events.drain(..count));
        if count == 0 {
            state.wakes = state.wakes.saturating_sub(1);
        }
        if let (true, false, Some(ready)) = (was_ready, state.is_ready(), &state.ready) {
            ready.clear();
        }
        let is_more = !state.events.is_empty();
        drop(state);
        shared.room.notify_all();
        if is_more {
            shared.events.notify_one();
        }
        Ok(taken)
    }

    /// Lets one call of [`Queue::wait`] return without an event: the current one, or the next that finds none.
    pub fn wake(&self) -> Result<()> {
        self.0.check_process()?;
        let mut state = self.0.state();
        state.wakes += 1;
        if let Some(ready) = &state.ready {
            ready.set();
        }
        drop(state);
        self.0.events.notify_one();
        Ok(())
    }

    /// A file descriptor that is readable while there are events. It belongs to the queue: the caller polls it, and nothing else.
    pub fn fd(&self) -> Result<i32> {
        self.0.check_process()?;
        let mut state = self.0.state();
        if state.ready.is_none() {
            let ready = ReadyFd::new()?;
            if state.is_ready() {
                ready.set();
            }
            state.ready = Some(ready);
        }
        match &state.ready {
            Some(ready) => Ok(ready.fd()),
            None => bail!(Internal, "a queue without its descriptor"),
        }
    }

    /// Ends its generations, as dropping it does. Calls of [`Queue::wait`] fail as cancelled from now on, and so do submissions.
    pub fn close(&self) {
        if self.0.check_process().is_err() {
            // A thread that does not exist here may hold the lock.
            return;
        }
        let mut state = self.0.state();
        state.is_over = true;
        state.cancels.values().for_each(Cancel::cancel);
        let waiting = std::mem::take(&mut state.waiting);
        let events = std::mem::take(&mut state.events);
        drop(state);
        self.0.work.notify_all();
        self.0.events.notify_all();
        self.0.room.notify_all();
        drop((waiting, events));
    }

    /// Its numbers now.
    pub fn counts(&self) -> Result<QueueCounts> {
        self.0.check_process()?;
        let state = self.0.state();
        Ok(QueueCounts {
            waiting: state.waiting.len(),
            running: state.running,
            events: state.events.len(),
        })
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.close();
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Queue({:?})", self.0.options)
    }
}

/// A generation in a queue, for whoever may end it.
pub struct Submitted {
    queue: Weak<Shared>,
    generation: u64,
}

impl Submitted {
    /// Ends the generation; does nothing if it has ended, or its queue.
    pub fn cancel(&self) {
        if let Some(shared) = self.queue.upgrade() {
            // The number was given, and in the child of a fork nothing runs.
            let _ = shared.cancel(self.generation);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::error::err;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    fn submission(work: Work) -> Submission {
        Submission {
            work,
            priority: 0,
            deadline: None,
            is_cancelled: Box::new(|| false),
            user_data: 0,
        }
    }

    /// Work that says `count` numbers.
    fn says(count: u32) -> Work {
        Box::new(move |on_piece| {
            for token in 0..count {
                if call::is_over() {
                    return Ok(Finish::of_ended_call());
                }
                let piece = Piece {
                    token: Some(token),
                    part: Part::Content,
                    text: "x",
                    probabilities: None,
                };
                if on_piece(piece).is_break() {
                    return Ok(Finish::Cancelled);
                }
            }
            Ok(Finish::Length)
        })
    }

    /// Work that goes on until it is cancelled, once it has begun.
    fn endless(begun: &mpsc::Sender<()>) -> Work {
        let begun = begun.clone();
        Box::new(move |_| {
            begun.send(()).unwrap();
            while !call::is_over() {
                std::thread::yield_now();
            }
            Ok(Finish::of_ended_call())
        })
    }

    fn queue(running: usize, submissions: usize, events: usize) -> Queue {
        Queue::new(QueueOptions {
            running,
            submissions,
            events,
        })
        .unwrap()
    }

    /// The events until `ends` generations have ended.
    fn until(queue: &Queue, ends: usize) -> Vec<QueueEvent> {
        let (mut all, mut ended) = (Vec::new(), 0);
        while ended < ends {
            let events = queue.wait(7, Some(Duration::from_secs(60))).unwrap();
            assert!(!events.is_empty() && events.len() <= 7);
            let is_end = |event: &&QueueEvent| matches!(event.what, Happened::Ended(_));
            ended += events.iter().filter(is_end).count();
            all.extend(events);
        }
        all
    }

    fn ends(events: &[QueueEvent]) -> Vec<(u64, Result<Finish>)> {
        let ends = events.iter().filter_map(|event| match &event.what {
            Happened::Ended(result) => Some((event.generation, result.clone())),
            Happened::Piece { .. } => None,
        });
        ends.collect()
    }

    #[test]
    fn events_come_in_order_and_end_once() {
        // So few events that generations wait for their host.
        let queue = queue(4, 100, 5);
        let mut sent = 0;
        for count in 0..40 {
            let mut submission = submission(says(count));
            submission.user_data = 1000 + count as usize;
            assert_eq!(queue.submit(submission).unwrap(), u64::from(count) + 1);
            sent += count as usize + 1;
        }
        let events = until(&queue, 40);
        assert_eq!(events.len(), sent);
        for count in 0..40u32 {
            let own = events
                .iter()
                .filter(|event| event.generation == u64::from(count) + 1);
            let mut next = 0;
            for event in own {
                assert_eq!(event.user_data, 1000 + count as usize);
                match &event.what {
                    Happened::Piece { token, text, .. } => {
                        assert_eq!((*token, text.as_str()), (Some(next), "x"));
                    }
                    Happened::Ended(result) => {
                        assert_eq!((result.clone().unwrap(), next), (Finish::Length, count));
                    }
                }
                next += 1;
            }
            assert_eq!(next, count + 1);
        }
        assert_eq!(queue.counts().unwrap(), QueueCounts::default());
        assert!(queue.wait(1, Some(Duration::ZERO)).unwrap().is_empty());
    }

    #[test]
    fn priorities_order_those_that_wait_and_a_full_queue_refuses() {
        let queue = queue(1, 6, 100);
        let (begun, begins) = mpsc::channel();
        let first = queue.submit(submission(endless(&begun))).unwrap();
        begins.recv().unwrap();
        for priority in [0, -1, 5, 5, 0] {
            let mut waits = submission(says(0));
            waits.priority = priority;
            queue.submit(waits).unwrap();
        }
        let full = queue.submit(submission(says(0))).unwrap_err();
        assert_eq!(full.kind(), ErrorKind::Busy);
        assert!(full.message().contains("6 of 6"), "{full}");
        let counts = queue.counts().unwrap();
        assert_eq!((counts.waiting, counts.running), (5, 1));
        queue.cancel(first).unwrap();
        let ends = ends(&until(&queue, 6));
        let order: Vec<u64> = ends.iter().map(|(id, _)| *id).collect();
        assert_eq!(order, [1, 4, 5, 2, 6, 3]);
        assert_eq!(ends[0].1.clone().unwrap(), Finish::Cancelled);
    }

    #[test]
    fn those_that_wait_end_by_cancellation_and_by_their_deadlines() {
        let queue = queue(1, 10, 100);
        let (begun, begins) = mpsc::channel();
        queue.submit(submission(endless(&begun))).unwrap();
        begins.recv().unwrap();
        let cancelled = queue.submit(submission(says(1))).unwrap();
        let mut late = submission(says(1));
        late.deadline = Some(Instant::now() + Duration::from_millis(30));
        queue.submit(late).unwrap();
        let flag = Arc::new(AtomicUsize::new(0));
        let mut flagged = submission(says(1));
        let own = flag.clone();
        flagged.is_cancelled = Box::new(move || own.load(Ordering::Relaxed) > 0);
        queue.submit(flagged).unwrap();
        queue.cancel(cancelled).unwrap();
        queue.cancel(cancelled).unwrap();
        let finishes = |events: Vec<QueueEvent>| {
            let ends = ends(&events).into_iter();
            ends.map(|(id, end)| (id, end.unwrap())).collect::<Vec<_>>()
        };
        assert_eq!(finishes(until(&queue, 1)), [(2, Finish::Cancelled)]);
        assert_eq!(finishes(until(&queue, 1)), [(3, Finish::Deadline)]);
        flag.store(1, Ordering::Relaxed);
        assert_eq!(finishes(until(&queue, 1)), [(4, Finish::Cancelled)]);
        // The one that runs has a deadline too.
        let running = queue.counts().unwrap().running;
        assert_eq!(running, 1);
        queue.cancel(1).unwrap();
        assert_eq!(finishes(until(&queue, 1)), [(1, Finish::Cancelled)]);
        let mut short = submission(endless(&begun));
        short.deadline = Some(Instant::now() + Duration::from_millis(30));
        queue.submit(short).unwrap();
        assert_eq!(finishes(until(&queue, 1)), [(5, Finish::Deadline)]);
        let none = queue.cancel(6).unwrap_err();
        assert!(none.message().contains("1 to 5"), "{none}");
        assert!(queue.cancel(0).is_err());
    }

    #[test]
    fn faults_and_panics_end_their_generation_alone() {
        let queue = queue(2, 10, 100);
        let fails: Work = Box::new(|_| Err(err!(ContextFull, "no room")));
        let panics: Work = Box::new(|_| panic!("a defect"));
        for work in [fails, panics, says(1)] {
            queue.submit(submission(work)).unwrap();
        }
        let mut ends = ends(&until(&queue, 3));
        ends.sort_by_key(|(id, _)| *id);
        let kinds: Vec<_> = ends.iter().map(|(_, end)| end.as_ref().err()).collect();
        assert_eq!(kinds[0].unwrap().message(), "no room");
        assert_eq!(kinds[1].unwrap().kind(), ErrorKind::Internal);
        assert_eq!(kinds[1].unwrap().message(), "a defect");
        assert!(kinds[2].is_none());
    }

    #[test]
    fn a_dropped_queue_ends_its_generations() {
        let queue = queue(2, 10, 1);
        let (begun, begins) = mpsc::channel();
        let held = Arc::new(());
        for _ in 0..4 {
            let (held, work) = (held.clone(), endless(&begun));
            let work: Work = Box::new(move |on_piece| {
                let _held = held;
                work(on_piece)
            });
            queue.submit(submission(work)).unwrap();
        }
        // One that waits for room for its events.
        begins.recv().unwrap();
        begins.recv().unwrap();
        let submitted = queue.submitted(1);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| queue.wait(1, None));
            queue.close();
            assert_eq!(
                waits.join().unwrap().unwrap_err().kind(),
                ErrorKind::Cancelled
            );
        });
        let refused = queue.submit(submission(says(1))).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Cancelled);
        drop(queue);
        submitted.cancel();
        while Arc::strong_count(&held) > 1 {
            std::thread::yield_now();
        }
        assert!(begins.try_recv().is_err(), "the others never began");
    }

    #[test]
    fn a_wait_can_be_woken_and_polled() {
        let queue = queue(1, 10, 100);
        let fd = queue.fd().unwrap();
        let is_ready = || {
            let mut poll = libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one entry.
            unsafe { libc::poll(&mut poll, 1, 0) == 1 }
        };
        assert!(!is_ready());
        queue.wake().unwrap();
        assert!(is_ready());
        assert!(queue.wait(1, None).unwrap().is_empty());
        assert!(!is_ready());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| queue.wait(1, None).unwrap().len());
            queue.wake().unwrap();
            assert_eq!(waits.join().unwrap(), 0);
        });
        queue.submit(submission(says(2))).unwrap();
        while queue.counts().unwrap().events < 3 {
            std::thread::yield_now();
        }
        for left in [2, 1, 0] {
            assert!(is_ready());
            assert_eq!(queue.wait(1, None).unwrap().len(), 1);
            assert_eq!(queue.counts().unwrap().events, left);
        }
        assert!(!is_ready());
    }

    /// Many submissions, cancelled at random: each ends once, and nothing is left.
    #[test]
    fn random_cancels_lose_nothing() {
        use crate::format::random::bits;
        let queue = queue(8, 50, 20);
        let (mut open, mut ended, mut submitted) = (Vec::new(), Vec::new(), 0u64);
        let held = Arc::new(());
        for step in 0.. {
            let drawn = bits(9, step);
            if submitted < 2000 && open.len() < 50 {
                let (held, work) = (held.clone(), says(drawn as u32 % 20));
                let work: Work = Box::new(move |on_piece| {
                    let _held = held;
                    work(on_piece)
                });
                let mut submission = submission(work);
                submission.priority = (drawn >> 8) as i32 % 3;
                open.push(queue.submit(submission).unwrap());
                submitted += 1;
            }
            if drawn.is_multiple_of(3) && !open.is_empty() {
                let index = (drawn >> 32) as usize % open.len();
                queue.cancel(open[index]).unwrap();
            }
            let events = queue.wait(30, Some(Duration::ZERO)).unwrap();
            for (id, end) in ends(&events) {
                assert!(matches!(end, Ok(Finish::Length | Finish::Cancelled)));
                open.retain(|open| *open != id);
                ended.push(id);
            }
            if submitted == 2000 && open.is_empty() {
                break;
            }
        }
        ended.sort_unstable();
        assert_eq!(ended, (1..=2000).collect::<Vec<u64>>());
        assert_eq!(queue.counts().unwrap(), QueueCounts::default());
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
