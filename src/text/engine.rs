//! Selects the encoder of a tokenizer.

use super::bpe::Bpe;

/// Our own byte-level BPE if it supports the tokenizer, else the crate's.
pub(super) enum Engine {
    Own(Box<Bpe>),
    Crate(Box<tokenizers::Tokenizer>),
}
