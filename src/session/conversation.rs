//! The conversation that a session holds, the options of its turns, and the plan of a turn. Chat turns and session files use it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::text::{Aligned, Message};

/// Options of a chat turn.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatOptions {
    /// A Jinja template in place of the model's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// Variables of the template, such as `enable_thinking`.
    pub variables: Map<String, Value>,
    /// Tools that the model may call, each an object in the format of chat servers.
    pub tools: Vec<Value>,
    /// Keeps earlier answers in the sequence with their reasoning, even if the template removes it. A turn then runs only the tokens that
    /// it adds, but the model sees prompts unlike its training data, and the context fills sooner.
    pub keep_reasoning: bool,
    /// Limit on the tokens of reasoning. At the limit the session appends the text that the model was trained to end its reasoning early
    /// with, and the answer follows. No effect on a model that does not reason.
    pub reasoning_budget: Option<usize>,
}

impl ChatOptions {
    /// The template's variables, including the tools.
    pub(super) fn all_variables(&self) -> Map<String, Value> {
        let mut variables = self.variables.clone();
        if !self.tools.is_empty() {
            variables.insert("tools".to_owned(), Value::Array(self.tools.clone()));
        }
        variables
    }
}

/// The conversation that the sequence holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Conversation {
    /// Whether the tokens belong to a conversation, even if they are too few for a message.
    pub(super) begun: bool,
    /// The messages, without the answer at the end of the sequence.
    pub(super) messages: Vec<Message>,
    pub(super) answer: Option<Answering>,
    /// The options of the last turn.
    pub(super) options: ChatOptions,
}

/// The answer at the end of the sequence.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Answering {
    /// Index of its first token.
    pub(super) start: usize,
    /// The end of the prompt's text before it.
    pub(super) opening: String,
    /// Whether the model ended it.
    pub(super) whole: bool,
    /// The answer as a message, valid while the sequence has this many tokens.
    pub(super) said: Option<(usize, Message)>,
}

impl Conversation {
    pub(super) fn is_empty(&self) -> bool {
        !self.begun
    }

    /// Bytes of its texts.
    pub(super) fn bytes(&self) -> usize {
        let messages = self.messages.iter();
        let said = self.answer.iter().filter_map(|a| a.said.as_ref());
        let all = messages.chain(said.map(|(_, message)| message));
        all.fold(0, |sum, message| sum + message.size())
    }
}

/// How a turn changes the sequence.
pub(super) struct Plan {
    pub(super) messages: Vec<Message>,
    pub(super) tokens: Aligned,
    /// The end of the prompt's text.
    pub(super) opening: String,
    /// Tokens that old turns took which the plan leaves out.
    pub(super) dropped: usize,
}
