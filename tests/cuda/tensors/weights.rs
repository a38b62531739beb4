//! Weights that are prepared from tensors of the device, and scales that no block may have.

use std::sync::Arc;

use NVFP4::base::memory::{self, Tag};
use NVFP4::base::{ErrorKind, Result};
use NVFP4::cuda::{self, DeviceBuffer, Gpu};
use NVFP4::format::nvfp4::BLOCK;
use NVFP4::format::swizzle;
use NVFP4::ops::backend::Backend;
use NVFP4::ops::linear::Linear;
use NVFP4::ops::tensors::{self, Nf4Tensor, Nvfp4Tensor, ScaleLayout};
use NVFP4::ops::{Device, Workspace};
use NVFP4::tensor::{DType, Shape, Tensor};

use super::{
    TYPES, assert_same, bytes_tensor, found, parts_managed, parts_there, poisoned, there, values,
};
use crate::common::expect_kind;
use crate::scaled::Quantized;
use crate::support::{gpu, upload};

/// The scales of a matrix of `rows` by `blocks` in a layout, padded with NaNs.
struct Scales {
    layout: ScaleLayout,
    rows: usize,
    blocks: usize,
    good: Vec<u8>,
}

impl Scales {
    fn new(layout: ScaleLayout, rows: usize, blocks: usize) -> Scales {
        let len = layout.len(rows, blocks).unwrap();
        let mut scales = Scales {
            layout,
            rows,
            blocks,
            good: vec![0xff; len],
        };
        for i in 0..rows * blocks {
            let at = scales.place(i);
            scales.good[at] = (i % 0x7f) as u8;
        }
        scales
    }

    /// The place of a scale, by its number in row-major order.
    fn place(&self, i: usize) -> usize {
        match self.layout {
            ScaleLayout::Linear => i,
            ScaleLayout::Swizzled => swizzle::offset(i / self.blocks, i % self.blocks, self.blocks),
        }
    }

    /// All scales, with another byte at one place.
    fn with(&self, i: usize, byte: u8) -> Vec<u8> {
        let mut bytes = self.good.clone();
        bytes[self.place(i)] = byte;
        bytes
    }

    fn words(&self, i: usize, byte: u8) -> String {
        let (row, block) = (i / self.blocks, i % self.blocks);
        format!("block {block} in row {row} has the byte {byte:#04x}")
    }

    fn look(&self, gpu: &Arc<Gpu>, codes: &DeviceBuffer, scales: &[u8]) -> Result<()> {
        let scales = upload(gpu, scales);
        let k = self.blocks * BLOCK;
        let q = cuda::Operand::new(codes, &scales, self.layout, self.rows, k, 1.0).unwrap();
        cuda::wait_for_scales(gpu, &q)
    }

    /// Looks for every byte at several places.
    fn check_bytes(&self, gpu: &Arc<Gpu>) {
        let &Scales {
            layout,
            rows,
            blocks,
            ref good,
        } = self;
        let all = rows * blocks;
        let codes = poisoned(gpu, all * 8);
        self.look(gpu, &codes, good).unwrap();
        for i in [0, 1, blocks - 1, all / 2, all - 1].map(|i| i.min(all - 1)) {
            for byte in 0..=0xffu8 {
                let what = format!("{layout:?} [{rows}, {blocks}], scale {i} is {byte:#04x}");
                let looked = self.look(gpu, &codes, &self.with(i, byte));
                assert_eq!(looked.is_ok(), byte < 0x7f, "{what}");
                if let Err(e) = looked {
                    let said = self.words(i, byte);
                    assert!(e.message().contains(&said), "{what}: {e}");
                }
            }
        }
    }

    /// A matrix of zeros on the device with these scales.
    fn tensor(&self, scales: &[u8]) -> Nvfp4Tensor {
        let sizes = match self.layout {
            ScaleLayout::Linear => vec![self.rows, self.blocks],
            ScaleLayout::Swizzled => vec![scales.len()],
        };
        let codes = Tensor::zeros(&[self.rows, self.blocks * 8], DType::U8).unwrap();
        Nvfp4Tensor {
            codes: there(&codes, false),
            scales: there(&bytes_tensor(scales, &sizes, DType::F8E4M3), false),
            global: 1.0,
            layout: self.layout,
        }
    }

    /// Demands that the errors of weights, of decoding and of products name the place of a byte.
    fn check_errors(&self, gpu: &Arc<Gpu>, ws: &mut Workspace, byte: u8) {
        let device = Device::Cuda(gpu.clone());
        let i = (self.rows - 1) * self.blocks + self.blocks / 2;
        let fine = self.tensor(&self.good);
        let bad = self.tensor(&self.with(i, byte));
        let said = self.words(i, byte);
        let decoded = tensors::weight_for(&device, &bad, Backend::DequantMatmul, DType::F32);
        for weight in [tensors::weight(&device, &bad), decoded] {
            expect_kind(weight, ErrorKind::InvalidArgument, &said);
        }
        drop(tensors::dequantize(&device, &bad, DType::F32).unwrap());
        let e = found(gpu);
        assert!(e.message().contains(&said), "{e}");
        for (a, b, which) in [
            (&bad, &fine, "first"),
            (&fine, &bad, "second"),
            (&bad, &bad, "first"),
        ] {
            drop(tensors::scaled_mm(&device, a, b, DType::F16, ws).unwrap());
            let e = found(gpu);
            let said = format!("the {which} matrix: the scale of {said}");
            assert!(e.message().contains(&said), "{e} is not: {said}");
        }
    }
}

/// Every byte at every place of a word and at the ends of rows, and padding that may be anything.
#[test]
fn scales_that_are_none_are_found() {
    let Some(gpu) = gpu() else { return };
    let mut ws = Workspace::new();
    for layout in [ScaleLayout::Linear, ScaleLayout::Swizzled] {
        for (rows, blocks) in [(1, 1), (3, 5), (2, 8), (130, 6)] {
            let scales = Scales::new(layout, rows, blocks);
            scales.check_bytes(&gpu);
            for byte in [0x7f, 0x80, 0xff] {
                scales.check_errors(&gpu, &mut ws, byte);
            }
        }
    }
}

/// The bytes that a weight holds on the device.
fn held(weight: &Linear) -> Vec<u8> {
    let values = weight.matrix().unwrap().values();
    let mut bytes = vec![0; values.bytes()];
    values.read(0, &mut bytes).unwrap();
    bytes
}

/// Weights of every kind from tensors of the device hold what they hold from host memory.
#[test]
fn weights_are_prepared_from_tensors_of_the_device() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let weights = memory::usage(Tag::DeviceWeights).current;
    for (i, (n, k)) in [(1, 16), (8, 128), (37, 272), (131, 1040), (260, 64)]
        .into_iter()
        .enumerate()
    {
        for layout in [ScaleLayout::Linear, ScaleLayout::Swizzled] {
            let q = Quantized::new(&gpu, n, k, layout, 300 + i as u64).tensor();
            let mut places = vec![parts_there(&q, false), parts_there(&q, true)];
            places.extend(parts_managed(&q));
            for at in &places {
                let what = format!("[{n}, {k}] {layout:?} in {}", at.codes.place());
                let want = tensors::weight(&device, &q).unwrap();
                let got = tensors::weight(&device, at).unwrap();
                assert_eq!((got.rows(), got.cols()), (n, k));
                assert_eq!(got.kind().name(), "nvfp4");
                assert_same(&held(&got), &held(&want), &what);
                for dense in TYPES {
                    let backend = Backend::DequantMatmul;
                    let want = tensors::weight_for(&device, &q, backend, dense).unwrap();
                    let got = tensors::weight_for(&device, at, backend, dense).unwrap();
                    assert_same(&held(&got), &held(&want), &format!("{what}, {dense:?}"));
                }
            }
        }
        for dtype in TYPES {
            let values = values(400 + i as u64, n * k, dtype);
            let host = Tensor::from_f32(&values, &[n, k], dtype).unwrap();
            let want = tensors::dense_weight(&device, &host).unwrap();
            for apart in [false, true] {
                let got = tensors::dense_weight(&device, &there(&host, apart)).unwrap();
                assert_same(&held(&got), &held(&want), dtype.name());
            }
            let turned = Shape::strided(&[k, n], &[1, k]).unwrap();
            if n % BLOCK == 0 {
                let got = there(&host, false).view(turned.clone(), 0).unwrap();
                let got = tensors::dense_weight(&device, &got).unwrap();
                let want = tensors::dense_weight(&device, &host.view(turned, 0).unwrap());
                assert_same(&held(&got), &held(&want.unwrap()), "a transpose");
            }
        }
    }
    gpu.synchronize().unwrap();
    assert_eq!(memory::usage(Tag::DeviceWeights).current, weights);
}

fn decoded(device: &Device, q: &Nvfp4Tensor, dense: DType) -> Result<Linear> {
    tensors::weight_for(device, q, Backend::DequantMatmul, dense)
}

#[test]
fn weights_that_cannot_be_held_are_refused() {
    let Some(gpu) = gpu() else { return };
    let (device, cpu) = (Device::Cuda(gpu.clone()), Device::cpu(Some(2)).unwrap());
    for dtype in TYPES {
        let mut values = vec![1f32; 700 * 2048];
        values[650 * 2048 + 77] = f32::NAN;
        values[660 * 2048] = f32::INFINITY;
        let host = Tensor::from_f32(&values, &[700, 2048], dtype).unwrap();
        for w in [host.clone(), there(&host, false), there(&host, true)] {
            expect_kind(
                tensors::dense_weight(&device, &w),
                ErrorKind::InvalidArgument,
                "row 650, column 77 is NaN",
            );
        }
    }
    // Values that float16 has no room for, wherever they come from; and a scale that is NaN.
    let mut q = Quantized::new(&gpu, 4, 32, ScaleLayout::Linear, 3).tensor();
    q.codes = bytes_tensor(&[0x77; 64], &[4, 16], DType::U8);
    q.scales = bytes_tensor(&[0x38; 8], &[4, 2], DType::U8);
    q.global = 20_000.0;
    for at in [&q, &parts_there(&q, false)] {
        let e = decoded(&device, at, DType::F16).unwrap_err();
        assert!(e.message().contains("row 0, column 0"), "{e}");
        decoded(&device, at, DType::BF16).unwrap();
    }
    expect_kind(
        decoded(&cpu, &q, DType::F16),
        ErrorKind::InvalidArgument,
        "element [0, 0] is 120000",
    );
    q.scales = bytes_tensor(&[0x38, 0x38, 0x38, 0x7f, 0, 0, 0, 0], &[4, 2], DType::U8);
    for at in [&q, &parts_there(&q, false)] {
        let e = decoded(&device, at, DType::F32).unwrap_err();
        assert!(e.message().contains("block 1 in row 1"), "{e}");
    }
    refused_elsewhere(&device, &cpu, &q);
}

/// Demands that parts in several places, devices without the parts, and types without a weight are refused; `q` is a `[4, 32]` matrix of
/// host memory.
fn refused_elsewhere(device: &Device, cpu: &Device, q: &Nvfp4Tensor) {
    let at = parts_there(q, false);
    let split = Nvfp4Tensor {
        scales: q.scales.clone(),
        ..at.clone()
    };
    for backend in [Backend::Nvfp4Kernel, Backend::DequantMatmul] {
        let e = tensors::weight_for(device, &split, backend, DType::F32).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        assert!(e.message().contains("the memory of the host"), "{e}");
        assert!(e.message().contains("the memory of cuda:0"), "{e}");
        let e = tensors::weight_for(cpu, &at, backend, DType::F32).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
    }
    let f64s = there(&Tensor::zeros(&[4, 32], DType::F64).unwrap(), false);
    expect_kind(
        tensors::dense_weight(device, &f64s),
        ErrorKind::Unsupported,
        "float64",
    );
    let nf4 = Nf4Tensor {
        codes: at.codes.clone(),
        absmax: there(&Tensor::zeros(&[2], DType::F32).unwrap(), false),
        map: None,
        block: 64,
    };
    let backend = Backend::DequantMatmul;
    let e = tensors::nf4_weight_for(device, &nf4, (4, 32), backend, DType::F32);
    assert_eq!(e.unwrap_err().kind(), ErrorKind::Unsupported);
}
