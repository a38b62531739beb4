//! A call of a tool, as a model makes it.

use serde_json::{Map, Value};

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
