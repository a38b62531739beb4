//! Floor 2: tensors as typed, shaped memory, and their exchange with others by DLPack. A [`Tensor`] is a view: cheap to clone, keeping its
//! storage alive. Device memory is only an address and a place here; higher floors allocate and use it. Also the shapes of operations that
//! every device takes. Knows nothing of kernels, checkpoints or models, and does no arithmetic except the conversion of element types.

mod attention;
mod delta;
mod dlpack;
mod dtype;
mod kv_type;
mod mamba;
pub mod product;
mod recurrent;
mod scoring;
mod shape;
mod storage;
mod weight_type;

pub use attention::AttentionShape;
pub use delta::DeltaShape;
pub use dlpack::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor,
    Managed,
};
pub use dtype::DType;
pub use kv_type::KvType;
pub use mamba::MambaShape;
pub use recurrent::RecurrentShape;
pub use scoring::SigmoidScoring;
pub use shape::{MAX_RANK, Shape};
pub use storage::{Owner, Place, Release, Tensor, WeakTensor};
pub use weight_type::WeightType;
