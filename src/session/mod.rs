//! Floor 7: conversations. A session is one sequence of tokens run by a shared model: its KV cache, the logits of its last token, and the
//! conversation of its chat turns. Knows nothing of weights, kernels or training.
//!
//! On the CPU a token's logits have the same bits alone, in a batch and in a prompt. On a GPU the same calls give the same bits, and other
//! calls may differ by rounding, unless the model is [deterministic](crate::model::LoadOptions::deterministic). See
//! [`Model::run`](crate::model::Model::run).

mod adjustments;
mod answer;
mod batch;
mod chat;
mod companion;
mod constraint;
mod conversation;
mod drafts;
mod embed;
mod filters;
mod forks;
mod generate;
mod generation;
mod generation_loop;
mod lookup;
mod next;
mod options;
mod pace;
mod probabilities;
mod processor;
mod queue;
mod repetition;
mod sampler;
mod score;
mod state_file;
mod text;
mod timings;
mod transcript;

use std::ops::Range;
use std::sync::Arc;

use crate::base::error::bail;
use crate::base::{ErrorKind, Result, alloc, call, memory};
use crate::engine::{LoadedAdapter, NewTokens, Sequence, Served};
use crate::model::{Choice, KvType, Logits, Output, Scratch, TokenMask, Wanted};

pub use crate::model::SamplingOptions;
pub use adjustments::LogitAdjustments;
pub use answer::Part;
pub use batch::{StepChoice, step, step_choose, step_choose_with};
pub use chat::{render, tokenize};
pub use conversation::ChatOptions;
pub use drafts::DraftCounts;
pub use embed::{EmbedOptions, EmbedPrompt, Embedding};
pub use forks::{Forked, Forks};
pub use generation::{Generation, Piece};
pub use options::{Finish, GenerateOptions, MOST_DRAFTS, ToolCalls};
pub use probabilities::{MOST_TOP, TokenProbabilities};
pub use processor::LogitsProcessor;
pub use queue::{
    Happened, Queue, QueueCounts, QueueEvent, QueueOptions, Submission, Submitted, Work,
};
pub use repetition::Dry;
pub use sampler::Sampler;
pub use score::ScoredToken;
pub use timings::Timings;
pub use transcript::Transcript;

use adjustments::Adjuster;
use companion::Companion;
use conversation::{Conversation, Plan};
use next::Next;
use pace::Paces;
use probabilities::check_top;

/// Policy for tokens that no longer fit in the context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Eviction {
    /// Refuses them: [`ErrorKind::ContextFull`], or the end of a generation.
    #[default]
    Error,
    /// Evicts the older half of the tokens after the first `keep`, or more if that is not enough. Keys carry their positions, so the
    /// remaining tokens are recomputed: the session equals a fresh one that was given those tokens. A conversation evicts whole turns, the
    /// oldest first; it always keeps the messages before the first user message, and the last question.
    DropOldest {
        /// Number of tokens at the beginning that are never evicted.
        keep: usize,
    },
    /// Keeps the first tokens, on which attention rests, and a window of the most recent ones. A full context evicts tokens between them, in
    /// a generation too, which goes on for as long as its options say. The remaining tokens are recomputed as for
    /// [`DropOldest`](Eviction::DropOldest), at their new positions. Such a session has no chat turns, through which the window would cut.
    SlidingWindow {
        /// Number of tokens at the beginning that are never evicted: [`SINKS`] suffice for most models.
        sinks: usize,
        /// Number of tokens evicted at a time, or more if that is not enough; 0 for half of those after the sinks. The fewer they are, the more
        /// often the remaining ones are recomputed.
        drop: usize,
    },
}

/// Number of first tokens that keep the attention of most models as it was in a shorter context.
pub const SINKS: usize = 4;

impl Eviction {
    /// Number of first tokens that are kept, and of those after them that are evicted at a time, 0 for half. `None` if it evicts none.
    fn sizes(self) -> Option<(usize, usize)> {
        match self {
            Eviction::Error => None,
            Eviction::DropOldest { keep } => Some((keep, 0)),
            Eviction::SlidingWindow { sinks, drop } => Some((sinks, drop)),
        }
    }

    /// Fails unless a context has room for tokens that are kept and others.
    fn check(self, context: usize) -> Result<()> {
        match self.sizes() {
            Some((keep, _)) if keep >= context => bail!(
                InvalidArgument,
                "keeping the first {keep} tokens of a context of {context} leaves nothing to drop; keep fewer"
            ),
            Some((keep, drop)) if drop >= context - keep => bail!(
                InvalidArgument,
                "dropping {drop} tokens at a time of a context of {context} leaves none after the first {keep}; drop fewer"
            ),
            _ => Ok(()),
        }
    }
}

/// Options of a new session.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SessionOptions {
    /// Tokens it can hold; 0 takes the model's maximum. Memory is allocated as tokens come.
    pub context: usize,
    /// Element type of cached keys and values.
    pub kv: KvType,
    /// The system prompt of chat turns.
    pub system: Option<String>,
    /// Policy for a full context.
    pub eviction: Eviction,
    /// Keeps the session from sharing the beginning of its tokens with others: it runs all of them, and no other session begins with its
    /// blocks. For measurements, and where the time of a first token must not tell what others have asked.
    pub private: bool,
    /// The adapter that its tokens run with, from the first to the last; `None` for the model as it is. Of the same model, which drafts
    /// without it.
    pub adapter: Option<Arc<LoadedAdapter>>,
}

/// A sequence of tokens and the state needed to continue it.
///
/// A call that fails leaves the session as it was. A long call is cancelled with its thread's [`call`], to which it reports the number of
/// tokens run. Tokens at the end may be pending: the last token of a generation is run by the next call that needs its logits, together
/// with the tokens that follow it.
pub struct Session {
    model: Arc<Served>,
    options: SessionOptions,
    tokens: Vec<u32>,
    /// Number of tokens that eviction has dropped.
    evicted: usize,
    /// Holds the first tokens; later tokens are pending.
    cache: Sequence,
    scratch: Scratch,
    next: Next,
    conversation: Conversation,
    /// Seed of draws in steps whose options have none. All steps share it, so that a device can look ahead.
    seed: u64,
    /// How many tokens it drafts at a time.
    paces: Paces,
    /// The sequence of the draft model of its last generation.
    companion: Option<Companion>,
    /// The session before the current call, which it goes back to if that fails.
    before: Option<Saved>,
    forks: Arc<Forks<Session>>,
    /// Log-probabilities of the last choice that asked for them.
    choice: Option<(u32, TokenProbabilities)>,
}

/// A snapshot of a session, to roll back to.
struct Saved {
    tokens: Vec<u32>,
    evicted: usize,
    cache: Sequence,
    conversation: Conversation,
}

/// How to make room for more tokens.
enum MakeRoom {
    /// The tokens fit already.
    Free,
    /// By evicting these tokens.
    Tokens(Range<usize>),
    /// By dropping the oldest turns.
    Turns(Plan),
}

impl Session {
    /// An empty session of `model`.
    pub fn new(model: Arc<Served>, options: &SessionOptions) -> Result<Session> {
        let most = model.spec().max_positions;
        let system = options.system.as_ref().map_or(0, String::len);
        let _system = alloc::Budget::copies(system).set_aside()?;
        let mut options = options.clone();
        if options.context == 0 {
            options.context = most;
        }
        options.eviction.check(options.context)?;
        let mut cache = model.sequence(options.context, options.kv)?;
        cache.set_drafts(model.has_drafter())?;
        cache.set_sharing(!options.private);
        // The sequence alone keeps it, so that it is counted as used for as long as it is in memory.
        if let Some(adapter) = options.adapter.take() {
            cache.set_adapter(adapter)?;
        }
        Ok(Session {
            model,
            options,
            tokens: Vec::new(),
            evicted: 0,
            cache,
            scratch: Scratch::new(),
            next: Next::default(),
            conversation: Conversation::default(),
            seed: sampler::new_seed(),
            paces: Paces::default(),
            companion: None,
            before: None,
            forks: Arc::default(),
            choice: None,
        })
    }

    /// The model that runs it.
    pub fn model(&self) -> &Arc<Served> {
        &self.model
    }

    /// Tokens it holds.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens appended so far, including evicted ones. This is the number of the next draw, see [`Sampler::after`].
    pub fn appended(&self) -> usize {
        self.evicted + self.tokens.len()
    }

    /// Tokens that a full context has evicted.
    pub fn evicted(&self) -> usize {
        self.evicted
    }

    /// Whether it holds no token.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Tokens it can hold.
    pub fn context(&self) -> usize {
        self.options.context
    }

    /// The tokens it holds.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The adapter that its tokens run with.
    pub fn adapter(&self) -> Option<&Arc<LoadedAdapter>> {
        self.cache.adapter()
    }

    /// Bytes of its cached keys and values, including blocks shared with forks.
    pub fn kv_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Appends `tokens` and runs them in prefill chunks.
    pub fn prefill(&mut self, tokens: &[u32]) -> Result<()> {
        self.append(tokens, tokens.len())
    }

    /// Appends `tokens` and runs them one after the other.
    pub fn prefill_token_by_token(&mut self, tokens: &[u32]) -> Result<()> {
        self.append(tokens, 1)
    }

    /// Appends one token and runs it.
    pub fn decode(&mut self, token: u32) -> Result<()> {
        self.append(&[token], 1)
    }

    /// The logits of the next token, one for each entry of the model's vocabulary.
    pub fn logits(&mut self) -> Result<&[f32]> {
        self.flush()?;
        self.flushed()
    }

    /// The argmax of the logits, the first if several are equal: the choice of a greedy sampler. On a GPU the logits stay on the device.
    pub fn argmax(&mut self) -> Result<u32> {
        self.flush_and_choose(&mut Sampler::new(&SamplingOptions::default())?, None, false)
    }

    /// Chooses the next token without appending it.
    pub fn sample(&mut self, sampler: &mut Sampler) -> Result<u32> {
        self.flush()?;
        sampler.sample(self.flushed()?, &self.tokens)
    }

    /// As [`sample`](Self::sample), from adjusted logits. With `top` it keeps log-probabilities for [`choice`](Self::choice). Fails for
    /// adjustments that count the tokens of a generation.
    pub fn sample_adjusted(
        &mut self,
        sampler: &mut Sampler,
        adjustments: &LogitAdjustments,
        top: Option<usize>,
    ) -> Result<u32> {
        adjustments.check(self.model.spec().vocab_size)?;
        adjustments.check_without_counts("a choice without a generation")?;
        check_top(top)?;
        self.flush()?;
        let logits = self.flushed()?;
        let token = match Adjuster::of(adjustments, sampler.options(), &self.model)? {
            None => sampler.sample(logits, &self.tokens)?,
            Some(mut adjuster) => {
                let history = adjuster.unpenalized(&self.tokens);
                let choice = sampler.choice(&self.tokens);
                sampler.sample(adjuster.adjusted(logits, &choice)?, history)?
            }
        };
        let probabilities = |top| (token, TokenProbabilities::of(logits, token, top));
        self.choice = top.map(probabilities);
        Ok(token)
    }

    /// The token of the last single choice, by [`sample_adjusted`](Self::sample_adjusted) or in a [step](step_choose_with), with its
    /// log-probabilities, if that asked for them.
    pub fn choice(&self) -> Option<(u32, &TokenProbabilities)> {
        let (token, probabilities) = self.choice.as_ref()?;
        Some((*token, probabilities))
    }

    /// Drops the tokens from `len` on. The conversation is truncated to match: it ends within the answer that contains `len`, or with the
    /// last answer before it. A session truncated to 0 has no conversation.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        if len > self.tokens.len() {
            bail!(
                InvalidArgument,
                "cannot cut {} tokens to {len}, which is more",
                self.tokens.len()
            );
        }
        if len == self.tokens.len() {
            return Ok(());
        }
        let conversation = self.conversation_until(len)?;
        self.cache.truncate(len.min(self.cache.len()))?;
        self.tokens.truncate(len);
        if len == 0 {
            self.evicted = 0;
        }
        self.next.forget();
        self.conversation = conversation;
        self.seed = sampler::new_seed();
        Ok(())
    }

    /// Drops everything except the options.
    pub fn reset(&mut self) -> Result<()> {
        self.truncate(0)
    }

    /// Forks of this session while it generates, for other threads and for the callback.
    pub fn forks(&self) -> &Arc<Forks<Session>> {
        &self.forks
    }

    /// A second session in the same state. The two share blocks of the cache until either writes to one.
    pub fn fork(&self) -> Result<Session> {
        let bytes = size_of_val(&*self.tokens)
            + self.next.logits().map_or(0, size_of_val)
            + self.cache.table_bytes()
            + self.companion.as_ref().map_or(0, Companion::table_bytes)
            + self.text_bytes();
        let _copies = alloc::Budget::copies(bytes).set_aside()?;
        let mut fork = Session::new(self.model.clone(), &self.options)?;
        fork.tokens.clone_from(&self.tokens);
        fork.evicted = self.evicted;
        fork.cache = self.cache.clone();
        // Tokens that a generation has verified ahead are not the session's yet.
        fork.cache
            .truncate(self.cache.len().min(self.tokens.len()))?;
        fork.next.clone_from(&self.next);
        fork.conversation = self.conversation.clone();
        fork.paces = self.paces.clone();
        fork.companion = self.companion.clone();
        Ok(fork)
    }

    /// Appends `tokens` and runs them, `step` at a time; evicts if the options allow it and it is necessary.
    fn append(&mut self, tokens: &[u32], step: usize) -> Result<()> {
        self.model.check_tokens(tokens)?;
        if self.fits(tokens.len()) {
            return self.run(tokens, step);
        }
        self.undone_on_error(|session| {
            session.make_room(tokens.len())?;
            session.run(tokens, step)
        })
    }

    fn run(&mut self, tokens: &[u32], step: usize) -> Result<()> {
        self.forget_outdated();
        let (before, weights) = (self.tokens.len(), self.cache.weights());
        call::expect((tokens.len() + before - self.cache.len().min(before)) as u64);
        memory::make_room(&mut self.tokens, tokens.len())?;
        let next = std::mem::take(&mut self.next);
        for part in tokens.chunks(step.max(1)) {
            self.push(part);
            if let Err(e) = self.flush().and_then(|()| call::check()) {
                self.cache.truncate(before.min(self.cache.len()))?;
                self.tokens.truncate(before);
                // Logits are those of a cache that holds every token. A call that is cancelled after its last pass has those of tokens that
                // are gone.
                self.next = match self.cache.len() == before && self.cache.weights() == weights {
                    true => next,
                    false => Next::default(),
                };
                return Err(e);
            }
        }
        Ok(())
    }

    /// Appends tokens without running them.
    fn push(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
        self.next.forget();
    }

    /// The token that `sampler` chooses next, one that `mask` allows. On a GPU the logits stay on the device if a single token is pending. With
    /// `look_ahead` the device starts to run the chosen token before the next call asks for it.
    fn flush_and_choose(
        &mut self,
        sampler: &mut Sampler,
        mask: Option<TokenMask<'_>>,
        look_ahead: bool,
    ) -> Result<u32> {
        self.forget_outdated();
        let greedy = sampler.options().is_greedy() && mask.is_none();
        if let Some(token) = self.next.argmax().filter(|_| greedy) {
            return Ok(token);
        }
        let token = match self.chooses_on_device() {
            true => self.choose_on_device(sampler, mask, look_ahead)?,
            false => {
                self.flush()?;
                sampler.sample_within(self.flushed()?, &self.tokens, mask)?
            }
        };
        if greedy {
            self.next.set_argmax(token);
        }
        Ok(token)
    }

    /// Whether a device can choose the next token where it computes the logits: a single token is pending.
    fn chooses_on_device(&self) -> bool {
        let pending = self.cache.len().min(self.tokens.len());
        let is_single = self.tokens.len() - pending == 1;
        is_single && self.model.device().is_cuda() && self.next.logits().is_none()
    }

    /// The next token, chosen on the device after the pending one: see [`chooses_on_device`](Self::chooses_on_device).
    fn choose_on_device(
        &mut self,
        sampler: &mut Sampler,
        mask: Option<TokenMask<'_>>,
        look_ahead: bool,
    ) -> Result<u32> {
        let pending = self.cache.len().min(self.tokens.len());
        let work = vec![NewTokens {
            tokens: &self.tokens[pending..],
            sequence: &mut self.cache,
            wanted: Wanted::Token(Choice {
                allowed: mask,
                ..sampler.choice(&self.tokens)
            }),
        }];
        let (scratch, mut logits) = (&mut self.scratch, Vec::new());
        let mut outputs = self.model.run(work, look_ahead, scratch, &mut logits)?;
        match outputs.pop().transpose()? {
            Some(Output::Token(token)) => {
                sampler.moves_on();
                Ok(token)
            }
            other => bail!(Internal, "{other:?} in the place of a token"),
        }
    }

    /// Passes over a choice, because `token` is to be the next one. With `in_step` a device that can choose it does so, as its only token, and
    /// so goes on with it in the step of other sequences; else the token only becomes pending.
    fn choose_given(
        &mut self,
        sampler: &mut Sampler,
        token: u32,
        in_step: bool,
        look_ahead: bool,
    ) -> Result<()> {
        let in_step = in_step && {
            self.forget_outdated();
            self.chooses_on_device()
        };
        if !in_step {
            sampler.moves_on();
            return Ok(());
        }
        let mut only = vec![0; token as usize / 32 + 1];
        only[token as usize / 32] = 1 << (token % 32);
        self.choose_on_device(sampler, Some(TokenMask(&only)), look_ahead)
            .map(drop)
    }

    /// Runs the pending tokens, so that the logits are those after the last token.
    fn flush(&mut self) -> Result<()> {
        if self.tokens.is_empty() {
            bail!(
                InvalidArgument,
                "the session is empty, so nothing says what comes next; prefill a prompt first"
            );
        }
        self.forget_outdated();
        if self.next.logits().is_some() {
            return Ok(());
        }
        self.cache
            .truncate(self.cache.len().min(self.tokens.len() - 1))?;
        let cached = self.cache.len();
        call::expect((self.tokens.len() - cached) as u64);
        let (cache, scratch) = (&mut self.cache, &mut self.scratch);
        self.next.fill(|logits| {
            let tokens = &self.tokens[cached..];
            self.model
                .forward(tokens, cache, scratch, Logits::Last, logits)
        })
    }

    /// Calls `run` within a generation. If it finds no memory, the session makes way for others that generate, and then calls it again.
    fn making_way<T>(&mut self, mut run: impl FnMut(&mut Self) -> Result<T>) -> Result<T> {
        loop {
            match run(self) {
                Err(e) if e.kind() == ErrorKind::OutOfMemory && self.makes_way()? => {}
                done => return done,
            }
        }
    }

    /// After a refusal of memory: gives blocks up to other generations and waits until they fit again. Returns false if none will.
    fn makes_way(&mut self) -> Result<bool> {
        if self.forget_outdated() {
            return Ok(true);
        }
        if self.companion.take().is_some() {
            tracing::warn!(
                "without memory for more tokens, the generation goes on without its draft model"
            );
            return Ok(true);
        }
        // Dropping positions that the sequence before the call holds frees nothing.
        let kept = self.before.as_ref().map_or(0, |saved| saved.cache.len());
        self.next.forget();
        self.forks.set_busy_with("waits for memory");
        self.model
            .make_way(&mut self.cache, kept, self.tokens.len() + 1)
    }

    /// Forgets what older weights than the model's have given, if a trainer has changed them: the logits, and the blocks of the sequence to
    /// which the session would go back. Returns whether that freed any. The next pass runs the tokens again.
    fn forget_outdated(&mut self) -> bool {
        if self.cache.is_outdated() {
            self.next.forget();
        }
        match &mut self.before {
            Some(saved) if saved.cache.is_outdated() => saved.cache.truncate(0).is_ok(),
            _ => false,
        }
    }

    /// The logits, once pending tokens have run.
    fn flushed(&self) -> Result<&[f32]> {
        match self.next.logits() {
            Some(logits) => Ok(logits),
            None => bail!(Internal, "logits of tokens that have not run"),
        }
    }

    fn fits(&self, count: usize) -> bool {
        count <= self.options.context - self.tokens.len()
    }

    /// Checks that the session can take `token` in a step. Changes nothing.
    pub fn check_step(&self, token: u32) -> Result<()> {
        self.model.check_tokens(&[token])?;
        self.room_for(1).map(|_| ())
    }

    /// Decides what to evict so that `count` more tokens fit, if the options allow it.
    fn room_for(&self, count: usize) -> Result<MakeRoom> {
        if self.fits(count) {
            return Ok(MakeRoom::Free);
        }
        let (context, len) = (self.options.context, self.tokens.len());
        if count > context {
            bail!(
                ContextFull,
                "{count} tokens do not fit in a context of {context}"
            );
        }
        let Some((keep, drop)) = self.options.eviction.sizes() else {
            bail!(
                ContextFull,
                "{count} tokens do not fit: {len} of {context} are in use"
            );
        };
        if self.conversation.answer.is_some() {
            return match self.shortened_for(count)? {
                Some(plan) => Ok(MakeRoom::Turns(plan)),
                None => bail!(
                    ContextFull,
                    "{count} tokens do not fit in a context of {context} beside the last turn and what is kept before it"
                ),
            };
        }
        let keep = keep.min(len);
        let needed = len + count - context;
        if needed > len - keep {
            bail!(
                ContextFull,
                "{count} tokens do not fit in a context of {context} beside the {keep} that are kept"
            );
        }
        let wanted = match drop {
            0 => (len - keep).div_ceil(2),
            drop => drop.min(len - keep),
        };
        Ok(MakeRoom::Tokens(keep..keep + needed.max(wanted)))
    }

    /// Evicts old tokens until `count` more fit, if the options allow it. The tokens after the kept prefix are then pending.
    fn make_room(&mut self, count: usize) -> Result<()> {
        alloc::check()?;
        match self.room_for(count)? {
            MakeRoom::Free => {}
            MakeRoom::Tokens(dropped) => {
                self.tokens.drain(dropped.clone());
                self.evict(dropped.len());
                self.cache.truncate(dropped.start.min(self.cache.len()))?;
                self.next.forget();
                self.conversation = Conversation::default();
            }
            MakeRoom::Turns(plan) => self.shorten(plan)?,
        }
        memory::make_room(&mut self.tokens, count)
    }

    /// Counts evicted tokens.
    fn evict(&mut self, count: usize) {
        if count > 0 {
            self.evicted += count;
            self.model.count_evicted(count);
            let left = self.tokens.len();
            tracing::debug!("a full context has dropped {count} tokens and has {left} left");
        }
    }

    /// Bytes of the conversation's texts.
    fn text_bytes(&self) -> usize {
        self.options.system.as_ref().map_or(0, String::len) + self.conversation.bytes()
    }

    fn saved(&self) -> Result<Saved> {
        let bytes = size_of_val(&*self.tokens) + self.text_bytes() + self.cache.table_bytes();
        let _copies = alloc::Budget::copies(bytes).set_aside()?;
        Ok(Saved {
            tokens: self.tokens.clone(),
            evicted: self.evicted,
            cache: self.cache.clone(),
            conversation: self.conversation.clone(),
        })
    }

    fn go_back(&mut self, saved: Saved) {
        self.tokens = saved.tokens;
        self.evicted = saved.evicted;
        self.cache = saved.cache;
        self.conversation = saved.conversation;
        self.next.forget();
    }

    /// Calls `change`; if it fails, restores the session.
    fn undone_on_error<T>(&mut self, change: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let saved = self.saved()?;
        let outer = self.before.replace(saved);
        let result = change(self);
        let saved = std::mem::replace(&mut self.before, outer);
        if let (Err(_), Some(saved)) = (&result, saved) {
            self.go_back(saved);
        }
        result
    }
}

impl Forked for Session {
    fn fork(&self) -> Result<Session> {
        Session::fork(self)
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Session({} of {} tokens, {:?})",
            self.tokens.len(),
            self.options.context,
            self.model
        )
    }
}
