//! Chooses how a GEMM runs from its rows, its matrices and the device: every kernel, grid, cluster and size of shared memory. Launching
//! only checks memory and enqueues.

use std::fmt;

use super::dense::DenseKernel;
use super::fused_norm::MULTIPLE;
use super::hardware::Hardware;
use super::input::InputForm;
use super::int8::{self, Int8Product};
use super::limits::{FUSED_BYTES, HALF_SM_ROWS, MATRICES, NVFP4_MATRICES, SKINNY_ROWS, TILED};
use super::matrix::{Biased, MatrixShape};
use super::output::{Layout, Output};
use super::residual::WIDTH;
use super::skinny::{SkinnyPlan, beside_name};
use super::tf32::Tf32Product;
use super::tiled::Tiling;
use super::tiles::TileKernel;
use crate::base::Result;
use crate::base::error::err;
use crate::cuda::driver::Planned;
use crate::tensor::WeightType;

impl Layout {
    /// The layout that GEMMs of `m` rows with NVFP4 weights take without a conversion.
    pub fn taken(hardware: &Hardware, m: usize) -> Layout {
        match hardware.arch {
            (9, 0) if m > HALF_SM_ROWS && hardware.tiles_serve(m) => Layout::FragmentMajor,
            _ => Layout::RowMajor,
        }
    }
}

pub(super) fn shapes(matrices: &[Biased<'_>]) -> Vec<MatrixShape> {
    matrices.iter().map(|(w, _)| w.shape()).collect()
}

/// Whether the kernels for NVFP4 take these matrices together.
fn are_nvfp4(matrices: &[MatrixShape]) -> bool {
    matrices.len() <= NVFP4_MATRICES && matrices.iter().all(|w| w.storage == WeightType::Nvfp4)
}

/// How a GEMM of some rows with up to four matrices runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmPlan {
    pub(super) m: usize,
    pub(super) matrices: [Option<MatrixShape>; MATRICES],
    /// Its epilogue, with any gated activation for that of the call.
    pub(super) output: Output,
    pub(super) form: InputForm,
    pub(super) kernels: GemmKernels,
}

/// The kernels of a GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GemmKernels {
    /// The skinny GEMM, with all matrices.
    Skinny(SkinnyPlan),
    /// A tiled kernel, with all matrices.
    Tiled(Tiling),
    /// One launch after another, each for neighbouring matrices of one type.
    Parts([Option<GemmPart>; MATRICES]),
}

/// A launch of a GEMM for matrices that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GemmPart {
    /// Number of matrices.
    pub(super) count: usize,
    pub(super) kernel: PartKernel,
    /// Whether it runs beside the kernel before it, which does not make its input. One after another part does where its kernel can.
    pub(super) beside: bool,
}

impl GemmPart {
    /// Whether the part's kernel can run beside the one before: those of a single row can.
    fn can_run_beside(&self) -> bool {
        matches!(self.kernel, PartKernel::Dense(planned) if planned.kernel != DenseKernel::Rows)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartKernel {
    /// The plain kernel, with matrices of one type.
    Dense(Planned<DenseKernel>),
    /// The kernel of int8 rows.
    Int8(Planned<Int8Product>),
    /// The kernel of f32 weights for many rows.
    Tf32(Planned<Tf32Product>),
    /// cuBLASLt with one matrix, on an f16 copy of a weight that is neither f16 nor bf16.
    CuBlas,
}

impl GemmPlan {
    /// The plan for `m` rows in this form; an error if no kernel of the device serves them.
    pub fn choose(
        hardware: &Hardware,
        m: usize,
        matrices: &[MatrixShape],
        output: Output,
        form: InputForm,
    ) -> Result<GemmPlan> {
        GemmPlan::find(hardware, m, matrices, output, form).ok_or_else(|| {
            err!(
                Unsupported,
                "no kernel of this device takes {m} rows ({form:?}) times {matrices:?} to {output:?}"
            )
        })
    }

    /// As [`GemmPlan::choose`]; `None` if no kernel serves.
    pub fn find(
        hardware: &Hardware,
        m: usize,
        matrices: &[MatrixShape],
        output: Output,
        form: InputForm,
    ) -> Option<GemmPlan> {
        let skinny = || {
            let plan = skinny(hardware, m, matrices, output, form)?;
            Some(GemmKernels::Skinny(plan))
        };
        let in_ranges = || {
            let plan = in_ranges(hardware, m, matrices, output, form)?;
            Some(GemmKernels::Skinny(plan))
        };
        let tiled = || tiled(hardware, m, matrices, output, form).map(GemmKernels::Tiled);
        let parts = || parts(hardware, m, matrices, output, form).map(GemmKernels::Parts);
        let kernels = || match m {
            0 => Some(GemmKernels::Parts([None; MATRICES])),
            _ if hardware.deterministic => in_ranges().or_else(tiled).or_else(parts),
            _ => skinny().or_else(tiled).or_else(parts),
        };
        GemmPlan::with(m, matrices, output, form, kernels)
    }

    /// The plan by a tiled kernel, whatever serves best. `divides` says whether there is scratch memory for split-K.
    pub(super) fn by_tiles(
        hardware: &Hardware,
        kernel: TileKernel,
        m: usize,
        matrices: &[MatrixShape],
        output: Output,
        form: InputForm,
        divides: bool,
    ) -> Option<GemmPlan> {
        let layout = form.layout();
        GemmPlan::with(m, matrices, output, form, || {
            Tiling::choose(hardware, kernel, m, matrices, output, layout, divides)
                .map(GemmKernels::Tiled)
        })
    }

    /// The plan by the skinny GEMM, whatever serves best.
    pub fn by_skinny(
        hardware: &Hardware,
        m: usize,
        matrices: &[MatrixShape],
        output: Output,
        form: InputForm,
    ) -> Option<GemmPlan> {
        GemmPlan::with(m, matrices, output, form, || {
            SkinnyPlan::choose(hardware, m, matrices, output, form).map(GemmKernels::Skinny)
        })
    }

    /// The plan with these kernels, if the matrices and the epilogue go together.
    fn with(
        m: usize,
        matrices: &[MatrixShape],
        output: Output,
        form: InputForm,
        kernels: impl FnOnce() -> Option<GemmKernels>,
    ) -> Option<GemmPlan> {
        let first = matrices.first()?;
        let are_alike = matrices.iter().all(|w| w.cols == first.cols);
        let are_gated = matrices.len() == 2 && matrices[1].rows == first.rows;
        if matrices.len() > MATRICES || !are_alike || (output.applied().is_some() && !are_gated) {
            return None;
        }
        Some(GemmPlan {
            m,
            matrices: std::array::from_fn(|i| matrices.get(i).copied()),
            output,
            form,
            kernels: kernels()?,
        })
    }

    /// This GEMM with so much shared memory, if it is for few rows of NVFP4 weights, that no two of its CTAs share a multiprocessor. CTAs of the
    /// kernels before and after it still find room beside them, if these take less than half of it.
    pub fn alone(self, hardware: &Hardware) -> GemmPlan {
        let mut plan = self;
        if let GemmKernels::Skinny(skinny) = &mut plan.kernels {
            skinny.stay_alone(hardware);
        }
        plan
    }

    /// This GEMM beside the kernel before it, which does not make its input: the rows have to be complete when that kernel lets the next
    /// one start. Kernels for few row-major rows of NVFP4 weights and for single rows can run so, but those of deterministic plans for NVFP4
    /// cannot; others wait.
    pub fn beside_predecessor(self) -> GemmPlan {
        let is_plain = self.form == InputForm::Plain(Layout::RowMajor);
        let mut plan = self;
        match &mut plan.kernels {
            GemmKernels::Skinny(skinny) => skinny.beside = is_plain && !skinny.is_deterministic(),
            GemmKernels::Tiled(_) => {}
            GemmKernels::Parts(parts) => {
                if let Some(first) = &mut parts[0] {
                    first.beside = first.can_run_beside();
                }
            }
        }
        plan
    }

    /// Whether it is a plan by [`GemmPlan::beside_predecessor`] that runs so.
    pub fn runs_beside(&self) -> bool {
        match &self.kernels {
            GemmKernels::Skinny(plan) => plan.beside,
            GemmKernels::Tiled(_) => false,
            GemmKernels::Parts(parts) => parts[0].is_some_and(|first| first.beside),
        }
    }

    /// The skinny GEMM of all rows at once, if that is the plan.
    pub(super) fn skinny_at_once(&self) -> Option<&SkinnyPlan> {
        match &self.kernels {
            GemmKernels::Skinny(plan) if plan.rows == self.m => Some(plan),
            _ => None,
        }
    }
}

/// The skinny GEMM, if it is the best choice.
fn skinny(
    hardware: &Hardware,
    m: usize,
    matrices: &[MatrixShape],
    output: Output,
    form: InputForm,
) -> Option<SkinnyPlan> {
    let (layout, k) = (form.layout(), matrices[0].cols);
    let takes = m <= SKINNY_ROWS
        && are_nvfp4(matrices)
        && (layout == Layout::FragmentMajor
            || TileKernel::serving(hardware.arch, m, layout) == TileKernel::Tiled);
    if !takes {
        return None;
    }
    let plan = SkinnyPlan::choose(hardware, m, matrices, output, form)?;
    let stores = !matches!(output, Output::Add | Output::F16);
    let fits = match form {
        InputForm::Plain(_) => true,
        InputForm::FusedNorm(_) => {
            stores && plan.rows == m && takes_norm(m, layout) && k.is_multiple_of(MULTIPLE)
        }
        InputForm::Residual => stores && m == 1 && k <= WIDTH,
        InputForm::Normalized => false,
    };
    let pays = m <= HALF_SM_ROWS
        || output.applied().is_some()
        || match layout {
            Layout::FragmentMajor => plan.clusters * plan.split_k <= hardware.multiprocessors,
            Layout::RowMajor => plan.rows == m && m * k * 2 <= FUSED_BYTES * plan.split_k,
        };
    (fits && pays).then_some(plan)
}

/// The skinny GEMM with the sums of Hopper's kernel of wide tiles, if it takes these rows.
fn in_ranges(
    hardware: &Hardware,
    m: usize,
    matrices: &[MatrixShape],
    output: Output,
    form: InputForm,
) -> Option<SkinnyPlan> {
    let serves = TileKernel::deterministic(hardware.arch) == TileKernel::Wide
        && m <= SKINNY_ROWS
        && are_nvfp4(matrices);
    serves.then(|| SkinnyPlan::in_ranges(hardware, m, matrices, output, form))?
}

/// Whether norms may be fused into GEMMs of `m` rows.
pub(super) fn takes_norm(m: usize, layout: Layout) -> bool {
    m <= HALF_SM_ROWS || layout == Layout::FragmentMajor
}

/// The tiled kernel that serves these rows, if any does.
fn tiled(
    hardware: &Hardware,
    m: usize,
    matrices: &[MatrixShape],
    output: Output,
    form: InputForm,
) -> Option<Tiling> {
    let InputForm::Plain(layout) = form else {
        return None;
    };
    if !are_nvfp4(matrices) {
        return None;
    }
    if hardware.deterministic {
        let kernel = TileKernel::deterministic(hardware.arch);
        return Tiling::choose(hardware, kernel, m, matrices, output, layout, false);
    }
    if !hardware.tiles_serve(m) || (output.applied().is_some() && m > TILED) {
        return None;
    }
    let kernel = TileKernel::serving(hardware.arch, m, layout);
    let divides = m > HALF_SM_ROWS;
    Tiling::choose(hardware, kernel, m, matrices, output, layout, divides)
}

/// Launches for matrices of any types, as few as their types allow.
fn parts(
    hardware: &Hardware,
    m: usize,
    matrices: &[MatrixShape],
    output: Output,
    form: InputForm,
) -> Option<[Option<GemmPart>; MATRICES]> {
    if form != InputForm::Plain(Layout::RowMajor) || output.applied().is_some() {
        return None;
    }
    // Kernels for NVFP4 take few rows without a copy of the weights, but take no others with them.
    let copies_nvfp4 = m > TILED || are_nvfp4(matrices);
    let by_cublas = |w: &MatrixShape| {
        hardware.cublas
            && match w.storage {
                WeightType::Nvfp4 => copies_nvfp4,
                WeightType::F16 | WeightType::BF16 => m > SKINNY_ROWS,
                // Sums of codes do not fit f16, and an addition would lack their scale.
                WeightType::Int8 => m > int8::PRODUCT_ROWS && output == Output::F32,
                WeightType::F32 => false,
            }
    };
    let of_one_type = |a: &MatrixShape, b: &MatrixShape| a.storage == b.storage && !by_cublas(a);
    let mut parts = [None; MATRICES];
    let of_types = matrices.chunk_by(of_one_type);
    for (i, (slot, matrices)) in parts.iter_mut().zip(of_types).enumerate() {
        let kernel = match matrices[0].storage {
            _ if by_cublas(&matrices[0]) => PartKernel::CuBlas,
            WeightType::Nvfp4 => return None,
            WeightType::F32 if m > SKINNY_ROWS && !hardware.deterministic => {
                PartKernel::Tf32(Tf32Product::planned(hardware, matrices, m))
            }
            storage => match DenseKernel::planned(hardware, matrices, m) {
                Some(planned) => PartKernel::Dense(planned),
                None if storage == WeightType::Int8 => {
                    PartKernel::Int8(Int8Product::planned(hardware, matrices, m))
                }
                None => return None,
            },
        };
        let mut part = GemmPart {
            count: matrices.len(),
            kernel,
            beside: false,
        };
        // Parts share their input, so that none needs the one before.
        part.beside = i > 0 && part.can_run_beside();
        *slot = Some(part);
    }
    Some(parts)
}

impl GemmPlan {
    /// Each kernel and the number of parts into which it divides K: plans that agree in these add up a row in the same order.
    pub(crate) fn sums(&self) -> Vec<(String, u32)> {
        match &self.kernels {
            GemmKernels::Skinny(plan) => vec![plan.sums()],
            GemmKernels::Tiled(tiling) => vec![tiling.sums()],
            GemmKernels::Parts(parts) => {
                let each = parts.iter().flatten().map(|part| match &part.kernel {
                    // Both kernels add in the same order.
                    PartKernel::Dense(_) => ("dense".to_owned(), 1),
                    PartKernel::Int8(planned) => ("int8".to_owned(), planned.launch.grid[2]),
                    PartKernel::Tf32(_) => ("tf32".to_owned(), 1),
                    PartKernel::CuBlas => ("cuBLASLt".to_owned(), 1),
                });
                each.collect()
            }
        }
    }
}

impl fmt::Display for GemmPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kernels {
            GemmKernels::Skinny(plan) => write!(f, "{plan}"),
            GemmKernels::Tiled(tiling) => write!(f, "{tiling}"),
            GemmKernels::Parts(parts) => {
                for (i, part) in parts.iter().flatten().enumerate() {
                    f.write_str(if i == 0 { "" } else { "; " })?;
                    match &part.kernel {
                        PartKernel::Dense(planned) => write!(f, "{planned}")?,
                        PartKernel::Int8(planned) => write!(f, "{planned}")?,
                        PartKernel::Tf32(planned) => write!(f, "{planned}")?,
                        PartKernel::CuBlas => f.write_str("cuBLASLt")?,
                    }
                    f.write_str(beside_name(part.beside))?;
                }
                Ok(())
            }
        }
    }
}
