//! Products of activations with weights against f64: of few rows, by tiles, of many rows, of dense weights, and of host memory.

use std::ops::Range;
use std::sync::Arc;

use NVFP4::cuda::{self, Biased, Gpu, LinearScratch, Output, SKINNY_ROWS, TileKernel};
use NVFP4::format::nvfp4::{self, QuantizeOptions};
use NVFP4::model::{Activations, Device};
use NVFP4::ops::linear::{Linear, linear};
use NVFP4::ops::{Slice, SliceMut, Workspace};
use NVFP4::tensor::{DType, WeightType};
use half::{bf16, f16};

use crate::support::{
    BF16, DENSE, DROPPED, Dense, EXACT, F16, HALF, HalfRows, Product, ROW, Weight, as_f64,
    assert_close, copy_nvfp4_rows, gpu, joined_products, normal, poisoned, product, read_f16,
    read_f32, rounded, same_bits, sums, upload,
};

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
        let w = Weight::new(&gpu, n, k, i as u64);
        let x = HalfRows::new(&gpu, &normal(100 + i as u64, m * k));
        let plain = Product::of(&gpu, &scratch, x.input(), m, &[w.plain()]);
        let biased = Product::of(&gpu, &scratch, x.input(), m, &[w.biased()]);
        let want = w.product(&x.exact);

        let first = plain.f32s();
        assert_close(&first, &want, EXACT, &what);
        assert!(same_bits(&first, &plain.f32s()), "{what}: two runs differ");

        let got = biased.output(Output::F16).f16s();
        assert_close(&got, &w.biased_product(&x.exact), F16, &what);

        let before = normal(7, m * n);
        let out = upload(&gpu, &before);
        plain.output(Output::Add).write(&out);
        let got = read_f32(&out, m * n);
        assert_close(&got, &sums(&want, &before), EXACT, &what);
    }
}

/// A product for one kernel of tiles: rows of `k` elements with biased weights.
struct Tiled<'a> {
    gpu: &'a Arc<Gpu>,
    kernel: TileKernel,
    m: usize,
    k: usize,
    x: HalfRows,
    weights: Vec<Weight>,
    seed: u64,
}

impl<'a> Tiled<'a> {
    fn new(
        gpu: &'a Arc<Gpu>,
        kernel: TileKernel,
        (m, features, k): (usize, &[usize], usize),
        seed: u64,
    ) -> Tiled<'a> {
        let weights = features.iter().zip(0..);
        Tiled {
            gpu,
            kernel,
            m,
            k,
            x: HalfRows::new(gpu, &normal(seed + 5, m * k)),
            weights: weights
                .map(|(&n, j)| Weight::new(gpu, n, k, seed + j))
                .collect(),
            seed,
        }
    }

    /// Runs the kernel with so many bytes of scratch, into rows that are longer than the features; `want` has its products in f64.
    fn check(&self, output: Output, room: usize, want: &[f64]) {
        let features: Vec<usize> = self.weights.iter().map(|w| w.rows).collect();
        let all: usize = features.iter().sum();
        let stride = all + 3;
        let before = match output {
            Output::Add => normal(self.seed + 6, self.m * stride),
            _ => vec![f32::NAN; self.m * stride],
        };
        let got = self.run(output, room, &before, stride);
        let (mut values, mut old) = (Vec::new(), Vec::new());
        for (got, before) in got.chunks_exact(stride).zip(before.chunks_exact(stride)) {
            values.extend_from_slice(&got[..all]);
            old.extend_from_slice(&before[..all]);
            assert!(same_bits(&got[all..], &before[all..]));
        }
        let want = match output {
            Output::Add => sums(want, &old),
            _ => want.to_vec(),
        };
        let (kernel, m, k) = (self.kernel, self.m, self.k);
        let what = format!("{kernel:?}, {m} rows of {features:?}, K = {k}, {output:?}");
        assert_close(&values, &want, EXACT.max(k as f64 * DROPPED), &what);
    }

    fn run(&self, output: Output, room: usize, before: &[f32], stride: usize) -> Vec<f32> {
        let scratch = LinearScratch::new(self.gpu, 1, self.k, room).unwrap();
        let matrices: Vec<Biased<'_>> = self.weights.iter().map(Weight::biased).collect();
        let out = upload(self.gpu, before);
        cuda::tiled(
            self.gpu,
            self.kernel,
            self.x.input(),
            self.m,
            &matrices,
            output,
            &out,
            stride,
            &scratch,
        )
        .unwrap();
        read_f32(&out, before.len())
    }
}

/// Every kernel of tiles, with one block to a tile and with several.
#[test]
fn tiles_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    for &kernel in TileKernel::all(gpu.arch()) {
        for (i, (m, features, k)) in [
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
            let tiled = Tiled::new(&gpu, kernel, (m, &features, k), 700 + 10 * i as u64);
            let want = joined_products(&tiled.weights, &tiled.x.exact);
            let room = kernel.scratch(m, k, gpu.multiprocessors());
            for (output, room) in [(Output::F32, room), (Output::Add, room), (Output::F32, 0)] {
                if room == 0 && kernel == TileKernel::Wide {
                    // Without room it takes fragment-major rows only.
                    continue;
                }
                tiled.check(output, room, &want);
            }
        }
    }
}

/// Products by the tiled kernel with one block to a tile and with several, and by the library.
#[test]
fn products_of_many_rows_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
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
        let w = Weight::new(&gpu, n, k, 500 + i as u64);
        let x = HalfRows::new(&gpu, &normal(600 + i as u64, m * k));
        let got = Product::of(&gpu, &scratch, x.input(), m, &[w.biased()]).f32s();
        assert_close(&got, &w.biased_product(&x.exact), EXACT, "many rows");
    }
}

/// Rows that f16 holds but for a power of two, which makes some of them very large and others very small.
fn rows_of_any_magnitude(seed: u64, m: usize, k: usize) -> Vec<f32> {
    let exact = rounded(&normal(seed, m * k));
    let factor = |row: usize| 2f32.powi([0, 40, -60][row % 3]);
    let elements = exact.iter().enumerate();
    elements.map(|(i, &v)| v as f32 * factor(i / k)).collect()
}

fn through_bf16(values: &[f32]) -> Vec<f32> {
    let nearest = |&v: &f32| bf16::from_f32(v).to_f32();
    values.iter().map(nearest).collect()
}

/// Values that every dense type holds.
fn held_by_all(values: &[f32]) -> Vec<f32> {
    let halves: Vec<f32> = through_bf16(values)
        .iter()
        .map(|&v| f16::from_f32(v).to_f32())
        .collect();
    through_bf16(&halves)
}

/// Weights `[n, k]` of every type on a device, each with its product with `m` rows in f64.
fn weights_and_products(
    device: &Device,
    [m, n, k]: [usize; 3],
    seed: u64,
    x: &[f32],
) -> Vec<(Linear, Vec<f64>)> {
    let values: Vec<f32> = normal(seed, n * k).iter().map(|v| v * 0.05).collect();
    let host = nvfp4::quantize(&values, n, k, &QuantizeOptions::default()).unwrap();
    let quantized = Linear::nvfp4(device, n, k, host.global, &mut |range, codes, scales| {
        copy_nvfp4_rows(&host, range, codes, scales);
        Ok(())
    })
    .unwrap();
    let exact = as_f64(x);
    let in_bf16 = as_f64(&through_bf16(x));
    let decoded = host.dequantize().unwrap();
    let mut all = vec![(quantized, product(&exact, &decoded, k))];
    let values = held_by_all(&values);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let dense = Linear::dense(device, n, k, dtype, &mut |range, out| {
            out.copy_from_slice(&values[range.start * k..range.end * k]);
            Ok(())
        })
        .unwrap();
        // For many rows and a bf16 weight the library multiplies activations in bf16.
        let x = match dtype == DType::BF16 && m > SKINNY_ROWS {
            true => &in_bf16,
            false => &exact,
        };
        all.push((dense, product(x, &values, k)));
    }
    all
}

/// Host memory in and out, in parts, with rows of any magnitude.
#[test]
fn products_of_host_memory_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let mut workspace = Workspace::new();
    for (i, (m, n, k)) in [
        (1, 33, 64),
        (16, 100, 576),
        (17, 136, 128),
        (300, 64, 256),
        (2100, 24, 32),
    ]
    .into_iter()
    .enumerate()
    {
        let seed = 900 + i as u64;
        let x = rows_of_any_magnitude(seed + 50, m, k);
        let wanted = weights_and_products(&device, [m, n, k], seed, &x);
        let mut results = vec![vec![f32::NAN; m * n]; wanted.len()];
        let mut outputs: Vec<(&Linear, SliceMut<'_>)> = wanted
            .iter()
            .zip(&mut results)
            .map(|((w, _), y)| (w, SliceMut::Host(y)))
            .collect();
        let rows = Slice::Host(&x);
        let exact = Activations::Exact;
        linear(&device, rows, m, &mut outputs, exact, &mut workspace).unwrap();
        for ((w, want), got) in wanted.iter().zip(&results) {
            let what = format!("{:?} [{m}, {k}] x [{n}, {k}]", w.kind());
            // Rows differ by many orders of magnitude, so each is compared by itself.
            for (got, want) in got.chunks_exact(n).zip(want.chunks_exact(n)) {
                assert_close(got, want, ROW, &what);
            }
        }

        let mut y = vec![0.0; m * n];
        let cpu = Device::cpu(Some(1)).unwrap();
        for (device, activations, words) in [
            (&device, Activations::Int8, "ask for exact"),
            (&cpu, exact, "prepare it for that device"),
        ] {
            let mut output = [(&wanted[0].0, SliceMut::Host(&mut y))];
            let e = linear(device, rows, m, &mut output, activations, &mut workspace);
            let e = e.unwrap_err();
            assert!(e.message().contains(words), "{e}");
        }
    }
}

#[test]
fn dense_products_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let (m, n, k) = (5, 100, 96);
    let values = normal(1, n * k);
    let x = HalfRows::new(&gpu, &normal(2, m * k));
    let scratch = LinearScratch::new(&gpu, 16, 9728, 0).unwrap();
    for storage in DENSE {
        let w = Dense::new(&gpu, [n, k], storage, &values);
        let got = Product::of(&gpu, &scratch, x.input(), m, &[(&w.device, None)]).f32s();
        let want = product(&x.exact, &w.values, k);
        assert_close(&got, &want, EXACT, &format!("{storage:?}"));
    }
}

#[test]
fn dense_products_of_many_rows_give_what_is_asked_for() {
    let Some(gpu) = gpu() else { return };
    let (n, k, stride) = (100, 96, 104);
    // Values that both types hold.
    let exact = |v: &f32| bf16::from_f32(f16::from_f32(*v).to_f32()).to_f32();
    let values: Vec<f32> = normal(1, n * k).iter().map(exact).collect();
    for (m, storage) in [20, 70]
        .into_iter()
        .flat_map(|m| DENSE.map(|storage| (m, storage)))
    {
        let x = HalfRows::new(
            &gpu,
            &normal(2, m * k).iter().map(exact).collect::<Vec<_>>(),
        );
        let w = Dense::new(&gpu, [n, k], storage, &values);
        let want = product(&x.exact, &values, k);
        let scratch = LinearScratch::for_product(&gpu, &w.device, m).unwrap();
        for output in [Output::F32, Output::F16] {
            let bound = match (output, storage) {
                (Output::F16, WeightType::BF16) => BF16,
                (Output::F16, _) => HALF,
                _ => EXACT,
            };
            let out = poisoned(&gpu, m * stride * 4);
            Product::of(&gpu, &scratch, x.input(), m, &[(&w.device, None)])
                .output(output)
                .stride(stride)
                .write(&out);
            let got = match output {
                Output::F16 => read_f16(&out, m * stride),
                _ => read_f32(&out, m * stride),
            };
            let rows = got.chunks_exact(stride).zip(want.chunks_exact(n));
            for (r, (got, want)) in rows.enumerate() {
                let what = format!("{storage:?} as {output:?}, row {r} of {m}");
                assert_close(&got[..n], want, bound, &what);
            }
        }
    }
}

/// Logits of many rows by an f32 router and a gate of one row differ from those in f64 by less than 1e-6 of the norms of their rows.
#[test]
fn routers_of_many_rows_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let (experts, k) = (256, 2048);
    let values = normal(1, (experts + 1) * k);
    let dense = |rows: Range<usize>| {
        let shape = [rows.len(), k];
        Dense::new(
            &gpu,
            shape,
            WeightType::F32,
            &values[rows.start * k..rows.end * k],
        )
    };
    let (router, gate) = (dense(0..experts), dense(experts..experts + 1));
    let norm = |v: &[f64]| v.iter().map(|v| v * v).sum::<f64>().sqrt();
    let norms: Vec<f64> = as_f64(&values).chunks_exact(k).map(norm).collect();
    for m in [17, 64, 300] {
        let x = HalfRows::new(&gpu, &normal(2, m * k));
        let scratch = LinearScratch::for_product(&gpu, &router.device, m).unwrap();
        let matrices = [(&router.device, None), (&gate.device, None)];
        let got = Product::of(&gpu, &scratch, x.input(), m, &matrices).f32s();
        let want = product(&x.exact, &values, k);
        for (i, (&got, want)) in got.iter().zip(want).enumerate() {
            let (row, feature) = (i / (experts + 1), i % (experts + 1));
            let bound = 1e-6 * norm(&x.exact[row * k..][..k]) * norms[feature];
            let error = (f64::from(got) - want).abs();
            assert!(
                error <= bound,
                "{m} rows: ({row}, {feature}) is {got}, not {want}"
            );
        }
    }
}
