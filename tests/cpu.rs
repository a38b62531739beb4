//! The CPU kernels: every level against an f64 oracle computed from decoded codes, and against the others bit for bit.
//! A level this machine lacks prints SKIPPED, and fails the test if `NVFP4_REQUIRE` names it.

mod common;

use std::sync::Arc;

use NVFP4::base::memory::{Buffer, Tag};
use NVFP4::base::{ErrorKind, env};
use NVFP4::cpu::{
    Cpu, DeltaGates, DeltaRuleRows, KvLayout, KvPages, Level, MambaScanRows, MambaSteps, PAGE,
    Packed, Workspace,
};
use NVFP4::format::nvfp4::{self, Nvfp4, QuantizeOptions};
use NVFP4::format::{f8, int8, random};
use NVFP4::ops::{self, Device};
use NVFP4::tensor::{AttentionShape, DeltaShape, KvType, MambaShape, WeightType};
use common::expect_kind;

/// Standard normal values from counter-based bits.
fn normal(seed: u64, n: usize) -> Vec<f32> {
    (0..n as u64)
        .map(|i| {
            let unit = |c| (random::bits(seed, c) >> 40) as f64 / (1u64 << 24) as f64;
            ((-2.0 * (1.0 - unit(2 * i)).ln()).sqrt()
                * (std::f64::consts::TAU * unit(2 * i + 1)).cos()) as f32
        })
        .collect()
}

/// Queries that see everything before them.
fn plain(heads: usize, kv: KvLayout, scale: f32) -> AttentionShape {
    AttentionShape {
        heads,
        kv_heads: kv.heads(),
        dim: kv.dim(),
        scale,
        window: None,
        score_cap: None,
    }
}

/// One CPU for each level present, with one and with two threads.
fn cpus() -> Vec<Arc<Cpu>> {
    let required = env::required_capabilities();
    let mut cpus = Vec::new();
    for level in Level::ALL {
        if level.is_present() {
            cpus.extend([1, 2].map(|n| Cpu::with_level(level, Some(n)).unwrap()));
        } else {
            assert!(
                !required.iter().any(|r| r == level.name()),
                "NVFP4_REQUIRE names {}, which this machine lacks",
                level.name()
            );
            println!("SKIPPED: no {} on this machine", level.name());
        }
    }
    cpus
}

fn quantized(seed: u64, rows: usize, cols: usize) -> Nvfp4 {
    nvfp4::quantize(
        &normal(seed, rows * cols),
        rows,
        cols,
        &QuantizeOptions::default(),
    )
    .unwrap()
}

fn pack(w: &Nvfp4) -> Packed {
    let (c, s) = (w.cols / 2, w.cols / 16);
    Packed::nvfp4(w.rows, w.cols, w.global, &mut |rows, codes, scales| {
        codes.copy_from_slice(&w.codes[rows.start * c..rows.end * c]);
        scales.copy_from_slice(&w.scales[rows.start * s..rows.end * s]);
        Ok(())
    })
    .unwrap()
}

fn pack_dense(w: &[f32], rows: usize, cols: usize, kind: WeightType) -> Packed {
    Packed::dense(rows, cols, kind, &mut |range, out| {
        out.copy_from_slice(&w[range.start * cols..range.end * cols]);
        Ok(())
    })
    .unwrap()
}

/// The weight in int8 rows, and the values that those hold.
fn pack_int8(w: &[f32], rows: usize, cols: usize) -> (Packed, Vec<f32>) {
    let (mut codes, mut scales) = (vec![0; w.len()], vec![0.0; rows]);
    int8::quantize_rows(w, cols, 0, &mut codes, &mut scales).unwrap();
    let mut held = vec![0.0; w.len()];
    int8::dequantize_rows(&codes, &scales, cols, &mut held).unwrap();
    let packed = Packed::int8(rows, cols, &mut |range, some_codes, some_scales| {
        some_codes.copy_from_slice(&codes[range.start * cols..range.end * cols]);
        some_scales.copy_from_slice(&scales[range]);
        Ok(())
    });
    (packed.unwrap(), held)
}

fn relative_l2(out: &[f32], reference: &[f64]) -> f64 {
    assert_eq!(out.len(), reference.len());
    let error: f64 = out
        .iter()
        .zip(reference)
        .map(|(&a, b)| (f64::from(a) - b).powi(2))
        .sum();
    let norm: f64 = reference.iter().map(|b| b * b).sum();
    (error / norm).sqrt()
}

fn product(x: &[f32], w: &[f32], k: usize) -> Vec<f64> {
    x.chunks_exact(k)
        .flat_map(|x| {
            w.chunks_exact(k).map(|w| {
                x.iter()
                    .zip(w)
                    .map(|(&a, &b)| f64::from(a) * f64::from(b))
                    .sum::<f64>()
            })
        })
        .collect()
}

fn run(cpu: &Cpu, x: &[f32], m: usize, w: &Packed, int8: bool) -> Vec<f32> {
    let mut y = vec![f32::NAN; m * w.rows()];
    cpu.linear(x, m, &mut [(w, &mut y)], int8, &mut Workspace::new())
        .unwrap();
    y
}

/// Every width of a skinny product, several passes of them, even and uneven, and panels with tiles that fill and do not.
const BATCHES: [usize; 13] = [1, 2, 3, 4, 5, 6, 7, 8, 13, 17, 29, 32, 40];

#[test]
fn exact_linear_is_exact_and_the_same_everywhere() {
    // Ragged rows, and K of whole and broken chunks.
    for (seed, (rows, cols)) in [(16, 16), (33, 64), (50, 80), (129, 1024), (7, 208)]
        .into_iter()
        .enumerate()
    {
        let w = quantized(seed as u64, rows, cols);
        let dense = w.dequantize().unwrap();
        let packed = [
            (pack(&w), dense.clone()),
            (
                pack_dense(&dense, rows, cols, WeightType::F32),
                dense.clone(),
            ),
            (
                pack_dense(&dense, rows, cols, WeightType::BF16),
                dense
                    .iter()
                    .map(|&x| half::bf16::from_f32(x).to_f32())
                    .collect(),
            ),
            (
                pack_dense(&dense, rows, cols, WeightType::F16),
                dense
                    .iter()
                    .map(|&x| half::f16::from_f32(x).to_f32())
                    .collect(),
            ),
            pack_int8(&dense, rows, cols),
        ];
        for (packed, values) in &packed {
            let m = 40;
            let x = normal(100 + seed as u64, m * cols);
            let reference = product(&x, values, cols);
            let mut first: Option<Vec<f32>> = None;
            for cpu in cpus() {
                for batch in BATCHES {
                    let mut y = Vec::new();
                    for x in x.chunks(batch * cols) {
                        y.extend(run(&cpu, x, x.len() / cols, packed, false));
                    }
                    let error = relative_l2(&y, &reference);
                    assert!(
                        error <= 1e-6,
                        "{} {:?} [{rows}, {cols}] m={batch}: {error:e}",
                        cpu.level().name(),
                        packed.kind()
                    );
                    match &first {
                        None => first = Some(y),
                        Some(f) => assert!(
                            f.iter().zip(&y).all(|(a, b)| a.to_bits() == b.to_bits()),
                            "{} {:?} [{rows}, {cols}] m={batch} differs in bits",
                            cpu.level().name(),
                            packed.kind()
                        ),
                    }
                }
            }
        }
    }
}

#[test]
fn int8_linear_is_the_product_of_rounded_activations() {
    for (seed, (rows, cols)) in [(16, 16), (33, 64), (50, 80), (129, 1024)]
        .into_iter()
        .enumerate()
    {
        let w = quantized(seed as u64, rows, cols);
        let packed = pack(&w);
        let m = 40;
        let x = normal(200 + seed as u64, m * cols);
        let rounded: Vec<f32> = x
            .chunks_exact(cols)
            .flat_map(|x| x.chunks(32))
            .flat_map(|x| {
                let amax = x.iter().fold(0f32, |a, x| a.max(x.abs()));
                x.iter()
                    .map(move |x| (x * (127.0 / amax)).round_ties_even() * (amax / 127.0))
            })
            .collect();
        let reference = product(&rounded, &w.dequantize().unwrap(), cols);
        let mut first: Option<Vec<f32>> = None;
        for cpu in cpus() {
            for batch in BATCHES {
                let mut y = Vec::new();
                for x in x.chunks(batch * cols) {
                    y.extend(run(&cpu, x, x.len() / cols, &packed, true));
                }
                let error = relative_l2(&y, &reference);
                assert!(
                    error <= 1e-6,
                    "{} [{rows}, {cols}] m={batch}: {error:e}",
                    cpu.level().name()
                );
                let first = first.get_or_insert_with(|| y.clone());
                assert!(
                    first
                        .iter()
                        .zip(&y)
                        .all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{}",
                    cpu.level().name()
                );
            }
        }
    }
}

#[test]
fn a_zero_activation_row_gives_zero() {
    for cpu in cpus() {
        for int8 in [false, true] {
            let y = run(&cpu, &[0.0; 64 * 2], 2, &pack(&quantized(1, 20, 64)), int8);
            assert!(y.iter().all(|&y| y == 0.0), "{}", cpu.level().name());
        }
    }
}

fn attend_f64(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    heads: usize,
    kv_heads: usize,
    dim: usize,
    window: usize,
    cap: Option<f64>,
    sinks: Option<&[f32]>,
) -> Vec<f64> {
    let m = q.len() / (heads * dim);
    let mut out = Vec::new();
    for t in 0..m {
        for h in 0..heads {
            let kv = h / (heads / kv_heads);
            let at = |x: &[f32], p: usize, d: usize| f64::from(x[(p * kv_heads + kv) * dim + d]);
            let first = (t + 1).saturating_sub(window);
            let scores: Vec<f64> = (first..=t)
                .map(|p| {
                    let score = (0..dim)
                        .map(|d| f64::from(q[(t * heads + h) * dim + d]) * at(k, p, d))
                        .sum::<f64>()
                        * 0.25;
                    cap.map_or(score, |cap| cap * (score / cap).tanh())
                })
                .collect();
            let sink = sinks.map(|sinks| f64::from(sinks[h]));
            let all = || scores.iter().copied().chain(sink);
            let largest = all().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
            let sum: f64 = all().map(|s| (s - largest).exp()).sum();
            out.extend((0..dim).map(|d| {
                weights
                    .iter()
                    .enumerate()
                    .map(|(p, w)| w * at(v, first + p, d))
                    .sum::<f64>()
                    / sum
            }));
        }
    }
    out
}

/// The pages of one layer.
struct Layer {
    layout: KvLayout,
    pages: Vec<Option<Buffer<u8>>>,
}

impl Layer {
    fn new(layout: KvLayout) -> Layer {
        Layer {
            layout,
            pages: Vec::new(),
        }
    }

    /// Writes rows of keys and values from a position on.
    fn write(&mut self, first: usize, keys: &[f32], values: &[f32]) {
        for (i, (keys, values)) in self.layout.rows(keys, values).unwrap().enumerate() {
            let (page, slot) = ((first + i) / PAGE, (first + i) % PAGE);
            while self.pages.len() <= page {
                let bytes = self.layout.page_bytes();
                self.pages
                    .push(Some(Buffer::zeroed(Tag::KvCache, bytes).unwrap()));
            }
            let page = self.pages[page].as_mut().unwrap();
            self.layout.write(page, slot, keys, values).unwrap();
        }
    }

    /// Frees the pages that end before a position.
    fn forget(&mut self, before: usize) {
        self.pages[..before / PAGE].fill_with(|| None);
    }

    fn pages(&self) -> KvPages<'_> {
        let bytes = |page| Option::as_ref(page).map_or(&[][..], |page: &Buffer<u8>| page);
        KvPages::new(self.layout, self.pages.iter().map(bytes).collect()).unwrap()
    }
}

#[test]
fn attention_agrees_with_f64_and_is_the_same_everywhere() {
    // Windows that end within pages and at their ends, and that no two queries of a call share; soft caps that bite; sinks below, among and
    // above all scores.
    for (heads, kv_heads, dim, total, window, cap, has_sinks) in [
        (4, 2, 16, 37, None, None, false),
        (3, 1, 48, 20, None, Some(0.5), false),
        (2, 2, 64, 50, Some(7), None, false),
        (2, 1, 80, 70, Some(32), None, false),
        (4, 1, 256, 40, Some(1), None, false),
        (8, 2, 32, 16, Some(3), Some(2.0), false),
        (4, 2, 64, 37, None, None, true),
        (8, 1, 32, 50, Some(5), None, true),
    ] {
        let sinks = [-60.0, 0.5, 9.0, 2.0, -1.5, 1.0, 30.0, 0.0];
        let sinks = has_sinks.then_some(&sinks[..heads]);
        let q = normal(1, total * heads * dim);
        let (k, v) = (
            normal(2, total * kv_heads * dim),
            normal(3, total * kv_heads * dim),
        );
        let half = |x: &[f32]| {
            x.iter()
                .map(|&x| half::f16::from_f32(x).to_f32())
                .collect::<Vec<_>>()
        };
        let in_8_bits = |x: &[f32]| {
            let decoded = x.chunks_exact(dim).flat_map(|vector| {
                let scale = f8::scale_of(vector);
                vector
                    .iter()
                    .map(move |&x| f8::decode(f8::encode(x, scale), scale))
            });
            decoded.collect::<Vec<_>>()
        };
        for kind in KvType::ALL {
            let (ks, vs) = match kind {
                KvType::F32 => (k.clone(), v.clone()),
                KvType::F16 => (half(&k), half(&v)),
                KvType::F8 => (in_8_bits(&k), in_8_bits(&v)),
            };
            let (visible, f64_cap) = (window.unwrap_or(total), cap.map(f64::from));
            let reference = attend_f64(&q, &ks, &vs, heads, kv_heads, dim, visible, f64_cap, sinks);
            let shape = AttentionShape {
                window,
                score_cap: cap,
                ..plain(heads, KvLayout::new(kv_heads, dim, kind).unwrap(), 0.25)
            };
            let mut first: Option<Vec<f32>> = None;
            for cpu in cpus() {
                for batch in [1, 5, total] {
                    let mut kv = Layer::new(KvLayout::new(kv_heads, dim, kind).unwrap());
                    let mut out = vec![f32::NAN; q.len()];
                    for t in (0..total).step_by(batch) {
                        let end = total.min(t + batch);
                        let row = kv_heads * dim;
                        kv.write(t, &k[t * row..end * row], &v[t * row..end * row]);
                        let (q, out) = (
                            &q[t * heads * dim..end * heads * dim],
                            &mut out[t * heads * dim..end * heads * dim],
                        );
                        // Pages that no row sees any more are not needed.
                        kv.forget((t + 1).saturating_sub(window.unwrap_or(usize::MAX)));
                        cpu.attention(q, &shape, sinks, &kv.pages(), t, out, &mut Workspace::new())
                            .unwrap();
                    }
                    let error = relative_l2(&out, &reference);
                    assert!(
                        error <= 1e-6,
                        "{} {kind:?} batch {batch}: {error:e}",
                        cpu.level().name()
                    );
                    let first = first.get_or_insert_with(|| out.clone());
                    assert!(
                        first
                            .iter()
                            .zip(&out)
                            .all(|(a, b)| a.to_bits() == b.to_bits()),
                        "{}",
                        cpu.level().name()
                    );
                }
            }
        }
    }
}

#[test]
fn norm_and_activations_agree_with_f64_and_are_the_same_everywhere() {
    for n in [16, 24, 128, 1000] {
        let (x, w) = (normal(4, 3 * n), normal(5, n));
        let norm: Vec<f64> = x
            .chunks_exact(n)
            .flat_map(|x| {
                let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n as f64;
                x.iter()
                    .zip(&w)
                    .map(move |(&x, &w)| f64::from(x) / (mean + 1e-6).sqrt() * f64::from(w))
                    .collect::<Vec<_>>()
            })
            .collect();
        let up = normal(6, 3 * n);
        let gate: Vec<f32> = x.iter().map(|x| x * 8.0).collect();
        let glu = |of: fn(f64) -> f64| -> Vec<f64> {
            let both = gate.iter().zip(&up);
            both.map(|(&g, &u)| of(f64::from(g)) * f64::from(u))
                .collect()
        };
        let silu = glu(|g| g / (1.0 + (-g).exp()));
        let gelu = glu(|g| {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
            0.5 * g * (1.0 + u.tanh())
        });
        // Gates reach 30 and ups 3: both ends of the clamp are met.
        let both = gate.iter().zip(&up);
        let clamped: Vec<f64> = both
            .map(|(&g, &u)| {
                let (g, u) = (f64::from(g).min(1.5), f64::from(u).clamp(-1.5, 1.5));
                (u + 1.0) * g / (1.0 + (-f64::from(1.702f32) * g).exp())
            })
            .collect();
        let capped: Vec<f64> = x
            .iter()
            .map(|&x| 1.5 * (f64::from(x) / 1.5).tanh())
            .collect();
        let mut first: Option<[Vec<f32>; 5]> = None;
        for cpu in cpus() {
            let gates = || gate.clone();
            let mut made = [x.clone(), gates(), gates(), gates(), x.clone()];
            let [y, z, t, k, c] = &mut made;
            cpu.rms_norm(y, &w, 1e-6).unwrap();
            cpu.swiglu(z, &up).unwrap();
            cpu.geglu(t, &up).unwrap();
            cpu.clamped_swiglu(k, &up, 1.702, 1.5).unwrap();
            cpu.soft_cap(c, 1.5).unwrap();
            let references = [&norm, &silu, &gelu, &clamped, &capped];
            for (made, reference) in made.iter().zip(references) {
                let error = relative_l2(made, reference);
                assert!(error <= 1e-6, "{error:e}");
            }
            let first = first.get_or_insert_with(|| made.clone());
            assert_eq!(*first, made, "{}", cpu.level().name());
        }
    }
}

#[test]
fn swiglu_and_attention_survive_extreme_inputs() {
    for cpu in cpus() {
        let mut gate = vec![-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, 5.0];
        cpu.swiglu(&mut gate, &[1.0; 8]).unwrap();
        assert!(gate.iter().all(|g| g.is_finite()), "{gate:?}");
        assert_eq!(gate[6], 1e30);
        // At and beyond the clamps, and far below: the limit alone counts. NaN stays.
        let (nan, most) = (f32::NAN, 7.0 / (1.0 + (-7.0 * 1.702f32).exp()));
        let mut gate = [7.0, 8.0, 1e30, 7.0, 7.0, 0.0, -1e5, nan, 1.0];
        let up = [0.0, 0.0, 0.0, 1e30, -1e30, 5.0, 1.0, 1.0, nan];
        cpu.clamped_swiglu(&mut gate, &up, 1.702, 7.0).unwrap();
        let expected = [most, most, most, 8.0 * most, -6.0 * most, 0.0, 0.0];
        for (found, expected) in gate.iter().zip(expected) {
            let far = (found - expected).abs();
            assert!(far <= 1e-6 * expected.abs().max(1e-3), "{gate:?}");
        }
        assert!(gate[7].is_nan() && gate[8].is_nan(), "{gate:?}");
        let mut kv = Layer::new(KvLayout::new(1, 16, KvType::F32).unwrap());
        kv.write(0, &[&[1e4f32; 16][..], &[-1e4; 16]].concat(), &[1.0; 32]);
        let mut out = [0.0; 16];
        cpu.attention(
            &[1e3; 16],
            &plain(1, kv.layout, 1.0),
            None,
            &kv.pages(),
            1,
            &mut out,
            &mut Workspace::new(),
        )
        .unwrap();
        assert!(out.iter().all(|x| (x - 1.0).abs() < 1e-6), "{out:?}");
    }
}

#[test]
fn scaled_mm_is_the_product_of_decoded_values() {
    let device = Device::cpu(None).unwrap();
    for (m, n, k) in [(1, 16, 32), (45, 48, 64), (127, 33, 96)] {
        let (a, b) = (quantized(7, m, k), quantized(8, n, k));
        let mut out = vec![f32::NAN; m * n];
        ops::quantize::scaled_mm(&device, &a, &b, &mut out, &mut Workspace::new()).unwrap();
        assert!(
            relative_l2(
                &out,
                &product(&a.dequantize().unwrap(), &b.dequantize().unwrap(), k)
            ) <= 1e-6
        );
    }
}

#[test]
fn wrong_shapes_are_errors_that_name_them() {
    let cpu = Cpu::new(Some(1)).unwrap();
    let w = pack(&quantized(1, 16, 32));
    let e = cpu
        .linear(
            &[0.0; 48],
            1,
            &mut [(&w, &mut [0.0; 16])],
            false,
            &mut Workspace::new(),
        )
        .unwrap_err();
    assert!(
        e.message().contains("[16, 32]") && e.message().contains("48"),
        "{e}"
    );
    expect_kind(
        cpu.rms_norm(&mut [0.0; 5], &[1.0; 2], 1e-6),
        ErrorKind::InvalidArgument,
        "rms_norm: 5 elements",
    );
    expect_kind(
        cpu.swiglu(&mut [0.0; 5], &[1.0; 2]),
        ErrorKind::InvalidArgument,
        "a gated activation of 5 gate and 2 up",
    );
    let layout = KvLayout::new(2, 16, KvType::F16).unwrap();
    let kv = KvPages::new(layout, Vec::new()).unwrap();
    expect_kind(
        cpu.attention(
            &[0.0; 48],
            &plain(3, layout, 1.0),
            None,
            &kv,
            0,
            &mut [0.0; 48],
            &mut Workspace::new(),
        ),
        ErrorKind::InvalidArgument,
        "for 3 heads of 16 over 2 key/value heads",
    );
    expect_kind(
        cpu.attention(
            &[0.0; 32],
            &plain(2, layout, 1.0),
            None,
            &kv,
            0,
            &mut [0.0; 32],
            &mut Workspace::new(),
        ),
        ErrorKind::InvalidArgument,
        "attention over positions 0..1; the cache holds 0",
    );
    expect_kind(
        cpu.attention(
            &[0.0; 32],
            &plain(2, layout, 1.0),
            Some(&[0.0]),
            &kv,
            0,
            &mut [0.0; 32],
            &mut Workspace::new(),
        ),
        ErrorKind::InvalidArgument,
        "attention: 1 sinks for 2 heads",
    );
    expect_kind(
        KvLayout::new(2, 24, KvType::F16),
        ErrorKind::Unsupported,
        "2 heads of 24",
    );
}

/// The gated delta rule in f64, row by row, from a state that it changes.
fn delta_rule_in_f64(
    shape: &DeltaShape,
    [qkv, decay, beta]: [&[f32]; 3],
    state: &mut [f64],
) -> Vec<f64> {
    let (heads, dk, dv) = (shape.value_heads, shape.key_dim, shape.value_dim);
    let (shared, keys) = (heads / shape.key_heads, shape.key_width());
    let mut out = Vec::new();
    let rows = qkv.chunks_exact(shape.channels());
    let gates = decay.chunks_exact(heads).zip(beta.chunks_exact(heads));
    for (row, (decay, beta)) in rows.zip(gates) {
        for head in 0..heads {
            let key = head / shared * dk;
            let (q, k) = (&row[key..], &row[keys + key..]);
            let v = &row[2 * keys + head * dv..];
            let state = &mut state[head * dk * dv..(head + 1) * dk * dv];
            state.iter_mut().for_each(|s| *s *= f64::from(decay[head]));
            for j in 0..dv {
                let times = |state: &[f64], x: &[f32]| -> f64 {
                    (0..dk).map(|i| state[i * dv + j] * f64::from(x[i])).sum()
                };
                let change = (f64::from(v[j]) - times(state, k)) * f64::from(beta[head]);
                (0..dk).for_each(|i| state[i * dv + j] += f64::from(k[i]) * change);
                out.push(times(state, q));
            }
        }
    }
    out
}

/// Every level gives the same bits, at once and divided, close to f64.
#[test]
fn the_delta_rule_is_right_and_the_same_everywhere() {
    for (key_heads, value_heads, key_dim, value_dim) in [
        (2, 4, 16, 32),
        (3, 3, 32, 16),
        (1, 2, 128, 128),
        (1, 1, 48, 80),
    ] {
        let shape = DeltaShape {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            taps: 4,
        };
        let m = 37;
        let mut qkv = normal(1, m * shape.channels());
        cpus()[0].delta_norms(&shape, &mut qkv).unwrap();
        let sigmoid = |x: &f32| 1.0 / (1.0 + (-x).exp());
        let gates = |seed| -> Vec<f32> {
            let drawn = normal(seed, m * value_heads);
            drawn.iter().map(sigmoid).collect()
        };
        let (decay, beta) = (gates(4), gates(5));
        let before = normal(6, shape.matrix_floats());
        let mut exact: Vec<f64> = before.iter().map(|x| f64::from(*x)).collect();
        let want = delta_rule_in_f64(&shape, [&qkv, &decay, &beta], &mut exact);
        let mut same: Option<(Vec<f32>, Vec<f32>)> = None;
        for cpu in cpus() {
            for each in [m, 1, 10] {
                let mut state = before.clone();
                let mut out = vec![0.0; want.len()];
                for first in (0..m).step_by(each) {
                    let of = |width: usize| first * width..m.min(first + each) * width;
                    let rows = DeltaRuleRows {
                        qkv: &qkv[of(shape.channels())],
                        decay: &decay[of(value_heads)],
                        beta: &beta[of(value_heads)],
                        out: &mut out[of(shape.value_width())],
                    };
                    cpu.delta_rule(&shape, rows, &mut state).unwrap();
                }
                for (a, b) in out.iter().zip(&want).chain(state.iter().zip(&exact)) {
                    assert!(
                        (f64::from(*a) - b).abs() < 1e-5 * (1.0 + b.abs()),
                        "{a} {b}"
                    );
                }
                let got = (out, state);
                assert!(*same.get_or_insert_with(|| got.clone()) == got);
            }
        }
    }
}

/// A convolution sees the inputs before it, and leaves its last ones behind.
#[test]
fn convolutions_of_recurrent_layers_are_right() {
    let channels = 48;
    for (taps, m, has_bias) in [(4, 9, false), (4, 1, true), (2, 5, true), (3, 2, false)] {
        let biases = normal(4, channels);
        let bias = has_bias.then_some(&biases[..]);
        let (x, weight) = (normal(1, m * channels), normal(2, channels * taps));
        let before = normal(3, (taps - 1) * channels);
        let input = |position: usize, channel: usize| match position.checked_sub(taps - 1) {
            None => before[position * channels + channel],
            Some(row) => x[row * channels + channel],
        };
        let mut same: Option<(Vec<f32>, Vec<f32>)> = None;
        for cpu in cpus() {
            let (mut out, mut history) = (x.clone(), before.clone());
            cpu.convolve(&mut out, channels, &weight, bias, &mut history)
                .unwrap();
            for (i, got) in out.iter().enumerate() {
                let (row, channel) = (i / channels, i % channels);
                let terms = (0..taps).map(|tap| {
                    f64::from(weight[channel * taps + tap]) * f64::from(input(row + tap, channel))
                });
                let sum = terms.sum::<f64>() + bias.map_or(0.0, |bias| f64::from(bias[channel]));
                let want = sum / (1.0 + (-sum).exp());
                assert!((f64::from(*got) - want).abs() < 1e-5, "{got} {want}");
            }
            for (i, got) in history.iter().enumerate() {
                let want = input(m + i / channels, i % channels);
                assert!(*got == want, "{taps} taps, {m} rows: {i}");
            }
            let got = (out, history);
            assert!(*same.get_or_insert_with(|| got.clone()) == got);
        }
    }
}

/// Queries and keys have the lengths that the rule takes, and gates stay finite.
#[test]
fn norms_and_gates_of_delta_nets_are_right() {
    let shape = DeltaShape {
        key_heads: 2,
        value_heads: 4,
        key_dim: 48,
        value_dim: 16,
        taps: 4,
    };
    let before = normal(1, 3 * shape.channels());
    for cpu in cpus() {
        let mut qkv = before.clone();
        cpu.delta_norms(&shape, &mut qkv).unwrap();
        for (got, was) in qkv
            .chunks(shape.channels())
            .zip(before.chunks(shape.channels()))
        {
            let heads = got.chunks(48).zip(was.chunks(48)).take(4).enumerate();
            for (head, (got, was)) in heads {
                let squares: f64 = was.iter().map(|x| f64::from(*x).powi(2)).sum();
                let length = (squares + 1e-6).sqrt() * if head < 2 { 48f64.sqrt() } else { 1.0 };
                for (got, was) in got.iter().zip(was) {
                    assert!((f64::from(*got) - f64::from(*was) / length).abs() < 1e-6);
                }
            }
            assert_eq!(got[192..], was[192..]);
        }
    }
    let gates = DeltaGates {
        a_log: &[0.5, -3.0],
        dt_bias: &[1.0, -1.0],
    };
    let (mut a, mut b) = ([0.25, 800.0, -800.0, 0.0], [0.0, 90.0, -90.0, 1.0]);
    cpus()[0].delta_gates(gates, &mut a, &mut b).unwrap();
    let softplus = |x: f64| x.exp().ln_1p();
    let want = [
        (-(0.5f64.exp()) * softplus(1.25)).exp(),
        (-(-3f64).exp() * 799.0).exp(),
        1.0,
        (-(-3f64).exp() * softplus(-1.0)).exp(),
    ];
    for (got, want) in a.iter().zip(want) {
        assert!((f64::from(*got) - want).abs() < 1e-6, "{got} {want}");
    }
    assert!(b[0] == 0.5 && b[1] == 1.0 && b[2] < 1e-30 && b[3] > 0.73);
}

/// The recurrence of Mamba-2 in f64, row by row, from a state that it changes.
fn mamba_scan_in_f64(
    shape: &MambaShape,
    [xbc, decay, dt, skip]: [&[f32]; 4],
    state: &mut [f64],
) -> Vec<f64> {
    let (heads, dim, size) = (shape.heads, shape.head_dim, shape.state_size);
    let mut out = Vec::new();
    let rows = xbc.chunks_exact(shape.channels());
    let steps = decay.chunks_exact(heads).zip(dt.chunks_exact(heads));
    for (row, (decay, dt)) in rows.zip(steps) {
        for head in 0..heads {
            let group = head / (heads / shape.groups) * size;
            let b = &row[shape.width() + group..];
            let c = &row[shape.width() + shape.group_width() + group..];
            let state = &mut state[head * size * dim..(head + 1) * size * dim];
            for p in 0..dim {
                let x = f64::from(row[head * dim + p]);
                let mut y = f64::from(skip[head]) * x;
                for n in 0..size {
                    let h = &mut state[n * dim + p];
                    *h = *h * f64::from(decay[head]) + f64::from(dt[head]) * x * f64::from(b[n]);
                    y += *h * f64::from(c[n]);
                }
                out.push(y);
            }
        }
    }
    out
}

/// Every level gives the same bits, at once and divided, close to f64.
#[test]
fn the_recurrence_of_mamba_is_right_and_the_same_everywhere() {
    for (heads, head_dim, groups, state_size) in [
        (4, 32, 2, 16),
        (3, 16, 3, 32),
        (2, 64, 1, 128),
        (1, 80, 1, 48),
    ] {
        let shape = MambaShape {
            heads,
            head_dim,
            groups,
            state_size,
            taps: 4,
        };
        let m = 37;
        let (xbc, skip) = (normal(1, m * shape.channels()), normal(2, heads));
        let sigmoid = |x: &f32| 1.0 / (1.0 + (-x).exp());
        let steps = |seed| -> Vec<f32> { normal(seed, m * heads).iter().map(sigmoid).collect() };
        let (decay, dt) = (steps(4), steps(5));
        let before = normal(6, shape.matrix_floats());
        let mut exact: Vec<f64> = before.iter().map(|x| f64::from(*x)).collect();
        let want = mamba_scan_in_f64(&shape, [&xbc, &decay, &dt, &skip], &mut exact);
        let mut same: Option<(Vec<f32>, Vec<f32>)> = None;
        for cpu in cpus() {
            for each in [m, 1, 10] {
                let mut state = before.clone();
                let mut out = vec![0.0; want.len()];
                for first in (0..m).step_by(each) {
                    let of = |width: usize| first * width..m.min(first + each) * width;
                    let rows = MambaScanRows {
                        xbc: &xbc[of(shape.channels())],
                        decay: &decay[of(heads)],
                        dt: &dt[of(heads)],
                        skip: &skip,
                        out: &mut out[of(shape.width())],
                    };
                    cpu.mamba_scan(&shape, rows, &mut state).unwrap();
                }
                // Sums of up to 128 products of some size.
                let size = (state_size as f64).sqrt();
                for (a, b) in out.iter().zip(&want).chain(state.iter().zip(&exact)) {
                    let far = (f64::from(*a) - b).abs();
                    assert!(far < 2e-6 * size * (1.0 + b.abs()), "{a} {b}");
                }
                let got = (out, state);
                assert!(*same.get_or_insert_with(|| got.clone()) == got);
            }
        }
    }
}

#[test]
fn time_steps_and_norms_of_mamba_are_right() {
    let steps = |limits| MambaSteps {
        a_log: &[0.5, -3.0],
        dt_bias: &[1.0, -1.0],
        limits,
    };
    let softplus = |x: f64| x.exp().ln_1p();
    let all = [0.0, f32::INFINITY];
    let (mut dt, mut decay) = ([0.25, 800.0, -800.0, 0.0], [0.0; 4]);
    cpus()[0]
        .mamba_steps(steps(all), &mut dt, &mut decay)
        .unwrap();
    let want = [softplus(1.25), 799.0, 0.0, softplus(-1.0)];
    let rates = [0.5f64.exp(), (-3f64).exp()];
    for (i, want) in want.into_iter().enumerate() {
        assert!((f64::from(dt[i]) - want).abs() < 1e-4, "{} {want}", dt[i]);
        let want = (-rates[i % 2] * want).exp();
        assert!(
            (f64::from(decay[i]) - want).abs() < 1e-6,
            "{} {want}",
            decay[i]
        );
    }
    let mut dt = [0.25, 800.0, -800.0, 0.0];
    cpus()[0]
        .mamba_steps(steps([0.5, 2.0]), &mut dt, &mut decay)
        .unwrap();
    assert_eq!([dt[1], dt[2], dt[3]], [2.0, 0.5, 0.5]);
    assert!((f64::from(decay[1]) - (-2.0 * rates[1]).exp()).abs() < 1e-6);

    let (x, weight) = (normal(1, 3 * 96), normal(2, 96));
    let mut same: Option<Vec<f32>> = None;
    for cpu in cpus() {
        let mut out = x.clone();
        cpu.rms_norm_groups(&mut out, &weight, 3, 1e-5).unwrap();
        for (i, got) in out.iter().enumerate() {
            let group = &x[i / 32 * 32..][..32];
            let squares: f64 = group.iter().map(|x| f64::from(*x).powi(2)).sum();
            let want = f64::from(x[i]) / (squares / 32.0 + 1e-5).sqrt() * f64::from(weight[i % 96]);
            assert!((f64::from(*got) - want).abs() < 1e-5, "{got} {want}");
        }
        assert!(*same.get_or_insert_with(|| out.clone()) == out);
    }
    expect_kind(
        cpus()[0].rms_norm_groups(&mut [0.0; 96], &weight, 5, 1e-5),
        ErrorKind::InvalidArgument,
        "5 groups in 96",
    );
}
