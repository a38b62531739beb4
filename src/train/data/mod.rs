//! Training data. Rows of files become [`Document`]s of tokens with learned ones marked, documents are packed into [`Windows`], and a seed
//! and a [`Place`] fix the order of windows. Knows tokenizers and chat templates, and of a model only the size of its vocabulary.

mod choices;
mod content;
mod conversation;
mod document;
mod fields;
mod mask;
mod options;
mod order;
mod prompts;
mod read;
mod row;
mod rows;
#[cfg(test)]
mod tests;
mod window;

pub use choices::{MultipleChoice, multiple_choice};
pub use content::DataFile;
pub(super) use content::as_text;
pub use document::Document;
pub use mask::{Mask, Span};
pub use options::{EmptyThink, Format, Long, Options, window};
pub use order::{Order, Place};
pub use prompts::{Question, fingerprint, questions};
pub use read::{Data, Report, read, read_embedded};
pub use window::{Window, Windows};
