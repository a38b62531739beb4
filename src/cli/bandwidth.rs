//! How fast this machine's memory can be read by the threads that run a model: the ceiling of decoding.

use std::hint::black_box;
use std::time::Instant;

use NVFP4::base::Result;
use NVFP4::base::memory::{Buffer, Tag};
use NVFP4::base::threads::Pool;

/// More than the caches of the machines this runs on.
const BYTES: usize = 1 << 30;

/// Bytes of one part; threads take parts as they get free.
const PART: usize = 1 << 21;

/// Times the buffer is read. The best counts: other load only slows reading down.
const PASSES: usize = 7;

/// Bytes read per second by the threads of `pool`.
pub(super) fn read(pool: &Pool) -> Result<f64> {
    let mut buffer = Buffer::<u32>::zeroed(Tag::Scratch, BYTES / 4)?;
    // Pages that were never written may all be one page of zeros, which is in the cache.
    buffer.fill(1);
    let words = PART / 4;
    let mut best = f64::MAX;
    for _ in 0..PASSES {
        let start = Instant::now();
        pool.run(BYTES / PART, |part| {
            black_box(sum(&buffer[part * words..(part + 1) * words]));
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(BYTES as f64 / best)
}

/// Several sums at once, so that additions do not wait for one another.
fn sum(words: &[u32]) -> u32 {
    let (chunks, _) = words.as_chunks::<64>();
    let mut sums = [0u32; 64];
    for chunk in chunks {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().fold(0, |a, &b| a.wrapping_add(b))
}
