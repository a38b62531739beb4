//! GBNF, the grammars of llama.cpp, as what `llguidance` compiles: a regular expression, or a Lark grammar where rules refer to themselves.

mod lower;
mod parse;
#[cfg(test)]
mod tests;

pub(super) use self::lower::{Lowered, lower};
