//! Conversations from data sets: messages, each with a weight in the loss.

use serde_json::{Map, Value, json};

use crate::base::Result;
use crate::base::error::bail;
use crate::text::{Message, kind, messages_from_values};

/// ShareGPT's speaker names and their roles.
const SPEAKERS: [(&str, &str); 12] = [
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("model", "assistant"),
    ("assistant", "assistant"),
    ("system", "system"),
    ("developer", "developer"),
    ("tool", "tool"),
    ("observation", "tool"),
    ("function_response", "tool"),
    ("function_call", "assistant"),
];

/// Messages, each with its weight in the loss: 0 for context, 1 for an assistant's answer.
#[derive(Debug, Default)]
pub(super) struct Turns {
    pub(super) messages: Vec<Message>,
    pub(super) weights: Vec<f32>,
}

/// Removes `weight` and `train` from a message and returns its weight in the loss; `None` if it has neither.
fn take_weight(item: &mut Value) -> Result<Option<f32>> {
    let Value::Object(fields) = item else {
        return Ok(None);
    };
    let weight = match fields.remove("weight") {
        None | Some(Value::Null) => None,
        Some(value) => {
            let weight = value.as_f64().map(|weight| (weight, weight as f32));
            match weight {
                Some((exact, weight))
                    if weight.is_finite() && weight >= 0.0 && (weight > 0.0 || exact == 0.0) =>
                {
                    Some(weight)
                }
                _ => bail!(
                    InvalidArgument,
                    "weight is {value}; it is a number from 0, for context, on"
                ),
            }
        }
    };
    let train = match fields.remove("train") {
        None | Some(Value::Null) => None,
        Some(Value::Bool(train)) => Some(train),
        Some(other) => bail!(
            InvalidArgument,
            "train is {}, not true or false",
            kind(&other)
        ),
    };
    match (weight, train) {
        (Some(weight), Some(train)) if (weight > 0.0) != train => bail!(
            InvalidArgument,
            "weight is {weight} and train {train}; one of the two is enough"
        ),
        (None, Some(train)) => Ok(Some(f32::from(u8::from(train)))),
        (weight, _) => Ok(weight),
    }
}

/// The question that an instruction and its input form.
pub(super) fn instruction(instruction: &str, input: &str) -> String {
    match (instruction.is_empty(), input.is_empty()) {
        (false, false) => format!("{instruction}\n\n{input}"),
        _ => format!("{instruction}{input}"),
    }
}

impl Turns {
    /// Adds a message with its own weight, or with the default of its role.
    fn push(&mut self, message: Message, weight: Option<f32>) -> Result<()> {
        let is_learned = message.role == "assistant";
        if let (false, Some(weight)) = (is_learned, weight)
            && weight > 0.0
        {
            bail!(
                InvalidArgument,
                "message {} is of role {}, and is to be learned by its weight or train; the assistant's messages are learned, and all with \
                 --train-on-all",
                self.messages.len(),
                message.role
            );
        }
        let of_role = f32::from(u8::from(is_learned));
        self.messages.push(message);
        self.weights.push(weight.unwrap_or(of_role));
        Ok(())
    }

    /// Turns from `messages`, in the form of chat servers.
    pub(super) fn of_messages(mut items: Vec<Value>) -> Result<Turns> {
        let each = items.iter_mut().enumerate();
        let weights = each
            .map(|(i, item)| take_weight(item).map_err(|e| e.within(format_args!("message {i}"))));
        let weights = weights.collect::<Result<Vec<_>>>()?;
        let mut turns = Turns::default();
        for (message, weight) in messages_from_values(items)?.into_iter().zip(weights) {
            turns.push(message, weight)?;
        }
        Ok(turns)
    }

    /// Turns from a prompt, which is not learned, and its completion.
    pub(super) fn of_prompt(prompt: Vec<Value>, completion: Vec<Value>) -> Result<Turns> {
        let asked = prompt.len();
        let mut turns = Self::of_messages(prompt.into_iter().chain(completion).collect())?;
        turns.weights[..asked].fill(0.0);
        if turns.messages[asked..]
            .iter()
            .all(|m| m.role != "assistant")
        {
            bail!(
                InvalidArgument,
                "none of the {} messages of its completion is the assistant's, so there is nothing to learn",
                turns.messages.len() - asked
            );
        }
        Ok(turns)
    }

    /// Turns from `conversations`: `[{"from": ..., "value": ...}, ...]`, or messages under that name.
    pub(super) fn of_sharegpt(items: Vec<Value>) -> Result<Turns> {
        if items.first().is_some_and(|item| item.get("role").is_some()) {
            return Self::of_messages(items);
        }
        let mut turns = Turns::default();
        for (i, mut item) in items.into_iter().enumerate() {
            let read = take_weight(&mut item)
                .and_then(|weight| Ok((spoken(item)?, weight)))
                .map_err(|e| e.within(format_args!("message {i}")));
            let (message, weight) = read?;
            turns.push(message, weight)?;
        }
        Ok(turns)
    }

    /// Turns from `history`: `[[question, answer], ...]`.
    pub(super) fn of_history(items: Vec<Value>) -> Result<Turns> {
        let mut turns = Turns::default();
        for (i, item) in items.into_iter().enumerate() {
            let Some([question, answer]) = item.as_array().map(Vec::as_slice).and_then(texts)
            else {
                bail!(
                    InvalidArgument,
                    "element {i} of history is {item}; it is an array of two texts, a question and its answer"
                );
            };
            turns = turns.and(question, answer);
        }
        Ok(turns)
    }

    /// Appends a question and its answer.
    pub(super) fn and(mut self, question: String, answer: String) -> Turns {
        self.messages.push(Message::new("user", question));
        self.messages.push(Message::new("assistant", answer));
        self.weights.extend([0.0, 1.0]);
        self
    }

    /// Puts a system message first, unless it is empty.
    pub(super) fn under(mut self, system: String) -> Result<Turns> {
        if system.is_empty() {
            return Ok(self);
        }
        if self.messages.first().is_some_and(|m| m.role == "system") {
            bail!(
                InvalidArgument,
                "it has a system key and a system message; leave one of them out"
            );
        }
        self.messages.insert(0, Message::new("system", system));
        self.weights.insert(0, 0.0);
        Ok(self)
    }

    /// Refuses turns with nothing to learn.
    pub(super) fn checked(self) -> Result<Turns> {
        let answers = self
            .messages
            .iter()
            .filter(|m| m.role == "assistant")
            .count();
        if answers == 0 {
            bail!(
                InvalidArgument,
                "none of its {} messages is the assistant's, so there is nothing to learn",
                self.messages.len()
            );
        }
        if self.weights.iter().all(|&weight| weight == 0.0) {
            bail!(
                InvalidArgument,
                "each of its {answers} messages of the assistant is context by its weight or train, so there is nothing to learn"
            );
        }
        Ok(self)
    }
}

fn texts(items: &[Value]) -> Option<[String; 2]> {
    match items {
        [Value::String(question), Value::String(answer)] => {
            Some([question.clone(), answer.clone()])
        }
        _ => None,
    }
}

/// The message of a ShareGPT speaker.
fn spoken(item: Value) -> Result<Message> {
    let Value::Object(mut fields) = item else {
        bail!(InvalidArgument, "is {}, not an object", kind(&item));
    };
    let take = |fields: &mut Map<String, Value>, name: &str| match fields.remove(name) {
        Some(Value::String(text)) => Ok(text),
        other => bail!(
            InvalidArgument,
            "{name} is {}, not a text; a message is {{\"from\": ..., \"value\": ...}}",
            other.as_ref().map_or("missing", kind)
        ),
    };
    let (from, value) = (take(&mut fields, "from")?, take(&mut fields, "value")?);
    if let Some((key, _)) = fields.iter().find(|(_, value)| !value.is_null()) {
        bail!(
            InvalidArgument,
            "key '{key}' is not known; a message of a conversation has from, value, weight and train"
        );
    }
    let Some((_, role)) = SPEAKERS.iter().find(|(name, _)| *name == from) else {
        let known: Vec<_> = SPEAKERS.iter().map(|(name, _)| *name).collect();
        bail!(
            InvalidArgument,
            "from is '{from}'; it is one of {}",
            known.join(", ")
        );
    };
    if from != "function_call" {
        return Ok(Message::new(*role, value));
    }
    let calls = match serde_json::from_str(&value) {
        Ok(Value::Array(calls)) => Value::Array(calls),
        Ok(Value::Object(call)) => json!([call]),
        _ => bail!(
            InvalidArgument,
            "the value of a function_call is no JSON of {{\"name\": ..., \"arguments\": ...}}"
        ),
    };
    let mut message = messages_from_values(vec![json!({"role": role, "tool_calls": calls})])?;
    Ok(message.remove(0))
}
