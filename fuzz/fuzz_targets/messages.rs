//! Any text as the JSON of a conversation, of tools and of variables: what is read is written and read again as it was, and rendered.
#![no_main]

use NVFP4::text::{
    ChatTemplate, messages_from_json, messages_to_json, tools_from_json, variables_from_json,
};

libfuzzer_sys::fuzz_target!(|json: &str| {
    let _ = tools_from_json(json);
    let _ = variables_from_json(json);
    let Ok(messages) = messages_from_json(json) else {
        return;
    };
    let written = messages_to_json(&messages).to_string();
    assert_eq!(messages_from_json(&written).ok(), Some(messages.clone()));
    let _ = ChatTemplate::chatml().render(&messages, true);
});
