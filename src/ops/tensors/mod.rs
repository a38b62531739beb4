//! The number formats and the products on [`Tensor`](crate::tensor::Tensor)s of any element type and stride, used by the C API's quant and
//! linear chapters. Tensors in host memory are computed by the CPU, those in a GPU's memory by that GPU.
//!
//! Shapes: values `[.., K]`; codes `[.., K / 2]` as bytes; linear scales `[.., K / 16]`; swizzled scales one run of bytes.

mod chunks;
mod matmul;
pub(super) mod mixed;
mod nf4;
mod optimizer;
mod prepare;
mod quantize;
mod types;
pub(super) mod w4a4;
mod weight;

pub use crate::format::swizzle::ScaleLayout;
pub use matmul::{linear, product_sizes, scaled_mm, scaled_mm_into};
pub use nf4::{Nf4Tensor, dequantize_nf4, quantize_nf4};
pub use optimizer::{TensorOptimizer, TensorStep, rounding_seed};
pub(super) use quantize::dequantize_own;
pub use quantize::{
    dequantize, quantize, quantize_into, quantized_sizes, swizzle_scales, unswizzle_scales,
};
pub use types::{Nvfp4Tensor, device_of, new_result, one_place};
pub use weight::{dense_weight, nf4_weight_for, weight, weight_for};

/// Helpers of the tests in this folder.
#[cfg(test)]
mod tests {
    use crate::format::random;
    use crate::ops::Device;
    use crate::tensor::{DType, Tensor};

    pub(super) fn device() -> Device {
        Device::cpu(Some(2)).unwrap()
    }

    /// Values from -0.5 to 0.5.
    pub(super) fn random(sizes: &[usize], seed: u64, dtype: DType) -> Tensor {
        let n = sizes.iter().product::<usize>();
        let values: Vec<f32> = (0..n as u64)
            .map(|i| random::uniform(seed, i) - 0.5)
            .collect();
        Tensor::from_f32(&values, sizes, dtype).unwrap()
    }
}
