//! Matrices of a model on the CPU that come from the file of packed weights beside its own, mapped and shared with other processes, in place of
//! packing them into memory. Decides whether that file is used, and whether what it says of the weights can be taken without reading them.

use std::path::Path;

use super::options::PackedUse;
use super::{Device, LoadOptions};
use crate::base::Result;
use crate::base::error::{Error, bail, err};
use crate::checkpoint::{Checkpoint, PackedFile, SourceFile, packed_place};
use crate::ops::linear::{Linear, Packed};
use crate::tensor::WeightType;

/// The packed weights of a checkpoint.
pub(super) struct MappedWeights {
    file: PackedFile,
    /// Whether the checkpoint's files have the sizes and the times of their last writes that they had when they were packed. Then the file's
    /// checksums stand for the weights; else each matrix is packed again, a few rows at a time, and compared.
    is_current: bool,
}

impl MappedWeights {
    /// The packed weights that loading with these options uses. `None` without any: on a GPU, if the options say so, if the model is given in
    /// memory, if no such file is there, and, with a warning, if it was packed from files of other names.
    pub(super) fn of(
        checkpoint: &dyn Checkpoint,
        options: &LoadOptions,
    ) -> Result<Option<MappedWeights>> {
        let is_required = options.packed == PackedUse::Required;
        if is_required && let Device::Cuda(_) = options.device {
            bail!(
                Unsupported,
                "packed weights were required, which are for the CPU, and the model is to run on {}; load it on the CPU",
                options.device.name()
            );
        }
        match options.packed == PackedUse::Off || options.device.is_cuda() {
            true => Ok(None),
            false => Self::beside(checkpoint, is_required),
        }
    }

    /// The packed weights that loading on the CPU uses.
    pub(super) fn beside(
        checkpoint: &dyn Checkpoint,
        is_required: bool,
    ) -> Result<Option<MappedWeights>> {
        let Some(place) = packed_place(checkpoint) else {
            return match is_required {
                true => Err(err!(
                    Unsupported,
                    "packed weights were required, and files that are given in memory are not mapped; load the model from a directory"
                )),
                false => Ok(None),
            };
        };
        let Some(file) = PackedFile::open(&place, Packed::LAYOUT)? else {
            return match is_required {
                true => Err(err!(
                    NotFound,
                    "packed weights were required, and there is no {}; `nvfp4 quantize DIR DIR --packed` writes it",
                    place.display()
                )),
                false => Ok(None),
            };
        };
        let sources = SourceFile::all(checkpoint)?;
        let packed = &file.contents().sources;
        let same_names = sources.len() == packed.len()
            && sources.iter().zip(packed).all(|(a, b)| a.name == b.name);
        if !same_names {
            let names = |files: &[SourceFile]| {
                let names: Vec<&str> = files.iter().map(|file| file.name.as_str()).collect();
                names.join(", ")
            };
            let other = format!(
                "{} has the weights of {}, not of {}",
                place.display(),
                names(packed),
                names(&sources)
            );
            if is_required {
                bail!(NotFound, "packed weights were required, and {other}");
            }
            tracing::warn!("{other}: it is not used, and weights are packed into memory");
            return Ok(None);
        }
        let is_current = sources == *packed;
        if !is_current {
            tracing::info!(
                "the weights were written or copied after {}: they are compared with it",
                place.display()
            );
        }
        Ok(Some(MappedWeights { file, is_current }))
    }

    /// Whether the file's checksums stand for the weights.
    pub(super) fn is_current(&self) -> bool {
        self.is_current
    }

    /// A matrix of the model, and the checksum of its source weights. Fails unless the file has it in this form.
    pub(super) fn matrix(
        &self,
        name: &str,
        kind: WeightType,
        (rows, cols): (usize, usize),
    ) -> Result<(Linear, u64)> {
        let Some(found) = self.file.contents().matrices.get(name) else {
            return Err(self.stale("which it does not have"));
        };
        if (found.kind, found.rows, found.cols) != (kind, rows, cols) {
            return Err(self.stale(format_args!(
                "which it has as {} [{}, {}], where the weights are {} [{rows}, {cols}]",
                found.kind.name(),
                found.rows,
                found.cols,
                kind.name()
            )));
        }
        let mapping = self.file.mapping().clone();
        let range = found.range.clone();
        let linear = Linear::mapped((rows, cols), kind, found.global, mapping, range)
            .map_err(|e| e.within(self.file.path().display()))?;
        Ok((linear, found.sum))
    }

    /// The checksum of a table that stays in its file, if it stands for the table.
    pub(super) fn table(&self, name: &str) -> Option<u64> {
        let sum = self.file.contents().tables.get(name).copied();
        sum.filter(|_| self.is_current)
    }

    /// The error for a matrix whose weights are not those in the file.
    pub(super) fn differs(&self) -> Error {
        self.stale("of which it has other values")
    }

    fn stale(&self, what: impl std::fmt::Display) -> Error {
        let place = self.file.path();
        err!(
            CorruptFile,
            "{} is not of these weights, {what}; write it again with `nvfp4 quantize {} {} --packed`, or remove it",
            place.display(),
            folder(place).display(),
            folder(place).display()
        )
    }
}

/// The folder of a file, for a command line.
fn folder(place: &Path) -> &Path {
    match place.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Reads the file of packed weights beside a checkpoint whole, and compares it with its checksum. Returns its size. Fails if there is none.
pub fn verify_packed(checkpoint: &dyn Checkpoint) -> Result<u64> {
    let file = match packed_place(checkpoint) {
        Some(place) => PackedFile::open(&place, Packed::LAYOUT)?,
        None => None,
    };
    let Some(file) = file else {
        bail!(
            NotFound,
            "there are no packed weights to verify; `nvfp4 quantize DIR DIR --packed` writes them"
        );
    };
    file.verify()?;
    Ok(file.mapping().len() as u64)
}
