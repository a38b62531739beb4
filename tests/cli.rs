//! The `nvfp4` command from outside: output, JSON and exit codes.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
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

/// The command, to which no GPU shows unless its arguments ask for one: answers are compared, and what it says is counted.
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

/// What `args` gives where no file may grow beyond `kilobytes`: to the command it is a full disk.
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

/// Kernels that are embedded need no compiler, but what it is that is missing is said all the same.
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
    let likeliest = tokens(&["--top-k", "1"]);
    assert_ne!(likeliest, cached);
    assert_eq!(tokens(&["--top-p", "0"]), likeliest);
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

    fs::write(&saved, &fs::read(&saved).unwrap()[..700]).unwrap();
    for (lines, needle) in [
        (b"/load /no/such/file\n".to_vec(), "/no/such/file"),
        (
            format!("/load {saved}\n").into_bytes(),
            "damaged or cut off",
        ),
        (b"many words ".repeat(200), "in a context of 256"),
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
fn prompts_that_cannot_be_answered() {
    let scratch = Scratch::new("prompts");
    let long = "many words ".repeat(200);
    for (more, needle) in [
        (&["--context", "32"][..], "do not fit in a context of 32"),
        (
            &["--context", "32", "--raw"],
            "do not fit in a context of 32",
        ),
        (&[], "do not fit in a context of 256"),
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
    // What was there before stays as it was.
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
