//! Incremental conversion of tokens to text. A character may be spread over several tokens, so bytes are held back until
//! they form a whole character or cannot become one.

use std::sync::Arc;

use super::Tokenizer;
use crate::base::Result;

/// Turns a stream of token ids into text, whole characters only.
#[derive(Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    keep_special: bool,
    /// The beginning of an incomplete character: at most three bytes between calls.
    pending: Vec<u8>,
    /// Leading spaces still to be dropped, for vocabularies that put one before the first word.
    strip: usize,
}

impl Detokenizer {
    /// A detokenizer at the start of a text. Special tokens give no text.
    pub fn new(tokenizer: &Arc<Tokenizer>) -> Self {
        Detokenizer {
            strip: tokenizer.leading_spaces(),
            tokenizer: tokenizer.clone(),
            keep_special: false,
            pending: Vec::new(),
        }
    }

    /// Shows special tokens as their text if `keep`.
    pub fn with_special(mut self, keep: bool) -> Self {
        self.keep_special = keep;
        self
    }

    /// Continues in the middle of a text, after `tokens`. Ids without text are ignored.
    pub fn after(mut self, tokens: &[u32]) -> Self {
        // Two things depend on these tokens: an incomplete character at their end, and whether leading spaces are still to be dropped.
        // Their last bytes decide both.
        let enough = self.strip.max(3);
        let mut bytes = 0;
        let tail = tokens.iter().rposition(|&token| {
            bytes += shown(&self.tokenizer, token, self.keep_special).map_or(0, <[u8]>::len);
            bytes >= enough
        });
        for &token in &tokens[tail.unwrap_or(0)..] {
            let _ = self.push(token);
        }
        self
    }

    /// The text that `token` completes; empty while a character is incomplete. Bytes that can no longer become a character give U+FFFD.
    pub fn push(&mut self, token: u32) -> Result<String> {
        let bytes = shown(&self.tokenizer, token, self.keep_special)?;
        let spaces = bytes
            .iter()
            .take(self.strip)
            .take_while(|&&b| b == b' ')
            .count();
        self.strip = if spaces == bytes.len() {
            self.strip - spaces
        } else {
            0
        };
        self.pending.extend_from_slice(&bytes[spaces..]);
        Ok(self.take_whole())
    }

    /// The name of `token` if it is a special one that gives no text.
    pub fn name_of_special(&self, token: u32) -> &str {
        let hidden = self.tokenizer.is_special(token) && !self.keep_special;
        let name = hidden
            .then(|| self.tokenizer.bytes_of(token).ok())
            .flatten();
        name.and_then(|name| std::str::from_utf8(name).ok())
            .unwrap_or_default()
    }

    /// The text that is held back, an incomplete character as U+FFFD. Afterwards the detokenizer is at the start of a text
    /// again.
    pub fn finish(&mut self) -> String {
        self.strip = self.tokenizer.leading_spaces();
        let rest = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        rest
    }

    fn take_whole(&mut self) -> String {
        let mut text = String::new();
        let mut done = 0;
        loop {
            match std::str::from_utf8(&self.pending[done..]) {
                Ok(rest) => {
                    text.push_str(rest);
                    done = self.pending.len();
                    break;
                }
                Err(e) => {
                    let valid = &self.pending[done..done + e.valid_up_to()];
                    text.push_str(&String::from_utf8_lossy(valid));
                    done += e.valid_up_to();
                    let Some(bad) = e.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    done += bad;
                }
            }
        }
        self.pending.drain(..done);
        text
    }
}

/// The bytes that `token` adds to a text.
fn shown(tokenizer: &Tokenizer, token: u32, keep_special: bool) -> Result<&[u8]> {
    let bytes = tokenizer.bytes_of(token)?;
    Ok(if tokenizer.is_special(token) && !keep_special {
        &[]
    } else {
        bytes
    })
}
