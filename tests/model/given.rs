//! Models whose files the host gives: the bits and the fingerprint of the model on disk, errors of readers, and when files are let go.

use std::sync::Barrier;

use NVFP4::base::error::err;
use NVFP4::base::files::{FileContent, GivenFiles};

use super::*;

/// Shared by the files of a model: what is read of them, and how.
#[derive(Default)]
struct Ledger {
    reads: AtomicUsize,
    /// The read, counted from 1, that fails with all after it; 0 for none.
    fails_at: AtomicUsize,
    dropped: AtomicUsize,
}

/// A file that is read through a function.
struct Reader {
    bytes: Vec<u8>,
    ledger: Arc<Ledger>,
}

impl FileContent for Reader {
    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn in_memory(&self) -> Option<&[u8]> {
        None
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
        let number = 1 + self.ledger.reads.fetch_add(1, Ordering::SeqCst);
        let fails_at = self.ledger.fails_at.load(Ordering::SeqCst);
        if fails_at > 0 && number >= fails_at {
            return Err(err!(Io, "the line is down"));
        }
        self.bytes.read(at, out)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.ledger.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

type Named = Vec<(String, Vec<u8>)>;

/// The files of a directory, or a single file.
fn named(path: &Path) -> Named {
    let file = |path: &Path| {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, fs::read(path).unwrap())
    };
    match path.is_dir() {
        false => vec![file(path)],
        true => {
            let entries = fs::read_dir(path).unwrap();
            entries.map(|e| file(&e.unwrap().path())).collect()
        }
    }
}

fn in_memory(files: &Named) -> GivenFiles {
    let given = files.iter().cloned().map(|(name, bytes)| {
        let content: Arc<dyn FileContent> = Arc::new(bytes);
        (name, content)
    });
    GivenFiles::new(given).unwrap()
}

fn read_by(files: &Named, ledger: &Arc<Ledger>) -> GivenFiles {
    let given = files.iter().cloned().map(|(name, bytes)| {
        let ledger = ledger.clone();
        let content: Arc<dyn FileContent> = Arc::new(Reader { bytes, ledger });
        (name, content)
    });
    GivenFiles::new(given).unwrap()
}

/// A golden in two files: with an index that names them, or numbered.
fn in_shards(case: &str, with_index: bool) -> Copy {
    let dir = Copy::of(case, "shards");
    let bytes = fs::read(dir.0.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let stored = |(name, t): (String, TensorView<'_>)| {
        (name, (t.dtype(), t.shape().to_vec(), t.data().to_vec()))
    };
    let mut all: Vec<(String, Stored)> = file.tensors().into_iter().map(stored).collect();
    let rest = all.split_off(all.len() / 2);
    let names = match with_index {
        true => ["a.safetensors", "b.safetensors"],
        false => [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ],
    };
    let mut map = serde_json::Map::new();
    for (name, tensors) in names.iter().zip([&all, &rest]) {
        dir.write(name, &serialized(tensors));
        map.extend(tensors.iter().map(|(t, _)| (t.clone(), json!(name))));
    }
    if with_index {
        let index = json!({ "weight_map": map }).to_string();
        dir.write("model.safetensors.index.json", index.as_bytes());
    }
    fs::remove_file(dir.0.join("model.safetensors")).unwrap();
    dir
}

/// A golden as a `.dat` with the files beside it.
fn as_dat(case: &str) -> Copy {
    let dir = Copy::of(case, "dat");
    let to = dir.0.join("model.dat");
    let options = ConvertOptions::new(Container::Dat, Recipe::default());
    let go = &mut |_: ConvertProgress<'_>| ControlFlow::Continue(());
    let source = model::open(&golden(case)).unwrap();
    convert(&*source, &to, &options, &Pool::new(2).unwrap(), go).unwrap();
    // Other safetensors come before a .dat.
    for file in ["model.safetensors", "expected.safetensors"] {
        fs::remove_file(dir.0.join(file)).unwrap();
    }
    dir
}

#[test]
fn the_bits_are_those_of_the_model_on_disk() {
    let [indexed, numbered] = [true, false].map(|index| in_shards("qwen3_untied", index));
    let dat = as_dat("qwen3_untied");
    for path in [
        golden("qwen3_untied"),
        golden("qwen3_tied"),
        indexed.0.clone(),
        numbered.0.clone(),
        dat.0.clone(),
        gguf("qwen3moe_normalized"),
        gguf("gemma4_perlayer"),
    ] {
        let files = named(&path);
        let ledger = Arc::new(Ledger::default());
        let disk = Served::load(&path, &options()).unwrap();
        let tokens = some_tokens(&disk, 20);
        let want = run(&disk, &tokens, Logits::All);
        for given in [in_memory(&files), read_by(&files, &ledger)] {
            let model = Served::load_given(&given, &options()).unwrap();
            let got = run(&model, &tokens, Logits::All);
            assert!(got == want, "{path:?}");
            assert_eq!(model.model().fingerprint(), disk.model().fingerprint());
            assert_eq!(model.describe().tokenizer, disk.describe().tokenizer);
            assert_eq!(model.stop_tokens(), disk.stop_tokens());
            assert_eq!(model.has_own_template(), disk.has_own_template());
        }
        assert_eq!(
            ledger.dropped.load(Ordering::SeqCst),
            files.len(),
            "{path:?}"
        );
    }
}

#[test]
fn reads_that_fail_are_errors_of_loading() {
    let files = named(&golden("qwen3_untied"));
    let ledger = Arc::new(Ledger::default());
    let all = {
        Served::load_given(&read_by(&files, &ledger), &options()).unwrap();
        ledger.reads.load(Ordering::SeqCst)
    };
    for fails_at in (1..=all).step_by(1 + all / 40) {
        let ledger = Arc::new(Ledger::default());
        ledger.fails_at.store(fails_at, Ordering::SeqCst);
        let e = Served::load_given(&read_by(&files, &ledger), &options()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Io, "{e}");
        let (said, is_named) = (e.message(), |(name, _): &(String, _)| {
            e.message().contains(name)
        });
        assert!(files.iter().any(is_named), "{said}");
        assert!(
            said.contains("reading ") && said.contains(" bytes at offset "),
            "{said}"
        );
        assert!(said.ends_with("the line is down"), "{said}");
        assert_eq!(ledger.dropped.load(Ordering::SeqCst), files.len());
    }
}

/// The embedding stays in its file: rows are read while tokens run, by whoever runs them.
#[test]
fn a_read_that_fails_later_fails_its_tokens_alone() {
    let files = named(&golden("qwen3_untied"));
    let ledger = Arc::new(Ledger::default());
    let model = Served::load_given(&read_by(&files, &ledger), &options()).unwrap();
    assert!(ledger.dropped.load(Ordering::SeqCst) < files.len());
    let tokens = some_tokens(&model, 9);
    let want = run(&model, &tokens, Logits::All);
    let mut sequence = cache(&model);
    let (mut logits, mut scratch) = (Vec::new(), Scratch::new());
    let mut forward = |sequence: &mut Sequence, tokens: &[u32]| {
        model.forward(tokens, sequence, &mut scratch, Logits::All, &mut logits)?;
        Ok(logits.clone())
    };
    let mut got: Vec<f32> = forward(&mut sequence, &tokens[..4]).unwrap();
    ledger.fails_at.store(1, Ordering::SeqCst);
    let failed = forward(&mut sequence, &tokens[4..]);
    expect_kind(
        failed,
        ErrorKind::Io,
        "of model.safetensors: the line is down",
    );
    assert_eq!(sequence.len(), 4);
    ledger.fails_at.store(0, Ordering::SeqCst);
    got.extend(forward(&mut sequence, &tokens[4..]).unwrap());
    assert!(got == want);
    drop((sequence, model));
    assert_eq!(ledger.dropped.load(Ordering::SeqCst), files.len());
}

/// A model whose head is its embedding needs its files no more.
#[test]
fn files_go_when_loading_ends_unless_a_table_stays_in_them() {
    let files = named(&golden("qwen3_tied"));
    let ledger = Arc::new(Ledger::default());
    let model = Served::load_given(&read_by(&files, &ledger), &options()).unwrap();
    assert_eq!(ledger.dropped.load(Ordering::SeqCst), files.len());
    let before = ledger.reads.load(Ordering::SeqCst);
    run(&model, &[1, 2, 3], Logits::Last);
    assert_eq!(ledger.reads.load(Ordering::SeqCst), before);
}

#[test]
fn files_go_when_loading_is_cancelled() {
    let files = named(&golden("qwen3_untied"));
    let ledger = Arc::new(Ledger::default());
    let watch = Watch {
        progress: Some(&|_| ControlFlow::Break(())),
        ..Watch::default()
    };
    let loaded = watch.during(|| Served::load_given(&read_by(&files, &ledger), &options()));
    assert_eq!(loaded.unwrap_err().kind(), ErrorKind::Cancelled);
    assert_eq!(ledger.dropped.load(Ordering::SeqCst), files.len());
}

#[test]
fn threads_read_the_files_of_one_model() {
    const THREADS: usize = 4;
    let ledger = Arc::new(Ledger::default());
    let files = named(&golden("qwen3_untied"));
    let model = Served::load_given(&read_by(&files, &ledger), &options()).unwrap();
    let tokens = some_tokens(&model, 30);
    let want = run(&model, &tokens, Logits::All);
    let start = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                start.wait();
                assert!(run(&model, &tokens, Logits::All) == want);
            });
        }
    });
}

/// Faults that are refused on disk are refused here, with the names of the files.
#[test]
fn the_checks_of_files_hold() {
    let whole = named(&golden("qwen3_untied"));
    let changed = |change: &dyn Fn(&mut Named)| {
        let mut files = whole.clone();
        change(&mut files);
        Served::load_given(&in_memory(&files), &options())
    };
    let weights = |files: &mut Named| {
        let at = files
            .iter()
            .position(|(name, _)| name == "model.safetensors");
        at.unwrap()
    };
    let refused = changed(&|files| files.retain(|(name, _)| name != "model.safetensors"));
    // The golden's expected logits are another file of this kind.
    assert!(refused.is_err());
    let refused = changed(&|files| files.retain(|(name, _)| !name.ends_with(".safetensors")));
    expect_kind(
        refused,
        ErrorKind::NotFound,
        "the model of the given files holds no model",
    );
    let refused = changed(&|files| {
        let at = weights(files);
        let len = files[at].1.len();
        files[at].1.truncate(len - 100);
    });
    expect_kind(refused, ErrorKind::CorruptFile, "model.safetensors: ");
    let refused = changed(&|files| {
        let at = weights(files);
        files[at].1.clear();
    });
    expect_kind(
        refused,
        ErrorKind::CorruptFile,
        "model.safetensors is empty",
    );
    let refused = changed(&|files| {
        let at = files.iter().position(|(name, _)| name == "config.json");
        files[at.unwrap()].1 = b"{".to_vec();
    });
    expect_kind(refused, ErrorKind::CorruptFile, "config.json: ");
    let refused = changed(&|files| {
        let at = weights(files);
        let (_, bytes) = files.remove(at);
        let index = json!({"weight_map": {"a": "x.safetensors"}}).to_string();
        files.push((
            "model.safetensors.index.json".to_owned(),
            index.into_bytes(),
        ));
        files.push(("y.safetensors".to_owned(), bytes));
    });
    expect_kind(
        refused,
        ErrorKind::NotFound,
        "names the shard x.safetensors, which is missing",
    );
    let two = ["a.gguf", "b.gguf"].map(|name| (name.to_owned(), vec![1]));
    expect_kind(
        Served::load_given(&in_memory(&two.to_vec()), &options()),
        ErrorKind::InvalidArgument,
        "the model of the given files holds 2 models; name the one to open, of a.gguf, b.gguf",
    );
}
