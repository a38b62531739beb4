//! A call of a tool, as a model makes it.

use serde_json::{Map, Value, json};

/// A call of one of the tools that a conversation offers.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// By what a result names the call that it answers.
    pub id: String,
    /// The tool.
    pub name: String,
    /// Its arguments by name, in the order in which they were given.
    pub arguments: Map<String, Value>,
}

impl ToolCall {
    /// In the form of chat servers, with the arguments as a text. A call without an id has none there.
    pub fn to_json(&self) -> Value {
        let arguments = Value::Object(self.arguments.clone()).to_string();
        let mut out = Map::new();
        if !self.id.is_empty() {
            out.insert("id".into(), self.id.clone().into());
        }
        out.insert("type".into(), "function".into());
        let function = json!({"name": self.name, "arguments": arguments});
        out.insert("function".into(), function);
        Value::Object(out)
    }
}
