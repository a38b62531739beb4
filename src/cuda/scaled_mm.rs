//! W4A4: products of two NVFP4 matrices, exact but for f32 sums in a fixed order and the rounding of the result. By an own
//! kernel, or by the library over bounded 16-bit copies of both operands: what a code and its scale stand for is exact in f16
//! and in bf16.

use std::sync::Arc;

use super::blas::{Element, Store};
use super::driver::{DeviceBuffer, DeviceSlice, Gpu, Launch, int};
use super::linear::WORKSPACE;
use super::operand::Operand;
use super::units::Unit;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;
use crate::base::size::product;
use crate::format::swizzle::ScaleLayout;
use crate::tensor::DType;

/// What the kernels of this file are passed, by the start of their names.
pub(super) const ARGUMENTS: &[(&str, usize)] = &[
    ("scaled_mm_", size_of::<ProductArguments>()),
    ("scaled_mm_dequantize_", size_of::<DequantizeArguments>()),
];

/// What a block of the own kernel makes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tile {
    /// 16 by 32, its warps sharing K: for few rows.
    Small,
    /// 64 by 64.
    Medium,
    /// 128 by 128.
    Large,
}

impl Tile {
    /// Every tile.
    pub const ALL: [Tile; 3] = [Tile::Small, Tile::Medium, Tile::Large];

    /// Rows of both operands.
    const fn size(self) -> (usize, usize) {
        match self {
            Tile::Small => (16, 32),
            Tile::Medium => (64, 64),
            Tile::Large => (128, 128),
        }
    }

    /// Threads of a block, and the bytes of shared memory that it asks for.
    pub const fn block(self) -> (u32, u32) {
        match self {
            Tile::Small => (256, 69_120),
            Tile::Medium => (512, 73_728),
            Tile::Large => (128, 46_080),
        }
    }

    /// Its kernel, for K that is a multiple of 64.
    pub const fn kernel(self) -> &'static str {
        match self {
            Tile::Small => "scaled_mm_16x32",
            Tile::Medium => "scaled_mm_64x64",
            Tile::Large => "scaled_mm_128x128",
        }
    }
}

/// How a product is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// By the own kernel: on architectures that multiply e2m1 codes these as they are, elsewhere decoded on the way.
    Kernel(Tile),
    /// By the library, over 16-bit copies.
    Library,
}

/// The first architecture whose warps multiply e2m1 codes.
const MULTIPLIES_CODES: (i32, i32) = (12, 0);
/// Rows of both operands from which the library is faster than decoding on the way, copies included.
const LIBRARY_ROWS: usize = 128;

impl Way {
    /// The way for `[m, k]` times `[n, k]` on a device of this architecture with this many multiprocessors, and the library if
    /// `library` says so.
    pub fn choose(
        m: usize,
        n: usize,
        arch: (i32, i32),
        multiprocessors: usize,
        library: bool,
    ) -> Way {
        if library && arch < MULTIPLIES_CODES && m.min(n) >= LIBRARY_ROWS {
            return Way::Library;
        }
        let tiles = |tile: Tile| {
            let (rows, columns) = tile.size();
            m.div_ceil(rows) * n.div_ceil(columns)
        };
        // The larger a tile, the less it reads, once there are enough of them.
        Way::Kernel(if m <= Tile::Small.size().0 {
            Tile::Small
        } else if m > Tile::Medium.size().0 && tiles(Tile::Large) >= multiprocessors {
            Tile::Large
        } else if 2 * tiles(Tile::Medium) >= multiprocessors {
            Tile::Medium
        } else {
            Tile::Small
        })
    }
}

/// `a` `[m, k]` times `b` `[n, k]` transposed, into `out` `[m, n]` of `dtype`: f32, f16 or bf16.
pub fn scaled_mm<'a>(
    gpu: &Arc<Gpu>,
    a: &Operand<'_>,
    b: &Operand<'_>,
    dtype: DType,
    out: impl Into<DeviceSlice<'a>>,
) -> Result<()> {
    let library = library_factor(a.global, b.global).is_some() && gpu.blas().is_some();
    let way = Way::choose(a.rows, b.rows, gpu.arch(), gpu.multiprocessors(), library);
    scaled_mm_by(gpu, a, b, dtype, out, way)
}

/// The same in a way of the caller's.
pub fn scaled_mm_by<'a>(
    gpu: &Arc<Gpu>,
    a: &Operand<'_>,
    b: &Operand<'_>,
    dtype: DType,
    out: impl Into<DeviceSlice<'a>>,
    way: Way,
) -> Result<()> {
    if a.k != b.k {
        bail!(
            InvalidArgument,
            "scaled_mm of [{}, {}] and [{}, {}]: K must be equal",
            a.rows,
            a.k,
            b.rows,
            b.k
        );
    }
    let (store, out) = (store(dtype)?, out.into());
    a.require(gpu)?;
    b.require(gpu)?;
    if !Arc::ptr_eq(out.gpu(), gpu) {
        bail!(
            InvalidArgument,
            "the result would be on {:?}, and the product is made by {gpu:?}",
            out.gpu()
        );
    }
    out.holds("a product", &[a.rows, b.rows, dtype.bytes()])?;
    if a.rows == 0 || b.rows == 0 {
        return Ok(());
    }
    match way {
        Way::Kernel(tile) => by_kernel(gpu, a, b, store, out, tile),
        Way::Library => by_library(gpu, a, b, store, out),
    }
}

fn store(dtype: DType) -> Result<Store> {
    Ok(match dtype {
        DType::F32 => Store::F32,
        DType::F16 => Store::F16,
        DType::BF16 => Store::Bf16,
        _ => bail!(
            Unsupported,
            "a product on a GPU in {}; there are float32, float16 and bfloat16",
            dtype.name()
        ),
    })
}

/// What a product is multiplied by, one factor after the other: the second is 1 unless the two in one would leave the range of
/// normal numbers.
fn factors(a: f32, b: f32) -> (f32, f32) {
    let both = a * b;
    if both.is_normal() {
        (both, 1.0)
    } else {
        (a, b)
    }
}

/// The one factor that the library multiplies by, for its copies; nothing if that is no ordinary number.
fn library_factor(a: f32, b: f32) -> Option<f32> {
    let factor = a * b * DEQUANTIZED_FACTOR;
    ((a * b).is_normal() && factor.is_finite()).then_some(factor)
}

#[repr(C)]
struct OperandArgument {
    codes: u64,
    scales: u64,
    rows: i32,
    swizzled: i32,
}

impl OperandArgument {
    fn new(operand: &Operand<'_>) -> Result<OperandArgument> {
        Ok(OperandArgument {
            codes: operand.codes.address(),
            scales: operand.scales.address(),
            rows: int("rows", operand.rows)?,
            swizzled: (operand.layout == ScaleLayout::Swizzled).into(),
        })
    }
}

#[repr(C)]
struct ProductArguments {
    a: OperandArgument,
    b: OperandArgument,
    out: u64,
    factors: [f32; 2],
    k: i32,
    output: i32,
}

/// Elements of K of which codes and scales are whole pieces to copy.
const WHOLE: usize = 64;

fn by_kernel(
    gpu: &Arc<Gpu>,
    a: &Operand<'_>,
    b: &Operand<'_>,
    store: Store,
    out: DeviceSlice<'_>,
    tile: Tile,
) -> Result<()> {
    let (rows, columns) = tile.size();
    let (across, down) = (a.rows.div_ceil(rows), b.rows.div_ceil(columns));
    // The second dimension of a grid ends there.
    if down > 65_535 {
        bail!(
            Unsupported,
            "{} rows of the second operand; this kernel takes {}",
            b.rows,
            65_535 * columns
        );
    }
    let (first, second) = factors(a.global, b.global);
    let arguments = ProductArguments {
        a: OperandArgument::new(a)?,
        b: OperandArgument::new(b)?,
        out: out.address(),
        factors: [first, second],
        k: int("K", a.k)?,
        output: match store {
            Store::F32 => 0,
            Store::F16 => 1,
            Store::Bf16 => 2,
            Store::Add | Store::AddBf16 => {
                bail!(Internal, "W4A4 products are not added to anything")
            }
        },
    };
    let ragged = if a.k.is_multiple_of(WHOLE) {
        ""
    } else {
        "_ragged"
    };
    let (threads, shared) = tile.block();
    let launch = Launch {
        shared,
        ..Launch::new([across as u32, down as u32, 1], threads)
    };
    let name = [tile.kernel(), ragged].concat();
    // SAFETY: the struct is the kernel's; `Operand` and the caller checked sizes, and buffers outlive work on their stream.
    unsafe { launch.run(gpu, Unit::ScaledMmProduct, &name, &arguments) }
}

#[repr(C)]
#[derive(Default)]
struct RowSlice {
    codes: u64,
    scales: u64,
    out: u64,
    first_row: i32,
    rows: i32,
    swizzled: i32,
}

#[repr(C)]
struct DequantizeArguments {
    slices: [RowSlice; 2],
    k: i32,
}

/// Bytes of the 16-bit copy of one operand, or of as many of its rows as that is.
const COPY: usize = 128 << 20;
/// Rows of a copy are a multiple of this, so that results of parts begin where the library wants them.
const COPY_ROWS: usize = 128;
/// What is left of the powers of two in the copies' values, which are times 2^-8 each.
const DEQUANTIZED_FACTOR: f32 = 65_536.0;
/// Threads of a block of the dequantization kernel, and rows and codes of a thread.
const DEQUANTIZE_THREADS: u32 = 256;
const DEQUANTIZED_ROWS: usize = 4;
const DEQUANTIZED_CODES: usize = 8;

/// Dequantizes rows of each operand: its first row, the number of rows, which may be 0, and their destination.
fn dequantize(
    gpu: &Gpu,
    slices: [(&Operand<'_>, usize, usize, u64); 2],
    element: Element,
) -> Result<()> {
    let k = slices[0].0.k;
    let mut arguments = DequantizeArguments {
        slices: Default::default(),
        k: int("K", k)?,
    };
    let mut blocks = 0;
    for (argument, (operand, first, rows, out)) in arguments.slices.iter_mut().zip(slices) {
        let whole = OperandArgument::new(operand)?;
        *argument = RowSlice {
            codes: whole.codes,
            scales: whole.scales,
            out,
            first_row: int("rows", first)?,
            rows: int("rows", rows)?,
            swizzled: whole.swizzled,
        };
        blocks += (rows.div_ceil(DEQUANTIZED_ROWS) * (k / DEQUANTIZED_CODES))
            .div_ceil(DEQUANTIZE_THREADS as usize);
    }
    let name = match element {
        Element::F16 => "scaled_mm_dequantize_f16",
        Element::Bf16 => "scaled_mm_dequantize_bf16",
        Element::F32 => bail!(Internal, "operands are dequantized to 16 bits"),
    };
    let launch = Launch::new(
        [int("blocks of a grid", blocks)? as u32, 1, 1],
        DEQUANTIZE_THREADS,
    );
    // SAFETY: the struct is the kernel's; copies have room for the rows, by the caller.
    unsafe { launch.run(gpu, Unit::ScaledMmDequantize, name, &arguments) }
}

fn by_library(
    gpu: &Arc<Gpu>,
    a: &Operand<'_>,
    b: &Operand<'_>,
    store: Store,
    out: DeviceSlice<'_>,
) -> Result<()> {
    let blas = gpu.need_blas()?;
    let Some(factor) = library_factor(a.global, b.global) else {
        bail!(
            Unsupported,
            "global scales {} and {}: their product is out of the library's range",
            a.global,
            b.global
        );
    };
    // The library's results in 16 bits are of operands of the same type.
    let (element, bytes) = match store {
        Store::F16 => (Element::F16, 2),
        Store::Bf16 | Store::AddBf16 => (Element::Bf16, 2),
        Store::F32 | Store::Add => (Element::Bf16, 4),
    };
    let row = product("a row", &[a.k, 2])?;
    let step = (COPY / row / COPY_ROWS).max(1) * COPY_ROWS;
    let (step_a, step_b) = (step.min(a.rows), step.min(b.rows));
    let room =
        |rows| DeviceBuffer::uninit(gpu, Tag::DeviceScratch, product("a copy", &[rows, row])?);
    let (copy_a, copy_b) = (room(step_a)?, room(step_b)?);
    let workspace = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, WORKSPACE)?;
    for first_b in (0..b.rows).step_by(step_b) {
        let rows_b = step_b.min(b.rows - first_b);
        for first_a in (0..a.rows).step_by(step_a) {
            let rows_a = step_a.min(a.rows - first_a);
            // What is there already stays: b for all of a, and a if it fits whole.
            let new_a = if first_b == 0 || step_a < a.rows {
                rows_a
            } else {
                0
            };
            let new_b = if first_a == 0 { rows_b } else { 0 };
            let slices = [
                (a, first_a, new_a, copy_a.address()),
                (b, first_b, new_b, copy_b.address()),
            ];
            dequantize(gpu, slices, element)?;
            blas.product(
                gpu,
                element,
                copy_b.address(),
                rows_b,
                b.k,
                factor,
                copy_a.address(),
                rows_a,
                store,
                out.address() + ((first_a * b.rows + first_b) * bytes) as u64,
                b.rows,
                &workspace,
            )?;
        }
    }
    Ok(())
}

/// `a` `[m, k]` times `b` `[n, k]` transposed by the library, all three matrices dense in `dtype`, f16 or bf16: what products of
/// 4-bit operands are measured against.
pub fn dense_mm(
    gpu: &Arc<Gpu>,
    a: &DeviceBuffer,
    b: &DeviceBuffer,
    (m, n, k): (usize, usize, usize),
    dtype: DType,
    out: &DeviceBuffer,
) -> Result<()> {
    let blas = gpu.need_blas()?;
    for (what, matrix, sizes) in [
        ("a", a, [m, k, 2]),
        ("b", b, [n, k, 2]),
        ("a product", out, [m, n, 2]),
    ] {
        matrix.holds(what, &sizes)?;
    }
    let (element, store) = match dtype {
        DType::F16 => (Element::F16, Store::F16),
        DType::BF16 => (Element::Bf16, Store::Bf16),
        _ => bail!(
            Unsupported,
            "a dense product in {}; there are float16 and bfloat16",
            dtype.name()
        ),
    };
    let workspace = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, WORKSPACE)?;
    blas.product(
        gpu,
        element,
        b.address(),
        n,
        k,
        1.0,
        a.address(),
        m,
        store,
        out.address(),
        n,
        &workspace,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: ((i32, i32), usize) = ((9, 0), 132);

    fn choose(
        m: usize,
        n: usize,
        (arch, multiprocessors): ((i32, i32), usize),
        library: bool,
    ) -> Way {
        Way::choose(m, n, arch, multiprocessors, library)
    }

    #[test]
    fn large_products_go_to_the_library_where_that_is_faster() {
        assert_eq!(choose(4096, 2560, H200, true), Way::Library);
        assert_eq!(choose(4096, 2560, H200, false), Way::Kernel(Tile::Large));
        assert_eq!(
            choose(4096, 2560, ((12, 1), 48), true),
            Way::Kernel(Tile::Large)
        );
    }

    #[test]
    fn tiles_keep_the_device_busy() {
        for library in [false, true] {
            for m in [1, 16] {
                assert_eq!(choose(m, 6144, H200, library), Way::Kernel(Tile::Small));
            }
            assert_eq!(choose(17, 2560, H200, library), Way::Kernel(Tile::Small));
            for n in [6144, 19_456] {
                assert_eq!(choose(64, n, H200, library), Way::Kernel(Tile::Medium));
            }
            assert_eq!(choose(100, 19_456, H200, library), Way::Kernel(Tile::Large));
        }
    }

    #[test]
    fn factors_stay_in_range() {
        assert_eq!(factors(0.5, 0.25), (0.125, 1.0));
        assert_eq!(factors(1e-30, 1e-30), (1e-30, 1e-30));
        assert_eq!(factors(1e30, 1e30), (1e30, 1e30));
        assert_eq!(library_factor(0.5, 0.25), Some(0.125 * DEQUANTIZED_FACTOR));
        for (a, b) in [(1e-30, 1e-30), (1e30, 1e30), (1e36, 1.0), (0.0, 1.0)] {
            assert_eq!(library_factor(a, b), None, "{a} and {b}");
        }
    }
}
