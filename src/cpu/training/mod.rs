//! f32 operations of training beyond inference: plain GEMMs, and the operations of a block with their backward passes. The reference for
//! kernels of other devices. Sums run in a fixed order, independent of the threads.

mod activation;
mod attention;
mod convolution;
mod delta;
mod divergence;
mod heads;
mod input_moments;
mod loss;
mod matmul;
mod norm;
mod operand;
mod optimizer;
mod read;
mod rows;

pub(super) use rows::{by_parts, by_parts_of_two};

pub use attention::DocumentRows;
pub use delta::{DeltaForward, DeltaGradients};
pub use divergence::{Divergence, RowSums, TeacherColumns};
pub use heads::Heads;
pub use loss::{CrossEntropy, HeadColumns};
pub use optimizer::{MatrixRows, ReadRows, Rows, RowsStep, weight_global};
