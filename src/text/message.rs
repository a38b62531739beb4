//! Messages of a conversation, in the JSON format of chat servers, with their tools and template variables.

use serde_json::{Map, Value, json};

use super::ToolCall;
use crate::base::Result;
use crate::base::alloc::{Budget, foreign};
use crate::base::error::{bail, err};

/// The roles of messages. `developer` is a newer name for `system`.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Keys that clients copy from a server's answer into the next request, and that no template uses.
const IGNORED: [&str; 2] = ["refusal", "annotations"];

/// Variables that the library passes to every template, each with the way in which a caller sets it instead.
const OWN_VARIABLES: [(&str, &str); 5] = [
    ("messages", "are passed as messages"),
    ("tools", "are passed as tools"),
    ("add_generation_prompt", "is an argument of its own"),
    ("bos_token", "comes from the model's tokenizer_config.json"),
    ("eos_token", "comes from the model's tokenizer_config.json"),
];

/// Bytes that each value adds to the size of a message, besides its text.
const FOR_VALUE: usize = 16;

/// The content of a message.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// No content, as in a message that only calls tools.
    None,
    /// A text.
    Text(String),
    /// Several texts, which some templates render differently from one.
    Parts(Vec<String>),
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// `system`, `developer`, `user`, `assistant`, `tool`, or another role that the template knows.
    pub role: String,
    /// Its content.
    pub content: Content,
    /// The assistant's reasoning before the content.
    pub reasoning_content: Option<String>,
    /// The assistant's tool calls.
    pub tool_calls: Vec<ToolCall>,
    /// The call that a `tool` message answers.
    pub tool_call_id: Option<String>,
    /// The name of the speaker, or of the tool that a `tool` message is from.
    pub name: Option<String>,
}

impl Message {
    /// A message of `role` with `content`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Message {
            role: role.into(),
            content: Content::Text(content.into()),
            reasoning_content: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }

    /// The content as one text: parts become lines, no content becomes an empty text.
    pub fn text(&self) -> String {
        match &self.content {
            Content::None => String::new(),
            Content::Text(text) => text.clone(),
            Content::Parts(parts) => parts.join("\n"),
        }
    }

    /// The size of the message: bytes of its texts, and a fixed number for each value.
    pub(crate) fn size(&self) -> usize {
        let content = match &self.content {
            Content::None => 0,
            Content::Text(text) => text.len(),
            Content::Parts(parts) => parts.iter().map(|text| FOR_VALUE + text.len()).sum(),
        };
        let calls = self
            .tool_calls
            .iter()
            .map(|call| FOR_VALUE + call.id.len() + call.name.len() + object_size(&call.arguments));
        let others = [&self.reasoning_content, &self.tool_call_id, &self.name];
        let others: usize = others.into_iter().flatten().map(String::len).sum();
        self.role.len() + content + others + calls.sum::<usize>()
    }
}

fn object_size(object: &Map<String, Value>) -> usize {
    let fields = object.iter();
    fields.map(|(name, v)| name.len() + value_size(v)).sum()
}

fn value_size(value: &Value) -> usize {
    FOR_VALUE
        + match value {
            Value::String(text) => text.len(),
            Value::Array(values) => values.iter().map(value_size).sum(),
            Value::Object(object) => object_size(object),
            _ => 0,
        }
}

/// Reads `[{"role": ..., "content": ...}, ...]`, the format of chat servers.
///
/// - `content` is a text, or an array of `{"type": "text", "text": ...}`; an assistant's message with `tool_calls` or
///   reasoning may have none.
/// - `reasoning_content`, or `reasoning`, is an assistant's reasoning.
/// - `tool_calls` holds `{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}`, or what is in
///   `function` alone. Arguments are an object, or a string of its JSON; an empty string stands for no arguments.
/// - A `tool` message answers an earlier call, which `tool_call_id` names.
pub fn messages_from_json(json: &str) -> Result<Vec<Message>> {
    foreign(Budget::values(json.len()), || {
        let Value::Array(items) = parse("messages", json)? else {
            bail!(
                InvalidArgument,
                "messages are not an array; they are to be [{{\"role\": ..., \"content\": ...}}, ...]"
            );
        };
        messages_from_values(items)
    })
}

/// [`messages_from_json`] of the elements of its array.
pub fn messages_from_values(items: Vec<Value>) -> Result<Vec<Message>> {
    let mut messages: Vec<Message> = Vec::with_capacity(items.len());
    for (index, item) in items.into_iter().enumerate() {
        let message = read_message(item)
            .and_then(|message| answers_a_call(message, &messages))
            .map_err(|e| e.within(format_args!("message {index}")))?;
        messages.push(message);
    }
    Ok(messages)
}

/// The inverse of [`messages_from_json`], with the arguments of calls as strings of JSON, as chat servers write them.
pub fn messages_to_json(messages: &[Message]) -> Value {
    messages.iter().map(write_message).collect()
}

/// Reads an array of `{"type": "function", "function": {"name": ..., ...}}`. The object of `function` alone is accepted
/// too.
pub fn tools_from_json(json: &str) -> Result<Vec<Value>> {
    foreign(Budget::values(json.len()), || {
        let Value::Array(items) = parse("tools", json)? else {
            bail!(
                InvalidArgument,
                "tools are not an array; they are to be [{{\"type\": \"function\", \"function\": {{\"name\": ...}}}}, ...]"
            );
        };
        items
            .into_iter()
            .enumerate()
            .map(|(index, item)| {
                read_tool(item).map_err(|e| e.within(format_args!("tool {index}")))
            })
            .collect()
    })
}

/// Reads an object of variables for a template. Refuses names that the library itself passes.
pub fn variables_from_json(json: &str) -> Result<Map<String, Value>> {
    foreign(Budget::values(json.len()), || {
        let value = parse("template variables", json)?;
        let Value::Object(variables) = value else {
            bail!(
                InvalidArgument,
                "template variables are {}, not an object of names and values",
                kind(&value)
            );
        };
        for (name, where_from) in OWN_VARIABLES {
            if variables.contains_key(name) {
                bail!(
                    InvalidArgument,
                    "{name} cannot be a template variable: {name} {where_from}"
                );
            }
        }
        Ok(variables)
    })
}

fn parse(what: &str, json: &str) -> Result<Value> {
    serde_json::from_str(json).map_err(|e| err!(InvalidArgument, "{what} are not JSON: {e}"))
}

/// The name of a value's type, for errors.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

fn object(value: Value) -> Result<Map<String, Value>> {
    match value {
        Value::Object(map) => Ok(map),
        other => bail!(InvalidArgument, "is {}, not an object", kind(&other)),
    }
}

/// Takes the text at `key` out of the object; None if it is missing or null.
fn take_text(map: &mut Map<String, Value>, key: &str) -> Result<Option<String>> {
    match map.remove(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => bail!(InvalidArgument, "{key} is {}, not a text", kind(&other)),
    }
}

fn read_message(item: Value) -> Result<Message> {
    let mut item = object(item)?;
    let Some(role) = take_text(&mut item, "role")? else {
        bail!(InvalidArgument, "has no role; it is one of {}", roles());
    };
    if !ROLES.contains(&role.as_str()) {
        let hint = match role.as_str() {
            "function" => {
                ". A function's result is a 'tool' message, with the tool_call_id of its call"
            }
            _ => "",
        };
        bail!(
            InvalidArgument,
            "role '{role}' is not known; it is one of {}{hint}",
            roles()
        );
    }
    let content = read_content(item.remove("content"))?;
    let reasoning_content = match (
        take_text(&mut item, "reasoning_content")?,
        take_text(&mut item, "reasoning")?,
    ) {
        (Some(a), Some(b)) if a != b => bail!(
            InvalidArgument,
            "reasoning_content and reasoning are different texts; one of the two is enough"
        ),
        (a, b) => a.or(b),
    };
    let tool_calls = read_calls(item.remove("tool_calls"))?;
    let message = Message {
        content,
        reasoning_content,
        tool_calls,
        tool_call_id: take_text(&mut item, "tool_call_id")?,
        name: take_text(&mut item, "name")?,
        role,
    };
    let unknown = item
        .iter()
        .find(|(key, value)| !value.is_null() && !IGNORED.contains(&key.as_str()));
    if let Some((key, _)) = unknown {
        bail!(
            InvalidArgument,
            "key '{key}' is not known; a message has role, content, reasoning_content, tool_calls, tool_call_id and name"
        );
    }
    let Message { role, content, .. } = &message;
    let assistant = role == "assistant";
    for (key, there) in [
        ("tool_calls", !message.tool_calls.is_empty()),
        ("reasoning_content", message.reasoning_content.is_some()),
    ] {
        if there && !assistant {
            bail!(
                InvalidArgument,
                "a {role} message has {key}, which only an assistant's may have"
            );
        }
    }
    if message.tool_call_id.is_some() && role != "tool" {
        bail!(
            InvalidArgument,
            "a {role} message has tool_call_id, which only a tool's may have"
        );
    }
    let silent = message.tool_calls.is_empty() && message.reasoning_content.is_none();
    if *content == Content::None && silent {
        bail!(
            InvalidArgument,
            "has no content; only an assistant's message with tool_calls or reasoning_content may do without"
        );
    }
    Ok(message)
}

fn roles() -> String {
    ROLES.join(", ")
}

fn read_content(value: Option<Value>) -> Result<Content> {
    match value {
        None | Some(Value::Null) => Ok(Content::None),
        Some(Value::String(text)) => Ok(Content::Text(text)),
        Some(Value::Array(parts)) => {
            let texts = parts.into_iter().enumerate().map(|(i, part)| {
                read_part(part).map_err(|e| e.within(format_args!("content part {i}")))
            });
            Ok(Content::Parts(texts.collect::<Result<_>>()?))
        }
        Some(other) => bail!(
            InvalidArgument,
            "content is {}, not a text or an array of parts",
            kind(&other)
        ),
    }
}

fn read_part(part: Value) -> Result<String> {
    let mut part = object(part)?;
    match take_text(&mut part, "type")?.as_deref() {
        Some("text") => {}
        Some(other) => bail!(
            InvalidArgument,
            "is of type '{other}', and this library runs text models: parts are {{\"type\": \"text\", \"text\": ...}}"
        ),
        None => bail!(
            InvalidArgument,
            "has no type; parts are {{\"type\": \"text\", \"text\": ...}}"
        ),
    }
    take_text(&mut part, "text")?.ok_or_else(|| err!(InvalidArgument, "has no text"))
}

fn read_calls(value: Option<Value>) -> Result<Vec<ToolCall>> {
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(calls)) => {
            let calls = calls.into_iter().enumerate().map(|(i, call)| {
                read_call(call).map_err(|e| e.within(format_args!("tool call {i}")))
            });
            calls.collect()
        }
        Some(other) => bail!(
            InvalidArgument,
            "tool_calls is {}, not an array",
            kind(&other)
        ),
    }
}

fn read_call(call: Value) -> Result<ToolCall> {
    let mut call = object(call)?;
    let id = take_text(&mut call, "id")?.unwrap_or_default();
    let mut function = function_of(call)?;
    let Some(name) = take_text(&mut function, "name")? else {
        bail!(InvalidArgument, "has no name");
    };
    let arguments = match function.remove("arguments") {
        Some(Value::Object(arguments)) => arguments,
        Some(Value::String(text)) if text.trim().is_empty() => Map::new(),
        Some(Value::String(text)) => serde_json::from_str(&text).map_err(|e| {
            err!(
                InvalidArgument,
                "the arguments for '{name}' are no JSON object: {e}"
            )
        })?,
        other => bail!(
            InvalidArgument,
            "the arguments for '{name}' are {}, not an object or the JSON of one",
            other.as_ref().map_or("missing", kind)
        ),
    };
    Ok(ToolCall {
        id,
        name,
        arguments,
    })
}

/// The object in `function`, or `of` itself if it has no such key.
fn function_of(mut of: Map<String, Value>) -> Result<Map<String, Value>> {
    match take_text(&mut of, "type")?.as_deref() {
        None | Some("function") => {}
        Some(other) => bail!(
            InvalidArgument,
            "is of type '{other}'; the type there is, is 'function'"
        ),
    }
    match of.remove("function") {
        None | Some(Value::Null) => Ok(of),
        Some(function) => object(function).map_err(|e| e.within("function")),
    }
}

fn read_tool(item: Value) -> Result<Value> {
    let tool = object(item)?;
    let function = function_of(tool.clone())?;
    match function.get("name") {
        Some(Value::String(name)) if !name.is_empty() => {}
        Some(other) => bail!(
            InvalidArgument,
            "its name is {}, not a text that says something",
            kind(other)
        ),
        None => bail!(
            InvalidArgument,
            "has no name; a tool is {{\"type\": \"function\", \"function\": {{\"name\": ...}}}}"
        ),
    }
    Ok(match tool.get("function") {
        Some(Value::Object(_)) => Value::Object(tool),
        _ => json!({"type": "function", "function": function}),
    })
}

/// Returns `message`, or an error if it is a result that answers none of the calls in the messages `before` it.
fn answers_a_call(message: Message, before: &[Message]) -> Result<Message> {
    if message.role != "tool" {
        return Ok(message);
    }
    let calls = || before.iter().flat_map(|m| &m.tool_calls);
    if calls().next().is_none() {
        bail!(
            InvalidArgument,
            "a tool's result{} follows no assistant message with tool_calls",
            match &message.tool_call_id {
                Some(id) => format!(" for the call '{id}'"),
                None => String::new(),
            }
        );
    }
    if let Some(id) = &message.tool_call_id
        && !calls().any(|call| call.id == *id)
    {
        let ids: Vec<_> = calls().map(|call| format!("'{}'", call.id)).collect();
        bail!(
            InvalidArgument,
            "tool_call_id '{id}' is not that of an earlier call; there are {}",
            ids.join(", ")
        );
    }
    Ok(message)
}

fn write_message(message: &Message) -> Value {
    let mut out = Map::new();
    out.insert("role".into(), message.role.clone().into());
    let content = match &message.content {
        Content::None => Value::Null,
        Content::Text(text) => text.clone().into(),
        Content::Parts(parts) => parts
            .iter()
            .map(|text| json!({"type": "text", "text": text}))
            .collect(),
    };
    out.insert("content".into(), content);
    if let Some(reasoning) = &message.reasoning_content {
        out.insert("reasoning_content".into(), reasoning.clone().into());
    }
    if !message.tool_calls.is_empty() {
        let calls = message.tool_calls.iter().map(ToolCall::to_json);
        out.insert("tool_calls".into(), calls.collect());
    }
    for (key, value) in [
        ("tool_call_id", &message.tool_call_id),
        ("name", &message.name),
    ] {
        if let Some(value) = value {
            out.insert(key.into(), value.clone().into());
        }
    }
    Value::Object(out)
}
