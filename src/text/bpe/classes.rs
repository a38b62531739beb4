//! The character classes in the patterns of pre-tokenizers, from `regex-syntax`: the crate `tokenizers` uses its tables,
//! and another version of Unicode would split new letters differently.

use once_cell::race::OnceBox;
use regex_syntax::hir::{Class, HirKind};

/// `\p{L}`
pub(super) const LETTER: u8 = 1;
/// `\p{N}`
pub(super) const NUMBER: u8 = 2;
/// `\s`
pub(super) const SPACE: u8 = 4;
/// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`
pub(super) const UPPER: u8 = 8;
/// `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`
pub(super) const LOWER: u8 = 16;
/// `\p{M}`
pub(super) const MARK: u8 = 32;
/// `\p{P}`
pub(super) const PUNCTUATION: u8 = 64;
/// `\p{S}`
pub(super) const SYMBOL: u8 = 128;

const PATTERNS: [(u8, &str); 8] = [
    (LETTER, r"\p{L}"),
    (NUMBER, r"\p{N}"),
    (SPACE, r"\s"),
    (UPPER, r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"),
    (LOWER, r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"),
    (MARK, r"\p{M}"),
    (PUNCTUATION, r"\p{P}"),
    (SYMBOL, r"\p{S}"),
];

/// The classes of every character.
pub(super) struct Classes(Box<[u8]>);

impl Classes {
    /// The one table of the process.
    pub(super) fn get() -> &'static Classes {
        // Threads do not wait for each other to create it: in the child of a fork the other thread may not exist.
        static CLASSES: OnceBox<Classes> = OnceBox::new();
        CLASSES.get_or_init(|| {
            let mut table = vec![0; char::MAX as usize + 1].into_boxed_slice();
            for (flag, pattern) in PATTERNS {
                for (first, last) in ranges(pattern) {
                    table[first as usize..=last as usize]
                        .iter_mut()
                        .for_each(|flags| *flags |= flag);
                }
            }
            Box::new(Classes(table))
        })
    }

    #[inline]
    pub(super) fn of(&self, c: char) -> u8 {
        self.0[c as usize]
    }
}

fn ranges(pattern: &str) -> Vec<(char, char)> {
    let class = regex_syntax::parse(pattern).map(|hir| hir.into_kind());
    match class {
        Ok(HirKind::Class(Class::Unicode(class))) => {
            class.iter().map(|r| (r.start(), r.end())).collect()
        }
        _ => unreachable!("{pattern} is a class of characters"),
    }
}
