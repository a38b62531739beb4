//! Conversations to prompts, by the Jinja template of a model, rendered under the same settings and with the same extra
//! functions as Hugging Face's `apply_chat_template`; ChatML for models without one.
//!
//! `engine` is the template itself, `form` converts messages to the form that it expects, `python` and `date` are functions
//! that templates call.

mod date;
mod engine;
mod form;
mod python;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Map;

use self::engine::Compiled;
use self::form::{Form, check_tools};
use super::Message;
use crate::base::error::bail;
use crate::base::{Result, alloc, threads};

/// ChatML, which most open chat models without a template of their own were tuned on.
const CHATML: &str = "\
{%- for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// Bytes that rendering may allocate for each byte of a message, which templates copy, and for each message besides its
/// text.
const FOR_TEXT: usize = 16;
const FOR_MESSAGE: usize = 1024;

/// Bytes that rendering may allocate at a time besides those for the messages, and the most processor time. After a template has
/// exceeded them it is not rendered again, because its thread then stands still for ever.
const MEMORY: usize = 256 << 20;
const LONGEST_TIME: Duration = Duration::from_secs(60);
/// Macros call each other, and values may be nested as deeply as a template has steps for, of which the template engine takes some 200
/// bytes of stack for a level.
const STACK: usize = 128 << 20;

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    template: Arc<(Compiled, Form)>,
    /// Whether rendering has exceeded its limits.
    is_trap: AtomicBool,
}

impl Clone for ChatTemplate {
    fn clone(&self) -> Self {
        ChatTemplate {
            template: self.template.clone(),
            is_trap: AtomicBool::new(self.is_trap.load(Ordering::Relaxed)),
        }
    }
}

impl ChatTemplate {
    /// The template `source`; `bos` and `eos` are what it may print as `bos_token` and `eos_token`.
    pub fn from_jinja(source: &str, bos: Option<&str>, eos: Option<&str>) -> Result<Self> {
        let compiled = Compiled::new(source, bos, eos)?;
        Ok(ChatTemplate {
            template: Arc::new((compiled, Form::default())),
            is_trap: AtomicBool::new(false),
        })
    }

    /// ChatML: each turn between `<|im_start|>role` and `<|im_end|>`.
    pub fn chatml() -> Self {
        Self::from_jinja(CHATML, None, None).expect("the ChatML template parses")
    }

    /// The Jinja source.
    pub fn source(&self) -> &str {
        &self.template.0.source
    }

    /// Whether the template reads the variable `name`.
    pub fn reads(&self, name: &str) -> bool {
        self.template.0.reads(name)
    }

    /// Those of `variables` that the template never reads, and that so have no effect.
    pub fn unread<'a>(&self, variables: &'a Map<String, serde_json::Value>) -> Vec<&'a str> {
        let names = variables.keys().map(String::as_str);
        names.filter(|name| !self.reads(name)).collect()
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
        let text = messages.iter().map(Message::size);
        let bytes = text
            .map(|size| size.saturating_mul(FOR_TEXT).saturating_add(FOR_MESSAGE))
            .fold(0, usize::saturating_add);
        let _copies = alloc::set_aside(bytes)?;
        let (template, messages) = (self.template.clone(), messages.to_vec());
        let variables = variables.clone();
        let rendered = threads::bounded(
            STACK,
            MEMORY.saturating_add(bytes),
            LONGEST_TIME,
            move || {
                let _steps = alloc::set_aside(bytes)?;
                let (compiled, form) = &*template;
                check_tools(compiled, &messages, &variables)?;
                let messages = messages.iter().map(|m| form.of(compiled, m)).collect();
                compiled.print(messages, add_generation_prompt, &variables)
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

#[cfg(test)]
mod tests {
    use super::*;

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
