//! Renders conversations to prompts by a model's Jinja template, under the same settings and with the same extra functions as Hugging
//! Face's `apply_chat_template`. Models without a template get ChatML.
//!
//! `engine` is the template itself, `form` converts messages to the form that it expects, `closings` finds the texts that it writes around
//! answers, `operators` rewrites syntax that the engine lacks, and `python`, `printf` and `date` are functions that templates call.

mod closings;
mod date;
mod engine;
mod form;
mod operators;
mod printf;
mod python;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Map;

use self::closings::Closings;
use self::engine::Compiled;
use self::form::{MessageForm, check_tools};
use super::Message;
use crate::base::alloc::{Budget, foreign};
use crate::base::error::{bail, err};
use crate::base::{Error, Result, threads};

/// ChatML, on which most open chat models without a template of their own were tuned.
const CHATML: &str = "\
{%- for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// Upper limits of rendering: bytes allocated at a time besides those for the messages, and processor time. A template that has exceeded
/// them is not rendered again, because its thread stands still forever.
const MEMORY: usize = 256 << 20;
const LONGEST_TIME: Duration = Duration::from_secs(60);
/// Stack size for rendering: macros call each other, and values may be nested as deeply as the step limit allows, with some 200 bytes of
/// stack per level.
const STACK: usize = 128 << 20;

/// Limits of time and memory for rendering test messages.
const LONGEST_TEST: Duration = Duration::from_secs(5);
const TEST_MEMORY: usize = 64 << 20;

/// A compiled template, and the form of messages that it expects.
type Rendered = Arc<(Compiled, MessageForm)>;

/// Name of the template for conversations with tools, as in transformers.
const TOOL_USE: &str = "tool_use";
/// Name of the template for all other conversations.
const DEFAULT: &str = "default";

/// The chat template of a model, or two: one for conversations with tools, one for others. A template that does not parse fails when it is
/// rendered.
#[derive(Debug)]
pub struct ChatTemplate {
    default: Result<Rendered>,
    tool_use: Option<Result<Rendered>>,
    /// Whether rendering has exceeded its limits.
    is_trap: AtomicBool,
    /// Present for the stand-in of a missing template: whether the warning was logged.
    stand_in: Option<AtomicBool>,
}

impl Clone for ChatTemplate {
    fn clone(&self) -> Self {
        let copied = |flag: &AtomicBool| AtomicBool::new(flag.load(Ordering::Relaxed));
        ChatTemplate {
            default: self.default.clone(),
            tool_use: self.tool_use.clone(),
            is_trap: copied(&self.is_trap),
            stand_in: self.stand_in.as_ref().map(copied),
        }
    }
}

impl ChatTemplate {
    /// Parses the template `source`. `bos` and `eos` are the texts of its `bos_token` and `eos_token`.
    pub fn from_jinja(source: &str, bos: Option<&str>, eos: Option<&str>) -> Result<Self> {
        Ok(Self::of(Ok(compiled(source, bos, eos)?)))
    }

    /// Chooses among named templates as transformers does: `tool_use` renders conversations with tools, if it exists, and `default` renders
    /// all others. A broken or missing template fails when it is rendered.
    pub fn named(templates: &[(String, String)], bos: Option<&str>, eos: Option<&str>) -> Self {
        let with_name = |wanted: &str| {
            let found = templates.iter().find(|(name, _)| name == wanted)?;
            Some(compiled(&found.1, bos, eos))
        };
        let default = with_name(DEFAULT).unwrap_or_else(|| {
            let names: Vec<&str> = templates.iter().map(|(name, _)| &**name).collect();
            Err(err!(
                CorruptFile,
                "the model's chat templates are named '{}', and none is named '{DEFAULT}'",
                names.join("', '")
            ))
        });
        ChatTemplate {
            tool_use: with_name(TOOL_USE),
            ..Self::of(default)
        }
    }

    /// A template that cannot be used: rendering it fails with this error.
    pub fn broken(fault: Error) -> Self {
        Self::of(Err(fault))
    }

    /// ChatML: each turn between `<|im_start|>role` and `<|im_end|>`.
    pub fn chatml() -> Self {
        Self::from_jinja(CHATML, None, None).expect("the ChatML template parses")
    }

    /// ChatML for a model without a template. The first rendering logs a warning.
    pub fn stand_in() -> Self {
        ChatTemplate {
            stand_in: Some(AtomicBool::new(false)),
            ..Self::chatml()
        }
    }

    fn of(default: Result<Rendered>) -> Self {
        ChatTemplate {
            default,
            tool_use: None,
            is_trap: AtomicBool::new(false),
            stand_in: None,
        }
    }

    /// The reason why conversations without tools, or those with tools, cannot be rendered.
    pub fn fault(&self) -> Option<&Error> {
        let tool_use = self.tool_use.as_ref().and_then(|t| t.as_ref().err());
        self.default.as_ref().err().or(tool_use)
    }

    /// The templates that can be rendered.
    fn working(&self) -> impl Iterator<Item = &Compiled> {
        let all = [Some(&self.default), self.tool_use.as_ref()];
        all.into_iter().flatten().flatten().map(|found| &found.0)
    }

    /// Jinja source of the template for conversations without tools; empty if it cannot be used.
    pub fn source(&self) -> &str {
        match &self.default {
            Ok(found) => &found.0.source,
            Err(_) => "",
        }
    }

    /// The sources of all templates.
    pub fn sources(&self) -> String {
        let sources: Vec<&str> = self.working().map(|found| &*found.source).collect();
        sources.join("\n")
    }

    /// Whether a template reads the variable `name`.
    pub fn reads(&self, name: &str) -> bool {
        self.working().any(|found| found.reads(name))
    }

    /// The `variables` that the template never reads, which therefore have no effect.
    pub fn unread<'a>(&self, variables: &'a Map<String, serde_json::Value>) -> Vec<&'a str> {
        let names = variables.keys().map(String::as_str);
        names.filter(|name| !self.reads(name)).collect()
    }

    /// The texts around an answer; empty if the template cannot render test messages within narrow limits.
    pub(super) fn closings(&self) -> Result<Closings> {
        let tool_use = self.tool_use.as_ref().and_then(|t| t.as_ref().ok());
        let Some(template) = self.default.as_ref().ok().or(tool_use).cloned() else {
            return Ok(Closings::default());
        };
        let found = threads::bounded(STACK, TEST_MEMORY, LONGEST_TEST, move || {
            foreign(Budget::SMALL, || Ok(closings::closings(&template.0)))
        })?;
        Ok(found.unwrap_or_default())
    }

    /// The template for a conversation with these variables.
    fn for_variables(&self, variables: &Map<String, serde_json::Value>) -> Result<&Rendered> {
        let has_tools = match variables.get("tools") {
            Some(serde_json::Value::Array(tools)) => !tools.is_empty(),
            _ => false,
        };
        let chosen = match &self.tool_use {
            Some(tool_use) if has_tools => tool_use,
            _ => &self.default,
        };
        chosen.as_ref().map_err(Error::clone)
    }

    /// Logs a warning, once, if this is the stand-in for a missing template.
    fn tell_stand_in(&self) {
        if let Some(told) = &self.stand_in
            && !told.swap(true, Ordering::Relaxed)
        {
            tracing::warn!("the model brings no chat template; using ChatML");
        }
    }

    /// The prompt for `messages`; with `add_generation_prompt` it ends where the assistant's next turn begins.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        self.render_with(messages, add_generation_prompt, &Map::new())
    }

    /// As [`ChatTemplate::render`], with further variables for the template (`enable_thinking`, `tools`, `documents`, ...).
    ///
    /// Messages are converted to the form that the template expects: `developer` becomes `system` if it does not know that
    /// role, and the parts of a content become lines if it does not read parts. A template without support for tools would
    /// leave them out, so tools, calls and results are an error with it.
    pub fn render_with(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        variables: &Map<String, serde_json::Value>,
    ) -> Result<String> {
        self.check_trap()?;
        let template = self.for_variables(variables)?.clone();
        self.tell_stand_in();
        let bytes = messages.iter().map(Message::size).sum();
        let budget = Budget::rendered(bytes, messages.len());
        let _copies = budget.set_aside()?;
        let messages = messages.to_vec();
        let variables = variables.clone();
        let rendered = threads::bounded(
            STACK,
            MEMORY.saturating_add(budget.bytes()),
            LONGEST_TIME,
            move || {
                foreign(budget, || {
                    let (compiled, form) = &*template;
                    check_tools(compiled, &messages, &variables)?;
                    let messages = messages.iter().map(|m| form.of(compiled, m)).collect();
                    compiled.print(messages, add_generation_prompt, &variables)
                })
            },
        )?;
        if let Some(text) = rendered {
            return Ok(text);
        }
        self.is_trap.store(true, Ordering::Relaxed);
        self.check_trap()?;
        bail!(Internal, "a template is not bounded")
    }

    fn check_trap(&self) -> Result<()> {
        if self.is_trap.load(Ordering::Relaxed) {
            bail!(
                CorruptFile,
                "the chat template takes more than {} MB of memory or {} s of processor time for a conversation; it was not made to be used",
                MEMORY >> 20,
                LONGEST_TIME.as_secs()
            );
        }
        Ok(())
    }
}

fn compiled(source: &str, bos: Option<&str>, eos: Option<&str>) -> Result<Rendered> {
    let compiled = Compiled::new(source, bos, eos)?;
    Ok(Arc::new((compiled, MessageForm::default())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::ToolCall;

    #[test]
    fn chatml() {
        let text = ChatTemplate::chatml()
            .render(
                &[
                    Message::new("system", "Be brief."),
                    Message::new("user", "Hi\n"),
                ],
                true,
            )
            .unwrap();
        assert_eq!(
            text,
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi\n<|im_end|>\n<|im_start|>assistant\n"
        );
    }

    #[test]
    fn a_template_may_refuse_and_may_be_broken() {
        let refusing = ChatTemplate::from_jinja(
            "{% if messages[0].role != 'user' %}{{ raise_exception('starts with ' + messages[0].role) }}{% endif %}ok",
            None,
            None,
        )
        .unwrap();
        let e = refusing
            .render(&[Message::new("system", "")], true)
            .unwrap_err();
        assert!(e.message().contains("starts with system"), "{e}");
        assert_eq!(
            refusing.render(&[Message::new("user", "")], true).unwrap(),
            "ok"
        );
        let e = ChatTemplate::from_jinja("{% for %}", None, None).unwrap_err();
        assert!(e.message().contains("does not parse"), "{e}");
    }

    /// As gpt-oss's template does.
    #[test]
    fn texts_before_a_call_are_joined_for_a_template_that_refuses_both() {
        let source = "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}\
            [{{ m.thinking or m.content }}]{{ m.tool_calls[0].function.name }}({{ m.tool_calls[0].function.arguments | tojson }})\
            {% else %}{{ m.thinking }}{{ m.content }}{% endif %}{% endfor %}";
        let call = ToolCall {
            id: "call00000".to_owned(),
            name: "f".to_owned(),
            arguments: Map::new(),
        };
        let answer = |calls: usize| Message {
            reasoning_content: Some("Why.".to_owned()),
            tool_calls: vec![call.clone(); calls],
            ..Message::new("assistant", "I look.")
        };
        let refusing = ChatTemplate::from_jinja(source, None, None).unwrap();
        let rendered = |calls| refusing.render(&[answer(calls)], false);
        assert_eq!(rendered(1).unwrap(), "[Why.\n\nI look.]f({})");
        assert_eq!(rendered(0).unwrap(), "Why.I look.");
        // The template writes only the first of two calls.
        let e = rendered(2).unwrap_err();
        assert!(e.message().contains("both"), "{e}");
        let taking = source.replace("{{ raise_exception('both') }}", "{{ m.thinking }}:");
        let taking = ChatTemplate::from_jinja(&taking, None, None).unwrap();
        let text = taking.render(&[answer(1)], false).unwrap();
        assert_eq!(text, "Why.:[Why.]f({})");
    }

    #[test]
    fn generation_marks_print_nothing() {
        let t = ChatTemplate::from_jinja(
            "a {%- generation -%} b {% endgeneration %} c {{ '{% generation' }}",
            None,
            None,
        )
        .unwrap();
        assert_eq!(t.render(&[], false).unwrap(), "ab  c {% generation");
    }

    #[test]
    fn a_template_reads_tools_as_a_variable() {
        for (source, reads) in [
            ("{%- if tools %}{% endif %}", true),
            ("{{ '}} %}' ~ tools }}", true),
            ("{% set t = x if tools is defined %}", true),
            (
                "{%- if xml_tools %}{{ \"tools\" }} tools {# tools #}{% endif %}",
                false,
            ),
            ("{{ message.tools }}", false),
        ] {
            let template = ChatTemplate::from_jinja(source, None, None).unwrap();
            assert_eq!(template.reads("tools"), reads, "{source}");
        }
    }
}
