//! The time of AdamW's steps, for matrices of every form and for a whole model.

use std::ops::Range;
use std::time::Instant;

use NVFP4::cpu::Cpu;
use NVFP4::format::adamw::{Coefficients, Forms, Hyperparameters};
use NVFP4::model::Device;
use NVFP4::ops::training::optimizer::{Matrix, make_steps};
use NVFP4::ops::{Array, Mixed};

use super::{FORMS, on, rows_step, steady};
use crate::support::{gpu, normal};

/// Milliseconds for 10^9 weights: `--ignored --nocapture`.
#[test]
#[ignore = "measures"]
fn adamw_speed() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let host = Cpu::new(None).unwrap();
    let (rows, cols) = (32768, 2560);
    for forms in FORMS.map(steady) {
        let read = |range: Range<usize>, out: &mut [f32]| {
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

/// Layers of a model of Qwen3-4B's shape, and the matrices of a layer.
const LAYERS: usize = 36;
const LAYER: [(usize, usize); 7] = [
    (4096, 2560),
    (1024, 2560),
    (1024, 2560),
    (2560, 4096),
    (9728, 2560),
    (9728, 2560),
    (2560, 9728),
];
/// The embedding of such a model.
const EMBEDDING: (usize, usize) = (151_936, 2560);

fn elements(matrix: &Matrix) -> usize {
    let (rows, cols) = matrix.shape();
    rows * cols
}

/// A quarter of a model's layers, its embedding, and gradients that all take parts of.
struct Quarter {
    device: Device,
    layers: Vec<Matrix>,
    embedding: Matrix,
    gradients: Array<Mixed>,
}

impl Quarter {
    fn new(device: Device) -> Quarter {
        let host = Cpu::new(None).unwrap();
        let table = normal(1, 1 << 20);
        let read = |range: Range<usize>, out: &mut [f32]| {
            for (o, i) in out.iter_mut().zip(range) {
                *o = table[i % (table.len() - 7)] * 0.03;
            }
            Ok(())
        };
        let new = |(rows, cols)| {
            Matrix::new(&device, &host, Forms::default(), rows, cols, &read).unwrap()
        };
        let layers = (0..LAYERS / 4).flat_map(|_| LAYER.map(new)).collect();
        let embedding = new(EMBEDDING);
        let values: Vec<f32> = (0..elements(&embedding))
            .map(|i| table[i % (table.len() - 3)] * 1e-3)
            .collect();
        Quarter {
            gradients: on(&device, &values),
            device,
            layers,
            embedding,
        }
    }

    /// Steps every layer four times, in groups of so many matrices, and the embedding once.
    fn step(&mut self, groups: &[usize], c: Coefficients) {
        let (g, mut at) = (&self.gradients, 0);
        for _ in 0..4 {
            let mut left = self.layers.iter_mut();
            for &group in groups.iter().cycle() {
                let mut steps: Vec<_> = left
                    .by_ref()
                    .take(group)
                    .map(|matrix| {
                        let count = elements(matrix);
                        at = if at + count > g.len() { 0 } else { at };
                        let gradients = g.part(at..at + count).unwrap();
                        at += count;
                        (matrix, rows_step(c, 0, gradients))
                    })
                    .collect();
                if steps.is_empty() {
                    break;
                }
                make_steps(&self.device, &mut steps).unwrap();
            }
        }
        let step = rows_step(c, 0, g.all());
        self.embedding.step(&self.device, &step).unwrap();
    }
}

/// Milliseconds of a step of every matrix of a model of Qwen3-4B's shape, one after the other as a trainer launches them: `--ignored
/// --nocapture`. A quarter of its layers, each stepped as often as there would be others; their states are larger than any cache.
#[test]
#[ignore = "measures"]
fn adamw_of_a_model_speed() {
    let Some(gpu) = gpu() else { return };
    let mut quarter = Quarter::new(Device::Cuda(gpu.clone()));
    let c = Coefficients::new(&Hyperparameters::default(), 3, 1.0);
    let in_layers = quarter.layers.iter().map(elements).sum::<usize>();
    let weights = 4 * in_layers + elements(&quarter.embedding);
    // Queries, keys and values come together, and gates with ups.
    let [alone, together] = [[1; 7].as_slice(), &[3, 1, 2, 1]];
    let all = [LAYER.len() * LAYERS / 4];
    let ways = [
        ("one after another", alone),
        ("as they come in a step", together),
        ("all at once", all.as_slice()),
    ];
    for (way, groups) in ways {
        let mut times: Vec<f64> = (0..7)
            .map(|_| {
                gpu.synchronize().unwrap();
                let start = Instant::now();
                quarter.step(groups, c);
                gpu.synchronize().unwrap();
                start.elapsed().as_secs_f64() * 1e3
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!("{way}: {:.2} ms for {weights} weights", times[3]);
    }
}
