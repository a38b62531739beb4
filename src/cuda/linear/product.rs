//! The entry point of GEMMs: up to three matrices at once, by the kernel that serves them best.

use std::sync::Arc;

use super::choose::{are_nvfp4, fused_plan, shapes};
use super::dense;
use super::hardware::Hardware;
use super::input::Input;
use super::int8;
use super::limits::SKINNY_ROWS;
use super::many::{LinearScratch, tiled};
use super::matrix::Biased;
use super::output::{Layout, Output};
use super::skinny::skinny_gemm;
use super::tiled::{self, TileKernel};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::convert;
use crate::cuda::driver::{DeviceBuffer, Gpu};
use crate::tensor::WeightType;

/// GEMM of `m` rows with up to three matrices that share their input. Their output features follow each other in the rows of `out`,
/// `stride` elements apart. Where needed, scratch memory holds an f16 copy of one weight.
pub fn linear(
    gpu: &Arc<Gpu>,
    input: Input<'_>,
    m: usize,
    matrices: &[Biased<'_>],
    output: Output,
    out: &DeviceBuffer,
    stride: usize,
    scratch: &LinearScratch,
) -> Result<()> {
    let Some((first, _)) = matrices.first() else {
        bail!(Internal, "a product without a matrix");
    };
    let k = first.cols;
    if matrices.len() > 3 || matrices.iter().any(|(w, _)| w.cols != k) {
        bail!(
            Internal,
            "{} matrices of different K in one product",
            matrices.len()
        );
    }
    if output.applied().is_some() && (matrices.len() != 2 || matrices[1].0.rows != first.rows) {
        bail!(
            Internal,
            "a gated activation takes two matrices of one shape"
        );
    }
    if m == 0 {
        return Ok(());
    }
    let features: usize = match output.applied().is_some() {
        true => first.rows,
        false => matrices.iter().map(|(w, _)| w.rows).sum(),
    };
    if stride < features {
        bail!(Internal, "rows of {features} features {stride} apart");
    }
    let elements = match output {
        Output::GluFragmentMajor(_) => Layout::FragmentMajor.elements(m, features),
        _ => (m - 1) * stride + features,
    };
    out.holds("a product", &[elements, output.bytes()])?;
    input.holds(m, k)?;
    let layout = input.layout();
    let (hardware, shapes) = (Hardware::of(gpu), shapes(matrices));
    if let Some(plan) = fused_plan(&hardware, m, &shapes, output, layout) {
        return skinny_gemm(gpu, input, m, matrices, output, out, stride, plan, None);
    }
    if output.applied().is_some() && !tiled::has_glu(&hardware, m, &shapes, output.layout()) {
        bail!(
            Internal,
            "no kernel applies a gated activation to {m} rows of these"
        );
    }
    if are_nvfp4(&shapes) && hardware.tiles_serve(m) {
        let kernel = TileKernel::serving(gpu.arch(), m, layout);
        return tiled(
            gpu, kernel, input, m, matrices, output, out, stride, scratch,
        );
    }
    let Input::Plain(x, factor) = input else {
        bail!(Internal, "no kernel for {m} rows of these takes such input");
    };
    let mut column = 0;
    for (w, bias) in matrices {
        let at = out.address() + (column * output.bytes()) as u64;
        let is_many = match w.storage {
            WeightType::Nvfp4 => true,
            WeightType::F16 | WeightType::BF16 => m > SKINNY_ROWS,
            WeightType::Int8 => m > int8::PRODUCT_ROWS,
            WeightType::F32 => false,
        };
        if is_many {
            scratch.product(gpu, w, x, factor, m, output, at, stride)?;
            if let Some(bias) = bias {
                convert::add_bias_at(gpu, at, output == Output::F16, m, w.rows, stride, bias)?;
            }
        } else {
            dense::dense(gpu, w, *bias, x, factor, m, output, at, stride)?;
        }
        column += w.rows;
    }
    Ok(())
}
