//! The forms of GEMMs.

/// The operands of a GEMM that are stored transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmForm {
    /// `a[m, k] b[n, k]^T`: activations times a weight.
    NT,
    /// `a[m, k] b[k, n]`: gradients of outputs times a weight, which gives the gradients of the inputs.
    NN,
    /// `a[k, m]^T b[k, n]`: gradients of outputs and inputs, which give the gradient of a weight.
    TN,
}

/// The sizes of a product: `[m, n]` sums of `k` products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sizes {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Terms of each sum.
    pub k: usize,
}

impl Sizes {
    /// The sizes `m`, `n` and `k`.
    pub fn mnk(m: usize, n: usize, k: usize) -> Sizes {
        Sizes { m, n, k }
    }
}
