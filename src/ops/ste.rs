//! Weights as training in 4 bits sees them, by the straight-through estimator (Bengio, Léonard and Courville, arXiv 1308.3432):
//! the forward pass uses a weight rounded to NVFP4, and the backward pass treats the rounding as the identity, so that the
//! gradient of the rounded values is the gradient of the weight.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Device;
use super::tensors::{self, Nvfp4Tensor, ScaleLayout};
use crate::base::error::Result;
use crate::format::nvfp4::{Levels, QuantizeOptions};
use crate::tensor::{DType, Tensor, WeakTensor};

/// Quantizes `weight` `[.., K]` by the rule of the drop-in functions: codes `[.., K / 2]` and row-major block scales
/// `[.., K / 16]`, without a global scale.
pub fn quantize_packed(device: &Device, weight: &Tensor) -> Result<Nvfp4Tensor> {
    let options = QuantizeOptions {
        levels: Levels::Legacy,
        ..QuantizeOptions::default()
    };
    tensors::quantize(device, weight, &options, ScaleLayout::Linear)
}

/// The values of what [`quantize_packed`] gives, `[.., K]` of a floating `dtype`.
pub fn dequantize_packed(
    device: &Device,
    codes: Tensor,
    scales: Tensor,
    dtype: DType,
) -> Result<Tensor> {
    let packed = Nvfp4Tensor {
        codes,
        scales,
        global: 1.0,
        layout: ScaleLayout::Linear,
    };
    tensors::dequantize(device, &packed, dtype)
}

/// `weight` `[.., K]` rounded to NVFP4 and back, in its own type.
pub fn weight(device: &Device, weight: &Tensor) -> Result<Tensor> {
    let packed = quantize_packed(device, weight)?;
    tensors::dequantize_own(device, &packed, weight.dtype())
}

/// A cache of the rounded values of weights that do not change. Each is kept as long as its weight lives.
#[derive(Default)]
pub struct EvalWeights(Mutex<Vec<(WeakTensor, Tensor)>>);

impl EvalWeights {
    /// An empty cache.
    pub const fn new() -> EvalWeights {
        EvalWeights(Mutex::new(Vec::new()))
    }

    fn kept(&self) -> MutexGuard<'_, Vec<(WeakTensor, Tensor)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What [`weight`] gives, computed by the first call for a weight and cached.
    pub fn weight(&self, device: &Device, weight: &Tensor) -> Result<Tensor> {
        let find = |kept: &[(WeakTensor, Tensor)]| {
            let found = kept.iter().find(|(of, _)| of.is(weight));
            found.map(|(_, values)| values.clone())
        };
        if let Some(values) = find(&self.kept()) {
            return Ok(values);
        }
        let made = self::weight(device, weight)?;
        if let Device::Cuda(gpu) = device {
            // A weight in which the device finds an error later must not be cached.
            gpu.synchronize()?;
            gpu.check_calls()?;
        }
        let mut kept = self.kept();
        // Another thread may have been faster.
        if let Some(values) = find(&kept) {
            return Ok(values);
        }
        let dead = take_dead(&mut kept);
        kept.push((weight.downgrade(), made.clone()));
        drop(kept);
        drop(dead);
        Ok(made)
    }

    /// Drops the values of weights that are gone.
    pub fn prune(&self) {
        // Unlocks before it drops the tensors, whose memory may take a while to free.
        let dead = take_dead(&mut self.kept());
        drop(dead);
    }

    /// Drops everything.
    pub fn clear(&self) {
        let all = std::mem::take(&mut *self.kept());
        drop(all);
    }
}

fn take_dead(kept: &mut Vec<(WeakTensor, Tensor)>) -> Vec<(WeakTensor, Tensor)> {
    kept.extract_if(.., |(of, _)| !of.is_alive()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::random;
    use crate::tensor::Shape;

    fn random(rows: usize, cols: usize, dtype: DType) -> Tensor {
        let values: Vec<f32> = (0..(rows * cols) as u64)
            .map(|i| random::uniform(9, i) - 0.5)
            .collect();
        Tensor::from_f32(&values, &[rows, cols], dtype).unwrap()
    }

    #[test]
    fn the_forward_values_are_those_of_the_packed_weight() {
        let device = Device::cpu(Some(2)).unwrap();
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
            let w = random(5, 48, dtype);
            let packed = quantize_packed(&device, &w).unwrap();
            let (codes, scales) = (packed.codes.clone(), packed.scales.clone());
            let wide = dequantize_packed(&device, codes, scales, DType::F32).unwrap();
            let values = weight(&device, &w).unwrap();
            assert_eq!(values.dtype(), dtype);
            assert_eq!(values.shape().sizes(), [5, 48]);
            // A code times a block scale has 6 significant bits, which every type holds.
            assert_eq!(values.to_f32().unwrap()[..], wide.to_f32().unwrap()[..]);
            assert_ne!(values.to_f32().unwrap()[..], w.to_f32().unwrap()[..]);
        }
    }

    #[test]
    fn kept_values_live_as_long_as_their_weight() {
        let device = Device::cpu(Some(1)).unwrap();
        let cache = EvalWeights::new();
        let w = random(4, 32, DType::F32);
        let first = cache.weight(&device, &w).unwrap();
        assert_eq!(cache.weight(&device, &w).unwrap().data(), first.data());
        assert_eq!(
            cache.weight(&device, &w.clone()).unwrap().data(),
            first.data()
        );
        // The same memory with other rows, or in another type, is another weight.
        let half = w.view(Shape::contiguous(&[2, 32]).unwrap(), 32).unwrap();
        let of_half = cache.weight(&device, &half).unwrap();
        assert_eq!(of_half.shape().sizes(), [2, 32]);
        assert_eq!(cache.kept().len(), 2);
        drop(w);
        cache.prune();
        assert_eq!(cache.kept().len(), 2, "the view keeps the memory");
        drop(half);
        let other = random(1, 16, DType::F32);
        cache.weight(&device, &other).unwrap();
        assert_eq!(cache.kept().len(), 1);
        assert_eq!(first.shape().sizes(), [4, 32]);
        cache.clear();
        assert!(cache.kept().is_empty());
    }
}
