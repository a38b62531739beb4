//! The tokens that end a turn, by templates of our own and by those of public models (`tests/golden/text/turn_ends.py`).

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use NVFP4::text::{ChatTemplate, Message, Tokenizer, VocabularySpec, turn_ends};
use serde_json::Value;

use super::{json, published, with_fixed_date};

/// GGUF's types of tokens.
const NORMAL: i32 = 1;
pub(super) const CONTROL: i32 = 3;
pub(super) const USER_DEFINED: i32 = 4;

/// A byte-level tokenizer with a token for each byte, and these.
pub(super) fn tokenizer(tokens: &[(&str, i32)]) -> Tokenizer {
    let shown = |byte: &u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let alphabet = (0..256).filter(shown).chain(0x100..0x144);
    let alphabet = alphabet.filter_map(char::from_u32).map(String::from);
    let mut spec = VocabularySpec {
        model: "gpt2".into(),
        pre: "default".into(),
        tokens: alphabet.chain(["th".to_owned()]).collect(),
        merges: vec!["t h".to_owned()],
        ..VocabularySpec::default()
    };
    spec.token_types = vec![NORMAL; spec.tokens.len()];
    for (text, kind) in tokens {
        spec.tokens.push((*text).to_owned());
        spec.token_types.push(*kind);
    }
    Tokenizer::from_vocabulary(&spec).unwrap()
}

fn names(tokenizer: &Tokenizer, ids: &[u32]) -> BTreeSet<String> {
    let ids = ids.iter();
    ids.map(|&id| tokenizer.decode(&[id], false).unwrap())
        .collect()
}

fn ends(tokenizer: &Tokenizer, source: &str) -> BTreeSet<String> {
    let template = ChatTemplate::from_jinja(source, Some("<s>"), Some("</s>")).unwrap();
    let ids = turn_ends(tokenizer, Some(&template)).unwrap();
    assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len());
    names(tokenizer, &ids)
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

#[test]
fn a_turn_ends_with_what_the_template_writes_after_an_answer() {
    let roles = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}";
    let turns = |end: &str| format!("{roles}{end}\n{{% endfor %}}");
    for (source, tokens, expected) in [
        // Whatever type the vocabulary gives it.
        (turns("<|fin|>"), &[("<|fin|>", CONTROL)][..], &["<|fin|>"][..]),
        (turns("<|fin|>"), &[("<|fin|>", USER_DEFINED)], &["<|fin|>"]),
        (turns("<|fin|>"), &[("<|fin|>", NORMAL)], &["<|fin|>"]),
        (turns("\n <fin>"), &[("<fin>", USER_DEFINED)], &["<fin>"]),
        (turns("[e~["), &[("[e~[", CONTROL)], &["[e~["]),
        // White space and ordinary words are no ends, also where they are single tokens.
        (turns("\n"), &[("\n", USER_DEFINED), ("\n\n", CONTROL)], &[]),
        (turns("### User:"), &[("### User:", USER_DEFINED)], &[]),
        (turns("end <|fin|>"), &[("<|fin|>", CONTROL)], &[]),
        // Nor is a text in brackets that is no token.
        (turns("<|fin|>"), &[], &[]),
        // The beginning of the next question ends the turn where nothing else does.
        (turns(""), &[("<|user|>", CONTROL), ("<|assistant|>", CONTROL)], &["<|user|>"]),
        // The token that ends questions too, and the end of the conversation after it.
        (
            "{% for m in messages %}<r>{{ m.content }}{{ '<part>' if m.role == 'assistant' }}<fin>{% endfor %}{{ eos_token }}"
                .to_owned(),
            &[("<r>", CONTROL), ("<part>", CONTROL), ("<fin>", CONTROL), ("</s>", CONTROL)],
            &["<fin>", "</s>"],
        ),
        // A token that begins turns is no end.
        (
            "{% for m in messages %}<r>{{ m.content }}{{ '\n<fin>\n' if m.role == 'assistant' }}{% endfor %}".to_owned(),
            &[("<r>", CONTROL), ("<fin>", CONTROL)],
            &["<fin>"],
        ),
    ] {
        assert_eq!(ends(&tokenizer(tokens), &source), set(expected), "{source} {tokens:?}");
    }
}

#[test]
fn what_occurs_within_answers_ends_no_turn() {
    // Each part of an answer is a message, as gpt-oss has them.
    let parts = "{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|stop|>\
        {% else %}{% if m.thinking %}<|start|>me<|channel|>thoughts<|message|>{{ m.thinking }}<|stop|>{% endif %}\
        <|start|>me<|channel|>words<|message|>{{ m.content }}{{ '<|over|>' if loop.last else '<|stop|>' }}{% endif %}{% endfor %}";
    let all = [
        "start", "message", "channel", "stop", "over", "end", "return", "call",
    ];
    let all: Vec<String> = all.iter().map(|name| format!("<|{name}|>")).collect();
    let of = |range: std::ops::Range<usize>| -> Vec<(&str, i32)> {
        all[range].iter().map(|name| (&**name, CONTROL)).collect()
    };
    assert_eq!(ends(&tokenizer(&of(0..5)), parts), set(&["<|over|>"]));
    // With the names of gpt-oss, also where a template does not tell.
    let named = parts.replace("stop", "end").replace("over", "return");
    let harmony = tokenizer(&of(0..8));
    let expected = set(&["<|return|>", "<|call|>"]);
    assert_eq!(ends(&harmony, &named), expected);
    let untold = turn_ends(&harmony, None).unwrap();
    assert_eq!(names(&harmony, &untold), expected);
    // An end that stands after the words of another part.
    let later = "{% for m in messages %}<open>{{ m.role }}<sep>{% if m.reasoning %}{{ m.reasoning }}<close>thoughts<sep>{% endif %}\
        {{ m.content }}<close>words<sep><fin>{% endfor %}";
    let tokens = ["<open>", "<sep>", "<close>", "<fin>"].map(|name| (name, CONTROL));
    assert_eq!(ends(&tokenizer(&tokens), later), set(&["<fin>"]));
    // Marks of reasoning and calls, whatever follows them.
    let marks = [
        ("<think>", USER_DEFINED),
        ("</think>", USER_DEFINED),
        ("<|fin|>", CONTROL),
    ];
    let source = "{% for m in messages %}{{ m.content }}</think><|fin|>{% endfor %}";
    assert_eq!(ends(&tokenizer(&marks), source), set(&["<|fin|>"]));
}

#[test]
fn known_names_end_turns_whatever_their_type() {
    for kind in [NORMAL, CONTROL, USER_DEFINED] {
        for name in [
            "<|end|>",
            "<end_of_turn>",
            "<|eot_id|>",
            "<|im_end|>",
            "<|eom_id|>",
        ] {
            let tokenizer = tokenizer(&[(name, kind), ("<|mark|>", kind)]);
            let found = turn_ends(&tokenizer, None).unwrap();
            assert_eq!(names(&tokenizer, &found), set(&[name]), "{kind}");
            // Nobody sees it, and no user's words become it.
            let id = tokenizer.id_of(name).unwrap();
            assert!(tokenizer.is_special(id));
            assert_eq!(tokenizer.decode(&[id], true).unwrap(), "");
            assert_eq!(tokenizer.encode(name, false).unwrap(), [id]);
            assert!(!tokenizer.encode_plain(name).unwrap().contains(&id));
            // A converted model's file keeps that.
            let again = Tokenizer::from_json(tokenizer.to_json().unwrap().as_bytes()).unwrap();
            assert!(again.is_special(id));
        }
    }
    // Words of HTML are tokens of some vocabularies.
    for (kind, expected) in [(NORMAL, &[][..]), (USER_DEFINED, &[]), (CONTROL, &["</s>"])] {
        let tokenizer = tokenizer(&[("</s>", kind)]);
        let found = turn_ends(&tokenizer, None).unwrap();
        assert_eq!(names(&tokenizer, &found), set(expected));
    }
}

#[test]
fn templates_that_tell_nothing_cost_little() {
    let tokens = [("<|fin|>", CONTROL), ("<|im_end|>", CONTROL)];
    let tokenizer = tokenizer(&tokens);
    let started = Instant::now();
    for source in [
        "{{ raise_exception('not today') }}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(45) %}{% set n.x = n.x ~ n.x %}{% endfor %}<|fin|>",
        "fixed<|fin|>",
    ] {
        assert_eq!(ends(&tokenizer, source), set(&["<|im_end|>"]), "{source}");
    }
    assert!(started.elapsed() < Duration::from_secs(20));
    let broken = ChatTemplate::named(&[("default".into(), "{% if %}".into())], None, None);
    let found = turn_ends(&tokenizer, Some(&broken)).unwrap();
    assert_eq!(names(&tokenizer, &found), set(&["<|im_end|>"]));
    // Contents in parts, and tools, for templates that want them.
    for source in [
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}<|fin|>{% endfor %}",
        "{% if not tools %}{{ raise_exception('tools!') }}{% endif %}{% for m in messages %}{{ m.content }}<|fin|>{% endfor %}",
    ] {
        assert_eq!(
            ends(&tokenizer, source),
            set(&["<|im_end|>", "<|fin|>"]),
            "{source}"
        );
    }
}

/// A template whose turns end with two tokens that also end questions: names decide.
const BY_NAME: [&str; 1] = ["Cohere2MoE"];

#[test]
fn turns_of_published_templates_end() {
    let Some(folder) = published() else {
        println!("SKIPPED: NVFP4_TEMPLATES names no folder of templates");
        return;
    };
    let golden = json("turn_ends.json");
    let dates = json("chat.json");
    let mut compared = 0;
    let mut wrong = Vec::new();
    for (name, expected) in golden["templates"].as_object().unwrap() {
        let source = super::published_template(&folder, &golden, name);
        let list = |key: &str| -> Vec<String> {
            serde_json::from_value::<Vec<String>>(expected[key].clone()).unwrap()
        };
        let (mut tokens, expected) = (list("tokens"), list("ends"));
        let (bos, eos) = (
            golden["bos"].as_str().unwrap(),
            golden["eos"].as_str().unwrap(),
        );
        tokens.extend([bos, eos].map(str::to_owned));
        tokens.sort_by_key(|token| std::cmp::Reverse(token.len()));
        tokens.dedup();
        // Under their own names, and under names that tell nothing.
        for renamed in [false, true] {
            if renamed && BY_NAME.contains(&name.as_str()) {
                continue;
            }
            let rename = |text: &str| {
                let mut chars = text.chars();
                let last = chars.next_back().unwrap_or_default();
                match renamed && (source.contains(text) || text == bos || text == eos) {
                    true => format!("{}Q{last}", chars.as_str()),
                    false => text.to_owned(),
                }
            };
            let mut written = source.clone();
            for token in &tokens {
                written = written.replace(token.as_str(), &rename(token));
            }
            let template = with_fixed_date(
                &dates,
                &written,
                &Value::from(rename(bos)),
                &Value::from(rename(eos)),
            );
            let own: Vec<String> = tokens.iter().map(|token| rename(token)).collect();
            let own: Vec<_> = own.iter().map(|token| (&**token, CONTROL)).collect();
            let tokenizer = tokenizer(&own);
            let found = turn_ends(&tokenizer, Some(&template)).unwrap();
            let found = names(&tokenizer, &found);
            let by_name = match renamed {
                true => BTreeSet::new(),
                false => names(&tokenizer, &turn_ends(&tokenizer, None).unwrap()),
            };
            let wanted: BTreeSet<_> = expected.iter().map(|end| rename(end)).collect();
            let others: Vec<_> = found.difference(&wanted).collect();
            if !wanted.is_subset(&found) || others.iter().any(|end| !by_name.contains(*end)) {
                wrong.push(format!("{name} {renamed}: {found:?}, not {wanted:?}"));
            }
            compared += 1;
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(compared, 2 * 75 - BY_NAME.len());
}

#[test]
fn templates_with_names_are_chosen_as_transformers_does() {
    let named = |names: &[&str]| {
        let entry = |name: &&str| {
            (
                (*name).to_owned(),
                format!("{name}: {{{{ messages | length }}}}"),
            )
        };
        ChatTemplate::named(&names.iter().map(entry).collect::<Vec<_>>(), None, None)
    };
    let tools: Value = serde_json::from_str(r#"{"tools": [{"type": "function"}]}"#).unwrap();
    let tools = tools.as_object().unwrap();
    let with_tools = |template: &ChatTemplate| {
        // Their templates are to read them.
        template.render_with(&[Message::new("user", "x")], true, tools)
    };
    let without = |template: &ChatTemplate| template.render(&[Message::new("user", "x")], true);
    let both = named(&["rag", "default"]);
    assert_eq!(without(&both).unwrap(), "default: 1");
    let reads = |name: &str| {
        (
            name.to_owned(),
            format!("{name} of {{{{ (tools or []) | length }}}}"),
        )
    };
    let both = ChatTemplate::named(&[reads("default"), reads("tool_use")], None, None);
    assert_eq!(without(&both).unwrap(), "default of 0");
    assert_eq!(with_tools(&both).unwrap(), "tool_use of 1");
    assert!(both.fault().is_none() && both.reads("tools"));
    let only = ChatTemplate::named(&[reads("rag"), reads("tool_use")], None, None);
    assert_eq!(with_tools(&only).unwrap(), "tool_use of 1");
    let said = without(&only).unwrap_err();
    assert_eq!(
        said.message(),
        "the model's chat templates are named 'rag', 'tool_use', and none is named 'default'"
    );
    // One that is broken does no harm to the other.
    let broken = ("tool_use".to_owned(), "{% if %}".to_owned());
    let half = ChatTemplate::named(&[reads("default"), broken], None, None);
    assert_eq!(without(&half).unwrap(), "default of 0");
    let said = with_tools(&half).unwrap_err();
    assert!(said.message().contains("does not parse"), "{said}");
    assert_eq!(half.fault().unwrap().message(), said.message());
}
