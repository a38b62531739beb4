//! Products of tensors of the device, against f64, the processor, and the same products of host memory.

use std::sync::Arc;

use NVFP4::base::memory::{self, Tag};
use NVFP4::base::{ErrorKind, Result};
use NVFP4::cuda::{self, DeviceBuffer, FloatRows, Gpu};
use NVFP4::ops::backend::Backend;
use NVFP4::ops::linear::{Activations, Linear};
use NVFP4::ops::tensors::{self, Nvfp4Tensor, ScaleLayout};
use NVFP4::ops::transfer;
use NVFP4::ops::{Device, Workspace};
use NVFP4::tensor::{DType, Place, Shape, Tensor};

use super::{
    POISON, TYPES, assert_same, bytes, in_type, parts_managed, parts_there, poisoned, there,
    values, written,
};
use crate::common::expect_kind;
use crate::scaled::{Quantized, RESULTS, assert_rounded, scaled_product};
use crate::support::{as_f64, assert_close, gpu, normal, upload};

/// W4A4: against f64, against the processor, and the bits of the same product of host memory.
#[test]
fn products_of_two_tensors_stay_on_the_device() {
    let Some(gpu) = gpu() else { return };
    let (device, cpu) = (Device::Cuda(gpu.clone()), Device::cpu(Some(2)).unwrap());
    let mut ws = Workspace::new();
    let layouts = [ScaleLayout::Linear, ScaleLayout::Swizzled];
    for (i, &(m, n, k)) in [
        (1, 1, 16),
        (3, 20, 48),
        (17, 130, 64),
        (129, 65, 80),
        (40, 257, 576),
        (130, 140, 320),
    ]
    .iter()
    .enumerate()
    {
        let seed = 20_000 + 100 * i as u64;
        let a = Quantized::new(&gpu, m, k, layouts[i % 2], seed);
        let b = Quantized::new(&gpu, n, k, layouts[i / 2 % 2], seed + 50);
        let want = scaled_product(&a, &b);
        let (a, b) = (a.tensor(), b.tensor());
        for dtype in RESULTS {
            let what = format!("[{m}, {k}] x [{n}, {k}] in {}", dtype.name());
            let on_host = tensors::scaled_mm(&device, &a, &b, dtype, &mut ws).unwrap();
            let oracle = tensors::scaled_mm(&cpu, &a, &b, dtype, &mut ws).unwrap();
            assert_rounded(&bytes(&oracle), dtype, &want, k, "the processor");
            let mut places = vec![
                (parts_there(&a, false), parts_there(&b, false)),
                (parts_there(&a, true), parts_there(&b, false)),
                (parts_there(&a, false), parts_there(&b, true)),
            ];
            if let (Some(a), Some(b)) = (parts_managed(&a), parts_managed(&b)) {
                places.push((parts_there(&a, false), b));
            }
            for (a, b) in &places {
                let out = tensors::scaled_mm(&device, a, b, dtype, &mut ws).unwrap();
                assert_eq!(out.place(), Place::Cuda(0), "{what}");
                assert_eq!((out.shape().sizes(), out.dtype()), (&[m, n][..], dtype));
                assert_rounded(&bytes(&out), dtype, &want, k, &what);
                assert_same(&bytes(&out), &bytes(&on_host), &what);
            }
        }
    }
}

/// Demands an error of a kind whose message has all these words.
#[track_caller]
fn expect_words<T>(result: Result<T>, kind: ErrorKind, words: &[&str]) {
    let Err(e) = result else {
        panic!("no error, where {kind:?} with {words:?} was to come")
    };
    assert_eq!(e.kind(), kind, "{e}");
    for words in words {
        assert!(e.message().contains(words), "'{words}' is not in '{e}'");
    }
}

#[test]
fn operands_of_a_product_that_do_not_go_together_are_refused() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let mut ws = Workspace::new();
    let host = Quantized::new(&gpu, 20, 96, ScaleLayout::Linear, 1).tensor();
    let on_gpu = parts_there(&host, false);
    let split = Nvfp4Tensor {
        scales: host.scales.clone(),
        ..on_gpu.clone()
    };
    let floats = Nvfp4Tensor {
        codes: there(&Tensor::zeros(&[20, 48], DType::F16).unwrap(), false),
        ..on_gpu.clone()
    };
    let other = Quantized::new(&gpu, 20, 112, ScaleLayout::Linear, 2).tensor();
    let other = parts_there(&other, false);
    let (invalid, unsupported) = (ErrorKind::InvalidArgument, ErrorKind::Unsupported);
    let both: &[&str] = &["the memory of cuda:0", "the memory of the host"];
    for (a, b, dtype, kind, words) in [
        (&on_gpu, &host, DType::F32, invalid, both),
        (&host, &on_gpu, DType::F32, invalid, both),
        (&on_gpu, &split, DType::F32, invalid, both),
        (&on_gpu, &on_gpu, DType::F64, unsupported, &["float64"]),
        (&on_gpu, &on_gpu, DType::I32, invalid, &["int32"]),
        (&floats, &on_gpu, DType::F32, invalid, &["float16"]),
        (&on_gpu, &other, DType::F32, invalid, &["K must be equal"]),
    ] {
        let product = tensors::scaled_mm(&device, a, b, dtype, &mut ws);
        expect_words(product, kind, words);
    }
    match cuda::count().unwrap() {
        0 | 1 => println!("SKIPPED a second device: there is one"),
        _ => refused_on_a_second_device(&device, &on_gpu, &mut ws),
    }

    // No rows give a result without any, where the operands are.
    let none = Nvfp4Tensor {
        codes: transfer::zeros(&[0, 48], DType::U8, Some(0)).unwrap(),
        scales: transfer::zeros(&[0, 6], DType::U8, Some(0)).unwrap(),
        ..on_gpu.clone()
    };
    for (a, b, sizes) in [(&none, &on_gpu, [0, 20]), (&on_gpu, &none, [20, 0])] {
        let out = tensors::scaled_mm(&device, a, b, DType::BF16, &mut ws).unwrap();
        assert_eq!(
            (out.place(), out.shape().sizes()),
            (Place::Cuda(0), &sizes[..])
        );
    }
}

/// Demands that a device refuses operands that another one has.
fn refused_on_a_second_device(device: &Device, q: &Nvfp4Tensor, ws: &mut Workspace) {
    let second = Device::cuda(1).unwrap();
    expect_words(
        tensors::scaled_mm(&second, q, q, DType::F32, ws),
        ErrorKind::InvalidArgument,
        &["cuda:1 (", "the memory of cuda:0"],
    );
    let far = Nvfp4Tensor {
        codes: transfer::copy(&q.codes, Some(1)).unwrap(),
        ..q.clone()
    };
    let e = tensors::scaled_mm(device, q, &far, DType::F32, ws);
    assert!(e.unwrap_err().message().contains("the memory of cuda:1"));
}

/// Rows of very different magnitudes, up to where the type ends, that f16 alone would not hold.
fn activations(seed: u64, rows: usize, k: usize, dtype: DType) -> Vec<f32> {
    let scales: &[f32] = match dtype {
        DType::F16 => &[1.0, 3e4, 1e-3, 6e-8],
        _ => &[1.0, 3e5, 1e30, 1e-3, 1e-30, 0.0],
    };
    normal(seed, rows * k)
        .iter()
        .enumerate()
        .map(|(i, v)| in_type(v / 2.0 * scales[i / k % scales.len()], dtype))
        .collect()
}

/// Weights of every kind of one matrix `[n, k]`, on the device and on the processor.
fn weights(device: &Device, cpu: &Device, q: &Nvfp4Tensor) -> Vec<(Linear, Linear)> {
    let mut weights = vec![(
        tensors::weight(device, q).unwrap(),
        tensors::weight(cpu, q).unwrap(),
    )];
    for dense in TYPES {
        let make = |device| tensors::weight_for(device, q, Backend::DequantMatmul, dense);
        weights.push((make(device).unwrap(), make(cpu).unwrap()));
    }
    weights
}

/// Rows `[m, k]` of one type, whose products with weights are compared.
struct Rows<'a> {
    device: &'a Device,
    cpu: &'a Device,
    ws: &'a mut Workspace,
    host: Tensor,
}

impl Rows<'_> {
    fn product(&mut self, device: &Device, x: &Tensor, w: &Linear, out: DType) -> Tensor {
        tensors::linear(device, x, w, Activations::Exact, out, self.ws).unwrap()
    }

    /// Products stay on the device, have the bits of those of host memory, and are near those of the processor.
    fn check(&mut self, on_gpu: &Linear, on_cpu: &Linear) {
        let (host, device) = (self.host.clone(), self.device);
        let (m, k) = host.shape().matrix();
        let n = on_gpu.rows();
        let what = format!(
            "{} [{m}, {k}] x {} [{n}, {k}]",
            host.dtype().name(),
            on_gpu.kind().name()
        );
        let xs = [there(&host, false), there(&host, true)];
        for out in RESULTS {
            let want = bytes(&self.product(device, &host, on_gpu, out));
            for x in &xs {
                let got = self.product(device, x, on_gpu, out);
                assert_eq!(got.place(), Place::Cuda(0), "{what}");
                assert_eq!((got.shape().sizes(), got.dtype()), (&[m, n][..], out));
                let what = format!("{what} in {}", out.name());
                assert_same(&bytes(&got), &want, &what);
            }
        }
        let mut got = vec![0f32; m * n];
        let on_device = self.product(device, &xs[0], on_gpu, DType::F32);
        transfer::copy_as_f32(&on_device, &mut got).unwrap();
        let oracle = self.product(self.cpu, &host, on_cpu, DType::F32);
        let oracle = oracle.to_f32().unwrap();
        let bar = match on_gpu.kind().name() {
            "bf16" => 8e-3,
            _ => 1.5e-3,
        };
        // By rows, as one of them would hide the others.
        for (row, (got, want)) in got.chunks(n).zip(oracle.chunks(n)).enumerate() {
            if n >= 33 && want.iter().any(|&v| v != 0.0) {
                assert_close(got, &as_f64(want), bar, &format!("{what}, row {row}"));
            }
        }
    }
}

/// W4A16 and dense: the bits of the same product of host memory, which is near that of the processor.
#[test]
fn products_with_weights_stay_on_the_device() {
    let Some(gpu) = gpu() else { return };
    let (device, cpu) = (Device::Cuda(gpu.clone()), Device::cpu(Some(2)).unwrap());
    let mut ws = Workspace::new();
    let before = [Tag::DeviceTensor, Tag::DeviceScratch].map(|t| memory::usage(t).current);
    for (i, &(m, n, k)) in [
        (1, 33, 48),
        (5, 130, 272),
        (16, 40, 640),
        (17, 72, 128),
        (150, 65, 256),
        (2100, 9, 32),
        (1100, 16_400, 16),
    ]
    .iter()
    .enumerate()
    {
        let q = Quantized::new(&gpu, n, k, ScaleLayout::Linear, 500 + i as u64).tensor();
        let mut weights = weights(&device, &cpu, &q);
        if m > 1000 {
            weights.truncate(1);
        }
        for dtype in TYPES {
            if m > 1000 && dtype != DType::F32 {
                continue;
            }
            let x = activations(600 + i as u64, m, k, dtype);
            let mut rows = Rows {
                device: &device,
                cpu: &cpu,
                ws: &mut ws,
                host: Tensor::from_f32(&x, &[m, k], dtype).unwrap(),
            };
            for (on_gpu, on_cpu) in &weights {
                rows.check(on_gpu, on_cpu);
            }
        }
    }
    gpu.synchronize().unwrap();
    let after = [Tag::DeviceTensor, Tag::DeviceScratch].map(|t| memory::usage(t).current);
    assert_eq!(after, before);
}

/// A weight `[40, 64]` on the device that inputs are multiplied with.
struct Inputs {
    device: Device,
    weight: Linear,
    ws: Workspace,
}

impl Inputs {
    fn product(&mut self, x: &Tensor, dtype: DType) -> Result<Tensor> {
        let (device, exact) = (&self.device, Activations::Exact);
        tensors::linear(device, x, &self.weight, exact, dtype, &mut self.ws)
    }

    /// The product of a tensor of the device has the bits of the product of a host tensor.
    fn check(&mut self, x: &Tensor, host: &Tensor, dtype: DType, what: &str) {
        let want = self.product(host, dtype).unwrap();
        let got = self.product(x, dtype).unwrap();
        assert_eq!(got.place(), Place::Cuda(0));
        assert_eq!(got.shape().sizes(), want.shape().sizes());
        assert_same(&bytes(&got), &bytes(&want), what);
    }

    /// Values that are no numbers make their own row so, and no other.
    fn check_not_finite(&mut self) {
        let mut odd = vec![1f32; 3 * 64];
        (odd[64], odd[2 * 64]) = (f32::NAN, f32::INFINITY);
        let odd = Tensor::from_f32(&odd, &[3, 64], DType::F32).unwrap();
        let mut out = vec![0f32; 3 * 40];
        let got = self.product(&there(&odd, false), DType::F32).unwrap();
        transfer::copy_as_f32(&got, &mut out).unwrap();
        assert!(out[..40].iter().all(|v| v.is_finite()));
        assert!(out[40..].iter().any(|v| !v.is_finite()));
    }

    /// Demands that inputs, outputs and devices without a product are refused; `some` has rows on the device, and `q` the weight.
    fn check_refusals(&mut self, some: &Tensor, q: &Nvfp4Tensor) {
        let (invalid, unsupported) = (ErrorKind::InvalidArgument, ErrorKind::Unsupported);
        let typed = |sizes: &[usize], dtype| there(&Tensor::zeros(sizes, dtype).unwrap(), false);
        let (f32s, f16s) = (DType::F32, DType::F16);
        for (x, dtype, kind, word) in [
            (&typed(&[2, 64], DType::I32), f32s, invalid, "int32"),
            (&typed(&[2, 64], DType::F64), f32s, unsupported, "float64"),
            (some, DType::F64, unsupported, "float64"),
            (&typed(&[2, 80], f16s), f16s, invalid, "K = 80"),
        ] {
            expect_words(self.product(x, dtype), kind, &[word]);
        }
        let cpu = Device::cpu(Some(2)).unwrap();
        let on_cpu = tensors::weight(&cpu, q).unwrap();
        let (exact, int8) = (Activations::Exact, Activations::Int8);
        let both: &[&str] = &["the memory of cuda:0", "cpu ("];
        for (device, weight, how, kind, words) in [
            (&cpu, &self.weight, exact, invalid, both),
            (&self.device, &self.weight, int8, unsupported, &[]),
            (&self.device, &on_cpu, exact, invalid, &[]),
        ] {
            let product = tensors::linear(device, some, weight, how, f32s, &mut self.ws);
            expect_words(product, kind, words);
        }
    }
}

/// Inputs of several dimensions, of uneven strides, of none, in managed memory; and what is refused.
#[test]
fn inputs_of_a_product_are_followed_or_refused() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let q = Quantized::new(&gpu, 40, 64, ScaleLayout::Swizzled, 7).tensor();
    let mut inputs = Inputs {
        weight: tensors::weight(&device, &q).unwrap(),
        device,
        ws: Workspace::new(),
    };
    let host = Tensor::from_f32(&values(8, 96 * 208, DType::BF16), &[96, 208], DType::BF16);
    let host = host.unwrap();
    let whole = there(&host, false);
    for (sizes, strides, offset) in [
        (vec![64], vec![1], 8),
        (vec![64], vec![2], 3),
        (vec![32, 3, 64], vec![624, 208, 1], 0),
        (vec![6, 5, 64], vec![208 * 7, 208, 1], 8),
        (vec![200, 64], vec![1, 208], 0),
        (vec![4, 64], vec![0, 1], 1),
        (vec![2, 0, 64], vec![1, 1, 1], 0),
    ] {
        let shape = Shape::strided(&sizes, &strides).unwrap();
        let x = whole.view(shape.clone(), offset).unwrap();
        let host = host.view(shape, offset).unwrap();
        let what = format!("{sizes:?} {strides:?}");
        inputs.check(&x, &host, DType::F16, &what);
    }
    let some = Shape::strided(&[5, 64], &[208, 1]).unwrap();
    let some = host.view(some, 0).unwrap();
    if transfer::check_managed(0).is_ok() {
        let managed = transfer::to_managed(&some, 0, None, false).unwrap();
        inputs.check(&managed, &some, DType::F32, "of managed memory");
    } else {
        println!("SKIPPED a product of managed memory: there is none");
    }
    inputs.check_not_finite();
    inputs.check_refusals(&there(&some, false), &q);
}

/// The elements of a buffer that a kernel has written, as f32.
#[track_caller]
fn read(buffer: &DeviceBuffer, count: usize, dtype: DType, what: &str) -> Vec<f32> {
    let mut values = vec![0f32; count];
    let bytes = written(buffer, count * dtype.bytes(), what);
    dtype.to_f32(&bytes, &mut values).unwrap();
    values
}

/// Demands rows of halves whose products with the factors are the inputs.
fn check_halves(gpu: &Arc<Gpu>, rows: usize, k: usize, dtype: DType) {
    let x = activations(40, rows + 2, k, dtype);
    let host = Tensor::from_f32(&x, &[rows + 2, k], dtype).unwrap();
    let x = &x[k..(rows + 1) * k];
    let input = there(&host, true);
    let input = FloatRows::new(gpu, &input).unwrap();
    let (halves, factors) = (poisoned(gpu, rows * k * 2), poisoned(gpu, rows * 4));
    input.halves(1, rows, &halves, &factors).unwrap();
    expect_kind(
        input.halves(3, rows, &halves, &factors),
        ErrorKind::Internal,
        "rows from 3 on",
    );
    let back = read(&halves, rows * k, DType::F16, "halves");
    let powers = read(&factors, rows, DType::F32, "factors");
    for (i, (&got, &want)) in back.iter().zip(x).enumerate() {
        let got = got * powers[i / k];
        // Half of the last place of a half, or of the smallest one there is, after the row's division.
        let bar = (want.abs() / 2048.0).max(powers[i / k] * 2f32.powi(-25));
        assert!(
            (got - want).abs() <= bar,
            "{dtype:?}: {want:e} became {got:e}"
        );
        assert!(
            dtype != DType::F16 || got == want,
            "{want:e} became {got:e}"
        );
    }
    for power in powers {
        let mantissa = power.to_bits() & 0x807f_ffff;
        assert_eq!(mantissa, 0, "{power:e} is no power of two");
    }
}

/// Rows on their way in and out, into poisoned outputs that are longer than needed.
#[test]
fn rows_are_halved_and_scaled_within_their_outputs() {
    let Some(gpu) = gpu() else { return };
    for (rows, k) in [(1, 16), (7, 48), (3, 4112)] {
        for dtype in TYPES {
            check_halves(&gpu, rows, k, dtype);
        }
    }
    for (rows, n) in [(1, 1), (5, 33), (3, 700)] {
        let y = normal(50, rows * n);
        let factors: Vec<f32> = (0..rows).map(|i| 2f32.powi(i as i32 * 5 - 4)).collect();
        let (device_y, device_factors) = (upload(&gpu, &y), upload(&gpu, &factors));
        let scaled: Vec<f32> = y
            .iter()
            .enumerate()
            .map(|(i, v)| v * factors[i / n])
            .collect();
        for dtype in TYPES {
            let out = poisoned(&gpu, (2 + rows) * n * dtype.bytes());
            cuda::scaled_rows(&device_y, &device_factors, (rows, n), dtype, &out, 2).unwrap();
            let got = written(&out, (2 + rows) * n * dtype.bytes(), "rows");
            let (before, got) = got.split_at(2 * n * dtype.bytes());
            assert!(before.iter().all(|&b| b == POISON));
            let mut want = vec![0; got.len()];
            dtype.from_f32(&scaled, &mut want).unwrap();
            assert_same(got, &want, dtype.name());
        }
    }
}
