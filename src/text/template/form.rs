//! Converts messages to the form that a template expects. Templates differ in their assumptions, which are detected by rendering test
//! messages.

use std::sync::OnceLock;

use minijinja::value::Value;
use serde_json::{Map, json};

use super::engine::Compiled;
use super::python::{PythonJson, python_json};
use crate::base::Result;
use crate::base::error::bail;
use crate::text::{Content, Message, ToolCall};

/// The form in which a template expects an assistant's tool calls.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct CallForm {
    no_content: NoContent,
    /// Arguments are a string of JSON, not an object.
    written_arguments: bool,
    /// Reasoning and content before a single call are one text, in the place of reasoning. gpt-oss's template refuses both, and writes no
    /// further call.
    joins_texts: bool,
}

/// The value of `content` in a message without content.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum NoContent {
    /// No key at all.
    #[default]
    Absent,
    None,
    EmptyText,
}

impl NoContent {
    fn value(self) -> Option<Value> {
        match self {
            NoContent::Absent => None,
            NoContent::None => Some(Value::from(())),
            NoContent::EmptyText => Some(Value::from("")),
        }
    }
}

/// The form of one template, detected when first needed.
#[derive(Debug, Default)]
pub(super) struct MessageForm {
    takes_parts: OnceLock<bool>,
    call_form: OnceLock<CallForm>,
}

impl MessageForm {
    /// `message` with the keys of transformers, in the form that this template expects.
    pub(super) fn of(&self, template: &Compiled, message: &Message) -> Value {
        let role = match message.role.as_str() {
            "developer" if !names_role(template, "developer") => "system",
            role => role,
        };
        let call_form = match message.content == Content::None || !message.tool_calls.is_empty() {
            true => found(&self.call_form, || find_call_form(template)),
            false => CallForm::default(),
        };
        let joined = match call_form.joins_texts {
            true => with_joined_texts(message),
            false => None,
        };
        let message = joined.as_ref().unwrap_or(message);
        let content = match &message.content {
            Content::None => call_form.no_content.value(),
            Content::Parts(parts) if found(&self.takes_parts, || find_takes_parts(template)) => {
                Some(as_parts(parts))
            }
            _ => Some(Value::from(message.text())),
        };
        formed(message, role, content, call_form)
    }
}

/// A message with a call whose content follows its reasoning there; `None` if it lacks one of the three.
fn with_joined_texts(message: &Message) -> Option<Message> {
    let (reasoning, content) = (message.reasoning_content.as_deref()?, message.text());
    if message.tool_calls.len() != 1 || reasoning.is_empty() || content.is_empty() {
        return None;
    }
    Some(Message {
        content: Content::None,
        reasoning_content: Some(format!("{reasoning}\n\n{content}")),
        ..message.clone()
    })
}

/// Whether `role` is a string literal of the template.
fn names_role(template: &Compiled, role: &str) -> bool {
    let mut quoted = ['\'', '"']
        .map(|quote| format!("{quote}{role}{quote}"))
        .into_iter();
    quoted.any(|text| template.source.contains(&text))
}

/// Whether the template renders the text of content parts, rather than Python's notation of the array or nothing.
fn find_takes_parts(template: &Compiled) -> bool {
    const MARK: &str = "text-of-a-part";
    let message = Message::new("user", "");
    let content = as_parts(&[MARK.to_owned()]);
    let message = formed(&message, "user", Some(content), CallForm::default());
    let text = template
        .print(vec![message], true, &Map::new())
        .unwrap_or_default();
    let quoted = ['\'', '"'].map(|quote| format!("{MARK}{quote}"));
    text.matches(MARK).count() == 1 && !quoted.iter().any(|q| text.contains(q))
}

/// A tool that test messages offer and call.
pub(super) fn test_tool() -> serde_json::Value {
    json!({
        "type": "function",
        "function": {
            "name": "tool-of-a-call",
            "description": "",
            "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": ""}}, "required": ["x"]}
        }
    })
}

/// The call form of a template.
fn find_call_form(template: &Compiled) -> CallForm {
    let form = find_calls(template);
    let joined = CallForm {
        joins_texts: true,
        ..form
    };
    match takes_both_texts(template, form) || !takes_both_texts(template, joined) {
        true => form,
        false => joined,
    }
}

/// Whether the template takes a call beside which there are both reasoning and content.
fn takes_both_texts(template: &Compiled, form: CallForm) -> bool {
    let mut call = test_call("x");
    call.content = Content::Text("x".to_owned());
    call.reasoning_content = Some("x".to_owned());
    let joined = form.joins_texts.then(|| with_joined_texts(&call)).flatten();
    let call = joined.unwrap_or(call);
    let content = match &call.content {
        Content::None => form.no_content.value(),
        _ => Some(Value::from(call.text())),
    };
    let question = Message::new("user", "");
    let question = formed(&question, "user", Some(Value::from("x")), form);
    let messages = vec![question, formed(&call, "assistant", content, form)];
    let variables = Map::from_iter([("tools".to_owned(), json!([test_tool()]))]);
    template.print(messages, false, &variables).is_ok()
}

/// A call of [`test_tool`].
fn test_call(argument: &str) -> Message {
    let mut call = Message::new("assistant", "");
    call.tool_calls.push(ToolCall {
        // Nine letters and digits, as Mistral's templates require.
        id: "callofone".to_owned(),
        name: "tool-of-a-call".to_owned(),
        arguments: Map::from_iter([("x".to_owned(), argument.into())]),
    });
    call
}

/// The first call form that the template renders completely, or else the first that it accepts, without any text for missing content. The
/// very first form is that of transformers.
fn find_calls(template: &Compiled) -> CallForm {
    const WORD: &str = "word-of-a-call";
    let variables = Map::from_iter([("tools".to_owned(), json!([test_tool()]))]);
    let call = test_call(WORD);
    let mut result = Message::new("tool", "x");
    result.tool_call_id = Some("callofone".to_owned());
    // Templates treat calls before the last question differently.
    let print = |form: CallForm| -> Result<String> {
        let text =
            |role, text| formed(&Message::new(role, ""), role, Some(Value::from(text)), form);
        let call = formed(&call, "assistant", form.no_content.value(), form);
        let result = formed(&result, "tool", Some(Value::from("x")), form);
        let messages = vec![text("user", "x"), call, result];
        let mut after = messages.clone();
        after.extend([text("assistant", "x"), text("user", "x")]);
        Ok(template.print(messages, true, &variables)?
            + &template.print(after, true, &variables)?)
    };
    let nothing = |text: &str| text.matches("None").count() + text.matches("null").count();
    let mut taken = None;
    for written_arguments in [false, true] {
        let form = |no_content| CallForm {
            no_content,
            written_arguments,
            joins_texts: false,
        };
        // Number of occurrences of the words without the call.
        let empty = print(form(NoContent::EmptyText));
        let elsewhere = empty.as_ref().map_or(0, |text| nothing(text));
        for no_content in [NoContent::Absent, NoContent::None, NoContent::EmptyText] {
            let form = form(no_content);
            match print(form) {
                Ok(text) if nothing(&text) > elsewhere => {}
                // JSON within JSON was escaped twice.
                Ok(text) if text.matches(WORD).count() >= 2 && !text.contains("\\\"x\\\"") => {
                    return form;
                }
                Ok(_) => taken = taken.or(Some(form)),
                // Rendering does not terminate, and would not in another form either.
                Err(e) if e.kind() == crate::base::ErrorKind::CorruptFile => return form,
                Err(_) => {}
            }
        }
    }
    taken.unwrap_or_default()
}

/// The value of `cell`, or the result of `find`. Other threads do not wait for it: a template may never terminate.
fn found<T: Copy>(cell: &OnceLock<T>, find: impl FnOnce() -> T) -> T {
    match cell.get() {
        Some(value) => *value,
        None => {
            let value = find();
            let _ = cell.set(value);
            value
        }
    }
}

/// The value that a template gets for `message`.
fn formed(message: &Message, role: &str, content: Option<Value>, form: CallForm) -> Value {
    let mut out = vec![("role", Value::from(role))];
    out.extend(content.map(|content| ("content", content)));
    if let Some(reasoning) = &message.reasoning_content {
        // The second name is the one that gpt-oss's template reads.
        for name in ["reasoning_content", "thinking"] {
            out.push((name, reasoning.as_str().into()));
        }
    }
    if !message.tool_calls.is_empty() {
        let calls = message.tool_calls.iter().map(|call| {
            let arguments = match form.written_arguments {
                true => python_json(&call.arguments, PythonJson::with_indent(None))
                    .unwrap_or_default()
                    .into(),
                false => Value::from_serialize(&call.arguments),
            };
            let function = [
                ("name", Value::from(call.name.as_str())),
                ("arguments", arguments),
            ];
            let mut out = vec![
                ("type", Value::from("function")),
                ("function", Value::from_iter(function)),
            ];
            if !call.id.is_empty() {
                out.insert(0, ("id", call.id.as_str().into()));
            }
            Value::from_iter(out)
        });
        out.push(("tool_calls", calls.collect::<Vec<_>>().into()));
    }
    for (key, value) in [
        ("tool_call_id", &message.tool_call_id),
        ("name", &message.name),
    ] {
        if let Some(value) = value {
            out.push((key, value.as_str().into()));
        }
    }
    Value::from_iter(out)
}

/// Content parts as transformers has them.
pub(super) fn as_parts(parts: &[String]) -> Value {
    let parts = parts
        .iter()
        .map(|text| Value::from_iter([("type", "text"), ("text", text.as_str())]));
    parts.collect::<Vec<_>>().into()
}

/// Refuses tools, calls and results for a template that would leave them out.
pub(super) fn check_tools(
    template: &Compiled,
    messages: &[Message],
    variables: &Map<String, serde_json::Value>,
) -> Result<()> {
    let tools = match variables.get("tools") {
        Some(serde_json::Value::Array(tools)) => tools.len(),
        _ => 0,
    };
    if tools > 0 && !template.reads("tools") {
        bail!(
            Unsupported,
            "the model's chat template knows no tools, and {tools} were given; take a model that was trained to call tools"
        );
    }
    let tool_message = messages
        .iter()
        .position(|m| m.role == "tool" || !m.tool_calls.is_empty());
    match tool_message {
        Some(index) if !template.source.contains("tool") => bail!(
            Unsupported,
            "message {index} {}, of which the model's chat template knows nothing; take a model that was trained to call tools",
            match messages[index].role.as_str() {
                "tool" => "is a tool's result",
                _ => "calls a tool",
            }
        ),
        _ => Ok(()),
    }
}
