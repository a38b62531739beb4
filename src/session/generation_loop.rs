//! The generation loop: chooses a token, decodes it to text, and repeats until a stop condition holds.

use std::collections::VecDeque;
use std::ops::ControlFlow;

use super::adjustments::Adjuster;
use super::answer::Answer;
use super::constraint::{Constraint, Next};
use super::drafts::{Drafts, StepStart};
use super::generation::{Generation, Piece};
use super::options::{Finish, GenerateOptions};
use super::probabilities::TokenProbabilities;
use super::timings::Stopwatch;
use super::{Eviction, Part, Sampler, Session, Transcript};
use crate::base::{Error, ErrorKind, Result, call, memory};
use crate::model::{Choice, Logits, TokenMask};
use crate::text::AnswerStage;

/// Tokens that take longer to run than a step may.
const LONG_STEP: usize = 32;

/// A generation of a session that [generates](crate::engine::Served::generates).
pub(super) struct GenerationLoop<'a> {
    session: &'a mut Session,
    on_piece: &'a mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    /// The text that its tokens continue.
    text: Transcript,
    /// In a chat, the answer that they continue.
    answer: Option<Answer>,
    /// Holds them to a grammar.
    held: Option<Constraint>,
    chooser: Chooser<'a>,
    /// Tokens that are appended instead of chosen ones: those that end the reasoning early, and those that a grammar forces.
    given: VecDeque<u32>,
    /// Whether they take a step each.
    is_stepped: bool,
    /// Most tokens, and the reason why it ends there.
    most: usize,
    at_most: Finish,
    /// Whether the callback has ended it.
    is_broken: bool,
    out: Generation,
}

/// Chooses tokens.
struct Chooser<'a> {
    options: &'a GenerateOptions,
    sampler: Sampler,
    adjuster: Option<Adjuster<'a>>,
    drafts: Drafts,
    /// Logits of the whole sequence, run again.
    replayed: Vec<f32>,
}

/// The next token.
struct Chosen {
    token: u32,
    probabilities: Option<TokenProbabilities>,
    is_given: bool,
}

/// Why no further token is appended.
enum End {
    Finished(Finish),
    Failed(Error),
}

impl From<Error> for End {
    fn from(error: Error) -> End {
        End::Failed(error)
    }
}

impl From<Finish> for End {
    fn from(finish: Finish) -> End {
        End::Finished(finish)
    }
}

impl<'a> GenerationLoop<'a> {
    pub(super) fn new(
        session: &'a mut Session,
        text: Transcript,
        answer: Option<Answer>,
        held: Option<Constraint>,
        options: &'a GenerateOptions,
        on_piece: &'a mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<GenerationLoop<'a>> {
        let sampler = Sampler::new(&options.sampling)?.after(session.appended());
        let mut out = Generation::new(sampler.seed());
        out.prompt_tokens = session.tokens.len();
        let (most, at_most) = match session.options.eviction {
            // Without an answer to bound it, an unlimited generation that may evict old tokens would never end. A sliding window is for that.
            Eviction::DropOldest { .. } if options.max_tokens == usize::MAX && answer.is_none() => {
                let left = session.options.context - session.tokens.len();
                (left.max(1), Finish::Context)
            }
            _ => (options.max_tokens, Finish::Length),
        };
        let adjuster = Adjuster::of(&options.adjustments, &options.sampling, &session.model)?;
        let chooser = Chooser {
            options,
            sampler,
            adjuster: adjuster.map(|adjuster| adjuster.ending_by(options.ends(&session.model))),
            drafts: session.drafts_of(options),
            replayed: Vec::new(),
        };
        Ok(GenerationLoop {
            session,
            on_piece,
            text,
            answer,
            held,
            chooser,
            given: VecDeque::new(),
            is_stepped: false,
            most,
            at_most,
            is_broken: false,
            out,
        })
    }

    /// Generates to the end. `watch` began with the call.
    pub(super) fn run(mut self, mut watch: Stopwatch) -> Result<Generation> {
        let _forking = self.session.forks.begin();
        self.out.finish = loop {
            if self.out.tokens.len() >= self.most {
                break self.at_most;
            }
            match self.step(&mut watch) {
                Ok(()) => {}
                Err(End::Finished(finish)) => break finish,
                Err(End::Failed(error)) => return Err(error),
            }
        };
        self.session.discard_drafts(&mut self.chooser.drafts)?;
        self.session.cache.end_drafts();
        self.out.drafts = self.chooser.drafts.counts();
        self.out.preemptions = self.session.cache.work().preemptions;
        let mut out = self.finish();
        out.timings = watch.end();
        Ok(out)
    }

    /// Chooses and appends a token.
    fn step(&mut self, watch: &mut Stopwatch) -> std::result::Result<(), End> {
        if self.session.tokens.len() > self.session.cache.len() + LONG_STEP {
            self.session.forks.set_busy_with("runs a prompt");
        }
        let is_masked = self.constrain()?;
        let chosen = self.choose(is_masked)?;
        if watch.token(&self.session.cache) {
            let ran = self.session.cache.work().ran;
            self.out.cached_tokens = self.session.tokens.len().saturating_sub(ran);
        }
        match self.text.is_stop(chosen.token) {
            true => self.stop(chosen.is_given),
            false => self.append(chosen),
        }
    }

    /// Finds the tokens that must come next, if there are any. Returns whether a mask limits the next one.
    fn constrain(&mut self) -> std::result::Result<bool, End> {
        let begins = self.given.is_empty();
        if let Some(end) = self.answer.as_mut().and_then(Answer::early_end) {
            self.given.extend(end);
            if let Some(held) = &mut self.held {
                held.close_reasoning();
            }
        }
        let mut is_masked = false;
        if let (true, Some(held)) = (self.given.is_empty(), &mut self.held) {
            match held.next(&self.session.model, stage(&self.answer))? {
                Next::Free => {}
                Next::Masked => is_masked = true,
                Next::Given(tokens) => self.given.extend(tokens),
                Next::Over => return Err(Finish::Stop.into()),
            }
        }
        if begins {
            let count = self.given.len();
            self.is_stepped = self.chooser.is_plain() && self.session.model.steps_given(count);
        }
        Ok(is_masked)
    }

    /// The next token, which a grammar's mask limits if `is_masked`.
    fn choose(&mut self, is_masked: bool) -> std::result::Result<Chosen, End> {
        let left = self.most - self.out.tokens.len();
        let (chooser, held) = (&mut self.chooser, &self.held);
        let given = self.given.pop_front();
        let chosen = match given {
            Some(token) => {
                self.session.discard_drafts(&mut chooser.drafts)?;
                let (sampler, in_step) = (&mut chooser.sampler, self.is_stepped);
                let chosen = self
                    .session
                    .making_way(|session| session.choose_given(sampler, token, in_step, left > 1));
                chosen.map(|()| (token, None))
            }
            None => self.session.making_way(|session| {
                let mask = held.as_ref().filter(|_| is_masked).map(Constraint::mask);
                chooser.choose(session, mask, left)
            }),
        };
        match chosen {
            Ok((token, probabilities)) if !call::is_over() => Ok(Chosen {
                token,
                probabilities,
                is_given: given.is_some(),
            }),
            Err(e) if chooser.is_refused() => {
                self.out.refusal = Some(e);
                Err(Finish::Cancelled.into())
            }
            Err(e) if e.kind() != ErrorKind::Cancelled => Err(e.into()),
            _ => Err(Finish::of_ended_call().into()),
        }
    }

    /// Ends at a stop token, unless a grammar has more text to come.
    fn stop(&mut self, is_given: bool) -> std::result::Result<(), End> {
        let held = self.held.as_mut().filter(|_| !is_given);
        let Some(instead) = held.and_then(|held| held.instead_of_stop(stage(&self.answer))) else {
            return Err(Finish::Stop.into());
        };
        self.given.extend(instead);
        self.chooser.sampler.set_draws(self.session.appended());
        Ok(())
    }

    /// Appends a token and passes its text on.
    fn append(&mut self, chosen: Chosen) -> std::result::Result<(), End> {
        let token = chosen.token;
        match self.session.make_room(1) {
            Err(e) if e.kind() == ErrorKind::ContextFull => return Err(Finish::Context.into()),
            Err(e) if e.kind() == ErrorKind::Cancelled => {
                return Err(Finish::of_ended_call().into());
            }
            room => room?,
        }
        memory::make_room(&mut self.out.tokens, 1)?;
        if let Some(held) = &mut self.held {
            held.push(token)?;
        }
        if let Some(adjuster) = &mut self.chooser.adjuster {
            adjuster.push(token)?;
        }
        self.session.push(&[token]);
        self.out.tokens.push(token);
        let GenerateOptions {
            adjustments,
            sampling,
            ..
        } = self.chooser.options;
        if adjustments.are_over(sampling, self.out.tokens.len()) {
            self.chooser.adjuster = None;
        }
        let (shown, finish) = self.text.push(token);
        let told = match &mut self.answer {
            None => vec![(Part::Content, shown.to_owned())],
            Some(answer) => {
                let was_reasoning = answer.part() == Part::Reasoning;
                let mut told = answer.push(shown);
                if let (true, Some(held)) = (was_reasoning, &mut self.held) {
                    for (_, text) in told.iter().filter(|(part, _)| *part == Part::Content) {
                        held.push_content(&self.session.model, text)?;
                    }
                }
                if told.is_empty() {
                    told.push((answer.part(), String::new()));
                }
                told
            }
        };
        self.tell(&told, Some(token), chosen.probabilities.as_ref())?;
        finish.map_or(Ok(()), |finish| Err(finish.into()))
    }

    /// Passes texts on, the first as that of `token`. Ends if the callback breaks. Others may fork the session meanwhile.
    fn tell(
        &mut self,
        told: &[(Part, String)],
        mut token: Option<u32>,
        probabilities: Option<&TokenProbabilities>,
    ) -> std::result::Result<(), Finish> {
        let _standing = self.session.forks.stand(self.session);
        let breaks = told.iter().any(|(part, text)| {
            (self.on_piece)(Piece {
                token: token.take(),
                part: *part,
                text,
                probabilities,
            })
            .is_break()
        });
        match breaks {
            true => {
                self.is_broken = true;
                Err(Finish::Cancelled)
            }
            false => Ok(()),
        }
    }

    /// Ends the text: passes on what was held back unless the callback has broken, and records the outcome.
    fn finish(mut self) -> Generation {
        let held = match self.out.finish {
            Finish::StopString => "",
            _ => self.text.finish(),
        };
        let whole = matches!(self.out.finish, Finish::Stop | Finish::StopString);
        let (mut told, mut said) = (Vec::new(), None);
        match self.answer.take() {
            None => told.push((Part::Content, held.to_owned())),
            Some(mut answer) => {
                told.extend(answer.push(held));
                told.extend(answer.finish(whole));
                said = Some(answer.into_message());
            }
        }
        told.retain(|(_, text)| !text.is_empty() && !self.is_broken);
        if let Err(finish) = self.tell(&told, None, None) {
            self.out.finish = finish;
        }
        let mut out = self.out;
        let Some(said) = said else {
            out.text = self.text.into_text();
            return out;
        };
        out.text = said.text();
        out.reasoning = said.reasoning_content.clone().unwrap_or_default();
        out.tool_calls.clone_from(&said.tool_calls);
        let len = self.session.len();
        if let Some(answer) = &mut self.session.conversation.answer {
            answer.whole = whole;
            answer.said = Some((len, said));
        }
        out
    }
}

impl Chooser<'_> {
    /// Whether tokens follow from the logits as they are.
    fn is_plain(&self) -> bool {
        let options = self.options;
        self.adjuster.is_none() && !options.replay && options.top_log_probabilities.is_none()
    }

    /// Whether the logits processor has written logits from which no token can be chosen.
    fn is_refused(&self) -> bool {
        self.adjuster.as_ref().is_some_and(Adjuster::is_refused)
    }

    /// The next token of at most `left`, from adjusted logits, one that `mask` allows, with log-probabilities if requested.
    fn choose(
        &mut self,
        session: &mut Session,
        mask: Option<TokenMask<'_>>,
        left: usize,
    ) -> Result<(u32, Option<TokenProbabilities>)> {
        let is_on_device = mask.is_none() || session.model.device().is_cuda();
        if is_on_device && self.is_plain() {
            return self
                .choose_plain(session, mask, left)
                .map(|token| (token, None));
        }
        let logits = match self.options.replay {
            true => {
                session.logits_from_scratch(&mut self.replayed)?;
                &*self.replayed
            }
            false => {
                session.flush()?;
                session.flushed()?
            }
        };
        let (adjusted, history) = match &mut self.adjuster {
            Some(adjuster) => {
                // The host may fork the session meanwhile.
                let _standing = adjuster
                    .has_processor()
                    .then(|| session.forks.stand(session));
                let history = adjuster.unpenalized(&session.tokens);
                let choice = Choice {
                    allowed: mask,
                    ..self.sampler.choice(&session.tokens)
                };
                (adjuster.adjusted(logits, &choice)?, history)
            }
            None => (logits, &session.tokens[..]),
        };
        let token = self.sampler.sample_within(adjusted, history, mask)?;
        let probabilities = |top| TokenProbabilities::of(logits, token, top);
        Ok((token, self.options.top_log_probabilities.map(probabilities)))
    }

    /// The next token from the logits as they are, which may stay on the device.
    fn choose_plain(
        &mut self,
        session: &mut Session,
        mask: Option<TokenMask<'_>>,
        left: usize,
    ) -> Result<u32> {
        let Chooser {
            sampler, drafts, ..
        } = self;
        if mask.is_none()
            && let Some(token) = session.next_by_drafts(sampler, drafts, left)?
        {
            return Ok(token);
        }
        let is_step = session.is_between_steps();
        let start = StepStart::now(&session.model);
        let token = session.flush_and_choose(sampler, mask, left > 1)?;
        if is_step && let Some(seconds) = start.seconds(&session.model) {
            session.paces.of(drafts.source()).record(0, seconds);
        }
        Ok(token)
    }
}

impl Session {
    /// The logits after the last token, of all tokens run again.
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
