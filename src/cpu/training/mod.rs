//! What training takes beside inference, in f32: products of plain matrices, and the operations of a block with their backward passes.
//! The reference that kernels of other devices are compared with. Sums run in a fixed order, whatever the threads.

mod activation;
mod attention;
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

pub use attention::{DocumentRows, PackedAttention};
pub use divergence::{Divergence, RowSums, TeacherColumns};
pub use heads::Heads;
pub use loss::{CrossEntropy, HeadColumns};
pub use optimizer::{MatrixRows, ReadRows, Rows, RowsStep, weight_global};
