//! Attention by the fused kernels against f64: prompts, decode steps, and sequences together.

use std::sync::Arc;

use NVFP4::base::memory::Tag;
use NVFP4::cuda::{
    self, CachedPages, DecodePlan, DecodedRows, DeviceBuffer, Gpu, Hardware, Heads, KvShape,
    Layout, PAGE, PromptRows, RowHeads, SplitKv, SplitKvWorkspace, Unit,
};

use NVFP4::base::ErrorKind;
use NVFP4::format::f8;
use NVFP4::tensor::{AttentionShape, KvType};

use crate::support::{
    EPS, as_f64, assert_close, gpu, normal, poisoned, read_f16, rms_norm, upload,
};

/// The bound of attention with queries, keys, values, weights and the output in f16, and sums in f32.
const ATTENTION: f64 = 1e-3;
/// The factor of the cosines and sines of elements that rotate.
pub(crate) const ATTENTION_FACTOR: f64 = 1.125;

/// The projections of one sequence, and its attention in f64.
pub(crate) struct Sequence {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) dim: usize,
    pub(crate) qkv: Vec<f32>,
    pub(crate) q_norm: Vec<f32>,
    pub(crate) k_norm: Vec<f32>,
    /// A frequency for each pair of elements that rotates.
    pub(crate) frequencies: Vec<f32>,
    pub(crate) window: Option<usize>,
    pub(crate) cap: Option<f32>,
    /// A logit of each head that has no value.
    pub(crate) sinks: Option<Vec<f32>>,
    /// Whether keys before norm and rotation are the values too, which rows of `qkv` then lack.
    keys_as_values: bool,
    /// Whether values are normalized.
    value_norm: bool,
    /// Whether norms are of rotated heads.
    rotates_first: bool,
    /// Element type of the cache. In 8 bits keys and values are rounded before attention, which f16 leaves to the bound.
    pub(crate) kv: KvType,
}

impl Sequence {
    pub(crate) fn shape(&self) -> AttentionShape {
        AttentionShape {
            heads: self.heads,
            kv_heads: self.kv_heads,
            dim: self.dim,
            scale: 1.0 / (self.dim as f32).sqrt(),
            window: self.window,
            score_cap: self.cap,
        }
    }

    pub(crate) fn new(
        (heads, kv_heads, dim): (usize, usize, usize),
        len: usize,
        (rotary_dim, window, cap): (usize, Option<usize>, Option<f32>),
        seed: u64,
    ) -> Sequence {
        let norm = |seed| normal(seed, dim).iter().map(|v| 1.0 + 0.2 * v).collect();
        Sequence {
            heads,
            kv_heads,
            dim,
            qkv: normal(seed, len * (heads + 2 * kv_heads) * dim),
            q_norm: norm(seed + 1),
            k_norm: norm(seed + 2),
            frequencies: (0..rotary_dim / 2)
                .map(|i| 10_000f32.powf(-(2.0 * i as f32) / rotary_dim as f32))
                .collect(),
            window,
            cap,
            sinks: None,
            keys_as_values: false,
            value_norm: false,
            rotates_first: false,
            kv: KvType::F16,
        }
    }

    pub(crate) fn in_8_bits(self) -> Sequence {
        Sequence {
            kv: KvType::F8,
            ..self
        }
    }

    /// A key or value as the cache has it.
    fn cached(&self, vector: Vec<f64>) -> Vec<f64> {
        if self.kv != KvType::F8 {
            return vector;
        }
        let vector: Vec<f32> = vector.into_iter().map(|x| x as f32).collect();
        let scale = f8::scale_of(&vector);
        let codes = vector.iter().map(|&x| f8::encode(x, scale));
        codes
            .map(|code| f64::from(f8::decode(code, scale)))
            .collect()
    }

    /// A sequence with the heads of Gemma 4: normalized values, which may be the keys.
    fn with_normalized_values(
        (heads, kv_heads, dim): (usize, usize, usize),
        len: usize,
        (window, keys_as_values): (Option<usize>, bool),
        seed: u64,
    ) -> Sequence {
        let mut s = Sequence {
            keys_as_values,
            value_norm: true,
            ..Sequence::new((heads, kv_heads, dim), len, (dim, window, None), seed)
        };
        s.qkv = normal(seed, len * s.row());
        s
    }

    /// The sequence with sinks below, among and above its scores.
    pub(crate) fn with_sinks(self) -> Sequence {
        let sinks = (0..self.heads).map(|head| 1.5 * head as f32 - 2.0);
        Sequence {
            sinks: Some(sinks.collect()),
            ..self
        }
    }

    /// Elements of a row of projections.
    pub(crate) fn row(&self) -> usize {
        let of_keys = if self.keys_as_values { 1 } else { 2 };
        (self.heads + of_keys * self.kv_heads) * self.dim
    }

    /// The heads of a row of projections of the layer that stores keys and values.
    fn row_heads(&self) -> RowHeads {
        match self.keys_as_values {
            true => RowHeads::KeysAsValues,
            false => RowHeads::QueriesKeysValues,
        }
    }

    /// The queries of all rows.
    fn queries(&self) -> Vec<f32> {
        let rows = self.qkv.chunks_exact(self.row());
        rows.flat_map(|row| &row[..self.width()]).copied().collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.qkv.len() / self.row()
    }

    /// Elements of a row of results.
    pub(crate) fn width(&self) -> usize {
        self.heads * self.dim
    }

    fn rotary_dim(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// A head of queries or keys after norm and rotation.
    fn head(&self, position: usize, head: usize, norm: &[f32]) -> Vec<f64> {
        let x = &self.qkv[position * self.row() + head * self.dim..][..self.dim];
        match self.rotates_first {
            true => {
                let rotated = self.rotated(position, &as_f64(x));
                let rotated: Vec<f32> = rotated.into_iter().map(|y| y as f32).collect();
                as_f64(&rms_norm(&rotated, norm))
            }
            false => self.rotated(position, &as_f64(&rms_norm(x, norm))),
        }
    }

    /// A head after rotation.
    fn rotated(&self, position: usize, x: &[f64]) -> Vec<f64> {
        let half = self.frequencies.len();
        let mut y = x.to_vec();
        for i in 0..half {
            let (sin, cos) = f64::from(position as f32 * self.frequencies[i]).sin_cos();
            let (sin, cos) = (sin * ATTENTION_FACTOR, cos * ATTENTION_FACTOR);
            y[i] = x[i] * cos - x[i + half] * sin;
            y[i + half] = x[i + half] * cos + x[i] * sin;
        }
        y
    }

    /// A head of values.
    fn value(&self, position: usize, kv: usize) -> Vec<f64> {
        let before = match self.keys_as_values {
            true => self.heads,
            false => self.heads + self.kv_heads,
        };
        let x = &self.qkv[position * self.row() + (before + kv) * self.dim..][..self.dim];
        match self.value_norm {
            true => as_f64(&rms_norm(x, &vec![1.0; self.dim])),
            false => as_f64(x),
        }
    }

    /// The answer for the row at `position`.
    pub(crate) fn attend(&self, position: usize) -> Vec<f64> {
        let mut out = Vec::new();
        for head in 0..self.heads {
            let kv = head / (self.heads / self.kv_heads);
            let q = self.head(position, head, &self.q_norm);
            let first = (position + 1).saturating_sub(self.window.unwrap_or(usize::MAX));
            let scores: Vec<f64> = (first..=position)
                .map(|p| {
                    let k = self.cached(self.head(p, self.heads + kv, &self.k_norm));
                    let product: f64 = q.iter().zip(&k).map(|(a, b)| a * b).sum();
                    let score = product / (self.dim as f64).sqrt();
                    self.cap
                        .map(f64::from)
                        .map_or(score, |cap| cap * (score / cap).tanh())
                })
                .collect();
            let sink = self.sinks.as_ref().map(|sinks| f64::from(sinks[head]));
            let all = || scores.iter().copied().chain(sink);
            let top = all().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
            let total: f64 = all().map(|s| (s - top).exp()).sum();
            let mut sum = vec![0.0; self.dim];
            for (p, w) in weights.iter().enumerate() {
                let v = self.cached(self.value(first + p, kv));
                sum.iter_mut()
                    .zip(&v)
                    .for_each(|(s, v)| *s += w / total * v);
            }
            out.extend(sum);
        }
        out
    }
}

/// A cache of two layers, and the block tables of sequences, whose blocks lie in turns. Tests use the second layer.
pub(crate) struct Pages {
    arena: DeviceBuffer,
    table: DeviceBuffer,
    stride: usize,
    shape: KvShape,
}

impl Pages {
    /// Pages for `len` positions of each of several sequences.
    pub(crate) fn new(gpu: &Arc<Gpu>, shape: KvShape, len: usize, sequences: usize) -> Pages {
        let stride = len.div_ceil(PAGE);
        let blocks = sequences * stride;
        let place = |i: usize| (i % stride * sequences + i / stride) as u32;
        let table: Vec<u32> = (0..blocks).map(place).collect();
        let bytes = blocks * 2 * shape.bytes();
        Pages {
            arena: DeviceBuffer::zeroed(gpu, Tag::DeviceKvCache, bytes).unwrap(),
            table: upload(gpu, &table),
            stride,
            shape,
        }
    }

    /// The pages of sequences from `sequence` on.
    pub(crate) fn from(&self, sequence: usize) -> CachedPages<'_> {
        CachedPages {
            arena: self.arena.address(),
            block_bytes: 2 * self.shape.bytes(),
            offset: self.shape.bytes(),
            shape: self.shape,
            table: &self.table,
            stride: self.stride,
            sequence,
            layer: 1,
            unfit: None,
        }
    }
}

/// The norms and the frequencies of a sequence on the device.
struct DeviceHeads {
    q_norm: DeviceBuffer,
    k_norm: DeviceBuffer,
    frequencies: DeviceBuffer,
    sinks: Option<DeviceBuffer>,
}

impl DeviceHeads {
    fn new(gpu: &Arc<Gpu>, s: &Sequence) -> DeviceHeads {
        DeviceHeads {
            q_norm: upload(gpu, &s.q_norm),
            k_norm: upload(gpu, &s.k_norm),
            frequencies: upload(gpu, &s.frequencies),
            sinks: s.sinks.as_ref().map(|sinks| upload(gpu, sinks)),
        }
    }

    fn heads(&self, s: &Sequence) -> Heads<'_> {
        Heads {
            shape: s.shape(),
            row: s.row_heads(),
            value_norm: s.value_norm,
            q_norm: Some(&self.q_norm),
            k_norm: Some(&self.k_norm),
            sinks: self.sinks.as_ref(),
            frequencies: (s.rotary_dim() > 0).then_some(&self.frequencies),
            rotary_dim: s.rotary_dim(),
            attention_factor: ATTENTION_FACTOR as f32,
            eps: EPS,
            rotates_first: s.rotates_first,
        }
    }
}

/// The ways in which a decode step divides the positions of a sequence among blocks.
fn divisions(gpu: &Gpu, h: &Heads<'_>, kv: KvType) -> impl Iterator<Item = SplitKv> {
    let is_limited = cuda::is_limited(&h.shape, h.sinks.is_some(), h.value_norm, h.row);
    let [unit, ..] = cuda::attention_units(h.shape.dim, h.rotary_dim, is_limited, kv);
    let has_clusters =
        gpu.arch().0 >= 9 && matches!(unit, Unit::AttentionDecode | Unit::AttentionDecodeF8);
    let cluster = has_clusters.then_some(SplitKv::Cluster);
    let splits = [1, 2, 3, 8].map(SplitKv::Splits);
    let fixed = SplitKv::fixed(2048);
    splits.into_iter().chain(cluster).chain([fixed])
}

/// A decode step of `sequences` sequences with a division.
fn plan(gpu: &Gpu, h: &Heads<'_>, kv: KvType, sequences: usize, division: SplitKv) -> DecodePlan {
    let hardware = Hardware::of(gpu).unwrap();
    DecodePlan::divided(&hardware, h.decode_shape(kv), sequences, division).unwrap()
}

/// A sequence whose rows a cache of the device takes.
struct Cached<'a> {
    gpu: &'a Arc<Gpu>,
    s: &'a Sequence,
    h: Heads<'a>,
    pages: CachedPages<'a>,
}

impl Cached<'_> {
    fn what(&self, kernel: &str) -> String {
        let AttentionShape {
            heads,
            kv_heads,
            dim,
            window,
            ..
        } = self.h.shape;
        let rotary_dim = self.h.rotary_dim;
        format!("{kernel} {heads}/{kv_heads} heads of {dim} ({rotary_dim}), window {window:?}")
    }

    /// Runs all rows but the last by both kernels of prompts: a prefix in one call, and the rest in another.
    fn check_prefill(&self, prefix: usize) {
        let Cached { gpu, s, h, pages } = self;
        let (last, width) = (s.len() - 1, s.width());
        let q = poisoned(gpu, s.len() * width * 2);
        let qkv = upload(gpu, &s.qkv);
        let kinds = [false, true];
        let outs = kinds.map(|_| poisoned(gpu, s.len() * width * 2));
        for (at, rows) in [(0, prefix), (prefix, last - prefix)] {
            if rows == 0 {
                continue;
            }
            cuda::store(gpu, h, pages, &qkv, at, rows, at, &q).unwrap();
            for (fixed, out) in kinds.into_iter().zip(&outs) {
                let rows = PromptRows {
                    at,
                    rows,
                    first_position: at,
                    fixed,
                };
                cuda::prefill(gpu, h, pages, &q, rows, out).unwrap();
            }
        }
        for (kernel, out) in ["prefill", "rows"].into_iter().zip(&outs) {
            let got = read_f16(out, last * width);
            for position in [
                0,
                prefix.saturating_sub(1),
                prefix,
                (prefix + last) / 2,
                last - 1,
            ] {
                let what = format!("{}, position {position}", self.what(kernel));
                let got = &got[position * width..(position + 1) * width];
                assert_close(got, &s.attend(position), ATTENTION, &what);
            }
            assert!(got.iter().all(|v| v.is_finite()), "a row was not written");
        }
    }

    /// Runs the last rows again as a layer does that has queries alone.
    fn check_queries_alone(&self, rows: usize) {
        let Cached { gpu, s, pages, .. } = self;
        let h = Heads {
            row: RowHeads::Queries,
            ..self.h
        };
        let (first, width) = (s.len() - rows, s.width());
        let q = poisoned(gpu, rows * width * 2);
        let out = poisoned(gpu, rows * width * 2);
        let queries = upload(gpu, &s.queries()[first * width..]);
        cuda::store(gpu, &h, pages, &queries, 0, rows, first, &q).unwrap();
        let prompt = PromptRows {
            at: 0,
            rows,
            first_position: first,
            fixed: false,
        };
        cuda::prefill(gpu, &h, pages, &q, prompt, &out).unwrap();
        let got = read_f16(&out, rows * width);
        for (i, got) in got.chunks_exact(width).enumerate() {
            let what = format!("{}, row {i}", self.what("prefill of queries"));
            assert_close(got, &s.attend(first + i), ATTENTION, &what);
        }
        let alone = Cached { h, ..*self };
        alone.check_decode_of(&s.queries()[(s.len() - 1) * width..]);
    }

    /// Runs the last row by the decode kernel, with every division of the positions.
    fn check_decode(&self) {
        let s = self.s;
        self.check_decode_of(&s.qkv[(s.len() - 1) * s.row()..]);
    }

    fn check_decode_of(&self, new: &[f32]) {
        let Cached { gpu, s, h, pages } = self;
        let (last, width) = (s.len() - 1, s.width());
        let want = s.attend(last);
        let new = upload(gpu, new);
        let positions = upload(gpu, &[last as u32]);
        let rows = SplitKvWorkspace::new(
            gpu,
            SplitKvWorkspace::sizes(h.shape.heads, h.shape.kv_heads, h.shape.dim),
            1,
        )
        .unwrap();
        for division in divisions(gpu, h, s.kv) {
            let out = poisoned(gpu, width * 2);
            let layout = Layout::RowMajor;
            let plan = plan(gpu, h, s.kv, 1, division);
            let single = DecodedRows {
                qkv: &new,
                positions: &positions,
                stored: false,
            };
            cuda::decode(gpu, h, pages, single, &plan, &rows, &out, layout).unwrap();
            let what = format!("{}, {division:?}", self.what("decode"));
            assert_close(&read_f16(&out, width), &want, ATTENTION, &what);
        }
    }
}

#[test]
fn attention_agrees_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (i, &(heads, kv_heads, dim, rotary_dim, len, prefix, window, cap)) in [
        (4, 2, 32, 32, 70, 1, None, None),
        (9, 3, 64, 64, 200, 63, None, None),
        (8, 2, 128, 128, 150, 64, None, None),
        (2, 2, 64, 64, 33, 0, None, None),
        (20, 2, 128, 128, 40, 5, None, None),
        (4, 1, 128, 128, 700, 690, None, None),
        // Windows within a page, over several, and at their ends; soft caps that bite.
        (4, 2, 32, 32, 300, 100, Some(1), None),
        (4, 2, 64, 64, 300, 130, Some(17), Some(0.7)),
        (8, 2, 128, 128, 400, 190, Some(64), None),
        (4, 1, 128, 128, 700, 300, Some(333), Some(2.0)),
        // Other sizes, and heads of which a part rotates.
        (4, 2, 32, 16, 70, 3, None, None),
        (4, 2, 64, 20, 90, 65, Some(30), None),
        (4, 1, 80, 80, 200, 64, None, Some(1.0)),
        (3, 3, 80, 32, 150, 10, Some(70), None),
        (16, 4, 256, 64, 200, 70, None, None),
        (2, 1, 256, 64, 2, 0, None, None),
        (2, 1, 256, 64, 64, 20, None, None),
        (6, 2, 96, 96, 200, 129, None, None),
        (6, 2, 96, 72, 200, 129, Some(100), None),
        (3, 1, 128, 96, 200, 70, None, None),
        (4, 2, 192, 192, 300, 128, Some(129), None),
        (4, 2, 192, 64, 130, 1, None, None),
        (8, 4, 256, 256, 300, 150, None, None),
        (8, 4, 256, 256, 300, 65, Some(100), Some(1.5)),
        (2, 1, 256, 128, 100, 64, Some(65), None),
        (8, 1, 512, 512, 300, 150, None, None),
        (3, 3, 512, 512, 130, 64, Some(40), Some(1.5)),
        // No element rotates.
        (8, 2, 128, 0, 200, 70, None, None),
        (4, 2, 32, 0, 70, 3, None, None),
    ]
    .iter()
    .enumerate()
    {
        let shape = (heads, kv_heads, dim);
        let s = Sequence::new(shape, len, (rotary_dim, window, cap), 10 * i as u64);
        check_alone(&gpu, &s, prefix);
    }
}

/// Keys and values in 8 bits, against f64 of the decoded codes.
#[test]
fn attention_in_8_bits_agrees_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (i, &(heads, kv_heads, dim, len, prefix)) in [
        (4, 2, 32, 70, 1),
        (9, 3, 64, 200, 63),
        (8, 2, 128, 150, 64),
        (2, 2, 64, 33, 0),
        (20, 2, 128, 40, 5),
        (4, 1, 128, 700, 690),
        (8, 8, 32, 300, 130),
    ]
    .iter()
    .enumerate()
    {
        let shape = (heads, kv_heads, dim);
        let s = Sequence::new(shape, len, (dim, None, None), 1500 + 10 * i as u64);
        check_alone(&gpu, &s.in_8_bits(), prefix);
    }
}

/// Heads that the kernels for 8 bits do not serve are refused by the first of them.
#[test]
fn heads_without_kernels_in_8_bits_are_refused() {
    let Some(gpu) = gpu() else { return };
    for (shape, rotary_dim, window, cap) in [
        ((4, 2, 64), 64, Some(17), None),
        ((4, 2, 64), 64, None, Some(1.0)),
        ((4, 2, 128), 64, None, None),
        ((4, 2, 80), 80, None, None),
        ((4, 2, 256), 256, None, None),
    ] {
        let s = Sequence::new(shape, 3, (rotary_dim, window, cap), 1600).in_8_bits();
        let on_device = DeviceHeads::new(&gpu, &s);
        let h = on_device.heads(&s);
        let pages = Pages::new(&gpu, h.kv(s.kv), s.len(), 1);
        let (qkv, q) = (upload(&gpu, &s.qkv), poisoned(&gpu, 3 * s.width() * 2));
        let refused = cuda::store(&gpu, &h, &pages.from(0), &qkv, 0, 3, 0, &q).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
        assert!(
            refused.message().contains("over keys and values as f8"),
            "{refused}"
        );
    }
}

/// A prompt in two parts, and a decode step.
fn check_alone(gpu: &Arc<Gpu>, s: &Sequence, prefix: usize) {
    let on_device = DeviceHeads::new(gpu, s);
    let h = on_device.heads(s);
    let pages = Pages::new(gpu, h.kv(s.kv), s.len(), 1);
    let cached = Cached {
        gpu,
        s,
        h,
        pages: pages.from(0),
    };
    cached.check_prefill(prefix);
    cached.check_decode();
}

/// Norms of rotated heads, of which all elements rotate or a part, in 16 bits and in 8.
#[test]
fn attention_with_norms_after_rotation_agrees_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (i, &(shape, rotary_dim, len, prefix, window)) in [
        ((8, 2, 128), 128, 150, 64, None),
        ((4, 1, 64), 64, 200, 63, Some(17)),
        ((4, 2, 32), 16, 70, 3, None),
        ((4, 2, 32), 32, 90, 20, None),
    ]
    .iter()
    .enumerate()
    {
        let s = Sequence {
            rotates_first: true,
            ..Sequence::new(shape, len, (rotary_dim, window, None), 900 + 10 * i as u64)
        };
        check_alone(&gpu, &s, prefix);
        if rotary_dim == s.dim && window.is_none() {
            check_alone(&gpu, &s.in_8_bits(), prefix);
        }
    }
}

/// Heads with sinks, with a window as in gpt-oss and without, and heads that rotate in part.
#[test]
fn attention_with_sinks_agrees_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (i, &(shape, rotary_dim, len, prefix, window)) in [
        ((16, 2, 64), 64, 300, 130, Some(128)),
        ((8, 1, 64), 64, 200, 63, None),
        ((4, 2, 128), 128, 150, 1, Some(16)),
        ((3, 3, 80), 32, 90, 65, None),
    ]
    .iter()
    .enumerate()
    {
        let s = Sequence::new(shape, len, (rotary_dim, window, None), 700 + i as u64);
        check_alone(&gpu, &s.with_sinks(), prefix);
    }
}

/// Normalized values, which may be the keys before norm and rotation, and layers that take the keys and values of such a one: heads of 256
/// and of 512 elements as in Gemma 4, and smaller ones.
#[test]
fn attention_with_normalized_values_agrees_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (i, &(shape, len, prefix, window, keys_as_values)) in [
        ((8, 4, 256), 300, 130, Some(100), false),
        ((16, 2, 512), 200, 63, None, true),
        ((8, 1, 512), 700, 650, None, false),
        ((4, 2, 32), 90, 20, Some(8), false),
        ((4, 1, 64), 130, 64, None, true),
    ]
    .iter()
    .enumerate()
    {
        let seed = 800 + 10 * i as u64;
        let s = Sequence::with_normalized_values(shape, len, (window, keys_as_values), seed);
        let on_device = DeviceHeads::new(&gpu, &s);
        let h = on_device.heads(&s);
        let pages = Pages::new(&gpu, h.kv(s.kv), s.len(), 1);
        let cached = Cached {
            gpu: &gpu,
            s: &s,
            h,
            pages: pages.from(0),
        };
        cached.check_prefill(prefix);
        cached.check_decode();
        cached.check_queries_alone(70);
    }
}

/// The caches of several sequences with room for as many pages each, which hold all rows but the last.
struct Batch {
    pages: Pages,
    /// The last row of each sequence, and its position.
    new: DeviceBuffer,
    positions: DeviceBuffer,
}

impl Batch {
    /// Stores the rows of sequences of at most `most` positions.
    fn new(gpu: &Arc<Gpu>, h: &Heads<'_>, sequences: &[Sequence], most: usize) -> Batch {
        let pages = Pages::new(gpu, h.kv(sequences[0].kv), most, sequences.len());
        let (mut new, mut last) = (vec![], vec![]);
        for (i, s) in sequences.iter().enumerate() {
            let len = s.len();
            if len > 1 {
                let (qkv, q) = (upload(gpu, &s.qkv), poisoned(gpu, len * s.width() * 2));
                cuda::store(gpu, h, &pages.from(i), &qkv, 0, len - 1, 0, &q).unwrap();
            }
            new.extend_from_slice(&s.qkv[(len - 1) * s.row()..]);
            last.push(len as u32 - 1);
        }
        Batch {
            pages,
            new: upload(gpu, &new),
            positions: upload(gpu, &last),
        }
    }
}

/// A decode step of several sequences of different lengths, however their positions are divided among blocks.
#[test]
fn attention_of_several_sequences_agrees_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (count, shape, window, kv) in [
        (1, (8, 2, 128), None, KvType::F16),
        (2, (8, 2, 128), None, KvType::F16),
        (8, (4, 1, 128), Some(90), KvType::F16),
        (8, (9, 3, 64), None, KvType::F16),
        (17, (4, 2, 128), None, KvType::F16),
        (17, (8, 4, 256), Some(65), KvType::F16),
        (9, (16, 2, 512), None, KvType::F16),
        (2, (8, 2, 128), None, KvType::F8),
        (8, (9, 3, 64), None, KvType::F8),
        // So many that each has a ring of its own size.
        (40, (16, 2, 128), None, KvType::F8),
        (80, (16, 2, 128), None, KvType::F8),
        (17, (4, 2, 32), None, KvType::F8),
    ] {
        let (heads, kv_heads, dim) = shape;
        let sequence = |i: usize| {
            let len = 1 + 131 * i % 400;
            Sequence {
                kv,
                ..Sequence::new(shape, len, (dim, window, None), 100 + i as u64)
            }
        };
        let mut sequences: Vec<Sequence> = (0..count).map(sequence).collect();
        // Norms are the model's, and the first sequence's are taken for all.
        let (q, k) = (sequences[0].q_norm.clone(), sequences[0].k_norm.clone());
        for s in &mut sequences {
            (s.q_norm, s.k_norm) = (q.clone(), k.clone());
        }
        let on_device = DeviceHeads::new(&gpu, &sequences[0]);
        let h = on_device.heads(&sequences[0]);
        let batch = Batch::new(&gpu, &h, &sequences, 400);
        let (new, positions, pages) = (&batch.new, &batch.positions, batch.pages.from(0));
        let wanted: Vec<Vec<f64>> = sequences.iter().map(|s| s.attend(s.len() - 1)).collect();
        let width = heads * dim;
        let workspace =
            SplitKvWorkspace::new(&gpu, SplitKvWorkspace::sizes(heads, kv_heads, dim), count)
                .unwrap();
        for division in divisions(&gpu, &h, kv) {
            let out = poisoned(&gpu, count * width * 2);
            let layout = Layout::RowMajor;
            let plan = plan(&gpu, &h, kv, count, division);
            let rows = DecodedRows {
                qkv: new,
                positions,
                stored: false,
            };
            cuda::decode(&gpu, &h, &pages, rows, &plan, &workspace, &out, layout).unwrap();
            let got = read_f16(&out, count * width);
            for (i, (got, want)) in got.chunks_exact(width).zip(&wanted).enumerate() {
                let what = format!("sequence {i} of {count}, {shape:?} in {kv:?}, {division:?}");
                assert_close(got, want, ATTENTION, &what);
            }
        }
    }
}
