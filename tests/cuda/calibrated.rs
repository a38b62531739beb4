//! Searches by second moments on a GPU, against f64 and the CPU.

use std::sync::Arc;

use crate::common::expect_kind;
use crate::support::{gpu, normal};
use NVFP4::base::ErrorKind;
use NVFP4::cpu::Cpu;
use NVFP4::format::nvfp4::{Nvfp4, QuantizeOptions, Recipe};
use NVFP4::model::Device;
use NVFP4::ops::calibrated::{FullMoments, SearchBy};
use NVFP4::ops::{Array, Slice};

/// More than one group of blocks, of which the last is not whole; and more than one panel of the factorization.
const COLS: usize = 16 * 21;
/// More rows than a block of threads has.
const ROWS: usize = 70;

/// Sums of products of inputs that depend on each other; what is below the diagonal is wrong.
fn sums(seed: u64) -> Vec<f32> {
    const INPUTS: usize = 600;
    let (own, common) = (normal(seed, INPUTS * COLS), normal(7, 8 * COLS));
    let factors = normal(seed + 1, INPUTS * 8);
    let x = |row: usize, col: usize| -> f32 {
        let shared = (0..8).map(|i| factors[row * 8 + i] * common[i * COLS + col]);
        own[row * COLS + col] * 0.4 + shared.sum::<f32>() * (1.0 + (col % 5) as f32)
    };
    let x: Vec<f32> = (0..INPUTS * COLS).map(|i| x(i / COLS, i % COLS)).collect();
    let mut sums = vec![0f32; COLS * COLS];
    for row in x.chunks_exact(COLS) {
        for (i, a) in row.iter().enumerate() {
            let of_row = &mut sums[i * COLS..][..COLS];
            let later = of_row.iter_mut().zip(row).skip(i);
            later.for_each(|(sum, b)| *sum += a * b);
        }
    }
    for row in 1..COLS {
        sums[row * COLS..row * COLS + row].fill(1e6);
    }
    sums
}

fn moments(device: &Device, host: &Arc<Cpu>, seen: &[f32], kept: &[f32]) -> FullMoments {
    try_moments(device, host, seen, kept).unwrap()
}

fn try_moments(
    device: &Device,
    host: &Arc<Cpu>,
    seen: &[f32],
    kept: &[f32],
) -> NVFP4::base::Result<FullMoments> {
    let upload = |values: &[f32]| {
        let mut array = Array::zeroed(device, values.len()).unwrap();
        array.all_mut().copy_from(Slice::Host(values)).unwrap();
        array
    };
    FullMoments::new(device, host, [upload(seen), upload(kept)], COLS, 0.01)
}

/// The sum over rows of `e^T M e` in f64, of a matrix or of zeros.
fn exact(weights: &[f32], sums: &[f32], matrix: Option<&Nvfp4>) -> f64 {
    let values = matrix.map(|m| m.dequantize().unwrap());
    let error = |i: usize| f64::from(weights[i]) - values.as_ref().map_or(0.0, |v| f64::from(v[i]));
    let of_row = |row: usize| -> f64 {
        let e: Vec<f64> = (0..COLS).map(|col| error(row * COLS + col)).collect();
        let pairs = (0..COLS).flat_map(|i| (0..COLS).map(move |j| (i, j)));
        pairs
            .map(|(i, j)| e[i] * e[j] * f64::from(sums[i.min(j) * COLS + i.max(j)]))
            .sum()
    };
    (0..ROWS).map(of_row).sum()
}

#[test]
fn searches_on_a_gpu_agree_with_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let host = Cpu::new(Some(2)).unwrap();
    let (seen, kept) = (sums(1), sums(3));
    let weights: Vec<f32> = normal(5, ROWS * COLS).iter().map(|w| w * 0.05).collect();
    let sweep = QuantizeOptions {
        recipe: Recipe::Sweep,
        ..QuantizeOptions::default()
    };
    let global = 3e-4;
    let errors = |device: &Device| -> Vec<f64> {
        let moments = moments(device, &host, &seen, &kept);
        assert!(moments.has_factor());
        let rows = moments.rows(&weights[..]).unwrap();
        let mut errors = vec![moments.error(&rows, None).unwrap()];
        let whole = exact(&weights, &kept, None);
        assert!((errors[0] / whole - 1.0).abs() < 1e-4, "{errors:?} {whole}");
        for by in [SearchBy::Weights(&sweep), SearchBy::Blocks, SearchBy::Turns] {
            for passes in [0, 2] {
                let mut found = moments.search(by, &rows, global).unwrap();
                moments.descend(&rows, passes, &mut found).unwrap();
                let error = moments.error(&rows, Some(&found)).unwrap();
                let expected = exact(&weights, &kept, Some(&found.read().unwrap()));
                assert!(
                    (error / expected - 1.0).abs() < 1e-3,
                    "{by:?}: {error} and {expected}"
                );
                errors.push(error);
            }
        }
        errors
    };
    let (found, expected) = (
        errors(&Device::Cuda(gpu)),
        errors(&Device::Cpu(host.clone())),
    );
    println!("{found:?}\n{expected:?}");
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found / expected - 1.0).abs() < 0.02, "{found} {expected}");
    }
    let [_, swept, _, by_blocks, descended, in_turn, best] = found[..] else {
        unreachable!()
    };
    assert!(by_blocks < swept && descended < by_blocks && in_turn < by_blocks && best < in_turn);
}

#[test]
fn the_same_call_on_a_gpu_gives_the_same_codes() {
    let Some(gpu) = gpu() else { return };
    let (host, device) = (Cpu::new(Some(2)).unwrap(), Device::Cuda(gpu));
    let sums = sums(1);
    let weights = normal(9, ROWS * COLS);
    let find = || {
        let moments = moments(&device, &host, &sums, &sums);
        let rows = moments.rows(&weights[..]).unwrap();
        let mut found = moments.search(SearchBy::Turns, &rows, 1e-2).unwrap();
        moments.descend(&rows, 2, &mut found).unwrap();
        found.read().unwrap()
    };
    assert_eq!(find(), find());
}

#[test]
fn moments_that_no_search_can_use_are_told_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    let (host, device) = (Cpu::new(Some(2)).unwrap(), Device::Cuda(gpu));
    let mut sums = vec![0f32; COLS * COLS];
    assert!(moments(&device, &host, &sums, &sums).has_factor());
    // No inputs have such sums.
    sums[5] = 3.0;
    assert!(!moments(&device, &host, &sums, &sums).has_factor());
    let mut nan = sums.clone();
    nan[COLS * COLS - 1] = f32::NAN;
    for [seen, kept] in [[&nan, &sums], [&sums, &nan]] {
        let refused = try_moments(&device, &host, seen, kept).err().unwrap();
        expect_kind::<()>(Err(refused), ErrorKind::InvalidArgument, "not finite");
    }
}
