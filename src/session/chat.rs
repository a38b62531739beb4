//! Chat turns. A turn renders the whole conversation with the model's template, keeps the prefix that the sequence already holds, and runs
//! the rest. Regenerated answers, edited messages and tool results are therefore ordinary turns.

use std::borrow::Cow;
use std::ops::ControlFlow;

use super::answer::Answer;
use super::constraint::Constraint;
use super::conversation::{Answering, ChatOptions, Conversation, Plan};
use super::generation_loop::GenerationLoop;
use super::text::GenerationText;
use super::timings::Stopwatch;
use super::{
    Eviction, GenerateOptions, Generation, Piece, Session, ToolCalls, Transcript, sampler,
};
use crate::base::error::bail;
use crate::base::{Result, alloc, call, memory};
use crate::engine::Served;
use crate::text::{Aligned, Message, Prompt, Tokenizer};

/// Average bytes of text for a token of an answer, at most.
const FOR_TOKEN: usize = 16;
/// Bytes at the end of a prompt that determine how an answer begins.
const OPENING: usize = 256;

impl Session {
    /// Adds the user message `user` to the conversation and generates the answer. Special tokens spelled out in `user` enter as plain text
    /// and cannot forge a turn. Without `chat`, the options of the previous turn apply.
    ///
    /// Tokens that [`generate`](Session::generate), [`decode`](Session::decode) or [`prefill`](Session::prefill) appended after an answer
    /// count as part of it. A session that was prefilled before its first turn is refused, because its tokens are not a conversation.
    ///
    /// If the thread's [`call`] is cancelled, the turn does not fail: it ends as [`Finish::Cancelled`](super::Finish::Cancelled). A turn cancelled before its first
    /// token is not added to the conversation.
    pub fn chat(
        &mut self,
        user: &str,
        chat: Option<&ChatOptions>,
        options: &GenerateOptions,
        on_piece: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Generation> {
        if !self.is_empty() && self.conversation.is_empty() {
            bail!(
                InvalidArgument,
                "the session holds {} tokens that are no conversation; reset it, or go on with prefill and generate",
                self.len()
            );
        }
        let _words = alloc::Budget::copies(user.len()).set_aside()?;
        let mut messages = self.messages()?;
        messages.push(Message::new("user", user));
        self.answer(messages, chat, options, on_piece)
    }

    /// Generates the answer to a complete conversation. The session keeps its tokens as far as they agree with the rendered conversation,
    /// and drops the others. Without `chat`, the options of the previous turn apply. The system prompt of the session's options is not
    /// added.
    pub fn chat_messages(
        &mut self,
        messages: &[Message],
        chat: Option<&ChatOptions>,
        options: &GenerateOptions,
        on_piece: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Generation> {
        if messages.is_empty() {
            bail!(
                InvalidArgument,
                "the conversation has no message; give it at least what a user says"
            );
        }
        let bytes = messages.iter().fold(0, |sum, m| sum + m.size());
        let _words = alloc::Budget::copies(bytes).set_aside()?;
        self.answer(messages.to_vec(), chat, options, on_piece)
    }

    /// The conversation so far, including the answer at the end of the sequence.
    pub fn messages(&self) -> Result<Vec<Message>> {
        let conversation = &self.conversation;
        let bytes = self.len().saturating_mul(FOR_TOKEN) + self.text_bytes();
        let _words = alloc::Budget::copies(bytes).set_aside()?;
        if conversation.is_empty() {
            let system = self.options.system.as_deref();
            return Ok(system
                .map(|s| Message::new("system", s))
                .into_iter()
                .collect());
        }
        let mut messages = conversation.messages.clone();
        if let Some(answer) = &conversation.answer {
            messages.push(match &answer.said {
                Some((len, said)) if *len == self.len() => said.clone(),
                _ => self.spoken(answer, &self.tokens[answer.start..])?,
            });
        }
        Ok(messages)
    }

    /// Parses `tokens` as an answer.
    fn spoken(&self, answer: &Answering, tokens: &[u32]) -> Result<Message> {
        let conversation = &self.conversation;
        let written = self
            .model
            .chat_text(conversation.options.template.as_deref())?;
        let form = written.form();
        let mut text = GenerationText::after(&[], &self.model, &[])?.showing(form.shown_tokens());
        for &token in tokens {
            text.push(token);
        }
        let tools = !conversation.options.tools.is_empty();
        let calls = calls_in(&conversation.messages);
        let mut spoken = Answer::new(form, &answer.opening, tools, calls);
        spoken.push(&text.into_string());
        spoken.finish(answer.whole);
        Ok(spoken.into_message())
    }

    fn answer(
        &mut self,
        messages: Vec<Message>,
        chat: Option<&ChatOptions>,
        options: &GenerateOptions,
        on_piece: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Generation> {
        if let Eviction::SlidingWindow { .. } = self.options.eviction {
            bail!(
                InvalidArgument,
                "a chat keeps whole turns, through which a sliding window cuts; create the session so that it drops the oldest turns"
            );
        }
        let chat = chat.unwrap_or(&self.conversation.options).clone();
        self.or_cancelled(options, |session| {
            session.follow_drafts(options)?;
            options.check(&session.model, true)?;
            let written = session.model.chat_text(chat.template.as_deref())?;
            for name in written.template().unread(&chat.variables) {
                tracing::warn!(
                    "the chat template never reads '{name}', so that it changes nothing"
                );
            }
            session.undone_on_error(|session| session.turn(messages, chat, options, on_piece))
        })
    }

    fn turn(
        &mut self,
        messages: Vec<Message>,
        chat: ChatOptions,
        options: &GenerateOptions,
        on_piece: &mut dyn FnMut(Piece<'_>) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let watch = Stopwatch::start(&mut self.cache);
        let _words = alloc::Budget::rewritten(self.text_bytes()).set_aside()?;
        let evicted = self.evicted;
        let model = self.model.clone();
        let written = model.chat_text(chat.template.as_deref())?;
        let form = written.form();
        let options = &with_stops(options, written.ends());
        let text = Transcript::new(&model, &[], options)?.showing(form.shown_tokens());
        let calls = match options.tool_calls {
            ToolCalls::Free => None,
            _ => Some(model.grammar_of_calls(form, &chat.tools)?),
        };
        let held = Constraint::new(&model, options, Some(form), calls)?;
        let Plan {
            messages,
            tokens,
            opening,
            dropped,
        } = self.plan(messages, &chat)?;
        self.model.check_tokens(&tokens.added)?;
        tracing::debug!(
            "a turn keeps {} of {} tokens and runs {}",
            tokens.kept,
            self.len(),
            tokens.added.len()
        );
        self.keep(tokens.kept)?;
        memory::make_room(&mut self.tokens, tokens.added.len())?;
        self.push(&tokens.added);
        self.evict(dropped);
        let _generating = model.generates(&self.cache);
        self.making_way(Session::flush)?;
        call::check()?;
        let calls = calls_in(&messages);
        let answer = Answer::new(form, &opening, !chat.tools.is_empty(), calls).within(
            &model,
            form,
            chat.reasoning_budget,
            options.tool_calls == ToolCalls::Required,
        )?;
        self.conversation = Conversation {
            begun: true,
            messages,
            answer: Some(Answering {
                start: self.len(),
                opening,
                whole: false,
                said: None,
            }),
            options: chat,
        };
        let generation =
            GenerationLoop::new(self, text, Some(answer), held, options, on_piece)?.run(watch)?;
        let mut generation = generation.begun()?;
        generation.prompt_tokens = tokens.added.len();
        generation.evicted = self.evicted - evicted;
        generation.cached_tokens = generation.cached_tokens.saturating_sub(tokens.kept);
        Ok(generation)
    }

    /// Truncates the sequence to its first `len` tokens.
    fn keep(&mut self, len: usize) -> Result<()> {
        if len < self.len() {
            self.cache.truncate(len.min(self.cache.len()))?;
            self.tokens.truncate(len);
            self.next.forget();
            self.seed = sampler::new_seed();
        }
        Ok(())
    }

    /// Plans how the sequence becomes the prompt for an answer to `messages`. If the context is too small and the options allow it, the
    /// plan leaves out old turns.
    fn plan(&self, messages: Vec<Message>, chat: &ChatOptions) -> Result<Plan> {
        let following = match chat.keep_reasoning {
            true => self.following(&messages, chat)?,
            false => None,
        };
        let (tokens, opening) = match following {
            Some(found) => found,
            None => self.aligned(&messages, chat)?,
        };
        let (context, len) = (self.options.context, tokens.len());
        if len <= context {
            return Ok(Plan {
                messages,
                tokens,
                opening,
                dropped: 0,
            });
        }
        match self.shortened(&messages, chat, len, 0)? {
            Some(plan) => Ok(plan),
            None => bail!(
                ContextFull,
                "the conversation takes {len} tokens, and the context holds {context}{}",
                match self.options.eviction {
                    Eviction::Error | Eviction::SlidingWindow { .. } => "",
                    Eviction::DropOldest { .. } => ", which what has to be kept takes alone",
                }
            ),
        }
    }

    /// Aligns the prompt for `messages` with the sequence. Also returns the end of the prompt's text.
    fn aligned(&self, messages: &[Message], chat: &ChatOptions) -> Result<(Aligned, String)> {
        let tokenizer = self.model.tokenizer()?;
        let prompt = prompt(&self.model, messages, true, chat)?;
        let tokens = prompt.align(tokenizer, &beginning(&self.model, chat)?, &self.tokens)?;
        Ok((tokens, end_of(&prompt.text())))
    }

    /// If `messages` continue the conversation that the sequence holds, the tokens to append to the whole sequence, and the end of the
    /// prompt's text. `None` if they do not, or if the template's output does not show where the held answer ends.
    fn following(
        &self,
        messages: &[Message],
        chat: &ChatOptions,
    ) -> Result<Option<(Aligned, String)>> {
        let held = self.messages()?;
        let Some(answer) = held.len().checked_sub(1) else {
            return Ok(None);
        };
        // Clients may omit the reasoning that they received.
        let same = |given: &Message, held: &Message| {
            let reasoning_content = match &given.reasoning_content {
                None => None,
                Some(_) => held.reasoning_content.clone(),
            };
            let held = Message {
                reasoning_content,
                ..held.clone()
            };
            *given == held
        };
        if self.conversation.answer.is_none()
            || messages.len() <= held.len()
            || !messages
                .iter()
                .zip(&held)
                .all(|(given, held)| same(given, held))
        {
            return Ok(None);
        }
        // A unique placeholder stands for the answer's content. The text that the template writes after it closes the answer.
        let mark = free_mark(messages);
        let without_reasoning = |message: &Message| Message {
            reasoning_content: None,
            ..message.clone()
        };
        let mut before: Vec<Message> = held.iter().map(without_reasoning).collect();
        let new = &messages[held.len()..];
        let spelled = |messages: &[Message], new: &[Message], prompt: bool| {
            self::prompt(&self.model, &[messages, new].concat(), prompt, chat)
        };
        let added = if before[answer].tool_calls.is_empty() {
            before[answer] = Message::new("assistant", &*mark);
            let whole = spelled(&before, new, true)?;
            let Some(at) = whole.end_of_only(&mark) else {
                return Ok(None);
            };
            whole.after(at)
        } else {
            let closed = spelled(&before, &[], false)?;
            let whole = spelled(&before, new, true)?;
            if !whole.begins_with(&closed) {
                return Ok(None);
            }
            before[answer] = Message::new("assistant", &*mark);
            let closing = spelled(&before, &[], false)?;
            let Some(at) = closing.end_of_only(&mark) else {
                return Ok(None);
            };
            let rest = whole.after(closed.len());
            rest.preceded_by(&closing.after(at))
        };
        let tokens = added.tokens(self.model.tokenizer()?, !self.is_empty())?;
        let aligned = Aligned {
            kept: self.len(),
            added: tokens,
        };
        Ok(Some((aligned, end_of(&added.text()))))
    }

    /// The conversation without its oldest turns, so that `extra` more tokens fit after its prompt. Drops the older half of the turns
    /// between the kept prefix and the last question, or more if that is not enough. Everything before the first user message always stays.
    /// `None` if eviction is off or cannot make room. The conversation takes `whole` tokens now.
    fn shortened(
        &self,
        messages: &[Message],
        chat: &ChatOptions,
        whole: usize,
        extra: usize,
    ) -> Result<Option<Plan>> {
        let Eviction::DropOldest { keep } = self.options.eviction else {
            return Ok(None);
        };
        let starts: Vec<usize> = (0..messages.len())
            .filter(|&i| messages[i].role == "user")
            .collect();
        let tokenizer = self.model.tokenizer()?;
        let start = beginning(&self.model, chat)?;
        let mut first = 0;
        while keep > 0 && first < starts.len() {
            let head = prompt(&self.model, &messages[..starts[first]], false, chat)?;
            if start.len() + head.tokens(tokenizer, false)?.len() >= keep {
                break;
            }
            first += 1;
        }
        let Some((&from, later)) = starts.get(first..).and_then(<[usize]>::split_first) else {
            return Ok(None);
        };
        let without = |to: usize| [&messages[..from], &messages[to..]].concat();
        let bytes = |messages: &[Message]| Ok(prompt(&self.model, messages, true, chat)?.len());
        let (most, least) = (
            bytes(messages)?,
            bytes(&without(*later.last().unwrap_or(&from)))?,
        );
        for &to in later {
            let shorter = without(to);
            let is_last = later.last() == Some(&to);
            if !is_last && bytes(&shorter)? > least + (most - least) / 2 {
                continue;
            }
            let (tokens, opening) = self.aligned(&shorter, chat)?;
            if tokens.len() + extra <= self.options.context {
                let dropped = whole.saturating_sub(tokens.len());
                return Ok(Some(Plan {
                    messages: shorter,
                    tokens,
                    opening,
                    dropped,
                }));
            }
        }
        Ok(None)
    }

    /// Plans how to shorten the conversation so that `count` more tokens of the current answer fit.
    pub(super) fn shortened_for(&self, count: usize) -> Result<Option<Plan>> {
        let Conversation {
            messages,
            answer: Some(answer),
            options,
            ..
        } = &self.conversation
        else {
            return Ok(None);
        };
        self.shortened(
            messages,
            options,
            answer.start,
            self.len() - answer.start + count,
        )
    }

    /// Evicts the turns that a shortened conversation leaves out. The tokens after the kept prefix are then pending.
    pub(super) fn shorten(&mut self, plan: Plan) -> Result<()> {
        let Some(answer) = &mut self.conversation.answer else {
            return Ok(());
        };
        let said = self.tokens[answer.start..].to_vec();
        answer.start = plan.tokens.len();
        answer.opening = plan.opening;
        answer.said = None;
        self.conversation.messages = plan.messages;
        self.keep(plan.tokens.kept)?;
        self.push(&plan.tokens.added);
        self.push(&said);
        self.evict(plan.dropped);
        Ok(())
    }

    /// The conversation that remains if the sequence is truncated to `len` tokens.
    pub(super) fn conversation_until(&self, len: usize) -> Result<Conversation> {
        let mut left = self.conversation.clone();
        if len == 0 {
            return Ok(Conversation::default());
        }
        if left.is_empty() {
            return Ok(left);
        }
        if let Some(answer) = &mut left.answer
            && answer.start <= len
        {
            answer.whole = false;
            answer.said = None;
            return Ok(left);
        }
        let held = &self.tokens[..len];
        let options = &left.options;
        let asked = |k: &usize| self.conversation.messages[*k].role == "assistant";
        for k in (0..left.messages.len()).rev().filter(asked) {
            let before = &left.messages[..k];
            let tokenizer = self.model.tokenizer()?;
            let start = beginning(&self.model, options)?;
            let align = |generation: bool| {
                let prompt = prompt(&self.model, before, generation, options)?;
                Ok((
                    prompt.align(tokenizer, &start, held)?,
                    end_of(&prompt.text()),
                ))
            };
            // A template may open a new answer differently from an earlier one.
            let (closed, _) = align(false)?;
            let (opened, opening) = align(true)?;
            if !closed.added.is_empty() || opened.kept < closed.kept || opened.kept > len {
                continue;
            }
            let opens = opened.added.is_empty();
            if !opens && opened.kept == len {
                // The cut lies within the text that opens the answer.
                continue;
            }
            let answer = Answering {
                start: opened.kept,
                opening: if opens { opening } else { String::new() },
                whole: false,
                said: None,
            };
            let said = &held[opened.kept..];
            let written = self.model.chat_text(options.template.as_deref())?;
            let ends = |t: &u32| self.model.stop_tokens().contains(t) || written.ends().contains(t);
            let is_whole = said.iter().any(ends) || {
                let spoken = self.spoken(&answer, said)?.text();
                let wanted = left.messages[k].text();
                spoken.len() > wanted.len() && spoken.starts_with(&wanted)
            };
            left.answer = None;
            if is_whole {
                left.messages.truncate(k + 1);
            } else {
                left.messages.truncate(k);
                left.answer = Some(answer);
            }
            return Ok(left);
        }
        let before_user = left.messages.iter().position(|m| m.role == "user");
        left.messages.truncate(before_user.unwrap_or(0));
        left.answer = None;
        Ok(left)
    }
}

/// Renders a conversation as text; `generation` opens the assistant's answer.
pub fn render(
    model: &Served,
    messages: &[Message],
    generation: bool,
    chat: &ChatOptions,
) -> Result<String> {
    let written = model.chat_text(chat.template.as_deref())?;
    let template = written.template();
    template.render_with(messages, generation, &chat.all_variables())
}

/// The tokens of the rendered conversation, as a session runs them: names of special tokens in messages are text.
pub fn tokenize(
    model: &Served,
    messages: &[Message],
    generation: bool,
    chat: &ChatOptions,
) -> Result<Vec<u32>> {
    let prompt = prompt(model, messages, generation, chat)?;
    let aligned = prompt.align(model.tokenizer()?, &beginning(model, chat)?, &[])?;
    Ok(aligned.added)
}

/// A conversation rendered by the template, with special tokens and plain text kept apart.
fn prompt(
    model: &Served,
    messages: &[Message],
    generation: bool,
    chat: &ChatOptions,
) -> Result<Prompt> {
    Prompt::new(
        model.chat_text(chat.template.as_deref())?.template(),
        model.tokenizer()?,
        messages,
        generation,
        &chat.all_variables(),
    )
}

/// The tokens before the template's text. A template writes them itself; if ChatML stands in for one, the tokenizer adds them.
fn beginning(model: &Served, chat: &ChatOptions) -> Result<Vec<u32>> {
    let tokenizer: &Tokenizer = model.tokenizer()?;
    let mut whole = Vec::new();
    if model.chat_text(chat.template.as_deref())?.is_stand_in() {
        let bare = tokenizer.encode("a", false)?;
        whole = tokenizer.encode("a", true)?;
        let at = whole.windows(bare.len().max(1)).position(|w| w == bare);
        whole.truncate(at.unwrap_or(0));
    }
    Ok(whole)
}

/// `options` with further stop tokens, unless they ignore those of the model.
fn with_stops<'a>(options: &'a GenerateOptions, ends: &[u32]) -> Cow<'a, GenerateOptions> {
    let mut options = Cow::Borrowed(options);
    if !ends.is_empty() && !options.ignore_model_stops {
        options.to_mut().stop_tokens.extend(ends);
    }
    options
}

fn end_of(text: &str) -> String {
    text[text.ceil_char_boundary(text.len().saturating_sub(OPENING))..].to_owned()
}

fn calls_in(messages: &[Message]) -> usize {
    messages.iter().map(|m| m.tool_calls.len()).sum()
}

/// A placeholder that occurs in no message.
fn free_mark(messages: &[Message]) -> String {
    let mut marks = (0..).map(|i| format!("content-{i}-here"));
    let free = |mark: &String| !messages.iter().any(|m| m.text().contains(&**mark));
    marks.find(free).unwrap_or_default()
}
