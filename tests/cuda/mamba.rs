//! Mamba-2 layers against the processor's operations: batches of several segments, whose states are in the blocks of an arena.

use std::sync::Arc;

use NVFP4::cpu::{Cpu, MambaScanRows, MambaSteps};
use NVFP4::cuda::{
    self, DeviceBuffer, DeviceSlice, Gpu, Layout, MambaConstants, MambaInputs, RecurrentOutput,
    StridedRows,
};
use NVFP4::tensor::MambaShape;

use crate::recurrent::{
    BLOCKS, Blocks, DeviceSegments, RAGGED, Segment, check_division, check_norm_outputs, continues,
};
use crate::support::{
    EPS, as_f64, assert_close, gpu, normal, poisoned, read_f32, same_bits, upload,
};

/// The bound of rows and states in f32. Both sides round: decays do not let errors of earlier rows grow, each row adds some roundings, and
/// an error of a decay is repeated in as many rows as it lets S live.
const RECURRENCE: f64 = 2e-5;

fn shape(
    (heads, head_dim, groups, state_size): (usize, usize, usize, usize),
    taps: usize,
) -> MambaShape {
    MambaShape {
        heads,
        head_dim,
        groups,
        state_size,
        taps,
    }
}

/// Nemotron 3 Nano.
const PUBLISHED: (usize, usize, usize, usize) = (64, 64, 8, 128);

/// A layer with the inputs of some rows, on the host. A row has the gate z, then x, B and C, then what time steps come of, and padding.
struct Layer {
    shape: MambaShape,
    rows: usize,
    conv: Vec<f32>,
    conv_bias: Option<Vec<f32>>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    limits: [f32; 2],
    skip: Vec<f32>,
    norm: Vec<f32>,
    stride: usize,
    inputs: Vec<f32>,
}

impl Layer {
    fn new(shape: MambaShape, rows: usize, seed: u64) -> Layer {
        let scaled = |seed: u64, count: usize, factor: f32| -> Vec<f32> {
            let values = normal(seed, count).into_iter();
            values.map(|v| v * factor).collect()
        };
        let first_dt = shape.width() + shape.channels();
        let stride = (first_dt + shape.heads).next_multiple_of(4);
        let mut inputs = normal(seed + 5, rows * stride);
        // Some are large, where softplus is the identity.
        for row in inputs.chunks_exact_mut(stride) {
            for dt in &mut row[first_dt..] {
                *dt = if *dt > 1.5 {
                    *dt + 20.0
                } else {
                    2.0 * *dt - 3.0
                };
            }
        }
        Layer {
            shape,
            rows,
            conv: scaled(seed, shape.channels() * shape.taps, 0.5),
            conv_bias: Some(scaled(seed + 1, shape.channels(), 0.5)),
            a_log: scaled(seed + 2, shape.heads, 0.5),
            dt_bias: scaled(seed + 3, shape.heads, 1.0),
            limits: [0.0, f32::INFINITY],
            skip: scaled(seed + 4, shape.heads, 1.0),
            norm: scaled(seed + 6, shape.width(), 1.0),
            stride,
            inputs,
        }
    }

    /// `width` inputs from `column` on of rows from `first` on.
    fn part(&self, first: usize, rows: usize, column: usize, width: usize) -> Vec<f32> {
        let rows = self.inputs[first * self.stride..][..rows * self.stride].chunks(self.stride);
        rows.flat_map(|row| row[column..][..width].iter().copied())
            .collect()
    }

    /// The results of rows on the processor from a state on, which becomes that after them.
    fn expect(&self, cpu: &Cpu, first: usize, rows: usize, state: &mut [f32]) -> Vec<f32> {
        let shape = &self.shape;
        let mut xbc = self.part(first, rows, shape.width(), shape.channels());
        let (matrices, history) = state.split_at_mut(shape.matrix_floats());
        let bias = self.conv_bias.as_deref();
        cpu.convolve(&mut xbc, shape.channels(), &self.conv, bias, history)
            .unwrap();
        let mut dt = self.part(first, rows, shape.width() + shape.channels(), shape.heads);
        let mut decay = vec![0.0; dt.len()];
        let steps = MambaSteps {
            a_log: &self.a_log,
            dt_bias: &self.dt_bias,
            limits: self.limits,
        };
        cpu.mamba_steps(steps, &mut dt, &mut decay).unwrap();
        let mut out = vec![0.0; rows * shape.width()];
        let scanned = MambaScanRows {
            xbc: &xbc,
            decay: &decay,
            dt: &dt,
            skip: &self.skip,
            out: &mut out,
        };
        cpu.mamba_scan(shape, scanned, matrices).unwrap();
        out
    }

    /// The norm of gated results on the processor.
    fn norm(&self, cpu: &Cpu, y: &[f32]) -> Vec<f64> {
        let mut gated = self.part(0, self.rows, 0, self.shape.width());
        cpu.swiglu(&mut gated, y).unwrap();
        cpu.rms_norm_groups(&mut gated, &self.norm, self.shape.groups, EPS)
            .unwrap();
        as_f64(&gated)
    }
}

/// Rows of inputs on the device, from a column on.
fn columns<'a>(inputs: &'a DeviceBuffer, layer: &Layer, column: usize) -> StridedRows<'a> {
    let values = DeviceSlice::from(inputs);
    StridedRows {
        values: values.part(4 * column..inputs.bytes()).unwrap(),
        stride: layer.stride,
    }
}

/// Convolution and recurrence of rows of a layer from `first` on, on the device.
fn run(
    gpu: &Arc<Gpu>,
    layer: &Layer,
    first: usize,
    segments: &[Segment],
    blocks: &Blocks,
) -> DeviceBuffer {
    let shape = &layer.shape;
    let segments = DeviceSegments::new(gpu, segments);
    let (rows, segments) = (segments.rows, segments.argument());
    let [conv, a_log, dt_bias, skip] =
        [&layer.conv, &layer.a_log, &layer.dt_bias, &layer.skip].map(|values| upload(gpu, values));
    let conv_bias = layer.conv_bias.as_ref().map(|bias| upload(gpu, bias));
    let weights = MambaConstants {
        conv: (&conv).into(),
        conv_bias: conv_bias.as_ref().map(Into::into),
        a_log: (&a_log).into(),
        dt_bias: (&dt_bias).into(),
        step_limits: layer.limits,
    };
    let inputs = &layer.inputs[first * layer.stride..][..rows * layer.stride];
    let inputs = upload(gpu, inputs);
    let xbc = columns(&inputs, layer, shape.width());
    let dt = columns(&inputs, layer, shape.width() + shape.channels());
    let [convolved, decay, steps, y] = [shape.channels(), shape.heads, shape.heads, shape.width()]
        .map(|width| poisoned(gpu, rows * width * 4));
    let made = MambaInputs {
        xbc: (&convolved).into(),
        decay: (&decay).into(),
        steps: (&steps).into(),
    };
    let (states, skip) = (blocks.states(), (&skip).into());
    cuda::mamba_conv(shape, &weights, &segments, &states, rows, xbc, dt, &made).unwrap();
    cuda::mamba_scan(shape, skip, &segments, &states, rows, &made, (&y).into()).unwrap();
    y
}

/// The norm of gated results on the device.
fn check_norm(gpu: &Arc<Gpu>, cpu: &Cpu, layer: &Layer, y: &DeviceBuffer, what: &str) {
    let (rows, width) = (layer.rows, layer.shape.width());
    let want = layer.norm(cpu, &read_f32(y, rows * width));
    let (weight, inputs) = (upload(gpu, &layer.norm), upload(gpu, &layer.inputs));
    check_norm_outputs(gpu, [rows, width], &want, what, |output, out| {
        cuda::mamba_norm(
            &layer.shape,
            (&weight).into(),
            EPS,
            rows,
            y.into(),
            columns(&inputs, layer, 0),
            output,
            None,
            out.into(),
        )
        .unwrap();
    });
}

/// A batch of segments against the processor. Blocks that none of them writes stay as they are.
fn check(gpu: &Arc<Gpu>, layer: &Layer, segments: &[Segment], seed: u64) {
    let (shape, cpu) = (&layer.shape, Cpu::new(Some(1)).unwrap());
    let what = format!("{shape:?}, {segments:?}");
    let blocks = Blocks::new(gpu, shape.state_floats(), BLOCKS, seed);
    let y = run(gpu, layer, 0, segments, &blocks);
    let width = shape.width();
    let (got, after) = (read_f32(&y, layer.rows * width), blocks.read());
    let (mut first, mut state) = (0, Vec::new());
    for (index, &segment) in segments.iter().enumerate() {
        let (rows, _, write) = segment;
        if !continues(segments, index) {
            state = blocks.read_by(segment);
        }
        let want = layer.expect(&cpu, first, rows, &mut state);
        let of_segment = &got[first * width..][..rows * width];
        if rows > 0 {
            let what = format!("{what}: y");
            assert_close(of_segment, &as_f64(&want), RECURRENCE, &what);
        }
        let (got, kept) = blocks.state(&after, write).split_at(shape.matrix_floats());
        let (want, inputs) = state.split_at(shape.matrix_floats());
        assert_close(got, &as_f64(want), RECURRENCE, &format!("{what}: S"));
        assert!(same_bits(kept, inputs), "{what}: inputs that are kept");
        first += rows;
    }
    blocks.assert_others_kept(&after, segments, &what);
    check_norm(gpu, &cpu, layer, &y, &what);
}

#[test]
fn mamba_layers_agree_with_the_processor() {
    let Some(gpu) = gpu() else { return };
    let rows = RAGGED.iter().map(|&(rows, ..)| rows).sum();
    let sizes = [
        (4, 32, 2, 16),
        (3, 16, 3, 32),
        (2, 64, 1, 128),
        (6, 48, 2, 80),
        (1, 256, 1, 208),
    ];
    for (i, &sizes) in sizes.iter().enumerate() {
        let layer = Layer::new(shape(sizes, 4), rows, 5000 + 20 * i as u64);
        check(&gpu, &layer, &RAGGED, 5100 + i as u64);
    }
    for taps in [2, 3] {
        let layer = Layer {
            conv_bias: None,
            limits: [0.05, 1.5],
            ..Layer::new(shape(sizes[0], taps), rows, 5200 + 20 * taps as u64)
        };
        check(&gpu, &layer, &RAGGED, 5300 + taps as u64);
    }
}

#[test]
fn mamba_layers_of_published_sizes_agree_with_the_processor() {
    let Some(gpu) = gpu() else { return };
    // A segment without rows copies its state.
    for (i, segments) in [&[(1, 1, 1), (0, 5, 6)][..], &[(5, 2, 3)], &[(300, 0, 4)]]
        .into_iter()
        .enumerate()
    {
        let rows = segments.iter().map(|&(rows, ..)| rows).sum();
        let layer = Layer::new(shape(PUBLISHED, 4), rows, 5400 + 20 * i as u64);
        check(&gpu, &layer, segments, 5500 + i as u64);
    }
}

/// A segment in parts, with the state in other blocks or the same between them, gives the bits of the whole.
#[test]
fn mamba_layers_may_be_divided_anywhere() {
    let Some(gpu) = gpu() else { return };
    for sizes in [(4, 32, 2, 16), (3, 80, 1, 48), PUBLISHED] {
        let layer = Layer::new(shape(sizes, 4), 70, 5600);
        let blocks = Blocks::new(&gpu, layer.shape.state_floats(), 5, 5650);
        let width = layer.shape.width();
        check_division(&blocks, width, &format!("{sizes:?}"), |first, segment| {
            run(&gpu, &layer, first, &[segment], &blocks)
        });
    }
}

/// A gate that is not a number is noted with its row and layer, unless a layer is noted already.
#[test]
fn results_beyond_f16_are_noted() {
    let Some(gpu) = gpu() else { return };
    let mut layer = Layer::new(shape((4, 32, 2, 16), 4), 3, 5700);
    let width = layer.shape.width();
    let y = upload(&gpu, &normal(5750, 3 * width));
    let stride = layer.stride;
    layer.inputs[stride + 7] = f32::NAN;
    layer.inputs[2 * stride + 7] = f32::NAN;
    let (weight, inputs) = (upload(&gpu, &layer.norm), upload(&gpu, &layer.inputs));
    let notes = upload(&gpu, &[0u32, 0, 2]);
    for layout in [Layout::RowMajor, Layout::FragmentMajor] {
        let out = poisoned(&gpu, layout.elements(3, width) * 2);
        cuda::mamba_norm(
            &layer.shape,
            (&weight).into(),
            EPS,
            3,
            (&y).into(),
            columns(&inputs, &layer, 0),
            RecurrentOutput::F16(layout),
            Some(((&notes).into(), 6)),
            (&out).into(),
        )
        .unwrap();
        let noted: Vec<u32> = read_f32(&notes, 3).iter().map(|v| v.to_bits()).collect();
        assert_eq!(noted, [0, 7, 2], "{layout:?}");
    }
}
