//! Gradients of the parts of a gated delta net against differences of their values in f64.

use super::*;
use crate::format::random::uniform;

const SHAPE: DeltaShape = DeltaShape {
    key_heads: 2,
    value_heads: 4,
    key_dim: 8,
    value_dim: 16,
    taps: 4,
};
/// Documents that end before, at and after checkpoints, and that have several.
const DOCUMENTS: [&[usize]; 6] = [&[1], &[64], &[65], &[63, 1, 70], &[40, 129, 2], &[200]];
/// Distance of the two values of a difference, halved.
const STEP: f64 = 1e-5;

struct Bounds {
    starts: Vec<u32>,
    ends: Vec<u32>,
}

impl Bounds {
    fn new(lengths: &[usize]) -> Bounds {
        let (mut starts, mut ends) = (Vec::new(), Vec::new());
        for &len in lengths {
            let start = starts.len();
            starts.resize(start + len, start as u32);
            ends.resize(start + len, (start + len) as u32);
        }
        Bounds { starts, ends }
    }

    fn rows(&self) -> DocumentRows<'_> {
        DocumentRows {
            starts: &self.starts,
            ends: &self.ends,
        }
    }
}

/// Values from -1 to 1.
fn values(seed: u64, len: usize) -> Vec<f32> {
    let value = |i| 2.0 * uniform(seed, i) - 1.0;
    (0..len as u64).map(value).collect()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// Compares some 40 elements of a gradient with the difference of `loss` around `x`.
fn expect_gradient(what: &str, found: &[f32], x: &[f32], loss: &dyn Fn(&[f64]) -> f64) {
    let mut at = wide(x);
    for i in (0..x.len()).step_by((x.len() / 40).max(1)) {
        let own = at[i];
        let mut of = |by: f64| {
            at[i] = own + by;
            loss(&at)
        };
        let expected = (of(STEP) - of(-STEP)) / (2.0 * STEP);
        at[i] = own;
        let error = (f64::from(found[i]) - expected).abs();
        let bound = 2e-5 * (1.0 + expected.abs());
        assert!(error < bound, "{what} {i}: {}, not {expected}", found[i]);
    }
}

/// The results of the rule, in f64.
fn rule(bounds: &Bounds, qkv: &[f64], log: &[f64], beta: &[f64]) -> Vec<f64> {
    let (kd, vd, heads) = (SHAPE.key_dim, SHAPE.value_dim, SHAPE.value_heads);
    let mut out = Vec::new();
    let mut states = vec![vec![0.0; kd * vd]; heads];
    for (row, qkv) in qkv.chunks_exact(SHAPE.channels()).enumerate() {
        for (head, state) in states.iter_mut().enumerate() {
            if bounds.starts[row] as usize == row {
                state.fill(0.0);
            }
            let key = head / SHAPE.group() * kd;
            let (q, k) = (&qkv[key..], &qkv[SHAPE.key_width() + key..]);
            let v = &qkv[2 * SHAPE.key_width() + head * vd..];
            let gate = row * heads + head;
            state.iter_mut().for_each(|s| *s *= log[gate].exp());
            for j in 0..vd {
                let held: f64 = (0..kd).map(|i| k[i] * state[i * vd + j]).sum();
                let change = beta[gate] * (v[j] - held);
                (0..kd).for_each(|i| state[i * vd + j] += k[i] * change);
                out.push((0..kd).map(|i| q[i] * state[i * vd + j]).sum());
            }
        }
    }
    out
}

fn weighted(out: &[f64], weights: &[f32]) -> f64 {
    let terms = out.iter().zip(weights).map(|(x, w)| x * f64::from(*w));
    terms.sum()
}

#[test]
fn gradients_of_the_delta_rule_are_differences() {
    let cpu = Cpu::new(Some(2)).unwrap();
    for lengths in DOCUMENTS {
        let (bounds, rows) = (Bounds::new(lengths), lengths.iter().sum::<usize>());
        let gates = rows * SHAPE.value_heads;
        // Keys are no longer than one, as the norms before the rule make them.
        let mut qkv = values(1, rows * SHAPE.channels());
        for row in qkv.chunks_exact_mut(SHAPE.channels()) {
            let keys = &mut row[SHAPE.key_width()..2 * SHAPE.key_width()];
            keys.iter_mut().for_each(|k| *k *= 0.35);
        }
        let log: Vec<f32> = values(2, gates).iter().map(|x| 0.3 * (x - 1.0)).collect();
        let decay: Vec<f32> = log.iter().map(|x| x.exp()).collect();
        let beta: Vec<f32> = values(3, gates).iter().map(|x| 0.5 + 0.5 * x).collect();
        let weights = values(4, rows * SHAPE.value_width());

        let mut out = vec![0.0; weights.len()];
        let mut states = vec![0.0; SHAPE.checkpoint_floats(rows)];
        let inputs = (&qkv[..], &decay[..], &beta[..]);
        cpu.packed_delta_rule(&SHAPE, bounds.rows(), inputs, &mut out, &mut states)
            .unwrap();
        let (x, l, b) = (wide(&qkv), wide(&log), wide(&beta));
        for (found, expected) in out.iter().zip(rule(&bounds, &x, &l, &b)) {
            assert!((f64::from(*found) - expected).abs() < 1e-5, "{lengths:?}");
        }

        let (mut dqkv, mut dlog) = (vec![f32::NAN; qkv.len()], vec![f32::NAN; gates]);
        let (mut dbeta, mut scratch) = (dlog.clone(), vec![f32::NAN; SHAPE.backward_floats()]);
        let forward = DeltaForward {
            qkv: &qkv,
            decay: &decay,
            beta: &beta,
            states: &states,
        };
        let gradients = DeltaGradients {
            dqkv: &mut dqkv,
            dlog: &mut dlog,
            dbeta: &mut dbeta,
        };
        let documents = bounds.rows();
        cpu.packed_delta_rule_backward(
            &SHAPE,
            documents,
            forward,
            &weights,
            gradients,
            &mut scratch,
        )
        .unwrap();
        let name = |of: &str| format!("{lengths:?}: {of}");
        expect_gradient(&name("qkv"), &dqkv, &qkv, &|x| {
            weighted(&rule(&bounds, x, &l, &b), &weights)
        });
        expect_gradient(&name("decay"), &dlog, &log, &|l| {
            weighted(&rule(&bounds, &x, l, &b), &weights)
        });
        expect_gradient(&name("beta"), &dbeta, &beta, &|b| {
            weighted(&rule(&bounds, &x, &l, b), &weights)
        });
    }
}

#[test]
fn gradients_of_gates_are_differences() {
    let cpu = Cpu::new(Some(1)).unwrap();
    let (heads, len) = (SHAPE.value_heads, 29 * SHAPE.value_heads);
    let (a, b) = (values(1, len), values(2, len));
    let (a_log, dt_bias) = (values(3, heads), values(4, heads));
    let weights = values(5, 2 * len);
    let loss = |a_log: &[f64], dt_bias: &[f64], a: &[f64], b: &[f64]| {
        let log = (0..len).map(|i| {
            let softplus = (a[i] + dt_bias[i % heads]).exp().ln_1p();
            -a_log[i % heads].exp() * softplus
        });
        let beta = b.iter().map(|b| 1.0 / (1.0 + (-b).exp()));
        weighted(&log.chain(beta).collect::<Vec<_>>(), &weights)
    };
    let (mut da, mut db) = (weights[..len].to_vec(), weights[len..].to_vec());
    let (mut da_log, mut ddt_bias) = (vec![0.0; heads], vec![0.0; heads]);
    let gates = DeltaGates {
        a_log: &a_log,
        dt_bias: &dt_bias,
    };
    let of_heads = (&mut da_log[..], &mut ddt_bias[..]);
    cpu.delta_gates_backward(gates, (&a, &b), (&mut da, &mut db), of_heads)
        .unwrap();
    let (l, t, x, y) = (wide(&a_log), wide(&dt_bias), wide(&a), wide(&b));
    expect_gradient("a_log", &da_log, &a_log, &|l| loss(l, &t, &x, &y));
    expect_gradient("dt_bias", &ddt_bias, &dt_bias, &|t| loss(&l, t, &x, &y));
    expect_gradient("a", &da, &a, &|x| loss(&l, &t, x, &y));
    expect_gradient("b", &db, &b, &|y| loss(&l, &t, &x, y));
}

/// The results of the convolution and the norms, in f64.
fn convolved(bounds: &Bounds, weight: &[f64], x: &[f64]) -> Vec<f64> {
    let (channels, taps, dim) = (SHAPE.channels(), SHAPE.taps, SHAPE.key_dim);
    let mut out = Vec::new();
    for (row, &start) in bounds.starts.iter().enumerate() {
        let sum = |channel: usize| -> f64 {
            let back = 0..taps.min(row + 1 - start as usize);
            let term =
                |b| weight[channel * taps + taps - 1 - b] * x[(row - b) * channels + channel];
            back.map(term).sum()
        };
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let mut row: Vec<f64> = (0..channels).map(|c| silu(sum(c))).collect();
        for (head, x) in row[..2 * SHAPE.key_width()]
            .chunks_exact_mut(dim)
            .enumerate()
        {
            let squares: f64 = x.iter().map(|x| x * x).sum();
            let size = if head < SHAPE.key_heads { dim } else { 1 };
            let length = (squares + 1e-6).sqrt() * (size as f64).sqrt();
            x.iter_mut().for_each(|x| *x /= length);
        }
        out.extend(row);
    }
    out
}

#[test]
fn gradients_of_the_convolution_are_differences() {
    let cpu = Cpu::new(Some(2)).unwrap();
    for lengths in [&[1][..], &[3], &[2, 1, 4, 9]] {
        let (bounds, rows) = (Bounds::new(lengths), lengths.iter().sum::<usize>());
        let (x, weight) = (
            values(1, rows * SHAPE.channels()),
            values(2, SHAPE.channels() * SHAPE.taps),
        );
        let weights = values(3, x.len());
        let (w, inputs) = (wide(&weight), wide(&x));
        let mut out = vec![0.0; x.len()];
        cpu.packed_convolve(&SHAPE, bounds.rows(), &weight, &x, &mut out)
            .unwrap();
        for (found, expected) in out.iter().zip(convolved(&bounds, &w, &inputs)) {
            assert!((f64::from(*found) - expected).abs() < 1e-5, "{lengths:?}");
        }
        let (mut dy, mut dx) = (weights.clone(), vec![f32::NAN; x.len()]);
        let mut dweight = vec![0.0; weight.len()];
        let gradients = (&mut dy[..], &mut dx[..]);
        let documents = bounds.rows();
        cpu.packed_convolve_backward(&SHAPE, documents, (&weight, &x), gradients, &mut dweight)
            .unwrap();
        expect_gradient("x", &dx, &x, &|x| {
            weighted(&convolved(&bounds, &w, x), &weights)
        });
        expect_gradient("weight", &dweight, &weight, &|w| {
            weighted(&convolved(&bounds, w, &inputs), &weights)
        });
    }
}
