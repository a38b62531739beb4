//! Losses: cross-entropy over chunks of the head's columns, and the L1 distance of hidden states.

use super::super::driver::{DeviceSlice, Launch, int};
use super::sizes::{
    PIECE, expect_bf16, expect_f32, expect_room, expect_words, f32_elements, pieces,
};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::kernel::kernels;

kernels! {
    /// The passes over a chunk of logits, and those for rows whose length is not a multiple of 4.
    enum Chunk(ChunkArguments) {
        CrossEntropy {
            Sums = "cross_entropy_chunk",
            SumsRagged = "cross_entropy_chunk_ragged",
            Gradient = "cross_entropy_gradient",
            GradientRagged = "cross_entropy_gradient_ragged",
        }
    }

    /// Ends the sums.
    enum Finish(FinishArguments) {
        CrossEntropy { Rows = "cross_entropy_finish" }
    }

    /// The L1 loss and its gradient.
    enum L1(L1Arguments) {
        L1 { Gradient = "l1_gradient" }
    }

    /// Sums the partial L1 losses.
    enum L1Total(L1TotalArguments) {
        L1 { Sum = "l1_total" }
    }
}

const THREADS: u32 = 256;
const FINISH_THREADS: u32 = 1024;
/// CTAs of [`l1_gradient`], independent of the size; also the threads of the kernel that sums their partial results.
const L1_BLOCKS: u32 = 512;

/// State of T rows: `labels` are i32, all others f32, all `[T]`. A row with a negative label has no loss.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy<'a> {
    /// The token that each row should predict.
    pub labels: DeviceSlice<'a>,
    /// The factor of each row's loss.
    pub weights: DeviceSlice<'a>,
    /// The largest logit of the chunks so far.
    pub max: DeviceSlice<'a>,
    /// The sum of `exp(logit - max)` of the chunks so far.
    pub sum: DeviceSlice<'a>,
    /// The label's logit.
    pub target: DeviceSlice<'a>,
    /// The logarithm of the sum of exponentials; 0 for rows without a loss.
    pub lse: DeviceSlice<'a>,
    /// Weight times cross-entropy.
    pub losses: DeviceSlice<'a>,
}

impl CrossEntropy<'_> {
    fn rows(&self) -> Result<usize> {
        let rows = f32_elements(self.labels);
        for (what, x) in [
            ("labels", self.labels),
            ("weights of losses", self.weights),
            ("largest logits", self.max),
            ("sums of exponentials", self.sum),
            ("logits of labels", self.target),
            ("logarithms of sums of exponentials", self.lse),
            ("losses", self.losses),
        ] {
            expect_words(what, x, &[rows])?;
        }
        Ok(rows)
    }
}

/// Some columns of a head's logits.
#[derive(Clone, Copy, Debug)]
pub struct LogitChunk<'a> {
    /// f32 `[T, columns]`.
    pub logits: DeviceSlice<'a>,
    /// The token of the first column.
    pub first_column: usize,
    /// At least one; a multiple of 4 is fastest.
    pub columns: usize,
    /// Soft cap of the logits: `cap * tanh(logit / cap)`.
    pub cap: Option<f32>,
}

impl LogitChunk<'_> {
    /// Fails unless the chunk has this many rows.
    pub(super) fn check(&self, rows: usize) -> Result<()> {
        if self.columns == 0 {
            bail!(InvalidArgument, "a chunk without logits");
        }
        if self.cap.is_some_and(|cap| !(cap > 0.0 && cap.is_finite())) {
            bail!(
                InvalidArgument,
                "a cap of logits of {:?}; it must be positive",
                self.cap
            );
        }
        expect_f32("logits", self.logits, &[rows, self.columns])
    }
}

#[repr(C)]
struct ChunkArguments {
    logits: u64,
    labels: u64,
    max: u64,
    sum: u64,
    target: u64,
    weights: u64,
    lse: u64,
    dlogits: u64,
    first_column: i32,
    columns: i32,
    is_first: i32,
    cap: f32,
}

/// A kernel with one CTA per row, and its variant for row lengths that are not a multiple of 4.
fn by_row(
    [whole, ragged]: [Chunk; 2],
    rows: &CrossEntropy<'_>,
    chunk: &LogitChunk<'_>,
    dlogits: Option<DeviceSlice<'_>>,
    is_first: bool,
) -> Result<()> {
    let (count, columns) = (rows.rows()?, chunk.columns);
    chunk.check(count)?;
    let kernel = match columns.is_multiple_of(4) {
        true => whole,
        false => ragged,
    };
    if let Some(dlogits) = dlogits {
        expect_bf16("gradients of logits", dlogits, &[count, columns])?;
    }
    let arguments = ChunkArguments {
        logits: chunk.logits.address(),
        labels: rows.labels.address(),
        max: rows.max.address(),
        sum: rows.sum.address(),
        target: rows.target.address(),
        weights: rows.weights.address(),
        lse: rows.lse.address(),
        dlogits: dlogits.map_or(0, |d| d.address()),
        first_column: int("the first column", chunk.first_column)?,
        columns: int("columns", columns)?,
        is_first: i32::from(is_first),
        cap: chunk.cap.unwrap_or(0.0),
    };
    let launch = Launch::new([int("rows", count)? as u32, 1, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(kernel).run(rows.labels.gpu(), &arguments) }
}

/// Accumulates a chunk of logits in `max`, `sum` and `target` of the rows (Milakov and Gimelshein, arXiv 1805.02867). The first chunk
/// initializes what later chunks update.
pub fn cross_entropy_chunk(
    rows: &CrossEntropy<'_>,
    chunk: &LogitChunk<'_>,
    is_first: bool,
) -> Result<()> {
    by_row(
        [Chunk::Sums, Chunk::SumsRagged],
        rows,
        chunk,
        None,
        is_first,
    )
}

#[repr(C)]
struct FinishArguments {
    max: u64,
    sum: u64,
    target: u64,
    labels: u64,
    weights: u64,
    lse: u64,
    losses: u64,
    total: u64,
    rows: i32,
}

/// After all chunks: `lse = max + log(sum)` and `losses = weight * (lse - target)` of the rows, and f64 `total` `[1]`, the sum of the
/// losses.
pub fn cross_entropy_finish(rows: &CrossEntropy<'_>, total: DeviceSlice<'_>) -> Result<()> {
    let count = rows.rows()?;
    // One f64 is two words.
    expect_f32("the loss", total, &[2])?;
    let arguments = FinishArguments {
        max: rows.max.address(),
        sum: rows.sum.address(),
        target: rows.target.address(),
        labels: rows.labels.address(),
        weights: rows.weights.address(),
        lse: rows.lse.address(),
        losses: rows.losses.address(),
        total: total.address(),
        rows: int("rows", count)?,
    };
    let launch = Launch::new([1, 1, 1], FINISH_THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(Finish::Rows).run(total.gpu(), &arguments) }
}

/// After [`cross_entropy_finish`]: writes the gradients of a chunk's logits to bf16 `dlogits` `[T, columns]`: `weight (softmax - onehot)`
/// times the derivative of the cap. Rows without a loss get zeros.
pub fn cross_entropy_gradient(
    rows: &CrossEntropy<'_>,
    chunk: &LogitChunk<'_>,
    dlogits: DeviceSlice<'_>,
) -> Result<()> {
    by_row(
        [Chunk::Gradient, Chunk::GradientRagged],
        rows,
        chunk,
        Some(dlogits),
        false,
    )
}

#[repr(C)]
struct L1Arguments {
    h: u64,
    target: u64,
    d: u64,
    partial: u64,
    pieces: u64,
    weight: f32,
}

#[repr(C)]
struct L1TotalArguments {
    partial: u64,
    total: u64,
    weight: f32,
}

/// f32 elements of the partial sums of [`l1_gradient`].
pub const L1_PARTIAL: usize = L1_BLOCKS as usize;

/// f32 `total` `[1]` becomes `weight * sum |h - target|`, and bf16 `d` its gradient by `h`, `weight * sign(h - target)`. `h` and `target`
/// are bf16 of the same size, a multiple of 8. `d` may be `h` or `target`. `partial` has room for [`L1_PARTIAL`] elements.
pub fn l1_gradient(
    h: DeviceSlice<'_>,
    target: DeviceSlice<'_>,
    weight: f32,
    d: DeviceSlice<'_>,
    partial: DeviceSlice<'_>,
    total: DeviceSlice<'_>,
) -> Result<()> {
    let pieces = pieces("hidden states", h)?;
    expect_bf16("the target of hidden states", target, &[pieces, PIECE])?;
    expect_bf16("gradients of hidden states", d, &[pieces, PIECE])?;
    expect_room("partial sums of differences", partial, &[L1_PARTIAL])?;
    total.holds("the sum of differences", &[size_of::<f32>()])?;
    let arguments = L1Arguments {
        h: h.address(),
        target: target.address(),
        d: d.address(),
        partial: partial.address(),
        pieces: pieces as u64,
        weight,
    };
    let launch = Launch::new([L1_BLOCKS, 1, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(L1::Gradient).run(total.gpu(), &arguments)? };
    let arguments = L1TotalArguments {
        partial: partial.address(),
        total: total.address(),
        weight,
    };
    let launch = Launch::new([1, 1, 1], L1_BLOCKS);
    // SAFETY: as above.
    unsafe { launch.of(L1Total::Sum).run(total.gpu(), &arguments) }
}
