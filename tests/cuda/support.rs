//! The device, random operands, answers in f64 and bounds of errors, which the tests of every family of kernels share.

use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::sync::Arc;

use NVFP4::base::env;
use NVFP4::base::memory::{Plain, Tag};
use NVFP4::cuda::{
    self, Biased, DeviceBuffer, Glu, Gpu, Input, Layout, LinearScratch, Matrix, MatrixShape, Output,
};
use NVFP4::engine::Served;
use NVFP4::format::nvfp4::{self, BLOCK, Nvfp4, QuantizeOptions};
use NVFP4::format::random;
use NVFP4::model::weights::Mixer;
use NVFP4::model::{Device, KvType, LoadOptions, Logits, Scratch};
use NVFP4::session::{GenerateOptions, SamplingOptions, Session, SessionOptions};
use NVFP4::tensor::{DType, WeightType};
use half::f16;

use crate::common::options;

/// The bound of a sum in f32 of products that are exact.
pub(crate) const EXACT: f64 = 1e-6;
/// The bound of such a sum in one row alone, whose terms may nearly cancel.
pub(crate) const ROW: f64 = 1e-5;
/// The bound of an output that is rounded to f16: half a unit in the last place of most values.
pub(crate) const F16: f64 = 4e-4;
/// The bound of an output in f16: half a unit in the last place, at most.
pub(crate) const HALF: f64 = 5e-4;
/// The bound of an output in bf16: half a unit in the last place, at most.
pub(crate) const BF16: f64 = 4e-3;
/// The bound of a sum on tensor cores, for each element of K: they drop bits below the last place of the sum.
pub(crate) const DROPPED: f64 = 2e-9;

/// The first CUDA device; without one the test is skipped.
pub(crate) fn gpu() -> Option<Arc<Gpu>> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(e) => {
            assert!(
                !env::required_capabilities().iter().any(|c| c == "cuda"),
                "NVFP4_REQUIRE names cuda: {e}"
            );
            println!("SKIPPED no CUDA device: {e}");
            None
        }
    }
}

/// The model of a directory on a device, as stored. Its sessions run all of their tokens: prompts with the same bits are divided alike.
pub(crate) fn load_on(device: Device, directory: &Path) -> Arc<Served> {
    let options = LoadOptions {
        device,
        prefix_cache: false,
        ..options()
    };
    Served::load(directory, &options).unwrap()
}

/// Numbers around zero, of about unit variance, that depend on the seed alone.
pub(crate) fn normal(seed: u64, count: usize) -> Vec<f32> {
    (0..count as u64)
        .map(|i| {
            let bits = random::bits(seed, i);
            let uniform = |b: u64| (b & 0xffff) as f32 / 65536.0;
            // Three uniforms: near enough to a bell, and bounded.
            (uniform(bits) + uniform(bits >> 16) + uniform(bits >> 32) - 1.5) * 2.0
        })
        .collect()
}

pub(crate) fn as_f16(values: &[f32]) -> Vec<u16> {
    values.iter().map(|&v| f16::from_f32(v).to_bits()).collect()
}

pub(crate) fn as_f64(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| v.into()).collect()
}

/// Values that f16 holds, each the nearest to the given one.
pub(crate) fn rounded(values: &[f32]) -> Vec<f64> {
    values
        .iter()
        .map(|&v| f64::from(f16::from_f32(v)))
        .collect()
}

pub(crate) fn upload<T: Plain>(gpu: &Arc<Gpu>, values: &[T]) -> DeviceBuffer {
    DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, values).unwrap()
}

/// NaNs, which no kernel may leave behind or read.
pub(crate) fn poisoned(gpu: &Arc<Gpu>, bytes: usize) -> DeviceBuffer {
    upload(gpu, &vec![0xffu8; bytes])
}

pub(crate) fn read_f32(buffer: &DeviceBuffer, count: usize) -> Vec<f32> {
    let mut out = vec![0f32; count];
    buffer.read(0, &mut out).unwrap();
    out
}

pub(crate) fn read_f16(buffer: &DeviceBuffer, count: usize) -> Vec<f32> {
    let mut out = vec![0u16; count];
    buffer.read(0, &mut out).unwrap();
    out.into_iter()
        .map(|b| f16::from_bits(b).to_f32())
        .collect()
}

/// The place of element `k` of a row of `m` in fragment-major activations; `kernels/format/fragment_major.cuh` defines the order.
fn fragment_index(m: usize, row: usize, k: usize) -> usize {
    let (chunk, in_chunk) = (k / 128, k % 128);
    let piece = in_chunk / 32 * 4 + k % 4;
    let in_piece = row % 8 * 8 + k % 16 / 4 * 2 + k / 16 % 2;
    ((chunk * m.div_ceil(8) + row / 8) * 16 + piece) * 64 + in_piece
}

/// Rows `[m, k]` of f16 activations in a layout, read from the device and put one after the other.
pub(crate) fn read_rows(layout: Layout, buffer: &DeviceBuffer, m: usize, k: usize) -> Vec<f32> {
    let values = read_f16(buffer, layout.elements(m, k));
    match layout {
        Layout::RowMajor => values,
        Layout::FragmentMajor => (0..m * k)
            .map(|i| values[fragment_index(m, i / k, i % k)])
            .collect(),
    }
}

/// Rows `[m, k]` as f16 activations in a layout; NaN stands where no row is, and zeros where a row has ended.
pub(crate) fn in_layout(layout: Layout, values: &[f32], m: usize, k: usize) -> Vec<u16> {
    let halves = as_f16(values);
    if layout == Layout::RowMajor {
        return halves;
    }
    let mut all = vec![f16::NAN.to_bits(); layout.elements(m, k)];
    for row in 0..m {
        (k..k.next_multiple_of(128)).for_each(|k| all[fragment_index(m, row, k)] = 0);
    }
    for (i, &half) in halves.iter().enumerate() {
        all[fragment_index(m, i / k, i % k)] = half;
    }
    all
}

/// ‖got − want‖ / ‖want‖; a NaN anywhere makes it a NaN, which passes no bar.
pub(crate) fn relative_l2(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let (mut difference, mut norm) = (0.0, 0.0);
    for (&g, &w) in got.iter().zip(want) {
        difference += (f64::from(g) - w).powi(2);
        norm += w * w;
    }
    (difference / norm).sqrt()
}

/// How much coarser than f16 the inputs of a model's products are: cuBLASLt takes bf16 inputs for bf16 weights, which lack three bits.
pub(crate) fn coarseness(model: &Served) -> f64 {
    let block = &model.model().weights().blocks[0];
    let q = match &block.mixer {
        Mixer::Attention(attention) => Some(&attention.q),
        _ => None,
    };
    let per_layer = block.per_layer.as_ref().map(|own| &own.gate);
    let mut products = q.into_iter().chain(per_layer);
    match products.any(|product| product.linear.kind() == WeightType::BF16) {
        true => 8.0,
        false => 1.0,
    }
}

#[track_caller]
pub(crate) fn assert_close(got: &[f32], want: &[f64], bar: f64, what: &str) {
    let error = relative_l2(got, want);
    assert!(
        error <= bar,
        "{what}: relative L2 {error:e}, at most {bar:e}"
    );
}

pub(crate) fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.iter()
        .map(|v| v.to_bits())
        .eq(b.iter().map(|v| v.to_bits()))
}

/// Sums of the elements of two arrays, in f64.
pub(crate) fn sums(a: &[f64], b: &[f32]) -> Vec<f64> {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, &b)| a + f64::from(b)).collect()
}

/// x wᵀ in f64, where rows have `k` elements.
pub(crate) fn product(x: &[f64], w: &[f32], k: usize) -> Vec<f64> {
    let dot = |x: &[f64], w: &[f32]| x.iter().zip(w).map(|(x, &w)| x * f64::from(w)).sum();
    x.chunks_exact(k)
        .flat_map(|x| w.chunks_exact(k).map(move |w| dot(x, w)))
        .collect()
}

/// Rows of products with a bias added to each.
pub(crate) fn with_bias(products: &[f64], bias: &[f32]) -> Vec<f64> {
    products
        .chunks_exact(bias.len())
        .flat_map(|row| sums(row, bias))
        .collect()
}

/// The epsilon of the norms.
pub(crate) const EPS: f32 = 1e-6;

/// The factor by which a norm multiplies a row, before the weight.
pub(crate) fn norm_factor(row: &[f32]) -> f64 {
    let mean = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / row.len() as f64;
    1.0 / (mean + f64::from(EPS)).sqrt()
}

/// Rows normalized in f64, as f32.
pub(crate) fn rms_norm(x: &[f32], weight: &[f32]) -> Vec<f32> {
    x.chunks_exact(weight.len())
        .flat_map(|row| {
            let factor = norm_factor(row);
            row.iter()
                .zip(weight)
                .map(move |(&v, &w)| (f64::from(v) * factor * f64::from(w)) as f32)
        })
        .collect()
}

/// Rows of f16 activations on the device, one after the other.
pub(crate) struct HalfRows {
    /// The values that f16 holds.
    pub(crate) exact: Vec<f64>,
    pub(crate) device: DeviceBuffer,
}

impl HalfRows {
    pub(crate) fn new(gpu: &Arc<Gpu>, values: &[f32]) -> HalfRows {
        HalfRows {
            exact: rounded(values),
            device: upload(gpu, &as_f16(values)),
        }
    }

    pub(crate) fn input(&self) -> Input<'_> {
        Input::Plain(&self.device, 1.0)
    }
}

/// An NVFP4 weight and its bias, on the host and on the device.
pub(crate) struct Weight {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// The values that the codes and scales decode to.
    pub(crate) values: Vec<f32>,
    pub(crate) device: Matrix,
    bias: Vec<f32>,
    device_bias: DeviceBuffer,
}

impl Weight {
    pub(crate) fn new(gpu: &Arc<Gpu>, rows: usize, cols: usize, seed: u64) -> Weight {
        let values: Vec<f32> = normal(seed, rows * cols).iter().map(|v| v * 0.05).collect();
        let host = nvfp4::quantize(&values, rows, cols, &QuantizeOptions::default()).unwrap();
        let device = Matrix::nvfp4(gpu, rows, cols, host.global, &mut |range, codes, scales| {
            copy_nvfp4_rows(&host, range, codes, scales);
            Ok(())
        })
        .unwrap();
        let bias = normal(seed + 1000, rows);
        Weight {
            rows,
            cols,
            values: host.dequantize().unwrap(),
            device,
            device_bias: upload(gpu, &bias),
            bias,
        }
    }

    pub(crate) fn plain(&self) -> Biased<'_> {
        (&self.device, None)
    }

    pub(crate) fn biased(&self) -> Biased<'_> {
        (&self.device, Some(&self.device_bias))
    }

    /// x wᵀ in f64.
    pub(crate) fn product(&self, x: &[f64]) -> Vec<f64> {
        product(x, &self.values, self.cols)
    }

    /// x wᵀ + bias in f64.
    pub(crate) fn biased_product(&self, x: &[f64]) -> Vec<f64> {
        with_bias(&self.product(x), &self.bias)
    }
}

/// Copies some rows of a quantized matrix, as a weight that is loaded asks for them.
pub(crate) fn copy_nvfp4_rows(
    from: &Nvfp4,
    rows: Range<usize>,
    codes: &mut [u8],
    scales: &mut [u8],
) {
    let (code_row, scale_row) = (from.cols / 2, from.cols / BLOCK);
    codes.copy_from_slice(&from.codes[rows.start * code_row..rows.end * code_row]);
    scales.copy_from_slice(&from.scales[rows.start * scale_row..rows.end * scale_row]);
}

/// The types of dense weights.
pub(crate) const DENSE: [WeightType; 3] = [WeightType::F32, WeightType::F16, WeightType::BF16];

/// A dense weight on the device.
pub(crate) struct Dense {
    /// The values that its type holds.
    pub(crate) values: Vec<f32>,
    pub(crate) device: Matrix,
}

impl Dense {
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        [rows, cols]: [usize; 2],
        storage: WeightType,
        values: &[f32],
    ) -> Dense {
        let dtype = match storage {
            WeightType::F32 => DType::F32,
            WeightType::F16 => DType::F16,
            WeightType::BF16 => DType::BF16,
            _ => panic!("{storage:?} is not dense"),
        };
        let row = cols * dtype.bytes();
        let mut bytes = vec![0; rows * row];
        dtype.from_f32(values, &mut bytes).unwrap();
        let mut held = vec![0f32; rows * cols];
        dtype.to_f32(&bytes, &mut held).unwrap();
        let device = Matrix::dense(gpu, rows, cols, storage, &mut |range, out| {
            out.copy_from_slice(&bytes[range.start * row..range.end * row]);
            Ok(())
        })
        .unwrap();
        Dense {
            values: held,
            device,
        }
    }
}

pub(crate) fn shapes(matrices: &[Biased<'_>]) -> Vec<MatrixShape> {
    matrices.iter().map(|(w, _)| w.shape()).collect()
}

/// The products of `x` with several biased weights, in f64. A row has the features of each weight, one weight after the other.
pub(crate) fn joined_products(weights: &[Weight], x: &[f64]) -> Vec<f64> {
    let parts: Vec<Vec<f64>> = weights.iter().map(|w| w.biased_product(x)).collect();
    let mut joined = Vec::new();
    for r in 0..x.len() / weights[0].cols {
        for (w, part) in weights.iter().zip(&parts) {
            joined.extend_from_slice(&part[r * w.rows..][..w.rows]);
        }
    }
    joined
}

/// silu(x gateᵀ) · x upᵀ in f64, divided as the kernels divide it.
pub(crate) fn swiglu(x: &[f64], gate: &Weight, up: &Weight) -> Vec<f64> {
    let divisor = f64::from(Glu::default().divisor);
    let (gate, up) = (gate.product(x), up.product(x));
    let both = gate.iter().zip(&up);
    both.map(|(g, u)| g / (1.0 + (-g).exp()) * u / divisor)
        .collect()
}

/// A call of [`cuda::linear`], which stores f32 and leaves no gap between rows unless it is told otherwise.
pub(crate) struct Product<'a> {
    gpu: &'a Arc<Gpu>,
    scratch: &'a LinearScratch,
    input: Input<'a>,
    m: usize,
    matrices: Vec<Biased<'a>>,
    output: Output,
    stride: usize,
}

impl<'a> Product<'a> {
    /// The product of `m` rows with matrices.
    pub(crate) fn of(
        gpu: &'a Arc<Gpu>,
        scratch: &'a LinearScratch,
        input: Input<'a>,
        m: usize,
        matrices: &[Biased<'a>],
    ) -> Product<'a> {
        Product {
            gpu,
            scratch,
            input,
            m,
            matrices: matrices.to_vec(),
            output: Output::F32,
            stride: shapes(matrices).iter().map(|shape| shape.rows).sum(),
        }
    }

    /// Sets the epilogue.
    pub(crate) fn output(mut self, output: Output) -> Product<'a> {
        self.output = output;
        self
    }

    /// Sets the number of elements from the start of a row to the start of the next.
    pub(crate) fn stride(mut self, stride: usize) -> Product<'a> {
        self.stride = stride;
        self
    }

    #[track_caller]
    pub(crate) fn write(&self, out: &DeviceBuffer) {
        cuda::linear(
            self.gpu,
            self.input,
            self.m,
            &self.matrices,
            self.output,
            out,
            self.stride,
            self.scratch,
        )
        .unwrap();
    }

    /// The result in f32, written over poison.
    #[track_caller]
    pub(crate) fn f32s(&self) -> Vec<f32> {
        let out = poisoned(self.gpu, self.m * self.stride * 4);
        self.write(&out);
        read_f32(&out, self.m * self.stride)
    }

    /// The result in f16, written over poison.
    #[track_caller]
    pub(crate) fn f16s(&self) -> Vec<f32> {
        let out = poisoned(self.gpu, self.m * self.stride * 2);
        self.write(&out);
        read_f16(&out, self.m * self.stride)
    }

    /// The gated linear unit of two matrices in a layout, written over poison; its rows one after the other.
    #[track_caller]
    pub(crate) fn gated(mut self, layout: Layout) -> Vec<f32> {
        self.stride /= 2;
        self.output = layout.glu(Glu::default());
        let out = poisoned(self.gpu, layout.elements(self.m, self.stride) * 2);
        self.write(&out);
        read_rows(layout, &out, self.m, self.stride)
    }
}

/// Logits of every position, from one call and token by token.
pub(crate) fn logits(model: &Served, tokens: &[u32]) -> (Vec<f32>, Vec<f32>) {
    let (mut scratch, mut all, mut each, mut one) =
        (Scratch::new(), Vec::new(), Vec::new(), Vec::new());
    let new = || model.sequence(4 * tokens.len(), KvType::F16).unwrap();
    model
        .forward(tokens, &mut new(), &mut scratch, Logits::All, &mut all)
        .unwrap();
    let mut cache = new();
    for &token in tokens {
        model
            .forward(&[token], &mut cache, &mut scratch, Logits::Last, &mut one)
            .unwrap();
        each.extend_from_slice(&one);
    }
    (all, each)
}

pub(crate) fn with_context(context: usize) -> SessionOptions {
    SessionOptions {
        context,
        ..SessionOptions::default()
    }
}

/// A session that has run a prompt.
pub(crate) fn prompted(model: &Arc<Served>, options: &SessionOptions, prompt: &[u32]) -> Session {
    let mut session = Session::new(model.clone(), options).unwrap();
    session.prefill(prompt).unwrap();
    session
}

/// The tokens that a session generates, whatever tokens the model stops at.
pub(crate) fn generated(
    session: &mut Session,
    max_tokens: usize,
    sampling: &SamplingOptions,
) -> Vec<u32> {
    let options = GenerateOptions {
        max_tokens,
        sampling: sampling.clone(),
        ignore_model_stops: true,
        ..GenerateOptions::default()
    };
    let answer = session.generate(&options, &mut |_| ControlFlow::Continue(()));
    answer.unwrap().tokens
}
