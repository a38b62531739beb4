//! Splitting text into words, hand-written for the patterns that nearly all byte-level models use. Each is recognised by
//! its exact text and gives the same words as `fancy-regex`, without backtracking: a run of spaces of any length is scanned
//! once.

use super::classes::{Classes, LETTER, LOWER, MARK, NUMBER, PUNCTUATION, SPACE, SYMBOL, UPPER};

/// A known pattern. Its matches, and the text between them, become words.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum WordPattern {
    /// The words of GPT-2.
    Gpt2,
    /// The words of cl100k_base, used by Llama 3 and Qwen, with up to `digits` digits per word; marks may count as letters.
    Cl100k { digits: usize, marks: bool },
    /// The words of o200k_base, used by GPT-4o and Llama 4.
    O200k { digits: usize, contractions: bool },
    /// The words of DeepSeek-V3, after earlier steps that split off numbers, Chinese and Japanese.
    DeepSeek,
    /// Runs of characters of a class, with a minimum and a maximum length.
    Runs(Kind, usize, usize),
}

/// The class of characters in a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    /// `\p{N}`
    Number,
    /// The digits of the crate `tokenizers`.
    Numeric,
    /// `[0-9]`
    Digit,
    /// `[\p{P}\$\+<=>\^~\|]`
    Punctuation,
    /// Chinese and Japanese, as in the pattern of DeepSeek-V3.
    Han,
}

/// The patterns of published models.
pub(in crate::text) mod patterns {
    pub(in crate::text) const GPT2: &str =
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

    pub(in crate::text) const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

    pub(in crate::text) const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

    pub(in crate::text) const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

    pub(in crate::text) const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

    pub(in crate::text) const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

    pub(in crate::text) const DEEPSEEK: &str = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+";

    pub(in crate::text) const PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|]+";

    pub(in crate::text) const HAN: &str = "[一-龥぀-ゟ゠-ヿ]+";
}

const KNOWN: &[(&str, WordPattern)] = &[
    (patterns::GPT2, WordPattern::Gpt2),
    (
        patterns::QWEN2,
        WordPattern::Cl100k {
            digits: 1,
            marks: false,
        },
    ),
    (
        patterns::LLAMA3,
        WordPattern::Cl100k {
            digits: 3,
            marks: false,
        },
    ),
    (
        patterns::QWEN35,
        WordPattern::Cl100k {
            digits: 1,
            marks: true,
        },
    ),
    (
        patterns::GPT4O,
        WordPattern::O200k {
            digits: 3,
            contractions: true,
        },
    ),
    (
        patterns::TEKKEN,
        WordPattern::O200k {
            digits: 1,
            contractions: false,
        },
    ),
    (patterns::DEEPSEEK, WordPattern::DeepSeek),
    (r"\p{N}", WordPattern::Runs(Kind::Number, 1, 1)),
    (r"\p{N}{1,3}", WordPattern::Runs(Kind::Number, 1, 3)),
    (r"\p{N}+", WordPattern::Runs(Kind::Number, 1, usize::MAX)),
    ("[0-9][0-9][0-9]", WordPattern::Runs(Kind::Digit, 3, 3)),
    (
        patterns::PUNCTUATION,
        WordPattern::Runs(Kind::Punctuation, 1, usize::MAX),
    ),
    (patterns::HAN, WordPattern::Runs(Kind::Han, 1, usize::MAX)),
];

impl WordPattern {
    /// The step for a pattern, if it is known.
    pub(super) fn of(pattern: &str) -> Option<WordPattern> {
        let known = KNOWN.iter().find(|(text, _)| *text == pattern);
        known.map(|(_, step)| *step)
    }

    /// Whether every character of every text is part of a match.
    pub(super) fn matches_all(self) -> bool {
        matches!(
            self,
            WordPattern::Gpt2 | WordPattern::Cl100k { .. } | WordPattern::O200k { .. }
        )
    }
}

/// Calls `found` with each word of `text`: each step splits the pieces of the one before.
pub(super) fn words<'t>(text: &'t str, steps: &[WordPattern], found: &mut dyn FnMut(&'t str)) {
    let Some((step, further)) = steps.split_first() else {
        if !text.is_empty() {
            found(text);
        }
        return;
    };
    let mut word = |range: std::ops::Range<usize>| match further {
        [] => found(&text[range]),
        _ => words(&text[range], further, found),
    };
    let text = ClassifiedText {
        text,
        classes: Classes::get(),
    };
    // The text after the last match begins at `from`.
    let (mut from, mut at) = (0, 0);
    while at < text.text.len() {
        match text.matched(*step, at) {
            Ok(end) => {
                if from < at {
                    word(from..at);
                }
                word(at..end);
                (from, at) = (end, end);
            }
            Err(next) => at = next,
        }
    }
    if from < at {
        word(from..at);
    }
}

/// The classes of the first 128 characters, so that ASCII text needs only this table.
static ASCII: [u8; 128] = {
    let mut table = [0; 128];
    let mut b = 0u8;
    while b < 128 {
        table[b as usize] = match b {
            b'A'..=b'Z' => LETTER | UPPER,
            b'a'..=b'z' => LETTER | LOWER,
            b'0'..=b'9' => NUMBER,
            b'\t'..=b'\r' | b' ' => SPACE,
            b'$' | b'+' | b'<' | b'=' | b'>' | b'^' | b'`' | b'|' | b'~' => SYMBOL,
            b'!'..=b'~' => PUNCTUATION,
            _ => 0,
        };
        b += 1;
    }
    table
};

struct ClassifiedText<'t> {
    text: &'t str,
    classes: &'static Classes,
}

impl ClassifiedText<'_> {
    fn byte(&self, at: usize) -> Option<u8> {
        self.text.as_bytes().get(at).copied()
    }

    /// The classes of the character at `at`, and the position of the next one.
    #[inline]
    fn class(&self, at: usize) -> Option<(u8, usize)> {
        match self.byte(at)? {
            b @ 0..=127 => Some((ASCII[b as usize], at + 1)),
            _ => {
                let c = self.text[at..].chars().next()?;
                Some((self.classes.of(c), at + c.len_utf8()))
            }
        }
    }

    /// The end of a run of up to `most` characters that `is` accepts.
    #[inline]
    fn run(&self, mut at: usize, most: usize, is: impl Fn(u8) -> bool) -> usize {
        let mut count = 0;
        while count < most
            && let Some((class, next)) = self.class(at)
            && is(class)
        {
            at = next;
            count += 1;
        }
        at
    }

    fn bytes(&self, mut at: usize, set: &[u8]) -> usize {
        while self.byte(at).is_some_and(|b| set.contains(&b)) {
            at += 1;
        }
        at
    }

    /// The end of the match that begins at `at`; if none does, where the next may begin.
    fn matched(&self, step: WordPattern, at: usize) -> Result<usize, usize> {
        match step {
            WordPattern::Gpt2 => Ok(self.gpt2(at)),
            WordPattern::Cl100k { digits, marks } => Ok(self.cl100k(at, digits, marks)),
            WordPattern::O200k {
                digits,
                contractions,
            } => Ok(self.o200k(at, digits, contractions)),
            WordPattern::DeepSeek => self.deepseek(at),
            WordPattern::Runs(kind, least, most) => {
                let mut chars = self.text[at..].chars();
                let run = chars.by_ref().take(most).take_while(|&c| self.is(kind, c));
                let (count, len) = run.fold((0, 0), |(n, len), c| (n + 1, len + c.len_utf8()));
                match count {
                    0 => Err(self.class(at).map_or(at + 1, |(_, next)| next)),
                    count if count < least => Err(at + len),
                    _ => Ok(at + len),
                }
            }
        }
    }

    fn is(&self, kind: Kind, c: char) -> bool {
        match kind {
            Kind::Number => self.classes.of(c) & NUMBER != 0,
            Kind::Numeric => c.is_numeric(),
            Kind::Digit => c.is_ascii_digit(),
            Kind::Punctuation => {
                self.classes.of(c) & PUNCTUATION != 0
                    || matches!(c, '$' | '+' | '<' | '=' | '>' | '^' | '~' | '|')
            }
            Kind::Han => matches!(c, '一'..='龥' | '\u{3040}'..='\u{30ff}'),
        }
    }

    fn gpt2(&self, at: usize) -> usize {
        if let Some(end) = self.contraction(at, false) {
            return end;
        }
        let from = at + usize::from(self.byte(at) == Some(b' '));
        let (class, next) = self.class(from).unwrap_or((SPACE, from));
        match class & (LETTER | NUMBER | SPACE) {
            SPACE => self.spaces(at),
            kind => self.run(next, usize::MAX, |c| c & (LETTER | NUMBER | SPACE) == kind),
        }
    }

    fn cl100k(&self, at: usize, digits: usize, marks: bool) -> usize {
        if let Some(end) = self.contraction(at, true) {
            return end;
        }
        let letters = LETTER | if marks { MARK } else { 0 };
        let Some((class, next)) = self.class(at) else {
            return at;
        };
        if class & letters != 0 {
            return self.run(next, usize::MAX, |c| c & letters != 0);
        }
        if class & NUMBER != 0 {
            return self.run(at, digits, |c| c & NUMBER != 0);
        }
        if !matches!(self.byte(at), Some(b'\r' | b'\n')) {
            let end = self.run(next, usize::MAX, |c| c & letters != 0);
            if end > next {
                return end;
            }
        }
        let other = |c| c & (letters | NUMBER | SPACE) == 0;
        self.others(at, other, b"\r\n")
            .unwrap_or_else(|| self.lines(at))
    }

    fn o200k(&self, at: usize, digits: usize, contractions: bool) -> usize {
        let Some((class, next)) = self.class(at) else {
            return at;
        };
        let ended = |end| match contractions {
            true => self.contraction(end, true).unwrap_or(end),
            false => end,
        };
        let before =
            class & (LETTER | NUMBER) == 0 && !matches!(self.byte(at), Some(b'\r' | b'\n'));
        let starts = [before.then_some(next), Some(at)];
        let starts = starts.into_iter().flatten();
        // The two alternatives in turn, each with a character in front first.
        for start in starts.clone() {
            if let Some(end) = self.ends_lower(start) {
                return ended(end);
            }
        }
        for start in starts {
            let upper = self.run(start, usize::MAX, |c| c & UPPER != 0);
            if upper > start {
                return ended(self.run(upper, usize::MAX, |c| c & LOWER != 0));
            }
        }
        if class & NUMBER != 0 {
            return self.run(at, digits, |c| c & NUMBER != 0);
        }
        let other = |c| c & (LETTER | NUMBER | SPACE) == 0;
        self.others(at, other, b"\r\n/")
            .unwrap_or_else(|| self.lines(at))
    }

    /// The end of any upper-case letters followed by lower-case ones. Characters without case, such as Chinese, count as both.
    fn ends_lower(&self, start: usize) -> Option<usize> {
        let (mut at, mut both) = (start, None);
        while let Some((class, next)) = self.class(at)
            && class & UPPER != 0
        {
            if class & LOWER != 0 {
                both = Some(next);
            }
            at = next;
        }
        let end = self.run(at, usize::MAX, |c| c & LOWER != 0);
        if end > at { Some(end) } else { both }
    }

    fn deepseek(&self, at: usize) -> Result<usize, usize> {
        let Some((class, next)) = self.class(at) else {
            return Ok(at);
        };
        let byte = self.byte(at).unwrap_or_default();
        if byte.is_ascii_punctuation() {
            let end = self.text.as_bytes()[next..]
                .iter()
                .take_while(|b| b.is_ascii_alphabetic())
                .count();
            if end > 0 {
                return Ok(next + end);
            }
        }
        let letters = |c: u8| c & (LETTER | MARK) != 0;
        if class & (LETTER | PUNCTUATION | SYMBOL) == 0 && !matches!(byte, b'\r' | b'\n') {
            let end = self.run(next, usize::MAX, letters);
            if end > next {
                return Ok(end);
            }
        }
        if letters(class) {
            return Ok(self.run(next, usize::MAX, letters));
        }
        let other = |c| c & (PUNCTUATION | SYMBOL) != 0;
        match self.others(at, other, b"\r\n") {
            Some(end) => Ok(end),
            None if class & SPACE != 0 => Ok(self.lines(at)),
            None => Err(next),
        }
    }

    /// The end of `'s|'t|'re|'ve|'m|'ll|'d`. If case does not matter, the long s is an s too.
    fn contraction(&self, at: usize, any_case: bool) -> Option<usize> {
        if self.byte(at) != Some(b'\'') {
            return None;
        }
        let letter = |at| {
            let b = self.byte(at).unwrap_or_default();
            if any_case { b.to_ascii_lowercase() } else { b }
        };
        match (letter(at + 1), letter(at + 2)) {
            (b's' | b't' | b'm' | b'd', _) => Some(at + 2),
            (b'r' | b'v', b'e') | (b'l', b'l') => Some(at + 3),
            _ if any_case && self.text[at + 1..].starts_with('ſ') => Some(at + 1 + 'ſ'.len_utf8()),
            _ => None,
        }
    }

    /// The end of ` ?X+[tail]*`, X being what `is` accepts.
    fn others(&self, at: usize, is: impl Fn(u8) -> bool, tail: &[u8]) -> Option<usize> {
        let from = at + usize::from(self.byte(at) == Some(b' '));
        let end = self.run(from, usize::MAX, is);
        (end > from).then(|| self.bytes(end, tail))
    }

    /// The end of `\s*[\r\n]+|\s+(?!\S)|\s+`, at a space.
    fn lines(&self, at: usize) -> usize {
        let (mut end, mut line) = (at, None);
        while let Some((class, next)) = self.class(end)
            && class & SPACE != 0
        {
            if matches!(self.byte(end), Some(b'\r' | b'\n')) {
                line = Some(next);
            }
            end = next;
        }
        line.unwrap_or_else(|| self.before_word(at, end))
    }

    /// The end of `\s+(?!\S)|\s+`, at a space.
    fn spaces(&self, at: usize) -> usize {
        let end = self.run(at, usize::MAX, |c| c & SPACE != 0);
        self.before_word(at, end)
    }

    /// The end of the spaces from `at` to `end`, without the last one, which belongs to the word after them; at least one
    /// space.
    fn before_word(&self, at: usize, end: usize) -> usize {
        let last = self.text[at..end].chars().next_back();
        let last = end - last.map_or(0, char::len_utf8);
        if end < self.text.len() && last > at {
            last
        } else {
            end
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ascii_agrees_with_unicode() {
        let classes = Classes::get();
        for b in 0..128u8 {
            assert_eq!(ASCII[b as usize], classes.of(b.into()), "{b}");
        }
    }

    fn cut(pattern: &str, text: &str) -> Vec<String> {
        let mut found = Vec::new();
        let steps = [WordPattern::of(pattern).unwrap()];
        words(text, &steps, &mut |word| found.push(word.to_owned()));
        found
    }

    #[test]
    fn words_are_those_of_the_patterns() {
        // Two characters of each kind that a pattern tells apart, in every order of five.
        let kinds = [
            "a", "S", "ſ", "中", "1", " ", "\n", "\u{a0}", "'", "/", "\u{301}", "\u{1}", "😀", "龥",
        ];
        for (pattern, step) in KNOWN {
            let regex = tokenizers::pre_tokenizers::split::Split::new(
                tokenizers::pre_tokenizers::split::SplitPattern::Regex((*pattern).to_owned()),
                tokenizers::SplitDelimiterBehavior::Isolated,
                false,
            )
            .unwrap();
            let mut number = 0usize;
            while number < kinds.len().pow(5) {
                let mut rest = number;
                let mut text = String::new();
                for _ in 0..5 {
                    text.push_str(kinds[rest % kinds.len()]);
                    rest /= kinds.len();
                }
                number += 37;
                let expected = {
                    use tokenizers::{OffsetReferential, OffsetType, PreTokenizer};
                    let mut pieces = tokenizers::PreTokenizedString::from(&*text);
                    regex.pre_tokenize(&mut pieces).unwrap();
                    let pieces = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
                    let words: Vec<String> = pieces.iter().map(|(w, ..)| (*w).to_owned()).collect();
                    words
                };
                assert_eq!(cut(pattern, &text), expected, "{step:?}: {text:?}");
            }
        }
    }
}
