//! Floor 2: tensors as memory with a type and a shape, and their exchange with others by DLPack. A [`Tensor`] is a view:
//! cheap to clone, keeping its storage alive. Memory of a device is an address and a place here, made and used by floors
//! above. It knows nothing of devices' kernels, of checkpoints or of models, and does no arithmetic beyond the conversion of
//! element types.

mod dlpack;
mod dtype;
pub mod product;
mod shape;
mod storage;
mod weight_type;

pub use dlpack::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor,
    Managed,
};
pub use dtype::DType;
pub use shape::{MAX_RANK, Shape};
pub use storage::{Owner, Place, Release, Tensor, WeakTensor};
pub use weight_type::WeightType;
