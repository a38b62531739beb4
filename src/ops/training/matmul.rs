//! GEMMs of plain matrices.

use super::super::{Device, Element, Mixed, Slice, SliceMut};
use crate::base::Result;
use crate::cuda::training as cuda;

pub use crate::tensor::product::{GemmForm, Sizes};

/// Bytes of workspace while a GEMM runs.
pub fn workspace(device: &Device) -> usize {
    match device {
        Device::Cpu(_) => 0,
        Device::Cuda(_) => cuda::PRODUCT_WORKSPACE,
    }
}

/// The product of `a` and `b`, transposed as `form` says, written or added to `out` `[m, n]`. Accumulates in f32 and rounds once on a GPU
/// unless `out` is f32.
pub fn matmul<E: Element<Host = f32>>(
    device: &Device,
    form: GemmForm,
    sizes: Sizes,
    a: Slice<'_, Mixed>,
    b: Slice<'_, Mixed>,
    out: SliceMut<'_, E>,
    add: bool,
) -> Result<()> {
    match device {
        Device::Cpu(cpu) => cpu.matmul(form, sizes, a.host()?, b.host()?, out.host()?, add),
        Device::Cuda(_) => cuda::matmul(form, sizes, a.cuda()?, b.cuda()?, out.cuda()?, add),
    }
}

/// Adds the Gram matrix `x^T x` of `x` `[rows, cols]` to `out` `[cols, cols]` in f32, on and above the diagonal; elements below it are
/// unspecified.
pub fn gram(device: &Device, x: Slice<'_, Mixed>, cols: usize, out: SliceMut<'_>) -> Result<()> {
    match device {
        Device::Cpu(cpu) => cpu.gram(x.host()?, cols, out.host()?),
        Device::Cuda(_) => {
            let sizes = Sizes::mnk(cols, cols, x.len() / cols);
            matmul(device, GemmForm::TN, sizes, x, x, out, true)
        }
    }
}
