//! Checkpoint writers. A plan first fixes every tensor's place; then tensors are written in plan order, a run of rows at a time, to a
//! temporary file that gets its name only when it is complete and synced.

mod dat;
mod modelopt;

use std::path::{Path, PathBuf};

use half::{bf16, f16};

use super::companion::{
    EMBEDDING_FILES, TOKENIZER_FILES, TOOL_TEMPLATE, read_present, with_tagged_floats,
};
use super::{Checkpoint, Encoding, Entry, Metadata, Part};
use crate::base::error::{Error, bail, err};
use crate::base::file::{self, Temporary};
use crate::base::files::Files;
use crate::base::{Result, size};
use crate::format::int8;
use crate::format::nvfp4::{self, BLOCK};
use crate::tensor::DType;

pub use dat::DatWriter;
pub use modelopt::{ModelOptWriter, NewModel};

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// Its Hugging Face name.
    pub name: String,
    /// Its logical shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// [`Encoding::Nvfp4`], [`Encoding::Int8`] or a dense encoding.
    pub encoding: Encoding,
}

impl From<&Entry> for Planned {
    fn from(entry: &Entry) -> Self {
        Planned {
            name: entry.name.clone(),
            shape: entry.shape.clone(),
            encoding: entry.encoding,
        }
    }
}

/// Writes the tensors of a plan in order. Dropping an unfinished writer removes everything it wrote, and leaves the previous content
/// unchanged.
pub trait Writer: Send {
    /// Starts the next planned tensor, which must be `name`. `global` is the global scale of an NVFP4 tensor, 1.0 for others.
    fn begin(&mut self, name: &str, global: f32) -> Result<()>;

    /// Appends values to a dense tensor, converting them to the planned float encoding.
    fn values(&mut self, values: &[f32]) -> Result<()>;

    /// Appends stored bytes to a dense tensor.
    fn raw(&mut self, bytes: &[u8]) -> Result<()>;

    /// Appends whole rows to an NVFP4 tensor: codes with the even column in the low nibble, and linear e4m3 scales.
    fn nvfp4(&mut self, codes: &[u8], scales: &[u8]) -> Result<()>;

    /// Appends whole rows to an int8 tensor: codes in two's complement, and the scale of each row.
    fn int8(&mut self, codes: &[u8], scales: &[f32]) -> Result<()>;

    /// Writes the next planned tensor from `entry` of `source`, a run of rows at a time. Codes and their scales are copied; other values
    /// keep their bytes if the plan has their encoding, and are otherwise converted to F32, F16 or BF16.
    fn copy(&mut self, source: &dyn Checkpoint, entry: &Entry) -> Result<()>;

    /// Completes the file: checks that every planned tensor is complete, syncs, and moves it into place.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// Place of a planned tensor in the file: `at` of its values or codes, `scales_at` of the scales of its blocks or rows.
struct Slot {
    name: String,
    encoding: Encoding,
    at: u64,
    bytes: u64,
    scales_at: u64,
    scale_bytes: u64,
    cols: usize,
    /// Place of an NVFP4 tensor's global scale, if the format has one.
    global_at: Option<u64>,
}

impl Slot {
    /// A slot for a planned tensor with unassigned places.
    fn new(planned: &Planned) -> Self {
        Slot {
            name: planned.name.clone(),
            encoding: planned.encoding,
            at: 0,
            bytes: 0,
            scales_at: 0,
            scale_bytes: 0,
            cols: planned.shape.last().copied().unwrap_or(1),
            global_at: None,
        }
    }
}

/// Common state of all writers: the temporary file, and the progress within the current tensor.
struct Progress {
    file: Temporary,
    slots: Vec<Slot>,
    /// Number of tensors begun so far; the last one is current.
    begun: usize,
    written: u64,
    scales_written: u64,
}

/// Bytes of codes or dense values, and of block or row scales, of a planned tensor.
fn sizes(planned: &Planned) -> Result<(u64, u64)> {
    let name = &planned.name;
    if planned.shape.contains(&0) {
        bail!(
            InvalidArgument,
            "'{name}': a dimension of {:?} is 0",
            planned.shape
        );
    }
    let elements = size::product(name, &planned.shape)?;
    if let Some(width) = planned.encoding.element_bytes() {
        return Ok((size::product(name, &[elements, width])? as u64, 0));
    }
    let cols = planned.shape.last().copied().unwrap_or(1);
    match planned.encoding {
        coded @ (Encoding::Nvfp4 | Encoding::Int8) if planned.shape.len() < 2 => bail!(
            InvalidArgument,
            "'{name}': {coded} tensors have at least two dimensions, not shape {:?}",
            planned.shape
        ),
        Encoding::Nvfp4 if !cols.is_multiple_of(BLOCK) => bail!(
            InvalidArgument,
            "'{name}': K = {cols} is not a multiple of {BLOCK}"
        ),
        Encoding::Nvfp4 => Ok(((elements / 2) as u64, (elements / BLOCK) as u64)),
        Encoding::Int8 => Ok((
            elements as u64,
            size::product(name, &[elements / cols, 4])? as u64,
        )),
        other => bail!(
            Unsupported,
            "'{name}': {other} cannot be written; NVFP4, INT8 and the dense encodings can"
        ),
    }
}

/// Refuses to write the directory `place` if one of `paths`, which are being read, is or is inside it.
pub fn check_not_read<'a>(place: &Path, paths: impl IntoIterator<Item = &'a Path>) -> Result<()> {
    let Ok(resolved) = place.canonicalize() else {
        return Ok(());
    };
    for path in paths {
        // A link may lead out of a directory that contains it.
        let folder = path.parent().and_then(|p| p.canonicalize().ok());
        let is_within = |p: &PathBuf| p.starts_with(&resolved);
        if path.canonicalize().is_ok_and(|p| is_within(&p))
            || folder.as_ref().is_some_and(is_within)
        {
            bail!(
                InvalidArgument,
                "{} is the directory of the model being read, or holds it; name another",
                place.display()
            );
        }
    }
    Ok(())
}

/// Refuses plans that name a tensor twice.
fn check_names(plan: &[Planned]) -> Result<()> {
    let mut seen = std::collections::HashSet::with_capacity(plan.len());
    if plan.is_empty() {
        bail!(InvalidArgument, "the plan has no tensors");
    }
    match plan.iter().find(|p| !seen.insert(p.name.as_str())) {
        Some(twice) => Err(err!(
            InvalidArgument,
            "the plan names '{}' twice",
            twice.name
        )),
        None => Ok(()),
    }
}

impl Progress {
    fn new(file: Temporary, slots: Vec<Slot>) -> Self {
        Progress {
            file,
            slots,
            begun: 0,
            written: 0,
            scales_written: 0,
        }
    }

    fn check_whole(&self) -> Result<()> {
        let Some(slot) = self.begun.checked_sub(1).map(|i| &self.slots[i]) else {
            return Ok(());
        };
        if self.written != slot.bytes || self.scales_written != slot.scale_bytes {
            bail!(
                InvalidArgument,
                "'{}' is not whole: {} of {} bytes and {} of {} bytes of scales were written",
                slot.name,
                self.written,
                slot.bytes,
                self.scales_written,
                slot.scale_bytes
            );
        }
        Ok(())
    }

    fn begin(&mut self, name: &str, global: f32) -> Result<()> {
        self.check_whole()?;
        self.next_encoding(name)?;
        let slot = &self.slots[self.begun];
        if slot.encoding == Encoding::Nvfp4 {
            nvfp4::check_global_scale(global).map_err(|e| e.within(format_args!("'{name}'")))?;
        }
        match (slot.encoding, slot.global_at) {
            (Encoding::Nvfp4, Some(at)) => self.file.write_at(&global.to_le_bytes(), at)?,
            (Encoding::Nvfp4, None) if global != 1.0 => bail!(
                InvalidArgument,
                "'{name}': the global scale is {global}, but .dat holds none; quantize with a single-level scale"
            ),
            (encoding, _) if encoding != Encoding::Nvfp4 && global != 1.0 => bail!(
                InvalidArgument,
                "'{name}': {encoding} tensors have no global scale, and {global} was given"
            ),
            _ => {}
        }
        self.begun += 1;
        self.written = 0;
        self.scales_written = 0;
        Ok(())
    }

    /// The current slot. Fails unless it takes dense data, or codes of the given encoding.
    fn current(&self, codes: Option<Encoding>) -> Result<&Slot> {
        let Some(slot) = self.begun.checked_sub(1).map(|i| &self.slots[i]) else {
            bail!(InvalidArgument, "no tensor was begun");
        };
        let takes = Some(slot.encoding).filter(|e| e.element_bytes().is_none());
        if takes != codes {
            bail!(
                InvalidArgument,
                "'{}' was planned as {}",
                slot.name,
                slot.encoding
            );
        }
        Ok(slot)
    }

    fn append(&mut self, bytes: &[u8], scales: &[u8]) -> Result<()> {
        let slot = &self.slots[self.begun - 1];
        let (end, scales_end) = (
            self.written + bytes.len() as u64,
            self.scales_written + scales.len() as u64,
        );
        if end > slot.bytes || scales_end > slot.scale_bytes {
            bail!(
                InvalidArgument,
                "'{}' takes {} bytes and {} bytes of scales; {end} and {scales_end} were given",
                slot.name,
                slot.bytes,
                slot.scale_bytes
            );
        }
        self.file.write_at(bytes, slot.at + self.written)?;
        self.file
            .write_at(scales, slot.scales_at + self.scales_written)?;
        self.written = end;
        self.scales_written = scales_end;
        Ok(())
    }

    fn raw(&mut self, bytes: &[u8]) -> Result<()> {
        self.current(None)?;
        self.append(bytes, &[])
    }

    fn values(&mut self, values: &[f32]) -> Result<()> {
        let slot = self.current(None)?;
        let name = &slot.name;
        let bytes: Vec<u8> = match slot.encoding {
            Encoding::Dense(DType::F32) => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Encoding::Dense(DType::BF16) => values
                .iter()
                .flat_map(|&v| bf16::from_f32(v).to_le_bytes())
                .collect(),
            Encoding::Dense(DType::F16) => {
                if let Some(large) = values
                    .iter()
                    .find(|v| v.is_finite() && f16::from_f32(**v).is_infinite())
                {
                    bail!(InvalidArgument, "'{name}': {large} does not fit in F16");
                }
                values
                    .iter()
                    .flat_map(|&v| f16::from_f32(v).to_le_bytes())
                    .collect()
            }
            other => bail!(
                InvalidArgument,
                "'{name}': values are converted to F32, F16 or BF16, not {other}"
            ),
        };
        self.append(&bytes, &[])
    }

    fn nvfp4(&mut self, codes: &[u8], scales: &[u8]) -> Result<()> {
        let slot = self.current(Some(Encoding::Nvfp4))?;
        if codes.len() != scales.len() * BLOCK / 2 {
            bail!(
                InvalidArgument,
                "'{}': {} code bytes take {} scales, not {}",
                slot.name,
                codes.len(),
                codes.len() * 2 / BLOCK,
                scales.len()
            );
        }
        let blocks = slot.cols / BLOCK;
        let first_row = self.scales_written as usize / blocks;
        nvfp4::check_block_scales(scales, first_row, blocks)
            .map_err(|e| e.within(format_args!("'{}'", slot.name)))?;
        self.append(codes, scales)
    }

    fn int8(&mut self, codes: &[u8], scales: &[f32]) -> Result<()> {
        let slot = self.current(Some(Encoding::Int8))?;
        if codes.len() != scales.len() * slot.cols {
            bail!(
                InvalidArgument,
                "'{}': {} codes in rows of {} take {} scales, not {}",
                slot.name,
                codes.len(),
                slot.cols,
                codes.len() / slot.cols,
                scales.len()
            );
        }
        int8::check_row_scales(scales, self.scales_written as usize / 4)
            .map_err(|e| e.within(format_args!("'{}'", slot.name)))?;
        let bytes: Vec<u8> = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        self.append(codes, &bytes)
    }

    /// The planned encoding of the next tensor, which must be `name`.
    fn next_encoding(&self, name: &str) -> Result<Encoding> {
        match self.slots.get(self.begun) {
            Some(slot) if slot.name == name => Ok(slot.encoding),
            Some(slot) => bail!(
                InvalidArgument,
                "'{name}' was begun where the plan has '{}'",
                slot.name
            ),
            None => bail!(
                InvalidArgument,
                "'{name}' comes after all {} planned tensors",
                self.slots.len()
            ),
        }
    }

    /// Fails unless everything is written, and syncs. The file can then be moved into place.
    fn check_complete(&self) -> Result<()> {
        self.check_whole()?;
        if let Some(next) = self.slots.get(self.begun) {
            bail!(
                InvalidArgument,
                "{} of {} planned tensors were not written, the first is '{}'",
                self.slots.len() - self.begun,
                self.slots.len(),
                next.name
            );
        }
        self.file.sync()
    }
}

/// Implements [`Writer::copy`] by the other methods.
fn copy_entry(
    writer: &mut dyn Writer,
    planned: Encoding,
    source: &dyn Checkpoint,
    entry: &Entry,
) -> Result<()> {
    if planned == Encoding::Nvfp4 {
        writer.begin(&entry.name, source.global_scale(entry)?)?;
    } else {
        writer.begin(&entry.name, 1.0)?;
    }
    if planned == entry.encoding
        && let Some(part) = source.plain(entry)
    {
        return copy_part(source, &part, |bytes| writer.raw(bytes));
    }
    let (all, cols) = (entry.rows(), entry.cols());
    // About a megabyte of f32 at a time.
    let step = ((1 << 18) / cols).clamp(1, all);
    for first in (0..all).step_by(step) {
        let rows = first..all.min(first + step);
        if planned == Encoding::Nvfp4 {
            let mut codes = vec![0; rows.len() * cols / 2];
            let mut scales = vec![0; rows.len() * cols / BLOCK];
            source.rows_nvfp4(entry, rows.clone(), &mut codes, &mut scales)?;
            writer.nvfp4(&codes, &scales)?;
        } else if planned == Encoding::Int8 {
            let mut codes = vec![0; rows.len() * cols];
            let mut scales = vec![0.0; rows.len()];
            source.rows_int8(entry, rows.clone(), &mut codes, &mut scales)?;
            writer.int8(&codes, &scales)?;
        } else {
            let mut values = vec![0.0; rows.len() * cols];
            source.rows_f32(entry, rows.clone(), &mut values)?;
            writer.values(&values)?;
        }
    }
    Ok(())
}

/// Passes the stored bytes of `part` to `write`, about a megabyte at a time.
fn copy_part(
    source: &dyn Checkpoint,
    part: &Part<'_>,
    mut write: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let mut bytes = vec![0; part.bytes.min(1 << 20)];
    for at in (0..part.bytes).step_by(1 << 20) {
        let bytes = &mut bytes[..(part.bytes - at).min(1 << 20)];
        source.read_part(part, at, bytes)?;
        write(bytes)?;
    }
    Ok(())
}

/// Files of the tokenizer and of embeddings, as names and contents, that go with a rewritten model.
fn companion_files(metadata: &Metadata) -> Result<Vec<(String, Vec<u8>)>> {
    let mut files = metadata.embedding.clone();
    if let Some((source, directory)) = metadata.tokenizer.files() {
        files.extend(read_present(&source, directory, &TOKENIZER_FILES)?);
        list_templates(&source, directory, &mut files)?;
    }
    Ok(files)
}

/// Moves a model's two templates from their folder into a list in `tokenizer_config.json`, because files are written without folders.
fn list_templates(
    source: &Files,
    directory: &Path,
    files: &mut Vec<(String, Vec<u8>)>,
) -> Result<()> {
    let Some(tool_use) = source.read(&directory.join(TOOL_TEMPLATE))? else {
        return Ok(());
    };
    let mut taken = |name: &str| {
        let at = files.iter().position(|(file, _)| file == name)?;
        Some(files.remove(at).1)
    };
    let default = taken("chat_template.jinja");
    // This file takes precedence over the list, but not over the two templates.
    taken("chat_template.json");
    let name = "tokenizer_config.json";
    let mut config: serde_json::Value = match taken(name) {
        Some(content) => serde_json::from_slice(&content)
            .map_err(|e| err!(CorruptFile, "{}: {e}", directory.join(name).display()))?,
        None => serde_json::json!({}),
    };
    let listed = [("default", default), ("tool_use", Some(tool_use))];
    let listed = listed.into_iter().filter_map(|(name, template)| {
        let template = String::from_utf8_lossy(&template?).into_owned();
        Some(serde_json::json!({"name": name, "template": template}))
    });
    config["chat_template"] = listed.collect();
    let text =
        serde_json::to_vec_pretty(&config).map_err(|e| err!(Internal, "writing {name}: {e}"))?;
    files.push((name.to_owned(), text));
    Ok(())
}

/// Writes the files that a `.dat` in `directory` needs beside it: `config.json` from `metadata`, its tokenizer's files and those of
/// embeddings, and the files in `extra`, which take precedence. Existing files must have the same content: another model's files are not replaced, and the `.dat` must
/// not be read with them.
pub fn write_companions(
    directory: &Path,
    metadata: &Metadata,
    extra: &[(String, Vec<u8>)],
) -> Result<()> {
    let missing = missing_companions(directory, metadata, extra)?;
    for (path, _) in &missing {
        file::make_folder_of(path)?;
    }
    let staged = missing
        .iter()
        .map(|(path, content)| file::stage(path, content))
        .collect::<Result<Vec<_>>>()?;
    staged.into_iter().try_for_each(Temporary::commit)
}

/// The files that [`write_companions`] would write. Lets callers find a conflict before the work.
pub fn missing_companions(
    directory: &Path,
    metadata: &Metadata,
    extra: &[(String, Vec<u8>)],
) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut files = extra.to_vec();
    let mut offered = companion_files(metadata)?;
    if let Some(config) = &metadata.config {
        let mut config = config.clone();
        if let Some(config) = config.as_object_mut() {
            // It describes the quantization of the source.
            config.shift_remove("quantization_config");
        }
        let text = serde_json::to_vec_pretty(&config)
            .map_err(|e| err!(Internal, "writing config.json: {e}"))?;
        offered.push((CONFIG.to_owned(), text));
    }
    for (name, content) in offered {
        if files.iter().all(|(taken, _)| *taken != name) {
            files.push((name, content));
        }
    }
    let mut missing = Vec::with_capacity(files.len());
    for (name, content) in &files {
        let path = directory.join(name);
        match file::read(&path) {
            Ok(existing) if same_content(&existing, content) => {}
            Ok(_) => bail!(
                InvalidArgument,
                "{} is already there and differs; write to another directory",
                path.display()
            ),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                missing.push((path, content.clone()));
            }
            Err(e) => return Err(Error::io(format_args!("reading {}", path.display()), e)),
        }
    }
    let read = TOKENIZER_FILES.iter().chain(&EMBEDDING_FILES);
    for name in read.chain([&CONFIG]) {
        let path = directory.join(name);
        if files.iter().all(|(own, _)| own != name) && path.exists() {
            bail!(
                InvalidArgument,
                "{} is already there, and the model that is written has no such file; write to another directory",
                path.display()
            );
        }
    }
    Ok(missing)
}

/// Name of the file that describes a model.
const CONFIG: &str = "config.json";

/// Whether two files agree: equal bytes, or equal JSON apart from the quantization of their source.
fn same_content(a: &[u8], b: &[u8]) -> bool {
    let json = |bytes: &[u8]| {
        let mut value: serde_json::Value =
            serde_json::from_slice(&with_tagged_floats(bytes)).ok()?;
        value.as_object_mut()?.shift_remove("quantization_config");
        Some(value)
    };
    a == b || json(a).is_some_and(|a| json(b) == Some(a))
}
