//! Common arguments of the kernels of recurrent layers, gated delta nets and Mamba-2 alike: rows with gaps between them, the segments of a
//! ragged batch, the convolution, the output of norms, and the states of sequences in the blocks of an arena.

use super::driver::{DeviceSlice, Launch, int};
use super::linear::Layout;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::size::product;
use crate::tensor::RecurrentShape;

/// Upper limit of a grid in its second and third dimension.
pub(super) const MOST_BLOCKS: usize = 65_535;
/// Rows of a tile of the convolution.
const TILE_ROWS: usize = 4;
/// Upper limit of the positions that a convolution sees, its own included.
pub(super) const MOST_TAPS: usize = 4;
/// Threads of a CTA.
pub(super) const THREADS: u32 = 128;
/// Warps of a CTA.
pub(super) const WARPS: usize = 4;
/// Threads of a warp.
pub(super) const WARP: usize = 32;
/// Columns of S that a CTA of a recurrence takes.
const COLUMNS: usize = 32;
/// Rows in the ring of such a CTA.
const RING_ROWS: usize = 16;

/// Rows of f32 on the device, `stride` floats apart.
#[derive(Clone, Copy, Debug)]
pub struct StridedRows<'a> {
    /// From the first row on, at a multiple of 16 bytes.
    pub values: DeviceSlice<'a>,
    /// Floats from the beginning of a row to that of the next.
    pub stride: usize,
}

impl StridedRows<'_> {
    /// Fails unless there are `rows` rows of `width`, which can be read in pieces of `piece` floats.
    pub(super) fn check(&self, what: &str, rows: usize, width: usize, piece: usize) -> Result<()> {
        let bytes = 4 * piece as u64;
        if self.stride < width
            || !self.stride.is_multiple_of(piece)
            || !self.values.address().is_multiple_of(bytes)
        {
            bail!(
                Internal,
                "{what}: rows of {width} every {} floats from address {:#x} on; both must be multiples of {piece} floats",
                self.stride,
                self.values.address()
            );
        }
        let before = product(what, &[rows.saturating_sub(1), self.stride])?;
        self.values.holds(what, &[before.saturating_add(width), 4])
    }
}

/// The segments of a batch. Rows `row_starts[s]` to `row_starts[s + 1]` are consecutive tokens of one sequence; a segment without rows
/// copies its state. Block numbers are of [`RecurrentStates`].
#[derive(Clone, Copy, Debug)]
pub struct RecurrentSegments<'a> {
    /// i32 `[count + 1]`, from 0 to the number of rows.
    pub row_starts: DeviceSlice<'a>,
    /// u32 `[count]`: the block with the state before a segment; 0 for a state of zeros.
    pub read: DeviceSlice<'a>,
    /// u32 `[count]`: the block for the state after a segment, which may be the one that the segment reads. No other segment may read or
    /// write it.
    pub write: DeviceSlice<'a>,
    /// Number of segments.
    pub count: usize,
}

/// Where the states of a layer are: in the blocks of an arena, each with [`RecurrentShape::state_floats`] floats of the layer.
#[derive(Clone, Copy, Debug)]
pub struct RecurrentStates {
    /// Address of block 0, which is never read.
    pub arena: u64,
    /// Bytes of a block, over all layers of its group.
    pub block_bytes: usize,
    /// Bytes of a block before the layer.
    pub offset: usize,
}

/// The output of the norm that ends a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecurrentOutput {
    /// Rows of f32.
    F32,
    /// Activations in f16.
    F16(Layout),
}

impl RecurrentOutput {
    /// The kernel of this output, of those for f32, f16 and fragment-major rows.
    pub(super) fn kernel<K>(self, [f32, f16, fragments]: [K; 3]) -> K {
        match self {
            RecurrentOutput::F32 => f32,
            RecurrentOutput::F16(Layout::RowMajor) => f16,
            RecurrentOutput::F16(Layout::FragmentMajor) => fragments,
        }
    }

    /// Elements, and bytes of each, of `rows` rows of `width`.
    pub(super) fn sizes(self, rows: usize, width: usize) -> [usize; 2] {
        match self {
            RecurrentOutput::F32 => [rows * width, 4],
            RecurrentOutput::F16(layout) => [layout.elements(rows, width), 2],
        }
    }
}

/// The notes on rows that f16 cannot hold: a u32 a row, and the layer. If a value of a row does not fit, its u32 becomes 1 + that layer,
/// unless it is set already.
pub type OverflowNotes<'a> = (DeviceSlice<'a>, usize);

/// Where the norm that ends a layer stores its rows.
#[repr(C)]
pub(super) struct TargetArgument {
    y: u64,
    overflow: u64,
    width: i32,
    layer: i32,
}

impl TargetArgument {
    pub(super) fn new(
        output: RecurrentOutput,
        rows: usize,
        width: usize,
        overflow: Option<OverflowNotes<'_>>,
        out: DeviceSlice<'_>,
    ) -> Result<TargetArgument> {
        if let Some((notes, _)) = overflow {
            notes.holds("the layers that overflowed", &[rows, 4])?;
        }
        out.holds("normalised rows", &output.sizes(rows, width))?;
        check_aligned("normalised rows", out)?;
        Ok(TargetArgument {
            y: out.address(),
            overflow: overflow.map_or(0, |(notes, _)| notes.address()),
            width: int("the width of a layer", width)?,
            layer: int("a layer", overflow.map_or(0, |(_, layer)| layer))?,
        })
    }
}

/// The operands of a causal convolution of f32 rows `[rows, channels]`.
pub(super) struct Convolution<'a> {
    pub(super) x: StridedRows<'a>,
    /// `[channels, taps]`, at a multiple of 16 bytes.
    pub(super) weights: DeviceSlice<'a>,
    /// `[channels]`, at a multiple of 16 bytes.
    pub(super) bias: Option<DeviceSlice<'a>>,
    /// `[rows, channels]`, at a multiple of 16 bytes.
    pub(super) y: DeviceSlice<'a>,
    pub(super) channels: usize,
    pub(super) taps: usize,
}

#[repr(C)]
pub(super) struct ConvolutionArgument {
    x: u64,
    x_stride: u64,
    weights: u64,
    bias: u64,
    y: u64,
    segments: SegmentsArgument,
    inputs: StatesArgument,
    taps: i32,
    channels: i32,
}

impl Convolution<'_> {
    /// The argument for `rows` rows in these segments, whose last inputs are kept in `history`.
    pub(super) fn argument(
        &self,
        rows: usize,
        segments: &RecurrentSegments<'_>,
        history: StatesArgument,
    ) -> Result<ConvolutionArgument> {
        let &Convolution {
            x,
            weights,
            bias,
            y,
            channels,
            taps,
        } = self;
        weights.holds("a convolution", &[channels, taps, 4])?;
        check_aligned("weights of a convolution", weights)?;
        if let Some(bias) = bias {
            bias.holds("biases of a convolution", &[channels, 4])?;
            check_aligned("biases of a convolution", bias)?;
        }
        x.check("inputs of a convolution", rows, channels, 4)?;
        y.holds("results of a convolution", &[rows, channels, 4])?;
        check_aligned("results of a convolution", y)?;
        Ok(ConvolutionArgument {
            x: x.values.address(),
            x_stride: x.stride as u64,
            weights: weights.address(),
            bias: bias.map_or(0, |bias| bias.address()),
            y: y.address(),
            segments: segments.argument()?,
            inputs: history,
            taps: int("taps", taps)?,
            channels: int("channels", channels)?,
        })
    }
}

/// The grid of a convolution of `rows` rows, in which a warp takes one of `units` units in each tile of rows; empty without segments.
pub(super) fn tiled_grid(
    rows: usize,
    segments: &RecurrentSegments<'_>,
    units: usize,
) -> Result<[u32; 3]> {
    let tiles = rows / TILE_ROWS + segments.count;
    if tiles > MOST_BLOCKS {
        bail!(
            Internal,
            "{rows} rows in {} segments at once",
            segments.count
        );
    }
    Ok(match segments.count {
        0 => [0; 3],
        _ => [units.div_ceil(WARPS) as u32, tiles as u32, 1],
    })
}

/// The launch of a recurrence over `heads` matrices with `columns` columns, by a kernel for up to `height` rows of them.
pub(super) fn recurrence(
    [columns, heads]: [usize; 2],
    height: usize,
    segments: &RecurrentSegments<'_>,
) -> Launch {
    let grid = [columns.div_ceil(COLUMNS), heads, segments.count].map(|n| n as u32);
    // A row has two vectors that the matrix is multiplied by, some columns of a third, and the gates in four floats.
    Launch {
        shared: (RING_ROWS * (2 * height + COLUMNS + 4) * 4) as u32,
        ..Launch::new(grid, THREADS)
    }
}

impl RecurrentSegments<'_> {
    pub(super) fn argument(&self) -> Result<SegmentsArgument> {
        self.row_starts
            .holds("first rows", &[self.count.saturating_add(1), 4])?;
        self.read.holds("blocks to read", &[self.count, 4])?;
        self.write.holds("blocks to write", &[self.count, 4])?;
        if self.count > MOST_BLOCKS {
            bail!(Internal, "{} segments at once", self.count);
        }
        Ok(SegmentsArgument {
            row_starts: self.row_starts.address(),
            read: self.read.address(),
            write: self.write.address(),
            count: int("segments", self.count)?,
        })
    }
}

impl RecurrentStates {
    /// The matrices of the layer's states.
    pub(super) fn matrices(&self, shape: RecurrentShape) -> Result<StatesArgument> {
        self.argument(shape, 0)
    }

    /// The kept inputs of the layer's convolution.
    pub(super) fn history(&self, shape: RecurrentShape) -> Result<StatesArgument> {
        self.argument(shape, shape.matrix_floats())
    }

    /// The part of the layer after `floats` floats.
    fn argument(&self, shape: RecurrentShape, floats: usize) -> Result<StatesArgument> {
        let end = self.offset.saturating_add(shape.state_floats() * 4);
        if end > self.block_bytes
            || !self.offset.is_multiple_of(16)
            || !self.block_bytes.is_multiple_of(16)
            || !self.arena.is_multiple_of(16)
        {
            bail!(
                Internal,
                "a state of {} floats at byte {} of {}; places must be multiples of 16",
                shape.state_floats(),
                self.offset,
                self.block_bytes
            );
        }
        Ok(StatesArgument {
            base: self.arena + (self.offset + floats * 4) as u64,
            block_bytes: self.block_bytes as u64,
        })
    }
}

/// Fails unless a slice begins at a multiple of 16 bytes.
pub(super) fn check_aligned(what: &str, slice: DeviceSlice<'_>) -> Result<()> {
    match slice.address() % 16 {
        0 => Ok(()),
        past => bail!(Internal, "{what} begin {past} bytes past a multiple of 16"),
    }
}

#[repr(C)]
pub(super) struct SegmentsArgument {
    row_starts: u64,
    read: u64,
    write: u64,
    count: i32,
}

#[repr(C)]
pub(super) struct StatesArgument {
    base: u64,
    block_bytes: u64,
}
