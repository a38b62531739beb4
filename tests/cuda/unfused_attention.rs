//! Attention of the unfused reference against f64: norms, rotations, the cache and the scores by kernels of their own.

use std::sync::Arc;

use NVFP4::cuda::{self, CachedPages, DeviceBuffer, DeviceSlice, Gpu, KvShape};
use NVFP4::tensor::KvType;

use crate::attention::{ATTENTION_FACTOR, Pages, Sequence};
use crate::support::{EPS, assert_close, gpu, normal, poisoned, read_f32, upload};

/// The bound of attention in f32 with a cache in f16, which alone is rounded.
const REFERENCE: f64 = 6e-4;

/// The queries, keys and values of a sequence in f32 on the device. Queries and keys are normalized and rotated there.
struct Unfused<'a> {
    gpu: &'a Arc<Gpu>,
    s: &'a Sequence,
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
}

impl<'a> Unfused<'a> {
    fn new(gpu: &'a Arc<Gpu>, s: &'a Sequence) -> Unfused<'a> {
        let some_heads = |first: usize, count: usize| -> DeviceBuffer {
            let rows = s.qkv.chunks_exact(s.row());
            let values: Vec<f32> = rows
                .flat_map(|row| &row[first * s.dim..(first + count) * s.dim])
                .copied()
                .collect();
            upload(gpu, &values)
        };
        let unfused = Unfused {
            gpu,
            s,
            q: some_heads(0, s.heads),
            k: some_heads(s.heads, s.kv_heads),
            v: some_heads(s.heads + s.kv_heads, s.kv_heads),
        };
        let cos = unfused.rotations(f32::cos);
        let sin = unfused.rotations(f32::sin);
        for (x, heads, norm) in [
            (&unfused.q, s.heads, &s.q_norm),
            (&unfused.k, s.kv_heads, &s.k_norm),
        ] {
            let norm = upload(gpu, norm);
            cuda::rms_norm_f32(x.into(), (&norm).into(), EPS, x.into()).unwrap();
            cuda::rotate(x.into(), heads, s.dim, (&cos).into(), (&sin).into()).unwrap();
        }
        unfused
    }

    /// The cosines or sines of all positions.
    fn rotations(&self, function: fn(f32) -> f32) -> DeviceBuffer {
        let pairs = self.s.frequencies.len();
        let all = 0..self.s.len() * pairs;
        let values: Vec<f32> = all
            .map(|i| {
                let angle = (i / pairs) as f32 * self.s.frequencies[i % pairs];
                function(angle) * ATTENTION_FACTOR as f32
            })
            .collect();
        upload(self.gpu, &values)
    }

    /// Stores the rows from `first` to `end`, and runs attention for them.
    fn run(&self, pages: &CachedPages<'_>, first: usize, end: usize, out: &DeviceBuffer) {
        let &Sequence {
            heads,
            kv_heads,
            dim,
            ..
        } = self.s;
        let shape = self.s.shape();
        let part = |x: &DeviceBuffer, heads: usize| {
            let all = read_f32(x, self.s.len() * heads * dim);
            upload(self.gpu, &all[first * heads * dim..end * heads * dim])
        };
        let q = part(&self.q, heads);
        let (k, v) = (part(&self.k, kv_heads), part(&self.v, kv_heads));
        let rows = end - first;
        cuda::store_kv(pages, (&k).into(), (&v).into(), rows, first).unwrap();
        let row = heads * dim * 4;
        let out = DeviceSlice::from(out).part(first * row..end * row).unwrap();
        let sinks = self.s.sinks.as_ref().map(|sinks| upload(self.gpu, sinks));
        let sinks = sinks.as_ref().map(DeviceSlice::from);
        cuda::attention_reference(&shape, sinks, pages, (&q).into(), rows, first, out).unwrap();
    }
}

/// The u32 that notes the first layer with a value that f16 does not hold.
fn noted(unfit: &DeviceBuffer) -> u32 {
    let mut noted = [7u32];
    unfit.read(0, &mut noted).unwrap();
    noted[0]
}

/// Attention in f32 with norms and rotations by kernels of their own, over a cache that is filled in two parts.
#[test]
fn unfused_attention_agrees_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (i, &(heads, kv_heads, dim, rotary_dim, len, prefix, window, cap, kv)) in [
        (4, 2, 16, 16, 70, 1, None, None, KvType::F16),
        (6, 2, 48, 32, 200, 63, Some(30), None, KvType::F16),
        (8, 2, 128, 128, 150, 64, None, Some(0.7), KvType::F16),
        (4, 1, 80, 80, 300, 130, Some(65), Some(2.0), KvType::F16),
        (8, 4, 256, 256, 300, 65, Some(100), None, KvType::F16),
        (2, 1, 256, 128, 100, 64, Some(1), Some(1.5), KvType::F16),
        (4, 1, 512, 512, 130, 65, None, None, KvType::F16),
        (6, 2, 48, 32, 200, 63, Some(30), None, KvType::F8),
        (8, 2, 128, 128, 150, 64, None, None, KvType::F8),
    ]
    .iter()
    .enumerate()
    {
        let shape = (heads, kv_heads, dim);
        let s = Sequence::new(shape, len, (rotary_dim, window, cap), 3000 + 10 * i as u64);
        let s = if i % 2 == 1 { s.with_sinks() } else { s };
        let s = if kv == KvType::F8 { s.in_8_bits() } else { s };
        let unfused = Unfused::new(&gpu, &s);
        let heads_of_cache = KvShape {
            heads: kv_heads,
            dim,
            kind: kv,
        };
        let pages = Pages::new(&gpu, heads_of_cache, len, 1);
        let unfit = upload(&gpu, &vec![0u32; len]);
        let table = CachedPages {
            unfit: Some(&unfit),
            ..pages.from(0)
        };
        let width = s.width();
        let out = poisoned(&gpu, len * width * 4);
        for (first, end) in [(0, prefix), (prefix, len)] {
            unfused.run(&table, first, end, &out);
        }
        let got = read_f32(&out, len * width);
        for position in [0, prefix - 1, prefix, len - 1] {
            let what = format!("{heads}/{kv_heads} heads of {dim} at {position}");
            let got = &got[position * width..(position + 1) * width];
            assert_close(got, &s.attend(position), REFERENCE, &what);
        }
        assert_eq!(noted(&unfit), 0, "everything fits");
    }
}

/// A value that f16 does not hold is noted with the first layer that has one.
#[test]
fn keys_and_values_that_do_not_fit_are_noted() {
    let Some(gpu) = gpu() else { return };
    let (kv_heads, dim) = (2, 64);
    let shape = KvShape {
        heads: kv_heads,
        dim,
        kind: KvType::F16,
    };
    let pages = Pages::new(&gpu, shape, 1, 1);
    let unfit = upload(&gpu, &[0u32]);
    let store = |layer: usize, value: f32| {
        let mut rows = normal(1, kv_heads * dim);
        let k = upload(&gpu, &rows);
        rows[77] = value;
        let v = upload(&gpu, &rows);
        let table = CachedPages {
            layer,
            unfit: Some(&unfit),
            ..pages.from(0)
        };
        cuda::store_kv(&table, (&k).into(), (&v).into(), 1, 0).unwrap();
        noted(&unfit)
    };
    assert_eq!(store(0, 65_519.0), 0);
    assert_eq!(store(1, -65_520.0), 2);
    assert_eq!(store(0, f32::NAN), 2, "the first that was noted stays");
}
