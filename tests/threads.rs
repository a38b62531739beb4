//! A model uses no more threads of the processor than its host allows, whatever it does. Counts the threads and the processor time of the
//! process, which needs one of its own: nextest provides one, and there is no other test here.
#![cfg(target_os = "linux")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use NVFP4::engine::Served;
use NVFP4::format::nvfp4::QuantizeOptions;
use NVFP4::model::{Device, LoadOptions};
use NVFP4::session::{GenerateOptions, Session, SessionOptions};
use NVFP4::text::GrammarSource;
use common::{golden, some_tokens};

/// The time that a phase takes of the processor, so that threads beside those that are allowed show.
const WORK: Duration = Duration::from_millis(40);
/// The name of the thread that watches.
const WATCH: &str = "watch";
/// Time that a clock may be off.
const SLACK: Duration = Duration::from_millis(2);

unsafe extern "C" {
    fn NVFP4_set_threads(threads: i32) -> i32;
    fn NVFP4_model_load(
        path: *const u8,
        length: usize,
        options: *const u8,
        quantize: *const u8,
        out: *mut *mut u8,
    ) -> i32;
    fn NVFP4_model_release(model: *mut u8) -> i32;
}

/// The processor time of all threads of the process, those that have ended too.
fn processor_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: there is room for the time.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    assert_eq!(status, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The names of the threads that there are, by number.
fn threads() -> BTreeMap<String, String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let named = tasks.filter_map(|task| {
        let task = task.unwrap();
        let name = fs::read_to_string(task.path().join("comm")).ok()?;
        Some((
            task.file_name().into_string().unwrap(),
            name.trim().to_owned(),
        ))
    });
    named.collect()
}

/// Whether a thread of this name may be there with `allowed` threads. The caller waits for the others, or works with the workers of the pool.
fn is_known(name: &str, allowed: usize) -> bool {
    let Some(kind) = name.strip_prefix("nvfp4-") else {
        return false;
    };
    let below = |number: &str, most: usize| number.parse().is_ok_and(|number: usize| number < most);
    // Workers of the pool, which with the caller are as many as are allowed.
    below(kind, allowed)
        // Threads that read weights, the first of them the tokenizer too.
        || kind.strip_prefix("load-").is_some_and(|number| below(number, allowed))
        // It prepares the embedding for a GPU, and ends at once on a processor.
        || kind == "embedding"
        // Deep files, templates and grammars, with a bound on their stack.
        || ["deep", "bounded"].contains(&kind)
}

/// Calls `work` for a while. Its threads take no more processor time than `allowed` threads can, all threads that are seen are of a known kind,
/// and those that are left at the end are the workers of the pool.
fn holds(what: &str, allowed: usize, before: &BTreeMap<String, String>, mut work: impl FnMut()) {
    let (seen, is_over) = (Mutex::new(BTreeSet::new()), AtomicBool::new(false));
    let watch = || {
        while !is_over.load(Relaxed) {
            seen.lock().unwrap().extend(threads().into_values());
            std::thread::sleep(Duration::from_micros(200));
        }
        NVFP4::base::threads::processor_time()
    };
    let (used, wall) = std::thread::scope(|scope| {
        let watching = std::thread::Builder::new()
            .name(WATCH.to_owned())
            .spawn_scoped(scope, watch)
            .unwrap();
        let wall = Instant::now();
        let start = processor_time();
        while processor_time() - start < WORK {
            work();
        }
        let used = processor_time() - start;
        let wall = wall.elapsed();
        is_over.store(true, Relaxed);
        (used.saturating_sub(watching.join().unwrap()), wall)
    });
    let most = wall * u32::try_from(allowed).unwrap() + SLACK;
    assert!(
        used <= most,
        "{what} took {used:?} of processor time in {wall:?} with {allowed} threads"
    );
    let mut seen = seen.into_inner().unwrap();
    // A thread has its caller's name until it has its own.
    seen.retain(|name| name != WATCH && !before.values().any(|before| before == name));
    seen.retain(|name| !is_known(name, allowed));
    assert!(
        seen.is_empty(),
        "{what} had {seen:?} with {allowed} threads"
    );
    // A worker that ends has a successor for a moment.
    let patience = Instant::now() + Duration::from_secs(10);
    loop {
        let mut left = threads();
        left.retain(|number, _| !before.contains_key(number));
        let are_workers = left.values().all(|name| is_known(name, allowed));
        if left.len() < allowed && are_workers {
            return;
        }
        assert!(
            Instant::now() < patience,
            "{what} left {left:?} with {allowed} threads"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_model_uses_no_more_threads_than_it_may() {
    let directory = golden("qwen3_tied");
    let long = "A text that is long enough to be worth dividing, in many words. ".repeat(2000);
    let before = threads();
    for allowed in [1, 2] {
        let load = || {
            let device = Device::cpu(Some(allowed)).unwrap();
            let options = LoadOptions {
                quantize: Some(QuantizeOptions::default()),
                ..LoadOptions::new(device)
            };
            Served::load(&directory, &options).unwrap()
        };
        holds(
            "loading and quantization",
            allowed,
            &before,
            || drop(load()),
        );
        let model = load();
        let session = || {
            let options = SessionOptions {
                private: true,
                ..SessionOptions::default()
            };
            let mut session = Session::new(model.clone(), &options).unwrap();
            session.prefill(&some_tokens(&model, 150)).unwrap();
            session
        };
        holds("a prompt", allowed, &before, || drop(session()));
        let mut generating = session();
        let how = GenerateOptions {
            max_tokens: 50,
            ignore_model_stops: true,
            ..GenerateOptions::default()
        };
        holds("a generation", allowed, &before, || {
            generating
                .generate(&how, &mut |_| std::ops::ControlFlow::Continue(()))
                .unwrap();
            generating.truncate(150).unwrap();
        });
        let tokenizer = model.tokenizer().unwrap();
        holds("tokenization", allowed, &before, || {
            assert!(tokenizer.encode(&long, false).unwrap().len() > 2000);
        });
        holds("grammars", allowed, &before, || {
            let schema = r#"{"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "string"}}}"#;
            model.grammar(GrammarSource::JsonSchema(schema)).unwrap();
        });
        drop((generating, model));
        // The models that share the threads of NVFP4_set_threads().
        let path = directory.to_str().unwrap();
        // SAFETY: a path with its length, and room for a handle, which is released.
        let shared = || unsafe {
            let mut out = std::ptr::null_mut();
            let none = std::ptr::null();
            assert_eq!(
                NVFP4_model_load(path.as_ptr(), path.len(), none, none, &mut out),
                0
            );
            assert_eq!(NVFP4_model_release(out), 0);
        };
        // SAFETY: a number.
        assert_eq!(unsafe { NVFP4_set_threads(allowed as i32) }, 0);
        holds("loading by the C interface", allowed, &before, shared);
    }
}
