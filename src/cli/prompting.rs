//! Arguments of `run` and `chat` that complete the prompt: the system prompt, template variables, tools, and the reasoning budget.

use std::path::{Path, PathBuf};

use NVFP4::base::Result;
use NVFP4::engine::Served;
use NVFP4::session::ChatOptions;
use NVFP4::text::{ChatTemplate, tools_from_json, variables_from_json};
use clap::ValueEnum;
use serde_json::{Map, Value};

use super::model;

/// The template variable that switches reasoning on and off.
pub(super) const THINKING: &str = "enable_thinking";

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

#[derive(clap::Args)]
pub(super) struct PromptingArgs {
    /// The system prompt
    #[arg(long)]
    pub(super) system: Option<String>,
    /// A file with a Jinja template in place of the model's own chat template
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
    /// Whether the model reasons before it answers, if its template allows the choice (the variable enable_thinking)
    #[arg(long, value_enum)]
    think: Option<Switch>,
    /// The most tokens of reasoning; then the answer follows
    #[arg(long)]
    think_budget: Option<usize>,
    /// A file with the tools that the model may call: a JSON array of {"type": "function", "function": {"name": ...}}
    #[arg(long, value_name = "FILE")]
    tools: Option<PathBuf>,
    /// Sets a variable of the model's template; a value that is not JSON is a string. May be given several times
    #[arg(long, value_name = "NAME=JSON", value_parser = variable)]
    set: Vec<(String, Value)>,
}

impl PromptingArgs {
    /// Chat options for turns. Warns on standard error of arguments without effect.
    pub(super) fn options(&self, model: &Served) -> Result<ChatOptions> {
        let mut variables: Map<String, Value> = self.set.iter().cloned().collect();
        if let Some(think) = self.think {
            variables.insert(THINKING.to_owned(), (think == Switch::On).into());
        }
        let variables = variables_from_json(&Value::Object(variables).to_string())?;
        let template = self.template()?;
        let written = model.chat_text(template.as_deref());
        let written = written.map_err(|e| match &self.chat_template {
            Some(file) => e.within(file.display()),
            None => e,
        })?;
        warn_of_unread(written.template(), &variables);
        if self.think_budget.is_some() && written.form().reasoning().is_none() {
            eprintln!(
                "nvfp4: the model is not known to think, so that --think-budget changes nothing"
            );
        }
        Ok(ChatOptions {
            template,
            variables,
            tools: match &self.tools {
                Some(file) => read_tools(file)?,
                None => Vec::new(),
            },
            reasoning_budget: self.think_budget,
            ..ChatOptions::default()
        })
    }

    fn template(&self) -> Result<Option<String>> {
        let file = self.chat_template.as_ref();
        file.map(|file| model::read_text(file)).transpose()
    }

    /// Warns of a model without a chat template, if none is given.
    pub(super) fn warn_of_stand_in(&self, model: &Served) {
        if self.chat_template.is_none() && !model.has_own_template() {
            eprintln!("nvfp4: the model brings no chat template; using ChatML");
        }
    }

    /// Warns of a chat template that cannot be used, if no other is given.
    pub(super) fn warn_of_template(&self, model: &Served) {
        if self.chat_template.is_none() {
            model::warn_of_template(model);
        }
    }
}

/// Parses `NAME=JSON`; a value that is not JSON is a string.
fn variable(text: &str) -> std::result::Result<(String, Value), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((
            name.to_owned(),
            serde_json::from_str(value).unwrap_or_else(|_| value.into()),
        )),
        _ => Err("it is to be NAME=JSON".to_owned()),
    }
}

/// Warns of `variables` that `template` never reads.
pub(super) fn warn_of_unread(template: &ChatTemplate, variables: &Map<String, Value>) {
    for name in template.unread(variables) {
        eprintln!("nvfp4: the chat template never reads '{name}', so that it changes nothing");
    }
}

/// Reads the tools in a file.
pub(super) fn read_tools(file: &Path) -> Result<Vec<Value>> {
    tools_from_json(&model::read_text(file)?).map_err(|e| e.within(file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_json_or_a_text() {
        for (text, name, value) in [
            ("a=true", "a", Value::from(true)),
            ("a=[1]", "a", serde_json::json!([1])),
            ("date=26 Jul 2024", "date", "26 Jul 2024".into()),
            ("a=\"1\"", "a", "1".into()),
            ("a=b=c", "a", "b=c".into()),
            ("a=", "a", "".into()),
        ] {
            assert_eq!(variable(text), Ok((name.to_owned(), value)), "{text}");
        }
        assert!(variable("a").is_err() && variable("=1").is_err());
    }
}
