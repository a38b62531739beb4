//! Writes TorchSharp's `.dat`: dense entries with their own elemType, NVFP4 as `.qdata` (0) and `.scale` (101) with row-major scales. The
//! format has no global scale, so only single-level NVFP4 fits.

use std::path::Path;

use super::{
    Planned, Progress, Slot, Temporary, Writer, check_names, copy_entry, copy_part, sizes,
};
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::checkpoint::{Checkpoint, Encoding, Entry, dat};
use crate::format::nvfp4::BLOCK;

/// Writes a `.dat` file; see [`Writer`].
pub struct DatWriter {
    progress: Progress,
    /// Per planned tensor: whether its scales are stored in a type that cannot hold e4m3 bytes.
    foreign_scales: Vec<bool>,
}

/// One entry of the file: its header fields, and the planned tensor whose values or scales it holds.
struct Record {
    key: String,
    elem_type: u32,
    shape: Vec<usize>,
    bytes: u64,
    tensor: usize,
    is_scale: bool,
}

impl DatWriter {
    /// Starts a file that will replace `path`.
    pub fn create(path: &Path, plan: &[Planned]) -> Result<Self> {
        check_names(plan)?;
        let mut records = Vec::with_capacity(plan.len() * 2);
        for (tensor, planned) in plan.iter().enumerate() {
            let (bytes, scale_bytes) = sizes(planned)?;
            let record = |key, elem_type, shape, bytes, is_scale| Record {
                key,
                elem_type,
                shape,
                bytes,
                tensor,
                is_scale,
            };
            let name = &planned.name;
            if let Some(elem_type) = dat::elem_type(planned.encoding) {
                let shape = planned.shape.clone();
                records.push(record(name.clone(), elem_type, shape, bytes, false));
                continue;
            }
            if planned.encoding != Encoding::Nvfp4 {
                bail!(
                    Unsupported,
                    "'{name}': .dat holds no {}; NVFP4 and the dense encodings can be written to it",
                    planned.encoding
                );
            }
            let with_last = |last: usize| {
                let mut shape = planned.shape.clone();
                if let Some(dim) = shape.last_mut() {
                    *dim = last;
                }
                shape
            };
            let cols = planned.shape.last().copied().unwrap_or(1);
            let codes = with_last(cols / 2);
            let scales = with_last(cols / BLOCK);
            records.push(record(
                format!("{name}.qdata"),
                dat::PACKED,
                codes,
                bytes,
                false,
            ));
            records.push(record(
                format!("{name}.scale"),
                dat::E4M3,
                scales,
                scale_bytes,
                true,
            ));
        }
        Self::start(path, plan, records)
    }

    /// Starts a file that will replace `path` with the same entries as the `.dat` file `source`: same keys, elemTypes and shapes in the
    /// same order, so that a host can read either.
    pub fn create_like(path: &Path, source: &dyn Checkpoint) -> Result<Self> {
        if source.format() != "dat" {
            bail!(
                InvalidArgument,
                "only a .dat file gives the layout of another, not {}",
                source.format()
            );
        }
        let plan: Vec<Planned> = source.entries().iter().map(Planned::from).collect();
        let mut records = Vec::with_capacity(plan.len() * 2);
        for (tensor, entry) in source.entries().iter().enumerate() {
            let parts = source.parts(entry)?;
            let most = if entry.encoding == Encoding::Nvfp4 {
                2
            } else {
                1
            };
            if parts.len() > most {
                bail!(
                    Unsupported,
                    "'{}': {} in .dat files is read, not written",
                    entry.name,
                    entry.encoding
                );
            }
            for (i, part) in parts.into_iter().enumerate() {
                let record = Record {
                    key: part.key.to_owned(),
                    elem_type: part.type_code,
                    shape: part.shape.to_vec(),
                    bytes: part.bytes as u64,
                    tensor,
                    is_scale: i == 1,
                };
                records.push((part.offset, record));
            }
        }
        records.sort_by_key(|(offset, _)| *offset);
        let records = records.into_iter().map(|(_, r)| r).collect();
        Self::start(path, &plan, records)
    }

    fn start(path: &Path, plan: &[Planned], records: Vec<Record>) -> Result<Self> {
        let mut slots: Vec<Slot> = plan.iter().map(Slot::new).collect();
        let mut foreign_scales = vec![false; plan.len()];
        let mut headers = Vec::with_capacity(records.len() + 1);
        let mut header = Vec::new();
        leb128(&mut header, records.len() as u64);
        let mut position = 0u64;
        for record in records {
            leb128(&mut header, record.key.len() as u64);
            header.extend(record.key.as_bytes());
            leb128(&mut header, u64::from(record.elem_type));
            leb128(&mut header, record.shape.len() as u64);
            for &dim in &record.shape {
                leb128(&mut header, dim as u64);
            }
            let start = position + header.len() as u64;
            headers.push((position, std::mem::take(&mut header)));
            position = start
                .checked_add(record.bytes)
                .ok_or_else(|| err!(InvalidArgument, "the plan takes more than 2^64 bytes"))?;
            let slot = &mut slots[record.tensor];
            if record.is_scale {
                (slot.scales_at, slot.scale_bytes) = (start, record.bytes);
                let e4m3 = !matches!(record.elem_type, 5 | 6);
                foreign_scales[record.tensor] = !e4m3;
            } else {
                (slot.at, slot.bytes) = (start, record.bytes);
            }
        }
        let file = Temporary::create(path, position)?;
        for (at, header) in headers {
            file.write_at(&header, at)?;
        }
        Ok(DatWriter {
            progress: Progress::new(file, slots),
            foreign_scales,
        })
    }

    fn has_foreign_scales(&self) -> bool {
        self.progress.begun > 0 && self.foreign_scales[self.progress.begun - 1]
    }
}

fn leb128(out: &mut Vec<u8>, mut value: u64) {
    loop {
        let low = (value & 0x7f) as u8;
        value >>= 7;
        if value == 0 {
            out.push(low);
            return;
        }
        out.push(low | 0x80);
    }
}

impl Writer for DatWriter {
    fn begin(&mut self, name: &str, global: f32) -> Result<()> {
        self.progress.begin(name, global)
    }

    fn values(&mut self, values: &[f32]) -> Result<()> {
        self.progress.values(values)
    }

    fn raw(&mut self, bytes: &[u8]) -> Result<()> {
        self.progress.raw(bytes)
    }

    fn nvfp4(&mut self, codes: &[u8], scales: &[u8]) -> Result<()> {
        if self.has_foreign_scales() {
            bail!(
                Unsupported,
                "'{}': its scales are stored as floats, which cannot take e4m3 bytes; write the file anew instead",
                self.progress.slots[self.progress.begun - 1].name
            );
        }
        self.progress.nvfp4(codes, scales)
    }

    fn int8(&mut self, codes: &[u8], scales: &[f32]) -> Result<()> {
        self.progress.int8(codes, scales)
    }

    fn copy(&mut self, source: &dyn Checkpoint, entry: &Entry) -> Result<()> {
        let next = self.progress.begun;
        if self.foreign_scales.get(next) == Some(&true)
            && let [codes, scales] = &source.parts(entry)?[..]
        {
            // Scales are copied as floats, after the reader has checked that they are block scales.
            let mut row_codes = vec![0; entry.cols() / 2];
            let mut row_scales = vec![0; entry.cols() / BLOCK];
            for row in 0..entry.rows() {
                source.rows_nvfp4(entry, row..row + 1, &mut row_codes, &mut row_scales)?;
            }
            self.progress.begin(&entry.name, 1.0)?;
            copy_part(source, codes, |bytes| self.progress.append(bytes, &[]))?;
            return copy_part(source, scales, |bytes| self.progress.append(&[], bytes));
        }
        let planned = self.progress.next_encoding(&entry.name)?;
        copy_entry(self, planned, source, entry)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.progress.check_complete()?;
        self.progress.file.commit()
    }
}
