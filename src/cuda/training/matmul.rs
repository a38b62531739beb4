//! GEMMs of plain bf16 matrices, by cuBLASLt. The algorithm for a shape stays the same for the life of the process.

use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;
use crate::base::size::product;
use crate::cuda::blas::{Element, Rows, Store};
use crate::cuda::driver::{DeviceBuffer, DeviceSlice};
use crate::tensor::product::{GemmForm, Sizes};

/// Bytes of cuBLASLt's workspace.
pub const WORKSPACE: usize = 32 << 20;

/// The product of bf16 `a` and `b` in the given `form`, stored in or added to `out` `[m, n]`. `out` is bf16, or f32 if it has twice as many
/// bytes.
pub fn matmul(
    form: GemmForm,
    sizes: Sizes,
    a: DeviceSlice<'_>,
    b: DeviceSlice<'_>,
    out: DeviceSlice<'_>,
    add: bool,
) -> Result<()> {
    let Sizes { m, n, k } = sizes;
    let elements = product("a product", &[m, n])?;
    let store = match (out.bytes(), add) {
        (bytes, false) if bytes == 4 * elements => Store::F32,
        (bytes, true) if bytes == 4 * elements => Store::Add,
        (bytes, false) if bytes == 2 * elements => Store::Bf16,
        (bytes, true) if bytes == 2 * elements => Store::AddBf16,
        (bytes, _) => bail!(Internal, "a product of [{m}, {n}] to {bytes} bytes"),
    };
    a.holds("the left operand", &[m, k, 2])?;
    b.holds("the right operand", &[n, k, 2])?;
    let gpu = out.gpu();
    let workspace = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, WORKSPACE)?;
    let [of_a, of_b] = match form {
        GemmForm::NT => [k, k],
        GemmForm::NN => [k, n],
        GemmForm::TN => [m, n],
    };
    let rows = |address, stride| Rows { address, stride };
    let operands = [rows(a.address(), of_a), rows(b.address(), of_b)];
    gpu.need_blas()?.matmul(
        gpu,
        Element::Bf16,
        form,
        sizes,
        1.0,
        operands,
        store,
        rows(out.address(), n),
        &workspace,
    )
}
