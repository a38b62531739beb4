//! Comparison of two models' tokens: a draft model proposes tokens by their ids, so both must mean the same texts by them.

use std::sync::{Arc, Mutex, Weak};

use super::served::Served;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::base::lock::lock;
use crate::text::Tokenizer;

/// Tokenizers that a model's own was compared with and found to have the same tokens.
#[derive(Default)]
pub(super) struct Alike(Mutex<Vec<Weak<Tokenizer>>>);

impl Alike {
    fn has(&self, tokenizer: &Arc<Tokenizer>) -> bool {
        let mut known = lock(&self.0);
        known.retain(|alike| alike.strong_count() > 0);
        known
            .iter()
            .any(|alike| alike.as_ptr() == Arc::as_ptr(tokenizer))
    }

    fn add(&self, tokenizer: &Arc<Tokenizer>) {
        lock(&self.0).push(Arc::downgrade(tokenizer));
    }
}

impl Served {
    /// Fails unless `draft` can draft tokens for this model: each id that both tokenizers have must be the same text. Numbers of ids and of
    /// rows may differ. Models of which one has no tokenizer must have equally many rows in their embeddings, and their ids are taken to mean
    /// the same. Tokenizers are compared once.
    pub fn check_draft_model(&self, draft: &Served) -> Result<()> {
        let (Ok(own), Ok(other)) = (self.tokenizer(), draft.tokenizer()) else {
            let (own, other) = (self.spec().vocab_size, draft.spec().vocab_size);
            if own != other {
                bail!(
                    InvalidArgument,
                    "the draft model has {other} tokens, and the model that it drafts for {own}; without both tokenizers the numbers must be equal"
                );
            }
            return Ok(());
        };
        if Arc::ptr_eq(own, other) || self.alike().has(other) {
            return Ok(());
        }
        let both = own.vocab_size().min(other.vocab_size());
        for id in 0..both as u32 {
            if let (Ok(text), Ok(drafted)) = (own.bytes_of(id), other.bytes_of(id))
                && text != drafted
            {
                return Err(err!(
                    InvalidArgument,
                    "token {id} is {:?} in the draft model, and {:?} in the model that it drafts for; both need the same tokenizer",
                    String::from_utf8_lossy(drafted),
                    String::from_utf8_lossy(text)
                ));
            }
        }
        self.alike().add(other);
        Ok(())
    }
}
