//! Starts the stand-in, queries the requests that it has seen, and runs the command against it.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// The model that most tests fetch.
pub(crate) const MODEL: &str = "org/model";

/// A folder of a test's own, removed at the end.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("nvfp4-hub-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(crate) fn write(&self, name: &str, content: &[u8]) {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A hub, with a cache for the commands that are run against it.
pub(crate) struct Hub {
    server: Child,
    pub(crate) scratch: Scratch,
    ports: Value,
}

/// One request as the stand-in saw it.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) server: String,
    pub(crate) path: String,
    pub(crate) status: u64,
    /// Bytes of the body that were sent.
    pub(crate) sent: u64,
    pub(crate) authorization: Option<String>,
}

impl Hub {
    /// A hub with `org/model`, which has these files.
    pub(crate) fn of(name: &str, files: &[(&str, &[u8])]) -> Hub {
        Hub::with(name, files, json!({}))
    }

    /// Starts the stand-in with additional configuration.
    pub(crate) fn with(name: &str, files: &[(&str, &[u8])], more: Value) -> Hub {
        let scratch = Scratch::new(name);
        std::fs::create_dir_all(scratch.path("repo")).unwrap();
        for (file, content) in files {
            scratch.write(&format!("repo/{file}"), content);
        }
        let mut config = json!({"repos": {MODEL: {"main": scratch.path("repo")}}});
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        Hub::start(scratch, &config)
    }

    pub(crate) fn start(scratch: Scratch, config: &Value) -> Hub {
        scratch.write("config.json", config.to_string().as_bytes());
        let ports = scratch.path("ports.json");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hub/hub.py");
        let server = Command::new("python3")
            .args([&script, &scratch.path("config.json"), &ports])
            .stdin(Stdio::null())
            .spawn()
            .expect("the stand-in needs python3");
        let deadline = Instant::now() + Duration::from_secs(60);
        let ports = loop {
            if let Ok(text) = std::fs::read(&ports) {
                break serde_json::from_slice(&text).unwrap();
            }
            assert!(Instant::now() < deadline, "the stand-in does not start");
            std::thread::sleep(Duration::from_millis(10));
        };
        Hub {
            server,
            scratch,
            ports,
        }
    }

    /// The address of the "hub", the "cdn" or the "proxy", or the path of the "ca".
    pub(crate) fn at(&self, what: &str) -> &str {
        self.ports[what].as_str().unwrap()
    }

    /// The folder of the commands' downloads.
    pub(crate) fn home(&self) -> PathBuf {
        self.scratch.path("home")
    }

    /// The model's place in the cache.
    pub(crate) fn place(&self) -> PathBuf {
        self.home().join("hub/models--org--model")
    }

    /// Replaces a file of the repository.
    pub(crate) fn put(&self, name: &str, content: &[u8]) {
        self.scratch.write(&format!("repo/{name}"), content);
        // The stand-in looks at the time of a file's last change.
        self.control("POST", "/-/config", &json!({"rate": 0}));
    }

    /// `program` in an environment that knows this hub and no other.
    pub(crate) fn program(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        for (name, _) in std::env::vars() {
            let lower = name.to_ascii_lowercase();
            if lower.starts_with("hf_")
                || lower.starts_with("hugging")
                || lower.ends_with("_proxy")
                || [
                    "XDG_CACHE_HOME",
                    "SSL_CERT_FILE",
                    "SSL_CERT_DIR",
                    "TRANSFORMERS_OFFLINE",
                ]
                .contains(&name.as_str())
            {
                command.env_remove(name);
            }
        }
        command
            .env("HF_ENDPOINT", self.at("hub"))
            .env("HF_HOME", self.home())
            // Answers and messages are those of the CPU.
            .env("CUDA_VISIBLE_DEVICES", "")
            .stdin(Stdio::null());
        command
    }

    /// `nvfp4` with these arguments.
    pub(crate) fn nvfp4(&self, args: &[&str]) -> Command {
        let mut command = self.program(env!("CARGO_BIN_EXE_nvfp4"));
        command.args(args);
        command
    }

    /// Pulls `name`, which must succeed. Returns the command's JSON output.
    pub(crate) fn pull(&self, name: &str) -> Value {
        pulled(&mut self.nvfp4(&["pull", name, "--json", "--timeout", "5"]))
    }

    /// Pulls `name`, which must fail. Returns the message.
    pub(crate) fn fails(&self, name: &str) -> String {
        failure(&mut self.nvfp4(&["pull", name, "--timeout", "5"]))
    }

    fn control(&self, method: &str, path: &str, body: &Value) -> Value {
        let address = self.at("hub").strip_prefix("http://").unwrap();
        let mut stream = TcpStream::connect(address).unwrap();
        let body = body.to_string();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(
            head.starts_with("HTTP/1.1 200"),
            "{method} {path}: {answer}"
        );
        serde_json::from_str(body).unwrap_or_default()
    }

    /// Sets the faults from now on.
    pub(crate) fn faults(&self, faults: Value) {
        self.control("POST", "/-/faults", &faults);
    }

    /// Nothing goes wrong any more.
    pub(crate) fn no_faults(&self) {
        self.control("DELETE", "/-/faults", &Value::Null);
    }

    /// Faults that have not happened yet.
    pub(crate) fn faults_left(&self) -> usize {
        self.control("GET", "/-/faults", &Value::Null)
            .as_array()
            .unwrap()
            .len()
    }

    pub(crate) fn configure(&self, config: Value) {
        self.control("POST", "/-/config", &config);
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        self.control("GET", "/-/log", &Value::Null)
            .as_array()
            .unwrap()
            .iter()
            .map(|r| Seen {
                server: text(&r["server"]).unwrap(),
                path: text(&r["path"]).unwrap(),
                status: r["status"].as_u64().unwrap_or(0),
                sent: r["sent"].as_u64().unwrap_or(0),
                authorization: text(&r["authorization"]),
            })
            .collect()
    }

    pub(crate) fn forget(&self) {
        self.control("DELETE", "/-/log", &Value::Null);
    }

    /// The files that were asked for, each once.
    pub(crate) fn fetched(&self) -> BTreeSet<String> {
        self.seen()
            .iter()
            .filter_map(|r| r.path.split_once("/resolve/")?.1.split_once('/'))
            .map(|(_, name)| name.to_owned())
            .collect()
    }

    /// Bytes of content sent for files whose address contains `part`.
    pub(crate) fn sent(&self, part: &str) -> u64 {
        self.seen()
            .iter()
            .filter(|r| r.path.contains(part) && (200..300).contains(&r.status))
            .map(|r| r.sent)
            .sum()
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// Runs a pull that must work.
pub(crate) fn pulled(command: &mut Command) -> Value {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs a command that must fail, and prints nothing but one line that says why. Returns the line.
pub(crate) fn failure(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(output.stdout.is_empty());
    said.lines().last().unwrap_or_default().to_owned()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The directory, or the file, that a pull has printed.
pub(crate) fn path(pulled: &Value) -> PathBuf {
    PathBuf::from(pulled["path"].as_str().unwrap())
}

/// The names in a folder, sorted; none if it is not there.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .map(|items| {
            items
                .map(|e| e.unwrap().file_name().into_string().unwrap())
                .collect()
        })
        .unwrap_or_default();
    names.sort();
    names
}

/// Bytes that do not compress and are the same each time.
pub(crate) fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// The files of a small model that runs: those of a golden one.
pub(crate) fn golden() -> Vec<(&'static str, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/model/qwen3_tied");
    ["config.json", "tokenizer.json", "model.safetensors"]
        .into_iter()
        .map(|name| (name, std::fs::read(folder.join(name)).unwrap()))
        .collect()
}

/// Borrowed slices of the files.
pub(crate) fn slices<'a>(files: &'a [(&'a str, Vec<u8>)]) -> Vec<(&'a str, &'a [u8])> {
    files
        .iter()
        .map(|(name, content)| (*name, &content[..]))
        .collect()
}
