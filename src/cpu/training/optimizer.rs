//! AdamW on rows of a matrix in their stored form.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::rows::by_parts;
use crate::base::error::{Result, bail};
use crate::cpu::Cpu;
use crate::format::adamw::{
    Block, Changes, Coefficients, Field, FieldBytes, Forms, GROUP_ROWS, Globals, Keys, WeightForm,
    choose_scale, decode_weights, encode_rest, encode_weights, moment_globals, power_for, step,
};
use crate::format::input_moments::BlockMoments;
use crate::format::nvfp4::BLOCK;

/// A field of some rows, row-major.
#[derive(Debug)]
pub struct Rows<'a> {
    /// Codes, [`FieldBytes::codes`] per 16 elements.
    pub codes: &'a mut [u8],
    /// One scale per 16 elements in a scaled field, else empty.
    pub scales: &'a mut [u8],
}

/// Rows of a matrix with their moments.
#[derive(Debug)]
pub struct MatrixRows<'a> {
    /// Codes of the weights.
    pub codes: Rows<'a>,
    /// Residuals beside the codes.
    pub rest: &'a mut [u8],
    /// First moments, with a global scale per group of rows.
    pub first: (Rows<'a>, &'a mut [f32]),
    /// Second moments, with a global scale per group of rows.
    pub second: (Rows<'a>, &'a mut [f32]),
}

/// Parameters of a step of rows.
#[derive(Clone, Copy, Debug)]
pub struct RowsStep<'a> {
    /// Stored forms of the matrix.
    pub forms: &'a Forms,
    /// Coefficients of the step.
    pub coefficients: &'a Coefficients,
    /// The random streams of the matrix.
    pub keys: &'a Keys,
    /// Elements of a row, a multiple of 16.
    pub cols: usize,
    /// The first row, a multiple of [`GROUP_ROWS`].
    pub first_row: usize,
    /// The weights' global scale.
    pub global: f32,
}

/// Codes and scales of a field's `n` blocks, one after another.
fn blocks<'a>(rows: Rows<'a>, bytes: FieldBytes, n: usize) -> impl Iterator<Item = Field<'a>> {
    let mut codes = rows.codes.chunks_exact_mut(bytes.codes.max(1));
    let mut scales = rows.scales.iter_mut();
    (0..n).map(move |_| Field {
        codes: codes.next().unwrap_or_default(),
        scale: scales.next(),
    })
}

/// Parts of a field, of `n` blocks each.
fn parts<'a>(rows: Rows<'a>, bytes: FieldBytes, n: usize) -> impl Iterator<Item = Rows<'a>> {
    let mut codes = rows.codes.chunks_mut((bytes.codes * n).max(1));
    let mut scales = rows.scales.chunks_mut(n);
    std::iter::repeat_with(move || Rows {
        codes: codes.next().unwrap_or_default(),
        scales: scales.next().unwrap_or_default(),
    })
}

fn largest_scale(rows: &Rows<'_>) -> u8 {
    rows.scales.iter().copied().max().unwrap_or(0)
}

impl Cpu {
    /// Steps rows of a matrix by their gradients, `[rows, cols]`.
    pub fn adamw(
        &self,
        this: &RowsStep<'_>,
        gradients: &[f32],
        rows: MatrixRows<'_>,
    ) -> Result<Changes> {
        let (forms, cols) = (this.forms, this.cols);
        let count = gradients.len() / cols.max(1);
        let n = count * cols / BLOCK;
        let fits = |rows: &Rows<'_>, bytes: FieldBytes| {
            rows.codes.len() == n * bytes.codes
                && rows.scales.len() == n * usize::from(bytes.scaled)
        };
        let groups = count.div_ceil(GROUP_ROWS);
        if cols == 0
            || !cols.is_multiple_of(BLOCK)
            || !gradients.len().is_multiple_of(cols)
            || !this.first_row.is_multiple_of(GROUP_ROWS)
            || !fits(&rows.codes, forms.weight.codes())
            || rows.rest.len() != n * forms.weight.rest().codes
            || !fits(&rows.first.0, forms.first.field())
            || !fits(&rows.second.0, forms.second.field())
            || rows.first.1.len() != groups
            || rows.second.1.len() != groups
        {
            bail!(
                Internal,
                "a step of {} gradients from row {} on, in rows of {cols}, of a matrix held otherwise",
                gradients.len(),
                this.first_row
            );
        }
        let in_group = GROUP_ROWS * cols / BLOCK;
        let rest_bytes = forms.weight.rest().codes;
        let mut rest = rows.rest.chunks_mut((in_group * rest_bytes).max(1));
        let mut parts_of_groups: Vec<_> = parts(rows.codes, forms.weight.codes(), in_group)
            .zip(parts(rows.first.0, forms.first.field(), in_group))
            .zip(parts(rows.second.0, forms.second.field(), in_group))
            .zip(rows.first.1.iter_mut().zip(rows.second.1))
            .map(|(((codes, first), second), globals)| {
                Some((
                    codes,
                    rest.next().unwrap_or_default(),
                    first,
                    second,
                    globals,
                ))
            })
            .collect();
        let all = Mutex::new(Changes::default());
        by_parts(self.pool(), &mut parts_of_groups, 1, |group, part| {
            let (codes, rest, first, second, (first_global, second_global)) =
                part[0].take().expect("each group is stepped once");
            let row = group * GROUP_ROWS;
            let gradients = &gradients[row * cols..count.min(row + GROUP_ROWS) * cols];
            let largest = gradients.iter().fold(0f32, |most, g| most.max(g.abs()));
            let (first_now, second_now) = moment_globals(
                forms,
                this.coefficients,
                largest * this.coefficients.factor,
                (largest_scale(&first), *first_global),
                (largest_scale(&second), *second_global),
            );
            let globals = Globals {
                weight: this.global,
                first: [*first_global, first_now],
                second: [*second_global, second_now],
            };
            if forms.first.field().scaled {
                *first_global = first_now;
            }
            if forms.second.field().scaled {
                *second_global = second_now;
            }
            let n = gradients.len() / BLOCK;
            let mut rest = rest.chunks_exact_mut(rest_bytes.max(1));
            let fields = blocks(codes, forms.weight.codes(), n)
                .zip(blocks(first, forms.first.field(), n))
                .zip(blocks(second, forms.second.field(), n));
            let mut changes = Changes::default();
            for (i, (gradients, ((codes, first), second))) in gradients
                .as_chunks::<BLOCK>()
                .0
                .iter()
                .zip(fields)
                .enumerate()
            {
                let index = ((this.first_row + row) * cols + i * BLOCK) as u32;
                let block = Block {
                    codes,
                    rest: rest.next().unwrap_or_default(),
                    first,
                    second,
                };
                changes += step(
                    forms,
                    this.coefficients,
                    this.keys,
                    &globals,
                    index,
                    gradients,
                    block,
                );
            }
            *all.lock().unwrap_or_else(PoisonError::into_inner) += changes;
        });
        Ok(all.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// Decodes rows of a matrix to `out` `[rows, cols]`: see [`decode_weights`].
    pub fn decode_matrix(
        &self,
        form: WeightForm,
        codes: (&[u8], &[u8]),
        rest: &[u8],
        global: f32,
        whole: bool,
        out: &mut [f32],
    ) {
        let bytes = form.codes();
        let beside = form.rest().codes;
        let run = 64 * BLOCK;
        by_parts(self.pool(), out, run, |part, out| {
            for (i, out) in out.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
                let block = part * 64 + i;
                let scale = if bytes.scaled { codes.1[block] } else { 0 };
                let own = &codes.0[block * bytes.codes..][..bytes.codes];
                let rest = &rest[block * beside..][..beside];
                *out = decode_weights(form, own, rest, scale, global, whole);
            }
        });
    }

    /// The largest magnitude of rows `[rows, cols]` from `read`. Fails at the first value that is not finite.
    pub fn largest_weight(&self, rows: usize, cols: usize, read: &ReadRows<'_>) -> Result<f32> {
        let mut parts = vec![Ok(0f32); rows.div_ceil(READ)];
        by_parts(self.pool(), &mut parts, 1, |part, found| {
            found[0] = with_rows(part, 0..rows, cols, read, |first, values| {
                match values.iter().position(|v| !v.is_finite()) {
                    Some(i) => bail!(
                        InvalidArgument,
                        "the weight at row {}, column {} is {}, which cannot be trained",
                        first + i / cols,
                        i % cols,
                        values[i]
                    ),
                    None => Ok(values.iter().fold(0f32, |most, v| most.max(v.abs()))),
                }
            });
        });
        parts
            .into_iter()
            .try_fold(0f32, |most, part| Ok(most.max(part?)))
    }

    /// Computes `rest`, the residuals beside the codes `[rows, cols / 2]` and block scales `[rows, cols / 16]` of a matrix, so that the
    /// weights are as near to the values from `read` as the form allows.
    pub fn encode_rest(
        &self,
        form: WeightForm,
        (rows, cols): (usize, usize),
        (codes, scales, global): (&[u8], &[u8], f32),
        read: &ReadRows<'_>,
        rest: &mut [u8],
    ) -> Result<()> {
        let (bytes, beside) = (form.codes().codes, form.rest().codes);
        let n = READ * cols / BLOCK;
        let rest = rest.chunks_mut((beside * n).max(1));
        let mut all: Vec<_> = rest.map(|rest| (rest, Ok(()))).collect();
        by_parts(self.pool(), &mut all, 1, |part, of| {
            let (rest, found) = &mut of[0];
            *found = with_rows(part, 0..rows, cols, read, |first, values| {
                let values = values.as_chunks::<BLOCK>().0;
                let at = first * cols / BLOCK;
                for (i, rest) in rest.chunks_exact_mut(beside).enumerate() {
                    let own = &codes[(at + i) * bytes..][..bytes];
                    encode_rest(form, &values[i], global, own, scales[at + i], rest);
                }
                Ok(())
            });
        });
        all.into_iter().try_for_each(|(_, found)| found)
    }

    /// Chooses new block scales for an NVFP4 matrix: see [`choose_scale`]. `moments` has those of the inputs of each block of a row.
    /// Returns the number of blocks whose scales changed.
    pub fn choose_scales(
        &self,
        form: WeightForm,
        global: f32,
        moments: &[BlockMoments],
        codes: Rows<'_>,
        rest: &mut [u8],
    ) -> usize {
        let (bytes, beside) = (form.codes(), form.rest().codes);
        let mut rest = rest.chunks_mut((beside * moments.len()).max(1));
        let mut all: Vec<_> = parts(codes, bytes, moments.len())
            .take_while(|row| !row.scales.is_empty())
            .map(|row| (Some((row, rest.next().unwrap_or_default())), 0))
            .collect();
        by_parts(self.pool(), &mut all, 1, |_, row| {
            let (codes, rest) = row[0].0.take().expect("each row is taken once");
            let mut rest = rest.chunks_exact_mut(beside.max(1));
            for (moments, field) in moments.iter().zip(blocks(codes, bytes, moments.len())) {
                let rest = rest.next().unwrap_or_default();
                row[0].1 += usize::from(choose_scale(form, global, moments, field, rest));
            }
        });
        all.iter().map(|(_, changed)| changed).sum()
    }

    /// Encodes a range of rows of `cols` elements from `read`, rounded to nearest: codes and residuals.
    pub fn encode_matrix(
        &self,
        form: WeightForm,
        rows: Range<usize>,
        cols: usize,
        read: &ReadRows<'_>,
        global: f32,
        codes: Rows<'_>,
        rest: &mut [u8],
    ) -> Result<()> {
        let n = READ * cols / BLOCK;
        let beside = form.rest().codes;
        let mut rest = rest.chunks_mut((beside * n).max(1));
        let mut all: Vec<_> = parts(codes, form.codes(), n)
            .take(rows.len().div_ceil(READ))
            .map(|codes| (Some((codes, rest.next().unwrap_or_default())), Ok(())))
            .collect();
        by_parts(self.pool(), &mut all, 1, |part, encoded| {
            let (codes, rest) = encoded[0].0.take().expect("each part is encoded once");
            encoded[0].1 = with_rows(part, rows.clone(), cols, read, |_, values| {
                let values = values.as_chunks::<BLOCK>().0;
                let mut rest = rest.chunks_exact_mut(beside.max(1));
                for (values, field) in values.iter().zip(blocks(codes, form.codes(), values.len()))
                {
                    let rest = rest.next().unwrap_or_default();
                    encode_weights(form, values, global, field, rest);
                }
                Ok(())
            });
        });
        all.into_iter().try_for_each(|(_, encoded)| encoded)
    }
}

/// Reads the values of a range of rows, on any thread.
pub type ReadRows<'a> = dyn Fn(Range<usize>, &mut [f32]) -> Result<()> + Sync + 'a;

/// Rows that a thread reads at a time.
const READ: usize = 64;
const _: () = assert!(READ.is_multiple_of(GROUP_ROWS));

/// Reads part `part` of some rows, and passes on its first row and its values.
fn with_rows<T>(
    part: usize,
    rows: Range<usize>,
    cols: usize,
    read: &ReadRows<'_>,
    each: impl FnOnce(usize, &[f32]) -> Result<T>,
) -> Result<T> {
    let first = rows.start + part * READ;
    let range = first..rows.end.min(first + READ);
    let mut values = vec![0.0; range.len() * cols];
    read(range, &mut values)?;
    each(first, &values)
}

/// The global scale of a weight whose largest magnitude is `amax`: a power of two that lets it double.
pub fn weight_global(amax: f32) -> f32 {
    // The largest block scale, amax / 6, lies between 87 and 171, and twice that below 448.
    power_for(amax, 10)
}
