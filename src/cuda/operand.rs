//! NVFP4 matrices on a device in the order of tensors: operands of W4A4 GEMMs, and the source of weights. Also checks that their scale
//! bytes are block scales.

use std::sync::Arc;

use super::checks::{CheckedCall, NoteArgument, Subject};
use super::driver::{DeviceSlice, Gpu, Launch, int};
use super::kernel::kernels;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::size::product;
use crate::format::nvfp4::{self, BLOCK};
use crate::format::swizzle::ScaleLayout;

kernels! {
    /// Checks block scales.
    enum CheckScales(CheckArguments) {
        CheckScales { Words = "check_scales" }
    }
}

const THREADS: usize = 256;
/// Scales per thread of the check.
const SCALES_IN_WORD: usize = 4;

/// An NVFP4 matrix `[rows, k]` in memory of a device. Its scale bytes must be block scales
/// ([`is_block_scale`](crate::format::nvfp4::is_block_scale)); [`check_scales`] and [`wait_for_scales`] verify that. Any other byte gives a
/// wrong product, and nothing worse.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    pub(super) codes: DeviceSlice<'a>,
    pub(super) scales: DeviceSlice<'a>,
    pub(super) layout: ScaleLayout,
    pub(super) rows: usize,
    pub(super) k: usize,
    pub(super) global: f32,
}

impl<'a> Operand<'a> {
    /// Required alignment, in bytes, of codes and of scales: the size of the pieces that kernels copy.
    pub const ALIGNMENT: [usize; 2] = [16, 4];

    /// A matrix with these codes, scales and global scale. Checks their sizes and places.
    pub fn new(
        codes: impl Into<DeviceSlice<'a>>,
        scales: impl Into<DeviceSlice<'a>>,
        layout: ScaleLayout,
        rows: usize,
        k: usize,
        global: f32,
    ) -> Result<Operand<'a>> {
        let (codes, scales) = (codes.into(), scales.into());
        if k == 0 || !k.is_multiple_of(BLOCK) {
            bail!(
                InvalidArgument,
                "a matrix of [{rows}, {k}]: K must be a positive multiple of {BLOCK}"
            );
        }
        nvfp4::check_global_scale(global)?;
        if !Arc::ptr_eq(codes.gpu(), scales.gpu()) {
            bail!(
                InvalidArgument,
                "codes are on {:?} and their scales on {:?}; they must be on one device",
                codes.gpu(),
                scales.gpu()
            );
        }
        codes.holds("codes", &[rows, k / 2])?;
        scales.holds("scales", &[layout.len(rows, k / BLOCK)?])?;
        for (what, part, align) in [
            ("codes", codes, Self::ALIGNMENT[0]),
            ("scales", scales, Self::ALIGNMENT[1]),
        ] {
            if !part.address().is_multiple_of(align as u64) {
                bail!(
                    InvalidArgument,
                    "{what} are not aligned to the {align} bytes that kernels copy at a time"
                );
            }
        }
        Ok(Operand {
            codes,
            scales,
            layout,
            rows,
            k,
            global,
        })
    }

    /// The device that it is on.
    pub fn gpu(&self) -> &'a Arc<Gpu> {
        self.codes.gpu()
    }

    /// Fails unless it is on this device.
    pub(super) fn require(&self, gpu: &Arc<Gpu>) -> Result<()> {
        if !Arc::ptr_eq(self.gpu(), gpu) {
            bail!(
                InvalidArgument,
                "a matrix of [{}, {}] is on {:?}, and the work is for {gpu:?}: copy it there",
                self.rows,
                self.k,
                self.gpu()
            );
        }
        Ok(())
    }
}

#[repr(C)]
#[derive(Default)]
struct ScalesArgument {
    scales: u64,
    words: u64,
    first: u64,
    row_blocks: u32,
    swizzled: i32,
}

#[repr(C)]
#[derive(Default)]
struct CheckArguments {
    matrices: [ScalesArgument; 2],
    note: NoteArgument,
}

/// Enqueues a check of the scales of two matrices on `gpu` that are about to be multiplied. A later call reports bytes that are no block
/// scale, see [`Gpu::check_calls`]. `name` is for that error, outside of any function of the C interface.
pub fn check_scales(
    gpu: &Arc<Gpu>,
    name: &'static str,
    a: &Operand<'_>,
    b: &Operand<'_>,
) -> Result<()> {
    if a.k != b.k {
        bail!(
            Internal,
            "scales of [{}, {}] and of [{}, {}] in one check",
            a.rows,
            a.k,
            b.rows,
            b.k
        );
    }
    let blocks = a.k / BLOCK;
    let first = product("scales", &[a.rows, blocks])?;
    let call = CheckedCall::begin(gpu, name, Subject::TwoScales { first, blocks })?;
    look(gpu, &[a, b], &call)
}

/// As [`check_scales`], for one matrix.
pub fn check_scales_of(gpu: &Arc<Gpu>, name: &'static str, matrix: &Operand<'_>) -> Result<()> {
    let blocks = matrix.k / BLOCK;
    let call = CheckedCall::begin(gpu, name, Subject::Scales { blocks })?;
    look(gpu, &[matrix], &call)
}

/// Checks the scales of a matrix on `gpu`, for example a weight, and waits for the result.
pub fn wait_for_scales(gpu: &Arc<Gpu>, matrix: &Operand<'_>) -> Result<()> {
    let blocks = matrix.k / BLOCK;
    let call = CheckedCall::to_wait(gpu, Subject::Scales { blocks })?;
    look(gpu, &[matrix], &call)?;
    call.wait()
}

/// Enqueues the check for up to two matrices.
fn look(gpu: &Arc<Gpu>, matrices: &[&Operand<'_>], call: &CheckedCall<'_>) -> Result<()> {
    let mut arguments = CheckArguments {
        note: call.note(),
        ..CheckArguments::default()
    };
    let (mut words, mut scales) = (0usize, 0usize);
    for (argument, matrix) in arguments.matrices.iter_mut().zip(matrices) {
        matrix.require(gpu)?;
        let blocks = matrix.k / BLOCK;
        let all = product("scales", &[matrix.rows, blocks])?;
        // Row-major scales are one long row.
        let (rows, row_blocks) = match matrix.layout {
            ScaleLayout::Linear => (1, all),
            ScaleLayout::Swizzled => (matrix.rows, blocks),
        };
        int("rows", rows)?;
        let of_matrix = product("scales", &[rows, row_blocks.div_ceil(SCALES_IN_WORD)])?;
        *argument = ScalesArgument {
            scales: matrix.scales.address(),
            words: of_matrix as u64,
            first: scales as u64,
            row_blocks: int("block scales", row_blocks)? as u32,
            swizzled: (matrix.layout == ScaleLayout::Swizzled).into(),
        };
        words = words.saturating_add(of_matrix);
        scales = scales.saturating_add(all);
    }
    let blocks = int("blocks of a grid", words.div_ceil(THREADS))? as u32;
    let launch = Launch::new([blocks, 1, 1], THREADS as u32);
    // SAFETY: the matrices have their scales, and the call has its note.
    unsafe { launch.of(CheckScales::Words).run(gpu, &arguments) }
}
