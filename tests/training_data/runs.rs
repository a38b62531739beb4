//! The end and continuation of a run of the command: full disks, signals, the best checkpoint, earlier ones, divergence.

use std::io::{BufRead, BufReader};

use NVFP4::train::checkpoint::list;

use super::*;

/// Runs a command whose files may have at most this many kB, and which ignores the signal of the limit: writing fails as on a full disk.
fn with_small_files(command: &Command, kilobytes: u32) -> Command {
    let mut limited = Command::new("bash");
    limited
        .arg("-c")
        .arg(format!(
            "trap '' XFSZ; ulimit -f {kilobytes}; exec \"$0\" \"$@\""
        ))
        .arg(command.get_program())
        .args(command.get_args());
    limited
}

/// Checkpoints that do not fit on the disk leave the previous one unchanged, and the run continues: the model is delivered, because there
/// is room for it. A stopped run that cannot save its state is an error. Standard error may be on a full disk too.
#[test]
fn a_full_disk_leaves_the_checkpoint_before() {
    let folder = Folder::new("full");
    let options = ["--steps", "20", "--save-every", "8", "--keep", "1"];
    let (output, said) = finish(command(&folder, "whole", &options));
    assert!(output.status.success(), "{said}");
    fs::create_dir_all(folder.path("out")).unwrap();
    let child = command(&folder, "out", &options).spawn().unwrap();
    let checkpoints = folder.path("out").join(run::CHECKPOINTS);
    kill_after_a_checkpoint(child, &checkpoints);
    let before = list(&checkpoints).unwrap();
    let resume: Vec<&str> = options.iter().copied().chain(["--resume"]).collect();
    // A checkpoint has some 240 kB, the model fewer than 150.
    let limited = with_small_files(&command(&folder, "out", &resume), 150);
    let (output, said) = finish(limited);
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("no checkpoint of step 20, the last, could be written")
            && said.contains("state.bin")
            && said.contains("the last one is of step 8"),
        "{said}"
    );
    let there = || list(&checkpoints).unwrap();
    assert_eq!(there(), before);
    let model = |out: &str| fs::read(folder.path(out).join("model/model.safetensors")).unwrap();
    assert_eq!(model("out"), model("whole"));
    // By the file, which is no failure.
    fs::write(folder.path("out/stop"), "").unwrap();
    let (output, said) = finish(command(&folder, "out", &resume));
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("stopped after step 8 of 20; to go on:"),
        "{said}"
    );
    let longer: Vec<&str> = ["--steps", "9999"]
        .into_iter()
        .chain(resume[2..].iter().copied())
        .collect();
    fs::remove_file(folder.path("out/loss.csv")).unwrap();
    let mut child = with_small_files(&command(&folder, "out", &longer), 150)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    signal_after_a_step(&child, &folder.path("out/loss.csv"), "TERM");
    let mut said = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1), "{said}");
    assert!(
        said.contains("where the run was stopped; the last one is of step 8"),
        "{said}"
    );
    // A picture that cannot be written is a warning, once, and is counted.
    fs::create_dir_all(folder.path("reports/loss.svg")).unwrap();
    fs::write(folder.path("reports/loss.csv"), "").unwrap();
    let evaluated = ["--eval-share", "0.1", "--eval-every", "1", "--steps", "3"];
    let (output, said) = finish(command(&folder, "reports", &evaluated));
    assert!(output.status.success(), "{said}");
    assert_eq!(
        said.matches("a report could not be written").count(),
        1,
        "{said}"
    );
    assert!(said.contains("5 reports (loss.csv, loss.svg"), "{said}");
    let mut full = command(&folder, "out", &resume);
    full.stderr(fs::File::options().write(true).open("/dev/full").unwrap());
    assert!(full.status().unwrap().success());
    assert_eq!(states(&folder.path("out")), states(&folder.path("whole")));
}

/// SIGTERM and SIGHUP end a run like Ctrl-C, with a message at once, and a second signal ends the command. Until then no other run can use
/// its directory, and its messages continue.
#[test]
fn signals_end_a_run_with_a_checkpoint_and_one_run_has_a_directory() {
    let folder = Folder::new("signals");
    for (signal, code) in [("TERM", 143), ("HUP", 129)] {
        let options = ["--steps", "5000", "--save-every", "2", "--json"];
        let mut child = command(&folder, signal, &options)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let checkpoints = folder.path(signal).join(run::CHECKPOINTS);
        wait_for("a checkpoint", || {
            match list(&checkpoints).is_ok_and(|all| !all.is_empty()) {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        });
        for more in [&options[..4], &["--steps", "5000", "--resume"]] {
            let (output, said) = finish(command(&folder, signal, more));
            assert_eq!(output.status.code(), Some(1), "{said}");
            assert!(
                said.contains(&format!("process {} on ", child.id())),
                "{said}"
            );
        }
        signal_after_a_step(&child, &folder.path(signal).join("loss.csv"), signal);
        let mut said = String::new();
        std::io::Read::read_to_string(&mut child.stdout.take().unwrap(), &mut said).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(code), "{said}");
        let events = said
            .lines()
            .map(|l| serde_json::from_str::<Value>(l).unwrap());
        let events: Vec<Value> = events.collect();
        let stopping = events.iter().find(|e| e["event"] == "stopping").unwrap();
        assert_eq!(stopping["signal"], format!("SIG{signal}"));
        let end = events.last().unwrap();
        assert_eq!(end["ending"], "stopped");
        let resume = end["resume"].as_str().unwrap();
        assert!(
            resume.contains(" train --init ") && resume.ends_with(" --resume"),
            "{resume}"
        );
        let all = list(&checkpoints).unwrap();
        assert_eq!(end["step"], all.last().unwrap().0);
    }
    // On a busy machine a step may end before the second signal comes; then longer ones are tried.
    let was_at_once = [512, 1024, 2048]
        .into_iter()
        .any(second_signal_ends_at_once);
    assert!(was_at_once, "a second signal waited for a step");
}

/// Sends two signals to a run whose steps have this many windows: the first waits for its step, and the second for nothing. Returns whether
/// the run ended without the checkpoint of that step.
fn second_signal_ends_at_once(windows: usize) -> bool {
    let folder = Folder::new("signals, twice");
    fs::write(folder.path("text.txt"), sentences(8000)).unwrap();
    let windows = windows.to_string();
    let options = [
        "--steps",
        "5000",
        "--accumulate",
        &windows,
        "--window",
        "16",
    ];
    let mut child = command(&folder, "twice", &options)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let said = BufReader::new(child.stderr.take().unwrap());
    let mut said = said.lines().map(Result::unwrap);
    assert!(said.any(|line| line.starts_with("step 1/5000")));
    send(&child, "INT");
    assert!(said.any(|line| line.starts_with("SIGINT: the run ends after this step")));
    send(&child, "INT");
    let status = child.wait().unwrap();
    let is_killed = std::os::unix::process::ExitStatusExt::signal(&status) == Some(2);
    is_killed && !folder.path("twice").join(run::CHECKPOINTS).exists()
}

/// The best checkpoint is kept and delivered, and a run whose evaluations stop improving ends. It evaluates before the first step, and the
/// delivered model has the reported loss.
#[test]
fn the_best_evaluation_is_kept_and_delivered() {
    let folder = Folder::new("best");
    let other = folder.file("other.txt", "Something else entirely, 12345.\n".repeat(8));
    let own = folder.file("own.txt", sentences(20));
    let sets = [
        format!("other={}", other.display()),
        own.display().to_string(),
    ];
    let options = "--eval-every 3 --save-every 1 --keep 1 --steps 60 --tensorboard";
    let options: Vec<&str> = options
        .split(' ')
        .chain(["--eval", &sets[0], &sets[1]])
        .collect();
    let with = |out: &str, more: &[&str]| {
        let all: Vec<&str> = options.iter().chain(more).copied().collect();
        finish(command(&folder, out, &all))
    };
    let (output, said) = with("out", &["--best", "--early-stop", "2", "--json"]);
    assert!(output.status.success(), "{said}");
    let events = String::from_utf8(output.stdout).unwrap();
    let events: Vec<Value> = events
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    let evaluations: Vec<_> = events
        .iter()
        .filter(|e| e["event"] == "evaluation")
        .collect();
    assert_eq!(
        (
            &evaluations[0]["step"],
            &evaluations[0]["set"],
            &evaluations[1]["set"]
        ),
        (&0.into(), &"other".into(), &"eval".into())
    );
    let end = events.last().unwrap();
    let first: Vec<f64> = evaluations
        .iter()
        .step_by(2)
        .map(|e| e["delivered"].as_f64().unwrap())
        .collect();
    let best = first.iter().copied().fold(f64::INFINITY, f64::min);
    let number = first.iter().position(|&l| l == best).unwrap();
    assert_eq!(first.len(), number + 3, "{first:?}");
    assert_eq!(
        (
            &end["ending"],
            &end["delivered_step"],
            end["delivered_loss"].as_f64()
        ),
        (&"early_stopped".into(), &(3 * number).into(), Some(best))
    );
    assert_eq!(end["start_loss"].as_f64(), Some(first[0]));
    // The file has that loss, and its checkpoint is there beside the last one.
    let source = Source::open(&golden("model/qwen3_tied")).unwrap();
    let read = |file: &Path| {
        let text = model_text(&source);
        let options = Options {
            window: 64,
            seed: 3,
            ..Options::default()
        };
        let data = data::read(&[file.to_owned()], &text, 320, &options).unwrap();
        EvaluationSet {
            name: String::new(),
            windows: data.windows().unwrap(),
        }
    };
    let sets = [read(&other), read(&own)];
    let device = Device::cpu(Some(2)).unwrap();
    let found = run::losses_of_file(&device, &folder.path("out/model"), &sets, 4, None).unwrap();
    assert!(
        (found[0].loss / best - 1.0).abs() < 1e-6,
        "{found:?}, {best}"
    );
    let steps = || -> Vec<u64> {
        let all = list(&folder.path("out").join(run::CHECKPOINTS));
        all.unwrap().iter().map(|c| c.0).collect()
    };
    assert_eq!(steps(), [3 * number as u64, 3 * number as u64 + 6]);
    // The row before the first step, and the columns of each set.
    let table = fs::read_to_string(folder.path("out/loss.csv")).unwrap();
    assert!(
        table
            .lines()
            .next()
            .unwrap()
            .ends_with(",eval_loss_delivered:eval,eval_loss_stored:eval")
    );
    assert!(
        table.lines().nth(1).unwrap().starts_with("0,0,,"),
        "{table}"
    );
    let events = fs::read_dir(folder.path("out/tensorboard")).unwrap();
    assert_eq!(events.count(), 1);
    // A resumed run that has ended delivers the same checkpoint.
    let (output, said) = with("out", &["--best", "--early-stop", "2", "--resume"]);
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains(&format!("step {} was the best", 3 * number)),
        "{said}"
    );
    // Another set decides.
    let (output, said) = with("own", &["--best", "eval"]);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("step 60 was the best"), "{said}");
    let (output, said) = with("own", &["--best", "third", "--resume"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("there are other, eval"), "{said}");
}

/// Merged adapters are quantized again, and the loss of that model is reported; a run that makes a model worse says so.
#[test]
fn what_is_delivered_is_measured_and_said_if_it_is_worse() {
    let folder = Folder::new("delivered");
    let text = folder.path("text.txt");
    let options = ["--steps", "60", "--eval-share", "0.05", "--eval-every", "0"];
    let (output, said) = finish(command(&folder, "learned", &options));
    assert!(output.status.success(), "{said}");
    assert!(
        fs::read_to_string(folder.path("learned/loss.svg"))
            .unwrap()
            .contains("evaluation, as delivered")
    );
    let model = folder.path("learned/model");
    let train = |out: &str, more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
        command
            .arg("train")
            .arg("--model")
            .arg(&model)
            .arg("--data")
            .arg(&text);
        command
            .arg("--out")
            .arg(folder.path(out))
            .args(["--device", "cpu", "--window", "64", "--json"]);
        let (output, said) = finish({
            command.args(more).args(["--eval-share", "0.05"]);
            command
        });
        assert!(output.status.success(), "{said}");
        let events = String::from_utf8(output.stdout).unwrap();
        events
            .lines()
            .map(|l| serde_json::from_str::<Value>(l).unwrap())
            .collect::<Vec<_>>()
    };
    let events = train("merged", &["--steps", "3", "--adapter", "4", "--merge"]);
    let told = &events[events.len() - 2..];
    assert_eq!(
        (&told[0]["event"], &told[0]["loss"]),
        (&"delivered".into(), &told[1]["delivered_loss"])
    );
    let last = events.iter().rfind(|e| e["event"] == "evaluation").unwrap();
    let (loss, before) = (
        told[0]["loss"].as_f64().unwrap(),
        last["delivered"].as_f64().unwrap(),
    );
    assert!(
        loss != before && (loss / before - 1.0).abs() < 0.05,
        "{loss}, {before}"
    );
    let events = train("worse", &["--steps", "5", "--rate", "0.05"]);
    let end = events.last().unwrap();
    assert_eq!(end["worse"], true);
    assert!(end["delivered_loss"].as_f64() > end["start_loss"].as_f64());
    // A rate of 0 learns nothing, without a warning that it is too low.
    let events = train("nothing", &["--steps", "15", "--rate", "0"]);
    assert!(events.iter().all(|e| e["event"] != "warning"), "{events:?}");
    let end = events.last().unwrap();
    assert_eq!(
        (&end["worse"], &end["start_loss"]),
        (&false.into(), &end["delivered_loss"])
    );
}

/// A resumed run accepts more steps and another rate, and can resume from an earlier checkpoint: later ones are moved, and foreign files
/// are not touched.
#[test]
fn a_run_goes_on_with_more_steps_and_from_earlier() {
    let folder = Folder::new("earlier");
    let run = |more: &[&str]| {
        let options = ["--save-every", "5", "--keep", "3", "--eval-share", "0.05"];
        let all: Vec<&str> = options.iter().chain(more).copied().collect();
        finish(command(&folder, "out", &all))
    };
    let (output, said) = run(&["--steps", "15"]);
    assert!(output.status.success(), "{said}");
    let checkpoints = folder.path("out").join(run::CHECKPOINTS);
    let steps = |directory: &Path| -> Vec<u64> {
        let all = list(directory).unwrap();
        all.iter().map(|c| c.0).collect()
    };
    fs::create_dir(checkpoints.join("step-00000005.bak")).unwrap();
    fs::write(checkpoints.join("step-notes"), "").unwrap();
    fs::create_dir(checkpoints.join("step-7")).unwrap();
    fs::write(checkpoints.join("step-00000005/notes.txt"), "").unwrap();
    // Leftover of a killed process: no process has this number.
    let left = checkpoints.join(".step-00000012.2147483647-0.partial");
    fs::create_dir(&left).unwrap();
    fs::write(left.join("state.bin"), "").unwrap();
    let (output, said) = run(&["--steps", "20", "--warmup", "0", "--resume"]);
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("with other settings: steps 15, and now 20"),
        "{said}"
    );
    assert!(!left.exists());
    assert_eq!(steps(&checkpoints), [10, 15, 20]);
    let (output, said) = run(&["--steps", "10", "--resume"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said.contains("has taken 20 steps, and is to end after 10"),
        "{said}"
    );
    let (output, said) = run(&["--steps", "20", "--resume-from", "7"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("those of steps 10, 15 and 20"), "{said}");
    let model = fs::read(folder.path("out/model/model.safetensors")).unwrap();
    let last = losses(&folder.path("out"));
    let (output, said) = run(&["--steps", "20", "--warmup", "0", "--resume-from", "15"]);
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("checkpoints/step-00000020, model moved to"),
        "{said}"
    );
    let aside = folder.path("out/aside-1");
    assert_eq!(steps(&aside.join(run::CHECKPOINTS)), [20]);
    assert_eq!(losses(&aside), last);
    assert_eq!(
        fs::read(aside.join("model/model.safetensors")).unwrap(),
        model
    );
    // Repeated steps have the same losses.
    assert_eq!(losses(&folder.path("out")), last);
    assert_eq!(
        fs::read(folder.path("out/model/model.safetensors")).unwrap(),
        model
    );
    for kept in [
        "step-00000005.bak",
        "step-notes",
        "step-7",
        "step-00000005/notes.txt",
    ] {
        assert!(checkpoints.join(kept).exists(), "{kept}");
    }
    // A model that somebody has put something beside is not replaced.
    fs::write(folder.path("out/model/notes.txt"), "").unwrap();
    let (output, said) = run(&["--steps", "20", "--warmup", "0", "--resume"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said.contains("holds notes.txt, which no run has written"),
        "{said}"
    );
}

/// A rate that is far too high ends a run with the reason: nothing is delivered unless requested, and the checkpoint is from before.
#[test]
fn training_that_diverges_delivers_nothing() {
    let folder = Folder::new("diverged");
    let options = [
        "--steps",
        "40",
        "--rate",
        "5",
        "--schedule",
        "constant",
        "--save-every",
        "1",
        "--warmup",
        "0",
    ];
    let (output, said) = finish(command(&folder, "out", &options));
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("training has diverged by step 10")
            && said.contains("above the 5.7683 of a model that knows nothing"),
        "{said}"
    );
    assert!(!folder.path("out/model").exists());
    let all = list(&folder.path("out").join(run::CHECKPOINTS)).unwrap();
    assert!(all.iter().all(|(step, _)| *step < 3), "{all:?}");
    let more: Vec<&str> = options
        .iter()
        .copied()
        .chain(["--export-diverged", "--json"])
        .collect();
    let (output, said) = finish(command(&folder, "asked", &more));
    assert_eq!(output.status.code(), Some(1), "{said}");
    let end: Value = serde_json::from_str(
        String::from_utf8_lossy(&output.stdout)
            .lines()
            .last()
            .unwrap(),
    )
    .unwrap();
    assert_eq!(end["ending"], "diverged");
    assert!(folder.path("asked/model").exists());
}
