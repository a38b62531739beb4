//! Training on a GPU against the CPU: attention, steps of a whole model, and the promise that what resumes goes on to the same bits.

mod operations;
pub(crate) mod steps;
mod weights;

use std::ops::Range;
use std::path::PathBuf;

use NVFP4::model::Device;
use NVFP4::ops::{Array, Element, Slice};
use NVFP4::train::{MicroBatch, Trainer};
use half::bf16;

use crate::support::normal;

fn bf16_values(seed: u64, len: usize) -> Vec<f32> {
    normal(seed, len)
        .iter()
        .map(|&v| bf16::from_f32(v).to_f32())
        .collect()
}

fn on<E: Element<Host = f32>>(device: &Device, values: &[f32]) -> Array<E> {
    let mut array = Array::scratch(device, values.len()).unwrap();
    array.all_mut().copy_from(Slice::Host(values)).unwrap();
    array
}

fn read<E: Element<Host = f32>>(array: &Array<E>) -> Vec<f32> {
    let mut values = vec![0.0; array.len()];
    array.all().read(&mut values).unwrap();
    values
}

/// The relative error in the Euclidean norm.
fn error(values: &[f32], exact: &[f32]) -> f64 {
    let squares = |of: &mut dyn Iterator<Item = f64>| of.map(|v| v * v).sum::<f64>();
    let difference = squares(&mut values.iter().zip(exact).map(|(a, b)| f64::from(a - b)));
    (difference / squares(&mut exact.iter().map(|&v| f64::from(v)))).sqrt()
}

/// Runs of tokens that step by one, of a vocabulary of the given size.
pub(crate) fn text(seed: usize, rows: usize, vocabulary: usize) -> (Vec<u32>, Vec<i32>) {
    let tokens: Vec<u32> = (0..=rows)
        .map(|i| ((seed * 37 + i / 9 * 61 + i) % vocabulary) as u32)
        .collect();
    (
        tokens[..rows].to_vec(),
        tokens[1..].iter().map(|&t| t as i32).collect(),
    )
}

/// The losses of steps by their numbers.
pub(crate) fn losses(trainer: &mut Trainer, steps: Range<usize>) -> Vec<f64> {
    let documents = [40, 1, 130, 85];
    let vocabulary = trainer.spec().vocab_size;
    steps
        .map(|step| {
            let (tokens, labels) = text(step, 256, vocabulary);
            let batch = MicroBatch {
                tokens: &tokens,
                documents: &documents,
                labels: &labels,
                weights: None,
            };
            trainer.step(&[batch]).unwrap().loss
        })
        .collect()
}

/// A folder of this process that is not there yet.
fn fresh_folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("nvfp4-cuda-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    folder
}
