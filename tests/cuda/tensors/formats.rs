//! Quantization, decoding and the order of scales on the device, with the bits of the processor.

use std::sync::Arc;

use half::{bf16, f16};

use NVFP4::base::{Error, ErrorKind};
use NVFP4::cuda::{self, Gpu};
use NVFP4::format::nvfp4::{
    self, BLOCK, Levels, NonFinite, Nvfp4, QuantizeOptions, Recipe, global_scale,
};
use NVFP4::format::{Rounding, e2m1, e4m3, random, swizzle};
use NVFP4::tensor::{DType, Shape, Tensor};

use super::{TYPES, assert_same, bytes_tensor, found, in_type, poisoned, values, written};
use crate::common::expect_kind;
use crate::support::{gpu, normal};

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
            // Values far below half of the smallest step are zero, like their neighbours.
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

/// Blocks of values within a few units in the last place of every threshold, under every scale and a global scale.
fn beside_thresholds(seed: u64, global: f32) -> Vec<f32> {
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
                if random::bits(seed, i as u64) & 1 != 0 {
                    *v = -*v;
                }
            }
            values.extend(block);
        }
    }
    values
}

/// Values whose quotients vanish, negative ones among them, under the largest scale.
fn vanishing() -> Vec<f32> {
    let mut values = vec![0f32; 64];
    values[0] = 2688.0;
    for (i, v) in values[1..].iter_mut().enumerate() {
        *v = -f32::from_bits(i as u32 * 8);
    }
    values[16] = 2688.0;
    for (i, v) in values[17..32].iter_mut().enumerate() {
        *v = -f32::from_bits(224 - 7 + i as u32);
    }
    values
}

/// Quantizes blocks `x`, whose values are `values`, under a global scale that the host gives.
#[track_caller]
fn check_given_global(
    gpu: &Arc<Gpu>,
    x: &Tensor,
    values: &[f32],
    global: f32,
    options: &QuantizeOptions,
) {
    let what = format!("global {global:e}, {:?}", options.rounding);
    let rows = values.len() / BLOCK;
    let (mut want_codes, mut want_scales) = (vec![0; values.len() / 2], vec![0; rows]);
    nvfp4::quantize_rows(
        values,
        BLOCK,
        0,
        global,
        options,
        &mut want_codes,
        &mut want_scales,
    )
    .unwrap();
    let (codes, scales) = (poisoned(gpu, want_codes.len()), poisoned(gpu, rows));
    let used = cuda::quantize(gpu, x, options, Some(global), false, &codes, &scales).unwrap();
    assert_eq!(used, global);
    assert_same(&written(&scales, rows, &what), &want_scales, &what);
    let got = written(&codes, want_codes.len(), &what);
    assert_same(&got, &want_codes, &what);
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
        let values = beside_thresholds(n as u64, global);
        let rows = values.len() / BLOCK;
        let host = Tensor::from_f32(&values, &[rows, BLOCK], DType::F32).unwrap();
        let x = cuda::upload(&gpu, &host).unwrap();
        for rounding in [Rounding::NearestEven, Rounding::HalfAway] {
            let options = QuantizeOptions {
                rounding,
                ..QuantizeOptions::default()
            };
            check_given_global(&gpu, &x, &values, global, &options);
            if global == 1.0 {
                let legacy = QuantizeOptions {
                    levels: Levels::Legacy,
                    ..options
                };
                check_quantize(&gpu, &x, &values, &legacy);
            }
        }
    }
    let values = vanishing();
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
