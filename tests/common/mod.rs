//! The golden models that tests of several floors run, and what they say of errors. Not every test uses all of it.
#![allow(dead_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use NVFP4::base::memory::{self, Tag};
use NVFP4::base::{ErrorKind, Result};
use NVFP4::model::{Device, LoadOptions, Model};

/// Demands an error of `kind` whose message has these `words`.
#[track_caller]
pub(crate) fn expect_kind<T>(result: Result<T>, kind: ErrorKind, words: &str) {
    match result {
        Ok(_) => panic!("no error, where {kind:?} with '{words}' was to come"),
        Err(e) => {
            assert_eq!(e.kind(), kind, "{e}");
            assert!(e.message().contains(words), "'{words}' is not in: {e}");
        }
    }
}

/// The directory of a golden model.
pub(crate) fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden/model")
        .join(case)
}

/// Everything as stored, on two threads.
pub(crate) fn options() -> LoadOptions {
    LoadOptions::new(Device::cpu(Some(2)).unwrap())
}

/// A golden model.
pub(crate) fn load(case: &str) -> Arc<Model> {
    Model::load(&golden(case), &options()).unwrap()
}

/// Tokens that any golden model knows.
pub(crate) fn some_tokens(model: &Model, n: usize) -> Vec<u32> {
    let vocab = model.spec().vocab_size as u32;
    (0..n as u32).map(|i| (i * 37 + 11) % vocab).collect()
}

/// Bytes in use under each tag.
pub(crate) fn in_use() -> Vec<(&'static str, u64)> {
    let all = Tag::ALL.into_iter();
    all.map(|tag| (tag.name(), memory::usage(tag).current))
        .collect()
}

/// Demands that all memory comes back: of models that were loaded and used, and of loading that fails where memory runs out, a
/// little later each time. `settle` gives up what is kept for reuse. The budget and the accounts are the process's, so tests that
/// call this count on a process of their own, which nextest gives them.
pub(crate) fn check_memory_comes_back(
    device: &Device,
    times: usize,
    used: impl Fn(Arc<Model>),
    settle: impl Fn(),
) {
    const STOPS: u64 = 20;
    let load = || {
        let options = LoadOptions {
            device: device.clone(),
            ..options()
        };
        Model::load(&golden("qwen3_tied"), &options)
    };
    // What the first use makes for all that come later stays.
    used(load().unwrap());
    settle();
    let before = in_use();
    for _ in 0..times {
        used(load().unwrap());
    }
    settle();
    memory::reset_peak();
    drop(load().unwrap());
    let peak = memory::total().peak;
    let current: u64 = before.iter().map(|(_, bytes)| bytes).sum();
    for stop in 0..STOPS {
        memory::set_budget(Some(current + (peak - current) * stop / STOPS));
        let failed = load();
        memory::set_budget(None);
        if let Err(e) = failed {
            assert_eq!(e.kind(), ErrorKind::OverBudget, "{e}");
        } else {
            assert!(
                stop > STOPS / 2,
                "{stop} of {STOPS} parts of its memory will do"
            );
        }
    }
    settle();
    assert_eq!(in_use(), before);
}

/// A copy of a golden directory to change, removed at the end.
pub(crate) struct Copy(pub(crate) PathBuf);

impl Copy {
    /// `name` tells what it is for.
    pub(crate) fn of(case: &str, name: &str) -> Copy {
        static COPIES: AtomicUsize = AtomicUsize::new(0);
        let count = COPIES.fetch_add(1, Ordering::Relaxed);
        let dir =
            std::env::temp_dir().join(format!("nvfp4-model-{}-{count}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        for file in fs::read_dir(golden(case)).unwrap() {
            let path = file.unwrap().path();
            fs::copy(&path, dir.join(path.file_name().unwrap())).unwrap();
        }
        Copy(dir)
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) {
        // A golden may be read-only; a new file is not.
        let _ = fs::remove_file(self.0.join(name));
        fs::write(self.0.join(name), bytes).unwrap();
    }
}

/// Cuts a file off where it lies, as another process might.
pub(crate) fn cut(path: &Path, len: u64) {
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(len).unwrap();
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
