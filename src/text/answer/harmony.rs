//! Harmony, the form of gpt-oss: an answer is a series of messages `<|start|>assistant<|channel|>analysis<|message|>...<|end|>`, each with a
//! header that names its channel and, for a call, its recipient. As described in OpenAI's guide to the format. The prompt has written the
//! first `<|start|>assistant`.

use serde_json::{Map, Value};

use super::section::{
    Found, HEADER, Piece, Scan, SectionStep, ToolCallForm, Written, WrittenCall, is_begun, search,
    written,
};

pub(super) const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const CONSTRAIN: &str = "<|constrain|>";
const CALL: &str = "<|call|>";
const TO: &str = " to=";
/// The namespace of tools in the names of recipients.
const NAMESPACE: &str = "functions.";

/// The texts that begin a header; after a prompt the last two.
const OPENINGS: [&str; 3] = [START, CHANNEL, TO];

/// The marks that a message ends at. The first two begin the header of the next message.
pub(super) const ENDS: [&str; 5] = [START, CHANNEL, "<|end|>", CALL, "<|return|>"];

/// The marks of an answer's form, which a template contains.
pub(super) const EVIDENCE: [&str; 3] = [START, CHANNEL, MESSAGE];

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    Reasoning,
    /// The answer, or words before a call.
    Content,
    Call,
}

/// The result of reading a header.
#[derive(Debug, PartialEq)]
pub(super) enum Header {
    /// Undecided until there is more text.
    More,
    /// A header of this many bytes.
    Message(Kind, usize),
    /// This many bytes, possibly none, are no header.
    No(usize),
}

/// Reads the header at the beginning of `text`.
pub(super) fn read_header(text: &str) -> Header {
    let Some(opening) = OPENINGS.iter().find(|o| text.starts_with(**o)) else {
        return match OPENINGS.iter().any(|opening| is_begun(text, opening)) {
            true => Header::More,
            false => Header::No(0),
        };
    };
    let marks = [MESSAGE, ENDS[2], ENDS[3], ENDS[4]];
    match search(text, opening.len(), &marks) {
        (at, _) if at > HEADER => Header::No(opening.len()),
        (at, Some(MESSAGE)) => Header::Message(kind(&text[..at]), at + MESSAGE.len()),
        (_, Some(_)) => Header::No(opening.len()),
        (_, None) => Header::More,
    }
}

/// Whether `text` begins with the mark of a header.
pub(super) fn has_opening(text: &str) -> bool {
    OPENINGS.iter().any(|opening| text.starts_with(opening))
}

/// The message that a prompt has begun and not ended; its role is left out.
pub(super) fn begun_message(prompt: &str) -> &str {
    let last = prompt.rsplit(START).next().unwrap_or_default();
    let is_ended = ENDS[2..].iter().any(|end| last.contains(end));
    match [CHANNEL, TO]
        .iter()
        .filter_map(|mark| last.find(mark))
        .min()
    {
        Some(at) if !is_ended => &last[at..],
        _ => "",
    }
}

fn kind(header: &str) -> Kind {
    if recipient(header).is_some() {
        return Kind::Call;
    }
    match word_after(header, CHANNEL) {
        Some("analysis") => Kind::Reasoning,
        _ => Kind::Content,
    }
}

fn recipient(header: &str) -> Option<&str> {
    word_after(header, TO).filter(|name| !name.is_empty())
}

/// The text between `mark` and the next space or mark.
fn word_after<'a>(header: &'a str, mark: &str) -> Option<&'a str> {
    let (_, rest) = header.rsplit_once(mark)?;
    rest.split(|c: char| c.is_whitespace() || c == '<').next()
}

/// A channel and the recipient up to the tool's name.
const CHANNEL_TO: Piece = Piece::Pattern("[a-z]+ to=functions\\.");
const ROLE_TO: Piece = Piece::Text("assistant to=functions.");
/// From the tool's name to the arguments, where the channel precedes the recipient, and where it follows.
const AFTER_RECIPIENT: &[Piece] = &[
    Piece::Text(" "),
    Piece::Optional(CONSTRAIN),
    Piece::Optional("json"),
    Piece::Text(MESSAGE),
];
const CHANNEL_AFTER_RECIPIENT: &[Piece] = &[
    Piece::Text(CHANNEL),
    Piece::Text("commentary "),
    Piece::Optional(CONSTRAIN),
    Piece::Optional("json"),
    Piece::Text(MESSAGE),
];
/// The headers of a call, of which those without a role follow a prompt.
static WRITTEN: [WrittenCall; 4] = [
    header(&[Piece::Text(CHANNEL), CHANNEL_TO], AFTER_RECIPIENT),
    header(
        &[
            Piece::Text(START),
            Piece::Text("assistant"),
            Piece::Text(CHANNEL),
            CHANNEL_TO,
        ],
        AFTER_RECIPIENT,
    ),
    header(&[Piece::Text(" to=functions.")], CHANNEL_AFTER_RECIPIENT),
    header(&[Piece::Text(START), ROLE_TO], CHANNEL_AFTER_RECIPIENT),
];

const fn header(before_name: &'static [Piece], before_arguments: &'static [Piece]) -> WrittenCall {
    WrittenCall {
        before_name,
        quotes_name: false,
        before_arguments,
        after: &[Piece::Optional(CALL)],
    }
}

/// A message to a tool, with a JSON object of arguments. A section begins at its header.
pub(super) struct Harmony;

impl ToolCallForm for Harmony {
    fn begins(&self) -> &[&'static str] {
        &ENDS[..2]
    }

    fn marks(&self) -> &[&'static str] {
        // The marks at the end of an answer are not part of it.
        &[START, CHANNEL, MESSAGE, CONSTRAIN, "<|end|>"]
    }

    fn ends(&self) -> &[&'static str] {
        &[CALL]
    }

    fn written(&self) -> &[WrittenCall] {
        &WRITTEN
    }

    /// A header is that of a call from its recipient on.
    fn is_held_from(&self, text: &str) -> bool {
        text.contains(TO)
    }

    fn read(&self, text: &str, scan: &mut Scan, _whole: bool) -> SectionStep {
        let Header::Message(Kind::Call, header) = read_header(text) else {
            return SectionStep::Malformed(text.len());
        };
        if scan.at == 0 {
            let body = text[header..].trim_start();
            match body.chars().next() {
                // Endless space is no call, and would be read again for each piece of it.
                None if text.len() - header > HEADER => return SectionStep::Malformed(header),
                None => return SectionStep::More,
                Some('{') => scan.begin(text.len() - body.len()),
                Some(_) => return SectionStep::Malformed(header),
            }
        }
        match scan.value(text, Some(CALL)) {
            Found::More => SectionStep::More,
            Found::Mark(end) => SectionStep::Malformed(end),
            Found::Value(end) => {
                let arguments = serde_json::from_str(&text[scan.start..end]).ok();
                match call(&text[..header], arguments) {
                    Some(call) => SectionStep::Over(vec![call], end),
                    None => SectionStep::Malformed(end),
                }
            }
        }
    }
}

fn call(header: &str, arguments: Option<Map<String, Value>>) -> Option<Written> {
    let name = recipient(header)?;
    written(name.strip_prefix(NAMESPACE).unwrap_or(name), arguments?)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{both_ways, call, content, reasoning};
    use super::*;
    use crate::text::answer::{AnswerForm, AnswerParser, Event};

    fn form() -> AnswerForm {
        let template = "<|start|>assistant<|channel|>final<|message|>{{ tools }}<|end|>";
        AnswerForm::of(template, true, |token| token.starts_with("<|"))
    }

    /// The events of an answer after `prompt`, which are the same at once and character by character.
    fn after(prompt: &str, answer: &str, tools: bool, whole: bool) -> Vec<Event> {
        both_ways(
            || AnswerParser::new(&form(), prompt, tools, 0),
            answer,
            whole,
        )
    }

    fn answered(answer: &str) -> Vec<Event> {
        after("<|end|><|start|>assistant", answer, true, true)
    }

    #[test]
    fn messages_come_apart() {
        let answer = "<|channel|>analysis<|message|>Two and two.\n<|end|><|start|>assistant<|channel|>final<|message|>4 <b>.";
        let parts = [reasoning("Two and two."), content("4 <b>.")];
        assert_eq!(answered(answer), parts);
        assert_eq!(answered(&format!("{answer}<|return|>")), parts);
        assert_eq!(answered("<|channel|>final<|message|>4"), [content("4")]);
        let two = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>\
            <|start|>assistant<|channel|>commentary<|message|>c<|end|><|start|>assistant<|channel|>final<|message|>d";
        assert_eq!(answered(two), [reasoning("a\n\nb"), content("c\n\nd")]);
    }

    #[test]
    fn calls_name_their_recipient_in_either_place() {
        let weather = call(0, "weather", r#"{"place": "Oslo <|x|>"}"#);
        for header in [
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
            " to=functions.weather<|channel|>commentary json<|message|>",
            "<|start|>assistant to=functions.weather<|channel|>commentary<|message|> ",
        ] {
            for end in ["", "<|call|>"] {
                let answer = format!("{header}{{\"place\": \"Oslo <|x|>\"}}{end}");
                assert_eq!(
                    answered(&answer),
                    std::slice::from_ref(&weather),
                    "{answer}"
                );
            }
        }
        let thought = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>\
            <|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>";
        assert_eq!(
            answered(thought),
            [reasoning("So."), content("I look."), call(0, "f", "{}")]
        );
    }

    #[test]
    fn what_is_no_call_stays_content() {
        let answer = "<|channel|>commentary to=python<|message|>print(1)";
        assert_eq!(answered(answer), [content(answer)]);
        let prompt = "<|start|>assistant";
        let answer = "<|channel|>commentary to=functions.f<|message|>{}";
        assert_eq!(after(prompt, answer, false, true), [content("{}")]);
        let long = format!("<|start|>{}", "a".repeat(2 * HEADER));
        for answer in ["Hello", " Hello", "<", &long, "<|channel|>a<|end|>b"] {
            let text: String = answered(answer)
                .into_iter()
                .map(|event| match event {
                    Event::Content(text) => text,
                    other => panic!("{answer}: {other:?}"),
                })
                .collect();
            assert_eq!(text, answer.replace("<|end|>", "\n\n"), "{answer}");
        }
    }

    #[test]
    fn a_call_is_held_from_its_recipient() {
        for (text, begins) in [
            ("<|channel|>commentary to=", true),
            ("<|start|>assistant to=functions.f", true),
            (" to=", true),
            ("<|channel|>commentary", false),
            ("<|start|>assistant", false),
        ] {
            assert_eq!(form().holds_call(text), begins, "{text}");
        }
        let tools = [serde_json::json!({"name": "f"})];
        let lark = form().grammar_of_calls(&tools, |_| None).unwrap();
        let start = lark.lines().next().unwrap();
        assert!(
            start.contains(
                r#""<|start|>" "assistant to=functions." ("f" "<|channel|>" "commentary " "#
            ),
            "{start}"
        );
    }

    #[test]
    fn endless_answers_take_linear_time() {
        const LONG: usize = 1 << 18;
        let call = " to=functions.f<|message|>";
        for (head, unit) in [
            (call, " "),
            (call, "{"),
            (call, "\"a"),
            ("<|channel|>", "a"),
            ("", "<|start|>"),
            ("", "<"),
        ] {
            let answer = format!("{head}{}", unit.repeat(LONG / unit.len()));
            let mut parser = AnswerParser::new(&form(), "<|start|>assistant", true, 0);
            let begin = std::time::Instant::now();
            for piece in answer.as_bytes().chunks(1) {
                parser.push(std::str::from_utf8(piece).unwrap());
            }
            parser.finish(true);
            let taken = begin.elapsed();
            assert!(taken.as_secs() < 2, "{taken:?}: {head}{unit}...");
        }
    }

    #[test]
    fn an_answer_that_is_cut_off() {
        let thought = "<|channel|>analysis<|message|>So";
        for rest in ["", "<|end|>", "<|end|><|start|>assistant<|chan"] {
            let answer = format!("{thought}{rest}");
            assert_eq!(
                after("<|start|>assistant", &answer, true, false),
                [reasoning("So")]
            );
        }
        let call = "<|channel|>commentary to=functions.f<|message|>{\"a\": ";
        assert_eq!(after("<|start|>assistant", call, true, false), []);
    }

    #[test]
    fn a_prompt_may_begin_a_message() {
        let early = format!(
            "<|start|>assistant<|channel|>analysis<|message|>So{}",
            form().reasoning().unwrap().early_end
        );
        assert_eq!(after(&early, "4", true, true), [content("4")]);
        let within = "<|start|>assistant<|channel|>analysis<|message|>";
        assert_eq!(after(within, "So<|end|>", true, true), [reasoning("So")]);
        let mut parser = AnswerParser::new(&form(), within, true, 0);
        assert!(parser.is_reasoning());
        parser.push("a<|end|>");
        assert!(!parser.is_reasoning());
    }
}
