//! NFC normalization, which leaves nearly all text unchanged: only the parts around characters that may change go through
//! the tables, the same ones that the crate `tokenizers` uses.

use std::borrow::Cow;
use std::iter::once;

use unicode_normalization_alignments::char::canonical_combining_class;
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

/// Whether `c` never changes and is never composed with the character before it.
fn is_inert(c: char) -> bool {
    matches!(c, '\0'..='\u{2ff}' | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}')
        || (canonical_combining_class(c) == 0 && is_nfc_quick(once(c)) == IsNormalized::Yes)
}

/// `text` in NFC.
pub(super) fn nfc(text: &str) -> Cow<'_, str> {
    let mut composed = String::new();
    // Text before `copied` is in `composed`; `stretch` is where the last inert character begins.
    let (mut copied, mut stretch) = (0, 0);
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        if is_inert(c) {
            stretch = at;
            continue;
        }
        let next = chars.find(|&(_, c)| is_inert(c));
        let end = next.map_or(text.len(), |(at, _)| at);
        composed.push_str(&text[copied..stretch]);
        composed.extend(text[stretch..end].chars().nfc().map(|(c, _)| c));
        (copied, stretch) = (end, end);
    }
    match copied {
        0 => Cow::Borrowed(text),
        _ => {
            composed.push_str(&text[copied..]);
            Cow::Owned(composed)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_character_in_every_company() {
        let codes = (0..=0x3_ffff).chain(0xe_0000..=0xe_0fff);
        for c in codes.filter_map(char::from_u32) {
            for text in [
                format!("{c}"),
                format!("e{c}"),
                format!("中{c}\u{301}\u{323}가{c}\u{11a8}q"),
            ] {
                let expected: String = text.chars().nfc().map(|(c, _)| c).collect();
                assert_eq!(nfc(&text), expected, "{text:?}");
            }
        }
    }
}
