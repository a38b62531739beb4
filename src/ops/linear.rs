//! Products with weights: W4A16 for NVFP4, W8A16 for int8 rows, dense for the others, and optionally W4A8. Operands are in host memory, or
//! tensors in the memory of the weight's GPU.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use half::f16;

use super::training::optimizer::SharedWeight;
use super::transfer::in_stream_order;
use super::{Device, DeviceKind, Slice, SliceMut, Workspace};
use crate::base::error::{Result, bail, err};
use crate::base::mapping::Mapping;
use crate::base::memory::{Bytes, Tag};
use crate::base::size::product;
use crate::cpu::{Cpu, ReadDense};
pub use crate::cpu::{Packed, ReadInt8, ReadNvfp4};
use crate::cuda::{
    self, DeviceBuffer, DeviceSlice, FloatRows, Gpu, Input, LinearScratch, Matrix, Output,
};
use crate::tensor::{DType, Tensor, WeightType};

/// How activations enter a product with an NVFP4 weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activations {
    /// Not quantized (W4A16): f32 on the CPU, f16 on a GPU.
    #[default]
    Exact,
    /// Rounded to 8 bits with one scale for each 32 along K (W4A8). Faster for prefill, but not exact.
    Int8,
}

impl Activations {
    /// Fails if `device` does not support it.
    pub fn check(self, device: &Device) -> Result<()> {
        match (self, device) {
            (Activations::Int8, Device::Cuda(gpu)) => bail!(
                Unsupported,
                "8-bit activations were asked for on {gpu:?}, which has exact ones; ask for exact activations"
            ),
            _ => Ok(()),
        }
    }
}

/// A weight `[out features, in features]` prepared for a device. Immutable; threads may share it.
#[derive(Debug)]
pub struct Linear {
    weight: Weight,
}

#[derive(Debug)]
enum Weight {
    Cpu(Packed),
    /// In the memory of a trainer on the CPU, in a layout that kernels do not read.
    Trained(SharedWeight),
    Cuda(Matrix),
}

/// Rows of a trained weight that a CPU thread converts to the kernels' layout at a time. No other copy in that layout exists. A multiple of
/// the rows that kernels process together.
const TRAINED_ROWS: usize = 256;

impl Linear {
    /// Prepares an NVFP4 weight. `read` provides its codes and block scales by ranges of rows.
    pub fn nvfp4(
        device: &Device,
        rows: usize,
        cols: usize,
        global: f32,
        read: &mut ReadNvfp4,
    ) -> Result<Linear> {
        match device {
            Device::Cpu(_) => Ok(Linear {
                weight: Weight::Cpu(Packed::nvfp4(rows, cols, global, read)?),
            }),
            Device::Cuda(gpu) => Ok(Linear {
                weight: Weight::Cuda(Matrix::nvfp4(gpu, rows, cols, global, read)?),
            }),
        }
    }

    /// Prepares a dense weight, stored in float32, float16 or bfloat16. `read` provides its values by ranges of rows.
    pub fn dense(
        device: &Device,
        rows: usize,
        cols: usize,
        dtype: DType,
        read: &mut ReadDense,
    ) -> Result<Linear> {
        let held = WeightType::dense(dtype)?;
        match device {
            Device::Cpu(_) => Ok(Linear {
                weight: Weight::Cpu(Packed::dense(rows, cols, held, read)?),
            }),
            Device::Cuda(gpu) => Ok(Linear {
                weight: Weight::Cuda(dense_matrix(gpu, rows, cols, dtype, read)?),
            }),
        }
    }

    /// Prepares a weight of int8 rows. `read` provides its codes and row scales by ranges of rows.
    pub fn int8(device: &Device, rows: usize, cols: usize, read: &mut ReadInt8) -> Result<Linear> {
        let weight = match device {
            Device::Cpu(_) => Weight::Cpu(Packed::int8(rows, cols, read)?),
            Device::Cuda(gpu) => Weight::Cuda(Matrix::int8(gpu, rows, cols, read)?),
        };
        Ok(Linear { weight })
    }

    /// A weight for the CPU that was packed before, in a mapped file: see [`Packed::mapped`].
    pub fn mapped(
        shape: (usize, usize),
        kind: WeightType,
        global: f32,
        mapping: Arc<Mapping>,
        range: Range<usize>,
    ) -> Result<Linear> {
        Ok(Linear {
            weight: Weight::Cpu(Packed::mapped(shape, kind, global, mapping, range)?),
        })
    }

    /// Bytes that a weight of this shape takes on a device.
    pub fn bytes_of(
        device: DeviceKind,
        rows: usize,
        cols: usize,
        kind: WeightType,
    ) -> Result<Bytes> {
        Ok(match device {
            DeviceKind::Cpu => Bytes::of_host(Packed::bytes_of(rows, cols, kind)? as u64),
            DeviceKind::Cuda => Bytes::of_device(Matrix::bytes_of(rows, cols, kind)? as u64),
        })
    }

    /// Bytes of working memory that preparing a weight of this shape takes.
    pub fn preparing_bytes_of(
        device: DeviceKind,
        rows: usize,
        cols: usize,
        kind: WeightType,
    ) -> Bytes {
        match device {
            DeviceKind::Cpu => Bytes::of_host(Packed::read_bytes_of(rows, cols, kind) as u64),
            DeviceKind::Cuda => Matrix::upload_bytes_of(rows, cols, kind),
        }
    }

    /// A weight in the memory in which it is trained, without a copy. On the CPU its products are slower, because a part at a time is
    /// converted to the kernels' layout; they have the same bits.
    pub fn trained(device: &Device, weight: SharedWeight) -> Result<Linear> {
        let weight = match device {
            Device::Cpu(_) => Weight::Trained(weight),
            Device::Cuda(_) => {
                let (rows, cols) = (weight.rows(), weight.cols());
                let global = match weight.kind() {
                    WeightType::Nvfp4 => weight.global(),
                    _ => 1.0,
                };
                let values = weight.on_gpu()?;
                Weight::Cuda(Matrix::shared(rows, cols, weight.kind(), global, values)?)
            }
        };
        Ok(Linear { weight })
    }

    /// A weight that is already on a GPU.
    pub(super) fn on_gpu(matrix: Matrix) -> Linear {
        Linear {
            weight: Weight::Cuda(matrix),
        }
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        match &self.weight {
            Weight::Cpu(packed) => packed.rows(),
            Weight::Trained(weight) => weight.rows(),
            Weight::Cuda(matrix) => matrix.rows(),
        }
    }

    /// Input features, K.
    pub fn cols(&self) -> usize {
        match &self.weight {
            Weight::Cpu(packed) => packed.cols(),
            Weight::Trained(weight) => weight.cols(),
            Weight::Cuda(matrix) => matrix.cols(),
        }
    }

    /// Bytes held on the device.
    pub fn bytes(&self) -> usize {
        match &self.weight {
            Weight::Cpu(packed) => packed.bytes(),
            Weight::Trained(weight) => weight.bytes(),
            Weight::Cuda(matrix) => matrix.bytes(),
        }
    }

    /// Part of [`Linear::bytes`] that is in a mapped file.
    pub fn mapped_bytes(&self) -> usize {
        match &self.weight {
            Weight::Cpu(packed) if packed.is_mapped() => packed.bytes(),
            Weight::Cpu(_) | Weight::Trained(_) | Weight::Cuda(_) => 0,
        }
    }

    /// The global scale; 1 for weights without one.
    pub fn global(&self) -> f32 {
        match &self.weight {
            Weight::Cpu(packed) => packed.global(),
            Weight::Trained(weight) => weight.global(),
            Weight::Cuda(matrix) => matrix.global(),
        }
    }

    /// The bytes in host memory of a weight that is not trained; none on a GPU.
    pub fn host_bytes(&self) -> &[u8] {
        match &self.weight {
            Weight::Cpu(packed) => packed.stored(),
            Weight::Trained(_) | Weight::Cuda(_) => &[],
        }
    }

    /// Type of the stored values.
    pub fn kind(&self) -> WeightType {
        match &self.weight {
            Weight::Cpu(packed) => packed.kind(),
            Weight::Trained(weight) => weight.kind(),
            Weight::Cuda(matrix) => matrix.storage(),
        }
    }

    /// The exact values of one row, for an embedding lookup: `out` takes `cols` floats.
    pub fn row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        match &self.weight {
            Weight::Cpu(packed) => packed.row(row, out),
            Weight::Trained(weight) if row >= weight.rows() || out.len() != weight.cols() => bail!(
                InvalidArgument,
                "row {row} into {} floats: the weight has {} rows of {}",
                out.len(),
                weight.rows(),
                weight.cols()
            ),
            Weight::Trained(weight) => weight.read(row..row + 1, out),
            Weight::Cuda(matrix) => cuda::table_row(matrix, row, out),
        }
    }

    /// The matrix of a weight on a GPU.
    pub fn matrix(&self) -> Option<&Matrix> {
        match &self.weight {
            Weight::Cpu(_) | Weight::Trained(_) => None,
            Weight::Cuda(matrix) => Some(matrix),
        }
    }
}

/// A dense matrix on a GPU. If its type is narrower than the source, values are rounded to nearest, ties to even.
fn dense_matrix(
    gpu: &Arc<Gpu>,
    rows: usize,
    cols: usize,
    dtype: DType,
    read: &mut ReadDense,
) -> Result<Matrix> {
    let mut values = Vec::new();
    Matrix::dense(
        gpu,
        rows,
        cols,
        WeightType::dense(dtype)?,
        &mut |range, bytes| {
            let first = range.start;
            values.resize(range.len() * cols, 0.0);
            read(range, &mut values)?;
            check_finite(&values, first, cols, dtype)?;
            dtype.from_f32(&values, bytes)
        },
    )
}

/// Fails if a value is not finite, or not finite after rounding. Rows have `cols` values and are numbered from `first`.
pub(super) fn check_finite(values: &[f32], first: usize, cols: usize, dtype: DType) -> Result<()> {
    // Values from half a step above the largest finite one on round to infinity.
    let limit = match dtype {
        DType::F16 => 65_520.0,
        DType::BF16 => f32::from_bits(0x7f7f_8000),
        _ => f32::INFINITY,
    };
    let fits = |v: &f32| v.abs() < limit;
    let Some(i) = values.iter().position(|v| !fits(v)) else {
        return Ok(());
    };
    bail!(
        InvalidArgument,
        "the weight at row {}, column {} is {}, which a weight held in {} cannot be",
        first + i / cols,
        i % cols,
        values[i],
        dtype.name()
    )
}

/// `x` `[m, K]` times each weight `[N, K]` transposed, into its output `[m, N]`, f32 accumulate. Weights that share an input (q, k, v;
/// gate, up) are passed together and share one pass. Weights, input and outputs are on one device; a GPU also takes input and outputs in
/// host memory, and transfers them. On the CPU each output row has the same bits for every `m`.
pub fn linear(
    device: &Device,
    x: Slice<'_>,
    m: usize,
    outputs: &mut [(&Linear, SliceMut<'_>)],
    activations: Activations,
    workspace: &mut Workspace,
) -> Result<()> {
    let foreign = |place: &dyn std::fmt::Debug| {
        err!(
            InvalidArgument,
            "a weight on {place:?} was given to {}; prepare it for that device",
            device.name()
        )
    };
    match device {
        Device::Cpu(cpu) => {
            let int8 = activations == Activations::Int8;
            let mut packed: Vec<(&Packed, &mut [f32])> = Vec::with_capacity(outputs.len());
            for (w, y) in outputs.iter_mut() {
                match &w.weight {
                    Weight::Cpu(weight) => packed.push((weight, y.reborrow().host()?)),
                    Weight::Trained(weight) => {
                        let y = y.reborrow().host()?;
                        of_trained(cpu, x.host()?, m, weight, y, int8, workspace)?;
                    }
                    Weight::Cuda(matrix) => return Err(foreign(matrix.gpu())),
                }
            }
            cpu.linear(x.host()?, m, &mut packed, int8, workspace)
        }
        Device::Cuda(gpu) => {
            let mut matrices: Vec<(&Matrix, SliceMut<'_>)> = Vec::with_capacity(outputs.len());
            for (w, y) in outputs.iter_mut() {
                match &w.weight {
                    Weight::Cuda(matrix) if Arc::ptr_eq(matrix.gpu(), gpu) => {
                        matrices.push((matrix, y.reborrow()));
                    }
                    Weight::Cuda(matrix) => return Err(foreign(matrix.gpu())),
                    Weight::Cpu(_) | Weight::Trained(_) => {
                        return Err(foreign(&format_args!("the cpu")));
                    }
                }
            }
            // As on the CPU, activations are not quantized for other weights.
            if matrices
                .iter()
                .any(|(w, _)| w.storage() == WeightType::Nvfp4)
            {
                activations.check(device)?;
            }
            let k = check_sizes(x, m, &matrices)?;
            match x {
                Slice::Host(x) => from_host(gpu, x, m, k, matrices),
                Slice::Cuda(x) => on_gpu(gpu, x, m, k, matrices),
            }
        }
    }
}

/// The product with a weight in a trainer's memory. Each thread converts some rows to the kernels' layout and multiplies them with every
/// row of `x`.
fn of_trained(
    cpu: &Arc<Cpu>,
    x: &[f32],
    m: usize,
    weight: &SharedWeight,
    y: &mut [f32],
    int8: bool,
    workspace: &mut Workspace,
) -> Result<()> {
    let (n, k) = (weight.rows(), weight.cols());
    if x.len() != m * k || y.len() != m * n {
        bail!(
            InvalidArgument,
            "linear: {} inputs and {} outputs for {m} tokens and a weight [{n}, {k}]; they must be m * K and m * N",
            x.len(),
            y.len()
        );
    }
    let pack = |rows: Range<usize>| {
        let first = rows.start;
        let within = |range: Range<usize>| first + range.start..first + range.end;
        match weight.kind() {
            WeightType::Nvfp4 => Packed::nvfp4(
                rows.len(),
                k,
                weight.global(),
                &mut |range, codes, scales| weight.read_nvfp4(within(range), codes, scales),
            ),
            dense => Packed::dense(rows.len(), k, dense, &mut |range, values| {
                weight.read(within(range), values)
            }),
        }
    };
    let threads = cpu.pool().threads();
    for first in (0..n).step_by(threads * TRAINED_ROWS) {
        let starts: Vec<usize> = (first..n.min(first + threads * TRAINED_ROWS))
            .step_by(TRAINED_ROWS)
            .collect();
        let packed: Vec<_> = starts.iter().map(|_| Mutex::new(None)).collect();
        cpu.pool().run(starts.len(), |i| {
            let made = pack(starts[i]..n.min(starts[i] + TRAINED_ROWS));
            *packed[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(made);
        });
        let packed = packed
            .into_iter()
            .map(|made| {
                let made = made.into_inner().unwrap_or_else(PoisonError::into_inner);
                made.unwrap_or_else(|| Err(err!(Internal, "rows of a weight were not packed")))
            })
            .collect::<Result<Vec<Packed>>>()?;
        let mut products: Vec<Vec<f32>> = packed.iter().map(|w| vec![0.0; m * w.rows()]).collect();
        let mut outputs: Vec<(&Packed, &mut [f32])> = packed
            .iter()
            .zip(&mut products)
            .map(|(w, y)| (w, y.as_mut_slice()))
            .collect();
        cpu.linear(x, m, &mut outputs, int8, workspace)?;
        for (start, product) in starts.iter().zip(&products) {
            let width = product.len() / m.max(1);
            for (row, values) in product.chunks_exact(width.max(1)).enumerate() {
                y[row * n + start..][..width].copy_from_slice(values);
            }
        }
    }
    Ok(())
}

/// Checks that inputs and outputs match the sizes of the weights; returns K.
fn check_sizes(x: Slice<'_>, m: usize, outputs: &[(&Matrix, SliceMut<'_>)]) -> Result<usize> {
    let k = outputs.first().map_or(0, |(w, _)| w.cols());
    for (w, y) in outputs {
        let (n, whole) = (w.rows(), product("outputs", &[m, w.rows()])?);
        if w.cols() != k || x.len() != product("inputs", &[m, k])? || y.len() != whole {
            bail!(
                InvalidArgument,
                "linear: {} inputs and {} outputs for {m} tokens and a weight [{n}, {}]; they must be m * K and m * N",
                x.len(),
                y.len(),
                w.cols()
            );
        }
    }
    Ok(k)
}

/// Limits on the rows, and on the elements of input or output, of one GPU product.
const GPU_ROWS: usize = 2048;
const GPU_ELEMENTS: usize = 16 << 20;

/// Number of rows in one GPU product if input and output rows have at most `widest` elements.
fn rows_at_once(widest: usize) -> usize {
    (GPU_ELEMENTS / widest).clamp(1, GPU_ROWS)
}

/// The product of `x` `[.., K]` in the memory of `gpu` with a weight prepared for it, as `[.., N]` of `dtype` (float16, bfloat16 or
/// float32) in that memory. Enqueues the same computation as [`linear`] from host memory, with the same bits.
pub(super) fn of_tensor(
    gpu: &Arc<Gpu>,
    x: &Tensor,
    weight: &Linear,
    activations: Activations,
    dtype: DType,
) -> Result<Tensor> {
    let w = match &weight.weight {
        Weight::Cuda(w) if Arc::ptr_eq(w.gpu(), gpu) => w,
        Weight::Cuda(w) => bail!(
            InvalidArgument,
            "a weight on {:?} was given to {gpu:?}; prepare it for that device",
            w.gpu()
        ),
        Weight::Cpu(_) | Weight::Trained(_) => bail!(
            InvalidArgument,
            "a weight on the cpu was given to {gpu:?}; prepare it for that device"
        ),
    };
    if w.storage() == WeightType::Nvfp4 {
        activations.check(&Device::Cuda(gpu.clone()))?;
    }
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        bail!(
            Unsupported,
            "a product on a GPU in {}; there are float32, float16 and bfloat16",
            dtype.name()
        );
    }
    let ((m, k), n) = (x.shape().matrix(), w.rows());
    in_stream_order(gpu, || {
        let bytes = product("a product", &[m, n, dtype.bytes()])?;
        let out = DeviceBuffer::uninit(gpu, Tag::DeviceTensor, bytes)?;
        let input = FloatRows::new(gpu, x)?;
        products(gpu, &input, (m, k), &[(w, (&out).into())], dtype)?;
        cuda::tensor(out, &x.shape().with_last(n), dtype)
    })
}

/// Products of `m` rows of K = `k` on a GPU, some rows at a time. Each row enters as f16, divided by a power of two that brings its
/// magnitudes into the range of f16; its products are multiplied by that power. Outputs are of `dtype`.
fn products(
    gpu: &Arc<Gpu>,
    input: &FloatRows<'_>,
    (m, k): (usize, usize),
    outputs: &[(&Matrix, DeviceSlice<'_>)],
    dtype: DType,
) -> Result<()> {
    let widest = outputs.iter().map(|(w, _)| w.rows()).fold(k, usize::max);
    let step = rows_at_once(widest.max(1)).min(m.max(1));
    let scratch = |sizes: &[usize]| {
        DeviceBuffer::uninit(gpu, Tag::DeviceScratch, product("a product", sizes)?)
    };
    let (halves, factors) = (scratch(&[step, k, 2])?, scratch(&[step, 4])?);
    let accumulators = scratch(&[step, widest, 4])?;
    for first in (0..m).step_by(step) {
        let rows = step.min(m - first);
        input.halves(first, rows, &halves, &factors)?;
        for (w, y) in outputs {
            let n = w.rows();
            multiply(gpu, &halves, rows, w, &accumulators)?;
            cuda::scaled_rows(&accumulators, &factors, (rows, n), dtype, *y, first)?;
        }
    }
    Ok(())
}

/// `rows` rows of f16 times a weight, as f32.
fn multiply(
    gpu: &Arc<Gpu>,
    halves: &DeviceBuffer,
    rows: usize,
    w: &Matrix,
    out: &DeviceBuffer,
) -> Result<()> {
    let scratch = LinearScratch::for_product(gpu, w, rows)?;
    let input = Input::Plain(halves, 1.0);
    let (matrices, stride) = ([(w, None)], w.rows());
    cuda::linear(
        gpu,
        input,
        rows,
        &matrices,
        Output::F32,
        out,
        stride,
        &scratch,
    )
}

/// Products of rows and outputs in the memory of a GPU.
fn on_gpu(
    gpu: &Arc<Gpu>,
    x: DeviceSlice<'_>,
    m: usize,
    k: usize,
    outputs: Vec<(&Matrix, SliceMut<'_>)>,
) -> Result<()> {
    let outputs = outputs
        .into_iter()
        .map(|(w, y)| Ok((w, y.cuda()?)))
        .collect::<Result<Vec<_>>>()?;
    let input = FloatRows::of_f32(gpu, x, k)?;
    products(gpu, &input, (m, k), &outputs, DType::F32)
}

/// Products of host memory with weights on a GPU: some rows at a time are uploaded as f16, and their products come back as f32.
fn from_host(
    gpu: &Arc<Gpu>,
    x: &[f32],
    m: usize,
    k: usize,
    outputs: Vec<(&Matrix, SliceMut<'_>)>,
) -> Result<()> {
    let mut outputs = outputs
        .into_iter()
        .map(|(w, y)| Ok((w, y.host()?)))
        .collect::<Result<Vec<_>>>()?;
    let widest = outputs.iter().map(|(w, _)| w.rows()).fold(k, usize::max);
    let step = rows_at_once(widest.max(1));
    for first in (0..m).step_by(step) {
        let rows = step.min(m - first);
        let (halves, factors) = scaled_halves(&x[first * k..(first + rows) * k], k);
        let input = DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, &halves)?;
        for (w, y) in outputs.iter_mut() {
            let n = w.rows();
            let y = &mut y[first * n..(first + rows) * n];
            let out = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, size_of_val(y))?;
            multiply(gpu, &input, rows, w, &out)?;
            out.read(0, y)?;
            for (row, factor) in y.chunks_exact_mut(n).zip(&factors) {
                row.iter_mut().for_each(|v| *v *= factor);
            }
        }
    }
    Ok(())
}

/// The rows of `x` `[.., k]` in f16, each divided by a power of two that brings its largest magnitude near the top of f16, and those
/// powers. Rows that f16 holds exactly are unchanged, and rows of any magnitude keep f16's precision.
fn scaled_halves(x: &[f32], k: usize) -> (Vec<u16>, Vec<f32>) {
    let mut halves = Vec::with_capacity(x.len());
    let mut factors = Vec::with_capacity(x.len() / k);
    for row in x.chunks_exact(k) {
        let largest = row.iter().fold(0f32, |most, v| most.max(v.abs()));
        let power = |e: i32| f32::from_bits(((127 + e) as u32) << 23);
        let mut exponent = match largest {
            // Infinity remains infinite after any division.
            0.0 | f32::INFINITY => 0,
            // Clamped so that the power of two and its inverse are both normal.
            _ => ((largest.to_bits() >> 23) as i32 - 127 - 15).clamp(-126, 126),
        };
        if largest.is_finite() && largest * power(-exponent) > f16::MAX.to_f32() {
            exponent += 1;
        }
        let (factor, inverse) = (power(exponent), power(-exponent));
        halves.extend(row.iter().map(|v| f16::from_f32(v * inverse).to_bits()));
        factors.push(factor);
    }
    (halves, factors)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::random;

    #[test]
    fn weights_that_a_type_cannot_hold_are_refused() {
        let below = |v: f32| f32::from_bits(v.to_bits() - 1);
        for (dtype, limit) in [
            (DType::F32, f32::INFINITY),
            (DType::F16, 65_520.0),
            (DType::BF16, f32::from_bits(0x7f7f_8000)),
        ] {
            for (value, fits) in [
                (below(limit), true),
                (-below(limit), true),
                (limit, false),
                (-limit, false),
                (f32::NAN, false),
            ] {
                let mut rounded = [0; 4];
                let rounded = &mut rounded[..dtype.bytes()];
                dtype.from_f32(&[value], rounded).unwrap();
                let mut back = [0f32];
                dtype.to_f32(rounded, &mut back).unwrap();
                assert_eq!(back[0].is_finite(), fits, "{dtype:?} {value:e}");
                let e = check_finite(&[0.0, 0.0, 0.0, value], 7, 2, dtype);
                assert_eq!(e.is_ok(), fits, "{dtype:?} {value:e}");
                if let Err(e) = e {
                    assert!(e.message().contains("row 8, column 1"), "{e}");
                }
            }
        }
    }

    /// The values after a round trip through f16.
    fn through(row: &[f32]) -> Vec<f32> {
        let (halves, factors) = scaled_halves(row, row.len());
        let back = |&h: &u16| f16::from_bits(h).to_f32() * factors[0];
        halves.iter().map(back).collect()
    }

    #[test]
    fn what_f16_holds_comes_through_it_unchanged() {
        let row: Vec<f32> = (0..1024u64)
            .map(|i| f16::from_f32((random::uniform(1, i) - 0.5) * 100.0).to_f32())
            .collect();
        assert_eq!(through(&row), row);
        for row in [
            vec![65504.0, -1.0, 6e-8, 0.0],
            vec![6e-8, 0.0],
            vec![0.0; 16],
            vec![f32::INFINITY, 1.0, f32::NEG_INFINITY],
        ] {
            let row: Vec<f32> = row.iter().map(|&v| f16::from_f32(v).to_f32()).collect();
            assert_eq!(through(&row), row);
        }
        assert!(through(&[1.0, f32::NAN])[1].is_nan());
    }

    /// Each row on its own, up to the limits of f32.
    #[test]
    fn rows_of_any_magnitude_keep_the_precision_of_f16() {
        let k = 64;
        let scales = [f32::MAX, 1e30, 3e5, 65536.0, 1.0, 1e-6, 1e-30, 1.2e-34];
        let x: Vec<f32> = (0..(k * scales.len()) as u64)
            .map(|i| (random::uniform(2, i) - 0.5) * 2.0 * scales[i as usize / k])
            .collect();
        let (halves, factors) = scaled_halves(&x, k);
        for (i, (&h, &v)) in halves.iter().zip(&x).enumerate() {
            let back = f16::from_bits(h).to_f32() * factors[i / k];
            assert!(
                (back - v).abs() <= v.abs() / 2048.0,
                "{v:e} became {back:e}"
            );
        }
        let alone = scaled_halves(&x[k..2 * k], k);
        assert_eq!((&alone.0[..], alone.1[0]), (&halves[k..2 * k], factors[1]));
    }
}
