//! LoRA adapters beside projections: `y += scale * B (A x)` for rows of a pass that each have an adapter of their own, or none.

use std::sync::Arc;

use super::driver::{DeviceBuffer, Gpu, Launch, int};
use super::kernel::kernels;
use super::linear::{
    AdaptedRows, AdapterDivision, CHUNK_K, Glu, Layout, Matrix, NextProjections, PARTS, RANK_STEP,
    shared_bytes,
};
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;
use crate::format::nvfp4::BLOCK;
use crate::tensor::WeightType;

kernels! {
    /// Multiplies rows by A factors, by the layout of the rows.
    enum Shrink(ShrinkArguments) {
        Adapter {
            RowMajor = "adapter_shrink",
            FragmentMajor = "adapter_shrink_fragments",
        }
    }

    /// Adds products of B factors to outputs.
    enum Expand(ExpandArguments) {
        Adapter { Rows = "adapter_expand" }
    }

    /// Adds products of B factors to the residual stream, and normalizes it.
    enum ExpandNorm(NormArguments) {
        Adapter { Rows = "adapter_norm" }
    }

    /// Gated linear units of adapted projections, by the type of their outputs.
    enum AdaptedGlu(GluArguments) {
        Adapter {
            F32 = "adapter_glu_f32",
            F16 = "adapter_glu_f16",
        }
    }
}

/// Rows of a tile.
const TILE_ROWS: usize = 16;
/// Elements of K that a CTA of shrink takes at a time, and its threads.
const STEP_K: usize = 512;
const SHRINK_THREADS: u32 = 256;
/// Threads of a CTA of expand, which takes an output feature each.
const EXPAND_THREADS: usize = 128;
/// Threads of a CTA of [`expand_norm`].
const NORM_THREADS: u32 = 512;
/// The longest row that [`expand_norm`] takes.
pub const ADAPTED_NORM: usize = 8192;
/// Most projections that share an input.
const PROJECTIONS: usize = 4;
/// 32-bit words of a tile as kernels read it.
const TILE_WORDS: usize = 20;

/// The factors beside a projection.
#[derive(Clone, Copy)]
pub struct AdapterFactors<'a> {
    /// `[rank, inputs]`.
    pub a: &'a Matrix,
    /// `[outputs, rank]`.
    pub b: &'a Matrix,
    /// Factor of their product.
    pub scale: f32,
}

/// The factors of an adapter for the projections of a model by their numbers, as kernels read them. The factors must outlive it.
#[derive(Debug)]
pub struct AdapterTable {
    entries: DeviceBuffer,
}

impl AdapterTable {
    /// A table with these factors; `None` beside projections that are not adapted.
    pub fn new(gpu: &Arc<Gpu>, all: &[Option<AdapterFactors<'_>>]) -> Result<AdapterTable> {
        let mut words: Vec<u64> = Vec::with_capacity(4 * all.len());
        for factors in all {
            words.extend(match factors {
                None => [0; 4],
                Some(factors) => entry(factors)?,
            });
        }
        Ok(AdapterTable {
            entries: DeviceBuffer::from_slice(gpu, Tag::DeviceWeights, &words)?,
        })
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.entries.bytes()
    }

    /// Its place in memory, by which passes name it.
    pub fn address(&self) -> u64 {
        self.entries.address()
    }
}

/// Factors as words of a table.
fn entry(factors: &AdapterFactors<'_>) -> Result<[u64; 4]> {
    let AdapterFactors { a, b, scale } = *factors;
    let rank = a.rows();
    if b.cols() != rank || !rank.is_multiple_of(RANK_STEP) || !a.cols().is_multiple_of(BLOCK) {
        bail!(
            Internal,
            "factors [{rank}, {}] and [{}, {}]: a rank is a multiple of {RANK_STEP}, and inputs of {BLOCK}",
            a.cols(),
            b.rows(),
            b.cols()
        );
    }
    let pair = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
    Ok([
        a.address(),
        b.address(),
        pair(scale.to_bits(), int("a rank", rank)? as u32),
        pair(kind(a)?, kind(b)?),
    ])
}

/// The number by which kernels know a type.
fn kind(factor: &Matrix) -> Result<u32> {
    match factor.storage() {
        WeightType::F32 => Ok(0),
        WeightType::F16 => Ok(1),
        WeightType::BF16 => Ok(2),
        other => bail!(Internal, "a factor of an adapter in {}", other.name()),
    }
}

/// Rows of a pass, gathered by adapter into tiles.
#[derive(Debug)]
pub struct AdapterTiles {
    words: Vec<u32>,
}

impl AdapterTiles {
    /// Tiles of all rows of a pass; each row has the address of its adapter's table, or 0.
    pub fn of(tables: &[u64]) -> AdapterTiles {
        // The open tile of each adapter: its first word and its number of rows.
        let mut open: Vec<(u64, usize, usize)> = Vec::new();
        let mut words = Vec::new();
        for (row, &table) in tables.iter().enumerate() {
            let at = open.iter().position(|(known, ..)| *known == table);
            let at = at.unwrap_or_else(|| {
                open.push((table, 0, TILE_ROWS));
                open.len() - 1
            });
            let (_, first, count) = &mut open[at];
            if *count == TILE_ROWS {
                (*first, *count) = (words.len(), 0);
                words.extend([table as u32, (table >> 32) as u32]);
                words.resize(*first + TILE_WORDS, 0);
            }
            words[*first + 3 + *count] = row as u32;
            *count += 1;
            words[*first + 2] = *count as u32;
        }
        AdapterTiles { words }
    }

    /// Number of tiles.
    pub fn count(&self) -> usize {
        self.words.len() / TILE_WORDS
    }
}

/// Working memory of adapters in passes of some rows.
#[derive(Debug)]
pub struct AdapterScratch {
    rows: usize,
    width: usize,
    rank: usize,
    tiles: DeviceBuffer,
    low: DeviceBuffer,
    /// A counter of [`AdaptedRows`].
    counter: DeviceBuffer,
    /// Products of [`AdaptedRows`] that CTAs share.
    shared: DeviceBuffer,
}

/// Elements of the products of the A factors of one projection, for a row of `k` elements and ranks up to `rank`.
fn low_stride(k: usize, rank: usize) -> usize {
    // Splits of STEP_K * c elements, for ranks of RANK_STEP * c, have RANK_STEP * c products each; those of [`AdaptedRows`] have `rank`.
    (k / (STEP_K / RANK_STEP) + rank).max(PARTS * rank)
}

impl AdapterScratch {
    /// Memory for passes of `rows` rows through projections of inputs up to `width`, with ranks up to `rank`.
    pub fn new(gpu: &Arc<Gpu>, rows: usize, width: usize, rank: usize) -> Result<AdapterScratch> {
        let scratch = |bytes| DeviceBuffer::uninit(gpu, Tag::DeviceScratch, bytes);
        let pending = vec![u32::MAX; shared_bytes(rank) / 4];
        Ok(AdapterScratch {
            rows,
            width,
            rank,
            tiles: scratch(rows * TILE_WORDS * 4)?,
            low: scratch(PROJECTIONS * rows * low_stride(width, rank) * 4)?,
            counter: DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, 4)?,
            shared: DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, &pending)?,
        })
    }

    /// Whether it has room for such passes.
    pub fn holds(&self, rows: usize, rank: usize) -> bool {
        rows <= self.rows && rank <= self.rank
    }

    /// Enqueues a write of the tiles of a pass, and unused ones up to `count`.
    pub fn write(&mut self, tiles: &AdapterTiles, count: usize) -> Result<()> {
        let mut words = tiles.words.clone();
        words.resize(count.max(tiles.count()) * TILE_WORDS, 0);
        self.tiles.write(0, &words)
    }
}

/// Projections that share an input, by their numbers in an [`AdapterTable`], in a pass of rows with adapters.
#[derive(Clone, Copy)]
pub struct AdaptedGroup<'a> {
    /// Holds the tiles of the pass.
    pub scratch: &'a AdapterScratch,
    /// Tiles that are launched.
    pub tiles: usize,
    /// The largest rank of an adapter, or more; the same for [`shrink`] and what follows it.
    pub rank: usize,
    /// Rows of the pass.
    pub rows: usize,
    /// The number of the first projection. Those after it follow.
    pub first: usize,
    /// Elements of an input row.
    pub k: usize,
}

#[repr(C)]
struct LowArgument {
    values: u64,
    rows: i32,
    stride: i32,
    k: i32,
}

impl AdaptedGroup<'_> {
    /// Refuses what the scratch memory has no room for.
    fn check(&self, projections: usize) -> Result<()> {
        let AdapterScratch { rows, width, .. } = *self.scratch;
        let fits = self.scratch.holds(self.rows, self.rank) && self.k <= width;
        if !fits || self.tiles > rows || projections > PROJECTIONS {
            bail!(
                Internal,
                "{} tiles of {} rows of {} for {projections} projections and a rank of {}; there is room for {rows} rows of {width}",
                self.tiles,
                self.rows,
                self.k,
                self.rank
            );
        }
        Ok(())
    }

    /// The rows for a GEMM of `projections` projections that applies the adapters itself, and that `next` follow.
    pub fn rows(&self, projections: usize, next: NextProjections) -> Result<AdaptedRows<'_>> {
        self.check(projections)?;
        Ok(AdaptedRows {
            tiles: &self.scratch.tiles,
            low: &self.scratch.low,
            counter: &self.scratch.counter,
            shared: &self.scratch.shared,
            division: AdapterDivision {
                tiles: self.tiles,
                rank: self.rank,
            },
            first: self.first,
            next,
        })
    }

    fn low(&self) -> Result<LowArgument> {
        Ok(LowArgument {
            values: self.scratch.low.address(),
            rows: int("rows", self.rows)?,
            stride: int("products", low_stride(self.k, self.rank))?,
            k: int("K", self.k)?,
        })
    }
}

#[repr(C)]
struct ShrinkArguments {
    x: u64,
    tiles: u64,
    low: LowArgument,
    first: i32,
    factor: f32,
}

/// Multiplies rows by the A factors of `projections` projections: f16 `x` `[rows, k]` in `layout`, which were divided by `factor`. It must
/// follow a product with the same `x`, and [`expand`] or [`adapted_glu`] must follow it.
pub fn shrink(
    gpu: &Gpu,
    group: &AdaptedGroup<'_>,
    projections: usize,
    x: &DeviceBuffer,
    layout: Layout,
    factor: f32,
) -> Result<()> {
    group.check(projections)?;
    x.holds("rows", &[layout.elements(group.rows, group.k), 2])?;
    let arguments = ShrinkArguments {
        x: x.address(),
        tiles: group.scratch.tiles.address(),
        low: group.low()?,
        first: int("a projection", group.first)?,
        factor,
    };
    let kernel = match layout {
        Layout::RowMajor => Shrink::RowMajor,
        Layout::FragmentMajor => Shrink::FragmentMajor,
    };
    let splits = group.k.div_ceil(STEP_K) as u32;
    let grid = [splits, projections as u32, group.tiles as u32];
    // SAFETY: sizes were checked; tables of adapters in the pass outlive it in stream order.
    unsafe {
        Launch::new(grid, SHRINK_THREADS)
            .of(kernel)
            .run(gpu, &arguments)
    }
}

/// Outputs of projections that share an input, one after the other in rows.
#[derive(Clone, Copy)]
pub struct AdaptedOutputs<'a> {
    /// f32, or f16 if `is_f16`: `[rows, stride]`.
    pub y: &'a DeviceBuffer,
    /// Elements from a row to the next.
    pub stride: usize,
    /// Whether outputs are f16.
    pub is_f16: bool,
    /// Output features of each projection.
    pub features: &'a [usize],
}

#[repr(C)]
struct ExpandArguments {
    y: u64,
    tiles: u64,
    low: LowArgument,
    first: i32,
    outputs: [i32; PROJECTIONS],
    stride: i32,
    is_f16: i32,
}

/// Adds `scale * B (A x)` to outputs of projections, after [`shrink`].
pub fn expand(gpu: &Gpu, group: &AdaptedGroup<'_>, outputs: &AdaptedOutputs<'_>) -> Result<()> {
    let AdaptedOutputs {
        y,
        stride,
        is_f16,
        features,
    } = *outputs;
    group.check(features.len())?;
    let width: usize = features.iter().sum();
    let bytes = if is_f16 { 2 } else { 4 };
    y.holds("outputs", &[(group.rows - 1) * stride + width, bytes])?;
    let mut outputs = [0; PROJECTIONS];
    for (to, &count) in outputs.iter_mut().zip(features) {
        *to = int("output features", count)?;
    }
    let arguments = ExpandArguments {
        y: y.address(),
        tiles: group.scratch.tiles.address(),
        low: group.low()?,
        first: int("a projection", group.first)?,
        outputs,
        stride: int("the width of outputs", stride)?,
        is_f16: is_f16.into(),
    };
    let blocks = features.iter().map(|count| count.div_ceil(EXPAND_THREADS));
    let grid = [blocks.sum::<usize>() as u32, group.tiles as u32, 1];
    // SAFETY: as above.
    unsafe {
        Launch::new(grid, EXPAND_THREADS as u32)
            .of(Expand::Rows)
            .run(gpu, &arguments)
    }
}

#[repr(C)]
struct NormArguments {
    x: u64,
    weight: u64,
    y: u64,
    tiles: u64,
    low: LowArgument,
    first: i32,
    width: i32,
    eps: f32,
    fragment_major: i32,
}

/// Adds `scale * B (A x)` to the residual stream, f32 `[rows, width]`, after [`shrink`], and stores its RMSNorm with this weight, f32
/// `[width]`, and epsilon, as f16 rows `y` in `layout`. The tiles must be those of all rows, which have up to [`ADAPTED_NORM`] elements.
pub fn expand_norm(
    gpu: &Gpu,
    group: &AdaptedGroup<'_>,
    residual: &DeviceBuffer,
    width: usize,
    (weight, eps): (&DeviceBuffer, f32),
    y: &DeviceBuffer,
    layout: Layout,
) -> Result<()> {
    group.check(1)?;
    residual.holds("rows", &[group.rows, width, 4])?;
    weight.holds("a norm", &[width, 4])?;
    y.holds("normalised rows", &[layout.elements(group.rows, width), 2])?;
    if width > ADAPTED_NORM {
        bail!(
            Internal,
            "a residual stream of {width}; adapters normalize rows of up to {ADAPTED_NORM}"
        );
    }
    let arguments = NormArguments {
        x: residual.address(),
        weight: weight.address(),
        y: y.address(),
        tiles: group.scratch.tiles.address(),
        low: group.low()?,
        first: int("a projection", group.first)?,
        width: int("the hidden size", width)?,
        eps,
        fragment_major: (layout == Layout::FragmentMajor).into(),
    };
    // A tile of a pass of fewer rows is no fuller than the pass.
    let rows = group.rows.min(TILE_ROWS) as u32;
    let launch = Launch::new([rows, group.tiles as u32, 1], NORM_THREADS);
    // SAFETY: as above.
    unsafe { launch.of(ExpandNorm::Rows).run(gpu, &arguments) }
}

/// The outputs of gate and up projections.
#[derive(Clone, Copy)]
pub struct AdaptedGateUp<'a> {
    /// f32, or f16 if `is_f16`: `[rows, 2 width]`.
    pub gate_up: &'a DeviceBuffer,
    /// Whether they are f16.
    pub is_f16: bool,
    /// Features of each.
    pub width: usize,
    /// Whether rows whose gate and up are not adapted stay as they are.
    pub others_are_done: bool,
}

#[repr(C)]
struct GluArguments {
    gate_up: u64,
    y: u64,
    tiles: u64,
    low: LowArgument,
    overflow: u64,
    first: i32,
    width: i32,
    scale: f32,
    activation: i32,
    layer: i32,
    fragment_major: i32,
    others_are_done: i32,
}

/// The gated linear unit of gate and up, to which it adds `scale * B (A x)` first, after [`shrink`]: f16 `y` `[rows, width]` in `layout`.
/// The tiles must be those of all rows. `overflow` is a u32 a row and a layer: if a value of a row is not finite, or `y` not in f16, its u32
/// becomes 1 + that layer, unless it is set already.
pub fn adapted_glu(
    gpu: &Gpu,
    group: &AdaptedGroup<'_>,
    glu: Glu,
    inputs: &AdaptedGateUp<'_>,
    (overflow, layer): (&DeviceBuffer, usize),
    y: &DeviceBuffer,
    layout: Layout,
) -> Result<()> {
    let AdaptedGateUp {
        gate_up,
        is_f16,
        width,
        others_are_done,
    } = *inputs;
    group.check(2)?;
    let bytes = if is_f16 { 2 } else { 4 };
    gate_up.holds("gate and up", &[group.rows, 2 * width, bytes])?;
    overflow.holds("the layers that overflowed", &[group.rows, 4])?;
    y.holds("activations", &[layout.elements(group.rows, width), 2])?;
    let arguments = GluArguments {
        gate_up: gate_up.address(),
        y: y.address(),
        tiles: group.scratch.tiles.address(),
        low: group.low()?,
        overflow: overflow.address(),
        first: int("a projection", group.first)?,
        width: int("the intermediate size", width)?,
        scale: glu.factor(),
        activation: glu.activation as i32,
        layer: int("a layer", layer)?,
        fragment_major: (layout == Layout::FragmentMajor).into(),
        others_are_done: others_are_done.into(),
    };
    let padded = match layout {
        Layout::RowMajor => width,
        Layout::FragmentMajor => width.next_multiple_of(CHUNK_K),
    };
    let grid = [
        padded.div_ceil(EXPAND_THREADS) as u32,
        group.tiles as u32,
        1,
    ];
    let kernel = match is_f16 {
        true => AdaptedGlu::F16,
        false => AdaptedGlu::F32,
    };
    // SAFETY: as above.
    unsafe {
        Launch::new(grid, EXPAND_THREADS as u32)
            .of(kernel)
            .run(gpu, &arguments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_hold_every_row_once() {
        let tables: Vec<u64> = (0..70).map(|row| [0, 7 << 33, 9][row % 3]).collect();
        let tiles = AdapterTiles::of(&tables);
        assert_eq!(tiles.count(), 3 * 2);
        let mut rows = Vec::new();
        for tile in tiles.words.chunks_exact(TILE_WORDS) {
            let table = u64::from(tile[1]) << 32 | u64::from(tile[0]);
            for &row in &tile[3..][..tile[2] as usize] {
                assert_eq!(tables[row as usize], table);
                rows.push(row as usize);
            }
        }
        rows.sort_unstable();
        assert_eq!(rows, Vec::from_iter(0..70));
    }

    /// The splits of every rank fit between the products of two rows.
    #[test]
    fn products_of_every_rank_have_room() {
        for k in [16usize, 512, 528, 2560, 9728, 25_600] {
            for rank in (16..=1024).step_by(16) {
                let splits = k.div_ceil(STEP_K * (rank / RANK_STEP));
                assert!(splits * rank <= low_stride(k, rank), "{k}, {rank}");
            }
        }
    }
}
