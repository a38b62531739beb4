//! Kernel bodies, each written once over [`super::simd::Simd`] and instantiated per level by `super::table`. A body performs one part of
//! one operation on given memory, and knows nothing of threads, models or files.

pub(super) mod attention;
pub(super) mod calibrated;
pub(super) mod delta;
pub(super) mod linear;
pub(super) mod matmul;
pub(super) mod pointwise;
pub(super) mod sample;
