//! How a model is loaded.

use crate::format::nvfp4::QuantizeOptions;
use crate::ops::Device;
use crate::ops::linear::Activations;

/// How to load a model.
#[derive(Clone)]
pub struct LoadOptions {
    /// Where it runs.
    pub device: Device,
    /// Why it runs there, if nobody named the device: what a [`Placement`](super::placement::Placement) says.
    pub device_choice: Option<String>,
    /// Quantizes dense weight matrices to NVFP4 while loading. Without, weights are held as they are stored, and those in
    /// other block formats as f32.
    pub quantize: Option<QuantizeOptions>,
    /// How activations enter products with NVFP4 weights.
    pub activations: Activations,
    /// Leaves out the layers: tokenizer, embedding, final norm and head only.
    pub sampling_only: bool,
}

impl LoadOptions {
    /// Everything as stored, activations exact.
    pub fn new(device: Device) -> Self {
        LoadOptions {
            device,
            device_choice: None,
            quantize: None,
            activations: Activations::Exact,
            sampling_only: false,
        }
    }
}
