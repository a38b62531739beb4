//! The `nvfp4` command from outside: output, JSON and exit codes.

#[path = "cli/calibrated.rs"]
mod calibrated;
#[path = "cli/compare.rs"]
mod compare;
#[path = "cli/guard.rs"]
mod guard;
#[path = "cli/packed.rs"]
mod packed;
#[path = "cli/tasks.rs"]
mod tasks;

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("nvfp4-cli-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    /// A file with this content, by its path.
    fn file(&self, name: &str, content: &[u8]) -> String {
        let path = self.path(name);
        fs::create_dir_all(self.0.join(name).parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    /// A copy of the golden model with one file changed: its content with `change` applied.
    fn model(&self, name: &str, changed: &str, change: impl Fn(Vec<u8>) -> Vec<u8>) -> String {
        for file in ["config.json", "tokenizer.json", "model.safetensors"] {
            let content = fs::read(format!("{MODEL}/{file}")).unwrap();
            self.file(&format!("{name}/{file}"), &content);
        }
        let path = format!("{name}/{changed}");
        let old = fs::read(self.path(&path)).unwrap_or_default();
        self.file(&path, &change(old));
        self.path(name)
    }

    /// The names of the files inside, sorted.
    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(&self.0)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The command, with GPUs hidden unless its arguments ask for one, because answers are compared and its output is counted.
fn nvfp4(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    if !args.contains(&"--device") {
        command.env("CUDA_VISIBLE_DEVICES", "");
    }
    command.args(args).output().unwrap()
}

fn text(args: &[&str]) -> String {
    let output = nvfp4(args);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&text(&[args, &["--json"]].concat())).unwrap()
}

/// The message of a call that must fail with exit code 1.
fn failure(args: &[&str]) -> String {
    failed(&nvfp4(args), args)
}

/// The message of an output that must be a failure: exit code 1, one line on standard error, nothing on standard output.
fn failed(output: &Output, what: impl std::fmt::Debug) -> String {
    let said = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(1), "{what:?}: {said}");
    assert!(output.stdout.is_empty(), "{what:?}");
    let line = said.strip_suffix('\n').unwrap_or_default();
    assert!(
        line.starts_with("nvfp4: ") && !line.contains('\n'),
        "{what:?}: {said}"
    );
    line.to_owned()
}

/// The output of `args` while no file may grow beyond `kilobytes`, which to the command looks like a full disk.
fn on_a_full_disk(kilobytes: u32, args: &[&str], input: &str) -> Output {
    let mut child = Command::new("sh")
        .arg("-c")
        .arg(format!(
            "trap '' XFSZ; ulimit -f {}; exec \"$0\" \"$@\"",
            2 * kilobytes
        ))
        .arg(env!("CARGO_BIN_EXE_nvfp4"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that needs no input may be gone already.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

#[test]
fn wrong_usage_exits_with_2() {
    for args in [
        &["no-such-command"][..],
        &[],
        &["quantize", "only-one"],
        &["synth", "--arch", "gpt-5", "--out", "x"],
        &["pull", "a/b", "--timeout", "-1"],
        &["run", "--prompt", "x"],
        &[
            "run",
            "--model",
            MODEL,
            "--prompt",
            "x",
            "--prompt-file",
            "f",
        ],
        &[
            "run",
            "--model",
            MODEL,
            "--prompt",
            "x",
            "--max-tokens",
            "-1",
        ],
        &["run", "--model", MODEL, "--prompt", "x", "--temp", "warm"],
        &["run", "--model", MODEL, "--prompt", "x", "--kv", "f64"],
        &["run", "--model", MODEL, "--prompt", "x", "--context", "1e3"],
        &["quantize", "a", "b", "--format", "gguf"],
    ] {
        let output = nvfp4(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(
            output.stdout.is_empty() && !output.stderr.is_empty(),
            "{args:?}"
        );
    }
    assert!(text(&["--help"]).contains("quantize"));
    assert!(text(&["--version"]).contains(env!("CARGO_PKG_VERSION")));
}

#[test]
fn failures_exit_with_1_and_name_the_cause() {
    let scratch = Scratch::new("failures");
    assert!(failure(&["inspect", "/no/such/file"]).contains("/no/such/file"));
    assert!(failure(&["pull", "notanid"]).contains("ORG/NAME"));
    let empty = scratch.path("empty.gguf");
    std::fs::write(&empty, b"").unwrap();
    assert!(failure(&["inspect", &empty]).contains("empty.gguf"));
    assert!(failure(&["quantize", &empty, &scratch.path("out")]).contains("empty.gguf"));
    assert!(!scratch.0.join("out").exists());
}

#[test]
fn a_reader_that_leaves_ends_a_command_quietly() {
    let script = format!("\"$0\" inspect {MODEL} --json | true; echo \"${{PIPESTATUS[0]}}\"");
    // The reader is gone before the writer begins.
    let script = script.replace("\"$0\" inspect", "{ sleep 0.3; exec \"$0\" inspect");
    let script = script.replace(" | true", "; } | true");
    let output = Command::new("bash")
        .args(["-c", &script, env!("CARGO_BIN_EXE_nvfp4")])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "141\n");
}

#[test]
fn diagnose_names_backends_and_reasons() {
    let report = json(&["diagnose"]);
    let backends = report["backends"].as_array().unwrap();
    assert_eq!(backends[1]["name"], "cuda");
    assert_eq!(backends[0]["name"], "cpu");
    assert_eq!(backends[0]["available"], true);
    for backend in backends {
        assert!(
            backend["available"] == true || backend["reason"].is_string(),
            "{backend}"
        );
    }
    let said = text(&["diagnose"]);
    assert!(said.contains("cpu"));
    let host = &report["memory"]["host"];
    assert!(host["total"].as_u64() >= host["available"].as_u64() && host["total"].is_u64());
    assert!(said.contains("\nmemory: "), "{said}");
    match host["limit"]["file"].as_str() {
        Some(file) => assert!(said.contains(&format!("; {file} limits it\n")), "{said}"),
        None => assert!(said.contains(" available\n"), "{said}"),
    }
    let cuda = &backends[1];
    for part in [&cuda["nvrtc"], cuda] {
        assert_ne!(part["available"] == true, part["reason"].is_string());
    }
    match cuda["reason"].as_str() {
        Some(reason) => assert!(
            said.contains(&format!("cuda: unavailable, {reason}")),
            "{said}"
        ),
        None => {
            let device = &cuda["devices"][0];
            assert!(device["total_bytes"].as_u64() >= device["free_bytes"].as_u64());
            for known in [&device["name"], &cuda["driver_version"]] {
                assert!(said.contains(known.as_str().unwrap()), "{said}");
            }
        }
    }
}

/// Embedded kernels need no compiler, but a missing component is reported all the same.
#[test]
fn diagnose_names_a_compiler_that_is_not_there() {
    let output = Command::new(env!("CARGO_BIN_EXE_nvfp4"))
        .args(["diagnose", "--json"])
        .env("NVFP4_NVRTC", "/nowhere/libnvrtc.so.13")
        .output()
        .unwrap();
    assert!(output.status.success());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let nvrtc = &report["backends"][1]["nvrtc"];
    assert_eq!(nvrtc["available"], false);
    let reason = nvrtc["reason"].as_str().unwrap();
    for part in ["NVFP4_NVRTC", "/nowhere/libnvrtc.so.13", "it takes"] {
        assert!(reason.contains(part), "{reason}");
    }
}

const MODEL: &str = "tests/golden/model/qwen3_tied";

/// The memory of a model is planned without loading it; sizes have the units that people read.
#[test]
fn inspect_plans_memory() {
    fn plan<'a>(more: &[&'a str]) -> Vec<&'a str> {
        let common = ["inspect", MODEL, "--device", "cpu", "--threads", "1"];
        [&common[..], more].concat()
    }
    let wanted = ["--context", "64", "--conversations", "3", "--memory", "1"];
    let planned = json(&plan(&wanted));
    assert_eq!(
        (&planned["context"], &planned["sequences"]),
        (&64.into(), &3.into())
    );
    let of_token = planned["kv_bytes_per_token"].as_u64().unwrap();
    assert_eq!(planned["kv_bytes"], 3 * 64 * of_token);
    assert_eq!(planned["free_bytes"], 1_000_000_000);
    assert_eq!(planned["weights"]["device"], 0);
    let quantized = json(&plan(&["--quantize", "amax"]));
    let weights = |plan: &Value| plan["weights"]["host"].as_u64().unwrap();
    assert!(weights(&quantized) < weights(&planned));
    let table = text(&plan(&wanted));
    let fit = planned["sequences_that_fit"].as_u64().unwrap();
    assert!(
        fit > 3 && table.contains(&format!("for {fit} conversations in 1.0 GB")),
        "{table}"
    );
    assert!(table.contains("3 conversations of 64 tokens"), "{table}");
    let e = failure(&plan(&["--context", "9999"]));
    assert!(e.contains("a context of 9999 positions"), "{e}");
    assert_eq!(
        nvfp4(&["inspect", MODEL, "--context", "64"]).status.code(),
        Some(2)
    );
}

const EMBEDDER: &str = "tests/golden/embedding/qwen3";

#[test]
fn texts_are_embedded() {
    fn embed<'a>(more: &[&'a str]) -> Vec<&'a str> {
        let common = [
            "embed",
            "--model",
            EMBEDDER,
            "--device",
            "cpu",
            "--threads",
            "1",
        ];
        [&common[..], more].concat()
    }
    let lines = |said: String| -> Vec<Value> {
        let each = said.lines().map(serde_json::from_str);
        each.collect::<Result<_, _>>().unwrap()
    };
    let texts = ["The capital of China is Beijing.", "Gravity is a force."];
    let found = lines(text(&embed(&[texts[0], texts[1], "--json"])));
    assert_eq!((found.len(), &found[1]["text"]), (2, &texts[1].into()));
    let rows: Vec<Vec<f64>> = found
        .iter()
        .map(|line| serde_json::from_value(line["embedding"].clone()).unwrap())
        .collect();
    let cosine: f64 = rows[0].iter().zip(&rows[1]).map(|(a, b)| a * b).sum();
    let table = text(&embed(&texts));
    assert!(
        table.contains(&format!("\n  0  1.0000 {cosine:>7.4}\n")),
        "{cosine}: {table}"
    );
    assert!(table.contains("cosines of 48 dimensions"), "{table}");
    let scratch = Scratch::new("embed");
    let file = scratch.path("texts");
    std::fs::write(&file, texts.join("\n")).unwrap();
    assert_eq!(lines(text(&embed(&["--texts", &file, "--json"]))), found);
    let each = ["a", "--pooling", "none", "--dimensions", "4", "--json"];
    let each = lines(text(&embed(&each)));
    let rows = each[0]["rows"].as_array().unwrap();
    assert_eq!((rows.len(), &each[0]["tokens"]), (2, &2.into()));
    assert!(rows.iter().all(|row| row.as_array().unwrap().len() == 4));
    for (more, says) in [
        (&["a", "--prompt-name", "quest"][..], "query, document"),
        (&["a", "--dimensions", "49"], "an embedding that has 48"),
        (
            &["a", "--pooling", "none"],
            "print the rows of tokens with --json",
        ),
    ] {
        let e = failure(&embed(more));
        assert!(e.contains(says), "{e}");
    }
    let plain = ["embed", "--model", MODEL, "--device", "cpu", "a"];
    assert!(failure(&plain).contains("names no pooling"));
    assert_eq!(nvfp4(&embed(&[])).status.code(), Some(2));
}

#[test]
fn bench_counts_drafts() {
    let model = "tests/golden/model/qwen35_drafter";
    let bench = ["bench", "--model", model, "--runs", "1"];
    let few = ["--prompt-tokens", "8", "--gen-tokens", "12"];
    let with = |more: &[&str]| json(&[&bench[..], &few, more].concat())["drafts"].clone();
    assert!(with(&[]).is_null());
    assert_eq!(with(&["--drafts", "0"])["drafted"], 0);
    assert!(with(&["--drafts", "2"])["drafted"].as_u64().unwrap() >= 8);
    let together = [&bench[..], &["--drafts", "2", "--batch", "2"]].concat();
    let e = failure(&together);
    assert!(e.contains("--drafts with --batch 2"), "{e}");
}

#[test]
fn run_gives_the_same_tokens_with_and_without_the_cache() {
    let prompt = ["run", "--model", MODEL, "--prompt", "Hello there"];
    let seeded = |seed: &str, more: &[&str]| {
        let sampled = ["--max-tokens", "20", "--ignore-stops", "--temp", "1.5"];
        let out = json(&[&prompt[..], &sampled, &["--seed", seed], more].concat());
        assert_eq!(out["finish"], "length");
        assert!(out["timings"]["prefill_seconds"].as_f64().unwrap() > 0.0);
        (out["prompt_tokens"].clone(), out["tokens"].clone())
    };
    let tokens = |more: &[&str]| seeded("0", more);
    let cached = tokens(&[]);
    assert_eq!(cached.1.as_array().unwrap().len(), 20);
    assert_eq!(tokens(&["--replay"]), cached);
    assert_ne!(seeded("1", &[]), cached);
    let greedy = tokens(&["--top-k", "1"]);
    assert_ne!(greedy, cached);
    assert_eq!(tokens(&["--top-p", "0"]), greedy);
    let raw = tokens(&["--raw"]);
    assert_ne!(raw, cached);
    assert_eq!(tokens(&["--raw", "--token-by-token"]), raw);
    assert_eq!(tokens(&["--raw", "--replay"]), raw);
    assert_eq!(tokens(&["--drafts", "0"]), cached);

    let drafts = [&prompt[..], &["--drafts", "2"]].concat();
    let e = failure(&drafts);
    assert!(
        e.contains("drafts of a qwen3 model without a drafter"),
        "{e}"
    );
    let e = failure(&["run", "--model", MODEL, "--prompt", "x", "--context", "4"]);
    assert!(e.contains("the context holds 4"), "{e}");
    let e = failure(&["run", "--model", MODEL, "--prompt", "x", "--top-p", "2"]);
    assert!(e.contains("top_p is 2"), "{e}");
    for args in [
        &["run", "--model", MODEL][..],
        &["run", "--model", MODEL, "--prompt", "x", "--token-by-token"],
    ] {
        assert_eq!(nvfp4(args).status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn samplers_of_the_command_decide_on_tokens() {
    let run = ["run", "--model", MODEL, "--prompt", "Hello there", "--raw"];
    let greedy = ["--temp", "0", "--max-tokens", "40", "--ignore-stops"];
    let tokens = |more: &[&str]| {
        let out = json(&[&run[..], &greedy, more].concat());
        let tokens = out["tokens"].as_array().unwrap().iter();
        tokens.map(|t| t.as_u64().unwrap()).collect::<Vec<_>>()
    };
    let repeats = |tokens: &[u64]| {
        let mut pairs: Vec<_> = tokens.windows(2).collect();
        pairs.sort_unstable();
        pairs.windows(2).any(|two| two[0] == two[1])
    };
    let plain = tokens(&[]);
    assert!(repeats(&plain), "{plain:?}");
    let ngrams = tokens(&["--no-repeat-ngram-size", "2"]);
    assert!(!repeats(&ngrams), "{ngrams:?}");
    let dry = [
        "--dry-multiplier",
        "1e6",
        "--dry-allowed-length",
        "1",
        "--dry-sequence-breaker",
        "none",
    ];
    assert_eq!(tokens(&dry), ngrams);
    assert_ne!(tokens(&[&dry[..], &["--dry-window", "3"]].concat()), ngrams);
    // With the breakers that come of themselves, of which this text has some, or with another base, it differs.
    assert_eq!(tokens(&["--dry-multiplier", "0"]), plain);
    let soft = |more: &[&str]| {
        let dry = ["--dry-multiplier", "0.01", "--dry-sequence-breaker", "none"];
        tokens(&[&dry[..], more].concat())
    };
    assert_ne!(soft(&["--dry-base", "4"]), soft(&["--dry-base", "1"]));
    // Filters leave the argmax, or exclude it.
    assert_eq!(tokens(&["--top-n-sigma", "0.5"]), plain);
    assert_ne!(tokens(&["--typical-p", "0.01"]), plain);
    let xtc = ["--xtc-probability", "1", "--xtc-threshold"];
    assert_ne!(tokens(&[&xtc[..], &["0.004"]].concat()), plain);
    assert_eq!(tokens(&[&xtc[..], &["0.9"]].concat()), plain);
    // A window without a penalty changes nothing.
    assert_eq!(tokens(&["--repetition-window", "5"]), plain);
    let penalty = ["--repetition-penalty", "1.3"];
    assert_ne!(
        tokens(&[&penalty[..], &["--repetition-window", "3"]].concat()),
        tokens(&penalty)
    );
    // A stop string that comes early is passed over.
    let stopped = |more: &[&str]| {
        let out = json(&[&run[..], &greedy, &["--stop", "e"], more].concat());
        out["tokens"].as_array().unwrap().len()
    };
    let early = stopped(&[]);
    let least = (early + 1).to_string();
    assert!(stopped(&["--min-tokens", &least]) > early);
}

#[test]
fn chat_takes_turns_from_a_pipe() {
    let scratch = Scratch::new("chat");
    let saved = scratch.path("saved");
    let chat = |lines: &[u8]| {
        let mut child = Command::new(env!("CARGO_BIN_EXE_nvfp4"))
            .args([
                "chat",
                "--model",
                MODEL,
                "--max-tokens",
                "6",
                "--ignore-stops",
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        input.write_all(lines).unwrap();
        drop(input);
        let output = child.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        (
            String::from_utf8_lossy(&output.stdout).into_owned(),
            errors,
            output.status.code(),
        )
    };
    let (both, errors, code) = chat(format!("Hi\n/save {saved}\nAnd you?\n/stats\n").as_bytes());
    assert_eq!(code, Some(0), "{errors}");
    assert!(both.contains("tokens in the cache"), "{both}");
    let (second, errors, code) =
        chat(format!("x\n/reset\n\n/load {saved}\nAnd you?\n/exit\nx\n").as_bytes());
    assert_eq!(code, Some(0), "{errors}");
    // The answers after the loaded turn repeat those of the first time. Answers may contain line breaks.
    let answers = both
        .lines()
        .take_while(|l| !l.contains("tokens in the cache"));
    let answers = answers.collect::<Vec<_>>().join("\n");
    let last = second.trim_end_matches('\n').lines().next_back().unwrap();
    assert!(
        answers.trim_end_matches('\n').ends_with(last),
        "{last:?} in {answers:?}"
    );

    fs::write(&saved, &fs::read(&saved).unwrap()[..700]).unwrap();
    for (lines, needle) in [
        (b"/load /no/such/file\n".to_vec(), "/no/such/file"),
        (
            format!("/load {saved}\n").into_bytes(),
            "damaged or cut off",
        ),
        (b"many words ".repeat(200), "the context holds 256"),
        (
            b"Hi\xff\n".to_vec(),
            "the line is not valid UTF-8: byte 2 of 4",
        ),
    ] {
        let (said, errors, code) = chat(&lines);
        assert_eq!(code, Some(1), "{said}");
        assert!(said.is_empty() && errors.contains(needle), "{errors}");
    }
}

#[test]
fn bench_measures() {
    let args = ["--prompt-tokens", "20", "--gen-tokens", "4", "--runs", "2"];
    for more in [&[][..], &["--batch", "3"], &["--decode-from-empty"]] {
        let report = json(&[&["bench", "--model", MODEL][..], &args, more].concat());
        for name in [
            "prefill_tok_s",
            "decode_tok_s",
            "ttft_ms",
            "peak_bytes",
            "weight_bytes",
            "kv_bytes",
            "roofline",
        ] {
            assert!(report[name].as_f64().unwrap() > 0.0, "{name} in {report}");
        }
    }
    let said = text(&[&["bench", "--model", MODEL][..], &args].concat());
    assert!(said.contains("tok/s"), "{said}");
    let e = failure(&["bench", "--model", MODEL, "--batch", "0"]);
    assert!(e.contains("--batch must be at least 1"), "{e}");
}

#[test]
fn bench_serves_requests_that_arrive() {
    let bench = ["bench", "--model", MODEL, "--requests", "7"];
    let sizes = ["--prompt-tokens", "20", "--gen-tokens", "6"];
    for (arrivals, spread) in [("all", "0"), ("500", "0.5")] {
        let serve = ["--serve", arrivals, "--spread", spread];
        let report = json(&[&bench[..], &sizes, &serve].concat());
        let number = |name: &str| report[name].as_f64().unwrap();
        let (prompts, made) = (number("prompt_tokens"), number("gen_tokens"));
        match spread {
            "0" => assert_eq!((prompts, made), (140.0, 42.0)),
            _ => assert!((70.0..=210.0).contains(&prompts) && (21.0..=63.0).contains(&made)),
        }
        assert_eq!(report["rate"].as_f64(), arrivals.parse().ok());
        let rate = number("gen_tok_s") * number("seconds");
        assert!((rate - made).abs() < 1e-6 * made, "{report}");
        assert!(number("requests_in_a_pass") >= 1.0);
        for times in ["ttft_ms", "between_tokens_ms"] {
            let of = |name: &str| report[times][name].as_f64().unwrap();
            let all = ["median", "p95", "p99", "longest"].map(of);
            // Two tokens of so small a model are often there at once, and on a busy machine all of them.
            let least = if times == "ttft_ms" {
                f64::MIN_POSITIVE
            } else {
                0.0
            };
            let most = 1000.0 * number("seconds");
            assert!(
                all[0] >= least && all.is_sorted() && all[3] <= most,
                "{report}"
            );
        }
    }
    let said = text(&[&bench[..], &sizes, &["--serve", "all"]].concat());
    assert!(said.contains("7 requests in "), "{said}");
    for wrong in [&["--serve", "0"][..], &["--serve", "all", "--batch", "2"]] {
        let output = nvfp4(&[&bench[..], wrong].concat());
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
    }
    let alone = nvfp4(&["bench", "--model", MODEL, "--spread", "0.5"]);
    assert_eq!(alone.status.code(), Some(2), "--spread without --serve");
}

/// A single file is the model, and an index beside it a warning on standard error, each once, unless it says the same.
#[test]
fn an_index_that_is_ignored_is_a_warning() {
    let scratch = Scratch::new("index");
    let name = "model.safetensors.index.json";
    let index = |shard: &str| format!(r#"{{"weight_map": {{"a": "{shard}"}}}}"#);
    let stale = index("model-00001-of-00001.safetensors");
    let path = scratch.model("stale", name, |_| stale.clone().into_bytes());
    let answer = text(&[
        "run",
        "--model",
        MODEL,
        "--prompt",
        "Hi",
        "--max-tokens",
        "4",
    ]);
    for args in [
        &[
            "run",
            "--model",
            &path,
            "--prompt",
            "Hi",
            "--max-tokens",
            "4",
        ][..],
        &["inspect", &path],
        &["quantize", &path, &scratch.path("out")],
    ] {
        let output = nvfp4(args);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{args:?}: {said}");
        assert_eq!(said.matches("warning").count(), 1, "{args:?}: {said}");
        let words = "model.safetensors is read; model.safetensors.index.json beside it is ignored with the 1 files that it names, 1 of them missing";
        assert!(said.contains(words), "{args:?}: {said}");
        if args[0] == "run" {
            assert_eq!(String::from_utf8(output.stdout).unwrap(), answer);
        }
    }
    let same = index("model.safetensors");
    let path = scratch.model("same", name, |_| same.clone().into_bytes());
    assert!(nvfp4(&["inspect", &path]).stderr.is_empty());
}

#[test]
fn synth_is_seeded_and_quantize_keeps_it() {
    let scratch = Scratch::new("synth");
    let (a, b, c) = (scratch.path("a"), scratch.path("b"), scratch.path("c"));
    let made = json(&["synth", "--arch", "tiny", "--out", &a]);
    text(&["synth", "--arch", "tiny", "--out", &b]);
    text(&["synth", "--arch", "tiny", "--out", &c, "--seed", "1"]);
    let bytes = |d: &str| std::fs::read(format!("{d}/model.safetensors")).unwrap();
    assert!(bytes(&a) == bytes(&b));
    assert!(bytes(&a) != bytes(&c));

    let listed = json(&["inspect", &a]);
    assert_eq!(listed["format"], "modelopt");
    assert_eq!(listed["values"], made["parameters"]);
    assert_eq!(listed["config"]["model_type"], "qwen3");
    let head = |v: &Value| {
        let tensors = v["tensors"].as_array().unwrap();
        tensors
            .iter()
            .find(|t| t["name"] == "lm_head.weight")
            .unwrap()
            .clone()
    };
    assert_eq!(head(&listed)["encoding"], "NVFP4");

    // Two-level weights stay as they are in safetensors, and become single-level in .dat.
    let again = json(&["quantize", &a, &scratch.path("again")]);
    assert_eq!(
        (again["quantized"].as_u64(), again["kept_nvfp4"].as_u64()),
        (Some(0), Some(15))
    );
    std::fs::create_dir(scratch.path("d")).unwrap();
    let dat = scratch.path("d/model.dat");
    let single = json(&["quantize", &a, &dat, "--recipe", "four-over-six"]);
    assert_eq!(single["quantized"].as_u64(), Some(15));
    let listed = json(&["inspect", &dat]);
    assert_eq!(listed["format"], "dat");
    assert_eq!(head(&listed)["encoding"], "NVFP4");
    assert!(text(&["inspect", &dat]).contains("lm_head.weight"));
}

#[test]
fn gguf_files_are_listed_by_the_names_of_their_families() {
    for (case, (key, value), tensor) in [
        (
            "nemotronh_experts",
            ("hybrid_override_pattern", Value::from("MEM*E")),
            "model.layers.1.mixer.gate.e_score_correction_bias",
        ),
        (
            "gemma4_perlayer",
            ("num_kv_shared_layers", Value::from(3)),
            "model.layers.5.per_layer_input_gate.weight",
        ),
    ] {
        let listed = json(&["inspect", &format!("tests/golden/gguf/{case}.gguf")]);
        assert_eq!(listed["format"], "gguf");
        assert_eq!(listed["config"][key], value, "{case}");
        let mut tensors = listed["tensors"].as_array().unwrap().iter();
        assert!(tensors.any(|t| t["name"] == tensor), "{case}: {listed}");
    }
}

/// `nvfp4 run` with a prompt, on `model`; it must fail.
fn run_failure(model: &str) -> String {
    let args = ["run", "--model", model, "--prompt", "Hi"];
    let said = failure(&args);
    assert_eq!(failure(&[&args[..], &["--json"]].concat()), said);
    said
}

#[test]
fn models_that_cannot_be_run() {
    let scratch = Scratch::new("broken");
    let half = |bytes: Vec<u8>| bytes[..bytes.len() / 2].to_vec();
    for (name, file, needle) in [
        ("weights", "model.safetensors", "not within"),
        ("config", "config.json", "EOF"),
        ("tokenizer", "tokenizer.json", "EOF"),
    ] {
        let said = run_failure(&scratch.model(&format!("half-{name}"), file, half));
        assert!(said.contains(file) && said.contains(needle), "{said}");
        let said = run_failure(&scratch.model(&format!("no-{name}"), file, |_| Vec::new()));
        assert!(said.contains(file), "{said}");
    }
    for template in [
        "{% if %}\n{% endif %}",
        "{{ raise_exception('no\nusers') }}",
    ] {
        let dir = scratch.model("template", "chat_template.jinja", |_| template.into());
        let said = run_failure(&dir);
        assert!(said.contains("chat template"), "{said}");
    }

    let dat = scratch.path("dat.dat");
    text(&["quantize", MODEL, &dat]);
    let gguf = "tests/golden/checkpoint/llama.gguf";
    for (from, to, needle) in [
        (&*dat, "half/m.dat", "are left"),
        (gguf, "half/m.gguf", "past the file"),
    ] {
        let bytes = fs::read(from).unwrap();
        let cut = scratch.file(to, &bytes[..bytes.len() * 9 / 10]);
        let said = run_failure(&cut);
        assert!(said.contains(to) && said.contains(needle), "{said}");
        let said = run_failure(&scratch.file(to, b""));
        assert!(said.contains(to) && said.contains("is empty"), "{said}");
    }
    let foreign = scratch.file("notes.txt", b"neither this nor that");
    assert!(run_failure(&foreign).contains("no checkpoint known"));
    fs::create_dir(scratch.path("nothing")).unwrap();
    assert!(run_failure(&scratch.path("nothing")).contains("holds no model"));
    assert!(run_failure("no-such-model").contains("'no-such-model'"));

    let mute = "tests/golden/model/llama_tied";
    assert!(run_failure(mute).contains("has no tokenizer"));
    let said = failure(&["run", "--model", mute, "--prompt", "Hi", "--raw"]);
    assert!(said.contains("has no tokenizer"), "{said}");
}

#[test]
fn a_window_slides_past_the_context() {
    let prompt = ["run", "--model", MODEL, "--prompt", "x", "--context", "16"];
    let window = ["--eviction", "sliding-window", "--drop", "5"];
    let chat = [&prompt[..], &window].concat();
    assert!(failure(&chat).contains("a chat keeps whole turns"));
    let unused = [&prompt[..], &["--drop", "5"]].concat();
    assert!(failure(&unused).contains("--drop 5 is for"));
    let unused = [&prompt[..], &["--keep", "5"]].concat();
    assert!(failure(&unused).contains("--keep is for"));
    let ends = ["--max-tokens", "80", "--ignore-stops", "--raw"];
    let out = json(&[&chat[..], &ends].concat());
    assert_eq!(out["tokens"].as_array().unwrap().len(), 80);
    assert_eq!(out["evicted_tokens"], 65);
}

#[test]
fn prompts_that_cannot_be_answered() {
    let scratch = Scratch::new("prompts");
    let long = "many words ".repeat(200);
    for (more, needle) in [
        (&["--context", "32"][..], "the context holds 32"),
        (
            &["--context", "32", "--raw"],
            "do not fit in a context of 32",
        ),
        (&[], "the context holds 256"),
        (&["--context", "257"], "made for 1 to 256"),
    ] {
        let args = [&["run", "--model", MODEL, "--prompt", &long][..], more].concat();
        let said = failure(&args);
        assert!(said.contains(needle), "{said}");
        assert_eq!(failure(&[&args[..], &["--json"]].concat()), said);
    }

    let bad = b"good until \xff here";
    let file = scratch.file("prompt.txt", bad);
    let run = |args: &[&OsStr], input: &[u8]| {
        let mut child = Command::new(env!("CARGO_BIN_EXE_nvfp4"))
            .args(["run", "--model", MODEL])
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let _ = child.stdin.take().unwrap().write_all(input);
        failed(&child.wait_with_output().unwrap(), args)
    };
    let s = OsStr::new;
    for said in [
        run(&[s("--prompt"), OsStr::from_bytes(bad)], b""),
        run(&[s("--prompt-file"), s(&file)], b""),
        run(&[s("--prompt-file"), s("-")], bad),
    ] {
        assert!(
            said.contains("not valid UTF-8: byte 11 of 17 is 0xff"),
            "{said}"
        );
    }
    assert!(run(&[s("--prompt-file"), s(&file)], b"").contains("prompt.txt"));
    let missing = run(&[s("--prompt-file"), s("/no/such/prompt")], b"");
    assert!(missing.contains("/no/such/prompt"), "{missing}");
    let empty = run(&[s("--prompt"), s(""), s("--raw")], b"");
    assert!(empty.contains("prefill a prompt first"), "{empty}");
    let said = failure(&["perplexity", "--model", MODEL, "--text", &file]);
    assert!(
        said.contains("prompt.txt is not valid UTF-8: byte 11 of 17"),
        "{said}"
    );
}

#[test]
fn a_model_is_not_converted_onto_itself() {
    let scratch = Scratch::new("itself");
    let dir = scratch.model("m", "config.json", |config| config);
    let weights = || fs::read(scratch.path("m/model.safetensors")).unwrap();
    let before = weights();
    let said = failure(&["quantize", &dir, &dir]);
    assert!(said.contains("name another"), "{said}");
    let said = failure(&["quantize", &dir, &dir, "--format", "dat"]);
    assert!(said.contains("not a place for a file"), "{said}");
    assert!(weights() == before);
    // A single file is read from where it was until the new one takes its name.
    let dat = scratch.path("m.dat");
    text(&["quantize", &dir, &dat]);
    let first = fs::read(&dat).unwrap();
    text(&["quantize", &dat, &dat]);
    assert!(fs::read(&dat).unwrap() == first);
}

#[test]
fn a_full_disk_leaves_nothing_half_written() {
    let scratch = Scratch::new("full");
    let (out, dat) = (scratch.path("out"), scratch.path("m.dat"));
    for kilobytes in [0, 1, 16] {
        let said = failed(
            &on_a_full_disk(kilobytes, &["quantize", MODEL, &out], ""),
            &out,
        );
        assert!(said.contains("model.safetensors"), "{said}");
        let said = failed(
            &on_a_full_disk(kilobytes, &["quantize", MODEL, &dat], ""),
            &dat,
        );
        assert!(said.contains("m.dat"), "{said}");
        assert_eq!(scratch.names(), Vec::<String>::new(), "{kilobytes}");
        let synth = ["synth", "--arch", "tiny", "--out", &out];
        failed(&on_a_full_disk(kilobytes, &synth, ""), synth);
        assert_eq!(scratch.names(), Vec::<String>::new(), "{kilobytes}");
    }
    // The previous file stays as it was.
    scratch.file("m.dat", b"the old file");
    failed(&on_a_full_disk(16, &["quantize", MODEL, &dat], ""), &dat);
    assert_eq!(scratch.names(), ["m.dat"]);
    assert_eq!(fs::read(&dat).unwrap(), b"the old file");

    let saved = scratch.file("saved", b"the old session");
    let chat = ["chat", "--model", MODEL, "--max-tokens", "1"];
    let output = on_a_full_disk(1, &chat, &format!("Hi\n/save {saved}\n"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(&saved), "{said}");
    assert_eq!(scratch.names(), ["m.dat", "saved"]);
    assert_eq!(fs::read(&saved).unwrap(), b"the old session");

    for args in [
        &["run", "--model", MODEL, "--prompt", "Hi"][..],
        &["run", "--model", MODEL, "--prompt", "Hi", "--json"],
        &["inspect", MODEL],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_nvfp4"))
            .args(args)
            .stdout(fs::File::options().write(true).open("/dev/full").unwrap())
            .output()
            .unwrap();
        let said = failed(&output, args);
        assert!(said.contains("standard output"), "{said}");
    }
}

#[test]
fn the_device_that_nobody_named_comes_with_a_reason() {
    let run = [
        "run",
        "--model",
        MODEL,
        "--prompt",
        "x",
        "--max-tokens",
        "1",
    ];
    let chosen = json(&run)["model"].clone();
    assert!(chosen["device"].as_str().unwrap().starts_with("cpu ("));
    let choice = chosen["device_choice"].as_str().unwrap();
    assert!(choice.starts_with("running on cpu: "), "{choice}");
    let named = json(&[&run[..], &["--device", "cpu"]].concat())["model"].clone();
    assert_eq!(named["device"], chosen["device"]);
    assert!(named["device_choice"].is_null(), "{named}");
}

#[test]
fn numbers_out_of_range() {
    let scratch = Scratch::new("numbers");
    let words = scratch.file("words.txt", b"some words to read");
    let one = scratch.file("one.txt", b"");
    let huge = usize::MAX.to_string();
    let run = ["run", "--model", MODEL, "--prompt", "x"];
    let bench = ["bench", "--model", MODEL];
    let perplexity = ["perplexity", "--model", MODEL, "--text"];
    for (args, more, needle) in [
        (&run[..], &["--context", &*huge][..], "made for 1 to 256"),
        (&run, &["--threads", "0"], "thread"),
        (&run, &["--threads", &huge], "thread"),
        (&run, &["--temp", "nan"], "temperature is NaN"),
        (&run, &["--temp", "inf"], "temperature is inf"),
        (&run, &["--min-p", "1.5"], "min_p is 1.5"),
        (
            &run,
            &["--repetition-penalty", "0"],
            "repetition_penalty is 0",
        ),
        (&run, &["--typical-p", "1.5"], "typical_p is 1.5"),
        (&run, &["--dry-base", "0.5"], "dry_base is 0.5"),
        (
            &run,
            &["--min-tokens", "9", "--max-tokens", "8"],
            "min_tokens is 9 and max_tokens 8",
        ),
        (&run, &["--stop", ""], "a stop string is empty"),
        (&run, &["--device", "cuda:99"], "cuda:99"),
        (&run, &["--device", "tpu"], "'tpu' is not known"),
        (&bench, &["--prompt-tokens", &huge], "made for 1 to 256"),
        (&bench, &["--gen-tokens", &huge], "made for 1 to 256"),
        (
            &bench,
            &["--gen-tokens", "0"],
            "--gen-tokens must be at least 1",
        ),
        (
            &perplexity,
            &[&words, "--window", "1"],
            "--window must be at least 2",
        ),
        (
            &perplexity,
            &[&words, "--window", &huge],
            "made for 1 to 256",
        ),
        (
            &perplexity,
            &[&words, "--windows", "0"],
            "--windows must be at least 1",
        ),
        (&perplexity, &[&one], "0 tokens; at least 2"),
        (&perplexity, &["/no/such/text"], "/no/such/text"),
    ] {
        let args = [args, more].concat();
        let said = failure(&args);
        assert!(said.contains(needle), "{args:?}: {said}");
    }
    if NVFP4::cuda::count().is_ok_and(|n| n > 0) {
        println!("SKIPPED cuda:0 without a GPU: there is one");
    } else {
        let said = failure(&[&run[..], &["--device", "cuda:0"]].concat());
        assert!(
            said.contains("'cuda:0'") && said.contains("driver"),
            "{said}"
        );
    }
    let said = failure(&["quantize", MODEL, &scratch.path("out"), "--threads", "0"]);
    assert!(said.contains("thread"), "{said}");
    assert!(!scratch.0.join("out").exists());
    let greedy = ["--max-tokens", &huge, "--top-k", &huge, "--ignore-stops"];
    let answer = json(&[&run[..], &greedy].concat());
    assert_eq!(answer["finish"], "context");
}

/// A model that thinks, calls a tool and answers: see tests/common/thinker.py.
fn thinker(scratch: &Scratch) -> String {
    let model = scratch.path("thinker");
    let made = Command::new("python3")
        .args(["tests/common/thinker.py", &model])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success(), "{said}");
    model
}

const THOUGHT: &str = "Let me see what is asked.\n";
const ANSWER: &str = "Blue \u{6f22}\u{5b57} light \u{1f980}.\n";
const CALL: &str = "weather({\"city\":\"Paris\"})\n";
const RESULT: &str = "It rains in Paris.\n";
const TOOLS: &[u8] = br#"[{"type": "function", "function": {"name": "weather"}}]"#;

/// The command with this standard input.
fn given(args: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_nvfp4"))
        .env("CUDA_VISIBLE_DEVICES", "")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that fails may be gone already.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

/// Standard output and standard error of `nvfp4 chat` with `args` when these lines are piped into it.
fn chat(args: &[&str], lines: &[&str]) -> (String, String) {
    let output = given(&[&["chat"], args].concat(), &(lines.join("\n") + "\n"));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{lines:?}: {errors}");
    (String::from_utf8(output.stdout).unwrap(), errors)
}

/// The roles, and the JSON, of what `/messages` prints.
fn conversation(line: &str) -> (Vec<String>, Value) {
    let messages: Value = serde_json::from_str(line).unwrap();
    let roles = messages.as_array().unwrap().iter();
    let roles = roles.map(|m| m["role"].as_str().unwrap().to_owned());
    (roles.collect(), messages)
}

#[test]
fn a_pipe_gets_answers_and_standard_error_the_reasoning() {
    let scratch = Scratch::new("thinking");
    let model = thinker(&scratch);
    let said = chat(&["--model", &model], &["Hi", "And you?"]);
    assert_eq!(said, (ANSWER.repeat(2), THOUGHT.repeat(2)));
    let quiet = (ANSWER.to_owned(), String::new());
    assert_eq!(chat(&["--model", &model, "--think", "off"], &["Hi"]), quiet);
    let set = ["--model", &model, "--set", "enable_thinking=false"];
    assert_eq!(chat(&set, &["Hi"]), quiet);
    let said = chat(
        &["--model", &model],
        &["/think off", "Hi", "/think on", "Hi"],
    );
    assert_eq!(said, (ANSWER.repeat(2), THOUGHT.to_owned()));
    let (answer, thought) = chat(&["--model", &model, "--think-budget", "2"], &["Hi"]);
    assert_eq!(answer, ANSWER);
    let ended = thought.strip_prefix("Let").expect(&thought);
    assert!(
        ended.contains("limited time") && !ended.contains("asked"),
        "{thought}"
    );

    let (_, warned) = chat(&["--model", &model, "--set", "style=terse"], &["/exit"]);
    assert!(warned.contains("never reads 'style'"), "{warned}");
    let (_, warned) = chat(&["--model", MODEL], &["/think on"]);
    assert!(warned.contains("never reads 'enable_thinking'"), "{warned}");
    for wrong in ["style", "=1", "messages=[]"] {
        let output = nvfp4(&["chat", "--model", &model, "--set", wrong]);
        assert!(!output.status.success(), "{wrong}");
    }
}

#[test]
fn commands_change_the_conversation() {
    let scratch = Scratch::new("commands");
    let model = thinker(&scratch);
    let args = ["--model", &model, "--think", "off"];
    let lines = [
        "First",
        "Second",
        "/retry",
        "/edit Third",
        "/system Be brief.",
        "/messages",
        "/reset",
        "/messages",
        "/system",
        "/messages",
    ];
    let (said, errors) = chat(&args, &lines);
    assert_eq!(errors, "");
    let said: Vec<_> = said.lines().collect();
    assert_eq!(said[..4], [ANSWER.trim_end(); 4]);
    let (roles, messages) = conversation(said[4]);
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
    assert_eq!(messages[0]["content"], "Be brief.");
    assert_eq!(messages[1]["content"], "First");
    assert_eq!(messages[3]["content"], "Third");
    assert_eq!(conversation(said[5]).0, ["system"]);
    assert_eq!(said[6], "[]");

    // An answer again is another where tokens are drawn, also where the first had a seed.
    let drawn = [
        "--model",
        MODEL,
        "--temp",
        "1.5",
        "--seed",
        "1",
        "--max-tokens",
        "20",
        "--ignore-stops",
    ];
    let (stats, _) = chat(&drawn, &["Hi", "/stats", "/retry", "/stats"]);
    let seeds = stats
        .lines()
        .filter_map(|l| Some(l.rsplit_once(", seed ")?.1));
    let seeds: Vec<_> = seeds.collect();
    assert_eq!(seeds[0], "1");
    assert_ne!(seeds[1], "1");
    assert!(stats.contains("\nsampling: temperature 1.5\n"), "{stats}");
    let adjusted = [
        "--temperature",
        "1.5",
        "--min-tokens",
        "2",
        "--dry-multiplier",
        "0.8",
    ];
    let (stats, _) = chat(&[&drawn[..2], &adjusted].concat(), &["/stats"]);
    let sampling = "sampling: temperature 1.5, min tokens 2, DRY multiplier 0.8\n";
    assert!(stats.contains(sampling), "{stats}");
    let (stats, _) = chat(&args, &["/stats", "/help"]);
    let sampling = "sampling: temperature 0.6, top-k 20, top-p 0.95, as the model recommends\n";
    assert!(stats.contains(sampling), "{stats}");
    assert!(stats.contains("/retry "), "{stats}");

    let marked = [
        "\"\"\"",
        "/reset",
        "  two",
        "\"\"\"",
        "/messages",
        "\"\"\"a\"\"\"",
        "/messages",
    ];
    let (said, _) = chat(&args, &marked);
    let said: Vec<_> = said.lines().collect();
    assert_eq!(conversation(said[1]).1[0]["content"], "/reset\n  two");
    assert_eq!(conversation(said[3]).1[2]["content"], "a");

    for (line, needle) in [
        (
            "/rset",
            "there is no command /rset; the commands are /edit, ",
        ),
        ("/retry", "nothing has been asked yet"),
        ("/edit", "/edit TEXT"),
        ("/think maybe", "on or off"),
        ("/tools /no/such/tools", "/no/such/tools"),
        ("\"\"\"\nHi", "ends within"),
    ] {
        let output = given(&["chat", "--model", &model], line);
        let said = failed(&output, line);
        assert!(said.contains(needle), "{said}");
    }
}

#[test]
fn a_template_that_is_missing_or_broken_is_told() {
    let stand_in = "nvfp4: the model brings no chat template; using ChatML\n";
    let (_, said) = chat(&["--model", MODEL], &["/exit"]);
    assert_eq!(said, stand_in);
    let scratch = Scratch::new("no-template");
    let broken = |_| b"{% for m in messages %}".to_vec();
    let broken = scratch.model("broken", "chat_template.jinja", broken);
    let text = scratch.file("text", &b"some words to read and to measure. ".repeat(20));
    // Nothing here needs a template.
    for args in [
        &[
            "perplexity",
            "--model",
            &broken,
            "--text",
            &text,
            "--window",
            "16",
        ][..],
        &[
            "run",
            "--model",
            &broken,
            "--prompt",
            "Hi",
            "--raw",
            "--max-tokens",
            "2",
        ],
    ] {
        let output = nvfp4(args);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{args:?}: {said}");
        let warned = said
            .lines()
            .filter(|l| l.contains("chat template does not parse"));
        assert_eq!(warned.count(), 1, "{said}");
    }
    let said = failed(
        &nvfp4(&["run", "--model", &broken, "--prompt", "Hi"]),
        &broken,
    );
    assert!(said.contains("the chat template does not parse"), "{said}");
}

#[test]
fn another_template_takes_the_place_of_the_models() {
    let scratch = Scratch::new("other-template");
    let other = scratch.file("other.jinja", b"{{ messages[0].content }} and {{ style }}");
    let tokens = |more: &[&str]| {
        let run = ["run", "--model", MODEL, "--max-tokens", "1"];
        json(&[&run, more].concat())["prompt_tokens"].clone()
    };
    let given = [
        "--prompt",
        "abcd",
        "--chat-template",
        &other,
        "--set",
        "style=x",
    ];
    assert_eq!(tokens(&given), tokens(&["--raw", "--prompt", "abcd and x"]));
    let (_, warned) = chat(
        &[
            "--model",
            MODEL,
            "--chat-template",
            &other,
            "--set",
            "mood=x",
        ],
        &["/exit"],
    );
    assert!(warned.contains("never reads 'mood'"), "{warned}");
    let broken = scratch.file("broken.jinja", b"\n\n{% for %}");
    let said = failure(&[
        "run",
        "--model",
        MODEL,
        "--prompt",
        "x",
        "--chat-template",
        &broken,
    ]);
    assert!(
        said.contains("broken.jinja") && said.contains("(line 3)"),
        "{said}"
    );
    let said = failure(&[
        "run",
        "--model",
        MODEL,
        "--prompt",
        "x",
        "--chat-template",
        "/nowhere",
    ]);
    assert!(said.contains("/nowhere"), "{said}");
}

#[test]
fn tools_are_called_and_their_results_given() {
    let scratch = Scratch::new("tools");
    let model = thinker(&scratch);
    let tools = scratch.file("tools.json", TOOLS);
    let args = ["--model", &model, "--tools", &tools];
    let (said, _) = chat(&args, &["Paris?", "rain, 12 degrees", "/messages"]);
    let answered = format!("{CALL}{RESULT}");
    let (roles, messages) = conversation(said.strip_prefix(&answered).expect(&said));
    assert_eq!(roles, ["user", "assistant", "tool", "assistant"]);
    let call = &messages[1]["tool_calls"][0];
    assert_eq!(call["function"]["arguments"], "{\"city\":\"Paris\"}");
    assert_eq!(messages[2]["content"], "rain, 12 degrees");
    assert_eq!(messages[2]["tool_call_id"], call["id"]);
    // No result, a command in its place, and the end of the input.
    let (said, _) = chat(&args, &["Paris?", "", "/messages"]);
    let said = said.strip_prefix(CALL).expect(&said).to_owned();
    assert_eq!(conversation(&said).0, ["user", "assistant"]);
    let (said, _) = chat(&args, &["Paris?", "/reset", "/messages"]);
    assert_eq!(said, format!("{CALL}[]\n"));
    assert_eq!(chat(&args, &["Paris?"]).0, CALL);
    let (said, _) = chat(
        &["--model", &model, "--think", "off"],
        &["Hi", &format!("/tools {tools}"), "Paris?"],
    );
    assert_eq!(said, format!("{ANSWER}{CALL}"));

    let run = ["run", "--model", &model, "--tools", &tools];
    assert_eq!(text(&[&run[..], &["--prompt", "Paris?"]].concat()), CALL);
    let answer = json(&[&run[..], &["--prompt", "Paris?"]].concat());
    assert_eq!(answer["tool_calls"][0]["function"]["name"], "weather");
    assert_eq!(answer["content"], "");
    let asked = r#"[{"role": "user", "content": "Paris?"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "function": {"name": "weather", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"}]"#;
    let output = given(&[&run[..], &["--messages", "-"]].concat(), asked);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), RESULT);
    let said = failure(&["run", "--model", MODEL, "--tools", &tools, "--prompt", "x"]);
    assert!(said.contains("knows no tools"), "{said}");
    let wrong = scratch.file("wrong.json", b"{}");
    let said = failure(&["run", "--model", &model, "--tools", &wrong, "--prompt", "x"]);
    assert!(
        said.contains("wrong.json") && said.contains("not an array"),
        "{said}"
    );
}

#[test]
fn run_answers_conversations_and_tells_their_parts() {
    let scratch = Scratch::new("messages");
    let model = thinker(&scratch);
    let asked =
        br#"[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]"#;
    let messages = scratch.file("messages.json", asked);
    let run = ["run", "--model", &model];
    let output = nvfp4(&[&run[..], &["--messages", &messages]].concat());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), ANSWER);
    assert_eq!(String::from_utf8(output.stderr).unwrap(), THOUGHT);
    let answer = json(&[&run[..], &["--messages", &messages, "--seed", "7"]].concat());
    assert_eq!(answer["reasoning"], THOUGHT.trim_end());
    assert_eq!(answer["content"], ANSWER.trim_end());
    assert_eq!(answer["text"], answer["content"]);
    assert_eq!(answer["tool_calls"], serde_json::json!([]));
    assert_eq!(answer["seed"], 7);
    // The conversation given as a prompt.
    let prompt = ["--system", "Be brief.", "--prompt", "Hi", "--seed", "7"];
    let same = json(&[&run[..], &prompt].concat());
    assert_eq!(same["tokens"], answer["tokens"]);
    let off = json(&[&run[..], &["--prompt", "Hi", "--think", "off"]].concat());
    assert_eq!(off["reasoning"], "");
    assert_eq!(off["content"], answer["content"]);

    for more in [["--prompt", "x"], ["--system", "x"]] {
        let args = [&run[..], &["--messages", &messages], &more].concat();
        assert_eq!(nvfp4(&args).status.code(), Some(2), "{more:?}");
    }
    let raw = [&run[..], &["--prompt", "x", "--raw", "--think", "on"]].concat();
    assert_eq!(nvfp4(&raw).status.code(), Some(2));
    let wrong = scratch.file("wrong.json", br#"[{"role": "nobody", "content": "Hi"}]"#);
    let said = failure(&[&run[..], &["--messages", &wrong]].concat());
    assert!(
        said.contains("wrong.json") && said.contains("'nobody'"),
        "{said}"
    );
}

/// Paths are bytes, for reading and writing. In JSON, bytes that are not UTF-8 become U+FFFD.
#[test]
fn paths_need_not_be_utf8() {
    let scratch = Scratch::new("bytes");
    let place = |name: &[u8]| scratch.0.join(OsStr::from_bytes(name)).into_os_string();
    let run = |args: &[&OsStr]| {
        Command::new(env!("CARGO_BIN_EXE_nvfp4"))
            .env("CUDA_VISIBLE_DEVICES", "")
            .args(args)
            .output()
            .unwrap()
    };
    let json = |args: &[&OsStr]| -> Vec<Value> {
        let output = run(args);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && !errors.contains("UTF-8"),
            "{args:?}: {errors}"
        );
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    };
    let s = OsStr::new;
    let model = place(b"model-\xff\xc3(");
    json(&[s("quantize"), s(MODEL), &model, s("--json")]);
    let inspected = json(&[s("inspect"), &model, s("--json")]);
    assert_eq!(inspected[0]["format"], "modelopt");
    let answer = json(&[
        s("run"),
        s("--model"),
        &model,
        s("--prompt=Hi"),
        s("--max-tokens=3"),
        s("--json"),
    ]);
    assert_eq!(answer[0]["tokens"].as_array().unwrap().len(), 3);

    let (text, data, out) = (place(b"\xfe.txt"), place(b"\xfe.tsv"), place(b"out-\xfe"));
    fs::write(&text, "Hello there, hello there, hello there. ".repeat(20)).unwrap();
    fs::write(&data, "Hi\tHello there\n").unwrap();
    let report = json(&[
        s("perplexity"),
        s("--model"),
        &model,
        s("--reference"),
        &model,
        s("--text"),
        &text,
        s("--window=16"),
        s("--windows=2"),
        s("--json"),
    ]);
    let shown = scratch.path("model-\u{fffd}\u{fffd}(");
    assert_eq!(report[0]["model"], shown);
    assert_eq!(report[0]["reference"]["model"], shown);
    let train = [
        s("train"),
        s("--model"),
        &model,
        s("--data"),
        &data,
        s("--out"),
        &out,
        s("--steps=1"),
        s("--json"),
    ];
    let events = json(&train);
    let end = events.last().unwrap();
    assert_eq!(end["path"], scratch.path("out-\u{fffd}/model"));
    assert!(Path::new(&out).join("model/config.json").exists());

    // Adapters name their model in a file of JSON, which a path like this cannot stand in.
    fs::remove_dir_all(&out).unwrap();
    let refused = run(&[&train[..], &[s("--adapter=2")]].concat());
    let said = failed(&refused, "adapters");
    assert!(
        said.contains("is not UTF-8; give the model another path"),
        "{said}"
    );
    assert!(!Path::new(&out).join("adapter").exists());
    // A folder in it keeps a model's directory from being replaced, whatever its name.
    fs::create_dir(Path::new(&model).join(OsStr::from_bytes(b"kept-\xff"))).unwrap();
    let refused = run(&[s("quantize"), s(MODEL), &model, s("--force")]);
    let said = failed(&refused, "a folder inside");
    assert!(said.contains("holds the folder kept-\u{fffd}"), "{said}");
    // Folders named by variables are bytes too.
    let cache = place(b"cache-\xff");
    let (commit, kept) = ("0".repeat(40), Path::new(&cache).join("models--none--such"));
    let snapshot = kept.join("snapshots").join(&commit);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(kept.join("refs")).unwrap();
    fs::write(kept.join("refs/main"), &commit).unwrap();
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        fs::copy(format!("{MODEL}/{file}"), snapshot.join(file)).unwrap();
    }
    let found = Command::new(env!("CARGO_BIN_EXE_nvfp4"))
        .args(["inspect", "none/such"])
        .env("HF_HUB_OFFLINE", "1")
        .env("HF_HUB_CACHE", &cache)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&found.stderr);
    assert!(found.status.success(), "{errors}");
    let missing = run(&[s("inspect"), &place(b"none-\xff")]);
    let said = failed(&missing, "a path that is not there");
    assert!(
        said.contains("there is no file or directory") && said.contains("none-\u{fffd}"),
        "{said}"
    );
}
