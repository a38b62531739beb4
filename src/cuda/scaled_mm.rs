//! W4A4 GEMM: the product of two NVFP4 matrices, exact up to f32 sums in a fixed order and the rounding of the result. Runs our own kernel,
//! or cuBLASLt over bounded 16-bit copies of both operands: a code times its scale is exact in f16 and in bf16.

use std::sync::Arc;

use super::blas::{Element, Store};
use super::driver::{DeviceBuffer, DeviceSlice, Gpu, Kernel, Launch, int};
use super::kernel::kernels;
use super::linear::WORKSPACE;
use super::operand::Operand;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;
use crate::base::size::product;
use crate::format::swizzle::ScaleLayout;
use crate::tensor::DType;

kernels! {
    /// The GEMM, by its tile, and for K that is no multiple of [`WHOLE`].
    enum Product(ProductArguments) {
        ScaledMmProduct {
            Small = "scaled_mm_16x32",
            Medium = "scaled_mm_64x64",
            Large = "scaled_mm_128x128",
            SmallRagged = "scaled_mm_16x32_ragged",
            MediumRagged = "scaled_mm_64x64_ragged",
            LargeRagged = "scaled_mm_128x128_ragged",
        }
    }

    /// Dequantizes rows of both operands.
    enum Dequantize(DequantizeArguments) {
        ScaledMmDequantize {
            F16 = "scaled_mm_dequantize_f16",
            Bf16 = "scaled_mm_dequantize_bf16",
        }
    }
}

/// The output tile of a CTA of our own kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tile {
    /// 16 by 32; its warps share K. For few rows.
    Small,
    /// 64 by 64.
    Medium,
    /// 128 by 128.
    Large,
}

impl Tile {
    /// Every tile.
    pub const ALL: [Tile; 3] = [Tile::Small, Tile::Medium, Tile::Large];

    /// Rows of both operands per tile.
    const fn size(self) -> (usize, usize) {
        match self {
            Tile::Small => (16, 32),
            Tile::Medium => (64, 64),
            Tile::Large => (128, 128),
        }
    }

    /// Threads of a CTA, and its bytes of shared memory.
    pub const fn block(self) -> (u32, u32) {
        match self {
            Tile::Small => (256, 69_120),
            Tile::Medium => (512, 73_728),
            Tile::Large => (128, 46_080),
        }
    }

    fn product(self, is_ragged: bool) -> Product {
        match (self, is_ragged) {
            (Tile::Small, false) => Product::Small,
            (Tile::Medium, false) => Product::Medium,
            (Tile::Large, false) => Product::Large,
            (Tile::Small, true) => Product::SmallRagged,
            (Tile::Medium, true) => Product::MediumRagged,
            (Tile::Large, true) => Product::LargeRagged,
        }
    }

    /// The tile's kernel, for K that is a multiple of 64.
    pub fn kernel(self) -> &'static str {
        self.product(false).name()
    }
}

/// How a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// By our own kernel. Architectures that multiply e2m1 codes take them as they are; elsewhere they are decoded on the way.
    Kernel(Tile),
    /// By cuBLASLt, over 16-bit copies.
    Library,
}

/// The first architecture whose warps multiply e2m1 codes.
const MULTIPLIES_CODES: (i32, i32) = (12, 0);
/// Rows of both operands from which cuBLASLt, copies included, is faster than decoding on the way.
const LIBRARY_ROWS: usize = 128;

impl Way {
    /// Chooses the way for `[m, k]` times `[n, k]`, on a device of this architecture with this many multiprocessors. `library` says whether
    /// cuBLASLt is available.
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
        // The larger a tile, the less it reads, once there are enough tiles.
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

/// As [`scaled_mm`], in a given way.
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

/// Splits the factor of a product into two that are applied one after the other. The second is 1 unless a single factor would leave the
/// range of normal numbers.
fn factors(a: f32, b: f32) -> (f32, f32) {
    let both = a * b;
    if both.is_normal() {
        (both, 1.0)
    } else {
        (a, b)
    }
}

/// The single factor of a product of 16-bit copies by cuBLASLt; `None` if it is no normal number.
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

/// K elements whose codes and scales can be copied in whole pieces.
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
    // A grid's second dimension is limited to 65,535.
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
    let (threads, shared) = tile.block();
    let launch = Launch {
        shared,
        ..Launch::new([across as u32, down as u32, 1], threads)
    };
    let kernel = tile.product(!a.k.is_multiple_of(WHOLE));
    // SAFETY: `Operand` and the caller checked sizes, and buffers outlive work on their stream.
    unsafe { launch.of(kernel).run(gpu, &arguments) }
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

/// Bytes for the 16-bit copy of one operand, or of those rows of it that fit.
const COPY: usize = 128 << 20;
/// Rows of a copy are a multiple of this, so that partial results begin at addresses that cuBLASLt accepts.
const COPY_ROWS: usize = 128;
/// Undoes the factor 2^-8 in the values of both copies.
const DEQUANTIZED_FACTOR: f32 = 65_536.0;
/// Threads of a CTA of the dequantization kernel, and rows and codes per thread.
const DEQUANTIZE_THREADS: u32 = 256;
const DEQUANTIZED_ROWS: usize = 4;
const DEQUANTIZED_CODES: usize = 8;

/// Dequantizes rows of each operand, given as the first row, the number of rows, which may be 0, and the destination.
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
    let kernel = match element {
        Element::F16 => Dequantize::F16,
        Element::Bf16 => Dequantize::Bf16,
        Element::F32 => bail!(Internal, "operands are dequantized to 16 bits"),
    };
    let launch = Launch::new(
        [int("blocks of a grid", blocks)? as u32, 1, 1],
        DEQUANTIZE_THREADS,
    );
    // SAFETY: copies have room for the rows, by the caller.
    unsafe { launch.of(kernel).run(gpu, &arguments) }
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
    // cuBLASLt stores a 16-bit result only in the type of its operands.
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
            // Copies are reused: b for all of a, and a if it fits whole.
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

/// `a` `[m, k]` times `b` `[n, k]` transposed by cuBLASLt, all three matrices dense in `dtype`, f16 or bf16: the baseline for products of
/// 4-bit operands.
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
