//! Streaming parser of a model's answer: reasoning, content and tool calls.
//!
//! Each family's form of calls is one short file. `section` defines what a form is and has the code that forms share,
//! `form` detects a model's forms from its chat template and its tokens, `parser` runs them, `held` writes the grammar of calls.

mod cursor;
mod deepseek;
mod form;
mod gemma;
mod glm;
mod harmony;
mod held;
mod json;
mod llama;
mod mistral;
mod parser;
mod python;
mod section;
#[cfg(test)]
mod tests;
mod xml;

pub use form::{AnswerForm, Reasoning};
pub use parser::{AnswerParser, AnswerStage, Event};
