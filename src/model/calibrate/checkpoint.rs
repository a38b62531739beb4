//! A checkpoint that replaces some matrices of another with calibrated NVFP4 matrices.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::base::Result;
use crate::base::error::bail;
use crate::checkpoint::{Checkpoint, Encoding, Entry, Metadata, Part, Unreadable};
use crate::format::nvfp4::{BLOCK, Nvfp4, dequantize};
use crate::model::training::{MatrixId, Source};

/// A checkpoint with some of its entries in NVFP4. Copies share the matrices.
#[derive(Clone)]
pub struct Calibrated {
    source: Arc<dyn Checkpoint>,
    entries: Vec<Entry>,
    by_name: HashMap<String, usize>,
    matrices: HashMap<String, Arc<Joined>>,
}

/// The matrices of an entry, one below the other.
struct Joined {
    cols: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
    /// One global scale, or one for each index of the entry's first dimension, which is then an expert.
    globals: Vec<f32>,
}

impl Joined {
    /// Joins parts in ascending order, each with its first row in the entry. The entry consists of `slabs` matrices of equal height, each
    /// with one global scale.
    fn new(name: &str, rows: usize, slabs: usize, parts: Vec<(usize, Nvfp4)>) -> Result<Joined> {
        let mut whole = Joined {
            cols: parts.first().map_or(0, |(_, part)| part.cols),
            codes: Vec::new(),
            scales: Vec::new(),
            globals: Vec::new(),
        };
        for (first, part) in parts {
            let slab = first / (rows / slabs);
            if slab == whole.globals.len() {
                whole.globals.push(part.global);
            }
            if whole.globals.get(slab) != Some(&part.global) {
                bail!(Internal, "parts of '{name}' differ in scale");
            }
            whole.codes.extend(part.codes);
            whole.scales.extend(part.scales);
        }
        Ok(whole)
    }

    /// Rows for each global scale.
    fn slab(&self) -> usize {
        self.codes.len() * 2 / self.cols / self.globals.len()
    }
}

impl Calibrated {
    /// The checkpoint of `source` with these matrices replaced.
    pub(super) fn new(source: &Source, mut quantized: HashMap<MatrixId, Nvfp4>) -> Result<Self> {
        let checkpoint = source.checkpoint().clone();
        let (mut entries, mut matrices) = (Vec::new(), HashMap::new());
        for entry in checkpoint.entries() {
            let mut entry = entry.clone();
            let parts = source.parameters_of(&entry.name).matrices;
            let is_whole = parts.iter().all(|(id, _)| quantized.contains_key(id));
            if !parts.is_empty() && is_whole {
                let mut own = Vec::new();
                for (id, within) in parts {
                    let Some(part) = quantized.remove(&id) else {
                        bail!(Internal, "a part of '{}' was used twice", entry.name);
                    };
                    own.push((within.start, part));
                }
                let slabs = match entry.shape[..] {
                    [slabs, _, _] => slabs,
                    _ => 1,
                };
                let whole = Joined::new(&entry.name, entry.rows(), slabs, own)?;
                entry.encoding = Encoding::Nvfp4;
                let (rows, cols) = (entry.rows() as u64, entry.cols() as u64);
                entry.bytes = entry.encoding.matrix_bytes(rows, cols).unwrap_or(0);
                matrices.insert(entry.name.clone(), Arc::new(whole));
            }
            entries.push(entry);
        }
        let names = entries.iter().enumerate();
        Ok(Calibrated {
            by_name: names.map(|(i, e)| (e.name.clone(), i)).collect(),
            source: checkpoint,
            entries,
            matrices,
        })
    }

    /// Restores these entries to their values in the original checkpoint.
    pub fn leave_out(&mut self, names: &HashSet<String>) {
        self.matrices.retain(|name, _| !names.contains(name));
        for entry in self.entries.iter_mut().filter(|e| names.contains(&e.name)) {
            if let Some(original) = self.source.find(&entry.name) {
                *entry = original.clone();
            }
        }
    }

    /// Number of quantized entries.
    pub fn quantized(&self) -> usize {
        self.matrices.len()
    }

    fn own(&self, entry: &Entry) -> Option<&Joined> {
        self.matrices.get(&entry.name).map(|matrix| &**matrix)
    }
}

impl Checkpoint for Calibrated {
    fn format(&self) -> &'static str {
        self.source.format()
    }

    fn files(&self) -> Vec<&Path> {
        self.source.files()
    }

    fn entries(&self) -> &[Entry] {
        &self.entries
    }

    fn find(&self, name: &str) -> Option<&Entry> {
        self.by_name.get(name).map(|&i| &self.entries[i])
    }

    fn unreadable(&self) -> &[Unreadable] {
        self.source.unreadable()
    }

    fn rows_f32(&self, entry: &Entry, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let Some(own) = self.own(entry) else {
            return self.source.rows_f32(entry, rows, out);
        };
        let (cols, slab) = (own.cols, own.slab());
        let mut first = rows.start;
        while first < rows.end {
            // Rows with a common global scale.
            let last = ((first / slab + 1) * slab).min(rows.end);
            let codes = &own.codes[first * cols / 2..last * cols / 2];
            let scales = &own.scales[first * cols / BLOCK..last * cols / BLOCK];
            let to = &mut out[(first - rows.start) * cols..(last - rows.start) * cols];
            dequantize(codes, scales, own.globals[first / slab], to)?;
            first = last;
        }
        Ok(())
    }

    fn rows_nvfp4(
        &self,
        entry: &Entry,
        rows: Range<usize>,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<()> {
        let Some(own) = self.own(entry) else {
            return self.source.rows_nvfp4(entry, rows, codes, scales);
        };
        codes.copy_from_slice(&own.codes[rows.start * own.cols / 2..][..codes.len()]);
        scales.copy_from_slice(&own.scales[rows.start * own.cols / BLOCK..][..scales.len()]);
        Ok(())
    }

    fn rows_int8(
        &self,
        entry: &Entry,
        rows: Range<usize>,
        codes: &mut [u8],
        scales: &mut [f32],
    ) -> Result<()> {
        self.source.rows_int8(entry, rows, codes, scales)
    }

    fn global_scales(&self, entry: &Entry) -> Result<&[f32]> {
        match self.own(entry) {
            Some(own) => Ok(&own.globals),
            None => self.source.global_scales(entry),
        }
    }

    fn plain(&self, entry: &Entry) -> Option<Part<'_>> {
        match self.own(entry) {
            Some(_) => None,
            None => self.source.plain(entry),
        }
    }

    fn parts(&self, entry: &Entry) -> Result<Vec<Part<'_>>> {
        match self.own(entry) {
            Some(_) => Ok(Vec::new()),
            None => self.source.parts(entry),
        }
    }

    fn read_part(&self, part: &Part<'_>, at: usize, out: &mut [u8]) -> Result<()> {
        self.source.read_part(part, at, out)
    }

    fn metadata(&self) -> &Metadata {
        self.source.metadata()
    }
}
