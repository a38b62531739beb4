//! Runs the requests of all threads that use a model together. One of the threads that wait leads: it takes what the others wait for too, runs
//! a pass for all of them, and hands the lead on once its own request is over. There is no thread beside those of the callers.
//!
//! Sequences that generate come with their next tokens soon after a pass, so a leader waits for them for a moment: see
//! [`Served::generates`](super::Served::generates).
//!
//! On a GPU that divides its multiprocessors, the caller of a long prompt runs it beside the steps of a leader, in a lane: see
//! [`Model::run_beside`]. One prompt is there at a time, and other long ones wait for it; short ones run in the leader's passes.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::leased::Leased;
use super::pass::{NewTokens, Part, Request, Tally, pass};
use super::schedule::{Turn, Waiting, plan};
use super::times::{PassTimes, PromptShare};
use crate::base::error::{Error, err};
use crate::base::lease::Held;
use crate::base::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::base::sync::{Condvar, Instant, Mutex, MutexGuard};
use crate::base::turns::{Waiter, reentered, this_thread};
use crate::base::{Result, call, fork};
use crate::model::{Batch, Model, Output, Scratch};

/// The longest time for which a leader waits for sequences that generate.
const LONGEST_WAIT: Duration = Duration::from_millis(5);
/// Passes for which a leader no longer waits for a sequence that came too late.
const FORGETS: u64 = 8;
/// A GPU takes multiples of this share of its longest pass of a prompt: fewer rows take about as long, because each reads all keys before it,
/// and the first pass of another number of rows takes longer.
const GPU_SHARE: usize = 8;
/// Where prompts have a small share, a GPU runs passes of multiples of so many rows, steps and prompts together. Up to so many multiply 4-bit
/// weights as they are; more have them decoded first, which takes as long as two steps.
const GPU_ROWS: usize = 128;
/// Fewest tokens of prompts in such a pass.
const GPU_LEAST: usize = 32;
/// Interval at which a waiting caller looks whether it is cancelled, and reports its progress.
const PATIENCE: Duration = Duration::from_millis(10);
/// The time after the end of a generation in which its session may be released and free its memory.
const RELEASE_TIME: Duration = Duration::from_secs(1);

/// The requests of a model, and who leads.
#[derive(Debug, Default)]
pub(super) struct Runner {
    share: PromptShare,
    state: Mutex<State>,
    /// The leader need not wait any longer.
    complete: Condvar,
    /// A generation has ended or made way.
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Requests, in the order of arrival.
    posted: Vec<Posted>,
    /// The thread that leads.
    leader: Option<usize>,
    /// Sequences that generate.
    generating: BTreeMap<u64, Generator>,
    /// How often a generation has ended, or made way for others.
    ends: u64,
    /// The last end of a generation, and the last one of any other thread than that.
    last_ends: [Option<End>; 2],
    /// Generations that made way.
    preemptions: u64,
    /// Tokens that run again because the weights have changed.
    recomputed: u64,
    /// Generating sequences that the next pass waits for, without those that have arrived.
    expected: Vec<u64>,
    times: PassTimes,
    counts: PassCounts,
    tally: Tally,
    /// Whether the last pass ran prompts.
    ran_prompts: bool,
    /// Whether a pass runs steps now.
    runs_steps: bool,
    /// The end of the last pass that ran steps.
    ran_steps: Option<RanSteps>,
    /// Whether prompts no longer run beside steps, because there was no room for them.
    has_no_lane: bool,
    /// Whether the leader waits because all requests are to run beside steps.
    is_idle: bool,
    /// The prompt that runs beside steps.
    beside: Option<Beside>,
    /// Whether it came before another that had waited longer.
    overtook: bool,
    /// The time of the last pass beside steps, unless its prompt has ended.
    last_beside: Option<Duration>,
    /// The end of the last pass, if a device began the next step then.
    ahead_since: Option<Instant>,
    /// The fork generation of these threads; the child of a fork has others.
    generation: u32,
}

/// The end of a pass that ran steps.
#[derive(Clone, Copy, Debug)]
struct RanSteps {
    at: Instant,
    /// The thread that all of them were of, if there was a single one.
    only: Option<usize>,
}

/// A prompt that runs beside steps.
#[derive(Debug)]
struct Beside {
    thread: usize,
    sequences: Vec<u64>,
}

/// A sequence that generates.
#[derive(Clone, Copy, Debug)]
struct Generator {
    /// The first pass that waits for it again.
    from: u64,
    thread: usize,
    /// Whether it waits for memory.
    made_way: bool,
    /// The end of another thread's generation after which it tried again, although no other generated.
    tried_after: Option<Instant>,
    /// Whether it found no memory, and none was to become free.
    is_refused: bool,
}

/// The end of a generation.
#[derive(Clone, Copy, Debug)]
struct End {
    thread: usize,
    at: Instant,
}

/// Numbers of passes so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassCounts {
    /// Passes over the weights.
    pub passes: u64,
    /// Requests for tokens in them: `requests / passes` callers shared a pass on average.
    pub requests: u64,
}

/// The work of a runner since it began, and now.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Work {
    pub(super) counts: PassCounts,
    pub(super) tally: Tally,
    /// Sequences that generate now.
    pub(super) generating: usize,
    /// Requests that are in no pass now.
    pub(super) waiting: usize,
    pub(super) preemptions: u64,
    pub(super) recomputed: u64,
}

/// A request that waits in its caller's stack frame.
#[derive(Debug)]
struct Posted {
    request: Lent,
    caller: Arc<Caller>,
    thread: usize,
    look_ahead: bool,
    /// The number of its tokens in the pass that runs.
    taken: Option<usize>,
}

/// The address of a request, whose caller does not return before the request has left the list.
#[derive(Clone, Copy, Debug)]
struct Lent(*mut Request<'static>);

// SAFETY: requests consist of data that threads may hand on, as `is_send` asserts. A request is used by the leader alone, and after it has
// left the list by its caller.
unsafe impl Send for Lent {}

const fn is_send<T: Send>() {}
const _: () = is_send::<Request<'static>>();

/// Signals between a waiting caller and the leader.
#[derive(Debug, Default)]
struct Caller {
    waiter: Waiter,
    /// Whether its call was cancelled.
    is_cancelled: AtomicBool,
    /// Tokens that ran in passes of other callers.
    done: AtomicU64,
}

impl Caller {
    fn wake(&self) {
        self.waiter.wake();
    }

    /// Sleeps until it is woken; for no longer than [`PATIENCE`] if the call is watched.
    fn sleep(&self) {
        let is_watched = call::with(|call| call.is_watched());
        let patience = if is_watched { PATIENCE } else { Duration::MAX };
        self.waiter.sleep(patience);
    }

    /// Reports progress in passes of other callers, and notes whether the call is cancelled. On the caller's thread.
    fn look(&self) {
        let done = self.done.swap(0, Ordering::Relaxed);
        if done > 0 {
            call::add(done);
        }
        if call::is_over() {
            self.is_cancelled.store(true, Ordering::Relaxed);
        }
    }
}

/// Keeps a request in the list no longer than its caller's stack frame lives, even if the caller unwinds.
struct Lending<'a> {
    runner: &'a Runner,
    caller: &'a Arc<Caller>,
}

impl Drop for Lending<'_> {
    fn drop(&mut self) {
        loop {
            let mut state = self.runner.state();
            let own = |posted: &Posted| Arc::ptr_eq(&posted.caller, self.caller);
            match state.posted.iter().position(own) {
                None => return,
                Some(index) if state.posted[index].taken.is_none() => {
                    state.posted.remove(index);
                    // This caller may be the one that was to lead.
                    state.wake_next();
                    return;
                }
                Some(_) => {}
            }
            drop(state);
            self.caller.sleep();
        }
    }
}

/// The lead, which ends when this is dropped.
struct Lead<'a>(&'a Runner);

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.leader = None;
        // Only a pass that unwound leaves requests taken.
        for posted in state.posted.extract_if(.., |posted| posted.taken.is_some()) {
            // SAFETY: the caller waits.
            unsafe { &mut *posted.request.0 }
                .fail(err!(Internal, "the pass of this request failed"));
            posted.caller.wake();
        }
        state.wake_next();
    }
}

/// The place beside steps, which is free again when this is dropped.
struct BesideSteps<'a>(&'a Runner);

impl Drop for BesideSteps<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.beside = None;
        state.wake_beside(self.0.share);
        if state.is_idle {
            self.0.complete.notify_all();
        }
    }
}

/// Says that a sequence generates, until this is dropped: see [`Served::generates`](super::Served::generates).
#[derive(Debug)]
#[must_use = "the sequence generates until this is dropped"]
pub struct Generating<'a> {
    runner: &'a Runner,
    sequence: u64,
}

impl Drop for Generating<'_> {
    fn drop(&mut self) {
        let mut state = self.runner.state();
        let ended = state.generating.remove(&self.sequence);
        if let Some(ended) = ended.filter(|ended| !ended.is_refused) {
            state.notes_end(ended.thread);
        }
        if state.generating.is_empty() {
            state.ran_steps = None;
        }
        state.ends += 1;
        if state.comes(self.sequence) || state.is_idle {
            self.runner.complete.notify_all();
        }
        self.runner.ended.notify_all();
    }
}

impl State {
    /// Whether sequences of other threads generate, and do not wait for memory.
    fn others_generate(&self) -> bool {
        let is_other = |g: &Generator| g.thread != this_thread() && !g.made_way;
        self.generating.values().any(is_other)
    }

    /// Notes that a generation of `thread` ends now.
    fn notes_end(&mut self, thread: usize) {
        let [last, before] = &mut self.last_ends;
        if last.is_some_and(|last| last.thread != thread) {
            *before = *last;
        }
        let at = Instant::now();
        *last = Some(End { thread, at });
    }

    /// The last end of a generation of another thread, if that was a moment ago, so that its session may be released next. `None` for a
    /// generation that has tried again since.
    fn recent_end(&self, sequence: u64) -> Option<Instant> {
        let tried_after = self.generating.get(&sequence)?.tried_after;
        let is_other = |end: &&End| end.thread != this_thread();
        let at = self.last_ends.iter().flatten().find(is_other)?.at;
        (at.elapsed() < RELEASE_TIME && tried_after.is_none_or(|tried| tried < at)).then_some(at)
    }

    /// Whether memory may become free for the generation of a sequence: other threads generate, or one has just ended. If not, it is refused.
    fn may_get_room(&mut self, sequence: u64) -> bool {
        let may = self.others_generate() || self.recent_end(sequence).is_some();
        if let Some(own) = self.generating.get_mut(&sequence) {
            own.is_refused = !may;
        }
        may
    }

    /// Wakes the caller that is to lead, while nobody does.
    fn wake_next(&self) {
        if let (None, Some(next)) = (self.leader, self.posted.first()) {
            next.caller.wake();
        }
    }

    /// Whether a caller's request is in the list.
    fn has(&self, caller: &Arc<Caller>) -> bool {
        let own = |posted: &Posted| Arc::ptr_eq(&posted.caller, caller);
        self.posted.iter().any(own)
    }

    /// Sequences that generate, do not wait for memory, and are in no request.
    fn away(&self) -> impl Iterator<Item = (u64, Generator)> {
        // SAFETY: no leader uses the requests meanwhile.
        let posted = self.posted.iter().map(|p| unsafe { &*p.request.0 });
        let beside = self.beside.iter().flat_map(|beside| &beside.sequences);
        let here: BTreeSet<u64> = posted
            .flat_map(Request::sequences)
            .chain(beside.copied())
            .collect();
        let generating = self.generating.iter().map(|(id, g)| (*id, *g));
        generating.filter(move |(id, g)| !g.made_way && !here.contains(id))
    }

    /// Expects the sequences that generate, that are not here, and that were not late.
    fn expect(&mut self) {
        let passes = self.counts.passes;
        let due = self.away().filter(|(_, g)| g.from <= passes);
        self.expected = due.map(|(id, _)| id).collect();
    }

    /// Notes that a sequence need not be waited for. Returns whether none is left.
    fn comes(&mut self, sequence: u64) -> bool {
        let before = self.expected.len();
        self.expected.retain(|expected| *expected != sequence);
        before > 0 && self.expected.is_empty()
    }

    /// Ends the requests whose calls were cancelled.
    fn end_cancelled(&mut self) {
        let is_cancelled = |posted: &mut Posted| posted.caller.is_cancelled.load(Ordering::Relaxed);
        for posted in self.posted.extract_if(.., is_cancelled) {
            // SAFETY: the caller waits.
            let request = unsafe { &mut *posted.request.0 };
            request.fail(err!(Cancelled, "cancelled"));
            posted.caller.wake();
        }
    }

    /// Ends a caller's request with an error, if it is in the list.
    fn fail(&mut self, caller: &Arc<Caller>, error: Error) {
        let own = |posted: &Posted| Arc::ptr_eq(&posted.caller, caller);
        if let Some(index) = self.posted.iter().position(own) {
            // SAFETY: no pass runs.
            unsafe { &mut *self.posted.remove(index).request.0 }.fail(error);
        }
    }

    /// Lets tokens run again that older weights have run.
    fn renew(&mut self) {
        let recomputed = &mut self.recomputed;
        let failed = |posted: &mut Posted| {
            // SAFETY: the caller waits, and no pass runs.
            let request = unsafe { &mut *posted.request.0 };
            match request.renew() {
                Ok(count) => *recomputed += count as u64,
                Err(e) => {
                    request.fail(e);
                    return true;
                }
            }
            false
        };
        for posted in self.posted.extract_if(.., failed) {
            posted.caller.wake();
        }
    }

    /// Whether a step has thrown a request back, which comes to its end before the next step: steps that follow each other at once would
    /// otherwise let no prompt of several passes come to its end.
    fn has_thrown_back(&self) -> bool {
        // SAFETY: no pass runs.
        let mut posted = self.posted.iter().map(|p| unsafe { &*p.request.0 });
        posted.any(Request::is_thrown_back)
    }

    /// Lets sequences begin with blocks that others have filled meanwhile.
    fn adopt(&mut self) {
        for posted in &mut self.posted {
            // SAFETY: the caller waits, and no pass runs.
            let request = unsafe { &mut *posted.request.0 };
            let found = request.adopt();
            posted
                .caller
                .done
                .fetch_add(found as u64, Ordering::Relaxed);
        }
    }

    /// Notes what a pass has run. Returns the callers whose requests are over.
    fn end_pass(&mut self, is_own: bool) -> Vec<Arc<Caller>> {
        let tally = &mut self.tally;
        let ended = self.posted.extract_if(.., |posted| {
            let Some(count) = posted.taken.take() else {
                return false;
            };
            if !is_own {
                posted
                    .caller
                    .done
                    .fetch_add(count as u64, Ordering::Relaxed);
            }
            // SAFETY: the caller waits, and the pass has ended.
            let request = unsafe { &mut *posted.request.0 };
            *tally += request.take_tally();
            request.is_over()
        });
        ended.map(|posted| posted.caller).collect()
    }

    /// The requests that a pass may take, by number, and the tokens of each that wait. Prompts that are to run beside steps are not among them.
    fn waiting(&self, share: PromptShare) -> (Vec<usize>, Vec<Waiting>) {
        // A single one: several run in one pass with the steps.
        let mut short_waits = self.last_beside.is_none_or(PromptShare::waits_beside);
        let mut stays = |waiting: &Waiting| match waiting.is_short() {
            true => std::mem::take(&mut short_waits),
            false => true,
        };
        let posted = self.posted.iter().enumerate().map(|(index, posted)| {
            // SAFETY: no leader uses the requests meanwhile.
            let waiting = unsafe { &*posted.request.0 }.waiting();
            (index, posted, waiting)
        });
        posted
            .filter(|(_, posted, waiting)| {
                !(self.goes_beside(share, posted, waiting) && stays(waiting))
            })
            .map(|(index, _, waiting)| (index, waiting))
            .unzip()
    }

    /// Whether steps of other threads than that of a request follow each other now.
    fn has_steps_for(&self, posted: &Posted) -> bool {
        let follow =
            |ran: RanSteps| ran.at.elapsed() < LONGEST_WAIT && ran.only != Some(posted.thread);
        self.runs_steps || self.ran_steps.is_some_and(follow)
    }

    /// Whether a request is to run beside steps.
    fn goes_beside(&self, share: PromptShare, posted: &Posted, waiting: &Waiting) -> bool {
        share.goes_beside(waiting) && !self.has_no_lane && self.has_steps_for(posted)
    }

    /// The number of the request that is to run beside steps next: the shortest, or the first if a later one came before it last time.
    fn next_beside(&self, share: PromptShare) -> Option<usize> {
        if self.beside.is_some() || !share.beside {
            return None;
        }
        let free = self
            .posted
            .iter()
            .enumerate()
            .filter(|(_, posted)| posted.taken.is_none());
        let all = free.filter_map(|(index, posted)| {
            // SAFETY: no pass has taken it.
            let waiting = unsafe { &*posted.request.0 }.waiting();
            let goes = self.goes_beside(share, posted, &waiting);
            goes.then_some((index, waiting.left))
        });
        match self.overtook {
            true => all.map(|(index, _)| index).next(),
            false => all.min_by_key(|(_, left)| *left).map(|(index, _)| index),
        }
    }

    /// The number of a caller's request, if that is to run beside steps next.
    fn own_beside(&self, share: PromptShare, caller: &Arc<Caller>) -> Option<usize> {
        let next = self.next_beside(share);
        next.filter(|&index| Arc::ptr_eq(&self.posted[index].caller, caller))
    }

    /// Takes a caller's request out of the list if it is to run beside steps.
    fn take_beside(&mut self, share: PromptShare, caller: &Arc<Caller>) -> Option<Posted> {
        let index = self.own_beside(share, caller)?;
        // SAFETY: no pass has taken them.
        let before = self.posted[..index]
            .iter()
            .map(|p| unsafe { &*p.request.0 });
        self.overtook = before
            .map(Request::waiting)
            .any(|waiting| share.goes_beside(&waiting));
        let posted = self.posted.remove(index);
        self.beside = Some(Beside {
            thread: this_thread(),
            // SAFETY: it has left the list.
            sequences: unsafe { &*posted.request.0 }.sequences().collect(),
        });
        Some(posted)
    }

    /// Wakes the callers of prompts that may run beside steps.
    fn wake_beside(&self, share: PromptShare) {
        if let Some(index) = self.next_beside(share) {
            self.posted[index].caller.wake();
        }
    }

    /// The turn of the next pass. On a GPU prompts and steps take turns: steps are then recorded, and their callers come back while a prompt
    /// runs. The CPU reads its weights once for both, as a GPU does for few tokens of prompts.
    fn turn(&self, waiting: &[Waiting], share: PromptShare, model: &Model) -> Turn {
        let apart = model.device().is_cuda() && !share.is_small;
        Turn::next(waiting, apart, self.ran_prompts)
    }

    /// The tokens of a pass that each request takes, as far as it is in it.
    fn plan(&self, share: PromptShare, model: &Model) -> Planned {
        let (taken, waiting) = self.waiting(share);
        let turn = self.turn(&waiting, share, model);
        let has_prompts = waiting.iter().any(Waiting::is_prompt);
        let has_steps = !waiting.iter().all(Waiting::is_prompt);
        let steps = waiting.iter().filter(|waiting| !waiting.is_prompt());
        let rows = match turn {
            Turn::Both => steps.map(|waiting| waiting.left).sum(),
            Turn::Prompts | Turn::Steps => 0,
        };
        let most = model.pass_rows().saturating_sub(rows).max(1);
        let is_gpu = model.device().is_cuda();
        let least = match is_gpu {
            true => (model.pass_rows() / GPU_SHARE).min(most),
            false => 1,
        };
        // Sequences that generate and are not here yet wait for the end of the pass too.
        let others = self.away().next().is_some();
        let budget = match (others || has_steps, share.most) {
            (false, _) => most,
            (true, Some(wanted)) => wanted.min(most),
            (true, None) if is_gpu && share.is_small => {
                ((rows + GPU_LEAST).next_multiple_of(GPU_ROWS) - rows).min(most)
            }
            (true, None) => {
                let budget = self.times.budget(least..=most, share) + least / 2;
                (budget / least * least).clamp(least, most)
            }
        };
        let mut counts = vec![None; self.posted.len()];
        for ((index, waiting), count) in taken
            .into_iter()
            .zip(&waiting)
            .zip(plan(&waiting, turn, budget))
        {
            counts[index] = (count > 0 || waiting.left == 0).then_some(count);
        }
        Planned {
            counts,
            prompts: has_prompts && turn != Turn::Steps,
            steps: has_steps && turn != Turn::Prompts,
            looks_ahead: model.device().is_cuda() && !has_prompts,
        }
    }
}

/// Runs a part of a prompt in a pass beside steps.
fn pass_beside(model: &Model, part: Part<'_, '_>, scratch: &mut Scratch) {
    let run = |batch: Batch<'_>, scratch: &mut Scratch, logits: &mut Vec<f32>| {
        model.run_beside(batch, scratch, logits)
    };
    pass(vec![part], false, model.spec().vocab_size, scratch, run);
}

/// A planned pass.
struct Planned {
    /// The number of tokens of each request, as far as it is in the pass.
    counts: Vec<Option<usize>>,
    prompts: bool,
    steps: bool,
    /// Whether the next pass is known to be the next step.
    looks_ahead: bool,
}

impl Runner {
    /// A runner in whose passes prompts have this share while sequences generate.
    pub(super) fn new(share: PromptShare) -> Runner {
        Runner {
            share,
            ..Runner::default()
        }
    }

    /// Prompts run beside steps from now on, in the lane of the model.
    pub(super) fn run_prompts_beside(&mut self) {
        self.share.beside = true;
    }

    /// Whether prompts run beside steps, and only long ones.
    pub(super) fn takes_long_beside(&self) -> bool {
        self.share.beside && !self.share.is_small
    }

    /// Takes the lock on its state until the result is dropped: see [`fork::Held`].
    pub(super) fn locked(&'static self) -> Box<dyn Any> {
        Box::new(self.state())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let generation = fork::generation();
        if state.generation != generation {
            // Threads that waited before the fork do not exist in the child.
            *state = State {
                generation,
                ..State::default()
            };
        }
        state
    }

    /// Says that the tokens of a sequence come one after the other from now on.
    pub(super) fn generates(&self, sequence: u64) -> Generating<'_> {
        let generator = Generator {
            from: 0,
            thread: this_thread(),
            made_way: false,
            tried_after: None,
            is_refused: false,
        };
        self.state().generating.insert(sequence, generator);
        Generating {
            runner: self,
            sequence,
        }
    }

    /// Sequences that generate.
    pub(super) fn generating(&self) -> usize {
        self.state().generating.len()
    }

    /// Whether memory may become free for a sequence: other threads generate, or the sequence does and theirs have just ended.
    pub(super) fn may_get_room(&self, sequence: u64) -> bool {
        self.state().may_get_room(sequence)
    }

    /// Waits, after a sequence has freed what it could, until another generation has ended or made way and `fits` says that there is memory.
    /// Returns false if there is none and [`Runner::may_get_room`] says that none comes. Fails if the call is cancelled.
    pub(super) fn wait_for_room(&self, sequence: u64, fits: impl Fn() -> bool) -> Result<bool> {
        let mut state = self.state();
        state.preemptions += 1;
        state.ends += 1;
        let before = state.ends;
        if let Some(own) = state.generating.get_mut(&sequence) {
            own.made_way = true;
        }
        if state.comes(sequence) {
            self.complete.notify_all();
        }
        self.ended.notify_all();
        let done = loop {
            let is_alone = !state.others_generate();
            if (is_alone || state.ends != before) && fits() {
                let after = state.recent_end(sequence).filter(|_| is_alone);
                if let (Some(own), Some(_)) = (state.generating.get_mut(&sequence), after) {
                    own.tried_after = after;
                }
                break Ok(true);
            }
            if !state.may_get_room(sequence) {
                break Ok(false);
            }
            let waited = self.ended.wait_timeout(state, PATIENCE);
            drop(waited.unwrap_or_else(PoisonError::into_inner).0);
            if let Err(e) = call::check() {
                state = self.state();
                break Err(e);
            }
            state = self.state();
        };
        if let Some(own) = state.generating.get_mut(&sequence) {
            own.made_way = false;
        }
        done
    }

    /// Numbers of passes so far.
    pub(super) fn counts(&self) -> PassCounts {
        self.state().counts
    }

    /// Its work so far, and now.
    pub(super) fn work(&self) -> Work {
        let state = self.state();
        Work {
            counts: state.counts,
            tally: state.tally,
            generating: state.generating.len(),
            waiting: state.posted.iter().filter(|p| p.taken.is_none()).count(),
            preemptions: state.preemptions,
            recomputed: state.recomputed,
        }
    }

    /// Runs a request in passes with those of other threads. If the weights are trained, each pass holds them.
    pub(super) fn run(
        &self,
        (model, leased): (&Model, Option<&Leased>),
        work: Vec<NewTokens<'_>>,
        look_ahead: bool,
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
    ) -> Result<Vec<Result<Output>>> {
        call::check()?;
        leased.map_or(Ok(()), Leased::check_thread)?;
        let mut request = Request::new(work);
        if !request.is_over() {
            let caller = Arc::default();
            let lending = Lending {
                runner: self,
                caller: &caller,
            };
            self.post(&mut request, &caller, look_ahead)?;
            self.wait((model, leased), &caller, scratch);
            drop(lending);
            caller.look();
        }
        request.finish(logits, model.spec().vocab_size)
    }

    fn post(
        &self,
        request: &mut Request<'_>,
        caller: &Arc<Caller>,
        look_ahead: bool,
    ) -> Result<()> {
        let mut state = self.state();
        let is_beside = |beside: &Beside| beside.thread == this_thread();
        if state.leader == Some(this_thread()) || state.beside.as_ref().is_some_and(is_beside) {
            return Err(reentered());
        }
        let come: Vec<bool> = request.sequences().map(|id| state.comes(id)).collect();
        if come.contains(&true) || state.is_idle {
            self.complete.notify_all();
        }
        state.posted.push(Posted {
            request: Lent((&raw mut *request).cast()),
            caller: caller.clone(),
            thread: this_thread(),
            look_ahead,
            taken: None,
        });
        Ok(())
    }

    /// Waits until the caller's request has left the list. Runs it beside steps where that is possible, and leads while nobody else does.
    fn wait(
        &self,
        (model, leased): (&Model, Option<&Leased>),
        caller: &Arc<Caller>,
        scratch: &mut Scratch,
    ) {
        loop {
            let mut state = self.state();
            if !state.has(caller) {
                return;
            }
            if let Some(posted) = state.take_beside(self.share, caller) {
                if state.leader.is_none()
                    && let Some(next) = state.posted.first()
                {
                    next.caller.wake();
                }
                drop(state);
                self.run_beside(BesideSteps(self), model, posted, scratch);
                continue;
            }
            if state.leader.is_none() {
                state.leader = Some(this_thread());
                drop(state);
                self.lead(Lead(self), (model, leased), caller, scratch);
                continue;
            }
            drop(state);
            caller.sleep();
            caller.look();
        }
    }

    /// Runs parts of a prompt beside the steps of a leader, to its end or for as long as there are steps.
    fn run_beside(
        &self,
        place: BesideSteps<'_>,
        model: &Model,
        posted: Posted,
        scratch: &mut Scratch,
    ) {
        let most = self.share.part_beside(model.rows_beside().unwrap_or(1));
        // SAFETY: the caller is this thread, and the request is in no list.
        let request = unsafe { &mut *posted.request.0 };
        let mut has_run = false;
        loop {
            call::add(request.adopt() as u64);
            let waiting = request.waiting();
            let mut state = self.state();
            let others = state.posted.iter().filter(|posted| posted.taken.is_none());
            // SAFETY: no pass has taken them.
            let mut others = others.map(|posted| unsafe { &*posted.request.0 }.waiting());
            let others_wait = has_run && others.any(|waiting| self.share.goes_beside(&waiting));
            let goes_on = match has_run {
                true => waiting.is_prompt(),
                false => self.share.goes_beside(&waiting),
            };
            if others_wait || !goes_on || !state.has_steps_for(&posted) {
                state.last_beside = state.last_beside.filter(|_| others_wait);
                state.posted.insert(0, posted);
                break;
            }
            drop(state);
            let count = plan(&[waiting], Turn::Prompts, most)[0];
            let end = waiting.from.unwrap_or(0) + count;
            if let Err(e) = model.reserve_beside(count, end) {
                tracing::warn!("prompts no longer run beside steps: {e}");
                let mut state = self.state();
                state.has_no_lane = true;
                state.posted.insert(0, posted);
                break;
            }
            let start = Instant::now();
            pass_beside(model, request.part(count), scratch);
            let time = start.elapsed();
            tracing::trace!(rows = count, ?time, "pass beside steps");
            call::add(count as u64);
            has_run = true;
            let mut state = self.state();
            state.counts.passes += 1;
            state.counts.requests += 1;
            state.tally += request.take_tally();
            state.last_beside = Some(time).filter(|_| !request.is_over());
            if request.is_over() {
                break;
            }
        }
        drop(place);
    }

    /// Runs a prompt in one pass beside steps, unless one runs there or a pass runs on this thread. Faults of its values are not errors: it has
    /// run.
    pub(super) fn run_first_beside(&self, model: &Model, prompt: NewTokens<'_>) -> Result<()> {
        let mut request = Request::new(vec![prompt]);
        let mut state = self.state();
        if state.beside.is_some() || state.leader == Some(this_thread()) {
            return Ok(());
        }
        state.beside = Some(Beside {
            thread: this_thread(),
            sequences: request.sequences().collect(),
        });
        drop(state);
        let _place = BesideSteps(self);
        let count = request.waiting().left;
        model.reserve_beside(count, count)?;
        pass_beside(model, request.part(count), &mut Scratch::default());
        let vocabulary = model.spec().vocab_size;
        request.finish(&mut Vec::new(), vocabulary).map(drop)
    }

    /// Holds the weights for a pass, once no step of their trainer is due. While it waits, requests whose calls were cancelled end. `None` if
    /// the caller's own request has ended.
    fn hold(&self, leased: &Leased, caller: &Arc<Caller>) -> Option<Held> {
        let is_over = || {
            caller.look();
            let mut state = self.state();
            state.end_cancelled();
            !state.has(caller)
        };
        match leased.hold(is_over) {
            Ok(held) => Some(held),
            Err(e) => {
                self.state().fail(caller, e);
                None
            }
        }
    }

    /// Runs passes until the caller's own request is over, or is to run beside steps.
    fn lead(
        &self,
        lead: Lead<'_>,
        (model, leased): (&Model, Option<&Leased>),
        caller: &Arc<Caller>,
        scratch: &mut Scratch,
    ) {
        let vocabulary = model.spec().vocab_size;
        let mut held = None;
        loop {
            caller.look();
            if let Some(leased) = leased.filter(|_| held.is_none()) {
                held = self.hold(leased, caller);
                if held.is_none() {
                    return;
                }
            }
            let mut state = self.gather(model);
            state.end_cancelled();
            state.renew();
            if !state.has(caller) {
                return;
            }
            state.adopt();
            if state.own_beside(self.share, caller).is_some() {
                return;
            }
            state.wake_beside(self.share);
            let planned = state.plan(self.share, model);
            if planned.counts.iter().all(Option::is_none) {
                self.idle(state);
                continue;
            }
            let mut taken: Vec<(Lent, usize)> = Vec::new();
            let mut is_own = true;
            let mut look_ahead = planned.looks_ahead;
            let (mut only, mut is_only) = (None, true);
            for (posted, count) in state.posted.iter_mut().zip(planned.counts) {
                posted.taken = count;
                let Some(count) = count else { continue };
                look_ahead &= posted.look_ahead;
                is_own &= Arc::ptr_eq(&posted.caller, caller);
                // SAFETY: no pass has taken it yet.
                if !unsafe { &*posted.request.0 }.waiting().is_prompt() {
                    is_only &= *only.get_or_insert(posted.thread) == posted.thread;
                }
                taken.push((posted.request, count));
            }
            // A device that ran ahead began the step while the host was between passes.
            let since = state.ahead_since.take().filter(|_| !planned.prompts);
            let ahead = since.map_or(Duration::ZERO, |since| since.elapsed().min(LONGEST_WAIT));
            state.counts.passes += 1;
            state.counts.requests += taken.len() as u64;
            state.ran_prompts = planned.prompts;
            state.runs_steps = planned.steps;
            drop(state);

            // SAFETY: the callers wait, and use their requests no more before they have left the list; each is in the list once.
            let requests = taken
                .iter()
                .map(|(lent, count)| (unsafe { &mut *lent.0 }, *count));
            let mut parts: Vec<_> = requests.collect();
            // A device that ran ahead expects the sequences in the same order.
            parts.sort_by_key(|(request, _)| request.sequences().min());
            let (count, rows) = (parts.len(), parts.iter().map(|(_, count)| count).sum());
            let parts = parts
                .into_iter()
                .map(|(request, count)| request.part(count));
            let parts = parts.collect();
            let start = Instant::now();
            let run = |batch: Batch<'_>, scratch: &mut Scratch, logits: &mut Vec<f32>| {
                model.run(batch, scratch, logits)
            };
            match is_own {
                true => pass(parts, look_ahead, vocabulary, scratch, run),
                // The call of one thread does not end those of others.
                false => call::outside(|| pass(parts, look_ahead, vocabulary, scratch, run)),
            }
            let time = start.elapsed() + ahead;
            let Planned { prompts, steps, .. } = planned;
            tracing::trace!(rows, requests = count, prompts, steps, ?time, "pass");
            let mut state = self.state();
            state.times.record(rows, prompts, steps, time);
            state.runs_steps = false;
            if steps {
                let only = only.filter(|_| is_only);
                let at = Instant::now();
                state.ran_steps = Some(RanSteps { at, only });
            }
            state.ahead_since = look_ahead.then(Instant::now);
            let ended = state.end_pass(is_own);
            if !state.has_thrown_back() {
                held = None;
            }
            drop(state);
            let wake = || {
                let others = ended.iter().filter(|ended| !Arc::ptr_eq(ended, caller));
                others.for_each(|other| other.wake());
            };
            if ended.iter().any(|ended| Arc::ptr_eq(ended, caller)) {
                // Callers that wake up may lead at once.
                drop(lead);
                return wake();
            }
            wake();
        }
    }

    /// Waits while all requests are to run beside steps: until another comes, the place there is free, or no step has come for a moment.
    fn idle(&self, mut state: MutexGuard<'_, State>) {
        let end = state.ran_steps.map(|ran| ran.at + LONGEST_WAIT);
        let left = end.map_or(Duration::ZERO, |end| {
            end.saturating_duration_since(Instant::now())
        });
        state.is_idle = true;
        let waited = self.complete.wait_timeout(state, left);
        waited.unwrap_or_else(PoisonError::into_inner).0.is_idle = false;
    }

    /// Waits for a moment for sequences that generate. A device that ran ahead runs the step of all of them meanwhile, and without one of them in
    /// vain, so the moment begins when that step has ended.
    fn gather(&self, model: &Model) -> MutexGuard<'_, State> {
        let mut state = self.state();
        if state.turn(&state.waiting(self.share).1, self.share, model) == Turn::Prompts {
            return state;
        }
        state.expect();
        let step = state.times.step().unwrap_or(LONGEST_WAIT);
        let now = Instant::now();
        let from = state.ahead_since.map_or(now, |since| now.max(since + step));
        let until = from + (step / 2).min(LONGEST_WAIT);
        while !state.expected.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.complete.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let again = state.counts.passes + FORGETS;
        for late in std::mem::take(&mut state.expected) {
            if let Some(generator) = state.generating.get_mut(&late) {
                generator.from = again;
            }
        }
        state
    }
}
