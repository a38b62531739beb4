//! Conversations, as a model was trained to have them
//!
//! A turn gives the conversation as chat servers take it, and generates the answer: JSON of an array of messages, each an object with
//! `role` (system, developer, user, assistant or tool) and `content` (a text, or an array of parts `{"type": "text", "text": ...}`).
//! An assistant's message may have `reasoning_content`, what was thought before, and `tool_calls`; a tool's has the
//! `tool_call_id` that it answers.
//!
//! The model's chat template (ChatML if it has none) writes that as text. Of the tokens that the session holds those stay with which
//! the new text begins, and the rest is run: so an answer that is asked for again, an earlier message that has changed, another system
//! prompt and the results of tools are turns as any other. Names of special tokens in messages count as plain text.

use std::ffi::c_char;
use std::ffi::c_void;
use std::sync::Arc;

use serde_json::Map;

use super::arguments::{Growing, copy_text, fill, flag, options, text};
use super::guard::enter;
use super::handle;
use super::model::{NVFP4_Model, counted};
use super::session::{
    NVFP4_GenerateOptions, NVFP4_GenerationResult, NVFP4_Session, NVFP4_TokenCallback, State,
    copy_last, generate, look,
};
use super::status::NVFP4_Status;
use crate::base::error::{Result, bail};
use crate::base::memory::copied;
use crate::model::Model;
use crate::session::{ChatOptions, render};
use crate::text::{messages_from_json, tools_from_json, variables_from_json};

/// How a turn is written and answered. Fill with NVFP4_chat_options_init(), then change what is to differ. Texts are read during the
/// call only.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_ChatOptions {
    /// sizeof(NVFP4_ChatOptions) as the caller knows it.
    pub struct_size: u32,
    /// 1 leaves earlier answers in the session with their reasoning, whatever the template does about it: a turn then runs only
    /// what it adds, but the model sees what it was not trained on, and the context fills sooner. Default: 0.
    pub keep_reasoning: i32,
    /// The most tokens that a thought may have, or -1 for any number. Then it is ended in the words of the model's maker, and the answer
    /// follows. A model that does not think has none to end. Default: -1.
    pub reasoning_budget: i64,
    /// Variables of the model's template: a JSON object such as `{"enable_thinking": false}`, or NULL for none. One that the template
    /// never reads changes nothing, and is logged as a warning. Default: NULL.
    pub variables: *const c_char,
    /// Bytes of `variables`.
    pub variables_length: usize,
    /// The tools that the model may call: a JSON array of `{"type": "function", "function": {"name": ..., "description": ...,
    /// "parameters": {...}}}`, or NULL for none. #NVFP4_UNSUPPORTED if the template knows no tools. Default: NULL.
    pub tools: *const c_char,
    /// Bytes of `tools`.
    pub tools_length: usize,
}

// SAFETY: integers and pointers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_ChatOptions {
    const NAME: &'static str = "NVFP4_ChatOptions";
    fn defaults() -> Self {
        NVFP4_ChatOptions {
            struct_size: size_of::<Self>() as u32,
            keep_reasoning: 0,
            reasoning_budget: -1,
            variables: std::ptr::null(),
            variables_length: 0,
            tools: std::ptr::null(),
            tools_length: 0,
        }
    }
}

impl NVFP4_ChatOptions {
    /// What `chat` says, if it is not NULL.
    ///
    /// # Safety
    /// It and its texts must be readable.
    unsafe fn read(chat: *const Self) -> Result<Option<ChatOptions>> {
        if chat.is_null() {
            return Ok(None);
        }
        // SAFETY: promised by the caller.
        let chat = unsafe { options(chat) }?;
        // SAFETY: as above.
        let (variables, tools) = unsafe {
            (
                text("variables", chat.variables, chat.variables_length)?,
                text("tools", chat.tools, chat.tools_length)?,
            )
        };
        Ok(Some(ChatOptions {
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
pub unsafe extern "C" fn NVFP4_chat_options_init(
    options: *mut NVFP4_ChatOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_chat_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_ChatOptions::defaults()) }
    })
}

/// Says something to the model and generates the answer: a turn whose messages are those that the session has, and one more of the
/// user's. The first takes an empty session, and begins with the system prompt of its options.
///
/// - `text`, `text_length`: what the user says, in UTF-8.
/// - `chat`: NULL for the options of the turn before, or the defaults.
/// - The rest is as for NVFP4_session_generate(). Cancelled before its first token is due, it fails with #NVFP4_CANCELLED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_chat(
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

/// Generates the answer to a conversation, all of which is given; the system prompt of the session's options has no part in it. With
/// `max_tokens` 0 the prompt is run and nothing generated, so that steps of many sessions can go on from there.
///
/// - `messages`, `messages_length`: a JSON array, as said at the top of this chapter. What is wrong with it is told with line and
///   column, or with the number of the message.
/// - `chat`: NULL for the options of the turn before, or the defaults.
/// - The rest is as for NVFP4_session_chat().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_chat_messages(
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

/// Copies the conversation of the chat turns, as a JSON array of messages like those of NVFP4_session_chat_messages(), the last answer
/// with its reasoning and calls of tools; during a call, as it was before. For the buffer see TEXT above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_messages(
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

/// Copies what the model thought before the last answer; empty where it did not. For the buffer see TEXT above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_reasoning(
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

/// Copies the calls of tools in the last answer, as a JSON array of objects like those of #NVFP4_PART_TOOL_CALL. Their results go back as
/// messages of the role tool. For the buffer see TEXT above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_session_tool_calls(
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

/// Copies the text that a turn with these messages is written as. `add_generation_prompt` 1 opens the assistant's answer. Asking for
/// the length first costs nothing, as for NVFP4_model_tokenize(). Names of special tokens in messages cannot be told from
/// the template's own in this text: where strangers write messages, let a session run them.
///
/// - `messages`, `messages_length`, `chat`: as for NVFP4_session_chat_messages(); `chat` NULL for the defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn NVFP4_model_render_messages(
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
        let object: Arc<Model> = handle::get::<Model>("model", model)?;
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
