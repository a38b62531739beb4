//! A tool call of a model.

use serde_json::{Map, Value, json};

/// A call of one of the tools that a conversation offers.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// The id by which a result names the call that it answers.
    pub id: String,
    /// The name of the tool.
    pub name: String,
    /// Its arguments by name, in the order in which they were given.
    pub arguments: Map<String, Value>,
}

impl ToolCall {
    /// In the format of chat servers, with the arguments as a string of JSON. Without an id if the call has none.
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
