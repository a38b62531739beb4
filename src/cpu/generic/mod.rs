//! Kernel bodies, each written once over [`super::simd::Simd`] and stamped per level by `super::table`. Nothing here knows
//! about threads, models or files: a body does one part of one operation on memory it is given.

pub(super) mod attention;
pub(super) mod calibrated;
pub(super) mod linear;
pub(super) mod matmul;
pub(super) mod pointwise;
pub(super) mod sample;
