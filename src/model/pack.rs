//! Writes the file of packed weights beside a model: see [`checkpoint::PackedFile`](crate::checkpoint::PackedFile). Packs as loading does, a
//! few matrices at a time.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::load::PackPlan;
use super::{Device, check_loadable, open, spec_with_frequencies};
use crate::base::error::bail;
use crate::base::{Result, call};
use crate::checkpoint::{PackedWriter, SourceFile, packed_place};
use crate::ops::linear::Packed;

/// Bytes of packed matrices that are held at a time, unless one alone has more.
const HELD: u64 = 128 << 20;

/// A file of packed weights that was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PackReport {
    /// The file.
    pub file: PathBuf,
    /// Matrices in it.
    pub matrices: usize,
    /// Its bytes.
    pub bytes: u64,
}

/// Whether both paths are the same directory: a conversion to packed weights then packs the model that is there.
pub fn is_same_directory(source: &Path, destination: &Path) -> bool {
    match (source.canonicalize(), destination.canonicalize()) {
        (Ok(source), Ok(destination)) => source == destination && source.is_dir(),
        _ => false,
    }
}

/// Writes the packed weights of the model at `path` beside its files, from which loading on the CPU maps them: matrices as they are stored,
/// not those that loading would quantize. The model is checked as loading checks it. `device` is the CPU that packs. Reports the bytes
/// written to the thread's [`call`], and is cancelled with it, which leaves nothing behind.
pub fn pack(path: &Path, device: &Device) -> Result<PackReport> {
    if device.is_cuda() {
        bail!(
            InvalidArgument,
            "weights are packed for the CPU, not for {}",
            device.name()
        );
    }
    let checkpoint = open(path)?;
    check_loadable(&*checkpoint)?;
    let spec = spec_with_frequencies(&*checkpoint)?;
    let Some(file) = packed_place(&*checkpoint) else {
        bail!(Internal, "a model on disk without files");
    };
    let sources = SourceFile::all(&*checkpoint)?;
    let plan = PackPlan::of(&*checkpoint, &spec)?;
    let shapes = plan.shapes()?;
    let (mut first, matrices) = (0, shapes.len());
    let sizes: Vec<u64> = shapes.iter().map(|shape| shape.bytes).collect();
    let mut writer = PackedWriter::create(&file, Packed::LAYOUT, sources, shapes, plan.tables())?;
    while first < matrices {
        let (mut count, mut held) = (1, sizes[first]);
        while let Some(bytes) = sizes.get(first + count)
            && held + bytes <= HELD
        {
            held += bytes;
            count += 1;
        }
        let packed = call::in_silence(|| plan.pack(device, first..first + count))?;
        for (linear, sum) in packed {
            writer.matrix(linear.host_bytes(), sum)?;
        }
        first += count;
    }
    let sums = call::in_silence(|| plan.sum_tables(device))?;
    let bytes = writer.finish(&sums)?;
    Ok(PackReport {
        file,
        matrices,
        bytes,
    })
}
