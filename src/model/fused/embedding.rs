//! Tables of which a token reads one row, in page-locked host memory of a model on a GPU: the embedding if the head cannot serve as one,
//! and that of per-layer embeddings.

use std::sync::{Arc, Mutex, PoisonError};

use half::{bf16, f16};

use crate::base::Result;
use crate::base::error::bail;
use crate::base::threads::Pool;
use crate::checkpoint::{Checkpoint, Encoding, Entry};
use crate::cuda::{Gpu, HostTable};
use crate::model::weights::{Embedding, FileTable};
use crate::tensor::{DType, WeightType};

/// Rows copied to memory at a time.
const TABLE_ROWS: usize = 1024;

/// The tables of a model on a GPU that are in host memory.
#[derive(Default)]
pub(in crate::model) struct HostTables {
    /// The embedding, unless the head serves as one.
    pub(super) embedding: Option<HostTable>,
    /// The table of per-layer embeddings, if the model has them.
    pub(super) per_layer: Option<HostTable>,
}

impl HostTables {
    /// Bytes of all of them.
    pub(super) fn bytes(&self) -> usize {
        let tables = self.embedding.iter().chain(&self.per_layer);
        tables.map(HostTable::bytes).sum()
    }
}

/// Copies the tables to host memory, in the type of the file if that has 16 or 32 bits or is int8 rows, else as f32.
pub(in crate::model) fn tables(
    gpu: &Arc<Gpu>,
    embedding: &Embedding,
    per_layer: Option<&FileTable>,
) -> Result<HostTables> {
    let of_embedding = match embedding {
        Embedding::File(file) => Some(file),
        Embedding::Head | Embedding::Matrix(_) => None,
    };
    let copied = |file: Option<&FileTable>| file.map(|file| table(gpu, file)).transpose();
    Ok(HostTables {
        embedding: copied(of_embedding)?,
        per_layer: copied(per_layer)?,
    })
}

/// The type in which a table of a file is held, and whether that is the type of the file.
fn held(entry: &Entry) -> (WeightType, bool) {
    match entry.encoding {
        Encoding::Int8 => (WeightType::Int8, true),
        Encoding::Dense(DType::BF16) => (WeightType::BF16, true),
        Encoding::Dense(DType::F16) => (WeightType::F16, true),
        Encoding::Dense(DType::F32) => (WeightType::F32, true),
        _ => (WeightType::F32, false),
    }
}

/// Bytes of a table of a file in host memory.
pub(in crate::model) fn table_bytes(entry: &Entry) -> Result<usize> {
    HostTable::bytes_of(entry.rows(), entry.cols(), held(entry).0)
}

fn table(gpu: &Arc<Gpu>, file: &FileTable) -> Result<HostTable> {
    let FileTable { checkpoint, entry } = file;
    let (storage, plain) = held(entry);
    if storage == WeightType::Int8 {
        return int8_table(gpu, &**checkpoint, entry);
    }
    let (rows, width) = (entry.rows(), entry.cols());
    let stored = checkpoint.plain(entry).filter(|_| plain);
    // Copies rows from `first` on until `out` is full.
    let bring = |first: usize, out: &mut [u8], row_bytes: usize| {
        if let Some(stored) = &stored {
            return checkpoint.read_part(stored, first * row_bytes, out);
        }
        let some = first..first + out.len() / row_bytes;
        let mut values = vec![0f32; some.len() * width];
        checkpoint.rows_f32(entry, some, &mut values)?;
        match storage {
            WeightType::BF16 => fill(out, &values, |v| bf16::from_f32(v).to_le_bytes()),
            WeightType::F16 => fill(out, &values, |v| f16::from_f32(v).to_le_bytes()),
            WeightType::F32 => fill(out, &values, f32::to_le_bytes),
            WeightType::Nvfp4 | WeightType::Int8 => bail!(Internal, "an embedding is dense"),
        }
        Ok(())
    };
    HostTable::new(gpu, rows, width, storage, |bytes| {
        let row_bytes = bytes.len() / rows;
        let pieces = bytes.chunks_mut(TABLE_ROWS * row_bytes);
        in_pieces(pieces, |i, out| bring(i * TABLE_ROWS, out, row_bytes))
    })
}

/// A table of int8 rows in host memory: the codes, followed by the scales.
fn int8_table(gpu: &Arc<Gpu>, checkpoint: &dyn Checkpoint, entry: &Entry) -> Result<HostTable> {
    let (rows, width) = (entry.rows(), entry.cols());
    HostTable::new(gpu, rows, width, WeightType::Int8, |bytes| {
        let (codes, scales) = bytes.split_at_mut(rows * width);
        let pieces = codes
            .chunks_mut(TABLE_ROWS * width)
            .zip(scales.chunks_mut(TABLE_ROWS * 4));
        in_pieces(pieces, |i, (codes, bytes)| {
            let first = i * TABLE_ROWS;
            let mut scales = vec![0f32; bytes.len() / 4];
            let some = first..first + scales.len();
            checkpoint.rows_int8(entry, some, codes, &mut scales)?;
            fill(bytes, &scales, f32::to_ne_bytes);
            Ok(())
        })
    })
}

/// Calls `bring` with each of `pieces` and its index, on all threads.
fn in_pieces<P: Send>(
    pieces: impl Iterator<Item = P> + Send,
    bring: impl Fn(usize, P) -> Result<()> + Sync,
) -> Result<()> {
    let pool = Pool::new(Pool::default_threads()?)?;
    let pieces = Mutex::new(pieces.enumerate());
    let result = Mutex::new(Ok(()));
    pool.run(pool.threads(), |_| {
        loop {
            let piece = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((i, piece)) = piece else { break };
            if let Err(e) = bring(i, piece) {
                *result.lock().unwrap_or_else(PoisonError::into_inner) = Err(e);
                break;
            }
        }
    });
    result.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn fill<const N: usize>(bytes: &mut [u8], values: &[f32], each: impl Fn(f32) -> [u8; N]) {
    for (out, &value) in bytes.chunks_exact_mut(N).zip(values) {
        out.copy_from_slice(&each(value));
    }
}
