//! Builds a tokenizer and a template from a checkpoint's metadata. `checkpoint` and `text` are on the same floor and do not know each
//! other; the loader connects them here.

use std::sync::{Arc, Mutex, PoisonError};

use crate::base::{Result, alloc};
use crate::checkpoint::{TokenizerSource, Vocabulary};
use crate::text::{ChatTemplate, TextFiles, TokenRole, Tokenizer, VocabularySpec, read_files};

/// Calls `work` with a function that reads the text side of a checkpoint, for one of its threads. Returns the text side, empty if the
/// checkpoint has none or the function was not called, and the result of `work`.
pub(crate) fn beside<T>(
    source: &TokenizerSource,
    work: impl FnOnce(&(dyn Fn() + Sync)) -> T,
) -> (Result<TextFiles>, T) {
    let text = Mutex::new(Ok(TextFiles::default()));
    let worked = work(&|| {
        let read = read(source);
        *text.lock().unwrap_or_else(PoisonError::into_inner) = read;
    });
    let text = text.into_inner();
    (text.unwrap_or_else(PoisonError::into_inner), worked)
}

/// The text side of a checkpoint, empty if it has none. A chat template that cannot be used causes a warning here, and an error when it is
/// rendered.
pub(super) fn read(source: &TokenizerSource) -> Result<TextFiles> {
    let files = match (source, source.files()) {
        (_, Some((files, directory))) => read_files(&files, directory)?,
        (TokenizerSource::Vocabulary(vocabulary), _) => read_vocabulary(vocabulary)?,
        _ => TextFiles::default(),
    };
    if let Some(fault) = files.template.as_ref().and_then(ChatTemplate::fault) {
        tracing::warn!("{fault}; conversations that need that template will be refused");
    }
    Ok(files)
}

fn read_vocabulary(vocabulary: &Vocabulary) -> Result<TextFiles> {
    let spelled = |id: Option<u32>| {
        id.and_then(|id| vocabulary.tokens.get(id as usize))
            .cloned()
    };
    let (bos, eos) = (spelled(vocabulary.bos), spelled(vocabulary.eos));
    let templates: Vec<(String, String)> = [
        ("default", &vocabulary.chat_template),
        ("tool_use", &vocabulary.rare.tool_template),
    ]
    .into_iter()
    .filter_map(|(name, source)| Some((name.to_owned(), source.clone()?)))
    .collect();
    let template = (!templates.is_empty())
        .then(|| ChatTemplate::named(&templates, bos.as_deref(), eos.as_deref()));
    let texts = vocabulary.tokens.iter().chain(&vocabulary.merges);
    let _copies = alloc::Budget::copies(texts.map(|t| t.len() + 32).sum()).set_aside()?;
    Ok(TextFiles {
        tokenizer: Some(Arc::new(Tokenizer::from_vocabulary(&spec(vocabulary))?)),
        template,
        bos,
        eos,
        roles: roles(vocabulary),
    })
}

/// The tokens with a role.
fn roles(vocabulary: &Vocabulary) -> Vec<(TokenRole, u32)> {
    let rare = &vocabulary.rare;
    let tokens = [
        (TokenRole::BeginsText, vocabulary.bos),
        (TokenRole::EndsText, vocabulary.eos),
        (TokenRole::Padding, vocabulary.pad),
        (TokenRole::Unknown, vocabulary.unk),
        (TokenRole::Separator, rare.separator),
        (TokenRole::Classification, rare.classification),
        (TokenRole::Mask, rare.mask),
    ];
    let named = tokens.into_iter();
    named
        .filter_map(|(role, token)| Some((role, token?)))
        .collect()
}

/// Converts a checkpoint's vocabulary to the text floor's type.
pub(super) fn spec(v: &Vocabulary) -> VocabularySpec {
    VocabularySpec {
        model: v.model.clone(),
        pre: v.pre.clone().unwrap_or_default(),
        tokens: v.tokens.clone(),
        token_types: v.token_types.clone(),
        merges: v.merges.clone(),
        scores: v.scores.clone(),
        bos: v.bos,
        eos: v.eos,
        unknown: v.unk,
        add_bos: v.add_bos,
        add_eos: v.add_eos,
        add_space_prefix: v.add_space_prefix,
    }
}
