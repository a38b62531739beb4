//! Calls that generate.

use std::ops::ControlFlow;

use super::constraint::Constraint;
use super::generation::{Generation, Piece};
use super::generation_loop::GenerationLoop;
use super::options::{Finish, GenerateOptions};
use super::timings::Stopwatch;
use super::{Sampler, Session, Transcript};
use crate::base::{ErrorKind, Result, call};

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
                    GenerationLoop::new(session, text, None, held, options, on_piece)?
                        .run(watch)?;
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
}
