//! What training reads: files of rows become [`Document`]s of tokens of which some are learned, documents are packed into [`Windows`],
//! and windows come in an order that a seed and a [`Place`] fix. Knows tokenizers and chat templates, and no model beyond the size of its
//! vocabulary.

mod document;
mod options;
mod order;
mod read;
mod rows;
mod window;

pub use document::Document;
pub use options::{Format, Long, Options};
pub use order::{Order, Place};
pub(super) use read::as_text;
pub use read::{Data, DataFile, Report, read};
pub use window::{Window, Windows};
