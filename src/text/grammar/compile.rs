//! Compiles a grammar, on a thread with limits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use llguidance::TokenParser;
use llguidance::api::TopLevelGrammar;
use serde_json::Value;

use super::gbnf::{self, Lowered};
use super::limits::{LONGEST, LONGEST_SOURCE, MEMORY, MOST_GIVEN_UP, MOST_RULES, STACK};
use super::message::{on_regex, one_line};
use super::regex;
use super::schema;
use super::vocabulary::GrammarVocabulary;
use crate::base::alloc::{Budget, foreign};
use crate::base::error::{bail, err};
use crate::base::{Result, env, panics, threads};
use crate::text::grammar_source::GrammarSource;

/// Threads that went beyond their limits.
static GIVEN_UP: AtomicUsize = AtomicUsize::new(0);

/// A source that the thread owns.
enum Owned {
    Schema(String),
    /// A regular expression, also that of choices.
    Regex(TopLevelGrammar),
    Lark(String),
    Gbnf(String),
}

/// The parser of `source` before its first token.
pub(super) fn compile(
    vocabulary: &Arc<GrammarVocabulary>,
    source: GrammarSource<'_>,
) -> Result<TokenParser> {
    compile_within(vocabulary, source, env::grammar_time()?)
}

/// The parser of `source`, compiled in at most the processor time that is `allowed`.
pub(super) fn compile_within(
    vocabulary: &Arc<GrammarVocabulary>,
    source: GrammarSource<'_>,
    allowed: Duration,
) -> Result<TokenParser> {
    let name = source.name();
    check_size(source)?;
    let given_up = GIVEN_UP.load(Ordering::Relaxed);
    if given_up >= MOST_GIVEN_UP {
        bail!(
            Busy,
            "{given_up} grammars of this process went far beyond their limits and still hold memory; no further one is compiled"
        );
    }
    let source = owned(source)?;
    let vocabulary = vocabulary.clone();
    let done = threads::bounded(STACK, MEMORY, allowed * LONGEST, move || {
        foreign(Budget::GRAMMAR, || {
            let built = panics::caught(|| built(&vocabulary, source, allowed));
            let built = built.unwrap_or_else(|panic| Err(err!(Unsupported, "{panic}")));
            Ok((built, threads::processor_time()))
        })
    })?;
    let Some((built, time)) = done else {
        GIVEN_UP.fetch_add(1, Ordering::Relaxed);
        bail!(
            InvalidArgument,
            "the {name} takes more than {} MB of memory, or {} ms of a processor's time, to be compiled; make it smaller",
            MEMORY >> 20,
            (allowed * LONGEST).as_millis()
        );
    };
    if time > allowed {
        bail!(
            InvalidArgument,
            "the {name} takes {} ms of a processor's time to be compiled, and at most {} are allowed; make it smaller",
            time.as_millis(),
            allowed.as_millis()
        );
    }
    built.map_err(|e| e.within(name))
}

fn check_size(source: GrammarSource<'_>) -> Result<()> {
    let bytes = match source {
        GrammarSource::JsonSchema(text)
        | GrammarSource::Regex(text)
        | GrammarSource::Lark(text)
        | GrammarSource::Gbnf(text) => text.len(),
        GrammarSource::Choices(choices) => choices.iter().map(String::len).sum(),
    };
    if bytes > LONGEST_SOURCE {
        bail!(
            InvalidArgument,
            "the {} has {bytes} bytes, and at most {LONGEST_SOURCE} are compiled",
            source.name()
        );
    }
    Ok(())
}

fn owned(source: GrammarSource<'_>) -> Result<Owned> {
    Ok(match source {
        GrammarSource::JsonSchema(text) => Owned::Schema(text.to_owned()),
        GrammarSource::Regex(text) => {
            regex::check(text).map_err(|e| e.within(source.name()))?;
            Owned::Regex(TopLevelGrammar::from_regex(text))
        }
        GrammarSource::Lark(text) => Owned::Lark(text.to_owned()),
        GrammarSource::Gbnf(text) => Owned::Gbnf(text.to_owned()),
        GrammarSource::Choices(choices) => {
            if choices.is_empty() {
                bail!(
                    InvalidArgument,
                    "the list of choices is empty; give at least one"
                );
            }
            if let Some(i) = choices.iter().position(String::is_empty) {
                bail!(
                    InvalidArgument,
                    "choice {i} is empty; a choice has at least one character"
                );
            }
            let quoted: Vec<String> = choices.iter().map(|c| regex_syntax::escape(c)).collect();
            Owned::Regex(TopLevelGrammar::from_regex(&quoted.join("|")))
        }
    })
}

/// A GBNF grammar as one that can be compiled.
fn lowered(text: &str) -> Result<TopLevelGrammar> {
    Ok(match gbnf::lower(text)? {
        Lowered::Regex(text) => {
            regex::check_repetitions(&text)?;
            TopLevelGrammar::from_regex(&text)
        }
        Lowered::Lark(grammar, pieces) => {
            for piece in &pieces {
                regex::check_repetitions(piece)?;
            }
            // Between slashes are regular expressions, which have none.
            let outside: Vec<&str> = grammar.split('/').step_by(2).collect();
            check_rules(&outside.concat())?;
            TopLevelGrammar::from_lark(grammar)
        }
    })
}

/// Refuses a Lark grammar of too many rules. One begins on a line of its own, with its name and a colon; what stands in texts counts too.
fn check_rules(text: &str) -> Result<()> {
    let rules = text.lines().filter(|line| line.contains(':')).count();
    let groups = text.bytes().filter(|b| b"([".contains(b)).count();
    if rules + groups > MOST_RULES {
        bail!(
            InvalidArgument,
            "{rules} rules with {groups} groups, and at most {MOST_RULES} of both are compiled"
        );
    }
    Ok(())
}

fn built(vocabulary: &GrammarVocabulary, source: Owned, allowed: Duration) -> Result<TokenParser> {
    let is_like_gbnf = matches!(&source, Owned::Lark(text) if text.contains("::="));
    // The user has not written the grammar that a message of the compiler has a place in.
    let is_made = matches!(source, Owned::Regex(_) | Owned::Gbnf(_));
    let (grammar, schema) = match source {
        Owned::Regex(grammar) => (grammar, None),
        Owned::Lark(text) => {
            check_rules(&text)?;
            (TopLevelGrammar::from_lark(text), None)
        }
        Owned::Gbnf(text) => (lowered(&text)?, None),
        Owned::Schema(text) => {
            let schema: Value =
                serde_json::from_str(&text).map_err(|e| err!(InvalidArgument, "{e}"))?;
            schema::check(&schema)?;
            drop(text);
            (schema::grammar(schema.clone())?, Some(schema))
        }
    };
    let parser = vocabulary.factory().create_parser(grammar);
    let mut parser = parser.map_err(|e| {
        let mut message = one_line(&format!("{e:#}"));
        if is_like_gbnf {
            message += "; a grammar that defines rules by '::=' is of the kind GBNF";
        }
        let place =
            schema.and_then(|schema| schema::place(vocabulary, &schema, &message, allowed / 2));
        match place {
            Some(place) => err!(InvalidArgument, "{place}: {message}"),
            None if is_made => err!(InvalidArgument, "{}", on_regex(&message)),
            None => err!(InvalidArgument, "{message}"),
        }
    })?;
    parser.start_without_prompt();
    // The first mask shows whether any text fits, and prepares the parser for it.
    let is_over = parser.check_stop().is_ok_and(|is_over| is_over);
    if !is_over && let Err(e) = parser.compute_mask() {
        let message = one_line(&e.to_string());
        if parser.stop_reason().is_ok() {
            bail!(
                InvalidArgument,
                "no text that the model's tokens can form fits it"
            );
        }
        bail!(InvalidArgument, "{message}");
    }
    Ok(parser)
}
