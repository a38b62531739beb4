//! Grammars in a build without the feature `grammar`: none can be made.

use std::convert::Infallible;
use std::sync::Arc;

use super::Tokenizer;
use crate::base::Result;
use crate::base::error::bail;

pub use super::grammar_source::GrammarSource;

/// The vocabulary of grammars. This build has none.
#[derive(Debug)]
pub struct GrammarVocabulary(Infallible);

impl GrammarVocabulary {
    /// Fails: this build has no grammars.
    pub fn new(_: &Arc<Tokenizer>, _: usize, _: &[u32]) -> Result<GrammarVocabulary> {
        bail!(
            Unsupported,
            "this build of the library has no grammars; build it with the feature 'grammar'"
        )
    }

    /// The tokenizer that it was made for.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        match self.0 {}
    }

    /// The id of a mark.
    pub fn mark(&self, _: &str) -> Option<u32> {
        match self.0 {}
    }
}

/// A grammar. This build has none.
#[derive(Debug)]
pub struct Grammar(Infallible);

/// Two grammars are equal if they are one.
impl PartialEq for Grammar {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Grammar {
    /// Compiles `source`.
    pub fn new(vocabulary: &Arc<GrammarVocabulary>, _: GrammarSource<'_>) -> Result<Grammar> {
        match vocabulary.0 {}
    }

    /// The vocabulary that it was compiled for.
    pub fn vocabulary(&self) -> &Arc<GrammarVocabulary> {
        match self.0 {}
    }

    /// The state at the beginning of a text.
    pub fn begin(&self) -> Result<GrammarState> {
        match self.0 {}
    }
}

/// The state of a text that follows a grammar.
#[derive(Debug)]
pub struct GrammarState(Infallible);

impl GrammarState {
    /// The tokens that may come next.
    pub fn mask(&mut self) -> Result<&mut [u32]> {
        match self.0 {}
    }

    /// The tokens that must come next.
    pub fn forced(&mut self) -> Result<Vec<u32>> {
        match self.0 {}
    }

    /// Appends a token.
    pub fn push(&mut self, _: u32) -> Result<()> {
        match self.0 {}
    }

    /// Whether the text may end here.
    pub fn is_accepting(&mut self) -> Result<bool> {
        match self.0 {}
    }

    /// Whether the text fits and nothing can follow it.
    pub fn is_over(&self) -> bool {
        match self.0 {}
    }
}
