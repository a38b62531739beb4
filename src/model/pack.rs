//! Writes the file of packed weights beside a model: see [`checkpoint::PackedFile`](crate::checkpoint::PackedFile). Packs as loading does, a
//! few matrices at a time.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::load::PackPlan;
use super::{Device, check_loadable, open, open_given, spec_with_frequencies};
use crate::base::Result;
use crate::base::call::{self, Progress};
use crate::base::error::bail;
use crate::base::file::Temporary;
use crate::checkpoint::{
    Checkpoint, NewModel, PACKED_FILE, PackedWriter, SourceFile, packed_place,
};
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
/// of matrices to the thread's [`call`], and is cancelled with it, which leaves nothing behind.
pub fn pack(path: &Path, device: &Device) -> Result<PackReport> {
    let checkpoint = open(path)?;
    let Some(file) = packed_place(&*checkpoint) else {
        bail!(Internal, "a model on disk without files");
    };
    let source = (&*checkpoint, SourceFile::all(&*checkpoint)?);
    let create = |len| Temporary::create(&file, len);
    let (new, report) = packed(source, &file, device, create, &mut |done, total| {
        call::tell(Progress { done, total });
        call::check()
    })?;
    new.commit()?;
    Ok(report)
}

/// Packs the weights of a model that will be the directory `place`, as [`pack`] does once it is there. Returns the file, which is to be moved
/// into place with the model.
pub(crate) fn pack_new(
    model: &NewModel,
    place: &Path,
    device: &Device,
    progress: &mut dyn FnMut(u64, u64) -> Result<()>,
) -> Result<(Temporary, PackReport)> {
    let checkpoint = open_given(&model.contents()?)?;
    let source = (&*checkpoint, model.weights()?);
    let create = |len| model.file(PACKED_FILE, len);
    packed(source, &place.join(PACKED_FILE), device, create, progress)
}

/// Packs the weights of a checkpoint into the file that `create` creates and that will be `place`. `progress` is told bytes of matrices, and
/// may stop it.
fn packed(
    (checkpoint, sources): (&dyn Checkpoint, Vec<SourceFile>),
    place: &Path,
    device: &Device,
    create: impl FnOnce(u64) -> Result<Temporary>,
    progress: &mut dyn FnMut(u64, u64) -> Result<()>,
) -> Result<(Temporary, PackReport)> {
    if device.is_cuda() {
        bail!(
            InvalidArgument,
            "weights are packed for the CPU, not for {}",
            device.name()
        );
    }
    check_loadable(checkpoint)?;
    let spec = spec_with_frequencies(checkpoint)?;
    let plan = PackPlan::of(checkpoint, &spec)?;
    let shapes = plan.shapes()?;
    let (mut first, mut done, matrices) = (0, 0, shapes.len());
    let sizes: Vec<u64> = shapes.iter().map(|shape| shape.bytes).collect();
    let total = sizes.iter().sum();
    let mut writer = PackedWriter::create(create, Packed::LAYOUT, sources, shapes, plan.tables())?;
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
            progress(done, total)?;
            let bytes = linear.host_bytes();
            call::in_silence(|| writer.matrix(bytes, sum))?;
            done += bytes.len() as u64;
        }
        first += count;
    }
    let sums = call::in_silence(|| plan.sum_tables(device))?;
    let (new, bytes) = call::in_silence(|| writer.complete(&sums))?;
    progress(total, total)?;
    let report = PackReport {
        file: place.to_owned(),
        matrices,
        bytes,
    };
    Ok((new, report))
}
