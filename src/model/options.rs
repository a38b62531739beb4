//! Options of loading a model.

use crate::format::nvfp4::QuantizeOptions;
use crate::ops::Device;
use crate::ops::linear::Activations;

/// Use of the file of packed weights beside a model's own, which processes on the CPU map and share; see [`pack`](super::pack).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PackedUse {
    /// Used if it is there and of the model's files. One that is damaged or of other weights is an error. Not used on a GPU.
    #[default]
    Auto,
    /// Not used: weights are packed into memory of the process.
    Off,
    /// Used, or an error.
    Required,
}

/// Prompts of more tokens than this run beside steps where a GPU divides its multiprocessors, also with [`Tuning::Throughput`].
pub const LONG_PROMPT: usize = 2048;

/// The goal of passes with prompts while other sequences generate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Tuning {
    /// Prompts end soon: they hold up steps for 20 ms at a time, or for the time of three. On a Hopper GPU long ones run beside steps, on four
    /// fifths of the multiprocessors.
    #[default]
    Throughput,
    /// Prompts hold up steps as little as possible: on the CPU for less than the time of one. On a Hopper GPU they run beside steps, on half of
    /// the multiprocessors; on others in passes of 128 rows with the steps.
    Latency,
}

/// Options of loading a model.
#[derive(Clone)]
pub struct LoadOptions {
    /// The device to run on.
    pub device: Device,
    /// The reason for the device, if the caller did not name it: the text of a [`Placement`](super::placement::Placement).
    pub device_choice: Option<String>,
    /// Quantizes dense weight matrices to NVFP4 while loading. Without it, weights keep their stored format, except that other block
    /// formats become f32.
    pub quantize: Option<QuantizeOptions>,
    /// Precision of activations in products with NVFP4 weights.
    pub activations: Activations,
    /// Bytes of keys and values of all sequences together, reserved when the model is loaded. `None` reserves nothing: memory is allocated
    /// as sequences grow, and left to others until then.
    pub kv_bytes: Option<usize>,
    /// Whether sequences that begin with the same tokens share the blocks of keys and values of these, and recurrent states.
    pub prefix_cache: bool,
    /// Bytes of blocks that are kept after the last sequence that used them, for later ones that begin with the same tokens. With `kv_bytes`
    /// these blocks take what is reserved and free, and this is not read.
    pub prefix_bytes: usize,
    /// Whether the logits of a sequence have the same bits whatever else runs beside it and however its prompt is divided. Always so on the
    /// CPU; on a GPU this costs speed.
    pub deterministic: bool,
    /// The goal of passes with prompts.
    pub tuning: Tuning,
    /// Most tokens of prompts in a pass while other sequences generate; `None` for as many as measured times and `tuning` allow. A pass has at
    /// least those up to the next border of 16 positions.
    pub prompt_tokens: Option<usize>,
    /// Skips the layers: loads only tokenizer, embedding, final norm and head.
    pub sampling_only: bool,
    /// Locks the weights in host memory, so that the system never pages them out. Tables that stay in their file are not locked. On a GPU,
    /// whose memory is never paged out and whose host tables are page-locked, this changes nothing.
    pub mlock: bool,
    /// Whether matrices are mapped from the file of packed weights. Those that `quantize` quantizes never are.
    pub packed: PackedUse,
}

impl LoadOptions {
    /// Loads everything as stored, with exact activations.
    pub fn new(device: Device) -> Self {
        LoadOptions {
            device,
            device_choice: None,
            quantize: None,
            activations: Activations::Exact,
            kv_bytes: None,
            prefix_cache: true,
            prefix_bytes: 0,
            deterministic: false,
            tuning: Tuning::Throughput,
            prompt_tokens: None,
            sampling_only: false,
            mlock: false,
            packed: PackedUse::Auto,
        }
    }
}
