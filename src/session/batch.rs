//! Several sessions advanced together, in one pass over the weights.

use std::sync::Arc;

use super::adjustments::{Adjuster, AdjusterScratch};
use super::next::Next;
use super::probabilities::check_top;
use super::{LogitAdjustments, SamplingOptions, Session, TokenProbabilities};
use crate::base::error::bail;
use crate::base::{Error, Result};
use crate::cpu::Cpu;
use crate::engine::NewTokens;
use crate::model::{Choice, Output, Wanted};
use crate::ops::{Device, sample};

/// Appends `tokens[i]` to `sessions[i]` and runs all sessions in one pass over the weights. If the pass fails, every session is as it was
/// before. Cancelled with the thread's [`call`](crate::base::call).
pub fn step(sessions: &mut [&mut Session], tokens: &[u32]) -> Result<()> {
    let on_device = vec![None; tokens.len()];
    let done = |_: &[&mut Session], rows, logits| Ok((rows, logits));
    let (rows, logits): (Vec<Output>, Vec<f32>) =
        stepped(sessions, tokens, &on_device, false, done)?;
    for (session, row) in sessions.iter_mut().zip(rows) {
        let vocabulary = session.model.spec().vocab_size;
        if let Output::Logits(rows) = row {
            let logits = &logits[rows.start * vocabulary..rows.end * vocabulary];
            session.next = Next::of(logits.to_vec());
        }
    }
    Ok(())
}

/// How a step chooses the next token of a session.
#[derive(Clone, Copy, Debug)]
pub struct StepChoice<'a> {
    /// Sampling settings.
    pub sampling: &'a SamplingOptions,
    /// Changes of the logits before the choice, without those that count the tokens of a generation.
    pub adjustments: &'a LogitAdjustments,
    /// Keeps log-probabilities of the chosen token, and of this many most probable ones, for [`Session::choice`], which copies the logits
    /// to the host.
    pub top_log_probabilities: Option<usize>,
}

/// Like [`step`], and returns each session's next token, chosen by `options[i]` as a generation would choose it, without appending it. On a
/// GPU the logits stay on the device; with `look_ahead` the device starts to run those tokens before the next call asks for it.
pub fn step_choose(
    sessions: &mut [&mut Session],
    tokens: &[u32],
    options: &[&SamplingOptions],
    look_ahead: bool,
) -> Result<Vec<u32>> {
    let adjustments = &LogitAdjustments::default();
    let choices: Vec<_> = options
        .iter()
        .map(|sampling| StepChoice {
            sampling,
            adjustments,
            top_log_probabilities: None,
        })
        .collect();
    step_choose_with(sessions, tokens, &choices, look_ahead)
}

/// As [`step_choose`], from adjusted logits. Logits that are adjusted, or of which log-probabilities are kept, are
/// copied to the host, those of the other sessions are not.
pub fn step_choose_with(
    sessions: &mut [&mut Session],
    tokens: &[u32],
    choices: &[StepChoice<'_>],
    look_ahead: bool,
) -> Result<Vec<u32>> {
    if choices.len() != sessions.len() {
        bail!(
            InvalidArgument,
            "{} sampling options for {} sessions; each session takes one",
            choices.len(),
            sessions.len()
        );
    }
    for (i, (choice, session)) in choices.iter().zip(&*sessions).enumerate() {
        choice
            .check(session.model.spec().vocab_size)
            .map_err(|e| numbered(i, e))?;
    }
    let each = choices.iter().zip(&*sessions);
    let options: Vec<_> = each
        .map(|(choice, session)| choice.sampling.seeded_by(session.seed))
        .collect();
    let each = choices.iter().zip(&*sessions).enumerate();
    let adjusters = each.map(|(i, (choice, session))| {
        let adjuster = Adjuster::of(choice.adjustments, choice.sampling, &session.model);
        adjuster.map_err(|e| numbered(i, e))
    });
    let adjusters = adjusters.collect::<Result<Vec<_>>>()?;
    let needs_logits =
        |i: usize| adjusters[i].is_some() || choices[i].top_log_probabilities.is_some();
    let on_device: Vec<_> = options
        .iter()
        .enumerate()
        .map(|(i, options)| (!needs_logits(i)).then_some(options))
        .collect();
    let chosen = stepped(
        sessions,
        tokens,
        &on_device,
        look_ahead,
        |sessions, outputs, logits| {
            let on_host = OnHost {
                choices,
                options: &options,
                adjusters: &adjusters,
            };
            on_host.choose(sessions, outputs, logits)
        },
    )?;
    let each = sessions.iter_mut().zip(chosen).enumerate();
    let next = each.map(|(i, (session, (token, probabilities)))| {
        if !needs_logits(i) && options[i].is_greedy() {
            session.next.set_argmax(token);
        }
        session.choice = probabilities.map(|probabilities| (token, probabilities));
        token
    });
    Ok(next.collect())
}

/// A token that was chosen in a step, with log-probabilities if they are kept.
type Chosen = (u32, Option<TokenProbabilities>);

/// The choices of a step that are made from logits in host memory.
struct OnHost<'a> {
    choices: &'a [StepChoice<'a>],
    /// Sampling settings of each session.
    options: &'a [SamplingOptions],
    /// Adjusters of the sessions whose logits are adjusted.
    adjusters: &'a [Option<Adjuster<'a>>],
}

impl OnHost<'_> {
    /// The next token of each session: that of its output, or one chosen from its logits, which are all of `logits`.
    fn choose(
        &self,
        sessions: &[&mut Session],
        outputs: Vec<Output>,
        logits: Vec<f32>,
    ) -> Result<Vec<Chosen>> {
        let (mut next, mut places) = (Vec::new(), Vec::new());
        let mut scratch = AdjusterScratch::default();
        let choice = |i: usize| Choice {
            options: &self.options[i],
            draw: sessions[i].appended() as u64,
            history: &sessions[i].tokens[..],
            allowed: None,
        };
        // Log-probabilities are those of the model's own logits.
        let mut adjusted = logits.clone();
        for (i, output) in outputs.into_iter().enumerate() {
            match output {
                Output::Token(token) => next.push((token, None)),
                Output::Logits(rows) => {
                    let vocabulary = sessions[i].model.spec().vocab_size;
                    let row = rows.start * vocabulary..rows.end * vocabulary;
                    if let Some(adjuster) = &self.adjusters[i] {
                        let (copy, own) = (&mut adjusted[row.clone()], &logits[row.clone()]);
                        let done = adjuster.adjust(copy, own, &choice(i), &mut scratch);
                        done.map_err(|e| numbered(i, e))?;
                    }
                    places.push((i, row));
                    next.push((0, None));
                }
                other => bail!(Internal, "{other:?} in the place of a token"),
            }
        }
        let choices: Vec<_> = places
            .iter()
            .map(|&(i, _)| {
                let mut choice = choice(i);
                if let Some(adjuster) = &self.adjusters[i] {
                    choice.history = adjuster.unpenalized(choice.history);
                }
                choice
            })
            .collect();
        let Some(&(first, _)) = places.first() else {
            return Ok(next);
        };
        // A GPU has no threads of the host.
        let cpu = match sessions[first].model.device() {
            Device::Cpu(cpu) => cpu.clone(),
            Device::Cuda(_) => Cpu::new(Some(1))?,
        };
        let chosen = sample::sample_rows(&adjusted, &choices, &cpu, &mut Vec::new());
        for ((i, row), token) in places.into_iter().zip(chosen) {
            let token = token.map_err(|e| numbered(i, e))?;
            let top = self.choices[i].top_log_probabilities;
            let probabilities = top.map(|top| TokenProbabilities::of(&logits[row], token, top));
            next[i] = (token, probabilities);
        }
        Ok(next)
    }
}

/// Appends a token to each session and runs it, with any pending tokens before it. Returns what `finish` makes of the next tokens of those
/// with `options`, and the logits of the others. If it fails, every session is as it was before.
fn stepped<T: Default>(
    sessions: &mut [&mut Session],
    tokens: &[u32],
    options: &[Option<&SamplingOptions>],
    look_ahead: bool,
    finish: impl FnOnce(&[&mut Session], Vec<Output>, Vec<f32>) -> Result<T>,
) -> Result<T> {
    if sessions.len() != tokens.len() {
        bail!(
            InvalidArgument,
            "{} tokens for {} sessions; each session takes one",
            tokens.len(),
            sessions.len()
        );
    }
    let Some((first, rest)) = sessions.split_first() else {
        return Ok(T::default());
    };
    if let Some(i) = rest
        .iter()
        .position(|s| !Arc::ptr_eq(&s.model, &first.model))
    {
        bail!(
            InvalidArgument,
            "session {} runs another model than session 0; sessions of a batch share one",
            i + 1
        );
    }
    first.model.check_tokens(tokens)?;
    // Truncating a session undoes every change except eviction.
    let saved: Vec<_> = sessions
        .iter()
        .map(|s| Ok((s.len(), (!s.fits(1)).then(|| s.saved()).transpose()?)))
        .collect::<Result<_>>()?;
    let result = run(sessions, tokens, options, look_ahead)
        .and_then(|(outputs, logits)| finish(sessions, outputs, logits));
    if result.is_err() {
        for (session, (len, saved)) in sessions.iter_mut().zip(saved) {
            match saved {
                Some(saved) => session.go_back(saved),
                None => session.tokens.truncate(len),
            }
        }
    }
    result
}

fn run(
    sessions: &mut [&mut Session],
    tokens: &[u32],
    options: &[Option<&SamplingOptions>],
    look_ahead: bool,
) -> Result<(Vec<Output>, Vec<f32>)> {
    let model = sessions[0].model.clone();
    for (i, (session, &token)) in sessions.iter_mut().zip(tokens).enumerate() {
        session.make_room(1).map_err(|e| numbered(i, e))?;
        session.push(&[token]);
        // The previous token may be pending too.
        let cached = session.cache.len().min(session.len() - 1);
        session.cache.truncate(cached)?;
        // Steps draft nothing.
        session.cache.set_drafts(false)?;
    }
    let mut scratch = std::mem::take(&mut sessions[0].scratch);
    let mut logits = Vec::new();
    let work = sessions.iter_mut().enumerate().map(|(i, session)| {
        let appended = session.appended() as u64;
        let history = &session.tokens[..];
        NewTokens {
            tokens: &history[session.cache.len()..],
            sequence: &mut session.cache,
            wanted: match options[i] {
                None => Wanted::Last,
                Some(options) => Wanted::Token(Choice {
                    options,
                    draw: appended,
                    history,
                    allowed: None,
                }),
            },
        }
    });
    let outputs = model.run(work.collect(), look_ahead, &mut scratch, &mut logits);
    sessions[0].scratch = scratch;
    let alone = sessions.len() == 1;
    let outputs = outputs?
        .into_iter()
        .enumerate()
        .map(|(i, output)| output.map_err(|fault| if alone { fault } else { numbered(i, fault) }));
    Ok((outputs.collect::<Result<_>>()?, logits))
}

/// The error of session `i` of a batch.
fn numbered(i: usize, e: Error) -> Error {
    e.within(format_args!("session {i}"))
}

impl StepChoice<'_> {
    /// Fails for settings that describe no choice from a vocabulary of `vocabulary` tokens, or no choice in a step.
    pub fn check(&self, vocabulary: usize) -> Result<()> {
        self.sampling.check()?;
        self.adjustments.check(vocabulary)?;
        check_top(self.top_log_probabilities)?;
        self.adjustments.check_without_counts("a step")
    }
}
