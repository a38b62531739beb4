//! Grammars: the texts that a generation may have, as a JSON schema, a regular expression, a Lark or GBNF grammar or a list of choices. A grammar is
//! compiled once for a vocabulary; each generation follows it in a state of its own, which says which tokens may come next. The crate
//! `llguidance` does the work, within limits of time and memory.

mod compile;
mod gbnf;
mod limits;
mod masks;
mod message;
mod regex;
mod schema;
mod state;
mod vocabulary;

use std::sync::Arc;

use crate::base::Result;

use self::state::Beginnings;

pub use self::state::GrammarState;
pub use self::vocabulary::GrammarVocabulary;
pub use super::grammar_source::GrammarSource;

/// A compiled grammar: immutable, and usable from several threads at once.
pub struct Grammar {
    vocabulary: Arc<GrammarVocabulary>,
    beginnings: Arc<Beginnings>,
}

/// Two grammars are equal if they are one.
impl PartialEq for Grammar {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Grammar {
    /// Compiles `source` for a vocabulary.
    ///
    /// Fails if that takes more than 100 ms of a processor's time or 64 MB of memory, if no text fits the source, as far as that shows
    /// at the beginning, and if the source has what is not supported, which the error names with its place.
    pub fn new(vocabulary: &Arc<GrammarVocabulary>, source: GrammarSource<'_>) -> Result<Grammar> {
        Ok(Grammar {
            beginnings: Arc::new(Beginnings::new(
                compile::compile(vocabulary, source)?,
                vocabulary,
            )),
            vocabulary: vocabulary.clone(),
        })
    }

    /// The vocabulary that it was compiled for.
    pub fn vocabulary(&self) -> &Arc<GrammarVocabulary> {
        &self.vocabulary
    }

    /// The state at the beginning of a text.
    pub fn begin(&self) -> Result<GrammarState> {
        GrammarState::new(&self.beginnings)
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grammar({:?})", self.vocabulary)
    }
}

#[cfg(test)]
mod tests;
