//! Answers as published templates write them come apart again into reasoning, content and calls.

use NVFP4::text::{AnswerForm, AnswerParser, ChatTemplate, Content, Event, Message, ToolCall};
use serde_json::{Map, Value, json};

use super::{json, published, published_template, with_fixed_date};

/// Templates of models that run here, each with the text that it writes after an answer, and whether it writes the reasoning before a call,
/// and before other answers.
const TEMPLATES: [(&str, &str, bool, bool); 13] = [
    ("Qwen3.5-4B", "<|im_end|>", true, true),
    ("qwen3", "<|im_end|>", true, true),
    ("Qwen3-Coder", "<|im_end|>", false, false),
    (
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "<|im_end|>",
        true,
        true,
    ),
    ("google-gemma-4-31B-it", "<turn|>", true, false),
    ("google-gemma-4-31B-it-interleaved", "<turn|>", true, false),
    ("openai-gpt-oss-120b", "<|return|>", true, true),
    (
        "meta-llama-Llama-3.1-8B-Instruct",
        "<|eot_id|>",
        false,
        false,
    ),
    ("mistralai-Mistral-Nemo-Instruct-2407", "</s>", false, false),
    (
        "mistralai-Ministral-3-14B-Reasoning-2512",
        "</s>",
        false,
        false,
    ),
    ("ByteDance-Seed-OSS", "<seed:eos>", true, true),
    ("MiniMax-M2", "[e~[", true, true),
    ("GLM-4.6", "", true, true),
];

/// Texts after a call that ends a turn, where those are not the ones after other answers.
const ENDS_OF_CALLS: [&str; 2] = ["<|tool_response>", "<|call|>"];

fn variables() -> Map<String, Value> {
    let place = json!({"type": "string", "description": "Its name."});
    let parameters =
        json!({"type": "object", "properties": {"place": place}, "required": ["place"]});
    let function =
        json!({"name": "weather", "description": "Of a place.", "parameters": parameters});
    let tools = json!([{"type": "function", "function": function}]);
    [
        ("tools".to_owned(), tools),
        ("enable_thinking".to_owned(), true.into()),
    ]
    .into_iter()
    .collect()
}

fn call() -> ToolCall {
    ToolCall {
        id: "call00000".to_owned(),
        name: "weather".to_owned(),
        arguments: Map::from_iter([("place".to_owned(), "Oslo".into())]),
    }
}

/// The prompt for an answer, and the text that the template writes for it, up to `end`.
fn written(template: &ChatTemplate, end: &str, answer: &Message) -> (String, String) {
    let question = Message::new("user", "Is it cold in Oslo?");
    let both = [question.clone(), answer.clone()];
    let prompt = template.render_with(&[question], true, &variables());
    let (prompt, whole) = (
        prompt.unwrap(),
        template.render_with(&both, false, &variables()).unwrap(),
    );
    // A prompt for reasoning may begin it otherwise than an answer without any.
    let pairs = prompt.char_indices().zip(whole.chars());
    let same = pairs.take_while(|((_, a), b)| a == b).last();
    let same = same.map_or(0, |((at, c), _)| at + c.len_utf8());
    let rest = &whole[same..];
    let ends = ENDS_OF_CALLS.iter().chain([&end]);
    let until = ends.filter_map(|end| rest.rfind(end)).min().unwrap();
    (whole[..same].to_owned(), rest[..until].to_owned())
}

#[test]
fn answers_of_published_templates_come_apart() {
    let Some(folder) = published() else {
        println!("SKIPPED: NVFP4_TEMPLATES names no folder of templates");
        return;
    };
    let golden = json("chat.json");
    for (name, end, reasons_before_calls, reasons) in TEMPLATES {
        let source = published_template(&folder, &golden, name);
        let template = with_fixed_date(&golden, &source, &golden["bos"], &golden["eos"]);
        let form = AnswerForm::of(&source, template.reads("tools"), |t| source.contains(t));
        for (thought, content, calls) in [("So.", "Yes.", 0), ("So.", "", 1), ("", "", 1)] {
            let answer = Message {
                content: match content {
                    "" => Content::None,
                    text => Content::Text(text.to_owned()),
                },
                reasoning_content: (!thought.is_empty()).then(|| thought.to_owned()),
                tool_calls: vec![call(); calls],
                ..Message::new("assistant", "")
            };
            let (prompt, text) = written(&template, end, &answer);
            let mut parser = AnswerParser::new(&form, &prompt, true, 0);
            let mut events = parser.push(&text);
            events.extend(parser.finish(true));
            let writes = if calls > 0 {
                reasons_before_calls
            } else {
                reasons
            };
            let mut expected = Vec::new();
            if writes && !thought.is_empty() {
                expected.push(Event::Reasoning(thought.to_owned()));
            }
            match calls {
                0 => expected.push(Event::Content(content.to_owned())),
                _ => expected.push(Event::ToolCall(call())),
            }
            assert_eq!(events, expected, "{name}: {text:?} after {prompt:?}");
        }
    }
}
