//! Sampling on the device, so that the host reads one token instead of all logits.

use std::sync::Arc;

use super::driver::{DeviceBuffer, DeviceSlice, Gpu, Launch, Pinned, StagedBuffer, int};
use super::kernel::kernels;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::{Plain, Tag, as_bytes};

/// CTAs that share a row of logits.
const BLOCKS: usize = 64;

kernels! {
    /// The argmax of rows.
    enum Argmax(Arguments) {
        Argmax { Rows = "argmax" }
    }

    /// The kernels of a draw, in their order.
    enum Draw(DrawArguments) {
        Draw {
            Largest = "draw_largest",
            Buckets = "draw_buckets",
            Choose = "draw_choose",
        }
    }

    /// Log-probabilities of given tokens.
    enum LikelihoodKernel(LikelihoodArguments) {
        Likelihood { Rows = "likelihood" }
    }

    /// The exclusion of tokens by masks.
    enum Mask(MaskArguments) {
        Mask { Rows = "mask_logits" }
    }
}

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

/// Workspace in which the blocks of a row combine their results.
#[derive(Debug)]
pub struct Best {
    values: DeviceBuffer,
    tokens: DeviceBuffer,
    arrived: DeviceBuffer,
    rows: usize,
}

impl Best {
    /// Bytes of values, tokens and counters of `rows` rows.
    const fn sizes(rows: usize) -> [usize; 3] {
        [rows * BLOCKS * 4, rows * BLOCKS * 4, rows * 4]
    }

    /// Bytes of the workspace of `rows` rows.
    pub fn bytes_of(rows: usize) -> usize {
        Self::sizes(rows).iter().sum()
    }

    /// Room for `rows` rows.
    pub fn new(gpu: &Arc<Gpu>, rows: usize) -> Result<Best> {
        let [values, tokens, arrived] = Self::sizes(rows);
        Ok(Best {
            values: DeviceBuffer::uninit(gpu, Tag::DeviceScratch, values)?,
            tokens: DeviceBuffer::uninit(gpu, Tag::DeviceScratch, tokens)?,
            arrived: DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, arrived)?,
            rows,
        })
    }
}

/// Writes the argmax token (i32) of each of `rows` rows of f32 logits to `tokens`. With `next`, also increments `positions` (i32) and
/// stores the token in `history` (i32 `[steps, rows]`, which the host reads) at the new position modulo the steps.
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
    // SAFETY: sizes were checked.
    unsafe {
        Launch::new([BLOCKS as u32, rows as u32, 1], 256)
            .of(Argmax::Rows)
            .run(gpu, &arguments)
    }
}

/// CTAs that share the only row of logits in [`draw`].
const DRAW_BLOCKS: usize = 64;
/// CTAs that share a row when its tokens are sorted into buckets. Each CTA adds a set of buckets of its own.
const BUCKET_BLOCKS: usize = 16;
/// Total number of CTAs beyond which fewer CTAs share a row.
const ENOUGH_BLOCKS: usize = 512;

/// Sampling rule of one row of logits, in the numbers that `kernels/sample/draw.cu` and the CPU use.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DrawRule {
    /// Seed of the random bits.
    pub seed: u64,
    /// Index of the draw in the seed's random stream. Each draw on the device increments it.
    pub draw: u64,
    /// Factor that turns logits into logarithms to base 2: log2(e) over the temperature. 0 takes the argmax.
    pub scale: f32,
    /// The least logarithm that is kept, relative to the largest: log2 of min-p.
    pub least_log: f32,
    /// The share of the total weight that the kept tokens reach; 1 keeps all.
    pub top_p: f32,
    /// Repetition penalty: the factor or divisor of logits whose token has occurred; 1 changes none.
    pub penalty: f32,
    /// Upper limit of kept tokens; 0 keeps all.
    pub top_k: u32,
    /// Always 0.
    pub reserved: u32,
}

// SAFETY: numbers without padding.
unsafe impl Plain for DrawRule {}

/// Stored in place of a token if every logit is minus infinity.
const ALL_RULED_OUT: i32 = -1;
/// Stored if the logit of token 0 is NaN or plus infinity. Token 1 stores one less, and so on.
const UNUSABLE: i32 = -2;

/// The device's choice, as the host reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drawn {
    /// A token.
    Token(u32),
    /// No token: every logit is minus infinity.
    AllRuledOut,
    /// No token: the logit of this token is NaN or plus infinity.
    Unusable(u32),
}

impl Drawn {
    /// Decodes a value that [`draw`] or [`argmax`] wrote.
    pub fn read(said: i32) -> Drawn {
        match said {
            0.. => Drawn::Token(said.cast_unsigned()),
            ALL_RULED_OUT => Drawn::AllRuledOut,
            _ => Drawn::Unusable((UNUSABLE - said).cast_unsigned()),
        }
    }
}

#[repr(C)]
struct DrawArguments {
    logits: u64,
    rules: u64,
    occurred: u64,
    best_value: u64,
    best_token: u64,
    buckets: u64,
    weights: u64,
    counts: u64,
    tokens: u64,
    positions: u64,
    history: u64,
    vocabulary: i32,
    history_steps: i32,
    blocks: i32,
    stride: i32,
}

/// Sampling rules of the rows, and workspace in which CTAs combine their results.
#[derive(Debug)]
pub struct DrawScratch {
    rules: DeviceBuffer,
    /// One bit per token that has occurred, if a rule needs it: `[rows, vocabulary / 32]` words.
    occurred: Option<DeviceBuffer>,
    best_value: DeviceBuffer,
    best_token: DeviceBuffer,
    /// The bucket of each token: u16 `[rows, vocabulary rounded up]`.
    buckets: DeviceBuffer,
    sums: DeviceBuffer,
    counts: DeviceBuffer,
    rows: usize,
    vocabulary: usize,
}

/// Buckets per row, as on the CPU.
const BUCKETS: usize = 2048;
/// Tokens whose buckets a thread reads at once.
const BUCKET_GROUP: usize = 8;

impl DrawScratch {
    /// Bytes of a row: rules, best values and tokens, buckets, and their sums and counts.
    const fn sizes(vocabulary: usize) -> [usize; 6] {
        [
            size_of::<DrawRule>(),
            DRAW_BLOCKS * 4,
            DRAW_BLOCKS * 4,
            vocabulary.next_multiple_of(BUCKET_GROUP) * 2,
            BUCKETS * 8,
            BUCKETS * 4,
        ]
    }

    /// Bytes of the marks of a row's tokens that have occurred.
    const fn mark_bytes(vocabulary: usize) -> usize {
        vocabulary.div_ceil(32) * 4
    }

    /// Bytes of the scratch of `rows` rows, with the marks that repetition penalties need.
    pub fn bytes_of(rows: usize, vocabulary: usize) -> usize {
        let row = Self::sizes(vocabulary).iter().sum::<usize>() + Self::mark_bytes(vocabulary);
        rows * row
    }

    /// Room for `rows` rows of `vocabulary` logits.
    pub fn new(gpu: &Arc<Gpu>, rows: usize, vocabulary: usize) -> Result<DrawScratch> {
        let scratch = |bytes| DeviceBuffer::uninit(gpu, Tag::DeviceScratch, rows * bytes);
        let zeroed = |bytes| DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, rows * bytes);
        let [rules, best_value, best_token, buckets, sums, counts] = Self::sizes(vocabulary);
        Ok(DrawScratch {
            rules: scratch(rules)?,
            occurred: None,
            best_value: scratch(best_value)?,
            best_token: scratch(best_token)?,
            buckets: scratch(buckets)?,
            sums: zeroed(sums)?,
            counts: zeroed(counts)?,
            rows,
            vocabulary,
        })
    }

    /// Row capacity.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Whether occurred tokens are tracked.
    pub fn marks(&self) -> bool {
        self.occurred.is_some()
    }

    /// Sets the rules of the first rows, and the tokens that occurred in each row if some rule has a penalty. The device then advances both
    /// by itself.
    pub fn set(&mut self, gpu: &Arc<Gpu>, rules: &[DrawRule], history: &[&[u32]]) -> Result<()> {
        if rules.len() > self.rows || history.len() != rules.len() {
            bail!(
                Internal,
                "{} rules and {} histories, and room for those of {} rows",
                rules.len(),
                history.len(),
                self.rows
            );
        }
        self.rules.write(0, rules)?;
        if rules.iter().all(|rule| rule.penalty == 1.0) {
            return Ok(());
        }
        let bytes = self.rows * Self::mark_bytes(self.vocabulary);
        let words = Self::mark_bytes(self.vocabulary) / 4;
        let occurred = match &mut self.occurred {
            Some(occurred) => occurred,
            none => none.insert(DeviceBuffer::uninit(gpu, Tag::DeviceScratch, bytes)?),
        };
        let mut bits = vec![0u32; rules.len() * words];
        for (row, history) in bits.chunks_exact_mut(words).zip(history) {
            // A token without a logit needs no mark.
            for &token in history.iter().filter(|&&t| (t as usize) < self.vocabulary) {
                row[token as usize / 32] |= 1 << (token % 32);
            }
        }
        occurred.write(0, &bits)
    }
}

/// Draws a token from each of `rows` rows of f32 logits by the rules in `scratch`, and writes it to `tokens` (i32), which holds the tokens
/// that produced the logits. Increments `positions` (i32), and stores the token in `history` (i32 `[steps, rows]`) at the new position
/// modulo the steps; [`Drawn::read`] decodes it. `penalties` says whether some rule has a penalty.
#[allow(clippy::too_many_arguments, reason = "what a step consists of")]
pub fn draw(
    gpu: &Gpu,
    logits: &DeviceBuffer,
    rows: usize,
    vocabulary: usize,
    penalties: bool,
    scratch: &DrawScratch,
    tokens: &DeviceBuffer,
    positions: &DeviceBuffer,
    history: &Pinned,
) -> Result<()> {
    let steps = history.bytes() / 4 / rows.max(1);
    if rows > scratch.rows
        || vocabulary != scratch.vocabulary
        || tokens.bytes().min(positions.bytes()) < rows * 4
        || steps == 0
        || (penalties && scratch.occurred.is_none())
    {
        bail!(
            Internal,
            "buffers of the sampler are not those of {rows} rows of {vocabulary} logits"
        );
    }
    logits.holds("logits", &[rows, vocabulary, 4])?;
    let blocks = (ENOUGH_BLOCKS / rows.max(1)).clamp(1, DRAW_BLOCKS);
    let occurred = scratch.occurred.as_ref().filter(|_| penalties);
    let arguments = DrawArguments {
        logits: logits.address(),
        rules: scratch.rules.address(),
        occurred: occurred.map_or(0, DeviceBuffer::address),
        best_value: scratch.best_value.address(),
        best_token: scratch.best_token.address(),
        buckets: scratch.buckets.address(),
        weights: scratch.sums.address(),
        counts: scratch.counts.address(),
        tokens: tokens.address(),
        positions: positions.address(),
        history: history.address(),
        vocabulary: int("the vocabulary", vocabulary)?,
        history_steps: int("steps", steps)?,
        blocks: int("blocks", blocks)?,
        stride: int("the vocabulary", vocabulary.next_multiple_of(BUCKET_GROUP))?,
    };
    let kernels = [
        (Draw::Largest, blocks, 512),
        (Draw::Buckets, blocks.min(BUCKET_BLOCKS), 512),
        (Draw::Choose, 1, 1024),
    ];
    for (kernel, blocks, threads) in kernels {
        let launch = Launch::new([blocks as u32, rows as u32, 1], threads);
        // SAFETY: sizes were checked.
        unsafe { launch.of(kernel).run(gpu, &arguments) }?;
    }
    Ok(())
}

#[repr(C)]
struct LikelihoodArguments {
    logits: u64,
    tokens: u64,
    found: u64,
    vocabulary: i32,
}

/// A given token by a row of logits, as `kernels/sample/likelihood.cu` writes it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FoundLikelihood {
    /// The natural logarithm of its softmax probability: an absolute error of at most 1e-6, and the rounding of f32. It has no meaning if no
    /// token could be chosen from the row.
    pub log_probability: f32,
    /// The argmax of the row, for [`Drawn::read`].
    pub argmax: i32,
}

// SAFETY: numbers without padding.
unsafe impl Plain for FoundLikelihood {}

/// Writes a [`FoundLikelihood`] for each of `rows` rows of f32 logits `[rows, vocabulary]` to `found`, of the tokens (i32) in `tokens`, which are
/// among the vocabulary. The same rows give the same bits.
pub fn likelihoods(
    logits: &DeviceBuffer,
    rows: usize,
    vocabulary: usize,
    tokens: DeviceSlice<'_>,
    found: DeviceSlice<'_>,
) -> Result<()> {
    logits.holds("logits", &[rows, vocabulary, 4])?;
    tokens.holds("tokens", &[rows, 4])?;
    found.holds("likelihoods", &[rows, size_of::<FoundLikelihood>()])?;
    let arguments = LikelihoodArguments {
        logits: logits.address(),
        tokens: tokens.address(),
        found: found.address(),
        vocabulary: int("the vocabulary", vocabulary)?,
    };
    // SAFETY: sizes were checked.
    unsafe {
        Launch::new([rows as u32, 1, 1], 1024)
            .of(LikelihoodKernel::Rows)
            .run(logits.gpu(), &arguments)
    }
}

#[repr(C)]
struct MaskArguments {
    logits: u64,
    masks: u64,
    rows: u64,
    vocabulary: i32,
    words: i32,
}

/// Threads of a CTA of the mask kernel, which has a word for each.
const MASK_THREADS: usize = 256;

/// Masks of some rows of logits: the numbers of the rows, and then a bit for each token of each.
pub struct MaskRows {
    masks: StagedBuffer,
    /// Masks that there is room for, and those that are set.
    most: usize,
    count: usize,
    vocabulary: usize,
    /// The last of the rows.
    last: usize,
}

impl MaskRows {
    /// Bytes of a mask of `vocabulary` tokens, and of the number of its row.
    const fn bytes_of_mask(vocabulary: usize) -> usize {
        4 + vocabulary.div_ceil(32) * 4
    }

    /// Bytes of `rows` masks on the device.
    pub fn bytes_of(rows: usize, vocabulary: usize) -> usize {
        rows * Self::bytes_of_mask(vocabulary)
    }

    /// Room for the masks of `rows` rows of `vocabulary` logits.
    pub fn new(gpu: &Arc<Gpu>, rows: usize, vocabulary: usize) -> Result<MaskRows> {
        let bytes = Self::bytes_of(rows, vocabulary);
        Ok(MaskRows {
            masks: StagedBuffer::uninit(gpu, Tag::DeviceScratch, bytes)?,
            most: rows,
            count: 0,
            vocabulary,
            last: 0,
        })
    }

    /// Masks that there is room for.
    pub fn rows(&self) -> usize {
        self.most
    }

    /// Enqueues a copy of masks, each with its row. Bit `i % 32` of word `i / 32` of a mask is set if token `i` is allowed; words that a mask
    /// lacks allow none. Returns before the copy has run.
    pub fn set(&mut self, masks: &[(usize, &[u32])]) -> Result<()> {
        if masks.len() > self.most {
            bail!(
                Internal,
                "{} masks, and room for those of {} rows",
                masks.len(),
                self.most
            );
        }
        let bytes = self.vocabulary.div_ceil(32) * 4;
        let len = Self::bytes_of(masks.len(), self.vocabulary);
        self.masks.write_with(len, |out| {
            let (rows, words) = out.split_at_mut(4 * masks.len());
            let each = rows.chunks_exact_mut(4).zip(words.chunks_exact_mut(bytes));
            for ((to_row, to), (row, mask)) in each.zip(masks) {
                to_row.copy_from_slice(&(*row as u32).to_ne_bytes());
                let mask = as_bytes(mask);
                let (own, rest) = to.split_at_mut(mask.len().min(bytes));
                own.copy_from_slice(&mask[..own.len()]);
                rest.fill(0);
            }
        })?;
        self.count = masks.len();
        self.last = masks.iter().map(|(row, _)| *row).max().unwrap_or(0);
        Ok(())
    }
}

/// Makes the logits of tokens that `masks` do not allow minus infinity, in f32 logits `[rows, vocabulary]`. Rows without a mask are left as
/// they are.
pub fn mask_logits(gpu: &Gpu, logits: &DeviceBuffer, masks: &MaskRows) -> Result<()> {
    if masks.count == 0 {
        return Ok(());
    }
    logits.holds("logits", &[masks.last + 1, masks.vocabulary, 4])?;
    let words = masks.vocabulary.div_ceil(32);
    let arguments = MaskArguments {
        logits: logits.address(),
        masks: masks.masks.from(4 * masks.count)?.address(),
        rows: masks.masks.from(0)?.address(),
        vocabulary: int("the vocabulary", masks.vocabulary)?,
        words: int("words of a mask", words)?,
    };
    let blocks = words.div_ceil(MASK_THREADS) as u32;
    let launch = Launch::new([blocks, masks.count as u32, 1], MASK_THREADS as u32);
    // SAFETY: sizes were checked.
    unsafe { launch.of(Mask::Rows).run(gpu, &arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_device_says_is_read() {
        let read = [7, 0, -1, -2, -5, i32::MIN].map(Drawn::read);
        assert_eq!(
            read,
            [
                Drawn::Token(7),
                Drawn::Token(0),
                Drawn::AllRuledOut,
                Drawn::Unusable(0),
                Drawn::Unusable(3),
                Drawn::Unusable(0x7fff_fffe),
            ]
        );
    }
}
