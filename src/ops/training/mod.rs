//! The operations of training, forward beside backward, on arrays in [`Mixed`](super::Mixed) precision: matrix products in three forms,
//! norms, heads, attention of packed documents, gated units, the loss, the embedding, and the optimizer.

pub mod activation;
pub mod attention;
pub mod embedding;
pub mod heads;
pub mod loss;
pub mod matmul;
pub mod norm;
pub mod optimizer;
pub mod statistics;

use super::Device;
use crate::base::Result;
use crate::base::error::bail;

/// Refuses a GPU.
fn only_on_the_cpu<T>(device: &Device) -> Result<T> {
    bail!(
        Unsupported,
        "training on {}: this version trains on the cpu only",
        device.name()
    )
}
