//! The teacher of a distillation: its predictions, by chunks of the vocabulary, from a forward pass over frozen weights. Values are
//! bfloat16, or NVFP4 if the checkpoint stores that.

use std::ops::Range;
use std::sync::Arc;

use super::layout::MatrixLayout;
use super::lesson::{Lesson, Predictions};
use super::memory::PassMemory;
use super::precision::ProductPrecision;
use super::{Batch, MatrixId, Options, Pass, Source, Store, VectorId};
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::{Buffer, Tag};
use crate::checkpoint::Encoding;
use crate::cpu::Cpu;
use crate::format::adamw::{Forms, WeightForm};
use crate::format::nvfp4::BLOCK;
use crate::ops::training::divergence::{Mixture, TeacherLogits};
use crate::ops::training::optimizer::Matrix;
use crate::ops::{Array, Device, Mixed, Slice, SliceMut};

/// Elements read from a checkpoint at a time.
const STAGED: usize = 1 << 22;

/// Location of a teacher's weights. Both give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// All on the device.
    Resident,
    /// In the checkpoint's files: each pass reads each matrix once, when it is needed.
    Streamed,
}

/// A frozen model and its forward pass.
#[derive(Debug)]
pub struct Teacher {
    weights: Weights,
    pass: Pass,
}

/// A teacher with a batch of tokens.
#[derive(Debug)]
struct Taught<'a> {
    teacher: &'a mut Teacher,
    batch: &'a Batch,
}

impl Predictions for Taught<'_> {
    fn begin(&mut self) -> Result<()> {
        let Teacher { weights, pass } = &mut *self.teacher;
        pass.head_inputs(weights, self.batch)
    }

    fn logits(&mut self, tokens: &Range<usize>) -> Result<TeacherLogits<'_>> {
        let Teacher { weights, pass } = &mut *self.teacher;
        pass.head_logits(weights, self.batch, tokens)
    }
}

impl Teacher {
    /// The model of a checkpoint. Its logits are computed in the student's chunks of `head_chunk` tokens.
    pub fn new(
        device: &Device,
        source: Arc<Source>,
        placement: Placement,
        head_chunk: usize,
    ) -> Result<Teacher> {
        let options = Options {
            head_chunk,
            ..Options::default()
        };
        let pass = Pass::new(device, source.spec(), source.layout(), options)?;
        let weights = Weights::new(device, source, placement)?;
        Ok(Teacher { weights, pass })
    }

    /// The model.
    pub fn source(&self) -> &Source {
        &self.weights.source
    }

    /// Location of its weights.
    pub fn placement(&self) -> Placement {
        match self.weights.matrices {
            Some(_) => Placement::Resident,
            None => Placement::Streamed,
        }
    }

    /// Bytes held by its weights.
    pub fn bytes(&self) -> usize {
        let matrices = self.weights.matrices.iter().flatten();
        let vectors = self.weights.vectors.iter();
        matrices.map(Matrix::bytes).sum::<usize>() + vectors.map(Array::bytes).sum::<usize>()
    }

    /// A batch of documents on the teacher's device, with the teacher's RoPE.
    pub fn batch(&self, tokens: &[u32], documents: &[usize]) -> Result<Batch> {
        let spec = self.source().spec();
        if let Some(long) = documents.iter().find(|&&n| n > spec.max_positions) {
            bail!(
                InvalidArgument,
                "a document of {long} tokens, and the teacher's context has {}",
                spec.max_positions
            );
        }
        Batch::unlabelled(&self.weights.device, spec, tokens, documents)
    }

    /// A lesson on a batch from [`Teacher::batch`].
    pub fn lesson<'a>(&'a mut self, batch: &'a Batch, mixture: Mixture) -> Lesson<'a> {
        let taught = Taught {
            teacher: self,
            batch,
        };
        Lesson {
            predictions: Box::new(taught),
            mixture,
        }
    }
}

/// Memory requirements of a teacher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TeacherMemory {
    /// Bytes of its weights, which stay between passes.
    pub weights: usize,
    /// Bytes of its own pass through the blocks.
    pub blocks: usize,
    /// Bytes that it holds while the student's loss is computed.
    pub head: usize,
}

impl TeacherMemory {
    /// Memory for a batch of `rows` tokens, with logits in chunks of `head_chunk` tokens.
    pub fn new(
        device: &Device,
        source: &Source,
        placement: Placement,
        (rows, head_chunk): (usize, usize),
    ) -> TeacherMemory {
        let (spec, layout) = (source.spec(), source.layout());
        let pass = PassMemory {
            device,
            spec,
            layout,
            options: Options {
                head_chunk,
                ..Options::default()
            },
            precision: &ProductPrecision::default(),
            trains: &|_| false,
            first_block: spec.blocks.len(),
        };
        let matrices = layout.matrices.iter().enumerate().map(|(id, m)| {
            let form = form(source, id).unwrap_or(WeightForm::Bf16);
            let forms = Forms {
                weight: form,
                ..Forms::default()
            };
            Matrix::bytes_of(device, forms, true, m.rows, m.cols).unwrap_or_default()
        });
        let staged = match placement {
            Placement::Streamed if device.is_cuda() => size_of::<f32>() * STAGED,
            _ => 0,
        };
        let vectors: usize = layout.vectors.iter().map(|v| v.len).sum();
        TeacherMemory {
            weights: size_of::<f32>() * vectors
                + match placement {
                    Placement::Resident => matrices.sum(),
                    Placement::Streamed => 0,
                },
            blocks: pass.inputs_bytes(rows) + staged,
            head: pass.logits_bytes(rows) + staged,
        }
    }
}

/// The weight format of a teacher's matrix.
fn form(source: &Source, id: MatrixId) -> Result<WeightForm> {
    Ok(match source.encoding(id)? {
        Encoding::Nvfp4 => WeightForm::OneTerm,
        _ => WeightForm::Bf16,
    })
}

/// A teacher's parameters.
pub(super) struct Weights {
    device: Device,
    source: Arc<Source>,
    /// The matrices, if they are resident.
    matrices: Option<Vec<Matrix>>,
    vectors: Vec<Array>,
    /// Reads the checkpoint.
    host: Arc<Cpu>,
    /// Whether values read from the checkpoint are rounded to bfloat16.
    rounds: bool,
}

impl std::fmt::Debug for Weights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Weights")
            .field("matrices", &self.matrices.as_ref().map(Vec::len))
            .finish_non_exhaustive()
    }
}

impl Weights {
    pub(super) fn new(
        device: &Device,
        source: Arc<Source>,
        placement: Placement,
    ) -> Result<Weights> {
        let vectors = (0..source.layout().vectors.len()).map(|id| {
            let values = source.vector(id)?;
            let mut array = Array::zeroed(device, values.len())?;
            array.all_mut().copy_from(Slice::Host(&values))?;
            Ok(array)
        });
        let vectors = vectors.collect::<Result<_>>()?;
        let host = device.host_cpu()?;
        let matrices = match placement {
            Placement::Streamed => None,
            Placement::Resident => {
                let all = source.layout().matrices.iter().enumerate();
                let read = |(id, m)| resident(device, &host, &source, id, m);
                Some(all.map(read).collect::<Result<_>>()?)
            }
        };
        Ok(Weights {
            device: device.clone(),
            source,
            matrices,
            vectors,
            host,
            rounds: true,
        })
    }

    /// Streamed weights with the values of the checkpoint, rounded only by the device's own precision.
    pub(super) fn exact(device: &Device, source: Arc<Source>) -> Result<Weights> {
        Ok(Weights {
            rounds: false,
            ..Self::new(device, source, Placement::Streamed)?
        })
    }

    /// Whether values of a matrix read from the checkpoint are rounded to bfloat16.
    fn rounds(&self, id: MatrixId) -> Result<bool> {
        Ok(self.rounds && form(&self.source, id)? == WeightForm::Bf16)
    }

    /// Reads rows of a matrix from the checkpoint.
    fn stream(&self, id: MatrixId, rows: Range<usize>, mut out: SliceMut<'_, Mixed>) -> Result<()> {
        let cols = self.source.layout().matrices[id].cols;
        let rounds = self.rounds(id)?;
        let read = |rows: Range<usize>, out: &mut [f32]| -> Result<()> {
            self.source.matrix(id, rows, out)?;
            if rounds {
                round_to_bf16(out);
            }
            Ok(())
        };
        if !self.device.is_cuda() {
            return self.host.read_rows(rows, cols, &read, out.host()?);
        }
        let run = (STAGED / cols).max(1);
        let staged = run.min(rows.len()) * cols;
        let mut staged = Buffer::<f32>::zeroed(Tag::Scratch, staged)?;
        for first in rows.clone().step_by(run) {
            let some = first..rows.end.min(first + run);
            let at = (first - rows.start) * cols..(some.end - rows.start) * cols;
            let values = &mut staged[..some.len() * cols];
            self.host.read_rows(some, cols, &read, values)?;
            out.reborrow().part(at)?.copy_from(Slice::Host(values))?;
        }
        Ok(())
    }
}

/// Rounds values to nearest in bfloat16.
fn round_to_bf16(values: &mut [f32]) {
    values
        .iter_mut()
        .for_each(|v| *v = half::bf16::from_f32(*v).to_f32());
}

/// Places a matrix on the device.
fn resident(
    device: &Device,
    host: &Cpu,
    source: &Source,
    id: MatrixId,
    m: &MatrixLayout,
) -> Result<Matrix> {
    let (rows, cols) = (m.rows, m.cols);
    let matrix = || match form(source, id)? {
        WeightForm::OneTerm => {
            let mut codes = vec![0; rows * cols / 2];
            let mut scales = vec![0; rows * cols / BLOCK];
            let global = source.nvfp4(id, &mut codes, &mut scales)?;
            Matrix::frozen_nvfp4(device, (rows, cols), (&codes, &scales, global))
        }
        form => {
            let read = |rows: Range<usize>, out: &mut [f32]| source.matrix(id, rows, out);
            Matrix::frozen(device, host, form, rows, cols, &read)
        }
    };
    matrix().map_err(|e| e.within(&m.name))
}

impl Store for Weights {
    fn shape(&self, matrix: MatrixId) -> (usize, usize) {
        let m = &self.source.layout().matrices[matrix];
        (m.rows, m.cols)
    }

    fn read(
        &mut self,
        matrix: MatrixId,
        rows: Range<usize>,
        out: SliceMut<'_, Mixed>,
    ) -> Result<()> {
        match &self.matrices {
            Some(matrices) => matrices[matrix].decode(&self.device, rows, true, out),
            None => self.stream(matrix, rows, out),
        }
    }

    fn embed(
        &mut self,
        matrix: MatrixId,
        tokens: &[u32],
        mut out: SliceMut<'_, Mixed>,
    ) -> Result<()> {
        if let Some(matrices) = &self.matrices {
            return matrices[matrix].decode_rows(&self.device, tokens, true, out);
        }
        let cols = self.shape(matrix).1;
        let mut staged = Buffer::<f32>::zeroed(Tag::Scratch, tokens.len() * cols)?;
        for (&token, row) in tokens.iter().zip(staged.chunks_exact_mut(cols)) {
            let token = token as usize;
            self.source.matrix(matrix, token..token + 1, row)?;
        }
        if self.rounds(matrix)? {
            round_to_bf16(&mut staged);
        }
        out.reborrow().copy_from(Slice::Host(&staged))
    }

    fn vector(&self, vector: VectorId) -> Result<Slice<'_>> {
        Ok(self.vectors[vector].all())
    }
}
