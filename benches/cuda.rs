//! Micro-benchmarks of the GPU kernels that decoding stands on, at the shapes of Qwen3-4B: `cargo bench --bench cuda -- [NAME ...]`, where
//! names are those of products, `chain` and `attention`.
//!
//! And quantization of a large matrix, against the rate at which the device copies: bytes read and written over time.
//!
//! Each kernel runs over as many different weights as make its inputs larger than the caches, as one recorded graph, so that
//! launches follow each other as they do in a token. Medians of repeated replays; rates are weight bytes over time.

use std::iter;
use std::sync::Arc;
use std::time::Instant;

use NVFP4::base::memory::Tag;
use NVFP4::cuda::{
    self, Activation, Biased, CachedPages, DecodePlan, DecodedRows, DeviceBuffer, FusedNorm,
    GemmPlan, Glu, Gpu, Graph, Hardware, Heads, Input, InputForm, KvShape, Layout, LinearScratch,
    Matrix, MatrixShape, NormScratch, Output, PAGE, Pinned, RowHeads, ScaledTile, SplitKv,
    SplitKvWorkspace, TileKernel, Way,
};
use NVFP4::format::nvfp4::{BLOCK, Levels, NonFinite, QuantizeOptions};
use NVFP4::format::random;
use NVFP4::format::swizzle::ScaleLayout;
use NVFP4::ops::Device;
use NVFP4::ops::sample::{self, Choice, SamplingOptions};
use NVFP4::ops::tensors;
use NVFP4::tensor::{AttentionShape, DType, KvType, Tensor};

/// The gated activation after gate and up.
const GLU: Glu = Glu {
    activation: Activation::Silu,
    divisor: 16,
};
/// Several times the L2 cache.
const ROTATION: usize = 400 << 20;
const REPLAYS: usize = 21;
/// Consecutive replays, which share the 10 us of the host's wait.
const IN_A_ROW: usize = 8;
/// Rounds of alternating measurements.
const ROUNDS: usize = 11;
/// Query heads, key/value heads, and elements of one.
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;

/// A kernel of a decode step: its name, output features of each matrix, K, and the epilogue.
struct Shape {
    name: &'static str,
    rows: &'static [usize],
    k: usize,
    output: Output,
}

const SHAPES: [Shape; 5] = [
    Shape {
        name: "qkv",
        rows: &[4096, 1024, 1024],
        k: 2560,
        output: Output::F32,
    },
    Shape {
        name: "o",
        rows: &[2560],
        k: 4096,
        output: Output::Add,
    },
    Shape {
        name: "gate_up",
        rows: &[9728, 9728],
        k: 2560,
        output: Output::Glu(GLU),
    },
    Shape {
        name: "down",
        rows: &[2560],
        k: 9728,
        output: Output::Add,
    },
    Shape {
        name: "lm_head",
        rows: &[151_936],
        k: 2560,
        output: Output::F32,
    },
];

fn matrix(gpu: &Arc<Gpu>, rows: usize, k: usize, seed: u64) -> Matrix {
    Matrix::nvfp4(gpu, rows, k, 1.0, &mut |range, codes, scales| {
        let start = (range.start * k / 16) as u64;
        for (i, out) in codes.chunks_exact_mut(8).enumerate() {
            out.copy_from_slice(&random::bits(seed, start + i as u64).to_le_bytes());
        }
        // Scales between 1/4 and 4, as for weights.
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
            for _ in 0..IN_A_ROW {
                graph.launch().unwrap();
            }
            gpu.synchronize().unwrap();
            start.elapsed().as_secs_f64() / IN_A_ROW as f64
        })
        .skip(2)
        .collect();
    times.sort_by(f64::total_cmp);
    times[REPLAYS / 2]
}

fn main() {
    let only: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(e) => return println!("SKIPPED no CUDA device: {e}"),
    };
    let bandwidth = cuda::read_bandwidth(&gpu).unwrap();
    println!("{gpu:?}: reads {:.0} GB/s", bandwidth / 1e9);
    if only.is_empty() || only.iter().any(|o| o == "scaled_mm") {
        scaled_mm(&gpu);
    }
    products(&gpu, bandwidth, &only);
    if only.is_empty() || only.iter().any(|o| o == "quantize") {
        quantize(&gpu);
    }
    if only.is_empty() || only.iter().any(|o| o == "chain") {
        chain(&gpu);
    }
    if only.is_empty() || only.iter().any(|o| o == "attention") {
        attention(&gpu);
    }
    if only.is_empty() || only.iter().any(|o| o == "sampling") {
        sampling(&gpu);
    }
}

/// W4A4 GEMMs at the shapes of a layer, alternating with cuBLASLt's GEMMs of dense bf16 matrices of the same shape.
fn scaled_mm(gpu: &Arc<Gpu>) {
    println!(
        "{:9} {:>5} {:>14} {:>14} {:>9} {:>8} {:>9} {:>8} {:>6}",
        "scaled_mm", "m", "n x k", "way", "us", "TFLOP/s", "bf16 us", "TFLOP/s", "ratio"
    );
    let bytes = |count: usize, seed: u64, change: fn(u64) -> u64| {
        let words: Vec<u64> = (0..count.div_ceil(8) as u64)
            .map(|i| change(random::bits(seed, i)))
            .collect();
        DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, &words).unwrap()
    };
    let codes = |rows: usize, k: usize, seed| bytes(rows * k / 2, seed, |bits| bits);
    // Between 1/4 and 4.
    let scales = |rows: usize, k: usize, seed| {
        bytes(rows * k / BLOCK, seed, |bits| {
            (bits & 0x1f1f_1f1f_1f1f_1f1f) + 0x2828_2828_2828_2828
        })
    };
    // Magnitudes between 1/2 and 2, of either sign.
    let dense = |rows: usize, k: usize, seed| {
        bytes(rows * k * 2, seed, |bits| {
            bits & 0x80ff_80ff_80ff_80ff | 0x3f00_3f00_3f00_3f00
        })
    };
    for (n, k) in [(6144, 2560), (2560, 4096), (19_456, 2560), (2560, 9728)] {
        let copies = (ROTATION / 2).div_ceil(n * k / 2) as u64;
        let all_b: Vec<_> = (0..copies)
            .map(|c| (codes(n, k, 3 + 2 * c), scales(n, k, 4 + 2 * c)))
            .collect();
        let all_w: Vec<_> = (0..copies).map(|c| dense(n, k, 6 + c)).collect();
        for m in [1, 16, 64, 128, 256, 512, 1024, 4096] {
            // Weights come from memory where they are most of the work.
            let copies = if m < 256 { all_b.len() } else { 1 };
            let (b, w) = (&all_b[..copies], &all_w[..copies]);
            let (a_codes, a_scales) = (codes(m, k, 1), scales(m, k, 2));

            let operand = |codes, scales, rows| {
                cuda::Operand::new(codes, scales, ScaleLayout::Linear, rows, k, 1e-3).unwrap()
            };
            let a = operand(&a_codes, &a_scales, m);
            let x = dense(m, k, 5);

            let out = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, m * n * 2).unwrap();
            let ours = |way: Way| {
                for (codes, scales) in b {
                    let b = operand(codes, scales, n);
                    cuda::scaled_mm_by(gpu, &a, &b, DType::BF16, &out, way).unwrap();
                }
            };
            let theirs = || {
                for w in w {
                    cuda::dense_mm(gpu, &x, w, (m, n, k), DType::BF16, &out).unwrap();
                }
            };
            let seconds = |run: &dyn Fn()| {
                /// Enough to hide the host's work.
                const RUNS: usize = 8;

                gpu.synchronize().unwrap();
                let start = Instant::now();
                (0..RUNS.div_ceil(copies)).for_each(|_| run());
                gpu.synchronize().unwrap();
                start.elapsed().as_secs_f64() / (RUNS.div_ceil(copies) * copies) as f64
            };
            let has_library = gpu.blas_unavailable().is_none();
            let chosen = Way::choose(m, n, gpu.arch(), gpu.multiprocessors(), has_library);
            let ways = [
                (Way::Kernel(ScaledTile::Small), m <= 64),
                (Way::Kernel(ScaledTile::Medium), m <= 512),
                (Way::Kernel(ScaledTile::Large), m >= 64),
                (Way::Library, m >= 64 && has_library),
            ];
            for (way, _) in ways.into_iter().filter(|(_, sensible)| *sensible) {
                ours(way);
                let mut times: [Vec<f64>; 2] = Default::default();
                for _ in 0..ROUNDS {
                    times[0].push(seconds(&|| ours(way)));
                    if has_library {
                        times[1].push(seconds(&theirs));
                    }
                }
                let [time, dense] = times.map(|mut times| {
                    times.sort_by(f64::total_cmp);
                    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
                });
                let rate = |seconds: f64| 2.0 * (m * n * k) as f64 / seconds / 1e12;
                println!(
                    "{:9} {m:5} {:>14} {:>14} {:9.1} {:8.1} {:9.1} {:8.1} {:6.2}",
                    if way == chosen { "* chosen" } else { "" },
                    format!("{n} x {k}"),
                    match way {
                        Way::Kernel(tile) => format!("{tile:?}"),
                        Way::Library => "library".into(),
                    },
                    time * 1e6,
                    rate(time),
                    dense * 1e6,
                    rate(dense),
                    dense / time
                );
            }
        }
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
        // As called by a host program: outputs allocated, order with the default stream, and the wait for the result.
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
                    gpu.synchronize().unwrap();
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

fn products(gpu: &Arc<Gpu>, bandwidth: f64, only: &[String]) {
    println!(
        "{:8} {:>3} {:>22} {:>9} {:>7}",
        "kernel", "m", "how", "us", "of read"
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
            Output::Glu(_) => shape.rows[0],
            _ => shape.rows.iter().sum(),
        };
        let x = floats(gpu, 128 * shape.k, 2);
        let out = DeviceBuffer::zeroed(
            gpu,
            Tag::DeviceScratch,
            128 * shape.rows.iter().sum::<usize>() * 4,
        )
        .unwrap();
        let scratch = LinearScratch::new(gpu, 128, shape.k, 0).unwrap();
        let matrices: Vec<Vec<_>> = weights
            .iter()
            .map(|set| set.iter().map(|w| (w, None)).collect())
            .collect();
        let report = |m: usize, how: &str, enqueue: &dyn Fn() -> NVFP4::base::Result<()>| {
            enqueue().unwrap();
            let graph = Graph::record(gpu, enqueue).unwrap();
            let seconds = time(gpu, &graph) / copies as f64;
            println!(
                "{:8} {m:3} {how:>22} {:9.2} {:6.0}%",
                shape.name,
                seconds * 1e6,
                100.0 * bytes as f64 / seconds / bandwidth
            );
        };
        for m in [1, 2, 4, 8, 16] {
            let hardware = Hardware::of(gpu).unwrap();
            let layout = Layout::taken(&hardware, m);
            let input = layout.input(&x, 1.0);
            let output = match shape.output {
                Output::Glu(glu) => layout.glu(glu),
                other => other,
            };
            let shapes = shapes(&matrices[0]);
            let plan = GemmPlan::by_skinny(&hardware, m, &shapes, output, input.form()).unwrap();
            report(m, &format!("fused, {plan}"), &|| {
                for set in &matrices {
                    plan.enqueue(gpu, input, set, output, &out, features, &scratch)?;
                }
                Ok(())
            });
        }
        // The kernels before and after differ from the fused one's.
        let output = match shape.output {
            Output::Glu(_) => Output::F16,
            other => other,
        };
        let stride: usize = shape.rows.iter().sum();
        for m in [8, 16, 32, 64, 128] {
            for &kernel in TileKernel::all(gpu.arch()) {
                let (input, output) = match (kernel, shape.output) {
                    (TileKernel::Tiled, _) => (Input::Plain(&x, 1.0), output),
                    (TileKernel::Wide, Output::Glu(glu)) => {
                        (Input::FragmentMajor(&x, 1.0), Output::GluFragmentMajor(glu))
                    }
                    (TileKernel::Wide, _) => (Input::FragmentMajor(&x, 1.0), output),
                };
                report(m, &format!("{kernel:?}").to_lowercase(), &|| {
                    for set in &matrices {
                        cuda::tiled(gpu, kernel, input, m, set, output, &out, stride, &scratch)?;
                    }
                    Ok(())
                });
            }
        }
    }
}

/// The kernels of 36 layers in the order of a decode step, also with kinds of them left out: the cost of each kind in its place.
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
    for batch in [1, 8, 64] {
        let cache = Cache::new(gpu, h.kv(KvType::F16), LAYERS, 2, batch);
        let positions =
            DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, &vec![length as u32; batch]).unwrap();
        let rows = SplitKvWorkspace::new(gpu, SplitKvWorkspace::sizes(HEADS, KV_HEADS, DIM), batch)
            .unwrap();
        let (x, qkv, attended, mlp, gate_up) = (
            floats(gpu, batch * 2560, 1),
            floats(gpu, batch * 6144, 2),
            floats(gpu, batch * 2048, 3),
            floats(gpu, batch * 4864, 4),
            floats(gpu, batch * 9728, 5),
        );
        let scratch = LinearScratch::new(gpu, batch, 9728, 0).unwrap();
        let layout = Layout::taken(&Hardware::of(gpu).unwrap(), batch);
        let normed =
            DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, layout.elements(batch, 2560) * 2)
                .unwrap();
        // Norms are fused where the model fuses them, which is after the first one.
        let norms = NormScratch::new(gpu, 2560).unwrap();
        let norm = |turn| FusedNorm {
            scratch: &norms,
            turn,
            x: &x,
            weight: &hidden_norm,
            eps: 1e-6,
        };
        let fused = |makes: &[Biased<'_>], takes: &[Biased<'_>], output| {
            let (hardware, maker) = (Hardware::of(gpu).unwrap(), makes[0].0.shape());
            let form = InputForm::FusedNorm(layout);
            GemmPlan::before_norm(&hardware, batch, maker, layout).is_some()
                && GemmPlan::find(&hardware, batch, &shapes(takes), output, form).is_some()
        };
        let norm_input = |turn: usize, fused: bool| -> NVFP4::base::Result<Input<'_>> {
            if fused {
                return Ok(Input::FusedNorm(norm(turn), layout));
            }
            let factors = (batch <= cuda::SKINNY_ROWS).then(|| norms.factors(turn));
            cuda::rms_norm(
                gpu,
                &x,
                0,
                &hidden_norm,
                1e-6,
                batch,
                2560,
                &normed,
                layout,
                factors,
            )?;
            Ok(layout.input(&normed, 1.0))
        };
        let add = |input, matrices: &[Biased<'_>], next, fused| match fused {
            true => cuda::linear_add_norm(gpu, input, batch, matrices[0], &norm(next)),
            false => cuda::linear(gpu, input, batch, matrices, Output::Add, &x, 2560, &scratch),
        };
        let enqueue = |wanted: [bool; 5]| -> NVFP4::base::Result<()> {
            for (layer, w) in weights.iter().enumerate() {
                let all = |i: usize| w[i].iter().map(|w| (w, None)).collect::<Vec<_>>();
                let input_fused = fused(&all(3), &all(0), Output::F32);
                let post_fused = fused(&all(1), &all(2), layout.glu(GLU));
                if wanted[0] {
                    cuda::linear(
                        gpu,
                        norm_input(2 * layer, layer > 0 && input_fused)?,
                        batch,
                        &all(0),
                        Output::F32,
                        &qkv,
                        6144,
                        &scratch,
                    )?;
                }
                if wanted[1] {
                    let pages = cache.layer(layer);
                    let (hardware, shape) = (Hardware::of(gpu)?, h.decode_shape(KvType::F16));
                    let plan = DecodePlan::choose(&hardware, shape, batch, length + 1)?;
                    let singles = DecodedRows {
                        qkv: &qkv,
                        positions: &positions,
                        stored: false,
                    };
                    cuda::decode(gpu, &h, &pages, singles, &plan, &rows, &attended, layout)?;
                }
                if wanted[2] {
                    let input = layout.input(&attended, 1.0);
                    add(input, &all(1), 2 * layer + 1, post_fused)?;
                }
                if wanted[3] {
                    let input = norm_input(2 * layer + 1, post_fused)?;
                    let (hardware, shapes) = (Hardware::of(gpu)?, shapes(&all(2)));
                    let (glu, form) = (layout.glu(GLU), input.form());
                    let fused = GemmPlan::find(&hardware, batch, &shapes, glu, form).is_some();
                    let (output, out, stride) = match fused {
                        true => (layout.glu(GLU), &mlp, 9728),
                        false => (Output::F16, &gate_up, 2 * 9728),
                    };
                    cuda::linear(gpu, input, batch, &all(2), output, out, stride, &scratch)?;
                    if !fused {
                        cuda::glu(gpu, GLU, &gate_up, batch, 9728, None, &mlp)?;
                    }
                }
                if wanted[4] {
                    let input = layout.input(&mlp, 1.0);
                    add(input, &all(3), 2 * layer + 2, input_fused)?;
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
        let last_down = [(&weights[LAYERS - 1][3][0], None)];
        let head_fused = fused(&last_down, &[(&head, None)], Output::F32);
        let token = || -> NVFP4::base::Result<()> {
            cuda::embed(gpu, cuda::Table::Device(&head), &tokens, batch, 1.0, &x)?;
            enqueue([true; 5])?;
            cuda::linear(
                gpu,
                norm_input(2 * LAYERS, head_fused)?,
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

/// A cache of zeros with `stride` blocks for each sequence.
struct Cache {
    arena: DeviceBuffer,
    table: DeviceBuffer,
    stride: usize,
    shape: KvShape,
    layers: usize,
}

impl Cache {
    fn new(
        gpu: &Arc<Gpu>,
        shape: KvShape,
        layers: usize,
        stride: usize,
        sequences: usize,
    ) -> Cache {
        let blocks = stride * sequences;
        let numbers: Vec<u32> = (0..blocks as u32).collect();
        let bytes = blocks * layers * shape.bytes();
        Cache {
            arena: DeviceBuffer::zeroed(gpu, Tag::DeviceKvCache, bytes).unwrap(),
            table: DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, &numbers).unwrap(),
            stride,
            shape,
            layers,
        }
    }

    fn layer(&self, layer: usize) -> CachedPages<'_> {
        CachedPages {
            arena: self.arena.address(),
            block_bytes: self.layers * self.shape.bytes(),
            offset: layer * self.shape.bytes(),
            shape: self.shape,
            table: &self.table,
            stride: self.stride,
            sequence: 0,
            layer,
            unfit: None,
        }
    }
}

/// The heads of a layer, with the same norm for queries and keys.
fn layer_heads<'a>(norm: &'a DeviceBuffer, frequencies: &'a DeviceBuffer) -> Heads<'a> {
    Heads {
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
        q_norm: Some(norm),
        k_norm: Some(norm),
        sinks: None,
        frequencies: Some(frequencies),
        rotary_dim: DIM,
        attention_factor: 1.0,
        eps: 1e-6,
        rotates_first: false,
    }
}

fn shapes(matrices: &[Biased<'_>]) -> Vec<MatrixShape> {
    matrices.iter().map(|(w, _)| w.shape()).collect()
}

fn attention(gpu: &Arc<Gpu>) {
    println!(
        "{:10} {:>5} {:>6} {:>50} {:>9} {:>9}",
        "attention", "batch", "length", "kernel", "us", "GB/s"
    );
    let frequencies = floats(gpu, DIM / 2, 4);
    let norm = floats(gpu, DIM, 5);
    let h = layer_heads(&norm, &frequencies);
    for (batch, length) in [
        (1, 128),
        (1, 256),
        (1, 512),
        (1, 1024),
        (1, 2048),
        (1, 4096),
        (1, 32768),
        (8, 128),
        (8, 4096),
        (64, 128),
        (64, 4096),
    ] {
        let layers = (ROTATION / (batch * length * KV_HEADS * DIM * 4)).clamp(1, 36);
        let count = length.div_ceil(PAGE) + 1;
        let cache = Cache::new(gpu, h.kv(KvType::F16), layers, count, batch);
        let positions =
            DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, &vec![length as u32; batch]).unwrap();
        let qkv = floats(gpu, batch * (HEADS + 2 * KV_HEADS) * DIM, 6);
        let out = floats(gpu, batch * HEADS * DIM / 2, 7);
        let rows = SplitKvWorkspace::new(gpu, SplitKvWorkspace::sizes(HEADS, KV_HEADS, DIM), batch)
            .unwrap();
        let (hardware, shape) = (Hardware::of(gpu).unwrap(), h.decode_shape(KvType::F16));
        let chosen = DecodePlan::choose(&hardware, shape, batch, length).unwrap();
        let parts = [1, 2, 4, 8, 16, 32].map(|splits| {
            DecodePlan::divided(&hardware, shape, batch, SplitKv::Splits(splits)).unwrap()
        });
        for plan in iter::once(chosen).chain(parts) {
            let enqueue = || -> NVFP4::base::Result<()> {
                for layer in 0..layers {
                    let pages = cache.layer(layer);
                    let singles = DecodedRows {
                        qkv: &qkv,
                        positions: &positions,
                        stored: false,
                    };
                    let layout = Layout::RowMajor;
                    cuda::decode(gpu, &h, &pages, singles, &plan, &rows, &out, layout)?;
                }
                Ok(())
            };
            enqueue().unwrap();
            let graph = Graph::record(gpu, enqueue).unwrap();
            let seconds = time(gpu, &graph) / layers as f64;
            let bytes = batch * length * KV_HEADS * DIM * 4;
            println!(
                "{:10} {batch:5} {length:6} {:>50} {:9.2} {:9.0}",
                "decode",
                plan.to_string(),
                seconds * 1e6,
                bytes as f64 / seconds / 1e9
            );
        }
    }
}

/// Sampling on the device, compared with a host that reads the logits. The logits count as already computed.
fn sampling(gpu: &Arc<Gpu>) {
    const VOCABULARY: usize = 151_936;
    let warm = SamplingOptions {
        temperature: 0.8,
        ..Default::default()
    };
    let all_of_them = [
        ("all", warm.clone()),
        (
            "top-k 40",
            SamplingOptions {
                top_k: 40,
                ..warm.clone()
            },
        ),
        (
            "top-p 0.95",
            SamplingOptions {
                top_p: 0.95,
                ..warm.clone()
            },
        ),
        (
            "min-p 0.05",
            SamplingOptions {
                min_p: 0.05,
                ..warm.clone()
            },
        ),
        (
            "everything",
            SamplingOptions {
                top_k: 5000,
                top_p: 0.9,
                min_p: 0.01,
                repetition_penalty: 1.1,
                ..warm
            },
        ),
    ];
    for rows in [1, 8, 64] {
        let logits = floats(gpu, rows * VOCABULARY, 11);
        let mut scratch = cuda::DrawScratch::new(gpu, rows, VOCABULARY).unwrap();
        let tokens = DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, rows * 4).unwrap();
        let positions = DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, rows * 4).unwrap();
        let history = Pinned::new(gpu, Tag::Scratch, 8 * rows * 4).unwrap();
        for (name, options) in &all_of_them {
            let choice = Choice {
                options,
                draw: 0,
                history: &[1, 2, 3],
                allowed: None,
            };
            let penalties = options.repetition_penalty != 1.0;
            scratch
                .set(gpu, &vec![choice.rule(); rows], &vec![choice.history; rows])
                .unwrap();
            let enqueue = || {
                cuda::draw(
                    gpu, &logits, rows, VOCABULARY, penalties, &scratch, &tokens, &positions,
                    &history,
                )
            };
            enqueue().unwrap();
            let graph = Graph::record(gpu, enqueue).unwrap();
            println!(
                "draw {rows:3} rows, {name}: {:.1} us",
                time(gpu, &graph) * 1e6
            );
        }
    }
    let logits = floats(gpu, VOCABULARY, 11);
    let mut all = vec![0f32; VOCABULARY];
    let wait = |each: &mut dyn FnMut()| {
        let mut times: Vec<f64> = (0..REPLAYS + 2)
            .map(|_| {
                let start = Instant::now();
                each();
                start.elapsed().as_secs_f64()
            })
            .skip(2)
            .collect();
        times.sort_by(f64::total_cmp);
        times[REPLAYS / 2] * 1e6
    };
    let us = wait(&mut || logits.read(0, &mut all).unwrap());
    println!("all logits: {us:.1} us to read");
    for (name, options) in &all_of_them {
        let choice = Choice {
            options,
            draw: 0,
            history: &[1, 2, 3],
            allowed: None,
        };
        let mut scratch = sample::SampleScratch::default();
        let us = wait(&mut || {
            sample::sample(&all, &choice, &mut scratch).unwrap();
        });
        println!("  and {us:.1} us to draw, {name}");
    }
}
