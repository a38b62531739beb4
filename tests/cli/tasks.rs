//! `nvfp4 perplexity --tasks`, against whole passes over each question with each choice.

use NVFP4::engine::Served;
use NVFP4::model::{Device, KvType, LoadOptions, Logits};

use super::*;

const QUESTIONS: &str = r#"{"question": "The first word is", "choices": ["one", "two words", "three of them"], "answer": 0}

{"question": "What follows?\n", "choices": ["nothing", "some more of it"], "answer": "B"}
{"ctx": "An ending that", "endings": ["ends", "goes on and on", "x", "begins anew"], "label": "2"}
{"query": "It was", "choices": [" a day", " night", "ly"], "gold": 2}
{"question": "Right:", "choices": {"text": ["no", "yes"], "label": ["1", "2"]}, "answerKey": "2"}
{"question": "Say", "choices": ["abc", "abd"], "answer": "abc"}
"#;

/// The choices for each question of a file, by the whole log-probability and by that over bytes.
fn chosen(model: &str) -> Vec<[usize; 2]> {
    let device = Device::cpu(Some(2)).unwrap();
    let options = LoadOptions::new(device.clone());
    let model = Served::load(Path::new(model), &options).unwrap();
    let tokenizer = model.tokenizer().unwrap();
    let score = |question: &str, choice: &str| -> [f64; 2] {
        let is_apart = question.ends_with('\n') || choice.starts_with(' ');
        let text = format!("{question}{}{choice}", if is_apart { "" } else { " " });
        let tokens = tokenizer.encode(&text, true).unwrap();
        let own = tokenizer.encode(question, true).unwrap();
        let first = own.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
        let mut cache = model.sequence(tokens.len(), KvType::F32).unwrap();
        let mut logits = Vec::new();
        model
            .forward(
                &tokens,
                &mut cache,
                &mut Default::default(),
                Logits::All,
                &mut logits,
            )
            .unwrap();
        let vocabulary = model.spec().vocab_size;
        let each = (first..tokens.len()).map(|i| {
            let row = &logits[(i - 1) * vocabulary..i * vocabulary];
            let sum: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
            f64::from(row[tokens[i] as usize]) - sum.ln()
        });
        let sum: f64 = each.sum();
        [sum, sum / choice.len() as f64]
    };
    let rows = QUESTIONS.lines().filter(|line| !line.is_empty());
    let rows = rows.map(|line| {
        let row: Value = serde_json::from_str(line).unwrap();
        let of = |names: &[&str]| names.iter().map(|n| &row[n]).find(|v| !v.is_null());
        let question = of(&["question", "query", "ctx"]).unwrap().as_str().unwrap();
        let choices = of(&["choices", "endings"]).unwrap();
        let choices = choices.as_array().or(choices["text"].as_array()).unwrap();
        let scores: Vec<[f64; 2]> = choices
            .iter()
            .map(|choice| score(question, choice.as_str().unwrap()))
            .collect();
        [0, 1].map(|way| {
            let best = (0..scores.len()).max_by(|&a, &b| scores[a][way].total_cmp(&scores[b][way]));
            best.unwrap()
        })
    });
    rows.collect()
}

/// The right choices of [`QUESTIONS`].
const ANSWERS: [usize; 6] = [0, 1, 2, 2, 1, 0];

#[test]
fn tasks_are_scored_as_whole_passes_score_them() {
    let scratch = Scratch::new("tasks");
    let file = scratch.file("questions.jsonl", QUESTIONS.as_bytes());
    let first = QUESTIONS.lines().next().unwrap();
    let single = scratch.file("single.jsonl", first.as_bytes());
    let reference = "tests/golden/model/qwen2_massive";
    // Its tokenizer is that of the other golden model of 320 tokens.
    let other = scratch.path("other");
    fs::create_dir(&other).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(format!("{reference}/{name}"), format!("{other}/{name}")).unwrap();
    }
    fs::copy(
        format!("{MODEL}/tokenizer.json"),
        format!("{other}/tokenizer.json"),
    )
    .unwrap();
    let args = [
        "perplexity",
        "--model",
        MODEL,
        "--reference",
        &other,
        "--kv",
        "f32",
        "--tasks",
        &file,
        &single,
    ];
    let report = json(&args);
    assert!(report["perplexity"].is_null() && report["reference"].is_null());
    let sets = report["tasks"].as_array().unwrap();
    assert_eq!((sets.len(), &sets[0]["questions"]), (2, &Value::from(6)));
    assert_eq!(sets[0]["file"], file);
    let (own, others) = (chosen(MODEL), chosen(&other));
    assert_ne!(own, others);
    let hits = |choices: &[[usize; 2]], way: usize| {
        let both = choices.iter().zip(ANSWERS);
        both.filter(|(choice, answer)| choice[way] == *answer)
            .count() as f64
    };
    let close = |found: &Value, expected: f64| {
        let found = found.as_f64().unwrap();
        assert!((found - expected).abs() < 1e-12, "{found}, {expected}");
    };
    for (set, choices) in [(&sets[0], &own), (&sets[0]["reference"], &others)] {
        for (way, name) in ["accuracy", "accuracy_norm"].into_iter().enumerate() {
            let share = hits(choices, way) / 6.0;
            close(&set[name], share);
            let stderr = (share * (1.0 - share) / 5.0).sqrt();
            close(&set[format!("{name}_stderr")], stderr);
        }
    }
    for (way, name) in ["same_choice", "same_choice_norm"].into_iter().enumerate() {
        let both = own.iter().zip(&others);
        let same = both.filter(|(a, b)| a[way] == b[way]).count();
        close(&sets[0]["reference"][name], same as f64 / 6.0);
    }
    assert!(sets[1]["accuracy_stderr"].is_null());

    let words = scratch.file("words.txt", "Some words to read. ".repeat(8).as_bytes());
    let said = text(&[&args[..9], &["--text", &words, "--window", "32"]].concat());
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].starts_with("perplexity ") && lines[1].starts_with("reference "));
    assert!(
        lines[2].contains("questions.jsonl: 6 questions; accuracy "),
        "{said}"
    );
    assert!(
        lines[3].contains("same choice ") && lines.len() == 4,
        "{said}"
    );
}

#[test]
fn tasks_that_cannot_be_used() {
    let scratch = Scratch::new("bad-tasks");
    let good = r#"{"question": "q", "choices": ["x", "y"], "answer": 0}"#;
    let long = format!(
        r#"{{"question": "{}", "choices": ["x", "y"], "answer": 0}}"#,
        "many words ".repeat(200)
    );
    for (content, needle) in [
        (String::new(), "has no question; each line is a JSON object"),
        (format!("{good}\n{{"), "line 2: it is not JSON"),
        (
            format!("\n{good}\n{{\"question\": \"q\"}}"),
            "line 3: it has no key and no choices; a row has question, choices and answer",
        ),
        (
            good.replace(": 0", ": 7"),
            "line 1: answer is choice 7, and there are 2, counted from 0",
        ),
        (
            format!("{good}\n{long}"),
            "line 2: the question with choice 0 has",
        ),
    ] {
        let file = scratch.file("bad.jsonl", content.as_bytes());
        let said = failure(&["perplexity", "--model", MODEL, "--tasks", &file]);
        assert!(
            said.contains(needle) && said.contains("bad.jsonl"),
            "{said}"
        );
    }
    let said = failure(&["perplexity", "--model", MODEL, "--tasks", "/no/such"]);
    assert!(said.contains("/no/such"), "{said}");
    let neither = nvfp4(&["perplexity", "--model", MODEL]);
    assert_eq!(neither.status.code(), Some(2));
}
