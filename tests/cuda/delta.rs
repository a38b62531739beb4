//! Gated-delta-net layers against their formulas in f64: batches of several segments, whose states are in the blocks of an arena.

use std::sync::Arc;

use NVFP4::cuda::{
    self, DeltaConstants, DeltaInputs, DeltaProjected, DeviceBuffer, Gpu, Hardware, Layout,
    StridedRows,
};
use NVFP4::tensor::DeltaShape;

use crate::recurrent::{
    BLOCKS, Blocks, DeviceSegments, RAGGED, Segment, check_division, check_norm_outputs, continues,
};
use crate::support::{
    EPS, HALF, as_f64, assert_close, gpu, normal, poisoned, read_f32, read_rows, upload,
};

/// The bound of rows and states in f32: decay and delta rule do not let errors of earlier rows grow, each row adds some roundings, and a
/// factor's own error of some units in the last place is repeated in as many rows as the factor lets S live.
const RECURRENCE: f64 = 1e-5;
fn shape((key_heads, value_heads, key_dim, value_dim): (usize, usize, usize, usize)) -> DeltaShape {
    DeltaShape {
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        taps: 4,
    }
}

/// A layer with the inputs of some rows, on the host.
struct Layer {
    shape: DeltaShape,
    rows: usize,
    conv: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
    x: Vec<f32>,
    z: Vec<f32>,
    a: Vec<f32>,
    b: Vec<f32>,
}

impl Layer {
    fn new(shape: DeltaShape, rows: usize, seed: u64) -> Layer {
        let heads = shape.value_heads;
        let scaled = |seed: u64, count: usize, factor: f32| -> Vec<f32> {
            normal(seed, count)
                .into_iter()
                .map(|v| v * factor)
                .collect()
        };
        Layer {
            shape,
            rows,
            conv: scaled(seed, shape.channels() * shape.taps, 0.5),
            a_log: scaled(seed + 1, heads, 0.5),
            dt_bias: scaled(seed + 2, heads, 1.0),
            norm: scaled(seed + 3, shape.value_dim, 1.0),
            x: scaled(seed + 4, rows * shape.channels(), 1.0),
            z: scaled(seed + 5, rows * shape.value_width(), 2.0),
            // Some are large, where softplus is the identity.
            a: scaled(seed + 6, rows * heads, 2.0)
                .into_iter()
                .map(|a| if a > 2.5 { a + 20.0 } else { a - 3.0 })
                .collect(),
            b: scaled(seed + 7, rows * heads, 2.0),
        }
    }

    /// A row's channels after the convolution, and the state's inputs with those of the row.
    fn convolve(&self, row: usize, kept: &mut [f64]) -> Vec<f64> {
        let (channels, taps) = (self.shape.channels(), self.shape.taps);
        let x = &self.x[row * channels..][..channels];
        let sum = |i: usize| -> f64 {
            let weights = &self.conv[i * taps..][..taps];
            let before = (0..taps - 1).map(|j| kept[j * channels + i]);
            let inputs = before.chain([f64::from(x[i])]);
            inputs.zip(weights).map(|(x, &w)| x * f64::from(w)).sum()
        };
        let result = (0..channels).map(|i| silu(sum(i))).collect();
        kept.copy_within(channels.., 0);
        let last = &mut kept[(taps - 2) * channels..];
        last.iter_mut().zip(x).for_each(|(k, &x)| *k = x.into());
        result
    }

    /// One head of a row by the delta rule. `s` is the head's part of the state.
    fn recur(&self, row: usize, head: usize, channels: &[f64], s: &mut [f64]) -> Vec<f64> {
        let &DeltaShape {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            ..
        } = &self.shape;
        let part = |first: usize, scale: f64| -> Vec<f64> {
            let y = &channels[first..][..key_dim];
            let squares: f64 = y.iter().map(|y| y * y).sum();
            y.iter()
                .map(|y| y * scale / (squares + 1e-6).sqrt())
                .collect()
        };
        let key_head = head / (value_heads / key_heads);
        let q = part(key_head * key_dim, (key_dim as f64).powf(-0.5));
        let k = part((key_heads + key_head) * key_dim, 1.0);
        let v = &channels[2 * key_heads * key_dim + head * value_dim..][..value_dim];
        let gate = row * value_heads + head;
        let x = f64::from(self.a[gate]) + f64::from(self.dt_bias[head]);
        let softplus = if x > 20.0 { x } else { x.exp().ln_1p() };
        let decay = (-f64::from(self.a_log[head]).exp() * softplus).exp();
        let beta = 1.0 / (1.0 + (-f64::from(self.b[gate])).exp());
        s.iter_mut().for_each(|s| *s *= decay);
        let product = |x: &[f64], s: &[f64]| -> Vec<f64> {
            let column = |j: usize| (0..key_dim).map(|i| x[i] * s[i * value_dim + j]).sum();
            (0..value_dim).map(column).collect()
        };
        let delta: Vec<f64> = product(&k, s)
            .iter()
            .zip(v)
            .map(|(product, v)| (v - product) * beta)
            .collect();
        for (s, k) in s.chunks_exact_mut(value_dim).zip(&k) {
            s.iter_mut().zip(&delta).for_each(|(s, d)| *s += k * d);
        }
        product(&q, s)
    }

    /// The results of rows from a state on, which becomes that after them.
    fn expect(&self, first: usize, rows: usize, state: &mut [f64]) -> Vec<f64> {
        let size = self.shape.key_dim * self.shape.value_dim;
        let (matrices, kept) = state.split_at_mut(self.shape.matrix_floats());
        let mut o = Vec::new();
        for row in first..first + rows {
            let channels = self.convolve(row, kept);
            for (head, s) in matrices.chunks_exact_mut(size).enumerate() {
                o.extend(self.recur(row, head, &channels, s));
            }
        }
        o
    }

    /// The gated norm of results.
    fn norm(&self, o: &[f32]) -> Vec<f64> {
        let dim = self.shape.value_dim;
        let heads = o.chunks_exact(dim).zip(self.z.chunks_exact(dim));
        let of_head = |(o, z): (&[f32], &[f32])| -> Vec<f64> {
            let squares: f64 = o.iter().map(|&o| f64::from(o).powi(2)).sum();
            let factor = 1.0 / (squares / dim as f64 + f64::from(EPS)).sqrt();
            let gated = |i: usize| f64::from(o[i]) * factor * f64::from(self.norm[i]);
            (0..dim).map(|i| gated(i) * silu(z[i].into())).collect()
        };
        heads.flat_map(of_head).collect()
    }
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Convolution and recurrence of rows of a layer from `first` on, on the device; `single` runs the kernel of single rows.
fn run(
    gpu: &Arc<Gpu>,
    layer: &Layer,
    first: usize,
    segments: &[Segment],
    blocks: &Blocks,
    single: bool,
) -> DeviceBuffer {
    let Layer { shape, .. } = layer;
    let segments = DeviceSegments::new(gpu, segments);
    let (rows, segments) = (segments.rows, segments.argument());
    let [conv, a_log, dt_bias] =
        [&layer.conv, &layer.a_log, &layer.dt_bias].map(|values| upload(gpu, values));
    let weights = DeltaConstants {
        conv: (&conv).into(),
        a_log: (&a_log).into(),
        dt_bias: (&dt_bias).into(),
    };
    let heads = shape.value_heads;
    let inputs = [
        (&layer.x, shape.channels()),
        (&layer.a, heads),
        (&layer.b, heads),
    ]
    .map(|(all, width)| (upload(gpu, &all[first * width..][..rows * width]), width));
    let [x, a, b] = inputs.each_ref().map(|(buffer, width)| StridedRows {
        values: buffer.into(),
        stride: *width,
    });
    let [qkv, decay, beta, o] = [shape.channels(), heads, heads, shape.value_width()]
        .map(|width| poisoned(gpu, rows * width * 4));
    let made = DeltaInputs {
        qkv: (&qkv).into(),
        decay: (&decay).into(),
        beta: (&beta).into(),
    };
    let states = blocks.states();
    cuda::delta_conv(shape, &weights, &segments, &states, rows, x, a, b, &made).unwrap();
    cuda::delta_rule(shape, &segments, &states, rows, single, &made, (&o).into()).unwrap();
    o
}

/// The gated norm on the device, of rows of results.
fn check_norm(gpu: &Arc<Gpu>, layer: &Layer, o: &DeviceBuffer, what: &str) {
    let (rows, width) = (layer.rows, layer.shape.value_width());
    let want = layer.norm(&read_f32(o, rows * width));
    let (weight, z) = (upload(gpu, &layer.norm), upload(gpu, &layer.z));
    check_norm_outputs(gpu, [rows, width], &want, what, |output, out| {
        let z = StridedRows {
            values: (&z).into(),
            stride: width,
        };
        let (weight, o) = ((&weight).into(), o.into());
        cuda::delta_norm(
            &layer.shape,
            weight,
            EPS,
            rows,
            o,
            z,
            output,
            None,
            out.into(),
        )
        .unwrap();
    });
}

/// A batch of segments against f64. Blocks that none of them writes stay as they are.
fn check(gpu: &Arc<Gpu>, shape: DeltaShape, segments: &[Segment], seed: u64) {
    check_by(false, gpu, shape, segments, seed);
}

/// As [`check`], by the kernel of single rows or the other.
fn check_by(single: bool, gpu: &Arc<Gpu>, shape: DeltaShape, segments: &[Segment], seed: u64) {
    let what = format!("{shape:?}, {segments:?}");
    let rows = segments.iter().map(|&(rows, ..)| rows).sum();
    let layer = Layer::new(shape, rows, seed);
    let blocks = Blocks::new(gpu, shape.state_floats(), BLOCKS, seed + 100);
    let o = run(gpu, &layer, 0, segments, &blocks, single);
    let width = shape.value_width();
    let got = read_f32(&o, rows * width);
    let after = blocks.read();
    let (mut first, mut state) = (0, Vec::new());
    for (index, &segment) in segments.iter().enumerate() {
        let (rows, _, write) = segment;
        if !continues(segments, index) {
            state = as_f64(&blocks.read_by(segment));
        }
        let want = layer.expect(first, rows, &mut state);
        let of_segment = &got[first * width..][..rows * width];
        assert_close(of_segment, &want, RECURRENCE, &format!("{what}: o"));
        let (got, kept) = blocks.state(&after, write).split_at(shape.matrix_floats());
        let (want, inputs) = state.split_at(shape.matrix_floats());
        assert_close(got, want, RECURRENCE, &format!("{what}: S"));
        let same = kept.iter().zip(inputs).all(|(&k, &i)| f64::from(k) == i);
        assert!(same, "{what}: inputs that are kept");
        first += rows;
    }
    blocks.assert_others_kept(&after, segments, &what);
    check_norm(gpu, &layer, &o, &what);
}

#[test]
fn delta_layers_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let shapes = [
        (2, 4, 16, 32),
        (3, 3, 32, 16),
        (1, 2, 128, 128),
        (1, 1, 48, 80),
        (1, 2, 208, 256),
    ];
    for (i, &sizes) in shapes.iter().enumerate() {
        check(&gpu, shape(sizes), &RAGGED, 4000 + 20 * i as u64);
    }
    for taps in [2, 3] {
        let few = DeltaShape {
            taps,
            ..shape((2, 4, 16, 32))
        };
        check(&gpu, few, &RAGGED, 4200 + 20 * taps as u64);
    }
}

#[test]
fn delta_layers_of_published_sizes_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let published = shape((16, 32, 128, 128));
    for (i, segment) in [(1, 1, 1), (5, 2, 3), (300, 0, 4)].into_iter().enumerate() {
        check(&gpu, published, &[segment], 4300 + 20 * i as u64);
    }
}

/// A segment in parts, with the state in other blocks or the same between them, gives the bits of the whole.
#[test]
fn delta_layers_may_be_divided_anywhere() {
    let Some(gpu) = gpu() else { return };
    for sizes in [(2, 4, 16, 32), (1, 1, 48, 80), (16, 32, 128, 128)] {
        let layer = Layer::new(shape(sizes), 70, 4400);
        let blocks = Blocks::new(&gpu, layer.shape.state_floats(), 5, 4450);
        let width = layer.shape.value_width();
        check_division(&blocks, width, &format!("{sizes:?}"), |first, segment| {
            run(&gpu, &layer, first, &[segment], &blocks, false)
        });
    }
}

/// Single rows of sequences, in place, from other blocks and from zeros: nine, so that their fragments are two groups.
const SINGLE: [Segment; 9] = [
    (1, 1, 1),
    (1, 2, 3),
    (1, 0, 4),
    (1, 5, 5),
    (1, 6, 6),
    (1, 7, 7),
    (1, 8, 9),
    (1, 10, 10),
    (1, 0, 11),
];

#[test]
fn delta_rules_of_single_rows_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let hardware = Hardware::of(&gpu).unwrap();
    let shapes = [(16, 32, 128, 128), (2, 4, 16, 64), (1, 2, 48, 192)];
    for (i, &sizes) in shapes.iter().enumerate() {
        let shape = shape(sizes);
        assert!(cuda::has_delta_single(&hardware, &shape));
        assert!(!cuda::has_delta_single(&hardware.deterministic(), &shape));
        for rows in [1, 9] {
            check_by(true, &gpu, shape, &SINGLE[..rows], 4700 + 20 * i as u64);
        }
    }
    for without in [(1, 1, 256, 64), (1, 1, 128, 96)] {
        assert!(!cuda::has_delta_single(&hardware, &shape(without)));
    }
}

/// A layer of single rows in one launch; the rows go to `out`.
fn step(gpu: &Arc<Gpu>, layer: &Layer, blocks: &Blocks, layout: Layout, out: &DeviceBuffer) {
    let shape = &layer.shape;
    let segments = DeviceSegments::new(gpu, &SINGLE[..layer.rows]);
    let constants = [&layer.conv, &layer.a_log, &layer.dt_bias, &layer.norm];
    let [conv, a_log, dt_bias, norm] = constants.map(|values| upload(gpu, values));
    let heads = shape.value_heads;
    let inputs = [
        (&layer.x, shape.channels()),
        (&layer.z, shape.value_width()),
        (&layer.a, heads),
        (&layer.b, heads),
    ]
    .map(|(values, stride)| (upload(gpu, values), stride));
    let [x, z, a, b] = inputs.each_ref().map(|(buffer, stride)| StridedRows {
        values: buffer.into(),
        stride: *stride,
    });
    cuda::delta_step(
        shape,
        &DeltaConstants {
            conv: (&conv).into(),
            a_log: (&a_log).into(),
            dt_bias: (&dt_bias).into(),
        },
        ((&norm).into(), EPS),
        &segments.argument(),
        &blocks.states(),
        &DeltaProjected { x, z, a, b },
        layout,
        None,
        out.into(),
    )
    .unwrap();
}

/// Single rows of a shape in one launch, against f64.
fn check_step(gpu: &Arc<Gpu>, shape: DeltaShape, rows: usize, layout: Layout, seed: u64) {
    let what = format!("{shape:?}, {rows} single rows, {layout:?}");
    let (layer, width) = (Layer::new(shape, rows, seed), shape.value_width());
    let blocks = Blocks::new(gpu, shape.state_floats(), BLOCKS, seed + 100);
    let out = poisoned(gpu, layout.elements(rows, width) * 2);
    step(gpu, &layer, &blocks, layout, &out);
    let (after, mut o) = (blocks.read(), Vec::new());
    for (row, &segment) in SINGLE[..rows].iter().enumerate() {
        let mut state = as_f64(&blocks.read_by(segment));
        o.extend(layer.expect(row, 1, &mut state));
        let (got, kept) = blocks
            .state(&after, segment.2)
            .split_at(shape.matrix_floats());
        let (want, inputs) = state.split_at(shape.matrix_floats());
        assert_close(got, want, RECURRENCE, &format!("{what}: S of {row}"));
        let same = kept.iter().zip(inputs).all(|(&k, &i)| f64::from(k) == i);
        assert!(same, "{what}: inputs that are kept of {row}");
    }
    blocks.assert_others_kept(&after, &SINGLE[..rows], &what);
    let o: Vec<f32> = o.into_iter().map(|o| o as f32).collect();
    let got = read_rows(layout, &out, rows, width);
    assert_close(&got, &layer.norm(&o), HALF, &what);
}

/// Layers of single rows in one launch, whose blocks have 32, 64 and 128 columns and whose clusters have two to eight.
#[test]
fn delta_steps_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let hardware = Hardware::of(&gpu).unwrap();
    let shapes = [
        (16, 32, 128, 128),
        (2, 4, 16, 32),
        (1, 1, 48, 256),
        (1, 3, 64, 128),
        (2, 16, 16, 128),
    ];
    for (i, &sizes) in shapes.iter().enumerate() {
        for taps in [2, 3, 4] {
            let shape = DeltaShape {
                taps,
                ..shape(sizes)
            };
            if !hardware.has_clusters() {
                assert!(!cuda::has_delta_step(&hardware, &shape, 1));
                continue;
            }
            assert!(cuda::has_delta_step(&hardware, &shape, 1), "{shape:?}");
            let seed = 4500 + 100 * i as u64 + 10 * taps as u64;
            check_step(&gpu, shape, 1, Layout::RowMajor, seed);
            check_step(&gpu, shape, SINGLE.len(), Layout::RowMajor, seed + 1);
            check_step(&gpu, shape, SINGLE.len(), Layout::FragmentMajor, seed + 2);
        }
    }
}
