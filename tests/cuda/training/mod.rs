//! Training's kernels between products and attention, against f64: every value within the rounding of bf16, sums within that of f32,
//! outputs poisoned first, and the same bits from the same call.

mod layers;
mod losses;
mod sums;

use std::sync::Arc;

use half::bf16;

use NVFP4::cuda::{DeviceBuffer, DeviceSlice, Gpu};

use crate::support::{as_f64, normal, read_f32, upload};

/// The error of rounding to bf16, relative to the value.
pub(crate) const ROUNDING: f64 = 1.01 / 256.0;
/// The error of some operations in f32, relative to the size of their operands.
pub(crate) const ARITHMETIC: f64 = 1.0 / (1 << 20) as f64;

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
            values: as_f64(values),
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
    as_f64(&read_f32(buffer, buffer.bytes() / 4))
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
