//! Warnings about missing and broken templates, each logged once. In a separate file, because a process has one subscriber.

mod common;

use std::ops::ControlFlow;
use std::sync::Mutex;

use NVFP4::base::ErrorKind;
use NVFP4::engine::Served;
use NVFP4::session::{ChatOptions, GenerateOptions, Session, SessionOptions};
use common::{Copy, expect_kind, load, options};
use serde_json::json;

/// Keeps the text of each warning.
struct Warnings;

static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Text(String);

impl tracing::field::Visit for Text {
    fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        self.0 = format!("{value:?}");
    }
}

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        SAID.lock().unwrap().push(text.0);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// The warnings since the last call.
fn said() -> Vec<String> {
    std::mem::take(&mut SAID.lock().unwrap())
}

#[test]
fn templates_that_are_missing_or_broken_are_told_once() {
    tracing::subscriber::set_global_default(Warnings).unwrap();
    let short = GenerateOptions {
        max_tokens: 2,
        ..GenerateOptions::default()
    };
    let session = |model| Session::new(model, &SessionOptions::default()).unwrap();
    let go = &mut |_: NVFP4::session::Piece<'_>| ControlFlow::Continue(());

    // Without a template: when one is first needed.
    let model = load("qwen3_tied");
    let mut raw = session(model.clone());
    raw.prefill(&[5, 6]).unwrap();
    raw.generate(&short, go).unwrap();
    assert_eq!(said(), [""; 0]);
    for _ in 0..2 {
        let mut chat = session(model.clone());
        chat.chat("Hi", None, &short, go).unwrap();
        chat.chat("Ho", None, &short, go).unwrap();
    }
    assert_eq!(said(), ["the model brings no chat template; using ChatML"]);

    // With a broken one: when it is read. Everything but conversations works.
    let broken = Copy::of("qwen3_tied", "broken");
    broken.write(
        "chat_template.jinja",
        b"{% for m in messages %}{{ m.content }}",
    );
    let model = Served::load(&broken.0, &options()).unwrap();
    assert!(model.has_own_template());
    let warnings = said();
    assert!(
        warnings[0].starts_with("the chat template does not parse: "),
        "{warnings:?}"
    );
    assert_eq!(warnings.len(), 1);
    assert_eq!(model.stop_tokens(), [0, 2]);
    let mut raw = session(model.clone());
    raw.prefill(&[5, 6]).unwrap();
    raw.generate(&short, go).unwrap();
    let refused = session(model).chat("Hi", None, &short, go);
    expect_kind(
        refused,
        ErrorKind::CorruptFile,
        "the chat template does not parse",
    );
    assert_eq!(said(), [""; 0]);

    // A list without a default: conversations with tools have theirs.
    let list = Copy::of("qwen3_tied", "list");
    let template = "{{ tools | length }}{% for m in messages %}{{ m.content }}{% endfor %}";
    let config = json!({"chat_template": [{"name": "tool_use", "template": template}]});
    list.write("tokenizer_config.json", config.to_string().as_bytes());
    let model = Served::load(&list.0, &options()).unwrap();
    let warnings = said();
    assert_eq!(warnings.len(), 1);
    assert!(
        warnings[0].contains("and none is named 'default'"),
        "{warnings:?}"
    );
    let refused = session(model.clone()).chat("Hi", None, &short, go);
    expect_kind(
        refused,
        ErrorKind::CorruptFile,
        "are named 'tool_use', and none is named 'default'",
    );
    let tool = json!({"type": "function", "function": {"name": "f"}});
    let chat = ChatOptions {
        tools: vec![tool],
        ..ChatOptions::default()
    };
    session(model).chat("Hi", Some(&chat), &short, go).unwrap();

    // Files of templates, as transformers 5 saves several.
    let files = Copy::of("qwen3_tied", "files");
    std::fs::create_dir(files.0.join("additional_chat_templates")).unwrap();
    files.write("chat_template.jinja", b"{{ messages | length }} of none");
    files.write(
        "additional_chat_templates/tool_use.jinja",
        b"{{ messages | length }} of {{ tools | length }}",
    );
    let model = Served::load(&files.0, &options()).unwrap();
    let render = |chat: &ChatOptions| {
        let messages = [NVFP4::text::Message::new("user", "x")];
        NVFP4::session::render(&model, &messages, true, chat).unwrap()
    };
    assert_eq!(render(&ChatOptions::default()), "1 of none");
    assert_eq!(render(&chat), "1 of 1");
    assert_eq!(said(), [""; 0]);
}
