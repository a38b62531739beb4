//! Floor 4: one file per operation. An operation checks its arguments, chooses the device once, and calls it; forward
//! stands here now, backward will stand beside it. Knows nothing of models or sessions.

pub mod activation;
pub mod attention;
pub mod backend;
mod device;
pub mod linear;
pub mod norm;
mod prepare;
pub mod quantize;
pub mod rope;
pub mod sample;
mod scaled_mm;
pub mod ste;
pub mod tensors;
pub mod transfer;

pub use crate::cpu::Workspace;
pub use device::Device;
