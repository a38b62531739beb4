//! The forms of matrix products.

/// Which operands of a product are stored transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// `a[m, k] b[n, k]^T`: activations times a weight.
    NT,
    /// `a[m, k] b[k, n]`: gradients of outputs times a weight, which are those of its inputs.
    NN,
    /// `a[k, m]^T b[k, n]`: gradients of outputs and the inputs, which make the gradient of a weight.
    TN,
}

/// The sizes of a product: `[m, n]` sums of `k` products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sizes {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Products in a sum.
    pub k: usize,
}
