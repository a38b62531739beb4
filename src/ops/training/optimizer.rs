//! Parameters in the form that training stores them in, and the steps that change them.

use std::ops::Range;

use super::super::{Array, Device, Mixed, Slice, SliceMut};
use super::only_on_the_cpu;
use crate::base::Result;
use crate::base::error::bail;
use crate::cpu::training::{MatrixRows, Rows, RowsStep, weight_global};
use crate::format::adamw::{FieldBytes, GROUP_ROWS, decode_weights, encode_weights, step_f32};
use crate::format::e4m3;
use crate::format::nvfp4::{BLOCK, check_global_scale};

pub use crate::format::adamw::{
    Changes, Coefficients, Field, FirstForm, Forms, Hyperparameters, Keys, SecondForm, WeightForm,
};

/// A field of a matrix: codes, and what scales them.
#[derive(Debug)]
pub struct FieldArrays {
    /// Codes.
    pub codes: Array<u8>,
    /// A scale for each 16 elements, of a scaled field.
    pub scales: Array<u8>,
    /// A global scale for each group of [`GROUP_ROWS`] rows, of a scaled moment.
    pub globals: Array,
}

impl FieldArrays {
    fn new(
        device: &Device,
        bytes: FieldBytes,
        rows: usize,
        cols: usize,
        grouped: bool,
    ) -> Result<FieldArrays> {
        let blocks = rows * cols / BLOCK;
        let scales = if bytes.scaled { blocks } else { 0 };
        let groups = if grouped {
            rows.div_ceil(GROUP_ROWS)
        } else {
            0
        };
        Ok(FieldArrays {
            codes: Array::zeroed(device, blocks * bytes.codes)?,
            scales: Array::zeroed(device, scales)?,
            globals: Array::zeroed(device, groups)?,
        })
    }

    fn bytes(&self) -> usize {
        self.codes.bytes() + self.scales.bytes() + self.globals.bytes()
    }

    /// Codes and scales of a range of blocks, in host memory.
    fn rows(&mut self, bytes: FieldBytes, blocks: &Range<usize>) -> Result<(Rows<'_>, &mut [f32])> {
        let scales = if bytes.scaled { blocks.clone() } else { 0..0 };
        let codes = blocks.start * bytes.codes..blocks.end * bytes.codes;
        Ok((
            Rows {
                codes: self.codes.part_mut(codes)?.host()?,
                scales: self.scales.part_mut(scales)?.host()?,
            },
            self.globals.all_mut().host()?,
        ))
    }
}

/// A matrix `[rows, cols]` with the moments of its optimizer.
#[derive(Debug)]
pub struct Matrix {
    forms: Forms,
    rows: usize,
    cols: usize,
    /// The weights' global scale.
    global: f32,
    /// Steps that have changed it.
    steps: u64,
    weight: FieldArrays,
    rest: Array<u8>,
    first: FieldArrays,
    second: FieldArrays,
    /// Of the step under way.
    changes: Changes,
}

/// Gives the values of a range of rows.
pub type ReadRows<'a> = dyn FnMut(Range<usize>, &mut [f32]) -> Result<()> + 'a;

impl Matrix {
    /// A matrix with these values, rounded to nearest, and moments of zero. `read` is called twice for each row.
    pub fn new(
        device: &Device,
        forms: Forms,
        rows: usize,
        cols: usize,
        read: &mut ReadRows<'_>,
    ) -> Result<Matrix> {
        let mut matrix = Matrix::zeroed(device, forms, rows, cols)?;
        let mut values = vec![0.0; GROUP_ROWS * cols];
        let groups = || {
            (0..rows)
                .step_by(GROUP_ROWS)
                .map(|first| first..rows.min(first + GROUP_ROWS))
        };
        let mut amax = 0f32;
        for range in groups() {
            let values = &mut values[..range.len() * cols];
            read(range.clone(), values)?;
            if let Some(i) = values.iter().position(|v| !v.is_finite()) {
                bail!(
                    InvalidArgument,
                    "the weight at row {}, column {} is {}, which cannot be trained",
                    range.start + i / cols,
                    i % cols,
                    values[i]
                );
            }
            amax = values.iter().fold(amax, |most, v| most.max(v.abs()));
        }
        // A matrix of zeros must have room to grow.
        let global = weight_global(amax.max(1.0 / 1024.0));
        let Device::Cpu(cpu) = device else {
            return only_on_the_cpu(device);
        };
        matrix.global = global;
        for range in groups() {
            let values = &mut values[..range.len() * cols];
            read(range.clone(), values)?;
            let blocks = range.start * cols / BLOCK..range.end * cols / BLOCK;
            let beside = forms.weight.rest().codes;
            let rest = matrix
                .rest
                .part_mut(blocks.start * beside..blocks.end * beside)?
                .host()?;
            let (codes, _) = matrix.weight.rows(forms.weight.codes(), &blocks)?;
            cpu.encode_matrix(forms.weight, values, global, codes, rest);
        }
        Ok(matrix)
    }

    /// A matrix of zeros, with moments of zero.
    pub fn zeroed(device: &Device, forms: Forms, rows: usize, cols: usize) -> Result<Matrix> {
        if rows == 0 || cols == 0 || !cols.is_multiple_of(BLOCK) {
            bail!(
                Unsupported,
                "a matrix of [{rows}, {cols}] cannot be trained: rows must be positive and columns a positive multiple of {BLOCK}"
            );
        }
        Ok(Matrix {
            forms,
            rows,
            cols,
            global: 1.0,
            steps: 0,
            weight: FieldArrays::new(device, forms.weight.codes(), rows, cols, false)?,
            rest: Array::zeroed(device, rows * cols / BLOCK * forms.weight.rest().codes)?,
            first: FieldArrays::new(device, forms.first.field(), rows, cols, true)?,
            second: FieldArrays::new(device, forms.second.field(), rows, cols, true)?,
            changes: Changes::default(),
        })
    }

    /// After its arrays have been restored: the global scale of its weights, and the steps that have changed it.
    pub fn restore(&mut self, global: f32, steps: u64) -> Result<()> {
        check_global_scale(global)?;
        (self.global, self.steps) = (global, steps);
        Ok(())
    }

    /// How it is stored.
    pub fn forms(&self) -> &Forms {
        &self.forms
    }

    /// Rows and columns.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// The global scale of what is delivered.
    pub fn global(&self) -> f32 {
        self.global
    }

    /// Steps that have changed it.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.weight.bytes() + self.rest.bytes() + self.first.bytes() + self.second.bytes()
    }

    /// The values of a range of rows: of all that is stored if `whole`, else of the codes that are delivered.
    pub fn decode(
        &self,
        device: &Device,
        rows: Range<usize>,
        whole: bool,
        out: SliceMut<'_, Mixed>,
    ) -> Result<()> {
        let Device::Cpu(cpu) = device else {
            return only_on_the_cpu(device);
        };
        let form = self.forms.weight;
        let blocks = rows.start * self.cols / BLOCK..rows.end * self.cols / BLOCK;
        let part = |bytes: usize| blocks.start * bytes..blocks.end * bytes;
        let codes = self.weight.codes.part(part(form.codes().codes))?.host()?;
        let scales = self
            .weight
            .scales
            .part(part(usize::from(form.is_packed())))?
            .host()?;
        let rest = self.rest.part(part(form.rest().codes))?.host()?;
        let out = out.host()?;
        if out.len() != blocks.len() * BLOCK {
            bail!(
                Internal,
                "rows {rows:?} of {} columns to {} elements",
                self.cols,
                out.len()
            );
        }
        cpu.decode_matrix(form, (codes, scales), rest, self.global, whole, out);
        Ok(())
    }

    /// The same of these rows, in this order, which must exist: an embedding.
    pub fn decode_rows(
        &self,
        device: &Device,
        rows: &[u32],
        whole: bool,
        out: SliceMut<'_, Mixed>,
    ) -> Result<()> {
        let out = out.host()?;
        if out.len() != rows.len() * self.cols {
            bail!(
                Internal,
                "{} rows of {} columns to {} elements",
                rows.len(),
                self.cols,
                out.len()
            );
        }
        for (&row, out) in rows.iter().zip(out.chunks_exact_mut(self.cols)) {
            let row = row as usize;
            self.decode(device, row..row + 1, whole, SliceMut::Host(out))?;
        }
        Ok(())
    }

    /// The codes `[rows, cols / 2]` and block scales `[rows, cols / 16]` that are delivered; none unless they are NVFP4.
    pub fn delivered(&self) -> Result<Option<(&[u8], &[u8])>> {
        match self.forms.weight.is_packed() {
            true => Ok(Some((
                self.weight.codes.all().host()?,
                self.weight.scales.all().host()?,
            ))),
            false => Ok(None),
        }
    }

    /// A step of the rows from `first_row` on, a multiple of [`GROUP_ROWS`], by their gradients `[.., cols]`, which must be finite. When all
    /// rows have made the step, [`Matrix::finish_step`] ends it. `seed` and `tensor` choose the random bits.
    pub fn step(
        &mut self,
        device: &Device,
        coefficients: &Coefficients,
        (seed, tensor): (u64, u64),
        first_row: usize,
        gradients: Slice<'_, Mixed>,
    ) -> Result<()> {
        let Device::Cpu(cpu) = device else {
            return only_on_the_cpu(device);
        };
        let gradients = gradients.host()?;
        let (cols, forms) = (self.cols, self.forms);
        let count = gradients.len() / cols;
        let blocks = first_row * cols / BLOCK..(first_row + count) * cols / BLOCK;
        let groups = first_row / GROUP_ROWS..(first_row + count).div_ceil(GROUP_ROWS);
        let beside = forms.weight.rest().codes;
        let (first, first_globals) = self.first.rows(forms.first.field(), &blocks)?;
        let (second, second_globals) = self.second.rows(forms.second.field(), &blocks)?;
        let (codes, _) = self.weight.rows(forms.weight.codes(), &blocks)?;
        let rows = MatrixRows {
            codes,
            rest: self
                .rest
                .part_mut(blocks.start * beside..blocks.end * beside)?
                .host()?,
            first: (first, &mut first_globals[groups.clone()]),
            second: (second, &mut second_globals[groups]),
        };
        let step = RowsStep {
            forms: &forms,
            coefficients,
            keys: &Keys::new(seed, tensor, self.steps + 1),
            cols,
            first_row,
            global: self.global,
        };
        let changes = cpu.adamw(&step, gradients, rows)?;
        self.changes.stored += changes.stored;
        self.changes.delivered += changes.delivered;
        Ok(())
    }

    /// Ends a step that all rows have made, and says how many weights it has changed.
    pub fn finish_step(&mut self) -> Result<Changes> {
        self.steps += 1;
        self.make_room()?;
        Ok(std::mem::take(&mut self.changes))
    }

    /// Doubles the global scale before block scales reach their end. Values stay the same, but where a block scale has no half.
    fn make_room(&mut self) -> Result<()> {
        /// The first scale from which the global one is doubled: the largest, 448, is 1.4 times as much.
        const FULL: f32 = 320.0;
        let form = self.forms.weight;
        let scales = self.weight.scales.all_mut().host()?;
        let largest = scales.iter().copied().max().unwrap_or(0);
        if e4m3::decode(largest) < FULL {
            return Ok(());
        }
        let global = self.global * 2.0;
        let (bytes, beside) = (form.codes().codes, form.rest().codes);
        let codes = self.weight.codes.all_mut().host()?;
        let rest = self.rest.all_mut().host()?;
        for (i, scale) in scales.iter_mut().enumerate() {
            let half = e4m3::encode(e4m3::decode(*scale) / 2.0);
            if e4m3::decode(half) * 2.0 == e4m3::decode(*scale) {
                *scale = half;
                continue;
            }
            let (codes, rest) = (
                &mut codes[i * bytes..][..bytes],
                &mut rest[i * beside..][..beside],
            );
            let values = decode_weights(form, codes, rest, *scale, self.global, true);
            let field = Field {
                codes,
                scale: Some(scale),
            };
            encode_weights(form, &values, global, false, None, field, rest);
        }
        self.global = global;
        Ok(())
    }

    /// Every array of the state with a name, for checkpoints.
    pub fn arrays(&mut self) -> [(&'static str, StateArray<'_>); 9] {
        [
            ("codes", StateArray::Bytes(&mut self.weight.codes)),
            ("scales", StateArray::Bytes(&mut self.weight.scales)),
            ("rest", StateArray::Bytes(&mut self.rest)),
            ("first.codes", StateArray::Bytes(&mut self.first.codes)),
            ("first.scales", StateArray::Bytes(&mut self.first.scales)),
            ("first.globals", StateArray::Floats(&mut self.first.globals)),
            ("second.codes", StateArray::Bytes(&mut self.second.codes)),
            ("second.scales", StateArray::Bytes(&mut self.second.scales)),
            (
                "second.globals",
                StateArray::Floats(&mut self.second.globals),
            ),
        ]
    }
}

/// An array of a parameter's state.
#[derive(Debug)]
pub enum StateArray<'a> {
    /// Codes or scales.
    Bytes(&'a mut Array<u8>),
    /// Global scales, or a parameter in float32.
    Floats(&'a mut Array),
}

/// A parameter in float32 with its moments: norms and biases.
#[derive(Debug)]
pub struct Vector {
    weight: Array,
    first: Array,
    second: Array,
    gradient: Array,
    steps: u64,
}

impl Vector {
    /// A parameter with these values, and moments of zero.
    pub fn new(device: &Device, values: &[f32]) -> Result<Vector> {
        let zeros = || Array::zeroed(device, values.len());
        let mut vector = Vector {
            weight: zeros()?,
            first: zeros()?,
            second: zeros()?,
            gradient: zeros()?,
            steps: 0,
        };
        vector.weight.all_mut().copy_from(Slice::Host(values))?;
        Ok(vector)
    }

    /// The values.
    pub fn values(&self) -> Slice<'_> {
        self.weight.all()
    }

    /// What gradients are added to.
    pub fn gradient(&mut self) -> SliceMut<'_> {
        self.gradient.all_mut()
    }

    /// The values, and what gradients are added to.
    pub fn with_gradient(&mut self) -> (Slice<'_>, SliceMut<'_>) {
        (self.weight.all(), self.gradient.all_mut())
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        4 * self.weight.bytes()
    }

    /// Steps that have changed it.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Every array of the state with a name, for checkpoints.
    pub fn arrays(&mut self) -> [(&'static str, StateArray<'_>); 3] {
        [
            ("values", StateArray::Floats(&mut self.weight)),
            ("first", StateArray::Floats(&mut self.first)),
            ("second", StateArray::Floats(&mut self.second)),
        ]
    }

    /// After its arrays have been restored.
    pub fn restore(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// Makes the gradient zero.
    pub fn clear_gradient(&mut self, device: &Device) -> Result<()> {
        super::super::activation::fill(device, self.gradient.all_mut(), 0.0)
    }

    /// A step by the gradient, which becomes zero.
    pub fn step(&mut self, device: &Device, coefficients: &Coefficients) -> Result<()> {
        let Device::Cpu(_) = device else {
            return only_on_the_cpu(device);
        };
        let (weight, gradient) = (
            self.weight.all_mut().host()?,
            self.gradient.all_mut().host()?,
        );
        let moments = self
            .first
            .all_mut()
            .host()?
            .iter_mut()
            .zip(self.second.all_mut().host()?);
        for ((w, g), (m, v)) in weight.iter_mut().zip(gradient).zip(moments) {
            step_f32(coefficients, std::mem::take(g), w, m, v);
        }
        self.steps += 1;
        Ok(())
    }
}
