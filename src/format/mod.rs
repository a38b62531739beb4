//! Floor 1: the number formats, as safe and pure functions. This folder is the specification: every kernel, on every
//! device, is compared with it. It knows nothing of files, devices, threads or tensors with strides.

pub mod adamw;
pub mod calibrated;
pub mod e2m1;
pub mod e4m3;
pub mod input_moments;
pub mod int8;
pub mod moment;
pub mod nf4;
pub mod nvfp4;
pub mod operand;
pub mod random;
pub mod residual;
pub mod swizzle;

/// How a value between two neighbours of a format goes to one of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To the nearer one; a tie goes to the even code. What the hardware conversion does.
    #[default]
    NearestEven,
    /// To the nearer one; a tie goes away from zero. What the legacy host's reference does.
    HalfAway,
    /// To either, with a probability that makes the expected result equal the value.
    Stochastic,
}
