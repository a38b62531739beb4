//! What a model writes as its answer, taken apart while it streams: reasoning, content and calls of tools.
//!
//! Each family's form of calls is one short file. `section` says what a form is and holds what the forms share, `form` finds a
//! model's forms from its chat template and its tokens, `parser` runs them.

mod cursor;
mod deepseek;
mod form;
mod gemma;
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
pub use parser::{AnswerParser, Event};
