//! Calls in the order of the default stream, calls that do not wait for the device, and the errors that later calls report.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use cudarc::driver::sys;

use NVFP4::base::{Error, Result};
use NVFP4::cuda::{self, Gpu, Unit};
use NVFP4::format::Rounding;
use NVFP4::format::nvfp4::{Levels, NonFinite, QuantizeOptions, Recipe};
use NVFP4::ops::linear::Activations;
use NVFP4::ops::tensors::{self, Nvfp4Tensor, ScaleLayout};
use NVFP4::ops::transfer;
use NVFP4::ops::{Device, Workspace};
use NVFP4::tensor::{DType, Shape, Tensor};

use super::{Foreign, assert_same, bytes, bytes_tensor, found, parts_there, there};
use crate::scaled::Quantized;
use crate::support::gpu;

/// A call sees the work that the host program enqueued on the default stream before it, and comes before the work enqueued after it,
/// though both streams are busy for milliseconds.
#[test]
fn calls_keep_the_order_of_the_default_stream() {
    let Some(gpu) = gpu() else { return };
    gpu.synchronize().unwrap();
    let device = Device::Cuda(gpu.clone());
    let (rows, cols) = (4096, 8192);
    let x = Foreign::new(rows * cols * 4);
    let shape = Shape::contiguous(&[rows, cols]).unwrap();
    // SAFETY: the memory outlives the tensor.
    let t = unsafe { transfer::lent(0, x.address, shape, DType::F32, None) }.unwrap();
    let options = QuantizeOptions {
        levels: Levels::Single,
        nonfinite: NonFinite::Saturate, // Which does not wait for the device.
        ..QuantizeOptions::default()
    };
    let quantize = || tensors::quantize(&device, &t, &options, ScaleLayout::Linear).unwrap();
    x.fill(0);
    drop(quantize());
    for round in 0..3 {
        for _ in 0..50 {
            x.fill(0);
        }
        x.fill(6f32.to_bits());
        let q = quantize();
        for _ in 0..20 {
            drop(quantize());
        }
        let late = quantize();
        x.fill((-1f32).to_bits());
        for q in [q, late] {
            assert!(bytes(&q.codes).iter().all(|&b| b == 0x77), "round {round}");
            assert!(bytes(&q.scales).iter().all(|&b| b == 0x38), "round {round}");
        }
        let q = quantize();
        assert!(bytes(&q.codes).iter().all(|&b| b == 0xff), "round {round}");
    }
}

/// A tensor in memory of the host program, which lives longer.
fn lend(foreign: &Foreign, sizes: &[usize], dtype: DType) -> Tensor {
    let shape = Shape::contiguous(sizes).unwrap();
    // SAFETY: the memory outlives the tensor.
    unsafe { transfer::lent(0, foreign.address, shape, dtype, None) }.unwrap()
}

/// The first rows of a matrix.
fn first_rows(t: &Tensor, rows: usize) -> Tensor {
    let (_, cols) = t.shape().matrix();
    let shape = Shape::contiguous(&[rows, cols]).unwrap();
    t.view(shape, 0).unwrap()
}

/// Products see the work that the host program enqueued before the call, and come before the work enqueued after it.
#[test]
fn products_keep_the_order_of_the_default_stream() {
    let Some(gpu) = gpu() else { return };
    gpu.synchronize().unwrap();
    let device = Device::Cuda(gpu.clone());
    let mut ws = Workspace::new();
    let (m, n, k) = (2048, 4096, 4096);
    let (floats, codes) = (Foreign::new(m * k * 4), Foreign::new(n * k / 2));
    let x = lend(&floats, &[m, k], DType::F32);
    let scales = bytes_tensor(&vec![0x38; n * k / 16], &[n, k / 16], DType::U8);
    let q = Nvfp4Tensor {
        codes: lend(&codes, &[n, k / 2], DType::U8),
        scales: there(&scales, false),
        global: 1.0,
        layout: ScaleLayout::Linear,
    };
    let a = Nvfp4Tensor {
        codes: first_rows(&q.codes, 64),
        scales: first_rows(&q.scales, 64),
        ..q.clone()
    };
    for round in 0..3 {
        // Codes of 1, and then of 6: a weight and a product have the former, though neither has been waited for.
        for _ in 0..20 {
            codes.fill(0);
        }
        codes.fill(0x2222_2222);
        let weight = tensors::weight(&device, &q).unwrap();
        let product = tensors::scaled_mm(&device, &a, &q, DType::F32, &mut ws).unwrap();
        codes.fill(0x7777_7777);
        for _ in 0..20 {
            floats.fill(0);
        }
        floats.fill(0.5f32.to_bits());
        let mut multiply = || {
            let exact = Activations::Exact;
            tensors::linear(&device, &x, &weight, exact, DType::F32, &mut ws).unwrap()
        };
        let early = multiply();
        drop(multiply());
        let late = multiply();
        floats.fill((-1f32).to_bits());
        for (t, want) in [
            (&product, k as f32),
            (&early, k as f32 / 2.0),
            (&late, k as f32 / 2.0),
        ] {
            let mut values = vec![0f32; t.shape().elements()];
            transfer::copy_as_f32(t, &mut values).unwrap();
            assert!(values.iter().all(|&v| v == want), "round {round}: {want}");
        }
    }
}

/// Keeps the device busy for some milliseconds at least, in the order of the default stream.
struct Busy(Foreign);

impl Busy {
    fn new() -> Busy {
        Busy(Foreign::new(512 << 20))
    }

    fn start(&self) {
        for _ in 0..100 {
            self.0.fill(0);
        }
    }

    /// The device has not come to what was enqueued after the start.
    #[track_caller]
    fn is_at_work(&self) {
        let stream = std::ptr::without_provenance_mut(1);
        // SAFETY: the handle of the legacy default stream.
        let answer = unsafe { sys::cuStreamQuery(stream) };
        assert_eq!(answer, sys::CUresult::CUDA_ERROR_NOT_READY);
    }
}

/// A tensor `[rows, cols]` of ones on the device, the value at `index` being NaN, if there is one.
fn ones(rows: usize, cols: usize, nan: Option<usize>) -> Tensor {
    let mut values = vec![1f32; rows * cols];
    if let Some(index) = nan {
        values[index] = f32::NAN;
    }
    there(
        &Tensor::from_f32(&values, &[rows, cols], DType::F16).unwrap(),
        false,
    )
}

const LEGACY: QuantizeOptions = QuantizeOptions {
    levels: Levels::Legacy,
    recipe: Recipe::Amax,
    rounding: Rounding::NearestEven,
    nonfinite: NonFinite::Error,
    seed: 0,
};

/// Calls that check their input come back while the device is busy with earlier work, and their results are right.
#[test]
fn calls_that_check_their_input_do_not_wait() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let mut ws = Workspace::new();
    let q = Quantized::new(&gpu, 64, 512, ScaleLayout::Linear, 7).tensor();
    let (here, q) = (q.clone(), parts_there(&q, false));
    let x = ones(64, 512, None);
    let mut calls = || {
        let product = tensors::scaled_mm(&device, &q, &q, DType::F32, &mut ws).unwrap();
        let quantized = tensors::quantize(&device, &x, &LEGACY, ScaleLayout::Linear).unwrap();
        (product, quantized)
    };
    // Kernels are compiled by this.
    let (product, quantized) = calls();
    let (want, codes) = (bytes(&product), bytes(&quantized.codes));
    let busy = Busy::new();
    busy.start();
    let all: Vec<_> = (0..40).map(|_| calls()).collect();
    busy.is_at_work();
    transfer::synchronize(0).unwrap();
    for (product, quantized) in &all {
        assert_same(&bytes(product), &want, "a product");
        assert_same(&bytes(&quantized.codes), &codes, "codes");
    }
    let host = tensors::scaled_mm(&device, &here, &here, DType::F32, &mut ws).unwrap();
    assert_same(&want, &bytes(&host), "the product of host memory");
}

/// Tensors that are quantized in calls that do not wait: one of ones, and one with a NaN that the device finds.
struct Checked {
    busy: Busy,
    good: Tensor,
    bad: Tensor,
    device: Device,
    gpu: Arc<Gpu>,
}

/// The error of the bad tensor.
const WRONG: &str = "the value at index 677 (row 7, column 5) is NaN";

impl Checked {
    fn quantize(&self, x: &Tensor) -> Result<Nvfp4Tensor> {
        tensors::quantize(&self.device, x, &LEGACY, ScaleLayout::Linear)
    }

    /// A copy to the host reports the error of another result.
    fn by_a_copy(&self) {
        self.busy.start();
        let right = self.quantize(&self.good).unwrap();
        drop(self.quantize(&self.bad).unwrap());
        let after = self.quantize(&self.good).unwrap();
        self.busy.is_at_work();
        let mut out = vec![0; after.codes.bytes()];
        let e = transfer::copy_to_host(&after.codes, &mut out).unwrap_err();
        assert!(
            e.message().contains(WRONG) && !e.message().contains("too"),
            "{e}"
        );
        transfer::copy_to_host(&after.codes, &mut out).unwrap();
        let around = "calls around the one that failed";
        assert_same(&bytes(&right.codes), &out, around);
    }

    /// A wait reports several errors at once.
    fn by_the_wait(&self) {
        let (good, bad) = (&self.good, &self.bad);
        self.busy.start();
        for x in [good, bad, good, bad, bad] {
            drop(self.quantize(x).unwrap());
        }
        let e = transfer::synchronize(0).unwrap_err();
        assert!(
            e.message().contains(WRONG) && e.message().contains("2 other calls failed too"),
            "{e}"
        );
        transfer::synchronize(0).unwrap();
    }

    /// A call that does not wait reports an error once the device has told of it. That call has done nothing, and the next one works.
    fn by_the_next_call(&self) {
        drop(self.quantize(&self.bad).unwrap());
        self.gpu.synchronize().unwrap();
        let e = self.quantize(&self.good).unwrap_err();
        assert!(e.message().contains(WRONG), "{e}");
        drop(self.quantize(&self.good).unwrap());
    }

    /// Calls report an error that wait for something of their own: a global scale, a weight, a copy to the device.
    fn by_calls_that_wait(&self) {
        let weight = self.quantize(&self.good).unwrap();
        let two = QuantizeOptions {
            levels: Levels::Two,
            ..LEGACY
        };
        let host = Tensor::from_f32(&[1.0; 32], &[32], DType::F32).unwrap();
        let (device, good) = (&self.device, &self.good);
        let waiting: [&dyn Fn() -> Result<()>; 3] = [
            &|| tensors::quantize(device, good, &two, ScaleLayout::Linear).map(drop),
            &|| tensors::weight(device, &weight).map(drop),
            &|| transfer::copy(&host, Some(0)).map(drop),
        ];
        for (i, call) in waiting.into_iter().enumerate() {
            call().unwrap();
            self.busy.start();
            drop(self.quantize(&self.bad).unwrap());
            let e = call().unwrap_err();
            assert!(e.message().contains(WRONG), "{i}: {e}");
            call().unwrap();
        }
    }

    /// A weight that is kept for evaluation is right, or an error each time.
    fn by_kept_weights(&self) {
        let kept = NVFP4::ops::ste::EvalWeights::new();
        let e = kept.weight(&self.device, &self.bad).unwrap_err();
        assert!(e.message().contains(WRONG));
        assert!(kept.weight(&self.device, &self.bad).is_err());
        kept.weight(&self.device, &self.good).unwrap();
    }
}

/// A fault in calls on their way is the error of the first later call that waits. The error names the first fault, and is reported
/// once.
#[test]
fn what_the_device_finds_wrong_is_the_error_of_a_later_call() {
    let Some(gpu) = gpu() else { return };
    let (good, bad) = (ones(40, 96, None), ones(40, 96, Some(7 * 96 + 5)));
    let device = Device::Cuda(gpu.clone());
    drop(tensors::quantize(&device, &good, &LEGACY, ScaleLayout::Linear).unwrap());
    transfer::synchronize(0).unwrap();
    let checked = Checked {
        busy: Busy::new(),
        good,
        bad,
        device,
        gpu,
    };
    checked.by_a_copy();
    checked.by_the_wait();
    checked.by_the_next_call();
    checked.by_calls_that_wait();
    checked.by_kept_weights();
}

/// More calls than may be on their way, and from several threads.
#[test]
fn any_number_of_calls_is_checked() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let (good, bad) = (ones(1, 16, None), ones(1, 16, Some(3)));
    let quantize = |x: &Tensor| tensors::quantize(&device, x, &LEGACY, ScaleLayout::Linear);
    for _ in 0..9_000 {
        drop(quantize(&good).unwrap());
    }
    drop(quantize(&bad).unwrap());
    let e = found(&gpu);
    let said = e.message().strip_prefix("quantize (checked call ");
    let number = said.and_then(|said| said.split_once(" on cuda:0): ")?.0.parse().ok());
    assert!(number.is_some_and(|number: u32| number > 9_000), "{e}");

    // Every failure is reported to somebody.
    let reported = AtomicU32::new(0);
    let of = |e: &Error| -> u32 {
        match e.message().split_once(" other calls failed too") {
            Some((before, _)) => 1 + before.rsplit(' ').next().unwrap().parse::<u32>().unwrap(),
            None => 1 + u32::from(e.message().contains("another call failed too")),
        }
    };
    let failed = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (reported, failed, quantize) = (&reported, &failed, &quantize);
            let (good, bad) = (&good, &bad);
            scope.spawn(move || {
                for i in 0..500 {
                    let is_bad = (i + thread) % 50 == 0;
                    match quantize(if is_bad { bad } else { good }) {
                        Ok(_) => failed.fetch_add(u32::from(is_bad), Relaxed),
                        Err(e) => reported.fetch_add(of(&e), Relaxed),
                    };
                }
            });
        }
    });
    gpu.synchronize().unwrap();
    if let Err(e) = gpu.check_calls() {
        reported.fetch_add(of(&e), Relaxed);
    }
    gpu.check_calls().unwrap();
    assert!(failed.load(Relaxed) > 0);
    assert_eq!(reported.load(Relaxed), failed.load(Relaxed));
}

/// Units are compiled beside each other, and again nothing is to be done; and whoever asks for a device gets the same one.
#[test]
fn units_are_prepared_and_devices_opened_by_many_at_once() {
    let Some(gpu) = gpu() else { return };
    let ready = std::time::Instant::now();
    gpu.prepare(Unit::ALL, &|| false).unwrap();
    println!("all units: {:?}", ready.elapsed());
    gpu.prepare(Unit::ALL, &|| false).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                assert!(Arc::ptr_eq(&Gpu::open(0).unwrap(), &gpu));
                assert!(Gpu::open(99).is_err());
                gpu.need_kernels().unwrap();
            });
        }
    });
    assert_eq!(cuda::open_gpus().len(), 1);
}
