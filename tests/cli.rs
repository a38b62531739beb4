//! The `nvfp4` command from outside: output, JSON and exit codes.

use std::path::PathBuf;
use std::process::{Command, Output};

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
