//! Any text as a chat template: what parses is rendered for a short conversation, with and without tools.
#![no_main]

use NVFP4::text::{ChatTemplate, Message};

libfuzzer_sys::fuzz_target!(|source: &str| {
    let Ok(template) = ChatTemplate::from_jinja(source, Some("<s>"), Some("</s>")) else {
        return;
    };
    let messages = [
        Message::new("system", "Be brief."),
        Message::new("user", "Hello, w\u{f6}rld"),
        Message::new("assistant", "<think>\nhm\n</think>\n\nhi"),
        Message::new("user", ""),
    ];
    let _ = template.render(&messages, true);
    let variables = serde_json::json!({
        "enable_thinking": false,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [1, 2.5, null]}}}],
    });
    if let serde_json::Value::Object(variables) = variables {
        let _ = template.render_with(&messages[..2], false, &variables);
    }
});
