//! The likeliest tokens on the device, so that the host reads one number, or a few hundred, instead of all logits.

use std::sync::Arc;

use super::gpu::{Gpu, int};
use super::launch::Launch;
use super::memory::{DeviceBuffer, Pinned};
use super::nvrtc::Unit;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;

/// Blocks that share a row of logits.
const BLOCKS: usize = 64;

/// What the kernels of this file are passed, by the start of their names.
pub(super) const ARGUMENTS: &[(&str, usize)] = &[
    ("argmax", size_of::<Arguments>()),
    ("shortlist", size_of::<ShortlistArguments>()),
];

#[repr(C)]
struct Arguments {
    logits: u64,
    best_value: u64,
    best_token: u64,
    arrived: u64,
    tokens: u64,
    positions: u64,
    history: u64,
    vocabulary: i32,
    history_steps: i32,
}

/// Memory in which blocks compare what they found.
#[derive(Debug)]
pub struct Best {
    values: DeviceBuffer,
    tokens: DeviceBuffer,
    arrived: DeviceBuffer,
    rows: usize,
}

impl Best {
    /// Room for `rows` rows.
    pub fn new(gpu: &Arc<Gpu>, rows: usize) -> Result<Best> {
        Ok(Best {
            values: DeviceBuffer::uninit(gpu, Tag::DeviceScratch, rows * BLOCKS * 4)?,
            tokens: DeviceBuffer::uninit(gpu, Tag::DeviceScratch, rows * BLOCKS * 4)?,
            arrived: DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, rows * 4)?,
            rows,
        })
    }
}

/// Writes the likeliest token (i32) of each of `rows` rows of f32 logits to `tokens`. With `next`, moves `positions` (i32) on
/// by one and notes the token in `history` (i32 `[steps, rows]`, where the host reads it) at the new position modulo the
/// steps.
pub fn argmax(
    gpu: &Gpu,
    logits: &DeviceBuffer,
    rows: usize,
    vocabulary: usize,
    best: &Best,
    tokens: &DeviceBuffer,
    next: Option<(&DeviceBuffer, &Pinned)>,
) -> Result<()> {
    let steps = next.map_or(0, |(_, history)| history.bytes() / 4 / rows.max(1));
    if rows > best.rows
        || logits.bytes() < rows * vocabulary * 4
        || tokens.bytes() < rows * 4
        || (next.is_some() && steps == 0)
    {
        bail!(
            Internal,
            "buffers of the sampler are too small for {rows} rows"
        );
    }
    let arguments = Arguments {
        logits: logits.address(),
        best_value: best.values.address(),
        best_token: best.tokens.address(),
        arrived: best.arrived.address(),
        tokens: tokens.address(),
        positions: next.map_or(0, |(positions, _)| positions.address()),
        history: next.map_or(0, |(_, history)| history.address()),
        vocabulary: int("the vocabulary", vocabulary)?,
        history_steps: int("steps", steps)?,
    };
    // SAFETY: the struct is the kernel's; sizes were checked.
    unsafe {
        Launch::new([BLOCKS as u32, rows as u32, 1], 256).run(
            gpu,
            Unit::Argmax,
            "argmax",
            &arguments,
        )
    }
}

/// Logits of a row that a shortlist holds; what the kernel keeps.
const KEPT: usize = 256;
/// Bytes of a row's result: the keys, the total, and the number of unusable logits.
const RESULT: usize = KEPT * 8 + 16;

#[repr(C)]
struct ShortlistArguments {
    logits: u64,
    lists: u64,
    sums: u64,
    unusable: u64,
    arrived: u64,
    results: u64,
    inverse_temperature: f64,
    vocabulary: i32,
}

/// The largest logits of a row, and what is known of the others.
#[derive(Clone, Debug, PartialEq)]
pub struct Shortlist {
    /// Tokens and their logits from the largest down, +0 before -0, equal ones by token.
    pub largest: Vec<(u32, f32)>,
    /// Sum over all logits of exp((x - largest) / temperature); 0 at a temperature of 0.
    pub total: f64,
    /// The temperature of `total`.
    pub temperature: f32,
    /// Logits of the row.
    pub vocabulary: usize,
}

impl Shortlist {
    /// Reads a row's result; nothing if some logit is not a number or plus infinity.
    fn read(result: &[u64], temperature: f32, vocabulary: usize) -> Option<Shortlist> {
        let (keys, rest) = result.split_at(KEPT);
        let largest = keys
            .iter()
            .take_while(|&&key| key != 0)
            .map(|&key| (!(key as u32), logit((key >> 32) as u32)));
        (rest[1] == 0).then(|| Shortlist {
            largest: largest.collect(),
            total: f64::from_bits(rest[0]),
            temperature,
            vocabulary,
        })
    }
}

/// The logit whose place in the order this is.
fn logit(ordered: u32) -> f32 {
    f32::from_bits(match ordered >> 31 {
        1 => ordered & 0x7fff_ffff,
        _ => !ordered,
    })
}

/// Memory in which blocks compare what they found.
#[derive(Debug)]
pub struct ShortlistScratch {
    lists: DeviceBuffer,
    sums: DeviceBuffer,
    unusable: DeviceBuffer,
    arrived: DeviceBuffer,
    results: DeviceBuffer,
    rows: usize,
}

impl ShortlistScratch {
    /// Room for `rows` rows.
    pub fn new(gpu: &Arc<Gpu>, rows: usize) -> Result<ShortlistScratch> {
        let scratch = |bytes| DeviceBuffer::uninit(gpu, Tag::DeviceScratch, rows * bytes);
        Ok(ShortlistScratch {
            lists: scratch(BLOCKS * KEPT * 8)?,
            sums: scratch(BLOCKS * 8)?,
            unusable: scratch(BLOCKS * 8)?,
            arrived: DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, rows * 4)?,
            results: scratch(RESULT)?,
            rows,
        })
    }
}

/// The shortlist of each of `rows` rows of f32 logits, when everything enqueued before has run. A row of which some logit is not
/// a number, or plus infinity, has none.
pub fn shortlists(
    gpu: &Gpu,
    logits: &DeviceBuffer,
    rows: usize,
    vocabulary: usize,
    temperature: f32,
    scratch: &ShortlistScratch,
) -> Result<Vec<Option<Shortlist>>> {
    if rows > scratch.rows {
        bail!(
            Internal,
            "{rows} rows of logits, and room for the shortlists of {}",
            scratch.rows
        );
    }
    logits.holds("logits", &[rows, vocabulary, 4])?;
    let inverse_temperature = match temperature {
        0.0 => 0.0,
        t => 1.0 / f64::from(t),
    };
    let arguments = ShortlistArguments {
        logits: logits.address(),
        lists: scratch.lists.address(),
        sums: scratch.sums.address(),
        unusable: scratch.unusable.address(),
        arrived: scratch.arrived.address(),
        results: scratch.results.address(),
        inverse_temperature,
        vocabulary: int("the vocabulary", vocabulary)?,
    };
    // SAFETY: the struct is the kernel's; sizes were checked.
    unsafe {
        Launch::new([BLOCKS as u32, rows as u32, 1], 512).run(
            gpu,
            Unit::TopK,
            "shortlist",
            &arguments,
        )
    }?;
    let mut results = vec![0u64; rows * RESULT / 8];
    scratch.results.read(0, &mut results)?;
    Ok(results
        .chunks_exact(RESULT / 8)
        .map(|result| Shortlist::read(result, temperature, vocabulary))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_in_the_order_are_those_of_logits() {
        let ordered = |x: f32| match x.to_bits() {
            bits if bits >> 31 == 1 => !bits,
            bits => bits | 0x8000_0000,
        };
        let values = [
            f32::NEG_INFINITY,
            -3.5,
            -1e-40,
            -0.0,
            0.0,
            1e-40,
            2.0,
            f32::MAX,
        ];
        for pair in values.windows(2) {
            assert!(ordered(pair[0]) < ordered(pair[1]), "{pair:?}");
        }
        for value in values {
            assert_eq!(logit(ordered(value)).to_bits(), value.to_bits());
        }
    }

    #[test]
    fn results_are_read() {
        let mut result = vec![0u64; RESULT / 8];
        result[0] = 0xc000_0000_0000_0000 | u64::from(!7u32);
        result[1] = 0x3fff_ffff_0000_0000 | u64::from(!9u32);
        result[KEPT] = 1.5f64.to_bits();
        let list = Shortlist::read(&result, 0.5, 10).unwrap();
        assert_eq!(list.largest, [(7, 2.0), (9, -2.0)]);
        assert_eq!(
            (list.total, list.temperature, list.vocabulary),
            (1.5, 0.5, 10)
        );
        result[KEPT + 1] = 1;
        assert_eq!(Shortlist::read(&result, 0.5, 10), None);
    }
}
