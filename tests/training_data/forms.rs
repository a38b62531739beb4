//! Files and rows in the forms of users, empty reasoning, separators, and the output of `--show-mask`.

use std::io::Write;

use NVFP4::text::{Message, Prompt};
use NVFP4::train::data::EmptyThink;

use super::*;

/// The manner of Qwen3 with its choice: a prompt without reasoning has an empty one, which the last answer gets in any case.
fn thinking() -> String {
    let told = "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}";
    let (before, _) = THINKING.rsplit_once("{%- endif %}").unwrap();
    format!("{before}{told}")
}

fn refused(files: &[PathBuf], text: &SourceText, options: &Options, words: &[&str]) {
    let error = read(files, text, options).unwrap_err();
    for words in words {
        assert!(error.contains(words), "'{words}' is not in: {error}");
    }
}

#[test]
fn one_row_in_every_container() {
    let folder = Folder::new("containers");
    let text = text(None);
    let line = "{\"question\": \"a\", \"answer\": \"b\"}";
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(b"question,answer\na,b\n").unwrap();
    let gzip = gzip.finish().unwrap();
    let zstd = [
        0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x48, 0x21, 0x00, 0x00, b'a', b'\t', b'b', b'\n',
    ];
    let files = [
        folder.file("a.jsonl", line),
        folder.file("a.json", format!("[{line}]")),
        folder.file("b.json", format!("{{\"data\": [{line}]}}")),
        folder.file("a.csv.gz", &gzip),
        folder.file("A.TSV.ZST", zstd),
    ];
    let data = read(&files, &text, &Options::default()).unwrap();
    let said: Vec<String> = data.documents().iter().map(|d| marked(&text, d)).collect();
    assert_eq!(said, ["a[b<|endoftext|>]"; 5]);
    // The report counts the bytes of the file, not of its content.
    assert_eq!(data.report().files[3].bytes, gzip.len() as u64);
    let misnamed = folder.file("a.csv", &gzip);
    refused(
        &[misnamed],
        &text,
        &Options::default(),
        &["a.csv: it begins as gzip does", "a.csv.gz"],
    );
    let misnamed = folder.file("b.csv.gz", "question,answer\na,b\n");
    refused(
        &[misnamed],
        &text,
        &Options::default(),
        &["b.csv.gz: its name says gzip"],
    );
    let empty = folder.file("c.jsonl.gz", "");
    refused(&[empty], &text, &Options::default(), &["it is empty"]);
}

#[test]
fn a_separator_that_separates_nothing_is_refused() {
    let folder = Folder::new("separators");
    let text = text(None);
    let with = |separator: &str| Options {
        separator: Some(separator.to_owned()),
        ..Options::default()
    };
    let crlf = folder.file("crlf.txt", "one\r\n---\r\ntwo\r\n");
    let one = folder.file("one.txt", "one");
    let rows = folder.file("rows.tsv", "a\tb\n");
    let data = read(std::slice::from_ref(&crlf), &text, &with("\n---\n")).unwrap();
    assert_eq!(data.documents().len(), 2);
    let both = [crlf, one];
    refused(
        &both,
        &text,
        &with("\n---\n"),
        &["one.txt: the separator \"\\n---\\n\" does not occur"],
    );
    refused(&both, &text, &with(""), &["the separator is empty"]);
    refused(&[rows], &text, &with("\n"), &["no file is a text"]);
}

#[test]
fn empty_reasoning_is_learned_given_or_left_out() {
    let folder = Folder::new("empty-think");
    let text = text(Some(&thinking()));
    let file = folder.file("a.jsonl", CONVERSATION);
    let with = |empty_think| Options {
        empty_think,
        ..Options::default()
    };
    let said = |empty_think| {
        let data = read(std::slice::from_ref(&file), &text, &with(empty_think)).unwrap();
        let documents = data.documents().to_vec();
        let said: Vec<String> = documents.iter().map(|d| marked(&text, d)).collect();
        (documents, said)
    };
    let before = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n";
    let (_, learned) = said(EmptyThink::Learn);
    assert_eq!(
        learned[0],
        format!("{before}[<think>\n\n</think>\n\ntwo<|im_end|>]\n")
    );
    let (given, shown) = said(EmptyThink::Given);
    assert_eq!(
        shown[0],
        format!("{before}<think>\n\n</think>\n\n[two<|im_end|>]\n")
    );
    // An answer with reasoning of its own is learned with it.
    assert_eq!(shown[1], learned[1]);
    let (_, without) = said(EmptyThink::None);
    assert_eq!(without[0], format!("{before}[two<|im_end|>]\n"));
    // The given part equals the prompt of a model that is told not to reason, to the token.
    let messages = [
        Message::new("system", "Be brief."),
        Message::new("user", "one"),
    ];
    let mut variables = serde_json::Map::new();
    variables.insert("enable_thinking".to_owned(), false.into());
    let template = text.template.as_ref().unwrap();
    let prompt = Prompt::new(template, &text.tokenizer, &messages, true, &variables).unwrap();
    let prompt = prompt.tokens(&text.tokenizer, false).unwrap();
    let asked = given[0].learned.iter().position(|l| *l).unwrap();
    assert_eq!(given[0].tokens[..asked], prompt);

    // Where no template writes one, there is nothing that the option could say.
    let chatml = ChatTemplate::chatml();
    refused(
        std::slice::from_ref(&file),
        &self::super::text(Some(chatml.source())),
        &with(EmptyThink::Given),
        &[
            "writes no empty reasoning before any of 1 answers",
            "--empty-think",
        ],
    );
    let pair = folder.file("pair.tsv", "one\ttwo\n");
    refused(
        &[pair],
        &self::super::text(None),
        &with(EmptyThink::None),
        &["--empty-think"],
    );
    // A prompt that begins reasoning: its empty rest is given or learned, and cannot be left out.
    let opened = THINKING.replace(
        "'<|im_start|>assistant\\n' }}{%- endif",
        "'<|im_start|>assistant\\n<think>\\n' }}{%- endif",
    );
    let opened = self::super::text(Some(&opened));
    let pair = [folder.file(
        "pair.jsonl",
        "{\"prompt\": \"one\", \"completion\": \"two\"}",
    )];
    let data = read(&pair, &opened, &with(EmptyThink::Given)).unwrap();
    assert_eq!(
        marked(&opened, &data.documents()[0]),
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[two<|im_end|>]\n"
    );
    refused(
        &pair,
        &opened,
        &with(EmptyThink::None),
        &["begins reasoning, which cannot be left out"],
    );
    let all = Options {
        learn_all: true,
        ..with(EmptyThink::None)
    };
    refused(&[file], &text, &all, &["--train-on-all", "--empty-think"]);
}

/// `nvfp4 train --show-mask` on a model without a template.
fn show(folder: &Folder, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    command
        .args(["train", "--init"])
        .arg(golden("model/qwen3_tied"));
    command.current_dir(&folder.0).args(more);
    command.output().unwrap()
}

#[test]
fn rows_are_shown_with_what_is_learned_of_them() {
    let folder = Folder::new("mask");
    folder.file(
        "a.tsv",
        "# none\none\t\u{1b}[2J \"two\"<|im_end|>\nthree\tfour\n",
    );
    folder.file(
        "b.jsonl",
        r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0.5}]}"#,
    );
    let shown = show(&folder, &["--data", "a.tsv", "b.jsonl", "--show-mask", "1"]);
    let said = String::from_utf8(shown.stdout).unwrap();
    let lines: Vec<&str> = said.lines().collect();
    assert!(
        shown.status.success(),
        "{}",
        String::from_utf8_lossy(&shown.stderr)
    );
    assert!(lines[0].starts_with("row 1, a.tsv line 2: "), "{said}");
    assert_eq!(lines[1], "  \"one\"");
    // The name of a special token is text within quotes, and the token itself stands outside.
    assert!(
        lines[2].starts_with("+ \"\\u{1b}[2J \\\"two\\\"<|im_end|>\"<"),
        "{said}"
    );
    assert!(
        lines[3].starts_with("3 rows: ") && lines.len() == 4,
        "{said}"
    );
    let names = || {
        let entries = fs::read_dir(&folder.0).unwrap();
        entries.map(|e| e.unwrap().file_name()).collect::<Vec<_>>()
    };
    assert_eq!(names().len(), 2, "nothing is written");

    let shown = show(
        &folder,
        &[
            "--data",
            "b.jsonl",
            "--show-mask",
            "9",
            "--json",
            "--out",
            "out",
        ],
    );
    let said = String::from_utf8(shown.stdout).unwrap();
    let lines: Vec<Value> = said
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(lines.len(), 2);
    let count = lines[0]["tokens"].as_array().unwrap().len();
    for key in ["pieces", "special", "learned", "weights"] {
        assert_eq!(lines[0][key].as_array().unwrap().len(), count, "{key}");
    }
    let pieces = lines[0]["pieces"].as_array().unwrap().iter();
    let whole: String = pieces.map(|p| p.as_str().unwrap()).collect();
    assert_eq!(
        whole,
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    );
    for (learned, weight) in lines[0]["learned"]
        .as_array()
        .unwrap()
        .iter()
        .zip(lines[0]["weights"].as_array().unwrap())
    {
        assert_eq!(weight, if learned == true { 0.5 } else { 0.0 });
    }
    assert_eq!(
        lines[1]["weight"],
        0.5 * lines[1]["learned"].as_f64().unwrap()
    );
    assert_eq!(names().len(), 2, "nothing is written");

    for (options, code, words) in [
        (&["--data", "a.tsv"][..], 2, "--out"),
        (&["--data", "a.tsv", "--show-mask", "0"], 1, "at least 1"),
        (
            &[
                "--data",
                "a.tsv",
                "--show-mask",
                "1",
                "--resume",
                "--out",
                "x",
            ],
            2,
            "--resume",
        ),
        (
            &["--data", "a.tsv", "--show-mask", "1", "--separator", "x"],
            1,
            "no file is a text",
        ),
    ] {
        let output = show(&folder, options);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains(words), "{said}");
    }
}
