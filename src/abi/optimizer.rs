//! Training with the host's own passes: the optimizer of one weight, and linear layers with a weight in 4 bits.
//!
//! For hosts that compute gradients themselves, for example with TorchSharp's autograd. Functions here that take tensors as `void *` take
//! an #NVFP4_Tensor, or a pointer to a libtorch tensor like the drop-in functions; all tensors of a call must be of one kind. Results are
//! of that kind and in the same place. Only one call at a time may use an optimizer: another one meanwhile fails with #NVFP4_BUSY. On a GPU
//! tensors are bfloat16 or float32, products and gradients are rounded to bfloat16, and calls are ordered with libtorch's current stream.

use std::ffi::c_void;
use std::sync::Arc;

use super::arguments::{Growing, Out, copy_items, fill, flag, options, reserved, slice};
use super::guard::{enter, enter_to_free};
use super::handle::{self, Exclusive, Object, Snapshots};
use super::libtorch;
use super::shared;
use super::status::NVFP4_Status;
use super::tensor::{NVFP4_Tensor, device_of};
use super::torchsharp::{are_own, give, tensor};
use super::trainer::{
    NVFP4_FIRST_MOMENT_INT4, NVFP4_SECOND_MOMENT_UINT4, NVFP4_WEIGHT_FORM_RESIDUAL4, first_form,
    second_form, weight_form,
};
use crate::base::error::{Result, bail};
use crate::ops::training::optimizer::{Forms, Hyperparameters, KeepScale};
use crate::ops::{Device, ste, tensors};
use crate::tensor::{DType, Place, Tensor};

/// A weight with the moments of its AdamW. See the chapter on training with the host's own passes.
pub struct NVFP4_OptimizerState {
    _private: [u8; 0],
}

struct Optimizer(Exclusive<State>);

struct State {
    optimizer: tensors::TensorOptimizer,
    /// Whether it was created from a tensor of this library.
    own: bool,
}

impl Snapshots for State {
    type Snapshot = (u64, u64);
    fn snapshot(&self) -> (u64, u64) {
        (self.optimizer.steps(), self.optimizer.bytes() as u64)
    }
    fn begin_use(&mut self) {}
}

impl Object for Optimizer {
    type Handle = NVFP4_OptimizerState;
    const NAME: &'static str = "NVFP4_OptimizerState";
}

/// How to store a weight and its moments. Fill with NVFP4_optimizer_options_init(), then change what is to differ.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_OptimizerOptions {
    /// sizeof(NVFP4_OptimizerOptions) as the caller knows it.
    pub struct_size: u32,
    /// One of NVFP4_WEIGHT_FORM_*. Default: a residual of 4 bits.
    pub weights: i32,
    /// One of NVFP4_FIRST_MOMENT_*. Default: 4 bits.
    pub first_moments: i32,
    /// One of NVFP4_SECOND_MOMENT_*. Default: 4 bits.
    pub second_moments: i32,
    /// 1 to recompute block scales of weights in each step, a baseline; 0 to keep them while they fit. Default: 0.
    pub fresh_scales: i32,
    /// Must be 0.
    pub reserved: i32,
}

// SAFETY: integers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_OptimizerOptions {
    const NAME: &'static str = "NVFP4_OptimizerOptions";
    fn defaults() -> Self {
        NVFP4_OptimizerOptions {
            struct_size: size_of::<Self>() as u32,
            weights: NVFP4_WEIGHT_FORM_RESIDUAL4,
            first_moments: NVFP4_FIRST_MOMENT_INT4,
            second_moments: NVFP4_SECOND_MOMENT_UINT4,
            fresh_scales: 0,
            reserved: 0,
        }
    }
}

impl NVFP4_OptimizerOptions {
    fn read(&self) -> Result<Forms> {
        reserved(self, self.reserved)?;
        Ok(Forms {
            weight: weight_form("weights", self.weights)?,
            first: first_form(self.first_moments)?,
            second: second_form(self.second_moments)?,
            keep_scale: match flag("fresh_scales", self.fresh_scales)? {
                true => KeepScale::Never,
                false => KeepScale::Near,
            },
        })
    }
}

/// The settings of a step of AdamW. Fill with NVFP4_step_options_init(), then change what is to differ.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_StepOptions {
    /// sizeof(NVFP4_StepOptions) as the caller knows it.
    pub struct_size: u32,
    /// Factor of the gradient, for clipping for example. Default: 1.
    pub gradient_scale: f32,
    /// Learning rate. Default: 0.001.
    pub rate: f64,
    /// Decay rate of the first moment. Default: 0.9.
    pub beta1: f64,
    /// Decay rate of the second moment. Default: 0.95.
    pub beta2: f64,
    /// Added to the square root of the second moment. Default: 1e-8.
    pub eps: f64,
    /// Decoupled weight decay. Default: 0.1.
    pub weight_decay: f64,
    /// Seed of the random bits of rounding, together with `tensor` and the number of the step. Default: 0.
    pub seed: u64,
    /// Number of this weight among all that share the seed. Default: 0.
    pub tensor: u64,
}

// SAFETY: numbers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_StepOptions {
    const NAME: &'static str = "NVFP4_StepOptions";
    fn defaults() -> Self {
        let settings = Hyperparameters::default();
        NVFP4_StepOptions {
            struct_size: size_of::<Self>() as u32,
            gradient_scale: 1.0,
            rate: settings.rate,
            beta1: settings.beta1,
            beta2: settings.beta2,
            eps: settings.eps,
            weight_decay: settings.decay,
            seed: 0,
            tensor: 0,
        }
    }
}

impl NVFP4_StepOptions {
    fn read(&self) -> tensors::TensorStep {
        tensors::TensorStep {
            settings: Hyperparameters {
                rate: self.rate,
                beta1: self.beta1,
                beta2: self.beta2,
                eps: self.eps,
                decay: self.weight_decay,
            },
            gradient_scale: self.gradient_scale,
            seed: self.seed,
            tensor: self.tensor,
        }
    }
}

/// A result of these sizes, of this library or of libtorch, filled by `write`.
fn made(
    own: bool,
    device: &Device,
    place: Place,
    sizes: &[usize],
    dtype: DType,
    write: impl FnOnce(&mut Tensor) -> Result<()>,
) -> Result<*mut c_void> {
    if own {
        let mut out = tensors::new_result(device, sizes, dtype)?;
        write(&mut out)?;
        return Ok(give(out));
    }
    let (handle, mut out) = libtorch::make(sizes, sizes, dtype, place)?;
    write(&mut out)?;
    drop(out);
    Ok(handle.give())
}

fn place_of(device: &Device) -> Place {
    match device {
        Device::Cuda(gpu) => Place::Cuda(gpu.ordinal()),
        _ => Place::Host,
    }
}

fn with<T>(
    state: *const NVFP4_OptimizerState,
    body: impl FnOnce(&mut State) -> Result<T>,
) -> Result<T> {
    let object = handle::get::<Optimizer>("state", state)?;
    let mut state = object.0.take_long("state")?;
    body(&mut state)
}

/// Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_OptimizerOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_optimizer_options_init(
    options: *mut NVFP4_OptimizerOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_optimizer_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_OptimizerOptions::defaults()) }
    })
}

/// Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_StepOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_step_options_init(
    options: *mut NVFP4_StepOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_step_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_StepOptions::defaults()) }
    })
}

/// Creates the optimizer of a weight `[.., K]`, K a multiple of 16. The values are copied and rounded to nearest; moments are zero.
///
/// - `weight`: a floating tensor, of this library or of libtorch. The state is in the same place.
/// - `options`: NULL for the defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_optimizer_create(
    weight: *mut c_void,
    options: *const NVFP4_OptimizerOptions,
    out: *mut *mut NVFP4_OptimizerState,
) -> NVFP4_Status {
    enter("NVFP4_optimizer_create", || {
        // SAFETY: the pointers are as the header asks.
        let (out, options) = unsafe { (Out::new("out", out)?, self::options(options)?) };
        let forms = options.read()?;
        let own = are_own(&[("weight", weight)])?;
        let weight = tensor("weight", weight)?;
        let device = tensors::device_of(&weight, shared::device)?;
        let _order = (!own).then(|| libtorch::on_current_stream(weight.place()));
        let optimizer = tensors::TensorOptimizer::new(&device, &weight, forms)?;
        let state = State { optimizer, own };
        out.set(handle::insert(Arc::new(Optimizer(Exclusive::new(state)))));
        Ok(())
    })
}

/// Creates an optimizer from a copy by NVFP4_optimizer_save(), on any device. Further steps have the same bits as without the copy.
///
/// - `device_type`, `device_index`: one of NVFP4_DEVICE_*, and its number.
/// - `libtorch`: 1 if its results should be tensors of libtorch, 0 if of this library.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_optimizer_restore(
    bytes: *const u8,
    length: usize,
    device_type: i32,
    device_index: i32,
    libtorch: i32,
    out: *mut *mut NVFP4_OptimizerState,
) -> NVFP4_Status {
    enter("NVFP4_optimizer_restore", || {
        // SAFETY: the pointers are as the header asks.
        let (out, bytes) = unsafe { (Out::new("out", out)?, slice("bytes", bytes, length)?) };
        let own = !flag("libtorch", libtorch)?;
        let device = device_of(device_type, device_index, shared::device)?;
        let optimizer = tensors::TensorOptimizer::restore(&device, bytes)?;
        let state = State { optimizer, own };
        out.set(handle::insert(Arc::new(Optimizer(Exclusive::new(state)))));
        Ok(())
    })
}

/// Adds a reference to an optimizer.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_optimizer_retain(
    state: *mut NVFP4_OptimizerState,
) -> NVFP4_Status {
    enter("NVFP4_optimizer_retain", || {
        handle::retain::<Optimizer>("state", state)
    })
}

/// Gives up a reference to an optimizer. After the last one the handle is stale.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_optimizer_release(
    state: *mut NVFP4_OptimizerState,
) -> NVFP4_Status {
    enter_to_free("NVFP4_optimizer_release", || {
        handle::release::<Optimizer>("state", state)
    })
}

/// Takes a step of AdamW, with the bias correction of its number. A gradient that is not finite is #NVFP4_INVALID_ARGUMENT, and changes
/// nothing. Waits for a GPU.
///
/// - `gradient`: of the weight's shape and in its place, bfloat16 or float32, on the CPU any floating type.
/// - `options`: NULL for the defaults.
/// - `changed`, `changed_delivered`: the number of weights whose stored code changed, and whose delivered code changed; each may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_optimizer_step(
    state: *mut NVFP4_OptimizerState,
    gradient: *mut c_void,
    options: *const NVFP4_StepOptions,
    changed: *mut u64,
    changed_delivered: *mut u64,
) -> NVFP4_Status {
    enter("NVFP4_optimizer_step", || {
        // SAFETY: the pointer is as the header asks.
        let step = unsafe { self::options(options) }?.read();
        let changes = with(state, |state| {
            let own = are_own(&[("gradient", gradient)])?;
            let gradient = tensor("gradient", gradient)?;
            let _order = (!own).then(|| libtorch::on_current_stream(gradient.place()));
            state.optimizer.step(&gradient, &step)
        })?;
        for (place, value) in [
            (changed, changes.stored),
            (changed_delivered, changes.delivered),
        ] {
            if !place.is_null() {
                // SAFETY: the header asks for places of 64 bits.
                unsafe { place.write_unaligned(value) };
            }
        }
        Ok(())
    })
}

/// Writes the number of steps made, and the bytes held; each may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_optimizer_size(
    state: *const NVFP4_OptimizerState,
    steps: *mut u64,
    bytes: *mut u64,
) -> NVFP4_Status {
    enter("NVFP4_optimizer_size", || {
        let object = handle::get::<Optimizer>("state", state)?;
        let found = object
            .0
            .look("state", |state| Ok(state.snapshot()), |&known| Ok(known))?;
        for (place, value) in [(steps, found.0), (bytes, found.1)] {
            if !place.is_null() {
                // SAFETY: the header asks for places of 64 bits.
                unsafe { place.write_unaligned(value) };
            }
        }
        Ok(())
    })
}

/// Writes the weight as a tensor of the floating type `dtype`, of the kind that the optimizer was created with.
///
/// - `delivered`: 1 for the NVFP4 codes alone, 0 for the full stored precision.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_optimizer_weight(
    state: *mut NVFP4_OptimizerState,
    delivered: i32,
    dtype: i32,
    out: *mut *mut c_void,
) -> NVFP4_Status {
    enter("NVFP4_optimizer_weight", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        let (delivered, dtype) = (flag("delivered", delivered)?, DType::from_code(dtype)?);
        let tensor = with(state, |State { optimizer, own }| {
            let (device, place) = (optimizer.device(), place_of(optimizer.device()));
            let _order = (!*own).then(|| libtorch::on_current_stream(place));
            made(*own, device, place, optimizer.sizes(), dtype, |out| {
                optimizer.decode_into(delivered, out)
            })
        })?;
        out.set(tensor);
        Ok(())
    })
}

/// Writes the delivered weight, as NVFP4 in host memory. #NVFP4_UNSUPPORTED for bfloat16 and float32.
///
/// - `codes`: uint8 `[.., K / 2]`.
/// - `scales`: float8_e4m3fn `[.., K / 16]`.
/// - `global_scale`: the global scale.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_optimizer_delivered(
    state: *mut NVFP4_OptimizerState,
    codes: *mut *mut NVFP4_Tensor,
    scales: *mut *mut NVFP4_Tensor,
    global_scale: *mut f32,
) -> NVFP4_Status {
    enter("NVFP4_optimizer_delivered", || {
        // SAFETY: the pointers are as the header asks.
        let (codes, scales, global_scale) = unsafe {
            (
                Out::new("codes", codes)?,
                Out::new("scales", scales)?,
                Out::new("global_scale", global_scale)?,
            )
        };
        let (c, s, g) = with(state, |state| state.optimizer.delivered())?;
        codes.set(handle::insert(Arc::new(c)));
        scales.set(handle::insert(Arc::new(s)));
        global_scale.set(g);
        Ok(())
    })
}

/// Copies the complete state, for NVFP4_optimizer_restore(). Writes the number of bytes to `length`; see ARRAYS OUT above.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_optimizer_save(
    state: *mut NVFP4_OptimizerState,
    buffer: *mut u8,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_optimizer_save", || {
        let bytes = with(state, |state| state.optimizer.save())?;
        // SAFETY: the pointers are as the header asks.
        unsafe { copy_items(&bytes, buffer, capacity, length) }
    })
}

/// Writes a seed for #NVFP4_ROUNDING_STOCHASTIC, derived from three numbers, for NVFP4_QuantizeOptions. Every tensor and step then has its
/// own random bits, and each element by its index.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_rounding_seed(
    seed: u64,
    tensor: u64,
    step: u64,
    out: *mut u64,
) -> NVFP4_Status {
    enter("NVFP4_rounding_seed", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { Out::new("out", out) }?.set(tensors::rounding_seed(seed, tensor, step));
        Ok(())
    })
}

/// Multiplies `x` `[.., K]` by the transpose of a weight `[N, K]`, whose values are rounded to 4 bits as by NVFP4_ste_weight(): `[.., N]`
/// in the type of `x`. Sums are float32.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_ste_linear(
    x: *mut c_void,
    weight: *mut c_void,
    out: *mut *mut c_void,
) -> NVFP4_Status {
    enter("NVFP4_ste_linear", || {
        // SAFETY: the pointer is as the header asks.
        let out = unsafe { Out::new("out", out) }?;
        let own = are_own(&[("x", x), ("weight", weight)])?;
        let (x, weight) = (tensor("x", x)?, tensor("weight", weight)?);
        let sizes = ste::linear_sizes(&x, &weight)?;
        let device = tensors::device_of(&x, shared::device)?;
        let _order = (!own).then(|| libtorch::on_current_stream(x.place()));
        out.set(made(own, &device, x.place(), &sizes, x.dtype(), |out| {
            ste::linear_into(&device, &x, &weight, out)
        })?);
        Ok(())
    })
}

/// The gradients of NVFP4_ste_linear(), from the gradient of its result. The gradient of `x` goes through the rounded weight; that of the
/// weight passes the rounding unchanged (straight-through estimator).
///
/// - `gradient`: `[.., N]`.
/// - `dx`: the gradient of `x`, in its shape and type; NULL if it is not wanted.
/// - `dweight`: the gradient of `weight`, in its shape and type; NULL if it is not wanted.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_ste_linear_backward(
    x: *mut c_void,
    weight: *mut c_void,
    gradient: *mut c_void,
    dx: *mut *mut c_void,
    dweight: *mut *mut c_void,
) -> NVFP4_Status {
    enter("NVFP4_ste_linear_backward", || {
        if dx.is_null() && dweight.is_null() {
            bail!(
                InvalidArgument,
                "dx and dweight are NULL; pass where at least one of them goes"
            );
        }
        let own = are_own(&[("x", x), ("weight", weight), ("gradient", gradient)])?;
        let (x, weight) = (tensor("x", x)?, tensor("weight", weight)?);
        let gradient = tensor("gradient", gradient)?;
        let device = tensors::device_of(&x, shared::device)?;
        let _order = (!own).then(|| libtorch::on_current_stream(x.place()));
        let of = |like: &Tensor, write: &dyn Fn(&mut Tensor) -> Result<()>| {
            let sizes = like.shape().sizes();
            made(own, &device, like.place(), sizes, like.dtype(), write)
        };
        let (mut for_x, mut for_weight) = (None, None);
        if !dx.is_null() {
            for_x = Some(of(&x, &|out| {
                ste::linear_backward_into(&device, &x, &weight, &gradient, Some(out), None)
            })?);
        }
        if !dweight.is_null() {
            for_weight = Some(of(&weight, &|out| {
                ste::linear_backward_into(&device, &x, &weight, &gradient, None, Some(out))
            })?);
        }
        for (place, made) in [(dx, for_x), (dweight, for_weight)] {
            if let Some(made) = made {
                // SAFETY: the header asks for places of a pointer's size, and this one is not NULL.
                unsafe { place.write_unaligned(made) };
            }
        }
        Ok(())
    })
}
