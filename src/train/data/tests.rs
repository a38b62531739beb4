//! Tests of rows in every format and form, and of refused rows.

use super::options::Format;
use super::row::Row;
use super::rows::rows;
use crate::text::Message;

fn read(content: &str, format: Format) -> Vec<(usize, std::result::Result<Row, String>)> {
    let rows = rows(content.as_bytes(), format, None).unwrap().into_iter();
    rows.map(|(line, row)| (line, row.map_err(|e| e.to_string())))
        .collect()
}

/// The row of a JSON object.
fn object(content: &str) -> std::result::Result<Row, String> {
    let mut rows = read(content, Format::Jsonl);
    assert_eq!(rows.len(), 1);
    rows.remove(0).1
}

fn pair(prompt: &str, target: &str) -> Row {
    Row::Pair {
        prompt: prompt.to_owned(),
        target: target.to_owned(),
    }
}

/// A conversation from roles, texts and weights.
fn chat(turns: &[(&str, &str, f32)]) -> Row {
    Row::Chat {
        messages: turns.iter().map(|t| Message::new(t.0, t.1)).collect(),
        weights: turns.iter().map(|t| t.2).collect(),
        tools: Vec::new(),
    }
}

#[track_caller]
fn refused(content: &str, words: &[&str]) {
    let error = object(content).unwrap_err();
    for words in words {
        assert!(error.contains(words), "'{words}' is not in: {error}");
    }
}

#[test]
fn lines_of_pairs() {
    let found = read(
        "\u{feff}# a comment\n\na\tb\r\nno tab\nx\ty\tz\n \tq\nc \t d\n\\#1?\tone\n\\\\#\t#\n\\a\tb\n",
        Format::Tsv,
    );
    assert_eq!(found[0], (3, Ok(pair("a", "b"))));
    assert_eq!(
        found[1],
        (
            4,
            Err("0 tabs, where one is to stand between prompt and target".to_owned())
        )
    );
    assert!(found[2].1.as_ref().unwrap_err().starts_with("2 tabs"));
    assert_eq!(found[3], (6, Err("the prompt is empty".to_owned())));
    assert_eq!(found[4], (7, Ok(pair("c ", " d"))));
    assert_eq!(found[5], (8, Ok(pair("#1?", "one"))));
    assert_eq!(found[6], (9, Ok(pair("\\#", "#"))));
    assert_eq!(found[7], (10, Ok(pair("\\a", "b"))));
    assert_eq!(found.len(), 8);
    let broken = rows(b"a\tb\n\xff\tc\n", Format::Tsv, None).unwrap();
    assert!(broken[1].0 == 2 && broken[1].1.is_err());
}

#[test]
fn objects_of_every_form() {
    let asked = [("user", "q", 0.0), ("assistant", "a", 1.0)];
    for (content, row) in [
        (
            r#"{"prompt": "q", "completion": "a", "id": 3}"#,
            pair("q", "a"),
        ),
        (
            r#"{"text": "t", "prompt": null}"#,
            Row::Text("t".to_owned()),
        ),
        (r#"{"question": "q", "answer": "a"}"#, pair("q", "a")),
        (
            r#"{"instruction": "q", "input": "", "output": "a"}"#,
            pair("q", "a"),
        ),
        (
            r#"{"instruction": "q", "input": "i", "output": "a"}"#,
            pair("q\n\ni", "a"),
        ),
        (
            r#"{"instruction": "q", "context": "i", "response": "a"}"#,
            pair("q\n\ni", "a"),
        ),
        (
            r#"{"instruction": "q", "output": "a", "system": "s", "history": [["x", "y"]]}"#,
            chat(&[
                ("system", "s", 0.0),
                ("user", "x", 0.0),
                ("assistant", "y", 1.0),
                asked[0],
                asked[1],
            ]),
        ),
        (
            r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "tools": null}"#,
            chat(&asked),
        ),
        (
            r#"{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "markdown": null}]}"#,
            chat(&asked),
        ),
        (
            r#"{"conversation": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}"#,
            chat(&asked),
        ),
        (
            r#"{"system": "s", "conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "a"}, {"from": "tool", "value": "r"}]}"#,
            chat(&[("system", "s", 0.0), asked[0], asked[1], ("tool", "r", 0.0)]),
        ),
        (
            r#"{"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "q"}],
                "completion": [{"role": "assistant", "content": "a"}]}"#,
            chat(&[
                ("user", "x", 0.0),
                ("assistant", "y", 0.0),
                asked[0],
                asked[1],
            ]),
        ),
    ] {
        assert_eq!(object(&content.replace('\n', " ")), Ok(row), "{content}");
    }
    let called = r#"{"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {}}"},
        {"from": "observation", "value": "r"}, {"from": "gpt", "value": "a"}], "tools": "[{\"name\": \"f\"}]"}"#;
    let Row::Chat {
        messages,
        weights,
        tools,
    } = object(&called.replace('\n', " ")).unwrap()
    else {
        panic!("it is no conversation");
    };
    assert_eq!(
        (&*messages[1].tool_calls[0].name, &*messages[2].role),
        ("f", "tool")
    );
    assert_eq!((weights, tools.len()), (vec![0.0, 1.0, 0.0, 1.0], 1));
}

#[test]
fn weights_of_messages() {
    let row = |assistant: &str, user: &str| {
        object(&format!(
            r#"{{"messages": [{{"role": "user", "content": "q"{user}}}, {{"role": "assistant", "content": "a"{assistant}}},
                {{"role": "user", "content": "q"}}, {{"role": "assistant", "content": "a", "weight": 1}}]}}"#
        ).replace('\n', " "))
    };
    for (said, weight) in [
        ("", 1.0),
        (r#", "weight": 0"#, 0.0),
        (r#", "train": false"#, 0.0),
        (r#", "train": true, "weight": 2.5"#, 2.5),
        (r#", "weight": 0.25"#, 0.25),
        (r#", "weight": null, "train": null"#, 1.0),
    ] {
        let Ok(Row::Chat { weights, .. }) = row(said, r#", "weight": 0"#) else {
            panic!("{said}");
        };
        assert_eq!(weights, [0.0, weight, 0.0, 1.0], "{said}");
    }
    for (assistant, user, words) in [
        (r#", "weight": -1"#, "", "message 1: weight is -1"),
        (r#", "weight": "1""#, "", "message 1: weight is \"1\""),
        (
            r#", "weight": 1e-60"#,
            "",
            "it is a number from 0, for context, on",
        ),
        (r#", "weight": 1e60"#, "", "message 1: weight is 1e+60"),
        (
            r#", "train": 1"#,
            "",
            "train is a number, not true or false",
        ),
        (
            r#", "train": false, "weight": 1"#,
            "",
            "weight is 1 and train false",
        ),
        (
            "",
            r#", "train": true"#,
            "message 0 is of role user, and is to be learned",
        ),
        ("", r#", "weight": 1"#, "message 0 is of role user"),
    ] {
        let error = row(assistant, user).unwrap_err();
        assert!(error.contains(words), "{error}");
    }
    refused(
        r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}]}"#,
        &["each of its 1 messages of the assistant is context"],
    );
    let prompt = r#"{"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "user", "content": "a"}]}"#;
    refused(
        prompt,
        &["none of the 1 messages of its completion is the assistant's"],
    );
}

#[test]
fn rows_of_no_form_or_of_two_are_refused() {
    for (content, words) in [
        ("{}", &["it has no key; a row has messages,"][..]),
        (
            "3",
            &["it is a number, not an object; a row is an object with messages,"],
        ),
        ("\"a\"", &["it is a text, not an object"]),
        ("true", &["it is a boolean"]),
        ("null", &["it is null"]),
        (r#"[{"text": "a"}]"#, &["it is an array", "is named .json"]),
        (
            r#"{"prompt": "a", "compl"#,
            &["it is not JSON: EOF while parsing a string, byte"],
        ),
        (
            "{'text': 'a'}",
            &["it is not JSON: key must be a string, byte 2"],
        ),
        ("nope", &["it is not JSON"]),
        (
            r#"{"text": "a", "text": "b"}"#,
            &["key 'text' is there twice"],
        ),
        (r#"{"text": 3}"#, &["text is a number, not a text"]),
        (r#"{"text": ""}"#, &["the text is empty"]),
        (
            r#"{"prompt": "a", "response": "b"}"#,
            &["it has the keys prompt, response; a row has"],
        ),
        (
            r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#,
            &["preferences (chosen and rejected)"],
        ),
        (
            r#"{"text": "t", "prompt": "a", "completion": "b"}"#,
            &[
                "it has the keys text, prompt, completion, which is a row of prompt and completion and one of text",
            ],
        ),
        (
            r#"{"prompt": "a", "completion": ""}"#,
            &["the completion is empty"],
        ),
        (
            r#"{"prompt": 1, "completion": 2}"#,
            &["prompt is a number and completion a number; both are texts"],
        ),
        (
            r#"{"prompt": "a", "completion": []}"#,
            &["prompt is a text and completion an array"],
        ),
        (
            r#"{"instruction": "a", "output": ""}"#,
            &["the output is empty"],
        ),
        (
            r#"{"instruction": "", "output": "a"}"#,
            &["the instruction is empty"],
        ),
        (
            r#"{"instruction": "a", "output": "b", "response": "c"}"#,
            &["output and response, which are two names of one field"],
        ),
        (
            r#"{"instruction": "a", "output": "b", "history": ["x"]}"#,
            &["element 0 of history is \"x\""],
        ),
        (
            r#"{"messages": "x"}"#,
            &["messages is a text that is no JSON"],
        ),
        (
            r#"{"messages": {}}"#,
            &["messages is an object, not an array"],
        ),
        (
            r#"{"messages": []}"#,
            &["none of its 0 messages is the assistant's"],
        ),
        (
            r#"{"messages": [{"role": "user", "content": "q"}]}"#,
            &["none of its 1 messages is the assistant's"],
        ),
        (
            r#"{"conversations": [{"from": "narrator", "value": "x"}]}"#,
            &["message 0: from is 'narrator'; it is one of human"],
        ),
        (
            r#"{"conversations": [{"from": "human"}]}"#,
            &["message 0: value is missing, not a text"],
        ),
        (
            r#"{"conversations": [{"from": "human", "value": "x", "loss": true}]}"#,
            &["key 'loss' is not known"],
        ),
        (
            r#"{"conversations": ["x"]}"#,
            &["message 0: is a text, not an object"],
        ),
        (
            r#"{"system": "s", "conversations": [{"from": "system", "value": "x"}, {"from": "gpt", "value": "x"}]}"#,
            &["a system key and a system message"],
        ),
    ] {
        refused(content, words);
    }
}

#[test]
fn arrays_of_json() {
    let rows = "[\n {\"text\": \"a\"},\n 3, {\"prompt\": \"q\",\n \"completion\": \"a\"}\n]";
    for content in [
        rows.to_owned(),
        format!("{{\"version\": 1, \"data\": {rows}}}"),
    ] {
        let found = read(&content, Format::Json);
        assert_eq!(found[0], (2, Ok(Row::Text("a".to_owned()))));
        assert!(found[1].0 == 3 && found[1].1.is_err());
        assert_eq!(found[2], (3, Ok(pair("q", "a"))));
    }
    assert!(read(" [] ", Format::Json).is_empty());
    for (content, words) in [
        (
            "[{\"text\": \"a\"}",
            "EOF while parsing a list, line 1, column 14",
        ),
        ("3", "neither an array of JSON objects"),
        ("{\"rows\": []}", "missing field `data`"),
        ("{\"text\": \"a\"}\n{\"text\": \"b\"}\n", "name it .jsonl"),
    ] {
        let error = rows_of_json(content).unwrap_err();
        assert!(error.contains(words), "{error}");
    }
}

fn rows_of_json(content: &str) -> std::result::Result<usize, String> {
    let found = rows(content.as_bytes(), Format::Json, None);
    found.map(|rows| rows.len()).map_err(|e| e.to_string())
}

#[test]
fn records_of_tables() {
    let found = read(
        "\u{feff}prompt,completion,id\r\n\"a, b\",\"say \"\"c\"\"\",1\r\n\r\n\"two\nlines\",d,2\ne,,3\nf,g\nh\",i,4\n\"j\",k,5\n",
        Format::Csv,
    );
    assert_eq!(found[0], (2, Ok(pair("a, b", "say \"c\""))));
    assert_eq!(found[1], (4, Ok(pair("two\nlines", "d"))));
    assert_eq!(found[2], (6, Err("the completion is empty".to_owned())));
    assert_eq!(found[3].0, 7);
    assert!(
        found[3]
            .1
            .as_ref()
            .unwrap_err()
            .contains("2 fields, and there are 3 columns: prompt, completion, id")
    );
    assert!(
        found[4]
            .1
            .as_ref()
            .unwrap_err()
            .contains("a quote is not closed")
    );
    assert_eq!(found[5], (9, Ok(pair("j", "k"))));
    let messages = "messages\n\"[{\"\"role\"\": \"\"user\"\", \"\"content\"\": \"\"q\"\"}, {\"\"role\"\": \"\"assistant\"\", \"\"content\"\": \"\"a\"\"}]\"\n";
    let asked = [("user", "q", 0.0), ("assistant", "a", 1.0)];
    assert_eq!(read(messages, Format::Csv), [(2, Ok(chat(&asked)))]);
    let alpaca = "instruction,input,output\nq,,a\nq,i,a\n";
    assert_eq!(read(alpaca, Format::Csv)[1], (3, Ok(pair("q\n\ni", "a"))));
    for (content, words) in [
        (
            "How?,So.\nWhat?,That.\n",
            "the first record names the columns, and it has the keys How?, So.",
        ),
        ("prompt;completion\na;b\n", "commas stand between columns"),
        (
            "text,id,text\na,1,b\n",
            "columns 1 and 3 are both called \"text\"",
        ),
        (
            "text,prompt,completion\na,b,c\n",
            "a row of prompt and completion and one of text",
        ),
        ("text,\"id\na,1\n", "line 1: a quote is not closed"),
    ] {
        let error = rows(content.as_bytes(), Format::Csv, None)
            .unwrap_err()
            .to_string();
        assert!(error.contains(words), "{error}");
    }
    assert!(rows(b"text\n", Format::Csv, None).unwrap().is_empty());
    assert!(rows(b"", Format::Csv, None).unwrap().is_empty());
}

#[test]
fn texts_are_split_where_they_are_asked_to_be() {
    assert_eq!(
        read("a\nb\n", Format::Text),
        [(1, Ok(Row::Text("a\nb\n".to_owned())))]
    );
    let split = |content: &str, separator| {
        let rows = rows(content.as_bytes(), Format::Text, Some(separator)).unwrap();
        let rows = rows.into_iter().map(|(line, row)| match row.unwrap() {
            Row::Text(text) => (line, text),
            other => panic!("{other:?}"),
        });
        rows.collect::<Vec<_>>()
    };
    let parts = |all: &[(usize, &str)]| -> Vec<(usize, String)> {
        all.iter()
            .map(|(line, text)| (*line, (*text).to_owned()))
            .collect()
    };
    assert_eq!(
        split("a\n---\nb\n---\n \n---\nc", "---\n"),
        parts(&[(1, "a\n"), (3, "b\n"), (7, "c")])
    );
    // The file's line ends, and mixed line ends.
    assert_eq!(
        split("a\r\n---\r\nb\n---\nc", "\n---\n"),
        parts(&[(1, "a"), (3, "b"), (5, "c")])
    );
    assert_eq!(
        split("a\n---\nb", "\r\n---\r\n"),
        parts(&[(1, "a"), (3, "b")])
    );
    assert_eq!(split("a---\r\nb", "---\n"), parts(&[(1, "a"), (2, "b")]));
    assert!(rows(b"", Format::Text, None).unwrap().is_empty());
    let error = rows(b"a\n--\nb", Format::Text, Some("\n---\n")).unwrap_err();
    assert!(
        error.to_string().contains("\"\\n---\\n\" does not occur"),
        "{error}"
    );
}
