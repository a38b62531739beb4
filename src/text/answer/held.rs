//! The grammar of a tool call, for a generation whose calls are held to the schemas of the tools.

use serde_json::{Value, json};

#[cfg(doc)]
use super::AnswerStage;
use super::form::AnswerForm;
use super::section::{Piece, WrittenCall};
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
        let written = self.calls.map_or(&[][..], |form| form.written());
        if written.is_empty() {
            bail!(
                Unsupported,
                "tool calls of this model cannot be held to schemas; those with arguments in JSON can: of Hermes, Qwen3, Llama 3, Mistral, DeepSeek, Granite, Phi-4-mini, Nemotron, Command R7B and gpt-oss"
            );
        }
        if tools.is_empty() {
            bail!(
                InvalidArgument,
                "no tool is offered whose calls could be held to a schema; give the chat its tools"
            );
        }
        let text = |text: &str| match mark(text) {
            Some(id) => format!("<[{id}]>"),
            None => quoted(text),
        };
        let lark_of = |pieces: &[Piece]| -> String {
            let pieces = pieces.iter().map(|piece| match piece {
                Piece::Text(piece) => text(piece),
                Piece::Optional(piece) => format!("({})?", text(piece)),
                Piece::Pattern(pattern) => format!("/{pattern}/"),
            });
            pieces.map(|piece| piece + " ").collect()
        };
        let tools = tools.iter().map(read).collect::<Result<Vec<_>>>()?;
        let call_of = |written: &WrittenCall| {
            let tools = tools.iter().enumerate().map(|(i, (name, _))| {
                let name = match written.quotes_name {
                    true => quoted(&Value::from(*name).to_string()),
                    false => quoted(name),
                };
                format!("{name} {}arguments{i}", lark_of(written.before_arguments))
            });
            let tools: Vec<String> = tools.collect();
            let (before, after) = (lark_of(written.before_name), lark_of(written.after));
            format!("{before}({}) {after}", tools.join(" | "))
        };
        let calls: Vec<String> = written.iter().map(call_of).collect();
        let mut lark = format!("start: {}\n", calls.join("| "));
        for (i, (_, schema)) in tools.iter().enumerate() {
            lark.push_str(&format!("arguments{i}: %json {schema}\n"));
        }
        Ok(lark)
    }

    /// Whether a text begins a call that can be held: of the stage [`AnswerStage::Call`] or [`AnswerStage::Header`].
    pub fn holds_call(&self, text: &str) -> bool {
        self.calls.is_some_and(|form| form.is_held_from(text))
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
            lines.next().unwrap().trim_end(),
            r#"start: "<tool_call>" "\n{\"name\": " ("\"f\"" ", \"arguments\": " arguments0 | "\"g\"" ", \"arguments\": " arguments1) "}\n" "</tool_call>""#
        );
        let first = lines.next().unwrap();
        assert!(
            first.starts_with(r#"arguments0: %json {"type":"object""#),
            "{first}"
        );
        let lark = hermes
            .grammar_of_calls(&tools, |mark| (mark == "</tool_call>").then_some(7))
            .unwrap();
        assert!(lark.contains("\"}\\n\" <[7]>"), "{lark}");
        let mistral = form("[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}");
        let lark = mistral.grammar_of_calls(&tools[1..], |_| None).unwrap();
        assert_eq!(
            lark.lines().next().unwrap().trim_end(),
            r#"start: "[TOOL_CALLS]" ("g" "[CALL_ID]" /[a-zA-Z0-9]{9}/ "[ARGS]" arguments0)"#
        );
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
