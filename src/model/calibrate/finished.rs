//! Finished blocks of a calibration, stored as files in a folder, so that an interrupted calibration can resume.

use std::ffi::OsString;
use std::hash::Hasher;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::options::{CalibrateOptions, CalibratedMatrix, CalibrationText, Done};
use crate::base::error::err;
use crate::base::{Error, Result, file};
use crate::format::nvfp4::{BLOCK, Levels, Nvfp4};
use crate::model::training::{Layout, Source};

/// Changes with every change that affects the codes found by a calibration.
const VERSION: u64 = 2;
/// Bytes of the header's length and of the checksum that follows it.
const PREFIX: usize = 16;

/// The folder for the finished blocks of a calibration that writes to `destination`: its path with `.calibration` appended.
pub fn folder_of(destination: &Path) -> PathBuf {
    let mut name = OsString::from(destination.components().as_path());
    name.push(".calibration");
    name.into()
}

/// XXH3 of all inputs of a calibration: the model's shape and files, with their lengths and times, the texts, and options.
pub(super) fn identity(
    source: &Source,
    texts: &[CalibrationText],
    options: &CalibrateOptions,
) -> Result<u64> {
    let mut sum = XxHash3_64::new();
    sum.write_u64(VERSION);
    sum.write_u8(u8::from(options.levels == Levels::Two));
    for entry in source.checkpoint().entries() {
        sum.write(format!("{} {:?} {}\n", entry.name, entry.shape, entry.encoding).as_bytes());
    }
    for path in source.checkpoint().files() {
        let reading = |e| Error::io(format_args!("reading {}", path.display()), e);
        let metadata = path.metadata().map_err(reading)?;
        sum.write_u64(metadata.len());
        let time = metadata.modified().ok();
        let age = time.and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok());
        sum.write_u128(age.unwrap_or_default().as_nanos());
    }
    for text in texts {
        text.tokens.iter().for_each(|t| sum.write_u32(*t));
        text.documents.iter().for_each(|n| sum.write_usize(*n));
    }
    Ok(sum.finish())
}

/// A folder of finished blocks.
pub(super) struct Finished {
    folder: PathBuf,
    identity: u64,
}

/// The first part of a block's file; codes and scales of each matrix follow.
#[derive(Serialize, Deserialize)]
struct Header {
    identity: u64,
    matrices: Vec<Held>,
}

#[derive(Serialize, Deserialize)]
struct Held {
    #[serde(flatten)]
    report: CalibratedMatrix,
    /// The bits of the global scale.
    global: u32,
}

impl Finished {
    pub(super) fn new(folder: &Path, identity: u64) -> Finished {
        Finished {
            folder: folder.to_owned(),
            identity,
        }
    }

    fn path(&self, block: usize) -> PathBuf {
        self.folder.join(format!("block-{block:05}"))
    }

    /// The matrices of a block; `None` if the block is not finished, belongs to another calibration, or is damaged.
    pub(super) fn load(&self, block: usize, layout: &Layout) -> Option<Vec<Done>> {
        let bytes = file::read(&self.path(block)).ok()?;
        let (prefix, rest) = bytes.split_at_checked(PREFIX)?;
        let (length, checksum) = prefix.split_at(PREFIX / 2);
        let number = |bytes: &[u8]| bytes.try_into().ok().map(u64::from_le_bytes);
        if XxHash3_64::oneshot(rest) != number(checksum)? {
            return None;
        }
        let (header, mut data) = rest.split_at_checked(number(length)?.try_into().ok()?)?;
        let header: Header = serde_json::from_slice(header).ok()?;
        if header.identity != self.identity {
            return None;
        }
        let mut done = Vec::new();
        for held in header.matrices {
            let found = layout
                .matrices
                .iter()
                .position(|m| m.name == held.report.name);
            let id = found?;
            let (rows, cols) = (layout.matrices[id].rows, layout.matrices[id].cols);
            let (codes, rest) = data.split_at_checked(rows * cols / 2)?;
            let (scales, rest) = rest.split_at_checked(rows * cols / BLOCK)?;
            data = rest;
            let matrix = Nvfp4 {
                rows,
                cols,
                codes: codes.to_vec(),
                scales: scales.to_vec(),
                global: f32::from_bits(held.global),
            };
            done.push(Done {
                id,
                matrix,
                report: held.report,
            });
        }
        Some(done)
    }

    /// Writes the matrices of a block atomically.
    pub(super) fn save(&self, block: usize, done: &[Done]) -> Result<()> {
        let held = |done: &Done| Held {
            report: done.report.clone(),
            global: done.matrix.global.to_bits(),
        };
        let header = Header {
            identity: self.identity,
            matrices: done.iter().map(held).collect(),
        };
        let mut rest = serde_json::to_vec(&header)
            .map_err(|e| err!(Internal, "writing the header of a block: {e}"))?;
        let length = rest.len() as u64;
        for done in done {
            rest.extend_from_slice(&done.matrix.codes);
            rest.extend_from_slice(&done.matrix.scales);
        }
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend_from_slice(&XxHash3_64::oneshot(&rest).to_le_bytes());
        bytes.extend_from_slice(&rest);
        let writing = |e| Error::io(format_args!("writing {}", self.folder.display()), e);
        std::fs::create_dir_all(&self.folder).map_err(writing)?;
        file::stage(&self.path(block), &bytes)?.commit()
    }

    /// Removes the files of blocks, and the folder if it is then empty.
    pub(super) fn remove(folder: &Path, blocks: usize) {
        let finished = Finished::new(folder, 0);
        for block in 0..blocks {
            // A file that cannot be removed is harmless: other calibrations ignore it by its identity.
            let _ = std::fs::remove_file(finished.path(block));
        }
        let _ = std::fs::remove_dir(folder);
    }
}

/// Removes the finished blocks of a calibration, once its result is written.
pub fn forget(folder: &Path, source: &Source) {
    Finished::remove(folder, source.layout().blocks.len());
}
