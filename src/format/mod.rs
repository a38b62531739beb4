//! Floor 1: the number formats, as safe and pure functions. This folder is the specification: every kernel, on every device, is compared
//! with it. It knows nothing of files, devices, threads or tensors with strides.

pub mod adamw;
pub mod calibrated;
pub mod e2m1;
pub mod e4m3;
pub mod f8;
pub mod input_moments;
pub mod int8;
pub mod moment;
pub mod mxfp4;
pub mod nf4;
pub mod nvfp4;
pub mod operand;
pub mod random;
pub mod residual;
pub mod swizzle;

/// Rounding of a value between two neighbours of a format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To the nearer one, ties to the even code. Matches the hardware conversion.
    #[default]
    NearestEven,
    /// To the nearer one, ties away from zero. Matches the reference of the legacy host.
    HalfAway,
    /// To either, with a probability that makes the expected result equal to the value.
    Stochastic,
}
