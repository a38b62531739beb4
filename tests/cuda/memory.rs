//! The memory of a GPU: it comes back, and running out of it leaves sessions as they were.

use std::sync::Arc;

use NVFP4::base::ErrorKind;
use NVFP4::base::memory::{self, Tag};
use NVFP4::engine::Served;
use NVFP4::model::{Device, LoadOptions};
use NVFP4::session::{self, SamplingOptions, Session, SessionOptions};

use crate::common::{check_memory_comes_back, golden, options, some_tokens};
use crate::support::{as_f64, assert_close, gpu, load_on, logits, prompted, with_context};

#[test]
fn memory_comes_back() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let settle = || gpu.empty_cache().unwrap();
    let used = |model: Arc<Served>| drop(logits(&model, &some_tokens(&model, 40)));
    // Arrays that the first use makes for all later ones stay.
    check_memory_comes_back(&device, 1, used, settle);
    let (before, _) = gpu.memory().unwrap();
    check_memory_comes_back(&device, 100, used, settle);
    let (after, _) = gpu.memory().unwrap();
    assert!(
        before.saturating_sub(after) < 4 << 20,
        "{} bytes of device memory were lost",
        before - after
    );
}

/// Runs with no memory left to allocate.
fn out_of_memory<T>(run: impl FnOnce() -> T) -> T {
    memory::set_budget(Some(memory::total().current));
    let result = run();
    memory::set_budget(None);
    result
}

#[test]
fn running_out_of_device_memory_leaves_the_session_usable() {
    let Some(gpu) = gpu() else { return };
    let model = load_on(Device::Cuda(gpu), &golden("qwen3_tied"));
    let prompt = some_tokens(&model, 60);
    let mut session = prompted(&model, &with_context(256), &prompt);
    let want = as_f64(session.logits().unwrap());
    let more = some_tokens(&model, 100);
    let error = out_of_memory(|| session.prefill(&more)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OverBudget, "{error}");
    assert_eq!(session.len(), 60);
    // The last token is run again by itself, in another order of summation.
    assert_close(session.logits().unwrap(), &want, 5e-3, "logits afterwards");
    session.prefill(&more).unwrap();
}

/// A step that fails half-way leaves nothing behind that the next step of other sessions would take for its own.
#[test]
fn a_step_that_fails_leaves_the_next_one_alone() {
    let Some(gpu) = gpu() else { return };
    let model = load_on(Device::Cuda(gpu), &golden("qwen3_tied"));
    let new = |len: usize| {
        let prompt = some_tokens(&model, len);
        prompted(&model, &SessionOptions::default(), &prompt)
    };
    let greedy = SamplingOptions::default();
    let penalized = SamplingOptions {
        repetition_penalty: 1.5,
        ..greedy
    };
    let step = |s: &mut Session, token: u32, options: &SamplingOptions, ahead: bool| {
        session::step_choose(&mut [s], &[token], &[options], ahead)
    };
    let run = |fail: bool| {
        let (mut a, mut b) = (new(20), new(33));
        let mut token = 3;
        let mut said = Vec::new();
        for i in 0..12 {
            token = step(&mut a, token, &greedy, i % 2 == 0).unwrap()[0];
            said.push(token);
            if fail && i == 6 {
                // The marks of tokens that have occurred are made after the tokens and pages of this session were written.
                let e = out_of_memory(|| step(&mut b, 5, &penalized, false)).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::OverBudget, "{e}");
                assert_eq!(b.len(), 33);
            }
        }
        (said, a.logits().unwrap().to_vec())
    };
    let want = run(false);
    assert_eq!(run(true), want);
}

/// Memory for keys and values that is reserved when a model is loaded is all that its sessions get; it is there from the beginning.
#[test]
fn sessions_share_the_memory_that_was_reserved() {
    let Some(gpu) = gpu() else { return };
    let on_gpu = |kv_bytes| LoadOptions {
        device: Device::Cuda(gpu.clone()),
        kv_bytes,
        prefix_cache: false,
        ..options()
    };
    for case in ["qwen3_tied", "gemma3_wide"] {
        let growing = Served::load(&golden(case), &on_gpu(None)).unwrap();
        let new = |model: &Arc<Served>, len: usize| {
            prompted(model, &SessionOptions::default(), &some_tokens(model, len))
        };
        let block = new(&growing, 64).kv_bytes();
        let model = Served::load(&golden(case), &on_gpu(Some(5 * block))).unwrap();
        let reserved = memory::usage(Tag::DeviceKvCache).current;
        let (free, _) = gpu.memory().unwrap();
        let (mut first, mut second) = (new(&model, 150), new(&model, 70));
        let e = second.prefill(&[1; 60]).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::OutOfMemory, "{e}");
        assert_eq!(second.len(), 70);
        assert!(first.fork().unwrap().decode(1).is_err());
        drop(first);
        first = new(&model, 64);
        second.prefill(&[1; 60]).unwrap();
        drop((first, second));
        assert_eq!(memory::usage(Tag::DeviceKvCache).current, reserved);
        let (now, _) = gpu.memory().unwrap();
        assert!(
            free.saturating_sub(now) < 64 << 20,
            "{free} bytes were free, and now {now}"
        );
    }
    assert_eq!(memory::usage(Tag::DeviceKvCache).current, 0);
}
