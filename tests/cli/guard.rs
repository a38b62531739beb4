//! `nvfp4 guard`, with a stand-in for `nvidia-smi` that says what a file says.

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::Scratch;

/// Answers both queries with what `memory` says: the command's MiB, and the GPU's.
const SMI: &str = r#"#!/bin/sh
read -r own all <"$(dirname "$0")/memory" || exit 9
case "$1" in
    *apps*) while read -r pid; do echo "$pid, $own"; done <"$(dirname "$0")/pid" ;;
    *) echo "$all" ;;
esac
"#;

struct Smi(Scratch);

impl Smi {
    fn new(name: &str) -> Smi {
        let scratch = Scratch::new(name);
        let smi = scratch.file("nvidia-smi", SMI.as_bytes());
        std::fs::set_permissions(smi, std::fs::Permissions::from_mode(0o755)).unwrap();
        let smi = Smi(scratch);
        smi.0.file("pid", b"");
        smi.says("0 0");
        smi
    }

    fn says(&self, memory: &str) {
        self.0.file("memory", format!("{memory}\n").as_bytes());
    }

    /// The guard of a shell command.
    fn guard(&self, options: &[&str], command: &str) -> Command {
        let folder = self.0.path("");
        let path = format!("{folder}:{}", std::env::var("PATH").unwrap());
        let mut guard = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
        guard.env("PATH", path).env("DIR", folder);
        guard
            .args(["guard", "--poll-secs", "0.05"])
            .args(options)
            .args(["--", "sh", "-c", command]);
        guard
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_command_within_the_limit_ends_as_it_would_alone() {
    let smi = Smi::new("guard-within");
    smi.says("1000 2000");
    let output = smi
        .guard(&["--limit-gb", "3"], "echo done; exit 7")
        .output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(output.stdout, b"done\n");
    let killed = smi.guard(&[], "kill -TERM $$").output().unwrap();
    assert_eq!(killed.status.code(), Some(128 + 15));
}

#[test]
fn a_command_that_passes_the_limit_is_killed_with_its_children() {
    let smi = Smi::new("guard-passes");
    // The grandchild takes the memory.
    let command =
        r#"sh -c 'echo $$ >"$DIR/pid"; echo "3000 0" >"$DIR/memory"; sleep 100; true' & wait"#;
    let start = Instant::now();
    let output = smi.guard(&["--limit-gb", "2.5"], command).output().unwrap();
    assert!(start.elapsed() < Duration::from_secs(50));
    assert_eq!(output.status.code(), Some(124), "{}", said(&output));
    let line = said(&output);
    assert!(
        line.contains("killed sh: pid_mem 3.15 GB, total_mem 0.00 GB, limit 2.50 GB"),
        "{line}"
    );
    let pid = std::fs::read_to_string(smi.0.path("pid")).unwrap();
    let state = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
    assert!(
        state.is_err() || state.unwrap().contains(") Z "),
        "the grandchild runs on"
    );
}

#[test]
fn the_limit_holds_for_the_whole_machine_and_for_some_time() {
    let smi = Smi::new("guard-total");
    let command =
        r#"echo "0 4000" >"$DIR/memory"; sleep 0.6; echo "0 0" >"$DIR/memory"; sleep 0.3"#;
    let mut patient = smi.guard(&["--limit-gb", "2", "--over-secs", "30"], command);
    assert_eq!(patient.status().unwrap().code(), Some(0));
    let mut hasty = smi.guard(&["--limit-gb", "2", "--over-secs", "0.2"], command);
    let output = hasty.output().unwrap();
    assert_eq!(output.status.code(), Some(124), "{}", said(&output));
    assert!(
        said(&output).contains("total_mem 4.19 GB"),
        "{}",
        said(&output)
    );
}

#[test]
fn signals_reach_the_command() {
    let smi = Smi::new("guard-signal");
    let command = r#"trap 'echo caught; exit 3' TERM; echo ready >"$DIR/ready"; while :; do sleep 0.05; done"#;
    let mut guard = smi.guard(&[], command);
    let guard = guard.stdout(std::process::Stdio::piped()).spawn().unwrap();
    while !std::path::Path::new(&smi.0.path("ready")).exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let kill = Command::new("kill")
        .args(["-TERM", &guard.id().to_string()])
        .status();
    assert!(kill.unwrap().success());
    let output = guard.wait_with_output().unwrap();
    assert_eq!(
        (output.status.code(), &*output.stdout),
        (Some(3), &b"caught\n"[..])
    );
}

#[test]
fn what_cannot_be_watched_does_not_begin() {
    let smi = Smi::new("guard-blind");
    std::fs::remove_file(smi.0.path("memory")).unwrap();
    let output = smi.guard(&[], r#"echo ran >"$DIR/ran""#).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("nvidia-smi"), "{}", said(&output));
    assert!(!std::path::Path::new(&smi.0.path("ran")).exists());
    smi.says("0 0");
    let none = Command::new(env!("CARGO_BIN_EXE_nvfp4"))
        .args(["guard"])
        .output();
    assert_eq!(none.unwrap().status.code(), Some(2));
    let missing = smi.guard(&[], "").args(["more"]).output().unwrap();
    assert_eq!(missing.status.code(), Some(0));
    let mut absent = smi.guard(&[], "");
    absent.env("PATH", "/nowhere");
    let output = absent.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("nvidia-smi"), "{}", said(&output));
}
