//! Any text as an answer in each family's form, cut anywhere: the parts are those of the whole text.
#![no_main]

use NVFP4::text::{AnswerForm, AnswerParser, Event};

/// What templates of the families contain, and one that thinks.
const TEMPLATES: [&str; 8] = [
    "{{ tools }} <think></think> <tool_call>",
    "{{ tools }} <tool_call> <function=",
    "{{ tools }} [TOOL_CALLS] [THINK][/THINK]",
    "{{ tools }} <｜tool▁call▁begin｜>",
    "{{ tools }} <|python_tag|>",
    "{{ tools }} <start_function_call>",
    "{{ tools }} ```tool_code",
    "{{ tools }} <|tool_call|>",
];

/// Events of one kind that follow each other, joined.
fn joined(events: Vec<Event>) -> Vec<Event> {
    let mut out: Vec<Event> = Vec::new();
    for event in events {
        match (out.last_mut(), event) {
            (Some(Event::Content(last)), Event::Content(text)) => last.push_str(&text),
            (Some(Event::Reasoning(last)), Event::Reasoning(text)) => last.push_str(&text),
            (_, event) => out.push(event),
        }
    }
    out
}

libfuzzer_sys::fuzz_target!(|input: (u8, u8, bool, &str)| {
    let (form, step, whole, text) = input;
    let form = AnswerForm::of(TEMPLATES[form as usize % TEMPLATES.len()], true, |_| false);
    let parsed = |step: usize| {
        let mut parser = AnswerParser::new(&form, "<|im_start|>assistant\n", true, 0);
        let chars: Vec<char> = text.chars().collect();
        let mut events = Vec::new();
        for part in chars.chunks(step.max(1)) {
            events.extend(parser.push(&part.iter().collect::<String>()));
        }
        events.extend(parser.finish(whole));
        joined(events)
    };
    assert_eq!(parsed(step as usize), parsed(usize::MAX));
});
