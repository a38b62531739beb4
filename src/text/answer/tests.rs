//! Tests of behaviour that all forms share, and test helpers.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::form::AnswerForm;
use super::parser::{AnswerParser, Event};
use super::section::ToolCallForm;
use super::{deepseek, gemma, glm, json, llama, mistral, python, xml};
use crate::base::env;
use crate::text::ToolCall;

static ALL: [&dyn ToolCallForm; 16] = [
    &deepseek::PLAIN,
    &gemma::FUNCTION_GEMMA,
    &gemma::GEMMA4,
    &glm::Glm,
    &json::HERMES,
    &json::GRANITE,
    &json::PHI,
    &json::COMMAND,
    &json::NEMOTRON,
    &llama::Llama,
    &mistral::LIST,
    &python::LFM2,
    &python::TOOL_CODE,
    &xml::QWEN_CODER,
    &xml::SEED,
    &xml::MINIMAX,
];

pub(super) fn content(text: &str) -> Event {
    Event::Content(text.to_owned())
}

pub(super) fn reasoning(text: &str) -> Event {
    Event::Reasoning(text.to_owned())
}

pub(super) fn call(number: usize, name: &str, arguments: &str) -> Event {
    Event::ToolCall(ToolCall {
        id: format!("call{number:05}"),
        name: name.to_owned(),
        arguments: serde_json::from_str(arguments).unwrap(),
    })
}

/// Appends `more` to `events`, joining pieces of the same text.
fn join(events: &mut Vec<Event>, more: Vec<Event>) {
    for event in more {
        match (events.last_mut(), event) {
            (Some(Event::Content(last)), Event::Content(text))
            | (Some(Event::Reasoning(last)), Event::Reasoning(text)) => last.push_str(&text),
            (_, event) => events.push(event),
        }
    }
}

/// The events of an answer that comes in `pieces`.
fn run<'a>(
    mut parser: AnswerParser,
    pieces: impl IntoIterator<Item = &'a str>,
    whole: bool,
) -> Vec<Event> {
    let mut events = Vec::new();
    for piece in pieces {
        join(&mut events, parser.push(piece));
    }
    join(&mut events, parser.finish(whole));
    events
}

fn characters(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive(|_: char| true)
}

/// The events of a whole answer in `form`, which are the same at once and character by character.
pub(super) fn parsed(form: &'static dyn ToolCallForm, answer: &str) -> Vec<Event> {
    both_ways(|| AnswerParser::with(None, Some(form), 0), answer, true)
}

/// The events of an answer, which are the same at once and character by character.
pub(super) fn both_ways(
    parser: impl Fn() -> AnswerParser,
    answer: &str,
    whole: bool,
) -> Vec<Event> {
    let events = run(parser(), [answer], whole);
    assert_eq!(run(parser(), characters(answer), whole), events);
    events
}

fn qwen3() -> AnswerForm {
    let template =
        "{% if tools %}<tool_call>\n{\"name\": {% endif %}{{ content.split('</think>') }}";
    AnswerForm::of(template, true, |token| {
        token.contains("think") || token.contains("tool_call")
    })
}

/// Qwen3's reasoning with calls in `form`.
fn in_form(form: &'static dyn ToolCallForm) -> AnswerForm {
    let mut answer = qwen3();
    answer.calls = Some(form);
    answer
}

/// The events of an answer of Qwen3 after `prompt`.
fn answered(prompt: &str, answer: &str, whole: bool) -> Vec<Event> {
    both_ways(
        || AnswerParser::new(&qwen3(), prompt, true, 0),
        answer,
        whole,
    )
}

#[test]
fn reasoning_and_its_edges() {
    let events = [reasoning("I\n\nthink"), content("So.\n")];
    let answer = "\n\n<think>\n\nI\n\nthink\n\n</think>\n\nSo.\n";
    assert_eq!(answered("assistant\n", answer, true), events);
    let answer = "I\n\nthink\n</think>\n\nSo.\n";
    assert_eq!(answered("assistant\n<think>\n", answer, true), events);
    let answer = "a </think> b";
    assert_eq!(
        answered("<think>\n\n</think>\n\n", answer, true),
        [content(answer)]
    );
    let call_after = "<think>\n</think>\n\n<tool_call>{\"name\": \"f\"}</tool_call>";
    assert_eq!(answered("", call_after, true), [call(0, "f", "{}")]);
}

#[test]
fn without_reasoning() {
    for answer in ["Hi <think> there", " <thin", "\n\n", "\nHi"] {
        assert_eq!(answered("", answer, true), [content(answer)]);
    }
    let none = AnswerForm::of("", false, |_| false);
    let parser = AnswerParser::new(&none, "<think>", true, 0);
    assert_eq!(run(parser, ["<think>a "], true), [content("<think>a ")]);
}

#[test]
fn a_cut_answer() {
    for answer in ["ab\n\n", "ab\n</thi", "ab <tool_call>"] {
        assert_eq!(answered("<think>", answer, false), [reasoning(answer)]);
    }
    let one = "<tool_call>{\"name\": \"f\"}</tool_call>";
    assert_eq!(
        answered("", "Yes \n<tool_call>{\"na", false),
        [content("Yes")]
    );
    assert_eq!(
        answered("", &format!("{one}\n<tool_call>{{\"na"), false),
        [call(0, "f", "{}")]
    );
    assert_eq!(answered("", "Yes <tool_c", false), [content("Yes <tool_c")]);
}

#[test]
fn calls_come_at_once_and_nothing_of_them_before() {
    let mut parser = AnswerParser::new(&qwen3(), "", true, 41);
    assert_eq!(parser.push("Hm. "), [content("Hm.")]);
    assert!(!parser.is_reasoning());
    for piece in [
        "<tool",
        "_call>\n{\"name\"",
        ": \"f\", \"arguments\": {\"a\": \"}\"",
    ] {
        assert_eq!(parser.push(piece), []);
    }
    assert_eq!(parser.push("}}"), [call(41, "f", r#"{"a": "}"}"#)]);
    assert_eq!(parser.push("\n</tool_call>\n"), []);
    assert_eq!(parser.push("\nDone"), [content("Done")]);
    assert_eq!(parser.finish(true), []);
}

#[test]
fn is_reasoning_follows_the_marks() {
    let mut parser = AnswerParser::new(&qwen3(), "", true, 0);
    assert!(!parser.is_reasoning());
    parser.push("<think>");
    assert!(parser.is_reasoning());
    parser.push("a</think>");
    assert!(!parser.is_reasoning());
}

#[test]
fn without_tools_all_is_content() {
    let answer = "<tool_call>{\"name\": \"f\"}</tool_call> ";
    let parser = AnswerParser::new(&qwen3(), "", false, 0);
    assert_eq!(run(parser, characters(answer), true), [content(answer)]);
}

#[test]
fn ids_have_nine_characters() {
    let mut parser = AnswerParser::new(&qwen3(), "", true, 99_999);
    let one = "<tool_call>{\"name\": \"f\"}</tool_call>";
    let events = parser.push(&one.repeat(2));
    assert_eq!(events, [call(99_999, "f", "{}"), call(0, "f", "{}")]);
}

#[test]
fn tokens_that_are_shown() {
    let marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"];
    assert_eq!(qwen3().shown_tokens(), marks);
}

/// Time for an answer in `form` that arrives in pieces of `step` bytes.
fn time(form: &'static dyn ToolCallForm, prompt: &str, answer: &str, step: usize) -> Duration {
    let mut parser = AnswerParser::new(&in_form(form), prompt, true, 0);
    let begin = Instant::now();
    for piece in answer.as_bytes().chunks(step) {
        parser.push(std::str::from_utf8(piece).unwrap());
    }
    parser.finish(true);
    begin.elapsed()
}

#[test]
fn a_long_answer_byte_by_byte() {
    const LONG: usize = 1 << 20;
    let written = format!(
        "<tool_call>{{\"name\": \"write\", \"arguments\": {{\"text\": \"{}\"}}}}</tool_call>",
        "a ".repeat(LONG / 2)
    );
    for (prompt, answer) in [
        ("<think>", "so ".repeat(LONG / 3)),
        ("<think>", "\n".repeat(LONG)),
        ("", "so ".repeat(LONG / 3)),
        ("", " ".repeat(LONG)),
        ("", written),
    ] {
        let taken = time(&json::HERMES, prompt, &answer, 1);
        assert!(
            taken < Duration::from_secs(1),
            "{taken:?}: {:?}",
            &answer[..40]
        );
    }
}

#[test]
fn no_answer_takes_quadratic_time() {
    // Long enough that reading each byte again for every other one would take minutes.
    const LONG: usize = 1 << 18;
    for form in ALL {
        let (begin, end) = (form.begins()[0], form.marks().last().unwrap());
        let object = "{\"name\": \"f\", \"parameters\": {}}; ";
        for unit in ["a", " ", "<", "{", "\"", object, begin, end] {
            for head in ["", begin] {
                let answer = format!("{head}{}", unit.repeat(LONG / unit.len()));
                let steps = [answer.len(), 1];
                for step in &steps[..1 + usize::from(answer.is_ascii())] {
                    let taken = time(form, "", &answer, *step);
                    assert!(taken < Duration::from_secs(2), "{taken:?}: {head}{unit}...");
                }
            }
        }
    }
}

/// Fragments of answers: marks, their prefixes, and text between them.
fn fragment() -> impl Strategy<Value = String> {
    let mut fragments: Vec<&str> = vec![
        "{\"name\": \"f\", \"parameters\": {\"a\": [1, \"x\"]}}",
        "{\"name\": \"f\", \"arguments\": \"{}\"}",
        "call:f{a:1}",
        "f(a=1)",
        "<function=f>",
        "</function>",
        "<invoke name=\"f\">",
        "</invoke>",
        "<parameter name=\"a\">",
        "<parameter=a>",
        "</parameter>",
        "<arg_key>a</arg_key><arg_value>1</arg_value>",
        "```",
        "json\n",
        "{}",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "\\",
        ",",
        ";",
        ":",
        "\n",
        " ",
        "f",
        "é",
        "<think>",
        "</think>",
    ];
    fragments.extend(ALL.iter().flat_map(|form| form.marks().iter()));
    (
        prop::sample::select(fragments),
        any::<prop::sample::Index>(),
        0..4,
    )
        .prop_map(|(text, cut, kind)| match kind {
            0 => text
                .chars()
                .take(cut.index(text.chars().count()) + 1)
                .collect(),
            _ => text.to_owned(),
        })
}

/// Answers in one form, with its own marks more often among the fragments.
fn answers() -> impl Strategy<Value = (&'static dyn ToolCallForm, Vec<String>)> {
    prop::sample::select(ALL.to_vec()).prop_flat_map(|form| {
        let own = prop::sample::select(form.marks().to_vec()).prop_map(str::to_owned);
        let pieces = prop::collection::vec(prop_oneof![own, fragment(), fragment()], 0..16);
        pieces.prop_map(move |pieces| (form, pieces))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000 * if env::tests_are_long() { 10 } else { 1 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn cuts_change_nothing(
        (form, pieces) in answers(),
        prompt in prop::sample::select(vec!["", "<think>\n", "</think>"]),
        whole: bool,
    ) {
        let parser = || AnswerParser::new(&in_form(form), prompt, true, 0);
        let answer = pieces.concat();
        let events = run(parser(), [answer.as_str()], whole);
        let has_thought = !prompt.is_empty() || answer.trim_start().starts_with("<think>");
        if let (false, true, [Event::Content(text)]) = (has_thought, whole, &events[..]) {
            prop_assert_eq!(text, &answer);
        }
        prop_assert_eq!(&run(parser(), characters(&answer), whole), &events);
        prop_assert_eq!(&run(parser(), pieces.iter().map(String::as_str), whole), &events);
    }
}
