//! The linear kernels at Qwen3-0.6B shapes: `cargo bench --bench linear [-- LEVEL ..]`. For each named level, or each but the scalar
//! reference, prints medians for one thread and for two, and the read bandwidth measured in the same run. Each result is checked before it
//! is timed.

use std::hint::black_box;
use std::time::Instant;

use NVFP4::cpu::{Cpu, Level, Packed, Workspace};
use NVFP4::format::random;

/// (rows, K) of one decoder layer: q, k, v, o, gate, up, down.
const LAYER: [(usize, usize); 7] = [
    (2048, 1024),
    (1024, 1024),
    (1024, 1024),
    (1024, 2048),
    (3072, 1024),
    (3072, 1024),
    (1024, 3072),
];
/// Layers in rotation: some 250 MB, larger than any cache.
const LAYERS: usize = 28;
const RUNS: usize = 5;

fn random_weight(seed: u64, rows: usize, cols: usize) -> Packed {
    let mut counter = 0;
    Packed::nvfp4(rows, cols, 1e-2, &mut |_, codes, scales| {
        for c in codes.chunks_mut(8) {
            counter += 1;
            c.copy_from_slice(&random::bits(seed, counter).to_le_bytes()[..c.len()]);
        }
        scales
            .iter_mut()
            .enumerate()
            .for_each(|(i, s)| *s = 0x30 + (random::bits(seed, i as u64) % 32) as u8);
        Ok(())
    })
    .expect("random codes and scales are valid")
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn time(mut run: impl FnMut()) -> f64 {
    run();
    median(
        (0..RUNS)
            .map(|_| {
                let start = Instant::now();
                run();
                start.elapsed().as_secs_f64()
            })
            .collect(),
    )
}

fn main() {
    let named: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    let weights: Vec<Packed> = (0..LAYERS)
        .flat_map(|l| {
            LAYER
                .iter()
                .enumerate()
                .map(move |(i, &(n, k))| random_weight((l * 7 + i) as u64, n, k))
        })
        .collect();
    let bytes: usize = weights.iter().map(Packed::bytes).sum();
    let macs: usize = weights.iter().map(|w| w.rows() * w.cols()).sum();
    let x: Vec<f32> = (0..512 * 3072)
        .map(|i| random::uniform(9, i) - 0.5)
        .collect();
    let buffer = vec![1f32; (512 << 20) / 4];
    println!(
        "{:.0} MB of weights in rotation; medians of {RUNS}",
        bytes as f64 / 1e6
    );
    for level in Level::ALL
        .into_iter()
        .rev()
        .filter(|l| l.is_present() && *l != Level::Scalar)
        .filter(|l| named.is_empty() || named.iter().any(|n| n == l.name()))
    {
        for threads in [1, 2] {
            let cpu = Cpu::with_level(level, Some(threads)).expect("the level is present");
            let mut y = vec![0f32; 512 * 3072];
            let mut ws = Workspace::new();
            let mut all = |m: usize, int8: bool, count: usize| {
                for w in weights.iter().take(count) {
                    let (x, y) = (&x[..m * w.cols()], &mut y[..m * w.rows()]);
                    cpu.linear(x, m, &mut [(w, y)], int8, &mut ws)
                        .expect("shapes agree");
                }
                black_box(&y);
            };
            let read = cpu.read_bandwidth(&buffer) / 1e9;
            let gemv = time(|| all(1, false, weights.len()));
            let gemv8 = time(|| all(1, true, weights.len()));
            let few = 4 * LAYER.len();
            let few_macs: usize = weights.iter().take(few).map(|w| w.rows() * w.cols()).sum();
            let rate = |m: usize, s: f64| (m * few_macs) as f64 / s / 1e9;
            let exact = rate(512, time(|| all(512, false, few)));
            let int8 = rate(512, time(|| all(512, true, few)));
            let few_tokens = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48];
            let small = few_tokens.map(|m| {
                let mut of = |int8, large| rate(m, time(|| all(m, int8, few))) / large;
                format!(" {m}: {:.2} {:.2}", of(false, exact), of(true, int8))
            });
            println!(
                "{:7} {threads} threads: read {read:5.1} GB/s | M=1 exact {:5.1} GB/s ({:4.2}) int8 {:5.1} GB/s | M=512 exact {exact:6.1} int8 {int8:6.1} GMAC/s ({:.2})",
                level.name(),
                bytes as f64 / gemv / 1e9,
                bytes as f64 / gemv / 1e9 / read,
                bytes as f64 / gemv8 / 1e9,
                exact / int8,
            );
            println!(
                "        share of the rate at M=512, exact and int8, by M:{}",
                small.concat()
            );
        }
    }
    println!(
        "{:.0} M multiply-adds per token in the layers",
        macs as f64 / 1e6
    );
}
