//! Files that the command leaves on disk: a model directory is new or replaced whole, never mixed with another model's files, and a
//! conversion that is stopped in any way leaves nothing.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use NVFP4::checkpoint::{PACKED_FILE, PackedFile, SourceFile};
use NVFP4::model::open;

const MODEL: &str = "tests/golden/model/qwen3_tied";

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("nvfp4-disk-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    /// A file with this content, in a directory that is made if need be.
    fn file(&self, name: &str, content: &[u8]) -> String {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        self.path(name)
    }

    /// A directory that holds another model than [`MODEL`], with a tokenizer of its own.
    fn other_model(&self, name: &str) -> String {
        let out = self.path(name);
        let _ = fs::remove_dir_all(&out);
        succeeded(&nvfp4(&["synth", "--arch", "tiny", "--out", &out]));
        self.file(&format!("{name}/tokenizer.json"), b"another model's");
        self.file(&format!("{name}/vocab.json"), b"{}");
        out
    }

    /// A model whose conversion takes some time: weights of zeros, which take no disk space.
    fn large_model(&self, name: &str) -> String {
        self.model_of_zeros(name, 1 << 16)
    }

    /// A model with weights of zeros, whose intermediate size is `wide`.
    fn model_of_zeros(&self, name: &str, wide: u64) -> String {
        const HIDDEN: u64 = 1 << 10;
        let (mut items, mut end) = (Vec::new(), 0);
        for (tensor, rows, cols) in [
            ("layers.0.mlp.down_proj", HIDDEN, wide),
            ("layers.0.mlp.gate_proj", wide, HIDDEN),
            ("layers.0.mlp.up_proj", wide, HIDDEN),
            ("layers.0.self_attn.q_proj", HIDDEN, HIDDEN),
            ("layers.0.self_attn.k_proj", 128, HIDDEN),
            ("layers.0.self_attn.v_proj", 128, HIDDEN),
            ("layers.0.self_attn.o_proj", HIDDEN, HIDDEN),
            ("layers.0.input_layernorm", 0, HIDDEN),
            ("layers.0.post_attention_layernorm", 0, HIDDEN),
            ("norm", 0, HIDDEN),
            ("embed_tokens", 64, HIDDEN),
        ] {
            let shape = match rows {
                0 => format!("[{cols}]"),
                _ => format!("[{rows},{cols}]"),
            };
            let start = end;
            end += rows.max(1) * cols * 2;
            items.push(format!(
                r#""model.{tensor}.weight":{{"dtype":"BF16","shape":{shape},"data_offsets":[{start},{end}]}}"#
            ));
        }
        let header = format!("{{{}}}", items.join(","));
        let mut start = (header.len() as u64).to_le_bytes().to_vec();
        start.extend(header.as_bytes());
        let path = self.file(&format!("{name}/model.safetensors"), &start);
        let file = fs::File::options().write(true).open(path).unwrap();
        file.set_len(start.len() as u64 + end).unwrap();
        let config = format!(
            r#"{{"model_type":"llama","hidden_size":{HIDDEN},"intermediate_size":{wide},"num_hidden_layers":1,"num_attention_heads":8,
                "num_key_value_heads":1,"vocab_size":64,"max_position_embeddings":64,"rms_norm_eps":1e-6,"tie_word_embeddings":true}}"#
        );
        self.file(&format!("{name}/config.json"), config.as_bytes());
        self.path(name)
    }

    fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        files(&self.0)
    }

    /// The names in it, and how long each file is.
    fn listing(&self) -> Vec<(PathBuf, u64)> {
        let mut all: Vec<(PathBuf, u64)> = paths(&self.0)
            .into_iter()
            .map(|p| {
                let length = fs::metadata(&p).unwrap().len();
                (p, length)
            })
            .collect();
        all.sort();
        all
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// All files and folders below `folder`.
fn paths(folder: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for item in fs::read_dir(folder).unwrap() {
        let path = item.unwrap().path();
        if path.is_dir() {
            all.extend(paths(&path));
        }
        all.push(path);
    }
    all
}

/// All files below `folder` with their content.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let relative = |p: &Path| p.strip_prefix(folder).unwrap().to_owned();
    paths(folder)
        .iter()
        .filter(|p| p.is_file())
        .map(|p| (relative(p), fs::read(p).unwrap()))
        .collect()
}

fn names(folder: &str) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    command.env("CUDA_VISIBLE_DEVICES", "").args(args);
    command
}

fn nvfp4(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn succeeded(output: &Output) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}

/// The message of a call that must fail with exit code 1.
fn failure(args: &[&str]) -> String {
    let output = nvfp4(args);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
    said
}

/// System features that older systems and other file systems lack.
#[derive(Clone, Copy, PartialEq)]
enum Without {
    /// Files without a name: `O_TMPFILE`.
    NamelessFiles,
    /// `RENAME_EXCHANGE`.
    Exchange,
    /// A name for a file without one: `linkat`, as in some sandboxes.
    Naming,
}

/// Makes the system refuse what `command` is to do without.
fn without(command: &mut Command, what: Without) {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const IF_ANY_BIT: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    // In a filter's view, the number of a call is at offset 0, and the low halves of its arguments are from offset 16 on, 8 bytes apart.
    let (call, argument, bit, error) = match what {
        Without::NamelessFiles => (
            libc::SYS_openat,
            2,
            libc::O_TMPFILE & !libc::O_DIRECTORY,
            libc::EOPNOTSUPP,
        ),
        Without::Exchange => (
            libc::SYS_renameat2,
            4,
            libc::RENAME_EXCHANGE as i32,
            libc::EINVAL,
        ),
        Without::Naming => (libc::SYS_linkat, 4, libc::AT_SYMLINK_FOLLOW, libc::EPERM),
    };
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut steps = [
        step(LOAD, 0, 0, 0),
        step(IF_EQUAL, 0, 3, call as u32),
        step(LOAD, 0, 0, 16 + 8 * argument),
        step(IF_ANY_BIT, 0, 1, bit as u32),
        step(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | error as u32),
        step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let install = move || {
        let program = libc::sock_fprog {
            len: steps.len() as u16,
            filter: steps.as_mut_ptr(),
        };
        // SAFETY: the program and its steps live through the calls.
        let done = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(
                    libc::PR_SET_SECCOMP,
                    libc::SECCOMP_MODE_FILTER,
                    &raw const program,
                ) == 0
        };
        match done {
            true => Ok(()),
            false => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: the closure makes system calls alone, and takes no memory.
    unsafe { command.pre_exec(install) };
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether `child` has a file open in `folder` for which `is_it` holds, by its path as the system tells it.
fn has_open(child: &Child, folder: &Path, is_it: impl Fn(&str) -> bool) -> bool {
    let Ok(open) = fs::read_dir(format!("/proc/{}/fd", child.id())) else {
        return false;
    };
    open.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok())
        .any(|path| path.starts_with(folder) && is_it(&path.to_string_lossy()))
}

/// Starts a command and waits until it writes: to a file without a name, or to one that says that it is partial.
fn started(command: &mut Command, folder: &Path) -> Child {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("a temporary file", || {
        assert!(child.try_wait().unwrap().is_none(), "it ended too early");
        has_open(&child, folder, |path| {
            path.ends_with(" (deleted)") || path.ends_with(".partial")
        })
    });
    child
}

fn send(child: &Child, signal: i32) {
    // SAFETY: the child was not waited for yet, so that its number is its own.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

#[test]
fn a_directory_with_something_in_it_is_refused() {
    let scratch = Scratch::new("refused");
    let out = scratch.other_model("out");
    for number in 0..10 {
        scratch.file(&format!("out/z{number}"), b"");
    }
    let before = scratch.files();
    for args in [
        &["quantize", MODEL, &out][..],
        &["synth", "--arch", "tiny", "--out", &out],
    ] {
        let said = failure(args);
        for part in [
            &*out,
            "config.json",
            "model.safetensors",
            "and 9 more",
            "--force",
        ] {
            assert!(said.contains(part), "{said}");
        }
        assert!(scratch.files() == before, "{args:?}");
    }
    // One that is empty is written to: it may be where another disk is mounted.
    let empty = scratch.path("empty");
    fs::create_dir(&empty).unwrap();
    succeeded(&nvfp4(&["quantize", MODEL, &empty]));
    succeeded(&nvfp4(&["inspect", &empty]));
    let file = scratch.file("file", b"x");
    let said = failure(&["quantize", MODEL, &file]);
    assert!(said.contains("not a directory"), "{said}");
    assert_eq!(fs::read(&file).unwrap(), b"x");
}

#[test]
fn a_model_that_is_replaced_leaves_nothing_of_itself() {
    let scratch = Scratch::new("chimera");
    let fresh = scratch.path("fresh");
    succeeded(&nvfp4(&["quantize", MODEL, &fresh]));
    let expected = files(Path::new(&fresh));
    assert!(!expected.contains_key(Path::new("vocab.json")));
    for without in [
        None,
        Some(Without::Exchange),
        Some(Without::NamelessFiles),
        Some(Without::Naming),
    ] {
        let out = scratch.other_model("out");
        let mut quantize = command(&["quantize", MODEL, &out, "--force"]);
        if let Some(what) = without {
            self::without(&mut quantize, what);
        }
        // Whoever looks sees the old model or the new one.
        let old = names(&out);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let watcher = scope.spawn(|| {
                let mut missing = 0;
                while !done.load(Ordering::Relaxed) {
                    match fs::read_dir(&out) {
                        Ok(items) => {
                            let mut seen: Vec<String> = items
                                .filter_map(|e| e.ok()?.file_name().into_string().ok())
                                .collect();
                            seen.sort();
                            let new = expected.keys().map(|p| p.to_str().unwrap());
                            // The old one may be on its way out by the time it is listed.
                            let is_old = seen.iter().all(|n| old.contains(n));
                            assert!(is_old || new.eq(seen.iter()), "{seen:?}");
                        }
                        Err(_) => missing += 1,
                    }
                }
                missing
            });
            let output = quantize.output().unwrap();
            done.store(true, Ordering::Relaxed);
            succeeded(&output);
            let missing = watcher.join().unwrap();
            assert!(missing == 0 || without == Some(Without::Exchange));
        });
        assert!(files(Path::new(&out)) == expected);
        assert_eq!(names(scratch.0.to_str().unwrap()), ["fresh", "out"]);
    }
    // Through a link: its target is replaced.
    let out = scratch.other_model("out2");
    std::os::unix::fs::symlink(&out, scratch.path("link")).unwrap();
    let link = scratch.path("link");
    succeeded(&nvfp4(&["quantize", MODEL, &link, "--force"]));
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(files(Path::new(&out)) == expected);
    succeeded(&nvfp4(&[
        "synth", "--arch", "tiny", "--out", &out, "--force",
    ]));
    assert!(!Path::new(&out).join("tokenizer.json").exists());
}

#[test]
fn force_replaces_models_alone() {
    let scratch = Scratch::new("force");
    // Somebody's home.
    scratch.file("home/notes.txt", b"notes");
    scratch.file("home/data.dat", b"measured");
    let folders = scratch.other_model("folders");
    scratch.file("folders/sub/x", b"x");
    let input = scratch.path("input");
    succeeded(&nvfp4(&["quantize", MODEL, &input]));
    let holds = scratch.other_model("holds");
    scratch.file("holds/m.gguf", b"");
    let gguf = "tests/golden/checkpoint/llama.gguf";
    fs::copy(gguf, scratch.path("holds/m.gguf")).unwrap();
    let linked = scratch.other_model("linked");
    fs::create_dir(scratch.path("snapshot")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        let link = scratch.path(&format!("snapshot/{name}"));
        std::os::unix::fs::symlink(format!("{linked}/{name}"), link).unwrap();
    }
    let before = scratch.files();
    for (from, to, part) in [
        (MODEL, &scratch.path("home"), "holds no model"),
        (MODEL, &folders, "sub"),
        (&input, &input, "being read"),
        (&scratch.path("holds/m.gguf"), &holds, "being read"),
        (&scratch.path("snapshot"), &linked, "being read"),
        (
            &scratch.path("snapshot"),
            &scratch.path("snapshot"),
            "being read",
        ),
    ] {
        let said = failure(&["quantize", from, to, "--force"]);
        assert!(said.contains(part) && said.contains(to), "{said}");
        assert!(scratch.files() == before, "{to}");
    }
    // A place where there is nothing yet needs no force and is none the worse for it.
    let deep = scratch.path("deep/er/out");
    succeeded(&nvfp4(&["quantize", MODEL, &deep, "--force"]));
    assert_eq!(names(&scratch.path("deep")), ["er"]);
    assert_eq!(names(&scratch.path("deep/er")), ["out"]);
}

#[test]
fn the_recipe_that_loses_least_is_the_default() {
    let scratch = Scratch::new("recipe");
    let weights = |name: &str, more: &[&str]| {
        let out = scratch.path(name);
        // This model is NVFP4 but for its table.
        let quantize = ["quantize", MODEL, &*out, "--tables", "nvfp4"];
        succeeded(&nvfp4(&[&quantize[..], more].concat()));
        fs::read(Path::new(&out).join("model.safetensors")).unwrap()
    };
    let default = weights("default", &[]);
    assert!(default == weights("sweep", &["--recipe", "sweep"]));
    assert!(default != weights("amax", &["--recipe", "amax"]));
}

#[test]
fn a_dat_is_not_put_beside_another_models_files() {
    let scratch = Scratch::new("dat");
    let dat = scratch.path("d/m.dat");
    scratch.file("d/vocab.json", b"{\"another\": 1}");
    let before = scratch.files();
    let said = failure(&["quantize", MODEL, &dat]);
    assert!(said.contains("vocab.json"), "{said}");
    assert!(scratch.files() == before);
}

#[test]
fn a_conversion_that_is_killed_leaves_nothing() {
    let scratch = Scratch::new("killed");
    let large = scratch.large_model("large");
    let old = scratch.other_model("old");
    let (new, dat) = (scratch.path("deep/new"), scratch.path("m.dat"));
    let before = scratch.listing();
    for (args, signal) in [
        (&["quantize", &large, &new][..], libc::SIGKILL),
        (&["quantize", &large, &new], libc::SIGINT),
        (&["quantize", &large, &old, "--force"], libc::SIGKILL),
        (&["quantize", &large, &old, "--force"], libc::SIGINT),
        (&["quantize", &large, &dat], libc::SIGKILL),
        (&["quantize", &large, &dat], libc::SIGTERM),
    ] {
        let mut child = started(&mut command(args), &scratch.0);
        send(&child, signal);
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(signal), "{args:?}: {status}");
        assert_eq!(scratch.listing(), before, "{args:?}");
    }
    // Where files without a name are not known, a name is removed by the command itself.
    for (args, signal) in [
        (&["quantize", &large, &new][..], libc::SIGINT),
        (&["quantize", &large, &old, "--force"], libc::SIGTERM),
        (&["quantize", &large, &dat], libc::SIGHUP),
    ] {
        let mut command = command(args);
        without(&mut command, Without::NamelessFiles);
        let mut child = started(&mut command, &scratch.0);
        assert_ne!(scratch.listing(), before, "{args:?}");
        send(&child, signal);
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(signal), "{args:?}: {status}");
        assert_eq!(scratch.listing(), before, "{args:?}");
    }
}

/// The files of the new model stay without names until its weights are packed.
#[test]
fn a_conversion_that_is_killed_while_it_packs_leaves_nothing() {
    let scratch = Scratch::new("packing");
    let large = scratch.model_of_zeros("large", 1 << 13);
    let old = scratch.other_model("old");
    let new = scratch.path("deep/new");
    let before = scratch.listing();
    let packing = |args: &[&str]| {
        let child = started(&mut command(args), &scratch.0);
        wait_until("the file of packed weights", || {
            let fds = fs::read_dir(format!("/proc/{}/fd", child.id())).unwrap();
            let paths = fds.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
            let nameless = |p: &PathBuf| {
                p.starts_with(&scratch.0) && p.to_string_lossy().ends_with(" (deleted)")
            };
            // Weights, config.json and hf_quant_config.json, and then another.
            paths.filter(nameless).count() > 3
        });
        child
    };
    for (args, signal) in [
        (&["quantize", &large, &new, "--packed"][..], libc::SIGKILL),
        (&["quantize", &large, &new, "--packed"], libc::SIGINT),
        (
            &["quantize", &large, &old, "--packed", "--force"],
            libc::SIGINT,
        ),
    ] {
        let mut child = packing(args);
        send(&child, signal);
        assert_eq!(child.wait().unwrap().signal(), Some(signal), "{args:?}");
        assert_eq!(scratch.listing(), before, "{args:?}");
    }
}

/// The times of weights that are copied into place, without a name for what was written, are those that the packed weights have.
#[test]
fn packed_weights_are_current_however_a_file_gets_its_name() {
    let scratch = Scratch::new("current");
    for what in [None, Some(Without::NamelessFiles), Some(Without::Naming)] {
        let out = scratch.path("out");
        let mut quantize = command(&["quantize", MODEL, &out, "--packed", "--force"]);
        what.into_iter().for_each(|w| without(&mut quantize, w));
        succeeded(&quantize.output().unwrap());
        let packed = PackedFile::open(&Path::new(&out).join(PACKED_FILE), 1);
        let sources = SourceFile::all(&*open(Path::new(&out)).unwrap()).unwrap();
        assert_eq!(packed.unwrap().unwrap().contents().sources, sources);
    }
}

#[test]
fn a_signal_that_is_ignored_stays_ignored() {
    let scratch = Scratch::new("nohup");
    let large = scratch.large_model("large");
    let out = scratch.path("out");
    let mut command = Command::new("sh");
    command
        .args(["-c", "trap '' HUP; exec \"$0\" \"$@\""])
        .arg(env!("CARGO_BIN_EXE_nvfp4"))
        .args(["quantize", &large, &out]);
    let mut child = started(&mut command, &scratch.0);
    send(&child, libc::SIGHUP);
    assert!(child.wait().unwrap().success());
    assert_eq!(
        names(&out),
        ["config.json", "hf_quant_config.json", "model.safetensors"]
    );
}

#[test]
fn a_session_that_is_being_saved_leaves_nothing_or_all() {
    let scratch = Scratch::new("session");
    let saved = scratch.file("saved", b"the old session");
    let chat = || {
        let mut chat = command(&["chat", "--model", MODEL, "--max-tokens", "1"]);
        chat.stdin(Stdio::piped()).stdout(Stdio::null());
        chat
    };
    let save = |mut chat: Command| {
        let mut child = chat.spawn().unwrap();
        let mut input = child.stdin.take().unwrap();
        write!(input, "Hi\n/save {saved}\n").unwrap();
        drop(input);
        assert!(child.wait().unwrap().success());
        assert_eq!(names(scratch.0.to_str().unwrap()), ["saved"]);
        fs::read(&saved).unwrap()
    };
    let nameless = save(chat());
    assert_ne!(nameless, b"the old session");
    for what in [Without::NamelessFiles, Without::Naming] {
        fs::write(&saved, b"the old session").unwrap();
        fs::set_permissions(&saved, fs::Permissions::from_mode(0o600)).unwrap();
        let mut other = chat();
        without(&mut other, what);
        assert!(save(other) == nameless);
        let mode = fs::metadata(&saved).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
    }
}

/// A `.dat` replaces the file that its path leads to, which keeps its mode; nothing else is replaced.
#[test]
fn what_a_dat_replaces_keeps_its_mode_and_its_links() {
    let scratch = Scratch::new("replaced");
    let (dat, link) = (scratch.path("m/m.dat"), scratch.path("m/link.dat"));
    fs::create_dir(scratch.path("m")).unwrap();
    succeeded(&nvfp4(&["quantize", MODEL, &dat]));
    let expected = fs::read(&dat).unwrap();
    fs::write(&dat, "old").unwrap();
    fs::set_permissions(&dat, fs::Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::symlink("m.dat", &link).unwrap();
    for out in [&dat, &link] {
        fs::write(&dat, "old").unwrap();
        succeeded(&nvfp4(&["quantize", MODEL, out]));
        assert!(fs::read(&dat).unwrap() == expected, "{out}");
        let mode = fs::metadata(&dat).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o640, "{out}");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }
    fs::remove_file(&link).unwrap();
    let made = Command::new("mkfifo").arg(scratch.path("m/fifo")).status();
    assert!(made.unwrap().success());
    std::os::unix::fs::symlink("fifo", &link).unwrap();
    let said = failure(&["quantize", MODEL, &link]);
    assert!(said.contains("no file replaces"), "{said}");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
}

/// A text may come from a pipe. A model, a session or a tokenizer may not, and a waiting writer gets an error at once.
#[test]
fn texts_may_be_streams_and_models_may_not() {
    let scratch = Scratch::new("streams");
    let text = "The sky is blue, and so is the sea. ".repeat(20);
    let fifo = scratch.path("fifo");
    let made = Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let write = || {
        let (fifo, text) = (fifo.clone(), text.clone());
        std::thread::spawn(move || fs::write(fifo, text).unwrap())
    };
    let writer = write();
    let measure = [
        "perplexity",
        "--model",
        MODEL,
        "--text",
        &fifo,
        "--window",
        "128",
    ];
    succeeded(&nvfp4(&measure));
    writer.join().unwrap();
    let start = Instant::now();
    for args in [
        &["inspect", &fifo][..],
        &["run", "--model", &fifo, "--prompt", "Hi"],
        &["quantize", &fifo, &scratch.path("out")],
        &["quantize", MODEL, &scratch.path("fifo")],
        &["inspect", "/dev/zero"],
    ] {
        let said = failure(args);
        assert!(
            said.contains("not a regular file") || said.contains("not a directory"),
            "{args:?}: {said}"
        );
    }
    assert!(start.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_disk_that_is_full_leaves_the_old_model() {
    let scratch = Scratch::new("full");
    let old = scratch.other_model("old");
    let before = scratch.files();
    // Room for the small files, but not for the weights; and for neither. Whether the signal that comes with the limit is ignored, or
    // has the default action, which ends a process.
    for (blocks, trap) in [(0, ""), (8, "trap '' XFSZ;"), (64, "")] {
        let output = Command::new("sh")
            .arg("-c")
            .arg(format!("{trap} ulimit -f {blocks}; exec \"$0\" \"$@\""))
            .arg(env!("CARGO_BIN_EXE_nvfp4"))
            .args(["quantize", MODEL, &old, "--force"])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("model.safetensors"), "{said}");
        assert!(scratch.files() == before, "{blocks}");
    }
    // Room for the weights, but not for the packed ones.
    let (wide, new) = ("tests/golden/model/qwen35moe_shared", scratch.path("new"));
    for (out, more) in [(&new, "--keep-head"), (&old, "--force")] {
        let output = Command::new("sh")
            .arg("-c")
            .arg("ulimit -f 400; exec \"$0\" \"$@\"")
            .arg(env!("CARGO_BIN_EXE_nvfp4"))
            .args(["quantize", wide, out, "--packed", "--tables", "nvfp4", more])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("packed.nvfp4"), "{said}");
        assert!(scratch.files() == before && !Path::new(&new).exists());
    }
}
