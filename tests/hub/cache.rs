//! The cache is shared with Python's huggingface_hub, both ways, and its content is not fetched again.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::standin::{Hub, MODEL, failure, golden, names, noise, path, pulled, slices, stderr};

/// Whether `nvfp4 inspect` finds the model without a network.
fn found_offline(hub: &Hub, name: &str) -> bool {
    hub.forget();
    let output = hub
        .nvfp4(&["inspect", name])
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    assert!(hub.seen().is_empty());
    output.status.success()
}

/// A short answer of the model by its name.
fn runs(hub: &Hub) {
    let args = [
        "run",
        "--model",
        MODEL,
        "--prompt",
        "Hi",
        "--max-tokens",
        "3",
    ];
    let output = hub.nvfp4(&args).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
}

/// Fills the cache as Python's `from_pretrained` does: the files that it asked for, by their ETags, and no list of all.
/// Returns the commit.
fn filled_by_python(hub: &Hub, files: &[&str], revision: Option<&str>) -> String {
    let url = format!("/api/models/{MODEL}/revision/main?blobs=true");
    let list: Value = serde_json::from_slice(&get(hub, &url)).unwrap();
    let commit = list["sha"].as_str().unwrap().to_owned();
    let place = hub.place();
    let snapshot = place.join("snapshots").join(&commit);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(place.join("blobs")).unwrap();
    for sibling in list["siblings"].as_array().unwrap() {
        let name = sibling["rfilename"].as_str().unwrap();
        if !files.contains(&name) {
            continue;
        }
        let id = sibling["lfs"]["sha256"]
            .as_str()
            .or(sibling["blobId"].as_str())
            .unwrap();
        fs::copy(
            hub.scratch.path("repo").join(name),
            place.join("blobs").join(id),
        )
        .unwrap();
        symlink(Path::new("../../blobs").join(id), snapshot.join(name)).unwrap();
    }
    if let Some(revision) = revision {
        fs::create_dir_all(place.join("refs")).unwrap();
        fs::write(place.join("refs").join(revision), &commit).unwrap();
    }
    hub.forget();
    commit
}

fn get(hub: &Hub, path: &str) -> Vec<u8> {
    let output = hub
        .program("python3")
        .args(["-c", "import sys, urllib.request as u; sys.stdout.buffer.write(u.urlopen(sys.argv[1]).read())"])
        .arg(format!("{}{path}", hub.at("hub")))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    output.stdout
}

#[test]
fn a_second_pull_makes_one_request_and_none_offline() {
    let files = golden();
    let hub = Hub::of("second", &slices(&files));
    let first = hub.pull(MODEL);
    assert!(first["fetched_bytes"].as_u64().unwrap() > 0);
    hub.forget();
    let start = Instant::now();
    let second = hub.pull(MODEL);
    assert!(
        start.elapsed() < Duration::from_millis(500),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(hub.seen().len(), 1);
    assert_eq!(
        (&second["path"], &second["fetched_bytes"]),
        (&first["path"], &json!(0))
    );
    for (variable, value) in [("HF_HUB_OFFLINE", "1"), ("TRANSFORMERS_OFFLINE", "yes")] {
        hub.forget();
        let mut command = hub.nvfp4(&["pull", MODEL, "--json"]);
        assert_eq!(pulled(command.env(variable, value))["path"], first["path"]);
        assert!(hub.seen().is_empty());
        let mut command = hub.nvfp4(&["pull", "org/other"]);
        let e = failure(command.env(variable, value));
        assert!(
            e.contains("the cache holds no org/other") && e.contains(variable),
            "{e}"
        );
    }
    // A command that takes a model asks for none that is there.
    hub.forget();
    runs(&hub);
    assert!(hub.seen().is_empty());
    // A second pull succeeds while the hub is away.
    let output = hub
        .nvfp4(&["pull", MODEL])
        .env("HF_ENDPOINT", "http://127.0.0.1:1")
        .output()
        .unwrap();
    assert!(output.status.success());
    assert!(
        stderr(&output).contains("taking org/model from the cache"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_new_commit_brings_what_has_changed() {
    let files = golden();
    let hub = Hub::of("commit", &slices(&files));
    hub.put("README.md", b"first");
    let first = hub.pull(MODEL);
    hub.put("README.md", b"second");
    hub.forget();
    let second = hub.pull(MODEL);
    assert_eq!(hub.seen().len(), 1);
    assert_ne!(first["commit"], second["commit"]);
    assert_eq!(second["fetched_bytes"], 0);
    hub.put("tokenizer.json", b"{\"new\": 1}");
    hub.forget();
    let third = hub.pull(MODEL);
    assert_eq!(hub.fetched(), ["tokenizer.json".to_owned()].into());
    assert_eq!(
        fs::read(path(&third).join("tokenizer.json")).unwrap(),
        b"{\"new\": 1}"
    );
    // The older ones are still there, by their commits or the beginnings of them.
    for pull in [&first, &second] {
        let commit = pull["commit"].as_str().unwrap();
        for name in [commit, &commit[..8]] {
            assert!(found_offline(&hub, &format!("{MODEL}@{name}")), "{name}");
        }
    }
    assert!(!found_offline(&hub, &format!("{MODEL}@0123456")));
}

#[test]
fn what_python_fetched_is_used() {
    let files = golden();
    let all = ["config.json", "tokenizer.json", "model.safetensors"];
    let hub = Hub::of("python", &slices(&files));
    let commit = filled_by_python(&hub, &all, None);
    assert!(found_offline(&hub, &format!("{MODEL}@{commit}")));
    assert!(!found_offline(&hub, MODEL));
    let pull = hub.pull(MODEL);
    assert_eq!(hub.seen().len(), 1);
    assert_eq!(
        (&pull["commit"], &pull["fetched_bytes"]),
        (&json!(commit), &json!(0))
    );
    assert!(found_offline(&hub, MODEL));
}

#[test]
fn a_tokenizer_that_is_missing_is_fetched() {
    let files = golden();
    let hub = Hub::of("tokenizer", &slices(&files));
    filled_by_python(&hub, &["config.json", "model.safetensors"], Some("main"));
    let mut command = hub.nvfp4(&["run", "--model", MODEL, "--prompt", "Hi"]);
    let e = failure(command.env("HF_HUB_OFFLINE", "1"));
    assert!(
        e.contains("in part (config.json, model.safetensors)") && e.contains("HF_HUB_OFFLINE"),
        "{e}"
    );
    runs(&hub);
    assert_eq!(hub.fetched(), ["tokenizer.json".to_owned()].into());
    // A file that another program has found to be missing is not requested.
    fs::remove_dir_all(hub.place()).unwrap();
    let commit = filled_by_python(&hub, &["config.json", "model.safetensors"], Some("main"));
    let missing = hub.place().join(".no_exist").join(commit);
    fs::create_dir_all(&missing).unwrap();
    fs::write(missing.join("tokenizer.json"), b"").unwrap();
    assert!(found_offline(&hub, MODEL));
}

/// Runs `script` with a mount table of its own; `false` where the system does not allow that.
fn mounted(hub: &Hub, script: &str) -> Option<std::process::Output> {
    let allowed = hub
        .program("unshare")
        .args(["-Urm", "true"])
        .output()
        .is_ok_and(|o| o.status.success());
    if !allowed {
        assert!(
            !NVFP4::base::env::required_capabilities().contains(&"mounts".to_owned()),
            "NVFP4_REQUIRE names mounts, and there can be none"
        );
        println!("SKIPPED: a file system of its own, which the system does not allow");
        return None;
    }
    let mut command = hub.program("unshare");
    command
        .args(["-Urm", "sh", "-c", script, env!("CARGO_BIN_EXE_nvfp4")])
        .arg(hub.home());
    Some(command.output().unwrap())
}

#[test]
fn a_cache_that_cannot_be_written_to_serves() {
    let files = golden();
    let hub = Hub::of("read-only", &slices(&files));
    filled_by_python(
        &hub,
        &["config.json", "tokenizer.json", "model.safetensors"],
        Some("main"),
    );
    let mount = "mount --bind \"$1\" \"$1\" && mount -o remount,bind,ro \"$1\"";
    let script = format!("{mount} && \"$0\" pull {MODEL} --json && \"$0\" inspect {MODEL}");
    let Some(output) = mounted(&hub, &script) else {
        return;
    };
    assert!(output.status.success(), "{}", stderr(&output));
    hub.put("tokenizer.json", b"{\"new\": 1}");
    let output = mounted(&hub, &format!("{mount} && \"$0\" pull {MODEL}")).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("Read-only file system"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_disk_without_room_is_noticed_before_anything_comes() {
    let content = noise(3 << 20);
    let hub = Hub::of(
        "room",
        &[("config.json", b"{}"), ("model.safetensors", &content)],
    );
    fs::create_dir_all(hub.home()).unwrap();
    let script = format!("mount -t tmpfs -o size=1m none \"$1\" && \"$0\" pull {MODEL}");
    let Some(output) = mounted(&hub, &script) else {
        return;
    };
    let e = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{e}");
    assert!(
        e.contains("3.1 MB are to come") && e.contains("has room for 1.0 MB"),
        "{e}"
    );
    assert!(hub.fetched().is_empty());
}

#[test]
fn models_are_listed_and_removed() {
    let files = golden();
    let hub = Hub::of("models", &slices(&files));
    let list = |args: &[&str]| -> Value {
        pulled(&mut hub.nvfp4(&[&["models", "--json"], args].concat()))
    };
    assert_eq!(list(&[]), json!([]));
    let first = hub.pull(MODEL);
    hub.put("tokenizer.json", b"{\"new\": 1}");
    hub.pull(MODEL);
    let listed = list(&[]);
    let model = &listed[0];
    assert_eq!(
        (&model["model"], listed.as_array().unwrap().len()),
        (&json!(MODEL), 1),
        "{listed}"
    );
    let size: u64 = files.iter().map(|(_, c)| c.len() as u64).sum();
    assert_eq!(model["bytes"], size + 10);
    assert_eq!(model["revisions"].as_array().unwrap().len(), 2);
    let main = &model["revisions"].as_array().unwrap()[0];
    assert_eq!(main["refs"], json!(["main"]));
    assert_eq!(main["models"][0]["name"], MODEL);
    assert_eq!(main["models"][0]["format"], "modelopt");
    assert_eq!(main["models"][0]["encodings"], json!(["BF16", "NVFP4"]));
    assert!(main["models"][0]["needs_bytes"].as_u64().unwrap() > 0);
    assert_eq!(main["models"][0]["mapped_bytes"], 0);
    assert_eq!(
        main["models"][0]["fits"][0],
        json!({"device": "cpu", "fits": true})
    );
    let output = hub.nvfp4(&["models"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains(MODEL) && text.contains("modelopt, BF16 NVFP4") && text.contains("cpu"),
        "{text}"
    );
    // Removing a revision removes the files that only it uses.
    let commit = first["commit"].as_str().unwrap();
    let removed = pulled(&mut hub.nvfp4(&["rm", &format!("{MODEL}@{commit}"), "--json"]));
    assert_eq!(removed["freed_bytes"], files[1].1.len());
    assert_eq!(list(&[])[0]["revisions"].as_array().unwrap().len(), 1);
    assert!(found_offline(&hub, MODEL));
    let e = failure(&mut hub.nvfp4(&["rm", &format!("{MODEL}@{commit}")]));
    assert!(e.contains("the cache holds no org/model@"), "{e}");
    let removed = pulled(&mut hub.nvfp4(&["rm", MODEL, "--json"]));
    assert_eq!(removed["freed_bytes"], size + 10 - files[1].1.len() as u64);
    assert_eq!(names(&hub.home().join("hub")), [".locks"]);
    assert_eq!(names(&hub.home().join("hub/.locks")), [""; 0]);
    let e = failure(&mut hub.nvfp4(&["rm", MODEL]));
    assert!(e.contains("the cache holds no org/model"), "{e}");
}

#[test]
fn a_model_on_its_way_is_listed_and_not_removed() {
    let content = noise(10 << 20);
    let hub = Hub::with(
        "on-its-way",
        &[("config.json", b"{}"), ("model.safetensors", &content)],
        json!({"rate": 2 << 20}),
    );
    let mut child = hub
        .nvfp4(&["pull", MODEL])
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    while hub.sent("/repos/") < 2 << 20 {
        std::thread::sleep(Duration::from_millis(20));
    }
    let list: Value = pulled(&mut hub.nvfp4(&["models", "--json"]));
    let on_its_way = list[0]["partial_bytes"].as_u64().unwrap();
    assert!(on_its_way > 1 << 20 && on_its_way < 10 << 20, "{list}");
    let e = failure(&mut hub.nvfp4(&["rm", MODEL]));
    assert!(e.contains("is being fetched"), "{e}");
    child.kill().unwrap();
    child.wait().unwrap();
    let removed = pulled(&mut hub.nvfp4(&["rm", MODEL, "--json"]));
    assert!(
        removed["freed_bytes"].as_u64().unwrap() > 1 << 20,
        "{removed}"
    );
    assert_eq!(names(&hub.home().join("hub")), [".locks"]);
}
