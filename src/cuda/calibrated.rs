//! Calibrated NVFP4 quantization on the device: codes and scales that minimize the error of a GEMM, given all second moments of its inputs.
//! [`crate::format::calibrated`] has the same searches on the CPU; here sums have another order.

use std::sync::Arc;

use super::blas::{Element, Rows, Store};
use super::driver::{DeviceBuffer, Gpu, Launch, int};
use super::kernel::kernels;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;
use crate::base::size::product;
use crate::format::input_moments::{BlockMoments, MOMENTS};
use crate::format::nvfp4::{BLOCK, Nvfp4};
use crate::tensor::product::{GemmForm, Sizes};

kernels! {
    /// The searches, which take each row through a group of blocks.
    enum Search(GroupArguments) {
        Calibrated {
            RoundInTurn = "calibrated_round_in_turn",
            Descend = "calibrated_descend",
            ByBlocks = "calibrated_by_blocks",
        }
    }

    /// The errors of codes.
    enum Errors(ErrorArguments) {
        Calibrated { Blocks = "calibrated_errors" }
    }

    /// Sums products.
    enum Dot(DotArguments) {
        Calibrated { Sums = "calibrated_dot" }
    }

    /// Prepares second moments.
    enum Prepare(MomentArguments) {
        Moments {
            Blocks = "moments_blocks",
            Complete = "moments_complete",
            Reorder = "moments_reorder",
            FactorSquare = "moments_factor_square",
            FactorRows = "moments_factor_rows",
        }
    }
}

/// Threads of a CTA, one for each row of the matrix; also the columns of a panel of the factorization.
const THREADS: usize = 64;
/// Quantization blocks per group. A group propagates its errors to distant blocks in one GEMM.
const TOGETHER: usize = 8;
/// CTAs of the kernel that sums an error.
const DOT_BLOCKS: usize = 512;
/// Bytes of cuBLASLt's workspace.
const WORKSPACE: usize = 32 << 20;
const F32: usize = size_of::<f32>();

#[repr(C)]
struct GroupArguments {
    weights: u64,
    sums: u64,
    moments: u64,
    factors: u64,
    order: u64,
    codes: u64,
    scales: u64,
    errors: u64,
    rows: i32,
    cols: i32,
    first: i32,
    last: i32,
    global: f32,
}

#[repr(C)]
struct ErrorArguments {
    weights: u64,
    codes: u64,
    scales: u64,
    errors: u64,
    blocks: u64,
    global: f32,
}

#[repr(C)]
struct DotArguments {
    x: u64,
    y: u64,
    sums: u64,
    count: u64,
}

#[repr(C)]
struct MomentArguments {
    values: u64,
    out: u64,
    order: u64,
    cols: i32,
    first: i32,
    width: i32,
    more: f32,
}

/// Weights `[rows, cols]` in f32.
#[derive(Debug)]
pub struct Weights {
    values: DeviceBuffer,
    rows: usize,
    cols: usize,
}

/// Codes `[rows, cols / 2]` and scales `[rows, cols / 16]` of a matrix under a global scale.
#[derive(Debug)]
pub struct Codes {
    codes: DeviceBuffer,
    scales: DeviceBuffer,
    global: f32,
}

/// Second moments of a GEMM's inputs, as the searches read them.
#[derive(Debug)]
pub struct Moments {
    /// `[cols, cols]` in f32, with both halves.
    all: Arc<DeviceBuffer>,
    /// Diagonal blocks of `all`, and their factors: `[cols / 16, 16, 16]` in f32.
    blocks: DeviceBuffer,
    factors: DeviceBuffer,
}

/// The upper triangular factor of reordered second moments `[cols, cols]`.
#[derive(Debug)]
pub struct Factor {
    all: DeviceBuffer,
    /// The order of the blocks: `[cols / 16]` in u32.
    order: DeviceBuffer,
}

impl Weights {
    /// Copies weights `[rows, cols]` to a device.
    pub fn new(gpu: &Arc<Gpu>, values: &[f32], cols: usize) -> Result<Weights> {
        if cols == 0 || !cols.is_multiple_of(BLOCK) || !values.len().is_multiple_of(cols) {
            bail!(
                Internal,
                "{} weights are not rows of {cols}, a multiple of {BLOCK}",
                values.len()
            );
        }
        Ok(Weights {
            values: DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, values)?,
            rows: values.len() / cols,
            cols,
        })
    }

    fn gpu(&self) -> &Arc<Gpu> {
        self.values.gpu()
    }

    /// Number of CTAs, whose threads have one row each.
    fn row_blocks(&self) -> Result<u32> {
        Ok(int("rows of a matrix", self.rows.div_ceil(THREADS))? as u32)
    }

    /// Allocates codes and scales for these weights.
    fn codes(&self, global: f32) -> Result<Codes> {
        let room = |bytes| DeviceBuffer::uninit(self.gpu(), Tag::DeviceScratch, bytes);
        Ok(Codes {
            codes: room(self.rows * self.cols / 2)?,
            scales: room(self.rows * self.cols / BLOCK)?,
            global,
        })
    }

    /// Allocates one f32 per weight, for rows of `cols` weights.
    fn room(&self, cols: usize) -> Result<DeviceBuffer> {
        let bytes = product("a product", &[self.rows, cols, F32])?;
        DeviceBuffer::uninit(self.gpu(), Tag::DeviceScratch, bytes)
    }
}

impl Codes {
    /// Copies the codes and scales of a matrix to a device.
    pub fn upload(gpu: &Arc<Gpu>, matrix: &Nvfp4) -> Result<Codes> {
        let upload = |bytes: &[u8]| DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, bytes);
        Ok(Codes {
            codes: upload(&matrix.codes)?,
            scales: upload(&matrix.scales)?,
            global: matrix.global,
        })
    }

    /// Copies codes and scales to the host; waits for the device.
    pub fn read(&self, codes: &mut [u8], scales: &mut [u8]) -> Result<()> {
        self.codes.read(0, codes)?;
        self.scales.read(0, scales)
    }
}

/// Runs a kernel on second moments.
fn on_moments(
    gpu: &Gpu,
    kernel: Prepare,
    grid: [usize; 2],
    threads: usize,
    arguments: &MomentArguments,
) -> Result<()> {
    let launch = Launch::new(
        [
            int("blocks of a grid", grid[0])? as u32,
            int("blocks of a grid", grid[1])? as u32,
            1,
        ],
        threads as u32,
    );
    // SAFETY: the callers hold buffers of these sizes until it has run.
    unsafe { launch.of(kernel).run(gpu, arguments) }
}

/// The diagonal blocks of f32 `values` `[cols, cols]`, whose lower triangle is not valid.
pub fn diagonal_blocks(values: &DeviceBuffer, cols: usize) -> Result<Vec<BlockMoments>> {
    values.holds("second moments", &[cols, cols, F32])?;
    let gpu = values.gpu();
    let blocks = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, cols * BLOCK * F32)?;
    let arguments = MomentArguments::new(values, &blocks, cols)?;
    let grid = [cols / BLOCK, 1];
    on_moments(gpu, Prepare::Blocks, grid, MOMENTS, &arguments)?;
    let mut read = vec![[0f32; MOMENTS]; cols / BLOCK];
    blocks.read(0, read.as_flattened_mut())?;
    Ok(read)
}

impl MomentArguments {
    fn new(values: &DeviceBuffer, out: &DeviceBuffer, cols: usize) -> Result<MomentArguments> {
        Ok(MomentArguments {
            values: values.address(),
            out: out.address(),
            order: 0,
            cols: int("inputs", cols)?,
            first: 0,
            width: 0,
            more: 0.0,
        })
    }
}

/// Mirrors the upper triangle of f32 `values` `[cols, cols]` to the lower one, and adds `more` to the diagonal.
pub fn complete(values: &DeviceBuffer, cols: usize, more: f32) -> Result<()> {
    values.holds("second moments", &[cols, cols, F32])?;
    let arguments = MomentArguments {
        more,
        ..MomentArguments::new(values, values, cols)?
    };
    let grid = [cols / BLOCK; 2];
    on_moments(
        values.gpu(),
        Prepare::Complete,
        grid,
        BLOCK * BLOCK,
        &arguments,
    )
}

impl Moments {
    /// Takes complete, damped moments f32 `[cols, cols]`, and computes the diagonal blocks and their factors.
    pub fn new(
        all: Arc<DeviceBuffer>,
        cols: usize,
        blocks: &[BlockMoments],
        factors: &[BlockMoments],
    ) -> Result<Moments> {
        all.holds("second moments", &[cols, cols, F32])?;
        let gpu = all.gpu();
        let upload = |of: &[BlockMoments]| -> Result<DeviceBuffer> {
            let buffer = DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, of.as_flattened())?;
            buffer.holds("moments of blocks", &[cols, BLOCK, F32])?;
            Ok(buffer)
        };
        Ok(Moments {
            blocks: upload(blocks)?,
            factors: upload(factors)?,
            all,
        })
    }

    /// Factorizes the moments with their blocks in this order. `None` if they are not positive definite.
    pub fn factor(&self, cols: usize, order: &[u32]) -> Result<Option<Factor>> {
        self.all.holds("second moments", &[cols, cols, F32])?;
        if order.len() * BLOCK != cols || order.iter().any(|b| *b as usize >= order.len()) {
            bail!(Internal, "{} blocks of {cols} inputs", order.len());
        }
        let gpu = self.all.gpu();
        let order = DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, order)?;
        let all = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, self.all.bytes())?;
        let failed = DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, F32)?;
        let panel = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, cols * THREADS * F32)?;
        let arguments = MomentArguments {
            order: order.address(),
            ..MomentArguments::new(&self.all, &all, cols)?
        };
        let grid = [cols / BLOCK; 2];
        on_moments(gpu, Prepare::Reorder, grid, BLOCK * BLOCK, &arguments)?;
        let products = Products::new(gpu)?;
        for first in (0..cols).step_by(THREADS).rev() {
            let width = THREADS.min(cols - first);
            let of_panel = |out: &DeviceBuffer| -> Result<MomentArguments> {
                Ok(MomentArguments {
                    first: int("inputs", first)?,
                    width: width as i32,
                    ..MomentArguments::new(&all, out, cols)?
                })
            };
            let arguments = of_panel(&failed)?;
            on_moments(gpu, Prepare::FactorSquare, [1, 1], THREADS, &arguments)?;
            let above = [first.div_ceil(THREADS), 1];
            let arguments = of_panel(&panel)?;
            on_moments(gpu, Prepare::FactorRows, above, THREADS, &arguments)?;
            let sizes = Sizes::mnk(first, first, width);
            let rows = Rows {
                address: panel.address(),
                stride: width,
            };
            let left = Rows {
                address: all.address(),
                stride: cols,
            };
            products.add(GemmForm::NT, sizes, -1.0, [rows, rows], left)?;
        }
        let mut has_failed = [0f32];
        failed.read(0, &mut has_failed)?;
        Ok((has_failed[0] == 0.0).then_some(Factor { all, order }))
    }

    /// Chooses for each block the scale that is best for its own product, with each weight at its nearest code.
    pub fn by_blocks(&self, weights: &Weights, global: f32) -> Result<Codes> {
        let codes = weights.codes(global)?;
        self.blocks
            .holds("moments of blocks", &[weights.cols, BLOCK, F32])?;
        let arguments = GroupArguments {
            moments: self.blocks.address(),
            ..GroupArguments::new(weights, &codes)?
        };
        let blocks = int("blocks of a row", weights.cols / BLOCK)? as u32;
        let launch = Launch::new([weights.row_blocks()?, blocks, 1], THREADS as u32);
        // SAFETY: sizes were checked.
        unsafe {
            launch.of(Search::ByBlocks).run(weights.gpu(), &arguments)?;
        }
        Ok(codes)
    }

    /// Block coordinate descent: in each pass, each block takes the scale and codes with the least error while all other blocks stay fixed.
    pub fn descend(&self, weights: &Weights, passes: usize, codes: &Codes) -> Result<()> {
        let Weights { cols, rows, .. } = *weights;
        self.all.holds("second moments", &[cols, cols, F32])?;
        let products = Products::new(weights.gpu())?;
        // M e for each row.
        let gradients = products.of_errors(weights, Some(codes), &self.all)?.1;
        let changes = weights.room(TOGETHER * BLOCK)?;
        let blocks = cols / BLOCK;
        for first in (0..passes).flat_map(|_| (0..blocks).step_by(TOGETHER)) {
            let last = (first + TOGETHER).min(blocks);
            let arguments = GroupArguments {
                sums: gradients.address(),
                moments: self.all.address(),
                factors: self.factors.address(),
                errors: changes.address(),
                first: first as i32,
                last: last as i32,
                ..GroupArguments::new(weights, codes)?
            };
            weights.run(Search::Descend, &arguments)?;
            let sizes = Sizes::mnk(rows, cols, (last - first) * BLOCK);
            let moments = Rows {
                address: self.all.address() + (first * BLOCK * cols * F32) as u64,
                stride: cols,
            };
            let out = Rows {
                address: gradients.address(),
                stride: cols,
            };
            products.add(GemmForm::NN, sizes, 1.0, [group_of(&changes), moments], out)?;
        }
        Ok(())
    }
}

impl Factor {
    /// Quantizes block after block in the factor's order. Each weight takes the code that compensates for the errors before it in its row.
    pub fn round_in_turn(&self, weights: &Weights, global: f32) -> Result<Codes> {
        let Weights { cols, rows, .. } = *weights;
        self.all
            .holds("a factor of second moments", &[cols, cols, F32])?;
        let codes = weights.codes(global)?;
        let products = Products::new(weights.gpu())?;
        let sums = weights.room(cols)?;
        sums.clear(sums.bytes())?;
        let errors = weights.room(TOGETHER * BLOCK)?;
        let blocks = cols / BLOCK;
        for first in (0..blocks).step_by(TOGETHER) {
            let last = (first + TOGETHER).min(blocks);
            let arguments = GroupArguments {
                sums: sums.address(),
                moments: self.all.address(),
                order: self.order.address(),
                errors: errors.address(),
                first: first as i32,
                last: last as i32,
                ..GroupArguments::new(weights, &codes)?
            };
            weights.run(Search::RoundInTurn, &arguments)?;
            let done = last * BLOCK;
            let sizes = Sizes::mnk(rows, cols - done, (last - first) * BLOCK);
            let later = Rows {
                address: self.all.address() + ((first * BLOCK * cols + done) * F32) as u64,
                stride: cols,
            };
            let out = Rows {
                address: sums.address() + (done * F32) as u64,
                stride: cols,
            };
            products.add(GemmForm::NN, sizes, 1.0, [group_of(&errors), later], out)?;
        }
        Ok(codes)
    }
}

/// The errors of a group, as rows.
fn group_of(errors: &DeviceBuffer) -> Rows {
    Rows {
        address: errors.address(),
        stride: TOGETHER * BLOCK,
    }
}

impl GroupArguments {
    fn new(weights: &Weights, codes: &Codes) -> Result<GroupArguments> {
        codes
            .codes
            .holds("codes", &[weights.rows, weights.cols / 2])?;
        codes
            .scales
            .holds("scales", &[weights.rows, weights.cols / BLOCK])?;
        Ok(GroupArguments {
            weights: weights.values.address(),
            sums: 0,
            moments: 0,
            factors: 0,
            order: 0,
            codes: codes.codes.address(),
            scales: codes.scales.address(),
            errors: 0,
            rows: int("rows of a matrix", weights.rows)?,
            cols: int("inputs", weights.cols)?,
            first: 0,
            last: 0,
            global: codes.global,
        })
    }
}

impl Weights {
    /// Runs a kernel that takes each row through one group of blocks.
    fn run(&self, kernel: Search, arguments: &GroupArguments) -> Result<()> {
        let launch = Launch::new([self.row_blocks()?, 1, 1], THREADS as u32);
        // SAFETY: the callers checked sizes.
        unsafe { launch.of(kernel).run(self.gpu(), arguments) }
    }
}

/// GEMMs in f32 by cuBLASLt, with a workspace.
struct Products<'a> {
    gpu: &'a Arc<Gpu>,
    workspace: DeviceBuffer,
}

impl<'a> Products<'a> {
    fn new(gpu: &'a Arc<Gpu>) -> Result<Products<'a>> {
        Ok(Products {
            gpu,
            workspace: DeviceBuffer::uninit(gpu, Tag::DeviceScratch, WORKSPACE)?,
        })
    }

    /// `out += alpha` times a product.
    fn add(
        &self,
        form: GemmForm,
        sizes: Sizes,
        alpha: f32,
        operands: [Rows; 2],
        out: Rows,
    ) -> Result<()> {
        self.product(form, sizes, alpha, operands, (Store::Add, out))
    }

    fn product(
        &self,
        form: GemmForm,
        sizes: Sizes,
        alpha: f32,
        operands: [Rows; 2],
        (store, out): (Store, Rows),
    ) -> Result<()> {
        if sizes.m * sizes.n * sizes.k == 0 {
            return Ok(());
        }
        self.gpu.need_blas()?.matmul(
            self.gpu,
            Element::F32,
            form,
            sizes,
            alpha,
            operands,
            store,
            out,
            &self.workspace,
        )
    }

    /// The errors `e` of `codes` (of zeros if `None`), and `e M`: both `[rows, cols]`.
    fn of_errors(
        &self,
        weights: &Weights,
        codes: Option<&Codes>,
        moments: &DeviceBuffer,
    ) -> Result<(DeviceBuffer, DeviceBuffer)> {
        let Weights { rows, cols, .. } = *weights;
        moments.holds("second moments", &[cols, cols, F32])?;
        let (errors, products) = (weights.room(cols)?, weights.room(cols)?);
        let blocks = rows * cols / BLOCK;
        if let Some(codes) = codes {
            GroupArguments::new(weights, codes)?;
        }
        let arguments = ErrorArguments {
            weights: weights.values.address(),
            codes: codes.map_or(0, |c| c.codes.address()),
            scales: codes.map_or(0, |c| c.scales.address()),
            errors: errors.address(),
            blocks: blocks as u64,
            global: codes.map_or(0.0, |c| c.global),
        };
        let grid = int("blocks of a matrix", blocks.div_ceil(THREADS))? as u32;
        let launch = Launch::new([grid, 1, 1], THREADS as u32);
        // SAFETY: sizes were checked.
        unsafe { launch.of(Errors::Blocks).run(self.gpu, &arguments)? };
        let sizes = Sizes::mnk(rows, cols, cols);
        let packed = |of: &DeviceBuffer| Rows {
            address: of.address(),
            stride: cols,
        };
        let (operands, out) = ([packed(&errors), packed(moments)], packed(&products));
        self.product(GemmForm::NN, sizes, 1.0, operands, (Store::F32, out))?;
        Ok((errors, products))
    }
}

/// The sum over rows of `e^T M e`, with `e` the error of `codes` (of zeros if `None`) and M complete f32 moments `[cols, cols]`. Waits for
/// the device.
pub fn product_error(
    weights: &Weights,
    codes: Option<&Codes>,
    moments: &DeviceBuffer,
) -> Result<f64> {
    let gpu = weights.gpu();
    let (errors, products) = Products::new(gpu)?.of_errors(weights, codes, moments)?;
    let sums = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, DOT_BLOCKS * size_of::<f64>())?;
    let arguments = DotArguments {
        x: errors.address(),
        y: products.address(),
        sums: sums.address(),
        count: (weights.rows * weights.cols) as u64,
    };
    let launch = Launch::new([DOT_BLOCKS as u32, 1, 1], THREADS as u32);
    // SAFETY: the buffers have these sizes.
    unsafe { launch.of(Dot::Sums).run(gpu, &arguments)? };
    let mut read = vec![0u64; DOT_BLOCKS];
    sums.read(0, &mut read)?;
    Ok(read.into_iter().map(f64::from_bits).sum())
}
