//! From what a checkpoint says about text to a tokenizer and a template. `checkpoint` and `text` stand on one floor and do
//! not know each other; this is where they meet.

use std::sync::Arc;

use super::convert::vocabulary_spec;
use crate::base::Result;
use crate::checkpoint::TokenizerSource;
use crate::text::{ChatTemplate, TextFiles, Tokenizer, read_directory};

/// The text side of a checkpoint; empty where it has none.
pub(super) fn read(source: &TokenizerSource) -> Result<TextFiles> {
    match source {
        TokenizerSource::None => Ok(TextFiles::default()),
        TokenizerSource::Directory(directory) => read_directory(directory),
        TokenizerSource::Vocabulary(vocabulary) => {
            let spelled = |id: Option<u32>| {
                id.and_then(|id| vocabulary.tokens.get(id as usize))
                    .cloned()
            };
            let (bos, eos) = (spelled(vocabulary.bos), spelled(vocabulary.eos));
            let template = vocabulary
                .chat_template
                .as_deref()
                .map(|s| ChatTemplate::from_jinja(s, bos.as_deref(), eos.as_deref()))
                .transpose()?;
            Ok(TextFiles {
                tokenizer: Some(Arc::new(Tokenizer::from_vocabulary(&vocabulary_spec(
                    vocabulary,
                ))?)),
                template,
                bos,
                eos,
            })
        }
    }
}
