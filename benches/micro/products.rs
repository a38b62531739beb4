//! The library's GEMMs with few and many rows, compared with dense f16 weights, and its attention in prefill: whether the time stays that
//! of reading the weights as rows are added, and which share of the tensor cores' rate many rows reach.

use std::sync::Arc;

use NVFP4::base::memory::Tag;
use NVFP4::cuda::{
    self, CachedPages, DeviceBuffer, Gpu, Graph, Heads, Input, LinearScratch, Matrix, Output, PAGE,
    PromptRows, RowHeads,
};
use NVFP4::format::random;

use super::{Figures, Mark, time, zeros};
use NVFP4::tensor::{AttentionShape, KvType, WeightType};

/// Output features and K of the products of a Qwen3-4B layer.
const SHAPES: [(&str, usize, usize); 4] = [
    ("qkv", 6144, 2560),
    ("o", 2560, 4096),
    ("gate_up", 19_456, 2560),
    ("down", 2560, 9728),
];
/// Several times the L2 cache.
const ROTATION: usize = 300 << 20;
/// The allowed ratio of the times of 16 rows and one row.
const FLAT: f64 = 1.15;
/// The required share of the rate of dense weights, with many rows.
const NEAR_DENSE: f64 = 0.9;

fn noise(out: &mut [u8], seed: u64, each: impl Fn(u64) -> [u8; 8]) {
    for (i, out) in out.chunks_mut(8).enumerate() {
        out.copy_from_slice(&each(random::bits(seed, i as u64))[..out.len()]);
    }
}

/// f16 values between 1/4 and 4, of both signs.
fn halves(bits: u64) -> [u8; 8] {
    const SIGN_AND_FRACTION: u64 = 0x83ff_83ff_83ff_83ff;
    const TWO_BITS: u64 = 0x0c00_0c00_0c00_0c00;
    const QUARTER: u64 = 0x3400_3400_3400_3400;
    ((bits & SIGN_AND_FRACTION) + QUARTER + (bits & TWO_BITS)).to_le_bytes()
}

fn nvfp4(gpu: &Arc<Gpu>, rows: usize, k: usize, seed: u64) -> Matrix {
    Matrix::nvfp4(gpu, rows, k, 1.0, &mut |_, codes, scales| {
        noise(codes, seed, u64::to_le_bytes);
        // Between 1/4 and 4, as weights have them.
        noise(scales, seed + 1, |bits| {
            bits.to_le_bytes().map(|b| 0x28 + b % 0x20)
        });
        Ok(())
    })
    .unwrap()
}

fn dense(gpu: &Arc<Gpu>, rows: usize, k: usize, seed: u64) -> Matrix {
    Matrix::dense(gpu, rows, k, WeightType::F16, &mut |_, bytes| {
        noise(bytes, seed, halves);
        Ok(())
    })
    .unwrap()
}

fn activations(gpu: &Arc<Gpu>, count: usize) -> DeviceBuffer {
    let mut bytes = vec![0u8; 2 * count];
    noise(&mut bytes, 5, halves);
    DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, &bytes).unwrap()
}

/// Seconds of one GEMM, each with different weights.
fn product(
    gpu: &Arc<Gpu>,
    weights: &[Matrix],
    x: &DeviceBuffer,
    m: usize,
    out: &DeviceBuffer,
    scratch: &LinearScratch,
) -> f64 {
    let enqueue = || {
        weights.iter().try_for_each(|w| {
            let input = Input::Plain(x, 1.0);
            cuda::linear(
                gpu,
                input,
                m,
                &[(w, None)],
                Output::F32,
                out,
                w.rows(),
                scratch,
            )
        })
    };
    enqueue().unwrap();
    time(gpu, &Graph::record(gpu, enqueue).unwrap(), 7) / weights.len() as f64
}

/// Enough different matrices to exceed the caches together.
fn rotation(bytes: usize, make: impl Fn(u64) -> Matrix) -> Vec<Matrix> {
    (0..ROTATION.div_ceil(bytes).max(2) as u64)
        .map(|i| make(2 * i))
        .collect()
}

/// Few rows: 1 to 128.
pub(super) fn few_rows(gpu: &Arc<Gpu>, figures: &mut Figures) {
    for (name, n, k) in SHAPES {
        let quantized = rotation(n * k * 9 / 16, |seed| nvfp4(gpu, n, k, seed));
        let plain = rotation(n * k * 2, |seed| dense(gpu, n, k, seed));
        let scratch = LinearScratch::new(gpu, 4096, k, n * k * 2).unwrap();
        let (x, out) = (activations(gpu, 128 * k), zeros(gpu, 128 * n * 4));
        let mut one = 0.0;
        for m in [1, 2, 4, 8, 16, 17, 32, 64, 128] {
            let seconds = product(gpu, &quantized, &x, m, &out, &scratch);
            // Below this, dense weights have a kernel that is not made for speed; cuBLASLt pads anyway.
            let padded = m.max(cuda::SKINNY_ROWS + 1);
            let beside = product(gpu, &plain, &x, padded, &out, &scratch);
            figures.add(format!("{name}, {m} rows"), seconds * 1e6, "us", None);
            if m == 1 {
                one = seconds;
            }
            if m == 16 {
                let mark = Some(Mark::AtMost(FLAT));
                figures.add(format!("{name}, 16 rows to 1"), seconds / one, "", mark);
            }
            let mark = Some(Mark::AtLeast(1.0));
            figures.add(
                format!("{name}, {m} rows, times as fast as cuBLASLt on f16"),
                beside / seconds,
                "x",
                mark,
            );
        }
    }
}

/// Many rows: 512 to 8192, and attention among them.
pub(super) fn many_rows(gpu: &Arc<Gpu>, figures: &mut Figures) {
    for (name, n, k) in SHAPES {
        let quantized = [nvfp4(gpu, n, k, 1), nvfp4(gpu, n, k, 3)];
        let plain = [dense(gpu, n, k, 1), dense(gpu, n, k, 3)];
        let scratch = LinearScratch::new(gpu, 4096, k, n * k * 2).unwrap();
        for m in [512, 2048, 4096, 8192] {
            let (x, out) = (activations(gpu, m * k), zeros(gpu, m * n * 4));
            let rate = |weights: &[Matrix]| {
                (2 * m * n * k) as f64 / product(gpu, weights, &x, m, &out, &scratch) / 1e12
            };
            let (fast, full) = (rate(&quantized), rate(&plain));
            figures.add(format!("{name}, {m} rows"), fast, "TFLOP/s", None);
            figures.add(
                format!("{name}, {m} rows, dense f16"),
                full,
                "TFLOP/s",
                None,
            );
            let mark = (m == 4096).then_some(Mark::AtLeast(NEAR_DENSE));
            figures.add(format!("{name}, {m} rows, of dense"), fast / full, "", mark);
        }
    }
    const HEADS: usize = 32;
    const KV_HEADS: usize = 8;
    const DIM: usize = 128;
    let ones = DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, &[1f32; DIM]).unwrap();
    let heads = Heads {
        shape: AttentionShape {
            heads: HEADS,
            kv_heads: KV_HEADS,
            dim: DIM,
            scale: 0.088,
            window: None,
            score_cap: None,
        },
        row: RowHeads::QueriesKeysValues,
        value_norm: false,
        q_norm: Some(&ones),
        k_norm: Some(&ones),
        sinks: None,
        frequencies: Some(&ones),
        rotary_dim: DIM,
        attention_factor: 1.0,
        eps: 1e-6,
        rotates_first: false,
    };
    for m in [512, 2048, 4096, 8192] {
        let count = m / PAGE;
        let shape = heads.kv(KvType::F16);
        let arena = zeros(gpu, count * shape.bytes());
        let numbers: Vec<u32> = (0..count as u32).collect();
        let table = DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, &numbers).unwrap();
        let pages = CachedPages {
            arena: arena.address(),
            block_bytes: shape.bytes(),
            offset: 0,
            shape,
            table: &table,
            stride: count,
            sequence: 0,
            layer: 0,
            unfit: None,
        };
        let values: Vec<f32> = (0..(m * (HEADS + 2 * KV_HEADS) * DIM) as u64)
            .map(|i| (random::bits(6, i) % 2001) as f32 / 1000.0 - 1.0)
            .collect();
        let qkv = DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, &values).unwrap();
        let (q, out) = (
            zeros(gpu, m * HEADS * DIM * 2),
            zeros(gpu, m * HEADS * DIM * 2),
        );
        cuda::store(gpu, &heads, &pages, &qkv, 0, m, 0, &q).unwrap();
        let rows = PromptRows {
            at: 0,
            rows: m,
            first_position: 0,
            fixed: false,
        };
        let enqueue = || cuda::prefill(gpu, &heads, &pages, &q, rows, &out);
        enqueue().unwrap();
        let seconds = time(gpu, &Graph::record(gpu, enqueue).unwrap(), 7);
        // Half of the square, and two products.
        let operations = (2 * HEADS * DIM * m * (m + 1)) as f64;
        figures.add(
            format!("attention, {m} rows"),
            operations / seconds / 1e12,
            "TFLOP/s",
            None,
        );
    }
}
