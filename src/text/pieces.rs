//! The bytes of each token, in one flat array. Joining them gives the text, so whole-text and incremental decoding share
//! this table and cannot disagree.

use crate::base::Result;
use crate::base::error::{bail, err};

/// More than any real vocabulary; a larger id in a file is damage, and would make the table huge.
const MAX_ID: u32 = 1 << 24;

/// How the strings of a vocabulary encode bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// GPT-2's alphabet: each character encodes one byte.
    ByteLevel,
    /// Text with `space` in place of spaces, and `<0xNN>` tokens for single bytes if `bytes`.
    Plain { space: Option<char>, bytes: bool },
}

/// The byte that `c` stands for in GPT-2's alphabet: printable Latin-1 stands for itself, and the other 68 bytes follow
/// in order from U+0100.
pub(super) fn byte_of(c: char) -> Option<u8> {
    const fn shown(b: u8) -> bool {
        matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
    }
    const HIDDEN: [u8; 68] = {
        let mut hidden = [0; 68];
        let (mut b, mut n) = (0usize, 0);
        while b < 256 {
            if !shown(b as u8) {
                hidden[n] = b as u8;
                n += 1;
            }
            b += 1;
        }
        hidden
    };
    match c as u32 {
        code @ 0..=0xff if shown(code as u8) => Some(code as u8),
        code @ 0x100.. => HIDDEN.get(code as usize - 0x100).copied(),
        _ => None,
    }
}

impl Spelling {
    fn append(&self, token: &str, out: &mut Vec<u8>) {
        match self {
            Spelling::ByteLevel => {
                let start = out.len();
                for c in token.chars() {
                    match byte_of(c) {
                        Some(b) => out.push(b),
                        None => {
                            // A token with characters outside the alphabet is literal text.
                            out.truncate(start);
                            out.extend_from_slice(token.as_bytes());
                            return;
                        }
                    }
                }
            }
            Spelling::Plain { space, bytes } => {
                if *bytes && let Some(b) = byte_token(token) {
                    out.push(b);
                    return;
                }
                for c in token.chars() {
                    let c = if Some(c) == *space { ' ' } else { c };
                    out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
                }
            }
        }
    }
}

fn byte_token(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2)
        .then(|| u8::from_str_radix(hex, 16).ok())
        .flatten()
}

const PRESENT: u8 = 1;
const SPECIAL: u8 = 2;
#[cfg(feature = "grammar")]
const LITERAL: u8 = 4;

/// Bytes and flags of every token id.
pub(super) struct Pieces {
    bytes: Vec<u8>,
    /// `starts[id]..starts[id + 1]` is the range of `bytes`.
    starts: Vec<u32>,
    flags: Vec<u8>,
}

/// A token of the vocabulary.
pub(super) struct Token<'a> {
    pub(super) id: u32,
    pub(super) text: &'a str,
    /// Added tokens are literal text, whatever the vocabulary's spelling.
    pub(super) literal: bool,
    pub(super) special: bool,
}

impl Pieces {
    /// The table for `tokens`, in any order; ids may have gaps. The last token given for an id wins.
    pub(super) fn new(spelling: &Spelling, tokens: &[Token<'_>]) -> Result<Self> {
        let mut order: Vec<Option<usize>> = Vec::with_capacity(tokens.len());
        for (i, token) in tokens.iter().enumerate() {
            if token.id >= MAX_ID {
                bail!(
                    CorruptFile,
                    "token '{}' has id {}; ids end below {MAX_ID}",
                    token.text,
                    token.id
                );
            }
            let id = token.id as usize;
            if order.len() <= id {
                order
                    .try_reserve(id + 1 - order.len())
                    .map_err(|e| err!(OutOfMemory, "{} tokens: {e}", id + 1))?;
                order.resize(id + 1, None);
            }
            order[id] = Some(i);
        }
        let mut pieces = Pieces {
            bytes: Vec::new(),
            starts: Vec::with_capacity(order.len() + 1),
            flags: Vec::with_capacity(order.len()),
        };
        pieces.starts.push(0);
        for token in order.iter().map(|at| at.map(|i| &tokens[i])) {
            let mut flags = 0;
            if let Some(token) = token {
                flags = PRESENT | if token.special { SPECIAL } else { 0 };
                #[cfg(feature = "grammar")]
                if token.literal {
                    flags |= LITERAL;
                }
                if token.literal {
                    pieces.bytes.extend_from_slice(token.text.as_bytes());
                } else {
                    spelling.append(token.text, &mut pieces.bytes);
                }
            }
            let Ok(end) = u32::try_from(pieces.bytes.len()) else {
                bail!(
                    CorruptFile,
                    "the vocabulary's tokens are longer than 4 GB together"
                );
            };
            pieces.starts.push(end);
            pieces.flags.push(flags);
        }
        Ok(pieces)
    }

    /// The largest id + 1.
    pub(super) fn len(&self) -> usize {
        self.flags.len()
    }

    /// The bytes of `id`.
    pub(super) fn get(&self, id: u32) -> Result<&[u8]> {
        let i = id as usize;
        match self.flags.get(i) {
            Some(flags) if flags & PRESENT != 0 => {
                Ok(&self.bytes[self.starts[i] as usize..self.starts[i + 1] as usize])
            }
            Some(_) => bail!(
                InvalidArgument,
                "token id {id} is a gap in the vocabulary: no token has this id"
            ),
            None => bail!(
                InvalidArgument,
                "token id {id} is not in the vocabulary; ids are below {}",
                self.len()
            ),
        }
    }

    /// The bytes of the special tokens.
    pub(super) fn special(&self) -> impl Iterator<Item = &[u8]> {
        let ids = (0..self.flags.len()).filter(|&i| self.flags[i] & SPECIAL != 0);
        ids.map(|i| &self.bytes[self.starts[i] as usize..self.starts[i + 1] as usize])
    }

    /// Whether `id` is an added token.
    #[cfg(feature = "grammar")]
    pub(super) fn is_literal(&self, id: u32) -> bool {
        self.flags
            .get(id as usize)
            .is_some_and(|f| f & LITERAL != 0)
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.flags
            .get(id as usize)
            .is_some_and(|f| f & SPECIAL != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;

    #[test]
    fn the_alphabet_is_a_bijection_on_bytes() {
        let mut seen = [false; 256];
        for c in (0..0x200).filter_map(char::from_u32) {
            if let Some(b) = byte_of(c) {
                assert!(!std::mem::replace(&mut seen[b as usize], true), "{c:?}");
            }
        }
        assert!(seen.iter().all(|&s| s));
        assert_eq!(byte_of('Ġ'), Some(b' '));
        assert_eq!(byte_of('Ċ'), Some(b'\n'));
        assert_eq!(byte_of('\u{143}'), Some(0xad));
    }

    #[test]
    fn gaps_and_ids_past_the_end_are_named() {
        let token = |id, text| Token {
            id,
            text,
            literal: false,
            special: false,
        };
        let pieces = Pieces::new(&Spelling::ByteLevel, &[token(0, "a"), token(2, "Ġb")]).unwrap();
        assert_eq!(pieces.get(2).unwrap(), b" b");
        assert!(pieces.get(1).unwrap_err().message().contains("gap"));
        assert!(pieces.get(3).unwrap_err().message().contains("below 3"));
        expect_kind(
            Pieces::new(&Spelling::ByteLevel, &[token(u32::MAX, "a")]),
            ErrorKind::CorruptFile,
            "token 'a' has id 4294967295",
        );
    }
}
