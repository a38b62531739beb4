//! The golden models that tests of several floors run. Not every test uses all of it.
#![allow(dead_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use NVFP4::model::{Device, LoadOptions, Model};

/// The directory of a golden model.
pub(crate) fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden/model")
        .join(case)
}

/// Everything as stored, on two threads.
pub(crate) fn options() -> LoadOptions<'static> {
    LoadOptions::new(Device::cpu(Some(2)).unwrap())
}

/// A golden model.
pub(crate) fn load(case: &str) -> Arc<Model> {
    Model::load(&golden(case), &options()).unwrap()
}

/// Tokens that any golden model knows.
pub(crate) fn some_tokens(model: &Model, n: usize) -> Vec<u32> {
    let vocab = model.config().vocab_size as u32;
    (0..n as u32).map(|i| (i * 37 + 11) % vocab).collect()
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
