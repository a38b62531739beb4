//! The `nvfp4` command from outside: output, JSON and exit codes.

use std::io::Write;
use std::path::PathBuf;
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
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn nvfp4(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_nvfp4"))
        .args(args)
        .output()
        .unwrap()
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
    let output = nvfp4(args);
    assert_eq!(output.status.code(), Some(1), "{args:?}");
    assert!(output.stdout.is_empty(), "{args:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn wrong_usage_exits_with_2() {
    for args in [
        &["no-such-command"][..],
        &[],
        &["quantize", "only-one"],
        &["synth", "--arch", "gpt-5", "--out", "x"],
        &["pull", "a/b", "--timeout", "-1"],
    ] {
        assert_eq!(nvfp4(args).status.code(), Some(2), "{args:?}");
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
fn diagnose_names_backends_and_reasons() {
    let report = json(&["diagnose"]);
    let backends = report["backends"].as_array().unwrap();
    assert_eq!(backends[0]["name"], "cpu");
    assert_eq!(backends[0]["available"], true);
    for backend in backends {
        assert!(
            backend["available"] == true || backend["reason"].is_string(),
            "{backend}"
        );
    }
    assert!(text(&["diagnose"]).contains("cpu"));
}

const MODEL: &str = "tests/golden/model/qwen3_tied";

#[test]
fn run_gives_the_same_tokens_with_and_without_the_cache() {
    let prompt = ["run", "--model", MODEL, "--prompt", "Hello there"];
    let tokens = |more: &[&str]| {
        let sampled = ["--max-tokens", "20", "--ignore-stops", "--temp", "1.5"];
        let out = json(&[&prompt[..], &sampled, more].concat());
        assert_eq!(out["finish"], "length");
        assert!(out["timings"]["prefill_seconds"].as_f64().unwrap() > 0.0);
        (out["prompt_tokens"].clone(), out["tokens"].clone())
    };
    let cached = tokens(&[]);
    assert_eq!(cached.1.as_array().unwrap().len(), 20);
    assert_eq!(tokens(&["--replay"]), cached);
    assert_ne!(tokens(&["--seed", "1"]), cached);
    let raw = tokens(&["--raw"]);
    assert_ne!(raw, cached);
    assert_eq!(tokens(&["--raw", "--token-by-token"]), raw);
    assert_eq!(tokens(&["--raw", "--replay"]), raw);

    let e = failure(&["run", "--model", MODEL, "--prompt", "x", "--context", "4"]);
    assert!(e.contains("do not fit in a context of 4"), "{e}");
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
fn chat_takes_turns_from_a_pipe() {
    let scratch = Scratch::new("chat");
    let saved = scratch.path("saved");
    let chat = |lines: &str| {
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
        input.write_all(lines.as_bytes()).unwrap();
        drop(input);
        let output = child.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        (
            String::from_utf8_lossy(&output.stdout).into_owned(),
            errors,
            output.status.code(),
        )
    };
    let (both, errors, code) = chat(&format!("Hi\n/save {saved}\nAnd you?\n/stats\n"));
    assert_eq!(code, Some(0), "{errors}");
    assert!(both.contains("tokens in the cache"), "{both}");
    let (second, errors, code) = chat(&format!("x\n/reset\n\n/load {saved}\nAnd you?\n/exit\nx\n"));
    assert_eq!(code, Some(0), "{errors}");
    // What follows the loaded turn is what followed it the first time. Answers may hold line breaks of their own.
    let answers = both
        .lines()
        .take_while(|l| !l.contains("tokens in the cache"));
    let answers = answers.collect::<Vec<_>>().join("\n");
    let last = second.trim_end_matches('\n').lines().next_back().unwrap();
    assert!(
        answers.trim_end_matches('\n').ends_with(last),
        "{last:?} in {answers:?}"
    );

    let (_, errors, code) = chat("/load /no/such/file\n");
    assert_eq!(code, Some(1));
    assert!(errors.contains("/no/such/file"), "{errors}");
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
