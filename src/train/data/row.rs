//! Rows of data, whatever file they are from.

use serde_json::Value;

use crate::text::Message;

/// A row, before it is tokens.
#[derive(Debug, PartialEq)]
pub(super) enum Row {
    /// A question, and the answer to be learned.
    Pair { prompt: String, target: String },
    /// A conversation, with the tools that were offered in it.
    Chat {
        messages: Vec<Message>,
        /// Factor of the loss of each message's tokens; 0 for context.
        weights: Vec<f32>,
        tools: Vec<Value>,
    },
    /// A text that is learned as a whole.
    Text(String),
}
