//! Products of two quantized matrices against f64: by each kernel, by the library, and through tensors and host memory.

use std::sync::Arc;

use NVFP4::base::ErrorKind;
use NVFP4::cuda::{self, DeviceBuffer, Gpu, Operand, ScaledTile, Way};
use NVFP4::format::nvfp4::{self, BLOCK, Nvfp4};
use NVFP4::format::random;
use NVFP4::format::swizzle::{self, ScaleLayout};
use NVFP4::model::Device;
use NVFP4::ops::tensors::{Nvfp4Tensor, scaled_mm};
use NVFP4::ops::{Workspace, quantize};
use NVFP4::tensor::{DType, Tensor};

use crate::common::expect_kind;
use crate::support::{
    BF16, DROPPED, EXACT, HALF, as_f64, assert_close, gpu, poisoned, product, read_f32,
    relative_l2, upload,
};

/// The types of results.
pub(crate) const RESULTS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// An NVFP4 matrix of any codes and scales, the smallest and the largest among them.
pub(crate) struct Quantized {
    host: Nvfp4,
    layout: ScaleLayout,
    codes: DeviceBuffer,
    /// Scales in the order of `layout`, padded with NaNs.
    stored_scales: Vec<u8>,
    scales: DeviceBuffer,
}

impl Quantized {
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        rows: usize,
        cols: usize,
        layout: ScaleLayout,
        seed: u64,
    ) -> Quantized {
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

    fn operand(&self) -> Operand<'_> {
        let Nvfp4 {
            rows, cols, global, ..
        } = self.host;
        Operand::new(&self.codes, &self.scales, self.layout, rows, cols, global).unwrap()
    }

    pub(crate) fn tensor(&self) -> Nvfp4Tensor {
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

/// a bᵀ in f64.
pub(crate) fn scaled_product(a: &Quantized, b: &Quantized) -> Vec<f64> {
    let factor = f64::from(a.host.global) * f64::from(b.host.global);
    let products = product(&as_f64(&a.values()), &b.values(), a.host.cols);
    products.iter().map(|sum| sum * factor).collect()
}

/// Demands results that are rounded to `dtype` once. f16 has no values below its smallest, half of which every result may lack.
/// Returns the relative error.
#[track_caller]
pub(crate) fn assert_rounded(
    bytes: &[u8],
    dtype: DType,
    want: &[f64],
    k: usize,
    what: &str,
) -> f64 {
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
    let [by_kernel, by_library] = [Way::Kernel(ScaledTile::Large), Way::Library].map(|way| {
        let out = poisoned(&gpu, m * n * 4);
        cuda::scaled_mm_by(&gpu, &a.operand(), &b.operand(), DType::F32, &out, way).unwrap();
        read_f32(&out, m * n)
    });
    let bound = k as f64 * DROPPED;
    assert_close(&by_library, &as_f64(&by_kernel), bound, "in parts");
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
        Operand::new(&q.codes, &q.scales, layout, rows, k, global).map(|_| ())
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
    let empty = Operand::new(&q.codes, &q.scales, ScaleLayout::Linear, 0, 64, 1.0).unwrap();
    cuda::scaled_mm(&gpu, &empty, &a, DType::F32, &small).unwrap();
}
