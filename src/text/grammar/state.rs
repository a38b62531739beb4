//! A text that follows a grammar, token by token.

use std::convert::Infallible as Never;
use std::sync::{Arc, Mutex};

use llguidance::TokenParser;
use llguidance::api::StopReason;

use super::message::one_line;
use super::vocabulary::GrammarVocabulary;
use crate::base::alloc::{Budget, foreign};
use crate::base::error::{bail, err};
use crate::base::lock::lock;
use crate::base::{Result, panics};

/// Bytes of a parser beside its automaton.
const OWN: usize = 256 << 10;
/// Parsers of ended texts that are kept, and the bytes of the largest automaton among them.
const KEPT: usize = 16;
const LARGEST_KEPT: usize = 4 << 20;

/// The parsers of a grammar at the beginning of a text.
pub(super) struct Beginnings {
    /// Nobody runs it; a state takes a copy.
    first: TokenParser,
    vocabulary: Arc<GrammarVocabulary>,
    /// Parsers of ended texts: their automata have grown and need not grow again.
    kept: Mutex<Vec<TokenParser>>,
}

impl Beginnings {
    pub(super) fn new(first: TokenParser, vocabulary: &Arc<GrammarVocabulary>) -> Beginnings {
        Beginnings {
            first,
            vocabulary: vocabulary.clone(),
            kept: Mutex::default(),
        }
    }

    fn take(&self) -> Result<TokenParser> {
        if let Some(parser) = lock(&self.kept).pop() {
            return Ok(parser);
        }
        let copies = Budget::copies(self.first.parser.lexer_stats().num_bytes + OWN);
        foreign(copies, || {
            let mut parser = self.first.deep_clone();
            parser.bias_computer = Arc::new(self.vocabulary.masks());
            Ok(parser)
        })
    }

    fn give(&self, mut parser: TokenParser) {
        let is_small = parser.parser.lexer_stats().num_bytes <= LARGEST_KEPT;
        let is_reset = || parser.stop_reason().is_ok() && parser.reset().is_ok();
        // A panic leaves a parser that is not kept.
        if is_small && panics::caught(is_reset).is_ok_and(|is_reset| is_reset) {
            let mut kept = lock(&self.kept);
            if kept.len() < KEPT {
                kept.push(parser);
            }
        }
    }
}

/// The state of one text that follows a grammar. After an error it must not be used again.
pub struct GrammarState {
    /// Taken when the state is dropped, or its parser has failed.
    parser: Option<TokenParser>,
    beginnings: Arc<Beginnings>,
    mask: Vec<u32>,
}

impl Drop for GrammarState {
    fn drop(&mut self) {
        if let Some(parser) = self.parser.take() {
            self.beginnings.give(parser);
        }
    }
}

impl GrammarState {
    pub(super) fn new(beginnings: &Arc<Beginnings>) -> Result<GrammarState> {
        Ok(GrammarState {
            parser: Some(beginnings.take()?),
            beginnings: beginnings.clone(),
            mask: Vec::new(),
        })
    }

    /// The tokens that may come next, a bit each: bit `i % 32` of word `i / 32` is that of token `i`. The vocabulary's own ends of a text
    /// are among them where the text may end. The bits are the caller's to change.
    pub fn mask(&mut self) -> Result<&mut [u32]> {
        let mask = self.step(|parser| parser.compute_mask())?;
        self.mask.clear();
        self.mask.extend_from_slice(mask.as_slice());
        Ok(&mut self.mask)
    }

    /// The tokens that must come next, none where there is a choice. They are as [`push`](Self::push) takes them and are not pushed yet.
    pub fn forced(&mut self) -> Result<Vec<u32>> {
        if self.is_over() {
            return Ok(Vec::new());
        }
        self.step(|parser| Ok::<_, Never>(parser.compute_ff_tokens()))
    }

    /// Appends a token that [`mask`](Self::mask) allows, other than an end of the text. Fails for one that does not fit.
    pub fn push(&mut self, token: u32) -> Result<()> {
        self.step(|parser| {
            parser.consume_token(token)?;
            parser.check_stop()
        })?;
        Ok(())
    }

    /// Whether the text may end here.
    pub fn is_accepting(&mut self) -> Result<bool> {
        self.step(|parser| Ok::<_, Never>(parser.is_accepting()))
    }

    /// Whether the text fits and nothing can follow it.
    pub fn is_over(&self) -> bool {
        let parser = self.parser.as_ref();
        parser.is_some_and(|parser| parser.stop_reason() == StopReason::NoExtension)
    }

    fn step<T, E: std::fmt::Display>(
        &mut self,
        run: impl FnOnce(&mut TokenParser) -> std::result::Result<T, E>,
    ) -> Result<T> {
        let Some(mut parser) = self.parser.take() else {
            bail!(
                InvalidArgument,
                "the text has left its grammar; begin another one"
            );
        };
        let done = foreign(Budget::GRAMMAR_STEP, || {
            let run = || run(&mut parser).map_err(|e| format!("{e:#}"));
            Ok(panics::caught(run))
        })?;
        let message = match done {
            Ok(Ok(value)) => {
                self.parser = Some(parser);
                return Ok(value);
            }
            Ok(Err(message)) => message,
            Err(panic) => bail!(Internal, "following a grammar: {panic}"),
        };
        Err(match parser.stop_reason() {
            StopReason::NoExtensionBias => err!(
                InvalidArgument,
                "the grammar allows no token of the vocabulary here, nor the end of the text"
            ),
            _ => err!(Unsupported, "following the grammar: {}", one_line(&message)),
        })
    }
}

impl std::fmt::Debug for GrammarState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tokens = self.parser.as_ref().map(TokenParser::num_tokens);
        write!(f, "GrammarState({tokens:?} tokens)")
    }
}
