//! Added tokens: texts that are tokens wherever they occur, found before any other step.

use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};
use serde::{Deserialize, Serialize};

/// An added token as a `tokenizer.json` has it.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(in crate::text) struct AddedToken {
    pub(in crate::text) id: u32,
    pub(in crate::text) content: String,
    pub(in crate::text) single_word: bool,
    pub(in crate::text) lstrip: bool,
    pub(in crate::text) rstrip: bool,
    pub(in crate::text) normalized: bool,
    pub(in crate::text) special: bool,
}

/// A part of a text: an added token, or text that is not encoded yet.
pub(super) type Piece = (Range<usize>, Option<usize>);

/// Added tokens that are searched for together.
pub(super) struct Finder {
    /// None if there are no tokens to search for.
    automaton: Option<AhoCorasick>,
    tokens: Vec<usize>,
}

impl Finder {
    /// Finds `patterns`, each with the number of its token.
    pub(super) fn new(patterns: &[(usize, String)]) -> Option<Finder> {
        let texts = patterns.iter().map(|(_, text)| text);
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(texts)
            .ok()?;
        Some(Finder {
            automaton: (!patterns.is_empty()).then_some(automaton),
            tokens: patterns.iter().map(|(token, _)| *token).collect(),
        })
    }

    /// Splits `text`, which is not empty, at the tokens in it; with `plain`, special ones are ignored.
    pub(super) fn divide(&self, tokens: &[AddedToken], text: &str, plain: bool) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut from = 0;
        let found = self.automaton.iter().flat_map(|a| a.find_iter(text));
        for found in found {
            let number = self.tokens[found.pattern()];
            let token = &tokens[number];
            if plain && token.special {
                continue;
            }
            let (mut start, mut end) = (found.start(), found.end());
            if token.lstrip {
                start = text[..start].trim_end().len().max(from);
            }
            if token.rstrip {
                end = text.len() - text[end..].trim_start().len();
            }
            if from < start {
                pieces.push((from..start, None));
            }
            pieces.push((start..end, Some(number)));
            from = end;
        }
        if from < text.len() {
            pieces.push((from..text.len(), None));
        }
        pieces
    }
}
