//! What training delivers: the model's file.

use std::path::Path;

use super::trainer::Trainer;
use crate::base::Result;
use crate::base::error::bail;
use crate::checkpoint::{Checkpoint, DatWriter, Encoding, ModelOptWriter, Planned, Writer};
use crate::format::nvfp4::{BLOCK, Levels, QuantizeOptions, Recipe, quantize_rows};
use crate::model::convert::text_files;
use crate::model::training::{MatrixId, Source, VectorId};
use crate::ops::SliceMut;
use crate::ops::training::optimizer::Matrix;
use crate::tensor::DType;

/// Rows that are written at a time.
const ROWS: usize = 256;

/// What a model directory holds embeddings, and a head beside them, as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TableEncoding {
    /// bfloat16, which holds what is delivered exactly, and which every reader of such directories knows.
    #[default]
    Bf16,
    /// NVFP4, as they are trained: a quarter of the bytes.
    Nvfp4,
}

/// A parameter, or some rows of one, in an entry of a file.
enum Content {
    Matrix(MatrixId),
    Vector(VectorId),
}

impl Trainer {
    /// Writes the model to a directory in ModelOpt's layout: matrices as NVFP4 where they are trained as such, and else in float32; norms
    /// and biases in float32. An existing model there is replaced if `replace`.
    pub fn export_directory(
        &self,
        source: &Source,
        place: &Path,
        tables: TableEncoding,
        replace: bool,
    ) -> Result<()> {
        let layout = source.layout();
        let is_table = |id: MatrixId| id == layout.embedding || id == layout.head;
        let encoding =
            |id: MatrixId| match self.parameters().matrices()[id].forms().weight.is_packed() {
                true if is_table(id) && tables == TableEncoding::Bf16 => {
                    Encoding::Dense(DType::BF16)
                }
                true => Encoding::Nvfp4,
                false => Encoding::Dense(DType::F32),
            };
        let mut plan = Vec::new();
        for (id, m) in layout.matrices.iter().enumerate() {
            plan.push(Planned {
                name: m.name.clone(),
                shape: vec![m.rows, m.cols],
                encoding: encoding(id),
            });
        }
        for v in &layout.vectors {
            plan.push(Planned {
                name: v.name.clone(),
                shape: vec![v.len],
                encoding: Encoding::Dense(DType::F32),
            });
        }
        let metadata = source.checkpoint().metadata();
        let mut writer = match replace {
            true => ModelOptWriter::replace(place, &plan, metadata)?,
            false => ModelOptWriter::create(place, &plan, metadata)?,
        };
        for (name, content) in text_files(&metadata.tokenizer)? {
            writer.add_file(&name, content)?;
        }
        let mut writer: Box<dyn Writer> = Box::new(writer);
        for id in 0..layout.matrices.len() {
            self.write_matrix(&mut *writer, &layout.matrices[id].name, id, encoding(id))?;
        }
        for id in 0..layout.vectors.len() {
            writer.begin(&layout.vectors[id].name, 1.0)?;
            writer.values(&self.vector(source, id)?)?;
        }
        writer.finish()
    }

    /// Writes the model to a `.dat` file, every tensor in the type that it has in the file that training began with. NVFP4 has no global
    /// scale there, so what is delivered is rounded to codes whose block scales do without.
    pub fn export_dat(&self, source: &Source, place: &Path) -> Result<()> {
        let checkpoint: &dyn Checkpoint = &**source.checkpoint();
        let mut writer: Box<dyn Writer> = Box::new(DatWriter::create_like(place, checkpoint)?);
        for entry in checkpoint.entries() {
            let content = self.content(source, &entry.name)?;
            match content {
                // Not a parameter of training.
                None => writer.copy(checkpoint, entry)?,
                Some(Content::Matrix(id)) if entry.encoding == Encoding::Nvfp4 => {
                    self.write_single_level(&mut *writer, &entry.name, id)?
                }
                Some(Content::Matrix(id)) => {
                    self.write_matrix(&mut *writer, &entry.name, id, entry.encoding)?
                }
                Some(Content::Vector(id)) => {
                    writer.begin(&entry.name, 1.0)?;
                    writer.values(&self.vector(source, id)?)?;
                }
            }
        }
        writer.finish()
    }

    /// The parameter that an entry of the source is.
    fn content(&self, source: &Source, name: &str) -> Result<Option<Content>> {
        let layout = source.layout();
        if let Some(id) = layout.matrices.iter().position(|m| m.name == name) {
            return Ok(Some(Content::Matrix(id)));
        }
        if let Some(id) = layout.vectors.iter().position(|v| v.name == name) {
            return Ok(Some(Content::Vector(id)));
        }
        if source.is_part_of_a_matrix(name) {
            bail!(
                Unsupported,
                "{name} holds several matrices in one, which is not written back; export to a directory instead"
            );
        }
        Ok(None)
    }

    fn write_matrix(
        &self,
        writer: &mut dyn Writer,
        name: &str,
        id: MatrixId,
        encoding: Encoding,
    ) -> Result<()> {
        let matrix: &Matrix = &self.parameters().matrices()[id];
        if encoding == Encoding::Nvfp4 {
            let Some((codes, scales)) = matrix.delivered(self.device())? else {
                bail!(
                    Unsupported,
                    "{name} is trained in {:?} and cannot be written as NVFP4; export to a directory and convert that",
                    matrix.forms().weight
                );
            };
            writer.begin(name, matrix.global())?;
            return writer.nvfp4(&codes, &scales);
        }
        writer.begin(name, 1.0)?;
        self.delivered_rows(matrix, &mut |_, values| writer.values(values))
    }

    /// Writes a matrix as NVFP4 without a global scale.
    fn write_single_level(&self, writer: &mut dyn Writer, name: &str, id: MatrixId) -> Result<()> {
        let matrix: &Matrix = &self.parameters().matrices()[id];
        let cols = matrix.shape().1;
        let options = QuantizeOptions {
            levels: Levels::Single,
            recipe: Recipe::Sweep,
            ..QuantizeOptions::default()
        };
        writer.begin(name, 1.0)?;
        self.delivered_rows(matrix, &mut |first, values| {
            let mut codes = vec![0; values.len() / 2];
            let mut scales = vec![0; values.len() / BLOCK];
            quantize_rows(values, cols, first, 1.0, &options, &mut codes, &mut scales)?;
            writer.nvfp4(&codes, &scales)
        })
    }

    /// The values of a matrix as they are delivered, some rows at a time, each time with the first one's number.
    fn delivered_rows(
        &self,
        matrix: &Matrix,
        take: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let (rows, cols) = matrix.shape();
        let mut values = vec![0.0; ROWS.min(rows) * cols];
        for first in (0..rows).step_by(ROWS) {
            let last = rows.min(first + ROWS);
            let values = &mut values[..(last - first) * cols];
            matrix.decode(self.device(), first..last, false, SliceMut::Host(values))?;
            take(first, values)?;
        }
        Ok(())
    }

    /// A norm or bias as files hold it.
    fn vector(&self, source: &Source, id: VectorId) -> Result<Vec<f32>> {
        let mut values = vec![0.0; source.layout().vectors[id].len];
        self.parameters().vectors()[id].values().read(&mut values)?;
        if source.adds_one(id) {
            values.iter_mut().for_each(|v| *v -= 1.0);
        }
        Ok(values)
    }
}
