//! Floor 3: text in and out of tokens. Tokenizers from `tokenizer.json` or from a GGUF vocabulary, chat templates, a
//! detokenizer that never emits half a character, the parts of an answer: reasoning, content, tool calls, and grammars that texts
//! are held to. Knows nothing of models, weights or sessions.

mod answer;
mod bpe;
mod detokenizer;
mod directory;
mod end_names;
mod engine;
#[cfg(feature = "grammar")]
mod grammar;
#[cfg(not(feature = "grammar"))]
#[path = "grammar_absent.rs"]
mod grammar;
mod grammar_source;
mod message;
mod pieces;
mod prompt;
mod special;
mod template;
mod token_role;
mod tokenizer;
mod tool_call;
mod turn_end;
mod vocabulary;

pub use answer::{AnswerForm, AnswerParser, AnswerStage, Event, Reasoning};
pub use detokenizer::Detokenizer;
pub use directory::{TextFiles, read_files};
pub use grammar::{Grammar, GrammarSource, GrammarState, GrammarVocabulary};
pub use message::{
    Content, Message, kind, messages_from_json, messages_from_values, messages_to_json,
    tools_from_json, variables_from_json,
};
pub use prompt::{Aligned, Prompt};
pub use special::{SpecialToken, special_tokens};
pub use template::ChatTemplate;
pub use token_role::TokenRole;
pub use tokenizer::Tokenizer;
pub use tool_call::ToolCall;
pub use turn_end::turn_ends;
pub use vocabulary::{TokenKind, VocabularySpec};

use crate::base::Result;
use crate::base::error::err;

/// `bytes` as text, or an error that names `what` and the offset of the first byte that is not UTF-8.
pub fn utf8<'a>(what: &str, bytes: &'a [u8]) -> Result<&'a str> {
    std::str::from_utf8(bytes).map_err(|e| {
        let at = e.valid_up_to();
        err!(
            InvalidArgument,
            "{what} is not valid UTF-8: byte {at} of {} is 0x{:02x}; pass text encoded as UTF-8",
            bytes.len(),
            bytes[at]
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_utf8_names_the_offset() {
        assert_eq!(utf8("prompt", "naïve".as_bytes()).unwrap(), "naïve");
        let e = utf8("prompt", b"ab\xffcd").unwrap_err();
        assert_eq!(
            e.message(),
            "prompt is not valid UTF-8: byte 2 of 5 is 0xff; pass text encoded as UTF-8"
        );
        let cut = utf8("prompt", &"ab€".as_bytes()[..4]).unwrap_err();
        assert!(cut.message().contains("byte 2 of 4"), "{cut}");
    }
}
