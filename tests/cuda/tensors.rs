//! Tensors in the memory of a GPU: number formats against the processor, bit by bit, into outputs that are poisoned first and
//! longer than needed; products and weights against the same of host memory; copies, strides, DLPack, managed memory, and order
//! with the default stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use cudarc::driver::{result, sys};
use half::{bf16, f16};

use crate::common::expect_kind;
use NVFP4::base::memory::{self, Tag};
use NVFP4::base::{Error, ErrorKind, Result};
use NVFP4::cuda::{self, DeviceBuffer, FloatRows, Gpu, ManagedBuffer, Unit};
use NVFP4::format::nvfp4::{
    self, BLOCK, Levels, NonFinite, Nvfp4, QuantizeOptions, Recipe, global_scale,
};
use NVFP4::format::{Rounding, e2m1, e4m3, random, swizzle};
use NVFP4::ops::backend::Backend;
use NVFP4::ops::linear::{Activations, Linear};
use NVFP4::ops::tensors::{self, Nf4Tensor, Nvfp4Tensor, ScaleLayout};
use NVFP4::ops::transfer::{self, ManagedPolicy};
use NVFP4::ops::{Device, Workspace};
use NVFP4::tensor::{DLManagedTensor, DType, Place, Release, Shape, Tensor};

use crate::scaled::{Quantized, RESULTS, assert_rounded, scaled_product};
use crate::support::{assert_close, gpu, normal, upload};

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
/// What outputs are filled with, and the bytes behind them that must keep it.
const POISON: u8 = 0xaa;
const BEYOND: usize = 96;

fn poisoned(gpu: &Arc<Gpu>, bytes: usize) -> DeviceBuffer {
    upload(gpu, &vec![POISON; bytes + BEYOND])
}

/// The first `bytes` bytes; what is behind them must be untouched.
#[track_caller]
fn written(buffer: &DeviceBuffer, bytes: usize, what: &str) -> Vec<u8> {
    let mut out = vec![0; bytes + BEYOND];
    buffer.read(0, &mut out).unwrap();
    assert!(
        out[bytes..].iter().all(|&b| b == POISON),
        "{what}: written past its end"
    );
    out.truncate(bytes);
    out
}

#[track_caller]
fn assert_same(got: &[u8], want: &[u8], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    if let Some(i) = (0..got.len()).find(|&i| got[i] != want[i]) {
        let wrong = (0..got.len()).filter(|&i| got[i] != want[i]).count();
        panic!(
            "{what}: byte {i} of {} is {:#04x}, not {:#04x}; {wrong} bytes differ",
            got.len(),
            got[i],
            want[i]
        );
    }
}

/// Values that a type holds, of many magnitudes, with ties, zeros of both signs and a few of the smallest and largest.
fn values(seed: u64, count: usize, dtype: DType) -> Vec<f32> {
    (0..count as u64)
        .map(|i| {
            let bits = random::bits(seed, i);
            let block = random::bits(seed ^ 0x5555, i / 16);
            let unit = random::uniform(seed + 1, i) * 2.0 - 1.0;
            let value = match block % 8 {
                // Quarters up to six: ties of every threshold, where the scale is a power of two.
                0 => ((bits % 49) as f32 - 24.0) * 0.25 * (2f32).powi((block >> 8) as i32 % 9 - 6),
                1 => unit * (2f32).powi((bits >> 8) as i32 % 20 - 12),
                2 if bits.is_multiple_of(4) => 0.0,
                2 if bits % 4 == 1 => -0.0,
                // Too small for a scale of its own.
                3 => unit * (2f32).powi(-12 - (block >> 8) as i32 % 12),
                4 if block & 0x100 != 0 => unit * (2f32).powi(-130 - (bits >> 8) as i32 % 20),
                5 if block & 0x100 != 0 => -0.0,
                _ => unit,
            };
            in_type(value, dtype)
        })
        .collect()
}

fn in_type(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::BF16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// Every combination of options that has a meaning.
fn all_options(seed: u64) -> Vec<QuantizeOptions> {
    let mut all = Vec::new();
    for levels in [Levels::Two, Levels::Single, Levels::Legacy] {
        for recipe in [Recipe::Amax, Recipe::FourOverSix, Recipe::Sweep] {
            for rounding in [
                Rounding::NearestEven,
                Rounding::HalfAway,
                Rounding::Stochastic,
            ] {
                let options = QuantizeOptions {
                    levels,
                    recipe,
                    rounding,
                    seed,
                    ..QuantizeOptions::default()
                };
                if options.check().is_ok() {
                    all.push(options);
                }
            }
        }
    }
    assert_eq!(all.len(), 21);
    all
}

/// Quantizes `x`, whose values are `values`, on the device, into poisoned outputs, in both orders of scales.
#[track_caller]
fn check_quantize(gpu: &Arc<Gpu>, x: &Tensor, values: &[f32], options: &QuantizeOptions) {
    let (rows, cols) = x.shape().matrix();
    let what = format!("{:?} {:?} {options:?}", x, x.shape().strides());
    let want = nvfp4::quantize(values, rows, cols, options).unwrap();
    for swizzled in [false, true] {
        let want_scales = match swizzled {
            false => want.scales.clone(),
            true => swizzle::swizzle(&want.scales, rows, cols / BLOCK).unwrap(),
        };
        let codes = poisoned(gpu, want.codes.len());
        let scales = poisoned(gpu, want_scales.len());
        let global = cuda::quantize(gpu, x, options, None, swizzled, &codes, &scales).unwrap();
        assert_eq!(global.to_bits(), want.global.to_bits(), "{what}");
        let got = written(&scales, want_scales.len(), &what);
        assert_same(&got, &want_scales, &format!("scales, {what}"));
        let got = written(&codes, want.codes.len(), &what);
        assert_same(&got, &want.codes, &format!("codes, {what}"));
    }
}

/// What the device has found wrong in the calls so far, which is reported once.
#[track_caller]
fn found(gpu: &Arc<Gpu>) -> Error {
    gpu.synchronize().unwrap();
    let e = gpu.check_calls().unwrap_err();
    gpu.check_calls().unwrap();
    assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
    assert!(
        e.message().contains("what that call gave is undefined"),
        "{e}"
    );
    e
}

/// The error of values that are not finite: the call's own where that waits for the global scale, or else that of a later one.
#[track_caller]
fn refused(gpu: &Arc<Gpu>, x: &Tensor, options: &QuantizeOptions) -> Error {
    let elements = x.shape().elements();
    let (codes, scales) = (poisoned(gpu, elements), poisoned(gpu, elements));
    let result = cuda::quantize(gpu, x, options, None, false, &codes, &scales);
    match options.levels {
        Levels::Two => result.unwrap_err(),
        Levels::Single | Levels::Legacy => {
            result.unwrap();
            let e = found(gpu);
            assert!(e.message().starts_with("quantize (checked call "), "{e}");
            e
        }
    }
}

#[test]
fn quantized_tensors_have_the_bits_of_the_processor() {
    let Some(gpu) = gpu() else { return };
    for (i, (rows, cols)) in [(1, 16), (3, 48), (33, 64), (130, 272), (257, 1040), (0, 32)]
        .into_iter()
        .enumerate()
    {
        for dtype in TYPES {
            let values = values(i as u64, rows * cols, dtype);
            let host = Tensor::from_f32(&values, &[rows, cols], dtype).unwrap();
            let x = cuda::upload(&gpu, &host).unwrap();
            for options in all_options(i as u64) {
                check_quantize(&gpu, &x, &values, &options);
            }
        }
    }
}

#[test]
fn values_that_are_not_finite_saturate_as_on_the_processor() {
    let Some(gpu) = gpu() else { return };
    let (rows, cols) = (19, 80);
    for dtype in TYPES {
        let mut values = values(7, rows * cols, dtype);
        for (i, v) in values.iter_mut().enumerate() {
            match random::bits(8, i as u64) % 40 {
                0 => *v = f32::NAN,
                1 => *v = f32::INFINITY,
                2 => *v = f32::NEG_INFINITY,
                3 => *v = -f32::NAN,
                _ => {}
            }
        }
        // One with nothing else in it.
        values[32..48].fill(f32::NEG_INFINITY);
        values[48..64].fill(f32::NAN);
        let host = Tensor::from_f32(&values, &[rows, cols], dtype).unwrap();
        let x = cuda::upload(&gpu, &host).unwrap();
        for options in all_options(3) {
            let saturating = QuantizeOptions {
                nonfinite: NonFinite::Saturate,
                ..options.clone()
            };
            check_quantize(&gpu, &x, &values, &saturating);
            let e = refused(&gpu, &x, &options);
            let want = nvfp4::quantize(&values, rows, cols, &options).unwrap_err();
            assert_eq!(e.kind(), want.kind());
            assert!(e.message().contains(want.message()), "{e} is not: {want}");
        }
    }
}

/// The error of a value far into a tensor whose rows are apart.
#[test]
fn the_first_value_that_is_not_finite_is_named() {
    let Some(gpu) = gpu() else { return };
    let (rows, cols, stride) = (900, 2048, 2056);
    let mut values = vec![1f32; rows * stride];
    values[3 * stride + cols] = f32::NAN; // Between two rows.
    values[700 * stride + 5] = f32::INFINITY;
    values[701 * stride] = f32::NAN;
    for dtype in TYPES {
        let host = Tensor::from_f32(&values, &[rows, stride], dtype).unwrap();
        let whole = cuda::upload(&gpu, &host).unwrap();
        let even = Shape::strided(&[rows, cols], &[stride, 1]).unwrap();
        let uneven = Shape::strided(&[rows - 1, 2, cols / 2], &[stride, cols / 2, 1]).unwrap();
        for (shape, cols) in [(even, cols), (uneven, cols / 2)] {
            let x = whole.view(shape, 0).unwrap();
            for levels in [Levels::Two, Levels::Single, Levels::Legacy] {
                let options = QuantizeOptions {
                    levels,
                    ..QuantizeOptions::default()
                };
                let e = refused(&gpu, &x, &options);
                let index = 700 * 2048 + 5;
                assert!(e.message().contains(&format!("index {index}")), "{e}");
                assert_eq!(
                    e.message().contains(&format!("(row {}", index / cols)),
                    levels != Levels::Two,
                    "{e}"
                );
            }
        }
    }
}

/// Every magnitude of the 16-bit types under every scale that there is.
#[test]
fn every_16_bit_value_is_quantized_under_every_scale_as_on_the_processor() {
    let Some(gpu) = gpu() else { return };
    for dtype in [DType::F16, DType::BF16] {
        let all: Vec<f32> = (0..0x8000u16)
            .map(|b| match dtype {
                DType::F16 => f16::from_bits(b).to_f32(),
                _ => bf16::from_bits(b).to_f32(),
            })
            .filter(|v| v.is_finite())
            .collect();
        let mut blocks = Vec::new();
        for scale in 1..=e4m3::MAX_BYTE {
            let amax = e4m3::decode(scale) * e2m1::MAX;
            let below = all.partition_point(|&v| v <= amax);
            // What is far below half of the smallest step is zero, like its neighbours.
            let from = all.partition_point(|&v| v < amax / 1000.0);
            for chunk in all[from..below].chunks(BLOCK - 1) {
                let mut block = [0f32; BLOCK];
                block[0] = amax;
                block[1..=chunk.len()].copy_from_slice(chunk);
                for (i, v) in block.iter_mut().enumerate() {
                    if random::bits(scale.into(), i as u64 + blocks.len() as u64) & 1 != 0 {
                        *v = -*v;
                    }
                }
                blocks.extend(block);
            }
        }
        let rows = blocks.len() / BLOCK;
        let host = Tensor::from_f32(&blocks, &[rows, BLOCK], dtype).unwrap();
        let x = cuda::upload(&gpu, &host).unwrap();
        for levels in [Levels::Single, Levels::Legacy] {
            let options = QuantizeOptions {
                levels,
                ..QuantizeOptions::default()
            };
            check_quantize(&gpu, &x, &blocks, &options);
        }
    }
    // Where the legacy scale is zero, quotients by 1e-12: around each threshold.
    let values: Vec<f32> = (0..4096u64)
        .map(|i| {
            let code = i as usize % 7;
            let middle = (e2m1::VALUES[code] + e2m1::VALUES[code + 1]) / 2.0;
            bf16::from_f32(middle * 1e-12).to_f32().to_bits() + ((i / 7 % 5) as u32) * 0x10000
        })
        .map(|bits| f32::from_bits(bits - 0x20000))
        .collect();
    let host = Tensor::from_f32(&values, &[256, 16], DType::BF16).unwrap();
    let x = cuda::upload(&gpu, &host).unwrap();
    let legacy = QuantizeOptions {
        levels: Levels::Legacy,
        ..QuantizeOptions::default()
    };
    check_quantize(&gpu, &x, &values, &legacy);
}

/// f32 values within a few units in the last place of every threshold, under global scales that the host gives, down to
/// the smallest.
#[test]
fn values_beside_a_threshold_fall_on_the_side_of_the_processor() {
    let Some(gpu) = gpu() else { return };
    for (n, global) in [1.0, 0.37, 1e-4, 3.3e-20, 1e30, 1e-37, f32::MIN_POSITIVE]
        .into_iter()
        .enumerate()
    {
        let mut values = Vec::new();
        for scale in 1..=e4m3::MAX_BYTE {
            let step = e4m3::decode(scale) * global;
            for code in 0..7 {
                let threshold = (e2m1::VALUES[code] + e2m1::VALUES[code + 1]) / 2.0;
                let mut block = [0f32; BLOCK];
                block[0] = step * e2m1::MAX;
                for (i, v) in block[1..].iter_mut().enumerate() {
                    let around = (threshold * step)
                        .to_bits()
                        .saturating_add_signed(i as i32 - 7);
                    *v = f32::from_bits(around);
                    if random::bits(n as u64, i as u64) & 1 != 0 {
                        *v = -*v;
                    }
                }
                values.extend(block);
            }
        }
        let rows = values.len() / BLOCK;
        let host = Tensor::from_f32(&values, &[rows, BLOCK], DType::F32).unwrap();
        let x = cuda::upload(&gpu, &host).unwrap();
        for rounding in [Rounding::NearestEven, Rounding::HalfAway] {
            let options = QuantizeOptions {
                rounding,
                ..QuantizeOptions::default()
            };
            let what = format!("global {global:e}, {rounding:?}");
            let (mut want_codes, mut want_scales) = (vec![0; values.len() / 2], vec![0; rows]);
            nvfp4::quantize_rows(
                &values,
                BLOCK,
                0,
                global,
                &options,
                &mut want_codes,
                &mut want_scales,
            )
            .unwrap();
            let (codes, scales) = (poisoned(&gpu, want_codes.len()), poisoned(&gpu, rows));
            let used =
                cuda::quantize(&gpu, &x, &options, Some(global), false, &codes, &scales).unwrap();
            assert_eq!(used, global);
            assert_same(&written(&scales, rows, &what), &want_scales, &what);
            let got = written(&codes, want_codes.len(), &what);
            assert_same(&got, &want_codes, &what);
            if global == 1.0 {
                let legacy = QuantizeOptions {
                    levels: Levels::Legacy,
                    ..options
                };
                check_quantize(&gpu, &x, &values, &legacy);
            }
        }
    }
    // Values whose quotients vanish, negative ones among them, under the largest scale.
    let mut values = vec![0f32; 64];
    values[0] = 2688.0;
    for (i, v) in values[1..].iter_mut().enumerate() {
        *v = -f32::from_bits(i as u32 * 8);
    }
    values[16] = 2688.0;
    for (i, v) in values[17..32].iter_mut().enumerate() {
        *v = -f32::from_bits(224 - 7 + i as u32);
    }
    let host = Tensor::from_f32(&values, &[4, 16], DType::F32).unwrap();
    let x = cuda::upload(&gpu, &host).unwrap();
    for options in all_options(0) {
        check_quantize(&gpu, &x, &values, &options);
    }
}

/// Rows apart, rows that are not aligned, rows at uneven distances, transposes.
#[test]
fn any_strides_are_quantized() {
    let Some(gpu) = gpu() else { return };
    for dtype in TYPES {
        let all = values(21, 96 * 208, dtype);
        let host = Tensor::from_f32(&all, &[96, 208], dtype).unwrap();
        let whole = cuda::upload(&gpu, &host).unwrap();
        for (sizes, strides, offset) in [
            (vec![96, 160], vec![208, 1], 16),
            (vec![96, 160], vec![208, 1], 3),
            (vec![32, 3, 64], vec![624, 208, 1], 0),
            (vec![6, 5, 64], vec![208 * 7, 208, 1], 8),
            (vec![208, 96], vec![1, 208], 0),
            (vec![50, 32], vec![207, 1], 0),
            (vec![4, 48], vec![0, 1], 16),
            (vec![80], vec![1], 32),
            (vec![80], vec![2], 32),
        ] {
            let shape = Shape::strided(&sizes, &strides).unwrap();
            let values = host.view(shape.clone(), offset).unwrap().to_f32().unwrap();
            let x = whole.view(shape, offset).unwrap();
            for options in all_options(5) {
                if options.recipe == Recipe::Amax {
                    check_quantize(&gpu, &x, &values, &options);
                }
            }
        }
    }
}

fn random_parts(rows: usize, cols: usize, seed: u64) -> Nvfp4 {
    Nvfp4 {
        rows,
        cols,
        codes: (0..(rows * cols / 2) as u64)
            .map(|i| random::bits(seed, i) as u8)
            .collect(),
        // Every byte, NaN and negative ones too.
        scales: (0..(rows * cols / BLOCK) as u64)
            .map(|i| random::bits(seed + 1, i) as u8)
            .collect(),
        global: 0.7,
    }
}

fn bytes_tensor(bytes: &[u8], sizes: &[usize], dtype: DType) -> Tensor {
    Tensor::build(sizes, dtype, |out| {
        out.copy_from_slice(bytes);
        Ok(())
    })
    .unwrap()
}

#[test]
fn dequantized_tensors_have_the_bits_of_the_processor() {
    let Some(gpu) = gpu() else { return };
    for (i, (rows, cols)) in [(1, 16), (3, 48), (130, 272), (257, 1040)]
        .into_iter()
        .enumerate()
    {
        let q = random_parts(rows, cols, 40 + i as u64);
        let values: Vec<f32> = nvfp4::unpack(&q.codes)
            .iter()
            .enumerate()
            .map(|(i, &code)| nvfp4::decode(code, q.scales[i / BLOCK], q.global))
            .collect();
        let blocks = cols / BLOCK;
        let codes = bytes_tensor(&q.codes, &[rows, cols / 2], DType::U8);
        let codes = cuda::upload(&gpu, &codes).unwrap();
        let swizzled = swizzle::swizzle(&q.scales, rows, blocks).unwrap();
        let linear = bytes_tensor(&q.scales, &[rows, blocks], DType::F8E4M3);
        let swizzled = bytes_tensor(&swizzled, &[swizzled.len()], DType::U8);
        for (is_swizzled, scales) in [(false, linear), (true, swizzled)] {
            let scales = cuda::upload(&gpu, &scales).unwrap();
            for dtype in TYPES {
                let what = format!("{dtype:?} [{rows}, {cols}]");
                let out = poisoned(&gpu, values.len() * dtype.bytes());
                cuda::dequantize(&gpu, &codes, &scales, is_swizzled, q.global, dtype, &out)
                    .unwrap();
                let got = written(&out, values.len() * dtype.bytes(), &what);
                let mut want = vec![0; got.len()];
                dtype.from_f32(&values, &mut want).unwrap();
                // A NaN is one, whatever its other bits are.
                let mut floats = vec![0f32; values.len()];
                dtype.to_f32(&got, &mut floats).unwrap();
                for (i, (got, want)) in got
                    .chunks_exact(dtype.bytes())
                    .zip(want.chunks_exact(dtype.bytes()))
                    .enumerate()
                {
                    let both_nan = floats[i].is_nan() && values[i].is_nan();
                    assert!(both_nan || got == want, "{what}: value {i}: {}", values[i]);
                }
            }
        }
    }
}

#[test]
fn scales_change_their_order_as_on_the_processor() {
    let Some(gpu) = gpu() else { return };
    for (rows, blocks) in [(1, 1), (3, 5), (128, 4), (129, 3), (300, 17), (64, 64)] {
        let what = format!("[{rows}, {blocks}]");
        let linear: Vec<u8> = (0..(rows * blocks) as u64)
            .map(|i| random::bits(60, i) as u8)
            .collect();
        let want = swizzle::swizzle(&linear, rows, blocks).unwrap();
        let scales = bytes_tensor(&linear, &[rows, blocks], DType::F8E4M3);
        let scales = cuda::upload(&gpu, &scales).unwrap();
        let out = poisoned(&gpu, want.len());
        cuda::swizzle(&gpu, &scales, &out).unwrap();
        assert_same(&written(&out, want.len(), &what), &want, &what);

        let swizzled = bytes_tensor(&want, &[want.len()], DType::U8);
        let swizzled = cuda::upload(&gpu, &swizzled).unwrap();
        let out = poisoned(&gpu, linear.len());
        cuda::unswizzle(&gpu, &swizzled, rows, blocks, &out).unwrap();
        assert_same(&written(&out, linear.len(), &what), &linear, &what);
        expect_kind(
            cuda::unswizzle(&gpu, &swizzled, rows + 128, blocks, &out),
            ErrorKind::InvalidArgument,
            "swizzled scales of",
        );
    }
}

fn bytes(t: &Tensor) -> Vec<u8> {
    let mut out = vec![0; t.bytes()];
    transfer::copy_to_host(t, &mut out).unwrap();
    out
}

/// The same calls that work on host tensors work on tensors of the device, give tensors there, and the same bytes.
#[test]
fn operations_run_where_the_tensors_are() {
    let Some(gpu) = gpu() else { return };
    let cpu = Device::cpu(Some(2)).unwrap();
    let before = memory::usage(Tag::DeviceTensor).current;
    let (rows, cols) = (37, 96);
    for dtype in TYPES {
        let host =
            Tensor::from_f32(&values(30, 2 * rows * cols, dtype), &[2, rows, cols], dtype).unwrap();
        let x = transfer::copy(&host, Some(0)).unwrap();
        assert_eq!(x.place(), Place::Cuda(0));
        let there = tensors::device_of(&x, || unreachable!()).unwrap();
        let options = QuantizeOptions::default();
        for layout in [ScaleLayout::Linear, ScaleLayout::Swizzled] {
            let want = tensors::quantize(&cpu, &host, &options, layout).unwrap();
            let got = tensors::quantize(&there, &x, &options, layout).unwrap();
            assert_eq!(got.global, want.global);
            for (got, want) in [(&got.codes, &want.codes), (&got.scales, &want.scales)] {
                assert_eq!(got.place(), Place::Cuda(0));
                assert_eq!(got.dtype(), want.dtype());
                assert_eq!(got.shape().sizes(), want.shape().sizes());
                assert_same(&bytes(got), &bytes(want), "through the door");
            }
            let want = tensors::dequantize(&cpu, &want, dtype).unwrap();
            let back = tensors::dequantize(&there, &got, dtype).unwrap();
            assert_eq!(back.place(), Place::Cuda(0));
            assert_eq!(back.shape().sizes(), [2, rows, cols]);
            assert_same(&bytes(&back), &bytes(&want), "through the door and back");
            if layout == ScaleLayout::Linear {
                let swizzled = tensors::swizzle_scales(&got.scales).unwrap();
                let linear = tensors::unswizzle_scales(&swizzled, 2 * rows, cols / BLOCK).unwrap();
                assert_eq!(linear.place(), Place::Cuda(0));
                assert_same(&bytes(&linear), &bytes(&got.scales), "scales");
            }
            refused_on_the_processor(&cpu, &x, &got);
        }
        // What the device has no kernel for is refused, and not computed elsewhere.
        let f64s = Tensor::zeros(&[1, 16], DType::F64).unwrap();
        let f64s = transfer::copy(&f64s, Some(0)).unwrap();
        let e = tensors::quantize(&there, &f64s, &options, ScaleLayout::Linear).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        let e = tensors::quantize(&there, &host, &options, ScaleLayout::Linear).unwrap_err();
        assert!(e.message().contains("memory of the host"), "{e}");
    }
    gpu.synchronize().unwrap();
    assert_eq!(memory::usage(Tag::DeviceTensor).current, before);
}

/// Products of tensors of the device, of a stream of the program's own, give the bytes of those of host tensors there: also of
/// operands that begin at an odd address or have gaps.
#[test]
fn products_run_where_the_tensors_are() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let mut ws = Workspace::new();
    let options = QuantizeOptions::default();
    gpu.synchronize().unwrap();
    // Of the device whose context that made current on this thread.
    let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
    for (m, n, k) in [(1, 16, 32), (19, 40, 96), (133, 80, 256)] {
        let cpu = Device::cpu(Some(2)).unwrap();
        let quantized = |rows, seed, layout| {
            let x = Tensor::from_f32(&values(seed, rows * k, DType::F16), &[rows, k], DType::F16);
            tensors::quantize(&cpu, &x.unwrap(), &options, layout).unwrap()
        };
        let a = quantized(m, 80, ScaleLayout::Swizzled);
        let b = quantized(n, 81, ScaleLayout::Linear);
        let moved = |q: &Nvfp4Tensor, gap: usize| {
            let bytes = bytes(&q.codes);
            let (rows, row) = (bytes.len() / (k / 2), k / 2 + gap);
            let mut spread = vec![POISON; gap + rows * row];
            for (r, bytes) in bytes.chunks_exact(k / 2).enumerate() {
                spread[gap + r * row..][..k / 2].copy_from_slice(bytes);
            }
            let codes = bytes_tensor(&spread, &[spread.len()], DType::U8);
            let shape = Shape::strided(&[rows, k / 2], &[row, 1]).unwrap();
            Nvfp4Tensor {
                codes: cuda::upload(&gpu, &codes)
                    .unwrap()
                    .view(shape, gap)
                    .unwrap(),
                scales: cuda::upload(&gpu, &q.scales).unwrap(),
                ..q.clone()
            }
        };
        for dtype in TYPES {
            let want = tensors::scaled_mm(&device, &a, &b, dtype, &mut ws).unwrap();
            assert_eq!(want.place(), Place::Host);
            for gap in [0, 3] {
                let (a, b) = (moved(&a, gap), moved(&b, gap));
                // SAFETY: the stream lives longer.
                let order = unsafe { cuda::HostStream::new(0, stream.cast()) };
                let got = tensors::scaled_mm(&device, &a, &b, dtype, &mut ws).unwrap();
                assert_eq!(got.place(), Place::Cuda(0));
                assert_same(&bytes(&got), &bytes(&want), "a product");
                drop(order);
            }
        }
        let there = moved(&a, 0);
        let e = tensors::scaled_mm(&device, &there, &b, DType::F32, &mut ws).unwrap_err();
        assert!(e.message().contains("memory of the host"), "{e}");
    }
    gpu.synchronize().unwrap();
    // SAFETY: nothing uses it any more.
    unsafe { result::stream::destroy(stream) }.unwrap();
}

/// Functions of host memory refuse a tensor of the device, and say where it is.
fn refused_on_the_processor(cpu: &Device, x: &Tensor, q: &Nvfp4Tensor) {
    let mut ws = Workspace::new();
    let options = QuantizeOptions::default();
    let product = tensors::scaled_mm(cpu, q, q, DType::F32, &mut ws);
    let refused: [(ErrorKind, Result<()>); 7] = [
        (
            ErrorKind::Unsupported,
            tensors::quantize(cpu, x, &options, ScaleLayout::Linear).map(drop),
        ),
        (
            ErrorKind::Unsupported,
            tensors::dequantize(cpu, q, DType::F32).map(drop),
        ),
        (
            ErrorKind::Unsupported,
            tensors::quantize_nf4(x, 64).map(drop),
        ),
        (ErrorKind::Unsupported, tensors::weight(cpu, q).map(drop)),
        (
            ErrorKind::Unsupported,
            tensors::dense_weight(cpu, x).map(drop),
        ),
        // Of its operands and its result, which would be in host memory, one is out of place.
        (ErrorKind::InvalidArgument, product.map(drop)),
        (ErrorKind::Unsupported, x.to_f32().map(drop)),
    ];
    for (i, (kind, result)) in refused.into_iter().enumerate() {
        let e = result.unwrap_err();
        assert_eq!(e.kind(), kind, "{i}: {e}");
        assert!(e.message().contains("the memory of cuda:0"), "{i}: {e}");
    }
}

#[test]
fn elements_of_any_size_and_stride_are_copied() {
    let Some(gpu) = gpu() else { return };
    for &dtype in DType::ALL {
        let host = Tensor::build(&[7, 6, 10], dtype, |out| {
            for (i, b) in out.iter_mut().enumerate() {
                *b = random::bits(70, i as u64) as u8;
            }
            Ok(())
        })
        .unwrap();
        let there = transfer::copy(&host, Some(0)).unwrap();
        assert_same(&bytes(&there), &bytes(&host), "there and back");
        for (sizes, strides, offset) in [
            (vec![10, 6, 7], vec![1, 10, 60], 0),
            (vec![3, 4], vec![60, 2], 5),
            (vec![5, 7], vec![0, 60], 9),
            (
                vec![2, 1, 3, 1, 1, 2, 1, 2],
                vec![60, 9, 10, 1, 1, 3, 0, 1],
                1,
            ),
            (vec![0, 3], vec![1, 1], 0),
        ] {
            let shape = Shape::strided(&sizes, &strides).unwrap();
            let want = host.view(shape.clone(), offset).unwrap();
            let view = there.view(shape, offset).unwrap();
            assert_same(&bytes(&view), &bytes(&want), "a view");
            let copy = transfer::copy(&view, Some(0)).unwrap();
            assert!(copy.shape().is_contiguous() || want.bytes() == 0);
            assert_same(&bytes(&copy), &bytes(&want), "a copy there");
            let up = transfer::copy(&want, Some(0)).unwrap();
            assert_same(&bytes(&up), &bytes(&want), "a copy of a host's view");
        }
        let zeros = transfer::zeros(&[3, 5], dtype, Some(0)).unwrap();
        assert!(bytes(&zeros).iter().all(|&b| b == 0));
        let down = transfer::copy(&there, None).unwrap();
        assert_eq!(down.place(), Place::Host);
        assert_same(&bytes(&down), &bytes(&host), "to the host");
    }
    drop(gpu);
}

/// Memory of the host program on the device: its default stream, as it would use it.
struct Foreign {
    address: u64,
    bytes: usize,
}

impl Foreign {
    fn new(bytes: usize) -> Foreign {
        // SAFETY: a plain allocation in the device's context, which a tensor made before it has made current.
        let address = unsafe { result::malloc_sync(bytes) }.unwrap();
        Foreign { address, bytes }
    }

    /// Enqueues 32-bit words on the legacy default stream.
    fn fill(&self, word: u32) {
        let stream = std::ptr::without_provenance_mut(1);
        // SAFETY: within the allocation.
        unsafe { sys::cuMemsetD32Async(self.address, word, self.bytes / 4, stream) }
            .result()
            .unwrap();
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`.
        unsafe { result::free_sync(self.address) }.unwrap();
    }
}

#[test]
fn memory_of_the_host_program_is_used_and_given_back() {
    let Some(gpu) = gpu() else { return };
    gpu.synchronize().unwrap();
    let released = Arc::new(AtomicU32::new(0));
    let release = || -> Option<Release> {
        let count = released.clone();
        Some(Box::new(move || {
            count.fetch_add(1, Relaxed);
        }))
    };
    let foreign = Foreign::new(4096);
    foreign.fill(0x3f80_0000);
    let shape = Shape::contiguous(&[16, 64]).unwrap();
    let lend = |ordinal, address, release| {
        // SAFETY: the memory outlives the tensor; what is not the device's is refused.
        unsafe { transfer::lent(ordinal, address, shape.clone(), DType::F32, release) }
    };
    let t = lend(0, foreign.address, release()).unwrap();
    assert_eq!(t.place(), Place::Cuda(0));
    let exported: Box<DLManagedTensor> = t.clone().into_dlpack().unwrap();
    let device = exported.dl_tensor.device;
    assert_eq!((device.device_type, device.device_id), (2, 0));
    assert_eq!(exported.dl_tensor.data.addr() as u64, foreign.address);
    drop(t);
    // SAFETY: just made.
    let back = unsafe { transfer::from_dlpack(Box::into_raw(exported)) }.unwrap();
    assert_eq!(back.place(), Place::Cuda(0));
    let mut values = vec![0f32; 1024];
    transfer::copy_as_f32(&back, &mut values).unwrap();
    assert!(values.iter().all(|&v| v == 1.0));
    assert_eq!(released.load(Relaxed), 0);
    drop(back);
    assert_eq!(released.load(Relaxed), 1);

    // Host memory, page-locked host memory, and no device.
    let here = vec![0f32; 1024];
    let e = lend(0, here.as_ptr().addr() as u64, release()).unwrap_err();
    assert!(e.kind() == ErrorKind::InvalidArgument, "{e}");
    let mut pinned = cuda::Pinned::new(&gpu, Tag::Scratch, 4096).unwrap();
    let e = lend(0, pinned.bytes_mut().as_ptr().addr() as u64, release()).unwrap_err();
    assert!(e.message().contains("host tensor"), "{e}");
    let e = lend(99, foreign.address, release()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::DeviceUnavailable);
    expect_kind(
        lend(0, 0, release()),
        ErrorKind::InvalidArgument,
        "the data pointer",
    );
    assert_eq!(released.load(Relaxed), 1);
}

/// What the host program enqueues on the default stream before a call is seen by it, and what it enqueues after the call comes
/// after the call's work, though both streams are busy for milliseconds.
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

#[test]
fn tensors_move_to_managed_memory_and_back() {
    let Some(gpu) = gpu() else { return };
    let host = Tensor::from_f32(&values(80, 8 * 64, DType::F16), &[8, 64], DType::F16).unwrap();
    if let Err(e) = transfer::check_managed(0) {
        println!("SKIPPED managed memory: {e}");
        let e = transfer::to_managed(&host, 0, None, false).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        return;
    }
    let before = memory::usage(Tag::DeviceTensor).current;
    let there = transfer::copy(&host, Some(0)).unwrap();
    let shape = Shape::strided(&[64, 8], &[1, 64]).unwrap();
    for source in [
        host.clone(),
        there.clone(),
        host.view(shape.clone(), 0).unwrap(),
        there.view(shape, 0).unwrap(),
    ] {
        for (prefetch, read_mostly) in [(None, false), (Some(0), false), (Some(0), true)] {
            let t = transfer::to_managed(&source, 0, prefetch, read_mostly).unwrap();
            assert_eq!(t.place(), Place::Managed(0));
            assert_eq!(t.dtype(), source.dtype());
            assert_eq!(t.shape().sizes(), source.shape().sizes());
            // SAFETY: managed memory of as many bytes, which nothing on the device uses now.
            let direct = unsafe { std::slice::from_raw_parts(t.data(), t.bytes()) };
            assert_same(direct, &bytes(&source), "read by the host");
            let again = transfer::to_managed(&t, 0, prefetch, read_mostly).unwrap();
            assert_eq!(again.data(), t.data());
            transfer::prefetch(&t, Some(0)).unwrap();
            transfer::prefetch(&t, None).unwrap();
            assert_same(&bytes(&t), &bytes(&source), "copied to the host");
            assert_eq!(cuda::find(0, t.data().addr() as u64).unwrap().0, t.place());
            let exported: Box<DLManagedTensor> = t.clone().into_dlpack().unwrap();
            // SAFETY: just made.
            let back = unsafe { transfer::from_dlpack(Box::into_raw(exported)) }.unwrap();
            assert_eq!(back.place(), Place::Managed(0));
            if source.shape().sizes()[1] == 64 {
                let device = Device::Cuda(gpu.clone());
                let cpu = Device::cpu(Some(1)).unwrap();
                let options = QuantizeOptions::default();
                let got = tensors::quantize(&device, &t, &options, ScaleLayout::Linear).unwrap();
                let want = tensors::quantize(&cpu, &host, &options, ScaleLayout::Linear).unwrap();
                assert_same(&bytes(&got.codes), &bytes(&want.codes), "of managed memory");
            }
        }
        expect_kind(
            transfer::prefetch(&source, Some(0)),
            ErrorKind::InvalidArgument,
            "only one in managed memory can be moved",
        );
    }
    assert_eq!(
        transfer::by_policy(&host, 0, true).unwrap().place(),
        Place::Managed(0)
    );
    transfer::set_managed_policy(ManagedPolicy::Disabled);
    let kept = transfer::by_policy(&host, 0, true).unwrap();
    transfer::set_managed_policy(ManagedPolicy::default());
    assert_eq!(kept.data(), host.data());

    // Never more than there is room for, and under the budget.
    let e = ManagedBuffer::zeroed(&gpu, Tag::DeviceTensor, 1 << 46).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::OutOfMemory);
    memory::set_budget(Some(memory::total().current + 100));
    let e = ManagedBuffer::zeroed(&gpu, Tag::DeviceTensor, 101).unwrap_err();
    memory::set_budget(None);
    assert_eq!(e.kind(), ErrorKind::OverBudget);
    drop(there);
    gpu.synchronize().unwrap();
    assert_eq!(memory::usage(Tag::DeviceTensor).current, before);
}

/// A tensor whose global scale is the smallest that there is, and one of zeros.
#[test]
fn the_ends_of_the_range_of_f32_are_quantized() {
    let Some(gpu) = gpu() else { return };
    for (scale, dtype) in [
        (f32::from_bits(1), DType::F32),
        (1e-38, DType::F32),
        (1e-38, DType::BF16),
        (6e-8, DType::F16),
        (3e38, DType::F32),
        (3e38, DType::BF16),
        (60000.0, DType::F16),
        (0.0, DType::F32),
        (-0.0, DType::BF16),
    ] {
        let values: Vec<f32> = normal(90, 6 * 64)
            .iter()
            .map(|v| in_type(v / 3.0 * scale, dtype))
            .collect();
        let host = Tensor::from_f32(&values, &[6, 64], dtype).unwrap();
        let x = cuda::upload(&gpu, &host).unwrap();
        for options in all_options(1) {
            check_quantize(&gpu, &x, &values, &options);
            let amax = nvfp4::amax(&values, 0, NonFinite::Error).unwrap();
            assert!(global_scale(amax, &options) > 0.0);
        }
    }
}

/// Copies of host tensors in the memory of device 0: with gaps between rows and at addresses of no alignment, if `apart`.
fn there(host: &Tensor, apart: bool) -> Tensor {
    if !apart {
        return transfer::copy(host, Some(0)).unwrap();
    }
    let (rows, cols) = host.shape().matrix();
    let (stride, offset, element) = (cols + 13, 5, host.dtype().bytes());
    let mut packed = vec![0; host.bytes()];
    host.copy_to(&mut packed).unwrap();
    // Around the values stands what would be seen: NaN, if it is a scale or a float.
    let whole = Tensor::build(&[rows * stride + offset], host.dtype(), |out| {
        out.fill(0xff);
        for row in 0..rows {
            out[(offset + row * stride) * element..][..cols * element]
                .copy_from_slice(&packed[row * cols * element..][..cols * element]);
        }
        Ok(())
    })
    .unwrap();
    let gapped = Shape::contiguous(&host.shape().with_last(stride)).unwrap();
    let shape = Shape::strided(host.shape().sizes(), gapped.strides()).unwrap();
    let whole = transfer::copy(&whole, Some(0)).unwrap();
    whole.view(shape, offset).unwrap()
}

fn parts_there(q: &Nvfp4Tensor, apart: bool) -> Nvfp4Tensor {
    Nvfp4Tensor {
        codes: there(&q.codes, apart),
        scales: there(&q.scales, apart),
        ..q.clone()
    }
}

/// The same in managed memory; nothing, visibly, where there is none.
fn parts_managed(q: &Nvfp4Tensor) -> Option<Nvfp4Tensor> {
    if let Err(e) = transfer::check_managed(0) {
        println!("SKIPPED managed memory: {e}");
        return None;
    }
    let managed = |t: &Tensor| transfer::to_managed(t, 0, Some(0), true).unwrap();
    Some(Nvfp4Tensor {
        codes: managed(&q.codes),
        scales: managed(&q.scales),
        ..q.clone()
    })
}

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

#[test]
fn operands_of_a_product_that_do_not_go_together_are_refused() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let mut ws = Workspace::new();
    let host = Quantized::new(&gpu, 20, 96, ScaleLayout::Linear, 1).tensor();
    let on_gpu = parts_there(&host, false);
    let mut refused = |a: &Nvfp4Tensor, b: &Nvfp4Tensor, dtype, kind, said: &[&str]| {
        let e = tensors::scaled_mm(&device, a, b, dtype, &mut ws).unwrap_err();
        assert_eq!(e.kind(), kind, "{e}");
        for said in said {
            assert!(e.message().contains(said), "'{said}' is not in '{e}'");
        }
    };
    let (invalid, unsupported) = (ErrorKind::InvalidArgument, ErrorKind::Unsupported);
    let both = ["the memory of cuda:0", "the memory of the host"];
    refused(&on_gpu, &host, DType::F32, invalid, &both);
    refused(&host, &on_gpu, DType::F32, invalid, &both);
    let split = Nvfp4Tensor {
        scales: host.scales.clone(),
        ..on_gpu.clone()
    };
    refused(&on_gpu, &split, DType::F32, invalid, &both);
    refused(&on_gpu, &on_gpu, DType::F64, unsupported, &["float64"]);
    refused(&on_gpu, &on_gpu, DType::I32, invalid, &["int32"]);
    let floats = Nvfp4Tensor {
        codes: there(&Tensor::zeros(&[20, 48], DType::F16).unwrap(), false),
        ..on_gpu.clone()
    };
    refused(&floats, &on_gpu, DType::F32, invalid, &["float16"]);
    let other = Quantized::new(&gpu, 20, 112, ScaleLayout::Linear, 2).tensor();
    let other = parts_there(&other, false);
    refused(&on_gpu, &other, DType::F32, invalid, &["K must be equal"]);
    // Another device than that of the tensors.
    match cuda::count().unwrap() {
        0 | 1 => println!("SKIPPED a second device: there is one"),
        _ => {
            let second = Device::cuda(1).unwrap();
            let e = tensors::scaled_mm(&second, &on_gpu, &on_gpu, DType::F32, &mut ws);
            let e = e.unwrap_err();
            assert!(
                e.kind() == invalid && e.message().contains("cuda:1 ("),
                "{e}"
            );
            assert!(e.message().contains("the memory of cuda:0"), "{e}");
            let far = transfer::copy(&on_gpu.codes, Some(1)).unwrap();
            let far = Nvfp4Tensor {
                codes: far,
                ..on_gpu.clone()
            };
            let e = tensors::scaled_mm(&device, &on_gpu, &far, DType::F32, &mut ws);
            assert!(e.unwrap_err().message().contains("the memory of cuda:1"));
        }
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

/// Every byte at every place of a word and at the ends of rows, and padding that may be anything.
#[test]
fn scales_that_are_none_are_found() {
    let Some(gpu) = gpu() else { return };
    let mut ws = Workspace::new();
    let device = Device::Cuda(gpu.clone());
    for layout in [ScaleLayout::Linear, ScaleLayout::Swizzled] {
        for (rows, blocks) in [(1, 1), (3, 5), (2, 8), (130, 6)] {
            let place = |row: usize, block: usize| match layout {
                ScaleLayout::Linear => row * blocks + block,
                ScaleLayout::Swizzled => swizzle::offset(row, block, blocks),
            };
            let len = layout.len(rows, blocks).unwrap();
            let mut good = vec![0xff; len];
            for i in 0..rows * blocks {
                good[place(i / blocks, i % blocks)] = (i % 0x7f) as u8;
            }
            let codes = poisoned(&gpu, rows * blocks * 8);
            let look = |scales: &[u8]| {
                let scales = upload(&gpu, scales);
                let k = blocks * BLOCK;
                let q = cuda::Operand::new(&codes, &scales, layout, rows, k, 1.0).unwrap();
                cuda::wait_for_scales(&gpu, &q)
            };
            look(&good).unwrap();
            let some = [0, 1, blocks - 1, rows * blocks / 2, rows * blocks - 1];
            for i in some.map(|i| i.min(rows * blocks - 1)) {
                let at = place(i / blocks, i % blocks);
                for byte in 0..=0xffu8 {
                    let mut bytes = good.clone();
                    bytes[at] = byte;
                    let what = format!("{layout:?} [{rows}, {blocks}], scale {i} is {byte:#04x}");
                    let looked = look(&bytes);
                    assert_eq!(looked.is_ok(), byte < 0x7f, "{what}");
                    if let Err(e) = looked {
                        let (row, block) = (i / blocks, i % blocks);
                        let said = format!("block {block} in row {row} has the byte {byte:#04x}");
                        assert!(e.message().contains(&said), "{what}: {e}");
                    }
                }
            }

            // Through products and weights, the error names the place.
            let (row, block) = (rows - 1, blocks / 2);
            let sizes = match layout {
                ScaleLayout::Linear => vec![rows, blocks],
                ScaleLayout::Swizzled => vec![len],
            };
            let tensor = |scales: &[u8]| Nvfp4Tensor {
                codes: there(
                    &Tensor::zeros(&[rows, blocks * 8], DType::U8).unwrap(),
                    false,
                ),
                scales: there(&bytes_tensor(scales, &sizes, DType::F8E4M3), false),
                global: 1.0,
                layout,
            };
            let fine = tensor(&good);
            for byte in [0x7f, 0x80, 0xff] {
                let mut bytes = good.clone();
                bytes[place(row, block)] = byte;
                let bad = tensor(&bytes);
                let said = format!("block {block} in row {row} has the byte {byte:#04x}");
                let decoded = Backend::DequantMatmul;
                let decoded = tensors::weight_for(&device, &bad, decoded, DType::F32);
                let refused = [
                    tensors::weight(&device, &bad).unwrap_err(),
                    decoded.unwrap_err(),
                ];
                for e in refused {
                    assert_eq!(e.kind(), ErrorKind::InvalidArgument);
                    assert!(e.message().contains(&said), "{e}");
                }
                drop(tensors::dequantize(&device, &bad, DType::F32).unwrap());
                let e = found(&gpu);
                assert!(e.message().contains(&said), "{e}");
                for (a, b, which) in [
                    (&bad, &fine, "first"),
                    (&fine, &bad, "second"),
                    (&bad, &bad, "first"),
                ] {
                    drop(tensors::scaled_mm(&device, a, b, DType::F16, &mut ws).unwrap());
                    let e = found(&gpu);
                    let said = format!("the {which} matrix: the scale of {said}");
                    assert!(e.message().contains(&said), "{e} is not: {said}");
                }
            }
        }
    }
}

/// What a weight holds on the device.
fn held(weight: &Linear) -> Vec<u8> {
    let values = weight.matrix().unwrap().values();
    let mut bytes = vec![0; values.bytes()];
    values.read(0, &mut bytes).unwrap();
    bytes
}

const DENSE: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

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
                for dense in DENSE {
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
            let e = tensors::dense_weight(&device, &w).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
            assert!(e.message().contains("row 650, column 77 is NaN"), "{e}");
        }
    }
    // Values that float16 has no room for, wherever they come from; and a scale that is NaN.
    let mut q = Quantized::new(&gpu, 4, 32, ScaleLayout::Linear, 3).tensor();
    q.codes = bytes_tensor(&[0x77; 64], &[4, 16], DType::U8);
    q.scales = bytes_tensor(&[0x38; 8], &[4, 2], DType::U8);
    q.global = 20_000.0;
    let decoded = |device: &Device, q: &Nvfp4Tensor, dense| {
        tensors::weight_for(device, q, Backend::DequantMatmul, dense)
    };
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

    // What is not where it would have to be, or not of a type that there is.
    let (here, at) = (q.clone(), parts_there(&q, false));
    let split = Nvfp4Tensor {
        scales: here.scales.clone(),
        ..at.clone()
    };
    for backend in [Backend::Nvfp4Kernel, Backend::DequantMatmul] {
        let e = tensors::weight_for(&device, &split, backend, DType::F32).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        assert!(e.message().contains("the memory of the host"), "{e}");
        assert!(e.message().contains("the memory of cuda:0"), "{e}");
        let e = tensors::weight_for(&cpu, &at, backend, DType::F32).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
    }
    let f64s = there(&Tensor::zeros(&[4, 32], DType::F64).unwrap(), false);
    let e = tensors::dense_weight(&device, &f64s).unwrap_err();
    assert!(
        e.kind() == ErrorKind::Unsupported && e.message().contains("float64"),
        "{e}"
    );
    let nf4 = Nf4Tensor {
        codes: at.codes.clone(),
        absmax: there(&Tensor::zeros(&[2], DType::F32).unwrap(), false),
        map: None,
        block: 64,
    };
    let backend = Backend::DequantMatmul;
    let e = tensors::nf4_weight_for(&device, &nf4, (4, 32), backend, DType::F32);
    assert_eq!(e.unwrap_err().kind(), ErrorKind::Unsupported);
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
        let mut weights = vec![(
            tensors::weight(&device, &q).unwrap(),
            tensors::weight(&cpu, &q).unwrap(),
        )];
        for dense in DENSE {
            let make = |device| tensors::weight_for(device, &q, Backend::DequantMatmul, dense);
            weights.push((make(&device).unwrap(), make(&cpu).unwrap()));
        }
        if m > 1000 {
            weights.truncate(1);
        }
        for dtype in TYPES {
            if m > 1000 && dtype != DType::F32 {
                continue;
            }
            let x = activations(600 + i as u64, m, k, dtype);
            let host = Tensor::from_f32(&x, &[m, k], dtype).unwrap();
            let xs = [there(&host, false), there(&host, true)];
            for (on_gpu, on_cpu) in &weights {
                let what = format!(
                    "{} [{m}, {k}] x {} [{n}, {k}]",
                    dtype.name(),
                    on_gpu.kind().name()
                );
                let mut product = |device, x: &Tensor, w, out| {
                    tensors::linear(device, x, w, Activations::Exact, out, &mut ws).unwrap()
                };
                for out in RESULTS {
                    let want = bytes(&product(&device, &host, on_gpu, out));
                    for x in &xs {
                        let got = product(&device, x, on_gpu, out);
                        assert_eq!(got.place(), Place::Cuda(0), "{what}");
                        assert_eq!((got.shape().sizes(), got.dtype()), (&[m, n][..], out));
                        let what = format!("{what} in {}", out.name());
                        assert_same(&bytes(&got), &want, &what);
                    }
                }
                let mut got = vec![0f32; m * n];
                let on_device = product(&device, &xs[0], on_gpu, DType::F32);
                transfer::copy_as_f32(&on_device, &mut got).unwrap();
                let oracle = product(&cpu, &host, on_cpu, DType::F32).to_f32().unwrap();
                // By rows, as one of them would hide the others.
                for (row, (got, want)) in got.chunks(n).zip(oracle.chunks(n)).enumerate() {
                    let want: Vec<f64> = want.iter().map(|&v| f64::from(v)).collect();
                    if n >= 33 && want.iter().any(|&v| v != 0.0) {
                        let bar = match on_gpu.kind().name() {
                            "bf16" => 8e-3,
                            _ => 1.5e-3,
                        };
                        assert_close(got, &want, bar, &format!("{what}, row {row}"));
                    }
                }
            }
        }
    }
    gpu.synchronize().unwrap();
    let after = [Tag::DeviceTensor, Tag::DeviceScratch].map(|t| memory::usage(t).current);
    assert_eq!(after, before);
}

/// Inputs of several dimensions, of uneven strides, of none, in managed memory; and what is refused.
#[test]
fn inputs_of_a_product_are_followed_or_refused() {
    let Some(gpu) = gpu() else { return };
    let (device, cpu) = (Device::Cuda(gpu.clone()), Device::cpu(Some(2)).unwrap());
    let mut ws = Workspace::new();
    let q = Quantized::new(&gpu, 40, 64, ScaleLayout::Swizzled, 7).tensor();
    let weight = tensors::weight(&device, &q).unwrap();
    let mut product = |device: &Device, x: &Tensor, dtype| {
        tensors::linear(device, x, &weight, Activations::Exact, dtype, &mut ws)
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
        let want = product(
            &device,
            &host.view(shape.clone(), offset).unwrap(),
            DType::F16,
        );
        let got = product(&device, &whole.view(shape, offset).unwrap(), DType::F16).unwrap();
        assert_eq!(got.place(), Place::Cuda(0));
        let want = want.unwrap();
        assert_eq!(got.shape().sizes(), want.shape().sizes());
        assert_same(
            &bytes(&got),
            &bytes(&want),
            &format!("{sizes:?} {strides:?}"),
        );
    }
    let some = host
        .view(Shape::strided(&[5, 64], &[208, 1]).unwrap(), 0)
        .unwrap();
    if transfer::check_managed(0).is_ok() {
        let managed = transfer::to_managed(&some, 0, None, false).unwrap();
        let want = product(&device, &some, DType::F32).unwrap();
        let got = product(&device, &managed, DType::F32).unwrap();
        assert_eq!(got.place(), Place::Cuda(0));
        assert_same(&bytes(&got), &bytes(&want), "of managed memory");
    } else {
        println!("SKIPPED a product of managed memory: there is none");
    }
    // Values that are no numbers make their own row so, and no other.
    let mut odd = vec![1f32; 3 * 64];
    (odd[64], odd[2 * 64]) = (f32::NAN, f32::INFINITY);
    let odd = Tensor::from_f32(&odd, &[3, 64], DType::F32).unwrap();
    let mut out = vec![0f32; 3 * 40];
    let got = product(&device, &there(&odd, false), DType::F32).unwrap();
    transfer::copy_as_f32(&got, &mut out).unwrap();
    assert!(out[..40].iter().all(|v| v.is_finite()));
    assert!(out[40..].iter().any(|v| !v.is_finite()));

    let some = there(&some, false);
    let mut refused = |device: &Device, x: &Tensor, dtype, kind, said: &[&str]| {
        let e = product(device, x, dtype).unwrap_err();
        assert_eq!(e.kind(), kind, "{e}");
        for said in said {
            assert!(e.message().contains(said), "'{said}' is not in '{e}'");
        }
    };
    let (invalid, unsupported) = (ErrorKind::InvalidArgument, ErrorKind::Unsupported);
    let typed = |sizes: &[usize], dtype| there(&Tensor::zeros(sizes, dtype).unwrap(), false);
    refused(
        &device,
        &typed(&[2, 64], DType::I32),
        DType::F32,
        invalid,
        &["int32"],
    );
    let f64s = typed(&[2, 64], DType::F64);
    refused(&device, &f64s, DType::F32, unsupported, &["float64"]);
    refused(&device, &some, DType::F64, unsupported, &["float64"]);
    let wide = typed(&[2, 80], DType::F16);
    refused(&device, &wide, DType::F16, invalid, &["K = 80"]);
    let both = ["the memory of cuda:0", "cpu ("];
    refused(&cpu, &some, DType::F32, invalid, &both);
    let e = tensors::linear(
        &device,
        &some,
        &weight,
        Activations::Int8,
        DType::F32,
        &mut Workspace::new(),
    );
    assert_eq!(e.unwrap_err().kind(), unsupported);
    let on_cpu = tensors::weight(&cpu, &q).unwrap();
    let mut ws = Workspace::new();
    let e = tensors::linear(
        &device,
        &some,
        &on_cpu,
        Activations::Exact,
        DType::F32,
        &mut ws,
    );
    assert_eq!(e.unwrap_err().kind(), invalid);
}

/// Rows on their way in and out, into poisoned outputs that are longer than needed.
#[test]
fn rows_are_halved_and_scaled_within_their_outputs() {
    let Some(gpu) = gpu() else { return };
    for (rows, k) in [(1, 16), (7, 48), (3, 4112)] {
        for dtype in TYPES {
            let x = activations(40, rows + 2, k, dtype);
            let host = Tensor::from_f32(&x, &[rows + 2, k], dtype).unwrap();
            let x = &x[k..(rows + 1) * k];
            let input = there(&host, true);
            let input = FloatRows::new(&gpu, &input).unwrap();
            let (halves, factors) = (poisoned(&gpu, rows * k * 2), poisoned(&gpu, rows * 4));
            input.halves(1, rows, &halves, &factors).unwrap();
            expect_kind(
                input.halves(3, rows, &halves, &factors),
                ErrorKind::Internal,
                "rows from 3 on",
            );
            let mut back = vec![0f32; rows * k];
            let bytes = written(&halves, rows * k * 2, "halves");
            DType::F16.to_f32(&bytes, &mut back).unwrap();
            let mut powers = vec![0f32; rows];
            let bytes = written(&factors, rows * 4, "factors");
            DType::F32.to_f32(&bytes, &mut powers).unwrap();
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
                assert_eq!(
                    power.to_bits() & 0x807f_ffff,
                    0,
                    "{power:e} is no power of two"
                );
            }
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

/// Products see what the host program enqueued before the call, and what it enqueues after the call comes after them.
#[test]
fn products_keep_the_order_of_the_default_stream() {
    let Some(gpu) = gpu() else { return };
    gpu.synchronize().unwrap();
    let device = Device::Cuda(gpu.clone());
    let mut ws = Workspace::new();
    let (m, n, k) = (2048, 4096, 4096);
    let (floats, codes) = (Foreign::new(m * k * 4), Foreign::new(n * k / 2));
    let lend = |foreign: &Foreign, sizes: &[usize], dtype| {
        let shape = Shape::contiguous(sizes).unwrap();
        // SAFETY: the memory outlives the tensor.
        unsafe { transfer::lent(0, foreign.address, shape, dtype, None) }.unwrap()
    };
    let x = lend(&floats, &[m, k], DType::F32);
    let scales = bytes_tensor(&vec![0x38; n * k / 16], &[n, k / 16], DType::U8);
    let q = Nvfp4Tensor {
        codes: lend(&codes, &[n, k / 2], DType::U8),
        scales: there(&scales, false),
        global: 1.0,
        layout: ScaleLayout::Linear,
    };
    let rows = q
        .codes
        .view(Shape::contiguous(&[64, k / 2]).unwrap(), 0)
        .unwrap();
    let scale_rows = q
        .scales
        .view(Shape::contiguous(&[64, k / 16]).unwrap(), 0)
        .unwrap();
    let a = Nvfp4Tensor {
        codes: rows,
        scales: scale_rows,
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
            tensors::linear(
                &device,
                &x,
                &weight,
                Activations::Exact,
                DType::F32,
                &mut ws,
            )
            .unwrap()
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

/// Calls that check what they are given come back while the device is busy with what was there before, and what they give is right.
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

/// What is wrong in calls on their way is the error of the first later call that waits, which names the first of them, and it is
/// reported once.
#[test]
fn what_the_device_finds_wrong_is_the_error_of_a_later_call() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let (good, bad) = (ones(40, 96, None), ones(40, 96, Some(7 * 96 + 5)));
    let quantize = |x: &Tensor| tensors::quantize(&device, x, &LEGACY, ScaleLayout::Linear);
    drop(quantize(&good).unwrap());
    transfer::synchronize(0).unwrap();
    let busy = Busy::new();
    let wrong = "the value at index 677 (row 7, column 5) is NaN";

    // By a copy to the host, though that is of another result.
    busy.start();
    let right = quantize(&good).unwrap();
    drop(quantize(&bad).unwrap());
    let after = quantize(&good).unwrap();
    busy.is_at_work();
    let mut out = vec![0; after.codes.bytes()];
    let e = transfer::copy_to_host(&after.codes, &mut out).unwrap_err();
    assert!(
        e.message().contains(wrong) && !e.message().contains("too"),
        "{e}"
    );
    transfer::copy_to_host(&after.codes, &mut out).unwrap();
    assert_same(
        &bytes(&right.codes),
        &out,
        "calls around the one that failed",
    );

    // By the wait, several at once.
    busy.start();
    for x in [&good, &bad, &good, &bad, &bad] {
        drop(quantize(x).unwrap());
    }
    let e = transfer::synchronize(0).unwrap_err();
    assert!(
        e.message().contains(wrong) && e.message().contains("2 other calls failed too"),
        "{e}"
    );
    transfer::synchronize(0).unwrap();

    // By a call that does not wait, once the device has told of it; that call has done nothing, and the next one works.
    drop(quantize(&bad).unwrap());
    gpu.synchronize().unwrap();
    let e = quantize(&good).unwrap_err();
    assert!(e.message().contains(wrong), "{e}");
    drop(quantize(&good).unwrap());

    // By calls that wait for something of their own: a global scale, a weight, a copy to the device.
    let weight = quantize(&good).unwrap();
    let two = QuantizeOptions {
        levels: Levels::Two,
        ..LEGACY
    };
    let host = Tensor::from_f32(&[1.0; 32], &[32], DType::F32).unwrap();
    let waiting: [&dyn Fn() -> Result<()>; 3] = [
        &|| tensors::quantize(&device, &good, &two, ScaleLayout::Linear).map(drop),
        &|| tensors::weight(&device, &weight).map(drop),
        &|| transfer::copy(&host, Some(0)).map(drop),
    ];
    for (i, call) in waiting.into_iter().enumerate() {
        call().unwrap();
        busy.start();
        drop(quantize(&bad).unwrap());
        let e = call().unwrap_err();
        assert!(e.message().contains(wrong), "{i}: {e}");
        call().unwrap();
    }
    // What is kept is right.
    let kept = NVFP4::ops::ste::EvalWeights::new();
    assert!(
        kept.weight(&device, &bad)
            .unwrap_err()
            .message()
            .contains(wrong)
    );
    assert!(kept.weight(&device, &bad).is_err());
    kept.weight(&device, &good).unwrap();
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
