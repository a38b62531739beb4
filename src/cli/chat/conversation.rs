//! The conversation, and the execution of commands on it. Each turn passes the whole conversation to the session, so repeating an answer or
//! changing a question is a turn like any other.

use std::path::Path;
use std::sync::Arc;

use NVFP4::base::call::Cancel;
use NVFP4::base::error::bail;
use NVFP4::base::{Result, leftover, memory};
use NVFP4::engine::Served;
use NVFP4::session::{ChatOptions, Finish, GenerateOptions, Generation, Session};
use NVFP4::text::{Message, ToolCall};

use crate::cli::prompting::{self, THINKING};
use crate::cli::view::View;
use crate::cli::{output, sampling};

pub(super) struct Conversation {
    pub(super) model: Arc<Served>,
    pub(super) session: Session,
    pub(super) chat: ChatOptions,
    pub(super) generation: GenerateOptions,
    /// System prompt from the next turn on, if it was changed; empty for none.
    pub(super) system: Option<String>,
    pub(super) last: Option<Generation>,
    /// Whether Ctrl-C stops an answer rather than the program.
    pub(super) stops_alone: bool,
}

impl Conversation {
    /// Messages at the beginning of the next turn.
    pub(super) fn messages(&self) -> Result<Vec<Message>> {
        let mut messages = self.session.messages()?;
        let Some(system) = &self.system else {
            return Ok(messages);
        };
        if messages.first().is_some_and(|m| m.role == "system") {
            messages.remove(0);
        }
        if !system.is_empty() {
            messages.insert(0, Message::new("system", system));
        }
        Ok(messages)
    }

    /// Answers `text`.
    pub(super) fn say(&mut self, text: &str) -> Result<()> {
        let mut messages = self.messages()?;
        messages.push(Message::new("user", text));
        self.answer(&messages, &self.generation.clone())
    }

    /// Answers the last question again, with new random draws.
    pub(super) fn retry(&mut self) -> Result<()> {
        let mut messages = self.messages()?;
        messages.truncate(last_question(&messages)? + 1);
        let mut options = self.generation.clone();
        options.sampling.seed = None;
        self.answer(&messages, &options)
    }

    /// Answers `text` in place of the last question.
    pub(super) fn edit(&mut self, text: &str) -> Result<()> {
        let mut messages = self.messages()?;
        messages.truncate(last_question(&messages)?);
        messages.push(Message::new("user", text));
        self.answer(&messages, &self.generation.clone())
    }

    /// Tool calls that wait for results.
    pub(super) fn calls(&self) -> Vec<ToolCall> {
        match &self.last {
            Some(last) if last.finish != Finish::Cancelled => last.tool_calls.clone(),
            _ => Vec::new(),
        }
    }

    /// Continues with the results of tool calls.
    pub(super) fn go_on(&mut self, results: Vec<(ToolCall, String)>) -> Result<()> {
        let mut messages = self.messages()?;
        for (call, result) in results {
            messages.push(Message {
                tool_call_id: Some(call.id),
                name: Some(call.name),
                ..Message::new("tool", result)
            });
        }
        self.answer(&messages, &self.generation.clone())
    }

    fn answer(&mut self, messages: &[Message], options: &GenerateOptions) -> Result<()> {
        let cancel = Cancel::new();
        if self.stops_alone {
            leftover::cancel_on_interrupt(&cancel);
        }
        self.last = None;
        let mut view = View::new();
        let answer = cancel.watching(|| {
            self.session
                .chat_messages(messages, Some(&self.chat), options, &mut |piece| {
                    view.show(piece)
                })
        });
        let answer = answer?;
        view.end()?;
        if answer.finish == Finish::Cancelled && answer.tokens.is_empty() {
            bail!(
                Cancelled,
                "stopped before the answer began; the question is not part of the conversation"
            );
        }
        self.last = Some(answer);
        Ok(())
    }

    pub(super) fn think(&mut self, on: bool) -> Result<()> {
        self.chat.variables.insert(THINKING.to_owned(), on.into());
        let written = self.model.chat_text(self.chat.template.as_deref())?;
        prompting::warn_of_unread(written.template(), &self.chat.variables);
        Ok(())
    }

    pub(super) fn reset(&mut self) -> Result<()> {
        self.last = None;
        self.session.reset()
    }

    pub(super) fn load(&mut self, file: &Path) -> Result<()> {
        self.session = Session::restore(self.model.clone(), file)?;
        self.system = None;
        self.last = None;
        Ok(())
    }

    pub(super) fn stats(&self) -> Result<()> {
        output::line(format_args!(
            "{} tokens in the cache, {} of keys and values, {} in all (peak {})",
            self.session.len(),
            output::size(self.session.kv_bytes() as u64),
            output::size(memory::total().current),
            output::size(memory::total().peak)
        ))?;
        if let Some(last) = &self.last {
            let t = &last.timings;
            let ran = last.prompt_tokens - last.cached_tokens;
            let rate = |tokens: usize, seconds: f64| tokens as f64 / seconds.max(1e-9);
            output::line(format_args!(
                "last turn: {} tokens in, {} of them cached, the others at {:.1}/s, {} tokens out at {:.1}/s, seed {}",
                last.prompt_tokens,
                last.cached_tokens,
                rate(ran, t.prefill_seconds),
                last.tokens.len(),
                // The time of the first token counts as prompt time.
                rate(last.tokens.len().saturating_sub(1), t.decode_seconds),
                last.seed
            ))?;
            if self.session.evicted() > 0 {
                output::line(format_args!(
                    "{} tokens dropped since the context was full, {} of them for the last turn",
                    self.session.evicted(),
                    last.evicted
                ))?;
            }
            let drafts = last.drafts;
            if drafts.drafted > 0 {
                output::line(format_args!(
                    "drafts: {} of {} tokens accepted",
                    drafts.accepted, drafts.drafted
                ))?;
            }
        }
        let sampling = sampling::described(&self.generation, &self.model);
        output::line(format_args!("sampling: {sampling}"))
    }
}

/// The index of the last question.
fn last_question(messages: &[Message]) -> Result<usize> {
    match messages.iter().rposition(|m| m.role == "user") {
        Some(at) => Ok(at),
        None => bail!(InvalidArgument, "nothing has been asked yet"),
    }
}
