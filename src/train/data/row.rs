//! A row of data, independent of its file format.

use serde_json::Value;

use crate::text::Message;

/// A row before tokenization.
#[derive(Debug, PartialEq)]
pub(super) enum Row {
    /// A prompt, and the target to learn.
    Pair { prompt: String, target: String },
    /// A conversation, with the tools offered in it.
    Chat {
        messages: Vec<Message>,
        /// Weight of each message in the loss; 0 for context.
        weights: Vec<f32>,
        tools: Vec<Value>,
    },
    /// A text, learned as a whole.
    Text(String),
}
