//! AdamW on matrices in their stored form: the GPU against the CPU in every form. Everything has the same bits but what roots and
//! quotients go into, which a GPU takes to two units in the last place: of those, few codes are others, by one.

use std::time::Instant;

use NVFP4::cpu::Cpu;
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

#[test]
fn adamw_gives_what_the_cpu_gives() {
    let Some(gpu) = gpu() else { return };
    let devices = [Device::cpu(Some(2)).unwrap(), Device::Cuda(gpu)];
    let Device::Cpu(host) = &devices[0] else {
        unreachable!()
    };
    for (weight, first, second) in FORMS {
        for keep_scale in [KeepScale::Near, KeepScale::Held, KeepScale::Never] {
            for (rows, cols) in [(8, 128), (37, 48), (64, 640)] {
                let forms = Forms {
                    weight,
                    first,
                    second,
                    keep_scale,
                };
                let what = format!("{forms:?} [{rows}, {cols}]");
                let values: Vec<f32> = normal(7, rows * cols).iter().map(|v| v * 0.03).collect();
                let read = |range: std::ops::Range<usize>, out: &mut [f32]| {
                    out.copy_from_slice(&values[range.start * cols..range.end * cols]);
                    Ok(())
                };
                let mut matrices = devices
                    .each_ref()
                    .map(|device| Matrix::new(device, host, forms, rows, cols, &read).unwrap());
                for number in 1..=4u64 {
                    // The last rate makes weights outgrow their scales.
                    let settings = Hyperparameters {
                        rate: if number == 4 { 0.05 } else { 2e-3 },
                        ..Hyperparameters::default()
                    };
                    let c = Coefficients::new(&settings, number, 0.7);
                    let all = gradients(number, rows, cols);
                    let mut changes = Vec::new();
                    for (device, matrix) in devices.iter().zip(&mut matrices) {
                        // In two parts, as an embedding comes.
                        for part in [0..8, 8..rows] {
                            if !part.is_empty() {
                                let part_gradients =
                                    on(device, &all[part.start * cols..part.end * cols]);
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
                        "{what}, step {number}: {changes:?}"
                    );
                    for part in StatePart::ALL {
                        let [cpu, gpu] =
                            [0, 1].map(|i| matrices[i].read_part(&devices[i], part).unwrap());
                        let differing = cpu.iter().zip(&gpu).filter(|(a, b)| a != b).count();
                        let dense = match part {
                            StatePart::Codes => !forms.weight.is_packed(),
                            StatePart::Second(_) => forms.second == SecondForm::F32,
                            _ => false,
                        };
                        // The first moment takes no root, and what is in float32 is compared as numbers.
                        let most = match part {
                            StatePart::First(_) => 0,
                            _ if dense => cpu.len(),
                            _ => 2 + cpu.len() / 500,
                        };
                        assert!(
                            differing <= most && cpu.len() == gpu.len(),
                            "{what}, step {number}: {differing} of {} bytes of {}",
                            cpu.len(),
                            part.name()
                        );
                    }
                    assert_eq!(matrices[0].global(), matrices[1].global());
                }
                // Values, out of the same bytes.
                let [cpu, gpu] = &mut matrices;
                let codes = gpu.read_part(&devices[1], StatePart::Codes).unwrap();
                let scales = gpu.read_part(&devices[1], StatePart::Scales).unwrap();
                let rest = gpu.read_part(&devices[1], StatePart::Rest).unwrap();
                cpu.write_weights(&devices[0], &codes, &scales).unwrap();
                cpu.write_part(StatePart::Rest, &rest).unwrap();
                for whole in [true, false] {
                    let mut exact = vec![0.0; rows * cols];
                    cpu.decode(&devices[0], 0..rows, whole, SliceMut::Host(&mut exact))
                        .unwrap();
                    let squares: f64 = exact
                        .iter()
                        .zip(&values)
                        .map(|(a, b)| f64::from(a - b).powi(2))
                        .sum();
                    // Four steps, the last of up to 0.05 either way; a code alone is rounded each time, to neighbours 0.03 apart. The
                    // scale of a first moment has a floor, below which second moments in float32 go on to fall.
                    let has_floor = first != FirstForm::F32 && second == SecondForm::F32;
                    let most = if weight == WeightForm::OneTerm {
                        0.12
                    } else {
                        0.08
                    };
                    let moved = (squares / exact.len() as f64).sqrt();
                    assert!(has_floor || moved < most, "{what}: {moved}");
                    let exact: Vec<f32> =
                        exact.iter().map(|&v| bf16::from_f32(v).to_f32()).collect();
                    let mut out = on(&devices[1], &vec![9.0; rows * cols]);
                    gpu.decode(&devices[1], 0..rows, whole, out.all_mut())
                        .unwrap();
                    let mut values = vec![0.0; rows * cols];
                    out.all().read(&mut values).unwrap();
                    assert_eq!(values, exact, "{what}");
                    let tokens = [5u32, 0, 7, 5];
                    gpu.decode_rows(
                        &devices[1],
                        &tokens,
                        whole,
                        out.first_mut(4 * cols).unwrap(),
                    )
                    .unwrap();
                    out.all().read(&mut values).unwrap();
                    for (row, token) in values.chunks_exact(cols).zip(tokens) {
                        assert_eq!(row, &exact[token as usize * cols..][..cols], "{what}");
                    }
                }
            }
        }
    }
    let c = Coefficients::new(&Hyperparameters::default(), 1, 0.5);
    let (values, gradients) = (normal(1, 1000), normal(2, 1000));
    let states = devices.each_ref().map(|device| {
        let mut vector = Vector::new(device, &values).unwrap();
        for _ in 0..3 {
            vector
                .gradient()
                .copy_from(Slice::Host(&gradients))
                .unwrap();
            vector.step(device, &c).unwrap();
        }
        vector.read_state().unwrap()
    });
    assert!(states[0] == states[1]);
}

/// Steps of several matrices, small ones and large ones, which run at the same time, and what reads them right after.
#[test]
fn steps_at_once_have_the_same_bits() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let host = Cpu::new(None).unwrap();
    let shapes = [
        (2_560, 2_048),
        (16, 128),
        (1_003, 1_040),
        (8, 9_728),
        (4_096, 256),
        (512, 512),
    ];
    for forms in [FORMS[0], FORMS[3], FORMS[6]].map(steady) {
        let values = normal(7, 1 << 16);
        let g = on(&device, &gradients(1, 2_561, 2_048));
        let states = [false, true].map(|at_once| {
            let mut matrices = shapes.map(|(rows, cols)| {
                let read = |range: std::ops::Range<usize>, out: &mut [f32]| {
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
                let mut steps: Vec<_> = matrices
                    .iter_mut()
                    .enumerate()
                    .map(|(i, matrix)| {
                        let (rows, cols) = matrix.shape();
                        let gradients = g.part(64 * i..64 * i + rows * cols).unwrap();
                        (matrix, rows_step(c, 0, gradients))
                    })
                    .collect();
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
            let parts = matrices
                .each_ref()
                .map(|matrix| StatePart::ALL.map(|part| matrix.read_part(&device, part).unwrap()));
            (parts, read)
        });
        assert!(states[0] == states[1], "{forms:?}");
    }
}

/// Of matrices with more moments than pass over the bus at once, the last part not a whole group of rows.
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
    let read = |range: std::ops::Range<usize>, out: &mut [f32]| {
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

/// Milliseconds for 10^9 weights: `--ignored --nocapture`.
#[test]
#[ignore = "measures"]
fn adamw_speed() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let host = Cpu::new(None).unwrap();
    let (rows, cols) = (32768, 2560);
    for forms in FORMS.map(steady) {
        let read = |range: std::ops::Range<usize>, out: &mut [f32]| {
            let values = normal(range.start as u64, out.len());
            out.iter_mut().zip(values).for_each(|(o, v)| *o = v * 0.03);
            Ok(())
        };
        let mut matrix = Matrix::new(&device, &host, forms, rows, cols, &read).unwrap();
        let values: Vec<f32> = normal(3, rows * cols).iter().map(|v| v * 1e-3).collect();
        let g = on(&device, &values);
        let mut out: Array<Mixed> = Array::scratch(&device, rows * cols).unwrap();
        let c = Coefficients::new(&Hyperparameters::default(), 3, 1.0);
        let time = |body: &mut dyn FnMut()| {
            let mut times: Vec<f64> = (0..7)
                .map(|_| {
                    gpu.synchronize().unwrap();
                    let start = Instant::now();
                    (0..10).for_each(|_| body());
                    gpu.synchronize().unwrap();
                    start.elapsed().as_secs_f64() / 10.0
                })
                .collect();
            times.sort_by(f64::total_cmp);
            times[3] * 1e3 / (rows * cols) as f64 * 1e9
        };
        let step = rows_step(c, 0, g.all());
        let step = time(&mut || matrix.step(&device, &step).unwrap());
        let decode = time(&mut || {
            matrix
                .decode(&device, 0..rows, true, out.all_mut())
                .unwrap()
        });
        println!(
            "{:?} {:?} {:?}: step {step:.2} ms, decode {decode:.2} ms for 10^9 weights",
            forms.weight, forms.first, forms.second
        );
    }
}

/// Milliseconds of a step of every matrix of a model of Qwen3-4B's shape, one after the other as a trainer launches them: `--ignored
/// --nocapture`. A quarter of its layers, each stepped as often as there would be others; their states are larger than any cache.
#[test]
#[ignore = "measures"]
fn adamw_of_a_model_speed() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let host = Cpu::new(None).unwrap();
    const LAYERS: usize = 36;
    let layer = [
        (4096, 2560),
        (1024, 2560),
        (1024, 2560),
        (2560, 4096),
        (9728, 2560),
        (9728, 2560),
        (2560, 9728),
    ];
    let embedding = (151_936, 2560);
    let table = normal(1, 1 << 20);
    let read = |range: std::ops::Range<usize>, out: &mut [f32]| {
        for (o, i) in out.iter_mut().zip(range) {
            *o = table[i % (table.len() - 7)] * 0.03;
        }
        Ok(())
    };
    let new = |(rows, cols)| Matrix::new(&device, &host, Forms::default(), rows, cols, &read);
    let mut layers: Vec<Matrix> = (0..LAYERS / 4)
        .flat_map(|_| layer.map(|shape| new(shape).unwrap()))
        .collect();
    let mut embedding = new(embedding).unwrap();
    let len = |matrix: &Matrix| matrix.shape().0 * matrix.shape().1;
    let values: Vec<f32> = (0..len(&embedding))
        .map(|i| table[i % (table.len() - 3)] * 1e-3)
        .collect();
    let g = on(&device, &values);
    let c = Coefficients::new(&Hyperparameters::default(), 3, 1.0);
    let weights = 4 * layers.iter().map(len).sum::<usize>() + len(&embedding);
    // Queries, keys and values come together, and gates with ups.
    let [alone, together] = [[1; 7].as_slice(), &[3, 1, 2, 1]];
    let all = [layer.len() * LAYERS / 4];
    let ways = [
        ("one after another", alone),
        ("as they come in a step", together),
        ("all at once", all.as_slice()),
    ];
    for (way, groups) in ways {
        let mut times: Vec<f64> = (0..7)
            .map(|_| {
                gpu.synchronize().unwrap();
                let (start, mut at) = (Instant::now(), 0);
                for _ in 0..4 {
                    let mut left = layers.iter_mut();
                    for &group in groups.iter().cycle() {
                        let mut steps: Vec<_> = left
                            .by_ref()
                            .take(group)
                            .map(|matrix| {
                                let count = len(matrix);
                                at = if at + count > g.len() { 0 } else { at };
                                let gradients = g.part(at..at + count).unwrap();
                                at += count;
                                (matrix, rows_step(c, 0, gradients))
                            })
                            .collect();
                        if steps.is_empty() {
                            break;
                        }
                        make_steps(&device, &mut steps).unwrap();
                    }
                }
                embedding.step(&device, &rows_step(c, 0, g.all())).unwrap();
                gpu.synchronize().unwrap();
                start.elapsed().as_secs_f64() * 1e3
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!("{way}: {:.2} ms for {weights} weights", times[3]);
    }
}
