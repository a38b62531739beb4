//! Sums of training over rows: gradients of embeddings, statistics of gradients, and second moments of inputs.

use NVFP4::cuda::training::{self, STATISTICS_PARTIAL, TokenRows};

use super::{Array, ROUNDING, assert_within, read_bf16, read_bits, values_of_f32};
use crate::support::{gpu, normal, poisoned, upload};

#[test]
fn the_gradient_of_an_embedding_agrees_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (rows, width, vocabulary, first, held, add) in [
        (37, 48, 30, 7, 12, true),
        (37, 1040, 9, 0, 9, false),
        (1024, 2560, 300, 100, 150, true),
        (1024, 2560, 300, 0, 128, false),
    ] {
        let dx = Array::bf16(&gpu, 51, rows * width, 1.0);
        let gradient = Array::bf16(&gpu, 52, held * width, 1.0);
        // Every third row has the same token.
        let token = |row: usize| match row % 3 {
            0 => first + 1,
            _ => row * row % vocabulary,
        };
        let (mut order, mut offsets, mut ids) = (vec![], vec![], vec![]);
        for id in 0..vocabulary {
            let start = order.len() as u32;
            order.extend((0..rows).filter(|&r| token(r) == id).map(|r| r as u32));
            if order.len() as u32 > start {
                ids.push(id as u32);
                offsets.push(start);
            }
        }
        offsets.push(order.len() as u32);
        let [order, offsets, ids] = [order, offsets, ids].map(|x| upload(&gpu, &x));
        let tokens = TokenRows {
            order: (&order).into(),
            offsets: (&offsets).into(),
            ids: (&ids).into(),
        };
        let (scale, to) = (1.5, gradient.slice());
        training::scatter_add(&tokens, dx.slice(), width, scale, first, to, add).unwrap();
        let mut want = match add {
            true => gradient.values.clone(),
            false => vec![0.0; held * width],
        };
        let mut sizes = vec![1.0; held * width];
        for row in 0..rows {
            let Some(at) = token(row).checked_sub(first).filter(|&at| at < held) else {
                continue;
            };
            for i in 0..width {
                let x = f64::from(scale) * dx.values[row * width + i];
                want[at * width + i] += x;
                sizes[at * width + i] += x.abs();
            }
        }
        let what = format!("{rows} rows of {width}, {held} tokens, add {add}");
        let got = read_bf16(&gradient.device);
        assert_within(&got, &want, ROUNDING, |i| sizes[i], &what);
    }
}

#[test]
fn statistics_of_gradients_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (count, odd, is_f32) in [
        (8, false, false),
        (37 * 48, true, false),
        (1024 * 2560, true, false),
        (8, false, true),
        (37 * 48, true, true),
        (1024 * 2560, false, true),
    ] {
        let mut values = normal(71, count);
        if odd {
            values[0] = f32::NAN;
            // An element of a block's second warp.
            values[8 * 32 + 3] = -1e15;
            values[count / 2] = f32::INFINITY;
            values[count - 1] = f32::NEG_INFINITY;
        }
        let g = match is_f32 {
            true => Array::of_f32(&gpu, &values),
            false => Array::of_bf16(&gpu, &values),
        };
        let finite = || g.values.iter().copied().filter(|x| x.is_finite());
        let squares: f64 = finite().map(|x| x * x).sum();
        let largest = finite().fold(0.0, |a: f64, x| a.max(x.abs()));
        let nonfinite = (count - finite().count()) as f64;
        for (bound, before) in [
            (f32::INFINITY, None),
            (0.5, Some(1.0)),
            (0.5, Some(f32::INFINITY)),
        ] {
            let previous = before.map(|factor| Array::of_f32(&gpu, &[0.0, 0.0, 0.0, factor]));
            let run = || {
                let (partial, out) = (poisoned(&gpu, STATISTICS_PARTIAL * 4), poisoned(&gpu, 16));
                training::gradient_statistics(
                    g.slice(),
                    is_f32,
                    (&partial).into(),
                    previous.as_ref().map(Array::slice),
                    bound,
                    (&out).into(),
                )
                .unwrap();
                out
            };
            let out = run();
            assert_eq!(read_bits(&out), read_bits(&run()));
            let got = values_of_f32(&out);
            assert_within(&got[..1], &[squares], 0.0, |_| squares, "a sum of squares");
            assert_eq!(got[1..3], [largest, nonfinite], "{count} elements");
            let factor = (f64::from(bound) / squares.sqrt()).min(1.0);
            match odd || before.is_some_and(f32::is_infinite) {
                true => assert!(got[3].is_infinite(), "{}", got[3]),
                false => assert!((got[3] / factor - 1.0).abs() < 1e-5, "{} {factor}", got[3]),
            }
        }
    }
}

#[test]
fn second_moments_of_inputs_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (rows, cols) in [(1, 16), (37, 48), (1000, 1536)] {
        let x = Array::bf16(&gpu, 91, rows * cols, 3.0);
        let before = normal(92, cols * 16);
        let run = || {
            let sums = Array::of_f32(&gpu, &before);
            training::add_input_moments(x.slice(), cols, sums.slice()).unwrap();
            sums
        };
        let sums = run();
        assert_eq!(read_bits(&sums.device), read_bits(&run().device));
        let (mut want, mut size) = (vec![0.0; cols * 16], vec![0.0; cols * 16]);
        for (at, (want, size)) in want.iter_mut().zip(&mut size).enumerate() {
            let (first, i, j) = (at / 256 * 16, at / 16 % 16, at % 16);
            *want = f64::from(before[at]);
            *size = want.abs();
            for row in x.values.chunks_exact(cols) {
                let product = row[first + i] * row[first + j];
                *want += product;
                *size += product.abs();
            }
        }
        let got = values_of_f32(&sums.device);
        assert_within(&got, &want, 0.0, |i| size[i], "products of inputs");
    }
}
