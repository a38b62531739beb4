//! Weights of 4-bit training with the straight-through estimator (Bengio, Léonard and Courville, arXiv 1308.3432). The forward pass uses a
//! weight rounded to NVFP4; the backward pass treats the rounding as the identity, so that the gradient of the rounded values is the
//! gradient of the weight.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::tensors::{self, Nvfp4Tensor, ScaleLayout, mixed};
use super::training::matmul::{GemmForm, Sizes, matmul};
use super::{Array, Device, Mixed, Slice};
use crate::base::error::{Result, bail};
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

/// Decodes the result of [`quantize_packed`] to `[.., K]` of a floating `dtype`.
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

/// Returns the rows of `x` `[.., K]`, the rows of `weight` `[N, K]`, and K. Checks that they agree, also with `gradient` `[.., N]` of the
/// outputs if given.
fn sizes_of(x: &Tensor, weight: &Tensor, gradient: Option<&Tensor>) -> Result<[usize; 3]> {
    let ((m, k), (n, cols)) = (x.shape().matrix(), weight.shape().matrix());
    if weight.shape().rank() != 2 || k != cols {
        bail!(
            InvalidArgument,
            "an input of shape {:?} and a weight of shape {:?}; they must be [.., K] and [N, K]",
            x.shape().sizes(),
            weight.shape().sizes()
        );
    }
    tensors::one_place(&[("x", x), ("weight", weight)])?;
    for (name, tensor) in [("x", Some(x)), ("gradient", gradient)] {
        if let Some(tensor) = tensor
            && !tensor.dtype().is_float()
        {
            bail!(
                InvalidArgument,
                "{name} is of type {}; it must be of a floating type",
                tensor.dtype().name()
            );
        }
    }
    if let Some(gradient) = gradient {
        tensors::one_place(&[("x", x), ("gradient", gradient)])?;
        if gradient.shape().sizes() != x.shape().with_last(n) {
            bail!(
                InvalidArgument,
                "gradients of shape {:?} of outputs of shape {:?}",
                gradient.shape().sizes(),
                x.shape().with_last(n)
            );
        }
    }
    Ok([m, n, k])
}

/// The shape of [`linear_into`]'s result, `[.., N]`, after checking `x` and `weight`.
pub fn linear_sizes(x: &Tensor, weight: &Tensor) -> Result<Vec<usize>> {
    let [_, n, _] = sizes_of(x, weight, None)?;
    Ok(x.shape().with_last(n))
}

fn product(
    device: &Device,
    form: GemmForm,
    sizes: Sizes,
    a: Slice<'_, Mixed>,
    b: Slice<'_, Mixed>,
) -> Result<Array<Mixed>> {
    let mut out = Array::scratch(device, sizes.m * sizes.n)?;
    matmul(device, form, sizes, a, b, out.all_mut(), false)?;
    Ok(out)
}

/// `x` `[.., K]` times the rounded values of `weight` `[N, K]`, transposed, to `out` `[.., N]` of a floating type. Accumulates in f32; on a
/// GPU operands and results are rounded to bfloat16.
pub fn linear_into(device: &Device, x: &Tensor, weight: &Tensor, out: &mut Tensor) -> Result<()> {
    let [m, n, k] = sizes_of(x, weight, None)?;
    let rounded = self::weight(device, weight)?;
    mixed::in_order(device, || {
        let x = mixed::read(device, "x", x)?;
        let w = mixed::read(device, "weight", &rounded)?;
        let y = product(device, GemmForm::NT, Sizes { m, n, k }, x.all(), w.all())?;
        mixed::write(device, "the product", y.all(), out)
    })
}

/// Backward of [`linear_into`], from the gradient `[.., N]` of its result: the gradient of `x` through the rounded weight, to `dx`, and the
/// gradient of `weight` as if it had not been rounded, to `dweight`. Either may be omitted.
pub fn linear_backward_into(
    device: &Device,
    x: &Tensor,
    weight: &Tensor,
    gradient: &Tensor,
    dx: Option<&mut Tensor>,
    dweight: Option<&mut Tensor>,
) -> Result<()> {
    let [m, n, k] = sizes_of(x, weight, Some(gradient))?;
    let rounded = match dx {
        Some(_) => Some(self::weight(device, weight)?),
        None => None,
    };
    mixed::in_order(device, || {
        let dy = mixed::read(device, "gradient", gradient)?;
        if let (Some(out), Some(rounded)) = (dx, &rounded) {
            let w = mixed::read(device, "weight", rounded)?;
            let sizes = Sizes { m, n: k, k: n };
            let dx = product(device, GemmForm::NN, sizes, dy.all(), w.all())?;
            mixed::write(device, "dx", dx.all(), out)?;
        }
        if let Some(out) = dweight {
            let x = mixed::read(device, "x", x)?;
            let sizes = Sizes { m: n, n: k, k: m };
            let dw = product(device, GemmForm::TN, sizes, dy.all(), x.all())?;
            mixed::write(device, "dweight", dw.all(), out)?;
        }
        Ok(())
    })
}

/// A cache of the rounded values of weights that do not change. An entry lives as long as its weight.
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

    /// The result of [`weight`], computed by the first call for a weight and then cached.
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
        // Another thread may have added it meanwhile.
        if let Some(values) = find(&kept) {
            return Ok(values);
        }
        let dead = take_dead(&mut kept);
        kept.push((weight.downgrade(), made.clone()));
        drop(kept);
        drop(dead);
        Ok(made)
    }

    /// Drops the values of weights that no longer exist.
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

    /// Forward and backward against sums in f64 of the rounded values.
    #[test]
    fn products_and_their_gradients_are_those_of_the_rounded_weight() {
        let device = Device::cpu(Some(2)).unwrap();
        let (m, n, k) = (6, 5, 48);
        let (x, w) = (random(m, k, DType::F32), random(n, k, DType::BF16));
        let x = x.view(Shape::contiguous(&[2, 3, k]).unwrap(), 0).unwrap();
        let dy = Tensor::from_f32(&vec![0.25; m * n], &[2, 3, n], DType::F32).unwrap();
        let values = |t: &Tensor| -> Vec<f64> {
            t.to_f32().unwrap().iter().map(|&v| f64::from(v)).collect()
        };
        let rounded = values(&weight(&device, &w).unwrap());
        let sizes = linear_sizes(&x, &w).unwrap();
        assert_eq!(sizes, [2, 3, n]);
        let mut y = Tensor::zeros(&sizes, DType::F32).unwrap();
        linear_into(&device, &x, &w, &mut y).unwrap();
        let mut dx = Tensor::zeros(&[2, 3, k], DType::F32).unwrap();
        let mut dw = Tensor::zeros(&[n, k], DType::F32).unwrap();
        let (to_x, to_w) = (Some(&mut dx), Some(&mut dw));
        linear_backward_into(&device, &x, &w, &dy, to_x, to_w).unwrap();
        let near = |got: f64, sum: f64| assert!((got - sum).abs() < 1e-5, "{got} {sum}");
        let (xs, ys, dxs, dws) = (values(&x), values(&y), values(&dx), values(&dw));
        for i in 0..m {
            for j in 0..n {
                let sum = (0..k).map(|c| xs[i * k + c] * rounded[j * k + c]).sum();
                near(ys[i * n + j], sum);
            }
            for c in 0..k {
                near(
                    dxs[i * k + c],
                    (0..n).map(|j| 0.25 * rounded[j * k + c]).sum(),
                );
            }
        }
        for c in 0..k {
            near(dws[c], (0..m).map(|i| 0.25 * xs[i * k + c]).sum());
        }
        let e = linear_into(&device, &x, &random(5, 32, DType::F32), &mut y).unwrap_err();
        assert!(e.message().contains("[2, 3, 48]"), "{e}");
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
        // A view of that memory with another shape or type is another weight.
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
