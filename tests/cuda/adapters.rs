//! Adapters at run time on a GPU: their kernels against f64, models with them against the processor and against merged weights, mixed
//! batches, recorded steps, the prefix cache, memory, and what is refused.

use std::sync::Arc;

use NVFP4::base::ErrorKind;
use NVFP4::base::memory::{self, Tag};
use NVFP4::cuda::{
    self, AdaptedGateUp, AdaptedGroup, AdaptedOutputs, AdapterFactors, AdapterScratch,
    AdapterTable, AdapterTiles, Biased, DeviceBuffer, GemmPlan, Glu, Gpu, Hardware, InputForm,
    Layout, LinearScratch, NextProjections, Output, SKINNY_ROWS, SharingTurn,
};
use NVFP4::engine::{LoadedAdapter, Served};
use NVFP4::format::nvfp4::QuantizeOptions;
use NVFP4::model::{Device, LoadOptions};
use NVFP4::session::{SamplingOptions, Session, SessionOptions, step};
use NVFP4::tensor::WeightType;

use crate::common::adapters::{Written, merged, modules, two};
use crate::common::{expect_kind, golden, options, some_tokens};
use crate::support::{
    DROPPED, Dense, EXACT, F16, Weight, as_f16, as_f64, assert_close, coarseness, generated, gpu,
    in_layout, normal, poisoned, product, read_f16, read_f32, read_rows, relative_l2, rounded,
    same_bits, shapes, sums, upload,
};

/// A factor pair on the device.
struct Pair {
    a: Dense,
    b: Dense,
    scale: f32,
}

impl Pair {
    fn new(gpu: &Arc<Gpu>, [rank, k, n]: [usize; 3], types: [WeightType; 2], seed: u64) -> Pair {
        let scaled = |seed, count, by: f32| {
            normal(seed, count)
                .iter()
                .map(|v| v * by)
                .collect::<Vec<_>>()
        };
        Pair {
            a: Dense::new(
                gpu,
                [rank, k],
                types[0],
                &scaled(seed, rank * k, 1.0 / (k as f32).sqrt()),
            ),
            b: Dense::new(gpu, [n, rank], types[1], &scaled(seed + 1, n * rank, 0.3)),
            scale: 1.5,
        }
    }

    fn factors(&self) -> AdapterFactors<'_> {
        AdapterFactors {
            a: &self.a.device,
            b: &self.b.device,
            scale: self.scale,
        }
    }

    /// scale * B (A x) of a row, in f64.
    fn of(&self, x: &[f64], k: usize) -> Vec<f64> {
        let low = product(x, &self.a.values, k);
        let added = product(&low, &self.b.values, low.len());
        added.iter().map(|v| v * f64::from(self.scale)).collect()
    }
}

/// The number of the first adapted projection.
const FIRST: usize = 3;

/// The factor pairs of two adapters of these ranks, for projections of these widths with inputs of `k` elements.
fn two_adapters(gpu: &Arc<Gpu>, k: usize, widths: &[usize], ranks: [usize; 2]) -> Vec<Vec<Pair>> {
    let types = [WeightType::BF16, WeightType::F32, WeightType::F16];
    (0..2)
        .map(|adapter| {
            let each = widths.iter().enumerate();
            each.map(|(i, &n)| {
                let types = [types[(adapter + i) % 3], types[(adapter + 2 * i + 1) % 3]];
                let seed = 10 * adapter as u64 + 2 * i as u64 + 1;
                Pair::new(gpu, [ranks[adapter], k, n], types, seed)
            })
            .collect()
        })
        .collect()
}

fn tables_of(gpu: &Arc<Gpu>, adapters: &[Vec<Pair>]) -> Vec<AdapterTable> {
    let of = |pairs: &Vec<Pair>| {
        let mut all = vec![None; FIRST];
        all.extend(pairs.iter().map(|pair| Some(pair.factors())));
        AdapterTable::new(gpu, &all).unwrap()
    };
    adapters.iter().map(of).collect()
}

/// Rows of two adapters and of none, of uneven widths and ranks, in both layouts: added to f32 and f16 outputs, and before a gated unit.
#[test]
fn rows_get_the_products_of_their_factors() {
    let Some(gpu) = gpu() else { return };
    for (rows, k, widths, ranks) in [
        (1, 2560, &[400usize, 128][..], [16, 16]),
        (70, 1552, &[272, 272], [48, 16]),
        (300, 9728, &[200, 200], [16, 64]),
    ] {
        let pairs = two_adapters(&gpu, k, widths, ranks);
        let tables = tables_of(&gpu, &pairs);
        let adapter_of = |row: usize| [Some(0), None, Some(1)][row % 3];
        let of_rows: Vec<u64> = (0..rows)
            .map(|row| adapter_of(row).map_or(0, |i| tables[i].address()))
            .collect();
        let tiles = AdapterTiles::of(&of_rows);
        let mut scratch = AdapterScratch::new(&gpu, rows, k, 64).unwrap();
        scratch.write(&tiles, tiles.count()).unwrap();
        let group = AdaptedGroup {
            scratch: &scratch,
            tiles: tiles.count(),
            rank: 64,
            rows,
            first: FIRST,
            k,
        };
        let values = normal(77, rows * k);
        let (x, width) = (rounded(&values), widths.iter().sum::<usize>());
        let before = normal(78, rows * width);
        // The rows that the kernel takes are those divided by 4.
        let want: Vec<f64> = (0..rows)
            .flat_map(|row| {
                let x: Vec<f64> = x[row * k..][..k].iter().map(|v| 4.0 * v).collect();
                let added: Vec<f64> = match adapter_of(row) {
                    Some(i) => pairs[i].iter().flat_map(|pair| pair.of(&x, k)).collect(),
                    None => vec![0.0; width],
                };
                let before = &before[row * width..][..width];
                let both = before.iter().zip(added);
                both.map(|(&y, d)| f64::from(y) + d).collect::<Vec<f64>>()
            })
            .collect();
        for layout in [Layout::RowMajor, Layout::FragmentMajor] {
            let device = upload(&gpu, &in_layout(layout, &values, rows, k));
            cuda::shrink(&gpu, &group, widths.len(), &device, layout, 4.0).unwrap();
            check_expanded(&gpu, &group, widths, &before, &want, layout);
            if widths[0] == widths[1] {
                check_gated(&gpu, &group, widths[0], &before, &want, layout);
            }
        }
    }
}

/// Adds B times the products in scratch memory to rows `before` them, in f32 and in f16.
fn check_expanded(
    gpu: &Arc<Gpu>,
    group: &AdaptedGroup<'_>,
    widths: &[usize],
    before: &[f32],
    want: &[f64],
    layout: Layout,
) {
    let what = format!("{} rows of {}, {layout:?}", group.rows, group.k);
    let y = upload(gpu, before);
    let outputs = AdaptedOutputs {
        y: &y,
        stride: widths.iter().sum(),
        is_f16: false,
        features: widths,
    };
    cuda::expand(gpu, group, &outputs).unwrap();
    assert_close(&read_f32(&y, want.len()), want, EXACT, &what);
    let y = upload(gpu, &as_f16(before));
    let halves = AdaptedOutputs {
        y: &y,
        is_f16: true,
        ..outputs
    };
    cuda::expand(gpu, group, &halves).unwrap();
    assert_close(&read_f16(&y, want.len()), want, 2.0 * F16, &what);
}

/// Adds them to gate and up, each `wide`, and applies the unit.
fn check_gated(
    gpu: &Arc<Gpu>,
    group: &AdaptedGroup<'_>,
    wide: usize,
    before: &[f32],
    want: &[f64],
    layout: Layout,
) {
    let (rows, what) = (group.rows, format!("{} rows, {layout:?}", group.rows));
    let glu: Vec<f64> = want
        .chunks_exact(2 * wide)
        .flat_map(|row| {
            let pairs = row[..wide].iter().zip(&row[wide..]);
            pairs.map(|(g, u)| g / (1.0 + (-g).exp()) * u / 16.0)
        })
        .collect();
    let gate_up = upload(gpu, before);
    let out = poisoned(gpu, layout.elements(rows, wide) * 2);
    let overflow = upload(gpu, &vec![0u32; rows]);
    let inputs = AdaptedGateUp {
        gate_up: &gate_up,
        is_f16: false,
        width: wide,
        others_are_done: false,
    };
    let (unit, notes) = (Glu::default(), (&overflow, 5));
    cuda::adapted_glu(gpu, group, unit, &inputs, notes, &out, layout).unwrap();
    assert_close(&read_rows(layout, &out, rows, wide), &glu, F16, &what);
    let mut noted = vec![1u32; rows];
    overflow.read(0, &mut noted).unwrap();
    assert_eq!(noted, vec![0; rows], "{what}");
}

/// A product whose rows have one of two adapters, or none.
struct AdaptedProduct<'a> {
    gpu: &'a Arc<Gpu>,
    rows: usize,
    k: usize,
    weights: Vec<Weight>,
    values: Vec<f32>,
    /// The products of each row with all weights, and those of its adapter, in f64.
    want: Vec<f64>,
    tables: Vec<AdapterTable>,
    of_rows: Vec<Option<usize>>,
    /// The factors of `tables`.
    _pairs: Vec<Vec<Pair>>,
}

impl<'a> AdaptedProduct<'a> {
    fn new(
        gpu: &'a Arc<Gpu>,
        (rows, widths, k): (usize, &[usize], usize),
        ranks: [usize; 2],
        of_rows: Vec<Option<usize>>,
    ) -> AdaptedProduct<'a> {
        let weights: Vec<Weight> = (0..)
            .zip(widths)
            .map(|(i, &n)| Weight::new(gpu, n, k, 40 + i))
            .collect();
        let pairs = two_adapters(gpu, k, widths, ranks);
        let values = normal(77, rows * k);
        let x = rounded(&values);
        let want = (0..rows).flat_map(|row| {
            // The rows that the kernel takes are those divided by 4.
            let x: Vec<f64> = x[row * k..][..k].iter().map(|v| 4.0 * v).collect();
            let each = weights.iter().enumerate();
            each.flat_map(|(i, w)| {
                let mut y = w.product(&x);
                if let Some(adapter) = of_rows[row] {
                    let added = pairs[adapter][i].of(&x, k);
                    y.iter_mut().zip(added).for_each(|(y, d)| *y += d);
                }
                y
            })
            .collect::<Vec<f64>>()
        });
        AdaptedProduct {
            want: want.collect(),
            tables: tables_of(gpu, &pairs),
            gpu,
            rows,
            k,
            weights,
            values,
            of_rows,
            _pairs: pairs,
        }
    }

    fn matrices(&self) -> Vec<Biased<'_>> {
        self.weights.iter().map(Weight::plain).collect()
    }

    /// The layout of rows that GEMMs take.
    fn layout(&self) -> Layout {
        Layout::taken(&Hardware::of(self.gpu).unwrap(), self.rows)
    }

    /// Runs the product several times over copies of `before`, as the launches of passes of two.
    /// `None` if no kernel serves them.
    fn run(&self, output: Output, before: &[u8], stride: usize) -> Option<[DeviceBuffer; 3]> {
        let addresses: Vec<u64> = self
            .of_rows
            .iter()
            .map(|of| of.map_or(0, |i| self.tables[i].address()))
            .collect();
        let (gpu, rows, k) = (self.gpu, self.rows, self.k);
        let tiles = AdapterTiles::of(&addresses);
        let mut scratch = AdapterScratch::new(gpu, rows, k, 64).unwrap();
        let count = rows.min(tiles.count() + 1);
        scratch.write(&tiles, count).unwrap();
        let group = AdaptedGroup {
            scratch: &scratch,
            tiles: count,
            rank: 64,
            rows,
            first: FIRST,
            k,
        };
        let next = NextProjections {
            first: FIRST,
            k,
            features: [1, 0, 0],
        };
        let adapters = group.rows(self.weights.len(), next).unwrap();
        let hardware = Hardware::of(gpu).unwrap();
        let (matrices, layout) = (self.matrices(), self.layout());
        let form = InputForm::Plain(layout);
        let shapes = shapes(&matrices);
        let plan = match rows {
            ..=SKINNY_ROWS => GemmPlan::by_skinny(&hardware, rows, &shapes, output, form),
            _ => GemmPlan::choose(&hardware, rows, &shapes, output, form).ok(),
        }?;
        let x = upload(gpu, &in_layout(layout, &self.values, rows, k));
        let input = layout.input(&x, 4.0);
        let scratch = LinearScratch::new(gpu, 1, k, 0).unwrap();
        let division = adapters.division();
        let plans = [0, 1, 0]
            .map(|index| plan.for_adapted_rows(&hardware, division, SharingTurn::of(index, 2)));
        if plans.iter().any(Option::is_none) {
            return None;
        }
        Some(plans.map(|plan| {
            let out = upload(gpu, before);
            let to = (&out, stride);
            plan.unwrap()
                .enqueue_for_adapted_rows(
                    gpu, input, &matrices, output, to, &scratch, None, &adapters,
                )
                .unwrap();
            out
        }))
    }

    /// Compares f32 outputs, and sums with what is there, and those of a gated unit, with sums in f64. Returns how many of these are served.
    fn check(&self) -> usize {
        let mut served = 0;
        let (rows, k, layout) = (self.rows, self.k, self.layout());
        let widths: Vec<usize> = self.weights.iter().map(|w| w.rows).collect();
        let width: usize = widths.iter().sum();
        let what = format!("{rows} rows of {k}, {widths:?}");
        let before = normal(78, rows * width);
        let bytes: Vec<u8> = before.iter().flat_map(|v| v.to_le_bytes()).collect();
        for output in [Output::F32, Output::Add] {
            // The skinny GEMM adds products with one matrix.
            if output == Output::Add && rows <= SKINNY_ROWS && widths.len() > 1 {
                continue;
            }
            let Some(outs) = self.run(output, &bytes, width) else {
                continue;
            };
            served += 1;
            let [first, others @ ..] = outs.map(|out| read_f32(&out, rows * width));
            let want = match output {
                Output::Add => sums(&self.want, &before),
                _ => self.want.clone(),
            };
            let bar = EXACT.max(k as f64 * DROPPED);
            assert_close(&first, &want, bar, &format!("{what}, {output:?}"));
            for other in others {
                assert!(same_bits(&first, &other), "{what}, {output:?}");
            }
        }
        let wide = widths[0];
        if widths != [wide, wide] {
            return served;
        }
        let glu = self.want.chunks_exact(width).flat_map(|row| {
            let pairs = row[..wide].iter().zip(&row[wide..]);
            pairs.map(|(g, u)| g / (1.0 + (-g).exp()) * u / 16.0)
        });
        let glu: Vec<f64> = glu.collect();
        let poison = vec![0xff; layout.elements(rows, wide) * 2];
        let Some(outs) = self.run(layout.glu(Glu::default()), &poison, wide) else {
            return served;
        };
        for out in outs {
            assert_close(&read_rows(layout, &out, rows, wide), &glu, F16, &what);
        }
        served + 1
    }
}

/// Few rows, whose CTAs share the products with A factors.
#[test]
fn products_of_few_rows_apply_adapters() {
    let Some(gpu) = gpu() else { return };
    let mixed = |row: usize| [Some(0), None, Some(1)][row % 3];
    let mut served = 0;
    for rows in [1, 2, 4, 5, 8, 13, 16] {
        for (widths, k, ranks) in [
            (&[200usize, 96, 40][..], 784, [16, 48]),
            (&[4096, 1024, 1024], 2560, [16, 16]),
            (&[2560], 4096, [32, 16]),
            (&[2560], 9728, [16, 16]),
            (&[9728, 9728], 2560, [16, 64]),
            (&[400, 400], 1552, [16, 32]),
        ] {
            let of_rows: Vec<Option<usize>> = (0..rows).map(mixed).collect();
            served += AdaptedProduct::new(&gpu, (rows, widths, k), ranks, of_rows).check();
        }
    }
    assert!(served >= 50, "{served} products");
}

/// Products with W and with factors in one kernel: f32 outputs, added to what is there, and before a gated unit.
#[test]
fn products_of_wide_tiles_apply_adapters() {
    let Some(gpu) = gpu() else { return };
    if gpu.arch() != (9, 0) {
        return;
    }
    let mixed = |row: usize| [Some(0), None, Some(1)][row % 3];
    let one = |_: usize| Some(1);
    let few = |row: usize| (row == 5).then_some(0);
    for (rows, widths, k, ranks, adapter_of) in [
        (
            17,
            &[200usize, 96, 40][..],
            784,
            [16, 16],
            &mixed as &dyn Fn(usize) -> Option<usize>,
        ),
        (33, &[272, 272], 2560, [48, 16], &mixed),
        (40, &[9728, 9728], 2560, [16, 16], &one),
        (64, &[2560], 9728, [16, 64], &mixed),
        (64, &[4096, 1024, 1024], 2560, [16, 16], &few),
        (64, &[400, 400], 1552, [16, 32], &mixed),
        (63, &[2560], 4096, [32, 16], &one),
    ] {
        let of_rows: Vec<Option<usize>> = (0..rows).map(adapter_of).collect();
        let product = AdaptedProduct::new(&gpu, (rows, widths, k), ranks, of_rows);
        assert!(product.check() >= 2, "{rows} rows of {k}, {widths:?}");
    }
}

fn on_gpu(gpu: &Arc<Gpu>, quantize: bool) -> LoadOptions {
    LoadOptions {
        device: Device::Cuda(gpu.clone()),
        ..on_cpu(quantize)
    }
}

fn on_cpu(quantize: bool) -> LoadOptions {
    LoadOptions {
        quantize: quantize.then(QuantizeOptions::default),
        prefix_cache: false,
        ..options()
    }
}

fn session(model: &Arc<Served>, adapter: Option<&Arc<LoadedAdapter>>) -> Session {
    let options = SessionOptions {
        adapter: adapter.cloned(),
        ..SessionOptions::default()
    };
    Session::new(model.clone(), &options).unwrap()
}

/// Logits after a prompt, run at once and token by token.
fn both_ways(
    model: &Arc<Served>,
    adapter: Option<&Arc<LoadedAdapter>>,
    tokens: &[u32],
) -> [Vec<f32>; 2] {
    let mut at_once = session(model, adapter);
    at_once.prefill(tokens).unwrap();
    let mut each = session(model, adapter);
    each.prefill_token_by_token(tokens).unwrap();
    [&mut at_once, &mut each].map(|session| session.logits().unwrap().to_vec())
}

/// Cases with every kind of layer that a GPU adapts, and the bound of their logits: biased and fused projections, norms after halves, keys
/// and values of other blocks, gated attention, gated delta nets, Mamba-2, a residual multiplier, norms over all heads and after rotation.
const CASES: [(&str, f64); 10] = [
    ("qwen3_tied", 5e-3),
    ("llama_biased", 5e-3),
    ("phi3_partial", 5e-3),
    ("gemma3_wide", 5e-3),
    ("gemma4_shared", 5e-3),
    ("qwen35_tied", 1e-2),
    ("nemotronh_dense", 1e-2),
    ("granite_biased", 5e-3),
    ("olmo2_grouped", 5e-3),
    ("hunyuan_alpha", 5e-3),
];

/// The linear maps of a case that a GPU adapts.
fn adapted(case: &str) -> Vec<(String, [usize; 2])> {
    let all = modules(case).into_iter();
    all.filter(|(name, _)| !name.contains("per_layer"))
        .collect()
}

#[test]
fn models_with_adapters_agree_with_the_processor() {
    let Some(gpu) = gpu() else { return };
    let mut tested = 0;
    for (case, bar) in CASES {
        for quantize in [false, true] {
            let Ok(model) = Served::load(&golden(case), &on_gpu(&gpu, quantize)) else {
                continue;
            };
            tested += 1;
            let cpu = Served::load(&golden(case), &on_cpu(quantize)).unwrap();
            let written = Written::new(&format!("gpu-{case}-{quantize}"), 3, &adapted(case)).0;
            let (of_cpu, of_gpu) = (written.load(&cpu).unwrap(), written.load(&model).unwrap());
            assert_eq!(of_cpu.identity(), of_gpu.identity());
            assert_eq!(of_cpu.projections(), of_gpu.projections());
            let tokens = some_tokens(&cpu, 50);
            let [want, _] = both_ways(&cpu, Some(&of_cpu), &tokens);
            let [plain, _] = both_ways(&cpu, None, &tokens);
            let want = as_f64(&want);
            let moved = relative_l2(&plain, &want);
            let bar = bar * coarseness(&model);
            for (got, how) in both_ways(&model, Some(&of_gpu), &tokens)
                .iter()
                .zip(["at once", "each"])
            {
                let what = format!("{case}, quantized {quantize}, {how}");
                println!(
                    "{what}: {:.2e}, moved by {moved:.2e}",
                    relative_l2(got, &want)
                );
                assert_close(got, &want, bar, &what);
            }
            assert!(moved > 10.0 * bar, "{case}: {moved}");
        }
    }
    assert!(tested >= 10, "{tested}");
}

#[test]
fn models_with_adapters_agree_with_merged_weights() {
    let Some(gpu) = gpu() else { return };
    for (case, bar) in [
        ("qwen3_tied", 5e-3),
        ("gemma3_wide", 5e-3),
        ("qwen35_tied", 1e-2),
    ] {
        let (written, factors) = Written::new(&format!("gpu-merged-{case}"), 4, &adapted(case));
        let dense = merged(case, "gpu-adapters-dense", &[]);
        let of_merged = merged(case, "gpu-adapters-merged", &factors);
        let model = Served::load(&dense.0, &on_gpu(&gpu, false)).unwrap();
        let adapter = written.load(&model).unwrap();
        let want = Served::load(&of_merged.0, &on_cpu(false)).unwrap();
        let tokens = some_tokens(&model, 40);
        let [want, _] = both_ways(&want, None, &tokens);
        for got in both_ways(&model, Some(&adapter), &tokens) {
            assert_close(&got, &as_f64(&want), bar, case);
        }
    }
}

/// Sequences with different adapters, and without one, have the bits of sequences that run alone on a deterministic model; those without
/// have the bits of a model without adapters.
#[test]
fn mixed_batches_have_the_bits_of_each_alone() {
    let Some(gpu) = gpu() else { return };
    for (case, quantize) in [
        ("qwen3_tied", true),
        ("qwen3_tied", false),
        ("qwen35_tied", true),
        ("nemotronh_dense", true),
    ] {
        let of_case = LoadOptions {
            deterministic: true,
            ..on_gpu(&gpu, quantize)
        };
        let model = Served::load(&golden(case), &of_case).unwrap();
        let prompts: Vec<Vec<u32>> = (0..21)
            .map(|i| some_tokens(&model, 60)[i..9 + 2 * i].to_vec())
            .collect();
        let next: Vec<[u32; 3]> = prompts.iter().map(|p| [p[1], p[2], p[3]]).collect();
        let alone = |i: usize, adapter: Option<&Arc<LoadedAdapter>>| {
            let mut alone = session(&model, adapter);
            for token in prompts[i].iter().chain(&next[i]) {
                alone.decode(*token).unwrap();
            }
            alone.logits().unwrap().to_vec()
        };
        let plain = alone(2, None);
        let [first, second] = two(case, &format!("gpu-mixed-{case}-{quantize}"));
        let (first, second) = (first.load(&model).unwrap(), second.load(&model).unwrap());
        let adapter_of = |i: usize| [Some(&first), Some(&second), None][i % 3];
        let each: Vec<Vec<f32>> = (0..prompts.len())
            .map(|i| alone(i, adapter_of(i)))
            .collect();
        assert!(same_bits(&each[2], &plain), "{case}");
        assert!(each[0] != alone(0, None), "{case}");
        let mut batch: Vec<Session> = (0..prompts.len())
            .map(|i| session(&model, adapter_of(i)))
            .collect();
        for (session, prompt) in batch.iter_mut().zip(&prompts) {
            session.prefill(prompt).unwrap();
        }
        for i in 0..3 {
            let tokens: Vec<u32> = next.iter().map(|tokens| tokens[i]).collect();
            let mut sessions: Vec<&mut Session> = batch.iter_mut().collect();
            step(&mut sessions, &tokens).unwrap();
        }
        for (i, (session, alone)) in batch.iter_mut().zip(&each).enumerate() {
            assert!(
                same_bits(session.logits().unwrap(), alone),
                "{case}, quantized {quantize}: session {i}"
            );
        }
    }
}

/// Recorded steps serve other adapters of the same shape, sessions without one, and an adapter that is loaded again; memory goes with it.
#[test]
fn steps_are_replayed_with_other_adapters() {
    let Some(gpu) = gpu() else { return };
    let model = Served::load(&golden("qwen3_tied"), &on_gpu(&gpu, true)).unwrap();
    let [first, second] = two("qwen3_tied", "gpu-replay");
    let prompt = some_tokens(&model, 20);
    let tokens = |adapter: Option<&Arc<LoadedAdapter>>| {
        let mut session = session(&model, adapter);
        session.prefill(&prompt).unwrap();
        let fork = session.fork();
        let tokens = generated(&mut session, 40, &SamplingOptions::default());
        assert_eq!(
            tokens,
            generated(&mut fork.unwrap(), 40, &SamplingOptions::default())
        );
        tokens
    };
    let plain = tokens(None);
    let loaded = first.load(&model).unwrap();
    let bytes = loaded.bytes();
    let (one, other) = (tokens(Some(&loaded)), second.load(&model).unwrap());
    let two = tokens(Some(&other));
    assert!(one != plain && two != plain && one != two);
    for _ in 0..3 {
        assert_eq!(tokens(None), plain);
        assert_eq!(tokens(Some(&other)), two);
        assert_eq!(tokens(Some(&loaded)), one);
    }
    assert!(bytes > 0);
    drop(loaded);
    let again = first.load(&model).unwrap();
    assert_eq!(tokens(Some(&again)), one);
    assert_eq!(tokens(Some(&other)), two);
}

/// A session begins with blocks of others that have the same adapter, and of no other.
#[test]
fn prefixes_are_shared_by_sessions_with_the_same_adapter() {
    let Some(gpu) = gpu() else { return };
    let with_cache = LoadOptions {
        prefix_cache: true,
        prefix_bytes: 16 << 20,
        ..on_gpu(&gpu, false)
    };
    let model = Served::load(&golden("qwen3_tied"), &with_cache).unwrap();
    let [first, second] = two("qwen3_tied", "gpu-prefixes");
    let (first, second) = (first.load(&model).unwrap(), second.load(&model).unwrap());
    let tokens = some_tokens(&model, 70);
    let found = |adapter: Option<&Arc<LoadedAdapter>>| {
        let before = model.statistics().prompt_tokens_found;
        let mut session = session(&model, adapter);
        session.prefill(&tokens).unwrap();
        let logits = session.logits().unwrap().to_vec();
        (model.statistics().prompt_tokens_found - before, logits)
    };
    let all = [None, Some(&first), Some(&second)];
    let cold = all.map(&found);
    let warm = all.map(&found);
    for ((cold, warm), i) in cold.iter().zip(&warm).zip(0..) {
        assert_eq!((cold.0, warm.0), (0, 64), "{i}");
        assert_close(
            &warm.1,
            &as_f64(&cold.1),
            5e-3 * coarseness(&model),
            "a prefix",
        );
    }
    assert!(relative_l2(&cold[0].1, &as_f64(&cold[1].1)) > 0.05);
    assert!(relative_l2(&cold[2].1, &as_f64(&cold[1].1)) > 0.05);
}

/// One line refuses what no kernel adapts, and takes no memory.
#[test]
fn routed_experts_take_no_adapter() {
    let Some(gpu) = gpu() else { return };
    for case in ["qwen3moe_mixed", "qwen2moe_shared"] {
        let Ok(model) = Served::load(&golden(case), &on_gpu(&gpu, true)) else {
            println!("SKIPPED {case}: its heads are too small");
            continue;
        };
        let all = modules(case);
        let (experts, others): (Vec<_>, Vec<_>) = all
            .into_iter()
            .partition(|(name, _)| name.contains("experts."));
        let mut both = others.clone();
        both.push(experts[0].clone());
        let refused = Written::new(&format!("gpu-experts-{case}"), 5, &both).0;
        expect_kind(refused.load(&model), ErrorKind::Unsupported, &experts[0].0);
        let written = Written::new(&format!("gpu-beside-{case}"), 5, &others).0;
        let cpu = Served::load(&golden(case), &on_cpu(true)).unwrap();
        let tokens = some_tokens(&cpu, 12);
        let (of_cpu, of_gpu) = (written.load(&cpu).unwrap(), written.load(&model).unwrap());
        let [want, _] = both_ways(&cpu, Some(&of_cpu), &tokens);
        let [plain, _] = both_ways(&cpu, None, &tokens);
        let [got, _] = both_ways(&model, Some(&of_gpu), &tokens);
        // A row may go to another expert.
        let (far, moved) = (
            relative_l2(&got, &as_f64(&want)),
            relative_l2(&plain, &as_f64(&want)),
        );
        println!("{case}: {far:.2e}, moved by {moved:.2e}");
        assert!(far < 0.3 * moved, "{case}: {far}, {moved}");
    }
}

/// Factors are counted as weights on the device.
#[test]
fn factors_are_counted() {
    let Some(gpu) = gpu() else { return };
    let model = Served::load(&golden("llama_wide"), &on_gpu(&gpu, false)).unwrap();
    let written = Written::new("gpu-counted", 5, &adapted("llama_wide")).0;
    let loaded = written.load(&model).unwrap();
    assert!(memory::usage(Tag::DeviceWeights).current >= loaded.bytes() as u64);
    let cpu = Served::load(&golden("llama_wide"), &on_cpu(false)).unwrap();
    let of_cpu = written.load(&cpu).unwrap();
    assert!(loaded.bytes() >= of_cpu.bytes() / 2 && loaded.bytes() > 0);
}
