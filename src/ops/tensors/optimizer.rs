//! The optimizer of one weight, for hosts that compute gradients themselves. Stores the weight and its moments in the formats of training,
//! and steps them by gradients that are the host's tensors.

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::mixed;
use crate::base::error::{Result, bail, err};
use crate::format::random;
use crate::ops::training::optimizer::{
    Changes, Coefficients, FirstForm, Forms, Hyperparameters, KeepScale, Matrix, RowsStep,
    SecondForm, StatePart, WeightForm,
};
use crate::ops::training::statistics;
use crate::ops::{Array, Device, Mixed};
use crate::tensor::{DType, Tensor};

/// The first bytes of a saved state.
const MAGIC: &[u8; 8] = b"NVFP4OPT";
const VERSION: u32 = 1;
/// Number of parts after the weights, each restored on its own.
const RESTORED: usize = 2;

/// A weight `[.., K]` with its AdamW moments.
#[derive(Debug)]
pub struct TensorOptimizer {
    device: Device,
    sizes: Vec<usize>,
    matrix: Matrix,
}

/// Parameters of a step, beside the gradient.
#[derive(Clone, Copy, Debug)]
pub struct TensorStep {
    /// Rate, betas, eps and weight decay.
    pub settings: Hyperparameters,
    /// Factor of the gradient, from clipping or loss scaling.
    pub gradient_scale: f32,
    /// Seed of the random bits of rounding, together with the tensor's number and the step's.
    pub seed: u64,
    /// Number of this tensor among the tensors with the same seed.
    pub tensor: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    version: u32,
    sizes: Vec<usize>,
    weights: WeightForm,
    first_moments: FirstForm,
    second_moments: SecondForm,
    fresh_scales: bool,
    global: f32,
    steps: u64,
    /// XXH3 of the bytes after the header.
    checksum: u64,
}

/// The seed of [stochastic rounding](crate::format::Rounding::Stochastic) of tensor `tensor` in step `step`: every tensor and step has its
/// own random bits.
pub fn rounding_seed(seed: u64, tensor: u64, step: u64) -> u64 {
    random::bits(random::bits(seed, tensor), step)
}

impl TensorOptimizer {
    /// An optimizer of a weight `[.., K]`, rounded to nearest, with zero moments.
    pub fn new(device: &Device, weight: &Tensor, forms: Forms) -> Result<TensorOptimizer> {
        if !weight.dtype().is_float() {
            bail!(
                InvalidArgument,
                "a weight of type {} cannot be trained; it must be of a floating type",
                weight.dtype().name()
            );
        }
        let (rows, cols) = weight.shape().matrix();
        let values = mixed::in_order(device, || {
            let mut values = vec![0.0; weight.shape().elements()];
            crate::ops::transfer::copy_as_f32(weight, &mut values)?;
            Ok(values)
        })?;
        let read = |range: std::ops::Range<usize>, out: &mut [f32]| {
            out.copy_from_slice(&values[range.start * cols..range.end * cols]);
            Ok(())
        };
        Ok(TensorOptimizer {
            device: device.clone(),
            sizes: weight.shape().sizes().to_vec(),
            matrix: Matrix::new(device, &*device.host_cpu()?, forms, rows, cols, &read)?,
        })
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The sizes of the weight.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// Number of steps that have changed it.
    pub fn steps(&self) -> u64 {
        self.matrix.steps()
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.matrix.bytes()
    }

    /// Makes a step by a gradient of the weight's shape. Fails, and changes nothing, if the gradient is not finite.
    pub fn step(&mut self, gradient: &Tensor, step: &TensorStep) -> Result<Changes> {
        step.settings.check()?;
        if !step.gradient_scale.is_finite() {
            bail!(
                InvalidArgument,
                "gradients cannot be multiplied by {}",
                step.gradient_scale
            );
        }
        if gradient.shape().sizes() != self.sizes || !gradient.dtype().is_float() {
            bail!(
                InvalidArgument,
                "a gradient of type {} and shape {:?} for a weight of shape {:?}; it must be of a floating type and of that shape",
                gradient.dtype().name(),
                gradient.shape().sizes(),
                self.sizes
            );
        }
        let device = self.device.clone();
        mixed::in_order(&device, || {
            let values = mixed::read(&device, "gradient", gradient)?;
            if !statistics::of_gradient(&device, values.all())?.is_finite() {
                bail!(
                    InvalidArgument,
                    "the gradient has values that are not finite; nothing was changed: skip the step"
                );
            }
            let number = self.matrix.steps() + 1;
            let rows = RowsStep {
                coefficients: Coefficients::new(&step.settings, number, step.gradient_scale),
                seed: step.seed,
                tensor: step.tensor,
                first_row: 0,
                gradients: values.all(),
                clip: None,
            };
            self.matrix.step(&device, &rows)?;
            self.matrix.finish_step(&device)
        })
    }

    /// Writes the weight to a contiguous floating tensor of its shape: only the NVFP4 codes if `delivered`, else the full stored precision.
    pub fn decode_into(&self, delivered: bool, out: &mut Tensor) -> Result<()> {
        let (rows, cols) = self.matrix.shape();
        mixed::in_order(&self.device, || {
            let mut values = Array::<Mixed>::scratch(&self.device, rows * cols)?;
            self.matrix
                .decode(&self.device, 0..rows, !delivered, values.all_mut())?;
            mixed::write(&self.device, "the weight", values.all(), out)
        })
    }

    /// The delivered weight in host memory: codes `[.., K / 2]`, block scales `[.., K / 16]` and the global scale.
    pub fn delivered(&self) -> Result<(Tensor, Tensor, f32)> {
        let Some((codes, scales)) = self.matrix.delivered(&self.device)? else {
            bail!(
                Unsupported,
                "a weight in the form {:?} has no NVFP4 codes",
                self.matrix.forms().weight
            );
        };
        let tensor = |bytes: &[u8], divisor: usize, dtype| {
            let mut sizes = self.sizes.clone();
            let last = sizes.len() - 1;
            sizes[last] /= divisor;
            Tensor::build(&sizes, dtype, |out| {
                out.copy_from_slice(bytes);
                Ok(())
            })
        };
        Ok((
            tensor(&codes, 2, DType::U8)?,
            tensor(&scales, 16, DType::F8E4M3)?,
            self.matrix.global(),
        ))
    }

    /// The complete state for further steps, the same bytes on every device.
    pub fn save(&self) -> Result<Vec<u8>> {
        let mut state = Vec::new();
        for part in StatePart::ALL {
            state.extend(self.matrix.read_part(&self.device, part)?);
        }
        let forms = self.matrix.forms();
        let header = Header {
            version: VERSION,
            sizes: self.sizes.clone(),
            weights: forms.weight,
            first_moments: forms.first,
            second_moments: forms.second,
            fresh_scales: forms.keep_scale == KeepScale::Never,
            global: self.matrix.global(),
            steps: self.matrix.steps(),
            checksum: XxHash3_64::oneshot(&state),
        };
        let json = serde_json::to_vec(&header)
            .map_err(|e| err!(Internal, "the header of an optimizer's state: {e}"))?;
        let mut bytes = MAGIC.to_vec();
        bytes.extend((json.len() as u32).to_le_bytes());
        bytes.extend(json);
        bytes.extend(state);
        Ok(bytes)
    }

    /// Restores the result of [`TensorOptimizer::save`], on any device.
    pub fn restore(device: &Device, bytes: &[u8]) -> Result<TensorOptimizer> {
        let Some((length, rest)) = bytes
            .strip_prefix(MAGIC)
            .and_then(|rest| rest.split_first_chunk::<4>())
        else {
            bail!(
                CorruptFile,
                "these {} bytes are not the saved state of an optimizer",
                bytes.len()
            );
        };
        let length = u32::from_le_bytes(*length) as usize;
        let Some((json, state)) = rest.split_at_checked(length) else {
            bail!(
                CorruptFile,
                "the saved state of an optimizer ends within its header"
            );
        };
        let header: Header = serde_json::from_slice(json)
            .map_err(|e| err!(CorruptFile, "the header of an optimizer's state: {e}"))?;
        if header.version != VERSION {
            bail!(
                Unsupported,
                "an optimizer's state of version {}; this library reads version {VERSION}",
                header.version
            );
        }
        if XxHash3_64::oneshot(state) != header.checksum {
            bail!(
                CorruptFile,
                "the saved state of an optimizer is damaged: its checksum is not the one in its header"
            );
        }
        let forms = Forms {
            weight: header.weights,
            first: header.first_moments,
            second: header.second_moments,
            keep_scale: match header.fresh_scales {
                true => KeepScale::Never,
                false => KeepScale::Near,
            },
        };
        let (rows, cols) = crate::tensor::Shape::contiguous(&header.sizes)?.matrix();
        let mut matrix = Matrix::zeroed(device, forms, rows, cols)?;
        let expected: usize = StatePart::ALL.iter().map(|&p| matrix.part_bytes(p)).sum();
        if state.len() != expected {
            bail!(
                CorruptFile,
                "the saved state of an optimizer of {:?} has {} bytes, and {expected} are right",
                header.sizes,
                state.len()
            );
        }
        let mut at = 0;
        let mut take = |bytes: usize| {
            at += bytes;
            &state[at - bytes..at]
        };
        let codes = take(matrix.part_bytes(StatePart::Codes));
        let scales = take(matrix.part_bytes(StatePart::Scales));
        matrix.write_weights(device, codes, scales)?;
        for part in &StatePart::ALL[RESTORED..] {
            let bytes = take(matrix.part_bytes(*part));
            matrix.write_part(*part, bytes)?;
        }
        matrix.restore(header.global, header.steps)?;
        Ok(TensorOptimizer {
            device: device.clone(),
            sizes: header.sizes,
            matrix,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{device, random};
    use super::*;
    use crate::base::ErrorKind;

    fn step(rate: f64) -> TensorStep {
        TensorStep {
            settings: Hyperparameters {
                rate,
                ..Hyperparameters::default()
            },
            gradient_scale: 1.0,
            seed: 5,
            tensor: 3,
        }
    }

    /// In float32 a step matches AdamW. In every format a saved and restored state continues with the same bits.
    #[test]
    fn steps_are_those_of_adamw_and_go_on_after_a_restart() {
        let device = device();
        let (sizes, weight) = ([2, 5, 48], random(&[2, 5, 48], 1, DType::F32));
        let float32 = Forms {
            weight: WeightForm::F32,
            first: FirstForm::F32,
            second: SecondForm::F32,
            keep_scale: KeepScale::Near,
        };
        for forms in [float32, Forms::default()] {
            let mut optimizer = TensorOptimizer::new(&device, &weight, forms).unwrap();
            let gradient = random(&sizes, 2, DType::BF16);
            let changes = optimizer.step(&gradient, &step(0.01)).unwrap();
            assert!(changes.stored > 0);
            if forms == float32 {
                let mut out = Tensor::zeros(&sizes, DType::F32).unwrap();
                optimizer.decode_into(false, &mut out).unwrap();
                let settings = step(0.01).settings;
                let (w, g) = (weight.to_f32().unwrap(), gradient.to_f32().unwrap());
                for ((&w, &g), &new) in w.iter().zip(&g[..]).zip(&out.to_f32().unwrap()[..]) {
                    let (w, g) = (f64::from(w), f64::from(g));
                    // The first step: both moments are corrected to the gradient and its square.
                    let expected = w * (1.0 - settings.rate * settings.decay)
                        - settings.rate * g / (g.abs() + settings.eps);
                    assert!((f64::from(new) - expected).abs() < 1e-6, "{new} {expected}");
                }
            }
            let saved = optimizer.save().unwrap();
            let mut other = TensorOptimizer::restore(&device, &saved).unwrap();
            for o in [&mut optimizer, &mut other] {
                o.step(&random(&sizes, 7, DType::F32), &step(0.01)).unwrap();
            }
            assert_eq!(optimizer.save().unwrap(), other.save().unwrap());
            assert_eq!((other.steps(), other.sizes()), (2, &sizes[..]));
        }
    }

    #[test]
    fn what_is_wrong_changes_nothing() {
        let device = device();
        let weight = random(&[4, 32], 1, DType::F32);
        let mut optimizer = TensorOptimizer::new(&device, &weight, Forms::default()).unwrap();
        let before = optimizer.save().unwrap();
        let mut values = vec![0.5; 128];
        values[100] = f32::NAN;
        let nan = Tensor::from_f32(&values, &[4, 32], DType::F32).unwrap();
        for (gradient, step) in [
            (&nan, step(0.01)),
            (&random(&[2, 64], 3, DType::F32), step(0.01)),
            (&weight, step(f64::NAN)),
        ] {
            let e = optimizer.step(gradient, &step).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
            assert!(before == optimizer.save().unwrap());
        }
        for damage in [0, 20, before.len() - 1] {
            let mut damaged = before.clone();
            damaged[damage] ^= 4;
            let e = TensorOptimizer::restore(&device, &damaged).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::CorruptFile, "{e}");
        }
        assert!(TensorOptimizer::restore(&device, &before[..40]).is_err());
    }
}
