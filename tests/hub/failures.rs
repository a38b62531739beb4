//! Temporary and permanent failures: no received data is lost, and nothing that is complete is touched.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::standin::{Hub, MODEL, failure, names, noise, path, pulled, stderr};

const MEGABYTE: usize = 1 << 20;

/// A hub with a model of one large file.
fn large(name: &str, weights: &[u8], more: Value) -> Hub {
    Hub::with(
        name,
        &[("config.json", b"{}"), ("model.safetensors", weights)],
        more,
    )
}

/// Starts a pull and kills it once the CDN has sent `bytes`.
fn killed_after(hub: &Hub, bytes: u64, signal: &str) {
    killed_after_of(hub, "/repos/", bytes, signal);
}

/// As above, when `bytes` of files with `part` in their address have been sent.
fn killed_after_of(hub: &Hub, part: &str, bytes: u64, signal: &str) {
    let mut child = hub
        .nvfp4(&["pull", MODEL])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while hub.sent(part) < bytes {
        assert!(Instant::now() < deadline && child.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(20));
    }
    let killed = Command::new("kill")
        .args([signal, &child.id().to_string()])
        .status()
        .unwrap();
    assert!(killed.success());
    assert!(!child.wait().unwrap().success());
}

fn weights(pulled: &Value) -> Vec<u8> {
    std::fs::read(path(pulled).join("model.safetensors")).unwrap()
}

#[test]
fn a_download_cut_twenty_times_and_killed_arrives_whole() {
    let content = noise(96 * MEGABYTE);
    let hub = large("cuts", &content, json!({"rate": 30 << 20}));
    let mut faults = Vec::new();
    for i in 0..20u64 {
        // Places that look like chance and are the same each time.
        let after = (i * 2_654_435_761) % (3 << 20);
        faults.push(match i % 4 {
            0 | 2 => json!({"on": "^cdn GET", "kind": "cut", "after": after}),
            1 => json!({"on": "^cdn GET", "kind": "reset", "after": after}),
            _ => json!({"on": "^cdn GET", "kind": "stall", "after": after, "seconds": 3}),
        });
        let status = match i % 5 {
            1 => json!({"status": 429, "headers": {"Retry-After": "1"}}),
            3 => json!({"status": 503}),
            _ => continue,
        };
        let mut fault = json!({"on": "^cdn GET", "kind": "status"});
        fault
            .as_object_mut()
            .unwrap()
            .extend(status.as_object().unwrap().clone());
        faults.push(fault);
    }
    let count = faults.len();
    hub.faults(json!(faults));
    killed_after(&hub, 40 << 20, "-KILL");
    assert!(hub.faults_left() < count);
    // An incomplete file is not visible.
    assert_eq!(names(&hub.place().join("snapshots")).len(), 1);
    let snapshot = hub
        .place()
        .join("snapshots")
        .join(&names(&hub.place().join("snapshots"))[0]);
    assert_eq!(names(&snapshot), ["config.json"]);
    hub.configure(json!({"rate": 0}));
    let pulled = pulled(&mut hub.nvfp4(&["pull", MODEL, "--json", "--timeout", "1"]));
    assert_eq!(hub.faults_left(), 0);
    assert!(weights(&pulled) == content);
    let sent = hub.sent("/repos/");
    assert!(
        sent <= content.len() as u64 * 11 / 10,
        "{sent} bytes were sent"
    );
    assert!(
        names(&hub.place().join("blobs"))
            .iter()
            .all(|n| !n.contains("partial"))
    );
}

#[test]
fn what_has_come_survives_refusals_while_resuming() {
    let content = noise(24 * MEGABYTE);
    let hub = large("refusals", &content, json!({"rate": 20 << 20}));
    killed_after(&hub, 10 << 20, "-INT");
    hub.configure(json!({"rate": 0}));
    for status in [429, 503] {
        hub.faults(json!([{"on": "^cdn", "kind": "status", "status": status, "headers": {"Retry-After": "1200"}}]));
        let e = hub.fails(MODEL);
        assert!(
            e.contains(&status.to_string()) && e.contains("20 minutes"),
            "{e}"
        );
    }
    hub.faults(
        json!([{"on": "^cdn", "kind": "reset"}, {"on": "^cdn", "kind": "status", "status": 500}]),
    );
    let pulled = hub.pull(MODEL);
    assert!(weights(&pulled) == content);
    assert!(
        pulled["fetched_bytes"].as_u64().unwrap() < 16 << 20,
        "{pulled}"
    );
    assert!(hub.sent("/repos/") <= content.len() as u64 * 11 / 10 + (4 << 20));
}

#[test]
fn a_whole_content_is_never_touched() {
    let old = noise(MEGABYTE);
    let hub = large("touched", &old, json!({}));
    let first = path(&hub.pull(MODEL));
    let new: Vec<u8> = old.iter().map(|b| b ^ 1).collect();
    hub.put("model.safetensors", &new);
    for fault in [
        json!({"on": "^cdn", "kind": "corrupt", "at": 500_000}),
        json!({"on": "^cdn", "kind": "short", "by": 7}),
        json!({"on": "^cdn", "kind": "status", "status": 503, "headers": {"Retry-After": "1200"}}),
    ] {
        hub.faults(json!([fault]));
        hub.fails(MODEL);
        assert!(std::fs::read(first.join("model.safetensors")).unwrap() == old);
    }
    // Content that is there is linked to, not fetched, whatever the CDN says.
    hub.put("model.safetensors", &old);
    std::fs::remove_dir_all(&first).unwrap();
    hub.faults(json!([{"on": "^cdn", "kind": "status", "status": 403, "times": 100}]));
    let second = path(&hub.pull(MODEL));
    assert!(std::fs::read(second.join("model.safetensors")).unwrap() == old);
}

#[test]
fn a_server_may_ask_for_time() {
    let hub = large("time", &noise(1000), json!({}));
    hub.faults(json!([
        {"on": "^hub GET /api/models", "kind": "status", "status": 429, "headers": {"Retry-After": "2"},
         "body": "slow down, please"},
        {"on": "^cdn", "kind": "status", "status": 429, "headers": {"RateLimit": "\"resolvers\";r=0;t=2"}},
    ]));
    let start = Instant::now();
    let output = hub.nvfp4(&["pull", MODEL]).output().unwrap();
    let took = start.elapsed();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(
        took >= Duration::from_secs(4) && took < Duration::from_secs(8),
        "{took:?}"
    );
    let said = stderr(&output);
    assert!(
        said.contains("answers 429: slow down, please; trying again in 2 s"),
        "{said}"
    );
}

#[test]
fn silence_has_an_end() {
    let content = noise(3 * MEGABYTE);
    let hub = large("silence", &content, json!({}));
    let timeout = |seconds| ["pull", MODEL, "--json", "--timeout", seconds];
    // One connection that is dead is replaced by another, as often as something comes between.
    hub.faults(json!([
        {"on": "^cdn", "kind": "stall", "after": 100_000, "seconds": 60},
        {"on": "^cdn", "kind": "stall", "after": 1_000_000, "seconds": 60},
    ]));
    let start = Instant::now();
    pulled(&mut hub.nvfp4(&timeout("2")));
    assert!(
        start.elapsed() < Duration::from_secs(9),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(hub.faults_left(), 0);
    // A server that says nothing any more is given up after the time that the user names, and one more try of half as long.
    for (seconds, first, on) in [
        (1, -1, "^cdn"),
        (1, 100_000, "^cdn"),
        (3, 100_000, "^cdn"),
        (1, -1, "/resolve/"),
    ] {
        hub.no_faults();
        hub.faults(json!([
            {"on": on, "kind": "stall", "after": first, "seconds": 60},
            {"on": on, "kind": "stall", "after": -1, "seconds": 60, "times": 99},
        ]));
        let home = hub
            .scratch
            .path(&format!("home-{seconds}-{first}-{}", on.len()));
        let start = Instant::now();
        let mut command = hub.nvfp4(&timeout(["0", "1", "2", "3"][seconds as usize]));
        let e = failure(command.env("HF_HOME", home));
        let took = start.elapsed().as_secs_f64();
        assert!(
            e.contains(&format!("for {seconds} s")) || e.contains(&format!("within {seconds} s")),
            "{e}"
        );
        assert!(e.contains("what has come is kept"), "{e}");
        let seconds = f64::from(seconds);
        assert!(
            took >= seconds && took < 1.5 * seconds + 1.5,
            "{took} s of {seconds}: {e}"
        );
    }
    hub.no_faults();
    // So is one that sends the same beginning again and again, and nothing more.
    hub.configure(json!({"plain": true}));
    hub.faults(json!([{"on": "model.safetensors", "kind": "stall", "after": 100_000, "seconds": 60, "times": 99}]));
    let start = Instant::now();
    let mut command = hub.nvfp4(&timeout("1"));
    let e = failure(command.env("HF_HOME", hub.scratch.path("again")));
    assert!(e.contains("sent nothing for 1 s"), "{e}");
    assert!(
        start.elapsed() < Duration::from_secs(4),
        "{:?}",
        start.elapsed()
    );
    hub.no_faults();
    // A hub that says nothing at all is given up at once.
    hub.faults(json!([{"on": "^hub", "kind": "stall", "after": -1, "seconds": 60, "times": 9}]));
    let start = Instant::now();
    let mut command = hub.nvfp4(&["pull", MODEL, "--timeout", "1"]);
    let e = failure(command.env("HF_HOME", hub.scratch.path("other")));
    assert!(e.contains("did not answer within 1 s"), "{e}");
    assert!(
        start.elapsed() < Duration::from_secs(4),
        "{:?}",
        start.elapsed()
    );
}

#[test]
fn addresses_that_expire_are_asked_for_again() {
    let content = noise(70 * MEGABYTE);
    let hub = large(
        "expire",
        &content,
        json!({"signature_seconds": 1, "rate": 8 << 20}),
    );
    // The rest of an answer that breaks off is asked for after 2 s.
    hub.faults(json!([{"on": "^cdn", "kind": "cut", "after": 16 << 20}]));
    assert!(weights(&hub.pull(MODEL)) == content);
    assert!(
        hub.seen()
            .iter()
            .any(|r| r.server == "cdn" && r.status == 403)
    );
}

/// The hub gives each connection so much and no more.
#[test]
fn several_connections_where_they_are_faster() {
    let content = noise(128 * MEGABYTE);
    let hub = large("connections", &content, json!({"rate": 16 << 20}));
    let start = Instant::now();
    assert!(weights(&hub.pull(MODEL)) == content);
    let took = start.elapsed();
    // 8 s by one connection, 2 s by one for each of the four segments.
    assert!(took < Duration::from_secs(6), "{took:?}");
    assert_eq!(hub.sent("/repos/"), content.len() as u64);
}

#[test]
fn what_came_is_checked() {
    let content = noise(MEGABYTE);
    let hub = large("checked", &content, json!({}));
    hub.faults(json!([{"on": "^cdn", "kind": "corrupt", "at": 1234}]));
    let e = hub.fails(MODEL);
    assert!(
        e.contains("model.safetensors") && e.contains("SHA-256"),
        "{e}"
    );
    hub.faults(json!([{"on": "^cdn", "kind": "short", "by": 1}]));
    let e = hub.fails(MODEL);
    assert!(e.contains("bytes 0-1048575/1048576"), "{e}");
    // Small files have Git's hash.
    hub.put("config.json", b"{\"a\": 1}");
    hub.faults(json!([{"on": "^hub GET /api/resolve-cache/", "kind": "corrupt", "at": 3}]));
    let e = hub.fails(MODEL);
    assert!(e.contains("config.json") && e.contains("Git SHA-1"), "{e}");
    assert!(
        names(&hub.place().join("blobs"))
            .iter()
            .all(|n| !n.contains("partial"))
    );
    assert!(weights(&hub.pull(MODEL)) == content);
}

/// As after a power failure: the table says that bytes are there which are not.
#[test]
fn what_an_earlier_pull_has_left_is_not_trusted() {
    let content = noise(24 * MEGABYTE);
    let hub = large("power", &content, json!({"rate": 20 << 20}));
    killed_after(&hub, 8 << 20, "-KILL");
    hub.configure(json!({"rate": 0}));
    let blobs = hub.place().join("blobs");
    let partial = names(&blobs)
        .into_iter()
        .find(|n| n.ends_with("partial"))
        .unwrap();
    let mut there = std::fs::read(blobs.join(&partial)).unwrap();
    there[1000..2000].fill(0);
    std::fs::write(blobs.join(&partial), there).unwrap();
    let output = hub.nvfp4(&["pull", MODEL, "--json"]).output().unwrap();
    let said = stderr(&output);
    assert!(
        said.contains("SHA-256") && said.contains("fetching all of it anew"),
        "{said}"
    );
    assert!(weights(&serde_json::from_slice(&output.stdout).unwrap()) == content);
}

#[test]
fn two_pulls_share_one_download() {
    let content = noise(14 * MEGABYTE);
    let hub = large("two", &content, json!({"rate": 2 << 20}));
    let pull = || {
        hub.nvfp4(&["pull", MODEL, "--json"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let first = pull();
    std::thread::sleep(Duration::from_millis(1500));
    let second = pull();
    let (first, second) = (
        first.wait_with_output().unwrap(),
        second.wait_with_output().unwrap(),
    );
    for output in [&first, &second] {
        assert!(output.status.success(), "{}", stderr(output));
        assert!(weights(&serde_json::from_slice(&output.stdout).unwrap()) == content);
    }
    let said = stderr(&second);
    assert!(
        said.contains("another program fetches model.safetensors"),
        "{said}"
    );
    assert_eq!(hub.sent("/repos/"), content.len() as u64);
}

#[test]
fn who_waits_goes_on_where_the_other_was_killed() {
    let content = noise(10 * MEGABYTE);
    let hub = large("goes-on", &content, json!({"rate": 2 << 20}));
    let mut first = hub
        .nvfp4(&["pull", MODEL])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_secs(2));
    let second = hub
        .nvfp4(&["pull", MODEL, "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_secs(1));
    first.kill().unwrap();
    first.wait().unwrap();
    hub.configure(json!({"rate": 0}));
    let output = second.wait_with_output().unwrap();
    let pulled: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(weights(&pulled) == content);
    assert!(
        pulled["fetched_bytes"].as_u64().unwrap() < 9 << 20,
        "{pulled}"
    );
}

#[test]
fn mirrors_that_know_no_ranges_no_sizes_and_no_names() {
    let content = noise(40 * MEGABYTE);
    let text = "some words that compress well ".repeat(10_000);
    for (name, config) in [
        ("plain", json!({"plain": true})),
        ("plain-names", json!({"plain": true, "metadata": false})),
        ("names", json!({"metadata": false})),
        (
            "nothing",
            json!({"plain": true, "metadata": false, "etags": false}),
        ),
        ("gzip", json!({"always_gzip": true})),
        (
            "gzip-names",
            json!({"always_gzip": true, "plain": true, "metadata": false, "etags": false}),
        ),
    ] {
        let hub = Hub::with(
            name,
            &[
                ("config.json", b"{}"),
                ("merges.txt", text.as_bytes()),
                ("tokenizer.json", b"{\"t\": 1}"),
                ("model.safetensors", &content),
            ],
            config,
        );
        // A connection that breaks once, both where the download must start over and where it can be resumed.
        hub.faults(json!([{"on": "GET .*model.safetensors", "kind": "cut", "after": 5_000_000}]));
        let pulled = hub.pull(MODEL);
        assert!(weights(&pulled) == content, "{name}");
        let merges = std::fs::read(path(&pulled).join("merges.txt")).unwrap();
        assert!(merges == text.as_bytes(), "{name}");
        hub.forget();
        hub.pull(MODEL);
        assert_eq!(hub.seen().len(), 1, "{name}");
    }
}

/// A download that cannot be resumed is not kept: content of unknown size starts over each time.
#[test]
fn what_cannot_be_resumed_is_gone_when_the_pull_is_killed() {
    let text: String = noise(2 * MEGABYTE)
        .iter()
        .map(|b| format!("{b:02x}\n"))
        .collect();
    let unsized_text =
        json!({"always_gzip": true, "plain": true, "metadata": false, "etags": false});
    let hub = large("unsized", b"weights", unsized_text);
    hub.put("merges.txt", text.as_bytes());
    for signal in ["-KILL", "-INT"] {
        hub.faults(json!([{"on": "GET .*merges.txt", "kind": "slow", "rate": 1 << 20}]));
        killed_after_of(&hub, "merges.txt", 1 << 19, signal);
        let left: Vec<String> = names(&hub.place().join("blobs"))
            .into_iter()
            .filter(|n| n.contains("partial"))
            .collect();
        assert!(left.is_empty(), "{signal}: {left:?}");
        hub.forget();
    }
    let pulled = hub.pull(MODEL);
    assert!(std::fs::read(path(&pulled).join("merges.txt")).unwrap() == text.as_bytes());
}

/// No file may grow beyond 32 kB: to the command it is a full disk.
#[test]
fn a_full_disk_is_said_and_no_part_is_taken_for_the_whole() {
    let content = noise(200_000);
    let hub = large("full", &content, json!({}));
    let limited = "ulimit -f 64; exec \"$0\" \"$@\"";
    let mut command = hub.program("sh");
    command
        .args(["-c", limited, env!("CARGO_BIN_EXE_nvfp4")])
        .args(["pull", MODEL]);
    let e = failure(&mut command);
    assert!(
        e.contains("model.safetensors") && e.contains("File too large"),
        "{e}"
    );
    assert!(weights(&hub.pull(MODEL)) == content);
}
