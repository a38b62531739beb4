//! The conversation that a session holds, the options of its turns, and what a turn is going to make of it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::text::{Aligned, Message};

/// How a chat turn is rendered and answered.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatOptions {
    /// Variables of the model's template, such as `enable_thinking`.
    pub variables: Map<String, Value>,
    /// The tools that the model may call, each an object as chat servers take them.
    pub tools: Vec<Value>,
    /// Earlier answers stay in the sequence with their reasoning, whatever the template does about it. A turn then runs only
    /// what it adds, but the model sees what it was not trained on, and the context fills sooner.
    pub keep_reasoning: bool,
    /// The most tokens of reasoning. After them the reasoning is ended with the text that the model was trained to end it early by, and the
    /// answer follows. No effect on a model that does not reason.
    pub reasoning_budget: Option<usize>,
}

impl ChatOptions {
    /// The template's variables, tools among them.
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
    /// Whether the tokens are those of a conversation, also where they are too few for a message.
    pub(super) begun: bool,
    /// What was said, without the answer that the sequence ends in.
    pub(super) messages: Vec<Message>,
    pub(super) answer: Option<Answering>,
    /// The options of the last turn.
    pub(super) options: ChatOptions,
}

/// The answer that the sequence ends in.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Answering {
    /// Where its tokens begin.
    pub(super) start: usize,
    /// The end of the text before it.
    pub(super) opening: String,
    /// Whether the model ended it.
    pub(super) whole: bool,
    /// What it says, while the sequence has that many tokens.
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

/// What a turn makes of the sequence.
pub(super) struct Plan {
    pub(super) messages: Vec<Message>,
    pub(super) tokens: Aligned,
    /// The end of the prompt's text.
    pub(super) opening: String,
    /// Tokens that the conversation had before it, where old turns are left out.
    pub(super) dropped: usize,
}
