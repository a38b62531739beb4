//! Roles that tokens may have.

/// A role of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TokenRole {
    /// Begins a text.
    BeginsText,
    /// Ends a text.
    EndsText,
    /// The tokenizer adds it around texts.
    Added,
    /// Ends a generation.
    EndsGeneration,
    /// Fills rows of a batch.
    Padding,
    /// Stands for text that the vocabulary cannot spell.
    Unknown,
    /// Stands between two texts.
    Separator,
    /// Stands for a whole text in classification.
    Classification,
    /// Stands for a token that is to be guessed.
    Mask,
    /// Begins the reasoning of an answer.
    BeginsReasoning,
    /// Ends the reasoning of an answer.
    EndsReasoning,
    /// Begins a tool call, or several.
    BeginsToolCall,
    /// Ends a tool call, or several.
    EndsToolCall,
    /// The chat template begins a message with it.
    BeginsTurn,
    /// Ends an answer, by the chat template or by its name.
    EndsTurn,
}

impl TokenRole {
    /// Roles by their keys in `tokenizer_config.json` and `special_tokens_map.json`.
    pub(super) const KEYS: [(&'static str, TokenRole); 7] = [
        ("bos_token", TokenRole::BeginsText),
        ("eos_token", TokenRole::EndsText),
        ("pad_token", TokenRole::Padding),
        ("unk_token", TokenRole::Unknown),
        ("sep_token", TokenRole::Separator),
        ("cls_token", TokenRole::Classification),
        ("mask_token", TokenRole::Mask),
    ];
}
