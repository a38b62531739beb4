//! Exports the values of parameters, in their delivered encodings.

use std::ops::Range;
use std::sync::OnceLock;

use half::bf16;

use super::super::adapter;
use super::super::beginning::Beginning;
use super::super::trainer::Trainer;
use super::item::{Content, Item};
use crate::base::error::bail;
use crate::base::{Result, memory};
use crate::checkpoint::{Encoding, Writer};
use crate::cpu::Cpu;
use crate::cpu::training::Rows;
use crate::format::adamw::{ROOM, WeightForm};
use crate::format::nvfp4::{self, BLOCK, Levels, Nvfp4, QuantizeOptions};
use crate::format::{e4m3, input_moments, int8};
use crate::model::convert::Tables;
use crate::model::training::{AdapterLayout, MatrixId, Source, VectorId};
use crate::ops::training::optimizer::Matrix;
use crate::tensor::DType;

/// Rows of a table that are compared and rounded at a time.
const ROWS: usize = 256;

/// A trainer's parameters, with the initial ones.
pub(super) struct Exporter<'a> {
    trainer: &'a Trainer,
    pub(super) source: &'a Source,
    pub(super) beginning: &'a Beginning<'a>,
    host: &'a Cpu,
    /// Whether each matrix has changed, once known.
    changed: Vec<OnceLock<bool>>,
}

impl<'a> Exporter<'a> {
    pub(super) fn new(
        trainer: &'a Trainer,
        source: &'a Source,
        beginning: &'a Beginning<'a>,
        host: &'a Cpu,
    ) -> Self {
        let matrices = source.layout().matrices.len();
        Exporter {
            trainer,
            source,
            beginning,
            host,
            changed: (0..matrices).map(|_| OnceLock::new()).collect(),
        }
    }

    fn matrix(&self, id: MatrixId) -> &Matrix {
        &self.trainer.parameters().matrices()[id]
    }

    fn adapter(&self, id: MatrixId) -> Option<AdapterLayout> {
        let mut adapted = self.trainer.parameters().layout().adapted();
        adapted
            .find(|(of, _)| *of == id)
            .map(|(_, adapter)| adapter)
    }

    /// The encoding in which a matrix is written, given the choice for the tables.
    pub(super) fn encoding(&self, id: MatrixId, tables: Tables) -> Result<Encoding> {
        let layout = self.source.layout();
        if (id == layout.embedding || id == layout.head)
            && let Some(encoding) = asked(tables)
        {
            return Ok(encoding);
        }
        let begins = self.beginning.encoding(id)?;
        if !self.trainer.parameters().is_trained(id) {
            return Ok(begins);
        }
        let is_high = self
            .trainer
            .config()
            .recipe
            .keeps_high(&layout.matrices[id].name);
        Ok(match (self.matrix(id).forms().weight, begins) {
            (WeightForm::Bf16, Encoding::Int8) => Encoding::Int8,
            (WeightForm::Bf16, _) => Encoding::Dense(DType::BF16),
            (WeightForm::F32, Encoding::Dense(DType::F16)) if !is_high => begins,
            (WeightForm::F32, _) if self.has_changed(id)? => Encoding::Dense(DType::F32),
            (WeightForm::F32, _) => begins,
            _ => Encoding::Nvfp4,
        })
    }

    /// Whether a matrix may differ from its initial values.
    pub(super) fn has_changed(&self, id: MatrixId) -> Result<bool> {
        if let Some(changed) = self.changed[id].get() {
            return Ok(*changed);
        }
        let changed = self.find_changed(id)?;
        Ok(*self.changed[id].get_or_init(|| changed))
    }

    fn find_changed(&self, id: MatrixId) -> Result<bool> {
        let (parameters, matrix) = (self.trainer.parameters(), self.matrix(id));
        if !parameters.may_have_moved(id) {
            return Ok(false);
        }
        if let Some(adapter) = self.adapter(id) {
            let b = &parameters.matrices()[adapter.b];
            let b = b.delivered_values(self.trainer.device())?;
            return Ok(b.iter().any(|v| *v != 0.0));
        }
        if matrix.forms().weight != WeightForm::F32 {
            return Ok(true);
        }
        let (mut row, cols) = (0, matrix.shape().1);
        let (mut before, mut changed) = (Vec::new(), false);
        matrix.each_delivered(self.trainer.device(), &mut |values| {
            if !changed {
                let rows = row..row + values.len() / cols;
                before.resize(values.len(), 0.0);
                self.source.matrix(id, rows, &mut before)?;
                changed = values != before;
            }
            row += values.len() / cols;
            Ok(())
        })?;
        Ok(changed)
    }

    /// Whether a norm or bias differs from its initial values.
    pub(super) fn vector_has_changed(&self, id: VectorId) -> Result<bool> {
        let now = &self.trainer.parameters().vectors()[id];
        let mut values = vec![0.0; self.source.layout().vectors[id].len];
        now.values().read(&mut values)?;
        Ok(values != self.source.vector(id)?)
    }

    /// Writes a tensor.
    pub(super) fn write(&self, writer: &mut dyn Writer, item: &Item) -> Result<()> {
        match (&item.content, item.encoding) {
            (Content::Copy(entry), _) => match self.beginning.delivered() {
                Some(delivered) => writer.copy(&**delivered.checkpoint(), entry),
                None => bail!(Internal, "a copy of random weights"),
            },
            (Content::Vectors(parts), _) => self.write_vectors(writer, &item.name, parts),
            (Content::Matrices(parts), Encoding::Nvfp4) => {
                let mut all = Vec::new();
                for (id, _) in parts {
                    all.push(self.nvfp4(*id)?);
                }
                let global = all.iter().fold(0f32, |most, part| most.max(part.global));
                writer.begin(&item.name, global)?;
                for mut part in all {
                    raise_global(&mut part, global)?;
                    writer.nvfp4(&part.codes, &part.scales)?;
                }
                Ok(())
            }
            (Content::Matrices(parts), Encoding::Int8) => {
                writer.begin(&item.name, 1.0)?;
                parts
                    .iter()
                    .try_for_each(|(id, _)| self.write_int8(writer, *id))
            }
            (Content::Matrices(parts), _) => self.write_dense(writer, &item.name, parts),
        }
    }

    /// Writes a tensor to a file format whose NVFP4 has no global scale.
    pub(super) fn write_single_level(&self, writer: &mut dyn Writer, item: &Item) -> Result<()> {
        let (Content::Matrices(parts), Encoding::Nvfp4) = (&item.content, item.encoding) else {
            return self.write(writer, item);
        };
        writer.begin(&item.name, 1.0)?;
        for (id, _) in parts {
            let part = self.nvfp4(*id)?;
            if part.global == 1.0 {
                writer.nvfp4(&part.codes, &part.scales)?;
                continue;
            }
            let options = QuantizeOptions {
                levels: Levels::Single,
                ..self.options()
            };
            self.each_value(*id, &mut |values| {
                let (rows, cols) = (values.len() / part.cols, part.cols);
                let part = nvfp4::quantize(values, rows, cols, &options)?;
                writer.nvfp4(&part.codes, &part.scales)
            })?;
        }
        Ok(())
    }

    fn write_vectors(
        &self,
        writer: &mut dyn Writer,
        name: &str,
        parts: &[(VectorId, Range<usize>)],
    ) -> Result<()> {
        writer.begin(name, 1.0)?;
        for (id, _) in parts {
            let mut values = vec![0.0; self.source.layout().vectors[*id].len];
            let vector = &self.trainer.parameters().vectors()[*id];
            vector.values().read(&mut values)?;
            if self.source.adds_one(*id) {
                values.iter_mut().for_each(|v| *v -= 1.0);
            }
            writer.values(&values)?;
        }
        Ok(())
    }

    fn write_dense(
        &self,
        writer: &mut dyn Writer,
        name: &str,
        parts: &[(MatrixId, Range<usize>)],
    ) -> Result<()> {
        writer.begin(name, 1.0)?;
        parts
            .iter()
            .try_for_each(|(id, _)| self.each_value(*id, &mut |values| writer.values(values)))
    }

    /// Writes the rows of a table in int8. Unchanged rows are written as in the untrained model.
    fn write_int8(&self, writer: &mut dyn Writer, id: MatrixId) -> Result<()> {
        let (_, cols) = self.matrix(id).shape();
        let untrained = self.beginning.delivered();
        let untrained = untrained.filter(|d| d.encoding(id).is_ok_and(|e| e == Encoding::Int8));
        let (mut row, mut before) = (0, Vec::new());
        self.each_value(id, &mut |values| {
            for values in values.chunks(ROWS * cols) {
                let rows = row..row + values.len() / cols;
                row = rows.end;
                let mut codes = memory::zeros(values.len())?;
                let mut scales = memory::zeros(rows.len())?;
                int8::quantize_rows(values, cols, rows.start, &mut codes, &mut scales)?;
                if let Some(untrained) = untrained {
                    before.resize(values.len(), 0.0);
                    self.source.matrix(id, rows.clone(), &mut before)?;
                    let mut own = (memory::zeros(values.len())?, memory::zeros(rows.len())?);
                    untrained.int8(id, rows, &mut own.0, &mut own.1)?;
                    let compared = values.chunks_exact(cols).zip(before.chunks_exact(cols));
                    for (i, (now, before)) in compared.enumerate() {
                        let is_same =
                            |(now, before): (&f32, &f32)| *now == bf16::from_f32(*before).to_f32();
                        if now.iter().zip(before).all(is_same) {
                            let at = i * cols..(i + 1) * cols;
                            codes[at.clone()].copy_from_slice(&own.0[at]);
                            scales[i] = own.1[i];
                        }
                    }
                }
                writer.int8(&codes, &scales)?;
            }
            Ok(())
        })
    }

    fn options(&self) -> QuantizeOptions {
        QuantizeOptions {
            recipe: self.trainer.config().recipe.weight_scales,
            ..QuantizeOptions::default()
        }
    }

    /// A matrix in NVFP4: its own codes if it is stored so, else its values quantized.
    fn nvfp4(&self, id: MatrixId) -> Result<Nvfp4> {
        let (device, matrix) = (self.trainer.device(), self.matrix(id));
        let (rows, cols) = matrix.shape();
        let Some((codes, scales)) = matrix.delivered(device)? else {
            let mut values = Vec::new();
            self.each_value(id, &mut |some| {
                values.extend_from_slice(some);
                Ok(())
            })?;
            return nvfp4::quantize(&values, rows, cols, &self.options());
        };
        let held = Nvfp4 {
            rows,
            cols,
            codes,
            scales,
            global: matrix.global(),
        };
        match self.adapter(id) {
            Some(adapter) if self.has_changed(id)? => self.merged(id, adapter, held),
            _ => Ok(held),
        }
    }

    /// A matrix in NVFP4, merged with its adapter. Rows that the adapter does not change keep their codes.
    fn merged(&self, id: MatrixId, adapter: AdapterLayout, held: Nvfp4) -> Result<Nvfp4> {
        let (device, matrices) = (self.trainer.device(), self.trainer.parameters().matrices());
        let values = adapter::merged(device, matrices, id, adapter)?;
        let b = matrices[adapter.b].delivered_values(device)?;
        let amax = values.iter().fold(0f32, |most, v| most.max(v.abs()));
        let options = self.options();
        let mut merged = held;
        let mut global = merged.global;
        while global > 0.0 && amax > ROOM * e4m3::MAX * global {
            global *= 2.0;
        }
        raise_global(&mut merged, global)?;
        let (rows, cols) = (merged.rows, merged.cols);
        let changes = |row: usize| (0..adapter.rank).any(|inner| b[inner * rows + row] != 0.0);
        let parameters = self.trainer.parameters();
        let moments = parameters.inputs().of(parameters.layout(), id)?;
        let out = Rows {
            codes: &mut merged.codes,
            scales: &mut merged.scales,
        };
        self.host.by_code_rows(cols, out, |row, codes, scales| {
            let own = &values[row * cols..][..cols];
            match &moments {
                _ if !changes(row) => {}
                Some(moments) => {
                    input_moments::quantize_rows(own, global, moments, codes, scales);
                }
                None => {
                    nvfp4::quantize_rows(own, cols, row, global, &options, codes, scales)?;
                }
            }
            Ok(())
        })?;
        Ok(merged)
    }

    /// Passes the values of a matrix with its adapter to `each`, some rows at a time. For NVFP4 these are the values of the codes.
    fn each_value(&self, id: MatrixId, each: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        let (device, matrices) = (self.trainer.device(), self.trainer.parameters().matrices());
        match self.adapter(id) {
            Some(adapter) => each(&adapter::merged(device, matrices, id, adapter)?),
            None => self.matrix(id).each_delivered(device, each),
        }
    }
}

/// Raises the global scale of codes. A block scale is reduced by the same factor if e4m3 has that number; otherwise the block is quantized
/// again.
fn raise_global(part: &mut Nvfp4, global: f32) -> Result<()> {
    if part.global == global {
        return Ok(());
    }
    let ratio = part.global / global;
    let options = QuantizeOptions::default();
    let blocks = part.cols / BLOCK;
    for (i, scale) in part.scales.iter_mut().enumerate() {
        let codes = &mut part.codes[i * BLOCK / 2..][..BLOCK / 2];
        let wanted = e4m3::decode(*scale) * ratio;
        let smaller = e4m3::encode(wanted);
        if e4m3::decode(smaller) == wanted {
            *scale = smaller;
            continue;
        }
        let mut values = [0.0; BLOCK];
        nvfp4::dequantize(codes, &[*scale], part.global, &mut values)?;
        let scale = std::slice::from_mut(scale);
        nvfp4::quantize_rows(&values, BLOCK, i / blocks, global, &options, codes, scale)?;
    }
    part.global = global;
    Ok(())
}

/// The encoding for a choice of tables; `None` for [`Tables::Auto`].
fn asked(tables: Tables) -> Option<Encoding> {
    match tables {
        Tables::Auto => None,
        Tables::Bf16 => Some(Encoding::Dense(DType::BF16)),
        Tables::Int8 => Some(Encoding::Int8),
        Tables::Nvfp4 => Some(Encoding::Nvfp4),
    }
}
