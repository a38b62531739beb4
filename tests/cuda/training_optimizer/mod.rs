//! AdamW on matrices in their stored form: the GPU against the CPU in every form. Everything has the same bits but results of roots and
//! quotients, which a GPU takes to two units in the last place: a few of their codes differ, by one.

mod speed;

use std::ops::Range;
use std::sync::Arc;

use NVFP4::cpu::Cpu;
use NVFP4::cuda::Gpu;
use NVFP4::format::adamw::{
    Coefficients, FirstForm, Forms, Hyperparameters, KeepScale, SecondForm, WeightForm,
};
use NVFP4::format::residual::Bits;
use NVFP4::model::Device;
use NVFP4::ops::training::optimizer::{Matrix, RowsStep, StatePart, Vector, make_steps};
use NVFP4::ops::{Array, Mixed, Slice, SliceMut};
use half::bf16;

use crate::support::{gpu, normal};

const FORMS: [(WeightForm, FirstForm, SecondForm); 8] = [
    (
        WeightForm::Residual(Bits::Four),
        FirstForm::Int4,
        SecondForm::Uint4,
    ),
    (
        WeightForm::Residual(Bits::Eight),
        FirstForm::Int4,
        SecondForm::Uint4,
    ),
    (
        WeightForm::Residual(Bits::Four),
        FirstForm::Nvfp4,
        SecondForm::Nvfp4,
    ),
    (WeightForm::TwoTerm, FirstForm::Int8, SecondForm::Int8),
    (WeightForm::OneTerm, FirstForm::Int4, SecondForm::F32),
    (WeightForm::Bf16, FirstForm::F32, SecondForm::F32),
    (WeightForm::F32, FirstForm::F32, SecondForm::F32),
    (WeightForm::F32, FirstForm::Int4, SecondForm::Nvfp4),
];

/// With scales of weights that stay from step to step.
fn steady((weight, first, second): (WeightForm, FirstForm, SecondForm)) -> Forms {
    Forms {
        weight,
        first,
        second,
        keep_scale: KeepScale::Near,
    }
}

/// Gradients that bf16 holds, of some rows of very different sizes.
fn gradients(seed: u64, rows: usize, cols: usize) -> Vec<f32> {
    let mut values = normal(seed, rows * cols);
    for (i, row) in values.chunks_exact_mut(cols).enumerate() {
        let size = [1e-3, 1.0, 1e-9, 0.0, 3e-2][i % 5];
        row.iter_mut()
            .for_each(|v| *v = bf16::from_f32(*v * size).to_f32());
    }
    values
}

/// A step of the rows from `first_row` on.
fn rows_step(
    coefficients: Coefficients,
    first_row: usize,
    gradients: Slice<'_, Mixed>,
) -> RowsStep<'_> {
    RowsStep {
        coefficients,
        seed: 5,
        tensor: 3,
        first_row,
        gradients,
        clip: None,
    }
}

fn on(device: &Device, values: &[f32]) -> Array<Mixed> {
    let mut array = Array::scratch(device, values.len()).unwrap();
    array.all_mut().copy_from(Slice::Host(values)).unwrap();
    array
}

/// A matrix in one form, stepped on the CPU and on the GPU.
struct Both<'a> {
    devices: &'a [Device; 2],
    forms: Forms,
    rows: usize,
    cols: usize,
    /// The values before the first step.
    values: Vec<f32>,
    matrices: [Matrix; 2],
}

impl<'a> Both<'a> {
    fn new(devices: &'a [Device; 2], forms: Forms, rows: usize, cols: usize) -> Both<'a> {
        let Device::Cpu(host) = &devices[0] else {
            unreachable!()
        };
        let values: Vec<f32> = normal(7, rows * cols).iter().map(|v| v * 0.03).collect();
        let read = |range: Range<usize>, out: &mut [f32]| {
            out.copy_from_slice(&values[range.start * cols..range.end * cols]);
            Ok(())
        };
        let matrices = devices
            .each_ref()
            .map(|device| Matrix::new(device, host, forms, rows, cols, &read).unwrap());
        Both {
            devices,
            forms,
            rows,
            cols,
            values,
            matrices,
        }
    }

    fn what(&self) -> String {
        format!("{:?} [{}, {}]", self.forms, self.rows, self.cols)
    }

    /// Makes a step on both devices, and compares the number of codes that change.
    fn step(&mut self, number: u64) {
        // The last rate makes weights outgrow their scales.
        let settings = Hyperparameters {
            rate: if number == 4 { 0.05 } else { 2e-3 },
            ..Hyperparameters::default()
        };
        let c = Coefficients::new(&settings, number, 0.7);
        let cols = self.cols;
        let all = gradients(number, self.rows, cols);
        let mut changes = Vec::new();
        for (device, matrix) in self.devices.iter().zip(&mut self.matrices) {
            // In two parts, as an embedding comes.
            for part in [0..8, 8..self.rows] {
                if !part.is_empty() {
                    let part_gradients = on(device, &all[part.start * cols..part.end * cols]);
                    let step = rows_step(c, part.start, part_gradients.all());
                    matrix.step(device, &step).unwrap();
                }
            }
            changes.push(matrix.finish_step(device).unwrap());
        }
        assert!(changes[0].stored > 0);
        let close = |a: u64, b: u64| a.abs_diff(b) <= 2 + a / 500;
        assert!(
            close(changes[0].stored, changes[1].stored)
                && close(changes[0].delivered, changes[1].delivered),
            "{}, step {number}: {changes:?}",
            self.what()
        );
    }

    /// Compares the bytes of the weights and the moments.
    fn check_state(&self, number: u64) {
        for part in StatePart::ALL {
            let [cpu, gpu] =
                [0, 1].map(|i| self.matrices[i].read_part(&self.devices[i], part).unwrap());
            let differing = cpu.iter().zip(&gpu).filter(|(a, b)| a != b).count();
            let dense = match part {
                StatePart::Codes => !self.forms.weight.is_packed(),
                StatePart::Second(_) => self.forms.second == SecondForm::F32,
                _ => false,
            };
            // The first moment takes no root, and parts in float32 are compared as numbers.
            let most = match part {
                StatePart::First(_) => 0,
                _ if dense => cpu.len(),
                _ => 2 + cpu.len() / 500,
            };
            assert!(
                differing <= most && cpu.len() == gpu.len(),
                "{}, step {number}: {differing} of {} bytes of {}",
                self.what(),
                cpu.len(),
                part.name()
            );
        }
        assert_eq!(self.matrices[0].global(), self.matrices[1].global());
    }

    /// Gives the CPU the weights of the GPU.
    fn share_weights(&mut self) {
        let [cpu, gpu] = &mut self.matrices;
        let [codes, scales, rest] = [StatePart::Codes, StatePart::Scales, StatePart::Rest]
            .map(|part| gpu.read_part(&self.devices[1], part).unwrap());
        cpu.write_weights(&self.devices[0], &codes, &scales)
            .unwrap();
        cpu.write_part(StatePart::Rest, &rest).unwrap();
    }

    /// Demands that weights have not moved further than four steps take them.
    fn check_moved(&self, exact: &[f32]) {
        let both = exact.iter().zip(&self.values);
        let squares: f64 = both.map(|(a, b)| f64::from(a - b).powi(2)).sum();
        // Four steps, the last of up to 0.05 either way; a code alone is rounded each time, to neighbours 0.03 apart. The
        // scale of a first moment has a floor, below which second moments in float32 go on to fall.
        let has_floor = self.forms.first != FirstForm::F32 && self.forms.second == SecondForm::F32;
        let most = match self.forms.weight {
            WeightForm::OneTerm => 0.12,
            _ => 0.08,
        };
        let moved = (squares / exact.len() as f64).sqrt();
        assert!(has_floor || moved < most, "{}: {moved}", self.what());
    }

    /// Compares the values, `whole` or as they are delivered, that both decode from the same bytes.
    fn check_values(&mut self, whole: bool) {
        let (rows, cols) = (self.rows, self.cols);
        let what = self.what();
        let mut exact = vec![0.0; rows * cols];
        self.matrices[0]
            .decode(&self.devices[0], 0..rows, whole, SliceMut::Host(&mut exact))
            .unwrap();
        self.check_moved(&exact);
        let (gpu, device) = (&mut self.matrices[1], &self.devices[1]);
        let exact: Vec<f32> = exact.iter().map(|&v| bf16::from_f32(v).to_f32()).collect();
        let mut out = on(device, &vec![9.0; rows * cols]);
        gpu.decode(device, 0..rows, whole, out.all_mut()).unwrap();
        let mut values = vec![0.0; rows * cols];
        out.all().read(&mut values).unwrap();
        assert_eq!(values, exact, "{what}");
        let tokens = [5u32, 0, 7, 5];
        let first = out.first_mut(4 * cols).unwrap();
        gpu.decode_rows(device, &tokens, whole, first).unwrap();
        out.all().read(&mut values).unwrap();
        for (row, token) in values.chunks_exact(cols).zip(tokens) {
            assert_eq!(row, &exact[token as usize * cols..][..cols], "{what}");
        }
    }
}

/// The state of a vector after three steps.
fn stepped_vector(device: &Device) -> [Vec<u8>; 3] {
    let c = Coefficients::new(&Hyperparameters::default(), 1, 0.5);
    let (values, gradients) = (normal(1, 1000), normal(2, 1000));
    let mut vector = Vector::new(device, &values).unwrap();
    for _ in 0..3 {
        vector
            .gradient()
            .copy_from(Slice::Host(&gradients))
            .unwrap();
        vector.step(device, &c).unwrap();
    }
    vector.read_state().unwrap()
}

#[test]
fn adamw_gives_what_the_cpu_gives() {
    let Some(gpu) = gpu() else { return };
    let devices = [Device::cpu(Some(2)).unwrap(), Device::Cuda(gpu)];
    for (weight, first, second) in FORMS {
        for keep_scale in [KeepScale::Near, KeepScale::Held, KeepScale::Never] {
            for (rows, cols) in [(8, 128), (37, 48), (64, 640)] {
                let forms = Forms {
                    weight,
                    first,
                    second,
                    keep_scale,
                };
                let mut both = Both::new(&devices, forms, rows, cols);
                for number in 1..=4 {
                    both.step(number);
                    both.check_state(number);
                }
                both.share_weights();
                for whole in [true, false] {
                    both.check_values(whole);
                }
            }
        }
    }
    let [cpu, gpu] = devices.each_ref().map(stepped_vector);
    assert!(cpu == gpu);
}

/// The shapes of matrices that are stepped at the same time, small ones and large ones.
const SHAPES: [(usize, usize); 6] = [
    (2_560, 2_048),
    (16, 128),
    (1_003, 1_040),
    (8, 9_728),
    (4_096, 256),
    (512, 512),
];

/// The parts of matrices of all shapes after three steps, and the values that were read right after each.
fn stepped_matrices(
    gpu: &Arc<Gpu>,
    forms: Forms,
    g: &Array<Mixed>,
    at_once: bool,
) -> (Vec<Vec<Vec<u8>>>, Vec<Vec<f32>>) {
    let device = Device::Cuda(gpu.clone());
    let host = Cpu::new(None).unwrap();
    let values = normal(7, 1 << 16);
    let mut matrices = SHAPES.map(|(rows, cols)| {
        let read = |range: Range<usize>, out: &mut [f32]| {
            for (o, i) in out.iter_mut().zip(range) {
                *o = 0.03 * values[i % values.len()];
            }
            Ok(())
        };
        Matrix::new(&device, &host, forms, rows, cols, &read).unwrap()
    });
    let mut out = Array::<Mixed>::scratch(&device, 2_560 * 2_048).unwrap();
    let mut read = Vec::new();
    for number in 1..=3 {
        let c = Coefficients::new(&Hyperparameters::default(), number, 1.0);
        let with_steps = matrices.iter_mut().enumerate().map(|(i, matrix)| {
            let (rows, cols) = matrix.shape();
            let gradients = g.part(64 * i..64 * i + rows * cols).unwrap();
            (matrix, rows_step(c, 0, gradients))
        });
        let mut steps: Vec<_> = with_steps.collect();
        match at_once {
            true => make_steps(&device, &mut steps).unwrap(),
            false => {
                for (matrix, step) in steps {
                    matrix.step(&device, &step).unwrap();
                    gpu.synchronize().unwrap();
                }
            }
        }
        for matrix in &matrices {
            let (rows, cols) = matrix.shape();
            let to = out.first_mut(rows * cols).unwrap();
            matrix.decode(&device, 0..rows, true, to).unwrap();
            let mut values = vec![0.0; rows * cols];
            let from = out.first(rows * cols).unwrap();
            from.read(&mut values).unwrap();
            read.push(values);
        }
        for matrix in &mut matrices {
            assert!(matrix.finish_step(&device).unwrap().stored > 0);
        }
    }
    let parts =
        |matrix: &Matrix| StatePart::ALL.map(|part| matrix.read_part(&device, part).unwrap());
    (matrices.iter().map(|m| parts(m).into()).collect(), read)
}

/// Steps of several matrices, which run at the same time, and reads right after them.
#[test]
fn steps_at_once_have_the_same_bits() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    for forms in [FORMS[0], FORMS[3], FORMS[6]].map(steady) {
        let g = on(&device, &gradients(1, 2_561, 2_048));
        let [apart, at_once] =
            [false, true].map(|at_once| stepped_matrices(&gpu, forms, &g, at_once));
        assert!(apart == at_once, "{forms:?}");
    }
}

/// More moments than pass over the bus at once, with a last part that is not a whole group of rows.
#[test]
fn offloaded_moments_have_the_same_bits() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu);
    if device.check_offload().is_err() {
        return;
    }
    let host = Cpu::new(None).unwrap();
    let (rows, cols) = (3_004, 12_288);
    let values: Vec<f32> = normal(7, rows * cols).iter().map(|v| v * 0.03).collect();
    let read = |range: Range<usize>, out: &mut [f32]| {
        out.copy_from_slice(&values[range.start * cols..range.end * cols]);
        Ok(())
    };
    let g = on(&device, &gradients(1, rows, cols));
    for forms in [FORMS[0], FORMS[4]].map(steady) {
        let states = [false, true].map(|offloaded| {
            let mut matrix = Matrix::new(&device, &host, forms, rows, cols, &read).unwrap();
            if offloaded {
                matrix.offload_moments(&device).unwrap();
            }
            for number in 1..=2 {
                let c = Coefficients::new(&Hyperparameters::default(), number, 1.0);
                for part in [0..1_600, 1_600..rows] {
                    let of_part = g.part(part.start * cols..part.end * cols).unwrap();
                    let step = rows_step(c, part.start, of_part);
                    matrix.step(&device, &step).unwrap();
                }
                matrix.finish_step(&device).unwrap();
            }
            StatePart::ALL.map(|part| matrix.read_part(&device, part).unwrap())
        });
        assert!(states[0][0].iter().any(|&byte| byte != 0));
        assert!(states[0] == states[1], "{forms:?}");
    }
}
