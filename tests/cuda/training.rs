//! What training does between products and attention, on a GPU, against f64: every value within the rounding of bf16, sums within that of
//! f32, outputs poisoned first, and the same bits from the same call.

use std::sync::Arc;

use half::bf16;

use crate::common::expect_kind;
use crate::support::{gpu, normal, poisoned, read_f32, upload};
use NVFP4::base::ErrorKind;
use NVFP4::cuda::training::{
    self, CrossEntropy, Heads, L1_PARTIAL, LogitChunk, RmsNormBackward, STATISTICS_PARTIAL,
    TokenRows,
};
use NVFP4::cuda::{Activation, DeviceBuffer, DeviceSlice, Gpu};

/// The error of rounding to bf16, relative to the value, and of some operations in f32, relative to the size of their operands.
const ROUNDING: f64 = 1.01 / 256.0;
const ARITHMETIC: f64 = 1.0 / (1 << 20) as f64;

/// An array on the device, and its values.
struct Array {
    values: Vec<f64>,
    device: DeviceBuffer,
}

impl Array {
    fn of_bf16(gpu: &Arc<Gpu>, values: &[f32]) -> Array {
        let rounded: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
        let bits: Vec<u16> = rounded.iter().map(|x| x.to_bits()).collect();
        Array {
            values: rounded.into_iter().map(f64::from).collect(),
            device: upload(gpu, &bits),
        }
    }

    fn of_f32(gpu: &Arc<Gpu>, values: &[f32]) -> Array {
        Array {
            values: values.iter().map(|&x| f64::from(x)).collect(),
            device: upload(gpu, values),
        }
    }

    /// Random bf16 of about this size.
    fn bf16(gpu: &Arc<Gpu>, seed: u64, count: usize, size: f32) -> Array {
        let values: Vec<f32> = normal(seed, count).iter().map(|x| x * size).collect();
        Array::of_bf16(gpu, &values)
    }

    /// Random f32 around `center`.
    fn f32(gpu: &Arc<Gpu>, seed: u64, count: usize, center: f32) -> Array {
        let values: Vec<f32> = normal(seed, count)
            .iter()
            .map(|x| center + x * 0.25)
            .collect();
        Array::of_f32(gpu, &values)
    }

    fn slice(&self) -> DeviceSlice<'_> {
        (&self.device).into()
    }
}

fn read_bits(buffer: &DeviceBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.bytes()];
    buffer.read(0, &mut bytes).unwrap();
    bytes
}

fn read_bf16(buffer: &DeviceBuffer) -> Vec<f64> {
    let mut bits = vec![0u16; buffer.bytes() / 2];
    buffer.read(0, &mut bits).unwrap();
    let values = bits.into_iter().map(bf16::from_bits);
    values.map(f64::from).collect()
}

fn values_of_f32(buffer: &DeviceBuffer) -> Vec<f64> {
    let values = read_f32(buffer, buffer.bytes() / 4);
    values.into_iter().map(f64::from).collect()
}

/// Holds values to what is wanted: `rounding` of each, and errors of f32 of terms as large as `size`.
#[track_caller]
fn assert_within(
    got: &[f64],
    want: &[f64],
    rounding: f64,
    size: impl Fn(usize) -> f64,
    what: &str,
) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let bound = want.abs() * rounding + size(i) * ARITHMETIC;
        assert!(
            (got - want).abs() <= bound,
            "{what}: element {i} is {got}, not {want}, within {bound:e}"
        );
    }
}

#[test]
fn norms_for_training_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (rows, width) in [(37, 48), (5, 8192), (1024, 2560)] {
        let (count, eps) = (rows * width, 1e-5f32);
        let x = Array::bf16(&gpu, 1, count, 3.0);
        let dy = Array::bf16(&gpu, 2, count, 1.0);
        let residual = Array::bf16(&gpu, 3, count, 1.0);
        let weight = Array::f32(&gpu, 4, width, 1.0);
        let before = Array::f32(&gpu, 5, width, 0.0);
        let y = poisoned(&gpu, count * 2);
        training::rms_norm_forward(x.slice(), weight.slice(), eps, (&y).into()).unwrap();

        // Into memory of its own without a residual; over the residual; over the gradients.
        let run = |past: Option<&DeviceBuffer>, dy: &DeviceBuffer, dx: &DeviceBuffer| {
            let dweight = upload(&gpu, &read_f32(&before.device, width));
            let partial = poisoned(&gpu, training::rms_norm_partial(rows, width) * 4);
            training::rms_norm_backward(&RmsNormBackward {
                x: x.slice(),
                weight: weight.slice(),
                eps,
                dy: dy.into(),
                residual: past.map(Into::into),
                dx: dx.into(),
                partial: (&partial).into(),
                dweight: (&dweight).into(),
            })
            .unwrap();
            dweight
        };
        let alone = poisoned(&gpu, count * 2);
        let dweight = run(None, &dy.device, &alone);
        let over = upload(&gpu, &read_bits(&residual.device));
        let again = run(Some(&over), &dy.device, &over);
        let in_place = upload(&gpu, &read_bits(&dy.device));
        run(Some(&residual.device), &in_place, &in_place);
        assert_eq!(read_bits(&dweight), read_bits(&again));
        assert_eq!(read_bits(&over), read_bits(&in_place));

        let (mut want_y, mut want_dx, mut with_residual) = (vec![], vec![], vec![]);
        let (mut sums, mut sizes) = (before.values.clone(), vec![1.0; width]);
        for row in 0..rows {
            let of = |a: &Array, i: usize| a.values[row * width + i];
            let mean = |f: &dyn Fn(usize) -> f64| (0..width).map(f).sum::<f64>() / width as f64;
            let r = 1.0 / (mean(&|i| of(&x, i).powi(2)) + f64::from(eps)).sqrt();
            let slope = r * r * mean(&|i| of(&dy, i) * weight.values[i] * of(&x, i));
            for i in 0..width {
                let (xi, d) = (of(&x, i), of(&dy, i));
                let dx = r * (d * weight.values[i] - xi * slope);
                want_y.push(xi * r * weight.values[i]);
                want_dx.push(dx);
                with_residual.push(dx + of(&residual, i));
                sums[i] += d * xi * r;
                sizes[i] += (d * xi * r).abs();
            }
        }
        let what = format!("{rows} rows of {width}");
        assert_within(&read_bf16(&y), &want_y, ROUNDING, |_| 1.0, &what);
        assert_within(&read_bf16(&alone), &want_dx, ROUNDING, |_| 4.0, &what);
        assert_within(&read_bf16(&over), &with_residual, ROUNDING, |_| 4.0, &what);
        assert_within(&values_of_f32(&dweight), &sums, 0.0, |i| sizes[i], &what);
    }
    let (wide, weight) = (poisoned(&gpu, 8208 * 2), poisoned(&gpu, 8208 * 4));
    let of = |width: usize| DeviceSlice::from(&weight).part(0..width * 4).unwrap();
    for (width, why) in [(8208, "up to 8192"), (24, "multiple of 16")] {
        let x = DeviceSlice::from(&wide).part(0..width * 2).unwrap();
        let refused = training::rms_norm_forward(x, of(width), 1e-6, x);
        expect_kind(refused, ErrorKind::Unsupported, why);
    }
}

#[test]
fn heads_for_training_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (rows, heads, kv_heads, dim, half, normed) in [
        (37, 3, 1, 80, 16, [true, true]),
        (37, 14, 2, 64, 32, [false, false]),
        (9, 2, 1, 256, 128, [false, true]),
        (1024, 32, 8, 128, 64, [true, true]),
    ] {
        let (all, eps) = (heads + 2 * kv_heads, 1e-6f32);
        let count = rows * all * dim;
        let qkv = Array::bf16(&gpu, 11, count, 2.0);
        let dout = Array::bf16(&gpu, 12, count, 1.0);
        let weights = [13, 14].map(|seed| Array::f32(&gpu, seed, dim, 1.0));
        let before = [15, 16].map(|seed| Array::f32(&gpu, seed, dim, 0.0));
        let angles = normal(17, rows * half);
        let of_angles = |f: fn(f32) -> f32| {
            let values: Vec<f32> = angles.iter().map(|&x| f(x)).collect();
            Array::of_f32(&gpu, &values)
        };
        let (cos, sin) = (of_angles(f32::cos), of_angles(f32::sin));
        let how = Heads {
            heads,
            kv_heads,
            dim,
            norms: [0, 1].map(|i| normed[i].then(|| weights[i].slice())),
            eps,
            cos: cos.slice(),
            sin: sin.slice(),
        };
        let out = poisoned(&gpu, count * 2);
        training::heads_forward(&how, qkv.slice(), (&out).into()).unwrap();
        let run = |dout: &DeviceBuffer, dqkv: &DeviceBuffer| {
            let dnorms = [0, 1].map(|i: usize| upload(&gpu, &read_f32(&before[i].device, dim)));
            let partial = poisoned(&gpu, training::heads_partial(rows, dim) * 4);
            let gradients = [0, 1].map(|i| normed[i].then(|| DeviceSlice::from(&dnorms[i])));
            training::heads_backward(
                &how,
                qkv.slice(),
                dout.into(),
                dqkv.into(),
                (&partial).into(),
                gradients,
            )
            .unwrap();
            dnorms
        };
        let dqkv = poisoned(&gpu, count * 2);
        let dnorms = run(&dout.device, &dqkv);
        let in_place = upload(&gpu, &read_bits(&dout.device));
        let again = run(&in_place, &in_place);
        assert_eq!(read_bits(&dqkv), read_bits(&in_place));
        assert_eq!(
            dnorms.each_ref().map(read_bits),
            again.each_ref().map(read_bits)
        );

        let (mut want, mut want_d) = (qkv.values.clone(), dout.values.clone());
        let mut sums = before.each_ref().map(|b| b.values.clone());
        let mut sizes = [vec![1.0; dim], vec![1.0; dim]];
        for (head, x) in qkv.values.chunks_exact(dim).enumerate() {
            let (row, which) = (head / all, head % all);
            if which >= heads + kv_heads {
                continue;
            }
            let norm = usize::from(which >= heads);
            let weight = |i: usize| weights[norm].values[i];
            let y = &mut want[head * dim..][..dim];
            let d = &mut want_d[head * dim..][..dim];
            let squares: f64 = x.iter().map(|x| x * x).sum();
            let r = 1.0 / (squares / dim as f64 + f64::from(eps)).sqrt();
            if normed[norm] {
                y.iter_mut()
                    .enumerate()
                    .for_each(|(i, y)| *y *= r * weight(i));
            }
            for i in 0..half {
                let angle = row * half + i;
                let (c, s) = (cos.values[angle], sin.values[angle]);
                (y[i], y[i + half]) = (y[i] * c - y[i + half] * s, y[i + half] * c + y[i] * s);
                (d[i], d[i + half]) = (d[i] * c + d[i + half] * s, d[i + half] * c - d[i] * s);
            }
            if normed[norm] {
                let products: f64 = (0..dim).map(|i| d[i] * weight(i) * x[i]).sum();
                let slope = r * r * products / dim as f64;
                for i in 0..dim {
                    let own = d[i] * x[i] * r;
                    sums[norm][i] += own;
                    sizes[norm][i] += own.abs();
                    d[i] = r * (d[i] * weight(i) - x[i] * slope);
                }
            }
        }
        let what = format!("{rows} rows of {heads} and {kv_heads} heads of {dim}");
        assert_within(&read_bf16(&out), &want, ROUNDING, |_| 4.0, &what);
        assert_within(&read_bf16(&dqkv), &want_d, ROUNDING, |_| 4.0, &what);
        for i in 0..2 {
            let got = values_of_f32(&dnorms[i]);
            assert_within(&got, &sums[i], 0.0, |e| sizes[i][e], &what);
        }
        let wrong = Heads { dim: 24, ..how };
        let refused = training::heads_forward(&wrong, qkv.slice(), (&out).into());
        expect_kind(refused, ErrorKind::Unsupported, "multiple of 16");
    }
}

#[test]
fn gated_units_for_training_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let gelu = |g: f64| {
        let (f, cube) = ((2.0 / std::f64::consts::PI).sqrt(), 0.044715);
        let t = (f * (g + cube * g.powi(3))).tanh();
        let slope = 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * f * (1.0 + 3.0 * cube * g * g);
        (0.5 * g * (1.0 + t), slope)
    };
    let silu = |g: f64| {
        let s = 1.0 / (1.0 + (-g).exp());
        (g * s, s + g * s * (1.0 - s))
    };
    for (rows, width, activation) in [
        (37, 48, Activation::Silu),
        (3, 2064, Activation::GeluTanh),
        (1024, 2560, Activation::Silu),
    ] {
        let count = rows * width;
        let gate_up = Array::bf16(&gpu, 21, 2 * count, 3.0);
        let dy = Array::bf16(&gpu, 22, count, 1.0);
        let [y, again] = [0, 1].map(|_| poisoned(&gpu, count * 2));
        let d = poisoned(&gpu, count * 4);
        training::glu_forward(activation, gate_up.slice(), width, (&y).into()).unwrap();
        training::glu_backward(
            activation,
            gate_up.slice(),
            width,
            dy.slice(),
            (&d).into(),
            Some((&again).into()),
        )
        .unwrap();
        assert_eq!(read_bits(&y), read_bits(&again));
        let (mut want, mut want_d) = (vec![], vec![]);
        for row in 0..rows {
            let (gate, up) = gate_up.values[row * 2 * width..][..2 * width].split_at(width);
            let dy = &dy.values[row * width..][..width];
            let act = |i: usize| match activation {
                Activation::Silu => silu(gate[i]),
                Activation::GeluTanh => gelu(gate[i]),
            };
            want.extend((0..width).map(|i| act(i).0 * up[i]));
            want_d.extend((0..width).map(|i| dy[i] * up[i] * act(i).1));
            want_d.extend((0..width).map(|i| dy[i] * act(i).0));
        }
        let what = format!("{rows} rows of {width}, {activation:?}");
        assert_within(&read_bf16(&y), &want, ROUNDING, |_| 8.0, &what);
        assert_within(&read_bf16(&d), &want_d, ROUNDING, |_| 64.0, &what);
        // Over what it reads.
        let (over, over_dy) = (
            upload(&gpu, &read_bits(&gate_up.device)),
            upload(&gpu, &read_bits(&dy.device)),
        );
        training::glu_backward(
            activation,
            (&over).into(),
            width,
            (&over_dy).into(),
            (&over).into(),
            Some((&over_dy).into()),
        )
        .unwrap();
        assert_eq!(read_bits(&over), read_bits(&d));
        assert_eq!(read_bits(&over_dy), read_bits(&y));
    }
}

#[test]
fn biases_for_training_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (rows, width) in [(37, 48), (3, 2064), (1024, 2560)] {
        let x = Array::bf16(&gpu, 31, rows * width, 2.0);
        let bias = Array::f32(&gpu, 32, width, 0.5);
        let before = Array::f32(&gpu, 33, width, 0.0);
        let sums = || {
            let sums = upload(&gpu, &read_f32(&before.device, width));
            let partial = poisoned(&gpu, training::column_sums_partial(rows, width) * 4);
            training::column_sums(x.slice(), (&partial).into(), (&sums).into()).unwrap();
            sums
        };
        let (got, again) = (sums(), sums());
        assert_eq!(read_bits(&got), read_bits(&again));
        training::add_bias_rows(x.slice(), bias.slice()).unwrap();
        let (mut want, mut sizes) = (before.values.clone(), vec![1.0; width]);
        let mut biased = vec![];
        for (i, x) in x.values.iter().enumerate() {
            want[i % width] += x;
            sizes[i % width] += x.abs();
            biased.push(x + bias.values[i % width]);
        }
        let what = format!("{rows} rows of {width}");
        assert_within(&values_of_f32(&got), &want, 0.0, |i| sizes[i], &what);
        assert_within(&read_bf16(&x.device), &biased, ROUNDING, |_| 0.0, &what);
    }
}

#[test]
fn arrays_for_training_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    for count in [8, 37 * 48, 1024 * 2560] {
        let (x, y) = (
            Array::bf16(&gpu, 41, count, 2.0),
            Array::bf16(&gpu, 42, count, 1.0),
        );
        let long = Array::f32(&gpu, 43, count, 0.0);
        let check = |run: &dyn Fn(DeviceSlice<'_>), want: &dyn Fn(usize) -> f64, what: &str| {
            let copy = upload(&gpu, &read_bits(&x.device));
            run((&copy).into());
            let want: Vec<f64> = (0..count).map(want).collect();
            assert_within(&read_bf16(&copy), &want, ROUNDING, |_| 0.0, what);
        };
        check(
            &|x| training::add(x, y.slice()).unwrap(),
            &|i| x.values[i] + y.values[i],
            "a sum",
        );
        check(
            &|x| training::scale(x, -0.3).unwrap(),
            &|i| x.values[i] * f64::from(-0.3f32),
            "a factor",
        );
        check(&|x| training::fill(x, 2.5).unwrap(), &|_| 2.5, "one value");
        check(
            &|x| training::f32_to_bf16(long.slice(), x).unwrap(),
            &|i| long.values[i],
            "f32 as bf16",
        );
        let converted = poisoned(&gpu, count * 4);
        training::bf16_to_f32(x.slice(), (&converted).into()).unwrap();
        assert!(values_of_f32(&converted) == x.values, "bf16 as f32");
    }
    let odd = poisoned(&gpu, 12 * 2);
    expect_kind(
        training::scale((&odd).into(), 1.0),
        ErrorKind::Unsupported,
        "multiple of 8",
    );
}

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

/// Rows with and without labels, in chunks of the vocabulary that are unlike each other.
#[test]
fn cross_entropy_in_chunks_agrees_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (rows, chunks, cap, size) in [
        (37, vec![1028, 60, 4], None, 8.0),
        (37, vec![16384, 2000], Some(30.0), 10.0),
        (1024, vec![8192, 4096], None, 20.0),
        (37, vec![1028, 61, 1], Some(30.0), 8.0),
    ] {
        let vocabulary: usize = chunks.iter().sum();
        let weights = Array::f32(&gpu, 61, rows, 1.0);
        let labels: Vec<i32> = (0..rows)
            .map(|row| match row % 3 {
                1 => -1,
                _ => (row * 7919 % vocabulary) as i32,
            })
            .collect();
        let on_device = upload(&gpu, &labels);
        let known = [(); 5].map(|()| poisoned(&gpu, rows * 4));
        let [max, sum, target, lse, losses] = known.each_ref().map(DeviceSlice::from);
        let of_rows = CrossEntropy {
            labels: (&on_device).into(),
            weights: weights.slice(),
            max,
            sum,
            target,
            lse,
            losses,
        };
        let logits: Vec<Array> = (0u64..)
            .zip(&chunks)
            .map(|(seed, columns)| {
                let values = normal(62 + seed, rows * columns);
                let values: Vec<f32> = values.iter().map(|x| x * size / 3.0).collect();
                Array::of_f32(&gpu, &values)
            })
            .collect();
        let mut firsts = vec![0];
        chunks
            .iter()
            .for_each(|c| firsts.push(firsts[firsts.len() - 1] + c));
        let chunk = |c: usize| LogitChunk {
            logits: logits[c].slice(),
            first_column: firsts[c],
            columns: chunks[c],
            cap,
        };
        let total = || {
            for c in 0..chunks.len() {
                training::cross_entropy_chunk(&of_rows, &chunk(c), c == 0).unwrap();
            }
            let total = poisoned(&gpu, 8);
            training::cross_entropy_finish(&of_rows, (&total).into()).unwrap();
            let mut got = [0u64];
            total.read(0, &mut got).unwrap();
            f64::from_bits(got[0])
        };
        let got_total = total();
        assert_eq!(got_total.to_bits(), total().to_bits());

        let capped =
            |l: f64| cap.map_or(l, |cap: f32| f64::from(cap) * (l / f64::from(cap)).tanh());
        let at = |row: usize, column: usize| {
            let c = firsts.partition_point(|&first| first <= column) - 1;
            capped(logits[c].values[row * chunks[c] + column - firsts[c]])
        };
        let want_lse: Vec<f64> = (0..rows)
            .map(|row| (0..vocabulary).map(|i| at(row, i).exp()).sum::<f64>().ln())
            .collect();
        let of_row = |row: usize| match usize::try_from(labels[row]) {
            Ok(label) => (
                want_lse[row],
                weights.values[row] * (want_lse[row] - at(row, label)),
            ),
            Err(_) => (0.0, 0.0),
        };
        let (shown, want): (Vec<f64>, Vec<f64>) = (0..rows).map(of_row).unzip();
        let what = format!("{rows} rows of {chunks:?}");
        let size = 2.0 * f64::from(size);
        assert_within(&values_of_f32(&known[3]), &shown, 0.0, |_| size, &what);
        assert_within(&values_of_f32(&known[4]), &want, 0.0, |_| 2.0 * size, &what);
        let bound = 2.0 * size * rows as f64;
        assert_within(&[got_total], &[want.iter().sum()], 0.0, |_| bound, &what);

        for c in 0..chunks.len() {
            let dlogits = poisoned(&gpu, rows * chunks[c] * 2);
            training::cross_entropy_gradient(&of_rows, &chunk(c), (&dlogits).into()).unwrap();
            let (mut want, mut sizes) = (vec![], vec![]);
            for row in 0..rows {
                for column in firsts[c]..firsts[c + 1] {
                    let (l, label) = (at(row, column), labels[row]);
                    let (p, hot) = ((l - want_lse[row]).exp(), label == column as i32);
                    let slope = cap.map_or(1.0, |cap| 1.0 - (l / f64::from(cap)).powi(2));
                    let onehot = f64::from(u8::from(hot));
                    want.push(match label {
                        ..0 => 0.0,
                        _ => weights.values[row] * (p - onehot) * slope,
                    });
                    // An error of the exponent is one of the factor.
                    sizes.push((size + 4.0) * p + onehot);
                }
            }
            let got = read_bf16(&dlogits);
            assert_within(&got, &want, ROUNDING, |i| sizes[i], &what);
        }
        let wrong = LogitChunk {
            columns: 0,
            ..chunk(0)
        };
        expect_kind(
            training::cross_entropy_chunk(&of_rows, &wrong, true),
            ErrorKind::InvalidArgument,
            "without logits",
        );
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
            // Of a block's second warp.
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

#[test]
fn differences_of_hidden_states_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    for count in [8, 37 * 48, 1024 * 2560] {
        let (mut values, other) = (normal(81, count), normal(82, count));
        values
            .iter_mut()
            .zip(&other)
            .step_by(5)
            .for_each(|(x, y)| *x = *y);
        let (h, target) = (Array::of_bf16(&gpu, &values), Array::of_bf16(&gpu, &other));
        let weight = 0.375;
        let run = |h: DeviceSlice<'_>, d: DeviceSlice<'_>| {
            let (partial, total) = (poisoned(&gpu, L1_PARTIAL * 4), poisoned(&gpu, 4));
            training::l1_gradient(
                h,
                target.slice(),
                weight,
                d,
                (&partial).into(),
                (&total).into(),
            )
            .unwrap();
            total
        };
        let d = poisoned(&gpu, count * 2);
        let total = run(h.slice(), (&d).into());
        let again = run(h.slice(), h.slice());
        assert_eq!(read_bits(&total), read_bits(&again));
        assert_eq!(read_bits(&d), read_bits(&h.device));
        let differences = h.values.iter().zip(&target.values).map(|(h, t)| h - t);
        let weight = f64::from(weight);
        let want: Vec<f64> = differences
            .clone()
            .map(|x| match x {
                0.0 => 0.0,
                x => weight * x.signum(),
            })
            .collect();
        assert!(read_bf16(&d) == want, "signs of {count} differences");
        let sum: f64 = differences.map(|x| weight * x.abs()).sum();
        assert_within(&values_of_f32(&total), &[sum], 0.0, |_| sum, "an L1 loss");
    }
}
