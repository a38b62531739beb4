//! Comparison of the tokens of two tokenizers. A draft model proposes tokens by their ids, so both models must mean the same texts by them.

use std::any::Any;
use std::sync::{Arc, Mutex, Weak};

use crate::base::Result;
use crate::base::error::bail;
use crate::base::lock::lock;
use crate::text::Tokenizer;

/// Tokenizers that a model's own was compared with and found to have the same tokens.
#[derive(Default)]
pub(super) struct Alike(Mutex<Vec<Weak<Tokenizer>>>);

impl Alike {
    /// Takes the lock of the list until the result is dropped.
    pub(super) fn locked(&'static self) -> Box<dyn Any> {
        Box::new(lock(&self.0))
    }

    /// Fails unless each id that `own`, the model's tokenizer, and that of a draft model both have is the same text. Compares them once.
    pub(super) fn check(&self, own: &Arc<Tokenizer>, drafts: &Arc<Tokenizer>) -> Result<()> {
        if Arc::ptr_eq(own, drafts) || self.has(drafts) {
            return Ok(());
        }
        let both = own.vocab_size().min(drafts.vocab_size());
        for id in 0..both as u32 {
            if let (Ok(text), Ok(drafted)) = (own.bytes_of(id), drafts.bytes_of(id))
                && text != drafted
            {
                bail!(
                    InvalidArgument,
                    "token {id} is {:?} in the draft model, and {:?} in the model that it drafts for; both need the same tokenizer",
                    String::from_utf8_lossy(drafted),
                    String::from_utf8_lossy(text)
                );
            }
        }
        lock(&self.0).push(Arc::downgrade(drafts));
        Ok(())
    }

    fn has(&self, tokenizer: &Arc<Tokenizer>) -> bool {
        let mut known = lock(&self.0);
        known.retain(|alike| alike.strong_count() > 0);
        known
            .iter()
            .any(|alike| alike.as_ptr() == Arc::as_ptr(tokenizer))
    }
}
