//! Floor 4: one file per operation, on arrays of either device. An operation checks its arguments, chooses the device once, and calls it.
//! Training operations, with their backward passes, are in [`training`]. Knows nothing of models or sessions.

pub mod activation;
mod array;
pub mod attention;
pub mod backend;
pub mod calibrated;
pub mod delta;
mod device;
pub mod experts;
pub mod likelihood;
pub mod linear;
pub mod mamba;
pub mod norm;
pub mod quantize;
pub mod rope;
pub mod sample;
pub mod ste;
pub mod tensors;
pub mod training;
pub mod transfer;

pub use crate::cpu::{Workspace, WorkspaceSizes};
pub use array::{Array, Element, Mixed, Slice, SliceMut};
pub use device::{Device, DeviceKind};
