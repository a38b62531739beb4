//! How chats of a model are written and read: a chat template, with the form of the answers that it asks for. A served model has its own
//! one, and keeps those that hosts gave last.

use std::any::Any;
use std::sync::{Arc, Mutex};

use crate::base::error::err;
use crate::base::lock::lock;
use crate::base::{ErrorKind, Result};
use crate::text::{AnswerForm, ChatTemplate, Tokenizer, turn_ends};

/// Templates of hosts that a model keeps compiled.
const KEPT: usize = 16;

/// A chat template with the form of its answers.
#[derive(Debug)]
pub struct ChatText {
    template: ChatTemplate,
    form: AnswerForm,
    is_stand_in: bool,
    ends: Vec<u32>,
}

impl ChatText {
    /// The model's own template, or the one that stands in for it.
    pub(super) fn of_model(template: Option<ChatTemplate>, tokenizer: Option<&Tokenizer>) -> Self {
        let is_stand_in = template.is_none();
        let template = template.unwrap_or_else(ChatTemplate::stand_in);
        ChatText {
            form: form(&template, tokenizer),
            template,
            is_stand_in,
            ends: Vec::new(),
        }
    }

    /// The template.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// The spelling of reasoning and tool calls in answers.
    pub fn form(&self) -> &AnswerForm {
        &self.form
    }

    /// Whether it stands in for a template that the model lacks.
    pub fn is_stand_in(&self) -> bool {
        self.is_stand_in
    }

    /// The tokens that a template of a host writes after an answer, and those that are known to end turns. Empty for the model's own
    /// template, whose ends are among the model's stop tokens.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }
}

fn form(template: &ChatTemplate, tokenizer: Option<&Tokenizer>) -> AnswerForm {
    let is_token = |name: &str| tokenizer.is_some_and(|t| t.id_of(name).is_some());
    AnswerForm::of(&template.sources(), template.reads("tools"), is_token)
}

/// Compiled templates of hosts.
pub(super) struct HostTemplates {
    /// The texts of `bos_token` and `eos_token`.
    bos: Option<String>,
    eos: Option<String>,
    /// Templates with their sources, the last one used at the end.
    kept: Mutex<Vec<(Arc<str>, Arc<ChatText>)>>,
}

impl HostTemplates {
    /// None yet, for a model whose special tokens have these names.
    pub(super) fn new(bos: Option<String>, eos: Option<String>) -> Self {
        HostTemplates {
            bos,
            eos,
            kept: Mutex::default(),
        }
    }

    /// Takes the lock of the cache until the result is dropped.
    pub(super) fn locked(&'static self) -> Box<dyn Any> {
        Box::new(lock(&self.kept))
    }

    /// The template whose source is `source`, compiled unless it is kept.
    pub(super) fn get(&self, source: &str, tokenizer: Option<&Tokenizer>) -> Result<Arc<ChatText>> {
        let mut kept = lock(&self.kept);
        if let Some(at) = kept.iter().position(|(known, _)| **known == *source) {
            let found = kept.remove(at);
            let text = found.1.clone();
            kept.push(found);
            return Ok(text);
        }
        drop(kept);
        let made = Arc::new(self.compiled(source, tokenizer)?);
        let mut kept = lock(&self.kept);
        if kept.len() == KEPT {
            kept.remove(0);
        }
        kept.push((source.into(), made.clone()));
        Ok(made)
    }

    fn compiled(&self, source: &str, tokenizer: Option<&Tokenizer>) -> Result<ChatText> {
        let template = ChatTemplate::from_jinja(source, self.bos.as_deref(), self.eos.as_deref());
        let template = template.map_err(|e| match e.kind() {
            // No file is damaged here.
            ErrorKind::CorruptFile => err!(InvalidArgument, "{}", e.message()),
            _ => e,
        })?;
        let ends = match tokenizer {
            Some(tokenizer) => turn_ends(tokenizer, Some(&template))?,
            None => Vec::new(),
        };
        Ok(ChatText {
            form: form(&template, tokenizer),
            template,
            is_stand_in: false,
            ends,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_keeps_the_templates_that_were_used_last() {
        let templates = HostTemplates::new(Some("<s>".to_owned()), None);
        let get = |i: usize| {
            templates
                .get(&format!("{{{{ bos_token }}}}{i}"), None)
                .unwrap()
        };
        let first = get(0);
        assert_eq!(first.template().render(&[], false).unwrap(), "<s>0");
        let all: Vec<_> = (1..KEPT).map(get).collect();
        assert!(Arc::ptr_eq(&first, &get(0)));
        get(KEPT);
        assert!(Arc::ptr_eq(&first, &get(0)));
        assert!(
            !Arc::ptr_eq(&all[0], &get(1)),
            "the one used first gave way"
        );
        assert_eq!(lock(&templates.kept).len(), KEPT);
    }

    #[test]
    fn a_broken_template_names_its_line() {
        let templates = HostTemplates::new(None, None);
        let e = templates.get("a\n{% for %}\n", None).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        let said = e.message();
        assert!(
            said.contains("does not parse") && said.contains("(line 2)"),
            "{said}"
        );
        assert!(!said.contains('\n'), "{said}");
        let template = templates
            .get("a\n\n{{ raise_exception('no\nno') }}", None)
            .unwrap();
        let e = template.template().render(&[], false).unwrap_err();
        assert!(
            e.message().contains("(line 3)") && !e.message().contains('\n'),
            "{e}"
        );
    }
}
