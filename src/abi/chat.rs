//! Chat: conversations in the format that a model was trained on
//!
//! A turn takes the conversation in the format of common chat servers, and generates the answer. It is a JSON array of
//! messages, each an object with `role` (system, developer, user, assistant or tool) and `content` (a string, or an array
//! of parts `{"type": "text", "text": ...}`). An assistant's message may also have `reasoning_content`, the reasoning
//! before the answer, and `tool_calls`; a tool's message has the `tool_call_id` that it answers.
//!
//! The model's chat template (ChatML if it has none) renders that as text. The longest common prefix of this text and the
//! tokens in the session is kept in the cache, and only the rest is run. So regenerating an answer, changing an earlier
//! message or the system prompt, and passing the results of tools are turns like any other. Names of special tokens within
//! messages are treated as plain text.
//!
//! A turn may take another template than the one before: the whole conversation is rendered by it, and again the longest common prefix of
//! tokens is kept, often none. With `keep_reasoning` the tokens in the session stay, and the other template writes only what follows them.

use std::ffi::c_char;
use std::ffi::c_void;
use std::sync::Arc;

use serde_json::Map;

use super::arguments::{Growing, copy_items, copy_text, fill, flag, options, text};
use super::guard::enter;
use super::handle;
use super::model::{NVFP4_Model, counted, tokens_out};
use super::session::{
    NVFP4_GenerateOptions, NVFP4_GenerationResult, NVFP4_Session, NVFP4_TokenCallback, State,
    copy_last, generate, look,
};
use super::status::NVFP4_Status;
use crate::base::error::{Result, bail};
use crate::base::memory::copied;
use crate::engine::Served;
use crate::session::{ChatOptions, render, tokenize};
use crate::text::{messages_from_json, tools_from_json, variables_from_json};

/// How to render and answer a turn. Fill with NVFP4_chat_options_init(), then change what is to differ. Texts are read during the call
/// only.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_ChatOptions {
    /// sizeof(NVFP4_ChatOptions) as the caller knows it.
    pub struct_size: u32,
    /// 1 keeps the reasoning of earlier answers in the session, even if the template would remove it. A turn then runs only
    /// its new tokens, but the model gets a prompt unlike those it was trained on, and the context fills sooner. Default:
    /// 0.
    pub keep_reasoning: i32,
    /// The most tokens of reasoning, or -1 for any number. After that many the library closes the reasoning with the text
    /// that the model's maker provides for this, and the answer follows. No effect on models without reasoning. Default:
    /// -1.
    pub reasoning_budget: i64,
    /// Variables of the chat template: a JSON object such as `{"enable_thinking": false}`, or NULL for none. A
    /// variable that the template never reads has no effect, and is logged as a warning. Default: NULL.
    pub variables: *const c_char,
    /// Bytes of `variables`.
    pub variables_length: usize,
    /// The tools that the model may call: a JSON array of `{"type": "function", "function": {"name": ..., "description":
    /// ..., "parameters": {...}}}`, or NULL for none. #NVFP4_UNSUPPORTED if the template does not support tools. Default:
    /// NULL.
    pub tools: *const c_char,
    /// Bytes of `tools`.
    pub tools_length: usize,
    /// A Jinja template in UTF-8 that renders the conversation in place of the model's own, or NULL for that. Reasoning, tool calls and
    /// the ends of answers are recognised by it as they are by the model's. #NVFP4_INVALID_ARGUMENT names the line of one that does not
    /// compile, or fails. The model keeps the 16 that were used last compiled. A conversation may go on with another one: see the beginning
    /// of this chapter. Default: NULL.
    pub chat_template: *const c_char,
    /// Bytes of `chat_template`.
    pub chat_template_length: usize,
}

// SAFETY: integers and pointers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_ChatOptions {
    const NAME: &'static str = "NVFP4_ChatOptions";
    const EARLIER: &'static [usize] = &[48];
    fn defaults() -> Self {
        NVFP4_ChatOptions {
            struct_size: size_of::<Self>() as u32,
            keep_reasoning: 0,
            reasoning_budget: -1,
            variables: std::ptr::null(),
            variables_length: 0,
            tools: std::ptr::null(),
            tools_length: 0,
            chat_template: std::ptr::null(),
            chat_template_length: 0,
        }
    }
}

impl NVFP4_ChatOptions {
    /// Reads `chat`; `None` if it is NULL.
    ///
    /// # Safety
    /// It and its texts must be readable.
    pub(super) unsafe fn read(chat: *const Self) -> Result<Option<ChatOptions>> {
        if chat.is_null() {
            return Ok(None);
        }
        // SAFETY: promised by the caller.
        let chat = unsafe { options(chat) }?;
        // SAFETY: as above.
        let (variables, tools, template) = unsafe {
            let (template, length) = (chat.chat_template, chat.chat_template_length);
            (
                text("variables", chat.variables, chat.variables_length)?,
                text("tools", chat.tools, chat.tools_length)?,
                text("chat_template", template, length)?,
            )
        };
        Ok(Some(ChatOptions {
            template: match template.is_empty() {
                true => None,
                false => Some(copied(template)?),
            },
            variables: match variables.is_empty() {
                true => Map::new(),
                false => variables_from_json(variables)?,
            },
            tools: match tools.is_empty() {
                true => Vec::new(),
                false => tools_from_json(tools)?,
            },
            keep_reasoning: flag("keep_reasoning", chat.keep_reasoning)?,
            reasoning_budget: match chat.reasoning_budget {
                -1 => None,
                tokens => match usize::try_from(tokens) {
                    Ok(tokens) => Some(tokens),
                    Err(_) => bail!(
                        InvalidArgument,
                        "reasoning_budget is {tokens}; it is a number of tokens, or -1 for any"
                    ),
                },
            },
        }))
    }
}

/// Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_ChatOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_chat_options_init(
    options: *mut NVFP4_ChatOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_chat_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_ChatOptions::defaults()) }
    })
}

/// Adds a user message to the conversation of the session and generates the answer. The first turn needs an empty session,
/// and begins with the system prompt of the session's options.
///
/// - `text`, `text_length`: the user's message, in UTF-8.
/// - `chat`: NULL for the options of the turn before, or the defaults.
/// - The rest is as for NVFP4_session_generate(). A turn that is cancelled without a generated token is no part of the
///   conversation: the session is as it was before the call.
/// - With `max_tokens` 0 the prompt is run and nothing is generated, so that steps of many sessions can continue from there.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_chat(
    session: *mut NVFP4_Session,
    text: *const c_char,
    text_length: usize,
    chat: *const NVFP4_ChatOptions,
    options: *const NVFP4_GenerateOptions,
    callback: NVFP4_TokenCallback,
    user: *mut c_void,
    result: *mut NVFP4_GenerationResult,
) -> NVFP4_Status {
    enter("NVFP4_session_chat", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let text = self::text("text", text, text_length)?;
            let chat = NVFP4_ChatOptions::read(chat)?;
            generate(
                session,
                options,
                callback,
                user,
                result,
                |session, options, on_piece| session.chat(text, chat.as_ref(), options, on_piece),
            )
        }
    })
}

/// Generates the answer to a conversation that is passed as a whole; the system prompt of the session's options is not
/// used. With `max_tokens` 0 the prompt is run and nothing is generated, so that steps of many sessions can continue from
/// there, unless the turn was cancelled.
///
/// - `messages`, `messages_length`: a JSON array, as described at the beginning of this chapter. Error messages name the
///   line and column, or the number of the message.
/// - `chat`: NULL for the options of the turn before, or the defaults.
/// - The rest is as for NVFP4_session_chat().
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_chat_messages(
    session: *mut NVFP4_Session,
    messages: *const c_char,
    messages_length: usize,
    chat: *const NVFP4_ChatOptions,
    options: *const NVFP4_GenerateOptions,
    callback: NVFP4_TokenCallback,
    user: *mut c_void,
    result: *mut NVFP4_GenerationResult,
) -> NVFP4_Status {
    enter("NVFP4_session_chat_messages", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let messages = messages_from_json(text("messages", messages, messages_length)?)?;
            let chat = NVFP4_ChatOptions::read(chat)?;
            generate(
                session,
                options,
                callback,
                user,
                result,
                |session, options, on_piece| {
                    session.chat_messages(&messages, chat.as_ref(), options, on_piece)
                },
            )
        }
    })
}

/// Copies the conversation of the chat turns, as a JSON array of messages like those of NVFP4_session_chat_messages(),
/// including the last answer with its reasoning and tool calls; during a call, the conversation from before it. For the
/// buffer see TEXT above.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_messages(
    session: *const NVFP4_Session,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_session_messages", || {
        let json = look(session, State::messages, |s| match &s.messages {
            Ok(json) => copied(json),
            Err(e) => Err(e.clone()),
        })?;
        // SAFETY: the pointers are as the header asks.
        unsafe { copy_text(&json, buffer, capacity, length) }
    })
}

/// Copies the model's reasoning before the last answer; empty if there was none. For the buffer see TEXT above.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_reasoning(
    session: *mut NVFP4_Session,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_session_reasoning", || {
        // SAFETY: the pointers are as the header asks.
        unsafe { copy_last(session, |state| &state.reasoning, buffer, capacity, length) }
    })
}

/// Copies the tool calls of the last answer, as a JSON array of objects like those of #NVFP4_PART_TOOL_CALL. Pass their
/// results as messages of the role tool. For the buffer see TEXT above.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_session_tool_calls(
    session: *mut NVFP4_Session,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_session_tool_calls", || {
        // SAFETY: the pointers are as the header asks.
        unsafe { copy_last(session, |state| &state.tool_calls, buffer, capacity, length) }
    })
}

/// Copies the text that a turn with these messages is rendered as. `add_generation_prompt` 1 appends the beginning of the
/// assistant's answer. Asking for the length first does not double the work, as for NVFP4_model_tokenize(). In this text,
/// names of special tokens within messages look like the template's own: do not tokenize it if the messages are untrusted,
/// but let a session run them, or take their tokens from NVFP4_model_tokenize_messages().
///
/// - `messages`, `messages_length`, `chat`: as for NVFP4_session_chat_messages(); `chat` NULL for the defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_render_messages(
    model: *const NVFP4_Model,
    messages: *const c_char,
    messages_length: usize,
    chat: *const NVFP4_ChatOptions,
    add_generation_prompt: i32,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_model_render_messages", || {
        let object: Arc<Served> = handle::get::<Served>("model", model)?;
        // SAFETY: the pointers are as the header asks.
        let (json, chat) = unsafe {
            (
                text("messages", messages, messages_length)?,
                NVFP4_ChatOptions::read(chat)?.unwrap_or_default(),
            )
        };
        let prompt = flag("add_generation_prompt", add_generation_prompt)?;
        let input = [json.as_bytes(), format!("{chat:?}").as_bytes()].concat();
        let render = || render(&object, &messages_from_json(json)?, prompt, &chat);
        counted(model, prompt, &input[..], render, |text| {
            // SAFETY: as above.
            let result = unsafe { copy_text(text, buffer, capacity, length) };
            (text.len() <= capacity, result)
        })
    })
}

/// Tokens of messages. A type of its own keeps them apart from tokens of texts.
struct MessageTokens(Vec<i32>);

/// Converts a conversation to the token ids that a session runs for it: those of the text that it is rendered as, in which names
/// of special tokens within messages are plain text. For hosts that run a prompt themselves, in chunks for example. Writes the
/// number of tokens to `count`; see ARRAYS OUT above. Asking for the number first does not double the work, as for
/// NVFP4_model_tokenize().
///
/// - The rest is as for NVFP4_model_render_messages().
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_tokenize_messages(
    model: *const NVFP4_Model,
    messages: *const c_char,
    messages_length: usize,
    chat: *const NVFP4_ChatOptions,
    add_generation_prompt: i32,
    tokens: *mut i32,
    capacity: usize,
    count: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_model_tokenize_messages", || {
        let object: Arc<Served> = handle::get::<Served>("model", model)?;
        // SAFETY: the pointers are as the header asks.
        let (json, chat) = unsafe {
            (
                text("messages", messages, messages_length)?,
                NVFP4_ChatOptions::read(chat)?.unwrap_or_default(),
            )
        };
        let prompt = flag("add_generation_prompt", add_generation_prompt)?;
        let input = [json.as_bytes(), format!("{chat:?}").as_bytes()].concat();
        let encode = || {
            let ids = tokenize(&object, &messages_from_json(json)?, prompt, &chat)?;
            tokens_out(&ids).map(MessageTokens)
        };
        counted(model, prompt, &input[..], encode, |ids| {
            // SAFETY: as above.
            let result = unsafe { copy_items(&ids.0, tokens, capacity, count) };
            (ids.0.len() <= capacity, result)
        })
    })
}
