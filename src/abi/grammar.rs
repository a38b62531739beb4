//! Grammars: texts that generations are held to.
//!
//! A grammar is a JSON schema, a regular expression, a Lark or GBNF grammar or a list of choices, compiled once for the tokens of a model. A
//! generation whose options name it gives a text that fits as a whole, unless it ends before the text does: by its length, a full context,
//! a stop string or the caller. Reasoning before the answer of a chat stays free. Grammars never change: any number of generations may
//! follow one at the same time, on any threads.

use std::ffi::c_char;
use std::sync::Arc;

use super::arguments::{Growing, Out, choice, fill, options, text};
use super::guard::{enter, enter_to_free};
use super::handle::{self, Object};
use super::model::NVFP4_Model;
use super::status::NVFP4_Status;
use crate::base::Result;
use crate::base::alloc::{Budget, foreign};
use crate::base::error::err;
use crate::engine::Served;
use crate::text::{Grammar, GrammarSource};

/// A grammar. See the grammar chapter.
pub struct NVFP4_Grammar {
    _private: [u8; 0],
}

impl Object for Grammar {
    type Handle = NVFP4_Grammar;
    const NAME: &'static str = "NVFP4_Grammar";
}

/// A JSON schema, of draft 2020-12 or an earlier one that it names. The text is one line of JSON with a space after each comma and colon.
pub const NVFP4_GRAMMAR_JSON_SCHEMA: i32 = 0;
/// A regular expression that the whole text fits, in the syntax of Rust's crate `regex`, without look-around.
pub const NVFP4_GRAMMAR_REGEX: i32 = 1;
/// A context-free grammar, in the dialect of Lark that `llguidance` reads.
pub const NVFP4_GRAMMAR_LARK: i32 = 2;
/// Texts of which one is generated, as a JSON array of strings.
pub const NVFP4_GRAMMAR_CHOICES: i32 = 3;
/// A context-free grammar in GBNF, as llama.cpp reads it. Its rule `root` is the whole text.
pub const NVFP4_GRAMMAR_GBNF: i32 = 4;

/// Kind of a grammar's source. Fill with NVFP4_grammar_options_init(), then change what is to differ.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_GrammarOptions {
    /// sizeof(NVFP4_GrammarOptions) as the caller knows it.
    pub struct_size: u32,
    /// One of NVFP4_GRAMMAR_*. Default: a JSON schema.
    pub kind: i32,
}

// SAFETY: two integers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_GrammarOptions {
    const NAME: &'static str = "NVFP4_GrammarOptions";
    fn defaults() -> Self {
        NVFP4_GrammarOptions {
            struct_size: size_of::<Self>() as u32,
            kind: NVFP4_GRAMMAR_JSON_SCHEMA,
        }
    }
}

/// The kind of a source, before its text is read.
#[derive(Clone, Copy)]
enum Kind {
    JsonSchema,
    Regex,
    Lark,
    Choices,
    Gbnf,
}

/// Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_GrammarOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_grammar_options_init(
    options: *mut NVFP4_GrammarOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_grammar_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_GrammarOptions::defaults()) }
    })
}

/// Compiles a grammar for a model, which must have a tokenizer. The first one of a model also prepares its vocabulary, which takes up to
/// some seconds for a large one and is kept with the model.
///
/// A grammar that takes more than 100 ms of a processor's time, or what the environment's NVFP4_GRAMMAR_MS allows, or 64 MB of memory to
/// compile is refused, and one that no text fits, as far as that shows. The error of what is not supported names its place: a JSON pointer into the schema, a byte of the regular expression,
/// or a line and column.
///
/// - `options`: the kind of the source. NULL for a JSON schema.
/// - `text`, `length`: the source, in UTF-8. Copied.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_grammar_create(
    model: *const NVFP4_Model,
    options: *const NVFP4_GrammarOptions,
    text: *const c_char,
    length: usize,
    out: *mut *mut NVFP4_Grammar,
) -> NVFP4_Status {
    enter("NVFP4_grammar_create", || {
        // SAFETY: the pointers are as the header asks.
        let (out, options, text) = unsafe {
            (
                Out::new("out", out)?,
                self::options(options)?,
                self::text("text", text, length)?,
            )
        };
        let kind = choice(
            "kind",
            options.kind,
            &[
                (NVFP4_GRAMMAR_JSON_SCHEMA, "JSON schema", Kind::JsonSchema),
                (NVFP4_GRAMMAR_REGEX, "regex", Kind::Regex),
                (NVFP4_GRAMMAR_LARK, "Lark", Kind::Lark),
                (NVFP4_GRAMMAR_CHOICES, "choices", Kind::Choices),
                (NVFP4_GRAMMAR_GBNF, "GBNF", Kind::Gbnf),
            ],
        )?;
        let model = handle::get::<Served>("model", model)?;
        let choices;
        let source = match kind {
            Kind::JsonSchema => GrammarSource::JsonSchema(text),
            Kind::Regex => GrammarSource::Regex(text),
            Kind::Lark => GrammarSource::Lark(text),
            Kind::Gbnf => GrammarSource::Gbnf(text),
            Kind::Choices => {
                choices = strings(text)?;
                GrammarSource::Choices(&choices)
            }
        };
        out.set(handle::insert(Arc::new(model.grammar(source)?)));
        Ok(())
    })
}

/// The strings of a JSON array.
fn strings(text: &str) -> Result<Vec<String>> {
    foreign(Budget::fields(text.len()), || {
        serde_json::from_str(text)
            .map_err(|e| err!(InvalidArgument, "choices are a JSON array of strings: {e}"))
    })
}

/// Adds a reference to a grammar.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_grammar_retain(grammar: *mut NVFP4_Grammar) -> NVFP4_Status {
    enter("NVFP4_grammar_retain", || {
        handle::retain::<Grammar>("grammar", grammar)
    })
}

/// Gives up a reference to a grammar. After the last one the handle is stale; generations that follow the grammar go on.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_grammar_release(grammar: *mut NVFP4_Grammar) -> NVFP4_Status {
    enter_to_free("NVFP4_grammar_release", || {
        handle::release::<Grammar>("grammar", grammar)
    })
}
