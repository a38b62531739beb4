//! The generation loop: chooses a token from the logits, decodes it to text, and repeats until a stop condition holds.

use std::collections::VecDeque;
use std::ops::ControlFlow;

use super::adjustments::Adjuster;
use super::answer::Answer;
use super::constraint::{Constraint, Next};
use super::drafts::{DraftCounts, Drafts, StepStart};
use super::options::{Finish, GenerateOptions};
use super::probabilities::TokenProbabilities;
use super::timings::{Stopwatch, Timings};
use super::{Eviction, Part, Sampler, Session, Transcript};
use crate::base::error::bail;
use crate::base::{Error, ErrorKind, Result, call, memory};
use crate::model::{Logits, TokenMask};
use crate::text::{AnswerStage, ToolCall};

/// The result of a generation.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The tokens, which the session now holds but for evicted ones. A stop token is not among them.
    pub tokens: Vec<u32>,
    /// Their text, without special tokens and up to a stop string. Excludes an incomplete character at the end: its bytes come with the
    /// text of the next generation if that completes it. In a chat, the content of the answer.
    pub text: String,
    /// The reasoning before the answer, in a chat.
    pub reasoning: String,
    /// The tool calls of the answer, in a chat.
    pub tool_calls: Vec<ToolCall>,
    /// The seed of the draws, which repeats them.
    pub seed: u64,
    /// The reason why it ended.
    pub finish: Finish,
    /// Tokens before it: all tokens that the session held, or for a chat turn those that the turn added.
    pub prompt_tokens: usize,
    /// Tokens of `prompt_tokens` that did not run for it, because the session or blocks of others held their keys and values.
    pub cached_tokens: usize,
    /// How often it gave its memory up to other generations, and ran its tokens again.
    pub preemptions: usize,
    /// How long it took.
    pub timings: Timings,
    /// How many tokens were drafted, and how many of them were right.
    pub drafts: DraftCounts,
    /// Number of tokens that the full context has evicted for it and its prompt. The session then holds no more than the last of its tokens.
    pub evicted: usize,
    /// Set if it ended because its logits processor wrote logits from which no token can be chosen; `finish` is then
    /// [`Finish::Cancelled`].
    pub refusal: Option<Error>,
}

impl Generation {
    /// A generation without tokens.
    fn new(seed: u64) -> Self {
        Generation {
            tokens: Vec::new(),
            text: String::new(),
            reasoning: String::new(),
            tool_calls: Vec::new(),
            seed,
            finish: Finish::Length,
            prompt_tokens: 0,
            cached_tokens: 0,
            preemptions: 0,
            timings: Timings::default(),
            drafts: DraftCounts::default(),
            evicted: 0,
            refusal: None,
        }
    }

    /// Fails if it was ended from outside before its first token, so that what came before it is undone.
    pub(super) fn begun(self) -> Result<Self> {
        if self.finish.is_from_outside() && self.tokens.is_empty() {
            if let Some(refusal) = self.refusal {
                return Err(refusal);
            }
            bail!(Cancelled, "cancelled before the first token");
        }
        Ok(self)
    }
}

/// A generated token, or text without a token: text that was held back until the end, or more text that the previous token completes. The
/// concatenated content pieces are the text of the generation. Only a callback that breaks misses text that was held back as the possible
/// beginning of a stop string.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Piece<'a> {
    /// The token, if this is its first piece.
    pub token: Option<u32>,
    /// The kind of the text.
    pub part: Part,
    /// The text that the token completes; empty while a character or a possible stop string is incomplete.
    pub text: &'a str,
    /// If requested, log-probabilities of the token and of the most probable ones; `None` for tokens that a grammar forces.
    pub probabilities: Option<&'a TokenProbabilities>,
}

/// Tokens that take longer to run than a step may.
const LONG_STEP: usize = 32;

impl Session {
    /// Generates from the current end of the session. If it fails, the session is as it was before. If the thread's [`call`] is cancelled,
    /// it does not fail: it ends as [`Finish::Cancelled`] with the tokens so far, possibly none. A [`refusal`](Generation::refusal) leaves
    /// the tokens so far too.
    pub fn generate(
        &mut self,
        options: &GenerateOptions,
        on_piece: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Generation> {
        self.generate_after(&[], options, on_piece)
    }

    /// Appends `prompt` and generates from there, like [`prefill`](Session::prefill) and [`generate`](Session::generate) in one. With
    /// `max_tokens` 0 it only runs the prompt. If it fails, or is cancelled before its first token, the session is as it was before.
    pub fn generate_after(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        on_piece: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Generation> {
        self.or_cancelled(options, |session| {
            session.model.check_tokens(prompt)?;
            session.follow_drafts(options)?;
            options.check(&session.model, false)?;
            session.undone_on_error(|session| {
                let model = session.model.clone();
                let watch = Stopwatch::start(&mut session.cache);
                let _generating = model.generates(&session.cache);
                let evicted = session.evicted;
                if !prompt.is_empty() {
                    session.make_room(prompt.len())?;
                    session.push(prompt);
                    if options.max_tokens == 0 {
                        session.making_way(Session::flush)?;
                    }
                }
                let text = Transcript::new(&session.model, &session.tokens, options)?;
                let held = Constraint::new(&model, options, None, None)?;
                let mut generation =
                    session.generate_text(watch, text, None, held, options, on_piece)?;
                generation.evicted = session.evicted - evicted;
                match prompt.is_empty() {
                    true => Ok(generation),
                    false => generation.begun(),
                }
            })
        })
    }

    /// Runs a generation. If it is cancelled before its first token, the session is as it was before and the result has no tokens.
    pub(super) fn or_cancelled(
        &mut self,
        options: &GenerateOptions,
        run: impl FnOnce(&mut Self) -> Result<Generation>,
    ) -> Result<Generation> {
        match call::check().and_then(|()| run(self)) {
            Err(e) if e.kind() == ErrorKind::Cancelled => {
                let mut none = Generation::new(Sampler::new(&options.sampling)?.seed());
                none.finish = Finish::of_ended_call();
                Ok(none)
            }
            done => done,
        }
    }

    /// The generation loop, of a session that [generates](crate::engine::Served::generates). Its tokens continue `text`, and also `answer` in a
    /// chat. They are `held` to a grammar, if there is one. `watch` began with the call.
    pub(super) fn generate_text(
        &mut self,
        mut watch: Stopwatch,
        mut text: Transcript,
        mut answer: Option<Answer>,
        mut held: Option<Constraint>,
        options: &GenerateOptions,
        on_piece: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let mut sampler = Sampler::new(&options.sampling)?.after(self.appended());
        let mut out = Generation::new(sampler.seed());
        out.prompt_tokens = self.tokens.len();
        let room = match self.options.eviction {
            // Without an answer to bound it, an unlimited generation that may evict old tokens would never end. A sliding window is for that.
            Eviction::DropOldest { .. } if options.max_tokens == usize::MAX && answer.is_none() => {
                (self.options.context - self.tokens.len()).max(1)
            }
            _ => options.max_tokens,
        };
        if room < options.max_tokens {
            out.finish = Finish::Context;
        }
        let mut replayed = Vec::new();
        let mut drafts = self.drafts_of(options);
        let mut adjuster = Adjuster::new(&options.adjustments, &options.sampling);
        let mut broke = false;
        // Tokens that are appended instead of sampled ones: those that end the reasoning early, and those that a grammar forces.
        let mut given = VecDeque::new();
        // Whether they take a step each.
        let mut is_stepped = false;
        let is_plain =
            adjuster.is_none() && !options.replay && options.top_log_probabilities.is_none();
        let _forking = self.forks.begin();
        let model = self.model.clone();
        while out.tokens.len() < room {
            if self.tokens.len() > self.cache.len() + LONG_STEP {
                self.forks.set_busy_with("runs a prompt");
            }
            let begins = given.is_empty();
            if let Some(end) = answer.as_mut().and_then(Answer::early_end) {
                given.extend(end);
                if let Some(held) = &mut held {
                    held.close_reasoning();
                }
            }
            let mut is_masked = false;
            if let (true, Some(held)) = (given.is_empty(), &mut held) {
                match held.next(&model, stage(&answer))? {
                    Next::Free => {}
                    Next::Masked => is_masked = true,
                    Next::Given(tokens) => given.extend(tokens),
                    Next::Over => {
                        out.finish = Finish::Stop;
                        break;
                    }
                }
            }
            let left = room - out.tokens.len();
            if begins {
                is_stepped = is_plain && model.steps_given(given.len());
            }
            let is_given = !given.is_empty();
            let chosen = match given.pop_front() {
                Some(token) => {
                    self.discard_drafts(&mut drafts)?;
                    let given = self.making_way(|session| {
                        session.choose_given(&mut sampler, token, is_stepped, left > 1)
                    });
                    given.map(|()| (token, None))
                }
                None => self.making_way(|session| {
                    let mask = held.as_ref().filter(|_| is_masked).map(Constraint::mask);
                    session.chosen(
                        &mut sampler,
                        options,
                        left,
                        adjuster.as_mut(),
                        mask,
                        &mut drafts,
                        &mut replayed,
                    )
                }),
            };
            let (token, probabilities) = match chosen {
                Ok(token) if !call::is_over() => token,
                Err(e) if adjuster.as_ref().is_some_and(Adjuster::is_refused) => {
                    out.finish = Finish::Cancelled;
                    out.refusal = Some(e);
                    break;
                }
                Err(e) if e.kind() != ErrorKind::Cancelled => return Err(e),
                _ => {
                    out.finish = Finish::of_ended_call();
                    break;
                }
            };
            if watch.token(&self.cache) {
                out.cached_tokens = self.tokens.len().saturating_sub(self.cache.work().ran);
            }
            if text.is_stop(token) {
                let held = held.as_mut().filter(|_| !is_given);
                if let Some(end) = held.and_then(|held| held.instead_of_stop(stage(&answer))) {
                    given.extend(end);
                    sampler = sampler.after(self.appended());
                    continue;
                }
                out.finish = Finish::Stop;
                break;
            }
            match self.make_room(1) {
                Err(e) if e.kind() == ErrorKind::ContextFull => {
                    out.finish = Finish::Context;
                    break;
                }
                Err(e) if e.kind() == ErrorKind::Cancelled => {
                    out.finish = Finish::of_ended_call();
                    break;
                }
                room => room?,
            }
            memory::make_room(&mut out.tokens, 1)?;
            if let Some(held) = &mut held {
                held.push(token)?;
            }
            if let Some(adjuster) = &mut adjuster {
                adjuster.push(token)?;
            }
            self.push(&[token]);
            out.tokens.push(token);
            let (shown, finish) = text.push(token);
            let told = match &mut answer {
                None => vec![(Part::Content, shown.to_owned())],
                Some(answer) => {
                    let was_reasoning = answer.part() == Part::Reasoning;
                    let mut told = answer.push(shown);
                    if let (true, Some(held)) = (was_reasoning, &mut held) {
                        for (_, text) in told.iter().filter(|(part, _)| *part == Part::Content) {
                            held.push_content(&model, text)?;
                        }
                    }
                    if told.is_empty() {
                        told.push((answer.part(), String::new()));
                    }
                    told
                }
            };
            let mut named = Some(token);
            let standing = self.forks.stand(self);
            broke = told.iter().any(|(part, text)| {
                on_piece(Piece {
                    token: named.take(),
                    part: *part,
                    text,
                    probabilities: probabilities.as_ref(),
                })
                .is_break()
            });
            drop(standing);
            if broke {
                out.finish = Finish::Cancelled;
                break;
            }
            if let Some(finish) = finish {
                out.finish = finish;
                break;
            }
        }
        self.discard_drafts(&mut drafts)?;
        self.cache.end_drafts();
        out.drafts = drafts.counts();
        self.finish(&mut out, text, answer, broke, on_piece);
        out.preemptions = self.cache.work().preemptions;
        out.timings = watch.end();
        Ok(out)
    }

    /// The next token of at most `left`, from adjusted logits, one that `mask` allows, with log-probabilities if requested.
    fn chosen(
        &mut self,
        sampler: &mut Sampler,
        options: &GenerateOptions,
        left: usize,
        adjuster: Option<&mut Adjuster<'_>>,
        mask: Option<TokenMask<'_>>,
        drafts: &mut Drafts,
        replayed: &mut Vec<f32>,
    ) -> Result<(u32, Option<TokenProbabilities>)> {
        let is_on_device = mask.is_none() || self.model.device().is_cuda();
        let is_plain = is_on_device && adjuster.is_none();
        if is_plain && !options.replay && options.top_log_probabilities.is_none() {
            if mask.is_none()
                && let Some(token) = self.next_by_drafts(sampler, drafts, left)?
            {
                return Ok((token, None));
            }
            let is_step = self.is_between_steps();
            let start = StepStart::now(&self.model);
            let token = self.flush_and_choose(sampler, mask, left > 1)?;
            if is_step && let Some(seconds) = start.seconds(&self.model) {
                self.paces.of(drafts.source()).record(0, seconds);
            }
            return Ok((token, None));
        }
        let logits = match options.replay {
            true => {
                self.logits_from_scratch(replayed)?;
                &*replayed
            }
            false => {
                self.flush()?;
                self.flushed()?
            }
        };
        let (adjusted, history) = match adjuster {
            Some(adjuster) => {
                // The host may fork the session meanwhile.
                let _standing = adjuster.has_processor().then(|| self.forks.stand(self));
                let history = adjuster.unpenalized(&self.tokens);
                (adjuster.adjusted(logits, &self.tokens, mask)?, history)
            }
            None => (logits, &self.tokens[..]),
        };
        let token = sampler.sample_within(adjusted, history, mask)?;
        let probabilities = |top| TokenProbabilities::of(logits, token, top);
        Ok((token, options.top_log_probabilities.map(probabilities)))
    }

    /// Ends a text: passes on what was held back unless `broke`, and records the outcome.
    fn finish(
        &mut self,
        out: &mut Generation,
        mut text: Transcript,
        answer: Option<Answer>,
        broke: bool,
        on_piece: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) {
        let held = match out.finish {
            Finish::StopString => "",
            _ => text.finish(),
        };
        let whole = matches!(out.finish, Finish::Stop | Finish::StopString);
        let (mut told, mut said) = (Vec::new(), None);
        match answer {
            None => told.push((Part::Content, held.to_owned())),
            Some(mut answer) => {
                told.extend(answer.push(held));
                told.extend(answer.finish(whole));
                said = Some(answer.into_message());
            }
        }
        told.retain(|(_, text)| !text.is_empty());
        let standing = self.forks.stand(self);
        let stopped = !broke
            && told.iter().any(|(part, text)| {
                on_piece(Piece {
                    token: None,
                    part: *part,
                    text,
                    probabilities: None,
                })
                .is_break()
            });
        drop(standing);
        if stopped {
            out.finish = Finish::Cancelled;
        }
        let Some(said) = said else {
            out.text = text.into_text();
            return;
        };
        out.text = said.text();
        out.reasoning = said.reasoning_content.clone().unwrap_or_default();
        out.tool_calls.clone_from(&said.tool_calls);
        let len = self.len();
        if let Some(answer) = &mut self.conversation.answer {
            answer.whole = whole;
            answer.said = Some((len, said));
        }
    }

    fn logits_from_scratch(&mut self, logits: &mut Vec<f32>) -> Result<()> {
        if self.tokens.is_empty() {
            return self.flush();
        }
        let mut cache = self.model.sequence(self.options.context, self.options.kv)?;
        if let Some(adapter) = self.adapter() {
            cache.set_adapter(adapter.clone())?;
        }
        let run = self.model.forward(
            &self.tokens,
            &mut cache,
            &mut self.scratch,
            Logits::Last,
            logits,
        );
        self.cache.add_work(cache.work());
        run
    }
}

/// Stage of the answer that the next token belongs to.
fn stage(answer: &Option<Answer>) -> AnswerStage<'_> {
    answer.as_ref().map_or(AnswerStage::Content, Answer::stage)
}
