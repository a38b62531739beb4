//! Training operations, forward and backward, on arrays in [`Mixed`] precision: GEMMs in three forms, norms, heads, attention and gated
//! delta nets over packed documents, gated units, losses, embedding, expert rows, NVFP4 operands, and the optimizer.

pub mod activation;
pub mod array;
pub mod attention;
pub mod delta;
pub mod divergence;
pub mod embedding;
pub mod heads;
pub mod input_moments;
pub mod loss;
pub mod matmul;
pub mod norm;
pub mod operand;
pub mod optimizer;
pub mod statistics;

use super::{Array, Device, Mixed, Slice};
use crate::base::Result;

/// Working memory of an operation on a GPU, freed after the work enqueued with it has run.
fn scratch(device: &Device, len: usize) -> Result<Array> {
    Array::scratch(device, len)
}

/// Copies values to a device.
pub(super) fn upload<E: super::Element>(device: &Device, values: &[E::Host]) -> Result<Array<E>> {
    let mut array = Array::scratch(device, values.len())?;
    array.all_mut().copy_from(Slice::Host(values))?;
    Ok(array)
}

/// Memory of an array on a GPU.
type GpuSlice<'a> = crate::cuda::DeviceSlice<'a>;

fn gpu<'a>(x: Option<Slice<'a>>) -> Result<Option<GpuSlice<'a>>> {
    x.map(Slice::cuda).transpose()
}

fn gpu_mixed<'a>(x: Option<Slice<'a, Mixed>>) -> Result<Option<GpuSlice<'a>>> {
    x.map(Slice::cuda).transpose()
}
