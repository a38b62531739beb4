//! The divergence of a student from its teacher, over chunks of the head's columns. Distillation uses it.

use super::super::driver::{DeviceSlice, Launch, int};
use super::loss::LogitChunk;
use super::sizes::{expect_bf16, expect_f32, expect_words, f32_elements};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::kernel::kernels;

kernels! {
    /// The passes over a chunk of logits, and those for rows whose length is not a multiple of 4.
    enum Chunk(ChunkArguments) {
        Divergence {
            Found = "divergence_chunk",
            FoundRagged = "divergence_chunk_ragged",
            Gradient = "divergence_gradient",
            GradientRagged = "divergence_gradient_ragged",
        }
    }

    /// Ends the sums.
    enum Finish(FinishArguments) {
        Divergence { Rows = "divergence_finish" }
    }
}

const THREADS: u32 = 256;
const FINISH_THREADS: u32 = 512;

/// Floats per row in [`Divergence::found`], which [`divergence_chunk`] updates.
pub const DIVERGENCE_FOUND: usize = 8;
/// Floats per row in [`Divergence::sums`].
pub const DIVERGENCE_SUMS: usize = 4;
/// Totals of [`divergence_finish`], in f64.
pub const DIVERGENCE_TOTALS: usize = 3;

/// State of T rows: `labels` are i32, all others f32. A row with a negative label has no loss.
#[derive(Clone, Copy, Debug)]
pub struct Divergence<'a> {
    /// `[T]`: the token that each row should predict.
    pub labels: DeviceSlice<'a>,
    /// `[T]`: the factor of each row's loss.
    pub weights: DeviceSlice<'a>,
    /// `[T, DIVERGENCE_FOUND]`: sums over the chunks so far.
    pub found: DeviceSlice<'a>,
    /// `[T, DIVERGENCE_SUMS]`: logarithms of sums of exponentials, 0 for rows without a loss.
    pub sums: DeviceSlice<'a>,
    /// Divides both models' logits for the divergence.
    pub temperature: f32,
    /// The share of the labels' cross-entropy in the loss.
    pub label_share: f32,
}

impl Divergence<'_> {
    fn rows(&self) -> Result<usize> {
        let rows = f32_elements(self.labels);
        expect_words("labels", self.labels, &[rows])?;
        expect_words("weights of losses", self.weights, &[rows])?;
        expect_words("sums of chunks", self.found, &[rows, DIVERGENCE_FOUND])?;
        expect_words(
            "logarithms of sums of exponentials",
            self.sums,
            &[rows, DIVERGENCE_SUMS],
        )?;
        Ok(rows)
    }
}

#[repr(C)]
struct ChunkArguments {
    logits: u64,
    teacher: u64,
    labels: u64,
    found: u64,
    sums: u64,
    weights: u64,
    dlogits: u64,
    first_column: i32,
    columns: i32,
    is_first: i32,
    cap: f32,
    teacher_cap: f32,
    inverse: f32,
    teacher_factor: f32,
    label_share: f32,
}

/// A kernel with one CTA per row, and its variant for row lengths that are not a multiple of 4.
fn by_row(
    [whole, ragged]: [Chunk; 2],
    rows: &Divergence<'_>,
    [chunk, teacher]: [&LogitChunk<'_>; 2],
    dlogits: Option<DeviceSlice<'_>>,
    is_first: bool,
) -> Result<()> {
    let count = rows.rows()?;
    chunk.check(count)?;
    teacher.check(count)?;
    if (chunk.first_column, chunk.columns) != (teacher.first_column, teacher.columns) {
        bail!(
            InvalidArgument,
            "{} columns from {} on of a student's logits, and {} from {} on of its teacher's; they must be the same",
            chunk.columns,
            chunk.first_column,
            teacher.columns,
            teacher.first_column
        );
    }
    let kernel = match chunk.columns.is_multiple_of(4) {
        true => whole,
        false => ragged,
    };
    if let Some(dlogits) = dlogits {
        expect_bf16("gradients of logits", dlogits, &[count, chunk.columns])?;
    }
    let arguments = ChunkArguments {
        logits: chunk.logits.address(),
        teacher: teacher.logits.address(),
        labels: rows.labels.address(),
        found: rows.found.address(),
        sums: rows.sums.address(),
        weights: rows.weights.address(),
        dlogits: dlogits.map_or(0, |d| d.address()),
        first_column: int("the first column", chunk.first_column)?,
        columns: int("columns", chunk.columns)?,
        is_first: i32::from(is_first),
        cap: chunk.cap.unwrap_or(0.0),
        teacher_cap: teacher.cap.unwrap_or(0.0),
        inverse: 1.0 / rows.temperature,
        teacher_factor: (1.0 - rows.label_share) * rows.temperature,
        label_share: rows.label_share,
    };
    let launch = Launch::new([int("rows", count)? as u32, 1, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(kernel).run(rows.labels.gpu(), &arguments) }
}

/// Accumulates a chunk of the student's logits, and the same columns of its teacher's, in `found` of the rows. The first chunk initializes
/// what later chunks update.
pub fn divergence_chunk(
    rows: &Divergence<'_>,
    [student, teacher]: [&LogitChunk<'_>; 2],
    is_first: bool,
) -> Result<()> {
    by_row(
        [Chunk::Found, Chunk::FoundRagged],
        rows,
        [student, teacher],
        None,
        is_first,
    )
}

#[repr(C)]
struct FinishArguments {
    found: u64,
    labels: u64,
    weights: u64,
    sums: u64,
    totals: u64,
    rows: i32,
    inverse: f32,
    teacher_factor: f32,
    label_share: f32,
}

/// After all chunks: computes `sums` of the rows, and f64 `totals` `[DIVERGENCE_TOTALS]`. The totals are weighted sums over rows of the
/// loss `(1 - label_share) temperature² KL + label_share CE`, of the cross-entropy CE, and of the divergence KL at the temperature.
pub fn divergence_finish(rows: &Divergence<'_>, totals: DeviceSlice<'_>) -> Result<()> {
    let count = rows.rows()?;
    // One f64 is two words.
    expect_f32("totals", totals, &[2 * DIVERGENCE_TOTALS])?;
    let arguments = FinishArguments {
        found: rows.found.address(),
        labels: rows.labels.address(),
        weights: rows.weights.address(),
        sums: rows.sums.address(),
        totals: totals.address(),
        rows: int("rows", count)?,
        inverse: 1.0 / rows.temperature,
        teacher_factor: (1.0 - rows.label_share) * rows.temperature * rows.temperature,
        label_share: rows.label_share,
    };
    let launch = Launch::new([1, 1, 1], FINISH_THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(Finish::Rows).run(totals.gpu(), &arguments) }
}

/// After [`divergence_finish`]: writes the gradients of a chunk of the student's logits to bf16 `dlogits` `[T, columns]`. Rows without a
/// loss get zeros.
pub fn divergence_gradient(
    rows: &Divergence<'_>,
    [student, teacher]: [&LogitChunk<'_>; 2],
    dlogits: DeviceSlice<'_>,
) -> Result<()> {
    by_row(
        [Chunk::Gradient, Chunk::GradientRagged],
        rows,
        [student, teacher],
        Some(dlogits),
        false,
    )
}
