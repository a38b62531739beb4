//! The vocabulary as grammars see it: the bytes of each token, in a tree.

use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv,
};

use super::limits;
use super::masks::{Divided, Masks};
use super::message::one_line;
use crate::base::alloc::{Budget, foreign};
use crate::base::error::err;
use crate::base::{Result, panics};
use crate::text::Tokenizer;

/// A tokenizer's tokens for grammars, built once for all grammars of a model. Takes some 70 MB for 150,000 tokens, and a second to build.
pub struct GrammarVocabulary {
    tokenizer: Arc<Tokenizer>,
    factory: ParserFactory,
    divided: Arc<Divided>,
    tokens: usize,
}

impl GrammarVocabulary {
    /// The tokens of a model whose embedding has `rows` rows and whose text `stops` end. Stops and marks, such as special tokens, are no text.
    pub fn new(
        tokenizer: &Arc<Tokenizer>,
        rows: usize,
        stops: &[u32],
    ) -> Result<GrammarVocabulary> {
        let tokens = tokenizer.vocab_size().min(rows);
        let bytes = (0..tokens).filter_map(|id| tokenizer.bytes_of(id as u32).ok());
        let budget = Budget::vocabulary(bytes.map(<[u8]>::len).sum(), tokens);
        let made = || made(tokenizer, tokens, stops);
        let made = foreign(budget, || Ok(panics::caught(made)))?;
        let (factory, divided) = made.and_then(|made| made).map_err(|e| {
            err!(
                Unsupported,
                "grammars cannot use the model's vocabulary: {}",
                one_line(&e)
            )
        })?;
        Ok(GrammarVocabulary {
            tokenizer: tokenizer.clone(),
            factory,
            divided: Arc::new(divided),
            tokens,
        })
    }

    /// The tokenizer that it was made for.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The id of a mark by its name, if the tokenizer has it as one token that is no text.
    pub fn mark(&self, name: &str) -> Option<u32> {
        let id = self.tokenizer.id_of(name)?;
        let trie = self.factory.tok_env().tok_trie();
        trie.is_special_token(id).then_some(id)
    }

    /// Makes parsers.
    pub(super) fn factory(&self) -> &ParserFactory {
        &self.factory
    }

    /// A maker of masks, for one parser.
    pub(super) fn masks(&self) -> Masks {
        Masks::new(&self.factory.slicer(), &self.divided)
    }
}

impl std::fmt::Debug for GrammarVocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GrammarVocabulary({} tokens)", self.tokens)
    }
}

fn made(
    tokenizer: &Arc<Tokenizer>,
    tokens: usize,
    stops: &[u32],
) -> std::result::Result<(ParserFactory, Divided), String> {
    let is_row = |&id: &u32| (id as usize) < tokens;
    let stops: Vec<u32> = stops.iter().copied().filter(is_row).collect();
    let words: Vec<Vec<u8>> = (0..tokens as u32)
        .map(|id| word(tokenizer, id, stops.contains(&id)))
        .collect();
    let end = stops.first().copied().unwrap_or(INVALID_TOKEN);
    let mut trie = TokTrie::from(&TokRxInfo::new(tokens as u32, end), &words);
    if !stops.is_empty() {
        trie = trie.with_eos_tokens(&stops);
    }
    let tokenizer = tokenizer.clone();
    let environment: TokEnv = Arc::new(Environment { trie, tokenizer });
    let slices = slices();
    let slice_of = |most: usize| {
        let found = slices.iter().position(|slice| *slice == plain(most));
        found.ok_or_else(|| format!("the vocabulary has no slice of {most} characters"))
    };
    let divided = Divided::new(environment.tok_trie(), slice_of(2)?, slice_of(30)?);
    let capabilities = InferenceCapabilities::default();
    let mut factory =
        ParserFactory::new(&environment, capabilities, &slices).map_err(|e| format!("{e:#}"))?;
    factory.quiet();
    *factory.limits_mut() = limits::parser();
    Ok((factory, divided))
}

/// Regular expressions that split the vocabulary: where a grammar allows all texts of one of them, the mask of its tokens is known. The lengths
/// are those of strings whose rest is limited by `maxLength`: with a few short ones such masks take two thirds of the time.
fn slices() -> Vec<String> {
    let mut slices = SlicedBiasComputer::json_slices();
    slices.extend([2, 4, 6, 8, 14].map(plain));
    slices
}

/// The texts of up to `most` characters that a JSON string has as they are.
fn plain(most: usize) -> String {
    format!(r#"[^"\\\x00-\x1F\x7F]{{1,{most}}}"#)
}

/// The bytes by which a grammar knows a token; none for a token that it never allows.
fn word(tokenizer: &Tokenizer, id: u32, is_stop: bool) -> Vec<u8> {
    let marker = TokTrie::SPECIAL_TOKEN_MARKER;
    match tokenizer.bytes_of(id) {
        Ok(bytes) if is_stop || tokenizer.is_mark(id) => [&[marker], bytes].concat(),
        // A single byte of this value is a token of most vocabularies. More of them begin no character.
        Ok(bytes) if bytes.first() != Some(&marker) || bytes.len() == 1 => bytes.to_vec(),
        _ => Vec::new(),
    }
}

/// Tokens of the bytes that a grammar forces.
struct Environment {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let text = std::str::from_utf8(bytes).ok();
        let tokens = text.and_then(|text| self.tokenizer.encode_own(text));
        // A tokenizer may change a text, and finds tokens that are no text here.
        let is_same = |tokens: &Vec<u32>| self.trie.decode_raw(tokens) == bytes;
        let tokens = tokens.filter(is_same);
        tokens.unwrap_or_else(|| self.trie.greedy_tokenize(bytes))
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.tokenizer.has_own_encoder()
    }
}
