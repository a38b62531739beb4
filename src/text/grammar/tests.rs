use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::compile::compile_within;
use super::*;
use crate::base::ErrorKind;
use crate::base::error::expect_kind;
use crate::text::{Tokenizer, VocabularySpec};

/// Texts of two bytes and more that are tokens, each joined from two.
const WORDS: [(&str, &str); 8] = [
    ("{", "\""),
    ("\"", ":"),
    ("\"", ","),
    ("t", "r"),
    ("tr", "ue"),
    ("u", "e"),
    ("a", "b"),
    ("ab", "c"),
];
/// Marks after them, all special but the last, which is an added token.
const MARKS: [&str; 3] = ["<|end|>", "<|other|>", "<think>"];

fn end() -> u32 {
    (256 + WORDS.len()) as u32
}

fn tokenizer() -> Arc<Tokenizer> {
    let mut letters: Vec<(u8, char)> = ('\0'..='\u{1ff}')
        .filter_map(|c| Some((crate::text::pieces::byte_of(c)?, c)))
        .collect();
    letters.sort();
    let mut tokens: Vec<String> = letters.iter().map(|(_, c)| c.to_string()).collect();
    tokens.extend(WORDS.map(|(left, right)| [left, right].concat()));
    tokens.extend(MARKS.map(str::to_owned));
    let mut token_types = vec![1; tokens.len()];
    let last = tokens.len() - 1;
    token_types[last - 2] = 3;
    token_types[last - 1] = 3;
    token_types[last] = 4;
    // A merge may use only tokens that an earlier one has made.
    let mut order = WORDS;
    order.swap(4, 5);
    let merges = order.map(|(left, right)| format!("{left} {right}"));
    let spec = VocabularySpec {
        model: "gpt2".to_owned(),
        pre: "gpt-2".to_owned(),
        tokens,
        token_types,
        merges: merges.to_vec(),
        ..VocabularySpec::default()
    };
    Arc::new(Tokenizer::from_vocabulary(&spec).unwrap())
}

pub(super) fn vocabulary() -> Arc<GrammarVocabulary> {
    Arc::new(GrammarVocabulary::new(&tokenizer(), 1000, &[end()]).unwrap())
}

fn grammar(source: GrammarSource<'_>) -> Result<Grammar> {
    Grammar::new(&vocabulary(), source)
}

fn allows(mask: &[u32], token: u32) -> bool {
    mask[token as usize / 32] >> (token % 32) & 1 == 1
}

/// The bytes of single-byte tokens that may come next, and whether the text may end.
fn next(state: &mut GrammarState) -> (Vec<u8>, bool) {
    if state.is_over() {
        return (Vec::new(), true);
    }
    let mask = state.mask().unwrap();
    let bytes = (0..=255u8).filter(|&b| allows(mask, b.into())).collect();
    let ends = allows(mask, end());
    assert_eq!(state.is_accepting().unwrap(), ends);
    (bytes, ends)
}

/// Whether `text` fits, in its own tokens: where a grammar forces a text, it forces those.
fn fits(grammar: &Grammar, text: &str) -> bool {
    let mut state = grammar.begin().unwrap();
    for token in tokenizer().encode_plain(text).unwrap() {
        if state.is_over() || !allows(state.mask().unwrap(), token) {
            return false;
        }
        state.push(token).unwrap();
    }
    next(&mut state).1
}

#[track_caller]
fn check(source: GrammarSource<'_>, good: &[&str], bad: &[&str]) {
    let grammar = grammar(source).unwrap();
    for text in good {
        assert!(fits(&grammar, text), "{text}");
    }
    for text in bad {
        assert!(!fits(&grammar, text), "{text}");
    }
}

#[test]
fn each_kind_allows_what_fits_it() {
    check(
        GrammarSource::Regex(r"[0-9]{2}(\.é+)?"),
        &["12", "12.é", "12.éé"],
        &["1", "123", "12.", "12.e", ""],
    );
    check(GrammarSource::Regex("^a/b$"), &["a/b"], &["a", "^a/b$"]);
    let choices = ["abc".to_owned(), "ab".to_owned(), "a|b (\"\\".to_owned()];
    check(
        GrammarSource::Choices(&choices),
        &["abc", "ab", "a|b (\"\\"],
        &["a", "b", "abcd", ""],
    );
    check(
        GrammarSource::Lark("start: \"(\" (start | NUMBER) \")\"\nNUMBER: /[0-9]+/"),
        &["(1)", "((23))"],
        &["1", "()", "((1)", "(1))"],
    );
    let schema = json!({
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 3}, "b": {"enum": ["x", null]}},
        "required": ["a"],
        "additionalProperties": false,
    });
    check(
        GrammarSource::JsonSchema(&schema.to_string()),
        &[r#"{"a": 3}"#, r#"{"a": 12, "b": null}"#],
        &[
            r#"{"a": 2}"#,
            r#"{"a":3}"#,
            r#"{"b": "x"}"#,
            "{}",
            r#"{"a": 3, "c": 1}"#,
        ],
    );
    let flexible = json!({"x-guidance": {"whitespace_flexible": true, "key_separator": ":", "item_separator": ","}, "type": "array"});
    check(
        GrammarSource::JsonSchema(&flexible.to_string()),
        &["[1,2]", "[ 1 ,\n2]"],
        &["{}"],
    );
    check(GrammarSource::JsonSchema("true"), &["1", "[null]"], &["x"]);
}

#[test]
fn gbnf_allows_what_llama_cpp_allows() {
    let check_gbnf = |source: &str, good: &[&str], bad: &[&str]| {
        check(GrammarSource::Gbnf(source), good, bad);
    };
    // Regular ones: names, escapes, classes, repetitions, comments, ends of lines.
    check_gbnf(
        "# A list.\nroot  ::= item+ # one or more\n\nitem ::= \"- \" [^\\r\\n\\x0b]+ \"\\n\"\n",
        &["- a\n", "- a/\\\"é\n- b\n"],
        &["", "- \n", "- a", "-a\n"],
    );
    check_gbnf(
        "root ::= (\"yes\" |\n \"no\"\n) [.!\\]\\u00e9-]? tail{2,3}\ntail ::= . | \"\"",
        &["yes", "no.", "yes]..", "noé", "no-\n🦀b"],
        &["yesnoooo", "no!abcd", "ye"],
    );
    check_gbnf(
        "root ::= a{2} b{,2} c{2,}\r\na ::= \"a\"\r\nb ::= [b-d]\nc ::= \"/\"*",
        &["aa", "aabd", "aa//"],
        &["a", "aaa", "aabbb"],
    );
    check_gbnf(
        "root ::= (( [a-c_\\-]\n * ) {1} # As often as wanted.\n [0-9] +? \"!\"{1}{2})",
        &["a-_12!!", "!!"],
        &["a!", "d!!", "1a!!"],
    );
    // A rule may refer to itself at its end, as llama.cpp's white space does.
    check_gbnf(
        "root ::= \"a\" ws \"b\" list\nws ::= ([ \\t] ws)?\nlist ::= \"c\" | \"c,\" list | \"d,\" list",
        &["abc", "a \t bc,d,c"],
        &["a", "abc,", "a\nbc", "abd"],
    );
    // Others are context-free: JSON, and a sum that refers to itself at its beginning.
    let json = r#"
# White space comes before a value and after it.
root    ::= gap any gap
any     ::= record | list | text | figure | "true" | "false" | "null"
record  ::= "{" gap (entry gap ("," gap entry gap)*)? "}"
entry   ::= text gap ":" gap any
list    ::= "[" gap (any gap ("," gap any gap)*)? "]"
text    ::= "\"" letter* "\""
letter  ::= [^"\\\x00-\x1f] | "\\" ([nt"\\] | "u" hex{4})
hex     ::= [0-9a-fA-F]
figure  ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+-]? [0-9]+)?
gap     ::= [ \t\n]*
"#;
    check_gbnf(
        json,
        &[
            "{}",
            "{ \"a\": [1, -2.5e-3, [] ], \"b\\u00e9\":{\"c\":\ntrue}} ",
            r#"{"a": [null,"é"]}"#,
            " 0",
        ],
        &["", "{\"a\"}", "{\"a\": 01}", "{\"a\": [1,]}", "{} }"],
    );
    check_gbnf(
        "root ::= root [-+] term | term\nterm ::= [0-9]+ | \"(\" root \")\"",
        &["1", "1+23-4", "(1+(2))-3"],
        &["", "1+", "(1", "1)", "()"],
    );
    check_gbnf(
        "root ::= (\"<\" root{1,2} \">\")? \"x\" more?\nmore ::= root \"y\"",
        &["x", "<x>x", "<xx>xxy", "<<x>x>x"],
        &["<>x", "xy", "<xxx>x"],
    );
}

#[test]
fn wrong_gbnf_is_refused_with_its_place() {
    const MANY_STARS: &str = "root ::= \"a\" *****************************************************";
    let refused = |source, words| expect_kind(grammar(source), ErrorKind::InvalidArgument, words);
    for (source, words) in [
        ("", "no rule is named 'root'"),
        ("a ::= \"b\"", "no rule is named 'root'"),
        (
            "root ::= \"a\"\n  other",
            "line 2, column 8: '::=' is expected after the name 'other'",
        ),
        (
            "root ::= a b\na ::= \"x\"",
            "line 1, column 12: rule 'b' is not defined",
        ),
        (
            "root ::= \"a\"\nroot ::= \"b\"",
            "line 2, column 1: rule 'root' is defined a second time",
        ),
        ("root ::= \"a", "line 1, column 10: this literal has no end"),
        ("root ::= é\"", "line 1, column 10: a literal, a class"),
        ("root ::= [a", "line 1, column 10: this class has no end"),
        ("root ::= []", "this class has no character"),
        (
            "root ::= [z-a]",
            "line 1, column 13: a range from 'z' to 'a' has no character",
        ),
        (
            "root ::= (\"a\"",
            "line 1, column 10: this group has no end",
        ),
        ("root ::= (\"a\" ]", "or ')' is expected"),
        (
            "root ::= \"a\"{2",
            "line 1, column 13: a repetition is written {3}",
        ),
        ("root ::= \"a\"{3,2}", "a repetition is written {3}"),
        ("root ::= \"\\q\"", "line 1, column 11: '\\q' is no escape"),
        (
            "root ::= \"\\ud800\"",
            "4 hexadecimal digits of a character",
        ),
        ("root ::= \"\\x4\"", "2 hexadecimal digits"),
        ("root ::= [^]", "this class has no character"),
        (MANY_STARS, "more than 50 operators"),
        (
            "root ::= <think>",
            "line 1, column 10: tokens of a model are not supported",
        ),
        ("root ::= \"a\" %", "line 1, column 14: a literal"),
        ("root ::= \"a\"{100000000}", "repetitions make"),
    ] {
        refused(GrammarSource::Gbnf(source), words);
    }
    let deep = format!("root ::= {}\"a\"{}", "(".repeat(51), ")".repeat(51));
    refused(GrammarSource::Gbnf(&deep), "more than 50 groups");
    // Each rule has the last one twice in it.
    let wide: String = (0..40)
        .map(|i| format!("r{i} ::= r{} r{}\n", i + 1, i + 1))
        .collect();
    let wide = format!("root ::= r0\n{wide}r40 ::= \"a\"");
    refused(
        GrammarSource::Gbnf(&wide),
        "a regular expression of more than 262144 bytes",
    );
    // Each alternative has what is before the group in it.
    let before = "a".repeat(20 << 10);
    let group: String = (0..400).map(|i| format!("| \"{i}\" ")).collect();
    let copied = format!("root ::= \"{before}\" (root {group})");
    refused(
        GrammarSource::Gbnf(&copied),
        "a regular expression of more than",
    );
    // GBNF that is given as Lark.
    refused(GrammarSource::Lark("root ::= \"a\""), "kind GBNF");
}

#[test]
fn forced_tokens_are_those_of_masks() {
    let schema = json!({
        "type": "object",
        "properties": {"abc": {"const": true}, "ab": {"type": "boolean"}},
        "required": ["abc", "ab"],
        "additionalProperties": false,
    });
    let grammar = grammar(GrammarSource::JsonSchema(&schema.to_string())).unwrap();
    let mut state = grammar.begin().unwrap();
    let forced = state.forced().unwrap();
    let text = tokenizer().decode(&forced, false).unwrap();
    assert!(text.starts_with("{\"abc\": true, \"ab\":"), "{text}");
    assert!(forced.len() < text.len());
    let mut stepped = grammar.begin().unwrap();
    for &token in &forced {
        let mask = stepped.mask().unwrap();
        let ones: u32 = mask.iter().map(|word| word.count_ones()).sum();
        assert!(ones == 1 && allows(mask, token));
        stepped.push(token).unwrap();
        state.push(token).unwrap();
    }
    assert_eq!(next(&mut stepped), next(&mut state));
}

#[test]
fn special_tokens_and_ends_are_no_text() {
    let grammar = grammar(GrammarSource::Regex("(?s).*")).unwrap();
    let mut state = grammar.begin().unwrap();
    let mask = state.mask().unwrap();
    assert!(allows(mask, end()) && !allows(mask, end() + 1) && !allows(mask, end() + 2));
    // Text that spells a special token is made of others.
    let spelled = ["<|end|> <|other|>".to_owned()];
    check(
        GrammarSource::Choices(&spelled),
        &["<|end|> <|other|>"],
        &[],
    );
    let mut state = super::tests::grammar(GrammarSource::Choices(&spelled))
        .unwrap()
        .begin()
        .unwrap();
    let forced = state.forced().unwrap();
    assert_eq!(tokenizer().decode(&forced, false).unwrap(), spelled[0]);
    assert!(forced.iter().all(|&token| token < end()));
    // A Lark grammar may ask for one.
    let marked =
        super::tests::grammar(GrammarSource::Lark("start: \"a\" <|other|> <think>")).unwrap();
    let mut state = marked.begin().unwrap();
    for token in [u32::from(b'a'), end() + 1, end() + 2] {
        assert!(allows(state.mask().unwrap(), token));
        state.push(token).unwrap();
    }
    assert!(state.is_over());
}

#[test]
fn ids_without_a_row_never_come() {
    let rows = 256 + WORDS.len() - 1;
    let vocabulary = GrammarVocabulary::new(&tokenizer(), rows, &[end()]).unwrap();
    let source = GrammarSource::Choices(&["abc".to_owned()]);
    let grammar = Grammar::new(&Arc::new(vocabulary), source).unwrap();
    let mut state = grammar.begin().unwrap();
    for token in [262, u32::from(b'c')] {
        assert!(state.mask().unwrap().len() <= rows.div_ceil(32) + 1);
        state.push(token).unwrap();
    }
    assert!(state.is_over());
}

#[test]
fn what_is_refused_is_named_with_its_place() {
    let schema = |schema: serde_json::Value| schema.to_string();
    let refused = |source: GrammarSource<'_>, words: &str| {
        expect_kind(grammar(source), ErrorKind::InvalidArgument, words);
    };
    for (schema, words) in [
        (
            "{\"type\":".to_owned(),
            "JSON schema: EOF while parsing a value at line 1 column 8",
        ),
        ("3".to_owned(), "an object or a boolean, not 3"),
        ("false".to_owned(), "no value fits"),
        (
            schema(
                json!({"type": "object", "properties": {"a/b": {"items": {"not": {"type": "null"}}}}}),
            ),
            "JSON schema: /properties/a~1b/items: Unimplemented keys: [\"not\"]",
        ),
        (
            schema(
                json!({"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"type": "null"}, {"type": "strin"}]}}}),
            ),
            "JSON schema: /$defs/x/anyOf/1: ",
        ),
        (
            schema(json!({"type": "integer", "minimum": 5, "maximum": 3})),
            "Unsatisfiable schema: minimum (5) is greater than maximum (3)",
        ),
        (
            schema(json!({"allOf": [{"type": "string"}, {"type": "null"}]})),
            "Unsatisfiable schema: incompatible types",
        ),
        (
            schema(json!({"items": {"$ref": "http://x/y"}})),
            "JSON schema: /items: Only absolute $ref's (#/...) are supported; ref 'http://x/y'",
        ),
        (
            schema(json!({"x-guidance": 3})),
            "/x-guidance: 3 is not an object",
        ),
    ] {
        refused(GrammarSource::JsonSchema(&schema), words);
    }
    for (regex, words) in [
        ("a(b", "regular expression: byte 1: unclosed group"),
        (
            r"a\b",
            "regular expression: lookarounds not supported yet; WordUnicode",
        ),
        (
            r"[^\s\S]",
            "no text that the model's tokens can form fits it",
        ),
    ] {
        refused(GrammarSource::Regex(regex), words);
    }
    for (lark, words) in [
        ("start: x\nx: y", "Lark grammar: at 2("),
        ("begin: \"a\"", "Lark grammar: "),
        ("start: <|none|>", "unknown special token"),
        ("start: start", "Lark grammar: "),
    ] {
        refused(GrammarSource::Lark(lark), words);
    }
    refused(GrammarSource::Choices(&[]), "give at least one");
    refused(
        GrammarSource::Choices(&["a".to_owned(), String::new()]),
        "choice 1 is empty",
    );
}

#[test]
fn compiling_is_limited() {
    let refused = |source: GrammarSource<'_>, words: &str| {
        expect_kind(grammar(source), ErrorKind::InvalidArgument, words);
    };
    let long = "x".repeat((256 << 10) + 1);
    refused(GrammarSource::Regex(&long), "262145 bytes");
    let many: Vec<String> = (0..20_000).map(|i| format!("{:x}", i * 7_919)).collect();
    let many = json!({ "enum": many }).to_string();
    // Fast processors keep the limit of 100 ms with as long a source as is taken.
    let short = Duration::from_millis(20);
    expect_kind(
        compile_within(&vocabulary(), GrammarSource::JsonSchema(&many), short),
        ErrorKind::InvalidArgument,
        "of a processor's time",
    );
    let repeated = "((a{500}b){500}c){500}";
    refused(GrammarSource::Regex(repeated), "125250500 parts");
    let pattern = json!({"items": {"pattern": repeated}}).to_string();
    refused(GrammarSource::JsonSchema(&pattern), "/items: pattern '((a");
    let wide: serde_json::Map<String, serde_json::Value> =
        (0..1001).map(|i| (format!("p{i}"), json!({}))).collect();
    let wide = json!({"anyOf": [{"properties": wide}]}).to_string();
    refused(
        GrammarSource::JsonSchema(&wide),
        "/anyOf/0/properties: an object of 1001 properties",
    );
    // Rules that lead into each other take stack.
    let chain: String = (0..8000)
        .map(|i| format!("r{i}: \"a\" r{} | r0 \"x\"\n", i + 1))
        .collect();
    let chain = format!("start: r0\n{chain}r8000: \"b\"");
    refused(
        GrammarSource::Lark(&chain),
        "8002 rules with 0 groups, and at most 3000",
    );
    let deep = format!("{}true{}", "{\"items\":".repeat(200), "}".repeat(200));
    refused(GrammarSource::JsonSchema(&deep), "recursion limit exceeded");
}

#[test]
fn states_that_have_ended_serve_again() {
    let grammar = grammar(GrammarSource::Regex("[a-c]{1,3}")).unwrap();
    for text in ["a", "abc", "cb", ""] {
        let mut state = grammar.begin().unwrap();
        for (i, byte) in text.bytes().enumerate() {
            assert_eq!(next(&mut state), (b"abc".to_vec(), i > 0));
            state.push(byte.into()).unwrap();
        }
    }
    // One that has failed does not.
    let mut state = grammar.begin().unwrap();
    state.push(b'z'.into()).unwrap_err();
    let e = state.push(b'a'.into()).unwrap_err();
    assert!(e.message().contains("has left its grammar"), "{e}");
    assert_eq!(
        next(&mut grammar.begin().unwrap()),
        (b"abc".to_vec(), false)
    );
}

#[test]
fn a_token_that_does_not_fit_is_an_error() {
    let grammar = grammar(GrammarSource::Regex("ab")).unwrap();
    for token in [u32::from(b'b'), end(), end() + 1, 1000] {
        let mut state = grammar.begin().unwrap();
        let e = state.push(token).unwrap_err();
        assert!(e.message().starts_with("following the grammar: "), "{e}");
    }
}

#[test]
fn states_are_independent() {
    let grammar = Arc::new(grammar(GrammarSource::Regex("[a-c]{1,40}")).unwrap());
    std::thread::scope(|scope| {
        for byte in b'a'..=b'c' {
            let grammar = grammar.clone();
            scope.spawn(move || {
                let mut state = grammar.begin().unwrap();
                for i in 0..40 {
                    let (bytes, ends) = next(&mut state);
                    assert_eq!((bytes, ends), (b"abc".to_vec(), i > 0));
                    state.push(byte.into()).unwrap();
                }
                assert!(state.is_over());
            });
        }
    });
}
