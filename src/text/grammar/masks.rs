//! Masks of a parser. Within a text whose rest is limited, such as a string with `maxLength`, most tokens stay inside of it, and which ones
//! follows from the state of the lexer alone. That part of a mask is kept, and does not need to be made again where the state returns.

use std::collections::{HashMap, HashSet};
use std::mem::discriminant;
use std::sync::{Arc, Mutex};

use llguidance::derivre::StateID;
use llguidance::earley::{BiasComputer, ParserRecognizer, SlicedBiasComputer};
use llguidance::toktrie::{Recognizer, SimpleVob, TokTrie};

use crate::base::lock::lock;

/// Masks that a parser keeps, of some 20 kB for 150,000 tokens.
const KEPT: usize = 64;
/// States that are visited to learn that a text stays inside of its lexeme. A string of 30 more characters has six for each of them.
const VISITED: usize = 256;

/// The work of a comparison with a slice at most, as llguidance's own have it.
const FUEL: u64 = 1000;

/// Whether a byte is one of a JSON string's as it is, without an escape. 0xff marks special tokens.
fn is_plain(byte: u8) -> bool {
    !matches!(byte, 0..=0x1f | b'"' | b'\\' | 0x7f | 0xff)
}

/// The tokens of a vocabulary, those of plain bytes apart from the others.
pub(super) struct Divided {
    plain: SimpleVob,
    others: TokTrie,
    /// The slices of the vocabulary that are the plain texts of at most two characters, and of at most thirty.
    short: usize,
    long: usize,
}

impl Divided {
    pub(super) fn new(all: &TokTrie, short: usize, long: usize) -> Divided {
        let mut plain = all.alloc_token_set();
        for token in 0..all.vocab_size() as u32 {
            let bytes = all.token(token);
            if !bytes.is_empty() && bytes.iter().copied().all(is_plain) {
                plain.allow_token(token);
            }
        }
        let others = all.filter(&plain.negated());
        Divided {
            plain,
            others,
            short,
            long,
        }
    }
}

/// Knowledge of the states of one parser's lexer.
#[derive(Default)]
struct Known {
    /// States from which plain bytes lead to no end of a lexeme, so that the parser has no say in them.
    inside: HashSet<StateID>,
    /// States of which this is not known.
    unknown: HashSet<StateID>,
    /// The plain tokens that each state allows.
    masks: HashMap<StateID, SimpleVob>,
}

/// Makes the masks of one parser, whose lexer numbers its states as no other does.
pub(super) struct Masks {
    sliced: Arc<SlicedBiasComputer>,
    tokens: Arc<Divided>,
    known: Mutex<Known>,
}

impl Masks {
    pub(super) fn new(sliced: &Arc<SlicedBiasComputer>, tokens: &Arc<Divided>) -> Masks {
        Masks {
            sliced: sliced.clone(),
            tokens: tokens.clone(),
            known: Mutex::default(),
        }
    }

    /// Whether the state allows all short plain texts, as one within a string does, and not all long ones: those would be one slice.
    fn is_limited(&self, parser: &mut ParserRecognizer<'_>, state: StateID) -> bool {
        let lexer = parser.lexer_mut();
        if !lexer.subsume_possible(state) {
            return false;
        }
        let mut allows = |slice| {
            lexer
                .check_subsume(state, slice, FUEL, None)
                .is_ok_and(|all| all)
        };
        allows(self.tokens.short) && !allows(self.tokens.long)
    }
}

impl BiasComputer for Masks {
    fn compute_bias(&self, parser: &mut ParserRecognizer<'_>, start: &[u8]) -> SimpleVob {
        let state = parser.lexer_state();
        if !start.is_empty() || !parser.lexer_mut().subsume_possible(state) {
            return self.sliced.compute_bias(parser, start);
        }
        let mut known = lock(&self.known);
        if let Some(plain) = known.masks.get(&state) {
            let mut mask = plain.clone();
            self.tokens.others.add_bias(parser, &mut mask, &[]);
            return mask;
        }
        let mask = self.sliced.compute_bias(parser, start);
        if known.masks.len() < KEPT && self.is_limited(parser, state) && known.stays_inside(parser)
        {
            let mut plain = mask.clone();
            plain.and(&self.tokens.plain);
            known.masks.insert(state, plain);
        }
        mask
    }

    fn trie(&self) -> &TokTrie {
        self.sliced.trie()
    }
}

impl Known {
    /// Whether no plain bytes that follow end a lexeme, as far as this can be learnt by visiting a few states.
    fn stays_inside(&mut self, parser: &mut ParserRecognizer<'_>) -> bool {
        let state = parser.lexer_state();
        if self.inside.contains(&state) || self.unknown.contains(&state) {
            return self.inside.contains(&state);
        }
        let mut visited = HashSet::new();
        parser.trie_started("inside");
        let stays = self.visit(parser, &mut visited);
        parser.trie_finished();
        match stays {
            true => self.inside.extend(visited),
            false => {
                self.unknown.insert(state);
            }
        }
        stays
    }

    /// Visits the states that plain bytes lead to. False if one of the bytes ends a lexeme, or there are too many states.
    fn visit(&self, parser: &mut ParserRecognizer<'_>, visited: &mut HashSet<StateID>) -> bool {
        let state = parser.lexer_state();
        if self.inside.contains(&state) || visited.contains(&state) {
            return true;
        }
        if visited.len() == VISITED {
            return false;
        }
        visited.insert(state);
        (0..=u8::MAX).filter(|byte| is_plain(*byte)).all(|byte| {
            let lexer = parser.lexer_mut();
            let next = lexer.advance(state, byte, false, &None);
            if next.is_error() {
                return true;
            }
            // The crate does not name the type of these. A third kind is of special tokens, which no plain byte begins.
            let lexeme = lexer.force_lexeme_end(state);
            if discriminant(&next) == discriminant(&lexeme) || !parser.try_push_byte(byte) {
                return false;
            }
            let stays = self.visit(parser, visited);
            parser.pop_bytes(1);
            stays
        })
    }
}

#[cfg(test)]
mod tests {
    use llguidance::TokenParser;
    use llguidance::api::TopLevelGrammar;
    use serde_json::json;

    use super::super::tests::vocabulary;
    use super::*;

    /// Follows a grammar by random tokens, many times. Each mask is that of llguidance alone. Returns the number of masks kept.
    fn check(grammar: &TopLevelGrammar, what: &str) -> usize {
        let vocabulary = vocabulary();
        let factory = vocabulary.factory();
        let parser = || -> TokenParser {
            let mut parser = factory.create_parser(grammar.clone()).unwrap();
            parser.start_without_prompt();
            parser
        };
        let (mut alone, mut kept) = (parser(), parser());
        let masks = Arc::new(vocabulary.masks());
        kept.bias_computer = masks.clone();
        let mut draws = 0;
        for text in 0..30 {
            for _ in 0..200 {
                if kept.check_stop().unwrap() {
                    assert!(alone.check_stop().unwrap());
                    break;
                }
                let mask = kept.compute_mask().unwrap();
                let want = alone.compute_mask().unwrap();
                assert_eq!(mask.to_list(), want.to_list(), "{what}, text {text}");
                // Few texts end by themselves.
                let ends = factory.tok_env().tok_trie().eos_token();
                let allowed: Vec<u32> = mask.iter().filter(|token| *token != ends).collect();
                if allowed.is_empty() {
                    break;
                }
                draws += 1;
                let draw = crate::format::random::bits(7, draws) as usize % allowed.len();
                kept.consume_token(allowed[draw]).unwrap();
                alone.consume_token(allowed[draw]).unwrap();
            }
            kept.reset().unwrap();
            alone.reset().unwrap();
        }
        lock(&masks.known).masks.len()
    }

    #[test]
    fn kept_masks_are_those_of_the_parser() {
        for (schema, are_kept) in [
            (
                json!({"type": "string", "minLength": 2, "maxLength": 9}),
                true,
            ),
            (
                json!({"type": "array", "items": {"type": "string", "maxLength": 29}}),
                true,
            ),
            (
                json!({"type": "object", "properties": {"a": {"type": "string", "minLength": 5, "maxLength": 12}, "b": {"type": "string", "maxLength": 4}},
                       "required": ["a", "b"], "additionalProperties": {"type": "string", "maxLength": 7}}),
                true,
            ),
            (json!({"type": "string", "maxLength": 40}), true),
            (json!({"type": "string"}), false),
            (
                json!({"type": "string", "pattern": "^(ab|[c-é]{1,3}\"?)+$"}),
                false,
            ),
            (
                json!({"type": "string", "pattern": "^[^\"]{3,8}[0-9]?$"}),
                true,
            ),
            (json!({"enum": ["abc", "abd", 12]}), false),
            (json!({"type": "array", "items": {"type": "number"}}), false),
            (json!({}), false),
        ] {
            let what = schema.to_string();
            let count = check(&TopLevelGrammar::from_json_schema(schema), &what);
            assert_eq!(count > 0, are_kept, "{what}: {count} masks");
        }
    }

    /// Three characters end a lexeme, and which one follows depends on the parser: the token `true` fits before a letter alone.
    #[test]
    fn masks_that_depend_on_the_parser_are_not_kept() {
        let grammar = r#"
            start: (THREE DIGIT THREE LETTER)+
            THREE: /[^"\\\x00-\x1F\x7F]{3}/
            DIGIT: /[0-9]/
            LETTER: /[a-z]/
        "#;
        let grammar = TopLevelGrammar::from_lark(grammar.to_owned());
        assert_eq!(check(&grammar, "threes"), 0);
    }
}
