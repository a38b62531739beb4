//! What makes tokens of text.

use super::bpe::Bpe;

/// Our own tokenizer where it knows how, and otherwise the crate's.
pub(super) enum Engine {
    Own(Box<Bpe>),
    Crate(Box<tokenizers::Tokenizer>),
}
