//! Rows of activations in a device tensor as GEMM inputs, and GEMM results in the caller's type. The CPU does the same with rows in host
//! memory.

use std::marker::PhantomData;
use std::sync::Arc;

use super::driver::{DeviceBuffer, DeviceSlice, Gpu, Launch, int};
use super::kernel::kernels;
use super::tensor::{StridedRows, by_type, rows};
use crate::base::Result;
use crate::base::error::bail;
use crate::tensor::{DType, Tensor};

kernels! {
    /// Scales rows to f16, by their type.
    enum ScaleRows(ScaleArguments) {
        LinearRows {
            F32 = "linear_scale_rows_f32",
            F16 = "linear_scale_rows_f16",
            Bf16 = "linear_scale_rows_bf16",
        }
    }

    /// Scales rows back, by the type of the result.
    enum UnscaleRows(UnscaleArguments) {
        LinearRows {
            F32 = "linear_unscale_rows_f32",
            F16 = "linear_unscale_rows_f16",
            Bf16 = "linear_unscale_rows_bf16",
        }
    }
}

const THREADS: u32 = 256;
/// Rows per launch, limited by a grid's second dimension.
const ROWS: usize = 65_535;

#[repr(C)]
struct ScaleArguments {
    x: u64,
    scaled: u64,
    factors: u64,
    stride: u64,
    k: i32,
}

#[repr(C)]
struct UnscaleArguments {
    y: u64,
    factors: u64,
    out: u64,
    n: i32,
}

/// The rows of a tensor `[.., K]` of float16, bfloat16 or float32 and any strides, on a device.
pub struct FloatRows<'a> {
    gpu: &'a Arc<Gpu>,
    /// Number of rows, and elements per row.
    sizes: (usize, usize),
    rows: StridedRows,
    kernel: ScaleRows,
    /// Ties the rows to the borrow of their memory.
    _memory: PhantomData<&'a ()>,
}

impl<'a> FloatRows<'a> {
    /// The rows of a tensor on `gpu`. K must be a multiple of 8.
    pub fn new(gpu: &'a Arc<Gpu>, tensor: &'a Tensor) -> Result<FloatRows<'a>> {
        use ScaleRows::{Bf16, F16, F32};
        let kernel = by_type(tensor.dtype(), [F32, F16, Bf16])?;
        let k = tensor.shape().matrix().1;
        if !k.is_multiple_of(8) {
            bail!(Unsupported, "rows of {k}; they must be multiples of 8");
        }
        Ok(FloatRows {
            gpu,
            sizes: tensor.shape().matrix(),
            rows: rows(gpu, tensor, 16)?,
            kernel,
            _memory: PhantomData,
        })
    }

    /// Contiguous f32 rows `[.., K]`. K must be a multiple of 8.
    pub fn of_f32(gpu: &'a Arc<Gpu>, x: DeviceSlice<'a>, k: usize) -> Result<FloatRows<'a>> {
        if k == 0 || !k.is_multiple_of(8) || !x.address().is_multiple_of(16) {
            bail!(
                Unsupported,
                "rows of {k} at an address of {} past a multiple of 16; they must be multiples of 8, and aligned",
                x.address() % 16
            );
        }
        Ok(FloatRows {
            gpu,
            sizes: (x.bytes() / (k * 4), k),
            rows: StridedRows::at(x.address(), k * 4),
            kernel: ScaleRows::F32,
            _memory: PhantomData,
        })
    }

    /// Enqueues the conversion of `count` rows from `first` on to f16 `halves` `[count, K]`. Each row is divided by a power of two that
    /// brings its largest magnitude near the top of f16; the powers go to `factors` as f32. Rows that fit f16 are not scaled.
    pub fn halves(
        &self,
        first: usize,
        count: usize,
        halves: &DeviceBuffer,
        factors: &DeviceBuffer,
    ) -> Result<()> {
        let (height, k) = self.sizes;
        if first.checked_add(count).is_none_or(|end| end > height) || count > ROWS {
            bail!(Internal, "{count} rows from {first} on, of {height}");
        }
        halves.holds("activations", &[count, k, 2])?;
        factors.holds("factors", &[count, 4])?;
        let arguments = ScaleArguments {
            x: self.rows.address + (first * self.rows.stride) as u64,
            scaled: halves.address(),
            factors: factors.address(),
            stride: self.rows.stride as u64,
            k: int("K", k)?,
        };
        let launch = Launch::new([count as u32, 1, 1], THREADS);
        // SAFETY: the tensor has the rows, and the outputs have room for them.
        unsafe { launch.of(self.kernel).run(self.gpu, &arguments) }
    }
}

/// Enqueues f32 `y` `[rows, n]`, each row times its factor, as `dtype` (float16, bfloat16 or float32), to the rows of `out` `[.., n]` from
/// `first` on.
pub fn scaled_rows<'a>(
    y: &DeviceBuffer,
    factors: &DeviceBuffer,
    (rows, n): (usize, usize),
    dtype: DType,
    out: impl Into<DeviceSlice<'a>>,
    first: usize,
) -> Result<()> {
    let out = out.into();
    y.holds("a product", &[rows, n, 4])?;
    factors.holds("factors", &[rows, 4])?;
    out.holds("rows", &[first.saturating_add(rows), n, dtype.bytes()])?;
    if rows > ROWS {
        bail!(Internal, "{rows} rows at once");
    }
    let arguments = UnscaleArguments {
        y: y.address(),
        factors: factors.address(),
        out: out.address() + (first * n * dtype.bytes()) as u64,
        n: int("output features", n)?,
    };
    use UnscaleRows::{Bf16, F16, F32};
    let kernel = by_type(dtype, [F32, F16, Bf16])?;
    let launch = Launch::new([(n as u32).div_ceil(THREADS), rows as u32, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(kernel).run(y.gpu(), &arguments) }
}
