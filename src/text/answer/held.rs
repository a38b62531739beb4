//! The grammar of a tool call, for a generation whose calls are held to the schemas of the tools.

use serde_json::{Value, json};

use super::form::AnswerForm;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::text::grammar_source::with_white_space;

impl AnswerForm {
    /// A Lark grammar of one call of one of `tools`, from its mark to its end. `mark` gives the id of a mark that is
    /// a token and no text.
    ///
    /// Fails for a form whose arguments are not JSON, or whose calls are not told from content by a mark.
    pub fn grammar_of_calls(
        &self,
        tools: &[Value],
        mark: impl Fn(&str) -> Option<u32>,
    ) -> Result<String> {
        let Some(written) = self.calls.and_then(|form| form.written()) else {
            bail!(
                Unsupported,
                "tool calls of this model cannot be held to schemas; those between <tool_call> and </tool_call> as JSON (Hermes, Qwen3), <|tool_call|> and <|/tool_call|> (Phi-4-mini) or <TOOLCALL> and </TOOLCALL> (Nemotron) can"
            );
        };
        if tools.is_empty() {
            bail!(
                InvalidArgument,
                "no tool is offered whose calls could be held to a schema; give the chat its tools"
            );
        }
        let texts = |texts: &[&str]| -> Vec<String> {
            texts
                .iter()
                .map(|text| match mark(text) {
                    Some(id) => format!("<[{id}]>"),
                    None => quoted(text),
                })
                .collect()
        };
        let names: Vec<String> = (0..tools.len()).map(|i| format!("tool{i}")).collect();
        let (before, after) = (texts(written.before_name), texts(written.after));
        let mut lark = format!(
            "start: {} ({}) {}\n",
            before.join(" "),
            names.join(" | "),
            after.join(" ")
        );
        for (rule, tool) in names.iter().zip(tools) {
            let (name, schema) = read(tool)?;
            let begin = quoted(&format!("{}{}", Value::from(name), written.between));
            lark.push_str(&format!("{rule}: {begin} %json {schema}\n"));
        }
        Ok(lark)
    }

    /// The texts of which one begins a call.
    pub fn call_marks(&self) -> &'static [&'static str] {
        self.calls.map_or(&[], |form| form.begins())
    }
}

/// A text as a literal of Lark, which has the escapes of JSON.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// The name of a tool, and the schema of its arguments.
fn read(tool: &Value) -> Result<(&str, Value)> {
    let function = tool.get("function").unwrap_or(tool);
    let name = function.get("name").and_then(Value::as_str);
    let name = name.ok_or_else(|| err!(InvalidArgument, "tool {tool} has no name"))?;
    let schema = match function.get("parameters") {
        Some(Value::Object(schema)) => schema.clone(),
        Some(Value::Null) | None => {
            let none = json!({"type": "object", "additionalProperties": false});
            none.as_object().cloned().unwrap_or_default()
        }
        Some(other) => bail!(
            InvalidArgument,
            "the parameters of tool '{name}' are {other}, not a schema"
        ),
    };
    let schema = with_white_space(schema).map_err(|e| e.within(format_args!("tool '{name}'")))?;
    Ok((name, Value::Object(schema)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;

    fn form(template: &str) -> AnswerForm {
        AnswerForm::of(template, true, |_| false)
    }

    #[test]
    fn a_call_is_written_as_its_model_writes_it() {
        let tools = [
            json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}),
            json!({"name": "g"}),
        ];
        let hermes = form("<tool_call>\n{\"name\": ");
        let lark = hermes.grammar_of_calls(&tools, |_| None).unwrap();
        let mut lines = lark.lines();
        assert_eq!(
            lines.next().unwrap(),
            r#"start: "<tool_call>" "\n{\"name\": " (tool0 | tool1) "}\n" "</tool_call>""#
        );
        let first = lines.next().unwrap();
        assert!(
            first.starts_with(r#"tool0: "\"f\", \"arguments\": " %json {"type":"object""#),
            "{first}"
        );
        let lark = hermes
            .grammar_of_calls(&tools, |mark| (mark == "</tool_call>").then_some(7))
            .unwrap();
        assert!(lark.contains("\"}\\n\" <[7]>\n"), "{lark}");
    }

    #[test]
    fn forms_without_json_and_tools_without_schemas_are_refused() {
        let coder = form("<tool_call>\n<function=f>");
        let none = |_: &str| None;
        expect_kind(
            coder.grammar_of_calls(&[json!({"name": "f"})], none),
            ErrorKind::Unsupported,
            "cannot be held",
        );
        let hermes = form("<tool_call>");
        for (tools, words) in [
            (vec![], "no tool is offered"),
            (vec![json!({"description": "x"})], "has no name"),
            (vec![json!({"name": "f", "parameters": 3})], "not a schema"),
        ] {
            expect_kind(
                hermes.grammar_of_calls(&tools, none),
                ErrorKind::InvalidArgument,
                words,
            );
        }
    }
}
