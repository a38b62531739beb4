//! Generations that are held to grammars: each text fits, whatever the weights, and everything else of a session works as before.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread;

use NVFP4::base::ErrorKind;
use NVFP4::engine::Served;
use NVFP4::model::TokenMask;
use NVFP4::session::{
    ChatOptions, Finish, GenerateOptions, Generation, Part, Piece, Sampler, SamplingOptions,
    Session, ToolCalls,
};
use NVFP4::text::{Grammar, GrammarSource, Message, ToolCall};
use serde_json::{Value, json};

use super::{drawn, filled, generate, go, session, state, templated};
use crate::common::{Copy, expect_kind, load, options};

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "kind": {"enum": ["alpha", "beta", 7]},
            "count": {"type": "integer", "minimum": -20, "maximum": 300},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
            "rest": {"type": ["null", "boolean"]},
        },
        "required": ["kind", "count", "tags"],
        "additionalProperties": false,
    })
}

fn is_valid(text: &str) -> bool {
    let value: Value = serde_json::from_str(text).unwrap();
    let fields = value.as_object().unwrap();
    let tags = fields["tags"].as_array().unwrap();
    let is_tag = |tag: &Value| tag.as_str().is_some_and(|tag| tag.chars().count() <= 4);
    [json!("alpha"), json!("beta"), json!(7)].contains(&fields["kind"])
        && (-20..=300).contains(&fields["count"].as_i64().unwrap())
        && (1..=3).contains(&tags.len())
        && tags.iter().all(is_tag)
        && fields
            .get("rest")
            .is_none_or(|rest| rest.is_null() || rest.is_boolean())
        && fields.len() <= 4
}

/// A session whose text ends with a whole character.
fn prompted(model: &Arc<Served>) -> Session {
    let mut session = session(model);
    let prompt = model.tokenizer().unwrap().encode("The user: ", false);
    session.prefill(&prompt.unwrap()).unwrap();
    session
}

fn compile(model: &Served, source: GrammarSource<'_>) -> Arc<Grammar> {
    Arc::new(model.grammar(source).unwrap())
}

/// Drawn by `seed`, held to `grammar`.
fn held(grammar: &Arc<Grammar>, seed: u64) -> GenerateOptions {
    GenerateOptions {
        sampling: SamplingOptions {
            temperature: 1.0,
            seed: Some(seed),
            ..SamplingOptions::default()
        },
        max_tokens: 300,
        grammar: Some(grammar.clone()),
        ..GenerateOptions::default()
    }
}

#[test]
fn texts_fit_their_grammars() {
    {
        let model = load("qwen3_tied");
        let schema = compile(&model, GrammarSource::JsonSchema(&schema().to_string()));
        let regex = compile(&model, GrammarSource::Regex("[0-9]{3}-(x|yé)"));
        let names = ["alpha".to_owned(), "al".to_owned(), "beta".to_owned()];
        let choices = compile(&model, GrammarSource::Choices(&names));
        let check = |options: &GenerateOptions, fits: &dyn Fn(&str) -> bool| {
            let mut session = prompted(&model);
            let out = generate(&mut session, options);
            assert_eq!(out.finish, Finish::Stop, "{}", out.text);
            assert!(fits(&out.text), "{}", out.text);
            assert_eq!(
                session.tokens()[session.len() - out.tokens.len()..],
                out.tokens
            );
            assert_eq!(out.drafts.drafted, 0);
        };
        for seed in 0..6 {
            let greedy = |options: &mut GenerateOptions| {
                if seed == 0 {
                    options.sampling.temperature = 0.0;
                }
            };
            for (grammar, fits) in [
                (&schema, &is_valid as &dyn Fn(&str) -> bool),
                (&regex, &|text| {
                    let (digits, rest) = text.split_at(3);
                    digits.bytes().all(|b| b.is_ascii_digit()) && ["-x", "-yé"].contains(&rest)
                }),
                (&choices, &|text| names.iter().any(|name| name == text)),
            ] {
                let mut options = held(grammar, seed);
                greedy(&mut options);
                check(&options, fits);
                options.top_log_probabilities = Some(0);
                options.sampling.repetition_penalty = 1.2;
                check(&options, fits);
            }
        }
    }
}

/// The tokens of a text that is chosen token by token, without any that is forced.
fn stepped(
    session: &mut Session,
    grammar: &Grammar,
    options: &GenerateOptions,
    stops: &[u32],
) -> Vec<u32> {
    let mut state = grammar.begin().unwrap();
    let start = session.len();
    let mut sampler = Sampler::new(&options.sampling)
        .unwrap()
        .after(session.appended());
    while !state.is_over() {
        let mask = state.mask().unwrap();
        let history = session.tokens().to_vec();
        let logits = session.logits().unwrap();
        let token = sampler
            .sample_within(logits, &history, Some(TokenMask(mask)))
            .unwrap();
        if stops.contains(&token) {
            break;
        }
        state.push(token).unwrap();
        session.decode(token).unwrap();
    }
    session.tokens()[start..].to_vec()
}

#[test]
fn forced_tokens_are_those_of_single_steps() {
    let model = load("qwen3_tied");
    let grammar = compile(&model, GrammarSource::JsonSchema(&schema().to_string()));
    for seed in 0..4 {
        let options = held(&grammar, seed);
        let mut one = prompted(&model);
        let out = generate(&mut one, &options);
        let mut other = prompted(&model);
        let expected = stepped(&mut other, &grammar, &options, model.stop_tokens());
        assert_eq!(out.tokens, expected);
        assert_eq!(state(&mut one), state(&mut other));
    }
}

#[test]
fn one_grammar_serves_many_threads() {
    let model = load("qwen3_tied");
    let grammar = compile(&model, GrammarSource::JsonSchema(&schema().to_string()));
    let work = |seed: u64| generate(&mut prompted(&model), &held(&grammar, seed)).tokens;
    let alone: Vec<_> = (0..4).map(work).collect();
    let together: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|seed| scope.spawn(move || work(seed))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(alone, together);
}

#[test]
fn generations_end_within_the_form_as_others_do() {
    let model = load("qwen3_tied");
    let grammar = compile(&model, GrammarSource::Regex("(ab ){20}"));
    let expected = "ab ".repeat(20);
    let run = |change: &dyn Fn(&mut GenerateOptions)| {
        let mut options = held(&grammar, 1);
        change(&mut options);
        let mut session = prompted(&model);
        let out = generate(&mut session, &options);
        assert!(expected.starts_with(&out.text), "{}", out.text);
        (out.finish, out.tokens.len())
    };
    assert_eq!(run(&|_| {}).0, Finish::Stop);
    assert_eq!(run(&|o| o.max_tokens = 7), (Finish::Length, 7));
    let (finish, _) = run(&|o| o.stop_strings = vec!["b ab ab".to_owned()]);
    assert_eq!(finish, Finish::StopString);
    // A caller that leaves in the middle keeps what there is, and the session goes on.
    let mut session = prompted(&model);
    let mut left = 9;
    let out = session
        .generate(&held(&grammar, 1), &mut |_| {
            left -= 1;
            match left {
                0 => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        })
        .unwrap();
    assert_eq!((out.finish, out.tokens.len()), (Finish::Cancelled, 9));
    assert_eq!(session.len(), prompted(&model).len() + 9);
    let again = generate(&mut session, &held(&grammar, 1));
    assert_eq!((again.finish, again.text), (Finish::Stop, expected.clone()));
}

#[test]
fn stop_tokens_come_where_the_text_may_end() {
    let model = load("qwen3_tied");
    let grammar = compile(&model, GrammarSource::Regex("a{3,200}"));
    let tokenizer = model.tokenizer().unwrap();
    let other = tokenizer.encode("Q", false).unwrap()[0];
    for seed in 0..8 {
        let mut options = held(&grammar, seed);
        options.sampling.temperature = 5.0;
        options.stop_tokens = vec![other];
        let out = generate(&mut prompted(&model), &options);
        let a = out.text.len();
        assert!(out.text.bytes().all(|b| b == b'a') && (3..=200).contains(&a));
        assert_eq!(out.finish, Finish::Stop);
        options.stop_tokens.clear();
        options.ignore_model_stops = true;
        let out = generate(&mut prompted(&model), &options);
        assert_eq!((out.text.len(), out.finish), (200, Finish::Stop));
    }
    // A stop token that the form needs is an error, and the session stays as it was.
    let mut options = held(&compile(&model, GrammarSource::Regex("aQ+")), 1);
    options.stop_tokens = vec![other];
    let mut session = prompted(&model);
    let before = state(&mut session);
    let failed = session.generate(&options, &mut go);
    expect_kind(failed, ErrorKind::InvalidArgument, "which ends the text");
    assert_eq!(state(&mut session), before);
}

#[test]
fn wrong_grammars_are_refused_before_anything_runs() {
    let (model, other) = (load("qwen3_tied"), load("qwen3_tied"));
    let grammar = compile(&other, GrammarSource::Regex("a"));
    let mut session = prompted(&model);
    let mut refused = |options: &GenerateOptions, words: &str| {
        let failed = session.generate(options, &mut go);
        expect_kind(failed, ErrorKind::InvalidArgument, words);
        assert_eq!(session.len(), prompted(&model).len());
    };
    refused(&held(&grammar, 1), "another model");
    let calls = GenerateOptions {
        tool_calls: ToolCalls::Held,
        ..drawn(5)
    };
    refused(&calls, "in a chat");
    let mut chat = super::session(&model);
    let own = compile(&model, GrammarSource::Regex("a"));
    let both = GenerateOptions {
        grammar: Some(own),
        ..calls.clone()
    };
    let failed = chat.chat("Hi", None, &both, &mut go);
    expect_kind(failed, ErrorKind::InvalidArgument, "choose one");
    // A model without a tokenizer has no text to hold.
    let bare = load("llama_tied");
    let failed = bare.grammar(GrammarSource::Regex("a"));
    expect_kind(failed, ErrorKind::NotFound, "no tokenizer");
    let mut session = filled(&bare, 5);
    let failed = session.generate(&held(&grammar, 1), &mut go);
    expect_kind(failed, ErrorKind::NotFound, "no tokenizer");
}

/// A chat model with marks of reasoning and tool calls as tokens, in place of its last words.
fn thinker(name: &str, template: &str) -> (Copy, Arc<Served>) {
    let dir = Copy::of("qwen3_tied", name);
    let path = dir.0.join("tokenizer.json");
    let text = std::fs::read_to_string(path).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
    let marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"];
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let first = vocabulary.len() - marks.len();
    let gone: Vec<String> = vocabulary
        .iter()
        .filter(|(_, id)| id.as_u64().unwrap() >= first as u64)
        .map(|(word, _)| word.clone())
        .collect();
    gone.iter().for_each(|word| drop(vocabulary.remove(word)));
    let merges = tokenizer["model"]["merges"].as_array_mut().unwrap();
    merges.retain(|merge| {
        let word = format!(
            "{}{}",
            merge[0].as_str().unwrap(),
            merge[1].as_str().unwrap()
        );
        !gone.contains(&word)
    });
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    for (i, mark) in marks.iter().enumerate() {
        let mut token = added[0].clone();
        token["id"] = json!(first + i);
        token["content"] = json!(mark);
        token["special"] = json!(false);
        added.push(token);
    }
    dir.write("tokenizer.json", tokenizer.to_string().as_bytes());
    dir.write("chat_template.jinja", template.as_bytes());
    let model = Served::load(&dir.0, &options()).unwrap();
    (dir, model)
}

const THINKING: &str = "{# </think> #}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: <think>\n";
const UNDECIDED: &str =
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: {# </think> #}";
const TOOLS: &str = "{% if tools %}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: {# <tool_call> #}<think></think>\n";

fn answered(model: &Arc<Served>, chat: &ChatOptions, options: &GenerateOptions) -> Generation {
    let mut session = session(model);
    let mut content = String::new();
    let out = session
        .chat("Hi", Some(chat), options, &mut |piece| {
            if piece.part == Part::Content {
                content.push_str(piece.text);
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(content, out.text);
    assert_eq!(
        session.tokens()[session.len() - out.tokens.len()..],
        out.tokens
    );
    out
}

#[test]
fn reasoning_is_free_and_the_answer_held() {
    let schema = schema().to_string();
    // With marks that are tokens, and with marks that are spelled.
    let models = [thinker("thinks", THINKING), templated("spells", THINKING)];
    for (_dir, model) in &models {
        let grammar = compile(model, GrammarSource::JsonSchema(&schema));
        for seed in 0..4 {
            let chat = ChatOptions {
                reasoning_budget: Some(5 + seed as usize),
                ..ChatOptions::default()
            };
            let out = answered(model, &chat, &held(&grammar, seed));
            assert_eq!(out.finish, Finish::Stop);
            assert!(out.reasoning.contains("Considering the limited time"));
            assert!(is_valid(&out.text), "{}", out.text);
        }
    }
}

#[test]
fn a_stop_within_reasoning_ends_the_reasoning() {
    let (_dir, model) = thinker("stops", THINKING);
    let grammar = compile(&model, GrammarSource::Regex("yes|no"));
    let mut options = held(&grammar, 3);
    // Any token may end the text, so that one ends the reasoning at once.
    let keep = model
        .tokenizer()
        .unwrap()
        .encode("yesno\n\n</think>", false);
    let keep = keep.unwrap();
    options.stop_tokens = (3..320).filter(|id| !keep.contains(id)).collect();
    options.sampling.temperature = 1.0;
    let out = answered(&model, &ChatOptions::default(), &options);
    assert!(["yes", "no"].contains(&&*out.text), "{}", out.text);
    assert_eq!(out.finish, Finish::Stop);
    let tokenizer = model.tokenizer().unwrap();
    let text = tokenizer.decode(&out.tokens, false).unwrap();
    assert!(text.contains("</think>\n\n"), "{text}");
}

#[test]
fn a_model_may_think_or_answer_where_that_is_open() {
    let (_dir, model) = thinker("open", UNDECIDED);
    let grammar = compile(&model, GrammarSource::Regex("[a-z]{2,9}"));
    let think = model.tokenizer().unwrap().encode("<think>", false).unwrap()[0];
    let (mut thought, mut answered_at_once) = (0, 0);
    for seed in 0..60 {
        let mut options = held(&grammar, seed);
        options.sampling.temperature = 50.0;
        let chat = ChatOptions {
            reasoning_budget: Some(2),
            ..ChatOptions::default()
        };
        let out = answered(&model, &chat, &options);
        match out.tokens.contains(&think) {
            true => thought += 1,
            false => answered_at_once += 1,
        }
        assert!(
            (2..=9).contains(&out.text.len()) && out.text.bytes().all(|b| b.is_ascii_lowercase()),
            "{}",
            out.text
        );
    }
    assert!(
        thought > 0 && answered_at_once > 0,
        "{thought} {answered_at_once}"
    );
}

fn tools() -> Vec<Value> {
    let parameters = json!({
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": false,
    });
    vec![
        json!({"type": "function", "function": {"name": "weather", "parameters": parameters}}),
        json!({"type": "function", "function": {"name": "now"}}),
    ]
}

/// Demands that a call is one of [`tools`].
fn check_call(call: &ToolCall) {
    match &*call.name {
        "weather" => {
            let city = call.arguments["city"].as_str().unwrap();
            assert!(["Paris", "Oslo"].contains(&city));
            assert!((1..=9).contains(&call.arguments["days"].as_i64().unwrap()));
        }
        "now" => assert!(call.arguments.is_empty()),
        other => panic!("{other}"),
    }
}

/// An answer that ends with its first call.
fn until_call(model: &Arc<Served>, chat: &ChatOptions, options: &GenerateOptions) -> Generation {
    let mut on_piece = |piece: Piece<'_>| match piece.part {
        Part::ToolCall => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    let out = session(model).chat("Hi", Some(chat), options, &mut on_piece);
    out.unwrap()
}

/// Each family by what its templates contain.
#[test]
fn calls_of_every_family_that_writes_json_are_held() {
    let chat = ChatOptions {
        tools: tools(),
        ..ChatOptions::default()
    };
    for (name, contained) in [
        ("mistral-list", "[TOOL_CALLS]"),
        ("mistral-id", "[TOOL_CALLS] [CALL_ID] [ARGS]"),
        ("mistral-name", "[TOOL_CALLS] [ARGS]"),
        ("deepseek-v3", "<｜tool▁call▁begin｜> ```json"),
        ("deepseek-v31", "<｜tool▁call▁begin｜>"),
        ("granite", "<|tool_call|>"),
        ("phi", "<|tool_call|> <|/tool_call|>"),
        ("nemotron", "<TOOLCALL>"),
        ("command", "<|START_ACTION|>"),
        ("llama", "<|python_tag|>"),
    ] {
        let template = TOOLS.replace("<tool_call>", contained);
        let (_dir, model) = templated(name, &template.replace("<think></think>", ""));
        for seed in 0..3 {
            let mut options = drawn(250);
            options.sampling.seed = Some(seed);
            options.tool_calls = ToolCalls::Required;
            let out = until_call(&model, &chat, &options);
            assert!(!out.tool_calls.is_empty(), "{name}: {out:?}");
            out.tool_calls.iter().for_each(check_call);
        }
        if name == "llama" {
            // An answer that begins as an object is a call, without a mark.
            let brace = model.tokenizer().unwrap().encode("{", false).unwrap();
            let mut options = drawn(250);
            options.tool_calls = ToolCalls::Held;
            options.adjustments.bias = vec![(brace[0], 100.0)];
            let out = until_call(&model, &chat, &options);
            assert!(!out.tool_calls.is_empty(), "{out:?}");
            out.tool_calls.iter().for_each(check_call);
        }
    }
}

/// gpt-oss names the tool in the header of a message.
#[test]
fn calls_with_headers_are_held() {
    const HARMONY: &str = "{% if tools %}{# <|channel|> #}{% endif %}{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant";
    let chat = ChatOptions {
        tools: tools(),
        reasoning_budget: Some(4),
        ..ChatOptions::default()
    };
    let mut names = Vec::new();
    let mut options = drawn(250);
    options.tool_calls = ToolCalls::Required;
    let (_dir, model) = templated("harmony", HARMONY);
    for seed in 0..6 {
        options.sampling.seed = Some(seed);
        let out = until_call(&model, &chat, &options);
        assert!(out.tool_calls.len() == 1 && !out.reasoning.is_empty() && out.text.is_empty());
        check_call(&out.tool_calls[0]);
        names.push(out.tool_calls[0].name.clone());
    }
    assert!(names.iter().any(|n| n == "now") && names.iter().any(|n| n == "weather"));
    // A model that begins a recipient writes a call.
    let (_begun, begun) = templated("harmony-begun", &format!("{HARMONY} to="));
    options.tool_calls = ToolCalls::Held;
    let out = until_call(&begun, &chat, &options);
    assert!(
        out.tool_calls.len() == 1 && out.reasoning.is_empty(),
        "{out:?}"
    );
    check_call(&out.tool_calls[0]);
}

#[test]
fn tool_calls_are_held_to_their_schemas() {
    let (_dir, model) = thinker("calls", TOOLS);
    let chat = ChatOptions {
        tools: tools(),
        ..ChatOptions::default()
    };
    let mut names = Vec::new();
    for seed in 0..8 {
        let mut options = drawn(120);
        options.ignore_model_stops = false;
        options.sampling.seed = Some(seed);
        options.tool_calls = ToolCalls::Required;
        let out = answered(&model, &chat, &options);
        assert!(!out.tool_calls.is_empty(), "{out:?}");
        check_call(&out.tool_calls[0]);
        names.push(out.tool_calls[0].name.clone());
    }
    assert!(names.iter().any(|n| n == "now") && names.iter().any(|n| n == "weather"));
    // The model may begin a call anywhere, or none: each that it begins is one of a tool.
    let mut begun = 0;
    for seed in 0..8 {
        let mut options = drawn(110);
        options.sampling.temperature = 20.0;
        options.sampling.seed = Some(seed);
        options.tool_calls = ToolCalls::Held;
        let out = answered(&model, &chat, &options);
        begun += out.tool_calls.len();
        for call in &out.tool_calls {
            assert!(["weather", "now"].contains(&&*call.name));
        }
        let open = out.text.contains("<tool_call>");
        assert!(!open || out.finish == Finish::Length, "{}", out.text);
    }
    assert!(begun > 0);
    let none = ChatOptions::default();
    let mut options = drawn(5);
    options.tool_calls = ToolCalls::Held;
    let mut session = session(&model);
    let failed = session.chat_messages(
        &[Message::new("user", "Hi")],
        Some(&none),
        &options,
        &mut go,
    );
    expect_kind(failed, ErrorKind::InvalidArgument, "no tool is offered");
    let (_coder, coder) = templated("coder", "{{ tools }}<tool_call>\n<function=");
    let mut session = super::session(&coder);
    let failed = session.chat("Hi", Some(&chat), &options, &mut go);
    expect_kind(failed, ErrorKind::Unsupported, "cannot be held");
    assert!(session.is_empty());
}
