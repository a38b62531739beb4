//! The pieces and the result of a generation.

use super::Part;
use super::drafts::DraftCounts;
use super::options::Finish;
use super::probabilities::TokenProbabilities;
use super::timings::Timings;
use crate::base::error::bail;
use crate::base::{Error, Result};
use crate::text::ToolCall;

/// The result of a generation.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The tokens, which the session now holds but for evicted ones. A stop token is not among them.
    pub tokens: Vec<u32>,
    /// Their text, without special tokens and up to a stop string. Excludes an incomplete character at the end: its bytes come with the
    /// text of the next generation if that completes it. In a chat, the content of the answer.
    pub text: String,
    /// The reasoning before the answer, in a chat.
    pub reasoning: String,
    /// The tool calls of the answer, in a chat.
    pub tool_calls: Vec<ToolCall>,
    /// The seed of the draws, which repeats them.
    pub seed: u64,
    /// The reason why it ended.
    pub finish: Finish,
    /// Tokens before it: all tokens that the session held, or for a chat turn those that the turn added.
    pub prompt_tokens: usize,
    /// Tokens of `prompt_tokens` that did not run for it, because the session or blocks of others held their keys and values.
    pub cached_tokens: usize,
    /// How often it gave its memory up to other generations, and ran its tokens again.
    pub preemptions: usize,
    /// How long it took.
    pub timings: Timings,
    /// How many tokens were drafted, and how many of them were right.
    pub drafts: DraftCounts,
    /// Number of tokens that the full context has evicted for it and its prompt. The session then holds no more than the last of its tokens.
    pub evicted: usize,
    /// Set if it ended because its logits processor wrote logits from which no token can be chosen; `finish` is then
    /// [`Finish::Cancelled`].
    pub refusal: Option<Error>,
}

impl Generation {
    /// A generation without tokens.
    pub(super) fn new(seed: u64) -> Self {
        Generation {
            tokens: Vec::new(),
            text: String::new(),
            reasoning: String::new(),
            tool_calls: Vec::new(),
            seed,
            finish: Finish::Length,
            prompt_tokens: 0,
            cached_tokens: 0,
            preemptions: 0,
            timings: Timings::default(),
            drafts: DraftCounts::default(),
            evicted: 0,
            refusal: None,
        }
    }

    /// Fails if it was ended from outside before its first token, so that what came before it is undone.
    pub(super) fn begun(self) -> Result<Self> {
        if self.finish.is_from_outside() && self.tokens.is_empty() {
            if let Some(refusal) = self.refusal {
                return Err(refusal);
            }
            bail!(Cancelled, "cancelled before the first token");
        }
        Ok(self)
    }
}

/// A generated token, or text without a token: text that was held back until the end, or more text that the previous token completes. The
/// concatenated content pieces are the text of the generation. Only a callback that breaks misses text that was held back as the possible
/// beginning of a stop string.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Piece<'a> {
    /// The token, if this is its first piece.
    pub token: Option<u32>,
    /// The kind of the text.
    pub part: Part,
    /// The text that the token completes; empty while a character or a possible stop string is incomplete.
    pub text: &'a str,
    /// If requested, log-probabilities of the token and of the most probable ones; `None` for tokens that a grammar forces.
    pub probabilities: Option<&'a TokenProbabilities>,
}
