//! wgmma on e4m3 with weights as A from registers, as a candidate for decoding: its issue rate, its latency, and the precision of its sums,
//! because its accumulators are narrower than f32.

use std::sync::Arc;

use NVFP4::base::memory::Tag;
use NVFP4::cuda::{DeviceBuffer, Gpu, Program, Shape};
use NVFP4::format::{e2m1, e4m3, random};

use super::{Figures, Mark, median, read_u64, zeros};

const SOURCE: &str = include_str!("kernels/wgmma.cu");
/// Rows of A, columns of B, and K of one instruction.
const ROWS: usize = 64;
const COLUMNS: usize = 8;
const K: usize = 32;

/// Clocks of a multiprocessor between instructions at which 64 rows by 32 k per instruction keep up with memory; half of it if that takes
/// two instructions.
const KEEPS_UP: f64 = 58.0;

#[repr(C)]
struct Arguments {
    a: u64,
    b: u64,
    sums: u64,
    clocks: u64,
    steps: i32,
}

/// The words of `a`, `[64, 32]`, in the order of lanes.
fn fragments(a: &[u8]) -> Vec<u32> {
    let mut words = Vec::with_capacity(512);
    for thread in 0..128 {
        let (warp, lane) = (thread / 32, thread % 32);
        let (g, t) = (lane / 4, lane % 4);
        for word in 0..4 {
            let (row, k) = (16 * warp + g + 8 * (word % 2), 4 * t + 16 * (word / 2));
            let bytes = &a[row * K + k..][..4];
            words.push(u32::from_le_bytes(bytes.try_into().expect("four bytes")));
        }
    }
    words
}

/// The bytes of `b`, `[8, 32]`, in their order in shared memory.
fn tile(b: &[u8]) -> Vec<u8> {
    let half = |h: usize| (0..COLUMNS).flat_map(move |n| b[n * K + 16 * h..][..16].to_vec());
    half(0).chain(half(1)).collect()
}

/// The position of element (row, column) of the sums.
fn sum_at(row: usize, column: usize) -> usize {
    let (warp, g, upper) = (row / 16, row % 8, row % 16 / 8);
    (32 * warp + 4 * g + column / 2) * 4 + 2 * upper + column % 2
}

struct Bench<'a> {
    gpu: &'a Arc<Gpu>,
    program: Program,
}

impl Bench<'_> {
    fn upload<T: NVFP4::base::memory::Plain>(&self, values: &[T]) -> DeviceBuffer {
        DeviceBuffer::from_slice(self.gpu, Tag::DeviceScratch, values).unwrap()
    }

    /// Clocks per instruction of a multiprocessor.
    fn clocks(&self, kernel: &str, warpgroups: u32) -> f64 {
        const STEPS: usize = 4096;
        let blocks = self.gpu.multiprocessors();
        let noise: Vec<u8> = (0..2 * ROWS * K)
            .map(|i| (random::bits(1, i as u64) % 0x70) as u8)
            .collect();
        let words: Vec<u32> = noise.chunks_exact(ROWS * K).flat_map(fragments).collect();
        let (a, b) = (self.upload(&words), self.upload(&noise[..32 * K]));
        let (sums, clocks) = (zeros(self.gpu, 512 * 4), zeros(self.gpu, blocks * 8));
        let arguments = Arguments {
            a: a.address(),
            b: b.address(),
            sums: sums.address(),
            clocks: clocks.address(),
            steps: STEPS as i32,
        };
        let shape = Shape {
            grid: [blocks as u32, 1, 1],
            threads: 128 * warpgroups,
            shared: 0,
            overlap: false,
        };
        let runs = (0..5).map(|_| {
            // SAFETY: the struct is the kernel's, and its buffers have the sizes that it names.
            unsafe { self.program.launch(kernel, shape, &arguments) }.unwrap();
            let slowest = read_u64(&clocks, blocks).into_iter().max();
            slowest.expect("there are blocks") as f64 / (STEPS as f64 * f64::from(warpgroups))
        });
        median(runs.collect())
    }

    /// For each of `blocks`: the start values `c` and after them `steps` products of `a` [64, 32] and `b` [8, 32].
    fn sums(&self, a: &[u8], b: &[u8], c: &[f32], blocks: usize) -> Vec<f32> {
        let words: Vec<u32> = a.chunks_exact(ROWS * K).flat_map(fragments).collect();
        let tiles: Vec<u8> = b.chunks_exact(COLUMNS * K).flat_map(tile).collect();
        let (a, b, sums) = (self.upload(&words), self.upload(&tiles), self.upload(c));
        let arguments = Arguments {
            a: a.address(),
            b: b.address(),
            sums: sums.address(),
            clocks: 0,
            steps: (words.len() / 512 / blocks) as i32,
        };
        let shape = Shape {
            grid: [blocks as u32, 1, 1],
            threads: 128,
            shared: 0,
            overlap: false,
        };
        // SAFETY: as above.
        unsafe { self.program.launch("sums_8", shape, &arguments) }.unwrap();
        let mut out = vec![0f32; c.len()];
        sums.read(0, &mut out).unwrap();
        out
    }
}

pub(super) fn run(gpu: &Arc<Gpu>, figures: &mut Figures) {
    let bench = Bench {
        gpu,
        program: Program::new(gpu, "wgmma.cu", SOURCE).unwrap(),
    };
    for n in [8, 16, 32] {
        let latency = bench.clocks(&format!("latency_{n}"), 1);
        figures.add(format!("wgmma n{n} latency"), latency, "clk", None);
        for kind in ["chained", "separate", "fed"] {
            for warpgroups in 1..=4 {
                let clocks = bench.clocks(&format!("{kind}_{n}"), warpgroups);
                let mark = (n == 8 && kind == "fed" && warpgroups == 4)
                    .then_some(Mark::AtMost(KEEPS_UP / 2.0));
                let name = format!("wgmma n{n} {kind}, {warpgroups} warpgroups");
                figures.add(name, clocks, "clk", mark);
            }
        }
    }
    exactness(&bench, figures);
    decoding(&bench, figures);
}

/// Whether sums of integers are exact, and how far apart two terms may be.
fn exactness(bench: &Bench<'_>, figures: &mut Figures) {
    const STEPS: usize = 80;
    let whole = |seed: u64, i: usize, most: u64| {
        (random::bits(seed, i as u64) % (2 * most + 1)) as f32 - most as f32
    };
    let a: Vec<f32> = (0..STEPS * ROWS * K).map(|i| whole(2, i, 6)).collect();
    let b: Vec<f32> = (0..STEPS * COLUMNS * K).map(|i| whole(3, i, 8)).collect();
    let bytes = |v: &[f32]| v.iter().map(|&x| e4m3::encode(x)).collect::<Vec<_>>();
    let got = bench.sums(&bytes(&a), &bytes(&b), &[0.0; 512], 1);
    let mut worst = 0f64;
    for row in 0..ROWS {
        for column in 0..COLUMNS {
            let steps = (0..STEPS).flat_map(|s| (0..K).map(move |k| (s, k)));
            let want: f64 = steps
                .map(|(s, k)| {
                    f64::from(a[(s * ROWS + row) * K + k])
                        * f64::from(b[(s * COLUMNS + column) * K + k])
                })
                .sum();
            worst = worst.max((f64::from(got[sum_at(row, column)]) - want).abs());
        }
    }
    figures.add(
        "wgmma sums of small whole numbers, K = 2560: worst error",
        worst,
        "",
        Some(Mark::AtMost(0.0)),
    );

    // One large product beside a product of 1, and a large sum onto which a product of 1 comes.
    let kept = |large_sum: bool| {
        let exact = |n: i32| {
            let (mut a, mut b) = (vec![0u8; ROWS * K], vec![0u8; COLUMNS * K]);
            let mut c = vec![0f32; 512];
            let one = e4m3::encode(1.0);
            (a[1], b[1]) = (one, one);
            match large_sum {
                true => c[0] = 2f32.powi(n),
                false => {
                    a[0] = e4m3::encode(2f32.powi(n / 2));
                    b[0] = e4m3::encode(2f32.powi(n - n / 2));
                }
            }
            bench.sums(&a, &b, &c, 1)[0] == 2f32.powi(n) + 1.0
        };
        let last = (0..=if large_sum { 23 } else { 16 })
            .take_while(|&n| exact(n))
            .last();
        f64::from(last.unwrap_or(-1))
    };
    figures.add(
        "wgmma 2^n + 1 is exact within one instruction to n",
        kept(false),
        "",
        None,
    );
    figures.add(
        "wgmma 2^n + 1 is exact onto a sum to n",
        kept(true),
        "",
        None,
    );
}

/// A product of an NVFP4 row of K = 2560 with activations in e4m3 terms. Each column has the terms of one of the two blocks in an
/// instruction's K, so that each block of 16 has its own sum, and its scale is applied in f32.
fn decoding(bench: &Bench<'_>, figures: &mut Figures) {
    const STEPS: usize = 80;
    let codes: Vec<u8> = (0..STEPS * ROWS * K)
        .map(|i| (random::bits(4, i as u64) % 16) as u8)
        .collect();
    let scales: Vec<f32> = (0..STEPS * ROWS * 2)
        .map(|i| e4m3::decode(0x28 + (random::bits(5, i as u64) % 0x20) as u8))
        .collect();
    // About normal, with an outlier of 60 now and then.
    let x: Vec<f32> = (0..STEPS * K)
        .map(|i| {
            let bits = random::bits(6, i as u64);
            let part = |shift: u32| (bits >> shift & 0xffff) as f32 / 65536.0;
            let normal = (part(0) + part(16) + part(32) - 1.5) * 2.0;
            if bits >> 48 & 0xff == 0 {
                60.0 * normal
            } else {
                normal
            }
        })
        .collect();
    let largest = x.iter().fold(0f32, |m, v| m.max(v.abs()));
    let factor = 2f32.powi((448.0 / largest).log2().floor() as i32);
    let a: Vec<u8> = codes
        .iter()
        .map(|&c| e4m3::encode(e2m1::decode(c)))
        .collect();
    for terms in 1..=4 {
        let mut b = vec![0u8; STEPS * COLUMNS * K];
        for (i, &value) in x.iter().enumerate() {
            let (step, k) = (i / K, i % K);
            let mut rest = value * factor;
            for term in 0..terms {
                // Each term is scaled up by 16, to the place of the previous one.
                let byte = e4m3::encode(rest);
                b[(step * COLUMNS + 2 * term + k / 16) * K + k] = byte;
                rest = (rest - e4m3::decode(byte)) * 16.0;
            }
        }
        let got = bench.sums(&a, &b, &vec![0f32; STEPS * 512], STEPS);
        let (mut difference, mut norm) = (0.0, 0.0);
        for row in 0..ROWS {
            let (mut y, mut want) = (0f32, 0f64);
            for step in 0..STEPS {
                for half in 0..2 {
                    let scale = scales[(step * ROWS + row) * 2 + half];
                    let sum = (0..terms).rev().fold(0f32, |sum, term| {
                        sum / 16.0 + got[step * 512 + sum_at(row, 2 * term + half)]
                    });
                    y += scale * sum / factor;
                    want += (0..16)
                        .map(|i| {
                            let k = 16 * half + i;
                            f64::from(e2m1::decode(codes[(step * ROWS + row) * K + k]))
                                * f64::from(scale)
                                * f64::from(x[step * K + k])
                        })
                        .sum::<f64>();
                }
            }
            difference += (f64::from(y) - want).powi(2);
            norm += want * want;
        }
        figures.add(
            format!("wgmma NVFP4 product, K = 2560, {terms} e4m3 terms: relative L2"),
            (difference / norm).sqrt(),
            "",
            (terms >= 2).then_some(Mark::AtMost(3e-3)),
        );
    }
}
