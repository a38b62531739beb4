//! Parameters in the formats of training, and the optimizer steps that change them.

use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::super::{Array, Device, Mixed, Slice, SliceMut};
use super::gpu;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::{self, Tag};
use crate::cpu::Cpu;
use crate::cpu::training::{self as cpu, MatrixRows, Rows, weight_global};
use crate::cuda::DeviceBuffer;
use crate::cuda::training::{self as cuda, Moments, TrainedWeights};
use crate::format::adamw::{FieldBytes, GROUP_ROWS, decode_weights, encode_weights, step_f32};
use crate::format::e4m3;
use crate::format::input_moments::BlockMoments;
use crate::format::nvfp4::{BLOCK, check_block_scales, check_global_scale};
use crate::tensor::WeightType;

pub use crate::cpu::training::ReadRows;
pub use crate::format::adamw::{
    Changes, Coefficients, Field, FirstForm, Forms, Hyperparameters, KeepScale, Keys, SecondForm,
    WeightForm,
};

/// A field of a matrix (weights or moments): codes with their scales.
#[derive(Debug)]
struct FieldArrays {
    bytes: FieldBytes,
    codes: Array<u8>,
    /// One scale for each 16 elements of a scaled field. On a GPU, scales of weights are stored among their codes.
    scales: Array<u8>,
    /// One global scale for each group of [`GROUP_ROWS`] rows of moments; unused by moments in float32.
    globals: Array,
}

/// Bytes of codes and of scales of weights `[rows, cols]`.
fn weight_bytes(
    is_cuda: bool,
    bytes: FieldBytes,
    rows: usize,
    cols: usize,
) -> Result<(usize, usize)> {
    let blocks = rows * cols / BLOCK;
    Ok(match is_cuda && bytes.scaled {
        true => (cuda::chunk_bytes(rows, cols)?, 0),
        false => (blocks * bytes.codes, blocks * usize::from(bytes.scaled)),
    })
}

impl FieldArrays {
    /// An allocated field of moments.
    fn moments(
        device: &Device,
        bytes: FieldBytes,
        rows: usize,
        cols: usize,
    ) -> Result<FieldArrays> {
        let blocks = rows * cols / BLOCK;
        let scaled = usize::from(bytes.scaled);
        Ok(FieldArrays {
            bytes,
            codes: Array::zeroed(device, blocks * bytes.codes)?,
            scales: Array::zeroed(device, blocks * scaled)?,
            globals: Array::zeroed(device, rows.div_ceil(GROUP_ROWS))?,
        })
    }

    /// An allocated field of weights.
    fn weights(
        device: &Device,
        bytes: FieldBytes,
        rows: usize,
        cols: usize,
    ) -> Result<FieldArrays> {
        let (codes, scales) = weight_bytes(device.is_cuda(), bytes, rows, cols)?;
        Ok(FieldArrays {
            bytes,
            codes: Array::zeroed(device, codes)?,
            scales: Array::zeroed(device, scales)?,
            globals: Array::empty(),
        })
    }

    /// The empty moments of a frozen matrix.
    fn none() -> FieldArrays {
        FieldArrays {
            bytes: FieldBytes {
                codes: 0,
                scaled: false,
            },
            codes: Array::empty(),
            scales: Array::empty(),
            globals: Array::empty(),
        }
    }

    /// A zeroed field of the same size in host memory.
    fn offloaded(&self, device: &Device) -> Result<FieldArrays> {
        Ok(FieldArrays {
            bytes: self.bytes,
            codes: Array::offloaded(device, Tag::Weights, self.codes.len())?,
            scales: Array::offloaded(device, Tag::Weights, self.scales.len())?,
            globals: Array::offloaded(device, Tag::Weights, self.globals.len())?,
        })
    }

    fn held(&self) -> usize {
        self.codes.bytes() + self.scales.bytes() + self.globals.bytes()
    }

    /// Codes and scales of a range of blocks, and global scales of a range of groups, in host memory.
    fn rows(
        &mut self,
        blocks: &Range<usize>,
        groups: Range<usize>,
    ) -> Result<(Rows<'_>, &mut [f32])> {
        let of = |bytes: usize| blocks.start * bytes..blocks.end * bytes;
        let groups = if self.globals.is_empty() {
            0..0
        } else {
            groups
        };
        Ok((
            Rows {
                codes: self.codes.part_mut(of(self.bytes.codes))?.host()?,
                scales: self
                    .scales
                    .part_mut(of(usize::from(self.bytes.scaled)))?
                    .host()?,
            },
            self.globals.part_mut(groups)?.host()?,
        ))
    }

    /// Codes and scales of a range of blocks, in host memory.
    fn codes_of(&self, blocks: &Range<usize>) -> Result<(&[u8], &[u8])> {
        let of = |bytes: usize| blocks.start * bytes..blocks.end * bytes;
        let scaled = usize::from(self.bytes.scaled);
        Ok((
            self.codes.part(of(self.bytes.codes))?.host()?,
            self.scales.part(of(scaled))?.host()?,
        ))
    }

    fn on_gpu(&self) -> Result<Moments<'_>> {
        Ok(Moments {
            codes: self.codes.all().cuda()?,
            scales: self.scales.all().cuda()?,
            globals: self.globals.all().cuda()?,
        })
    }
}

// A step that panics makes its trainer unusable, so a poisoned lock adds no information.

fn reading(weight: &RwLock<FieldArrays>) -> RwLockReadGuard<'_, FieldArrays> {
    weight.read().unwrap_or_else(PoisonError::into_inner)
}

fn writing(weight: &RwLock<FieldArrays>) -> RwLockWriteGuard<'_, FieldArrays> {
    weight.write().unwrap_or_else(PoisonError::into_inner)
}

/// The delivered weights of a [`Matrix`], in the memory in which they are trained. Reads give the weights of the last step, but the global
/// scale is a copy from the time when this was created, so the holder must not read the weights after a further step.
#[derive(Debug)]
pub struct SharedWeight {
    weight: Arc<RwLock<FieldArrays>>,
    form: WeightForm,
    rows: usize,
    cols: usize,
    global: f32,
}

impl SharedWeight {
    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The global scale.
    pub fn global(&self) -> f32 {
        self.global
    }

    /// Bytes of the codes and scales.
    pub fn bytes(&self) -> usize {
        let weight = reading(&self.weight);
        weight.codes.bytes() + weight.scales.bytes()
    }

    /// Type of the values.
    pub fn kind(&self) -> WeightType {
        match self.form {
            WeightForm::Residual(_) | WeightForm::TwoTerm | WeightForm::OneTerm => {
                WeightType::Nvfp4
            }
            WeightForm::Bf16 => WeightType::BF16,
            WeightForm::F32 => WeightType::F32,
        }
    }

    /// Copies codes and scales of rows in host memory.
    pub(in super::super) fn read_nvfp4(
        &self,
        rows: Range<usize>,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<()> {
        let weight = reading(&self.weight);
        let (from, of) = weight.codes_of(&self.blocks(rows))?;
        codes.copy_from_slice(from);
        scales.copy_from_slice(of);
        Ok(())
    }

    /// The values of rows in host memory.
    pub(in super::super) fn read(&self, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let weight = reading(&self.weight);
        let (codes, scales) = weight.codes_of(&self.blocks(rows))?;
        let bytes = self.form.codes().codes;
        for (i, (out, codes)) in out
            .as_chunks_mut::<BLOCK>()
            .0
            .iter_mut()
            .zip(codes.chunks_exact(bytes))
            .enumerate()
        {
            let scale = scales.get(i).copied().unwrap_or(0);
            *out = decode_weights(self.form, codes, &[], scale, self.global, false);
        }
        Ok(())
    }

    fn blocks(&self, rows: Range<usize>) -> Range<usize> {
        rows.start * self.cols / BLOCK..rows.end * self.cols / BLOCK
    }

    /// The memory on a GPU, in its kernels' layout.
    pub(in super::super) fn on_gpu(&self) -> Result<Arc<DeviceBuffer>> {
        Ok(reading(&self.weight).codes.shared_on_gpu()?.clone())
    }
}

/// A matrix `[rows, cols]` with the moments of its optimizer, or without moments if it is frozen.
#[derive(Debug)]
pub struct Matrix {
    forms: Forms,
    frozen: bool,
    rows: usize,
    cols: usize,
    /// The weights' global scale.
    global: f32,
    /// Steps made so far.
    steps: u64,
    /// Whether a step has changed a weight.
    moved: bool,
    /// Shared with the model that runs while it is trained: see [`Matrix::shared`].
    weight: Arc<RwLock<FieldArrays>>,
    rest: Array<u8>,
    first: FieldArrays,
    second: FieldArrays,
    /// Whether the moments of a matrix on a GPU are in host memory.
    offloaded: bool,
    /// Changes of the current step, on the CPU.
    changes: Changes,
    /// Changes of the current step, on a GPU: three 64-bit integers, see [`cuda::AdamWStep`].
    counters: Array<u8>,
}

/// Rows encoded at a time before they are copied to the device.
const ENCODED: usize = 4096;
const _: () = assert!(ENCODED.is_multiple_of(GROUP_ROWS));
/// Bytes of the counters.
const COUNTERS: usize = 24;

/// The parts of a matrix's state, in the order of checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatePart {
    /// Weights' codes, row-major.
    Codes,
    /// Block scales of the weights.
    Scales,
    /// Remainder of the weights, beside their codes.
    Rest,
    /// First moments: codes, block scales, and global scales of groups as float32.
    First(FieldPart),
    /// Second moments, likewise.
    Second(FieldPart),
}

/// A part of a field of moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldPart {
    /// Codes.
    Codes,
    /// Block scales.
    Scales,
    /// Global scales.
    Globals,
}

impl StatePart {
    /// All parts.
    pub const ALL: [StatePart; 9] = [
        StatePart::Codes,
        StatePart::Scales,
        StatePart::Rest,
        StatePart::First(FieldPart::Codes),
        StatePart::First(FieldPart::Scales),
        StatePart::First(FieldPart::Globals),
        StatePart::Second(FieldPart::Codes),
        StatePart::Second(FieldPart::Scales),
        StatePart::Second(FieldPart::Globals),
    ];

    /// Its name in a checkpoint.
    pub const fn name(self) -> &'static str {
        match self {
            StatePart::Codes => "codes",
            StatePart::Scales => "scales",
            StatePart::Rest => "rest",
            StatePart::First(FieldPart::Codes) => "first.codes",
            StatePart::First(FieldPart::Scales) => "first.scales",
            StatePart::First(FieldPart::Globals) => "first.globals",
            StatePart::Second(FieldPart::Codes) => "second.codes",
            StatePart::Second(FieldPart::Scales) => "second.scales",
            StatePart::Second(FieldPart::Globals) => "second.globals",
        }
    }
}

/// The elements of an array, little-endian.
pub(super) fn floats_of(array: &Array) -> Result<Vec<u8>> {
    let mut values = vec![0.0; array.len()];
    array.all().read(&mut values)?;
    Ok(values.iter().flat_map(|v: &f32| v.to_le_bytes()).collect())
}

/// Restores the result of [`floats_of`].
pub(super) fn put_floats(array: &mut Array, bytes: &[u8]) -> Result<()> {
    let values = bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|&b| f32::from_le_bytes(b));
    array
        .all_mut()
        .copy_from(Slice::Host(&values.collect::<Vec<_>>()))
}

fn bytes_of(array: &Array<u8>) -> Result<Vec<u8>> {
    let mut bytes = vec![0; array.len()];
    array.all().read(&mut bytes)?;
    Ok(bytes)
}

impl Matrix {
    /// A matrix with these values, rounded to nearest, and zero moments. `read` is called twice for each row, on threads of `host`.
    pub fn new(
        device: &Device,
        host: &Cpu,
        forms: Forms,
        rows: usize,
        cols: usize,
        read: &ReadRows<'_>,
    ) -> Result<Matrix> {
        let mut matrix = Matrix::zeroed(device, forms, rows, cols)?;
        matrix.fill(device, host, read)?;
        Ok(matrix)
    }

    /// A frozen matrix: like [`Matrix::new`], but without moments and never stepped.
    pub fn frozen(
        device: &Device,
        host: &Cpu,
        weight: WeightForm,
        rows: usize,
        cols: usize,
        read: &ReadRows<'_>,
    ) -> Result<Matrix> {
        let mut matrix = Matrix::allocate(device, Self::frozen_forms(weight), true, rows, cols)?;
        matrix.fill(device, host, read)?;
        Ok(matrix)
    }

    /// A matrix that starts from these NVFP4 codes `[rows, cols / 2]`, block scales `[rows, cols / 16]` and global scale, with zero
    /// moments. Without `read` the remainder beside the codes is zero; with it, the remainder brings the weights as near to the values that
    /// `read` gives as `forms` allow. `read` is called on threads of `host`.
    pub fn begun(
        device: &Device,
        host: &Cpu,
        forms: Forms,
        (rows, cols): (usize, usize),
        (codes, scales, global): (&[u8], &[u8], f32),
        read: Option<&ReadRows<'_>>,
    ) -> Result<Matrix> {
        let mut matrix = Matrix::zeroed(device, forms, rows, cols)?;
        check_block_scales(scales, 0, cols / BLOCK)?;
        matrix.write_weights(device, codes, scales)?;
        matrix.restore(global, 0)?;
        if let Some(read) = read
            && forms.weight.rest().codes > 0
        {
            let mut rest = memory::zeros(matrix.part_bytes(StatePart::Rest))?;
            let of = (codes, scales, global);
            host.encode_rest(forms.weight, (rows, cols), of, read, &mut rest)?;
            matrix.write_part(StatePart::Rest, &rest)?;
        }
        Ok(matrix)
    }

    /// A frozen matrix, never stepped, of these NVFP4 codes `[rows, cols / 2]`, block scales `[rows, cols / 16]`, and global scale.
    pub fn frozen_nvfp4(
        device: &Device,
        (rows, cols): (usize, usize),
        (codes, scales, global): (&[u8], &[u8], f32),
    ) -> Result<Matrix> {
        let forms = Self::frozen_forms(WeightForm::OneTerm);
        let mut matrix = Matrix::allocate(device, forms, true, rows, cols)?;
        check_block_scales(scales, 0, cols / BLOCK)?;
        matrix.write_weights(device, codes, scales)?;
        matrix.restore(global, 0)?;
        Ok(matrix)
    }

    fn frozen_forms(weight: WeightForm) -> Forms {
        Forms {
            weight,
            ..Forms::default()
        }
    }

    /// Stores these values, rounded to nearest.
    fn fill(&mut self, device: &Device, host: &Cpu, read: &ReadRows<'_>) -> Result<()> {
        let (rows, cols) = (self.rows, self.cols);
        let amax = host.largest_weight(rows, cols, read)?;
        // A matrix of zeros needs room to grow.
        self.global = weight_global(amax.max(1.0 / 1024.0));
        for first in (0..rows).step_by(ENCODED) {
            self.put_rows(device, host, first..rows.min(first + ENCODED), read)?;
        }
        Ok(())
    }

    /// A matrix of zeros, with zero moments.
    pub fn zeroed(device: &Device, forms: Forms, rows: usize, cols: usize) -> Result<Matrix> {
        Self::allocate(device, forms, false, rows, cols)
    }

    fn allocate(
        device: &Device,
        forms: Forms,
        frozen: bool,
        rows: usize,
        cols: usize,
    ) -> Result<Matrix> {
        let moments = |bytes| match frozen {
            true => Ok(FieldArrays::none()),
            false => FieldArrays::moments(device, bytes, rows, cols),
        };
        if rows == 0 || cols == 0 || !cols.is_multiple_of(BLOCK) {
            bail!(
                Unsupported,
                "a matrix of [{rows}, {cols}] cannot be trained: rows must be positive and columns a positive multiple of {BLOCK}"
            );
        }
        Ok(Matrix {
            forms,
            frozen,
            rows,
            cols,
            global: 1.0,
            steps: 0,
            moved: false,
            weight: Arc::new(RwLock::new(FieldArrays::weights(
                device,
                forms.weight.codes(),
                rows,
                cols,
            )?)),
            rest: Array::zeroed(device, rows * cols / BLOCK * forms.weight.rest().codes)?,
            first: moments(forms.first.field())?,
            second: moments(forms.second.field())?,
            offloaded: false,
            changes: Changes::default(),
            counters: Array::zeroed(
                device,
                if device.is_cuda() && !frozen {
                    COUNTERS
                } else {
                    0
                },
            )?,
        })
    }

    /// Bytes of device memory through which `moments` bytes of offloaded moments pass in a step.
    pub fn offload_room(moments: usize) -> usize {
        moments.min(cuda::OFFLOAD_ROOM)
    }

    /// Moves the moments, which must still be zero, to host memory. A step copies them to the device and back, some rows at a time; see
    /// [`Device::check_offload`].
    pub fn offload_moments(&mut self, device: &Device) -> Result<()> {
        if !self.frozen {
            self.first = self.first.offloaded(device)?;
            self.second = self.second.offloaded(device)?;
            self.offloaded = true;
        }
        Ok(())
    }

    /// Encodes rows, rounded to nearest.
    fn put_rows(
        &mut self,
        device: &Device,
        host: &Cpu,
        rows: Range<usize>,
        read: &ReadRows<'_>,
    ) -> Result<()> {
        let (form, cols) = (self.forms.weight, self.cols);
        let blocks = rows.start * cols / BLOCK..rows.end * cols / BLOCK;
        let (bytes, beside) = (form.codes(), form.rest().codes);
        let mut codes = vec![0; blocks.len() * bytes.codes];
        let mut scales = vec![0; blocks.len() * usize::from(bytes.scaled)];
        let mut rest = vec![0; blocks.len() * beside];
        let encoded = Rows {
            codes: &mut codes,
            scales: &mut scales,
        };
        host.encode_matrix(
            form,
            rows.clone(),
            cols,
            read,
            self.global,
            encoded,
            &mut rest,
        )?;
        let of = |bytes: usize| blocks.start * bytes..blocks.end * bytes;
        self.rest
            .part_mut(of(beside))?
            .copy_from(Slice::Host(&rest))?;
        if device.is_cuda() && bytes.scaled {
            return self.pack(device, rows, &codes, &scales);
        }
        let mut weight = writing(&self.weight);
        weight
            .codes
            .part_mut(of(bytes.codes))?
            .copy_from(Slice::Host(&codes))?;
        weight
            .scales
            .part_mut(of(usize::from(bytes.scaled)))?
            .copy_from(Slice::Host(&scales))
    }

    /// Converts codes and scales of rows, starting at a multiple of [`GROUP_ROWS`], to the layout of a GPU's kernels.
    fn pack(
        &mut self,
        device: &Device,
        rows: Range<usize>,
        codes: &[u8],
        scales: &[u8],
    ) -> Result<()> {
        let upload = |bytes: &[u8]| {
            let mut array = Array::<u8>::scratch(device, bytes.len())?;
            array.all_mut().copy_from(Slice::Host(bytes))?;
            Ok(array)
        };
        let (codes, scales) = (upload(codes)?, upload(scales)?);
        let at = |row: usize| cuda::chunk_bytes(row, self.cols);
        let mut weight = writing(&self.weight);
        let chunks = weight
            .codes
            .part_mut(at(rows.start)?..at(rows.end)?)?
            .cuda()?;
        cuda::pack_matrix(
            codes.all().cuda()?,
            scales.all().cuda()?,
            (rows.len(), self.cols),
            chunks,
        )
    }

    /// Its storage formats.
    pub fn forms(&self) -> &Forms {
        &self.forms
    }

    /// Whether it is never stepped, and has no moments.
    pub fn is_frozen(&self) -> bool {
        self.frozen
    }

    /// Rows and columns.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// The global scale of the delivered weights.
    pub fn global(&self) -> f32 {
        self.global
    }

    /// Steps made so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Whether a step has changed a weight.
    pub fn has_moved(&self) -> bool {
        self.moved
    }

    /// Bytes that a matrix of these formats will hold; a frozen matrix counts only the weight.
    pub fn bytes_of(
        device: &Device,
        forms: Forms,
        frozen: bool,
        rows: usize,
        cols: usize,
    ) -> Result<usize> {
        let blocks = rows * cols / BLOCK;
        let (codes, scales) = weight_bytes(device.is_cuda(), forms.weight.codes(), rows, cols)?;
        let weight = codes + scales + blocks * forms.weight.rest().codes;
        if frozen {
            return Ok(weight);
        }
        let globals = size_of::<f32>() * rows.div_ceil(GROUP_ROWS);
        let moments = [forms.first.field(), forms.second.field()];
        let counters = if device.is_cuda() { COUNTERS } else { 0 };
        let moments = moments.map(|of| blocks * of.of_block() + globals);
        Ok(weight + moments.iter().sum::<usize>() + counters)
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        reading(&self.weight).held()
            + self.rest.bytes()
            + self.first.held()
            + self.second.held()
            + self.counters.bytes()
    }

    fn on_gpu<'a>(&'a self, weight: &'a FieldArrays) -> Result<TrainedWeights<'a>> {
        Ok(TrainedWeights {
            form: self.forms.weight,
            cols: self.cols,
            global: self.global,
            codes: weight.codes.all().cuda()?,
            rest: self.rest.all().cuda()?,
        })
    }

    /// The values of a range of rows: in full stored precision if `whole`, else those of the delivered codes.
    pub fn decode(
        &self,
        device: &Device,
        rows: Range<usize>,
        whole: bool,
        out: SliceMut<'_, Mixed>,
    ) -> Result<()> {
        if rows.start > rows.end || rows.end > self.rows || out.len() != rows.len() * self.cols {
            bail!(
                Internal,
                "rows {rows:?} of [{}, {}] to {} elements",
                self.rows,
                self.cols,
                out.len()
            );
        }
        let weight = reading(&self.weight);
        let Device::Cpu(cpu) = device else {
            return cuda::decode_matrix(
                &self.on_gpu(&weight)?,
                self.rows,
                rows.start,
                None,
                whole,
                out.cuda()?,
            );
        };
        let form = self.forms.weight;
        let blocks = rows.start * self.cols / BLOCK..rows.end * self.cols / BLOCK;
        let codes = weight.codes_of(&blocks)?;
        let beside = form.rest().codes;
        let rest = self.rest.part(blocks.start * beside..blocks.end * beside)?;
        cpu.decode_matrix(form, codes, rest.host()?, self.global, whole, out.host()?);
        Ok(())
    }

    /// Like [`Matrix::decode`] for these rows, in this order, which must exist: an embedding lookup.
    pub fn decode_rows(
        &self,
        device: &Device,
        rows: &[u32],
        whole: bool,
        mut out: SliceMut<'_, Mixed>,
    ) -> Result<()> {
        if out.len() != rows.len() * self.cols || rows.iter().any(|&row| row as usize >= self.rows)
        {
            bail!(
                Internal,
                "{} rows of [{}, {}] to {} elements",
                rows.len(),
                self.rows,
                self.cols,
                out.len()
            );
        }
        if device.is_cuda() {
            let mut tokens = Array::<u32>::scratch(device, rows.len())?;
            tokens.all_mut().copy_from(Slice::Host(rows))?;
            let tokens = Some(tokens.all().cuda()?);
            let weight = reading(&self.weight);
            let w = self.on_gpu(&weight)?;
            return cuda::decode_matrix(&w, self.rows, 0, tokens, whole, out.cuda()?);
        }
        for (i, &row) in rows.iter().enumerate() {
            let out = out.reborrow().part(i * self.cols..(i + 1) * self.cols)?;
            self.decode(device, row as usize..row as usize + 1, whole, out)?;
        }
        Ok(())
    }

    /// Makes a step: see [`make_steps`].
    pub fn step(&mut self, device: &Device, step: &RowsStep<'_>) -> Result<()> {
        make_steps(device, &mut [(self, *step)])
    }

    /// Checks that these rows can make a step.
    fn check_step(&self, step: &RowsStep<'_>) -> Result<()> {
        let (cols, len) = (self.cols, step.gradients.len());
        if self.frozen {
            bail!(
                Internal,
                "a step of a frozen matrix [{}, {cols}]",
                self.rows
            );
        }
        if !len.is_multiple_of(cols) || step.first_row + len / cols > self.rows {
            bail!(
                Internal,
                "{len} gradients from row {} on, of a matrix [{}, {cols}]",
                step.first_row,
                self.rows
            );
        }
        Ok(())
    }

    fn step_on_gpu<'a>(
        &'a self,
        weight: &'a FieldArrays,
        step: &RowsStep<'a>,
    ) -> Result<cuda::AdamWStep<'a>> {
        Ok(cuda::AdamWStep {
            forms: self.forms,
            coefficients: step.coefficients,
            keys: self.keys(step),
            weights: self.on_gpu(weight)?,
            first: self.first.on_gpu()?,
            second: self.second.on_gpu()?,
            first_row: step.first_row,
            gradients: step.gradients.cuda()?,
            clip: gpu(step.clip)?,
            counters: self.counters.all().cuda()?,
        })
    }

    fn keys(&self, step: &RowsStep<'_>) -> Keys {
        Keys::new(step.seed, step.tensor, self.steps + 1)
    }

    fn step_on_cpu(&mut self, cpu: &Cpu, step: &RowsStep<'_>) -> Result<()> {
        let mut coefficients = step.coefficients;
        if let Some(clip) = step.clip {
            let factor = clip.host()?[0];
            if !factor.is_finite() {
                return Ok(());
            }
            coefficients.factor *= factor;
        }
        let (cols, forms, keys) = (self.cols, self.forms, self.keys(step));
        let rows = step.first_row..step.first_row + step.gradients.len() / cols;
        let blocks = rows.start * cols / BLOCK..rows.end * cols / BLOCK;
        let groups = rows.start / GROUP_ROWS..rows.end.div_ceil(GROUP_ROWS);
        let beside = forms.weight.rest().codes;
        let mut weight = writing(&self.weight);
        let state = MatrixRows {
            codes: weight.rows(&blocks, 0..0)?.0,
            rest: self
                .rest
                .part_mut(blocks.start * beside..blocks.end * beside)?
                .host()?,
            first: self.first.rows(&blocks, groups.clone())?,
            second: self.second.rows(&blocks, groups)?,
        };
        let of_rows = cpu::RowsStep {
            forms: &forms,
            coefficients: &coefficients,
            keys: &keys,
            cols,
            first_row: rows.start,
            global: self.global,
        };
        self.changes += cpu.adamw(&of_rows, step.gradients.host()?, state)?;
        Ok(())
    }

    /// Ends a step after all rows have made it. Returns how many weights it has changed.
    pub fn finish_step(&mut self, device: &Device) -> Result<Changes> {
        finish_steps(device, &mut [self])
    }

    /// Doubles the global scale, so that block scales have room to grow. Values stay the same, except where half a block scale is not
    /// representable.
    fn make_room(&mut self, device: &Device) -> Result<()> {
        let form = self.forms.weight;
        let global = self.global * 2.0;
        let (bytes, beside) = (form.codes().codes, form.rest().codes);
        // This is rare enough to copy a GPU's matrix to the host.
        let (mut codes, mut scales) = self.read_weights(device)?;
        let mut rest = self.read_part(device, StatePart::Rest)?;
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
            encode_weights(form, &values, global, field, rest);
        }
        self.write_weights(device, &codes, &scales)?;
        self.write_part(StatePart::Rest, &rest)?;
        self.global = global;
        Ok(())
    }

    /// The delivered codes `[rows, cols / 2]` and block scales `[rows, cols / 16]`; `None` unless they are NVFP4.
    pub fn delivered(&self, device: &Device) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
        match self.forms.weight.is_packed() {
            true => self.read_weights(device).map(Some),
            false => Ok(None),
        }
    }

    /// Chooses new block scales for an NVFP4 matrix that minimize the error of its product with inputs of these second moments, one
    /// [`BlockMoments`] for each 16 columns. The stored weights stay as near to their values as the new scales allow. Returns the number of
    /// blocks whose scales changed.
    pub fn choose_scales(
        &mut self,
        device: &Device,
        host: &Cpu,
        moments: &[BlockMoments],
    ) -> Result<usize> {
        let form = self.forms.weight;
        if !form.is_packed() || moments.len() * BLOCK != self.cols {
            bail!(
                Internal,
                "block scales of {form:?} in rows of {} by {} blocks of second moments",
                self.cols,
                moments.len()
            );
        }
        let (mut codes, mut scales) = self.read_weights(device)?;
        let mut rest = bytes_of(&self.rest)?;
        let rows = Rows {
            codes: &mut codes,
            scales: &mut scales,
        };
        let changed = host.choose_scales(form, self.global, moments, rows, &mut rest);
        if changed > 0 {
            self.write_weights(device, &codes, &scales)?;
            self.write_part(StatePart::Rest, &rest)?;
        }
        Ok(changed)
    }

    /// Calls `f` with the field that holds a part, and the part within it.
    fn with_field<T>(&self, part: StatePart, f: impl FnOnce(&FieldArrays, FieldPart) -> T) -> T {
        match part {
            StatePart::First(part) => f(&self.first, part),
            StatePart::Second(part) => f(&self.second, part),
            StatePart::Scales => f(&reading(&self.weight), FieldPart::Scales),
            StatePart::Codes | StatePart::Rest => f(&reading(&self.weight), FieldPart::Codes),
        }
    }

    /// Passes the delivered values to `each`, some rows at a time, in host memory and in f32.
    pub fn each_delivered(
        &self,
        device: &Device,
        each: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        /// Blocks that are decoded at a time.
        const RUN: usize = 1 << 14;
        let form = self.forms.weight;
        let bytes = form.codes().codes;
        let (codes, scales) = self.read_weights(device)?;
        let in_row = self.cols / BLOCK;
        let run = (RUN / in_row).max(1) * in_row;
        let mut values = Vec::with_capacity(run * BLOCK);
        for (i, codes) in codes.chunks(run * bytes).enumerate() {
            values.clear();
            for (block, codes) in (i * run..).zip(codes.chunks_exact(bytes)) {
                let scale = scales.get(block).copied().unwrap_or(0);
                values.extend(decode_weights(form, codes, &[], scale, self.global, false));
            }
            each(&values)?;
        }
        Ok(())
    }

    /// All delivered values, row-major.
    pub fn delivered_values(&self, device: &Device) -> Result<Vec<f32>> {
        let mut values = Vec::with_capacity(self.rows * self.cols);
        self.each_delivered(device, &mut |some| {
            values.extend_from_slice(some);
            Ok(())
        })?;
        Ok(values)
    }

    /// The delivered weights, in the memory in which they are trained, for products of a model that runs during training. Valid until the
    /// next step.
    pub fn shared(&self) -> SharedWeight {
        SharedWeight {
            weight: self.weight.clone(),
            form: self.forms.weight,
            rows: self.rows,
            cols: self.cols,
            global: self.global,
        }
    }

    /// Bytes of a part of the state, the same on every device.
    pub fn part_bytes(&self, part: StatePart) -> usize {
        let blocks = self.rows * self.cols / BLOCK;
        if part == StatePart::Rest {
            return blocks * self.forms.weight.rest().codes;
        }
        self.with_field(part, |field, part| match part {
            FieldPart::Codes => blocks * field.bytes.codes,
            FieldPart::Scales => blocks * usize::from(field.bytes.scaled),
            FieldPart::Globals => 4 * field.globals.len(),
        })
    }

    /// A part of the state, row-major and little-endian: the same bytes on every device.
    pub fn read_part(&self, device: &Device, part: StatePart) -> Result<Vec<u8>> {
        match part {
            StatePart::Codes => Ok(self.read_weights(device)?.0),
            StatePart::Scales => Ok(self.read_weights(device)?.1),
            StatePart::Rest => bytes_of(&self.rest),
            part => self.with_field(part, |field, part| match part {
                FieldPart::Codes => bytes_of(&field.codes),
                FieldPart::Scales => bytes_of(&field.scales),
                FieldPart::Globals => floats_of(&field.globals),
            }),
        }
    }

    /// Codes and block scales of weights, row-major.
    fn read_weights(&self, device: &Device) -> Result<(Vec<u8>, Vec<u8>)> {
        if device.is_cuda() && self.forms.weight.is_packed() {
            let mut codes = Array::<u8>::scratch(device, self.part_bytes(StatePart::Codes))?;
            let mut scales = Array::<u8>::scratch(device, self.part_bytes(StatePart::Scales))?;
            let weight = reading(&self.weight);
            cuda::unpack_matrix(
                weight.codes.all().cuda()?,
                (self.rows, self.cols),
                codes.all_mut().cuda()?,
                scales.all_mut().cuda()?,
            )?;
            return Ok((bytes_of(&codes)?, bytes_of(&scales)?));
        }
        let weight = reading(&self.weight);
        Ok((bytes_of(&weight.codes)?, bytes_of(&weight.scales)?))
    }

    /// Restores codes and block scales of weights.
    pub fn write_weights(&mut self, device: &Device, codes: &[u8], scales: &[u8]) -> Result<()> {
        if device.is_cuda() && self.forms.weight.is_packed() {
            return self.pack(device, 0..self.rows, codes, scales);
        }
        let mut weight = writing(&self.weight);
        weight.codes.all_mut().copy_from(Slice::Host(codes))?;
        weight.scales.all_mut().copy_from(Slice::Host(scales))
    }

    /// Restores a part of the state other than codes and scales of weights.
    pub fn write_part(&mut self, part: StatePart, bytes: &[u8]) -> Result<()> {
        let (field, part) = match part {
            StatePart::Rest => return self.rest.all_mut().copy_from(Slice::Host(bytes)),
            StatePart::First(part) => (&mut self.first, part),
            StatePart::Second(part) => (&mut self.second, part),
            StatePart::Codes | StatePart::Scales => bail!(
                Internal,
                "codes and scales of weights are restored together"
            ),
        };
        match part {
            FieldPart::Codes => field.codes.all_mut().copy_from(Slice::Host(bytes)),
            FieldPart::Scales => field.scales.all_mut().copy_from(Slice::Host(bytes)),
            FieldPart::Globals => put_floats(&mut field.globals, bytes),
        }
    }

    /// Restores the weights' global scale and the number of steps. Called after the parts have been restored.
    pub fn restore(&mut self, global: f32, steps: u64) -> Result<()> {
        check_global_scale(global)?;
        (self.global, self.steps, self.moved) = (global, steps, steps > 0);
        Ok(())
    }

    /// Restores whether a step has changed a weight. Called after [`Matrix::restore`].
    pub fn restore_moved(&mut self, moved: bool) {
        self.moved = moved;
    }
}

/// A step of some rows of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct RowsStep<'a> {
    /// Coefficients of the step.
    pub coefficients: Coefficients,
    /// Seed of the random bits, together with [`RowsStep::tensor`].
    pub seed: u64,
    /// See [`RowsStep::seed`].
    pub tensor: u64,
    /// The first row, a multiple of [`GROUP_ROWS`].
    pub first_row: usize,
    /// Gradients of the rows, `[.., cols]`. They must be finite.
    pub gradients: Slice<'a, Mixed>,
    /// One float32 on the device that multiplies the gradients. If it is not finite, the step does nothing.
    pub clip: Option<Slice<'a>>,
}

/// Makes steps of some rows of matrices; a GPU may run them concurrently. When all rows of a matrix have made the step, [`finish_steps`]
/// ends it.
pub fn make_steps(device: &Device, steps: &mut [(&mut Matrix, RowsStep<'_>)]) -> Result<()> {
    for (matrix, step) in steps.iter() {
        matrix.check_step(step)?;
    }
    if let Device::Cpu(cpu) = device {
        for (matrix, step) in steps {
            matrix.step_on_cpu(cpu, step)?;
        }
        return Ok(());
    }
    let weights: Vec<_> = steps.iter().map(|(m, _)| writing(&m.weight)).collect();
    let mut at_once = Vec::with_capacity(steps.len());
    for ((matrix, step), weight) in steps.iter().zip(&weights) {
        let on_gpu = matrix.step_on_gpu(weight, step)?;
        match matrix.offloaded {
            true => cuda::adamw_offloaded(&on_gpu)?,
            false => at_once.push(on_gpu),
        }
    }
    cuda::adamw(&at_once)
}

/// Ends a step after all rows of these matrices have made it. Returns how many weights it has changed. Waits for a GPU, once.
pub fn finish_steps(device: &Device, matrices: &mut [&mut Matrix]) -> Result<Changes> {
    let found: Vec<Changes> = if device.is_cuda() {
        let zeros = Array::<u8>::zeroed(device, COUNTERS)?;
        let mut all = Array::<u8>::scratch(device, COUNTERS * matrices.len())?;
        for (i, matrix) in matrices.iter_mut().enumerate() {
            let to = all.part_mut(i * COUNTERS..(i + 1) * COUNTERS)?;
            to.copy_from(matrix.counters.all())?;
            matrix.counters.all_mut().copy_from(zeros.all())?;
        }
        let counted = bytes_of(&all)?;
        let counted = counted.as_chunks::<COUNTERS>().0.iter();
        counted
            .map(|bytes| {
                let count = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
                Changes {
                    stored: count(0),
                    delivered: count(8),
                    clipped: count(16),
                }
            })
            .collect()
    } else {
        let found = matrices.iter_mut();
        found
            .map(|matrix| std::mem::take(&mut matrix.changes))
            .collect()
    };
    let mut all = Changes::default();
    for (matrix, changes) in matrices.iter_mut().zip(found) {
        matrix.steps += 1;
        matrix.moved |= changes.stored + changes.delivered > 0;
        if changes.clipped > 0 {
            matrix.make_room(device)?;
        }
        all += changes;
    }
    Ok(all)
}

/// A float32 parameter with its moments: norms and biases.
#[derive(Debug)]
pub struct Vector {
    weight: Array,
    first: Array,
    second: Array,
    gradient: Array,
    steps: u64,
}

impl Vector {
    /// A parameter with these values, and zero moments.
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

    /// The accumulated gradient, writable.
    pub fn gradient(&mut self) -> SliceMut<'_> {
        self.gradient.all_mut()
    }

    /// The values, and the accumulated gradient, writable.
    pub fn with_gradient(&mut self) -> (Slice<'_>, SliceMut<'_>) {
        (self.weight.all(), self.gradient.all_mut())
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        4 * self.weight.bytes()
    }

    /// Number of steps that have changed it.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Values, first and second moments, as little-endian float32.
    pub fn read_state(&self) -> Result<[Vec<u8>; 3]> {
        Ok([
            floats_of(&self.weight)?,
            floats_of(&self.first)?,
            floats_of(&self.second)?,
        ])
    }

    /// Restores the result of [`Vector::read_state`] as of step `steps`.
    pub fn write_state(&mut self, [weight, first, second]: [&[u8]; 3], steps: u64) -> Result<()> {
        put_floats(&mut self.weight, weight)?;
        put_floats(&mut self.first, first)?;
        put_floats(&mut self.second, second)?;
        self.steps = steps;
        Ok(())
    }

    /// Sets the gradient to zero.
    pub fn clear_gradient(&mut self, device: &Device) -> Result<()> {
        super::super::activation::fill(device, self.gradient.all_mut(), 0.0)
    }

    /// Makes a step by the gradient, then sets it to zero.
    pub fn step(&mut self, device: &Device, coefficients: &Coefficients) -> Result<()> {
        if device.is_cuda() {
            let moments = [self.first.all().cuda()?, self.second.all().cuda()?];
            cuda::adamw_vector(
                coefficients,
                self.weight.all().cuda()?,
                moments,
                self.gradient.all().cuda()?,
                None,
            )?;
            self.steps += 1;
            return Ok(());
        }
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
