//! NVFP4 matrices that stand on a device in the order of tensors: what products of two of them take, and what weights are made
//! of there. And the check that their scales are scales.

use std::sync::Arc;

use super::copy::Event;
use super::gpu::{Gpu, int};
use super::launch::Launch;
use super::memory::{DeviceSlice, Pinned};
use super::nvrtc::Unit;
use super::staging::{keep, take};
use crate::base::Result;
use crate::base::error::bail;
use crate::base::size::product;
use crate::format::nvfp4::{self, BLOCK};
use crate::format::swizzle::ScaleLayout;

/// What the kernels of this file are passed, by the start of their names.
pub(super) const ARGUMENTS: &[(&str, usize)] = &[("check_scales", size_of::<CheckArguments>())];

const THREADS: usize = 256;

/// An NVFP4 matrix `[rows, k]` on a device, by parts that stand there. Its scale bytes are block scales, which a [`ScaleCheck`]
/// finds out; another gives a wrong product, and nothing worse.
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
    /// What addresses of codes and of scales must be multiples of: kernels copy pieces of so many bytes.
    pub const ALIGNMENT: [usize; 2] = [16, 4];

    /// The matrix with these codes, scales and global scale, once their sizes and places are checked.
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

    /// Its device.
    pub fn gpu(&self) -> &'a Arc<Gpu> {
        self.codes.gpu()
    }

    /// Refuses to be used on another device.
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
struct CheckArguments {
    scales: u64,
    found: u64,
    words: u64,
    row_blocks: u32,
    swizzled: i32,
}

/// A look at the scales of matrices for bytes that are none ([`nvfp4::is_block_scale`]), on its way. The device tells the host of what it finds, and who
/// waits for that waits for nothing that is enqueued afterwards.
pub struct ScaleCheck {
    gpu: Arc<Gpu>,
    /// Given back when nothing enqueued writes it any more.
    found: Option<Pinned>,
    looked: Option<Event>,
}

impl ScaleCheck {
    /// Enqueues it for matrices on `gpu`.
    pub fn start(gpu: &Arc<Gpu>, matrices: &[Operand<'_>]) -> Result<ScaleCheck> {
        let mut found = take(gpu, 4)?;
        found.bytes_mut()[..4].fill(0);
        let address = found.address();
        let mut check = ScaleCheck {
            gpu: gpu.clone(),
            found: Some(found),
            looked: None,
        };
        for matrix in matrices {
            matrix.require(gpu)?;
            let blocks = matrix.k / BLOCK;
            // Row-major ones are one long row.
            let (rows, row_blocks) = match matrix.layout {
                ScaleLayout::Linear => (1, product("scales", &[matrix.rows, blocks])?),
                ScaleLayout::Swizzled => (matrix.rows, blocks),
            };
            int("rows", rows)?;
            let words = product("scales", &[rows, row_blocks.div_ceil(4)])?;
            let arguments = CheckArguments {
                scales: matrix.scales.address(),
                found: address,
                words: words as u64,
                row_blocks: int("block scales", row_blocks)? as u32,
                swizzled: (matrix.layout == ScaleLayout::Swizzled).into(),
            };
            let blocks = int("blocks of a grid", words.div_ceil(THREADS))? as u32;
            let launch = Launch::new([blocks, 1, 1], THREADS as u32);
            // SAFETY: the struct is the kernel's; the matrix has its scales, and `drop` keeps the report until all is done.
            unsafe { launch.run(gpu, Unit::CheckScales, "check_scales", &arguments)? };
        }
        check.looked = Some(Event::record(gpu)?);
        Ok(check)
    }

    /// Waits until it is done. Whether every scale is one.
    pub fn wait(mut self) -> Result<bool> {
        if let Some(looked) = self.looked.take() {
            looked.wait()?;
        }
        let Some(found) = self.found.take() else {
            return Ok(true);
        };
        let good = found.read_i32(0) == Some(0);
        keep(&self.gpu, found);
        Ok(good)
    }
}

impl Drop for ScaleCheck {
    fn drop(&mut self) {
        let Some(found) = self.found.take() else {
            return;
        };
        match self.gpu.synchronize() {
            Ok(()) => keep(&self.gpu, found),
            // The device may still write it.
            Err(_) => std::mem::forget(found),
        }
    }
}
