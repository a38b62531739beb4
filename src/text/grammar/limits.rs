//! Limits of compiling and following a grammar.

use llguidance::api::ParserLimits;

use crate::base::alloc::Budget;

/// Multiple of [`grammar_time`](crate::base::env::grammar_time) after which the thread that compiles is given up. The limits of the parser
/// end almost all work long before.
pub(super) const LONGEST: u32 = 20;
/// Most bytes that compiling takes at a time.
pub(super) const MEMORY: usize = Budget::GRAMMAR.bytes();
/// Stack for compiling: a schema may be nested as deeply as JSON is read, by some 5 KB of stack a level.
pub(super) const STACK: usize = 16 << 20;
/// Most bytes of a source: a list of so many short strings takes several times 100 ms.
pub(super) const LONGEST_SOURCE: usize = 256 << 10;
/// Most properties of one object in a schema. The time for optional ones grows with the square of their number; for so many it is several
/// times 100 ms.
pub(super) const MOST_PROPERTIES: usize = 1000;
/// Most parts of a regular expression, with those of what it repeats counted as often.
pub(super) const MOST_PARTS: usize = 100_000;
/// Most rules and groups of a Lark grammar. The compiler follows them into each other, by up to 4 KB of stack for each.
pub(super) const MOST_RULES: usize = 3000;
/// Most threads that were given up, each of which keeps up to [`MEMORY`]. Then no further grammar is compiled.
pub(super) const MOST_GIVEN_UP: usize = 16;

/// Limits in the units of `llguidance`: steps of building and following its automata. They keep compiling within its time and memory, and
/// one step of a text within some 50 ms and [`Budget::GRAMMAR_STEP`], in almost all cases.
pub(super) fn parser() -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: 500_000,
        step_lexer_fuel: 50_000,
        max_grammar_size: 250_000,
        max_lexer_states: 30_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}
