//! Prefixes that sessions share on a GPU: found in blocks of 64 positions, never written again, and given up as sessions need memory.

use std::sync::Arc;

use NVFP4::base::ErrorKind;
use NVFP4::engine::Served;
use NVFP4::model::{Device, LoadOptions};
use NVFP4::session::{SamplingOptions, Session, SessionOptions, step};

use crate::common::{golden, options, some_tokens, windows};
use crate::support::{as_f64, assert_close, coarseness, generated, gpu, prompted};

/// Demands about the logits that a session has which runs all of its tokens.
fn check(session: &mut Session, bar: f64, what: &str) {
    let private = SessionOptions {
        private: true,
        ..SessionOptions::default()
    };
    let tokens = session.tokens().to_vec();
    let mut alone = prompted(session.model(), &private, &tokens);
    let want = as_f64(alone.logits().unwrap());
    assert_close(session.logits().unwrap(), &want, bar, what);
}

fn new(model: &Arc<Served>, tokens: &[u32]) -> Session {
    prompted(model, &SessionOptions::default(), tokens)
}

#[test]
fn sessions_begin_with_what_others_have_run() {
    let Some(gpu) = gpu() else { return };
    for (case, bar) in [
        ("qwen3_tied", 5e-3),
        ("gemma3_wide", 5e-3),
        ("gemma4_shared", 5e-3),
        ("qwen35_tied", 1e-2),
        ("qwen35_drafter", 1e-2),
        ("nemotronh_dense", 1e-2),
    ] {
        let dir = windows::lengthened(case);
        let options = LoadOptions {
            device: Device::Cuda(gpu.clone()),
            prefix_bytes: 64 << 20,
            ..options()
        };
        let model = Served::load(&dir.0, &options).unwrap();
        let bar = bar * coarseness(&model);
        let tokens = some_tokens(&model, 700);
        let found = |work: &mut dyn FnMut() -> Session| {
            let before = model.statistics().prompt_tokens_found;
            let session = work();
            (model.statistics().prompt_tokens_found - before, session)
        };
        let mut first = new(&model, &tokens[..650]);
        let (count, mut second) = found(&mut || new(&model, &tokens));
        assert_eq!(count, 640, "{case}");
        check(&mut second, bar, case);
        // Steps, which the device takes ahead, go over the ends of shared and of own blocks.
        let greedy = SamplingOptions::default();
        for session in [&mut first, &mut second] {
            generated(session, 100, &greedy);
            check(session, bar, &format!("{case}, generated"));
        }
        // Cut into a shared block, a session goes on differently, and the other stays as it is.
        second.truncate(600).unwrap();
        second.prefill(&[5, 9, 5]).unwrap();
        check(&mut second, bar, &format!("{case}, cut"));
        let mut fork = second.fork().unwrap();
        step(&mut [&mut fork, &mut second, &mut first], &[3, 4, 5]).unwrap();
        for session in [&mut first, &mut second, &mut fork] {
            check(session, bar, &format!("{case}, stepped"));
        }
        drop((first, second, fork));
        assert_eq!(model.blocks_used(), 0, "{case}");
        let (count, mut third) = found(&mut || new(&model, &tokens));
        assert!(count >= 640, "{case}: {count}");
        check(&mut third, bar, &format!("{case}, from the cache"));
    }
}

/// A file has blocks of 64 positions of a GPU, or of 16 of the CPU, and either device begins with the blocks of the other.
#[test]
fn files_of_prefixes_move_between_devices() {
    let Some(gpu) = gpu() else { return };
    for (case, bar) in [
        ("qwen3_tied", 5e-3),
        ("gemma3_wide", 5e-3),
        ("gemma4_shared", 5e-3),
        ("qwen35_tied", 1e-2),
        ("qwen35_drafter", 1e-2),
        ("nemotronh_dense", 1e-2),
    ] {
        let dir = windows::lengthened(case);
        let loaded = |is_on_gpu: bool| {
            let mut options = LoadOptions {
                prefix_bytes: 64 << 20,
                ..options()
            };
            if is_on_gpu {
                options.device = Device::Cuda(gpu.clone());
            }
            Served::load(&dir.0, &options).unwrap()
        };
        let name = format!("nvfp4-prefixes-{}-{case}", std::process::id());
        let path = std::env::temp_dir().join(name);
        for (from, to) in [(true, true), (true, false), (false, true)] {
            let what = format!("{case}, from a GPU {from}, to a GPU {to}");
            let first = loaded(from);
            let tokens = some_tokens(&first, 700);
            drop(new(&first, &tokens[..650]));
            let saved = first.save_prefixes(&path).unwrap();
            let later = loaded(to);
            let restored = later.restore_prefixes(&path).unwrap();
            assert_eq!(restored.filled, restored.in_file, "{what}");
            assert!(from != to || restored.filled == saved, "{what}");
            let bar = bar * coarseness(if from { &first } else { &later });
            let mut session = new(&later, &tokens);
            assert_eq!(later.statistics().prompt_tokens_found, 640, "{what}");
            check(&mut session, bar, &what);
            generated(&mut session, 70, &SamplingOptions::default());
            check(&mut session, bar, &format!("{what}, generated"));
            let again = later.restore_prefixes(&path).unwrap();
            assert_eq!(again.filled.blocks, 0, "{what}");
        }
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn cached_blocks_give_way_to_sessions() {
    let Some(gpu) = gpu() else { return };
    let load = |kv_bytes| {
        let options = LoadOptions {
            device: Device::Cuda(gpu.clone()),
            kv_bytes,
            ..options()
        };
        Served::load(&golden("qwen3_tied"), &options).unwrap()
    };
    let block = new(&load(None), &[1]).kv_bytes();
    let model = load(Some(5 * block));
    let tokens = some_tokens(&model, 220);
    for round in 0..6 {
        let mut session = new(&model, &tokens[round..round + 130]);
        assert_eq!(model.blocks_used(), 3);
        check_in(&mut session, &load(None));
    }
    let now = model.statistics();
    assert!(now.blocks.blocks_evicted > 0 && now.blocks.blocks_cached > 0);
    assert_eq!(now.blocks.cached_bytes + now.free_bytes, 5 * block);
    let held = new(&model, &tokens[..200]);
    let mut other = Session::new(model.clone(), &SessionOptions::default()).unwrap();
    let error = other.prefill(&tokens[1..150]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    drop(held);
    other.prefill(&tokens[1..150]).unwrap();
}

/// Demands about the logits that a session of another model has.
fn check_in(session: &mut Session, model: &Arc<Served>) {
    let mut alone = new(model, session.tokens());
    let want = as_f64(alone.logits().unwrap());
    assert_close(
        session.logits().unwrap(),
        &want,
        5e-3,
        "within a reservation",
    );
}
