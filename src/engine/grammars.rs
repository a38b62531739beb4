//! Cache of a served model for grammars: its vocabulary, and the grammars of the tool calls that were used last.

use std::any::Any;
use std::sync::{Arc, Mutex};

use crate::base::Result;
use crate::base::lock::lock;
use crate::base::once::TryOnce;
use crate::text::{Grammar, GrammarSource, GrammarVocabulary, Tokenizer};

/// Grammars of tool calls that are kept.
const KEPT: usize = 16;

/// The grammars of a model.
#[derive(Default)]
pub(super) struct Grammars {
    vocabulary: TryOnce<Arc<GrammarVocabulary>>,
    /// Grammars of tool calls with their sources, the last one used at the end.
    calls: Mutex<Vec<(String, Arc<Grammar>)>>,
}

impl Grammars {
    /// Takes the locks of the cache until the result is dropped.
    pub(super) fn locked(&'static self) -> Box<dyn Any> {
        Box::new((self.vocabulary.locked(), lock(&self.calls)))
    }

    /// The vocabulary of a model with this tokenizer, rows of the embedding and stop tokens.
    pub(super) fn vocabulary(
        &self,
        tokenizer: &Arc<Tokenizer>,
        rows: usize,
        stops: &[u32],
    ) -> Result<&Arc<GrammarVocabulary>> {
        let make = || GrammarVocabulary::new(tokenizer, rows, stops).map(Arc::new);
        self.vocabulary.get_or_try(make)
    }

    /// The grammar of tool calls whose source is `lark`, compiled unless it is kept.
    pub(super) fn of_calls(
        &self,
        vocabulary: &Arc<GrammarVocabulary>,
        lark: String,
    ) -> Result<Arc<Grammar>> {
        let mut calls = lock(&self.calls);
        if let Some(at) = calls.iter().position(|(source, _)| *source == lark) {
            let found = calls.remove(at);
            calls.push(found.clone());
            return Ok(found.1);
        }
        drop(calls);
        let grammar = Grammar::new(vocabulary, GrammarSource::Lark(&lark));
        let grammar = Arc::new(grammar.map_err(|e| e.within("the schemas of the tools"))?);
        let mut calls = lock(&self.calls);
        if calls.len() == KEPT {
            calls.remove(0);
        }
        calls.push((lark, grammar.clone()));
        Ok(grammar)
    }
}
