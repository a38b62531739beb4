//! Roles of special tokens, by templates as model families write them.

use std::collections::BTreeMap;

use NVFP4::base::files::Files;
use NVFP4::text::TokenRole::{self, *};
use NVFP4::text::{AnswerForm, ChatTemplate, Tokenizer, read_files, special_tokens};

use super::golden;
use super::turn_ends::{CONTROL, USER_DEFINED, tokenizer};

/// The roles of each token by its name.
fn roles(
    tokenizer: &Tokenizer,
    source: &str,
    known: &[(TokenRole, &str)],
) -> BTreeMap<String, Vec<TokenRole>> {
    let template = ChatTemplate::from_jinja(source, Some("<s>"), Some("</s>")).unwrap();
    let is_token = |name: &str| tokenizer.id_of(name).is_some();
    let form = AnswerForm::of(source, template.reads("tools"), is_token);
    let known: Vec<_> = known
        .iter()
        .map(|&(role, name)| (role, tokenizer.id_of(name).unwrap()))
        .collect();
    let found = special_tokens(tokenizer, &template, true, &form, &known).unwrap();
    assert!(found.is_sorted_by(|a, b| a.token < b.token));
    let named = found.into_iter().map(|special| {
        let name = tokenizer.text_of(special.token).unwrap();
        (name, special.roles)
    });
    named.collect()
}

#[test]
fn marks_of_turns_reasoning_and_calls_have_their_roles() {
    let chatml = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n\
        {% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if tools %}<tool_call>\n{\"name\": </tool_call>{% endif %}";
    let llama3 = "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}";
    let mistral = "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}\
        [TOOL_CALLS]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}";
    let harmony = "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}{{ tools }}";
    for (source, tokens, known, expected) in [
        (
            chatml,
            &[
                ("<|endoftext|>", CONTROL),
                ("<|im_start|>", CONTROL),
                ("<|im_end|>", CONTROL),
                ("<|vision_pad|>", CONTROL),
                ("<think>", USER_DEFINED),
                ("</think>", USER_DEFINED),
                ("<tool_call>", USER_DEFINED),
                ("</tool_call>", USER_DEFINED),
                ("<tool_response>", USER_DEFINED),
            ][..],
            &[
                (EndsText, "<|im_end|>"),
                (Padding, "<|endoftext|>"),
                (EndsGeneration, "<|im_end|>"),
                (EndsGeneration, "<|endoftext|>"),
            ][..],
            &[
                ("<|endoftext|>", &[EndsGeneration, Padding, EndsTurn][..]),
                ("<|im_start|>", &[BeginsTurn]),
                ("<|im_end|>", &[EndsText, EndsGeneration, EndsTurn]),
                ("<|vision_pad|>", &[]),
                ("<think>", &[BeginsReasoning]),
                ("</think>", &[EndsReasoning]),
                ("<tool_call>", &[BeginsToolCall]),
                ("</tool_call>", &[EndsToolCall]),
            ][..],
        ),
        (
            llama3,
            &[
                ("<|begin_of_text|>", CONTROL),
                ("<|eot_id|>", CONTROL),
                ("<|start_header_id|>", CONTROL),
                ("<|end_header_id|>", CONTROL),
            ],
            &[(BeginsText, "<|begin_of_text|>")],
            &[
                ("<|begin_of_text|>", &[BeginsText]),
                ("<|eot_id|>", &[EndsTurn]),
                ("<|start_header_id|>", &[BeginsTurn]),
                ("<|end_header_id|>", &[]),
            ],
        ),
        (
            mistral,
            &[
                ("<s>", CONTROL),
                ("</s>", CONTROL),
                ("[INST]", CONTROL),
                ("[/INST]", CONTROL),
                ("[TOOL_CALLS]", CONTROL),
            ],
            &[(BeginsText, "<s>"), (EndsText, "</s>")],
            &[
                ("<s>", &[BeginsText]),
                ("</s>", &[EndsText, EndsTurn]),
                ("[INST]", &[BeginsTurn]),
                ("[/INST]", &[BeginsTurn]),
                ("[TOOL_CALLS]", &[BeginsToolCall]),
            ],
        ),
        (
            harmony,
            &[
                ("<|return|>", CONTROL),
                ("<|call|>", CONTROL),
                ("<|start|>", CONTROL),
                ("<|channel|>", CONTROL),
                ("<|message|>", CONTROL),
                ("<|end|>", CONTROL),
            ],
            &[],
            &[
                ("<|return|>", &[EndsTurn]),
                ("<|call|>", &[EndsToolCall, EndsTurn]),
                ("<|start|>", &[BeginsTurn]),
                ("<|channel|>", &[]),
                ("<|message|>", &[]),
                ("<|end|>", &[EndsReasoning]),
            ],
        ),
    ] {
        let found = roles(&tokenizer(tokens), source, known);
        let expected = expected.iter();
        let expected: BTreeMap<_, _> = expected
            .map(|&(name, roles)| (name.to_owned(), roles.to_vec()))
            .collect();
        assert_eq!(found, expected, "{source}");
    }
}

/// Files of transformers name tokens by their texts; the map of special tokens fills what the other file lacks.
#[test]
fn the_files_of_a_directory_name_roles() {
    let directory = std::env::temp_dir().join(format!("nvfp4-special-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    std::fs::copy(golden("tokenizer.json"), directory.join("tokenizer.json")).unwrap();
    let write = |name: &str, text: &str| std::fs::write(directory.join(name), text).unwrap();
    write(
        "tokenizer_config.json",
        r#"{"bos_token": null, "eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>", "cls_token": "no token"}"#,
    );
    let map = r#"{"bos_token": "<|im_start|>", "pad_token": "<|im_start|>", "mask_token": {"content": "<think>"}}"#;
    write("special_tokens_map.json", map);
    let named = || {
        let files = read_files(&Files::Disk, &directory).unwrap();
        let tokenizer = files.tokenizer.unwrap();
        let roles = files.roles.into_iter();
        let named = roles.map(|(role, id)| (role, tokenizer.text_of(id).unwrap()));
        named.collect::<Vec<_>>()
    };
    let of = |role, name: &str| (role, name.to_owned());
    let (eos, padding) = (of(EndsText, "<|im_end|>"), of(Padding, "<|endoftext|>"));
    let all = [
        of(BeginsText, "<|im_start|>"),
        eos.clone(),
        padding.clone(),
        of(Mask, "<think>"),
    ];
    assert_eq!(named(), all);
    // Nothing else needs the map.
    write("special_tokens_map.json", "{");
    assert_eq!(named(), [eos, padding]);
    std::fs::remove_dir_all(&directory).unwrap();
}
