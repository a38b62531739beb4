//! `nvfp4 pull` against a local server that speaks the hub's few endpoints: what is fetched, resuming, tokens, and refusals.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

const SHA: &str = "0123456789abcdef0123456789abcdef01234567";

/// A hub with one repository, `org/model`.
struct Hub {
    address: String,
    state: Arc<State>,
}

struct State {
    files: BTreeMap<String, Vec<u8>>,
    token: Option<String>,
    /// Break off the first transfer of this file after this many bytes.
    cut: Mutex<Option<(String, usize)>>,
    /// Requests as "path range".
    log: Mutex<Vec<String>>,
}

impl Hub {
    fn start(files: &[(&str, &[u8])], token: Option<&str>) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let state = Arc::new(State {
            files: files
                .iter()
                .map(|(n, c)| ((*n).to_owned(), c.to_vec()))
                .collect(),
            token: token.map(str::to_owned),
            cut: Mutex::new(None),
            log: Mutex::new(Vec::new()),
        });
        let hub = Hub {
            address: format!("http://{}", listener.local_addr().unwrap()),
            state: state.clone(),
        };
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let state = state.clone();
                std::thread::spawn(move || answer(&state, stream.unwrap()));
            }
        });
        hub
    }

    fn fetched(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .state
            .log
            .lock()
            .unwrap()
            .iter()
            .filter_map(|l| l.split_once("/resolve/")?.1.split_once('/'))
            .map(|(_, name)| name.split(' ').next().unwrap().to_owned())
            .collect();
        names.sort();
        names.dedup();
        names
    }

    fn pull(&self, home: &Path, id: &str, token: Option<&str>) -> Output {
        let mut command = self.command(env!("CARGO_BIN_EXE_nvfp4"), home);
        command.args(["pull", id, "--json"]);
        if let Some(token) = token {
            command.env("HF_TOKEN", token);
        }
        command.output().unwrap()
    }

    /// A command for which this is the hub, with its cache in `home`.
    fn command(&self, program: &str, home: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env("HF_ENDPOINT", &self.address)
            .env("HF_HOME", home)
            .env_remove("HF_TOKEN");
        // A proxy of the machine would be asked for the loopback address.
        for name in [
            "http_proxy",
            "https_proxy",
            "all_proxy",
            "HTTP_PROXY",
            "HTTPS_PROXY",
            "ALL_PROXY",
        ] {
            command.env_remove(name);
        }
        command
    }
}

fn answer(state: &State, stream: TcpStream) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut stream = stream;
    loop {
        let mut request = String::new();
        if reader.read_line(&mut request).unwrap_or(0) == 0 {
            return;
        }
        let path = request.split(' ').nth(1).unwrap_or("").to_owned();
        let (mut range, mut token) = (None, None);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 || line.trim().is_empty() {
                break;
            }
            let (name, value) = line.split_once(':').unwrap();
            match name.to_ascii_lowercase().as_str() {
                "range" => range = Some(value.trim().to_owned()),
                "authorization" => token = value.trim().strip_prefix("Bearer ").map(str::to_owned),
                _ => {}
            }
        }
        state
            .log
            .lock()
            .unwrap()
            .push(format!("{path} {}", range.as_deref().unwrap_or("")));
        let mut reply = |status: &str, headers: &str, body: &[u8], length: usize| {
            let head = format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {length}\r\n\r\n");
            let _ = stream.write_all(head.as_bytes());
            let _ = stream.write_all(body);
        };
        if state.token.is_some() && state.token != token {
            reply("401 Unauthorized", "", b"", 0);
            continue;
        }
        if path.starts_with("/api/models/org/model") {
            let names: Vec<_> = state
                .files
                .keys()
                .map(|n| serde_json::json!({ "rfilename": n }))
                .collect();
            let body = serde_json::json!({"siblings": names, "sha": SHA}).to_string();
            reply("200 OK", "", body.as_bytes(), body.len());
            continue;
        }
        let file = path
            .strip_prefix(&format!("/org/model/resolve/{SHA}/"))
            .and_then(|name| Some((name, state.files.get(name)?)));
        let Some((name, content)) = file else {
            reply("404 Not Found", "", b"", 0);
            continue;
        };
        let range = range.expect("the client asks for ranges");
        let (first, last) = range
            .strip_prefix("bytes=")
            .unwrap()
            .split_once('-')
            .unwrap();
        let first: usize = first.parse().unwrap();
        let last = last.parse().unwrap_or(content.len().max(1) - 1);
        let body = &content[first.min(content.len())..content.len().min(last + 1)];
        let headers = format!(
            "ETag: \"etag-of-{name}\"\r\nX-Repo-Commit: {SHA}\r\nContent-Range: bytes {first}-{last}/{}\r\n",
            content.len()
        );
        let mut cut = state.cut.lock().unwrap();
        if last + 1 == content.len()
            && content.len() > 1
            && let Some((_, at)) = cut.take_if(|(victim, _)| victim == name)
        {
            reply("206 Partial Content", &headers, &body[..at], body.len());
            return;
        }
        reply("206 Partial Content", &headers, body, body.len());
    }
}

struct Home(PathBuf);

impl Home {
    fn new(name: &str) -> Home {
        let path = std::env::temp_dir().join(format!("nvfp4-hub-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Home(path)
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn path(output: &Output) -> PathBuf {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    PathBuf::from(json["path"].as_str().unwrap())
}

fn failure(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1));
    String::from_utf8(output.stderr.clone()).unwrap()
}

const INDEX: &[u8] =
    br#"{"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}"#;

#[test]
fn what_a_model_needs_is_fetched_and_only_once() {
    let shard = vec![7u8; 100_000];
    let hub = Hub::start(
        &[
            ("config.json", b"{}"),
            ("tokenizer.json", b"{\"t\": 1}"),
            ("chat_template.jinja", b"x"),
            ("README.md", b"no"),
            ("pytorch_model.bin", b"no"),
            ("model.safetensors.index.json", INDEX),
            ("model-1-of-2.safetensors", &shard),
            ("model-2-of-2.safetensors", b"second"),
            ("model-3-of-3.safetensors", b"no"),
        ],
        None,
    );
    let home = Home::new("needs");
    let directory = path(&hub.pull(&home.0, "org/model", None));
    assert!(directory.starts_with(&home.0));
    assert_eq!(
        std::fs::read(directory.join("model-1-of-2.safetensors")).unwrap(),
        shard
    );
    assert_eq!(
        std::fs::read(directory.join("tokenizer.json")).unwrap(),
        b"{\"t\": 1}"
    );
    let expected = [
        "chat_template.jinja",
        "config.json",
        "model-1-of-2.safetensors",
        "model-2-of-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ];
    assert_eq!(hub.fetched(), expected);
    // A second pull asks for the list alone.
    hub.state.log.lock().unwrap().clear();
    assert_eq!(path(&hub.pull(&home.0, "org/model", None)), directory);
    assert_eq!(hub.fetched(), [""; 0]);
    // The cache is the hub's own: Python's client would look in the same place.
    assert!(home.0.join("hub/models--org--model/refs/main").is_file());
}

#[test]
fn a_broken_download_is_resumed() {
    let weights: Vec<u8> = (0..200_000u32).map(|i| (i / 7) as u8).collect();
    let hub = Hub::start(
        &[("config.json", b"{}"), ("model.safetensors", &weights)],
        None,
    );
    *hub.state.cut.lock().unwrap() = Some(("model.safetensors".to_owned(), 60_000));
    let home = Home::new("resume");
    let directory = path(&hub.pull(&home.0, "org/model", None));
    assert_eq!(
        std::fs::read(directory.join("model.safetensors")).unwrap(),
        weights
    );
    let log = hub.state.log.lock().unwrap();
    let resumed = log.iter().any(|l| {
        l.split_once("model.safetensors bytes=")
            .and_then(|(_, range)| range.strip_suffix('-')?.parse::<usize>().ok())
            .is_some_and(|first| first > 0)
    });
    assert!(resumed, "{log:?}");
}

/// No file may grow beyond 32 kB: to the command it is a full disk.
#[test]
fn a_full_disk_is_said_and_no_part_is_taken_for_the_whole() {
    let weights: Vec<u8> = (0..200_000u32).map(|i| (i / 5) as u8).collect();
    let hub = Hub::start(
        &[("config.json", b"{}"), ("model.safetensors", &weights)],
        None,
    );
    let home = Home::new("full");
    let limited = "trap '' XFSZ; ulimit -f 64; exec \"$0\" \"$@\"";
    let output = hub
        .command("sh", &home.0)
        .args(["-c", limited, env!("CARGO_BIN_EXE_nvfp4")])
        .args(["pull", "org/model"])
        .output()
        .unwrap();
    let e = failure(&output);
    assert!(output.stdout.is_empty());
    assert!(e.contains("fetching model.safetensors"), "{e}");
    assert!(e.contains("File too large"), "{e}");
    let directory = path(&hub.pull(&home.0, "org/model", None));
    assert!(std::fs::read(directory.join("model.safetensors")).unwrap() == weights);
}

#[test]
fn a_model_runs_by_its_id_and_asks_the_hub_once() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/model/qwen3_tied");
    let read = |name: &str| std::fs::read(golden.join(name)).unwrap();
    let (config, tokenizer, weights) = (
        read("config.json"),
        read("tokenizer.json"),
        read("model.safetensors"),
    );
    let mut hub = Hub::start(
        &[
            ("config.json", &config),
            ("tokenizer.json", &tokenizer),
            ("model.safetensors", &weights),
        ],
        None,
    );
    let home = Home::new("run");
    let run = |hub: &Hub, model: &str| {
        let mut command = hub.command(env!("CARGO_BIN_EXE_nvfp4"), &home.0);
        command.args(["run", "--model", model, "--prompt", "Hi", "--json"]);
        let output = command.args(["--max-tokens", "9"]).output().unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        json["tokens"].clone()
    };
    let tokens = run(&hub, "org/model");
    assert!(!tokens.as_array().unwrap().is_empty());
    assert_eq!(run(&hub, golden.to_str().unwrap()), tokens);
    // Nobody listens here; what is in the cache is enough.
    hub.address = "http://127.0.0.1:1".to_owned();
    assert_eq!(run(&hub, "org/model"), tokens);
}

#[test]
fn one_file_by_name() {
    let hub = Hub::start(&[("a.gguf", b"GGUFa"), ("sub/b.gguf", b"GGUFb")], None);
    let home = Home::new("file");
    let file = path(&hub.pull(&home.0, "org/model:sub/b.gguf", None));
    assert_eq!(std::fs::read(&file).unwrap(), b"GGUFb");
    assert_eq!(hub.fetched(), ["sub/b.gguf"]);
    let e = failure(&hub.pull(&home.0, "org/model", None));
    assert!(e.contains("a.gguf, sub/b.gguf"), "{e}");
    let e = failure(&hub.pull(&home.0, "org/model:c.gguf", None));
    assert!(e.contains("holds no c.gguf"), "{e}");
}

#[test]
fn tokens_and_refusals() {
    let hub = Hub::start(
        &[("config.json", b"{}"), ("model.safetensors", b"w")],
        Some("secret"),
    );
    let home = Home::new("token");
    let e = failure(&hub.pull(&home.0, "org/model", None));
    assert!(e.contains("HF_TOKEN"), "{e}");
    let e = failure(&hub.pull(&home.0, "org/model", Some("wrong")));
    assert!(e.contains("HF_TOKEN") && !e.contains("wrong"), "{e}");
    path(&hub.pull(&home.0, "org/model", Some("secret")));
    let e = failure(&hub.pull(&home.0, "org/other", Some("secret")));
    assert!(e.contains("no such model"), "{e}");
}

#[test]
fn an_evil_index_is_refused() {
    let hub = Hub::start(
        &[
            ("config.json", b"{}"),
            (
                "model.safetensors.index.json",
                br#"{"weight_map": {"a": "../../../evil"}}"#,
            ),
        ],
        None,
    );
    let home = Home::new("evil");
    let e = failure(&hub.pull(&home.0, "org/model", None));
    assert!(e.contains("../../../evil"), "{e}");
}

#[test]
fn a_silent_hub_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let home = Home::new("silent");
    let output = Command::new(env!("CARGO_BIN_EXE_nvfp4"))
        .args(["pull", "org/model", "--timeout", "0.3"])
        .env(
            "HF_ENDPOINT",
            format!("http://{}", listener.local_addr().unwrap()),
        )
        .env("HF_HOME", &home.0)
        .env("NO_PROXY", "127.0.0.1")
        .output()
        .unwrap();
    assert!(failure(&output).contains("did not answer within 0.3 s"));
}
