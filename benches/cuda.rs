//! Micro-benchmarks of the GPU kernels that decoding stands on, at the shapes of Qwen3-4B: `cargo bench --bench cuda -- [plans]`.
//!
//! And quantization of a large matrix, against the rate at which the device copies: bytes read and written over time.
//!
//! Each kernel runs over as many different weights as make its inputs larger than the caches, as one recorded graph, so that
//! launches follow each other as they do in a token. Medians of repeated replays; rates are weight bytes over time.

use std::sync::Arc;
use std::time::Instant;

use NVFP4::base::memory::Tag;
use NVFP4::cuda::{
    self, DeviceBuffer, Gpu, Graph, Heads, Input, LinearScratch, Matrix, Output, PAGE, PageTable,
    Plan, Rows,
};
use NVFP4::format::nvfp4::{BLOCK, Levels, NonFinite, QuantizeOptions};
use NVFP4::format::random;
use NVFP4::ops::Device;
use NVFP4::ops::tensors::{self, ScaleLayout};
use NVFP4::tensor::{DType, Tensor};

/// Several times the second-level cache.
const ROTATION: usize = 400 << 20;
const REPLAYS: usize = 21;
/// Query heads, key/value heads, and elements of one.
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;

/// A kernel of a token: its name, output features of each matrix, K, and what becomes of the product.
struct Shape {
    name: &'static str,
    rows: &'static [usize],
    k: usize,
    output: Output,
    normed: bool,
}

const SHAPES: [Shape; 5] = [
    Shape {
        name: "qkv",
        rows: &[4096, 1024, 1024],
        k: 2560,
        output: Output::F32,
        normed: true,
    },
    Shape {
        name: "o",
        rows: &[2560],
        k: 4096,
        output: Output::Add,
        normed: false,
    },
    Shape {
        name: "gate_up",
        rows: &[9728, 9728],
        k: 2560,
        output: Output::Swiglu,
        normed: true,
    },
    Shape {
        name: "down",
        rows: &[2560],
        k: 9728,
        output: Output::Add,
        normed: false,
    },
    Shape {
        name: "lm_head",
        rows: &[151_936],
        k: 2560,
        output: Output::F32,
        normed: true,
    },
];

fn matrix(gpu: &Arc<Gpu>, rows: usize, k: usize, seed: u64) -> Matrix {
    Matrix::nvfp4(gpu, rows, k, 1.0, &mut |range, codes, scales| {
        let start = (range.start * k / 16) as u64;
        for (i, out) in codes.chunks_exact_mut(8).enumerate() {
            out.copy_from_slice(&random::bits(seed, start + i as u64).to_le_bytes());
        }
        // Scales between 1/4 and 4, as weights have them.
        for (i, out) in scales.iter_mut().enumerate() {
            *out = 0x28 + (random::bits(seed + 1, start + i as u64) % 0x20) as u8;
        }
        Ok(())
    })
    .unwrap()
}

fn floats(gpu: &Arc<Gpu>, count: usize, seed: u64) -> DeviceBuffer {
    let values: Vec<f32> = (0..count as u64)
        .map(|i| (random::bits(seed, i) % 2001) as f32 / 1000.0 - 1.0)
        .collect();
    DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, &values).unwrap()
}

/// Seconds of one replay, the median.
fn time(gpu: &Gpu, graph: &Graph) -> f64 {
    let mut times: Vec<f64> = (0..REPLAYS + 2)
        .map(|_| {
            gpu.synchronize().unwrap();
            let start = Instant::now();
            graph.launch().unwrap();
            gpu.synchronize().unwrap();
            start.elapsed().as_secs_f64()
        })
        .skip(2)
        .collect();
    times.sort_by(f64::total_cmp);
    times[REPLAYS / 2]
}

fn main() {
    let all_plans = std::env::args().any(|a| a == "plans");
    let only: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| a != "plans" && !a.starts_with('-'))
        .collect();
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(e) => return println!("SKIPPED no CUDA device: {e}"),
    };
    let bandwidth = cuda::read_bandwidth(&gpu).unwrap();
    println!("{gpu:?}: reads {:.0} GB/s", bandwidth / 1e9);
    products(&gpu, bandwidth, all_plans, &only);
    if only.is_empty() || only.iter().any(|o| o == "quantize") {
        quantize(&gpu);
    }
    if only.is_empty() || only.iter().any(|o| o == "chain") {
        chain(&gpu);
    }
    if only.is_empty() || only.iter().any(|o| o == "attention") {
        attention(&gpu);
    }
}

/// A matrix of random values of about the size of weights.
fn values(gpu: &Arc<Gpu>, rows: usize, cols: usize, dtype: DType, seed: u64) -> Tensor {
    const AT_ONCE: usize = 4 << 20;
    let block: Vec<f32> = (0..AT_ONCE as u64)
        .map(|i| (random::uniform(seed, i) - 0.5) * 0.2)
        .collect();
    let mut bytes = vec![0; AT_ONCE * dtype.bytes()];
    dtype.from_f32(&block, &mut bytes).unwrap();
    let total = rows * cols * dtype.bytes();
    let mut buffer = DeviceBuffer::uninit(gpu, Tag::DeviceTensor, total).unwrap();
    for at in (0..total).step_by(bytes.len()) {
        buffer.write(at, &bytes).unwrap();
    }
    cuda::tensor(buffer, &[rows, cols], dtype).unwrap()
}

fn quantize(gpu: &Arc<Gpu>) {
    let copies = cuda::copy_bandwidth(gpu).unwrap();
    println!("copies {:.0} GB/s, bytes read and written", copies / 1e9);
    println!(
        "{:10} {:8} {:>26} {:>9} {:>7} {:>8}",
        "quantize", "type", "how", "us", "GB/s", "of copy"
    );
    let (rows, cols) = (8192, 8192);
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let size = rows * cols * dtype.bytes();
        let count = ROTATION.div_ceil(size).max(2);
        let inputs: Vec<Tensor> = (0..count)
            .map(|i| values(gpu, rows, cols, dtype, i as u64))
            .collect();
        let scratch = |bytes| DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, bytes).unwrap();
        let outputs: Vec<_> = (0..count)
            .map(|_| (scratch(rows * cols / 2), scratch(rows * cols / BLOCK)))
            .collect();
        let bytes = size + rows * cols / 2 + rows * cols / BLOCK;
        let line = |what: &str, how: &str, seconds: f64, bytes: usize| {
            let rate = bytes as f64 / seconds;
            println!(
                "{what:10} {:8} {how:>26} {:9.2} {:7.0} {:7.0}%",
                dtype.name(),
                seconds * 1e6,
                rate / 1e9,
                100.0 * rate / copies
            );
        };
        let saturating = |levels| QuantizeOptions {
            levels,
            nonfinite: NonFinite::Saturate,
            ..QuantizeOptions::default()
        };
        for (how, levels, global, swizzled) in [
            ("legacy", Levels::Legacy, None, false),
            ("legacy, swizzled", Levels::Legacy, None, true),
            ("two levels, given global", Levels::Two, Some(1e-4), false),
        ] {
            let options = saturating(levels);
            let enqueue = || -> NVFP4::base::Result<()> {
                for (x, (codes, scales)) in inputs.iter().zip(&outputs) {
                    cuda::quantize(gpu, x, &options, global, swizzled, codes, scales)?;
                }
                Ok(())
            };
            enqueue().unwrap();
            let graph = Graph::record(gpu, enqueue).unwrap();
            line("kernel", how, time(gpu, &graph) / count as f64, bytes);
        }
        // As a host program calls it: outputs allocated, order with the default stream, and the wait for the answer.
        let device = Device::Cuda(gpu.clone());
        for (how, levels) in [("legacy", Levels::Legacy), ("two levels", Levels::Two)] {
            let options = QuantizeOptions {
                levels,
                ..QuantizeOptions::default()
            };
            let mut times: Vec<f64> = (0..REPLAYS * count)
                .map(|i| {
                    gpu.synchronize().unwrap();
                    let start = Instant::now();
                    let x = &inputs[i % count];
                    let q = tensors::quantize(&device, x, &options, ScaleLayout::Linear).unwrap();
                    let seconds = start.elapsed().as_secs_f64();
                    drop(q);
                    seconds
                })
                .collect();
            times.sort_by(f64::total_cmp);
            line("call", how, times[times.len() / 2], bytes);
        }
        let q = tensors::quantize(
            &device,
            &inputs[0],
            &QuantizeOptions::default(),
            ScaleLayout::Linear,
        )
        .unwrap();
        let out = scratch(size);
        let expand = || -> NVFP4::base::Result<()> {
            for _ in 0..count {
                cuda::dequantize(gpu, &q.codes, &q.scales, false, q.global, dtype, &out)?;
            }
            Ok(())
        };
        expand().unwrap();
        let graph = Graph::record(gpu, expand).unwrap();
        line("dequantize", "", time(gpu, &graph) / count as f64, bytes);
    }
}

fn products(gpu: &Arc<Gpu>, bandwidth: f64, all_plans: bool, only: &[String]) {
    println!(
        "{:8} {:>3} {:>22} {:>9} {:>7}",
        "kernel", "m", "plan", "us", "of read"
    );
    for shape in SHAPES
        .iter()
        .filter(|s| only.is_empty() || only.iter().any(|o| o == s.name))
    {
        let bytes: usize = shape
            .rows
            .iter()
            .map(|n| n * shape.k / 2 + n * shape.k / BLOCK)
            .sum();
        let copies = ROTATION.div_ceil(bytes).max(2);
        let weights: Vec<Vec<Matrix>> = (0..copies)
            .map(|c| {
                shape
                    .rows
                    .iter()
                    .enumerate()
                    .map(|(i, &n)| matrix(gpu, n, shape.k, (c * 8 + i) as u64))
                    .collect()
            })
            .collect();
        let features: usize = match shape.output {
            Output::Swiglu => shape.rows[0],
            _ => shape.rows.iter().sum(),
        };
        let norm = floats(gpu, shape.k, 1);
        let x = floats(gpu, 16 * shape.k, 2);
        let out = floats(gpu, 16 * features, 3);
        for m in [1, 4, 8, 16] {
            let chosen = Plan::choose(
                m,
                shape.k,
                shape.rows,
                shape.output,
                gpu.multiprocessors(),
                gpu.shared_limit(),
            )
            .unwrap();
            let mut plans = vec![chosen];
            if all_plans {
                for split in [1, 2, 4, 8] {
                    for groups in 1..=16 / split {
                        for waves in 1..=1 {
                            let warps = split * groups * waves;
                            if (6..=16).contains(&warps) {
                                plans.push(Plan {
                                    split,
                                    groups,
                                    blocks: gpu.multiprocessors() * waves,
                                    ..chosen
                                });
                            }
                        }
                    }
                }
            }
            let mut results: Vec<(f64, Plan)> = Vec::new();
            for plan in plans {
                let enqueue = || -> NVFP4::base::Result<()> {
                    for set in &weights {
                        let matrices: Vec<_> = set.iter().map(|w| (w, None)).collect();
                        let input = if shape.normed {
                            Input::Normed(&x, &norm, 1e-6)
                        } else {
                            Input::Plain(&x, 1.0)
                        };
                        cuda::small(gpu, input, m, &matrices, shape.output, &out, features, plan)?;
                    }
                    Ok(())
                };
                // A plan that asks for more shared memory than there is fails here.
                if enqueue().is_err() {
                    continue;
                }
                let graph = Graph::record(gpu, enqueue).unwrap();
                results.push((time(gpu, &graph) / copies as f64, plan));
            }
            let chosen = results[0];
            let mut best = results.clone();
            best.sort_by(|a, b| a.0.total_cmp(&b.0));
            for (seconds, plan) in [chosen]
                .into_iter()
                .chain(best.into_iter().take(if all_plans { 4 } else { 0 }))
            {
                println!(
                    "{:8} {m:3} {:>22} {:9.2} {:6.0}%",
                    shape.name,
                    format!(
                        "{}x{}x{} r{}",
                        plan.split, plan.groups, plan.blocks, plan.rows
                    ),
                    seconds * 1e6,
                    100.0 * bytes as f64 / seconds / bandwidth
                );
            }
        }
    }
    let _ = LinearScratch::new(gpu, 0);
}

/// The kernels of 36 layers in the order of a token, and with kinds of them left out: what each costs where it stands.
fn chain(gpu: &Arc<Gpu>) {
    const LAYERS: usize = 36;
    let weights: Vec<Vec<Vec<Matrix>>> = (0..LAYERS)
        .map(|layer| {
            let kinds = SHAPES[..4].iter().enumerate();
            kinds
                .map(|(s, shape)| {
                    (0..shape.rows.len())
                        .map(|i| {
                            matrix(gpu, shape.rows[i], shape.k, (layer * 64 + s * 8 + i) as u64)
                        })
                        .collect()
                })
                .collect()
        })
        .collect();
    let length = 64;
    let (frequencies, norm, hidden_norm) = (
        floats(gpu, DIM / 2, 4),
        floats(gpu, DIM, 5),
        floats(gpu, 2560, 5),
    );
    let h = layer_heads(&norm, &frequencies);
    let head = matrix(gpu, SHAPES[4].rows[0], SHAPES[4].k, 9999);
    for batch in [1, 8] {
        let pages: Vec<DeviceBuffer> = (0..2 * batch)
            .map(|_| {
                DeviceBuffer::zeroed(gpu, Tag::DeviceKvCache, LAYERS * h.page_bytes()).unwrap()
            })
            .collect();
        let addresses: Vec<u64> = pages.iter().map(DeviceBuffer::address).collect();
        let table = DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, &addresses).unwrap();
        let positions =
            DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, &vec![length as u32; batch]).unwrap();
        let rows = Rows::new(gpu, HEADS, KV_HEADS, DIM, batch).unwrap();
        let (x, qkv, attended, mlp) = (
            floats(gpu, batch * 2560, 1),
            floats(gpu, batch * 6144, 2),
            floats(gpu, batch * 2048, 3),
            floats(gpu, batch * 4864, 4),
        );
        let scratch = LinearScratch::new(gpu, 0).unwrap();
        let enqueue = |wanted: [bool; 5]| -> NVFP4::base::Result<()> {
            for (layer, w) in weights.iter().enumerate() {
                let normed = Input::Normed(&x, &hidden_norm, 1e-6);
                let all = |i: usize| w[i].iter().map(|w| (w, None)).collect::<Vec<_>>();
                if wanted[0] {
                    cuda::linear(
                        gpu,
                        normed,
                        batch,
                        &all(0),
                        Output::F32,
                        &qkv,
                        6144,
                        &scratch,
                    )?;
                }
                if wanted[1] {
                    let pages = PageTable {
                        table: &table,
                        stride: 2,
                        layer,
                    };
                    cuda::decode(
                        gpu, &h, &pages, &qkv, &positions, batch, 1, &rows, &attended,
                    )?;
                }
                if wanted[2] {
                    cuda::linear(
                        gpu,
                        Input::Plain(&attended, 1.0),
                        batch,
                        &all(1),
                        Output::Add,
                        &x,
                        2560,
                        &scratch,
                    )?;
                }
                if wanted[3] {
                    cuda::linear(
                        gpu,
                        normed,
                        batch,
                        &all(2),
                        Output::Swiglu,
                        &mlp,
                        9728,
                        &scratch,
                    )?;
                }
                if wanted[4] {
                    cuda::linear(
                        gpu,
                        Input::Plain(&mlp, 1.0),
                        batch,
                        &all(3),
                        Output::Add,
                        &x,
                        2560,
                        &scratch,
                    )?;
                }
            }
            Ok(())
        };
        let measure = |wanted| {
            enqueue(wanted).unwrap();
            time(gpu, &Graph::record(gpu, || enqueue(wanted)).unwrap()) / LAYERS as f64 * 1e6
        };
        let whole = measure([true; 5]);
        println!("layer at batch {batch}: {whole:.2} us");
        let vocabulary = head.rows();
        let logits = floats(gpu, batch * vocabulary, 8);
        let tokens = DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, 4 * batch).unwrap();
        let best = cuda::Best::new(gpu, batch).unwrap();
        let token = || -> NVFP4::base::Result<()> {
            cuda::embed(gpu, &head, &tokens, batch, &x)?;
            enqueue([true; 5])?;
            cuda::linear(
                gpu,
                Input::Normed(&x, &hidden_norm, 1e-6),
                batch,
                &[(&head, None)],
                Output::F32,
                &logits,
                vocabulary,
                &scratch,
            )?;
            cuda::argmax(gpu, &logits, batch, vocabulary, &best, &tokens, None)
        };
        token().unwrap();
        let graph = Graph::record(gpu, token).unwrap();
        println!("token at batch {batch}: {:.1} us", time(gpu, &graph) * 1e6);
        gpu.synchronize().unwrap();
        let start = Instant::now();
        for _ in 0..50 {
            graph.launch().unwrap();
        }
        let launched = start.elapsed().as_secs_f64();
        gpu.synchronize().unwrap();
        println!(
            "  50 in a row: {:.1} us each, {:.1} us to launch",
            start.elapsed().as_secs_f64() / 50.0 * 1e6,
            launched / 50.0 * 1e6
        );
        for (i, name) in ["qkv", "attention", "o", "gate_up", "down"]
            .into_iter()
            .enumerate()
        {
            let (mut without, mut only) = ([true; 5], [false; 5]);
            (without[i], only[i]) = (false, true);
            println!(
                "  {name:10} costs {:6.2} us there, {:6.2} us by itself",
                whole - measure(without),
                measure(only)
            );
        }
    }
}

/// The heads of a layer, with the same norm for queries and keys.
fn layer_heads<'a>(norm: &'a DeviceBuffer, frequencies: &'a DeviceBuffer) -> Heads<'a> {
    Heads {
        heads: HEADS,
        kv_heads: KV_HEADS,
        dim: DIM,
        q_norm: Some(norm),
        k_norm: Some(norm),
        frequencies,
        attention_factor: 1.0,
        eps: 1e-6,
        scale: 0.088,
    }
}

fn attention(gpu: &Arc<Gpu>) {
    println!(
        "{:10} {:>5} {:>6} {:>6} {:>9} {:>9}",
        "attention", "batch", "length", "parts", "us", "GB/s"
    );
    let frequencies = floats(gpu, DIM / 2, 4);
    let norm = floats(gpu, DIM, 5);
    let h = layer_heads(&norm, &frequencies);
    for (batch, length) in [
        (1, 128),
        (1, 512),
        (1, 1024),
        (1, 4096),
        (1, 32768),
        (8, 128),
        (8, 4096),
        (64, 128),
        (64, 4096),
    ] {
        let layers = (ROTATION / (batch * length * KV_HEADS * DIM * 4)).clamp(1, 36);
        let count = length.div_ceil(PAGE) + 1;
        let pages: Vec<DeviceBuffer> = (0..batch * count)
            .map(|_| {
                DeviceBuffer::zeroed(gpu, Tag::DeviceKvCache, layers * h.page_bytes()).unwrap()
            })
            .collect();
        let addresses: Vec<u64> = pages.iter().map(DeviceBuffer::address).collect();
        let table = DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, &addresses).unwrap();
        let positions =
            DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, &vec![length as u32; batch]).unwrap();
        let qkv = floats(gpu, batch * (HEADS + 2 * KV_HEADS) * DIM, 6);
        let out = floats(gpu, batch * HEADS * DIM / 2, 7);
        let rows = Rows::new(gpu, HEADS, KV_HEADS, DIM, batch).unwrap();
        let chosen = cuda::parts(gpu, HEADS, KV_HEADS, batch, length);
        for parts in [chosen, 1, 2, 4, 8, 16, 32] {
            let enqueue = || -> NVFP4::base::Result<()> {
                for layer in 0..layers {
                    let pages = PageTable {
                        table: &table,
                        stride: count,
                        layer,
                    };
                    cuda::decode(gpu, &h, &pages, &qkv, &positions, batch, parts, &rows, &out)?;
                }
                Ok(())
            };
            enqueue().unwrap();
            let graph = Graph::record(gpu, enqueue).unwrap();
            let seconds = time(gpu, &graph) / layers as f64;
            let bytes = batch * length * KV_HEADS * DIM * 4;
            println!(
                "{:10} {batch:5} {length:6} {parts:6} {:9.2} {:9.0}",
                "decode",
                seconds * 1e6,
                bytes as f64 / seconds / 1e9
            );
        }
    }
}
