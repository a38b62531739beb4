//! A process whose GPU fails: out of memory, a faulting kernel, a missing compiler. Each is an error that says what to do, without a crash
//! or a hang. Tests that spoil a process, or need another environment, run their part in a child. Without a CUDA device every test says
//! SKIPPED, unless NVFP4_REQUIRE names `cuda`.

#[path = "../common/mod.rs"]
mod common;

use std::io::Read;
use std::ops::ControlFlow;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use NVFP4::base::memory::{self, Tag};
use NVFP4::base::{Error, ErrorKind, env};
use NVFP4::cuda::{self, DeviceBuffer, Gpu, Program, Shape};
use NVFP4::engine::Served;
use NVFP4::model::{Activations, Device, LoadOptions};
use NVFP4::ops::linear::{Linear, linear};
use NVFP4::ops::{Slice, SliceMut, Workspace};
use NVFP4::session::{GenerateOptions, Session, SessionOptions};
use common::{golden, options, some_tokens};

/// Serializes tests that share the device's memory (see also `.config/nextest.toml`).
static TURN: Mutex<()> = Mutex::new(());

/// Set in a child.
const CHILD: &str = "NVFP4_TEST_CHILD";
/// Printed by a child when all its checks have passed.
const DONE: &str = "the child has checked everything";
/// More time than any child needs, including compiling kernels.
const PATIENCE: Duration = Duration::from_secs(120);

/// The first CUDA device and this test's turn; without one the test is skipped.
fn gpu() -> Option<(Arc<Gpu>, MutexGuard<'static, ()>)> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    match Gpu::open(0) {
        Ok(gpu) => Some((gpu, turn)),
        Err(e) => {
            assert!(
                !env::required_capabilities().iter().any(|c| c == "cuda"),
                "NVFP4_REQUIRE names cuda: {e}"
            );
            println!("SKIPPED no CUDA device: {e}");
            None
        }
    }
}

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Runs a test of this file in a process of its own, with more variables.
fn in_a_child(test: &str, variables: &[(&str, &str)]) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .envs(variables.iter().copied())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("{test}: the child hangs");
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    // Less than a pipe holds, so the child has not waited for a reader.
    let mut said = String::new();
    child
        .stdout
        .take()
        .expect("piped")
        .read_to_string(&mut said)
        .unwrap();
    assert!(
        status.success() && said.contains(DONE),
        "{test}: {status}: {said}"
    );
}

fn load(gpu: &Arc<Gpu>) -> NVFP4::base::Result<Arc<Served>> {
    Served::load(
        &golden("qwen3_tied"),
        &LoadOptions {
            device: Device::Cuda(gpu.clone()),
            ..options()
        },
    )
}

fn session(model: &Arc<Served>) -> Session {
    let options = SessionOptions {
        context: 256,
        ..SessionOptions::default()
    };
    Session::new(model.clone(), &options).unwrap()
}

#[track_caller]
fn assert_says(error: &Error, kind: ErrorKind, parts: &[&str]) {
    println!("{error}");
    assert_eq!(error.kind(), kind, "{error}");
    for part in parts {
        assert!(
            error.message().contains(part),
            "'{part}' is not in: {error}"
        );
    }
}

/// Takes all memory of the device, except for less than a small allocation needs.
fn fill(gpu: &Arc<Gpu>) -> Vec<DeviceBuffer> {
    let (mut all, mut size) = (Vec::new(), 16usize << 30);
    while size >= 256 {
        match DeviceBuffer::uninit(gpu, Tag::DeviceTensor, size) {
            Ok(buffer) => all.push(buffer),
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::OutOfMemory, "{e}");
                size /= 2;
            }
        }
    }
    all
}

#[test]
fn exhausted_device_memory_leaves_device_and_session_usable() {
    let Some((gpu, _turn)) = gpu() else { return };
    let model = load(&gpu).unwrap();
    let mut s = session(&model);
    s.prefill(&some_tokens(&model, 60)).unwrap();
    let want = s.logits().unwrap().to_vec();
    gpu.empty_cache().unwrap();
    let (free_before, total) = gpu.memory().unwrap();
    let held_before = memory::total().current;

    let filler = fill(&gpu);
    let filled: usize = filler.iter().map(DeviceBuffer::bytes).sum();
    println!("{filled} of {free_before} free bytes taken");
    let error = s.prefill(&some_tokens(&model, 150)).unwrap_err();
    let parts = [
        "cuda:0",
        "bytes for",
        "this library holds",
        "are free",
        &total.to_string(),
    ];
    assert_says(&error, ErrorKind::OutOfMemory, &parts);
    assert_eq!(s.len(), 60);
    let error = load(&gpu).unwrap_err();
    assert_says(
        &error,
        ErrorKind::OutOfMemory,
        &["this library holds", "are free"],
    );
    drop(filler);

    // All memory is free again, and the session continues normally.
    gpu.empty_cache().unwrap();
    let (free_after, _) = gpu.memory().unwrap();
    assert!(
        free_after + (64 << 20) >= free_before,
        "{free_before} bytes were free, {free_after} are"
    );
    assert!(memory::total().current <= held_before + (64 << 20));
    let got = s.logits().unwrap();
    let (mut difference, mut norm) = (0f64, 0f64);
    for (&g, &w) in got.iter().zip(&want) {
        difference += f64::from(g - w).powi(2);
        norm += f64::from(w).powi(2);
    }
    // The last token is run again by itself, in another order of summation.
    assert!((difference / norm).sqrt() < 5e-3);
    s.prefill(&some_tokens(&model, 150)).unwrap();
    load(&gpu).unwrap();
}

#[test]
fn requests_larger_than_the_device_and_the_budget_are_refused() {
    let Some((gpu, _turn)) = gpu() else { return };
    let (_, total) = gpu.memory().unwrap();
    let wanted = 2 * total;
    let error = DeviceBuffer::uninit(&gpu, Tag::DeviceTensor, wanted).unwrap_err();
    let parts = [
        &wanted.to_string(),
        "device_tensor",
        "this library holds",
        "are free",
    ];
    assert_says(&error, ErrorKind::OutOfMemory, &parts);

    memory::set_budget(Some(memory::total().current + (1 << 20)));
    let error = DeviceBuffer::uninit(&gpu, Tag::DeviceTensor, 1 << 21).unwrap_err();
    memory::set_budget(None);
    assert_says(
        &error,
        ErrorKind::OverBudget,
        &["2097152 bytes", "device_tensor", "budget"],
    );

    let values: Vec<u32> = (0..1000).collect();
    let buffer = DeviceBuffer::from_slice(&gpu, Tag::DeviceTensor, &values).unwrap();
    let mut read = vec![0u32; 1000];
    buffer.read(0, &mut read).unwrap();
    assert_eq!(read, values);
}

#[test]
fn devices_that_are_not_there_are_named() {
    let Some((_gpu, _turn)) = gpu() else { return };
    let count = cuda::count().unwrap();
    let error = Gpu::open(count).unwrap_err();
    assert_says(
        &error,
        ErrorKind::DeviceUnavailable,
        &[&format!("cuda:{count}"), "cuda:0"],
    );
}

/// Lets a kernel fail while a model and its sessions are in use, and then asks everything of them.
fn spoil(gpu: Arc<Gpu>, kernel: &str, why: &str) {
    let model = load(&gpu).unwrap();
    let tokens = some_tokens(&model, 60);
    let generate = |s: &mut Session| {
        let options = GenerateOptions {
            max_tokens: 8,
            ignore_model_stops: true,
            ..GenerateOptions::default()
        };
        s.generate(&options, &mut |_| ControlFlow::Continue(()))
    };
    // One that stands before a step which is enqueued already, one with pages alone, and one that shares them.
    let (mut first, mut second) = (session(&model), session(&model));
    for s in [&mut first, &mut second] {
        s.prefill(&tokens).unwrap();
    }
    generate(&mut first).unwrap();
    let mut third = second.fork().unwrap();
    let device = Device::Cuda(gpu.clone());
    let weight = |codes: &mut [u8], scales: &mut [u8]| {
        codes.fill(0x21);
        scales.fill(0x38);
        Ok(())
    };
    let product = Linear::nvfp4(&device, 64, 64, 1.0, &mut |_, c, s| weight(c, s)).unwrap();
    let buffer = DeviceBuffer::from_slice(&gpu, Tag::DeviceTensor, &[1u32, 2, 3]).unwrap();

    let program = Program::new(&gpu, "fault.cu", include_str!("fault.cu")).unwrap();
    let shape = Shape {
        grid: [1, 1, 1],
        threads: 1,
        shared: 0,
        overlap: false,
    };
    // Not aligned to any allocation, and far from all.
    let address = 0x10u64;
    // SAFETY: it is not; that is the test, and the process ends with it.
    unsafe { program.launch(kernel, shape, &address) }.unwrap();

    let lost = [why, "lost its context", "restart the process"];
    let check = |what: &str, error: Option<Error>| {
        let error = error.unwrap_or_else(|| panic!("{what} went well"));
        print!("{what}: ");
        assert_says(&error, ErrorKind::DeviceUnavailable, &lost);
    };
    check("waiting", gpu.synchronize().err());
    for round in 0..2 {
        println!("round {round}");
        check("generating", generate(&mut first).err());
        check("prefilling", second.prefill(&tokens).err());
        check("decoding in a fork", third.decode(1).err());
        check("loading", load(&gpu).err());
        check(
            "allocating",
            DeviceBuffer::zeroed(&gpu, Tag::DeviceTensor, 1 << 20).err(),
        );
        check("reading", buffer.read(0, &mut [0u32; 3]).err());
        check("asking for memory", gpu.memory().err());
        check("emptying the cache", gpu.empty_cache().err());
        check("measuring", cuda::read_bandwidth(&gpu).err());
        for rows in [1, 40] {
            let (x, mut y) = (vec![1f32; rows * 64], vec![0f32; rows * 64]);
            let done = linear(
                &device,
                Slice::Host(&x),
                rows,
                &mut [(&product, SliceMut::Host(&mut y))],
                Activations::Exact,
                &mut Workspace::new(),
            );
            check("multiplying", done.err());
        }
        let path = std::env::temp_dir().join(format!("nvfp4-lost-{}", std::process::id()));
        check("saving", second.save(&path).err());
        assert!(!path.exists());
    }
    let report = cuda::report();
    println!("diagnosis: {:?}", report.devices[0].reason);

    drop((
        first, second, third, product, buffer, program, model, device,
    ));
    drop(gpu);
    // Nothing promises that a new context works; but it is made or refused.
    match Gpu::open(0).and_then(|gpu| gpu.synchronize()) {
        Ok(()) => println!("a new context works"),
        Err(e) => println!("no new context: {e}"),
    }
    println!("{DONE}");
}

#[test]
fn a_bad_address_loses_the_context_and_nothing_else() {
    let Some((gpu, _turn)) = gpu() else { return };
    match is_child() {
        true => spoil(gpu, "write_there", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        false => in_a_child("a_bad_address_loses_the_context_and_nothing_else", &[]),
    }
}

#[test]
fn a_trap_loses_the_context_and_nothing_else() {
    let Some((gpu, _turn)) = gpu() else { return };
    match is_child() {
        true => spoil(gpu, "trap", "CUDA_ERROR_"),
        false => in_a_child("a_trap_loses_the_context_and_nothing_else", &[]),
    }
}

#[test]
fn without_a_compiler_a_model_says_so() {
    let Some((gpu, _turn)) = gpu() else { return };
    if !is_child() {
        let nowhere = [
            ("NVFP4_NVRTC", "/nowhere/libnvrtc.so.13"),
            ("NVFP4_CACHE", "off"),
        ];
        return in_a_child("without_a_compiler_a_model_says_so", &nowhere);
    }
    match cuda::have_kernels(gpu.arch()) {
        Ok(()) => {
            println!("SKIPPED kernels are embedded");
            load(&gpu).unwrap();
        }
        Err(_) => {
            let error = Device::cuda(0).unwrap_err();
            let parts = ["NVFP4_NVRTC", "/nowhere/libnvrtc.so.13"];
            assert_says(&error, ErrorKind::DeviceUnavailable, &parts);
            // Loading fails on a device that was opened all the same: it packs weights by a kernel.
            let error = load(&gpu).unwrap_err();
            assert_says(&error, ErrorKind::DeviceUnavailable, &parts);
        }
    }
    println!("{DONE}");
}

/// Forks. What `child` says of itself is this function's result; it has a minute.
fn forked(child: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child leaves without running anything of its parent's.
    unsafe {
        match libc::fork() {
            0 => {
                libc::alarm(60);
                libc::_exit(i32::from(!child()));
            }
            pid => {
                let mut status = 0;
                libc::waitpid(pid, &mut status, 0) == pid && status == 0
            }
        }
    }
}

#[test]
fn in_the_child_of_a_fork_a_gpu_is_refused_and_the_processor_works() {
    let Some(_gpu) = gpu() else { return };
    if !is_child() {
        let test = "in_the_child_of_a_fork_a_gpu_is_refused_and_the_processor_works";
        return in_a_child(test, &[]);
    }
    let load = |device| Served::load(&golden("qwen3_tied"), &LoadOptions::new(device));
    let model = load(Device::cuda(0).unwrap()).unwrap();
    let tokens = some_tokens(&model, 8);
    let (mut before, mut fresh) = (session(&model), session(&model));
    before.prefill(&tokens).unwrap();
    let refused =
        |e: Error| e.kind() == ErrorKind::DeviceUnavailable && e.message().contains("fork");
    assert!(forked(|| {
        let kept = before.decode(tokens[0]).is_err_and(refused);
        let begun = fresh.prefill(&tokens).is_err_and(refused);
        let opened = Device::cuda(0)
            .and_then(|device| load(device).map(drop))
            .is_err_and(refused);
        let on_cpu = load(Device::cpu(Some(2)).unwrap()).unwrap();
        kept && begun && opened && session(&on_cpu).prefill(&tokens).is_ok()
    }));
    before.decode(tokens[0]).unwrap();
    fresh.prefill(&tokens).unwrap();
    println!("{DONE}");
}
