//! Norms, heads, gated units, biases and elementwise operations of training.

use std::sync::Arc;

use NVFP4::base::ErrorKind;
use NVFP4::cuda::training::{self, Heads, RmsNormBackward};
use NVFP4::cuda::{Activation, DeviceBuffer, DeviceSlice, Gpu};

use super::{Array, ROUNDING, assert_within, read_bf16, read_bits, values_of_f32};
use crate::common::expect_kind;
use crate::support::{gpu, normal, poisoned, read_f32, upload};

/// A norm of random rows, its gradients, and the gradient of its weight before it.
struct Norm<'a> {
    gpu: &'a Arc<Gpu>,
    rows: usize,
    width: usize,
    eps: f32,
    x: Array,
    dy: Array,
    residual: Array,
    weight: Array,
    before: Array,
}

/// The results of a norm in f64.
struct NormResults {
    y: Vec<f64>,
    dx: Vec<f64>,
    /// The gradient of the input, added to the residual's.
    with_residual: Vec<f64>,
    dweight: Vec<f64>,
    /// The sizes of the terms of each sum in `dweight`.
    sizes: Vec<f64>,
}

impl<'a> Norm<'a> {
    fn new(gpu: &'a Arc<Gpu>, rows: usize, width: usize) -> Norm<'a> {
        let count = rows * width;
        Norm {
            gpu,
            rows,
            width,
            eps: 1e-5,
            x: Array::bf16(gpu, 1, count, 3.0),
            dy: Array::bf16(gpu, 2, count, 1.0),
            residual: Array::bf16(gpu, 3, count, 1.0),
            weight: Array::f32(gpu, 4, width, 1.0),
            before: Array::f32(gpu, 5, width, 0.0),
        }
    }

    fn forward(&self) -> DeviceBuffer {
        let y = poisoned(self.gpu, self.rows * self.width * 2);
        let (x, weight) = (self.x.slice(), self.weight.slice());
        training::rms_norm_forward(x, weight, self.eps, (&y).into()).unwrap();
        y
    }

    /// Writes the gradient of the input, and returns that of the weight.
    fn backward(
        &self,
        past: Option<&DeviceBuffer>,
        dy: &DeviceBuffer,
        dx: &DeviceBuffer,
    ) -> DeviceBuffer {
        let (gpu, rows, width) = (self.gpu, self.rows, self.width);
        let dweight = upload(gpu, &read_f32(&self.before.device, width));
        let partial = poisoned(gpu, training::rms_norm_partial(rows, width) * 4);
        training::rms_norm_backward(&RmsNormBackward {
            x: self.x.slice(),
            weight: self.weight.slice(),
            eps: self.eps,
            dy: dy.into(),
            residual: past.map(Into::into),
            dx: dx.into(),
            partial: (&partial).into(),
            dweight: (&dweight).into(),
        })
        .unwrap();
        dweight
    }

    fn expected(&self) -> NormResults {
        let (width, weight) = (self.width, &self.weight.values);
        let mut results = NormResults {
            y: vec![],
            dx: vec![],
            with_residual: vec![],
            dweight: self.before.values.clone(),
            sizes: vec![1.0; width],
        };
        for row in 0..self.rows {
            let of = |a: &Array, i: usize| a.values[row * width + i];
            let mean = |f: &dyn Fn(usize) -> f64| (0..width).map(f).sum::<f64>() / width as f64;
            let r = 1.0 / (mean(&|i| of(&self.x, i).powi(2)) + f64::from(self.eps)).sqrt();
            let slope = r * r * mean(&|i| of(&self.dy, i) * weight[i] * of(&self.x, i));
            for i in 0..width {
                let (xi, d) = (of(&self.x, i), of(&self.dy, i));
                let dx = r * (d * weight[i] - xi * slope);
                results.y.push(xi * r * weight[i]);
                results.dx.push(dx);
                results.with_residual.push(dx + of(&self.residual, i));
                results.dweight[i] += d * xi * r;
                results.sizes[i] += (d * xi * r).abs();
            }
        }
        results
    }
}

#[test]
fn norms_for_training_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (rows, width) in [(37, 48), (5, 8192), (1024, 2560)] {
        let norm = Norm::new(&gpu, rows, width);
        let y = norm.forward();
        // Into memory of its own without a residual; over the residual; over the gradients.
        let alone = poisoned(&gpu, rows * width * 2);
        let dweight = norm.backward(None, &norm.dy.device, &alone);
        let over = upload(&gpu, &read_bits(&norm.residual.device));
        let again = norm.backward(Some(&over), &norm.dy.device, &over);
        let in_place = upload(&gpu, &read_bits(&norm.dy.device));
        norm.backward(Some(&norm.residual.device), &in_place, &in_place);
        assert_eq!(read_bits(&dweight), read_bits(&again));
        assert_eq!(read_bits(&over), read_bits(&in_place));

        let want = norm.expected();
        let what = format!("{rows} rows of {width}");
        for (got, want, size) in [
            (&y, &want.y, 1.0),
            (&alone, &want.dx, 4.0),
            (&over, &want.with_residual, 4.0),
        ] {
            assert_within(&read_bf16(got), want, ROUNDING, |_| size, &what);
        }
        let got = values_of_f32(&dweight);
        assert_within(&got, &want.dweight, 0.0, |i| want.sizes[i], &what);
    }
    let (wide, weight) = (poisoned(&gpu, 8208 * 2), poisoned(&gpu, 8208 * 4));
    let of = |width: usize| DeviceSlice::from(&weight).part(0..width * 4).unwrap();
    for (width, why) in [(8208, "up to 8192"), (24, "multiple of 16")] {
        let x = DeviceSlice::from(&wide).part(0..width * 2).unwrap();
        let refused = training::rms_norm_forward(x, of(width), 1e-6, x);
        expect_kind(refused, ErrorKind::Unsupported, why);
    }
}

/// Rows of heads, their gradients, and the norms and rotations of queries and keys.
struct Projections<'a> {
    gpu: &'a Arc<Gpu>,
    rows: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    /// Pairs of elements that rotate.
    half: usize,
    eps: f32,
    qkv: Array,
    dout: Array,
    /// Whether queries are normalized, and whether keys are.
    normed: [bool; 2],
    weights: [Array; 2],
    /// The gradients of the weights before.
    before: [Array; 2],
    cos: Array,
    sin: Array,
}

/// The results of heads in f64.
struct HeadResults {
    out: Vec<f64>,
    dqkv: Vec<f64>,
    dnorms: [Vec<f64>; 2],
    /// The sizes of the terms of each sum in `dnorms`.
    sizes: [Vec<f64>; 2],
}

impl<'a> Projections<'a> {
    fn new(
        gpu: &'a Arc<Gpu>,
        rows: usize,
        (heads, kv_heads, dim): (usize, usize, usize),
        half: usize,
        normed: [bool; 2],
    ) -> Projections<'a> {
        let count = rows * (heads + 2 * kv_heads) * dim;
        let angles = normal(17, rows * half);
        let of_angles = |f: fn(f32) -> f32| {
            let values: Vec<f32> = angles.iter().map(|&x| f(x)).collect();
            Array::of_f32(gpu, &values)
        };
        Projections {
            gpu,
            rows,
            heads,
            kv_heads,
            dim,
            half,
            eps: 1e-6,
            qkv: Array::bf16(gpu, 11, count, 2.0),
            dout: Array::bf16(gpu, 12, count, 1.0),
            normed,
            weights: [13, 14].map(|seed| Array::f32(gpu, seed, dim, 1.0)),
            before: [15, 16].map(|seed| Array::f32(gpu, seed, dim, 0.0)),
            cos: of_angles(f32::cos),
            sin: of_angles(f32::sin),
        }
    }

    fn how(&self) -> Heads<'_> {
        Heads {
            heads: self.heads,
            kv_heads: self.kv_heads,
            dim: self.dim,
            norms: [0, 1].map(|i| self.normed[i].then(|| self.weights[i].slice())),
            eps: self.eps,
            cos: self.cos.slice(),
            sin: self.sin.slice(),
        }
    }

    /// Writes the gradient of the projections, and returns those of the norms.
    fn backward(&self, dout: &DeviceBuffer, dqkv: &DeviceBuffer) -> [DeviceBuffer; 2] {
        let (gpu, dim) = (self.gpu, self.dim);
        let dnorms = [0, 1].map(|i: usize| upload(gpu, &read_f32(&self.before[i].device, dim)));
        let partial = poisoned(gpu, training::heads_partial(self.rows, dim) * 4);
        let gradients = [0, 1].map(|i| self.normed[i].then(|| DeviceSlice::from(&dnorms[i])));
        training::heads_backward(
            &self.how(),
            self.qkv.slice(),
            dout.into(),
            dqkv.into(),
            (&partial).into(),
            gradients,
        )
        .unwrap();
        dnorms
    }

    fn expected(&self) -> HeadResults {
        let mut results = HeadResults {
            out: self.qkv.values.clone(),
            dqkv: self.dout.values.clone(),
            dnorms: self.before.each_ref().map(|b| b.values.clone()),
            sizes: [vec![1.0; self.dim], vec![1.0; self.dim]],
        };
        let all = self.heads + 2 * self.kv_heads;
        for head in 0..self.rows * all {
            if head % all < self.heads + self.kv_heads {
                self.expect_head(head, head / all, head % all, &mut results);
            }
        }
        results
    }

    /// Normalizes and rotates one head of queries or keys.
    fn expect_head(&self, head: usize, row: usize, which: usize, results: &mut HeadResults) {
        let (dim, half) = (self.dim, self.half);
        let norm = usize::from(which >= self.heads);
        let weight = |i: usize| self.weights[norm].values[i];
        let x = &self.qkv.values[head * dim..][..dim];
        let y = &mut results.out[head * dim..][..dim];
        let d = &mut results.dqkv[head * dim..][..dim];
        let squares: f64 = x.iter().map(|x| x * x).sum();
        let r = 1.0 / (squares / dim as f64 + f64::from(self.eps)).sqrt();
        if self.normed[norm] {
            y.iter_mut()
                .enumerate()
                .for_each(|(i, y)| *y *= r * weight(i));
        }
        for i in 0..half {
            let angle = row * half + i;
            let (c, s) = (self.cos.values[angle], self.sin.values[angle]);
            (y[i], y[i + half]) = (y[i] * c - y[i + half] * s, y[i + half] * c + y[i] * s);
            (d[i], d[i + half]) = (d[i] * c + d[i + half] * s, d[i + half] * c - d[i] * s);
        }
        if self.normed[norm] {
            let products: f64 = (0..dim).map(|i| d[i] * weight(i) * x[i]).sum();
            let slope = r * r * products / dim as f64;
            for i in 0..dim {
                let own = d[i] * x[i] * r;
                results.dnorms[norm][i] += own;
                results.sizes[norm][i] += own.abs();
                d[i] = r * (d[i] * weight(i) - x[i] * slope);
            }
        }
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
        let projections = Projections::new(&gpu, rows, (heads, kv_heads, dim), half, normed);
        let (how, qkv) = (projections.how(), &projections.qkv);
        let out = poisoned(&gpu, qkv.device.bytes());
        training::heads_forward(&how, qkv.slice(), (&out).into()).unwrap();
        let dqkv = poisoned(&gpu, qkv.device.bytes());
        let dnorms = projections.backward(&projections.dout.device, &dqkv);
        let in_place = upload(&gpu, &read_bits(&projections.dout.device));
        let again = projections.backward(&in_place, &in_place);
        assert_eq!(read_bits(&dqkv), read_bits(&in_place));
        assert_eq!(
            dnorms.each_ref().map(read_bits),
            again.each_ref().map(read_bits)
        );

        let want = projections.expected();
        let what = format!("{rows} rows of {heads} and {kv_heads} heads of {dim}");
        assert_within(&read_bf16(&out), &want.out, ROUNDING, |_| 4.0, &what);
        assert_within(&read_bf16(&dqkv), &want.dqkv, ROUNDING, |_| 4.0, &what);
        for i in 0..2 {
            let got = values_of_f32(&dnorms[i]);
            assert_within(&got, &want.dnorms[i], 0.0, |e| want.sizes[i][e], &what);
        }
        let wrong = Heads { dim: 24, ..how };
        let refused = training::heads_forward(&wrong, qkv.slice(), (&out).into());
        expect_kind(refused, ErrorKind::Unsupported, "multiple of 16");
    }
}

/// GELU by its tanh, and its slope.
fn gelu(g: f64) -> (f64, f64) {
    let (f, cube) = ((2.0 / std::f64::consts::PI).sqrt(), 0.044715);
    let t = (f * (g + cube * g.powi(3))).tanh();
    let slope = 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * f * (1.0 + 3.0 * cube * g * g);
    (0.5 * g * (1.0 + t), slope)
}

/// SiLU, and its slope.
fn silu(g: f64) -> (f64, f64) {
    let s = 1.0 / (1.0 + (-g).exp());
    (g * s, s + g * s * (1.0 - s))
}

#[test]
fn gated_units_for_training_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
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
        // The results go over the inputs.
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
