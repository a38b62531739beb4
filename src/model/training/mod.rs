//! The loss of a model and its gradients: forward and backward passes of a decoder of any [`Spec`](super::Spec), built from operations on
//! either device. Weights are read from a [`Store`] just before use, and gradients are given to it as soon as they are complete, so that
//! only a part of either exists at a time.

/// The operations of blocks that are not trained, as a pattern.
macro_rules! untrained {
    () => {
        BlockOp::MambaInputs
            | BlockOp::MambaConvolve
            | BlockOp::MambaScan
            | BlockOp::MambaNorm
            | BlockOp::EnterExperts
            | BlockOp::LeaveExperts
            | BlockOp::PerLayerGate
            | BlockOp::PerLayerProject
            | BlockOp::PerLayerLeave
            | BlockOp::ScaleStream
    };
}

mod batch;
mod block;
mod columns;
mod delta;
mod experts;
mod fresh;
mod head;
mod held;
mod hidden;
mod layout;
mod lesson;
mod linear;
mod memory;
mod mixer;
mod observer;
mod pass;
mod precision;
mod recompute;
mod runner;
mod scratch;
mod source;
mod streams;
mod teacher;

pub use batch::Batch;
pub use columns::MixerColumns;
pub use fresh::Fresh;
pub use hidden::HiddenTargets;
pub use layout::{
    AdapterLayout, BlockLayout, DeltaVectors, ExpertsLayout, GatedMlpLayout, Layout, MatrixId,
    MatrixLayout, MixerVectors, MlpLayout, ProjectionLayout, VectorId, VectorLayout,
};
pub use lesson::Lesson;
pub use memory::PassMemory;
pub use observer::{Observer, See};
pub use pass::{Options, Pass};
pub use precision::{ProductForm, ProductPrecision};
pub use recompute::{Recompute, RecomputedParts};
pub use runner::Runner;
pub(crate) use source::check_device;
pub use source::{Source, SourceText, untrainable, untrainable_on_gpu};
pub use teacher::{Placement, Teacher, TeacherMemory};

use std::ops::Range;

use crate::base::Result;
use crate::base::error::bail;
use crate::ops::{Mixed, Slice, SliceMut};

/// Source of the parameters of a pass, and destination of its gradients.
pub trait Store {
    /// Rows and columns of a matrix.
    fn shape(&self, matrix: MatrixId) -> (usize, usize);

    /// Writes the values of a range of rows of a matrix to `out`, for a GEMM.
    fn read(
        &mut self,
        matrix: MatrixId,
        rows: Range<usize>,
        out: SliceMut<'_, Mixed>,
    ) -> Result<()>;

    /// Writes the embedding's rows of these tokens to `out`.
    fn embed(&mut self, matrix: MatrixId, tokens: &[u32], out: SliceMut<'_, Mixed>) -> Result<()>;

    /// A norm, a bias or another vector.
    fn vector(&self, vector: VectorId) -> Result<Slice<'_>>;

    /// A vector with the sum to which its gradient is added. A frozen model has none.
    fn vector_with_gradient(&mut self, vector: VectorId) -> Result<(Slice<'_>, SliceMut<'_>)> {
        bail!(
            Internal,
            "a gradient of vector {vector} of a frozen model was asked for"
        )
    }

    /// Observes the rows `x` that these projections multiply, before rounding.
    fn observe(&mut self, projections: &[ProjectionLayout], x: Slice<'_, Mixed>) -> Result<()> {
        let _ = (projections, x);
        Ok(())
    }

    /// Whether a matrix gets gradients. None does in a frozen model.
    fn trains(&self, matrix: MatrixId) -> bool {
        let _ = matrix;
        false
    }

    /// Takes complete gradients of rows that the pass has read for the last time; once for each matrix. A frozen model takes none.
    fn gradients(&mut self, gradients: &[RowGradients<'_>]) -> Result<()> {
        bail!(
            Internal,
            "{} gradients of a frozen model were given",
            gradients.len()
        )
    }
}

/// Gradients of some rows of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct RowGradients<'a> {
    /// The matrix.
    pub matrix: MatrixId,
    /// The first of the rows.
    pub first_row: usize,
    /// `[.., cols]`.
    pub values: Slice<'a, Mixed>,
}
