//! The GPU against the processor and against f64: each kernel family on random data of ragged shapes, with outputs poisoned
//! first, and whole models. Without a CUDA device every test says SKIPPED, unless NVFP4_REQUIRE names `cuda`.

#[path = "cuda/calibrated.rs"]
mod calibrated;
mod common;
#[path = "cuda/compare.rs"]
mod compare;
#[path = "cuda/int8.rs"]
mod int8;
#[path = "cuda/mixtures.rs"]
mod mixtures;
#[path = "cuda/teacher.rs"]
mod teacher;
#[path = "cuda/tensors.rs"]
mod tensors;
#[path = "cuda/training.rs"]
mod training;
#[path = "cuda/training_model.rs"]
mod training_model;
#[path = "cuda/training_optimizer.rs"]
mod training_optimizer;

use std::ops::ControlFlow;
use std::sync::Arc;

use NVFP4::base::call::{Cancel, Progress, Watch};
use NVFP4::base::memory::{self, Tag};
use NVFP4::base::{ErrorKind, env};
use NVFP4::cuda::{
    self, Biased, DeviceBuffer, DeviceSlice, DrawRule, Drawn, ExpertScratch, ExpertTable,
    FusedNorm, Glu, Gpu, Hardware, Heads, Input, Layout, LinearScratch, Matrix, MatrixShape,
    NextNorm, NormScratch, Output, PAGE, PageTable, Pinned, ReferenceAttention, ResidualRow,
    Routing, ScaledTile, Shared, SplitKv, SplitKvWorkspace, TileKernel, Unit, Way,
};
use NVFP4::format::nvfp4::{self, BLOCK, Nvfp4, QuantizeOptions};
use NVFP4::format::random;
use NVFP4::format::swizzle::{self, ScaleLayout};
use NVFP4::model::{Activations, Device, KvCache, KvType, LoadOptions, Logits, Model, Scratch};
use NVFP4::ops::linear::{Linear, linear};
use NVFP4::ops::sample::{self, Choice};
use NVFP4::ops::tensors::{Nvfp4Tensor, scaled_mm};
use NVFP4::ops::{Slice, SliceMut, Workspace, quantize};
use NVFP4::session::{self, GenerateOptions, Sampler, SamplingOptions, Session, SessionOptions};
use NVFP4::tensor::{DType, Tensor, WeightType};
use common::{
    LONG_CASES, at_long_positions, check_memory_comes_back, expect_kind, golden, options,
    some_tokens,
};
use half::{bf16, f16};

/// The first CUDA device; without one the test is skipped.
fn gpu() -> Option<Arc<Gpu>> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
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

fn shapes(matrices: &[Biased<'_>]) -> Vec<MatrixShape> {
    matrices.iter().map(|(w, _)| w.shape()).collect()
}

/// Numbers around zero, of about unit variance, that depend on the seed alone.
fn normal(seed: u64, count: usize) -> Vec<f32> {
    (0..count as u64)
        .map(|i| {
            let bits = random::bits(seed, i);
            let uniform = |b: u64| (b & 0xffff) as f32 / 65536.0;
            // Three uniforms: near enough to a bell, and bounded.
            (uniform(bits) + uniform(bits >> 16) + uniform(bits >> 32) - 1.5) * 2.0
        })
        .collect()
}

fn as_f16(values: &[f32]) -> Vec<u16> {
    values.iter().map(|&v| f16::from_f32(v).to_bits()).collect()
}

fn rounded(values: &[f32]) -> Vec<f64> {
    values
        .iter()
        .map(|&v| f64::from(f16::from_f32(v)))
        .collect()
}

fn upload<T: NVFP4::base::memory::Plain>(gpu: &Arc<Gpu>, values: &[T]) -> DeviceBuffer {
    DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, values).unwrap()
}

/// NaNs, which no kernel may leave behind or read.
fn poisoned(gpu: &Arc<Gpu>, bytes: usize) -> DeviceBuffer {
    upload(gpu, &vec![0xffu8; bytes])
}

fn read_f32(buffer: &DeviceBuffer, count: usize) -> Vec<f32> {
    let mut out = vec![0f32; count];
    buffer.read(0, &mut out).unwrap();
    out
}

fn read_f16(buffer: &DeviceBuffer, count: usize) -> Vec<f32> {
    let mut out = vec![0u16; count];
    buffer.read(0, &mut out).unwrap();
    out.into_iter()
        .map(|b| f16::from_bits(b).to_f32())
        .collect()
}

/// Where element `k` of a row of `m` stands in fragment-major activations; `kernels/format/fragment_major.cuh` has the order.
fn fragment_index(m: usize, row: usize, k: usize) -> usize {
    let (chunk, in_chunk) = (k / 128, k % 128);
    let piece = in_chunk / 32 * 4 + k % 4;
    let in_piece = row % 8 * 8 + k % 16 / 4 * 2 + k / 16 % 2;
    ((chunk * m.div_ceil(8) + row / 8) * 16 + piece) * 64 + in_piece
}

/// Rows `[m, k]` of activations that lie like this, one after the other.
fn in_rows(layout: Layout, values: &[f32], m: usize, k: usize) -> Vec<f32> {
    match layout {
        Layout::RowMajor => values.to_vec(),
        Layout::FragmentMajor => (0..m * k)
            .map(|i| values[fragment_index(m, i / k, i % k)])
            .collect(),
    }
}

/// Rows `[m, k]` as activations that lie like this, in f16; NaN stands where no row is, and zeros where a row has ended.
fn in_layout(layout: Layout, values: &[f32], m: usize, k: usize) -> Vec<u16> {
    let halves = values.iter().map(|&v| f16::from_f32(v).to_bits());
    if layout == Layout::RowMajor {
        return halves.collect();
    }
    let mut all = vec![f16::NAN.to_bits(); layout.elements(m, k)];
    for row in 0..m {
        (k..k.next_multiple_of(128)).for_each(|k| all[fragment_index(m, row, k)] = 0);
    }
    halves
        .enumerate()
        .for_each(|(i, h)| all[fragment_index(m, i / k, i % k)] = h);
    all
}

/// ‖got − want‖ / ‖want‖; a NaN anywhere makes it a NaN, which passes no bar.
fn relative_l2(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let (mut difference, mut norm) = (0.0, 0.0);
    for (&g, &w) in got.iter().zip(want) {
        difference += (f64::from(g) - w).powi(2);
        norm += w * w;
    }
    (difference / norm).sqrt()
}

#[track_caller]
fn assert_close(got: &[f32], want: &[f64], bar: f64, what: &str) {
    let error = relative_l2(got, want);
    assert!(
        error <= bar,
        "{what}: relative L2 {error:e}, at most {bar:e}"
    );
}

/// The same row by row, for models with experts: where two experts are about as probable, rounding decides which of them a row goes to, and
/// that row and a little of those that attend to it are another's. Nine of ten rows must be close, and the others not far.
fn assert_rows_close(got: &[f32], want: &[f64], width: usize, bar: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let rows = got.chunks_exact(width).zip(want.chunks_exact(width));
    let errors: Vec<f64> = rows.map(|(got, want)| relative_l2(got, want)).collect();
    let far = errors.iter().filter(|&&e| e > bar || e.is_nan()).count();
    let worst = errors.iter().fold(0f64, |worst, &e| worst.max(e));
    println!(
        "{what}: {far} of {} rows beyond {bar:e}, at most {worst:.2e}",
        errors.len()
    );
    assert!(
        far * 10 <= errors.len() && errors.iter().all(|&e| e <= 0.3),
        "{what}: relative L2 of rows {errors:?}, at most {bar:e} of nine in ten"
    );
}

struct Weight {
    host: Nvfp4,
    values: Vec<f32>,
    device: Matrix,
    bias: Vec<f32>,
    device_bias: DeviceBuffer,
}

fn weight(gpu: &Arc<Gpu>, rows: usize, cols: usize, seed: u64) -> Weight {
    let values: Vec<f32> = normal(seed, rows * cols).iter().map(|v| v * 0.05).collect();
    let host = nvfp4::quantize(&values, rows, cols, &QuantizeOptions::default()).unwrap();
    let values = host.dequantize().unwrap();
    let device = Matrix::nvfp4(gpu, rows, cols, host.global, &mut |range, codes, scales| {
        codes.copy_from_slice(&host.codes[range.start * cols / 2..range.end * cols / 2]);
        scales.copy_from_slice(&host.scales[range.start * cols / BLOCK..range.end * cols / BLOCK]);
        Ok(())
    })
    .unwrap();
    let bias = normal(seed + 1000, rows);
    let device_bias = upload(gpu, &bias);
    Weight {
        host,
        values,
        device,
        bias,
        device_bias,
    }
}

/// x w^T in f64.
fn product(x: &[f64], m: usize, w: &Weight, bias: bool) -> Vec<f64> {
    let (n, k) = (w.host.rows, w.host.cols);
    let mut out = Vec::with_capacity(m * n);
    for row in x.chunks_exact(k).take(m) {
        for (j, w_row) in w.values.chunks_exact(k).enumerate() {
            let sum: f64 = row.iter().zip(w_row).map(|(a, b)| a * f64::from(*b)).sum();
            out.push(sum + if bias { f64::from(w.bias[j]) } else { 0.0 });
        }
    }
    out
}

/// Summation in f32 of products that are exact.
const EXACT: f64 = 1e-6;
/// The same for one row, whose terms may nearly cancel.
const ROW: f64 = 1e-5;
/// Half a unit in the last place of f16, which the output is rounded to.
const F16: f64 = 4e-4;

#[test]
fn products_of_few_rows_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let scratch = LinearScratch::new(&gpu, 16, 9728, 0).unwrap();
    for (i, &(m, n, k)) in [
        (1, 64, 128),
        (1, 8, 16),
        (2, 7, 48),
        (3, 130, 272),
        (5, 257, 576),
        (8, 96, 1024),
        (9, 40, 640),
        (16, 1000, 2560),
        (1, 2048, 9728),
        (16, 72, 9728),
        (13, 33, 1552),
        // Two blocks divide K, into parts of the same and of different length.
        (1, 40, 9728),
        (3, 50, 9360),
        (8, 33, 4432),
        (5, 72, 4880),
    ]
    .iter()
    .enumerate()
    {
        let what = format!("[{m}, {k}] x [{n}, {k}]");
        let w = weight(&gpu, n, k, i as u64);
        let x = normal(100 + i as u64, m * k);
        let want = product(&rounded(&x), m, &w, false);
        let device_x = upload(&gpu, &as_f16(&x));

        let out = poisoned(&gpu, m * n * 4);
        cuda::linear(
            &gpu,
            Input::Plain(&device_x, 1.0),
            m,
            &[(&w.device, None)],
            Output::F32,
            &out,
            n,
            &scratch,
        )
        .unwrap();
        let first = read_f32(&out, m * n);
        assert_close(&first, &want, EXACT, &what);
        let again = poisoned(&gpu, m * n * 4);
        cuda::linear(
            &gpu,
            Input::Plain(&device_x, 1.0),
            m,
            &[(&w.device, None)],
            Output::F32,
            &again,
            n,
            &scratch,
        )
        .unwrap();
        assert!(
            first
                .iter()
                .zip(read_f32(&again, m * n))
                .all(|(a, b)| a.to_bits() == b.to_bits()),
            "{what}: two runs differ"
        );

        let biased = product(&rounded(&x), m, &w, true);
        let out = poisoned(&gpu, m * n * 2);
        cuda::linear(
            &gpu,
            Input::Plain(&device_x, 1.0),
            m,
            &[(&w.device, Some(&w.device_bias))],
            Output::F16,
            &out,
            n,
            &scratch,
        )
        .unwrap();
        assert_close(&read_f16(&out, m * n), &biased, F16, &what);

        let before = normal(7, m * n);
        let out = upload(&gpu, &before);
        cuda::linear(
            &gpu,
            Input::Plain(&device_x, 1.0),
            m,
            &[(&w.device, None)],
            Output::Add,
            &out,
            n,
            &scratch,
        )
        .unwrap();
        let added: Vec<f64> = want
            .iter()
            .zip(&before)
            .map(|(a, b)| a + f64::from(*b))
            .collect();
        assert_close(&read_f32(&out, m * n), &added, EXACT, &what);
    }
}

/// A product is written in one of these.
const RESULTS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
/// The same for a long row on tensor cores, by element of K: they drop what is below the last place of a sum.
const DROPPED: f64 = 2e-9;
/// Half a unit in the last place of f16 and of bf16, at most.
const HALF: f64 = 5e-4;
const BF16: f64 = 4e-3;

/// An NVFP4 matrix of any codes and scales, the smallest and the largest among them.
struct Quantized {
    host: Nvfp4,
    layout: ScaleLayout,
    codes: DeviceBuffer,
    /// In the order of `layout`; what pads them is NaN.
    stored_scales: Vec<u8>,
    scales: DeviceBuffer,
}

impl Quantized {
    fn new(gpu: &Arc<Gpu>, rows: usize, cols: usize, layout: ScaleLayout, seed: u64) -> Quantized {
        let blocks = cols / BLOCK;
        let codes: Vec<u8> = (0..(rows * cols / 16) as u64)
            .flat_map(|i| random::bits(seed, i).to_le_bytes())
            .collect();
        let scales: Vec<u8> = (0..(rows * blocks) as u64)
            .map(|i| match random::bits(seed + 1, i) {
                b if b % 8 == 0 => [0x00, 0x01, 0x7e, 0x08][(b >> 8) as usize % 4],
                b => ((b >> 8) % 0x7f) as u8,
            })
            .collect();
        let place = |i: usize| match layout {
            ScaleLayout::Linear => i,
            ScaleLayout::Swizzled => swizzle::offset(i / blocks, i % blocks, blocks),
        };
        let mut stored_scales = vec![0xff; layout.len(rows, blocks).unwrap()];
        for (i, &scale) in scales.iter().enumerate() {
            stored_scales[place(i)] = scale;
        }
        Quantized {
            codes: upload(gpu, &codes),
            scales: upload(gpu, &stored_scales),
            host: Nvfp4 {
                rows,
                cols,
                codes,
                scales,
                // Keeps results within f16.
                global: 0.01 / (1 + seed % 3) as f32,
            },
            layout,
            stored_scales,
        }
    }

    fn operand(&self) -> cuda::Operand<'_> {
        let Nvfp4 {
            rows, cols, global, ..
        } = self.host;
        cuda::Operand::new(&self.codes, &self.scales, self.layout, rows, cols, global).unwrap()
    }

    fn tensor(&self) -> Nvfp4Tensor {
        let bytes = |sizes: &[usize], bytes: &[u8]| {
            Tensor::build(sizes, DType::U8, |out| {
                out.copy_from_slice(bytes);
                Ok(())
            })
            .unwrap()
        };
        let Nvfp4 { rows, cols, .. } = self.host;
        let scales = match self.layout {
            ScaleLayout::Linear => vec![rows, cols / BLOCK],
            ScaleLayout::Swizzled => vec![self.stored_scales.len()],
        };
        Nvfp4Tensor {
            codes: bytes(&[rows, cols / 2], &self.host.codes),
            scales: bytes(&scales, &self.stored_scales),
            global: self.host.global,
            layout: self.layout,
        }
    }

    /// Exact: codes times scales are, and the multiplier is left out.
    fn values(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.host.rows * self.host.cols];
        nvfp4::dequantize(&self.host.codes, &self.host.scales, 1.0, &mut values).unwrap();
        values
    }
}

/// a b^T in f64.
fn scaled_product(a: &Quantized, b: &Quantized) -> Vec<f64> {
    let k = a.host.cols;
    let factor = f64::from(a.host.global) * f64::from(b.host.global);
    let (a, b) = (a.values(), b.values());
    let dot = |x: &[f32], y: &[f32]| -> f64 {
        let terms = x.iter().zip(y).map(|(&x, &y)| f64::from(x) * f64::from(y));
        terms.sum::<f64>() * factor
    };
    a.chunks_exact(k)
        .flat_map(|row| b.chunks_exact(k).map(move |column| dot(row, column)))
        .collect()
}

/// Rounded to `dtype` once; f16 has no values below its smallest, of which half may be missing everywhere.
#[track_caller]
fn assert_rounded(bytes: &[u8], dtype: DType, want: &[f64], k: usize, what: &str) -> f64 {
    let mut got = vec![0.0; bytes.len() / dtype.bytes()];
    dtype.to_f32(bytes, &mut got).unwrap();
    let (bar, smallest) = match dtype {
        DType::F16 => (HALF, 2f64.powi(-25)),
        DType::BF16 => (BF16, 0.0),
        _ => (EXACT.max(k as f64 * DROPPED), 0.0),
    };
    let size = want.iter().map(|w| w * w).sum::<f64>().sqrt();
    let lost = smallest * (want.len() as f64).sqrt();
    assert_close(&got, want, bar + lost / size, what);
    relative_l2(&got, want)
}

#[test]
fn products_of_two_quantized_matrices_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let mut ways: Vec<Way> = ScaledTile::ALL.map(Way::Kernel).into();
    match gpu.blas_unavailable() {
        None => ways.push(Way::Library),
        Some(why) => println!("SKIPPED products by the library: {why}"),
    }
    let layouts = [ScaleLayout::Linear, ScaleLayout::Swizzled];
    for (i, &(m, n, k)) in [
        (1, 1, 16),
        (1, 33, 32),
        (3, 20, 48),
        (17, 130, 64),
        (129, 65, 80),
        (3, 257, 576),
        (129, 190, 272),
        (1, 1000, 2560),
        (17, 300, 2560),
        (129, 384, 2560),
        (260, 129, 1552),
        (300, 136, 9728),
    ]
    .iter()
    .enumerate()
    {
        let seed = 10_000 + 100 * i as u64;
        let a = Quantized::new(&gpu, m, k, layouts[i % 2], seed);
        let b = Quantized::new(&gpu, n, k, layouts[i / 2 % 2], seed + 50);
        let want = scaled_product(&a, &b);
        let (a, b) = (a.operand(), b.operand());
        for dtype in RESULTS {
            let bytes = m * n * dtype.bytes();
            let run = |way: Option<Way>| {
                let out = poisoned(&gpu, bytes);
                match way {
                    Some(way) => cuda::scaled_mm_by(&gpu, &a, &b, dtype, &out, way).unwrap(),
                    None => cuda::scaled_mm(&gpu, &a, &b, dtype, &out).unwrap(),
                }
                let mut result = vec![0u8; bytes];
                out.read(0, &mut result).unwrap();
                result
            };
            for &way in &ways {
                let what = format!("{way:?}, [{m}, {k}] x [{n}, {k}] in {}", dtype.name());
                let first = run(Some(way));
                let error = assert_rounded(&first, dtype, &want, k, &what);
                println!("{what}: {error:.1e}");
                assert!(first == run(Some(way)), "{what}: two runs differ");
            }
            assert_rounded(&run(None), dtype, &want, k, "chosen");
        }
    }
}

/// Operands larger than their copies: the library's way in parts, against the kernel's.
#[test]
fn copies_are_made_in_parts() {
    let Some(gpu) = gpu() else { return };
    if let Some(why) = gpu.blas_unavailable() {
        println!("SKIPPED products by the library: {why}");
        return;
    }
    let (m, n, k) = (4200, 4310, 16_384);
    let a = Quantized::new(&gpu, m, k, ScaleLayout::Swizzled, 1);
    let b = Quantized::new(&gpu, n, k, ScaleLayout::Linear, 2);
    let mut results = [Way::Kernel(ScaledTile::Large), Way::Library].map(|way| {
        let out = poisoned(&gpu, m * n * 4);
        cuda::scaled_mm_by(&gpu, &a.operand(), &b.operand(), DType::F32, &out, way).unwrap();
        read_f32(&out, m * n)
    });
    let want: Vec<f64> = std::mem::take(&mut results[0])
        .into_iter()
        .map(f64::from)
        .collect();
    assert_close(&results[1], &want, k as f64 * DROPPED, "in parts");
}

#[test]
fn products_of_two_quantized_tensors_go_through_the_gpu() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let mut workspace = Workspace::new();
    let (m, n, k) = (19, 40, 96);
    let a = Quantized::new(&gpu, m, k, ScaleLayout::Swizzled, 3);
    let b = Quantized::new(&gpu, n, k, ScaleLayout::Linear, 5);
    let want = scaled_product(&a, &b);
    let (at, bt) = (a.tensor(), b.tensor());
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        let out = scaled_mm(&device, &at, &bt, dtype, &mut workspace).unwrap();
        assert_eq!((out.shape().sizes(), out.dtype()), (&[m, n][..], dtype));
        let mut bytes = vec![0; out.bytes()];
        out.copy_to(&mut bytes).unwrap();
        assert_rounded(&bytes, dtype, &want, k, dtype.name());
    }
    let mut out = vec![f32::NAN; m * n];
    quantize::scaled_mm(&device, &a.host, &b.host, &mut out, &mut workspace).unwrap();
    assert_close(&out, &want, EXACT, "host slices");

    let mut bad = b.host.clone();
    bad.scales[7] = 0x80;
    let e = quantize::scaled_mm(&device, &a.host, &bad, &mut out, &mut workspace).unwrap_err();
    assert!(e.message().contains("0x80"), "{e}");
    let short = Nvfp4Tensor {
        codes: Tensor::zeros(&[n, k / 2 - 8], DType::U8).unwrap(),
        ..bt
    };
    expect_kind(
        scaled_mm(&device, &at, &short, DType::F32, &mut workspace),
        ErrorKind::InvalidArgument,
        "do not belong to codes",
    );
    let other = Quantized::new(&gpu, n, k + 16, ScaleLayout::Linear, 7);
    let e = scaled_mm(&device, &at, &other.tensor(), DType::F32, &mut workspace);
    assert!(e.unwrap_err().message().contains("K must be equal"));
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let Some(gpu) = gpu() else { return };
    let q = Quantized::new(&gpu, 40, 64, ScaleLayout::Linear, 9);
    let operand = |layout, rows, k, global| {
        cuda::Operand::new(&q.codes, &q.scales, layout, rows, k, global).map(|_| ())
    };
    operand(ScaleLayout::Linear, 40, 64, 1.0).unwrap();
    let (linear, swizzled) = (ScaleLayout::Linear, ScaleLayout::Swizzled);
    for (layout, rows, k, kind, words) in [
        (
            linear,
            41,
            64,
            ErrorKind::Internal,
            "codes takes 1312 bytes",
        ),
        (linear, 40, 72, ErrorKind::InvalidArgument, "[40, 72]"),
        (linear, 40, 0, ErrorKind::InvalidArgument, "[40, 0]"),
        (
            swizzled,
            40,
            64,
            ErrorKind::Internal,
            "scales takes 512 bytes",
        ),
        (
            linear,
            usize::MAX,
            64,
            ErrorKind::InvalidArgument,
            "overflows",
        ),
    ] {
        expect_kind(operand(layout, rows, k, 1.0), kind, words);
    }
    for global in [-0.0, -1.0, f32::NAN, f32::INFINITY] {
        expect_kind(
            operand(linear, 40, 64, global),
            ErrorKind::InvalidArgument,
            "the global scale is",
        );
    }
    let (a, small) = (q.operand(), poisoned(&gpu, 40 * 40 * 2));
    expect_kind(
        cuda::scaled_mm(&gpu, &a, &a, DType::F32, &small),
        ErrorKind::Internal,
        "a product takes 6400 bytes",
    );
    expect_kind(
        cuda::scaled_mm(&gpu, &a, &a, DType::I32, &small),
        ErrorKind::Unsupported,
        "a product on a GPU in int32",
    );
    cuda::scaled_mm(&gpu, &a, &a, DType::F16, &small).unwrap();
    let empty = cuda::Operand::new(&q.codes, &q.scales, ScaleLayout::Linear, 0, 64, 1.0).unwrap();
    cuda::scaled_mm(&gpu, &empty, &a, DType::F32, &small).unwrap();
}

/// silu of one product times another, divided as the kernels divide it.
fn swiglu(x: &[f64], m: usize, gate: &Weight, up: &Weight) -> Vec<f64> {
    let (gate, up) = (product(x, m, gate, false), product(x, m, up, false));
    let activated = gate
        .iter()
        .zip(&up)
        .map(|(g, u)| g / (1.0 + (-g).exp()) * u);
    activated
        .map(|y| y / f64::from(Glu::default().divisor))
        .collect()
}

/// What the norm of a row multiplies it by.
fn factor_of(row: &[f32]) -> f64 {
    let mean = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / row.len() as f64;
    1.0 / (mean + f64::from(1e-6f32)).sqrt()
}

fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    x.chunks_exact(weight.len())
        .flat_map(|row| {
            let mean = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / row.len() as f64;
            let factor = 1.0 / (mean + f64::from(eps)).sqrt();
            row.iter()
                .zip(weight)
                .map(move |(&v, &w)| (f64::from(v) * factor * f64::from(w)) as f32)
                .collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn fused_norms_and_activations_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let scratch = LinearScratch::new(&gpu, 128, 4400, 0).unwrap();
    for (i, &(m, k, rows)) in [
        (1, 2560, [512, 128, 120]),
        (1, 4400, [40, 24, 8]),
        (4, 576, [72, 40, 33]),
        (5, 1168, [136, 40, 9]),
        (6, 9728, [2560, 16, 8]),
        (8, 2560, [512, 128, 120]),
        (8, 20000, [40, 8, 8]),
        (16, 256, [64, 8, 16]),
        (11, 1024, [256, 64, 64]),
        (45, 528, [200, 8, 64]),
        (128, 1024, [301, 64, 64]),
    ]
    .iter()
    .enumerate()
    {
        let seed = 50 * i as u64;
        let weights: Vec<Weight> = rows
            .iter()
            .zip(0..)
            .map(|(&n, j)| weight(&gpu, n, k, seed + j))
            .collect();
        let (x, norm) = (normal(seed + 10, m * k), normal(seed + 11, k));
        let normed = rms_norm(&x, &norm, 1e-6);
        let (device_x, device_norm) = (upload(&gpu, &x), upload(&gpu, &norm));
        let layout = Layout::taken(&Hardware::of(&gpu), m);
        let device_normed = poisoned(&gpu, layout.elements(m, k) * 2);
        let factors = poisoned(&gpu, m * 4);
        cuda::rms_norm(
            &gpu,
            &device_x,
            0,
            &device_norm,
            1e-6,
            m,
            k,
            &device_normed,
            layout,
            Some(&factors),
        )
        .unwrap();
        let input = layout.input(&device_normed, 1.0);
        let want: Vec<f64> = x.chunks_exact(k).map(factor_of).collect();
        assert_close(&read_f32(&factors, m), &want, EXACT, "factors");

        let all: usize = rows.iter().sum();
        let matrices: Vec<Biased<'_>> = weights
            .iter()
            .map(|w| (&w.device, Some(&w.device_bias)))
            .collect();
        let out = poisoned(&gpu, m * all * 4);
        cuda::linear(&gpu, input, m, &matrices, Output::F32, &out, all, &scratch).unwrap();
        let parts: Vec<Vec<f64>> = weights
            .iter()
            .map(|w| product(&rounded(&normed), m, w, true))
            .collect();
        let want: Vec<f64> = (0..m)
            .flat_map(|r| {
                parts
                    .iter()
                    .zip(rows)
                    .flat_map(move |(p, n)| p[r * n..(r + 1) * n].to_vec())
                    .collect::<Vec<_>>()
            })
            .collect();
        // A norm in f32 rounds some values to the other neighbour in f16.
        assert_close(
            &read_f32(&out, m * all),
            &want,
            2e-4,
            "norm and three products",
        );

        let gate = weight(&gpu, rows[0], k, seed + 20);
        let up = weight(&gpu, rows[0], k, seed + 21);
        let elements = layout.elements(m, rows[0]);
        let out = poisoned(&gpu, elements * 2);
        let both = [(&gate.device, None), (&up.device, None)];
        if !cuda::has_glu(&Hardware::of(&gpu), m, &shapes(&both), layout) {
            continue;
        }
        cuda::linear(
            &gpu,
            input,
            m,
            &both,
            layout.glu(Glu::default()),
            &out,
            rows[0],
            &scratch,
        )
        .unwrap();
        let got = in_rows(layout, &read_f16(&out, elements), m, rows[0]);
        let want = swiglu(&rounded(&normed), m, &gate, &up);
        assert_close(&got, &want, F16, "norm, gate, up");
    }
}

/// Products of a row that they compute themselves: the residual stream plus the norm of an addend, normalized.
#[test]
fn products_of_residual_rows_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let hardware = Hardware::of(&gpu);
    for (i, (k, n)) in [(48, 40), (2560, 264), (3840, 4096), (4096, 72)]
        .into_iter()
        .enumerate()
    {
        let seed = 2000 + 20 * i as u64;
        let (first, second) = (weight(&gpu, n, k, seed), weight(&gpu, n, k, seed + 1));
        let rows: Vec<Vec<f32>> = (2..6).map(|s| normal(seed + s, k)).collect();
        let [y, post, x, next] = [0, 1, 2, 3].map(|i| upload(&gpu, &rows[i]));
        let sum = poisoned(&gpu, k * 4);
        let row = ResidualRow {
            y: &y,
            post: &post,
            x: &x,
            weight: &next,
            sum: &sum,
            eps: 1e-6,
        };
        let added: Vec<f32> = rms_norm(&rows[0], &rows[1], 1e-6)
            .iter()
            .zip(&rows[2])
            .map(|(a, b)| a + b)
            .collect();
        let normed: Vec<f64> = rms_norm(&added, &rows[3], 1e-6)
            .into_iter()
            .map(f64::from)
            .collect();
        let scratch = LinearScratch::new(&gpu, 1, k, 0).unwrap();
        let both: [Biased<'_>; 2] = [(&first.device, None), (&second.device, None)];
        let glu = Output::Glu(Glu::default());
        for (output, features) in [(Output::F32, 2 * n), (glu, n)] {
            let what = format!("K = {k}, N = {n}, {output:?}");
            assert!(
                ResidualRow::serves(&hardware, 1, &shapes(&both), output),
                "{what}"
            );
            let out = poisoned(&gpu, features * 4);
            cuda::linear(
                &gpu,
                Input::Residual(row),
                1,
                &both,
                output,
                &out,
                features,
                &scratch,
            )
            .unwrap();
            let (got, want) = match output {
                Output::F32 => (
                    read_f32(&out, features),
                    [&first, &second]
                        .iter()
                        .flat_map(|w| product(&normed, 1, w, false))
                        .collect(),
                ),
                _ => (
                    read_f16(&out, features),
                    swiglu(&normed, 1, &first, &second),
                ),
            };
            assert_close(&got, &want, 2.0 * F16, &what);
            let want: Vec<f64> = added.iter().map(|&v| v.into()).collect();
            assert_close(
                &read_f32(&sum, k),
                &want,
                EXACT,
                &format!("{what}, the sum"),
            );
        }
    }
    // Longer rows, and several, are for a kernel of their own.
    let shape = |cols| MatrixShape {
        storage: WeightType::Nvfp4,
        rows: 512,
        cols,
    };
    for (m, cols) in [(1, 4112), (2, 2560)] {
        assert!(!ResidualRow::serves(
            &hardware,
            m,
            &[shape(cols)],
            Output::F32
        ));
    }
}

/// A product that prepares rows for a norm, and products that apply it: with rows of the magnitude of the rows before, and with rows
/// that have grown or shrunk so much that they are normalized from the residual stream.
#[test]
fn norms_fused_into_products_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let scratch = LinearScratch::new(&gpu, 16, 9728, 0).unwrap();
    for (i, &(m, k, width, rows)) in [
        (1, 4096, 2560, [512, 128, 120]),
        (1, 9728, 2560, [512, 128, 120]),
        (1, 80, 64, [40, 24, 8]),
        (2, 1168, 320, [72, 40, 33]),
        (4, 9728, 2560, [64, 16, 8]),
        (3, 272, 1088, [136, 40, 9]),
        (5, 256, 576, [136, 40, 9]),
        (8, 4096, 2560, [512, 128, 120]),
        (8, 9728, 2560, [512, 128, 120]),
        (11, 528, 1024, [64, 8, 16]),
        (16, 9728, 2560, [72, 8, 16]),
        (16, 144, 3072, [72, 8, 16]),
        (4, 60_000, 64, [40, 24, 8]),
    ]
    .iter()
    .enumerate()
    {
        let layout = Layout::taken(&Hardware::of(&gpu), m);
        let seed = 7000 + 50 * i as u64;
        let maker = weight(&gpu, width, k, seed);
        let takers = rows.map(|n| weight(&gpu, n, width, seed + n as u64));
        let (gate, up) = (&takers[0], weight(&gpu, rows[0], width, seed + 1));
        let three: Vec<Biased<'_>> = takers
            .iter()
            .map(|w| (&w.device, Some(&w.device_bias)))
            .collect();
        let two = [(&gate.device, None), (&up.device, None)];
        let makes = (&maker.device, Some(&maker.device_bias));
        let serves = |takes: &[Biased<'_>], output| {
            FusedNorm::serves(
                &Hardware::of(&gpu),
                m,
                layout,
                makes.0.shape(),
                &shapes(takes),
                output,
            )
        };
        if !serves(&three, Output::F32) {
            // Of the last, blocks do not hold all rows at once.
            assert!(m > 4 || k == 60_000, "up to 4 rows are served by every GPU");
            continue;
        }
        assert!(serves(&two, layout.glu(Glu::default())));
        assert!(!serves(&three[..1], Output::F16));

        let (before, norm) = (normal(seed + 2, m * width), normal(seed + 3, width));
        let input = normal(seed + 4, m * k);
        let device_norm = upload(&gpu, &norm);
        let mut device_input = poisoned(&gpu, layout.elements(m, k) * 2);
        device_input
            .write(0, &in_layout(layout, &input, m, k))
            .unwrap();
        let norms = NormScratch::new(&gpu, width).unwrap();
        let made = product(&rounded(&input), m, &maker, true);
        for turn in 0..2 {
            // Rows are as large as the factors say, but for every third.
            for (a, b) in [(1.0, 1.0), (1.0, 1e-5), (1e4, 30.0), (3e-7, 1.0)] {
                let scale = |row: usize| if row % 3 == turn { a } else { b };
                let residual: Vec<f32> = (0..m * width).map(|i| before[i] * 5.0).collect();
                let device_x = upload(&gpu, &residual);
                let fused = FusedNorm {
                    scratch: &norms,
                    turn,
                    x: &device_x,
                    weight: &device_norm,
                    eps: 1e-6,
                };
                let want_x: Vec<f64> = residual
                    .iter()
                    .zip(&made)
                    .map(|(x, y)| f64::from(*x) + y)
                    .collect();
                // The norm before leaves factors, here of rows that are smaller by as much.
                let last_x: Vec<f32> = (0..m * width)
                    .map(|i| want_x[i] as f32 / scale(i / width))
                    .collect();
                cuda::rms_norm(
                    &gpu,
                    &upload(&gpu, &last_x),
                    0,
                    &device_norm,
                    1e-30,
                    m,
                    width,
                    &poisoned(&gpu, layout.elements(m, width) * 2),
                    layout,
                    Some(norms.factors(turn + 1)),
                )
                .unwrap();
                let what = format!("{m} rows of {width}, factors {a:e}, {b:e} too large");
                cuda::linear_add_norm(&gpu, layout.input(&device_input, 1.0), m, makes, &fused)
                    .unwrap();
                let x = read_f32(&device_x, m * width);
                assert_close(&x, &want_x, EXACT, &what);
                let normed = rms_norm(&x, &norm, 1e-6);
                let input = Input::FusedNorm(fused, layout);

                let all: usize = rows.iter().sum();
                let out = poisoned(&gpu, m * all * 4);
                cuda::linear(&gpu, input, m, &three, Output::F32, &out, all, &scratch).unwrap();
                let parts: Vec<Vec<f64>> = takers
                    .iter()
                    .map(|w| product(&rounded(&normed), m, w, true))
                    .collect();
                let got = read_f32(&out, m * all);
                for row in 0..m {
                    let want: Vec<f64> = parts
                        .iter()
                        .zip(rows)
                        .flat_map(|(p, n)| p[row * n..(row + 1) * n].to_vec())
                        .collect();
                    // Both round to f16, of different multiples.
                    let got = &got[row * all..(row + 1) * all];
                    assert_close(got, &want, F16, &format!("{what}: row {row}"));
                }
                let want: Vec<f64> = x.chunks_exact(width).map(factor_of).collect();
                let left = read_f32(norms.factors(turn), m);
                assert_close(&left, &want, EXACT, &what);

                let elements = layout.elements(m, rows[0]);
                let out = poisoned(&gpu, elements * 2);
                let output = layout.glu(Glu::default());
                cuda::linear(&gpu, input, m, &two, output, &out, rows[0], &scratch).unwrap();
                let got = in_rows(layout, &read_f16(&out, elements), m, rows[0]);
                let want = swiglu(&rounded(&normed), m, gate, &up);
                // Of few features some are small by cancellation.
                assert_close(&got, &want, 3.0 * F16, &what);
            }
        }
        // What no kernel does.
        let wrong = FusedNorm {
            scratch: &norms,
            turn: 0,
            x: &device_norm,
            weight: &device_norm,
            eps: 1e-6,
        };
        let input = layout.input(&device_input, 1.0);
        if m > 1 {
            expect_kind(
                cuda::linear_add_norm(&gpu, input, m, makes, &wrong),
                ErrorKind::Internal,
                "bytes, and its buffer has",
            );
        }
        expect_kind(
            cuda::linear_add_norm(&gpu, input, m, three[0], &wrong),
            ErrorKind::Internal,
            "features added to rows of",
        );
    }
}

/// Every kernel of tiles, with one block to a tile and with several.
#[test]
fn tiles_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    for &kernel in TileKernel::all(gpu.arch()) {
        for (i, (m, rows, k)) in [
            (3, vec![200, 8], 784),
            (8, vec![2560], 9728),
            (16, vec![72], 1040),
            (21, vec![193, 40, 9], 272),
            (33, vec![66, 8], 400),
            (64, vec![4096, 1024, 1024], 2560),
            (70, vec![33], 16),
            (100, vec![50, 30], 4096),
            (128, vec![2560], 4096),
        ]
        .into_iter()
        .enumerate()
        {
            let seed = 700 + 10 * i as u64;
            let weights: Vec<Weight> = rows
                .iter()
                .zip(0..)
                .map(|(&n, j)| weight(&gpu, n, k, seed + j))
                .collect();
            let matrices: Vec<Biased<'_>> = weights
                .iter()
                .map(|w| (&w.device, Some(&w.device_bias)))
                .collect();
            let x = normal(seed + 5, m * k);
            let parts: Vec<Vec<f64>> = weights
                .iter()
                .map(|w| product(&rounded(&x), m, w, true))
                .collect();
            let device_x = upload(&gpu, &as_f16(&x));
            let (all, stride) = (rows.iter().sum::<usize>(), rows.iter().sum::<usize>() + 3);
            let room = kernel.scratch(m, k, gpu.multiprocessors());
            for (output, room) in [(Output::F32, room), (Output::Add, room), (Output::F32, 0)] {
                if room == 0 && kernel == TileKernel::Wide {
                    // Without room it takes fragment-major rows only.
                    continue;
                }
                let scratch = LinearScratch::new(&gpu, 1, k, room).unwrap();
                let before = match output {
                    Output::Add => normal(seed + 6, m * stride),
                    _ => vec![f32::NAN; m * stride],
                };
                let out = upload(&gpu, &before);
                cuda::tiled(
                    &gpu,
                    kernel,
                    Input::Plain(&device_x, 1.0),
                    m,
                    &matrices,
                    output,
                    &out,
                    stride,
                    &scratch,
                )
                .unwrap();
                let got = read_f32(&out, m * stride);
                let (mut values, mut want) = (Vec::new(), Vec::new());
                for r in 0..m {
                    let row = &got[r * stride..(r + 1) * stride];
                    let old = &before[r * stride..(r + 1) * stride];
                    values.extend_from_slice(&row[..all]);
                    assert!(
                        row[all..]
                            .iter()
                            .zip(&old[all..])
                            .all(|(a, b)| a.to_bits() == b.to_bits())
                    );
                    let products = parts.iter().zip(&rows);
                    let products = products.flat_map(|(p, &n)| &p[r * n..(r + 1) * n]);
                    want.extend(products.zip(old).map(|(&p, &old)| match output {
                        Output::Add => p + f64::from(old),
                        _ => p,
                    }));
                }
                let what = format!("{kernel:?}, {m} rows of {rows:?}, K = {k}, {output:?}");
                assert_close(&values, &want, EXACT.max(k as f64 * DROPPED), &what);
            }
        }
    }
}

#[test]
fn products_of_many_rows_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    // By the tiled kernel with one block to a tile and with several, and by the library.
    for (i, &(m, n, k)) in [
        (17, 64, 128),
        (17, 72, 48),
        (33, 40, 4096),
        (64, 2560, 1040),
        (100, 200, 256),
        (128, 130, 2560),
        (300, 136, 576),
    ]
    .iter()
    .enumerate()
    {
        // Room for some rows only, so that the copy is made in parts.
        let scratch = LinearScratch::new(&gpu, m, k, 50 * k * 2).unwrap();
        let w = weight(&gpu, n, k, 500 + i as u64);
        let x = normal(600 + i as u64, m * k);
        let want = product(&rounded(&x), m, &w, true);
        let device_x = upload(&gpu, &as_f16(&x));
        let out = poisoned(&gpu, m * n * 4);
        cuda::linear(
            &gpu,
            Input::Plain(&device_x, 1.0),
            m,
            &[(&w.device, Some(&w.device_bias))],
            Output::F32,
            &out,
            n,
            &scratch,
        )
        .unwrap();
        assert_close(&read_f32(&out, m * n), &want, EXACT, "many rows");
    }
}

/// Host memory in and out, in parts, with rows of any magnitude.
#[test]
fn products_of_host_memory_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let mut workspace = Workspace::new();
    for (i, &(m, n, k)) in [
        (1, 33, 64),
        (16, 100, 576),
        (17, 136, 128),
        (300, 64, 256),
        (2100, 24, 32),
    ]
    .iter()
    .enumerate()
    {
        let seed = 900 + i as u64;
        let values: Vec<f32> = normal(seed, n * k).iter().map(|v| v * 0.05).collect();
        let host = nvfp4::quantize(&values, n, k, &QuantizeOptions::default()).unwrap();
        let quantized = Linear::nvfp4(&device, n, k, host.global, &mut |range, codes, scales| {
            codes.copy_from_slice(&host.codes[range.start * k / 2..range.end * k / 2]);
            scales.copy_from_slice(&host.scales[range.start * k / BLOCK..range.end * k / BLOCK]);
            Ok(())
        })
        .unwrap();
        let mut x: Vec<f32> = rounded(&normal(seed + 50, m * k))
            .iter()
            .map(|&v| v as f32)
            .collect();
        for (r, row) in x.chunks_exact_mut(k).enumerate() {
            let factor = 2f32.powi([0, 40, -60][r % 3]);
            row.iter_mut().for_each(|v| *v *= factor);
        }
        let in_bf16: Vec<f32> = x.iter().map(|&v| bf16::from_f32(v).to_f32()).collect();
        let product = |x: &[f32], values: &[f32]| -> Vec<f64> {
            let dot = |a: &[f32], b: &[f32]| {
                a.iter()
                    .zip(b)
                    .map(|(&a, &b)| f64::from(a) * f64::from(b))
                    .sum::<f64>()
            };
            x.chunks_exact(k)
                .flat_map(|row| values.chunks_exact(k).map(move |w| dot(row, w)))
                .collect()
        };
        let mut wanted = vec![(quantized, product(&x, &host.dequantize().unwrap()))];
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            // Values that each type holds.
            let values: Vec<f32> = values
                .iter()
                .map(|&v| bf16::from_f32(v).to_f32())
                .map(|v| f16::from_f32(v).to_f32())
                .collect();
            let values: Vec<f32> = values.iter().map(|&v| bf16::from_f32(v).to_f32()).collect();
            let dense = Linear::dense(&device, n, k, dtype, &mut |range, out| {
                out.copy_from_slice(&values[range.start * k..range.end * k]);
                Ok(())
            })
            .unwrap();
            // For many rows and a bf16 weight the library multiplies activations in bf16.
            let x = if dtype == DType::BF16 && m > cuda::SKINNY_ROWS {
                &in_bf16
            } else {
                &x
            };
            wanted.push((dense, product(x, &values)));
        }
        let mut results = vec![vec![f32::NAN; m * n]; wanted.len()];
        let mut outputs: Vec<(&Linear, SliceMut<'_>)> = wanted
            .iter()
            .zip(&mut results)
            .map(|((w, _), y)| (w, SliceMut::Host(y)))
            .collect();
        linear(
            &device,
            Slice::Host(&x),
            m,
            &mut outputs,
            Activations::Exact,
            &mut workspace,
        )
        .unwrap();
        for ((w, want), got) in wanted.iter().zip(&results) {
            // Rows differ by many orders of magnitude, so each is compared by itself.
            for (got, want) in got.chunks_exact(n).zip(want.chunks_exact(n)) {
                assert_close(
                    got,
                    want,
                    ROW,
                    &format!("{:?} [{m}, {k}] x [{n}, {k}]", w.kind()),
                );
            }
        }
        let mut y = vec![0.0; m * n];
        let e = linear(
            &device,
            Slice::Host(&x),
            m,
            &mut [(&wanted[0].0, SliceMut::Host(&mut y))],
            Activations::Int8,
            &mut workspace,
        )
        .unwrap_err();
        assert!(e.message().contains("ask for exact"), "{e}");
        let cpu = Device::cpu(Some(1)).unwrap();
        let e = linear(
            &cpu,
            Slice::Host(&x),
            m,
            &mut [(&wanted[0].0, SliceMut::Host(&mut y))],
            Activations::Exact,
            &mut workspace,
        )
        .unwrap_err();
        assert!(e.message().contains("prepare it for that device"), "{e}");
    }
}

#[test]
fn dense_products_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let (m, n, k) = (5, 100, 96);
    let values = normal(1, n * k);
    let x = normal(2, m * k);
    let device_x = upload(&gpu, &as_f16(&x));
    let scratch = LinearScratch::new(&gpu, 16, 9728, 0).unwrap();
    for storage in [WeightType::F32, WeightType::F16, WeightType::BF16] {
        let (bytes, exact): (Vec<u8>, Vec<f64>) = match storage {
            WeightType::F32 => (
                values.iter().flat_map(|v| v.to_le_bytes()).collect(),
                values.iter().map(|&v| v.into()).collect(),
            ),
            WeightType::F16 => (
                values
                    .iter()
                    .flat_map(|&v| f16::from_f32(v).to_le_bytes())
                    .collect(),
                values.iter().map(|&v| f16::from_f32(v).into()).collect(),
            ),
            _ => (
                values
                    .iter()
                    .flat_map(|&v| bf16::from_f32(v).to_le_bytes())
                    .collect(),
                values.iter().map(|&v| bf16::from_f32(v).into()).collect(),
            ),
        };
        let row = bytes.len() / n;
        let w = Matrix::dense(&gpu, n, k, storage, &mut |range, out| {
            out.copy_from_slice(&bytes[range.start * row..range.end * row]);
            Ok(())
        })
        .unwrap();
        let out = poisoned(&gpu, m * n * 4);
        cuda::linear(
            &gpu,
            Input::Plain(&device_x, 1.0),
            m,
            &[(&w, None)],
            Output::F32,
            &out,
            n,
            &scratch,
        )
        .unwrap();
        let want: Vec<f64> = rounded(&x)
            .chunks_exact(k)
            .flat_map(|r| {
                exact
                    .chunks_exact(k)
                    .map(|w| r.iter().zip(w).map(|(a, b)| a * b).sum())
                    .collect::<Vec<f64>>()
            })
            .collect();
        assert_close(
            &read_f32(&out, m * n),
            &want,
            EXACT,
            &format!("{storage:?}"),
        );
    }
}

#[test]
fn dense_products_of_many_rows_give_what_is_asked_for() {
    let Some(gpu) = gpu() else { return };
    let (n, k, stride) = (100, 96, 104);
    let values = normal(1, n * k);
    for (m, storage) in [20, 70]
        .into_iter()
        .flat_map(|m| [(m, WeightType::F16), (m, WeightType::BF16)])
    {
        // Values that both types hold.
        let exact = |v: &f32| bf16::from_f32(f16::from_f32(*v).to_f32()).to_f32();
        let x: Vec<f32> = normal(2, m * k).iter().map(exact).collect();
        let values: Vec<f32> = values.iter().map(exact).collect();
        let device_x = upload(&gpu, &as_f16(&x));
        let w = Matrix::dense(&gpu, n, k, storage, &mut |range, out| {
            let of_range = &values[range.start * k..range.end * k];
            for (&v, out) in of_range.iter().zip(out.chunks_exact_mut(2)) {
                out.copy_from_slice(&match storage {
                    WeightType::F16 => f16::from_f32(v).to_le_bytes(),
                    _ => bf16::from_f32(v).to_le_bytes(),
                });
            }
            Ok(())
        })
        .unwrap();
        let scratch = LinearScratch::for_product(&gpu, &w, m).unwrap();
        for output in [Output::F32, Output::F16] {
            let out = poisoned(&gpu, m * stride * 4);
            cuda::linear(
                &gpu,
                Input::Plain(&device_x, 1.0),
                m,
                &[(&w, None)],
                output,
                &out,
                stride,
                &scratch,
            )
            .unwrap();
            let got: Vec<f32> = match output {
                Output::F16 => read_f16(&out, m * stride),
                _ => read_f32(&out, m * stride),
            };
            for (r, row) in x.chunks_exact(k).enumerate() {
                let dot = |w: &[f32]| {
                    let products = row.iter().zip(w);
                    products.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
                };
                let want: Vec<f64> = values.chunks_exact(k).map(dot).collect();
                let bound = match (output, storage) {
                    (Output::F16, WeightType::BF16) => BF16,
                    (Output::F16, _) => HALF,
                    _ => EXACT,
                };
                let what = format!("{storage:?} as {output:?}, row {r} of {m}");
                assert_close(&got[r * stride..r * stride + n], &want, bound, &what);
            }
        }
    }
}

/// What attention is checked with: one sequence's projections, and the answer in f64.
struct Sequence {
    heads: usize,
    kv_heads: usize,
    dim: usize,
    qkv: Vec<f32>,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    /// Of as many pairs as rotate.
    frequencies: Vec<f32>,
    window: Option<usize>,
    cap: Option<f32>,
}

impl Sequence {
    fn new(
        (heads, kv_heads, dim): (usize, usize, usize),
        len: usize,
        (rotary_dim, window, cap): (usize, Option<usize>, Option<f32>),
        seed: u64,
    ) -> Sequence {
        let norm = |seed| normal(seed, dim).iter().map(|v| 1.0 + 0.2 * v).collect();
        Sequence {
            heads,
            kv_heads,
            dim,
            qkv: normal(seed, len * (heads + 2 * kv_heads) * dim),
            q_norm: norm(seed + 1),
            k_norm: norm(seed + 2),
            frequencies: (0..rotary_dim / 2)
                .map(|i| 10_000f32.powf(-(2.0 * i as f32) / rotary_dim as f32))
                .collect(),
            window,
            cap,
        }
    }

    fn row(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.dim
    }

    fn head(&self, position: usize, head: usize, norm: Option<&[f32]>) -> Vec<f64> {
        let x = &self.qkv[position * self.row() + head * self.dim..][..self.dim];
        let Some(norm) = norm else {
            return x.iter().map(|&v| v.into()).collect();
        };
        let normed: Vec<f64> = rms_norm(x, norm, 1e-6).into_iter().map(f64::from).collect();
        let half = self.frequencies.len();
        let mut y = normed.clone();
        for i in 0..half {
            let (sin, cos) = f64::from(position as f32 * self.frequencies[i]).sin_cos();
            let (sin, cos) = (sin * ATTENTION_FACTOR, cos * ATTENTION_FACTOR);
            y[i] = normed[i] * cos - normed[i + half] * sin;
            y[i + half] = normed[i + half] * cos + normed[i] * sin;
        }
        y
    }

    /// The answer for the row at `position`.
    fn attend(&self, position: usize) -> Vec<f64> {
        let mut out = Vec::new();
        for head in 0..self.heads {
            let kv = head / (self.heads / self.kv_heads);
            let q = self.head(position, head, Some(&self.q_norm));
            let first = (position + 1).saturating_sub(self.window.unwrap_or(usize::MAX));
            let scores: Vec<f64> = (first..=position)
                .map(|p| {
                    let k = self.head(p, self.heads + kv, Some(&self.k_norm));
                    let product: f64 = q.iter().zip(&k).map(|(a, b)| a * b).sum();
                    let score = product / (self.dim as f64).sqrt();
                    self.cap
                        .map(f64::from)
                        .map_or(score, |cap| cap * (score / cap).tanh())
                })
                .collect();
            let top = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
            let total: f64 = weights.iter().sum();
            let mut sum = vec![0.0; self.dim];
            for (p, w) in weights.iter().enumerate() {
                let v = self.head(first + p, self.heads + self.kv_heads + kv, None);
                sum.iter_mut()
                    .zip(&v)
                    .for_each(|(s, v)| *s += w / total * v);
            }
            out.extend(sum);
        }
        out
    }
}

/// Queries, keys, values, weights and the output in f16, sums in f32.
const ATTENTION: f64 = 1e-3;
/// On the cosines and sines of elements that rotate.
const ATTENTION_FACTOR: f64 = 1.125;

#[test]
fn attention_agrees_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (i, &(heads, kv_heads, dim, rotary_dim, len, prefix, window, cap)) in [
        (4, 2, 32, 32, 70, 1, None, None),
        (9, 3, 64, 64, 200, 63, None, None),
        (8, 2, 128, 128, 150, 64, None, None),
        (2, 2, 64, 64, 33, 0, None, None),
        (20, 2, 128, 128, 40, 5, None, None),
        (4, 1, 128, 128, 700, 690, None, None),
        // Windows within a page, over several, and at their ends; soft caps that bite.
        (4, 2, 32, 32, 300, 100, Some(1), None),
        (4, 2, 64, 64, 300, 130, Some(17), Some(0.7)),
        (8, 2, 128, 128, 400, 190, Some(64), None),
        (4, 1, 128, 128, 700, 300, Some(333), Some(2.0)),
        // Other sizes, and heads of which a part rotates.
        (4, 2, 32, 16, 70, 3, None, None),
        (4, 2, 64, 20, 90, 65, Some(30), None),
        (4, 1, 80, 80, 200, 64, None, Some(1.0)),
        (3, 3, 80, 32, 150, 10, Some(70), None),
        (6, 2, 96, 96, 200, 129, None, None),
        (6, 2, 96, 72, 200, 129, Some(100), None),
        (3, 1, 128, 96, 200, 70, None, None),
        (4, 2, 192, 192, 300, 128, Some(129), None),
        (4, 2, 192, 64, 130, 1, None, None),
        (8, 4, 256, 256, 300, 150, None, None),
        (8, 4, 256, 256, 300, 65, Some(100), Some(1.5)),
        (2, 1, 256, 128, 100, 64, Some(65), None),
    ]
    .iter()
    .enumerate()
    {
        let shape = (heads, kv_heads, dim);
        let s = Sequence::new(shape, len, (rotary_dim, window, cap), 10 * i as u64);
        let (q_norm, k_norm) = (upload(&gpu, &s.q_norm), upload(&gpu, &s.k_norm));
        let frequencies = upload(&gpu, &s.frequencies);
        let h = Heads {
            heads,
            kv_heads,
            dim,
            q_norm: Some(&q_norm),
            k_norm: Some(&k_norm),
            frequencies: &frequencies,
            rotary_dim,
            attention_factor: ATTENTION_FACTOR as f32,
            eps: 1e-6,
            scale: 1.0 / (dim as f32).sqrt(),
            window,
            score_cap: cap,
        };
        // Two layers, of which the second is used, and pages in no order.
        let count = len.div_ceil(PAGE);
        let pages: Vec<DeviceBuffer> = (0..count)
            .map(|_| DeviceBuffer::zeroed(&gpu, Tag::DeviceKvCache, 2 * h.page_bytes()).unwrap())
            .collect();
        let addresses: Vec<u64> = pages.iter().map(DeviceBuffer::address).collect();
        let table = upload(&gpu, &addresses);
        let pages = PageTable {
            table: &table,
            stride: count,
            layer: 1,
            unfit: None,
        };
        let width = heads * dim;
        let q = poisoned(&gpu, len * width * 2);
        let out = poisoned(&gpu, len * width * 2);
        let qkv = upload(&gpu, &s.qkv);

        // A prefix in one call, then rows after it, then the last token by the decode kernel.
        let last = len - 1;
        if prefix > 0 {
            cuda::store(&gpu, &h, &pages, &qkv, 0, prefix, 0, &q).unwrap();
            cuda::prefill(&gpu, &h, &pages, &q, 0, prefix, 0, &out).unwrap();
        }
        cuda::store(&gpu, &h, &pages, &qkv, prefix, last - prefix, prefix, &q).unwrap();
        cuda::prefill(&gpu, &h, &pages, &q, prefix, last - prefix, prefix, &out).unwrap();
        let got = read_f16(&out, last * width);
        for position in [
            0,
            prefix.saturating_sub(1),
            prefix,
            (prefix + last) / 2,
            last - 1,
        ] {
            let what = format!(
                "prefill {heads}/{kv_heads} heads of {dim} ({rotary_dim}), position {position}, window {window:?}"
            );
            assert_close(
                &got[position * width..(position + 1) * width],
                &s.attend(position),
                ATTENTION,
                &what,
            );
        }
        assert!(got.iter().all(|v| v.is_finite()), "a row was not written");

        let want = s.attend(last);
        let new = upload(&gpu, &s.qkv[last * s.row()..]);
        let positions = upload(&gpu, &[last as u32]);
        let rows = SplitKvWorkspace::new(&gpu, heads, kv_heads, dim, 1).unwrap();
        let parts = [1, 2, 3, 8].map(SplitKv::Splits);
        let [unit, ..] = cuda::attention_units(dim, rotary_dim, window.is_some() || cap.is_some());
        let has_pairs = gpu.arch().0 >= 9 && unit == Unit::AttentionDecode;
        let pairs = has_pairs.then_some(SplitKv::Cluster);
        for division in parts.into_iter().chain(pairs) {
            let out = poisoned(&gpu, width * 2);
            cuda::decode(
                &gpu,
                &h,
                &pages,
                &new,
                &positions,
                1,
                division,
                &rows,
                &out,
                Layout::RowMajor,
            )
            .unwrap();
            let what = format!(
                "decode {heads}/{kv_heads} heads of {dim} ({rotary_dim}), window {window:?}, {division:?}"
            );
            assert_close(&read_f16(&out, width), &want, ATTENTION, &what);
        }
    }
}

/// A decode step of several sequences of different lengths, however their positions are divided among blocks.
#[test]
fn attention_of_several_sequences_agrees_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (count, shape, window) in [
        (1, (8, 2, 128), None),
        (2, (8, 2, 128), None),
        (8, (4, 1, 128), Some(90)),
        (8, (9, 3, 64), None),
        (17, (4, 2, 128), None),
        (17, (8, 4, 256), Some(65)),
    ] {
        let (heads, kv_heads, dim) = shape;
        let mut sequences: Vec<Sequence> = (0..count)
            .map(|i| {
                Sequence::new(
                    shape,
                    1 + 131 * i % 400,
                    (dim, window, None),
                    100 + i as u64,
                )
            })
            .collect();
        // Norms are the model's, and the first sequence's are taken for all.
        let (q, k) = (sequences[0].q_norm.clone(), sequences[0].k_norm.clone());
        for s in &mut sequences {
            (s.q_norm, s.k_norm) = (q.clone(), k.clone());
        }
        let (q_norm, k_norm) = (upload(&gpu, &q), upload(&gpu, &k));
        let frequencies = upload(&gpu, &sequences[0].frequencies);
        let h = Heads {
            heads,
            kv_heads,
            dim,
            q_norm: Some(&q_norm),
            k_norm: Some(&k_norm),
            frequencies: &frequencies,
            rotary_dim: dim,
            attention_factor: ATTENTION_FACTOR as f32,
            eps: 1e-6,
            scale: 1.0 / (dim as f32).sqrt(),
            window,
            score_cap: None,
        };
        let stride = 400_usize.div_ceil(PAGE);
        let (mut held, mut addresses, mut new, mut last) = (vec![], vec![], vec![], vec![]);
        for s in &sequences {
            let len = s.qkv.len() / s.row();
            let (pages, table) = pages_of(&gpu, h.page_bytes(), len);
            let pages_of_one = PageTable {
                table: &table,
                stride: pages.len(),
                layer: 1,
                unfit: None,
            };
            if len > 1 {
                let (qkv, q) = (upload(&gpu, &s.qkv), poisoned(&gpu, len * heads * dim * 2));
                cuda::store(&gpu, &h, &pages_of_one, &qkv, 0, len - 1, 0, &q).unwrap();
            }
            let mut own: Vec<u64> = pages.iter().map(DeviceBuffer::address).collect();
            own.resize(stride, 0);
            addresses.extend(own);
            new.extend_from_slice(&s.qkv[(len - 1) * s.row()..]);
            last.push(len as u32 - 1);
            held.push(pages);
        }
        let table = upload(&gpu, &addresses);
        let pages = PageTable {
            table: &table,
            stride,
            layer: 1,
            unfit: None,
        };
        let (new, positions) = (upload(&gpu, &new), upload(&gpu, &last));
        let width = heads * dim;
        let workspace = SplitKvWorkspace::new(&gpu, heads, kv_heads, dim, count).unwrap();
        let splits = [1, 2, 3, 8].map(SplitKv::Splits);
        let [unit, ..] = cuda::attention_units(dim, dim, window.is_some());
        let has_clusters = gpu.arch().0 >= 9 && unit == Unit::AttentionDecode;
        let cluster = has_clusters.then_some(SplitKv::Cluster);
        for division in splits.into_iter().chain(cluster) {
            let out = poisoned(&gpu, count * width * 2);
            let layout = Layout::RowMajor;
            cuda::decode(
                &gpu, &h, &pages, &new, &positions, count, division, &workspace, &out, layout,
            )
            .unwrap();
            let got = read_f16(&out, count * width);
            for (i, (s, &position)) in sequences.iter().zip(&last).enumerate() {
                let what = format!("sequence {i} of {count}, {shape:?}, {division:?}");
                let want = s.attend(position as usize);
                assert_close(&got[i * width..][..width], &want, ATTENTION, &what);
            }
        }
    }
}

/// The pages of a layer, the second of two, for `len` positions, and the table of their addresses.
fn pages_of(gpu: &Arc<Gpu>, layer_bytes: usize, len: usize) -> (Vec<DeviceBuffer>, DeviceBuffer) {
    let page = || DeviceBuffer::zeroed(gpu, Tag::DeviceKvCache, 2 * layer_bytes).unwrap();
    let pages: Vec<DeviceBuffer> = (0..len.div_ceil(PAGE)).map(|_| page()).collect();
    let addresses: Vec<u64> = pages.iter().map(DeviceBuffer::address).collect();
    let table = upload(gpu, &addresses);
    (pages, table)
}

/// What the cache makes of a row, which is the one thing that is rounded.
const REFERENCE: f64 = 6e-4;

/// Attention in f32, from norms and rotations of their own to what comes out, over a cache that is filled in two parts.
#[test]
fn unfused_attention_agrees_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (i, &(heads, kv_heads, dim, rotary_dim, len, prefix, window, cap)) in [
        (4, 2, 16, 16, 70, 1, None, None),
        (6, 2, 48, 32, 200, 63, Some(30), None),
        (8, 2, 128, 128, 150, 64, None, Some(0.7)),
        (4, 1, 80, 80, 300, 130, Some(65), Some(2.0)),
        (8, 4, 256, 256, 300, 65, Some(100), None),
        (2, 1, 256, 128, 100, 64, Some(1), Some(1.5)),
    ]
    .iter()
    .enumerate()
    {
        let shape = (heads, kv_heads, dim);
        let s = Sequence::new(shape, len, (rotary_dim, window, cap), 3000 + 10 * i as u64);
        let angle = |i: usize| (i / (rotary_dim / 2)) as f32 * s.frequencies[i % (rotary_dim / 2)];
        let table = |of: fn(f32) -> f32| -> Vec<f32> {
            let all = 0..len * (rotary_dim / 2);
            all.map(|i| of(angle(i)) * ATTENTION_FACTOR as f32)
                .collect()
        };
        let (cos, sin) = (
            upload(&gpu, &table(f32::cos)),
            upload(&gpu, &table(f32::sin)),
        );
        let of_heads = |first: usize, count: usize| -> DeviceBuffer {
            let rows = s.qkv.chunks_exact(s.row());
            let values: Vec<f32> = rows
                .flat_map(|row| &row[first * dim..(first + count) * dim])
                .copied()
                .collect();
            upload(&gpu, &values)
        };
        let (q, k, v) = (
            of_heads(0, heads),
            of_heads(heads, kv_heads),
            of_heads(heads + kv_heads, kv_heads),
        );
        for (x, heads, norm) in [(&q, heads, &s.q_norm), (&k, kv_heads, &s.k_norm)] {
            let norm = upload(&gpu, norm);
            cuda::rms_norm_f32(x.into(), (&norm).into(), 1e-6, x.into()).unwrap();
            cuda::rotate(x.into(), heads, dim, (&cos).into(), (&sin).into()).unwrap();
        }
        let (_pages, table) = pages_of(&gpu, 2 * kv_heads * PAGE * dim * 2, len);
        let unfit = upload(&gpu, &[0u32]);
        let pages = PageTable {
            table: &table,
            stride: len.div_ceil(PAGE),
            layer: 1,
            unfit: Some(&unfit),
        };
        let options = ReferenceAttention {
            heads,
            kv_heads,
            dim,
            scale: 1.0 / (dim as f32).sqrt(),
            window,
            score_cap: cap,
        };
        let out = poisoned(&gpu, len * heads * dim * 4);
        for (first, end) in [(0, prefix), (prefix, len)] {
            let part = |x: &DeviceBuffer, heads: usize| {
                DeviceBuffer::from_slice(
                    &gpu,
                    Tag::DeviceScratch,
                    &read_f32(x, len * heads * dim)[first * heads * dim..end * heads * dim],
                )
                .unwrap()
            };
            let (q, k, v) = (part(&q, heads), part(&k, kv_heads), part(&v, kv_heads));
            let rows = end - first;
            cuda::store_kv(kv_heads, dim, &pages, (&k).into(), (&v).into(), rows, first).unwrap();
            let row = heads * dim * 4;
            let out = DeviceSlice::from(&out)
                .part(first * row..end * row)
                .unwrap();
            cuda::attention_reference(&options, &pages, (&q).into(), rows, first, out).unwrap();
        }
        let got = read_f32(&out, len * heads * dim);
        for position in [0, prefix - 1, prefix, len - 1] {
            let what = format!("{heads}/{kv_heads} heads of {dim} at {position}");
            let got = &got[position * heads * dim..(position + 1) * heads * dim];
            assert_close(got, &s.attend(position), REFERENCE, &what);
        }
        let mut noted = [7u32];
        unfit.read(0, &mut noted).unwrap();
        assert_eq!(noted, [0], "everything fits");
    }
}

/// What f16 does not hold is noted with the first layer that it is of.
#[test]
fn keys_and_values_that_do_not_fit_are_noted() {
    let Some(gpu) = gpu() else { return };
    let (kv_heads, dim) = (2, 64);
    let (_pages, table) = pages_of(&gpu, 2 * kv_heads * PAGE * dim * 2, 1);
    let unfit = upload(&gpu, &[0u32]);
    let store = |layer: usize, value: f32| {
        let mut rows = normal(1, kv_heads * dim);
        let k = upload(&gpu, &rows);
        rows[77] = value;
        let v = upload(&gpu, &rows);
        let pages = PageTable {
            table: &table,
            stride: 1,
            layer,
            unfit: Some(&unfit),
        };
        cuda::store_kv(kv_heads, dim, &pages, (&k).into(), (&v).into(), 1, 0).unwrap();
        let mut noted = [7u32];
        unfit.read(0, &mut noted).unwrap();
        noted[0]
    };
    assert_eq!(store(0, 65_519.0), 0);
    assert_eq!(store(1, -65_520.0), 2);
    assert_eq!(store(0, f32::NAN), 2, "the first that was noted stays");
}

/// Operations that no other test of the device has: products of each storage's rows with themselves, and what happens to numbers one by
/// one.
#[test]
fn unfused_operations_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let (m, width) = (7, 300);
    let (x, y) = (normal(31, m * width), normal(32, m * width));
    let check = |what: &str, run: &dyn Fn(DeviceSlice<'_>), want: &dyn Fn(usize) -> f64| {
        let on_device = upload(&gpu, &x);
        run((&on_device).into());
        let want: Vec<f64> = (0..m * width).map(want).collect();
        assert_close(&read_f32(&on_device, m * width), &want, EXACT, what);
    };
    let (all, row) = (upload(&gpu, &y), upload(&gpu, &y[..width]));
    let of = |v: &[f32], i: usize| f64::from(v[i]);
    let add = |y: &DeviceBuffer, x: DeviceSlice<'_>| cuda::add(x, y.into()).unwrap();
    check("add", &|x| add(&all, x), &|i| of(&x, i) + of(&y, i));
    check("add a row", &|x| add(&row, x), &|i| {
        of(&x, i) + of(&y, i % width)
    });
    check("scale", &|x| cuda::scale(x, -2.5).unwrap(), &|i| {
        -2.5 * of(&x, i)
    });
    check("fill", &|x| cuda::fill(x, 3.5).unwrap(), &|_| 3.5);
    check("cap", &|x| cuda::cap_f32(x, 0.5).unwrap(), &|i| {
        0.5 * (of(&x, i) / 0.5).tanh()
    });
    let glu = |activation, x: DeviceSlice<'_>| {
        cuda::glu_f32(activation, x, (&all).into()).unwrap();
    };
    check("SwiGLU", &|x| glu(cuda::Activation::Silu, x), &|i| {
        of(&x, i) / (1.0 + (-of(&x, i)).exp()) * of(&y, i)
    });
    check("GeGLU", &|x| glu(cuda::Activation::GeluTanh, x), &|i| {
        let g = of(&x, i);
        let u = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
        0.5 * g * (1.0 + u.tanh()) * of(&y, i)
    });
    for wrong in [
        cuda::add(
            (&all).into(),
            DeviceSlice::from(&row).part(0..4 * 299).unwrap(),
        ),
        cuda::glu_f32(cuda::Activation::Silu, (&all).into(), (&row).into()),
        cuda::rotate((&all).into(), 3, 64, (&row).into(), (&row).into()),
    ] {
        expect_kind(wrong, ErrorKind::Internal, "elements");
    }
}

/// Norms of rows, by columns that are weighted and not, of every storage.
#[test]
fn norms_of_rows_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let (rows, cols) = (37, 336);
    let columns = normal(5, cols);
    let on_device = upload(&gpu, &columns);
    let packed = weight(&gpu, rows, cols, 6);
    let check = |matrix: &Matrix, values: &[f32]| {
        for weighted in [false, true] {
            let out = poisoned(&gpu, rows * 4);
            let by = weighted.then_some(DeviceSlice::from(&on_device));
            cuda::row_norms(matrix, by, (&out).into()).unwrap();
            let want: Vec<f64> = values
                .chunks_exact(cols)
                .map(|row| {
                    let squares = row.iter().zip(&columns).map(|(&w, &c)| {
                        let c = if weighted { f64::from(c) } else { 1.0 };
                        (f64::from(w) * c).powi(2)
                    });
                    squares.sum::<f64>().sqrt()
                })
                .collect();
            let what = format!("norms of rows of {:?}", matrix.storage());
            assert_close(&read_f32(&out, rows), &want, EXACT, &what);
        }
    };
    check(&packed.device, &packed.values);
    for (storage, dtype) in [
        (WeightType::F32, DType::F32),
        (WeightType::F16, DType::F16),
        (WeightType::BF16, DType::BF16),
    ] {
        // Eight bits of mantissa, which every storage holds.
        let values: Vec<f32> = normal(7, rows * cols)
            .iter()
            .map(|&v| bf16::from_f32(v).to_f32())
            .collect();
        let matrix = Matrix::dense(&gpu, rows, cols, storage, &mut |range, bytes| {
            dtype.from_f32(&values[range.start * cols..range.end * cols], bytes)
        })
        .unwrap();
        check(&matrix, &values);
    }
}

/// A norm of what is added, and the norm of the sum: rows that fill registers and such that do not, in both layouts.
#[test]
fn norms_after_a_residual_sum_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (i, (m, width)) in [(1, 64), (3, 2560), (9, 1152), (40, 5376), (2, 8192)]
        .into_iter()
        .enumerate()
    {
        let seed = 600 + 10 * i as u64;
        let (y, x) = (normal(seed, m * width), normal(seed + 1, m * width));
        let (post, next) = (normal(seed + 2, width), normal(seed + 3, width));
        let layout = Layout::taken(&Hardware::of(&gpu), m);
        let residual = upload(&gpu, &x);
        let normed = poisoned(&gpu, layout.elements(m, width) * 2);
        let (device_post, device_next) = (upload(&gpu, &post), upload(&gpu, &next));
        let follows = Some(NextNorm {
            weight: &device_next,
            layout,
            rows: &normed,
        });
        let y_on_device = upload(&gpu, &y);
        cuda::post_norm(
            &gpu,
            &y_on_device,
            &device_post,
            1e-6,
            m,
            width,
            &residual,
            follows,
        )
        .unwrap();
        let added: Vec<f32> = rms_norm(&y, &post, 1e-6)
            .iter()
            .zip(&x)
            .map(|(a, b)| a + b)
            .collect();
        let want: Vec<f64> = added.iter().map(|&v| v.into()).collect();
        assert_close(
            &read_f32(&residual, m * width),
            &want,
            EXACT,
            "what was added to",
        );
        let want: Vec<f64> = rms_norm(&added, &next, 1e-6)
            .into_iter()
            .map(f64::from)
            .collect();
        let got = in_rows(
            layout,
            &read_f16(&normed, layout.elements(m, width)),
            m,
            width,
        );
        assert_close(&got, &want, F16, "the norm after");
        // Without a norm that follows.
        cuda::post_norm(
            &gpu,
            &y_on_device,
            &device_post,
            1e-6,
            m,
            width,
            &residual,
            None,
        )
        .unwrap();
        let twice = rms_norm(&y, &post, 1e-6)
            .iter()
            .zip(&added)
            .map(|(a, b)| f64::from(a + b))
            .collect::<Vec<_>>();
        assert_close(
            &read_f32(&residual, m * width),
            &twice,
            EXACT,
            "what was added to twice",
        );
    }
}

/// A mixture of experts, of one row to so many that tiles are as large as they get: routed, multiplied, added up and normalized. Routers
/// are of every type, and some mixtures have an expert of all rows.
#[test]
fn mixtures_of_experts_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let (hidden, wide) = (272, 144);
    for (i, (experts, per_token, normalized, rows)) in [
        (16, 4, true, 1),
        (16, 4, false, 17),
        (128, 8, true, 2),
        (40, 3, false, 33),
        (6, 2, true, 60),
        (4, 2, true, 150),
    ]
    .into_iter()
    .enumerate()
    {
        let seed = 900 + 1000 * i as u64;
        let routing = Routing {
            experts,
            per_token,
            normalized,
        };
        let mlps: Vec<[Weight; 3]> = (0..experts as u64)
            .map(|e| {
                [(wide, hidden, 0), (wide, hidden, 1), (hidden, wide, 2)]
                    .map(|(rows, cols, which)| weight(&gpu, rows, cols, seed + 3 * e + which))
            })
            .collect();
        let biased: Vec<[Biased<'_>; 3]> = mlps
            .iter()
            .map(|mlp| [0, 1, 2].map(|i| (&mlp[i].device, None)))
            .collect();
        let table = ExpertTable::new(&gpu, &biased).unwrap();
        let x = normal(seed + 1, rows * hidden);
        let (halves, exact) = (as_f16(&x), rounded(&x));
        let storage = [WeightType::F32, WeightType::F16, WeightType::BF16][i % 3];
        let dense = |rows: usize, seed| {
            let dtype = [DType::F32, DType::F16, DType::BF16][i % 3];
            let mut bytes = vec![0; rows * hidden * dtype.bytes()];
            let some: Vec<f32> = normal(seed, rows * hidden)
                .iter()
                .map(|v| v * 0.05)
                .collect();
            dtype.from_f32(&some, &mut bytes).unwrap();
            let mut values = vec![0f32; rows * hidden];
            dtype.to_f32(&bytes, &mut values).unwrap();
            let row = bytes.len() / rows;
            let matrix = Matrix::dense(&gpu, rows, hidden, storage, &mut |range, out| {
                out.copy_from_slice(&bytes[range.start * row..range.end * row]);
                Ok(())
            });
            (matrix.unwrap(), values)
        };
        let (router, router_values) = dense(experts, seed + 2);
        let (gate, gate_values) = dense(1, seed + 3);
        let gated = i % 2 == 0;
        let made = normal(seed + 4, rows * hidden);
        let (residual, next) = (normal(seed + 5, rows * hidden), normal(seed + 6, hidden));
        let layout = Layout::taken(&Hardware::of(&gpu), rows);
        let normed = poisoned(&gpu, layout.elements(rows, hidden) * 2);
        let (device_x, device_made) = (upload(&gpu, &halves), upload(&gpu, &made));
        let (device_residual, device_next) = (upload(&gpu, &residual), upload(&gpu, &next));
        let unfit = upload(&gpu, &[0u32]);
        let scratch = ExpertScratch::new(&gpu, routing, rows, wide, hidden).unwrap();
        let linear_scratch = LinearScratch::new(&gpu, rows, hidden, 0).unwrap();
        let glu = Glu {
            divisor: 64,
            ..Glu::default()
        };
        cuda::route(
            &gpu,
            &routing,
            &router,
            gated.then_some(&gate),
            &device_x,
            rows,
            &scratch,
            &linear_scratch,
            (&unfit, 5),
        )
        .unwrap();
        cuda::experts_gate_up(&gpu, &routing, &table, &device_x, rows, glu, &scratch).unwrap();
        cuda::experts_down(&gpu, &routing, &table, rows, 64.0, &scratch).unwrap();
        let shared = (i != 1).then_some(Shared {
            made: &device_made,
            gated,
        });
        let follows = NextNorm {
            weight: &device_next,
            layout,
            rows: &normed,
        };
        cuda::sum_experts(
            &gpu,
            &routing,
            shared,
            1e-6,
            rows,
            hidden,
            &device_residual,
            Some(follows),
            &scratch,
        )
        .unwrap();

        let dot = |row: &[f64], w: &[f32]| -> f64 {
            row.iter().zip(w).map(|(a, &b)| a * f64::from(b)).sum()
        };
        let mut want: Vec<f64> = Vec::with_capacity(rows * hidden);
        for (r, row) in exact.chunks_exact(hidden).enumerate() {
            let logits: Vec<f64> = router_values
                .chunks_exact(hidden)
                .map(|w| dot(row, w))
                .collect();
            let all: f64 = logits.iter().map(|l| l.exp()).sum();
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            let chosen = &order[..per_token];
            let total: f64 = match normalized {
                true => chosen.iter().map(|&e| logits[e].exp() / all).sum(),
                false => 1.0,
            };
            let mut sum: Vec<f64> = residual[r * hidden..(r + 1) * hidden]
                .iter()
                .map(|&v| v.into())
                .collect();
            for &e in chosen {
                let [gate, up, down] = &mlps[e];
                let inner: Vec<f64> = swiglu(row, 1, gate, up);
                let out = product(&inner, 1, down, false);
                let weight = logits[e].exp() / all / total * f64::from(Glu::default().divisor);
                sum.iter_mut().zip(&out).for_each(|(s, v)| *s += weight * v);
            }
            if shared.is_some() {
                let factor = match gated {
                    true => 1.0 / (1.0 + (-dot(row, &gate_values)).exp()),
                    false => 1.0,
                };
                let own = &made[r * hidden..(r + 1) * hidden];
                sum.iter_mut()
                    .zip(own)
                    .for_each(|(s, &v)| *s += factor * f64::from(v));
            }
            want.extend(sum);
        }
        // Experts that are held otherwise are refused.
        let refused =
            ExpertTable::new(&gpu, &[[(&router, None), (&router, None), (&router, None)]]);
        expect_kind(
            refused,
            ErrorKind::Unsupported,
            "the gate projection of expert 0",
        );

        let what = format!("{per_token} of {experts} experts, {rows} rows");
        assert_close(
            &read_f32(&device_residual, rows * hidden),
            &want,
            F16,
            &what,
        );
        let added: Vec<f32> = want.iter().map(|&v| v as f32).collect();
        let normalized: Vec<f64> = rms_norm(&added, &next, 1e-6)
            .into_iter()
            .map(f64::from)
            .collect();
        let got = in_rows(
            layout,
            &read_f16(&normed, layout.elements(rows, hidden)),
            rows,
            hidden,
        );
        assert_close(
            &got,
            &normalized,
            2.0 * F16,
            &format!("{what}, the norm after"),
        );
        assert_eq!(read_f32(&unfit, 1)[0].to_bits(), 0, "{what}");
    }
}

#[test]
fn gated_activations_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let (m, width) = (5, 136);
    let gate_up: Vec<f32> = normal(77, m * 2 * width)
        .iter()
        .map(|v| rounded(&[4.0 * v])[0] as f32)
        .collect();
    for (activation, of) in [
        (
            cuda::Activation::Silu,
            (|g| g / (1.0 + (-g).exp())) as fn(f64) -> f64,
        ),
        (cuda::Activation::GeluTanh, |g| {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
            0.5 * g * (1.0 + u.tanh())
        }),
    ] {
        let glu = Glu {
            activation,
            divisor: 4,
        };
        let out = poisoned(&gpu, m * width * 2);
        cuda::glu(
            &gpu,
            glu,
            &upload(&gpu, &as_f16(&gate_up)),
            m,
            width,
            None,
            &out,
        )
        .unwrap();
        let want: Vec<f64> = gate_up
            .chunks_exact(2 * width)
            .flat_map(|row| {
                let (gate, up) = row.split_at(width);
                let both = gate.iter().zip(up);
                both.map(move |(&g, &u)| of(g.into()) * f64::from(u) / 4.0)
                    .collect::<Vec<_>>()
            })
            .collect();
        assert_close(
            &read_f16(&out, m * width),
            &want,
            F16,
            &format!("{activation:?}"),
        );
    }
}

#[test]
fn the_argmax_is_the_first_of_equals() {
    let Some(gpu) = gpu() else { return };
    let (rows, vocabulary) = (3, 5000);
    let mut logits = normal(3, rows * vocabulary);
    for (row, at) in [(0, 4999), (1, 0), (2, 77)] {
        logits[row * vocabulary + at] = 100.0;
    }
    logits[2 * vocabulary + 4000] = 100.0;
    let best = cuda::Best::new(&gpu, rows).unwrap();
    let tokens = poisoned(&gpu, rows * 4);
    for _ in 0..2 {
        cuda::argmax(
            &gpu,
            &upload(&gpu, &logits),
            rows,
            vocabulary,
            &best,
            &tokens,
            None,
        )
        .unwrap();
        let mut got = [0u32; 3];
        tokens.read(0, &mut got).unwrap();
        assert_eq!(got, [4999, 0, 77]);
    }
}

/// Logits of every position, from one call and token by token.
fn logits(model: &Model, tokens: &[u32]) -> (Vec<f32>, Vec<f32>) {
    let (mut scratch, mut all, mut each, mut one) =
        (Scratch::new(), Vec::new(), Vec::new(), Vec::new());
    let new = || KvCache::new(model.device(), model.spec(), 4 * tokens.len(), KvType::F16).unwrap();
    model
        .forward(tokens, &mut new(), &mut scratch, Logits::All, &mut all)
        .unwrap();
    let mut cache = new();
    for &token in tokens {
        model
            .forward(&[token], &mut cache, &mut scratch, Logits::Last, &mut one)
            .unwrap();
        each.extend_from_slice(&one);
    }
    (all, each)
}

#[test]
fn models_agree_with_the_processor() {
    let Some(gpu) = gpu() else { return };
    let mut tested = 0;
    for case in [
        "qwen3_tied",
        "qwen3_untied",
        "qwen3_yarn",
        "qwen2_tied",
        "qwen2_untied",
        "qwen2_yarn",
        "llama_tied",
        "llama_biased",
        "llama_linear",
        "llama_llama3",
        "llama_wide",
        "qwen3_uneven",
        "qwen2_window",
        "mistral_plain",
        "mistral_window",
        "phi3_window",
        "phi3_partial",
        "phi3_longrope",
        "gemma3_narrow",
        "gemma3_wide",
        "qwen3moe_mixed",
        "qwen2moe_shared",
    ] {
        for quantize in [Some(QuantizeOptions::default()), None] {
            let cpu = Model::load(
                &golden(case),
                &LoadOptions {
                    quantize: quantize.clone(),
                    ..options()
                },
            )
            .unwrap();
            let on_gpu = LoadOptions {
                device: Device::Cuda(gpu.clone()),
                quantize,
                ..options()
            };
            let refused = match &cpu.spec().blocks[0] {
                block if block.attention.head_dim < 32 => {
                    Some("head_dim must be one of [32, 64, 80, 96, 128, 192, 256]")
                }
                _ => None,
            };
            if let Some(refused) = refused {
                let error = Model::load(&golden(case), &on_gpu).unwrap_err();
                assert!(error.message().contains(refused), "{error}");
                continue;
            }
            let model = Model::load(&golden(case), &on_gpu).unwrap();
            let tokens = some_tokens(&cpu, 60);
            let (want, _) = logits(&cpu, &tokens);
            let want: Vec<f64> = want.into_iter().map(f64::from).collect();
            // The reference block on the GPU, some rows after others; and fused kernels against both. What enters its products is rounded
            // to f16, seven times a block, and so are keys and values.
            let mut reference = Vec::new();
            let mut cache =
                KvCache::new(model.device(), model.spec(), 4 * tokens.len(), KvType::F16).unwrap();
            for part in tokens.chunks(37) {
                let (mut scratch, mut some) = (Scratch::new(), Vec::new());
                model
                    .forward_reference(part, &mut cache, &mut scratch, Logits::All, &mut some)
                    .unwrap();
                reference.extend(some);
            }
            let close = |got: &[f32], want: &[f64], bar: f64, what: &str| {
                let what = format!("{case}, {what}");
                match cpu.spec().blocks.iter().any(|b| b.mlp.experts() > 0) {
                    true => assert_rows_close(got, want, cpu.spec().vocab_size, 2.0 * bar, &what),
                    false => assert_close(got, want, bar, &what),
                }
            };
            close(&reference, &want, 3e-3, "operation by operation");
            let by_reference: Vec<f64> = reference.iter().map(|&v| v.into()).collect();
            let (all, each) = logits(&model, &tokens);
            close(&all, &want, 5e-3, "one call");
            close(&each, &want, 5e-3, "token by token");
            close(&all, &by_reference, 5e-3, "fused");
            tested += 1;
        }
    }
    assert_eq!(tested, 2 * 10, "models with heads that the GPU takes");
}

/// Far positions under every RoPE scaling, by the kernels of prompts and by those of a decode step.
#[test]
fn long_positions_agree_with_transformers() {
    let Some(gpu) = gpu() else { return };
    for case in LONG_CASES {
        let on_gpu = LoadOptions {
            device: Device::Cuda(gpu.clone()),
            ..options()
        };
        let model = Model::load(&golden(case), &on_gpu).unwrap();
        for last_alone in [false, true] {
            at_long_positions(
                case,
                &model,
                KvType::F16,
                last_alone,
                |position, got, want| {
                    let want: Vec<f64> = want.iter().map(|&v| v.into()).collect();
                    let what = format!("{case}, position {position}, last alone: {last_alone}");
                    println!("{what}: relative L2 {:.2e}", relative_l2(got, &want));
                    assert_close(got, &want, 5e-3, &what);
                },
            );
        }
    }
}

/// Sequences with room for long contexts and for short ones in one batch, which longrope rotates by different tables: each has the
/// logits, and the next tokens, that it has alone.
#[test]
fn long_and_short_sequences_share_a_batch() {
    let Some(gpu) = gpu() else { return };
    let on_gpu = LoadOptions {
        device: Device::Cuda(gpu.clone()),
        ..options()
    };
    let model = Model::load(&golden("long_longrope"), &on_gpu).unwrap();
    let tokens = some_tokens(&model, 12);
    let mut scratch = Scratch::new();
    // The scaling tells them apart at 16,384.
    let mut caches: Vec<KvCache> = [400, 20_000, 16_384, 16_385, 17_000]
        .iter()
        .map(|&room| KvCache::new(model.device(), model.spec(), room, KvType::F16).unwrap())
        .collect();
    let mut alone = Vec::new();
    for (i, cache) in caches.iter_mut().enumerate() {
        let mut row = Vec::new();
        let prompt = &tokens[..3 + i];
        model
            .forward(prompt, cache, &mut scratch, Logits::None, &mut row)
            .unwrap();
        model
            .forward(&tokens[11..], cache, &mut scratch, Logits::Last, &mut row)
            .unwrap();
        cache.truncate(prompt.len()).unwrap();
        alone.push(row);
    }
    assert_ne!(alone[0], alone[1]);

    let next = vec![tokens[11]; caches.len()];
    let greedy = SamplingOptions::default();
    let choice = Choice {
        options: &greedy,
        draw: 0,
        history: &[],
    };
    let mut together = Vec::new();
    let mut all: Vec<&mut KvCache> = caches.iter_mut().collect();
    model
        .forward_batch(&next, &mut all, &mut scratch, &mut together)
        .unwrap();
    for (i, (got, want)) in together
        .chunks(model.spec().vocab_size)
        .zip(&alone)
        .enumerate()
    {
        let want: Vec<f64> = want.iter().map(|&v| v.into()).collect();
        assert_close(got, &want, 2e-3, &format!("sequence {i}"));
    }
    for cache in &mut all {
        cache.truncate(cache.len() - 1).unwrap();
    }
    let choices = vec![choice; all.len()];
    let chosen = model
        .forward_choose(&next, &mut all, &choices, &mut scratch, true)
        .unwrap();
    for (i, (token, row)) in chosen
        .iter()
        .zip(together.chunks(model.spec().vocab_size))
        .enumerate()
    {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        assert_eq!(row[*token as usize], max, "sequence {i}");
    }
}

/// A residual stream of 2e5, 3e6 between gate and down, keys of 500 and scores of a thousand (`qwen2_massive`): with the processor's
/// logits from a cache in f16, too. And keys that f16 does not hold are an error that names their layer, after which all is well.
#[test]
fn massive_activations_fit_or_are_refused() {
    let Some(gpu) = gpu() else { return };
    let load = |path: &std::path::Path, device| {
        Model::load(
            path,
            &LoadOptions {
                device,
                ..options()
            },
        )
        .unwrap()
    };
    let cpu = load(&golden("qwen2_massive"), Device::cpu(None).unwrap());
    let model = load(&golden("qwen2_massive"), Device::Cuda(gpu.clone()));
    // The first token is the one that has them.
    let mut tokens = some_tokens(&cpu, 40);
    tokens[0] = 1;
    let (want, _) = logits(&cpu, &tokens);
    let want: Vec<f64> = want.into_iter().map(f64::from).collect();
    let (all, each) = logits(&model, &tokens);
    for (what, got) in [("one call", &all), ("token by token", &each)] {
        println!("{what}: relative L2 {:.2e}", relative_l2(got, &want));
    }
    assert_close(&all, &want, 1e-2, "massive activations, one call");
    assert_close(&each, &want, 1e-2, "massive activations, token by token");

    let dir = common::Copy::of("qwen2_massive", "unfit");
    let mut bytes = std::fs::read(dir.0.join("model.safetensors")).unwrap();
    let bias = {
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let bias = file.tensor("model.layers.1.self_attn.k_proj.bias").unwrap();
        bias.data().as_ptr() as usize - bytes.as_ptr() as usize
    };
    bytes[bias..bias + 2].copy_from_slice(&bf16::from_f32(150_000.0).to_le_bytes());
    dir.write("model.safetensors", &bytes);
    let model = load(&dir.0, Device::Cuda(gpu.clone()));
    let mut cache = KvCache::new(model.device(), model.spec(), 64, KvType::F16).unwrap();
    let (mut scratch, mut out) = (Scratch::new(), Vec::new());
    for part in [&tokens[..1], &tokens[..20]] {
        for _ in 0..2 {
            let error = model
                .forward(part, &mut cache, &mut scratch, Logits::Last, &mut out)
                .unwrap_err();
            assert!(
                error.message().contains("layer 1: a query, key or value"),
                "{error}"
            );
            assert_eq!((cache.len(), out.len()), (0, 0));
        }
    }
    let greedy = SamplingOptions::default();
    let choice = Choice {
        options: &greedy,
        draw: 0,
        history: &[],
    };
    let error = model
        .forward_choose(
            &tokens[..1],
            &mut [&mut cache],
            &[choice],
            &mut scratch,
            true,
        )
        .unwrap_err();
    assert!(
        error.message().contains("layer 1: a query, key or value"),
        "{error}"
    );
}

/// Gate and up projections beyond f16: fused kernels keep them in f32, and a prompt of more rows, for which they are stored as f16, is
/// an error that names the layer, after which all is well.
#[test]
fn gate_and_up_that_overflow_are_refused() {
    let Some(gpu) = gpu() else { return };
    let dir = common::Copy::of("qwen2_massive", "overflow");
    let mut bytes = std::fs::read(dir.0.join("model.safetensors")).unwrap();
    for projection in ["gate_proj", "up_proj"] {
        let range = {
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            let name = format!("model.layers.1.mlp.{projection}.weight_scale_2");
            let global = file.tensor(&name).unwrap();
            assert_eq!(global.dtype(), safetensors::Dtype::F32);
            let start = global.data().as_ptr() as usize - bytes.as_ptr() as usize;
            start..start + 4
        };
        let global = f32::from_le_bytes(bytes[range.clone()].try_into().unwrap());
        bytes[range].copy_from_slice(&(2f32.powi(18) * global).to_le_bytes());
    }
    dir.write("model.safetensors", &bytes);
    let load = |device| {
        let options = LoadOptions {
            device,
            ..options()
        };
        Model::load(&dir.0, &options).unwrap()
    };
    let cpu = load(Device::cpu(None).unwrap());
    let model = load(Device::Cuda(gpu.clone()));
    let tokens = some_tokens(&cpu, 200);
    let mut cache = KvCache::new(model.device(), model.spec(), 256, KvType::F16).unwrap();
    let (mut scratch, mut out) = (Scratch::new(), Vec::new());
    for _ in 0..2 {
        let error = model
            .forward(&tokens, &mut cache, &mut scratch, Logits::Last, &mut out)
            .unwrap_err();
        let named = "layer 1: a gate or up projection reaches beyond 65,504";
        assert!(error.message().contains(named), "{error}");
        assert_eq!((cache.len(), out.len()), (0, 0));

        let few = &tokens[..20];
        let (want, _) = logits(&cpu, few);
        let want: Vec<f64> = want.into_iter().map(f64::from).collect();
        let (all, each) = logits(&model, few);
        assert_close(&all, &want, 1e-2, "20 rows");
        assert_close(&each, &want, 1e-2, "row by row");
    }
}

/// Models named in NVFP4_TEST_MODELS, separated by colons: real ones, or of a real size.
#[test]
fn named_models_agree_with_the_processor() {
    let Some(gpu) = gpu() else { return };
    let Ok(paths) = std::env::var("NVFP4_TEST_MODELS") else {
        println!("SKIPPED NVFP4_TEST_MODELS names no model");
        return;
    };
    for path in paths.split(':') {
        let load = |device| Model::load(path.as_ref(), &LoadOptions::new(device)).unwrap();
        let cpu = load(Device::cpu(None).unwrap());
        let tokens = some_tokens(&cpu, 70);
        let (want, _) = logits(&cpu, &tokens);
        drop(cpu);
        let want: Vec<f64> = want.into_iter().map(f64::from).collect();
        let (all, each) = logits(&load(Device::Cuda(gpu.clone())), &tokens);
        for (what, got) in [("one call", &all), ("token by token", &each)] {
            println!(
                "{path}, {what}: relative L2 {:.2e}",
                relative_l2(got, &want)
            );
        }
        for (what, got) in [("one call", all), ("token by token", each)] {
            assert_close(&got, &want, 5e-3, &format!("{path}, {what}"));
        }
    }
}

#[test]
fn memory_comes_back() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let settle = || gpu.empty_cache().unwrap();
    let used = |model: Arc<Model>| drop(logits(&model, &some_tokens(&model, 40)));
    // What the first use makes for all that come later stays.
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

/// A model's greedy answers to the prompts of the SmolLM2 test.
fn greedy(model: &Arc<Model>, prompts: &[String]) -> Vec<(Vec<u32>, Vec<u32>)> {
    let options = GenerateOptions {
        max_tokens: 64,
        ignore_model_stops: true,
        ..GenerateOptions::default()
    };
    prompts
        .iter()
        .map(|prompt| {
            let prompt = model.tokenizer().unwrap().encode(prompt, true).unwrap();
            let mut session = Session::new(model.clone(), &SessionOptions::default()).unwrap();
            session.prefill(&prompt).unwrap();
            let answer = session
                .generate(&options, &mut |_| ControlFlow::Continue(()))
                .unwrap();
            (prompt, answer.tokens)
        })
        .collect()
}

/// How far the two largest logits are apart where two answers part, or nothing if they do not.
fn parting(model: &Arc<Model>, prompt: &[u32], one: &[u32], other: &[u32]) -> Option<f32> {
    let at = one.iter().zip(other).position(|(a, b)| a != b)?;
    let mut session = Session::new(model.clone(), &SessionOptions::default()).unwrap();
    session.prefill(&[prompt, &one[..at]].concat()).unwrap();
    let logits = session.logits().unwrap();
    Some((logits[one[at] as usize] - logits[other[at] as usize]).abs())
}

#[test]
fn greedy_tokens_of_a_named_model_agree_or_part_at_a_tie() {
    let Some(gpu) = gpu() else { return };
    let Ok(path) = std::env::var("NVFP4_TEST_CHAT_MODEL") else {
        println!("SKIPPED NVFP4_TEST_CHAT_MODEL names no model");
        return;
    };
    let prompts: Vec<String> = serde_json::from_str(include_str!("smollm2/prompts.json")).unwrap();
    // As stored and, if that is dense, as NVFP4.
    for quantize in [Some(QuantizeOptions::default()), None] {
        let load = |device| {
            let options = LoadOptions {
                device,
                quantize: quantize.clone(),
                ..options()
            };
            Model::load(path.as_ref(), &options).unwrap()
        };
        let (cpu, model) = (
            load(Device::cpu(None).unwrap()),
            load(Device::Cuda(gpu.clone())),
        );
        let (want, got, again) = (
            greedy(&cpu, &prompts),
            greedy(&model, &prompts),
            greedy(&model, &prompts),
        );
        assert!(got == again, "two runs on the GPU differ");
        let mut parted = 0;
        for ((prompt, want), (_, got)) in want.iter().zip(&got) {
            if let Some(gap) = parting(&cpu, prompt, want, got) {
                println!("an answer parts where the two logits are {gap:.1e} apart");
                assert!(gap <= 1e-2, "answers part at no tie: {gap}");
                parted += 1;
            }
        }
        println!(
            "{} of {} answers of 64 tokens agree",
            want.len() - parted,
            want.len()
        );
    }
}

#[test]
fn a_step_ahead_changes_nothing() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu);
    let model = Model::load(
        &golden("qwen3_tied"),
        &LoadOptions {
            device,
            ..options()
        },
    )
    .unwrap();
    let prompt = some_tokens(&model, 30);
    let session = || {
        let mut session = Session::new(
            model.clone(),
            &SessionOptions {
                context: 200,
                ..SessionOptions::default()
            },
        )
        .unwrap();
        session.prefill(&prompt).unwrap();
        session
    };
    // The tokens by logits on the host, one after the other.
    let mut one = session();
    let mut want = Vec::new();
    for _ in 0..120 {
        let logits = one.logits().unwrap();
        let best = (0..logits.len())
            .reduce(|b, i| if logits[i] > logits[b] { i } else { b })
            .unwrap() as u32;
        want.push(best);
        one.decode(best).unwrap();
    }
    let options = |max_tokens| GenerateOptions {
        max_tokens,
        ignore_model_stops: true,
        ..GenerateOptions::default()
    };
    let mut whole = session();
    assert_eq!(
        whole
            .generate(&options(120), &mut |_| ControlFlow::Continue(()))
            .unwrap()
            .tokens,
        want
    );

    // In pieces, with forks, cuts and other sessions between them: the device has often gone on in vain.
    let (mut s, mut other) = (session(), session());
    let mut got = Vec::new();
    while got.len() < 120 {
        let n = 1 + got.len() % 17;
        got.extend(
            s.generate(&options(n.min(120 - got.len())), &mut |_| {
                ControlFlow::Continue(())
            })
            .unwrap()
            .tokens,
        );
        let mut fork = s.fork().unwrap();
        fork.decode(want[0]).unwrap();
        other
            .generate(&options(3), &mut |_| ControlFlow::Continue(()))
            .unwrap();
        if got.len() % 3 == 0 {
            let len = s.len() - 1;
            s.truncate(len).unwrap();
            s.decode(*got.last().unwrap()).unwrap();
        }
        let mut broken = 0;
        fork.generate(&options(9), &mut |_| {
            broken += 1;
            if broken == 4 {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })
        .unwrap();
    }
    assert_eq!(got, want);

    // Several together get what each would get alone.
    let mut sessions = [session(), session(), session()];
    let mut next: Vec<u32> = sessions.iter_mut().map(|s| s.argmax().unwrap()).collect();
    let likeliest = SamplingOptions::default();
    let greedy = [&likeliest; 3];
    for &token in &want[1..100] {
        let mut all: Vec<&mut Session> = sessions.iter_mut().collect();
        next = session::step_choose(&mut all, &next, &greedy, true).unwrap();
        assert_eq!(next, [token; 3]);
    }
}

#[test]
fn sessions_are_saved_on_one_device_and_restored_on_the_other() {
    let Some(gpu) = gpu() else { return };
    let load = |device| {
        Model::load(
            &golden("qwen3_tied"),
            &LoadOptions {
                device,
                ..options()
            },
        )
        .unwrap()
    };
    let (cpu, model) = (load(Device::cpu(Some(1)).unwrap()), load(Device::Cuda(gpu)));
    let tokens = some_tokens(&cpu, 90);
    let path = std::env::temp_dir().join(format!("nvfp4-cuda-{}.session", std::process::id()));
    for (from, to) in [(&model, &cpu), (&cpu, &model), (&model, &model)] {
        let mut session = Session::new(
            from.clone(),
            &SessionOptions {
                context: 128,
                ..SessionOptions::default()
            },
        )
        .unwrap();
        session.prefill(&tokens).unwrap();
        session.save(&path).unwrap();
        let mut restored = Session::restore(to.clone(), &path).unwrap();
        session.decode(3).unwrap();
        restored.decode(3).unwrap();
        let want: Vec<f64> = session
            .logits()
            .unwrap()
            .iter()
            .map(|&v| v.into())
            .collect();
        assert_close(
            restored.logits().unwrap(),
            &want,
            5e-3,
            "a restored session",
        );
    }
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn running_out_of_device_memory_leaves_the_session_usable() {
    let Some(gpu) = gpu() else { return };
    let model = Model::load(
        &golden("qwen3_tied"),
        &LoadOptions {
            device: Device::Cuda(gpu),
            ..options()
        },
    )
    .unwrap();
    let mut session = Session::new(
        model.clone(),
        &SessionOptions {
            context: 256,
            ..SessionOptions::default()
        },
    )
    .unwrap();
    session.prefill(&some_tokens(&model, 60)).unwrap();
    let want = session.logits().unwrap().to_vec();
    memory::set_budget(Some(memory::total().current));
    let error = session.prefill(&some_tokens(&model, 100)).unwrap_err();
    memory::set_budget(None);
    assert_eq!(error.kind(), ErrorKind::OverBudget, "{error}");
    assert_eq!(session.len(), 60);
    // The last token is run again by itself, in another order of summation.
    let want: Vec<f64> = want.into_iter().map(f64::from).collect();
    assert_close(session.logits().unwrap(), &want, 5e-3, "logits afterwards");
    session.prefill(&some_tokens(&model, 100)).unwrap();
}

/// Tokens drawn by the kernels are those that the CPU draws from the same logits, in batches of different rules.
#[test]
fn tokens_drawn_on_the_device_are_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let mut scratch = sample::Scratch::default();
    for (case, &(rows, vocabulary)) in [
        (1, 151_936),
        (5, 49_152),
        (64, 32_768),
        (3, 1000),
        (2, 100),
        (2, 1),
        (1, 300_001),
    ]
    .iter()
    .enumerate()
    {
        let mut draws = cuda::DrawScratch::new(&gpu, rows, vocabulary).unwrap();
        for kind in 0..7 {
            let mut logits: Vec<f32> = normal(40 + case as u64, rows * vocabulary);
            for (i, x) in logits.iter_mut().enumerate() {
                match kind {
                    // Many equal ones, zeros of both signs among them.
                    1 => *x = (*x * 4.0).round() * 0.5,
                    // All the largest in one place; most ruled out; all equal; all in one bucket.
                    2 => *x += (10 - (i % vocabulary / 512).min(10)) as f32,
                    3 if !(i % vocabulary).is_multiple_of(37) => *x = f32::NEG_INFINITY,
                    4 => *x = -1.25,
                    5 => *x *= 1e-5,
                    6 if i % vocabulary == vocabulary / 3 => *x = f32::NAN,
                    _ => *x *= 3.0,
                }
            }
            let device = upload(&gpu, &logits);
            for penalties in [false, true] {
                let options: Vec<SamplingOptions> = (0..rows as u64)
                    .map(|row| {
                        let pick = |salt: u64, of: u64| {
                            (random::bits(salt, 64 * kind + row + case as u64) % of) as usize
                        };
                        SamplingOptions {
                            temperature: [0.7, 1.0, 0.0, 3.0][pick(0, 4)],
                            top_k: [0, 40, 5000, 2][pick(1, 4)],
                            top_p: [1.0, 0.95, 0.5][pick(2, 3)],
                            min_p: [0.0, 0.02][pick(3, 2)],
                            repetition_penalty: match penalties {
                                true => [1.2, 0.8, 1.0][pick(4, 3)],
                                false => 1.0,
                            },
                            seed: Some(row),
                        }
                    })
                    .collect();
                let mut histories: Vec<Vec<u32>> = (0..rows as u64)
                    .map(|row| {
                        let tokens = 0..1 + row * 13;
                        tokens
                            .map(|i| (random::bits(row, i) % vocabulary as u64) as u32)
                            .collect()
                    })
                    .collect();
                let rules: Vec<DrawRule> = options
                    .iter()
                    .map(|options| {
                        let choice = Choice {
                            options,
                            draw: 5,
                            history: &[],
                        };
                        choice.rule()
                    })
                    .collect();
                let all: Vec<&[u32]> = histories.iter().map(|h| &h[..]).collect();
                draws.set(&gpu, &rules, &all).unwrap();
                let last: Vec<i32> = all.iter().map(|h| h[h.len() - 1].cast_signed()).collect();
                let tokens = DeviceBuffer::from_slice(&gpu, Tag::DeviceScratch, &last).unwrap();
                let positions = DeviceBuffer::zeroed(&gpu, Tag::DeviceScratch, rows * 4).unwrap();
                let history = Pinned::new(&gpu, Tag::Scratch, 8 * rows * 4).unwrap();
                // Draws follow each other, and what the device has chosen counts as having occurred.
                for draw in 5..8u64 {
                    cuda::draw(
                        &gpu, &device, rows, vocabulary, penalties, &draws, &tokens, &positions,
                        &history,
                    )
                    .unwrap();
                    gpu.synchronize().unwrap();
                    for row in 0..rows {
                        let choice = Choice {
                            options: &options[row],
                            draw,
                            history: &histories[row],
                        };
                        let own = &logits[row * vocabulary..(row + 1) * vocabulary];
                        let want = sample::sample(own, &choice, &mut scratch);
                        let said = history.read_i32((draw as usize - 4) * rows + row).unwrap();
                        let what = format!(
                            "kind {kind}, row {row} of {rows}, {vocabulary} tokens, draw {draw}: {:?}",
                            options[row]
                        );
                        match (Drawn::read(said), want) {
                            (Drawn::Token(got), Ok(want)) => {
                                assert_eq!(got, want, "{what}");
                                histories[row].push(got);
                            }
                            (Drawn::Unusable(at), Err(_)) => {
                                assert_eq!((kind, at as usize), (6, vocabulary / 3), "{what}");
                                histories[row].push(at);
                            }
                            (got, want) => panic!("{what}: {got:?}, not {want:?}"),
                        }
                    }
                }
            }
        }
    }
}

/// Drawn on the device, and by a host that reads all logits of the same device.
#[test]
fn sampling_on_the_device_draws_the_same_tokens() {
    let Some(gpu) = gpu() else { return };
    let model = Model::load(
        &golden("qwen3_tied"),
        &LoadOptions {
            device: Device::Cuda(gpu),
            ..options()
        },
    )
    .unwrap();
    let prompt = some_tokens(&model, 40);
    let greedy = SamplingOptions::default();
    for (i, sampling) in [
        SamplingOptions {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            ..greedy
        },
        SamplingOptions {
            temperature: 1.0,
            top_k: 1,
            ..greedy
        },
        SamplingOptions {
            temperature: 0.05,
            top_p: 0.9,
            ..greedy
        },
        SamplingOptions {
            temperature: 5.0,
            top_p: 0.999,
            ..greedy
        },
        SamplingOptions {
            temperature: 1.0,
            min_p: 0.02,
            ..greedy
        },
        SamplingOptions {
            temperature: 0.7,
            top_k: 20,
            repetition_penalty: 1.2,
            ..greedy
        },
        SamplingOptions {
            repetition_penalty: 1.3,
            ..greedy
        },
        SamplingOptions {
            temperature: 1.0,
            ..greedy
        },
        SamplingOptions {
            temperature: 0.9,
            top_k: 10,
            repetition_penalty: 0.9,
            ..greedy
        },
    ]
    .into_iter()
    .enumerate()
    {
        let sampling = SamplingOptions {
            seed: Some(i as u64),
            ..sampling
        };
        let start = || {
            let mut s = Session::new(
                model.clone(),
                &SessionOptions {
                    context: 160,
                    ..SessionOptions::default()
                },
            )
            .unwrap();
            s.prefill(&prompt).unwrap();
            s
        };
        let mut by_host = start();
        let mut sampler = Sampler::new(&sampling).unwrap().after(prompt.len());
        let want: Vec<u32> = (0..100)
            .map(|_| {
                let token = by_host.sample(&mut sampler).unwrap();
                by_host.decode(token).unwrap();
                token
            })
            .collect();
        let mut s = start();
        let options = GenerateOptions {
            max_tokens: 100,
            sampling: sampling.clone(),
            ignore_model_stops: true,
            ..GenerateOptions::default()
        };
        let got = s
            .generate(&options, &mut |_| ControlFlow::Continue(()))
            .unwrap();
        assert_eq!(got.tokens, want, "{sampling:?}");
        // The session goes on where the device kept the logits.
        assert_eq!(s.logits().unwrap(), by_host.logits().unwrap());
    }
}

/// Sessions that are stepped together choose what each would choose by itself, whatever the others do, with options that change
/// from step to step, and after steps that were not what the device had begun.
#[test]
fn steps_choose_what_sessions_choose() {
    let Some(gpu) = gpu() else { return };
    let model = Model::load(
        &golden("qwen3_tied"),
        &LoadOptions {
            device: Device::Cuda(gpu),
            ..options()
        },
    )
    .unwrap();
    let greedy = SamplingOptions::default();
    let warm = SamplingOptions {
        temperature: 0.9,
        top_p: 0.9,
        seed: Some(5),
        ..greedy
    };
    let penalized = SamplingOptions {
        temperature: 1.2,
        repetition_penalty: 1.4,
        seed: Some(6),
        ..greedy
    };
    let new = |n: usize| {
        let mut s = Session::new(model.clone(), &SessionOptions::default()).unwrap();
        s.prefill(&some_tokens(&model, n)).unwrap();
        s
    };
    let mut sessions = [new(5), new(70), new(63)];
    let mut tokens = vec![7u32, 8, 9];
    for round in 0..60 {
        let how = match round / 10 % 3 {
            0 => [&warm, &penalized, &greedy],
            1 => [&greedy; 3],
            _ => [&penalized, &warm, &warm],
        };
        if round % 7 == 3 {
            // Not what the device has chosen.
            tokens = vec![1, 2, 3];
        }
        let mut all: Vec<&mut Session> = sessions.iter_mut().collect();
        let next = session::step_choose(&mut all, &tokens, &how, true).unwrap();
        // A fork does not disturb what the device has begun, and the logits of the same batch have the same bits.
        let mut forks: Vec<Session> = sessions.iter().map(|s| s.fork().unwrap()).collect();
        for s in &mut forks {
            s.truncate(s.len() - 1).unwrap();
        }
        if round % 5 == 0 {
            let mut all: Vec<&mut Session> = forks.iter_mut().collect();
            session::step(&mut all, &tokens).unwrap();
            for ((fork, how), &next) in forks.iter_mut().zip(how).zip(&next) {
                let mut sampler = Sampler::new(how).unwrap().after(fork.len());
                assert_eq!(fork.sample(&mut sampler).unwrap(), next, "round {round}");
            }
        }
        tokens = next;
    }
}

/// A model whose weights are plain bf16, as models are published, in conversations whose prompts are long and short.
#[test]
fn conversations_are_those_of_the_processor() {
    let Some(gpu) = gpu() else { return };
    let thinker = std::env::temp_dir().join(format!("nvfp4-thinker-{}", std::process::id()));
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/common/thinker.py");
    let python = std::process::Command::new("python3")
        .arg(script)
        .arg(&thinker)
        .status();
    assert!(python.unwrap().success());
    let held = |device: Device| {
        let options = LoadOptions {
            device,
            ..options()
        };
        let model = Model::load(&thinker, &options).unwrap();
        let mut session = Session::new(model.clone(), &SessionOptions::default()).unwrap();
        for question in ["Why is the sky blue, and what of the sea?", "Hm?", ""] {
            session
                .chat(question, None, &GenerateOptions::of(&model), &mut |_| {
                    ControlFlow::Continue(())
                })
                .unwrap();
        }
        (session.messages().unwrap(), session.tokens().to_vec())
    };
    let (said, tokens) = held(Device::Cuda(gpu));
    let wanted = held(Device::cpu(None).unwrap());
    assert_eq!((&said, &tokens), (&wanted.0, &wanted.1));
    assert_eq!(said.len(), 6);
    assert!(said[5].reasoning_content.is_some() && said[3].text().starts_with("Blue"));
    let _ = std::fs::remove_dir_all(&thinker);
}

/// A step that fails half-way leaves nothing behind that the next step of other sessions would take for its own.
#[test]
fn a_step_that_fails_leaves_the_next_one_alone() {
    let Some(gpu) = gpu() else { return };
    let model = Model::load(
        &golden("qwen3_tied"),
        &LoadOptions {
            device: Device::Cuda(gpu),
            ..options()
        },
    )
    .unwrap();
    let new = |first: usize| {
        let mut s = Session::new(model.clone(), &SessionOptions::default()).unwrap();
        s.prefill(&some_tokens(&model, first)).unwrap();
        s
    };
    let greedy = SamplingOptions::default();
    let run = |fail: bool| {
        let (mut a, mut b) = (new(20), new(33));
        let mut token = 3;
        let mut said = Vec::new();
        for i in 0..12 {
            token =
                session::step_choose(&mut [&mut a], &[token], &[&greedy], i % 2 == 0).unwrap()[0];
            said.push(token);
            if fail && i == 6 {
                // What marks tokens that have occurred is made after the tokens and pages of this session were written.
                let penalized = SamplingOptions {
                    repetition_penalty: 1.5,
                    ..greedy
                };
                memory::set_budget(Some(memory::total().current));
                let e =
                    session::step_choose(&mut [&mut b], &[5], &[&penalized], false).unwrap_err();
                memory::set_budget(None);
                assert_eq!(e.kind(), ErrorKind::OverBudget, "{e}");
                assert_eq!(b.len(), 33);
            }
        }
        (said, a.logits().unwrap().to_vec())
    };
    let want = run(false);
    assert_eq!(run(true), want);
}

/// A prompt that is cancelled at any moment leaves its session as it was, and the device in order.
#[test]
fn a_cancelled_prompt_on_a_gpu_changes_nothing() {
    let Some(gpu) = gpu() else { return };
    let on_gpu = LoadOptions {
        device: Device::Cuda(gpu),
        ..options()
    };
    let model = Model::load(&golden("qwen3_tied"), &on_gpu).unwrap();
    let new = || Session::new(model.clone(), &SessionOptions::default()).unwrap();
    let (mut session, mut whole) = (new(), new());
    let (head, tokens) = (some_tokens(&model, 6), some_tokens(&model, 200));
    session.prefill(&head).unwrap();
    let mut before = session.logits().unwrap().to_vec();
    whole.prefill(&head).unwrap();
    whole.prefill(&tokens).unwrap();
    let expected = whole.logits().unwrap().to_vec();
    let mut ended = 0;
    for delay in 0..200 {
        let cancel = Cancel::new();
        let result = std::thread::scope(|scope| {
            scope.spawn(|| {
                let begun = std::time::Instant::now();
                while begun.elapsed().as_micros() < delay * 5 {
                    std::hint::spin_loop();
                }
                cancel.cancel();
            });
            cancel.watching(|| session.prefill(&tokens))
        });
        match result {
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::Cancelled, "{e}");
                assert_eq!(session.len(), head.len());
                assert!(session.logits().unwrap() == before);
                ended += 1;
            }
            Ok(()) => {
                session.truncate(head.len()).unwrap();
                // Now of one token alone, which adds up in another order.
                before = session.logits().unwrap().to_vec();
            }
        }
    }
    assert!(ended > 0);
    let heard = std::cell::RefCell::new(Vec::new());
    let progress = |p: Progress| {
        heard.borrow_mut().push((p.done, p.total));
        ControlFlow::Continue(())
    };
    let watch = Watch {
        flags: &[],
        progress: Some(&progress),
    };
    let mut again = new();
    again.prefill(&head).unwrap();
    watch.during(|| again.prefill(&tokens).unwrap());
    assert_eq!(heard.borrow().last(), Some(&(200, 200)));
    assert!(again.logits().unwrap() == expected);
}
